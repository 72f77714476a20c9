"""Methods of tensors that the program has not called yet."""

from __future__ import annotations

from thunder.core.proxies import AnyProxy, TensorProxy


class TensorMethod:
    """`x.view`: a method of a proxy that the program has not called yet."""

    __slots__ = ("proxy", "name")

    def __init__(self, proxy: TensorProxy | AnyProxy, name: str):
        self.proxy, self.name = proxy, name

    def __call__(self, *args, **kwargs):
        return getattr(self.proxy, self.name)(*args, **kwargs)
