"""Batch, instance and group norm in training, in the Triton fuser: what is computed in any layout, size and type beside
float64, in how many kernels, and how reductions are split."""

import copy
import itertools
import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import thunder
from thunder.executors.triton_fuser import TritonFuser

from .test_triton_fuser import DEVICE, fusions, others, split_all

pytestmark = [
    # numpy says so where the interpreter computes what is not used, or not a number
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("triton_interpreter"),
]  # fmt: skip

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


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_as_exact_as_eager(name, steps, part, monkeypatch):
    if steps:
        split_all(monkeypatch)
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


def test_variances_of_everything_and_of_rows_go_the_same_ways(monkeypatch):
    split_all(monkeypatch)
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


@pytest.mark.sweep(4)
@pytest.mark.parametrize("steps", [False, True], ids=["", "steps"])
@pytest.mark.parametrize("layout", ["row-major", "channels last"])
@pytest.mark.parametrize("name", ["batch", "group"])
def test_batches_of_any_size_run_by_the_same_kernels(name, layout, steps, monkeypatch):
    if steps:
        split_all(monkeypatch)
    module = Block(NORMS[name](6, 2), "residual")
    ours = copy.deepcopy(module)
    compiled = thunder.jit(ours, executors=[TritonFuser("sizes")])
    for n in (3, 5, 8, 11):
        x, y, weight = (laid_out(torch.randn(n, 6, 5, 3), layout) for _ in range(3))
        for g, e in zip(results(compiled, ours, x, y, weight), results(module, module, x, y, weight), strict=True):
            assert g.stride() == e.stride()
            torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)
    assert thunder.cache_misses(compiled) == 2
