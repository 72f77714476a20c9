"""Separate Biases: products in float32 leave their biases to the fused kernels that read the results.

Before: `t0 = torch.nn.functional.linear(x, w, b)`, `t1 = torch.relu(t0)`. After: `t2 = torch.nn.functional.linear(x,
w)`, `t0 = torch.add(t2, b)`, `t1 = torch.relu(t0)`, the last two of which fuse.

Without TensorFloat-32, cuBLAS has other kernels for products with a bias, which take 0.95 to 2.1 times as long
(docs/lab_log.md, "Biases of float32 products"). A fused kernel that reads the result adds the bias for nothing. As much
is saved: a backward reads the sum, or adds the bias again. Products of a narrower type, which would be rounded before
the addition, keep their biases, as do products in tensor cores.

The gradient of a convolution's bias is a sum of the cotangent, which PyTorch's backward computes in its own kernel.
Where a fused kernel computes the cotangent, `gx, gw, gb = convolution_backward(g, ...)` leaves gb to it, as
`gb = sum(g, (0, 2, 3))`.
"""

from __future__ import annotations

from thunder.analysis.aliases import may_view
from thunder.compat.torch_settings import tensor_cores_multiply_float32
from thunder.core.dtypes import float32
from thunder.core.proxies import Proxy
from thunder.extend.patterns import Flow
from thunder.extend.rules import JOINT, Match, Rule
from thunder.ops import ltorch
from thunder.ops.families.convolution import backward_with_bias_apart, convolution_backward


def _layer(x, weight, bias):
    return ltorch.add(ltorch.linear(x, weight), bias)


def _sum_with_product(a, x, y, **_):
    return ltorch.add(ltorch.mm(x, y), a)


def _in_kernels(value: Proxy, flow: Flow) -> bool:
    """Whether kernels alone read a value, and its views. Nothing would fuse with an addition before a view that
    another operation reads."""
    fuses, written = flow.lowering.fuses, flow.trace.info.written.values()
    return (
        value not in flow.results
        and value.name not in written
        and all(
            fuses(c) and (not may_view(c) or all(_in_kernels(o, flow) for o in c.outputs))
            for c in flow.consumers(value)
        )
    )


def _kernels_add_it(*operands, match: Match, **factors) -> bool:
    """Whether a product of matrices in float32, to which a vector is added, is read by kernels alone."""
    b, flow = match.operation, match.flow
    if len(operands) != 3 or set(factors.values()) - {1}:
        return False
    bias = operands[2 if b.sym is ltorch.linear else 0]
    if bias is None or len(bias.shape) != 1 or b.output.dtype is not float32 or tensor_cores_multiply_float32():
        return False
    return not flow.lowering.fuses(b) and _in_kernels(b.output, flow)


def _has_kernels(flow: Flow) -> bool:
    return any(e.adds_biases for e in flow.lowering.fusers)


def _with_bias_apart(*operands, match: Match):
    return backward_with_bias_apart(*operands)


def _kernels_sum_it(g, x, weight, sizes, *options, match: Match) -> bool:
    """Whether a kernel computes the cotangent whose sum is the gradient of a bias."""
    producer = match.flow.producers.get(g)
    *_, mask = options
    return bool(mask[2]) and producer is not None and match.flow.lowering.fuses(producer)


SEPARATE_BIASES = (
    Rule("Separate Biases", ltorch.linear, _layer, _kernels_add_it, JOINT, exact=True, where=_has_kernels),
    Rule(
        "Separate Biases of Sums", ltorch.addmm, _sum_with_product, _kernels_add_it, JOINT, exact=True,
        where=_has_kernels,
    ),
    Rule("Separate Biases of Convolutions", convolution_backward, _with_bias_apart, _kernels_sum_it, JOINT, exact=True,
         where=_has_kernels),
)  # fmt: skip
