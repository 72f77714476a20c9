"""The epilogue: Python that builds the user's result from the computation's values, and carries out the program's
writes to the outside.

A result made of tensors, numbers and plain new containers needs none: the computation returns it as it is.
"""

from __future__ import annotations

import collections
import contextvars
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.capture import afterwards, arrays, containers, operations, remade
from thunder.capture.effects import Effect
from thunder.capture.host_lines import HostMethod
from thunder.capture.identities import Id
from thunder.capture.interface import Capture
from thunder.capture.library import dtensors
from thunder.capture.library.backward import freed
from thunder.capture.methods import TensorMethod
from thunder.capture.native import CONTAINERS, ENUM, IMMUTABLE, container_base, slots
from thunder.capture.objects import cached_outside
from thunder.capture.recording import inference_tensor
from thunder.capture.remade import UNCHANGING, is_global, made_of, native_new, stays
from thunder.capture.statements import check_symbol, written
from thunder.capture.tensors import without_history
from thunder.capture.world import MISSING, STEPS
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import AnyProxy, Condition, NumberProxy, Proxy, Size, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol, Names, recording
from thunder.core.trace import Trace
from thunder.distributed.boundary import like, result_of
from thunder.interpreter.attributes import BUILTINS, HEAP_TYPE, cell_value, of_python, plain_attribute

_LITERAL = (int, str, bool, type(None), float, complex, bytes, torch.dtype, torch.device)


_FIXED = (
    type, ENUM, types.ModuleType, types.BuiltinFunctionType, torch.Generator, range, torch.Size, *IMMUTABLE,
)  # fmt: skip


def is_plain(c: Capture, value, seen: set[int]) -> bool:
    """Whether a result can be written as a literal: new tuples, lists and dicts, each once, of proxies and literals."""
    t = type(value)
    if t is HostProxy and arrays.array_that_leaves(c, value) is not None:
        return False
    if t is TensorProxy and (dtensors.spec_of(c, value) or c.recorder.memory.holder(value) in c.tensors.placements):
        return False
    if t is TensorProxy or isinstance(value, (AnyProxy, NumberProxy)) or t in _LITERAL:
        return True
    if t not in (tuple, list, dict) or id(value) in c.world.sources:
        return False
    c.materialize(value)
    if t is not tuple:
        if id(value) in seen:
            return False
        seen.add(id(value))
    if t is dict:
        return all(type(k) in (str, int) for k in value) and all(is_plain(c, v, seen) for v in value.values())
    return all(is_plain(c, v, seen) for v in value)


class EpilogueWriter:
    """Writes statements that build values; each object of the program's own making is built once."""

    def __init__(self, c: Capture):
        self.c = c
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {"setattr": setattr, "delattr": delattr}
        self.names = Names()
        self.names.reserve(("fn", "args", "kwargs", "values"))
        # the results of the computation, in order: name and value, by id
        self.values: dict[int, tuple[str, Any]] = {}
        self.built: dict[int, str] = {}
        self.originals = {id(s): c.world.sources[id(s)] for s in c.containers.snapshots.values()}
        writes = c.effects.is_carried_out or c.effects.settings or c.tensors.written_after or c.tensors.frozen
        self.writes = bool(writes or containers.changes(c))
        self.reached: dict[Any, str] = {}  # source -> the variable of its value before the first write

    def pin(self, value, name: str = "") -> str:
        pinned = next((n for n, v in self.objects.items() if v is value), None)
        if pinned is None:
            pinned = self.names.claim(name) if name else self.names.make("C")
            self.objects[pinned] = value
        return pinned

    def path(self, source) -> str:
        """An outside object, found again before anything is written."""
        if not self.writes or source.base is None or source in self.c.outside.pinned:
            return self._path(source)
        if source not in self.reached:
            text = self._path(source)
            name = self.reached[source] = self.names.make("o")
            self.lines.append(f"{name} = {text}")
        return self.reached[source]

    def _path(self, source) -> str:
        """An outside object, found again from the call's arguments or pinned."""
        pinned = self.c.outside.pinned.get(source)
        if pinned is not None and source.root.key not in ("args", "kwargs"):
            return self.pin(pinned)
        if source.base is None:
            return self.pin(self.c.world.constants[source.key]) if source.step == "const" else source.key
        b = self._path(source.base)
        if source.step == "attr":
            return f"{b}.{source.key}"
        if source.step in ("keyed", "at"):
            return f"{b}[{self.path(source.key)}]"
        if source.step == "of":
            return f"{b}(({''.join(f'{self.path(source)}, ' for source in source.key)}))"
        if source.step == "size":
            return f"{b}.shape[{source.key}]"
        if source.step == "number":
            return source.key.text(self.path)
        if source.step == "item":
            return f"{b}[{self.literal(source.key)}]"
        take = STEPS[source.step]
        return f"{self.pin(take, take.__name__)}({b}, {self.literal(source.key)})"

    def literal(self, value) -> str:
        return repr(value) if type(value) in (int, str, bool, type(None), bytes) else self.pin(value)

    # --- values
    def build(self, value) -> str:
        """An expression for a value of the captured program."""
        c = self.c
        t = type(value)
        if isinstance(value, (Proxy, NumberProxy)):
            return self._proxy(value)
        if t is torch.Generator and id(value) in c.tensors.generators:
            return self.value(c.tensors.generators[id(value)])
        if t is Condition:
            return f"({self.build(value.a)} {value.relation} {self.build(value.b)})"
        if t in _LITERAL and t not in (float, complex, torch.dtype, torch.device):
            return repr(value)
        if id(value) in self.built:
            return self.built[id(value)]
        if id(value) in self.originals:
            return self.path(self.originals[id(value)])
        if id(value) in c.world.sources:
            return self._outside(value, c.world.sources[id(value)])
        if id(value) in c.world.origins:
            return self._outside(value, c.world.origins[id(value)])
        if isinstance(value, tuple):
            return self._tuple(value, t)
        if t is types.MethodType:
            return f"{self.pin(types.MethodType)}({self.build(value.__func__)}, {self.build(value.__self__)})"
        if isinstance(value, (list, dict, set, frozenset, collections.deque)):
            return self._container(value, t)
        if (again := self._about_outside(value, t)) is not None:
            return again
        if isinstance(value, types.FunctionType):
            return self._function(value) if id(value) in c.fresh else self.pin(value)
        if stays(value):
            name = operations.type_of(c, value).__name__
            return c.refuse(f"a {name} leaves the compiled function", "return what is in it: list(...) of an iterator")
        return self._other(value, t)

    def _other(self, value, t: type) -> str:
        """An expression that makes a value of no kind that has a method of its own."""
        if t is contextvars.Token:
            self.c.refuse("a token of a context variable leaves the compiled function", "set and reset it on one side")
        if cached_outside(self.c, value):
            return self.pin(value)
        if (construction := made_of(value, t)) is not None:
            return self.variable(value, f"{self.pin(construction[0])}({', '.join(map(self.build, construction[1]))})")
        if isinstance(value, torch.Tensor) or is_global(value, t) or self._is_fixed(value, t):
            return self.pin(value)
        in_c = t is not object and not t.__dictoffset__ and not slots(t)
        return self._reduced(value, t) if in_c else self._object(value, t)

    def _about_outside(self, value, t: type) -> str | None:
        """A value that belongs to another: its id, a method of it, a weak reference."""
        if t is Id:
            return f"{self.pin(id)}({self.path(self.c.outside.ids[value][0])})"
        if t in (*BUILTINS, types.MethodWrapperType) and not isinstance(
            value.__self__, (types.ModuleType, types.NoneType, type)
        ):
            return self.variable(value, f"({self.build(value.__self__)}).{value.__name__}")
        if t in (TensorMethod, HostMethod):
            return self.variable(value, f"({self.build(value.proxy)}).{value.name}")
        if t in (weakref.ref, weakref.KeyedRef) and value() is not None:
            operands = [value(), value.__callback__, *([value.key] if isinstance(value, weakref.KeyedRef) else [])]
            return self.variable(value, f"{self.pin(t)}({', '.join(map(self.build, operands))})")
        return None

    def _proxy(self, value) -> str:
        """An expression for a result of the computation: as it is, as a parameter, or as a NumPy array."""
        if type(value) is HostProxy and (tensor := arrays.array_that_leaves(self.c, value)) is not None:
            return self.built.get(id(value)) or self.variable(value, f"{self.build(tensor)}.numpy()")
        if isinstance(value, TensorProxy):
            # the parameter itself, of which the program makes another tensor
            if value in self.c.tensors.placements and self.c.tensors.placements[value].is_whole:
                return self.path(self.c.tensors.real[value][1])
            holder = self.c.recorder.memory.holder(value)
            if self._is_outside(holder) and self.c.tensors.real[holder][1] in self.c.tensors.local:  # a DTensor
                return self.path(self.c.tensors.real[holder][1])
            if (part := dtensors.part_that_leaves(self.c, value)) is not None:
                local, spec, shape = part
                operands = ", ".join((self.value(local), *(self.pin(x) for x in (*spec, shape))))
                return self.built.get(id(holder)) or self.variable(holder, f"{self.pin(result_of)}({operands})")
            if holder in self.c.tensors.frozen or holder in self.c.tensors.rebound:
                return self.itself(holder)
            first = len(self.c.recorder.bound_symbols)
            value = latest(self.c, value)
            afterwards.make_views(self, first)
            if value in self.c.tensors.afterwards:
                return self.afterwards(value)
        return self.value(value)

    def itself(self, p: TensorProxy) -> str:
        """The name of a tensor from outside, or of a leaf of the program's own, whatever values it has in the end."""
        return self.value(p) if p in self.c.tensors.leaves else self.path(self.c.tensors.real[p][1])

    def afterwards(self, value: TensorProxy) -> str:
        """The name of a tensor that is written to after the computation, or of a view of one."""
        argument = self.c.tensors.afterwards[value]
        return self.built[id(value)] if argument is None else self.value(argument)

    def value(self, value) -> str:
        """The name of a result of the computation."""
        entry = self.values.get(id(value))
        if entry is None:
            entry = self.values[id(value)] = (self.names.claim(value.name if value.name.isidentifier() else "n"), value)
            if isinstance(value, TensorProxy) and self.c.is_freed(value):
                self.built[id(value)] = self.variable(value, f"{self.pin(freed)}({entry[0]})")
            elif isinstance(value, TensorProxy) and self._leaves_inference(value):
                self.variable(value, f"{self.pin(inference_tensor)}({entry[0]})")
        return self.built.get(id(value), entry[0])

    def _outside(self, value, source) -> str:
        held = id(value) in self.c.outside.rooted or isinstance(value, (type, types.FunctionType, types.ModuleType))
        held = held and id(value) not in self.c.world.anew
        return self.pin(value) if held and source.root.key not in ("args", "kwargs") else self.path(source)

    def _is_fixed(self, value, t: type) -> bool:
        if isinstance(value, type) and self._is_made(value):
            self.c.refuse(f"the class {value.__name__}, which the program made, leaves it", "make the class outside")
        if isinstance(value, _FIXED) or t in _LITERAL:
            return True
        return isinstance(value, UNCHANGING) or t.__module__.startswith("torch") and not t.__dictoffset__

    def _leaves_inference(self, value: TensorProxy) -> bool:
        """Whether a result is an inference tensor."""
        first = self.c.modes.inference.first_leaving(self.c.recorder, value)
        if first is not None and first is not value:
            self.c.refuse(
                "the program returns two tensors that share memory and were created in inference mode",
                "return one of them, and create the other outside",
            )
        return first is not None

    def _is_made(self, kind: type) -> bool:
        """Whether a class was made while the program was captured: no module has it, nor came it from outside."""
        known = id(kind) in self.c.world.constant_sources or not of_python(kind)
        module = sys.modules.get(kind.__module__) if isinstance(kind.__module__, str) else None
        return not known and getattr(module, kind.__qualname__.split(".")[0], None) is None

    def variable(self, value, expression: str) -> str:
        name = self.built[id(value)] = self.names.make("o")
        self.c.world.hold(value)
        self.lines.append(f"{name} = {expression}")
        return name

    def _tuple(self, value: tuple, t: type) -> str:
        """An expression for a tuple, a named tuple, or one of a subclass."""
        inside = [self.build(x) for x in tuple.__iter__(value)]
        if t is Size:
            t = torch.Size
        text = f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
        if t is tuple or t is torch.Size:
            return text if t is tuple else self.variable(value, f"{self.pin(t)}({text})")
        if not of_python(t) or tuple.__new__ is not native_new(t):
            return self.pin(value) if all(type(x) in _LITERAL for x in value) else self._reduced(value, t)
        name = self.variable(value, f"{self.pin(tuple.__new__)}({self.pin(t)}, {text})")
        self._attributes(value, name)
        return name

    def _container(self, value, t: type) -> str:
        """An expression for a container, whose elements are put in by further statements: it may hold itself."""
        self.c.materialize(value)
        if t is frozenset:
            return f"{self.pin(frozenset)}([{', '.join(self.build(x) for x in value)}])"
        if t is collections.defaultdict:
            name = self.variable(value, f"{self.pin(t)}({self.build(value.default_factory)})")
        elif t in (list, dict, set):
            name = self.variable(value, {list: "[]", dict: "{}", set: "set()"}[t])
        elif t is collections.deque:
            name = self.variable(value, f"{self.pin(t)}(maxlen={value.maxlen})")
        else:
            name = self.variable(value, f"{self.pin(t)}.__new__({self.pin(t)})")
        if isinstance(value, dict):
            base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            plain = t in (dict, collections.OrderedDict, collections.defaultdict)
            store = None if plain else self.pin(base.__setitem__)
            for k in list(dict.keys(value)):
                key, item = self.build(k), self.build(dict.__getitem__(value, k))
                self.lines.append(f"{name}[{key}] = {item}" if store is None else f"{store}({name}, {key}, {item})")
        else:
            base: Any = container_base(t)
            inside = [self.build(x) for x in base.__iter__(value)]
            if inside:
                self.lines.append(f"{name}.{'update' if isinstance(value, set) else 'extend'}(({', '.join(inside)},))")
        self._attributes(value, name)
        return name

    def _cell(self, owner: types.FunctionType, cell: types.CellType) -> str:
        """A cell of a function from outside."""
        source = self.c.cell_source(owner, cell)
        return f"{self.path(source.base)}.__closure__[{source.key}]"

    def _function(self, value: types.FunctionType) -> str:
        """A function that the program made: built anew, with cells that hold this call's values."""
        cells, filled = [], []
        for cell in value.__closure__ or ():
            if (owner := self.c.outside.cells.get(id(cell))) is not None:  # shared with functions outside
                self.built[id(cell)] = self._cell(owner, cell)
            elif id(cell) not in self.built:
                self.variable(cell, f"{self.pin(types.CellType)}()")
                filled.append(cell)
            cells.append(self.built[id(cell)])
        closure = f"({', '.join(cells)},)" if cells else "None"
        defaults = self.build(value.__defaults__)
        name = self.variable(
            value,
            f"{self.pin(types.FunctionType)}({self.pin(value.__code__)}, {self.pin(value.__globals__)}, "
            f"{value.__name__!r}, {defaults}, {closure})",
        )
        for cell in filled:
            contents = self.c.effects.value(cell, None, cell_value(cell, MISSING))
            if contents is not MISSING:
                self.lines.append(f"{self.built[id(cell)]}.cell_contents = {self.build(contents)}")
        for attribute in ("__kwdefaults__", "__qualname__", "__doc__", "__module__"):
            if (v := getattr(value, attribute)) is not None:
                self.lines.append(f"{name}.{attribute} = {self.build(v)}")
        self._attributes(value, name)
        return name

    def _object(self, value, t: type) -> str:
        """An expression that makes an object of the user's class, whose methods ran while the program was captured."""
        allocating = next(c for c in t.__mro__ if "__new__" in c.__dict__)
        if allocating.__flags__ & HEAP_TYPE and type(allocating.__new__) is types.BuiltinFunctionType:
            return self._reduced(value, t)
        # the user's own __new__ and __init__ ran while the program was captured
        builtin = next(c for c in t.__mro__ if not of_python(c))
        arguments = f", *{self.build(value.args)}" if isinstance(value, BaseException) else ""
        name = self.variable(value, f"{self.pin(builtin.__new__)}({self.pin(t)}{arguments})")
        self._attributes(value, name)
        if isinstance(value, BaseException):
            self.lines.append(f"{self.pin(remade.SET_ARGS, 'set_args')}({name}, {self.build(value.args)})")
        return name

    def _reduced(self, value, t: type) -> str:
        """An object of a class made in C, which no other class can make: built as a copy is."""
        try:
            make, args, state, *_ = (*value.__reduce_ex__(2), None, None)[:3]
        except TypeError as error:
            self.c.refuse(f"a {t.__name__} leaves the compiled function: {error}", "return the values in it")
        name = self.variable(value, f"{self.pin(make)}(*{self.build(args)})")
        if state is not None and hasattr(t, "__setstate__"):
            self.lines.append(f"{name}.__setstate__({self.build(state)})")
        elif state is not None:
            self._attributes(value, name)
        return name

    def _attributes(self, value, name: str) -> None:
        space = remade.space_of(value, name, self.pin)
        for k, v in plain_attribute(value, "__dict__", {}).items():
            self.lines.append(f"{space}[{k!r}] = {self.build(v)}")
        for slot in slots(type(value)):
            if (held := plain_attribute(value, slot, MISSING)) is not MISSING:
                new = self.build(held)
                self.lines.append(f"{self.pin(object.__setattr__)}({name}, {slot!r}, {new})")

    # --- effects
    def effects(self) -> None:
        """Statements that write back, values first: nothing is written before everything was computed."""
        c = self.c
        writes, of_own = [], list[Effect]()
        for effect in list(c.effects):
            if type(effect.owner) is TensorProxy and not self._is_outside(effect.owner):
                of_own.append(effect)
            else:
                writes.append(self._write(*effect))
        for kind, original, source, k, v in containers.changes(c):
            writes.append(self._write_container(kind, original, self.path(source), k, v))
        while leaving := [effect for effect in of_own if self._leaves(effect.owner)]:  # with what is written to them
            of_own = [effect for effect in of_own if not any(effect is other for other in leaving)]
            writes += [self._write(*effect) for effect in leaving]
        self.lines += [w for w in writes if w]
        for p in c.tensors.frozen:
            if p not in c.tensors.leaves or id(p) in self.values:
                self.lines.append(f"{self.itself(p)}.requires_grad_(False)")
        if left := c.effects.settings:
            values = ", ".join(f"{name!r}: {self.literal(value)}" for name, value in left.items())
            self.lines.append(f"{self.pin(compat.set_settings)}({{{values}}})")

    def _is_outside(self, p: TensorProxy) -> bool:
        return p in self.c.tensors.real and p not in self.c.tensors.leaves

    def _leaves(self, p: TensorProxy) -> bool:
        """Whether a tensor of the program's own is in its result so far. What is written to another is dead, and may be
        out of date."""
        memory = self.c.recorder.memory
        return id(p) in self.values or memory.holder(p) not in memory.stale and id(memory.latest(p)) in self.values

    def _write(self, kind: str, o, n, v) -> str:
        """The statement that carries out a write of the program to an object from outside."""
        if kind == "attr" and type(o) is TensorProxy:
            target = self.path(self.c.tensors.real[o][1]) if self._is_outside(o) else self.build(o)
            return f"{self.pin(setattr)}({target}, {n!r}, {self.build(v)})"
        if kind == "attr":
            target = self.path(c_source) if (c_source := self.c.world.sources.get(id(o))) is not None else self.pin(o)
            return f"{self._natively('setattr', o)}({target}, {n!r}, {self.build(v)})"
        if kind == "entry":
            return f"{self.path(self.c.world.sources[id(o)])}.__dict__[{n!r}] = {self.build(v)}"
        if kind == "context":
            return f"{self.pin(o)}.set({self.build(v)})"
        if kind == "data":
            return f"{self.itself(o)}.data = {self.value(without_history(self.c, latest(self.c, o)))}"
        if kind == "grad":
            path = self.path(self.c.tensors.real[o][1]) if o in self.c.tensors.placements else self.build(o)
            return f"{path}.grad = {self._gradient(path, o, v)}"
        if kind == "delattr":
            return f"{self._natively('delattr', o)}({self.path(self.c.world.sources[id(o)])}, {n!r})"
        if kind == "global":
            return f"{self.pin(o)}[{n!r}] = {self.build(v)}"
        owner = self.c.outside.cells[id(o)]
        is_anew = id(owner) in self.c.world.anew
        return f"{self._cell(owner, o) if is_anew else self.pin(o)}.cell_contents = {self.build(v)}"

    def _gradient(self, path: str, p: TensorProxy, value) -> str:
        """An expression for a new gradient: the DTensor of a parameter's is as the parameter, and soon made."""
        part = None
        if type(value) is TensorProxy and not self._is_outside(self.c.recorder.memory.holder(value)):
            spec = dtensors.spec_of(self.c, value)
            if spec is not None and spec == dtensors.held_as(self.c, p):
                part = dtensors.part_that_leaves(self.c, value)
        return self.build(value) if part is None else f"{self.pin(like)}({path}, {self.value(part[0])})"

    def _natively(self, how: str, o) -> str:
        """How an attribute is written back or deleted: the user's own `__setattr__` or `__delattr__` ran while the
        program was captured, and does not run again."""
        if type(getattr(type(o), f"__{how}__")) is not types.FunctionType or isinstance(o, type):
            return how
        return self.pin(getattr(torch.nn.Module if isinstance(o, torch.nn.Module) else object, f"__{how}__"))

    def _write_container(self, kind: str, original, x: str, k, v) -> str:
        """The statement that carries out a change of a container from outside."""
        t = type(original)
        # a subclass's own methods ran while the program was captured
        base = None if t in CONTAINERS else container_base(t)
        if kind == "item":
            if base is None:
                return f"{x}[{self.build(k)}] = {self.build(v)}"
            return f"{self.pin(base.__setitem__)}({x}, {self.build(k)}, {self.build(v)})"
        if kind == "delitem":
            key = self.build(k)
            return f"del {x}[{key}]" if base is None else f"{self.pin(base.__delitem__)}({x}, {key})"
        method = "update" if kind in ("set", "replacedict") else "extend"
        if t is collections.Counter:
            base = dict  # whose update sets, and does not add
        add = f"{x}.{method}(" if base is None else f"{self.pin(getattr(base, method))}({x}, "
        clear = "" if kind == "extend" else f"{x}.clear(); " if base is None else f"{self.pin(base.clear)}({x}); "
        return f"{clear}{add}{self.build(v)})"

    # --- the whole
    def write(self, result) -> tuple[Trace | None, Callable | None, Any]:
        """(trace, function, the result of the computation). No trace and no function where the computation's value is
        the result."""
        c = self.c
        if not (self.writes or c.engine.freed or c.modes.inference.values) and is_plain(c, result, set()):
            return None, None, map_structure(lambda x: latest(c, x) if type(x) is TensorProxy else x, result)
        afterwards.write(self)
        expression = self.build(result)
        self.effects()
        trace, function = self.program("epilogue", "fn, args, kwargs, values", expression)
        return trace, function, tuple(value for _, value in self.values.values())

    def program(self, name: str, signature: str, result: str) -> tuple[Trace, Callable]:
        """The statements as a function of the computation's values."""
        names = [name for name, _ in self.values.values()]
        unpack = [f"{', '.join(names)}, = values"] if names else []
        lines = [
            BoundSymbol(check_symbol("pack"), (), {"text": [text], "objects": {}}, None, inputs=(), outputs=())
            for text in (*unpack, *self.lines)
        ]
        return written(name, signature, lines, result, self.names, self.objects)


def latest(c: Capture, value: TensorProxy) -> TensorProxy:
    """The value that a proxy stands for in the end; views of tensors that were written to are rebuilt."""
    memory = c.recorder.memory
    if memory.leaves_apart(value) or memory.apart.get(memory.base(value)) in c.tensors.real:
        c.refuse(
            "the program returns a leaf that shares memory with another tensor (requires_grad_())",
            "create it from a clone: x.detach().clone().requires_grad_()",
        )
    with recording(c.recorder):
        current = c.recorder.latest(value)
    return c.tensors.reshaped.get(current, current)
