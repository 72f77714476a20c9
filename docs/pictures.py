"""The pictures of the design's chapters, drawn from the tables below. A test says where they are not current.

python docs/pictures.py    # writes them
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent / "design"
WIDE, HIGH, GAP, LINE = 172, 58, 52, 34  # pixels: of a box, between boxes of a row, between rows
STYLE = (
    ".t{font:600 14px system-ui,sans-serif;text-anchor:middle;fill:#0f172a}"
    ".s{font:11px system-ui,sans-serif;text-anchor:middle;fill:#334155}"
    ".n{font:italic 11px system-ui,sans-serif;text-anchor:middle;fill:#475569}"
)
COLORS = {"data": "#ffffff", "step": "#e0f2fe", "program": "#dcfce7", "check": "#fef9c3", "refusal": "#fee2e2"}


class Box(NamedTuple):
    """kind: a key of COLORS. column, row: its position in the grid."""

    column: float
    row: float
    kind: str
    title: str
    text: str = ""


class Arrow(NamedTuple):
    """From one box to another, by their numbers, with a note beside it."""

    start: int
    end: int
    note: str = ""


class Picture(NamedTuple):
    description: str
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


PICTURES = {
    "effects": Picture(
        "A program reads through an overlay of its writes. The computation ends with writes to tensors; the epilogue "
        "applies all others.",
        [
            Box(0, 0.5, "data", "objects outside", "unchanged by capture"),
            Box(1, 0, "check", "overlay", "writes so far"),
            Box(1, 1, "step", "the program", "reads and writes"),
            Box(2, 0, "program", "epilogue", "attributes, items, grads"),
            Box(2, 1, "program", "computation", "copy_ into tensors, last"),
        ],
        [Arrow(0, 1), Arrow(2, 1), Arrow(1, 2), Arrow(1, 3), Arrow(2, 4)],
    ),
    "decisions": Picture(
        "A branch on a tensor is a check in the program. Where the answer differs, the call leaves for the program of "
        "the other path.",
        [
            Box(0, 0.5, "program", "operations", "t0 = sum(x)"),
            Box(1, 0.5, "check", "check_decision", "t0 > 0 as in capture?"),
            Box(2, 0, "program", "rest of this path", "then results and writes"),
            Box(2, 1, "program", "the other path", "starts as if nothing had run"),
            Box(3, 1, "refusal", "the original function", "after four paths in vain"),
        ],
        [Arrow(0, 1), Arrow(1, 2, "yes"), Arrow(1, 3, "no"), Arrow(3, 4)],
    ),
    "sizes": Picture(
        "The first value of a size is a constant. A second value makes the size symbolic, and relations become guards.",
        [
            Box(0, 0, "data", "call 1: x of 8", ""),
            Box(1, 0, "program", "program 1", "8 is a constant"),
            Box(0, 1, "data", "call 2: x of 13", ""),
            Box(1, 1, "program", "program 2", "i0 = x.shape[0]"),
            Box(2, 1, "check", "guards", "relations such as i0 > 4"),
            Box(3, 1, "data", "calls of other sizes", "program 2, or a branch"),
        ],
        [Arrow(0, 1), Arrow(2, 3), Arrow(1, 3, "differs"), Arrow(3, 4), Arrow(4, 5)],
    ),
    "derivatives": Picture(
        "Each operation is differentiated by its rule. The joint trace is cut into a forward and a backward.",
        [
            Box(0, 0.5, "program", "operations", "as captured"),
            Box(1, 0.5, "step", "rules", "result, then cotangents"),
            Box(2, 0.5, "program", "joint trace", "forward and backward"),
            Box(3, 0, "program", "forward", "returns saved values"),
            Box(3, 1, "program", "backward", "a node of autograd"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(2, 3, "cut"), Arrow(2, 4)],
    ),
    "memory": Picture(
        "A minimum cut of the joint trace decides which values the backward finds in memory; others are recomputed.",
        [
            Box(0, 0.5, "program", "joint trace", "values by bytes and cost"),
            Box(1, 0.5, "step", "save plan", "a minimum cut"),
            Box(2, 0, "data", "saved", "kept from the forward"),
            Box(2, 1, "step", "recomputed", "before their first use"),
            Box(3, 0.5, "program", "backward", "writes over what dies"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(1, 3), Arrow(2, 4), Arrow(3, 4)],
    ),
    "fusion": Picture(
        "Neighbouring operations are grouped into regions. Each region is compiled once by content, or stays with "
        "PyTorch where its kernels are predicted to be slower.",
        [
            Box(0, 0.5, "program", "operations", "behind dispatch"),
            Box(1, 0.5, "step", "regions", "no cycles, no effects inside"),
            Box(2, 0, "check", "cost model", "kernels beside PyTorch's"),
            Box(3, 0, "program", "kernels", "compiled once by content"),
            Box(2, 1, "program", "PyTorch's operations", "one by one"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(2, 3, "faster"), Arrow(2, 4, "slower")],
    ),
    "graphs": Picture(
        "The first call runs line by line, the second one records regions as graphs, later ones replay them.",
        [
            Box(0, 0, "program", "call 1", "line by line"),
            Box(1, 0, "step", "call 2", "regions are recorded"),
            Box(2, 0, "check", "later calls", "addresses as recorded?"),
            Box(3, 0, "program", "replay", "one launch for a region"),
            Box(3, 1, "step", "record again", "at most eight a region"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(2, 3, "yes"), Arrow(2, 4, "no")],
    ),
    "tiers": Picture(
        "First calls run PyTorch's kernels while fused kernels compile. Numbers of calls decide, not times.",
        [
            Box(0, 0, "program", "calls 1 to 4", "PyTorch's kernels"),
            Box(1, 0, "program", "from call 5", "fused kernels"),
            Box(2, 0, "program", "later", "graphs, launch loops"),
            Box(0, 1, "step", "background", "kernels are compiled"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(0, 3), Arrow(3, 1, "ready")],
    ),
    "quantization": Picture(
        "A quantized weight is an operation in front of its layer. For few rows one kernel reads the codes.",
        [
            Box(0, 0.5, "data", "codes and scales", "int8, int4, NF4, float8"),
            Box(1, 0.5, "step", "dequantize", "an operation"),
            Box(2, 0, "program", "few rows", "one kernel with the layer"),
            Box(2, 1, "program", "many rows", "and gradients: the weight first"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(1, 3)],
    ),
    "programs_on_disk": Picture(
        "A file holds guards and text. Another process asks the same questions of its own objects, and checks the text "
        "word by word.",
        [
            Box(0, 0.5, "program", "first process", "guards and computation"),
            Box(1, 0.5, "data", "file", "text, signed"),
            Box(2, 0, "check", "guards asked again", "of this process's objects"),
            Box(2, 1, "check", "text checked", "operators of a list"),
            Box(3, 0.5, "program", "the same program", "without capture"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(1, 3), Arrow(2, 4), Arrow(3, 4)],
    ),
    "verification": Picture(
        "Declarations are compared in the first call. verify runs eager beside every operation.",
        [
            Box(0, 0, "data", "meta=, fakes, executors", "declared by users"),
            Box(1, 0, "check", "first call", "types, aliases, writes"),
            Box(2, 0, "program", "later calls", "the printed program alone"),
            Box(0, 1, "data", "thunder.verify", "inputs of eager"),
            Box(1, 1, "check", "each operation", "beside eager and float64"),
            Box(2, 1, "refusal", "the first difference", "with the user's line"),
        ],
        [Arrow(0, 1), Arrow(1, 2), Arrow(3, 4), Arrow(4, 5)],
    ),
}  # fmt: skip


def draw(picture: Picture) -> str:
    """A picture as SVG: boxes in a grid, and straight arrows between their nearest sides."""
    columns, rows = max(b.column for b in picture.boxes) + 1, max(b.row for b in picture.boxes) + 1
    width, height = int(columns * (WIDE + GAP) - GAP + 24), int(rows * (HIGH + LINE) - LINE + 24)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(picture.description)}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 10 5 0 10z" fill="#475569"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="10" fill="#f8fafc"/>',
    ]
    corners = [(12 + b.column * (WIDE + GAP), 12 + b.row * (HIGH + LINE)) for b in picture.boxes]
    for arrow in picture.arrows:
        (x, y), (u, v) = corners[arrow.start], corners[arrow.end]
        if x == u:  # below or above, beside the arrow that comes back
            aside = WIDE / 2 + (14 if y < v else -14)
            start, end = (x + aside, y + HIGH * (y < v)), (u + aside, v + HIGH * (y > v))
        else:
            start, end = (x + WIDE * (x < u), y + HIGH / 2), (u + WIDE * (x > u), v + HIGH / 2)
        lines.append(
            f'<path d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" stroke="#475569" marker-end="url(#a)"/>'
        )
        if arrow.note:
            at = (start[0] + end[0]) / 2 + (26 if x == u else 0), (start[1] + end[1]) / 2 + (4 if x == u else -9)
            lines.append(f'<text class="n" x="{at[0]:g}" y="{at[1]:g}">{escape(arrow.note)}</text>')
    for box, (x, y) in zip(picture.boxes, corners, strict=True):
        middle = x + WIDE / 2
        lines += [
            f'<rect x="{x:g}" y="{y:g}" width="{WIDE}" height="{HIGH}" rx="7" fill="{COLORS[box.kind]}" '
            'stroke="#64748b"/>',
            f'<text class="t" x="{middle:g}" y="{y + (26 if box.text else 34):g}">{escape(box.title)}</text>',
            f'<text class="s" x="{middle:g}" y="{y + 44:g}">{escape(box.text)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (DIRECTORY / f"{name}.svg").write_text(draw(picture))
