"""The executor cpp: fused programs beside PyTorch's operations."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests import fresh
from tests.kernels.programs import gradient_of_largest, random_program
from tests.kernels.scatters import ADDITIONS, READS, TOLERANCE, WRITES, arguments, gradient_of
from thunder.executors import cpp_fuser
from thunder.executors.cpp_fuser import CppFuser, KernelRegion
from thunder.kernels import cpp, ir, measure, schedule
from thunder.runtime import background, disk_cache

pytestmark = pytest.mark.skipif(cpp.unavailable() is not None, reason=f"no C++ kernels here: {cpp.unavailable()}")
ROOT = str(Path(thunder.__file__).parent.parent)


@pytest.fixture(scope="module")
def always():
    """Fuses whatever it can."""
    return CppFuser("always", always=True)


def regions_of(compiled) -> list[KernelRegion]:
    traces = [*thunder.last_traces(compiled)[-1:], *thunder.last_backward_traces(compiled)[-1:]]
    return [b.sym.fn for t in traces for b in t.bound_symbols if isinstance(b.sym.fn, KernelRegion)]


def check(f, inputs, executor, tolerance: float, exact: bool = False) -> None:
    """Results of fused kernels, within a bound of eager's, or of those in float64; strides are eager's."""
    compiled = thunder.jit(f, executors=[executor])
    results, expected = compiled(*inputs), f(*inputs)
    assert regions_of(compiled), "something is fused"
    for region in regions_of(compiled):
        ir.verify(region.program)
    for result, want in zip(results, expected, strict=True):
        assert result.dtype is want.dtype and result.shape == want.shape
        assert result.stride() == want.stride()
        if exact or not want.is_floating_point():
            assert torch.equal(result, want)
        else:
            torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed, always):
    f, inputs = random_program(seed, torch.float64)
    check(f, inputs, always, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16], ids=str)
@pytest.mark.parametrize("name", [*ADDITIONS, *WRITES])
def test_scatters(name, dtype, always):
    program, inputs = (ADDITIONS | WRITES)[name], arguments(dtype)
    compiled = thunder.jit(program, executors=[always])
    torch.testing.assert_close(compiled(*inputs), program(*inputs), rtol=0, atol=TOLERANCE.get(dtype, 0))
    assert scatters(compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", READS)
def test_gradients_of_reads_at_indices(name, dtype, always):
    """16-bit floats are added up in float32."""
    x, _, i, j, _ = arguments(dtype)
    compiled = thunder.jit(READS[name], executors=[always])
    (got,), (want,) = (gradient_of(run, [x], i, j) for run in (compiled, READS[name]))
    (exact,) = gradient_of(READS[name], [x.double()], i, j)
    bound = max((want.double() - exact).abs().max(), 4 * torch.finfo(dtype).eps * exact.abs().max())
    assert scatters(compiled) and (got.double() - exact).abs().max() <= bound


def test_one_element_of_a_scan_or_a_scatter_in_another_shape(always):
    """An index of 0 is the whole of one element in any shape: its memory is an output's of the same shape alone."""

    def program(x, i):
        one = x.sin().cumsum(0)
        written = torch.zeros(1).scatter(0, i, x.exp())
        return one.reshape(1, 1).clone(), one.expand(4).clone(), written.reshape(1, 1) * 1.0, written[None].clone()

    x, i = torch.randn(1), torch.zeros(1, dtype=torch.int64)
    for a, b in zip(thunder.jit(program, executors=[always])(x, i), program(x, i), strict=True):
        torch.testing.assert_close(a, b)
    rounded = thunder.jit(lambda w: torch.func.hessian(lambda w: w.cos().sum() + w.pow(4).sum())(w), executors=[always])
    w = torch.randn(5)
    torch.testing.assert_close(rounded(w), torch.diag(12 * w**2 - w.cos()))


def scatters(compiled) -> list[ir.Store]:
    return [s for region in regions_of(compiled) for s in region.program.stores if s.scatter is not None]


def test_a_scatter_has_one_thread_and_equal_calls_have_equal_sums(always):
    a, s, i = torch.randn(40, 300), torch.randn(5000, 300), torch.randint(40, (5000,))
    compiled = thunder.jit(ADDITIONS["into zeros"], executors=[always])
    first = compiled(a, s, i, i, i)
    assert all(torch.equal(compiled(a, s, i, i, i), first) for _ in range(3))
    (region,) = regions_of(compiled)
    kernels, _ = region.scheduled(region.strides[0])
    assert [k.is_parallel for k in kernels if any(w.scatter is not None for w in k.writes)] == [False]
    assert "scatter (sum) to output0" in region.description


def test_a_scatter_with_an_index_out_of_bounds_raises_as_eager(always):
    x, s = torch.randn(5, 3), torch.randn(2, 3)
    compiled = thunder.jit(lambda x, s, i: x.index_add(0, i, s * 2), executors=[always])
    for wrong in (-1, 5):
        index = torch.tensor([1, wrong])
        with pytest.raises((IndexError, RuntimeError)) as eager:
            x.index_add(0, index, s * 2)
        with pytest.raises(type(eager.value)):
            compiled(x, s, index)


@pytest.mark.parametrize("seed", range(100, 108))
def test_random_programs_with_special_values(seed, always):
    f, inputs = random_program(seed, torch.float64, special=True)
    check(f, inputs, always, 1e-9)


@pytest.mark.parametrize("seed", range(200, 205))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_random_programs_of_integers(seed, dtype, always):
    f, inputs = random_program(seed, dtype)
    check(f, inputs, always, 0.0, exact=True)


@pytest.mark.parametrize("seed", range(300, 308))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_programs_are_as_near_to_float64_as_eager(seed, dtype, always):
    f, inputs = random_program(seed, dtype)
    wide = [x.double() for x in inputs]
    f64, _ = random_program(seed, torch.float64)
    compiled = thunder.jit(f, executors=[always])
    for result, want, exact in zip(compiled(*inputs), f(*inputs), f64(*wide), strict=True):
        if not want.is_floating_point() or not exact.isfinite().all():
            continue
        scale = exact.abs().max() + 1e-30
        ours, eager = ((r.double() - exact).abs().max() / scale for r in (result, want))
        assert ours <= 2 * eager + 8 * torch.finfo(dtype).eps, (ours, eager)


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 2.5, -2.5, 1e-40, 3e38, 700.0])
FUNCTIONS = (
    "sign sgn abs neg square sqrt rsqrt exp exp2 log log2 log1p expm1 tanh sigmoid floor ceil trunc round isnan isinf "
    "isfinite erf erfc reciprocal relu isposinf isneginf log10 sin cos tan sinh cosh asinh atan signbit"
).split()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_functions_of_special_values(dtype, always):
    def f(x):
        return [getattr(torch, name)(x) for name in FUNCTIONS]

    x = SPECIAL.to(dtype)
    compiled = thunder.jit(f, executors=[always])
    results = compiled(x)
    assert len(regions_of(compiled)) == 1
    for name, result, want in zip(FUNCTIONS, results, f(x), strict=True):
        torch.testing.assert_close(result, want, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        if want.is_floating_point() and name != "relu":  # which is composed of a comparison: it gives 0.0 for -0.0
            zero = want == 0
            assert torch.equal(result.signbit() & zero, want.signbit() & zero), f"{name}: the sign of zeros"


@pytest.mark.parametrize("function", [torch.tanh, torch.erf])
def test_functions_of_our_own_are_within_2_ulp(function, always):
    x = torch.cat([torch.linspace(-6, 6, 100003), torch.logspace(-37, 0, 20001), torch.tensor([0.625, 0.9375, 4.0])])
    result, exact = thunder.jit(lambda x: function(x) * 1.0, executors=[always])(x), function(x.double())
    size = exact.float().abs()
    ulp = (torch.nextafter(size, torch.tensor(2.0)) - size).double()
    assert ((result.double() - exact).abs() <= 2 * ulp).all()


FORMULAS_OF_ONE = ("frac", "deg2rad", "rad2deg", "sinc", "angle")
FORMULAS_OF_TWO = ("remainder", "floor_divide", "fmod", "logaddexp", "logaddexp2", "xlogy", "heaviside", "ldexp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_formulas_of_special_values(dtype, always):
    def f(x, y):
        special = [torch.special.entr(x), torch.special.ndtr(x), torch.special.xlog1py(x, y), torch.float_power(x, y)]
        one, two = ([getattr(torch, n) for n in names] for names in (FORMULAS_OF_ONE, FORMULAS_OF_TWO))
        return [*special, x % 2.5, x // -2.5, *(g(x) for g in one), *(g(x, y) for g in two)]

    names = ["entr", "ndtr", "xlog1py", "float_power", "% 2.5", "// -2.5", *FORMULAS_OF_ONE, *FORMULAS_OF_TWO]
    x, y = (t.to(dtype).reshape(-1) for t in torch.meshgrid(SPECIAL[:9], SPECIAL[:9], indexing="ij"))
    compiled = thunder.jit(f, executors=[always])
    results = compiled(x, y)
    assert len(regions_of(compiled)) == 1
    # PyTorch rounds some of them to bfloat16 in between, and kernels do not
    expected = f(x, y) if dtype is not torch.bfloat16 else f(x.float(), y.float())
    for name, result, want in zip(names, results, expected, strict=True):
        want = want.to(result.dtype)
        torch.testing.assert_close(result, want, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def test_powers_of_special_values(always):
    def f(x):
        return [x**power for power in (0, 1, 2, 3, -1, 0.5, -0.5, -2, 1.5)]

    for result, want in zip(thunder.jit(f, executors=[always])(SPECIAL), f(SPECIAL), strict=True):
        torch.testing.assert_close(result, want, equal_nan=True)


def test_the_gradient_of_abs_at_zero_and_nan(always):
    compiled = thunder.jit(lambda x: x.abs() * 2, executors=[always])
    gradients = []
    for f in (compiled, lambda x: x.abs() * 2):
        x = SPECIAL.clone().requires_grad_()
        f(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_wrap_around_and_divide_as_eager(dtype, always):
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.max, info.max - 1, 0, 1, 7, 100])

    def f(x):
        return x * 3, x + x, x // 7, x % 7, x << 1, x >> 1, ~x, x & 5, x.float(), x > 5, x.sum(), -x

    check(f, [x.to(dtype)], always, 0.0, exact=True)


def test_casts(always):
    x = torch.tensor([0.0, 0.5, -0.5, 1.9, -1.9, 100.0, float("nan"), 65520.0, 1e-7])

    def f(x):
        return x.half(), x.bfloat16(), x.bool(), x.double(), x[:6].int(), x[:6].to(torch.int8), x[:6].long()

    check(f, [x], always, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_the_largest_of_rounded_values(dtype, always):
    got = gradient_of_largest(lambda f: thunder.jit(f, executors=[always]), dtype)
    torch.testing.assert_close(got, gradient_of_largest(None, dtype), rtol=0.02, atol=0.01)


class Block(torch.nn.Module):
    """What a layer of GPT has besides attention."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 64),
            torch.nn.Linear(64, width),
        )

    def forward(self, x):
        scores = torch.softmax((x @ x.transpose(1, 2)) * 0.3, -1)
        x = x + scores @ x
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_block_of_gpt_forward_and_backward(always):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 7, 48)
    compiled = thunder.jit(model, executors=[always])
    results = []
    for f in (model, compiled):
        y = x.clone().requires_grad_()
        out = f(y)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [y, *model.parameters()])])
    assert len(regions_of(compiled)) >= 2
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_pieces_of_a_concatenation_have_loops_of_their_own(always):
    compiled = thunder.jit(lambda x: torch.cat([x[:, 16:].sin(), -x[:, :16].cos()], 1), executors=[always])
    x = torch.randn(4, 40)
    torch.testing.assert_close(compiled(x), torch.cat([x[:, 16:].sin(), -x[:, :16].cos()], 1))
    (region,) = regions_of(compiled)
    assert "i64 l1 = 0LL; const i64 end_ = 24LL;" in region.source
    assert "i64 l1 = 24LL; const i64 end_ = 40LL;" in region.source


def test_one_loop_for_rows_columns_and_results(always):
    def f(x, w):
        y = torch.softmax(F.gelu(x) * w, -1)
        return y, (x + 1).sum(0), y.sum(0), x.amax(-1)

    inputs = [torch.randn(32, 48), torch.randn(48)]
    check(f, inputs, always, 1e-5)
    compiled = thunder.jit(f, executors=[always])
    compiled(*inputs)
    (region,) = regions_of(compiled)
    kernels, _ = region.scheduled(region._shown)
    assert [k.outer for k in kernels][0] == 1 and len(kernels[0].rows) == 3
    assert all(not k.rows and not k.columns for k in kernels[1:])  # what is left writes the sums of columns


def test_kernels_are_shown(always):
    compiled = thunder.jit(lambda x: torch.softmax(x * 2, -1) + x, executors=[always], tiers=0)
    compiled(torch.randn(4096, 512))
    ((name, text),) = thunder.last_kernels(compiled).items()
    assert name == "Kernels0"
    assert "amax over r1_0:512 of" in text  # the IR
    assert "kernel 0: for l0:4096, sweep l1:512" in text and "us predicted" in text  # the schedule
    assert 'extern "C" void region' in text  # the source


def test_a_bad_index_raises_as_eager_does(always):
    compiled = thunder.jit(lambda x, i: x[i] * 2 + 1, executors=[always])
    x = torch.randn(5, 3)
    torch.testing.assert_close(compiled(x, torch.tensor([1, -1])), x[[1, -1]] * 2 + 1)
    assert regions_of(compiled)
    with pytest.raises(IndexError, match="out of"):
        compiled(x, torch.tensor([1, 5]))


def test_an_embedding_and_its_norm_read_each_their_index(always):
    def f(tokens, table, weight):
        x = F.embedding(tokens, table)
        return x, F.rms_norm(x, (48,), weight), x[:, ::2].sum(1)

    torch.manual_seed(0)
    check(f, [torch.randint(20, (4, 12)), torch.randn(20, 48), torch.randn(48)], always, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_running_sums_and_products(dtype, always):
    def f(x, row):
        y = torch.cat([x, x.flip(1)], 1)
        sums = [x.cumsum(1), x.t().contiguous().t().flip(1).cumsum(-1), y.cumsum(-1), x.view(3, 2, -1).cumsum(2)]
        return *sums, (row + row).cumsum(0), x.cumprod(1), x[:, 1:].cumsum(1)[:, :-1] * 2, x.sum(1).cumsum(0)

    torch.manual_seed(0)
    x, row = torch.randn(6, 37).mul(3).to(dtype), torch.randn(1003).to(dtype)
    check(f, [x, row], always, 1e-2 if dtype is torch.bfloat16 else 1e-5)
    compiled = thunder.jit(f, executors=[always])
    compiled(x, row)
    names = [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols]
    assert not {"cumsum", "cumprod"} & {*names}


def test_the_gradient_of_running_sums(always):
    def f(x):
        return (x.sigmoid().cumsum(-1) * torch.softmax(x, -1)).cumsum(1).sin()

    x = torch.randn(5, 70, dtype=torch.float64)
    results = []
    for g in (f, thunder.jit(f, executors=[always])):
        y = x.clone().requires_grad_()
        results.append([out := g(y), *torch.autograd.grad(out.square().sum(), [y])])
    torch.testing.assert_close(*results)


def test_two_indices_of_one_table(always):
    def f(x, i, j):
        return x[i] - x[j] * 2, x[i].sum(1)

    check(f, [torch.randn(9, 20), torch.randint(9, (7,)), torch.randint(9, (7,))], always, 1e-5)


def test_a_gathered_cast_has_its_own_type(always):
    def f(x, weight, i):
        return torch.where(x > 0, weight.double()[i], x), weight.double().gather(0, i) * x

    check(f, [torch.randn(7, dtype=torch.float64), torch.randn(9), torch.randint(9, (7,))], always, 1e-5)


@pytest.mark.parametrize("columns", [32, 47])
def test_steps_of_vectors(columns, always):
    def f(x):
        return x[:, ::2] * 2, x[:, 1::2] + 1, x.flip(1).sin(), x[:, ::3] * 3

    for dtype in (torch.float32, torch.int32, torch.float64):
        x = torch.randn(5, columns).mul(9).to(dtype)
        check(lambda x: [y.double() for y in f(x)], [x], always, 1e-5)


def test_other_strides_and_threads(always):
    compiled = thunder.jit(lambda x: (x * 2).sin().sum(0), executors=[always])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for x in (torch.randn(300, 40), torch.randn(40, 300).t(), torch.randn(300, 80)[:, ::2]):
                torch.testing.assert_close(compiled(x), (x * 2).sin().sum(0), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_sizes_that_stay_symbolic_are_pytorchs(always):
    compiled = thunder.jit(lambda x: (x * 2).sin() + 1, executors=[always], cache="symbolic values")
    for n in (3, 5, 9):
        x = torch.randn(n, 4)
        torch.testing.assert_close(compiled(x), (x * 2).sin() + 1)


def test_eager_numerics_use_no_kernels():
    compiled = thunder.jit(lambda x: torch.softmax(x * 2, -1) + x, tiers=2, numerics="eager")
    x = torch.randn(256, 512)
    compiled(x), compiled(x)
    assert torch.equal(compiled(x), torch.softmax(x * 2, -1) + x) and not regions_of(compiled)


def test_pytorchs_kernels_stay_where_they_are_predicted_to_be_faster(monkeypatch):
    monkeypatch.setattr(cpp_fuser, "seconds_of_operations", lambda region, machine: 0.0)
    compiled = thunder.jit(lambda x: (x * 2).sin() + 1, executors=[CppFuser("unused")])
    x = torch.randn(64, 64)
    assert torch.equal(compiled(x), (x * 2).sin() + 1) and not regions_of(compiled)
    assert "predicted to be faster" in str(thunder.last_traces(compiled)[-1])


# ------------------------------------------------------------------------------------------------ compiling


def test_without_a_compiler_pytorch_runs_everything(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="has no effect here: it needs a C\\+\\+ compiler"):
        compiled = thunder.jit(lambda x: (x * 2).sin() + 1, executors=[CppFuser("without")])
    x = torch.randn(64, 64)
    assert torch.equal(compiled(x), (x * 2).sin() + 1) and not regions_of(compiled)


def test_a_kernel_that_cannot_be_compiled_leaves_the_operations(monkeypatch, tmp_path, always):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    compile, fails = cpp._compile, [True]

    def failing(text):
        if fails:
            raise RuntimeError("g++ fails: out of memory")
        return compile(text)

    monkeypatch.setattr(cpp, "_compile", failing)

    def f(x):
        return (x * 2.03125).sin() + 1

    x = torch.randn(6, 7)
    compiled = thunder.jit(f, executors=[CppFuser("fails", always=True)])
    with pytest.warns(
        UserWarning, match="PyTorch runs mul, sin, add: no kernel is compiled: g\\+\\+ fails: out of memory"
    ):
        assert torch.equal(compiled(x), f(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), f(x))
    fails.clear()  # another program with the same kernel tries again
    compiled = thunder.jit(f, executors=[CppFuser("succeeds", always=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(x), f(x))


def test_kernels_take_over_at_the_fifth_call_and_other_processes_begin_with_them(monkeypatch, tmp_path):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_fuser, "seconds_of_operations", lambda region, machine: 1.0)
    x = torch.randn(2048, 1024)

    def f(x):
        return torch.softmax(x * 2, -1) + x.tanh().exp()

    monkeypatch.delenv("THUNDER_TIERS")
    compiled = thunder.jit(f)
    for call in range(1, 7):
        torch.testing.assert_close(compiled(x), f(x))
        assert background.idle(60)
        assert bool(regions_of(compiled)) is (call >= 5), call
    again = thunder.jit(f)
    again(x)
    assert regions_of(again)


def test_a_program_whose_kernels_cannot_be_compiled_stays_in_the_first_tier(monkeypatch, tmp_path):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("THUNDER_TIERS")

    def failing(text):
        raise RuntimeError("g++ fails: out of memory")

    monkeypatch.setattr(cpp_fuser, "seconds_of_operations", lambda region, machine: 1.0)
    measure.machine()
    monkeypatch.setattr(cpp, "_compile", failing)
    compiled, x = thunder.jit(lambda x: torch.softmax(x * 2.015625, -1) + x), torch.randn(2048, 1024)
    for _ in range(4):
        compiled(x)
    with pytest.warns(UserWarning, match="stays in its first tier, PyTorch's kernels, because .*out of memory"):
        compiled(x)
    assert not regions_of(compiled)


def test_programs_of_one_tier(monkeypatch, tmp_path):
    monkeypatch.delenv("THUNDER_TIERS")
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    x = torch.randn(8, 8)
    nothing, compiled = thunder.jit(lambda x: x @ x), thunder.jit(lambda x: x.sin() * 2, keep_programs=True)
    nothing(x), compiled(x)
    assert nothing.programs[0].tiers is compiled.programs[0].tiers is None
    thunder.precompile(thunder.jit(lambda x: torch.softmax(x * 2, -1)), x, path=tmp_path / "softmax.program")


def test_a_program_whose_second_tier_has_no_kernels_stays_in_the_first(monkeypatch):
    monkeypatch.delenv("THUNDER_TIERS")
    monkeypatch.setattr(cpp_fuser, "seconds_of_operations", lambda region, machine: 0.0)
    compiled, x = thunder.jit(lambda x: torch.softmax(x * 2.0625, -1)), torch.randn(8, 8)
    for _ in range(5):
        compiled(x)
    assert str(compiled.programs[0].tiers) == "first tier: the second has no kernels"


def test_by_default_without_a_compiler_nothing_is_added(monkeypatch):
    monkeypatch.delenv("THUNDER_TIERS")
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled, x = thunder.jit(lambda x: torch.softmax(x * 2.125, -1) + x), torch.randn(512, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            assert torch.equal(compiled(x), torch.softmax(x * 2.125, -1) + x)
    assert compiled.programs[0].tiers is None and background.idle(0)


def test_a_measured_machine_draws_none_of_the_programs_numbers():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    measure.measure()
    assert torch.equal(torch.rand(2), expected)


def test_copies_and_threads_have_the_kernels_at_their_calls(monkeypatch, tmp_path):
    monkeypatch.delenv("THUNDER_TIERS")
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_fuser, "seconds_of_operations", lambda region, machine: 1.0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
    compiled, x = thunder.jit(module), torch.randn(512, 64)
    expected = module(x)
    compiled(x), compiled(x)
    copy = deepcopy(compiled)
    for each in (compiled, copy):
        for _ in range(6):
            torch.testing.assert_close(each(x), expected)
        assert regions_of(each)
    shared = thunder.jit(lambda x: torch.softmax(x * 2.0078125, -1) + x)
    with ThreadPoolExecutor(4) as threads:
        for result in threads.map(lambda _: shared(x), range(24)):
            torch.testing.assert_close(result, torch.softmax(x * 2.0078125, -1) + x)
    (entry,) = shared.programs
    assert entry.tiers.reason == "its kernels have taken over at call 5" and regions_of(shared)


FORK_BY_DEFAULT = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch, thunder
from thunder.executors import cpp_fuser
cpp_fuser.seconds_of_operations = lambda region, machine: 1.0
torch.set_num_threads(1)
x = torch.randn(256, 512)
f, g = (lambda x: torch.softmax(x * 2, -1) + x), (lambda x: torch.softmax(x * 2, -1) + x)
compiled = thunder.jit(f)
compiled(x)  # its kernels begin to compile
child = os.fork()
if not child:
    for each in (compiled, thunder.jit(g)):
        for _ in range(6):
            assert torch.allclose(each(x), f(x), atol=1e-5)
        print(each.programs[0].tiers, flush=True)
    compiled(x[:5])
    sys.exit(0)
_, status = os.waitpid(child, 0)
for _ in range(6):
    assert torch.allclose(compiled(x), f(x), atol=1e-5)
print(status, compiled.programs[0].tiers)
"""


def test_a_fork_while_kernels_compile_by_default(tmp_path):
    """The child's program of the same text compiles for itself."""
    done = fresh.run("-c", FORK_BY_DEFAULT, env={**os.environ, "THUNDER_TIERS": "", "THUNDER_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    taken = "second tier: its kernels have taken over at call 5"
    first, second, parent = done.stdout.splitlines()
    assert first in (taken, "first tier: this is a fork of the process that compiles")
    assert second in (taken, "None") and parent == f"0 {taken}"


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork of a program with threads
import torch, thunder
from thunder.executors.cpp_fuser import CppFuser
torch.set_num_threads(1)
f = lambda x: (x * 2).sin() + x.exp()
x = torch.randn(40, 50)
compiled = thunder.jit(f, executors=[CppFuser("forks", always=True)])
compiled(x)
child = os.fork()
if not child:
    g = lambda x: (x * 3).cos() + x.exp()
    compiled(x), thunder.jit(g, executors=[CppFuser("child", always=True)])(x)
    sys.exit(0)
_, status = os.waitpid(child, 0)
print(status, torch.allclose(compiled(x), f(x), atol=1e-5))
"""


def test_a_forked_child_compiles_for_itself(tmp_path):
    environment = os.environ | {"PYTHONPATH": ROOT, "THUNDER_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.stdout == "0 True\n", done.stderr


TEMPORARY = """
import os, sys, warnings
warnings.simplefilter("ignore")
from thunder.runtime import disk_cache
path = disk_cache.store("k" * 64, {}, b"code")
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
print(path.exists(), disk_cache.store("j" * 64, {}, b"code").exists())
"""


def test_a_forked_child_leaves_its_parents_temporary_files(tmp_path):
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)  # where others may write nothing is kept
    environment = os.environ | {"PYTHONPATH": ROOT, "THUNDER_CACHE_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", TEMPORARY], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "True True\n", done.stderr


# ------------------------------------------------------------------------------------------------ the schedule


def test_loops_are_merged_and_split_as_memory_allows(always):
    compiled = thunder.jit(lambda x: x.reshape(8, 4, 6).transpose(0, 1) * 2, executors=[always])
    x = torch.randn(32, 6)
    torch.testing.assert_close(compiled(x), x.reshape(8, 4, 6).transpose(0, 1) * 2)
    (region,) = regions_of(compiled)
    (kernel,), _ = region.scheduled(region._shown)
    assert [v.size for v in kernel.loops] in ([192], [8, 4, 6], [4, 8, 6])


def test_a_machine_is_measured_once_and_read_from_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    measure._machine.cache_clear()
    first = measure.machine()
    measure._machine.cache_clear()
    monkeypatch.setattr(measure, "measure", None)
    assert measure.machine() == first
    assert all(v > 0 for v in (*first.element.values(), *first.byte.values(), *first.eager.values(), first.launch))
    measure._machine.cache_clear()


def test_a_schedule_predicts_bytes(always):
    compiled = thunder.jit(lambda x: x * 2 + 1, executors=[always])
    compiled(torch.randn(64, 100))
    (region,) = regions_of(compiled)
    kernels, _ = region.scheduled(region._shown)
    assert [k.bytes for k in kernels] == [2 * 4 * 6400]
    assert "51200 bytes" in schedule.describe(kernels)


def test_keys_of_shared_objects_differ_by_text():
    assert cpp.key_of("a") != cpp.key_of("b") and cpp.key_of("a") == cpp.key_of("a")
    assert disk_cache.load("0" * 64) is None
