"""Sums of which one term is not zero: `sum(where(arange(n) == t, a, 0))` along a dimension that `t` and `a` do not vary
in is `a` where 0 <= t < n, and no pass over the row.

The backward of a cross-entropy has one.
"""

from __future__ import annotations

from thunder.core.dtypes import bool8
from thunder.executors.triton_kernels.values import Value


def of_one_term(operand: Value, d: int, reduced: tuple[int, ...]) -> Value | None:
    """The sum of `operand` along dimension d, a value of the shape `reduced`; None where more than one term may
    count."""
    if operand.kind != "map" or operand.what != "where" or operand.operands[2] not in (0, 0.0):
        return None
    condition, chosen, _ = operand.operands
    tests = _conjunction(condition)
    places = [t for test in tests if (t := _compared_with_place(test, d)) is not None]
    others = [test for test in tests if _compared_with_place(test, d) is None]
    if len(places) != 1 or not all(
        _constant(v, d) for v in (*others, *places, *((chosen,) if isinstance(chosen, Value) else ()))
    ):
        return None

    def at(v: Value) -> Value:
        """What a value is in all of the dimension."""
        shape = (*v.shape[:d], 1, *v.shape[d + 1 :])
        first = Value("slice", (v,), shape, v.dtype, ((0,) * len(shape), shape, (1,) * len(shape)))
        return Value("reshape", (first,), reduced, v.dtype, (reduced,))

    def joined(name: str, *operands) -> Value:
        return Value("map", operands, reduced, bool8, name)

    place = at(places[0])
    inside = joined("logical_and", joined("ge", place, 0), joined("lt", place, operand.shape[d]))
    for test in others:
        inside = joined("logical_and", inside, at(test))
    return Value(
        "map", (inside, at(chosen) if isinstance(chosen, Value) else chosen, 0), reduced, operand.dtype, "where"
    )


def _conjunction(v: Value) -> list[Value]:
    if v.kind == "map" and v.what == "logical_and" and all(isinstance(x, Value) for x in v.operands):
        return [t for x in v.operands for t in _conjunction(x)]
    return [v]


def _compared_with_place(test: Value, d: int) -> Value | None:
    """The t of `arange == t` along a dimension."""
    if test.kind != "map" or test.what != "eq" or not all(isinstance(x, Value) for x in test.operands):
        return None
    a, b = test.operands
    return b if _is_place(a, d) else a if _is_place(b, d) else None


def _is_place(v: Value, d: int) -> bool:
    while v.kind == "broadcast":
        inner = [i for i, n in enumerate(v.what[1]) if n == d]
        if not inner or v.operands[0].shape[inner[0]] != v.shape[d]:
            return False
        v, d = v.operands[0], inner[0]
    return v.kind == "iota" and v.what == (0, 1)


def _constant(v: Value, d: int) -> bool:
    """Whether a value is the same all along a dimension."""
    if v.shape[d] == 1 or v.kind == "number":
        return True
    if v.kind in ("map", "cast"):
        return all(_constant(x, d) for x in v.operands if isinstance(x, Value))
    if v.kind == "broadcast":
        inner = [i for i, n in enumerate(v.what[1]) if n == d]
        return not inner or _constant(v.operands[0], inner[0])
    return False
