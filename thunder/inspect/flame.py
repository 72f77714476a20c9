"""The flame graph of a profile: modules as bars, each below the module that it is in, as wide as its share of time."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from thunder.inspect.profile import Profile

LEAST = 0.002  # of the whole width; narrower bars are left out
ROW = 1.6  # em


def flame(measured: Profile) -> Iterator[str]:
    """HTML of the graph, the modules in the order in which they run."""
    seconds = _by_path(measured)
    total = seconds[""]
    if not total or len(seconds) == 1:
        return
    children: dict[str, list[str]] = {}
    for path in seconds:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    bars = list(_bars("", 0, 0.0, seconds, children))
    yield f'<div class="flame" style="height:{ROW * (1 + max(row for row, *_ in bars)):.1f}em">'
    for row, left, width, path in bars:
        name, took = path.rpartition(".")[2] or "all", f"{1e3 * seconds[path]:.3f} ms, {width:.1%}"
        style = f"left:{100 * left:.3f}%;width:{100 * width:.3f}%;top:{ROW * row:.1f}em"
        yield f'<div style="{style}" title="{escape(path or name)}: {took}">{escape(name)} <small>{took}</small></div>'
    yield "</div>"


def _by_path(measured: Profile) -> dict[str, float]:
    """Seconds by module path; "" is all that was measured."""
    known = {share.key: share.seconds for share in measured.by_module() if share.key}
    by_path = {"": measured.seconds}
    for cost in measured.costs:
        names = (cost.module or "").split(".")
        for i in range(1, len(names) + 1):
            if (path := ".".join(names[:i])) in known:
                by_path.setdefault(path, known[path])
    return {**by_path, **known}


def _bars(
    path: str, row: int, left: float, seconds: dict[str, float], children: dict[str, list[str]]
) -> Iterator[tuple[int, float, float, str]]:
    """(row, left, width, path) of a module and of those in it, in shares of the whole width."""
    yield row, left, seconds[path] / seconds[""], path
    for child in children.get(path, ()):
        width = seconds[child] / seconds[""]
        if width >= LEAST:
            yield from _bars(child, row + 1, left, seconds, children)
        left += width
