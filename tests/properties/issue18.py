"""Print what each program of the list of wrong results gives in eager PyTorch and compiled, and whether they agree:

    python -m tests.properties.issue18

A program takes `jit`, which is `thunder.jit` or leaves a function as it is, and returns all that can be seen of it. The
programs of the list that need several processes or a GPU stand in `tests/distributed` and `benchmarks`. The exit status
says whether any differs.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import io
import itertools
import json
import operator
import pathlib
import pickle
import random
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.errors import FallbackWarning, RecompileWarning, SharpEdgeWarning

PROGRAMS: dict[str, Callable] = {}


def program(f: Callable) -> Callable:
    PROGRAMS[f.__name__.replace("_", " ")] = f
    return f


def of_calls(name: str, f: Callable, *calls: tuple) -> None:
    """The program that calls one function several times."""

    def calls_of(jit):
        compiled = jit(f)
        return [compiled(*args) for args in calls]

    PROGRAMS[name] = calls_of


def of_sizes(name: str, f: Callable, *sizes: int) -> None:
    def calls_of(jit):
        compiled = jit(f, dynamic=True)
        results = []
        for n in sizes:
            torch.manual_seed(n)
            results.append(compiled(torch.ones(2, 3, n, n)))
        return results

    PROGRAMS[name] = calls_of


ROWS = [[float(i), i] for i in range(200)]
DEEP = [[[[[[1, 2.0]]]]]]
of_calls("a list of 200 rows as a tensor", lambda rows: torch.tensor(rows), (ROWS,), (ROWS[:150],))
of_calls("json of a list of 200 rows", lambda rows: json.dumps(rows), (ROWS,), (DEEP,))
of_calls("an array of 200 rows", lambda rows: np.array(rows), (ROWS,), (DEEP,))
of_calls("the sum of 200 rows", lambda rows: sum(rows, []), (ROWS,), (ROWS[:150],))
of_calls("200 rows compared", lambda a, b: (a == b, torch.ones(2)), (ROWS, ROWS[:]), (ROWS, [*ROWS[1:], 0]))
of_sizes("adaptive pooling to a shape", lambda x: F.adaptive_avg_pool2d(x, x.shape[-2:]), 4, 6, 8)
of_sizes("a grid of a size", lambda x: F.affine_grid(torch.ones(2, 2, 3), x.size(), align_corners=False), 4, 6, 8)
of_sizes("interpolation to a shape", lambda x: F.interpolate(x[..., :2, :2], size=x.shape[-2:]), 4, 6, 8)
of_sizes("layer norm of a shape", lambda x: F.layer_norm(x, x.shape[1:]), 4, 6, 8)
of_sizes("random numbers of a shape", lambda x: torch.normal(0.0, 1.0, x.shape), 4, 6, 8)
of_sizes("unflatten", lambda x: x.flatten().unflatten(0, x.shape), 4, 6, 8)
of_sizes("fold", lambda x: F.fold(F.unfold(x, 2), x.shape[-2:], 2), 4, 6, 8)
of_calls("padding by a shape", lambda n: F.pad(torch.ones(2), torch.ones(n).shape + (1,)), (2,), (3,), (4,), (5,))


@program
def a_forward_that_is_replaced(jit):
    module = nn.Linear(2, 2)
    compiled = jit(module)
    compiled.forward = lambda x: x + 1
    return compiled(torch.ones(2))


@program
def a_module_made_inside_and_kept(jit):
    saved = []

    def f(x):
        module = nn.Module()
        module.value = x * 2
        saved.append(module)
        return x

    jit(f)(torch.ones(2))
    return saved[0].value


of_calls("the text of a tensor", lambda x: f"{x.mean():.2f} {x}", (torch.ones(2),), (torch.zeros(2),))


@program
def a_print_at_each_call(jit):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        f = jit(lambda x: print(x.sum()))
        f(torch.ones(2)), f(torch.zeros(2))
    return printed.getvalue()


@program
def random_numbers_of_the_host(jit):
    f = jit(lambda: (random.random(), np.random.rand(), random.Random(3).random()))
    random.seed(0), np.random.seed(0)
    return [f(), f()]


@program
def a_clock(jit):
    f = jit(lambda: time.perf_counter_ns())
    return f() < f() < f()


@program
def iterators_from_outside(jit):
    counts, numbers, cycle = itertools.count(), (i for i in range(9)), itertools.cycle("ab")
    f = jit(lambda: (next(counts), next(numbers), next(cycle)))
    return [f(), f(), f()]


@program
def files(jit):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a")

        def f():
            with open(path) as file:
                return path.read_text(), file.read(), sorted(p.name for p in path.parent.iterdir())

        f = jit(f)
        path.write_text("1")
        first = f()
        path.write_text("2")
        pathlib.Path(folder, "b").write_text("")
        return first, f()


@program
def the_graph_of_an_intermediate(jit):
    def f(x):
        y = x * 2
        return y.grad_fn is None, y

    return jit(f)(torch.ones(2, requires_grad=True))


@program
def objects_that_differ_behind_an_attribute(jit):
    class Named:
        def __init__(self, v):
            self.inner = types.SimpleNamespace(v=v)

        def __eq__(self, other):
            return self.inner.v == other.inner.v

        __hash__ = None

    a, b = Named(1), Named(1)
    f = jit(lambda: (a != b, a == b))
    first = f()
    a.inner.v = 2
    return first, f()


@program
def operators_that_decline(jit):
    log = []

    class A:
        def __add__(self, other):
            log.append("add")
            return NotImplemented

        def __radd__(self, other):
            log.append("radd")
            return 1

    def f():
        try:
            return A() + A()
        except TypeError as error:
            return str(error)

    return jit(f)(), log


class Node:
    def __init__(self, inside):
        self.inside = inside


@program
def an_object_that_is_pickled(jit):
    o = Node(Node(Node(Node(1))))
    f = jit(lambda o: pickle.loads(pickle.dumps(o)).inside.inside.inside.inside)
    first = f(o)
    o.inside.inside.inside.inside = 2
    return first, f(o)


@program
def an_assertion(jit):
    def f(x):
        torch._assert(x.shape[0] == 2, "no")
        return x

    try:
        return jit(f)(torch.ones(3))
    except AssertionError as error:
        return str(error)


VARIABLE: contextvars.ContextVar = contextvars.ContextVar("VARIABLE", default=0)


@program
def a_context_variable(jit):
    def f(x):
        token = VARIABLE.set(x * 2)
        actual = VARIABLE.get() + 1
        VARIABLE.reset(token)
        return actual, VARIABLE.get()

    return jit(f)(torch.ones(2))


@program
def effects_once(jit):
    log = []

    def f(x):
        log.append(1)
        return x.storage().nbytes()

    with contextlib.suppress(Exception):
        jit(f)(torch.ones(2))
    return log


@program
def memory_of_results(jit):
    gc.collect(), gc.disable()
    f = jit(lambda x, w: ((y := x * w), y.view(-1).sin().sum()))
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    held = [weakref.ref(v) for v in (x, *f(x, w))]
    del x
    gc.enable()
    return [r() is None for r in held]


@program
def a_leaf_made_inside(jit):
    x = jit(lambda: torch.tensor([1.0], requires_grad=True))()
    return x.requires_grad, x.is_leaf, x.detach()


of_calls("full of a small integer", lambda: torch.full((2,), torch.tensor(3, dtype=torch.int8)).dtype, ())


@program
def group_norm_of_nothing(jit):
    x = torch.ones(0, 4, 2, requires_grad=True)
    jit(lambda x: F.group_norm(x, 2))(x).sum().backward()
    return x.grad


@program
def a_convolution_of_nothing(jit):
    try:
        return jit(lambda x, w: F.conv2d(x, w).shape)(torch.ones(1, 0, 4, 4), torch.ones(2, 0, 3, 3))
    except RuntimeError as error:
        return type(error).__name__


of_calls("operators of integers", lambda n: (n | 1, n & 3, n ^ 5, n << 2, n >> 1, ~n, divmod(n, 3), round(n)),
         (3,), (4,), (9,))  # fmt: skip


@program
def a_mode_that_stays(jit):
    try:
        jit(lambda x: torch.set_grad_enabled(False))(torch.ones(2))
        return torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@program
def code_that_is_compiled_inside(jit):
    return jit(lambda x: eval(compile("x + 1", "<text>", "eval"), {"x": x}))(torch.ones(2))


@program
def locals_that_are_written_to(jit):
    def f(x):
        locals()["y"] = 1
        return sorted(locals())

    return jit(f)(torch.ones(2))


@program
def a_complex_view_beside_its_tensor(jit):
    x = torch.ones(2, 2)

    def f(x, y):
        x.mul_(2)
        return y * 1

    return jit(f)(x, torch.view_as_complex(x)), x


@program
def vjp_with_other_arguments(jit):
    def f(x):
        result, pull = torch.func.vjp(lambda x: x.sin() * 2, x)
        return result, pull(torch.ones_like(x))

    return jit(f)(torch.ones(2))


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return operator.eq(a, b)


def shown(value) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def outcomes(run: Callable) -> list:
    """What a program gives in eager PyTorch and compiled."""
    results: list = []
    for jit in (lambda f, **_: f, functools.partial(thunder.jit, fallback="eager")):
        with warnings.catch_warnings():
            for category in (FallbackWarning, RecompileWarning, SharpEdgeWarning):
                warnings.simplefilter("ignore", category)
            try:
                results.append(run(jit))
            except Exception as error:  # noqa: BLE001 - what a program raises is its result
                results.append(f"{type(error).__name__}: {error}")
    return results


def main() -> int:
    counts: collections.Counter = collections.Counter()
    for name, run in PROGRAMS.items():
        results = outcomes(run)
        verdict = "equal" if same(*results) else "DIFFERENT"
        counts[verdict] += 1
        print(f"{verdict}: {name}\n  eager {shown(results[0])}\n  ours  {shown(results[1])}")
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return int(bool(counts["DIFFERENT"]))


if __name__ == "__main__":
    sys.exit(main())
