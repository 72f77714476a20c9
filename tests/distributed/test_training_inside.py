"""backward, clipping and the optimizer's step inside of the compiled function, on parameters that the ranks hold
together."""

import collections
import copy
import time
import weakref
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import thunder
from tests.distributed.training import agree, batches, close, optimizer_of
from thunder.core import regions
from thunder.distributed import (
    FSDPBucketingStrategy,
    FSDPType,
    clip_grad_norm_,
    column_parallel,
    ddp,
    fsdp,
    no_sync,
    row_parallel,
)
from thunder.errors import CaptureError
from thunder.ops.families import collectives

LAYERS = {"sharding_strategy": FSDPType.ZERO3, "bucketing_strategy": FSDPBucketingStrategy.LAYER}
WAYS = {
    "ddp": ddp, "zero2": fsdp, "zero3": lambda m: fsdp(m, sharding_strategy=FSDPType.ZERO3),
    "zero3 by layers": lambda m: fsdp(m, **LAYERS),
}  # fmt: skip


def build():
    """Rows that two ranks do not share evenly."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).double()


def deeper():
    return torch.nn.Sequential(*build(), torch.nn.GELU(), torch.nn.Linear(3, 3).double())


def communicated(traces) -> collections.Counter:
    names = (line.sym.name.removesuffix("_impl") for line in traces[-1].bound_symbols)
    return collections.Counter(
        name for name in names if name.startswith(("all_gather", "all_reduce", "reduce_scatter"))
    )


def trains(rank, size, way, steps_inside):
    whole, mine = deeper(), WAYS[way](deeper())
    optimizers = optimizer_of(whole), optimizer_of(mine)

    @thunder.jit
    def step(x):
        loss = mine(x).square().mean()
        loss.backward()
        if steps_inside:
            optimizers[1].step()
        return loss.detach()

    for i, x in enumerate(batches(size, torch.float64)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(x).square().mean()
        expected.backward()
        actual = step(x.chunk(size)[rank])
        torch.distributed.all_reduce(actual)
        close(actual / size, expected.detach(), f"loss of step {i}")
        agree(mine, whole, i, gradients=True)
        optimizers[0].step()
        if not steps_inside:
            optimizers[1].step()
        agree(mine, whole, i)
    assert thunder.cache_misses(step) == 1 + steps_inside  # the optimizer has state from the second step on
    names = communicated(thunder.last_traces(step))
    if not steps_inside:
        apart = thunder.jit(mine)
        apart(x.chunk(size)[rank]).square().mean().backward()
        assert names == communicated(thunder.last_traces(apart)) + communicated(thunder.last_backward_traces(apart))
    # that of layer 2 twice
    gathered = {"ddp": (0, 0), "zero2": (6, 0), "zero3": (7, 0), "zero3 by layers": (0, 4)}[way]
    assert (names["all_gather"], names["all_gather_together"]) == gathered


def accumulates(rank, size, way):
    whole, mine = build(), WAYS[way](build())
    data = batches(size, torch.float64, steps=3)

    @thunder.jit
    def backward(x):
        mine(x).square().mean().backward()

    for repetition in range(2):
        with no_sync(mine):
            for x in data[:-1]:
                backward(x.chunk(size)[rank])
                assert "reduce" not in str(thunder.last_traces(backward)[-1])
        for x in data[:-1]:
            whole(x).square().mean().backward()
        agree(mine, whole, repetition, gradients=True)
        backward(data[-1].chunk(size)[rank])
        whole(data[-1]).square().mean().backward()
        agree(mine, whole, repetition, gradients=True)


def steps_in_regions(rank, size):
    """Small regions of one size are launched together on a GPU: made to be here, too."""
    with mock.patch.object(regions, "_small_space", lambda lines: {o.shape for line in lines for o in line.outputs}):
        whole = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).double()
        mine = ddp(copy.deepcopy(whole))
        whole.load_state_dict(mine.state_dict())
        optimizers = optimizer_of(whole), optimizer_of(mine)

        @thunder.jit(executors=["triton_fuser"])
        def step(x):
            mine(x).square().mean().backward()
            optimizers[1].step()

        x = batches(size, torch.float64)[0]
        whole(x).square().mean().backward()
        optimizers[0].step()
        step(x.chunk(size)[rank])
        agree(mine, whole, 0)
    assert "TritonFusion" in str(thunder.last_traces(step)[-1])


def asks_for_gradients(rank, size):
    whole, mine, sharded = build(), ddp(build()), fsdp(build())
    x = batches(size, torch.float64)[0]
    gradients = thunder.jit(lambda module, x: torch.autograd.grad(module(x).square().mean(), list(module.parameters())))
    wanted = torch.autograd.grad(whole(x).square().mean(), list(whole.parameters()))
    for module in (mine, sharded):
        for actual, p, expected in zip(
            gradients(module, x.chunk(size)[rank]), module.parameters(), wanted, strict=True
        ):
            assert type(actual) is type(p.data)
            close(full(actual), expected, "gradient")
    mixed = fsdp(build().float(), dtype=torch.bfloat16)
    optimizer = optimizer_of(mixed)

    @thunder.jit
    def step(x):
        mixed(x).sum().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"(?s)hold in torch.float32 and compute with in torch.bfloat16.*step\(\)"):
        step(x.bfloat16())
    assert all(p.grad is None for p in mixed.parameters())
    with pytest.raises(
        CaptureError, match="create_graph=True inside of it reaches 2.weight, which the ranks hold together"
    ):
        thunder.jit(lambda x: mine(x).sum().backward(create_graph=True))(x)


def between_layers(rank, size):
    """Gradients of values between split layers, hooks on them, two backwards, and a weight that is written to."""
    one, module = Tower().double(), split(Tower().double())
    x = batches(1, torch.float64)[0]

    def of_hidden(m, x, way):
        h = m.up(x[:, :1].repeat(1, 8))
        seen = []
        if way == "retains":
            h.retain_grad()
        if way == "hook":
            h.register_hook(lambda g: g * 2)
        loss = m.down(torch.nn.functional.gelu(h)).square().mean()
        if way == "asks":
            return torch.autograd.grad(loss, (h, m.up.weight))
        loss.backward(retain_graph=way == "twice")
        if way == "twice":
            loss.backward()
        seen += [h.grad] if way == "retains" else []
        return *seen, m.up.weight.grad, m.down.weight.grad

    for way in ("asks", "retains", "hook", "twice"):
        results = []
        for function, m in ((of_hidden, one), (thunder.jit(of_hidden, fallback="error"), module)):
            m.zero_grad()
            results.append(function(m, x, way))
        for expected, of_ranks in zip(*results, strict=True):
            close(full(of_ranks), expected, f"a gradient, {way}", 1e-12)

    def writes(m, x):
        loss = m.down(m.up(x[:, :1].repeat(1, 8)).tanh()).square().mean()
        with torch.no_grad():
            m.down.weight.mul_(2)
        loss.backward()

    for function, m in ((writes, one), (thunder.jit(writes, fallback="error"), module)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(m, x)


def test_backward_inside_of_parts(ranks):
    ranks(2)(between_layers)


def test_backward_inside_synchronises_gradients(ranks):
    for way in WAYS:
        ranks(2)(trains, way, False)


def test_the_optimizer_steps_inside(ranks):
    for way in WAYS:
        ranks(2)(trains, way, True)


class Tower(torch.nn.Module):
    """Layers that split, sizes that ranks do not divide, a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
        self.last, self.scale = torch.nn.Linear(8, 5), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        y = self.norm(torch.tanh(self.first(x)))
        return self.last(y + self.down(torch.nn.functional.gelu(self.up(y)))) * self.scale


def split(module, group=None):
    return row_parallel(column_parallel(module, ["up"], group), ["down"], group)


def over(module):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fsdp(split(module, mesh["tp"]), process_group=mesh["dp"])


LAYOUTS = {
    **WAYS, "tp": split, "fsdp x tp": over,
    "hsdp": lambda m: fsdp(m, process_group=init_device_mesh("cpu", (2, 2)), sharding_strategy=FSDPType.ZERO3),
}  # fmt: skip
OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05), "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "foreach AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True, amsgrad=True),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
}  # fmt: skip
CLIPS = {
    "torch": torch.nn.utils.clip_grad_norm_, "thunder": clip_grad_norm_,
    "largest": lambda ps, most: torch.nn.utils.clip_grad_norm_(ps, most, float("inf")),
    "values": lambda ps, most: torch.nn.utils.clip_grad_value_(ps, most),
}  # fmt: skip


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_steps(rank, size, layout, name, clip):
    """Forward, backward, clipping and optimizer in one function, five steps: one process's losses, gradients, norms and
    weights, by two programs."""
    modules = Tower().double(), LAYOUTS[layout](Tower().double())
    optimizers = [OPTIMIZERS[name](list(m.parameters())) for m in modules]
    together = CLIPS.get(clip, lambda ps, most: None)

    def step(i, x):
        optimizers[i].zero_grad()
        loss = modules[i](x).square().mean()
        loss.backward()
        norm = together(list(modules[i].parameters()), 0.05)
        optimizers[i].step()
        return loss.detach(), norm

    compiled = thunder.jit(step, fallback="error")
    groups, index = {"tp": (1, 0), "fsdp x tp": (2, rank // 2)}.get(layout, (size, rank))
    for x in batches(4, torch.float64):
        (expected, norm), (actual, its) = step(0, x), compiled(1, x.chunk(groups)[index])
        torch.distributed.all_reduce(actual)
        close(actual / size, expected, "loss")
        if norm is not None:
            close(full(its), norm, "norm")
        for (key, p), q in zip(modules[1].named_parameters(), modules[0].parameters(), strict=True):
            assert type(p.grad) is type(p.data), key
            close(full(p.grad), q.grad, f"gradient of {key}", 1e-11)
            close(full(p.detach()), q.detach(), key, 1e-11)
    actual, expected = (o.state_dict()["state"] for o in reversed(optimizers))
    for i in expected:
        for key, value in expected[i].items():
            if isinstance(value, torch.Tensor):
                close(full(actual[i][key]).double(), value.double(), f"{key} of {i}", 1e-11)
    assert thunder.cache_misses(compiled) <= 2
    copies = [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols].count("copy_")
    return dict(communicated(thunder.last_traces(compiled))), copies


def frees_gradients(rank, size, layout):
    """Where zero_grad() stands first, gradients of the step before are freed before the program reduces new ones."""
    torch.manual_seed(0)
    module = LAYOUTS[layout](Tower().double())
    optimizer = torch.optim.SGD(list(module.parameters()), lr=0.1)

    @thunder.jit(fallback="error", executors=[])
    def step(x):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    x, start, freed = torch.randn(4, 6, dtype=torch.float64), collectives.Started.__init__, []
    for number in range(4):
        of_step_before = [weakref.ref(p.grad) for p in module.parameters() if p.grad is not None]

        def starts(started, what, *args, of_step_before=of_step_before):
            if what != "all_gather":  # of parameters, which may start before everything else
                until = time.monotonic() + 5  # Gloo's threads let go of what they have sent a moment later
                while any(gradient() is not None for gradient in of_step_before) and time.monotonic() < until:
                    time.sleep(0.01)
                freed.append(all(gradient() is None for gradient in of_step_before))
            start(started, what, *args)

        freed.clear()
        with mock.patch.object(collectives.Started, "__init__", starts):
            step(x)
        assert len(of_step_before) == (len(list(module.parameters())) if number else 0)
        assert freed and all(freed), number
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("layout", ["ddp", "zero3", "tp"])
def test_gradients_of_the_step_before_are_freed(ranks, layout):
    ranks(2)(frees_gradients, layout)


def test_whole_steps(ranks):
    # five layers of which one is not gathered again; one number of all parts, their norm; a parameter that all hold
    by_layers = {"all_gather_together": 9, "reduce_scatter_together": 5, "all_reduce": 1, "all_reduce_together": 1}
    for layout, name, clip in (
        ("zero3 by layers", "AdamW", "torch"), ("zero2", "SGD", "thunder"), ("tp", "AdamW", "torch"),
        ("zero3", "foreach AdamW", "values"), ("zero2", "fused AdamW", "largest"),
    ):  # fmt: skip
        names, copies = ranks(2)(whole_steps, layout, name, clip)[0]
        if layout == "zero3 by layers":
            assert names == by_layers and copies == 0  # the optimizer steps in place
        if name == "fused AdamW":  # which computes with parts; the largest of all gradients is that of whole ones
            assert names == {"all_gather": 20, "reduce_scatter": 10, "all_reduce": 1}


@pytest.mark.slow  # all optimizers and layouts; the default suite has a row of them
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_steps_of_all_optimizers(ranks, layout):
    size = 4 if layout in ("fsdp x tp", "hsdp") else 2
    for name in OPTIMIZERS:
        for clip in (None, *CLIPS):
            ranks(size)(whole_steps, layout, name, clip, timeout=150.0)


def test_what_steps_is_the_parameter_and_no_copy_of_it(ranks):
    ranks(2)(steps_in_regions)


def test_backward_inside_accumulates_under_no_sync(ranks):
    for way in WAYS:
        ranks(2)(accumulates, way)


def test_gradients_inside_and_what_is_refused(ranks):
    ranks(2)(asks_for_gradients)
