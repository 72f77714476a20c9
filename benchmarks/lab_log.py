"""docs/lab_log.md and its plots, from docs/data/lab_log.json. A test says where they are not current.

An experiment has a question, a result, and rows: a label and a number for each column, or None. plot: the columns that
its picture shows.

python benchmarks/lab_log.py    # writes them
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE, PICTURES = DOCS / "data" / "lab_log.json", DOCS / "lab_log.md", DOCS / "lab_log"
BARS, BAR, LETTER = 400, 11, 6  # pixels: the length of the longest bar, the height of a bar, the width of a letter
COLORS = ("#2f6fde", "#94a3b8", "#0f9d76", "#d97706", "#7c3aed", "#b3362b")


def picture(experiment: dict) -> str:
    """A group of bars for each row, with one bar for each plotted column."""
    columns, rows = experiment["plot"], experiment["rows"]
    chosen = [experiment["columns"].index(column) + 1 for column in columns]
    most = max(row[i] for row in rows for i in chosen if row[i] is not None)
    step, left = BAR * len(columns) + 7, 20 + LETTER * max(len(row[0]) for row in rows)
    height, width = 30 + 15 * len(columns) + step * len(rows), left + BARS + 70
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11" role="img" '
        f'aria-label="{escape(experiment["title"])}" font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="15" fill="#475569">{escape(experiment["unit"])}</text>',
    ]
    for n, column in enumerate(columns):
        lines += [
            f'<rect x="{left}" y="{22 + 15 * n}" width="9" height="9" fill="{COLORS[n]}"/>',
            f'<text x="{left + 14}" y="{30 + 15 * n}" fill="#1c2430">{escape(column)}</text>',
        ]
    for r, row in enumerate(rows):
        y = 26 + 15 * len(columns) + step * r
        middle = y + BAR * len(columns) / 2 + 4
        lines.append(f'<text x="{left - 8}" y="{middle}" text-anchor="end" fill="#1c2430">{escape(row[0])}</text>')
        for n, i in enumerate(chosen):
            if row[i] is not None:
                length = BARS * row[i] / most
                lines += [
                    f'<rect x="{left}" y="{y + BAR * n}" width="{length:.1f}" height="{BAR - 2}" fill="{COLORS[n]}"/>',
                    f'<text x="{left + length + 5:.1f}" y="{y + BAR * n + 9}" fill="#475569">{row[i]:g}</text>',
                ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def file_of(experiment: dict) -> str:
    """The name of an experiment's picture."""
    return re.sub(r"\W+", "_", experiment["title"].lower()) + ".svg"


def page(experiments: Sequence[dict]) -> str:
    """All experiments by group: question, result, picture, table."""
    lines = [
        "# Lab log",
        "",
        "The experiments behind decisions. Each has a question, a result, the machine, a plot and its numbers; lower "
        "is better unless a column says otherwise. [Performance](performance.md) has measurements of whole programs.",
        "",
        "The numbers are in [data/lab_log.json](data/lab_log.json); `python benchmarks/lab_log.py` writes this page.",
    ]
    group = ""
    for experiment in experiments:
        if experiment["group"] != group:
            group = experiment["group"]
            lines += ["", f"## {group}"]
        lines += ["", f"### {experiment['title']}", "", *_text(experiment)]
    return "\n".join(lines) + "\n"


def _text(experiment: dict) -> Iterator[str]:
    yield f"**{experiment['question']}** {experiment['result']}"
    yield ""
    yield f"![{experiment['title']}](lab_log/{file_of(experiment)})"
    yield ""
    code = f"[`{experiment['code']}`](../{experiment['code']})" if experiment["code"] else "Not in thunder any more"
    yield f"{code}. {experiment['machine']}. Numbers are in {experiment['unit']}."
    yield ""
    yield f"| | {' | '.join(experiment['columns'])} |"
    yield "|---" * (len(experiment["columns"]) + 1) + "|"
    for label, *numbers in experiment["rows"]:
        yield f"| {label} | {' | '.join('' if n is None else f'{n:g}' for n in numbers)} |"


def pictures(experiments: Sequence[dict]) -> dict[str, str]:
    """The pictures by file name."""
    return {file_of(experiment): picture(experiment) for experiment in experiments}


if __name__ == "__main__":
    measured = json.loads(DATA.read_text())["experiments"]
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures(measured).items():
        (PICTURES / name).write_text(text)
    PAGE.write_text(page(measured))
