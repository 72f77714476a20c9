"""The recorder: bound symbols of a function that is traced, the state they are recorded under, and the place in the
user's code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from thunder.core import dtypes
from thunder.core.symbolic import Facts

RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)


def current_recorder() -> Any:
    """The Recorder that calls of symbols are recorded in, None where nothing is traced."""
    return RECORDER.get()


def user_location() -> tuple | None:
    """(filename, line, function, source line) of the user's code that is being traced, where that is known."""
    recorder = RECORDER.get()
    return recorder.where() if recorder is not None and recorder.where is not None else None


def note_look() -> None:
    """A text of a proxy is made, or one is looked at in vain: native code of a program that is captured must not be
    what does it."""
    if (recorder := RECORDER.get()) is not None:
        recorder.looks += 1


def _path_captured() -> Any:
    """What decides for the program that is captured; None where none is, and inside of an operation."""
    recorder = RECORDER.get()
    return None if recorder is None or recorder.typing else recorder.decide


def made_by_program(number: Any) -> Any:
    """A number of the arguments as one that an operation of the program makes, which needs no guard. None inside of an
    operation, which is then typed by examples."""
    path = _path_captured()
    return None if path is None else path.beside_data(number)


def errors_are_handled() -> bool:
    """Whether the program that is captured handles errors where it stands, and goes on."""
    path = _path_captured()
    return path is not None and path.errors_are_handled()


def decided_by_data(kind: str, question: Any) -> Any:
    """The answer to a data-dependent question on the path that is captured; None where the program cannot have paths.
    kind: "truth" of a condition, or "value" of a number."""
    recorder = RECORDER.get()
    return None if recorder is None or recorder.decide is None else getattr(recorder.decide, kind)(question)


def why_undecided() -> str:
    """The reason why the program cannot have paths, as words behind a semicolon; empty where the message shows it."""
    recorder = RECORDER.get()
    return "" if recorder is None or recorder.decide is None else recorder.decide.why


@contextmanager
def undecided() -> Iterator[None]:
    """Data-dependent questions inside the block raise DataDependentError, which the caller handles."""
    recorder = RECORDER.get()
    if recorder is None:
        yield
        return
    outer, recorder.typing = recorder.typing, True
    try:
        yield
    finally:
        recorder.typing = outer


@contextmanager
def recording(recorder: Any) -> Iterator[Any]:
    """Calls of symbols are recorded in `recorder` inside the block."""
    token = RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        RECORDER.reset(token)


class Names:
    """The names taken in a program, shared by all its traces. facts: those about its data-dependent numbers.

    backends: the backends of attention that were enabled at the beginning of capture; attends: whether the program
    depends on them. settings: names of the settings of PyTorch that the program has changed, and that kernels follow.
    default_dtype: the default dtype of the call, under which the program runs.
    """

    __slots__ = ("taken", "counters", "facts", "backends", "attends", "settings", "default_dtype", "__weakref__")

    def __init__(self):
        self.taken: set[str] = {"_"}  # what a printed program calls an output that is None
        self.counters: dict[str, int] = {}
        self.facts = Facts()
        self.backends: tuple | None = None
        self.attends = False
        self.settings: tuple[str, ...] = ()
        self.default_dtype: dtypes.dtype | None = None

    def make(self, prefix: str = "t") -> str:
        """A new name, the prefix and a number."""
        n = self.counters.get(prefix, 0)
        while (name := f"{prefix}{n}") in self.taken:
            n += 1
        self.counters[prefix] = n + 1
        self.taken.add(name)
        return name

    def reserve(self, names: Iterable[str]) -> None:
        """No value gets one of these names."""
        self.taken.update(names)

    def claim(self, name: str) -> str:
        """`name` where it is free, else a variation of it."""
        if name in self.taken:
            return self.make(f"{name}_")
        self.taken.add(name)
        return name


class Context:
    """The state an operation was recorded under, and under which its decomposition is run later. One object for a
    stretch of operations; never mutated.

    checkpoint: the activation checkpoints around the operation, the outermost first. backward: the number of the
    backward inside of the program that it belongs to, counted from 1; 0: none.
    """

    __slots__ = (
        "names", "grad_enabled", "autocast", "default_dtype", "default_device", "checkpoint", "backward", "_afterwards",
    )  # fmt: skip

    def __init__(
        self,
        names: Names,
        *,
        grad_enabled: bool = True,
        autocast=None,
        default_dtype=None,
        default_device=None,
        checkpoint: tuple = (),
        backward: int = 0,
    ):
        self.names, self.grad_enabled, self.autocast = names, grad_enabled, autocast
        self.default_dtype, self.default_device, self.checkpoint = default_dtype, default_device, checkpoint
        self.backward = backward
        self._afterwards: Context | None = None

    @property
    def afterwards(self) -> Context:
        """The context of later passes: without autocast, whose casts are operations by then."""
        if self.autocast is None:
            return self
        if self._afterwards is None:
            self._afterwards = self.replace(autocast=None)
        return self._afterwards

    def replace(self, **changes) -> Context:
        inherited = ("grad_enabled", "autocast", "default_dtype", "default_device", "checkpoint", "backward")
        fields = {k: getattr(self, k) for k in inherited} | changes
        return Context(changes.get("names", self.names), **{k: v for k, v in fields.items() if k != "names"})


class Recorder:
    """The list of operations being written: the only mutable thing while a function is traced.

    sizes: the data-dependent sizes in the result of the current operation (`thunder.core.unbacked`); None where there
    are none.

    context: see `Context`; replaced, not changed, when the program enters or leaves a mode. memory: what in-place
    operations have made of values (`thunder.ops.functionalize.memory`), where there may be any. casts: of leaves, by
    autocast (`thunder.ops.autocast`); is_leaf says what is one. location: called for each operation, gives where in the
    user's code it came from, in a form that costs little; where: the same as (filename, line, function, source line),
    for errors.

    decide: answers what is data-dependent, see `thunder.core.paths`; None where such a question is an error. typing:
    whether a meta rule is running, which is typed by examples where it asks. read_numbers: the data-dependent numbers
    that tensors were read as, by what makes the tensors.
    """

    __slots__ = (
        "bound_symbols", "context", "memory", "casts", "is_leaf", "location", "where", "sizes", "decide", "typing",
        "read_numbers", "looks", "_places", "_placed",
    )  # fmt: skip

    def __init__(
        self,
        context: Context | None = None,
        location: Callable[[], Any] | None = None,
        where: Callable[[], tuple | None] | None = None,
    ):
        self.bound_symbols: list[Any] = []
        self.context = context or Context(Names())
        self.memory: Any = None
        self.casts: dict = {}
        self.is_leaf: Callable[[Any], bool] | None = None
        self.location, self.where = location, where
        self.sizes: list | None = None
        self.decide: Any = None
        self.typing = False
        self.read_numbers: dict = {}
        self.looks = 0
        self._places: dict[Any, int] = {}  # where the values of the first `_placed` operations are made
        self._placed = 0

    def position(self, value: Any) -> int | None:
        """Where in `bound_symbols` the operation stands that makes a value; None for those from outside. Operations are
        added, or replaced by others with the same results, so that a question costs no walk over all of them; else see
        `rewrite`."""
        operations = self.bound_symbols
        for position in range(self._placed, len(operations)):
            inputs = frozenset(operations[position].inputs)
            self._places.update((o, position) for o in operations[position].outputs if o not in inputs)
        self._placed = len(operations)
        return self._places.get(value)

    def producer(self, value: Any) -> Any:
        """The operation that makes a value."""
        position = self.position(value)
        return None if position is None else self.bound_symbols[position]

    def add(self, operations: Iterable[Any]) -> None:
        """These operations come next."""
        self.bound_symbols.extend(operations)

    def replace(self, position: int, operation: Any) -> None:
        """Another operation with the same results stands at this place."""
        self.bound_symbols[position] = operation

    def rewrite(self, operations: Iterable[Any]) -> None:
        """These are the operations recorded so far."""
        self.bound_symbols[:] = operations
        self._places.clear()
        self._placed = 0

    def latest(self, x):
        """The current value of a proxy after the in-place operations recorded so far."""
        return self.memory.latest(x) if self.memory is not None and self.memory.active else x


@contextmanager
def detached(context: Context | None = None) -> Iterator[Recorder]:
    """A recorder of its own for operations that do not belong to the program (a checker's probing, a decomposition)."""
    outer = current_recorder()
    with recording(Recorder(context or (outer.context if outer else None))) as recorder:
        yield recorder
