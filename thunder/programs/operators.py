"""The functions that programs on disk may call: those that carry out operations on tensors.

A file may come from somebody else, so that it must not name what reads files, or memory that no argument has. Nothing
here is a list of names. A function of PyTorch's is one that an operation of thunder's is executed by. An operator of
ATen is one whose schema and tags say that it computes: see `_computes`. A function of thunder's is one that the symbol
of an operation has, or that `carries_out` marks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.core.symbol import CARRIED_OUT, Symbol
from thunder.ops.registry import LTORCH, PRIMS, inplace_of


def is_operation(x: Any) -> bool:
    """Whether a function carries out an operation on tensors, and nothing else."""
    if isinstance(x, (compat.OpOverload, compat.OpOverloadPacket)):
        return _is_known_operator(x) or _of_aten(x)
    if isinstance(x, types.FunctionType) and (x.__module__ or "").startswith("thunder."):
        return x in CARRIED_OUT or x in _executing()
    if isinstance(x, types.MethodDescriptorType) and x in CARRIED_OUT:
        return True
    return _is_hashable(x) and (x in _executing() or isinstance(inplace_of(x), Symbol))


def _is_hashable(x: Any) -> bool:
    return getattr(type(x), "__hash__", None) is not None and callable(x)


@functools.cache
def _executing() -> frozenset[Callable]:
    """The functions that execute operations of `thunder.torch`, or do it in place."""
    symbols = [*LTORCH.values(), *PRIMS.values()]
    functions = {s.fn for s in symbols if s.fn is not None}
    functions |= {s.in_place.function for s in symbols if s.in_place is not None}
    return frozenset(functions)


@functools.cache
def _own_operators() -> frozenset[str]:
    """The names of the operators that operations of thunder's are executed by."""
    operators = {f for f in CARRIED_OUT if isinstance(f, (compat.OpOverload, compat.OpOverloadPacket))}
    operators |= {f for f in _executing() if isinstance(f, (compat.OpOverload, compat.OpOverloadPacket))}
    return frozenset(map(_name, operators))


def _name(operator: Any) -> str:
    return str(operator).partition(".")[2].partition(".")[0]


def _is_known_operator(x: Any) -> bool:
    is_own = str(x).startswith("aten.") and _name(x) in _own_operators()
    return is_own and (x in CARRIED_OUT or not isinstance(x, compat.OpOverload) or not x._schema.is_mutable)


@functools.lru_cache(maxsize=4096)
def _of_aten(x: Any) -> bool:
    """Whether an operator of ATen, or each overload of it that takes tensors, without `out=` and names of dimensions,
    computes."""
    if not str(x).startswith("aten."):
        return False
    if isinstance(x, compat.OpOverload):
        return _computes(x)
    overloads = [o for name in x.overloads() if not _is_other_form(o := getattr(x, name))]
    return bool(overloads) and all(map(_computes, overloads))


def _is_other_form(operator: Any) -> bool:
    arguments = operator._schema.arguments
    of_tensors = any("Tensor" in str(a.type) for a in arguments)
    return not of_tensors or any(a.is_out or "Dimname" in str(a.type) for a in arguments)


_TYPES = ("Tensor", "number", "int", "float", "bool", "complex", "Device", "Generator", "str")


def _computes(operator: Any) -> bool:
    """Whether the schema and the tags of an operator say that it makes new tensors of tensors.

    It is public; it writes to no argument, and PyTorch did not generate it of one that does (`set`, `resize`); it takes
    a tensor, and numbers, strings and tensors beside it: no storage and no stream; what makes tensors of no data
    (`layout=`) is one of the core operators, so that none reads a file or takes indices unchecked; and its results have
    shapes that follow from those of its arguments (it has a kernel for tensors without data), so that it does not look
    into a buffer for anything but numbers.
    """
    schema = operator._schema
    arguments = schema.arguments
    name = schema.name.partition("::")[2]
    if name.startswith("_") or schema.is_mutable or not schema.returns:
        return False
    if torch.Tag.generated in operator.tags:
        return False
    if any(not any(kind in str(a.type) for kind in _TYPES) for a in arguments):
        return False
    if any(a.name == "layout" for a in arguments):
        return torch.Tag.core in operator.tags
    return any("Tensor" in str(a.type) for a in arguments) and compat.has_meta_kernel(operator)
