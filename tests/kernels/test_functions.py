"""Elementwise functions of the executor triton_fuser, on random and special values, beside PyTorch's."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import thunder
from thunder.executors.triton_fuser import TileRegion, TritonFuser

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
# NumPy, which the interpreter computes with, warns of what makes infinities and nan
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

INFINITY, NAN = float("inf"), float("nan")
SPECIAL = 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -3.5, 10.0, -7.0, 1e-40, -1e-40, 1e38, INFINITY, -INFINITY, NAN
UNARY = [
    torch.abs, torch.acos, torch.acosh, torch.asin, torch.asinh, torch.atan, torch.atanh, torch.ceil, torch.cos,
    torch.cosh, torch.digamma, torch.erf, torch.erfc, torch.erfinv, torch.exp, torch.exp2, torch.expm1, torch.floor,
    torch.frac, torch.isfinite, torch.isnan, torch.lgamma, torch.log, torch.log10, torch.log1p, torch.log2, torch.neg,
    torch.reciprocal, torch.round, torch.rsqrt, torch.sigmoid, torch.sign, torch.signbit, torch.sin, torch.sinh,
    torch.sqrt, torch.square, torch.tan, torch.tanh, torch.trunc, torch.special.ndtr, torch.special.entr,
]  # fmt: skip
NUMBERS = {
    f"pow {number}": lambda x, number=number: x**number for number in (1.5, -0.25, 3.0, -1.0, 7, 0)
} | {
    "base": lambda x: 2.5**x, "remainder": lambda x: x % 1.5, "negative remainder": lambda x: x % -1.5,
    "fmod": lambda x: torch.fmod(x, 1.5), "floor_divide": lambda x: x // 1.5,
}  # fmt: skip
BINARY = [
    torch.atan2, torch.copysign, torch.floor_divide, torch.fmax, torch.fmin, torch.fmod, torch.hypot, torch.maximum,
    torch.minimum, torch.pow, torch.remainder, torch.logaddexp, torch.xlogy, torch.div,
]  # fmt: skip
# in units of the type's precision, relative to the larger of the result and 1; of formulas, which are rounded more often
ROUNDINGS = {"digamma": 200, "logaddexp": 8, "special_ndtr": 8, "special_entr": 8}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, triton_interpreter):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def check(f, inputs: list[torch.Tensor], name: str) -> None:
    compiled = thunder.jit(lambda *xs: (f(*xs), xs[0] * 2), executors=[TritonFuser("f")])  # one is not fused alone
    (result, _), want = compiled(*inputs), f(*inputs)
    operations = [b for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name != "python_del"]
    assert [isinstance(b.sym.fn, TileRegion) for b in operations] == [True], name
    assert result.dtype is want.dtype
    if not want.is_floating_point():
        assert torch.equal(result, want)
        return
    assert torch.equal(result.isnan(), want.isnan()), (inputs, result, want)
    finite = want.isfinite()
    assert torch.equal(result[~finite & ~want.isnan()], want[~finite & ~want.isnan()])
    own = torch.finfo(want.dtype).eps * ROUNDINGS.get(name, 4)
    least = torch.finfo(want.dtype).smallest_normal if want.dtype is torch.bfloat16 else 1e-44
    torch.testing.assert_close(result[finite], want[finite], rtol=own, atol=own * (name in ROUNDINGS) + least)
    zero = finite & (want == 0) & (result == 0)
    if name in ("fmax", "fmin"):  # which may choose any of two zeros
        return
    assert torch.equal(result[zero].signbit(), want[zero].signbit())


def special(dtype: torch.dtype, name: str = "") -> list[float]:
    """Without subnormal numbers where PyTorch's vectors on CPUs make nan of them, and of 16 bits, which Triton's
    interpreter reads and writes as zeros."""
    has_subnormals = dtype is not torch.bfloat16 and (dtype is not torch.float32 or name != "floor_divide")
    return [x for x in SPECIAL if has_subnormals or not 0 < abs(x) < 1e-38]


def values(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat([torch.tensor(special(dtype)), torch.randn(40) * 3, torch.rand(20)]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", UNARY, ids=lambda f: f.__name__)
def test_functions_of_one_number(f, dtype):
    check(lambda x: f(x), [values(dtype)], f.__name__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_functions_of_a_number_and_a_constant(name, dtype):
    check(NUMBERS[name], [values(dtype)], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("f", BINARY, ids=lambda f: f.__name__)
def test_functions_of_two_numbers(f, dtype):
    pairs = [*itertools.product(special(dtype, f.__name__), repeat=2)]
    x, y = (torch.cat([torch.tensor([p[i] for p in pairs]), torch.randn(40) * 3]).to(dtype) for i in (0, 1))
    check(lambda x, y: f(x, y), [x, y], f.__name__)
