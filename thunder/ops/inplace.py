"""In-place operations: the functional operation is recorded, and from then on what was written to stands for its result (`thunder.ops.memory`)."""

from __future__ import annotations

import torch

from thunder.core.proxies import METHODS, TensorProxy
from thunder.core.symbol import OpTags, Recorder, Symbol, current_recorder, user_location
from thunder.errors import CaptureError
from thunder.ops.define import LTORCH, alias, register_inplace
from thunder.ops.memory import Memory

__all__ = ["write", "overwrite", "write_back", "setitem", "overwriting", "refuse_unknown"]

_REMEDY = "use the out-of-place form (x = x.add(y) for x.add_(y), torch.where or torch.scatter for an indexed assignment) or mutate a clone"


def write(symbol: Symbol, args: tuple, kwargs: dict) -> TensorProxy:
    """`args[0]`, overwritten with what `symbol` computes from the arguments. Returns the proxy that was written to, as PyTorch returns the tensor."""
    target = args[0]
    if OpTags.SHAPE_OP in symbol.tags:
        _refuse(f"{symbol.name}_ changes the shape of a tensor in place")
    return overwrite(target, symbol(*args, **kwargs), symbol.name)


def overwrite(target: TensorProxy, value: TensorProxy, name: str) -> TensorProxy:
    """Makes `target`, and everything that shares memory with it, hold `value`, in target's own dtype.

    Raises RuntimeError where the shapes or types do not fit, as PyTorch does, CaptureError where what is written to can not be known.
    """
    recorder = current_recorder()
    assert recorder is not None, "in-place operations are recorded"
    memory = recorder.memory
    if memory is None:
        memory = recorder.memory = Memory(recorder.bound_symbols, _own(recorder))
    current = memory.latest(target)
    if value.shape != current.shape:
        raise RuntimeError(f"output with shape {list(current.shape)} doesn't match the broadcast shape {list(value.shape)}")
    if value.dtype is not current.dtype:
        if value.dtype.category > current.dtype.category:
            raise RuntimeError(f"result type {_spoken(value)} can't be cast to the desired output type {_spoken(current)}")
        value = LTORCH["to"](value, dtype=current.dtype)
    if value is not current:
        memory.write(target, value)
    return target


def _own(recorder: Recorder):
    """Where nothing is written back, only what the lines of the recorder made may be written to."""

    def check(base: TensorProxy, is_view: bool) -> None:
        if not any(o is base for line in recorder.bound_symbols for o in line.outputs):
            _refuse("an in-place operation writes to a tensor that was passed in")

    return check


write_back = Symbol("copy_", lambda target, value: None, module="ltorch", id="write_back", is_prim=True, tags=(OpTags.DONT_DCE, OpTags.IN_PLACE), fn=torch.Tensor.copy_)


def _spoken(t: TensorProxy) -> str:
    return {"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long", "int32": "Int", "bool8": "Bool"}.get(t.dtype.name, t.dtype.name)


def _refuse(reason: str):
    raise CaptureError(reason, location=user_location(), remedy=_REMEDY)


def overwriting(symbol: Symbol) -> None:
    """`symbol(a, ..., inplace=True)` overwrites `a`: the call is recorded without the flag, and `a` stands for the result from then on."""
    position = list(symbol.parameters).index("inplace")

    def call(*args, **kwargs):
        wanted = kwargs.pop("inplace", False) if "inplace" in kwargs else len(args) > position and args[position]
        args = args[:position] + args[position + 1 :]
        return write(symbol, args, kwargs) if wanted else symbol(*args, **kwargs)

    call.__name__ = symbol.name
    alias(*symbol.torch_functions)(call)
    register_inplace(symbol, symbol.name)


def refuse_out(function, out) -> None:
    """`torch.add(a, b, out=c)` writes to c. Raises CaptureError unless `out` is None."""
    if out is not None:
        _refuse(f"{getattr(function, '__name__', 'an operation')}(out=...) writes to its argument")


def refuse_unknown(function, kwargs: dict) -> None:
    """A torch function without a definition that writes to its arguments cannot be an opaque operation."""
    name = getattr(function, "__name__", "")
    refuse_out(function, kwargs.get("out"))
    if name.endswith("_") and not name.endswith("__"):
        reason = f"{name} writes to its argument"
    elif name in ("__setitem__", "__set__"):
        reason = "an attribute or item of a tensor is assigned"
    else:
        return
    _refuse(reason)


def _operator(name: str):
    def method(a, b):
        return write(LTORCH[name], (a, b), {})

    return method


for _dunder, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "pow": "pow", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}.items():  # fmt: skip
    METHODS[f"__i{_dunder}__"] = _operator(_name)


def setitem(a: TensorProxy, key, value) -> None:
    """`a[key] = value`."""
    overwrite(a, LTORCH["setitem"](a, key, value), "setitem")


METHODS["__setitem__"] = setitem


@alias(torch.Tensor.copy_)
def copy_(a: TensorProxy, src: TensorProxy, non_blocking: bool = False) -> TensorProxy:
    """`a.copy_(src)`: src in a's shape, type and place."""
    value = LTORCH["to"](src, dtype=a.dtype, device=a.device)
    value = LTORCH["clone"](value if value.shape == a.shape else LTORCH["expand"](value, a.shape))
    return overwrite(a, value, "copy")


@alias(torch.Tensor.zero_, torch.zero_)
def zero_(a: TensorProxy) -> TensorProxy:
    return overwrite(a, LTORCH["zeros_like"](a), "zero")


@alias(torch.Tensor.fill_, torch.fill_)
def fill_(a: TensorProxy, value) -> TensorProxy:
    if type(value) is TensorProxy:
        return copy_(a, value)
    return overwrite(a, LTORCH["full_like"](a, value), "fill")
