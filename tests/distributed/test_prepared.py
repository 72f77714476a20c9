"""Modules that PyTorch has prepared are compiled as they are: fully_shard, parallelize_module, distribute_module."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import thunder
from tests.distributed.training import batches, close
from thunder.errors import CaptureError


class Block(torch.nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        # the gradient of k's bias is zero: softmax does not see it
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=name != "k") for name in "qkvo")
        self.up, self.down = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x):
        y = self.first(x)
        q, k, v = (m(y).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Language(torch.nn.Module):
    def __init__(self, hidden=16, words=12):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(words, 8)
        self.blocks = torch.nn.ModuleList(Block(hidden=hidden) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(8), torch.nn.Linear(8, words, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss(module, tokens):
    return torch.nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def trains(module, one, of_rank, clip=False):
    """Losses, gradients and weights are those of one process, with one program. Returns the compiled module."""
    compiled = thunder.jit(module, executors=[])
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in one.named_parameters()]
    # plain parameters beside DTensors: foreach takes no such list
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, foreach=False) for m in (compiled, one)]
    for tokens in batches(1, torch.float64, lambda g: torch.randint(0, 11, (4, 6), generator=g), steps=3):
        losses = loss(compiled, of_rank(tokens)), loss(one, tokens)
        for value in losses:
            value.backward()
        if clip:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (compiled, one)]
            close(whole(norms[0]), norms[1], "norm")
        for (name, p), q in zip(compiled.named_parameters(), one.named_parameters(), strict=True):
            assert p.grad is not None and type(p.grad) is type(p.data), name
            close(whole(p.grad), q[1].grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(compiled.named_parameters(), one.named_parameters(), strict=True):
            close(whole(p.detach()), q[1].detach(), name, 1e-11)
    assert thunder.cache_misses(compiled) == 1 and len(compiled.programs) == 1
    return compiled


def names(compiled, backward=False):
    trace = (thunder.last_backward_traces if backward else thunder.last_traces)(compiled)[-1]
    kinds = [b.sym.name.removesuffix("_impl") for b in trace.bound_symbols]
    return [kind for kind in kinds if kind.startswith(("all_", "reduce_"))]


# ---------------------------------------------------------------- fully_shard


def sharded(module, mesh=None, **options):
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def under_fully_shard(rank, size):
    mine = Language(hidden=15, words=11).double()  # which the ranks do not divide
    compiled = trains(sharded(mine), Language(hidden=15, words=11).double(), lambda x: x.chunk(size)[rank], clip=True)
    # one collective for each group, and blocks are gathered again
    assert names(compiled) == ["all_gather_together"] * 3
    assert names(compiled, backward=True).count("reduce_scatter_together") == 3
    assert "all_gather_together" in names(compiled, backward=True)


def under_hsdp(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compiled = trains(sharded(Language().double(), mesh), Language().double(), lambda x: x.chunk(size)[rank])
    assert names(compiled, backward=True).count("all_reduce_together") == 3


def along_another_dimension(rank, size):
    mine = sharded(Language().double(), shard_placement_fn=lambda p: Shard(p.ndim - 1), reshard_after_forward=False)
    compiled = trains(mine, Language().double(), lambda x: x.chunk(size)[rank])
    assert not any(name.startswith("all_gather") for name in names(compiled, backward=True))


def loads_and_gives(compiled, state):
    """A compiled module loads a whole state dict, and gives the same back."""
    compiled.load_original_state_dict(state)
    state_dict = compiled.original_state_dict()
    for name, value in state.items():
        assert torch.equal(state_dict[name], value), name


def accumulates(rank, size):
    """Gradients of two batches, synchronised once, and whole state dicts."""
    mine = sharded(Language().double(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    compiled, one = thunder.jit(mine, executors=[]), Language().double()
    first, second = batches(1, torch.float64, lambda g: torch.randint(0, 12, (4, 6), generator=g), steps=2)
    with compiled.no_sync():
        loss(compiled, first.chunk(size)[rank]).backward()
    loss(compiled, second.chunk(size)[rank]).backward()
    for tokens in (first, second):
        loss(one, tokens).backward()
    for (name, p), q in zip(compiled.named_parameters(), one.parameters(), strict=True):
        close(whole(p.grad), q.grad, name)
    with torch.no_grad():
        one.head.weight.mul_(2)
    loads_and_gives(compiled, one.state_dict())


def test_fully_shard(ranks):
    ranks(2)(under_fully_shard)
    ranks(2)(accumulates)
    ranks(2)(along_another_dimension)


def test_fully_shard_over_replicas(ranks):
    ranks(4)(under_hsdp)


def in_two_types(rank, size):
    """Beside `fully_shard` in eager, whose roundings are the same: sums of two."""
    policies = [MixedPrecisionPolicy(torch.float32, torch.float64, dtype) for dtype in (None, torch.float64)]
    mine, theirs = Language().double(), Language().double()
    for module in (mine, theirs):
        for block in module.blocks:
            fully_shard(block, mp_policy=policies[0])
        fully_shard(module, mp_policy=policies[1])
    compiled = thunder.jit(mine, executors=[])
    tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(rank))
    outputs = [m(tokens) for m in (compiled, theirs)]
    assert outputs[0].dtype is torch.float64 and torch.equal(*outputs)
    for y in outputs:
        y.square().mean().backward()
    for (name, p), q in zip(compiled.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad.dtype is torch.float64
        close(whole(p.grad), whole(q.grad), name, 1e-6)


def test_fully_shard_in_mixed_precision(ranks):
    ranks(2)(in_two_types)


def with_other_options(rank, size):
    """What is changed behind `thunder.jit` is followed, or refused."""
    mine = sharded(Language().double())
    compiled, one = thunder.jit(mine, executors=[]), Language().double()
    tokens = batches(1, torch.float64, lambda g: torch.randint(0, 12, (4, 6), generator=g), steps=1)[0]
    for again in (True, False, True):  # the last one with the first program
        mine.set_reshard_after_forward(again)
        for module, part in ((compiled, tokens.chunk(size)[rank]), (one, tokens)):
            module.zero_grad()
            loss(module, part).backward()
        if len(compiled.programs) == 2 - again:
            assert ("all_gather_together" in names(compiled, backward=True)) is again
        for (name, p), q in zip(compiled.named_parameters(), one.parameters(), strict=True):
            close(whole(p.grad), q.grad, name)
    assert len(compiled.programs) == 2
    for change, back, words in (
        (lambda: mine.set_requires_gradient_sync(False), lambda: mine.set_requires_gradient_sync(True), "gradient_syn"),
        (lambda: mine.set_gradient_divide_factor(3.0), lambda: mine.set_gradient_divide_factor(None), "divide_factor"),
    ):
        change()
        with pytest.raises(CaptureError, match=words):
            compiled(tokens)
        back()
    compiled(tokens.chunk(size)[rank])
    assert len(compiled.programs) == 2


def test_options_of_fully_shard_that_change(ranks):
    ranks(2)(with_other_options)


# ---------------------------------------------------------------- parallelize_module

LAYERS = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel),
    **dict.fromkeys(("o", "down"), RowwiseParallel),
}
ENDS = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def of_blocks(layers):
    return {f"blocks.{i}.{name}": layer for i in range(2) for name, layer in layers.items()}


def parallel(module, mesh):
    return parallelize_module(module, mesh, of_blocks({name: kind() for name, kind in LAYERS.items()}) | ENDS)


def under_tensor_parallel(rank, size):
    mine = parallel(Language().double(), init_device_mesh("cpu", (size,)))
    compiled = trains(mine, Language().double(), lambda x: x)
    # an embedding, and two layers of each block, are summed; the head is joined
    assert names(compiled) == ["all_reduce"] * 5 + ["all_gather"]
    # what q, k and v read, what up reads, and what the head reads
    assert names(compiled, backward=True).count("all_reduce") == 5


@pytest.mark.parametrize("size", [2, 4])
def test_parallelize_module(ranks, size):
    ranks(size)(under_tensor_parallel)


def with_sequences(module, mesh):
    """Norms and residual sums on parts of sequences."""
    layers = {
        **dict.fromkeys(("first", "second"), SequenceParallel(use_local_output=True)),
        **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=Shard(1))),
        **dict.fromkeys(("o", "down"), RowwiseParallel(output_layouts=Shard(1))),
    }
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(module, mesh, of_blocks(layers) | ends)


def under_sequence_parallel(rank, size):
    mine = with_sequences(Language().double(), init_device_mesh("cpu", (size,)))
    compiled = trains(mine, Language().double(), lambda x: x)
    assert names(compiled).count("reduce_scatter") == 5 and "all_reduce" not in names(compiled), names(compiled)


def test_sequence_parallel(ranks):
    ranks(2)(under_sequence_parallel)


def under_both(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    mine = sharded(parallel(Language().double(), mesh["layers"]), mesh["data"])
    part = lambda x: x.chunk(2)[mesh.get_local_rank("data")]
    compiled, one = trains(mine, Language().double(), part), Language().double()
    loads_and_gives(compiled, one.state_dict())


def test_fully_shard_and_parallelize_module_on_a_mesh(ranks):
    ranks(4)(under_both)


class Prepares(torch.nn.Module):
    """A module whose inputs its parent prepares."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))

    def forward(self, x):
        return x + self.layers(x)


def with_prepared_inputs(rank, size):
    mesh, one = init_device_mesh("cpu", (size,)), Prepares().double()
    plan = {
        "layers": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "layers.0": ColwiseParallel(use_local_output=False),
        "layers.2": RowwiseParallel(),
    }
    mine = thunder.jit(parallelize_module(Prepares().double(), mesh, plan), executors=[])
    x = batches(1, torch.float64)[0]
    for module in (mine, one):
        module(x).square().mean().backward()
    for (name, p), q in zip(mine.named_parameters(), one.parameters(), strict=True):
        close(whole(p.grad), q.grad, name)


def by_hand(module, mesh):
    """`distribute_module` with functions of the user's."""

    def partition(name, inner, mesh):
        for key, p in list(inner.named_parameters(recurse=False)):
            dims = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
            dim = dims.get(f"{name.rpartition('.')[2]}.{key}")
            placement = Replicate() if dim is None else Shard(dim)
            inner.register_parameter(key, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))

    return distribute_module(
        module,
        mesh,
        partition,
        lambda m, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()]) for x in inputs),
        lambda m, output, mesh: output.redistribute(mesh, [Replicate()]).to_local(),
    )


def by_distribute_module(rank, size):
    mesh, one = init_device_mesh("cpu", (size,)), Prepares().double()
    mine = thunder.jit(by_hand(Prepares().double(), mesh), executors=[])
    x = batches(1, torch.float64)[0]
    for module in (mine, one):
        module(x).square().mean().backward()
    for (name, p), q in zip(mine.named_parameters(), one.parameters(), strict=True):
        close(whole(p.grad), q.grad, name)
    assert names(mine) == ["all_reduce"]


def test_other_styles(ranks):
    ranks(2)(with_prepared_inputs)
    ranks(2)(by_distribute_module)


def returns_dtensors(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    one = torch.nn.Linear(4, 6)
    mine = parallelize_module(copy.deepcopy(one), mesh, ColwiseParallel(use_local_output=False))
    compiled, x = thunder.jit(mine, fallback="error", executors=[]), torch.ones(2, 4)
    y = compiled(x)
    assert isinstance(y, DTensor) and y.placements == (Shard(1),)
    close(y.full_tensor().detach(), one(x).detach(), "a result")
    y.full_tensor().square().mean().backward()
    one(x).square().mean().backward()
    for p, q in zip(compiled.parameters(), one.parameters(), strict=True):
        close(whole(p.grad), q.grad, "a gradient")


def test_modules_that_return_dtensors(ranks):
    ranks(2)(returns_dtensors)


# ---------------------------------------------------------------- refused


def refusals(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    with pytest.raises(NotImplementedError, match="under fully_shard with a CPU offload policy"):
        thunder.jit(fully_shard(torch.nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, [Partial()]))
    with pytest.raises(NotImplementedError, match="parameter weight is a partial DTensor"):
        thunder.jit(layer)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "1": PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Replicate()),
    }
    with pytest.raises(CaptureError, match="draws random numbers"):
        thunder.jit(parallelize_module(layers, mesh, plan), fallback="error")(torch.ones(2, 4))


def test_what_programs_do_not_communicate_is_refused(ranks):
    ranks(2)(refusals)
