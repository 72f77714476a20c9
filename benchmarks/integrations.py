"""Libraries that train and serve models, with compiled modules in the place of the models: results are eager's.

    python benchmarks/integrations.py [NAME ...] [--json FILE]

needs `pip install thunder-compiler[integrations]`. Each program of integration_programs/ trains or runs a small model
twice, as it is and under `thunder.jit(model, fallback="error")`, and gives losses, weights and results. One line a
program:

    equal     whether every tensor and number is eager's: the norm of the largest difference over eager's norm <= 1e-6
    programs  how many programs were compiled
    dtypes    of tensors that these programs compute: they show that mixed precision is on

Exit status 1 where one differs or fails, compiles no program, or computes nothing in the precision that it asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import time
import warnings
from typing import Any

import torch
from foreign_cases import torchvision_operators
from integration_programs import adapters, loops, pytorch, science, transformers_, vision  # noqa: F401  they enter their programs
from integration_programs.common import PROGRAMS, Program
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder
from thunder.errors import FallbackWarning

BOUND = 1e-6  # norm-relative, float32


class Compiler:
    """Compiles models, and keeps them. elsewhere: texts of programs that other processes have compiled."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.elsewhere: list[str] = []

    def __call__(self, model: nn.Module) -> nn.Module:
        self.models.append(thunder.jit(model, fallback="error"))
        return self.models[-1]

    @property
    def programs(self) -> list[str]:
        return [str(p.forward) for m in self.models for p in m.programs] + self.elsewhere


def difference(ours: Any, expected: Any) -> float:
    """The largest norm-relative difference of tensors and numbers; infinite where structures differ."""
    a, b = (
        [torch.as_tensor(x).detach().double() for x in tree_leaves(r) if isinstance(x, (torch.Tensor, int, float))]
        for r in (ours, expected)
    )
    if [x.shape for x in a] != [x.shape for x in b] or not a:
        return float("inf")
    return max(apart(x, y) for x, y in zip(a, b, strict=True))


def apart(ours: torch.Tensor, expected: torch.Tensor) -> float:
    same = (ours == expected) | (ours.isnan() & expected.isnan())
    distances = torch.where(same, 0.0, ours - expected).norm() / torch.where(same, 0.0, expected).norm().clamp(
        min=1e-30
    )
    return 0.0 if same.all() else distances.nan_to_num(nan=torch.inf).item()


def compare(program: Program) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        expected = program.run(lambda model: model)
    except Exception as error:  # noqa: BLE001  shown in the table
        return {"equal": False, "failed": f"eager PyTorch raises {type(error).__name__}: {error}"[:600]}
    eager = time.perf_counter() - start
    compiled = Compiler()
    try:
        ours = program.run(compiled)
    except Exception as error:  # noqa: BLE001  shown in the table
        return {"equal": False, "failed": f"{type(error).__name__}: {error}"[:600]}
    texts = compiled.programs
    dtypes = {t for text in texts for t in re.findall(r'"cpu (bf16|f16|f32|f64)\[', text)}
    far = difference(ours, expected)
    row = {"equal": far <= BOUND, "difference": far, "programs": len(texts), "dtypes": sorted(dtypes)}
    if program.dtype not in dtypes:
        row |= {"equal": False, "failed": f"no compiled program computes in {program.dtype}: {row}"}
    return row | {"seconds": [eager, time.perf_counter() - start - eager]}


@contextlib.contextmanager
def quiet():
    """Without the warnings of the libraries. Where the original runs, that is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FallbackWarning)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of programs; all of them otherwise")
    parser.add_argument("--json", help="a file to which a line is added for each program")
    chosen = parser.parse_args()
    torchvision_operators.declare()
    failed = missing = 0
    names = [name for name in PROGRAMS if not chosen.names or any(part in name for part in chosen.names)]
    for name in names:
        program = PROGRAMS[name]
        if not program.is_installed:
            missing += 1
            print(f"{name:60} not run: {program.library} is not installed", flush=True)
            continue
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), quiet():
            row = compare(program)
        failed += not row["equal"]
        words = row.get("failed") or "{difference:.1e}  programs {programs}  {dtypes}".format_map(row)
        print(f"{name:60} {'equal  ' if row['equal'] else 'DIFFERS'}  {words}", flush=True)
        if chosen.json:
            with open(chosen.json, "a") as file:
                file.write(json.dumps({"program": name, **row}) + "\n")
    print(f"{len(names)} programs, {failed} differ or fail, {missing} not run")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
