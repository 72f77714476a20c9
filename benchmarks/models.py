"""Does every model of the list run, does it compute what PyTorch computes, and how long do the first and a warm call
take?

    python benchmarks/models.py [--only NAME ...] [--systems eager,thunder] [--rounds 30] [--train [--calls] [--device
    cuda]] [--json FILE]

Forward under torch.no_grad() in float32, on the CPU; the models and their inputs are those of model_zoo.py. One line a
model: ok or the error, the deviation from eager (the largest absolute difference over all tensors in the output), the
number of operations that were taken as opaque, seconds of the first call and microseconds of a warm one beside eager
(median of interleaved rounds). The exit status is 1 when a model fails: an error, an opaque operation, a second call
that compiles again, an output of another structure, or a deviation above 1e-5 of the largest value.

With --train: forward and backward of the modules in train mode (training.py). One line a model: how many gradients of
parameters and floating inputs are eager's bit for bit and the largest deviation (norm of the difference by the norm),
bytes saved for the backward, ATen calls of forward and backward, and microseconds that a warm step computes for, on one
thread, with the 95 % interval of the paired ratios to eager. A model fails where a gradient deviates by more than 1e-5,
where more is saved or called than by eager, or where the ratio's interval goes above 1.02. --calls prints the
operations that are called more or less often than by eager.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from model_zoo import MODELS, named_tensors
from training import TrainingRow, measure_training

from thunder.tests.measuring import compile_with, interleaved, median, parse_systems

TOLERANCE = 1e-5


def deviation(ours: Any, reference: Any) -> tuple[float, float]:
    """The largest absolute difference, and the largest absolute value of the reference. Raises ValueError where the
    outputs differ in kind."""
    if type(ours) is not type(reference):
        raise ValueError(f"the output is a {type(ours).__name__}, eager's is a {type(reference).__name__}")
    results, expected = dict(named_tensors(ours)), dict(named_tensors(reference))
    if list(results) != list(expected):
        raise ValueError(f"the output holds the tensors {list(results)}, eager's holds {list(expected)}")
    worst = largest = 0.0
    for path, want in expected.items():
        got = results[path]
        if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
            raise ValueError(
                f"{path or 'the output'} is {got.dtype} {tuple(got.shape)}, eager's is {want.dtype} {tuple(want.shape)}"
            )
        got, want = got.double(), want.double()
        same = (got == want) | (got.isnan() & want.isnan())  # infinities and NaN at the same place are no difference
        worst = max([worst, *torch.where(same, 0.0, (got - want).abs()).nan_to_num(nan=torch.inf).flatten().tolist()])
        largest = max([largest, *want[want.isfinite()].abs().flatten().tolist()])
    return worst, largest


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found out about one model."""

    name: str
    problems: tuple[str, ...]
    first: dict[str, float]  # seconds, by system
    warm: dict[str, float]  # seconds, by system
    deviation: dict[str, float]
    opaque: frozenset[str] = frozenset()

    def line(self) -> str:
        parts = [f"{'FAILS' if self.problems else 'ok':5}  {self.name:24}"]
        for system in self.first:
            if system != "eager":
                parts += (
                    [f"deviation {self.deviation[system]:<8.2g}", f"opaque {len(self.opaque)}"]
                    if system == "thunder"
                    else [f"deviation {self.deviation[system]:<8.2g}"]
                )
            warm = f"  warm {self.warm[system] * 1e6:7.0f} us" if system in self.warm else ""
            ratio = (
                f" ({self.warm[system] / self.warm['eager']:.2f} of eager)"
                if system != "eager" and "eager" in self.warm and warm
                else ""
            )
            parts.append(f"{system}: first {self.first[system]:6.3f} s{warm}{ratio}")
        return "  ".join(parts) + "".join(f"\n       {problem}" for problem in self.problems)


def measure(name: str, systems: list[str], rounds: int) -> Row:
    """Builds the model, runs it under each system and compares with eager."""
    module, args, kwargs = MODELS[name]()
    problems, calls, first, deviations, opaque = [], {}, {}, {}, frozenset()
    with torch.no_grad():
        start = time.perf_counter()
        reference = module(*args, **kwargs)
        eager_first = time.perf_counter() - start
        for system in systems:
            compiled = compile_with(system, module)
            start = time.perf_counter()
            output = compiled(*args, **kwargs)
            first[system] = eager_first if system == "eager" else time.perf_counter() - start
            deviations[system], largest = deviation(output, reference)
            again, _ = deviation(compiled(*args, **kwargs), reference)
            if max(deviations[system], again) > TOLERANCE * max(largest, 1.0):
                problems.append(
                    f"{system}: deviates by {deviations[system]:.3g} in the first call and {again:.3g} in the "
                    f"second, values go up to {largest:.3g}"
                )
            if system == "thunder":
                opaque, results = thunder_problems(compiled)
                problems += results
            calls[system] = lambda compiled=compiled: compiled(*args, **kwargs)
        samples = interleaved(calls, rounds)
    return Row(
        name,
        tuple(problems),
        first,
        {system: median(values) for system, values in samples.items() if values},
        deviations,
        opaque,
    )


def thunder_problems(compiled: Any) -> tuple[frozenset[str], list[str]]:
    """The opaque operations of a compiled module, and what is wrong with it after two calls with the same arguments."""
    import thunder

    opaque = frozenset(thunder.get_auto_registered_torch_op_names(compiled))
    problems = [f"opaque: {name}" for name in sorted(opaque)]
    if thunder.cache_misses(compiled) != 1:
        problems.append(f"compiled again for the same arguments: {thunder.last_recompile_reasons(compiled)}")
    return opaque, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[""], help=f"parts of names; known: {', '.join(MODELS)}"
    )
    parser.add_argument("--systems", type=parse_systems, default=["eager", "thunder"])
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds for the warm calls")
    parser.add_argument("--train", action="store_true", help="forward and backward instead of forward")
    parser.add_argument("--calls", action="store_true", help="with --train: print how ATen calls differ from eager's")
    parser.add_argument("--device", default="cpu", help="with --train: where the models are trained")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    chosen = parser.parse_args()
    names = [name for name in MODELS if any(part.lower() in name.lower() for part in chosen.only)]
    if not names:
        parser.error(f"no model's name contains {' or '.join(chosen.only)}; known: {', '.join(MODELS)}")
    if chosen.train:
        torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, transformers {_version('transformers')}, litgpt {_version('litgpt')}, "
        f"{torch.get_num_threads()} threads",
        flush=True,
    )
    rows = []
    for name in names:
        try:
            row = (
                measure_training(name, MODELS[name], named_tensors, chosen.rounds, chosen.device)
                if chosen.train
                else measure(name, chosen.systems, chosen.rounds)
            )
        except Exception as error:  # noqa: BLE001  an error of whatever kind is this program's finding
            message = f"{type(error).__name__}: " + "\n       ".join(str(error).splitlines()[:6])
            row = TrainingRow(name, (message,)) if chosen.train else Row(name, (message,), {}, {}, {})
        rows.append(row)
        print(row.line(), flush=True)
        if chosen.calls and isinstance(row, TrainingRow) and row.difference:
            print("       " + ", ".join(f"{op} {n:+}" for op, n in row.difference.items()), flush=True)
    if chosen.json:
        Path(chosen.json).write_text(
            json.dumps([dataclasses.asdict(row) for row in rows], indent=1, default=sorted) + "\n"
        )
    failed = sum(bool(row.problems) for row in rows)
    print(f"{len(names) - failed} of {len(names)} models run" + (f", {failed} fail" if failed else ""))
    return int(failed > 0)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
