"""Layouts x models: five steps of training under each layout, prepared by thunder or by PyTorch, called as modules and
as whole steps, are those of one process: losses, gradients and weights."""

import collections

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # its operation
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import thunder
from tests.distributed.training import batches, close
from thunder.distributed import (
    FSDPBucketingStrategy,
    FSDPType,
    column_parallel,
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    row_parallel,
)

F = torch.nn.functional
WIDTH, INNER, WORDS, STEPS = 16, 24, 16, 5  # which 8 ranks divide
BOUND = 1e-11  # relative, in float64; roundings of five steps of AdamW


class Attention(torch.nn.Module):
    def __init__(self, bias, rotates, causal):
        super().__init__()
        self.rotates, self.causal = rotates, causal
        # softmax does not see a bias of k, whose gradient is a rounding
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH, bias=bias and n != "k") for n in "qkvo")

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.rotates:
            angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            q, k = (y * angles.cos() + torch.stack([-y[..., 1], y[..., 0]], -1) * angles.sin() for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).flatten(-2))


class Gelu(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(torch.nn.Module):
    """Two of three experts for each token, which all compute."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(WIDTH, 3, bias=False), torch.nn.ModuleList(Gated() for _ in "123")

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        shares = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        return sum(expert(x) * shares[..., i : i + 1] for i, expert in enumerate(self.experts))


class Grouped(torch.nn.Module):
    """Two of eight experts for each token, by grouped products of rows that are sorted by expert, as transformers
    writes them; in float64 by its loop."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(WIDTH, 8, bias=False), torch.nn.Module()
        self.experts.up = torch.nn.Parameter(torch.randn(8, WIDTH, 2 * INNER) / 3)
        self.experts.down = torch.nn.Parameter(torch.randn(8, INNER, WIDTH) / 3)

    def forward(self, x):
        product = torch.ops.transformers.grouped_mm_fallback
        weights, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        ends = F.one_hot(chosen.flatten(), 8).sum(0).cumsum(0).int()
        gate, up = product(x.flatten(0, 1)[order // 2], self.experts.up, ends).chunk(2, -1)
        y = product(F.silu(gate) * up, self.experts.down, ends) * weights.flatten()[order][:, None]
        return y[order.argsort()].unflatten(0, (-1, 2)).sum(1).view_as(x)


class Block(torch.nn.Module):
    def __init__(self, norm, attention, mlp):
        super().__init__()
        self.first, self.attention, self.second, self.mlp = norm(WIDTH), attention, norm(WIDTH), mlp

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Language(torch.nn.Module):
    def __init__(self, norm, attention, mlp):
        super().__init__()
        self.tokens = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(norm, attention(), mlp()) for _ in range(2))
        self.norm, self.head = norm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

    def logits(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Vision(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(1, WIDTH, 2, 2)
        self.token, self.places = (torch.nn.Parameter(torch.randn(1, n, WIDTH)) for n in (4, 8))
        self.blocks = torch.nn.ModuleList(
            Block(torch.nn.LayerNorm, Attention(True, False, False), Gelu()) for _ in range(2)
        )
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 5)

    def logits(self, tokens):
        images = torch.cos(tokens[:, :16].to(self.places.dtype) * 3).unflatten(1, (1, 4, 4))
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def forward(self, tokens):
        return F.cross_entropy(self.logits(tokens), tokens[:, 0] % 5)


RMS = torch.nn.RMSNorm
MODELS = {
    "gpt": lambda: Language(torch.nn.LayerNorm, lambda: Attention(True, False, True), Gelu),
    "llama": lambda: Language(RMS, lambda: Attention(False, True, True), Gated),
    "experts": lambda: Language(RMS, lambda: Attention(False, True, True), Experts),
    "grouped": lambda: Language(RMS, lambda: Attention(False, True, True), Grouped),
    "vision": Vision,
}


def build(model):
    torch.manual_seed(0)
    return MODELS[model]().double()


# ---------------------------------------------------------------- layouts


def paths(module, names):
    return [n for n, m in module.named_modules() if n.split(".")[-1] in names and isinstance(m, torch.nn.Linear)]


COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def split(module, group=None, **options):
    column_parallel(module, paths(module, COLUMNS), group, **options)
    return row_parallel(module, paths(module, ROWS), group, **options)


def experts(module, group=None):
    return expert_parallel(module, [f"{n}.experts" for n, m in module.named_modules() if isinstance(m, Grouped)], group)


def parallel(module, mesh):
    plan = {n: ColwiseParallel() for n in paths(module, COLUMNS)} | {n: RowwiseParallel() for n in paths(module, ROWS)}
    return parallelize_module(module, mesh, plan)


def sharded(module, mesh=None, **options):
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def over(size):
    return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))


def cube(size):
    return init_device_mesh("cpu", (2, 2, size // 4), mesh_dim_names=("outer", "middle", "inner"))


def parallel_sequences(module, mesh):
    """PyTorch's styles with parts of sequences between layers."""
    plan: dict = {n: ColwiseParallel() for n in paths(module, COLUMNS)}
    plan |= {n: RowwiseParallel(output_layouts=Shard(1)) for n in paths(module, ROWS)}
    for name, inner in module.named_modules():
        if isinstance(inner, (torch.nn.LayerNorm, RMS)):
            plan[name] = SequenceParallel()
        if isinstance(inner, (Attention, Gelu, Gated)):
            plan[name] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(module, mesh, plan)


def all_alone(size):
    return 1


def all_together(size):
    return size


def inner_together(size):
    return size // 2


BLOCKS = {"sharding_strategy": FSDPType.ZERO3, "bucketing_strategy": FSDPBucketingStrategy.BLOCK}
ALL, PRODUCTS = (2, 4, 8), (4, 8)
# name -> (numbers of ranks, how many of them share data, what prepares a module)
LAYOUTS = {
    "ddp": (ALL, all_alone, lambda m, size: ddp(m)),
    "zero2": (ALL, all_alone, lambda m, size: fsdp(m)),
    "zero3": (ALL, all_alone, lambda m, size: fsdp(m, **BLOCKS)),
    "hsdp": (PRODUCTS, all_alone, lambda m, size: fsdp(m, process_group=over(size), **BLOCKS)),
    "tp": (ALL, all_together, lambda m, size: split(m)),
    "sp": (ALL, all_together, lambda m, size: split(m, sequence_dim=1)),
    "zero3 x tp": (
        PRODUCTS, inner_together,
        lambda m, size: fsdp(split(m, over(size)["inner"]), process_group=over(size)["outer"], **BLOCKS),
    ),
    "ddp x tp": (
        PRODUCTS, inner_together, lambda m, size: ddp(split(m, over(size)["inner"]), process_group=over(size)["outer"]),
    ),
    "cp": (ALL, all_together, lambda m, size: context_parallel(m)),
    "tp x cp": (
        PRODUCTS, all_together, lambda m, size: context_parallel(split(m, over(size)["inner"]), over(size)["outer"]),
    ),
    "cp x tp": (
        PRODUCTS, all_together, lambda m, size: split(context_parallel(m, over(size)["outer"]), over(size)["inner"]),
    ),
    "zero3 x cp": (
        PRODUCTS, inner_together,
        lambda m, size: fsdp(context_parallel(m, over(size)["inner"]), process_group=over(size)["outer"], **BLOCKS),
    ),
    "zero3 x cp x tp": (
        (8,), inner_together,
        lambda m, size: fsdp(
            context_parallel(split(m, cube(size)["inner"]), cube(size)["middle"]),
            process_group=cube(size)["outer"], **BLOCKS,
        ),
    ),
    "ep": (ALL, all_alone, lambda m, size: experts(m)),
    "ep x ddp": (
        PRODUCTS, all_alone, lambda m, size: ddp(experts(m, over(size)["inner"]), process_group=over(size)["outer"]),
    ),
    "ep x zero3": (
        PRODUCTS, all_alone,
        lambda m, size: fsdp(experts(m, over(size)["inner"]), process_group=over(size)["outer"], **BLOCKS),
    ),
    "DistributedDataParallel": (ALL, all_alone, lambda m, size: DistributedDataParallel(m)),
    "fully_shard": (ALL, all_alone, lambda m, size: sharded(m)),
    "fully_shard, whole weights": (ALL, all_alone, lambda m, size: sharded(m, reshard_after_forward=False)),
    "fully_shard over replicas": (PRODUCTS, all_alone, lambda m, size: sharded(m, over(size))),
    "parallelize_module": (ALL, all_together, lambda m, size: parallel(m, init_device_mesh("cpu", (size,)))),
    "SequenceParallel": (ALL, all_together, lambda m, size: parallel_sequences(m, init_device_mesh("cpu", (size,)))),
    "fully_shard x parallelize_module": (
        PRODUCTS, inner_together, lambda m, size: sharded(parallel(m, over(size)["inner"]), over(size)["outer"]),
    ),
}  # fmt: skip
OF_MODELS = {"SequenceParallel": ("gpt", "llama")}  # a plan for others would have to name what lies between layers


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def optimizer_of(module):
    """One for DTensors and one for other parameters, which no foreach operation takes together."""
    kinds: dict = {}
    for p in module.parameters():
        kinds.setdefault(isinstance(p, DTensor), []).append(p)
    return [torch.optim.AdamW(ps, lr=0.02) for ps in kinds.values()]


def trains(rank, size, layout, model, whole_step):
    """The largest relative distances of losses, gradients and weights to those of one process."""
    _, sharing, prepare = LAYOUTS[layout]
    sharing = sharing(size)
    one, module = build(model), prepare(build(model), size)
    compiled = thunder.jit(module, fallback="error", executors=[])
    optimizers = [optimizer_of(one), optimizer_of(module)]

    def step(i, call, x):
        for optimizer in optimizers[i]:
            optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        for optimizer in optimizers[i]:
            optimizer.step()
        return loss.detach()

    called = thunder.jit(lambda x: step(1, module, x), fallback="error", executors=[])
    worst = dict.fromkeys(("losses", "gradients", "weights"), 0.0)

    def hold(kind, actual, wanted, what):
        close(actual, wanted, what, BOUND)
        worst[kind] = max(worst[kind], float((actual - wanted).norm() / wanted.norm().clamp(min=1e-300)))

    parts, index = size // sharing, rank // sharing
    data = batches(1, torch.float64, lambda g: torch.randint(0, WORDS, (max(4, parts), 16), generator=g), steps=STEPS)
    for number, x in enumerate(data):
        expected, mine = step(0, one, x), x.chunk(parts)[index]
        actual = called(mine) if whole_step else step(1, compiled, mine)
        torch.distributed.all_reduce(actual)
        hold("losses", actual / size, expected, f"loss {number}")
        for (name, p), q in zip(module.named_parameters(), one.parameters(), strict=True):
            hold("gradients", full(p.grad), q.grad, f"gradient of {name} in step {number}")
            hold("weights", full(p.detach()), q.detach(), f"{name} after step {number}")
    return worst


def shown(ranks, size, layout, model, whole_step):
    distances = ranks(size)(trains, layout, model, whole_step, timeout=400.0)[0]
    kind = "whole step" if whole_step else "module"
    print(
        f"{size} {layout:34} {model:8} {kind:10} " + "  ".join(f"{n} {d:.1e}" for n, d in distances.items()), flush=True
    )


@pytest.mark.parametrize(
    "size, layout, model, whole_step",
    [
        (2, "zero3", "llama", True),
        (2, "DistributedDataParallel", "vision", False),
        (2, "fully_shard", "experts", True),
        (2, "cp", "llama", False),
        (4, "tp x cp", "gpt", False),
        (2, "ep", "grouped", True),
    ],
)
def test_some(ranks, size, layout, model, whole_step):
    shown(ranks, size, layout, model, whole_step)


@pytest.mark.slow  # all of them; the default suite has six
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size, layout", [(size, layout) for layout, (sizes, *_) in LAYOUTS.items() for size in sizes])
def test_all(ranks, size, layout, model):
    if model not in OF_MODELS.get(layout, MODELS):
        pytest.skip(f"{layout} is tried with {' and '.join(OF_MODELS[layout])}")
    for whole_step in (False, True):
        shown(ranks, size, layout, model, whole_step)


def moves(traces):
    """How often each kind of communication starts."""
    names = (b.sym.name.removesuffix("_impl") for t in traces for b in t.bound_symbols)
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "dispatch_rows", "collect_rows")
    return collections.Counter(name for name in names if name.startswith(kinds))


def communicates_as_the_module(rank, size, layout, model):
    """A whole step, of two backwards and an optimizer, computes with parts as a module does: in its first call too, which
    makes the optimizer's state, each backward moves what that of the module moves. Equal to one process."""
    _, sharing, prepare = LAYOUTS[layout]
    one, module, apart = build(model), prepare(build(model), size), prepare(build(model), size)
    optimizers = [optimizer_of(one), optimizer_of(module)]

    def step(i, m, x, y):
        for optimizer in optimizers[i]:
            optimizer.zero_grad()
        losses = []
        for z in (x, y):
            losses.append(m(z))
            losses[-1].backward()
        for optimizer in optimizers[i]:
            optimizer.step()
        return torch.stack(losses).detach()

    whole_step = thunder.jit(lambda x, y: step(1, module, x, y), fallback="error", executors=[])
    compiled = thunder.jit(apart, fallback="error", executors=[])
    same = sharing(size)
    parts = size // same
    for x in batches(1, torch.float64, lambda g: torch.randint(0, WORDS, (8, 16), generator=g), steps=2):
        mine = [z.chunk(parts)[rank // same] for z in x.chunk(2)]
        expected, losses_of_ranks = step(0, one, *x.chunk(2)), whole_step(*mine)
        torch.distributed.all_reduce(losses_of_ranks)
        close(losses_of_ranks / size, expected, "losses")
        for (name, p), q in zip(module.named_parameters(), one.parameters(), strict=True):
            close(full(p.grad), q.grad, f"gradient of {name}", BOUND)
            close(full(p.detach()), q.detach(), name, BOUND)
        compiled(mine[0]).backward()
        once = moves([thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]])
        twice = collections.Counter({kind: 2 * count for kind, count in once.items()})
        assert moves([thunder.last_traces(whole_step)[-1]]) == twice and twice


@pytest.mark.parametrize("size, layout, model", [(2, "tp", "gpt"), (2, "cp", "llama"), (2, "ep", "grouped")])
def test_whole_steps_communicate_as_modules(ranks, size, layout, model):
    ranks(size)(communicates_as_the_module, layout, model)
