"""What came with Python 3.12: type parameters, type aliases, f-strings of any form, inlined comprehensions."""

from tests.interpreter.corpus.kit import program


@program()
def generic_function():
    def first[T](xs: list[T]) -> T:
        return xs[0]

    return first([3, 4]), first.__type_params__, first.__annotations__["return"].__name__


@program()
def bounds_and_constraints():
    def f[T: int, S: (str, bytes), *Ts, **P](x: T, y: S, *args: *Ts) -> T:
        return x

    t, s, ts, p = f.__type_params__
    return f(1, "a"), t.__bound__, s.__constraints__, ts.__name__, p.__name__


@program()
def bound_is_lazy():
    def f[T: undefined_name](x: T):  # noqa: F821
        return x

    out = f(1)
    try:
        f.__type_params__[0].__bound__
    except NameError as e:
        return out, str(e)


@program()
def generic_class():
    class Box[T]:
        item: T

        def __init__(self, v: T):
            self.v = v

        def map[U](self, f) -> "Box[U]":
            return Box(f(self.v))

    return Box[int](3).map(lambda v: v * 2).v, Box.__type_params__, Box.__orig_bases__, Box[str]


@program()
def generic_class_with_base_and_super():
    class A:
        def m(self):
            return "A"

    class B[T](A):
        def m(self):
            return super().m() + "B" + T.__name__

    return B().m(), [c.__name__ for c in B.__mro__]


@program()
def type_alias():
    type Pair = tuple[int, int]
    type Tree[T] = T | list[Tree[T]]
    return Pair, Pair.__value__, Tree.__type_params__, Tree.__name__, str(Tree[int])


@program()
def type_alias_is_lazy():
    type Later = NotDefined  # noqa: F821
    try:
        return Later.__value__
    except NameError as e:
        return str(e), Later.__name__


@program()
def type_alias_in_class():
    class A:
        type X = int
        y: X = 1

    return A.X.__value__, A.y


@program()
def generic_defaults_and_closure():
    k = 5

    def f[T](x: T = k, *, y: T = k * 2):
        return x, y, k

    return f(), f(1, y=2), f.__defaults__, f.__kwdefaults__


@program()
def decorated_generic():
    def tag(f):
        f.tag = "t"
        return f

    @tag
    def g[T](x: T):
        return x

    @tag
    class C[T]:
        pass

    return g.tag, C.tag, g(1)


@program("x")
def nested_quotes_in_f_strings(x):
    d = {"k": {"j": x}}
    return f"{d["k"]["j"]} {f"{f"{x}"}"} {"\n".join(["a", "b"])} {x!r:{"^"}{5}}"


@program(3)
def f_string_over_lines(n):
    return f"{
        n  # a comment
        + 1
    } {'\\'} {[
        v for v in range(n)
    ]}"


@program()
def comprehension_cells_are_restored():
    x = "outer"
    fs = [lambda: x for x in range(3)]
    gs = [[lambda: (x, y) for y in "a"] for x in (1,)]
    return x, [f() for f in fs], gs[0][0]()


@program()
def comprehension_in_generator_with_yield_between():
    def g():
        a = [i for i in range(2)]
        yield a
        yield [(i, j) for i in a for j in a if i != j]

    return list(g())


@program()
def comprehension_sees_class_scope():
    class A:
        x = 3
        zs = [v + x for v, x in [(1, 2)]]

    return A.zs, A.x


@program()
def locals_inside_comprehension():
    a = 1
    return [sorted(locals()) for b in (2,)][0], a


@program()
def comprehension_variable_unbound_afterwards():
    if False:
        v = 1
    squares = [v * v for v in range(3)]
    try:
        return v
    except UnboundLocalError as e:
        return squares, str(e)


@program()
def error_in_nested_inlined_comprehension():
    x = 7
    try:
        return [[10 // (x - y) for y in range(3)] for x in range(3)]
    except ZeroDivisionError as e:
        return x, str(e)


@program()
def slices_by_instruction():
    xs = list(range(10))
    a, b = 2, 5
    xs[a:b] = "abc"
    del xs[a : a + 1]
    return xs[a:b], xs[:b], xs[a:], (1, 2, 3)[a - 1 : b], "hello"[a:b]


@program()
def slice_of_user_object():
    class S:
        def __getitem__(self, k):
            return k

        def __setitem__(self, k, v):
            self.set = k, v

    s = S()
    i = 1
    s[i : i + 1] = "v"
    return s[i : i + 2], s.set


@program()
def super_attribute_instruction():
    class A:
        v = 1

        @property
        def p(self):
            return "A.p"

        @classmethod
        def c(cls):
            return cls.__name__

    class B(A):
        def f(self):
            return super().v, super().p, super().c(), super(B, self).v

        @classmethod
        def c(cls):
            return super().c() + "!"

    return B().f(), B.c()


@program()
def super_shadowed():
    class A:
        def m(self):
            return super().anything

    def fake(*args):
        import types

        return types.SimpleNamespace(anything=("fake", len(args)))

    space = dict(globals(), super=fake)
    exec("class A:\n    def m(self): return super().anything, super(1, 2).anything", space)
    return space["A"]().m()


@program()
def override_decorator():
    from typing import override

    class A:
        @override
        def m(self):
            return 1

    return A().m(), A.m.__override__


@program()
def itertools_batched():
    import itertools

    return list(itertools.batched("abcdefg", 3))


@program()
def generic_method_annotations():
    class A:
        def f[T](self, x: T, y: list[T]) -> dict[str, T]:
            return {"k": x}

    return A().f(1, []), str(A.f.__annotations__["y"])


@program()
def exception_traceback_from_generic_function():
    def f[T](x: T):
        return x.missing

    f(3)
