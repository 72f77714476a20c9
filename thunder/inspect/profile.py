"""`thunder.profile`: time and memory of a call, by bound symbol, by the user's line and by module.

The programs that run are measured, and no copies of them. While a call is measured, the function that a trace was
printed to has other code: the same statements, with a note behind each bound symbol. A note reads the clock, records an
event on a GPU's stream, or ends one range of `torch.profiler` and begins the next, by which PyTorch counts the bytes
that its allocators hand out and take back. Calls with and without notes take turns, and the fastest of each kind
counts: the times are those of one run, and their sum can be held against a step that nobody looked into.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import bytes_moved, estimated_time, multiply_adds, nbytes, original_of
from thunder.api import compiled_or_jit
from thunder.cache.entry import CacheEntry
from thunder.compiled import Compiled
from thunder.core.codegen import Printer, function_source, line_owners
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.tables import table
from thunder.core.trace import Trace, TraceTag
from thunder.errors import CaptureError, OptionError
from thunder.inspect.queries import compiled_function
from thunder.programs.entry import text_only
from thunder.transforms.del_last_used import python_del
from thunder.transforms.named_ranges import NOTES
from thunder.transforms.partition import clear_symbol, unpack_sequence
from thunder.transforms.phases import phase_of

ROUNDS = 3, 20  # calls of each kind, at least and at most, as long as they take
SECONDS = 3.0  # together
WARM = 3  # calls before, of which the first ones compile
ROWS = 20  # of a printed table
STATEMENTS = (python_del, unpack_sequence, clear_symbol)  # of a program's text, which compute nothing


class Cost(NamedTuple):
    """What one bound symbol took, in one of the programs that a call ran.

    part: "forward", "backward" or "update". trace: the program. number: the place of the bound symbol in it. bytes:
    that it allocated, less those that it gave back. where: (filename, line, function, source line) of the user's code,
    None where the bound symbol comes from no line. module: the path of the module that ran there.
    """

    part: str
    trace: Trace
    number: int
    bound_symbol: BoundSymbol
    seconds: float
    bytes: int
    where: tuple | None
    module: str | None


class Share(NamedTuple):
    """What the operations of a line or of a module took together.

    key: (filename, line, function, source line), or a path. bytes: allocated by them. at_peak: bytes of their results
    that are in memory at the peak. count: of the operations. moved: bytes that they read and write, by their types.
    flops: floating-point operations of matmuls, convolutions and attention.
    """

    key: Any
    seconds: float
    bytes: int
    at_peak: int
    count: int
    moved: int = 0
    flops: float = 0.0


class Profile:
    """What `thunder.profile` has measured; printed, two tables.

    costs: of each bound symbol, in the order in which they ran. step: seconds of a call, with its backward, that nobody
    looked into. noted: seconds of the call that the times are of. guards: seconds of that call until its program began.
    timeline: bytes in memory behind each bound symbol, more than before the call. peak: the largest of them. compiled,
    entry: the function and its program. beside: seconds of a step of other systems, by name (`compare`).
    """

    def __init__(
        self, compiled: Compiled, entry: CacheEntry, costs: Sequence[Cost], step: float, noted: float, guards: float,
        step_of: Callable[[Callable], float],
    ):  # fmt: skip
        self.compiled, self.entry, self.costs = compiled, entry, tuple(costs)
        self.step, self.noted, self.guards = step, noted, guards
        self.beside: dict[str, float] = {}
        self._step_of = step_of
        self.timeline: list[int] = []
        for cost in costs:
            self.timeline.append(cost.bytes + (self.timeline[-1] if self.timeline else 0))
        self.peak = max(self.timeline, default=0)
        self._alive = _alive(costs[: self.timeline.index(self.peak) + 1]) if costs else {}

    @property
    def seconds(self) -> float:
        """The sum of the times of the bound symbols."""
        return sum(cost.seconds for cost in self.costs)

    @property
    def covered(self) -> float:
        """How much of the call its guards and the bound symbols are; the rest is autograd's, and the way back."""
        return (self.guards + self.seconds) / self.noted if self.noted else 0.0

    def compare(self, *systems: str) -> Profile:
        """Measures the same step in other systems, "eager" and "torch.compile", in turns with thunder's, and returns
        this profile: `beside` has the seconds of each, `step` is measured again.

        Raises OptionError for another name.
        """
        others = {"eager": lambda f: f, "torch.compile": torch.compile}
        for name in systems:
            if name not in others:
                raise OptionError(f"systems: {name!r} is not a system; valid: {', '.join(map(repr, others))}")
        if not systems:
            return self
        calls = {"thunder": self.compiled, **{name: others[name](self.compiled.fn) for name in systems}}
        for call in calls.values():
            for _ in range(WARM):
                self._step_of(call)
        times, started = {name: [] for name in calls}, time.perf_counter()
        while len(times["thunder"]) < ROUNDS[0] or (
            len(times["thunder"]) < ROUNDS[1] and time.perf_counter() - started < SECONDS
        ):
            for name, call in calls.items():
                times[name].append(self._step_of(call))
        self.beside = {name: min(times[name]) for name in systems}
        self.step = min(times["thunder"])
        return self

    def by_line(self) -> list[Share]:
        """By the user's line, the longest first. The key is None for operations that come from no line. Operations in
        functions of one line (a comprehension, a lambda) count for that line."""
        lines: dict[tuple, tuple] = {}
        return self._shares(lambda where, module: [where and lines.setdefault(where[:2], where)])

    def by_module(self) -> list[Share]:
        """By module, with the modules in it, the longest first. The key is "" for the compiled module itself, None for
        bound symbols outside of modules."""
        return self._shares(lambda where, module: _prefixes(module))

    def _shares(self, keys: Callable[..., Iterable]) -> list[Share]:
        """Adds up time, bytes and operations by key, the longest first. keys: of a location and a module's path."""
        rows: dict[Any, list] = defaultdict(lambda: [0.0, 0, 0, 0, 0, 0.0])
        where, keys_of = self.entry.captured.where, {}
        for cost in self.costs:
            computes = cost.bound_symbol.sym not in STATEMENTS
            moved = bytes_moved(cost.bound_symbol) if computes else 0
            for part, share in _parts(cost.bound_symbol):
                location = part.location
                at = keys(where(location), location[2]) if location else keys(cost.where, cost.module)
                for key in dict.fromkeys(at):
                    row = rows[key]
                    row[0] += share * cost.seconds
                    row[1] += round(share * max(cost.bytes, 0))
                    row[3] += computes
                    row[4] += round(share * moved)
                    row[5] += 2 * multiply_adds(original_of(part)) if computes else 0.0
                if computes:
                    keys_of |= dict.fromkeys([o.name for o in part.outputs], tuple(dict.fromkeys(at)))
        for name, size in self._alive.items():
            for key in keys_of.get(name, ()):
                rows[key][2] += size
        return sorted((Share(key, *row) for key, row in rows.items() if row[3]), key=lambda s: -s.seconds)

    def __str__(self) -> str:
        head = (
            f"a step took {1e3 * self.step:.3f} ms, with notes {1e3 * self.noted:.3f} ms: of these {len(self.costs)} "
            f"bound symbols {1e3 * self.seconds:.3f} ms and guards {1e3 * self.guards:.3f} ms ({self.covered:.1%}); "
            f"memory rose by {_mib(self.peak)} MiB at most"
        )
        lines = _table([(s, _at(s.key)) for s in self.by_line()], "line", self.seconds)
        modules = [(s, "(no module)" if s.key is None else s.key or "(the model)") for s in self.by_module()]
        return "\n\n".join([head, lines, _table(modules, "module, with those in it", self.seconds)])

    __repr__ = __str__


def _at(where: tuple | None) -> str:
    return "(none of the user's lines)" if where is None else f"{where[0]}:{where[1]}: {where[3].strip()}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def _table(shares: Sequence[tuple[Share, str]], title: str, total: float) -> str:
    """The longest of some shares, each with its name."""
    rows = [
        (f"{1e3 * s.seconds:.3f}", f"{s.seconds / total if total else 0:.1%}", _mib(s.bytes), _mib(s.at_peak), name)
        for s, name in shares[:ROWS]
    ]
    if len(shares) > ROWS:
        rows.append(("", "", "", "", f"and {len(shares) - ROWS} more"))
    return table(("ms", "share", "MiB", "at peak", title), rows, right=range(4))


def _prefixes(path: str | None) -> list[str | None]:
    """A module and those that it is in."""
    if not path:
        return [path]
    names = path.split(".")
    return ["", *(".".join(names[:i]) for i in range(1, len(names) + 1))]


def _parts(b: BoundSymbol) -> Iterator[tuple[BoundSymbol, float]]:
    """The operations that a bound symbol runs, each with its share: that of a region is shared out by bytes and
    arithmetic (`analysis.cost`)."""
    if not b.sym.is_fusion:
        yield b, 1.0
        return
    costs = [max(estimated_time(part), 1.0) for part in b.subsymbols]
    for part, cost in zip(b.subsymbols, costs, strict=True):
        for inner, share in _parts(part):
            yield inner, share * cost / sum(costs)


def _alive(costs: Sequence[Cost]) -> dict[str, int]:
    """By name, the bytes of the values that are in memory behind the last of these bound symbols."""
    alive: dict[str, int] = {}
    bases = alias_bases((c.bound_symbol for c in costs), maybe=True)
    for cost in costs:
        b = cost.bound_symbol
        if b.sym is python_del:
            for value in b.inputs:
                alive.pop(value.name, None)
        elif b.sym is not unpack_sequence and OpTags.IN_PLACE not in b.sym.tags:
            own = [o for o in b.outputs if isinstance(o, TensorProxy) and o not in bases]
            alive |= {o.name: nbytes(o) for o in own}
    return alive


# ------------------------------------------------------------------------------------------------------------- notes


class _Run(NamedTuple):
    """One run of one program: what each note has noted, the first one before all bound symbols."""

    trace: Trace
    notes: list

    @property
    def is_whole(self) -> bool:
        """Whether it did not leave for another path."""
        return len(self.notes) > len(self.trace.bound_symbols)


class _Clock:
    """The host's clock, or the GPU's where one of these programs runs on one. It is read as rarely as possible, since
    that takes the host as long as a launch: what a bound symbol is followed by that gives memory back counts to it.
    Events are used again by the next call."""

    def __init__(self, traces: Sequence[Trace]):
        values = [v for t in traces for v in (*t.args, *(o for b in t.bound_symbols for o in b.outputs))]
        self._on_gpu = any(v.device.type == "cuda" for v in values if isinstance(v, TensorProxy))
        self._events: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._unused = iter(self._events)
        self._stream = torch.cuda.current_stream() if self._on_gpu else None

    def read(self) -> Any:
        """Seconds of the host, or an event on the stream."""
        if self._stream is None:
            return time.perf_counter()
        event = next(self._unused, None)
        if event is None:
            self._events.append(event := torch.cuda.Event(enable_timing=True))
        event.record(self._stream)
        return event

    def note_for(self, trace: Trace) -> Callable[[], Any]:
        """Reads the clock where the next bound symbol does not give memory back."""
        follow = iter([not i or b.sym is not python_del for i, b in enumerate(trace.bound_symbols)])
        return lambda: self.read() if next(follow, True) else None

    def between(self, a: Any, b: Any) -> float:
        """Seconds from one reading to another. The device must be through with them."""
        return b - a if self._stream is None else a.elapsed_time(b) / 1e3

    def times(self, run: _Run) -> list[float]:
        """Seconds by bound symbol."""
        seconds, first, last = [0.0] * len(run.trace.bound_symbols), 0, run.notes[0]
        for i, reading in enumerate(run.notes[1:], 1):
            if reading is not None:
                seconds[first] = self.between(last, reading)
                first, last = i, reading
        return seconds


class _Noted:
    """The functions of traces, whose code takes notes inside the block of `taking`."""

    def __init__(self, traces: Sequence[Trace]):
        self.traces = traces
        self._functions = [trace.python_callable() for trace in traces]
        self._codes = [_with_notes(t, f, n) for n, (t, f) in enumerate(zip(traces, self._functions, strict=True))]

    @contextlib.contextmanager
    def taking(self, note_for: Callable[[Trace], Callable[[], Any]]) -> Iterator[list[_Run]]:
        """Inside the block, runs are noted. note_for: for a trace that begins to run, what to call for each note."""
        runs: list[_Run] = []

        def begin(number: int) -> Callable[[], None]:
            note, noted = note_for(self.traces[number]), []
            runs.append(_Run(self.traces[number], noted))
            noted.append(note())
            return lambda: noted.append(note())

        before = [f.__code__ for f in self._functions]
        try:
            for f, code in zip(self._functions, self._codes, strict=True):
                f.__globals__[NOTES] = begin
                f.__code__ = code
            yield runs
        finally:
            for f, code in zip(self._functions, before, strict=True):
                f.__code__ = code
                f.__globals__.pop(NOTES, None)


def _with_notes(trace: Trace, function: FunctionType, number: int):
    """The code of a trace's function, with a note before all bound symbols and one behind each. Lines stay what they
    are, for tracebacks."""
    source = "".join(linecache.getlines(function.__code__.co_filename))
    if source != function_source(trace, Printer(print_depth=1), include_decorators=False):
        raise OptionError("debug options that check traces change what runs: leave them out")
    tree = ast.parse(source)
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef)).body
    owners = line_owners(trace)
    statements = [_statement(f"_thunder_note = {NOTES}({number})", body[0].lineno)]
    for statement, following in zip(body, [*body[1:], None], strict=True):
        statements.append(statement)
        owner = owners.get(statement.lineno)
        if owner is not None and (following is None or owners.get(following.lineno) is not owner):
            statements.append(_statement("_thunder_note()", statement.lineno))
    body[:] = statements
    space: dict[str, Any] = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), space)
    return space[trace.name].__code__


def _statement(text: str, line: int) -> ast.stmt:
    statement = ast.parse(text).body[0]
    for node in ast.walk(statement):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
    return statement


def _ranges(name: Callable[[Trace, int], str]) -> Callable[[Trace], Callable[[], Any]]:
    """For each bound symbol a range of `torch.profiler`, which emit_nvtx shows as well."""

    def note_for(trace: Trace) -> Callable[[], None]:
        places, inside = iter(range(len(trace.bound_symbols))), []

        def note() -> None:
            if inside:
                inside.pop().__exit__(None, None, None)
            if (number := next(places, None)) is not None:
                inside.append(record_function(name(trace, number)))
                inside[-1].__enter__()

        return note

    return note_for


@contextlib.contextmanager
def profiler_ranges(fn: Callable) -> Iterator[None]:
    """A context manager. Inside the block, each bound symbol of the programs of `fn` is a range of `torch.profiler`,
    and of NVTX under `torch.autograd.profiler.emit_nvtx`. A range has a name such as "transformer.h.0.attn:
    torch.addmm".

    Programs that are compiled inside the block, and programs that were loaded from disk, have no ranges.

    Raises:
        TypeError: If `fn` is not compiled.
    """
    compiled = compiled_function(fn)

    def name(trace: Trace, number: int) -> str:
        b = trace.bound_symbols[number]
        module = b.location[2] if b.location else None
        return f"{module or 'thunder'}: {b.sym.qualified_name}"

    for entry in compiled.programs:
        entry.warm()  # which replaces the code of functions, as notes do
    noted = _Noted([t for entry in compiled.programs for t in entry.executed])
    with noted.taking(_ranges(name)):
        yield


# --------------------------------------------------------------------------------------------------------- measuring


def profile(fn: Callable, /, *args: Any, **kwargs: Any) -> Profile:
    """Measures the time and memory of `fn(*args, **kwargs)` by bound symbol, by line of the user's code and by module.

    If the program has a backward, it is run as well, from the results that are scalars (losses), or from all results if
    there is no scalar. Gradients of parameters do not change. A function that calls `backward()` and an optimizer is
    measured as a whole.

    Calls `fn` 11 to 45 times, with all side effects. A training step therefore trains.

    Args:
        fn: A compiled function or module, or one that `thunder.jit` accepts.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        CaptureError: If the original function runs, or the measured calls do not all run the same program.
    """
    compiled = compiled_or_jit(fn)

    def step() -> tuple[float, CacheEntry]:
        calls, started = {id(p): p.calls for p in compiled.programs}, _now()
        result = compiled(*args, **kwargs)
        took, entry = _now() - started, compiled.stats.last_entry
        if entry is None or entry.calls == calls.get(id(entry), 0):
            raise CaptureError("the original function runs, so there is no program to measure", remedy=_REMEDY)
        return took + backward_of(result, entry), entry

    def backward_of(result: Any, entry: CacheEntry) -> float:
        if not entry.backward_traces:
            return 0.0
        inputs = [x for x in entry.inputs(compiled.fn, args, kwargs) if _requires_grad(x)]
        started = _now()
        gradients = _backward(result, inputs)
        took = _now() - started
        del gradients  # giving memory back is no part of the program
        return took

    def step_of(call: Callable) -> float:
        """Seconds of the step with another function in the place of the compiled one."""
        started = _now()
        result = call(*args, **kwargs)
        return _now() - started + backward_of(result, entry)

    for _ in range(WARM):
        entry = step()[1]
    while entry.tiers is not None and not entry.tiers.is_settled:  # calls are counted: this ends
        entry = step()[1]
    check_symbols(entry)
    entry.warm()  # which replaces the code of functions, as notes do
    traces, plain, noted = entry.executed, [], []
    notes, clock = _Noted(traces), _Clock(traces)
    started = time.perf_counter()
    while len(plain) < ROUNDS[0] or len(plain) < ROUNDS[1] and time.perf_counter() - started < SECONDS:
        plain.append((*step(), []))
        clock.begin()
        with notes.taking(clock.note_for) as runs:
            began = clock.read()
            took, ran = step()
        whole = [run for run in runs if run.is_whole]
        guards = clock.between(began, whole[0].notes[0]) if whole else 0.0
        noted.append((took, ran, whole, guards, [clock.times(run) for run in whole]))
    with torch.profiler.profile(activities=_activities(), profile_memory=True, acc_events=True) as profiler:
        step()  # on the CPU, memory that a call gives back is counted where it was seen to be handed out
        with notes.taking(_ranges(lambda trace, number: f"thunder {traces.index(trace)} {number}")) as runs:
            counted = (*step(), [run for run in runs if run.is_whole])
    ways = [[run.trace for run in call[2]] for call in [*noted, counted]]
    if any(call[1] is not entry for call in [*plain, *noted, counted]) or any(way != ways[0] for way in ways):
        raise CaptureError("calls with these arguments do not all run the same program", remedy=_REMEDY)
    took, _, _, guards, times = min(noted, key=lambda call: call[0])
    costs = costs_of(entry, ways[0], times, _allocated(profiler))
    return Profile(compiled, entry, costs, min(call[0] for call in plain), took, guards, step_of)


def check_symbols(entry: CacheEntry) -> None:
    """Raises ThunderError for a program from disk, of which there is the text alone."""
    if entry.from_disk:
        raise text_only()


_REMEDY = "profile calls that are compiled and go one way; thunder.explain says what runs on the host"


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _requires_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    for inner in (
        result.values() if isinstance(result, Mapping) else result if isinstance(result, (list, tuple)) else ()
    ):
        yield from _tensors(inner)


def _backward(result: Any, inputs: list[torch.Tensor]) -> tuple:
    """The gradients of a result, which are accumulated nowhere."""
    outputs = [x for x in _tensors(result) if x.requires_grad]
    outputs = [x for x in outputs if x.numel() == 1] or outputs
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs], allow_unused=True)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]


def _allocated(profiler: torch.profiler.profile) -> dict[str, int]:
    """By the name of a range, the bytes that were allocated in it, less those that were given back. On a GPU a range
    has a second event of its name, on the device, which has no bytes."""
    allocated: dict[str, int] = defaultdict(int)
    for event in profiler.events():
        if event.name.startswith("thunder ") and not event.is_async:
            allocated[event.name] += event.cpu_memory_usage + event.device_memory_usage
    return allocated


def costs_of(
    entry: CacheEntry, ran: Sequence[Trace], times: Sequence[Sequence[float]], allocated: Mapping[str, int]
) -> list[Cost]:
    """The bound symbols of programs that ran. times: by program and bound symbol. allocated: bytes, by the names of
    ranges."""
    made_at: dict[Proxy, tuple] = {}  # by value, the location of the bound symbol that makes it
    costs = []
    for trace, seconds in zip(ran, times, strict=True):
        number_of = entry.executed.index(trace) if trace in entry.executed else None  # a backward that never ran
        part = "backward" if TraceTag.BACKWARD in trace.tags else "forward"
        for i, b in enumerate(trace.bound_symbols):
            location = b.location
            if b.sym is python_del:  # a value is given back for the line that made it
                location = next((made_at[v] for v in b.inputs if v in made_at), None)
            elif phase_of(b):
                part = "backward"
            elif TraceTag.BACKWARD not in trace.tags and part == "backward":
                part = "update"
            made_at |= dict.fromkeys(b.outputs, location) if location else {}
            where, module = (entry.captured.where(location), location[2]) if location else (None, None)
            size = allocated.get(f"thunder {number_of} {i}", 0)
            costs.append(Cost(part, trace, i, b, seconds[i], size, where, module))
    return costs
