"""The kernel IR: a graph of values, each of which is a function of a place in a tensor.

The operations of a region are decomposed to primitives. Elementwise ones become maps. Views, slices, joins and paddings
only change the place at which an operand is read (`sources`), and cost nothing. Passes over memory begin and end at
reductions.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from thunder.core.dtypes import BOOL, FLOAT, bool8, dtype
from thunder.core.proxies import (
    FloatProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
    element_count,
    has_numbers,
    number_value,
    numbers_in,
)
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.executors.triton_kernels.functions import FUNCTIONS
from thunder.extend.fusion import of_integers
from thunder.kernels import index as places
from thunder.kernels.index import Index, within
from thunder.kernels.numbers import Numbers
from thunder.kernels.sizes import Extent, at_least
from thunder.ops.families.data import half_gradient
from thunder.ops.families.indexing import indexed

_TYPES = {"bfloat16", "float16", "float32", "float64", "bool8", "uint8", "int8", "int16", "int32", "int64"}


class Value:
    """kind: "input", "number", "iota", "map", "cast", "reduce", "gather", "added", "philox", "partial", "part", "add",
    or how the operand's place follows (see `sources`). what: its parameters. Sizes are ints or extents.

    "reduce": (function, dimensions), and True where it is made in one step. "partials" (a): terms of a sum.

    "gather" (a, *indices): elements of a. "added" (a, source, *indices): a, to which those of the source are added.
    Indices are as large as the result or the source; what: for each dimension of a the one of these that it is, None
    where the next index says the place.
    """

    __slots__ = ("kind", "operands", "shape", "dtype", "what")

    def __init__(self, kind: str, operands: Sequence, shape: Sequence[int | Extent], dtype: dtype, what: Any = None):
        self.kind, self.operands, self.shape, self.dtype, self.what = kind, tuple(operands), tuple(shape), dtype, what

    @property
    def numel(self) -> Any:
        return math.prod(self.shape)


class Program:
    """inputs: values in the order of the region's; outputs likewise."""

    __slots__ = ("inputs", "outputs")

    def __init__(self, inputs: Sequence[Value], outputs: Sequence[Value]):
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)


def in_order(outputs: Sequence[Value]) -> list[Value]:
    """All values in topological order."""
    order: dict[Value, None] = {}
    stack: list[tuple[Value, bool]] = [(v, False) for v in reversed(outputs)]
    while stack:
        value, done = stack.pop()
        if done:
            order[value] = None
        elif value not in order:
            stack.append((value, True))
            stack += [(x, False) for x in reversed(value.operands) if isinstance(x, Value) and x not in order]
    return list(order)


# ---------------------------------------------------------------------------------------------------------------- which
# operations


def _tensors(operation: BoundSymbol) -> list[TensorProxy]:
    return [p for p in (*operation.inputs, *operation.outputs) if isinstance(p, TensorProxy)]


def _known_type(t: TensorProxy) -> bool:
    return t.dtype.name in _TYPES and 0 not in t.shape


def _function(name: str, operands: tuple) -> str | None:
    """The name in FUNCTIONS of a map of these operands; None where there is none."""
    kinds = [x.dtype.category for x in operands if isinstance(x, (TensorProxy, Value))]
    if len(operands) == 2 and not _takes_second(name, *operands):
        return None
    if FLOAT not in kinds:
        name = _OF_INTEGERS.get(name, name)
    found = FUNCTIONS.get(name)
    if any(isinstance(x, FloatProxy) for x in operands) and name != "where" and any(k != FLOAT for k in kinds):
        return None
    if found is None or any(isinstance(x, complex) for x in operands) or any(k not in found.categories for k in kinds):
        return None
    wide = any(isinstance(x, (TensorProxy, Value)) and x.dtype.name == "float64" for x in operands)
    return None if wide and not found.in_double else name


def _takes_second(name: str, first, number) -> bool:
    """Whether a function takes a second operand: some are right for certain numbers only."""
    if name in ("floor_divide", "remainder"):
        return type(number) is int and number > 0
    if name in ("bitwise_left_shift", "bitwise_right_shift"):
        return type(number) is int and 0 <= number < 8 * first.dtype.bytes
    return name != "pow" or type(number) in (int, float) and number in _POWERS


# other names of functions where all operands are integers
_OF_INTEGERS = {"neg": "opposite", "negative": "opposite", "maximum": "larger", "minimum": "smaller"}
_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3, 4)


def _is_float(x) -> bool:
    return isinstance(x, (TensorProxy, Value)) and x.dtype.category == FLOAT


_known: weakref.WeakKeyDictionary[BoundSymbol, bool] = weakref.WeakKeyDictionary()


def primitive(operation: BoundSymbol) -> bool:
    """Whether kernels compute an operation directly, without its decomposition. Its decisions about sizes are made
    once."""
    found = _known.get(operation)
    if found is None:
        found = _known[operation] = _primitive(operation)
    return found


def _primitive(operation: BoundSymbol) -> bool:
    lowering = _LOWERINGS.get(operation.sym.id)
    if lowering is None or not all(map(_known_type, _tensors(operation))) or not _known_numbers(operation):
        return False
    if lowering is _map:
        return _function(operation.sym.name, operation.args) is not None
    if lowering is _reduction:
        return _reduces(operation)
    if lowering is _philox:
        return isinstance(operation.kwargs["seed"], TensorProxy) and _out(operation).dtype.name == "float32"
    if lowering is _added:
        return _adds(operation)
    return lowering not in (_gather, _take) or len(operation.args[0].shape) > 0


_ADDED = {"float32", "float64", "int32", "int64"}  # what PyTorch adds up without rounding in between


def _adds(operation: BoundSymbol) -> bool:
    """Whether all tensors have dimensions, and the source as many as the tensor that it is added to."""
    out, alpha = _out(operation), operation.kwargs.get("alpha", 1)
    return (
        out.dtype.name in _ADDED
        and min(len(t.shape) for t in _tensors(operation)) > 0
        and len(out.shape) == len(_source(operation).shape)
        and (type(alpha) is int or type(alpha) is float and _is_float(out))
    )


def _source(operation: BoundSymbol) -> TensorProxy:
    """What is added: the cotangent, where that is all there is."""
    return operation.args[0] if operation.sym.id in _TO_ZEROS else operation.args[3]


_OF_A_SHAPE = {"prims.reshape", "prims.broadcast_in_dim", "prims.iota", "ltorch.uniform_philox"}


def is_map(operation: BoundSymbol) -> bool:
    """Whether a primitive computes each element from elements at the same place."""
    return _LOWERINGS[operation.sym.id] in (_map, _cast, _full, _same)


def _known_numbers(operation: BoundSymbol) -> bool:
    """Whether what stays symbolic says only how large something is, where it begins, or is a number that elements are
    combined with, or are."""
    if not has_numbers((operation.args, operation.kwargs)):
        return True
    if _LOWERINGS[operation.sym.id] is _map:
        return not has_numbers(operation.kwargs)
    if operation.sym.id == "prims.full":
        return not isinstance(operation.args[1], FloatProxy) or _out(operation).dtype.category == FLOAT
    if not all(map(of_integers, numbers_in((operation.args, operation.kwargs), []))):
        return False
    if operation.sym.id == "prims.cat" or operation.sym.id in _TO_ZEROS:
        return True
    what = [x for x in operation.args if not isinstance(x, TensorProxy)]
    if operation.sym.id in _OF_A_SHAPE:
        return not has_numbers((what[1:], operation.kwargs))
    if operation.sym.id == "prims.slice_prim":
        return not has_numbers((what[2:], operation.kwargs))
    if operation.sym.id == "prims.pad":
        return not has_numbers((what[0], operation.kwargs)) and all(
            n >= 0 for pair in what[1] for n in pair if isinstance(n, NumberProxy)
        )
    return not has_numbers((what, operation.kwargs))


def _reduces(operation: BoundSymbol) -> bool:
    """Whether kernels reduce fast: few long rows that are not cut into chunks would leave most of a device idle."""
    a, dims = operation.args
    # see "opposite" in functions.py
    if a.dtype.category == BOOL or a.dtype.category != FLOAT and operation.sym.name != "sum":
        return False
    columns = math.prod(number_value(a.shape[d]) for d in dims)
    rows = element_count(a) // columns
    if operation.sym.name == "sum" and not has_numbers(a.shape):
        return True
    return rows == 1 or rows >= 64 or columns <= 16384 or min(dims) == 0


# ------------------------------------------------------------------------------------------------ operations
# to values


class _Values(dict[Proxy, Value]):
    """The values of proxies. numbers: of the region."""

    def __init__(self, numbers: Numbers):
        super().__init__()
        self.numbers = numbers


def program_of(region: Region, numbers: Numbers) -> Program:
    values = _Values(numbers)
    inputs = []
    for i, p in enumerate(region.inputs):
        assert isinstance(p, TensorProxy), "regions of the fuser read tensors"
        values[p] = Value("input", (), numbers.shape(p.shape), p.dtype, i)
        inputs.append(values[p])
    for operation in region.bound_symbols:
        _lower(operation, values)
    outputs: dict[Value, None] = {}
    for p in region.outputs:
        v = values[p]  # a result is a buffer of its own, whatever else holds the same numbers
        outputs[Value("reshape", (v,), v.shape, v.dtype, (v.shape,)) if v in outputs or v.kind == "input" else v] = None
    return Program(inputs, list(outputs))


def _lower(operation: BoundSymbol, values: _Values) -> None:
    if primitive(operation):
        operands = tuple(values[x] if isinstance(x, TensorProxy) else x for x in operation.args)
        values[operation.outputs[0]] = _LOWERINGS[operation.sym.id](operation, operands, values)
        return
    operations, aliases = operation.subsymbols, operation.aliases
    for sub in operations:
        _lower(sub, values)
    for old, new in aliases.items():
        if isinstance(new, Proxy):
            values[old] = values[new]
        elif isinstance(old, TensorProxy):
            number = values.numbers.number(new)
            values[old] = Value("number", (), values.numbers.shape(old.shape), old.dtype, number)
    for out in operation.outputs:
        if (
            (v := values[out]).kind == "cast"
            and v.dtype.bytes == 2
            and v.dtype.category == FLOAT
            and v.operands[0].dtype.name == "float32"
            and (_computes(operation) or operation.sym is half_gradient)
        ):
            # rounded where it is stored, as elementwise results are: the program does not convert
            values[out] = Value("reshape", v.operands, v.shape, v.dtype, (v.shape,))


def _computes(operation: BoundSymbol) -> bool:
    """Whether an operation does more than convert or move data."""
    if primitive(operation):
        return OpTags.SHAPE_OP not in operation.sym.tags and operation.sym.id != "prims.convert_element_type"
    return any(map(_computes, operation.subsymbols))


def _out(operation: BoundSymbol) -> TensorProxy:
    return operation.outputs[0]  # type: ignore[return-value]


def _made(kind: str, operation: BoundSymbol, operands: Sequence, values: _Values, what: Any = None) -> Value:
    """A value with the type and shape of an operation's result."""
    out = _out(operation)
    return Value(kind, operands, values.numbers.shape(out.shape), out.dtype, what)


def _map(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    function = _function(operation.sym.name, operands)
    return _made("map", operation, [values.numbers.number(x) for x in operands], values, function)


def _view(kind: str) -> Callable:
    def make(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
        return _made(kind, operation, operands[:1], values, operands[1:])

    return make


def _slice(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    starts = tuple(values.numbers.extent(n, 0) for n in operands[1])
    return _made("slice", operation, operands[:1], values, (starts, *operands[2:]))


def _pad(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    padding = tuple((values.numbers.extent(low, 0), values.numbers.extent(high, 0)) for low, high in operands[2])
    return _made("pad", operation, operands[:1], values, (operands[1], padding))


def _same(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    return operands[0]


def _cast(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    return _made("cast", operation, operands[:1], values)


def _joined(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    return _made("cat", operation, [values[t] for t in operation.args[0]], values, operation.args[1])


def _full(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    return _made("number", operation, (), values, values.numbers.number(operands[1]))


def _iota(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    return _made("iota", operation, (), values, (operation.kwargs["start"], operation.kwargs["step"]))


def _reduction(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    a, dims = operands[0], operands[1]
    if all(a.shape[d] == 1 for d in dims):  # nothing to combine
        return _made("reshape", operation, (a,), values)
    return _made("reduce", operation, (a,), values, (operation.sym.name, tuple(dims)))


def _partials(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    out = _out(operation)
    first = Value("reshape", operands[:1], (1, *out.shape[1:]), out.dtype)
    padding = ((0, out.shape[0] - 1), *[(0, 0)] * (len(out.shape) - 1))
    return _made("partials", operation, (first,), values, (0.0, padding))


def _total(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    a = operands[0]
    total = Value("reduce", (a,), a.shape[1:], a.dtype, ("sum", (0,), True))
    return _made("reshape", operation, (total,), values)


def _gather(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    a, dim, at = operands[:3]
    return _made("gather", operation, (a, at), values, _along(a.shape, dim))


def _take(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    """A gather whose index is the same in all other dimensions."""
    a, dim, at = operands
    shape = values.numbers.shape(_out(operation).shape)
    return _made("gather", operation, (a, _spread(at, shape, dim)), values, _along(a.shape, dim))


def _along(shape: Sequence, dim: int) -> tuple:
    dim = dim % len(shape)
    return tuple(None if d == dim else d for d in range(len(shape)))


def _index(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    a, indices = operands[0], operation.args[1]
    where, first, count = indexed(indices)
    shape = values.numbers.shape(_out(operation).shape)
    kept = iter(d for d in range(len(shape)) if not first <= d < first + count)
    found = [_from_front(values[indices[d]], a.shape[d]) for d in where]
    return _made(
        "gather", operation, (a, *(_spread(at, shape, first + count - len(at.shape)) for at in found)), values,
        tuple(None if d in where else next(kept) for d in range(len(a.shape))),
    )  # fmt: skip


def _added(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    _, dim, at = operands[:3]
    source, alpha = values[_source(operation)], operation.kwargs.get("alpha", 1)
    shape = source.shape
    if operation.sym.id in ("ltorch.index_add", "index_select_backward"):
        at = _spread(at, shape, dim % len(shape))
    elif at.shape != shape:  # what the index does not reach is not read
        zeros, shape = (0,) * len(shape), at.shape
        source = Value("slice", (source,), shape, source.dtype, (zeros, shape, (1,) * len(shape)))
    if alpha != 1:
        source = Value("map", (source, alpha), shape, source.dtype, "mul")
    a = _made("number", operation, (), values, 0) if operation.sym.id in _TO_ZEROS else operands[0]
    return _made("added", operation, (a, source, at), values, _along(shape, dim))


_TO_ZEROS = {"gather_backward", "index_select_backward"}


def _spread(at: Value, shape: Sequence[int | Extent], d: int) -> Value:
    """An index of this shape, of which its dimensions are those from d on."""
    return Value("broadcast", (at,), shape, at.dtype, (shape, tuple(range(d, d + len(at.shape)))))


def _from_front(at: Value, n: int | Extent) -> Value:
    """An index with negative values wrapped around n elements."""
    below = Value("map", (at, 0), at.shape, bool8, "lt")
    return Value("map", (below, Value("map", (at, n), at.shape, at.dtype, "add"), at), at.shape, at.dtype, "where")


def _philox(operation: BoundSymbol, operands: tuple, values: _Values) -> Value:
    low, high = (*operation.args[1:], *(0.0, 1.0)[len(operation.args) - 1 :])
    what = operation.kwargs["offset"], low, high
    return _made("philox", operation, (values[operation.kwargs["seed"]],), values, what)


_LOWERINGS: dict[Any, Callable] = {
    **{f"prims.{name}": _map for name in FUNCTIONS},
    **{f"prims.{name}": _view(kind) for name, kind in {
        "broadcast_in_dim": "broadcast", "reshape": "reshape", "squeeze": "reshape", "transpose": "permute",
        "flip": "flip",
    }.items()},
    "prims.slice_prim": _slice, "prims.pad": _pad,
    **{f"prims.{name}": _same for name in ("clone_prim", "detach_prim", "image_layout", "stride_order", "positive")},
    **{f"prims.{name}": _reduction for name in ("sum", "amax", "amin")},
    "prims.partial_sums": _partials, "prims.sum_of_partials": _total,
    "prims.convert_element_type": _cast, "prims.cat": _joined, "prims.full": _full, "prims.iota": _iota,
    "ltorch.gather": _gather, "prims.take": _take, "prims.index": _index,
    **dict.fromkeys(("ltorch.index_add", "ltorch.scatter_add", *_TO_ZEROS), _added), "ltorch.uniform_philox": _philox,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- where
# operands are read

Place = tuple[Index, ...]


def indexed_place(
    how: tuple,
    shape: Sequence[int | Extent],
    indices: Sequence[Value],
    place: Place,
    at: Callable[[Value, int | Extent], Index],
) -> Place:
    """Where in something of this shape a gather reads, or an addition adds, at a place of its own. at: the number that
    an index is there, of so many."""
    rest = iter(indices)
    return tuple(at(next(rest), n) if d is None else place[d] for d, n in zip(how, shape, strict=True))


def sources(value: Value, place: Place) -> list[tuple[Value, Place, list]]:
    """The reads of a value that only moves data: (operand, its place, conditions) for each operand. A condition (index,
    low, high) means low <= index < high. The bounds of a place hold where its conditions do."""
    kind, what = value.kind, value.what
    if kind == "cat":
        found, start = [], 0
        for operand in value.operands:
            end = start + operand.shape[what]
            found.append(
                (
                    operand,
                    (*place[:what], within(place[what] + -start, end - start), *place[what + 1 :]),
                    [(place[what], start, end)],
                )
            )
            start = end
        return found
    operand = value.operands[0]
    conditions: list = []
    if kind == "part":
        there = place
    elif kind == "broadcast":
        there = tuple(Index.of(0) if n == 1 else place[d] for n, d in zip(operand.shape, what[1], strict=True))
    elif kind == "reshape":
        there = places.split(places.join(place, places.strides_of(value.shape)), operand.shape)
    elif kind == "permute":
        order = what[0]
        inverse = {d: i for i, d in enumerate(order)}
        there = tuple(place[inverse[d]] for d in range(len(order)))
    elif kind == "slice":
        starts, _, steps = what
        there = tuple(p * step + start for p, start, step in zip(place, starts, steps, strict=True))
    elif kind == "flip":
        dims = {d % len(value.shape) for d in what[0] if value.shape}
        there = tuple(
            p * -1 + (n - 1) if i in dims else p for i, (p, n) in enumerate(zip(place, value.shape, strict=True))
        )
    else:
        assert kind in ("pad", "partials"), f"{kind} says nothing about places"
        there = tuple(p + -low for p, (low, _) in zip(place, what[1], strict=True))
        conditions = [
            (p, 0, n)
            for p, n, (low, high) in zip(there, operand.shape, what[1], strict=True)
            if not (at_least(0, low) and at_least(0, high))
        ]
        there = tuple(within(p, n) for p, n in zip(there, operand.shape, strict=True))
    return [(operand, there, conditions)]
