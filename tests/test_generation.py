"""`generate` of transformers, compiled in three ways: tokens are eager's, and programs are few."""

import pytest
import torch

import thunder

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
WINDOW = {"sliding_window": 12}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 512,
    "forced_eos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "mistral": ("MistralForCausalLM", "MistralConfig", SIZES | WINDOW),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | WINDOW),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5 | {"decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART | {"decoder_start_token_id": 1}),
}
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "beam": {"do_sample": False, "num_beams": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
    "without a cache": {"do_sample": False, "use_cache": False},
    "assisted": {"do_sample": False, "assisted": True},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "penalties": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


def model(name: str, seed: int = 0):
    kind, config, options = MODELS[name]
    torch.manual_seed(seed)
    return getattr(transformers, kind)(getattr(transformers, config)(**options, **TOKENS)).eval()


def generated(generate, way: str, name: str, tokens: int, batch: int) -> torch.Tensor:
    options = dict(WAYS[way])
    if options.pop("assisted", False):
        options["assistant_model"] = model(name, 3)
    torch.manual_seed(5)
    prompt = torch.randint(2, 97, (batch, 7))
    mask = torch.ones_like(prompt)
    mask[0, : batch - 1] = 0  # the first of several is padded
    return generate(prompt, attention_mask=mask, max_new_tokens=tokens, **options)


def compared(name: str, way: str, jit, tokens: int = 20, batch: int = 1) -> thunder.compiled.Compiled:
    """Checks tokens against eager's. jit: makes of a model what generates, and the compiled function in it."""
    wanted = generated(model(name).generate, way, name, tokens, batch)
    generate, compiled = jit(model(name))
    assert torch.equal(generated(generate, way, name, tokens, batch), wanted)
    return compiled


def by_module(model):
    compiled = thunder.jit(model)
    return compiled.generate, compiled._compiled


def by_forward(model):
    model.forward = compiled = thunder.jit(model.forward)
    return model.generate, compiled


def as_a_whole(model):
    compiled = thunder.jit(model.generate)
    return compiled, compiled


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(way):
    assert len(compared("llama", way, by_module).programs) <= 4


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name, most", [("mistral", 6), ("gemma3", 6), ("gpt2", 3), ("t5", 4), ("bart", 4)])
@pytest.mark.parametrize("way", ["greedy", "static"])
def test_caches(name, most, way):
    """A sliding window has programs for: not full, full after this token, full, and one place short of each."""
    assert len(compared(name, way, by_forward, batch=2).programs) <= most


@pytest.mark.sweep(2)
@pytest.mark.parametrize("jit", [by_module, by_forward])
def test_256_tokens_have_four_programs_at_most(jit):
    assert len(compared("llama", "greedy", jit, tokens=256).programs) <= 4


@pytest.mark.parametrize("way", ["greedy", "sampling", "static"])
def test_generate_as_one_program(way):
    """Each token is a part of the program."""
    assert len(compared("llama", way, as_a_whole, tokens=5).programs) == 1
