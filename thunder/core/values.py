"""Values of a program while it is traced: the base class, and values that traces only pass through.

This module does not define `a + b` or `a.sin()`: `thunder.ops` fills `METHODS` when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from thunder.core.recording import note_look

BINARY_DUNDERS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()


class MethodTable(dict):
    """The attributes of tensor proxies: name -> function of the proxy, filled by `thunder.ops`.

    `properties` are called when they are read. `fallback(proxy, name)` answers for a name that nobody filled in, and
    `torch_function(function, args, kwargs)` for a torch function called on a proxy by code that runs natively.
    """

    def __init__(self):
        super().__init__()
        self.properties: dict[str, Callable] = {}
        self.fallback: Callable[[Any, str], Any] | None = None
        self.torch_function: Callable | None = None

    def call(self, name: str, *args, **kwargs):
        method = self.get(name)
        if method is not None:
            return method(*args, **kwargs)
        if self.fallback is None:
            raise TypeError(f"{name} of a proxy has no meaning before thunder.ops is imported")
        return self.fallback(args[0], name)(*args[1:], **kwargs)

    def attribute(self, proxy, name: str):
        method = self.get(name)
        if method is not None:
            return lambda *args, **kwargs: method(proxy, *args, **kwargs)
        getter = self.properties.get(name)
        if getter is not None:
            return getter(proxy)
        if self.fallback is None or name.startswith("__"):
            raise AttributeError(f"{type(proxy).__name__!r} object has no attribute {name!r}")
        return self.fallback(proxy, name)


METHODS = MethodTable()


class Proxy:
    """A named value of a trace. Compared by identity; a transform makes new ones instead of changing them."""

    __slots__ = ("name", "__weakref__")
    name: str

    def _type_text(self) -> str:
        """The type as traces print it."""
        return "Any"

    def __repr__(self) -> str:
        note_look()
        return f'<{type(self).__name__} {self.name or "unnamed"}: "{self._type_text()}">'


def torch_function(cls, function, types, args=(), kwargs=None):
    """The `__torch_function__` of proxies: PyTorch calls it for a function with a proxy in the place of a tensor."""
    if METHODS.torch_function is None:
        return NotImplemented
    return METHODS.torch_function(function, args, kwargs or {})


class AnyProxy(Proxy):
    """A value that traces only pass through: a generator, a sparse tensor, an object of the user's. `example` is the
    one seen at capture."""

    __slots__ = ("example",)
    requires_grad = None  # among outputs: that is a question for tensors

    def __init__(self, name: str, example: Any = None):
        self.name, self.example = name, example

    __torch_function__ = classmethod(torch_function)


class CollectionProxy(Proxy):
    """A list or tuple that a trace unpacks, as `saved_for_backward` of a backward trace."""

    __slots__ = ("collection",)

    def __init__(self, collection: Iterable, name: str = ""):
        self.collection, self.name = collection, name

    def _type_text(self) -> str:
        return "Collection"
