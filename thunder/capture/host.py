"""The interpreter's host that reads a PyTorch program.

Values travel bare. An object reachable from the call's arguments, from the function, its globals or closures has a
source in a side table, by identity. Reading through a source turns tensors into proxies, guards primitive values, and
turns containers into snapshots whose children are read when somebody looks. Operations on proxies are recorded; writes
to outside objects become effects.
"""

# The functions name their first parameter `c`; as methods of TorchHost they override methods with `self`.
# pyright: reportAssignmentType=false

from __future__ import annotations

import functools
import inspect
import operator
import types
import warnings
import weakref
from typing import Any

import torch

from thunder import compat
from thunder.capture import (
    callbacks,
    calls,
    changing,
    classes,
    containers,
    eager,
    handlers,
    host_lines,
    items,
    locations,
    namespaces,
    native_calls,
    objects,
    operations,
    operators,
    settings,
    tensors,
    values,
)
from thunder.capture.decisions import DecidedPath
from thunder.capture.dispatch import Dispatch, Fallbacks
from thunder.capture.effects import Effects
from thunder.capture.engine import Engine
from thunder.capture.expose import expose
from thunder.capture.identities import COPIED, same_number, source_of, told_apart
from thunder.capture.interface import Capture
from thunder.capture.library import collectives, higher_order, triton_kernels
from thunder.capture.library.functional import original
from thunder.capture.locks import Locks
from thunder.capture.native import PRIMITIVE
from thunder.capture.recording import Modes, Recording
from thunder.capture.state import Containers, Known, Numbers, Outside, Request, Tensors
from thunder.capture.strides import layout
from thunder.capture.world import HOOKED, PRESENT, REPLACED, SAME, Source, World
from thunder.capture.world import keys as keys_of
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.signals import interrupts
from thunder.core.symbol import Context, Names, Recorder
from thunder.errors import CaptureError
from thunder.interpreter import NULL
from thunder.interpreter.recursion import is_own
from thunder.ops import autocast
from thunder.ops.functionalize.memory import Memory
from thunder.ops.torch_types import from_tensor_dtype

handlers.install()

_RESERVED = {
    "torch", "Tensor", "ltorch", "prims", "dtypes", "devices", "math", "thunder", "float", "complex", "slice",
    "computation", "fn", "args", "kwargs", "values",
}  # fmt: skip


class TorchHost(Capture):
    """The interpreter's host for a PyTorch program."""

    named_type = TensorProxy
    uncatchable = (*Capture.uncatchable, CaptureError, tensors.DependsOnIdentity)

    def __init__(self, request: Request, compiling: bool = False):
        """compiling: the answer of torch.compiler.is_compiling()."""
        options = request.options
        super().__init__(record_history=options.debug.record_interpreter_history)
        self.request, self.compiling = request, compiling
        self.world = World(parameter_names(request.fn))
        self.filters = warnings.filters  # which the program may replace
        names = Names()
        names.reserve(_RESERVED)
        for executor in options.executors:
            names.reserve(executor.opmap)
        recorder = Recorder(
            Context(names, grad_enabled=torch.is_grad_enabled()), location=self.own_location, where=self.user_location
        )
        recorder.memory = Memory(
            outside=functools.partial(tensors.written_to, self),
            layout=functools.partial(layout, self),
            joins=functools.partial(tensors.joins_history, self),
        )
        recorder.is_leaf = functools.partial(tensors.keeps_casts, self)
        self.recording = Recording(recorder)
        self.path = recorder.decide = DecidedPath(self, request.path, request.log)
        # of functions in modules that few programs import
        late = triton_kernels.launchers() | collectives.handlers() | higher_order.handlers()
        handlers = {id(f): h for f, h in late.items()}
        self.dispatch = Dispatch(handlers, options.replacements, operations.patched_methods(), request.log)
        self.engine = Engine()
        self.fresh: set[int] = set()  # ids of functions that the program made
        self.functions: dict[int, weakref.ref] = {}  # these functions
        self.outside = Outside(rooted_modules(request.fn))
        self.tensors = Tensors(replaced_tensors(request.fn, request.overrides))
        self.numbers = Numbers.of(options)
        self.numbers.decisions.where = self.own_location
        self.containers, self.effects, self.known, self.locks = Containers(), Effects(), Known(), Locks()
        self.fallbacks = Fallbacks()
        self.modes = Modes(self)
        self.sharp_edges: list[str] = []

    def passes(self, error: BaseException) -> bool:
        """`Host.passes`. A program that handles what a signal handler raised would do so in all later calls. A refusal
        notes the call that it leaves."""
        if isinstance(error, CaptureError):
            frame = self.stack_of_frames[-1]
            code = frame.fn.__code__
            error.calls.append((code.co_filename, frame.record.line(code, frame.ip)))
        if type(error) is RecursionError and is_own(error):
            self.refuse("the program reads a container that contains itself", "open it outside")
        return super().passes(error) or interrupts(error)

    def handles(self) -> None:
        """`Host.handles`: the calls that the exception has left are the program's own matter."""
        self.fallbacks.forget_failing()

    # ------------------------------------------------------------------------------------------------ sources

    def note_own(self, value) -> Any:
        """The value, a function that the program made."""
        self.fresh.add(self.world.hold(value))
        return value

    # what of the standard library may run as it is: see `eager`
    note_class, note_library = eager.note_class, eager.note_library
    call_operator = eager.call_operator
    # how the program may hold a value from a source; the value at a source, so
    read, reach = values.read, values.reach
    elements, lift = values.elements, tensors.lift

    # ------------------------------------------------------------------------------------------------ the recorder

    def name_value(self, value, name: str) -> None:
        """The first variable that a result is stored in gives it its name: with a number where another value has that
        name, if it is a variable of the user's. What was written keeps its name, by which passes know it."""
        names, memory = self.recorder.context.names, self.recorder.memory
        is_unnamed = value.name[:1] == "t" and value.name[1:].isdigit() and name.isidentifier()  # not as pytest names
        is_free = name not in names.taken or not locations.is_in_library(self.stack_of_frames[-1])
        if is_unnamed and is_free and value not in memory.current and value.name not in memory.versions:
            value.name = names.claim(name)

    def synchronize(self) -> None:
        """The recorder's context follows PyTorch's own modes, which the program switches as it always does."""
        context = self.recorder.context
        grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        cast = compat.autocast_state() if compat.any_autocast() else None
        if compat.dispatch_modes() != self.modes.dispatch:
            self.refuse(
                "the program enters a dispatch mode, which would see each operator that PyTorch runs",
                "enter it outside of the compiled function",
            )
        depth = compat.function_modes()
        innermost = compat.function_mode_at(depth - 1) if depth else None
        if self.modes.is_new(innermost):
            operations.check_mode(self, innermost)
            self.recording.change(default_device=compat.default_device())
        self.modes.inference.follow(self.recorder)
        now = grad, from_tensor_dtype(dtype), cast
        if now != (context.grad_enabled, context.default_dtype, getattr(context.autocast, "state", None)):
            grad, dtype, _ = now
            policy = autocast.policy(*cast) if cast else None
            self.recording.change(grad_enabled=grad, default_dtype=dtype, autocast=policy)

    def follow_settings(self, f, result) -> None:
        """PyTorch's function `f` has run. Where it may have changed a setting, the program is one for the settings of
        this call, and its end sets the settings that it leaves."""
        before, names = self.modes.settings, self.recorder.context.names
        now = compat.kernel_settings()
        names.settings = tuple(name for name, value in now.items() if value != before[name])
        sets = result is None and type(f) in _FUNCTIONS and f.__name__ not in ("__init__", "__enter__", "__exit__")
        if names.settings or sets:
            source = self.world.const(self.modes.same_settings, "whether PyTorch's settings are those at capture")
            self.world.ask_setting(source.call("__call__"), True)

    # ------------------------------------------------------------------------------------------------ objects

    lookup, class_value, own, native_get = classes.lookup, classes.class_value, objects.own, objects.native_get
    missing, fallback, load_attr = objects.missing, objects.fallback, objects.load_attr
    tensor_attribute, pattern_type = operations.tensor_attribute, operations.type_of
    store_attr, own_store, native_set = objects.store_attr, objects.own_store, objects.native_set
    delete_attr, own_delete, native_delete = objects.delete_attr, objects.own_delete, objects.native_delete
    recursion_limit = settings.recursion_limit
    load_global, store_global = namespaces.load_global, namespaces.store_global
    delete_global = namespaces.delete_global

    def load_special(self, value, name):
        if type(value) is not HostProxy:
            return super().load_special(value, name)
        return host_lines.HostMethod(value, name) if hasattr(value.kind, name) else NULL

    def join(self, parts):
        known = all(type(p) is str for p in parts)
        return "".join(parts) if known else host_lines.run(self, "".join, (parts,), pure=True)

    def slot(self, t: type, name: str):
        """The Python function that implements a special method, or None."""
        slot_value = self.lookup(t, name)
        return slot_value if type(slot_value) is types.FunctionType else None

    native_special = native_calls.special

    def compares(self, kind) -> bool:
        return kind is HostProxy or issubclass(kind, NumberProxy)

    # ------------------------------------------------------------------------------------------------ functions

    def load_cell(self, f, cell, name):
        """A variable of an enclosing function: as the program has written it, or read where it stands."""
        if self.effects and (written := self.effects.value(cell, None)) is not NULL:
            return written
        owner = self.outside.cells.get(id(cell))
        try:
            value = super().load_cell(f, cell, name)
        except NameError:
            if owner is not None:
                self.world.ask(self.cell_source(owner, cell), PRESENT)
            raise
        if owner is None or type(value) in (TensorProxy, types.CellType):
            return value
        return self.read(value, self.cell_source(owner, cell))

    def cell_source(self, f, cell) -> Source:
        """Where a cell of a function from outside is read. Two cells may hold the same."""
        index = 0
        while f.__closure__[index] is not cell:
            index += 1
        source = (self.world.sources.get(id(f)) or self.world.const(f)).child("cell", index)
        source.label = f.__code__.co_freevars[index]
        return source

    def store_cell(self, f, cell, v):
        owner = self.outside.cells.get(id(cell))
        if owner is None:
            cell.cell_contents = v
            return
        self.effects.note({self.cell_source(owner, cell): None})
        self.world.hold(cell)
        self.effects.write("cell", cell, None, v)

    def delete_cell(self, f, cell):
        if id(cell) in self.outside.cells:
            self.refuse("a variable of a function from outside is deleted", "set it to None")
        super().delete_cell(f, cell)

    enter, foreign_function, default = calls.enter, calls.foreign_function, calls.default

    def made_function(self, f):
        """Nothing keeps it alive: it may hold an exception, with the frames that raised it."""
        forget = functools.partial(_forget, (self.fresh, self.known.interpreted), id(f))
        self.fresh.add(id(f))
        self.functions[id(f)] = weakref.ref(f, forget)
        return f

    # ------------------------------------------------------------------------------------------------ operators

    binary, native_binary = operators.binary, operators.native_binary
    unary, native_unary = operators.unary, operators.native_unary
    compare, native_compare, computes = operators.compare, operators.native_compare, operators.computes
    natively = operators.natively
    native_index, converted, type_name = operators.native_index, operators.converted, operators.type_name
    getitem, native_getitem = operators.getitem, items.getitem
    native_setitem, native_delitem = items.setitem, operators.native_delitem
    native_contains, native_iter = items.contains, items.iterate
    native_next, native_len, unpack = operators.native_next, operators.native_len, operators.unpack
    truth, native_truth = operators.truth, operators.native_truth
    native_text, native_isinstance = operators.native_text, operators.native_isinstance
    native_issubclass = operators.native_issubclass
    asks_in_python, sum_of_numbers = operators.asks_in_python, operators.sum_of_numbers

    attribute_name = changing.settled

    def hashed(self, keys, others=()):
        """Keys for a set or a dict: texts are settled, and objects are told apart from those that it holds."""
        settled = [k if type(k) in PRIMITIVE else changing.settled(self, k) for k in keys]
        if any(k is not settled_key for k, settled_key in zip(keys, settled, strict=True)):
            keys = settled
        callbacks.check_hashed(self, keys, keys_of(others))
        if self.world.sources or self.tensors.real:
            for k in keys:
                if type(k) not in PRIMITIVE:
                    if id(k) not in self.world.anew:  # whose hash is its identity
                        expose(self, k)
                    told_apart(self, k, others)
        return keys

    def materialize(self, value):
        if self.containers.lazy and id(value) in self.containers.lazy:
            containers.materialize(self, value)
        return value

    def same(self, a, b):
        """`a is b`. Numbers and texts are compared as CPython keeps them; objects from outside are asked."""
        ta, tb = type(a), type(b)
        if ta in COPIED and tb in COPIED:
            return same_number(self, a, b)
        if a is b:
            return True
        if ta is HostProxy or tb is HostProxy:
            alike = operations.type_of(self, a) is operations.type_of(self, b)
            return alike and self.truth(host_lines.run(self, operator.is_, (a, b), pure=True))
        if ta is not tb or ta in PRIMITIVE and ta not in (slice, torch.Size):
            return False
        if ta is TensorProxy:
            return self._same_tensor(a, b)
        sa, sb = source_of(self, a), source_of(self, b)
        if sa is not None and sb is not None:
            return self.world.ask(sa, SAME, sb)
        return False

    def _same_tensor(self, a, b) -> bool:
        if a not in self.tensors.real or b not in self.tensors.real:
            return False
        sx, sy = self.tensors.real[a][1], self.tensors.real[b][1]
        return True if sx is sy else self.world.ask(sx, SAME, sy)

    # ------------------------------------------------------------------------------------------------ calls

    call, call_native, operation = calls.call, native_calls.call_native, operations.operation

    def restore_context(self) -> None:
        """Context variables that the program leaves set are as they were: the epilogue sets them, and settings."""
        for variable in self.effects.restore_variables():
            self.world.hold(variable)
        self.recorder.context.names.settings = ()

    # ------------------------------------------------------------------------------------------------ trouble
    own_location, user_location = locations.own_location, locations.user_location

    def refuse_whole(self, reason: str, remedy: str = ""):
        """`refuse`, where no function around the line would do the same if it were called as it is: the original
        runs."""
        self.request.eager.exclude(frame.fn.__code__ for frame in self.stack_of_frames)
        self.refuse(reason, remedy)

    def refuse(self, reason: str, remedy: str = ""):
        raise CaptureError(reason, location=self.user_location(), remedy=remedy)

    sharp = operations.sharp_edge

    # ------------------------------------------------------------------------------------------------ for the prologue

    def guarded_tensor(self, source: Source) -> torch.Tensor:
        """The tensor that the prologue checks at a source: the one that stands there, or that a transform put in its
        place."""
        replaced = self.tensors.replaced_sources.get(source)
        return self.world.values[source] if replaced is None else replaced[0][replaced[1]]

    def ask_at_the_end(self) -> None:
        """Ask the questions that are known to matter only once the program is captured."""
        names = self.recorder.context.names
        if names.attends:  # attention may use the backends of the time when its kernels were chosen
            backends = self.world.const(compat.attention_backends, "the backends of scaled_dot_product_attention: ")
            self.world.ask_setting(backends.call("__call__"), names.backends)
        for table in self.request.overrides:
            self.world.ask(self.world.const(table, "overrides"), REPLACED)
        for p in self.engine.hooked:
            self.world.ask(self.tensors.real[p][1], HOOKED)

    def distinct_groups(self) -> list[tuple[list[Source], str]]:
        """Objects that must stay apart: those that are compared by identity, those that the program reads, where it
        writes to the outside, and tensors with gradients that it does not write to."""
        leaves = [self.tensors.real[p][1] for p in self.engine.leaves.values() if p not in self.tensors.mutated]
        if self.tensors.required or self.tensors.rebound:  # no other argument is one of these
            leaves = list(dict.fromkeys([*leaves, *self.tensors.shapes]))
        if not self.effects.is_carried_out and not containers.changes(self):
            return [(leaves, "tensors"), (list(self.outside.apart), "objects")]
        boxes = list(self.outside.apart) + [
            s for i, s in self.world.sources.items()
            if s.step != "const" and s.key != "__dict__"
            and (i in self.world.anew or not isinstance(self.world.keep.get(i), torch.nn.Module))
        ] + list(self.outside.own_cells)  # fmt: skip
        return [(leaves, "tensors"), (list(dict.fromkeys(boxes)), "objects")]


def _forget(tables: tuple[set[int], ...], number: int, _) -> None:
    for table in tables:
        table.discard(number)


def parameter_names(fn) -> tuple[str, ...]:
    """Names of the positional parameters that the user wrote, without self; beyond them `name_0`, `name_1` for
    `*name`."""
    fn = original(fn)
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn, follow_wrapped=False)
    except (TypeError, ValueError):  # native code that says nothing of them
        return ()
    names: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}_{i}" for i in range(64)]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    return tuple(names)


def rooted_modules(fn) -> dict[int, str]:
    """By id, the paths of the modules that the compiled function is, or is a method of, and of those in it."""
    root = original(fn)
    root = root.__self__ if type(root) is types.MethodType else root
    return {id(m): name for name, m in root.named_modules()} if isinstance(root, torch.nn.Module) else {}


def replaced_tensors(fn, overrides: tuple[dict, ...]) -> dict[int, tuple[dict, str]]:
    """For the id of each of the module's own tensors that is replaced: (the overrides, its name in them). Tensors
    that the module itself has not are added, not replaced."""
    tables: dict[int, tuple[dict, str]] = {}
    if any(overrides):
        own = dict(fn.named_parameters(remove_duplicate=False)) | dict(fn.named_buffers(remove_duplicate=False))
        for table in overrides:
            tables |= {id(own[name]): (table, name) for name in table if name in own}
    return tables


_FUNCTIONS = {types.FunctionType, types.BuiltinFunctionType}
