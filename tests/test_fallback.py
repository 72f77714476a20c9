"""`fallback=`: what a call does whose program cannot be captured."""

import math
import warnings

import pytest
import torch

import thunder
from thunder.cache import compile as compile_module
from thunder.cache.store import PATIENCE
from thunder.capture import policy
from thunder.errors import CaptureError, FallbackWarning, OptionError, UnforeseenShapeError


def written(x, log):
    """Has an effect before what cannot be captured, and one after."""
    log.append("before")
    y = x.untyped_storage().nbytes()
    log.append("after")
    return x * y


def test_eager_runs_the_original_once_and_warns_once():
    compiled, log, x = thunder.jit(written, fallback="eager"), [], torch.ones(3)
    with pytest.warns(
        FallbackWarning, match=r"untyped_storage.*(.|\n)*x\.untyped_storage\(\)(.|\n)*The original function ran"
    ):
        result = compiled(x, log)
    assert torch.equal(result, x * 12) and log == ["before", "after"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x + 1, log), (x + 1) * 12)
    assert log == ["before", "after"] * 2


def test_error_raises_and_runs_nothing():
    compiled, log = thunder.jit(written, fallback="error"), []
    with pytest.raises(CaptureError, match="untyped_storage"):
        compiled(torch.ones(3), log)
    assert log == []


def test_calls_that_look_the_same_are_captured_once():
    compiled, x = thunder.jit(lambda x: x + x.untyped_storage().nbytes(), fallback="eager"), torch.ones(3)
    with pytest.warns(FallbackWarning):
        compiled(x)
    tried = thunder.cache_misses(compiled)
    for _ in range(5):
        assert torch.equal(compiled(x), x + 12)
    assert thunder.cache_misses(compiled) == tried


def test_a_program_that_never_looks_the_same_is_not_captured_at_each_call():
    calls = []

    def counted(x):
        calls.append(0)
        return x + (x.untyped_storage().nbytes() - 12 + len(calls))

    compiled, x = thunder.jit(counted, fallback="eager"), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for n in range(1, 201):
            assert torch.equal(compiled(x), x + n)
    assert thunder.cache_misses(compiled) < 40


def drawn(x):
    a = torch.rand(2)
    try:
        return a + torch.bernoulli(x), torch.rand(2)
    except RuntimeError:
        return a - x, torch.rand(2)


@pytest.mark.parametrize("grad", [False, True])
def test_numbers_that_a_program_drew_are_drawn_again_by_the_original_that_handles_its_error(grad):
    compiled, eager = thunder.jit(drawn, fallback="eager"), torch.Generator()
    for value in (1.0, 2.0, 0.0, 3.0):
        x = torch.full((2,), value, requires_grad=grad)
        eager.set_state(torch.get_rng_state())
        ours, state = compiled(x), torch.get_rng_state()
        torch.set_rng_state(eager.get_state())
        for a, b in zip(ours, drawn(x), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(state, torch.get_rng_state())
    assert len(compiled.programs) == 1


def test_what_would_compute_something_else_is_an_error():
    class Nothing(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
            return prologue, computation, epilogue

    compiled = thunder.jit(written, transforms=[Nothing()], fallback="eager")
    with pytest.raises(CaptureError, match="untyped_storage"):
        compiled(torch.ones(3), [])


def test_values():
    with pytest.raises(OptionError, match="valid: 'eager', 'error'"):
        thunder.jit(written, fallback="graph break")


def of_data(indices, values):
    noise = torch.rand(2)
    return torch.sparse_coo_tensor(indices, values, (4,), check_invariants=False).coalesce().values() * 2, noise


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.10 and 2.11, once
def test_what_a_program_was_not_made_for_is_the_originals():
    """Sparse tensors are typed by examples: of equal indices, which coalesce to one."""
    compiled = thunder.jit(of_data, fallback="eager")
    indices = torch.tensor([[0, 2, 2]])
    with pytest.warns(FallbackWarning, match="not foreseen.*The original function runs") as warned:
        for seed in range(9):
            values = torch.randn(3)
            torch.manual_seed(seed)
            actual = compiled(indices, values)
            torch.manual_seed(seed)
            wanted = of_data(indices, values)
            for a, b in zip(actual, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len([w for w in warned if w.category is FallbackWarning]) == 1
    runs = compiled.programs[0].calls
    compiled(indices, values)
    assert compiled.programs[0].calls == runs < 9  # after some in a row, calls go by it
    with pytest.raises(UnforeseenShapeError, match="not foreseen"):
        thunder.jit(of_data, fallback="error")(indices, values)
    printing = thunder.jit(lambda *args: (print("once"), of_data(*args)), fallback="eager")
    with pytest.raises(UnforeseenShapeError, match="not foreseen"):  # the original would print again
        printing(indices, values)


# ------------------------------------------------------------------------------------------- what is remembered


def captures(monkeypatch) -> list:
    """Gets one element for each capture from now on."""
    counted, run = [], compile_module.Compilation.run
    monkeypatch.setattr(compile_module.Compilation, "run", lambda self: counted.append(self) or run(self))
    return counted


@pytest.mark.parametrize("fallback", ["eager", "error"])
def test_an_exception_of_the_program_is_captured_once(monkeypatch, fallback):
    def program(x, mode):
        if mode == "bad":
            raise ValueError(f"{mode} for {len(x)}")
        return x + 1

    compiled, x = thunder.jit(program, fallback=fallback), torch.ones(3)
    counted = captures(monkeypatch)
    for _ in range(4):
        with pytest.raises(ValueError, match="bad for 3") as raised:
            compiled(x, "bad")
        assert raised.traceback[-1].name == "program"
    assert len(counted) == 1
    assert torch.equal(compiled(x, "good"), x + 1) and len(compiled.programs) == 1
    with pytest.raises(ValueError, match="bad for 2"):
        compiled(x[:2], "bad")


def test_an_exception_that_data_decides_about_is_not_remembered():
    def program(x):
        if x.sum() < 0:
            raise ValueError("negative")
        return x + 1

    compiled, x = thunder.jit(program), torch.ones(3)
    for y in (-x, x, -x, x):
        if y[0] < 0:
            with pytest.raises(ValueError, match="negative"):
                compiled(y)
        else:
            assert torch.equal(compiled(y), y + 1)
    assert compiled.programs


class Switch:
    refused = True


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_refusal_ends_with_its_cause(monkeypatch):
    switch = Switch()

    def program(x):
        if switch.refused:
            return x + x.untyped_storage().nbytes()
        return x * 2

    compiled, x = thunder.jit(program, fallback="eager"), torch.ones(3)
    counted = captures(monkeypatch)
    for refused in (True, False, True, False):
        switch.refused = refused
        for _ in range(3):
            assert torch.equal(compiled(x), program(x))
    assert len(compiled.programs) == 1 and len(counted) == 2


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_function_that_thunder_fails_on_is_an_eager_call(monkeypatch):
    """The program around it stays captured. A function that raises by itself costs one capture more, once."""
    monkeypatch.setitem(policy.DEFINED, id(math.sqrt), int)  # which raises, given what a definition is given

    def root(x):
        return x * math.sqrt(4)

    compiled, x = thunder.jit(lambda x: root(x) + 1, fallback="eager"), torch.ones(3)
    counted = captures(monkeypatch)
    for _ in range(3):
        assert torch.equal(compiled(x), x * 2 + 1)
    assert len(compiled.programs) == 1 and len(counted) == 1 and compiled.programs[0].captured.has_eager_calls

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.ReLU())
    compiled = thunder.jit(model, fallback="eager")
    for n in (3, 3, 4, 3, 4):
        if n == 4:
            assert torch.equal(compiled(torch.ones(4)), model(torch.ones(4)))
            continue
        with pytest.raises(RuntimeError, match="mat1 and mat2|size mismatch"):
            compiled(torch.ones(n))
    assert len(compiled._compiled.programs) == 1 and not compiled._compiled.programs[0].captured.has_eager_calls


def test_the_users_own_exception_is_captured_once(monkeypatch):
    def program(x, kind):
        if kind == "bad":
            raise ValueError("bad")
        return x * len(kind)

    compiled = thunder.jit(program)
    for n, kind in ((1.5, "a"), (2.5, "bb"), (3.5, "ccc")):
        assert compiled(n, kind) == n * len(kind)
    counted, read = [], thunder.capture._read
    monkeypatch.setattr(thunder.capture, "_read", lambda c: counted.append(c) or read(c))
    for n in (3.5, 4.5, 5.5):
        with pytest.raises(ValueError, match="bad"):
            compiled(n, "bad")
    assert len(counted) == 1


def limited(x, k):
    y = x * k
    if k > 3:
        raise ValueError(f"{k} is too much")
    return y


def positive(x, k):
    if x.sum() < 0:
        raise ValueError(f"{k} is too much")
    return x * k


@pytest.mark.parametrize("program", [limited, positive])
def test_exceptions_that_differ_in_each_call_are_not_captured_each_time(monkeypatch, program):
    """After two in a row a call that no program fits runs the original, until one does not raise."""
    compiled, counted = thunder.jit(program, fallback="eager"), captures(monkeypatch)
    for k in (*range(1, 10), 1, 2, 11, 3):
        x = -torch.ones(3) if program is positive and k > 3 else torch.ones(3)
        if k > 3:
            with pytest.raises(ValueError, match=f"^{k} is too much"):
                compiled(x, k)
        else:
            assert torch.equal(compiled(x, k), program(x, k))
    captured = len(counted)
    assert captured <= 5
    x = torch.ones(3, 2)
    for _ in range(3):
        assert torch.equal(compiled(x, 2), program(x, 2))
    assert len(counted) > captured and len(compiled.programs) >= 2


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_refusal_is_tried_again_sometimes(monkeypatch):
    """It may have had a cause that the program does not ask about."""
    refuses = [True]

    def refusing(c, f, args, kwargs):
        return c.refuse("of a cause that nobody sees") if refuses else c.call_native(f, args, kwargs)

    monkeypatch.setitem(policy.DEFINED, id(math.sqrt), refusing)
    compiled, x = thunder.jit(lambda x: x * math.sqrt(4), fallback="eager"), torch.ones(3)
    counted = captures(monkeypatch)
    for _ in range(PATIENCE + 1):
        assert torch.equal(compiled(x), x * 2)
    assert len(counted) == 1 and not compiled.programs
    for _ in range(4 * PATIENCE):
        compiled(x)
    assert len(counted) == 2
    refuses.clear()
    for _ in range(2):
        assert torch.equal(compiled(x), x * 2)
    assert len(compiled.programs) == 1


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_lower_of_a_refused_call_says_why():
    compiled, x = thunder.jit(lambda x: x + x.untyped_storage().nbytes(), fallback="eager"), torch.ones(3)
    for _ in range(2):
        compiled(x)
    with pytest.raises(CaptureError, match="untyped_storage"):
        compiled.lower(x)


def test_a_shape_that_was_not_foreseen_behind_python_of_pytorch():
    """`to_sparse_coo` is Python, of which nothing says that it has no effect: it only computes."""

    def f(x):
        return x.to_sparse_csr().to_sparse_coo().to_dense(), x.to_sparse().coalesce().indices()

    compiled = thunder.jit(f, fallback="eager")
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), f(x))
