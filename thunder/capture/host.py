"""Capture: the interpreter's host that reads a PyTorch program.

Values travel bare. An object reachable from the call's arguments, from the function, its globals or closures has a source in a side table, by identity.
Reading through a source turns tensors into proxies, guards primitive values, and turns containers into snapshots whose children are read when
somebody looks. Operations on proxies are recorded; writes to outside objects become effects.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import linecache
import math
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch

from thunder import _torch_compat as compat
from thunder.capture import calls, containers, objects, opaque_values, operators
from thunder.capture.library import backward, collectives, triton_kernels
from thunder.capture.library.functional import original
from thunder.capture.native import BUFFERS, CONTAINERS, DICT_VIEWS, ENUM, IDENTITY, IMMUTABLE, PRIMITIVE, native_module, plain_base, tracked_anyway
from thunder.capture.sources import Source
from thunder.capture.strides import layout
from thunder.core.proxies import AnyProxy, Condition, FloatProxy, IntegerProxy, NumberProxy, Proxy, TensorProxy, concrete, map_structure
from thunder.core.symbol import Context, Names, Recorder, recording
from thunder.core.symbolic import constant, symbol
from thunder.distributed.placement import Placement, placement_of
from thunder.errors import CaptureError
from thunder.interpreter import ProtocolHost, format_location
from thunder.ops import autocast, inplace
from thunder.ops.memory import Memory, are_disjoint, part_shown
from thunder.ops.opaque_values import is_unusual
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype
from thunder.options import CACHE_OPTIONS, JitOptions

__all__ = ["Capture"]

_RESERVED = {"torch", "Tensor", "ltorch", "prims", "dtypes", "devices", "math", "thunder", "float", "complex", "slice", "computation", "fn", "args", "kwargs", "values"}


@functools.cache
def _is_library(module: str | None) -> bool:
    return bool(module) and (native_module(module) or module.startswith(("torch.", "triton.")))


class Capture(ProtocolHost):
    """One reading of a program. Everything named by an id here is kept alive by `keep` until the reading is over."""

    named_type = TensorProxy
    uncatchable = (*ProtocolHost.uncatchable, CaptureError)

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, options: JitOptions, changing: dict | None = None, overrides: tuple[dict, ...] = ()):
        super().__init__(record_history=options.debug.record_interpreter_history)
        self.fn, self.args, self.kwargs, self.options = fn, args, kwargs, options
        self.symbolic = options.cache is CACHE_OPTIONS.SYMBOLIC_VALUES
        self.changing = changing or {}  # paths, in words, whose numbers stay symbolic: those that earlier readings saw written, or that had other values
        self.parameters = parameter_names(fn)
        self.overrides = overrides  # what stands in the place of a compiled module's parameters and buffers, by name
        self.replaced = replaced_tensors(fn, overrides)
        self.replaced_sources: dict[Source, tuple[dict, str]] = {}
        self.replacements = options.replacements
        names = Names()
        names.taken |= _RESERVED
        for executor in options.executors:
            names.taken.update(executor.opmap)
        self.recorder = Recorder(Context(names, grad_enabled=torch.is_grad_enabled()), location=self.own_location, where=self.user_location)
        self.recorder.memory = Memory(outside=self.written_to, layout=functools.partial(layout, self))
        self.recorder.is_leaf = self.is_leaf
        late = triton_kernels.launchers() | collectives.handlers()
        self.handlers = {id(f): handler for f, handler in late.items()}  # of functions in modules that few programs import
        self.outer_recorders: list[Recorder] = []  # while a part of the program is recorded apart
        # where values come from
        self.sources: dict[int, Source] = {}
        self.keep: dict[int, Any] = {}
        self.pinned: dict[Source, Any] = {}  # modules of the compiled root: the entry may hold them
        root = original(fn)
        root = root.__self__ if type(root) is types.MethodType else root
        self.rooted = {id(m) for m in root.modules()} if isinstance(root, torch.nn.Module) else set()
        self.constants: dict[str, Any] = {}
        self.constant_sources: dict[int, Source] = {}
        self.tensors: dict = {}  # id(tensor), or source for arguments -> proxy
        self.real: dict[TensorProxy, tuple[torch.Tensor, Source]] = {}
        self.placements: dict[Proxy, Placement] = {}  # of parameters that the ranks hold together
        self.opaque_inputs: dict[int, tuple[AnyProxy, Source]] = {}  # id of a sparse or nested tensor, or of one of a subclass with its own rules
        self.has_opaque_values = False
        self.mutated: dict[TensorProxy, None] = {}  # those that the program writes to
        self.reshaped: dict[TensorProxy, TensorProxy] = {}  # arguments under the shape they have in the end -> the same
        self.layouts: dict = {}  # values that were asked for strides -> stand-ins that have them
        self.fake_mode = None
        # what the program was found to depend on
        self.guards: dict[tuple, Any] = {}
        self.namespaces: dict[int, tuple] = {}
        self.arrays: dict[int, numpy.ndarray] = {}  # from outside, whose memory tensors of them share
        self.builtins: dict[int, tuple] = {}  # id(globals) -> (globals, names that are builtins because the globals have none)
        self.function_sources: dict[int, Source] = {}
        self.functions: dict[int, tuple] = {}  # id(function) -> (function, whether a default of it was used)
        self.tensor_guards: dict[Source, tuple] = {}
        self.questions: dict[tuple, Any] = {}  # (function without arguments, None), or (object, name of an attribute), of PyTorch's state -> the answer
        self.dict_items: set[Source] = set()
        self.hook_dicts: list[dict] = []
        self.engine = backward.Engine()
        self.used: set = set()  # once the program is read: the values that its lines and its result are made of
        self.relations: dict[tuple, bool] = {}
        self.number_sources: dict[str, Source] = {}
        self.sizes: set[str] = set()  # symbolic tensor sizes: they are at least 2
        self.numbers: dict[Source, NumberProxy] = {}
        # containers, and what the program wrote
        self.snapshots: dict[int, Any] = {}  # id(original) -> snapshot
        self.lazy: dict[int, tuple] = {}  # id(snapshot) -> (original, source), while nobody has looked
        self.pristine: dict[int, tuple] = {}  # id(snapshot) -> (original, source, what was read)
        self.read_items: dict[int, dict] = {}
        self.overlay: dict[tuple, Any] = {}
        self.effects: dict[tuple, tuple] = {}
        self.written: set[Source] = set()
        self.attribute_dicts: dict[int, tuple] = {}  # id(copy of an object's __dict__) -> (copy, object, what the program has seen)
        self.fresh: set[int] = set()
        self.outside_iterators: dict[int, Any] = {}
        self.sharp_edges: list[str] = []
        self.looked_up: dict[tuple, Any] = {}  # (class, name, base behind which) -> what stands there
        self.class_dicts: dict[type, Any] = {}
        self.context_tokens: dict[contextvars.ContextVar, contextvars.Token] = {}  # variables that the program has set -> what its first `set` gave
        self.compiling = self.asked_whether_compiling = False  # what torch.compiler.is_compiling() says, and whether the program asked
        self.stand_ins: dict[int, tuple] = {}  # ids that the program was told -> (source, what came in through it)
        self.passing: set[int] = set()  # ids of objects that the program holds weakly only
        self.cached_calls: dict[tuple, functools.partial] = {}  # of functions behind functools.lru_cache, by function and arguments
        self.in_cached_call = 0
        self.seen_names: set = set()
        self.seen_hooks: set[int] = set()
        self.function_modes = -1  # how many torch-function modes are active, the program's `with torch.device(...)` among them

    # ------------------------------------------------------------------------------------------------ sources and guards

    def const(self, value, label: str = "") -> Source:
        """A source that is the object itself, pinned in the generated code."""
        found = self.constant_sources.get(id(value))
        if found is None:
            name = f"K{len(self.constants)}"
            self.constants[name], self.keep[id(value)] = value, value
            found = self.constant_sources[id(value)] = Source(None, "const", name, label or getattr(value, "__name__", type(value).__name__))
        return found

    def guard(self, source: Source, kind: str, expected, other: Source | None = None) -> None:
        self.guards.setdefault((source, kind, other), expected)

    def namespace(self, space, label: str, name: str, value) -> None:
        """`name` in a module's globals or a class means this object: one batched identity check for each namespace."""
        entry = self.namespaces.get(id(space))
        if entry is None:
            entry = self.namespaces[id(space)] = (space, label, {})
            self.keep[id(space)] = space
        entry[2].setdefault(name, value)

    def relate(self, a, relation: str, b, outcome: bool) -> None:
        """The program decided by a relation between symbolic numbers. What follows from a size being at least 2 needs no guard."""
        if b.is_constant and b.constant < 2 and str(a) in self.sizes and type(b.constant) is int:
            return
        self.relations.setdefault((a, relation, b), outcome)

    def known(self, value, source: Source) -> None:
        self.sources[id(value)], self.keep[id(value)] = source, value

    def read(self, value, source: Source):
        """A value came in through a source: what the program may hold of it."""
        t = type(value)
        if t in PRIMITIVE:
            return self._primitive(value, t, source)
        if t is TensorProxy:
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value, source)
        if t in CONTAINERS or isinstance(value, (list, dict, set, collections.deque)):
            return containers.snapshot(self, value, source)
        known = self.sources.get(id(value))
        if known is not None:
            if known is not source:
                self.guard(source, *(("same", known) if known.step != "const" else ("is", value)))
            return value
        if isinstance(value, torch.nn.Module):
            if source.base is not None:
                self.guard(source, "is", value)
            if id(value) in self.rooted:
                self.pinned[source] = value
            self.known(value, source)
            return value
        return self._read_other(value, t, source)

    def _read_other(self, value, t: type, source: Source):
        """What is neither a primitive, a tensor, a container nor a module."""
        if isinstance(value, tuple):
            return self._tuple(value, source)
        if t is types.MethodType:
            self.guard(source, "type", types.MethodType)
            self.guard(source.attr("__func__"), "is", value.__func__)
            return types.MethodType(value.__func__, self.read(value.__self__, source.attr("__self__")))
        if isinstance(value, IMMUTABLE):
            self.guards.setdefault((source, "value", None), value)
            return value
        if isinstance(value, BUFFERS):
            self.guards.setdefault((source, "value", None), copy.copy(value))
            return value
        if t is types.MappingProxyType:
            self.guard(source, "type", t)
            self.guard(source, "keys", tuple(value))
            return types.MappingProxyType({k: self.read(x, source.item(k)) for k, x in value.items()})
        if t in DICT_VIEWS:
            self.refuse(f"{source.describe(self.parameters)} is a {t.__name__}, a view of a dict from outside", "pass the dict, or list(...) of the view")
        if t is frozenset:
            self.guard(source, "type", t)
            self.guard(source, "set", tuple(value))
            self.known(value, source)
            elements = self.elements(value)
            return value if all(a is b for a, b in zip(elements, value, strict=True)) else t(elements)
        if t is numpy.ndarray:
            self.guards.setdefault((source, "array", None), value.copy())
            self.keep[id(value)] = self.arrays[id(value)] = value
            return value
        if plain_base(t) is not None and not isinstance(value, ENUM):
            self.known(value, source)
            self.guard(source, "plain", value)
            return value
        if t in IDENTITY or isinstance(value, (type, ENUM, frozenset)) or (native_module(t.__module__) and not isinstance(value, (*tracked_anyway, weakref.ref))):
            if hasattr(t, "__next__") and t.__module__ == "builtins":
                self.outside_iterators[id(value)] = value
            self.guard(source, "is", value)
            if t is torch.Generator:
                self.known(value, source)
            if t is types.FunctionType:
                self.function_sources.setdefault(id(value), source)
            if t is functools.partial or (t is types.FunctionType and source.root.key in ("args", "kwargs")):
                self.known(value, source)
            return value
        self.known(value, source)
        self.guard(source, "type", t)
        return value

    def elements(self, value) -> list:
        """The elements of a set from outside: objects among them are pinned, and their attributes guarded."""
        return [x if type(x) in PRIMITIVE or isinstance(x, tuple) else self.read(x, self.const(x)) for x in value]

    def _primitive(self, value, t: type, source: Source):
        plain = t is int or t is float and value != 0 and math.isfinite(value)  # what an equation says all about
        if self.symbolic and plain and source.root.key in ("args", "kwargs") and not (t is int and value in (0, 1)):
            return self.number(value, source)
        if self.changing and plain and (path := source.describe(self.parameters)) in self.changing and value not in (self.changing[path] or ()):
            return self.number(value, source)
        self.guards.setdefault((source, "value", None), value)
        return value

    def held_numbers(self) -> dict[str, int | float]:
        """The numbers that the program holds for one value of and that stay symbolic once they were another, by their paths: int arguments, and floats that are read
        from objects (the learning rate of an optimizer)."""

        def may_change(source: Source, value) -> bool:
            argument = source.root.key in ("args", "kwargs")
            if type(value) is int:
                return argument and self.options.integers_may_change
            return type(value) is float and value == value and not (argument and source.base is source.root)

        return {s.describe(self.parameters): v for (s, kind, _), v in self.guards.items() if kind == "value" and may_change(s, v)}

    def number(self, value, source: Source) -> NumberProxy:
        """A number that stays symbolic."""
        found = self.numbers.get(source)
        if found is None:
            t = type(value)
            name = self.recorder.context.names.make("i" if t is int else "f")
            found = self.numbers[source] = (IntegerProxy if t is int else FloatProxy)(name, value, symbol(name), self.relate)
            self.number_sources[name] = source
            if source.step != "size":
                self.guard(source, "type", t)
            if source.step == "size":
                self.relations[symbol(name), ">", constant(1)] = True
                self.sizes.add(name)
            elif t is int and value not in (0, 1) and source.root.key in ("args", "kwargs"):
                for special in (0, 1):
                    self.relate(symbol(name), "!=", constant(special), True)
        return found

    def _tuple(self, value: tuple, source: Source):
        if all(type(x) in PRIMITIVE for x in value) and not self.symbolic:
            self.guard(source, "value", value)
            return value
        self.guard(source, "type", type(value))
        self.guard(source, "len", len(value))
        children = [self.read(x, source.item(i)) for i, x in enumerate(value)]
        return type(value)._make(children) if hasattr(value, "_make") else tuple(children) if type(value) is tuple else type(value)(children)

    # ------------------------------------------------------------------------------------------------ tensors

    def tensor(self, value: torch.Tensor, source: Source) -> TensorProxy | AnyProxy:
        """The proxy for a tensor. Every argument position has its own; a tensor of the module's has one, however it is reached."""
        is_argument = source.root.key in ("args", "kwargs")
        key = source if is_argument else id(value)
        if self.replaced and id(value) in self.replaced:
            self.replaced_sources[source] = self.replaced[id(value)]
        found = self.tensors.get(key)
        if found is None:
            with torch._C.DisableTorchFunction():  # what is asked of the real tensor here is not part of the program
                if is_unusual(value):
                    return opaque_values.read(self, value, source)
                found = self.tensors[key] = self._new_proxy(value, source, is_argument)
            self.keep[id(value)] = value
        elif self.real[found][1] is not source:
            self.guard(source, "same", self.real[found][1])
        return found

    def _new_proxy(self, value: torch.Tensor, source: Source, is_argument: bool) -> TensorProxy:
        shape: tuple = tuple(value.shape)
        guarded = shape
        if self.symbolic and is_argument:
            guarded = tuple(n if n < 2 else None for n in shape)
            shape = tuple(n if n < 2 else self.number(n, source.child("size", i)) for i, n in enumerate(shape))
        names, dtype = self.recorder.context.names, from_tensor_dtype(value.dtype)
        placement = placement_of(value)
        if placement is not None:  # whole in the program, a part of it in this process
            shape, dtype = placement.seen_shape, from_tensor_dtype(placement.dtype)
        if source in self.replaced_sources:  # read in the shape and dtype that the program was written for; a transform changes what reads it
            table, name = self.replaced_sources[source]
            value = table[name]
            guarded = tuple(value.shape)
            if (found := placement_of(value)) is None and placement is not None:
                self.refuse(
                    f"a transform put another tensor in the place of {name}, of which the ranks hold a part each",
                    "ddp or fsdp come after the transforms: thunder.jit(module, transforms=[...]) first, or the last of the list",
                )
            placement = found
        proxy = TensorProxy(
            names.claim(source.name(self.parameters)), shape=shape, dtype=dtype, device=self.options.device or from_tensor_device(value.device), requires_grad=value.requires_grad
        )  # fmt: skip
        self.tensor_guards[source] = (value, guarded)
        self.real[proxy] = (value, source)
        if placement is not None:
            self.placements[proxy] = placement
        for base in list(self.mutated):
            if base in self.mutated:
                self._share(base, proxy, value)
        return proxy

    def is_leaf(self, p: TensorProxy) -> bool:
        """Whether a proxy stands for a tensor whose casts eager's autocast keeps."""
        real = self.real.get(p)
        with torch._C.DisableTorchFunction():
            return real is not None and real[0].is_leaf and not real[0]._is_view()

    def written_to(self, base: TensorProxy, is_view: bool, detached: bool) -> None:
        """An in-place operation writes to `base`, or to a view of it, which may be `detached`. Raises where the program or thunder can not allow it."""
        if base not in self.real:
            return
        if base in self.placements and not self.placements[base].is_whole:
            self.refuse(f"{base.name} is written to, and the ranks hold a part of it each", "write to it outside of the compiled function: call optimizer.step() there")
        with torch._C.DisableTorchFunction():
            differentiable, leaf = self.real[base][0].requires_grad and torch.is_grad_enabled(), self.real[base][0].is_leaf
        if differentiable and not detached:
            if leaf:
                raise RuntimeError(f"a {'view of a ' * is_view}leaf Variable that requires grad is being used in an in-place operation.")
            self.refuse("an argument that requires grad, and is the result of another operation, is written to", "write to a clone of it")
        if base not in self.mutated:
            self.mutated[base] = None
            for other, (tensor, _) in list(self.real.items()):
                if base in self.mutated:
                    self._share(base, other, tensor)

    def _share(self, base: TensorProxy, other: TensorProxy, tensor: torch.Tensor) -> None:
        """Two tensors from outside, one of which is written to: if one of the two shows what the other holds it is a view of it here. A partial overlap is refused."""
        real, source = self.real[base]
        memory = self.recorder.memory
        with torch._C.DisableTorchFunction():
            if other is base or _memory_of(real) != _memory_of(tensor) or not tensor.numel() or other in memory.view_of:
                return
            mine, others = (part_shown(real, tensor), part_shown(tensor, real)) if real.dtype is tensor.dtype else (None, None)
            disjoint = mine is None and others is None and are_disjoint(real, tensor)
            connected = real.requires_grad or tensor.requires_grad  # each has a history of its own
        if tensor is real:
            self.guard(self.real[other][1], "same", source)
            memory.same(other, base)
            return
        if not disjoint and (connected or mine is None and others is None):
            self.refuse(
                f"{base.name} is written to, and {other.name} shares memory with it",
                "pass a clone of one of the two, or pass one tensor and make the other from it inside the function",
            )
        map_structure(concrete, (base.shape, other.shape))
        if others is None and mine is not None:
            self._shares(source, self.real[other][1])
            value = memory.current.get(base)
            del self.mutated[base]
            memory.same(base, other, mine)
            self.written_to(other, True, False)
            if value is not None:  # written to before the other one was read
                memory.write(base, value)
            return
        self._shares(self.real[other][1], source)
        if others is not None:
            memory.same(other, base, others)

    def _shares(self, source: Source, other: Source) -> None:
        """Two tensors lie in memory as they do now."""
        if (other, "shares", source) not in self.guards:
            self.guard(source, "shares", other, other)

    def write_back(self) -> None:
        """The last lines of the program: what came from outside gets what was written to it."""
        memory = self.recorder.memory
        if not memory.active:
            return
        with recording(self.recorder):
            for base in list(self.mutated):
                value, target = memory.latest(base), base
                if value is base:
                    if base in memory.counted:  # a view of it changed its shape
                        inplace.count_write.record(self.recorder, (base,), {}, None)
                    continue
                if value.requires_grad and not base.requires_grad:
                    self.refuse(f"{base.name}, which does not require grad, is overwritten with what does", "write to it under torch.no_grad(), or detach the value")
                for symbol, arguments in memory.rearranged.get(base, ()):
                    form = inplace.rearranging(symbol)
                    target = form.record(self.recorder, (target, *arguments), {}, form.meta(target, *arguments))
                if base in memory.filled:
                    copy = inplace.write_back if base in memory.counted else inplace.write_back_uncounted
                    copy.record(self.recorder, (target, value), {}, None)
                    for other in memory.below(base) if copy is inplace.write_back else ():
                        if other in self.real:
                            inplace.also_written.record(self.recorder, (other,), {}, None)
                memory.written_back(base, target)
                self.reshaped[target] = base
            memory.settle()

    def lift(self, value):
        """A real tensor that came from nowhere the program can name: pinned."""
        assert not isinstance(value, torch._subclasses.FakeTensor), "a fake tensor of an opaque operation was not turned into a proxy"
        if type(value) is Condition:
            return bool(value)  # an error, where no check of the program decides it
        return self.tensor(value, self.const(value, "constant tensor")) if isinstance(value, torch.Tensor) else value

    def name_value(self, value, name: str) -> None:
        """The first variable that a result is stored in gives it its name, where that is free."""
        current = value.name
        names = self.recorder.context.names
        if current[:1] == "t" and current[1:].isdigit() and name not in names.taken and value not in self.recorder.memory.current:
            names.taken.add(name)
            value.name = name

    def synchronize(self) -> None:
        """The recorder's context follows PyTorch's own modes, which the program switches as it always does."""
        context = self.recorder.context
        grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        cast = compat.autocast_state() if compat.any_autocast() else None
        if (modes := compat.function_modes()) != self.function_modes:
            self.function_modes = modes
            self.recorder.context = context = context.replace(default_device=compat.default_device())
        if grad is not context.grad_enabled or from_tensor_dtype(dtype) is not context.default_dtype or cast != getattr(context.autocast, "state", None):
            policy = autocast.policy(*cast) if cast else None
            self.recorder.context = context.replace(grad_enabled=grad, default_dtype=from_tensor_dtype(dtype), autocast=policy)

    # ------------------------------------------------------------------------------------------------ objects

    lookup, class_value, own, native_get = objects.lookup, objects.class_value, objects.own, objects.native_get
    missing, fallback, load_attr = objects.missing, objects.fallback, objects.load_attr
    store_attr, own_store, native_set = objects.store_attr, objects.own_store, objects.native_set
    delete_attr, own_delete, native_delete = objects.delete_attr, objects.own_delete, objects.native_delete
    load_global, store_global, delete_global = objects.load_global, objects.store_global, objects.delete_global

    def slot(self, t: type, name: str):
        """The Python function that implements a special method, or None."""
        found = self.lookup(t, name)
        return found if type(found) is types.FunctionType else None

    def build_class(self, body, name, bases, keywords):
        made = super().build_class(body, name, bases, keywords)
        self.fresh.add(id(made))
        self.keep[id(made)] = made
        return made

    # ------------------------------------------------------------------------------------------------ cells and defaults

    def load_cell(self, f, cell, name):
        if self.overlay and (id(cell), None) in self.overlay:
            return self.overlay[id(cell), None]
        try:
            value = super().load_cell(f, cell, name)
        except NameError:
            if id(f) not in self.fresh and name in f.__code__.co_freevars:
                self.guards.setdefault((self._cell_source(f, name), "empty", None), None)
            raise
        if id(f) in self.fresh or name == "__class__" or type(value) in (TensorProxy, types.CellType):
            return value
        if name not in f.__code__.co_freevars or native_module(f.__globals__.get("__name__")):
            return value
        return self.read(value, self._cell_source(f, name))

    def _cell_source(self, f, name: str) -> Source:
        source = (self.sources.get(id(f)) or self.const(f)).child("cell", f.__code__.co_freevars.index(name), name)
        source.label = name
        return source

    def store_cell(self, f, cell, v):
        index = name_of_cell(f, cell)
        if id(f) in self.fresh or index is None:
            cell.cell_contents = v
            return
        source = self.const(f).child("cell", index, f.__code__.co_freevars[index])
        source.label = f.__code__.co_freevars[index]
        self.written.add(source)
        self.keep[id(cell)] = cell
        self.overlay[id(cell), None] = v
        self.effects[id(cell), None] = ("cell", cell, None)

    def enter(self, f, args, kwargs):
        if id(f) not in self.functions and id(f) not in self.fresh and not native_module(f.__globals__.get("__name__")):
            self.keep[id(f)], self.functions[id(f)] = f, (f, False)
        return super().enter(f, args, kwargs)

    def made_function(self, f):
        self.fresh.add(id(f))
        self.keep[id(f)] = f
        return f

    def default(self, f, name, value):
        if type(value) is TensorProxy or id(f) in self.fresh or native_module(f.__globals__.get("__name__")):
            return value
        code = f.__code__
        source = self.sources.get(id(f)) or self.const(f)
        if name in (f.__kwdefaults__ or ()):
            return self.read(value, source.attr("__kwdefaults__").item(name))
        self.functions[id(f)] = (f, True)
        if type(value) in PRIMITIVE:
            return value
        index = code.co_varnames.index(name) - code.co_argcount
        return self.read(value, source.attr("__defaults__").item(index))

    # ------------------------------------------------------------------------------------------------ containers, operators

    binary, unary, compare = operators.binary, operators.unary, operators.compare
    native_binary, native_unary, native_compare = operators.native_binary, operators.native_unary, operators.native_compare
    native_index, converted, type_name = operators.native_index, operators.converted, operators.type_name
    getitem, native_getitem, native_setitem, native_delitem = operators.getitem, containers.getitem, containers.setitem, operators.native_delitem
    native_contains, native_iter, native_next, native_len = containers.contains, containers.iterate, operators.native_next, operators.native_len
    truth, native_truth, unpack = operators.truth, operators.native_truth, operators.unpack
    native_text, native_isinstance, asks_in_python = operators.native_text, operators.native_isinstance, operators.asks_in_python

    def hashed(self, keys, others=()):
        if self.sources:
            calls.leak_inside(self, keys)
            for i, k in enumerate(keys):
                containers.told_apart(self, k, others)
                containers.told_apart(self, k, keys[:i])

    def touch(self, value):
        if self.lazy and id(value) in self.lazy:
            containers.observe(self, value)
        return value

    def same(self, a, b):
        if a is b:
            return True
        ta, tb = type(a), type(b)
        if ta is not tb or ta in PRIMITIVE:
            return False
        if ta is TensorProxy:
            return self._same_tensor(a, b)
        sa, sb = self.sources.get(id(a)), self.sources.get(id(b))
        if sa is not None and sb is not None:
            self.guard(sa, "isnot", sb, sb)
        return False

    def _same_tensor(self, a, b) -> bool:
        if a not in self.real or b not in self.real:
            return False
        (x, sx), (y, sy) = self.real[a], self.real[b]
        if x is y:
            self.guard(sx, "same", sy, sy)
        else:
            self.guard(sx, "isnot", sy, sy)
        return x is y

    # ------------------------------------------------------------------------------------------------ calls

    def operation(self, name: str, *operands):
        """A special method of a tensor."""
        return calls.operation(self, name, operands)

    def call(self, f, args, kwargs):
        return calls.call(self, f, args, kwargs)

    def call_native(self, f, args, kwargs):
        return calls.call_native(self, f, args, kwargs)

    def restore_context(self) -> None:
        """Context variables that the program leaves set are as they were: the epilogue sets them."""
        for variable, token in self.context_tokens.items():
            self.keep[id(variable)] = variable
            self.overlay[id(variable), None] = variable.get()
            self.effects[id(variable), None] = ("context", variable, None)
            variable.reset(token)
        self.context_tokens = {}

    # ------------------------------------------------------------------------------------------------ trouble

    def own_location(self) -> tuple | None:
        """`location` of the innermost frame that is not library code; of the innermost one where all are."""
        for frame in reversed(self.stack_of_frames):
            if not _is_library(frame.fn.__globals__.get("__name__", "")):
                return frame.fn.__code__, frame.ip
        return self.location()

    def user_location(self) -> tuple | None:
        """(filename, line, function, source line) of the innermost frame that is not library code."""
        location = self.own_location()
        if location is None:  # the program has returned: where it is defined
            fn = original(self.fn)
            target = fn.forward if isinstance(fn, torch.nn.Module) else fn
            code = getattr(getattr(target, "__func__", target), "__code__", None)
            return None if code is None else (code.co_filename, code.co_firstlineno, code.co_qualname, linecache.getline(code.co_filename, code.co_firstlineno))
        filename, line, _, source, function = format_location(location)
        return filename, line, function, source or ""

    def refuse(self, reason: str, remedy: str = ""):
        raise CaptureError(reason, location=self.user_location(), remedy=remedy)

    def sharp(self, what: str) -> None:
        """Something that a compiled program cannot repeat: listed, warned about, or an error, by option."""
        calls.sharp_edge(self, what)

    # ------------------------------------------------------------------------------------------------ for the prologue

    def distinct_groups(self) -> list[tuple[list[Source], str]]:
        """Where the program writes, what it writes to must stay apart from what it reads. Tensors with gradients are one each, for what is written to is checked by itself."""
        leaves = [self.real[p][1] for p in self.engine.leaves.values() if p not in self.mutated]
        if not self.effects and not containers.changed(self):
            return [(leaves, "tensors")]
        boxes = [
            s for i, s in self.sources.items()
            if s.step != "const" and not isinstance(self.keep.get(i), torch.nn.Module) and s.key != "__dict__"
        ]  # fmt: skip
        return [(leaves, "tensors"), (list(dict.fromkeys(boxes)), "objects")]


def name_of_cell(f, cell) -> int | None:
    """The index of a cell in a function's closure, None for a cell of the running frame itself."""
    for i, c in enumerate(f.__closure__ or ()):
        if c is cell:
            return i
    return None


def parameter_names(fn) -> tuple[str, ...]:
    """Names of the positional parameters that the user wrote, without self; beyond them `name_0`, `name_1` for `*name`."""
    fn = original(fn)
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    bound = isinstance(target, types.MethodType)
    target = getattr(target, "__func__", target)
    while isinstance(target, functools.partial):
        target = target.func
    code = getattr(target, "__code__", None)
    if code is None:
        code, bound = getattr(vars(type(target)).get("__call__"), "__code__", None), True
    if code is None:
        return ()
    names = code.co_varnames[: code.co_argcount][1 if bound else 0 :]
    if code.co_flags & 4:
        rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        names = (*names, *(f"{rest}_{i}" for i in range(64)))
    return tuple(names)


def replaced_tensors(fn, overrides: tuple[dict, ...]) -> dict[int, tuple[dict, str]]:
    """For the id of each of the module's own tensors that is replaced: (the overrides, its name in them). What the module has not itself is added, not replaced."""
    found: dict[int, tuple[dict, str]] = {}
    if any(overrides):
        own = dict(fn.named_parameters(remove_duplicate=False)) | dict(fn.named_buffers(remove_duplicate=False))
        for table in overrides:
            found |= {id(own[name]): (table, name) for name in table if name in own}
    return found


def _memory_of(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common; those on the meta device have none, and a storage each all the same."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata
