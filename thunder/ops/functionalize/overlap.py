"""In-place operations that read memory that they write to, under another place."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy, map_structure, proxies_in
from thunder.core.recording import undecided
from thunder.core.symbol import current_recorder, hashable, user_location
from thunder.errors import CaptureError, DataDependentError
from thunder.ops import infer, ltorch
from thunder.ops.functionalize.memory import Memory
from thunder.ops.functionalize.parts import are_disjoint
from thunder.ops.layout import is_dense

_REMEDY = "use the out-of-place form (x = x.t() for x.t_()), or do it outside of the compiled function"


def check_overlap(function: Callable | None, target: TensorProxy, args: tuple, kwargs: dict) -> None:
    """Raises what PyTorch raises where an in-place operation reads memory that it writes to, under another place: the
    functional form would give a result.

    Whether an operation minds is asked of PyTorch, with zeros laid out like the arguments.
    """
    memory = current_recorder().memory  # type: ignore[union-attr]
    if memory is None or memory.layout is None:
        return
    memory.declare(target)
    target, base = memory.holder(target), memory.base(target)
    others = [
        p
        for p in proxies_in((args, kwargs), [])
        if isinstance(p, TensorProxy) and memory.holder(p) is not target and memory.base(p) is base
    ]
    repeats = memory.repeats(target)
    if not (others or repeats) or function is None:
        return
    with compat.probing(draws=True), compat.quiet():
        try:
            with undecided():
                layouts = {memory.holder(p): memory.layout(p) for p in (target, *others)}
        except DataDependentError:
            if function is operator.setitem and _is_own_view(memory, *args):
                return
            refuse(f"{function.__name__} reads memory that it writes to, at data-dependent places")
        if not repeats and not any(_overlaps(layouts[target], layout) for layout in layouts.values()):
            _check_order(function, layouts, target, args)
            return
        size = layouts[target].untyped_storage().nbytes()
        if size > _PROBED_BYTES:
            refuse(f"{function.__name__} reads memory that it writes to, under another place")
        storage = torch.zeros(size, dtype=torch.uint8)

        def fake(x):
            layout = layouts.get(memory.holder(x)) if isinstance(x, TensorProxy) else None
            if layout is None:
                return infer.fake(x)
            return torch.empty(0, dtype=layout.dtype).set_(
                storage.untyped_storage(), layout.storage_offset(), layout.shape, layout.stride()
            )

        try:
            function(*map_structure(fake, args), **map_structure(fake, kwargs))
        except RuntimeError as error:
            if str(error).startswith("unsupported operation"):
                raise
            return
        _check_order(function, layouts, target, args)


def _check_order(function: Callable, layouts: dict, target: TensorProxy, args: tuple) -> None:
    """Refuses an operation that PyTorch takes, and that reads elements behind where it writes to them."""
    written = layouts[target]
    if function is operator.setitem:
        key = args[1] if type(args[1]) is tuple else (args[1],)
        if any(isinstance(part, TensorProxy) or type(part) in (list, bool) for part in key):
            return  # at places that an index tells, PyTorch looks itself
        written = written[args[1]]
    if any(_reads_written(written, layout) for p, layout in layouts.items() if p is not target):
        refuse(f"{function.__name__} reads memory that it writes to, under another place")


def _reads_written(target: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of one tensor lies where another element of the other is, of two with one storage."""
    if are_disjoint(target, other):
        return False
    try:
        other = other.expand(target.shape)
    except RuntimeError:
        return True
    if target.dtype is not other.dtype:
        return True
    (a, b), first = (target, other), min(target.storage_offset(), other.storage_offset())
    if a.stride() == b.stride() and a.storage_offset() == b.storage_offset():
        return False
    size = 1 + max(x.storage_offset() - first + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) for x in (a, b))
    if size * a.itemsize > _PROBED_BYTES:
        return True
    places = torch.full((size,), -1)
    own = torch.arange(a.numel()).view(a.shape)
    places.as_strided(a.shape, a.stride(), a.storage_offset() - first).copy_(own)
    owners = places.as_strided(b.shape, b.stride(), b.storage_offset() - first)
    return bool(((owners >= 0) & (owners != own)).any())


def _is_own_view(memory: Memory, a: TensorProxy, key, value) -> bool:
    """Whether `a[key] = value` puts `a[key]` back in its place, as `a[key] += 1` does."""
    operation, viewed = memory.view_of.get(memory.holder(value), (None, None))
    return (
        operation is not None
        and viewed is memory.holder(a)
        and operation.sym is ltorch.getitem
        and hashable(operation.args[1]) == hashable(key)
    )


_PROBED_BYTES = 1 << 24


def _overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with one storage are seen to share a part of it that is at different places in the two:
    PyTorch looks at dense ones only."""
    if a is b or not a.numel() or not b.numel() or not (is_dense(a) and is_dense(b)):
        return False
    (a0, a1), (b0, b1) = (
        (x.storage_offset() * x.itemsize, (x.storage_offset() + x.numel()) * x.itemsize) for x in (a, b)
    )
    return a.stride() != b.stride() if (a0, a1) == (b0, b1) else a0 < b1 and b0 < a1


def refuse(reason: str):
    raise CaptureError(reason, location=user_location(), remedy=_REMEDY)
