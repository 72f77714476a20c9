"""What rules of the literature bring on models that they were not written for: `tests/test_rules_of_literature.py` has
both, this the sizes.

    python benchmarks/rules.py [--rounds 20] [CASE ...]

Both sides are thunder with PyTorch's kernels on one thread of the CPU, with the rule and without it, and take turns.
One line a case: how often the rule matched, the CPU time without it to the time with it (median of the rounds, with its
95 % interval), and the same of the peak of memory of the program's values. Above 1 the rule wins.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import thunder
from tests import test_rules_of_literature as literature
from thunder.tests.measuring import interleaved, paired_ratio, repetitions

GPT2 = {"vocab_size": 1000, "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}


def _wide(module: nn.Module, **layers: nn.Module) -> nn.Module:
    """A model of the tests with larger layers."""
    for name, layer in layers.items():
        setattr(module, name, layer)
    return module


def _llama() -> nn.Module:
    return literature.of_transformers(
        "Llama", vocab_size=1000, num_key_value_heads=4, max_position_embeddings=1024, **WIDE
    )


def _residual() -> nn.Module:
    return literature.Residual(16).eval()


def _squeeze() -> nn.Module:
    return _wide(
        literature.SqueezeExcitation(), expand=nn.Conv2d(3, 96, 1), squeeze=nn.Conv2d(96, 24, 1),
        excite=nn.Conv2d(24, 96, 1),
    )  # fmt: skip


def _retrieval() -> nn.Module:
    model = _wide(literature.Retrieval(), embed=nn.Linear(64, 128))
    model.prototypes = nn.Parameter(torch.randn(200, 128))
    return model


def _adapted() -> nn.Module:
    base, down, up = (nn.Linear(*s, bias=False) for s in ((512, 512), (512, 16), (16, 512)))
    return _wide(literature.Adapted(), base=base, down=down, up=up)


def _quantized() -> nn.Module:
    model = literature.Quantized()
    model.register_buffer("q", torch.randint(-127, 128, (2048, 2048), dtype=torch.int8))
    model.register_buffer("scale", torch.rand(2048) / 100)
    return model


TOKENS = lambda: (torch.randint(0, 1000, (2, 512)),)
# by case of the tests: the model and its inputs, of a size at which a user would want the rule
SIZES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "attention in ViT": (
        lambda: literature.of_transformers("ViT", image_size=96, patch_size=4, **WIDE),
        lambda: (torch.randn(2, 3, 96, 96),),
    ),
    "attention with a mask in Llama": (_llama, TOKENS),
    "root mean squares in Llama": (_llama, TOKENS),
    "a gate in Llama": (_llama, TOKENS),
    "tanh in GPT-2": (
        lambda: literature.of_transformers(
            "GPT2",
            n_embd=128,
            n_inner=1024,
            n_layer=2,
            n_head=4,
            vocab_size=1000,
            bos_token_id=0,
            eos_token_id=0,
            n_positions=512,
        ),
        TOKENS,
    ),
    "swish in squeeze and excitation": (_squeeze, lambda: (torch.randn(4, 3, 96, 96),)),
    "batch norms of a residual block": (_residual, lambda: (torch.randn(4, 16, 112, 112),)),
    "a loss by hand": (
        lambda: _wide(literature.Perplexity(), head=nn.Linear(64, 8000)),
        lambda: (torch.randn(512, 64), torch.randint(0, 8000, (512,))),
    ),
    "products in another order": (
        lambda: _wide(literature.Mixer(), projections=nn.Linear(64, 24)),
        lambda: (torch.randn(2, 1024, 64),),
    ),
    "distances to prototypes": (_retrieval, lambda: (torch.randn(256, 64),)),
    "an adapter": (_adapted, lambda: (torch.randn(2048, 512),)),
    "a norm by hand": (lambda: literature.Normalized(256), lambda: (torch.randn(8, 512, 256),)),
    "a row of a codebook": (lambda: literature.Codebook(1024, 64), lambda: (torch.randn(2048, 64),)),
    "pairs that belong together": (
        lambda: literature.Contrastive(256),
        lambda: (torch.randn(1024, 256), torch.randn(1024, 256)),
    ),
    "a weight of int8": (_quantized, lambda: (torch.randn(1, 16, 2048),)),
}


def values(compiled: Callable, operands: tuple) -> int:
    """The most bytes that the values of a program need at once, its arguments left out."""
    memory = compiled.lower(*operands).memory_analysis()
    return memory.peak - memory.arguments


def measure(case: str, rounds: int) -> str:
    rule = literature.MODELS[case][0]
    make, inputs = SIZES[case]
    torch.manual_seed(0)
    model, arguments = make(), inputs()
    with torch.no_grad():
        without, ruled = (thunder.jit(model, rules=r, executors=["torch"], fallback="error") for r in ([], [rule]))
        results = [literature.tensor_of(f(*arguments)) for f in (without, ruled)]
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
        calls = {"without": lambda: without(*arguments), "ruled": lambda: ruled(*arguments)}
        repeat = repetitions(calls["without"], 0.05)
        samples = interleaved(calls, rounds, repeat, time.process_time)
        memory = values(without, arguments) / values(ruled, arguments)
    ratio, low, high = paired_ratio(samples["without"], samples["ruled"])
    hits = thunder.last_traces(ruled)[-1].info.rules[rule.name]
    return f"{case:32} {len(hits.locations):2} hits   time {ratio:.2f} ({low:.2f} to {high:.2f})   memory {memory:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for case in chosen.cases:
        print(measure(case, chosen.rounds), flush=True)


if __name__ == "__main__":
    main()
