"""Unstack Saved: a backward reads the parts of a saved stack as views of the stack, which are not saved beside it.

Before: `t2 = ltorch.stack([t0, t1], 0)` in the forward, and a backward that reads t0, t1 and t2. After: the backward
begins with `bw_t0 = ltorch.select(t2, 0, 0)`, `bw_t1 = ltorch.select(t2, 0, 1)`, and reads these and t2. So a scan that
stacks its states saves them once. A small part with a much longer lifetime than the stack is saved by itself. Parts of
a concatenation are too: they are few and large, and views of them have gaps, which kernels of images copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.analysis.flow import live_ins, producers
from thunder.analysis.lifetimes import last_uses
from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.rewrite import renamed_operation
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops import ltorch
from thunder.transforms.phases import marked, phases


def unstack_saved(trace: Trace) -> Trace:
    """The trace whose backwards read parts of saved stacks out of the stacks, where the parts have no other
    consumer."""
    for number in range(1, trace.info.backwards + 1):
        trace = _unstacked(trace, number)
    return trace


def _unstacked(trace: Trace, number: int) -> Trace:
    """The trace in which one backward reads the parts of saved stacks out of these."""
    forward, starts, backward, update, returned = phases(trace, number)
    cotangents = {b.output for b in starts}
    saved = [p for p in live_ins(backward, returned) if isinstance(p, TensorProxy) and p not in cotangents]
    last = last_uses([*forward, *starts, *backward], returned, alias_bases(backward, maybe=True).__getitem__)
    again = _parts_of_stacks(forward, saved, {a for a in trace.args if isinstance(a, Proxy)}, last)
    if not again:
        return trace
    table: dict[Proxy, Proxy] = {}
    parts = [renamed_operation(b, table, lambda o: trace.names.claim(f"bw_{o.name}")) for b in again]
    output = trace.output
    if returned:
        gradients = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, output["output"])
        output = output | {"output": gradients}
    operations = marked([*parts, *(b.swap(table) for b in backward)], number)
    return trace.replace(bound_symbols=[*forward, *starts, *operations, *update], output=output)


def _parts_of_stacks(
    operations: Sequence[BoundSymbol], saved: list[TensorProxy], arguments: set[Proxy], last: dict[Proxy, int]
) -> list[BoundSymbol]:
    """The operations that compute saved tensors from saved stacks. Arguments and their views are in memory anyway.
    last: by value, the place of its last use."""
    joins = [b for b in operations if b.sym is ltorch.stack]
    if not joins:
        return []
    bases = alias_bases(operations, maybe=True)
    views = {o: b for o, b in producers(operations).items() if o in bases}
    left: dict[Proxy, dict] = {}  # saved values by the bases that they may have
    for o in saved:
        left.setdefault(bases[o], {})[o] = None
    again: list[BoundSymbol] = []
    for join in reversed(joins):
        whole = join.outputs[0]
        users = left.get(whole)
        if not users:
            continue
        # a part is read out of the stack where nothing else keeps its memory
        parts = [
            (part, operation)
            for part, operation in _parts(join)
            if _alone(part, left.get(base := bases[part])) and base not in arguments
        ]
        late = _late(join, [part for part, _ in parts], max(last[user] for user in users), operations, last)
        parts = [(part, operation) for part, operation in parts if part not in late]
        if not parts:
            continue
        for user in users:
            again += [operation for operation in _way(user, whole, views) if operation not in again]
        left[whole] = {whole: None}
        for part, operation in parts:
            if left.pop(bases[part], None) is not None:
                again.append(operation)
    return again


def _late(
    join: BoundSymbol, parts: Sequence[TensorProxy], end: int, operations: Sequence[BoundSymbol], last: dict[Proxy, int]
) -> set[TensorProxy]:
    """The parts with uses after `end`, where the rest of the stack is dead, if holding the stack for them takes more
    bytes, weighted by lifetimes, than saving them beside it."""
    late = {part for part in parts if last[part] > end}
    beside = sum(map(nbytes, late))
    held = (nbytes(join.outputs[0]) - beside) * (max((last[part] for part in late), default=end) - end)
    return late if beside * (end - operations.index(join)) < held else set()


def _alone(o: Proxy, saved_values: dict[Proxy, None] | None) -> bool:
    """Whether `o` is the only one of these. Proxies are compared by identity: == is an operation of the program."""
    return saved_values is not None and len(saved_values) == 1 and next(iter(saved_values)) is o


def _way(o: Proxy, base: Proxy, views: dict[Proxy, BoundSymbol]) -> list[BoundSymbol]:
    """The views that lead from `base` to `o`."""
    way = []
    while o is not base:
        way.append(views[o])
        o = next(i for i in views[o].inputs if isinstance(i, TensorProxy))
    return way[::-1]


def _parts(join: BoundSymbol):
    """(part, operation that reads it out of the stack) for the parts that are in the stack without a cast."""
    tensors, dim = join.args[0], join.args[1] if len(join.args) > 1 else 0
    out = join.outputs[0]
    for i, part in enumerate(tensors):
        if part.dtype is out.dtype:
            yield part, ltorch.select.bind(out, dim, i, output=part, context=join.context)
