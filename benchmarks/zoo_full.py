"""The programs of zoo_programs.py, and more, in the sizes that people train and serve on one GPU.

`rows(small)` maps a name to a `Row`; what tells most about a compiler comes first. Configurations are public ones, with
fewer layers where all layers are the same; nothing is downloaded. `small`: the same programs in sizes for a test.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from zoo_programs import (
    DLRM,
    Autoencoder,
    CellLoop,
    DiT,
    GraphNetwork,
    LoRA,
    Recurrent,
    Row,
    Task,
    Towers,
    UNet,
    columns,
    dpo_loss,
    ppo_loss,
    without_dropout,
)  # fmt: skip

__all__ = ["rows"]

BF16 = torch.bfloat16


class Cast(nn.Module):
    """A module under autocast, or in float32. It gives the loss where there is one, and otherwise the first result."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args, **kwargs):
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, self.dtype or BF16, enabled=self.dtype is not None):
            outputs = self.module(*args, **kwargs)
        if isinstance(outputs, torch.Tensor):
            return outputs
        return outputs.loss if getattr(outputs, "loss", None) is not None else outputs[0]


class Encoded(nn.Module):
    """A convolutional stem, a transformer, and queries that look into its result, as in DETR (Carion et al. 2020)."""

    def __init__(self, width: int, layers: int, queries: int):
        super().__init__()
        stem = [
            nn.Conv2d(3, width // 4, 7, 4, 3),
            nn.BatchNorm2d(width // 4),
            nn.ReLU(),
            nn.Conv2d(width // 4, width, 4, 4),
        ]
        self.stem = nn.Sequential(*stem)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.transformer = nn.Transformer(width, 8, layers, layers, 4 * width, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(width, 92), nn.Linear(width, 4)

    def forward(self, x):
        seen = self.stem(x).flatten(2).transpose(1, 2)
        y = self.transformer(seen, self.queries.expand(len(x), -1, -1))
        return torch.cat((self.classes(y), self.boxes(y).sigmoid()), dim=-1)


class LongConvolution(nn.Module):
    """Convolutions as long as the text, by Fourier transforms, between gates (Poli et al. 2023)."""

    def __init__(self, width: int, length: int):
        super().__init__()
        self.inputs, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.filters = nn.Parameter(torch.randn(width, length) / length)

    def forward(self, x):
        n = 2 * x.shape[1]
        a, b, v = self.inputs(x).transpose(1, 2).chunk(3, dim=1)
        y = torch.fft.irfft(torch.fft.rfft(a * v, n) * torch.fft.rfft(self.filters, n), n)[..., : x.shape[1]]
        return self.out((b * y).transpose(1, 2))


# --- transformers: what a configuration is given, in full and besides in small sizes
def _decoder(width: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": 2048,
    }  # fmt: skip


_FEW = _decoder(64, 96, 1, 4, 2, 131)
_FEW_OF_GPT2 = {
    "n_layer": 1, "n_embd": 48, "n_head": 4, "vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
}


def _text(batch: int, length: int, vocabulary: int, *, labels: bool = True, padded: bool = False) -> Callable:
    def make(small: bool) -> dict[str, torch.Tensor]:
        shape = (2, 29) if small else (batch, length)
        ids = torch.randint(4, 131 if small else vocabulary, shape)
        settings = {"input_ids": ids} | ({"labels": ids} if labels else {})
        if padded:
            lengths = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1))
            settings["attention_mask"] = (torch.arange(shape[1]) < lengths).long()
        return settings

    return make


def _pictures(batch: int, size: int = 224, small_size: int = 32) -> Callable:
    def make(small: bool) -> dict[str, torch.Tensor]:
        side = small_size if small else size
        return {"pixel_values": torch.randn(2 if small else batch, 3, side, side)}

    return make


def _sounds(small: bool) -> dict[str, torch.Tensor]:
    frames, ids = (64, torch.randint(4, 131, (2, 9))) if small else (3000, torch.randint(4, 50000, (8, 131)))
    return {"input_features": torch.randn(len(ids), 80, frames), "labels": ids}


def _waves(small: bool) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 1601) if small else torch.randn(8, 32001)}


def _series(small: bool) -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(3, 33, 7) if small else torch.randn(128, 513, 7)}


def _translated(small: bool) -> dict[str, torch.Tensor]:
    return _text(16, 307, 32128, padded=True)(small)


def _pairs(small: bool) -> dict[str, Any]:
    texts = torch.randint(4, 131, (2, 9)) if small else torch.randint(4, 49000, (64, 77))
    return {"input_ids": texts, **_pictures(64)(small), "return_loss": True}


# name: (model, configuration, inputs, settings, settings for a test, how: see `_configured`)
_TRANSFORMERS: dict[str, tuple[str, str, Callable, dict, dict, dict]] = {
    "GPT-2 124M with dropout": (
        "GPT2LMHeadModel", "GPT2Config", _text(8, 1024, 50257), {},
        _FEW_OF_GPT2, {"random": True}),
    "ResNet-50, channels_last": (
        "ResNetForImageClassification", "ResNetConfig", _pictures(32), {"num_labels": 1000},
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}, {"channels_last": True}),
    "Llama, 1920 wide, 32003 classes": (
        "LlamaForCausalLM", "LlamaConfig", _text(2, 1111, 32003), _decoder(1920, 5120, 8, 15, 5, 32003), _FEW,
        {"parameters": BF16}),
    "BERT base, padding, dropout": (
        "BertForMaskedLM", "BertConfig", _text(16, 253, 30522, padded=True), {"num_hidden_layers": 6},
        _VISION | {"vocab_size": 131}, {"random": True}),
    "Mixtral, 8 experts": (
        "MixtralForCausalLM", "MixtralConfig", _text(2, 512, 32000),
        _decoder(1024, 3584, 4, 16, 8, 32000) | {"num_local_experts": 8},
        _FEW | {"num_local_experts": 4}, {"parameters": BF16}),
    "Qwen3": (
        "Qwen3ForCausalLM", "Qwen3Config", _text(2, 1024, 32000),
        _decoder(1024, 3072, 6, 16, 8, 32000) | {"head_dim": 128}, _FEW | {"head_dim": 16}, {"parameters": BF16}),
    "ViT base": (
        "ViTForImageClassification", "ViTConfig", _pictures(32), {"num_hidden_layers": 6, "num_labels": 1000},
        _VISION | {"patch_size": 8}, {}),
    "Whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig", _sounds, {},
        {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "max_source_positions": 32, "vocab_size": 131, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}, {}),
    "ConvNeXt tiny": (
        "ConvNextForImageClassification", "ConvNextConfig", _pictures(32), {"num_labels": 1000},
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}, {}),
    "T5 small with dropout": (
        "T5ForConditionalGeneration", "T5Config", _translated, {"decoder_start_token_id": 0},
        {"d_model": 48, "d_ff": 96, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4, "d_kv": 12,
         "vocab_size": 131}, {"random": True}),
    "Swin tiny": (
        "SwinForImageClassification", "SwinConfig", _pictures(32), {"num_labels": 1000},
        {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4],
         "window_size": 4}, {}),
    "Gemma 3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", _text(2, 1024, 32768),
        _decoder(1152, 6912, 6, 4, 1, 32768) | {"head_dim": 256, "sliding_window": 512},
        _FEW | {"head_dim": 16, "sliding_window": 8}, {"parameters": BF16}),
    "Mamba-2": (
        "Mamba2ForCausalLM", "Mamba2Config", _text(2, 1024, 32768),
        {"hidden_size": 768, "num_heads": 24, "num_hidden_layers": 4, "n_groups": 1},
        {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "num_hidden_layers": 1, "state_size": 16, "vocab_size": 131,
         "chunk_size": 16}, {}),
    "Qwen2-MoE, shared experts": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _text(2, 512, 32000),
        _decoder(1024, 2816, 4, 16, 16, 32000) | {"num_experts": 16, "num_experts_per_tok": 4,
         "moe_intermediate_size": 704, "shared_expert_intermediate_size": 2816},
        _FEW | _FEW_EXPERTS | {"shared_expert_intermediate_size": 96}, {"parameters": BF16}),
    "EfficientNet B0": (
        "EfficientNetForImageClassification", "EfficientNetConfig", _pictures(32),
        # with the default range the signal dies out, and gradients of 1e-15 are compared
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "num_labels": 1000,
         "initializer_range": 0.1},
        {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320}, {"channels_last": True}),
    "wav2vec2": (
        "Wav2Vec2Model", "Wav2Vec2Config", _waves,
        {"num_hidden_layers": 4, "apply_spec_augment": False, "layerdrop": 0.0},
        {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96,
         "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_conv_pos_embedding_groups": 4}, {}),
    "SegFormer B0": (
        "SegformerForSemanticSegmentation", "SegformerConfig", _pictures(8, 512, 64), {"num_labels": 150},
        {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 48}, {}),
    "CLIP": (
        "CLIPModel", "CLIPConfig", _pairs,
        {"text_config": {"num_hidden_layers": 4}, "vision_config": {"num_hidden_layers": 4}},
        {"text_config": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 131,
         "intermediate_size": 96}, "vision_config": _VISION | {"patch_size": 8}}, {}),
    "ModernBERT": (
        "ModernBertForMaskedLM", "ModernBertConfig", _text(8, 509, 50368, padded=True), {"num_hidden_layers": 6},
        _VISION | {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
         "sep_token_id": 2}, {}),
    "DINOv2 base": (
        "Dinov2Model", "Dinov2Config", _pictures(16), {"num_hidden_layers": 6},
        _VISION | {"patch_size": 8}, {}),
    "GPT-NeoX": (
        "GPTNeoXForCausalLM", "GPTNeoXConfig", _text(2, 1021, 50432),
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 16},
        _FEW, {"parameters": BF16}),
    "PatchTST": (
        "PatchTSTModel", "PatchTSTConfig", _series,
        {"num_input_channels": 7, "context_length": 513, "patch_length": 16, "patch_stride": 8},
        {"context_length": 33, "patch_length": 6, "patch_stride": 3, "d_model": 32, "num_attention_heads": 4}, {}),
    "Llama, served": (
        "LlamaForCausalLM", "LlamaConfig", _text(4, 509, 32003, labels=False),
        _decoder(2048, 5632, 8, 32, 4, 32003), _FEW,
        {"parameters": BF16, "mode": "infer"}),
    "BERT base, served": (
        "BertModel", "BertConfig", _text(32, 125, 30522, labels=False, padded=True), {"num_hidden_layers": 6},
        _VISION | {"vocab_size": 131}, {"mode": "infer"}),
    "ViT base, float32": (
        "ViTForImageClassification", "ViTConfig", _pictures(8), {"num_hidden_layers": 4},
        _VISION | {"patch_size": 8}, {"autocast": None}),
    "ViT base, TensorFloat-32": (
        "ViTForImageClassification", "ViTConfig", _pictures(16), {"num_hidden_layers": 4},
        _VISION | {"patch_size": 8}, {"autocast": None, "tf32": True}),
    "nanoGPT-like, float16": (
        "GPT2LMHeadModel", "GPT2Config", _text(8, 512, 50304), {"n_layer": 6, "vocab_size": 50304},
        _FEW_OF_GPT2,
        {"autocast": torch.float16}),
}  # fmt: skip


def _configured(
    model: str, config: str, inputs: Callable, settings: dict, tiny: dict, small: bool, *, random: bool = False,
    parameters: torch.dtype | None = None, autocast: torch.dtype | None = BF16, channels_last: bool = False,
    mode: str = "train", tf32: bool = False,
) -> Task:  # fmt: skip
    """random: with dropout. parameters: their type, without autocast. autocast: its type."""
    import transformers

    transformers.logging.set_verbosity_error()
    configuration = getattr(transformers, config)(**(settings | tiny if small else settings))
    module = getattr(transformers, model)(configuration)
    if not random:
        without_dropout(module)
        for m in module.modules():
            for name, value in vars(m).items():
                if "drop" in name and isinstance(value, float):
                    setattr(m, name, 0.0)
    module, arguments = module.train(mode != "infer"), inputs(small)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
        arguments["pixel_values"] = arguments["pixel_values"].to(memory_format=torch.channels_last)
    wrapped = Cast(module.to(parameters), None if parameters else autocast)
    return Task(wrapped, (), arguments, mode, random=random, tf32=tf32)


# --- programs in plain PyTorch
def _language_model(small: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_FEW if small else _decoder(768, 2048, 4, 12, 12, 32000))))


def _whole(optimizer_of: Callable, small: bool, scaled: bool = False) -> Task:
    model = Cast(_language_model(small), torch.float16 if scaled else BF16)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    optimizer, scaler = optimizer_of(model, matrices), torch.amp.GradScaler(enabled=scaled)

    def step(**arguments):
        optimizer.zero_grad()
        loss = model(**arguments)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Task(step, (), _text(4, 512, 32000)(small), "step", [model])


def _lora(small: bool) -> Task:
    module = _language_model(small).requires_grad_(False).to(BF16)
    for block in list(module.modules()):
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(block, name, LoRA(child).to(BF16))
    return Task(Cast(module, None), (), _text(4, 512, 32000)(small))


def _dlrm(small: bool) -> Task:
    tables, count, bags, width = (3, 101, 7, 8) if small else (26, 100003, 4099, 64)
    indices = [torch.randint(count, (bags * 4,)) for _ in range(tables)]
    inputs = (torch.randn(bags, 13), indices, [torch.arange(0, bags * 4, 4)] * tables)
    return Task(DLRM(tables, count, width), inputs)


def _graph(small: bool) -> Task:
    nodes, edges, width = (31, 67, 8) if small else (20011, 160001, 128)
    inputs = (torch.randn(nodes, width), torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,)))
    return Task(GraphNetwork(width), inputs)


def _ppo(small: bool) -> Task:
    shape, classes = ((3, 7), 31) if small else ((8, 509), 32003)

    def some():
        return torch.randn(shape)

    logits, values = torch.randn(*shape, classes, requires_grad=True), some().requires_grad_()
    actions = torch.randint(classes, shape)
    return Task(ppo_loss, (logits, values, actions, some() - 4, some(), some(), (some() > -1).float()))


def _diffused(module: nn.Module, *shape: int) -> Task:
    return Task(Cast(module, BF16), (torch.randn(*shape), torch.rand(shape[0]) * 1000))


def _columns(small: bool) -> Task:
    shape = (41, 30) if small else (4099, 3073)
    return Task(columns, (torch.randn(*shape, requires_grad=True), torch.randn(*shape)))


def _recurrent(kind: type, small: bool) -> Task:
    if small:
        return Task(Recurrent(kind), (torch.randint(131, (3, 17)),))
    return Task(Recurrent(kind, 10007, 512), (torch.randint(10007, (32, 131)),))


def _autoencoded(small: bool) -> Task:
    batch, side, width = (2, 16, 8) if small else (32, 128, 64)
    noise = torch.randn(batch, width, side // 4, side // 4)
    return Task(Autoencoder(width).train(), (torch.randn(batch, 3, side, side), noise))


def _detected(small: bool) -> Task:
    module = Encoded(48, 1, 5) if small else Encoded(256, 4, 100)
    return Task(Cast(module, BF16), (torch.randn(2, 3, 64, 64) if small else torch.randn(8, 3, 512, 512),))


def _convolved(small: bool) -> Task:
    batch, length, width = (2, 33, 24) if small else (8, 2048, 768)
    return Task(LongConvolution(width, length), (torch.randn(batch, length, width),))


def _looped(small: bool) -> Task:
    batch, length, inputs, width = (4, 9, 24, 32) if small else (64, 64, 256, 512)
    return Task(CellLoop(inputs, width), (torch.randn(batch, length, inputs),))


_PROGRAMS: dict[str, Callable[[bool], Task]] = {
    "pointwise and columns, 4099 x 3073": _columns,
    "U-Net with group norms": lambda s: _diffused(UNet(16 if s else 192), *((2, 3, 16, 16) if s else (16, 3, 64, 64))),
    "LSTM": lambda s: _recurrent(nn.LSTM, s),
    "step with AdamW": lambda s: _whole(lambda m, _: torch.optim.AdamW(m.parameters(), lr=1e-3), s),
    "DLRM": _dlrm,
    "DiT": lambda s: _diffused(DiT(48 if s else 768, 1 if s else 6), *((2, 4, 8, 8) if s else (16, 4, 32, 32))),
    "PPO loss, 32003 classes": _ppo,
    "graph network": _graph,
    "Llama with LoRA": _lora,
    "DETR-like": _detected,
    "variational autoencoder": _autoencoded,
    "step with Adafactor": lambda s: _whole(lambda m, _: torch.optim.Adafactor(m.parameters(), lr=1e-2), s),
    "step with Muon": lambda s: _whole(lambda m, matrices: torch.optim.Muon(matrices, lr=1e-2), s),
    "step with GradScaler": lambda s: _whole(lambda m, _: torch.optim.SGD(m.parameters(), lr=1e-2), s, scaled=not s),
    "long convolutions": _convolved,
    "GRU": lambda s: _recurrent(nn.GRU, s),
    "LSTM as a loop": _looped,
    "contrastive towers": lambda s: Task(
        Towers(48 if s else 1024), (torch.randint(307, (33 if s else 2053, 7)), torch.randn(33 if s else 2053, 57))
    ),
    "DPO loss": lambda s: Task(dpo_loss, tuple(torch.randn(1021, requires_grad=i < 2) for i in range(4))),
}  # fmt: skip


def rows(small: bool) -> dict[str, Row]:
    results: dict[str, Callable[[], Task]] = {}
    if find_spec("transformers"):
        for name, (*what, how) in _TRANSFORMERS.items():
            results[name] = lambda what=what, how=how: _configured(*what, small, **how)
    for name, make in _PROGRAMS.items():
        results[name] = lambda make=make: make(small)
    names = ["step with AdamW", "step with Adafactor", "step with Muon", "step with GradScaler", "Llama with LoRA"]
    for name in names if not find_spec("transformers") else ["step with Muon"] * (not hasattr(torch.optim, "Muon")):
        del results[name]
    first = [name for name in FIRST if name in results]
    return {name: Row("full size", results[name]) for name in dict.fromkeys((*first, *results))}


FIRST = (
    "GPT-2 124M with dropout", "ResNet-50, channels_last", "pointwise and columns, 4099 x 3073",
    "Llama, 1920 wide, 32003 classes", "BERT base, padding, dropout", "Mixtral, 8 experts", "U-Net with group norms",
    "LSTM", "step with AdamW", "ViT base", "ConvNeXt tiny", "Whisper", "DLRM", "DiT", "graph network", "Qwen3",
    "PPO loss, 32003 classes", "T5 small with dropout",
)  # fmt: skip
