"""Programs as text: computations, backwards and epilogues, and making functions of them again.

Text from a file is parsed, not run: it may consist of the few kinds of statements and expressions that traces are
printed with. What it calls are operations: functions of PyTorch's that are operations here, ATen operators, and
functions of thunder's executors, each found by its name. Everything else is refused.
"""

from __future__ import annotations

import ast
import collections
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.core.codegen import Printer, compile_source, function_source
from thunder.core.trace import Trace
from thunder.ops.define import inplace_of, lookup
from thunder.programs.describe import Describer, Unspeakable, name_of, named

__all__ = [
    "Damaged", "check_computation", "check_epilogue", "checked", "function_of", "objects_of", "written_object", "written_text",
]  # fmt: skip


class Damaged(Exception):
    """A file does not hold a program. The words say why."""


# ---------------------------------------------------------------------------------------------------------- to text


def written_text(trace: Trace) -> dict:
    """The text of a computation, and the names of what it calls."""
    printer = Printer(print_depth=1)
    text = function_source(trace, printer, include_decorators=False)
    body = text[text.index("def ") :]
    objects = trace.info.objects | printer.context
    said = {"name": trace.name, "text": body, "objects": {n: written_object(x) for n, x in objects.items()}}
    function_of(said)  # what cannot be read again is not written
    return said


def written_object(x: Any) -> Any:
    """An object that a computation names, as another process finds it. Raises Unspeakable."""
    said = Describer()(x)
    found = named(said)
    if not (found is x or type(found) is type(x) and found == x):
        kind = "the function" if callable(x) else "an object"
        raise Unspeakable(f"a bound symbol names {kind} {getattr(x, '__qualname__', type(x).__qualname__)}")
    if not _may_be_named(x):
        raise Unspeakable(f"a bound symbol calls {'.'.join(name_of(x) or (repr(x),))}, which is no operation of thunder's")
    return said


# -------------------------------------------------------------------------------------------------------- from text

_STATEMENTS = (ast.Assign, ast.Expr, ast.Delete, ast.Return, ast.Pass)
_EXPRESSIONS = (
    ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Call, ast.Attribute, ast.Subscript, ast.Slice,
    ast.keyword, ast.Starred, ast.UnaryOp, ast.BinOp, ast.USub, ast.UAdd, ast.Not, ast.Invert, ast.operator,
    ast.expr_context, ast.Compare, ast.cmpop,
)  # fmt: skip
_ROOTS: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, "math": math}
_LITERALS: dict[str, Any] = {"float": float, "complex": complex, "slice": slice, "set": set}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, type(torch.device))


def function_of(said: dict) -> Callable:
    """The function of a computation's text. Raises Damaged where the text is none of a computation."""
    return checked(said["text"], said["name"], objects_of(said["objects"]), check_computation)


def checked(
    text: str, name: str, objects: dict[str, Any], check: Callable[[ast.AST, dict[str, Any]], None]
) -> Callable:
    """The function that text defines, where `check` has nothing against any node of it."""
    for node in ast.walk(parsed(text, name)):
        check(node, objects)
    return compile_source(text, name, _LITERALS | _ROOTS | objects | {"__builtins__": {}})


def parsed(text: str, name: str) -> ast.FunctionDef:
    """The one function that a text defines, without decorators and defaults."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Damaged(f"its text is no Python: {error}") from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef) or tree.body[0].name != name:
        raise Damaged("its text is not one function")
    function = tree.body[0]
    given = function.args
    if function.decorator_list or function.returns or given.defaults or given.kw_defaults or given.vararg or given.kwarg:
        raise Damaged("its function has decorators or defaults")
    for statement in function.body:
        if not isinstance(statement, _STATEMENTS):
            raise Damaged(f"its text has a statement that programs do not have: {type(statement).__name__}")
    return function


def objects_of(said: dict[str, Any]) -> dict[str, Any]:
    """The objects that a text names. Raises Damaged for one that is not found."""
    found = {}
    for name, what in said.items():
        found[name] = x = named(what)
        if not name.isidentifier() or name.startswith("__") or name in _ROOTS or not _may_be_named(x):
            raise Damaged(f"its text names {what!r} {name}, which is no operation of thunder's here")
    return found


def _may_be_named(x: Any) -> bool:
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
        return (x.__module__ or "").startswith(_OPERATIONS) or _is_operation(x)
    plain = (int, float, bool, str, complex, bytes, tuple, slice, torch.device, torch.Size, type(None))
    return type(x) in plain or isinstance(x, _CONSTANTS)


def check_computation(node: ast.AST, objects: dict[str, Any]) -> None:
    if isinstance(node, (ast.FunctionDef, ast.arguments, ast.arg, *_STATEMENTS)):
        return
    if not isinstance(node, _EXPRESSIONS):
        raise Damaged(f"its text has an expression that programs do not have: {type(node).__name__}")
    if isinstance(node, ast.Name) and node.id.startswith("__"):
        raise Damaged(f"its text names {node.id}")
    if isinstance(node, ast.Attribute):
        _attribute(node)
    if isinstance(node, ast.Call):
        called = node.func
        by_name = isinstance(called, ast.Name) and (called.id in objects or called.id in _LITERALS)
        if not by_name and not isinstance(called, ast.Attribute):
            raise Damaged("its text calls what is no operation")


def _attribute(node: ast.Attribute) -> None:
    """An attribute in a computation is an operation, or a part of the path to one."""
    path: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        path.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name) or inner.id not in _ROOTS:
        raise Damaged(f"its text asks a value for an attribute: {ast.unparse(node)}")
    found: Any = _ROOTS[inner.id]
    for name in reversed(path):
        if name.startswith("_") and not _may_be_private(found, name):
            raise Damaged(f"its text names {ast.unparse(node)}")
        found = getattr(found, name, None)
    spaces = (types.ModuleType, compat.OpOverload, compat.OpOverloadPacket, type(torch.ops), type(torch.ops.aten))
    known = isinstance(found, (*spaces, *_CONSTANTS)) or found is torch.device or found is torch.Tensor
    if not known and not _is_operation(found) and not _is_math(found):
        raise Damaged(f"its text names {ast.unparse(node)}, which is no operation")


def _may_be_private(owner: Any, name: str) -> bool:
    """Operations have private names in PyTorch, and so have two modules of them."""
    if owner is torch and name == "_C" or owner is compat.nn_bindings or name == "_nn":
        return True
    return isinstance(owner, type(torch.ops.aten)) or _is_operation(getattr(owner, name, None))


# where functions stand that carry out operations
_OPERATIONS = ("thunder.executors.", "thunder.ops.", "thunder.transforms.partition")


def _is_operation(x: Any) -> bool:
    return lookup(x) is not None or inplace_of(x) is not None


def _is_math(x: Any) -> bool:
    return getattr(x, "__module__", None) == "math" or isinstance(x, float)


# --------------------------------------------------------------------------------------------------------- epilogues

_METHODS = {"__new__", "extend", "update", "clear", "append", "add", "set"}
_MAKING = (torch.Size, types.MethodType, weakref.ref, frozenset, set, list, dict, collections.deque, id)


def check_epilogue(node: ast.AST, objects: dict[str, Any]) -> None:
    """Raises Damaged for what epilogues do not have: they build objects and write to them."""
    if isinstance(node, (ast.FunctionDef, ast.arguments, ast.arg, *_STATEMENTS)):
        return
    if not isinstance(node, _EXPRESSIONS):
        raise Damaged(f"its epilogue has an expression that epilogues do not have: {type(node).__name__}")
    if isinstance(node, ast.Call):
        called = node.func
        named_so = isinstance(called, ast.Name) and (called.id == "set" or _may_build(objects.get(called.id)))
        if not named_so and not (isinstance(called, ast.Attribute) and called.attr in _METHODS):
            raise Damaged(f"its epilogue calls {ast.unparse(called)}")


def _may_build(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        return x.__module__.startswith("thunder.")
    methods = (types.WrapperDescriptorType, types.MethodDescriptorType)
    return x in _MAKING or isinstance(x, methods) or x in (setattr, delattr) or x in _NEW


_NEW = (tuple.__new__, object.__new__, dict.__new__, list.__new__, set.__new__, collections.OrderedDict.__new__)
