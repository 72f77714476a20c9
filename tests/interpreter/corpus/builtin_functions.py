"""Builtins, above all those that call back Python functions."""

from tests.interpreter.corpus.kit import program


@program([3, 1, 2])
def sorting(xs):
    words = ["bb", "a", "CCC"]
    xs.sort(reverse=True)
    return sorted(words, key=len), sorted(words, key=str.lower, reverse=True), xs, sorted({"b": 1, "a": 2}), sorted([(1, "b"), (1, "a")])


@program()
def key_functions():
    people = [("Ann", 30), ("Bob", 25), ("Cid", 30)]
    return (
        sorted(people, key=lambda p: (-p[1], p[0])),
        min(people, key=lambda p: p[1]),
        max(people, key=lambda p: p[1]),
        max([], default="none"),
        min(3, 1, 2),
        max("abc"),
    )


@program()
def map_filter_reduce():
    import functools

    add = lambda a, b: a + b  # noqa: E731
    return (
        list(map(add, [1, 2], [10, 20])),
        list(filter(None, [0, 1, "", "x"])),
        list(filter(lambda v: v % 2, range(6))),
        functools.reduce(add, [1, 2, 3]),
        functools.reduce(add, [[1], [2]], []),
        list(map(str, [1, 2])),
    )


@program()
def zip_and_enumerate():
    out = [list(zip("ab", [1, 2, 3], strict=False)), list(enumerate("ab", start=5)), dict(enumerate("x")), list(zip())]
    try:
        list(zip([1], [1, 2], strict=True))
    except ValueError as e:
        out.append(str(e))
    return out


@program()
def any_all_sum():
    return any([]), all([]), any(x > 2 for x in [1, 3]), all(x > 2 for x in [1, 3]), sum([1, 2], 10), sum([[1], [2]], [])


@program()
def iter_with_sentinel():
    values = iter([1, 2, 3, 0, 4])
    return list(iter(lambda: next(values), 0)), next(values), next(values, "end")


@program()
def type_checks():
    class A:
        pass

    class B(A):
        pass

    return isinstance(B(), A), issubclass(B, (int, A)), type(B()) is B, isinstance(1, int | str), callable(A), isinstance(True, int)


@program()
def reversed_and_slices():
    return list(reversed([1, 2])), list(reversed(range(3))), "".join(reversed("ab")), list(reversed({"a": 1, "b": 2}))


@program()
def conversions():
    return int("12"), float("1e3"), str(None), list("ab"), tuple([1]), set("aa"), dict([("a", 1)]), bool([]), frozenset([1]), bytes(2), complex("1j")


@program()
def conversion_errors():
    out = []
    for f in (lambda: int("x"), lambda: float(None), lambda: dict([1]), lambda: ord("ab"), lambda: chr(-1), lambda: [].index(3)):
        try:
            f()
        except Exception as e:  # noqa: BLE001
            out.append((type(e).__name__, str(e)))
    return out


@program()
def hash_and_id():
    a = (1, 2)
    return hash(a) == hash((1, 2)), id(a) == id(a), hash("x") == hash("x")


@program()
def numeric_builtins():
    return abs(-3), divmod(7, 2), pow(2, 10), round(3.14159, 3), max(1, 2.5), min([4, 2]), sum(range(5)), bin(5), len("abc")


@program()
def dictionary_methods():
    d = {"a": 1}
    d.setdefault("b", []).append(2)
    d.update(c=3, **{"d": 4})
    return d.pop("a"), d.pop("zz", None), d.popitem(), d.get("q", 7), list(d.keys()), dict.fromkeys("xy", 0), "b" in d.keys(), d.items() >= {("c", 3)}


@program()
def set_methods():
    s = {1, 2}
    s.add(3)
    s.discard(9)
    s |= {4}
    s.update([5], (6,))
    s.remove(1)
    return s, s.pop() in range(7), frozenset(s).union([99]) > s, s.isdisjoint([100])


@program()
def list_methods_with_callbacks():
    xs = ["b", "A", "c"]
    xs.sort(key=lambda s: s.lower())
    return xs, xs.count("A"), [*map(xs.index, "bc")]


@program()
def callback_uses_closure_and_state():
    seen = []

    def key(v):
        seen.append(v)
        return -v

    return sorted([1, 3, 2], key=key), seen


@program()
def callback_raises():
    return list(map(lambda v: v.nope, [1]))


@program()
def callback_wrong_arity():
    return list(map(lambda a, b: a, [1]))


@program()
def objects_in_sorted():
    class V:
        def __init__(self, n):
            self.n = n

        def __lt__(self, o):
            return self.n < o.n

        def __repr__(self):
            return f"V{self.n}"

    return sorted([V(3), V(1), V(2)]), min(V(5), V(4)), max([V(1), V(9)])


@program()
def repr_and_str_of_objects():
    class A:
        def __repr__(self):
            return "A()"

    class B(A):
        def __str__(self):
            return "b"

    return repr(A()), str(A()), str(B()), repr([B()]), f"{B()} {B()!r}", print(B(), A())


@program()
def vars_dir_getattr():
    class A:
        x = 1

        def __init__(self):
            self.y = 2

    a = A()
    return vars(a), "x" in dir(a), getattr(a, "y"), [n for n in vars(A) if not n.startswith("__")]


@program()
def range_behaviour():
    r = range(2, 20, 3)
    return list(r), len(r), r[2], r[-1], 8 in r, 9 in r, r.index(11), r[1:3], list(range(5, 0, -2)), r == range(2, 19, 3)


@program()
def exec_built_function_as_callback():
    space = {}
    exec("def double(x):\n    return x * 2", space)
    return list(map(space["double"], [1, 2])), space["double"](4)


@program()
def next_and_iter_of_classes():
    class Down:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            n = self.n
            while n > 0:
                yield n
                n -= 1

    it = iter(Down(3))
    return next(it), list(it), next(it, None), sum(Down(4)), tuple(Down(2)), set(Down(2)), dict(zip(Down(2), Down(2), strict=True))


@program()
def isinstance_with_abcs():
    import collections.abc as abc

    class Sized:
        def __len__(self):
            return 0

    return isinstance(Sized(), abc.Sized), isinstance([], abc.Sequence), isinstance({}, abc.Mapping), isinstance(iter([]), abc.Iterator)


@program()
def super_and_type_calls():
    class A:
        def f(self):
            return "A.f"

    class B(A):
        def f(self):
            return "B.f"

    b = B()
    return super(B, b).f(), type(b).f(b), type(b).__base__.f(b), super(B, B).f(b)


@program()
def input_is_not_read():
    import io
    import sys

    old, sys.stdin = sys.stdin, io.StringIO("line one\nline two\n")
    try:
        return input(), sys.stdin.readline()
    finally:
        sys.stdin = old


@program()
def copy_protocols():
    import copy

    class A:
        def __init__(self, v):
            self.v = v

        def __deepcopy__(self, memo):
            return A(copy.deepcopy(self.v, memo) + ["deep"])

        def __copy__(self):
            return A([*self.v, "shallow"])

    a = A([1])
    return copy.copy(a).v, copy.deepcopy(a).v, copy.deepcopy({"k": [a]})["k"][0].v
