"""The table of derivatives that are one kernel of PyTorch's, `thunder/ops/kernel_derivatives.py`.

python tests/kernel_derivatives.py writes it from PyTorch's own file of derivatives. Which kernels are operations here is
said in `thunder/ops/backward.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torchgen

from thunder.ops import LTORCH, backward
from thunder.ops import kernel_derivatives as table

SOURCE = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
_ENTRY = re.compile(r"^- name: (\w+)(?:\.\w+)?\((.*)\) -> .*$((?:\n .*)*)", re.MULTILINE)
_CONSTANTS = {"true": "True", "false": "False"}


def _kernel_call(entry: str) -> tuple[str, list[str]] | None:
    """(kernel, its arguments) where that is all that the derivative with respect to `self` is; without what PyTorch
    takes in its place for second derivatives."""
    found = re.search(
        r'^ +self: "?(?:GradMode::is_enabled\(\) \? .* : )?(\w+?_backward)(?:_symint)?\((.*)\)"?$', entry, re.M
    )
    if found is None:
        return None
    return found[1], [a.strip() for a in re.sub(r"/\*.*?\*/|\.toFloat\(\)", "", found[2]).split(",")]


def _row(name: str, declared: str, entry: str) -> str | None:
    call, symbol = _kernel_call(entry), LTORCH.get(name)
    if call is None or symbol is None or not hasattr(backward, call[0]):
        return None
    ours = [
        p for p in inspect.signature(symbol.decomposition or symbol.meta).parameters.values() if p.name != "inplace"
    ]
    places = [p.name for p in ours if p.kind is not p.KEYWORD_ONLY]
    theirs = [a.strip().rpartition(" ")[2] for a in declared.split(", *,")[0].split(",")]
    known = {"grad": "g", "result": "y", **_CONSTANTS, "self.sym_sizes()": f"{places[0]}.shape"}
    known |= {a.partition("=")[0]: places[i] if i < len(places) else a.partition("=")[2] for i, a in enumerate(theirs)}
    known |= {p.name: p.name for p in ours if p.kind is p.KEYWORD_ONLY}
    arguments = [
        (f"{a.name}=" if a.kwarg_only else "")
        + re.sub(r"[\w.]+\(?\)?", lambda m: known.get(m[0], m[0]), given).replace("/", " / ")
        for a, given in zip(getattr(torch.ops.aten, call[0]).default._schema.arguments, call[1], strict=True)
    ]
    signature = str(inspect.Signature([p.replace(annotation=p.empty) for p in ours]))[1:-1].replace("'", '"')
    return f'    "{name}": lambda g, y, {signature}: backward.{call[0]}({", ".join(arguments)}),'


def rows() -> Iterator[str]:
    for name, declared, entry in _ENTRY.findall(SOURCE.read_text()):
        if (row := _row(name, declared, entry)) is not None:
            yield row


def text() -> str:
    before, after = Path(table.__file__).read_text().split("ROWS = {\n")
    return f"{before}ROWS = {{\n" + "\n".join(sorted(set(rows()))) + "\n}" + after.partition("\n}")[2]


if __name__ == "__main__":
    Path(table.__file__).write_text(text())
