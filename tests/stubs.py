"""Stubs of the modules whose names are looked up when they are first used: a type checker sees where they come from.

python tests/stubs.py writes them. Which names there are stands in the modules.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from thunder.ops import LTORCH, PRIMS

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = ("thunder.ops.ltorch", "thunder.ops.prims")
MODULES = ("thunder", "thunder.distributed", "thunder.core.transforms", "thunder.core.transform_common")


def stub(module: str) -> tuple[Path, str]:
    """Where the stub of a module belongs, and its text."""
    imported = importlib.import_module(module)
    homes = {**imported._FROM, **getattr(imported, "_OF_LIGHTNING", {})}
    path = Path(imported.__file__).with_suffix(".pyi")
    submodules = getattr(imported, "_MODULES", ())
    lines = sorted(f"from {home} import {name} as {name}" for home, names in homes.items() for name in names)
    lines += [f"from {module} import {name} as {name}" for name in submodules]
    lines += [
        f"{name}: {kind}"
        for name, kind in (("__version__", "str"), ("__all__", "list[str]"))
        if hasattr(imported, name)
    ]
    return path, f'"""Made by tests/{Path(__file__).name}."""\n\n' + "\n".join(lines) + "\n"


def operations(module: str) -> tuple[Path, str]:
    """Where the stub of a namespace of operations belongs, and its text."""
    namespace = importlib.import_module(module)
    names = {"ltorch": LTORCH, "prims": PRIMS}[module.rpartition(".")[2]]
    head = f'"""Made by tests/{Path(__file__).name} with PyTorch {".".join(torch.__version__.split(".")[:2])}."""\n\n'
    rows = "".join(f"{name}: Symbol\n" for name in sorted(names) if not names[name].declared_outside)
    return Path(namespace.__file__).with_suffix(".pyi"), head + "from thunder.core.symbol import Symbol\n\n" + rows


if __name__ == "__main__":
    for path, text in (*map(stub, MODULES), *map(operations, NAMESPACES)):
        path.write_text(text)
        print(path.relative_to(ROOT))
