"""How large the blocks of a kernel are, and how many warps compute one: cheap rules, from measurements on an H200."""

from __future__ import annotations

from typing import NamedTuple

from thunder.executors.triton_kernels.reduction_places import along_memory
from thunder.executors.triton_kernels.reductions import REDUCED
from thunder.executors.triton_kernels.schedule import Kernel
from thunder.kernels.sizes import Extent, hint

PASS = 8192  # columns that a program sees at a time where a row does not fit
# bytes of shared memory that are left to what is not loaded ahead: reductions, other layouts of a block
OTHERS = 1 << 16


class Tile(NamedTuple):
    """rows, columns: of a block; the places of a map are columns. warps: of a program."""

    rows: int
    columns: int
    warps: int


def power_of_two(n: int | Extent) -> int:
    """The least power of two that is not less, for a size as it came in first."""
    return 1 << (hint(n) - 1).bit_length()


def tile_of(kernel: Kernel) -> Tile:
    return {"map": _map, "rows": _rows, "columns": _columns}[kernel.kind](kernel)


def part_tile(kernel: Kernel) -> Tile:
    """Of a kernel that shares a launch with others: the same blocks in all maps, whose text is one then."""
    return Tile(1, 1024, 4) if kernel.kind == "map" else tile_of(kernel)


def candidates(kernel: Kernel) -> list[Tile]:
    """What may be faster, for measuring: the rule's tile comes first."""
    first = tile_of(kernel)
    rows, columns, warps = first
    if kernel.kind == "map":
        others = [
            Tile(1, n, w) for n, w in ((512, 4), (1024, 8), (2048, 4), (2048, 8)) if n <= power_of_two(kernel.columns)
        ]
    elif not kernel.on_chip and kernel.kind == "rows":
        others = [Tile(1, PASS // 4, 8), Tile(1, PASS // 2, 16), Tile(1, PASS, 32)]
    else:
        others = [Tile(rows, columns, w) for w in (warps // 2, warps * 2) if 1 <= w <= 32]
        others += [
            Tile(n, columns, warps)
            for n in (rows // 2, rows * 2)
            if 1 <= n <= power_of_two(kernel.rows) and n * columns <= 1 << 14
        ]
    return list(dict.fromkeys([first, *others]))


def _map(kernel: Kernel) -> Tile:
    """Where all is reduced as well, few programs see many blocks, and larger ones have more under way."""
    if any(v.kind == "partial" for v in kernel.stores) and hint(kernel.columns) > 1024:
        return Tile(1, REDUCED, 4)
    block = min(1024, power_of_two(kernel.columns))
    return Tile(1, block, 4 if block >= 512 else 1)


def _rows(kernel: Kernel) -> Tile:
    """Sums that run across memory take several rows, so that what lies together is read together."""
    # several programs of a multiprocessor read while others compute; one alone may find in the cache again what it has
    # read
    if not kernel.on_chip:
        return Tile(1, PASS, 32) if any(v.numel == kernel.numel for v in kernel.stores) else Tile(1, PASS // 4, 8)
    columns = power_of_two(kernel.columns)
    if any(not along_memory(v) for v in kernel.reductions):
        rows = min(power_of_two(kernel.rows), max(32, 4096 // columns), max(1, 16384 // columns))
        most = 16 if any(v.numel == kernel.numel for v in kernel.stores) else 8  # the block stays in registers
        return Tile(rows, columns, max(1, min(most, rows * columns // 1024)))
    if any(v.kind == "partial" for v in kernel.stores):  # in a loop, where smaller blocks leave more under way
        rows = min(power_of_two(kernel.rows), max(1, 1024 // columns))
        return Tile(rows, columns, max(1, rows * columns // 512, min(8, rows * columns // 256)))
    rows = min(power_of_two(kernel.rows), max(1, 4096 // columns))
    return Tile(rows, columns, max(1, min(32, rows * columns // (128 if kernel.rows == 1 else 512))))


def _columns(kernel: Kernel) -> Tile:
    """A sum alone, without what is stored beside it, leaves registers for more elements under way."""
    columns = min(128, power_of_two(kernel.columns))
    elements, warps = (2048, 2) if len(kernel.stores) == 1 else (1024, 4)
    return Tile(min(elements // columns, power_of_two(kernel.rows)), columns, warps)


def stages(nbytes: int, shared: int) -> int:
    """How many blocks of a loop are under way at a time, where the loads of one are nbytes: those of later ones, in
    shared memory, overlap with what is computed of this one."""
    return 3 if 2 * nbytes <= shared - OTHERS else 1
