"""Sources name operations that exist: `ltorch.add`, `prims.add`. pyright finds wrong names by the stubs, too, where it
runs; this takes a second, and reads all of thunder.

python tests/operation_names.py
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = {
    name: set(re.findall(r"^(\w+): Symbol$", (ROOT / f"thunder/ops/{name}.pyi").read_text(), re.MULTILINE))
    for name in ("ltorch", "prims")
}


def wrong_names(text: str) -> list[str]:
    """The attributes of namespaces of operations, in a source that imports these, that are no operations."""
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
    return [f"{line}: {name}" for line, name in sorted(references)]


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
