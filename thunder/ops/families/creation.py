"""Tensors made from nothing: factories, ranges, constants of Python data, triangles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core import dtypes
from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import METHODS, NumberProxy, Proxy, TensorProxy, concrete, like, map_structure
from thunder.core.symbol import OpTags, Symbol, current_recorder, user_location
from thunder.core.unbacked import as_size, fresh_size
from thunder.errors import CaptureError, DataDependentError
from thunder.ops import ltorch, opaque
from thunder.ops.backward import gradient_of_first, sum_to
from thunder.ops.families.data import convert
from thunder.ops.families.ternary import where
from thunder.ops.promotion import broadcast_shapes, default_dtype, is_number, number_dtype, same_device
from thunder.ops.registry import alias, composite, prim, torch_prim
from thunder.ops.rules import batching, derivatives, effects, splitting
from thunder.ops.shape_rules import require
from thunder.ops.signature import named
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


def default_device(device):
    """The device asked for, or the program's default one."""
    if device is not None:
        return to_device(device)
    recorder = current_recorder()
    chosen = recorder.context.default_device if recorder is not None else None
    return to_device(chosen or "cpu")


def _result(shape, device, dtype) -> TensorProxy:
    return TensorProxy(shape=tuple(shape), device=device, dtype=dtype)


def _torch_kwargs(device, dtype) -> dict:
    return {"device": to_torch_device(device), "dtype": to_torch_dtype(dtype)}


@prim(
    lambda shape, value, *, device, dtype: torch.full(tuple(shape), value, **_torch_kwargs(device, dtype)), name="full"
)
def full_prim(shape, value, *, device, dtype):
    return _result(shape, device, dtype)


def _shape_of(args: tuple) -> tuple:
    """`zeros(2, 3)` and `zeros((2, 3))` alike."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    shape = [
        METHODS["item"](n) if isinstance(n, TensorProxy) and not n.shape and n.dtype.category == 1 else n for n in shape
    ]
    for n in shape:
        if not isinstance(n, (int, NumberProxy)):
            raise TypeError(f"sizes must be ints, not {type(n).__name__}")
        as_size(n, "Trying to create tensor with negative dimension")
    return tuple(shape)


def _options(kwargs: dict, dtype, device=None) -> dict:
    """dtype and device filled in; what says nothing left out."""
    options = {
        k: v
        for k, v in kwargs.items()
        if v is not None and not (k in ("pin_memory", "requires_grad") and v is False) and k != "layout"
    }
    options.pop("memory_format", None)
    options["device"] = (
        default_device(options.get("device")) if options.get("device") is not None or device is None else device
    )
    options["dtype"] = to_dtype(options["dtype"]) if "dtype" in options else dtype
    return {"device": options.pop("device"), "dtype": options.pop("dtype"), **options}


def _full_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of `full`, with the dtype of its value. Raises PyTorch's error for a value that is no number."""
    arguments, kwargs = named(args, kwargs, "size", "fill_value")
    shape, value = arguments["size"], arguments["fill_value"]
    if type(value) is TensorProxy:  # its value counts, as a number's
        kind = number_dtype((False, 0, 0.0, 0j)[value.dtype.category])
    else:
        if not isinstance(value, Proxy) and not is_number(value):
            with compat.DisableTorchFunction():
                torch.full((), value)  # raises where it is no number, in PyTorch's words
        kind = number_dtype(value)
    return (_shape_of((shape,)), value), _options(kwargs, kind)


def _full_meta(shape, fill_value, *, device, dtype):
    return _result(shape, device, dtype)


@composite(torch.full, meta=_full_meta, canonicalize=_full_arguments)
def full(shape, fill_value, *, device, dtype):
    return full_prim(shape, fill_value, device=device, dtype=dtype)


def _factory_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    kwargs = dict(kwargs)
    size = kwargs.pop("size", None)
    kwargs.pop("names", None)
    return (_shape_of(args if size is None else (size,)),), _options(kwargs, default_dtype())


def _factory(name: str, value) -> Symbol:
    def decomposition(shape, *, device, dtype):
        return full_prim(shape, value, device=device, dtype=dtype)

    return composite(
        getattr(torch, name),
        name=name,
        meta=lambda shape, *, device, dtype: _result(shape, device, dtype),
        canonicalize=_factory_arguments,
    )(decomposition)


zeros, ones, empty = _factory("zeros", 0), _factory("ones", 1), _factory("empty", 0)


def _like_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    a, *rest = args
    kwargs = {k: v for k, v in kwargs.items() if v is not torch.preserve_format}
    if "fill_value" in kwargs:
        rest = [kwargs.pop("fill_value")]
    return (a, *rest), _options(kwargs, a.dtype, a.device)


def _like_factory(name: str, value) -> Symbol:
    def meta(a, *, device, dtype):
        return like(a, device=device, dtype=dtype)

    def decomposition(a, *, device, dtype):
        return full_prim(a.shape, value, device=device, dtype=dtype)

    return composite(getattr(torch, name), name=name, meta=meta, canonicalize=_like_arguments, tags=(OpTags.DETACHED,))(
        decomposition
    )


zeros_like, ones_like, empty_like = (
    _like_factory("zeros_like", 0),
    _like_factory("ones_like", 1),
    _like_factory("empty_like", 0),
)


@composite(
    torch.full_like,
    meta=lambda a, fill_value, *, device, dtype: like(a, device=device, dtype=dtype),
    canonicalize=_like_arguments,
    tags=(OpTags.DETACHED,),
)
def full_like(a, fill_value, *, device, dtype):
    return full_prim(a.shape, fill_value, device=device, dtype=dtype)


def _in_format(function: Callable, symbol: Symbol) -> None:
    """The layout that a call asks for, beside what it makes."""

    def call(*args, memory_format=torch.preserve_format, **kwargs):
        result = symbol(*args, **kwargs)
        return (
            result
            if memory_format in (torch.preserve_format, None)
            else ltorch.clone(result, memory_format=memory_format)
        )

    alias(function, over=symbol)(call)


for _symbol in (zeros_like, ones_like, empty_like, full_like, empty):
    _in_format(_symbol.torch_functions[0], _symbol)


def _new(name: str, symbol: Symbol) -> None:
    """`x.new_zeros(...)`: the factory, with x's dtype and device by default."""

    def method(a, *size, dtype=None, device=None, **kwargs):
        if "fill_value" in kwargs:
            size = (*size, kwargs.pop("fill_value"))
        if "size" in kwargs:
            size = (kwargs.pop("size"), *size)
        return symbol(
            *size, dtype=a.dtype if dtype is None else dtype, device=a.device if device is None else device, **kwargs
        )

    method.__name__ = name
    alias(getattr(torch.Tensor, name))(method)


for _name, _symbol in {"new_zeros": zeros, "new_ones": ones, "new_empty": empty, "new_full": full}.items():
    _new(_name, _symbol)


@alias(torch.Tensor.new)
def new(a, *data, device=None):
    """`a.new(...)`: without values where sizes are given, else made of Python data, or another tensor."""
    first, kind = data[0] if data else 0, {"dtype": a.dtype, "device": a.device if device is None else device}
    if isinstance(first, TensorProxy):
        return opaque.symbol_for(torch.Tensor.new)(a, first)
    if isinstance(first, (int, NumberProxy)) or isinstance(first, tuple) and type(first) is not tuple:  # torch.Size
        return empty(*(data or (0,)), **kind)
    return ltorch.tensor(first, **kind)


# --- ranges


def _count(start, end, step):
    """How many elements a range has; of symbolic ends as well."""
    if (
        isinstance(step, (int, NumberProxy))
        and not isinstance(step, bool)
        and all(isinstance(x, (int,)) or getattr(x, "python_type", None) is int for x in (start, end, step))
    ):
        upwards = step > 0
        return (end - start + step - 1) // step if upwards else (start - end - step - 1) // (0 - step)
    return math.ceil((end - start) / step)


def _arange_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of `arange` as start, end and step, with the dtype that follows. Raises PyTorch's errors."""
    alone = len(args) == 1 and "end" not in kwargs
    arguments, kwargs = named(args, kwargs, *(("end", "start", "step") if alone else ("start", "end", "step")))
    start, end, step = arguments.get("start", 0), arguments["end"], arguments.get("step", 1)
    inexact = any((x.python_type if isinstance(x, NumberProxy) else type(x)) is float for x in (start, end, step))
    if any(isinstance(x, NumberProxy) and x.unbacked for x in (start, end, step)):  # refused when it runs
        return (start, end, step), _options(kwargs, default_dtype() if inexact else dtypes.int64)
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if start > end if step > 0 else start < end:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    return (start, end, step), _options(kwargs, default_dtype() if inexact else dtypes.int64)


def _arange_meta(start, end, step, *, device, dtype):
    if dtype is dtypes.int64:  # PyTorch counts with its integer parts
        start, end, step = (int(x) if type(x) is float else x for x in (start, end, step))
    return _result((_count(start, end, step),), device, dtype)


@prim(
    lambda length, *, start, step, device, dtype: (
        torch.arange(length, device=to_torch_device(device)) * step + start
    ).to(to_torch_dtype(dtype))
)
def iota(length, *, start, step, device, dtype):
    """start, start + step, start + 2 * step ...: `length` of them."""
    return _result((length,), device, dtype)


@composite(torch.arange, meta=_arange_meta, canonicalize=_arange_arguments)
def arange(start, end, step, *, device, dtype):
    return iota(_count(start, end, step), start=start, step=step, device=device, dtype=dtype)


@alias(torch.arange, over=arange)
def _arange(*args, **kwargs):
    """The start may be left out, also where the end is given by its name alone."""
    return arange(
        *((0,) if not args and "end" in kwargs and "start" not in kwargs and "step" not in kwargs else args), **kwargs
    )


def _linspace_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    arguments, kwargs = named(args, kwargs, "start", "end", "steps", "base")
    return tuple(arguments.values()), _options(kwargs, default_dtype())


def _spaced(start, end, steps, device, dtype) -> TensorProxy:
    require(type(steps) is int or isinstance(steps, NumberProxy))
    require(steps >= 0)
    ranks = [len(x.shape) if type(x) is TensorProxy else 0 for x in (start, end)]
    require(not any(ranks))
    return _result((steps,), device, dtype)


@torch_prim(torch.linspace, canonicalize=_linspace_arguments, tags=(OpTags.DETACHED,))
def linspace(start, end, steps, *, device, dtype):
    return _spaced(start, end, steps, device, dtype)


@torch_prim(torch.logspace, canonicalize=_linspace_arguments, tags=(OpTags.DETACHED,))
def logspace(start, end, steps, base=10.0, *, device, dtype):
    return _spaced(start, end, steps, device, dtype)


def _eye_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    arguments, kwargs = named(args, kwargs, "n", "m")
    n, m = arguments["n"], arguments.get("m")
    return (n, n if m is None else m), _options(kwargs, default_dtype())


@torch_prim(torch.eye, canonicalize=_eye_arguments)
def eye(n, m, *, device, dtype):
    require(n >= 0 and m >= 0)
    return _result((n, m), device, dtype)


# --- Python data


def _leaf_types(data, types_in: list) -> list:
    if isinstance(data, (list, tuple)):
        for x in data:
            _leaf_types(x, types_in)
    else:
        types_in.append(data)
    return types_in


def _data_shape(data) -> tuple:
    return (len(data), *(_data_shape(data[0]) if data else ())) if isinstance(data, (list, tuple)) else ()


def _tensor_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    data = args[0] if args else kwargs.pop("data")
    leaves = _leaf_types(data, [])
    kind = default_dtype()
    if leaves and all(is_number(x) for x in leaves):
        ranked = [number_dtype(x) for x in leaves]
        kind = max(ranked, key=lambda d: d.category)
    return (data,), _options({k: v for k, v in kwargs.items() if k != "copy"}, kind)


@torch_prim(torch.tensor, canonicalize=_tensor_arguments, fn=torch.tensor)
def tensor(data, *, device, dtype, requires_grad=False):
    return _result(_data_shape(data), device, dtype)


_tensor_symbol = tensor


@alias(torch.tensor, over=tensor)
def tensor_of(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    """torch.tensor of Python data, or of a tensor (a copy)."""
    if type(data) is TensorProxy:
        return ltorch.to(ltorch.clone(ltorch.detach(data)), dtype=dtype, device=device)
    leaves = _leaf_types(data, [])
    if any(isinstance(x, TensorProxy) for x in leaves):
        return _of_tensors(data, leaves, None if dtype is None else to_dtype(dtype), device)
    if not all(type(x) in _NUMBERS or isinstance(x, NumberProxy) for x in leaves):
        with compat.DisableTorchFunction():
            on_cpu = torch.tensor(map_structure(concrete, data), device="cpu")
            values = on_cpu.tolist()
        dtype = on_cpu.dtype if dtype is None else dtype  # numpy's numbers have their own
        if not on_cpu.numel():
            return ltorch.zeros(*on_cpu.shape, dtype=dtype, device=device)
        data = values
    return _tensor_symbol(data, dtype=dtype, device=device)


_NUMBERS = (bool, int, float, complex)


def _of_tensors(data, leaves: list, dtype: dtypes.dtype | None, device):
    """torch.tensor of lists of numbers and of tensors with one element, each of which is detached. Raises ValueError
    for a tensor with more elements, and TypeError where a number would lose its fraction."""
    if any(isinstance(x, TensorProxy) and math.prod(x.shape) != 1 for x in leaves):
        raise ValueError("only one element tensors can be converted to Python scalars")
    kinds = [x.dtype if isinstance(x, TensorProxy) else number_dtype(x) for x in leaves]
    kind = functools.reduce(dtypes.promote, kinds) if dtype is None else dtype
    of_tensors = [x.dtype for x in leaves if isinstance(x, TensorProxy)]
    if any(k.category > kind.category for k in of_tensors):
        raise TypeError("only integer tensors of a single element can be converted to an index")
    if any(k.category == kind.category == dtypes.INTEGER and dtypes.promote(k, kind) is not kind for k in of_tensors):
        raise CaptureError(
            "torch.tensor is given tensors of integers and a type of fewer bits, which may not hold them",
            location=user_location(),
            remedy="convert the tensors with `.to`",
        )
    options = _options({"device": device}, kind)

    def filled(x):
        if isinstance(x, (list, tuple)):
            return ltorch.stack([filled(part) for part in x])
        if isinstance(x, TensorProxy):
            return ltorch.to(ltorch.reshape(ltorch.detach(x), ()), **options)
        return _tensor_symbol(x, **options)

    return filled(data)


@alias(torch.as_tensor, torch.asarray)
def as_tensor(data, dtype=None, device=None, **kwargs):
    if type(data) is TensorProxy:
        return ltorch.to(data, dtype=dtype, device=device)
    return tensor_of(data, dtype=dtype, device=device)


@alias(torch.scalar_tensor)
def scalar_tensor(s, *, dtype=None, device=None, **kwargs):
    return _tensor_symbol(s, dtype=dtype or default_dtype(), device=device)


@alias(torch.Tensor.new_tensor)
def new_tensor(a, data, *, dtype=None, device=None, requires_grad=False):
    return tensor_of(data, dtype=dtype or a.dtype, device=device or a.device)


# --- triangles


def _triangle(name: str, keeps_lower: bool) -> Symbol:
    """Defines `tril` or `triu`: elements on the other side of a diagonal are 0."""

    def meta(a, diagonal=0):
        require(len(a.shape) >= 2)
        return like(a)

    def decomposition(a, diagonal=0):
        rows, columns = a.shape[-2:]
        options = {"device": a.device, "dtype": dtypes.int64}
        row = ltorch.unsqueeze(iota(rows, start=0, step=1, **options), 1)
        column = iota(columns, start=0, step=1, **options)
        keep = ltorch.le(column, row + diagonal) if keeps_lower else ltorch.ge(column, row + diagonal)
        return convert(where(keep, a, False if a.dtype is dtypes.bool8 else 0), a.dtype)

    symbol = composite(getattr(torch, name), getattr(torch.Tensor, name), name=name, meta=meta)(decomposition)

    gradient_of_first(symbol, lambda g, y, a, diagonal=0: symbol(g, diagonal))

    return symbol


tril, triu = _triangle("tril", True), _triangle("triu", False)


def _indices_count(row: int, col: int, offset: int) -> int:
    """The elements on and below a diagonal: rows from the first one that has any grow by one up to the last one that
    is not full."""
    first = min(max(-offset, 0), row)
    last = max(min(max(col - offset, 0), row), first)
    return (first + last + 2 * offset + 1) * (last - first) // 2 + (row - last) * col


def _indices_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    arguments, kwargs = named(args, kwargs, "row", "col", "offset")
    return (arguments["row"], arguments["col"], arguments.get("offset", 0)), _options(kwargs, dtypes.int64)


@torch_prim(torch.tril_indices, canonicalize=_indices_arguments)
def tril_indices(row, col, offset, *, device, dtype):
    return _result((2, _indices_count(row, col, offset)), device, dtype)


@torch_prim(torch.triu_indices, canonicalize=_indices_arguments)
def triu_indices(row, col, offset, *, device, dtype):
    return _result((2, row * col - _indices_count(row, col, offset - 1)), device, dtype)


def _one_hot_meta(a, num_classes=-1):
    if type(num_classes) is int and num_classes == -1:  # one more than the largest value
        return like(a, (*a.shape, fresh_size()), dtypes.int64)
    return like(a, (*a.shape, num_classes), dtypes.int64)


@composite(torch.nn.functional.one_hot, meta=_one_hot_meta)
def one_hot(a, num_classes=-1):
    if type(num_classes) is int and num_classes == -1:
        raise DataDependentError(
            "the largest value of one_hot's argument", location=user_location(), remedy="pass num_classes"
        )
    classes = iota(num_classes, start=0, step=1, device=a.device, dtype=dtypes.int64)
    return convert(ltorch.eq(ltorch.unsqueeze(a, -1), classes), dtypes.int64)


@composite(torch.linalg.vander, name="linalg_vander")
def vander(x, *, N=None):
    """Powers of numbers, from 0 up, as rows: (..., n) to (..., n, N)."""
    N = (x.shape[-1] if x.shape else 1) if N is None else N
    require(x.dtype.category >= 1 and N > 1)
    shape = (*(x.shape or (1,)), N)
    powers = ltorch.cumprod(ltorch.expand(ltorch.unsqueeze(x, -1), (*shape[:-1], shape[-1] - 1)), -1)
    return ltorch.cat([ltorch.ones((*shape[:-1], 1), dtype=powers.dtype, device=x.device), powers], -1)


derivatives.composed.set(True, vander)  # PyTorch composes it of the same operations


def _complex_meta(real, imag):
    require(real.dtype is imag.dtype and real.dtype in (dtypes.float16, dtypes.float32, dtypes.float64))
    return like(real, broadcast_shapes(real.shape, imag.shape), dtypes.complex_of(real.dtype), same_device(real, imag))


@torch_prim(torch.complex)
def complex(real, imag):
    return _complex_meta(real, imag)


@complex.vjp
def _(real, imag):
    g = yield complex(real, imag)
    return sum_to(ltorch.real(g), real.shape), sum_to(ltorch.imag(g), imag.shape)


@torch_prim(torch.polar, autocast="cpu:float32")
def polar(abs, angle):
    return _complex_meta(abs, angle)


def _counts_classes(operation) -> bool:
    """Whether one_hot looks for the largest class."""
    a, *rest = operation.args
    return operation.kwargs.get("num_classes", rest[0] if rest else -1) == -1


effects.synchronises.add(ltorch.tensor)
effects.checks_data.add(ltorch.one_hot)
effects.synchronises.add(ltorch.one_hot, when=_counts_classes)


batching.rule.set(batching.same, ltorch.zeros_like, ltorch.ones_like, ltorch.full_like)
splitting.rule.set(splitting.elementwise, zeros_like, ones_like, empty_like, full_like)  # which read no data
