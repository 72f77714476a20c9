"""`import thunder.torch as ltorch`: the operations with PyTorch's semantics, by name."""

from __future__ import annotations

from thunder.ops import LTORCH
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

__all__ = ["to_torch_dtype", "to_torch_device", *LTORCH]


def _register_custom_op(custom_op):
    """The operation for a result of torch.library.custom_op. Calling the operator needs no registration."""
    from thunder.ops.opaque import symbol_for

    return symbol_for(custom_op._opoverload)


def __getattr__(name: str):
    try:
        return LTORCH[name]
    except KeyError:
        raise AttributeError(f"thunder.torch has no operation {name!r}") from None


def __dir__():
    return __all__
