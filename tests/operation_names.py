"""Sources name operations that exist: `ltorch.add`, `prims.add`, and the ids that tables of executors have as texts,
`"prims.add"`. pyright finds wrong attributes by the stubs, too, where it runs; this takes a second, and reads all of
thunder.

python tests/operation_names.py
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = {
    name: set(re.findall(r"^(\w+): Symbol$", (ROOT / f"thunder/ops/{name}.pyi").read_text(), re.MULTILINE))
    for name in ("ltorch", "prims")
}
ID = re.compile(r"(ltorch|prims)\.(\w+)")
DECLARED = re.compile(r'\bid="((?:ltorch|prims)\.\w+)"')  # operations that are in no namespace


def wrong_names(text: str) -> list[str]:
    """The attributes of namespaces of operations, in a source that imports these, that are no operations, and the texts
    that are ids of none."""
    tree = ast.parse(text)
    imported = {
        alias.asname or alias.name: NAMESPACES[alias.name]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "thunder.ops"
        for alias in node.names
        if alias.name in NAMESPACES
    }
    references = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
        if node.attr not in imported[node.value.id]
    ]
    formatted = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    references += [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in formatted
        if (matched := ID.fullmatch(node.value)) is not None
        if matched[2] not in NAMESPACES[matched[1]] and node.value not in declared()
    ]
    return [f"{line}: {name}" for line, name in sorted(references)]


@functools.cache
def declared() -> set[str]:
    return {one for path in (ROOT / "thunder/ops").rglob("*.py") for one in DECLARED.findall(path.read_text())}


def main() -> int:
    wrong = [
        f"{path.relative_to(ROOT)}:{wrong}"
        for path in sorted((ROOT / "thunder").rglob("*.py"))
        for wrong in wrong_names(path.read_text())
    ]
    print("\n".join(wrong) or "operation names: all exist")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
