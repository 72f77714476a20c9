"""Small models of many architectures, built from configurations: nothing is downloaded.

`MODELS` maps a name to a function that gives `(module, args, kwargs)`: the module in eval mode and float32, its weights
drawn from a fixed seed, and one set of inputs. What needs an optional package appears when that package is installed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

__all__ = ["MODELS", "named_tensors", "seeded"]

BATCH, TIME, VOCAB = 2, 16, 128
Built = tuple[nn.Module, tuple, dict[str, Any]]
MODELS: dict[str, Callable[[], Built]] = {}


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in an output, with where they stand in it: containers, dataclasses and the caches of transformers are
    looked into."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from named_tensors(item, f"{path}[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{path}.{field.name}")
    elif type(value).__module__.startswith("transformers."):
        yield from named_tensors(vars(value), path)


def seeded(make: Callable[[], Built]) -> Callable[[], Built]:
    """`make` with its weights and inputs drawn from a fixed seed, and its module in eval mode."""

    def build() -> Built:
        torch.manual_seed(0)
        module, args, kwargs = make()
        return module.eval(), args, kwargs

    return build


def tokens(length: int = TIME) -> torch.Tensor:
    # from 4 on: the ids below are beginnings, ends and paddings in some of the configurations
    return torch.randint(4, VOCAB, (BATCH, length))


def padding_mask(length: int = TIME) -> torch.Tensor:
    """The second text is a quarter shorter than the first."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, -(length // 4) :] = 0
    return mask


# --- the models of thunder.tests
def nanogpt() -> Built:
    from thunder.tests.nanogpt_model import GPTConfig, NanoGPT

    return NanoGPT(GPTConfig(block_size=64, vocab_size=VOCAB, n_layer=2, n_head=4, n_embd=64)), (tokens(),), {}


def llama2_like() -> Built:
    from thunder.tests.litgpt_model import GPT

    return GPT.from_name("llama2-like"), (tokens(),), {}


def nanogpt_with_loss() -> Built:
    module, (ids,), _ = nanogpt()
    return module, (ids, ids.roll(-1, 1)), {}


MODELS |= {
    "nanoGPT": seeded(nanogpt),
    "nanoGPT with its loss": seeded(nanogpt_with_loss),
    "litgpt_model llama2-like": seeded(llama2_like),
}

# --- transformers: (model class, configuration class, what the configuration is given, the kind of input)
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = _SIZES | {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}
_BERT = _SIZES | {"intermediate_size": 128, "max_position_embeddings": 64}
_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_ENCODER_DECODER = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
}
_VISION_TOWER = _TOWER | {"image_size": 32, "patch_size": 8}
_TEXT_TOWER = _TOWER | {
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": 0,
}
_DISTIL = {
    "vocab_size": VOCAB,
    "dim": 64,
    "hidden_dim": 128,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
_MAMBA = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, "text"),
    "Mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 8}, "text"),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, "text"),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA | {"head_dim": 16}, "text"),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config",
    _LLAMA | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}, "text"),
    "Phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA, "text"),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config",
    {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2}, "text"),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _BERT, "text"),
    "OPT": ("OPTForCausalLM", "OPTConfig",
    _SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64}, "text"),
    "Bloom": ("BloomForCausalLM", "BloomConfig",
    {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 3}, "text"),
    "Falcon": ("FalconForCausalLM", "FalconConfig", _SIZES | {"multi_query": True, "parallel_attn": True}, "text"),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "text"),
    "BERT": ("BertModel", "BertConfig", _BERT, "padded text"),
    "RoBERTa": ("RobertaModel", "RobertaConfig", _BERT, "padded text"),
    "DistilBERT": ("DistilBertModel", "DistilBertConfig", _DISTIL, "padded text"),
    "ELECTRA": ("ElectraModel", "ElectraConfig", _BERT | {"embedding_size": 32}, "padded text"),
    "T5": ("T5ForConditionalGeneration", "T5Config",
    _SEQ2SEQ | {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}, "two texts"),
    "BART": ("BartForConditionalGeneration", "BartConfig",
    _SEQ2SEQ | _ENCODER_DECODER | {"max_position_embeddings": 64, "forced_eos_token_id": 2}, "two texts"),
    "Whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _SEQ2SEQ | _ENCODER_DECODER | {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32,
            "suppress_tokens": None, "begin_suppress_tokens": None},
        "sound",
    ),
    "ViT": ("ViTModel", "ViTConfig", _VISION_TOWER, "picture"),
    "CLIP": ("CLIPModel", "CLIPConfig", {"text_config": _TEXT_TOWER, "vision_config": _VISION_TOWER,
    "projection_dim": 32}, "picture and text"),
    "Mamba": ("MambaForCausalLM", "MambaConfig", _MAMBA, "text"),
}  # fmt: skip


def _inputs(kind: str) -> dict[str, torch.Tensor]:
    picture = {"pixel_values": torch.randn(BATCH, 3, 32, 32)} if "picture" in kind else {}
    match kind:
        case "text":
            return {"input_ids": tokens()}
        case "padded text":
            return {"input_ids": tokens(), "attention_mask": padding_mask()}
        case "two texts":
            return {"input_ids": tokens(), "attention_mask": padding_mask(), "decoder_input_ids": tokens(8)}
        case "sound":
            # 64 frames: twice max_source_positions
            return {"input_features": torch.randn(BATCH, 8, 64), "decoder_input_ids": tokens(8)}
        case "picture":
            return picture
        case "picture and text":
            ids = tokens()
            ids[:, -1] = VOCAB - 1  # the end of the text is where the largest id stands
            return {"input_ids": ids, "attention_mask": padding_mask()} | picture
    raise ValueError(f"no such kind of input: {kind!r}")


def _from_transformers(model_name: str, config_name: str, settings: dict[str, Any], kind: str) -> Callable[[], Built]:
    def make() -> Built:
        import transformers

        transformers.logging.set_verbosity_error()  # Mamba says each time that its CUDA kernels are missing
        config = getattr(transformers, config_name)(**settings)
        return getattr(transformers, model_name)(config), (), _inputs(kind)

    return make


if find_spec("transformers"):
    MODELS |= {name: seeded(_from_transformers(*row)) for name, row in _TRANSFORMERS.items()}


# --- litgpt
def litgpt() -> Built:
    from litgpt import GPT, Config

    sizes = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 64,
        "n_query_groups": 2,
        "intermediate_size": 172,
        "block_size": 64,
        "vocab_size": VOCAB,
        "padded_vocab_size": VOCAB,
    }
    return GPT(Config.from_name("Llama-2-7b-hf", **sizes)), (tokens(),), {}


if find_spec("litgpt"):
    MODELS["litgpt GPT"] = seeded(litgpt)
