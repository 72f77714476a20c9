"""`a[key]` and `a[key] = value`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from thunder import compat
from thunder.analysis import aliases, cost
from thunder.analysis.cost import Cost
from thunder.core.definition import InPlaceForm
from thunder.core.dtypes import bool8, is_integer
from thunder.core.proxies import METHODS, NumberProxy, TensorProxy, like, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, user_location
from thunder.core.unbacked import fresh_size
from thunder.errors import DataDependentError
from thunder.ops import ltorch, prims, registry
from thunder.ops.backward import getitem_backward, index_backward, select_backward, slice_backward, sum_to
from thunder.ops.families.data import convert
from thunder.ops.promotion import broadcast_shapes, is_number
from thunder.ops.registry import alias, composite, prim
from thunder.ops.rules import batching, effects, kernels, splitting
from thunder.ops.shape_rules import along, by_mask, require

_BIG = 1 << 60  # slice ends beyond any size


# ----------------------------------------------------------------------------------------------------------------
# reading a key


class Selection:
    """What a key selects. `entries`: for each dimension of `a`, in order, ("slice", start, stop, step), ("int", i),
    ("index", tensor or list, shape) or ("mask", tensor); with ("new",) and ("bool", value) in between, which use up no
    dimension."""

    __slots__ = ("entries", "shape")

    def __init__(self, entries: list[tuple], shape: tuple):
        self.entries, self.shape = entries, shape


def key_tuple(key) -> tuple:
    """A key as a tuple: a list is one index unless it holds what only a tuple of keys can hold."""
    if type(key) is tuple:
        return key
    if isinstance(key, tuple):
        return tuple(key)
    if isinstance(key, list) and any(
        x is None or x is ... or isinstance(x, (slice, TensorProxy, Sequence)) for x in key
    ):
        return tuple(key)
    return (key,)


def _list_shape(x) -> tuple:
    return (len(x), *(_list_shape(x[0]) if len(x) else ())) if isinstance(x, Sequence) else ()


def _bools(x) -> bool:
    return all(_bools(e) for e in x) if isinstance(x, Sequence) else isinstance(x, bool)


def _nonzero(x) -> list[list[int]]:
    """For nested lists of bools: the indices of the true ones, dimension by dimension."""
    with compat.DisableTorchFunction():  # no operation of the program
        return torch.tensor(x).nonzero(as_tuple=False).t().tolist()


def bound(x, n, default):
    """A slice bound, counted from the front and clamped to 0 .. n."""
    if x is None:
        return default
    if x is n or (type(x) is int and x >= _BIG):
        return n
    if type(x) is not int and not isinstance(x, NumberProxy):
        x = operator.index(x)
    if x < 0:
        x = x + n
        if x < 0:
            return 0
    return n if x > n else x


def slice_entry(s: slice, n) -> tuple[tuple, Any]:
    """The ("slice", ...) entry for a dimension of size n, and the size it selects."""
    start, stop, step = s.start, s.stop, s.step
    if start is None and stop is None and step is None:
        return ("slice", 0, n, 1), n
    step = 1 if step is None else operator.index(step)
    require(step > 0)
    lo, hi = bound(start, n, 0), bound(stop, n, n)
    if hi is n and type(lo) is int and lo == 0:
        size = n
    elif hi <= lo:
        hi, size = lo, 0
        return ("slice", lo, hi, step), size
    else:
        size = hi - lo
    return ("slice", lo, hi, step), size if step == 1 else (size + step - 1) // step


def _used(k) -> int:
    """How many dimensions an entry of a key uses up."""
    if type(k) is slice or type(k) is int:
        return 1
    if isinstance(k, TensorProxy):
        return len(k.shape) if k.dtype.category == 0 or k.dtype.name == "uint8" else 1
    if k is None or k is ... or isinstance(k, bool):
        return 0
    return len(_list_shape(k)) if isinstance(k, Sequence) and len(k) and _bools(k) else 1


def selected(a: TensorProxy, key) -> Selection:
    """What `a[key]` selects. Raises IndexError, TypeError or ValueError as PyTorch does. A size that is as many as a
    mask has true elements is None."""
    keys = key_tuple(key)
    shape = a.shape
    used = sum(map(_used, keys))
    require(used <= len(shape))
    entries: list[tuple] = []
    out: list = []
    advanced: list[tuple[int, tuple]] = []  # (where in `out`, shape) of the index tensors
    dim = 0
    for k in keys:
        if type(k) is slice:
            entry, n = slice_entry(k, shape[dim])
            entries.append(entry)
            out.append(n)
            dim += 1
        elif k is None:
            entries.append(("new",))
            out.append(1)
        elif k is ...:
            rest = len(shape) - used
            for i in range(dim, dim + rest):
                entries.append(("slice", 0, shape[i], 1))
                out.append(shape[i])
            dim += rest
            used = len(shape)  # a second Ellipsis stands for nothing
        elif type(k) is int:
            entries.append(("int", _int_entry(k, shape[dim])))
            dim += 1
        elif isinstance(k, bool):
            entries.append(("bool", k))
            advanced.append((len(out), (1 if k else 0,)))
        elif isinstance(k, (TensorProxy, Sequence)) and not isinstance(k, str):
            dim = _advanced_entry(k, shape, dim, entries, out, advanced)
        else:
            entries.append(("int", _int_entry(k, shape[dim])))
            dim += 1
    for i in range(dim, len(shape)):
        entries.append(("slice", 0, shape[i], 1))
        out.append(shape[i])
    if advanced:
        out = _with_indices(out, advanced)
    return Selection(entries, tuple(out))


def _int_entry(k, n):
    """An integer of a key, counted from the front. Raises IndexError as PyTorch does."""
    if type(k) is not int and not isinstance(k, NumberProxy):
        try:
            k = operator.index(k)
        except TypeError:
            raise IndexError(
                "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices "
                f"(got {type(k).__name__})"
            ) from None
    require(k < n and k >= -n)
    return k + n if k < 0 else k


def _advanced_entry(k, shape: tuple, dim: int, entries: list, out: list, advanced: list) -> int:
    """Adds an index tensor, mask or sequence of a key to `entries`. Returns the next dimension. advanced: the position
    and shape of each so far; None: its length depends on data."""
    if isinstance(k, TensorProxy):
        if k.dtype.category == 0 or k.dtype.name == "uint8":
            for i, n in enumerate(k.shape):
                require((n != shape[dim + i]) is not True)
            entries.append(("mask", k))
            advanced.append((len(out), None))
            return dim + len(k.shape)
        require(k.dtype.category <= 1)
        if not k.shape:
            entries.append(("index", k, ()))
            return dim + 1
        entries.append(("index", k, k.shape))
        advanced.append((len(out), k.shape))
        return dim + 1
    if len(k) and _bools(k):
        columns = _nonzero(k)
        for column in columns:
            entries.append(("index", column, (len(column),)))
            advanced.append((len(out), (len(column),)))
        return dim + len(columns)
    entries.append(("index", list(k), _list_shape(k)))
    advanced.append((len(out), _list_shape(k)))
    return dim + 1


def _with_indices(out: list, advanced: list[tuple[int, tuple]]) -> list:
    """The shape of an indexing result: dimensions of index tensors, broadcast, stand at the first of them, or in front
    if a slice separates them."""
    try:
        common = broadcast_shapes((), *(s for _, s in advanced if s is not None))
        if any(s is None for _, s in advanced) and (not common or (common[-1] == 1) is not False):
            common = (*common[:-1], None)
    except DataDependentError:  # a RuntimeError as well
        raise
    except RuntimeError:
        raise IndexError(
            "shape mismatch: indexing tensors could not be broadcast together with shapes "
            f"{', '.join(str(list(s)) for _, s in advanced)}"
        ) from None
    first = advanced[0][0]
    at = first if all(i == first for i, _ in advanced) else 0
    return [*out[:at], *common, *out[at:]]


# ----------------------------------------------------------------------------------------------------------------
# getitem


@prim(lambda a, indices: a[tuple(slice(None) if i is None else i for i in indices)])
def index(a, indices):
    """Elements at integer tensors, None standing for a whole dimension; the broadcast shape of the tensors comes where
    they stand side by side, else first."""
    where, first, _ = indexed(indices)
    sizes_left = [n for d, n in enumerate(a.shape) if d not in where]
    return like(a, (*sizes_left[:first], *broadcast_shapes(*(indices[d].shape for d in where)), *sizes_left[first:]))


def indexed(indices: Sequence) -> tuple[list[int], int, int]:
    """For index tensors, None standing for a whole dimension: the dimensions that they index, and where in the result
    their own ones begin and how many these are."""
    where = [d for d, i in enumerate(indices) if i is not None]
    side_by_side = where == [*range(where[0], where[-1] + 1)]
    return where, where[0] if side_by_side else 0, max(len(indices[d].shape) for d in where)


def _getitem_meta(a, key):
    if type(key) is int and type(a.shape[0] if a.shape else None) is int and -a.shape[0] <= key < a.shape[0]:
        return like(a, a.shape[1:])
    return like(a, tuple([fresh_size() if n is None else n for n in selected(a, key).shape]))


def _with_numbers(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Tensors as bounds of slices are numbers, as PyTorch reads them."""
    key = args[1]
    for k in key if type(key) is tuple else (key,):
        if type(k) is slice and (
            type(k.start) is TensorProxy or type(k.stop) is TensorProxy or type(k.step) is TensorProxy
        ):
            key = (
                tuple([_with_plain_bounds(k) if type(k) is slice else k for k in key])
                if type(key) is tuple
                else _with_plain_bounds(key)
            )
            return (args[0], key, *args[2:]), kwargs
    return args, kwargs


def _with_plain_bounds(k: slice) -> slice:
    return slice(*(_bound(x) for x in (k.start, k.stop, k.step)))


def _bound(x):
    """A bound of a slice: of a tensor, its integer."""
    if not isinstance(x, TensorProxy):
        return x
    if (x.numel_value == 1) is not True or x.dtype.category > 1:
        raise TypeError("only integer tensors of a single element can be converted to an index")
    return METHODS["item"](x)


@composite(
    torch.Tensor.__getitem__, meta=_getitem_meta, tags=(OpTags.SHAPE_OP, OpTags.VIEW), canonicalize=_with_numbers
)
def getitem(a, key):
    """A slice of each dimension, integers among these as slices of one element whose dimension goes; then index
    tensors, of which masks are several."""
    selection = selected(a, key)
    out = _sliced(a, selection.entries)
    indices = [
        e
        for entry in selection.entries
        if entry[0] != "int"
        for e in (_columns(entry[1]) if entry[0] == "mask" else (entry,))
    ]
    new = [i for i, e in enumerate(indices) if e[0] in ("new", "bool")]
    if new:
        have = iter(out.shape)
        wide = tuple(1 if i in new else next(have) for i in range(len(indices)))
        out = prims.broadcast_in_dim(out, wide, tuple(i for i in range(len(indices)) if i not in new))
    out = _indexed(out, [_index_tensor(e, a) for e in indices])
    return prims.reshape(a, a.shape) if out is a else out


def _sliced(a, entries):
    """The view of a tensor that the slices and integers of a key select."""
    bounds: list[tuple] = []  # (start, stop, step) of each dimension
    gone = []
    for kind, *rest in entries:
        if kind == "slice":
            bounds.append((rest[0], rest[1], rest[2]))
        elif kind == "int":
            gone.append(len(bounds))
            bounds.append((rest[0], rest[0] + 1, 1))
        elif kind in ("index", "mask"):
            count = len(rest[0].shape) if kind == "mask" else 1
            bounds += [(0, n, 1) for n in a.shape[len(bounds) : len(bounds) + count]]
    whole = all(
        type(lo) is int and not lo and hi is n and step == 1 for (lo, hi, step), n in zip(bounds, a.shape, strict=True)
    )
    out = a if whole else prims.slice_prim(a, *zip(*bounds, strict=True))
    return prims.squeeze(out, tuple(gone)) if gone else out


def _indexed(out, tensors: list):
    """Index tensors, None standing for a whole dimension."""
    zero_dim = [i for i, t in enumerate(tensors) if t is not None and not t.shape]
    for i in reversed(zero_dim):  # as PyTorch, which selects with these before it indexes
        out = ltorch.select(out, i, tensors.pop(i))
    if all(t is None for t in tensors):
        return out
    while tensors[-1] is None:
        tensors.pop()
    return index(out, tuple(tensors))


def _columns(mask: TensorProxy) -> list[tuple]:
    """A mask as the places where it is true, dimension by dimension."""
    if not mask.shape:
        raise DataDependentError("whether a mask without dimensions is true", location=user_location())
    places = ltorch.nonzero(ltorch.ne(mask, 0) if mask.dtype.category else mask)
    return [("index", ltorch.select(places, 1, i), places.shape[:1]) for i in range(len(mask.shape))]


def _index_tensor(entry: tuple, a: TensorProxy):
    if entry[0] == "bool":
        return ltorch.tensor([0] if entry[1] else [], device=a.device, dtype=torch.int64)
    if entry[0] != "index":
        return None
    return (
        entry[1] if isinstance(entry[1], TensorProxy) else ltorch.tensor(entry[1], device=a.device, dtype=torch.int64)
    )


METHODS["__getitem__"] = getitem
# indexing with tensors or lists gathers: only the basic forms are views
aliases.shares.set(
    lambda a, key: not any(isinstance(k, (TensorProxy, list)) for k in (key if isinstance(key, tuple) else (key,))),
    getitem,
)


# ----------------------------------------------------------------------------------------------------------------
# setitem


def _copy_with_setitem(a, key, value):
    out = a.clone()
    out[key] = value
    return out


@prim(_copy_with_setitem)
def copy_with_setitem(a, key, value):
    """`a` with the elements at `key` replaced; `value` is a number or broadcasts to them."""
    return like(a)


def _setitem_meta(a, key, value):
    """The type of `x[key] = value`. Raises PyTorch's errors where the value does not fit."""
    shape = selected(a, key).shape
    if isinstance(value, TensorProxy):
        if not any(n is None for n in shape):
            have = value.shape
            while len(have) > len(shape) and have[0] == 1:
                have = have[1:]  # PyTorch drops leading dimensions of size 1 here
            require(len(have) <= len(shape) and broadcast_shapes(have, shape) == shape)
    elif not is_number(value):
        raise TypeError(f"can't assign a {type(value).__name__} to a torch.{a.dtype.torch_name}Tensor")
    return like(a)


@composite(name="setitem", meta=_setitem_meta, fn=_copy_with_setitem, canonicalize=_with_numbers)
def setitem(a, key, value):
    return copy_with_setitem(a, key, convert(value, a.dtype) if isinstance(value, TensorProxy) else value)


registry._INPLACE[torch.Tensor.__setitem__] = setitem


def setitem_(a, key, value):
    a[key] = value
    return a


setitem.in_place = InPlaceForm(setitem_, {0: 0})


# ---------------------------------------------------------------------------------------------------------------- other
# spellings


@alias(torch.ops.aten.slice, torch.ops.aten.slice.Tensor)
def aten_slice(a, dim=0, start=None, end=None, step=1):
    return getitem(a, along(a, dim, slice(start, end, step)))


@composite(torch.slice_scatter, torch.Tensor.slice_scatter)
def slice_scatter(a, src, dim=0, start=None, end=None, step=1):
    return setitem(a, along(a, dim, slice(start, end, step)), src)


@composite(torch.select_scatter, torch.Tensor.select_scatter)
def select_scatter(a, src, dim, index):
    return setitem(a, along(a, dim, index), src)


# --- derivatives: the way back through each step of the selection, as PyTorch's autograd goes


def _steps(a, key) -> tuple[list[tuple], tuple, list | None]:
    """The views that `a[key]` is made of, as (kind, sizes before, dimension, ...) in order, the sizes after them, and
    the index tensors that are applied last."""
    shape, dim, steps = a.shape, 0, []
    indices: list = []
    for kind, *entry in selected(a, key).entries:
        if kind == "int":
            steps.append(("select", shape, dim, entry[0]))
            shape = (*shape[:dim], *shape[dim + 1 :])
            continue
        if kind == "new":
            steps.append(("new", shape, dim))
            shape = (*shape[:dim], 1, *shape[dim:])
        elif kind == "slice":
            start, stop, step = entry
            n = shape[dim]
            if not (
                type(start) is int
                and start == 0
                and (stop is n or (type(stop) is int and type(n) is int and stop == n))
                and step == 1
            ):
                steps.append(("slice", shape, dim, start, stop, step))
                size = stop - start
                shape = (*shape[:dim], size if step == 1 else (size + step - 1) // step, *shape[dim + 1 :])
        indices.append(entry[0] if kind == "index" else None)
        dim += 1
    return steps, shape, indices if any(i is not None for i in indices) else None


def _with_index_tensors(a, key) -> tuple:
    """The key with its lists of numbers as tensors, which the backward reads too."""
    return tuple(
        ltorch.tensor(list(k), device=a.device, dtype=torch.int64) if isinstance(k, (list, tuple)) else k
        for k in key_tuple(key)
    )


def _simple(a, key) -> bool:
    """Whether the backward is made of PyTorch's steps: no mask, no bool, no 0-dim index tensor, no list of bools."""
    lists = [k for k in key_tuple(key) if isinstance(k, (list, tuple))]
    return not any(_bools(k) or not len(k) for k in lists) and not any(
        e[0] in ("mask", "bool") or (e[0] == "index" and e[2] == ()) for e in selected(a, key).entries
    )


@getitem.vjp
def _(a, key):
    if not _simple(a, key):
        g = yield getitem(a, key)
        return (getitem_backward(g, a.shape, key),)
    if any(isinstance(k, (list, tuple)) for k in key_tuple(key)):
        key = _with_index_tensors(a, key)
    steps, viewed, indices = _steps(a, key)
    g = yield getitem(a, key)
    if indices is not None:
        g = index_backward(g, viewed, indices)
    for kind, sizes, dim, *rest in reversed(steps):
        if kind == "new":
            g = ltorch.squeeze(g, dim)
        else:
            g = select_backward(g, sizes, dim, *rest) if kind == "select" else slice_backward(g, sizes, dim, *rest)
    return (g,)


@setitem.vjp
def _(a, key, value):
    has_gradient = isinstance(value, TensorProxy) and value.requires_grad
    if has_gradient and any(
        e[0] == "mask" for e in selected(a, key).entries
    ):  # how many elements it takes is known when it runs
        return NotImplemented
    g = yield setitem(a, key, value)
    of_value = None
    if has_gradient:
        taken = getitem(g, key)
        extra = len(value.shape) - len(taken.shape)  # PyTorch drops leading dimensions of size 1 here
        of_value = (
            sum_to(taken, value.shape)
            if extra <= 0
            else ltorch.reshape(sum_to(taken, value.shape[extra:]), value.shape)
        )
    return setitem(g, key, 0) if a.requires_grad else None, None, of_value


def _scatter_rule(symbol, key):
    """slice_scatter, select_scatter: the place of the source is nothing to `a`, and all there is to the source."""

    def rule(a, src, *args, **kwargs):
        g = yield symbol(a, src, *args, **kwargs)
        of_a = symbol(g, ltorch.zeros_like(src), *args, **kwargs) if a.requires_grad else None
        return of_a, getitem(g, key(a, *args, **kwargs)) if src.requires_grad else None

    symbol.vjp(rule)


_scatter_rule(slice_scatter, lambda a, dim=0, start=None, end=None, step=1: along(a, dim, slice(start, end, step)))
_scatter_rule(select_scatter, lambda a, dim, index: along(a, dim, index))


effects.checks_data.add(prims.index, prims.copy_with_setitem, setitem)
effects.synchronises.add(getitem, setitem, prims.index, when=by_mask)
kernels.layout.set("as decomposition", getitem)
cost.rules.set(Cost(selects=True), prims.index)


@batching.rule(getitem)
def _getitem_of_batch(batch: batching.Batch, operation: BoundSymbol):
    """Indexing under vmap: where each element has its own tensor, its number is an index as well."""
    a, key = operation.args
    keys = key if isinstance(key, tuple) else (key,)
    if keys and all(type(k) is TensorProxy and is_integer(k.dtype) and k.dtype.signed for k in keys):
        rank = max(len(k.shape) for k in keys)
        at = tuple(batching.aligned(batch, k, rank) for k in keys)
        if a in batch.moved:  # each element reads its own
            own = ltorch.arange(batch.size, device=a.device)
            at = (ltorch.reshape(own, (batch.size, *(1,) * rank)), *at)
        return operation.sym(batch.at(a), at)
    if any(type(k) not in (int, slice, type(None), type(...)) for k in keys):
        return None
    return operation.sym(batch.at(a), (slice(None), *keys))


batching.unknown_to_vmap.add(
    setitem,
    when=lambda b: any(x.dtype is bool8 for x in proxies_in(b.args[1], []) if isinstance(x, TensorProxy)),
)


@splitting.rule(getitem)
def _indexed_of_part(split: splitting.Split, operation: BoundSymbol) -> splitting.Part | None:
    """Slices, numbers and new dimensions, which take all of the parts' dimension."""
    part, key = (
        split.part(operation.inputs[0]),
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
    dim = position = 0
    for k in (*key[:at], *[slice(None)] * missing, *key[at + 1 :]):
        if dim == part.dim and k is not None:
            return (
                split.computed(operation, {operation.inputs[0]: part.value}, part.axis, position)
                if k == slice(None)
                else None
            )
        dim, position = dim + (k is not None), position + (type(k) is not int)
    return None
