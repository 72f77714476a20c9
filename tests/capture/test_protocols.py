"""CPython's protocols in captured programs: the order in which special methods are asked, and what a program depends on
by asking.

A row yields a program and its arguments, makes changes, and yields nothing; after each change eager and the compiled
program have to agree. The rows with `hit` change what the program does not look at.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import gc
import operator
import threading
import types

import pytest
import torch

import thunder
from tests.capture.agreement import assert_same

X = torch.arange(3.0) + 1
ROWS = {}


def row(function):
    ROWS[function.__name__] = function
    return function


@row
def not_implemented_of_one_type():
    queries = []

    class A:
        def __add__(self, other):
            queries.append("add")
            return NotImplemented

        def __radd__(self, other):
            queries.append("radd")
            return 1

    def program(x):
        queries.clear()
        try:
            A() + A()
        except TypeError as error:
            return x * len(queries), str(error)

    yield program


@row
def not_equal_looks_at_attributes():
    class Same:
        def __init__(self, v):
            self.v = v

        def __eq__(self, other):
            return self.v == other.v

    a, b = Same(1), Same(1)
    yield lambda x: (x * 2 if a != b else x, a in [b], [a] == [b])
    b.v = 2
    yield
    a.v = 2
    yield


@row
def subclass_gets_a_reflected_method():
    class A:
        def __add__(self, other):
            return 2

    class B(A):
        pass

    a, b = A(), B()
    yield lambda x: x * (a + b)
    B.__radd__ = lambda self, other: 5
    yield
    del B.__radd__
    yield


@row
def dataclasses_compare():
    @dataclasses.dataclass(order=True)
    class Point:
        x: int
        y: int = 0

    a, b = Point(1), Point(2)
    yield lambda x: (x * 2 if a < b else x, a == b, a != b, max(a, b).x)
    a.x = 3
    yield
    a.x = 2
    yield


@row
def attribute_of_the_object_is_hidden_by_a_property():
    class A:
        pass

    a = A()
    a.n = 2
    yield lambda x: x * a.n
    A.n = property(lambda self: 5)
    yield
    del A.n
    yield
    A.n = 7
    yield


@row
def class_attribute_becomes_a_property():
    class Base:
        n = 2

    class A(Base):
        pass

    a = A()
    yield lambda x: x * a.n
    Base.n = 3
    yield
    A.n = property(lambda self: 5)
    yield
    a.__dict__["n"] = 9
    del A.n
    yield


@row
def class_attribute_hidden_by_the_object_gets_a_setter():
    class Doubling:
        def __get__(self, o, owner=None):
            return 2 * o.__dict__["n"]

        def __set__(self, o, v):
            o.__dict__["n"] = v

    class A:
        n = 1

    a = A()
    a.n = 3
    yield lambda x: x * a.n
    A.n = Doubling()
    yield


@row
def getattr_added_and_replaced():
    class Base:
        pass

    class A(Base):
        pass

    a = A()
    yield lambda x: x * getattr(a, "n", 1)
    Base.__getattr__ = lambda self, name: 4
    yield
    a.n = 6
    yield
    del a.n
    A.__getattr__ = lambda self, name: 8
    yield


@row
def getattribute_added():
    class A:
        n = 2

    a = A()
    yield lambda x: x * a.n
    A.__getattribute__ = lambda self, name: 3 if name == "n" else object.__getattribute__(self, name)
    yield


@row
def truth_length_and_containment():
    class A:
        pass

    class Items(A):
        def __init__(self):
            self.v = [1, 2]

        def __getitem__(self, i):
            return self.v[i]

    a, items = A(), Items()
    yield lambda x: (x * 2 if a else x, 3 in items, list(items), bool(items))
    A.__len__ = lambda self: 0
    yield
    A.__bool__ = lambda self: True
    yield
    items.v.append(3)
    yield
    A.__contains__ = lambda self, item: False
    yield
    A.__iter__ = lambda self: iter((5, 6))
    yield


@row
def iterators_of_the_users():
    settings = types.SimpleNamespace(n=3)

    class Counting:
        def __init__(self):
            self.i = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.i += 1
            if self.i > settings.n:
                raise StopIteration
            return self.i

    def program(x):
        for i in Counting():
            x = x + i
        a, *rest = Counting()
        return x, sum(Counting()), a, rest, [*zip(Counting(), "abc")], next(Counting()), max(Counting())

    yield program
    settings.n = 2
    yield
    settings.n = 5
    yield


@row
def context_managers():
    class Base:
        factor = 2

        def __enter__(self):
            return self.factor

        def __exit__(self, *error):
            return self.factor > 2

    class A(Base):
        pass

    a = A()

    def program(x):
        with a as factor:
            x = x * factor
            if factor > 2:
                raise ValueError
        return x

    yield program
    A.factor = 5
    yield
    a.factor = 7
    yield
    A.__enter__ = lambda self: 1
    yield


@row
def descriptors_read_their_own_attributes():
    class Scaled:
        def __init__(self, k):
            self.k = k

        def __get__(self, o, owner=None):
            return self if o is None else o.v * self.k

        def __set__(self, o, value):
            o.v = value * self.k

    class A:
        s = Scaled(3)

    a = A()
    a.v = 2

    def program(x):
        a.s = 4
        return x * a.s

    yield program
    A.__dict__["s"].k = 5
    yield
    A.s = Scaled(7)
    yield


@row
def metaclasses():
    class Meta(type):
        scale = 2

        @property
        def size(cls):
            return cls.scale

        def __call__(cls, *args):
            instance = super().__call__(*args)
            instance.k = cls.scale
            return instance

        def __instancecheck__(cls, value):
            return cls.scale > 2

        def __contains__(cls, item):
            return item == cls.scale

    class A(metaclass=Meta):
        def __init__(self, v):
            self.v = v

    yield lambda x: (x * A.size, A(3).k, isinstance(4, A), 2 in A)
    Meta.scale = 3
    yield
    A.scale = 4
    yield


@row
def conversions():
    class Number:
        def __init__(self, v):
            self.v = v

        def __index__(self):
            return self.v

        def __float__(self):
            return self.v + 0.5

        def __round__(self, digits=0):
            return self.v + digits

        def __abs__(self):
            return -self.v

        def __hash__(self):
            return self.v + 40

        def __str__(self):
            return f"<{self.v}>"

        def __format__(self, spec):
            return f"{spec}{self.v}"

    n = Number(1)

    def program(x):
        return (
            x * n.v,
            [10, 20, 30][n],
            int(n),
            float(n),
            round(n, 2),
            abs(n),
            hash(n),
            str(n),
            f"{n:a}",
            operator.index(n),
            divmod(7, n.v),
        )

    yield program
    n.v = 2
    yield


@row
def functions_of_the_module_operator():
    class A:
        n = 2

        def __mul__(self, other):
            return self.n * other

        def __eq__(self, other):
            return other == self.n

        def __getitem__(self, k):
            return self.n + k

    a = A()
    yield lambda x: (
        operator.mul(a, x),
        operator.eq(a, 3),
        operator.getitem(a, 4),
        functools.reduce(operator.mul, [x, x], a),
    )
    a.n = 3
    yield


@row
def missing_keys():
    class Table(dict):
        scale = 2

        def __missing__(self, key):
            return key * self.scale

    t = Table()
    yield lambda x: x * t[3]
    t.scale = 5
    yield
    t[3] = 1
    yield


@row
def super_of_attributes():
    class Base:
        n = 2

        @property
        def p(self):
            return self.n

        def __setattr__(self, name, value):
            super().__setattr__(name, value + 1)

    class A(Base):
        @property
        def p(self):
            return super().p * 2

    a = A()

    def program(x):
        a.q = 1
        return x * a.p, a.q, super(A, a).n

    yield program
    Base.n = 3
    yield
    a.n = 5
    yield
    Base.p = property(lambda self: 10)
    yield


@row
def operators_with_tensors():
    class Scale:
        def __init__(self, k):
            self.k = k

        def __rmul__(self, x):
            return x * self.k

        def __rsub__(self, x):
            return NotImplemented

        def __imatmul__(self, x):
            return x + self.k

        def __lt__(self, x):
            return x > self.k

        def __len__(self):
            return self.k

    s = Scale(2)

    def program(x):
        m = s
        m @= x
        try:
            x - s
        except TypeError as error:
            return x * s, m, s < x, x > s, str(error), len(s)

    yield program
    s.k = 3
    yield


@row
def deleted_and_asked_for():
    class A:
        n = 3

    a = A()
    a.n = 2

    def program(x):
        y = x * a.n
        del a.n
        y = y + a.n
        try:
            del a.n
        except AttributeError:
            y = y * 2
        a.n = 2
        return y

    yield program
    A.n = 5
    yield


@row
def mappings_as_keywords():
    class Mapping:
        def __init__(self, **k):
            self.k = k

        def keys(self):
            return self.k.keys()

        def __getitem__(self, key):
            return self.k[key]

    m = Mapping(a=1)

    def program(x, f=lambda **k: k):
        return x * sum(f(**m).values()), {**m}, dict(m)

    yield program
    m.k["a"] = 2
    yield
    m.k["b"] = 5
    yield


@row
def library_classes_of_users():
    class Names(collections.UserDict):
        def __missing__(self, key):
            return len(key)

    class Local(contextlib.ContextDecorator):
        def __enter__(self):
            return 2

        def __exit__(self, *error):
            return None

    names = Names(a=3)

    @Local()
    def decorated(x):
        return x * names["a"] + names["unknown"]

    yield decorated
    names["a"] = 4
    yield
    names["unknown"] = 1
    yield


VARIABLE = contextvars.ContextVar("VARIABLE", default=1)


@row
def context_variables():
    def program(x):
        before = VARIABLE.get()
        token = VARIABLE.set(x * 2)
        inside = VARIABLE.get()
        VARIABLE.reset(token)
        return x * before, inside, VARIABLE.get()

    yield program
    token = VARIABLE.set(3)
    yield
    VARIABLE.reset(token)
    yield


@row
def context_variables_left_set():
    variable = contextvars.ContextVar("variable")

    def program(x):
        n = variable.get(0)
        variable.set(n + 1)
        return x * n

    yield program
    yield
    variable.set(10)
    yield


@row
def locals_written_to():
    def program(x):
        k = 2
        names = locals()
        names["added"] = 3
        names["k"] = 7
        again = locals()
        return (
            x * k,
            names.get("added"),
            "added" in again,
            again is names,
            again["k"],
            sorted(again.keys() - {"names", "again"}),
        )

    yield program


@pytest.mark.parametrize("name", ROWS)
def test_protocol(name):
    steps = ROWS[name]()
    program = next(steps)
    compiled = thunder.jit(program)
    while True:
        states = contextvars.copy_context(), contextvars.copy_context()
        want, got = states[0].run(program, X), states[1].run(compiled, X)
        assert_same(got, want)
        assert {k.name: v for k, v in states[0].items()} == {k.name: v for k, v in states[1].items()}
        misses = thunder.cache_misses(compiled)
        assert_same(contextvars.copy_context().run(compiled, X), contextvars.copy_context().run(program, X))
        assert thunder.cache_misses(compiled) == misses, "a call without a change compiles again"
        try:
            next(steps)
        except StopIteration:
            return


def test_error_that_native_code_handles_keeps_no_locals():
    """CPython's own frames do from 3.12 on, until the garbage collector runs."""

    class Flag:
        pass

    def fail(error):
        raise error

    class Items:
        def __getitem__(self, i):
            return fail(IndexError())

    def program():
        flag = Flag()  # noqa: F841 - its end is looked at
        return list(Items())

    gc.disable()
    try:
        assert thunder.jit(program)() == []
        assert not any(type(x) is Flag for x in gc.get_objects())
    finally:
        gc.enable()


def test_native_methods_apply_to_objects_of_their_kind():
    class Kind:
        pass

    def program(x):
        messages = []
        for write in (
            lambda: object.__setattr__(Kind, "a", 2), lambda: object.__delattr__(Kind, "a"),
            lambda: type.__setattr__(Kind, "b", x), lambda: object.__setattr__(Kind(), "a", 2),
        ):  # fmt: skip
            try:
                messages.append(write())
            except TypeError as error:
                messages.append(str(error))
        return messages

    want = program(1)
    del Kind.b
    assert thunder.jit(program)(1) == want and Kind.b == 1 and not hasattr(Kind, "a")


def test_attributes_of_a_thread_are_written():
    local = threading.local()
    local.scale = 1.0

    def program(x):
        local.scale = local.scale * 2
        return x * local.scale, getattr(local, "other", 3)

    compiled = thunder.jit(program, fallback="error")
    for i in range(3):
        got, other = compiled(torch.ones(2))
        assert torch.equal(got, torch.full((2,), 2.0 ** (i + 1))) and local.scale == 2.0 ** (i + 1) and other == 3
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("name", ["__gt__", "__lt__", "__ge__"])
def test_reflected_methods_of_elements_that_are_compared(name):
    seen = []

    class Plain:
        pass

    Compared = type("Compared", (), {name: lambda self, other: seen.append(name) or True})
    pairs = ([Plain()], [Compared()]), ((Plain(), 1), (Compared(), 1)), ([Compared()], [Plain()])

    def program(i):
        a, b = pairs[i]
        try:
            return a < b
        except TypeError:
            return None

    compiled = thunder.jit(program)
    for i in (0, 1, 2, 0, 1, 2):
        assert compiled(i) == program(i) and len(seen) % 2 == 0


def test_an_attribute_behind_a_descriptor_without_get():
    """As `Graph._adj` of networkx: the class only watches what is assigned."""

    class Resets:
        def __set__(self, owner, value):
            owner.__dict__["table"] = value

    class Holder:
        table = Resets()

    holder = Holder()
    holder.table = {"k": 2.0}
    compiled = thunder.jit(lambda x, holder: x * holder.table["k"], fallback="error")
    for number in (2.0, 3.0, 3.0):
        holder.table = {"k": number}
        assert torch.equal(compiled(torch.ones(2), holder), torch.full((2,), number))
