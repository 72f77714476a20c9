"""Derivatives that are one kernel of PyTorch's: those of its own file of derivatives, and those that families of
`thunder/ops` set by `gradient_of_first`. Losses and pooling, whose kernels take other arguments, are left out: their
kernels stand in their families.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import torch
import torchgen

import thunder.ops
from thunder.ops import LTORCH, backward
from thunder.ops.families import activations

SOURCE = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
_ENTRY = re.compile(r"^- name: (\w+)(?:\.\w+)?\((.*)\) -> .*$((?:\n .*)*)", re.MULTILINE)
_CONSTANTS = {"true": "True", "false": "False"}


def _kernel_call(entry: str) -> tuple[str, list[str]] | None:
    """(kernel, its arguments) where that is all that the derivative with respect to `self` is; without what PyTorch
    takes in its place for second derivatives."""
    match = re.search(
        r'^ +self: "?(?:GradMode::is_enabled\(\) \? .* : )?(\w+?_backward)(?:_symint)?\((.*)\)"?$', entry, re.M
    )
    if match is None:
        return None
    return match[1], [a.strip() for a in re.sub(r"/\*.*?\*/|\.toFloat\(\)", "", match[2]).split(",")]


def _row(name: str, declared: str, entry: str) -> str | None:
    """The gradient of the first operand of an operation as a lambda, where it is a kernel that is an operation here."""
    call, symbol = _kernel_call(entry), LTORCH.get(name)
    if call is None or symbol is None or not any(hasattr(module, call[0]) for module in (activations, backward)):
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
        + re.sub(r"[\w.]+\(?\)?", lambda m: known.get(m[0], m[0]), value).replace("/", " / ")
        for a, value in zip(getattr(torch.ops.aten, call[0]).default._schema.arguments, call[1], strict=True)
    ]
    signature = str(inspect.Signature([p.replace(annotation=p.empty) for p in ours]))[1:-1].replace("'", '"')
    return ast.unparse(ast.parse(f"lambda g, y, {signature}: {call[0]}({', '.join(arguments)})"))


def rows() -> dict[str, str]:
    """{operation: gradient} of PyTorch's file."""
    parsed = {name: _row(name, declared, entry) for name, declared, entry in _ENTRY.findall(SOURCE.read_text())}
    return {name: row for name, row in parsed.items() if row is not None}


def set_by_families() -> dict[str, str]:
    """{operation: gradient} of the calls `gradient_of_first(operation, lambda ...)` in the families."""
    rows = {}
    for path in sorted((Path(thunder.ops.__file__).parent / "families").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "gradient_of_first":
                operation, gradient = node.args
                name = operation.attr if isinstance(operation, ast.Attribute) else operation.id
                rows[name] = ast.unparse(gradient).replace("backward.", "")
    return rows
