"""Kernels that do not depend on each other, as one launch: each has a range of the programs.

    @triton.jit
    def part0(block, in0, buffer1, k0): ...

    @triton.jit
    def fused_mul_of_3(p0, p1, p2, p3, p4, p5):
        program = tl.program_id(0)
        if program < 12:  # whose part is it? its buffers and sizes are chosen by a tree of ranges
            start, k0, in0, buffer1 = ...
        part0(program - start, in0, buffer1, k0)

Parts whose text is the same but for sizes and buffers are one function: as many parameters as a network has cost the
time to compile one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thunder.executors.triton_kernels.values import Value
from thunder.kernels.numbers import Scalar
from thunder.kernels.sizes import Atom

ALIGNED = 16


class Member(NamedTuple):
    """text: a function `part` of the number of a block, the buffers, the sizes and the numbers. buffers, sizes,
    numbers: what is passed for them, by their names there. programs: how many blocks there are."""

    text: str
    buffers: dict[str, Value]
    sizes: dict[str, int]
    numbers: dict[str, Atom | Scalar]
    programs: int

    @property
    def names(self) -> list[str]:
        return [*self.buffers, *self.sizes, *self.numbers]


def joined_text(
    name: str, parts: Sequence[Member], interpreted: bool
) -> tuple[str, list[Value], list[Atom | Scalar], int]:
    """The text of a kernel that runs all parts, its buffers, its numbers, and how many programs it has."""
    buffers = {v: f"p{i}" for i, v in enumerate(dict.fromkeys(v for p in parts for v in p.buffers.values()))}
    numbers = list(dict.fromkeys(n for p in parts for n in p.numbers.values()))
    alike: dict[tuple, list[Member]] = {}
    for part in parts:
        alike.setdefault((part.text, *(n % ALIGNED == 0 for n in part.sizes.values())), []).append(part)
    functions, ranges, start = [], [], 0
    for g, group in enumerate(alike.values()):
        functions.append(group[0].text.replace("def part(", f"def part{g}(", 1))
        names, choices = group[0].names, []
        for part in group:
            given = [*(buffers[v] for v in part.buffers.values()), *part.sizes.values(), *part.numbers.values()]
            lines = [f"g{g}_start = {start}"]
            lines += [f"g{g}_{n} = {_text(x, interpreted)}" for n, x in zip(names, given, strict=True)]
            start += part.programs
            choices.append((start, lines))
        call = f"part{g}(program - g{g}_start, {', '.join(f'g{g}_{n}' for n in names)})"
        ranges.append((start, [*_chosen(choices), call]))
    parameters = [*buffers.values(), *(f"{n.name}{': tl.constexpr' if interpreted else ''}" for n in numbers)]
    lines = ["program = tl.program_id(0)", *_chosen(ranges)]
    body = "\n".join(f"    {line}" for line in lines)
    text = "\n\n".join([*functions, f"@triton.jit\ndef {name}({', '.join(parameters)}):\n{body}\n"])
    return text, list(buffers), numbers, start


def _text(x: str | int | Atom | Scalar, interpreted: bool) -> str:
    """A buffer, a size or a number. The interpreter makes float32 of a float that is assigned."""
    if isinstance(x, Scalar) and interpreted:
        return f"tl.full([], {x.name}, tl.float64)"
    return x.name if isinstance(x, Atom | Scalar) else str(x)


def _chosen(ranges: Sequence[tuple[int, list[str]]]) -> list[str]:
    """The lines of the range that a program is in. ranges: the end of each, and its lines."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    first, second = ([f"    {line}" for line in _chosen(half)] for half in (ranges[:middle], ranges[middle:]))
    return [f"if program < {ranges[middle - 1][0]}:", *first, "else:", *second]
