"""What came with Python 3.13: type parameter defaults, locals() as a snapshot, new class attributes."""

from tests.interpreter.corpus.kit import program


@program()
def type_parameter_defaults():
    def f[T = int, **P = [str], *Ts = *tuple[int, str]](x: T = None):
        return x

    t, p, ts = f.__type_params__
    return t.__default__, p.__default__, str(ts.__default__), f(3), t.has_default()


@program()
def default_in_class_and_alias():
    class Box[T = str]:
        pass

    type A[T = bytes] = list[T]
    return Box.__type_params__[0].__default__, A.__type_params__[0].__default__


@program()
def locals_is_a_snapshot():
    a = 1
    before = locals()
    a = 2
    before["a"] = 99
    return before["a"], a, locals()["a"]


@program()
def exec_does_not_write_locals():
    a = 1
    exec("a = 5; b = 6")
    return a, "b" in locals()


@program()
def static_attributes():
    class A:
        def __init__(self):
            self.x = 1
            self.y = 2

        def m(self):
            self.z = 3

    return sorted(A.__static_attributes__), A.__firstlineno__ > 0


@program()
def docstring_indentation_is_stripped():
    def f():
        """First.

        Second.
        """

    return f.__doc__


@program()
def copy_replace():
    import copy
    import dataclasses

    @dataclasses.dataclass
    class P:
        x: int
        y: int = 0

    return copy.replace(P(1), y=5)


@program()
def deprecated_decorator():
    import warnings

    @warnings.deprecated("use g")
    def f():
        return 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = f()
    return value, [str(w.message) for w in caught]


@program()
def walrus_and_to_bool_instructions():
    class T:
        def __init__(self, v):
            self.v = v

        def __bool__(self):
            return self.v

    a, b = T(True), T(False)
    return (a and b) is b, (b or a) is a, not a, not b, bool(a and not b), [1 if t else 0 for t in (a, b)], a is not None and b is None


@program()
def store_pairs():
    a, b = 1, 2
    b, a = a, b
    c, d = a + b, a - b
    a, b, c, d = d, c, b, a
    return a, b, c, d
