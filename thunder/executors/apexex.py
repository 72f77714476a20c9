"""The apex executor: cross_entropy by the CUDA kernels of NVIDIA's apex (`xentropy_cuda`), where it is installed.
Elsewhere it takes nothing, and says why."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from thunder.core.proxies import TensorProxy
from thunder.executors.cross_entropy import register_cross_entropy
from thunder.extend import OperatorExecutor, register_executor

_KINDS = ("cuda",)  # of device, that the kernels run on


class ApexExecutor(OperatorExecutor):
    """Takes what apex's kernels can."""

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("xentropy_cuda") is None:
            return (
                "apex is not installed with its extension xentropy_cuda (pip install apex from NVIDIA's "
                "repository with --xentropy)"
            )
        return None


def _kernels():
    return importlib.import_module("xentropy_cuda")


def _forward_rows(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    # losses of half precision in float32
    return _kernels().forward(logits.contiguous(), target, smoothing, logits.dtype.itemsize == 2)


def _backward_rows(
    cotangent: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor, target: torch.Tensor, smoothing: float
) -> torch.Tensor:
    return _kernels().backward(cotangent.contiguous(), logits.contiguous(), lse, target, smoothing)


def _accepts(logits: TensorProxy) -> bool:
    return logits.device.name.partition(":")[0] in _KINDS and apex_ex.unavailable() is None


apex_ex = ApexExecutor("apex")
register_cross_entropy(apex_ex, "apex_cross_entropy", _forward_rows, _backward_rows, _accepts)
register_executor(apex_ex)
