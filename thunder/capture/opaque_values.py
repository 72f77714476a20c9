"""Sparse tensors, nested tensors and tensors of subclasses in a program: see `thunder.ops.opaque_values`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.methods import TensorMethod
from thunder.capture.world import KIND, MISSING, SAME, Source
from thunder.core.proxies import AnyProxy, TensorProxy
from thunder.ops import opaque
from thunder.ops.functionalize.inplace import write_out
from thunder.ops.opaque_values import from_unusual, holds_unusual, refuse_write

SIGNS = {"-": torch.neg, "~": torch.bitwise_not, "+": torch.positive}
# attributes that are the same for each call of a program
_METADATA = {
    "layout", "dtype", "device", "requires_grad", "is_sparse", "is_sparse_csr", "is_nested", "is_cuda", "is_cpu",
    "is_meta", "is_quantized", "is_leaf", "ndim", "shape",
    "itemsize", "names",
}  # fmt: skip
# of tensors from outside
_ANSWERED = {"numel", "nelement", "element_size", "sparse_dim", "dense_dim", "get_device", "is_coalesced", "_nnz"}


def read(c: Capture, value: torch.Tensor, source: Source) -> AnyProxy:
    """The proxy of such a tensor from outside. Raises CaptureError where it requires grad."""
    entry = c.tensors.opaque.get(id(value))
    if entry is None:
        if type(value).__module__.startswith("torch.distributed.tensor"):
            c.refuse(
                f"{c.world.describe(source)} is a DTensor, which has rules of its own for the parts of its ranks",
                "use thunder.distributed (fsdp, column_parallel, row_parallel) in the place of parallelize_module, "
                "or wrap the compiled module: fully_shard(thunder.jit(model))",
            )
        if value.requires_grad and torch.is_grad_enabled():
            c.refuse(
                f"{c.world.describe(source)} is a {type(value).__name__} of layout {value.layout} that requires grad",
                "call it under torch.no_grad(), or pass a dense tensor and convert it inside",
            )
        proxy = AnyProxy(c.recorder.context.names.claim(source.name(c.world.parameters)), value)
        entry = c.tensors.opaque[id(value)] = (proxy, source)
        c.tensors.holds_opaque = True
        c.world.ask(source, KIND)
    elif entry[1] is not source:
        c.world.ask(source, SAME, entry[1])
    return entry[0]


def involved(c: Capture, values) -> bool:
    """Whether such a tensor is among the arguments of an operation."""
    return c.tensors.holds_opaque and holds_unusual(list(values))


def note(c: Capture, result):
    """From an operation on dense tensors: whether it made such a tensor."""
    if type(result) is AnyProxy and isinstance(result.example, torch.Tensor):
        c.tensors.holds_opaque = True
    return result


def apply(c: Capture, function: Callable, args, kwargs):
    """A call with such a tensor among its arguments: one opaque operation."""
    out = kwargs.get("out")
    if type(out) is TensorProxy:
        kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        result = apply(c, function, args, kwargs)
        return write_out(function, out, result, args, kwargs) if type(result) is TensorProxy else refuse_write("out=")
    c.synchronize()
    result = opaque.symbol_for(function)(*args, **kwargs)
    from_unusual(result)
    return result


def attribute(c: Capture, p: AnyProxy, n: str):
    """`p.n`, as user code sees it: metadata, a method, or a result of PyTorch's."""
    if not isinstance(p.example, torch.Tensor):
        raise AttributeError(n)
    with compat.without_function_modes():
        if n in _METADATA:
            return getattr(p.example, n)
        if n == "__class__":
            return type(p.example)
    descriptor = getattr(torch.Tensor, n, MISSING)
    if descriptor is MISSING:
        c.refuse(
            f"{n!r} of a {type(p.example).__name__} is read, a tensor subclass with its own rules",
            "read it outside and pass it in",
        )
    return TensorMethod(p, n) if callable(descriptor) else apply(c, descriptor.__get__, [p], {})


def method(c: Capture, p: AnyProxy, n: str, args, kwargs):
    """`p.n(...)`."""
    if n in _ANSWERED and id(p.example) in c.tensors.opaque or n in ("dim", "size", "is_floating_point", "is_complex"):
        with compat.without_function_modes():
            return getattr(p.example, n)(*args, **kwargs)
    return apply(c, getattr(torch.Tensor, n), [p, *args], kwargs)
