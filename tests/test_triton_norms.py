"""Batch, instance and group norm in training, in the Triton fuser: what is computed in any layout, size and type beside
float64, in how many kernels, and how reductions become steps."""

import copy
import itertools
import math
import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import thunder
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import reductions

from .test_triton_fuser import DEVICE, fusions, others

# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

NORMS = {
    "batch": lambda c, d: (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d](c),
    "batch without parameters": lambda c, d: (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[d](
        c, affine=False, track_running_stats=False
    ),
    "group": lambda c, d: nn.GroupNorm(next(g for g in (3, 2, c) if c % g == 0), c),
    "one group": lambda c, d: nn.GroupNorm(1, c),
    "instance": lambda c, d: (None, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d](c, affine=True),
    "running instance": lambda c, d: (None, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[d](
        c, track_running_stats=True
    ),
}
AROUND = {
    "relu": lambda norm, x, y: F.relu(norm(x)),
    "residual": lambda norm, x, y: F.gelu(norm(x * 1.5) + y),
    "cast": lambda norm, x, y: norm(x).float() * 2,
}
SHAPES = [
    (70, 6), (7, 1), (5, 33), (4, 6, 9), (1, 6, 33), (3, 6, 5, 7), (2, 40, 3, 1), (9, 2, 4, 4), (2, 6, 3, 2, 5)
]  # fmt: skip


class Block(nn.Module):
    def __init__(self, norm, around):
        super().__init__()
        self.norm, self.around = norm, AROUND[around]

    def forward(self, x, y):
        return self.around(self.norm, x, y)


def laid_out(x, layout):
    if layout == "channels last" and x.dim() > 2:
        order = (0, *range(2, x.dim()), 1)
        return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])
    if layout == "apart":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x


def results(function, module, x, y, weight):
    """The result and all gradients of a step, and the module's buffers afterwards."""
    x, y = (t.detach().requires_grad_() for t in (x, y))
    out = function(x, y)
    (out * weight).sum().backward()
    gradients = [p.grad for p in (x, y, *module.parameters()) if p.grad is not None]
    return [out.detach(), *gradients, *(b for b in module.buffers() if b.is_floating_point())]


def compare(name, around, shape, layout, dtype, mean, seed=0):
    """As far from float64 as eager, or as what a rounding of the inputs does, four times at most."""
    generator = torch.Generator().manual_seed(seed)
    x, y, weight = (
        laid_out((torch.randn(shape, generator=generator) + m).to(DEVICE, dtype), layout) for m in (mean, 0, 0)
    )
    module = Block(NORMS[name](shape[1], len(shape) - 2 if len(shape) > 2 else 0), around).to(DEVICE)
    for p in module.parameters():
        nn.init.normal_(p, generator=generator) if DEVICE == "cpu" else nn.init.normal_(p)
    eager, ours, exact, moved = (copy.deepcopy(module) for _ in range(4))
    exact, moved = exact.double(), moved.double()
    compiled = thunder.jit(ours, executors=[TritonFuser("norms")])
    got, want = results(compiled, ours, x, y, weight), results(eager, eager, x, y, weight)
    wide = [t.double() for t in (x, y, weight)]
    reference = results(exact, exact, *wide)
    unit = torch.finfo(dtype).eps
    rounding = 1 + unit * (2 * torch.rand(shape, generator=generator) - 1).to(DEVICE)
    noise = results(moved, moved, wide[0] * rounding, *wide[1:])
    for g, e, r, n in zip(got, want, reference, noise, strict=True):
        assert (g.dtype, g.shape) == (e.dtype, e.shape)
        assert g.stride() == e.stride() or DEVICE != "cpu"  # cuDNN lays out as it likes
        far, of_eager, of_noise = ((t.double() - r).abs().max() for t in (g, e, n))
        assert far <= 4 * of_eager + 4 * of_noise + 4 * torch.finfo(e.dtype).eps * r.abs().max()
    return compiled


def stepwise(monkeypatch):
    """As if every kernel were slow that reduces at once, and few rows were many."""
    monkeypatch.setattr(reductions._Steps, "in_one_kernel", lambda self, merged, norm: False)
    for name, value in (("FEW_ROWS", 4), ("WHOLE", 64)):
        monkeypatch.setattr(reductions, name, value)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_as_exact_as_eager(name, steps, part, monkeypatch):
    if steps:
        stepwise(monkeypatch)
    shapes = [s for s in SHAPES if len(s) > 2 or "instance" not in name]
    layouts = ("row-major", "channels last", "apart")
    kinds = [(torch.float32, 0.0), (torch.float32, 1e3), (torch.bfloat16, 0.0), (torch.bfloat16, 30.0)]
    cases = list(itertools.product(AROUND, shapes, layouts, kinds))
    chosen = random.Random(f"{name}{steps}").sample(cases, 40)[part::5]
    fused = 0
    for around, shape, layout, (dtype, mean) in chosen:
        compiled = compare(name, around, shape, layout, dtype, mean)
        fused += bool(fusions(compiled)) and bool(fusions(compiled, backward=True))
        assert not [n for n in others(compiled) + others(compiled, backward=True) if "norm" in n]
    assert fused >= 7, "of 8"


@pytest.mark.parametrize("length", [4099, 4096, 2500])
def test_chunks_of_a_long_row_are_joined(length, monkeypatch):
    """The last chunk may be shorter; the mean is far from 0."""
    stepwise(monkeypatch)
    monkeypatch.setattr(reductions, "ON_CHIP", 2048)
    monkeypatch.setattr(reductions, "CHUNK", 1024)
    compiled = compare("group", "relu", (1, 2, length), "row-major", torch.float32, 1e3)
    (forward,) = fusions(compiled)
    assert any(k.kind == "rows" and k.columns == 1024 for k in forward.schedule.kernels)


def test_variances_of_everything_and_of_rows_go_the_same_ways(monkeypatch):
    stepwise(monkeypatch)
    x = (torch.randn(90, 37, generator=torch.Generator().manual_seed(0)) + 30).to(DEVICE)
    for program in (
        lambda x: (x * 1).var(),
        lambda x: (x * 1).var(0, correction=0),
        lambda x: torch.var_mean(x * 1, 1)[0] + 1,
        lambda x: (x - x.mean(0)[:, None].mT).square().sum(0),
        lambda x: (x[:37] - x[:37].mean(1)).square().sum(1),  # other means than those of the rows
    ):
        compiled = thunder.jit(program, executors=[TritonFuser("variances")])
        exact = program(x.double())
        far, of_eager = ((t.double() - exact).abs().max() for t in (compiled(x), program(x)))
        assert far <= 4 * of_eager + 1e-6 * exact.abs().max()
        assert fusions(compiled)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_running_statistics_and_modes(mode, momentum):
    module = Block(nn.BatchNorm2d(6, momentum=momentum), "relu")
    ours = copy.deepcopy(module)
    compiled = thunder.jit(ours, executors=[TritonFuser("running")])
    for m in (module, ours):
        m.train(mode == "train")
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x, y, weight = (torch.randn(4, 6, 5, 5, generator=generator) for _ in range(3))
        for g, e in zip(results(compiled, ours, x, y, weight), results(module, module, x, y, weight), strict=True):
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), module.state_dict())


@pytest.mark.parametrize("layout", ["row-major", "channels last"])
def test_running_statistics_are_written_where_they_are(layout):
    compiled = compare("batch", "residual", (3, 6, 5, 7), layout, torch.float32, 0.0)
    (forward,) = fusions(compiled)
    (strides,) = forward._variants
    written = [forward.program.inputs[i].shape for i in forward.overwritten(strides).values()]
    assert written.count((6,)) >= 2


@pytest.mark.parametrize(
    "norm, shape",
    [(nn.BatchNorm1d(6), (1, 6)), (nn.InstanceNorm1d(6), (2, 6, 1)), (nn.BatchNorm2d(6), (2, 5, 3, 3)),
     (nn.GroupNorm(2, 6), (1, 6, 0)), (nn.BatchNorm2d(6), (0, 6, 3, 3)), (nn.BatchNorm2d(6), (2, 6, 3))],
)  # fmt: skip
def test_what_eager_refuses_is_refused_and_nothing_is_nothing(norm, shape):
    compiled = thunder.jit(copy.deepcopy(norm), executors=[TritonFuser("refused")])
    outcomes = []
    for function in (norm, compiled):
        x = torch.randn(shape, requires_grad=True)
        try:
            outcomes.append(function(x).shape)
        except (RuntimeError, ValueError) as error:
            outcomes.append((type(error), str(error).splitlines()[0][:40]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("layout", ["row-major", "channels last"])
@pytest.mark.parametrize("name", ["batch", "group"])
def test_batches_of_any_size_run_by_the_same_kernels(name, layout, steps, monkeypatch):
    if steps:
        stepwise(monkeypatch)
        monkeypatch.setattr(reductions, "MANY_ROWS", 4)
    module = Block(NORMS[name](6, 2), "residual")
    ours = copy.deepcopy(module)
    compiled = thunder.jit(ours, executors=[TritonFuser("sizes")])
    for n in (3, 5, 8, 11):
        x, y, weight = (laid_out(torch.randn(n, 6, 5, 3), layout) for _ in range(3))
        for g, e in zip(results(compiled, ours, x, y, weight), results(module, module, x, y, weight), strict=True):
            assert g.stride() == e.stride()
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)
    assert thunder.cache_misses(compiled) == 2


# ------------------------------------------------------------------------------------------------- kernels of real sizes


def planned(name, shape, layout, dtype=torch.bfloat16):
    """The kernels of a step on an H100, forward and backward: (kind, rows, columns) of each."""
    module = Block(NORMS[name](shape[1], len(shape) - 2 if len(shape) > 2 else 0), "residual").to(DEVICE)
    x, y = (torch.empty((), dtype=dtype, device=DEVICE).expand(shape).requires_grad_() for _ in range(2))
    entry = thunder.jit(module, executors=[TritonFuser("planned").planned()]).lower(x, y)
    found = []
    for trace in (entry.computation_traces[-1], entry.backward_traces[-1]):
        (region,) = [b.sym.fn for b in trace.bound_symbols if b.sym.is_fusion]
        strides = tuple(
            laid_out(torch.empty((), device="meta").expand(v.shape).contiguous(), layout).stride()
            for v in region.program.inputs
        )
        found.append([(k.kind, k.rows, k.columns) for k in region.scheduled(strides).kernels])
    return found


def test_what_fits_on_chip_is_one_kernel():
    """Each channel of (32, 1024, 14, 14) is read once for its statistics and for what is computed of them."""
    for shape in ((32, 1024, 14, 14), (32, 2048, 7, 7)):
        space = ("rows", shape[1], math.prod(shape) // shape[1])
        assert planned("batch", shape, "row-major") == [[space], [space]]
    assert planned("batch", (64, 512), "row-major") == [[("rows", 512, 64)]] * 2


def test_channels_with_many_elements_are_reduced_along_memory_first():
    forward, backward = planned("batch", (32, 64, 112, 112), "row-major")
    steps = [("rows", 32 * 64, 112 * 112), ("rows", 64, 32), ("map", 1, 32 * 64 * 112 * 112)]
    assert forward == steps and backward == steps


def test_channels_last_are_sums_of_columns():
    for shape in ((32, 64, 112, 112), (448, 128, 16)):
        for kernels in planned("batch", shape, "channels last"):
            rows, channels = math.prod(shape) // shape[1], shape[1]
            assert [kernels[0], kernels[2]] == [("columns", rows, channels), ("map", 1, rows * channels)]
            assert kernels[1][:2] == ("rows", channels) and len(kernels) == 3


def test_few_long_groups_are_cut_into_chunks():
    forward, backward = planned("one group", (8, 64, 128, 128), "row-major")
    assert forward == [("rows", 8 * 128, 8192), ("rows", 8, 128), ("map", 1, 8 * 64 * 128**2)]
    assert backward[0] == ("rows", 512, 128**2) and len(backward) == 4
