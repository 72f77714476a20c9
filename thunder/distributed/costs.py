"""Projected costs of programs: memory and time of execution traces on a machine that is described by a few
figures.

Memory is a walk along the operations: results are allocated, views and waits show what others hold, `del` frees. Time
is a walk as well, with a clock for what the host has issued, one for the stream that computes and one for that of
collectives, on which a collective starts when what was issued before it is done; `wait` lets the first wait for the
second. An operation that computes takes the longer of its arithmetic at the GPU's rate and its bytes at the rate of its
memory (S. Williams et al. 2009, "Roofline"), a collective a time for each step of a ring and its bytes at the rate of
the links (R. Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from thunder import compat
from thunder.analysis import cost
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import H200, Machine, nbytes, original_of, scratch_bytes, tensors_in
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy, number_value
from thunder.core.regions import FusedFunction
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.kernels.index import strides_of
from thunder.ops.backward import times_cotangent
from thunder.ops.families.collectives import all_reduce_together
from thunder.ops.infer import run_line
from thunder.ops.layout import is_dense
from thunder.ops.torch_types import to_torch_dtype
from thunder.transforms.del_last_used import python_del

__all__ = ["Machine", "H200", "Collective", "Memory", "Clock", "collective_of"]


def _group(operation: BoundSymbol):
    return next((a for a in operation.args if isinstance(a, dist.ProcessGroup)), None)


def collective_of(operation: BoundSymbol) -> tuple[str, int] | None:
    """(its kind, bytes of the larger of what a rank gives and gets) of a collective; None for another operation."""
    if _group(operation) is None:
        return None
    return original_of(operation).sym.name.removesuffix("_together"), max(
        sum(map(nbytes, tensors_in(operation.inputs))), sum(map(nbytes, tensors_in(operation.outputs)))
    )


def _is_text(operation: BoundSymbol) -> bool:
    """Whether a bound symbol is a statement of the program's text, and no operation."""
    return operation.sym.python_printer is not None


# ----------------------------------------------------------------------------------------------------------------
# memory


@dataclass
class _Storage:
    """The memory of a tensor and its views."""

    nbytes: int
    names: int = 0  # that stand for it
    gathered: bool = False


class Memory:
    """Bytes on a kind of device while traces run, beside what is there before them. held: names of values that are
    there all the time, arguments and parameters.

    now, peak: bytes; gathered, most_gathered: of parameters that other ranks hold, until they are freed.
    """

    def __init__(self, device: str, held: Iterable[str] = ()):
        self.device = device
        self.of: dict[str, _Storage] = {name: _Storage(0, 1) for name in held}
        self.strides: dict[str, tuple] = {}  # of values that are not row-major: whether some views copy depends on them
        self.now = self.peak = self.gathered = self.most_gathered = 0

    def run(self, trace: Trace) -> None:
        """Walks along the operations of an execution trace; what is not deleted stays."""
        # futures -> the collective, and what it keeps until somebody waits
        started: dict[str, tuple[BoundSymbol, list[_Storage]]] = {}
        for operation in trace.bound_symbols:
            if operation.sym is python_del:
                for p in operation.args:
                    self.drop(p.name)
            elif _is_text(operation):
                self._hold(operation)
            else:
                self._run(operation, started)

    def _hold(self, operation: BoundSymbol) -> None:
        """What a program is given and was not made by one before: cotangents, which autograd keeps while it calls the
        backward."""
        results = [p for p in tensors_in(operation.outputs) if p.name not in self.of]
        for p in results:
            self._allocate(p)
        self.keep(p.name for p in results)

    def _run(self, operation: BoundSymbol, started: dict) -> None:
        """Adds the memory of an operation's results, and frees what it is the last to read. started: collectives that
        nobody has waited for, by their futures."""
        collective = collective_of(operation)
        self._waited(operation, started)
        is_view = self._laid_out(operation)
        for position, o in enumerate(operation.outputs):
            if o.name in self.of:
                continue
            storage = self._storage_of(operation, position, is_view)
            if storage is not None:
                self.of[o.name] = storage
                storage.names += 1
            else:
                self._allocate(o, gathered=collective is not None and collective[0] == "all_gather")
        self.peak = max(self.peak, self.now + scratch_bytes(operation))
        futures = [o.name for o in operation.outputs if isinstance(o, FutureTensorProxy)]
        if futures and collective is not None and collective[0] != "all_reduce":  # which works on a copy
            storages = [self.of[p.name] for p in tensors_in(operation.inputs) if p.name in self.of]
            for storage in storages:
                storage.names += 1
            started.update(dict.fromkeys(futures, (operation, storages)))

    def _waited(self, operation: BoundSymbol, started: dict) -> None:
        for i in operation.inputs:
            if isinstance(i, FutureTensorProxy) and i.name in started:
                of, storages = started[i.name]
                for o in of.outputs:
                    started.pop(o.name, None)
                for storage in storages:
                    self._less(storage)

    def _laid_out(self, operation: BoundSymbol) -> bool:
        """Writes down how results lie in memory. Returns whether they show what the operation reads: views run on the
        meta device."""
        original, tensors = original_of(operation), tensors_in(operation.inputs)
        outputs = tensors_in(operation.outputs)
        if may_view(original) and len(tensors) == 1 and not isinstance(tensors[0], FutureTensorProxy):
            values: dict = {tensors[0]: self._example(tensors[0])}
            with compat.DisableTorchFunction(), torch.no_grad():
                run_line(original, values)
            tensors_now = [values[o] for o in original.outputs if isinstance(o, TensorProxy)]
            self._lie(outputs, [t.stride() for t in tensors_now])
            return all(t.untyped_storage()._cdata == values[tensors[0]].untyped_storage()._cdata for t in tensors_now)
        function = operation.sym.fn
        if isinstance(function, FusedFunction) and any(p.name in self.strides for p in tensors):
            strides = function.layout(tuple(self._example(p).stride() for p in tensors))
            self._lie(outputs, strides if strides is not None else [None] * len(outputs))
        elif not operation.sym.is_fusion and (
            OpTags.MATMUL_OP not in original.sym.tags or cost.rules.of(original.sym).rate is not None
        ):  # as what they read, where that has their shape
            like = [next((self._example(p) for p in tensors if p.shape == o.shape), None) for o in outputs]
            self._lie(outputs, [t.stride() if t is not None and is_dense(t) else None for t in like])
        return False

    def _example(self, p: TensorProxy) -> torch.Tensor:
        sizes = tuple(map(number_value, p.shape))
        return torch.empty_strided(
            sizes, self.strides.get(p.name) or strides_of(sizes), dtype=to_torch_dtype(p.dtype), device="meta"
        )

    def _lie(self, outputs: Sequence[TensorProxy], strides: Sequence[tuple | None]) -> None:
        for o, s in zip(outputs, strides, strict=True):
            if s is not None and tuple(s) != strides_of(tuple(map(number_value, o.shape))):
                self.strides[o.name] = tuple(s)

    def _storage_of(self, operation: BoundSymbol, position: int, is_view: bool) -> _Storage | None:
        """The storage that was there before, where the result at a place is in it."""
        original, output = original_of(operation), operation.outputs[position]
        tensors = tensors_in(operation.inputs)
        source = None
        if is_view or any(isinstance(i, FutureTensorProxy) for i in operation.inputs):
            source = tensors[0]
        elif isinstance(operation.sym.fn, FusedFunction):
            at = operation.sym.fn.over.get(position)
            source = None if at is None else operation.inputs[at]
        elif OpTags.IN_PLACE in operation.sym.tags or original.sym is times_cotangent:
            source = next((p for p in tensors if p.shape == output.shape and p.dtype is output.dtype), None)
        elif original.sym is all_reduce_together:
            source = operation.args[0][position] if operation.args[2][position] else None
        return self.of.get(source.name) if source is not None else None

    def _allocate(self, p: Proxy, gathered: bool = False) -> None:
        self.of[p.name] = storage = _Storage(
            nbytes(p) if isinstance(p, TensorProxy) and p.device.type == self.device else 0, 1, gathered
        )
        self.now += storage.nbytes
        self.peak = max(self.peak, self.now)
        if gathered:
            self.gathered += storage.nbytes
            self.most_gathered = max(self.most_gathered, self.gathered)

    def keep(self, names: Iterable[str]) -> None:
        """The caller of the program has these now, besides what later ones are given."""
        for name in names:
            if name in self.of:
                self.of[name].names += 1

    def hand_over(self, names: Sequence[tuple[str, str]]) -> None:
        """What one program returned under the first name of a pair the next one is given under the second."""
        moved = [(new, self.of[old]) for old, new in names if old in self.of]
        for _, storage in moved:
            storage.names += 1
        for old in {old for old, _ in names}:
            self.drop(old)
        self.of.update(moved)

    def bytes_of(self, names: Iterable[str]) -> int:
        """Of what values show, each storage once."""
        return sum({id(s): s.nbytes for s in (self.of.get(name) for name in names) if s is not None}.values())

    def drop(self, name: str) -> None:
        storage = self.of.pop(name, None)
        if storage is not None:
            self._less(storage)

    def _less(self, storage: _Storage) -> None:
        storage.names -= 1
        if not storage.names:
            self.now -= storage.nbytes
            self.gathered -= storage.nbytes if storage.gathered else 0


# ---------------------------------------------------------------------------------------------------------------- time


@dataclass
class Collective:
    """The collectives of one kind in a step: how many, bytes of the larger of what a rank gives and gets, seconds."""

    kind: str
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass
class Clock:
    """Seconds since the start of the step, of what the host has issued and of when the two streams are done.

    busy: seconds of operations that compute. waiting: seconds in which the stream that computes waited for collectives.
    """

    machine: Machine
    host: float = 0.0
    computed: float = 0.0
    communicated: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0
    collectives: dict[str, Collective] = field(default_factory=dict)

    def run(self, operations: Sequence[BoundSymbol]) -> None:
        """Plays the operations of an execution trace."""
        done: dict[str, float] = {}  # futures -> when
        for operation in operations:
            if _is_text(operation):
                continue
            self.host += self.machine.host
            if (collective := collective_of(operation)) is not None:
                finished = self._communicate(*collective, _group(operation))
                futures = [o.name for o in operation.outputs if isinstance(o, FutureTensorProxy)]
                done.update(dict.fromkeys(futures, finished))
                if not futures:
                    self._wait(finished)
            elif any(isinstance(i, FutureTensorProxy) for i in operation.inputs):
                self._wait(max((done[i.name] for i in operation.inputs if i.name in done), default=0.0))
            elif not may_view(original_of(operation)):
                self.compute(self.machine.seconds_of(operation, scratch_bytes(operation)))

    def compute(self, seconds: float) -> None:
        start = max(self.computed, self.host)
        shared = max(0.0, min(self.communicated - start, seconds))  # while a collective runs
        seconds += shared * self.machine.sharing
        self.computed, self.busy = start + seconds, self.busy + seconds

    def _communicate(self, kind: str, size: int, group) -> float:
        seconds = self.machine.seconds_of_collective(kind, size, group.size(), getattr(group, "stride", 1))
        self.communicated = max(self.communicated, self.computed, self.host) + seconds
        collective = self.collectives.setdefault(kind, Collective(kind))
        collective.count, collective.nbytes, collective.seconds = (
            collective.count + 1,
            collective.nbytes + size,
            collective.seconds + seconds,
        )
        return self.communicated

    def _wait(self, until: float) -> None:
        start = max(self.computed, self.host)
        self.waiting += max(0.0, until - start)
        self.computed = max(self.computed, until)
