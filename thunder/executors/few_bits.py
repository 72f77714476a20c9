"""The few_bits executor: linear layers of few rows on weights of few bits, by kernels that read once what is held of a
weight, and make none of full size.

Before: `t_fc_weight = dequantize(parts, format, ...)`, `t0 = torch.nn.functional.linear(x, t_fc_weight)` with x of
(1, 1, 4096). After: `t0 = few_bits_linear(x, None, parts, format)`.

The transforms of `thunder.quantization` add it. It takes layers without gradients of up to 32 rows on a GPU, and of any
number of rows on a CPU, where a part of the weight is made at a time, or a kernel of PyTorch's multiplies int8; what
kernels need to know of a format is its `encoding`. One row is multiplied element by element,
several as products of tiles, for which the weight's numbers are rounded to the dtype of the input. Sums are of float32;
where few columns leave a GPU idle, several programs share a row, and a second kernel adds up their sums in one order.
So all runs give equal results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from thunder import compat
from thunder.core.dtypes import bfloat16, float16, float32, int8
from thunder.core.proxies import NumberProxy, TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.executors.handwritten import Handwritten, Settings, Steps, launching
from thunder.executors.matvec import usable
from thunder.executors.triton_kernels.launcher import interpreting
from thunder.extend import OperatorExecutor, register_executor
from thunder.extend.patterns import Flow
from thunder.extend.rules import Match, Rule
from thunder.kernels.sizes import power_of_two
from thunder.ops import ltorch
from thunder.ops.families.few_bits import Encoding, dequantize
from thunder.ops.shape_rules import ceil_div
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

CPU_ROWS, CPU_ROWS_FLOAT32 = 16, 4  # at most; PyTorch's kernel takes longer than making the weight for more
ROWS = 32  # at most; with more, tensor cores are faster on a weight that was made
DEQUANTIZED = 1 << 20  # elements of a weight at a time on a CPU: they stay in its caches
PROGRAMS = 512  # that keep a GPU busy: rows are split where columns make fewer
SUMMED = 512  # elements of a program that adds up splits
RUN = 16  # bytes that a thread reads at a time
_row, _rows, _sums = (Handwritten("few_bits_kernel.py", name) for name in ("_one_row", "_some_rows", "_added"))


@launching
def few_bits_linear(
    steps: Steps, x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[torch.Tensor], format: Any
) -> torch.Tensor:
    """x (..., K), at most 32 rows, times the transpose of a weight (N, K) of which `parts` are held, plus a bias (N,):
    (..., N)."""

    def dense(t: torch.Tensor) -> torch.Tensor:
        return t if t.is_contiguous() else steps.call(torch.Tensor.contiguous, t)

    x, *parts = [dense(t) for t in (x, *parts)]
    k, encoding, biased = x.shape[-1], format.encoding, bias is not None
    m, n = x.numel() // k, parts[0].shape[0]
    out = steps.empty((*x.shape[:-1], n), x.dtype)
    bias = out if bias is None else dense(bias)
    inputs = _inputs(x, parts, steps.constant(_table(encoding.values, x.device)) if encoding.values else None)
    if m == 1:
        steps.launch(_row, (*inputs, bias, out), _settings_of_row(n, k, encoding, biased))
    elif (splits := _tiles(m, n, k, encoding).splits) == 1:
        steps.launch(_rows, (*inputs, bias, out), _settings_of_rows(m, n, k, encoding, biased))
    else:
        sums = steps.empty((splits, m, n), torch.float32)
        steps.launch(_rows, (*inputs, bias, sums), _settings_of_rows(m, n, k, encoding, False))
        steps.launch(_sums, (sums, bias, out), _settings_of_sums(m, n, splits, biased))
    return out


def _inputs(x: Any, parts: Sequence, table: Any) -> tuple:
    """What kernels read besides a bias, as tensors or dtypes; a scale stands for what the encoding does not have."""
    held, scale, *rest = parts
    return x, held, scale, *(*rest, scale, scale)[:2], scale if table is None else table


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


class _Tiles(NamedTuple):
    """columns: of a program. inner: bytes of a row at a time. splits: programs that share a row."""

    columns: int
    inner: int
    splits: int
    stages: int
    warps: int


@functools.cache
def _tiles(m: int, n: int, k: int, encoding: Encoding) -> _Tiles:
    """As measured on an H100 and an H200 for weights of 4096 x 4096 to 12288 x 4096 and 4096 x 11008."""
    width = power_of_two(k // encoding.halves)
    if m == 1:
        return _Tiles(*((2, min(2048, width)) if encoding.halves == 1 else (4, min(1024, width))), 1, 1, 8)
    columns, inner, stages, warps = (64, 128, 1, 4) if encoding.values else (32, 256 // encoding.halves, 3, 2)
    splits = 1
    while splits < 8 and ceil_div(n, columns) * splits < PROGRAMS and 2 * splits * inner <= width:
        splits *= 2
    return _Tiles(columns, inner, splits, stages, warps)


def _constants(k: int, encoding: Encoding, biased: bool) -> tuple:
    e = encoding
    return k, e.halves, e.group, bool(e.values), e.double, e.least, biased


def _settings_of_row(n: int, k: int, encoding: Encoding, biased: bool) -> Settings:
    tiles = _tiles(1, n, k, encoding)
    numbers = n, *_constants(k, encoding, biased), tiles.columns, tiles.inner, RUN
    return (ceil_div(n, tiles.columns),), numbers, tiles.warps


def _settings_of_rows(m: int, n: int, k: int, encoding: Encoding, biased: bool) -> Settings:
    columns, inner, splits, stages, warps = _tiles(m, n, k, encoding)
    groups = max(1, inner // encoding.group) if encoding.group else 1
    tile = max(16, power_of_two(m)), columns, inner, groups, splits, stages
    return (ceil_div(n, columns), splits), (m, n, *_constants(k, encoding, biased), *tile), warps


def _settings_of_sums(m: int, n: int, splits: int, biased: bool) -> Settings:
    return (ceil_div(m * n, SUMMED),), (m * n, n, splits, biased, SUMMED), 4


def int8_linear_cpu(
    x: torch.Tensor, bias: torch.Tensor | None, parts: tuple[torch.Tensor, ...], format: Any
) -> torch.Tensor:
    """The same on a CPU, by PyTorch's kernel for weights of int8, which rounds scales to the dtype of x."""
    held, scale = parts
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = compat.weight_int8pack_mm(rows, held, scale.flatten().to(x.dtype)).view(*x.shape[:-1], held.shape[0])
    return out if bias is None else out + bias


def few_bits_linear_cpu(
    x: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[torch.Tensor], format: Any
) -> torch.Tensor:
    """The same on a CPU, for any number of rows and any format: some rows of the weight are made at a time."""
    rows, step = parts[0].shape[0], max(1, DEQUANTIZED // x.shape[-1])
    weights = (format.dequantize(*(p[i : i + step] for p in parts)).to(x.dtype) for i in range(0, rows, step))
    out = torch.cat([F.linear(x, weight) for weight in weights], -1)
    return out if bias is None else out + bias


class FewBitsExecutor(OperatorExecutor):
    """Multiplies by quantized weights without making them in full: kernels for few rows, on GPUs and CPUs."""

    capturable = True

    def __init__(self, name: str, **options):
        super().__init__(name, **options)
        self.few_bits_linear, self.int8_linear_cpu, self.few_bits_linear_cpu = (
            self.register_operator(
                function.__name__, fn=function, tags=(OpTags.MATMUL_OP,),
                meta=lambda x, bias, parts, format: like(x, (*x.shape[:-1], parts[0].shape[0])),
            )
            for function in (few_bits_linear, int8_linear_cpu, few_bits_linear_cpu)
        )  # fmt: skip
        self.register_rule(Rule("Few Bits", ltorch.linear, self._multiplied, self._has_few_bits))

    def _has_few_bits(self, x, weight, *_, match: Match, **__) -> bool:
        """Whether a layer multiplies with a weight of which few bits are held. A weight whose layers are all taken is
        dead code."""
        dequantized = _made_weight(weight, match.flow)
        return (
            dequantized is not None
            and not match.operation.output.requires_grad
            and self._takes(x, *dequantized[:3]) is not None
        )

    def _multiplied(self, x, weight, bias=None, *, match: Match):
        parts, format, shape, *_ = _made_weight(match.arguments[1], match.flow)  # type: ignore[misc]
        symbol = self._takes(x, parts, format, shape)
        assert symbol is not None, "the condition holds"
        return symbol(x, bias, parts, format)

    def _takes(self, x: TensorProxy, parts: tuple, format: Any, shape: tuple[int, int]) -> Symbol | None:
        """What multiplies rows x with a weight of this shape; None where the weight is made."""
        e: Encoding | None = format.encoding
        if e is None:
            return None
        if not any(isinstance(n, NumberProxy) for n in x.shape):
            rows = math.prod(x.shape[:-1])
            if e == Encoding() and parts[0].dtype is int8 and _multiplies_on_cpu(x, rows):
                return self.int8_linear_cpu
            if _has_kernels(x, rows) and _fits(x, rows, e, shape[1]):
                return self.few_bits_linear
        return self.few_bits_linear_cpu if x.device.type == "cpu" else None

    def expect(self, trace: Trace) -> None:
        """Compiles kernels in the background."""
        for operation in trace.bound_symbols:
            if operation.sym is self.few_bits_linear:
                x, bias, parts, format = operation.args
                encoding, biased, device = format.encoding, bias is not None, to_torch_device(x.device)
                m, n, k = math.prod(x.shape[:-1]), parts[0].shape[0], x.shape[-1]
                out, *held = [to_torch_dtype(t.dtype) for t in (x, *parts)]
                bias = to_torch_dtype(bias.dtype) if biased else out
                inputs = *_inputs(out, held, torch.float32 if encoding.values else None), bias
                if m == 1:
                    _row.start([*inputs, out], _settings_of_row(n, k, encoding, biased), device)
                elif (splits := _tiles(m, n, k, encoding).splits) == 1:
                    _rows.start([*inputs, out], _settings_of_rows(m, n, k, encoding, biased), device)
                else:
                    _rows.start([*inputs, torch.float32], _settings_of_rows(m, n, k, encoding, False), device)
                    _sums.start([torch.float32, bias, out], _settings_of_sums(m, n, splits, biased), device)


def _made_weight(weight: TensorProxy, flow: Flow) -> tuple | None:
    """The arguments of the operation that makes a weight of few bits, which autocast may have cast."""
    producer = flow.producer(weight)
    if producer is not None and producer.sym is ltorch.to:
        producer = flow.producer(producer.args[0])
    return producer.args if producer is not None and producer.sym is dequantize else None


def _multiplies_on_cpu(x: TensorProxy, rows: int) -> bool:
    most = {bfloat16: CPU_ROWS, float16: CPU_ROWS, float32: CPU_ROWS_FLOAT32}.get(x.dtype, 0)
    return x.device.type == "cpu" and 0 < rows <= most


def _has_kernels(x: TensorProxy, rows: int) -> bool:
    """Whether Triton's kernels take so many rows on the device of x."""
    if not has_triton() or not 0 < rows <= ROWS:
        return False
    if x.device.type != "cuda":
        return interpreting()
    return not torch.cuda.is_available() or usable(x.device)  # without a GPU the program is a plan


def _fits(x: TensorProxy, rows: int, e: Encoding, k: int) -> bool:
    """Whether kernels can multiply rows of k elements: a run lies in one group, and a group is as wide as a tile, or a
    part of it."""
    width, short = k // e.halves, x.dtype in (bfloat16, float16)
    if width % RUN or e.group % RUN or (e.group and width % e.group):
        return False
    return short and e.group in (0, power_of_two(e.group)) if rows > 1 else short or x.dtype is float32


few_bits_ex = FewBitsExecutor("few_bits")
register_executor(few_bits_ex)
