"""Generated Python programs with tensors in them: control flow, exceptions, generators, classes with every protocol."""

from __future__ import annotations

import contextlib
import random
import warnings

from tests.properties.compared import Program, restored
from tests.properties.objects import indent

HEAD = """
import collections, contextlib, functools, itertools, math, operator, types
import torch
from torch import nn
LOG = []
TOTAL = 0
def said(text, value=None):
    LOG.append(text)
    return value
def logged(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        LOG.append(fn.__name__)
        return fn(*args, **kwargs)
    return inner
def times(k):
    def decorate(fn):
        return lambda *a, **kw: fn(*a, **kw) * k
    return decorate
class Guard:
    def __init__(self, swallow=(), value=None): self.swallow, self.value = swallow, value
    def __enter__(self):
        LOG.append('enter')
        return self.value if self.value is not None else self
    def __exit__(self, kind, error, traceback):
        LOG.append(('exit', kind and kind.__name__))
        return kind is not None and issubclass(kind, self.swallow)
@contextlib.contextmanager
def scope(v):
    LOG.append(('in', v))
    try:
        yield v
    except KeyError:
        LOG.append('swallowed')
    finally:
        LOG.append('out')
class Error(ValueError):
    def __init__(self, n=0): super().__init__(f'error {n}'); self.n = n
def numbers(n):
    got = None
    try:
        for i in range(n):
            got = yield i if got is None else got * 10
            LOG.append(('got', got))
    except KeyError as e:
        LOG.append('thrown')
        yield -1
    finally:
        LOG.append('closed')
    return n
def outer(n):
    r = yield from numbers(n)
    yield r + 100
class Data:
    def __init__(self, name=None): self.name = name
    def __set_name__(self, owner, name): self.name = name; LOG.append(('named', owner.__name__, name))
    def __get__(self, o, kind): return said(('get', self.name), 7 if o is None else o.__dict__.get(self.name, 5))
    def __set__(self, o, v): LOG.append(('set', self.name)); o.__dict__[self.name] = v
    def __delete__(self, o): LOG.append(('delete', self.name)); o.__dict__.pop(self.name)
class Plain:
    def __get__(self, o, kind): return said('plain get', 6)
class Meta(type):
    @classmethod
    def __prepare__(mcs, name, bases, **kw): LOG.append(('prepare', name)); return {'prepared': 1}
    def __new__(mcs, name, bases, space, **kw): return super().__new__(mcs, name, bases, space)
    def __init__(cls, name, bases, space, **kw): super().__init__(name, bases, space)
    def __call__(cls, *a, **kw): LOG.append(('make', cls.__name__)); return super().__call__(*a, **kw)
    def __instancecheck__(cls, o): return said('instancecheck', type.__instancecheck__(cls, o) or o == 3)
    def __subclasscheck__(cls, c): return said('subclasscheck', type.__subclasscheck__(cls, c) or c is int)
    def __len__(cls): return said('class len', 2)
    def __iter__(cls): return iter((1, cls.__name__))
    def __getitem__(cls, i): return said('class item', i)
    def __contains__(cls, i): return said('class contains', True)
    def __add__(cls, o): return said('class add', 3)
    def __getattr__(cls, n): LOG.append(('class getattr', n)); raise AttributeError(n)
"""

BINARY = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "divmod",
]
SIGNS = ["+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>"]
COMPARED = ["lt", "le", "eq", "ne", "gt", "ge"]
COMPARE_SIGNS = ["<", "<=", "==", "!=", ">", ">="]
ANSWERS = [
    "self.v", "NotImplemented", "NotImplemented", "(self.v, 1)", "type(self)(self.v)", "x_of(self) * 2", "3", "o",
    "super().{name}(o)", "{fail}", "self", "None", "x_of(o)",
]  # fmt: skip
COMPARE_ANSWERS = [
    "True",
    "False",
    "NotImplemented",
    "NotImplemented",
    "self.v",
    "{fail}",
    "'yes'",
    "[]",
    "x_of(self)",
    "super().{name}(o)",
]
FAIL = [
    "fail(TypeError('{name}'))",
    "fail(Error(3))",
    "fail(AttributeError('{name}'))",
    "fail(IndexError(1))",
    "fail(StopIteration(2))",
]
OTHERS = {
    "__neg__": ["-self.v", "{fail}", "x_of(self)"], "__pos__": ["self"], "__invert__": ["~3"], "__abs__": ["4",
    "x_of(self)"], "__round__(self, n=None)": ["(n, 2)"],
    "__floor__": ["1"], "__ceil__": ["2"], "__trunc__": ["3"], "__index__": ["1", "2", "'no'", "{fail}"],
    "__int__": ["5", "1.5"], "__float__": ["2.5", "'no'"],
    "__complex__": ["1j"], "__bool__": ["False", "True", "{fail}", "3"], "__len__": ["2", "0", "-1", "{fail}", "'x'"],
    "__length_hint__": ["3"],
    "__iter__": ["iter([1, self.v])", "iter(x_of(self))", "(said('it', i) for i in range(2))", "self", "{fail}", "3"],
    "__next__": ["{fail}", "said('next', 1)"],
    "__contains__(self, i)": ["i == 1", "'yes'", "{fail}"],
    "__getitem__(self, i)": ["(i, self.v) if not isinstance(i, int) or i < 3 else fail(IndexError(i))",
    "x_of(self)[i]", "{fail}"],
    "__setitem__(self, i, v)": ["LOG.append(('setitem', i)) or setattr(self, 'v', v)"],
    "__delitem__(self, i)": ["LOG.append(('delitem', i))"], "__reversed__": ["iter([2, 1])"],
    "__call__(self, *a, **k)": ["(len(a), sorted(k), self.v)", "x_of(self)", "{fail}"],
    "__format__(self, spec)": ["f'<{{spec}}>'", "3", "format(self.v, spec)"], "__str__": ["'S'", "repr(self.v)", "3"],
    "__repr__": ["'R'", "f'R{{self.v}}'", "{fail}"], "__hash__": ["3", "hash(self.v)", "-1", "'no'"],
    "__enter__": ["self.v", "{fail}"], "__exit__(self, *e)": ["True", "False", "{fail}"],
    "__getattr__(self, n)": ["n if n[:2] != '__' else fail(AttributeError(n))", "fail(AttributeError(n))"],
    "__getattribute__(self, n)": ["object.__getattribute__(self, n)",
    "41 if n == 'w' else super().__getattribute__(n)"],
    "__setattr__(self, n, v)": ["object.__setattr__(self, n, v)"],
    "__delattr__(self, n)": ["object.__delattr__(self, n)"], "__dir__": ["['b', 'a']"], "__bytes__": ["b'B'"],
    "__copy__": ["3"],
    "__missing__(self, k)": ["k"],
    "__init_subclass__(cls, **k)": ["super().__init_subclass__() or LOG.append(sorted(k))"],
    "__class_getitem__(cls, i)": ["(cls.__name__, i)"],
    "__set_name__(self, owner, name)": ["LOG.append(name)"], "__get__(self, o, kind)": ["(o is None, 8)"],
    "__getstate__": ["{{'v': 9}}"], "__reduce__": ["(int, (4,))"], "__fspath__": ["'path'"],
    "__instancecheck__(cls, o)": ["True"], "__eq__(self, o)": ["isinstance(o, type(self)) and self.v is o.v"],
    "__array__(self, *a, **k)": ["{fail}"], "__del__": ["None"],
    "method(self, k=1, *rest, w=2)": ["(self.v, k, len(rest), w)", "x_of(self) * w"], "__sizeof__": ["3"],
    "__divmod__(self, o)": ["(1, o)"], "__prepare__(cls, *a)": ["{{}}"],
    "__await__": ["iter([1])"], "__mro_entries__(self, bases)": ["(object,)"],
    "__torch_function__(cls, func, types, args=(), kwargs=None)": ["(func.__name__, len(args))"],
}  # fmt: skip
CLASS_METHODS = ("__init_subclass__", "__class_getitem__", "__torch_function__")
EXTRA = [
    "@property\ndef p(self): return said('p', self.v)", "@property\ndef p(self): return said('p', self.missing)",
    "@functools.cached_property\ndef cp(self): return said('cp', (self.v, 1))", "d = Data()", "e = Plain()",
    "@staticmethod\ndef st(a=1): return a", "@classmethod\ndef cl(cls, a=1): return (cls.__name__, a)",
    "@p.setter\ndef p(self, v): self.v = v", "k = [1, 2]", "__slots__ = ('v', 'w')", "__hash__ = None",
    "__match_args__ = ('v', 'w')",
    "def method(self, k=1): return (super().method(k) if hasattr(super(), 'method') else 0, __class__.__name__)",
    "@logged\ndef deco(self, k=2): return k", "__bool__ = None", "__iter__ = None", "__contains__ = None",
    "__radd__ = None",
    "@functools.singledispatchmethod\ndef sd(self, a): return 'any'\n@sd.register\ndef _(self, a: int): return 'int'",
    "@functools.lru_cache\ndef lc(self): return said('lc', 3)", "pm = functools.partialmethod(said, 4)",
]  # fmt: skip
TAIL = """
def x_of(o): return o.v if isinstance(getattr(o, 'v', None), torch.Tensor) else torch.ones(2)
def fail(e): raise e
"""
USES = [
    "{o} {b} {q}", "{o} {b} {q}", "{o} {b} 2", "2 {b} {o}", "x {b} {o}", "{o} {b} x", "{o} {b} 's'", "{o} {c} {q}",
    "{o} {c} {q}", "{o} {c} 3", "3 {c} {o}", "{o} {c} x", "x {c} {o}", "-{o}", "+{o}", "~{o}", "not {o}", "abs({o})",
    "round({o})", "round({o}, 1)", "math.floor({o})", "math.ceil({o})", "math.trunc({o})", "int({o})", "float({o})",
    "complex({o})", "bool({o})", "len({o})", "list({o})", "tuple({o})", "[*{o}]", "[v for v in {o}]", "{q} in {o}",
    "1 in {o}",
    "1 not in {o}", "{o}[0]", "{o}[1:2]", "{o}[..., 1]", "{o}['k']", "list(reversed({o}))", "{o}()",
    "{o}(1, *[2], k=3, **{{'z': 4}})", "str({o})", "repr({o})", "f'{{{o}}}'", "f'{{{o}:>4}}'", "f'{{{o}!r:5}}'",
    "'%s' % {o}", "'{{:x}}'.format({o})",
    "format({o}, 'q')", "hash({o})", "{{{o}: 1}}", "{{{o}, {q}}}", "sorted([{o}, {q}])", "max({o}, {q})",
    "min([{q}, {o}])", "sum([{o}, {q}])", "sum({o})", "any({o})", "all({o})", "list(map(str, {o}))",
    "list(zip({o}, {o}))", "list(enumerate({o}))",
    "iter({o})", "next({o})", "next(iter({o}))", "isinstance({o}, {C})", "isinstance(3, {C})", "issubclass({C}, {K})",
    "issubclass(int, {C})", "{o}.v", "{o}.w", "{o}.zz", "{o}.p", "{o}.cp", "{o}.d", "{o}.e", "{o}.k", "{o}.method()",
    "{o}.method(5, 6)", "{o}.cl()", "{o}.st(2)", "{o}.deco()", "{o}.sd(1)", "{o}.pm()", "{C}.d", "{C}.e", "{C}.k",
    "{C}.p", "{C}[1]", "{C}.cl()", "len({C})", "list({C})", "1 in {C}", "{C} + 1", "{C}.zz", "getattr({o}, 'zz', 4)",
    "hasattr({o}, 'p')",
    "setattr({o}, 'w', 3)", "delattr({o}, 'w')", "vars({o})", "dir({o})", "callable({o})", "divmod({o}, {q})",
    "divmod(7, {o})", "pow({o}, 2, 3)", "pow({o}, {q})", "range({o})", "[1, 2, 3][{o}]", "'abc'[{o}:]", "x[{o}]",
    "(1, 2) * {o}", "operator.index({o})",
    "operator.add({o}, {q})", "operator.eq({o}, {q})", "operator.iadd({o}, 1)", "operator.contains({o}, 1)",
    "operator.getitem({o}, 1)", "operator.length_hint({o})", "operator.not_({o})", "operator.truth({o})",
    "operator.attrgetter('v')({o})",
    "{o} is {q}", "{o} and {q}", "{o} or 4", "1 if {o} else 2", "{o} < {q} < 3", "[{o}].index({q})",
    "[{o}, {q}].count({o})", "({o}, 1) == ({q}, 1)", "[{o}] < [{q}]", "{{1: {o}}} == {{1: {q}}}", "{o} in [{q}]",
    "dict({o})", "dict([(1, {o})])", "bytes({o})",
    "{C}({q})", "type({o})(1).v", "super({C}, {o}).method()", "copy_of({o})",
    "isinstance({o}, collections.abc.Iterable)", "isinstance({o}, collections.abc.Sized)",
    "isinstance({o}, collections.abc.Hashable)", "isinstance({o}, collections.abc.Callable)",
    "functools.reduce(lambda a, b: a, {o})", "list(itertools.chain({o}, {o}))", "(lambda *a: len(a))(*{o})",
    "(lambda **k: len(k))(**{o})", "' '.join({o})", "set({o})", "frozenset({o})", "list(filter(None, {o}))",
    "math.sqrt({o})", "torch.add(x, {o})", "torch.full((2,), {o})",
    "x.view({o})", "x + {o}.v", "print_of({o})", "int(str({o}) or 0)", "type('T', ({o},), {{}})",
    "{o}.__class__.__name__", "{o}.__dict__", "{o}.__doc__", "{C}.__mro__[1].__name__", "{C}.method({o})",
    "[v for v in zip({o}, range(9))]", "{o}.__eq__({q})", "{o}.__add__(1)",
    "{o}.__bool__()", "object.__eq__({o}, {q})", "object.__repr__({o})[:4]", "list.__len__({o})", "({o} := {q})",
    "[{o}][{o}]", "torch.tensor([1, 2])[{o}]", "max({o}, key=str)", "sorted({o}, key=lambda v: 1)",
    "sorted([3, {o}], key=str)", "[1] + {o}", "{o} + [1]", "'a' + {o}",
    "'a' * {o}", "{o} % (1,)", "'%d' % {o}", "'%r' % ({o},)", "str.format('{{0.v}} {{0}}', {o})",
    "torch.stack([x_of({o})])", "list(itertools.islice({o}, 2))", "dict.fromkeys({o})", "[0].__add__({o})",
    "(1).__add__({o})", "x.__add__({o})", "slice(1, {o})", "bin({o})", "chr({o})",
]  # fmt: skip
DONE = [
    "{o} {b}= {q}", "{o} {b}= 1", "{o}.v {b}= 2", "x {b}= {o}", "{o}[0] = 1", "{o}[1:2] = x", "{o}['a'] += 1",
    "del {o}[0]", "{o}.w = 3", "{o}.w += 1", "{o}.d = x", "del {o}.d", "del {o}.w", "{o}.p = 3", "a, *b = {o}",
    "a, b = {o}", "for v in {o}: LOG.append('loop')",
    "with {o} as v: out.append(v)", "with {o}: raise KeyError(1)", "l = [0]; l += {o}; out.append(l)",
    "l = [0]; l[0:1] = {o}; out.append(l)", "d = {{}}; d.update({o}); out.append(d)",
    "match {o}:\n    case {C}(v=1): out.append('v')\n    case {C}(a, b): out.append((a, b))\n"
    "    case [a, *r]: out.append(a)\n    case {{'k': v}}: out.append(v)\n    case _: out.append('no')",
    "assert {o}", "while {o}:\n    out.append(1)\n    break", "if {o}: out.append('true')", "{o}.k = 8", "{C}.k = 9",
    "{o}.__class__ = {C}",
    "def g():\n    r = yield from {o}\n    return r\nout.append(list(g()))", "raise {o}",
    "try: raise KeyError\nexcept {o}: pass", "{C}.method = lambda self, k=1: 'new'", "del {C}.k", "{o}.v = x * 2",
    "x = x + x_of({o})", "out += {o}", "out.extend({o})", "global TOTAL; TOTAL += 1",
]  # fmt: skip


class Writer:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.classes: list[str] = []
        self.count = 0
        self.depth = 0
        self.loops = 0

    def pick(self, options):
        return self.rng.choice(options)

    def name(self, start: str) -> str:
        self.count += 1
        return f"{start}{self.count}"

    # --- classes
    def new_class(self, i: int) -> str:
        rng, name = self.rng, f"K{i}"
        bases = [rng.choice(self.classes)] if self.classes and rng.random() < 0.6 else []
        if not bases and rng.random() < 0.25:
            bases = [
                rng.choice(
                    [
                        "list",
                        "dict",
                        "int",
                        "str",
                        "tuple",
                        "Exception",
                        "collections.OrderedDict",
                        "collections.UserDict",
                        "types.SimpleNamespace",
                        "float",
                        "set",
                        "nn.Module",
                    ]
                )
            ]
        own = bases[0] if bases else ""
        lines = [
            "def __init__(self, v=1):\n    "
            + ("super().__init__()\n    " if own in ("nn.Module", "collections.UserDict") else "")
            + "self.v = v"
        ]
        if own in ("int", "str", "tuple", "float", "set"):
            lines = ["def __init__(self, v=1): self.v = v", f"def __new__(cls, v=1): return {own}.__new__(cls)"]
        for _ in range(rng.randint(1, 6)):
            lines.append(self.method(name))
        if rng.random() < 0.5:
            lines.append(rng.choice(EXTRA))
        if "@p.setter" in lines[-1] and not any("def p(self)" in line for line in lines[:-1]):
            lines.pop()
        meta = ["metaclass=Meta"] if not bases and rng.random() < 0.15 else []
        self.classes.append(name)
        return f"class {name}({', '.join(bases + meta)}):\n" + indent("\n".join(lines))

    def method(self, owner: str) -> str:
        rng = self.rng
        chance = rng.random()
        if chance < 0.45:
            kind = rng.choice(["__{}__", "__{}__", "__r{}__", "__r{}__", "__i{}__"])
            name = kind.format(rng.choice(BINARY[:7] if rng.random() < 0.7 else BINARY))
            answer = rng.choice(ANSWERS)
            head = f"{name}(self, o)"
        elif chance < 0.65:
            name = f"__{rng.choice(COMPARED)}__"
            answer, head = rng.choice(COMPARE_ANSWERS), f"{name}(self, o)"
        else:
            head = rng.choice(sorted(OTHERS))
            answer = rng.choice(OTHERS[head])
            name = head.split("(")[0]
            head = head if "(" in head else f"{name}(self)"
        answer = answer.format(name=name, fail=rng.choice(FAIL).format(name=name))
        quiet = name in ("__repr__", "__hash__", "__getattribute__", "__del__", "__sizeof__") or rng.random() < 0.3
        body = f"return {answer}" if quiet else f"LOG.append('{owner}.{name}')\n    return {answer}"
        before = "@classmethod\n" if name in CLASS_METHODS else ""
        return f"{before}def {head}:\n    {body}"

    # --- expressions by type
    def integer(self, d: int = 2) -> str:
        if d <= 0 or self.rng.random() < 0.35:
            return self.pick(["n", "n", "1", "2", "0", "len(l)", "TOTAL", "x.shape[0]", "x.dim()", "len(s)"])
        a, b = self.integer(d - 1), self.integer(d - 1)
        return self.pick(
            [
                f"({a} + {b})",
                f"({a} - {b})",
                f"({a} * {b})",
                f"({a} % 3)",
                f"max({a}, {b})",
                f"({a} if {self.truth(d - 1)} else {b})",
                f"len({self.sequence(d - 1)})",
                f"sum([{a}, {b}])",
                f"abs({a})",
                f"int({self.truth(d - 1)})",
                f"({a} // 2)",
                f"(lambda v: v + {b})({a})",
            ]
        )

    def truth(self, d: int = 2) -> str:
        if d <= 0 or self.rng.random() < 0.3:
            return self.pick(
                [
                    "n > 1",
                    "n % 2 == 0",
                    "s == 'ab'",
                    "l",
                    "not l",
                    "x.requires_grad",
                    "x.dtype is torch.float32",
                    "True",
                    "'a' in s",
                    "n in l",
                    "x.ndim == 1",
                    "len(LOG) < 5",
                ]
            )
        return self.pick(
            [
                f"({self.truth(d - 1)} and {self.truth(d - 1)})",
                f"({self.truth(d - 1)} or {self.truth(d - 1)})",
                f"not {self.truth(d - 1)}",
                f"({self.integer(d - 1)} {self.pick(COMPARE_SIGNS)} {self.integer(d - 1)})",
                f"(0 <= {self.integer(d - 1)} < 3)",
                f"any(v > 1 for v in {self.ints(d - 1)})",
                f"isinstance({self.any(d - 1)}, (int, str))",
                f"{self.integer(d - 1)} in {self.ints(d - 1)}",
            ]
        )

    def text(self, d: int = 2) -> str:
        if d <= 0 or self.rng.random() < 0.3:
            return self.pick(["s", "'ab'", "''", "'x'", "str(n)"])
        return self.pick(
            [
                f"({self.text(d - 1)} + {self.text(d - 1)})",
                f"f'{{{self.integer(0)}:>3}}|{{{self.integer(0)}!r}}'",
                f"{self.text(d - 1)}.upper()",
                f"'{{}}-{{k}}'.format({self.integer(d - 1)}, k={self.integer(0)})",
                f"'%s %d' % ({self.text(d - 1)}, {self.integer(d - 1)})",
                f"','.join(str(v) for v in {self.ints(d - 1)})",
                f"{self.text(d - 1)}[::-1]",
                f"repr({self.ints(d - 1)})",
                f"f'{{x.shape}} {{{self.ints(0)}}}'",
            ]
        )

    def ints(self, d: int = 2) -> str:
        if d <= 0 or self.rng.random() < 0.3:
            return self.pick(["l", "[1, 2]", "list(range(3))", "[n, 1]", "list(x.shape)"])
        v = self.name("v")
        return self.pick(
            [
                f"[{v} + {self.integer(0)} for {v} in {self.ints(d - 1)} if {v} != {self.integer(0)}]",
                f"sorted({self.ints(d - 1)})",
                f"({self.ints(d - 1)} + {self.ints(d - 1)})",
                f"{self.ints(d - 1)}[:2]",
                f"[{self.integer(d - 1)}, *{self.ints(d - 1)}]",
                f"list(map(lambda {v}: {v} * 2, {self.ints(d - 1)}))",
                f"[{v} for {v}, _ in zip({self.ints(d - 1)}, 'abc')]",
                f"list(filter(None, {self.ints(d - 1)}))",
                f"list(itertools.accumulate({self.ints(d - 1)}))",
                f"[({v} := {self.integer(0)}), {v}]",
                f"list(numbers({self.integer(0)} % 4))",
                f"list({{{v}: 1 for {v} in {self.ints(d - 1)}}})",
                f"list(reversed({self.ints(d - 1)}))",
            ]
        )

    def sequence(self, d: int = 2) -> str:
        return self.pick([self.ints, self.text])(d)

    def tensor(self, d: int = 2) -> str:
        if d <= 0 or self.rng.random() < 0.25:
            return self.pick(["x", "x", "x * 2", "torch.ones(3)", "w"])
        a, b = self.tensor(d - 1), self.tensor(d - 1)
        v = self.name("v")
        return self.pick(
            [
                f"({a} + {b})",
                f"({a} * {self.integer(d - 1)})",
                f"{a}.sin()",
                f"sum([{a}, {b}])",
                f"torch.stack([{a}, {b}]).sum(0)",
                f"({a} if {self.truth(d - 1)} else {b})",
                f"sum({a} * {v} for {v} in {self.ints(d - 1)})",
                f"torch.where({a} > 1, {a}, {b})",
                f"[{a}, {b}][{self.integer(0)} % 2]",
                f"{{'k': {a}}}['k']",
                f"(lambda v, *r, k=1: v * k)({a}, {self.integer(0)}, k={self.integer(0)})",
                f"functools.reduce(torch.add, [{a}, {b}])",
                f"torch.cat([{a}[:1], {b}[1:]])",
                f"(-{a})",
                f"({self.integer(0)} - {a})",
                f"{a}.clone().add_({self.integer(0)})",
            ]
        )

    def any(self, d: int = 2) -> str:
        return self.pick([self.integer, self.truth, self.text, self.ints, self.tensor])(d)

    def thing(self) -> str:
        return self.pick(["o", "q", "o", "q", f"{self.pick(self.classes)}({self.pick(['1', 'x', '[1, 2]', 'n', ''])})"])

    def iterable(self) -> str:
        return self.pick(
            [
                self.ints(1),
                f"range({self.integer(0)} % 5)",
                f"enumerate({self.ints(1)})",
                f"numbers({self.integer(0)} % 4)",
                f"outer({self.integer(0)} % 3)",
                "{'a': 1, 'b': x}.items()",
                f"zip({self.ints(0)}, 'abc')",
                self.text(1),
                f"({self.integer(0)} for _ in range(2))",
                f"itertools.chain({self.ints(0)}, {self.ints(0)})",
                f"itertools.islice(itertools.count(), {self.integer(0)} % 4)",
                "x",
            ]
        )

    # --- statements
    def block(self, n: int | None = None, flow: bool = False) -> str:
        lines = [self.statement() for _ in range(n or self.rng.randint(1, 3))]
        if flow and self.rng.random() < 0.4:
            lines.append(f"if {self.truth(1)}: {self.pick(['break', 'continue'])}")
        return "\n".join(lines)

    def statement(self) -> str:
        self.depth += 1
        try:
            if self.depth > 4:
                return self.simple()
            return self.pick(
                [
                    self.simple,
                    self.simple,
                    self.use,
                    self.use,
                    self.use,
                    self.done,
                    self.branch,
                    self.loop,
                    self.trial,
                    self.context,
                    self.function,
                    self.generator,
                    self.matched,
                    self.inner_class,
                    self.jump,
                ]
            )()
        finally:
            self.depth -= 1

    def simple(self) -> str:
        return self.pick([
            f"out.append({self.any()})", f"out.append({self.any()})", f"x = {self.tensor()}", f"n = {self.integer()}",
            f"l = {self.ints()}", f"s = {self.text()}[:20]", f"n += {self.integer(1)}", f"l += ({self.ints(1)})[:6]",
            f"x = x + {self.integer(1)}",
            f"a, *b = {self.ints(1)} + [1]\nout.append((a, b))", f"l.append({self.integer(1)})",
            f"LOG.append({self.text(1)})", "global_add(n)", f"out.append(({self.any(1)}, {self.any(1)}))",
            f"d = {{'k': {self.any(1)}, **{{'z': {self.integer(0)}}}}}\nout.append(d)",
            f"if (m := {self.integer(1)}) > 1: out.append(m)", f"l[0:1] = [{self.integer(0)}]",
            f"out.append([{self.tensor(1)} for _ in range({self.integer(0)} % 3)])",
            f"(a, b), c = ({self.any(1)}, {self.any(0)}), {self.any(0)}\nout.append([c, a])", "x *= 0.5", "w = w + 1",
            f"out.append(sorted({self.ints(1)}, key=lambda v: -v, reverse={self.truth(0)}))", "del l[:1]",
            f"assert {self.truth(1)}, {self.text(0)}" if self.rng.random() < 0.2 else "pass",
            f"out.append({{v % 2: v for v in {self.ints(1)}}})", f"k = {self.any(1)}; out.append(k)",
            f"out.append([(a, b) for a in {self.ints(0)} for b in {self.ints(0)} if a < b])",
            f"out.append(next((v for v in {self.ints(1)} if v > 1), None))",
            "print('n', n)" if self.rng.random() < 0.1 else "pass", f"out.append({self.tensor(2)})",
        ])  # fmt: skip

    def guarded(self, statement: str) -> str:
        return f"try:\n{indent(statement)}\nexcept Exception as e:\n    out.append((type(e).__name__, str(e)[:12]))"

    def use(self) -> str:
        text = self.pick(USES).format(
            o=self.thing(),
            q=self.pick(["o", "q", "p"]),
            b=self.pick(SIGNS[:7] if self.rng.random() < 0.7 else SIGNS),
            c=self.pick(COMPARE_SIGNS),
            C=self.pick(self.classes),
            K=self.pick(self.classes),
        )
        if ":=" in text and not text.split(" :=")[0].strip("(").isidentifier():
            return "pass"
        return self.guarded(f"out.append({text})")

    def done(self) -> str:
        text = self.pick(DONE).format(
            o=self.pick(["o", "q"]), q=self.pick(["o", "q", "p"]), b=self.pick(SIGNS), C=self.pick(self.classes)
        )
        return self.guarded(text)

    def branch(self) -> str:
        text = f"if {self.truth()}:\n{indent(self.block())}"
        if self.rng.random() < 0.4:
            text += f"\nelif {self.truth(1)}:\n{indent(self.block(1))}"
        return text + (f"\nelse:\n{indent(self.block())}" if self.rng.random() < 0.5 else "")

    def loop(self) -> str:
        self.loops += 1
        try:
            if self.loops > 2:
                return self.simple()
            v = self.name("i")
            if self.rng.random() < 0.25:
                text = f"{v} = 0\nwhile {v} < {self.integer(0)} % 4:\n    {v} += 1\n{indent(self.block(None, True))}"
            else:
                text = (
                    f"for {v} in {self.iterable()}:\n    out.append({v})\n{indent(self.block(None, True))}\n"
                    f"    if len(out) > 40: break"
                )
            return text + (f"\nelse:\n{indent(self.block(1))}" if self.rng.random() < 0.3 else "")
        finally:
            self.loops -= 1

    def raising(self) -> str:
        return self.pick(
            [
                "raise Error(n)",
                "raise KeyError('k')",
                "raise ValueError",
                "l[99]",
                "{}['k']",
                "1 / 0",
                "None.a",
                "int('x')",
                "raise Error(1) from KeyError(2)",
                "assert n == -5, 'no'",
                "undefined_name",
                "x.zz",
                "x @ torch.ones(7)",
                "raise",
                "next(iter([]))",
                "raise ExceptionGroup('g', [Error(1), KeyError(2)])",
                "[].pop()",
                "len(3)",
                "raise StopIteration(3)",
                "torch.cat([])",
                "a, b = [1]",
                "'a' + 1",
            ]
        )

    def trial(self) -> str:
        inside = self.block() + (
            f"\nif {self.truth(1)}: {self.raising()}"
            if self.rng.random() < 0.5
            else f"\n{self.raising()}"
            if self.rng.random() < 0.6
            else ""
        )
        text = f"try:\n{indent(inside)}"
        if self.rng.random() < 0.01:  # which is not interpreted
            text += (
                f"\nexcept* (ValueError, TypeError) as g:\n    out.append(len(g.exceptions))\n"
                f"except* Exception as g:\n{indent(self.block(1))}"
            )
            return text
        kinds = self.rng.sample(
            ["KeyError", "(ValueError, IndexError)", "Error", "LookupError", "ZeroDivisionError", "Exception"],
            self.rng.randint(1, 3),
        )
        for kind in kinds:
            then = self.pick(
                [
                    "out.append(str(e))",
                    self.block(1),
                    "out.append(type(e.__context__).__name__)",
                    "raise",
                    f"raise Error(5) from {self.pick(['e', 'None'])}",
                    "out.append(e.args)",
                    "out.append(repr(e.__cause__))",
                    "e.add_note('n'); out.append(e.__notes__)",
                ]
            )
            text += f"\nexcept {kind} as e:\n{indent(then)}"
        if self.rng.random() < 0.3:
            text += f"\nelse:\n{indent(self.block(1))}"
        if self.rng.random() < 0.5:
            text += f"\nfinally:\n{indent(self.pick([self.block(1), 'LOG.append(0)', 'out.append(n)']))}"
        return self.guarded(text)

    def context(self) -> str:
        manager = self.pick(
            [
                "Guard()",
                "Guard(KeyError)",
                "Guard((Exception,), 3)",
                "scope(n)",
                "contextlib.suppress(KeyError, ZeroDivisionError)",
                "torch.no_grad()",
                "contextlib.nullcontext(4)",
                "scope(1), Guard(ValueError)",
                "torch.autocast('cpu', enabled=False)",
                "torch.enable_grad()",
            ]
        )
        start = f"with {manager} as c:" if "," not in manager or manager.startswith("Guard((") else f"with {manager}:"
        if "suppress" in manager:
            start = f"with {manager}:"
        inside = self.block() + (f"\n{self.raising()}" if self.rng.random() < 0.4 else "")
        if self.rng.random() < 0.1:
            inside = (
                f"with contextlib.ExitStack() as stack:\n    stack.enter_context(scope(2))\n"
                f"    stack.callback(LOG.append, 'callback')\n{indent(inside)}"
            )
        return self.guarded(f"{start}\n{indent(inside)}")

    def function(self) -> str:
        g = self.name("g")
        parameters, call = self.pick(
            [
                ("", ""),
                ("a, b=2", self.any(1)),
                ("*a, **k", f"{self.any(1)}, z={self.integer(0)}"),
                ("a, /, b=3, *, c=4", f"{self.any(1)}, c={self.integer(0)}"),
                ("a=[]", ""),
                ("a", f"*[{self.any(0)}]"),
                ("a, b", f"b={self.integer(0)}, **{{'a': {self.any(0)}}}"),
                ("a, b", "1"),
            ]
        )
        decorator = self.pick(
            [
                "",
                "",
                "",
                "@logged\n",
                "@times(2)\n",
                "@functools.lru_cache\n",
                "@staticmethod\n",
                "@functools.wraps(numbers)\n",
            ]
        )
        outside = self.pick(["", "", "nonlocal n\n", "nonlocal x\n", "global TOTAL\nTOTAL += 1\n"])
        change = "n += 1\n" if "nonlocal n" in outside else "x = x * 2\n" if "nonlocal x" in outside else ""
        result = self.pick(
            [
                "n",
                "x",
                "s",
                "locals().get('a')",
                "a" if "a" in parameters.replace("*a", "") else "1",
                f"(lambda: {self.integer(1)})()",
                "x.shape",
                "[n for n in range(2)]",
            ]
        )
        text = (
            f"{decorator}def {g}({parameters}):\n{indent(outside + change)}    return {result}\nout.append({g}({call}))"
        )
        return self.guarded(text)

    def generator(self) -> str:
        g = self.name("g")
        return self.guarded(self.pick([
            f"{g} = numbers({self.integer(0)})\nout.append(next({g}))\nout.append({g}.send(x))\n{g}.close()",
            f"{g} = outer(2)\nout.append(list({g}))",
            f"{g} = numbers(3)\nnext({g})\nout.append({g}.throw(KeyError('t')))\nout.append(list({g}))",
            f"def {g}():\n    for v in {self.ints(1)}:\n        yield v * x\n    return n\n"
                f"out.append([v for v in {g}()])",
            f"{g} = (v * n for v in {self.ints(1)} if v)\nout.append(sum({g}))",
            f"def {g}(k):\n    if k: yield from {g}(k - 1)\n    yield k\nout.append(list({g}(2)))",
            f"{g} = numbers(2)\nfor v in {g}:\n    out.append(v)\n    {self.raising()}",
            f"def {g}():\n    try:\n        yield x\n    except Error as e:\n        yield e.n\n    finally:\n"
            f"        LOG.append('end')\nh = {g}()\nnext(h)\nout.append(h.throw(Error(8)))\ndel h",
            f"def {g}():\n    {self.raising()}\n    yield\nout.append(list({g}()))",
            f"def {g}():\n    raise StopIteration(4)\n    yield\nout.append(list({g}()))",
            f"a, b = itertools.tee({self.iterable()})\nout.append((list(a), list(b)))",
        ]))  # fmt: skip

    def matched(self) -> str:
        subject = self.pick([self.ints(1), self.any(1), "{'k': n, 'z': [1, x]}", "(n, x)", "o", "l", "s"])
        cases = self.rng.sample(
            [
                "[]",
                "[a]",
                "[a, *rest]",
                "{'k': int(v), **more}",
                "int(v) if v > 1",
                "str() | bytes() as t",
                "(int(a), torch.Tensor() as b)",
                "[_, (1 | 2) as b, *_]",
                "torch.Tensor()",
                "None",
                f"{self.pick(self.classes)}(v=vv)",
                "True",
                "'ab'",
                "-1",
                "{}",
            ],
            3,
        )
        return self.guarded(
            f"match {subject}:\n"
            + "\n".join(f"    case {c}:\n{indent(self.block(1), 8)}" for c in cases)
            + "\n    case _:\n        out.append('none')"
        )

    def inner_class(self) -> str:
        if self.rng.random() < 0.97:  # no program makes a class
            return self.simple()
        c = self.name("Z")
        base = self.pick([*self.classes, "", "nn.Module", "dict"])
        lines = [self.method(c) for _ in range(self.rng.randint(1, 2))] + [
            self.pick(
                ["k = n", "x = x", "d = Data()", "def __init__(self, v=2):\n    super().__init__()\n    self.v = v * n"]
            )
        ]
        used = ["z.v", "z.method()", "z.k", "z + o", "z == o", "type(z).__name__", "z.zz", "z.d"]
        used.append("isinstance(z, K0)")
        text = f"class {c}({base}):\n{indent(chr(10).join(lines))}\nz = {c}()\n"
        return self.guarded(f"{text}out.append({self.pick(used)})")

    def jump(self) -> str:
        if self.rng.random() < 0.3:
            return f"if {self.truth()} and {self.truth(1)}: return ('early', x, out)"
        return self.simple()

    def program(self) -> Program:
        classes = [self.new_class(i) for i in range(self.rng.randint(1, 3))]
        helpers = (
            "def global_add(k):\n    global TOTAL\n    TOTAL += k\ndef copy_of(o):\n    import copy\n"
            "    return copy.copy(o)\ndef print_of(o): return [o] and f'{o!s:.5}'\n"
        )
        body = self.block(self.rng.randint(3, 7))
        instances = [
            f"{self.pick(self.classes)}({self.pick(['1', '2', 'torch.ones(2)', '[1, 2]', ''])})" for _ in range(3)
        ]
        outside = self.rng.random() < 0.6
        inside = "" if outside else f"o, q, p = {', '.join(instances)}\n"
        parameters = "x, n, s, l, w" + (", o, q, p" if outside else "")
        text = f"def f({parameters}):\n    out = []\n{indent(inside + body)}\n    return x, n, s, l, out"
        inputs = [
            "torch.tensor([1.0, 2.0, 3.0])",
            "2",
            "'ab'",
            "[1, 2, 3]",
            "torch.ones(3, requires_grad=True)",
            *(instances if outside else []),
        ]
        source = "\n".join([HEAD, TAIL, helpers, *classes, text, f"ARGS = [{', '.join(inputs)}]", ""])
        return Program(
            source,
            tuple(
                self.rng.choice(["pass", "ARGS[1] = 3", "ARGS[3].append(5)", "ARGS[2] = 'b'", "LOG.clear()"])
                for _ in range(2)
            ),
        )


def generate(seed: int) -> Program:
    """The program of a seed: one that CPython compiles and whose module it executes."""
    for attempt in range(50):
        program = Writer(seed + attempt * 10**9).program()
        with restored(), warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            exec(compile(program.source, "<program>", "exec"), {"__name__": "generated_program"})
            return program
    raise AssertionError(f"seed {seed} gives no program")
