"""Numbers that PyTorch reads from tensors, which a program may give it at places where it takes numbers only:
`x.view(t, -1)`, `x.sum(t)`, `torch.roll(x, t, 1)`. Where these places are, its schemas and annotations say."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types

import torch

from thunder import compat
from thunder.core.proxies import METHODS, TensorProxy
from thunder.interpreter.attributes import plain_attribute

# take tensors as places, and have no schemas
_BY_PLACE = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


def with_numbers(function, args: list, kwargs: dict) -> tuple[list, dict]:
    """Arguments, with a number for each tensor that stands where PyTorch takes numbers only: it reads one there, too.
    By an int that PyTorch never keeps symbolic, such as a dimension, the program decides."""
    if function in _BY_PLACE:
        return args, kwargs
    return [_number(function, i, a) for i, a in enumerate(args)], {
        k: _number(function, k, a) for k, a in kwargs.items()
    }


def _number(function, parameter: int | str, v):
    if type(v) in (list, tuple):
        if not any(_is_read(x) for x in v) or (kind := _number_kind(function, parameter, True)) is None:
            return v
        return type(v)(_read_number(x, kind) for x in v)
    return v if not _is_read(v) or (kind := _number_kind(function, parameter, False)) is None else _read_number(v, kind)


def _is_read(v) -> bool:
    """Whether PyTorch may read a number from a value."""
    return type(v) is TensorProxy and not v.shape and v.dtype.category in (1, 2) and not v.requires_grad


def _read_number(v, kind: str):
    if not _is_read(v) or v.dtype.category == 2 and kind != "Scalar":
        return v
    number = METHODS.call("item", v)
    return int(number) if kind == "int" and number.python_type is int else number


@functools.cache
def _number_kind(function, parameter: int | str, as_list: bool) -> str | None:
    """The kind of number that a function of PyTorch's takes at a place, or by a keyword: "int", "SymInt", "Scalar", or
    None where it may take a tensor, or no number."""
    kinds = _kinds(function, parameter)
    if any("Tensor" in kind for kind in kinds):
        return None
    if as_list:
        lists = [kind for kind in kinds if re.search(r"\[\d*\]|List|list|tuple|Size", kind)]
        kinds = lists or kinds if isinstance(function, types.FunctionType) else lists
    words = {word for kind in kinds for word in re.findall(r"\bSymInt\b|\bint\b|\bfloat\b|\bScalar\b|Size", kind)}
    if not words.isdisjoint(("float", "Scalar")):
        return "Scalar"
    return "int" if words == {"int"} else "SymInt" if words else None


def _kinds(function, parameter: int | str) -> list[str]:
    """The types that the annotations of a function, or its schemas, have at a place."""
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters
        name = parameter if isinstance(parameter, str) else next(itertools.islice(parameters, parameter, None), "")
        if name in parameters and (kind := parameters[name].annotation) not in _SAY_NOTHING:
            return [kind if isinstance(kind, str) else str(kind)]
        parameter = name  # an operation of this name may take others first
    kinds: list[str] = []
    if isinstance(function, compat.OpOverload):  # which takes tensors for tensors only
        return kinds
    for schema in compat.schemas_of(f"aten::{plain_attribute(function, '__name__', '')}"):
        if "Tensor" not in str(schema):  # TorchScript's, of Python's numbers
            continue
        written = {a.name: _written_type(schema, a.name) for a in schema.arguments}
        names = [a.name for a in schema.arguments if not a.kwarg_only]
        if type(function) is types.MethodDescriptorType and "self" in names:  # `x.polygamma(n)` of polygamma(n, self)
            names.insert(0, names.pop(names.index("self")))
        positional = [written[name] for name in names]
        if isinstance(parameter, str):
            kinds += [written[parameter]] if parameter in written else []
        elif (
            parameter < len(positional) or positional and "[" in positional[-1]
        ):  # whose elements may be given one by one
            kinds.append(positional[min(parameter, len(positional) - 1)])
    return kinds


# `BroadcastingList2[int]` of PyTorch's functions is None
_SAY_NOTHING = (inspect.Parameter.empty, None, types.NoneType)


def _written_type(schema, name: str) -> str:
    """The type of an argument as the text of a schema has it: its object says int for SymInt."""
    match = re.search(rf"(\S+) {name}(?=[=,)])", str(schema))
    return match[1] if match is not None else ""
