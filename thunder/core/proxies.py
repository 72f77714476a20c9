"""Proxies: the values of a program while it is traced, and structures of them.

A `TensorProxy` stands for a tensor: name, shape, dtype, device, requires_grad, nothing else. Numbers that stay symbolic
and the base class are in `numbers`; their public names are importable from here.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from thunder.core.devices import Device, to_device
from thunder.core.dtypes import dtype, is_inexact, to_dtype
from thunder.core.numbers import (
    BINARY_DUNDERS,
    Condition,
    FloatProxy,
    IntegerProxy,
    NumberProxy,
    Proxy,
    UnbackedNumber,
    are_equal,
    concrete,
    converted,
    extreme,
    number_value,
    settled,
)
from thunder.core.recording import undecided
from thunder.core.symbolic import RELATIONS
from thunder.errors import DataDependentError

__all__ = [
    "Proxy", "TensorProxy", "FutureTensorProxy", "NumberProxy", "IntegerProxy", "FloatProxy", "UnbackedNumber",
    "Condition", "AnyProxy", "CollectionProxy", "METHODS", "RELATIONS", "leaves", "like", "concrete", "settled",
    "number_value", "element_count", "type_string", "proxies_in", "has_numbers", "numbers_in", "extreme",
    "converted", "Size", "equal_counts", "equal_shapes", "same_shape", "map_structure",
]  # fmt: skip


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


class TensorProxy(Proxy):
    """A tensor of a trace: a name, shape, dtype, device and requires_grad, without data.

    Args:
        name: The name. By default the proxy gets one when an operation that returns it is recorded.
        like: A tensor proxy whose shape, device, dtype and requires_grad are copied, unless other arguments override
            them.
        shape: A sequence of ints and IntegerProxies.
        device: Anything that `torch.device` accepts.
        dtype: A dtype of torch or thunder.
        requires_grad: Whether the tensor requires grad. Always False for integers and bool.
    """

    __slots__ = ("shape", "dtype", "device", "requires_grad")
    shape: tuple
    dtype: dtype
    device: Device
    requires_grad: bool

    def __init__(
        self,
        name=None,
        *,
        like: TensorProxy | None = None,
        shape=None,
        device=None,
        dtype=None,
        requires_grad: bool | None = None,
    ):
        if like is None and (shape is None or device is None or dtype is None):
            raise ValueError("TensorProxy needs like=, or all of shape=, device= and dtype=")
        self.name = name or ""
        self.shape = like.shape if shape is None else tuple(shape)  # type: ignore[union-attr]
        self.device = like.device if device is None else to_device(device)  # type: ignore[union-attr, assignment]
        self.dtype = like.dtype if dtype is None else to_dtype(dtype)  # type: ignore[union-attr, assignment]
        wanted = (like.requires_grad if like is not None else False) if requires_grad is None else requires_grad
        self.requires_grad = wanted and is_inexact(self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel_value(self):
        """The number of elements, an int or an IntegerProxy."""
        return math.prod(self.shape)

    true_dtype = property(lambda self: self.dtype)

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def replace(self, **changes) -> TensorProxy:
        """Returns a copy with some of name, shape, dtype, device and requires_grad changed."""
        return TensorProxy(changes.pop("name", self.name), like=self, **changes)

    def __getattr__(self, name: str):
        return METHODS.attribute(self, name)

    __torch_function__ = classmethod(torch_function)

    def __array__(self, *args, **kwargs):
        return METHODS.call("numpy", self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return concrete(self.shape[0])

    def __iter__(self):
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(METHODS.call("unbind", self, 0))

    def __reversed__(self):
        return METHODS.call("flip", self, 0) if self.shape else self

    def __bool__(self):
        return METHODS.call("__bool__", self)

    def __int__(self):
        return METHODS.call("__int__", self)

    def __float__(self):
        return METHODS.call("__float__", self)

    def __index__(self):
        return METHODS.call("__index__", self)

    def __contains__(self, value):
        return METHODS.call("__contains__", self, value)

    def __reduce_ex__(self, protocol):
        return METHODS.call("__reduce_ex__", self, protocol)

    def _type_text(self) -> str:
        """The type as traces print it: `cpu f32[2, 2]`."""
        sizes = [str(n if type(n) is int else getattr(n, "expression", n)) for n in self.shape]
        return f"{self.device.name} {self.dtype.shortname}[{', '.join(sizes)}]"

    __hash__ = object.__hash__


class FutureTensorProxy(TensorProxy):
    """A tensor that a collective is still working on: `wait` makes it a tensor. Shape, dtype and device are those of
    that."""

    __slots__ = ()

    @classmethod
    def of(cls, tensor: TensorProxy, requires_grad: bool) -> FutureTensorProxy:
        """The future of an unnamed tensor that a meta rule made."""
        return cls(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=requires_grad)

    def _type_text(self) -> str:
        return f"future of {super()._type_text()}"

    def replace(self, **changes) -> FutureTensorProxy:
        return FutureTensorProxy(changes.pop("name", self.name), like=self, **changes)


def _forward(name: str) -> Callable:
    def operator_method(self, *args):
        return METHODS.call(name, self, *args)

    operator_method.__name__ = name
    return operator_method


for _stem in BINARY_DUNDERS:
    # tensors have no `__imatmul__`
    for _name in (f"__{_stem}__", f"__r{_stem}__", *((f"__i{_stem}__",) if _stem != "matmul" else ())):
        setattr(TensorProxy, _name, _forward(_name))
for (
    _name
) in "__neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __getitem__ __setitem__".split():
    setattr(TensorProxy, _name, _forward(_name))


def like(
    t: TensorProxy, shape: tuple | None = None, dtype: dtype | None = None, device: Device | None = None
) -> TensorProxy:
    """A fresh unnamed tensor like `t`, for meta rules: no conversions, no checks, requires_grad False (recording sets
    it)."""
    out = TensorProxy.__new__(TensorProxy)
    out.name = ""
    out.shape = t.shape if shape is None else shape
    out.dtype = t.dtype if dtype is None else dtype
    out.device = t.device if device is None else device
    out.requires_grad = False
    return out


def element_count(value: TensorProxy) -> int:
    """How many elements a tensor has, for estimates: see `number_value`."""
    return int(math.prod(map(number_value, value.shape)))


def equal_shapes(a: tuple, b: tuple) -> bool:
    """Whether two shapes are equal by arithmetic alone."""
    return len(a) == len(b) and all(map(are_equal, a, b))


def equal_counts(a: TensorProxy, b: TensorProxy) -> bool:
    """Whether two tensors have as many elements as each other, whatever the sizes that stay symbolic."""
    return are_equal(math.prod(a.shape), math.prod(b.shape))


def same_shape(a: tuple, b: tuple) -> bool:
    """Whether two shapes are certainly equal, whatever data-dependent sizes are.

    Where constants tell them apart, nothing is decided about symbolic sizes.
    """
    if a is b or len(a) != len(b):
        return a is b
    open_sizes = False
    for m, n in zip(a, b):
        if type(m) is type(n) is int:
            if m != n:
                return False
        else:
            open_sizes |= m is not n
    if not open_sizes:
        return True
    try:
        with undecided():
            return a == b
    except DataDependentError:
        return False


def type_string(x) -> str:
    """The type of a value as traces print it: `cpu f32[2, 2]`, `int 8`, `Collection`, `Any` ..."""
    if isinstance(x, (Proxy, NumberProxy)):
        return x._type_text()
    if x is None:
        return "Any"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (bool, int, float, complex)) else type(x).__name__


class Size(tuple):
    """`torch.Size` with entries that stay symbolic, which PyTorch's own class takes for none."""

    def numel(self):
        """The product of the entries."""
        return math.prod(self)

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return Size(item) if isinstance(index, slice) else item

    def __mul__(self, times):
        return Size(super().__mul__(times))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"torch.Size({[*map(concrete, self)]})"


def _children(value) -> Iterable | None:
    """The values directly inside a container; None for any other value."""
    t = type(value)
    if t is tuple or t is list:
        return value
    if isinstance(value, (tuple, list)):  # not by a method of the user's
        return tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value)
    if isinstance(value, dict):
        return dict.values(value)
    return (value.start, value.stop, value.step) if type(value) is slice else None


def numbers_in(value, numbers: list) -> list:
    """Appends the symbolic numbers in a structure, and in the shapes of its tensors, to `numbers`."""
    if isinstance(value, NumberProxy):
        numbers.append(value)
        return numbers
    for x in (value.shape if isinstance(value, TensorProxy) else _children(value)) or ():
        numbers_in(x, numbers)
    return numbers


def has_numbers(value) -> bool:
    """Whether there are symbolic numbers in a structure or in the shapes of its tensors."""
    t = type(value)
    if t is int or t is str or t is float or t is bool or value is None:
        return False
    if t is TensorProxy:
        value = value.shape
    elif (value := _children(within := value)) is None:
        return isinstance(within, NumberProxy)
    for x in value:
        if type(x) is not int and has_numbers(x):
            return True
    return False


_CONSTANTS = frozenset((int, float, bool, str, type(None)))  # most of what stands beside tensors in arguments
_LEAVES = _CONSTANTS | {TensorProxy}


def proxies_in(value, proxies: list) -> list:
    """Appends the proxies in a structure, and those of its numbers, to `proxies`, in order, repetitions kept."""
    t = type(value)
    if t is TensorProxy:
        proxies.append(value)
    elif t is tuple or t is list:
        for x in value:
            t = type(x)
            if t is TensorProxy:
                proxies.append(x)
            elif t not in _CONSTANTS:
                proxies_in(x, proxies)
    elif isinstance(value, Proxy):
        proxies.append(value)
    elif t is IntegerProxy or t is FloatProxy:
        proxies.extend(value.unbacked)
    else:
        for x in _children(value) or ():
            proxies_in(x, proxies)
    return proxies


def map_structure(function: Callable, value) -> Any:
    """`value` with `function` applied to every leaf of its containers; the same object where nothing changed."""
    t = type(value)
    if t in _LEAVES:
        return function(value)
    if t is tuple or t is list:
        new = [function(x) if type(x) in _LEAVES else map_structure(function, x) for x in value]
        return value if all(map(operator.is_, new, value)) else t(new)
    if t is slice:
        return slice(*[map_structure(function, x) for x in (value.start, value.stop, value.step)])
    if isinstance(value, dict):
        new_dict = {k: map_structure(function, x) for k, x in dict.items(value)}
        return value if all(new_dict[k] is x for k, x in dict.items(value)) else _rebuilt(value, new_dict)
    if isinstance(value, (tuple, list)):
        inside = list(_children(value))  # pyright: ignore[reportArgumentType]
        new = [map_structure(function, x) for x in inside]
        return value if all(map(operator.is_, new, inside)) else _rebuilt(value, new)
    return function(value)


def _rebuilt(value, content):
    """A container like `value` with other content. `torch.Size`, which takes ints only, becomes a `Size`."""
    t = type(value)
    if t is tuple or t is list or t is dict:
        return t(content) if t is tuple else content
    if isinstance(value, tuple):
        make = Size if t.__name__ == "Size" else getattr(value, "_make", t)
        return make(content)
    rebuilt = copy.copy(value)
    if isinstance(rebuilt, list):
        list.__setitem__(rebuilt, slice(None), content)
    else:
        for k, x in content.items():
            dict.__setitem__(rebuilt, k, x)
    return rebuilt


def leaves(value) -> list:
    """What a structure of tuples, lists and dicts holds, in order."""
    values: list = []
    pending = [value]
    while pending:
        x = pending.pop()
        if isinstance(x, (tuple, list)):
            pending += reversed(x)
        elif isinstance(x, dict):
            pending += reversed(x.values())
        else:
            values.append(x)
    return values


def hashable(x):
    """A hashable form of a structure of arguments: proxies by identity; 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(x, NumberProxy):
        return (NumberProxy, x.expression)
    if isinstance(x, Proxy):
        return x
    if isinstance(x, (tuple, list)):
        return (type(x).__name__, *map(hashable, x))
    if isinstance(x, dict):
        return ("dict", *((k, hashable(v)) for k, v in x.items()))
    if isinstance(x, slice):
        return ("slice", hashable(x.start), hashable(x.stop), hashable(x.step))
    try:
        hash(x)
    except TypeError:
        return (type(x), id(x))
    return (type(x), repr(x) if isinstance(x, (float, complex)) else x)
