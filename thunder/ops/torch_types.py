"""thunder's dtypes and devices as torch's, and back."""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core.devices import Device, to_device
from thunder.core.dtypes import INTEGER, all_dtypes, dtype, to_dtype

_TO_TORCH: dict[dtype, torch.dtype] = {
    d: t for d in all_dtypes if isinstance(t := getattr(torch, d.torch_name, None), torch.dtype)
}
_FROM_TORCH: dict[torch.dtype, dtype] = {t: d for d, t in _TO_TORCH.items()}
_DEVICES: dict[Device, torch.device] = {}


def to_torch_dtype(x) -> torch.dtype | None:
    """The torch dtype for a thunder dtype, a torch dtype, a Python number type or None."""
    if x is None or isinstance(x, torch.dtype):
        return x
    torch_dtype = _TO_TORCH.get(x)
    return _TO_TORCH[to_dtype(x)] if torch_dtype is None else torch_dtype  # type: ignore[index]


def to_torch_device(x) -> torch.device | None:
    """The torch device for a thunder device, a torch device, a string or None."""
    if x is None or isinstance(x, torch.device):
        return x
    device = to_device(x)
    torch_device = _DEVICES.get(device)  # type: ignore[arg-type]
    if torch_device is None:
        torch_device = _DEVICES[device] = torch.device(device.name)  # type: ignore[index, union-attr]
    return torch_device


def require_fit(d: dtype, *values) -> None:
    """Raises PyTorch's error where a Python number among `values` does not fit an integer type: it wraps around some
    negative ones."""
    if d.category == INTEGER:
        with compat.DisableTorchFunction():
            for value in values:
                if type(value) in (int, float):
                    torch.full((), value, dtype=to_torch_dtype(d), device="cpu")


def from_tensor_dtype(t: torch.dtype) -> dtype:
    return _FROM_TORCH[t]


def from_tensor_device(d: torch.device) -> Device:
    """The device of a tensor; an index is always there for the kinds that have several."""
    return to_device(d)  # type: ignore[return-value]


_SCALAR_TYPES = {
    "float16": "Half", "float32": "Float", "float64": "Double", "bfloat16": "BFloat16", "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "bool8": "Bool", "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int",
    "int64": "Long",
}  # fmt: skip


def scalar_type(d: dtype) -> str:
    """What PyTorch's errors call a dtype: "Float" for float32."""
    return _SCALAR_TYPES.get(d.name, d.name)


def named_results(function: str, *results):
    """The named tuple that a torch function gives its results in: `torch.return_types.max(values=, indices=)`."""
    return getattr(torch.return_types, function)(results)
