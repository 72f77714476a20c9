"""When collectives start and when somebody waits: early and late, so that they run while the program computes.

Before: `t0 = all_gather(a, ...)`, `t_a = wait(t0)`, `y = linear(x, t_a)`, `t1 = all_gather(b, ...)`, `t_b = wait(t1)`,
`z = linear(y, t_b)`. After:  `t0 = all_gather(a, ...)`, `t1 = all_gather(b, ...)`, `t_a = wait(t0)`, `y = linear(x,
t_a)`, `t_b = wait(t1)`, `z = linear(y, t_b)`.

Gathers keep their order and start as early as a limit on the bytes in flight lets them; one is under way in any case
while the program computes with what the one before gave. Reductions start where their gradient is there; what they make
is waited for at the end, or when the next one would pass a limit of theirs: a gather that starts waits for none. Every
rank runs the same program, so that all start the same collectives in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from thunder.analysis.cost import nbytes
from thunder.analysis.flow import uses
from thunder.core.proxies import FutureTensorProxy, Proxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.options import compile_option

__all__ = ["overlap", "BYTES_IN_FLIGHT", "COMMUNICATION_BYTES_IN_FLIGHT"]

BYTES_IN_FLIGHT = 512 * 2**20  # the default limit: a few layers of a large model, some milliseconds of NVLink
COMMUNICATION_BYTES_IN_FLIGHT = compile_option(
    "communication_bytes_in_flight", int, BYTES_IN_FLIGHT, "the limit on the bytes of collectives that run at once",
    owner="schedule", valid="a number of bytes, 0 or more", check=lambda n: n >= 0,
)  # fmt: skip


def overlap(trace: Trace, limit: int = BYTES_IN_FLIGHT) -> Trace:
    """Starts collectives early and waits late, with at most `limit` bytes of gathers, and as many of reductions, under
    way where more than one is."""
    return trace.replace(bound_symbols=_late(_early(trace, limit), limit))


def _starts(line: BoundSymbol) -> bool:
    return any(isinstance(o, FutureTensorProxy) for o in line.outputs)


def _waits(line: BoundSymbol) -> bool:
    return any(isinstance(i, FutureTensorProxy) for i in line.inputs)


def _size(line: BoundSymbol) -> int:
    """Bytes of the larger side of a collective: what it fills, or what it reads and keeps."""
    return max(sum(map(nbytes, line.inputs)), sum(map(nbytes, line.outputs)))


def _gathers(line: BoundSymbol) -> bool:
    return sum(map(nbytes, line.outputs)) > sum(map(nbytes, line.inputs))


def _follows(line: BoundSymbol) -> bool:
    """Whether a line may be put off together with the waits for what it reads: a cast, or the start of another
    collective."""
    return bool(line.inputs) and (line.sym.name == "to" or _starts(line))


# ----------------------------------------------------------------------------------------------------------------
# gathers


def _early(trace: Trace, limit: int) -> list[BoundSymbol]:
    """The lines with those collectives early that read nothing the program computes, but casts and the like of what it
    is given."""
    ready = {a for a in trace.args if isinstance(a, Proxy)}
    # what is made of the program's arguments alone, for a collective: the lines that make it
    chains: dict[Proxy, tuple[BoundSymbol, ...]] = {}
    queue: deque[tuple[BoundSymbol, ...]] = deque()  # each collective with the lines before it
    moved: set[int] = set()
    written: set[int] = set()  # several collectives may read what one line makes
    readers = uses(trace.bound_symbols, trace.output_proxies)
    head: list[BoundSymbol] = []  # unpacks what a backward is given
    for line in trace.bound_symbols:
        if line.sym.python_printer is not None and line.args and all(i in ready for i in line.inputs):
            ready.update(line.outputs)
            head.append(line)
            moved.add(id(line))
        elif (
            all(i in ready or i in chains for i in line.inputs)
            and line.inputs
            and not line.sym.tags & {OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.RANDOM_OP}
        ):
            before = tuple(dict.fromkeys(b for i in line.inputs for b in chains.get(i, ())))
            if _starts(line):
                queue.append((*before, line))
                moved.update(map(id, queue[-1]))
            elif not _waits(line) and all(readers[o] == 1 for o in line.outputs):
                chains |= dict.fromkeys(line.outputs, (*before, line))
    waiting = {o for group in queue for o in group[-1].outputs}
    lines = head
    flying: dict[BoundSymbol, int] = {}  # collectives that nobody waits for yet, and their bytes
    started: dict[Proxy, BoundSymbol] = {}

    def start() -> None:
        group = queue.popleft()
        lines.extend(line for line in group if id(line) not in written)
        written.update(map(id, group))
        flying[group[-1]] = _size(group[-1])
        started.update(dict.fromkeys(group[-1].outputs, group[-1]))

    def start_more() -> None:
        while queue and (not flying or sum(flying.values()) + _size(queue[0][-1]) <= limit):
            start()

    start_more()
    for line in trace.bound_symbols:
        if id(line) in moved:
            continue
        if _waits(line):
            # a fusion executor may have changed the order
            while queue and any(i not in started and i in waiting for i in line.inputs):
                start()
            landed = [flying.pop(started[i], None) for i in line.inputs if i in started]
            lines.append(line)
            if any(size is not None for size in landed):  # the first wait is for all that started as one
                start_more()
        else:
            lines.append(line)
    assert not queue, "every collective is waited for, which starts the next ones"
    return lines


# ---------------------------------------------------------------------------------------------------------------- waits


def _late(lines: Sequence[BoundSymbol], limit: int) -> list[BoundSymbol]:
    """The lines with waits, and casts of what they give, right before the first line that computes with it, or at the
    end. A reduction of what is waited for, over replicas, starts where the next one does."""
    out: list[BoundSymbol] = []
    held: dict[BoundSymbol, None] = {}  # not written yet, in order
    maker: dict[Proxy, BoundSymbol] = {}  # of values of lines that are held
    gathers: dict[BoundSymbol, int] = {}  # that nobody waits for yet, and their bytes
    reductions: dict[BoundSymbol, int] = {}
    started: dict[Proxy, BoundSymbol] = {}

    def write(line: BoundSymbol) -> None:
        if line in held:
            del held[line]
            put(line)

    def put(line: BoundSymbol) -> None:
        for i in line.inputs:
            if i in maker:
                write(maker[i])
            gathers.pop(started.get(i), None)
            reductions.pop(started.get(i), None)
        if _starts(line):
            size, alike = _size(line), gathers if _gathers(line) else reductions
            for waiting in list(held):
                if sum(alike.values()) + size <= limit:
                    break
                if any(started.get(i) in alike for i in waiting.inputs):
                    write(waiting)
            alike[line] = size
            started.update(dict.fromkeys(line.outputs, line))
        out.append(line)

    for line in lines:
        if _waits(line) or _follows(line) and all(maker.get(i) in held for i in line.inputs):
            held[line] = None
            maker.update(dict.fromkeys(line.outputs, line))
            continue
        for waiting in list(held):
            # what is written in place a collective may read; the next reduction lets those go that wait for the one
            # before
            if OpTags.IN_PLACE in line.sym.tags or _starts(waiting) and _starts(line) and not _gathers(line):
                write(waiting)
        put(line)
    for waiting in list(held):
        write(waiting)
    return out
