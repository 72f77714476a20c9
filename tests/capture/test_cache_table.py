"""The table of changes between two calls: the result is eager's, and the program is compiled again exactly where it
must be.

A row is a generator. It yields the program and the arguments of the first call; makes the change; and yields the
arguments of the call after it (nothing: the same ones). Each call's result is compared with eager's, and a call
repeated without a change must be a hit.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import decimal
import enum
import functools
import math
import os
import sys
import threading
import types
import weakref
from typing import Any

import numpy
import pytest
import torch

import thunder
from tests.capture import other_module
from tests.capture.agreement import assert_same

ROWS: dict[str, tuple] = {}
X, Y = torch.arange(6.0).reshape(2, 3) - 2, torch.arange(6.0).reshape(2, 3) * 0.5 + 1
HERE: Any = sys.modules[__name__]
nn = torch.nn


def row(expected: str, says: str | None = None):
    """expected: "hit" or "miss", of the call after the change. says: part of the reason of the recompile."""

    def add(function):
        ROWS[function.__name__] = (function, expected, says)
        return function

    return add


class Scaled(nn.Module):
    """The module that most rows change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.scale, self.mode, self.extra, self.settings = 2.0, "plain", None, {"gain": 1.0, "unread": 0}

    def helper(self, x):
        return x + 1

    def forward(self, x):
        x = self.helper(self.linear(x)) * self.scale + self.shift
        if self.mode == "other":
            x = x * 3
        if self.extra is not None:
            x = x + 1
        if hasattr(self, "bonus"):
            x = x + 100
        return x * self.settings["gain"] if self.training else x


@dataclasses.dataclass
class Config:
    gain: float = 2.0
    name: str = "a"


Pair = collections.namedtuple("Pair", "a b")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


# ----------------------------------------------------------------------------------------------------------------
# globals, closures, defaults

NUMBER, LIST, DICT, UNRELATED, TENSOR = 2.0, [1.0, 2.0], {"a": {"b": 2.0}, "c": 1}, 0, torch.ones(3)


def helper_function(x):
    return x + 1


class Thing:
    def __init__(self, key=None):
        self.key = key


class Keyed(Thing):
    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


@row("miss")
def object_argument_that_is_a_key():
    a, b = Thing(), Thing()
    table = {a: 2.0, b: 5.0}
    yield (lambda x, o: x * table[o]), (X, a)
    yield X, b


@row("hit")
def object_argument_that_is_another_key_of_the_same():
    a, b = Thing(), Thing()
    table = {a: 2.0, b: 2.0}
    yield (lambda x, o: x * table.get(o)), (X, a)
    yield X, b


@row("miss")
def object_argument_in_a_list():
    a, b = Thing(), Thing()
    things = [a]
    yield (lambda x, o: x * (2 if o in things else 3)), (X, b)
    yield X, a


@row("miss")
def object_argument_in_a_set():
    a, b = Thing(), Thing()
    things = {a}
    yield (lambda x, o: x * (2 if o in things else 3)), (X, b)
    yield X, a


@row("miss")
def object_argument_in_a_weak_set():
    a, b = Thing(), Thing()
    things, names = weakref.WeakSet([a]), [a, b]
    yield (lambda x, o: x * (2 if o in things else len(names))), (X, a)
    yield X, b


@row("miss")
def objects_that_are_equal_when_they_are_one():
    a, b = Thing(), Thing()
    yield (lambda x, o, p: x * (2 if o == p else 3)), (X, a, b)
    yield X, a, a


@row("miss")
def objects_in_a_set_of_the_programs():
    a, b = Thing(), Thing()
    yield (lambda x, o, p: x * len({o, p}) + len({o: 1, p: 2}) + len({v for v in (o, p)})), (X, a, b)
    yield X, a, a


@row("miss")
def hash_of_an_object_in_a_set_of_the_programs():
    a, b = Keyed(1), Keyed(1)
    yield (lambda x: x * len({a, b})), (X,)
    b.key = 2
    yield


@row("miss")
def value_in_a_weak_key_dictionary():
    a = Thing()
    table = weakref.WeakKeyDictionary({a: 2.0})
    yield (lambda x: x * table.get(a, 9.0)), (X,)
    table[a] = 4.0
    yield


@row("miss")
def value_in_a_weak_value_dictionary():
    a, b = Thing(2.0), Thing(4.0)
    table = weakref.WeakValueDictionary(k=a)
    yield (lambda x: x * table["k"].key), (X,)
    table["k"] = b
    yield


@row("miss")
def factory_of_a_copied_defaultdict():
    table = collections.defaultdict(lambda: 3.0)
    yield (lambda x: x * table.copy()["a"]), (X,)
    table.default_factory = lambda: 5.0
    yield


@row("miss")
def id_of_a_tensor_argument_as_a_key():
    a, b = X.clone(), Y.clone()
    table = {id(b): 5.0}
    yield (lambda x: x * table.get(id(x), 1.0)), (a,)
    yield (b,)


@row("hit")
def ids_of_tensor_arguments_in_a_set_of_the_programs():
    yield (lambda x, y: x * len({id(x), id(y), id(x)}) + (id(x) == id(y))), (X, Y)
    yield X.clone(), Y.clone()


@row("miss")
def id_of_an_object_in_an_outside_list():
    a, b = Thing(), Thing()
    ids = [id(a)]
    yield (lambda x, o: x * (2 if id(o) == ids[0] else 3) * (2 if id(o) in ids else 3)), (X, a)
    yield X, b


@row("miss")
def argument_that_becomes_the_global_that_is_written_to():
    HERE.THING = Thing(1.0)

    def program(x, o):
        HERE.THING.key, o.key = 5.0, 7.0
        return x * HERE.THING.key

    yield program, (X, Thing())
    yield X, HERE.THING


class Partial:
    def scale(self, a, b):
        return a * b

    by_two = functools.partialmethod(scale, 2)


@row("miss")
def partial_method():
    p = Partial()
    Partial.by_two = functools.partialmethod(Partial.scale, 2)
    yield (lambda x: x * p.by_two(3)), (X,)
    Partial.by_two = functools.partialmethod(Partial.scale, 5)
    yield


@row("miss", "global NUMBER was 2.0, is 3.0")
def global_number():
    HERE.NUMBER = 2.0
    yield (lambda x: x * NUMBER), (X,)
    HERE.NUMBER = 3.0
    yield


@row("miss", "global NUMBER")
def global_number_of_another_type():
    HERE.NUMBER = 2.0
    yield (lambda x: torch.ones(2, dtype=torch.int64) * NUMBER), (X,)
    HERE.NUMBER = 2
    yield


@row("miss", "global helper_function is another")
def global_function():
    HERE.helper_function = lambda x: x + 1
    yield (lambda x: helper_function(x)), (X,)
    HERE.helper_function = lambda x: x + 2
    yield


@row("miss")
def global_tensor_of_another_shape():
    HERE.TENSOR = torch.ones(3)
    yield (lambda x: x + TENSOR), (X,)
    HERE.TENSOR = torch.ones(2, 3) * 2
    yield


@row("hit")
def global_tensor_of_the_same_shape():
    HERE.TENSOR = torch.ones(3)
    yield (lambda x: x + TENSOR), (X,)
    HERE.TENSOR = torch.ones(3) * 5
    yield


@row("miss", "global LIST[1] was 2.0, is 7.0")
def global_list_entry():
    HERE.LIST = [1.0, 2.0]
    yield (lambda x: x * LIST[1]), (X,)
    LIST[1] = 7.0
    yield


@row("miss", "global LIST")
def global_list_append():
    HERE.LIST = [1.0, 2.0]
    yield (lambda x: sum([x * v for v in LIST])), (X,)
    LIST.append(3.0)
    yield


@row("miss", "global DICT['a']['b'] was 2.0, is 4.0")
def global_nested_dict_entry():
    HERE.DICT = {"a": {"b": 2.0}, "c": 1}
    yield (lambda x: x * DICT["a"]["b"]), (X,)
    DICT["a"]["b"] = 4.0
    yield


@row("hit")
def global_unrelated_dict_entry():
    HERE.DICT = {"a": {"b": 2.0}, "c": 1}
    yield (lambda x: x * DICT["a"]["b"]), (X,)
    DICT["c"], DICT["new"], DICT["a"]["z"] = 5, 6, 7
    yield


@row("miss", "global DICT['z'] exists now")
def global_dict_key_that_was_absent():
    HERE.DICT = {"a": 1}
    yield (lambda x: x * DICT.get("z", 3)), (X,)
    DICT["z"] = 9
    yield


@row("miss", "DICT['z']")
def global_dict_membership():
    HERE.DICT = {"a": 1}
    yield (lambda x: x * 2 if "z" in DICT else x), (X,)
    DICT["z"] = 9
    yield


@row("miss", "keys of global DICT")
def global_dict_iterated_and_grown():
    HERE.DICT = {"a": 1}
    yield (lambda x: sum([x * v for v in DICT.values()])), (X,)
    DICT["z"] = 9
    yield


@row("miss")
def global_dict_entry_removed():
    HERE.DICT = {"a": 1, "b": 2}
    yield (lambda x: x * DICT.get("b", 5)), (X,)
    del DICT["b"]
    yield


@row("hit")
def unrelated_global():
    yield (lambda x: x * 2), (X,)
    HERE.UNRELATED = object()
    yield


@row("miss", "CONSTANT was 2.0, is 5.0")
def constant_of_another_module():
    other_module.CONSTANT = 2.0
    yield (lambda x: x * other_module.CONSTANT), (X,)
    other_module.CONSTANT = 5.0
    yield


@row("hit")
def unrelated_constant_of_another_module():
    other_module.CONSTANT = 2.0
    yield (lambda x: x * other_module.CONSTANT), (X,)
    other_module.UNRELATED = 5.0
    yield


@row("miss", "function")
def function_of_another_module():
    was = other_module.function
    yield (lambda x: other_module.function(x)), (X,)
    other_module.function = lambda x: x * 3
    yield
    other_module.function = was


@row("miss", "len")
def builtin_shadowed_by_a_global():
    yield (lambda x: x * len("ab")), (X,)
    HERE.len = lambda s: 7
    yield
    del HERE.len


@row("miss", "closure variable n was 2, is 3")
def closure_cell():
    n = 2
    yield (lambda x: x * n), (X,)
    n = 3
    yield


@row("miss", "closure variable names")
def closure_list():
    names = [1, 2]
    yield (lambda x: x * len(names)), (X,)
    names.append(3)
    yield


@row("miss")
def nested_closure():
    n = 2

    def inner(x):
        return x * n

    yield (lambda x: inner(x) + 1), (X,)
    n = 5
    yield


@row("miss")
def default_argument():
    def f(x, k=2):
        return x * k

    yield f, (X,)
    f.__defaults__ = (7,)
    yield


@row("miss")
def default_argument_of_a_helper():
    def helper(x, k=2):
        return x * k

    yield (lambda x: helper(x)), (X,)
    helper.__defaults__ = (7,)
    yield


@row("miss")
def keyword_default():
    def f(x, *, k=2):
        return x * k

    yield f, (X,)
    f.__kwdefaults__["k"] = 5
    yield


@row("miss")
def keyword_defaults_replaced():
    def helper(x, *, k=2):
        return x * k

    yield (lambda x: helper(x)), (X,)
    helper.__kwdefaults__ = {"k": 9}
    yield


@row("miss")
def default_list_entry():
    def f(x, k=[2]):
        return x * k[0]

    yield f, (X,)
    f.__defaults__[0][0] = 5
    yield


@row("hit")
def default_that_is_not_used():
    def f(x, k=2):
        return x * k

    yield f, (X, 4)
    f.__defaults__ = (7,)
    yield


@row("miss")
def code_of_a_helper():
    def helper(x):
        return x * 2

    yield (lambda x: helper(x)), (X,)
    helper.__code__ = (lambda x: x * 3).__code__
    yield


@row("miss")
def code_of_the_function_itself():
    def f(x):
        return x * 2

    yield f, (X,)
    f.__code__ = (lambda x: x * 3).__code__
    yield


@row("miss")
def attribute_of_a_function():
    def f(x):
        return x * f.factor

    f.factor = 2
    yield f, (X,)
    f.factor = 3
    yield


# ----------------------------------------------------------------------------------------------------------------
# attributes of modules and objects


@row("miss", "model.scale was 2.0, is 3.0")
def module_number():
    m = Scaled()
    yield m, (X,)
    m.scale = 3.0
    yield


@row("miss", "model.mode was 'plain', is 'other'")
def module_string():
    m = Scaled()
    yield m, (X,)
    m.mode = "other"
    yield


@row("miss", "model.extra was None")
def module_none_to_object():
    m = Scaled()
    yield m, (X,)
    m.extra = object()
    yield


@row("miss", "bonus exists now")
def module_attribute_added_that_hasattr_asked_for():
    m = Scaled()
    yield m, (X,)
    m.bonus = 1
    yield


@row("miss")
def module_attribute_deleted_that_hasattr_asked_for():
    m = Scaled()
    m.bonus = 1
    yield m, (X,)
    del m.bonus
    yield


@row("miss", "gain")
def module_dict_entry():
    m = Scaled()
    yield m, (X,)
    m.settings["gain"] = 5.0
    yield


@row("hit")
def module_unread_dict_entry():
    m = Scaled()
    yield m, (X,)
    m.settings["unread"] = 5.0
    m.settings["new"] = 1
    yield


@row("hit")
def module_unread_attribute():
    m = Scaled()
    m.unread = 1
    yield m, (X,)
    m.unread, m.fresh = 2, 3
    yield


@row("miss", "training was True, is False")
def module_eval():
    m = Scaled()
    yield m, (X,)
    m.eval()
    yield


@row("hit")
def module_eval_where_nobody_asks():
    m = nn.Linear(3, 3)
    yield m, (X,)
    m.eval()
    yield


@row("hit")
def parameter_replaced():
    m = Scaled()
    yield m, (X,)
    m.linear.weight = nn.Parameter(torch.randn(3, 3))
    yield


@row("miss", "shape[0] was 3, is 4")
def parameter_of_another_shape():
    m = nn.Linear(3, 3, bias=False)
    yield m, (X,)
    m.weight = nn.Parameter(torch.randn(4, 3))
    yield


@row("hit")
def parameter_data_replaced():
    m = Scaled()
    yield m, (X,)
    m.linear.weight.data = torch.randn(3, 3)
    yield


@row("miss", "dtype was torch.float32, is torch.float64")
def parameter_data_of_another_dtype():
    m = nn.Linear(3, 3, bias=False)
    yield (lambda x: m.weight * 2), (X,)
    m.weight.data = torch.randn(3, 3, dtype=torch.float64)
    yield


@row("miss", "shape")
def parameter_data_of_another_shape():
    m = nn.Linear(3, 3, bias=False)
    yield m, (X,)
    m.weight.data = torch.randn(5, 3)
    yield


@row("hit")
def parameter_written_in_place():
    m = Scaled()
    yield m, (X,)
    with torch.no_grad():
        m.linear.weight.mul_(2)
    yield


@row("miss", "dtype")
def module_to_dtype():
    m = Scaled()
    yield m, (X,)
    m.to(torch.float64)
    yield (X.double(),)


@row("miss", "requires_grad was True, is False")
def parameter_requires_grad():
    m = nn.Linear(3, 3)
    yield m, (X,)
    m.weight.requires_grad_(False)
    yield


@row("miss", "requires_grad was True, is False")
def parameter_requires_grad_with_grad_on():
    m = nn.Linear(3, 3)
    with torch.enable_grad():
        yield m, (X,)
        m.requires_grad_(False)
        yield


@row("miss")
def bias_removed():
    m = nn.Linear(3, 3)
    yield m, (X,)
    m.bias = None
    yield


@row("hit")
def buffer_replaced():
    m = Scaled()
    yield m, (X,)
    m.shift = torch.full((3,), 7.0)
    yield


@row("miss")
def buffer_set_to_none():
    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.ones(3))

        def forward(self, x):
            return x if self.b is None else x + self.b

    m = Maybe()
    yield m, (X,)
    m.b = None
    yield


@row("hit")
def state_dict_loaded():
    m, other = Scaled(), Scaled()
    yield m, (X,)
    m.load_state_dict(other.state_dict())
    yield


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


@row("miss", "were one object")
def tied_weights_untied():
    m = Tied()
    yield m, (X,)
    m.b.weight = nn.Parameter(torch.randn(3, 3))
    yield


@row("hit")
def tied_weights_replaced_together():
    m = Tied()
    yield m, (X,)
    m.a.weight = m.b.weight = nn.Parameter(torch.randn(3, 3))
    yield


@row("miss", "is another object than before")
def child_replaced():
    m = Scaled()
    yield m, (X,)
    m.linear = nn.Linear(3, 3)
    yield


@row("miss")
def child_replaced_in_sequential():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    yield m, (X,)
    m[1] = nn.Sigmoid()
    yield


@row("miss")
def child_added():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    yield m, (X,)
    m.append(nn.Linear(3, 3))
    yield


@row("miss")
def child_deleted():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh())
    yield m, (X,)
    del m[2]
    yield


@row("miss")
def module_list_append():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = Stack()
    yield m, (X,)
    m.layers.append(nn.Linear(3, 3))
    yield


@row("miss")
def module_dict_entry_replaced():
    m = nn.ModuleDict({"a": nn.ReLU()})
    yield (lambda x: m["a"](x)), (X,)
    m["a"] = nn.Tanh()
    yield


@row("miss")
def parameter_list_append():
    m = nn.ParameterList([torch.ones(3)])
    yield (lambda x: sum([x * p for p in m])), (X,)
    m.append(torch.ones(3) * 2)
    yield


@row("hit")
def unrelated_module():
    m, other = Scaled(), Scaled()
    yield m, (X,)
    other.scale, other.linear = 9.0, nn.Linear(3, 3)
    yield


@row("hit")
def second_instance_as_an_argument_that_only_its_numbers_matter():
    yield (lambda x, c: x * c.gain), (X, Config())
    yield X, Config()


@row("hit")
def second_instance_of_a_module_as_an_argument():
    yield (lambda x, m: m(x)), (X, nn.Linear(3, 3))
    yield X, nn.Linear(3, 3)


# ----------------------------------------------------------------------------------------------------------------
# classes and methods


@row("miss", "helper")
def method_patched_on_the_class():
    class Mine(Scaled):
        def helper(self, x):
            return x + 1

    m = Mine()
    yield m, (X,)
    Mine.helper = lambda self, x: x + 2
    yield


@row("miss", "helper")
def method_patched_on_the_instance():
    m = Scaled()
    yield m, (X,)
    m.helper = lambda x: x + 5
    yield


@row("miss", "helper")
def method_patched_on_a_base_class():
    class Base(Scaled):
        def helper(self, x):
            return x + 1

    class Derived(Base):
        pass

    m = Derived()
    yield m, (X,)
    Base.helper = lambda self, x: x + 2
    yield


@row("miss", "helper")
def override_added_to_a_subclass():
    class Derived(Scaled):
        pass

    m = Derived()
    yield m, (X,)
    Derived.helper = lambda self, x: x + 2
    yield


@row("miss", "forward")
def forward_replaced_on_the_class():
    class Mine(nn.Module):
        def forward(self, x):
            return x + 1

    m = Mine()
    yield m, (X,)
    Mine.forward = lambda self, x: x * 5
    yield


@row("miss", "forward")
def forward_replaced_on_the_instance():
    m = nn.Linear(3, 3)
    yield m, (X,)
    m.forward = lambda x: x * 5
    yield


@row("miss", "forward")
def forward_of_a_child_replaced_on_the_instance():
    m = nn.Sequential(nn.Linear(3, 3))
    yield m, (X,)
    m[0].forward = lambda x: x * 5
    yield


@row("miss")
def method_that_super_finds_patched():
    class Base:
        def value(self, x):
            return x + 1

    class Derived(Base):
        def value(self, x):
            return super().value(x) * 2

    d = Derived()
    yield (lambda x: d.value(x)), (X,)
    Base.value = lambda self, x: x + 7
    yield


@row("miss")
def static_method_patched():
    class Static:
        @staticmethod
        def scale(x):
            return x * 2

    s = Static()
    yield (lambda x: s.scale(x)), (X,)
    Static.scale = staticmethod(lambda x: x * 3)
    yield


@row("miss")
def class_method_patched():
    class Classy:
        @classmethod
        def scale(cls, x):
            return x * 2

    yield (lambda x: Classy.scale(x)), (X,)
    Classy.scale = classmethod(lambda cls, x: x * 3)
    yield


@row("miss")
def class_method_patched_and_called_on_an_instance():
    class Classy:
        @classmethod
        def scale(cls, x):
            return x * 2

    o = Classy()
    yield (lambda x: o.scale(x)), (X,)
    Classy.scale = classmethod(lambda cls, x: x * 3)
    yield


@row("miss")
def property_replaced():
    class Proper:
        value = property(lambda self: 2)

    p = Proper()
    yield (lambda x: x * p.value), (X,)
    Proper.value = property(lambda self: 3)
    yield


@row("miss", "was 2, is 3")
def property_that_reads_a_number():
    class Proper:
        value = property(lambda self: self._value)

    p = Proper()
    p._value = 2
    yield (lambda x: x * p.value), (X,)
    p._value = 3
    yield


@row("miss")
def class_attribute():
    class Constants:
        factor = 2

    yield (lambda x: x * Constants.factor), (X,)
    Constants.factor = 3
    yield


@row("miss")
def class_attribute_read_through_the_instance():
    class Constants:
        factor = 2

    c = Constants()
    yield (lambda x: x * c.factor), (X,)
    Constants.factor = 3
    yield


@row("miss")
def class_attribute_shadowed_by_the_instance():
    class Constants:
        factor = 2

    c = Constants()
    yield (lambda x: x * c.factor), (X,)
    c.factor = 3
    yield


@row("hit")
def class_attribute_unrelated():
    class Constants:
        factor, other = 2, 3

    c = Constants()
    yield (lambda x: x * c.factor), (X,)
    Constants.other = 5
    yield


@row("miss")
def attribute_with_a_getattr_default():
    space = types.SimpleNamespace()
    yield (lambda x: x * getattr(space, "gain", 2)), (X,)
    space.gain = 3
    yield


@row("miss")
def attribute_deleted_with_a_getattr_default():
    space = types.SimpleNamespace(gain=3)
    yield (lambda x: x * getattr(space, "gain", 2)), (X,)
    del space.gain
    yield


@row("miss")
def attribute_dict_iterated():
    space = types.SimpleNamespace(a=1, b=2)
    yield (lambda x: sum([x * v for v in vars(space).values()])), (X,)
    space.c = 3
    yield


@row("miss")
def attribute_read_through_dict():
    space = types.SimpleNamespace(a=1)
    yield (lambda x: x * space.__dict__["a"]), (X,)
    space.a = 3
    yield


@row("miss", "b was 2, is 3")
def nested_attribute():
    space = types.SimpleNamespace(a=types.SimpleNamespace(b=2))
    yield (lambda x: x * space.a.b), (X,)
    space.a.b = 3
    yield


@row("miss")
def nested_object_replaced():
    space = types.SimpleNamespace(a=types.SimpleNamespace(b=2))
    yield (lambda x: x * space.a.b), (X,)
    space.a = types.SimpleNamespace(b=4)
    yield


@row("hit")
def nested_object_replaced_by_an_equal_one():
    space = types.SimpleNamespace(a=types.SimpleNamespace(b=2))
    yield (lambda x: x * space.a.b), (X,)
    space.a = types.SimpleNamespace(b=2)
    yield


@row("miss")
def list_attribute():
    space = types.SimpleNamespace(sizes=[1, 2])
    yield (lambda x: x * sum(space.sizes)), (X,)
    space.sizes = [1, 2, 3]
    yield


@row("miss")
def slot_attribute():
    class Slotted:
        __slots__ = ("n",)

    s = Slotted()
    s.n = 2
    yield (lambda x: x * s.n), (X,)
    s.n = 4
    yield


@row("miss")
def class_of_an_object_changed():
    class A:
        def value(self):
            return 1

    class B:
        def value(self):
            return 2

    o = A()
    yield (lambda x: x * o.value()), (X,)
    o.__class__ = B
    yield


@row("miss")
def class_of_a_module_changed():
    class Other(nn.Linear):
        def forward(self, x):
            return x * 7

    m = nn.Sequential(nn.Linear(3, 3))
    yield m, (X,)
    m[0].__class__ = Other
    yield


@row("miss")
def getattr_hook_patched():
    class Hook:
        def __getattr__(self, name):
            return 2

    h = Hook()
    yield (lambda x: x * h.anything), (X,)
    Hook.__getattr__ = lambda self, name: 3
    yield


@row("miss")
def call_method_patched():
    class Callable:
        def __call__(self, x):
            return x * 2

    c = Callable()
    yield (lambda x: c(x)), (X,)
    Callable.__call__ = lambda self, x: x * 3
    yield


@row("miss")
def operator_method_patched():
    class Number:
        def __mul__(self, other):
            return other * 2

    n = Number()
    yield (lambda x: n * x), (X,)
    Number.__mul__ = lambda self, other: other * 3
    yield


@row("miss")
def length_method_patched():
    class Sized:
        def __len__(self):
            return 2

    s = Sized()
    yield (lambda x: x * len(s)), (X,)
    Sized.__len__ = lambda self: 5
    yield


@row("miss")
def truth_method_that_reads_state():
    class Switch:
        on = True

        def __bool__(self):
            return self.on

    s = Switch()
    yield (lambda x: x * 2 if s else x), (X,)
    s.on = False
    yield


@row("miss")
def object_with_eq():
    class Tag:
        def __init__(self, name):
            self.name = name

        def __eq__(self, other):
            return self.name == other.name

        __hash__ = None

    a, b = Tag("a"), Tag("a")
    yield (lambda x: x * 2 if a == b else x), (X,)
    b.name = "c"
    yield


@row("miss")
def identity_of_two_objects():
    space = types.SimpleNamespace(a=object(), b=object())
    yield (lambda x: x * 2 if space.a is space.b else x), (X,)
    space.a = space.b
    yield


@row("miss")
def partial_arguments():
    def f(x, n):
        return x * n

    space = types.SimpleNamespace(g=functools.partial(f, n=2))
    yield (lambda x: space.g(x)), (X,)
    space.g = functools.partial(f, n=3)
    yield


@row("miss")
def compiled_partial_keyword_changed():
    p = functools.partial(lambda x, n: x * n, n=2)
    yield p, (X,)
    p.keywords["n"] = 3
    yield


@row("miss")
def dataclass_field():
    c = Config()
    yield (lambda x: x * c.gain), (X,)
    c.gain = 5.0
    yield


@row("hit")
def dataclass_field_not_read():
    c = Config()
    yield (lambda x: x * c.gain), (X,)
    c.name = "other"
    yield


@row("miss")
def set_elements():
    members = {1, 2}
    yield (lambda x: x * 2 if 3 in members else x), (X,)
    members.add(3)
    yield


@row("miss")
def deque_entry():
    d = collections.deque([1, 2])
    yield (lambda x: x * d[0]), (X,)
    d.appendleft(5)
    yield


@row("miss")
def ordered_dict_order():
    d = collections.OrderedDict(a=1, b=2)
    yield (lambda x: x * next(iter(d.values()))), (X,)
    d.move_to_end("a")
    yield


@row("miss")
def numpy_scalar_attribute():
    space = types.SimpleNamespace(n=numpy.float32(2))
    yield (lambda x: x * float(space.n)), (X,)
    space.n = numpy.float32(3)
    yield


# ---------------------------------------------------------------------------------------------------------------- state
# in library objects


@row("miss")
def mapping_proxy_entry():
    d = {"k": 2}
    view = types.MappingProxyType(d)
    yield (lambda x: x * view["k"]), (X,)
    d["k"] = 3
    yield


@row("miss")
def chain_map_entry():
    chain = collections.ChainMap({"a": 2}, {"b": 3})
    yield (lambda x: x * chain["a"] * chain["b"]), (X,)
    chain["a"] = 5
    yield


@row("miss")
def user_dict_entry():
    d = collections.UserDict(a=2)
    yield (lambda x: x * d["a"]), (X,)
    d["a"] = 5
    yield


@row("miss")
def counter_entry():
    d = collections.Counter("aab")
    yield (lambda x: x * d["a"]), (X,)
    d["a"] = 5
    yield


@row("miss")
def dict_subclass_entry():
    class Mine(dict):
        pass

    d = Mine(a=2)
    yield (lambda x: x * d["a"]), (X,)
    d["a"] = 5
    yield


@row("miss")
def list_subclass_attribute():
    class Mine(list):
        factor = 2

    d = Mine([1, 2])
    yield (lambda x: x * len(d) * d.factor), (X,)
    d.factor = 5
    yield


@row("hit")
def bytes_in_a_bytearray():
    b = bytearray(b"ab")
    yield (lambda x: x * b[0]), (X,)
    b[0] = 5
    yield


@row("hit")
def number_in_an_array():
    a = array.array("i", [2])
    yield (lambda x: x * a[0]), (X,)
    a[0] = 5
    yield


@row("miss")
def number_in_a_numpy_array():
    a = numpy.array([2.0])
    yield (lambda x: x * float(a[0])), (X,)
    a[0] = 5
    yield


@row("miss", "get() was 2, is 5")
def context_variable():
    v = contextvars.ContextVar("v", default=2)
    yield (lambda x: x * v.get()), (X,)
    v.set(5)
    yield


@row("miss")
def environment_variable():
    os.environ["OF_A_TEST"] = "2"
    yield (lambda x: x * int(os.environ.get("OF_A_TEST", "1"))), (X,)
    os.environ["OF_A_TEST"] = "5"
    yield
    del os.environ["OF_A_TEST"]


@row("miss")
def object_behind_a_weak_reference():
    c = Config()
    reference = weakref.ref(c)
    yield (lambda x: x * reference().gain), (X,)
    c.gain = 5.0
    yield


@row("miss")
def object_in_a_set():
    members = frozenset([Scaled()])
    yield (lambda x: x * next(iter(members)).scale), (X,)
    next(iter(members)).scale = 5.0
    yield


@row("miss")
def object_in_a_tuple():
    pair = ({"a": 2}, 1)
    yield (lambda x: x * pair[0]["a"]), (X,)
    pair[0]["a"] = 5
    yield


@row("miss")
def argparse_namespace():
    options = argparse.Namespace(n=2)
    yield (lambda x: x * options.n), (X,)
    options.n = 5
    yield


# ---------------------------------------------------------------------------------------------------------------- hooks


@row("miss", "hook")
def forward_hook_added():
    m = nn.Sequential(nn.Linear(3, 3))
    yield m, (X,)
    m[0].register_forward_hook(lambda module, inputs, output: output * 2)
    yield


@row("miss")
def forward_hook_removed():
    m = nn.Sequential(nn.Linear(3, 3))
    handle = m[0].register_forward_hook(lambda module, inputs, output: output * 2)
    yield m, (X,)
    handle.remove()
    yield


@row("miss")
def forward_hook_exchanged():
    m = nn.Sequential(nn.Linear(3, 3))
    handle = m[0].register_forward_hook(lambda module, inputs, output: output * 2)
    yield m, (X,)
    handle.remove()
    m[0].register_forward_hook(lambda module, inputs, output: output * 3)
    yield


@row("miss")
def forward_pre_hook_added():
    m = nn.Linear(3, 3)
    yield m, (X,)
    m.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    yield


@row("miss")
def forward_hook_that_reads_a_closure():
    m, n = nn.Linear(3, 3), 2
    m.register_forward_hook(lambda module, inputs, output: output * n)
    yield m, (X,)
    n = 3
    yield


@row("miss")
def global_forward_hook():
    m = nn.Linear(3, 3)
    yield m, (X,)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 2)
    yield
    handle.remove()


@row("miss")
def global_forward_pre_hook():
    m = nn.Linear(3, 3)
    yield m, (X,)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    yield
    handle.remove()


@row("miss")
def parametrization_added():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w + w.T

    m = nn.Linear(3, 3)
    yield (lambda x: m(x)), (X,)
    nn.utils.parametrize.register_parametrization(m, "weight", Symmetric())
    yield


# ---------------------------------------------------------------------------------------------------------------- modes


@row("miss", "grad mode was False, is True")
def grad_mode():
    m = nn.Linear(3, 3)
    yield m, (X,)
    with torch.enable_grad():
        yield


@row("miss", "inference mode was False, is True")
def inference_mode():
    m = nn.Linear(3, 3)
    yield m, (X,)
    with torch.inference_mode():
        yield


@row("miss", "autocast")
def autocast_on():
    m = nn.Linear(3, 3)
    yield m, (X,)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@row("miss", "autocast")
def autocast_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield nn.Linear(3, 3), (X,)
    with torch.autocast("cpu", dtype=torch.float16):
        yield


@row("hit")
def autocast_off_explicitly():
    yield nn.Linear(3, 3), (X,)
    with torch.autocast("cpu", enabled=False):
        yield


@row("miss", "default dtype was torch.float32, is torch.float64")
def default_dtype():
    yield (lambda x: torch.ones(3) * 2), (X,)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@row("miss", "device")
def default_device():
    yield (lambda x: torch.ones(3).device.type), (X,)
    with torch.device("meta"):
        yield


@row("hit")
def grad_mode_the_same_again():
    yield nn.Linear(3, 3), (X,)
    with torch.no_grad():
        yield


@row("hit")
def random_state():
    yield (lambda x: x * 2), (X,)
    torch.manual_seed(3)
    yield


# ----------------------------------------------------------------------------------------------------------------
# arguments


@row("miss", "became one object")
def same_tensor_twice_where_identity_is_asked():
    yield (lambda a, b: a * 2 if a is b else a + b), (X, Y)
    yield X, X


@row("miss", "were one object")
def different_tensors_where_identity_was_asked():
    yield (lambda a, b: a * 2 if a is b else a + b), (X, X)
    yield X, Y


@row("hit")
def same_tensor_twice():
    yield (lambda a, b: a + b), (X, Y)
    yield X, X


@row("miss", "n was 1, is True")
def int_to_bool():
    yield (lambda x, n: x * n), (X, 1)
    yield X, True


@row("miss", "n was 1, is 1.0")
def int_to_float():
    yield (lambda x, n: torch.ones(2, dtype=torch.int64) * n), (X, 1)
    yield X, 1.0


@row("miss", "z was 0.0, is -0.0")
def signed_zero():
    yield (lambda x, z: torch.full((2,), 1.0) / z), (X, 0.0)
    yield X, -0.0


@row("hit")
def nan():
    yield (lambda x, n: x * n), (X, float("nan"))
    yield X, float("nan")


@row("miss")
def nan_to_number():
    yield (lambda x, n: x * n), (X, float("nan"))
    yield X, 1.0


@row("miss")
def infinity():
    yield (lambda x, n: x.clamp(max=n)), (X, float("inf"))
    yield X, 1.0


@row("miss")
def complex_number():
    yield (lambda x, n: x * n), (X, 1 + 2j)
    yield X, 1 + 3j


@row("miss", "mode was 'a', is 'b'")
def string_argument():
    yield (lambda x, mode: x if mode == "a" else x * 2), (X, "a")
    yield X, "b"


@row("miss")
def bytes_argument():
    yield (lambda x, b: x * len(b)), (X, b"ab")
    yield X, b"abc"


@row("miss")
def enum_member():
    yield (lambda x, c: x * 2 if c is Colour.RED else x), (X, Colour.RED)
    yield X, Colour.BLUE


@row("miss", "d was torch.float64, is torch.int64")
def dtype_argument():
    yield (lambda x, d: x.to(d)), (X, torch.float64)
    yield X, torch.int64


@row("miss")
def device_argument():
    yield (lambda x, d: x.to(d).device.type), (X, torch.device("cpu"))
    yield X, torch.device("meta")


@row("hit")
def equal_device_argument():
    yield (lambda x, d: x.to(d) * 2), (X, torch.device("cpu"))
    yield X, torch.device("cpu")


@row("hit")
def equal_string_that_is_another_object():
    yield (lambda x, s: x * len(s)), (X, "ab" * 50)
    yield X, "".join(["ab"] * 50)


@row("hit")
def equal_large_number_that_is_another_object():
    yield (lambda x, n: x * n), (X, 10**15)
    yield X, int("1" + "0" * 15)


@row("miss", "x.shape[0] was 2, is 5")
def shape():
    yield (lambda x: x * 2), (X,)
    yield (torch.ones(5, 3),)


@row("miss", "dimensions")
def rank():
    yield (lambda x: x * 2), (X,)
    yield (torch.ones(3),)


@row("miss", "x.dtype was torch.float32, is torch.float64")
def dtype():
    yield (lambda x: x * 2), (X,)
    yield (X.double(),)


@row("hit")
def strides():
    yield (lambda x: x * 2 + x.sum()), (X,)
    yield (torch.arange(6.0).reshape(3, 2).T,)


@row("hit")
def values():
    yield (lambda x: x * 2), (X,)
    yield (X + 100,)


@row("miss")
def tensor_to_parameter():
    yield (lambda x: isinstance(x, nn.Parameter)), (X,)
    yield (nn.Parameter(X.clone(), requires_grad=False),)


@row("miss")
def tensor_to_none():
    yield (lambda x, m=None: x if m is None else x + m), (X, Y)
    yield X, None


@row("miss")
def none_to_tensor():
    yield (lambda x, m=None: x if m is None else x + m), (X, None)
    yield X, Y


@row("miss")
def number_to_tensor():
    yield (lambda x, n: x * n), (X, 2.0)
    yield X, torch.tensor(2.0)


@row("miss", "requires_grad")
def input_requires_grad():
    yield (lambda x: x * 2), (X,)
    yield (X.clone().requires_grad_(),)


class Keywords(dict):
    """The keyword arguments of a call, as a row yields them."""


@row("hit")
def keyword_order():
    yield (lambda a, b: a - b), (Keywords(a=X, b=Y),)
    yield (Keywords(b=Y, a=X),)


@row("miss", "order of keyword")
def keyword_order_that_is_looked_at():
    yield (lambda **k: [v * 2 for v in k.values()]), (Keywords(a=X, b=Y),)
    yield (Keywords(b=Y, a=X),)


@row("hit")
def keyword_order_of_named_arguments_beside_others():
    yield (lambda a, b, **k: a - b * len(k)), (Keywords(a=X, b=Y, c=1),)
    yield (Keywords(c=1, b=Y, a=X),)


@row("miss", "order of keyword")
def keyword_order_of_names_that_positions_have():
    yield (lambda a, b, /, **k: [v * 2 for v in k.values()]), (X, Y, Keywords(a=X, b=Y))
    yield X, Y, Keywords(b=Y, a=X)


@row("miss", "positional arguments was 2, is 1")
def positional_to_keyword():
    yield (lambda a, b: a - b), (X, Y)
    yield X, Keywords(b=Y)


@row("miss", "keyword arguments")
def extra_keyword():
    yield (lambda a, **k: a * len(k)), (X, Keywords(b=1))
    yield X, Keywords(b=1, c=2)


@row("miss", "positional arguments was 2, is 3")
def more_arguments():
    yield (lambda *a: sum(a)), (X, Y)
    yield X, Y, X


@row("miss")
def namedtuple_field():
    yield (lambda x, p: x * p.b), (X, Pair(1, 2))
    yield X, Pair(1, 3)


@row("miss")
def namedtuple_to_tuple():
    yield (lambda x, p: x * (2 if hasattr(p, "_fields") else 3)), (X, Pair(1, 2))
    yield X, (1, 2)


@row("miss")
def tuple_of_equal_numbers_of_another_type():
    yield (lambda x, p: torch.ones(2, dtype=torch.int64) * p[0]), (X, (1, 2))
    yield X, (1.0, 2)


@row("miss")
def list_argument_longer():
    yield (lambda ts: sum(ts)), ([X, Y],)
    yield ([X, Y, X],)


@row("hit")
def list_argument_another_one():
    yield (lambda ts: sum(ts)), ([X, Y],)
    yield ([Y, Y + 1],)


@row("miss")
def list_to_tuple():
    yield (lambda ts: isinstance(ts, list)), ([X, Y],)
    yield ((X, Y),)


@row("miss")
def dict_argument_key():
    yield (lambda d: d["a"] * d.get("n", 2)), ({"a": X},)
    yield ({"a": X, "n": 3},)


@row("hit")
def dict_argument_key_not_read():
    yield (lambda d: d["a"] * 2), ({"a": X},)
    yield ({"a": X, "n": 3},)


@row("miss")
def dict_subclass_argument():
    yield (lambda d: type(d) is dict), ({"a": X},)
    yield (collections.OrderedDict(a=X),)


@row("miss")
def function_argument():
    yield (lambda x, f: f(x)), (X, torch.sin)
    yield X, torch.cos


@row("hit")
def bound_method_argument_of_an_equal_object():
    class Scale:
        def __init__(self, n):
            self.n = n

        def apply(self, x):
            return x * self.n

    yield (lambda x, f: f(x)), (X, Scale(2).apply)
    yield X, Scale(2).apply


@row("miss")
def bound_method_argument():
    class Scale:
        def __init__(self, n):
            self.n = n

        def apply(self, x):
            return x * self.n

    yield (lambda x, f: f(x)), (X, Scale(2).apply)
    yield X, Scale(3).apply


@row("miss")
def slice_argument():
    yield (lambda x, s: x[:, s]), (X, slice(0, 2))
    yield X, slice(0, 1)


@row("miss")
def range_argument():
    yield (lambda x, r: x * sum(r)), (X, range(3))
    yield X, range(4)


@row("miss")
def size_argument():
    yield (lambda x, s: x.reshape(s)), (X, torch.Size([6]))
    yield X, torch.Size([3, 2])


@row("miss")
def frozenset_argument():
    yield (lambda x, s: x * 2 if 1 in s else x), (X, frozenset([1]))
    yield X, frozenset([2])


@row("miss")
def attribute_on_a_tensor():
    t = torch.ones(3)
    t.tag = 2
    yield (lambda x, u: x * u.tag), (X, t)
    t.tag = 3
    yield


class Text(str):
    pass


class Whole(int):
    pass


class Equal:
    """Equal to everything."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


@row("miss")
def text_of_another_class():
    yield (lambda x, s: x * len(s)), (X, Text("a"))
    yield X, Text("ab")


@row("hit")
def equal_text_of_another_class():
    yield (lambda x, s: x * len(s)), (X, Text("ab"))
    yield X, Text("ab")


@row("miss")
def whole_number_of_another_class():
    yield (lambda x, n: x * n), (X, Whole(2))
    yield X, Whole(3)


@row("miss")
def attribute_of_text():
    text = Text("ab")
    text.n = 2
    yield (lambda x, s: x * s.n), (X, text)
    text.n = 3
    yield


def type_of_key(x, d):
    for k in d:
        x = x * 2 if type(k) is bool else x * 3 if type(k) is int else x * 4
    return x


@row("miss")
def type_of_a_key():
    yield type_of_key, (X, {1: 2})
    yield X, {True: 2}


@row("miss")
def type_of_an_element():
    yield type_of_key, (X, {1})
    yield X, {1.0}


@row("miss")
def order_of_a_set():
    def program(x, s):
        for n in s:
            x = x * 2 + n
        return x

    a, b = set(), set()
    for n in (0, 8):
        a.add(n)
        b.add(8 - n)
    yield program, (X, a)
    yield X, b


@row("miss")
def keys_that_say_they_are_equal():
    yield (lambda x, d: x * sum(k.n for k in d)), (X, {Equal(2): 1})
    yield X, {Equal(3): 1}


@row("hit")
def equal_frozenset():
    yield (lambda x, s: x * sum(s)), (X, frozenset([1, 2]))
    yield X, frozenset([1, 2])


def signed(x, n):
    return x * math.copysign(1.0, n[0] if isinstance(n, tuple) else getattr(n, "real", n))


@row("miss")
def negative_zero_in_a_tuple():
    yield signed, (X, (0.0,))
    yield X, (-0.0,)


@row("miss")
def negative_zero_complex():
    yield signed, (X, complex(0.0, 1.0))
    yield X, complex(-0.0, 1.0)


@row("miss")
def negative_zero_of_numpy():
    yield signed, (X, numpy.float32(0.0))
    yield X, numpy.float32(-0.0)


@row("hit")
def nan_of_numpy():
    yield signed, (X, numpy.float64("nan"))
    yield X, numpy.float64("nan")


@row("hit")
def nan_in_a_tuple():
    yield signed, (X, (float("nan"),))
    yield X, (float("nan"),)


@row("hit")
def nan_complex():
    yield signed, (X, complex("nan"))
    yield X, complex("nan")


@row("hit")
def digits_of_a_decimal():
    yield (lambda x, n: x * len(str(n))), (X, decimal.Decimal("1.0"))
    yield X, decimal.Decimal("1.00")


Pair = collections.namedtuple("Pair", "a b")


@row("miss")
def tensor_in_a_pair_that_had_a_number():
    yield (lambda x, p: x * p.a + p.b), (X, Pair(1.0, 2.0))
    yield X, Pair(Y, 2.0)


@row("miss")
def empty_cell_is_filled():
    n = 2

    def program(x):
        try:
            return x * n
        except NameError:
            return x

    del n
    yield program, (X,)
    n = 3
    yield


class Slots:
    __slots__ = ("n",)


@row("miss")
def empty_slot_is_filled():
    holder = Slots()
    yield (lambda x: x * holder.n if hasattr(holder, "n") else x), (X,)
    holder.n = 3
    yield


class Answers:
    def __getattr__(self, name):
        return 2


@row("miss")
def attribute_in_the_place_of_getattr():
    holder = Answers()
    yield (lambda x: x * holder.n), (X,)
    holder.n = 3
    yield


@row("miss")
def class_attribute_in_the_place_of_getattr():
    class Own(Answers):
        pass

    holder = Own()
    yield (lambda x: x * holder.n), (X,)
    Own.n = 3
    yield


@row("miss")
def parametrization_is_removed():
    module = nn.Linear(3, 3)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", nn.Tanh())
    yield module, (X,)
    torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    yield


@row("miss")
def object_of_a_class():
    class Holder:
        settings = types.SimpleNamespace(n=2)

    yield (lambda x: x * Holder.settings.n), (X,)
    Holder.settings.n = 3
    yield


@row("miss")
def tuple_of_a_class():
    class Holder:
        sizes = (2, 3)

    yield (lambda x: x * Holder.sizes[0]), (X,)
    Holder.sizes = (3, 3)
    yield


@row("miss")
def class_of_a_class():
    class Holder:
        Inner = type("Inner", (), {"n": 2})

    yield (lambda x: x * Holder.Inner.n), (X,)
    Holder.Inner = type("Inner", (), {"n": 3})
    yield


@row("miss")
def class_attribute_appears():
    class Holder:
        pass

    yield (lambda x: x * getattr(Holder, "n", 2)), (X,)
    Holder.n = 3
    yield


@row("miss")
def attribute_of_a_key():
    key = type("Key", (), {})()
    key.n = 2
    yield (lambda x, d: x * sum(k.n for k in d)), (X, {key: 1})
    key.n = 3
    yield


@row("miss")
def factory_of_a_defaultdict():
    yield (lambda x, d: x * d["n"] + d.pop("n")), (X, collections.defaultdict(int))
    yield X, collections.defaultdict(lambda: 3)


@row("hit")
def factory_of_a_defaultdict_that_makes_nothing():
    yield (lambda x, d: x * d["n"]), (X, collections.defaultdict(int, n=2))
    yield X, collections.defaultdict(float, n=2)


@row("miss")
def longest_length_of_a_deque():
    def program(x, d):
        d = d.copy()
        d.append(5)
        return x * sum(d)

    yield program, (X, collections.deque([1, 2]))
    yield X, collections.deque([1, 2], maxlen=2)


@dataclasses.dataclass
class Row:
    n: float = 1.0
    items: list = dataclasses.field(default_factory=list)


@row("miss")
def list_of_a_dataclass_that_is_compared():
    r = Row()
    yield (lambda x, r: x * 2 if r == Row() else x), (X, r)
    r.items.append(1)
    yield


@row("miss")
def list_in_a_tuple_that_is_compared():
    yield (lambda x, n: x * 2 if (1, n) == (1, []) else x), (X, [])
    yield X, [1]


@row("miss")
def list_in_a_list_that_is_looked_for():
    yield (lambda x, n: x * 2 if [1] in n else x), (X, [[1]])
    yield X, [[2]]


@row("miss")
def attribute_of_a_thread():
    local = threading.local()
    local.n = 2
    yield (lambda x: x * local.n), (X,)
    local.n = 3
    yield


@row("miss")
def context_variable_without_a_value():
    variable: contextvars.ContextVar = contextvars.ContextVar("variable")

    def program(x):
        try:
            return x * variable.get()
        except LookupError:
            return x

    yield program, (X,)
    variable.set(3)
    yield


@row("miss")
def environment_by_getenv():
    os.environ["THUNDER_ROW"] = "2"
    yield (lambda x: x * float(os.getenv("THUNDER_ROW", "1"))), (X,)
    del os.environ["THUNDER_ROW"]
    yield


@row("miss")
def keyword_of_a_partial():
    partial = functools.partial(lambda x, n=2, m=1: x * n + m, n=2)
    yield (lambda x: partial(x)), (X,)
    partial.keywords["m"] = 3
    yield


class Counting:
    def __init__(self):
        self.n = 2

    def __get__(self, instance, owner):
        return self.n


@row("miss")
def attribute_of_a_descriptor():
    class Holder:
        n = Counting()

    holder = Holder()
    yield (lambda x: x * holder.n), (X,)
    vars(Holder)["n"].n = 3
    yield


@row("miss")
def class_attribute_that_hides_another():
    class Above:
        n = 2

    class Below(Above):
        pass

    holder = Below()
    yield (lambda x: x * holder.n), (X,)
    Below.n = 3
    yield


@row("miss")
def class_attribute_of_a_class_that_hides_another():
    class Above:
        n = 2

    class Below(Above):
        pass

    yield (lambda x: x * Below.n), (X,)
    Below.n = 3
    yield


@row("miss")
def global_is_deleted():
    HERE.gone = 2

    def program(x):
        try:
            return x * gone  # noqa: F821
        except NameError:
            return x

    yield program, (X,)
    del HERE.gone
    yield


@row("miss")
def attribute_appears_on_a_tensor():
    t = torch.ones(3)
    yield (lambda x, u: x * getattr(u, "tag", 2)), (X, t)
    t.tag = 3
    yield


class Size:
    def __init__(self, n):
        self.n = n

    def __lt__(self, other):
        return self.n < other.n

    def __eq__(self, other):
        return self.n == other.n

    def __hash__(self):
        return 1

    def __index__(self):
        return int(self.n)

    def __format__(self, spec):
        return "n" * int(self.n)

    __str__ = __repr__ = lambda self: "n" * int(self.n)


COMPARING = {
    "max": lambda x, a, b: x * (2 if max([a, b]) is a else 3),
    "sorted": lambda x, a, b: x * (2 if sorted([a, b])[0] is a else 3),
    "in": lambda x, a, b: x * (2 if a in [b] else 3),
    "get": lambda x, a, b: x * {b: 2}.get(a, 3),
    "tuples": lambda x, a, b: x * (2 if (a, 1) == (b, 1) else 3),
    "format": lambda x, a, b: x * len(f"{a}"),
    "index of a range": lambda x, a, b: x * range(10, 20)[a],
}


def compared(program):
    a, b = Size(2), Size(3)
    yield program, (X, a, b)
    a.n, b.n = 5, 5
    yield


for _name, _program in COMPARING.items():
    row("miss")(type(compared)(compared.__code__, globals(), f"objects_in_native_code_{_name}", (_program,)))


SETTINGS = {
    "threads": (torch.get_num_threads, torch.set_num_threads, 1 + torch.get_num_threads()),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "tf32": (lambda: torch.backends.cuda.matmul.allow_tf32, torch._C._set_cublas_allow_tf32, True),
    "benchmark": (lambda: torch.backends.cudnn.benchmark, torch._C._set_cudnn_benchmark, True),
    "fill": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v),
        False,
    ),
}


def setting(get, put, other):
    before = get()
    try:
        yield (lambda x: x * 2 if get() == before else x), (X,)
        put(other)
        yield
    finally:
        put(before)


for _name, _options in SETTINGS.items():
    row("miss")(type(setting)(setting.__code__, globals(), f"setting_{_name}", _options))


# ---------------------------------------------------------------------------------------------------------------- the
# test

COUNTS = collections.Counter()


def split(args: tuple) -> tuple[tuple, dict]:
    """A row's arguments: positional ones, then perhaps Keywords."""
    return (args[:-1], dict(args[-1])) if args and isinstance(args[-1], Keywords) else (args, {})


def check(compiled, program, args, kwargs) -> None:
    try:
        assert_same(compiled(*args, **kwargs), program(*args, **kwargs))
    except BaseException:
        COUNTS["wrong"] += 1
        raise


@pytest.mark.parametrize("name", ROWS)
def test_change(name):
    build, expected, says = ROWS[name]
    steps = build()
    COUNTS["rows"] += 1
    with torch.no_grad():
        program, arguments = next(steps)
        compiled = thunder.jit(program)
        for _ in range(2):
            check(compiled, program, *split(arguments))
        assert thunder.cache_misses(compiled) == 1, thunder.last_recompile_reasons(compiled)
        try:
            argument = next(steps)
            args, kwargs = split(arguments if argument is None else argument)
            for _ in range(2):
                check(compiled, program, args, kwargs)
            misses = thunder.cache_misses(compiled) - 1
            COUNTS["needless"] += misses > (expected == "miss")
            reasons = thunder.last_recompile_reasons(compiled)
            assert misses == (expected == "miss"), f"{misses} recompiles, expected a {expected}: {reasons}"
            if says is not None:
                assert any(says in reason for reason in reasons), reasons
        finally:
            for _ in steps:
                pass


def test_number_that_changes_in_native_code():
    class Number:
        def __float__(self):
            return float(self.n)

    number = Number()

    def program(x):
        return x * float(number)

    compiled = thunder.jit(program)
    for number.n in (2.0, 3.0, 2.0, 4.0, 3.0):
        assert_same(compiled(X), program(X))


def test_order_of_a_set_that_changed():
    numbers = {3, 1, 2}
    programs = [
        lambda x: x * list(numbers)[0],
        lambda x: x * next(iter(numbers)),
        lambda x: x * sum(n * i for i, n in enumerate(numbers)),
    ]
    compiled = [*map(thunder.jit, programs)]
    for change in (
        lambda: numbers.add(9),
        lambda: numbers.remove(1),
        lambda: numbers.add(17),
        numbers.clear,
        lambda: numbers.update((16, 8, 0, 1)),
    ):
        change()
        for c, p in zip(compiled, programs, strict=True):
            try:
                want = p(X)
            except (IndexError, StopIteration):
                continue
            assert_same(c(X), want)


def test_text_of_a_deque_of_numbers_that_change():
    numbers = collections.deque([2.0, 0.5])
    compiled = thunder.jit(lambda x: x * len(str(numbers)))
    for numbers[0] in (2.0, 3.25, 1.0, 10.0625):
        assert_same(compiled(X), X * len(str(numbers)))


@pytest.mark.parametrize("cache", [None, "symbolic values"])
def test_floats_that_are_no_plain_numbers(cache):
    space = types.SimpleNamespace()

    def program(x, n):
        return x * len(str(space.n)) * len(str(n)) * (2 if hash(space.n) == 0 else 3) * math.copysign(1.0, n)

    compiled = thunder.jit(program, cache=cache)
    for n in (2.0, 3.0, float("nan"), float("inf"), 0.0, -0.0, 0.0, 4.0, 4.0):
        space.n = n
        assert_same(compiled(X, n), program(X, n))


@pytest.mark.parametrize(
    "text",
    [str, repr, "{}".format, "%s".__mod__, lambda v: f"{v}", lambda v: "%s %s" % (v, 1)],
    ids=["str", "repr", "format", "percent", "f", "percent of two"],
)  # noqa: UP031
def test_text_of_numbers_that_change(text):
    numbers = [2.0, {"n": 0.5}]

    def program(x):
        return x * len(text(numbers)) + len(text(numbers[0]))

    compiled = thunder.jit(program)
    for numbers[0] in (2.0, 3.25, 1.0, 10.0625):
        assert_same(compiled(X), program(X))


def test_whether_a_tensor_is_a_leaf():
    def program(x):
        return x * (2 if x.is_leaf else 3) * (2 if x.grad_fn is None else 5)

    compiled, x = thunder.jit(program), X.clone().requires_grad_()
    for argument in (x, x * 1, x):
        assert_same(compiled(argument), program(argument))
    assert thunder.cache_misses(compiled) == 2


def test_setting_that_the_program_changes_itself():
    def program(x):
        with torch.backends.cudnn.flags(benchmark=True):
            return x * 2 if torch.backends.cudnn.benchmark else x

    compiled = thunder.jit(program)
    for _ in range(2):
        assert_same(compiled(X), program(X))
    assert thunder.cache_misses(compiled) == 1


def test_table_is_large_enough(capsys):
    with capsys.disabled():
        print(
            f"\nchanges between two calls: {len(ROWS)} rows, {COUNTS['rows']} run, wrong {COUNTS['wrong']}, needless "
            f"recompiles {COUNTS['needless']}"
        )
    assert len(ROWS) >= 60
