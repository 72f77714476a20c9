"""What each call makes anew with the same code is the same program; what differs in its structure is another one.

A row is a program and a function that gives the arguments of call i. Eager PyTorch runs beside on arguments made in the
same way: results are compared, and what `state` of the arguments says after the call.
"""

import abc
import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import thunder

X = torch.arange(4.0)
CALLS = 12


def apply(x, f):
    return f(x)


def both(x, f, g):
    return f(x) + g(x)


def scaled_by(i):
    w = torch.full((4,), float(i))
    return lambda x: x * w


def plus_number(i):
    return lambda x: x + i


def with_default(i):
    return lambda x, w=torch.full((4,), float(i)): x * w


def with_keyword(i):
    return lambda x, *, w=torch.full((4,), float(i)), n=2: x * w + n


def nested(i):
    inner = scaled_by(i)
    return lambda x: inner(x) + 1


def wrapped(i):
    @functools.wraps(nn.functional.relu)
    def run(x):
        return nn.functional.relu(x) + torch.full((4,), 1.0)

    return run


def linear(i):
    torch.manual_seed(i)
    return nn.Linear(4, 4)


def block(i):
    torch.manual_seed(i)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())


class Counting(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.full((4,), float(i))), 0

    def forward(self, x):
        self.steps += 1
        return x * self.weight


class Numbered:
    def __init__(self, i):
        self.n = torch.full((4,), float(i))

    def twice(self):
        return self.n * 2


_Subclass = abc.ABCMeta("_Subclass", (Numbered,), {})

ROWS = {
    "lambda_over_a_tensor": (apply, scaled_by),
    "lambda_over_a_number": (apply, plus_number),
    "default_tensor": (apply, with_default),
    "keyword_only_default": (apply, with_keyword),
    "lambda_in_a_lambda": (apply, nested),
    "wraps": (apply, wrapped),
    "only_whether_there_is_one": (lambda x, f: x if f is None else x * 2, scaled_by),
    "a_key_of_the_programs_own": (lambda x, f: x * len({f: 1, None: 2}), scaled_by),
    "partial_of_a_tensor": (apply, lambda i: functools.partial(torch.mul, torch.full((4,), float(i)))),
    "partial_of_a_lambda": (apply, lambda i: functools.partial(lambda w, x: x - w, torch.full((4,), float(i)))),
    "partial_of_a_keyword": (apply, lambda i: functools.partial(torch.add, other=torch.full((4,), float(i)))),
    "partial_of_a_partial": (apply, lambda i: functools.partial(functools.partial(torch.add, alpha=2), X * i)),
    "module": (apply, linear),
    "modules_in_a_module": (lambda x, f: f(x.expand(3, 4)), block),
    "module_that_counts": (apply, Counting),
    "method_of_a_module": (apply, lambda i: linear(i).forward),
    "method_of_a_lambda": (apply, lambda i: types.MethodType(lambda o, x: x * o.n, Numbered(i))),
    "method_over_a_tensor": (apply, lambda i: types.MethodType(lambda o, x: scaled_by(i)(x) + o.n, Numbered(i))),
    "an_object_of_a_class_that_a_metaclass_made": (lambda x, o: x * o.n * o.twice(), lambda i: _Subclass(i)),
    "in_a_list": (lambda x, fs: fs[0](x) + fs[1](x), lambda i: [scaled_by(i), linear(i)]),
    "in_a_dict": (lambda x, fs: fs["act"](x), lambda i: {"act": scaled_by(i)}),
    "in_an_object": (lambda x, o: o.act(x), lambda i: types.SimpleNamespace(act=scaled_by(i))),
}


@pytest.mark.parametrize("name", ROWS)
def test_one_program_for_what_is_made_anew(name):
    program, make = ROWS[name]
    compiled = thunder.jit(program)
    for i in range(CALLS):
        torch.testing.assert_close(compiled(X, make(i)), program(X, make(i)))
    assert len(compiled.programs) <= 2


def seeded(i):
    return torch.Generator().manual_seed(i)


def decides(x, g):
    drawn = torch.rand(4, generator=g)
    return x + drawn + torch.rand(4, generator=g) if drawn.sum() > 2 else x - drawn


DRAWING = {
    "two": (lambda x, g, h: x + torch.rand(4, generator=g) - torch.rand(4, generator=h), 2, 1),
    "by_data": (decides, 1, 2),
    "in_place": (lambda x, g: nn.init.normal_(torch.empty(4), generator=g) + x, 1, 1),
    "seeded": (lambda x, g: x + torch.rand(4, generator=g.manual_seed(7)), 1, 1),
    "order": (lambda x, g: x[torch.randperm(4, generator=g)], 1, 1),
    "compared": (lambda x, g, h: x * (2 if g is h else 3) + torch.rand(4, generator=g), 2, 1),
}


@pytest.mark.parametrize("rng", ["torch", "fused"])
@pytest.mark.parametrize("name", DRAWING)
def test_generators_are_inputs(name, rng):
    program, count, programs = DRAWING[name]
    compiled = thunder.jit(program, rng=rng)
    for i in range(CALLS):
        ours, theirs = ([seeded(i + n) for n in range(count)] for _ in range(2))
        torch.testing.assert_close(compiled(X, *ours), program(X, *theirs), rtol=0, atol=0)
        for g, h in zip(ours, theirs, strict=True):
            assert torch.equal(g.get_state(), h.get_state())
    assert len(compiled.programs) == programs
    if count == 2:  # one generator in two places is another program
        torch.testing.assert_close(compiled(X, *[seeded(1)] * 2), program(X, *[seeded(1)] * 2), rtol=0, atol=0)
        assert len(compiled.programs) == programs + 1


class Calling(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.inner, self.called = linear(1), called

    def forward(self, x):
        return self.called(self.inner, x)


def removes_itself(module):
    handles = []

    def hook(module, args, output):
        handles[0].remove()
        return output * 3

    handles.append(module.register_forward_hook(hook))


def registers(module, x):
    handle = module.register_forward_hook(lambda module, args, output: output + 1)
    result = module(x)
    handle.remove()
    return result + module(x)


HOOKS = {
    "a_hook": (lambda m: m.register_forward_hook(lambda module, args, output: output * 2), True),
    "before": (lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)), True),
    "two": (lambda m: [m.register_forward_hook(lambda m, a, o, n=n: o * n + n) for n in (2, 3)], True),
    "with_keywords": (lambda m: m.register_forward_hook(lambda m, a, k, o: o * 3, with_kwargs=True), False),
    "that_removes_itself": (removes_itself, False),
}
CALLED = {
    "once": (lambda m, x: m(x), True),
    "twice": (lambda m, x: m(m(x)), True),
    "registering": (registers, False),
    "counted": (lambda m, x: m(x) * len(m._forward_hooks), False),
    "by_number": (lambda m, x: m(x) + sum(number % 7 for number in m._forward_hooks), False),
    "by_number_before": (lambda m, x: sum(number % 7 for number in m._forward_hooks) + m(x), False),
}


@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_known_by_their_position(hook, called):
    (register, alike), (call, without_numbers) = HOOKS[hook], CALLED[called]
    ours, theirs = Calling(call), Calling(call)
    compiled = thunder.jit(ours, fallback="error")
    for _ in range(4):
        number, results = RemovableHandle.next_id, []
        for module, run in ((ours, compiled), (theirs, theirs)):
            RemovableHandle.next_id = number  # both see the same numbers
            register(module.inner)
            results.append(run(X))
            module.inner._forward_hooks.clear()
            module.inner._forward_hooks_with_kwargs.clear()
            module.inner._forward_pre_hooks.clear()
        torch.testing.assert_close(*results)
    if alike and without_numbers:
        assert len(compiled.programs) <= 2


def test_what_stands_in_an_attribute_is_known_by_its_structure_from_the_second_one_on():
    class Applies(nn.Module):
        def forward(self, x):
            return self.act(x) + torch.rand(4, generator=self.generator)

    module = Applies()
    compiled = thunder.jit(module)
    for i in range(CALLS):
        module.act, module.generator = scaled_by(i), seeded(i)
        got = compiled(X)
        module.generator = seeded(i)
        torch.testing.assert_close(got, module(X))
    assert len(compiled.programs) == 2


def test_modules_that_are_given_in_turn():
    layers = [linear(i) for i in range(4)]
    compiled = thunder.jit(apply)
    for _ in range(3):
        for layer in layers:
            out = compiled(X, layer).sum()
            for got, want in zip(
                torch.autograd.grad(out, layer.parameters()),
                torch.autograd.grad(layer(X).sum(), layer.parameters()),
                strict=True,
            ):
                torch.testing.assert_close(got, want)
    assert len(compiled.programs) == 1


def test_effects_go_to_the_module_of_the_call():
    compiled = thunder.jit(lambda x, f: f(x.expand(3, 4)))
    for i in range(3):
        ours, eager = block(i), block(i)
        torch.testing.assert_close(compiled(X, ours), eager(X.expand(3, 4)))
        torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    counting = thunder.jit(apply)
    modules = [Counting(i) for i in range(3)]
    for m in (*modules, modules[0]):
        counting(X, m)
    assert [m.steps for m in modules] == [2, 1, 1]


# ------------------------------------------------------------------------------------------------ other parts


def _of_namespace(n):
    """The same code in other globals."""
    outer = eval("lambda: (lambda x: x * N)", {"N": n})()
    return types.FunctionType(_OF_NAMESPACE.__code__, outer.__globals__)


_OF_NAMESPACE = eval("lambda: (lambda x: x * N)")()


def _hooked(i):
    module = linear(0)
    if i:
        module.register_forward_hook(lambda module, inputs, out: out * 2)
    return module


def _own_forward(i):
    module = linear(0)
    if i:
        module.forward = lambda x: x * 3
    return module


def _with_attribute(i):
    f = scaled_by(1)
    f.power = i + 2
    return f


def _counter(shared):
    """Two functions that count in one variable, or in one each."""

    def make(count=0):
        def add(x):
            nonlocal count
            count += 1
            return x + count

        return add, lambda x: x * count

    one, other = make(), make()
    return (one[0], one[1]) if shared else (one[0], other[1])


KEYS = {"a": 1}
OTHERS = {
    "another_shape_in_a_cell": (apply, lambda i: (lambda w: lambda x: x * w)(torch.ones(4 if i else 1))),
    "another_function_in_a_cell": (apply, lambda i: (lambda g: lambda x: g(x))([torch.sin, torch.cos][i])),
    "another_default": (apply, lambda i: eval(f"lambda x, n={i}: x + n")),
    "other_globals": (apply, lambda i: _of_namespace(i + 2)),
    "another_line": (apply, lambda i: [lambda x: x + 1, lambda x: x - 1][i]),
    "an_attribute": (lambda x, f: f(x) ** f.power, _with_attribute),
    "one_or_two": (lambda x, f, g: x * 2 if f is g else f(x) + g(x), lambda i: (_PAIRS[i][0], _PAIRS[i][1])),
    "cells_that_two_functions_share": (both, _counter),
    "partial_with_more": (apply, lambda i: functools.partial(lambda *a: sum(a), *[X] * (i + 1))),
    "partial_with_another_keyword": (
        apply, lambda i: functools.partial(lambda x, a=1, b=2: x * a - b, **{"ab"[i]: 7}),
    ),
    "partial_of_another": (apply, lambda i: functools.partial([torch.mul, torch.add][i], X)),
    "a_hook": (apply, _hooked),
    "a_forward_of_its_own": (apply, _own_forward),
    "no_bias": (apply, lambda i: nn.Linear(4, 4, bias=bool(i)).requires_grad_(False)),
    "evaluation": (lambda x, f: f(x.expand(3, 4)), lambda i: block(0).train(bool(i))),
    "another_submodule": (apply, lambda i: nn.Sequential([nn.ReLU(), nn.Tanh()][i])),
    "more_submodules": (apply, lambda i: nn.Sequential(*[nn.Softplus()] * (i + 1))),
    "a_key_of_a_dict_outside": (lambda x, f: x * _TABLE.get(f, 5), lambda i: _REGISTERED[i]),
    "an_entry_of_a_set_outside": (lambda x, f: x * (3 if f in _SET else 5), lambda i: _REGISTERED[i]),
    "an_entry_of_a_list_outside": (lambda x, f: x * (3 if f in _LIST else 5), lambda i: _REGISTERED[i]),
    "compared_with_a_global": (lambda x, f: x * (3 if f is _GLOBAL else 5), lambda i: _REGISTERED[i]),
    "equal_to_a_global": (lambda x, f: x * (3 if f == _GLOBAL else 5), lambda i: _REGISTERED[i]),
    "equal_to_another": (lambda x, f, g: x * (3 if f == g else 5), lambda i: (_PAIRS[i][0], _PAIRS[i][1])),
    "beside_a_global_key": (lambda x, f: x * len({_GLOBAL: 1, f: 2}), lambda i: _REGISTERED[i]),
    "behind_a_global_key": (lambda x, f: x * {f: 1, None: 5}.get(_GLOBAL, 7), lambda i: _REGISTERED[i]),
    "modules_that_are_one": (lambda x, f, g: x * (3 if f is g else 5), lambda i: (_MODULES[0], _MODULES[i])),
    "modules_as_keys": (lambda x, f, g: x * len({f, g}), lambda i: (_MODULES[0], _MODULES[i])),
    "partials_that_are_one": (lambda x, f, g: x * (3 if f is g else 5), lambda i: (_PARTIALS[0], _PARTIALS[i])),
    "partials_that_are_equal": (lambda x, f, g: x * (3 if f == g else 5), lambda i: (_PARTIALS[0], _PARTIALS[i])),
    "a_module_in_a_table": (lambda x, f: x * _MODULE_TABLE.get(f, 5), lambda i: _MODULES[i]),
    "a_partial_in_a_table": (lambda x, f: x * _PARTIAL_TABLE.get(f, 5), lambda i: _PARTIALS[i]),
    "an_attribute_behind_a_global": (
        lambda x, o: x * (3 if [_GLOBAL, o.act][1] is _GLOBAL else 5),
        lambda i: types.SimpleNamespace(act=_REGISTERED[i]),
    ),
    "a_method_of_a_class": (lambda x, f: x * (3 if _Holds.method is f else 5), lambda i: _REGISTERED[i]),
    "its_hash": (lambda x, f: x * (2 if hash(f) == _HASH else 3), lambda i: _REGISTERED[i]),
    "its_id": (lambda x, f: x * (2 if id(f) == _ID else 3), lambda i: _REGISTERED[i]),
    "its_name": (lambda x, f: x * len(f.__name__), lambda i: _named("a" * (i + 1))),
    "its_text": (lambda x, f: x * (2 if str(f) == _TEXT else 3), lambda i: _REGISTERED[i]),
    "sorted_by_it": (
        lambda x, f: x * sorted([3, 1, 2], key=f)[0], lambda i: (lambda s: lambda n: n * s)([1, -1][i]),
    ),
    "what_a_cache_gives": (lambda x, f: x * _cached(f), lambda i: _REGISTERED[i]),
}  # fmt: skip
_PAIRS = [(scaled_by(1), scaled_by(2)), (scaled_by(1),) * 2]
_REGISTERED = [scaled_by(1), scaled_by(2)]
_TABLE, _SET, _HASH, _ID, _TEXT = (
    {_REGISTERED[0]: 2}, {_REGISTERED[0]}, hash(_REGISTERED[0]), id(_REGISTERED[0]), str(_REGISTERED[0])
)  # fmt: skip
_Holds = type("_Holds", (), {"method": _REGISTERED[0]})
_LIST, _GLOBAL = [_REGISTERED[0]], _REGISTERED[0]
_MODULES, _PARTIALS = [linear(0), linear(0)], [functools.partial(torch.mul, X) for _ in range(2)]
_MODULE_TABLE, _PARTIAL_TABLE = {_MODULES[0]: 2}, {_PARTIALS[0]: 2}


@functools.lru_cache
def _cached(f):
    return 2 if f is _REGISTERED[0] else 3


def _named(name):
    f = scaled_by(1)
    f.__name__ = name
    return f


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)], ids=str)
def test_other_parts_are_another_program(name, order):
    program, make = OTHERS[name]
    compiled = thunder.jit(program)
    for i in order:
        torch.manual_seed(0)
        ours = make(i)
        torch.manual_seed(0)
        eager = make(i)
        ours, eager = (module if isinstance(module, tuple) else (module,) for module in (ours, eager))
        torch.testing.assert_close(compiled(X, *ours), program(X, *eager))
        torch.testing.assert_close(compiled(X, *ours), program(X, *eager))
    assert len(compiled.programs) > 1


def test_functions_come_out_as_they_went_in():
    compiled = thunder.jit(lambda x, f, m: (x + 1, f, m, {"f": f}, [m]))
    for i in range(3):
        f, m = scaled_by(i), linear(i)
        _, out, module, table, modules = compiled(X, f, m)
        assert out is f and module is m and table["f"] is f and modules[0] is m
    assert len(compiled.programs) == 1


def test_functions_that_are_written_outside():
    saved = {}

    def program(x, f):
        saved["f"] = f
        return f(x)

    compiled = thunder.jit(program)
    for i in range(3):
        f = scaled_by(i)
        torch.testing.assert_close(compiled(X, f), f(X))
        assert saved["f"] is f


def test_variables_of_closures_are_written_where_they_are():
    def counter():
        count = 0

        def add(x):
            nonlocal count
            count += 2
            return x + count

        return add, lambda: count

    compiled = thunder.jit(apply)
    for _ in range(3):
        add, read = counter()
        for n in (2, 4):
            torch.testing.assert_close(compiled(X, add), X + n)
            assert read() == n
    assert len(compiled.programs) <= 2


@pytest.mark.parametrize("make", [scaled_by, ROWS["partial_of_a_lambda"][1], linear, nested])
def test_programs_keep_nothing_of_it_alive(make):
    compiled, references = thunder.jit(apply), []
    for i in range(3):
        f = make(i)
        references += [weakref.ref(f)]
        compiled(X, f)
        del f
    gc.collect()
    assert [r() for r in references] == [None] * 3


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
@pytest.mark.parametrize("is_default", [False, True])
def test_eager_calls_of_functions_that_are_made_anew(is_default):
    """A function with a refused line is an eager call: that of the call's own function."""

    def make(i):
        w = torch.full((4,), float(i))

        def of_closure(x):
            return x * w if x.untyped_storage() is not None else x

        def of_default(x, w=w):
            return x * w if x.untyped_storage() is not None else x

        return of_default if is_default else of_closure

    compiled = thunder.jit(lambda x, f: f(x + 1) * 2, fallback="eager")
    for i in range(4):
        torch.testing.assert_close(compiled(X, make(i)), make(i)(X + 1) * 2)
    assert len(compiled.programs) == 1
