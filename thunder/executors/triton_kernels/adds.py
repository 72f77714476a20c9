"""What is added at places that tensors name: `a.index_add(0, index, source)` is a copy of `a`, to which a later kernel
adds the elements of the source, each by one atomic operation, where it computes them.

The order of such additions is not known, as in PyTorch's kernels; what PyTorch adds up in a known order it does itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.executors.triton_kernels.values import Program, Value, in_order


def start_and_add(v: Value, home: Value | None) -> tuple[Value, Value]:
    """Of a value of kind "added", what is stored first, of kind "part", and the value of kind "add" that a later kernel
    computes and adds to it: what is added, as large as the source. home: the part of a result where it lies, if it has
    no memory of its own."""
    a, source, *indices = v.operands
    start = Value("part", (a,), v.shape, v.dtype, home.what if home is not None else (v, ()))
    return start, Value("add", (source, *indices), source.shape, v.dtype, (v.what, start))


def at_home(program: Program, parts: Mapping[Value, Sequence[Value]]) -> dict[Value, Value]:
    """The values of kind "added" that are read as parts of a result alone: they are added up there."""
    found: dict[Value, Value] = {}
    for part in (p for of_whole in parts.values() for p in of_whole if p.operands[0].kind == "added"):
        (v,) = part.operands
        others = [p.operands[0] for of_whole in parts.values() for p in of_whole if p is not part]
        if v not in in_order([*others, *(o for o in program.outputs if o not in parts)]):
            found[v] = part
    return found
