"""CUDA graphs: record the kernel launches of a program once, and replay them as one launch.

    thunder.jit(model, transforms=[CUDAGraphTransform()])

Before: `t0 = torch.matmul(x, w)`, `[t1] = TritonFusion0(t0)`, `n = item(t1)`. After: `[t1] = CUDAGraph0(x, w)`, the two
operations as comments below, `n = item(t1)`. An operation that stays outside says why in a comment above it.

The operations of a region run one by one at its first call, are recorded at the second call with the same strides, and
replayed from then on. Arguments are copied to the addresses of the recording, except for parameters, buffers, tensors
that the region writes to, and tensors that other graphs saved for it. Other addresses of these need another recording.
Without grad, the same holds for arguments with equal addresses in two calls, until an address changes. A long forward
is two recordings, so that the device runs the first while the host launches the second. Recordings share memory, in
which their results stay until the next replay, or until the recording that reads them last:

- Results that the program returns are copied, except for gradients; with `copies_gradients` these are copied as well.
  An operation whose large result would be copied is not recorded.
- Saved values, and gradients that are not copied, are watched. If a replay would overwrite one that is still in use
  (accumulated gradients, two forwards before a backward), the operations of that call run one by one, with memory of
  their own, and the program warns once.
- Saved values are one object, `[t1, results0] = CUDAGraph0(x, w)` and `[t2] = CUDAGraph0(cotangent, results0)`. A graph
  knows the addresses of its tensors, so that the host need not look at each. Where operations outside of graphs read
  one of them, the backward unpacks them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder.analysis.aliases import Bases, alias_bases
from thunder.analysis.cost import nbytes
from thunder.analysis.lifetimes import Occupancy, last_uses
from thunder.core.proxies import CollectionProxy, NumberProxy, Proxy, TensorProxy, numbers_in, proxies_in
from thunder.core.regions import Region, schedule
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace, TraceTag
from thunder.ops.functionalize.inplace import count_write
from thunder.ops.rules import effects
from thunder.ops.torch_types import to_torch_device
from thunder.runtime.cudagraphs.device import DEVICES
from thunder.runtime.cudagraphs.memory import Memory
from thunder.runtime.cudagraphs.region import GraphedRegion, Warns, Watcher
from thunder.transforms.base import Transform
from thunder.transforms.del_last_used import del_last_used, python_del
from thunder.transforms.partition import clear_symbol, unpack, unpack_sequence
from thunder.transforms.reinplace import overwritten

# the least number of operations in the head of a long forward, which is a graph of its own: it takes a GPU about as
# long as the host needs to launch the rest
HEAD = 32
LARGE = 1 << 25  # bytes of a result for which the launches of two graphs take less time than a copy


class CUDAGraphTransform(Transform):
    """Runs the GPU operations of a forward and a backward as CUDA graphs.

    share_mem_pool: all forwards that are compiled with this transform share memory, and so do all backwards; otherwise
    each region has its own.

    `refusal` may be too careful for an operation of the user. A subclass may override `can_fuse(operation)`, which says
    whether an operation is recorded.

    copies_gradients: gradients are copied, as other results are: nobody tells a graph that another stream still reads
    one (`record_stream`). watcher: is told where a region does not run as a graph.
    """

    exact = True
    original_stands_in = True
    needs_sizes = True  # a recording is for addresses and sizes
    device_type = "cuda"
    copies_gradients = False

    def __init__(self, *, share_mem_pool: bool = True):
        self.share_mem_pool = share_mem_pool
        self.watcher: Watcher = Warns()
        self._memory: dict[tuple, Memory] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(share_mem_pool={self.share_mem_pool})"

    def __reduce__(self):
        return type(self), (), {"share_mem_pool": self.share_mem_pool}

    def can_fuse(self, operation: BoundSymbol) -> bool:
        return self.refusal(operation) is None

    def refusal(self, operation: BoundSymbol) -> str | None:
        """The reason against recording an operation, in words; None where there is none."""
        symbol, tags = operation.sym, operation.sym.tags
        before = operation.subsymbols[0] if operation.subsymbols and not symbol.is_fusion else operation
        original = before.sym
        if any(
            isinstance(n, NumberProxy) for n in numbers_in((operation.args, operation.kwargs, operation.output), [])
        ):
            return "it depends on a number that may be another one at the next call"
        if not all(type(p) is TensorProxy for p in (*operation.inputs, *operation.outputs)):
            return "it takes or makes something that is no tensor"
        tensors = [p for p in (*operation.inputs, *operation.outputs) if not _is_seed(operation, p)]
        if len(devices := {p.device.name for p in tensors}) != 1 or tensors[0].device.type != self.device_type:
            return f"its tensors are on {', '.join(sorted(devices))}" if devices else "it has no tensor on a GPU"
        if (
            symbol.executor is None
            or not symbol.executor.capturable
            or isinstance(original.id, tuple)
            or OpTags.OPAQUE in tags
            or _is_foreign(symbol)
        ):
            return "it may do more than launch kernels"
        if effects.holds_generator.of(original) or operation.kwargs.get("generator") is not None:
            return "it uses the state of a generator"
        if OpTags.DEVICE_SYNC_OP in tags or effects.synchronises.holds(before):
            return "it may wait for the device"
        if (
            OpTags.DONT_DCE in tags
            and not tags & {OpTags.RANDOM_OP, OpTags.IN_PLACE}
            or effects.changes_metadata.of(original)
            or original is count_write
        ):
            return "it has an effect that is no write to a tensor's memory"
        return None

    def transform_trace_post_optimization(self, computation_trace: Trace, **kwargs) -> Trace:
        """The trace with its regions as graphs where there is one to record."""
        trace = computation_trace
        operations = [operation for operation in trace.bound_symbols if operation.sym is not python_del]
        flow = _Flow(trace, operations, self.copies_gradients)
        regions = self._regions(flow)
        recorded = [self._is_recorded(region) for region in regions]
        flow.find(regions, recorded)
        counter, written = itertools.count(), []
        for region, is_recorded in zip(regions, recorded, strict=True):
            if is_recorded:
                name = next(n for i in counter if (n := f"CUDAGraph{i}") not in trace.names.taken)
                written.append(self._graph(name, region, flow))
            else:
                written += [
                    self._explained(operation) for operation in region.bound_symbols if not flow.is_taken(operation)
                ]
        if flow.saved:
            trace = trace.replace(output=(trace.output[0], flow.saved_beside_graphs()))
        return del_last_used(trace.replace(bound_symbols=_deleted(written, flow.taken)))

    def _regions(self, flow: _Flow) -> list[Region]:
        operations, output = flow.operations, flow.trace.output_proxies
        groups = _runs(operations, self.can_fuse)
        if flow.saved:
            groups = _head_apart(groups, operations, output)
        groups = _results_apart(groups, operations, flow.returned - flow.saved_bases, flow.bases)
        return schedule(operations, groups, output)

    def _is_recorded(self, region: Region) -> bool:
        computing = sum(OpTags.SHAPE_OP not in operation.sym.tags for operation in region.bound_symbols)
        return computing >= 2 and self.can_fuse(region.bound_symbols[0])

    def _graph(self, name: str, region: Region, flow: _Flow) -> BoundSymbol:
        """The operation that runs a region as a graph. Saved values with consumers in graphs only are one
        collection."""
        within, collections = set(region.inputs), flow.collections_of(region)
        inputs = [p for p in region.inputs if p not in flow.gathered]
        inside, written = _memory(region.bound_symbols)
        stays = [o in flow.held and inside.get(o) not in within for o in region.outputs]
        visible = [not s or o in flow.read for s, o in zip(stays, region.outputs, strict=True)]
        staying, outputs = (list(itertools.compress(region.outputs, chosen)) for chosen in (stays, visible))
        arguments, names = [*inputs, *(p for pairs in collections.values() for _, p in pairs)], flow.trace.names
        argument_list = CollectionProxy((), names.make("inputs"))
        operations = [*unpack(arguments, argument_list), *region.bound_symbols]
        program = del_last_used(Trace(name, [argument_list], operations, list(region.outputs), names))
        shared = {inside.get(o, o) for o in region.outputs} | written
        run = GraphedRegion(
            f"{name} of {flow.trace.name}",
            program,
            self._memory_of(region, flow.backward),
            tensors=len(inputs),
            fixed=[i for i, p in enumerate(inputs) if p.name in flow.parameters or p in written],
            expected=[i for i, p in enumerate(inputs) if p in flow.unpacked],
            returned=[o in flow.returned for o in region.outputs],
            shown=list(itertools.compress(itertools.count(), visible)),
            held=list(itertools.compress(itertools.count(), stays)),
            read=[[i for i, _ in pairs] for pairs in collections.values()],
            released=[i for i, p in enumerate(arguments) if p not in shared and flow.is_last(region, p)],
            overwrites=flow.backward and self.copies_gradients,
            watcher=self.watcher,
            before=flow.last,
        )
        flow.last = run
        if staying:
            outputs.append(CollectionProxy(tuple(staying), names.make("results")))
            flow.others = (*flow.others, outputs[-1])
        symbol = Symbol(name, id=f"cudagraph.{name}", is_prim=True, fn=run, is_fusion=True)
        context = region.bound_symbols[0].context
        return symbol.bind(*inputs, *collections, output=outputs, subsymbols=region.bound_symbols, context=context)

    def _explained(self, operation: BoundSymbol) -> BoundSymbol:
        if operation.sym.python_printer is not None or (reason := self.refusal(operation)) is None:
            return operation
        return _with_reason(operation, reason)

    def _memory_of(self, region: Region, backward: bool) -> Memory:
        """The memory of a region's recordings. Gradients of the last step may be in use while a forward runs, so
        backwards whose gradients are not copied have memory of their own."""
        device = to_torch_device(
            next(p.device for p in (*region.outputs, *region.inputs) if isinstance(p, TensorProxy))
        )
        if not self.share_mem_pool:
            return self.make_memory(device)
        key = (device, backward and not self.copies_gradients)
        if key not in self._memory:
            self._memory[key] = self.make_memory(device)
        return self._memory[key]

    def make_memory(self, device: torch.device) -> Memory:
        return Memory(DEVICES[self.device_type](device))


class _Flow:
    """The outputs of a program, and the values that its regions exchange. bases: of all values.

    returned: values that it returns, with their bases; of a backward only where they are copied. saved: tensors that a
    forward saves; others: other saved values. held: saved tensors that share no memory with returned ones. gathered,
    unpacked: see `_gathered`. taken: the collections that graphs read. read: the live-in values of regions. of_graphs:
    values that graphs compute. last_region: by base, the last region that reads it; None where the program returns it.
    """

    def __init__(self, trace: Trace, operations: list[BoundSymbol], copies_gradients: bool):
        self.trace, self.operations, self.backward = trace, operations, TraceTag.BACKWARD in trace.tags
        self.parameters = trace.info.parameters.keys() | trace.info.held
        self.last: GraphedRegion | None = None  # the last region that is a graph
        self.saved, self.others = trace.output[1] if TraceTag.AUGMENTED_FORWARD in trace.tags else ((), ())
        self.bases = bases = alias_bases(operations, maybe=True)
        whole = proxies_in(trace.output[0], []) if self.saved else trace.output_proxies
        returned = () if self.backward and not copies_gradients else whole
        self.returned = {*returned, *(bases[p] for p in returned)}
        self.saved_bases = {bases[p] for p in self.saved}

    def find(self, regions: Sequence[Region], recorded: Sequence[bool]) -> None:
        """Finds the values that these regions exchange. recorded: by region, whether it is a graph."""
        memory, _ = _memory(self.operations)
        leaving = {memory.get(p, p) for p in self.returned}
        self.held = {o for o in self.saved if memory.get(o, o) not in leaving}
        self.gathered, self.unpacked = _gathered(regions, recorded, self.trace.output_proxies)
        self.taken, self.read = dict.fromkeys(self.gathered.values()), {p for r in regions for p in r.inputs}
        results = {o for r, is_recorded in zip(regions, recorded, strict=True) if is_recorded for o in r.outputs}
        self.of_graphs = results.union(self.gathered, self.unpacked)
        self.last_region = dict[Proxy, Region | None]()
        for region in regions:
            self.last_region |= dict.fromkeys((self.bases[p] for p in region.inputs), region)
        self.last_region |= dict.fromkeys(self.bases[p] for p in self.trace.output_proxies)

    def collections_of(self, region: Region) -> dict[CollectionProxy, list[tuple[int, Proxy]]]:
        """By collection that a region reads, the values that it reads of it, with their places."""
        within, gathered = set(region.inputs), self.gathered
        read = dict.fromkeys(gathered[p] for p in region.inputs if p in gathered)
        return {c: [(i, p) for i, p in enumerate(c.collection) if p in within] for c in read}

    def is_last(self, region: Region, value: Proxy) -> bool:
        """Whether a value is of a graph, and nothing reads its memory behind a region of this program."""
        return value in self.of_graphs and self.last_region[self.bases[value]] is region

    def is_taken(self, operation: BoundSymbol) -> bool:
        return operation.sym in (unpack_sequence, clear_symbol) and operation.args[-1] in self.taken

    def saved_beside_graphs(self) -> tuple[tuple, tuple]:
        gone = {p for c in self.others if isinstance(c, CollectionProxy) for p in c.collection}
        return tuple(p for p in self.saved if p not in gone), self.others


def _is_seed(operation: BoundSymbol, value: Proxy) -> bool:
    """Whether a value is the state of the generator that an attention kernel saves: a tensor on the GPU while a graph
    is recorded, otherwise on the CPU."""
    return (
        OpTags.MATMUL_OP in operation.sym.tags
        and isinstance(value, TensorProxy)
        and value.device.type == "cpu"
        and value.dtype.category == 1
        and len(value.shape) <= 1
    )


def _gathered(
    regions: Sequence[Region], recorded: Sequence[bool], output: Sequence[Proxy]
) -> tuple[dict[Proxy, CollectionProxy], set[Proxy]]:
    """By saved value with recorded regions as its only consumers, the collection that it is in; and the values with
    other consumers, which are unpacked from their collections."""
    alone = [
        operation
        for region, is_recorded in zip(regions, recorded, strict=True)
        if not is_recorded
        for operation in region.bound_symbols
    ]
    outside = {p for operation in alone for p in operation.inputs}.union(output)
    gathered, unpacked = dict[Proxy, CollectionProxy](), set[Proxy]()
    for operation in alone:
        if operation.sym is unpack_sequence and operation.args[1].collection:
            if outside.isdisjoint(operation.outputs):
                gathered |= dict.fromkeys(operation.outputs, operation.args[1])
            else:
                unpacked.update(operation.outputs)
    return gathered, unpacked


def _deleted(operations: Sequence[BoundSymbol], collections: Iterable[CollectionProxy]) -> list[BoundSymbol]:
    """The operations, with a `del` behind the last use of each collection, whose memory may then be overwritten."""
    with_deletions = list(operations)
    for c in collections:
        last = max(
            (i for i, operation in enumerate(with_deletions) if c in operation.inputs or c in operation.outputs),
            default=-1,
        )
        with_deletions.insert(last + 1, BoundSymbol(python_del, (c,), {}, None, inputs=(c,), outputs=()))
    return with_deletions


def _is_foreign(symbol: Symbol) -> bool:
    """Whether an operation was registered with torch.library, and not by PyTorch."""
    return (
        symbol.module is not None
        and symbol.module.startswith("torch.ops.")
        and not symbol.module.startswith("torch.ops.aten")
    )


def _runs(operations: Sequence[BoundSymbol], takes: Callable[[BoundSymbol], bool]) -> list[list[int]]:
    """Groups of the indices of operations: consecutive taken operations on one device, or single operations."""
    groups: list[list[int]] = []
    before: Any = None
    for i, operation in enumerate(operations):
        device = (
            next(
                (
                    p.device
                    for p in (*operation.inputs, *operation.outputs)
                    if isinstance(p, TensorProxy) and not _is_seed(operation, p)
                ),
                None,
            )
            if takes(operation)
            else None
        )
        if device is not None and device == before:
            groups[-1].append(i)
        else:
            groups.append([i])
        before = device
    return groups


def _head_apart(groups: list[list[int]], operations: Sequence[BoundSymbol], output: Sequence[Proxy]) -> list[list[int]]:
    """The groups with the first long one in two parts, cut where the fewest bytes are live: the device runs the head
    while the host launches the rest."""
    at = next((n for n, group in enumerate(groups) if len(group) >= 4 * HEAD), None)
    if at is None:
        return groups
    group, returned = groups[at], set(output)
    last, staying = last_uses([operations[i] for i in group]), Occupancy(2 * HEAD)
    for n, i in enumerate(group[: 2 * HEAD]):
        for p in operations[i].outputs:
            if isinstance(p, TensorProxy) and p not in returned:
                staying.hold(p, n + 1, min(last.get(p, n), 2 * HEAD - 1))
    cut = min(range(HEAD, 2 * HEAD), key=staying.filled().__getitem__)
    return [*groups[:at], group[:cut], group[cut:], *groups[at + 1 :]]


def _results_apart(
    groups: list[list[int]], operations: list[BoundSymbol], leaving: set[Proxy], bases: Bases
) -> list[list[int]]:
    """The groups without the operations of which the program returns large results: these would be copied out of the
    memory of a graph. Views of such results stay with them. What graphs read of their other results is copied as well,
    to the graphs."""
    recorded = {i for group in groups if len(group) > 1 for i in group}
    read = {bases[p] for i in recorded if OpTags.SHAPE_OP not in operations[i].sym.tags for p in operations[i].inputs}
    apart = set[Proxy]()
    split: list[list[int]] = []
    for group in groups:
        split.append([])
        for i in group:
            operation = operations[i]
            if OpTags.SHAPE_OP in operation.sym.tags:
                is_apart = any(bases[p] in apart for p in operation.outputs)
            else:
                is_apart = (
                    i in recorded
                    and OpTags.IN_PLACE not in operation.sym.tags
                    and sum(nbytes(p) * ((p in leaving) - (p in read)) for p in operation.outputs) >= LARGE
                )
            if is_apart:
                operations[i] = _with_reason(operation, "its result would be copied")
                apart.update(operation.outputs)
                split += [[i], []]
            else:
                split[-1].append(i)
    return [group for group in split if group]


def _with_reason(operation: BoundSymbol, reason: str) -> BoundSymbol:
    new = operation.replace()
    new.header = f"not in a CUDA graph: {reason}"
    return new


def _memory(operations: Sequence[BoundSymbol]) -> tuple[dict[Proxy, Proxy], set[Proxy]]:
    """The bases of values, with those of in-place results, and the bases that operations write to."""
    bases, written = alias_bases(operations, maybe=True), set()
    for operation in operations:
        if OpTags.IN_PLACE not in operation.sym.tags:
            continue
        for result, target in overwritten(operation):
            written.add(bases[target])
            if result is not None:  # its memory is that of the target
                bases[result] = bases[target]

    def last(value: Proxy) -> Proxy:
        while (base := bases[value]) is not value:
            value = base
        return value

    return {value: last(value) for value in bases}, written
