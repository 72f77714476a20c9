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
from typing import Any, NamedTuple

from thunder.core.proxies import Proxy, TensorProxy, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, adopt, recording
from thunder.core.trace import Trace
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


def split_layers(trace: Trace, sequences: dict[Any, int]) -> Trace:
    """Linear and embedding layers whose weights are split compute parts, and what lies between two of them is computed
    of parts where that is the same.

    sequences: by group, the dimension of activations that its ranks share between layers.
    """
    state = _Split(sequences)
    for line in trace.bound_symbols:
        state.write(line)
    return dce(trace.replace(bound_symbols=state.lines))


class _Split:
    def __init__(self, sequences: dict[Any, int]):
        self.sequences = sequences
        self.lines: list[BoundSymbol] = []
        self.maker: dict[Proxy, BoundSymbol] = {}
        self.parts: dict[Proxy, _Part | None] = {}
        # what several layers read is copied once, so that its gradient is summed once
        self.copies: dict[tuple, TensorProxy] = {}

    def write(self, line: BoundSymbol) -> None:
        rule = {LTORCH["linear"]: self.linear, LTORCH["embedding"]: self.embedding}.get(line.sym)
        with recording(Recorder(line.context, lambda: line.location)) as recorder:
            result = None if rule is None else rule(line, *line.args, **line.kwargs)
        made, aliases = (
            adopt(recorder.bound_symbols, result, line.output)
            if result is not None
            else ([*recorder.bound_symbols, line], {})
        )
        assert not aliases, "a layer computes its result"
        for one in made:
            self.maker.update(dict.fromkeys(one.outputs, one))
            if one.sym is join_ranks:
                self.parts[one.output] = _Part(*one.args)
        self.lines += made

    # --- layers
    def linear(self, line: BoundSymbol, x, weight, bias=None):
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
        line: BoundSymbol,
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
        """This rank's part of a value that can be computed of parts; the lines that compute it are recorded."""
        if value not in self.parts:
            line = self.maker.get(value)
            repeatable = (
                line is not None
                and len(line.outputs) == 1
                and not line.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE}
                and not proxies_in(line.kwargs, [])
            )
            rule = _rule_of(line) if repeatable else None
            self.parts[value] = None if rule is None else rule(self, line)
        return self.parts[value]

    def computed(self, line: BoundSymbol, table: dict, group, dim: int) -> _Part:
        """`line` on parts, which makes the part along `dim` of its result."""
        args = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, line.args)
        return _Part(line.sym(*args, **line.kwargs), group, dim)


def _is_elementwise(line: BoundSymbol) -> bool:
    if line.sym.elementwise or line.sym.name in (
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
    return bool(line.subsymbols) and OpTags.SHAPE_OP not in line.sym.tags and all(map(_is_elementwise, line.subsymbols))


def _rule_of(line: BoundSymbol):
    return _RULES.get(line.sym.name) or (_elementwise if _is_elementwise(line) else None)


def _elementwise(state: _Split, line: BoundSymbol) -> _Part | None:
    """Every operand of the result's size along the dimension is there in part, or is cut."""
    rank = len(line.output.shape)
    tensors = [p for p in dict.fromkeys(line.inputs) if isinstance(p, TensorProxy)]
    known = {p: part for p in tensors if (part := state.part(p)) is not None}
    places = {(part.group, part.dim - len(p.shape)) for p, part in known.items()}
    if len(places) > 1:  # parts of sequences and of features: the features are joined
        places = {(group, dim) for group, dim in places if state.sequences.get(group) == rank + dim}
    if len(places) != 1:
        return None
    group, place = places.pop()
    known = {p: part for p, part in known.items() if (part.group, part.dim - len(p.shape)) == (group, place)}
    size = line.output.shape[place]
    table = {p: part.value for p, part in known.items()}
    for p in tensors:
        if p not in known:  # what is broadcast along the dimension has a gradient from every rank
            whole = len(p.shape) >= -place and p.shape[place] == size
            table[p] = part_of_rank(p, group, len(p.shape) + place) if whole else state.copied(p, group)
    return state.computed(line, table, group, rank + place)


def _reshaped(state: _Split, line: BoundSymbol) -> _Part | None:
    """The dimension becomes another one with the same elements before it, which the ranks divide as well."""
    part = state.part(line.inputs[0])
    if part is None or len(line.inputs) != 1 or line.output.dtype is not line.inputs[0].dtype:
        return None
    shape, n = tuple(line.output.shape), part.group.size()
    before = math.prod(line.inputs[0].shape[: part.dim])
    dim = next((i for i, size in enumerate(shape) if math.prod(shape[:i]) == before and size > 1), None)
    if dim is None or shape[dim] % n:
        return None
    return _Part(LTORCH["reshape"](part.value, (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])), part.group, dim)


def _transposed(state: _Split, line: BoundSymbol) -> _Part | None:
    part = state.part(line.inputs[0])
    rank = len(line.output.shape)
    if part is None or rank < 2:
        return None
    if line.sym.name == "permute":
        order = [d % rank for d in line.args[1]]
    else:
        order = list(range(rank))
        a, b = (0, 1) if line.sym.name == "t" else (d % rank for d in line.args[1:3])
        order[a % rank], order[b % rank] = b % rank, a % rank
    return state.computed(line, {line.inputs[0]: part.value}, part.group, order.index(part.dim))


def _indexed(state: _Split, line: BoundSymbol) -> _Part | None:
    """Slices, numbers and new dimensions, which take all of the parts' dimension."""
    part, key = state.part(line.inputs[0]), line.args[1] if isinstance(line.args[1], tuple) else (line.args[1],)
    if (
        part is None
        or not all(k is None or k is Ellipsis or type(k) in (int, slice) for k in key)
        or len(line.inputs) != 1
    ):
        return None
    missing = len(line.inputs[0].shape) - sum(k is not None and k is not Ellipsis for k in key)
    at = next((i for i, k in enumerate(key) if k is Ellipsis), len(key))
    dim = place = 0
    for k in (*key[:at], *[slice(None)] * missing, *key[at + 1 :]):
        if dim == part.dim and k is not None:
            return state.computed(line, {line.inputs[0]: part.value}, part.group, place) if k == slice(None) else None
        dim, place = dim + (k is not None), place + (type(k) is not int)
    return None


def _unsqueezed(state: _Split, line: BoundSymbol) -> _Part | None:
    part, dim = (
        state.part(line.inputs[0]),
        (line.args[1] if len(line.args) > 1 else line.kwargs["dim"]) % len(line.output.shape),
    )
    return (
        None
        if part is None
        else state.computed(line, {line.inputs[0]: part.value}, part.group, part.dim + (dim <= part.dim))
    )


def _expanded(state: _Split, line: BoundSymbol) -> _Part | None:
    part, shape = state.part(line.inputs[0]), tuple(line.output.shape)
    if part is None or len(line.inputs) != 1:
        return None
    place = part.dim + len(shape) - len(line.inputs[0].shape)
    return _Part(
        LTORCH["expand"](part.value, (*shape[:place], shape[place] // part.group.size(), *shape[place + 1 :])),
        part.group,
        place,
    )


def _repeated(state: _Split, line: BoundSymbol) -> _Part | None:
    """Each element several times: repeat_interleave with a number and a dimension."""
    part = state.part(line.inputs[0])
    if (
        part is None
        or len(line.args) != 3
        or type(line.args[1]) is not int
        or type(line.args[2]) is not int
        or line.kwargs
    ):
        return None
    return state.computed(line, {line.inputs[0]: part.value}, part.group, part.dim)


def _joined(state: _Split, line: BoundSymbol) -> _Part | None:
    """cat along another dimension than that of the parts; what has no elements and one dimension plays no part in
    it."""
    tensors = [p for p in dict.fromkeys(line.args[0]) if tuple(p.shape) != (0,)]
    parts = {p: part for p in tensors if (part := state.part(p)) is not None}
    dim = (line.args[1] if len(line.args) > 1 else line.kwargs.get("dim", 0)) % len(line.output.shape)
    places = {(part.group, part.dim) for part in parts.values()}
    if len(places) != 1 or (place := places.pop())[1] == dim:
        return None
    table = {p: parts[p].value if p in parts else part_of_rank(p, *place) for p in tensors}
    return state.computed(line, table, *place)


def _apart(*dims_from_the_right: int):
    """A rule of operations that compute with some of the last dimensions, and with the others one by one: all tensors
    are in parts along one of those others."""

    def rule(state: _Split, line: BoundSymbol) -> _Part | None:
        tensors = [p for p in dict.fromkeys(line.inputs) if isinstance(p, TensorProxy)]
        parts = [state.part(p) for p in tensors]
        if None in parts or len({(part.group, part.dim - len(p.shape)) for p, part in zip(tensors, parts)}) != 1:
            return None
        place = parts[0].dim - len(tensors[0].shape)
        if place in dims_from_the_right or len({len(p.shape) for p in tensors}) != 1:
            return None
        return state.computed(
            line, {p: part.value for p, part in zip(tensors, parts)}, parts[0].group, len(line.output.shape) + place
        )

    return rule


def _attention(state: _Split, line: BoundSymbol) -> _Part | None:
    """Heads are computed apart. Dropout would draw one mask on all ranks."""
    mask, dropout = (
        (*line.args[3:5], None, 0.0)[:2] if len(line.args) > 4 else (line.args[3] if len(line.args) > 3 else None, 0.0)
    )
    one_for_all = (
        not isinstance(mask, TensorProxy) or not mask.requires_grad and (len(mask.shape) < 3 or mask.shape[-3] == 1)
    )
    parts = [state.part(p) for p in line.args[:3]] if one_for_all and not dropout else [None]
    heads = len(line.output.shape) - 3
    if None in parts or heads < 0 or {(part.group, part.dim) for part in parts} != {(parts[0].group, heads)}:
        return None
    return state.computed(line, {p: part.value for p, part in zip(line.args[:3], parts)}, parts[0].group, heads)


def _normalized(state: _Split, line: BoundSymbol) -> _Part | None:
    """Norms over other dimensions than that of the parts."""
    part = state.part(line.inputs[0])
    if part is None or part.dim >= len(line.output.shape) - len(line.args[1]):
        return None
    table = {p: state.copied(p, part.group) for p in line.inputs[1:]} | {line.inputs[0]: part.value}
    return state.computed(line, table, part.group, part.dim)


def _along_dim(state: _Split, line: BoundSymbol) -> _Part | None:
    """softmax and its like, of another dimension than that of the parts."""
    part = state.part(line.inputs[0])
    dim = line.args[1] % len(line.output.shape) if len(line.args) > 1 and isinstance(line.args[1], int) else None
    return (
        None
        if part is None or dim is None or part.dim == dim
        else state.computed(line, {line.inputs[0]: part.value}, part.group, part.dim)
    )


_RULES = {
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten"), _reshaped),
        **dict.fromkeys(("transpose", "permute", "t"), _transposed),
    "contiguous": _elementwise, "matmul": _apart(-1, -2), "scaled_dot_product_attention": _attention,
    "softmax": _along_dim, "log_softmax": _along_dim,
    "layer_norm": _normalized, "rms_norm": _normalized, "getitem": _indexed, "unsqueeze": _unsqueezed,
    "expand": _expanded, "repeat_interleave": _repeated, "cat": _joined,
}  # fmt: skip
