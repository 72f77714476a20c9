"""Chains of matrix products as one operation: a composite of recorded operations, which a fusion executor runs as a
kernel and every other one by its decomposition."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.regions import Region, region_key
from thunder.core.symbol import BoundSymbol, OpTags, Symbol

_SYMBOLS: dict[Any, Symbol] = {}  # by what they compute, so that layers share kernels
_numbers = itertools.count()
REMEMBERED = 256
# in the place of a recorded operation, what computes its results of its arguments
Replacements = dict[BoundSymbol, Callable]


def is_chain(operation: BoundSymbol) -> bool:
    """Whether an operation is such a composite."""
    return isinstance(operation.sym.id, tuple) and operation.sym.id[0] == "chain"


def chain_symbol(
    name: str,
    operations: Sequence[BoundSymbol],
    inputs: Sequence[TensorProxy],
    outputs: Sequence[TensorProxy],
    replacements: Replacements,
    more: Callable[[dict], tuple] | None = None,
) -> Symbol:
    """The operation that computes `outputs`, and what `more` computes of the values, of `inputs`."""
    read = Region(operations, {*outputs}).inputs
    places = tuple(next((n for n, r in enumerate(read) if r is i), -1) for i in inputs)
    key = name, region_key(Region(operations, {*outputs})), places
    known = _SYMBOLS.get(key)
    if known is not None:
        return known

    def decomposition(*values: TensorProxy) -> tuple:
        table: dict[Proxy, Any] = dict(zip(inputs, values, strict=True))

        def there(x: Any) -> Any:
            return table.get(x, x) if isinstance(x, Proxy) else x

        for b in operations:
            args, kwargs = map_structure(there, b.args), map_structure(there, b.kwargs)
            run = replacements.get(b)
            result = run(table, *args, **kwargs) if run is not None else b.sym(*args, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            table |= dict(zip(b.outputs, results, strict=True))
        return (*(table[o] for o in outputs), *(more(table) if more is not None else ()))

    while len(_SYMBOLS) >= REMEMBERED:
        del _SYMBOLS[next(iter(_SYMBOLS))]
    tags = (OpTags.MATMUL_OP,)
    symbol = _SYMBOLS[key] = Symbol(name, id=("chain", name, next(_numbers)), decomposition=decomposition, tags=tags)
    return symbol
