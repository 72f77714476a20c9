"""The fastest layouts that `thunder.distributed.search` projects for models of transformers, on the meta device.

    python benchmarks/layout_search.py [--models 8B,70B,405B,V3] [--gpus 8,64,512,4096] [--rows 1]

A line for each model, number of GPUs and layout; processor seconds of the search.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from thunder.distributed import search

SIZES = {  # of Llama 3: width, layers, heads, inner width
    "8B": (4096, 32, 32, 14336),
    "70B": (8192, 80, 64, 28672),
    "405B": (16384, 126, 128, 53248),
}


class Training(torch.nn.Module):
    """The loss of the next token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        logits = self.model(tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def of(name: str) -> tuple[torch.nn.Module, torch.Tensor, list[str]]:
    """A model, its tokens and the paths of its experts."""
    if name == "V3":
        config = DeepseekV3Config()
        config._experts_implementation = "grouped_mm"
        kind, length = DeepseekV3ForCausalLM, 4096
    else:
        width, layers, heads, inner = SIZES[name]
        config = LlamaConfig(
            vocab_size=128256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=8, intermediate_size=inner, rope_theta=5e5, max_position_embeddings=8192,
        )  # fmt: skip
        kind, length = LlamaForCausalLM, 8192
    with torch.device("meta"):
        model, tokens = Training(kind(config)).to(torch.bfloat16), torch.empty(1, length, dtype=torch.int64)
    return model, tokens, [n for n, m in model.named_modules() if type(m).__name__.endswith("Experts")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8B,70B,405B,V3")
    parser.add_argument("--gpus", default="8,64,512,4096")
    parser.add_argument("--rows", type=int, default=1)
    chosen = parser.parse_args()
    for name in chosen.models.split(","):
        model, tokens, experts = of(name)
        for gpus in map(int, chosen.gpus.split(",")):
            start = time.process_time()
            layouts = search(model, tokens, gpus=gpus, experts=experts)
            seconds = time.process_time() - start
            for row in layouts.rows()[: chosen.rows] or [("no layout holds its parameters", *[""] * 7)]:
                print(f"| {name} | {gpus} | {' | '.join(row)} | {len(layouts)} in {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
