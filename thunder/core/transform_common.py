"""`thunder.core.transform_common`: names by which programs import the base of transforms and two passes, lazy re-exports."""

from __future__ import annotations

_HOMES = {"Transform": "thunder.transforms.base", "dce": "thunder.transforms.dce", "cse": "thunder.transforms.cse"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
