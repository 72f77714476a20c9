"""Split layers: a program computes with the parts of weights that its rank holds.

Before: `t_w = redistribute(t_w_shard, tp, S0, I)`, `y = linear(x, t_w, None)`. After:  `x0 = redistribute(x, tp, I,
R)`, `y0 = linear(x0, t_w_shard, None)`, `y = redistribute(y0, tp, S1, I)`.

Before: `t_v = redistribute(t_v_shard, tp, S1, I)`, `z = linear(gelu(y), t_v, None)`. After:  `z0 = linear(gelu(y0),
t_v_shard, None)`, `z = redistribute(z0, tp, P, I)`: where what a layer reads can be computed of parts, it is, and what
was joined for it is dropped. What else a program does with a split weight it does with the whole one, which is joined
for it.

With a sequence dimension what a row-split layer gives is summed to parts along it, which norms and residual sums are
computed of, and a column-split layer gathers them: `z1 = redistribute(z0, tp, P, S1)`, `h1 = layer_norm(add(x1, z1),
...)`, `h = redistribute(h1, tp, S1, R)`, `y0 = linear(h, t_w_shard, None)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from thunder.core.proxies import Proxy, TensorProxy, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.distributed.experts import exchange_rows
from thunder.distributed.layout_types import Parts, with_layouts
from thunder.distributed.layouts import Axis, I, Layout, P, R, S, V, outside_axis
from thunder.distributed.placement import Placement
from thunder.distributed.positions import share_positions
from thunder.distributed.redistribute import redistribute, redistribute_parameters, steps_of
from thunder.ops import ltorch
from thunder.ops.families import foreach
from thunder.ops.rules import splitting
from thunder.ops.rules.splitting import Part
from thunder.transforms.dce import dce, dce_of_captured


def distribute(computation: Trace, placements: dict[Proxy, Placement]) -> Trace:
    """The program of one rank: on what it holds of parameters, with its parts of layers, and the layouts of values."""
    of_arguments = [placements.get(a) if isinstance(a, Proxy) else None for a in computation.args]
    has_parts = any(b.sym is redistribute for b in computation.bound_symbols)  # of the program's own
    if not has_parts:  # what may raise stays, whether or not its results are used
        computation = dce_of_captured(computation)
    trace = redistribute_parameters(computation, placements)
    parts: Parts = {}
    placed = {held: one for held, one in zip(trace.args, of_arguments, strict=True) if one is not None}
    if experts := _experts(placed):
        trace = dce(exchange_rows(trace, experts))
    for axis, dim in _positions(placements).items():
        trace, of_positions = share_positions(trace, axis, dim)
        trace, parts = dce(trace), {**parts, **of_positions}
    if any(q.joining for q in placements.values()) or has_parts:
        trace, of_layers = split_layers(trace, _shared_by_program(computation) | _sequences(placements))
        trace, parts = dce(trace), {**parts, **of_layers}
    whole = {a.name for a, q in placements.items() if q.is_split}  # what is written to is not in its memory
    written = {name: target for name, target in trace.info.written.items() if target not in whole}
    trace = trace.replace(info=trace.info.replace(written=written))
    return with_layouts(trace, of_arguments, parts, has_parts)


def _sequences(placements: Mapping[Proxy, Placement]) -> dict[Axis, int]:
    """By axis, the dimension of activations that its ranks share between layers."""
    steps = ((q.sequence_dim, step) for q in placements.values() for step in q.joining)
    return {step[0]: dim for dim, step in steps if dim is not None}


def _experts(placements: Mapping[Proxy, Placement]) -> dict[Proxy, Axis]:
    """By weight of experts, the axis whose ranks have some each."""
    return {p: q.axis for p, one in placements.items() for q in one.axes if q.experts and q.layout.kind == "S"}


def _positions(placements: Mapping[Proxy, Placement]) -> dict[Axis, int]:
    """By axis, the dimension of activations whose positions its ranks share in all layers."""
    return {q.axis: q.positions for one in placements.values() for q in one.axes if q.positions is not None}


def split_before_backward(trace: Trace, placements: Mapping[Proxy, Placement]) -> Trace:
    """The operations in front of a backward that a program itself calls, with layers split, positions shared and rows
    exchanged: the backward is that of parts then. Parameters are whole in such a program, and the parts of them are cut
    out, which is nothing once the program is distributed.

    Before: `y = linear(x, t_w, None)`. After: `t0 = redistribute(t_w, tp, I, S0)`, `x0 = redistribute(x, tp, I, R)`,
    `y0 = linear(x0, t0, None)`, `y = redistribute(y0, tp, S1, I)`.
    """
    split, experts = {p: one for p, one in placements.items() if one.joining}, _experts(placements)
    positions = _positions(placements)
    context = next((b.context for b in trace.bound_symbols if b.context is not None), None)
    if context is None or not (split or experts or positions):
        return trace
    known = {(b.args[0], *b.args[1:4]): b.output for b in trace.bound_symbols if b.sym is redistribute}
    parts: dict[Proxy, Part | None] = {}
    own_experts: dict[Proxy, Part] = {}

    def cut(p: Proxy, axis: Axis, src: Layout, dst: Layout) -> TensorProxy:
        earlier = known.get((p, axis, src, dst))  # of an earlier backward
        return redistribute(p, axis, src, dst) if earlier is None else earlier

    with recording(Recorder(context.replace(grad_enabled=True, autocast=None, checkpoint=()))) as recorder:
        for p, axis in experts.items():
            own_experts[p] = Part(cut(cut(p, axis, R, S(0)), axis, S(0), V), axis, 0)
        for p, one in split.items():
            for axis, layout, _ in reversed(one.joining):
                own = cut(p, axis, I, layout)
                parts[p] = Part(own, axis, layout.dim)
                p = own
    trace = trace.replace(bound_symbols=[*recorder.bound_symbols, *trace.bound_symbols])
    if experts:
        trace = exchange_rows(trace, {}, own_experts)
    for axis, dim in positions.items():
        trace, _ = share_positions(trace, axis, dim)
    return split_layers(trace, _sequences(split), parts)[0] if split else trace


def split_layers(
    trace: Trace, sequences: dict[Axis, int], known: Mapping[Proxy, Part | None] = MappingProxyType({})
) -> tuple[Trace, Parts]:
    """Linear and embedding layers whose weights are split compute parts, and what lies between two of them is computed
    of parts where that is the same. sequences: by axis, the dimension of activations that its ranks share between
    layers. known: parts of weights. Returns the layouts of parts as well."""
    state = _Split(sequences, known)
    for operation in _leaving_first(trace.bound_symbols):
        state.write(operation)
    parts: dict = {part.value: (part.axis, S(part.dim)) for part in state.parts.values() if part is not None}
    parts |= {x: (axis, P) for x, axis in state.summands}
    written = {**trace.info.written, **state.written(trace.info.written)}
    return trace.replace(bound_symbols=state.operations, info=trace.info.replace(written=written)), parts


def _shared_by_program(trace: Trace) -> dict[Axis, int]:
    """By axis, the one dimension that a program itself has parts along which are no features."""
    dims: dict[Axis, set[int]] = {}
    for operation in trace.bound_symbols:
        if operation.sym is redistribute and isinstance(operation.args[1], Axis) and not operation.args[1].outside:
            x, axis, *layouts = operation.args[:4]
            among = {one.dim for one in layouts if one.kind == "S" and one.dim < len(x.shape) - 1}
            dims.setdefault(axis, set()).update(among if I in layouts else ())
    return {axis: candidates.pop() for axis, candidates in dims.items() if len(candidates) == 1}


def _leaving_first(operations: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The operations with those that cut parts of DTensors for the outside before the first write, so that they can be
    computed of what is written to. Operations on lists of tensors are as many operations then."""
    cuts = {b.output for b in operations if b.sym is redistribute and _leaves(b)}
    if not cuts:
        return list(operations)
    single = [one for b in operations for one in _one_by_one(b)]
    end = next((i for i, b in enumerate(single) if b.sym.tags >= {OpTags.IN_PLACE, OpTags.DONT_DCE}), len(single))
    known, early, late = {o for b in single[:end] for o in b.outputs}, single[:end], []
    for b in single[end:]:
        is_early = b.sym is redistribute and b.output in cuts and b.args[0] in known
        known.update(b.outputs if is_early else ())
        (early if is_early else late).append(b)
    return early + late


def _leaves(operation: BoundSymbol) -> bool:
    """Whether a redistribution cuts this rank's part of what is a DTensor outside."""
    _, axis, src, dst = operation.args[:4]
    return isinstance(axis, Axis) and axis.outside and src == I and dst.kind == "S"


def _one_by_one(operation: BoundSymbol) -> Sequence[BoundSymbol]:
    """An operation on lists of tensors as operations on tensors. Norms are computed together (`_Split.norms`)."""
    is_list = operation.sym.name.startswith("_foreach_") and operation.sym is not ltorch._foreach_norm
    return operation.subsymbols if is_list and operation.subsymbols else (operation,)


class _Split:
    """Writes a program whose layers are split over ranks: which values are parts, and of which axis."""

    shares_positions = False

    def __init__(self, sequences: dict[Axis, int], known: Mapping[Proxy, Part | None]):
        self.sequences = sequences
        self.operations: list[BoundSymbol] = []
        self.producer: dict[Proxy, BoundSymbol] = {}
        self.parts: dict[Proxy, Part | None] = dict(known)
        # what is known of values that leave as parts, where parts of parameters count that are gathered for the forward
        self.leaving: dict[Proxy, Part | None] = {}
        self.joined: dict[Proxy, Part] = {}
        self.leaves = self.has_written = False
        self.summands: list[tuple[TensorProxy, Axis]] = []
        # what several layers read is copied once, so that its gradient is summed once
        self.copies: dict[tuple, TensorProxy] = {}

    def write(self, operation: BoundSymbol) -> None:
        """Writes the operations that take the place of one: by the rule for its operation, else on whole values."""
        rules = {
            ltorch.linear: self.linear, ltorch.embedding: self.embedding, redistribute: self.cut_out,
            ltorch._foreach_norm: self.norms, ltorch.vector_norm: self.norm, ltorch.cross_entropy: self.total,
        }  # fmt: skip
        self.has_written |= operation.sym.tags >= {OpTags.IN_PLACE, OpTags.DONT_DCE}
        rule = self.on_lists if operation.sym.name in foreach.OPTIMIZERS else rules.get(operation.sym)
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            result = None if rule is None else rule(operation, *operation.args, **operation.kwargs)
        written, aliases = (
            adopt(recorder.bound_symbols, result, operation.output)
            if result is not None
            else ([*recorder.bound_symbols, operation], {})
        )
        assert not aliases, "a layer computes its result"
        for one in written:
            self.producer.update(dict.fromkeys(one.outputs, one))
            if one.sym is redistribute:
                self.joins(one)
        self.operations += written

    def joins(self, operation: BoundSymbol) -> None:
        """A redistribution makes a whole value of parts."""
        value, *along = operation.args[:4]
        steps = [step for step in steps_of(*along) if not {step[1], step[2]} <= {I, R}]
        if len(steps) == 1 and steps[0][1].kind == "S" and steps[0][2] in (I, R):
            axis, src, dst = steps[0]
            if dst == I and not axis.outside:
                self.parts[operation.output] = Part(value, axis, src.dim)
            if value.dtype is operation.output.dtype:
                self.joined[operation.output] = Part(value, outside_axis(axis), src.dim)

    # --- layers
    def linear(self, operation: BoundSymbol, x, weight, bias=None):
        part = self.part(weight) if len(weight.shape) == 2 else None
        if part is None:
            return None
        axis, last = part.axis, len(x.shape) - 1
        if part.dim == 0:
            own = None if bias is None else self.own(bias, axis, 0)
            return redistribute(ltorch.linear(self.gathered(x, axis), part.value, own), axis, S(last), I)
        out = self.summed(ltorch.linear(self.own(x, axis, last), part.value, None), axis)
        return out if bias is None else ltorch.add(out, bias)

    def cut_out(self, operation: BoundSymbol, x, axis, src, dst, *of):
        """A part that the program itself asks for of a whole value: where that is computed of parts, the part."""
        if src != I or dst == I or dst.kind != "S":
            return None
        part = self.part_outside(x) if axis.outside else self.part(x)
        if part is None or (part.axis, part.dim) != (axis, dst.dim) or part.value is operation.output:
            return None
        return redistribute(part.value, axis, dst, dst)

    def part_outside(self, x: TensorProxy) -> Part | None:
        """This rank's part of a value that leaves the program, or of one that such a part is computed of."""
        self.leaves = True
        try:
            return self.part(x)
        finally:
            self.leaves = False

    def written(self, known: Mapping[str, str]) -> dict[str, str]:
        """Parts that are written in memory where there is another part: the name of the one, and of the other."""
        names = {x.name: part.value.name for x, part in (*self.joined.items(), *self.leaving.items()) if part}
        same = ((x, self.same(x)) for x in self.producer)
        names |= {x.name: names[other.name] for x, other in same if other is not x and other.name in names}
        targets = {}
        for name, target in known.items():
            while name in names and target in names:
                name, target = names[name], names[target]
                targets[name] = target
        return targets

    # --- optimizers on lists of tensors
    def on_lists(self, operation: BoundSymbol, *args, **kwargs):
        """A fused optimizer: what it computes of tensors at the same place of its lists it computes of parts."""
        table: dict[Proxy, TensorProxy] = {}
        divided: dict[Proxy, list[tuple[Axis, int, int]]] = {}
        for i, parameter in enumerate(args[0]):
            steps, value = [], parameter
            while (part := self.part_outside(value)) is not None:
                steps.append((part.axis, part.dim, value.shape[part.dim]))
                value = part.value
            for x in (one[i] for one in args if isinstance(one, (tuple, list)) and len(one) > i):
                if steps and isinstance(x, TensorProxy) and x.shape == parameter.shape:
                    divided[x], table[x] = steps, self._divided(x, steps)
        if not table:
            return None
        own = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, (args, kwargs))
        result = operation.sym(*own[0], **own[1])
        form = operation.sym.in_place
        assert form is not None and callable(form.overwrites), "a fused optimizer writes to its arguments"
        results, sources = list(result), form.overwrites(operation)
        outputs = [o for o in proxies_in(operation.output, [])]
        assert len(outputs) == len(results) - 1 and results[0] is None, "a fused optimizer returns nothing"
        for position, source in sources.items():
            for axis, dim, size in reversed(divided.get(source, ())):
                parts = S(dim, size if size % axis.size else None)
                results[position + 1] = redistribute(results[position + 1], axis, parts, I)
        return tuple(results)

    def _divided(self, x: TensorProxy, steps: list[tuple[Axis, int, int]]) -> TensorProxy:
        for axis, dim, _ in steps:
            part = self.part_outside(x)
            x = part.value if part is not None and (part.axis, part.dim) == (axis, dim) else self.cut(x, axis, dim)
        return x

    # --- norms of DTensors
    def norm(self, operation: BoundSymbol, x, ord=2, dim=None, keepdim=False, dtype=None, **others):
        if dim is not None or keepdim or dtype is not None or others:
            return None
        norms = self.norms(operation, [x], ord)
        return None if norms is None else norms[0]

    def norms(self, operation: BoundSymbol, tensors, ord=2, dtype=None, **others):
        """Sums of squares of parts are added up over the ranks, those of all tensors together."""
        if (
            ord not in (2, 2.0)
            or dtype is not None
            or others
            or any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs)
        ):
            return None  # a gradient that another rank has a part of would be missing
        held = [self._within(x) for x in tensors]
        if not any(axes for _, axes in held):
            return None
        norms: list = [None] * len(tensors)
        for axes in dict.fromkeys(axes for _, axes in held):
            places = [i for i, (_, known) in enumerate(held) if known == axes]
            sums = ltorch.square(ltorch.stack([ltorch.vector_norm(held[i][0]) for i in places]))
            for axis in axes:
                self.summands.append((sums, axis))
                sums = redistribute(sums, axis, P, I)
            for i, one in zip(places, ltorch.unbind(ltorch.sqrt(sums)), strict=True):
                norms[i] = one
        return norms

    def _within(self, x: TensorProxy) -> tuple[TensorProxy, tuple[Axis, ...]]:
        """What this rank has of a value, without padding, and the axes whose ranks have the rest."""
        part = self.part_outside(x)
        if part is None:
            return x, ()
        size, rows = x.shape[part.dim], part.value.shape[part.dim]
        if rows * part.axis.size != size:
            own = min(rows, max(0, size - part.axis.rank * rows))
            return ltorch.narrow(part.value, part.dim, 0, own), (part.axis,)
        value, axes = self._within(part.value)
        return value, (part.axis, *axes)

    def same(self, x: Any) -> Any:
        """The value that another name stands for."""
        made_by = self.producer.get(x)
        is_name = made_by is not None and made_by.sym is redistribute and made_by.args[2] == made_by.args[3] == I
        return self.same(made_by.args[0]) if made_by is not None and is_name else x

    def embedding(
        self,
        operation: BoundSymbol,
        ids,
        weight,
        padding_idx=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    ):
        """A lookup in a weight that is split by rows, whose results are summands, or by columns. None where the weight
        is not split."""
        part = self.part(weight)
        if part is None or max_norm is not None or scale_grad_by_freq or sparse:
            return None
        if part.dim == 1:
            own = ltorch.embedding(ids, part.value, padding_idx)
            return redistribute(own, part.axis, S(len(ids.shape)), I)
        rows, count = part.value.shape[0], weight.shape[0]
        first = part.axis.rank * rows
        own = ltorch.sub(ids, first)  # an id that no rank has is out of range on all of them: each raises
        before = ltorch.logical_and(ltorch.ge(ids, 0), ltorch.lt(own, 0))
        elsewhere = ltorch.logical_or(before, ltorch.logical_and(ltorch.ge(own, rows), ltorch.lt(ids, count)))
        padding = None if padding_idx is None else padding_idx % count - first
        mine = padding if padding is not None and 0 <= padding < rows else None
        looked_up = ltorch.embedding(ltorch.masked_fill(own, elsewhere, 0), part.value, mine)
        return self.summed(ltorch.masked_fill(looked_up, ltorch.unsqueeze(elsewhere, -1), 0), part.axis)

    def copied(self, x: TensorProxy, axis) -> TensorProxy:
        x = self.same(x)
        if (x, axis) not in self.copies:
            self.copies[x, axis] = redistribute(x, axis, I, R)
        return self.copies[x, axis]

    def summed(self, out: TensorProxy, axis) -> TensorProxy:
        """The sum over ranks of what each of them gives: whole, or of its parts along the sequence."""
        self.summands.append((out, axis))
        dim = self.sequences.get(axis)
        if dim is None or dim >= len(out.shape) - 1 or out.shape[dim] % axis.size:
            return redistribute(out, axis, P, I)
        return redistribute(redistribute(out, axis, P, S(dim)), axis, S(dim), I)

    def gathered(self, x: TensorProxy, axis) -> TensorProxy:
        """What a column-split layer reads: each rank computes something else with it."""
        part = self.part(x) if axis in self.sequences else None
        if part is None or (part.axis, part.dim) != (axis, self.sequences[axis]):
            return self.copied(x, axis)
        if (part.value, axis) not in self.copies:
            self.copies[part.value, axis] = redistribute(part.value, axis, S(part.dim), R)
        return self.copies[part.value, axis]

    def gathered_over(self, x: TensorProxy, axis) -> TensorProxy:
        return self.copied(x, axis)

    def summed_over(self, x: TensorProxy, axis) -> TensorProxy:
        self.summands.append((x, axis))
        return redistribute(x, axis, P, I)

    def largest_over(self, x: TensorProxy, axis) -> TensorProxy:
        return ltorch.amax(redistribute(ltorch.unsqueeze(x, 0), axis, S(0), R), 0)

    def total(self, operation: BoundSymbol, *args, **kwargs):
        """A loss over parts of the vocabulary, or of sequences."""
        rule = splitting.total.of(operation.sym)
        assert rule is not None, "losses have a rule for parts"
        return rule(self, operation)

    def own(self, value: TensorProxy, axis, dim: int) -> TensorProxy:
        """This rank's part of a value along a dimension: computed of parts, or cut out."""
        part = self.part(value)
        return part.value if part is not None and (part.axis, part.dim) == (axis, dim) else self.cut(value, axis, dim)

    # --- values between layers
    def part(self, value: Proxy) -> Part | None:
        """This rank's part of a value that can be computed of parts; the operations that compute it are recorded."""
        value = self.same(value)
        parts = self.leaving if self.leaves else self.parts
        if self.leaves and value in self.joined:
            return self.joined[value]
        if self.leaves and self.has_written and value not in parts:
            return None  # what it would be computed of may have been overwritten
        if value not in parts:
            operation = self.producer.get(value)
            repeatable = (
                operation is not None
                and len(operation.outputs) == 1
                and not operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE}
                and not any(isinstance(p, TensorProxy) for p in proxies_in(operation.kwargs, []))
            )
            rule = splitting.rule_of(operation, self.leaves) if operation is not None and repeatable else None
            parts[value] = None if rule is None or operation is None else rule(self, operation)
        return parts[value]

    def cut(self, value: TensorProxy, axis, dim: int) -> TensorProxy:
        size = value.shape[dim]
        return redistribute(value, axis, I, S(dim, size if size % axis.size else None))

    def computed(self, operation: BoundSymbol, table: dict, axis, dim: int) -> Part:
        """`operation` on parts, which makes the part along `dim` of its result."""
        args = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.args)
        return Part(operation.sym(*args, **operation.kwargs), axis, dim)
