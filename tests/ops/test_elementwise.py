"""Types of two operands, `inplace=True`, keywords and operators, as PyTorch has them."""

import operator
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.ops.harness import by_decomposition
from tests.ops.tracing import carried_out, traced
from thunder.errors import CaptureError
from thunder.ops.families.binary import BINARY
from thunder.ops.torch_types import to_torch_dtype

TYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
# PyTorch says once that complex numbers of halves are new, and of its own ldexp that it resizes a result
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in ("B?Complex(Half|32) support is experimental", "An output with one or more elements was resized")
]
NAMES = [*BINARY, "add", "sub", "div", "rsub", "eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", NAMES)
def test_types_of_all_pairs(name):
    """Tensors with dimensions, 0-dim tensors and Python numbers of all types, in both places: PyTorch's type, or a
    refusal where it refuses."""
    function = getattr(torch, name)
    values = [torch.ones(2, dtype=d) for d in TYPES] + [torch.ones((), dtype=d) for d in TYPES] + [True, 2, 2.5, 1 + 2j]
    pairs = 0
    for a in values:
        for b in values:
            if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
                continue
            try:
                want = function(a, b)
            except (RuntimeError, TypeError, NotImplementedError):
                with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
                    carried_out(*traced(function, (a, b), {}))
                continue
            trace, _ = traced(function, (a, b), {})
            (proxy,) = trace.output
            assert (to_torch_dtype(proxy.dtype), tuple(proxy.shape)) == (want.dtype, tuple(want.shape)), (a, b)
            pairs += 1
    assert pairs >= 16


Y = torch.linspace(-4.0, 4.0, 12).reshape(3, 4)
INPLACE = {
    "relu": {}, "relu6": {}, "leaky_relu": {"negative_slope": 0.2}, "elu": {"alpha": 0.5}, "celu": {"alpha": 0.5},
    "selu": {}, "silu": {}, "mish": {},
    "hardtanh": {"min_val": -0.5}, "hardswish": {}, "hardsigmoid": {}, "threshold": {"threshold": 0.1, "value": 2.0},
    "rrelu": {},
}  # fmt: skip


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_argument_overwrites(name):
    function, options = getattr(F, name), INPLACE[name]

    def program(x):
        y = x * 1
        z = function(y, inplace=True, **options)
        return y, z + 1, function(x, inplace=False, **options), function(x, **options)

    torch.testing.assert_close(thunder.jit(program)(Y), program(Y), rtol=0, atol=0)
    ours, eagers = Y.clone(), Y.clone()
    thunder.jit(lambda x: function(x, inplace=True, **options))(ours)
    function(eagers, inplace=True, **options)
    torch.testing.assert_close(ours, eagers, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["relu", "elu", "celu", "selu", "leaky_relu", "hardtanh", "threshold"])
def test_underscored_functions_overwrite(name):
    function, rest = getattr(F, f"{name}_"), (0.1, 2.0) if name == "threshold" else ()

    def program(x):
        y = x * 1
        function(y, *rest)
        return y

    torch.testing.assert_close(thunder.jit(program)(Y), program(Y), rtol=0, atol=0)


class Loud:
    def __radd__(self, other):
        return other * 3

    def __eq__(self, other):
        return "equal"

    __hash__ = None


OPERATORS = {
    "none": lambda x: (x == None, x != None, x == "a"),  # noqa: E711
    "users": lambda x: (x + Loud(), x == Loud()),
    "numpy": lambda x: (x + np.float32(2), np.float64(2) + 0 * 1, x * np.int64(3)),
    "reflected": lambda x: (2 - x, 2 / x, 2**x, 2 // x, 5 % x, 2 + x, 2 * x, 2 < x, 3 == x),
    "integers": lambda x: (
        x.long() << 2,
        2 << x.long(),
        x.long() >> 1,
        6 & x.long(),
        1 | x.long(),
        3 ^ x.long(),
        ~x.long(),
    ),
    "booleans": lambda x: (~(x > 1), (x > 1) & True, True | (x > 1), (x > 1) ^ (x < 2)),
    "unary": lambda x: (+x, -x, abs(-x)),
    "dunders": lambda x: (
        x.__rsub__(3),
        x.__rpow__(2),
        x.__rtruediv__(2),
        x.__rfloordiv__(2),
        x.__rmod__(2),
        x.__radd__(1),
        x.__rmul__(2),
        x.__pow__(2),
        x.__mod__(2),
    ),
    "keywords": lambda x: (
        torch.add(input=x, other=x, alpha=2),
        torch.sum(input=x, axis=0),
        torch.pow(x, exponent=2),
        torch.clamp(input=x, max=1.5),
    ),
    "keepdims": lambda x: (
        torch.sum(x, dim=(0,), keepdims=True),
        x.mean(axis=0, keepdims=True),
        torch.var(x, dim=0, keepdim=True, correction=0),
    ),
    "orders": lambda x: (
        x.sort(descending=True)[0],
        torch.sort(x, stable=True, dim=0)[1],
        x.argsort(0, True),
        torch.argsort(x, stable=True),
    ),
    "pairs": lambda x: (
        x.max(0).values,
        torch.min(x, dim=0, keepdim=True).indices,
        x.aminmax().max,
        torch.aminmax(x, dim=0).min,
        torch.max(x, other=x * 2),
    ),
    "out_none": lambda x: (torch.add(x, x, out=None), torch.max(x, 0, out=None)[0]),
    "where": lambda x: (
        torch.where(x > 1, x, 0.0),
        torch.where(x > 1, 1, 2),
        x.where(x > 1, -1.0),
        torch.where(condition=x > 1, input=x, other=x * 2),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_keywords(name):
    x = torch.tensor([1.0, 2.0, 3.0])
    program = OPERATORS[name]
    got, want = thunder.jit(program)(x), program(x)
    for g, w in zip(got, want, strict=True):
        if isinstance(w, torch.Tensor):
            torch.testing.assert_close(g, w, rtol=0, atol=0)
        else:
            assert g == w


@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.lt, operator.ge], ids=lambda f: f.__name__)
def test_operands_that_nobody_takes(function):
    for other in ("a", None):
        with pytest.raises(TypeError) as want:
            function(Y, other)
        with pytest.raises(TypeError) as got:
            thunder.jit(lambda x: function(x, other))(Y)
        assert str(got.value).split()[:3] == str(want.value).split()[:3]


@pytest.mark.parametrize(
    "program",
    [lambda x, y: torch.add(x, x, out=y), lambda x, y: torch.arange(3, out=y), lambda x, y: torch.div(x, 3, out=y)],
)
def test_out_is_written_to(program):
    ours, eagers = torch.ones(3), torch.ones(3)
    thunder.jit(program)(torch.ones(3), ours)
    program(torch.ones(3), eagers)
    torch.testing.assert_close(ours, eagers, rtol=0, atol=0)


def test_out_that_would_change_its_shape_is_refused():
    with (
        warnings.catch_warnings(),
        pytest.raises(CaptureError, match="would change the shape of its argument from \\(3,\\) to \\(\\)"),
    ):
        warnings.simplefilter("ignore")
        thunder.jit(lambda x, y: torch.max(x, 0, out=(y, y.long())))(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
@pytest.mark.parametrize("value", [-1, -200, -256, 300, 2**40, 1.5])
def test_numbers_that_an_integer_type_does_not_have(value, dtype):
    """They wrap around, are refused, or are left out as bounds are from torch 2.15 on: in the kernels that
    decompositions become as well."""
    x = torch.tensor([0, 1, 44, 100, 127], dtype=dtype)
    for program in (
        lambda x: x.clamp(value),
        lambda x: x.clamp(max=value),
        lambda x: torch.clamp_min(x, value),
        lambda x: x.clamp(-3, 1.5),
        lambda x: F.hardtanh(x, -3, value if value > -3 else 3),
        lambda x: F.threshold(x, value, 7),
        lambda x: F.threshold(x, 7, value),
        lambda x: x.masked_fill(x > 1, value),
        lambda x: torch.where(x > 1, value, x),
        lambda x: x < value,
        lambda x: x == value,
        lambda x: x + value,
    ):
        try:
            want = program(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as refused:
                thunder.jit(program)(x)
            assert str(error).splitlines()[0] in str(refused.value)
            continue
        compiled = thunder.jit(program)
        assert torch.equal(compiled(x), want)
        opened, _ = by_decomposition(compiled, [x])
        assert torch.equal(opened, want) and opened.dtype is want.dtype
