"""The name `nvfuser`, for programs that ask for NVIDIA's fuser: it takes nothing, and says why.

nvFuser's newest wheel is built for a PyTorch before those that thunder runs on, and does not load on these. What it did
is done by the executors `triton_fuser` and `inductor`.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from thunder.core.symbol import BoundSymbol
from thunder.extend import register_executor
from thunder.extend.fusion import FusionExecutor


class NvFuserExecutor(FusionExecutor):
    """Takes no operation."""

    def unavailable(self) -> str | None:
        instead = 'use executors=["triton_fuser"] on a GPU, or ["inductor"]'
        if importlib.util.find_spec("nvfuser_direct") is None:
            return (
                "nvFuser (the package nvfuser_direct) is not installed, and no wheel of it loads on PyTorch "
                f"{torch.__version__}: {instead}"
            )
        try:
            importlib.import_module("nvfuser_direct")
        except ImportError as error:
            return f"nvFuser does not load on PyTorch {torch.__version__} ({error}): {instead}"
        return (
            "regions are not translated for nvFuser, which no PyTorch that thunder runs on could load so far: "
            f"{instead}"
        )

    def can_fuse(self, operation: BoundSymbol) -> bool:
        return False


nvfuserex = NvFuserExecutor("nvfuser")
register_executor(nvfuserex)
