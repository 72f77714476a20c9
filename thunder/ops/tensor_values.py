"""Values of tensors that a program asks for as Python numbers: known where they depend on no input, data-dependent
otherwise."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.numbers import made_number
from thunder.core.proxies import (
    METHODS,
    NumberProxy,
    TensorProxy,
    concrete,
    converted,
    map_structure,
    numbers_in,
)
from thunder.core.symbol import OpTags, Recorder, Symbol, carries_out, current_recorder, user_location
from thunder.core.symbolic import Computed, constant
from thunder.errors import CaptureError
from thunder.ops import ltorch
from thunder.ops.infer import as_torch
from thunder.ops.promotion import broadcast_shapes
from thunder.ops.registry import alias, torch_prim
from thunder.ops.shape_rules import require

_FIXED_LINES = 256  # a longer computation of constants is not done while a program is captured


def fixed_value(a: TensorProxy) -> torch.Tensor | None:
    """The value of a tensor that depends on no input: made of sizes and constants alone, by operations that draw no
    numbers. None for any other, and where sizes stay symbolic."""
    recorder = current_recorder()
    operations = _fixed_operations(a, recorder) if recorder is not None else None
    if (
        recorder is None
        or operations is None
        or numbers_in([(operation.args, operation.kwargs) for operation in operations], [])
    ):
        return None
    return _run_fixed(operations, recorder.latest(a), {})


def value_of_sizes(a: TensorProxy, read: Callable[[torch.Tensor], int]) -> int | None:
    """`read` of the value of a tensor that is made of symbolic sizes and constants alone. It is decided by: the
    prologue computes it for other sizes. None for any other tensor."""
    recorder = current_recorder()
    operations = _fixed_operations(a, recorder) if recorder is not None else None
    if recorder is None or operations is None:
        return None
    numbers = numbers_in([(operation.args, operation.kwargs) for operation in operations], [])
    if not numbers or any(n.unbacked for n in numbers):
        return None
    names = sorted(set().union(*(n.expression.symbols() for n in numbers)))
    tensor, decisions = recorder.latest(a), numbers[0].decisions

    def function(*values: int) -> int:
        with compat.DisableTorchFunction():
            return int(read(_run_fixed(operations, tensor, dict(zip(names, values, strict=True)))))

    computed = Computed(function).of(names)
    value = computed.evaluate(decisions.values)
    decisions.decide(computed, "==", constant(value))
    return value


def _fixed_operations(a: TensorProxy, recorder: Recorder) -> list | None:
    """The operations that a tensor is made by, where it depends on no input."""
    needed: dict = {}  # each with its place in the program
    pending = [recorder.latest(a)]
    while pending:
        operation = recorder.producer(value := pending.pop())
        if (
            operation is None
            or operation.sym.fn is None
            or operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE}
            or len(needed) > _FIXED_LINES
        ):
            return None
        if operation not in needed:
            needed[operation] = recorder.position(value)
            pending += operation.inputs
    return sorted(needed, key=needed.__getitem__)


def _run_fixed(operations: list, a: TensorProxy, numbers: dict[str, int]) -> torch.Tensor:
    """numbers: the values of symbolic ones, by their names."""
    values: dict = {}

    def number(x):
        if isinstance(x, NumberProxy):
            return x.expression.evaluate(numbers)
        x = values[x] if isinstance(x, TensorProxy) else as_torch(x)
        # of a program that is planned
        absent = isinstance(x, torch.device) and x.type == "cuda" and not torch.cuda.is_available()
        return torch.device("cpu") if absent else x

    with compat.DisableTorchFunction(), torch.no_grad():
        for operation in operations:
            result = operation.sym.fn(*map_structure(number, operation.args), **map_structure(number, operation.kwargs))
            values |= zip(
                operation.outputs, [x for x in compat.tree_leaves(result) if isinstance(x, torch.Tensor)], strict=True
            )
    return values[a]


_READ = {"__bool__": bool, "__int__": int, "__float__": float, "__index__": operator.index}


def _needs_value(name: str, what: str, remedy: str):
    """A special method that needs the numbers in a tensor (`__bool__`, `__int__`): they are known where the program
    made the tensor of numbers or sizes, become a decision, or are refused. what, remedy: the words of the error."""
    read = _READ.get(name)

    def refuse(a, *args, **kwargs):
        value = fixed_value(a) if read is not None else None
        if value is not None:
            with compat.DisableTorchFunction():
                return read(value)  # type: ignore[misc]
        if read is not None and (known := value_of_sizes(a, read)) is not None:
            return read(known)
        recorder = current_recorder()
        if recorder is not None and recorder.decide is not None and name in _READ_NUMBER:
            return _READ_NUMBER[name](a, *args)
        raise CaptureError(
            f"{what}, which is known only when the program runs", location=user_location(), remedy=remedy
        )

    return refuse


def _of_item(read: Callable) -> Callable:
    """What `read` makes of the value of a tensor of one element."""

    def value(a: TensorProxy):
        if (a.numel_value != 1) is True:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return read(concrete(item(a)))

    return value


def _as_index(a):
    if (a.numel_value == 1) is not True or a.dtype.category > 1:
        raise TypeError("only integer tensors of a single element can be converted to an index")
    return operator.index(concrete(item(a)))


def _contains(a: TensorProxy, value) -> bool:
    if not isinstance(value, (TensorProxy, NumberProxy, int, float, complex)):
        kind = type(value)
        raise RuntimeError(f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {kind}.")
    return bool(ltorch.any(ltorch.eq(a, value)))


_READ_NUMBER = {
    "__bool__": lambda a: bool(is_nonzero(a)),
    **{f"__{t.__name__}__": _of_item(t) for t in (int, float, complex)},
    "__index__": _as_index,
    "__contains__": _contains,
}
_BRANCH = (
    "use torch.where or torch.cond-like arithmetic in place of the branch, or compute the condition outside "
    "and pass it in as a Python value"
)
_VALUE = "keep it a tensor, or compute it outside of the compiled function and pass it in"
for _name, _what, _remedy in [
    ("__bool__", "the truth of a tensor is needed", _BRANCH),
    ("__int__", "a tensor's value is needed as a Python int", _VALUE),
    ("__float__", "a tensor's value is needed as a Python float", _VALUE),
    ("__complex__", "a tensor's value is needed as a Python complex", _VALUE),
    ("__index__", "a tensor's value is needed as an index", _VALUE),
    ("__contains__", "whether a tensor contains a value is needed", _BRANCH),
    ("numpy", ".numpy() asks for a tensor's values", _VALUE),
]:
    _refuse = _needs_value(_name, _what, _remedy)
    METHODS[_name] = _refuse


_KINDS = {0: bool, 1: int, 2: float}  # category of a dtype -> what its values are in Python
_MOST_NUMBERS = 1024  # of one tensor


def _read_numbers(symbol: Symbol, a: TensorProxy, shape: tuple):
    """An operation that reads the values of a tensor as Python numbers, in lists of this shape."""
    recorder = current_recorder()
    if recorder is None or a.dtype.category not in _KINDS:
        raise CaptureError(
            f".{symbol.name}() asks for a tensor's value, which is known only when the program runs",
            location=user_location(),
            remedy=_BRANCH,
        )
    a, numbers = recorder.latest(a), []

    def read(rest: tuple):
        if rest:
            return [read(rest[1:]) for _ in range(rest[0])]
        unbacked, number = made_number(recorder, _KINDS[a.dtype.category], f"a value of {a.name}")
        numbers.append(number)
        return unbacked

    symbol.record(recorder, (a,), {}, results := read(shape))
    numbers_left = iter(numbers)
    return map_structure(lambda _: next(numbers_left), results)


def _read(name: str) -> Symbol:
    symbol = Symbol(name, module="ltorch", is_prim=True, fn=carries_out(getattr(torch.Tensor, name)))
    symbol.torch_functions = (symbol.fn,)
    return symbol


_item, _tolist = _read("item"), _read("tolist")


def item(a: TensorProxy):
    """`a.item()`: a data-dependent number, or the number itself where it depends on no input."""
    value = fixed_value(a)
    if value is not None:
        with compat.DisableTorchFunction():
            return value.item()
    if not _is_single(a):
        raise RuntimeError(f"a Tensor with {a.numel_value} elements cannot be converted to Scalar")
    recorder = current_recorder()
    if recorder is None:
        return _read_numbers(_item, a, ())
    tensor = _production(recorder, recorder.latest(a))
    if (known := recorder.read_numbers.get(tensor)) is not None:
        return known.number()
    number = _read_numbers(_item, a, ())
    recorder.read_numbers[tensor] = recorder.bound_symbols[-1].output
    return number


def _production(recorder: Recorder, a: TensorProxy) -> tuple:
    """A key that is equal for tensors that are made in the same way."""
    operation = recorder.producer(a)
    if operation is None or operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE}:
        return (a,)
    return (operation.rhs, tuple(o is a for o in operation.outputs))


def tolist(a: TensorProxy):
    """`a.tolist()`: the same in lists."""
    value = fixed_value(a)
    if value is not None:
        with compat.DisableTorchFunction():
            return value.tolist()
    if math.prod(map(concrete, a.shape)) > _MOST_NUMBERS:
        raise CaptureError(
            f".tolist() asks for the values of a tensor of more than {_MOST_NUMBERS} elements",
            location=user_location(),
            remedy=_VALUE,
        )
    return _read_numbers(_tolist, a, tuple(map(concrete, a.shape)))


def _truth(symbol: Symbol, *args, **kwargs):
    """What an operation says that gives a bool: a data-dependent condition, or the bool itself where it
    depends on no input."""
    values = [fixed_value(x) if isinstance(x, TensorProxy) else x for x in args]
    if all(v is not None for v in values) and not any(isinstance(x, TensorProxy) for x in kwargs.values()):
        with compat.DisableTorchFunction():
            return symbol.fn(*values, **kwargs)  # type: ignore[misc]
    return symbol(*args, **kwargs).number()


def _said(name: str):
    recorder = current_recorder()
    assert recorder is not None, "what is data-dependent is known in a trace only"
    return made_number(recorder, bool, f"what {name} says")[0]


@torch_prim(name="equal", fn=torch.equal)
def _equal(a, other):
    return _said("equal")


@alias(torch.equal, torch.Tensor.equal)
def equal(input, other):
    """Whether two tensors have one shape and the same values."""
    alike = input.dtype is other.dtype and input.device is other.device
    if alike and (
        len(input.shape) != len(other.shape) or any((m == n) is False for m, n in zip(input.shape, other.shape))
    ):
        return False
    return _truth(_equal, input, other)


@torch_prim(name="allclose", fn=torch.allclose)
def _allclose(a, other, rtol=1e-5, atol=1e-8, equal_nan=False):
    require(a.dtype is other.dtype and rtol >= 0 and atol >= 0)
    broadcast_shapes(a.shape, other.shape)
    return _said("allclose")


@alias(torch.allclose, torch.Tensor.allclose)
def allclose(*args, **kwargs):
    return _truth(_allclose, *args, **kwargs)


@torch_prim(name="is_nonzero", fn=torch.Tensor.is_nonzero)
def _is_nonzero(a):
    return _said("is_nonzero")


@alias(torch.is_nonzero, torch.Tensor.is_nonzero)
def is_nonzero(input):
    if not _is_single(input):
        raise RuntimeError(
            f"Boolean value of Tensor with {'no values' if input.numel_value == 0 else 'more than one value'} is "
            "ambiguous"
        )
    return _truth(_is_nonzero, input)


def _is_single(a: TensorProxy) -> bool:
    """Whether a tensor has one element, as far as can be known: where it has not, PyTorch raises when it runs."""
    try:
        return bool(a.numel_value == 1)
    except CaptureError:
        return True


def as_number(a: TensorProxy, kind: type):
    """`int(a)`, `float(a)`."""
    if (a.numel_value != 1) is True:
        raise ValueError("only one element tensors can be converted to Python scalars")
    return converted(item(ltorch.to(a, dtype=torch.int64) if a.dtype.category == 0 else a), kind)
