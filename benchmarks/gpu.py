"""What a program costs on a GPU under eager PyTorch, torch.compile and thunder.

    python benchmarks/gpu.py [rope llama16_grad ...] [--systems eager,torch.compile,thunder] [--rounds 40]
    [--first-call] [--json FILE]

Each workload (gpu_workloads.py) runs in a process of its own, all systems on the same module and inputs, taking turns.
One line a system:

    ms       the median step by the device's clock: forward, and backward where the workload trains (a fixed random
    cotangent)
    ratio    to torch.compile's step, the median of the rounds' ratios and its 95 % interval
    kernels  milliseconds that kernels run in a step: what `ms` has beyond it are gaps between launches
    host     milliseconds until one step is issued into an empty queue
    first    seconds of the first call
    peak     GiB that a step allocates at most beyond what is there before it
    floor    the roofline over `ms`: the larger of the step's matrix products at the rate of one large product, and of
    its arguments, results and gradients, each moved once, at
             the rate of a copy, both measured in the same process
    error    of the result and the worst gradient: norm of the difference to eager's by the norm

--first-call: every system in a process of its own with empty caches (`cold`), and again with the caches that it left
(`second`); only `first` is reported.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_workloads import WORKLOADS, Workload
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import thunder
from thunder.tests.measuring import compile_with, in_processes, median, paired_ratio, turns

GIB = 2**30
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "THUNDER_CACHE_DIR")
ROUND_SECONDS = 0.015  # a turn is as many steps as take about this long: throughput, not the latency of one launch


def under(system: str, function: Callable) -> Callable:
    """`function` under a system: those of `measuring.SYSTEMS`, and variants that only a GPU has."""
    if system == "reduce-overhead":
        return torch.compile(function, mode="reduce-overhead")
    if system in ("thunder_graphs", "thunder_fp8"):
        from thunder.transforms.cudagraph import CUDAGraphTransform
        from thunder.transforms.float8 import Float8Transform

        return thunder.jit(
            function, transforms=[CUDAGraphTransform() if system.endswith("graphs") else Float8Transform()]
        )
    return compile_with(system, function)


def elapsed(call: Callable[[], object], times: int) -> float:
    """Milliseconds per call by the device's clock."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / times


def leaves_of(workload: Workload) -> list[torch.Tensor]:
    parameters = workload.function.parameters() if isinstance(workload.function, nn.Module) else ()
    return [t for t in (*workload.args, *parameters) if isinstance(t, torch.Tensor) and t.requires_grad]


def step_of(function: Callable, workload: Workload) -> Callable[[], list[torch.Tensor]]:
    """One step: its result, and the gradients."""
    leaves, cotangent = leaves_of(workload), []

    def train() -> list[torch.Tensor]:
        out = function(*workload.args)
        if not cotangent:
            torch.manual_seed(2)
            cotangent.append(torch.randn_like(out) if out.ndim else torch.ones_like(out))
        return [out, *torch.autograd.grad(out, leaves, cotangent[0])]

    def infer() -> list[torch.Tensor]:
        with torch.no_grad():
            return [function(*workload.args)]

    return train if workload.trains else infer


def floor(workload: Workload, step: Callable) -> float:
    """Milliseconds that no program for the workload can go below on this device, by the roofline of the module's
    docstring; NaN where PyTorch does not count the step's operations."""
    model = workload.function if isinstance(workload.function, nn.Module) else nn.Module()
    read = [t for t in (*workload.args, *model.parameters()) if isinstance(t, torch.Tensor)]
    dtype = next((t.dtype for t in reversed(read) if t.is_floating_point()), torch.float32)
    try:
        with FlopCounterMode(display=False) as counter:
            results = step()
    except (AssertionError, RuntimeError):  # torch 2.11 fails on fewer heads of keys than of queries, and on leaves
        return math.nan
    moved = sum(t.nbytes for t in (*read, results[0]))
    if workload.trains:
        moved += (
            results[0].nbytes
            + sum(t.nbytes for t in results[1:])
            + (sum(t.nbytes for t in read) if workload.reads_again else 0)
        )
    del results
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    rate = 2 * 8192**3 / elapsed(lambda: torch.mm(a, b), 10)
    source, target = (torch.empty(GIB // 2, device="cuda", dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    bandwidth = GIB / elapsed(lambda: target.copy_(source), 20)
    return max(counter.get_total_flops() / rate, moved / bandwidth)


def kernel_time(step: Callable, steps: int = 3) -> float:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in recorded.key_averages()) / steps / 1e3


def host_time(step: Callable, steps: int = 20) -> float:
    samples = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return median(samples) * 1e3


def difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    expected = reference.to(ours.device).double()
    return ((ours.detach().double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def first_call(name: str, system: str) -> dict[str, Any]:
    """Only the first step, of a process that has used the device before."""
    workload = WORKLOADS[name]()
    torch.mm(*(torch.randn(1024, 1024, device="cuda") for _ in range(2)))
    step = step_of(under(system, workload.function), workload)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return {"workload": name, "system": system, "first": time.perf_counter() - start}


def measure(name: str, systems: list[str], rounds: int) -> list[dict[str, Any]]:
    """Everything about one workload: a row for each system."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    least = floor(workload, step_of(workload.function, workload))
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable] = {}
    reference: list[torch.Tensor] = []
    for system in systems:
        row = rows[system] = {
            "workload": name,
            "system": system,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "floor_ms": least,
        }
        gc.collect()
        torch.cuda.empty_cache()
        step = step_of(under(system, workload.function), workload)
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            results = step()
        except Exception as error:  # noqa: BLE001  shown in the table
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            continue
        torch.cuda.synchronize()
        row["first"] = time.perf_counter() - start
        if not reference:
            reference = [t.detach().cpu() for t in results]
        errors = [difference(ours, expected) for ours, expected in zip(results, reference, strict=True)]
        row["error"], row["gradient_error"] = errors[0], max(errors[1:], default=None)
        del results
        step()
        step()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak"] = (torch.cuda.max_memory_allocated() - before) / GIB
        row["kernels"], row["host"] = kernel_time(step), host_time(step)
        steps[system] = step
    times: dict[str, list[float]] = {system: [] for system in steps}
    repeats = {system: max(1, min(100, int(ROUND_SECONDS * 1e3 / elapsed(step, 2)))) for system, step in steps.items()}
    for order in turns(list(steps), rounds):
        for system in order:
            times[system].append(elapsed(steps[system], repeats[system]))
    for system, samples in times.items():
        rows[system]["ms"] = median(samples)
        if "torch.compile" in times and system != "torch.compile":
            rows[system]["ratio"] = paired_ratio(samples, times["torch.compile"])
    return list(rows.values())


def line(row: dict[str, Any]) -> str:
    head = f"{row['workload']:15} {row['system']:15}"
    if "failed" in row:
        return f"{head} {row['failed']}"
    if "run" in row:
        return f"{head} {row['run']:7} first {row['first']:7.2f} s"
    ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*row["ratio"]) if "ratio" in row else ""
    gradient = "" if row["gradient_error"] is None else f" / {row['gradient_error']:.1e}"
    return (
        f"{head} {row['ms']:9.3f} ms  {ratio:22} kernels {row['kernels']:8.3f}  host {row['host']:7.3f}  first "
        f"{row['first']:6.2f} s  peak {row['peak']:6.3f} GiB  "
        f"floor {row['floor_ms'] / row['ms']:4.0%}  error {row['error']:.1e}{gradient}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument(
        "--systems",
        default="eager,torch.compile,thunder",
        type=lambda text: text.split(","),
        help="also: reduce-overhead, thunder_graphs, thunder_fp8",
    )
    parser.add_argument("--rounds", type=int, default=40, help="at least 20, for the intervals")
    parser.add_argument("--first-call", action="store_true")
    parser.add_argument("--json", help="a file to which a line is added for each row")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    unknown = set(chosen.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"no such workload: {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU; benchmarks/cpu.py measures on the CPU")
    if chosen.inner:
        (name,) = chosen.workloads
        rows = (
            [first_call(name, chosen.systems[0])] if chosen.first_call else measure(name, chosen.systems, chosen.rounds)
        )
        print(json.dumps(rows))
        return 0
    rows = in_processes(
        __file__,
        chosen.workloads,
        chosen.systems,
        ["--rounds", str(chosen.rounds)],
        CACHES if chosen.first_call else (),
        line,
    )
    if chosen.json:
        with open(chosen.json, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
