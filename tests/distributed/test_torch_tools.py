"""PyTorch's own tools on modules that thunder distributes: parameters, gradients and optimizer states are DTensors, so
that what they compute is that of one process."""

import copy
import itertools

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import thunder
from tests.distributed.training import batches, close
from thunder.distributed import FSDPType, column_parallel, ddp, fsdp, row_parallel


class Net(torch.nn.Module):
    """Sizes that do not come out even over 2 or 4 ranks, a parameter without dimensions, layers to split."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8, bias=False)
        self.last, self.scale = torch.nn.Linear(8, 5), torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.full((5,), 0.25))

    def forward(self, x):
        y = self.norm(torch.tanh(self.first(x)))
        return self.last(y + self.down(torch.nn.functional.gelu(self.up(y)))) * self.scale + self.offset


def split(module, group=None):
    return row_parallel(column_parallel(module, ["up"], group), ["down"], group)


def hsdp(module, size):
    return fsdp(module, process_group=init_device_mesh("cpu", (2, size // 2)), sharding_strategy=FSDPType.ZERO3)


def over(outer):
    def prepare(module, size):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        return outer(split(module, mesh["tp"]), process_group=mesh["dp"])

    return prepare


LAYOUTS = {
    "ddp": lambda m, size: ddp(m),
    "zero2": lambda m, size: fsdp(m),
    "zero3": lambda m, size: fsdp(m, sharding_strategy=FSDPType.ZERO3),
    "tp": lambda m, size: split(m),
    "hsdp": hsdp,
    "fsdp x tp": over(fsdp),
    "ddp x tp": over(ddp),
}


def part_of_rank(layout, rank, size):
    """(x) -> what a rank computes of the data of all."""
    ranks, index = {"tp": (1, 0), "fsdp x tp": (2, rank // (size // 2)), "ddp x tp": (2, rank // (size // 2))}.get(
        layout, (size, rank)
    )
    return lambda x: x.chunk(ranks)[index]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
}


def trains(rank, size, layout, name):
    """Steps with clipping, with PyTorch's optimizer, and with an average of the weights."""
    module, one = Net().double(), Net().double()
    compiled = thunder.jit(LAYOUTS[layout](module, size), executors=[])
    kind, options = OPTIMIZERS[name]
    optimizers = [kind(m.parameters(), lr=0.05, **options) for m in (compiled, one)]
    averaged = [torch.optim.swa_utils.AveragedModel(m) for m in (module, one)]
    part = part_of_rank(layout, rank, size)
    for x in batches(size, torch.float64, steps=3):
        compiled(part(x)).square().mean().backward()
        one(x).square().mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (compiled, one)]
        close(whole(norms[0]), norms[1], "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for average, m in zip(averaged, (module, one), strict=True):
            average.update_parameters(m)
    for (key, p), q in zip(module.named_parameters(), one.parameters(), strict=True):
        close(whole(p.detach()), q.detach(), key)
    for p, q in zip(*(average.parameters() for average in averaged), strict=True):
        close(whole(p.detach()), q.detach(), "an average")
    states(module, one, *optimizers)
    return thunder.cache_misses(compiled)


def states(module, one, *optimizers):
    """Full state dicts of PyTorch's are those of one process."""
    options = dcp_state.StateDictOptions(full_state_dict=True)
    found, wanted = (dcp_state.get_model_state_dict(m, options=options) for m in (module, one))
    assert found.keys() == wanted.keys()
    for key in wanted:
        close(found[key], wanted[key], key)
    found, wanted = (
        dcp_state.get_optimizer_state_dict(m, o, options=options)["state"]
        for m, o in zip((module, one), optimizers, strict=True)
    )
    assert found.keys() == wanted.keys()
    for key, name in itertools.chain.from_iterable(((k, n) for n in wanted[k]) for k in wanted):
        close(found[key][name].double(), wanted[key][name].double(), f"{name} of {key}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_clipping_and_state_dicts(ranks, name):
    assert ranks(2)(trains, "zero3", name) == [1, 1]


def adafactor_steps(module):
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.05)
    module(torch.ones(4, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    return [whole(p.detach()) for p in module.parameters()]


def adafactor(rank, size):
    """Equal to one process, or PyTorch's error where its own `fully_shard` has that."""
    wanted = adafactor_steps(layers())
    try:
        found = adafactor_steps(thunder.jit(fsdp(layers()), executors=[]))
    except RuntimeError as error:
        with pytest.raises(RuntimeError) as caught:
            adafactor_steps(fully_shard(layers(), mesh=init_device_mesh("cpu", (size,))))
        assert type(caught.value) is type(error) and str(caught.value).split("(")[0] == str(error).split("(")[0]
        return
    for p, q in zip(found, wanted, strict=True):
        close(p, q, "a parameter")


def muon(rank, size):
    """It computes in bfloat16, in which sums over ranks round otherwise than those of one process: bit for bit as on
    `fully_shard`, for the same gradients."""
    mine = fsdp(layers())
    theirs = fully_shard(layers(), mesh=mine[0].weight.device_mesh)
    found = []
    for module in (mine, theirs):
        weights = [p for p in module.parameters() if p.ndim == 2]
        for i, p in enumerate(weights):
            generator = torch.Generator().manual_seed(i)
            whole_gradient = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.grad = distribute_tensor(whole_gradient, p.device_mesh, p.placements)
        before = [whole(p.detach()).clone() for p in weights]
        torch.optim.Muon(weights, lr=0.05).step()
        found.append([whole(p.detach()) for p in weights])
        assert not any(map(torch.equal, before, found[-1]))
    assert all(map(torch.equal, *found))


def test_muon_as_on_fully_shard(ranks):
    ranks(2)(muon)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)).double()


def test_adafactor_as_on_fully_shard(ranks):
    ranks(2)(adafactor)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "zero3"])
def test_all_layouts(ranks, layout):
    size = 4 if layout in ("hsdp", "fsdp x tp", "ddp x tp", "zero2") else 2
    assert ranks(size)(trains, layout, "AdamW") == [1] * size


def dtensors(rank, size):
    # a name that no other test gives: PyTorch's operations on DTensors remember the first of meshes that are equal
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("of_this_test",))
    before = Net()
    old, shapes = list(before.parameters()), {n: p.shape for n, p in before.named_parameters()}
    module = fsdp(before, process_group=mesh, sharding_strategy=FSDPType.ZERO3)
    compiled = thunder.jit(module, executors=[])
    for name, p in module.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p, torch.nn.Parameter) and p.shape == shapes[name]
        assert p.device_mesh is mesh and p.is_leaf
    x = torch.randn(4, 6)
    compiled(x).sum().backward()
    assert all(isinstance(p.grad, DTensor) and p.grad.placements == p.placements for p in module.parameters())
    with pytest.raises(thunder.errors.CaptureError, match="parameter first.weight before the module was distributed"):
        thunder.jit(lambda x: x @ old[1].t(), executors=[])(x)  # made before, and no part of the module
    loss = compiled(x).sum()
    with torch.no_grad():
        module.last.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    again = module.double()
    assert again.last.weight.dtype is torch.float64 and isinstance(again.last.weight, DTensor)
    assert compiled(x.double()).dtype is torch.float64
    copied = copy.deepcopy(module)
    found = thunder.jit(copied, executors=[])(x.double())
    assert torch.equal(found, compiled(x.double()))


def test_parameters_and_gradients_are_dtensors(ranks):
    ranks(2)(dtensors)
