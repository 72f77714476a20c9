"""Tensors that a proxy cannot describe: sparse and nested ones, and those of subclasses with rules of their own. Traces
pass them through.

An `AnyProxy` stands for such a tensor, with the tensor seen at capture as its example. Every operation on it is opaque,
and is typed by running it on examples: what is computed has zeros in its place. So a shape that depends on data may
come out differently when the program runs; the operation `check_sizes` behind it says so then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, proxies_in
from thunder.core.symbol import user_location
from thunder.core.unbacked import check_sizes
from thunder.errors import CaptureError

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


def fix_shared(memory, results, examples: list, known: dict[int, Proxy]) -> None:
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


@functools.cache
def _watching() -> type:
    """The class of a dispatch mode that refuses operations that write to one of its values. It is made when it is
    needed first, as PyTorch's modes are looked up then."""

    class Watching(compat.TorchDispatchMode):
        def __init__(self, name: str, values: list):
            super().__init__()
            tensors = [x for x in values if isinstance(x, torch.Tensor)]
            self.name, self.watched = name, {id(x) for x in tensors}.union(*map(_storages, tensors))

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            for position, argument in enumerate(operation._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[position] if position < len(args) else kwargs.get(argument.name)
                    for x in written if isinstance(written, (tuple, list)) else (written,):
                        if isinstance(x, torch.Tensor) and not self.watched.isdisjoint({id(x), *_storages(x)}):
                            refuse_write(self.name)
            return operation(*args, **kwargs)

    return Watching


def unwritten(name: str, values: list):
    """A block in which operations raise CaptureError before they write to one of these tensors of the user's."""
    return _watching()(name, values)


def refuse_write(name: str):
    refuse(
        f"{name} writes to a sparse or nested tensor, to one of a subclass with its own rules, or beside such a one",
        "use the form that returns a new tensor",
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


def refuse(reason: str, remedy: str):
    raise CaptureError(reason, location=user_location(), remedy=remedy)
