"""What does the first step of a second process cost, where programs are kept on disk?

    python benchmarks/programs_on_disk.py [--rounds 9] [--layers 8] [--width 256] [--inference] [--device cuda]

Each process makes transformers' Llama, on a GPU the program `llama16_grad` of gpu_workloads.py, imports all of what it
needs, and measures one step of training (forward, loss, backward) or of inference, its first. Processes of eager
PyTorch, of thunder without a cache of programs, and of thunder with one that an earlier process has filled take turns.
Printed are medians of seconds, and the median of the ratios to eager's of the same round; the exit status is 1 where
thunder with programs on disk takes more than BAR times eager's, or where a process of it has captured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import thunder

BAR = 1.2
SYSTEMS = ("eager", "thunder", "thunder, programs on disk")


def workload(options: argparse.Namespace) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Callable]:
    """A model, its arguments, and the loss of its result."""
    if options.device == "cuda":
        from gpu_workloads import WORKLOADS

        task = WORKLOADS["llama16_grad"]()
        return task.function, {"tokens": task.args[0]}, lambda logits: logits.float().square().mean()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.width, intermediate_size=options.width * 43 // 16, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=4096, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(0, 4096, (2, options.tokens))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, lambda result: result.loss


def first_step(system: str, options: argparse.Namespace) -> dict:
    """The seconds of one step in this process, its loss, and whether it was captured."""
    torch.manual_seed(0)
    model, arguments, loss_of = workload(options)
    model.train(not options.inference)
    run = model if system == "eager" else thunder.jit(model, keep_programs=system == SYSTEMS[2])
    ones = torch.ones(8, 8, device=options.device)
    torch.nn.functional.linear(ones, ones)  # what the process's first operation prepares
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    synchronize()
    with torch.set_grad_enabled(not options.inference):
        start, processor = time.perf_counter(), time.process_time()
        loss = loss_of(run(**arguments))
        if not options.inference:
            loss.backward()
        synchronize()
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
    stats = thunder.compile_stats(run)
    captured = stats.interpreted_instructions if stats is not None else 0
    return {"seconds": seconds, "processor": processor, "loss": float(loss.detach()), "captured": captured}


def in_a_process(system: str, arguments: list[str], directory: str) -> dict:
    process = subprocess.run(
        [sys.executable, __file__, *arguments, "--system", system], check=True, text=True, stdout=subprocess.PIPE,
        env=os.environ | {"THUNDER_CACHE_DIR": directory, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    return json.loads(process.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.system:
        print(json.dumps(first_step(options.system, options)))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        for system in (*SYSTEMS, SYSTEMS[2]):  # fills the cache, that of the system's files as well
            in_a_process(system, arguments, directory)
        rounds = [{s: in_a_process(s, arguments, directory) for s in SYSTEMS} for _ in range(options.rounds)]
        size = sum(path.stat().st_size for path in Path(directory, "programs").iterdir())
    step = "inference" if options.inference else "training"
    name = "llama16_grad" if options.device == "cuda" else f"Llama of {options.layers} layers of width {options.width}"
    print(f"the first step of {step}, {name}; {size >> 10} KiB on disk")
    print(f"{'':28}{'seconds':>10}{'processor':>11}{'to eager':>10}{'processor':>11}  loss")
    worst = 0.0
    for system in SYSTEMS:
        mine, eager = [r[system] for r in rounds], [r["eager"] for r in rounds]
        row, ratios = [], []
        for what in ("seconds", "processor"):
            row.append(median(m[what] for m in mine))
            ratios.append(median(m[what] / e[what] for m, e in zip(mine, eager, strict=True)))
        print(f"{system:28}{row[0]:10.3f}{row[1]:11.3f}{ratios[0]:10.2f}{ratios[1]:11.2f}  {mine[0]['loss']:.6f}")
        worst = ratios[0] if system == SYSTEMS[2] else worst
    captured = sum(r[SYSTEMS[2]]["captured"] > 0 for r in rounds)
    compared = SYSTEMS[1:] if options.device == "cuda" else SYSTEMS  # fused kernels round otherwise than eager's
    losses = {r[s]["loss"] for r in rounds for s in compared}
    print(f"captured with programs on disk: {captured} of {options.rounds} processes; bar {BAR}: {worst:.2f}")
    return int(worst > BAR or captured > 0 or len(losses) > 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
