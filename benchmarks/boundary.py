"""What does a compiled program pay for what it reads from outside: at each call, and at the first?

    python benchmarks/boundary.py [--before TREE] [--rounds 12] [--train]

Printed, each with its bar: microseconds of the prologue of a program that reads the length, one item, or all of a list
of 100,000 numbers; a call where 100 or 400 programs are asked in turn, by a call of one; Python calls that capturing an
in-place write to a view takes, where there are 100 to 800 of them; and for transformers' Llama of 8 small layers the
prologue, in microseconds, and the first call, in milliseconds of processor time.

--before names another checkout of thunder. Its Llama is measured in processes that take turns with this one's, and so
are calls of `call_overhead.py`: printed are medians of both and the median of the paired ratios. The first round, which
may build what the disk cache keeps, is not counted. The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

HERE = Path(__file__).resolve()
NUMBERS, WRITES = 100_000, (100, 200, 400, 800)
LINEAR = 1.1  # a write among the last ones costs at most this times one among the first


def best(call: Callable, seconds: float = 0.3) -> float:
    """Microseconds of the fastest call."""
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        fastest = min(fastest, time.perf_counter_ns() - start)
    return fastest / 1e3


# ------------------------------------------------------------------------------------------------------ in this process


def lists() -> list[tuple[str, float, float]]:
    import thunder

    numbers, x = [float(i) for i in range(NUMBERS)], torch.zeros(1)
    programs = {
        "its length": (lambda x, values: x + len(values), 5),
        "one item": (lambda x, values: x + values[5], 5),
        "all of it": (lambda x, values: x + torch.tensor(values)[:1], 3000),
    }
    rows = []
    for name, (program, bar) in programs.items():
        compiled = thunder.jit(program)
        torch.testing.assert_close(compiled(x, numbers), program(x, numbers))
        prologue = thunder.compile_stats(compiled).interpreter_cache[0].prologue_fn
        cost = best(lambda: prologue(program, (x, numbers), {}))  # noqa: B023 - called here
        rows.append((f"a list of {NUMBERS} numbers, {name}: us of the prologue", cost, bar))
    return rows


def entries() -> list[tuple[str, float, float]]:
    import thunder
    from thunder.errors import RecompileWarning

    x, times = torch.zeros(1), {}
    for count in (1, 100, 400):
        compiled = thunder.jit(lambda x, word: x + len(word), max_entries=512)
        words = [f"word {i}" for i in range(count)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecompileWarning)
            for word in words:
                compiled(x, word)
        times[count] = best(lambda: [compiled(x, word) for word in words], 1.0) / count  # noqa: B023 - called here
    return [(f"{count} programs in turn: calls of one", times[count] / times[1], 2) for count in (100, 400)]


def writes() -> list[tuple[str, float, float]]:
    import thunder

    def calls(count: int) -> int:
        def program(x):
            y = x.clone()
            for i in range(count):
                y[i % 8 : i % 8 + 2].add_(1.0)
            return y

        compiled, entered = thunder.jit(program), 0

        def note(frame, event, argument):
            nonlocal entered
            entered += event == "call"

        compiled.lower(torch.zeros(4))  # what the first capture imports and decodes
        sys.setprofile(note)
        compiled.lower(torch.zeros(10))
        sys.setprofile(None)
        return entered

    results = [calls(count) for count in WRITES]
    each = [(b - a) / (n - m) for a, b, m, n in zip(results, results[1:], WRITES, WRITES[1:], strict=False)]
    name = f"in-place writes to views: {each[0]:.0f} Python calls a write up to {WRITES[1]}, then times"
    return [(name, each[-1] / each[0], LINEAR)]


def llama(train: bool) -> dict[str, float]:
    """The prologue in microseconds, and processor time of the first call in milliseconds, of the thunder on the
    path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import thunder

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).train(train)
    compiled, keywords = thunder.jit(model), {"input_ids": torch.randint(0, 128, (1, 8))}
    with torch.set_grad_enabled(train):
        start = time.process_time()
        compiled(**keywords)
        first = time.process_time() - start
        stats = thunder.compile_stats(compiled)
        assert stats is not None, "a compiled module has stats"
        prologue = stats.interpreter_cache[0].prologue_fn  # which may ask for the modes that the call is made in
        assert type(prologue(model, (), keywords)) is tuple, "the prologue fits its own call"
        return {"prologue": best(lambda: prologue(model, (), keywords), 1.0), "first call": 1e3 * first}


# ------------------------------------------------------------------------------------------------------ beside another


def _run(tree: Path, *command: str) -> str:
    """What a command prints that imports thunder from a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} in {tree} failed: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def _overhead(tree: Path) -> dict[str, float]:
    """Microseconds that thunder adds to the programs of call_overhead.py."""
    code = (
        "import json, torch; from benchmarks.call_overhead import cases, measure; torch.set_num_threads(1); "
        "torch.set_grad_enabled(False); "
        "print(json.dumps({n: measure(m, ['thunder'], 40)['thunder']['added'] for n, m in cases().items()}))"
    )
    return json.loads(_run(tree, "-c", code))


def beside(before: Path, rounds: int, train: bool) -> list[tuple[str, float, float]]:
    here, rows = HERE.parent.parent, []
    one = [str(HERE), "--one", *["--train"] * train]
    results: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        ours, theirs = (json.loads(_run(tree, *one)) for tree in (here, before))
        for name in ours if turn else ():
            results.setdefault(name, []).append((ours[name], theirs[name]))
    for name, pairs in results.items():
        unit, bar = ("us", 0.6) if name == "prologue" else ("ms", 1.0)
        values = " and ".join(f"{median(side):.1f} {unit}" for side in zip(*pairs, strict=True))
        rows.append((f"Llama, {name}: {values} before, ratio", median(a / b for a, b in pairs), bar))
    overheads = [(_overhead(here), _overhead(before)) for _ in range(max(rounds // 2, 1))]
    for name in overheads[0][0]:
        pairs = [(ours[name], theirs[name]) for ours, theirs in overheads]
        values = " and ".join(f"{median(side):.1f} us" for side in zip(*pairs, strict=True))
        # what is added may be nothing, or less than nothing where eager is the slower one
        ratio = median(a / b if b > 0 else float(a > 0) for a, b in pairs)
        rows.append((f"call overhead, {name}: {values} before, ratio", ratio, 1.0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, default=12, help="processes of each tree")
    parser.add_argument("--train", action="store_true", help="Llama under grad, in training mode")
    parser.add_argument("--one", action="store_true", help="only Llama, as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.one:
        print(json.dumps(llama(chosen.train)))
        return 0
    missed = 0
    parts: list[Callable] = [lists, entries, writes]
    if chosen.before:
        parts.append(lambda: beside(chosen.before.resolve(), chosen.rounds, chosen.train))
    for part in parts:
        for name, value, bar in part():
            missed += value > bar
            print(f"{name} {value:.3g} (at most {bar}){'' if value <= bar else '   MISSED'}", flush=True)
    if not chosen.before:
        for name, value in llama(chosen.train).items():
            print(f"Llama, {name}: {value:.1f} {'us' if name == 'prologue' else 'ms'} (--before compares)")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
