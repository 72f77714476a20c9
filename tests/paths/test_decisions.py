"""Decisions by data: which programs are compiled for them, where they stand, and what becomes of those that fail."""

from __future__ import annotations

import bisect
import heapq
import linecache
import math

import pytest
import torch

import thunder
from tests.counting import calls_during, files_within
from tests.paths.compared import beside_eager, keeping_nothing
from thunder.capture import operators
from thunder.core import paths
from thunder.core.symbol import current_recorder
from thunder.errors import CaptureError, FallbackWarning

X = torch.arange(6.0).reshape(2, 3) + 1
INPUTS = [X, -X, X - 2, X * 0, X - 5.5, X * 40, X]
DECIDED: dict = {}


def decided(function):
    """The line of the program that ends in `# here` is the one whose decision is checked."""
    DECIDED[function.__name__] = function
    return function


@decided
def data_dependent_if(x):
    if x.sum() > 0:  # here
        return x
    return -x


@decided
def data_dependent_while(x):
    while x.sum() < 100:  # here
        x = x * 2 + 30
    return x


@decided
def conditional_expression(x):
    return x if x.max() > 1 else -x  # here


@decided
def boolean_and(x):
    return x[0, 0] > 0 and x  # here


@decided
def bool_of_a_tensor(x):
    return x * 2 if bool(x.any()) else x  # here


@decided
def item(x):
    return x * 2 if x[0, 0].item() > 0 else x  # here


@decided
def int_of_a_tensor(x):
    return sum(range(int(x.sum())))  # here


@decided
def float_of_a_tensor(x):
    return x * math.sqrt(float(x.max()))  # here


@decided
def tensor_as_a_range(x):
    return sum(range(x.long().max()))  # here


@decided
def tolist(x):
    return len(x.nonzero().tolist())  # here


@decided
def boolean_mask(x):
    return x if x[x > 2].numel() == 0 else -x  # here


@decided
def nonzero(x):
    return [row for row in x.nonzero()]  # here


@decided
def unique(x):
    return torch.unique(x).squeeze()  # here


@decided
def tensor_contains(x):
    return 3.0 in x  # here


@decided
def in_a_helper(x):
    def helper(v):
        if v.sum() > 0:  # here
            return v
        return -v

    return helper(x) * 2


@decided
def sorted_by_tensors(x):
    return sorted([x[0, 0], x[0, 1]])  # here


@pytest.mark.parametrize("name", DECIDED)
def test_where_a_program_decides(name):
    function = DECIDED[name]
    compiled = beside_eager(keeping_nothing(function), [(x,) for x in INPUTS])
    first = function.__code__.co_firstlineno
    here = next(n for n in range(first, first + 9) if "# here" in linecache.getline(__file__, n))
    decisions = [d for program in compiled.programs for d in program.path]
    assert decisions and {d.where[:2] for d in decisions} == {(__file__, here)}
    assert all("# here" in d.where[3] for d in decisions)
    assert len(compiled.programs) == len({program.path for program in compiled.programs}) <= len(INPUTS)


def test_a_path_is_compiled_once():
    compiled = beside_eager(keeping_nothing(lambda x: x * 2 if x.sum() > 0 else -x), [(X,), (-X,)] * 5)
    assert thunder.cache_misses(compiled) == 2


def test_modes_around_a_decision():
    def program(x):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            if x.sum() > 0:
                return x @ x.T
        return x @ x.T

    beside_eager(keeping_nothing(program), [(x.clone().requires_grad_(),) for x in INPUTS])
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and current_recorder() is None


def test_an_error_on_the_way_to_a_decision_is_the_programs():
    def caught(x):
        y = x[x > 0]
        try:
            return y if y > 1.5 else -y
        except RuntimeError as error:
            return str(error)

    beside_eager(
        keeping_nothing(caught), [(torch.tensor(v),) for v in ([1.0, 2], [-1.0, 2], [-1.0, -2], [1.0, -2], [1.0, 3])]
    )

    def indexed(x, i):
        try:
            return x if torch.embedding(x, i).sum() > 0 else -x
        except IndexError:
            return x * 2

    with pytest.raises(CaptureError, match="before this decision it raises IndexError: index out of range"):
        thunder.jit(indexed, fallback="error")(X, torch.tensor(7))
    compiled = thunder.jit(indexed, fallback="eager")
    with pytest.warns(FallbackWarning, match="before this decision it raises IndexError: index out of range"):
        assert torch.equal(compiled(X, torch.tensor(7)), X * 2)
    assert torch.equal(compiled(X, torch.tensor(1)), X) and torch.equal(compiled(-X, torch.tensor(1)), X)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        thunder.jit(lambda x: x if x else -x)(X)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.tensor(min(1, x[0].item())),  # an int or a float
        lambda x: (max(2, x[1].item()), min(x[0].item(), 0.5, 1), max(x[2].item(), 0.0), max(x[2].item(), -0.0)),
        lambda x: (x.sum().long().item() + 0.0, 0.0 - x.numel(), x.sum().long().item() * 0.0),
    ],
    ids=["the type of a tensor", "types of numbers", "zeros"],
)
def test_the_type_of_the_least(program):
    beside_eager(keeping_nothing(program), [(x,) for x in (X[0], -X[0], X[0] * 0 + 1, X[0] * math.nan, X[1])])


def test_a_write_under_no_grad_before_a_decision():
    def program(w):
        y = w * 1
        with torch.no_grad():
            y.mul_(2)
        return y * 3 if y.sum() > 0 else y

    beside_eager(keeping_nothing(program), [(x.clone().requires_grad_(),) for x in INPUTS])


@pytest.mark.parametrize("drawn", [False, True])
def test_a_decision_behind_a_backward_that_is_behind_one(drawn):
    """The backward replaces what it differentiates, here by what saves a mean as well."""
    norm = torch.nn.LayerNorm(3)

    def program(x):
        x = norm(x)
        if drawn:
            x = torch.nn.functional.dropout(x)
        if x.sum() > 0:
            x = x * 2
        loss = x.sum() if drawn else x.square().mean()
        (gradient,) = torch.autograd.grad(loss, norm.weight)
        return loss + 1 if gradient.norm() > 1 else loss - 1

    compiled = thunder.jit(program)
    for x in INPUTS:
        torch.manual_seed(0)
        want = program(x)
        torch.manual_seed(0)
        assert torch.equal(compiled(x), want)


def test_of_calls_whose_answers_alternate_every_second_one_is_tried_right(monkeypatch):
    def program(x):
        return x * 2 if x.sum() > 0 else x - 1

    compiled, left = thunder.jit(program), []
    usual = compiled._on_other_path
    monkeypatch.setattr(compiled, "_on_other_path", lambda *arguments: left.append(arguments) or usual(*arguments))
    inputs = [X, -X]
    for x in inputs:
        compiled(x)
    left.clear()
    for x in inputs * 10:
        assert torch.equal(compiled(x), program(x))
    assert len(left) == 10
    left.clear()
    for x in [X] * 10 + [-X] * 10:  # and where they stay, the second one that is left is the last
        assert torch.equal(compiled(x), program(x))
    assert len(left) <= 4
    assert thunder.cache_misses(compiled) == 2


def beam_search(x):
    beams = [(0.0, [])]
    for row in x.log_softmax(-1).tolist():
        longer = [(score + v, [*taken, i]) for score, taken in beams for i, v in enumerate(row)]
        beams = heapq.nlargest(2, longer, key=lambda beam: beam[0])
    return [taken for _, taken in beams], x * beams[0][0]


def heap_of_the_largest(x):
    heap = []
    for i, v in enumerate(x.flatten().tolist()):
        heapq.heappush(heap, (v, i))
        if len(heap) > 2:
            heapq.heappop(heap)
    return x.flatten()[torch.tensor([i for _, i in sorted(heap)])]


def insertion_sort(x):
    results = []
    for v in x[0].tolist():
        bisect.insort(results, v)
    return x * results[0], results


@pytest.mark.parametrize("program", [beam_search, heap_of_the_largest, insertion_sort], ids=lambda f: f.__name__)
def test_numbers_of_data_in_heaps_and_sorted_lists(program):
    """Native code that compares and stores them is left to an eager call of the function around."""

    def around(x):
        return program(x * 2), x.sin()

    compiled = thunder.jit(around, fallback="eager")
    with pytest.warns(FallbackWarning, match="as it is in each call of the program"):
        for i in range(6):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(i))
            torch.testing.assert_close(compiled(x), around(x))
    assert 1 <= thunder.cache_misses(compiled) <= 2 and "eager_call" in str(thunder.last_traces(compiled)[0])


def test_a_decision_with_the_same_answer_calls_nothing():
    """It is compared where it stands: the check is called for another answer alone."""

    def guarded(x):
        y = x * 2
        if torch.isnan(y).any():
            return y - 1
        return y + 1 if y.sum().item() > 0 else -y

    compiled, x = thunder.jit(guarded), torch.ones(2, requires_grad=True)
    for _ in range(2):
        compiled(x)
    text = compiled.programs[0].forward.python()
    assert "!= 0 and check_decision(" in text and "> 0 or check_decision(" in text
    assert calls_during(lambda: compiled(x), paths.__file__) == 0
    torch.testing.assert_close(compiled(-x), guarded(-x))
    torch.testing.assert_close(compiled(x * float("nan")), guarded(x * float("nan")), equal_nan=True)
    assert len(compiled.programs) == 3


def test_a_decision_is_read_in_twelve_files():
    """From the interpreter's question for the truth of a tensor to the answer, when a program is captured."""

    def program(x):
        return x + 1 if x.sum() > 0 else x - 1

    files = files_within(operators.truth, lambda: thunder.jit(program)(X))
    assert "capture/decisions.py" in files and len(files) <= 12, files
