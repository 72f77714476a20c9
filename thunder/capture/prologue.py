"""The prologue: straight-line Python that says whether a compiled program fits a call.

It repeats the questions of capture (`world.py`), and returns the computation's inputs as a tuple, or a str that says
in words why the program does not fit. Nothing in it raises to decide. Questions about objects that stay (modules of the
compiled one, globals, classes) are checked in one pass over (table, key, expected) rows; the others in their order.
"""

from __future__ import annotations

import collections
import functools
import inspect
import keyword
import math
import os
import re
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder import compat
from thunder.capture import checks
from thunder.capture.checks import Apart, Distinct, Rows, Tensors, attribute, get, metadata
from thunder.capture.groups import Groups
from thunder.capture.interface import Guarded
from thunder.capture.locations import file_and_line
from thunder.capture.native import CONTAINERS
from thunder.capture.statements import check_symbol, written
from thunder.capture.world import (
    CONTENT,
    EQUAL,
    HELPERS,
    HOOKED,
    IDENTITY,
    KEYS,
    LENGTH,
    MISSING,
    PRESENT,
    SAME,
    SHARED,
    STEPS,
    TYPE,
    VALUE,
    Question,
    Source,
    expression,
    of_content,
    say,
    spell,
    was_is,
)
from thunder.core.codegen import Text
from thunder.core.symbol import BoundSymbol, Names
from thunder.core.trace import Trace
from thunder.distributed.boundary import locals_of, make_room
from thunder.interpreter.attributes import lacks_dict, plain_attribute, type_attribute
from thunder.runtime import extensions
from thunder.transforms.base import has_hook

SHOWN = 16  # values of a tuple that is written as it is
RUN = 8  # the least number of tensors that are read, checked and returned together
CACHED = 32  # tables that are not worth looking at before they are read
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def _literal(v) -> bool:
    if type(v) is tuple:
        return len(v) <= SHOWN and all(map(_literal, v))
    return type(v) in (int, str, bool, type(None), bytes) or (type(v) is float and v == v and abs(v) != float("inf"))


class PrologueWriter:
    """Turns the answers of a capture into the statements of a prologue."""

    def __init__(self, capture: Guarded, input_sources: list[Source], code_of: Callable = lambda source: None):
        self.code_of = code_of  # as `written` takes it
        self.capture, self.world, self.input_sources = capture, capture.world, input_sources
        self.objects: dict[str, Any] = dict(_HELPERS)
        self.variables: dict[Source, str] = {}
        self.statements: list[BoundSymbol] = []
        self.names = Names()
        self.names.reserve(("fn", "args", "kwargs", "error", "reason", "check_tensor_metadata", "apart", "locals_of"))
        self.names.reserve(_HELPERS)
        self.names.reserve(("torch", "Tensor"))  # which programs know as modules of the attributes that they name
        self.pins: dict[int, str] = {}
        self.spaces: dict[int, Any] = {}
        self.together: dict[Source, tuple[dict, Any]] = {}  # values that are read in one call
        self.local: dict[Source, str] = {}  # the variables of local tensors
        self.mentions: collections.Counter[Source] = collections.Counter()
        self.runs: dict[Source, str] = {}  # by the first tensor of a run that needs no variables, that of the run
        self.in_runs: set[Source] = set()
        self.tensors_checked: BoundSymbol | None = None
        self.facts: Tensors | None = None
        self.start = 0  # before which statement
        self.groups_apart: list[list[Source]] = []  # objects of each that are different ones
        self.weak: list[weakref.ref] = []  # objects without which the program fits no call
        self.held = {id(v) for v in self.world.constants.values()}

    # ---------------------------------------------------------------- text

    def pin(self, value, stem: str = "C") -> str:
        name = self.pins.get(id(value))
        if name is None:
            name = self.pins[id(value)] = self.names.make(stem)
            self.objects[name] = value
        return name

    def is_weak(self, value) -> bool:
        """Modules that are not part of the compiled one, and closures, come and go: an entry does not keep them
        alive."""
        if isinstance(value, torch.nn.Module):
            return id(value) not in self.capture.outside.rooted
        if id(value) in self.capture.outside.passing:
            return True
        if type(value) is functools.partial:
            return True
        return type(value) is types.FunctionType and value.__closure__ is not None and id(value) not in self.held

    def weak_pin(self, value) -> str:
        name = self.names.make("W")
        reference = self.objects[name] = weakref.ref(value)
        self.weak.append(reference)
        return name

    def emit(
        self, kind: str, *text: str, guards: Callable[[], Iterable[str]] | None = None, many: bool = False
    ) -> None:
        """A statement. guards: the lines in its place where it is read. many: it checks more than one fact."""
        columns = {"text": list(text), "guards": guards, "many": many, "objects": {}}
        self.statements.append(BoundSymbol(check_symbol(kind), (), columns, None, inputs=(), outputs=()))

    def miss(self, kind: str, condition: str, reason: str, read: Callable[[], str] | None = None) -> None:
        """A check; `reason` is a Python expression. read: gives the condition to be read, with values for names."""
        guards = None if read is None else lambda: [f"if {read()}: return {reason}"]
        self.emit(f"check_{kind}", f"if {condition}: return {reason}", guards=guards)

    def literal(self, value) -> str:
        return repr(value) if _literal(value) else self.named(value)

    def named(self, value) -> str:
        """A variable for a value: of a class or a function one of its name."""
        name = getattr(value, "__name__", "") if isinstance(value, (type, types.FunctionType)) else ""
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            name = str(value).removeprefix("torch.")
        if id(value) in self.pins or type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
            return self.pin(value)
        if self.objects.get(name) is not value:
            name = self.pins[id(value)] = self.names.claim(name)
            self.objects[name] = value
        return name

    # ---------------------------------------------------------------- reading

    def variable(self, source: Source) -> str:
        """The variable of the value at a source; it is read at its first mention."""
        pinned = self.capture.outside.pinned.get(source)
        if pinned is not None and source.step != "const":
            return self.pin(pinned, "M")
        if source.base is None:
            return self.named(self.world.constants[source.key]) if source.step == "const" else source.key
        self.mentions[source] += 1
        name = self.variables.get(source)
        if name is None:
            entry = self._table_entry(source)
            read = self.read(source) if entry is None else ""
            name = self.variables[source] = self.names.claim(source.name(self.world.parameters))
            if entry is not None:
                self.together[source] = entry
            else:
                self.emit("unpack", f"{name} = {read}")
        return name

    def _table_entry(self, source: Source) -> tuple[dict, Any] | None:
        """The dict that stays and holds the value at a source, and the key there."""
        table, key = self.capture.tensors.replaced_sources.get(source) or (self.table(source), source.key)
        return (table, key) if type(table) in (dict, types.MappingProxyType) else None

    def _read_together(self) -> None:
        """Read, before anything else, the values in dicts that stay."""
        sources = list(self.together)
        after, self.statements[self.start :] = self.statements[self.start :], []
        if len(sources) == 1:
            self.emit("unpack", f"{self.variables[sources[0]]} = {self.read(sources[0])}")
        elif sources:
            runs = self._runs()
            self.in_runs = {source for run in runs for source in run}
            sources = [*(s for s in sources if s not in self.in_runs), *(s for run in runs for s in run)]
            tables, keys = zip(*map(self.together.__getitem__, sources), strict=True)
            names = [f"  {self.variables[source]}," for source in sources if source not in self.in_runs]
            arguments = f"{self.pin(tables, 'tables')}, {self.pin(keys, 'keys')}, MISSING"
            if not runs:
                self.emit("unpack", "(", *names, f") = checks.read_entries({arguments})")
            else:
                self._unpack_runs(names, runs, f"checks.read_entries({arguments})")
        self.statements += after

    def _runs(self) -> list[list[Source]]:
        """Runs of tensors that follow each other among those that are checked and among the inputs, and that nothing
        else mentions: they are read, checked and returned together, without a variable for each. Transforms of
        prologues see one value for each input."""
        if any(has_hook(t, "transform_traces_pre_prologue") for t in self.capture.request.options.transforms):
            return []
        alone = [s for s in self.capture.tensors.shapes if s in self.together and self.mentions[s] == 2]
        checked = {source: i for i, source in enumerate(self.capture.tensors.shapes)}
        returned = {source: i for i, source in enumerate(self.input_sources) if self._unwrapping(source) is None}
        runs: list[list[Source]] = []
        for source in alone:
            if source not in returned:
                continue
            last = runs[-1][-1] if runs else None
            if last and (checked[last] + 1, returned[last] + 1) == (checked[source], returned[source]):
                runs[-1].append(source)
            else:
                runs.append([source])
        return [run for run in runs if len(run) >= RUN]

    def _unpack_runs(self, names: list[str], runs: list[list[Source]], read: str) -> None:
        """Statements that read tensors one after the other in one call: `names` one by one, then `runs` as slices."""
        start = len(names)
        all_of = self.names.make("read")
        lines = [f"{all_of} = {read}"]
        if names:
            lines += ["(", *names, f") = {all_of}[:{start}]"]
        for run in runs:
            self.runs[run[0]] = name = self.names.make("tensors")
            lines.append(f"{name} = {all_of}[{start}:{start + len(run)}]")
            start += len(run)
        self.emit("unpack", *lines)

    def _named(self, sources: Iterable[Source], of: Callable[[Source], str]) -> list[str]:
        """The variables of tensors, or what `of` makes of them; a run is unpacked."""
        expressions = []
        for source in sources:
            if source not in self.in_runs:
                expressions.append(of(source))
            elif source in self.runs:
                expressions.append(f"*{self.runs[source]}")
        return expressions

    def read(self, source: Source) -> str:
        """The expression of the value at a source. It does not raise: where there is none, it gives MISSING."""
        base, key = source.base, source.key
        entry = self._table_entry(source)
        if entry is not None:
            return f"{self.pin(entry[0], 'D')}.get({self.literal(entry[1])}, MISSING)"
        if self.in_dict(source):
            return f"{self.variable(base.attr('__dict__'))}.get({key!r}, MISSING)"
        b = self.variable(base)
        if source.step == "attr" and key == "__dict__":
            kind = self.type_of(base)
            by_user = kind is not None and type(type_attribute(kind, "__getattribute__")) is types.FunctionType
            return f"own({b}, '__dict__')" if by_user else f"{b}.__dict__"
        if base.step == "root" and base.key != "fn":  # whose length and keys were checked first
            return f"{b}[{key!r}]"
        if source.step == "attr":
            return f"getattr({b}, {key!r}, MISSING)"
        if source.step == "size":
            return f"{b}.shape[{key}]"
        if source.step in ("number", "made", "of", "at"):
            return self._of_numbers(source)
        kind = self.type_of(base)
        if source.step == "keyed":
            k = self.variable(key)
            return f"{b}.get({k}, MISSING)" if kind in CONTAINERS else f"item({b}, {k})"
        if source.step == "item" and kind is not None:
            if issubclass(kind, dict) and kind in CONTAINERS or base.step == "attr" and base.key in _MODULE_TABLES:
                return f"{b}.get({self.literal(key)}, MISSING)"
            if kind in (list, tuple) and key in range(self.world.observed.get((base, LENGTH, None), 0)):
                return f"{b}[{key}]"
        return f"{STEPS[source.step].__name__}({b}, {self.literal(key)})"

    def _of_numbers(self, source: Source) -> str:
        """The expression of a value that is found by numbers from outside."""
        key, b = source.key, self.variable(source.base)
        if source.step == "number":
            self.objects |= {computed.name: computed for computed in key.expression.computed()}
            return key.text(self.variable)
        if source.step in ("made", "of"):
            return f"{b}(({''.join(f'{self.variable(n) if type(n) is Source else n}, ' for n in key)}))"
        return f"item({b}, {self.variable(key)})"

    def type_of(self, source: Source) -> type | None:
        if source.base is None:
            return type(self.world.constants[source.key]) if source.step == "const" else None
        stated = dict if source.step == "attr" and source.key in _DICTS else None
        if source.step == "attr" and source.key in _OF_PARTIAL and self.type_of(source.base) is functools.partial:
            stated = _OF_PARTIAL[source.key]
        return self.world.observed.get((source, TYPE, None), stated)  # no `or`: that asks the metaclass

    def table(self, source: Source) -> Any:
        """The dict that stays and holds the value at a source: of a pinned module, of a module's globals, or of a
        class."""
        base, pinned, constants = source.base, self.capture.outside.pinned, self.world.constants
        if source.step == "item":
            if base.step == "const":
                constant = constants[base.key]
                return constant if isinstance(constant, dict) else None
            if base.step == "attr" and base.key in _MODULE_TABLES and base.base in pinned:
                return pinned[base.base].__dict__[base.key]
            if base.step == "attr" and base.key == "__dict__" and base.base in pinned:
                return self._space(pinned[base.base])
            if base.step == "attr" and base.key == "__dict__" and base.base.step == "const":
                owner = constants[base.base.key]  # others may be given another `__dict__`
                return self._space(owner) if issubclass(type(owner), (type, types.ModuleType)) else None
        if source.step == "attr" and base in pinned and source.key in pinned[base].__dict__:
            return pinned[base].__dict__
        return None

    def _space(self, owner):
        """The `__dict__` of an object that stays. A class makes a new view of it for whoever asks."""
        space = self.spaces.get(id(owner))
        if space is None:
            space = self.spaces[id(owner)] = None if lacks_dict(owner) else getattr(owner, "__dict__", None)
        return space

    def in_dict(self, source: Source) -> bool:
        """Whether an attribute was read from its object's own `__dict__`: it is read there, without the class's
        `__getattribute__`."""
        if source.step != "attr" or source.key == "__dict__":
            return False
        owner = self.world.values.get(source.base)
        if isinstance(owner, type) or source.key not in plain_attribute(owner, "__dict__", ()):
            return False
        return not hasattr(type(type_attribute(type(owner), source.key)), "__set__")

    # ---------------------------------------------------------------- the whole

    def write(self) -> tuple[Trace, Callable]:
        """The prologue as a trace and as a function."""
        checks.prepare()
        self._call_shape()
        self.start = len(self.statements)
        for source, question, operand, want in self._in_passes():
            self._check(source, question, operand, want)
        self._tensors()
        self._local_tensors()
        self._apart()
        self._numbers()
        self._distinct()
        return self._returning_inputs()

    def write_extraction(self) -> tuple[Trace, Callable]:
        """A prologue that checks nothing: it only finds the computation's inputs again."""
        self._local_tensors()
        return self._returning_inputs()

    def _returning_inputs(self) -> tuple[Trace, Callable]:
        for source in (*self.input_sources, *self.capture.tensors.required.values()):
            self.variable(source)  # also where nothing computes with the tensor
        self._read_together()
        self._check_tensors()
        inputs = tuple(map(Text, self._named(self.input_sources, self._input)))
        return written("prologue", "fn, args, kwargs", self.statements, inputs, self.names, self.objects, self.code_of)

    def _local_tensors(self) -> None:
        """The inputs that are DTensors, by their local tensors."""
        capture, sources = self.capture, self.input_sources
        tensors: dict[Source, Any] = {s: capture.guarded_tensor(s) for s in sources if s in capture.tensors.local}
        if not tensors:
            return
        variables = [self.variable(s) for s in tensors]
        known = [(x.device_mesh, x.placements) for x in tensors.values()]
        operands, layouts = ", ".join(variables), self.pin(known, "layouts")
        self.miss(
            "layouts",
            f"[(x.device_mesh, x.placements) for x in ({operands},)] != {layouts}",
            repr("a DTensor lies on the ranks in another way now"),
            lambda: f"[(x.device_mesh, x.placements) for x in ({operands},)] != {spell(known)}",
        )
        self.local = {s: self.names.claim(f"{v}_local") for s, v in zip(tensors, variables, strict=True)}
        rows = tuple(self.capture.tensors.local[s] for s in tensors)
        for s, v, n in zip(tensors, variables, rows, strict=True):
            if self._is_written(s):
                self.emit("make_room", f"{self.pin(make_room, 'make_room')}({v}, {n})")
        self.objects |= {"locals_of": locals_of}
        self.emit("unpack", f"{', '.join(self.local.values())}, = locals_of(({operands},), {self.literal(rows)})")

    def _is_written(self, source: Source) -> bool:
        """Whether the program writes to a tensor."""
        known = self.capture.tensors.real
        return any(known[p][1] is source for p in self.capture.tensors.mutated if p in known)

    def _input(self, source: Source) -> str:
        """An input of the computation. A wrapper that an ended torch.func transform left behind stands for the tensor
        in it, as for eager's operations."""
        if source in self.local:
            return self.local[source]
        v, unwrap = self.variable(source), self._unwrapping(source)
        return v if unwrap is None else f"{self.pin(unwrap, 'unwrap')}({v})"

    def _unwrapping(self, source: Source) -> Callable | None:
        tensor = self.world.values.get(source)
        is_tensor = isinstance(tensor, torch.Tensor) and source in self.capture.tensors.shapes
        return compat.unwrap_of(tensor) if is_tensor else None

    def _call_shape(self) -> None:
        """Checks of how many arguments a call has, and which keywords."""
        capture = self.capture
        self.miss(
            "len",
            f"len(args) != {len(capture.request.args)}",
            f"was_is('the number of positional arguments', '{len(capture.request.args)}', len(args))",
        )
        if not capture.request.kwargs:
            self.miss("empty", "kwargs", "was_is('the set of keyword arguments', '[]', sorted(kwargs))")
            return
        names = str(sorted(capture.request.kwargs))
        keys = self.pin(frozenset(capture.request.kwargs), "keys")
        self.miss(
            "keys", f"kwargs.keys() != {keys}", f"was_is('the set of keyword arguments', {names!r}, sorted(kwargs))",
            lambda: f"sorted(kwargs) != {names}",
        )  # fmt: skip
        if len(keywords_in_order(capture.request.fn, capture.request.kwargs)) > 1:
            order = tuple(capture.request.kwargs)
            reason = f"was_is('the order of keyword arguments', {str(list(order))!r}, list(kwargs))"
            condition = "tuple(kwargs) != "
            self.miss("order", f"{condition}{self.pin(order, 'order')}", reason, lambda: f"{condition}{order}")

    # ---------------------------------------------------------------- facts about objects that stay, in passes

    def _in_passes(self) -> list[tuple]:
        """Check objects that stay, in one pass for each way to look; return the other questions."""
        groups = Groups(self)
        self._look_at(groups.entries, groups.absent)
        columns = {"tables": "containers", "keys": "keys", "expected": "expected"}
        self._pass("entries", "entries_are", groups.entries, get, **columns)
        self._pass("attributes", "attributes_are", groups.attributes, attribute, **columns)
        self._pass("absent", "none_in", groups.absent, get, tables="containers", keys="keys")
        if groups.hooked:
            inside = ", ".join(map(self.variable, groups.hooked))
            self.miss("hooks", f"any(map(hooked, ({inside},)))", f"{HOOKED.words!r}")
        self._pass("type", "types_are", groups.types, lambda o, _: type(o), objects="containers", types="expected")
        self.groups_apart = groups.apart
        return groups.single

    def _look_at(self, *rows: list[tuple]) -> None:
        """Touches the tables together: those that are in no cache come from memory at the same time."""
        tables = {id(table): table for part in rows for table, *_ in part}
        if len(tables) > CACHED:
            self.emit("look_at", f"list({self.pin((*tables.values(), *self.capture.outside.pinned.values()), 'read')})")

    def _pass(self, kind: str, how: str, rows: list[tuple], get: Callable, **columns: str) -> None:
        """One statement that checks rows by identity first. columns: name in the text -> the column of the rows, for
        each argument of the function `how`."""
        if rows:
            guards = Rows(rows, get, self.world.parameters)
            arguments = ", ".join(self.pin(getattr(guards, column), name) for name, column in columns.items())
            self._rows(kind, f"checks.{how}({arguments})", f"{self.pin(guards, 'rows')}()", guards)

    def _held(self, container: Source, rows: list[tuple]) -> None:
        """Check items of one container that is known only when the prologue runs."""
        if len(rows) == 1:
            ((_, _, want, source, question),) = rows
            self._check(source, question, None, False if question is PRESENT else want)
            return
        guards, table = Rows(rows, get, self.world.parameters), self.variable(container)
        arguments = f"{table}, {self.pin(guards.keys, 'keys')}, {self.pin(guards.expected, 'expected')}, MISSING"
        self._rows("entries", f"checks.holds({arguments})", f"{self.pin(guards, 'rows')}.of({table})", guards)

    def _rows(self, kind: str, holds: str, why: str, rows: Rows) -> None:
        """A check of many facts. That identities differ is no reason yet."""
        text, guards = f"if not {holds} and (reason := {why}): return reason", functools.partial(rows.guards, why)
        self.emit(f"check_{kind}", text, guards=guards, many=True)

    # ---------------------------------------------------------------- single questions

    def _check(self, source: Source, question: Question | None, operand, want) -> None:
        """One question, asked again."""
        if question is None:
            self._held(source, operand)
            return
        if question is IDENTITY and self.is_weak(want):
            v = self.variable(source)
            was = IDENTITY.words.format(path=self.world.describe(source), was=say(want), now="")
            shown = f"{expression(self.world.describe(source))} is not {spell(want)}"  # which holds nothing
            self.miss("is", f"{v} is None or {v} is not {self.weak_pin(want)}()", f"{was!r} + say({v})", lambda: shown)
            return
        if question is IDENTITY and source.base is None:  # the compiled function itself, which stays
            return
        pinned = question is IDENTITY and source in self.capture.outside.pinned
        v = self.read(source) if pinned else self.variable(source)
        if question is VALUE:
            self._check_value(v, self.world.describe(source), want)
            return
        k = self.variable(operand) if type(operand) is Source else self.literal(operand)
        now = question.text.format(v=v, k=k)
        if self.type_of(source) in (tuple, *CONTAINERS):
            now = now.replace("length(", "len(").replace("keys(", "tuple(")
        path, other = self.world.describe(source), self.world.describe(operand) if type(operand) is Source else operand
        words = question.words if isinstance(question.words, str) else question.words[not want]
        words = words.replace("{path}", path).replace("{k}", str(other))
        if "{was}" in words:
            words = words.replace("{was}", say(want))
        before, says_now, after = words.partition("{now}")
        reason = " + ".join([repr(before), *([f"say({now})"] if says_now else []), *([repr(after)] if after else [])])
        changed = question.changed
        if question.text == KEYS.text and all(type(x) is str for x in want):
            changed = "not checks.keys_are({v}, {was})" if len(want) >= RUN and self._is_dict(source) else EQUAL
            changed = changed.replace("{v}", v)
        if type(want) is bool:
            condition = f"not {now}" if want else now
        else:
            condition = changed.format(now=now, was=self.literal(want))
        shown_operand = expression(str(other)) if type(operand) is Source else operand

        def read() -> str:
            shown = question.text.format(v=expression(path), k=shown_operand)
            if type(want) is bool:
                return f"not {shown}" if want else shown
            if question is CONTENT:
                return f"{shown} != content({spell(of_content(want))})"
            return question.changed.format(now=shown, was=spell(want))

        self.miss(question.name, condition, reason, read)

    def _is_dict(self, source: Source) -> bool:
        kind = self.type_of(source)
        return kind is not None and issubclass(kind, dict) and kind in CONTAINERS

    def _check_value(self, v: str, path: str, want) -> None:
        """The check of a number, a text, or another value without identity."""
        reason = f"was_is({path!r}, {say(want)!r}, {v})"

        def read() -> str:
            return f"{expression(path)} {'is not' if type(want) in _SINGLE else '!='} {spell(want)}"

        if type(want) in _SINGLE:
            self.miss("literal_like", f"{v} is not {self.literal(want)}", reason, read)
        elif type(want) is float and want != want:
            self.miss("number", f"type({v}) is not float or {v} == {v}", reason)
        elif type(want) not in _KINDS:
            self.miss("value", f"not same_value({v}, {self.pin(want)})", reason, read)
        else:
            kind = _KINDS[type(want)]
            condition = f"type({v}) is not {self.literal(type(want))} or {v} != {self.literal(want)}"
            self.miss(kind, condition, reason, read)
            if type(want) is float and want == 0.0:  # 0.0 and -0.0 are equal
                self.miss("number", f"str({v}) != {str(want)!r}", reason)

    # ---------------------------------------------------------------- tensors and numbers

    def _tensors(self) -> None:
        """All tensors in one batch: type, dtype, device, shape, requires_grad, and strides where a pass needs them."""
        capture = self.capture
        if not capture.tensors.shapes:
            return
        if len(capture.tensors.shapes) >= extensions.MANY:
            extensions.loaded_extension()
        expected, tensors, laid_out = [], [], [s in capture.tensors.laid_out for s in capture.tensors.shapes]
        for (source, shape), with_strides in zip(capture.tensors.shapes.items(), laid_out, strict=True):
            self.variable(source)
            tensor = capture.guarded_tensor(source)
            facts = metadata(tensor) | ({"stride()": tensor.stride()} if with_strides else {})
            expected.append((source, {"type": type(tensor), "shape": shape, **facts}))
            tensors.append(tensor)
        self.objects["check_tensor_metadata"] = compat.tensor_batch_check(
            tensors, list(capture.tensors.shapes.values()), laid_out
        )
        self.facts = Tensors(expected, capture.world.parameters)
        guards = functools.partial(self.facts.guards, f"{self.pin(self.facts, 'expected')}()")
        self.emit("check_tensor_metadata", guards=guards, many=True)
        self.tensors_checked = self.statements[-1]

    def _check_tensors(self) -> None:
        """Writes the check of all tensors, when it is known which have variables."""
        if self.tensors_checked is not None:
            inside = ", ".join(self._named(self.capture.tensors.shapes, self.variable))
            reason = f"{self.pin(self.facts, 'expected')}(({inside},))"
            text = f"if not check_tensor_metadata({inside}) and (reason := {reason}): return reason"
            self.tensors_checked.kwargs["text"].append(text)

    def _apart(self) -> None:
        """Tensors that are written to share no memory with other inputs."""
        capture = self.capture
        if not capture.tensors.mutated:
            return
        same = {s for s, question, _ in capture.world.observed if question in (SAME, SHARED)}
        groups: dict[tuple, list] = {(w, m): [] for w in (True, False) for m in (True, False)}
        for proxy, (_, source) in capture.tensors.real.items():
            if proxy in capture.tensors.used and source not in same and source in capture.tensors.shapes:
                groups[proxy in capture.tensors.mutated, source.root.key not in ("args", "kwargs")].append(
                    self.local.get(source) or self.variable(source)
                )
        self.objects["apart"] = Apart()
        arguments = [f"({', '.join(names)}{',' * (len(names) == 1)})" for names in groups.values()]
        reason = "a tensor that is written to shares memory with another one now"
        self.miss("apart", f"not apart({', '.join(arguments)})", repr(reason))

    def _numbers(self) -> None:
        """Relations between symbolic numbers that the program decided by."""
        decisions = self.capture.numbers.decisions
        for (a, relation, b), outcome in decisions.relations.items():
            table = {n: self.variable(self.capture.numbers.sources[n]) for n in sorted(a.symbols() | b.symbols())}
            self.objects |= {computed.name: computed for computed in a.computed() | b.computed()}
            text = f"{_renamed(a, table)} {relation} {_renamed(b, table)}"
            held = f"{_described(a, self)} {relation} {_described(b, self)} was {outcome}, with "
            values = " + ', ' + ".join(
                f"was_is({self.world.describe(self.capture.numbers.sources[n])!r}, '{self._hint(n)}', {v})"
                for n, v in table.items()
            )
            reason = f"{held!r} + {values}"
            if (location := decisions.places.get((a, relation, b))) is not None:
                filename, line, _, source = file_and_line(location)
                reason += f" + {f' ({os.path.basename(filename)}:{line}: {source.strip()})'!r}"
            self.miss("relation", f"not ({text})" if outcome else text, reason)

    def _hint(self, name: str):
        return self.capture.numbers.decisions.values[name]

    def _distinct(self) -> None:
        """Objects that the program writes to stay apart from those that it reads, and tensors with one name each do not
        become one."""
        for sources, kind in [*self.capture.distinct_groups(), *((group, "objects") for group in self.groups_apart)]:
            variables = [self.variable(s) for s in sources]
            if len(variables) > 1:
                ids = ", ".join(f"id({v})" for v in variables)
                why = self.pin(Distinct(sources, kind, self.world.parameters), "distinct")
                self.miss("distinct", f"len({{{ids}}}) != {len(variables)}", f"{why}(({', '.join(variables)}))")


def keywords_in_order(fn, names: Iterable[str]) -> list[str]:
    """The keyword arguments that end in a `**name` of the program, through which it sees their order."""
    fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return [*names]
    own = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return [n for n in names if n not in own] if code.co_flags & inspect.CO_VARKEYWORDS else []


def _renamed(expression, table: dict[str, str]) -> str:
    return re.sub(r"\b[a-z]+\d+\b", lambda m: table.get(m.group(), m.group()), str(expression))


def _described(expression, writer: PrologueWriter) -> str:
    def words(m):
        source = writer.capture.numbers.sources.get(m.group())
        return writer.world.describe(source).replace('"', "'") if source is not None else m.group()

    return re.sub(r"\b[a-z]+\d+\b", words, str(expression))


_KINDS = {int: "number_type_and_value", float: "number_type_and_value", str: "string_value", bytes: "value"}
# types with one object for each value
_SINGLE = {type(None), bool, torch.dtype, torch.layout, torch.memory_format, type(...), type(NotImplemented)}
_OF_PARTIAL = {"args": tuple, "keywords": dict}
_DICTS = ("__dict__", *_MODULE_TABLES)
# names in the text of the checks: no variable has such a name
_HELPERS: dict[str, Any] = {
    f.__name__: f for f in (any, all, getattr, hasattr, id, isinstance, len, list, map, sorted, str, tuple, type, math)
}
_HELPERS |= {f.__name__: f for f in (was_is, say, *STEPS.values())}
_HELPERS |= HELPERS | {"MISSING": MISSING, "checks": checks, "own": object.__getattribute__}
