"""`thunder.core.transforms`: the names by which programs import derivatives, lazy re-exports."""

from __future__ import annotations


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    import importlib

    home = next((module for module, names in _HOMES.items() if name in names), "thunder.transforms.autodiff")
    return getattr(importlib.import_module(home), name)


_HOMES = {
    "thunder.functional_transforms": ("grad", "value_and_grad", "vjp", "jvp", "vmap"),
    "thunder.transforms.register_grad": ("register_grad", "register_augmented_forward", "register_backward", "VJPDual"),
    "thunder.compiled": ("add_transform",),
}
