"""Models and programs that nobody tuned for, under eager PyTorch, torch.compile and thunder.

    python benchmarks/zoo.py [NAME ...] [--systems eager,torch.compile,thunder,thunder_tiers,thunder_again]
        [--device cuda] [--full] [--rounds 20] [--threads 2] [--minutes 8] [--batch 1/3] [--together 6] [--json FILE]

The rows are those of zoo_programs.py, small models with odd sizes, trained without dropout; with `--full` those of
zoo_full.py, for a GPU, what tells most first; with `--libraries` those of zoo_libraries.py, with `--draw SEED` ten
drawn models more. Each runs in a process of its own, all systems on copies of the same
module and arguments, taking turns. On a GPU, `thunder_tiers` and `thunder_again` have processes of their own, where
they find no kernels of `thunder`. `thunder_again` is a second process, which finds the program and the kernels of the
first on the disk. `--together`: so many processes compile at a time, one after the other measures, and their first
calls hinder each other. A run ends after `--minutes`; rows that FILE has are not measured again, so that several runs
make one table. NAME: parts of names.

One line for each row and system, and at the end the geometric means of all ratios to torch.compile:

    ms        the median step; ratio, eager: to torch.compile's and eager's, with their 95 % intervals
    first     seconds to the first result; imports that the row itself needs are done. On a GPU all caches are empty
    peak      megabytes that a step allocates at most beyond what is there before it
    gradient  the worst gradient's distance from float64's, relative, in the first step and in one of those that are
              measured; of a served model, of its result; of a whole step, of the parameters after the first
    pools     megabytes that pools of CUDA graphs hold, which are not in the peak
    kernels   on a GPU, milliseconds of a step's kernels; FILE says which take most

A program that thunder does not capture fails here. TensorFloat-32 products are left to `--tf32`. The exit status is 1
where a system fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from model_zoo import named_tensors
from zoo_full import rows as full_rows
from zoo_libraries import rows as library_rows
from zoo_programs import ROWS, Row, Task

from thunder.tests.measuring import (
    compile_with,
    cxx_compiler,
    interleaved,
    median,
    paired_ratio,
    parse_systems,
    repetitions,
    settle,
)

ROUND_SECONDS = 0.02  # a turn is as many steps as take about this long
COLUMNS = ("ratio", "eager", "first_ratio", "peak_ratio", "gradient_ratio")
ALONE = ("thunder_tiers", "thunder_again")
KEEPS = {"THUNDER_KEEP_PROGRAMS": "1"}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "THUNDER_CACHE_DIR")


def task_of(row: Row, device: str, dtype: torch.dtype | None = None) -> Task:
    """The row's task, the same one each time; with another type for all that is floating."""
    torch.manual_seed(0)
    task = row.make()
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

    cotangents: list[torch.Tensor] = []

    def train() -> list[torch.Tensor]:
        results = [x for x in floating() if x.requires_grad]
        cotangents[:] = cotangents or map(cotangent, results)
        gradients = torch.autograd.grad(results, wanted, cotangents, allow_unused=True)
        return [g for g in gradients if g is not None]

    def infer() -> list[torch.Tensor]:
        with torch.no_grad():
            return floating()

    def whole() -> list[torch.Tensor]:
        compiled(*task.args, **task.kwargs)
        return [p.detach() for p in parameters]

    return {"train": train, "infer": infer, "step": whole}[task.mode]


def cotangent(x: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of a tensor's form: that of a weighted mean."""
    numbers = torch.arange(x.numel(), device=x.device, dtype=torch.float64).cos() / x.numel()
    return torch.empty_like(x).copy_(numbers.view(x.shape))


def distance(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest norm of a difference, by the norm, or by a thousandth of the largest one: a gradient may be zero.
    Raises ValueError where the tensors are not as many."""
    norms = [b.double().norm().item() for b in exact]
    return max(
        (a.double() - b.to(a.device, torch.float64)).norm().item() / max(norm, 1e-3 * max(norms))
        for a, b, norm in zip(results, exact, norms, strict=True)
    )


def exact_of(row: Row, device: str) -> list[torch.Tensor] | None:
    """What float64 gives; None where the program draws numbers, and where memory does not suffice. Products of groups
    of rows have no kernel for it."""
    task = task_of(row, device, torch.float64)
    if task.random:
        return None
    for module in task.modules:
        for m in module.modules():
            if hasattr(config := getattr(m, "config", None), "_experts_implementation"):
                config._experts_implementation = "eager"
    with contextlib.suppress(torch.OutOfMemoryError):
        return [x.cpu() if device == "cuda" else x.clone() for x in step_of(task, task.function)()]
    return None


def peak_of(step: Callable, device: str) -> float:
    """Bytes that a step allocates at most beyond what is there before it."""
    gc.collect()  # what is freed in the step would count against it
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


def pools() -> int:
    """Bytes that pools of CUDA graphs hold, which a peak does not count."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if any(s["segment_pool_id"]))


def kernels_of(step: Callable, most: int = 10) -> dict[str, Any]:
    """Milliseconds of a step's kernels, how many there are, and those that take most: name, milliseconds, calls."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    results = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return {
        "ms": sum(e.self_device_time_total for e in results) / 1e3,
        "calls": sum(e.count for e in results),
        "most": [(e.key[:90], e.self_device_time_total / 1e3, e.count) for e in results[:most]],
    }


@contextlib.contextmanager
def failure_of(row: dict[str, Any]) -> Iterator[None]:
    """An error of a system, of whatever kind, is a fact of its row."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]


def measure(name: str, chosen: argparse.Namespace, ready: Callable[[], None]) -> list[dict[str, Any]]:
    """A row of the table for each system. ready: called behind the first steps; what follows is measured."""
    torch.set_num_threads(chosen.threads)
    row = rows_of(chosen)[name]
    task = row.make()
    facts = {
        "workload": name, "family": row.family, "device": chosen.device, "threads": chosen.threads,
        "torch": torch.__version__, "tf32": task.tf32 or chosen.tf32,
    }  # fmt: skip
    torch.set_float32_matmul_precision("high" if facts["tf32"] else "highest")
    rows: dict[str, dict[str, Any]] = {system: facts | {"system": system} for system in chosen.systems}
    exact = exact_of(row, chosen.device)
    synchronize = torch.cuda.synchronize if chosen.device == "cuda" else lambda: None
    steps: dict[str, Callable] = {}
    functions: dict[str, Any] = {}
    if "thunder_again" in chosen.systems:
        subprocess.run([*command(name, chosen, ["thunder"]), "--once"], check=True, env=os.environ | KEEPS)
    if "eager" not in chosen.systems:  # whose first step loads libraries for the others
        task = task_of(row, chosen.device)
        step_of(task, task.function)()
    for system, figures in rows.items():
        task = task_of(row, chosen.device)
        functions[system] = compile_with(system, task.function)
        step = step_of(task, functions[system])
        with failure_of(figures):
            start = time.perf_counter()
            results = step()
            synchronize()
            figures["first"] = time.perf_counter() - start
            if exact is not None:
                figures["gradient"] = distance(results, exact)
            del results
            step()
            steps[system] = step
    if chosen.device == "cuda":
        torch.cuda.empty_cache()
    ready()
    # alone on the machine: what is decided by measurements is decided here
    for system, step in list(steps.items()):
        figures, held = rows[system], pools() if chosen.device == "cuda" else 0
        del steps[system]
        with failure_of(figures):
            settle(system, step)
            if exact is not None and task.mode != "step":
                figures["gradient"] = max(figures["gradient"], distance(step(), exact))
            figures["peak"] = peak_of(step, chosen.device)
            if chosen.device == "cuda":
                figures["pools"] = pools() - held
            figures["graphs"] = [str(e.graphs) for e in getattr(functions[system], "programs", ())]
            steps[system] = lambda step=step: (step(), synchronize())
    if chosen.device == "cuda":
        torch.cuda.empty_cache()
    if steps:
        repeat = repetitions(next(iter(steps.values())), ROUND_SECONDS)
        interleaved(steps, 2, repeat)
        clock = time.process_time if chosen.device == "cpu" and chosen.threads == 1 else time.perf_counter
        for system, seconds in (samples := interleaved(steps, chosen.rounds, repeat, clock)).items():
            rows[system]["ms"] = 1e3 * median(seconds)
            for ratio, base in (("ratio", "torch.compile"), ("eager", "eager")):
                if base in samples and base != system:
                    rows[system][ratio] = paired_ratio(seconds, samples[base])
    if chosen.device == "cuda":
        for system, call in steps.items():
            rows[system]["kernels"] = kernels_of(call)
    return list(rows.values())


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a program, with ratios to torch.compile of what is measured once."""
    base = next((row for row in rows if row["system"] == "torch.compile"), {})
    for row in rows:
        for what in ("first", "peak", "gradient"):
            if row is not base and base.get(what) and what in row:
                row[f"{what}_ratio"] = row[what] / base[what]
    return rows


def once(name: str, chosen: argparse.Namespace) -> None:
    """A first step, for the programs and kernels that it leaves on the disk."""
    row = rows_of(chosen)[name]
    task = task_of(row, chosen.device)
    torch.set_float32_matmul_precision("high" if task.tf32 or chosen.tf32 else "highest")
    step_of(task, compile_with(chosen.systems[0], task.function))()


def command(name: str, chosen: argparse.Namespace, systems: Sequence[str]) -> list[str]:
    options = [f"--{n}={getattr(chosen, n)}" for n in ("rounds", "threads", "device")]
    options += [f"--{n}" for n in ("tf32", "full", "libraries", "small") if getattr(chosen, n)]
    options += [] if chosen.draw is None else [f"--draw={chosen.draw}"]
    return [sys.executable, __file__, name, "--inner", f"--systems={','.join(systems)}", *options]


def rows_of(chosen: argparse.Namespace) -> dict[str, Row]:
    if chosen.libraries or chosen.draw is not None:
        return library_rows(chosen.small, chosen.draw)
    return full_rows(chosen.small) if chosen.full else ROWS


def together(names: Sequence[str], chosen: argparse.Namespace, limit: float) -> Iterator[list[dict[str, Any]]]:
    """What rows measure whose processes compile at the same time. After so many seconds these are killed."""
    alone = [s for s in chosen.systems if s in ALONE and chosen.device == "cuda"]
    groups = [g for g in ([s for s in chosen.systems if s not in alone], *([s] for s in alone)) if g]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes: dict[tuple[str, tuple[str, ...]], subprocess.Popen] = {}
        said = {}
        for i, key in enumerate((name, tuple(group)) for name in names for group in groups):
            caches = {c: os.path.join(folder, f"{i}", c) for c in CACHES} if chosen.device == "cuda" else {}
            compilers = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // len(names)))}
            said[key] = stack.enter_context(open(os.path.join(folder, f"{i}.txt"), "w+"))
            options = KEEPS if "thunder_again" in key[1] else {}
            process = subprocess.Popen(
                command(key[0], chosen, key[1]),
                env=compilers | os.environ | caches | options | {"THUNDER_FALLBACK": "error"}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said[key],
            )  # fmt: skip
            processes[key] = stack.enter_context(process)
            stack.callback(process.kill)
        timer = threading.Timer(limit, lambda: [process.kill() for process in processes.values()])
        timer.start()
        stack.callback(timer.cancel)
        for process in processes.values():
            while process.stdout.readline() not in ("ready\n", ""):  # type: ignore[union-attr]
                pass
        for name in names:
            results: list[dict[str, Any]] = []
            for key in processes:
                if key[0] == name:
                    results += result_of(key, processes[key], said[key], limit)
            yield compared(results)


def result_of(key: tuple, process: subprocess.Popen, said: IO[str], limit: float) -> list[dict[str, Any]]:
    """What a process measures, that is told to begin now. said: what it writes for people."""
    out, _ = process.communicate("go\n")
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    said.seek(0)
    last = (said.read().strip().splitlines() or ["no output"])[-1]
    last = last if process.returncode > 0 else f"was killed, or died, within {limit:.0f} seconds: {last}"
    return [{"workload": key[0], "system": system, "failed": last} for system in key[1]]


def line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:32} {row['system']:16}"
    if "failed" in row:
        return f"{head} FAILS: {row['failed']}"
    ratios = "".join(
        f"  {name} " + ("{:.2f} [{:.2f}, {:.2f}]".format(*row[name]) if name in row else " " * 17)
        for name in ("ratio", "eager")
    )
    kernels = f"  kernels {row['kernels']['ms']:8.3f} ms" if "kernels" in row else ""
    pools = f"  pools {row['pools'] / 1e6:.1f} MB" if row.get("pools") else ""
    return (
        f"{head} {row['ms']:9.3f} ms{ratios}{kernels}  first {row['first']:6.2f} s  peak {row['peak'] / 1e6:8.2f} MB  "
        f"gradient {row.get('gradient', math.nan):.1e}{pools}"
    )


def means(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric means of the ratios to torch.compile, and to eager, by system."""
    results = [f"{'geometric means':32} {'system':16}" + "".join(f" {name:>14}" for name in COLUMNS) + "   rows"]
    for system in dict.fromkeys(row["system"] for row in rows):
        of_system = [row for row in rows if row["system"] == system and "failed" not in row]
        cells = []
        for name in COLUMNS:
            values = [
                row[name][0] if isinstance(row[name], (list, tuple)) else row[name] for row in of_system if name in row
            ]
            values = [v for v in values if v > 0]
            cells.append(f"{math.exp(sum(map(math.log, values)) / len(values)):14.3f}" if values else f"{'':14}")
        results.append(f"{'':32} {system:16} {' '.join(cells)} {len(of_system):6}")
    return results


def ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def chosen_rows(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> list[str]:
    rows = rows_of(chosen)
    names = [
        n
        for n, row in rows.items()
        if (chosen.device in row.devices or chosen.small) and any(p.lower() in n.lower() for p in chosen.names)
    ]
    if not names:
        parser.error(f"no row's name contains {' or '.join(chosen.names)}; there are {', '.join(rows)}")
    batch, _, batches = chosen.batch.partition("/")
    return names[int(batch) - 1 :: int(batches)]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="parts of names of rows")
    parser.add_argument("--systems", default=["eager", "torch.compile", "thunder", "thunder_tiers"], type=parse_systems)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=20, help="at least 20, for the intervals")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--minutes", type=float, default=8, help="everything ends after these")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a row")
    parser.add_argument("--batch", default="1/1", help="I/N: each N-th row, from the I-th on")
    parser.add_argument("--together", type=int, default=1, help="rows that compile at a time")
    parser.add_argument("--full", action="store_true", help="the rows of zoo_full.py")
    parser.add_argument("--libraries", action="store_true", help="the rows of zoo_libraries.py")
    parser.add_argument("--draw", type=int, metavar="SEED", help="these, and ten models that the seed draws")
    parser.add_argument("--small", action="store_true", help="these in small sizes, to test them")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the rows, and measure nothing")
    parser.add_argument("--json", help="rows are added there", metavar="FILE")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    chosen = (parser := arguments()).parse_args()
    if chosen.once:
        once(chosen.names[0], chosen)
        return 0
    if chosen.inner:
        print(json.dumps(measure(chosen.names[0], chosen, ready)))
        return 0
    names = chosen_rows(parser, chosen)
    if chosen.list:
        print("\n".join(f"{rows_of(chosen)[name].family:28} {name}" for name in names))
        return 0
    if "torch.compile" in chosen.systems and chosen.device == "cpu" and cxx_compiler() is None:
        parser.error("torch.compile needs a C++ compiler on the CPU: leave it out of --systems")
    file = Path(chosen.json) if chosen.json else None
    rows = json.loads(file.read_text()) if file is not None and file.exists() else []
    known, end = {row["workload"] for row in rows}, time.monotonic() + 60 * chosen.minutes
    left = [name for name in names if name not in known]
    for i in range(0, len(left), chosen.together):
        if (seconds := end - time.monotonic()) < 0:
            break
        for figures in together(left[i : i + chosen.together], chosen, min(seconds, chosen.limit)):
            if time.monotonic() > end:  # this one was killed
                break
            rows += figures
            print(*map(line, figures), sep="\n", flush=True)
            if file is not None:
                file.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(means(rows)))
    missing = len(set(names) - {row["workload"] for row in rows})
    more = f"; run again with --json for the other {missing}" if missing else ""
    print(f"{len(names) - missing} of {len(names)} rows{more}")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
