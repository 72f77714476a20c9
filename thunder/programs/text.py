"""Programs as text: computations, backwards and epilogues, and making functions of them again.

Text from a file is parsed, not run: it may consist of the few kinds of statements and expressions that traces are
printed with. What it calls are operations: functions of PyTorch's that are operations here, ATen operators, and
functions of thunder's executors, each found by its name. Everything else is refused.
"""

from __future__ import annotations

import ast
import base64
import collections
import functools
import keyword
import marshal
import math
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from thunder import compat
from thunder.capture.world import MISSING
from thunder.core.codegen import PerCall, Printer, compile_source, function_source
from thunder.core.regions import FusedFunction
from thunder.core.trace import Trace
from thunder.distributed.layouts import Axis
from thunder.distributed.placement import Placement
from thunder.ops.functionalize.inplace import in_grad_mode
from thunder.ops.registry import LTORCH, PRIMS
from thunder.programs.describe import Describer, Unspeakable, digest, find_named, name_of, named
from thunder.programs.operators import is_operation
from thunder.transforms.base import Transform
from thunder.transforms.constants import Constant

# of programs of several ranks; no text says them, and a process has its own
OBJECTS = (torch.distributed.ProcessGroup, Axis, Placement) if torch.distributed.is_available() else ()


class Damaged(Exception):
    """A file does not hold a program. The words say why."""


# ---------------------------------------------------------------------------------------------------------- to text


def written_text(trace: Trace, codes: dict[str, str], regions: dict[str, Callable]) -> dict:
    """The text of a computation, and the names of what it calls.

    codes: gets what Python compiles the text to, under the digest of the text. regions: functions of regions by name.
    """
    printer = Printer(print_depth=1)
    text = function_source(trace, printer, include_decorators=False)
    body = text[text.index("def ") :]
    objects = trace.info.objects | printer.context
    said = {"name": trace.name, "text": body, "objects": {n: written_object(x, regions) for n, x in objects.items()}}
    function = function_of(said, {"codes": {}, "regions": regions})  # what cannot be read again is not written
    keep_code(codes, body, function)
    return said


def keep_code(codes: dict[str, str], text: str, function: Callable) -> None:
    codes[digest(text)] = base64.b64encode(marshal.dumps(function.__code__)).decode()


def kept_code(codes: Mapping[str, str], text: str) -> types.CodeType | None:
    """What Python compiled a text to, in the process that wrote `codes`."""
    code = codes.get(digest(text))
    return None if code is None else marshal.loads(base64.b64decode(code))


def written_object(x: Any, regions: dict[str, Callable] | None = None) -> Any:
    """An object that a computation names, as another process finds it. Raises Unspeakable."""
    regions = regions or {}
    for name, function in regions.items():
        if function is x:
            return ["region", name]
    if isinstance(x, PerCall) and (name := name_of(x.shared)) is not None:
        return ["per call", *name]
    if isinstance(x, Constant) and x.trace is not None:
        return ["constant", written_text(x.trace, {}, regions)]
    operation = _operations().get(x) if type(x) is types.FunctionType and name_of(x) is None else None
    number: Any = x
    said = operation or (["number", number.item(), str(number.dtype)] if _is_number(x) else Describer()(x))
    value_now = _object_of(said, regions)
    if not _same(value_now, x):
        kind = "the function" if callable(x) else "an object"
        raise Unspeakable(f"an operation refers to {kind} {getattr(x, '__qualname__', type(x).__qualname__)}")
    if not _may_be_named(x):
        raise Unspeakable(
            f"a bound symbol calls {'.'.join(name_of(x) or (repr(x),))}, which is no operation of thunder's"
        )
    return said


def _same(value_now: Any, x: Any) -> bool:
    if type(value_now) is type(x) is functools.partial:
        return (
            value_now.func is x.func and len(value_now.args) == len(x.args) and all(map(_same, value_now.args, x.args))
        )
    return value_now is x or type(value_now) is type(x) and value_now == x


@functools.cache
def _operations() -> dict[Callable, list]:
    """Functions that carry out operations and have no name of their own, by the operation's."""
    tables = {"prims": PRIMS, "ltorch": LTORCH}
    return {s.fn: ["operation", n, name] for n, t in tables.items() for name, s in t.items() if s.fn is not None}


# -------------------------------------------------------------------------------------------------------- from text


def _object_of(said: Any, regions: Mapping[str, Callable]) -> Any:
    """The object that `written_object` has said; MISSING where there is none."""
    kind, *parts = said if isinstance(said, list) and said else (None,)
    if kind == "region" and len(parts) == 1:
        return regions.get(parts[0], MISSING)
    if kind == "operation" and len(parts) == 2:
        symbol = {"prims": PRIMS, "ltorch": LTORCH}.get(parts[0], {}).get(parts[1])
        return MISSING if symbol is None or symbol.fn is None else symbol.fn
    if kind == "per call" and len(parts) == 2 and str(parts[0]).startswith(("thunder.executors.", "thunder.ops.")):
        function = find_named(*map(str, parts))
        return function.for_call() if isinstance(function, PerCall) else MISSING
    if kind == "constant" and len(parts) == 1:
        return Constant(None, function_of(parts[0], {"codes": {}, "regions": regions}))
    return named(said)


def _imported(name: str, *others: Any) -> Any:
    """Modules that PyTorch's C++ code imports inside of an operation, which it does with the builtins of the caller."""
    module = sys.modules.get(name) if name.split(".")[0] == "torch" else None
    if module is None:
        raise ImportError(f"a program on disk imports {name}")
    return module


_BUILTINS = {"__import__": _imported}  # a text cannot name it
_ROOTS: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, "math": math}
_LITERALS: dict[str, Any] = {
    f.__name__: f
    for f in (float, complex, slice, set, int, abs, max, min, round)  # the latter of symbolic numbers
}
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_QUOTED = r"""b?'(?:[^'\\\n]|\\.)*'|b?"(?:[^"\\\n]|\\.)*"|\#[^\n]*"""
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?j?"
# a name before a quote would be a prefix: f"..." is code
_WORDS = re.compile(
    rf"(?>{_QUOTED}|{_NUMBER}|{_NAME}(?!['\"\w])|\.\.\.|[ \n]+|\\\n|[()\[\]{{}},:=*+\-/%<>!|&~;])*+", re.ASCII
)
_QUOTES, _NAMES = re.compile(_QUOTED, re.ASCII), re.compile(_NAME, re.ASCII)
_CALLED = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?=[ ]*(?:\\\n[ ]*)*\()", re.ASCII)
_KEYWORDS = {"def", "return", "del", "None", "True", "False", "not", "and", "or", "is", "pass"}
_BANNED = {*keyword.kwlist} - _KEYWORDS


NOTHING: Mapping[str, Mapping] = MappingProxyType({"codes": MappingProxyType({}), "regions": MappingProxyType({})})


def function_of(said: dict, trusted: Mapping[str, Mapping] = NOTHING) -> Callable:
    """The function of a computation's text. Raises Damaged where the text is none of a computation.

    trusted: `codes`, as `written_text` has filled them, and functions of `regions`. They are not looked into.
    """
    objects = objects_of(said["objects"], trusted["regions"])
    space = _LITERALS | _ROOTS | objects | {"__builtins__": _BUILTINS}
    if (code := kept_code(trusted["codes"], said["text"])) is not None:
        return compile_source(said["text"], said["name"], space, code)
    known = check_computation(said["text"], said["name"], objects)
    function = compile_source(said["text"], said["name"], space)
    code = function.__code__
    if any(isinstance(x, types.CodeType) for x in code.co_consts) or not known.issuperset(code.co_names):
        raise Damaged("its text is more than the statements of a program")
    return function


def check_computation(text: str, name: str, objects: dict[str, Any]) -> set[str]:
    """The names outside of a computation that its text may use. Raises Damaged where it is no computation's.

    It is one function, of names, literals and calls: no keywords but those of simple statements, and no attributes but
    those on the way to an operation. It is looked at as words, since making a syntax tree takes as long as capture.
    """
    if not text.startswith(f"def {name}(") or re.search(r"\n(?! )", text) or not _WORDS.fullmatch(text):
        raise Damaged("its text is not one function of plain statements")
    plain = _QUOTES.sub("0", text)
    words, known = _NAMES.findall(plain), {*objects, *_LITERALS}
    if words.count("def") != 1:
        raise Damaged("its text defines more than one function")
    for called in {*_CALLED.findall(plain)} - {name, *_KEYWORDS}:
        if not callable(objects.get(called, _LITERALS.get(called))):
            raise Damaged(f"its text calls {called}, which is no operation")
    for word in {*words}:
        root, *path = word.split(".")
        if word in _BANNED or root.startswith("__"):
            raise Damaged(f"its text has a word that programs do not have: {word}")
        if path:
            _check_dotted(word)
            known |= {root, *path}
    return known


def named_by(said: dict, regions: Mapping[str, Any]) -> list[Any]:
    """The objects that a text names, and what its dotted names stand for."""
    dotted = [word.split(".") for word in _NAMES.findall(_QUOTES.sub("0", said["text"])) if "." in word]
    functions = [functools.reduce(lambda x, name: getattr(x, name, None), path, _ROOTS[root]) for root, *path in dotted]
    return [*objects_of(said["objects"], regions).values(), *functions]


@functools.lru_cache(maxsize=4096)
def _check_dotted(word: str) -> None:
    """Raises Damaged where a dotted name is no operation and no constant of PyTorch's."""
    root, *path = word.split(".")
    if root not in _ROOTS:
        raise Damaged(f"its text asks a value for an attribute: {word}")
    value: Any = _ROOTS[root]
    for name in path:
        if name.startswith("_") and not _may_be_private(value, name):
            raise Damaged(f"its text names {word}")
        value = getattr(value, name, None)
    known = isinstance(value, _CONSTANTS) or value is torch.device
    if not known and not is_operation(value) and not _is_math(value):
        raise Damaged(f"its text names {word}, which is no operation")


def objects_of(said: dict[str, Any], regions: Mapping[str, Callable] = MappingProxyType({})) -> dict[str, Any]:
    """The objects that a text names. Raises Damaged for one that is not found."""
    objects = {}
    for name, what in said.items():
        objects[name] = x = _object_of(what, regions)
        if not name.isidentifier() or name.startswith("__") or name in _ROOTS or not _may_be_named(x):
            raise Damaged(f"its text names {what!r} {name}, which is no operation of thunder's here")
    return objects


def _may_be_named(x: Any) -> bool:
    if isinstance(x, (FusedFunction, Constant, Transform, *OBJECTS)):
        return True
    if type(x) is functools.partial:  # a derivative by PyTorch, of the function of an operation
        return not x.keywords and all(map(_may_be_named, (x.func, *x.args)))
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
        return is_operation(x)
    plain = (int, float, bool, str, complex, bytes, tuple, slice, torch.device, torch.Size, type(None))
    return type(x) in plain or isinstance(x, _CONSTANTS) or _is_number(x)


def _is_number(x: Any) -> bool:
    """Whether it is one of `transforms/number_operands.py`."""
    return type(x) is torch.Tensor and not x.dim() and x.device.type == "cpu" and math.isfinite(x.item())


def _may_be_private(owner: Any, name: str) -> bool:
    """Operations have private names in PyTorch, and so have two modules of them."""
    if owner is torch and name == "_C" or owner is compat.nn_bindings or name == "_nn":
        return True
    return isinstance(owner, type(torch.ops.aten)) or is_operation(getattr(owner, name, None))


def _is_math(x: Any) -> bool:
    return getattr(x, "__module__", None) == "math" or isinstance(x, float)


# --------------------------------------------------------------------------------------------------------- epilogues

_STATEMENTS = (ast.Assign, ast.Expr, ast.Delete, ast.Return, ast.Pass)
_EXPRESSIONS = (
    ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Call, ast.Attribute, ast.Subscript, ast.Slice,
    ast.keyword, ast.Starred, ast.UnaryOp, ast.BinOp, ast.USub, ast.UAdd, ast.Not, ast.Invert, ast.operator,
    ast.expr_context, ast.Compare, ast.cmpop,
)  # fmt: skip
_METHODS = {"__new__", "extend", "update", "clear", "append", "add", "set"}
_DUNDERS = {"__dict__", "__closure__", "__new__", "__kwdefaults__", "__qualname__", "__doc__", "__module__"}
_MAKING = (torch.Size, slice, types.MethodType, weakref.ref, frozenset, set, list, dict, collections.deque, id)


def epilogue_of(text: str, objects: dict[str, Any]) -> Callable:
    """The function of an epilogue's text. Raises Damaged where the text does more than build objects and write to
    them."""
    for node in ast.walk(_parsed(text)):
        if isinstance(node, (ast.FunctionDef, ast.arguments, ast.arg, *_STATEMENTS)):
            continue
        if not isinstance(node, _EXPRESSIONS):
            raise Damaged(f"its epilogue has an expression that epilogues do not have: {type(node).__name__}")
        if isinstance(node, ast.Attribute) and node.attr.startswith("__") and node.attr not in _DUNDERS:
            raise Damaged(f"its epilogue asks for {node.attr}")
        if isinstance(node, ast.Call):
            _check_call(node.func, objects)
            if isinstance(node.func, ast.Name) and objects.get(node.func.id) is in_grad_mode:
                _check_operation(node.args[1:2], objects)
    return compile_source(text, "epilogue", _LITERALS | objects | {"__builtins__": _BUILTINS})


def _parsed(text: str) -> ast.FunctionDef:
    """The one function that a text defines, without decorators and defaults."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Damaged(f"its epilogue is no Python: {error}") from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef) or tree.body[0].name != "epilogue":
        raise Damaged("its epilogue is not one function")
    function = tree.body[0]
    if function.decorator_list or ast.unparse(function.args) != "fn, args, kwargs, values":
        raise Damaged("its epilogue has decorators or other arguments")
    for statement in function.body:
        if not isinstance(statement, _STATEMENTS):
            raise Damaged(f"its epilogue has a statement that programs do not have: {type(statement).__name__}")
    return function


def _check_call(called: ast.expr, objects: dict[str, Any]) -> None:
    if isinstance(called, ast.Name) and (called.id == "set" or _may_build(objects.get(called.id))):
        return
    if not isinstance(called, ast.Attribute) or called.attr not in _METHODS:
        raise Damaged(f"its epilogue calls {ast.unparse(called)}")


def _check_operation(call: list[ast.expr], objects: dict[str, Any]) -> None:
    """Raises Damaged where a function that is called in a grad mode is none of PyTorch's, or of thunder's, on
    tensors."""
    function = objects.get(call[0].id) if call and isinstance(call[0], ast.Name) else None
    if not is_operation(function):
        raise Damaged(f"its epilogue calls {ast.unparse(call[0]) if call else 'nothing'}, which is no operation")


def _may_build(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        return x.__module__.startswith("thunder.")
    methods = (types.WrapperDescriptorType, types.MethodDescriptorType)
    return isinstance(x, methods) or any(x is known for known in (*_MAKING, *_NEW, setattr, delattr))


_NEW = (tuple.__new__, object.__new__, dict.__new__, list.__new__, set.__new__, collections.OrderedDict.__new__)
