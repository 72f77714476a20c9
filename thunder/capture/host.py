"""Capture: the interpreter's host that reads a PyTorch program.

Values travel bare. An object reachable from the call's arguments, from the function, its globals or closures has a source in a side table, by identity.
Reading through a source turns tensors into proxies, guards primitive values, and turns containers into snapshots whose children are read when
somebody looks. Operations on proxies are recorded; writes to outside objects become effects.
"""

from __future__ import annotations

import collections
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
from thunder.capture import calls, containers, opaque_values
from thunder.capture.library import backward, collectives, distributions, triton_kernels
from thunder.capture.library.functional import original
from thunder.capture.native import BUFFERS, CONTAINERS, DICT_VIEWS, ENUM, IDENTITY, IMMUTABLE, PRIMITIVE, native_module, plain_base, tracked_anyway
from thunder.capture.sources import Source
from thunder.capture.strides import layout
from thunder.core.proxies import AnyProxy, Condition, FloatProxy, IntegerProxy, NumberProxy, Proxy, TensorProxy, concrete, map_structure
from thunder.core.symbol import Context, Names, Recorder, recording
from thunder.core.symbolic import constant, symbol
from thunder.distributed.placement import Placement, placement_of
from thunder.errors import CaptureError
from thunder.interpreter import Host, format_location
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


class Capture(Host):
    """One reading of a program. Everything named by an id here is kept alive by `keep` until the reading is over."""

    named_type = TensorProxy
    uncatchable = (*Host.uncatchable, CaptureError)

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
        self.resolved: dict[tuple, tuple] = {}
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

    def _known(self, value, source: Source) -> None:
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
            self._known(value, source)
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
            self._known(value, source)
            elements = self.elements(value)
            return value if all(a is b for a, b in zip(elements, value, strict=True)) else t(elements)
        if t is numpy.ndarray:
            self.guards.setdefault((source, "array", None), value.copy())
            self.keep[id(value)] = self.arrays[id(value)] = value
            return value
        if plain_base(t) is not None and not isinstance(value, ENUM):
            self._known(value, source)
            self.guard(source, "plain", value)
            return value
        if t in IDENTITY or isinstance(value, (type, ENUM, frozenset)) or (native_module(t.__module__) and not isinstance(value, (*tracked_anyway, weakref.ref))):
            if hasattr(t, "__next__") and t.__module__ == "builtins":
                self.outside_iterators[id(value)] = value
            self.guard(source, "is", value)
            if t is torch.Generator:
                self._known(value, source)
            if t is types.FunctionType:
                self.function_sources.setdefault(id(value), source)
            if t is functools.partial or (t is types.FunctionType and source.root.key in ("args", "kwargs")):
                self._known(value, source)
            return value
        self._known(value, source)
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

    # ------------------------------------------------------------------------------------------------ attributes

    def resolve(self, t: type, name: str) -> tuple:
        """(kind, attribute, owner) of a name on a class: property, func, data (descriptor), get (descriptor), plain; None where there is none."""
        found = self.resolved.get((t, name))
        if found is None:
            found = (None, None, None)
            for c in t.__mro__:
                if name in c.__dict__:
                    a = c.__dict__[name]
                    ta = type(a)
                    kind = (
                        "property" if ta is property else "func" if ta is types.FunctionType else "data" if hasattr(ta, "__set__")
                        else "get" if hasattr(ta, "__get__") else "plain"
                    )  # fmt: skip
                    found = (kind, a, c)
                    break
            self.resolved[t, name] = found
        return found

    def slot(self, t: type, name: str):
        """The Python-level implementation of a special method, or None."""
        kind, a, owner = self.resolve(t, name)
        if kind != "func":
            return None
        if not native_module(owner.__module__):
            self.class_name(t, name, a)
        return a

    def load_attr(self, o, n):
        t = type(o)
        if t is TensorProxy:
            return calls.tensor_attribute(self, o, n)
        if t is AnyProxy:
            return opaque_values.attribute(self, o, n)
        if self.overlay and (id(o), n) in self.overlay:
            return self._overlaid(o, n)
        if t is types.ModuleType or isinstance(o, types.ModuleType):
            value = getattr(o, n)
            if t is not types.ModuleType and n not in vars(o):
                self._asked(o, n, value)
            return self.namespace_value(vars(o), f"{o.__name__}.", n, value, None if n in vars(o) else self.const(o).attr(n))
        if t in PRIMITIVE or t in CONTAINERS or t is tuple:
            value, source = getattr(o, n), self.sources.get(id(o))
            return value if source is None or n not in ("maxlen", "default_factory") else self.read(value, source.attr(n))
        if isinstance(o, type):
            return self._class_attribute(o, n)
        if t is types.FunctionType:
            return self._function_attribute(o, n)
        if t is types.MethodType:
            return getattr(o, n) if hasattr(types.MethodType, n) else self._function_attribute(o.__func__, n)
        if t is super:
            return self._super_attribute(o, n)
        if isinstance(o, NumberProxy):
            return {"real": o, "imag": 0}[n] if n in ("real", "imag") else getattr(o.concrete() if hasattr(o.python_type, n) else o.python_type, n)
        return self._instance_attribute(o, t, n)

    def _overlaid(self, o, n):
        value = self.overlay[id(o), n]
        if value is DELETED:
            raise AttributeError(f"{type(o).__name__!r} object has no attribute {n!r}")
        return value

    def _instance_attribute(self, o, t: type, n: str):
        custom = self.slot(t, "__getattribute__")
        if custom is not None:
            return getattr(o, n) if native_module(custom.__globals__.get("__name__")) else self.call(custom, [o, n], {})
        return self.plain_attribute(o, n)

    def plain_attribute(self, o, n: str):
        """object.__getattribute__, and the class's __getattr__ after it."""
        t = type(o)
        if self.overlay and (id(o), n) in self.overlay:
            return self._overlaid(o, n)
        source = self.sources.get(id(o))
        kind, a, owner = self.resolve(t, n)
        if kind == "property":
            self.class_name(t, n, a)
            return self.call(a.fget, [o], {}) if a.fget else getattr(o, n)
        if kind == "data":
            getter = self._getter(t, n, a)
            return self._data_attribute(o, t, n, source) if getter is None else self.call(getter, [a, o, t], {})
        try:
            d = object.__getattribute__(o, "__dict__")
        except AttributeError:
            d = ()
        if n in d:
            return d[n] if source is None else self.read(d[n], source.attr(n))
        if self.overlay and (written := self._written_on_class(t, n)) is not None:
            return self._overlaid(written, n)
        if source is not None and kind is not None and d != ():
            self.guards.setdefault((source, "nodict", None), {})[n] = None
        if kind == "func":
            if source is not None or not native_module(owner.__module__):
                self.class_name(t, n, a)
            return types.MethodType(a, o)
        if type(a) is functools.cached_property:
            value = self.call(a.func, [o], {})
            self.raw_store(o, n, value)
            return value
        if kind == "get":  # classmethod, staticmethod and other descriptors
            if (getter := self._getter(t, n, a)) is not None:
                return self.call(getter, [a, o, t], {})
            if not native_module(owner.__module__):
                self.class_name(t, n, a)
            return getattr(o, n)
        if kind == "plain":
            return a if native_module(owner.__module__) else self.read(a, self._class_source(t, owner, n))
        return self._missing_attribute(o, t, n, source)

    def _class_source(self, t: type, owner: type, n: str) -> Source:
        """Where a class attribute comes from, which no class before `owner` hides."""
        for c in t.__mro__[: t.__mro__.index(owner)]:
            if not native_module(c.__module__):
                self.guards.setdefault((self.const(c), "nodict", None), {})[n] = None
        return self.const(owner).attr(n)

    def _written_on_class(self, t: type, n: str) -> type | None:
        """The class among the bases of `t` on which a name is found, where the program wrote it there."""
        found = next((c for c in t.__mro__ if n in c.__dict__ or (id(c), n) in self.overlay), None)
        return found if (id(found), n) in self.overlay else None

    def _getter(self, t: type, n: str, a):
        """The `__get__` that is written in Python of what stands under a name in a class; None where there is none, or it is a library's that runs natively."""
        getter = self.slot(type(a), "__get__")
        if getter is None or native_module(getter.__globals__.get("__name__")):
            return None
        owner = next(c for c in t.__mro__ if n in c.__dict__)
        self.namespace(owner.__dict__, f"{t.__qualname__}.", n, a)  # type: ignore[arg-type]
        if id(a) not in self.sources:
            self._known(a, self.const(a))
        return getter

    def _data_attribute(self, o, t: type, n: str, source: Source | None):
        if n == "__class__":
            return t
        try:
            value = getattr(o, n)
        except AttributeError:  # an empty slot
            if source is not None:
                self.guard(source.attr(n), "noattr", None)
            raise
        if source is None:
            return value
        return containers.attribute_dict(self, o, value, source) if n == "__dict__" else self.read(value, source.attr(n))

    def _missing_attribute(self, o, t: type, n: str, source: Source | None):
        custom = self.slot(t, "__getattr__")
        if custom is torch.nn.Module.__getattr__:
            return self.module_attribute(o, source, n)
        if source is not None and (custom is not None or not hasattr(o, n)):
            self.guard(source.attr(n), "noattr", None)
        if custom is not None:
            value = self.call(custom, [o, n], {})
            if source is None and native_module(t.__module__):
                self._asked(o, n, value)
            return value
        value = getattr(o, n)  # of a type that keeps its attributes in its own way: threading.local
        return value if source is None else self.read(value, source.attr(n))

    def _asked(self, o, n: str, value) -> None:
        """An attribute of a library's object that a setting answers: `torch.backends.cudnn.deterministic`."""
        if type(value) in (bool, int, float, str) and (type(o).__module__ or "").startswith("torch."):
            self.questions[o, n] = value

    def module_attribute(self, m, source: Source | None, n: str):
        """nn.Module.__getattr__: parameters, buffers, children."""
        if (id(m), n) in self.overlay:
            return self._overlaid(m, n)
        for where in ("_parameters", "_buffers", "_modules"):
            d = m.__dict__.get(where)
            written = self.snapshots.get(id(d))
            if written is not None and n in written:
                return written[n]
            if d is not None and n in d and (written is None or id(written) in self.lazy):
                return d[n] if source is None else self.read(d[n], source.attr(where).item(n))
        if source is not None:
            self.guard(source.attr(n), "nomember", None)
        raise AttributeError(f"{type(m).__name__!r} object has no attribute {n!r}")

    def class_name(self, t: type, n: str, a) -> None:
        """Methods are looked up on the class: what the name means there is checked."""
        if (t, n) not in self.seen_names:
            self.seen_names.add((t, n))
            value = getattr(t, n, a)
            if type(value) is types.MethodType:  # made anew at each access
                self.namespace(t, f"{t.__qualname__}.", f"{n}.__func__", value.__func__)
            elif value is not getattr(t, n, a) and (owner := self.resolve(t, n)[2]) is not None:  # by a descriptor
                self.namespace(owner.__dict__, f"{owner.__qualname__}.", n, owner.__dict__[n])
            else:
                self.namespace(t, f"{t.__qualname__}.", n, value)

    def _class_attribute(self, c: type, n: str):
        if self.overlay and (written := self._written_on_class(c, n)) is not None:
            return self._overlaid(written, n)
        kind, a, owner = self.resolve(c, n)
        if kind in ("get", "data") and (getter := self._getter(c, n, a)) is not None:
            return self.call(getter, [a, None, c], {})
        if kind is None and not native_module(c.__module__) and not hasattr(c, n):
            self.guard(self.const(c).attr(n), "noattr", None)
        value = getattr(c, n)
        t = type(value)
        if t in IDENTITY or isinstance(value, (type, types.MethodType, ENUM)):
            if (t in (types.FunctionType, types.MethodType) or kind == "plain") and not native_module(c.__module__):
                self.class_name(c, n, value)
            return value
        if native_module(c.__module__) or (t in PRIMITIVE and n.startswith("__")):
            return value
        if t in PRIMITIVE or t in CONTAINERS or isinstance(value, torch.Tensor) or kind == "plain" and not native_module(owner.__module__):
            return self.read(value, self.const(c).attr(n) if owner is None else self._class_source(c, owner, n))
        return value

    def _super_attribute(self, s, n: str):
        o = s.__self__
        mro = (s.__self_class__ or type(o)).__mro__
        for c in mro[mro.index(s.__thisclass__) + 1 :]:
            if hasattr(c, n) and not native_module(c.__module__):
                self.class_name(c, n, None)
            if n in c.__dict__:
                if type(c.__dict__[n]) is property:
                    return self.call(c.__dict__[n].fget, [o], {})
                break
        return getattr(s, n)

    def namespace_value(self, space: dict, label: str, n: str, value, answered: Source | None = None):
        """What a name in a module's globals means; `answered` where the module's `__getattr__` says it."""
        t = type(value)
        if t in IDENTITY or isinstance(value, (type, types.ModuleType)):
            if (id(space), n) not in self.seen_names:
                self.seen_names.add((id(space), n))
                if n in space:
                    self.namespace(space, label, n, value)
                    if t is torch.Generator:
                        self.sources.setdefault(id(value), self.const(space, "global").item(n))
            return value
        if native_module(space.get("__name__")) and not isinstance(value, tracked_anyway):
            return value
        return self.read(value, answered or self.const(space, "global").item(n))

    def load_global(self, f, n):
        space = f.__globals__
        if self.overlay and (id(space), n) in self.overlay:
            return self._overlaid(space, n)
        if n in space:
            return self.namespace_value(space, "global ", n, space[n])
        if not native_module(space.get("__name__")):
            self.builtins.setdefault(id(space), (space, {}))[1][n] = None
        return self.load_builtin(space, n)

    def _function_attribute(self, f, n: str):
        if id(f) in self.fresh or native_module(f.__globals__.get("__name__")):
            return getattr(f, n)
        if n in f.__dict__ or n in ("__defaults__", "__kwdefaults__"):
            return self.read(getattr(f, n), self.const(f).attr(n))
        if not hasattr(f, n):
            self.guard(self.const(f).attr(n), "noattr", None)
        return getattr(f, n)

    # ------------------------------------------------------------------------------------------------ writes

    def store_attr(self, o, n, v):
        t = type(o)
        if t is TensorProxy and n == "grad":
            return backward.write_gradient(self, o, v)
        if t is TensorProxy and n == "requires_grad":
            return self.call(torch.Tensor.requires_grad_, [o, v], {})
        if t is TensorProxy:
            self.refuse(f"attribute {n!r} is set on a tensor", "keep what belongs to a tensor beside it, in a variable or a dict")
        custom = self.slot(t, "__setattr__")
        if custom is not None and custom is not torch.nn.Module.__setattr__:
            return self.call(custom, [o, n, v], {})
        self.plain_store(o, n, v)

    def plain_store(self, o, n, v) -> None:
        """object.__setattr__."""
        kind, a, _ = self.resolve(type(o), n)
        if kind == "property":
            self.class_name(type(o), n, a)
            return self.call(a.fset, [o, v], {}) if a.fset else object.__setattr__(o, n, v)
        if kind == "data" and (setter := self.slot(type(a), "__set__")) is not None:
            return self.call(setter, [a, o, v], {})
        if kind != "data" and not hasattr(o, "__dict__") and id(o) in self.sources:
            object.__setattr__(o, n, v)  # raises
        self.raw_store(o, n, v)

    def raw_store(self, o, n, v) -> None:
        """An attribute write: real on objects of this capture, an effect on objects that came from outside."""
        if id(o) not in self.sources and not (isinstance(o, (type, types.ModuleType, types.FunctionType)) and id(o) not in self.fresh):
            if isinstance(o, torch.nn.Module) and type(v) is TensorProxy:
                o.__dict__[n] = v
            elif isinstance(o, (torch.nn.Module, type, types.FunctionType)):
                setattr(o, n, v)
            else:
                object.__setattr__(o, n, v)
            return
        if isinstance(o, types.ModuleType) and native_module(o.__name__):
            self.refuse(f"{o.__name__}.{n} is assigned, which the library's own code reads", "assign it outside of the compiled function")
        if id(o) not in self.sources:
            self._known(o, self.const(o))
        if self.replaced and isinstance(o, torch.nn.Module) and id(o.__dict__["_buffers"].get(n, o.__dict__["_parameters"].get(n))) in self.replaced:
            self.refuse(f"{n!r} is assigned, for which a transform has put another tensor in the place of the module's own", "leave this buffer to the module")
        self.overlay[id(o), n] = v
        self.effects[id(o), n] = ("attr", o, n)
        self.written.add(self.sources[id(o)].attr(n))

    def delete_attr(self, o, n):
        if type(o) is TensorProxy and n == "grad":
            return backward.write_gradient(self, o, None)
        if id(o) not in self.sources:
            return delattr(o, n)
        custom = self.slot(type(o), "__delattr__")
        if custom is not None and custom is not torch.nn.Module.__delattr__:
            return self.call(custom, [o, n], {})
        self.plain_delete(o, n)

    def plain_delete(self, o, n) -> None:
        """object.__delattr__."""
        kind, a, _ = self.resolve(type(o), n)
        if kind == "property":
            self.class_name(type(o), n, a)
            return self.call(a.fdel, [o], {}) if a.fdel else object.__delattr__(o, n)
        if kind == "data" and (deleter := self.slot(type(a), "__delete__")) is not None:
            return self.call(deleter, [a, o], {})
        if id(o) not in self.sources:
            return object.__delattr__(o, n)
        self.raw_delete(o, n)

    def raw_delete(self, o, n) -> None:
        self.load_attr(o, n)
        self.overlay[id(o), n] = DELETED
        if hasattr(o, n):
            self.effects[id(o), n] = ("delattr", o, n)
        else:  # the program made it
            del self.effects[id(o), n]

    def store_global(self, f, n, v):
        space = f.__globals__
        self.written.add(self.const(space, "global").item(n))
        self.overlay[id(space), n] = v
        self.effects[id(space), n] = ("global", space, n)

    def delete_global(self, f, n):
        self.load_global(f, n)
        self.store_global(f, n, DELETED)
        if n in f.__globals__:
            self.effects[id(f.__globals__), n] = ("delglobal", f.__globals__, n)
        else:  # the program made it
            del self.effects[id(f.__globals__), n]

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

    def getitem(self, o, k):
        return containers.getitem(self, o, k)

    def setitem(self, o, k, v):
        containers.setitem(self, o, k, v)

    def delitem(self, o, k):
        custom = self.slot(type(o), "__delitem__")
        if custom is not None:
            self.call(custom, [o, k], {})
            return
        self.touch(o)
        del o[k]
        containers.written_attributes(self, o)

    def contains(self, o, v):
        return containers.contains(self, o, v)

    def iterate(self, o):
        return containers.iterate(self, o)

    def mapping(self, value):
        return self.touch(value) if isinstance(value, dict) or not hasattr(value, "keys") else dict(calls.pairs(self, value))

    def hashed(self, keys, others=()):
        if self.sources:
            calls.leak_inside(self, keys)
            for i, k in enumerate(keys):
                containers.told_apart(self, k, others)
                containers.told_apart(self, k, keys[:i])

    def steps(self, o):
        return calls.advanced(self, containers.iterate(self, o))

    def touch(self, value):
        if self.lazy and id(value) in self.lazy:
            containers.observe(self, value)
        return value

    def truth(self, o):
        self.touch(o)
        for n in ("__bool__", "__len__"):
            kind, f, _ = self.resolve(type(o), n)
            if kind == "func" and not native_module(f.__globals__.get("__name__")):
                return bool(self.call(f, [o], {}))
            if kind:
                break
            if not native_module(type(o).__module__):  # without either an object is true: that must stay so
                self.guard(self.const(type(o)).attr(n), "noattr", None)
        try:
            return bool(o)
        except CaptureError:
            if type(o) is TensorProxy and distributions.is_check(self, o):
                return True
            raise

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

    def binary(self, symbol_, a, b):
        return calls.binary(self, symbol_, a, b)

    def unary(self, symbol_, a):
        return calls.unary(self, symbol_, a)

    def compare(self, symbol_, a, b):
        return calls.compare(self, symbol_, a, b)

    def unpack(self, value, before, after=None):
        if type(value) is TensorProxy or self.lazy or id(value) in self.outside_iterators:
            value = list(self.iterate(value))
        elif self.slot(type(value), "__iter__") is not None:
            value = self.steps(value)
        return super().unpack(value, before, after)

    def format_value(self, value, conversion, spec):
        if type(value) is TensorProxy:
            return calls.text_of(self, value)
        self.touch(value)
        calls.leak_inside(self, (value,))
        return super().format_value(calls.spoken(self, value), conversion, spec)

    # ------------------------------------------------------------------------------------------------ calls

    def operation(self, name: str, *operands):
        """A special method of a tensor."""
        return calls.operation(self, name, operands)

    def call(self, f, args, kwargs):
        return calls.call(self, f, args, kwargs)

    def call_native(self, f, args, kwargs):
        return calls.call_native(self, f, args, kwargs)

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


class _Deleted:
    """What an attribute or name is after the program deleted it."""


DELETED = _Deleted()


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
