"""A hundred programs that cannot be captured whole, beside eager: what each gives, and whether it stays compiled.

    python benchmarks/eager_calls.py [NAME ...] [--time] [--why] [--json FILE]

needs PyTorch alone; programs of libraries that are not installed are told. Each program (eager_call_programs/) has a
model before and a model after a part that no trace describes: tqdm, sqlite, subprocess, threads, `exec`, hooks. It runs
twice from equal beginnings, as it is and under `thunder.jit(model)`, for five calls with gradients. After each call
results, gradients, buffers, random state of torch, Python and NumPy, printed text and what the part has done outside
(files, counters, lists) are compared. One line a program:

    equal     everything is eager's: norm of the difference over eager's norm <= 1e-5
    differs   something is not; frozen: what was done outside stays as it was, where eager goes on
    raises    where eager does not
    captured  the last two calls ran a program with all layers of both models in it; around: with eager calls, whole:
              with host calls alone. fallback: the original ran
    programs  how many were compiled

With --time, models are wide (a call takes eager 5 ms or more), and the median of 15 warm calls with their backward
stands beside eager's, measured in turn. Exit status 1 where one differs or raises.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eager_call_programs import aside, language, libraries, pytorch_, system  # noqa: F401  they enter their programs
from eager_call_programs.common import PROGRAMS, Program, Size
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder
from thunder.errors import FallbackWarning

BOUND, CALLS = 1e-5, 5


def build(program: Program, folder: Path) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    folder.mkdir()
    built = program.make(folder)
    return built if isinstance(built, tuple) else (built, lambda: None)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def step(call: Any, module: nn.Module, seed: int) -> dict[str, Any]:
    """Everything that one call of a training loop gives and leaves behind."""
    seeded(seed)
    x = Size.inputs(seed).requires_grad_()
    module.zero_grad()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        result = call(x)
        result.square().mean().backward()
    return {
        "result": result.detach().clone(),
        "gradients": [x.grad, *(None if p.grad is None else p.grad.clone() for p in module.parameters())],
        "buffers": [b.clone() for b in module.buffers()],
        "random state": [torch.rand(()).item(), random.random(), np.random.rand()],
        "printed": printed.getvalue(),
    }


def is_same(ours: Any, expected: Any) -> bool:
    a, b = tree_leaves(ours), tree_leaves(expected)
    return len(a) == len(b) and all(map(_is_same, a, b))


def _is_same(x: Any, y: Any) -> bool:
    if not isinstance(y, torch.Tensor):
        return bool(x == y)
    return (
        isinstance(x, torch.Tensor)
        and x.shape == y.shape
        and bool((x - y).double().norm() <= BOUND * y.double().norm())
    )


def compare(program: Program, folder: Path) -> dict[str, Any]:
    theirs, their_state = build(program, folder / "eager")
    ours, our_state = build(program, folder / "compiled")
    expected, outside = [], [their_state()]
    for seed in range(CALLS):
        expected.append(step(theirs, theirs, seed))
        outside.append(their_state())
    compiled, ran, different, frozen = thunder.jit(ours), [], [], False
    for seed in range(CALLS):
        before, state = calls_of(compiled), our_state()
        try:
            got = step(compiled, ours, seed)
        except Exception as error:  # noqa: BLE001  shown in the table
            return {"outcome": "raises", "why": f"call {seed}: {type(error).__name__}: {error}"}
        ran.append(any(n > before.get(entry, 0) for entry, n in calls_of(compiled).items()))
        different += [f"{kind} of call {seed}" for kind, want in expected[seed].items() if not is_same(got[kind], want)]
        if not is_same(now := our_state(), outside[seed + 1]):
            different.append(f"state outside after call {seed}: {now!r:.80} for {outside[seed + 1]!r:.80}")
            frozen |= is_same(now, state)
    row = {"outcome": "equal", "why": "", "programs": len(compiled.programs), "captured": "fallback"}
    if different:
        row |= {"outcome": "frozen" if frozen else "differs", "why": "; ".join(different[:3])}
    if all(ran[-2:]):
        names = [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols]
        layers = sum(type(m) is nn.Linear for m in ours.modules())
        around = "around" if "eager_call" in names else "whole"
        row["captured"] = around if names.count("linear") >= layers else f"{around}, not all layers"
    return row


def calls_of(compiled: Any) -> dict[int, int]:
    """How many calls each program has run to its end."""
    return {id(entry): entry.calls for entry in compiled.programs}


def cost(program: Program, folder: Path) -> tuple[float, float]:
    """Milliseconds of a warm call with its backward: eager's, and the compiled one's."""
    theirs, _ = build(program, folder / "eager in time")
    ours, _ = build(program, folder / "compiled in time")
    compiled, seconds = thunder.jit(ours), ([], [])
    for seed in range(20):
        for call, taken in ((theirs, seconds[0]), (compiled, seconds[1])):
            seeded(seed)
            x, start = Size.inputs(seed), time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                call(x).square().mean().backward()
            taken.append(time.perf_counter() - start)
    return tuple(1000 * statistics.median(taken[5:]) for taken in seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of programs; all of them otherwise")
    parser.add_argument("--time", action="store_true", help="measure warm calls of wide models")
    parser.add_argument("--why", action="store_true", help="print the warnings, which say what is not captured and why")
    parser.add_argument("--json", help="a file to which a line is added for each program")
    chosen = parser.parse_args()
    if chosen.time:
        Size.width, Size.rows = 512, 256
    rows: list[tuple[Program, dict]] = []
    for name, program in sorted(PROGRAMS.items(), key=lambda item: item[1].aside):
        if chosen.names and not any(part in name for part in chosen.names):
            continue
        if not program.is_installed:
            print(f"{name:34} not run: {program.library} is not installed", flush=True)
            continue
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            row = compare(program, Path(folder))
            if chosen.time and row["outcome"] != "raises":
                row["ms"] = cost(program, Path(folder))
            gc.collect()
        rows.append((program, row))
        took = "{:8.2f} ms  {:5.2f} of eager's".format(row["ms"][1], row["ms"][1] / row["ms"][0]) if "ms" in row else ""
        words = (row["outcome"], row.get("captured", ""), row.get("programs", ""))
        print("{:34} {:8} {:24} {:>2} programs".format(name, *words), took, row["why"], flush=True)
        if chosen.why:
            for text in dict.fromkeys(str(w.message) for w in said if issubclass(w.category, FallbackWarning)):
                print(f"    {text}", flush=True)
        if chosen.json:
            with open(chosen.json, "a") as file:
                file.write(json.dumps({"name": name, "aside": program.aside, **row}) + "\n")
    for title, some in (("all", rows), ("aside", [r for r in rows if r[0].aside])):
        report(title, [row for _, row in some])
    return int(any(row["outcome"] != "equal" for _, row in rows))


def report(title: str, rows: list[dict]) -> None:
    counts = {kind: sum(row["outcome"] == kind for row in rows) for kind in ("equal", "differs", "frozen", "raises")}
    caught = {kind: sum(row.get("captured") == kind for row in rows) for kind in ("around", "whole", "fallback")}
    print(f"\n{title}: {len(rows)} programs, {counts}; both models captured: {caught}")
    ratios = [row["ms"][1] / row["ms"][0] for row in rows if "ms" in row and row.get("captured") in ("around", "whole")]
    if ratios:
        print(f"warm cost of eager's where captured: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    sys.exit(main())
