"""Generated Python objects, what a program may read of them, and the mutations of everything that can be reached.

`World` writes the text of a module that defines classes and values, executes it, and looks at the live objects:
`walk` names every reachable value by an expression, `read` gives an expression over one, `mutation` a statement that
changes one. Texts alone make a program; the live objects are used to choose them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import random
import sys
import types
import warnings
import weakref
from typing import Any

import numpy as np
import torch

from tests.properties import library_objects
from tests.properties.compared import MODULE

PRELUDE = (
    f"{library_objects.IMPORTS}\n"
    + """
import array, bisect, collections, contextvars, copy, dataclasses, datetime, decimal, enum, fractions, functools
import heapq, inspect, itertools, json, math, operator, pathlib, pickle, pprint, random, re, statistics, string
import textwrap, traceback, types, typing, weakref
import numpy as np
import torch
from torch import nn
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5
class Colour(enum.Enum):
    RED = 1
    BLUE = 'b'
class I(int): pass
class S(str): pass
class L(list): pass
class D(dict): pass
class Pair(typing.NamedTuple):
    a: object
    b: object = 2
class Holds:
    def __init__(self, name): self.name = name
    def __get__(self, o, kind=None): return self if o is None else o.__dict__.get(self.name, 7)
class Settable(Holds):
    def __set__(self, o, v): o.__dict__[self.name] = v
def adds(k):
    def inner(v=1, *rest, w=2): return v + k
    return inner
def numbers(k):
    for i in range(3): yield i + k
"""
)

LEAVES = [
    "0", "1", "2", "3", "-1", "5", "True", "False", "0.5", "2.0", "1.0", "-0.0", "'a'", "'b'", "'k'", "''", "None",
    "b'ab'", "1j",
    "torch.tensor([1.0, 2.0, 3.0])", "torch.ones(2, 3)", "torch.arange(3)", "torch.tensor(2.0)", "torch.tensor(1)",
    "nn.Parameter(torch.ones(3))", "torch.ones(3, requires_grad=True)", "Level.LOW", "Colour.RED", "np.float32(1.5)",
    "np.arange(3.0)", "np.array([[1, 2], [3, 4]])", "np.int64(2)", "range(3)", "slice(0, 2)", "torch.float64",
    "torch.device('cpu')", "fractions.Fraction(1, 2)", "decimal.Decimal('1.5')", "datetime.date(2020, 1, 2)", "...",
    "torch.Size([2, 3])", "pathlib.PurePosixPath('a/b')", "I(3)", "S('a')", "float('nan')", "1000",
]  # fmt: skip
NUMBERS = LEAVES[:12]
KEYS = ["'a'", "'b'", "'k'", "0", "1", "'c'", "(1, 'a')", "None", "2.5"]
FEATURES = {
    "m": "def m(self, v=1): return self.a if v else self.b",
    "p": "@property\ndef p(self): return self.b",
    "q": "@property\ndef q(self): return self.b\n@q.setter\ndef q(self, v): self.b = v",
    "cp": "@functools.cached_property\ndef cp(self): return self.a",
    "lc": "@functools.lru_cache\ndef lc(self, v=1): return (self.a, v)",
    "cm": "@classmethod\ndef cm(cls, v=0): return cls.k",
    "sm": "@staticmethod\ndef sm(v=2): return v",
    "d": "d = Holds('b')",
    "e": "e = Settable('a')",
    "k": "k = {leaf}",
    "k2": "k = [{leaf}, {leaf}]",
    "len": "def __len__(self): return self.a if type(self.a) is int and self.a > 0 else 2",
    "bool": "def __bool__(self): return bool(self.b)",
    "eq": "def __eq__(self, o): return type(o) is type(self) and self.a == o.a\ndef __hash__(self): return 3",
    "ne": "def __ne__(self, o): return self.b != getattr(o, 'b', 0)",
    "lt": "def __lt__(self, o): return self.a < getattr(o, 'a', o)",
    "iter": "def __iter__(self): return iter((self.a, self.b))",
    "gen": "def __iter__(self):\n    yield self.a\n    yield self.b",
    "getitem": "def __getitem__(self, i): return (self.a, self.b, self.k)[i]",
    "contains": "def __contains__(self, v): return v is self.a or v == 1",
    "call": "def __call__(self, v=0): return (self.b, v)",
    "getattr": "def __getattr__(self, n):\n    if n[:1] == '_': raise AttributeError(n)\n"
    "    return (n, self.__dict__.get('b'))",
    "getattribute": "def __getattribute__(self, n):\n    return 4 if n == 'z' else object.__getattribute__(self, n)",
    "setattr": "def __setattr__(self, n, v): object.__setattr__(self, n, v)",
    "add": "def __add__(self, o): return NotImplemented if isinstance(o, str) else (self.a, o)",
    "radd": "def __radd__(self, o): return (o, self.b)",
    "iadd": "def __iadd__(self, o):\n    self.n = o\n    return self",
    "mul": "def __mul__(self, o): return self.b * o",
    "neg": "def __neg__(self): return self.b",
    "repr": "def __repr__(self): return f'<{{type(self).__name__}} {{self.b!r}}>'",
    "str": "def __str__(self): return str(self.b)",
    "format": "def __format__(self, spec): return spec + str(self.b)",
    "index": "def __index__(self): return self.a if type(self.a) is int else 1",
    "float": "def __float__(self): return float(self.a)",
    "with": "def __enter__(self): return self.b\ndef __exit__(self, *e): return True",
    "reduce": "def __reduce__(self): return (type(self), (self.a, self.b))",
    "copy": "def __copy__(self): return (self.b,)",
    "init_subclass": "def __init_subclass__(cls, **kw): cls.made = {leaf}",
    "class_getitem": "def __class_getitem__(cls, v): return (cls.k, v)",
    "super": "def m(self, v=1): return (super().m(v) if hasattr(super(), 'm') else self.b, 1)",
    "missing": "def __missing__(self, k): return k",
    "reversed": "def __reversed__(self): return iter((self.b, self.a))",
    "dir": "def __dir__(self): return ['a', 'zz']",
    "array": "def __array__(self, dtype=None, copy=None): return np.array([1.0, 2.0], dtype)",
}  # fmt: skip
MODULES = """
class Net(nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer('r', torch.ones(3))
        self.n, self.names, self.act = n, ['a'], nn.ReLU()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Identity()])
        with torch.no_grad():
            for q in self.layers.parameters(): q.fill_(0.5)
    def forward(self, v): return self.act(v * self.w + self.r) * self.n
"""


def indent(text: str, by: int = 4) -> str:
    return "\n".join(" " * by + line if line else line for line in text.split("\n"))


@dataclasses.dataclass
class Root:
    """A name that leads to objects: how the program reads it, and how a mutation between two calls reaches it."""

    read: str
    reach: str
    text: str  # the expression that makes it
    kind: str


@dataclasses.dataclass
class Place:
    """A reachable value, the expressions that lead to it, and (id, suffix) of the objects on the way."""

    read: str
    reach: str
    value: Any
    chain: tuple
    root: Root | None = None
    parent: Any = None


class World:
    """What a generated program can reach. rng: where all choices come from."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.classes: list[str] = []
        self.texts = [PRELUDE, MODULES]
        for i in range(rng.randint(1, 3)):
            self.texts.append(self.new_class(i))
        self.space: dict[str, Any] = {}

    # --- text
    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def leaf(self) -> str:
        return self.rng.choice(NUMBERS if self.rng.random() < 0.5 else LEAVES)

    def new_class(self, i: int) -> str:
        rng, name = self.rng, f"C{i}"
        bases = [rng.choice(self.classes)] if self.classes and rng.random() < 0.5 else []
        kind = rng.random()
        chosen = rng.sample(sorted(FEATURES), rng.randint(0, 5))
        features = [FEATURES[f].format(leaf=self.leaf()) for f in chosen if f != "missing"]
        self.classes.append(name)
        if kind < 0.15 and not bases:
            options = rng.choice(["", "(frozen=True)", "(order=True)", "(slots=True)", "(eq=False)"])
            lines = ["a: object = 1", "b: object = 2", "k: typing.ClassVar = 3"]
            return f"@dataclasses.dataclass{options}\nclass {name}:\n" + indent("\n".join(lines + features))
        lines = [f"k = {self.leaf()}"]
        if kind < 0.3 and not bases:
            lines = ["__slots__ = ('a', 'b', 'n', '__weakref__')"]
            features = [f for f in features if not f.startswith(("k =", "@functools", "e ="))]
            features = [f for f in features if "__dict__" not in f] + ["k = 4"]
        elif kind < 0.4 and not bases:
            bases = [rng.choice(["list", "dict", "L", "D", "collections.OrderedDict", "types.SimpleNamespace"])]
            if bases[0] in ("dict", "D"):
                features.append(FEATURES["missing"])
        elif kind < 0.45 and not bases:
            bases = ["metaclass=Meta"]
        start = "def __init__(self, a=1, b=2):\n    self.a = a\n    self.b = b"
        if bases and bases[0] in ("list", "dict", "L", "D", "collections.OrderedDict"):
            first = "self.append(a)" if bases[0] in ("list", "L") else "self[0] = a"
            start = f"def __init__(self, a=1, b=2):\n    {first}\n    self.a = a\n    self.b = b"
        meta = (
            "class Meta(type):\n    mk = 3\n    def __len__(cls): return cls.mk\n    def __call__(cls, *a):\n"
            "        return super().__call__(*a)\n"
        )
        before = meta if bases == ["metaclass=Meta"] else ""
        return before + f"class {name}({', '.join(bases)}):\n" + indent("\n".join([*lines, start, *features]))

    def value(self, depth: int = 2) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.25:
            return self.leaf()
        n = rng.choice([0, 1, 2, 2, 3, 3, 4])
        few = [self.value(depth - 1) for _ in range(n)]
        plain = [rng.choice(NUMBERS) for _ in range(n + 1)]
        joined = ", ".join(few)
        keys = rng.sample(KEYS, n)
        pairs = ", ".join(f"{k}: {v}" for k, v in zip(keys, few, strict=True))
        kind = rng.choice(self.classes)
        return rng.choice([
            f"[{joined}]", f"[{joined}]", f"[{', '.join(plain)}]", f"({joined}{',' if n == 1 else ''})", f"{{{pairs}}}",
            f"{{{pairs}}}", f"{{{', '.join(f'{k!r}: {v}' for k, v in zip('abcde', plain, strict=False))}}}",
            f"set([{', '.join(rng.choice('0123') for _ in range(n))}])", f"frozenset([{rng.randint(0, 3)}, 5])",
            f"collections.deque([{joined}])", f"collections.deque([{joined}], maxlen=4)",
            f"collections.OrderedDict({{{pairs}}})",
            f"collections.defaultdict({rng.choice(['int', 'list'])}, {{{pairs}}})",
            f"collections.Counter({rng.choice(['abca', 'kb', 'aab'])!r})",
            f"types.SimpleNamespace(a={self.value(depth - 1)}, b={self.leaf()})",
            f"collections.ChainMap({{{pairs}}}, {{'z': {self.leaf()}}})", f"types.MappingProxyType({{{pairs}}})",
            f"collections.UserDict({{{pairs}}})", f"collections.UserList([{joined}])", "array.array('d', [1.0, 2.0])",
            "bytearray(b'abc')", f"L([{joined}])", f"D({{{pairs}}})", f"Pair({self.value(depth - 1)})",
            rng.choice(["list(range(200))", "[[i, i + 0.5] for i in range(120)]", "[[[[[[1, 2.0]]]]]]",
            "{str(i): i for i in range(100)}",
                        "{'a': {'b': {'c': {'d': {'e': [1, 2]}}}}}", "np.zeros((2, 2))",
                        "[torch.ones(3), torch.zeros(3)]", "[[1, 2], [3, 4]]"]),
            f"{kind}({self.value(depth - 1)}, {self.leaf()})", f"{kind}({self.leaf()})",
            f"{kind}({self.value(depth - 1)})",
            f"{kind}({self.value(depth - 1)}, {self.value(depth - 2)})", f"(lambda v=1, w={self.leaf()}: (v, w))",
            f"functools.partial(adds({rng.choice(NUMBERS)}), {rng.choice(NUMBERS)})", f"adds({rng.choice(NUMBERS)})",
            rng.choice([f"iter([{joined}])", f"numbers({rng.randint(0, 3)})",
            f"itertools.islice(itertools.count({rng.randint(0, 3)}), 30)", f"enumerate([{joined}])",
            "random.Random(3)", f"[{joined}]"]), "contextvars.ContextVar('v', default=2)",
            "weakref.ref(C0)", f"weakref.WeakValueDictionary({{'a': {rng.choice(['Net', 'C0'])}}})", kind, "Net",
            "Net()", "nn.Linear(3, 3).requires_grad_(False).apply(lambda m: m.weight.data.fill_(0.5))",
            "nn.Dropout(0.0)", "nn.ParameterList([torch.ones(3)])", "nn.BatchNorm1d(3).eval()", "re.compile('a+')",
            f"types.ModuleType('m_{rng.randint(0, 9)}')", f"functools.lru_cache(adds({rng.choice(NUMBERS)}))",
            "dict.fromkeys('ab')",
            rng.choice([f"{{{pairs}}}.items()", f"{{{pairs}}}.keys()", f"[{joined}]", f"[{joined}]"]),
            f"C0({self.leaf()}).m" if "def m(" in self.texts[2] else "[].append",
            *rng.choices(library_objects.TEXTS, k=3),
        ])  # fmt: skip

    # --- live objects
    def execute(self, source: str) -> None:
        module = types.ModuleType(MODULE)
        sys.modules[MODULE] = module
        self.space = vars(module)
        exec(compile(source, "<world>", "exec"), self.space)

    def evaluate(self, expression: str) -> Any:
        return eval(expression, self.space)

    def walk(self, roots: list[Root], limit: int = 150) -> list[Place]:
        """What is reachable, nearest first; the parts of each object once."""
        queue: collections.deque[Place] = collections.deque()
        for root in roots:
            with contextlib.suppress(Exception):  # a root that a mutation has removed
                queue.append(Place(root.read, root.reach, self.evaluate(root.reach), (), root))
        reached, seen = [], set()
        while queue and len(reached) < limit:
            target = queue.popleft()
            reached.append(target)
            if id(target.value) in seen:
                continue
            seen.add(id(target.value))
            for suffix, child in self.children(target.value):
                chain = (*target.chain, (id(target.value), suffix))
                queue.append(Place(target.read + suffix, target.reach + suffix, child, chain, None, target.value))
        return reached

    def children(self, value: Any) -> list[tuple[str, Any]]:
        """(suffix, object) of the parts of an object."""
        kind, members = type(value), []
        if isinstance(value, torch.Tensor | np.ndarray | str | bytes | enum.Enum):
            return []
        if isinstance(value, dict | types.MappingProxyType | collections.UserDict | collections.ChainMap):
            with contextlib.suppress(Exception):
                pairs = list(dict.items(value) if isinstance(value, dict) else value.items())
                members += [(f"[{k!r}]", v) for k, v in pairs[:8] if type(k) in (str, int, type(None), float)]
        if isinstance(value, list | tuple | collections.deque):
            base = next(b for b in (list, tuple, collections.deque) if isinstance(value, b))
            members += [(f"[{i}]", v) for i, v in enumerate(list(base.__iter__(value))[:8])]
        if isinstance(value, types.FunctionType) and value.__module__ == MODULE:
            members += [(f".__defaults__[{i}]", v) for i, v in enumerate(value.__defaults__ or ())]
            members += [(f".__kwdefaults__[{k!r}]", v) for k, v in (value.__kwdefaults__ or {}).items()]
            for i, cell in enumerate(value.__closure__ or ()):
                with contextlib.suppress(ValueError):
                    members.append((f".__closure__[{i}].cell_contents", cell.cell_contents))
        elif isinstance(value, functools.partial):
            members += [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
        elif isinstance(value, types.MethodType) and type(value.__self__).__module__ == MODULE:
            members += [(".__self__", value.__self__), (".__func__", value.__func__)]
        elif isinstance(value, torch.nn.Module):
            for table in (value._parameters, value._buffers, value._modules):
                members += [(f".{k}" if k.isidentifier() else f"[{k}]", v) for k, v in table.items() if v is not None]
            members += [(f".{k}", v) for k, v in vars(value).items() if k[0] != "_" and k not in ("training",)]
            return members
        elif isinstance(value, type):
            if value.__module__ == MODULE:
                members += [
                    (f".{k}", v)
                    for k, v in vars(value).items()
                    if k[:2] != "__"
                    and k[:1] != "_"
                    and not isinstance(v, property | staticmethod | classmethod | functools.cached_property)
                ]
            return members
        with contextlib.suppress(Exception):
            own = object.__getattribute__(value, "__dict__")
            if not isinstance(value, types.FunctionType) and kind.__module__ in (
                MODULE,
                "types",
                "builtins",
                "collections",
                "typing",
            ):
                members += [
                    (f".{k}", v) for k, v in own.items() if type(k) is str and k.isidentifier() and k[:2] != "__"
                ]
        if kind.__module__ == MODULE:
            for name in getattr(kind, "__slots__", ()) if not isinstance(getattr(kind, "__slots__", ""), str) else ():
                with contextlib.suppress(AttributeError):
                    members.append((f".{name}", object.__getattribute__(value, name)))
        return members


# ------------------------------------------------------------------------------------------------ what a program reads

ANY = [
    "{p} is None", "{p} is {q}", "{p} == {q}", "{p} != {q}", "bool({p})", "not {p}",
    "isinstance({p}, (list, int, C0))", "type({p}).__name__",
    "type({p}) is type({q})", "hasattr({p}, 'a')", "getattr({p}, 'zz', 5)", "callable({p})", "copy.copy({p})",
    "copy.deepcopy({p})", "str({p})", "f'{{{p}}}'",
    "pickle.loads(pickle.dumps({p}))", "hash({p})", "(lambda *a: len(a))(*{p})", "(lambda **k: sorted(k))(**{p})",
    "len({p})", "{p}[0]", "list({p})", "{p} if {p} else 0",
    "isinstance({p}, collections.abc.Mapping)", "issubclass(type({p}), dict)", "{p} in [1, 'a', None]",
    "[{p}].index({p})", "{{'z': {p}}} == {{'z': {q}}}", "sum([{p}], 0)",
    "vars({p})", "json.dumps({p}, default=lambda o: 'x')", "dataclasses.is_dataclass({p})", "id({p}) == id({q})",
    "operator.eq({p}, {q})", "repr({p})", "{p} and 3",
    "tuple({p})", "sorted([{p}, {q}], key=lambda v: type(v).__name__)[0]", "max({p}, key=str)", "type({p})",
    "iter({p}) is {p}", "{p} == copy.deepcopy({p})", "[{p}, {q}].count({p})",
    "'%s' % ({p},)", "'{{}}'.format({p})", "{p}", "{p}", "{p}", "[{p}]", "({p}, {q})", "{{'r': {p}}}", "any([{p}])",
    "pprint.pformat({p})", "b'%a' % ({p},)", "traceback.format_exception_only(ValueError({p}))",
    "np.int64(2) == {p}", "np.int64(2) * {p}", "'{{0!r:>4}}'.format({p})",
]  # fmt: skip
READS: list[tuple[Any, list[str]]] = [
    (bool | int | float, [
        "{p} + 1", "{p} > 2", "{p} % 3", "{p} * 2.5", "-{p}", "torch.full((2,), {p})", "torch.tensor({p})",
        "math.floor({p})", "round({p}, 1)", "f'{{{p}:.2f}}'", "min({p}, 3)", "abs({p})",
        "{p} / 2", "{p} // 2", "t * {p}", "t + {p}", "t ** {p}", "t.pow({p})", "torch.where(t > {p}, t, 0.5)",
        "np.float64({p})", "divmod({p}, 2)", "{p} == 1", "{p} is True", "int({p})", "'abc'[{p}:]",
        "t[:{p}]", "[1, 2, 3][{p}]", "range({p})", "list(range({p}))", "t.sum({p})", "fractions.Fraction({p})",
        "{p}.__class__", "math.sqrt(abs({p}))", "torch.ones({p})", "(1 << 3) & {p}", "str({p})",
        "{p} ** 2", "1 <= {p} < 4", "float({p}).hex()", "{p}.real", "hash({p})", "json.dumps({p})",
        "decimal.Decimal({p})", "t.clamp(max={p})", "t.to(torch.float64) * {p}", "F({p})",
        "math.prod([{p}, np.int8(2)])", "divmod(np.int64(7), {p})", "np.arange(6)[[{p}, 1]]", "json.dumps({{{p}: 1}})",
        "np.array({{{p}}})", "[np.int64(1), {p}] == [{p}, 1]",
    ]),
    (str, ["len({p})", "{p}.upper()", "{p} + 'x'", "{p} in 'abc'", "{p} == 'a'", "getattr({q}, {p}, 0)", "{p} * 2",
        "{p}.join(['1', '2'])", "f'{{{p}:>4}}'", "{{'a': 1, 'b': 2}}.get({p})", "{p}[0]", "ord({p})",
        "re.match({p}, 'ab')", "re.sub('a', {p}, 'cac')", "textwrap.indent('q', {p})"]),
    (list | tuple | collections.deque, [
        "len({p})", "{p}[0]", "{p}[-1]", "{p}[1:]", "{q} in {p}", "1 in {p}", "sum({p})", "max({p})", "min({p})",
        "sorted({p}, key=str)", "[v for v in {p}]", "list(enumerate({p}))", "list(zip({p}, {q}))",
        "list(reversed({p}))", "tuple({p})", "{p} + {p}", "{p} * 2", "{p} == [1, 2]", "{p}.index(1)", "{p}.count(1)",
        "list(map(str, {p}))", "json.dumps({p})", "np.array({p})", "torch.tensor({p})",
        "functools.reduce(operator.add, {p})", "list(itertools.chain({p}, {p}))", "any({p})", "all({p})",
        "','.join(map(str, {p}))", "heapq.nsmallest(2, {p})", "statistics.mean({p})", "math.fsum({p})", "set({p})",
        "torch.stack(list({p}))", "(lambda a, *b: (a, len(b)))(*{p})", "[*{p}, 1]", "torch.as_tensor({p})",
        "np.sum({p})", "sum({p}, [])", "{p} < {q}", "bool({p})", "next(iter({p}))", "{p}.copy()",
        "dict(enumerate({p}))",
        "[v for v in {p} if v]", "sum(1 for v in {p} if v is None)", "sum(len(str(v)) for v in {p})",
        "list(itertools.accumulate({p}))", "max({p}, default=0, key=lambda v: str(v))", "operator.itemgetter(0)({p})",
        "bisect.bisect({p}, 1)", "[type(v).__name__ for v in {p}]", "random.Random(0).sample(list({p}), 1)",
        "copy.copy({p})[0]", "t.view({p})", "t.new_tensor({p})", "np.asarray({p}).shape", "list({p}) == list({q})",
        "next((v for v in {p} if isinstance(v, float)), 9)", "frozenset({p})", "array.array('d', {p})",
        "torch.cat(list({p}))", "collections.Counter({p})", "str({p})", "math.prod({p})",
        "torch.ones(len({p})).sum()",
    ]),
    (dict | types.MappingProxyType | collections.UserDict | collections.ChainMap, [
        "{p}['a']", "{p}.get('a', 0)", "'a' in {p}", "len({p})", "[(k, v) for k, v in {p}.items()]",
        "list({p}.keys())", "list({p})", "{p}.keys() == {{'a'}}", "{{**{p}}}", "{p} | {{'y': 1}}",
        "sorted({p}, key=str)",
        "dict({p})", "list({p}.values())", "next(iter({p}))", "json.dumps({p})", "json.dumps({p}, default=str)",
        "sum({p}.values())", "max({p}, key={p}.get)", "{p} == {q}", "{p}.get({q})", "(lambda **k: k)(**{p})",
        "{p}.copy()", "{p}.items() <= {p}.items()", "[k for k in {p} if isinstance(k, str)]",
        "operator.itemgetter('a')({p})", "'{{a}}'.format(**{p})", "'{{a}}'.format_map({p})",
        "list(zip({p}, {p}.values()))",
        "{p}.get('zz')", "{p}['zz']", "list(reversed({p}))", "collections.Counter({p})",
        "types.SimpleNamespace(**{p})", "'zz' in {p}", "any({p}.values())", "pickle.loads(pickle.dumps({p}))",
        "'%(a)s' % {p}",
        "next(iter({p}.items()))", "len({p}.keys() & {{'a', 'b'}})", "isinstance({p}, dict)",
        "{{v: k for k, v in {p}.items()}}", "copy.deepcopy({p})", "collections.ChainMap({p}, {{'zz': 3}})['zz']",
        "str({p})",
    ]),
    (set | frozenset, ["1 in {p}", "len({p})", "sorted({p})", "{p} | {{9}}", "{p} <= {{1, 2, 3}}", "sum({p})",
        "{p} == {{1, 2}}", "[v for v in sorted({p})]", "max({p}, default=0)", "bool({p})", "{p}.isdisjoint({{1}})",
        "torch.tensor(sorted({p}))", "{p} & {{1, 5}}", "{p} - {{1}}", "frozenset({p})",
        "{p}.symmetric_difference_update(np.arange(2.0))", "{p} | set(np.arange(2.0))"]),
    (torch.nn.Module, [
        "{p}(t)", "{p}.training", "{p}.w", "len(list({p}.parameters()))", "[n for n, _ in {p}.named_parameters()]",
        "sum(q.sum() for q in {p}.parameters())", "list({p}.state_dict())", "{p}.n", "{p}.layers[0](t)",
        "{p}.extra", "len(list({p}.children()))", "[m.training for m in {p}.modules()]", "{p}.weight.requires_grad",
        "{p}.act(t)", "[type(m).__name__ for m in {p}.modules()]", "{p}.names", "str({p})", "hasattr({p}, 'r')",
        "dict({p}.named_buffers())", "{p}.p", "{p}.eps", "{p}.in_features", "copy.deepcopy({p})",
        "torch.func.functional_call({p}, {{}}, (t,))", "{p}.get_parameter('w')", "{p}.forward(t)", "{p}.weight",
    ]),
    (torch.Tensor, [
        "{p} + 1", "{p}.sum()", "{p}.shape", "{p}.dtype", "{p}.requires_grad", "len({p})", "{p}.numel()", "{p}.dim()",
        "{p} is {q}", "t + {p}.sum()", "{p}.is_contiguous()", "{p}.stride()", "{p}.size(0)", "torch.is_tensor({p})",
        "{p}.is_leaf", "str({p}.dtype)", "{p}[0]", "{p} * {q}", "{p}.grad is None", "{p}.detach()", "{p}.float()",
        "{p}.t()", "[v for v in {p}]", "isinstance({p}, nn.Parameter)", "{p}.tolist()", "{p}.item()",
        "torch.cat([{p}, {p}])",
        "{p}.is_floating_point()", "torch.stack([{p}, {p}])", "{p}.mean()", "{p} == {p}", "torch.result_type({p}, 1)",
        "{p}.view(-1)", "{p}.to(t.dtype)", "{p}.shape[0] * 2", "copy.copy({p})", "{p}.clone()", "{p}.grad_fn",
        "{p}.device.type",
    ]),
    (np.ndarray, ["{p}.sum()", "{p}[0]", "{p}.shape", "torch.from_numpy({p})", "torch.tensor({p})", "{p}.tolist()",
        "{p}.dtype", "{p}.mean()", "np.asarray({p}).max()", "t + torch.as_tensor({p}).sum()", "len({p})", "{p} + 1",
        "{p} * 2 == 2", "float({p}.flat[0])", "np.stack([{p}, {p}])", "json.dumps({p}.tolist())", "{p}.astype(int)",
        "sum({p})", "np.concatenate([{p}, {p}]).shape"]),
    (np.generic, ["t * {p}", "{p} + 1", "float({p})", "{p}.item()", "{p} > 1", "torch.tensor({p})", "{p}.dtype",
        "{p} == {q}", "{p} * {q}", "divmod({p}, 2)", "[{p}, 1] == [2, {q}]", "math.prod([{p}, 2])"]),
    (types.FunctionType | functools.partial | types.MethodType | functools._lru_cache_wrapper, ["{p}(1)", "{p}()",
        "{p}.__name__", "functools.partial({p}, 2)()", "list(map({p}, [1, 2]))", "getattr({p}, '__defaults__', 0)",
        "str(inspect.signature({p}))", "{p}(t)", "sorted([3, 1], key={p})", "{p}.zz", "{p}.__kwdefaults__",
        "{p}.__wrapped__(1)", "vars({p})", "{p}(*[1])", "{p}.keywords"]),
    (collections.abc.Iterator, ["next({p}, 0)", "list(itertools.islice({p}, 2))",
        "[v for v, _ in zip({p}, range(2))]", "next({p})", "iter({p})"]),
    (weakref.ref, ["{p}()", "{p}() is None", "{p}().__name__"]),
    (weakref.WeakValueDictionary, ["{p}.get('a')", "len({p})", "'a' in {p}", "list({p}.keys())"]),
    (enum.Enum, ["{p}.value", "{p}.name", "{p} is Colour.RED", "{p} == 1", "list(type({p}))",
        "{{Colour.RED: 1}}.get({p})", "str({p})"]),
    (type, ["{p}.k", "{p}.__name__", "{p}().a", "{p}.__mro__", "hasattr({p}, 'k')", "{p}(3).m()", "{p}.cm()",
        "{p}.__bases__", "issubclass({p}, C0)", "vars({p}).get('k')", "[n for n in vars({p}) if n[0] != '_']",
        "{p}[0]", "len({p})", "inspect.getmembers({p}, inspect.isfunction)", "{p}.made",
        "str(inspect.signature({p}))"]),
    (types.ModuleType, ["{p}.a", "{p}.__name__", "getattr({p}, 'b', 3)", "vars({p}).get('a')", "hasattr({p}, 'c')"]),
    (random.Random, ["{p}.random()", "{p}.randint(0, 9)"]),
]  # fmt: skip
OF_OBJECT = [
    "{p}.a", "{p}.b", "{p}.k", "{p}.p", "{p}.q", "{p}.cp", "{p}.d", "{p}.e", "{p}.m()", "{p}.m(0)", "{p}.cm()",
    "{p}.sm()", "{p}.zz", "{p}.z", "len({p})", "bool({p})", "{p} == {q}", "{p} != {q}", "{p} < {q}",
    "[v for v in {p}]",
    "{p}[0]", "{p}[1]", "1 in {p}", "{p}()", "{p} + 1", "1 + {p}", "{p} + {p}", "{p} + 's'", "{p} * 2", "-{p}",
    "str({p})", "repr({p})", "f'{{{p}:x}}'", "[1, 2, 3, 4, 5][{p}]", "float({p})", "type({p}).k", "type({p})[0]",
    "hash({p})", "{p}.__dict__",
    "vars({p})", "copy.copy({p})", "copy.deepcopy({p})", "pickle.loads(pickle.dumps({p}))", "sorted([{p}, {p}])",
    "dataclasses.asdict({p})", "dataclasses.replace({p}, a=3)", "list(reversed({p}))", "dir({p})", "max({p})",
    "sum({p})", "tuple({p})",
    "np.array({p})", "torch.tensor({p})", "{p}.a is {q}", "{p} in [{q}, 1]", "{{'z': {p}}} == {{'z': {p}}}",
    "isinstance({p}, C0)", "operator.attrgetter('a')({p})", "json.dumps({p}, default=vars)", "dict([(1, {p})])",
    "{p}.made", "{p}._asdict()",
    "[{p}].index({q})", "list(map(str, [{p}]))", "max([{p}, {p}], key=lambda o: o.b)", "getattr({p}, 'a')",
    "getattr({p}, 'n', 0)", "hasattr({p}, 'n')", "t + {p}", "t * {p}", "operator.methodcaller('m')({p})",
    "functools.partial(C0.m, {p})()",
    "{p}.b == {q}", "{p}.__class__", "{p}.__class__.__name__", "{p} is not {q}", "list(zip({p}, [1, 2]))",
    "dataclasses.astuple({p})", "dataclasses.fields({p})[0].name", "'{{0.a}}'.format({p})", "set([{p}])", "t[{p}]",
    "math.trunc({p})", "{p}.lc()", "{p}.lc({q})", "type({p}).lc({p}, 2)",
]  # fmt: skip
BLOCKS = [
    "match {p}:\n    case [a, *_]: out.append(a)\n    case {{'a': a}}: out.append(('d', a))\n"
    "    case C0(): out.append('C')\n    case int() | float(): out.append(1)\n    case _: out.append(0)",
    "for v in {p}:\n    out.append(v)\n    if v == 1: break\nelse:\n    out.append('all')",
    "a, *b = {p}\nout.append((a, len(b)))", "with {p} as v:\n    out.append(v)\n    raise ValueError(1)",
    "if {p}:\n    t = t * 2\nelse:\n    t = t - 1", "while len({p}) > 100: break", "assert {p}",
    "assert {p} is not None, 'none'",
    "def inner():\n    return {p}\nout.append(inner())", "out.append([(lambda: {p})() for _ in range(2)])",
    "for i, v in enumerate({p}):\n    t = t + i\n    if i > 3: break", "if (v := {p}):\n    out.append(v)",
    "for k in {p}:\n    out.append({p}[k])",
    "def g():\n    yield {p}\n    yield from {p}\nout.append(list(g()))", "d = {{}}\nd.update({p})\nout.append(d)",
    "l = []\nl.extend({p})\nout.append(l)", "l = [1]\nl += {p}\nout.append(l)", "x, y = {p}\nout.append(y)",
    "for v in {p}: t = t * v",
]  # fmt: skip
EFFECTS = [
    "{p}.append(1)", "{p}.append(t * 2)", "{p}['k'] = 3", "{p}['a'] = t + 1", "{p}.a = 4", "{p}.b = t", "{p}.n = 1",
    "{p}[0] = 9", "{p}.pop()", "del {p}['a']", "del {p}.a", "{p}.add(7)", "{p}.update(a=2)", "{p} += 1", "{p}.a += 1",
    "{p}.setdefault('s', []).append(1)", "{p}.clear()", "{p}.add_(1)", "{p}.extend([1, 2])", "{p}.sort(key=lambda v: type(v).__name__)",
    "{p}.reverse()", "{p}.insert(0, t)", "setattr({p}, 'a', 2)", "delattr({p}, 'b')", "{p}.__dict__['b'] = 5",
    "{p}.k = 1", "type({p}).k = 3",
    "{p}[0] += 1", "{p}.popleft()", "{p}.move_to_end('a')", "{p}.q = 3", "{p}.e = 4", "{p}.w.data.add_(1)",
    "{p}.r.mul_(2)", "{p}.set(3)", "heapq.heappush({p}, 1)", "{p}.rotate(1)", "{p}.remove(1)", "{p}[:] = [1, 2]",
    "{p}['n'] = len({p})",
    "object.__setattr__({p}, 'a', 2)", "{p}.append({p}[0])", "{p}.popitem()", "{p}.x = {p}", "random.shuffle({p})",
    "next({p})", "{p}[0], {p}[1] = {p}[1], {p}[0]", "{p} |= {{'u': 1}}", "{p}.discard(1)", "{p}.fill(2)",
    "{p}[...] = 1",
]  # fmt: skip
REFUSED_BY_EAGER = (
    TypeError,
    AttributeError,
    ValueError,
    KeyError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    ArithmeticError,
    StopIteration,
    LookupError,
    RecursionError,
)


def reads_of(value: Any) -> list[str]:
    reads = [t for kind, texts in READS if isinstance(value, kind) for t in texts]
    if type(value).__module__ == MODULE and not isinstance(value, type | enum.Enum | torch.nn.Module | int | str):
        reads += OF_OBJECT
    of_kind, _ = of_library(value)
    return reads + of_kind + [f"{{p}}.{n}" for n in library_objects.own_attributes(value) if of_kind]


@functools.cache
def _kinds() -> dict:
    space: dict[str, Any] = {}
    exec(PRELUDE, space)
    return library_objects.of_kinds(space)


def of_library(value: Any) -> tuple[list[str], list[str]]:
    """What is read of an object of a library's class, and what changes it."""
    return _kinds().get(type(value), ([], []))


# ------------------------------------------------------------------------------------------------ mutations


def changed_values(world: World, at: str, value: Any, others: list[str]) -> list[str]:
    """Expressions of other values for the place `at`, whose value is `value` now."""
    replacements = [f"copy.copy({at})", f"copy.deepcopy({at})", "None", "0", world.value(1), world.rng.choice(others)]
    if isinstance(value, bool | int | float):
        replacements += [
            f"{at} + 1",
            f"-{at}",
            f"float({at})",
            f"bool({at})",
            f"int({at})",
            f"np.float64({at})",
            f"str({at})",
            f"torch.tensor({at})",
            f"I({at})",
            f"{at} * 1.0",
            "True",
            "1",
            "1.0",
            "2",
        ] * 2
    elif isinstance(value, str):
        replacements += [f"{at} + 'x'", f"{at}.upper()", f"S({at})", "'b'", f"''.join(list({at}))"]
    elif isinstance(value, torch.Tensor):
        replacements += [
            f"{at} + 1",
            f"{at}.double()",
            f"{at}[None]",
            f"{at}.detach().clone()",
            f"{at}.detach().float().requires_grad_()",
            f"nn.Parameter({at}.detach().float())",
            f"{at}.tolist()",
            f"{at}.detach().numpy()",
            f"{at}.mT",
            f"{at}.long()",
        ]
    elif isinstance(value, list | tuple | collections.deque):
        replacements += [
            f"list({at})",
            f"tuple({at})",
            f"L({at})",
            f"collections.deque({at})",
            f"list({at})[::-1]",
            f"list({at}) + [1]",
            f"list({at})[:-1]",
        ]
    elif isinstance(value, dict):
        replacements += [
            f"dict({at})",
            f"collections.OrderedDict({at})",
            f"D({at})",
            f"dict(reversed({at}.items()))",
            f"{{**{at}, 'n': 1}}",
            f"types.MappingProxyType({at})",
            f"collections.defaultdict(int, {at})",
        ]
    elif isinstance(value, np.ndarray):
        replacements += [f"{at} + 1", f"{at}.astype('float32')", f"{at}.reshape(-1)", f"{at}.tolist()", f"{at}.copy()"]
    elif isinstance(value, types.FunctionType | functools.partial):
        replacements += [
            "(lambda v=1, **k: (v, 'new'))",
            "adds(4)",
            f"functools.partial({at}, 3)",
            "functools.partial(adds(1), 2)",
            "str",
        ]
    elif isinstance(value, enum.Enum):
        replacements += ["Colour.BLUE", f"{at}.value", "Level.HIGH", "5"]
    elif isinstance(value, type):
        replacements += ["C0", "Net", "list", f"type('C9', ({at},), {{'k': 8}})"]
    elif isinstance(value, torch.nn.Module):
        replacements += ["nn.ReLU()", "nn.Tanh()", "Net(3)", "nn.Identity()"]
    return replacements


def inside(world: World, at: str, value: Any, others: list[str]) -> list[str]:
    """Statements that change the object at `at` in place."""
    rng = world.rng
    new = rng.choice([world.leaf(), world.value(1), rng.choice(others)])
    key = rng.choice(["'a'", "'b'", "'k'", "'zz'", "0"])
    i = rng.choice([0, 0, -1, 1])
    statements: list[str] = []
    if isinstance(value, list | collections.deque | collections.UserList):
        statements += [
            f"{at}.append({new})",
            f"{at}.insert(0, {new})",
            f"{at}.pop()",
            f"{at}.clear()",
            f"{at}.reverse()",
            f"{at}.extend([1, {new}])",
            f"del {at}[0]",
            f"{at}[{i}] = {new}",
            f"{at}[0], {at}[-1] = {at}[-1], {at}[0]",
        ]
        if isinstance(value, list):
            statements += [
                f"{at}.sort(key=lambda v: type(v).__name__)",
                f"{at}[:] = [{new}]",
                f"{at}[100:] = []",
                f"{at}[len({at}) // 2:len({at}) // 2 + 1] = [{new}]",
            ]
        elif isinstance(value, collections.deque):
            statements += [f"{at}.rotate(1)", f"{at}.appendleft({new})", f"{at}.popleft()"]
    elif isinstance(value, dict | collections.UserDict | collections.ChainMap):
        statements += [
            f"{at}[{key}] = {new}",
            f"{at}['new'] = {new}",
            f"{at}.pop({key}, None)",
            f"{at}.clear()",
            f"{at}.update(a={new})",
            f"v = next(iter({at})); {at}[v] = {at}.pop(v)",
            f"{at}.popitem()",
            f"del {at}[next(iter({at}))]",
        ]
        if isinstance(value, collections.defaultdict):
            statements += [f"{at}.default_factory = {rng.choice(['None', 'list', 'float', 'lambda: 5'])}"] * 3
        if isinstance(value, collections.OrderedDict):
            statements += [f"{at}.move_to_end(next(iter({at})))"] * 2
        if isinstance(value, collections.Counter):
            statements += [f"{at}.update('az')", f"{at}.subtract('a')"]
    elif isinstance(value, set):
        statements += [
            f"{at}.add({rng.choice('012357')})",
            f"{at}.discard({rng.choice('0123')})",
            f"{at}.clear()",
            f"{at}.update([7, 8])",
            f"{at}.add(True)",
        ]
    elif isinstance(value, weakref.WeakValueDictionary):
        statements += [f"{at}['b'] = Net", f"{at}.pop('a', None)"]
    elif isinstance(value, torch.nn.Module):
        statements += [
            f"{at}.eval()", f"{at}.train()", f"{at}.extra = {new}", f"{at}.register_buffer('b2', torch.ones(2))",
            f"{at}.requires_grad_(False)", f"{at}.double()", f"{at}.register_forward_hook(lambda m, a, o: o * 2)",
            f"{at}.n = 5",
            f"{at}.w = nn.Parameter(torch.zeros(3))", f"{at}.w.data = torch.ones(3) * 4",
            f"{at}.forward = lambda v: v + 7", f"{at}.act = nn.Tanh()", f"del {at}.act",
            f"{at}.layers.append(nn.ReLU())", f"{at}.p = 0.5", f"{at}.eps = 0.1",
            f"{at}.register_forward_pre_hook(lambda m, a: (a[0] + 1,))", f"{at}.names.append('b')",
            f"{at}.weight = nn.Parameter(torch.ones(3, 3))", f"{at}.__class__ = Net",
            f"{at}._parameters['w'] = nn.Parameter(torch.ones(3))", f"del {at}.r",
            f"{at}._buffers.clear()", f"type({at}).forward = lambda self, v: v * 9",
            f"{at}.layers[0] = nn.Identity()", f"{at}.w.requires_grad_(False)", f"{at}.zero_grad()",
            f"{at}.w.grad = torch.ones(3)", f"{at}.add_module('z', nn.Tanh())",
        ]  # fmt: skip
    elif isinstance(value, torch.Tensor):
        statements += [
            f"{at}.data = {at}.data + 1",
            f"{at}.requires_grad_()",
            f"{at}.requires_grad_(False)",
            f"{at}.detach().add_(1)",
            f"{at}.data = torch.ones(4)",
            f"{at}.data = {at}.data.double()",
            f"{at}.grad = torch.ones_like({at})",
            f"{at}.zz = 1",
            f"{at}.detach().t_()",
            f"{at}.detach().zero_()",
            f"{at}.resize_(1)",
        ]
    elif isinstance(value, np.ndarray):
        statements += [
            f"{at}[0] = 7",
            f"{at} += 1",
            f"{at}.sort()",
            f"{at}.shape = (-1,)",
            f"{at}.dtype = 'int64'",
            f"{at}.fill(3)",
            f"{at}.flags.writeable = False",
        ]
    elif isinstance(value, types.FunctionType):
        statements += [
            f"{at}.__defaults__ = ({new},)",
            f"{at}.__defaults__ = None",
            f"{at}.zz = {new}",
            f"{at}.__code__ = (lambda v=1, w=2: (v, w, 'c')).__code__",
            f"{at}.__kwdefaults__ = {{'w': {new}}}",
            f"{at}.__name__ = 'other'",
        ]
        statements += [f"{at}.__closure__[{j}].cell_contents = {new}" for j in range(len(value.__closure__ or ()))] * 3
    elif isinstance(value, functools.partial):
        statements += [f"{at}.keywords['w'] = 3", f"{at}.__setstate__((adds(3), ({new},), {{}}, None))", f"{at}.zz = 2"]
    elif isinstance(value, functools._lru_cache_wrapper):
        statements += [f"{at}.cache_clear()", f"{at}.zz = {new}", f"{at}.__wrapped__.__closure__[0].cell_contents = 9"]
    elif isinstance(value, collections.abc.Iterator):
        statements += [f"next({at}, 0)", f"next({at}, 0)", f"list(itertools.islice({at}, 3))"]
    elif isinstance(value, bytearray):
        statements += [f"{at}[0] = 100", f"{at}.append(3)", f"{at}.clear()"]
    elif type(value).__name__ == "array":
        statements += [f"{at}[0] = 5.0", f"{at}.append(3.0)", f"{at}.pop()"]
    elif type(value).__name__ == "ContextVar":
        statements += [f"{at}.set({new})"]
    elif isinstance(value, random.Random):
        statements += [f"{at}.seed(5)", f"{at}.random()"]
    elif isinstance(value, type) and value.__module__ == MODULE:
        feature = rng.choice(sorted(FEATURES))
        name = f"C{rng.randint(20, 99)}"
        body = indent(FEATURES[feature].format(leaf=world.leaf()))
        statements += [
            f"{at}.k = {new}", f"del {at}.k", f"{at}.m = lambda self, v=1: ({new}, v)",
            f"{at}.p = property(lambda self: {new})", f"{at}.__len__ = lambda self: 3",
            f"{at}.__bool__ = lambda self: False",
            f"{at}.__eq__ = lambda self, o: True", f"{at}.__getattr__ = lambda self, n: 11",
            f"{at}.__call__ = lambda self, *a: 12", f"{at}.zz = {new}", f"{at}.a = property(lambda self: 5)",
            f"{at}.__repr__ = lambda self: 'R'",
            f"{at}.__iter__ = lambda self: iter([1, 2])", f"del {at}.__len__", f"del {at}.__eq__",
            f"{at}.__add__ = lambda self, o: 13", f"{at}.__contains__ = lambda self, o: True",
            f"{at}.__hash__ = lambda self: 4", f"del {at}.m",
            f"{at}.__getitem__ = lambda self, i: i", f"{at}.__format__ = lambda self, s: 'F'",
            f"{at}.__getattribute__ = lambda self, n: object.__getattribute__(self, n) if n != 'b' else 14",
            f"{at}.__setattr__ = lambda self, n, v: None",
            f"class {name}:\n{body}\n{at}.__bases__ = ({name},)", f"{at}.__init__ = lambda self, a=1, b=2: None",
            f"{at}.__reduce__ = lambda self: (int, (3,))", f"{at}.__deepcopy__ = lambda self, memo: 3",
            f"{at}.cm = classmethod(lambda cls, v=0: 31)",
            f"{at}.mk = 4", f"type({at}).__len__ = lambda cls: 9", f"{at}.__float__ = lambda self: 2.5",
            f"{at}.__index__ = lambda self: 0", f"{at}.__str__ = lambda self: 'S'",
            f"{at}.__lt__ = lambda self, o: False", f"{at}.__radd__ = lambda self, o: 15",
        ]  # fmt: skip
    if isinstance(value, types.SimpleNamespace | types.ModuleType):
        statements += [f"{at}.a = {new}", f"{at}.b = {new}", f"{at}.c = 1"]
    if type(value).__module__ == MODULE and not isinstance(value, type | torch.nn.Module):
        statements += [
            f"{at}.a = {new}", f"{at}.b = {new}", f"{at}.zz = {new}", f"del {at}.a", f"{at}.n = {new}",
            f"{at}.__dict__['b'] = {new}", f"{at}.__dict__['k'] = {new}", f"{at}.__class__ = C0",
            f"object.__setattr__({at}, 'a', {new})", f"{at}.k = {new}",
            f"{at}.__dict__['m'] = lambda *a: 16", f"{at}.__dict__.pop('cp', None)", f"{at}.__dict__['p'] = 17",
            f"{at}.__dict__ = {{'a': 1, 'b': {new}}}", f"v = {at}.__dict__.pop('a'); {at}.__dict__['a'] = v",
            f"type({at}).k = {new}", f"{at}.__dict__['d'] = 18",
        ]  # fmt: skip
        if isinstance(value, enum.Enum):
            return []
    _, changes = of_library(value)
    statements += [change.format(at=at, new=new) for change in changes]
    return statements + [f"{at}.{n} = {new}" for n in library_objects.own_attributes(value) if changes]


def mutations(world: World, places: list[Place], target: Place) -> list[str]:
    """Statements that change what is at a place: the object in place, or what stands there."""
    others, reached, value, root = [p.reach for p in places[:40]], target.reach, target.value, target.root
    statements = inside(world, reached, value, others)
    if root is None or root.kind != "default":
        new = changed_values(world, reached, value, others)
        statements += [f"{reached} = {v}" for v in world.rng.sample(new, min(len(new), 1 + len(statements) // 2))]
    else:
        i = root.reach.split("[")[-1].rstrip("]")
        new = world.rng.choice(changed_values(world, reached, value, others))
        statements.append(f"f.__defaults__ = f.__defaults__[:{i}] + ({new},) + f.__defaults__[{i} + 1:]")
    return statements


def applies(world: World, statement: str) -> bool:
    """Execute a mutation in the live world; False where the objects refuse it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(statement, "<step>", "exec"), world.space)
        except Exception:  # noqa: BLE001 - a frozen object, a missing attribute
            return False
    return True
