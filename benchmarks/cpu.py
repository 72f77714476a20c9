"""What a step of a small model costs on the CPU under eager PyTorch, torch.compile, thunder, and thunder with the
executor inductor.

    python benchmarks/cpu.py [llama llama_train nanogpt nanogpt_train] [--systems
    eager,torch.compile,thunder,thunder_inductor] [--rounds 40] [--threads 2] [--json FILE] python benchmarks/cpu.py
    llama llama_train --first-call [--layers 16] [--width 32]

A Llama-style and a nanoGPT-style decoder in float32, 4 layers of width 256: forward under torch.no_grad(), or forward
and backward of the sum of the logits. Each workload runs in a process of its own, all systems on the same module and
tokens, taking turns. With one thread its own time counts, so that others on the machine do not. One line a system:

    ms      the median step
    ratio   to torch.compile's step, the median of the rounds' ratios and its 95 % interval
    eager   to eager's step, likewise
    first   seconds of the first call, imports and C++ compiler included
    error   of the logits and the worst gradient: norm of the difference to eager's by the norm

--first-call: every system in a process of its own with empty caches (`cold`), and again with the caches that it left
(`second`); only `first` is reported.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thunder.tests.litgpt_model import GPT
from thunder.tests.measuring import (
    compile_with,
    cxx_compiler,
    in_processes,
    interleaved,
    median,
    paired_ratio,
    parse_systems,
    repetitions,
    settle,
)
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT

WORKLOADS = ("llama", "llama_train", "nanogpt", "nanogpt_train")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "THUNDER_CACHE_DIR")
BATCH, LENGTH, VOCABULARY = 4, 128, 512
ROUND_SECONDS = 0.1  # a turn is as many steps as take about this long


def model_of(workload: str, layers: int, width: int) -> nn.Module:
    heads = max(1, width // 32)
    if workload.startswith("llama"):
        return GPT.from_name(
            "llama2-like",
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            head_size=width // heads,
            intermediate_size=8 * width // 3,
            block_size=LENGTH,
            vocab_size=VOCABULARY,
        )
    return NanoGPT(GPTConfig(block_size=LENGTH, vocab_size=VOCABULARY, n_layer=layers, n_head=heads, n_embd=width))


def step_of(
    compiled: Callable, model: nn.Module, workload: str, tokens: torch.Tensor
) -> Callable[[], list[torch.Tensor]]:
    """One step: the logits, and the gradients."""

    def logits() -> torch.Tensor:
        out = compiled(tokens)
        return out[0] if isinstance(out, tuple) else out

    def train() -> list[torch.Tensor]:
        out = logits()
        return [out.detach(), *torch.autograd.grad(out.sum(), list(model.parameters()))]

    def infer() -> list[torch.Tensor]:
        with torch.no_grad():
            return [logits()]

    return train if workload.endswith("_train") else infer


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-300)).item()


def measure(workload: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Everything about one workload in this process: a row for each system. With --first-call nothing but the first
    step."""
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    model, tokens = model_of(workload, chosen.layers, chosen.width), torch.randint(VOCABULARY, (BATCH, LENGTH))
    facts = {
        "workload": workload,
        "layers": chosen.layers,
        "width": chosen.width,
        "threads": chosen.threads,
        "torch": torch.__version__,
    }
    rows: dict[str, dict[str, Any]] = {system: facts | {"system": system} for system in chosen.systems}
    steps: dict[str, Callable] = {}
    reference = [] if chosen.first_call else step_of(model, model, workload, tokens)()
    for system, row in rows.items():
        if system == "torch.compile" and cxx_compiler() is None:
            row["failed"] = "there is no C++ compiler"
            continue
        start = time.perf_counter()
        steps[system] = step_of(compile_with(system, model), model, workload, tokens)
        results = steps[system]()
        row["first"] = time.perf_counter() - start
        settle(system, steps[system])
        errors = [difference(a, b) for a, b in zip(results, reference, strict=False)]
        row |= {"error": errors[0], "gradient_error": max(errors[1:], default=None)} if errors else {}
    if chosen.first_call:
        return list(rows.values())
    repeat = repetitions(steps[next(iter(steps))], ROUND_SECONDS)
    interleaved(steps, 2, repeat)
    samples = interleaved(steps, chosen.rounds, repeat, time.process_time if chosen.threads == 1 else time.perf_counter)
    for system, seconds in samples.items():
        rows[system]["ms"] = 1e3 * median(seconds)
        for name, base in (("ratio", "torch.compile"), ("eager", "eager")):
            if base in samples and base != system:
                rows[system][name] = paired_ratio(seconds, samples[base])
    return list(rows.values())


def line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:14} {row['system']:17}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    if "run" in row:
        return f"{head} {row['run']:7} first {row['first']:7.2f} s"
    ratios = "  ".join(
        f"{name} " + ("{:.3f} [{:.3f}, {:.3f}]".format(*row[name]) if name in row else " " * 20)
        for name in ("ratio", "eager")
    )
    gradient = "" if row["gradient_error"] is None else f" / {row['gradient_error']:.1e}"
    return f"{head} {row['ms']:9.3f} ms  {ratios}  first {row['first']:6.2f} s  error {row['error']:.1e}{gradient}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--systems", default=["eager", "torch.compile", "thunder", "thunder_inductor"], type=parse_systems
    )
    parser.add_argument("--rounds", type=int, default=40, help="at least 20, for the intervals")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 8")
    parser.add_argument("--first-call", action="store_true")
    parser.add_argument("--json", help="write the rows there", metavar="FILE")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.workloads) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if chosen.inner:
        print(json.dumps(measure(chosen.workloads[0], chosen)))
        return 0
    options = [f"--{name}={getattr(chosen, name)}" for name in ("rounds", "threads", "layers", "width")]
    rows = in_processes(__file__, chosen.workloads, chosen.systems, options, CACHES if chosen.first_call else (), line)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
