"""Fusion executors whose kernels Triton compiles."""

from __future__ import annotations

from abc import ABC

import torch

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.utils import has_triton
from thunder.executors.triton_kernels.binary import expect_kernels
from thunder.executors.triton_kernels.launcher import interpreting
from thunder.extend.fusion import FusionExecutor


def runs_on(device: str) -> bool:
    """Whether kernels run on a device: on GPUs, and under Triton's interpreter on any."""
    return device.startswith("cuda") or interpreting()


class TritonExecutor(FusionExecutor, ABC):
    """Takes operations on one GPU; under Triton's interpreter on any device."""

    def has_triton(self) -> bool:
        return has_triton()

    def unavailable(self) -> str | None:
        if not has_triton():
            return "it needs the package triton: install it"
        if not torch.cuda.is_available() and not interpreting():
            return "there is no GPU; TRITON_INTERPRET=1 lets Triton's interpreter run kernels on the CPU, slowly"
        return None

    def runs_on(self, kinds: set[str]) -> bool:
        return any(map(runs_on, kinds))

    def expect_program(self) -> None:
        if torch.cuda.is_initialized() and self.has_triton() and not interpreting():
            expect_kernels()

    def is_on_one(self, operation: BoundSymbol) -> bool:
        """Whether all tensors of an operation are on one device that kernels run on."""
        devices = {p.device.name for p in (*operation.inputs, *operation.outputs) if isinstance(p, TensorProxy)}
        return len(devices) == 1 and runs_on(next(iter(devices)))
