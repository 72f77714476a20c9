"""Sums over rows are finished together: kernels leave partial sums, and one launch adds up those of several regions."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import schedule
from thunder.extend import launches
from thunder.ops import PRIMS

from .test_triton_fuser import DEVICE, check_close, fusions

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDTH, ROWS = 24, 140  # more rows than are reduced without partial sums


class Uncut(TritonFuser):
    def cut_last(self, region, names):
        return []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def layers(count, dtype=torch.float32):
    torch.manual_seed(count)
    return nn.Sequential(*(Block() for _ in range(count))).to(DEVICE, dtype)


def given(dtype=torch.float32, shape=(ROWS, WIDTH)):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3)).to(
        dtype
    )


def gradients(function, module, *inputs):
    """The gradients of the parameters and of the inputs, for a cotangent of squares."""
    inputs = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [*module.parameters(), *(x for x in inputs if x.requires_grad)]
    return torch.autograd.grad(function(*inputs).square().sum(), wanted)


def jitted(module, fuser=TritonFuser):
    return thunder.jit(module, executors=[fuser("sums"), "torch"], fallback="error")


def sums(compiled):
    """The operations in the regions of the backward that leave or add up partial sums."""
    inside = [b for f in fusions(compiled, backward=True) for b in f.region.bound_symbols]
    return [b for b in inside if b.sym in (PRIMS["partial_sums"], PRIMS["sum_of_partials"])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_several_layers_are_one_launch(dtype):
    module, x = layers(3, dtype), given(dtype)
    compiled, uncut = jitted(module), jitted(module, Uncut)
    got, before, eager = (gradients(f, module, x) for f in (compiled, uncut, module))
    wide = copy.deepcopy(module).double()
    for g, b, e, exact in zip(got, before, eager, gradients(wide, wide, x.double()), strict=True):
        assert torch.equal(g, b), "the same sums in the same order"
        if dtype is torch.float64:
            torch.testing.assert_close(g, e)
        else:
            check_close(g, e, exact)
    finished = [f for f in fusions(compiled, backward=True) if f.region.parts]
    assert len(finished) == 1 and finished[0].kernels == 1
    assert [f.kernels for f in fusions(uncut, backward=True)] == [2] * 4
    assert [f.kernels for f in fusions(compiled, backward=True)] == [1] * 5
    assert len(sums(compiled)) == 2 * 9, "weight and bias of three norms, and three biases"


def test_sums_of_one_region_stay_in_it():
    norm, x = nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh()).to(DEVICE, torch.float64), given(torch.float64)
    compiled = jitted(norm)
    for g, e in zip(gradients(compiled, norm, x), gradients(norm, norm, x), strict=True):
        torch.testing.assert_close(g, e)
    assert sums(compiled) == [] and [f.kernels for f in fusions(compiled, backward=True)] == [2]


def test_what_is_read_at_once_does_not_wait():
    """Each sum is a factor of the next layer's gradient: no two can be finished together."""

    def f(x, ws):
        for w in ws:
            x = (x @ w - x.sum(0)).sin()
        return x.sum(0)

    torch.manual_seed(0)
    x, ws = given(torch.float64), [torch.randn(WIDTH, WIDTH, device=DEVICE, dtype=torch.float64) for _ in range(3)]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(x, ws), f(x, ws))
    found = [b.sym for g in fusions(compiled) for b in g.region.bound_symbols]
    assert PRIMS["partial_sums"] not in found and PRIMS["sum_of_partials"] not in found


def test_what_waits_is_bounded(monkeypatch):
    module, x = layers(4, torch.float64), given(torch.float64)
    monkeypatch.setattr(launches, "ARGUMENTS", 13)
    compiled = jitted(module)
    for g, e in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(g, e)
    assert sum(bool(f.region.parts) for f in fusions(compiled, backward=True)) > 1


@pytest.mark.parametrize("layout", ["transposed", "every second"])
def test_inputs_of_other_layouts(layout):
    """Kernels for them may have no partial sums, or others: the sum is one of the terms then."""

    def f(x, y, g):
        return (x * g).sum(0), (y.exp() * g).sum(0), x @ x.t()

    whole = [given(shape=(WIDTH, ROWS) if layout == "transposed" else (ROWS, 2 * WIDTH)) * n for n in (1.0, 0.5, 2.0)]
    inputs = [t.t() if layout == "transposed" else t[:, ::2] for t in whole]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    expected = f(*inputs)
    for args in (inputs, [t.contiguous() for t in inputs], inputs):
        for got, e in zip(compiled(*args), expected, strict=True):
            torch.testing.assert_close(got, e)


def test_views_of_sums_come_after_them():
    def f(x, y, w):
        a = (x * 2).tanh()
        first = a.sum(0)
        product = a @ w
        b = (product + y).sigmoid()
        return first.reshape(2, -1).t(), b.sum(0, keepdim=True), first, b

    x, y, w = given(), given(), torch.eye(WIDTH, device=DEVICE)
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    got, expected = compiled(x, y, w), f(x, y, w)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)
        assert g.stride() == e.stride()
    assert got[0].data_ptr() == got[2].data_ptr(), "a view, as in PyTorch"
    assert [f.kernels for f in fusions(compiled) if f.region.parts] == [1]


def test_regions_that_are_not_fused_are_summed_up_by_pytorch():
    module, x = layers(2, torch.float64), given(torch.float64)
    fuser = TritonFuser("sums")
    fuser.set_fuel(3)
    compiled = thunder.jit(module, executors=[fuser, "torch"], fallback="error")
    for g, e in zip(gradients(compiled, module, x), gradients(module, module, x), strict=True):
        torch.testing.assert_close(g, e)


def test_pytorchs_terms_have_the_sum():
    a = given(shape=(4, 6))
    terms = PRIMS["partial_sums"].fn(a, (7, 24), thunder.dtypes.float32)
    assert terms.shape == (7, 24)
    torch.testing.assert_close(PRIMS["sum_of_partials"].fn(terms, (4, 6), thunder.dtypes.float32), a)


def test_large_maps_have_a_launch_of_their_own(monkeypatch):
    def f(x, y, z, w):
        first = x.tanh().sum(0)
        product = x @ w
        return first, (product + y).sigmoid().sum(0), (z * 2).exp()

    x, y, z, w = (given(torch.float64, shape) for shape in ((ROWS, WIDTH), (ROWS, WIDTH), (7, 5), (WIDTH, WIDTH)))
    for limit, kernels in ((schedule.LAUNCH, [1]), (7 * 5 * 8, [2])):
        monkeypatch.setattr(schedule, "LAUNCH", limit)
        compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
        torch.testing.assert_close(compiled(x, y, z, w), f(x, y, z, w))
        assert [f.kernels for f in fusions(compiled) if f.region.parts] == kernels


def test_maps_of_sums_run_with_them():
    """An update by what is summed up, in another shape."""

    def f(x, weights, biases):
        new = []
        for w, b in zip(weights, biases, strict=True):
            x = (x @ w).tanh()
            gradient = (x * x.cos()).sum(0, keepdim=True)
            new.append((b - 0.1 * gradient.reshape(b.shape).sign(), gradient))
        return new

    torch.manual_seed(0)
    x, weights = given(torch.float64), [torch.randn(WIDTH, WIDTH, device=DEVICE).double() for _ in range(3)]
    biases = [torch.randn(4, WIDTH // 4, device=DEVICE).double() for _ in range(3)]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(x, weights, biases), f(x, weights, biases))
    (shared,) = [f for f in fusions(compiled) if f.region.parts]
    names = [b.sym.name for b in shared.region.bound_symbols]
    assert names.count("sum_of_partials") == names.count("sign") == 3 and "sum" not in names


def test_sums_in_steps_are_finished_together():
    """A group norm's weight: sums of each channel of an image, which its input's gradient needs, are added up."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixed, self.norm = nn.Conv2d(6, 6, 1), nn.GroupNorm(2, 6)

        def forward(self, x):
            return x + torch.tanh(self.norm(self.mixed(x)))

    torch.manual_seed(0)
    module, x = (
        nn.Sequential(*(Normed() for _ in range(3))).to(DEVICE, torch.float64),
        given(torch.float64, (5, 6, 4, 3)),
    )
    compiled, uncut = jitted(module), jitted(module, Uncut)
    for g, u, e in zip(*(gradients(f, module, x) for f in (compiled, uncut, module)), strict=True):
        torch.testing.assert_close(g, e)
        if DEVICE == "cpu":  # there is one order of sums under Triton's interpreter
            assert torch.equal(g, u)
    before, after = ([f.kernels for f in fusions(f, backward=True)] for f in (uncut, compiled))
    assert (before, after) == ([4] * 3, [3] * 3 + [1])


def test_sums_whose_kernel_runs_anyway_stay_in_it():
    def f(x, weights):
        new = []
        for w in weights:
            x = (x @ w).tanh()
            total = x.exp().sum(0)
            new.append((x.cos().sum(0), (total * total).sum()))
        return new

    torch.manual_seed(0)
    x, weights = given(torch.float64), [torch.randn(WIDTH, WIDTH, device=DEVICE).double() for _ in range(3)]
    compiled = thunder.jit(f, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(x, weights), f(x, weights))
    assert not any(f.region.parts for f in fusions(compiled))


def test_an_optimizers_step_reads_sums_of_one_launch():
    module, x = layers(3, torch.float64), given(torch.float64)
    ours = copy.deepcopy(module)

    def step(module, x):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
        loss = F.mse_loss(module(x), x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = thunder.jit(step, executors=[TritonFuser("sums"), "torch"], fallback="error")
    torch.testing.assert_close(compiled(ours, x), step(module, x))
    for p, q in zip(ours.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert sum(bool(f.region.parts) for f in fusions(compiled)) == 1


def planned(dtype, rows, width, count):
    """The fused functions of a backward on an H100, of kernels in real sizes."""
    module = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(count))
    )
    module = module.to(DEVICE, dtype)
    x = torch.empty((), dtype=dtype, device=DEVICE).expand(rows, width)
    entry = thunder.jit(module, executors=[TritonFuser("planned").planned()]).lower(x)
    return [b.sym.fn for b in entry.backward_traces[-1].bound_symbols if b.sym.is_fusion]


@pytest.mark.parametrize("width", [96, 768, 4096])
def test_launches_and_bytes_in_real_sizes(width):
    """A launch for each region and one for the sums; what is stored and read for them is what partial sums are."""
    count = 3
    *regions, last = planned(torch.bfloat16, 16384, width, count)
    assert [f.kernels for f in regions] == [1] * len(regions) and last.kernels == 1
    assert [f.scratch_bytes for f in (*regions, last)] == [0] * (len(regions) + 1)
    (launch,) = last.schedule.launches
    assert all(k.kind == "rows" and len(k.reductions) == len(k.stores) for k in launch)
    terms = [v for f in regions for v in f.schedule.program.outputs if v.kind == "partial"]
    assert sum(v.numel for v in terms) == sum(v.numel for v in last.program.inputs)
    # all but those of the first norm, of which nothing else is computed: that is PyTorch's kernel
    assert len(last.program.outputs) == 3 * count - 2 and all(len(v.shape) == 2 for v in terms)
