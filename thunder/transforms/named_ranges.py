"""Ranges of `torch.profiler.record_function` in programs.

A range is no operation: the operations that were captured inside of it have its name in their locations, so that no
pass sees it. While a profiler records, the program runs with the ranges around its statements.

    with record_function("scores"):       t0 = torch.matmul(x, w)      range(("scores",))
        y = x @ w                         t1 = torch.relu(t0)          t0 = torch.matmul(x, w)
    return y.relu()                       return t1                    range(())
                                                                       t1 = torch.relu(t0)
                                                                       return t1
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Callable

from torch.profiler import record_function

from thunder import compat
from thunder.core.codegen import line_owners
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace, TraceTag
from thunder.transforms.del_last_used import python_del
from thunder.transforms.phases import phase_of

NOTES = "_thunder_begin"  # a global of programs whose bound symbols are measured one by one (`thunder.inspect.profile`)


def in_named_ranges(trace: Trace, run: Callable) -> Callable:
    """The function of a trace, which opens the ranges of its operations while a profiler records. It is `run` where the
    program has none."""
    if not any(map(_names, trace.bound_symbols)):
        return run
    code: types.CodeType | None = None

    def in_ranges(*inputs):
        nonlocal code
        if not compat.profiler_records():
            return run(*inputs)
        plain = trace.python_callable()
        if NOTES in plain.__globals__:
            return run(*inputs)
        if code is None:
            code = _with_ranges(trace, plain)
        with _Ranges() as ranges:
            return types.FunctionType(code, plain.__globals__ | {"_thunder_range": ranges.change})(*inputs)

    return functools.update_wrapper(in_ranges, run)


class _Ranges:
    """The ranges that a program has open."""

    def __init__(self):
        self.open: list[tuple[str, record_function]] = []

    def __enter__(self) -> _Ranges:
        return self

    def __exit__(self, *error: object) -> None:
        self.change(())

    def change(self, names: tuple[str, ...]) -> None:
        """Closes and opens ranges, so that these are open, outermost first."""
        same = 0
        while same < min(len(self.open), len(names)) and self.open[same][0] == names[same]:
            same += 1
        while len(self.open) > same:
            self.open.pop()[1].__exit__(None, None, None)
        for name in names[same:]:
            self.open.append((name, record_function(name)))
            self.open[-1][1].__enter__()


def _names(operation: BoundSymbol) -> tuple[str, ...]:
    """The ranges of an operation. A region is in those of all its operations."""
    if operation.location is not None:
        return operation.location.ranges
    return tuple(dict.fromkeys(name for inner in operation._subsymbols or () for name in _names(inner)))


def _with_ranges(trace: Trace, function: types.FunctionType) -> types.CodeType:
    """The code of a trace's function, with a call of `_thunder_range` where the ranges change."""
    filename, owners = function.__code__.co_filename, line_owners(trace)
    tree = ast.parse("".join(linecache.getlines(filename)))
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef)).body
    statements, last = list[ast.stmt](), ()
    for statement in body:
        operation = owners.get(statement.lineno)
        same = operation is None or operation.sym is python_del
        names = last if same else _names(operation)
        if not same and (TraceTag.BACKWARD in trace.tags or phase_of(operation)):
            names = tuple(f"{name} (backward)" for name in names)
        if names != last:
            call = ast.parse(f"_thunder_range({names!r})").body[0]
            for node in ast.walk(call):
                if hasattr(node, "lineno"):
                    node.lineno = node.end_lineno = statement.lineno  # type: ignore[attr-defined]
            statements.append(call)
            last = names
        statements.append(statement)
    body[:] = statements
    space: dict[str, types.FunctionType] = {}
    exec(compile(tree, filename, "exec"), space)
    return space[trace.name].__code__
