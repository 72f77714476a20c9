"""What a capture knows, in parts: each part is filled by the files that its docstring names, and read by all."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch

from thunder.capture.sources import Source
from thunder.core.host_calls import Log
from thunder.core.paths import Decision
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.symbolic import Decisions
from thunder.distributed.placement import Placement
from thunder.options import CACHE_OPTIONS, JitOptions


@dataclass(frozen=True)
class Request:
    """One call of a program that is to be captured.

    changing: path in words -> None, where earlier captures saw a write, or the values that a number had: numbers there
    stay symbolic, unless they are one of these values. overrides: what stands in the place of a module's parameters and
    buffers, by name. path: how decisions by data are answered, see `Path`. log: what host calls gave that this call has
    already made; those that capture makes are added.
    """

    fn: Callable
    args: tuple
    kwargs: dict
    options: JitOptions
    changing: dict = field(default_factory=dict)
    overrides: tuple[dict, ...] = ()
    path: tuple[Decision, ...] = ()
    log: Log = field(default_factory=Log)


@dataclass(slots=True)
class Outside:
    """Where values come from (`values`, `identities`, `host`). Those named by an id are in `Capture.keep`."""

    rooted: dict[int, str]  # by id, the paths of the modules of the compiled one
    module_paths: dict[int, str] = field(default_factory=dict)  # of other modules, by id
    pinned: dict[Source, Any] = field(default_factory=dict)  # modules of the compiled one: the entry may hold them
    constants: dict[str, Any] = field(default_factory=dict)
    constant_sources: dict[int, Source] = field(default_factory=dict)
    # where values came from that are asked as a whole, and that leave as what stands there
    origins: dict[int, Source] = field(default_factory=dict)
    function_sources: dict[int, Source] = field(default_factory=dict)
    # cells from outside -> a function that has them: functions made inside share them
    cells: dict[int, types.FunctionType] = field(default_factory=dict)
    hooks: list[dict] = field(default_factory=list)  # of modules, and of all modules, where there are none
    namespaces: set[int] = field(default_factory=set)  # ids of globals that were read by `globals()`
    iterators: dict[int, Any] = field(default_factory=dict)
    # arrays whose memory tensors share -> what stands there, and a copy
    arrays: dict[int, tuple[numpy.ndarray, numpy.ndarray]] = field(default_factory=dict)
    ids: dict[int, tuple] = field(
        default_factory=dict
    )  # that the program was told -> (source, what came in through it)
    met: set[int] = field(default_factory=set)  # of these ids those that met ids from outside
    passing: set[int] = field(default_factory=set)  # ids of objects that the program holds weakly only


@dataclass(slots=True)
class Tensors:
    """Tensors from outside (`tensors`, `opaque_values`, `strides`).

    replaced: id of a tensor of the compiled module that is replaced -> (the overrides, its name in them).
    """

    replaced: dict[int, tuple[dict, str]]
    replaced_sources: dict[Source, tuple[dict, str]] = field(default_factory=dict)
    proxies: dict = field(default_factory=dict)  # id(tensor), or source for arguments -> proxy
    real: dict[TensorProxy, tuple[torch.Tensor, Source]] = field(default_factory=dict)
    shapes: dict[Source, tuple] = field(default_factory=dict)  # as guarded: None for a size that stays symbolic
    placements: dict[Proxy, Placement] = field(default_factory=dict)  # of parameters that the ranks hold together
    # id of a sparse or nested tensor, or of one of a subclass with its own rules
    opaque: dict[int, tuple[AnyProxy, Source]] = field(default_factory=dict)
    holds_opaque: bool = False
    mutated: dict[TensorProxy, None] = field(default_factory=dict)  # those that the program writes to
    # of these those that are written to after the computation -> the value
    written_after: dict[TensorProxy, TensorProxy] = field(default_factory=dict)
    joined: set[TensorProxy] = field(default_factory=set)  # those that autograd is to see it write to
    # these, and other arguments that show them, as they are then -> the same; and what is made of them then -> None
    afterwards: dict[TensorProxy, TensorProxy | None] = field(default_factory=dict)
    # arguments under the shape they have in the end -> the same
    reshaped: dict[TensorProxy, TensorProxy] = field(default_factory=dict)
    layouts: dict = field(default_factory=dict)  # values that were asked for strides -> fake tensors that have them
    # placeholders of cotangents in a backward that is read -> whether it asked how they lie in memory
    cotangents: dict[TensorProxy, bool] = field(default_factory=dict)
    fake_mode: Any = None
    used: set = field(default_factory=set)  # at the end: the values that bound symbols and the result are made of


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
    """What the program has seen of a container from outside.

    items: what was read at single keys or indices, while nobody looked at the whole. was: what was read of the whole,
    once somebody did.
    """

    __slots__ = ("original", "source", "items", "was")

    def __init__(self, original, source: Source):
        self.original: Any = original
        self.source, self.items = source, {}
        self.was: Any = None


class AttributeDict(NamedTuple):
    """`o.__dict__` of an object from outside, as the program has it. was: what the program has seen."""

    copy: dict
    owner: Any
    was: dict


@dataclass(slots=True)
class Containers:
    """Containers from outside (`containers`)."""

    snapshots: dict[int, Any] = field(default_factory=dict)  # id(original) -> snapshot
    # id(snapshot) -> what was seen, while nobody has looked at the whole
    lazy: dict[int, Look] = field(default_factory=dict)
    filled: dict[int, Look] = field(default_factory=dict)  # the same, once somebody has
    data: set[int] = field(default_factory=set)  # ids of snapshots that were asked for their content at once
    attribute_dicts: dict[int, AttributeDict] = field(default_factory=dict)  # by the id of the copy
    attribute_dicts_of: dict[int, dict] = field(default_factory=dict)  # id(object) -> the copy


@dataclass(slots=True)
class Writes:
    """What the program wrote to the outside (`objects`, `host`, `library.gradients`); the epilogue writes it there."""

    overlay: dict[tuple, Any] = field(default_factory=dict)  # (id of the owner, name) -> the value
    effects: dict[tuple, tuple] = field(default_factory=dict)  # the same key -> (kind, owner, name)
    written: set[Source] = field(default_factory=set)
    # of variables that the program has set: what its first `set` gave
    context_tokens: dict[contextvars.ContextVar, contextvars.Token] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)  # settings of PyTorch's that stay in force


@dataclass(slots=True)
class Known:
    """What a capture has found out, and does not ask a second time."""

    attribute_functions: dict[type, Callable] = field(
        default_factory=dict
    )  # how attributes of a class's objects are read
    looked_up: dict[tuple, Any] = field(default_factory=dict)  # (class, name, base behind which) -> what stands there
    called_in: dict[type, dict[str, str]] = field(default_factory=dict)  # what native code may call: see `callbacks`
    # (id of an object from outside, name) -> the value of the attribute, and containers that it depends on
    answers: dict[tuple, tuple] = field(default_factory=dict)
    interpreted: set[int] = field(default_factory=set)  # functions that are, however they are called
    asked_functions: set[int] = field(default_factory=set)  # functions whose code was asked for
    exposed: set[int] = field(default_factory=set)  # ids of objects whose attributes were all asked
    names: dict[tuple, Any] = field(default_factory=dict)  # (id of a module's globals, name) -> what it is, asked
    seen_hooks: set[int] = field(default_factory=set)
    builtins: set[tuple] = field(default_factory=set)  # those names that a module does not have
    # of functions behind functools.lru_cache, by function and arguments
    cached_calls: dict[tuple, functools.partial] = field(default_factory=dict)
    own_caches: dict[int, Callable] = field(default_factory=dict)  # by the id of a cache that the program made
    # calls in a `try` of the program that PyTorch does not refuse: see `examples`
    examples: dict[tuple, None] = field(default_factory=dict)
