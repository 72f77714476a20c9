"""`thunder.autocast`: a program computes as if it were called under `torch.autocast`.

    thunder.jit(model, transforms=[thunder.autocast(torch.bfloat16)])

Before: `t0 = ltorch.linear(x, weight, bias)`. After:

    t0 = ltorch.to(x, dtype=torch.bfloat16)
    t1 = ltorch.to(weight, dtype=torch.bfloat16)
    t2 = ltorch.to(bias, dtype=torch.bfloat16)
    t3 = ltorch.linear(t0, t1, t2)

The casts are recorded while the program is captured, by the one set of rules there is (`thunder.ops.autocast`). So they
follow what the program does itself: a region under `torch.autocast(..., enabled=False)` and a function decorated with
`no_autocast` stay as they are, a nested region has its own dtype, and the dtypes that the program asks about are those
it gets.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from thunder import compat
from thunder.errors import OptionError
from thunder.transforms.base import Transform

_DTYPES = (torch.bfloat16, torch.float16)


class AutocastTransform(Transform):
    """Reads programs under autocast to `dtype` for tensors on devices of these kinds."""

    def __init__(self, dtype: torch.dtype, devices: tuple[str, ...]):
        self.dtype, self.devices = dtype, devices

    def __repr__(self) -> str:
        return f"thunder.autocast({self.dtype}, devices={self.devices})"

    def while_reading(self) -> AbstractContextManager:
        return compat.autocast_on(tuple((kind, self.dtype) for kind in self.devices), cached=True)


def autocast(dtype: torch.dtype = torch.bfloat16, *, devices: tuple[str, ...] = ("cpu", "cuda")) -> AutocastTransform:
    """Returns a transform with which a compiled function computes as under `torch.autocast(device, dtype)`.

    Args:
        dtype: torch.bfloat16 or torch.float16.
        devices: The kinds of devices whose operations are cast.

    Raises:
        OptionError: If the dtype is another one, or thunder has no autocast rules for a kind of device.
    """
    if dtype not in _DTYPES:
        raise OptionError(f"thunder.autocast({dtype}): valid: {', '.join(map(str, _DTYPES))}")
    if isinstance(devices, str) or not devices or not set(devices) <= {"cpu", "cuda"}:
        raise OptionError(f"thunder.autocast(devices={devices!r}): valid: a tuple of 'cpu', 'cuda'")
    return AutocastTransform(dtype, tuple(devices))
