"""Types, devices and layout: conversions and copies of one tensor."""

from __future__ import annotations

import torch

from thunder.analysis import aliases
from thunder.core.devices import to_device
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, primitive
from thunder.ops import prims
from thunder.ops.backward import gradient_of_first
from thunder.ops.registry import alias, composite, prim, torch_prim
from thunder.ops.rules import batching, kernels, splitting
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


@prim(lambda a, dtype: a.to(to_torch_dtype(dtype)))
def convert_element_type(a, dtype):
    return like(a, dtype=dtype)


@prim(lambda a, device: a.to(to_torch_device(device)))
def device_put(a, device):
    return like(a, device=device)


@prim(lambda a, order: a.contiguous(), tags=(OpTags.SHAPE_OP,))
def stride_order(a, order):
    return like(a)


@prim(torch.clone)
def clone_prim(a):
    return like(a)


@prim(torch.detach, tags=(OpTags.VIEW,))
def detach_prim(a):
    return like(a)


def convert(a, dtype):
    """`a` in another element type; `a` itself where it has it already."""
    return a if a.dtype is dtype else convert_element_type(a, dtype)


def _to_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Tensor.to's many spellings as one: to(a, device=, dtype=, copy=, memory_format=), with what is not said left
    out."""
    a, *rest = args
    wanted = {k: v for k, v in kwargs.items() if k != "non_blocking" and v is not None and v is not False}
    for x in rest:
        if isinstance(x, TensorProxy):
            wanted |= {"device": x.device, "dtype": x.dtype}
        elif isinstance(x, bool):
            if x and len(rest) > 2 and x is rest[-1]:
                wanted["copy"] = True
        elif x is not None:
            wanted[
                "dtype"
                if isinstance(x, torch.dtype) or type(x).__name__ == "dtype" or isinstance(x, type)
                else "device"
            ] = x
    if "other" in wanted:
        other = wanted.pop("other")
        wanted |= {"device": other.device, "dtype": other.dtype}
    if wanted.get("memory_format") is torch.preserve_format:
        del wanted["memory_format"]
    if "device" in wanted:
        wanted["device"] = to_device(wanted["device"])
    if "dtype" in wanted:
        wanted["dtype"] = to_dtype(wanted["dtype"])
    return (a,), wanted


def _to_meta(a, *, device=None, dtype=None, copy=False, memory_format=None):
    if not copy and memory_format is None and device in (None, a.device) and dtype in (None, a.dtype):
        return a
    return like(a, dtype=dtype, device=device)


@composite(torch.Tensor.to, meta=_to_meta, canonicalize=_to_arguments)
def to(a, *, device=None, dtype=None, copy=False, memory_format=None):
    out = a
    if dtype not in (None, a.dtype):
        out = convert_element_type(out, dtype)
    if device not in (None, a.device):
        out = device_put(out, device)
    if memory_format is not None:
        out = stride_order(out, None)
    return clone_prim(out) if copy and out is a else out


_CONVERSIONS = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "long": "int64", "int": "int32",
    "short": "int16",
    "char": "int8", "byte": "uint8", "bool": "bool8", "chalf": "complex32", "cfloat": "complex64",
    "cdouble": "complex128",
}  # fmt: skip


def _conversion(name: str, target) -> None:
    """`x.float()`, `x.half()` ...: Tensor.to under another name."""

    def method(a, memory_format=None):
        return to(a, dtype=target, memory_format=memory_format)

    method.__name__ = name
    alias(getattr(torch.Tensor, name))(method)


for _name, _target in _CONVERSIONS.items():
    _conversion(_name, to_dtype(_target))


@alias(torch.Tensor.type_as)
def type_as(a, other):
    return to(a, dtype=other.dtype, device=other.device)


@alias(torch.Tensor.cpu)
def cpu(a, memory_format=None):
    return to(a, device="cpu", memory_format=memory_format)


@alias(torch.Tensor.cuda)
def cuda(a, device=None, non_blocking=False, memory_format=None):
    return to(a, device="cuda" if device is None else device, memory_format=memory_format)


def _contiguous_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args[:1], {
        "memory_format": kwargs.get("memory_format", args[1] if len(args) > 1 else torch.contiguous_format)
    }


@composite(
    torch.Tensor.contiguous,
    meta=lambda a, *, memory_format: like(a),
    canonicalize=_contiguous_arguments,
    tags=(OpTags.VIEW,),
)
def contiguous(a, *, memory_format=torch.contiguous_format):
    return stride_order(a, tuple(reversed(range(len(a.shape)))))


@torch_prim(torch.Tensor.pin_memory)
def pin_memory(a, device=None):
    """A copy in memory that devices read without waiting; PyTorch says where that cannot be."""
    return like(a)


@composite(torch.clone, torch.Tensor.clone, meta=lambda a, *, memory_format=torch.preserve_format: like(a))
def clone(a, *, memory_format=torch.preserve_format):
    return clone_prim(a)


@composite(torch.detach, torch.Tensor.detach, meta=lambda a: like(a), tags=(OpTags.VIEW, OpTags.DETACHED))
def detach(a):
    return detach_prim(a)


@composite(
    torch.Tensor.data.__get__,
    name="data",
    properties=("data",),
    meta=lambda a: like(a),
    tags=(OpTags.VIEW, OpTags.DETACHED),
    fn=lambda a: a.data,
)  # pyright: ignore[reportAttributeAccessIssue]
def data(a):
    """`a.data`: the same memory, of which autograd knows nothing; writes to it are not counted as writes to `a`."""
    return detach_prim(a)


# a gradient in the half precision of a value that the program has cast to float32. A kernel that goes on with it does
# not round it: no program asks for that
@primitive(lambda g, dtype: like(g, dtype=dtype))
def half_gradient(g, dtype):
    return g.to(to_torch_dtype(dtype))


half_gradient.decomposed_by(convert_element_type)


def _cast_back(g, y, a, *, device=None, dtype=None, copy=False, memory_format=None):
    if a.dtype.name in ("bfloat16", "float16") and g.dtype.name == "float32" and g.device is a.device:
        return half_gradient(g, a.dtype)
    return to(g, dtype=a.dtype, device=a.device)


gradient_of_first(to, _cast_back)
gradient_of_first(convert_element_type, lambda g, y, a, dtype: _cast_back(g, y, a))
gradient_of_first(half_gradient, lambda g, y, a, dtype: to(g, dtype=a.dtype))


gradient_of_first(contiguous, lambda g, y, a, *, memory_format=torch.contiguous_format: g)


gradient_of_first(clone, lambda g, y, a, *, memory_format=torch.preserve_format: g)


gradient_of_first(pin_memory, lambda g, y, a, device=None: g)


kernels.no_loop_of_inductor.add(prims.device_put)
aliases.may_copy.add(contiguous)
kernels.layout.set("by argument", clone, contiguous)


batching.rule.set(batching.elementwise, clone, detach, contiguous)
batching.rule.set(batching.same, to)
splitting.rule.set(splitting.elementwise, to, clone, convert_element_type, contiguous)
