"""`check(trace)`: the invariants of traces. `check_change(before, after)`: those of a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from thunder.core.host_calls import host_call, name_of
from thunder.core.proxies import Proxy, TensorProxy, proxies_in
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags, detached
from thunder.core.trace import Trace, TraceTag
from thunder.errors import DataDependentError, TraceCheckError


def check(trace: Trace, free: Iterable[Proxy] = ()) -> Trace:
    """Returns `trace` if each name is defined once and before its uses, no value is read after its `del`, and the
    recorded types are those of the meta rules. Otherwise raises TraceCheckError, which names the operation. free:
    values that are defined outside, of a part of a program."""
    defined: dict[str, Proxy] = {v.name: v for v in free}
    for a in trace.args:
        _define(trace, defined, a, None)
    for operation in trace.bound_symbols:
        for value in operation.inputs:
            if defined.get(value.name) is not value:
                raise _error(
                    trace,
                    operation,
                    f"{value.name} is used before it is defined, after it was deleted, or stands for two values",
                )
        if operation.sym.name == "python_del":
            for value in operation.inputs:
                del defined[value.name]
            continue
        _check_types(trace, operation)
        for o in operation.outputs:
            _define(trace, defined, o, operation)
    for value in trace.output_proxies:
        if defined.get(value.name) is not value:
            raise _error(trace, None, f"{value.name} is returned but not defined")
    return trace


def check_change(before: Trace, after: Trace) -> Trace:
    """Returns `after` if it is a trace, and if what a pass has to keep is what it was in `before`: the types of the
    values and of the results, and the order of effects. Otherwise raises TraceCheckError."""
    check(after, _free(before))
    known = {v.name: v for v in _values(before)}
    for value in _values(after):
        old = known.get(value.name)
        if old is not None and old is not value and not is_like(old, value):
            raise _error(after, None, f"{value.name} was {old!r} and is {value!r}")
    if before.info.cut is after.info.cut and before.info.backwards == after.info.backwards:
        arguments, now = (", ".join(a.name for a in t.args if isinstance(a, Proxy)) for t in (before, after))
        if arguments != now:
            raise _error(after, None, f"its arguments were ({arguments}) and are ({now})")
        if lost := _told(before) - _told(after):
            raise _error(after, None, f"it called {', '.join(lost)}, and does no more")
        results, now = _results(before), _results(after)
        if len(results) != len(now):
            raise _error(after, None, f"it returned {len(results)} values and returns {len(now)}")
        for i, (old, value) in enumerate(zip(results, now, strict=True)):
            if not is_like(old, value):
                raise _error(after, None, f"result {i} was {old!r} and is {value!r}")
        names = [[v.name for v in values] for values in (results, now)]
        if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
            raise _error(after, None, f"it returned {', '.join(names[0])}, and now {', '.join(names[1])}")
    _check_effects(before, after)
    return after


def _free(trace: Trace) -> list[Proxy]:
    """The values that a trace reads and does not define."""
    defined = set(_values(trace))
    return [i for b in trace.bound_symbols for i in b.inputs if i not in defined]


def _values(trace: Trace) -> list[Proxy]:
    return [*(a for a in trace.args if isinstance(a, Proxy)), *(o for b in trace.bound_symbols for o in b.outputs)]


def _results(trace: Trace) -> list[Proxy]:
    """The results that a program gives to its caller; the saved values of a forward are not among them."""
    output = trace.output
    if TraceTag.AUGMENTED_FORWARD in trace.tags and isinstance(output, tuple) and output:
        output = output[0]
    return proxies_in(output, [])


def is_like(a: Proxy, b: Proxy) -> bool:
    """Whether two values have the same type."""
    if type(a) is not type(b):
        return False
    same = not isinstance(a, TensorProxy) or (a.dtype, a.device) == (b.dtype, b.device)  # type: ignore[attr-defined]
    return same and _fits(a, b)


def _check_effects(before: Trace, after: Trace) -> None:
    """The effects that are in both programs are in the same order, and the same arguments are written to."""
    if lost := _written(before) - _written(after):
        raise _error(after, None, f"it wrote to {', '.join(sorted(lost))}, and does no more")
    position = {key: i for i, key in enumerate(_effects(before))}
    last, earlier = -1, None
    for key, operation in _effects(after).items():
        i = position.get(key)
        if i is None:
            continue
        if i < last:
            raise _error(after, operation, f"it runs behind {earlier!r}, and ran before it: both have effects")
        last, earlier = i, operation


def _told(trace: Trace) -> Counter[str]:
    """The calls of code on the host, by its name, and the checks of decisions: no program goes without them."""
    calls = (b for b in trace.bound_symbols if b.sym is host_call or OpTags.DECISION in b.sym.tags)
    return Counter(name_of(b.args[1]) if b.sym is host_call else b.sym.name for b in calls)


def _written(trace: Trace) -> set[str]:
    """The names of the arguments that operations write to, those in regions included."""
    names, written = {a.name for a in trace.args if isinstance(a, Proxy)}, set()
    pending = [*trace.bound_symbols]
    for b in pending:
        if OpTags.IN_PLACE in b.sym.tags:
            written.update(i.name for i in b.inputs[:1])
        pending += b._subsymbols or ()
    return written & names


def _effects(trace: Trace) -> dict[tuple, BoundSymbol]:
    """The operations with effects beyond their results, in order. Each is known by what it computes or, without
    results, by its text, and by how often the same was there before."""
    operations: dict[tuple, BoundSymbol] = {}
    counts: Counter = Counter()
    for operation in trace.bound_symbols:
        if operation.sym.tags.isdisjoint(EFFECTS):
            continue
        names = tuple(o.name for o in operation.outputs)
        key = (operation.sym.id, names or repr(operation))
        counts[key] += 1
        operations[*key, counts[key]] = operation
    return operations


def _define(trace: Trace, defined: dict[str, Proxy], value: Proxy, operation: BoundSymbol | None) -> None:
    known = defined.get(value.name)
    if known is not None and not (operation is not None and known is value and operation.has_input(value)):
        raise _error(trace, operation, f"{value.name} is defined twice")
    defined[value.name] = value


def _check_types(trace: Trace, operation: BoundSymbol) -> None:
    """Compares the types of an operation's results with those of its meta rule. Raises TraceCheckError."""
    rule = operation.sym.meta or operation.sym.decomposition
    if rule is None or operation.sym.is_fusion or operation.context is None or operation.sym.executor is not None:
        return
    with detached(operation.context):
        try:
            again = rule(*operation.args, **operation.kwargs)
        except DataDependentError:  # typed by examples, and checked when it runs
            return
    values = proxies_in(again, [])
    if len(values) != len(operation.outputs):
        raise _error(
            trace,
            operation,
            f"it has {len(operation.outputs)} values, the meta rule of {operation.sym.qualified_name} gives "
            f"{len(values)}",
        )
    for said, is_ in zip(operation.outputs, values, strict=True):
        if (
            type(said) is not type(is_)
            or (isinstance(said, TensorProxy) and (said.dtype, said.device) != (is_.dtype, is_.device))
            or not _fits(said, is_)
        ):
            raise _error(
                trace,
                operation,
                f"{said!r} is what the trace says, the meta rule of {operation.sym.qualified_name} says {is_!r}",
            )


def _fits(said: Proxy, is_: Proxy) -> bool:
    """Whether two shapes are equal, where this does not depend on data: an unbacked size has a new name each
    time."""
    if not isinstance(said, TensorProxy):
        return True
    pairs = zip(said.shape, is_.shape)  # type: ignore[attr-defined]
    if len(said.shape) != len(is_.shape):  # type: ignore[attr-defined]
        return False
    return not any((m == n) is False for m, n in pairs)


def _error(trace: Trace, operation: BoundSymbol | None, what: str) -> TraceCheckError:
    where = f"\n  {operation!r}" if operation is not None else ""
    error = TraceCheckError(f"{what}, in {trace.name} ({trace.provenance or 'as acquired'}){where}")
    error.bound_symbol = operation
    return error
