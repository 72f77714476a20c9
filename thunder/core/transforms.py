"""`thunder.core.transforms`: the names by which programs import derivatives, a lazy re-export of `thunder.transforms.autodiff`."""

from __future__ import annotations


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    from thunder.transforms import autodiff

    return getattr(autodiff, name)
