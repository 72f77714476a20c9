"""Names that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def names_from(
    module: str, homes: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module, for names that have their home in others, {home: names}, and for a
    package's own submodules.

    A name that is both is the one of its home. Raises AttributeError for other names, and the error of an import that
    fails.
    """
    home_of = {name: home for home, names in (homes or {}).items() for name in names}
    own = vars(sys.modules[module])

    def __getattr__(name: str) -> Any:
        if name in home_of:
            value = getattr(importlib.import_module(home_of[name]), name)
        elif "__path__" in own and not name.startswith("_") and importlib.util.find_spec(f"{module}.{name}"):
            value = importlib.import_module(f"{module}.{name}")
        else:
            # with name= and obj= Python's traceback names a near one
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module])
        own[name] = value
        return value

    def __dir__() -> list[str]:
        if "__all__" in own:
            return list(own["__all__"])
        return sorted(
            {
                *own,
                *home_of,
                *(m.name for m in pkgutil.iter_modules(own.get("__path__", ())) if not m.name.startswith("_")),
            }
        )

    return __getattr__, __dir__
