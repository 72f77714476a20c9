"""Methods of tensors that the program has not called yet."""

from __future__ import annotations

import types

import torch

from thunder.core.proxies import AnyProxy, TensorProxy
from thunder.interpreter.attributes import in_python


class TensorMethod:
    """`x.view`: a method of a proxy that the program has not called yet."""

    __slots__ = ("proxy", "name")

    def __init__(self, proxy: TensorProxy | AnyProxy, name: str):
        self.proxy, self.name = proxy, name

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """What `isinstance` sees."""
        return types.MethodType if in_python(getattr(torch.Tensor, self.name, None)) else types.BuiltinMethodType

    def __eq__(self, other: object) -> bool:
        return type(other) is TensorMethod and self.proxy is other.proxy and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.proxy), self.name))

    def __call__(self, *args, **kwargs):
        return getattr(self.proxy, self.name)(*args, **kwargs)
