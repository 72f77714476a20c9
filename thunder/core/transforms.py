"""`thunder.core.transforms`: the names by which programs import derivatives, lazy re-exports."""

from __future__ import annotations


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    import importlib

    home = "thunder.functional_transforms" if name in ("grad", "value_and_grad", "vjp", "jvp", "vmap") else "thunder.transforms.autodiff"
    return getattr(importlib.import_module(home), name)
