"""A GPT with the names and shapes of LitGPT's: Llama-, NeoX-, Falcon- and Mixtral-style decoders from one
configuration.

Written for tests, benchmarks and the documents' examples. `apply_rope` is looked up in this module when it is called,
so that it can be replaced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "Config",
    "GPT",
    "Block",
    "CausalSelfAttention",
    "LLaMAMLP",
    "GptNeoxMLP",
    "LLaMAMoE",
    "RMSNorm",
    "apply_rope",
    "build_rope_cache",
    "configs",
]


@dataclass
class Config:
    """Sizes and choices of a decoder. Derived values that are not given follow from the others when the model is
    built."""

    name: str = ""
    block_size: int = 4096
    vocab_size: int = 320
    padded_vocab_size: int | None = None
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    head_size: int | None = None
    n_query_groups: int | None = None
    intermediate_size: int | None = None
    rotary_percentage: float = 1.0
    rope_n_elem: int | None = None
    rope_base: int = 10000
    parallel_residual: bool = False
    shared_attention_norm: bool = False
    bias: bool = False
    lm_head_bias: bool = False
    norm_class_name: str = "RMSNorm"
    norm_eps: float = 1e-5
    mlp_class_name: str = "LLaMAMLP"
    n_expert: int = 0
    n_expert_per_token: int = 0
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        self.head_size = self.head_size or self.n_embd // self.n_head
        self.n_query_groups = self.n_query_groups or self.n_head
        self.padded_vocab_size = self.padded_vocab_size or self.vocab_size
        self.intermediate_size = self.intermediate_size or 4 * self.n_embd
        self.rope_n_elem = (
            self.rope_n_elem if self.rope_n_elem is not None else int(self.rotary_percentage * self.head_size)
        )

    @classmethod
    def from_name(cls, name: str, **changes) -> Config:
        """The configuration of a known model. Raises ValueError, which lists the known names, for another."""
        if name not in configs:
            raise ValueError(f"{name!r} is not a known configuration; known: {', '.join(configs)}")
        return cls(**({"name": name} | configs[name] | changes))

    @property
    def norm_class(self) -> type[nn.Module]:
        return RMSNorm if self.norm_class_name == "RMSNorm" else nn.LayerNorm

    @property
    def mlp_class(self) -> type[nn.Module]:
        return {"LLaMAMLP": LLaMAMLP, "GptNeoxMLP": GptNeoxMLP, "LLaMAMoE": LLaMAMoE}[self.mlp_class_name]


_TINY = {"block_size": 4096, "vocab_size": 320, "n_layer": 2, "n_head": 4, "n_embd": 64}
configs: dict[str, dict] = {
    "Llama-2-7b-hf": {"block_size": 4096, "vocab_size": 32000, "n_layer": 32, "n_head": 32, "n_embd": 4096,
    "intermediate_size": 11008},
    "Llama-3-8B": {
        "block_size": 8192, "vocab_size": 128256, "n_layer": 32, "n_head": 32, "n_query_groups": 8, "n_embd": 4096,
        "intermediate_size": 14336, "rope_base": 500000,
    },
    "llama2-like": _TINY | {"intermediate_size": 172},
    "llama3-like": _TINY | {"intermediate_size": 224, "n_query_groups": 2, "rope_base": 500000},
    "gpt-neox-like": _TINY | {
        "rotary_percentage": 0.25, "parallel_residual": True, "bias": True, "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
    },
    "falcon-7b-like": _TINY | {
        "n_query_groups": 1, "parallel_residual": True, "shared_attention_norm": True, "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
    },
    "mixtral-like": _TINY | {"intermediate_size": 96, "n_query_groups": 2, "mlp_class_name": "LLaMAMoE", "n_expert": 4,
    "n_expert_per_token": 2},
}  # fmt: skip
assert set().union(*configs.values()) <= {f.name for f in fields(Config)}, (
    "a configuration names a field that there is not"
)


class GPT(nn.Module):
    """Token ids (batch, time) to logits (batch, time, padded_vocab_size)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": config.norm_class(config.n_embd, eps=config.norm_eps),
            }
        )
        self.max_seq_length = config.block_size
        self.mask_cache: torch.Tensor | None = None
        cos, sin = build_rope_cache(config.block_size, config.rope_n_elem, base=config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @classmethod
    def from_name(cls, name: str, **changes) -> GPT:
        return cls(Config.from_name(name, **changes))

    def forward(self, idx: torch.Tensor, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        T = idx.size(1)
        if self.max_seq_length < T:
            raise ValueError(f"Cannot forward sequence of length {T}, max seq length is only {self.max_seq_length}.")
        if input_pos is not None:
            cos, sin = self.cos.index_select(0, input_pos), self.sin.index_select(0, input_pos)
            if self.mask_cache is None:
                raise TypeError("You need to call `gpt.set_kv_cache()`")
            mask = self.mask_cache.index_select(2, input_pos)
        else:
            cos, sin, mask = self.cos[:T], self.sin[:T], None
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, cos, sin, mask, input_pos)
        x = self.transformer.ln_f(x)
        return self.lm_head(x)

    def set_kv_cache(self, batch_size: int, max_seq_length: int | None = None, device=None, dtype=None) -> None:
        """Gives every attention layer a key-value cache, for calls with `input_pos`."""
        length = max_seq_length or self.max_seq_length
        for block in self.transformer.h:
            block.attn.kv_cache = KVCache(
                (batch_size, self.config.n_query_groups, length, self.config.head_size), device=device, dtype=dtype
            )
        self.mask_cache = torch.tril(torch.ones((length, length), device=device, dtype=torch.bool)).view(
            1, 1, length, length
        )

    def clear_kv_cache(self) -> None:
        self.mask_cache = None
        for block in self.transformer.h:
            block.attn.kv_cache = None


class Block(nn.Module):
    """Attention and feed-forward, one after the other or side by side."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm_1 = config.norm_class(config.n_embd, eps=config.norm_eps)
        self.attn = CausalSelfAttention(config)
        self.norm_2 = None if config.shared_attention_norm else config.norm_class(config.n_embd, eps=config.norm_eps)
        self.mlp = config.mlp_class(config)
        self.config = config

    def forward(self, x, cos, sin, mask=None, input_pos=None):
        x_normed = self.norm_1(x)
        attention_output = self.attn(x_normed, cos, sin, mask, input_pos)
        if self.config.parallel_residual:
            x_normed = x_normed if self.norm_2 is None else self.norm_2(x)
            return attention_output + self.mlp(x_normed) + x
        x = attention_output + x
        return self.mlp(self.norm_2(x)) + x


class CausalSelfAttention(nn.Module):
    """Rotary attention with grouped queries."""

    def __init__(self, config: Config):
        super().__init__()
        self.attn = nn.Linear(
            config.n_embd, (config.n_head + 2 * config.n_query_groups) * config.head_size, bias=config.bias
        )
        self.proj = nn.Linear(config.head_size * config.n_head, config.n_embd, bias=config.bias)
        self.kv_cache: KVCache | None = None
        self.config = config

    def forward(self, x, cos, sin, mask=None, input_pos=None):
        config = self.config
        B, T, _ = x.size()
        qkv = self.attn(x)
        q_per_kv = config.n_head // config.n_query_groups
        qkv = qkv.view(B, T, config.n_query_groups, q_per_kv + 2, config.head_size)
        qkv = qkv.permute(0, 2, 3, 1, 4)  # (B, groups, queries per group + 2, T, head size)
        q, k, v = qkv.split((q_per_kv, 1, 1), dim=2)
        q = q.reshape(B, -1, T, config.head_size)
        k = k.reshape(B, -1, T, config.head_size)
        v = v.reshape(B, -1, T, config.head_size)
        n = config.rope_n_elem
        q_roped = apply_rope(q[..., :n], cos, sin)
        k_roped = apply_rope(k[..., :n], cos, sin)
        q = torch.cat((q_roped, q[..., n:]), dim=-1) if n < config.head_size else q_roped
        k = torch.cat((k_roped, k[..., n:]), dim=-1) if n < config.head_size else k_roped
        if input_pos is not None:
            if self.kv_cache is None:
                raise TypeError("You need to call `gpt.set_kv_cache()`")
            k, v = self.kv_cache(input_pos, k, v)
        if config.n_query_groups != config.n_head:
            k, v = (t.repeat_interleave(q_per_kv, dim=1) for t in (k, v))
        scale = 1.0 / math.sqrt(config.head_size)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=mask is None)
        y = y.transpose(1, 2).reshape(B, T, config.head_size * config.n_head)
        return self.proj(y)


class KVCache(nn.Module):
    """Keys and values of the positions seen so far."""

    def __init__(self, shape: tuple[int, ...], device=None, dtype=None):
        super().__init__()
        self.register_buffer("k", torch.zeros(shape, device=device, dtype=dtype), persistent=False)
        self.register_buffer("v", torch.zeros(shape, device=device, dtype=dtype), persistent=False)

    def forward(self, input_pos, k, v):
        self.k = self.k.to(k.dtype).index_copy(2, input_pos, k)
        self.v = self.v.to(v.dtype).index_copy(2, input_pos, v)
        return self.k, self.v


class GptNeoxMLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class LLaMAMLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.fc_1 = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.fc_2 = nn.Linear(config.n_embd, config.intermediate_size, bias=config.bias)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.bias)

    def forward(self, x):
        x_fc_1 = self.fc_1(x)
        x_fc_2 = self.fc_2(x)
        x = F.silu(x_fc_1) * x_fc_2
        return self.proj(x)


class LLaMAMoE(nn.Module):
    """A mixture of experts: every expert sees every token, and those that were not chosen have weight 0."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.n_expert, bias=False)
        self.experts = nn.ModuleList(LLaMAMLP(config) for _ in range(config.n_expert))
        self.config = config

    def forward(self, x):
        router = self.gate(x)
        probs, chosen = torch.topk(router, self.config.n_expert_per_token)
        probs = probs.softmax(dim=-1, dtype=torch.float).to(x.dtype)
        weights = torch.zeros_like(router).scatter(-1, chosen, probs)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + weights[..., i, None] * expert(x)
        return y


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, dim: int = -1, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.dim = dim

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=self.dim, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        return (x_normed * self.weight.float()).to(dtype=dtype)


def build_rope_cache(seq_len: int, n_elem: int, device=None, base: int = 10000) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotary angles, each (seq_len, n_elem) (Su et al., RoFormer, 2021)."""
    theta = 1.0 / (base ** (torch.arange(0, n_elem, 2, device=device, dtype=torch.float32) / n_elem))
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), theta).repeat(1, 2)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of x (batch, heads, time, width) by the angles of cos and sin (time, width)."""
    half = x.size(-1) // 2
    x1, x2 = x[..., :half], x[..., half:]
    rotated = torch.cat((-x2, x1), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(dtype=x.dtype)
