"""Dataclasses, named tuples, enums, match statements, context managers, caches, buffers and parametrizations."""

import contextlib
import dataclasses
import enum
import functools
import typing

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.scenarios.compared import normal, program, trained


@program
def dataclass_io(jit):
    @dataclasses.dataclass
    class B:
        x: torch.Tensor
        n: int = 1
        meta: dict = dataclasses.field(default_factory=dict)

        def scaled(self):
            return dataclasses.replace(self, x=self.x * self.n)

    def f(b):
        results = b.scaled()
        results.meta["s"] = results.x.shape[0]
        b.n += 1
        return results

    compiled = jit(f)
    b = B(normal(3))
    results = []
    for s in range(4):
        results.append((compiled(b), b.n))
        b.x = normal(3 + s % 2, seed=s)
    return results


@program
def frozen_dataclass(jit):
    @dataclasses.dataclass(frozen=True, slots=True)
    class C:
        k: int
        w: torch.Tensor

        @property
        def kk(self):
            return self.k * 2

    def f(x, compiled):
        try:
            compiled.k = 3
        except dataclasses.FrozenInstanceError:
            x = x + 1
        return x * compiled.kk + compiled.w, hash(C.__name__) == hash("C"), compiled == compiled

    compiled = jit(f)
    return [compiled(normal(3), C(s, normal(3, seed=s))) for s in range(4)]


@program
def namedtuple_io(jit):
    class S(typing.NamedTuple):
        h: torch.Tensor
        compiled: torch.Tensor
        t: int = 0

    def f(x, s):
        h = torch.tanh(x + s.h)
        return s._replace(h=h, t=s.t + 1), S(*s)._asdict()

    compiled = jit(f)
    s = S(normal(3), normal(3, seed=1))
    results = []
    for i in range(5):
        s, d = compiled(normal(3, seed=i), s)
        results.append((s, d))
    return results


@program
def enum_match(jit):
    class Mode(enum.Enum):
        A = "a"
        B = "b"

    class Fl(enum.Flag):
        X = 1
        Y = 2

    def f(x, module, fl):
        match module:
            case Mode.A:
                y = x * 2
            case Mode.B:
                y = x - 1
        if fl & Fl.X:
            y = y + 1
        if Fl.Y in fl:
            y = y * 3
        return y, module, fl | Fl.X, module.value

    compiled = jit(f)
    return [compiled(normal(3), module, fl) for module in Mode for fl in (Fl.X, Fl.Y, Fl.X | Fl.Y)]


@program
def match_structures(jit):
    @dataclasses.dataclass
    class Pt:
        x: object
        y: object

    def f(v):
        match v:
            case {"x": x, **rest}:
                return x * 2, sorted(rest)
            case [a, b, *compiled]:
                return a + b, len(compiled)
            case Pt(x=None, y=y):
                return y
            case Pt(x, y) if isinstance(x, torch.Tensor):
                return x + y
            case torch.Tensor(shape=(n,)):
                return v * n
            case int() | float():
                return torch.ones(2) * v
            case str(s):
                return s.upper()
            case None:
                return "none"
            case _:
                return "other"

    compiled = jit(f)
    return [
        compiled(v)
        for v in (
            {"x": normal(3), "z": 1},
            [normal(2), normal(2), 3, 4],
            Pt(None, normal(2)),
            Pt(normal(2), 1),
            normal(4),
            normal(2, 2),
            3,
            2.5,
            "ab",
            None,
            [1],
            (),
        )
    ]


@program
def contexts(jit):
    log = []

    class Scale:
        def __init__(s, k):
            s.k = k

        def __enter__(s):
            log.append("in")
            return s

        def __exit__(s, *a):
            log.append(("out", a[0].__name__ if a[0] else None))
            return a[0] is ValueError

    @contextlib.contextmanager
    def cm(x):
        log.append("b")
        try:
            yield x * 2
        finally:
            log.append("e")

    def f(x, bad):
        with Scale(2) as s, cm(x) as y:
            z = y * s.k
            if bad:
                raise ValueError("b")
            return z
        return x

    compiled = jit(f)
    return [compiled(normal(3, seed=i), i % 2) for i in range(4)], log


@program
def exitstack(jit):
    log = []

    def f(x, n):
        with contextlib.ExitStack() as st:
            for i in range(n):
                st.callback(log.append, i)
            st.enter_context(torch.no_grad())
            y = x * 2
        return y, torch.is_grad_enabled()

    compiled = jit(f)
    return [compiled(normal(3, grad=True), n) for n in (0, 1, 3)], log


@program
def cached_property_and_lru(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.p = nn.Parameter(torch.ones(3))
            s.calls = 0

        @functools.cached_property
        def table(s):
            s.calls += 1
            return torch.arange(3.0) * 2

        def forward(s, x):
            return x * s.p + s.table

    module = M()
    compiled = jit(module)
    results = [compiled(normal(3, seed=i)) for i in range(3)]
    return results, module.calls, module.table


@program
def lru_tensors(jit):
    n = [0]

    @functools.lru_cache(maxsize=None)
    def table(k):
        n[0] += 1
        return torch.arange(float(k))

    def f(x):
        return x + table(x.shape[0])

    compiled = jit(f)
    return [compiled(normal(k)) for k in (3, 4, 3, 4, 5)], n


@program
def cache_dict_on_self(jit):
    class Rope(nn.Module):
        def __init__(s):
            super().__init__()
            s.cache = {}

        def forward(s, x):
            n = x.shape[0]
            if n not in s.cache:
                s.cache[n] = torch.cos(torch.arange(n).float())[:, None]
            return x * s.cache[n]

    module = Rope()
    compiled = jit(module)
    return (
        [compiled(normal(k, 2, seed=i)) for i, k in enumerate((3, 4, 3, 5, 6, 4))],
        sorted(module.cache),
        module.cache,
    )


@program
def growing_max_cache(jit):
    class Rope(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("cos", torch.zeros(0), persistent=False)
            s.n = 0

        def forward(s, x):
            if x.shape[0] > s.n:
                s.n = x.shape[0]
                s.cos = torch.cos(torch.arange(s.n).float())
            return x * s.cos[: x.shape[0], None]

    module = Rope()
    compiled = jit(module)
    return [(compiled(normal(k, 2, seed=i)), module.n, module.cos) for i, k in enumerate((3, 2, 5, 4, 9, 1))]


@program
def register_buffer_in_forward(jit):
    class M(nn.Module):
        def forward(s, x):
            s.register_buffer("last", x.detach().mean(0), persistent=True)
            s.register_parameter("none", None)
            return x - s.last

    module = M()
    compiled = jit(module)
    return [(compiled(normal(3, 2, seed=i)), dict(module.named_buffers()), list(module.state_dict())) for i in range(3)]


@program
def running_mean_manual(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("m", torch.zeros(2))
            s.register_buffer("n", torch.tensor(0))

        def forward(s, x):
            if s.training:
                s.m = s.m * 0.9 + x.mean(0).detach() * 0.1
                s.n += 1
            return x - s.m

    module = M()
    compiled = jit(module)
    results = [compiled(normal(3, 2, seed=i)) for i in range(3)]
    module.eval()
    results.append(compiled(normal(3, 2)))
    module.train()
    results.append(compiled(normal(3, 2)))
    return results, module


@program
def parametrization(jit):
    class Sym(nn.Module):
        def forward(s, x):
            return x.triu() + x.triu(1).T

        def right_inverse(s, x):
            return x.triu()

    torch.manual_seed(1)
    module = nn.Linear(3, 3)
    parametrize.register_parametrization(module, "weight", Sym())
    compiled = jit(module)
    results = trained(
        compiled, module, [(normal(2, 3, seed=i),) for i in range(3)], torch.optim.SGD(module.parameters(), 0.1)
    )
    with parametrize.cached():
        results.append(compiled(normal(2, 3)))
    module.weight = torch.ones(3, 3)
    results.append(compiled(normal(2, 3)))
    parametrize.remove_parametrizations(module, "weight")
    results.append(compiled(normal(2, 3)))
    return results


@program
def weight_norm_spectral(jit):
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    )
    compiled = jit(module)
    results = trained(
        compiled, module, [(normal(2, 3, seed=i),) for i in range(3)], torch.optim.SGD(module.parameters(), 0.1)
    )
    module.eval()
    results.append(compiled(normal(2, 3)))
    return results, {k: v.clone() for k, v in module.state_dict().items()}


@program
def old_weight_norm(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.utils.spectral_norm(nn.Linear(4, 3)))
    compiled = jit(module)
    results = trained(
        compiled, module, [(normal(2, 3, seed=i),) for i in range(3)], torch.optim.SGD(module.parameters(), 0.1)
    )
    module.eval()
    results.append(compiled(normal(2, 3)))
    return results, {k: v.clone() for k, v in module.state_dict().items()}


@program
def pruning(jit):
    torch.manual_seed(1)
    module = nn.Linear(4, 4)
    prune.l1_unstructured(module, "weight", amount=0.5)
    compiled = jit(module)
    results = trained(compiled, module, [(normal(2, 4, seed=i),) for i in range(2)])
    prune.remove(module, "weight")
    results.append(compiled(normal(2, 4)))
    return results
