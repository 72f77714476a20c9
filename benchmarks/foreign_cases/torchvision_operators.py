"""Operators of torchvision, where its library does not load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def declare() -> None:
    """Declare two operators that importing torchvision asks for, where its library does not load: registries have it
    built for CUDA, and PyTorch may be built for the CPU. The programs use none of its operators."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return
    try:
        for folder in spec.submodule_search_locations or ():
            for library in Path(folder).glob("_C*.so"):  # its name tells the ABI
                torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
