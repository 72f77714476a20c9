"""`thunder.core.utils`: small helpers, most of them by the names that Lightning Thunder's users know."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from thunder.core.proxies import Proxy
from thunder.core.signals import reported
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace


def check(condition: Any, message: Callable[[], str], exception_type: type[Exception] = RuntimeError) -> None:
    """Raises exception_type with the message, which is made only then, unless the condition holds."""
    if not condition:
        raise exception_type(message())


def sequencify(x: Any) -> Sequence:
    """A tuple or list as it is, anything else as a tuple of one."""
    return x if isinstance(x, (tuple, list)) else (x,)


def _operations(of: Trace | Iterable[BoundSymbol]) -> Iterable[BoundSymbol]:
    return of.bound_symbols if isinstance(of, Trace) else of


def producers(of: Trace | Iterable[BoundSymbol]) -> dict[Proxy, BoundSymbol]:
    """For each value the operation that makes it."""
    return {o: b for b in _operations(of) for inputs in (frozenset(b.inputs),) for o in b.outputs if o not in inputs}


def consumers(of: Trace | Iterable[BoundSymbol]) -> dict[Proxy, list[BoundSymbol]]:
    """For each value the operations that read it, in order."""
    by_value: dict[Proxy, list[BoundSymbol]] = {}
    for operation in _operations(of):
        for value in dict.fromkeys(operation.inputs):
            by_value.setdefault(value, []).append(operation)
    return by_value


def producers_and_consumers(
    of: Trace | Iterable[BoundSymbol],
) -> tuple[dict[Proxy, BoundSymbol], dict[Proxy, list[BoundSymbol]]]:
    operations = list(_operations(of))
    return producers(operations), consumers(operations)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Cyclic garbage is not looked for inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """A compilation. What signal handlers raise leaves it. It makes many objects that stay; looking through them for
    cyclic garbage again and again would be a third of its time."""
    with reported(), without_collection():
        yield


@functools.cache
def has_triton() -> bool:
    """Whether the package triton is installed. It is not imported for that, which takes long."""
    return importlib.util.find_spec("triton") is not None
