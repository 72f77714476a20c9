"""What a training step keeps for its backward: with and without activation checkpoints, and along the curve of
`memory_budget`.

    python benchmarks/memory.py [--layers 8] [--rounds 15]

A Llama-style model with dropout, in float32, on the CPU. The first table compares eager with thunder, without and with
`torch.utils.checkpoint` around each block: bytes of the storages that are saved when the forward is over, without those
of parameters, buffers and inputs, and the largest relative difference of a gradient from eager's under the same seed.
The second table is the curve of thunder's option memory_budget: bytes, how many of the backward's lines compute again
what the forward has computed, and the time of a step beside eager's (median of interleaved rounds). The exit status is
1 where gradients differ by more than 1e-5 of their norm, or thunder saves more than eager.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.tests.litgpt_model import GPT
from thunder.tests.measuring import interleaved, median

TOLERANCE = 1e-5


class Model(torch.nn.Module):
    """The blocks of a Llama-style GPT, each followed by dropout, and the loss of the next token."""

    def __init__(self, layers: int, checkpointed: bool):
        super().__init__()
        self.gpt = GPT.from_name(
            "llama2-like",
            n_layer=layers,
            n_embd=128,
            head_size=32,
            intermediate_size=344,
            vocab_size=256,
            block_size=256,
        )
        self.checkpointed = checkpointed

    def forward(self, tokens):
        gpt = self.gpt
        cos, sin = gpt.cos[: tokens.shape[1]], gpt.sin[: tokens.shape[1]]
        x = gpt.transformer.wte(tokens)
        for block in gpt.transformer.h:

            def part(x, block=block):
                return F.dropout(block(x, cos, sin), 0.1, self.training)

            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        logits = gpt.lm_head(gpt.transformer.ln_f(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def step(program: Callable, model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of one step under a fixed seed."""
    model.zero_grad()
    torch.manual_seed(0)
    program(tokens).backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


class _Saved:
    def __init__(self, t: torch.Tensor, alive: weakref.WeakSet):
        self.t = t
        alive.add(self)


def saved_bytes(forward: Callable[[], torch.Tensor], own: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages that are held for the backward when the forward is over, without those of
    `own`."""
    alive: weakref.WeakSet = weakref.WeakSet()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, alive), lambda saved: saved.t):
        out = forward()
    storages = {s.t.untyped_storage().data_ptr(): s.t.untyped_storage().nbytes() for s in alive}
    del out
    held = {t.untyped_storage().data_ptr() for t in own}
    return sum(n for position, n in storages.items() if position not in held)


def difference(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference of a gradient, relative to its norm."""
    return max(((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(results, wanted, strict=True))


def recomputed_lines(compiled: Callable) -> int:
    return sum(
        any(o.name.startswith("bw_") for o in line.outputs)
        for line in thunder.last_backward_traces(compiled)[-1].bound_symbols
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds for the times")
    parser.add_argument(
        "--budgets",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05],
    )
    chosen = parser.parse_args()
    problems = []
    torch.manual_seed(0)
    plain = Model(chosen.layers, False)
    again = Model(chosen.layers, True)
    again.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 256, (4, 128))
    wanted = [g.clone() for g in step(plain, plain, tokens)]

    print(f"torch {torch.__version__}, {chosen.layers} blocks, tokens {tuple(tokens.shape)}\n")
    print(
        "bytes saved for the backward   without checkpoints   with checkpoints   largest relative difference of a "
        "gradient"
    )
    rows: dict[str, list[int]] = {}
    for system, compile_ in (("eager", lambda m: m), ("thunder", thunder.jit)):
        worst, rows[system] = 0.0, []
        for model in (plain, again):
            program = compile_(model)
            worst = max(worst, difference(step(program, model, tokens), wanted))
            rows[system].append(
                saved_bytes(lambda program=program: program(tokens), [*model.parameters(), *model.buffers(), tokens])
            )
        print(f"{system:28} {rows[system][0]:21,} {rows[system][1]:18,}   {worst:.2g}", flush=True)
        if worst > TOLERANCE:
            problems.append(f"{system}: a gradient differs by {worst:.2g} of its norm")
    # eager's checkpoints keep their inputs as arguments, not as saved tensors: they are counted here as they are for
    # thunder
    inputs = chosen.layers * tokens.numel() * 128 * 4
    if rows["thunder"][0] > rows["eager"][0] or rows["thunder"][1] > rows["eager"][1] + inputs:
        problems.append("thunder saves more than eager")

    programs: dict[str, Callable] = {"eager": plain}
    compiled = {budget: thunder.jit(plain, memory_budget=budget) for budget in chosen.budgets}
    programs |= {f"{budget}": program for budget, program in compiled.items()}
    print(
        "\nmemory_budget   bytes saved   lines computed again   step in ms   of eager's   largest relative "
        "difference of a gradient"
    )
    for program in programs.values():
        step(program, plain, tokens)
    times = interleaved(
        {name: lambda program=program: step(program, plain, tokens) for name, program in programs.items()},
        chosen.rounds,
    )
    eager = median(times["eager"])
    for budget, program in compiled.items():
        worst = difference(step(program, plain, tokens), wanted)
        size = saved_bytes(lambda program=program: program(tokens), [*plain.parameters(), *plain.buffers(), tokens])
        took = median(times[f"{budget}"])
        print(
            f"{budget:13} {size:13,} {recomputed_lines(program):22} {took * 1e3:12.2f} {took / eager:12.2f}   "
            f"{worst:.2g}",
            flush=True,
        )
        if worst > TOLERANCE:
            problems.append(f"memory_budget={budget}: a gradient differs by {worst:.2g} of its norm")
    print("\n".join(problems) if problems else "holds")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
