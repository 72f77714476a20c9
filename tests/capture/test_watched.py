"""Values from outside that hold others, or whose state native code keeps: their parts are asked, or the program is
refused. None is frozen as it was at capture."""

from __future__ import annotations

import ctypes
import fractions
import re
import sys
import types

import numpy
import optree
import pytest
import torch

import thunder
from thunder.capture.policy import is_constant


class Box:
    def __init__(self, value: int):
        self.value = value


class Grid(numpy.ndarray):
    pass


def first(x, values):
    for key in values:
        x = x + key[0].value
    return x


def first_box(values) -> Box:
    return next(iter(values))[0]


X = torch.zeros(1)
# program, state, the box in it
HOLDING = {
    "set": (first, lambda: {(Box(1), 1)}, first_box),
    "frozenset": (first, lambda: frozenset({(Box(1), 1)}), first_box),
    "keys of a dict": (first, lambda: {(Box(1), 1): 2}, first_box),
    "array of objects": (lambda x, a: x + a[1].value, lambda: numpy.array([Box(1), Box(2)]), lambda a: a[1]),
    "slice": (lambda x, s: x + s.start.value, lambda: slice(Box(1), None), lambda s: s.start),
}


@pytest.mark.parametrize("name", HOLDING)
def test_objects_in_values_are_asked(name):
    program, make, box_of = HOLDING[name]
    compiled, state = thunder.jit(program), make()
    for value in (1, 2, 2):
        box_of(state).value = value
        assert torch.equal(compiled(X, state), program(X, state))
    assert thunder.cache_misses(compiled) == 2


def test_writes_to_objects_in_tuples_of_a_set_are_effects():
    def program(x, values):
        for key in values:
            key[0].value += 1
        return x

    compiled, state = thunder.jit(program), {(Box(1), 1)}
    for _ in range(3):
        compiled(X, state)
    assert first_box(state).value == 4


def test_lists_of_library_modules_are_asked(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["a"])
    compiled = thunder.jit(lambda x: x + len(sys.argv) + ("a_module_that_comes" in sys.modules))
    assert compiled(X).item() == 1
    sys.argv.append("b")
    monkeypatch.setitem(sys.modules, "a_module_that_comes", sys)
    assert compiled(X).item() == 3


def test_subclasses_of_arrays_are_asked_for_their_content():
    compiled, values = thunder.jit(lambda x, a: x + float(a[0, 0])), numpy.zeros((1, 2)).view(Grid)
    assert compiled(X, values).item() == 0
    values[0, 0] = 3
    assert compiled(X, values).item() == 3


LOOKS = [lambda o: o[0], sum, len, lambda o: 2 in o, lambda o: list(o)[0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: (ctypes.c_int * 3)(1, 2, 3),
        lambda: torch.tensor([1, 2, 3]).untyped_storage(),
        lambda: memoryview(bytearray(b"abc")),
    ],
)
@pytest.mark.parametrize("look", LOOKS)
def test_state_of_native_code_is_looked_at_in_each_call(make, look):
    compiled, o = thunder.jit(lambda x, o: x + look(o)), make()
    for first in (1, 5, 2):
        o[0] = first
        assert compiled(X, o).item() == (X + look(o)).item()
    assert len(compiled.programs) <= 2  # the element 2 is there or not


def one(a):
    return a


def two(a, b):
    return a, b


TREES = [optree.tree_structure(tree) for tree in ({"a": 1, "b": [2]}, {"a": [1, 2]}, {"a": 1, "b": [2]})]
CONSTANTS = {  # program, its objects
    "trees opened": (lambda x, s: optree.tree_leaves(optree.tree_unflatten(s, [x, x * 2]))[1], TREES),
    "trees compared": (lambda x, s: x * 2 if s == TREES[0] else x, TREES),
    "a property of a tree": (lambda x, s: x * s.num_nodes, TREES),
    "code compared": (lambda x, f: x * 2 if f.__code__ == one.__code__ else x, (one, two)),
    "code as a key": (lambda x, f: x * {one.__code__: 2, two.__code__: 3}[f.__code__], (one, two)),
    "descriptors compared": (
        lambda x, d: x * 2 if d == vars(types.FunctionType)["__code__"] else x,
        (vars(types.FunctionType)["__code__"], vars(types.FunctionType)["__dict__"]),
    ),
    "texts of schemas": (
        lambda x, s: x * len(str(s)),
        (torch.ops.aten.add.Tensor._schema, torch.ops.aten.mul.Scalar._schema),
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_native_objects_that_cannot_change_are_constants(name):
    program, objects = CONSTANTS[name]
    compiled = thunder.jit(program, fallback="error")
    for _ in range(2):
        for value in objects:
            assert torch.equal(compiled(torch.ones(2), value), program(torch.ones(2), value))


def test_a_constant_holds_constants():
    class Label:
        pass

    held = [re.compile("a"), TREES[0], one.__code__, fractions.Fraction(1, 2)]
    assert all(map(is_constant, held))
    assert not any(map(is_constant, [Label(), [1], ctypes.c_int(1), memoryview(b"a"), re.finditer("a", "a"), X]))
