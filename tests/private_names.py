"""A rule that `make lint` and the tests check: no file of thunder but `thunder/compat` says a private name of PyTorch.
`python tests/private_names.py` prints those that do.

Private is a module, an attribute or an operator of ATen whose name begins with an underscore, written as code
(`torch._C`, `F._pad`, `aten._conj`), imported, or as a string without spaces (`"torch._dynamo"`). Names that
`thunder/compat` looks up are given by their row: `compat.name`, or `kernel("_conj")`.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_IN_TEXT = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*")


def _chain(node: ast.AST) -> list[str]:
    """`a.b.c` as ["a", "b", "c"]; empty for what is no chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _is_private(parts: list[str]) -> bool:
    return any(p.startswith("_") and not p.startswith("__") for p in parts)


def _names_of_torch(tree: ast.AST) -> dict[str, list[str]]:
    """What a file calls modules and objects of torch's: {"F": ["torch", "nn", "functional"]}."""
    aliases: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname or "torch": a.name.split(".") if a.asname else ["torch"]
                for a in node.names
                if a.name.split(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            aliases |= {a.asname or a.name: [*node.module.split("."), a.name] for a in node.names}
    aliases.setdefault("aten", ["torch", "ops", "aten"])
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (parts := _chain(node.value))
            and parts[0] in aliases
        ):
            aliases[node.targets[0].id] = aliases[parts[0]] + parts[1:]
    return aliases


def private_names(source: str) -> list[tuple[int, str]]:
    """(line, name) of each private name of PyTorch's that a file says."""
    tree = ast.parse(source)
    ours, private = _names_of_torch(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            private |= {
                (node.lineno, a.name)
                for a in node.names
                if a.name.startswith("torch.") and _is_private(a.name.split("."))
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            private |= {
                (node.lineno, f"{node.module}.{a.name}")
                for a in node.names
                if _is_private([*node.module.split("."), a.name])
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "thunder.compat":
            private |= {(node.lineno, f"{a.name} looked up at import") for a in node.names if a.name != "names"}
        elif (
            isinstance(node, ast.Attribute)
            and (parts := _chain(node))
            and parts[0] in ours
            and _is_private([*ours[parts[0]], *parts[1:]])
        ):
            private.add((node.lineno, ".".join([*ours[parts[0]], *parts[1:]])))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _IN_TEXT.fullmatch(node.value):
            private.add((node.lineno, node.value))
    return sorted(private)


def offenders() -> list[str]:
    paths = [p for p in sorted((ROOT / "thunder").rglob("*.py")) if ROOT / "thunder" / "compat" not in p.parents]
    return [f"{p.relative_to(ROOT)}:{line}: {name}" for p in paths for line, name in private_names(p.read_text())]


if __name__ == "__main__":
    refused = offenders()
    print(
        "\n".join(
            refused + [f"{len(refused)} private names of PyTorch's outside of thunder/compat"]
            if refused
            else ["private names: all in thunder/compat"]
        )
    )
    sys.exit(bool(refused))
