"""QLoRA beside LoRA: what a small GPT loses when its weights are held in four bits while it is fine-tuned.

    python benchmarks/qlora.py [--steps 300] [--seeds 3] [--device cuda]

A GPT of 4 layers learns random text of one Markov chain, in full, by eager PyTorch. In bfloat16 it is then fine-tuned
to the text of another chain, by LoRA of all its linear layers and by QLoRA (NF4 with double quantization), both
compiled, from the same matrices and on the same batches. Printed for each seed: the loss on text that neither has seen,
before, after LoRA and after QLoRA, the ratio of the last two, and the entropy of the chain, which no model is below.
The exit status is 1 where a ratio is above 1.02.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.quantization import NF4Weights
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT
from thunder.transforms.lora import LoRA

TOKENS, LENGTH, BATCH = 64, 64, 16
BAR = 1.02


class Chain:
    """Text whose next token depends on the last one."""

    def __init__(self, seed: int, device: str):
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.next = device, (2 * torch.randn(TOKENS, TOKENS, generator=self.generator)).softmax(-1)

    def batch(self) -> torch.Tensor:
        text = [torch.randint(TOKENS, (BATCH,), generator=self.generator)]
        for _ in range(LENGTH):
            text.append(torch.multinomial(self.next[text[-1]], 1, generator=self.generator)[:, 0])
        return torch.stack(text, 1).to(self.device)

    def entropy(self) -> float:
        common = torch.linalg.matrix_power(self.next, 100)[0]
        return -(common[:, None] * self.next * self.next.log()).sum().item()


def loss_of(model: Callable, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1])[0].flatten(0, 1).float(), text[:, 1:].flatten())


def train(model: Callable, parameters: Iterable[nn.Parameter], batches: list[torch.Tensor], rate: float) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    for text in batches:
        optimizer.zero_grad()
        loss_of(model, text).backward()
        optimizer.step()


def tested(model: Callable, batches: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return sum(loss_of(model, text).item() for text in batches) / len(batches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    above = 0
    for seed in range(chosen.seeds):
        torch.manual_seed(seed)
        base = NanoGPT(GPTConfig(block_size=LENGTH, vocab_size=TOKENS)).to(chosen.device)
        first, second = Chain(2 * seed, chosen.device), Chain(2 * seed + 1, chosen.device)
        train(base, base.parameters(), [first.batch() for _ in range(chosen.steps)], 1e-3)
        base.to(torch.bfloat16)
        learnt, unseen = [second.batch() for _ in range(chosen.steps)], [second.batch() for _ in range(20)]
        results = [tested(base, unseen)]
        for quantizing in ([], [NF4Weights()]):
            torch.manual_seed(seed)
            lora = LoRA(r=8, dtype=torch.bfloat16)
            compiled = thunder.jit(copy.deepcopy(base), transforms=[*quantizing, lora])
            train(compiled, lora.parameters(compiled), learnt, 5e-3)
            results.append(tested(compiled, unseen))
        before, full, few = results
        above += few > BAR * full
        print(
            f"seed {seed}  before {before:.4f}  LoRA {full:.4f}  QLoRA {few:.4f}  ratio {few / full:.4f}  "
            f"entropy {second.entropy():.4f}",
            flush=True,
        )
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
