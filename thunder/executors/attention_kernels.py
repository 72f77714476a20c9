"""PyTorch's attention kernels for GPUs as operations: forwards, backwards and derivatives.

`sdpa_by_size` chooses at run time. cuDNN makes a plan for each size, which takes the host as long as hundreds of calls
of a small size gain by it. So a program of many sizes runs flash attention, or with a mask memory-efficient attention,
until the calls of a size are worth a plan.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

import torch

from thunder import compat
from thunder.analysis import cost
from thunder.analysis.cost import Cost
from thunder.core.devices import cpu
from thunder.core.dtypes import float32, float64, int64, uint64
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops.backward import sum_to
from thunder.ops.families.attention import differentiated_by_products, scores


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With the last dimension dense, as kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _for_every_key(bias, key):
    return None if bias is None else _rows(bias.expand(*bias.shape[:-1], key.shape[2]))


def _for_cudnn(bias, query, key):
    """cuDNN takes matrices and batches of them."""
    bias = bias if bias is None or bias.dim() > 1 else bias.expand(query.shape[2], *bias.shape)
    return _for_every_key(bias, key)


# forwards are called by PyTorch's bindings in C, which take the host 3 to 5 us less than `torch.ops`; backwards have
# none


def _cudnn(query, key, value, bias, dropout_p, is_causal, scale):
    bias = _for_cudnn(bias, query, key)
    results = compat.cudnn_attention(
        _rows(query), _rows(key), _rows(value), bias, True, dropout_p, is_causal, False, scale=scale
    )
    return results[0], results[1], results[6], results[7]


def _cudnn_backward(g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale):
    bias, lengths = _for_cudnn(bias, query, key), (query.shape[2], key.shape[2])
    operands = g, _rows(query), _rows(key), _rows(value), out, sums
    return compat.kernel("_scaled_dot_product_cudnn_attention_backward")(
        *operands, seed, offset, bias, None, None, *lengths, dropout_p, is_causal, scale=scale
    )


def _flash(query, key, value, bias, dropout_p, is_causal, scale):
    results = compat.flash_attention(_rows(query), _rows(key), _rows(value), dropout_p, is_causal, False, scale=scale)
    return results[0], results[1], results[6], results[7]


def _flash_backward(g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale):
    lengths = query.shape[2], key.shape[2]
    operands = g, _rows(query), _rows(key), _rows(value), out, sums
    return compat.kernel("_scaled_dot_product_flash_attention_backward")(
        *operands, None, None, *lengths, dropout_p, is_causal, seed, offset, scale=scale
    )


# multiply-adds for which cuDNN gains the 75 ms that a plan takes on an H100, by the speeds in `sdpaex`
WORTH_A_PLAN = 15e12
CALLS = 1e6  # of one size, at most: calls of which so many are not worth a plan, as in decoding, are not counted
_work: collections.Counter = collections.Counter()  # multiply-adds so far, by sizes


def _is_planned(trains: bool, query: torch.Tensor, key: torch.Tensor, bias, is_causal: bool) -> bool:
    """Whether cuDNN has plans of these sizes, or reason to make them, to which each call adds: one, and one for the
    backward where the call trains."""
    batch, heads, queries, size = query.shape
    work = (7 if trains else 2) * batch * heads * queries * size * key.shape[2] // (1 + is_causal)
    if work * CALLS < WORTH_A_PLAN:
        return False
    mask = None if bias is None else bias.shape
    what = query.dtype, batch, heads, queries, size, key.shape[1], key.shape[2], mask, is_causal
    done, plans = _work[what], 2 if trains else 1
    if done < plans * WORTH_A_PLAN:
        _work[what] += work
    return done >= plans * WORTH_A_PLAN


def _attended(planned: bool, query, key, value, bias, is_causal, scale):
    """The result and the natural logarithms of the rows' sums, in rows that may be longer than there are queries."""
    attend = _cudnn if planned else _flash if bias is None else _efficient_of_groups
    return attend(query, key, value, bias, 0.0, is_causal, scale)[:2]


def _by_size_without_grad(query, key, value, bias, dropout_p, is_causal, scale):
    planned = _is_planned(False, query, key, bias, is_causal)
    return _attended(planned, query, key, value, bias, is_causal, scale)[0]


def _by_size(query, key, value, bias, dropout_p, is_causal, scale):
    """Nothing is drawn: in the place of a seed stands whether cuDNN ran."""
    planned = _is_planned(True, query, key, bias, is_causal)
    out, sums = _attended(planned, query, key, value, bias, is_causal, scale)
    rows = query.shape[1] * query.shape[2] // sums.shape[1]
    sums = sums[:, :, :rows].reshape(query.shape[:3])
    return out, sums, *(torch.full((), n, dtype=torch.int64) for n in (planned, 0))


def _by_size_backward(g, query, key, value, bias, out, sums, planned, offset, dropout_p, is_causal, scale):
    """The backward of the kernel that ran: backwards read results and sums in the memory layout of their own forwards,
    and cuDNN's plans, which PyTorch finds by the layouts of queries, keys and values, keep the one that they saw
    first."""
    undrawn = sums.new_empty((), dtype=torch.int64)
    if planned.item():
        run, sums = _cudnn_backward, sums[..., None]
    else:
        run = _flash_backward if bias is None else _efficient_backward_of_groups
    return run(g, query, key, value, bias, out, sums, undrawn, undrawn, dropout_p, is_causal, scale)


def _efficient(query, key, value, bias, dropout_p, is_causal, scale):
    bias = _aligned(bias, query, key)
    return compat.kernel("_scaled_dot_product_efficient_attention")(
        _rows(query), _rows(key), _rows(value), bias, True, dropout_p, is_causal, scale=scale
    )


def _efficient_backward(
    g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale, of_bias=False
):
    bias = _aligned(bias, query, key)
    if dropout_p:
        seed, offset = _drawn(seed), _drawn(offset)
    operands = g, _rows(query), _rows(key), _rows(value), bias, out, sums, seed, offset
    gradients = compat.kernel("_scaled_dot_product_efficient_attention_backward")(
        *operands, dropout_p, [True, True, True, of_bias], is_causal, scale=scale
    )
    return gradients if of_bias else gradients[:3]


def _drawn(number: torch.Tensor) -> torch.Tensor:
    """A seed or offset that the forward has drawn, where the backward's kernel reads it: on the GPU while a graph is
    recorded, otherwise on the CPU. A forward that ran as a graph has left it on the GPU."""
    return number.cpu() if number.is_cuda and not torch.cuda.is_current_stream_capturing() else number


def _efficient_of_groups(query, key, value, bias, dropout_p, is_causal, scale):
    """The kernel takes as many heads of keys as of queries: the queries of a group become rows where each has one, as
    in decoding; else keys and values are repeated."""
    batch, heads, queries, size = query.shape
    groups = key.shape[1], heads // key.shape[1]
    if groups[1] == 1:
        return _efficient(query, key, value, bias, dropout_p, is_causal, scale)
    if queries > 1:
        repeated = (x.repeat_interleave(groups[1], 1) for x in (key, value))
        return _efficient(query, *repeated, bias, dropout_p, is_causal, scale)
    if bias.dim() > 2 and bias.shape[-3] > 1:
        bias = bias.expand(batch, heads, 1, bias.shape[-1]).reshape(batch, *groups, bias.shape[-1])
    out, *rest = _efficient(query.reshape(batch, *groups, size), key, value, bias, dropout_p, is_causal, scale)
    return out.reshape(batch, heads, 1, -1), *rest


def _efficient_backward_of_groups(g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale):
    """sums: of as many rows as there are queries. The kernel reads them in blocks of 32 rows."""
    groups = key.shape[1], query.shape[1] // key.shape[1]
    repeated = [x.repeat_interleave(groups[1], 1) if groups[1] > 1 else x for x in (key, value)]
    sums = torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32), value=float("inf"))
    of_query, *rest = _efficient_backward(
        g, query, *repeated, bias, out, sums, seed, offset, dropout_p, is_causal, scale
    )
    return of_query, *(x.unflatten(1, groups).sum(2) if groups[1] > 1 else x for x in rest)


def _aligned(bias, query, key):
    """A bias for every head and row as the kernel reads it."""
    return None if bias is None else _run_aligned(bias, key.shape[2]).expand(*query.shape[:3], key.shape[2])


def _run_aligned(bias, keys):
    bias = bias.expand(*bias.shape[:-1], keys)
    *outer, last = bias.stride()
    if last != 1 or any(s % 16 for s in outer) or bias.data_ptr() % 16:
        rows = bias.new_zeros if keys % 16 else bias.new_empty
        bias = rows(*bias.shape[:-1], keys + -keys % 16)[..., :keys].copy_(bias)
    return bias


# a bias with dense rows that begin at multiples of 16 elements: an operation of its own, which is shared by the layers
# that add one bias, and by their backwards
aligned_bias = Symbol(
    "aligned_bias",
    lambda bias, keys: like(bias, (*bias.shape[:-1], keys)),
    id="aligned_bias",
    is_prim=True,
    fn=_run_aligned,
)


def _on_the_host(query):
    return tuple(TensorProxy(shape=(), dtype=int64, device=cpu) for _ in range(2))


class Kernel(NamedTuple):
    """number: what PyTorch counts it as in orders of priority. hidden: what is added to scores that a mask hides; None
    for a kernel that takes no mask. aligns: whether a bias has to be aligned. without_grad: the result alone."""

    name: str
    number: int
    without_grad: Symbol
    forward: Symbol
    with_dropout: Symbol
    backward: Symbol
    hidden: float | None
    aligns: bool


def attention_kernel(
    name: str, number: int, forward: Callable, backward: Callable, sums: Callable, drawn: Callable,
    hidden: float | None, aligns: bool = False, without_grad: Callable | None = None,
) -> Kernel:  # fmt: skip
    """sums: the shape of the logarithms of rows' sums, for that of the query. drawn: types of what dropout is drawn
    from, for the query."""

    def meta(query, key, value, bias, dropout_p, is_causal, scale):
        return (
            like(query, (*query.shape[:3], value.shape[3])),
            like(query, sums(*query.shape[:3]), float64 if query.dtype is float64 else float32),
            *drawn(query),
        )

    def backward_meta(g, query, key, value, bias, *rest):
        of_bias = (like(bias, (*query.shape[:3], key.shape[2])),) if len(rest) == 8 and rest[-1] else ()
        return like(query), like(key), like(value), *of_bias

    kernels = [
        Symbol(label, meta, id=label, is_prim=True, tags=(OpTags.MATMUL_OP, *tags), fn=forward)
        for label, tags in ((f"sdpa_{name}", ()), (f"sdpa_{name}_with_dropout", (OpTags.RANDOM_OP,)))
    ]
    label = f"sdpa_{name}_without_grad"
    alone = Symbol(
        label, lambda *args: meta(*args)[0], id=label, is_prim=True, tags=(OpTags.MATMUL_OP,),
        fn=without_grad or (lambda *args: forward(*args)[0]),
    )  # fmt: skip
    for symbol in (alone, *kernels):
        count = lambda operation: 2 * scores(*operation.args[:2], operation.args[5])  # noqa: E731
        cost.rules.set(Cost(multiply_adds=count, rate="attention"), symbol)
    last = Symbol(
        f"sdpa_{name}_backward",
        backward_meta,
        id=f"sdpa_{name}_backward",
        is_prim=True,
        tags=(OpTags.MATMUL_OP,),
        fn=backward,
    )
    cost.rules.set(
        Cost(
            multiply_adds=lambda operation: 5 * scores(*operation.args[1:3], operation.args[10]),
            rate="attention_backward",
            kernels=3,
        ),
        last,
    )

    kernel = Kernel(name, number, alone, *kernels, last, hidden, aligns)
    _register_derivatives(kernel)
    return kernel


def _register_derivatives(kernel: Kernel) -> None:
    last = kernel.backward
    for symbol in (kernel.forward, kernel.with_dropout):
        symbol.nondifferentiable = (1, 2, 3)

        @symbol.vjp
        def _(query, key, value, bias, dropout_p, is_causal, scale, symbol=symbol):
            bias_or_none = (
                aligned_bias(bias, key.shape[2]) if kernel.aligns and bias is not None and bias.requires_grad else bias
            )
            out, *saved = symbol(query, key, value, bias_or_none, dropout_p, is_causal, scale)
            g, *_ = yield out, *saved
            of_bias = (True,) if bias is not None and bias.requires_grad else ()
            gradients = last(g, query, key, value, bias_or_none, out, *saved, dropout_p, is_causal, scale, *of_bias)
            return *gradients[:3], sum_to(gradients[3], bias.shape) if of_bias else None

    @last.vjp
    def _(g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale, *of_bias):
        """`out` and `sums` are functions of query, key and value, and the derivative with respect to these is the whole
        one."""
        if dropout_p > 0.0 or of_bias:
            return NotImplemented
        cotangents = yield last(g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale)
        return differentiated_by_products(
            g, query, key, value, bias, is_causal, scale, key.shape[1] != query.shape[1], cotangents
        )


# in the order of their speed, as measured
KERNELS = (
    attention_kernel(
        "cudnn",
        3,
        _cudnn,
        _cudnn_backward,
        lambda b, h, n: (b, h, n, 1),
        lambda q: (like(q, (), int64), like(q, (), int64)),
        -65504.0,
    ),
    attention_kernel(
        "flash",
        1,
        _flash,
        _flash_backward,
        lambda b, h, n: (b, h, n),
        lambda q: (like(q, (2,), uint64), like(q, (), uint64)),
        None,
    ),
    attention_kernel(
        "efficient",
        2,
        _efficient,
        _efficient_backward,
        lambda b, h, n: (b, h, -(-n // 32) * 32),
        _on_the_host,
        float("-inf"),
        aligns=True,
    ),
)

CUDNN, FLASH, EFFICIENT = KERNELS
BY_SIZE = attention_kernel(
    "by_size", 1, _by_size, _by_size_backward, lambda b, h, n: (b, h, n), _on_the_host, CUDNN.hidden, aligns=True,
    without_grad=_by_size_without_grad,
)  # fmt: skip
