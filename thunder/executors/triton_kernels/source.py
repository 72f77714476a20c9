"""The text of a kernel, with its buffers, sizes and launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thunder.executors.triton_kernels.parts import Member, joined_text
from thunder.executors.triton_kernels.values import Value
from thunder.kernels.numbers import Scalar
from thunder.kernels.sizes import Atom, Extent

HEADER = "import triton\nimport triton.language as tl\n"


class Source(NamedTuple):
    """name, text: a function of the buffers (values, in order), named after its operations for profiles. helpers: names
    of functions that it calls.

    loads, stores: by value, the keys of the indices at which it is read, and written.

    sizes: the numbers that the function takes after the buffers. grid: numbers of programs, as ints or as Python text
    of sizes. limits: sizes that have to fit into the integers of the kernel's indices. part: the kernel for a launch
    that it shares with others.
    """

    name: str
    text: str
    buffers: tuple[Value, ...]
    grid: tuple[int | str, int | str]
    warps: int
    helpers: tuple[str, ...]
    loads: dict[Value, set]
    stores: dict[Value, tuple]
    sizes: tuple[Atom | Scalar, ...] = ()
    limits: tuple[Extent, ...] = ()
    part: Member | None = None


def joined(sources: Sequence[Source], interpreted: bool) -> Source:
    """Parts of one launch as one kernel."""
    if len(sources) == 1:
        return sources[0]
    parts = [s.part for s in sources if s.part is not None]
    name = f"{sources[0].name}_of_{len(parts)}"
    text, buffers, numbers, programs = joined_text(name, parts, interpreted)
    loads: dict[Value, set] = {}
    for n, s in enumerate(sources):
        for v, places in s.loads.items():
            # a part may not write over a buffer that another one reads
            loads[v] = places if v not in loads else {*loads[v], *places, n}
    helpers = tuple(dict.fromkeys(h for s in sources for h in s.helpers))
    stores = {v: place for s in sources for v, place in s.stores.items()}
    warps = max(s.warps for s in sources)
    limits = tuple(dict.fromkeys(n for s in sources for n in s.limits))
    return Source(name, text, tuple(buffers), (programs, 1), warps, helpers, loads, stores, tuple(numbers), limits)
