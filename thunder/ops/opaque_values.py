"""Tensors that a proxy cannot describe: sparse and nested ones, and those of subclasses with rules of their own. Traces
pass them through.

An `AnyProxy` stands for such a tensor, with the tensor seen at capture as its example. Every operation on it is opaque,
and is typed by running it on examples: what is computed has zeros in its place. So a shape that depends on data may
come out differently when the program runs; the operation `check_sizes` behind it says so then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, leaves, map_structure, proxies_in
from thunder.core.symbol import current_recorder, user_location
from thunder.core.unbacked import check_sizes
from thunder.errors import CaptureError
from thunder.ops.explain import example
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype

__all__ = ["is_unusual", "holds_unusual", "is_tensor", "typed_by_example", "metadata", "from_unusual", "CONSTRUCTORS"]

# functions that make such tensors of dense ones, and that fake tensors do not know
CONSTRUCTORS = (
    torch.nested.nested_tensor, torch.nested.as_nested_tensor, torch.quantize_per_tensor, torch.quantize_per_channel,
    torch.quantize_per_tensor_dynamic,
)  # fmt: skip


def is_unusual(x: torch.Tensor) -> bool:
    """Whether a tensor is none that shape, dtype and device describe."""
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return True
    kind = type(x)
    if (
        kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, compat.FakeTensor)
        or kind.__torch_function__ is compat.disabled_function
    ):
        return kind.__torch_dispatch__ is not compat.disabled_dispatch and kind is not compat.FakeTensor
    return True


def is_tensor(proxy: Proxy) -> bool:
    """Whether a proxy stands for a tensor, of whatever kind."""
    return isinstance(proxy, TensorProxy) or isinstance(proxy, AnyProxy) and isinstance(proxy.example, torch.Tensor)


def holds_unusual(value) -> bool:
    return any(isinstance(p, AnyProxy) and isinstance(p.example, torch.Tensor) for p in proxies_in(value, []))


def metadata(x: torch.Tensor) -> tuple:
    """What an entry depends on of such a tensor: a guard compares it."""
    kind = type(x), x.layout, x.dtype, x.device, x.requires_grad
    if x.is_nested:
        return *kind, tuple(x._values.shape) if x.layout is torch.jagged else tuple(
            tuple(part.shape) for part in x.unbind()
        )
    return *kind, tuple(x.shape), x._nnz() if x.layout is not torch.strided else None


def typed_by_example(function: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """What a call gives: a proxy for each tensor.

    Raises CaptureError where a gradient would have to pass through such a tensor, where something is written to it, and
    where the program asks for a value.
    """
    given = proxies_in(kwargs, proxies_in(args, []))
    if name.endswith("_") and not name.endswith("__"):
        _refuse(
            f"{name} writes to a sparse or nested tensor, or to one of a subclass with its own rules",
            "use the form that returns a new tensor",
        )
    recorder = current_recorder()
    differentiable = (
        recorder is not None
        and recorder.context.grad_enabled
        and any(isinstance(p, TensorProxy) and p.requires_grad for p in given)
    )
    known: dict[int, Proxy] = {}

    def fake(x):
        made = example(x, torch.zeros)
        if isinstance(x, Proxy):
            known[id(made)] = x
        return made

    with compat.without_function_modes(), torch.no_grad():
        examples = map_structure(fake, (args, kwargs))
        out = function(*examples[0], **examples[1])

        def typed(x):
            if not isinstance(x, torch.Tensor):
                if isinstance(x, (int, float)):
                    _refuse(
                        f"{name} asks for a value of a sparse or nested tensor, or of one of a subclass with its own "
                        "rules",
                        "compute it outside and pass it in",
                    )
                return x
            if id(x) in known:
                return known[id(x)]
            if is_unusual(x):
                return AnyProxy("", x)
            grad = differentiable and (x.is_floating_point() or x.is_complex())
            return TensorProxy(
                shape=tuple(x.shape),
                dtype=from_tensor_dtype(x.dtype),
                device=from_tensor_device(x.device),
                requires_grad=grad,
            )

        result = map_structure(typed, out)
        if recorder is not None and recorder.memory is not None:
            _fix_shared(recorder.memory, zip(leaves(out), leaves(result), strict=True), leaves(examples), known)
    if differentiable and any(isinstance(p, AnyProxy) for p in leaves(result)):
        _refuse(
            f"{name} gives a sparse or nested tensor that requires grad",
            "detach what it is made of, or compute it outside",
        )
    return result


def _fix_shared(memory, results, examples: list, known: dict[int, Proxy]) -> None:
    """What shares memory with a part of such a tensor must not be written to: the other would not follow."""
    of = {key: known[id(x)] for x in examples if isinstance(x, torch.Tensor) for key in _storages(x)}
    for x, proxy in results:
        for key in _storages(x) if isinstance(x, torch.Tensor) else ():
            for value in (proxy, of[key]) if key in of and of[key] is not proxy else ():
                if isinstance(value, TensorProxy):
                    memory.fixed[memory.base(value)] = (
                        "a tensor that shares memory with a sparse or nested tensor, or with one of a subclass with "
                        "its own rules, is written to"
                    )


def _storages(x: torch.Tensor) -> set[int]:
    """The memory that a tensor, or its parts, are in."""
    if x.layout is torch.sparse_coo:
        parts = [x._indices(), x._values()]
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [x.crow_indices(), x.col_indices(), x.values()]
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [x.ccol_indices(), x.row_indices(), x.values()]
    elif x.is_nested:
        parts = list(x.unbind())
    else:
        parts = [part for part in vars(x).values() if isinstance(part, torch.Tensor)] if is_unusual(x) else []
        parts = parts or [x]
    return {part.untyped_storage()._cdata for part in parts if part.layout is torch.strided and part.numel()}


def from_unusual(result: Any) -> None:
    """Records that the tensors of a result, which were typed by example, have the shapes they were given."""
    for proxy in proxies_in(result, []):
        if isinstance(proxy, TensorProxy):
            check_sizes(
                proxy,
                proxy.shape,
                "an operation on a sparse or nested tensor, or on one of a subclass with its own rules",
            )


def _refuse(reason: str, remedy: str):
    raise CaptureError(reason, location=user_location(), remedy=remedy)
