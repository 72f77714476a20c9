"""What a device does in a second: all that the scheduler knows about it. `measure` measures one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Machine:
    """Seconds, of one thread.

    element: by class of operations, for one float32 element in vectors; those of float64 take `double` times as long.
    byte: by where memory is ("L2", "memory"), for a byte that is read or written in order; gather: for an element that
    is read out of order from a cache. launch: of a parallel loop; call: of a PyTorch operation; view: of one that makes
    a view. caches: bytes of L1 and L2. lanes: float32 elements in a vector. eager: of PyTorch's kernels, by class or by
    operation, for one element in the L2 cache, and eager_calls for a call beside its elements; those of 16-bit floats
    end in "16".
    """

    element: dict[str, float]
    byte: dict[str, float]
    gather: float
    double: float
    launch: float
    call: float
    view: float
    caches: tuple[int, int]
    lanes: int
    eager: dict[str, float]
    eager_calls: dict[str, float]

    def work(self, rate: str, count: float, is_double: bool) -> float:
        return self.element[rate] * count * (self.double if is_double else 1.0)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, in seconds and bytes.

    multiprocessors; warps: of which a multiprocessor needs as many to be busy. instruction: seconds of one instruction
    for one element, all multiprocessors busy. byte: by where memory is ("L2", "memory"). launch: of a kernel that does
    next to nothing. cache: bytes of the L2. multiply, dot: by type ("tf32": float32 in TensorFloat-32), seconds of a
    multiplication and addition of PyTorch's matrix products, and of ours. operand: seconds that PyTorch's elementwise
    kernels take for an element of an operand or result, where operands are not laid out alike. atomic: seconds of an
    atomic operation on an element, of those that lie together in memory. registers, most_warps, most_programs: of a
    multiprocessor.
    """

    multiprocessors: int
    warps: int
    instruction: float
    byte: dict[str, float]
    launch: float
    cache: int
    multiply: dict[str, float] = dataclasses.field(default_factory=lambda: dict(_MULTIPLY))
    dot: dict[str, float] = dataclasses.field(default_factory=lambda: dict(_DOT))
    operand: float = 1.2e-12
    atomic: float = 1e-12
    registers: int = 1 << 16
    most_warps: int = 64
    most_programs: int = 32

    def share(self, warps: float) -> float:
        """How much of the GPU so many warps keep busy."""
        return min(1.0, max(1, warps) / (self.multiprocessors * self.warps))

    def resident(self, warps: int, registers: float) -> int:
        """How many warps a multiprocessor has at once, of programs of so many, whose threads have so many registers."""
        most = min(self.most_warps, int(self.registers / (32 * min(255.0, registers))))
        return max(warps, min(most // warps, self.most_programs) * warps)

    def moving(self, size: float) -> float:
        """Seconds for so many bytes."""
        return size * self.byte["L2" if size < self.cache else "memory"]


# of an H200
_MULTIPLY = {"bfloat16": 2.9e-15, "float16": 2.9e-15, "tf32": 5.6e-15, "float32": 4e-14}
_DOT = {"bfloat16": 3.5e-15, "float16": 3.5e-15, "tf32": 7e-15, "float32": 1.2e-13}


def planned_gpu() -> Gpu:
    """An H200, by measurements of 2026-11-29."""
    return Gpu(132, 16, 3.1e-14, {"L2": 1 / 6e12, "memory": 1 / 4.2e12}, 1.0e-6, 40 << 20)
