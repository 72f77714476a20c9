"""Save Plan: choose the values that are saved for a backward and those that it recomputes, by a minimum cut of the data
flow of the forward.

Each live-in value of the backward is either saved, which costs its bytes, or recomputed, which costs time and needs the
operands of its producer. Parameters that a backward gathers again (ZeRO-3), and values computed from them alone, cost
only the communication, which overlaps with other work. For a given price of time the cheapest choice is a minimum cut.
A value is an edge with the capacity of its bytes, an operation has an edge from the source with the price of its time,
a live-in of the backward has an edge to the sink, and the values on the side of the sink are recomputed. (Min-cut
rematerialization as in Chen, Moreau et al. 2018, "TVM" and AOTAutograd's partitioner; the price is a Lagrange
multiplier of the budget.) Lowering the price until the bytes fit the budget walks along the curve of the least time for
each amount of memory.

Of the values to recompute, `values_in_memory` keeps those in memory that cost a pass over memory to recompute, as far
as the peak allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder.analysis.aliases import alias_bases, is_view
from thunder.analysis.cost import estimated_time, nbytes
from thunder.analysis.flow import positions, producers
from thunder.analysis.min_cut import sink_side
from thunder.core.dtypes import FLOAT
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.ops import prims
from thunder.ops.functionalize.inplace import writes_back
from thunder.ops.rules import derivatives
from thunder.options import compile_option
from thunder.transforms.phases import phases
from thunder.transforms.recompute import recompute
from thunder.transforms.values_in_memory import values_in_memory

MEMORY_BUDGET = compile_option(
    "memory_budget", float, 1.0,
    "the share of the bytes saved for the backward that may be saved; the rest is recomputed in the least time",
    owner="save_plan", valid="a number above 0, at most 1", check=lambda share: 0 < share <= 1,
)  # fmt: skip

FREE = 1e-3  # price in bytes of a free recomputation, above 0 so that none is useless
STEPS = 24  # halvings of the interval of prices


@dataclass(frozen=True)
class Plan:
    """recomputed: the forward's values that the backward recomputes. saved: those that it reads from memory. nbytes:
    bytes of the saved values, without arguments and their views.

    time: estimated time of the recomputation, in the time of moving one byte. regathered: parameters that the backward
    gathers again, and values computed from them alone.
    """

    recomputed: frozenset[Proxy]
    saved: tuple[Proxy, ...]
    nbytes: int
    time: float
    regathered: frozenset[Proxy] = frozenset()


def save_plan(
    trace: Trace,
    budget: float,
    fuses: Callable[[BoundSymbol], bool],
    at_any_peak: Callable[[BoundSymbol], bool] | None = None,
) -> Trace:
    """The trace with the values that each of its backwards recomputes (`info.recomputed`).

    budget, fuses: see `plan`. at_any_peak: see `values_in_memory`, which runs without a budget; None: no value is
    kept that a backward may recompute.
    """
    recomputed: dict[int, frozenset[Proxy]] = {}
    for number in range(1, trace.info.backwards + 1):
        chosen = plan(trace, budget, fuses, number)
        recomputed[number] = chosen.recomputed
        if at_any_peak is not None and budget >= 1.0:
            candidates = chosen.recomputed - chosen.regathered
            recomputed[number] -= values_in_memory(trace, candidates, fuses, at_any_peak, number)
    return trace.replace(info=trace.info.replace(recomputed=recomputed))


def plan(
    joint: Trace, budget: float, free: Callable[[BoundSymbol], bool] | None = None, number: int | None = None
) -> Plan:
    """The plan for a backward, by default the last, that saves at most `budget` times the bytes that are saved without
    one, in the least time; the smallest there is where none is that small.

    budget: above 0, at most 1. free: operations that a fusion executor takes. Those of them that are elementwise or
    move data cost nothing when they are recomputed: they join a region that reads their inputs. Products and
    reductions are no part of that.
    """
    flow = _Flow(joint, free, number)
    whole = flow.evaluate(flow.regathered)
    start = flow.cut(math.inf)
    target = budget * flow.bytes_in(whole.saved)
    if start.nbytes <= target:
        return start
    least = flow.cut(0.0)
    if least.nbytes > target:
        return least
    # `least` fits at the price `low`; above `high` no recomputation is worth its time
    low, high = 0.0, float(whole.nbytes)
    fits, above = least, start
    for _ in range(STEPS):
        price = math.sqrt(low * high) if low else high / 1024
        cut = flow.cut(price)
        if cut.nbytes <= target:
            fits, low = cut, price
        else:
            above, high = cut, price
        if cut.nbytes == target or high < low * 1.001 or not low and high < 1e-9:
            break
    return flow.between(above, fits, target)


def curve(joint: Trace, budgets: Sequence[float]) -> list[tuple[float, Plan]]:
    """The plan of each budget."""
    return [(budget, plan(joint, budget)) for budget in budgets]


def _is_fixed(operation: BoundSymbol) -> bool:
    """Whether an operation cannot be recomputed: it has an effect, draws random numbers, or returns no tensor."""
    return bool(operation.sym.tags & {OpTags.DONT_DCE, OpTags.RANDOM_OP, OpTags.IN_PLACE}) or not all(
        isinstance(o, TensorProxy) for o in operation.outputs
    )


def _compared(forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol]) -> set[BoundSymbol]:
    """The operations of the forward that round, or add up, and whose results are compared for equality, as the gradient
    of a maximum does to find the largest elements. Another kernel rounds otherwise, and adds in another order:
    recomputed, they would not equal what was saved."""
    producer, computed_later = producers([*forward, *backward]), set(backward)
    stack = [i for operation in (*forward, *backward) if _compares(operation) for i in operation.inputs]
    seen, compared = set(stack), set[BoundSymbol]()
    while stack:
        operation = producer.get(stack.pop())
        if operation is None:
            continue
        if operation not in computed_later and not _is_exact(operation):
            compared.add(operation)
            continue
        stack += [i for i in operation.inputs if i not in seen]
        seen.update(operation.inputs)
    return compared


# of an element, of which they return one or the negative
_EXACT = {prims.neg, prims.abs, prims.where, prims.maximum, prims.minimum}


def _is_exact(operation: BoundSymbol) -> bool:
    """Whether every kernel computes the same bits: of operations that move or choose elements."""
    if operation.sym in _EXACT or OpTags.SHAPE_OP in operation.sym.tags:
        return True
    return bool(operation.subsymbols) and all(map(_is_exact, operation.subsymbols))


def _compares(operation: BoundSymbol) -> bool:
    if operation.sym in (prims.eq, prims.ne):
        kinds = [a.dtype.category for a in operation.args if isinstance(a, TensorProxy)]
        return len(kinds) == 2 and kinds[0] >= FLOAT
    return any(map(_compares, operation.subsymbols))


def regathers(operation: BoundSymbol) -> bool:
    """Whether backwards gather the result of an operation again."""
    regathers = derivatives.regathers.of(operation.sym)
    return regathers is not None and regathers(operation)


def _regathered(
    forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol], returned: Iterable[Proxy] = ()
) -> frozenset[Proxy]:
    """The live-in values of a backward that it gathers again: parameters, and values computed from them alone. The
    first parameter that it reads is kept: it would be gathered right after the forward freed it, with no computation
    to overlap with. returned: values that the backward returns."""
    regathered, gathered = set[Proxy](), set[Proxy]()
    for operation in forward:
        if regathers(operation):
            gathered.update(operation.outputs)
            regathered.update(operation.outputs)
        elif regathered and operation.inputs and regathered.issuperset(operation.inputs) and not _is_fixed(operation):
            regathered.update(operation.outputs)
    read = [i for i in (*(i for b in backward for i in b.inputs), *returned) if i in regathered]
    if read and read[0] in gathered:
        regathered.remove(read[0])
    needed = regathered.intersection(read)
    for operation in reversed(forward):
        if not needed.isdisjoint(operation.outputs):
            needed |= regathered.intersection(operation.inputs)
    return frozenset(needed)


class _Flow:
    """The data flow of the forward, with views counted as their bases."""

    def __init__(self, joint: Trace, free: Callable[[BoundSymbol], bool] | None, number: int | None = None):
        self.forward, _, backward, _, returned = phases(recompute(joint, number), number)
        self.free = free
        self.producer = producers(self.forward)
        self.bases, self.maybe_bases = alias_bases(self.forward), alias_bases(self.forward, maybe=True)
        written = {
            self.maybe_bases[a] for operation in self.forward if writes_back(operation) for a in operation.inputs[:1]
        }.union(a for a in joint.args if isinstance(a, TensorProxy) and a.name in joint.info.unseen)
        # values whose memory the forward writes to: a backward would read other contents
        self.gone = {
            v
            for operation in self.forward
            for v in (*operation.inputs, *operation.outputs)
            if self.maybe_bases[v] in written
        }
        read = [i for b in backward for i in b.inputs] + returned
        self.required = dict.fromkeys(v for v in read if v in self.producer)
        apart = {i for operation in self.forward if free is None or not free(operation) for i in operation.inputs}
        # views that only fused kernels read
        self.inside = {v for v in self.bases if v not in apart and v not in self.gone} if free is not None else set()
        self.regathered = _regathered(self.forward, backward, returned)
        self.time = {operation: estimated_time(operation) for operation in self.forward}
        self.compared = _compared(self.forward, backward)

    def of(self, value: Proxy) -> Proxy:
        return self.bases[value]

    def price(self, operation: BoundSymbol, price: float) -> float:
        """What it costs to recompute the results of an operation in the backward; infinite where that cannot be."""
        if _is_fixed(operation) or operation in self.compared or not self.gone.isdisjoint(operation.inputs):
            return math.inf
        if not self.regathered.isdisjoint(operation.outputs):
            return FREE
        if (
            self.free is not None
            and not operation.sym.tags & {OpTags.MATMUL_OP, OpTags.REDUCTION_OP}
            and self.free(operation)
        ):
            return FREE
        return price * self.time[operation] if price < math.inf else math.inf

    def cut(self, price: float) -> Plan:
        """The plan that costs least where one unit of time is worth `price` bytes."""
        # nodes: 2i and 2i + 1 are a value before and after its edge, -1 - j is operation j
        number = {value: i for i, value in enumerate(self.producer)}
        edges: list[tuple] = []
        for j, operation in enumerate(self.forward):
            if is_view(operation) or not any(self.reaches[o] for o in operation.outputs):
                continue
            edges.append(("source", -1 - j, self.price(operation, price)))
            edges += [
                (2 * number[value] + 1, -1 - j, math.inf)
                for value in {self.of(i) for i in operation.inputs if self.of(i) in number}
            ]
            for value in operation.outputs:
                i = number[value]
                edges += (
                    (-1 - j, 2 * i, math.inf),
                    (2 * i, 2 * i + 1, float(nbytes(value)) if isinstance(value, TensorProxy) else 0.0),
                )
        edges += [
            (2 * number[value] + 1, "sink", math.inf)
            for value in {self.of(v) for v in self.required if self.of(v) in number}
        ]
        after = sink_side(edges, "source", "sink")
        return self.evaluate(frozenset(o for o, i in number.items() if 2 * i in after))

    @cached_property
    def reaches(self) -> dict[Proxy, bool]:
        """Whether the backward depends on a value, directly or to recompute another one."""
        reached = dict.fromkeys(self.producer, False) | dict.fromkeys(self.required, True)
        reached |= dict.fromkeys((self.of(v) for v in self.required), True)
        for operation in reversed(self.forward):
            if any(reached[o] for o in operation.outputs):
                for i in operation.inputs:
                    if i in reached:
                        reached[i] = reached[self.of(i)] = True
        return reached

    def evaluate(self, chosen: frozenset[Proxy]) -> Plan:
        """The plan that recomputes these values. Views are recomputed from their bases, unless the program writes to
        the base or the backward reads the base too."""
        chosen |= {
            v
            for v in self.bases
            if self.bases[v] in chosen
            or self.bases[v] not in self.producer
            and v not in self.gone
            or v not in self.required
            or v in self.inside
        }
        saved, again, stack = {}, {}, list(self.required)
        seen = set()
        while stack:
            value = stack.pop()
            if value in seen or value not in self.producer:
                continue
            seen.add(value)
            if value in chosen:
                again[self.producer[value]] = None
                stack += self.producer[value].inputs
            else:
                saved[value] = None
        distinct = {self.of(v) for v in saved if self.of(v) in self.producer}
        size = sum(nbytes(v) for v in distinct if isinstance(v, TensorProxy))
        return Plan(
            frozenset(v for v in chosen if v in seen),
            tuple(saved),
            size,
            sum(self.time[operation] for operation in again if not is_view(operation)),
            self.regathered,
        )

    def bytes_in(self, saved: Iterable[Proxy]) -> int:
        """Bytes of saved values, if all possible views are views."""
        return sum(
            nbytes(v) for v in {self.maybe_bases[v] for v in saved} if v in self.producer and isinstance(v, TensorProxy)
        )

    def between(self, above: Plan, fits: Plan, target: float) -> Plan:
        """A plan between two of one price, which differ in independent parts of the program: as many of these parts as
        the target needs are taken from `fits`."""
        order = positions(self.forward)
        chosen = set(above.recomputed)
        best = above
        for part in self.parts(fits.recomputed - above.recomputed, order):
            if best.nbytes <= target:
                return best
            chosen |= part
            best = self.evaluate(frozenset(chosen))
        return best if best.nbytes <= target else fits

    def parts(self, values: frozenset[Proxy], order: dict[Proxy, int]) -> list[set[Proxy]]:
        """Values in groups without common operations, in the order of the program."""
        group: dict[Proxy, set[Proxy]] = {}
        for value in sorted(values, key=order.__getitem__):
            joined = {value}
            for i in (*self.producer[value].inputs, *self.producer[value].outputs):
                if i in group:
                    joined |= group[i]
            for v in joined:
                group[v] = joined
        return list({id(g): g for g in group.values()}.values())
