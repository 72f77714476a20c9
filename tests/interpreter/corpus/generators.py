"""Generators: yield, send, throw, close, yield from."""

import itertools

from tests.interpreter.corpus.kit import program


@program(4)
def simple_generator(n):
    def count(k):
        while k:
            yield k
            k -= 1

    return list(count(n)), sum(count(n)), max(count(n)), 3 in count(n), dict(zip("ab", count(2), strict=True))


@program()
def generator_is_returned():
    def g():
        yield 1
        yield 2

    generator = g()
    return type(generator).__name__, generator.__name__, generator.__qualname__, iter(generator) is generator, list(generator), list(generator)


@program()
def generator_as_result():
    yield 1
    print("between")
    yield 2


@program()
def send_values():
    def average():
        total = n = 0
        value = None
        while True:
            got = yield value
            total += got
            n += 1
            value = total / n

    a = average()
    next(a)
    return [a.send(v) for v in (10, 20, 60)]


@program()
def send_to_unstarted():
    def g():
        yield 1

    g().send(5)


@program()
def throw_caught_inside():
    def g():
        while True:
            try:
                yield "ready"
            except ValueError as e:
                yield f"caught {e}"

    it = g()
    return next(it), it.throw(ValueError("v")), next(it), it.throw(ValueError)


@program()
def throw_not_caught():
    def g():
        yield 1
        yield 2

    it = g()
    next(it)
    it.throw(KeyError("thrown"))


@program()
def throw_into_finished():
    def g():
        yield 1

    it = g()
    list(it)
    try:
        it.throw(ValueError("late"))
    except ValueError as e:
        return str(e), next(it, "done")


@program()
def close_runs_finally():
    log = []

    def g():
        try:
            yield 1
            yield 2
        except GeneratorExit:
            log.append("exit")
            raise
        finally:
            log.append("finally")

    it = g()
    next(it)
    it.close()
    it.close()
    return log, list(it)


@program()
def close_ignored():
    def g():
        try:
            yield 1
        except GeneratorExit:
            yield "ignored"

    it = g()
    next(it)
    try:
        it.close()
    except RuntimeError as e:
        return str(e), list(it)


@program()
def dropped_generator_runs_finally():
    log = []

    def g():
        try:
            yield 1
        finally:
            log.append("cleaned")

    it = g()
    next(it)
    del it
    return log


@program()
def return_value_of_generator():
    def g():
        yield 1
        return "result"

    it = g()
    next(it)
    try:
        next(it)
    except StopIteration as stop:
        return stop.value, stop.args


@program()
def yield_from_collects_result():
    def inner(n):
        for i in range(n):
            yield i
        return n * 100

    def outer():
        a = yield from inner(2)
        b = yield from inner(1)
        yield a + b
        return "end"

    def top():
        r = yield from outer()
        yield r

    return list(top())


@program()
def yield_from_iterables():
    def g():
        yield from [1, 2]
        yield from "ab"
        yield from range(2)
        yield from {"k": 1}
        x = yield from ()
        yield x

    return list(g())


@program()
def yield_from_passes_sent_values():
    def inner():
        got = []
        while (x := (yield len(got))) is not None:
            got.append(x)
        return got

    def outer():
        result = yield from inner()
        yield result

    it = outer()
    return [next(it), it.send("a"), it.send("b"), it.send(None)]


@program()
def yield_from_passes_thrown():
    log = []

    def inner():
        try:
            yield 1
        except ValueError as e:
            log.append(str(e))
            yield "handled"
        return "inner result"

    def outer():
        r = yield from inner()
        log.append(r)
        yield "outer"

    it = outer()
    return next(it), it.throw(ValueError("x")), next(it), log


@program()
def yield_from_throw_ends_inner():
    def inner():
        try:
            yield 1
        except KeyError:
            return "stopped"

    def outer():
        r = yield from inner()
        yield r

    it = outer()
    next(it)
    return it.throw(KeyError("k"))


@program()
def yield_from_uncaught_throw():
    def inner():
        yield 1

    def outer():
        yield from inner()

    it = outer()
    next(it)
    it.throw(OSError("deep"))


@program()
def yield_from_outer_catches():
    def inner():
        yield 1

    def outer():
        try:
            yield from inner()
        except ValueError as e:
            yield ("outer", str(e))

    it = outer()
    next(it)
    return it.throw(ValueError("v"))


@program()
def yield_from_close_inner():
    log = []

    def inner():
        try:
            yield 1
        finally:
            log.append("inner")

    def outer():
        try:
            yield from inner()
        finally:
            log.append("outer")

    it = outer()
    next(it)
    it.close()
    return log


@program()
def yield_from_plain_iterator_throw():
    def outer():
        try:
            yield from iter([1, 2])
        except ValueError:
            yield "caught outside"

    it = outer()
    next(it)
    return it.throw(ValueError)


@program()
def yield_from_object_with_send():
    class Inner:
        def __init__(self):
            self.n = 0

        def __iter__(self):
            return self

        def __next__(self):
            return "next"

        def send(self, v):
            if v == "stop":
                raise StopIteration("finished")
            return ("sent", v)

        def throw(self, *e):
            return ("thrown", type(e[0]).__name__)

    def g():
        r = yield from Inner()
        yield r

    it = g()
    return next(it), it.send(3), it.throw(ValueError("x")), it.send("stop")


@program()
def yield_from_non_iterable():
    def g():
        yield from 5

    list(g())


@program()
def stop_iteration_inside():
    def g():
        yield 1
        raise StopIteration("oops")

    return list(g())


@program()
def next_exhausted_inside():
    def g(it):
        while True:
            yield next(it)

    return list(g(iter([1, 2])))


@program()
def error_in_generator_body():
    def g():
        yield 1
        yield 1 // 0

    for _ in g():
        pass


@program()
def generator_already_executing():
    def g():
        yield next(it)

    it = g()
    next(it)


@program()
def infinite_generators():
    def naturals():
        n = 0
        while True:
            yield n
            n += 1

    def take(n, it):
        for _ in range(n):
            yield next(it)

    evens = (x for x in naturals() if x % 2 == 0)
    return list(take(3, evens)), list(itertools.islice(naturals(), 2, 8, 3)), list(itertools.takewhile(lambda v: v < 3, naturals()))


@program()
def pipeline():
    def read(text):
        yield from text.split()

    def lengths(words):
        for w in words:
            yield w, len(w)

    def longer(pairs, n):
        return (w for w, k in pairs if k > n)

    return list(longer(lengths(read("a quick brown fox is it")), 2))


@program()
def tree_walk():
    class Tree:
        def __init__(self, v, left=None, right=None):
            self.v, self.left, self.right = v, left, right

        def __iter__(self):
            if self.left:
                yield from self.left
            yield self.v
            if self.right:
                yield from self.right

    return list(Tree(4, Tree(2, Tree(1)), Tree(6, Tree(5))))


@program()
def permutations_by_recursion():
    def perms(xs):
        if not xs:
            yield []
        for i, x in enumerate(xs):
            for rest in perms(xs[:i] + xs[i + 1 :]):
                yield [x, *rest]

    return ["".join(p) for p in perms("abc")]


@program()
def queens():
    def solve(n, row=0, columns=()):
        if row == n:
            yield columns
        for c in range(n):
            if all(c != k and abs(c - k) != row - r for r, k in enumerate(columns)):
                yield from solve(n, row + 1, (*columns, c))

    return list(solve(5))


@program()
def exception_state_in_generators():
    import sys

    def g():
        yield sys.exc_info()[0]
        try:
            raise KeyError("inner")
        except KeyError:
            yield sys.exc_info()[0]
        yield sys.exc_info()[0]

    it = g()
    out = [next(it)]
    try:
        raise ValueError("outer")
    except ValueError:
        out.append(next(it))
        out.append(sys.exc_info()[0])
    out.append(next(it))
    return [x and x.__name__ for x in out]


@program()
def generator_holds_its_handled_exception():
    def g():
        try:
            raise ValueError("first")
        except ValueError:
            yield 1
            raise KeyError("second")

    it = g()
    next(it)
    next(it)


@program()
def generator_reraises_after_yield():
    def g():
        try:
            1 / 0
        except ZeroDivisionError:
            yield "handling"
            raise

    it = g()
    next(it)
    next(it)


@program()
def generator_with_arguments_and_closure():
    k = 3

    def g(*xs, scale=1):
        for x in xs:
            yield x * scale + k

    return list(g(1, 2, scale=10)), [*g()]


@program()
def generator_methods():
    class Repeat:
        def __init__(self, v, n):
            self.v, self.n = v, n

        def __iter__(self):
            for _ in range(self.n):
                yield self.v

        def twice(self):
            yield from self
            yield from self

    r = Repeat("x", 2)
    return list(r), list(r.twice()), "".join(r)


@program()
def unpack_from_generator():
    def g():
        yield 1
        yield 2
        yield 3

    a, b, c = g()
    first, *rest = g()
    return a, b, c, first, rest, [*g(), *g()], max(*g())


@program()
def lambda_generator():
    f = lambda: (yield)  # noqa: E731
    it = f()
    next(it)
    try:
        it.send("v")
    except StopIteration as s:
        return s.value


@program()
def yield_as_expression():
    def g():
        x = (yield "a") or "default"
        y = [(yield x), (yield "c")]
        yield {"k": (yield y)}

    it = g()
    return next(it), it.send(None), it.send(1), it.send(2), it.send("v")


@program()
def itertools_over_generators():
    def g(n):
        yield from range(n)

    return (
        list(itertools.chain(g(2), g(3))),
        list(itertools.accumulate(g(4), lambda a, b: a * 2 + b)),
        [(k, list(v)) for k, v in itertools.groupby(g(6), key=lambda x: x // 2)],
        list(itertools.starmap(lambda a, b: a - b, zip(g(3), g(3), strict=True))),
        list(itertools.product(g(2), repeat=2)),
    )


@program()
def coroutine_style_broadcast():
    out = []

    def sink(name):
        while True:
            out.append((name, (yield)))

    def broadcast(*targets):
        while True:
            v = yield
            for t in targets:
                t.send(v)

    sinks = [sink("a"), sink("b")]
    for s in sinks:
        next(s)
    b = broadcast(*sinks)
    next(b)
    b.send(1)
    b.send(2)
    return out


@program()
def dropped_generator_is_closed():
    log = []

    def numbers():
        try:
            yield from range(3)
        finally:
            log.append("closed")

    def dropped(error):
        generator = numbers()
        try:
            for _ in generator:
                if error:
                    raise error
                break
        except ValueError:
            log.append("handled")

    dropped(None)
    dropped(ValueError(1))
    return log
