"""The standard library in Python: dataclasses, enums, namedtuples, functools, collections ..."""

import collections
import dataclasses
import enum
import functools
import itertools
from typing import NamedTuple

from tests.interpreter.corpus.kit import program


@program()
def dataclass_basics():
    @dataclasses.dataclass
    class Item:
        name: str
        price: float = 1.0
        tags: list = dataclasses.field(default_factory=list)

        def total(self, n=2):
            return self.price * n

    a, b = Item("a"), Item("b", 2.5, ["t"])
    return a, b, a == Item("a"), a != b, b.total(), dataclasses.asdict(b), dataclasses.replace(a, name="z"), [f.name for f in dataclasses.fields(a)]


@program()
def dataclass_frozen_and_ordered():
    @dataclasses.dataclass(frozen=True, order=True)
    class P:
        x: int
        y: int = dataclasses.field(default=0, compare=False)

    p = P(1)
    try:
        p.x = 5
    except dataclasses.FrozenInstanceError as e:
        return str(e), p < P(2), hash(p) == hash(P(1, 9)), sorted([P(3), P(1)])


@program()
def dataclass_post_init_and_inheritance():
    @dataclasses.dataclass
    class A:
        x: int
        double: int = dataclasses.field(init=False)

        def __post_init__(self):
            self.double = self.x * 2

    @dataclasses.dataclass
    class B(A):
        y: int = 3
        k: dataclasses.KW_ONLY = None
        z: int = 4

    return A(2), B(1), B(1, 2, z=9)


@program()
def dataclass_missing_argument():
    @dataclasses.dataclass
    class A:
        x: int

    A()


@program()
def dataclass_slots():
    @dataclasses.dataclass(slots=True)
    class A:
        x: int = 1

    a = A(5)
    return a, hasattr(a, "__dict__"), A.__slots__


@program()
def named_tuples():
    P = collections.namedtuple("P", "x y", defaults=[0])

    class Q(NamedTuple):
        a: int
        b: str = "b"

        def both(self):
            return f"{self.a}{self.b}"

    p = P(1)
    x, y = p
    return p, p._replace(x=5), p._asdict(), x + y, Q(1), Q(2, "c").both(), P._fields, p == (1, 0), P.__module__ == __name__


@program()
def enums():
    class Color(enum.Enum):
        RED = 1
        GREEN = 2
        ALIAS = 1

        def describe(self):
            return f"{self.name}:{self.value}"

        @classmethod
        def first(cls):
            return next(iter(cls))

    class Flags(enum.Flag):
        A = enum.auto()
        B = enum.auto()

    class Level(enum.IntEnum):
        LOW = 1
        HIGH = 5

    return (
        Color.RED, Color["GREEN"], Color(1), Color.ALIAS is Color.RED, [c.name for c in Color], Color.GREEN.describe(), Color.first(),
        Flags.A | Flags.B, Flags.A in (Flags.A | Flags.B), Level.HIGH > 3, Level.LOW + 1, isinstance(Color.RED, Color),
    )  # fmt: skip


@program()
def enum_invalid_value():
    class E(enum.Enum):
        A = 1

    return E(7)


@program()
def enum_custom_new():
    class Planet(enum.Enum):
        EARTH = (5.97, 6.37)
        MARS = (0.64, 3.39)

        def __init__(self, mass, radius):
            self.mass, self.radius = mass, radius

        @property
        def ratio(self):
            return round(self.mass / self.radius, 2)

    return [(p.name, p.ratio) for p in Planet], Planet((0.64, 3.39)).name


@program()
def string_enum():
    class Mode(str, enum.Enum):
        READ = "r"

        @staticmethod
        def parse(text):
            return Mode(text)

    return Mode.parse("r") == "r", Mode.READ.upper(), Mode.READ in {"r": 1}


@program()
def lru_cache():
    calls = []

    @functools.lru_cache(maxsize=None)
    def fib(n):
        calls.append(n)
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return fib(15), len(calls), fib.cache_info().hits, fib.__wrapped__.__name__


@program()
def functools_cmp_to_key():
    def compare(a, b):
        return (a > b) - (a < b) if len(a) == len(b) else len(a) - len(b)

    return sorted(["bb", "a", "aa", "c"], key=functools.cmp_to_key(compare))


@program()
def collections_types():
    counter = collections.Counter("abracadabra")
    groups = collections.defaultdict(list)
    for k, v in [("a", 1), ("b", 2), ("a", 3)]:
        groups[k].append(v)
    queue = collections.deque([1, 2, 3], maxlen=3)
    queue.append(4)
    queue.appendleft(0)
    ordered = collections.OrderedDict(b=1, a=2)
    ordered.move_to_end("b")
    chain = collections.ChainMap({"x": 1}, {"x": 2, "y": 3})
    return counter.most_common(2), counter - collections.Counter("aab"), dict(groups), queue, list(ordered), chain["x"], chain["y"]


@program()
def user_collections():
    class Lower(collections.UserDict):
        def __setitem__(self, k, v):
            super().__setitem__(k.lower(), v)

    class Positive(collections.UserList):
        def append(self, v):
            if v > 0:
                super().append(v)

    d, xs = Lower(A=1), Positive([1])
    d["B"] = 2
    xs.append(-1)
    xs.append(5)
    return dict(d), list(xs), "a" in d, len(xs)


@program()
def default_dict_with_lambda():
    tree = lambda: collections.defaultdict(tree)  # noqa: E731
    t = tree()
    t["a"]["b"]["c"] = 1
    counts = collections.defaultdict(lambda: 10)
    counts["x"] += 1
    return t["a"]["b"]["c"], list(t), dict(counts)


@program()
def itertools_tools():
    return (
        list(itertools.combinations("abc", 2)), list(itertools.permutations([1, 2])), list(itertools.zip_longest("ab", [1], fillvalue=0)),
        list(itertools.pairwise([1, 2, 3])), list(itertools.dropwhile(lambda x: x < 2, [1, 2, 1])), list(itertools.compress("abc", [1, 0, 1])),
        list(itertools.filterfalse(lambda x: x % 2, range(5))), [list(g) for g in itertools.tee([1, 2])], next(itertools.count(5, 2)),
        list(itertools.islice(itertools.cycle("ab"), 3)), list(itertools.repeat(1, 2)), list(itertools.accumulate([1, 2, 3], initial=10)),
    )  # fmt: skip


@program()
def heap_and_bisect():
    import bisect
    import heapq

    heap = []
    for v in (5, 1, 4):
        heapq.heappush(heap, (v, str(v)))
    xs = [1, 3, 5]
    bisect.insort(xs, 4)
    return [heapq.heappop(heap) for _ in range(3)], xs, bisect.bisect(xs, 3), heapq.nlargest(2, xs, key=lambda v: -v)


@program()
def fractions_and_decimals():
    from decimal import Decimal
    from fractions import Fraction

    return Fraction(1, 3) + Fraction(1, 6), Fraction("0.25") * 3, str(Decimal("1.10") + Decimal("2.20")), Fraction(7, 2) // 1, 1 / Fraction(2)


@program()
def json_with_hooks():
    import json

    class Encoder(json.JSONEncoder):
        def default(self, o):
            return sorted(o) if isinstance(o, set) else super().default(o)

    text = json.dumps({"a": {2, 1}, "b": [None, True]}, cls=Encoder, sort_keys=True)
    return text, json.loads(text, object_hook=lambda d: list(d)), json.dumps([1, {"x": 2}], indent=1)


@program()
def json_error():
    import json

    return json.dumps({"a": object})


@program()
def dataclass_like_by_hand():
    def record(*fields):
        def init(self, *values):
            for f, v in zip(fields, values, strict=True):
                setattr(self, f, v)

        def show(self):
            return f"{type(self).__name__}({', '.join(f'{f}={getattr(self, f)!r}' for f in fields)})"

        return lambda cls: type(cls.__name__, (cls,), {"__init__": init, "__repr__": show})

    @record("x", "y")
    class P:
        pass

    return P(1, "two")


@program()
def context_variables():
    import contextvars

    v = contextvars.ContextVar("v", default=0)

    def work(n):
        v.set(n)
        return v.get()

    ctx = contextvars.copy_context()
    return ctx.run(work, 5), v.get(), ctx[v]


@program()
def threads():
    import threading

    results = []
    ts = [threading.Thread(target=lambda n=n: results.append(n * 2)) for n in range(3)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    return sorted(results)


@program()
def pickling():
    import pickle

    data = {"a": [1, (2, 3)], "b": {4}}
    return pickle.loads(pickle.dumps(data)), pickle.loads(pickle.dumps(len)) is len


@program()
def types_module():
    import types

    ns = types.SimpleNamespace(a=1)
    ns.b = 2
    new_class = types.new_class("Made", (dict,), {}, lambda d: d.update(v=5))
    method = types.MethodType(lambda self, x: (self, x), "me")
    return ns, new_class.v, method(3), types.MappingProxyType({"k": 1})["k"], isinstance(lambda: 0, types.FunctionType)


@program()
def inspect_module():
    import inspect

    def f(a, /, b=1, *args, c, d: int = 2, **kw) -> str: ...

    def g():
        yield

    bound = inspect.signature(f).bind(1, c=3)
    bound.apply_defaults()
    return str(inspect.signature(f)), bound.arguments, inspect.isgeneratorfunction(g), inspect.isfunction(f), inspect.getsource(g).strip()[:7]


@program()
def current_frame_information():
    import inspect
    import sys

    def who():
        return sys._getframe().f_code.co_name, sys._getframe(1).f_code.co_name, inspect.currentframe().f_code.co_name

    return who(), sys._getframe().f_globals is globals(), "who" in sys._getframe().f_locals


@program()
def typing_helpers():
    import typing

    class Movie(typing.TypedDict):
        name: str
        year: int

    m: Movie = {"name": "x", "year": 1}
    return m, typing.get_type_hints(Movie), typing.cast(int, "s"), typing.Optional[int], typing.get_args(dict[str, int])


@program()
def operator_functions():
    import operator

    table = {"+": operator.add, "neg": operator.neg, "in": operator.contains}
    return table["+"](1, 2), table["neg"](3), table["in"]([1], 1), operator.iadd([1], [2]), operator.index(5)


@program()
def string_io_and_csv():
    import csv
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, ["a", "b"], lineterminator="\n")
    writer.writeheader()
    writer.writerow({"a": 1, "b": "x,y"})
    return out.getvalue(), list(csv.DictReader(io.StringIO(out.getvalue())))


@program()
def seeded_random():
    import random

    r = random.Random(7)
    xs = list(range(5))
    r.shuffle(xs)
    return xs, r.randint(1, 10), round(r.random(), 6), r.choice("abc"), r.sample(range(10), 2)


@program()
def argparse_program():
    import argparse

    p = argparse.ArgumentParser(prog="x")
    p.add_argument("n", type=int)
    p.add_argument("--flag", action="store_true")
    p.add_argument("--name", default="d")
    a = p.parse_args(["3", "--name", "q"])
    return a.n, a.flag, a.name


@program()
def logging_output():
    import io
    import logging

    stream = io.StringIO()
    logger = logging.Logger("corpus")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.warning("w %d", 1)
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("failed")
    text = stream.getvalue()
    return text.splitlines()[:2], "ZeroDivisionError" in text


@program()
def pathlib_paths():
    from pathlib import PurePosixPath

    p = PurePosixPath("/a/b") / "c.txt"
    return p, p.parent, p.suffix, p.stem, p.with_suffix(".md"), p.parts, p.relative_to("/a")
