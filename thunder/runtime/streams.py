"""The side stream of each stream: products that run beside the operations of a program."""

from __future__ import annotations

import threading

import torch

from thunder import compat

TOGETHER = 8  # products that start together at most
# bytes that products read, after which the program waits for those before, and half of which is enough to start them:
# they cannot be given away meanwhile
HELD = 120_000_000


class _Side:
    """The side stream of a stream for one thread, with its pending products.

    A wait between streams costs the host as much as a launch, so several products are launched together, and waited for
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
        """Holds tensors that the next launch on the side stream reads and writes."""
        if self.begun >= HELD:
            self.wait()
        self.started.append(tensors)
        self.begun += sum(t.untyped_storage().nbytes() for t in tensors)

    def follow(self) -> None:
        """Lets the side stream wait for the launches on the first one."""
        self.ready.record(self.main)
        self.ready.wait(self.stream)

    def wait(self) -> None:
        """Lets the first stream wait for the products before the last event, and records the next event behind those
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


def mm_beside(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    index = a.get_device()
    if index != compat.current_device():
        with torch.cuda.device(index):
            return mm_beside(a, b)
    columns = b.shape[1]
    result = compat.empty_strided_cuda((a.shape[0], columns), (columns, 1), a.dtype)
    _side(index).add(a, b, result)
    return result


def fork(index: int, held: tuple) -> int:
    """The handle of the side stream of a device, which waits for the launches on the current stream. held: tensors that
    launches there read and write."""
    side = _side(index)
    side.hold(held)
    side.follow()
    return side.stream.cuda_stream


def join() -> None:
    """Lets the current streams wait for their side streams, at the end of each program. Products that a failed program
    has left are waited for by the next one on its stream."""
    for (index, handle), side in _SIDES.found.items():
        # another stream's program is under way, this one runs in the middle of it
        if compat.current_stream(index) == handle:
            if index == compat.current_device():
                side.join()
            else:
                with torch.cuda.device(index):
                    side.join()


def forget(index: int) -> None:
    """Drops the pending products of a device's current stream: they belong to a recording that failed, and never
    run."""
    _SIDES.found.pop((index, compat.current_stream(index)), None)
