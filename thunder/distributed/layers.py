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

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

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
from thunder.transforms.dce import dce

__all__ = ["split_layers"]


class _Part(NamedTuple):
    """What this rank has of a value: an equal part along one of its dimensions."""

    value: TensorProxy
    group: Any
    dim: int


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
        self.maker: dict[Proxy, BoundSymbol] = {}
        self.parts: dict[Proxy, _Part | None] = {}
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
            self.maker.update(dict.fromkeys(one.outputs, one))
            if one.sym is join_ranks:
                self.parts[one.output] = _Part(*one.args)
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
            part.value
            if part is not None and (part.group, part.dim) == (group, dim)
            else part_of_rank(value, group, dim)
        )

    # --- values between layers
    def part(self, value: Proxy) -> _Part | None:
        """This rank's part of a value that can be computed of parts; the operations that compute it are recorded."""
        if value not in self.parts:
            operation = self.maker.get(value)
            repeatable = (
                operation is not None
                and len(operation.outputs) == 1
                and not operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE}
                and not proxies_in(operation.kwargs, [])
            )
            rule = _rule_of(operation) if repeatable else None
            self.parts[value] = None if rule is None else rule(self, operation)
        return self.parts[value]

    def computed(self, operation: BoundSymbol, table: dict, group, dim: int) -> _Part:
        """`operation` on parts, which makes the part along `dim` of its result."""
        args = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.args)
        return _Part(operation.sym(*args, **operation.kwargs), group, dim)


def _is_elementwise(operation: BoundSymbol) -> bool:
    if operation.sym.elementwise or operation.sym.name in (
        "add",
        "sub",
        "div",
        "true_divide",
        "where",
        "masked_fill",
        "to",
        "clone",
        "convert_element_type",
        "clamp",
    ):
        return True
    return (
        bool(operation.subsymbols)
        and OpTags.SHAPE_OP not in operation.sym.tags
        and all(map(_is_elementwise, operation.subsymbols))
    )


def _rule_of(operation: BoundSymbol):
    return _RULES.get(operation.sym.name) or (_elementwise if _is_elementwise(operation) else None)


def _elementwise(state: _Split, operation: BoundSymbol) -> _Part | None:
    """Every operand of the result's size along the dimension is there in part, or is cut."""
    rank = len(operation.output.shape)
    tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
    known = {p: part for p in tensors if (part := state.part(p)) is not None}
    places = {(part.group, part.dim - len(p.shape)) for p, part in known.items()}
    if len(places) > 1:  # parts of sequences and of features: the features are joined
        places = {(group, dim) for group, dim in places if state.sequences.get(group) == rank + dim}
    if len(places) != 1:
        return None
    group, place = places.pop()
    known = {p: part for p, part in known.items() if (part.group, part.dim - len(p.shape)) == (group, place)}
    size = operation.output.shape[place]
    table = {p: part.value for p, part in known.items()}
    for p in tensors:
        if p not in known:  # what is broadcast along the dimension has a gradient from every rank
            whole = len(p.shape) >= -place and p.shape[place] == size
            table[p] = part_of_rank(p, group, len(p.shape) + place) if whole else state.copied(p, group)
    return state.computed(operation, table, group, rank + place)


def _reshaped(state: _Split, operation: BoundSymbol) -> _Part | None:
    """The dimension becomes another one with the same elements before it, which the ranks divide as well."""
    part = state.part(operation.inputs[0])
    if part is None or len(operation.inputs) != 1 or operation.output.dtype is not operation.inputs[0].dtype:
        return None
    shape, n = tuple(operation.output.shape), part.group.size()
    before = math.prod(operation.inputs[0].shape[: part.dim])
    dim = next((i for i, size in enumerate(shape) if math.prod(shape[:i]) == before and size > 1), None)
    if dim is None or shape[dim] % n:
        return None
    return _Part(LTORCH["reshape"](part.value, (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])), part.group, dim)


def _transposed(state: _Split, operation: BoundSymbol) -> _Part | None:
    part = state.part(operation.inputs[0])
    rank = len(operation.output.shape)
    if part is None or rank < 2:
        return None
    if operation.sym.name == "permute":
        order = [d % rank for d in operation.args[1]]
    else:
        order = list(range(rank))
        a, b = (0, 1) if operation.sym.name == "t" else (d % rank for d in operation.args[1:3])
        order[a % rank], order[b % rank] = b % rank, a % rank
    return state.computed(operation, {operation.inputs[0]: part.value}, part.group, order.index(part.dim))


def _indexed(state: _Split, operation: BoundSymbol) -> _Part | None:
    """Slices, numbers and new dimensions, which take all of the parts' dimension."""
    part, key = (
        state.part(operation.inputs[0]),
        operation.args[1] if isinstance(operation.args[1], tuple) else (operation.args[1],),
    )
    if (
        part is None
        or not all(k is None or k is Ellipsis or type(k) in (int, slice) for k in key)
        or len(operation.inputs) != 1
    ):
        return None
    missing = len(operation.inputs[0].shape) - sum(k is not None and k is not Ellipsis for k in key)
    at = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
    dim = place = 0
    for k in (*key[:at], *[slice(None)] * missing, *key[at + 1 :]):
        if dim == part.dim and k is not None:
            return (
                state.computed(operation, {operation.inputs[0]: part.value}, part.group, place)
                if k == slice(None)
                else None
            )
        dim, place = dim + (k is not None), place + (type(k) is not int)
    return None


def _unsqueezed(state: _Split, operation: BoundSymbol) -> _Part | None:
    part, dim = (
        state.part(operation.inputs[0]),
        (operation.args[1] if len(operation.args) > 1 else operation.kwargs["dim"]) % len(operation.output.shape),
    )
    return (
        None
        if part is None
        else state.computed(operation, {operation.inputs[0]: part.value}, part.group, part.dim + (dim <= part.dim))
    )


def _expanded(state: _Split, operation: BoundSymbol) -> _Part | None:
    part, shape = state.part(operation.inputs[0]), tuple(operation.output.shape)
    if part is None or len(operation.inputs) != 1:
        return None
    place = part.dim + len(shape) - len(operation.inputs[0].shape)
    return _Part(
        LTORCH["expand"](part.value, (*shape[:place], shape[place] // part.group.size(), *shape[place + 1 :])),
        part.group,
        place,
    )


def _repeated(state: _Split, operation: BoundSymbol) -> _Part | None:
    """Each element several times: repeat_interleave with a number and a dimension."""
    part = state.part(operation.inputs[0])
    if (
        part is None
        or len(operation.args) != 3
        or type(operation.args[1]) is not int
        or type(operation.args[2]) is not int
        or operation.kwargs
    ):
        return None
    return state.computed(operation, {operation.inputs[0]: part.value}, part.group, part.dim)


def _joined(state: _Split, operation: BoundSymbol) -> _Part | None:
    """cat along another dimension than that of the parts; what has no elements and one dimension plays no part in
    it."""
    tensors = [p for p in dict.fromkeys(operation.args[0]) if tuple(p.shape) != (0,)]
    parts = {p: part for p in tensors if (part := state.part(p)) is not None}
    dim = (operation.args[1] if len(operation.args) > 1 else operation.kwargs.get("dim", 0)) % len(
        operation.output.shape
    )
    places = {(part.group, part.dim) for part in parts.values()}
    if len(places) != 1 or (place := places.pop())[1] == dim:
        return None
    table = {p: parts[p].value if p in parts else part_of_rank(p, *place) for p in tensors}
    return state.computed(operation, table, *place)


def _apart(*dims_from_the_right: int):
    """A rule of operations that compute with some of the last dimensions, and with the others one by one: all tensors
    are in parts along one of those others."""

    def rule(state: _Split, operation: BoundSymbol) -> _Part | None:
        tensors = [p for p in dict.fromkeys(operation.inputs) if isinstance(p, TensorProxy)]
        parts = [state.part(p) for p in tensors]
        if None in parts or len({(part.group, part.dim - len(p.shape)) for p, part in zip(tensors, parts)}) != 1:
            return None
        place = parts[0].dim - len(tensors[0].shape)
        if place in dims_from_the_right or len({len(p.shape) for p in tensors}) != 1:
            return None
        return state.computed(
            operation,
            {p: part.value for p, part in zip(tensors, parts)},
            parts[0].group,
            len(operation.output.shape) + place,
        )

    return rule


def _attention(state: _Split, operation: BoundSymbol) -> _Part | None:
    """Heads are computed apart. Dropout would draw one mask on all ranks."""
    mask, dropout = (
        (*operation.args[3:5], None, 0.0)[:2]
        if len(operation.args) > 4
        else (operation.args[3] if len(operation.args) > 3 else None, 0.0)
    )
    one_for_all = (
        not isinstance(mask, TensorProxy) or not mask.requires_grad and (len(mask.shape) < 3 or mask.shape[-3] == 1)
    )
    parts = [state.part(p) for p in operation.args[:3]] if one_for_all and not dropout else [None]
    heads = len(operation.output.shape) - 3
    if None in parts or heads < 0 or {(part.group, part.dim) for part in parts} != {(parts[0].group, heads)}:
        return None
    return state.computed(
        operation, {p: part.value for p, part in zip(operation.args[:3], parts)}, parts[0].group, heads
    )


def _normalized(state: _Split, operation: BoundSymbol) -> _Part | None:
    """Norms over other dimensions than that of the parts."""
    part = state.part(operation.inputs[0])
    if part is None or part.dim >= len(operation.output.shape) - len(operation.args[1]):
        return None
    table = {p: state.copied(p, part.group) for p in operation.inputs[1:]} | {operation.inputs[0]: part.value}
    return state.computed(operation, table, part.group, part.dim)


def _along_dim(state: _Split, operation: BoundSymbol) -> _Part | None:
    """softmax and its like, of another dimension than that of the parts."""
    part = state.part(operation.inputs[0])
    dim = (
        operation.args[1] % len(operation.output.shape)
        if len(operation.args) > 1 and isinstance(operation.args[1], int)
        else None
    )
    return (
        None
        if part is None or dim is None or part.dim == dim
        else state.computed(operation, {operation.inputs[0]: part.value}, part.group, part.dim)
    )


_RULES = {
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten"), _reshaped),
        **dict.fromkeys(("transpose", "permute", "t"), _transposed),
    "contiguous": _elementwise, "matmul": _apart(-1, -2), "scaled_dot_product_attention": _attention,
    "softmax": _along_dim, "log_softmax": _along_dim,
    "layer_norm": _normalized, "rms_norm": _normalized, "getitem": _indexed, "unsqueeze": _unsqueezed,
    "expand": _expanded, "repeat_interleave": _repeated, "cat": _joined,
}  # fmt: skip
