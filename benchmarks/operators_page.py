"""Writes docs/operators.md: every operator of PyTorch's database and every operation of ours, and how it is supported.

    python benchmarks/operators_page.py [--check]

An operator's first samples are captured by thunder.jit, as `op_coverage.py` does; what stands in the trace says how it
is supported. --check: compare with the page that is there, and exit with status 1 where it is out of date.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
from torch.testing._internal.common_methods_invocations import op_db

if __name__ == "__main__":  # the folder above holds the package `benchmarks`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tests.ops.samples  # noqa: F401
import thunder
from benchmarks.op_coverage import DTYPES, KINDS, REFUSALS, kind_of, outcome, program_of, samples, settings
from thunder.core.symbol import OpTags, Symbol
from thunder.errors import CaptureError
from thunder.ops import LTORCH, opaque
from thunder.ops.rules import derivatives

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operators.md"
HEAD = """# Operators

This page is made by `python benchmarks/operators_page.py` with torch {version}; a test checks that it is current.
`python benchmarks/op_coverage.py` compares each operator of PyTorch's database with eager, in every form and type.

* **support**: *own rule*: typed here, computed by PyTorch in one piece. *decomposition*: also written in terms of other
operations, which fusion and transforms can look into.
  *by example*: an operation of ours that PyTorch types, on tensors without memory. *opaque*: PyTorch types it and
  computes it.
* **derivative**: *rule*: written here. *decomposition*: that of the operations it consists of. *PyTorch's*: its
autograd graph is kept. *none*: PyTorch has none. * **in place**: the method that overwrites its argument.

What takes sparse or quantized tensors alone is opaque and has no line here: `to_sparse`, `coalesce`, `values`,
`indices`, `crow_indices` and its kin with their copies, `sparse_mask`, `smm`, `sspaddmm`, `saddmm`, `hspmm`, `hsmm`,
`native_norm`, `int_repr`. A trace knows a tensor by shape, type and device, which does not say how such a tensor is
stored: PyTorch types these on examples. Questions (`is_sparse`, `dense_dim`, `is_same_size`, `stride`, `is_inference`)
are answered during capture, and are no lines of it.

{entries} operators of the database: {counts}.

| operator | recorded as | support | derivative | in place | types tried |
|---|---|---|---|---|---|
"""
SHORT = {"float32": "f32", "int64": "i64", "bool": "bool", "complex64": "c64", "bfloat16": "bf16"}


def derivative_of(symbol: Symbol) -> str:
    if OpTags.DETACHED in symbol.tags:
        return "none"
    if symbol.grad_rule is not None:
        return "rule"
    by_parts = derivatives.composed.of(symbol) or derivatives.formula.of(symbol) or symbol.fn is None
    return "decomposition" if by_parts else "PyTorch's"


def _captured(info) -> list[Symbol] | str:
    """What one of the first samples is recorded as; the reason where none can be captured."""
    reason = "PyTorch takes none of the samples tried"
    for dtype in (d for d in DTYPES.values() if d in info.supported_dtypes("cpu")):
        for sample in itertools.islice(samples(info, dtype, False, None), 6):
            program = program_of(info.op, (sample.input, *sample.args), dict(sample.kwargs))
            if outcome(program.run, program.tensors).error is not None:
                continue
            compiled = thunder.jit(program.run, fallback="error")
            try:
                compiled(*program.tensors)
            except CaptureError as error:
                reason = str(error).split("\n")[0].removeprefix("cannot capture this program: ")
                continue
            except REFUSALS:
                continue
            lines = thunder.compile_stats(compiled).last_entry.captured.computation.bound_symbols
            if lines:
                return list(dict.fromkeys(line.sym for line in lines))
            reason = "its result is known during capture"
    return reason


def _row(*columns: str) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in columns) + " |\n"


def _of_database() -> tuple[list[str], list[str], set[str]]:
    """(rows, support of each, names of the operations that stand in them)."""
    rows, kinds, seen = [], [], set()
    for info in sorted(op_db, key=lambda i: i.formatted_name):
        results = _captured(info)
        tried = " ".join(SHORT[n] for n, d in DTYPES.items() if d in info.supported_dtypes("cpu"))
        in_place = (
            getattr(info.inplace_variant, "__name__", "<lambda>").replace("<lambda>", "inplace=True")
            if info.inplace_variant is not None
            else "-"
        )
        if isinstance(results, str):
            rows.append(_row(info.formatted_name, "-", results, "-", in_place, tried))
            kinds.append("nothing recorded" if "known while" in results else "refused")
            continue
        seen |= {s.name for s in results}
        support = {kind_of(s) for s in results}
        kind = next(k for k in KINDS if k in support)
        derivatives = dict.fromkeys(d for d in map(derivative_of, results) if d != "none")
        derivative = ", ".join(derivatives) if info.supports_autograd and derivatives else "none"
        names = [s.name for s in results]
        rows.append(
            _row(
                info.formatted_name,
                ", ".join(names[:4]) + (" ..." if len(names) > 4 else ""),
                kind,
                derivative,
                in_place,
                tried,
            )
        )
        kinds.append(kind)
    return rows, kinds, seen


def page() -> str:
    with settings():
        rows, kinds, seen = _of_database()
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
    others = [s for n, s in sorted(LTORCH.items()) if n not in seen and not opaque.is_opaque(s)]
    rows += [
        _row(
            s.name,
            s.name,
            kind_of(s),
            derivative_of(s),
            getattr(s.in_place and s.in_place.function, "__name__", "-"),
            "own samples" if s.sampler else "-",
        )
        for s in others
    ]
    return HEAD.format(version=torch.__version__.split("+")[0], entries=len(op_db), counts=counts) + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
