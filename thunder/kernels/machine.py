"""What a device does in a second: all that the scheduler knows about it. `measure` measures one."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Machine:
    """Seconds, of one thread.

    element: by class of operations, for one float32 element in vectors; those of float64 take `double` times as long.
    byte: by where memory is ("L2", "memory"), for a byte that is read or written in order; gather: for an element that
    is read out of order from a cache. launch: of a parallel loop; call: of a PyTorch operation. caches: bytes of L1
    and L2. lanes: float32 elements in a vector. eager: of PyTorch's kernels, by class, for one element in the L2 cache;
    those of 16-bit floats end in "16".
    """

    element: dict[str, float]
    byte: dict[str, float]
    gather: float
    double: float
    launch: float
    call: float
    caches: tuple[int, int]
    lanes: int
    eager: dict[str, float]

    def work(self, rate: str, count: float, is_double: bool) -> float:
        return self.element[rate] * count * (self.double if is_double else 1.0)
