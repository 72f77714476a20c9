"""What passes are told about a trace: flow, aliases, lifetimes, costs."""

import ast
from pathlib import Path

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.analysis.aliases import alias_bases, is_view, may_view
from thunder.analysis.cost import H200, bytes_moved, estimated_time, multiply_adds, nbytes
from thunder.analysis.flow import consumers, live_ins, positions, producers, uses
from thunder.analysis.lifetimes import Occupancy, first_uses, last_uses

ROOT = Path(thunder.__file__).parent
X = torch.randn(4, 6)


def trace_of(program, *args):
    return thunder.trace()(program, *args)


def names(values):
    return [v.name for v in values]


def test_flow():
    def program(a, b):
        c = ltorch.add(a, b)
        d = ltorch.mul(c, c)
        return ltorch.sub(d, a), d

    trace = trace_of(program, X, X)
    add, mul, sub = trace.bound_symbols
    assert producers(trace) == {add.output: add, mul.output: mul, sub.output: sub}
    assert positions(trace.bound_symbols) == {add.output: 0, mul.output: 1, sub.output: 2}
    a, b = trace.args
    assert consumers(trace) == {a: [add, sub], b: [add], add.output: [mul], mul.output: [sub]}
    assert [*live_ins(trace.bound_symbols)] == [a, b]
    assert [*live_ins([sub], (mul.output, 1.0, b))] == [mul.output, a, b]
    counted = uses(trace.bound_symbols, trace.output_proxies)
    # an operation that reads a value twice uses it once, and the program's result is a use
    assert {v.name: n for v, n in counted.items()} == {
        a.name: 2, b.name: 1, add.output.name: 1, mul.output.name: 2, sub.output.name: 1,
    }  # fmt: skip
    last = last_uses(trace.bound_symbols, trace.output_proxies)
    assert last == {a: 2, b: 0, add.output: 1, mul.output: 3, sub.output: 3}
    assert last_uses(trace.bound_symbols, counts=lambda b: b is add) == {a: 0, b: 0}
    assert first_uses(trace.bound_symbols) == {a: 0, b: 0, add.output: 1, mul.output: 2}


def test_a_producer_does_not_read_what_it_makes():
    trace = trace_of(lambda a: ltorch.sin(a), X)
    sin = trace.bound_symbols[0]
    in_place = sin.replace(output=trace.args[0])
    assert producers([in_place]) == {}


def test_alias_bases():
    def program(a):
        b = ltorch.transpose(a, 0, 1)
        c = ltorch.reshape(b, (3, 8))  # a view or a copy, as the strides decide
        d = ltorch.getitem(c, 0)
        e = ltorch.sin(d)
        return ltorch.getitem(e, ltorch.arange(2))

    trace = trace_of(program, X)
    producers = {b.sym.name: b for b in trace.bound_symbols}
    (a,) = trace.args
    b, c = producers["transpose"].output, producers["reshape"].output
    d = next(line.output for line in trace.bound_symbols if line.sym is ltorch.getitem)
    sure, maybe = alias_bases(trace.bound_symbols), alias_bases(trace.bound_symbols, maybe=True)
    assert sure == {b: a, d: c} and maybe == {b: a, c: a, d: a}
    assert sure[c] is c and maybe[a] is a  # what is no view is in its own memory
    assert alias_bases(trace.bound_symbols, maybe=True, copies=[c.name]) == {b: a, d: c}
    assert is_view(producers["transpose"]) and may_view(producers["reshape"]) and not is_view(producers["reshape"])
    assert not may_view(producers["sin"]) and not may_view(trace.bound_symbols[-1])  # taken at indices


def test_the_bases_of_what_runs_are_those_of_what_was_captured():
    """Execution symbols know what the operations that they execute are."""
    compiled = thunder.jit(lambda a: a.t().reshape(24) + 1)
    compiled(X)
    captured, runs = thunder.last_traces(compiled)[0], thunder.last_traces(compiled)[-1]
    for maybe in (False, True):
        assert [
            {k.name: v.name for k, v in alias_bases(t.bound_symbols, maybe=maybe).items()} for t in (captured, runs)
        ] == 2 * [{"t0": "a", **({"t1": "a"} if maybe else {})}]


def test_occupancy():
    trace = trace_of(lambda a: ltorch.sin(a), X)
    (a,) = trace.args
    memory = Occupancy(4)
    memory.hold(a, 1, 2)
    other = memory.copied()
    other.hold(a, 2, 3)
    other.hold(a, 3, 2)  # no span
    assert nbytes(a) == 96
    assert memory.filled()[:4] == [0, 96, 96, 0] and memory.peak == 96
    assert other.filled()[:4] == [0, 96, 192, 96] and other.peak == 192


@pytest.mark.parametrize(
    "program, shapes, products",
    [
        (ltorch.matmul, [(4, 6), (6, 5)], 4 * 6 * 5),
        (ltorch.bmm, [(3, 4, 6), (3, 6, 5)], 3 * 4 * 6 * 5),
        (ltorch.linear, [(2, 4, 6), (5, 6)], 2 * 4 * 6 * 5),
        (ltorch.addmm, [(4, 5), (4, 6), (6, 5)], 4 * 6 * 5),
        (ltorch.add, [(4, 6), (4, 6)], 0),
    ],
)
def test_products_are_counted(program, shapes, products):
    (operation,) = trace_of(lambda *args: program(*args), *map(torch.empty, shapes)).bound_symbols
    assert multiply_adds(operation) == pytest.approx(products)
    tensors = [*operation.inputs, *operation.outputs]
    assert bytes_moved(operation) == sum(map(nbytes, tensors))
    assert (estimated_time(operation) > bytes_moved(operation)) is (products > 0)
    assert H200.seconds_of(operation, 0) > 0


def test_a_lookup_reads_what_it_gives():
    table, indices = torch.empty(1000, 8), torch.tensor([1, 2])
    (operation,) = trace_of(lambda i, w: ltorch.embedding(i, w), indices, table).bound_symbols
    assert bytes_moved(operation) == 2 * 8 + 2 * (2 * 8 * 4)


def _own_dictionaries(tree: ast.AST):
    """{value: ...} made of the outputs or inputs of bound symbols."""
    for node in ast.walk(tree):
        if isinstance(node, ast.DictComp) and len(node.generators) > 1:
            over = node.generators[-1].iter
            if isinstance(over, ast.Attribute) and over.attr in ("outputs", "inputs"):
                yield node.lineno


def test_the_search_finds_dictionaries():
    dictionaries = _own_dictionaries(
        ast.parse("a = {o: b for b in lines for o in b.outputs}\nc = {o: 1 for o in other}")
    )
    assert list(dictionaries) == [1]


def test_no_pass_has_producers_or_bases_of_its_own():
    dictionaries = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("transforms", "executors", "extend", "runtime", "pipeline.py", "cache", "inspect/examine.py")
        for path in sorted([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
        for number in _own_dictionaries(ast.parse(path.read_text()))
    ]
    assert not dictionaries
