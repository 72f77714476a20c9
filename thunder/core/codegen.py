"""From a trace to Python text, and from the text to a function.

The text that is printed is the program that runs: `Printer` writes both, with the decompositions as comments when they
are asked for.
"""

from __future__ import annotations

import enum
import itertools
import linecache
import math
import re
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from thunder.core.devices import Device
from thunder.core.dtypes import dtype
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, has_numbers, proxies_in, type_string

# how the modules that traces print are imported: printed name -> import line
IMPORTS = {
    "torch": "import torch",
    "ltorch": "import thunder.torch as ltorch",
    "prims": "import thunder.core.prims as prims",
    "Tensor": "from torch import Tensor",
    "dtypes": "import thunder.core.dtypes as dtypes",
    "devices": "import thunder.core.devices as devices",
    "math": "import math",
}

LONGEST = 256  # a longer list has a name in the text, which is not read for a thousand numbers

# how objects of a type are called in traces, where that says more than the type's name
OBJECT_NAMES: dict[type, Callable[[Any], str]] = {}


class Text:
    """A Python expression in the place of a value of a trace."""

    __slots__ = ("text",)

    def __init__(self, text: str):
        self.text = text


class PerCall(ABC):
    """A function of which each call in a program's text has one of its own: it keeps what it learns of the arguments.

    shared: the one that others are made of.
    """

    shared: PerCall

    @abstractmethod
    def for_call(self) -> Callable:
        """Another such function."""


_LITERALS = {int, str, bool, bytes, type(None)}
_CONTAINERS = {tuple, list, dict, slice}


class Printer:
    """Prints bound symbols, and collects the import lines of the text, and names for objects without a literal form.

    print_depth: 1 prints lines only, k prints k - 1 levels of decomposition as comments, -1 all of them. memory:
    whether to print what only frees memory, as the text that runs does. Without it the text is to be read: the types
    of all results and the user's line stand behind each operation, PyTorch's constants have their names.
    """

    def __init__(self, print_depth: int = -1, *, memory: bool = True):
        self.print_depth, self.memory = print_depth, memory
        self.imports: set[str] = {"import torch"}
        self.context: dict[str, Any] = {}
        self.variables: set[str] = set()  # names of the program's values, which no function may take
        self._modules: set[str] = set()  # whose imports are collected
        self._names: dict[Any, str] = {}
        self._taken: set[str] = set()
        self.layouts: Mapping[str, Mapping[Any, Any]] = {}  # of the program's values
        self._comment = False  # what only a comment names is neither imported nor passed in

    # --- values
    def value(self, x, prims: bool = False) -> str:
        """The Python expression for an argument; `prims` spells dtypes and devices as thunder's own."""
        t = type(x)
        if t is TensorProxy:
            return x.name
        if t in _LITERALS:
            return repr(x)
        if isinstance(x, Proxy):
            return x.name
        if isinstance(x, NumberProxy):
            text = x.name if x.name.isidentifier() else f"({x.expression})"
            if "math." in text and not self._comment:
                self.imports.add(IMPORTS["math"])
            return text
        if x is ...:
            return "..."
        if t is float or t is complex:
            return _number(x)
        if t in _CONTAINERS or t.__name__ == "Size":
            return self._container(x, prims)
        if t is dtype:
            return self._in_module("dtypes", x.name) if prims else f"torch.{x.torch_name}"
        if t is Device:
            return f'{self._in_module("devices", "Device")}("{x.name}")' if prims else f'torch.device("{x.name}")'
        if t is Text:
            return x.text
        if t.__module__ == "torch" and t.__name__ in ("dtype", "device"):
            return str(x) if t.__name__ == "dtype" else f'torch.device("{x}")'
        if isinstance(x, (tuple, list, dict)) and (has_numbers(x) or proxies_in(x, [])):
            plain = dict(x) if isinstance(x, dict) else tuple(x) if isinstance(x, tuple) else list(x)
            return f"{self.object(t)}{'._make' * hasattr(x, '_make')}({self.value(plain, prims)})"
        return self.object(x)

    def _container(self, x, prims: bool) -> str:
        if type(x) is dict:
            return "{" + ", ".join(f"{self.value(k, prims)}: {self.value(v, prims)}" for k, v in x.items()) + "}"
        if type(x) is slice:
            return f"slice({self.value(x.start, prims)}, {self.value(x.stop, prims)}, {self.value(x.step, prims)})"
        if type(x) is list and len(x) > LONGEST and {*map(type, x)} <= {int, float, bool, complex, str}:
            return self.object(x)
        inside = ", ".join([self.value(e, prims) for e in x])
        return f"[{inside}]" if type(x) is list else f"({inside},)" if len(x) == 1 else f"({inside})"

    def _in_module(self, module: str, name: str) -> str:
        if not self._comment:
            self.imports.add(IMPORTS[module])
        return f"{module}.{name}"

    def function(self, sym) -> str:
        """A bare name for the function of a symbol, its own where no other function has it."""
        return self.named(sym.name, sym.fn if self._comment or not isinstance(sym.fn, PerCall) else sym.fn.for_call())

    def named(self, stem: str, function: Callable) -> str:
        """A name for a function: `stem`, where nothing else in the text has it."""
        names = itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(1)))
        free = (n for n in names if n not in self.variables and n not in _BUILTINS)
        name = next(n for n in free if self.context.get(n, function) is function)
        if not self._comment:
            self.context[name] = function
        return name

    def object(self, x) -> str:
        """A name for an object without a literal form; the object itself is passed to the text by that name."""
        if not self.memory and getattr(sys.modules.get("torch"), str(x).removeprefix("torch."), None) is x:
            return str(x)  # torch.contiguous_format
        t = type(x)
        parameters = getattr(t, "__dataclass_params__", None)
        is_value = t in OBJECT_NAMES and parameters is not None and parameters.frozen and parameters.eq
        key = x if is_value else id(x)  # equal values have one name
        name = self._names.get(key)
        if name is None:
            if t in OBJECT_NAMES:
                stem = first = re.sub(r"\W", "_", OBJECT_NAMES[t](x))
            else:
                stem = f"_{t.__module__.split('.')[0]}_{t.__name__}" if t.__module__ != "builtins" else "_object"
                stem += f"_{x.name}" if isinstance(x, enum.Enum) else ""
                first = f"{stem}_0"
            names = itertools.chain([first], (f"{stem}_{i}" for i in itertools.count(1)))
            free = (n for n in names if n not in self._taken and n not in self.variables)
            known = ((n, self.context.get(n, x)) for n in free)
            name = next(n for n, other in known if other is x or is_value and other == x)
            self._names[key] = name
            self._taken.add(name)
        if not self._comment:
            self.context[name] = x
        return name

    def target(self, x) -> str:
        """The left-hand side for an output: containers as they are, `_` for values that are no proxies."""
        if isinstance(x, (tuple, list)):
            inside = ", ".join(map(self.target, x))
            return f"[{inside}]" if isinstance(x, list) else f"({inside},)" if len(x) == 1 else f"({inside})"
        return x.name if isinstance(x, Proxy) else "_"

    # --- lines
    def line(self, b, indent: int = 0, commented: bool = False) -> list[str]:
        """The text of one bound symbol and, as comments, of its decomposition."""
        if b.sym.python_printer is not None:
            return [("# " if commented else "") + text for text in b.sym.python_printer(b, self)]
        return self._lines(b, 1, commented)

    def _lines(self, b, depth: int, commented: bool) -> list[str]:
        text = self._assignment(b, commented)
        if not self.memory and not commented:
            text = self._for_readers(text, b)
        lines = [f"# {b.header}"] if b.header and not commented else []
        lines.append(f"# {text}" if commented else text)
        if self.print_depth == -1 or depth < self.print_depth:
            for sub in b.subsymbols:
                lines += ["  " + s for s in self._lines(sub, depth + 1, True)]
        return lines

    def _assignment(self, b, commented: bool) -> str:
        """The statement of a call: `t2 = torch.add(t0, t1)`. commented: for a comment."""
        sym = b.sym
        prims = sym.module == "prims"
        self._comment = commented
        arguments = [self.value(a, prims) for a in b.args]
        if b.kwargs:
            arguments += [f"{k}={self.value(v, prims)}" for k, v in b.kwargs.items()]
        call = f"{self.callee(sym)}({', '.join(arguments)})"
        if sym.condition is not None:
            return f"{sym.condition(b, self)} {call}"
        is_typed = self.memory or commented
        if type(b.output) is TensorProxy and is_typed:
            return f'{b.output.name} = {call}  # {b.output.name}: "{b.output._type_text()}"'
        if b.output is None or (not b.outputs and not isinstance(b.output, (tuple, list))):
            return call
        if _has_dict(b.output):  # which no left-hand side takes apart
            parts = [f"{p.name} = _result{path}" for p, path in _paths(b.output, "")]
            return "; ".join([f"_result = {call}", *parts, "del _result"])
        text = f"{self.target(b.output)} = {call}"
        if isinstance(b.output, TensorProxy) and is_typed:
            return f'{text}  # {b.output.name}: "{b.output._type_text()}"'
        return text

    def _for_readers(self, text: str, b) -> str:
        """A line with the types of all results, and the user's line and module."""
        types = [self.type_of(p) for p in b.outputs]
        parts = [
            ", ".join(f"{t}" if n == 1 else f"{n} x {t}" for t, n in _runs(types)),
            getattr(b.location, "short", ""),
        ]
        comment = " | ".join(filter(None, parts))
        return f"{text}  # {comment}" if comment else text

    def type_of(self, p) -> str:
        """A value's type, and how ranks hold it."""
        layout = ", ".join(f"{axis}: {one}" for axis, one in self.layouts.get(p.name, {}).items())
        return f"{type_string(p)} {{{layout}}}" if layout else type_string(p)

    def callee(self, sym) -> str:
        """How the symbol's function is written, with its import or object remembered unless it stands in a comment."""
        if sym.module is None:
            return self.function(sym)
        if not self._comment and sym.module not in self._modules:
            self._modules.add(sym.module)
            root = sym.module.split(".")[0]
            self.imports.add(IMPORTS.get(sym.module) or IMPORTS.get(root) or f"import {sym.module}")
            # torch.ops makes its attributes when they are asked for
            if "." in sym.module and not sym.module.startswith("torch.ops"):
                self.imports.add(f"import {sym.module}")
        return f"{sym.module}.{sym.name}"


def _runs(items: list[str]) -> list[tuple[str, int]]:
    """Each item with the number of times that it stands there in a row."""
    return [(item, len(list(same))) for item, same in itertools.groupby(items)]


def _wrapped(items: list[str], opening: str, closing: str) -> list[str]:
    """`opening`, the items, `closing`: on one line, or else on as few lines as 120 columns allow."""
    if len(line := f"{opening}{', '.join(items)}{closing}") <= 120:
        return [line]
    lines, line = [opening], "   "
    for item in items:
        if len(line) + len(item) + 2 > 120:
            lines.append(line)
            line = "   "
        line += f" {item},"
    return [*lines, line, closing]


def _has_dict(x) -> bool:
    return isinstance(x, dict) or isinstance(x, (tuple, list)) and any(map(_has_dict, x))


def _paths(x, path: str) -> list[tuple[Proxy, str]]:
    """The proxies in a structure, each with the subscripts that lead to it."""
    if isinstance(x, Proxy):
        return [(x, path)]
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (tuple, list)) else ()
    return [paths for k, v in items for paths in _paths(v, f"{path}[{k!r}]")]


_BUILTINS = {"float", "complex", "slice"}  # which literals are written with


def _number(x) -> str:
    if isinstance(x, complex):
        return f"complex({_number(x.real)}, {_number(x.imag)})"
    return repr(x) if math.isfinite(x) else f'float("{x}")'


def _import_key(line: str) -> tuple:
    words = line.split()
    return (words[1], words[0] != "from", line)


def function_source(trace, printer: Printer, include_decorators: bool = True) -> str:
    """The whole text of a trace: header line, imports, decorators, signature, argument comments, lines, return."""
    printer.variables = {p.name for p in trace.args} | {o.name for b in trace.bound_symbols for o in b.outputs}
    printer.layouts = trace.info.layouts
    body = []
    for b in trace.bound_symbols:
        body += ["  " + s for s in printer.line(b)]
    result = f"  return {printer.value(trace.output)}"
    if not printer.memory and (names := trace.info.cotangents):
        body, result = [_renamed(line, names) for line in body], _renamed(result, names)
    head = [f"# {trace.provenance}"] if trace.provenance else []
    imports = sorted(printer.imports, key=_import_key)
    include_decorators = include_decorators and not trace.signature  # prologues and epilogues are not computations
    if include_decorators:
        imports.append("from thunder.executors.torchex import no_autocast")
    decorators = ["@torch.no_grad()", "@no_autocast"] if include_decorators else []
    if printer.memory or trace.signature:
        signature = [f"def {trace.name}({trace.signature or ', '.join(a.name for a in trace.args)}):"]
        signature += [f'  # {a.name}: "{type_string(a)}"' for a in trace.args]
    else:
        signature = _wrapped([f'{a.name}: "{printer.type_of(a)}"' for a in trace.args], f"def {trace.name}(", "):")
    return "\n".join([*head, *imports, "", *decorators, *signature, *body, result])


def _renamed(line: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\bt\d+\b", lambda match: names.get(match[0], match[0]), line)


def line_owners(trace) -> dict[int, Any]:
    """Line number of the compiled text of a trace -> the bound symbol it belongs to."""
    printer = Printer(print_depth=1)
    body = [(text, b) for b in trace.bound_symbols for text in printer.line(b)]
    source = function_source(trace, Printer(print_depth=1), include_decorators=False).split("\n")
    first = len(source) - len(body) - 1
    return {first + i + 1: b for i, (_, b) in enumerate(body)}


def failing_line(function: Callable, traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The entry of a traceback for the operation of a program that raised, None where none did. A launch loop has two
    entries, the second of which is the operation's."""
    file = function.__code__.co_filename  # type: ignore[attr-defined]
    while traceback is not None and traceback.tb_frame.f_code.co_filename != file:
        traceback = traceback.tb_next
    while traceback is not None and (behind := traceback.tb_next) and behind.tb_frame.f_code.co_filename == file:
        traceback = behind
    return traceback


_serial = itertools.count()


def compile_source(source: str, name: str, context: dict[str, Any], code: types.CodeType | None = None) -> Callable:
    """The function called `name` that `source` defines, with `context` as its globals.

    Its text is in linecache for tracebacks and debuggers for as long as the function lives. code: what the text was
    compiled to before.
    """
    filename = f"<thunder {name} {next(_serial)}>"
    space = dict(context)
    # first: a decorator may ask for the text, as Triton's does
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    try:
        if code is None:
            code = compile(source, filename, "exec")
            exec(code, space)
            function = space.pop(name)  # its globals do not hold it: it would wait for the garbage collector
        else:
            function = types.FunctionType(code.replace(co_filename=filename), space)
    except BaseException:
        del linecache.cache[filename]
        raise
    weakref.finalize(function, linecache.cache.pop, filename, None)
    for root in _LOOKED_UP & space.keys():
        space[root] = _linked(space[root], code)
    return function


_LOOKED_UP = {"torch", "Tensor"}


def _linked(module: Any, code: types.CodeType) -> types.ModuleType:
    """The attributes of a module that some code names, in a module of their own: CPython remembers the place of such
    an attribute, but not where the module has a `__getattr__`, as PyTorch's, or is a class."""
    linked, pending = types.ModuleType(module.__name__), [code]
    for code in pending:
        pending += [x for x in code.co_consts if type(x) is types.CodeType]
        vars(linked).update((n, getattr(module, n)) for n in code.co_names if hasattr(module, n))
    return linked
