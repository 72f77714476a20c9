"""The kernel IR: what operations are lowered to, its printer, its verifier, and its rewrite rules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import thunder
from thunder.core.dtypes import bool8, float32, float64, int32, int64
from thunder.core.regions import Region
from thunder.kernels import ir, lower, rules
from thunder.kernels.index import Index
from thunder.kernels.ir import Buffer, Graph, Program, Store, axis


def region_of(f, *args) -> Region:
    """All operations of a function as one region."""
    compiled = thunder.jit(f)
    compiled(*args)
    trace = thunder.last_traces(compiled)[0]
    operations = [b for b in trace.bound_symbols if b.outputs]
    assert all(lower.lowers(b, lambda b: True) for b in operations)
    return Region(operations, set(trace.output_proxies))


def text_of(f, *args) -> str:
    program = lower.lowered(region_of(f, *args))
    ir.verify(program)
    return str(program)


def test_views_are_indices():
    text = text_of(lambda x: x.t()[1:].reshape(-1) * 2, torch.randn(4, 3))
    assert text == (
        "    v0: float32 = load input0[d0 % 4, d0 // 4 + 1]\n"
        "    v1: float32 = 2.0\n"
        "    v2: float32 = mul(v0, v1)\n"
        "store output0[d0:8] = v2"
    )


def test_reductions_bind_axes_and_equal_nodes_are_one():
    text = text_of(lambda x: torch.softmax(x, -1), torch.randn(4, 3))
    assert text == (
        "    v0: float32 = load input0[d0, d1]\n"
        "    v1: float32 = load input0[d0, r1_0]\n"
        "    v2: float32 = amax over r1_0:3 of v1\n"
        "    v3: float32 = sub(v0, v2)\n"
        "    v4: float32 = exp(v3)\n"
        "    v5: float32 = load input0[d0, r2_0]\n"
        "    v6: float32 = sub(v5, v2)\n"
        "    v7: float32 = exp(v6)\n"
        "    v8: float32 = sum over r2_0:3 of v7\n"
        "    v9: float32 = true_divide(v4, v8)\n"
        "store output0[d0:4, d1:3] = v9"
    )


def test_a_scan_is_written_to_memory_where_the_target_wants_that():
    region = region_of(lambda x: (x * 2).cumsum(1), torch.randn(2, 3))
    program = lower.lowered(region, stores_scans=True)
    ir.verify(program)
    assert str(program) == (
        "    v0: float32 = load input0[d0, d1]\n"
        "    v1: float32 = 2.0\n"
        "    v2: float32 = mul(v0, v1)\n"
        "store output0[d0:2, d1:3] = sum along d1 of v2"
    )


def test_a_concatenation_has_pieces_with_ranges():
    text = text_of(lambda x: F.pad(torch.cat([x, -x], 1), (0, 2)), torch.randn(2, 3))
    assert text == (
        "    v0: float32 = load input0[d0, d1]\n"
        "    v1: float32 = load input0[d0, (d1 + -3)]\n"
        "    v2: float32 = neg(v1)\n"
        "    v3: float32 = concat at d1 of 0..3: v0, 3..6: v2\n"
        "    v4: float32 = 0.0\n"
        "    v5: float32 = concat at d1 of 0..6: v3, 6..8: v4\n"
        "store output0[d0:2, d1:8] = v5"
    )


def test_half_precision_is_rounded_where_the_program_converts_and_where_it_is_stored():
    x = torch.randn(4).bfloat16()
    assert text_of(lambda x: x * 3 + 1, x).count("bfloat16") == 2  # the load and the store
    assert text_of(lambda x: (x.float() * 3).bfloat16() + 1, x).count("bfloat16") == 3  # and the conversion


def node(graph: Graph, op: str, *args, kind=float32, what=None):
    return graph.make(op, args, kind, what)


@pytest.mark.parametrize(
    "build, text",
    [
        (lambda g, x: node(g, "add", x, x, kind=float64), "it is of"),
        (lambda g, x: node(g, "sideways", x), "no such function"),
        (lambda g, x: node(g, "reduce", x, what=("median", (axis("d", 0, 4),))), "no such combination"),
        (lambda g, x: node(g, "reduce", x, what=("sum", ())), "it reduces nothing"),
        (lambda g, x: node(g, "concat", x, x, what=(Index.of(axis("d", 0, 4)), (0, 1), 3)), "outside of the pieces"),
        (lambda g, x: node(g, "load", what=(x.what[0], (x.what[1][0] + 1,), ())), "outside of the buffer"),
        (
            lambda g, x: node(g, "load", what=(Buffer("scratch", 0, (4,), float32), x.what[1], ())),
            "nothing has written",
        ),
        (lambda g, x: node(g, "bitwise_and", x, x), "not for"),
    ],
)
def test_the_verifier(build, text):
    graph, d0 = Graph(), axis("d", 0, 4)
    buffer = Buffer("input", 0, (4,), float32)
    x = node(graph, "load", what=(buffer, (Index.of(d0),), ()))
    ir.verify(Program(graph, [buffer], [Store(Buffer("output", 0, (4,), float32), (d0,), x)]))
    wrong = build(graph, x)
    store = Store(Buffer("output", 0, (4,), wrong.dtype), (d0,), wrong)
    with pytest.raises(ir.Invalid, match=text):
        ir.verify(Program(graph, [buffer], [store]))


def test_a_store_has_all_axes_of_its_value():
    graph, d0, d1 = Graph(), axis("d", 0, 4), axis("d", 1, 5)
    buffer = Buffer("input", 0, (5,), float32)
    x = node(graph, "load", what=(buffer, (Index.of(d1),), ()))
    with pytest.raises(ir.Invalid, match="depends on axes"):
        ir.verify(Program(graph, [buffer], [Store(Buffer("output", 0, (4,), float32), (d0,), x)]))


# ------------------------------------------------------------------------------------------------ rules


def rewritten(build, kind=float32) -> str:
    """The text of what a node of `x` and `y` becomes."""
    graph, d0 = Graph(rules.rewrite), axis("d", 0, 4)
    loads = [graph.make("load", (), kind, (Buffer("input", i, (4,), kind), (Index.of(d0),), ())) for i in (0, 1)]

    def constant(value, kind=kind):
        return graph.make("constant", (), kind, value)

    root = build(graph, constant, *loads)
    numbers = {loads[0]: "x", loads[1]: "y"}
    for n in ir.in_order([root]):
        numbers.setdefault(n, repr(n.what) if n.op == "constant" else f"({ir.line(n, numbers)})")
    return numbers[root]


@pytest.mark.parametrize(
    "build, text",
    [
        (lambda g, c, x, y: node(g, "mul", x, c(1.0)), "x"),
        (lambda g, c, x, y: node(g, "sub", x, c(0.0)), "x"),
        (lambda g, c, x, y: node(g, "sub", x, c(-0.0)), "(sub(x, -0.0))"),  # of -0.0 it is 0.0
        (lambda g, c, x, y: node(g, "add", x, c(0.0)), "(add(x, 0.0))"),  # of -0.0 it is 0.0
        (lambda g, c, x, y: node(g, "mul", x, c(0.0)), "(mul(x, 0.0))"),  # of nan it is nan
        (lambda g, c, x, y: node(g, "neg", node(g, "neg", x)), "x"),
        (lambda g, c, x, y: node(g, "pow", x, c(0.0)), "1.0"),
        (lambda g, c, x, y: node(g, "pow", x, c(2.0)), "(mul(x, x))"),
        (lambda g, c, x, y: node(g, "pow", x, c(1.5)), "(pow(x, 1.5))"),
        (lambda g, c, x, y: node(g, "true_divide", x, c(4.0)), "(mul(x, 0.25))"),
        (lambda g, c, x, y: node(g, "true_divide", x, c(3.0)), "(true_divide(x, 3.0))"),
        (lambda g, c, x, y: node(g, "mul", node(g, "add", c(1.0), c(2.0)), x), "(mul(3.0, x))"),
        (lambda g, c, x, y: node(g, "where", node(g, "lt", c(1.0), c(2.0), kind=bool8), x, y), "x"),
        (lambda g, c, x, y: node(g, "where", node(g, "lt", x, y, kind=bool8), x, x), "x"),
        (lambda g, c, x, y: node(g, "cast", node(g, "cast", x, kind=float64)), "x"),
        (lambda g, c, x, y: node(g, "maximum", x, x), "x"),
        (lambda g, c, x, y: node(g, "reduce", c(2.0), what=("sum", (axis("r", (1, 0), 8),))), "16.0"),
        (lambda g, c, x, y: node(g, "reduce", x, what=("amax", (axis("r", (1, 0), 8),))), "x"),
        (lambda g, c, x, y: node(g, "concat", x, y, what=(Index.of(axis("d", 0, 4)), (0, 4), 9)), "x"),
    ],
)
def test_rules(build, text):
    assert rewritten(build) == text


def test_a_cast_that_rounds_stays():
    assert rewritten(lambda g, c, x, y: g.make("cast", (node(g, "cast", x),), float64, None), float64) != "x"
    assert rewritten(lambda g, c, x, y: g.make("cast", (node(g, "cast", x, kind=int32),), int64, None), int64) != "x"


@given(st.lists(st.sampled_from(["neg", "abs", "mul", "add", "sub", "pow", "cast"]), max_size=8), st.randoms())
@settings(max_examples=40, deadline=None)
def test_rules_keep_programs_valid(ops, draw):
    graph, d0 = Graph(rules.rewrite), axis("d", 0, 4)
    buffer = Buffer("input", 0, (4,), float32)
    value = graph.make("load", (), float32, (buffer, (Index.of(d0),), ()))
    for op in ops:
        number = graph.make("constant", (), float32, draw.choice([0.0, -0.0, 1.0, 2.0, math.inf, math.nan]))
        if op == "cast":
            other = graph.make("cast", (value,), draw.choice([float64, bool8]))
            value = graph.make("cast", (other,), float32)
        else:
            value = graph.make(op, (value,) if op in ("neg", "abs") else (value, number), float32)
        ir.verify(Program(graph, [buffer], [Store(Buffer("output", 0, (4,), float32), (d0,), value)]))
