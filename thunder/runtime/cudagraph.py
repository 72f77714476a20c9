"""CUDA graphs when a program runs: regions, their recordings, and the memory that these share.

Which order of streams holds, and by what:

- A replay, the copies to where it looks for arguments, and the copies of its results are on the caller's stream, one
  after another.
- It comes behind replays on other streams that use the same memory, and, as long as somebody has results of these,
  behind whatever is launched on their streams
  (`Memory.on_this_stream`). PyTorch's autograd runs a backward on its forward's stream. So what reads a result on the
  stream that it was made on has read it, as in eager PyTorch, where memory is given away in the order of its stream.
- Graphs that draw random numbers come one after another on a device, whatever their memory and streams
  (`Memory.launch_drawing`).
- What arguments are copied to is freed when the streams of its replays have reached that point (`record_stream`);
  memory of the pool goes to recordings only, which wait for the
  device first, one thread at a time.
- What reads a result on another stream than the one it was made on has to be waited for before the result is let go
  of: nobody tells that a tensor's `record_stream` was called.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.core.symbol import OpTags
from thunder.core.trace import Trace
from thunder.core.utils import without_collection
from thunder.errors import warn_user
from thunder.extend.saved import SavedTogether
from thunder.runtime import streams

__all__ = ["GraphedRegion", "Memory", "Recording", "Results"]

RECORDINGS = 8  # of one region: for other addresses of parameters, and other strides


class Refused(Exception):
    """What cannot be replayed, in words."""


class Memory:
    """The memory that recordings on one device share, and who may overwrite what.

    Results of a recording stay allocated. What it needs besides may be results of those that were recorded later: a
    replay overwrites its own results and theirs.
    """

    def __init__(self, device: torch.device):
        self.device, self.lock = device, threading.RLock()
        self.recordings: list[Recording] = []
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.streams: dict[int, torch.cuda.Stream] = {}  # that have to be waited for, by their handles

    def record(self, run: Callable[..., list], inputs: Sequence[torch.Tensor]) -> tuple[Callable[[], None], list]:
        """Records what `run(*inputs)` launches: a function that launches it, and the results, which nobody has computed
        yet."""
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        streams.join()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        # nothing may be freed while a graph is recorded
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), without_collection():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                outputs = run(*inputs)
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                streams.forget(self.index)
                self._recover()
                raise
        caller.wait_stream(self.stream)  # where PyTorch writes, before it records, that random numbers begin at 0
        _DRAWN[self.index] = caller
        return graph.replay, outputs

    def _recover(self) -> None:
        """A recording that failed leaves the generator thinking that it is recorded. With another state it is another
        one for earlier recordings."""
        generator = torch.cuda.default_generators[self.index]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())
        for recording in [r for r in _RECORDINGS if r.draws and r.memory.index == self.index]:
            region = recording.region()
            if region is not None:
                region.recordings[:] = [r for r in region.recordings if r is not recording]

    def launch_drawing(self, launch: Callable[[], None]) -> None:
        """Launches a graph that draws random numbers. Where they begin is in one place for all graphs of a device,
        which is written to at each launch."""
        with _ONE_AT_A_TIME:
            last = _DRAWN.get(self.index)
            if last is None or last.cuda_stream != compat.current_stream(self.index):
                stream = _DRAWN[self.index] = torch.cuda.current_stream(self.index)
                if last is not None:
                    stream.wait_stream(last)
            launch()

    def may_run(self) -> bool:
        """Whether graphs may be recorded and replayed now: not while somebody else records."""
        return not torch.cuda.is_current_stream_capturing()

    def on_this_stream(self) -> int:
        """Orders what comes behind replays on other streams, and behind what reads their results there. The current
        stream's handle."""
        handle = compat.current_stream(self.index)
        if handle not in self.streams or len(self.streams) > 1:
            self._join(handle, torch.cuda.current_stream(self.index))
        return handle

    def _join(self, handle: int, stream: torch.cuda.Stream) -> None:
        """Where somebody has results of a stream, what he launches there later is to be waited for as well."""
        read = {r.stream for r in self.recordings if r.handed_out}
        for number, other in list(self.streams.items()):
            if number != handle:
                stream.wait_stream(other)
                if number not in read:
                    del self.streams[number]
        self.streams[handle] = stream
        for r in self.recordings:
            for buffer in r.buffers:
                buffer.record_stream(stream)  # it may be freed while a replay on this stream is under way

    def in_use(self, first: Recording) -> Recording | None:
        """A recording whose results a replay of `first` would overwrite while somebody has them."""
        return next((r for r in self.recordings[first.number :] if r.handed_out and r.in_use()), None)

    def add(self, recording: Recording) -> None:
        """One more, in the place of those that nobody can replay or read any more."""
        self.recordings[:] = [r for r in self.recordings if r.is_wanted() or r.in_use()] + [recording]
        for number, r in enumerate(self.recordings):
            r.number = number


def _is_result(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what some recording gave."""
    data = tensor.untyped_storage()._cdata
    return any(data in r.watched for r in _RECORDINGS)


class Results(SavedTogether):
    """What a region has made for graphs of a backward, in one piece: as long as it is there, nobody writes over it.

    recording: the one that it was replayed by; None where its operations ran, for which the tensors are here.
    """

    __slots__ = ("recording", "_tensors")

    def __init__(self, recording: Recording | None, tensors: list[torch.Tensor]):
        self.recording, self._tensors = recording, tensors
        if recording is not None:
            recording.left = weakref.ref(self)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.recording is None:
            return iter(self._tensors)
        self.recording.opened = True
        return iter([t.detach() for t in self._tensors])

    def joining(self) -> Callable[[Sequence[torch.Tensor]], Results]:
        return functools.partial(_joined, weakref.ref(self.recording) if self.recording is not None else lambda: None)


def _joined(reference: Callable[[], Recording | None], tensors: Sequence[torch.Tensor]) -> Results:
    """Tensors in one piece again: that of a recording if they are where it left them."""
    recording = reference()
    if recording is not None and [*map(torch.Tensor.data_ptr, tensors)] == [
        *map(torch.Tensor.data_ptr, recording.kept)
    ]:
        return Results(recording, recording.kept)
    return Results(None, list(tensors))


class GraphedRegion:
    """A region of a program: called with its inputs, it returns the list of its outputs.

    trace: the operations. fixed: places of inputs whose addresses stay as a rule. expected: of inputs that other graphs
    make. returned: which outputs of the trace leave the program and are copied out. shown: places of those that are
    outputs of the call; kept: of those that its last output gathers, as `Results`. read: for each `Results` among the
    inputs, which come last, the places in it of what the trace reads.
    """

    def __init__(
        self, name: str, trace: Trace, memory: Memory, *, fixed: Sequence[int], expected: Sequence[int],
            returned: Sequence[bool], shown: Sequence[int],
        kept: Sequence[int], read: Sequence[Sequence[int]],
    ):  # fmt: skip
        self.name, self.trace, self.run, self.memory = name, trace, trace.python_callable(), memory
        self.fixed, self.expected, self.returned = list(fixed), list(expected), list(returned)
        self.shown, self.kept, self.read = list(shown), list(kept), list(read)
        self.tensors = len(trace.args) - sum(map(len, read))  # how many inputs are tensors
        self.draws = any(OpTags.RANDOM_OP in operation.sym.tags for operation in trace.bound_symbols)
        self.recordings: list[Recording] = []
        self.seen: dict[tuple, list[int]] = {}  # strides and setting -> addresses of the inputs
        # whether arguments are copied, and not read where they are: another recording would need room for its results
        self.moves = not all(returned)
        self.off: str | None = None  # why it is not recorded any more
        self.warned = False

    def __call__(self, *inputs: Any) -> list:
        tensors, given = (inputs[: self.tensors], inputs[self.tensors :]) if self.read else (inputs, ())
        if self.off is not None or not self.memory.may_run():
            return self._by_lines(tensors, given)
        with self.memory.lock:
            strides = [*map(torch.Tensor.stride, tensors)]
            setting = [*compat.kernel_flags(), *map(torch.Tensor.data_ptr, map(tensors.__getitem__, self.fixed))]
            sources = [results.recording for results in given]
            recording = (
                None
                if None in sources
                else next(
                    (r for r in self.recordings if r.strides == strides and r.setting == setting and r.reads(sources)),
                    None,
                )
            )
            if recording is not None and not recording.finds(tensors):
                self.moves = True
                self.recordings.remove(recording)
                recording = None
            if recording is None:
                with _ONE_AT_A_TIME:
                    recording = self._record(strides, setting, tensors, given)
            if recording is not None and recording.fits(tensors):
                if (other := self.memory.in_use(recording)) is None:
                    return recording.replay(tensors, given)
                self._warn(
                    f"ran without its CUDA graph, since results that {other.name} gave to an earlier call are still "
                    "in use and the graph would overwrite them. "
                    "Gradients are let go of by optimizer.zero_grad(set_to_none=True), what is saved for a backward "
                    "by running it"
                )
        return self._by_lines(tensors, given)

    def all_tensors(self, tensors: Sequence[torch.Tensor], given: Sequence[Results]) -> list[torch.Tensor]:
        """The inputs of the trace."""
        found = list(tensors)
        for results, places in zip(given, self.read, strict=True):
            opened = list(results)
            found += [opened[i] for i in places]
        return found

    def _by_lines(self, tensors: Sequence[torch.Tensor], given: Sequence[Results]) -> list:
        values = self.run(*self.all_tensors(tensors, given))
        return (
            [*(values[i] for i in self.shown), Results(None, [values[i] for i in self.kept])] if self.kept else values
        )

    def _record(
        self, strides: list, setting: list, tensors: Sequence[torch.Tensor], given: Sequence[Results]
    ) -> Recording | None:
        """A recording for inputs like these, if they come in like this for the second time: what runs first may
        compile, or choose kernels."""
        key = (*strides, *setting)
        addresses = [t.data_ptr() for t in tensors]
        if key not in self.seen:
            self.seen[key] = addresses
            if len(self.seen) > 4 * RECORDINGS:
                self.stop(f"its parameters, or what it writes to, were at {len(self.seen)} places in memory")
            return None
        if any(results.recording is None for results in given) or not all(
            _is_result(tensors[i]) for i in self.expected
        ):
            return None
        self.recordings[:] = [r for r in self.recordings if r.can_be_replayed()]
        if len(self.recordings) == RECORDINGS:
            self._warn(
                f"runs without a CUDA graph for inputs like these: it was recorded for {RECORDINGS} other strides, "
                "or addresses of parameters"
            )
            return None
        try:
            stay = (
                []
                if self.moves
                else [i for i, (a, b) in enumerate(zip(addresses, self.seen[key], strict=True)) if a == b]
            )
            recording = Recording(self, strides, setting, tensors, stay, given)
        except Refused as reason:
            return self.stop(str(reason))
        except RuntimeError as error:
            return self.stop(
                f"while it was recorded, PyTorch raised {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}"
            )
        self.recordings.append(recording)
        return recording

    def stop(self, reason: str) -> None:
        self.off = reason
        self.recordings.clear()
        self._warn(f"runs without a CUDA graph: {reason}")

    def _warn(self, text: str) -> None:
        if not self.warned:
            self.warned = True
            warn_user(f"{self.name} {text}", UserWarning)


class Recording:
    """What a region launches for inputs of these strides, and where it leaves its results. setting: PyTorch's flags,
    and the addresses of fixed inputs. stay: places of inputs that are read where they are. given: results of other
    recordings, of which it reads."""

    def __init__(
        self,
        region: GraphedRegion,
        strides: list,
        setting: list,
        tensors: Sequence[torch.Tensor],
        stay: Sequence[int],
        given: Sequence[Results],
    ):
        self.name, self.region, self.memory = region.name, weakref.ref(region), region.memory
        self.strides, self.setting, self.number = strides, setting, 0
        self.sources = [weakref.ref(results.recording) for results in given]
        self.draws, self.stream = region.draws, 0  # the stream of the last replay, by its handle
        others = [i for i in range(len(tensors)) if i not in region.fixed]
        self.pooled = [i for i in others if _is_result(tensors[i])]
        self.pooled_addresses = [tensors[i].data_ptr() for i in self.pooled]
        self.stay = [i for i in others if i in stay and i not in self.pooled]
        self.stay_addresses = [tensors[i].data_ptr() for i in self.stay]
        copied = [i for i in others if i not in self.pooled and i not in self.stay]
        inputs = region.all_tensors(tensors, given)
        # place, and the part to copy where elements lie upon each other
        self.copied: list[tuple[int, tuple | None]] = []
        self.buffers = []
        for i in copied:
            buffer, part = _buffer_for(tensors[i])
            self.buffers.append(buffer)
            self.copied.append((i, part))
            inputs[i] = buffer if part is None else buffer.expand(tensors[i].shape)
        before = _versions(inputs)
        self.launch, outputs = self.memory.record(region.run, inputs)
        self.counted = [
            i for i, (version, now) in enumerate(zip(before, _versions(inputs), strict=True)) if version != now
        ]
        if not set(self.counted).isdisjoint(copied):
            raise Refused("it writes to a tensor that it was not known to write to")
        self._take(outputs, inputs, region)
        self.shows_given = any(i >= len(tensors) for i in (*self.counted, *self.shown_from))
        del outputs, inputs
        self.handed_out = self.opened = False
        self.left: Callable[[], Results | None] = lambda: None  # what the last replay left, as long as somebody has it
        self.unused = [self._uses(opened) for opened in (False, True)]
        self.memory.add(self)
        _RECORDINGS.add(self)

    def _take(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], region: GraphedRegion) -> None:
        """Sorts the outputs: watched where they are, copied out, or shown in the memory of an input."""
        self.results: list[torch.Tensor | None] = [None] * len(outputs)
        self.made: list[tuple[Sequence[int], Callable[[Sequence], Sequence]]] = []
        self.shown_from: list[int] = []
        sources = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(inputs)))}
        groups: dict[int, list[int]] = {}
        for place, o in enumerate(outputs):
            if o.is_conj() or o.is_neg():
                raise Refused("a result is the conjugate, or the negative, of what is in its memory")
            groups.setdefault(o.untyped_storage()._cdata, []).append(place)
        self.watched: dict[int, Any] = {}
        for data, places in groups.items():
            members = [outputs[i] for i in places]
            if data in sources:
                self.shown_from.append(sources[data])
                self.made.append((places, _shown(members, sources[data], inputs)))
            elif any(region.returned[i] for i in places):
                self.made.append((places, _copied(members)))
            else:
                for i, o in zip(places, members, strict=True):
                    self.results[i] = o
                self.watched[data] = members[0].untyped_storage()
        self.kept = [o for i in region.kept if (o := self.results[i]) is not None]
        if len(self.kept) < len(region.kept):
            raise Refused("what it leaves for a backward is in memory that others may write to")
        shown = [o for i in region.shown if (o := self.results[i]) is not None]
        # as tensors
        self.handed = {data: self.watched[data] for o in shown if (data := o.untyped_storage()._cdata) in self.watched}
        self.shown = region.shown

    def _uses(self, opened: bool) -> list[int]:
        """How often the storage of each watched result is held, by tensors and by Python: of those that are handed out
        as tensors, or of all."""
        watched = self.watched if opened else self.handed
        return [*map(compat.storage_uses, watched), *map(sys.getrefcount, watched.values())]

    def in_use(self) -> bool:
        """Whether somebody has a result of an earlier replay."""
        opened = self.opened
        if self.handed_out and self.left() is None and self._uses(opened) == self.unused[opened]:
            # another thread may have put tensors together, or apart, while they were counted
            if self.left() is None and self.opened is opened:
                self.handed_out = self.opened = False
        return self.handed_out

    def is_wanted(self) -> bool:
        region = self.region()
        return region is not None and any(r is self for r in region.recordings)

    def reads(self, sources: Sequence[Recording]) -> bool:
        """Whether these left what it reads."""
        return [source() for source in self.sources] == sources

    def can_be_replayed(self) -> bool:
        """Whether somebody may still leave what it reads."""
        return all((source := reference()) is not None and source.is_wanted() for reference in self.sources)

    def finds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what is read where it is is there."""
        return [tensors[i].data_ptr() for i in self.stay] == self.stay_addresses

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what other graphs give is where this one looks for it; it is not where one of them did not run as a
        graph."""
        return [tensors[i].data_ptr() for i in self.pooled] == self.pooled_addresses

    def replay(self, tensors: Sequence[torch.Tensor], given: Sequence[Results]) -> list:
        self.stream = self.memory.on_this_stream()
        if self.buffers:
            found = [tensors[i] if part is None else tensors[i].as_strided(*part) for i, part in self.copied]
            if len(found) == 1:  # the host takes less time
                self.buffers[0].copy_(found[0])
            else:
                compat.foreach_copy(self.buffers, found)
        if self.draws:
            self.memory.launch_drawing(self.launch)
        else:
            self.launch()
        if self.shows_given and (region := self.region()) is not None:
            tensors = region.all_tensors(tensors, given)
        if self.counted:
            torch.autograd.graph.increment_version([tensors[i] for i in self.counted])
        made = {i: value for places, make in self.made for i, value in zip(places, make(tensors), strict=True)}
        values: list = [made[i] if (r := self.results[i]) is None else r.detach() for i in self.shown]
        self.handed_out = bool(self.watched)
        if self.kept:
            values.append(Results(self, self.kept))
        return values


_RECORDINGS: weakref.WeakSet[Recording] = weakref.WeakSet()
# by device, the stream where its graphs were told last where random numbers begin
_DRAWN: dict[int, torch.cuda.Stream] = {}
# what one thread does before it records would end what another one records, and change where its random numbers begin
_ONE_AT_A_TIME = threading.RLock()


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written to; tensors of inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in tensors]


def _buffer_for(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple | None]:
    """Memory for what an input holds, and (shape, strides) of the part that is copied where it is not all of it:
    expanded dimensions are stored once."""
    shape = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    buffer = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    reached = 1
    for step, n in sorted((s, n) for s, n in zip(tensor.stride(), shape, strict=True) if n != 1):
        if step < reached:
            raise Refused("elements of an argument lie upon each other in memory")
        reached = step * (n - 1) + reached
    return buffer, None if shape == list(tensor.shape) else (shape, tensor.stride())


def _shown(members: Sequence[torch.Tensor], source: int, inputs: Sequence[torch.Tensor]) -> Callable[[Sequence], list]:
    """What shows outputs in the memory of the input that they share it with: as views of it, or detached from it where
    they are."""
    shown = inputs[source]
    if any(o.dtype != shown.dtype for o in members):
        raise Refused("a result shows an argument as another type")

    def is_view(o):
        return o._base is not None and (o._base is shown or o._base is shown._base)

    parts = [
        None if o is shown else (o.shape, o.stride(), o.storage_offset() - shown.storage_offset(), is_view(o))
        for o in members
    ]

    def show(tensor, part):
        if part is None:
            return tensor
        shape, strides, offset, related = part
        return (tensor if related else tensor.detach()).as_strided(shape, strides, tensor.storage_offset() + offset)

    return lambda tensors: [show(tensors[source], p) for p in parts]


def _copied(members: Sequence[torch.Tensor]) -> Callable[[Sequence], list]:
    """What copies outputs that share memory, which the copies share as well."""
    first = members[0]
    if len(members) == 1 and torch.ops.aten.is_non_overlapping_and_dense(first):
        return lambda tensors: [first.clone()]
    if any(o.dtype != first.dtype for o in members):
        raise Refused("two results show the same memory as two types")
    flat = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    parts = [(o.shape, o.stride(), o.storage_offset()) for o in members]

    def copied(tensors):
        new = flat.clone()
        return [new.as_strided(*p) for p in parts]

    return copied
