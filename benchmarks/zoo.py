"""Models and programs that nobody tuned for, under eager PyTorch, torch.compile and thunder.

    python benchmarks/zoo.py [NAME ...] [--systems eager,torch.compile,thunder,thunder_tiers] [--device cuda]
        [--rounds 20] [--threads 2] [--seconds 480] [--json FILE]

The rows are those of zoo_programs.py, small models with odd sizes, trained without dropout. Each runs in a process of
its own, all systems on copies of the same module and arguments, taking turns. A run ends after `--seconds`; rows that
FILE has are not measured again, so that several runs make one table. NAME: parts of names.

One line for each row and system, and at the end the geometric means of all ratios to torch.compile:

    ms        the median step; ratio, eager: to torch.compile's and eager's, with their 95 % intervals
    first     seconds to the first result; imports that the row itself needs are done
    peak      megabytes that a step allocates at most beyond what is there before it
    gradient  the worst gradient's distance from float64's, relative; of a served model, of its result; of a whole step,
              of the parameters after it

TensorFloat-32 products are left to `--tf32`. The exit status is 1 where a system fails.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_zoo import named_tensors
from zoo_programs import ROWS, Task

from thunder.tests.measuring import (
    compile_with,
    cxx_compiler,
    in_processes,
    interleaved,
    median,
    paired_ratio,
    parse_systems,
    repetitions,
)

ROUND_SECONDS = 0.02  # a turn is as many steps as take about this long
COLUMNS = ("ratio", "eager", "first_ratio", "peak_ratio", "gradient_ratio")


def task_of(name: str, device: str, dtype: torch.dtype | None = None) -> Task:
    """The row's task, the same one each time; with another type for all that is floating."""
    torch.manual_seed(0)
    task = ROWS[name].make()
    for module in task.modules:
        module.to(device, dtype)

    def moved(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(moved, x))
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().to(device, dtype if x.is_floating_point() else None).requires_grad_(x.requires_grad)

    task.args, task.kwargs = tuple(map(moved, task.args)), {n: moved(x) for n, x in task.kwargs.items()}
    return task


def step_of(task: Task, compiled: Callable) -> Callable[[], list[torch.Tensor]]:
    """One step. It gives what is compared: gradients, results of a served model, parameters after a whole step."""
    parameters = [p for module in task.modules for p in module.parameters()]
    inputs = [x for x in task.args if isinstance(x, torch.Tensor)]
    wanted = [x for x in (*parameters, *inputs) if x.requires_grad]

    def floating() -> list[torch.Tensor]:
        return [x for _, x in named_tensors(compiled(*task.args, **task.kwargs)) if x.is_floating_point()]

    def train() -> list[torch.Tensor]:
        loss = sum((x * weights(x)).mean() for x in floating() if x.requires_grad)
        found = torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
        return [g for g in found if g is not None]

    def infer() -> list[torch.Tensor]:
        with torch.no_grad():
            return floating()

    def whole() -> list[torch.Tensor]:
        compiled(*task.args, **task.kwargs)
        return [p.detach() for p in parameters]

    return {"train": train, "infer": infer, "step": whole}[task.mode]


def weights(x: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of a tensor's form, so that each element has a cotangent of its own."""
    return torch.arange(x.numel(), device=x.device, dtype=torch.float64).cos().view(x.shape).to(x.dtype)


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest norm of a difference, by the norm, or by a thousandth of the largest one: a gradient may be zero.
    Raises ValueError where the tensors are not as many."""
    norms = [b.double().norm().item() for b in exact]
    return max(
        (a.double() - b.double()).norm().item() / max(norm, 1e-3 * max(norms))
        for a, b, norm in zip(found, exact, norms, strict=True)
    )


def exact_of(name: str, device: str) -> list[torch.Tensor]:
    """What float64 gives. Products of groups of rows have no kernel for it."""
    task = task_of(name, device, torch.float64)
    for module in task.modules:
        if hasattr(config := getattr(module, "config", None), "_experts_implementation"):
            config._experts_implementation = "eager"
    return [x.clone() for x in step_of(task, task.function)()]


def peak_of(step: Callable, device: str) -> float:
    """Bytes that a step allocates at most beyond what is there before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return float(peak)


def settled(system: str, step: Callable) -> None:
    """Steps until nothing is compiled any more."""
    step()
    if system == "thunder_tiers":
        from thunder import tiers
        from thunder.runtime import background

        background.idle(200)
        for _ in range(5 * tiers.TIMED):
            step()


def measure(name: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for each system."""
    torch.set_num_threads(chosen.threads)
    torch.set_float32_matmul_precision("high" if chosen.tf32 else "highest")
    row = ROWS[name]
    facts = {
        "workload": name, "family": row.family, "device": chosen.device, "threads": chosen.threads,
        "torch": torch.__version__, "tf32": chosen.tf32,
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = {system: facts | {"system": system} for system in chosen.systems}
    exact = exact_of(name, chosen.device)
    synchronize = torch.cuda.synchronize if chosen.device == "cuda" else lambda: None
    steps: dict[str, Callable] = {}
    for system, found in rows.items():
        task = task_of(name, chosen.device)
        step = step_of(task, compile_with(system, task.function))
        try:
            start = time.perf_counter()
            results = step()
            synchronize()
            found["first"] = time.perf_counter() - start
            found["gradient"] = distance(results, exact)
            settled(system, step)
            found["peak"] = peak_of(step, chosen.device)
        except Exception as error:  # noqa: BLE001  an error of whatever kind is this program's finding
            found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            continue
        steps[system] = lambda step=step: (step(), synchronize())
    if steps:
        repeat = repetitions(next(iter(steps.values())), ROUND_SECONDS)
        interleaved(steps, 2, repeat)
        for system, seconds in (samples := interleaved(steps, chosen.rounds, repeat)).items():
            rows[system]["ms"] = 1e3 * median(seconds)
            for ratio, base in (("ratio", "torch.compile"), ("eager", "eager")):
                if base in samples and base != system:
                    rows[system][ratio] = paired_ratio(seconds, samples[base])
    base = rows.get("torch.compile", {})
    for found in rows.values():
        for what in ("first", "peak", "gradient"):
            if found is not base and base.get(what) and what in found:
                found[f"{what}_ratio"] = found[what] / base[what]
    return list(rows.values())


def line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:32} {row['system']:16}"
    if "failed" in row:
        return f"{head} FAILS: {row['failed']}"
    ratios = "".join(
        f"  {name} " + ("{:.2f} [{:.2f}, {:.2f}]".format(*row[name]) if name in row else " " * 17)
        for name in ("ratio", "eager")
    )
    return (
        f"{head} {row['ms']:9.3f} ms{ratios}  first {row['first']:6.2f} s  peak {row['peak'] / 1e6:8.2f} MB  "
        f"gradient {row['gradient']:.1e}"
    )


def means(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric means of the ratios to torch.compile, and to eager, by system."""
    found = [f"{'geometric means':32} {'system':16}" + "".join(f" {name:>14}" for name in COLUMNS) + "   rows"]
    for system in dict.fromkeys(row["system"] for row in rows):
        of_system = [row for row in rows if row["system"] == system and "failed" not in row]
        cells = []
        for name in COLUMNS:
            values = [
                row[name][0] if isinstance(row[name], (list, tuple)) else row[name] for row in of_system if name in row
            ]
            values = [v for v in values if v > 0]
            cells.append(f"{math.exp(sum(map(math.log, values)) / len(values)):14.3f}" if values else f"{'':14}")
        found.append(f"{'':32} {system:16} {' '.join(cells)} {len(of_system):6}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="parts of names of rows")
    parser.add_argument("--systems", default=["eager", "torch.compile", "thunder", "thunder_tiers"], type=parse_systems)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=20, help="at least 20, for the intervals")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=480, help="no row begins after these")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a row")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the rows, and measure nothing")
    parser.add_argument("--json", help="rows are added there", metavar="FILE")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inner:
        print(json.dumps(measure(chosen.names[0], chosen)))
        return 0
    names = [
        n
        for n, row in ROWS.items()
        if chosen.device in row.devices and any(p.lower() in n.lower() for p in chosen.names)
    ]
    if not names:
        parser.error(f"no row's name contains {' or '.join(chosen.names)}; there are {', '.join(ROWS)}")
    if chosen.list:
        print("\n".join(f"{ROWS[name].family:28} {name}" for name in names))
        return 0
    if "torch.compile" in chosen.systems and chosen.device == "cpu" and cxx_compiler() is None:
        parser.error("torch.compile needs a C++ compiler on the CPU: leave it out of --systems")
    file = Path(chosen.json) if chosen.json else None
    rows = json.loads(file.read_text()) if file is not None and file.exists() else []
    known, end = {row["workload"] for row in rows}, time.monotonic() + chosen.seconds
    options = [f"--{name}={getattr(chosen, name)}" for name in ("rounds", "threads", "device")]
    options += ["--tf32"] if chosen.tf32 else []
    for name in names:
        if name not in known and time.monotonic() < end:
            rows += in_processes(__file__, [name], chosen.systems, options, (), line, chosen.limit)
            if file is not None:
                file.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(means(rows)))
    left = len(set(names) - {row["workload"] for row in rows})
    print(
        f"{len(names) - left} of {len(names)} rows" + (f"; run again with --json for the other {left}" if left else "")
    )
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
