"""Programs as users write them, each compiled, called twice, and compared with eager exactly; both calls run one
compiled program."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import itertools
import math
import operator
import types
import typing
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from tests.capture.agreement import assert_same
from thunder.errors import FallbackWarning

PROGRAMS: dict[str, tuple] = {}
torch.manual_seed(0)
X, Y, S = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 5, 8)


def program(*args, misses: int = 1, **kwargs):
    """Runs the decorated function, or an instance of the decorated class, with these arguments."""

    def add(function):
        PROGRAMS[function.__name__] = (
            lambda: function() if isinstance(function, type) else function,
            args,
            kwargs,
            misses,
        )
        return function

    return add


def built(*args, misses: int = 1, **kwargs):
    """Runs what the decorated builder makes with these arguments."""

    def add(function):
        PROGRAMS[function.__name__] = (function, args, kwargs, misses)
        return function

    return add


@program(X)
def exception_group_that_is_returned(x):
    try:
        raise ExceptionGroup("two", [ValueError(1), TypeError(2)])
    except ExceptionGroup as group:
        subgroup = group.subgroup(ValueError)
    return x * len(subgroup.exceptions), str(subgroup), [subgroup.exceptions]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2

    def weight(self):
        return self.value * 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0
    tags: list = dataclasses.field(default_factory=list)

    def total(self):
        return self.x.sum() * self.scale


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int = 3


class Pair(typing.NamedTuple):
    a: torch.Tensor
    b: int = 2


class Output(collections.OrderedDict):
    """A result that is a dict and has attributes, as model libraries make them."""

    def __init__(self, **kwargs):
        super().__init__()
        for k, v in kwargs.items():
            self[k] = v

    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        super().__setattr__(k, v)


# ----------------------------------------------------------------------------------------------------------------
# arguments


@program({"a": [X, Y], "b": (X, {"c": Y})}, n=[1, [2, 3]])
def nested_arguments(d, n):
    return d["a"][0] * n[0] + d["b"][1]["c"] * n[1][1]


@program(X, Y, X, scale=2.0, shift=Y)
def star_arguments(*args, **kwargs):
    return sum(args) * kwargs["scale"] + kwargs.get("shift", 0) + len(kwargs)


@program(X, Y)
def every_parameter_kind(a, /, b, c=3, *rest, d=4, e=None, **more):
    return a * c + b * d + len(rest) + (0 if e is None else e) + len(more)


@program(X, *[Y, Y], k=1)
def passed_on(x, *args, **kwargs):
    def inner(a, b, c, k):
        return a + b * c + k

    return inner(x, *args, **kwargs)


@program(Batch(X, 3.0))
def dataclass_argument(b):
    return b.total() + b.scale


@program(Frozen(X))
def frozen_dataclass(f):
    return Frozen(f.x * f.n, f.n + 1)


@program(Pair(X))
def namedtuple_argument(p):
    return p.a * p.b, p._replace(b=5), p._asdict()["b"]


@program(X, Colour.BLUE, Level.HIGH)
def enum_arguments(x, c, level):
    return x * c.weight() + level if c is Colour.BLUE and level > Level.LOW else x


@program(X, None, "sum", torch.float64, torch.device("cpu"), ..., slice(0, 1))
def other_arguments(x, mask, how, dtype, device, dots, rows):
    y = x.to(device=device, dtype=dtype)[rows, dots]
    return getattr(y, how)() if mask is None else y


@program(X, torch.tanh, lambda t: t * 2, functools.partial(torch.mul, other=3))
def callables_as_arguments(x, f, g, h):
    return f(x) + g(x) + h(x)


@program(types.SimpleNamespace(x=X, inner=types.SimpleNamespace(n=2)))
def namespace_argument(s):
    return s.x * s.inner.n


@program([X, [Y, [X, [Y]]]])
def deep_list(v):
    def flat(v):
        return [t for u in v for t in flat(u)] if isinstance(v, list) else [v]

    return torch.stack(flat(v)).sum(0)


# ----------------------------------------------------------------------------------------------------------------
# results


@program(X)
def requires_grad_said_again(x):
    unit = torch.eye(3)
    unit.requires_grad = False
    return x @ unit, unit.requires_grad_(False)


@program(X)
def numbers_of_numpys(x):
    n, half = np.int64(2), np.float64(0.5)
    sizes = [
        torch.zeros(n, 3),
        x.new_ones((n,)),
        torch.full((n,), half),
        x.view(-1, np.prod((1, 3))),
        torch.linspace(half, np.float32(1), n),
        x.sum(np.int64(1)),
    ]
    left = [
        half * x,
        np.float32(2) * x,
        n + x,
        np.float32(1) - x,
        half / (x.abs() + 1),
        half**x,
        half < x,
        np.float64(3) * (x > 0).int(),
    ]
    return (
        sizes,
        left,
        x[n - 1, :: np.int64(2)],
        torch.arange(np.float64(0), np.float64(1), np.float64(0.25)),
        x.clamp(-half, np.float32(1)),
    )


@program(X)
def types_of_numpys_data(x):
    scalars = [
        torch.tensor(np.float64(2)),
        torch.tensor([half := np.float64(0.5), 1.0]),
        torch.as_tensor(half),
        torch.tensor(np.float16(2)),
        torch.tensor([np.int64(3)]),
    ]
    arrays = [
        torch.tensor(np.zeros(3)),
        torch.as_tensor(np.ones((2, 0, 3))),
        torch.asarray(np.arange(2, dtype=np.int32)),
        torch.tensor(np.zeros((0, 4), dtype=bool)),
    ]
    return (
        scalars,
        arrays,
        x.new_tensor(np.zeros(2)),
        torch.tensor(np.zeros(2), dtype=torch.float16),
        x * torch.as_tensor(np.full(3, 0.1)),
    )


@program(X)
def lists_changed_after_an_operation_took_them(x):
    """As DenseNet's features grow."""
    features, splits, sizes = [x], {"of": [1, 2]}, [3, 2]
    for _ in range(3):
        features.append(torch.cat(features, 1).sin())
    first = torch.stack(features[:1])
    parts = torch.split(x, splits["of"], 1)
    splits["of"][0] = 7
    turned = x.view(sizes)
    sizes.clear()
    features[0] = x + 5
    return torch.cat(features, 1), first, parts, turned


@program(X)
def lists_that_operations_gave_are_changed(x):
    rows = torch.ops.aten.unbind(x)
    first = rows[0]
    rows[0] = first * 7
    rows.append(first + 1)
    return torch.stack(rows), rows.pop() * rows[1]


@program(X)
def nested_results(x):
    return {"a": [x + 1, (x * 2, {"b": x})], 3: None, "n": 5, "s": "text", (1, 2): 1.5}


@program(X)
def set_results(x):
    return {1, 2, x.shape[0]}, frozenset("ab")


@program(X)
def object_results(x):
    return Batch(x + 1, 3.0, [x]), Pair(x * 2), Colour.RED, Output(logits=x * 2, loss=None)


@program(X)
def container_results(x):
    d = collections.defaultdict(list)
    d["a"].append(x * 2)
    return d, collections.deque([x, 1], maxlen=4), collections.OrderedDict(z=x, a=1), collections.Counter("aab")


@program(X)
def python_results(x):
    return x.shape, x.dtype, x.device, x.size(0), x.ndim, x.numel(), x.is_floating_point(), len(x)


@program(X)
def nothing(x):
    x + 1


@program(X, Y)
def inputs_as_results(x, y):
    return y, [x, x], {"x": x}


@program(X)
def one_result_twice(x):
    y = x * 2
    return y, [y, y]


@program(X)
def shared_list_in_the_result(x):
    shared = [x + 1]
    return [shared, shared]


@program(X)
def constant_tensor(x):
    return torch.ones(3), torch.arange(3), torch.tensor([1.0, 2.0]) + x[0, :2] * 0


@program(X)
def slices_and_sizes(x):
    return x.shape[1:], slice(1, 2), range(3), x.size(), torch.Size([1, 2])


@program(X)
def generator_consumed(x):
    return tuple(x * i for i in range(3)), list(map(lambda i: x + i, range(2))), [*zip([x], [1])]


# ----------------------------------------------------------------------------------------------------------------
# Python


@program(X)
def generators(x):
    def numbers(n):
        for i in range(n):
            got = yield i
            if got is not None:
                yield got

    def chained():
        yield from numbers(3)
        yield x

    g = numbers(3)
    first = next(g)
    sent = g.send(10)
    return sum(v * x for v in list(chained())[:3]) + first + sent


@program(X)
def closures(x):
    def counter():
        n = 0

        def step(k=1):
            nonlocal n
            n += k
            return n

        return step

    step = counter()
    step()
    return x * step(3) + [lambda: i for i in range(3)][0]()


@program(X)
def recursion(x, n=5):
    return x if n == 0 else recursion(x * 1.5 + n, n - 1)


def doubled(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs) * 2

    return wrapper


def with_arguments(k):
    def decorate(f):
        return lambda x: f(x) * k

    return decorate


@doubled
@with_arguments(3)
def decorated_function(x):
    return x + 1


@program(X)
def decorators(x):
    return decorated_function(x)


@program(X)
def decorator_made_inside(x):
    @doubled
    def g(v):
        return v + 1

    return g(x)


@program(X)
def comprehensions(x):
    return (
        [x[i] for i in range(2)],
        {i: x * i for i in range(2)},
        [i * j for i in range(3) if i for j in range(2)],
        [r for r in x],
    )


@program(X, Y)
def conditional_expressions(x, y):
    return x if x.shape == y.shape and not x.is_complex() else y


@program(X)
def loops(x):
    n = 0
    while n < 10:
        n += 1
        if n % 2:
            continue
        if n > 6:
            break
        x = x + n
    else:
        x = x * 100
    for i, (a, b) in enumerate(zip([1, 2], "ab")):
        x = x * a
    else:
        x = x - 1
    return x


@program(X)
def exceptions(x):
    trail = []
    try:
        try:
            {}["k"]
        except KeyError as error:
            raise ValueError("v") from error
        finally:
            trail.append("finally")
    except (TypeError, ValueError) as error:
        trail.append((str(error), type(error.__cause__).__name__))
    else:
        trail.append("else")
    return x * len(trail), trail


@program(X)
def stop_iteration_and_next_default(x):
    return next(iter([]), x), next((v for v in [1, 2, 3] if v > 1), None)


@program(X)
def pattern_matching(x):
    match {"kind": "scale", "value": [2, 3], "point": Pair(x)}:
        case {"kind": "scale", "value": [a, *rest], "point": Pair(a=t, b=2)}:
            return t * a + len(rest)
        case _:
            return x


@program(X)
def walrus_and_stars(x):
    if (n := x.shape[0]) > 1:
        first, *middle, last = range(5)
        return x * n + first + last + len([*middle, *middle]) + {**{"a": 1}, "b": 2}["a"]
    return x


@program(X)
def formatted_strings(x):
    name = f"{x.shape[0]:>3}|{'a'!r}|{3.14159:.2f}|{x.dtype}"
    return name, "%d %s" % (x.shape[1], "b"), "{} {n}".format(1, n=2)


@program(X)
def sorting(x):
    pairs = sorted([(3, x), (1, x * 2), (2, x * 3)], key=lambda p: p[0], reverse=True)
    values = [p[1] for p in pairs]
    values.sort(key=lambda t: t.ndim)
    return values, max([1, 5, 3], key=lambda v: -v), min((x.shape[0], 7)), sorted("cab")


@program(X, Y)
def builtins_over_tensors(x, y):
    return (
        sum([x, y]), sum((v for v in (x, y)), x), any(v is None for v in (x, y)), all(v.ndim == 2 for v in (x, y)),
            len(list(zip((x, y), range(5)))),
        list(map(operator.add, [x], [y])), list(filter(lambda v: v is x, [x, y])), list(reversed([x, y])),
            isinstance(x, (int, torch.Tensor)), type(x) is torch.Tensor,
        callable(x), hasattr(x, "shape"), getattr(x, "nonsense", 7), abs(x), round(2.567, 1), divmod(7, 2), pow(x, 2),
            bool([x]), id(x) == id(x),
    )  # fmt: skip


@program(X)
def functools_and_itertools(x):
    return (
        functools.reduce(lambda a, b: a + b, [x, x, x]), functools.partial(lambda a, b, c: a * b + c, x, c=3)(2),
            [x * n for n in itertools.accumulate([1, 2, 3])],
        [x * (a + b) for a, b in itertools.product([1, 2], [3])], list(itertools.chain([x], [1])),
            [x * n for n in itertools.islice(itertools.count(1), 2)],
        list(itertools.zip_longest([1], [2, 3])), [x * a for a, _ in itertools.pairwise([1, 2, 3])],
            [list(g) for _, g in itertools.groupby([1, 1, 2])],
    )  # fmt: skip


@functools.lru_cache(maxsize=None)
def cached_factor(n):
    return n * 2


@functools.lru_cache
def cached_on_tensors(x):
    return x * 2


@program(X)
def lru_cache(x):
    return x * cached_factor(3) + cached_factor(4)


@program(X)
def single_dispatch_like_table(x):
    table = {torch.float32: lambda t: t * 2, torch.float64: lambda t: t * 3}
    return table[x.dtype](x)


class Vector:
    """Operators of the user's own."""

    def __init__(self, t):
        self.t = t

    def __add__(self, other):
        return Vector(self.t + (other.t if isinstance(other, Vector) else other))

    __radd__ = __add__

    def __mul__(self, k):
        return Vector(self.t * k) if not isinstance(k, Vector) else NotImplemented

    def __rmul__(self, k):
        return self * k

    def __iadd__(self, other):
        self.t = self.t + other
        return self

    def __neg__(self):
        return Vector(-self.t)

    def __getitem__(self, i):
        return self.t[i]

    def __len__(self):
        return len(self.t)

    def __iter__(self):
        return iter([self.t, self.t])

    def __contains__(self, v):
        return v == 3

    def __bool__(self):
        return True

    def __eq__(self, other):
        return isinstance(other, Vector)

    def __hash__(self):
        return 1

    def __call__(self, k):
        return self.t * k

    def __enter__(self):
        return self.t

    def __exit__(self, *exc):
        return False

    def __repr__(self):
        return "Vector()"


@program(X, Y)
def user_operators(x, y):
    v, w = Vector(x), Vector(y)
    u = v + w * 2
    u += 1
    with v as t:
        inside = t * 2
    return (
        u.t,
        (3 * v).t,
        (-v).t,
        v[0],
        len(v),
        list(v),
        3 in v,
        4 in v,
        bool(v),
        v == w,
        v(2),
        sum([v, w], v).t,
        inside,
        repr(v),
        (x + v).t,
    )


class Lazy:
    """Attribute hooks."""

    scale = 2

    def __init__(self, t):
        self._t = t

    def __getattr__(self, name):
        if name.startswith("double_"):
            return self._t * 2
        raise AttributeError(name)

    @functools.cached_property
    def total(self):
        return self._t.sum()

    @property
    def half(self):
        return self._t / 2

    @half.setter
    def half(self, value):
        self._t = value * 2

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def make(cls, x):
        return cls(x * cls.scale)


@program(X)
def attribute_hooks(x):
    o = Lazy.make(x)
    o.half = x
    return o.double_anything, o.total, o.total, o.half, o.static(x), getattr(o, "nope", None), hasattr(o, "other")


class Meta(type):
    def __call__(cls, *args):
        instance = super().__call__(*args)
        instance.extra = 5
        return instance

    @property
    def kind(cls):
        return cls.__name__


class WithMeta(metaclass=Meta):
    def __init__(self, t):
        self.t = t


@program(X)
def metaclass(x):
    return WithMeta(x).t * WithMeta(x).extra, WithMeta.kind


class A:
    def f(self, v):
        return [("A", v)]


class B(A):
    def f(self, v):
        return [("B", v * 2), *super().f(v)]


class C(A):
    def f(self, v):
        return [("C", v * 3), *super().f(v)]


class D(B, C):
    pass


@program(X)
def multiple_inheritance(x):
    return D().f(x), isinstance(D(), C), D.__mro__[1].__name__


class Typed:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, o, owner=None):
        return o.__dict__[self.name] * 2

    def __set__(self, o, value):
        o.__dict__[self.name] = value


class Holder:
    v = Typed()


@program(X)
def descriptors(x):
    h = Holder()
    h.v = x
    return h.v


# ----------------------------------------------------------------------------------------------------------------
# context managers, modes


class Guard:
    def __enter__(self):
        return 3

    def __exit__(self, kind, *rest):
        return kind is ValueError


@program(X)
def context_manager(x):
    @contextlib.contextmanager
    def scaled(n):
        yield x * n

    with scaled(3) as w, Guard() as g:
        y = w * g
        raise ValueError
    with contextlib.suppress(KeyError), contextlib.nullcontext(2) as n:
        y = y * n
        {}["k"]
    with contextlib.ExitStack() as stack:
        y = y + stack.enter_context(scaled(2))
    return y


W = torch.randn(3, 3, requires_grad=True)


@program(X)
def no_grad_inside(x):
    with torch.no_grad():
        y = x @ W
    with torch.set_grad_enabled(False):
        z = x @ W
    return y, z, torch.is_grad_enabled()


@program(X)
def inference_mode_inside(x):
    with torch.inference_mode():
        x = x * 2
        z = torch.is_inference_mode_enabled()
    return z, x.shape


@program(X)
def no_grad_decorator(x):
    @torch.no_grad()
    def g(v):
        return v @ W

    return g(x)


@program(X)
def autocast_inside(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
    return y, x @ x.T


@program(X)
def grad_mode_queries(x):
    return x if torch.is_grad_enabled() else x * 2, torch.is_autocast_enabled(), torch.get_default_dtype()


@program(X)
def dtype_machinery(x):
    return (
        torch.finfo(x.dtype).min,
        torch.iinfo(torch.int32).max,
        torch.promote_types(x.dtype, torch.float64),
        x.new_zeros(2),
        torch.zeros_like(x, dtype=torch.int64),
    )


# ----------------------------------------------------------------------------------------------------------------
# modules


@program(X)
class PropertyModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.blocks = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Linear(3, 3)})

    @property
    def double(self):
        return self.linear.weight * 2

    def forward(self, v):
        for name, block in self.blocks.items():
            v = block(v) if name != "z" else v
        return v @ self.double + len(self.blocks) + ("a" in self.blocks)


@program(X)
class ListsOfModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.weights = nn.ParameterList([torch.randn(3) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(3)})
        self.seq = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.Dropout(0.0))

    def forward(self, x):
        for i, layer in enumerate(self.layers[1:3]):
            x = layer(x) + i
        x = self.layers[-1](x) * len(self.layers)
        for w in self.weights:
            x = x * w
        for layer in self.seq[:2]:
            x = layer(x)
        return self.seq(x) + self.named["a"] + sum(p.sum() for p in self.weights)


@program(X)
class NamedParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("c", torch.ones(3))

    def forward(self, x):
        total = x.sum()
        for name, p in self.named_parameters():
            total = total + p.sum() * len(name)
        for p in self.parameters():
            total = total + p.mean()
        for _, b in self.named_buffers():
            total = total + b.sum()
        return total, len(list(self.children())), [n for n, _ in self.named_modules()], next(self.parameters()).dtype


@program(X)
class StateDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        return x + self.state_dict()["a.bias"]


@program(X)
class Hooks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.a.register_forward_hook(lambda m, i, o: o * 2)
        self.a.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        self.a.register_forward_hook(lambda m, args, kwargs, o: o + 1, with_kwargs=True)

    def forward(self, x):
        return self.a(x)


@program(X)
class GetAttr(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) + self.in_features + self.weight.sum()


@program(X)
class Inherited(PropertyModule):
    def forward(self, v):
        return super().forward(v) * 2 + super().double.sum()


@built(X)
def parametrized():
    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    m = nn.Linear(3, 3)
    nn.utils.parametrize.register_parametrization(m, "weight", Double())
    return m


@built(X)
def weight_norm():
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


@built(S)
def batch_norm_eval():
    return nn.Sequential(nn.BatchNorm1d(5)).eval()


@built(S)
def transformer_encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@built(S)
def transformer_encoder_layer_in_eval():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()


@built(S)
def transformer_encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        2,
        enable_nested_tensor=False,
    )


@built(S, S)
def transformer_decoder_layer():
    return nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@built(S, S, S)
def multihead_attention():
    return nn.MultiheadAttention(8, 2, batch_first=True)


@built(S, S, S, need_weights=False)
def multihead_attention_without_weights():
    return nn.MultiheadAttention(8, 2, batch_first=True).eval()


@built(torch.randn(2, 8))
def lstm_cell():
    return nn.LSTMCell(8, 4)


@built(torch.randn(2, 8))
def gru_cell():
    return nn.GRUCell(8, 4)


@built(S)
def lstm():
    return nn.LSTM(8, 4, batch_first=True)


@built(S)
def gru():
    return nn.GRU(8, 4, batch_first=True)


@built(torch.randn(1, 3, 8, 8))
def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4).eval(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


@built(torch.tensor([[1, 2, 0]]))
def embedding():
    return nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 2), nn.Softmax(-1))


@built(X, torch.tensor([0, 2]))
def losses():
    criterion = nn.CrossEntropyLoss()
    return lambda x, t: (criterion(x, t), F.mse_loss(x, x * 2), F.nll_loss(F.log_softmax(x, -1), t, reduction="none"))


@program(S)
def attention_by_hand(x, heads=2):
    b, t, c = x.shape
    q, k, v = (x.view(b, t, heads, c // heads).transpose(1, 2) for _ in range(3))
    mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1)
    a = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(c // heads) + mask, dim=-1)
    return (a @ v).transpose(1, 2).contiguous().view(b, t, c)


@program(S)
def rearranging(x):
    def rearrange(t, pattern):
        names_in, names_out = (side.split() for side in pattern.split("->"))
        return t.permute(*[names_in.index(n) for n in names_out])

    return rearrange(x, "b t c -> c b t"), torch.einsum("btc,bsc->bts", x, x), x.unflatten(-1, (2, 4)).flatten(0, 1)


@program(X)
def indexing(x):
    i = torch.tensor([1, 0])
    return (
        x[0],
        x[:, 1:],
        x[..., None],
        x[i],
        x[i, 1],
        x[-1, ::2],
        x[None, :, [0, 2]],
        x[torch.arange(2), torch.arange(2)],
    )


@program(X, Y)
def many_torch_calls(x, y):
    a, b = torch.max(x, dim=1)
    c = torch.where(x > y, x, y).clamp(min=0)
    d = torch.cat([x, y], 0).chunk(2, 0)
    return (
        a,
        b,
        c,
        d,
        x.masked_fill(x > 0, 0.0),
        torch.topk(x, 2).values,
        x.split([1, 2], 1),
        x.std(),
        torch.outer(x[0], y[0]),
        x.T @ y,
    )


@program(X)
def in_place_on_temporaries(x):
    y = x + 1
    y += 2
    y.mul_(3)
    z = torch.zeros(2, 3)
    z[0] = x[0]
    return y, z


@program(X)
def methods_by_name(x):
    return (
        getattr(x, "sum")(),
        torch.Tensor.mul(x, 2),
        operator.attrgetter("shape")(x),
        operator.methodcaller("add", 1)(x),
        operator.itemgetter(0)([x, 1]),
    )


@program(X)
def type_checks(x):
    return (
        isinstance(x, torch.Tensor), isinstance(x, nn.Parameter), torch.is_tensor(x), type(x).__name__,
            issubclass(type(x), torch.Tensor), x.__class__ is torch.Tensor,
        isinstance(W, nn.Parameter), W.requires_grad, x.is_leaf, x.grad, x.is_cuda, x.layout == torch.strided,
    )  # fmt: skip


@program(X)
def imports_inside(x):
    import math as m
    from collections import namedtuple

    from torch.nn import functional as G

    return G.relu(x) * m.pi, namedtuple("P", "a")(x).a


@program(X)
def copies(x):
    return copy.copy([x, 1]), copy.deepcopy({"n": [1, 2]}), dict(a=1) | {"b": x}, list("ab"), [1, 2][:]


@program(X)
def string_work(x):
    return "-".join(str(n) for n in x.shape), "layers.0.weight".split("."), "abc".upper().startswith("A"), " x ".strip()


@program(X)
def global_state_of_this_module(x):
    return x * len(PROGRAMS.keys() & {"global_state_of_this_module"}) + X


def misses_of(compiled):
    return thunder.cache_misses(compiled), thunder.last_recompile_reasons(compiled)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name):
    make, args, kwargs, misses = PROGRAMS[name]
    torch.manual_seed(1)
    fn = make()
    compiled = thunder.jit(fn)
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(*args, **kwargs), fn(*args, **kwargs))
    assert thunder.cache_misses(compiled) == misses, misses_of(compiled)
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------------------------------------------------------- what
# needs more than a comparison


def test_jit_inside_jit_is_inlined():
    inner = thunder.jit(lambda a: a * 2)
    compiled = thunder.jit(lambda a: inner(a) + 1)
    assert torch.equal(compiled(X), X * 2 + 1)
    assert len(thunder.last_traces(compiled)[0].bound_symbols) == 2


def test_autocast_outside():
    compiled = thunder.jit(lambda a: a @ a.T)
    assert compiled(X).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(X).dtype is torch.bfloat16
    assert compiled(X).dtype is torch.float32 and thunder.cache_misses(compiled) == 2


def test_results_are_fresh_containers():
    compiled = thunder.jit(lambda a: [a, [a], {"k": []}])
    first, second = compiled(X), compiled(X)
    assert first[0] is X and first is not second and first[1] is not second[1] and first[2]["k"] is not second[2]["k"]


def test_inputs_come_back_as_themselves():
    batch, items = Batch(X), [X]
    assert thunder.jit(lambda b: b)(batch) is batch
    assert thunder.jit(lambda b: (b, 1))(items)[0] is items
    assert thunder.jit(lambda b: b.x)(batch) is X


def test_module_and_arguments_are_not_kept_alive():
    compiled = thunder.jit(lambda a, m: m(a))
    m, t = nn.Linear(3, 3), torch.randn(2, 3)
    with torch.no_grad():
        compiled(t, m)
    references = weakref.ref(m), weakref.ref(t)
    del m, t
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_returned_function_has_this_calls_values():
    compiled = thunder.jit(lambda a: lambda b: a * 2 + b)
    assert torch.equal(compiled(X)(Y), X * 2 + Y)
    assert torch.equal(compiled(Y)(X), Y * 2 + X)


def counted_outside():
    count = 0

    def program(x):
        def step():
            nonlocal count
            count += 1
            return count

        return x + 1, step

    return program, lambda: count


def test_a_returned_function_shares_the_variables_outside():
    trails = []
    for make in (lambda f: f, thunder.jit):
        program, seen = counted_outside()
        run, trail = make(program), []
        for _ in range(3):
            _, step = run(torch.ones(2))
            trail += [step(), step(), seen()]
        trails.append(trail)
    assert trails[0] == trails[1]


def test_cells_of_equal_contents_are_told_apart():
    a, b = 1, 1

    def inner():
        return a, b

    def second():
        return inner.__closure__[1].cell_contents

    compiled = thunder.jit(lambda x: x * second(), fallback="eager")
    x = torch.ones(2)
    with pytest.warns(FallbackWarning, match="through its cell"):
        assert torch.equal(compiled(x), x)
    inner.__closure__[1].cell_contents = 2
    assert torch.equal(compiled(x), x * 2)


def test_symbolic_lengths():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, v):
            b, t, c = v.shape
            q, k, w = self.q(v).split(c, dim=2)
            q, k, w = (z.view(b, t, 4, c // 4).transpose(1, 2) for z in (q, k, w))
            return v + self.o((torch.softmax(q @ k.transpose(-2, -1), -1) @ w).transpose(1, 2).reshape(b, t, c))

    module = Block()
    compiled = thunder.jit(module, cache="symbolic values")
    with torch.no_grad():
        for t in range(2, 102):
            v = torch.randn(2, t, 16)
            assert_same(compiled(v), module(v))
    assert thunder.cache_misses(compiled) <= 2, thunder.last_recompile_reasons(compiled)


def test_custom_autograd_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    compiled = thunder.jit(lambda x: Double.apply(x) + 1)
    with torch.no_grad():
        assert torch.equal(compiled(X), X * 2 + 1)


def test_lru_cache_over_a_tensor_is_left_to_python():
    """Which keeps what it gave for this tensor, whatever has changed."""
    compiled = thunder.jit(lambda x: cached_on_tensors(x) + 1, fallback="eager")
    with pytest.warns(FallbackWarning, match="lru_cache"):
        assert torch.equal(compiled(X), X * 2 + 1) and torch.equal(compiled(Y), Y * 2 + 1)


def test_methods_are_compiled_bound():
    class Scale:
        def __init__(self, n):
            self.n = n

        def apply(self, x):
            return x * self.n

        @thunder.jit
        def method(self, x):
            return x * self.n + 1

        def __call__(self, x):
            return x * self.n + 2

    s = Scale(3)
    assert (
        torch.equal(thunder.jit(s.apply)(X), X * 3)
        and torch.equal(s.method(X), X * 3 + 1)
        and torch.equal(thunder.jit(s)(X), X * 3 + 2)
    )
    compiled = thunder.jit(s.apply)
    compiled(X)
    s.n = 4
    assert torch.equal(compiled(X), X * 4)


def test_random_operations_advance_the_generator_as_eager_does():
    def f(x):
        return F.dropout(x, 0.5) + torch.rand_like(x), torch.randn(2)

    compiled = thunder.jit(f)
    for seed in range(3):
        torch.manual_seed(seed)
        got = compiled(X)
        torch.manual_seed(seed)
        assert_same(got, f(X))


def test_train_and_eval():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9))
    compiled = thunder.jit(m)
    with torch.no_grad():
        torch.manual_seed(0)
        got = compiled(X)
        torch.manual_seed(0)
        assert_same(got, m(X))
        compiled.eval()
        assert not m.training
        assert_same(compiled(X), m(X))
        compiled.train()
        torch.manual_seed(1)
        got = compiled(X)
        torch.manual_seed(1)
        assert_same(got, m(X))
    assert thunder.cache_misses(compiled) == 2


def test_values_that_depend_on_no_input_are_read_while_the_program_is_captured():
    def program(x):
        positions = torch.arange(x.shape[1])[None]
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        packed = (steps != 1).cumsum(-1)
        if (packed[:, -1] == 0).all():
            return x * torch.tensor(2.0).item() + int(torch.tensor([3]))
        return x

    compiled = thunder.jit(program, dynamic=False)
    for width in (5, 7):
        x = torch.randn(2, width)
        assert torch.equal(compiled(x), program(x))
    assert [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name != "python_del"] == [
        "mul",
        "add",
    ]
    for decided in (lambda x: x if (x > 0).all() else -x, lambda x: x if torch.rand(()) > 2 else -x):
        compiled = thunder.jit(decided)
        assert torch.equal(compiled(-x), x) and len(compiled.programs[0].path) == 1


class Partial:
    def _start(self, a, b):
        self.scale = a * b

    def _scaled(self, x, k):
        return x * k * self.scale

    __init__ = functools.partialmethod(_start, b=3)
    scaled = functools.partialmethod(_scaled, k=2)


def test_methods_that_a_descriptor_makes_anew_at_each_access(monkeypatch):
    outside = Partial(1)

    def program(x):
        return Partial(2).scaled(x) + outside.scaled(x)

    compiled = thunder.jit(program)
    x = torch.ones(2)
    assert torch.equal(compiled(x), program(x)) and torch.equal(compiled(x), program(x))
    assert thunder.cache_misses(compiled) == 1
    monkeypatch.setattr(Partial, "scaled", functools.partialmethod(Partial._scaled, k=5))
    assert torch.equal(compiled(x), program(x))


class Indexed:
    def __init__(self, values=(2, 4, 6)):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i]


@pytest.mark.parametrize(
    "data",
    [
        range(1, 4), [range(2), range(1, 3)], range(0), collections.deque([1, 2]), Indexed(), np.ones(2, np.int8),
            np.array(2.5), np.float64(1), [np.float64(1), 2.0],
        [np.int32(1)], [True, 2], [[], []],
    ],
    ids=lambda data: str(data).split(" object")[0],
)  # fmt: skip
@pytest.mark.parametrize(
    "make",
    [
        lambda x, d: torch.tensor(d),
        lambda x, d: torch.as_tensor(d),
        lambda x, d: x.new_tensor(d),
        lambda x, d: torch.tensor(d, dtype=torch.float16),
    ],
)
def test_tensors_of_sequences_and_of_numpys_numbers_have_their_dtype(make, data):
    def program(x):
        instance = make(x, data)
        return instance, instance.dtype, instance.shape

    assert_same(thunder.jit(program)(X), program(X))


@pytest.mark.parametrize("make", [lambda x, d: torch.tensor(d), lambda x, d: x.new_tensor(d)])
def test_sequences_of_the_users_are_read_at_each_call(make):
    compiled, data = thunder.jit(make, fallback="error"), Indexed([1, 2])
    for values in ([1, 2], [1, 3], [2.5]):
        data.values[:] = values
        assert_same(compiled(X, data), make(X, data))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.LongTensor([0, 0]).add_(x[0, :2].long()), lambda x: torch.FloatTensor([1.0]),
            lambda x: torch.from_numpy(np.ones(3)).add_(x[0]),
        lambda x: torch.FloatTensor(2, 3).copy_(x).mul_(2),
    ],
)  # fmt: skip
def test_tensors_of_functions_that_are_no_operations_are_made_at_each_call(program):
    compiled = thunder.jit(program)
    results = [compiled(X) for _ in range(3)]
    assert results[0] is not results[1]
    for got in results:
        assert_same(got, program(X))


def test_tensors_of_arrays_from_outside_share_their_memory():
    array, other = np.zeros(3), np.zeros(3)
    compiled = thunder.jit(lambda x: torch.from_numpy(array).add_(x))
    for _ in range(3):
        assert_same(compiled(X[0]), torch.from_numpy(other).add_(X[0]))
    assert (array == other).all()


def test_a_tensor_of_the_legacy_constructor_has_the_size_that_it_is_given():
    for program in (
        lambda x: torch.Tensor(x.size()).fill_(1),
        lambda x: torch.Tensor(x[0].size()).fill_(1),
        lambda x: torch.Tensor(x[0, 0].shape).fill_(1),
    ):
        assert_same(thunder.jit(program)(X), program(X))


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", [True, False])
def test_gradients_through_an_index_that_is_one_bool(shape, mask):
    x, key = torch.rand(shape, requires_grad=True), torch.tensor(mask)
    got, want = (
        torch.autograd.grad((f(x, key) * 2).sum(), x) for f in (thunder.jit(lambda x, k: x[k]), lambda x, k: x[k])
    )
    assert_same(got, want)


def test_sizes_with_a_number_that_depends_on_data():
    x, i = torch.rand(4, 3), torch.tensor([0, 1, 1, 2])
    for join in (
        lambda x, n: x.shape[:0] + (n,) + x.shape[1:], lambda x, n: (n,) + x.shape[1:],
            lambda x, n: torch.Size((n,)) + x.shape[1:], lambda x, n: torch.Size([n, *x.shape[1:]]),
    ):  # fmt: skip

        def program(x, i, join=join):
            size = join(x, int(i.max()) + 1)
            return x.new_zeros(size).index_add_(0, i, x), size, type(size) is torch.Size, size.numel()

        assert_same(thunder.jit(program)(x, i), program(x, i))
    with pytest.raises(TypeError):
        thunder.jit(lambda x: x.shape + ("a",))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("number", [np.float64(2.5), np.float32(1.5), np.int64(3), np.bool_(True)], ids=repr)
def test_numbers_of_numpys_beside_tensors(number, dtype):
    def program(x, n):
        return n * x, x + n, n - x.float(), x / n, n / (x + 1), n > x, x <= n, n == x

    x = torch.tensor([0, 1, 2]).to(dtype)
    assert_same(thunder.jit(lambda x: program(x, number))(x), program(x, number))


@pytest.mark.parametrize(
    "name",
    ["type", "len", "map", "all", "hooked", "hasattr", "MISSING", "check_tensor_metadata", "is_", "why", "error"],
)
@pytest.mark.parametrize(
    "text",
    ["def program(x, p, values, {0}): y = x * {0}", "{0} = 2.0\ndef program(x, p, values, _): y = x * {0}"],
    ids=["argument", "global"],
)
def test_names_that_the_checks_use(name, text):
    space = {"length": len, "is_list": lambda v: type(v) is [].__class__, "has": hasattr}
    exec(
        text.format(name)
        + "; p.sum().backward(); return (y + length(values) if is_list(values) and not has(p, 'z') else x) + p.grad",
        space,
    )
    arguments = [
        (torch.ones(3), torch.ones(3, requires_grad=True), [1.0, torch.ones(1)], torch.ones(1) * 3) for _ in range(2)
    ]
    assert_same(thunder.jit(space["program"])(*arguments[0]), space["program"](*arguments[1]))


def tensor_times(k, x):
    return x * k * FACTOR if type(x) is torch.Tensor else "native"


class Times:
    def __init__(self, x=None):
        self.x = tensor_times(2, x)

    def __call__(self, x):
        return tensor_times(2, x)

    def method(self, x):
        return tensor_times(2, x)


FACTOR = 2.0


@pytest.mark.parametrize(
    "program",
    [
        lambda x: list(map(functools.partial(tensor_times, 3), (x, x + 1))),
            lambda x: functools.reduce(functools.partial(lambda k, a, b: a + tensor_times(k, b), 2), [x, x, x]),
        lambda x: list(map(operator.methodcaller("method", x), [Times()])), lambda x: [t.x for t in map(Times, [x])],
            lambda x: list(map(x.add, [x, x])),
        lambda x: list(itertools.starmap(tensor_times, [(2, x), (3, x)])),
            lambda x: list(itertools.accumulate([x, x], lambda a, b: a + tensor_times(1, b))),
        lambda x: [k for k, _ in itertools.groupby([x, x], key=lambda a: type(a) is torch.Tensor)],
            lambda x: list(itertools.filterfalse(lambda a: type(a) is not torch.Tensor, [x])),
        lambda x: sorted([x, x + 1], key=functools.cmp_to_key(lambda a, b: a.shape[0] - b.shape[0] if type(a) is torch.Tensor else 1 / 0)),
        *(lambda x, f=f: torch.utils._pytree.tree_map(f(),
            [x, (x,)]) for f in (lambda: functools.partial(tensor_times, 3), Times, lambda: Times().method)),
    ],
)  # fmt: skip
def test_what_native_code_calls_back_is_seen(program, monkeypatch):
    compiled = thunder.jit(program)
    assert_same(compiled(X), program(X))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert_same(compiled(X), program(X))


def test_names_that_a_modules_getattr_answers():
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            if name == "scale":
                return said["scale"]
            raise AttributeError(name)

    said, lazy, plain = {"scale": 2.0}, Lazy("lazy"), types.ModuleType("plain")
    plain.__getattr__ = lambda name: said[name]
    compiled = thunder.jit(lambda x: x * lazy.scale + plain.scale)
    for said["scale"] in (2.0, 3.0):
        assert_same(compiled(X), X * said["scale"] + said["scale"])
        assert_same(compiled(X), X * said["scale"] + said["scale"])
    assert thunder.cache_misses(compiled) == 2


def test_a_tensor_that_is_no_leaf_is_written_to_in_a_try():
    def f(x):
        try:
            return x.clone().mul_(2)
        except RuntimeError:
            return x

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(thunder.jit(f)(x), f(x))
