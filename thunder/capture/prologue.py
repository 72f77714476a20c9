"""Guards, and the prologue: straight-line Python that says whether a compiled program fits a call.

It returns the computation's inputs as a tuple, or a str that says in words why the program does not fit. Nothing in it raises to decide.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thunder import _torch_compat as compat
from thunder.capture.native import CONTAINERS, IMMUTABLE, PRIMITIVE, container_base, plain_base
from thunder.capture.sources import Source
from thunder.core.codegen import Printer, Text, compile_source
from thunder.core.symbol import BoundSymbol, Names, Symbol
from thunder.core.trace import Trace
from thunder.interpreter.attributes import type_attribute
from thunder.ops.opaque_values import metadata

__all__ = ["PrologueWriter"]


CACHED = 32  # dicts that are not worth looking at before they are read
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class _Missing:
    """What is read where nothing is."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def _print_text(line: BoundSymbol, printer: Printer) -> list[str]:
    printer.context.update(line.kwargs["objects"])
    return line.kwargs["text"]


_SYMBOLS: dict[str, Symbol] = {}


def check_symbol(kind: str) -> Symbol:
    """The primitive of a kind of prologue line; its text is made when the line is."""
    symbol = _SYMBOLS.get(kind)
    if symbol is None:
        symbol = _SYMBOLS[kind] = Symbol(kind, module="prims", is_prim=True, python_printer=_print_text)
    return symbol


def _literal(v) -> bool:
    return type(v) in (int, str, bool, type(None), bytes) or (type(v) is float and v == v and abs(v) != float("inf"))


def say(value) -> str:
    """A value in a reason: short, tensors by their metadata."""
    if isinstance(value, torch.Tensor):
        return f"{value.device} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def was_is(path: str, was: str, now) -> str:
    return f"{path} was {was}, is {say(now)}"


def describe_tensor_miss(expected: list[tuple[str, dict]], values: tuple) -> str | None:
    """The first tensor that is not what it was, and how it differs."""
    for (path, was), value in zip(expected, values, strict=True):
        if not isinstance(value, torch.Tensor):
            return f"{path} was a tensor, is {say(value)}"
        if type(value) is not was["type"]:
            return f"{path} was a {was['type'].__name__}, is a {type(value).__name__}"
        if len(value.shape) != len(was["shape"]):
            return f"{path} had {len(was['shape'])} dimensions, has {len(value.shape)}"
        for i, (a, b) in enumerate(zip(was["shape"], value.shape, strict=True)):
            if a is not None and a != b:
                return f"{path}.shape[{i}] was {a}, is {b}"
        for name in ("dtype", "device", "requires_grad"):
            if getattr(value, name) != was[name]:
                return f"{path}.{name} was {was[name]}, is {getattr(value, name)}"
        for name in ("is_conj", "is_neg", "is_inference"):
            if getattr(value, name)() != was[name]:
                return f"{path}.{name}() was {was[name]}, is {not was[name]}"
        if value.layout is not was["layout"]:
            return f"{path}.layout was {was['layout']}, is {value.layout}"
    return None  # the batched check wants tensors to be distinct; one tensor in two places is fine


def written(name: str, signature: str, lines: list[BoundSymbol], result: str | tuple[Text, ...], names: Names, objects: dict) -> tuple[Trace, Callable]:
    """A program whose lines are text: the trace that shows it, and the function."""
    trace = Trace(name, (), lines, result if isinstance(result, tuple) else Text(result), names, signature=signature, tables={"objects": objects})
    if isinstance(result, tuple):
        result = Printer().value(result)
    body = [f"  {text}" for line in lines for text in line.kwargs["text"]]
    source = "\n".join([f"def {name}({signature}):", *body, f"  return {result}"])
    trace._callable = compile_source(source, name, objects)
    return trace, trace._callable


class PrologueWriter:
    """Turns the guards of a capture into prologue lines."""

    def __init__(self, capture):
        self.capture = capture
        self.objects: dict[str, Any] = dict(_SPOKEN)
        self.variables: dict[Source, str] = {}
        self.lines: list[BoundSymbol] = []
        self.names = Names()
        self.names.taken |= {"fn", "args", "kwargs", "error", "reason", "check_tensor_metadata", "apart", *_SPOKEN}
        self.pins: dict[int, str] = {}
        self.weak: list[weakref.ref] = []  # what must be alive for the program to fit any call
        self.outside = {source: capture.keep.get(i) for i, source in capture.sources.items()}
        self.held = {id(v) for v in capture.constants.values()}

    # --- text
    def pin(self, value, stem: str = "C") -> str:
        name = self.pins.get(id(value))
        if name is None:
            name = self.pins[id(value)] = self.names.make(stem)
            self.objects[name] = value
        return name

    def _is_weak(self, value) -> bool:
        """Modules that are not part of the compiled one, and closures, come and go: an entry does not keep them alive."""
        if isinstance(value, torch.nn.Module):
            return id(value) not in self.capture.rooted
        if id(value) in self.capture.passing:
            return True
        return type(value) is types.FunctionType and value.__closure__ is not None and id(value) not in self.held

    def weak_pin(self, value) -> str:
        name = self.names.make("W")
        reference = self.objects[name] = weakref.ref(value)
        self.weak.append(reference)
        return name

    def emit(self, kind: str, *text: str, comment: str = "") -> None:
        if comment:
            text = (f"# {comment}", *text)
        self.lines.append(BoundSymbol(check_symbol(kind), (), {"text": list(text), "objects": {}}, None, inputs=(), outputs=()))

    def miss(self, kind: str, condition: str, reason: str) -> None:
        """A check; `reason` is a Python expression."""
        self.emit(kind, f"if {condition}: return {reason}")

    def describe(self, source: Source) -> str:
        return source.describe(self.capture.parameters)

    def literal(self, value) -> str:
        return repr(value) if _literal(value) else self.pin(value)

    def variable(self, source: Source) -> str:
        """The variable that holds what is at a source; it is read at its first mention."""
        pinned = self.capture.pinned.get(source)
        if pinned is not None and source.step != "const":
            return self.pin(pinned, "M")
        if source.base is None:
            return self.pin(self.capture.constants[source.key]) if source.step == "const" else source.key
        name = self.variables.get(source)
        if name is None:
            read = self.read(source)
            name = self.variables[source] = self.names.claim(source.name(self.capture.parameters))
            self.emit("unpack", f"{name} = {read}", comment=self.describe(source) if source.root.key == "fn" else "")
        return name

    def read(self, source: Source) -> str:
        base, key = source.base, source.key
        replaced = self.capture.replaced_sources.get(source)
        if replaced is not None:
            return f"{self.pin(replaced[0], 'D')}.get({replaced[1]!r}, MISSING)"
        table = self.table(source)
        if table is not None:
            return f"{self.pin(table, 'D')}.get({key!r}, MISSING)"
        if self.in_dict(source):
            return f"{self.variable(base.attr('__dict__'))}.get({key!r}, MISSING)"
        if source.step == "item" and base.step == "attr" and base.key in _MODULE_TABLES:
            return f"{self.variable(base)}.get({key!r}, MISSING)"
        if source.step == "attr" and key == "__dict__":
            return f"{self.variable(base)}.__dict__"
        b = self.variable(base)
        if source.step == "item" and base.step == "const" and isinstance(self.capture.constants[base.key], dict):  # a global
            return f"{b}.get({key!r}, MISSING)"
        if source.step == "attr":
            return f"getattr({b}, {key!r}, MISSING)"
        if source.step == "cell":
            return f"{self.pin(cell_reader(key), 'cell')}({b})"
        if source.step == "call":
            return f"{self.pin(called, 'called')}({b}, {self.pin(key)})"
        if source.step == "size":
            return f"{b}.shape[{key}]"
        if source.step == "keyed":
            return f"{b}.get({self.variable(key)}, MISSING)"
        base_type = self.base_type(base)
        if source in self.capture.dict_items:
            return f"{b}.get({self.literal(key)}, MISSING)" if base_type is None else f"{self.pin(base_type.get, 'get')}({b}, {self.literal(key)}, MISSING)"
        return f"{b}[{self.literal(key)}]" if base_type is None else f"{self.pin(base_type.__getitem__, 'get')}({b}, {self.literal(key)})"

    def base_type(self, source: Source) -> type | None:
        """The builtin container under a subclass of the user's, whose own methods are not to be called; None for the builtins themselves."""
        kind = self.capture.guards.get((source, "type", None))
        if kind in CONTAINERS or not isinstance(kind, type):
            return None
        return container_base(kind)

    # --- the checks
    def write(self) -> tuple[Trace, Callable]:
        self._call_shape()
        self._overrides()
        self._namespaces()
        self._hooks()
        for (source, kind, _), want in self._module_entries():
            self._guard(source, kind, want)
        self._functions()
        self._tensors()
        self._tensor_hooks()
        self._apart()
        self._numbers()
        self._distinct()
        self._backends()
        self._questions()
        return self._returning_inputs()

    def write_extraction(self) -> tuple[Trace, Callable]:
        """A prologue that checks nothing: it only finds the computation's inputs again."""
        return self._returning_inputs()

    def _returning_inputs(self) -> tuple[Trace, Callable]:
        inputs = tuple(Text(self._input(s)) for s in self.capture.input_sources)
        return written("prologue", "fn, args, kwargs", self.lines, inputs, self.names, self.objects)

    def _input(self, source: Source) -> str:
        """An input of the computation. What a torch.func transform that has ended left behind stands for the tensor in it, as for eager's operations."""
        tensor, v = self.capture.tensor_guards.get(source, (None,))[0], self.variable(source)
        return v if tensor is None or (unwrap := compat.unwrap_of(tensor)) is None else f"{self.pin(unwrap, 'unwrap')}({v})"

    def _call_shape(self) -> None:
        capture = self.capture
        self.miss("check_len", f"len(args) != {len(capture.args)}", f"was_is('the number of positional arguments', '{len(capture.args)}', len(args))")
        if capture.kwargs:
            keys = self.pin(frozenset(capture.kwargs), "keys")
            self.miss("check_keys", f"kwargs.keys() != {keys}", f"was_is('the set of keyword arguments', {str(sorted(capture.kwargs))!r}, sorted(kwargs))")
            if len(capture.kwargs) > 1 and takes_keywords(capture.fn):
                order = tuple(capture.kwargs)
                self.miss("check_order", f"tuple(kwargs) != {self.pin(order, 'order')}", f"was_is('the order of keyword arguments', {str(list(order))!r}, list(kwargs))")
        else:
            self.miss("check_empty", "kwargs", "was_is('the set of keyword arguments', '[]', sorted(kwargs))")

    def _backends(self) -> None:
        """Attention may use what it might when its kernels were chosen."""
        names = self.capture.recorder.context.names
        if names.attends:
            self.miss("check_backends", f"backends() != {self.pin(names.backends)}", "'the backends that scaled_dot_product_attention may use are others than before'")

    def _questions(self) -> None:
        """PyTorch's settings that the program asked for are what they were; not those that it changed itself meanwhile."""
        for (f, n), answer in self.capture.questions.items():
            asked = f"{self.pin(f, 'ask')}()" if n is None else f"{self.pin(f, 'settings')}.{n}"
            path = f"{f.__name__}()" if n is None else f"{getattr(f, '__name__', type(f).__name__)}.{n}"
            if same_value(f() if n is None else getattr(f, n), answer):
                self.miss("check_setting", f"{asked} != {answer!r}", f"was_is({path!r}, {str(answer)!r}, {asked})")

    def _overrides(self) -> None:
        """The parameters that transforms put in the place of the module's own are those that they were."""
        for table in self.capture.overrides:
            t = self.pin(table, "D")
            condition = f"list({t}) != {self.pin(list(table), 'names')}" if table else t
            self.miss("check_overrides", condition, "'other parameters of the compiled module are replaced than before'")

    def _namespaces(self) -> None:
        """Functions, classes and modules found by name: one batched identity check for each namespace."""
        for space, label, names in self.capture.namespaces.values():
            keys, want = tuple(names), self.pin(tuple(names.values()), "want")
            getter = operator.attrgetter(*keys) if isinstance(space, type) else operator.itemgetter(*keys)
            get, where = self.pin(getter, "get"), self.pin(space, "space")
            if len(keys) == 1:
                want = self.pin(names[keys[0]], "want")
            self.emit(
                "check_names", "try:", f"  if {get}({where}) != {want}: return changed({where}, {self.pin(keys, 'names')}, {want}, {label!r})",
                f"except absent as error: return f'{label}{{error}} is gone'",
            )  # fmt: skip

    def table(self, source: Source) -> dict | None:
        """The dict of a pinned module that holds what is at a source: its attributes, parameters, buffers or children."""
        base, pinned = source.base, self.capture.pinned
        if source.step == "item" and base.step == "attr" and base.key in _MODULE_TABLES and base.base in pinned:
            return pinned[base.base].__dict__[base.key]
        if source.step == "attr" and base in pinned and source.key in pinned[base].__dict__:
            return pinned[base].__dict__
        return None

    def in_dict(self, source: Source) -> bool:
        """Whether an attribute was read from its object's own `__dict__`: it is checked there, without the class's `__getattribute__`."""
        owner = self.outside.get(source.base)
        if owner is None or source.step != "attr" or source.key == "__dict__":
            return False
        return source.key in getattr(owner, "__dict__", ()) and not hasattr(type(type_attribute(type(owner), source.key)), "__set__")

    def _module_entries(self) -> list[tuple]:
        """What was read in the compiled module, in two checks for all of it: entries of the modules' dicts, by identity first, and names that are not there.

        Returns the other guards.
        """
        entries, absent, rest = [], [], []
        groups: dict[Source, list] = {}
        for (source, kind, other), want in self.capture.guards.items():
            found = self.table(source) if kind in ("is", "value") and not self._is_weak(want) else None
            if found is not None and source.key in found:
                entries.append((found, source.key, want, source))
            elif kind == "value" and self.in_dict(source):
                group = groups.get(source.base)
                if group is None:
                    group = groups[source.base] = []
                    rest.append(((source.base, "entries", None), group))
                group.append((None, source.key, want, source))
            elif kind == "nodict" and source in self.capture.pinned:
                absent += [(self.capture.pinned[source].__dict__, n, None, source.attr(n)) for n in want]
            else:
                rest.append(((source, kind, other), want))
        modules = tuple(self.capture.pinned.values())
        tables = {id(table): table for table, *_ in (*entries, *absent)}
        if len(tables) > CACHED:
            self.emit("look_at", f"list({self.pin((*tables.values(), *modules), 'read')})", comment="what is read next comes from memory together, where it is in no cache")
        for kind, rows in (("check_module_entries", entries), ("check_absent", absent)):
            if rows:
                self._in_one_check(kind, rows)
        if modules:
            m, t = self.pin(modules, "modules"), self.pin(tuple(map(type, modules)), "types")
            self.miss("check_type", f"not all(map(is_, map(type, {m}), {t}))", "'a module is of another class than before'")
        return rest

    def _guard_entries(self, source: Source, path: str, want: list) -> None:
        self._in_one_check("check_entries", want, f"repeat({self.variable(source.attr('__dict__'))})")

    def _in_one_check(self, kind: str, rows: list[tuple], table: str = "") -> None:
        """One line that checks entries of dicts: each row says its dict, or `table` is an expression for those of all."""
        tables, keys, values, sources = zip(*rows, strict=True)
        t, k = table or self.pin(tables, "tables"), self.pin(keys, "keys")
        owners: dict[str, list] = {}
        for s in sources:
            owner, _, name = self.describe(s).rpartition(".")
            owners.setdefault(owner, []).append(name)
        comments = [f"# {owner}: {', '.join(dict.fromkeys(names))}" for owner, names in owners.items()]
        paths = self.pin(tuple(map(self.describe, sources)), "paths")
        if kind == "check_absent":
            condition = f"if True in map(contains, {t}, {k}): return next(p for d, n, p in zip({t}, {k}, {paths}) if n in d) + ' exists now'"
            self.emit(kind, *comments, condition)
            return
        v = self.pin(values, "values")
        self.emit(
            kind, *comments, "try:", f"  if not all(map(is_, map(getitem, {t}, {k}), {v})) and (reason := changed_entry({t}, {k}, {v}, {paths})): return reason",
            f"except gone: return changed_entry({t}, {k}, {v}, {paths})",
        )  # fmt: skip

    def _functions(self) -> None:
        """Functions that were interpreted still have their code, and those whose defaults were used their defaults."""
        pinned, passing = [], []
        for f, used in self.capture.functions.values():
            (passing if self._is_weak(f) and id(f) in self.capture.function_sources else pinned).append((f, used))
        for attribute, what, only_used in (("__code__", "the code", False), ("__defaults__", "a default argument", True)):
            functions = tuple(f for f, used in pinned if used or not only_used)
            getter = operator.attrgetter(attribute)
            if functions:
                get, names, want = self.pin(getter, "get"), self.pin(functions, "functions"), self.pin(tuple(map(getter, functions)), "want")
                self.miss(f"check_{attribute.strip('_')}", f"not all(map(is_, map({get}, {names}), {want}))", f"changed_function({get}, {names}, {want}, {what!r})")
            for f, used in passing:  # a closure that an argument holds: it is found there, and not kept alive
                if used or not only_used:
                    v = self.variable(self.capture.function_sources[id(f)])
                    reason = f"{what} of {f.__qualname__} changed"
                    self.miss(f"check_{attribute.strip('_')}", f"getattr({v}, {attribute!r}, MISSING) is not {self.pin(getter(f))}", repr(reason))
        for space, names in self.capture.builtins.values():
            where = self.pin(space, "space")
            self.miss("check_builtins", f"not {where}.keys().isdisjoint({self.pin(tuple(names), 'names')})", f"shadowed({where}, {self.pin(tuple(names), 'names')})")

    def _guard_stride(self, source: Source, path: str, want) -> None:
        v = self.variable(source)
        self.miss("check_stride", f"{v}.stride() != {want}", f"was_is({path + '.stride()'!r}, {str(want)!r}, {v}.stride())")

    def _guard_offset(self, source: Source, path: str, want) -> None:
        v = self.variable(source)
        self.miss("check_offset", f"{v}.storage_offset() != {want}", f"was_is({path + '.storage_offset()'!r}, '{want}', {v}.storage_offset())")

    def _answers(question: str):  # noqa: N805  makes a method
        def guard(self, source: Source, path: str, want) -> None:
            asked = f"{self.variable(source)}.{question}()"
            self.miss(f"check_{question}", f"{asked} != {want}", f"was_is({f'{path}.{question}()'!r}, '{want}', {asked})")

        return guard

    _guard_is_conj, _guard_is_neg, _guard_is_pinned, _guard_is_shared = map(_answers, ("is_conj", "is_neg", "is_pinned", "is_shared"))
    _guard_data_ptr, _guard_is_inference = map(_answers, ("data_ptr", "is_inference"))

    def _guard_array(self, source: Source, path: str, want) -> None:
        self.miss("check_array", f"not same_array({self.variable(source)}, {self.pin(want)})", f"{f'the numpy array {path} changed'!r}")

    def _guard_metadata(self, source: Source, path: str, want) -> None:
        v = self.variable(source)
        self.miss("check_metadata", f"not isinstance({v}, {self.pin(torch.Tensor)}) or metadata({v}) != {self.pin(want)}", f"{f'what kind of tensor {path} is changed'!r}")

    def _hooks(self) -> None:
        hooks = self.capture.hook_dicts
        if hooks:
            self.miss("check_hooks", f"any({self.pin(tuple(hooks), 'hooks')})", "'a module has hooks now'")

    def _tensor_hooks(self) -> None:
        """The tensors that a backward inside of the program reaches have no hooks, which it would not call."""
        capture = self.capture
        if capture.engine.hooked:
            variables = [self.variable(capture.real[p][1]) for p in capture.engine.hooked]
            self.miss("check_hooks", f"hooked(({', '.join(variables)},))", "'a tensor whose gradient is computed has hooks now'")

    def _guard(self, source: Source, kind: str, want) -> None:
        path = self.describe(source)
        method = getattr(self, f"_guard_{kind}", None)
        if method is not None:
            method(source, path, want)
            return
        if kind == "is" and self._is_weak(want):
            v = self.variable(source)
            self.miss("check_is", f"{v} is None or {v} is not {self.weak_pin(want)}()", f"{path + ' is another object than before'!r}")
            return
        if kind == "is":
            v = self.read(source) if source in self.capture.pinned else self.variable(source)
            self.miss("check_is", f"{v} is not {self.pin(want, 'M')}", f"{path + ' is another object than before'!r}")
            return
        v = self.variable(source)
        if kind == "type":
            self.miss("check_type", f"type({v}) is not {self.pin(want)}", f"{path + f' was of type {want.__name__}, is of type '!r} + type({v}).__name__")
        elif kind == "same":
            self.miss("check_same", f"{v} is not {self.variable(want)}", f"{path + ' and ' + self.describe(want) + ' were one object'!r}")
        elif kind == "isnot":
            self.miss("check_distinct", f"{v} is {self.variable(want)}", f"{path + ' and ' + self.describe(want) + ' became one object'!r}")
        elif kind == "shares":
            real, other = (self.capture.tensor_guards[s][0] for s in (source, want))
            offset = real.storage_offset() - other.storage_offset()
            condition = f"not share({v}, {self.variable(want)}, {tuple(real.stride())}, {tuple(other.stride())}, {offset})"
            self.miss("check_shared", condition, f"{path + ' and ' + self.describe(want) + ' shared memory in another way'!r}")
        elif kind == "len":
            length = f"len({v})" if (base := self.base_type(source)) is None else f"{self.pin(base.__len__, 'length')}({v})"
            self.miss("check_len", f"{length} != {want}", f"was_is({f'len({path})'!r}, '{want}', {length})")
        elif kind == "keys":
            keys = v if (base := self.base_type(source)) is None else f"{self.pin(base.keys, 'keys')}({v})"
            self.miss("check_keys", self._other_elements(keys, want), f"{f'the keys of {path} changed'!r}")
        elif kind == "set":
            self.miss("check_elements", self._other_elements(v, want), f"{f'the elements of {path} changed'!r}")

    def _other_elements(self, found: str, want: tuple) -> str:
        if all(type(x) is str for x in want):
            return f"tuple({found}) != {self.pin(want)}"
        return f"not same_elements(tuple({found}), {self.pin(want)})"

    def _guard_plain(self, source: Source, path: str, want) -> None:
        v = self.variable(source)
        self.miss("check_value", f"not same_value({v}, {self.pin(want)})", f"was_is({path!r}, {say(want)!r}, {v})")

    def _guard_value(self, source: Source, path: str, want) -> None:
        v = self.variable(source)
        reason = f"was_is({path!r}, {say(want)!r}, {v})"
        if want is None or type(want) in (bool, torch.dtype, torch.layout, torch.memory_format) or want is ... or want is NotImplemented:
            self.miss("check_literal_like", f"{v} is not {self.literal(want)}", reason)
        elif type(want) is float and want != want:
            self.miss("check_number", f"type({v}) is not float or {v} == {v}", reason)
        elif isinstance(want, (tuple, range, slice, complex, *IMMUTABLE)):
            self.miss("check_value", f"not same_value({v}, {self.pin(want)})", reason)
        else:
            kind = "check_string_value" if type(want) is str else "check_number_type_and_value" if type(want) in (int, float) else "check_value"
            self.miss(kind, f"type({v}) is not {self.pin(type(want))} or {v} != {self.literal(want)}", reason)
            if type(want) is float and want == 0.0:  # 0.0 and -0.0 are equal
                self.miss("check_number", f"str({v}) != {str(want)!r}", reason)

    def _guard_nodict(self, source: Source, path: str, want) -> None:
        v = self.variable(source)
        condition = f"{next(iter(want))!r} in {v}.__dict__" if len(want) == 1 else f"not {v}.__dict__.keys().isdisjoint({self.pin(tuple(want))})"
        self.miss("check_absent", condition, f"{f'one of {list(want)} was set on {path}'!r}")

    def _guard_empty(self, source: Source, path: str, want) -> None:
        self.miss("check_absent", f"{self.variable(source)} is not MISSING", f"{path + ' exists now'!r}")

    def _guard_noattr(self, source: Source, path: str, want) -> None:
        v, n, owner = self.variable(source.base), source.key, self.outside.get(source.base)
        if owner is None or isinstance(owner, type) or hasattr(type(owner), n):  # a slot or a descriptor that holds nothing
            condition = f"hasattr({v}, {n!r})"
        else:  # a class's own __getattribute__ is left out, as the capture interpreted it
            condition = f"hasattr(type({v}), {n!r})"
            if hasattr(owner, "__dict__"):
                condition = f"{n!r} in {self.variable(source.base.attr('__dict__'))} or {condition}"
        self.miss("check_absent", condition, f"{path + ' exists now'!r}")

    def _guard_nomember(self, source: Source, path: str, want) -> None:
        v, n = self.variable(source.base), source.key
        tables = " or ".join(f"{n!r} in {v}.{table}" for table in ("__dict__", "_parameters", "_buffers", "_modules"))
        self.miss("check_absent", f"{tables} or hasattr(type({v}), {n!r})", f"{path + ' exists now'!r}")

    def _guard_absent(self, source: Source, path: str, want) -> None:
        self.miss("check_absent", f"{self._key(source)} in {self.variable(source.base)}", f"{path + ' exists now'!r}")

    def _guard_present(self, source: Source, path: str, want) -> None:
        self.miss("check_present", f"{self._key(source)} not in {self.variable(source.base)}", f"{path + ' is gone'!r}")

    def _key(self, source: Source) -> str:
        return self.variable(source.key) if source.step == "keyed" else self.literal(source.key)

    def _tensors(self) -> None:
        """All tensors in one batch: type, dtype, device, shape, requires_grad."""
        capture = self.capture
        if not capture.tensor_guards:
            return
        variables = [self.variable(s) for s in capture.tensor_guards]
        expected, tensors, sizes = [], [], []
        for source, (tensor, shape) in capture.tensor_guards.items():
            was = {"type": type(tensor), "shape": shape, "dtype": tensor.dtype, "device": tensor.device, "requires_grad": tensor.requires_grad}
            was |= {"is_conj": tensor.is_conj(), "is_neg": tensor.is_neg(), "is_inference": tensor.is_inference(), "layout": tensor.layout}
            expected.append((self.describe(source), was))
            tensors.append(tensor)
            sizes.append(shape)
        self.objects["check_tensor_metadata"] = compat.tensor_batch_check(tensors, sizes)
        inside = ", ".join(variables)
        self.miss("check_tensor_metadata", f"not check_tensor_metadata({inside}) and (reason := why({self.pin(expected, 'expected')}, ({inside},)))", "reason")

    def _apart(self) -> None:
        """What is written to shares no memory with anything else that is passed in."""
        capture = self.capture
        if not capture.mutated:
            return
        same = {s for s, kind, _ in capture.guards if kind in ("same", "shares")}
        groups: dict[tuple, list] = {(w, m): [] for w in (True, False) for m in (True, False)}
        for proxy, (_, source) in capture.real.items():
            if proxy in capture.used and source not in same and source in capture.tensor_guards:
                groups[proxy in capture.mutated, source.root.key not in ("args", "kwargs")].append(self.variable(source))
        self.objects["apart"] = Apart()
        arguments = [f"({', '.join(found)}{',' * (len(found) == 1)})" for found in groups.values()]
        self.miss("check_apart", f"not apart({', '.join(arguments)})", "'what is written to shares memory with another tensor now'")

    def _numbers(self) -> None:
        """Relations between symbolic numbers that the program decided by."""
        for (a, relation, b), outcome in self.capture.relations.items():
            table = {n: self.variable(self.capture.number_sources[n]) for n in sorted(a.symbols() | b.symbols())}
            text = f"{_renamed(a, table)} {relation} {_renamed(b, table)}"
            held = f"{_described(a, self)} {relation} {_described(b, self)} was {outcome}, with "
            values = " + ', ' + ".join(f"was_is({self.describe(self.capture.number_sources[n])!r}, '{self._hint(n)}', {v})" for n, v in table.items())
            self.miss("check_relation", f"not ({text})" if outcome else text, f"{held!r} + {values}")

    def _hint(self, name: str):
        return next(n.value for n in self.capture.numbers.values() if n.name == name)

    def _distinct(self) -> None:
        """What the program writes to must stay apart from what it reads, and tensors that had one name each must not become one."""
        for sources, what in self.capture.distinct_groups():
            variables = [self.variable(s) for s in sources]
            if len(variables) > 1:
                self.miss("check_distinct", f"len({{{', '.join(f'id({v})' for v in variables)}}}) != {len(variables)}", f"{f'two {what} became one object'!r}")


def share(a: torch.Tensor, b: torch.Tensor, strides_a: tuple, strides_b: tuple, offset: int) -> bool:
    """Whether two tensors of known shapes show the same memory, `a` so many elements behind `b`."""
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.storage_offset() - b.storage_offset() == offset
        and a.stride() == strides_a and b.stride() == strides_b
    )  # fmt: skip


class Apart:
    """Whether tensors that are written to have memory of their own. Those of modules, which stay where they are, are looked at again when one has moved."""

    __slots__ = ("places", "fixed", "fine")

    def __init__(self):
        self.places, self.fixed, self.fine = None, frozenset(), True

    def __call__(self, written_fixed: tuple, written: tuple, fixed: tuple, others: tuple) -> bool:
        places = [*map(torch.Tensor.data_ptr, written_fixed), None, *map(torch.Tensor.data_ptr, fixed)]
        if places != self.places:
            own = [t.untyped_storage().data_ptr() for t in written_fixed if t.numel()]
            self.fixed = frozenset(own)
            self.fine = len(self.fixed) == len(own) and self.fixed.isdisjoint(t.untyped_storage().data_ptr() for t in fixed)
            self.places = places
        if not self.fine:
            return False
        if not written and not others:
            return True
        own = [t.untyped_storage().data_ptr() for t in written if t.numel()]
        apart = {*own}
        if len(apart) != len(own) or not apart.isdisjoint(self.fixed):
            return False
        rest = {t.untyped_storage().data_ptr() for t in others}
        return rest.isdisjoint(self.fixed) and (not apart or rest.isdisjoint(apart) and apart.isdisjoint(t.untyped_storage().data_ptr() for t in fixed))


_hooks_of, _late_hooks_of = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def hooked(tensors: tuple) -> bool:
    return any(map(_hooks_of, tensors)) or any(map(_late_hooks_of, tensors))


def changed_name(space, names, want, label: str) -> str:
    for name, value in zip(names, want if len(names) > 1 else (want,), strict=True):
        name = name.removesuffix(".__func__")
        now = getattr(space, name, MISSING) if isinstance(space, type) else space.get(name, MISSING)
        now = now.__func__ if isinstance(now, types.MethodType) else now
        if now is not value:
            return f"{label}{name} is another object than before"
    return f"a name in {label} changed"


def changed_entry(tables: tuple, keys: tuple, values: tuple, paths: tuple) -> str | None:
    """The first entry that is another one. Another object of the same type and value is none, for what has a value."""
    for key, want, path, table in zip(keys, values, paths, tables, strict=False):  # one table may be repeated for ever
        now = table.get(key, MISSING)
        if now is want:
            continue
        if type(want) not in PRIMITIVE:
            return f"{path} is another object than before"
        if not same_value(now, want):
            return was_is(path, say(want), now)
    return None


def changed_function(get: Callable, functions: tuple, want: tuple, what: str) -> str:
    found = [f.__qualname__ for f, w in zip(functions, want, strict=True) if get(f) is not w]
    return f"{what} of {found[0]} changed"


def shadowed(space: dict, names: tuple) -> str:
    return f"global {next(n for n in names if n in space)} exists now, and hides the builtin"


def same_array(a, b) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_value(a, b) -> bool:
    """Whether two values are of the same types and equal, where 0.0 is not -0.0, and nan is itself. No method of a user's class is called."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return tuple.__len__(a) == tuple.__len__(b) and all(map(same_value, tuple.__iter__(a), tuple.__iter__(b)))
    if isinstance(a, slice):
        return all(map(same_value, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    if (base := plain_base(type(a))) is not None:
        return base.__repr__(a) == base.__repr__(b) if base in (float, complex) else base.__eq__(a, b)
    return repr(a) == repr(b) if isinstance(a, IMMUTABLE) else a is b or type(a) in PRIMITIVE and a == b


def same_elements(found: tuple, want: tuple) -> bool:
    """Whether keys of a dict, or elements of a set, are what they were, in the same order."""
    return len(found) == len(want) and (all(map(operator.is_, found, want)) or all(map(same_value, found, want)))


def called(owner, how: tuple):
    """What a method of an object that stands for changing state (a context variable, a weak reference) says now."""
    name, *args = how
    try:
        return getattr(owner, name)(*args)
    except LookupError:
        return MISSING


def takes_keywords(fn) -> bool:
    """Whether the program has a `**name`, through which it sees the order of keyword arguments."""
    fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return code is None or bool(code.co_flags & 8)


def cell_reader(index: int) -> Callable:
    def cell(function):
        try:
            return function.__closure__[index].cell_contents
        except ValueError:
            return MISSING

    return cell


def _renamed(expression, table: dict[str, str]) -> str:
    return re.sub(r"\b[a-z]+\d+\b", lambda m: table.get(m.group(), m.group()), str(expression))


def _described(expression, writer: PrologueWriter) -> str:
    def spoken(m):
        source = writer.capture.number_sources.get(m.group())
        return writer.describe(source).replace('"', "'") if source is not None else m.group()

    return re.sub(r"\b[a-z]+\d+\b", spoken, str(expression))


# what the text of the checks speaks of: no variable has such a name
_SPOKEN: dict[str, Any] = {f.__name__: f for f in (all, any, getattr, hasattr, id, isinstance, len, list, map, next, sorted, str, tuple, type, zip, math)}
_SPOKEN |= {f.__name__: f for f in (itertools.repeat, operator.contains, operator.getitem, operator.is_, hooked, metadata, same_array, same_elements, same_value, shadowed, share)}
_SPOKEN |= {"MISSING": MISSING, "was_is": was_is, "backends": compat.attention_backends, "why": describe_tensor_miss, "changed": changed_name, "changed_entry": changed_entry}
_SPOKEN |= {"changed_function": changed_function, "gone": KeyError, "absent": (KeyError, AttributeError)}
