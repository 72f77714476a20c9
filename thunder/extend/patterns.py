"""Patterns: traced functions, and the operations of a trace that compute the same.

    pattern                                        program
    t0 = ltorch.transpose(k, -2, -1)               t6 = Tensor.mT of t5
    t1 = ltorch.matmul(q, t0)                      t7 = ltorch.matmul(t4, t6)
    t2 = ltorch.mul(t1, scale)                     t8 = ltorch.mul(0.125, t7)

A match is sought in two steps. The pattern as traced on examples says which operations read each other; sizes and
other literals match anything. The match gives the values of the parameters. The pattern is then traced on these values,
and each operation has to compute exactly what the one in the program computes: so sizes, scales and dtypes that follow
from the parameters are checked, for operands of any rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from thunder.analysis.aliases import may_view
from thunder.core import dtypes
from thunder.core.numbers import are_equal
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, equal_shapes, numbers_in, proxies_in
from thunder.core.regions import leading_to
from thunder.core.symbol import EFFECTS, BoundSymbol, Context, Names, OpTags, Recorder, Symbol, recording
from thunder.core.trace import Trace
from thunder.core.utils import consumers, producers
from thunder.ops import ltorch, prims
from thunder.ops.rules.algebra import commutes

# operations that have several names: `x.mT` and `x.transpose(-2, -1)`, `torch.mm` and `@`
_SEVERAL_NAMES = frozenset((OpTags.SHAPE_OP, OpTags.VIEW, OpTags.MATMUL_OP))


@dataclass(frozen=True)
class Parameter:
    """A parameter of a pattern that is a number or a dtype, where it is an argument of an operation."""

    name: str


@dataclass(frozen=True)
class Pattern:
    """A traced function. parameters: by name, its tensors and `Parameter`s. literals: whether literals have to be
    equal; else they match any."""

    parameters: Mapping[str, Any]
    operations: tuple[BoundSymbol, ...]
    outputs: tuple[Proxy, ...]
    literals: bool
    sites: Mapping[BoundSymbol, tuple[tuple, dict]] = field(default_factory=dict)

    @cached_property
    def producer(self) -> dict[Proxy, BoundSymbol]:
        return producers(self.operations)

    @property
    def first(self) -> BoundSymbol:
        """The operation that computes the first result."""
        return self.producer[self.outputs[0]]

    def may_begin_at(self, symbol: Symbol) -> bool:
        """Whether an operation may compute the first result."""
        first = self.first.sym
        return symbol is first or not first.tags.isdisjoint(symbol.tags & _SEVERAL_NAMES)


def traced(function: Callable, arguments: Sequence, context: Context | None = None) -> tuple[list[BoundSymbol], Any]:
    """The operations that a function records when it is called with proxies, and its result. Nothing of the program
    that the proxies belong to changes."""
    names = Names()
    if context is not None:
        names.facts = context.names.facts
        context = context.replace(names=names)
    with recording(Recorder(context or Context(names))) as recorder:
        result = function(*arguments)
    return leading_to(recorder.bound_symbols, proxies_in(result, []), lambda b: OpTags.DONT_DCE in b.sym.tags), result


# ---------------------------------------------------------------------------------------------------- flow of a program


class Flow:
    """The flow of data in a trace, as the conditions of rules ask for it.

    lowering: what the program is lowered for (`thunder.extend.passes.Lowering`). answers: of conditions, which they
    keep for other matches in the same trace.
    """

    def __init__(self, trace: Trace, lowering: Any):
        self.trace, self.lowering = trace, lowering
        self.answers: dict[Any, Any] = {}

    @cached_property
    def producers(self) -> dict[Proxy, BoundSymbol]:
        return producers(self.trace)

    @cached_property
    def _consumers(self) -> dict[Proxy, list[BoundSymbol]]:
        return consumers(self.trace)

    @cached_property
    def results(self) -> frozenset[Proxy]:
        """The values that the program returns."""
        return frozenset(self.trace.output_proxies)

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the values that the program writes over others in place, and of those others."""
        return frozenset((*self.trace.info.written, *self.trace.info.written.values()))

    @cached_property
    def positions(self) -> dict[int, int]:
        """By the id of an operation, its position."""
        return {id(b): i for i, b in enumerate(self.trace.bound_symbols)}

    @cached_property
    def effects(self) -> list[int]:
        """By position, how many operations with effects are before it."""
        counts, count = [], 0
        for b in self.trace.bound_symbols:
            counts.append(count)
            count += not EFFECTS.isdisjoint(b.sym.tags)
        return [*counts, count]

    @cached_property
    def by_symbol(self) -> dict[Symbol, list[BoundSymbol]]:
        """The operations of each symbol, in order."""
        by_symbol: dict[Symbol, list[BoundSymbol]] = {}
        for b in self.trace.bound_symbols:
            by_symbol.setdefault(b.sym, []).append(b)
        return by_symbol

    def producer(self, value: Any) -> BoundSymbol | None:
        """The operation that computes a value; None of an argument of the program."""
        return self.producers.get(value) if isinstance(value, Proxy) else None

    def consumers(self, value: Proxy) -> list[BoundSymbol]:
        """The operations that read a value, in order."""
        return self._consumers.get(value, [])

    def uses(self, value: Proxy) -> int:
        """How many operations read a value; being a result of the program counts as one."""
        return len(self.consumers(value)) + (value in self.results)

    def position(self, operation: BoundSymbol) -> int:
        return self.positions[id(operation)]

    def defined_at(self, value: Any) -> int:
        """The position of the operation that computes a value; -1 for others."""
        producer = self.producer(value)
        return -1 if producer is None else self.position(producer)


@dataclass(frozen=True)
class Match:
    """Operations that compute what a pattern does.

    arguments: the values of the parameters; of an operation as the pattern, its own, and its keywords. operations: in
    the order of the program. outputs: the values that the pattern returns. flow: of the program. anchor: the operation
    in whose place the replacement is written.
    """

    arguments: tuple
    keywords: Mapping[str, Any]
    operations: tuple[BoundSymbol, ...]
    outputs: tuple[Proxy, ...]
    flow: Flow
    anchor: BoundSymbol

    @property
    def operation(self) -> BoundSymbol:
        """The last one."""
        return self.operations[-1]

    @property
    def lowering(self) -> Any:
        return self.flow.lowering


# ------------------------------------------------------------------------------------------------------------- matching


@dataclass(frozen=True)
class _State:
    """Part of a match. values: by value of the pattern, that of the program; by name of a `Parameter`, its value.
    begun: how many operations of the pattern have a partner, be it that its operands have none yet."""

    values: Mapping[Any, Any] = field(default_factory=dict)
    operations: Mapping[BoundSymbol, BoundSymbol] = field(default_factory=dict)
    between: tuple[BoundSymbol, ...] = ()
    begun: int = 0

    def with_value(self, key: Any, value: Any) -> _State:
        return replace(self, values={**self.values, key: value})


@dataclass
class Attempt:
    """How far a pattern came: the most operations that one attempt matched, why it went no further, and where."""

    matched: int = 0
    reason: str = ""
    operation: BoundSymbol | None = None

    def note(self, matched: int, reason: str, operation: BoundSymbol | None = None) -> None:
        if matched > self.matched:
            self.matched, self.reason, self.operation = matched, reason, operation


class Matcher:
    """Matches one pattern against one program."""

    def __init__(self, pattern: Pattern, flow: Flow, attempt: Attempt):
        self.pattern, self.flow, self.attempt = pattern, flow, attempt

    def at(self, operation: BoundSymbol) -> Iterator[_State]:
        """The matches whose first result `operation` computes."""
        for state in self._operation(self.pattern.first, operation, _State()):
            yield from self._others(self.pattern.outputs[1:], state)

    def _others(self, outputs: Sequence[Proxy], state: _State) -> Iterator[_State]:
        """Matches with the other results of the pattern, too."""
        if not outputs:
            yield state
            return
        if outputs[0] in state.values:
            yield from self._others(outputs[1:], state)
            return
        node = self.pattern.producer[outputs[0]]
        near = (c for v in state.values.values() if isinstance(v, Proxy) for c in self.flow.consumers(v))
        candidates = dict.fromkeys(near) if not node.inputs or any(i in state.values for i in node.inputs) else None
        for operation in candidates if candidates is not None else self.flow.trace.bound_symbols:
            for further in self._operation(node, operation, state):
                yield from self._others(outputs[1:], further)

    def _value(self, wanted: Proxy, value: Any, state: _State) -> Iterator[_State]:
        """Matches in which the program's `value` is `wanted` of the pattern."""
        if not isinstance(value, TensorProxy):
            return
        known = state.values.get(wanted)
        if known is not None:
            if any(known is v for v, _ in equal_values(value, self.flow.producers)):
                yield state
            return
        node = self.pattern.producer.get(wanted)
        if node is None:
            yield state.with_value(wanted, value)
            return
        if value not in self.flow.producers:
            self.attempt.note(state.begun, f"{node.sym.name} was expected where {value.name} is an argument")
        for earlier, between in equal_values(value, self.flow.producers):
            operation = self.flow.producers.get(earlier)
            if operation is None:
                continue
            for further in self._operation(node, operation, state):
                if further.values.get(wanted) is earlier:
                    yield replace(further, between=(*further.between, *between))

    def _operation(self, node: BoundSymbol, operation: BoundSymbol, state: _State) -> Iterator[_State]:
        """Matches in which an operation of the program is `node` of the pattern."""
        known = state.operations.get(node)
        if known is not None:
            if known is operation:
                yield state
            return
        if any(operation is other for other in state.operations.values()):
            return
        forms = list(self._forms(node, operation)) if len(node.outputs) == len(operation.outputs) else []
        if not forms:
            self.attempt.note(state.begun, f"{node.sym.name} was expected where {operation.sym.name} is", operation)
        begun = replace(state, begun=state.begun + 1)
        for one, other, exact in forms:
            for further in self._arguments(one, other, exact, begun):
                if not exact and self.pattern.literals and not _computes_same(node, operation, further.values):
                    continue
                if self.pattern.literals and any(map(_loses_gradient, node.outputs, operation.outputs)):
                    continue
                values = {**further.values, **dict(zip(node.outputs, operation.outputs))}
                yield replace(further, values=values, operations={**further.operations, node: operation})

    def _forms(self, node: BoundSymbol, operation: BoundSymbol) -> Iterator[tuple[tuple, tuple, bool]]:
        """Arguments of the pattern's operation and of the program's that have to match, and whether literals have to be
        equal: of the two themselves where they are the same, else of the one primitive that both are."""
        exact = self.pattern.literals
        if node.sym is operation.sym:
            args, kwargs = self.pattern.sites.get(node, (node.args, node.kwargs))
            one, other = _aligned(node, args, kwargs), _aligned(operation, operation.args, operation.kwargs)
            swaps = commutes.holds(node) and commutes.holds(operation)
        else:
            if node.sym.tags.isdisjoint(operation.sym.tags & _SEVERAL_NAMES):
                return
            first, second = node.primitive, operation.primitive
            if first is None or second is None or first.sym is not second.sym:
                return
            one, other, swaps = (first.args, first.kwargs), (second.args, second.kwargs), commutes.holds(first)
            if (sites := self.pattern.sites.get(first)) is not None:
                one = sites
        orders = [other, ((other[0][1], other[0][0], *other[0][2:]), other[1])] if swaps else [other]
        for order in orders:
            yield one, order, exact
            if exact:  # other literals may mean the same: a dimension from the end
                yield one, order, False

    def _arguments(self, one: tuple, other: tuple, exact: bool, state: _State) -> Iterator[_State]:
        (args, kwargs), (others, keywords) = one, other
        if kwargs.keys() != keywords.keys():
            return
        yield from self._all([*args, *kwargs.values()], [*others, *(keywords[k] for k in kwargs)], exact, state)

    def _all(self, wanted: Sequence, values: Sequence, exact: bool, state: _State) -> Iterator[_State]:
        """Matches of all arguments, one after the other."""
        if len(wanted) != len(values):
            if not exact and not proxies_in((wanted, values), []):
                yield state
            return
        if not wanted:
            yield state
            return
        for further in self._one(wanted[0], values[0], exact, state):
            yield from self._all(wanted[1:], values[1:], exact, further)

    def _one(self, wanted: Any, value: Any, exact: bool, state: _State) -> Iterator[_State]:
        """Matches in which one argument of the program is `wanted` of the pattern."""
        if isinstance(wanted, Proxy):
            yield from self._value(wanted, value, state)
        elif isinstance(wanted, Parameter):
            if _is_literal(value) and same_literal(state.values.get(wanted.name, value), value):
                yield state.with_value(wanted.name, value)
        elif isinstance(wanted, (tuple, list)) and isinstance(value, (tuple, list)):
            yield from self._all(wanted, value, exact, state)
        elif not isinstance(value, Proxy) and (same_literal(wanted, value) if exact else not proxies_in(value, [])):
            yield state
        elif exact:
            self.attempt.note(state.begun, f"{wanted!r} was expected where {value!r} is an argument")


def _loses_gradient(wanted: Proxy, value: Proxy) -> bool:
    """Whether a value of the program does not require grad, and that of the pattern does."""
    return getattr(wanted, "requires_grad", False) and not getattr(value, "requires_grad", False)


def _is_literal(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, NumberProxy, torch.dtype, dtypes.dtype))


def _aligned(operation: BoundSymbol, args: tuple, kwargs: Mapping) -> tuple[tuple, dict]:
    """Arguments with the defaults of those that a call leaves out, and dimensions counted from the first one."""
    symbol = operation.sym
    rest = []
    for name in list(symbol.parameters)[len(args) :]:
        if name not in symbol.defaults:
            break
        rest.append(symbol.defaults[name])
    keywords = {k: v for k, v in symbol.defaults.items() if k not in symbol.parameters and k not in kwargs}
    args, rank = (*args, *rest), _rank_of_dimensions(operation)
    if rank:
        named = zip(args, symbol.parameters)
        counted = tuple(x % rank if type(x) is int and name.startswith("dim") else x for x, name in named)
        args = counted + args[len(symbol.parameters) :]
    return args, {**kwargs, **keywords}


def _rank_of_dimensions(operation: BoundSymbol) -> int:
    """How many dimensions there are that arguments count: those of the input of most dimensions. 0 where the result has
    more, since functions count those of either."""
    rank = max((len(p.shape) for p in operation.inputs if isinstance(p, TensorProxy)), default=0)
    return rank if all(len(o.shape) <= rank for o in operation.outputs if isinstance(o, TensorProxy)) else 0


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals mean the same. Floats may differ by a few units in the last place, as `1 / sqrt(n)` and
    `n ** -0.5` do."""
    numbers = isinstance(a, (int, float, NumberProxy)) and isinstance(b, (int, float, NumberProxy))
    if numbers and (isinstance(a, NumberProxy) or isinstance(b, NumberProxy)):
        return are_equal(a, b)
    if isinstance(a, (Proxy, NumberProxy)) or isinstance(b, (Proxy, NumberProxy)):
        return a is b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same_literal, a, b))
    if isinstance(a, slice) and isinstance(b, slice):
        return same_literal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if type(a) is bool or type(b) is bool:
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or math.isclose(a, b, rel_tol=1e-15 * 4) or a != a and b != b
    if isinstance(a, (torch.dtype, dtypes.dtype)) and isinstance(b, (torch.dtype, dtypes.dtype)):
        return dtypes.to_dtype(a) is dtypes.to_dtype(b)
    return a is b or type(a) is type(b) and bool(a == b)


def _computes_same(node: BoundSymbol, operation: BoundSymbol, values: Mapping[Any, Any]) -> bool:
    """Whether two operations have equal decompositions, where operands of one are those of the other."""
    table = {i: values[i] for i in node.inputs if i in values}
    return _equal_parts(node.subsymbols, operation.subsymbols, table)


def _equal_parts(some: Sequence[BoundSymbol], others: Sequence[BoundSymbol], table: dict[Proxy, Any]) -> bool:
    """Whether two decompositions are equal, one operation after the other; fills in `table`."""
    if not some or len(some) != len(others):
        return False
    for one, other in zip(some, others):
        swapped = one.swap(table)
        args, kwargs = swapped.args, swapped.kwargs
        equal = one.sym is other.sym and same_literal((args, *kwargs.items()), (other.args, *other.kwargs.items()))
        if not equal and not _equal_parts(one.subsymbols, other.subsymbols, dict(table)):
            return False
        if len(one.outputs) != len(other.outputs):
            return False
        table |= dict(zip(one.outputs, other.outputs))
    return True


# -------------------------------------------------------------------------------------------- views that are identities


def keeps_order(operation: BoundSymbol) -> bool:
    """Whether an operation is a view, or a dense copy, whose result has all elements of its first argument in their
    order."""
    x = operation.args[0] if operation.args else None
    result = operation.output
    if not isinstance(x, TensorProxy) or not isinstance(result, TensorProxy) or result is x:
        return False
    if result.dtype is not x.dtype or result.requires_grad is not x.requires_grad:
        return False
    if any(n.unbacked for n in numbers_in((operation.args, operation.output), [])):
        return False
    symbol = operation.sym
    if symbol.tags.isdisjoint((OpTags.VIEW, OpTags.SHAPE_OP)):
        return False
    if symbol is prims.transpose:
        order = [d % len(x.shape) for d in operation.args[1]]
        return [d for d in order if x.shape[d] != 1] == [d for d in range(len(order)) if x.shape[d] != 1]
    if symbol is ltorch.contiguous:
        return operation.kwargs.get("memory_format", torch.contiguous_format) is torch.contiguous_format
    return symbol.reshapes or len(operation.subsymbols) == 1 and keeps_order(operation.subsymbols[0])


def equal_values(value: Proxy, producer: Mapping[Proxy, BoundSymbol]) -> Iterator[tuple[Proxy, list[BoundSymbol]]]:
    """The value, and each earlier one that it equals: the views between keep all elements, and end in the shape that
    they began with. With each the views between, the last one first."""
    shape = value.shape if isinstance(value, TensorProxy) else ()
    between: list[BoundSymbol] = []
    yield value, between
    while (operation := producer.get(value)) is not None and keeps_order(operation):
        between, value = [*between, operation], operation.args[0]
        if equal_shapes(value.shape, shape):  # type: ignore[attr-defined]
            yield value, between


# ------------------------------------------------------------------------------------------- the place of a replacement


def placed(state: _State, pattern: Pattern, flow: Flow, arguments: tuple, attempt: Attempt) -> Match | None:
    """The match of a complete state, with the place of its replacement; None where the operations cannot be replaced:
    others read values inside of the match, or effects are between. arguments: the values of the parameters."""
    matched = list(dict.fromkeys(state.operations.values()))
    operations = sorted(dict.fromkeys((*matched, *state.between)), key=flow.position)
    outputs = tuple(state.values[o] for o in pattern.outputs)
    inside = set(operations)
    for b in operations:
        if not all(_is_replaceable(o, b, inside, outputs, flow) for o in b.outputs):
            attempt.note(state.begun + 1, f"{b.outputs[0].name} is read elsewhere, too", b)
            return None
    first, last = flow.position(operations[0]), flow.position(operations[-1])
    contexts = {(b.context.checkpoint, b.context.backward) for b in matched if b.context is not None}
    if len(contexts) > 1 or flow.effects[first] != flow.effects[last]:
        border = "an effect, or the border of a checkpoint or of a backward, is inside"
        attempt.note(state.begun + 1, border, matched[0])
        return None
    begin = max((flow.defined_at(v) for v in proxies_in(arguments, [])), default=-1)
    after = [flow.position(c) for o in outputs for c in flow.consumers(o) if c not in inside]
    end = min(after, default=len(flow.trace.bound_symbols))
    anchor = next((b for b in reversed(operations) if begin < flow.position(b) < end), None)
    if anchor is None:
        attempt.note(state.begun + 1, "a result is read before all arguments are computed")
        return None
    return Match(arguments, {}, tuple(operations), outputs, flow, anchor)


def _is_replaceable(value: Proxy, operation: BoundSymbol, inside: set, outputs: tuple, flow: Flow) -> bool:
    if any(value is o for o in outputs):
        return True
    if may_view(operation) and not any(o is x for o in operation.outputs for x in outputs):
        return True  # it stays where others read it
    return value not in flow.results and value.name not in flow.written and inside.issuperset(flow.consumers(value))
