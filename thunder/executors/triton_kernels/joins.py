"""Results that join parts, stored part by part.

Before: a kernel over all of `cat((f(a), g(b)))`, in which each element chooses between f and g. After: one over the
parts, which stores f(a) and g(b) beside each other in the memory of the result, and chooses nothing. The same for what
is computed of joins and paddings inside, as a rotation by half a row is: it is stored in slices in which nothing is
chosen. Places say by themselves what is read there (`values.sources`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from thunder.executors.triton_kernels.values import Place, Program, Value
from thunder.kernels.index import join, split, strides_of
from thunder.kernels.sizes import Extent, hint, quotient

MOST = 16  # parts of a result
PIECES = 4  # of a value that chooses inside
RUN = 64  # bytes that a piece has beside each other in memory, at least


def parts_of(program: Program) -> dict[Value, list[Value]]:
    """The outputs that are stored in parts: each with its values of kind "part", whose `what` is (whole, steps), see
    `place_in_whole`."""
    found: dict[Value, list[Value]] = {}
    for whole in program.outputs:
        leaves = _leaves(whole, ())
        if leaves is not None and 1 < len(leaves := _alike(leaves)) <= MOST:
            found[whole] = [Value("part", (v,), v.shape, v.dtype, (whole, steps)) for v, steps in leaves]
    return found


def place_in_whole(part: Value, place: Place) -> Place:
    """Where in the whole an element of a part lies."""
    for kind, *what in part.what[1]:
        if kind == "shift":
            place = tuple(p + start for p, start in zip(place, what[0], strict=True))
        elif kind == "permute":
            place = tuple(place[d] for d in what[0])
        else:
            place = split(join(place, strides_of(what[0])), what[1])
    return place


_Leaf = tuple[Value, tuple]


def _leaves(v: Value, steps: tuple) -> list[_Leaf] | None:
    """What a value is stored as, and the steps from there to the place in the whole; None where it is no join."""
    if v.kind == "reshape":
        return _leaves(v.operands[0], (("reshape", v.operands[0].shape, v.shape), *steps))
    if v.kind == "permute":
        return _leaves(v.operands[0], (("permute", v.what[0]), *steps))
    if v.kind == "cat":
        found: list[_Leaf] = []
        at = 0
        for operand in v.operands:
            shifted = (("shift", tuple(at if d == v.what else 0 for d in range(len(v.shape)))), *steps)
            found += _leaves(operand, shifted) or [(operand, shifted)]
            at += operand.shape[v.what]
        return found
    if v.kind in ("map", "cast"):
        for d, n in enumerate(v.shape):
            cuts = sorted(_cuts(v, d, {}) - {0, n})
            if cuts and n % (len(cuts) + 1) == 0 and cuts == list(range(n // (len(cuts) + 1), n, n // (len(cuts) + 1))):
                return _sliced(v, steps, d, len(cuts) + 1)
    return None


def _sliced(v: Value, steps: tuple, d: int, count: int) -> list[_Leaf] | None:
    """A value in equal slices; None where they are many or narrow."""
    size = v.shape[d] // count
    shape = (*v.shape[:d], size, *v.shape[d + 1 :])
    if count > PIECES or hint(math.prod(shape[d:])) * v.dtype.bytes < RUN:
        return None
    found = []
    for number in range(count):
        start = tuple(number * size if i == d else 0 for i in range(len(shape)))
        piece = Value(
            "slice",
            (v,),
            shape,
            v.dtype,
            (start, tuple(a + n for a, n in zip(start, shape, strict=True)), (1,) * len(shape)),
        )
        found.append((piece, (("shift", start), *steps)))
    return found


def _alike(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """Large leaves in slices as large as the smallest one, where they can be cut so: one kernel stores all that are of
    one size."""
    least: int | Extent = min((v.numel for v, _ in leaves), key=hint)
    found: list[_Leaf] = []
    for v, steps in leaves:
        count = quotient(v.numel, least)
        even = isinstance(count, int) and count > 1 and isinstance(v.shape[-1], int) and v.shape[-1] % count == 0
        found += (even and _sliced(v, steps, len(v.shape) - 1, count)) or [(v, steps)]
    return found


def _cuts(v: Value, d: int, known: dict) -> set[int]:
    """Where along a dimension of known size a join or a padding inside an elementwise value begins or ends."""
    key = v, d
    if key not in known:
        known[key] = set()
        size = v.shape[d]
        if isinstance(size, int):
            known[key] = {c for c in _found_cuts(v, d, known) if isinstance(c, int) and 0 <= c <= size}
    return known[key]


def _cuts_of_parts(v: Value, d: int, known: dict) -> set[int]:
    """Where a part of what is joined or padded begins or ends, and where its own cuts come to lie."""
    if v.kind == "pad":
        (x,), (low, _) = v.operands, v.what[1][d]
        return {low + c for c in _cuts(x, d, known)} | ({low, low + x.shape[d]} if v.what[1][d] != (0, 0) else set())
    found, at = set(), 0
    for x in v.operands:
        found |= {at + c for c in _cuts(x, d, known)} | ({at} if d == v.what else set())
        at += x.shape[d] if d == v.what else 0
    return found


def _found_cuts(v: Value, d: int, known: dict) -> set[int]:
    kind, what, operands = v.kind, v.what, [x for x in v.operands if isinstance(x, Value)]
    if kind in ("map", "cast"):
        return set().union(*(_cuts(x, d, known) for x in operands if x.shape))
    if kind in ("cat", "pad"):
        return _cuts_of_parts(v, d, known)
    if kind == "slice":
        starts, _, steps = what
        whole = steps[d] == 1 and isinstance(starts[d], int)
        return {c - starts[d] for c in _cuts(operands[0], d, known)} if whole else set()
    if kind == "permute":
        return _cuts(operands[0], what[0][d], known)
    if kind == "broadcast":
        inner = [i for i, n in enumerate(what[1]) if n == d]
        return _cuts(operands[0], inner[0], known) if inner and operands[0].shape[inner[0]] == v.shape[d] else set()
    if kind == "reshape" and d == len(v.shape) - 1 and operands[0].shape and operands[0].shape[-1] == v.shape[d]:
        return _cuts(operands[0], len(operands[0].shape) - 1, known)
    return set()
