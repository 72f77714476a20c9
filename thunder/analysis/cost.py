"""Cost: bytes and arithmetic of operations, and the time that a machine takes for them.

An operation that computes takes the longer of its arithmetic at the machine's rate and its bytes at the rate of its
memory (S. Williams et al. 2009, "Roofline"), a collective a time for each step of a ring and its bytes at the rate of
the links (R. Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from thunder.core.dtypes import FLOAT
from thunder.core.proxies import TensorProxy, element_count, number_value
from thunder.core.regions import FusedFunction, Region
from thunder.core.rule_table import RuleTable
from thunder.core.symbol import BoundSymbol, OpTags

# how many floating point operations take as long as moving one byte: 200 on an H200 in bfloat16, some 20 on a CPU core
FLOPS_PER_BYTE = 100


@dataclass(frozen=True)
class Cost:
    """What an operation costs, beside the bytes of its operands and results.

    factors: positions among the tensors of the two operands that a product multiplies. multiply_adds: (bound symbol):
    multiplications and additions, where it is no single product of two operands. rate: the field of `Machine` with the
    rate of its multiplications and additions, where it is not that of products. kernels: how many PyTorch launches.
    scratch: (bound symbol): bytes that it allocates beside its results. selects: it reads as many elements of its first
    operand as its result has.
    """

    factors: tuple[int, int] = (0, 1)
    multiply_adds: Callable[[BoundSymbol], float] | None = None
    rate: str | None = None
    kernels: int = 1
    scratch: Callable[[BoundSymbol], int] | None = None
    selects: bool = False


rules: RuleTable[Cost] = RuleTable(Cost())


def nbytes(value: TensorProxy) -> int:
    """Bytes of a dense tensor of this shape; symbolic sizes count as they were at capture."""
    return element_count(value) * value.dtype.bytes


def estimated_time(operation: BoundSymbol) -> float:
    """Bytes read and written, and for products the operations."""
    tensors = [p for p in (*operation.inputs, *operation.outputs) if isinstance(p, TensorProxy)]
    return sum(map(nbytes, tensors)) + 2 * multiply_adds(operation) / FLOPS_PER_BYTE


def multiply_adds(operation: BoundSymbol) -> float:
    """Those of matrix products, convolutions and attention: a product of A (m, k) and B (k, n) has sqrt(mk kn mn) =
    mnk. 0 of other operations.

    What is no single product says how many it has: `Cost.multiply_adds`.
    """
    rule = rules.of(operation.sym)
    if (count := rule.multiply_adds) is not None:
        return count(operation)
    tensors = [p for p in operation.inputs if isinstance(p, TensorProxy)]
    if OpTags.MATMUL_OP not in operation.sym.tags or len(tensors) <= rule.factors[1] or not operation.outputs:
        return 0
    a, b = (tensors[i] for i in rule.factors)
    product: Any = operation.outputs[0]
    batch = math.prod(map(number_value, product.shape[:-2])) if min(len(a.shape), len(b.shape)) > 2 else 1
    return math.sqrt(element_count(a) * element_count(b) * element_count(product) / max(1, batch))


def original_of(operation: BoundSymbol) -> BoundSymbol:
    """An operation as it was before an executor took it."""
    return (
        operation.subsymbols[0]
        if operation.sym.executor is not None and not operation.sym.is_fusion and len(operation.subsymbols) == 1
        else operation
    )


def tensors_in(values: Iterable) -> list[TensorProxy]:
    return [p for p in dict.fromkeys(values) if isinstance(p, TensorProxy)]


def bytes_moved(operation: BoundSymbol) -> int:
    """Read and written: all inputs and results; of what is looked up in, what is found."""
    parts = operation.subsymbols if operation.sym.is_fusion else (original_of(operation),)
    return _moved(parts, operation.inputs, operation.outputs)


def region_bytes(region: Region) -> int:
    """Read and written where the operations of a region run as one."""
    return _moved(region.bound_symbols, region.inputs, region.outputs)


def _moved(parts: Iterable[BoundSymbol], inputs: Iterable, outputs: Iterable) -> int:
    read: dict[TensorProxy, int] = {}
    for part in parts:
        selects = OpTags.SHAPE_OP in part.sym.tags or rules.of(part.sym).selects
        written = sum(map(nbytes, tensors_in(part.outputs)))
        for p in tensors_in(part.inputs):
            read[p] = read.get(p, 0) + (min(nbytes(p), written) if selects else nbytes(p))
    return sum(min(nbytes(p), read.get(p, nbytes(p))) for p in tensors_in(inputs)) + sum(
        map(nbytes, tensors_in(outputs))
    )


def scratch_bytes(operation: BoundSymbol) -> int:
    """Bytes that an operation allocates beside its results."""
    if isinstance(operation.sym.fn, FusedFunction):
        return operation.sym.fn.scratch_bytes
    count = rules.of(original_of(operation).sym).scratch
    return count(original_of(operation)) if count is not None else 0


@dataclass(frozen=True)
class Machine:
    """The speed of a kind of GPU and of its interconnect. Rates are measured rates, per second and GPU. Times are in
    seconds.

    Attributes:
        half, single, double, float8: Floating-point operations of matmuls of a dtype.
        attention, attention_backward: Floating-point operations of attention in half precision.
        memory: Bytes read and written.
        update: Bytes read and written by an optimizer.
        link: Bytes that a GPU sends to GPUs of the same node.
        network: Bytes that a GPU sends to other nodes.
        start: The time of a matmul or attention beyond its operations.
        launch: The time between the starts of two kernels.
        host: The time of the process for issuing an operation.
        collective: The time from the start of a collective to its first step.
        hop: The time of a step between GPUs of a node.
        network_hop: The time of a step between GPUs of two nodes.
        sharing: By which fraction computation is slower while a collective runs.
    """

    name: str
    half: float
    single: float
    double: float
    float8: float
    attention: float
    attention_backward: float
    memory: float
    update: float
    link: float
    network: float
    gpus_per_node: int = 8
    start: float = 3e-6
    launch: float = 2.5e-6
    host: float = 20e-6
    collective: float = 25e-6
    hop: float = 2e-6
    network_hop: float = 5e-6
    sharing: float = 0.2

    def rate(self, operation: BoundSymbol) -> float:
        """Returns the rate of the arithmetic of an operation."""
        original = original_of(operation)
        kind = rules.of(original.sym).rate
        size = next(
            (p.dtype.bytes for p in operation.inputs if isinstance(p, TensorProxy) and p.dtype.category == FLOAT), 4
        )
        if kind is not None and size == 2:
            return getattr(self, kind)
        return {1: self.float8, 2: self.half, 4: self.single}.get(size, self.double)

    def seconds_of(self, operation: BoundSymbol, scratch: int) -> float:
        """Returns the projected time of an operation. scratch: bytes that it writes and reads besides its results."""
        arithmetic = 2 * sum(
            multiply_adds(original_of(part))
            for part in (operation.subsymbols if operation.sym.is_fusion else (operation,))
        )
        function, symbol = operation.sym.fn, original_of(operation).sym
        kernels = function.kernels if isinstance(function, FusedFunction) else rules.of(symbol).kernels
        moving = (bytes_moved(operation) + 2 * scratch) / self.memory + kernels * self.launch
        return max(arithmetic / self.rate(operation) + kernels * self.start, moving) if arithmetic else moving

    def seconds_of_collective(self, kind: str, size: int, ranks: int, stride: int) -> float:
        """Returns the projected time of a collective that is a ring. size: the bytes of its input or its result on a
        rank, whichever is larger. ranks: the number of ranks of the group, which are `stride` apart."""
        if ranks == 1:
            return self.collective + 2 * size / self.memory
        together = min(ranks, max(1, self.gpus_per_node // stride))  # of the group, in one node
        nodes = math.ceil(ranks / together)
        rate = self.link if nodes == 1 else min(self.link, self.network * together)
        rounds = 2 if kind == "all_reduce" else 1
        steps = (ranks - nodes) * self.hop + (nodes if nodes > 1 else 0) * self.network_hop
        if kind == "all_reduce":  # by a tree between nodes, where that has fewer steps
            steps = min(steps, (together - 1) * self.hop + math.ceil(math.log2(nodes)) * self.network_hop)
        share = 1.0 if kind == "broadcast" else (ranks - 1) / ranks
        return self.collective + rounds * (steps + share * size / rate)


# Measured on H200s of one host, as reached while a model trains. In a long run products of 17 GFLOP to 1.1 PFLOP take 3
# us and their operations at 680 TFLOP/s (790 on a GPU that was idle before). Causal attention of 2048 and 4096 tokens;
# kernels of the Triton fuser, three quarters of what copies reach (4.27 TB/s); fused AdamW. From profiles of steps on
# four GPUs: rings of NCCL reach 260 GB/s beside products (318 alone), and products take a fifth longer beside them (11
# % where nothing else runs, copies 30 %); some 30 us for each collective. Assumed: 80 % of 400 Gb/s of network for each
# GPU, and the steps of a ring.
H200 = Machine(
    "H200", half=680e12, single=50e12, double=50e12, float8=1290e12, attention=470e12, attention_backward=375e12,
    memory=3.3e12, update=2.73e12, link=260e9, network=40e9
)  # fmt: skip
