"""The sdpa executor: attention differentiated through the kernels that PyTorch has for GPUs, chosen when the program is
compiled.

    thunder.jit(model, executors=["sdpa"])

Before: `t0 = ltorch.scaled_dot_product_attention(q, k, v, None, 0.0, True)`, with PyTorch's own derivative. After:
`(t0, t1, t2, t3) = sdpa_cudnn(q, k, v, None, 0.0, True, None)`, and `(t5, t6, t7) = sdpa_cudnn_backward(t4, q, k, v,
None, t0, t1, t2, t3, 0.0, True, None)`: t1 are the logarithms of the rows' sums, t2 and t3 what dropout was drawn from.
The result has the layout of q, as eager's has.

PyTorch says which kernels take the arguments (`torch.backends.cuda.can_use_*`), under the flags of the moment
(`torch.nn.attention.sdpa_kernel`), on which a program depends that was compiled with them. Of those that do, the first
in the order of measured speed is used, or in the order that the user gave. Causal, (1, 32, 2048, 128) in bfloat16 on an
H200, forward / backward in ms: cuDNN 0.084 / 0.258, flash 0.167 / 0.471, memory-efficient 0.269 / 0.909. Without a
kernel, and without grad, attention is PyTorch's own call.

cuDNN makes a plan for each size, which takes the host as long as hundreds of calls of a small size gain by it. A
program of many sizes therefore calls `sdpa_by_size`: flash attention, or with a mask memory-efficient attention, until
calls of a size were worth a plan.

PyTorch's kernels take tensors of four dimensions, and its own call composes attention of others from products and a
softmax. Windows as a fifth dimension, and heads that are missing, become four dimensions here where a kernel takes
them.

Keys and values that are repeated for groups of queries are not repeated where the kernel takes fewer heads of them:
`k.repeat_interleave(n, 1)` as well as `k[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from thunder import compat
from thunder.analysis import cost
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import Cost
from thunder.core.devices import cpu
from thunder.core.dtypes import float32, float64, int64, uint64
from thunder.core.proxies import (
    Proxy,
    TensorProxy,
    element_count,
    equal_shapes,
    has_numbers,
    like,
    number_value,
    numbers_in,
)
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.extend import OperatorExecutor, add_default_executor_of_gpus, register_executor
from thunder.extend.rules import Match, Rule
from thunder.ops import ltorch
from thunder.ops.backward import sum_to
from thunder.ops.families.attention import (
    attended_in_blocks,
    attention_bias,
    attention_with_dropout,
    differentiated_by_products,
    fits_flash_for_cpu,
    lower_right_attention,
    scaled_dot_product_attention,
    scores,
)
from thunder.ops.infer import run_line
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

ALIGNMENT = 16  # bytes


def arguments_of(operation: BoundSymbol) -> tuple:
    """query, key, value, attn_mask, dropout_p, is_causal."""
    query, key, value, *rest = operation.args
    return query, key, value, *rest, *(None, 0.0, False)[len(rest) :]


def without_copies(operation: BoundSymbol, producer: dict[Proxy, BoundSymbol], choose: Callable) -> BoundSymbol:
    """The operation with keys and values that kernels read as well where they lie as where they are copied to: a cache
    that was empty joins them with nothing. The result is laid out as the query is, which stays."""
    if choose(*arguments_of(operation), bool(operation.kwargs.get("enable_gqa"))) is None:
        return operation
    query, *key_and_value = operation.args[:3]
    uncopied = [_uncopied(x, producer) for x in key_and_value]
    if all(a is b for a, b in zip(uncopied, key_and_value, strict=True)):
        return operation
    return operation.replace(args=(query, *uncopied, *operation.args[3:]))


def _uncopied(x: TensorProxy, producer: dict[Proxy, BoundSymbol]) -> TensorProxy:
    operation = producer.get(x)
    if operation is None or operation.sym not in (ltorch.clone, ltorch.contiguous, ltorch.cat):
        return x
    source = operation.args[0]
    if operation.sym is ltorch.cat:
        parts = [t for t in source if len(t.shape) != 1 or t.shape[0] != 0]
        source = parts[0] if len(parts) == 1 else None
    fits = source is not None and source.dtype is x.dtype and source.requires_grad is x.requires_grad
    return _uncopied(source, producer) if fits and _is_aligned(source, producer) else x


def _is_aligned(x: TensorProxy, producer: dict[Proxy, BoundSymbol]) -> bool:
    """Whether a view of a row-major result has dense rows that begin at multiples of 16 bytes."""
    views, base = [], x
    while (operation := producer.get(base)) is not None and may_view(operation):
        if sum(isinstance(i, TensorProxy) for i in operation.inputs) != 1 or OpTags.OPAQUE in operation.sym.tags:
            return False
        views.append(operation)
        base = operation.args[0]
    if operation is None or any(n.unbacked for n in numbers_in(base, [])):
        return False
    shape = tuple(map(number_value, base.shape))
    values: dict = {base: torch.empty(shape, dtype=to_torch_dtype(base.dtype), device="meta")}
    with compat.DisableTorchFunction():
        for operation in reversed(views):
            run_line(operation, values, number_value)
    value = values[x]
    *steps, last = (value.storage_offset(), *value.stride())
    return last == 1 and all(n * value.element_size() % ALIGNMENT == 0 for n in steps)


def grouped(operation: BoundSymbol, producer: dict[Proxy, BoundSymbol], choose: Callable) -> tuple | None:
    """Keys and values of fewer heads, where those that go into an operation are repetitions of them and its kernel
    takes them as they are."""
    query, key, value, attn_mask, dropout_p, is_causal = arguments_of(operation)
    if operation.kwargs.get("enable_gqa") or len(query.shape) != 4:
        return None
    repeated = [_repeated(x, producer) for x in (key, value)]
    if any(f is None for f in repeated) or repeated[0][1] != repeated[1][1]:  # type: ignore[index]
        return None
    (key, _), (value, _) = repeated  # type: ignore[misc]
    if (
        fits_flash_for_cpu(query, key, value, attn_mask, dropout_p, True)
        or choose(query, key, value, attn_mask, dropout_p, is_causal, True) is not None
    ):
        return key, value
    return None


def _repeated(x: TensorProxy, producer: dict[Proxy, BoundSymbol]) -> tuple[TensorProxy, int] | None:
    """(what is repeated, how often) of a value each head of which is repeated."""
    operation = producer.get(x)
    if operation is None or len(x.shape) != 4:
        return None
    if operation.sym is ltorch.repeat_interleave:
        source, times, dim = (*operation.args, None, None)[:3]
        return (
            (source, times)
            if type(times) is int
            and type(dim) is int
            and dim in (1, -3)
            and not operation.kwargs
            and len(source.shape) == 4
            else None
        )
    if not operation.sym.reshapes:
        return None
    spread = producer.get(operation.args[0])
    if (
        spread is None
        or spread.sym is not ltorch.expand
        or (inserted := producer.get(spread.args[0])) is None
        or len(spread.output.shape) != 5
    ):
        return None
    b, h, n, t, d = spread.output.shape
    source = inserted.args[0]
    if not _inserts_third(inserted) or not (
        equal_shapes(source.shape, (b, h, t, d)) and equal_shapes(x.shape, (b, h * n, t, d))
    ):
        return None
    return source, n


def _inserts_third(operation: BoundSymbol) -> bool:
    """Whether an operation gives a tensor of 4 dimensions another one of size 1 at place 2."""
    if not operation.inputs or len(getattr(operation.inputs[0], "shape", ())) != 4:
        return False
    if operation.sym is ltorch.unsqueeze:
        return operation.args[1] in (2, -3)
    key = operation.args[1] if operation.sym is ltorch.getitem and isinstance(operation.args[1], tuple) else ()
    return (
        len(key) >= 3
        and key[2] is None
        and all(_is_all(k) for k in key[:2])
        and all(k is ... or _is_all(k) for k in key[3:])
    )


def _is_all(key) -> bool:
    return isinstance(key, slice) and key.start is None and key.stop is None and key.step is None


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


# multiply-adds for which cuDNN gains the 75 ms that a plan takes on an H100, by the speeds at the top of this file
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
    """The backward of PyTorch's memory-efficient attention. of_bias: whether the bias gets a gradient."""
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
    """Gives the forwards of a kernel their derivative: its backward, on the saved result and statistics."""
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


def _choose(usable: Callable, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa) -> Kernel | None:
    """The kernel for a call, or None where PyTorch's own call is as good. usable: says which of the kernels takes
    tensors that are described. Sizes that stay symbolic are taken to be as they were at capture: beside whether there
    are as many queries as keys, and any, kernels do not ask for how many there are."""
    tensors = [query, key, value, *((attn_mask,) if attn_mask is not None else ())]
    if (
        query.device.type != "cuda"
        or any(len(t.shape) != 4 for t in tensors[:3])
        or any(n.unbacked for n in numbers_in(tensors, []))
        or is_causal
        and not equal_shapes(query.shape[2:3], key.shape[2:3])
        and has_numbers((query, key))
    ):
        return None
    if not 0.0 <= dropout_p < 1.0 or any(n == 0 for t in tensors for n in t.shape):
        return None
    described = tuple(
        (tuple(map(number_value, t.shape)), to_torch_dtype(t.dtype), to_torch_device(t.device), t.requires_grad)
        for t in tensors
    )
    backends = compat.attention_backends()
    kernel = usable(described, dropout_p, is_causal, enable_gqa, backends)
    if kernel is CUDNN and has_numbers((query, key)) and dropout_p == 0.0 and backends[-1] is None:
        others = *backends[:3], False, *backends[4:]
        if attn_mask is None:
            return BY_SIZE if usable(described, dropout_p, is_causal, enable_gqa, others) is FLASH else kernel
        of_query, *rest = described
        as_many = [((*shape[:1], of_query[0][1], *shape[2:]), *more) for shape, *more in rest[:2]]
        second = usable((of_query, *as_many, *rest[2:]), dropout_p, is_causal, False, others)
        return BY_SIZE if second is EFFICIENT else kernel
    return kernel


@functools.lru_cache(maxsize=1024)
def _usable(described: tuple, dropout_p: float, is_causal: bool, enable_gqa: bool, backends: tuple) -> Kernel | None:
    """backends: as `attention_backends` gives them."""
    allowed, order = dict(zip(("flash", "efficient", "products", "cudnn"), backends, strict=False)), backends[-1]
    # memory that nobody writes to is had for nothing, while the first fake tensor of a process imports Dynamo
    with (
        compat.DisableTorchFunction(),
        contextlib.nullcontext() if torch.cuda.is_available() else compat.FakeTensorMode(),
    ):
        query, key, value, *mask = [
            torch.empty(shape, dtype=dtype, device=device, requires_grad=wanted)
            for shape, dtype, device, wanted in described
        ]
        arguments = torch.backends.cuda.SDPAParams(
            query, key, value, mask[0] if mask else None, dropout_p, is_causal, enable_gqa
        )
        kernels = [k for k in KERNELS if allowed[k.name]]
        for kernel in kernels if order is None else sorted(kernels, key=lambda k: order.index(k.number)):
            if order is not None and backends[2] and order.index(0) < order.index(kernel.number):
                return None  # products come first
            if getattr(torch.backends.cuda, f"can_use_{kernel.name}_attention")(arguments):
                return kernel if (kernel.hidden is not None or not mask) and _takes(kernel, query, value) else None
    return None


def _takes(kernel: Kernel, query: torch.Tensor, value: torch.Tensor) -> bool:
    """PyTorch pads heads for flash attention, which is left to it."""
    return kernel.name != "flash" or query.shape[-1] % 8 == 0 and query.shape[-1] == value.shape[-1]


def _assumed(described: tuple, dropout_p: float, is_causal: bool, enable_gqa: bool, backends: tuple) -> Kernel | None:
    """What `_usable` says on an H100 or H200, as far as shapes and dtypes tell."""
    (query, dtype, *_), *_ = described
    half, size, mask = dtype in (torch.float16, torch.bfloat16), query[-1], len(described) > 3
    takes = {
        "cudnn": half and backends[3] and size % 8 == 0 and size <= 128,
        "flash": half and backends[0] and size % 8 == 0 and size <= 256 and not mask,
        "efficient": backends[1] and size % 4 == 0 and dtype is not torch.float64 and not enable_gqa,
    }
    return next((kernel for kernel in KERNELS if takes[kernel.name]), None)


class SDPAExecutor(OperatorExecutor):
    """Chooses kernels, and takes repetitions away. usable: says which kernel takes what."""

    def __init__(self, name: str, *, usable: Callable = _usable, **options):
        super().__init__(name, **options)
        self.usable = usable
        for symbol in (scaled_dot_product_attention, attention_with_dropout):
            self.register_implementation(
                symbol,
                checker=self._checker,
                execution_transform=self._executed,
                grad_transform=self._differentiated,
            )
            self.register_rule(Rule(f"Kernels of {symbol.name}", symbol, self._changed, self._changes))

        self.register_rule(
            Rule("Attention in four dimensions", scaled_dot_product_attention, _in_four, self._takes_in_four)
        )
        self.register_implementation(
            lower_right_attention,
            checker=lambda *args: self._kernel_of_blocks(*args) is not None,
            execution_transform=lambda *args: next(self._in_blocks(*args)),
            grad_transform=self._differentiated_in_blocks,
        )

    def _takes_in_four(self, *_, match: Match, **__) -> bool:
        *tensors, attn_mask, dropout_p, is_causal = arguments_of(match.operation)
        enable_gqa = bool(match.operation.kwargs.get("enable_gqa"))
        ranks = {len(t.shape) for t in tensors}
        if attn_mask is not None or dropout_p > 0.0 or len(ranks) != 1 or not ranks.isdisjoint((2, 4)):
            return False
        if has_numbers(tensors) or len({t.shape[:-3] if ranks != {3} else t.shape[:1] for t in tensors}) != 1:
            return False
        four = [like(t, shape=_four(t)) for t in tensors]
        return self._choose(*four, None, 0.0, is_causal, enable_gqa) is not None

    def _kernel_of_blocks(self, query, key, value, scale=None, enable_gqa=False) -> Kernel | None:
        """The kernel for queries and the keys before them, and for those at their positions."""
        kernel = self._choose(query, key, value, None, 0.0, False, enable_gqa)
        return kernel if kernel in (CUDNN, FLASH) else None

    def _in_blocks(self, query, key, value, scale=None, enable_gqa=False):
        """Attention over blocks of keys that other ranks send, with the kernel that attends inside one block."""
        kernel = self._kernel_of_blocks(query, key, value, scale, enable_gqa)
        assert kernel is not None, "the checker was asked before"
        drawn: list = []

        def forward(query, key, value, is_causal):
            out, sums, *states = kernel.forward(query, key, value, None, 0.0, is_causal, scale)
            drawn[:] = states  # of nothing: there is no dropout
            return out, ltorch.reshape(sums, query.shape[:3])

        def backward(g, query, key, value, out, sums, is_causal):
            sums = ltorch.unsqueeze(sums, -1) if kernel is CUDNN else sums
            return kernel.backward(g, query, key, value, None, out, sums, *drawn, 0.0, is_causal, scale)

        return (yield from attended_in_blocks(query, key, value, forward, backward))

    def _differentiated_in_blocks(self, query, key, value, scale=None, enable_gqa=False):
        from thunder.core.transforms import get_grad, put_grads

        steps = self._in_blocks(query, key, value, scale, enable_gqa)
        out = next(steps)
        try:
            steps.send(get_grad(out))
        except StopIteration as done:
            put_grads((query, key, value), done.value)
        return out

    def planned(self) -> SDPAExecutor:
        return self if torch.cuda.is_available() else SDPAExecutor(self.name, usable=_assumed, version=self.version)

    def _choose(self, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa) -> Kernel | None:
        return _choose(self.usable, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)

    def _checker(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        """Without grad, PyTorch's own call takes the same kernel, except where that depends on the size; but each call
        converts the mask again."""
        is_mask = attn_mask is not None and attn_mask.dtype.category == 0
        if attn_mask is not None and not is_mask and attn_mask.dtype is not query.dtype:
            return False
        kernel = self._choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        wanted = kernel is BY_SIZE or is_mask or any(t.requires_grad for t in (query, key, value))
        return kernel is not None and wanted

    def _kernel_operands(
        self, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    ) -> tuple[Kernel, tuple]:
        """The kernel and its arguments."""
        kernel = self._choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        assert kernel is not None, "the checker was asked before"
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype.category == 0:
            bias = attention_bias(attn_mask, to_torch_dtype(query.dtype), kernel.hidden)
        if kernel.aligns and bias is not None and not bias.requires_grad:
            bias = aligned_bias(bias, key.shape[2] if equal_shapes(bias.shape[-1:], (1,)) else bias.shape[-1])
        return kernel, (query, key, value, bias, dropout_p, is_causal, scale)

    def _executed(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        kernel, operands = self._kernel_operands(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return kernel.with_dropout(*operands)[0] if dropout_p > 0.0 else kernel.without_grad(*operands)

    def _differentiated(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        """The grad transform of attention: the forward that saves statistics, and the backward of the same kernel."""
        from thunder.core.transforms import get_grad, put_grads

        kernel, operands = self._kernel_operands(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        steps = (kernel.with_dropout if dropout_p > 0.0 else kernel.forward).grad_rule(*operands)
        out, *saved = next(steps)
        try:
            steps.send((get_grad(out), *(None for _ in saved)))
        except StopIteration as done:
            put_grads((query, key, value, attn_mask), done.value)
        return out

    def _without_repetitions(self, match: Match) -> BoundSymbol:
        """Attention that reads its operands without copies, and no repeated keys and values."""
        uncopied = without_copies(match.operation, match.flow.producers, self._choose)
        fewer = grouped(uncopied, match.flow.producers, self._choose)
        if fewer is None:
            return uncopied
        return uncopied.replace(
            args=(uncopied.args[0], *fewer, *uncopied.args[3:]), kwargs={**uncopied.kwargs, "enable_gqa": True}
        )

    def _is_kernel_now(self, operation: BoundSymbol) -> bool:
        """Without grad, attention is written as its kernel already here, so that layers share what is made of a
        mask."""
        without_grad = not any(t.requires_grad for t in operation.inputs if isinstance(t, TensorProxy))
        return without_grad and self._checker(*operation.args, **operation.kwargs)

    def _changes(self, *_, match: Match, **__) -> bool:
        changed = self._without_repetitions(match)
        return changed is not match.operation or self._is_kernel_now(changed)

    def _changed(self, *_, match: Match, **__):
        changed = self._without_repetitions(match)
        run = self._executed if self._is_kernel_now(changed) else changed.sym
        return run(*changed.args, **changed.kwargs)


def _four(x: TensorProxy) -> tuple:
    """The shape of queries, keys or values in four dimensions: batches are one dimension, missing heads are one."""
    heads = x.shape[-3] if len(x.shape) > 3 else 1
    return element_count(x) // (heads * x.shape[-2] * x.shape[-1]), heads, *x.shape[-2:]


def _in_four(*_, match: Match, **options):
    *tensors, _, _, is_causal = arguments_of(match.operation)
    operands = [ltorch.reshape(x, _four(x)) for x in tensors]
    out = scaled_dot_product_attention(*operands, None, 0.0, is_causal, **options)
    query, _, value = tensors
    return ltorch.reshape(out, (*query.shape[:-1], value.shape[-1]))


sdpa_ex = SDPAExecutor("sdpa", version=torch.__version__)
register_executor(sdpa_ex)
add_default_executor_of_gpus(sdpa_ex, here=torch.cuda.is_available())
