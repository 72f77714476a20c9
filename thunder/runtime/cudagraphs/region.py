"""A region of a program that runs as a CUDA graph: its operations run at the first call with some strides, are recorded
at the second, and replayed from then on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from thunder import compat
from thunder.core.symbol import OpTags
from thunder.core.trace import Trace
from thunder.errors import warn_user
from thunder.runtime.cudagraphs.memory import ONE_AT_A_TIME, Memory, is_result
from thunder.runtime.cudagraphs.recording import Recording, Refused, Results, beyond

RECORDINGS = 8  # of one region, for several addresses of parameters and several strides
PAYS = 16  # replays of a recording on average, so that a new one may take the place of the one that is longest unused


class Watcher(Protocol):
    """Is told what happens to the graphs of a program."""

    def recorded(self, region: GraphedRegion) -> None:
        """A recording was made, and is kept where this does not raise `Refused`."""

    def skipped(self, region: GraphedRegion, reason: str) -> None:
        """A call ran the operations one by one."""

    def stopped(self, region: GraphedRegion, reason: str, error: RuntimeError | None) -> None:
        """No call of the region will be recorded any more. error: of PyTorch, while it was recorded."""


class Warns:
    """Warns the user, once for each region."""

    def __init__(self):
        self._warned: weakref.WeakSet[GraphedRegion] = weakref.WeakSet()

    def recorded(self, region: GraphedRegion) -> None:
        pass

    def skipped(self, region: GraphedRegion, reason: str) -> None:
        if region not in self._warned:
            self._warned.add(region)
            warn_user(f"{region.name} {reason}", UserWarning)

    def stopped(self, region: GraphedRegion, reason: str, error: RuntimeError | None) -> None:
        self.skipped(region, f"runs without a CUDA graph: {reason}")


class GraphedRegion:
    """A region of a program: a function from its inputs to the list of its outputs.

    trace: its operations; a function of the list of its inputs, which it empties. tensors: how many inputs are tensors.
    fixed: places of inputs whose addresses rarely change. expected: places of inputs that other graphs compute.
    returned: by output of the trace, whether it leaves the program, so that it is copied. shown: places of the outputs
    of the trace that the call returns. held: places of those that the last output of the call gathers as `Results`.
    read: for each `Results` among the inputs, which come last, the places of its tensors that the trace reads.
    released: places of the inputs of the trace that nothing reads behind this region, so that a recording may give
    their memory to other values. overwrites: whether recordings may give away what a forward has saved, which a graph
    that is kept reads again. watcher: is told where it does not run as a graph. before: the region that runs before it
    in its program.

    call: the recordings that the running call of the program has replayed, by number; empty where the operations of
    this region ran one by one.
    """

    def __init__(
        self, name: str, trace: Trace, memory: Memory, *, tensors: int, fixed: Sequence[int], expected: Sequence[int],
            returned: Sequence[bool], shown: Sequence[int], held: Sequence[int], read: Sequence[Sequence[int]],
        released: Sequence[int], overwrites: bool, watcher: Watcher, before: GraphedRegion | None,
    ):  # fmt: skip
        self.name, self.trace, self.run, self.memory = name, trace, trace.python_callable(), memory
        self.tensors, self.fixed, self.expected, self.returned = tensors, list(fixed), list(expected), list(returned)
        self.shown, self.held, self.read = list(shown), list(held), list(read)
        self.released, self.overwrites = list(released), overwrites
        is_fixed = set(fixed)
        self.others = [i for i in range(self.tensors) if i not in is_fixed]  # the alignment of these may change
        self.draws = any(OpTags.RANDOM_OP in operation.sym.tags for operation in trace.bound_symbols)
        self.recordings: list[Recording] = []  # in the order of their last replays
        self.recorded = self.replays = 0  # how many recordings were made, and replays
        self.seen: dict[tuple, list[int]] = {}  # strides and setting -> addresses of the inputs
        # whether all arguments are copied: a recording for other addresses would need memory for its results
        self.moves = not all(returned)
        self.off: str | None = None  # the reason against recording it any more
        self.watcher, self.before, self.call = watcher, before, frozenset[int]()

    def __call__(self, *inputs: Any) -> list:
        tensors, collections = (inputs[: self.tensors], inputs[self.tensors :]) if self.read else (inputs, ())
        self.call = frozenset()
        if self.off is not None or not self.memory.may_run():
            return self._run_operations(tensors, collections)
        if self.overwrites and compat.keeps_graph():
            self.watcher.skipped(self, "ran without its CUDA graph, since the graph of the backward is kept")
            return self._run_operations(tensors, collections)
        with self.memory.lock:
            recording, other, call = self._recording_of(tensors, collections)
            if recording is not None and other is None:
                self.replays += 1
                self.call = call | {recording.number}
                if recording is not self.recordings[-1]:
                    self.recordings.remove(recording)
                    self.recordings.append(recording)
                return recording.replay(tensors, collections, self.call)
            if other is not None:
                self.watcher.skipped(
                    self,
                    f"ran without its CUDA graph, since results that {other.name} gave to an earlier call are "
                    "still in use and the graph would overwrite them. "
                    "Gradients are let go of by optimizer.zero_grad(set_to_none=True), what is saved for a "
                    "backward by running it",
                )
        return self._run_operations(tensors, collections)

    def _recording_of(
        self, tensors: Sequence[torch.Tensor], collections: Sequence[Results]
    ) -> tuple[Recording | None, Recording | None, frozenset[int]]:
        """The recording for these inputs, which may be made now; one with results in use that it would overwrite; and
        the numbers of the recordings that this call has replayed."""
        strides = [*map(torch.Tensor.stride, tensors)]
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
        setting = [*compat.kernel_flags(), *map(addresses.__getitem__, self.fixed)]
        alignment = self.memory.gpu.alignment
        setting += [beyond(addresses[i], alignment) for i in self.others]
        sources = [results.recording for results in collections]
        alike = (r for r in self.recordings if r.strides == strides and r.setting == setting)
        recording = next((r for r in alike if None not in sources and r.reads(sources) and r.fits(tensors)), None)
        if recording is not None and not recording.finds(tensors):
            self.moves = True
            self.recordings.remove(recording)
            recording = None
        call = self._replayed(sources, tensors, recording)
        other = None if recording is None else self.memory.in_use(recording, call)
        if recording is not None and other is not None and other.number in call:
            # a region before this one was recorded again: a later recording leaves its results alone
            self.recordings.remove(recording)
            recording = None
        if recording is None:
            with ONE_AT_A_TIME:
                recording = self._record(strides, setting, tensors, collections, call)
            other = None if recording is None else self.memory.in_use(recording, call)
        return recording, other, call

    def _replayed(
        self, sources: Sequence[Recording | None], tensors: Sequence[torch.Tensor], recording: Recording | None
    ) -> frozenset[int]:
        """The recordings that this call of the program has replayed, by number: as the region before this one knows
        them, and those whose results this one reads."""
        read = {r for r in sources if r is not None}
        read.update(self.memory.recordings_of(tensors) if recording is None else recording.read_from())
        return frozenset[int]().union(*(r.call for r in read), self.before.call if self.before is not None else ())

    def all_tensors(self, tensors: Sequence[torch.Tensor], collections: Sequence[Results]) -> list[torch.Tensor]:
        """The inputs of the trace."""
        all_inputs = list(tensors)
        for results, places in zip(collections, self.read, strict=True):
            opened = list(results)
            all_inputs += [opened[i] for i in places]
        return all_inputs

    def _run_operations(self, tensors: Sequence[torch.Tensor], collections: Sequence[Results]) -> list:
        values = self.run(self.all_tensors(tensors, collections))
        return (
            [*(values[i] for i in self.shown), Results(None, [values[i] for i in self.held])] if self.held else values
        )

    def _record(
        self, strides: list, setting: list, tensors: Sequence[torch.Tensor], collections: Sequence[Results],
        call: frozenset[int],
    ) -> Recording | None:  # fmt: skip
        """A recording for inputs with these strides and this setting; None where it is not recorded now."""
        key = (*strides, *setting)
        addresses = [t.data_ptr() for t in tensors]
        if not self._is_recorded_now(key, addresses, tensors, collections, call):
            return None
        try:
            stay = (
                []
                if self.moves
                else [i for i, (a, b) in enumerate(zip(addresses, self.seen[key], strict=True)) if a == b]
            )
            recording = Recording(self, strides, setting, tensors, stay, collections)
            self.recordings.append(recording)
            self.recorded += 1
            self.watcher.recorded(self)
        except Refused as reason:
            return self.stop(str(reason))
        except RuntimeError as error:
            return self.stop(
                f"while it was recorded, PyTorch raised {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
                error,
            )
        return recording

    def _is_recorded_now(
        self, key: tuple, addresses: list[int], tensors: Sequence[torch.Tensor], collections: Sequence[Results],
        call: frozenset[int],
    ) -> bool:  # fmt: skip
        """Whether inputs of this key are recorded in this call: at their second one, since the first one may compile or
        tune kernels, and behind the regions before this one."""
        pays = self.replays >= PAYS * max(1, self.recorded)
        if key not in self.seen:
            if len(self.seen) == 4 * RECORDINGS:
                if not pays:
                    self.stop(f"its parameters, or what it writes to, were at {len(self.seen) + 1} places in memory")
                    return False
                del self.seen[next(iter(self.seen))]
            self.seen[key] = addresses
            return False
        if any(results.recording is None for results in collections) or not all(
            is_result(tensors[i]) for i in self.expected
        ):
            return False
        if self.before is not None and self.before.off is None and not self.before.call:
            return False  # recordings are made in the order in which they run, and read each other's results in place
        if self.memory.drop_given_away(call):
            if self.recorded >= RECORDINGS and not pays:
                self.stop(f"it was recorded {self.recorded} times, and replayed {self.replays} times")
            return False
        self.recordings[:] = [r for r in self.recordings if r.can_be_replayed()]
        if len(self.recordings) == RECORDINGS and pays:
            del self.recordings[0]
        if len(self.recordings) == RECORDINGS:
            self.watcher.skipped(
                self,
                f"runs without a CUDA graph for inputs like these: it was recorded for {RECORDINGS} other strides, "
                "or addresses of parameters",
            )
        return len(self.recordings) < RECORDINGS

    def stop(self, reason: str, error: RuntimeError | None = None) -> None:
        self.turn_off(reason)
        self.watcher.stopped(self, reason, error)

    def turn_off(self, reason: str) -> None:
        self.off = reason
        self.recordings.clear()
