"""How long functions and files are, how many branches a function has, and what has no docstring.

    python tests/sizes.py        # lines by folder, and what is above a bound
    python tests/sizes.py -q     # only functions above a bound

Lines are those of the code, without the docstring. A branch is what may or may not run: `if`, a loop, an `except`, a conditional expression, an operand of `and` and `or`,
a `for` or `if` of a comprehension, a case. Those of a function inside count for that one.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LINES, BRANCHES, FILE, SHORT = 60, 25, 500, 10
# folders in which each class, and each function that is not short, has a docstring, as in the files beside them
DOCUMENTED = (
    "analysis", "cache", "capture", "compat", "core", "distributed", "dynamo", "executors", "extend", "inspect", "interpreter",
    "kernels", "ops", "programs", "quantization", "runtime", "transforms",
)  # fmt: skip
# those that are left from before there was the rule
LEFT = {
    "thunder/executors/cross_entropy.py register_cross_entropy",
}
_ONE = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Function(NamedTuple):
    path: str
    line: int
    name: str
    lines: int
    branches: int

    @property
    def is_above(self) -> bool:
        return self.lines > LINES or self.branches > BRANCHES


def _branches(node: ast.AST) -> int:
    count = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.Lambda)):
            continue
        count += isinstance(child, _ONE) + _branches(child)
        if isinstance(child, ast.BoolOp):
            count += len(child.values) - 1
        elif isinstance(child, ast.comprehension):
            count += 1 + len(child.ifs)
    return count


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _FUNCTIONS):
            documented = ast.get_docstring(node) is not None
            lines = node.end_lineno - node.lineno + 1
            lines -= node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
            yield Function(str(path.relative_to(ROOT)), node.lineno, node.name, lines, _branches(node))


def sources() -> list[Path]:
    return sorted((ROOT / "thunder").rglob("*.py"))


def above() -> list[Function]:
    return sorted((f for path in sources() for f in functions(path) if f.is_above), key=lambda f: -f.lines)


def undocumented(path: Path) -> Iterator[str]:
    """path:line name of each class, and each function of more than `SHORT` lines, without a docstring; those inside of
    functions, and rules, which are called `_`, are left out."""
    pending: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            pending += node.body
        is_short = isinstance(node, _FUNCTIONS) and node.end_lineno - node.lineno < SHORT
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and not is_short and ast.get_docstring(node) is None:
            if node.name != "_" and not node.name.startswith("__"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def _print_lines() -> None:
    lines: Counter[str] = Counter()
    for path in sources():
        count = len(path.read_text().splitlines())
        lines[str(path.relative_to(ROOT).parent) if path.parent.parent != ROOT else "thunder/*.py"] += count
        if count > FILE:
            print(f"{count:6} lines  {path.relative_to(ROOT)}")
    print("\n".join(f"{count:6} {folder}" for folder, count in sorted(lines.items())))
    print(f"{lines.total():6} in all")


if __name__ == "__main__":
    if "-q" not in sys.argv:
        _print_lines()
    for one in above():
        print(f"{one.lines:6} lines, {one.branches:2} branches  {one.path}:{one.line} {one.name}")
