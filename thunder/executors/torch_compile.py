"""The torchcompile executor: regions of operations that torch.compile (Inductor) runs as kernels of its own.

    thunder.jit(model, executors=["torchcompile"])

Before: `t0 = torch.mul(a, b)`, `t1 = torch.sin(t0)`. After: `[t1] = TorchCompile0(a, b)`, the two lines as comments below. A region is compiled when it runs first.
Random operations stay with PyTorch, so that seeds mean what they mean there; so do operations that wait for the device or that PyTorch runs as they are.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable

import torch

from thunder.core.proxies import TensorProxy
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.executors.torchex import torch_ex
from thunder.extend import register_executor
from thunder.extend.fusion import FusionExecutor, fusible

__all__ = ["torch_compile_ex"]

_COMPILERS = ("g++", "clang++", "c++", "cl")


class TorchCompileExecutor(FusionExecutor):
    """Joins what PyTorch would run operation by operation, along the flow of data."""

    capturable = True

    def unavailable(self) -> str | None:
        if _missing("cpu") is None or (torch.cuda.is_available() and _missing("cuda") is None):
            return None
        return _missing("cpu")

    def can_fuse(self, line: BoundSymbol) -> bool:
        if not fusible(line) or torch_ex.implementation(line) is None:
            return False
        devices = {p.device.name.partition(":")[0] for p in (*line.inputs, *line.outputs) if isinstance(p, TensorProxy)}
        return len(devices) == 1 and _missing(*devices) is None

    def should_fuse(self, region: Region) -> bool:
        """Views and copies alone are no work, and one matrix product or one other operation is PyTorch's already."""
        computing = [line for line in region.lines if OpTags.SHAPE_OP not in line.sym.tags]
        return len(computing) > 1

    def fuse(self, region: Region, counter: int) -> BoundSymbol:
        run = self.once(region, lambda: _compiled(region))
        return self.register_temporary_operation(f"TorchCompile{counter}", run, inputs=region.inputs, outputs=region.outputs, bsyms=region.lines)


def _missing(kind: str) -> str | None:
    """What Inductor needs and does not find, for a kind of device."""
    if kind == "cpu":
        own = os.environ.get("CXX")
        if _is_there(own, os.environ.get("PATH")):
            return None
        return f"Inductor needs a C++ compiler on the CPU, and none is found ({own or ', '.join(_COMPILERS)}): install one, or set CXX"
    if kind == "cuda":
        return None if _has_triton() else "Inductor needs triton on the GPU: install it"
    return f"Inductor is not used on {kind}"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_there(own: str | None, path: str | None) -> bool:
    return any(shutil.which(name, path=path) for name in ((own,) if own else _COMPILERS))


def _compiled(region: Region) -> Callable:
    lines = []
    for line in region.lines:
        found = torch_ex.implementation(line)
        assert found is not None and found.symbol is not None, f"{line.sym.qualified_name} is in a region of what PyTorch executes"
        lines.append(line.replace(sym=found.symbol))
    context = region.lines[0].context
    assert context is not None, "lines that were recorded have a context"
    program = Trace("region", region.inputs, lines, region.outputs, context.names).python_callable()
    return torch.compile(program, fullgraph=True, dynamic=False)


torch_compile_ex = TorchCompileExecutor("torchcompile", version=torch.__version__)
register_executor(torch_compile_ex)
