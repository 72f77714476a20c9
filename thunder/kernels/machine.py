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


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Seconds, of a whole GPU.

    element: by class of operations, for one float32 element; those of float64 take `double` times as long. byte: by
    where memory is ("L2", "memory"). alone: bytes that one multiprocessor reads in a second. launch: of a kernel that
    does next to nothing. cache: bytes of the L2.
    """

    multiprocessors: int
    element: dict[str, float]
    byte: dict[str, float]
    alone: float
    double: float
    launch: float
    cache: int

    def work(self, rate: str, count: float, is_double: bool) -> float:
        return self.element[rate] * count * (self.double if is_double else 1.0)

    @property
    def caches(self) -> tuple[int, int]:
        return 0, self.cache


def planned_gpu() -> Gpu:
    """An H200, by its data sheet and measurements of 2026-11-28."""
    lanes = 132 * 128 * 1.7e9
    return Gpu(
        132, {"simple": 1 / lanes, "divide": 8 / lanes, "exp": 10 / lanes, "integer divide": 16 / lanes},
        {"L2": 1 / 5.5e12, "memory": 1 / 4.2e12}, 5e10, 2.0, 2e-6, 50 << 20,
    )  # fmt: skip
