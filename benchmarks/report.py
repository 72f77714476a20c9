"""The page of a training step of GPT-2: how large it is, and how much of the step the times of its bound symbols are.

    python benchmarks/report.py [--layers 12 --batch 2 --time 128] [--output page.html] [--executors inductor]

A step is zero_grad, forward, backward and AdamW, compiled as one function, on the GPU where there is one. Exits with 1
where the times add up to less than 95 % of the step that they were measured in, or the page is larger than 5 MB.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import thunder
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT

LEAST, LARGEST = 0.95, 5_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("batch", 2), ("time", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output")
    parser.add_argument("--executors", type=lambda text: text.split(","))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"n_head": 12, "n_embd": 768, "vocab_size": 50257, "block_size": 1024}
    model = NanoGPT(GPTConfig(n_layer=chosen.layers, **sizes)).to(chosen.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logits, loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss

    tokens = torch.randint(0, 50257, (chosen.batch, chosen.time + 1), device=chosen.device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    profiled = thunder.profile(thunder.jit(step, executors=chosen.executors), inputs, targets)
    started = time.perf_counter()
    page = thunder.report(profiled, chosen.output)
    took, size = time.perf_counter() - started, len(page.html.encode())
    print(str(profiled).split("\n")[0])
    print(f"a page of {size:,} bytes, made in {took:.2f} s")
    return int(profiled.covered < LEAST or size > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
