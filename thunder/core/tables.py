"""Tables of text: the one way in which reports print rows."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[int] = ()) -> str:
    """Rows of cells below a head, in columns as wide as their widest cell. right: columns of numbers, aligned right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def aligned(column: int, cell: str) -> str:
        return cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])

    return "\n".join("  ".join(aligned(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines)
