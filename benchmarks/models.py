"""Runs every model of the zoo compiled and eager, forward under no_grad in float32, and prints a line for each.

    python benchmarks/models.py [--only NAME] [--systems eager,thunder]

ok or the error; the largest deviation from eager over all tensors of the output; how many operations were opaque; first call in seconds; warm call in
milliseconds beside eager's (medians of interleaved runs). Exit status 0 when every model runs, none through an opaque operation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings

import torch
from model_zoo import MODELS

import thunder


def tensors_of(value) -> list[torch.Tensor]:
    """All tensors in a model's output, in order; caches are opened up by their attributes."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_of(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_of(v)]
    if hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, type)):
        return [t for v in vars(value).values() for t in tensors_of(v)]
    return []


def deviation(got, want) -> float:
    """The largest absolute difference; infinity where the structures differ."""
    a, b = tensors_of(got), tensors_of(want)
    if len(a) != len(b) or type(got) is not type(want) or any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(a, b, strict=True)):
        return float("inf")
    return max(((x.double() - y.double()).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()), default=0.0)


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(name: str, rounds: int) -> tuple[bool, str]:
    module, args, kwargs = MODELS[name]()
    with torch.no_grad():
        want = module(*args, **kwargs)
        compiled = thunder.jit(module)
        start = time.perf_counter()
        got = compiled(*args, **kwargs)
        first = time.perf_counter() - start
        again = compiled(*args, **kwargs)
        off = max(deviation(got, want), deviation(again, want))
        opaque = thunder.get_auto_registered_torch_op_names(compiled)
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(seconds(lambda: compiled(*args, **kwargs)))
            theirs.append(seconds(lambda: module(*args, **kwargs)))
    hits = thunder.cache_misses(compiled) == 1
    fine = off < 1e-5 and not opaque and hits
    warm = f"{1e3 * statistics.median(ours):7.2f} ms (eager {1e3 * statistics.median(theirs):7.2f})"
    notes = (f"  opaque: {', '.join(sorted(opaque))}" if opaque else "") + ("" if hits else f"  recompiled: {thunder.last_recompile_reasons(compiled)}")
    return fine, f"{'ok     ' if fine else 'FALLS SHORT'} deviation {off:.1e}  opaque {len(opaque)}  first call {first:6.3f} s  warm {warm}{notes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="part of a model's name")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bad = []
    for name in MODELS:
        if options.only and options.only.lower() not in name.lower():
            continue
        try:
            fine, text = measure(name, options.rounds)
        except Exception as error:  # noqa: BLE001 - one model's failure is a line of the table
            fine, text = False, f"FAILS   {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name:26}{text}", flush=True)
        bad += [] if fine else [name]
    print("all models run" if not bad else f"{len(bad)} fall short: {', '.join(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
