"""Classes: bodies, inheritance, super, metaclasses, hooks of class creation."""

from tests.interpreter.corpus.kit import program


@program(4)
def methods_and_chaining(n):
    class Counter:
        def __init__(self, n):
            self.n = n

        def bump(self, k):
            self.n += k
            return self

    c = Counter(n)
    c.n = c.bump(2).bump(3).n * 2
    return c.n, "a,b".split(","), {**{"a": 1}, "b": n}, (*range(n), 9)


@program()
def super_without_arguments():
    class A:
        def __init__(self, x):
            self.x = x

        def m(self):
            return ["A", self.x]

    class B(A):
        def __init__(self, x):
            super().__init__(x + 1)

        def m(self):
            return [*super().m(), "B"]

    class C(B):
        def m(self):
            return [*super().m(), "C", super(B, self).m()[0]]

    return C(1).m(), C.__mro__[1].__name__


@program()
def super_in_classmethod_and_staticmethod():
    class A:
        @classmethod
        def make(cls, v):
            return cls.__name__, v

        @staticmethod
        def add(a, b):
            return a + b

    class B(A):
        @classmethod
        def make(cls, v):
            return super().make(v * 2), __class__.__name__

        @staticmethod
        def add(a, b):
            return A.add(a, b) * 10

    return B.make(3), B().make(1), B.add(1, 2), A().add(3, 4)


@program()
def super_attribute_error():
    class A:
        def m(self):
            return super().missing

    A().m()


@program()
def super_without_class_cell():
    def f(self):
        return super()

    class A:
        pass

    A.f = f
    A().f()


@program()
def super_in_nested_function_fails():
    class A:
        def m(self):
            def g():
                return super().__repr__()

            return g()

    A().m()


@program()
def super_in_comprehension():
    class A:
        def v(self):
            return 7

    class B(A):
        def vs(self):
            parent = super()
            return [parent.v() for _ in range(2)]

    return B().vs()


@program()
def super_rebinds_self():
    class A:
        def m(self):
            return type(self).__name__

    class B(A):
        def m(self):
            self = B()
            return super().m()

    return B().m()


@program()
def diamond_inheritance():
    log = []

    class Root:
        def go(self):
            log.append("Root")

    class L(Root):
        def go(self):
            log.append("L")
            super().go()

    class R(Root):
        def go(self):
            log.append("R")
            super().go()

    class D(L, R):
        def go(self):
            log.append("D")
            super().go()

    D().go()
    return log, [c.__name__ for c in D.__mro__]


@program()
def inconsistent_mro():
    class A:
        pass

    class B(A):
        pass

    class C(A, B):
        pass


@program()
def class_attributes_and_instances():
    class A:
        shared = []
        n = 0

        def __init__(self):
            self.n += 1
            self.shared.append(self.n)
            A.n += 10

    a, b = A(), A()
    return a.n, b.n, A.n, A.shared, "n" in vars(a), "shared" in vars(b)


@program()
def class_namespace_contents():
    class A:
        "doc"
        x: int = 1
        y: str

        def f(self): ...

    return A.__doc__, A.__annotations__, A.__module__, A.__qualname__, A.f.__qualname__, A.__name__, A.__bases__


@program()
def class_body_control_flow():
    class A:
        table = {}
        for i in range(3):
            table[i] = i * i
        del i
        if len(table) > 2:

            def big(self):
                return sum(self.table.values())

        try:
            1 / 0
        except ZeroDivisionError as e:
            message = str(e)
        with open("/dev/null") as f:
            pass

    return A().big(), A.message, hasattr(A, "i"), hasattr(A, "e"), A.f.closed


@program()
def class_body_raises():
    class A:
        x = 1
        y = x.missing


@program()
def nested_classes():
    class Outer:
        class Inner:
            def who(self):
                return __class__.__qualname__

        def make(self):
            return self.Inner()

    return Outer().make().who()


@program()
def metaclass_new_and_init():
    log = []

    class Meta(type):
        def __new__(mcls, name, bases, ns, **kw):
            log.append(("new", name, sorted(k for k in ns if not k.startswith("__")), kw))
            return super().__new__(mcls, name, bases, ns)

        def __init__(cls, name, bases, ns, **kw):
            log.append(("init", cls.__name__))
            super().__init__(name, bases, ns)

    class A(metaclass=Meta, tag=1):
        x = 1

    class B(A):
        y = 2

    return log, type(B).__name__


@program()
def metaclass_call():
    class Singleton(type):
        instances = {}

        def __call__(cls, *args):
            if cls not in cls.instances:
                cls.instances[cls] = super().__call__(*args)
            return cls.instances[cls]

    class Config(metaclass=Singleton):
        def __init__(self, v):
            self.v = v

    return Config(1) is Config(2), Config(3).v


@program()
def metaclass_prepare():
    class Recording(dict):
        def __setitem__(self, k, v):
            if not k.startswith("__"):
                self.setdefault("order", []).append(k) if k != "order" else None
            super().__setitem__(k, v)

    class Meta(type):
        @classmethod
        def __prepare__(mcls, name, bases, **kw):
            return Recording()

        def __new__(mcls, name, bases, ns):
            return super().__new__(mcls, name, bases, dict(ns))

    class A(metaclass=Meta):
        b = 1
        a = 2

        def c(self):
            pass

    return A.order


@program()
def metaclass_conflict():
    class M1(type):
        pass

    class M2(type):
        pass

    class A(metaclass=M1):
        pass

    class B(metaclass=M2):
        pass

    class C(A, B):
        pass


@program()
def metaclass_is_function():
    def meta(name, bases, ns):
        return name.lower(), bases, ns["v"]

    class Thing(metaclass=meta):
        v = 3

    return Thing


@program()
def metaclass_operators():
    class Meta(type):
        def __add__(cls, other):
            return f"{cls.__name__}+{other.__name__}"

        def __len__(cls):
            return 42

        def __iter__(cls):
            return iter("ab")

        def __contains__(cls, x):
            return x == "in"

        def __getitem__(cls, k):
            return cls.__name__, k

    class A(metaclass=Meta):
        pass

    return A + A, len(A), list(A), "in" in A, A[3], [*A]


@program()
def instancecheck_hooks():
    class Meta(type):
        def __instancecheck__(cls, o):
            return o == 5

        def __subclasscheck__(cls, c):
            return c is int

    class Five(metaclass=Meta):
        pass

    return isinstance(5, Five), isinstance(6, Five), issubclass(int, Five), issubclass(str, Five)


@program()
def init_subclass():
    class Base:
        registry = {}

        def __init_subclass__(cls, /, key=None, **kw):
            super().__init_subclass__(**kw)
            cls.registry[key or cls.__name__] = cls

    class A(Base):
        pass

    class B(Base, key="bee"):
        pass

    return sorted(Base.registry), Base.registry["bee"].__name__


@program()
def init_subclass_error():
    class Base:
        def __init_subclass__(cls, flag):
            raise ValueError(flag)

    class A(Base, flag="f"):
        pass


@program()
def set_name():
    log = []

    class Field:
        def __set_name__(self, owner, name):
            log.append((owner.__name__, name))
            self.name = "_" + name

        def __get__(self, o, t=None):
            return self if o is None else getattr(o, self.name, None)

        def __set__(self, o, v):
            setattr(o, self.name, v * 2)

    class A:
        x = Field()
        y = Field()

    a = A()
    a.x = 4
    return log, a.x, a.y, vars(a)


@program()
def class_getitem():
    class Box:
        def __class_getitem__(cls, item):
            return f"{cls.__name__}[{item}]"

    return Box[int], Box[1, 2], list[int], dict[str, int]


@program()
def mro_entries():
    class Fake:
        def __mro_entries__(self, bases):
            return (dict,)

    class A(Fake()):
        pass

    return A.__bases__, type(A.__orig_bases__[0]).__name__


@program()
def new_and_immutable_subclass():
    class Point(tuple):
        def __new__(cls, x, y):
            return super().__new__(cls, (x, y))

        @property
        def x(self):
            return self[0]

        def __repr__(self):
            return f"Point{tuple(self)}"

    p = Point(1, 2)
    return p, p.x, p + (3,), p == (1, 2), len(p), hash(p) == hash((1, 2))


@program()
def new_returns_other_type():
    class A:
        def __new__(cls, x):
            return x * 2

        def __init__(self, x):
            raise AssertionError

    return A(4)


@program()
def init_returns_value():
    class A:
        def __init__(self):
            return 3

    A()


@program()
def init_wrong_arguments():
    class A:
        def __init__(self, a):
            pass

    A(1, 2)


@program()
def object_takes_no_arguments():
    class A:
        pass

    A(1)


@program()
def init_raises():
    class A:
        def __init__(self, x):
            self.x = 1 // x

    class B(A):
        def __init__(self, x):
            super().__init__(x)

    B(0)


@program()
def abstract_class():
    import abc

    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...

        @property
        @abc.abstractmethod
        def name(self): ...

        def describe(self):
            return f"{self.name} {self.area()}"

    class Square(Shape):
        name = "square"

        def __init__(self, s):
            self.s = s

        def area(self):
            return self.s**2

    out = Square(3).describe()
    try:
        Shape()
    except TypeError:
        return out, isinstance(Square(1), Shape)


@program()
def slots():
    class A:
        __slots__ = ("x", "y")

        def __init__(self):
            self.x = 1

    a = A()
    out = [a.x, hasattr(a, "y"), hasattr(a, "__dict__")]
    try:
        a.z = 1
    except AttributeError:
        out.append("no z")
    del a.x
    return out, a.x


@program()
def callable_instances():
    class Adder:
        def __init__(self, k):
            self.k = k

        def __call__(self, *xs, bonus=0):
            return sum(xs) + self.k + bonus

    add = Adder(10)
    return add(1), add(1, 2, bonus=5), list(map(add, [1, 2])), callable(add), add.__call__(3)


@program()
def dynamic_classes():
    A = type("A", (), {"v": 1, "m": lambda self: self.v + 1})
    B = type("B", (A,), {"v": 5})
    return A().m(), B().m(), B.__name__, issubclass(B, A), type(B) is type


@program()
def changing_class_and_bases():
    class A:
        def who(self):
            return "A"

    class B:
        def who(self):
            return "B"

    a = A()
    a.__class__ = B
    out = a.who()
    A.who = lambda self: "patched"
    return out, A().who(), isinstance(a, A)


@program()
def instance_method_override():
    class A:
        def m(self):
            return "class"

    a = A()
    a.m = lambda: "instance"
    first = a.m()
    del a.m
    return first, a.m()


@program()
def dunder_class_reference():
    class A:
        def me(self):
            return __class__

        def later(self):
            return lambda: __class__

    class B(A):
        pass

    return B().me() is A, B().later()() is A


@program()
def init_calls_methods():
    class Node:
        def __init__(self, value, *children):
            self.value, self.children = value, list(children)
            self.depth = self._depth()

        def _depth(self):
            return 1 + max((c.depth for c in self.children), default=0)

        def total(self):
            return self.value + sum(c.total() for c in self.children)

    tree = Node(1, Node(2, Node(3)), Node(4))
    return tree.depth, tree.total()


@program()
def linked_list():
    class Node:
        __slots__ = "value", "next"

        def __init__(self, value, next=None):
            self.value, self.next = value, next

    class Stack:
        def __init__(self, *xs):
            self.head, self.size = None, 0
            for x in xs:
                self.push(x)

        def push(self, x):
            self.head = Node(x, self.head)
            self.size += 1

        def pop(self):
            if self.head is None:
                raise IndexError("empty")
            node, self.head = self.head, self.head.next
            self.size -= 1
            return node.value

        def __iter__(self):
            n = self.head
            while n:
                yield n.value
                n = n.next

        def __len__(self):
            return self.size

    s = Stack(1, 2, 3)
    out = [s.pop(), list(s), len(s)]
    s.pop(), s.pop()
    try:
        s.pop()
    except IndexError as e:
        out.append(e.args)
    return out


@program()
def generic_classes():
    from typing import Generic, TypeVar

    T = TypeVar("T")

    class Box(Generic[T]):
        def __init__(self, v: T):
            self.v = v

    class IntBox(Box[int]):
        pass

    return Box[int](3).v, IntBox(4).v, IntBox.__orig_bases__, Box.__parameters__


@program()
def protocol_classes():
    from typing import Protocol, runtime_checkable

    @runtime_checkable
    class Closer(Protocol):
        def close(self): ...

    class Door:
        def close(self):
            return "closed"

    return isinstance(Door(), Closer), isinstance(3, Closer)


@program()
def class_keyword_unpacking():
    class Base:
        def __init_subclass__(cls, **kw):
            cls.kw = kw

    options = {"a": 1}
    bases = (Base,)

    class A(*bases, b=2, **options):
        pass

    return A.kw


@program()
def annotations_are_evaluated():
    seen = []

    def note(x):
        seen.append(x)
        return int

    def f(a: note("a"), *b: note("b"), c: note("c") = 1) -> note("return"):
        return a

    return f(1), sorted(f.__annotations__), sorted(seen)
