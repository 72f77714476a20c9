"""One meaning for each function of PyTorch's, one place for each fact about an operation."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import thunder
from thunder.core.definition import Definition
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceInfo
from thunder.ops import LTORCH, PRIMS
from thunder.ops.define import alias, composite, lookup

SOURCES = sorted(Path(thunder.__file__).parent.rglob("*.py"))


def test_a_function_has_one_meaning():
    before = lookup(torch.sin)
    with pytest.raises(ValueError, match="sin is the operation .*ltorch.sin.* already"):
        alias(torch.sin)(lambda a: a)
    with pytest.raises(ValueError, match="sin is the operation .*ltorch.sin.* already"):
        alias(torch.sin, over=LTORCH["cos"])(lambda a: a)
    assert lookup(torch.sin) is before
    with pytest.raises(AssertionError, match="sin is defined twice"):
        composite(name="sin")(lambda a: a)


def test_facts_have_no_names_but_those_of_fields():
    symbol = Symbol("fresh")
    assert {f.name for f in dataclasses.fields(Definition)} <= set(dir(symbol))
    for made in (symbol, LTORCH["relu"], PRIMS["sin"]):
        with pytest.raises(AttributeError):
            made.elmentwise = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        TraceInfo().parameters = {}


def test_no_facts_stand_under_string_keys():
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            value = node.value if isinstance(node, ast.Subscript) else None
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "setdefault")
            ):
                value = node.func.value
            if isinstance(value, ast.Attribute) and value.attr in ("info", "tables"):
                found.append(f"{path.name}:{node.lineno}")
    assert not found
