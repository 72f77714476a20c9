"""One meaning for each function of PyTorch's, one place for each fact about an operation."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core.definition import Definition
from thunder.core.rule_table import Property, RuleTable
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceBuilder, TraceInfo, tracectx
from thunder.ops import LTORCH, PRIMS
from thunder.ops.registry import alias, composite, lookup

ROOT = Path(thunder.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


def test_a_function_has_one_meaning():
    before = lookup(torch.sin)
    with pytest.raises(ValueError, match="sin is the operation .*ltorch.sin.* already"):
        alias(torch.sin)(lambda a: a)
    with pytest.raises(ValueError, match="sin is the operation .*ltorch.sin.* already"):
        alias(torch.sin, over=LTORCH["cos"])(lambda a: a)
    assert lookup(torch.sin) is before
    with pytest.raises(AssertionError, match="sin is defined twice"):
        composite(name="sin")(lambda a: a)


def test_a_function_of_the_users_is_the_operation_that_is_defined_for_it():
    def shifted(x):
        return torch.sin(x) + 1

    @alias(shifted)
    def meaning(x):
        return LTORCH["add"](1, LTORCH["sin"](x))

    assert lookup(shifted) is meaning
    compiled, x = thunder.jit(lambda x: shifted(x), fallback="error"), torch.ones(2)
    torch.testing.assert_close(compiled(x), shifted(x))
    assert "ltorch.add(1, " in thunder.last_traces(compiled)[0].python()


def test_rows_of_a_table_belong_to_the_operation_and_to_its_executed_forms():
    table: RuleTable[int] = RuleTable(0)
    heavy = Property()
    symbol, other = Symbol("fresh"), Symbol("other")
    table.set(3, symbol)
    heavy.add(symbol, when=lambda operation: operation.args[0] > 2)
    heavy.add(other)
    assert (table.of(symbol), table.of(other)) == (3, 0)
    executed = symbol.executed("fresh_here", max, None, id="here.fresh")
    assert table.of(executed) == 3
    table.set(4, executed)
    assert (table.of(symbol), table.of(executed)) == (3, 4)
    assert [heavy.holds(s.bind(n, output=None)) for s in (symbol, executed, other) for n in (2, 3)] == [
        False, True, False, True, True, True,
    ]  # fmt: skip
    assert not heavy.holds(Symbol("third").bind(3, output=None))

    @table(other)
    def rule():
        pass

    assert table.of(other) is rule


def test_facts_have_no_names_but_those_of_fields():
    symbol = Symbol("fresh")
    assert {f.name for f in dataclasses.fields(Definition)} <= set(dir(symbol))
    for each_symbol in (symbol, LTORCH["relu"], PRIMS["sin"]):
        with pytest.raises(AttributeError):
            each_symbol.elmentwise = True
    with pytest.raises(dataclasses.FrozenInstanceError):
        TraceInfo().parameters = {}


def test_no_facts_stand_under_string_keys():
    names = []
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
                names.append(f"{path.name}:{node.lineno}")
    assert not names


OPERATIONS = {name for table in (LTORCH, PRIMS) for name, s in table.items() if isinstance(s, Symbol)}
REDUCTIONS = {"mean", "sum"}  # how a loss is reduced, as PyTorch's functions are told


def _names_operation(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    name = node.value.removeprefix("torch.")
    return name.removeprefix("ltorch.").removeprefix("prims.") in OPERATIONS


def _lists_of_operations(tree: ast.AST):
    """Lists of names of operations, and comparisons of an operation's name with one: (line, text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.List | ast.Tuple):
            names = [x.value for x in node.elts if _names_operation(x)]
            if len(names) > 1 and not REDUCTIONS.issuperset(names):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Dict):
            if sum(map(_names_operation, filter(None, node.keys))) > 1:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Compare):
            attributes = [x.attr for x in (node.left, *node.comparators) if isinstance(x, ast.Attribute)]
            if {"name", "id"} & {*attributes} and any(map(_names_operation, (node.left, *node.comparators))):
                yield node.lineno, ast.unparse(node)


def test_the_search_finds_lists():
    operations = list(
        _lists_of_operations(ast.parse("A = {'sin', 'cos'}\nif line.sym.name == 'relu': pass\nB = ('mean', 'sum')"))
    )
    assert [number for number, _ in operations] == [1, 2]


def test_no_lists_of_operations_outside_of_their_families():
    """What a pass asks about an operation is a row in its table, or a field of `Definition`; the fuser's kernels have a table of functions."""
    operations = [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for folder in ("transforms", "executors", "extend", "distributed")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.name != "triton_kernels"
        for number, text in _lists_of_operations(ast.parse(path.read_text()))
    ]
    assert not operations, "\n".join(operations)


WALKED = "relu sum index_put scaled_dot_product_attention batch_norm dropout cholesky add_".split()


def _mentioned(tree: ast.AST) -> set[str]:
    """The operations that a source looks up, or compares with the names of, or lists."""
    refused = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("LTORCH", "PRIMS", "ltorch", "prims"):
            if isinstance(node.slice, ast.Constant):
                refused.add(node.slice.value)
        if isinstance(node, ast.Attribute) and node.attr in WALKED and ast.unparse(node.value) in ("ltorch", "prims"):
            refused.add(node.attr)
    texts = [text for _, text in _lists_of_operations(tree)]
    return refused | {n for n in WALKED if any(f"'{n}'" in text or f".{n}'" in text for text in texts)}


def test_walks():
    """Which files mention an operation outside of its family and of the fuser's table."""
    walked: dict = {name: [] for name in WALKED}
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        if relative.parts[0] in ("ops", "interpreter", "tests", "kernels") or "triton_kernels" in relative.parts:
            continue
        if relative.name == "thin_products.py":  # of the fusers
            continue
        mentioned = _mentioned(ast.parse(path.read_text()))
        for name in WALKED:
            if name in mentioned:
                walked[name].append(str(relative))
    for name, files in walked.items():
        print(f"{name}: {len(files)} {' '.join(files)}")
    assert not any(walked.values())


def test_names_of_torch_that_are_no_operations_of_thunder_are_recorded():
    """`thunder.torch` has PyTorch's functions and methods, in-place forms among them, by name."""

    def f(x):
        y = ltorch.clone(x)
        ltorch.add_(y, 2.0)
        return ltorch.softsign(y) + ltorch.tanhshrink(x) * ltorch.numel(x) + ltorch.type_as(x, y).relu()

    x = torch.randn(3, 4)
    y = x + 2.0
    want = torch.nn.functional.softsign(y) + torch.nn.functional.tanhshrink(x) * 12 + x.relu()
    assert torch.equal(f(x), want) and torch.equal(thunder.jit(f, fallback="error")(x), want)
    builder = TraceBuilder(thunder.trace()(lambda x: x * 1, x))
    with tracectx(builder):
        builder.output = ltorch.softsign(ltorch.type_as(builder.args[0], builder.args[0]))
    assert torch.equal(builder.python_callable()(x), torch.nn.functional.softsign(x))
    with pytest.raises(AttributeError, match="no operation 'softsing'"):
        ltorch.softsing
