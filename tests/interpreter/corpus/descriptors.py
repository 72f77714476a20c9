"""Attribute access: properties, descriptors, __getattr__ and friends."""

import functools

from tests.interpreter.corpus.kit import program


@program()
def property_get_set_delete():
    class A:
        def __init__(self):
            self._v = 1
            self.log = []

        @property
        def v(self):
            self.log.append("get")
            return self._v

        @v.setter
        def v(self, value):
            self.log.append("set")
            self._v = value

        @v.deleter
        def v(self):
            self.log.append("del")
            del self._v

    a = A()
    a.v += 5
    out = a.v
    del a.v
    return out, a.log, hasattr(a, "_v"), isinstance(A.v, property)


@program()
def property_without_setter():
    class A:
        @property
        def v(self):
            return 1

    A().v = 2


@program()
def property_raises():
    class A:
        @property
        def v(self):
            return self.w / 0

        @property
        def w(self):
            return 3

    return A().v


@program()
def property_attribute_error_falls_to_getattr():
    class A:
        @property
        def v(self):
            return self.nothing

        def __getattr__(self, name):
            return f"<{name}>"

    return A().v, A().other


@program()
def getattr_fallback():
    class A:
        x = 1

        def __getattr__(self, name):
            if name.startswith("dyn_"):
                return name[4:]
            raise AttributeError(f"no {name}")

    a = A()
    out = [a.x, a.dyn_hello, hasattr(a, "zzz"), getattr(a, "zzz", "default")]
    try:
        a.bad
    except AttributeError as e:
        out.append(str(e))
    return out


@program()
def getattribute_intercepts():
    log = []

    class A:
        x = 1

        def __getattribute__(self, name):
            log.append(name)
            return object.__getattribute__(self, name)

        def m(self):
            return self.x

    return A().m(), log


@program()
def setattr_and_delattr_hooks():
    class A:
        def __init__(self):
            self.x = 1

        def __setattr__(self, name, value):
            object.__setattr__(self, name.upper(), value)

        def __delattr__(self, name):
            super().__delattr__(name.upper())

    a = A()
    a.y = 2
    del a.x
    return vars(a)


@program()
def missing_attribute():
    class A:
        pass

    return A().nothing


@program()
def missing_attribute_of_none():
    return None.x


@program()
def missing_module_attribute():
    import math

    return math.nothing


@program()
def delete_missing_attribute():
    class A:
        pass

    del A().x


@program()
def data_and_non_data_descriptors():
    class NonData:
        def __get__(self, o, t):
            return "nondata"

    class Data(NonData):
        def __set__(self, o, v):
            o.__dict__["stored"] = v

    class A:
        n = NonData()
        d = Data()

    a = A()
    a.n = "instance"
    a.d = "ignored"
    a.__dict__["d"] = "hidden"
    return a.n, a.d, vars(a), A.n


@program()
def descriptor_on_class_access():
    class D:
        def __get__(self, o, t):
            return ("class", t.__name__) if o is None else ("instance", type(o).__name__)

    class A:
        d = D()

    class B(A):
        pass

    return A.d, A().d, B.d, B().d


@program()
def descriptor_raises():
    class D:
        def __get__(self, o, t):
            raise KeyError("from descriptor")

    class A:
        d = D()

    A().d


@program()
def validated_field():
    class Positive:
        def __set_name__(self, owner, name):
            self.key = name

        def __get__(self, o, t=None):
            return o.__dict__[self.key]

        def __set__(self, o, v):
            if v <= 0:
                raise ValueError(f"{self.key} must be positive")
            o.__dict__[self.key] = v

    class Item:
        price = Positive()

        def __init__(self, price):
            self.price = price

    item = Item(3)
    item.price *= 2
    try:
        item.price = -1
    except ValueError as e:
        return item.price, str(e)


@program()
def cached_property():
    calls = []

    class A:
        @functools.cached_property
        def v(self):
            calls.append(1)
            return 42

    a = A()
    return a.v, a.v, len(calls), vars(a)


@program()
def class_property_by_metaclass():
    class Meta(type):
        @property
        def label(cls):
            return cls.__name__.lower()

    class Thing(metaclass=Meta):
        pass

    return Thing.label, hasattr(Thing(), "label")


@program()
def proxy_object():
    class Proxy:
        def __init__(self, target):
            object.__setattr__(self, "_target", target)

        def __getattr__(self, name):
            return getattr(self._target, name)

        def __setattr__(self, name, value):
            setattr(self._target, name, value)

    class T:
        x = 1

    t = T()
    p = Proxy(t)
    p.x += 5
    p.y = 2
    return t.x, p.y, vars(t)


@program()
def method_descriptors_of_builtins():
    upper = str.upper
    append = list.append
    xs = []
    append(xs, 3)
    return upper("a"), xs, dict.get({1: 2}, 1), "".join.__name__, int.__add__(2, 3), object.__repr__


@program()
def attribute_chain_and_augmented():
    class Box:
        pass

    a = Box()
    a.b = Box()
    a.b.c = [1]
    a.b.c += [2]
    a.b.n = 1
    a.b.n **= 3
    a.b.c[0] -= 5
    return a.b.c, a.b.n


@program()
def dict_attribute_access():
    class AttrDict(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

    d = AttrDict(a=1)
    d.b = 2
    return d.a + d.b, d, sorted(d.items())


@program()
def special_lookup_ignores_instance():
    class A:
        def __len__(self):
            return 1

    a = A()
    a.__len__ = lambda: 5
    return len(a), a.__len__()


@program()
def staticmethod_and_classmethod_objects():
    class A:
        @staticmethod
        def s(x):
            return x

        @classmethod
        def c(cls):
            return cls

    return type(A.__dict__["s"]).__name__, A.__dict__["s"](3), A.c() is A, A.c.__self__ is A, A().s(1)


@program()
def functools_partialmethod():
    class Cell:
        def __init__(self):
            self.alive = False

        def set_state(self, state):
            self.alive = state

        on = functools.partialmethod(set_state, True)

    c = Cell()
    c.on()
    return c.alive


@program()
def singledispatch_function():
    @functools.singledispatch
    def show(x):
        return f"object {x}"

    @show.register
    def _(x: int):
        return f"int {x}"

    @show.register(list)
    def _(x):
        return [show(v) for v in x]

    return show("a"), show(3), show([1, "b", [2]])


@program()
def weak_references():
    import weakref

    class A:
        pass

    a = A()
    r = weakref.ref(a)
    alive = r() is a
    del a
    return alive, r() is None


@program()
def attributes_of_a_thread():
    """They are in a dict of their own, and come before those of the class."""
    import threading

    class A(threading.local):
        n = 0

    a = A()
    before = a.n
    a.n += 1
    a.n += 1
    a.n -= 1
    return before, a.n, A.n, vars(a)


@program()
def getattr_setattr_builtins():
    class A:
        pass

    a = A()
    setattr(a, "x", 3)
    out = [getattr(a, "x"), hasattr(a, "y"), getattr(a, "y", 9)]
    delattr(a, "x")
    out.append(vars(a))
    try:
        getattr(a, "x")
    except AttributeError as e:
        out.append(str(e))
    return out


@program()
def setattr_on_builtin_fails():
    (3).x = 1


@program()
def module_getattr():
    import sys
    import types

    m = types.ModuleType("m")
    exec("def __getattr__(name): return name * 2\nv = 1", m.__dict__)
    sys.modules["corpus_m"] = m
    try:
        from corpus_m import anything

        return m.v, m.abc, anything
    finally:
        del sys.modules["corpus_m"]


@program()
def operator_module_getters():
    import operator

    class P:
        x = 1

        def m(self, k):
            return k

    return operator.attrgetter("x")(P()), operator.itemgetter(1, 0)("ab"), operator.methodcaller("m", 5)(P())


@program()
def descriptors_without_get():
    """A class's `__set__` or `__delete__` without a `__get__` leaves reading to the object's own attributes."""

    class Resets:
        def __set__(self, owner, value):
            owner.__dict__["a"] = value + 1

    class Deletes:
        def __delete__(self, owner):
            owner.__dict__.clear()

    class Meta(type):
        a = Resets()
        b = Deletes()

    class A:
        a, b = Resets(), Deletes()

    class B(metaclass=Meta):
        a, b = 3, 4

    x = A()
    before = type(x.a).__name__, type(x.b).__name__
    x.a = 5
    x.__dict__["b"] = 6
    read = x.a, x.b, B.a, B.b
    del x.b
    return before, read, type(x.a).__name__, x.__dict__
