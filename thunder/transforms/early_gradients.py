"""Early Gradients: the kernels of a scalar loss compute its gradients too, so that they read its operands once.

A backward is linear in the cotangent of the loss. The fusible operations of a backward that depend on that cotangent
and on values of the forward alone are moved to the forward and computed for a cotangent of 1, in the kernels of the
loss. The forward saves their results in the place of their operands. The backward multiplies them in place by the
cotangent, in a kernel that does nothing for a cotangent of 1.

Before: `t0 = cross_entropy(x, y)`; `t1 = get_grad(t0)`; `t2 = nll_loss_backward(t1, x, y)`, `t3 = mm(t2, w)`. After:
`t0 = cross_entropy(x, y)`, `t4 = full((), 1)`, `t5 = nll_loss_backward(t4, x, y)`; `t1 = get_grad(t0)`; `t2 =
times_cotangent(t5, t1)`, `t3 = mm(t2, w)`.

The pass leaves float16 alone, in which small gradients vanish unless the loss is scaled, and losses over long rows that
would be read twice: a row of 50257 numbers does not stay in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.analysis.flow import live_ins, producers
from thunder.core.dtypes import FLOAT
from thunder.core.proxies import Proxy, TensorProxy, element_count
from thunder.core.regions import leading_to
from thunder.core.rewrite import renamed_operation
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, recording
from thunder.core.trace import Trace
from thunder.ops import PRIMS
from thunder.ops.backward import op, times_cotangent
from thunder.transforms.phases import marked, phases

SMALLEST = 1 << 20  # bytes of a gradient that is worth moving


def early_gradients(joint: Trace, fusers: Sequence) -> Trace:
    """The joint trace with gradients of scalar losses in the forward, where one of `fusers` takes their operations."""
    forward, starts, backward, _, _ = phases(joint)
    known = {o for operation in forward for o in operation.outputs} | {a for a in joint.args if isinstance(a, Proxy)}
    for start in starts:
        if start.output.shape == () and start.output.dtype.name != "float16":
            joint = _Loss(joint, start.output, forward, starts, backward, known, fusers).moved()
            forward, _, backward, _, _ = phases(joint)
    return joint


class _Loss:
    """One loss. early: operations of the backward that depend on its cotangent and on values of the forward only.
    linear: results of these that are multiples of the cotangent, with their producers."""

    def __init__(
        self,
        joint: Trace,
        cotangent: TensorProxy,
        forward: list[BoundSymbol],
        starts: list[BoundSymbol],
        backward: list[BoundSymbol],
        known: set,
        fusers: Sequence,
    ):
        self.joint, self.cotangent, self.fusers = joint, cotangent, fusers
        self.forward, self.starts, self.backward = forward, starts, backward
        self.early: dict[BoundSymbol, None] = {}
        self.linear: dict[Proxy, BoundSymbol | None] = {cotangent: None}
        there, linear = known | {cotangent}, _Linear({cotangent})
        for operation in backward:
            if (
                there.issuperset(operation.inputs)
                and _is_plain(operation)
                and self.fuses(operation)
                and linear.holds([operation])
            ):
                self.linear |= {o: operation for o in operation.outputs if o in linear.dependent}
                self.early[operation] = None
                there.update(operation.outputs)

    def fuses(self, operation: BoundSymbol) -> bool:
        return any(f.takes(operation) for f in self.fusers)

    def moved(self) -> Trace:
        chosen = [v for v in self.read_elsewhere() if self.is_worth_it(v)] if len(self.linear) > 1 else []
        if not chosen:
            return self.joint
        with recording(Recorder(next(iter(self.early)).context)) as recorder:
            one = op("full")((), 1.0, device=self.cotangent.device, dtype=self.cotangent.dtype)
        table: dict[Proxy, Proxy] = {self.cotangent: one}
        made = {operation.rhs: operation for operation in self.forward}
        operations = list(recorder.bound_symbols)
        for operation in leading_to(tuple(self.early), chosen):
            same = made.get(operation.swap(table).rhs)  # the forward has computed it already
            if same is not None:
                table |= dict(zip(operation.outputs, same.outputs, strict=True))
            else:
                operations.append(renamed_operation(operation, table, lambda o: self.joint.names.make()))
        producers_of = {self.linear[v]: v for v in chosen}
        backward = [
            times_cotangent.bind(table[v], self.cotangent, output=v, context=operation.context)
            if (v := producers_of.get(operation)) is not None
            else operation
            for operation in self.backward
        ]
        return self.joint.replace(bound_symbols=[*self.forward, *marked(operations, 0), *self.starts, *backward])

    def read_elsewhere(self) -> list[Proxy]:
        """The results that unfused operations outside of `early` read, themselves or through views. A fused consumer
        would compute them itself."""
        bases = alias_bases(self.early, maybe=True)
        uses = [
            (i, self.fuses(operation))
            for operation in self.backward
            if operation not in self.early
            for i in operation.inputs
            if i in self.linear
        ]
        uses += [(g, False) for g in self.joint.output["output"] if isinstance(g, Proxy) and g in self.linear]
        fused = {bases[value] for value, fused in uses if fused}
        return [
            v
            for v in dict.fromkeys(bases[value] for value, _ in uses)
            if v not in fused and self.linear.get(v) is not None
        ]

    def is_worth_it(self, value: Proxy) -> bool:
        """Whether moving a value saves a pass over memory: the value and one of its operands are large, and it does not
        depend on reductions of long rows."""
        assert isinstance(value, TensorProxy), "fused operations make tensors"
        operands = live_ins(leading_to(tuple(self.early), [value]))
        read = [i for i in operands if isinstance(i, TensorProxy)]
        return (
            nbytes(value) >= SMALLEST
            and any(2 * nbytes(i) >= nbytes(value) for i in read)
            and self.longest_row(read) <= max(f.longest_row for f in self.fusers)
        )

    def longest_row(self, values: Sequence[Proxy]) -> int:
        """The length of the longest rows among the fusible reductions that these values depend on."""
        producer = producers(self.forward)
        longest, seen, waiting = 0, set(), list(values)
        while waiting:
            operation = producer.get(waiting.pop())
            if operation is None or operation in seen or not self.fuses(operation):
                continue
            seen.add(operation)
            waiting += operation.inputs
            if OpTags.REDUCTION_OP in operation.sym.tags:
                sizes = [
                    [element_count(p) for p in side if isinstance(p, TensorProxy)]
                    for side in (operation.inputs, operation.outputs)
                ]
                longest = max([longest, *(max(sizes[0]) // n for n in sizes[1] if n > 1)])
        return longest


def _is_plain(operation: BoundSymbol) -> bool:
    return all(isinstance(o, TensorProxy) and o.dtype.name != "float16" for o in operation.outputs)


class _Linear:
    """The values that are multiples of those in `dependent`, and the zeros among the others."""

    def __init__(self, dependent: set[Proxy]):
        self.dependent = dependent
        self.zeros: set[Proxy] = set()

    def holds(self, operations: Sequence[BoundSymbol]) -> bool:
        """Whether each result of the operations is a multiple, or independent of all multiples. Their results are known
        from then on."""
        return all(self._holds(operation) for operation in operations)

    def _holds(self, operation: BoundSymbol) -> bool:
        if self.dependent.isdisjoint(operation.inputs):
            if operation.sym is PRIMS["full"] and operation.args[1] == 0:
                self.zeros.update(operation.outputs)
            return True
        if operation.sym.module != "prims":
            operations, aliases = operation.subsymbols, operation.aliases
            if not operations and not aliases or not self.holds(operations):
                return False
            self.dependent.update(
                old for old, new in aliases.items() if isinstance(new, Proxy) and new in self.dependent
            )
            return True
        found = operation.sym.linear is not None and operation.sym.linear(
            operation.args, self._is_multiple, self._is_zero
        )
        if found and all(o.dtype.category == FLOAT for o in operation.outputs if isinstance(o, TensorProxy)):
            self.dependent.update(operation.outputs)
            return True
        return False

    def _is_multiple(self, x) -> bool:
        return isinstance(x, Proxy) and x in self.dependent

    def _is_zero(self, x) -> bool:
        return x in self.zeros if isinstance(x, Proxy) else isinstance(x, (int, float)) and x == 0
