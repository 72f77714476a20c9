"""What each pass brings on a GPU: thunder beside itself without it, on rows of `benchmarks/gpu.py`, of
`benchmarks/zoo.py --full`, and a training step.

    python benchmarks/ablation.py [llama16_grad step ...] [--passes NAME ...] [--seconds 420] [--rounds 20]
        [--json FILE]

A row is measured in a process of its own, all variants on one module and its inputs, taking turns. Only passes are left
out that change the row's program, each with those that need what it gives. One line a pass: the median of the rounds'
ratios of the step's time without the pass to the time with it, its 95 % interval, and the same for the peak of memory.
Above 1 the pass wins. Where the time is up, the rows that are left are named.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import gpu
import torch
import zoo
from gpu import ROUND_SECONDS, elapsed
from gpu_workloads import BF16, WORKLOADS, Llama, Workload
from zoo_full import rows as zoo_rows

import thunder
from thunder.errors import OptionError
from thunder.tests.measuring import median, paired_ratio, turns

ROWS = ("rope", "xent", "rmsnorm", "geglu_chain", "step", "llama16_grad", "hf_llama", "llama3_train")
# what nobody would do without, or what does what another pass has chosen
NEEDED = ("Delete Last Used", "Fusion", "Recompute in Backward")
LEAST_SECONDS = 45  # without that much time left, no other row is begun


def _whole_step() -> Workload:
    """Forward, backward and AdamW in one program."""
    with torch.device("cuda"):
        model = Llama(4, 1024, width=2048, heads=16, kv_heads=16, inner=5504).to(BF16)
        tokens = torch.randint(1, 32000, (2, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens):
        with torch.enable_grad():
            loss = model(tokens, tokens.roll(-1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Workload(step, (tokens,), trains=False)


def row_of(name: str) -> tuple[Callable, Callable[[Callable], Callable]]:
    """What a row compiles, and what makes a step of the compiled function."""
    torch.manual_seed(0)
    if name != "step" and name not in WORKLOADS:
        task = zoo.task_of(zoo_rows(small=False)[name], "cuda")
        return task.function, lambda compiled: zoo.step_of(task, compiled)
    workload = _whole_step() if name == "step" else WORKLOADS[name]()
    return workload.function, lambda compiled: gpu.step_of(compiled, workload)


def variants(headers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By the name of a pass, the names of those that go with it. headers: of the traces of the program; passes that
    have no trace there change nothing."""
    passes, groups = thunder.passes(), {}
    for one in passes:
        gone = (one.name, *(p.name for p in passes if set(p.needs) & set(one.gives)))
        with contextlib.suppress(OptionError):
            passes.without(*gone).checked()
            if one.name in headers and one.name not in NEEDED and "Dead Code" not in one.name:
                groups[one.name] = gone
    return groups


def headers_of(function: Callable) -> list[str]:
    traces = [*thunder.last_traces(function), *(thunder.last_backward_traces(function) or ())]
    return [trace.provenance.removeprefix("Constructed by ").partition(" (took")[0] for trace in traces]


def measure(name: str, rounds: int, chosen: Sequence[str]) -> list[dict]:
    """A row of figures for each pass of one workload. chosen: the passes; none stands for all."""
    program, step_with = row_of(name)
    steps: dict[str, Callable] = {}
    peaks: dict[str, float] = {}
    rows: list[dict] = []

    def add(variant: str, function: Callable) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        step = step_with(function)
        for _ in range(3):
            step()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks[variant] = float(torch.cuda.max_memory_allocated() - before)
        steps[variant] = step

    compiled = thunder.jit(program)
    add("", compiled)
    for variant, gone in variants(headers_of(compiled)).items():
        if chosen and variant not in chosen:
            continue
        try:
            add(variant, thunder.jit(program, passes=thunder.passes().without(*gone)))
        except Exception as error:  # noqa: BLE001  shown in the table
            rows.append({"workload": name, "pass": variant, "failed": f"{type(error).__name__}: {error}"[:200]})
    repeats = max(1, min(100, int(ROUND_SECONDS * 1e3 / elapsed(steps[""], 2))))
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for order in turns(list(steps), rounds):
        for variant in order:
            times[variant].append(elapsed(steps[variant], repeats))
    for variant in steps:
        if variant:
            ratio = paired_ratio(times[variant], times[""])
            peak = peaks[variant] / max(peaks[""], 1.0)
            rows.append({"workload": name, "pass": variant, "ms": median(times[""]), "ratio": ratio, "peak": peak})
    return rows


def line(row: dict) -> str:
    head = f"{row['workload']:13} {row['pass']:40}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    return (
        f"{head} {row['ms']:9.3f} ms  " + "{:.3f} [{:.3f}, {:.3f}]".format(*row["ratio"]) + f"  peak {row['peak']:.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workloads", nargs="*", default=list(ROWS), help=f"of {', '.join(('step', *WORKLOADS))}, or of the zoo"
    )
    parser.add_argument("--passes", nargs="*", default=[], help="their names; by default all that change the row")
    parser.add_argument("--rounds", type=int, default=20, help="at least 20, for the intervals")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--json", help="a file to which a line is added for each row")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    if chosen.inner:
        print(json.dumps(measure(chosen.workloads[0], chosen.rounds, chosen.passes)))
        return 0
    end, failed = time.monotonic() + chosen.seconds, 0
    for i, name in enumerate(chosen.workloads):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print("no time for", *chosen.workloads[i:])
            break
        command = [
            sys.executable,
            __file__,
            name,
            "--inner",
            "--rounds",
            str(chosen.rounds),
            "--passes",
            *chosen.passes,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"{name:13} took more than the {left:.0f} s that were left", flush=True)
            continue
        failed |= done.returncode
        if done.returncode:
            print(f"{name:13} {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
            continue
        rows = json.loads(done.stdout.splitlines()[-1])
        print(*map(line, rows), sep="\n", flush=True)
        if chosen.json:
            with open(chosen.json, "a", encoding="utf-8") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
