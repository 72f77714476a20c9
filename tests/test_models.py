"""The models of thunder.tests and the model list of benchmarks/, in PyTorch itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.model_zoo import MODELS, named_tensors, seeded
from benchmarks.training import measure_training
from thunder.tests import litgpt_model
from thunder.tests.litgpt_model import GPT, Config, configs
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT

TINY = [name for name in configs if name.endswith("-like")]


def tiny(name: str) -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT.from_name(name, block_size=32).eval()
    return model, torch.randint(0, model.config.vocab_size, (2, 12))


def test_llama2_has_the_documented_sizes():
    config = Config.from_name("Llama-2-7b-hf")
    assert (config.n_layer, config.n_embd, config.n_head, config.intermediate_size, config.padded_vocab_size) == (
        32,
        4096,
        32,
        11008,
        32000,
    )
    assert (config.head_size, config.n_query_groups, config.rope_n_elem, config.block_size) == (128, 32, 128, 4096)


def test_module_tree_is_printed_as_documented():
    config = Config.from_name("Llama-2-7b-hf")
    config.n_layer = 16
    with torch.device("meta"):
        text = repr(GPT(config))
    for line in (
        "  (lm_head): Linear(in_features=4096, out_features=32000, bias=False)",
        "    (wte): Embedding(32000, 4096)",
        "      (0-15): 16 x Block(",
        "        (norm_1): RMSNorm()",
        "          (attn): Linear(in_features=4096, out_features=12288, bias=False)",
        "          (fc_2): Linear(in_features=4096, out_features=11008, bias=False)",
        "    (ln_f): RMSNorm()",
    ):
        assert line in text.splitlines(), line


def test_rotary_tables_are_two_dimensional():
    model = GPT.from_name("llama2-like")
    assert model.cos.shape == model.sin.shape == (4096, 16)


def test_sizes_may_change_after_from_name():
    config = Config.from_name("Llama-2-7b-hf")
    config.n_layer, config.n_embd, config.n_head, config.n_query_groups, config.intermediate_size, config.head_size = (
        4,
        64,
        4,
        4,
        176,
        16,
    )
    config.padded_vocab_size = config.vocab_size = 512
    config.rope_n_elem, config.block_size = 16, 128
    assert GPT(config)(torch.randint(1, 512, (1, 32))).shape == (1, 32, 512)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="llama2-like"):
        Config.from_name("llama9")


@pytest.mark.parametrize("name", TINY)
def test_no_position_sees_a_later_one(name):
    model, tokens = tiny(name)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("name", TINY)
def test_cached_steps_equal_the_whole_sequence(name):
    model, tokens = tiny(name)
    with torch.no_grad():
        whole = model(tokens)
        model.set_kv_cache(batch_size=2, max_seq_length=16)
        parts = [
            model(tokens[:, :8], torch.arange(8)),
            *(model(tokens[:, i : i + 1], torch.tensor([i])) for i in range(8, 12)),
        ]
        model.clear_kv_cache()
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(tokens), whole)


def test_positions_without_a_cache_are_refused():
    model, tokens = tiny("llama2-like")
    with pytest.raises(TypeError, match="set_kv_cache"):
        model(tokens, torch.arange(12))


def test_apply_rope_is_looked_up_when_called(monkeypatch):
    model, tokens = tiny("llama2-like")
    calls = []
    monkeypatch.setattr(litgpt_model, "apply_rope", lambda x, cos, sin: calls.append(x.shape) or x)
    model(tokens)
    assert len(calls) == 2 * model.config.n_layer


def test_apply_rope_turns_pairs_by_the_position():
    cos, sin = litgpt_model.build_rope_cache(8, 4)
    x = torch.randn(1, 1, 8, 4, dtype=torch.float64)
    turned = litgpt_model.apply_rope(x, cos.double(), sin.double())
    pairs, expected = torch.complex(turned[..., :2], turned[..., 2:]), torch.complex(x[..., :2], x[..., 2:])
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.01])  # 10000 ** (-2 i / 4)
    torch.testing.assert_close(
        pairs, expected * torch.polar(torch.ones(8, 2), angles).to(pairs.dtype), rtol=1e-6, atol=1e-6
    )


def test_nanogpt_ties_its_weights_and_computes_its_loss():
    torch.manual_seed(0)
    model = NanoGPT(GPTConfig(vocab_size=64, n_layer=2, n_embd=32)).eval()
    tokens = torch.randint(0, 64, (2, 12))
    logits, none = model(tokens)
    _, loss = model(tokens, tokens)
    assert none is None and model.transformer.wte.weight is model.lm_head.weight
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))


def test_model_list_is_complete():
    needed = {"nanoGPT", "litgpt_model llama2-like"}
    pytest.importorskip("transformers")
    needed |= set(
        "Llama Mistral Qwen2 Qwen3 Gemma2 Phi3 GPT2 GPT-NeoX OPT Bloom Falcon Mixtral BERT RoBERTa DistilBERT "
        "ELECTRA T5 BART Whisper ViT CLIP Mamba".split()
    )
    assert needed <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_made_alike_each_time(name):
    (one, args, kwargs), (two, _, again) = MODELS[name](), MODELS[name]()
    assert not one.training and all(parameter.dtype == torch.float32 for parameter in one.parameters())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert all(torch.equal(kwargs[key], again[key]) for key in kwargs) and len(args) + len(kwargs) > 0


class UNet(nn.Module):
    """A small U-Net for pictures: convolutions, group and batch norm, pooling, interpolation, a transposed convolution;
    with labels it gives its loss."""

    def __init__(self, channels: int = 8, classes: int = 4):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.SiLU())
        self.down = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, padding="same", bias=False),
            nn.BatchNorm2d(2 * channels, track_running_stats=False),
            nn.ReLU(),
        )
        self.middle = nn.Sequential(
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2), nn.GELU(), nn.AvgPool2d(2), nn.PReLU()
        )
        self.up = nn.ConvTranspose2d(2 * channels, 2 * channels, 2, stride=2)
        self.leave = nn.Sequential(
            nn.Conv2d(3 * channels, channels, 3, padding=1, padding_mode="reflect"),
            nn.ELU(),
            nn.Conv2d(channels, classes, 1),
        )
        self.kind = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(classes, classes))

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor):
        entered = self.enter(pictures)
        down = self.down(F.max_pool2d(entered, 2))
        middle = F.interpolate(self.up(self.middle(down)) + down, scale_factor=2, mode="bilinear")
        left = self.leave(torch.cat([entered, middle], 1))
        kinds = self.kind(left)
        return left, F.cross_entropy(left, labels) + F.mse_loss(kinds.softmax(1), torch.full_like(kinds, 0.25))


def unet():
    return UNet(), (torch.randn(2, 3, 16, 16), torch.randint(0, 4, (2, 16, 16))), {}


TRAINED = MODELS | {"U-Net": seeded(unet)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", TRAINED)
def test_training_is_eagers_and_never_heavier(name):
    """Gradients, saved bytes and ATen calls of a step, as `benchmarks/models.py --train` judges them; time is not
    measured here."""
    row = measure_training(name, TRAINED[name], named_tensors, rounds=0)
    assert row.parameters and row.saved_bytes[1] and row.calls[1]
    assert not row.problems, row.line()
