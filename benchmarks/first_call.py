"""How long does the first call take, and does it grow linearly with depth?

    python benchmarks/first_call.py [--train] [--depths 2,8,16,32] [--systems torch.compile,thunder] [--width 32]
    [--repeat 3] [--threads 1] [--json FILE]

A Llama-style model on the CPU: forward under torch.no_grad(), or with --train forward and backward of the sum of its
outputs. Every measurement has a process of its own with empty caches; the clock starts after the imports and after the
model was built, and stops when the first call (with --train its backward) returns: what the C++ compiler takes and the
run itself are counted. Modules that a system imports only while it compiles are found in a run of their own and
imported before the clock starts, for every system alike. The median of --repeat runs counts; torch.compile, which takes
long, runs once. One thread runs the operations: a second one waits for a core wherever others use the machine too.
Printed for each depth: seconds of both, their ratio, seconds per block that was added since the depth before; for
thunder also the instructions interpreted and bound symbols made (with --train those of the last forward and backward)
per added block, which do not depend on the machine. Last, whether thunder's seconds and counts are linear in depth.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

SYSTEMS = ("eager", "torch.compile", "thunder")
RATIO_BAR, SECONDS_PER_BLOCK_BAR, SECONDS_PER_BLOCK_BAR_TRAINING = 0.10, 0.05, 0.08
# linear: a block of the last stretch of depths costs at most this times one before it. Counts repeat exactly; seconds,
# of the fastest run, do not. Quadratic growth over depths 2, 8, 16, 32 gives 2.7.
GROWTH_BARS = {"fastest": 2.0, "instructions": 1.01, "bound_symbols": 1.01}
DEVIATION_BAR = 1e-4


def measure_here(system: str, depth: int, width: int, threads: int, modules: list[str], train: bool) -> dict:
    """One first call in this process, `modules` imported before: seconds, for thunder what was counted, and which
    modules were imported meanwhile.

    deviation: the largest absolute difference from eager's output, or with `train` the largest norm of a difference of
    gradients by the gradient's norm.
    """
    import torch

    torch.set_num_threads(threads)

    from thunder.tests.litgpt_model import GPT
    from thunder.tests.measuring import compile_with, cxx_compiler

    if system == "torch.compile":
        if cxx_compiler() is None:
            return {"error": "no C++ compiler"}
    torch.manual_seed(0)
    model = GPT.from_name(
        "llama2-like",
        n_layer=depth,
        n_embd=width,
        n_head=4,
        head_size=width // 4,
        intermediate_size=3 * width,
        block_size=64,
    ).eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 32))
    compiled = compile_with(system, model)
    for name in modules:
        with contextlib.suppress(ImportError):  # what the compilation generated is no module to import again
            importlib.import_module(name)
    loaded = set(sys.modules)
    with torch.set_grad_enabled(train):
        start = time.perf_counter()
        output = compiled(tokens)
        if train:
            output.sum().backward()
        results: dict = {"seconds": time.perf_counter() - start}
        results["imported"] = [name for name in sys.modules if name not in loaded]
        results["deviation"] = (
            gradient_deviation(model, tokens) if train else (output - model(tokens)).abs().max().item()
        )
    if system == "thunder":
        import thunder

        stats = thunder.compile_stats(compiled)
        assert stats is not None, "a compiled module has stats"
        results |= {"instructions": stats.interpreted_instructions, "bound_symbols": stats.bound_symbols_created}
        if train:
            results["bound_symbols"] = sum(
                len(traces[-1].bound_symbols)
                for traces in (thunder.last_traces(compiled), thunder.last_backward_traces(compiled))
            )
    return results


def gradient_deviation(model, tokens) -> float:
    """How far the gradients that the parameters have are from eager's."""
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(tokens).sum().backward()
    reference = [parameter.grad for parameter in model.parameters()]
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, reference, strict=True) if b.norm())


def measure(system: str, depth: int, width: int, threads: int, modules: list[str], train: bool) -> dict:
    """One first call in a fresh process with empty caches. The answer has `error` where it failed."""
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            name: os.path.join(caches, name.lower())
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "THUNDER_CACHE_DIR")
        }
        environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        request = json.dumps(
            {"system": system, "depth": depth, "width": width, "threads": threads, "modules": modules, "train": train}
        )
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--one"],
            input=request,
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure_all(
    systems: list[str], depths: list[int], width: int, repeat: int, threads: int, train: bool
) -> list[dict]:
    """A row for each depth and system, with the median of the seconds; the systems take turns."""
    rows = []
    modules = {system: measure(system, 1, width, threads, [], train).get("imported", []) for system in systems}
    for depth in depths:
        runs: dict[str, list[dict]] = {system: [] for system in systems}
        for turn in range(repeat):
            for system in systems:
                if turn == 0 or system != "torch.compile":
                    runs[system].append(measure(system, depth, width, threads, modules[system], train))
        for system, results in runs.items():
            failed = next((run for run in results if "error" in run), None)
            seconds = [run["seconds"] for run in results if "seconds" in run]
            timed = {"seconds": median(seconds), "fastest": min(seconds), "runs": seconds} if seconds else {}
            rows.append(
                {"depth": depth, "system": system}
                | (failed or {k: v for k, v in results[-1].items() if k != "imported"} | timed)
            )
        print_depth(rows, depth, depths)
    return rows


def row_of(rows: list[dict], system: str, depth: int | None) -> dict | None:
    return next((row for row in rows if row["system"] == system and row["depth"] == depth and "error" not in row), None)


def per_block(rows: list[dict], system: str, low: int, high: int, what: str) -> float | None:
    """How much `what` grows per block between two depths."""
    a, b = row_of(rows, system, low), row_of(rows, system, high)
    return (b[what] - a[what]) / (high - low) if a and b else None


def print_depth(rows: list[dict], depth: int, depths: list[int]) -> None:
    before = depths[depths.index(depth) - 1] if depths.index(depth) else None
    parts = [f"depth {depth:3}"]
    for row in (row for row in rows if row["depth"] == depth):
        if "error" in row:
            parts.append(f"{row['system']}: {row['error']}")
            continue
        added = per_block(rows, row["system"], before, depth, "seconds") if before is not None else None
        parts.append(
            f"{row['system']} {row['seconds']:7.3f} s"
            + (f" ({added:.4f} s per added block)" if added is not None else "")
        )
    ours, theirs = row_of(rows, "thunder", depth), row_of(rows, "torch.compile", depth)
    if ours and theirs:
        parts.append(f"ratio {ours['seconds'] / theirs['seconds']:.4f}")
    if ours and before is not None and row_of(rows, "thunder", before):
        counts = [per_block(rows, "thunder", before, depth, what) for what in ("instructions", "bound_symbols")]
        parts.append(f"{counts[0]:.1f} instructions and {counts[1]:.1f} bound symbols per added block")
    print("   ".join(parts), flush=True)


def linearity(rows: list[dict], depths: list[int]) -> list[str]:
    """What grows faster than linearly with depth in thunder's rows: empty when nothing does."""
    problems = []
    have = [depth for depth in depths if row_of(rows, "thunder", depth)]
    if len(have) < 3:
        return problems
    for what, bar in GROWTH_BARS.items():
        earlier, last = (
            per_block(rows, "thunder", have[0], have[-2], what),
            per_block(rows, "thunder", have[-2], have[-1], what),
        )
        assert earlier is not None and last is not None, "these depths have rows"
        name = "seconds (fastest runs)" if what == "fastest" else what
        print(
            f"thunder: {name} per added block: {earlier:.4g} from depth {have[0]} to {have[-2]}, {last:.4g} from "
            f"there to {have[-1]}"
        )
        if last > bar * earlier:
            problems.append(f"{name} grow faster than linearly with depth")
    return problems


def verdict(rows: list[dict], depths: list[int], train: bool = False) -> list[str]:
    """Everything that falls short of the bars, and every measurement that failed."""
    problems = [f"{row['system']} at depth {row['depth']}: {row['error']}" for row in rows if "error" in row]
    problems += [
        f"{row['system']} at depth {row['depth']} deviates by {row['deviation']:.2g}"
        for row in rows
        if row.get("deviation", 0.0) > DEVIATION_BAR
    ]
    for depth in depths:
        ours, theirs = row_of(rows, "thunder", depth), row_of(rows, "torch.compile", depth)
        if ours and theirs and ours["seconds"] > RATIO_BAR * theirs["seconds"]:
            problems.append(
                f"depth {depth}: {ours['seconds'] / theirs['seconds']:.3f} of torch.compile's time, the bar is "
                f"{RATIO_BAR}"
            )
    slope = per_block(rows, "thunder", depths[0], depths[-1], "seconds") if len(depths) > 1 else None
    if slope is not None:
        bar = SECONDS_PER_BLOCK_BAR_TRAINING if train else SECONDS_PER_BLOCK_BAR
        print(f"thunder: {slope:.4f} s per added block over all depths, the bar on a quiet core is {bar}")
        if slope > bar:
            problems.append(f"{slope:.4f} s per added block, the bar is {bar}")
    return problems + linearity(rows, depths)


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure_here(**json.load(sys.stdin))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="forward and backward instead of forward")
    parser.add_argument(
        "--depths", type=lambda text: sorted({int(part) for part in text.split(",")}), default=[2, 8, 16, 32]
    )
    parser.add_argument("--systems", default="torch.compile,thunder", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--width", type=int, default=32, help="of the model; a multiple of 8")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    chosen = parser.parse_args()
    systems = chosen.systems.split(",")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        parser.error(f"no such system: {', '.join(unknown)}; known: {', '.join(SYSTEMS)}")
    rows = measure_all(systems, chosen.depths, chosen.width, chosen.repeat, chosen.threads, chosen.train)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1) + "\n")
    problems = verdict(rows, chosen.depths, chosen.train)
    print("\n".join(problems) if problems else "holds")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
