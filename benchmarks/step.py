"""A whole AdamW step of the byte-level GPT (zero_grad, forward, backward, update) compiled as one function, beside
eager's.

    python benchmarks/step.py [--layers 4 --width 128 --batch 8 --time 128] [--steps 50] [--rounds 60] [--device cpu]

For the default, the foreach and the fused form of the optimizer: whether losses, parameters, gradients and optimizer
state are equal bit for bit after some steps, how often the step was compiled and how long the first calls took, what
the prologue takes, and the time of a warm step: the median and its 95 % interval of paired ratios, the systems taking
turns. On a CPU what one thread computes counts, so that others on the machine do not. Exits with 1 where something
differs, or the ratio's interval lies above 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import thunder
from thunder.tests.litgpt_model import GPT
from thunder.tests.measuring import compile_with, interleaved, median, paired_ratio, repetitions

FORMS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
MOST_COMPILED = 3


class Trainer:
    """A model from a seed, its optimizer, and a step of training under one system."""

    def __init__(self, system: str, form: str, chosen: argparse.Namespace):
        torch.manual_seed(0)
        self.model = GPT.from_name(
            "llama2-like", n_layer=chosen.layers, n_embd=chosen.width, head_size=32, n_head=chosen.width // 32,
            intermediate_size=chosen.width * 8 // 3, vocab_size=256,
            block_size=chosen.time,
        ).to(chosen.device)  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.1, **FORMS[form])
        model, optimizer = self.model, self.optimizer

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

        self.step: Callable = compile_with(system, step)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that a step leaves."""
        results = []
        for p in self.model.parameters():
            results += [p.detach(), p.grad, *self.optimizer.state[p].values()]
        return results


def batches(chosen: argparse.Namespace):
    generator = torch.Generator().manual_seed(1)
    while True:
        piece = torch.randint(256, (chosen.batch, chosen.time + 1), generator=generator).to(chosen.device)
        yield piece[:, :-1], piece[:, 1:]


def prologue_seconds(step, args: tuple) -> float:
    """The least time of many runs of the checks before a warm call."""
    entry = thunder.compile_stats(step).last_entry
    samples = interleaved({"prologue": lambda: entry.prologue_fn(step.fn, args, {})}, 40, 50, time.process_time)
    return min(samples["prologue"])


def measure(form: str, chosen: argparse.Namespace) -> bool:
    """Measures one form of the optimizer and prints a paragraph. Whether it holds."""
    ours, eager = Trainer("thunder", form, chosen), Trainer("eager", form, chosen)
    equal, first = True, []
    for i, batch in zip(range(chosen.steps), batches(chosen)):
        start = time.perf_counter()
        loss = ours.step(*batch)
        if i < MOST_COMPILED:
            first.append(time.perf_counter() - start)
        equal &= torch.equal(loss, eager.step(*batch))
    different = sum(not torch.equal(a, b) for a, b in zip(ours.tensors(), eager.tensors(), strict=True))
    misses = thunder.cache_misses(ours.step)
    batch = next(batches(chosen))

    def call(trainer: Trainer) -> Callable[[], None]:
        def once() -> None:
            trainer.step(*batch)
            if chosen.device == "cuda":
                torch.cuda.synchronize()

        return once

    calls = {"thunder": call(ours), "eager": call(eager)}
    clock = time.process_time if chosen.device == "cpu" else time.perf_counter
    samples = interleaved(calls, chosen.rounds, repetitions(calls["eager"], 0.02), clock)
    ratio, low, high = paired_ratio(samples["thunder"], samples["eager"])
    count = len(ours.tensors())
    print(
        f"{form}: losses {'equal' if equal else 'DIFFER'} over {chosen.steps} steps, {count - different} of {count} "
        f"tensors equal; compiled {misses} times, first calls "
        f"{', '.join(f'{s:.2f}' for s in first)} s; prologue {1e6 * prologue_seconds(ours.step, batch):.0f} us; warm "
        f"step {1e3 * median(samples['thunder']):.2f} ms, eager "
        f"{1e3 * median(samples['eager']):.2f} ms, ratio {ratio:.3f} [{low:.3f}, {high:.3f}]",
        flush=True,
    )
    return equal and not different and misses <= MOST_COMPILED and low <= 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 4, "width": 128, "batch": 8, "time": 128, "steps": 50, "rounds": 60}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated")
    chosen = parser.parse_args()
    return 0 if all([measure(form, chosen) for form in chosen.forms.split(",")]) else 1


if __name__ == "__main__":
    sys.exit(main())
