"""transformers' `generate`: tokens per second, the first call, and how many programs it takes.

    python benchmarks/generation.py [--device cuda] [--model qwen3] [--layers 8] [--batch 1] [--tokens 256] [--rounds 3]
        [--seconds 300] [--alone] [--systems eager "eager, static" torch.compile "torch.compile, static"
         "torch.compile with graphs, static" thunder "thunder, static" "thunder without graphs, static"]

A Qwen3, or a Llama of the width of Llama-2-7B (`--model llama`; it has 32 layers), in bfloat16 (float32 and narrow on a
CPU) with random weights, greedy. Each system is a process of its own, and has compiled `forward`, with a dynamic cache
or a static one. torch.compile with graphs is mode="reduce-overhead", thunder without graphs=False. The first calls of
all systems run at the same time, or with `--alone` one after the other; caches on disk are empty. Later calls take
turns.
`first` is the first `generate`, in seconds, with what is compiled in it. `equal`: how many tokens are the first
system's before the first that is not; in bfloat16 sums in another order choose another token sooner or later. A system
that is not done after `--seconds` is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import thunder

SYSTEMS = (
    "eager", "eager, static", "torch.compile", "torch.compile, static", "torch.compile with graphs, static", "thunder",
    "thunder, static", "thunder without graphs, static",
)  # fmt: skip
PROMPT = 32
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
COMPILERS: dict[str, Callable] = {
    "eager": lambda forward: forward,
    "torch.compile": torch.compile,
    "thunder": thunder.jit,
    "torch.compile with graphs": lambda forward: with_graphs(forward),
    "thunder without graphs": lambda forward: thunder.jit(forward, graphs=False),
}


def with_graphs(forward: Callable) -> Callable:
    """torch.compile with graphs, which is told where a step begins: it may overwrite the results of the last one."""
    compiled = torch.compile(forward, mode="reduce-overhead")

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args, **kwargs)

    return run


def model_of(name: str, layers: int, device: str) -> torch.nn.Module:
    small = device == "cpu"
    sizes = {"num_hidden_layers": layers, "vocab_size": 32000, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    with torch.device(device):
        if name == "llama":
            width = 128 if small else 4096
            sizes |= {"intermediate_size": 344 if small else 11008, "num_attention_heads": width // 32 if small else 32}
            model = LlamaForCausalLM(LlamaConfig(hidden_size=width, **sizes))
        else:
            width = 128 if small else 1024
            sizes |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
            sizes |= {"head_dim": 64 if small else 128, "intermediate_size": 3 * width}
            model = Qwen3ForCausalLM(Qwen3Config(hidden_size=width, **sizes))
    model.generation_config.disable_compile = True  # generate() compiles by itself with a static cache otherwise
    torch.set_default_dtype(torch.float32)
    return model.eval()


def runner(system: str, model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[Callable, Callable]:
    """A call of generate, and the forward in it."""
    name, _, cache = system.partition(", ")
    if name != "eager":
        model.forward = COMPILERS[name](model.forward)
    options = {"cache_implementation": "static"} if cache else {}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(
                prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **options
            )

    return run, model.forward


def serve(chosen: argparse.Namespace) -> None:
    """One system: a line of JSON for a first call, and one for each line that comes in."""
    model = model_of(chosen.model, chosen.layers, chosen.device)
    torch.manual_seed(0)
    prompt = torch.randint(1, 32000, (chosen.batch, PROMPT)).to(chosen.device)
    run, forward = runner(chosen.serve, model, prompt, chosen.tokens)

    def timed() -> tuple[float, torch.Tensor]:
        begin = time.perf_counter()
        result = run()
        if chosen.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin, result

    seconds, result = timed()
    programs = thunder.cache_misses(forward) if chosen.serve.startswith("thunder") else None
    print(json.dumps({"seconds": seconds, "tokens": result[0, PROMPT:].tolist(), "programs": programs}), flush=True)
    for _ in sys.stdin:
        seconds = timed()[0]
        graphs = [str(entry.graphs) for entry in getattr(forward, "programs", ()) if entry.graphs is not None]
        print(json.dumps({"seconds": seconds, "graphs": graphs}), flush=True)


def started(system: str, options: list[str], folder: str) -> subprocess.Popen:
    caches = {cache: os.path.join(folder, system.replace(", ", "-").replace(" ", "-"), cache) for cache in CACHES}
    return subprocess.Popen(
        [sys.executable, __file__, f"--serve={system}", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | caches,
    )  # fmt: skip


def first_calls(processes: dict[str, subprocess.Popen], seconds: float) -> dict[str, dict[str, Any]]:
    """What each process says of its first call, of those that are done within so many seconds."""
    results: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for system, process in processes.items():
            waiting.register(process.stdout, selectors.EVENT_READ, system)
        while waiting.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                said = key.fileobj.readline()
                if said:
                    results[key.data] = json.loads(said)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="qwen3", choices=("qwen3", "llama"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--alone", action="store_true", help="first calls one after the other")
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen)
        return
    options = [f"--{name}={getattr(chosen, name)}" for name in ("device", "model", "layers", "batch", "tokens")]
    systems = [s for s in chosen.systems if not ("graphs" in s and chosen.device == "cpu")]
    processes: dict[str, subprocess.Popen] = {}
    first: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        for group in [[s] for s in systems] if chosen.alone else [systems]:
            for system in group:
                processes[system] = process = started(system, options, folder)
                stack.callback(process.wait)
                stack.callback(process.kill)
            first |= first_calls({s: processes[s] for s in group}, chosen.seconds)
        times: dict[str, list[float]] = {s: [] for s in processes if s in first}
        said_last: dict[str, dict[str, Any]] = {}
        for turn in range(chosen.rounds + 1):
            for system, seconds in [*times.items()]:
                print("go", file=processes[system].stdin, flush=True)
                line = processes[system].stdout.readline()
                if not line:
                    del times[system], first[system]
                    continue
                said_last[system] = json.loads(line)
                seconds += [said_last[system]["seconds"]] if turn else []  # the first turn may record graphs
    wanted = next(iter(first.values()))["tokens"]
    for system in processes:
        if system not in first:
            print(f"{system:34}  no first call within {chosen.seconds:.0f} s, or it fails")
            continue
        said = first[system]
        same = next((i for i, (a, b) in enumerate(zip(said["tokens"], wanted, strict=True)) if a != b), len(wanted))
        programs = f"  {said['programs']} programs" if said["programs"] is not None else ""
        rate = chosen.batch * chosen.tokens / statistics.median(times[system])
        print(
            f"{system:34}  {rate:8.1f} tokens/s  first {said['seconds']:7.2f} s  equal {same:4}{programs}", flush=True
        )
        for text in said_last[system]["graphs"]:
            print(f"{'':34}  {text}"[:300])


if __name__ == "__main__":
    main()
