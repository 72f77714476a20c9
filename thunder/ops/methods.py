"""What proxies do with what is no operation of its own: torch functions met in native code, attributes of torch.Tensor,
conversions to Python values."""

from __future__ import annotations

import functools
import math

import torch

from thunder import compat
from thunder.core.proxies import METHODS, TensorProxy
from thunder.core.symbol import Symbol, positional_parameters, spelled, user_location
from thunder.errors import CaptureError
from thunder.ops import ltorch, opaque
from thunder.ops.functionalize import inplace
from thunder.ops.functionalize.mutating import call_mutating
from thunder.ops.registry import alias, inplace_of, lookup, operand_places
from thunder.ops.tensor_values import item, tolist
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


def call_torch(function, args: tuple, kwargs: dict):
    """Records a call of a torch function: as the operation it stands for, as an in-place write, or as an opaque
    operation."""
    if kwargs and "out" in kwargs:
        out = kwargs["out"]
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        if out is not None:
            return inplace.write_out(function, out, call_torch(function, args, kwargs), args, kwargs)
    operation = lookup(function)
    if operation is not None:
        if kwargs and not isinstance(operation, Symbol):
            kwargs = _spelled_as(operation, function, kwargs)
        return operation(*args, **kwargs)
    functional, many = inplace_of(function), bool(args) and isinstance(args[0], (tuple, list))
    if many and inplace.writes(function) and inplace.one_by_one(args):
        return inplace.write_unknown(function, args, kwargs, call_torch)
    if functional is not None:
        return inplace.write(functional, args, kwargs)
    written = opaque.written_by(function, args, kwargs)
    if written:
        symbol = opaque.symbol_for(function)
        return call_mutating(
            symbol.name,
            symbol.fn,
            args,
            kwargs,
            written,
            meta=symbol.meta,
            tags=tuple(symbol.tags),
            symbol_id=("mutating", symbol.id),
        )
    if many and inplace.writes(function):
        written = opaque.written_by_builtin(function, args, kwargs)
        return call_mutating(
            function.__name__,
            function,
            args,
            kwargs,
            written,
            meta=lambda *args, **kwargs: None,
            symbol_id=("mutating", function.__name__),
        )
    if inplace.writes(function):
        return inplace.write_unknown(function, args, kwargs, call_torch)
    return opaque.symbol_for(function)(*args, **kwargs)


_parameters_of = functools.cache(positional_parameters)  # of aliases, which are defined once


def _spelled_as(operation, function, kwargs: dict) -> dict:
    """Arguments of a function of PyTorch's by the names that an alias has at their places."""
    order, defaults = _parameters_of(operation)
    return {spelled(k, order, defaults, lambda: operand_places(function)): v for k, v in kwargs.items()}


METHODS.torch_function = call_torch


def _refuse_node(*args, **kwargs):
    raise CaptureError(
        "a node of autograd's graph is looked into (y.grad_fn), and a compiled function is one node as a whole",
        location=user_location(),
        remedy="only ask whether there is one (y.grad_fn is None), or look at results outside of the compiled function",
    )  # fmt: skip


class GradientNode:
    """Stands for the `grad_fn` of a result inside a compiled function: there is one, and nothing else is known of
    it."""

    __slots__ = ()
    __getattr__ = __repr__ = __reduce_ex__ = _refuse_node


torch.autograd.graph.Node.register(GradientNode)


_PLAIN_PROPERTIES = {
    "is_cuda": lambda a: a.device.type == "cuda",
    "is_cpu": lambda a: a.device.type == "cpu",
    "is_meta": lambda a: a.device.type == "meta",
    "is_sparse": lambda a: False,
    "is_quantized": lambda a: False,
    "is_nested": lambda a: False,
    "is_mps": lambda a: a.device.type == "mps",
    "is_leaf": lambda a: not a.requires_grad,
    "layout": lambda a: torch.strided,
    "names": lambda a: (None,) * a.ndim,
    "grad": lambda a: None,
    "grad_fn": lambda a: GradientNode() if a.requires_grad else None,
    "itemsize": lambda a: a.dtype.bytes,
    "nbytes": lambda a: a.dtype.bytes * a.numel_value,
    "torch_dtype": lambda a: to_torch_dtype(a.dtype),
    "torch_device": lambda a: to_torch_device(a.device),
}
METHODS.properties.update(_PLAIN_PROPERTIES)


def _refuse_version(a):
    raise CaptureError(
        "the version counter of a tensor is read, whose writes are only recorded here",
        location=user_location(),
        remedy="read it outside of the compiled function",
    )


METHODS.properties["_version"] = _refuse_version


def _dim(a) -> int:
    return len(a.shape)


_PLAIN_METHODS = {
    "dim": _dim,
    "size": lambda a, dim=None: a.size(dim),
    "ndimension": _dim,
    "numel": lambda a: a.numel_value,
    "nelement": lambda a: a.numel_value,
    "is_floating_point": lambda a: a.dtype.category == 2,
    "is_complex": lambda a: a.dtype.category == 3,
    "is_signed": lambda a: a.dtype.signed,
    "element_size": lambda a: a.dtype.bytes,
    "get_device": lambda a: -1 if a.device.index is None else a.device.index,
    "is_same_size": lambda a, other: tuple(a.shape) == tuple(other.shape),
    "is_distributed": lambda a: False,
    "sparse_dim": lambda a: 0,
    "dense_dim": _dim,
    "requires_grad_": lambda a, requires_grad=True: _requires_grad(a, requires_grad),
}


def _requires_grad(a: TensorProxy, wanted: bool) -> TensorProxy:
    if wanted == a.requires_grad:
        return a
    raise CaptureError(
        f"requires_grad_({wanted}) changes a tensor inside the compiled function",
        location=user_location(),
        remedy="set requires_grad before the call",
    )


METHODS.update(_PLAIN_METHODS | {"item": item, "tolist": tolist})
for _name in [*_PLAIN_METHODS, "item", "tolist", "numpy"]:
    for _space in (torch.Tensor, torch):
        if hasattr(_space, _name):
            alias(getattr(_space, _name))(METHODS[_name])


for _name, _remedy in {
    "register_hook": "register the hook in the compiled function itself",
    "retain_grad": "return the tensor, and call it on the result",
    "backward": "return the loss and call backward() on it outside, or use thunder.core.transforms.value_and_grad or "
    "torch.func.grad",
}.items():

    def _refuse(a, *args, name=_name, remedy=_remedy, **kwargs):
        raise CaptureError(
            f"{name} of a tensor is called inside of it, and autograd's graph is not there yet",
            location=user_location(),
            remedy=remedy,
        )

    alias(getattr(torch.Tensor, _name))(_refuse)


def _of_memory(name: str):
    def refuse(a, *args, **kwargs):
        raise CaptureError(
            f"{name} reads the memory or the values of a tensor",
            location=user_location(),
            remedy="ask for it outside of the compiled function",
        )

    return refuse


for _name in (
    "storage",
    "untyped_storage",
    "_typed_storage",
    "storage_type",
    "const_data_ptr",
    "__dlpack__",
    "__reduce_ex__",
    "__getstate__",
    "__str__",
    "__format__",
):
    METHODS[_name] = _of_memory(_name)
    if (_function := getattr(torch.Tensor, _name, None)) not in (None, getattr(object, _name, None)):
        alias(_function)(METHODS[_name])


@alias(torch.Tensor.__deepcopy__)
def deepcopy(a, memo):
    """`copy.deepcopy(a)`: a new tensor with the same values."""
    if id(a) not in memo:
        if a.requires_grad:
            raise CaptureError(
                "copy.deepcopy makes a leaf of a tensor that requires grad",
                location=user_location(),
                remedy="use .clone(), or .detach().clone()",
            )
        memo[id(a)] = ltorch.clone(a)
    return memo[id(a)]


METHODS["__deepcopy__"] = deepcopy
METHODS.properties["_cdata"] = _of_memory("_cdata")
alias(torch.Tensor.__array__)(METHODS["numpy"])


@alias(torch.Tensor.module_load)
def module_load(a, other, assign=False):
    return ltorch.detach(other if assign else inplace.copy_(a, other))


@alias(torch.Tensor.slice_inverse, torch.slice_inverse)
def slice_inverse(a, *args, **kwargs):
    raise CaptureError(
        "slice_inverse shows the memory around a tensor, of which nothing is known",
        location=user_location(),
        remedy="use torch.slice_scatter",
    )


def _checked_numel(a, shape: tuple) -> None:
    if (math.prod(shape) == a.numel_value) is False:
        raise RuntimeError(
            f"requested resize to {'x'.join(map(str, shape))} ({math.prod(shape)} elements in total), but the given "
            f"tensor has a size of {'x'.join(map(str, a.shape))} "
            f"({a.numel_value} elements). autograd's resize can only change the shape of a given tensor, while "
            "preserving the number of elements. "
        )


@alias(torch.Tensor.resize)
def resize(a, *sizes):
    """A reshaped tensor, by a name that PyTorch has deprecated."""
    _checked_numel(a, sizes)
    return ltorch.reshape(a, sizes)


@alias(torch.Tensor.resize_as)
def resize_as(a, tensor):
    return resize(a, *tensor.shape)


@alias(torch.Tensor.type)
def torch_type(a: TensorProxy, dtype=None, non_blocking: bool = False):
    """`a.type()`: the name of its type. `a.type(dtype)`: converted to a dtype, to a type of torch's or to the type of
    that name."""
    if isinstance(dtype, torch.dtype):
        return ltorch.to(a, dtype=dtype)
    with compat.DisableTorchFunction():
        if dtype is None:
            return (
                torch.empty(0, dtype=to_torch_dtype(a.dtype), device="cpu")
                .type()
                .replace("torch.", "torch.cuda." if a.device.type == "cuda" else "torch.")
            )
        typed = torch.empty(0, device="cpu").type(dtype)
    return ltorch.to(a, device=typed.device, dtype=typed.dtype)


METHODS["type"] = torch_type


@alias(torch.sym_max)
def sym_max(a, b):
    return max(a, b)


@alias(torch.sym_min)
def sym_min(a, b):
    return min(a, b)


def _attribute(a: TensorProxy, name: str):
    """An attribute of torch.Tensor that no operation defines."""
    attribute = getattr(torch.Tensor, name, None)
    if attribute is None:
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    if callable(attribute):
        return lambda *args, **kwargs: call_torch(attribute, (a, *args), kwargs)
    return call_torch(attribute.__get__, (a,), {})


METHODS.fallback = _attribute
