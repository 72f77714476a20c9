"""The programs that `benchmarks/gpu.py` measures: memory-bound pieces of models, and Llama-style models at the sizes of
their papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["WORKLOADS", "Workload"]

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Workload:
    """A function or module, its arguments, and whether its gradients are taken.

    reads_again: whether a backward that keeps nothing but the arguments has to read them again; it is what the roofline
    assumes.
    """

    function: Callable
    args: tuple
    trains: bool
    reads_again: bool = True


class MLP(nn.Module):
    """The gated feed-forward part of a Llama block."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rope(x, cos, sin):
    """Rotary position embedding of x, (batch, heads, time, size); cos and sin: (time, size)."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, time, width = x.shape
        parts = self.qkv(x).split([n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        q, k, v = (p.view(batch, time, -1, self.size).transpose(1, 2) for p in parts)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if self.kv_heads != self.heads:
            k, v = (p.repeat_interleave(self.heads // self.kv_heads, dim=1) for p in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, kv_heads), MLP(width, inner)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """Logits for token numbers (batch, time); with labels, the mean cross-entropy."""

    def __init__(
        self,
        layers: int,
        time: int,
        *,
        width: int = 4096,
        heads: int = 32,
        kv_heads: int = 32,
        inner: int = 11008,
        vocabulary: int = 32000,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(time).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size)).repeat(
            1, 2
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        cos, sin = (table[: tokens.size(1)].to(x.dtype) for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _llama(
    layers: int, time: int, *, loss: bool = False, trains: bool = True, vocabulary: int = 32000, **sizes
) -> Workload:
    with torch.device("cuda"):
        model = Llama(layers, time, vocabulary=vocabulary, **sizes).to(BF16).requires_grad_(trains)
        tokens = torch.randint(1, vocabulary, (1, time))
    return Workload(model, (tokens, tokens.roll(-1, 1)) if loss else (tokens,), trains)


def _mlp(dtype: torch.dtype) -> Workload:
    with torch.device("cuda"):
        return Workload(
            MLP(4096, 11008).to(dtype).requires_grad_(False), (torch.randn(2, 2048, 4096, dtype=dtype),), False
        )


def _rope() -> Workload:
    x = torch.randn(2, 128, 4096, 16, device="cuda", dtype=BF16, requires_grad=True)
    return Workload(
        rope, (x, torch.randn(4096, 16, device="cuda"), torch.randn(4096, 16, device="cuda")), True, reads_again=False
    )


def _cross_entropy() -> Workload:
    logits = torch.randn(2048, 50257, device="cuda", requires_grad=True)
    return Workload(
        lambda x, y: F.cross_entropy(x, y, ignore_index=-1),
        (logits, torch.randint(0, 50257, (2048,), device="cuda")),
        True,
    )


def _geglu() -> Workload:
    def f(x, b):
        return F.gelu(x + b) * torch.sigmoid(x) + F.layer_norm(x, (x.shape[-1],))

    return Workload(
        f,
        (
            torch.randn(8192, 4096, device="cuda", requires_grad=True),
            torch.randn(4096, device="cuda", requires_grad=True),
        ),
        True,
    )


def _transformers_llama() -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, use_cache=False, tie_word_embeddings=False
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(BF16)
    tokens = torch.randint(1, 1000, (1, 2048), device="cuda")

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return Workload(Loss(), (tokens,), True)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "rope": _rope,
    "xent": _cross_entropy,
    "rmsnorm": lambda: Workload(
        RMSNorm(4096).to("cuda", BF16),
        (torch.randn(8, 2048, 4096, device="cuda", dtype=BF16, requires_grad=True),),
        True,
    ),
    "geglu_chain": _geglu,
    "mlp": lambda: _mlp(torch.float32),
    "mlp_bf16": lambda: _mlp(BF16),
    "llama16_grad": lambda: _llama(16, 512),
    "llama16_decode": lambda: _llama(16, 1, trains=False),
    "llama7b_train": lambda: _llama(32, 2048, loss=True),
    "llama3_train": lambda: _llama(16, 4096, loss=True, kv_heads=8, inner=14336, vocabulary=128256),
    "hf_llama": _transformers_llama,
}
