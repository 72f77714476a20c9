"""docs/dashboard.md and its picture, from the JSON files of results under docs/data. A test says where they are not
current.

python benchmarks/dashboard.py    # writes them
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE, PICTURE = DOCS / "data" / "zoo_h200.json", DOCS / "dashboard.md", DOCS / "zoo_h200.svg"
LEFT, WIDE, ROW = 270, 460, 16  # pixels: of the names, of the ratio 1, of a row


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def picture(rows: Sequence[dict]) -> str:
    """Bars of the ratio of thunder's step to torch.compile's, with its interval, the smallest first."""
    rows = sorted(rows, key=lambda row: row["to_torch_compile"][0])
    height = ROW * len(rows) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 110} {height}" font-size="11" '
        'font-family="system-ui, sans-serif">',
        f'<rect width="{LEFT + WIDE + 110}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="14" fill="#6b7685">step of thunder / step of torch.compile</text>',
    ]
    for i, row in enumerate(rows):
        y, (ratio, low, high) = 24 + ROW * i, row["to_torch_compile"]
        color = "#2f6fde" if ratio <= 1 else "#b3362b"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 11}" text-anchor="end" fill="#1c2430">{escape(row["program"])}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{WIDE * ratio:.1f}" height="{ROW - 5}" fill="{color}"/>',
            f'<path d="M{LEFT + WIDE * low:.1f} {y + 7.5}H{LEFT + WIDE * high:.1f}" stroke="#1c2430"/>',
            f'<text x="{LEFT + WIDE * high + 6:.1f}" y="{y + 11}" fill="#1c2430">{ratio:.2f}</text>',
        ]
    lines.append(f'<path d="M{LEFT + WIDE} 20V{height - 14}" stroke="#6b7685" stroke-dasharray="4 3"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def page(data: dict) -> str:
    """The picture, and a table with all numbers."""
    rows = data["rows"]
    ratios = [row["to_torch_compile"][0] for row in rows]
    eager = [row["step_ms"]["thunder"] / row["step_ms"]["eager"] for row in rows]
    peaks = [row["peak_to_torch_compile"] for row in rows]
    head = (
        "| program | eager | torch.compile | thunder | thunder / torch.compile | kernels, torch.compile | "
        "kernels, thunder | peak memory / torch.compile | first call, torch.compile | first call, thunder | "
        "with tiers | second process |"
    )
    lines = [
        "# Dashboard",
        "",
        f"A training step of {len(rows)} programs on an {data['machine']}, {data['date']}: milliseconds of a step and "
        "of its kernels, and seconds to the first result with empty caches. A ratio below 1 means that thunder is "
        "faster, or takes less memory. [Performance](performance.md) says how this is measured, and why some rows are "
        "slow.",
        "",
        f"Geometric means: {geometric_mean(eager):.2f} of eager's step, {geometric_mean(ratios):.2f} of "
        f"torch.compile's, {geometric_mean(peaks):.2f} of its peak memory.",
        "",
        "![Step of thunder to that of torch.compile, by program](zoo_h200.svg)",
        "",
        head,
        "|---" * 12 + "|",
    ]
    for row in rows:
        step, kernels, first = row["step_ms"], row["kernels_ms"], row["first_call_s"]
        ratio, low, high = row["to_torch_compile"]
        cells = [
            row["program"], step["eager"], step["torch.compile"], step["thunder"],
            f"{ratio:.2f} [{low:.2f}, {high:.2f}]", kernels["torch.compile"], kernels["thunder"],
            f"{row['peak_to_torch_compile']:.2f}", first["torch.compile"], first["thunder"], first["thunder, tiers"],
            first["thunder, second process"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        f"The numbers are in [data/zoo_h200.json](data/zoo_h200.json), measured by `{data['command']}`. "
        "`python benchmarks/dashboard.py` writes this page.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    measured = json.loads(DATA.read_text())
    PICTURE.write_text(picture(measured["rows"]))
    PAGE.write_text(page(measured))
