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

import itertools
from collections import deque
from collections.abc import Sequence

from thunder.analysis.cost import nbytes, original_of
from thunder.analysis.flow import uses
from thunder.core.proxies import FutureTensorProxy, Proxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.ops import ltorch
from thunder.options import compile_option

BYTES_IN_FLIGHT = 512 * 2**20  # the default limit: a few layers of a large model, some milliseconds of NVLink
COMMUNICATION_BYTES_IN_FLIGHT = compile_option(
    "communication_bytes_in_flight", int, BYTES_IN_FLIGHT, "the limit on the bytes of collectives that run at once",
    owner="schedule", valid="a number of bytes, 0 or more", check=lambda n: n >= 0,
)  # fmt: skip


def overlap(trace: Trace, limit: int = BYTES_IN_FLIGHT) -> Trace:
    """Starts collectives early and waits late, with at most `limit` bytes of gathers, and as many of reductions, under
    way where more than one is."""
    return trace.replace(bound_symbols=_late(_early(trace, limit), limit))


def _starts(operation: BoundSymbol) -> bool:
    return any(isinstance(o, FutureTensorProxy) for o in operation.outputs)


def _waits(operation: BoundSymbol) -> bool:
    return any(isinstance(i, FutureTensorProxy) for i in operation.inputs)


def _size(operation: BoundSymbol) -> int:
    """Bytes of the larger side of a collective: what it fills, or what it reads and keeps."""
    return max(sum(map(nbytes, operation.inputs)), sum(map(nbytes, operation.outputs)))


def _gathers(operation: BoundSymbol) -> bool:
    return sum(map(nbytes, operation.outputs)) > sum(map(nbytes, operation.inputs))


def _follows(operation: BoundSymbol) -> bool:
    """Whether a operation may be put off together with the waits for what it reads: a cast, or the start of another
    collective."""
    return bool(operation.inputs) and (original_of(operation).sym is ltorch.to or _starts(operation))


# ----------------------------------------------------------------------------------------------------------------
# gathers


def _early(trace: Trace, limit: int) -> list[BoundSymbol]:
    """The operations, with those collectives early that use nothing the program computes but casts and the like of its
    arguments."""
    head, queue = _movable(trace)
    moved = {id(operation) for operation in (*head, *itertools.chain.from_iterable(queue))}
    written: set[int] = set()  # several collectives may read what one operation makes
    waiting = {o for group in queue for o in group[-1].outputs}
    operations = head
    flying: dict[BoundSymbol, int] = {}  # collectives that nobody waits for yet, and their bytes
    started: dict[Proxy, BoundSymbol] = {}

    def start() -> None:
        group = queue.popleft()
        operations.extend(operation for operation in group if id(operation) not in written)
        written.update(map(id, group))
        flying[group[-1]] = _size(group[-1])
        started.update(dict.fromkeys(group[-1].outputs, group[-1]))

    def start_more() -> None:
        while queue and (not flying or sum(flying.values()) + _size(queue[0][-1]) <= limit):
            start()

    start_more()
    for operation in trace.bound_symbols:
        if id(operation) in moved:
            continue
        if _waits(operation):
            # a fusion executor may have changed the order
            while queue and any(i not in started and i in waiting for i in operation.inputs):
                start()
            landed = [flying.pop(started[i], None) for i in operation.inputs if i in started]
            operations.append(operation)
            if any(size is not None for size in landed):  # the first wait is for all that started as one
                start_more()
        else:
            operations.append(operation)
    assert not queue, "every collective is waited for, which starts the next ones"
    return operations


def _movable(trace: Trace) -> tuple[list[BoundSymbol], deque[tuple[BoundSymbol, ...]]]:
    """The operations that unpack what a backward is given; and each collective that needs nothing but arguments, behind
    the operations that make what it reads of these."""
    ready = {a for a in trace.args if isinstance(a, Proxy)}
    # what is made of the program's arguments alone, for a collective: the operations that make it
    chains: dict[Proxy, tuple[BoundSymbol, ...]] = {}
    queue: deque[tuple[BoundSymbol, ...]] = deque()
    used = uses(trace.bound_symbols, trace.output_proxies)
    head: list[BoundSymbol] = []
    for operation in trace.bound_symbols:
        if operation.sym.python_printer is not None and operation.args and all(i in ready for i in operation.inputs):
            ready.update(operation.outputs)
            head.append(operation)
        elif (
            all(i in ready or i in chains for i in operation.inputs)
            and operation.inputs
            and not operation.sym.tags & {OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.RANDOM_OP}
        ):
            before = tuple(dict.fromkeys(b for i in operation.inputs for b in chains.get(i, ())))
            if _starts(operation):
                queue.append((*before, operation))
            elif not _waits(operation) and all(used[o] == 1 for o in operation.outputs):
                chains |= dict.fromkeys(operation.outputs, (*before, operation))
    return head, queue


# ---------------------------------------------------------------------------------------------------------------- waits


def _late(operations: Sequence[BoundSymbol], limit: int) -> list[BoundSymbol]:
    """The operations, with waits, and casts of their results, right before the first operation that uses them, or at
    the end. A reduction of what is waited for, over replicas, starts where the next one does."""
    out: list[BoundSymbol] = []
    held: dict[BoundSymbol, None] = {}  # not written yet, in order
    producer: dict[Proxy, BoundSymbol] = {}  # of values of operations that are held
    gathers: dict[BoundSymbol, int] = {}  # that nobody waits for yet, and their bytes
    reductions: dict[BoundSymbol, int] = {}
    started: dict[Proxy, BoundSymbol] = {}

    def write(operation: BoundSymbol) -> None:
        if operation in held:
            del held[operation]
            put(operation)

    def put(operation: BoundSymbol) -> None:
        for i in operation.inputs:
            if i in producer:
                write(producer[i])
            gathers.pop(started.get(i), None)
            reductions.pop(started.get(i), None)
        if _starts(operation):
            size, alike = _size(operation), gathers if _gathers(operation) else reductions
            for waiting in list(held):
                if sum(alike.values()) + size <= limit:
                    break
                if any(started.get(i) in alike for i in waiting.inputs):
                    write(waiting)
            alike[operation] = size
            started.update(dict.fromkeys(operation.outputs, operation))
        out.append(operation)

    for operation in operations:
        if _waits(operation) or _follows(operation) and all(producer.get(i) in held for i in operation.inputs):
            held[operation] = None
            producer.update(dict.fromkeys(operation.outputs, operation))
            continue
        for waiting in list(held):
            # what is written in place a collective may read; the next reduction lets those go that wait for the one
            # before
            if (
                OpTags.IN_PLACE in operation.sym.tags
                or _starts(waiting)
                and _starts(operation)
                and not _gathers(operation)
            ):
                write(waiting)
        put(operation)
    for waiting in list(held):
        write(waiting)
    return out
