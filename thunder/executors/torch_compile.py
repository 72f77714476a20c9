"""The path under which users know the executors of `thunder.executors.inductor`."""

from thunder.executors.inductor import torch_compile_cat_ex, torch_compile_ex

__all__ = ["torch_compile_cat_ex", "torch_compile_ex"]
