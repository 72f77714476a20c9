"""The tier of CUDA graphs: a program whose host takes longer than its kernels is recorded, at a call that is known
beforehand.

    call        1 ... 12    13    14    15    16          17       18 ...     20 21 22     23
    does        runs        host and device   decides     records  replays    measured     stays, or goes back
                            are measured

The number of the call does not depend on a clock. The decision does, and may: a graph launches the kernels that the
program launches without it, on memory that is aligned alike, so that no bit of a result depends on it.

A program goes back to running without graphs, for good and with its reason in the report, where graphs do not pay:
results that a call has saved for a backward are in use at later calls, graphs need more memory than `SHARE`, there are
graphs for `SHAPES` programs of the function, no operation can be recorded, a recording runs out of memory, calls come
from several threads or run on several streams, or graphs measure no faster. Single calls run without graphs on another
stream or thread, under hooks for saved tensors, and while the user records a graph.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.cache.entry import CacheEntry, Lowered
from thunder.capture import Captured
from thunder.core.proxies import TensorProxy
from thunder.core.trace import Trace, TraceTag
from thunder.errors import MissingImplementationError, warn_user
from thunder.ops.torch_types import to_torch_device
from thunder.options import GRAPHS_CALL, JitOptions, debug_topics
from thunder.runtime.cudagraphs.device import DEVICES, GPU
from thunder.runtime.cudagraphs.memory import Memory
from thunder.runtime.cudagraphs.recording import Refused
from thunder.runtime.cudagraphs.region import GraphedRegion
from thunder.transforms.cudagraph import CUDAGraphTransform

MEASURED = 3  # calls of which host and device are measured
WARMING = 4  # calls with graphs before they are measured: two record
HOST = 0.8  # the share of a step's time that the host takes at least, where the device waits for it
FASTER = 0.98  # the share of the time without graphs that graphs take at most
SHAPES = 8  # programs of one function that have graphs
SHARE = 0.1  # of the device's memory that graphs take at most, and half of what is free
PATIENCE = 16  # calls without graphs before the tier is given up, where they are more than half of the calls

_MEMORIES: weakref.WeakSet[Memory] = weakref.WeakSet()  # of all functions that record by themselves


class FunctionGraphs:
    """What the graphs of one compiled function share: memory, by device and direction. programs: how many have
    graphs."""

    def __init__(self):
        self.programs, self.memory = 0, dict[tuple, Memory]()


class RecordsProgram(CUDAGraphTransform):
    """The graphs of one program. tier: decides about them; memory: that all programs of the function share."""

    copies_gradients = True

    def __init__(self, tier: GraphTier, kind: str, memory: dict[tuple, Memory]):
        super().__init__()
        self.device_type, self.watcher, self._memory = kind, tier, memory

    def make_memory(self, device: torch.device) -> Memory:
        memory = super().make_memory(device)
        _MEMORIES.add(memory)
        return memory


def graph_tier(
    captured: Captured, options: JitOptions, modes: tuple, lower: Callable[[Captured, Any], Lowered],
    lock: threading.RLock, shared: FunctionGraphs,
) -> GraphTier | None:  # fmt: skip
    """The tier of graphs of a program; None where it has none. lower: lowers it with one more transform."""
    if options.graphs is not None or options.device is not None or debug_topics() or options.debug.check_traces:
        return None
    if any(isinstance(t, CUDAGraphTransform) for t in options.transforms) or compat.function_modes_in(modes):
        return None
    program = captured.computation
    values = [*program.args, *(o for b in program.bound_symbols for o in b.outputs)]
    devices = {x.device.name: x.device for x in values if isinstance(x, TensorProxy) and x.device.type in DEVICES}
    if program.info.communicates or len(devices) != 1:
        return None
    device = to_torch_device(next(iter(devices.values())))
    assert device is not None, "a tensor has a device"
    only = captured.only_computation()  # so that a module is freed while its tier is waited for
    return GraphTier(lambda transform: lower(only, transform), DEVICES[device.type](device), lock, shared)


class _Clock:
    """Times of the host and of the device, of a few calls of a forward and of a backward."""

    def __init__(self, gpu: GPU):
        self._gpu, self._taken = gpu, dict[str, list]()
        self.threads, self.streams = set[int](), set[int]()

    def timed(self, kind: str, run: Callable, inputs: tuple) -> Any:
        """The results of a forward or a backward; notes the seconds that its launches take, and between which marks it
        runs."""
        gpu = self._gpu
        if gpu.is_recording():
            return run(*inputs)
        gpu.wait()  # what was launched before is not this program's
        first, start = gpu.mark(), gpu.now()
        results = run(*inputs)
        took = gpu.now() - start
        self._taken.setdefault(kind, []).append((took, first, gpu.mark()))
        if kind == "forward":
            self.threads.add(threading.get_ident())
            self.streams.add(gpu.handle())
        return results

    def read(self) -> tuple[float, float]:
        """Seconds of the host, and of the device from the first to the last launch, of a forward and a backward: the
        least of each."""
        spans = [[(took, self._gpu.between(a, b)) for took, a, b in taken] for taken in self._taken.values()]
        return sum(min(h for h, _ in s) for s in spans), sum(min(d for _, d in s) for s in spans)

    def __bool__(self) -> bool:
        return bool(self._taken)


class GraphTier:
    """The tier of graphs of one program. It is what calls run while the program runs as graphs.

    reason: in words, whether it has graphs, and why.
    """

    def __init__(self, lower: Callable, gpu: GPU, lock: threading.RLock, shared: FunctionGraphs):
        self.reason = "it has not run often enough"
        self.has_graphs = False
        self._lower, self._gpu, self._lock, self._shared = lower, gpu, lock, shared
        self._entry: Callable[[], CacheEntry | None] = _nothing
        self._clock: _Clock | None = None
        self._run: Callable = _nothing  # what calls run while they are not measured
        self._without: Lowered | None = None
        self._graphed: Callable = _nothing
        self._regions: list[GraphedRegion] = []
        self._stopped: dict[str, str] = {}
        self._outside: dict[str, str] = {}  # operations that no graph has, and why
        self._calls = self._skips = 0
        self._took, self._refused = 0.0, ""
        self._thread, self._stream = 0, 0

    def __str__(self) -> str:
        parts = "".join(f"; {name} runs without: {reason}" for name, reason in self._stopped.items())
        parts += "".join(f"; {name} is in none: {reason}" for name, reason in self._outside.items())
        return f"CUDA graphs: {self.reason}{parts if self.has_graphs else ''}"

    def begin(self, entry: CacheEntry, call: int) -> None:
        """call: the number of the call that decides."""
        self._entry, entry.graphs = weakref.ref(entry), self
        entry.at(max(1, call - MEASURED), self._measure)
        entry.at(call, self._decide)

    def watched(self, trace: Trace, run: Callable) -> Callable:
        """The functions of the program, of which the backward is measured when a clock is set."""
        if TraceTag.BACKWARD not in trace.tags:
            return run

        def and_measured(*inputs):
            clock = self._clock
            return run(*inputs) if clock is None else clock.timed("backward", run, inputs)

        return and_measured

    # --- before the decision
    def _measure(self) -> None:
        entry = self._entry()
        if entry is not None and (self.has_graphs or not self._calls):
            clock, run = _Clock(self._gpu), entry.computation_fn
            self._clock, self._run = clock, run
            entry.computation_fn = lambda *inputs: clock.timed("forward", run, inputs)

    def _measured(self, entry: CacheEntry) -> _Clock | None:
        """The measurements; no more calls are measured."""
        clock, self._clock = self._clock, None
        if clock is not None:
            entry.computation_fn, self._run = self._run, _nothing
        return clock

    def _decide(self) -> None:
        """After some calls: records the regions as graphs, or notes the reason against it."""
        entry = self._entry()
        if entry is None:
            return
        if self._gpu.is_recording():  # a graph of the user's, which this call is part of
            self.reason = "the user records a graph"
            return entry.at(entry.calls + 1, self._decide)
        clock = self._measured(entry)
        self.reason = self._against(clock)
        if not self.reason:
            self._record(entry)
        if not self.has_graphs:
            self._lower = _nothing  # it holds the program

    def _against(self, clock: _Clock | None) -> str:
        """The reason against graphs; "" where there is none."""
        if not clock:
            return "no call could be measured"
        if len(clock.threads) > 1:
            return "calls come from several threads"
        if len(clock.streams) > 1:
            return "calls run on several streams"
        (self._thread,), (self._stream,) = clock.threads, clock.streams
        host, self._took = clock.read()
        if host < HOST * self._took:
            return f"the device takes longer than the host: {_ms(self._took)} of which the host launches {_ms(host)}"
        if self._shared.programs >= SHAPES:
            return f"{SHAPES} programs of this function have graphs"
        return ""

    def _record(self, entry: CacheEntry) -> None:
        """Lowers the program to graphs, which calls run from now on."""
        transform = RecordsProgram(self, self._gpu.device.type, self._shared.memory)
        try:
            with self._lock:
                program = self._lower(transform)
        except MissingImplementationError as error:
            self.reason = f"it cannot be lowered again: {error}"
            return
        except Exception as error:  # noqa: BLE001  calls run the program without graphs
            self.reason = f"it cannot be lowered to graphs: {type(error).__name__}: {error}"
            warn_user(f"graphs='auto': a program runs without CUDA graphs, because {self.reason}", UserWarning)
            return
        traces = [program.computation_traces[-1], *program.backward_traces[-1:]]
        self._regions = [b.sym.fn for t in traces for b in t.bound_symbols if isinstance(b.sym.fn, GraphedRegion)]
        operations = [b for t in traces for b in t.bound_symbols if b.sym.python_printer is None and b.outputs]
        refused = {b.sym.name: transform.refusal(b) for b in operations if not isinstance(b.sym.fn, GraphedRegion)}
        self._outside = {name: reason for name, reason in refused.items() if reason is not None}
        if not self._regions:
            reasons = sorted(set(self._outside.values()))
            self.reason = f"there is nothing to record: {', '.join(reasons[:2]) or 'it launches too little'}"
            return
        self._lower, self._without, self._graphed = _nothing, entry.lowered, program.run
        self.reason, self.has_graphs = f"recorded at call {entry.calls}, since the host took longer", True
        self._shared.programs += 1
        entry.take(program._replace(run=self))
        entry.at(entry.calls + WARMING, self._measure)
        entry.at(entry.calls + WARMING + MEASURED, self._compare)

    # --- with graphs
    def __call__(self, *inputs):
        self._calls += 1
        if (
            threading.get_ident() != self._thread
            or self._gpu.handle() != self._stream
            or compat.saved_hooks(False) is not None
        ):
            self._skip("calls come from other threads, from other streams, or under hooks for saved tensors")
            without = self._without
            assert without is not None, "it was lowered before the tier"
            return without.run(*inputs)
        return self._graphed(*inputs)

    def _compare(self) -> None:
        """After some calls with graphs: gives them up where they are not faster."""
        entry = self._entry()
        if entry is None or not self.has_graphs:
            return
        clock = self._measured(entry)
        if not clock:
            self._give_up("no call with graphs could be measured")
            return
        _, took = clock.read()
        if took > FASTER * self._took:
            self._give_up(f"graphs take {_ms(took)}, and {_ms(self._took)} without")
        else:
            self.reason = f"recorded, {_ms(took)} for {_ms(self._took)} without"

    def recorded(self, region: GraphedRegion) -> None:
        held = sum(m.gpu.held_by(m.pool) for m in list(_MEMORIES) if m.gpu.index == self._gpu.index)
        free, total = self._gpu.room()
        limit = min(SHARE * total, (free + held) / 2)
        if held > limit:
            self._refused = f"graphs hold {held >> 20} MiB of memory, and may hold {int(limit) >> 20}"
            raise Refused(self._refused)

    def skipped(self, region: GraphedRegion, reason: str) -> None:
        self._skip(f"{region.name} {reason.split('. ')[0]}")

    def _skip(self, reason: str) -> None:
        self._skips += 1
        if self._skips > PATIENCE and 2 * self._skips > self._calls:
            self._give_up(reason)

    def stopped(self, region: GraphedRegion, reason: str, error: RuntimeError | None) -> None:
        self._stopped[region.name] = reason
        if self._refused or isinstance(error, torch.OutOfMemoryError) or all(r.off is not None for r in self._regions):
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Calls run the program without graphs from now on."""
        entry, without = self._entry(), self._without
        if not self.has_graphs or entry is None or without is None:
            return
        self.has_graphs, self.reason, self._clock = False, f"given up: {reason}", None
        self._shared.programs -= 1
        entry.take(without)
        for region in self._regions:
            region.turn_off(self.reason)
        for memory in {id(r.memory): r.memory for r in self._regions}.values():
            with memory.lock:
                memory.drop_unwanted()
        self._regions.clear()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _nothing(*args) -> Any:
    return None


def call_of(tiers: Any) -> int:
    """The number of the call that decides: as many behind that of the kernels as by default."""
    return GRAPHS_CALL if tiers is None else max(GRAPHS_CALL, tiers.call + GRAPHS_CALL - 5)
