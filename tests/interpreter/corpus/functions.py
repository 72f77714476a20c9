"""Parameters of every kind, calls of every kind, and the errors of wrong calls."""

import functools

from tests.interpreter.corpus.kit import program


@program(1, 2, 3)
def var_arguments(*args, scale=2, **kw):
    return [scale * x for x in args], sorted(kw.items(), key=lambda t: t[1], reverse=True), max(3, *args)


@program(4)
def star_calls(n):
    def f(*args, scale=2, **kw):
        return args, scale, kw

    return f(1, n, scale=3, b=2, a=9), f(*[1, 2], **{"z": n, "scale": 4}), f(*"ab", 1, *(2, 3), k=1, **{"j": 2})


@program()
def positional_only_and_keyword_only():
    def f(a, b=2, /, c=3, *, d, e=5):
        return a, b, c, d, e

    return f(1, d=4), f(1, 2, 3, d=4), f(1, c=9, d=8, e=7)


@program()
def positional_only_name_in_kwargs():
    def f(a, /, **kw):
        return a, kw

    return f(1, a=2)


@program()
def defaults_evaluated_once():
    def f(x, seen=[]):  # noqa: B006
        seen.append(x)
        return list(seen)

    return f(1), f(2), f.__defaults__


@program()
def default_expressions_use_definition_time():
    n = 1

    def f(x=n * 10, *, y=lambda: n):
        return x, y()

    n = 2
    return f(), f(5)


@program()
def lambda_forms():
    return (
        (lambda: 1)(),
        (lambda x, *y, z=3, **k: (x, y, z, k))(1, 2, 3, w=4),
        (lambda x=2: x**2)(),
        [f(10) for f in [lambda v, i=i: v + i for i in range(3)]],
    )


@program()
def missing_one():
    def f(a, b):
        pass

    f(1)


@program()
def missing_two():
    def f(a, b, c):
        pass

    f(1)


@program()
def missing_three():
    def f(a, b, c, d):
        pass

    f()


@program()
def missing_keyword_only():
    def f(*, a, b):
        pass

    f()


@program()
def missing_one_keyword_only():
    def f(x, *, key):
        pass

    f(1)


@program()
def too_many():
    def f(a):
        pass

    f(1, 2, 3)


@program()
def too_many_for_none():
    def f():
        pass

    f(1)


@program()
def too_many_with_defaults():
    def f(a, b=1, c=2):
        pass

    f(1, 2, 3, 4, 5)


@program()
def too_many_with_keyword_only():
    def f(a, *, k=1):
        pass

    f(1, 2, k=3)


@program()
def too_many_with_two_keyword_only():
    def f(a, b, *, k, m):
        pass

    f(1, 2, 3, k=3, m=4)


@program()
def unexpected_keyword():
    def f(a):
        pass

    f(1, zebra=2)


@program()
def multiple_values():
    def f(a, b=1):
        pass

    f(1, a=2)


@program()
def positional_only_by_keyword():
    def f(a, b, /):
        pass

    f(a=1, b=2)


@program()
def duplicate_keyword_in_double_star():
    def f(**kw):
        pass

    f(a=1, **{"a": 2})


@program()
def not_a_mapping():
    def f(**kw):
        pass

    f(**[1])


@program()
def not_an_iterable():
    def f(*args):
        pass

    f(*5)


@program()
def keywords_must_be_strings():
    def f(**kw):
        pass

    f(**{1: 2})


@program()
def not_callable():
    x = 3
    x()


@program()
def none_result_called():
    {}.get("f")(1)


@program()
def builtin_wrong_arguments():
    len(1, 2)


@program()
def method_missing_argument():
    class A:
        def m(self, x):
            pass

    A().m()


@program()
def method_extra_argument():
    class A:
        def m(self):
            pass

    A().m(1)


@program()
def function_attributes():
    def f(a, b: int = 1, *c, d: str = "x", **e) -> float:
        """Docs."""

    f.tag = "t"
    return f.__name__, f.__qualname__, f.__doc__, f.__defaults__, f.__kwdefaults__, f.__annotations__, f.tag, f.__module__


@program(10)
def recursion_factorial(n):
    return 1 if n <= 1 else n * recursion_factorial(n - 1)


@program(12)
def mutual_recursion(n):
    def even(k):
        return True if k == 0 else odd(k - 1)

    def odd(k):
        return False if k == 0 else even(k - 1)

    return even(n), odd(n)


@program(2, 3)
def ackermann(m, n):
    if m == 0:
        return n + 1
    return ackermann(m - 1, 1) if n == 0 else ackermann(m - 1, ackermann(m, n - 1))


@program(5)
def hanoi(n):
    moves = []

    def move(k, a, b, c):
        if k:
            move(k - 1, a, c, b)
            moves.append(a + c)
            move(k - 1, b, a, c)

    move(n, "A", "B", "C")
    return len(moves), moves[:5]


@program()
def infinite_recursion():
    def f(n):
        return f(n + 1)

    return f(0)


@program()
def recursion_error_caught():
    def f():
        f()

    try:
        f()
    except RecursionError as error:
        return type(error).__name__
    return "no"


@program(700)
def deep_recursion(n):
    return 0 if n == 0 else 1 + deep_recursion(n - 1)


@program()
def decorators():
    log = []

    def loud(tag):
        def decorate(f):
            @functools.wraps(f)
            def wrapper(*a, **k):
                log.append(tag)
                return f(*a, **k)

            return wrapper

        return decorate

    @loud("outer")
    @loud("inner")
    def work(x):
        "work it"
        return x * 2

    return work(4), log, work.__name__, work.__doc__, work.__wrapped__.__wrapped__(3)


@program()
def class_as_decorator():
    class Count:
        def __init__(self, f):
            self.f, self.n = f, 0

        def __call__(self, *a):
            self.n += 1
            return self.f(*a)

    @Count
    def double(x):
        return 2 * x

    return double(1) + double(2), double.n


@program()
def evaluation_order_of_calls():
    log = []

    def t(x):
        log.append(x)
        return x

    def f(*a, **k):
        return len(a) + len(k)

    (t("f") and f)(t(1), *[t(2)], t(3), k=t(4), **{"m": t(5)})
    return log


@program()
def evaluation_order_of_assignment():
    log = []

    def t(x, v):
        log.append(x)
        return v

    d = {}
    t("target", d)[t("key", 1)] = t("value", 2)
    a = t("x", [0, 0])
    a[t("i", 0)], a[t("j", 1)] = t("l", 5), t("r", 6)
    return log, d, a


@program()
def returns_many_ways():
    def nothing():
        pass

    def bare():
        return

    def early(x):
        if x:
            return "early"
        return "late"

    return nothing(), bare(), early(1), early(0)


@program()
def functions_as_values():
    def compose(*fs):
        def run(x):
            for f in fs:
                x = f(x)
            return x

        return run

    table = {"inc": lambda x: x + 1, "dbl": lambda x: x * 2}
    return compose(table["inc"], table["dbl"], str, len)(9), compose()(3)


@program()
def partial_objects():
    def f(a, b, c=0, *, d=0):
        return a, b, c, d

    g = functools.partial(f, 1, d=4)
    h = functools.partial(g, 2, c=3)
    return g(2), h(), h(d=9), functools.partial(max, 5)(3), h.func is f, h.args


@program()
def partial_error_traceback():
    def f(a):
        return a.missing

    functools.partial(f, 3)()


@program()
def bound_and_unbound_methods():
    class A:
        def m(self, x=1):
            return x

    a = A()
    bound = a.m
    return bound(3), A.m(a, 4), bound.__self__ is a, bound.__func__ is A.m, bound == a.m


@program()
def call_through_getattr():
    class A:
        def hello(self, n):
            return "hi" * n

    return getattr(A(), "hello")(2), getattr("abc", "upper")(), getattr(A(), "nope", None)


@program()
def keyword_argument_order():
    def f(**kw):
        return list(kw)

    return f(b=1, a=2, **{"d": 1, "c": 2}, z=0), list(dict(x=1, **{"w": 2}))


@program()
def argument_named_like_local():
    def f(x):
        x = x + 1

        def g(x=x):
            x += 1
            return x

        return g(), x

    return f(1)


@program()
def many_arguments():
    def f(a, b, c, d, e, g, h, i, j, k, l, m, n, o, p, q):  # noqa: E741
        return [a, b, c, d, e, g, h, i, j, k, l, m, n, o, p, q]

    return f(*range(16)), f(1, 2, 3, 4, 5, 6, 7, 8, i=9, j=1, k=2, l=3, m=4, n=5, o=6, p=7) if False else None


@program()
def code_attributes():
    def f(a, b=1, /, c=2, *d, e, **g):
        local = a
        return local

    c = f.__code__
    return c.co_argcount, c.co_posonlyargcount, c.co_kwonlyargcount, c.co_varnames, c.co_name, bool(c.co_flags & 4)
