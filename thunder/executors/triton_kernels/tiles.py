"""How large the blocks of a kernel are, and how many warps compute one: cheap rules, from measurements on an H200."""

from __future__ import annotations

from typing import NamedTuple

from thunder.executors.triton_kernels.schedule import Kernel, along_memory

__all__ = ["Tile", "tile_of", "power_of_two"]

PASS = 4096  # columns that a program sees at a time where a row does not fit


class Tile(NamedTuple):
    """rows, columns: of a block; the places of a map are columns. warps: of a program."""

    rows: int
    columns: int
    warps: int


def power_of_two(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << (n - 1).bit_length()


def tile_of(kernel: Kernel) -> Tile:
    return {"map": _map, "rows": _rows, "columns": _columns}[kernel.kind](kernel)


def _map(kernel: Kernel) -> Tile:
    block = min(1024, power_of_two(kernel.columns))
    return Tile(1, block, 4 if block >= 512 else 1)


def _rows(kernel: Kernel) -> Tile:
    if not kernel.on_chip:
        return Tile(1, PASS, 16)
    columns = power_of_two(kernel.columns)
    across = any(not along_memory(v) for v in kernel.reductions)
    rows = max(1, min(power_of_two(kernel.rows), 32 if across else 4096, (16384 if across else 4096) // columns))
    return Tile(rows, columns, max(1, min(32, rows * columns // 512)))


def _columns(kernel: Kernel) -> Tile:
    columns = min(128, power_of_two(kernel.columns))
    return Tile(min(2048 // columns, power_of_two(kernel.rows)), columns, 4)
