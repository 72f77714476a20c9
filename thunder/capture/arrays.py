"""NumPy's arrays in programs: writes to them, and the memory that they share with tensors."""

from __future__ import annotations

import operator

import numpy
import torch

from thunder.capture.interface import Capture
from thunder.capture.world import Source
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import TensorProxy
from thunder.interpreter.attributes import plain_attribute
from thunder.interpreter.tables import ARITHMETIC


def any_size(c: Capture, name: str, value) -> list[int]:
    """The dimensions of a tensor that a host call gives which had another size before: their sizes are read from the
    result. name: of the function."""
    where = c.user_location()
    places = {f"{name}() at {where and where[:2]}, dimension {i}": n for i, n in enumerate(value.shape)}
    c.path.sizes |= places
    before = [c.request.changing.get(source) for source in places]
    return [i for i, (n, values) in enumerate(zip(value.shape, before, strict=True)) if values and n not in values]


def values_of(tensor: torch.Tensor) -> numpy.ndarray:
    """A tensor's values. Nobody writes to them: the tensor's memory is not theirs."""
    array = tensor.detach().clone().numpy()
    array.flags.writeable = False
    return array


def array_that_leaves(c: Capture, value) -> TensorProxy | None:
    """The tensor whose `.numpy()` a value is that leaves the program: made of the tensor once more, the two share
    memory."""
    if value in c.path.values_of:
        return c.path.values_of[value]
    if type(value) is HostProxy and value.kind is numpy.ndarray and not value.example.flags.writeable:
        c.refuse("the program returns a view of a tensor's NumPy array", "return a copy of it, or the tensor")
    return None


def _written(c: Capture, function, args, kwargs: dict, reads: bool) -> list[numpy.ndarray]:
    """The arrays that a host call may write to. Raises CaptureError where the program has a tensor of one: operations
    on tensors have no order among host calls."""
    reads = reads or plain_attribute(function, "__module__") == "builtins"
    if reads and "out" not in kwargs and not _writes(function):
        return []
    values = [v.example for v in (*args, *kwargs.values()) if type(v) is HostProxy]
    arrays = [v for v in values if isinstance(v, numpy.ndarray)]
    for array in arrays:
        refuse_array(c, array)
    if any(numpy.may_share_memory(array, other) for array in arrays for other in c.path.arrays):
        c.refuse(
            "the program writes to a NumPy array that shares memory with a tensor",
            "create the tensor from a copy of the array",
        )
    return arrays


def effect_of_writes(c: Capture, function, args, kwargs: dict, reads: bool) -> str:
    """The effect of a host call that others see: that it writes to an array from outside, or to a view of one. reads:
    it changes no container that it is given."""
    written = _written(c, function, args, kwargs, reads)
    outside = [
        source
        for source, value in c.outside.host_values.items()
        if isinstance(value.example, numpy.ndarray)
        and any(numpy.may_share_memory(array, value.example) for array in written)
    ]
    c.effects.note(dict.fromkeys(outside))
    return "outside" * bool(outside)


def _writes(function) -> bool:
    return id(function) in _WRITING or plain_attribute(function, "__name__", "") in _WRITING_NAMES


_WRITING = {id(operator.setitem), *(id(f) for symbol, f in ARITHMETIC.items() if symbol.endswith("="))}
# of NumPy's functions and methods
_WRITING_NAMES = {
    "fill", "sort", "partition", "put", "itemset", "resize", "setfield", "byteswap", "copyto", "place", "putmask",
    "put_along_axis", "fill_diagonal", "shuffle", "at", "__setitem__",
}  # fmt: skip


def refuse_array(c: Capture, o) -> None:
    """Refuse a write to an array whose content was asked for, or to a view of one: the program is captured again, with
    a value of the host in its place."""
    for array, _, source in c.outside.arrays.values() if isinstance(o, numpy.ndarray) else ():
        if o is array or numpy.may_share_memory(o, array):
            _refuse_write(c, source)


def refuse_given(c: Capture, array) -> None:
    """Host code may change an array that capture has made once for all calls."""
    refuse_array(c, array)
    c.refuse("code that runs on the host is given a NumPy array, which it may change or keep", "make it inside")


def check_arrays(c: Capture) -> None:
    """Refuse writes of native code to such arrays, and undo them."""
    for array, copy, source in c.outside.arrays.values():
        if not (array.shape == copy.shape and array.dtype == copy.dtype and _same_bytes(array, copy)):
            if array.shape == copy.shape:
                numpy.copyto(array, copy)
            _refuse_write(c, source)


def _same_bytes(a, b) -> bool:
    return (
        all(map(operator.is_, a.flat, b.flat))
        if a.dtype.hasobject
        else numpy.ndarray.tobytes(a) == numpy.ndarray.tobytes(b)
    )


def _refuse_write(c: Capture, source: Source):
    c.outside.written_arrays.add(c.world.describe(source))
    c.refuse(
        "the program writes to a NumPy array from outside",
        "pass a tensor (torch.from_numpy shares the memory), or write to a copy of the array",
    )
