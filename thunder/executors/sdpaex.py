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

import contextlib
import functools
from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy, element_count, equal_shapes, has_numbers, like, number_value, numbers_in
from thunder.core.symbol import BoundSymbol
from thunder.executors.attention_kernels import BY_SIZE, CUDNN, EFFICIENT, FLASH, KERNELS, Kernel, aligned_bias
from thunder.executors.attention_operands import arguments_of, grouped, without_copies
from thunder.extend import OperatorExecutor, add_default_executor_of_gpus, register_executor
from thunder.extend.rules import Match, Rule
from thunder.ops import ltorch
from thunder.ops.families.attention import (
    attended_in_blocks,
    attention_bias,
    attention_with_dropout,
    lower_right_attention,
    scaled_dot_product_attention,
)
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


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
