"""Pickles of traces: what passes and people read of a program, in another process.

Operations of thunder, and functions with a name that is found, are found again by it. What is bound to this process (a
compiled region, a lambda, an object of a guard) is an `Unpickled`, which prints as it did and raises where it is used.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from typing import Any

from thunder.core.codegen import Printer
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.symbolic import Decisions


class Unpickled:
    """Stands for an object that could not be pickled."""

    def __init__(self, text: str):
        self.text = self.__name__ = text

    def __repr__(self) -> str:
        return self.text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.text} was not pickled with the trace: compile the program in this process to run it")


class PickledLocation:
    """The place in the user's code of an operation, as traces print it."""

    def __init__(self, short: str):
        self.short = short


class Printed:
    """Prints an operation as it was printed when it was pickled. read: as it is printed to be read."""

    def __init__(self, lines: list[str], read: list[str]):
        self.lines, self.read = lines, read

    def __call__(self, operation: BoundSymbol, printer: Printer) -> list[str]:
        return self.lines if printer.memory else self.read


class _Pickler(pickle.Pickler):
    """Pickles symbols by their names, and operations with their own printed form by their text."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled that has its own form in traces; NotImplemented for others."""
        if isinstance(obj, Symbol):
            return _reduced_symbol(obj)
        if isinstance(obj, BoundSymbol) and obj.sym.python_printer is not None and _place_of(obj.sym) is None:
            printed = Printed(*(obj.sym.python_printer(obj, Printer(memory=memory)) for memory in (True, False)))
            symbol = Symbol(obj.sym.name, module=obj.sym.module, is_prim=True, python_printer=printed)
            return BoundSymbol, (symbol, (), {}, obj.output)
        if isinstance(obj, BoundSymbol) and _place_of(obj.sym) is None:
            _ = obj.subsymbols  # made now, since the function that makes them stays here
        if isinstance(obj, Proxy):  # whose own method is for programs that are captured
            return object.__reduce_ex__(obj, 2)
        if type(obj) is types.MappingProxyType:
            return dict, (dict(obj),)
        if isinstance(obj, Decisions):
            return _decided, (obj.values, obj.relations, obj.closed)
        short = getattr(obj, "short", None) if hasattr(obj, "code") else None  # a place in a program that was captured
        return NotImplemented if short is None else (PickledLocation, (short,))


def dumps(value: Any) -> bytes:
    """The value pickled; raises what pickle does for what it cannot take."""
    file = io.BytesIO()
    _Pickler(file, protocol=4).dump(value)
    return file.getvalue()


def pickled_or_marked(value: Any) -> Any:
    """The value where it can be pickled, else an `Unpickled`."""
    try:
        dumps(value)
    except Exception:  # noqa: BLE001  of objects of any kind
        return Unpickled(getattr(value, "__name__", None) or repr(value))
    return value


def _reduced_symbol(symbol: Symbol) -> tuple:
    if (reference := _place_of(symbol)) is not None:
        return _at, reference
    executor = None if symbol.executor is None else symbol.executor.name
    fields = symbol.name, symbol.module, symbol.id, symbol.is_prim, symbol.tags, symbol.is_fusion, executor
    return _symbol, (*fields, *map(pickled_or_marked, (symbol.fn, symbol.python_printer, symbol.condition)))


def _place_of(symbol: Symbol) -> tuple[str, str, str] | None:
    """(module, variable, key of a table) of an operation that thunder's files hold."""
    table = {"ltorch": "LTORCH", "prims": "PRIMS"}.get(symbol.module or "")
    registry = sys.modules.get("thunder.ops.registry")
    if table is not None and registry is not None and getattr(registry, table).get(symbol.name) is symbol:
        return registry.__name__, table, symbol.name
    for name, module in list(sys.modules.items()):
        if name.startswith("thunder."):
            variable = next((key for key, value in list(vars(module).items()) if value is symbol), None)
            if variable is not None:
                return name, variable, ""
    return None


def _at(module: str, variable: str, key: str) -> Symbol:
    value = getattr(importlib.import_module(module), variable)
    return value[key] if key else value


def _decided(values: dict, relations: dict, closed: bool) -> Decisions:
    decisions = Decisions(values)
    decisions.relations, decisions.closed = relations, closed
    return decisions


def _symbol(name, module, id, is_prim, tags, is_fusion, executor, fn, printer, condition) -> Symbol:
    executor_object = None if executor is None else importlib.import_module("thunder.extend").get_executor(executor)
    symbol = Symbol(
        name, id=id, module=module, is_prim=is_prim, tags=tags, fn=fn, executor=executor_object, is_fusion=is_fusion,
        python_printer=printer,
    )  # fmt: skip
    symbol.condition = condition
    return symbol
