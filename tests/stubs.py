"""Stubs of the modules whose names are imported when they are first used: a type checker sees where they come from.

python tests/stubs.py writes them. Which names there are stands in the modules.
"""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("thunder", "thunder.distributed", "thunder.core.transforms", "thunder.core.transform_common")


def stub(module: str) -> tuple[Path, str]:
    """Where the stub of a module belongs, and its text."""
    found = importlib.import_module(module)
    homes = {**found._FROM, **getattr(found, "_OF_LIGHTNING", {})}
    path = Path(found.__file__).with_suffix(".pyi")
    submodules = getattr(found, "_MODULES", ())
    lines = sorted(f"from {home} import {name} as {name}" for home, names in homes.items() for name in names)
    lines += [f"from {module} import {name} as {name}" for name in submodules]
    lines += [
        f"{name}: {kind}" for name, kind in (("__version__", "str"), ("__all__", "list[str]")) if hasattr(found, name)
    ]
    return path, f'"""Made by tests/{Path(__file__).name}."""\n\n' + "\n".join(lines) + "\n"


if __name__ == "__main__":
    for path, text in map(stub, MODULES):
        path.write_text(text)
        print(path.relative_to(ROOT))
