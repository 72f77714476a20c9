"""The linear_cross_entropy executor: a linear layer and the cross-entropy of its result as one operation, which never
materializes all logits.

    thunder.jit(model, executors=["linear_cross_entropy"])

Before: `t0 = ltorch.linear(x, w)`, `t1 = ltorch.to(t0, dtype=torch.float32)`, `t2 = ltorch.reshape(t1, (-1, n))`, `t3 =
ltorch.cross_entropy(t2, target)`, where nobody else reads t0 to t2. After: `t4 = ltorch.reshape(x, (-1, d))`, `t3 =
linear_cross_entropy(t4, w, target, ...)`.

The executor takes losses whose logits have more bytes than `LIMIT`. It splits the rows into parts whose logits have no
more bytes than that, or than the weight. For each part it computes logits and losses, writes the gradient of the logits
over them, and adds the part to the gradients of x and w. So the forward computes the gradients for a cotangent of 1,
and the backward multiplies them by its cotangent, which costs nothing for 1:

    loss_i = lse_i - z_i[t_i],    dloss_i/dz_i = softmax(z_i) - onehot(t_i),    z = x w^T + b

Without gradients it computes the logits and losses of each part. Rows of logits are padded for the fast kernels of
products (`empty_rows`). It takes class indices, the reductions "mean" and "sum", and ignore_index; neither class
weights nor label smoothing, and not float16, whose gradients would be computed before they are scaled."""

from __future__ import annotations

from itertools import pairwise

import torch

from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.dtypes import bfloat16, float32, float64
from thunder.core.proxies import (
    NumberProxy,
    Proxy,
    TensorProxy,
    element_count,
    has_numbers,
    like,
    number_value,
    numbers_in,
)
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.core.utils import has_triton
from thunder.executors.handwritten import CompilesKernels, Handwritten, Settings, Steps, launching
from thunder.extend import OperatorExecutor, add_default_executor_of_gpus, register_executor
from thunder.extend.patterns import Flow
from thunder.extend.rules import Match, Rule
from thunder.kernels.sizes import power_of_two
from thunder.ops import ltorch
from thunder.ops.backward import times_cotangent
from thunder.ops.families.aligned import multiply_into
from thunder.ops.layout import empty_rows, padded_row
from thunder.ops.torch_types import from_tensor_dtype, to_torch_device, to_torch_dtype

# bytes of logits that are made at once, or as many as the weight has; below that there is little to save, and smaller
# products are slower
LIMIT = 1 << 29
PARTS = 4  # at most: the gradient of the weight is rounded once for each


def _rows_at_once(rows: int, classes: int, width: int, itemsize: int) -> int:
    return -(-rows // max(1, min(PARTS, -(-rows * classes * itemsize // max(LIMIT, width * classes * itemsize)))))


def _forward(hidden, weight, bias, target, ignore_index, reduction, dtype, wanted):
    """(loss, gradient of hidden, of weight, of bias); None in the place of gradients that are not wanted."""
    keep = target != ignore_index
    scale = (
        torch.ones((), dtype=dtype, device=hidden.device) if reduction == "sum" else keep.sum().to(dtype).reciprocal()
    )
    rows, classes = hidden.shape[0], weight.shape[0]
    part = _rows_at_once(rows, classes, hidden.shape[1], hidden.element_size())
    losses = torch.empty(rows, dtype=_wide(dtype), device=hidden.device)
    of_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
    of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
    of_bias = losses.new_zeros(classes) if wanted[2] else None
    buffer = empty_rows(hidden, (part, classes))
    for start in range(0, rows, part):
        here = slice(start, start + part)
        x = hidden[here]
        logits = buffer[: x.shape[0]]
        if bias is None:
            multiply_into(logits, x, weight.t())
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        _over_rows(logits, target[here], keep[here], scale, losses[here], any(wanted))
        if of_hidden is not None:
            multiply_into(of_hidden[here], logits, weight)
        if of_weight is not None:
            multiply_into(of_weight, logits.t(), x, add=start > 0)
        if of_bias is not None:
            of_bias += logits.sum(0, dtype=of_bias.dtype)
    return (losses.sum() * scale).to(dtype), of_hidden, of_weight, None if of_bias is None else of_bias.to(bias.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _over_rows(logits, target, keep, scale, losses, gradient: bool) -> None:
    """Computes the losses of rows and, where `gradient` is set, writes their gradients times `scale` over the
    logits."""
    index = torch.where(keep, target, 0)
    if index.device.type == "cpu" and index.numel():
        low, high = index.aminmax()
        if low < 0 or high >= logits.shape[1]:
            raise IndexError(f"Target {int(low if low < 0 else high)} is out of bounds.")
    chosen = logits.gather(1, index[:, None])[:, 0]  # PyTorch refuses an index that is out of bounds
    if losses.dtype is torch.float32 and logits.device.type == "cuda" and has_triton():
        over_rows(logits, index, keep, chosen, scale, losses, gradient)
        return
    wide = logits.to(losses.dtype)
    sums = torch.logsumexp(wide, 1)
    losses.copy_(torch.where(keep, sums - chosen, 0.0))
    if gradient:
        slope = (wide - sums[:, None] if wide is not logits else wide.sub_(sums[:, None])).exp_()
        slope.scatter_add_(1, index[:, None], torch.full_like(sums, -1.0)[:, None])
        slope.mul_(torch.where(keep, scale, 0.0).to(slope.dtype)[:, None])
        if slope is not logits:
            logits.copy_(slope)


_kernel = Handwritten("linear_cross_entropy_kernel.py", "_over_rows")


@launching
def over_rows(
    steps: Steps, logits: torch.Tensor, target: torch.Tensor, keep: torch.Tensor, chosen: torch.Tensor,
    scale: torch.Tensor, losses: torch.Tensor, gradient: bool,
) -> None:  # fmt: skip
    """Losses (N,) in float32 of logits (N, C), rows of which lie together; with `gradient` their gradients, times
    `scale` (), over the logits. Rows not kept are 0."""
    rows, classes = logits.shape
    if rows:
        tensors = logits, target, keep, chosen, scale, losses
        steps.launch(_kernel, tensors, _settings(rows, classes, logits.stride(0), gradient))


def _settings(rows: int, classes: int, stride: int, gradient: bool) -> Settings:
    block = min(2048, power_of_two(classes))
    return (rows,), (classes, stride, gradient, block), 8 if block == 2048 else 4


# ----------------------------------------------------------------------------------------------------------------
# operations


class LinearCrossEntropyExecutor(CompilesKernels, OperatorExecutor):
    """Joins a linear layer and the cross-entropy of its result, which it finds by data flow."""

    capturable = True

    def has_layer(self, *_, match: Match, **__) -> bool:
        return _chain(match.operation, match.flow) is not None and self.get_fuel()

    def expect(self, trace: Trace) -> None:
        for b in trace.bound_symbols:
            if b.sym in (linear_cross_entropy, with_gradients) and not has_numbers(b.args):
                hidden, weight, _, target, _, _, dtype, *wanted = b.args
                of_logits, device = to_torch_dtype(hidden.dtype), to_torch_device(hidden.device)
                stride = padded_row(weight.shape[0], hidden.dtype.bytes)
                types = of_logits, to_torch_dtype(target.dtype), torch.bool, of_logits, dtype, torch.float32
                gradient = bool(wanted) and any(wanted[0])
                _kernel.start(types, _settings(1, weight.shape[0], stride, gradient), device)


linear_cross_entropy_ex = LinearCrossEntropyExecutor("linear_cross_entropy")


def _decomposition(hidden, weight, bias, target, ignore_index, reduction, dtype):
    logits = ltorch.linear(hidden, weight, bias)
    return ltorch.cross_entropy(ltorch.to(logits, dtype=dtype), target, None, None, ignore_index, None, reduction, 0.0)


def _with_gradients_meta(hidden, weight, bias, target, ignore_index, reduction, dtype, wanted):
    loss = like(hidden, (), from_tensor_dtype(dtype))
    return loss, *(like(x) if w else None for x, w in zip((hidden, weight, bias), wanted, strict=True))


linear_cross_entropy = linear_cross_entropy_ex.register_operator(
    "linear_cross_entropy",
    like=_decomposition,
    fn=lambda *args: _forward(*args, (False, False, False))[0],
    tags=(OpTags.MATMUL_OP,),
)
with_gradients = linear_cross_entropy_ex.register_operator(
    "linear_cross_entropy_with_gradients",
    meta=_with_gradients_meta,
    fn=_forward,
    tags=(OpTags.MATMUL_OP, OpTags.REDUCTION_OP),
)


def _logits(operation: BoundSymbol) -> int:
    """Bytes of the logits in memory at a time."""
    hidden, weight = operation.args[:2]
    classes = number_value(weight.shape[0])
    return (
        _rows_at_once(number_value(hidden.shape[0]), classes, number_value(hidden.shape[1]), hidden.dtype.bytes)
        * classes
        * hidden.dtype.bytes
    )


for _symbol, _wanted in (
    (linear_cross_entropy, lambda operation: ()),
    (with_gradients, lambda operation: operation.args[-1]),
):
    _count = (
        lambda operation, wanted=_wanted: (  # noqa: E731
            (1 + sum(wanted(operation)[:2]))
            * element_count(operation.args[0])
            * number_value(operation.args[1].shape[0])
        )
    )
    cost.rules.set(Cost(multiply_adds=_count, scratch=_logits), _symbol)


def _differentiated(hidden, weight, bias, target, ignore_index, reduction, dtype):
    from thunder.core.transforms import get_grad, put_grad

    inputs = hidden, weight, bias
    wanted = tuple(x is not None and x.requires_grad for x in inputs)
    loss, *gradients = with_gradients(*inputs, target, ignore_index, reduction, dtype, wanted)
    for value, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:
            put_grad(value, times_cotangent(gradient, get_grad(loss)))
    return loss


linear_cross_entropy_ex.register_implementation(
    linear_cross_entropy, linear_cross_entropy, grad_transform=_differentiated
)
register_executor(linear_cross_entropy_ex)
add_default_executor_of_gpus(linear_cross_entropy_ex, here=torch.cuda.is_available())


# ----------------------------------------------------------------------------------------------------------------
# finding them


def _chain(operation: BoundSymbol, flow: Flow) -> tuple[BoundSymbol, list[BoundSymbol]] | None:
    """The linear layer whose only consumer is a cross-entropy, and the operations that move its rows in between; None
    where there is none."""
    if not _plain(*operation.args, **operation.kwargs):
        return None
    moves: list[BoundSymbol] = []
    value: Proxy = operation.args[0]
    while flow.uses(value) == 1 and (producer := flow.producer(value)) is not None:
        if producer.sym is ltorch.linear:
            return (producer, moves[::-1]) if _fits(producer, moves[::-1], operation) else None
        if not _keeps_rows(producer):
            return None
        moves.append(producer)
        value = producer.args[0]
    return None


def _plain(
    a, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
) -> bool:
    """Whether the arguments of a cross-entropy are those that the kernel has: rows of logits, class indices, no
    weights."""
    if not (
        weight is None
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum")
        and label_smoothing == 0.0
    ):
        return False
    return (
        len(a.shape) == 2
        and len(target.shape) == 1
        and target.dtype.name == "int64"
        and not any(isinstance(n, NumberProxy) for n in (a.shape[1], ignore_index))
        and not any(n.unbacked for n in numbers_in((a, target), []))
    )


def _operands(linear: BoundSymbol) -> tuple[TensorProxy, TensorProxy, TensorProxy | None]:
    hidden, weight, bias = (*linear.args, linear.kwargs.get("bias"))[:3]
    return hidden, weight, bias


def _fits(linear: BoundSymbol, moves: list[BoundSymbol], loss: BoundSymbol) -> bool:
    """Whether a linear layer, moves of its logits and a loss are one operation of this executor. moves: conversions and
    reshapes between the two."""
    hidden, weight, bias = _operands(linear)
    logits, parameters = linear.output, [p for p in (weight, bias) if p is not None]
    kinds = [logits.dtype, *(m.output.dtype for m in moves)]
    if len(weight.shape) != 2 or any(k not in (bfloat16, float32, float64) for k in kinds):
        return False
    if any(after.bytes < before.bytes for before, after in pairwise(kinds)) or hidden.device is not loss.args[1].device:
        return False
    if loss.output.requires_grad != any(x.requires_grad for x in (hidden, *parameters)) or any(
        isinstance(n, NumberProxy) for x in (logits.shape[-1:], *(p.shape for p in parameters)) for n in x
    ):
        return False
    if bias is not None and bias.shape != weight.shape[:1]:  # one number for all classes
        return False
    dense = True
    for move in moves:  # a view that PyTorch refuses stays, and is refused
        if move.sym is ltorch.view and not dense:
            return False
        dense = move.sym is not ltorch.getitem and (dense or move.sym is ltorch.contiguous)
    return element_count(logits) * logits.dtype.bytes > LIMIT


def _keeps_rows(operation: BoundSymbol) -> bool:
    """Whether an operation moves, selects or casts whole rows."""
    before, after = operation.args[0], operation.output
    if (
        not isinstance(before, TensorProxy)
        or not isinstance(after, TensorProxy)
        or len(operation.inputs) != 1
        or not after.shape
        or before.shape[-1] != after.shape[-1]
    ):
        return False
    if operation.sym is ltorch.getitem:
        return _picks_rows(operation.args[1], len(before.shape))
    return (
        operation.sym.reshapes
        or operation.sym is ltorch.contiguous
        or operation.sym is ltorch.to
        and before.device is after.device
    )


def _picks_rows(key, rank: int) -> bool:
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is ... or isinstance(k, slice) for k in keys) or sum(k is ... for k in keys) > 1:
        return False
    reaches_last = keys[-1] is not ... and (... in keys or len(keys) == rank)
    return not reaches_last or keys[-1].start is keys[-1].stop is keys[-1].step is None


def _joined(*_, match: Match, **__):
    """The cross-entropy as one operation of the layer's operands: rows move before the product instead of after it."""
    loss, chain = match.operation, _chain(match.operation, match.flow)
    assert chain is not None, "the condition holds"
    linear, moves = chain
    hidden, *parameters = _operands(linear)
    width = hidden.shape[-1]
    for move in moves:
        if move.sym is ltorch.getitem:
            hidden = ltorch.getitem(hidden, move.args[1])
        elif move.sym.reshapes:
            hidden = ltorch.reshape(hidden, (*move.output.shape[:-1], width))
    return _call((hidden, *parameters), to_torch_dtype(loss.args[0].dtype), *loss.args[1:], **loss.kwargs)


def _call(
    operands,
    dtype,
    target,
    class_weights=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """The operation for the arguments of `cross_entropy`, with a layer's operands in the place of logits."""
    return linear_cross_entropy(*operands, target, ignore_index, reduction, dtype)


linear_cross_entropy_ex.register_rule(
    Rule("Linear Cross-Entropy", ltorch.cross_entropy, _joined, linear_cross_entropy_ex.has_layer)
)
