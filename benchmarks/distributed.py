"""Training a Llama-2-7B with fewer layers on several GPUs: thunder's ddp and fsdp beside torch's DDP and FSDP2, each
eager and compiled.

    python benchmarks/distributed.py [--ranks 1,2,4] [--layers 4] [--time 2048] [--systems ...] [--rounds 10] [--json
    FILE] python benchmarks/distributed.py --device cpu --ranks 2 --width 64 --layers 2 --time 32 --systems "ddp,fsdp2
    zero3,thunder ddp,thunder zero3"

For each number of ranks torchrun starts that many processes, which hold all systems at a time and run their steps in
turn: zero_grad, forward, backward, AdamW (fused), in bfloat16 (float32 on CPUs) with random tokens, another batch for
each rank. A line for each system:

    tokens/s  of all ranks together, from the median round of the slowest rank
    ratio     its step's time to that of the fastest of torch's systems, median and 95 % interval over the rounds
    peak      GiB on one rank: what the system holds between steps, and what a step needs beyond it at most; the worst
    rank's hidden    the share of the time of communication kernels during which another kernel runs on the same GPU,
    from a profile of rank 0
    loss      of the last step: all systems train the same model on the same data
    plan      for ours, what `thunder.distributed.plan` says without running it, step and peak, and how far that is from
    what was measured
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_workloads import Llama
from torch.profiler import ProfilerActivity, profile

import thunder
from thunder.distributed import FSDPBucketingStrategy, FSDPType, ddp, fsdp, plan
from thunder.tests.measuring import median, paired_ratio, turns

GIB = 2**30
LEARNING_RATE = 1e-5


# ----------------------------------------------------------------------------------------------------------------
# systems


def _torch_ddp(model, compiled: bool):
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch.compile(wrapped) if compiled else wrapped


def _fsdp2(model, again: bool, compiled: bool):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, reshard_after_forward=again)
    return fully_shard(model, reshard_after_forward=again)


def _thunder_fsdp(model, strategy: FSDPType):
    return thunder.jit(fsdp(model, sharding_strategy=strategy, bucketing_strategy=FSDPBucketingStrategy.BLOCK))


SYSTEMS: dict[str, Callable] = {
    "ddp": lambda model: _torch_ddp(model, False),
    "ddp compiled": lambda model: _torch_ddp(model, True),
    "fsdp2 zero2": lambda model: _fsdp2(model, False, False),
    "fsdp2 zero2 compiled": lambda model: _fsdp2(model, False, True),
    "fsdp2 zero3": lambda model: _fsdp2(model, True, False),
    "fsdp2 zero3 compiled": lambda model: _fsdp2(model, True, True),
    "thunder ddp": lambda model: thunder.jit(ddp(model)),
    "thunder zero2": lambda model: _thunder_fsdp(model, FSDPType.ZERO2),
    "thunder zero3": lambda model: _thunder_fsdp(model, FSDPType.ZERO3),
}


STRATEGIES = {"thunder ddp": None, "thunder zero2": FSDPType.ZERO2, "thunder zero3": FSDPType.ZERO3}


def llama(chosen: argparse.Namespace, dtype: torch.dtype):
    heads = max(1, chosen.width // 128)
    return Llama(
        chosen.layers,
        chosen.time,
        width=chosen.width,
        heads=heads,
        kv_heads=heads,
        inner=chosen.width * 43 // 16,
        vocabulary=chosen.vocabulary,
    ).to(dtype)


class Trainer:
    """One system with a model of its own: `step` trains on the rank's batch."""

    def __init__(self, system: str, chosen: argparse.Namespace, device: torch.device):
        torch.manual_seed(0)
        with device:
            model = llama(chosen, torch.bfloat16 if device.type == "cuda" else torch.float32)
        torch.manual_seed(100 + dist.get_rank())
        self.tokens = torch.randint(chosen.vocabulary, (chosen.batch, chosen.time), device=device)
        self.call = SYSTEMS[system](model)
        self.optimizer = torch.optim.AdamW(self.call.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
        self.device, self.loss = device, torch.zeros((), device=device)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.call(self.tokens, self.tokens.roll(-1, 1))
        self.loss.backward()
        self.optimizer.step()


# ----------------------------------------------------------------------------------------------------------------
# measuring


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def seconds_of(trainer: Trainer, steps: int) -> float:
    """Seconds of a step of the slowest rank."""
    dist.barrier()
    synchronize(trainer.device)
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    synchronize(trainer.device)
    return largest((time.perf_counter() - start) / steps, trainer.device)


def hidden_share(trainer: Trainer) -> float | None:
    """The share of communication kernels' time during which another kernel runs; None where there are none. Every rank
    calls it, and runs a step."""
    if trainer.device.type != "cuda" or dist.get_world_size() == 1:
        trainer.step()
        return None
    synchronize(trainer.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        trainer.step()
        synchronize(trainer.device)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(
            ("Memset", "Activity", "cuda")
        ):
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    communication, computation = joined(spans[True]), joined(spans[False])
    total = sum(stop - start for start, stop in communication)
    return overlap(communication, computation) / total if total else None


def joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals that overlap, as one; in order."""
    results: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if results and start <= results[-1][1]:
            results[-1] = (results[-1][0], max(stop, results[-1][1]))
        else:
            results.append((start, stop))
    return results


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """How long intervals of two ordered, disjoint lists have in common."""
    i = j = 0
    common = 0.0
    while i < len(a) and j < len(b):
        common += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def measure(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """What one rank finds out about all systems; all ranks have the same."""
    device = torch.device(chosen.device, int(os.environ["LOCAL_RANK"]) if chosen.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    ranks = dist.get_world_size()
    rows: dict[str, dict[str, Any]] = {}
    trainers: dict[str, Trainer] = {}
    for system in chosen.systems:
        gc.collect()
        before = allocated(device)
        trainer = Trainer(system, chosen, device)
        start = time.perf_counter()
        trainer.step()
        synchronize(device)
        first = time.perf_counter() - start
        trainer.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        synchronize(device)
        held = allocated(device) - before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.step()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        hidden = hidden_share(trainer)
        trainer.optimizer.zero_grad(set_to_none=True)
        trainers[system] = trainer
        rows[system] = {
            "ranks": ranks, "system": system, "layers": chosen.layers, "first": largest(first, device),
            "held": largest(held, device) / GIB, "peak": largest(peak, device) / GIB,
            "hidden": hidden,
        }  # fmt: skip
        if not dist.get_rank():
            print(f"# {system}: first step {first:.1f} s", file=sys.stderr, flush=True)
    names = list(trainers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for order in turns(names, chosen.rounds):
        for name in order:
            samples[name].append(seconds_of(trainers[name], chosen.steps))
            trainers[name].optimizer.zero_grad(set_to_none=True)
    torchs = [name for name in names if not name.startswith("thunder")]
    best = min(torchs, key=lambda name: median(samples[name]), default=None)
    for name in names:
        row = rows[name]
        row["seconds"] = median(samples[name])
        row["tokens"] = chosen.batch * chosen.time * ranks / row["seconds"]
        row["loss"] = trainers[name].loss.item()
        if best is not None:
            row["ratio"], row["best"] = paired_ratio(samples[name], samples[best]), best
    dist.destroy_process_group()
    return list(rows.values())


# ---------------------------------------------------------------------------------------------------------------- the
# program


def add_plan(row: dict[str, Any], chosen: argparse.Namespace) -> None:
    """What the plan of one of our systems on GPUs says."""
    if row["system"] not in STRATEGIES or chosen.device != "cuda":
        return
    with torch.device("meta"):
        model, tokens = llama(chosen, torch.bfloat16), torch.empty(chosen.batch, chosen.time, dtype=torch.int64)
    strategy = STRATEGIES[row["system"]]
    buckets = FSDPBucketingStrategy.NONE if strategy is None else FSDPBucketingStrategy.BLOCK
    planned = plan(
        model, (tokens, tokens), world_size=row["ranks"], sharding_strategy=strategy, bucketing_strategy=buckets
    )
    row["plan"] = {"seconds": planned.seconds, "peak": planned.peak / GIB}


def line(row: dict[str, Any], alone: dict[str, float]) -> str:
    ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*row["ratio"]) if "ratio" in row else ""
    hidden = "" if row["hidden"] is None else f"hidden {row['hidden']:4.0%}"
    scaling = (
        f"x {row['tokens'] / alone[row['system']]:.2f} of one rank"
        if row["system"] in alone and row["ranks"] > 1
        else ""
    )
    planned = ""
    if "plan" in row:
        seconds, peak = row["plan"]["seconds"], row["plan"]["peak"]
        planned = (
            f"plan {seconds * 1e3:.2f} ms ({seconds / row['seconds'] - 1:+.0%}) {peak:.2f} GiB "
            f"({peak / row['peak'] - 1:+.1%})"
        )
    return (
        f"{row['ranks']} ranks  {row['system']:21} {row['tokens']:10.0f} tokens/s  {ratio:22} step "
        f"{row['seconds'] * 1e3:8.2f} ms  first {row['first']:6.2f} s  "
        f"held {row['held']:6.2f}  peak {row['peak']:6.2f} GiB  {hidden:11}  loss {row['loss']:.4f}  {planned}  "
        f"{scaling}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of processes, each of which has a GPU")
    parser.add_argument(
        "--systems", default=",".join(SYSTEMS), type=lambda text: text.split(","), help=f"of {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--time", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps of a system in a round")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each number of ranks")
    parser.add_argument("--json", help="a file to which a line is added for each row")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.systems) - set(SYSTEMS):
        parser.error(f"no such system: {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    if chosen.inner:
        rows = measure(chosen)
        if os.environ["RANK"] == "0":
            with open(chosen.inner, "w", encoding="utf-8") as out:
                json.dump(rows, out)
        return 0
    failed, alone = False, {}
    for ranks in map(int, chosen.ranks.split(",")):
        rows, said = _with_ranks(ranks, chosen.timeout)
        failed |= not rows
        if not rows:
            print(f"{ranks} ranks: {said}", flush=True)
        for row in rows:
            if ranks == 1:
                alone[row["system"]] = row["tokens"]
            add_plan(row, chosen)
            print(line(row, alone), flush=True)
        if chosen.json:
            with open(chosen.json, "a", encoding="utf-8") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
    return int(failed)


def _with_ranks(ranks: int, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """The rows that so many processes measured, and what they said at last."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "rows")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            __file__,
            *sys.argv[1:],
            "--inner",
            result,
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            said = done.stderr
        except subprocess.TimeoutExpired as late:
            said = f"nothing within {timeout} s: {late.stderr}"
        if not os.path.exists(result):
            return [], said[-3000:]
        with open(result, encoding="utf-8") as file:
            return json.load(file), said[-3000:]


if __name__ == "__main__":
    sys.exit(main())
