"""The operands of attention without copies: keys and values that a kernel can read in place, and those of fewer heads
than the queries."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder import compat
from thunder.analysis.aliases import may_view
from thunder.core.proxies import Proxy, TensorProxy, equal_shapes, number_value, numbers_in
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.ops import ltorch
from thunder.ops.families.attention import fits_flash_for_cpu
from thunder.ops.layout import run_line
from thunder.ops.torch_types import to_torch_dtype

ALIGNMENT = 16  # bytes


def arguments_of(operation: BoundSymbol) -> tuple:
    """query, key, value, attn_mask, dropout_p, is_causal."""
    query, key, value, *rest = operation.args
    return query, key, value, *rest, *(None, 0.0, False)[len(rest) :]


def without_copies(operation: BoundSymbol, producer: dict[Proxy, BoundSymbol], choose: Callable) -> BoundSymbol:
    """The operation with keys and values that kernels read as well where they lie as where they are copied to: a cache
    that was empty joins them with nothing. The result is laid out as the query is, which stays."""
    if choose(*arguments_of(operation), bool(operation.kwargs.get("enable_gqa"))) is None:
        return operation
    query, *key_and_value = operation.args[:3]
    uncopied = [_uncopied(x, producer) for x in key_and_value]
    if all(a is b for a, b in zip(uncopied, key_and_value, strict=True)):
        return operation
    return operation.replace(args=(query, *uncopied, *operation.args[3:]))


def _uncopied(x: TensorProxy, producer: dict[Proxy, BoundSymbol]) -> TensorProxy:
    operation = producer.get(x)
    if operation is None or operation.sym not in (ltorch.clone, ltorch.contiguous, ltorch.cat):
        return x
    source = operation.args[0]
    if operation.sym is ltorch.cat:
        parts = [t for t in source if len(t.shape) != 1 or t.shape[0] != 0]
        source = parts[0] if len(parts) == 1 else None
    fits = source is not None and source.dtype is x.dtype and source.requires_grad is x.requires_grad
    return _uncopied(source, producer) if fits and _is_aligned(source, producer) else x


def _is_aligned(x: TensorProxy, producer: dict[Proxy, BoundSymbol]) -> bool:
    """Whether a view of a row-major result has dense rows that begin at multiples of 16 bytes."""
    views, base = [], x
    while (operation := producer.get(base)) is not None and may_view(operation):
        if sum(isinstance(i, TensorProxy) for i in operation.inputs) != 1 or OpTags.OPAQUE in operation.sym.tags:
            return False
        views.append(operation)
        base = operation.args[0]
    if operation is None or any(n.unbacked for n in numbers_in(base, [])):
        return False
    shape = tuple(map(number_value, base.shape))
    values: dict = {base: torch.empty(shape, dtype=to_torch_dtype(base.dtype), device="meta")}
    with compat.DisableTorchFunction():
        for operation in reversed(views):
            run_line(operation, values, number_value)
    value = values[x]
    *steps, last = (value.storage_offset(), *value.stride())
    return last == 1 and all(n * value.element_size() % ALIGNMENT == 0 for n in steps)


def grouped(operation: BoundSymbol, producer: dict[Proxy, BoundSymbol], choose: Callable) -> tuple | None:
    """Keys and values of fewer heads, where those that go into an operation are repetitions of them and its kernel
    takes them as they are."""
    query, key, value, attn_mask, dropout_p, is_causal = arguments_of(operation)
    if operation.kwargs.get("enable_gqa") or len(query.shape) != 4:
        return None
    repeated = [_repeated(x, producer) for x in (key, value)]
    if any(f is None for f in repeated) or repeated[0][1] != repeated[1][1]:  # type: ignore[index]
        return None
    (key, _), (value, _) = repeated  # type: ignore[misc]
    if (
        fits_flash_for_cpu(query, key, value, attn_mask, dropout_p, True)
        or choose(query, key, value, attn_mask, dropout_p, is_causal, True) is not None
    ):
        return key, value
    return None


def _repeated(x: TensorProxy, producer: dict[Proxy, BoundSymbol]) -> tuple[TensorProxy, int] | None:
    """(what is repeated, how often) of a value each head of which is repeated."""
    operation = producer.get(x)
    if operation is None or len(x.shape) != 4:
        return None
    if operation.sym is ltorch.repeat_interleave:
        source, times, dim = (*operation.args, None, None)[:3]
        return (
            (source, times)
            if type(times) is int
            and type(dim) is int
            and dim in (1, -3)
            and not operation.kwargs
            and len(source.shape) == 4
            else None
        )
    if not operation.sym.reshapes:
        return None
    spread = producer.get(operation.args[0])
    if (
        spread is None
        or spread.sym is not ltorch.expand
        or (inserted := producer.get(spread.args[0])) is None
        or len(spread.output.shape) != 5
    ):
        return None
    b, h, n, t, d = spread.output.shape
    source = inserted.args[0]
    if not _inserts_third(inserted) or not (
        equal_shapes(source.shape, (b, h, t, d)) and equal_shapes(x.shape, (b, h * n, t, d))
    ):
        return None
    return source, n


def _inserts_third(operation: BoundSymbol) -> bool:
    """Whether an operation gives a tensor of 4 dimensions another one of size 1 at place 2."""
    if not operation.inputs or len(getattr(operation.inputs[0], "shape", ())) != 4:
        return False
    if operation.sym is ltorch.unsqueeze:
        return operation.args[1] in (2, -3)
    key = operation.args[1] if operation.sym is ltorch.getitem and isinstance(operation.args[1], tuple) else ()
    return (
        len(key) >= 3
        and key[2] is None
        and all(_is_all(k) for k in key[:2])
        and all(k is ... or _is_all(k) for k in key[3:])
    )


def _is_all(key) -> bool:
    return isinstance(key, slice) and key.start is None and key.stop is None and key.step is None
