"""Free variables, nonlocal, global and scopes."""

from tests.interpreter.corpus.kit import program

COUNTER = 10


@program(5)
def closure_sees_later_value(n):
    k = n

    def add(x, y=1, *, z=0):
        return x + y + z + k

    k += 1
    return add(1), add(1, 2, z=3), list(map(add, [1, 2]))


@program()
def nonlocal_counter():
    def counter():
        n = 0

        def bump(by=1):
            nonlocal n
            n += by
            return n

        def read():
            return n

        return bump, read

    bump, read = counter()
    other, _ = counter()
    bump()
    bump(5)
    other()
    return read(), bump(), other()


@program()
def nonlocal_through_levels():
    x = 1

    def a():
        def b():
            nonlocal x
            x += 10

            def c():
                nonlocal x
                x *= 2

            c()

        b()

    a()
    return x


@program()
def late_binding_in_loop():
    fs = [lambda: i for i in range(3)]
    gs = []
    for j in range(3):
        gs.append(lambda: j)  # noqa: B023
    hs = [lambda j=j: j for j in range(3)]
    return [f() for f in fs], [g() for g in gs], [h() for h in hs]


@program()
def global_read_and_write():
    global COUNTER
    before = COUNTER
    COUNTER += 1
    after = COUNTER
    COUNTER = 10
    return before, after


@program()
def global_delete_and_missing():
    global TEMPORARY
    TEMPORARY = 3
    value = TEMPORARY
    del TEMPORARY
    try:
        TEMPORARY
    except NameError as error:
        return value, str(error), error.name


@program()
def global_del_missing():
    global NOT_THERE_AT_ALL
    del NOT_THERE_AT_ALL


@program()
def name_error():
    return undefined_thing  # noqa: F821


@program()
def unbound_free_variable():
    def f():
        return later

    f()
    later = 1
    return later


@program()
def unbound_cell_of_own():
    if False:
        x = 1

    def g():
        return x

    return x


@program()
def del_cell():
    x = 1

    def g():
        return x

    first = g()
    del x
    try:
        g()
    except NameError as error:
        return first, str(error)


@program()
def del_cell_twice():
    x = 1

    def g():
        return x

    del x
    del x


@program()
def closure_contents():
    a, b = 1, [2]

    def f():
        return a, b

    return f.__code__.co_freevars, [c.cell_contents for c in f.__closure__], f.__closure__[1].cell_contents is b


@program(4)
def argument_as_cell(n):
    def inner():
        nonlocal n
        n *= 2
        return n

    return inner(), n, inner(), n


@program()
def star_arguments_as_cells():
    def f(*args, **kw):
        return lambda: (args, kw)

    return f(1, 2, x=3)()


@program()
def closure_over_comprehension_variable():
    return [f() for f in [lambda: (x, y) for x in range(2) for y in "ab"]]


@program()
def shadowing():
    x = "outer"

    def f():
        x = "f"

        class C:
            x = "class"

            def m(self):
                return x

        return C.x, C().m(), x

    return f(), x


@program()
def class_body_scope():
    y = "function"

    class A:
        y = y + "!"
        z = [y for _ in range(2)]

    return A.y, A.z


@program()
def builtins_shadowed_locally():
    len = lambda x: "mine"  # noqa: A001, E731
    return len([1]), max([1, 2])


@program()
def memoize_closure():
    def memo(f):
        cache = {}

        def wrapper(n):
            if n not in cache:
                cache[n] = f(n)
            return cache[n]

        wrapper.cache = cache
        return wrapper

    @memo
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return fib(30), len(fib.cache)


@program()
def accumulator_generator_closure():
    total = 0

    def feed(values):
        nonlocal total
        for v in values:
            total += v
            yield total

    return list(feed([1, 2, 3])), total


@program()
def locals_and_globals_builtins():
    a = 1
    b = [a]

    def inner():
        c = a + 1
        return sorted(locals().items())

    return sorted(locals()), inner(), "COUNTER" in globals(), globals()["COUNTER"], sorted(vars())[:2], dir()[0]


@program()
def eval_and_exec():
    x = 5
    space = {"y": 2}
    exec("z = y * 10\ndef f(n): return n + z", space)
    return eval("x + 1"), eval("y + z", space), space["f"](1), eval("a*b", {"a": 2}, {"b": 3}), eval(compile("7", "e", "eval"))


@program()
def exec_in_local_namespace():
    names = {}
    exec("import math\nclass K:\n    v = math.floor(2.5)\nfor i in range(3): last = i", {}, names)
    return names["K"].v, names["last"], sorted(n for n in names)


@program()
def eval_error_traceback():
    return eval("1 / zero", {"zero": 0})


@program()
def exec_syntax_error():
    exec("x = = 1")


@program()
def exec_star_import():
    names = {}
    exec("from math import *\nr = floor(pi)", names)
    return names["r"], "sqrt" in names


@program()
def lambda_in_default_of_nested():
    def outer(k):
        return [lambda x, f=(lambda v: v * k): f(x) for k in range(k)]

    return [f(3) for f in outer(4)]


@program()
def recursive_closure():
    def make():
        def fact(n):
            return 1 if n < 2 else n * fact(n - 1)

        return fact

    return make()(6)


@program()
def currying():
    def curry(f, n, got=()):
        return f(*got) if n == 0 else lambda x: curry(f, n - 1, (*got, x))

    return curry(lambda a, b, c: (a, b, c), 3)(1)(2)(3)


@program()
def private_name_mangling():
    class A:
        __secret = 1

        def __init__(self):
            self.__x = 2

        def get(self):
            return self.__x + A.__secret

    a = A()
    return a.get(), sorted(vars(a)), hasattr(a, "__x"), a._A__x


@program()
def function_globals_through_exec():
    space = {"__name__": "elsewhere", "v": 1}
    exec("def read(): return v\ndef write(n):\n    global v\n    v = n", space)
    space["write"](8)
    return space["read"](), space["v"], space["read"].__module__


@program()
def locals_are_written_to():
    k, gone = 2, 1
    names = locals()
    names["added"], names["k"] = 3, 7
    before = sorted(names)
    del gone
    again = locals()
    exec("put = k + 1")

    class Body:
        locals()["by_name"] = 5
        seen = "by_name" in locals()

    def inner():
        k
        return sorted(locals())

    return k, names["added"], before, sorted(again), again is names, again["k"], "put" in locals(), Body.by_name, Body.seen, inner()
