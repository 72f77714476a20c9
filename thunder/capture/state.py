"""The state of a capture, in parts: the files that its docstring names fill a part, and all read it."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch

from thunder import compat
from thunder.capture.dispatch import EagerFunctions
from thunder.capture.world import Source
from thunder.core.host_calls import HostProxy, Log
from thunder.core.paths import Decision
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbolic import Decisions
from thunder.distributed.placement import Placement
from thunder.options import CACHE_OPTIONS, JitOptions


@dataclass(frozen=True)
class Request:
    """One call of a program that is to be captured.

    changing: path in words -> None, where earlier captures saw a write, or the values that a number had: numbers there
    stay symbolic, unless they are one of these values. overrides: tensors in the place of a module's parameters and
    buffers, by name. path: how decisions by data are answered, see `Path`. log: results of host calls that this
    call has already made; capture adds its own. eager: capture adds functions around what it refuses. failed: of a
    capture that fails, the prologue that asks what the program had asked.
    """

    fn: Callable
    args: tuple
    kwargs: dict
    options: JitOptions
    changing: dict = field(default_factory=dict)
    overrides: tuple[dict, ...] = ()
    path: tuple[Decision, ...] = ()
    log: Log = field(default_factory=Log)
    eager: EagerFunctions = field(default_factory=lambda: EagerFunctions())
    failed: list[Callable | None] = field(default_factory=list)

    @property
    def original_stands_in(self) -> bool:
        return original_stands_in(self.options, self.overrides)


def original_stands_in(options: JitOptions, overrides: tuple[dict, ...]) -> bool:
    """Whether the original function computes what the compiled one does."""
    replaceable = all(getattr(transform, "original_stands_in", False) for transform in options.transforms)
    return replaceable and not (options.disable_torch_autograd or any(overrides))


@dataclass(slots=True)
class Outside:
    """What else is known of values from outside (`values`, `identities`, `host`). `World.keep` has those named by an
    id."""

    rooted: dict[int, str]  # by id, the paths of the modules of the compiled one
    module_paths: dict[int, str] = field(default_factory=dict)  # of other modules, by id
    pinned: dict[Source, Any] = field(default_factory=dict)  # modules of the compiled one: the entry may hold them
    # by id, values that are remade with what the program has in the place of their parts -> the value, source, result
    remade: dict[int, tuple[Any, Source, Any]] = field(default_factory=dict)
    standing: dict[int, Source] = field(default_factory=dict)  # by id, the results, and where the values are
    itself: set[int] = field(default_factory=set)  # ids of functions that are known as the objects that they are
    # where such objects stand that may be known by their structure once another one stands there -> the id
    identities: dict[Source, int] = field(default_factory=dict)
    function_sources: dict[int, Source] = field(default_factory=dict)
    # cells from outside -> a function that has them: functions made inside share them
    cells: dict[int, types.FunctionType] = field(default_factory=dict)
    own_cells: dict[Source, None] = field(default_factory=dict)  # those of functions that are known by their structure
    hooks: list[dict] = field(default_factory=list)  # of modules, and of all modules, where there are none
    namespaces: set[int] = field(default_factory=set)  # ids of globals that were read by `globals()`
    iterators: dict[int, Any] = field(default_factory=dict)
    # arrays whose content is asked for -> the array, a copy, and where it is
    arrays: dict[int, tuple[numpy.ndarray, numpy.ndarray, Source]] = field(default_factory=dict)
    # paths of those that the program writes to: it is captured again, with values of the host in their places
    written_arrays: set[str] = field(default_factory=set)
    host_values: dict[Source, HostProxy] = field(default_factory=dict)  # those that are inputs: see `changing`
    apart: dict[Source, None] = field(default_factory=dict)  # those whose identities may be compared: see `identities`
    told: set[int] = field(default_factory=set)  # ids of these values, and of ids of such objects
    # that the program was told -> (source, its value, the id as the program has it)
    ids: dict[int, tuple] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)  # of these ids those that met ids from outside
    passing: set[int] = field(default_factory=set)  # ids of objects that the program holds weakly only

    def compare(self, source: Source) -> None:
        """The identity of the object at a source may be compared."""
        self.apart[source] = None


NOT_REAL: tuple[Any, Any] = (None, None)  # instead of a tensor from outside and its source


@dataclass(slots=True)
class Tensors:
    """Tensors from outside (`tensors`, `opaque_values`, `strides`).

    replaced: id of a tensor of the compiled module that is replaced -> (the overrides, its name in them).
    """

    replaced: dict[int, tuple[dict, str]]
    replaced_sources: dict[Source, tuple[dict, str]] = field(default_factory=dict)
    apart: bool = True  # a tensor that is several arguments is as many proxies
    # id(tensor) -> its proxies, by the source of an argument, None for all that are none
    proxies: dict[int, dict[Source | None, TensorProxy]] = field(default_factory=dict)
    passed_twice: set[int] = field(default_factory=set)  # ids of those that have several
    real: dict[TensorProxy, tuple[Any, Source]] = field(default_factory=dict)
    in_memory: dict[int, list[TensorProxy]] = field(default_factory=dict)  # the first of them, by their memory
    looked_at: int = 0  # how many
    shapes: dict[Source, tuple] = field(default_factory=dict)  # as guarded: None for a size that stays symbolic
    laid_out: set[Source] = field(default_factory=set)  # of these, those whose strides are guarded
    # of DTensors, whose local tensors are inputs: with how many rows, None: all that they have
    local: dict[Source, int | None] = field(default_factory=dict)
    placements: dict[Proxy, Placement] = field(default_factory=dict)  # of parameters that the ranks hold together
    dtensors: dict[TensorProxy, tuple] = field(default_factory=dict)  # the mesh and the placements of DTensors
    # id of a sparse or nested tensor, or of one of a subclass with its own rules
    opaque: dict[int, tuple[AnyProxy, Source]] = field(default_factory=dict)
    holds_opaque: bool = False
    generators: dict[int, AnyProxy] = field(default_factory=dict)  # by id, generators that the program makes
    leaves: set[TensorProxy] = field(default_factory=set)  # those that the program makes itself, by its prologue
    # those that the program calls requires_grad_() of -> what the prologue returns for them
    required: dict[TensorProxy, Source] = field(default_factory=dict)
    # leaves from outside that the program calls requires_grad_(False) of -> what they were, and what they are meanwhile
    frozen: dict[TensorProxy, tuple[TensorProxy, TensorProxy]] = field(default_factory=dict)
    # those whose `.data` the program sets -> what stands for the memory that they come with
    rebound: dict[TensorProxy, TensorProxy] = field(default_factory=dict)
    mutated: dict[TensorProxy, None] = field(default_factory=dict)  # those that the program writes to
    # of these those that are written to after the computation -> the value
    written_after: dict[TensorProxy, TensorProxy] = field(default_factory=dict)
    joined: set[TensorProxy] = field(default_factory=set)  # those that autograd is to see it write to
    # these, and other arguments that show them, as they are then -> the same; and views made then -> None
    afterwards: dict[TensorProxy, TensorProxy | None] = field(default_factory=dict)
    # arguments under the shape they have in the end -> the same
    reshaped: dict[TensorProxy, TensorProxy] = field(default_factory=dict)
    layouts: dict = field(default_factory=dict)  # values that were asked for strides -> fake tensors that have them
    # placeholders of cotangents in a backward that is read -> whether it asked how they lie in memory
    cotangents: dict[TensorProxy, bool] = field(default_factory=dict)
    # arguments of levels -> the values that they stand for, and the dimension that a level of vmap maps over
    arguments: dict[TensorProxy, tuple[TensorProxy, int | None]] = field(default_factory=dict)
    _fake_mode: Any = None
    used: set = field(default_factory=set)  # at the end: the values that bound symbols and the result are made of

    def stand_for(self, proxy: TensorProxy, value: torch.Tensor, source: Source) -> None:
        """A proxy stands for a tensor from outside."""
        self.real[proxy] = value, source

    def rebind(self, proxy: TensorProxy, inner: TensorProxy) -> None:
        """The program sets a tensor's `.data`: another proxy stands for the memory that it came with."""
        self.rebound[proxy] = inner
        self.real[inner] = self.real[proxy]
        self.mutated = {inner if base is proxy else base: None for base in self.mutated}

    def lies_on(self, proxy: TensorProxy, mesh: Any, placements: tuple) -> None:
        """A value is a DTensor in the user's eyes."""
        self.dtensors[proxy] = mesh, placements

    def await_cotangents(self, placeholders: Iterable[TensorProxy]) -> None:
        """A backward is read with placeholders in the place of cotangents."""
        self.cotangents.update(dict.fromkeys(placeholders, False))

    def ask_layout(self, placeholder: TensorProxy) -> None:
        """The backward asks how a cotangent lies in memory."""
        self.cotangents[placeholder] = True

    def is_asked_for_layout(self, placeholder: TensorProxy) -> bool:
        """The backward is read. Whether it asked how a cotangent lies in memory."""
        return self.cotangents.pop(placeholder)

    @property
    def fake_mode(self) -> Any:
        """The mode of this capture's fake tensors."""
        if self._fake_mode is None:
            self._fake_mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
        return self._fake_mode


@dataclass(slots=True)
class Numbers:
    """Numbers from outside (`numbers`). symbolic: all arguments stay so; symbolic_sizes: all sizes of arguments do."""

    symbolic: bool
    symbolic_sizes: bool
    proxies: dict[Source, NumberProxy] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=Decisions)

    @classmethod
    def of(cls, options: JitOptions) -> Numbers:
        return cls(options.cache is CACHE_OPTIONS.SYMBOLIC_VALUES, options.dynamic is True)


class Look:
    """The part of a container from outside that the program has seen.

    items: values at single keys or indices that were read before the whole. was: the elements, once the whole was
    read. late: items of a dict that were written last, from the first one on whose key is a number that stays symbolic.
    by_position: whether the keys of a dict mean nothing to what has read it.
    """

    __slots__ = ("original", "source", "items", "was", "late", "by_position")

    def __init__(self, original, source: Source):
        self.original: Any = original
        self.source, self.items, self.late, self.by_position = source, {}, [], False
        self.was: Any = None


class AttributeDict(NamedTuple):
    """`o.__dict__` of an object from outside, as the program has it. was: its items as the program has seen them."""

    copy: dict
    owner: Any
    was: dict


@dataclass(slots=True)
class Containers:
    """Containers from outside (`containers`)."""

    snapshots: dict[int, Any] = field(default_factory=dict)  # id(original) -> snapshot
    looks: dict[int, Look] = field(default_factory=dict)  # by the id of the snapshot
    lazy: dict[int, Look] = field(default_factory=dict)  # those of snapshots that are not filled yet
    data: set[int] = field(default_factory=set)  # ids of snapshots that were asked for their content at once
    attribute_dicts: dict[int, AttributeDict] = field(default_factory=dict)  # by the id of the copy
    attribute_dicts_of: dict[int, dict] = field(default_factory=dict)  # id(object) -> the copy


@dataclass(slots=True)
class Known:
    """Answers that a capture does not ask for a second time."""

    attribute_functions: dict[type, Callable] = field(default_factory=dict)  # that read attributes, by class
    looked_up: dict[tuple, Any] = field(default_factory=dict)  # (class, name, base behind which) -> the attribute
    called_in: dict[type, dict[str, str]] = field(
        default_factory=dict
    )  # methods that native code calls: see `callbacks`
    # (id of an object from outside, name) -> the value of the attribute, and containers that it depends on
    answers: dict[tuple, tuple] = field(default_factory=dict)
    interpreted: set[int] = field(default_factory=set)  # functions that are, however they are called
    asked_functions: set[int] = field(default_factory=set)  # functions whose code was asked for
    exposed: set[int] = field(default_factory=set)  # ids of objects whose attributes were all asked
    names: dict[tuple, Any] = field(default_factory=dict)  # (id of a module's globals, name) -> its value, asked
    seen_hooks: set[int] = field(default_factory=set)
    numbers: dict[HostProxy, Any] = field(default_factory=dict)  # of NumPy's, as Python's
    module_calls: Counter[int] = field(default_factory=Counter)
    builtins: set[tuple] = field(default_factory=set)  # those names that a module does not have
    # of functions behind functools.lru_cache, by function and arguments
    cached_calls: dict[tuple, functools.partial] = field(default_factory=dict)
    computed: dict[tuple, Any] = field(default_factory=dict)  # results of functions behind caches, of sizes that vary
    own_caches: dict[int, Callable] = field(default_factory=dict)  # by the id of a cache that the program made
    # calls in a `try` of the program that PyTorch does not refuse: see `examples`
    examples: dict[tuple, None] = field(default_factory=dict)

    def same_call(self, key: tuple, call: functools.partial) -> functools.partial:
        """The call that stands for all with the same function and arguments."""
        return self.cached_calls.setdefault(key, call)
