"""The memory that CUDA graphs share, and the order of streams.

- A replay, the copies of its arguments and the copies of its results are launched on the stream of the caller, one
  after another.
- A replay waits for replays on other streams that use the same memory. While somebody holds results of those, it waits
  for later launches on their streams too (`Memory.on_this_stream`). PyTorch's autograd runs a backward on the stream of
  its forward. So a consumer on the stream of a result has run before the memory is written again, as in eager PyTorch,
  which reuses memory in the order of its stream.
- Graphs that draw random numbers run one after another on a device, whatever their memory and streams
  (`Memory.launch_drawing`).
- The buffers of copied arguments are freed when the streams of all replays have reached that point (`record_stream`).
  Memory of the pool is reused by recordings only. A recording waits for the device first, one thread at a time.
- A consumer on another stream than that of a result has to be waited for before the result is released: nobody
  tells this module that `record_stream` of a tensor was called.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from thunder.core.utils import without_collection
from thunder.runtime.cudagraphs.device import GPU

LIVE: weakref.WeakSet[Any] = weakref.WeakSet()  # each `Recording`
# by device, the stream on which a graph was last told where random numbers begin
_DRAWN: dict[int, Any] = {}
# a synchronization before one recording would end that of another thread, and move the start of its random numbers
ONE_AT_A_TIME = threading.RLock()


class Memory:
    """The memory that recordings on one device share.

    Results that others read stay allocated until a recording releases them at their last use. Temporaries of a
    recording may be in the memory of the results of later recordings, and in released memory. So a replay overwrites
    its own results, those of later recordings, and those that were released before it was recorded.
    """

    def __init__(self, gpu: GPU):
        self.gpu, self.lock = gpu, threading.RLock()
        self.recordings: list[Any] = []  # each a `Recording`
        self.pool, self.stream = gpu.pool(), gpu.new_stream()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # those of the pool
        self.streams: dict[int, Any] = {}  # streams to wait for, by their handles

    def record(self, run: Callable[[list], list], inputs: list[torch.Tensor]) -> tuple[Callable[[], None], list]:
        """Records the launches of `run(inputs)`, which empties the list. Returns a function that replays them, and the
        results, which are not computed yet."""
        gpu = self.gpu
        graph, caller = gpu.graph(), gpu.stream()
        gpu.settle()
        if not self._graphs:  # PyTorch takes no pool again whose graphs are gone while results in it live
            self.pool = gpu.pool()
        # nothing may be freed while a graph is recorded
        with gpu.on(self.stream), without_collection():
            try:
                # where it fails, the generator may already be in the state of a recording
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                outputs = run(inputs)
                graph.capture_end()
                self._graphs.add(graph)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                self._recover()
                raise
        caller.wait_stream(self.stream)  # on which PyTorch has reset the offset of random numbers before the recording
        _DRAWN[gpu.index] = caller
        return graph.replay, outputs

    def _recover(self) -> None:
        """Resets the generator after a recording that failed, which leaves it in the state of a recording. Earlier
        recordings refer to the old state, so those that draw random numbers are dropped."""
        self.gpu.renew_generator()
        for recording in [r for r in LIVE if r.draws and r.memory.gpu.index == self.gpu.index]:
            region = recording.region()
            if region is not None:
                region.recordings[:] = [r for r in region.recordings if r is not recording]

    def launch_drawing(self, launch: Callable[[], None]) -> None:
        """Launches a graph that draws random numbers. All graphs of a device read the offset from one place in memory,
        which each launch writes to."""
        with ONE_AT_A_TIME:
            last = _DRAWN.get(self.gpu.index)
            if last is None or last.cuda_stream != self.gpu.handle():
                stream = _DRAWN[self.gpu.index] = self.gpu.stream()
                if last is not None:
                    stream.wait_stream(last)
            launch()

    def may_run(self) -> bool:
        """Whether graphs may be recorded and replayed now: not while the user records a graph."""
        return not self.gpu.is_recording()

    def on_this_stream(self) -> int:
        """Lets the current stream wait for replays on other streams, and for consumers of their results there. Returns
        the handle of the current stream."""
        handle = self.gpu.handle()
        if handle not in self.streams or len(self.streams) > 1:
            self._join(handle, self.gpu.stream())
        return handle

    def _join(self, handle: int, stream: Any) -> None:
        """Lets a stream wait for all others. A stream with results in use stays in `streams`: consumers that are
        launched there later have to be waited for too."""
        read = {r.stream for r in self.recordings if r.handed_out}
        for number, other in list(self.streams.items()):
            if number != handle:
                stream.wait_stream(other)
                if number not in read:
                    del self.streams[number]
        self.streams[handle] = stream
        for r in self.recordings:
            for buffer in r.buffers:
                self.gpu.read_on(stream, buffer)  # it may be freed while a replay on this stream is under way

    def in_use(self, first: Any, call: Set[int]) -> Any:
        """A recording with results in use that a replay of `first` would overwrite; None where there is none. call:
        numbers of the recordings that the running call of the program has replayed."""
        number = first.number
        for r in self.recordings:
            is_released = r.released_at <= number and r.number not in call
            if (r.number >= number or is_released) and r.handed_out and r.in_use():
                return r
        return None

    def drop_given_away(self, call: Set[int]) -> bool:
        """Drops recordings of the running call whose results later recordings may overwrite before the call has read
        them; returns whether there were any. Their regions are recorded again in a later call."""
        given_away = [r for r in self.recordings if r.number in call and not r.released_by <= call]
        for r in given_away:
            region = r.region()
            if region is not None:
                region.recordings[:] = [other for other in region.recordings if other is not r]
        return bool(given_away)

    def recordings_of(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The recordings that these tensors are results of."""
        storages = {t.untyped_storage()._cdata for t in tensors}
        return [r for r in self.recordings if not storages.isdisjoint(r.watched)]

    def add(self, recording: Any) -> None:
        """Adds a recording, and drops those that can neither be replayed nor read any more."""
        self.drop_unwanted()
        self.recordings.append(recording)

    def drop_unwanted(self) -> None:
        """Drops recordings that can neither be replayed nor read any more."""
        self.recordings[:] = [r for r in self.recordings if r.is_wanted() or r.in_use()]


def is_result(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a result of some recording."""
    data = tensor.untyped_storage()._cdata
    return any(data in r.watched for r in LIVE)
