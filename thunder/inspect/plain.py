"""A trace as a program of plain PyTorch: text that needs no thunder, and the function that it defines."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from thunder.core.proxies import Proxy, map_structure, settled
from thunder.core.symbol import BoundSymbol, Names
from thunder.core.trace import Trace
from thunder.errors import ThunderError
from thunder.inspect.verification.programs import PYTORCH_EXECUTORS, as_eager
from thunder.transforms.dispatch import dispatch

__all__ = ["NoPlainProgram", "Plain", "defined", "plain_program"]


class NoPlainProgram(ThunderError):
    """An operation that PyTorch does not have: an object in it has no name that another program could import."""


class Plain(NamedTuple):
    """imports: the import statements of the text. source: `def program(...)`. function: what that defines."""

    imports: list[str]
    source: str
    function: Callable


def plain_program(
    inputs: Sequence[Proxy], operations: Sequence[BoundSymbol], output: Any, names: Names, change: Callable = settled
) -> Plain:
    """Operations as PyTorch executes them. change: of their arguments; by default symbolic numbers become the numbers
    of the call. Raises NoPlainProgram where an operation cannot be printed, MissingImplementationError where PyTorch
    does not execute one."""
    changed = []
    for operation in map(as_eager, operations):
        arguments = map_structure(change, operation.args), map_structure(change, operation.kwargs)
        changed.append(operation.replace(args=arguments[0], kwargs=arguments[1]))
    trace = dispatch(Trace("program", inputs, changed, output, names), PYTORCH_EXECUTORS)
    tree = ast.parse(trace.python(include_decorators=False))
    imports = [ast.unparse(statement) for statement in tree.body[:-1]]
    imports += [_import_of(name, x) for name, x in (trace.info.objects | trace.python_ctx()).items()]
    function = tree.body[-1]
    assert isinstance(function, ast.FunctionDef)
    for argument in function.args.args:
        argument.annotation = None
    imports = [text for text in dict.fromkeys(imports) if text and text != "import torch.nn.functional"]
    return defined(imports, ast.unparse(function))


def defined(imports: list[str], source: str) -> Plain:
    """The program of a text."""
    filename, space = f"<program of {len(linecache.cache)} lines>", dict[str, Any]()
    text = "\n".join([*imports, source])
    linecache.cache[filename] = len(text), None, text.splitlines(keepends=True), filename
    exec(compile(text, filename, "exec"), space)
    return Plain(imports, source, space["program"])


def _import_of(name: str, x: Any) -> str:
    """The statement that imports an object; empty for a module that the text imports itself."""
    if isinstance(x, types.ModuleType):
        return f"import {x.__name__}" if name == x.__name__ else f"import {x.__name__} as {name}"
    home, qualified = getattr(x, "__module__", None), getattr(x, "__qualname__", "")
    if home in sys.modules and getattr(sys.modules[home], qualified, None) is x:
        return f"from {home} import {qualified}" + (f" as {name}" if name != qualified else "")
    home, _, attribute = repr(x).rpartition(".")  # torch.contiguous_format
    if home in sys.modules and getattr(sys.modules[home], attribute, None) is x:
        return f"from {home} import {attribute}" + (f" as {name}" if name != attribute else "")
    raise NoPlainProgram(f"a program of plain PyTorch cannot name {x!r}")
