"""Differential tests with the tiers that a user has: results are eager's bit for bit while PyTorch's kernels run, and
differ by rounding where C++ kernels have taken over."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

from thunder.core.dtypes import FLOAT
from thunder.core.proxies import TensorProxy
from thunder.executors.cpp_fuser import CppFuser

EVERY_REGION = CppFuser("every_region", always=True)  # those as well that PyTorch is predicted to run faster
ROUNDING = 1e-4  # a thousand roundings of float32: those of several steps of training, each amplified by the next
ROUNDING_OF_HALF = 1e-2  # three of bfloat16: kernels round once where PyTorch rounds each operation


def rounding(compiled) -> float:
    """The tolerance for results of a compiled function: 0 where no program of it has fused kernels."""
    entries = getattr(compiled, "programs", ())
    lines = [b for e in entries for t in (e.forward, e.backward) if t is not None for b in t.bound_symbols]
    if not any(b.sym.is_fusion for b in lines):
        return 0.0
    tensors = [o for b in lines for o in b.outputs if isinstance(o, TensorProxy)]
    is_half = any(t.dtype.category == FLOAT and t.dtype.bytes == 2 for t in tensors)
    return ROUNDING_OF_HALF if is_half else ROUNDING


def assert_near(ours: torch.Tensor, eager: torch.Tensor, bound: float, message=None) -> None:
    """bound: 0, or of the difference in relation to the element and to 1, the size of the numbers that programs of the
    tests begin with."""
    torch.testing.assert_close(ours, eager, rtol=bound, atol=bound, equal_nan=True, msg=message)


@pytest.fixture(autouse=True)
def default_tiers(request, monkeypatch):
    """One test in three, chosen by its name, runs with the tiers that users have: C++ kernels take over at the fifth
    call of a path. With THUNDER_TIERS=automatic all do."""
    if os.environ.get("THUNDER_TIERS") == "one" and zlib.crc32(request.node.name.encode()) % 3 == 0:
        monkeypatch.delenv("THUNDER_TIERS")
