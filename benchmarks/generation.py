"""transformers' `generate`: tokens per second, the first call, and how many programs it takes.

    python benchmarks/generation.py [--device cuda] [--layers 8] [--tokens 256] [--rounds 3]
        [--systems eager "eager, static" torch.compile "torch.compile, static" thunder "thunder, static"]

A Qwen3 in bfloat16 (float32 on a CPU) with random weights, greedy, one prompt. The systems take turns; each has a copy
of the model whose `forward` it has compiled, with a dynamic cache or a static one. `first` is the first `generate`, in
seconds, with what is compiled in it. `equal`: how many tokens are eager's before the first that is not; in bfloat16
sums in another order choose another token sooner or later.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import thunder

SYSTEMS = "eager", "eager, static", "torch.compile", "torch.compile, static", "thunder", "thunder, static"
PROMPT = 32


def model_of(layers: int, device: str) -> torch.nn.Module:
    small = device == "cpu"
    width = 128 if small else 1024
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64, num_key_value_heads=width // 128,
        head_dim=64 if small else 128, intermediate_size=3 * width, vocab_size=32000, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    model.generation_config.disable_compile = True  # generate() compiles by itself with a static cache otherwise
    return model.to(device, torch.float32 if small else torch.bfloat16)


def timed(run: Callable[[], torch.Tensor], device: str) -> tuple[float, torch.Tensor]:
    begin = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def runner(system: str, model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> tuple[Callable, Callable | None]:
    """A call of generate, and what thunder has compiled in it."""
    model = copy.deepcopy(model)
    name, _, cache = system.partition(", ")
    compiled = None
    if name != "eager":
        model.forward = compiled = {"torch.compile": torch.compile, "thunder": thunder.jit}[name](model.forward)
    options = {"cache_implementation": "static"} if cache else {}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(
                prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **options
            )

    return run, compiled if name == "thunder" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    chosen = parser.parse_args()
    model = model_of(chosen.layers, chosen.device)
    prompt = torch.randint(1, 32000, (1, PROMPT), device=chosen.device)
    runs = {s: runner(s, model, prompt, chosen.tokens) for s in chosen.systems}
    first = {s: timed(run, chosen.device) for s, (run, _) in runs.items()}
    times: dict[str, list[float]] = {s: [] for s in runs}
    for _ in range(chosen.rounds):
        for s, (run, _) in runs.items():
            times[s].append(timed(run, chosen.device)[0])
    want = next(iter(first.values()))[1][0]
    for s, (_, compiled) in runs.items():
        same = (first[s][1][0] == want).int().cumprod(0).sum().item() - PROMPT
        programs = f"  {thunder.cache_misses(compiled)} programs" if compiled else ""
        rate = chosen.tokens / statistics.median(times[s])
        print(f"{s:22}  {rate:8.1f} tokens/s  first {first[s][0]:7.2f} s  equal {same:4}{programs}", flush=True)


if __name__ == "__main__":
    main()
