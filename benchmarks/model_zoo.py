"""The models that thunder is held against, built from configurations with random weights: nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402  the environment first
import transformers as hf  # noqa: E402

from thunder.tests.litgpt_model import GPT  # noqa: E402
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT  # noqa: E402

__all__ = ["MODELS"]

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 96, 32, 2, 4, 12

Example = tuple[torch.nn.Module, tuple, dict]
MODELS: dict[str, Callable[[], Example]] = {}


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def model(name: str) -> Callable:
    def register(build: Callable[[], Example]) -> Callable[[], Example]:
        def seeded() -> Example:
            torch.manual_seed(0)
            module, args, kwargs = build()
            return module.eval(), args, kwargs

        MODELS[name] = seeded
        return seeded

    return register


@model("nanoGPT")
def _():
    return NanoGPT(GPTConfig(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS)), (tokens(),), {}


@model("litgpt_model llama2-like")
def _():
    return GPT.from_name("llama2-like"), (tokens(),), {}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip


def decoder(name: str, config: str, module: str, **settings) -> None:
    """A causal language model of transformers, without and with the cache it returns."""

    @model(name)
    def _():
        made = getattr(hf, module)(getattr(hf, config)(**settings))
        return made, (), {"input_ids": tokens()}


decoder("Llama", "LlamaConfig", "LlamaForCausalLM", **DECODER)
decoder("Mistral", "MistralConfig", "MistralForCausalLM", **DECODER, head_dim=8)
decoder("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", **DECODER)
decoder("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", **DECODER, head_dim=8)
decoder("Gemma2", "Gemma2Config", "Gemma2ForCausalLM", **DECODER, head_dim=8)
decoder("Phi3", "Phi3Config", "Phi3ForCausalLM", **DECODER)
decoder("GPT2", "GPT2Config", "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64, **SPECIAL)
decoder("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", **{k: v for k, v in DECODER.items() if k != "num_key_value_heads"})
decoder(
    "OPT", "OPTConfig", "OPTForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    max_position_embeddings=64, word_embed_proj_dim=WIDTH, **SPECIAL,
)  # fmt: skip
decoder("Bloom", "BloomConfig", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **SPECIAL)
decoder("Falcon", "FalconConfig", "FalconForCausalLM", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, **SPECIAL)
decoder("Mixtral", "MixtralConfig", "MixtralForCausalLM", **DECODER, num_local_experts=4, num_experts_per_tok=2)


ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def encoder(name: str, config: str, module: str, **settings) -> None:
    @model(name)
    def _():
        made = getattr(hf, module)(getattr(hf, config)(**settings))
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, LENGTH // 2 :] = 0
        return made, (), {"input_ids": tokens(), "attention_mask": mask}


encoder("BERT", "BertConfig", "BertModel", **ENCODER)
encoder("RoBERTa", "RobertaConfig", "RobertaModel", **ENCODER)
encoder("DistilBERT", "DistilBertConfig", "DistilBertModel", vocab_size=VOCABULARY, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=2 * WIDTH, pad_token_id=0)
encoder("ELECTRA", "ElectraConfig", "ElectraModel", **ENCODER, embedding_size=WIDTH)


@model("T5")
def _():
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2
    )
    return hf.T5ForConditionalGeneration(config), (), {"input_ids": tokens(), "decoder_input_ids": tokens(length=6)}


@model("BART")
def _():
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=2, **SPECIAL,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config), (), {"input_ids": tokens(), "decoder_input_ids": tokens(length=6)}


@model("Whisper")
def _():
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, num_mel_bins=8, max_source_positions=16, max_target_positions=32, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, **SPECIAL,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config), (), {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": tokens(length=6)}


@model("ViT")
def _():
    config = hf.ViTConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH, image_size=16, patch_size=4)
    return hf.ViTModel(config), (torch.randn(2, 3, 16, 16),), {}


@model("CLIP")
def _():
    text = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH, **SPECIAL}
    vision = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH, "image_size": 16, "patch_size": 4}
    config = hf.CLIPConfig(text_config={**text, "max_position_embeddings": 32}, vision_config=vision, projection_dim=16)
    return hf.CLIPModel(config), (), {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 16, 16)}


@model("Mamba")
def _():
    config = hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, **SPECIAL)
    return hf.MambaForCausalLM(config), (), {"input_ids": tokens()}


try:
    import litgpt
except ImportError:
    litgpt = None

if litgpt is not None:

    @model("litgpt GPT")
    def _():
        config = litgpt.Config(block_size=64, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH)
        return litgpt.GPT(config), (tokens(),), {}
