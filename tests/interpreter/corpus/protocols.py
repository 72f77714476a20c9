"""Special methods in CPython's order, and who asks whom: what is interpreted works as natively."""

import collections
import dataclasses
import functools
import math
import operator

from tests.interpreter.corpus.kit import program


def raised(f, *args):
    try:
        return f(*args)
    except Exception as error:
        return type(error).__name__, str(error)


class Noting:
    """Every operator is noted and not implemented, but for those named."""

    def __init__(self, log, name, answers=()):
        self.log, self.name, self.answers = log, name, answers

    def __repr__(self):
        return self.name


def _note(method):
    def run(self, other):
        self.log.append((self.name, method))
        return f"{self.name}{method}" if method in self.answers else NotImplemented

    return run


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _n in _OPERATORS:
    for _prefix in ("", "r", "i"):
        setattr(Noting, f"__{_prefix}{_n}__", _note(f"__{_prefix}{_n}__"))
for _n in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Noting, f"__{_n}__", _note(f"__{_n}__"))
Noting.__hash__ = object.__hash__


class Inherits(Noting):
    pass


class Overrides(Noting):
    __radd__ = _note("__radd__")
    __rmul__ = _note("__rmul__")
    __gt__ = _note("__gt__")


class Other:
    def __init__(self, log, name, answers=()):
        self.log, self.name, self.answers = log, name, answers

    __radd__ = _note("__radd__")
    __rpow__ = _note("__rpow__")
    __eq__ = _note("__eq__")
    __hash__ = object.__hash__


@program()
def order_of_operands():
    out = []
    for f in (operator.add, operator.mul, operator.iadd, operator.pow, operator.lt, operator.eq, operator.ne, divmod):
        for a in (Noting, Inherits, Overrides, Other):
            for b in (Noting, Inherits, Overrides, Other):
                log = []
                out.append((raised(f, a(log, "a"), b(log, "b")), log))
                out.append((raised(f, a(log, "a"), 3), raised(f, [1], b(log, "b")), raised(f, "s", b(log, "b")), log[:]))
    return out


@program()
def not_implemented_of_one_type():
    log = []
    a = Noting(log, "a")
    return raised(operator.add, a, a), raised(operator.lt, a, a), a == a, a != a, log


@program()
def augmented_falls_back():
    log = []
    a = Noting(log, "a", ("__add__",))
    a += 1
    b = Noting(log, "b", ("__imul__",))
    b *= 2
    c = [1]
    c += (x for x in (2, 3))
    return a, b, c, log


class Same:
    def __init__(self, v):
        self.v = v

    def __eq__(self, other):
        return NotImplemented if not isinstance(other, Same) else self.v == other.v

    __hash__ = None


@program()
def not_equal_is_the_opposite_of_equal():
    a, b = Same(1), Same(2)
    out = [a != b, a == b, a != Same(1), a == 1, a != 1, a == a, raised(hash, a)]
    b.v = 1
    return [*out, a != b, a == b, [a] == [b], a in [b], object() == object(), raised(operator.lt, a, b)]


@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = 0


@functools.total_ordering
class Version:
    def __init__(self, *v):
        self.v = v

    def __eq__(self, other):
        return self.v == other.v

    def __lt__(self, other):
        return self.v < other.v


@program()
def generated_comparisons():
    a, b = Point(1, 2), Point(1, 3)
    v, w = Version(1, 2), Version(1, 10)
    return a < b, a <= a, a == Point(1, 2), a != b, repr(a), v >= w, v <= w, v > w, sorted([w, v])[0] is v, max(v, w) is w


class Number:
    def __init__(self, v):
        self.v = v

    def __index__(self):
        return self.v

    def __int__(self):
        return self.v + 100

    def __float__(self):
        return self.v + 0.5

    def __complex__(self):
        return complex(self.v, 1)

    def __abs__(self):
        return Number(abs(self.v))

    def __round__(self, digits=None):
        return ("round", digits)

    def __floor__(self):
        return "floor"

    def __ceil__(self):
        return "ceil"

    def __trunc__(self):
        return 7

    def __divmod__(self, other):
        return ("divmod", other)

    def __rdivmod__(self, other):
        return ("rdivmod", other)

    def __pow__(self, other, modulus=None):
        return ("pow", other, modulus)

    def __hash__(self):
        return -1

    def __invert__(self):
        return "~"


@program()
def conversions():
    n = Number(2)
    return (
        int(n), float(n), complex(n), abs(n).v, round(n), round(n, 2), math.floor(n), math.ceil(n), math.trunc(n), divmod(n, 3), divmod(3, n),
        pow(n, 2), pow(n, 2, 5), n**3, hash(n), ~n, [1, 2, 3, 4][n], "abcd"[n], (1, 2, 3)[n], range(9)[n], operator.index(n), list(range(n)), [0] * n,
    )  # fmt: skip


class Bad:
    def __index__(self):
        return "i"

    __int__ = __float__ = __complex__ = __len__ = __bool__ = __hash__ = __index__

    def __str__(self):
        return 1

    __repr__ = __str__

    def __format__(self, spec):
        return 2

    def __iter__(self):
        return 3


@program()
def conversions_to_other_types():
    b = Bad()
    functions = (int, float, complex, len, bool, hash, str, repr, format, iter, list, operator.index)
    return [raised(f, b) for f in functions], raised(lambda: [1][b]), raised(lambda: f"{b}"), raised(lambda: not b)


class Sized:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n


@program()
def truth_by_length():
    return bool(Sized(0)), bool(Sized(2)), not Sized(0), raised(bool, Sized(-1)), raised(len, Sized(-1)), raised(len, Sized(2**70)), bool(object())


class ByIndex:
    def __init__(self, *v):
        self.v = v

    def __getitem__(self, i):
        return self.v[i]


class WithLength(ByIndex):
    def __len__(self):
        return len(self.v)


@program()
def the_old_protocol_of_sequences():
    a = ByIndex(1, 2, 3)
    x, *rest = a
    it = iter(a)
    first = next(it)
    return list(a), [i for i in a], 2 in a, 9 in a, x, rest, first, list(it), next(it, "end"), list(reversed(WithLength(1, 2))), raised(reversed, a), max(a)


class Nothing:
    __iter__ = __contains__ = __reversed__ = None
    __getitem__ = __len__ = lambda self, *a: 0


@program()
def methods_that_are_none():
    n = Nothing()
    return raised(iter, n), raised(operator.contains, n, 1), raised(reversed, n), raised(lambda: [*n]), raised(lambda: 1 in n)


class Defaults(dict):
    def __missing__(self, key):
        self[key] = f"made {key}"
        return self[key]


@program()
def missing_keys():
    d = Defaults(a=1)
    counts = collections.Counter("aab")
    return d["a"], d["b"], d.get("c"), "c" in d, dict(d), counts["z"], raised(lambda: {}["q"])


class Meta(type):
    def __call__(cls, *args):
        instance = super().__call__(*args)
        instance.by_meta = True
        return instance

    def __getattr__(cls, name):
        return f"meta {name}"

    def __instancecheck__(cls, value):
        return value == 1

    def __subclasscheck__(cls, other):
        return other is int

    def __contains__(cls, item):
        return item == "in"

    def __iter__(cls):
        return iter((cls.__name__, 2))

    def __len__(cls):
        return 5

    def __getitem__(cls, key):
        return ("meta", key)

    def __repr__(cls):
        return "repr of a class"

    @property
    def size(cls):
        return 12

    data = 3


class Instance(metaclass=Meta):
    data = 4

    def __init__(self, *args):
        self.args = args


@program()
def metaclass_protocols():
    m = Instance(1, 2)
    return (
        m.args, m.by_meta, Instance.anything, isinstance(1, Instance), isinstance(2, (str, Instance)), isinstance(m, Instance), issubclass(int, Instance), "in" in Instance, list(Instance), len(Instance),
        Instance["k"], Instance.size, Instance.data, raised(lambda: m.size), repr(Instance), f"{Instance}", isinstance(1, Instance | int), type.__call__(Instance, 3).args,
    )  # fmt: skip


class Generic:
    def __class_getitem__(cls, key):
        return cls.__name__, key


@program()
def class_getitem():
    return Generic[int], raised(lambda: Instance.__mro__[1][1]), list[int] == list[int], raised(lambda: Number[1])


class Attributes:
    shared = [1]

    def __init__(self):
        self.own = 1

    def __getattribute__(self, name):
        if name == "hidden":
            raise AttributeError("hidden")
        return object.__getattribute__(self, name)

    def __getattr__(self, name):
        if name.startswith("x"):
            return f"fallback {name}"
        raise AttributeError(f"none of {name}")

    def __setattr__(self, name, value):
        super().__setattr__(name, (value, "set"))

    def __delattr__(self, name):
        object.__delattr__(self, name)


@program()
def attribute_hooks_by_name():
    a = Attributes()
    a.b = 2
    out = [a.own, a.b, a.hidden if hasattr(a, "hidden") else "none", a.xyz, raised(lambda: a.other), a.shared is Attributes.shared]
    del a.b
    object.__setattr__(a, "c", 3)
    return [*out, hasattr(a, "b"), a.c, object.__getattribute__(a, "own"), vars(a), type.__getattribute__(Attributes, "shared")]


class Data:
    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, value, owner=None):
        return self if value is None else value.__dict__.get(self.name, "unset")

    def __set__(self, value, new):
        value.__dict__[self.name] = new * 2

    def __delete__(self, value):
        del value.__dict__[self.name]


class Deletes:
    def __delete__(self, value):
        pass


class Callable:
    def __call__(self, *args):
        return ("called", *args)


class Described:
    data = Data()
    deletes = Deletes()
    __add__ = Callable()
    __enter__ = staticmethod(lambda: "entered")
    __exit__ = classmethod(lambda cls, *a: None)
    __slots__ = ("__dict__", "slot")

    @functools.cached_property
    def cached(self):
        return len(self.__dict__)

    @property
    def base(self):
        return "base"

    @classmethod
    def of_class(cls):
        return cls.__name__

    @staticmethod
    def static():
        return "static"


class Derived(Described):
    @property
    def base(self):
        return "derived " + super().base

    @classmethod
    def of_class(cls):
        return "derived " + super().of_class()

    @staticmethod
    def static():
        return "derived " + super(Derived, Derived).static()


@program()
def descriptors_of_all_kinds():
    d = Derived()
    out = [d.data, raised(lambda: d.slot), d + 1]
    d.data, d.slot = 4, 5
    out += [d.data, d.slot, d.cached, d.cached, d.base, d.of_class(), d.static(), Derived.data is Described.__dict__["data"]]
    d.__dict__["data"] = "in the dict"
    out += [d.data, raised(setattr, d, "base", 1), raised(setattr, d, "deletes", 1), raised(delattr, d, "base"), raised(delattr, d, "nothing")]
    del d.data, d.slot
    with d as entered:
        out.append(entered)
    getter = type(Described.__dict__["base"]).__get__
    return [*out, d.data, raised(lambda: d.slot), getter(Described.__dict__["base"], d), Described.base.__get__(d), len.__call__([1])]


@program()
def functions_and_methods_have_attributes():
    def f():
        """doc"""

    f.extra = 1
    d = Derived()
    return f.extra, f.__name__, f.__doc__, d.of_class.__name__, d.of_class.__self__ is Derived, raised(lambda: f.nothing), raised(lambda: d.of_class.nothing), None.__class__


class Mapping:
    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def keys(self):
        return [*self.kwargs]

    def __getitem__(self, key):
        return self.kwargs[key]


@program()
def mappings():
    def f(**kwargs):
        return kwargs

    m = Mapping(a=1, b=2)
    return {**m, "c": 3}, f(**m), raised(lambda: f(**3)), raised(lambda: {**[1]}), raised(lambda: f(a=1, **m)), dict(m)


class Shown:
    def __repr__(self):
        return "shown\xe4"


class Formatted(Shown):
    def __str__(self):
        return "text"

    def __format__(self, spec):
        return f"<{spec}>"


@program()
def texts():
    a, b = Shown(), Formatted()
    return str(a), f"{a}", f"{a!r:>8}", ascii(a), format(a), raised(format, a, ">8"), str(b), f"{b:x}", f"{b!s:>6}", format(b, "y"), f"{3:>4}", "%s %r" % (b, b)


@program()
def containers_compare_their_items():
    class Near:
        def __init__(self, v):
            self.v = v

        def __eq__(self, other):
            log.append(("eq", self.v))
            return abs(self.v - other.v) < 2

        def __lt__(self, other):
            log.append(("lt", self.v))
            return self.v < other.v

    class Never:
        def __eq__(self, other):
            return False

    log, a, b, c, n = [], Near(1), Near(2), Near(7), Never()
    out = [[a] == [b], [a, c] < [b, a], [a] < [b], [a] <= [b, c], (a,) != (c,), (a, b) == (a,), {"k": a} == {"k": b}, {"k": a} == {"j": a}, {"k": a} != {"k": c}]
    out += [[n] == [n], n in [n], n in (1, Never()), b in [c, a], [[a], 1] == [[b], 1], raised(lambda: [1] < (1,)), [1, [2, [3]]] == [1, [2, [3]]]]
    return out, log


@program()
def static_methods_are_called():
    @staticmethod
    def f(a):
        return a + 1

    class A:
        g = f
        h = f(3)

    return f(1), A.g(2), A().g(3), A.h


@program()
def set_name_of_class_attributes():
    log = []

    class Named:
        def __set_name__(self, owner, name):
            log.append((owner.__name__, name, owner.__dict__[name] is self, sorted(n for n in vars(owner) if not n.startswith("_"))))
            if name == "bad":
                raise ValueError(name)

    class A:
        x = Named()
        k = 1
        y = Named()
        __slots__ = ("z",)

    def failing():
        class B:
            bad = Named()

    try:
        failing()
    except Exception as error:
        log.append((type(error).__name__, str(error), type(error.__cause__).__name__, getattr(error, "__notes__", None)))
    return log, list(vars(A))[:6]
