"""What does a warm call of small programs with much Python in them cost, beside eager?

    python benchmarks/small_things.py [--samples 200] [--only WORD ...]

Programs whose operations take next to no time on the CPU: what is measured is guards, effects and the way of a call.
Samples of eager and of thunder take turns in one process, in processor time. Printed: the median time of a call and the
median of the paired ratios. The bar: 1.3 for what is captured, 1.5 for what runs the original function. The exit status
is 1 where a program misses it.
"""

from __future__ import annotations

import argparse
import functools
import io
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout

import torch
from torch import nn

import thunder
from thunder.tests.measuring import interleaved, median, paired_ratio, repetitions

CAPTURED_BAR, ORIGINAL_BAR = 1.3, 1.5
SAMPLE_SECONDS = 1e-3
X = torch.ones(4)
LOCK = threading.Lock()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]


class Scaled(torch.Tensor):
    """A subclass without rules of its own."""


def locked(x):
    with LOCK:
        return x + 1


def printing(x):
    print("a step")
    return x + 1


def refused(x):
    return x + x.untyped_storage().nbytes()


def raising(x):
    try:
        raise KeyError("inside")
    except KeyError:
        return x + 1


def in_types(x, kind):
    return x.to(kind) + 1


def by_mode(x, mode):
    return x + 1 if mode == "a" else x - 1


def add_all(tensors):
    return [t + 1 for t in tensors]


def under_autocast(x, layer):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


def programs() -> dict[str, tuple[Callable, list[tuple]]]:
    """Name -> a program, and the arguments of calls that take turns."""
    embedding, linear = nn.Embedding(16, 8), nn.Linear(16, 16)
    return {
        "lock in a with": (locked, [(X,)]),
        "print": (printing, [(X,)]),
        "function that fell back": (refused, [(X,)]),
        "partial": (lambda x, f: f(x), [(X, functools.partial(torch.add, X))]),
        "partial made anew": (lambda x, f: f(x), [(X, functools.partial(torch.add, X)) for _ in range(8)]),
        "dtypes in turn": (in_types, [(X, kind) for kind in DTYPES]),
        "Embedding": (embedding, [(torch.tensor([1, 2, 3]),)]),
        "strings in turn": (by_mode, [(X, "a"), (X, "b")]),
        "tensor subclass": (lambda x: x + 1, [(X.as_subclass(Scaled),)]),
        "200 tensors in a list": (add_all, [([X.clone() for _ in range(200)],)]),
        "autocast Linear": (under_autocast, [(torch.ones(4, 16), linear)]),
        "exception inside": (raising, [(X,)]),
    }


def measure(program: Callable, calls: list[tuple], samples: int) -> dict:
    """Medians in microseconds, and the ratio with its interval. Raises AssertionError where results differ."""
    compiled = thunder.jit(program, fallback="eager")
    for args in calls * 3:
        torch.testing.assert_close(compiled(*args), program(*args))
    runs = {
        "eager": lambda: [program(*args) for args in calls],
        "thunder": lambda: [compiled(*args) for args in calls],
    }
    repeat = repetitions(runs["eager"], SAMPLE_SECONDS)
    interleaved(runs, max(10, samples // 10), repeat)  # warm
    times = interleaved(runs, samples, repeat, time.process_time)
    row = {name: 1e6 * median(taken) / len(calls) for name, taken in times.items()}
    row["ratio"], row["low"], row["high"] = paired_ratio(times["thunder"], times["eager"])
    inner = getattr(compiled, "_compiled", compiled)
    row["captured"] = bool(inner.programs)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=200, help="interleaved paired samples")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="programs whose name contains one of the words"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    missed = []
    for name, (program, calls) in programs().items():
        if not any(word in name for word in chosen.only):
            continue
        with torch.no_grad(), redirect_stdout(io.StringIO()):
            row = measure(program, calls, chosen.samples)
        bar = CAPTURED_BAR if row["captured"] else ORIGINAL_BAR
        what = "captured" if row["captured"] else "original"
        print(
            f"{name:28} {what} eager {row['eager']:8.2f} us, thunder {row['thunder']:8.2f} us, ratio "
            f"{row['ratio']:6.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            flush=True,
        )
        if row["ratio"] > bar:
            missed.append(name)
    print(f"missed: {'; '.join(missed)}" if missed else "all hold")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
