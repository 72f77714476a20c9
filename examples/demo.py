"""A byte-level GPT reads Python's own standard library, and learns it: compiled by thunder, beside eager PyTorch and
torch.compile.

    pip install thunder-compiler[plots]
    python examples/demo.py

Forward, under torch.no_grad(), on the CPU: the deviation from eager, seconds of the first call, microseconds of a warm
one, what the compiled program looks like, and what happens when the input changes its shape. Then `train.py` trains one
beside eager; the exit code is 1 where their loss curves do not agree.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import train

import thunder
from thunder.tests.litgpt_model import GPT
from thunder.tests.measuring import compile_with, cxx_compiler, interleaved, median

BATCH, TIME, OTHER_TIME = 4, 128, 96
LINE = 150  # characters of a line that is shown


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def excerpt(trace: object, *, first: int, last: int, arguments: int = 4) -> str:
    """The first and the last lines of a trace's program, long lines clipped, with the types of its first few arguments
    only."""
    program = str(trace).rstrip().splitlines()
    start = next((i for i, text in enumerate(program) if text.startswith("def ")), 0) + 1
    head, program = program[:start], program[start:]
    types = next((i for i, text in enumerate(program) if not text.startswith("  # ")), 0)
    head += program[: min(types, arguments)] + (
        [f"  ... the types of {types - arguments} more ..."] if types > arguments else []
    )
    program = program[types:]
    if len(program) > first + last:
        program = [*program[:first], f"  ... {len(program) - first - last} lines ...", *program[-last:]]
    return "\n".join(text if len(text) <= LINE else text[: LINE - 4] + " ..." for text in head + program)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=train.Setup.steps, help="steps of training")
    parser.add_argument("--rounds", type=int, default=60, help="interleaved rounds for the warm calls")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    model = GPT.from_name(
        "llama2-like",
        n_layer=chosen.layers,
        n_embd=128,
        head_size=32,
        intermediate_size=344,
        vocab_size=256,
        block_size=256,
    ).eval()
    tokens = train.standard_library_text(BATCH * TIME).view(BATCH, TIME)
    print(f"thunder {thunder.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(
        f"A Llama-style GPT over bytes: {chosen.layers} blocks, {sum(p.numel() for p in model.parameters()):,} "
        f"parameters; input {tuple(tokens.shape)}"
    )
    print(f"The text begins: {bytes(tokens[0, :60].tolist()).decode(errors='replace')!r}")

    systems = ["eager", "thunder"] + (["torch.compile"] if cxx_compiler() else [])
    programs = {system: compile_with(system, model) for system in systems}
    with torch.no_grad():
        first_calls(programs, tokens)
        warm_calls(programs, tokens, chosen.rounds)
        compiled = programs["thunder"]
        show_traces(compiled)
        second_shape(compiled, model, tokens[:, :OTHER_TIME])
    heading("Training: eager and thunder from one seed, step by step, examples/train.py")
    return 0 if train.compare(train.Setup(layers=chosen.layers, steps=chosen.steps)) else 1


def first_calls(programs: dict, tokens: torch.Tensor) -> None:
    heading("First call: seconds, each compiler's own imports included, and the deviation from eager")
    reference = programs["eager"](tokens)
    for system, program in programs.items():
        start = time.perf_counter()
        output = program(tokens)
        seconds = time.perf_counter() - start
        print(f"{system:14}{seconds:8.3f} s   deviation {(output - reference).abs().max().item():.2g}", flush=True)
    if "torch.compile" not in programs:
        print("torch.compile  cannot run here: it needs a C++ compiler, and there is none")


def warm_calls(programs: dict, tokens: torch.Tensor, rounds: int) -> None:
    heading(f"Warm call: microseconds, median of {rounds} interleaved rounds")
    calls = {system: lambda program=program: program(tokens) for system, program in programs.items()}
    interleaved(calls, 5)
    times = {system: median(samples) for system, samples in interleaved(calls, rounds).items()}
    for system, seconds in times.items():
        print(f"{system:14}{1e6 * seconds:8.0f} us   {seconds / times['eager']:.2f} of eager")


def show_traces(compiled: object) -> None:
    heading("The prologue: what is checked before the program runs, thunder.last_prologue_traces(compiled)[-1]")
    print(excerpt(thunder.last_prologue_traces(compiled)[-1], first=10, last=6))
    heading("The computation: what runs, thunder.last_traces(compiled)[-1]")
    print(excerpt(thunder.last_traces(compiled)[-1], first=24, last=9))


def second_shape(compiled, model: torch.nn.Module, tokens: torch.Tensor) -> None:
    heading(f"A second shape: {tuple(tokens.shape)}")
    misses = thunder.cache_misses(compiled)
    start = time.perf_counter()
    output = compiled(tokens)
    seconds = time.perf_counter() - start
    print(
        f"compiled again: {thunder.cache_misses(compiled) > misses}, in {seconds:.3f} s; deviation "
        f"{(output - model(tokens)).abs().max().item():.2g}"
    )
    for reason in thunder.last_recompile_reasons(compiled):
        print(f"reason: {reason}")
    compiled(tokens)
    print(
        f"Both programs are kept: {thunder.cache_misses(compiled)} compilations and {thunder.cache_hits(compiled)} "
        "hits so far"
    )


if __name__ == "__main__":
    sys.exit(main())
