"""Aliases: which values are views, and of what."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rule_table import Property, RuleTable
from thunder.core.symbol import BoundSymbol, OpTags

shares: RuleTable[Callable[..., bool] | None] = RuleTable(None)
"""(*args, **kwargs): whether the results of a VIEW operation may share memory with its first tensor."""

shows: RuleTable[int | None] = RuleTable(None)
"""The position of the argument whose memory the result of a VIEW operation shows, where it has several tensors."""

may_copy = Property()
"""A VIEW operation that copies where the strides do not allow a view."""


class Bases(dict[Proxy, Proxy]):
    """By view, the value whose memory it is in. Any other value is in its own."""

    def __missing__(self, value: Proxy) -> Proxy:
        return value


def may_view(bound_symbol: BoundSymbol) -> bool:
    """Whether an output of an operation may share memory with its first tensor; `shares` decides by the
    arguments."""
    symbol = bound_symbol.sym
    if OpTags.VIEW not in symbol.tags:
        return False
    return (decide := shares.of(symbol)) is None or decide(*bound_symbol.args, **bound_symbol.kwargs)


def is_view(bound_symbol: BoundSymbol) -> bool:
    """Whether the outputs of an operation share memory with one tensor, whatever the strides are."""
    return may_view(bound_symbol) and not may_copy.of(bound_symbol.sym) and _shown_by(bound_symbol) is not None


def _shown_by(bound_symbol: BoundSymbol) -> TensorProxy | None:
    """The tensor whose memory the results of a VIEW operation show; None where that is not known."""
    if (index := shows.of(bound_symbol.sym)) is not None:
        return bound_symbol.args[index]
    tensors = [i for i in bound_symbol.inputs if isinstance(i, TensorProxy)]
    return tensors[0] if len(tensors) == 1 else None


def alias_bases(bound_symbols: Iterable[BoundSymbol], *, maybe: bool = False, copies: Container[str] = ()) -> Bases:
    """The bases of all views. maybe: also of results that are views or copies, as their strides decide; but for
    `copies`, names of those that are known to be copies."""
    bases, holds = Bases(), may_view if maybe else is_view
    for b in bound_symbols:
        if holds(b) and (source := _shown_by(b)) is not None:
            bases |= dict.fromkeys([o for o in b.outputs if o.name not in copies], bases[source])
    return bases
