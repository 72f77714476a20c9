"""Eager calls: a refusal costs the function around it, and no more."""

import collections
import cProfile
import ctypes
import difflib
import email.message
import functools
import gc
import inspect
import logging
import queue
import random
import sys
import threading
import traceback
import tracemalloc
import types
import warnings
import weakref

import numpy
import pytest
import torch
from torch import nn

import thunder
from tests.paths.compared import assert_same
from thunder.capture.reachable import Reach
from thunder.errors import CaptureError, FallbackWarning


def refused(x):
    """What no program does."""
    return x.untyped_storage().nbytes() // x.untyped_storage().nbytes()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.calls = 0

    def forward(self, x):
        refused(self.weight)
        return (x * self.weight).tanh()


class Around(nn.Module):
    """A module before and one after what is refused."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), middle, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()))


def step(call, module, x):
    """The result of a call, and the gradients."""
    x = x.clone().requires_grad_()
    for p in module.parameters():
        p.grad = None
    result = call(x)
    torch.as_tensor(result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return result.detach() if isinstance(result, torch.Tensor) else result, x.grad, gradients


def same_as_eager(module, calls: int = 3, programs: int = 1):
    compiled, generator = thunder.jit(module, fallback="eager"), torch.Generator().manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(calls):
            x = torch.randn(2, 4, generator=generator)
            torch.manual_seed(seed)
            want, state = step(module, module, x), torch.get_rng_state()
            torch.manual_seed(seed)
            assert_same(step(compiled, module, x), want, 1e-6)
            assert torch.equal(torch.get_rng_state(), state)
    assert len(compiled.programs) == programs
    return compiled, [w for w in caught if w.category is FallbackWarning]


def names(compiled) -> list[str]:
    return [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols]


class Deletes(nn.Module):
    """Deletes a global and a variable of a closure."""

    def __init__(self):
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.full((4,), 0.5)), types.SimpleNamespace(cached=0)

        def filled():
            nonlocal scale
            del scale
            scale = 2.0
            return scale

        scale, self.filled = 1.0, filled

    def forget(self):
        global FORGOTTEN
        FORGOTTEN = 3
        self.state.cached = 3
        del self.state.cached, FORGOTTEN

    def forward(self, x):
        self.forget()
        return (x * self.weight * self.filled()).tanh()


def test_variables_outside_are_deleted_in_eager_calls():
    module = Deletes()
    compiled, _ = same_as_eager(Around(module))
    assert names(compiled).count("eager_call") == 2 and names(compiled).count("linear") == 2
    assert not hasattr(module.state, "cached") and "FORGOTTEN" not in globals() and module.filled() == 2.0


def test_the_module_around_a_refusal_is_one_call():
    compiled, warned = same_as_eager(Around(Scale()))
    assert names(compiled).count("eager_call") == 1 and names(compiled).count("linear") == 2
    assert len(warned) == 1 and "untyped_storage" in str(warned[0].message)
    assert "eager_call(0, refused" in str(thunder.last_traces(compiled)[0])


def test_with_fallback_error_the_refusal_is_raised():
    with pytest.raises(CaptureError, match="untyped_storage"):
        thunder.jit(Around(Scale()), fallback="error")(torch.ones(2, 4))


class Draws(Scale):
    def forward(self, x):
        return nn.functional.dropout(super().forward(nn.functional.dropout(x)), 0.3)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.scale(x) @ x.T
        with torch.no_grad():
            z = self.scale(x)
        return (y.float() @ x) + z


class Chooses(nn.Module):
    """Which of the parameters is used is known to the function alone."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterList(torch.full((4,), float(i)) for i in range(3))

    def forward(self, x):
        return x + self.pick(x)

    def pick(self, x):
        x.untyped_storage()
        return x * self.experts[int(x.sum() * 7) % 3]


@pytest.mark.parametrize("middle, programs", [(Draws, 1), (Casts, 1), (Chooses, 2)])
def test_gradients_random_numbers_and_modes(middle, programs):
    torch.manual_seed(3)
    same_as_eager(Around(middle()), calls=6, programs=programs)


def several(x):
    refused(x)
    return x * 2, [x, x.sum()], {"n": 3, "text": "a"}, None


class Several(nn.Module):
    def forward(self, x):
        double, (same, total), rest, nothing = several(x)
        assert same is x and nothing is None
        return double * rest["n"] + total * len(rest["text"])


def test_results_are_opened():
    same_as_eager(Around(Several()))


HELD: list = []


def held(x):
    refused(x)
    return HELD


def test_a_list_that_others_hold_stays_the_same_list():
    def f(x):
        held(x).append(1)
        return x * len(held(x))

    compiled = thunder.jit(f, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for i in range(1, 4):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), float(i)))
    assert HELD == [1, 1, 1]


class Counts:
    n = 0

    def count(self, x):
        x.untyped_storage()
        self.n += 1
        return self.n


def test_a_function_that_changes_what_the_program_reads_is_none():
    counts = Counts()

    def f(x):
        return x * counts.count(x) * counts.n

    compiled = thunder.jit(f, fallback="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [compiled(torch.ones(2))[0].item() for _ in range(4)]
    assert results == [1, 4, 9, 16] and counts.n == 4
    assert any("changes state" in str(w.message) for w in caught)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_function_that_writes_to_a_tensor_that_was_read_before(through_data):
    """What reads the tensor before runs behind the function in the first call."""

    def run(jit):
        state = torch.ones(4)

        def advance():
            (state.data if through_data else state).add_(1)
            return state.untyped_storage().nbytes()

        def f(x):
            before = state * x
            return before, advance(), state * x

        f = jit(f)
        return [f(torch.ones(4)) for _ in range(3)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = run(lambda f: thunder.jit(f, fallback="eager"))
    assert any("that the program has read: it runs twice" in str(one.message) for one in caught)
    assert_same(actual, run(lambda f: f), 0)


@pytest.mark.parametrize("name", ["sum", "softmax", "std"])
def test_functions_of_torch_masked_are_eager_calls(name):
    """They make a class in each call."""

    def f(x):
        return getattr(torch.masked, name)((x * 2).sin(), 1, mask=x > 0.5).exp()

    compiled, inputs = thunder.jit(f, fallback="eager"), torch.rand(4, 6)
    with pytest.warns(FallbackWarning, match="runs as it is"):
        results = [step(compiled, nn.Module(), inputs) for _ in range(2)]
    assert_same(results, [step(f, nn.Module(), inputs)] * 2, 1e-6)
    assert len(compiled.programs) == 1 and "eager_call" in names(compiled)


def without_program(x):
    x.untyped_storage()
    return x.tanh()


def test_views_of_leaves_are_given_with_their_gradients():
    """A view that is made under no_grad of a leaf says that it requires grad."""

    def run(jit):
        x, seen = torch.randn(2, 3, 4, requires_grad=True), []
        f = jit(lambda x: without_program(x[:, 1]) + without_program(x[:, 0].relu()))
        for _ in range(3):
            x.grad, y = None, f(x)
            y.sum().backward()
            seen.append((y.detach(), x.grad))
        return seen

    torch.manual_seed(0)
    with pytest.warns(FallbackWarning, match="without_program"):
        actual = run(lambda f: thunder.jit(f, fallback="eager"))
    torch.manual_seed(0)
    assert_same(actual, run(lambda f: f), 1e-6)


def test_what_others_have_seen_happens_once(tmp_path):
    """The program is given up behind a write to a file."""
    path = tmp_path / "log"

    def f(x):
        with open(path, "a") as log:
            log.write("called\n")
        size = path.stat().st_size
        return x * 2 + refused(x) + size

    compiled = thunder.jit(f, fallback="eager")
    with pytest.warns(FallbackWarning, match="untyped_storage"):
        results = [compiled(torch.ones(2))[0].item() for _ in range(3)]
    assert results == [10, 17, 24] and path.read_text() == "called\n" * 3


class Raises(nn.Module):
    def forward(self, x):
        try:
            return self.inner(x)
        except ValueError as error:
            return x * len(str(error))

    def inner(self, x):
        refused(x)
        if x.sum() > 0:
            raise ValueError("above")
        return x + 1


@pytest.mark.parametrize("first", [-1.0, 1.0])
def test_errors_are_handled_by_the_program(first):
    module = Raises()
    compiled = thunder.jit(module, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for sign in (first, -first, first):
            x = torch.full((2,), sign)
            assert torch.equal(compiled(x), module(x))


def test_a_backward_through_its_arguments_raises():
    def inner(x):
        x.untyped_storage()
        getattr(x.sum(), "back" + "ward")()
        return x * 2

    def f(w, x):
        return inner(w * x)

    w = torch.ones(2, requires_grad=True)
    with (
        warnings.catch_warnings(action="ignore", category=FallbackWarning),
        pytest.raises(RuntimeError, match="runs a backward through the tensors that it is given"),
    ):
        thunder.jit(f, fallback="eager")(w, torch.ones(2))


def memory_of(x):
    """An array of a tensor's memory that holds no reference to it, as libraries make them to write files."""
    refused(x)
    return numpy.ctypeslib.as_array(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)), (x.numel(),)), x


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.sums: list[float] = []

    def forward(self, x):
        saved = []
        shown, tensor = memory_of((x.detach() * 2).contiguous())
        saved.append(tensor)  # alive while the array is
        y = (x + 1).exp() + torch.zeros_like(x) - x
        self.sums.append(float(shown.sum()))
        return y * 1


@pytest.mark.parametrize("shape", [(2, 4), (512, 4)])
def test_memory_that_an_object_shows_stays(shape):
    """The program frees values behind their last use, and writes results to their memory."""
    model = Writes()
    compiled = thunder.jit(model, fallback="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for value in (1.0, 2.0, 3.0, 4.0):
            x = torch.full(shape, value, requires_grad=True)
            model.sums.clear()
            compiled(x).sum().backward()
            assert model.sums == [2 * value * x.numel()]
            assert torch.equal(x.grad, (x + 1).exp().detach() - 1)


def makes_a_class(x):
    class Scaled:
        by = 2

        def of(self, x):
            return x * self.by

    return Scaled().of(x)


async def doubled(x):
    return x * 2


def steps_a_coroutine(x):
    try:
        doubled(x).send(None)
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("function", [makes_a_class, steps_a_coroutine])
def test_what_the_interpreter_leaves_to_python(function):
    class Uses(nn.Module):
        def forward(self, x):
            return function(x)

    compiled, _ = same_as_eager(Around(Uses()))
    assert names(compiled).count("eager_call") == 1
    with pytest.raises(CaptureError, match="runs code that is not there before|code that is awaited"):
        thunder.jit(function, fallback="error")(torch.ones(2))


def test_a_function_that_is_read_on_one_path_and_refused_on_another():
    """The results of a call that leaves a program are numbered as that program numbers them."""

    def odd(x, looks):
        return x * refused(x) if looks else x + 1

    def program(x):
        y = odd(x, False)
        drawn = random.random()
        if y.sum() > 0:
            y = odd(y, True)
        return y * drawn

    compiled = thunder.jit(program, fallback="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (-2.0, 2.0, 2.0, -2.0, 2.0):
            x, results = torch.full((2,), value), []
            for call in (program, compiled):
                random.seed(0)
                results.append((call(x), random.getstate()))
            assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert not any("thunder fails" in str(w.message) for w in caught)
    assert len(compiled.programs) == 2


class Normalizes(nn.Module):
    """Writes to its buffers before the refusal."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x) * refused(x)


def test_writes_that_the_function_cannot_see_stand_before_it():
    ours, theirs = Around(Normalizes()), Around(Normalizes())
    theirs.load_state_dict(ours.state_dict())
    compiled = thunder.jit(ours, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for seed in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
            assert_same(step(compiled, ours, x), step(theirs, theirs, x), 1e-6)
    assert_same([*ours.buffers()], [*theirs.buffers()], 1e-6)
    assert names(compiled).count("eager_call") == 1


SHOWN: list = []


class Shows:
    def __init__(self):
        self.step = 0

    def show(self):
        torch.ones(2).untyped_storage()
        SHOWN.append(self.step)


def test_writes_that_the_function_may_see_are_seen():
    shows = Shows()

    def f(x):
        return inner(x) * 2

    def inner(x):
        shows.step += 1
        shows.show()
        return x + shows.step

    compiled = thunder.jit(f, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        assert [compiled(torch.zeros(1)).item() for _ in range(3)] == [2.0, 4.0, 6.0]
    assert SHOWN == [1, 2, 3]


@pytest.mark.parametrize("disable", [thunder.disable, torch.compiler.disable])
def test_functions_that_the_user_disables(disable):
    called = []

    @disable
    def middle(x):
        called.append(type(x))
        return x * 3

    def f(w, x):
        return middle(w * x).sum()

    compiled = thunder.jit(f, fallback="error")
    for i in range(3):
        w = torch.full((2,), float(i), requires_grad=True)
        result = compiled(w, torch.arange(2.0))
        result.backward()
        assert result.item() == 3 * i and w.grad.tolist() == [0, 3]
    assert called == [torch.Tensor] * 3 and len(compiled.programs) == 1
    assert names(compiled).count("eager_call") == 1
    with pytest.raises(thunder.errors.OptionError, match="takes a function"):
        thunder.disable(3)


@pytest.mark.parametrize(
    "script", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 4))], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_called_as_it_is(script):
    same_as_eager(Around(script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))))


@pytest.mark.parametrize(
    "make", [list, lambda x: [x, x], lambda x: {"a": x}, lambda x: ([x],)], ids=["rows", "list", "dict", "tuple"]
)
def test_fresh_containers_are_opened(make):
    def inner(x):
        x.untyped_storage()
        return make(x * 2)

    def f(w):
        result = inner(w * 3)
        first = result["a"] if isinstance(result, dict) else result[0]
        return first[0] if isinstance(first, list) else first

    compiled, w = thunder.jit(f, fallback="eager"), torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for _ in range(2):
            (gradient,) = torch.autograd.grad(compiled(w).sum(), w)
            assert gradient.sum() == (6 if make is list else 12)
    assert len(compiled.programs) == 1 and names(compiled).count("eager_call") == 1


class Box:
    def __init__(self, x):
        self.x = x


def test_objects_that_hold_gradients_are_not_taken_out_of_a_call():
    def inner(x):
        x.untyped_storage()
        return Box(lambda y, twice=x * 2: twice + 0 * y)

    def around(x):
        return inner(x).x(x) * 2

    compiled, w = thunder.jit(lambda w: around(w * 3), fallback="eager"), torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.autograd.grad(compiled(w).sum(), w)[0].tolist() == [12, 12]
    assert any("leads to tensors with a gradient" in str(one.message) for one in caught)
    assert names(compiled).count("eager_call") == 1


def gives_a_box(x):
    x.untyped_storage()
    SHOWN.append("box")
    return Box([x.sin(), x])


def fills(x, into):
    x.untyped_storage()
    SHOWN.append("fills")
    into.append(x.sin())
    into.append(x)


def overwrites(x):
    x.untyped_storage()
    SHOWN.append("overwrites")
    x.mul_(x.detach().cos())


def of_a_box(x):
    box = gives_a_box(x)
    return box.x[0] * 2 + box.x[1]


def of_a_list(x):
    filled = []
    fills(x, filled)
    return filled[0] * len(filled) + filled[1]


def of_a_tensor(x):
    y = x + 1
    overwrites(y)
    return y * 2


@pytest.mark.sweep(2)
@pytest.mark.parametrize("around", [of_a_box, of_a_list, of_a_tensor])
def test_what_a_function_leaves_beside_its_result_has_its_gradient(around):
    """The function runs once in the first call too, which finds out."""
    compiled = thunder.jit(lambda w: around(w * 3), fallback="eager")
    w = torch.tensor([0.5, 1.0], requires_grad=True)
    (want,) = torch.autograd.grad(around(w * 3).sum(), w)
    SHOWN.clear()
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for _ in range(3):
            result = compiled(w)
            torch.testing.assert_close(result, around(w * 3))
            torch.testing.assert_close(torch.autograd.grad(result.sum(), w)[0], want)
    assert len(SHOWN) == 6 and names(compiled).count("eager_call") == 1


class Remembers(nn.Module):
    """Has written to its buffers and attributes when its own method is refused, which reads them."""

    def __init__(self):
        super().__init__()
        self.norm, self.steps, self.seen = nn.BatchNorm1d(4), 0, []

    def forward(self, x):
        self.steps += 1
        return self.inner(self.norm(x)) + self.norm.running_mean

    def inner(self, x):
        refused(x)
        self.seen.append((self.steps, self.norm.running_var.tolist()))
        return x * self.norm.running_mean * self.steps


class Overwrites(Remembers):
    """The method writes to them again."""

    def inner(self, x):
        refused(x)
        self.steps += 1
        return self.norm(x) * self.steps


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [Remembers, Overwrites])
def test_writes_of_the_program_are_shown_to_the_function(kind):
    ours, theirs = Around(kind()), Around(kind())
    theirs.load_state_dict(ours.state_dict())
    compiled = thunder.jit(ours, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for seed in range(4):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
            assert_same(step(compiled, ours, x), step(theirs, theirs, x), 1e-6)
            assert_same([*ours.buffers()], [*theirs.buffers()], 1e-6)
            assert ours.middle.steps == theirs.middle.steps
    assert [n for n, _ in ours.middle.seen] == [n for n, _ in theirs.middle.seen]
    assert_same([v for _, v in ours.middle.seen], [v for _, v in theirs.middle.seen])
    assert len(compiled.programs) == 1 and names(compiled).count("eager_call") == 1


class Bar:
    """Prints what it was told between its steps."""

    def __init__(self, n):
        torch.ones(1).untyped_storage()
        self.n, self.told = n, None

    def __iter__(self):
        for i in range(self.n):
            yield i
            SHOWN.append(self.told)

    def __setitem__(self, key, value):
        SHOWN.append((key, value))


def bar(n):
    torch.ones(1).untyped_storage()
    return Bar(n)


def steps_of_a_bar(x):
    steps = bar(2)
    for i in steps:
        steps.told = i
        x = x * (i + 2)
    return x


def writes_to_a_bar(x):
    shown = bar(2)
    shown["rows"] = x.shape[0]
    shown.n += 1
    return x * shown.n


@pytest.mark.parametrize("around", [steps_of_a_bar, writes_to_a_bar])
def test_objects_of_an_eager_call_are_changed_once_and_in_order(around):
    compiled, x = thunder.jit(lambda x: around(x) * 2, fallback="eager"), torch.ones(2)
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for _ in range(3):
            SHOWN.clear()
            want, shown = around(x) * 2, [*SHOWN]
            SHOWN.clear()
            assert torch.equal(compiled(x), want) and shown == SHOWN
    assert names(compiled).count("eager_call") == 1


def prints_a_traceback(x):
    try:
        raise KeyError("missing")
    except KeyError:
        traceback.print_exc(limit=0)
    return x * 2


def warns_with_a_value(x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(f"sum {x.sum().item()}", stacklevel=1)
    SHOWN.extend(str(w.message) for w in caught)
    return x * len(caught)


def profiles(x):
    profiler = cProfile.Profile()
    result = profiler.runcall(several, x)[0]
    SHOWN.append("several" in {entry.code.co_name for entry in profiler.getstats() if hasattr(entry.code, "co_name")})
    return result


def traces(x):
    sys.settrace(
        lambda frame, event, arg: SHOWN.append(frame.f_code.co_name) if frame.f_code.co_name == "act" else None
    )
    try:
        return act(x)
    finally:
        sys.settrace(None)


def act(x):
    return x.tanh()


def note_caller():
    SHOWN.append(inspect.stack(0)[1].function)


def calls_note(x):
    note_caller()
    return x + 1


class Dies:
    def __del__(self):
        SHOWN.append("died")


def lets_die(x):
    Dies()
    return x * len(SHOWN)


@pytest.mark.parametrize("around", [prints_a_traceback, warns_with_a_value, profiles, traces, calls_note, lets_die])
def test_what_watches_python_sees_the_program_as_it_is(around, capsys):
    compiled = thunder.jit(lambda x: around(x.sin()) * 2, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for i in range(3):
            x = torch.full((2,), float(i))
            SHOWN.clear()
            want, shown, printed = around(x.sin()) * 2, [*SHOWN], capsys.readouterr()
            SHOWN.clear()
            assert torch.equal(compiled(x), want) and shown == SHOWN and capsys.readouterr() == printed
    assert len(compiled.programs) == 1 and names(compiled).count("eager_call") == 1


def test_arrays_that_a_call_has_filled_are_filled_when_the_program_runs_again(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(1, 25)))
    with open(path, "rb") as file:

        def f(x):
            numbers = numpy.zeros(8, dtype=numpy.uint8)
            file.readinto(numbers)
            x.untyped_storage()
            return x * int(numbers.sum())

        compiled = thunder.jit(f, fallback="eager")
        with warnings.catch_warnings(action="ignore", category=FallbackWarning):
            assert [compiled(torch.ones(1)).item() for _ in range(3)] == [36, 100, 164]


def test_calls_that_ran_are_told_from_others_of_their_function():
    """`list` takes the steps of an object that a function gave, and others before and behind it."""

    def f(x):
        before = list((1, 2))
        steps = list(bar(2))
        behind = list((3,))
        x.untyped_storage()
        return x * (before[0] + len(steps) * 10 + behind[0] * 100)

    compiled = thunder.jit(f, fallback="eager")
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for _ in range(3):
            SHOWN.clear()
            assert compiled(torch.ones(1)).item() == 321 and SHOWN == [None, None]


OWN = {
    "counter": (collections.Counter, lambda own, n: own.update([n]), dict),
    "ordered": (collections.OrderedDict, lambda own, n: own.__setitem__("n", n), dict),
    "default": (lambda: collections.defaultdict(int), lambda own, n: own.__setitem__("n", n), dict),
    "deque": (collections.deque, lambda own, n: own.append(n), list),
    "user's dict": (collections.UserDict, lambda own, n: own.__setitem__("n", n), lambda own: own.data),
    "bytes": (bytearray, lambda own, n: own.append(n), bytes),
    "namespace": (types.SimpleNamespace, lambda own, n: setattr(own, "n", n), vars),
    "thread's": (threading.local, lambda own, n: setattr(own, "n", n), lambda own: own.n),
    "generator": (torch.Generator, lambda own, n: own.manual_seed(n), lambda own: torch.rand(2, generator=own)),
    "logger": (lambda: logging.Logger("a"), lambda own, n: own.setLevel(n), lambda own: own.level),
}


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
@pytest.mark.parametrize("kind", OWN)
def test_an_object_of_a_library_that_the_program_makes_is_another_one_in_each_call(kind):
    make, write, shown = OWN[kind]

    def fill(own, x):
        write(own, x.untyped_storage().nbytes() * 0 + int(x.sum().item()))

    def f(x):
        own = make()
        fill(own, x)
        return shown(own), x + 1

    compiled = thunder.jit(f, fallback="eager")
    for n in (1.0, 2.0, 3.0):
        x = torch.full((2,), n)
        assert_same(compiled(x), f(x), 0)


def test_an_entry_of_a_weak_table_dies_with_its_object():
    alive = weakref.WeakValueDictionary()

    class Entry:
        pass

    def counted(x):
        entry = Entry()
        alive["now"] = entry
        count = len(alive)
        del entry
        return x * count

    compiled = thunder.jit(lambda x: counted(x) + 1, fallback="eager")
    with pytest.warns(FallbackWarning, match="when an object of the program is deleted"):
        for n in (1.0, 2.0, 3.0):
            assert_same(compiled(torch.full((2,), n)), torch.full((2,), n + 1), 0)
            assert not alive
    assert len(compiled.programs) == 1


def with_code(x):
    scale, space = 2, {"x": x}
    exec(compile("y = x * 3", "<text>", "exec"), space)
    return space["y"] * eval("scale + 1") * scale


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_code_that_is_made_inside():
    def f(x):
        return with_code(x * 2).sum()

    compiled = thunder.jit(f, fallback="eager")
    for scale in (1.0, 2.0):
        x, y = (torch.full((3,), scale, requires_grad=True) for _ in range(2))
        compiled(x).backward()
        f(y).backward()
        assert torch.equal(x.grad, y.grad)
    called = [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols]
    assert called.count("eager_call") == 1 and "mul" in called
    with pytest.raises(CaptureError, match="runs code that is not there before"):
        thunder.jit(f, fallback="error")(torch.ones(3))


class Backend:
    def shape(self, x):
        return tuple(x.shape)


BACKENDS, RECIPES = {}, []


def backend(x):
    if type(x) not in BACKENDS:
        x.untyped_storage()  # is refused
        BACKENDS[type(x)] = Backend()
    return BACKENDS[type(x)]


@functools.lru_cache(8)
def recipe(dimensions):
    RECIPES.append(dimensions)
    return dimensions + 1


def reduced(x):
    return x * recipe(len(backend(x).shape(x)))


def test_what_the_first_call_of_a_library_fills_costs_no_eager_call_later():
    """As einops does: the first call looks for a backend natively, and keeps it."""

    def f(x):
        return reduced(x + 1) - 1

    compiled, x = thunder.jit(f, fallback="eager"), torch.ones(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(4):
            assert_same(compiled(x), f(x))
    names = [s.sym.name for s in thunder.last_traces(compiled)[0].bound_symbols]
    assert "eager_call" not in names


def test_the_subclasses_of_a_class_are_asked():
    class Base: ...

    class First(Base): ...

    compiled = thunder.jit(lambda x: x * len(Base.__subclasses__()), fallback="error")
    assert compiled(torch.ones(1)).item() == 1
    Second = type("Second", (Base,), {})  # noqa: F841, N806 - a class is a subclass while somebody holds it
    assert compiled(torch.ones(1)).item() == 2
    assert compiled(torch.ones(1)).item() == 2
    assert len(compiled.programs) == 2


class Ratio:
    __slots__ = ("above", "below")

    def __init__(self, above, below):
        self.above, self.below = above, below


class Whole(Ratio):
    """Its slot `below` stays empty, as in sympy's Integer."""

    __slots__ = ()
    below = 1

    def __init__(self, above):
        self.above = above


def test_an_eager_call_gives_an_object_with_an_empty_slot_that_its_class_names_again():
    def ratio(x):
        x.untyped_storage()
        return Whole(3)

    compiled, x = thunder.jit(lambda x: x * ratio(x * 2).above, fallback="eager"), torch.ones(2)
    with pytest.warns(FallbackWarning, match="runs as it is"):
        assert torch.equal(compiled(x), x * 3)
    assert torch.equal(compiled(x), x * 3)
    assert len(compiled.programs) == 1


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "make", [lambda t: Pair(t, 2), lambda t: Pair([t], {"k": t}), lambda t: types.MappingProxyType({"k": t})]
)
def test_an_eager_call_at_capture_gets_an_object_from_outside_as_it_is(make):
    """The program has a copy of a named tuple, with its own values in it; the call's are those of the caller."""

    def f(t, pair):
        return f"{pair}", t + 1

    compiled = thunder.jit(f, fallback="eager")
    for i in range(3):
        inputs = torch.ones(2), make(torch.full((2,), float(i)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert repr(compiled(*inputs)) == repr(f(*inputs))


def spelled(values):
    """Text by many decisions and calls on the host, and no operation with tensors."""
    words = []
    for value in values:
        words.append(f"{value:.2f}" if value > 0 else f"({-value:.2f})")  # noqa: PERF401
    return ";".join(words)


class Spells(nn.Module):
    """A module before and one after a text of 96 numbers. stored: of each call. notes: whether others see a write in
    front of it."""

    def __init__(self, notes=False):
        super().__init__()
        self.first, self.last, self.stored, self.notes = nn.Linear(4, 96), nn.Linear(96, 4), [], notes

    def forward(self, x):
        h = self.first(x)
        if self.notes:
            NOTES.put(0)
        self.stored.append(spelled(h.detach()[0].tolist()))
        return self.last(h * len(self.stored[-1]))


NOTES = queue.SimpleQueue()


@pytest.mark.parametrize("notes", [False, True])
def test_a_function_of_many_calls_on_the_host_is_one_call(notes):
    ours, theirs = Spells(notes), Spells(notes)
    theirs.load_state_dict(ours.state_dict())
    compiled = thunder.jit(ours, fallback="eager")
    for seed in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        want = step(theirs, theirs, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert_same(step(compiled, ours, x), want, 1e-6)
        assert NOTES.qsize() == 2 * (seed + 1) * notes
    assert ours.stored == theirs.stored and len(compiled.programs) == 1
    assert names(compiled).count("eager_call") == 1 and names(compiled).count("linear") == 2


def test_a_function_of_many_calls_that_others_see_is_one_call_from_the_next_call_on():
    """What it has done in the first call is done, and is not done again."""

    def noted(values):
        for value in values:
            NOTES.put(value)
        return NOTES.qsize()

    def f(x):
        return (x * 1).relu() * noted(x.detach().tolist())

    def drained():
        return [NOTES.get() for _ in range(NOTES.qsize())]

    compiled, programs, _ = thunder.jit(f, fallback="eager"), [], drained()
    for n in (1.0, 2.0, 3.0):
        x = torch.linspace(0, n, 80)
        expected, theirs = f(x), drained()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert torch.equal(compiled(x), expected) and drained() == theirs
        programs.append(names(compiled).count("eager_call"))
    assert programs == [0, 1, 1] and len(compiled.programs) == 1


def test_a_function_of_many_calls_that_writes_to_its_argument_is_read():
    def collect(values, words):
        for value in values:
            words.append(f"{value:.2f}")  # noqa: PERF401

    def f(x):
        words = []
        collect(x.detach().tolist(), words)
        return x * len("".join(words))

    compiled, x = thunder.jit(f, fallback="eager"), torch.linspace(0, 1, 96)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for n in (1, 2, 3):
            assert torch.equal(compiled(x * n), f(x * n))
    assert len(compiled.programs) == 1


def test_memory_that_python_code_takes_is_measured_in_each_call():
    """What a program makes of constants, it makes once."""

    def measured(x):
        tracemalloc.start()
        values = [bytes(100) for _ in range(50)]
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return x * (len(values) if taken > 1000 else 0)

    compiled = thunder.jit(lambda x: measured(x.relu()) + 1, fallback="eager")
    for n in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert torch.equal(compiled(torch.full((2,), float(n))), torch.full((2,), 50.0 * n + 1))
    assert names(compiled).count("eager_call") == 1


def test_an_item_that_the_program_appends_asks_for_no_length():
    seen = []

    def f(x):
        seen.append(x.detach().sum().item())
        return x * seen[-1]

    compiled = thunder.jit(f, fallback="eager")
    for n in range(1, 5):
        assert torch.equal(compiled(torch.full((3,), float(n))), torch.full((3,), 3.0 * n * n))
    assert len(compiled.programs) == 1 and seen == [3.0, 6.0, 9.0, 12.0]


def test_a_header_is_written_once_where_many_calls_on_the_host_follow():
    texts = []

    def scaled(x):
        message = email.message.EmailMessage()
        message["Subject"] = f"{x.detach().sum().item():.2f}"
        message.set_content("done " * 10)
        texts.append(message.as_string())
        return x * difflib.SequenceMatcher(None, texts[0], texts[-1]).ratio()

    compiled = thunder.jit(lambda x: scaled(x * 1), fallback="eager")
    for n in (1.0, 2.0, 3.0):
        x = torch.full((3,), n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            ours = compiled(x)
        assert len(texts) == n and texts[-1].startswith(f"Subject: {3 * n:.2f}")
        assert torch.equal(ours, x * difflib.SequenceMatcher(None, texts[0], texts[-1]).ratio())


def test_what_a_function_reaches_is_not_all_of_pytorch():
    """A walk into PyTorch's own functions visits 300,000 objects, which takes a second, and says nothing about them."""
    module, handler = nn.TransformerEncoderLayer(8, 2), logging.StreamHandler()
    logger = logging.getLogger("of this test")
    logger.addHandler(handler)

    def calls_a_layer(x):
        logger.info("a call")
        return nn.functional.gelu(module(x))

    reach = Reach((calls_a_layer,))
    assert reach.is_known and len(reach.seen) < 10_000
    assert reach.reaches(module.linear1.weight) and reach.reaches(handler) and not reach.reaches(nn.Linear(2, 2))


def test_a_leaf_that_an_eager_call_makes_is_no_input_of_the_program():
    """A function that differentiates by a leaf of its own has another one in each call: no other path, and nothing
    that the program keeps."""
    references = []

    @thunder.disable
    def derivative(x):
        leaf = x.detach().requires_grad_()
        references.append(weakref.ref(leaf))
        (slope,) = torch.autograd.grad(linear(leaf).pow(3).sum(), leaf, create_graph=True)
        return slope * leaf

    linear = torch.nn.Linear(3, 3)
    compiled = thunder.jit(lambda x: derivative(x * 2).sum() + linear(x).sum())
    for _ in range(5):
        x = torch.randn(2, 3, requires_grad=True)
        gradients = torch.autograd.grad(compiled(x), [x, *linear.parameters()])
        expected = torch.autograd.grad(derivative(x * 2).sum() + linear(x).sum(), [x, *linear.parameters()])
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(compiled.programs) == 1
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 3  # of the first call, and of the gradients here


@pytest.mark.parametrize("where", ["of the module", "of the call"])
def test_a_hook_of_a_leaf_in_an_eager_call_runs_once(where):
    """The hook of a parameter that an eager call reads by itself, and of a leaf that it makes, sees the gradient once."""
    seen, linear = [], torch.nn.Linear(3, 3)

    def hook(gradient):
        seen.append(gradient.sum().item())
        return gradient * 2

    @thunder.disable
    def scaled(x):
        leaf = torch.full((3,), 2.0, requires_grad=True)
        if where == "of the call":
            leaf.register_hook(hook)
        return linear(x) * leaf

    if where == "of the module":
        linear.weight.register_hook(hook)
    compiled, gradients = thunder.jit(lambda x: scaled(x * 3).sum()), []
    for function in (lambda x: scaled(x * 3).sum(), compiled, compiled):
        linear.zero_grad()
        seen.clear()
        x = torch.ones(2, 3, requires_grad=True)
        function(x).backward()
        gradients.append((linear.weight.grad, linear.bias.grad, x.grad, torch.tensor(seen)))
    for ours in gradients[1:]:
        assert len(ours[-1]) == 1
        for a, b in zip(ours, gradients[0], strict=True):
            torch.testing.assert_close(a, b)
