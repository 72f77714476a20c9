"""Side Stream: gradients of weights are computed beside what the rest of the backward waits for.

Before: `t2 = torch.mm(g_t, x)`, `t3 = torch.mm(g, w)`, ..., `return (t2, ...)`. After: `t2 = mm_on_side_stream(g_t,
x)`, `t3 = torch.mm(g, w)`, ..., `join_side_stream()`, `return (t2, ...)`.

Nobody in the program reads such a product. Nor does anybody wait, in a CUDA graph, for kernels with which a fusion
executor only finishes gradients: `[t4, t5] = TritonFusion0(x)` with a comment that says so. On a stream of its own it
fills what the others leave of a GPU: the last blocks of other products, and what waits for memory. What it reads is
held until the program's stream has waited for it, and its memory is of the program's stream, which has waited before
anybody sees it.

Not taken is a product of something that the program writes to afterwards, one that nothing follows, nor one that is too
small for what it costs the host.
"""

from __future__ import annotations

import threading

import torch

from thunder import compat
from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import multiply_adds
from thunder.core.proxies import Proxy, TensorProxy, has_numbers
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace, TraceTag
from thunder.extend.fusion import FusionExecutor, run_by
from thunder.ops import LTORCH
from thunder.transforms.del_last_used import python_del

__all__ = ["forget", "has_side_stream", "join", "side_stream"]

DEVICES = ("cuda",)
_EFFECTS = (OpTags.IN_PLACE, OpTags.DONT_DCE, OpTags.OPAQUE)
# multiplications and additions that take a GPU 80 us or more. The products of 512 rows of a 7B model take less: there
# the host has no lead to pay from
LEAST = 6 * 10**10
TOGETHER = 8  # products that start together at most
# bytes that products read, after which the program waits for those before, and half of which is enough to start them:
# they cannot be given away meanwhile
HELD = 120_000_000


def has_side_stream(program: Trace) -> bool:
    """Whether a program is a backward whose results are on a device that has streams."""
    return TraceTag.BACKWARD in program.tags and any(
        isinstance(o, TensorProxy) and o.device.type in DEVICES for o in program.output_proxies
    )


def side_stream(trace: Trace, least: int | None = None, *, small: bool = False) -> Trace:
    """Computes products of at least so many multiplications and additions (`LEAST`), which are returned and not read,
    on a second stream; small: what fusions finish as well."""
    least = LEAST if least is None else least
    lines, bases = trace.bound_symbols, alias_bases(trace.bound_symbols, maybe=True)
    returned, read, written = set(trace.output_proxies), set[Proxy](), set[Proxy]()
    made: list[BoundSymbol] = []
    something_follows = changed = False
    for old in reversed(lines):
        line = old
        if line.sym is python_del:
            made.append(line)
            continue
        inputs = {bases[i] for i in line.inputs}
        if any(
            not part.sym.tags.isdisjoint(_EFFECTS) for part in (line, *(line.subsymbols if line.sym.is_fusion else ()))
        ):
            written |= inputs
        elif (
            something_follows
            and _is_product(line, least)
            and line.output in returned
            and line.output not in read
            and written.isdisjoint(inputs)
        ):
            line = line.replace(sym=mm_on_side_stream, subsymbols=[line])
        elif small and something_follows and line.sym.is_fusion and isinstance(line.sym.executor, FusionExecutor):
            line = _finished_beside(
                line,
                line.sym.executor,
                frozenset(i for i, o in enumerate(line.outputs) if o in returned and o not in read),
            )
        read |= inputs
        something_follows |= OpTags.VIEW not in line.sym.tags
        changed |= line is not old
        made.append(line)
    if not changed:
        return trace
    return trace.replace(bound_symbols=[*reversed(made), join_side_stream.bind(output=None)])


def _finished_beside(line: BoundSymbol, fuser: FusionExecutor, places: frozenset[int]) -> BoundSymbol:
    function = fuser.beside(line.sym.fn, places, fork) if places and line.sym.fn is not None else None
    return line if function is None else run_by(line, function, "gradients of weights are finished on the side stream")


def _is_product(line: BoundSymbol, least: int) -> bool:
    if (
        line.sym.id != f"torch.{LTORCH['mm'].id}"
        or len(line.args) != 2
        or line.kwargs
        or not isinstance(line.output, TensorProxy)
        or line.output.device.type not in DEVICES
    ):
        return False
    return not any(map(has_numbers, line.args)) and 2 * multiply_adds(line) >= least


class _Side:
    """The second stream of a stream, for one thread, and what is under way there.

    Telling a stream to wait costs the host as much as starting a product: some start together, and are waited for
    together.
    """

    def __init__(self, main: torch.cuda.Stream):
        self.main, self.stream = main, torch.cuda.Stream(main.device_index)
        self.here, self.there = (
            {"stream_id": s.stream_id, "device_index": s.device_index, "device_type": s.device_type}
            for s in (self.main, self.stream)
        )
        self.ready, self.done = torch.cuda.Event(), torch.cuda.Event()
        self.waiting: list[tuple] = []  # products that did not start: what they read and write
        self.started: list[tuple] = []  # what is read and written behind the last event
        self.before: list[tuple] = []  # and before it
        self.size = self.begun = 0  # bytes of memory that what waits keeps, and what started behind the last event

    def add(self, a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> None:
        self.waiting.append((a, b, result))
        self.size += a.untyped_storage().nbytes() + b.untyped_storage().nbytes()
        if len(self.waiting) == TOGETHER or 2 * self.size >= HELD:
            self.start()

    def start(self) -> None:
        waiting, self.waiting, self.begun, self.size = self.waiting, [], self.begun + self.size, 0
        self.started += waiting  # before any of them may fail
        self.follow()
        compat.set_stream(**self.there)  # a context manager of torch.cuda.stream takes as long as the product
        try:
            for a, b, result in waiting:
                torch.mm(a, b, out=result)
        finally:
            compat.set_stream(**self.here)
        if self.begun >= HELD:
            self.wait()

    def hold(self, tensors: tuple) -> None:
        """Tensors that something else, launched next, reads and writes there."""
        if self.begun >= HELD:
            self.wait()
        self.started.append(tensors)
        self.begun += sum(t.untyped_storage().nbytes() for t in tensors)

    def follow(self) -> None:
        """Lets the second stream wait for what was launched on the first one."""
        self.ready.record(self.main)
        self.ready.wait(self.stream)

    def wait(self) -> None:
        """Lets the first stream wait for what was started before the last event, which then stands for what was started
        since."""
        self.wait_before()
        self.done.record(self.stream)
        self.before, self.started, self.begun = self.started, [], 0

    def wait_before(self) -> None:
        # also where the event cannot be waited for, as after a recording of the user's that failed
        before, self.before = self.before, []
        if before:
            self.done.wait(self.main)

    def join(self) -> None:
        if self.waiting:
            self.start()
        if self.started:
            self.wait()
        self.wait_before()


class _Sides(threading.local):
    """By device and stream."""

    def __init__(self):
        self.found: dict[tuple[int, int], _Side] = {}


_SIDES = _Sides()


def _side(index: int) -> _Side:
    """That of a device's current stream."""
    key = index, compat.current_stream(index)
    side = _SIDES.found.get(key)
    if side is None:
        side = _SIDES.found[key] = _Side(torch.cuda.current_stream(index))
    return side


def _mm_on_side_stream(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    index = a.get_device()
    if index != compat.current_device():
        with torch.cuda.device(index):
            return _mm_on_side_stream(a, b)
    columns = b.shape[1]
    result = compat.empty_strided_cuda((a.shape[0], columns), (columns, 1), a.dtype)
    _side(index).add(a, b, result)
    return result


def fork(index: int, held: tuple) -> int:
    """The handle of a device's second stream, which waits for what was launched on its current one; `held` is what will
    be read and written there."""
    side = _side(index)
    side.hold(held)
    side.follow()
    return side.stream.cuda_stream


def join() -> None:
    """Lets the current streams wait for the products that were asked for on them: at the end of each program. What one
    that failed left is part of the next one's on its stream."""
    for (index, handle), side in _SIDES.found.items():
        # another stream's program is under way, this one runs in the middle of it
        if compat.current_stream(index) == handle:
            if index == compat.current_device():
                side.join()
            else:
                with torch.cuda.device(index):
                    side.join()


def forget(index: int) -> None:
    """What was asked for on a device's current stream is not waited for: it was recorded for a CUDA graph that is none,
    and never runs."""
    _SIDES.found.pop((index, compat.current_stream(index)), None)


mm_on_side_stream = Symbol(
    "mm_on_side_stream", id="side_stream.mm", is_prim=True, fn=_mm_on_side_stream, tags=(OpTags.MATMUL_OP,)
)
join_side_stream = Symbol("join_side_stream", id="side_stream.join", is_prim=True, fn=join, tags=(OpTags.DONT_DCE,))
