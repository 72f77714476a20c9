"""A recording of a region as a CUDA graph, and the results that a replay leaves for other graphs."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.runtime.cudagraphs.memory import LIVE, is_result
from thunder.runtime.saved import SavedTogether

_NUMBERS = itertools.count()


class Refused(Exception):
    """Raised where a region cannot be replayed, with the reason in words."""


class Results(SavedTogether):
    """The results of a region for graphs of a backward, as one object. No replay overwrites them while it exists.

    recording: the recording that was replayed; None where the operations of the region ran one by one, whose tensors
    this object then holds.
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
    """Tensors as one object again: results of a recording if their addresses are those of its results."""
    recording = reference()
    if recording is not None and [*map(torch.Tensor.data_ptr, tensors)] == [
        *map(torch.Tensor.data_ptr, recording.held)
    ]:
        return Results(recording, recording.held)
    return Results(None, list(tensors))


class Recording:
    """The recorded launches of a region for inputs of these strides, and the addresses of its results. region: a
    `GraphedRegion`. setting: the flags of PyTorch and the addresses of fixed inputs. stay: places of other inputs that
    are not copied.

    number: later recordings have higher ones. call: the numbers of the recordings of the last call that replayed this
    one. Results are tensors that keep no memory allocated: owners do, by storage of the results. released_by: the
    numbers of the recordings that gave memory of results away, released_at: the first one.
    """

    def __init__(
        self,
        region: Any,
        strides: list,
        setting: list,
        tensors: Sequence[torch.Tensor],
        stay: Sequence[int],
        collections: Sequence[Results],
    ):
        self.name, self.region, self.memory = region.name, weakref.ref(region), region.memory
        self.strides, self.setting, self.number = strides, setting, next(_NUMBERS)
        self.call, self.released_at, self.released_by = frozenset[int](), math.inf, set[int]()
        self.owners: dict[int, list[torch.Tensor]] = {}
        self.sources = [weakref.ref(results.recording) for results in collections]
        self.draws, self.stream = region.draws, 0  # the stream of the last replay, by its handle
        others = region.others
        self.pooled = [i for i in others if is_result(tensors[i])]
        self.pooled_addresses = [tensors[i].data_ptr() for i in self.pooled]
        read = [(i, r) for i in self.pooled for r in self.memory.recordings_of([tensors[i]])]
        self.pooled_from = {r.number: (i, weakref.ref(r)) for i, r in read}  # an input for each recording
        self.stay = [i for i in others if i in stay and i not in self.pooled]
        self.stay_addresses = [tensors[i].data_ptr() for i in self.stay]
        copied = [i for i in others if i not in self.pooled and i not in self.stay]
        inputs = region.all_tensors(tensors, collections)
        self._make_buffers(tensors, copied, inputs)
        self.buffers_by_type = _by_type(self.buffers)
        before = [_version(t) for t in inputs]
        operands = [*inputs]
        for i in region.released:
            if (owner := self._released(inputs[i])) is not None:
                operands[i], inputs[i] = owner, None  # type: ignore[call-overload]
            del owner
        self.launch, outputs = self.memory.record(region.run, operands)
        self.counted = [i for i, t in enumerate(inputs) if t is not None and _version(t) != before[i]]
        if not set(self.counted).isdisjoint(copied):
            raise Refused("it writes to a tensor that it was not known to write to")
        self._take(outputs, inputs, region)
        self.whole_by_type = _by_type([o for _, o in self.whole])
        self.shows_given = any(i >= len(tensors) for i in (*self.counted, *self.shown_from))
        del outputs, inputs
        self.handed_out = self.opened = False
        self.left: Callable[[], Results | None] = lambda: None  # a weak reference to the `Results` of the last replay
        self.unused = [self._uses(opened) for opened in (False, True)]
        self.memory.add(self)
        LIVE.add(self)

    def _make_buffers(self, tensors: Sequence[torch.Tensor], copied: Sequence[int], inputs: list[torch.Tensor]) -> None:
        """Makes the buffers that inputs in some places are copied to, and puts these in the place of the inputs."""
        # the place of an input, and the part to copy where it has expanded dimensions
        self.copied: list[tuple[int, tuple | None]] = []
        self.buffers: list[torch.Tensor] = []
        for i in copied:
            buffer, part = _buffer_for(tensors[i], beyond(tensors[i].data_ptr(), self.memory.gpu.alignment))
            self.buffers.append(buffer)
            self.copied.append((i, part))
            inputs[i] = buffer if part is None else buffer.expand(tensors[i].shape)

    def _released(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The owner of the memory of a result that this recording reads last; None where it has none."""
        for r in self.memory.recordings_of([tensor]):
            owners = r.owners.get(tensor.untyped_storage()._cdata, [])
            for i, o in enumerate(owners):
                if _layout(o) == _layout(tensor):
                    r.released_at = min(r.released_at, self.number)
                    r.released_by.add(self.number)
                    return owners.pop(i)
        return None

    def _take(self, outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor | None], region: Any) -> None:
        """Sorts the outputs into watched ones, copied ones, and views of inputs. inputs: None for released ones. Memory
        of copied outputs may be given away: each replay copies them at once."""
        self.results: list[torch.Tensor | None] = [None] * len(outputs)
        self.on_host: list[tuple[Sequence[int], Callable[[Sequence], Sequence]]] = []
        self.shown_from: list[int] = []
        self.whole: list[tuple[int, torch.Tensor]] = []  # results that are copied, and share memory with no other
        known = [(i, t) for i, t in enumerate(inputs) if t is not None]
        sources = {t.untyped_storage()._cdata: (i, t) for i, t in reversed(known)}
        groups: dict[int, list[int]] = {}
        for index, o in enumerate(outputs):
            if o.is_conj() or o.is_neg():
                raise Refused("a result is the conjugate, or the negative, of what is in its memory")
            groups.setdefault(o.untyped_storage()._cdata, []).append(index)
        self.watched: dict[int, Any] = {}
        for data, places in groups.items():
            members = [outputs[i] for i in places]
            if data in sources:
                source, shown = sources[data]
                self.shown_from.append(source)
                self.on_host.append((places, _shown(members, shown, source)))
                continue
            owners, members = members, self.memory.gpu.without_owner(members, self.launch)
            if any(region.returned[i] for i in places):
                if len(members) == 1 and torch.ops.aten.is_non_overlapping_and_dense(members[0]):
                    self.whole.append((places[0], members[0]))
                    continue
                self.on_host.append((places, _copied(members)))
            else:
                for i, o in zip(places, members, strict=True):
                    self.results[i] = o
                storage = members[0].untyped_storage()
                self.watched[storage._cdata], self.owners[storage._cdata] = storage, owners
        self.held = [o for i in region.held if (o := self.results[i]) is not None]
        if len(self.held) < len(region.held):
            raise Refused("what it leaves for a backward is in memory that others may write to")
        shown = [o for i in region.shown if (o := self.results[i]) is not None]
        # as tensors
        self.handed = {data: self.watched[data] for o in shown if (data := o.untyped_storage()._cdata) in self.watched}
        self.shown = region.shown

    def _uses(self, opened: bool) -> list[int]:
        """The reference counts of the storages of watched results, by tensors and by Python. opened: of all of them,
        otherwise of those that were handed out as tensors."""
        watched = self.watched if opened else self.handed
        return [*map(compat.storage_uses, watched), *map(sys.getrefcount, watched.values())]

    def in_use(self) -> bool:
        """Whether a result of an earlier replay is still referenced."""
        opened = self.opened
        if self.handed_out and self.left() is None and self._uses(opened) == self.unused[opened]:
            # another thread may have gathered or opened results while they were counted
            if self.left() is None and self.opened is opened:
                self.handed_out = self.opened = False
        return self.handed_out

    def is_wanted(self) -> bool:
        region = self.region()
        return region is not None and any(r is self for r in region.recordings)

    def reads(self, sources: Sequence[Recording | None]) -> bool:
        """Whether these recordings have written the results that this one reads."""
        return [source() for source in self.sources] == sources

    def can_be_replayed(self) -> bool:
        """Whether the recordings whose results it reads can still be replayed."""
        references = *self.sources, *(reference for _, reference in self.pooled_from.values())
        return all((source := reference()) is not None and source.is_wanted() for reference in references)

    def finds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the inputs that are not copied have the recorded addresses."""
        return [tensors[i].data_ptr() for i in self.stay] == self.stay_addresses

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the results of other graphs have the recorded addresses; they do not where one of those did not run
        as a graph, or was recorded again."""
        return [tensors[i].data_ptr() for i in self.pooled] == self.pooled_addresses and all(
            (r := reference()) is not None and tensors[i].untyped_storage()._cdata in r.watched
            for i, reference in self.pooled_from.values()
        )

    def read_from(self) -> list[Recording]:
        """The recordings whose results are among its inputs."""
        return [r for _, reference in self.pooled_from.values() if (r := reference()) is not None]

    def replay(self, tensors: Sequence[torch.Tensor], collections: Sequence[Results], call: frozenset[int]) -> list:
        """The results of a recorded region: arguments are copied to its buffers, and the graph is launched."""
        self.call = call
        self.stream = self.memory.on_this_stream()
        if self.buffers:
            sources = [tensors[i] if part is None else tensors[i].as_strided(*part) for i, part in self.copied]
            _copy(self.buffers, sources, self.buffers_by_type)
        if self.draws:
            self.memory.launch_drawing(self.launch)
        else:
            self.launch()
        if self.shows_given and (region := self.region()) is not None:
            tensors = region.all_tensors(tensors, collections)
        if self.counted:
            torch.autograd.graph.increment_version([tensors[i] for i in self.counted])
        by_index = {i: value for places, make in self.on_host for i, value in zip(places, make(tensors), strict=True)}
        if self.whole:
            by_index |= self._copies()
        values: list = [by_index[i] if (r := self.results[i]) is None else r.detach() for i in self.shown]
        self.handed_out = bool(self.watched)
        if self.held:
            values.append(Results(self, self.held))
        return values

    def _copies(self) -> dict[int, torch.Tensor]:
        """Copies of results in memory of their own, by place."""
        copies = [torch.empty_like(o) for _, o in self.whole]
        _copy(copies, [o for _, o in self.whole], self.whole_by_type)
        return dict(zip((index for index, _ in self.whole), copies, strict=True))


def beyond(address: int, alignment: int) -> int:
    """The bytes by which an address is beyond an aligned one. Kernels are chosen by the largest power of two that
    divides it, and add up numbers from the next multiple of 16 on: other addresses count as the same."""
    return address % 16 or (address & -address) % alignment


def _by_type(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of the tensors of each type."""
    places: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        places.setdefault(t.dtype, []).append(i)
    return list(places.values())


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], by_type: Sequence[Sequence[int]]) -> None:
    """Copies tensors into others of the same types and strides. PyTorch launches one kernel for all that have one type,
    and one for each tensor where types differ."""
    for places in by_type:
        if len(places) == 1:  # the host takes less time
            targets[places[0]].copy_(sources[places[0]])
        else:
            compat.foreach_copy([targets[i] for i in places], [sources[i] for i in places])


def _version(tensor: torch.Tensor) -> int:
    """The version counter of a tensor; 0 for one of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def _layout(tensor: torch.Tensor) -> tuple:
    """The part of a storage that a tensor shows."""
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _buffer_for(tensor: torch.Tensor, offset: int) -> tuple[torch.Tensor, tuple | None]:
    """A buffer for an input, in which expanded dimensions have size 1, and (shape, strides) of the part of the input to
    copy; None for all of it. offset: the bytes by which its address is beyond an aligned one."""
    shape = [1 if step == 0 else n for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
    offset //= tensor.element_size()
    reached = offset + sum((n - 1) * step for n, step in zip(shape, tensor.stride(), strict=True)) + 1
    memory = torch.empty(reached if tensor.numel() else 0, dtype=tensor.dtype, device=tensor.device)
    buffer = memory.as_strided(shape, tensor.stride(), offset)
    reached = 1
    for step, n in sorted((s, n) for s, n in zip(tensor.stride(), shape, strict=True) if n != 1):
        if step < reached:
            raise Refused("elements of an argument lie upon each other in memory")
        reached = step * (n - 1) + reached
    return buffer, None if shape == list(tensor.shape) else (shape, tensor.stride())


def _shown(members: Sequence[torch.Tensor], shown: torch.Tensor, source: int) -> Callable[[Sequence], list]:
    """A function from the inputs to outputs that share memory with one of them, which is at the place `source`: views
    of it, or detached from it as the recorded ones."""
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
    """A function that copies outputs which share memory; so do the copies."""
    first = members[0]
    if any(o.dtype != first.dtype for o in members):
        raise Refused("two results show the same memory as two types")
    flat = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    parts = [(o.shape, o.stride(), o.storage_offset()) for o in members]

    def copied(tensors):
        new = flat.clone()
        return [new.as_strided(*p) for p in parts]

    return copied
