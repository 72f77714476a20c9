"""Expressions over sizes: their normal form equals what they compute, and equal ones are recognised."""

import math
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder.core.symbolic import APPLICATIONS, Expression, apply, constant, symbol

NAMES = ("n", "m", "k")
VALUES = st.fixed_dictionaries({name: st.integers(1, 50) for name in NAMES})
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}

LEAVES = st.one_of(st.sampled_from(NAMES), st.integers(-4, 4))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(st.sampled_from(sorted(BINARY)), inner, inner) | st.tuples(st.just("neg"), inner),
    max_leaves=10,
)


def expression_of(tree) -> Expression:
    if isinstance(tree, str):
        return symbol(tree)
    if isinstance(tree, int):
        return constant(tree)
    name, *operands = tree
    expressions = [expression_of(t) for t in operands]
    if name in ("add", "sub", "mul"):
        return BINARY[name](*expressions)
    return apply(name, *expressions)


def value_of(tree, values):
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, int):
        return tree
    name, *operands = tree
    done = [value_of(t, values) for t in operands]
    return -done[0] if name == "neg" else BINARY[name](*done)


@settings(deadline=None, max_examples=300)
@given(TREES, VALUES)
def test_normal_form_equals_evaluation(tree, values):
    try:
        expression = expression_of(tree)
        want = value_of(tree, values)
    except ZeroDivisionError:
        return
    assert expression.evaluate(values) == want
    written = eval(str(expression), {"math": math, "max": max, "min": min, "abs": abs}, dict(values))
    assert written == want, "what is printed is what is computed"
    assert expression.symbols() <= set(NAMES)
    assert not expression.is_constant or expression.constant == want


@settings(deadline=None, max_examples=200)
@given(TREES, TREES, TREES)
def test_polynomials_are_kept_in_normal_form(a, b, c):
    try:
        x, y, z = map(expression_of, (a, b, c))
    except ZeroDivisionError:
        return
    assert x + y == y + x and x * y == y * x and (x + y) + z == x + (y + z) and (x * y) * z == x * (y * z)
    assert x * (y + z) == x * y + x * z and x - x == constant(0) and (x - y) + y == x
    assert hash(x + y) == hash(y + x) and str(x + y) == str(y + x)


@settings(deadline=None, max_examples=100)
@given(TREES, st.sampled_from(NAMES), st.integers(1, 5), VALUES)
def test_exact_division(tree, name, factor, values):
    try:
        x = expression_of(tree)
        x.evaluate(values)
    except ZeroDivisionError:
        return
    divisor = symbol(name) * constant(factor)
    product = x * divisor
    assert apply("mod", product, divisor) == constant(0)
    assert apply("floordiv", product, divisor) == x


def test_printing():
    n, m = symbol("n"), symbol("m")
    assert str(n * constant(2) + constant(1)) in ("2*n + 1", "1 + 2*n")
    assert str(constant(0)) == "0" and str(n - n) == "0" and str(constant(-3)) == "-3"
    assert eval(str(n - m), {"n": 5, "m": 3}) == 2
    assert str(apply("floordiv", n, constant(2))) == "(n // 2)"
    assert str(apply("floordiv", n + m, constant(2))) in ("((n + m) // 2)", "((m + n) // 2)")
    assert repr(n) == "n" and (n == "n") is False


ARGUMENTS = ((7, 2), (7.0, 2.0), (7.5,), (7,), (0.5,), (7.5, 2.0, 3.0))


def takes(function, arguments) -> bool:
    try:
        function(*arguments)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", sorted(APPLICATIONS))
def test_every_application_folds_constants_and_evaluates(name):
    function, _ = APPLICATIONS[name]
    arguments = next(values for values in ARGUMENTS if takes(function, values))
    assert apply(name, *map(constant, arguments)).constant == function(*arguments)
    expression = apply(name, *map(symbol, NAMES[: len(arguments)]))
    values = dict(zip(NAMES, arguments))
    assert expression.evaluate(values) == function(*arguments) == eval(str(expression), {"math": math}, values)


def test_float_arithmetic_is_not_reordered():
    """a + (b + c) and (a + b) + c differ in floating point: applications keep the order written."""
    a, b, c = symbol("a"), symbol("b"), symbol("c")
    left, right = apply("add", apply("add", a, b), c), apply("add", a, apply("add", b, c))
    values = {"a": 0.1, "b": 0.2, "c": 0.3}
    assert left != right
    assert left.evaluate(values) == (0.1 + 0.2) + 0.3 and right.evaluate(values) == 0.1 + (0.2 + 0.3)
