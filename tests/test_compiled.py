"""What a compiled function says of itself: programs, recompilations, programs that are lowered only, methods."""

import copy
import inspect
import pickle
import time

import pytest
import torch

import thunder
from thunder.cache.history import RECORDS
from thunder.core.trace import Trace

ONES = torch.ones(2)


def scaled(x, n=2):
    return x * n


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(x)

    @thunder.jit
    def doubled(self, x):
        return self.fc(x) * 2

    def plain(self, x):
        return self.fc(x)


class Owner:
    factor = 2

    def __init__(self, n):
        self.n = n

    @thunder.jit
    def method(self, x, m=1):
        """Multiplies."""
        return x * self.n * m

    @thunder.jit(cache="no caching")
    def uncached(self, x):
        return x + self.n

    @staticmethod
    @thunder.jit
    def inside_static(x):
        return x + 1

    @thunder.jit
    @staticmethod
    def outside_static(x):
        return x + 1

    @classmethod
    @thunder.jit
    def inside_class(cls, x):
        return x * cls.factor

    @thunder.jit
    @classmethod
    def outside_class(cls, x):
        return x * cls.factor

    @property
    @thunder.jit
    def size(self):
        return torch.ones(2) * self.n


# ------------------------------------------------------------------------------------------------------------- programs


def test_programs_have_four_typed_parts():
    compiled = thunder.jit(Model())
    assert compiled.programs == ()
    w = ONES.clone().requires_grad_()
    compiled(w), compiled(torch.ones(3, 2))
    first, second = compiled.programs
    assert all(isinstance(part, Trace) for part in (first.prologue, first.forward, first.backward))
    assert first.epilogue is None
    assert "x.shape" not in str(first.forward) and "def prologue(" in str(first.prologue)
    assert str(first) == "\n".join(map(str, (first.prologue, first.forward, first.backward)))
    assert repr(first).startswith("<a compiled program with bound symbols in prologue: ")
    assert thunder.last_traces(compiled)[-1] is second.forward
    assert thunder.last_prologue_traces(compiled)[-1] is second.prologue
    assert thunder.last_backward_traces(compiled)[-1] is second.backward
    compiled(w)
    assert thunder.last_traces(compiled)[-1] is first.forward and compiled.programs == (first, second)
    storing = thunder.jit(lambda d, x: d.update(y=x))
    storing({}, ONES)
    (program,) = storing.programs
    assert program.backward is None and thunder.last_epilogue_traces(storing)[-1] is program.epilogue
    assert "def epilogue(" in str(program)


def test_names_of_a_wrapped_module_come_first():
    module = Model()
    compiled = thunder.jit(module)
    compiled(ONES)
    assert len(compiled.programs) == 1
    compiled.programs = "the module's"
    assert compiled.programs == module.programs == "the module's" and len(compiled._lc_cd.programs) == 1
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        compiled.nothing_of_the_kind


# ------------------------------------------------------------------------------------------------------- recompilations


def test_recompilations_say_why_where_and_when():
    compiled = thunder.jit(scaled, cache="constant values")
    before = time.time()
    compiled(ONES, 2)
    assert compiled.recompilations == ()
    line = inspect.currentframe().f_lineno + 1
    compiled(ONES, 3)
    compiled(ONES, 2)
    with torch.inference_mode():
        compiled(ONES, 2)
    first, second = compiled.recompilations
    assert (first.reason, second.reason) == (
        "n was 2, is 3",
        "grad mode was True, is False, inference mode was False, is True",
    )
    assert first.location == (__file__, line, "test_recompilations_say_why_where_and_when", "    compiled(ONES, 3)\n")
    assert (first.call, second.call) == (2, 4) and before <= first.time <= second.time <= time.time()
    assert (
        str(first)
        == f"call 2, {__file__}:{line}, in test_recompilations_say_why_where_and_when: n was 2, is 3 (see docs/troubleshooting.md#other-values)"
    )
    module = thunder.jit(Model())
    module(ONES), module(torch.ones(3, 2))
    (record,) = module.recompilations
    assert record.location[0] == __file__ and record.reason == "x had 1 dimensions, has 2"


def test_recompilations_that_are_remembered_are_limited():
    compiled = thunder.jit(lambda x: x, cache="no caching")
    compiled.stats.recompilations.extend([None] * (RECORDS + 10))
    compiled(ONES), compiled(ONES)
    assert len(compiled.recompilations) == RECORDS and compiled.recompilations[-1].reason == "no caching"


# ---------------------------------------------------------------------------------------------------------------- lower


def test_lower_compiles_and_runs_nothing():
    seen = []

    def program(x, n, store):
        store.append(n)
        return x * n

    compiled = thunder.jit(program)
    lowered = compiled.lower(ONES, 2.0, seen)
    assert seen == [] and compiled.stats.calls == compiled.stats.cache_misses == 0
    assert "torch.mul" in str(lowered.forward) and compiled.programs == (lowered,)
    assert compiled.lower(ONES, 2.0, seen) is lowered and compiled.lower(ONES, 3.0, []) is not lowered
    assert torch.equal(compiled(ONES, 2.0, seen), 2 * ONES) and seen == [2.0]
    assert compiled.stats.cache_misses == 0 and compiled.recompilations == ()
    with pytest.raises(TypeError, match="not called yet, so there is nothing to show: call it, or ask compiled.lower"):
        thunder.last_traces(thunder.jit(program))


def test_lower_of_a_module_and_without_cache():
    module = thunder.jit(Model())
    assert module.lower(ONES).backward is not None
    with torch.no_grad():
        assert module.lower(ONES).backward is None
    assert len(module.programs) == 2
    uncached = thunder.jit(scaled, cache="no caching")
    uncached.lower(ONES)
    assert uncached.programs == () and torch.equal(uncached(ONES), 2 * ONES) and uncached.stats.cache_misses == 1


# -------------------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("name", ["method", "inside_static", "outside_static", "inside_class", "outside_class"])
def test_compiled_methods_can_be_inspected(name):
    owner = Owner(3)
    expected = {"method": 3.0, "inside_static": 2.0, "outside_static": 2.0, "inside_class": 2.0, "outside_class": 2.0}
    method = getattr(owner, name)
    actual = method(ONES)
    assert torch.equal(actual, expected[name] * ONES)
    assert "def computation(" in str(thunder.last_traces(getattr(owner, name))[-1])
    assert thunder.compile_stats(method).calls == thunder.cache_misses(method) + thunder.cache_hits(method)
    assert thunder.compile_data(method) is not None and len(method.programs) >= 1


def test_a_compiled_method_is_a_method():
    one, other = Owner(3), Owner(4)
    assert one.method == one.method != other.method and len({one.method, one.method, other.method}) == 2
    assert (one.method.__name__, one.method.__doc__) == ("method", "Multiplies.")
    assert list(inspect.signature(one.method).parameters) == ["x", "m"]
    assert repr(one.method).startswith(f"<bound method of {one!r}: <thunder.jit of Owner.method")
    assert pickle.loads(pickle.dumps(one.method))(ONES).tolist() == [3.0, 3.0]
    assert copy.copy(one.method) == one.method
    copied = copy.deepcopy(one.method)
    one.n = 5
    assert copied(ONES).tolist() == [3.0, 3.0] and one.method(ONES).tolist() == [5.0, 5.0]
    assert "torch.mul" in str(one.method.lower(ONES, m=2).forward)
    assert torch.equal(one.uncached(ONES), ONES + 5) and torch.equal(one.size, 5 * ONES)
    with pytest.raises(AttributeError):
        one.method.nothing_of_the_kind


def test_compiled_methods_inside_of_programs():
    owner = Owner(3)
    method = owner.method

    def program(o, x):
        return (
            o.method(x) + Owner.inside_static(x) + o.outside_static(x) + o.inside_class(x) + o.outside_class(x) + o.size
        )

    def bound(x):
        return method(x, m=2)

    for f, args in ((program, (owner, ONES)), (bound, (ONES,)), (lambda f, x: f(x), (owner.method, ONES))):
        compiled = thunder.jit(f)
        for n in (3, 4, 4):
            owner.n = n
            assert torch.equal(compiled(*args), f(*args))
    assert torch.equal(thunder.jit(owner.method)(ONES), owner.n * ONES)


def test_a_bound_method_and_methods_of_compiled_modules():
    owner, model = Owner(3), Model()
    compiled = thunder.jit(model)
    with torch.no_grad():
        assert torch.equal(compiled.doubled(ONES), 2 * model(ONES))
        assert "torch.mul" in str(thunder.last_traces(compiled.doubled)[-1])
        compiled(ONES)
        assert thunder.last_traces(compiled.forward) == thunder.last_traces(compiled)
        plain = thunder.jit(compiled.plain)
        assert torch.equal(plain(ONES), model(ONES)) and len(thunder.last_traces(plain)) > 1
        assert torch.equal(compiled.plain(ONES), model(ONES)) and len(thunder.last_traces(compiled.plain)) > 1
    with pytest.raises(TypeError, match="extra_repr is not a compiled function or module"):
        thunder.last_traces(compiled.extra_repr)
    again = thunder.jit(owner.method, cache="constant values")
    assert torch.equal(again(ONES), 3 * ONES) and thunder.cache_misses(again) == 1


def test_a_backward_is_made_a_function_at_its_first_call(monkeypatch):
    sources, compile_source = [], thunder.core.trace.compile_source

    def noted(source, name, *rest):
        sources.append(name)
        return compile_source(source, name, *rest)

    monkeypatch.setattr(thunder.core.trace, "compile_source", noted)
    compiled, x = thunder.jit(lambda x: (x * x).sum()), torch.ones(2, requires_grad=True)
    result = compiled(x)
    assert "backward_fn" not in sources
    result.backward()
    assert sources.count("backward_fn") == 1
    compiled(x).backward()
    assert sources.count("backward_fn") == 1 and torch.equal(x.grad, torch.full((2,), 4.0))
    assert compiled.programs[0].backward_fn is compiled.programs[0].backward.python_callable()
