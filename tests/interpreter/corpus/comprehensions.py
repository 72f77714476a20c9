"""List, set, dict comprehensions and generator expressions."""

from tests.interpreter.corpus.kit import program


@program(6)
def all_kinds(n):
    return [i * j for i in range(n) for j in range(i) if j], {i: i + 1 for i in range(n)}, {i % 3 for i in range(n)}


@program()
def nested():
    return [[x * y for x in range(3)] for y in range(3)], [x for row in [[1, 2], [3]] for x in row]


@program()
def several_conditions():
    return [x for x in range(50) if x % 2 if x % 3 if x > 10], [x if x % 2 else -x for x in range(4)]


@program()
def variable_does_not_leak():
    x = "outer"
    ys = [x for x in range(3)]
    zs = {x: x for x in "ab"}
    return x, ys, zs


@program()
def variable_hidden_when_unbound():
    [q for q in range(2)]
    try:
        return q  # noqa: F821
    except NameError as e:
        return type(e).__name__


@program()
def variable_restored_after_error():
    x = 5
    try:
        [1 // x for x in (1, 0)]
    except ZeroDivisionError:
        pass
    return x


@program()
def error_inside_comprehension():
    def f(v):
        return 10 // v

    return [f(v) for v in (5, 2, 0)]


@program()
def error_inside_generator_expression():
    return sum(10 // v for v in (5, 0))


@program()
def comprehension_over_arguments():
    def f(*args, **kw):
        return [a + 1 for a in args], {k: v for k, v in kw.items() if v}

    return f(1, 2, a=0, b=3)


@program()
def walrus_in_comprehension():
    total = 0
    sums = [total := total + v for v in range(5)]
    has_large = any((hit := v) > 3 for v in [1, 5, 9])
    return sums, total, has_large, hit


@program()
def generator_expression_is_lazy():
    log = []

    def note(v):
        log.append(v)
        return v

    g = (note(v) for v in range(5))
    first = next(g)
    return first, log[:], next(g), log, sum(g)


@program()
def first_iterable_is_evaluated_at_once():
    def source():
        raise RuntimeError("at once")

    try:
        (x for x in source())
    except RuntimeError as e:
        return str(e)


@program()
def comprehension_in_class_body():
    class A:
        xs = [1, 2]
        ys = [x * 2 for x in xs]
        zs = {k: v for k, v in zip("ab", xs, strict=True)}

    return A.ys, A.zs, hasattr(A, "x")


@program()
def comprehension_unpacking_targets():
    pairs = [(1, (2, 3)), (4, (5, 6))]
    return [a + b + c for a, (b, c) in pairs], [x for x, *_ in ["abc", "de"]], {k: v for k, *v in pairs}


@program()
def comprehension_with_closures():
    fs = {n: (lambda m, n=n: m * n) for n in range(3)}
    k = 10
    return [fs[n](5) + k for n in fs], [(lambda: x + k)() for x in range(2)]


@program()
def nested_scopes_with_same_name():
    x = [1, 2]
    return [[x for x in x] for x in [x, [3]]], x


@program()
def set_operations():
    a, b = {x for x in range(5)}, {x * 2 for x in range(4)}
    return a & b, a | b, a - b, a ^ b, a <= b, {1} < a, a.isdisjoint({9})


@program()
def dict_comprehension_order_of_evaluation():
    log = []

    def t(v):
        log.append(v)
        return v

    return {t(k): t(k * 10) for k in (1, 2)}, log


@program()
def unhashable_in_set():
    return {[x] for x in range(2)}


@program()
def transposition_and_flatten():
    m = [[1, 2, 3], [4, 5, 6]]
    return [list(c) for c in zip(*m, strict=True)], [x for r in m for x in r if x % 2], sum(sum(r) for r in m)


@program()
def primes_by_comprehension():
    return [n for n in range(2, 40) if all(n % d for d in range(2, int(n**0.5) + 1))]


@program()
def comprehension_reads_global_and_builtin():
    return [len(str(program)) > 0 for _ in range(1)], [abs(v) for v in (-1, 2)]


@program()
def generator_expression_closed_over_loop():
    gs = [(x * k for x in (1, 2)) for k in range(3)]
    return [list(g) for g in gs]


@program()
def method_calls_in_comprehension():
    class A:
        def __init__(self):
            self.k = 3

        def f(self, v):
            return self.k * v

        def run(self):
            return [self.f(v) for v in range(3) if self.f(v) != 3], {self.k for _ in "ab"}

    return A().run()


@program()
def conditional_iterables():
    flag = True
    return [x for x in ([1, 2] if flag else [3])], [x for x in (lambda: range(2))()]


@program()
def lambda_in_condition():
    return [x for x in range(6) if (lambda v: v % 2)(x)], list(filter(lambda v: v > 2, (y for y in range(5))))
