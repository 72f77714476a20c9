"""Elementwise operations: one row per op.

A row makes two symbols: the prim, which computes on operands of one shape and type, and the `ltorch` operation with PyTorch's broadcasting and promotion.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.proxies import METHODS, TensorProxy, like
from thunder.core.symbol import Symbol
from thunder.ops.data import convert
from thunder.ops.define import alias, composite, prim
from thunder.ops.promotion import Promotion, broadcast_shapes, is_number, result_type, same_device
from thunder.ops.shape_prims import broadcast_in_dim

__all__ = ["unary", "binary", "broadcast_to"]

Sampler = Callable[[Callable], Any]


def broadcast_to(a: TensorProxy, shape: tuple) -> TensorProxy:
    """`a` with the shape that broadcasting gives it; `a` itself where it has it."""
    if a.shape == shape:
        return a
    offset = len(shape) - len(a.shape)
    return broadcast_in_dim(a, shape, tuple(range(offset, len(shape))))


# ---------------------------------------------------------------------------------------------------------------- unary


def unary(
    name: str,
    *torch_functions: Callable,
    promotes: Callable = Promotion.KEEP,
    domain: tuple[float, float] = (-3.0, 3.0),
    integers: bool = True,
    autocast: str | None = None,
) -> Symbol:
    """A row: name, the torch functions it is, how types follow, the interval that samples come from, whether integer tensors are accepted."""
    run = torch_functions[0]
    primitive = prim(run, name=name)(lambda a: like(a, dtype=promotes(a.dtype)[1]))

    def meta(a):
        if type(a) is not TensorProxy:
            raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(a).__name__}")
        return like(a, dtype=promotes(a.dtype)[1])

    def decomposition(a):
        return primitive(convert(a, promotes(a.dtype)[0]))

    symbol = composite(*torch_functions, name=name, meta=meta, autocast=autocast)(decomposition)

    def samples(make):
        yield make(4, 3, low=domain[0], high=domain[1])
        yield make(low=domain[0], high=domain[1])
        yield make(0, 2, low=domain[0], high=domain[1])
        if integers:
            yield make(5, dtype=torch.int64, low=max(0, int(domain[0])), high=2)

    symbol.samples(samples)
    return symbol


def _pair(name: str) -> tuple[Callable, ...]:
    """torch.name and Tensor.name, where they exist."""
    return tuple(f for space in (torch, torch.Tensor) if (f := getattr(space, name, None)) is not None)


for _name, _options in {
    "abs": {"promotes": Promotion.COMPLEX_TO_REAL},
    "neg": {},
    "exp": {"promotes": Promotion.INT_TO_FLOAT, "autocast": "float32"},
    "sin": {"promotes": Promotion.INT_TO_FLOAT},
    "cos": {"promotes": Promotion.INT_TO_FLOAT},
    "tanh": {"promotes": Promotion.INT_TO_FLOAT},
    "sigmoid": {"promotes": Promotion.INT_TO_FLOAT},
    "rsqrt": {"promotes": Promotion.INT_TO_FLOAT, "domain": (0.1, 4.0), "autocast": "float32"},
    "sqrt": {"promotes": Promotion.INT_TO_FLOAT, "domain": (0.0, 4.0)},
    "log": {"promotes": Promotion.INT_TO_FLOAT, "domain": (0.1, 4.0), "autocast": "float32"},
    "erf": {"promotes": Promotion.INT_TO_FLOAT},
}.items():
    unary(_name, *_pair(_name), **_options)


# ---------------------------------------------------------------------------------------------------------------- binary


def operator_methods(symbol: Callable, operator: str) -> None:
    """Makes `symbol` what a Python operator (`"add"`: `__add__` and `__radd__`) does with proxies."""

    def reflected(b, a):
        return symbol(a, b)

    for name, function in ((f"__{operator}__", symbol), (f"__r{operator}__", reflected)):
        METHODS[name] = function
        if name in vars(torch._C.TensorBase) or hasattr(torch.Tensor, name):
            alias(getattr(torch.Tensor, name))(function)


def binary(
    name: str,
    *torch_functions: Callable,
    promotes: Callable = Promotion.KEEP,
    python: Callable | None = None,
    operator: str | None = None,
    prim_name: str | None = None,
    domain: tuple[float, float] = (-3.0, 3.0),
    autocast: str | None = None,
) -> Symbol:
    """A row: name, torch functions, how types follow, what it is on Python numbers, and the Python operator (`"add"` for `__add__`) it implements."""
    run = torch_functions[0]

    def prim_meta(a, b):
        t = a if type(a) is TensorProxy else b
        return like(t, dtype=promotes(t.dtype)[1])

    primitive = prim(run, name=prim_name or name)(prim_meta)

    def meta(a, b):
        if type(a) is TensorProxy and type(b) is TensorProxy:
            if a.shape == b.shape and a.dtype is b.dtype and a.device is b.device:
                return like(a, dtype=promotes(a.dtype)[1])
            return like(a, broadcast_shapes(a.shape, b.shape), promotes(result_type(a, b))[1], same_device(a, b))
        if type(a) is TensorProxy and is_number(b):
            return like(a, dtype=promotes(result_type(a, b))[1])
        if type(b) is TensorProxy and is_number(a):
            return like(b, dtype=promotes(result_type(a, b))[1])
        if is_number(a) and is_number(b) and python is not None:
            return python(a, b)
        raise TypeError(f"{name}(): arguments must be Tensors or numbers, not {type(a).__name__} and {type(b).__name__}")

    def decomposition(a, b):
        if is_number(a) and is_number(b):
            return python(a, b)
        compute = promotes(result_type(a, b))[0]
        tensors = [x for x in (a, b) if type(x) is TensorProxy]
        shape = broadcast_shapes(*(t.shape for t in tensors))
        a, b = (broadcast_to(convert(x, compute), shape) if type(x) is TensorProxy else x for x in (a, b))
        return primitive(a, b)

    symbol = composite(*torch_functions, name=name, meta=meta, autocast=autocast)(decomposition)
    if operator is not None:
        operator_methods(symbol, operator)
    low, high = domain

    def samples(make):
        yield make(4, 3, low=low, high=high), make(4, 3, low=low, high=high)
        yield make(2, 1, low=low, high=high), make(1, 5, low=low, high=high)
        yield make(4, 3, low=low, high=high), make(3, low=low, high=high)
        yield make(3, low=low, high=high), 2.0
        yield make(3, low=low, high=high), 2
        yield make(3, low=low, high=high), make(low=low, high=high)

    symbol.samples(samples)
    return symbol



for _name, _python in {"mul": python_operator.mul, "maximum": None, "minimum": None}.items():
    binary(_name, *_pair(_name), operator=_name if _python else None, python=_python)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    binary(_name, *_pair(_name), operator=_name, python=getattr(python_operator, _name), promotes=Promotion.BOOL_RESULT)


def _scaled(name: str, python: Callable) -> Symbol:
    """add and sub: `a + alpha * b`."""
    plain = binary(f"plain_{name}", *_pair(name), prim_name=name, python=python)

    def meta(a, b, *, alpha=1):
        return plain.meta(a, b)

    def decomposition(a, b, *, alpha=1):
        return plain.decomposition(a, b if alpha == 1 else b * alpha)

    symbol = composite(*_pair(name), name=name, meta=meta)(decomposition)
    operator_methods(symbol, name)

    def samples(make):
        yield from plain.sampler(make)
        yield (make(4, 3), make(4, 3)), {"alpha": 2}

    symbol.samples(samples)
    return symbol


add = _scaled("add", python_operator.add)
sub = _scaled("sub", python_operator.sub)
