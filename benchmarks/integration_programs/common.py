"""What the programs share: their registry, small models, and data that need no download."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Compile = Callable[[nn.Module], nn.Module]
Run = Callable[[Compile], Any]  # gives tensors and numbers in any structure
PROGRAMS: dict[str, Program] = {}


@dataclasses.dataclass(frozen=True)
class Program:
    library: str  # the module that it imports
    run: Run
    dtype: str  # of a value that its compiled programs must compute: shows that mixed precision is on

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


def program(library: str, name: str = "", dtype: str = "f32") -> Callable[[Run], Run]:
    """Enters a program under a name."""

    def enter(run: Run) -> Run:
        full_name = f"{library}: {name or run.__name__.replace('_', ' ')}"
        if full_name in PROGRAMS:
            raise ValueError(f"two programs have the name {full_name}")
        PROGRAMS[full_name] = Program(library, run, dtype)
        return run

    return enter


# --- models and data
def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 8, generator=drawn), torch.randint(0, 4, (6,), generator=drawn)) for _ in range(count)]


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, columns), generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): t.detach().clone() for name, t in model.state_dict().items()}


def tokenizer():
    import tokenizers
    import transformers

    vocabulary = {f"w{i}": i for i in range(97)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3"
    )


def sentences(seed: int, rows: int = 8) -> list[str]:
    drawn = torch.randint(3, 97, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{i}" for i in row) for row in drawn.tolist()]


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
QUIET = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | ENDS | QUIET),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"num_key_value_heads": 2} | ENDS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"num_key_value_heads": 2, "head_dim": 8} | ENDS),
    "bert": ("BertForSequenceClassification", "BertConfig",
             SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig",
                SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True} | ENDS),
    "vit": ("ViTForImageClassification", "ViTConfig",
            SMALL | {"image_size": 16, "patch_size": 4, "num_labels": 3, "hidden_dropout_prob": 0.0,
                     "attention_probs_dropout_prob": 0.0}),
}  # fmt: skip


def model_of(name: str, **changed: Any) -> nn.Module:
    import transformers

    kind, config, options = MODELS[name]
    options = options | changed
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**options))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable, data: list) -> list[float]:
    """Losses of plain steps."""
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def classified(model: nn.Module, batch: tuple) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss
