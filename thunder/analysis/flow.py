"""Data flow: producers, consumers and uses of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.utils import consumers, producers

__all__ = ["consumers", "derived", "live_ins", "positions", "producers", "uses"]


def positions(bound_symbols: Sequence[BoundSymbol]) -> dict[Proxy, int]:
    """By value, the place of the bound symbol that produces it."""
    return {o: i for i, b in enumerate(bound_symbols) for o in b.outputs}


def live_ins(bound_symbols: Sequence[BoundSymbol], outputs: Iterable = ()) -> dict[Proxy, None]:
    """The values that bound symbols use, or that are among the outputs, and that no bound symbol defines, in order of
    their first uses."""
    defined = {o for b in bound_symbols for o in b.outputs}
    used = (*(i for b in bound_symbols for i in b.inputs), *outputs)
    return dict.fromkeys(v for v in used if isinstance(v, Proxy) and v not in defined)


def uses(bound_symbols: Iterable[BoundSymbol], outputs: Iterable[Proxy] = ()) -> Counter[Proxy]:
    """By value, how many bound symbols use it; being among the outputs of the program is a use."""
    return Counter(i for b in bound_symbols for i in dict.fromkeys(b.inputs)) + Counter(dict.fromkeys(outputs, 1))


def derived(bound_symbols: Iterable[BoundSymbol], values: Sequence[Proxy]) -> list[list[int]]:
    """By value, the places of the others that are computed from it, by values that require grad: what they pass on is a
    part of its gradient."""
    index_of: dict[Proxy, int] = {v: i for i, v in enumerate(values) if isinstance(v, TensorProxy) and v.requires_grad}
    sources: dict[Proxy, int] = {v: 0 for v in index_of}  # as bits, the places of the values that one is computed from
    for b in bound_symbols if len(index_of) > 1 else ():
        bits = 0
        for i in b.inputs:
            bits |= sources.get(i, 0) | (1 << index_of[i] if i in index_of else 0)
        for o in b.outputs if bits else ():
            if isinstance(o, TensorProxy) and o.requires_grad:
                sources[o] = sources.get(o, 0) | bits
    return [[j for o, j in index_of.items() if i != j and sources[o] >> i & 1] for i in range(len(values))]
