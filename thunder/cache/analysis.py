"""Memory and cost of a lowered program: `compiled.lower(*args).memory_analysis()` and `.cost_analysis(machine)`.

Nothing runs: both walk along the execution traces. Sizes are those of the call that the program was lowered for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thunder.analysis.aliases import may_view
from thunder.analysis.cost import bytes_moved, multiply_adds, nbytes, original_of, scratch_bytes
from thunder.core.proxies import TensorProxy, proxies_in
from thunder.core.symbol import BoundSymbol
from thunder.core.tables import table
from thunder.core.trace import Trace
from thunder.distributed.costs import Machine, Memory

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes on the device of a program's tensors; printed as a table.

    arguments: tensors that it reads, parameters among them. results: that it returns. saved: that the forward keeps for
    the backward, without arguments. gradients: that the backward returns. forward: at the peak of the forward,
    arguments among them. backward: at that of the backward; 0 without one.
    """

    device: str
    arguments: int
    results: int
    saved: int
    gradients: int
    forward: int
    backward: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward)

    def __str__(self) -> str:
        names = ("arguments", "results", "saved", "gradients", "forward", "backward", "peak")
        rows = [(name, f"{getattr(self, name) / MIB:,.2f}") for name in names]
        return table((f"memory on {self.device}", "MiB"), rows, right=(1,))


@dataclass(frozen=True)
class OperationCost:
    """One bound symbol of a program. part: "forward" or "backward". operation: its name. flops: floating-point
    operations of matrix products, convolutions and attention, a multiplication and an addition counted as two. moved:
    bytes read and written. seconds: projected, on the machine. where: the user's line and the module, in words."""

    part: str
    operation: str
    flops: float
    moved: int
    seconds: float
    where: str


@dataclass(frozen=True)
class CostAnalysis:
    """What a program computes and moves, and how long `machine` would take; printed as a table of its most expensive
    operations. Times are projected: the longer of arithmetic and memory traffic for each operation, without the host's
    time."""

    machine: Machine
    operations: tuple[OperationCost, ...]

    @property
    def flops(self) -> float:
        return sum(o.flops for o in self.operations)

    @property
    def moved(self) -> int:
        return sum(o.moved for o in self.operations)

    @property
    def seconds(self) -> float:
        return sum(o.seconds for o in self.operations)

    def __str__(self) -> str:
        total = f"{self.flops / 1e9:,.3f} GFLOP, {self.moved / MIB:,.2f} MiB moved, {self.seconds * 1e6:,.1f} us"
        rows = [
            (
                f"{o.seconds * 1e6:,.1f}", f"{o.flops / 1e9:,.3f}", f"{o.moved / MIB:,.2f}", o.part, o.operation,
                o.where,
            )
            for o in sorted(self.operations, key=lambda o: -o.seconds)[:20]
        ]  # fmt: skip
        head = ("us", "GFLOP", "MiB", "part", "operation", "line")
        return f"projected for {self.machine.name}: {total}\n{table(head, rows, right=(0, 1, 2))}"


def memory_analysis(entry: Any) -> MemoryAnalysis:
    """entry: a `CacheEntry` that was not read from the disk."""
    forward, backward = entry.forward, entry.backward
    tensors = [p for p in forward.args if isinstance(p, TensorProxy)]
    values = [*tensors, *(o for b in forward.bound_symbols for o in b.outputs if isinstance(o, TensorProxy))]
    device = next((p.device.type for p in values if p.device.type != "cpu"), "cpu")
    arguments = sum(nbytes(p) for p in tensors if p.device.type == device)
    memory = Memory(device, (p.name for p in tensors))
    memory.run(forward)
    if backward is None:
        results = memory.bytes_of({p.name for p in proxies_in(forward.output, [])})
        return MemoryAnalysis(device, arguments, results, 0, 0, arguments + memory.peak, 0)
    outputs, (saved, _) = forward.output
    names = {p.name for p in proxies_in(outputs, [])}
    results, at_forward = memory.bytes_of(names), memory.peak
    memory.keep(names)
    handed = entry.connection.cut.saved_tensors
    memory.hand_over([(p.name, argument.name) for p, argument in zip(saved, handed, strict=True)])
    size = memory.bytes_of({p.name for p in handed})
    memory.peak = memory.now
    memory.run(backward)
    gradients = memory.bytes_of({p.name for p in backward.output_proxies})
    return MemoryAnalysis(device, arguments, results, size, gradients, arguments + at_forward, arguments + memory.peak)


def cost_analysis(entry: Any, machine: Machine) -> CostAnalysis:
    """entry: a `CacheEntry` that was not read from the disk."""
    parts = [("forward", entry.forward)] + ([("backward", entry.backward)] if entry.backward is not None else [])
    rows = [row for part, trace in parts for row in _rows(part, trace, machine)]
    return CostAnalysis(machine, tuple(rows))


def _rows(part: str, trace: Trace, machine: Machine) -> list[OperationCost]:
    rows = []
    for operation in trace.bound_symbols:
        if operation.sym.python_printer is not None or may_view(original_of(operation)):
            continue  # a statement of the text, or a view
        flops = 2 * sum(map(multiply_adds, _parts(operation)))
        seconds = machine.seconds_of(operation, scratch_bytes(operation))
        where = "" if operation.location is None else operation.location.short
        rows.append(OperationCost(part, operation.sym.qualified_name, flops, bytes_moved(operation), seconds, where))
    return rows


def _parts(operation: BoundSymbol) -> list[BoundSymbol]:
    return list(map(original_of, operation.subsymbols if operation.sym.is_fusion else (operation,)))
