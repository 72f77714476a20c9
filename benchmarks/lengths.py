"""Training on texts of many lengths: what is compiled, and a step beside one that was compiled for its length alone.

    python benchmarks/lengths.py                  # Llama and Qwen3 of 8 layers, 60 lengths, on the GPU
    python benchmarks/lengths.py --profile        # which kernels a step spends its time in
    python benchmarks/lengths.py --torch-compile  # and the time of all steps with torch.compile's default options

Reports for each model how many programs and regions all lengths needed, the time of all steps with what was compiled,
and for ten lengths the ratio of a step's time (median of 20 that take turns) to that of a step that was compiled with
`dynamic=False` when no other length had been seen.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn as nn
from gpu_workloads import Llama

import thunder
from thunder.executors.triton_fuser import triton_fuser

BATCH, SHORTEST, LONGEST, STEPS = 4, 100, 1000, 20


def llama(layers: int) -> tuple[nn.Module, int]:
    model = Llama(layers, LONGEST, width=2048, heads=16, kv_heads=8, inner=5632, vocabulary=32000)
    return model, 32000


def qwen3(layers: int) -> tuple[nn.Module, int]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=32000, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), 32000


def step(model: nn.Module, call: Callable, ids: torch.Tensor) -> None:
    """Forward, backward, no optimizer, which sees no length."""
    model.zero_grad(set_to_none=True)
    result = call(ids, labels=ids)
    (result if isinstance(result, torch.Tensor) else result.loss).backward()


def milliseconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1000


def profile(name: str, run: Callable[[], None]) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    print(f"  {name}: {sum(e.self_device_time_total for e in rows) / 5000:.3f} ms on the device")
    for e in rows[:25]:
        print(f"    {e.self_device_time_total / 5000:8.3f} ms {e.count / 5:6.1f} times  {e.key[:110]}")


def measure(name: str, make: Callable, layers: int, lengths: int, compared: int, profiled: bool, beside: bool) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, vocabulary = make(layers)
    model = model.to(torch.bfloat16)
    generator = random.Random(0)
    chosen = [generator.randint(SHORTEST, LONGEST) for _ in range(lengths)]
    batches = {n: torch.randint(1, vocabulary, (BATCH, n), device="cuda") for n in chosen}
    compiled, before = thunder.jit(model), triton_fuser.compilations
    times = [milliseconds(lambda n=n: step(model, compiled, batches[n])) for n in chosen]
    print(
        f"{name}: {lengths} lengths, {thunder.cache_misses(compiled)} programs, "
        f"{triton_fuser.compilations - before} regions, {sum(times) / 1000:.1f} s in all, "
        f"the first three {times[0] / 1000:.2f} {times[1] / 1000:.2f} {times[2] / 1000:.2f} s, "
        f"the slowest other {max(times[3:]):.1f} ms, median {statistics.median(times):.2f} ms"
    )
    if beside:
        other = torch.compile(model)
        total = sum(milliseconds(lambda n=n: step(model, other, batches[n])) for n in chosen)
        print(f"  torch.compile: {total / 1000:.1f} s in all; ours {sum(times) / total:.3f} of it", flush=True)
    for r in thunder.last_recompile_reasons(compiled)[:3]:
        print("  ", r)
    others = sorted(dict.fromkeys(chosen[3:]))[:: max(1, (lengths - 3) // compared)][:compared]
    ratios = [compare(model, compiled, batches[n], profiled and n == others[-1]) for n in others]
    print(f"  median ratio {statistics.median(ratios):.3f}")


def compare(model: nn.Module, compiled: Callable, ids: torch.Tensor, profiled: bool) -> float:
    """The ratio of a step's time to one that was compiled for these sizes."""
    calls = compiled, thunder.jit(model, dynamic=False)
    runs = [functools.partial(step, model, call, ids) for call in calls]
    for _ in range(3):
        for run in runs:
            run()
    pairs = [[milliseconds(run) for run in runs] for _ in range(STEPS)]
    ours, alone = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"  length {ids.shape[1]:4}: {ours:.3f} ms, alone {alone:.3f} ms, ratio {ours / alone:.3f}", flush=True)
    if profiled:
        for name, run in zip(("of all lengths", "alone"), runs, strict=True):
            profile(name, run)
    return ours / alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["llama", "qwen3"], choices=["llama", "qwen3"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lengths", type=int, default=60)
    parser.add_argument("--compared", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--torch-compile", action="store_true")
    options = parser.parse_args()
    for name in options.models:
        make = {"llama": llama, "qwen3": qwen3}[name]
        measure(name, make, options.layers, options.lengths, options.compared, options.profile, options.torch_compile)


if __name__ == "__main__":
    main()
