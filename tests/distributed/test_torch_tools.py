"""PyTorch's own tools on modules that thunder or PyTorch distribute, over layouts x tools: parameters, gradients and
optimizer states are DTensors, so that what the tools compute is that of one process."""

import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import thunder
from tests.distributed.test_layouts_and_models import BOUND, LAYOUTS, MODELS, OF_MODELS, WORDS, build, full
from tests.distributed.training import close
from thunder.distributed import FSDPType, fsdp
from thunder.distributed.boundary import local_of

WHOLE = torchs.StateDictOptions(full_state_dict=True)


# ---------------------------------------------------------------- tools: (module, where) -> results by name


def parameters_of(module):
    return {name: full(p.detach()) for name, p in module.named_parameters()}


def by_kind(parameters):
    """Those that are DTensors, those that are not: PyTorch's foreach operations take one kind."""
    kinds: dict = {}
    for p in parameters:
        kinds.setdefault(isinstance(p, DTensor), []).append(p)
    return list(kinds.values())


def clips(module, where, *, norm_type, foreach):
    """Those of one kind together, as PyTorch asks for."""
    norms = [
        torch.nn.utils.clip_grad_norm_(ps, 0.01, norm_type, foreach=foreach) for ps in by_kind(module.parameters())
    ]
    total = torch.linalg.vector_norm(torch.stack([full(norm) for norm in norms]), norm_type)
    scaled = {name: full(p.grad) for name, p in module.named_parameters()} if len(norms) == 1 else {}
    return {"norm": total} | scaled


def optimizes(module, where, *, kind, matrices=False, **options):
    """Two steps: weights and states."""
    chosen = [p for p in module.parameters() if p.ndim == 2 or not matrices]
    optimizers = [kind(ps, lr=0.05, **options) for ps in by_kind(chosen)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    states = {}
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            name = next(name for name, q in module.named_parameters() if q is p)
            states |= {f"{k} of {name}": full(v) for k, v in state.items() if isinstance(v, torch.Tensor)}
    return parameters_of(module) | states


def averages(module, where):
    """An exponential average of the weights, while they are trained."""
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=average)
    for _ in range(3):
        for optimizer in [torch.optim.SGD(ps, lr=0.1) for ps in by_kind(module.parameters())]:
            optimizer.step()
        averaged.update_parameters(module)
    return parameters_of(averaged)


def trained(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, foreach=False)
    optimizer.step()
    return optimizer


def leaves(state):
    return {
        f"{k} of {name}": v for name, values in state["optimizer"]["state"].items() for k, v in values.items()
    } | state["model"]


def state_of(module, optimizer, options=None):
    model, states = torchs.get_state_dict(module, optimizer, options=options)
    return {"model": model, "optimizer": states}


def whole_states(module, where):
    """Full state dicts; and back, from the first rank."""
    state = copy.deepcopy(state_of(module, trained(module), WHOLE))
    with torch.no_grad():
        for p in module.parameters():
            local_of(p).zero_()
    torchs.set_model_state_dict(module, copy.deepcopy(state["model"]), options=WHOLE)
    for name, p in parameters_of(module).items():
        close(p, state["model"][name], f"{name}, loaded", 0.0)
    return leaves(state)


def shards_in_files(module, where):
    """Sharded state dicts, written by PyTorch and read by one process."""
    folder, model, is_alone = where
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        return _read_alone(module, folder, model, is_alone)


def _read_alone(module, folder, model, is_alone):
    dcp.save(state_of(module, trained(module)), checkpoint_id=folder, no_dist=is_alone)
    alone = build(model)
    for p in alone.parameters():
        p.grad = torch.zeros_like(p)
    read = state_of(alone, trained(alone), WHOLE)
    dcp.load(read, checkpoint_id=folder, no_dist=True)
    return leaves(read)


def all_of(kind, **options):
    return functools.partial(optimizes, kind=kind, **options)


TOOLS = {
    "clip 2": functools.partial(clips, norm_type=2.0, foreach=True),
    "clip inf": functools.partial(clips, norm_type=float("inf"), foreach=False),
    "clip 1": functools.partial(clips, norm_type=1.0, foreach=None),
    "SGD": all_of(torch.optim.SGD, momentum=0.9, foreach=True),
    "AdamW foreach": all_of(torch.optim.AdamW, foreach=True, amsgrad=True),
    "AdamW fused": all_of(torch.optim.AdamW, fused=True),
    "AdamW loop": all_of(torch.optim.AdamW, foreach=False, fused=False),
    "Adagrad": all_of(torch.optim.Adagrad, foreach=True),
    "RMSprop": all_of(torch.optim.RMSprop, foreach=True, centered=True),
    "NAdam": all_of(torch.optim.NAdam, foreach=True),
    "Adafactor": all_of(torch.optim.Adafactor),
    "Muon": all_of(torch.optim.Muon, matrices=True),
    "EMA": averages,
    "full state dicts": whole_states,
    "sharded state dicts": shards_in_files,
}


# ---------------------------------------------------------------- layouts x tools


def locals_of(module):
    return [local_of(x) for p in module.parameters() for x in (p.detach(), p.grad)]


def outcome(tool, module, where):
    """What a tool gives, or the error that it raises; the module is as before."""
    before = [x.clone() for x in locals_of(module)]
    try:
        return {name: x.detach().clone() for name, x in tool(module, where).items()}, None
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        return {}, error
    finally:
        with torch.no_grad():
            for x, old in zip(locals_of(module), before, strict=True):
                x.copy_(old)


def as_torchs(model, module):
    """The model with DTensors of PyTorch's, which hold what a module's hold."""
    theirs = build(model)
    for name, p in module.named_parameters():
        owner, _, last = name.rpartition(".")
        values = [local_of(x).clone() for x in (p.detach(), p.grad)]
        if isinstance(p, DTensor):
            values = [
                DTensor.from_local(x, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()) for x in values
            ]
        own = torch.nn.Parameter(values[0])
        own.grad = values[1]
        setattr(theirs.get_submodule(owner), last, own)
    return theirs


def uses(rank, size, layout, model, names, folder):
    """Each tool after a backward: equal to one process, or PyTorch's error on DTensors of its own. Returns the tools
    that PyTorch refuses."""
    _, sharing, prepare = LAYOUTS[layout]
    one, module = build(model), prepare(build(model), size)
    compiled = thunder.jit(module, fallback="error", executors=[])
    x = torch.arange(64).view(4, 16) * 7 % WORDS
    one(x).backward()
    same = sharing(size)
    compiled(x.chunk(size // same)[rank // same]).backward()
    theirs, refused = as_torchs(model, module), []
    for number, name in enumerate(names):
        results = {}
        for which, m in (("ours", module), ("torch", theirs), ("one", one)):
            path = f"{folder}/{number} {which}" + (f" {rank}" if which == "one" else "")
            results[which] = outcome(TOOLS[name], m, (path, model, which == "one"))
            if which != "one":
                dist.barrier()
        (ours, error), (torchs_own, their_error), (wanted, _) = results.values()
        if error is not None and isinstance(module, FSDPModule) and "FSDP does not support" in str(error):
            refused.append(name)  # by a module that `fully_shard` has prepared
            continue
        if error is not None:
            assert their_error is not None, f"{name} fails where PyTorch's own does not: {error!r}"
            assert type(error) is type(their_error), (name, error, their_error)
            assert str(error).split("(")[0] == str(their_error).split("(")[0], (name, error, their_error)
            refused.append(name)
            continue
        if name == "Muon":  # computes in bfloat16, where sums over ranks round otherwise than those of one process
            assert all(torch.equal(ours[k], torchs_own[k]) for k in torchs_own), name
        shared = ours.keys() & wanted.keys()
        assert shared and (len(ours) == len(wanted) or name.startswith("clip")), (name, ours.keys() ^ wanted.keys())
        for key in shared:
            bound = 0.05 if name == "Muon" else BOUND
            close(ours[key].double(), wanted[key].double(), f"{key} of {name} under {layout}", bound)
    return refused


SOME = ["zero3", "sp", "fully_shard"]


def shown(ranks, layout, model, folder):
    size = LAYOUTS[layout][0][0]
    refused = ranks(size)(uses, layout, model, list(TOOLS), str(folder), timeout=300.0)
    assert refused == [refused[0]] * size
    print(f"{layout:34} {model:8} {len(TOOLS) - len(refused[0])} equal, refused by PyTorch: {refused[0]}")


@pytest.mark.parametrize("layout", SOME)
def test_tools(ranks, layout, tmp_path):
    shown(ranks, layout, "grouped", tmp_path)


@pytest.mark.slow  # all of them; the default suite has three
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in OF_MODELS])
def test_all_tools(ranks, layout, model, tmp_path):
    shown(ranks, layout, model, tmp_path)


# ---------------------------------------------------------------- DTensors of modules


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
    actual = thunder.jit(copied, executors=[])(x.double())
    assert torch.equal(actual, compiled(x.double()))


def test_parameters_and_gradients_are_dtensors(ranks):
    ranks(2)(dtensors)
