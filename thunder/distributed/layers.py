"""Split layers: a program computes with the parts of weights that its rank holds.

Before: `t_w = join_ranks(t_w_part, group, 0)`, `y = linear(x, t_w, None)`.
After:  `x0 = copy_to_ranks(x, group)`, `y0 = linear(x0, t_w_part, None)`, `y = join_ranks(y0, group, 1)`.

Before: `t_v = join_ranks(t_v_part, group, 1)`, `z = linear(gelu(y), t_v, None)`. After:  `z0 = linear(gelu(y0),
t_v_part, None)`, `z = sum_over_ranks(z0, group)`: where what a layer reads can be computed of parts, it is, and what
was joined for it is dropped. What else a program does with a split weight it does with the whole one, which is joined
for it.

With a sequence dimension what a row-split layer gives is summed to parts along it, which norms and residual sums are
computed of, and a column-split layer gathers them: `z1 = sum_of_parts(z0, group, 1)`, `h1 = layer_norm(add(x1, z1),
...)`, `h = gather_parts(h1, group, 1)`, `y0 = linear(h, t_w_part, None)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thunder.core.proxies import Proxy, TensorProxy, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.distributed.placement import Slice
from thunder.distributed.tensor_parallel import (
    copy_to_ranks,
    gather_parts,
    join_ranks,
    part_of_rank,
    sum_of_parts,
    sum_over_ranks,
)
from thunder.ops import LTORCH
from thunder.ops.rules import splitting
from thunder.ops.rules.splitting import Part
from thunder.transforms.dce import dce


def split_layers(trace: Trace, slices: Iterable[Slice]) -> Trace:
    """Linear and embedding layers whose weights are split compute parts, and what lies between two of them is computed
    of parts where that is the same. slices: how weights are split."""
    # by group, the dimension of activations that its ranks share between layers
    state = _Split({s.group: s.sequence_dim for s in slices if s.sequence_dim is not None})
    for operation in trace.bound_symbols:
        state.write(operation)
    return dce(trace.replace(bound_symbols=state.operations))


class _Split:
    def __init__(self, sequences: dict[Any, int]):
        self.sequences = sequences
        self.operations: list[BoundSymbol] = []
        self.producer: dict[Proxy, BoundSymbol] = {}
        self.parts: dict[Proxy, Part | None] = {}
        # what several layers read is copied once, so that its gradient is summed once
        self.copies: dict[tuple, TensorProxy] = {}

    def write(self, operation: BoundSymbol) -> None:
        rule = {LTORCH["linear"]: self.linear, LTORCH["embedding"]: self.embedding}.get(operation.sym)
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            result = None if rule is None else rule(operation, *operation.args, **operation.kwargs)
        made, aliases = (
            adopt(recorder.bound_symbols, result, operation.output)
            if result is not None
            else ([*recorder.bound_symbols, operation], {})
        )
        assert not aliases, "a layer computes its result"
        for one in made:
            self.producer.update(dict.fromkeys(one.outputs, one))
            if one.sym is join_ranks:
                self.parts[one.output] = Part(*one.args)
        self.operations += made

    # --- layers
    def linear(self, operation: BoundSymbol, x, weight, bias=None):
        part = self.part(weight) if len(weight.shape) == 2 else None
        if part is None:
            return None
        group, last = part.group, len(x.shape) - 1
        if part.dim == 0:
            own = None if bias is None else self.own(bias, group, 0)
            return join_ranks(LTORCH["linear"](self.gathered(x, group), part.value, own), group, last)
        out = self.summed(LTORCH["linear"](self.own(x, group, last), part.value, None), group)
        return out if bias is None else LTORCH["add"](out, bias)

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
        part = self.part(weight)
        if part is None or max_norm is not None or scale_grad_by_freq or sparse:
            return None
        if part.dim == 1:
            return join_ranks(LTORCH["embedding"](ids, part.value, padding_idx), part.group, len(ids.shape))
        rows = part.value.shape[0]
        first = part.group.rank() * rows
        elsewhere = LTORCH["logical_or"](LTORCH["lt"](ids, first), LTORCH["ge"](ids, first + rows))
        mine = (
            None
            if padding_idx is None or not first <= padding_idx % weight.shape[0] < first + rows
            else padding_idx % weight.shape[0] - first
        )
        found = LTORCH["embedding"](LTORCH["masked_fill"](LTORCH["sub"](ids, first), elsewhere, 0), part.value, mine)
        return self.summed(LTORCH["masked_fill"](found, LTORCH["unsqueeze"](elsewhere, -1), 0), part.group)

    def copied(self, x: TensorProxy, group) -> TensorProxy:
        if (x, group) not in self.copies:
            self.copies[x, group] = copy_to_ranks(x, group)
        return self.copies[x, group]

    def summed(self, out: TensorProxy, group) -> TensorProxy:
        """The sum over ranks of what each of them gives: whole, or of its parts along the sequence."""
        dim = self.sequences.get(group)
        if dim is None or dim >= len(out.shape) - 1 or out.shape[dim] % group.size():
            return sum_over_ranks(out, group)
        return join_ranks(sum_of_parts(out, group, dim), group, dim)

    def gathered(self, x: TensorProxy, group) -> TensorProxy:
        """What a column-split layer reads: each rank computes something else with it."""
        part = self.part(x) if group in self.sequences else None
        if part is None or (part.group, part.dim) != (group, self.sequences[group]):
            return self.copied(x, group)
        if (part.value, group) not in self.copies:
            self.copies[part.value, group] = gather_parts(part.value, group, part.dim)
        return self.copies[part.value, group]

    def own(self, value: TensorProxy, group, dim: int) -> TensorProxy:
        """This rank's part of a value along a dimension: computed of parts, or cut out."""
        part = self.part(value)
        return (
            part.value if part is not None and (part.group, part.dim) == (group, dim) else self.cut(value, group, dim)
        )

    # --- values between layers
    def part(self, value: Proxy) -> Part | None:
        """This rank's part of a value that can be computed of parts; the operations that compute it are recorded."""
        if value not in self.parts:
            operation = self.producer.get(value)
            repeatable = (
                operation is not None
                and len(operation.outputs) == 1
                and not operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE}
                and not proxies_in(operation.kwargs, [])
            )
            rule = _rule_of(operation) if repeatable else None
            self.parts[value] = None if rule is None else rule(self, operation)
        return self.parts[value]

    def cut(self, value: TensorProxy, group, dim: int) -> TensorProxy:
        return part_of_rank(value, group, dim)

    def computed(self, operation: BoundSymbol, table: dict, group, dim: int) -> Part:
        """`operation` on parts, which makes the part along `dim` of its result."""
        args = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.args)
        return Part(operation.sym(*args, **operation.kwargs), group, dim)


def _rule_of(operation: BoundSymbol):
    return splitting.rule.of(operation.sym) or (splitting.elementwise if _is_elementwise(operation) else None)


def _is_elementwise(operation: BoundSymbol) -> bool:
    """Whether an operation, or all that it is composed of, computes elements from those at the same place."""
    return (
        operation.sym.elementwise
        or splitting.rule.of(operation.sym) is splitting.elementwise
        or bool(operation.subsymbols)
        and OpTags.SHAPE_OP not in operation.sym.tags
        and all(map(_is_elementwise, operation.subsymbols))
    )
