"""The matvec executor: linear layers of few rows, as in decoding, by kernels that read the weight once, at the speed of memory.

    thunder.jit(model, executors=["matvec"])

Before: `t0 = torch.nn.functional.linear(x, w)` with x of (1, 1, 4096). After: `t0 = few_rows_linear(x, w)`. Taken are at most 16 rows, on a GPU, of weights for which
measurements say that PyTorch's call is slower; without grad, `silu(linear(x, a)) * linear(x, b)` is one operation, which reads both weights. One row is multiplied
element by element, several are products of tiles of 16 rows. Each program makes all of some columns of the result, so that no partial sums are added up and every run
gives the same. Sums are in float32.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections import Counter

import torch
import torch.nn.functional as F

from thunder.core.devices import Device
from thunder.core.dtypes import bfloat16, float16
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.extend import OperatorExecutor, add_default_executor, register_executor
from thunder.ops import LTORCH
from thunder.ops.torch_types import to_torch_device
from thunder.transforms.dce import dce

__all__ = ["matvec_ex"]

ROWS = 16  # at most
SMALLEST = 1 << 22  # elements of a weight; smaller ones were not measured
AS_FAST = ((12288, 4096),)  # shapes of weights that PyTorch's call multiplies one row by as fast, as measured


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not weight.is_contiguous():
        return F.linear(x, weight, bias)
    from thunder.executors.matvec_kernel import few_rows

    return few_rows(x, weight, bias)


def _gated(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if not weight.is_contiguous() or not gate.is_contiguous():
        return F.silu(F.linear(x, weight)) * F.linear(x, gate)
    from thunder.executors.matvec_kernel import few_rows

    return few_rows(x, weight, None, gate)


class MatvecExecutor(OperatorExecutor):
    """Takes linear layers of few rows, and joins two of them that gate each other."""

    capturable = True

    def unavailable(self) -> str | None:
        return None if _has_triton() else "it needs the package triton: install it"

    def combined(self, trace: Trace) -> Trace:
        if not any(line.sym is LTORCH["linear"] and _checker(*line.args) for line in trace.bound_symbols):
            return trace
        producer = {o: line for line in trace.bound_symbols for o in line.outputs}
        readers = Counter(p for line in trace.bound_symbols for p in line.inputs) + Counter(trace.output_proxies)
        joined = False

        def rule(line: BoundSymbol, out: Rewriter) -> None:
            nonlocal joined
            found = _gates(line, producer, readers) if line.sym is LTORCH["mul"] else None
            if found is None:
                return out.write(line)
            joined = True
            out.trace(lambda *_: few_rows_gated(*found), line)

        result = rewrite(trace, rule)
        return dce(result) if joined else trace


def _gates(line: BoundSymbol, producer: dict, readers: Counter) -> tuple | None:
    """(x, a, b) where a line is silu(linear(x, a)) * linear(x, b), either way round, and nobody else reads what is in between."""
    if len(line.inputs) != 2 or line.kwargs or line.output.requires_grad:
        return None
    made = [producer.get(p) for p in line.inputs]
    made = made[::-1] if made[1] is not None and made[1].sym is LTORCH["silu"] else made
    if made[0] is None or made[1] is None or made[0].sym is not LTORCH["silu"] or made[0].kwargs or len(made[0].args) != 1:
        return None
    first, second = producer.get(made[0].inputs[0]), made[1]
    if first is None or first.sym is not LTORCH["linear"] or second.sym is not LTORCH["linear"] or any(readers[p] != 1 for p in (*line.inputs, first.output)):
        return None
    (x, weight, *bias), (other, gate, *rest) = first.args, second.args
    if x is not other or any(b is not None for b in (*bias, *rest)) or weight.shape != gate.shape or not _checker(x, weight):
        return None
    return x, weight, gate


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _is_large(device: Device) -> bool:
    """Whether a GPU is of the kind that was measured, by the memory its programs have: A100, H100 and later ones."""
    return torch.cuda.get_device_properties(to_torch_device(device)).shared_memory_per_block_optin >= 1 << 17


def _checker(x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
    if x.device.type != "cuda" or not _has_triton() or not _is_large(x.device) or len(weight.shape) != 2 or any(isinstance(n, NumberProxy) for n in (*x.shape, *weight.shape)):
        return False
    if x.dtype not in (bfloat16, float16) or bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return False
    n, k = weight.shape
    rows = math.prod(x.shape[:-1])
    faster = (n, k) not in AS_FAST if rows == 1 else n >= k
    return 0 < rows <= ROWS and n * k >= SMALLEST and k % 8 == 0 and faster


matvec_ex = MatvecExecutor("matvec", version=torch.__version__)
few_rows_linear = matvec_ex.register_operator("few_rows_linear", like=lambda x, weight, bias=None: LTORCH["linear"](x, weight, bias), fn=_linear, tags=(OpTags.MATMUL_OP,))
few_rows_gated = matvec_ex.register_operator(
    "few_rows_gated", like=lambda x, weight, gate: LTORCH["silu"](LTORCH["linear"](x, weight)) * LTORCH["linear"](x, gate), fn=_gated, tags=(OpTags.MATMUL_OP,)
)
matvec_ex.register_implementation(LTORCH["linear"], few_rows_linear, checker=_checker)
register_executor(matvec_ex)
if torch.cuda.is_available() and _has_triton():
    add_default_executor(matvec_ex)
