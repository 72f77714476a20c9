"""Derivatives of functions: `grad`, `value_and_grad`, `vjp`, each from a plain or compiled function to a compiled one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thunder.compiled import Compiled, jit, jit_with

__all__ = ["grad", "value_and_grad"]


def _derived(fn: Callable, derivative: str):
    compiled = fn if isinstance(fn, Compiled) else getattr(fn, "_compiled", None)
    if not isinstance(compiled, Compiled):
        compiled = getattr(jit(fn), "_compiled", None) or jit(fn)
    return jit_with(compiled.fn, dataclasses.replace(compiled.options, derivative=derivative, used_compile_options={}))


def grad(fn: Callable) -> Any:
    """A compiled function of fn's arguments: the list of the gradients of its tensors, one for each argument tensor (and parameter) that has one.

    The cotangents are ones. Floating-point arguments get gradients whether or not they require grad. fn's executors and options are kept.
    """
    return _derived(fn, "grad")


def value_and_grad(fn: Callable) -> Any:
    """A compiled function of fn's arguments: fn's value, and the list that `grad` gives."""
    return _derived(fn, "value_and_grad")
