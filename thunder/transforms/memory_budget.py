"""What is saved for the backward and what is computed again: a minimum cut of the forward's data flow.

Every value that the backward reads is either saved, which costs its bytes, or computed again, which costs time and
needs the values it is made of. For a price of time, the choice that costs least is a minimum cut: a value is an edge as
heavy as its bytes, an operation is tied to the source by the price of its time, what the backward reads is tied to the
sink, and what stands on the sink's side is computed again. (Min-cut rematerialization as in Chen, Moreau et al. 2018,
"TVM" and AOTAutograd's partitioner; the price is a Lagrange multiplier of the budget.) Lowering the price until the
bytes fit the budget walks along the curve of least time for each amount of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from thunder.core.proxies import Proxy, TensorProxy, element_count, number_value
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.ops.inplace import writes_back
from thunder.ops.memory import MAY_COPY
from thunder.options import compile_option
from thunder.transforms.autodiff import sides
from thunder.transforms.min_cut import sink_side
from thunder.transforms.recompute import recompute

__all__ = ["Plan", "plan", "curve", "nbytes", "roots", "multiply_adds", "MEMORY_BUDGET"]

MEMORY_BUDGET = compile_option(
    "memory_budget", float, 1.0,
    "the share of the bytes saved for the backward that may be saved; the rest is recomputed in the least time",
    owner="memory_budget", valid="a number above 0, at most 1", check=lambda share: 0 < share <= 1,
)  # fmt: skip

# how many floating point operations take as long as moving one byte: 200 on an H200 in bfloat16, some 20 on a CPU core
FLOPS_PER_BYTE = 100
STEPS = 24  # halvings of the interval of prices


@dataclass(frozen=True)
class Plan:
    """recomputed: the forward's values that the backward computes again. saved: those it finds saved. nbytes: of those,
    without what belongs to arguments.

    time: of what is computed again, estimated, in the time that moving one byte takes.
    """

    recomputed: frozenset[Proxy]
    saved: tuple[Proxy, ...]
    nbytes: int
    time: float


def plan(joint: Trace, budget: float, free: Callable[[BoundSymbol], bool] | None = None) -> Plan:
    """The plan that saves at most `budget` times the bytes that are saved without one, in the least time; the smallest
    there is where none is that small.

    budget: above 0, at most 1. free: operations that a fusion executor takes. Those of them that are elementwise or
    move data cost nothing when they are computed again: they join a region that reads their inputs. Products and
    reductions are no part of that.
    """
    flow = _Flow(joint, free)
    whole = flow.evaluate(frozenset())
    start = flow.cut(math.inf)
    target = budget * flow.bytes_in(whole.saved)
    if start.nbytes <= target:
        return start
    least = flow.cut(0.0)
    if least.nbytes > target:
        return least
    # `least` fits at the price `low`; above `high` nothing is worth computing again
    low, high = 0.0, float(whole.nbytes)
    fits, above = least, start
    for _ in range(STEPS):
        price = math.sqrt(low * high) if low else high / 1024
        found = flow.cut(price)
        if found.nbytes <= target:
            fits, low = found, price
        else:
            above, high = found, price
        if found.nbytes == target or high < low * 1.001 or not low and high < 1e-9:
            break
    return flow.between(above, fits, target)


def curve(joint: Trace, budgets: Sequence[float]) -> list[tuple[float, Plan]]:
    """The plan of each budget."""
    return [(budget, plan(joint, budget)) for budget in budgets]


def nbytes(value: TensorProxy) -> int:
    """Bytes of a dense tensor of this shape; symbolic sizes count as they were at capture."""
    return element_count(value) * value.dtype.bytes


def _is_view(line: BoundSymbol, maybe: bool = False) -> bool:
    return (
        OpTags.VIEW in line.sym.tags
        and (maybe or line.sym.name not in MAY_COPY)
        and sum(isinstance(i, TensorProxy) for i in line.inputs) == 1
    )


def roots(lines: Sequence[BoundSymbol], maybe: bool = False, copies: Container[str] = ()) -> dict[Proxy, Proxy]:
    """For views, the value whose memory they show; `maybe`: also for what is a view or a copy, which of the two the
    strides decide, but for `copies`, which are known."""
    found: dict[Proxy, Proxy] = {}
    for line in lines:
        if _is_view(line, maybe):
            source = next(i for i in line.inputs if isinstance(i, TensorProxy))
            found |= dict.fromkeys([o for o in line.outputs if o.name not in copies], found.get(source, source))
    return found


def _is_fixed(line: BoundSymbol) -> bool:
    """Whether a line can not be computed again: it has an effect, draws numbers, or makes something that is no
    tensor."""
    return bool(line.sym.tags & {OpTags.DONT_DCE, OpTags.RANDOM_OP, OpTags.IN_PLACE}) or not all(
        isinstance(o, TensorProxy) for o in line.outputs
    )


def estimated_time(line: BoundSymbol) -> float:
    """Bytes read and written, and for products the operations."""
    tensors = [p for p in (*line.inputs, *line.outputs) if isinstance(p, TensorProxy)]
    return sum(map(nbytes, tensors)) + 2 * multiply_adds(line) / FLOPS_PER_BYTE


def multiply_adds(line: BoundSymbol) -> float:
    """Those of matrix products, convolutions and attention: a product of A (m, k) and B (k, n) has sqrt(mk kn mn) =
    mnk. 0 of other operations.

    What is no single product says how many it has: `Symbol.multiply_adds`.
    """
    if (count := line.sym.multiply_adds) is not None:
        return count(line)
    tensors = [p for p in line.inputs if isinstance(p, TensorProxy)]
    if OpTags.MATMUL_OP not in line.sym.tags or len(tensors) <= line.sym.factors[1] or not line.outputs:
        return 0
    a, b, product = *(tensors[i] for i in line.sym.factors), line.outputs[0]
    batch = math.prod(map(number_value, product.shape[:-2])) if min(len(a.shape), len(b.shape)) > 2 else 1
    return math.sqrt(element_count(a) * element_count(b) * element_count(product) / max(1, batch))


class _Flow:
    """The forward's data flow, with views counted as the values they show."""

    def __init__(self, joint: Trace, free: Callable[[BoundSymbol], bool] | None):
        self.forward, _, backward = sides(recompute(joint))
        self.free = free
        self.maker = {o: line for line in self.forward for o in line.outputs}
        self.root, self.shown = roots(self.forward), roots(self.forward, maybe=True)
        written = {self.shown.get(a, a) for line in self.forward if writes_back(line) for a in line.inputs[:1]}
        # what a backward would read otherwise than the forward did
        self.gone = {
            v for line in self.forward for v in (*line.inputs, *line.outputs) if self.shown.get(v, v) in written
        }
        read = [i for b in backward for i in b.inputs] + [g for g in joint.output["output"] if isinstance(g, Proxy)]
        self.required = dict.fromkeys(v for v in read if v in self.maker)
        apart = {i for line in self.forward if free is None or not free(line) for i in line.inputs}
        # views that nothing but kernels reads
        self.inside = {v for v in self.root if v not in apart and v not in self.gone} if free is not None else set()
        self.time = {line: estimated_time(line) for line in self.forward}

    def of(self, value: Proxy) -> Proxy:
        return self.root.get(value, value)

    def price(self, line: BoundSymbol, price: float) -> float:
        if _is_fixed(line) or not self.gone.isdisjoint(line.inputs):
            return math.inf
        if self.free is not None and not line.sym.tags & {OpTags.MATMUL_OP, OpTags.REDUCTION_OP} and self.free(line):
            return 1e-3  # bytes: not done for nothing
        return price * self.time[line] if price < math.inf else math.inf

    def cut(self, price: float) -> Plan:
        """The plan that costs least where one unit of time is worth `price` bytes."""
        # nodes: 2i and 2i + 1 are a value before and after its edge, -1 - j is line j
        number = {value: i for i, value in enumerate(self.maker)}
        edges: list[tuple] = []
        for j, line in enumerate(self.forward):
            if _is_view(line) or not any(self.reaches[o] for o in line.outputs):
                continue
            edges.append(("source", -1 - j, self.price(line, price)))
            edges += [
                (2 * number[value] + 1, -1 - j, math.inf)
                for value in {self.of(i) for i in line.inputs if self.of(i) in number}
            ]
            for value in line.outputs:
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

    @property
    def reaches(self) -> dict[Proxy, bool]:
        """Whether the backward needs a value, itself or to compute another one again."""
        if not hasattr(self, "_reaches"):
            self._reaches = (
                dict.fromkeys(self.maker, False)
                | dict.fromkeys((self.of(v) for v in self.required), True)
                | dict.fromkeys(self.required, True)
            )
            for line in reversed(self.forward):
                if any(self._reaches[o] for o in line.outputs):
                    for i in line.inputs:
                        if i in self._reaches:
                            self._reaches[i] = self._reaches[self.of(i)] = True
        return self._reaches

    def evaluate(self, chosen: frozenset[Proxy]) -> Plan:
        """What is saved, and what it costs, when these values are computed again. Views of values are made again from
        what they show, unless that is written to, or a view is there anyway."""
        chosen |= {
            v
            for v in self.root
            if self.root[v] in chosen
            or self.root[v] not in self.maker
            and v not in self.gone
            or v not in self.required
            or v in self.inside
        }
        saved, again, stack = {}, {}, list(self.required)
        seen = set()
        while stack:
            value = stack.pop()
            if value in seen or value not in self.maker:
                continue
            seen.add(value)
            if value in chosen:
                again[self.maker[value]] = None
                stack += self.maker[value].inputs
            else:
                saved[value] = None
        distinct = {self.of(v) for v in saved if self.of(v) in self.maker}
        size = sum(nbytes(v) for v in distinct if isinstance(v, TensorProxy))
        return Plan(
            frozenset(v for v in chosen if v in seen),
            tuple(saved),
            size,
            sum(self.time[line] for line in again if not _is_view(line)),
        )

    def bytes_in(self, saved: Iterable[Proxy]) -> int:
        """Bytes of what is saved if nothing is copied that may be a view."""
        return sum(
            nbytes(v) for v in {self.shown.get(v, v) for v in saved} if v in self.maker and isinstance(v, TensorProxy)
        )

    def between(self, above: Plan, fits: Plan, target: float) -> Plan:
        """Of two plans at one price, which differ in independent parts of the program, as much of the smaller one as
        the target asks for."""
        order = {o: i for i, line in enumerate(self.forward) for o in line.outputs}
        chosen = set(above.recomputed)
        best = above
        for part in self.parts(fits.recomputed - above.recomputed, order):
            if best.nbytes <= target:
                return best
            chosen |= part
            best = self.evaluate(frozenset(chosen))
        return best if best.nbytes <= target else fits

    def parts(self, values: frozenset[Proxy], order: dict[Proxy, int]) -> list[set[Proxy]]:
        """Values in groups that no line joins, in the order of the program."""
        group: dict[Proxy, set[Proxy]] = {}
        for value in sorted(values, key=order.__getitem__):
            joined = {value}
            for i in (*self.maker[value].inputs, *self.maker[value].outputs):
                if i in group:
                    joined |= group[i]
            for v in joined:
                group[v] = joined
        return list({id(g): g for g in group.values()}.values())
