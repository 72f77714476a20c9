"""Operators of this PyTorch, and their schemas."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.compat.names import BY_NAME, KERNELS, Private


@functools.cache
def operators(name: str, *overloads: str) -> tuple:
    """The callables that a name means: the function of torch, the operator and its overloads. Empty where this
    PyTorch has none."""
    packet = getattr(torch.ops.aten, name, None)
    functions = (
        getattr(torch, name, None),
        packet,
        *(getattr(packet, overload, None) for overload in overloads or ("default",)),
    )
    return tuple(f for f in functions if f is not None)


@functools.cache
def kernel(name: str, overload: str = "default") -> Callable:
    """The kernel `torch.ops.aten.<name>.<overload>`: the function of torch that is nothing else, where there is one,
    which takes half of the time to call. Where this PyTorch has none, a function that raises MissingName."""
    row = KERNELS.get(name)
    assert row is not None or not name.startswith("_"), f"{name} is private and has no row in thunder/compat/names.py"
    operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if operator is not None:
        # which takes no None among tensors
        binding = getattr(torch, name, None) if overload == "default" and not _takes_gaps(operator) else None
        return binding if isinstance(binding, types.BuiltinFunctionType) else operator
    row = row or Private(name, f"torch.ops.aten.{name}.{overload}", "programs that call it", "these programs raise")

    def lacking(*args, **kwargs):
        return row.value()

    return lacking


def _takes_gaps(overload: Callable) -> bool:
    return any(str(a.type) == "List[Optional[Tensor]]" for a in overload._schema.arguments)


@functools.cache
def scan_keeps_dim(scan: Callable) -> bool:
    """Whether the results of PyTorch's `scan` lie along the dimension that it runs along, as from torch 2.13 on; they
    lay along the first before. Only a scan tells."""
    with compat.probing():
        _, rows = scan(lambda carry, x: (carry + x, x * 2), torch.zeros(1), torch.zeros(1, 2), dim=1)
    return rows.shape == (1, 2)


def unless_removed(name: str) -> tuple[Callable, ...]:
    """The function of torch and the method of tensors by a name; empty where they only raise that they are removed, as
    they do once ATen has no such operator."""
    return (getattr(torch, name), getattr(torch.Tensor, name)) if hasattr(torch.ops.aten, name) else ()


def foreach(name: str) -> tuple[Callable | None, Callable | None]:
    """`torch._foreach_<name>` and its in-place form, None where there is none."""
    return getattr(torch, f"_foreach_{name}", None), getattr(torch, f"_foreach_{name}_", None)


def functions_called(name: str) -> tuple[Callable, ...]:
    """Every callable of PyTorch's that goes by a name."""
    spaces = (torch.nn.functional, torch, torch.Tensor, compat.nn_bindings)
    return tuple(dict.fromkeys(f for space in spaces if (f := getattr(space, name, None)) is not None))


def existing(table: dict[str, Any]) -> dict[Callable, Any]:
    """{name of a row: value} as {the function: value}, of the functions that this PyTorch has."""
    return {function: value for name, value in table.items() if (function := BY_NAME[name].find()) is not None}


def scripted() -> tuple[type, ...]:
    """The types of the results of torch.jit.script."""
    types_of_results: dict[Any, Any] = existing({"ScriptFunction": None, "ScriptMethod": None})
    return tuple(types_of_results)


def scripted_from(function) -> Callable | None:
    """The Python function that torch.jit.script compiled, as torch.compile asks for it; None for methods, and for
    traced functions, which decide nothing."""
    is_function = getattr(function, "__qualname__", "") == "torch.jit.ScriptFunction"
    return getattr(function, "_torchdynamo_inline", None) if is_function else None


def is_disabled(function) -> bool:
    """Whether a function stands behind `torch.compiler.disable`."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def children_of(spec) -> list:
    """The parts of a pytree's structure; `children_specs` before torch 2.12."""
    return spec.children() if hasattr(spec, "children") else spec.children_specs


def has_meta_kernel(operator: Any) -> bool:
    """Whether an operator of ATen knows the shapes of its results without data, or is composed of operators that do."""
    name = operator._schema.name + (f".{operator._overloadname}" if operator._overloadname != "default" else "")
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    try:
        return any(compat.has_kernel_for_key(name, key) for key in keys)
    except RuntimeError:  # an operator of TorchScript's, which the dispatcher does not know
        return False
