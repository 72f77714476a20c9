"""The matvec executor: linear layers of few rows, as in decoding, by kernels that read the weight once.

Before: `t0 = torch.nn.functional.linear(x, w)` with x of (1, 1, 4096). After: `t0 = few_rows_linear(x, w)`, and
`t0, t1, t2 = linears_of_a_row(x, q, k, v)` for layers that read one row and need no gradients: a GPU reads a small
weight in less time than the host needs for a launch.

The executor takes layers of one row on a GPU, which it multiplies element by element. With
`thunder.jit(model, matvec_rows=16)` it takes up to 16 rows of two bytes an element, as products of tiles of 16 rows.
Each program computes some columns of the result completely, in float32. So there are no partial sums, and all runs
give equal results.

With one row it was faster than PyTorch for each weight that was measured; with several rows that depends on the sizes
(docs/lab_log.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from thunder.core.devices import Device
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import OpTags
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.executors.handwritten import CompilesKernels, Handwritten, Settings, Steps, launching
from thunder.executors.triton_kernels.launcher import ALIGNMENT
from thunder.extend import OperatorExecutor, add_default_executor_of_gpus, register_executor
from thunder.extend.patterns import Flow
from thunder.extend.rules import Match, Rule
from thunder.kernels.sizes import power_of_two
from thunder.ops import ltorch
from thunder.ops.shape_rules import ceil_div
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.options import compile_option

ROWS = 16  # at most
TOGETHER = 3  # weights that one launch reads, at most
SMALLEST = 1 << 18  # elements of a weight; smaller ones were not measured
LARGEST = 1 << 31  # what kernels count to
MATVEC_ROWS = compile_option(
    "matvec_rows", int, 1, "how many rows of a linear layer the matvec executor takes, at most",
    owner="matvec", valid=f"0 to {ROWS}", check=lambda n: 0 <= n <= ROWS,
)  # fmt: skip


_row, _rows = Handwritten("matvec_kernel.py", "_one_row"), Handwritten("matvec_kernel.py", "_some_rows")


@launching
def few_rows(steps: Steps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K), at most 16 rows, times the transpose of a weight (N, K), plus a bias (N,): (..., N) in the dtype of
    all."""
    if not weight.is_contiguous():
        return steps.call(F.linear, x, weight, bias)
    n, k = weight.shape
    m, biased = x.numel() // k, bias is not None
    if m == 1:
        return _of_row(steps, x, (weight,), bias)
    x = x if x.is_contiguous() else steps.call(torch.Tensor.contiguous, x)
    out = steps.empty((*x.shape[:-1], n), x.dtype)
    steps.launch(_rows, (x, weight, out if bias is None else bias, out), _settings_of_rows(m, n, k, biased))
    return out


@launching
def linears_of_row(steps: Steps, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x (..., K), one row, times the transposes of weights (N1, K), (N2, K), (N3, K) of even N."""
    if not all(w.is_contiguous() for w in weights):
        return tuple(steps.call(F.linear, x, w) for w in weights)
    return steps.call(torch.Tensor.split_with_sizes, _of_row(steps, x, weights), [w.shape[0] for w in weights], -1)


def _of_row(
    steps: Steps, x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """(..., N1 + N2 + N3), of dense weights, plus a bias."""
    sizes = tuple(w.shape[0] for w in weights)
    x = x if x.is_contiguous() else steps.call(torch.Tensor.contiguous, x)
    out = steps.empty((*x.shape[:-1], sum(sizes)), x.dtype)
    tensors = x, *weights, *[weights[0]] * (TOGETHER - len(weights)), out if bias is None else bias, out
    steps.launch(_row, tensors, _settings_of_row(sizes, x.shape[-1], bias is not None))
    return out


def _settings_of_row(sizes: tuple[int, ...], k: int, biased: bool) -> Settings:
    n = sum(sizes)
    columns, inner, warps, _ = _blocks(1, n, k)
    known = len(sizes), biased, n % columns == 0 and k % inner == 0
    return (ceil_div(n, columns),), (sizes[0], sum(sizes[:2]), n, k, *known, columns, inner), warps


def _settings_of_rows(m: int, n: int, k: int, biased: bool) -> Settings:
    columns, inner, warps, stages = _blocks(m, n, k)
    known = biased, n % columns == 0 and k % inner == 0
    return (ceil_div(n, columns),), (m, n, k, *known, ROWS, columns, inner, stages), warps


def _blocks(m: int, n: int, k: int) -> tuple[int, int, int, int]:
    """(columns of a program, elements of a row at a time, warps, stages), as measured on an H200 for bfloat16 weights
    of 8 to 250 MiB."""
    if m > 1:
        return 32 if 8192 <= n < 16384 else 64, 128, 4, 5
    if k <= 4096:
        inner = power_of_two(k)
        return 1, inner, max(1, inner // 512), 1
    inner = max(1024, power_of_two(ceil_div(k, 32)))  # the loop is unrolled at most 32 times
    return 2, inner, min(16, inner // 256), 1


def _two_layers(x, v, w):
    return ltorch.linear(x, v), ltorch.linear(x, w)


def _three_layers(x, u, v, w):
    return ltorch.linear(x, u), ltorch.linear(x, v), ltorch.linear(x, w)


def _matrix(rows: int) -> TensorProxy:
    return TensorProxy(shape=(rows, 5), dtype=float32, device="cpu")


class MatvecExecutor(CompilesKernels, OperatorExecutor):
    """Takes linear layers of at most so many rows. usable: whether its kernels run on a device."""

    capturable = True

    def __init__(self, name: str, *, rows: int = 1, usable: Callable[[Device], bool], **options):
        super().__init__(name, **options)
        self.rows, self.usable = rows, usable
        self.few_rows_linear = self.register_operator(
            "few_rows_linear", like=lambda x, weight, bias=None: ltorch.linear(x, weight, bias), fn=few_rows,
            tags=(OpTags.MATMUL_OP,)
        )  # fmt: skip
        self.linears_of_a_row = self.register_operator(
            "linears_of_a_row", like=lambda x, *weights: tuple(ltorch.linear(x, w) for w in weights),
            fn=linears_of_row, tags=(OpTags.MATMUL_OP,),
        )  # fmt: skip
        self.register_implementation(ltorch.linear, self.few_rows_linear, checker=self._checker)
        for count, layers in ((3, _three_layers), (2, _two_layers)):
            examples = [_matrix(1), *map(_matrix, range(2, 2 + count))]
            self.register_rule(
                Rule(
                    f"Layers of a Row ({count})", layers, self.linears_of_a_row, self._are_joined,
                    examples=examples, where=self._is_in,
                )
            )  # fmt: skip

    def configured(self, options) -> MatvecExecutor:
        rows = options.get(MATVEC_ROWS)
        return self if rows == self.rows else _executor(rows, self.usable)

    def planned(self) -> MatvecExecutor:
        return self if torch.cuda.is_available() else _executor(self.rows, _assumed)

    def _are_joined(self, x: TensorProxy, *weights: TensorProxy, match: Match) -> bool:
        return all(self._joins(x, w) for w in weights) and not any(o.requires_grad for o in match.outputs)  # type: ignore[attr-defined]

    def _is_in(self, flow: Flow) -> bool:
        """Whether a program has layers of one row without gradients."""
        return any(
            b.sym is ltorch.linear and not b.output.requires_grad and self._joins(*b.args, **b.kwargs)
            for b in flow.trace.bound_symbols
        )

    def expect(self, trace: Trace) -> None:
        for b in trace.bound_symbols:
            if b.sym.executor is self:
                weights = [a for a in b.args[1:] if isinstance(a, TensorProxy)]
                self._start(b.args[0], weights, b.sym.name == "linears_of_a_row")

    def _start(self, x: TensorProxy, weights: list[TensorProxy], together: bool) -> None:
        """Compiles the kernel of an operation in the background."""
        dtype, device, k = to_torch_dtype(x.dtype), to_torch_device(x.device), int(x.shape[-1])
        m, biased = math.prod(x.shape[:-1]), not together and len(weights) > 1
        sizes = tuple(w.shape[0] for w in (weights if together else weights[:1]))
        if m == 1:
            _row.start([dtype] * (TOGETHER + 3), _settings_of_row(sizes, k, biased), device)
        else:
            _rows.start([dtype] * 4, _settings_of_rows(m, sizes[0], k, biased), device)

    def _joins(self, x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
        return (
            bias is None
            and self._checker(x, weight)
            and math.prod(x.shape[:-1]) == 1
            and weight.shape[0] * weight.dtype.bytes % ALIGNMENT == 0
        )

    def unavailable(self) -> str | None:
        return None if has_triton() else "it needs the package triton: install it"

    def _checker(self, x: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> bool:
        """Whether the kernels take a linear layer: few rows on a CUDA device, sizes that are known, and a type that
        they have."""
        if (
            x.device.type != "cuda"
            or len(weight.shape) != 2
            or any(isinstance(n, NumberProxy) for n in (*x.shape, *weight.shape))
            or not self.usable(x.device)
        ):
            return False
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            return False
        n, k = weight.shape
        rows = math.prod(x.shape[:-1])
        if x.dtype not in (bfloat16, float16) and not (x.dtype is float32 and rows == 1):
            return False
        return 0 < rows <= self.rows and SMALLEST <= n * k < LARGEST and k % 8 == 0


@functools.cache
def usable(device: Device) -> bool:
    """Whether a GPU has as much shared memory as the measured ones: A100, H100 and later ones."""
    return (
        has_triton()
        and torch.cuda.get_device_properties(to_torch_device(device)).shared_memory_per_block_optin >= 1 << 17
    )


def _assumed(device: Device) -> bool:
    """`usable` on an H100 or H200."""
    return True


@functools.cache
def _executor(rows: int, usable: Callable[[Device], bool]) -> MatvecExecutor:
    return MatvecExecutor("matvec", rows=rows, usable=usable, version=torch.__version__)


matvec_ex = _executor(1, usable)
register_executor(matvec_ex)
add_default_executor_of_gpus(matvec_ex, here=torch.version.cuda is not None and has_triton())
