"""Experts: grouped products compute with the experts of this rank, for the rows that all ranks have for them.

Before: `t_w = redistribute(t_w_shard, ep, S0, R)`, `y = grouped_mm(x, t_w, offs=offs)`, `z = silu(y)`, `t_v =
redistribute(t_v_shard, ep, S0, R)`, `out = grouped_mm(z, t_v, offs=offs)`, where every rank computes its own rows with
the experts of all. After:

    (sizes, ends) = rows_of_experts(offs, group)
    x0 = dispatch_rows(x, sizes, group)                          # of all ranks, for the experts of this one
    w0 = redistribute(t_w_shard, ep, S0, V);  y0 = grouped_mm(x0, w0, offs=ends)
    z0 = silu(y0)
    v0 = redistribute(t_v_shard, ep, S0, V);  out0 = grouped_mm(z0, v0, offs=ends)
    out = collect_rows(out0, sizes, group, rows)

Rows move in the place of weights (D. Lepikhin et al. 2020, "GShard"). How many rows move is read by the host. What lies
between two grouped products is computed on the rows that this rank has, where it has a rule for parts
(`thunder.ops.rules.splitting`) and reads nothing else of the rank that the rows come from. What else reads the weights
gathers them, as under `fsdp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.distributed.layouts import Axis, P, PlannedGroup, R, S, V
from thunder.distributed.redistribute import redistribute, spelled, steps_of
from thunder.ops import ltorch
from thunder.ops.families.exchange import collect_rows, dispatch_rows, rows_of_experts
from thunder.ops.families.grouped_products import grouped_operands
from thunder.ops.rules import splitting
from thunder.ops.rules.splitting import Part


def exchange_rows(
    trace: Trace, experts: Mapping[Proxy, Axis], known: Mapping[Proxy, Part] = MappingProxyType({})
) -> Trace:
    """The program with grouped products of this rank's experts. experts: the arguments that hold them, and the axis
    whose ranks have the others. known: of whole weights, this rank's experts."""
    state = _Experts(experts, known)
    for operation in trace.bound_symbols:
        state.write(operation)
    return trace.replace(bound_symbols=state.operations)


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Rows that move, so many of this rank. It is the axis of parts in rows."""

    sizes: TensorProxy
    ends: TensorProxy
    axis: Axis
    rows: int


class _Experts:
    """parts: of weights, this rank's experts; of values in rows by expert, the rows for these. held: of whole weights,
    what this rank has over the axis. scattered: of whole gradients that are zero outside of this rank's experts,
    these."""

    shares_positions = True

    def __init__(self, experts: Mapping[Proxy, Axis], known: Mapping[Proxy, Part]):
        self.experts = experts
        self.held: dict[tuple[Proxy, Axis], TensorProxy] = {}
        self.scattered: dict[tuple[Proxy, Axis], TensorProxy] = {}
        self.sequences: dict[Axis, int] = {}
        self.operations: list[BoundSymbol] = []
        self.parts: dict[Proxy, Part] = dict(known)
        self.exchanges: dict[tuple[Proxy, Axis], _Exchange] = {}
        self.sent: dict[tuple[TensorProxy, _Exchange], TensorProxy] = {}

    def write(self, operation: BoundSymbol) -> None:
        """Writes the operations that take the place of one: on parts, where parts of its operands are known."""
        if operation.sym is redistribute:
            operation = self._without_round_trip(operation)
        is_known = any(isinstance(p, Proxy) and (p in self.parts or p in self.experts) for p in operation.inputs)
        is_pure = not operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.OPAQUE}
        if (
            not is_known
            or not (is_pure or grouped_operands(operation))
            or set(operation.outputs) & set(operation.inputs)
        ):
            self.operations.append(operation)
            return
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            parts = self._parts(operation)
            rows = [part for part in parts if isinstance(part.axis, _Exchange)]
            whole = dict(zip(operation.outputs, map(self._collected, rows), strict=False)) if rows else {}
        self.parts |= dict(zip(operation.outputs, parts, strict=False))
        if not rows:  # of weights, or of whole values
            self.operations += [*recorder.bound_symbols, operation] if parts else [operation]
            return
        result = map_structure(lambda x: whole.get(x, x), operation.output)
        written, aliases = adopt(recorder.bound_symbols, result, operation.output)
        assert not aliases, "rows are collected by an operation"
        self.operations += written

    def _without_round_trip(self, operation: BoundSymbol) -> BoundSymbol:
        """What cuts this rank's experts out of a whole weight, or out of a gradient that has no others, reads them:
        programs that call backward themselves do so, since they see whole weights."""
        x, *along = operation.args[:4]
        axis, src, dst = first = steps_of(*along)[0]
        table = self.held if src == R else self.scattered if src == P else {}
        if dst == S(0) and (x, axis) in table:
            rest = steps_of(*along)[1:] or [(axis, dst, dst)]
            return operation.replace(args=(table[x, axis], *spelled(rest), *operation.args[4:]))
        if first[1:] == (S(0), P):
            self.scattered[operation.output, axis] = x
        return operation

    def _parts(self, operation: BoundSymbol) -> list[Part]:
        """The parts of an operation's results; none where it computes whole values."""
        if operation.sym is redistribute:
            return self._of_weight(operation)
        if (operands := grouped_operands(operation)) is not None:
            return self._product(operation, *operands)
        if not self._reads_rows_alone(operation):
            return []
        if (several := splitting.several.of(operation.sym)) is not None:
            return list(several(self, operation) or ())
        rule = splitting.rule_of(operation)
        if rule in (splitting.elementwise, splitting.along) or operation.sym in _ALONG:
            part = rule(self, operation) if rule is not None and len(operation.outputs) == 1 else None
            return [] if part is None else [part]
        return []

    def _of_weight(self, operation: BoundSymbol) -> list[Part]:
        """A weight that ranks hold by experts: the part of this rank, in the place of the gathered weight."""
        held, *along = operation.args[:4]
        axis = self.experts.get(held)
        if axis is None or not any(step[0] == axis for step in steps_of(*along)):
            return []
        steps = steps_of(*along)
        (own,) = (step for step in steps if step[0] == axis)
        if others := [step for step in steps if step is not own]:
            held = redistribute(held, *spelled(others), *operation.args[4:])
        self.held[operation.output, axis] = held
        part = ltorch.to(redistribute(held, axis, own[1], V), dtype=operation.output.dtype)
        return [Part(part, axis, 0)]

    def _product(self, operation: BoundSymbol, a: TensorProxy, b: TensorProxy, offs: TensorProxy) -> list[Part]:
        """A grouped matmul by the experts of this rank, for the rows that the ranks send to them."""
        weight, rows = self.parts.get(b), self.parts.get(a)
        if weight is None or not isinstance(weight.axis, Axis) or weight.dim != 0:
            return []
        if (offs, weight.axis) not in self.exchanges:
            sizes, ends = rows_of_experts(offs, weight.axis.group)
            self.exchanges[offs, weight.axis] = _Exchange(sizes, ends, weight.axis, a.shape[0])
        exchange = self.exchanges[offs, weight.axis]
        if rows is not None and rows.axis is not exchange:
            return []
        table = {a: self.cut(a, exchange, 0) if rows is None else rows.value, b: weight.value, offs: exchange.ends}
        return [self.computed(operation, table, exchange, 0)]

    def _reads_rows_alone(self, operation: BoundSymbol) -> bool:
        """Whether all that an operation reads are rows, or experts: what one rank computes with them is what another
        would."""
        tensors = [p for p in operation.inputs if isinstance(p, TensorProxy)]
        known = {part.axis for p in tensors if (part := self.parts.get(p)) is not None}
        return len(known) == 1 and all(p in self.parts for p in tensors)

    def _collected(self, part: Part) -> TensorProxy:
        exchange = part.axis
        return collect_rows(part.value, exchange.sizes, exchange.axis.group, exchange.rows)

    # --- as rules ask
    def part(self, value) -> Part | None:
        return self.parts.get(value)

    def copied(self, x: TensorProxy, axis) -> TensorProxy:
        raise AssertionError("rows of another rank are computed with what is in them")

    gathered_over = summed_over = largest_over = copied

    def cut(self, value: TensorProxy, axis: _Exchange, dim: int) -> TensorProxy:
        assert dim == 0, "rows are along the first dimension"
        if (value, axis) not in self.sent:
            group = axis.axis.group
            rows = value.shape[0] if isinstance(group, PlannedGroup) else None  # the router says when the program runs
            self.sent[value, axis] = dispatch_rows(value, axis.sizes, group, rows)
        return self.sent[value, axis]

    def computed(self, operation: BoundSymbol, table: dict, axis, dim: int) -> Part:
        args = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.args)
        kwargs = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.kwargs)
        return Part(operation.sym(*args, **kwargs), axis, dim)


# beside elementwise operations, and those along another dimension
_ALONG = (ltorch.getitem, ltorch.transpose, ltorch.permute, ltorch.contiguous)
