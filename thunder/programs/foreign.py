"""Programs that another user wrote: each operator's operands and results are checked before its kernel runs.

The text of such a program may call any operator that computes, with any operands (see `operators`), and PyTorch's
kernels do not check everything. A backward kernel reads memory by the sizes and indices that its forward would have
had, since nothing but autograd calls it. Therefore, in the first run for operands of some types, three things are
checked of each operator, and ProgramFileError is raised where one does not hold:

- The operator takes these operands without data (on the meta device), and its results are of the types that it says.
- A backward kernel's operands have the types that its forward has: `gelu_backward` is compared with `gelu`. What does
  not follow from that has a row in `ops.rules.operands`.
- Where an operator takes a dtype, a layout or a memory format, it gets no integer: C++ would read a table with it.

Later runs for the same types have the same types in between, and are not checked. Two kinds of programs are checked in
each run: those with sizes that depend on data, and, in kernels that read indices, these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from thunder import compat
from thunder.compat.batch_checks import tensor_batch_check
from thunder.core.symbol import Symbol
from thunder.errors import ProgramFileError
from thunder.ops.backward import KERNELS, is_pointwise
from thunder.ops.registry import PRIMS
from thunder.ops.rules import operands

_ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat")


def refused_name(functions: Sequence[Any]) -> str | None:
    """Of functions, the name of the first whose operands nothing can check; None where there is none."""
    return next((str(f) for f in functions if callable(f) and f in _unknown()), None)


def checked(function: Callable) -> Callable:
    """A function of another user's text, whose operators are checked in the first run for operands of some types."""
    same: Callable | None = None
    numbers: list = []
    reads_indices = False

    def run(*values):
        nonlocal same, numbers, reads_indices
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        others = [v for v in values if not isinstance(v, torch.Tensor)]
        types_are_known = same is not None and numbers == others and same(*tensors)
        if types_are_known and not reads_indices:
            return function(*values)
        operators = _operators()(types_are_known)
        with _Enumerations(), operators:
            results = function(*values)
        reads_indices = operators.reads_indices
        if operators.sizes_follow:
            numbers, same = others, tensor_batch_check(tensors, [t.shape for t in tensors], strides=True)
        return results

    return run


@functools.cache
def _unknown() -> frozenset:
    symbols = [s for s in (*KERNELS.values(), *PRIMS.values()) if operands.unknown.of(s)]
    return frozenset(s.fn for s in symbols)


class _Enumerations(TorchFunctionMode):
    """Refuses integers where an operator takes a dtype, a layout or a memory format."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, compat.OpOverload):
            _check_enumerations([function], args, kwargs)
        elif isinstance(function, compat.OpOverloadPacket):
            _check_enumerations([getattr(function, name) for name in function.overloads()], args, kwargs)
        return function(*args, **kwargs)


def _check_enumerations(overloads: Sequence[Any], args: Sequence, kwargs: dict) -> None:
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if type(value) is int and any(kind in str(argument.real_type) for kind in _ENUMERATIONS):
                if position >= len(args) or not any(_takes_integer(o, position) for o in overloads):
                    raise _refused(overload, f"{argument.name} is {value!r}, which is an integer")


def _takes_integer(overload: Any, position: int) -> bool:
    arguments = overload._schema.arguments
    kind = str(arguments[position].real_type) if position < len(arguments) else ""
    return any(number in kind for number in ("int", "Int", "number", "float"))


@functools.cache
def _operators() -> type:
    """The mode that checks operators; PyTorch's module of such modes is imported when it is first used."""

    class Operators(compat.TorchDispatchMode):
        """Runs each operator on tensors without data before it runs."""

        def __init__(self, types_are_known: bool):
            super().__init__()
            self.types_are_known = types_are_known  # an earlier run has checked them
            self.sizes_follow, self.reads_indices = True, False  # of this run: from the types of the program's operands

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            leaves, spec = compat.tree_flatten((args, kwargs))
            if not any(isinstance(x, torch.Tensor) for x in leaves):
                return operator(*args, **kwargs)
            self._check_operands(operator, args, kwargs, leaves)
            if self.types_are_known:
                return operator(*args, **kwargs)
            of_types, keywords = compat.tree_unflatten(list(map(_meta, leaves)), spec)
            declared = self._without_data(operator, of_types, keywords, leaves)
            results = operator(*args, **kwargs)
            if declared is not None and _kinds(declared) != _kinds(results):
                raise _refused(operator, f"its results are {_types([results])} where they should be "
                               f"{_types([declared])}")  # fmt: skip
            return results

        def _check_operands(self, operator: Any, args: tuple, kwargs: dict, leaves: list) -> None:
            name = operator._schema.name.partition("::")[2]
            if "_backward" not in name:
                return
            symbol = KERNELS.get(name, KERNELS.get(f"native_{name}"))
            self.reads_indices |= symbol is not None and operands.by_values.of(symbol) is True
            holds = operands.holds.of(symbol) if symbol is not None else None
            try:
                does = _as_in_forward(operator, symbol, *args, **kwargs) and (holds is None or holds(*args, **kwargs))
            except (AttributeError, IndexError, TypeError, ValueError):  # operands of another kind
                does = False
            if not does:
                raise _refused(operator, f"its operands are {_types(leaves)}, which no forward gives")

        def _without_data(self, operator: Any, args: tuple, kwargs: dict, leaves: list) -> Any:
            """The results without data; None where their sizes depend on data."""
            if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*operator.tags}:
                self.sizes_follow = False
                return None
            if not compat.has_meta_kernel(operator):
                return None
            try:
                return operator(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever an operator raises for types that it does not take
                raise _refused(operator, f"its operands are {_types(leaves)}: {error}") from None

    return Operators


def _as_in_forward(operator: Any, symbol: Symbol | None, *args: Any, **kwargs: Any) -> bool:
    """Whether the operands of a backward kernel have the types that its forward takes and returns."""
    named = dict(zip((a.name for a in operator._schema.arguments), args)) | kwargs
    tensors = {n: x for n, x in named.items() if isinstance(x, torch.Tensor)}
    cotangent = next(iter(tensors.values()))
    if symbol is not None and is_pointwise(symbol):
        return all(_is_like(x, cotangent) for x in tensors.values())
    forward = _forward_of(operator)
    if forward is None or not compat.has_meta_kernel(forward):
        return True
    inputs, taken = {}, set()
    for argument in forward._schema.arguments:
        name = next((n for n in (argument.name, *_OTHER_NAMES.get(argument.name, ())) if n in named), None)
        if name is not None:
            inputs[argument.name] = _meta(named[name])
            taken.add(name)
        elif not argument.has_default_value():
            if str(argument.type) not in _ANY:
                return True  # the forward's results follow from operands that the backward does not get
            inputs[argument.name] = _ANY[str(argument.type)]
    results = forward(**inputs)
    results = results if isinstance(results, (tuple, list)) else (results,)
    others = [x for n, x in tensors.items() if n not in taken]
    saved = zip(others[1:], results[1:])  # a result of shape (0,) is not saved
    is_first = others[0] is cotangent and _is_like(cotangent, results[0])
    return is_first and all(_is_like(x, result) or result.shape == (0,) for x, result in saved)


def _is_like(x: torch.Tensor, result: torch.Tensor) -> bool:
    return x.shape == result.shape or x.device.type != "cpu" and x.shape == (0,)  # the kernel does not save it there


_OTHER_NAMES = {"self": ("input", "self_or_result"), "input": ("self",), "training": ("train",)}
_ANY: dict[str, Any] = {"float": 0.1, "bool": False, "Optional[Tensor]": None, "Optional[bool]": True}


@functools.cache
def _forward_of(operator: Any) -> Any:
    """The operator of ATen that a backward kernel is named after."""
    stem = operator._schema.name.partition("::")[2].partition("_backward")[0]
    names = (stem, f"{stem}_forward", stem.removeprefix("_"))
    return next((f for n in names if (f := getattr(getattr(torch.ops.aten, n, None), "default", None))), None)


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _kinds(values: Any) -> list:
    return [(x.shape, x.dtype) for x in compat.tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def _types(values: Sequence[Any]) -> str:
    leaves = compat.tree_flatten(list(values))[0]
    return ", ".join(f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in leaves)


def _refused(operator: Any, why: str) -> ProgramFileError:
    return ProgramFileError(
        f"a loaded program calls {operator}, and {why}. Its file was forged or damaged: write it again with "
        "thunder.precompile"
    )
