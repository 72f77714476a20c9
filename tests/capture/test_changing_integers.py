"""Int arguments that change from call to call stay symbolic from the second value on, unless `cache` says otherwise."""

import dataclasses

import pytest
import torch

import thunder

X = torch.arange(12.0).reshape(3, 4)


def number_of_programs(f, calls, **options):
    compiled = thunder.jit(f, **options)
    for args in calls:
        ours, want = compiled(*args), f(*args)
        assert torch.equal(ours, want) if isinstance(want, torch.Tensor) else ours == want
    return thunder.cache_misses(compiled)


def scaled(x, n):
    return x * n + n // 2


def branching(x, n):
    return x * n if n > 4 else x - n


def repeated(x, n):
    for _ in range(n):
        x = x + 1
    return x


def summed(x, dim):
    return x.sum(dim)


def row(x, i):
    return x[i] + x[i : i + 1]


@dataclasses.dataclass
class Position:
    at: int


def nested(x, positions):
    return x * positions["now"][0].at


@pytest.mark.parametrize(
    "f, values, programs",
    [
        (scaled, range(20), 2), (scaled, (5, 5, 5), 1), (scaled, (-3, 7, 0, 1, 2), 3), (branching, range(2, 12), 3),
            (repeated, (1, 2, 3, 2, 1), 3), (summed, (0, 1, -1, 0), 2),
        (row, (0, 1, 2, 1), 2), (scaled, (True, False), 2), (scaled, (1.0, 2.0, 3.0), 2),
    ],
)  # fmt: skip
def test_a_number_is_a_constant_once(f, values, programs):
    assert number_of_programs(f, [(X, n) for n in values]) == programs


def test_numbers_inside_of_containers_and_results():
    assert number_of_programs(nested, [(X, {"now": [Position(n)]}) for n in (2, 3, 4, 5)]) == 2
    assert number_of_programs(lambda n, m: n * m + n, [(n, 7) for n in range(2, 9)]) == 2


def test_constant_values_stay_constants_where_they_were_asked_for():
    assert number_of_programs(scaled, [(X, n) for n in (2, 3, 4, 5)], cache="constant values") == 4


def test_gradients_of_programs_with_changing_numbers():
    compiled = thunder.jit(lambda x, n: (x[n:] * n).pow(2).sum())
    for n in (1, 2, 0, 1, 2):
        ours, eagers = X.clone().requires_grad_(), X.clone().requires_grad_()
        compiled(ours, n).backward()
        (eagers[n:] * n).pow(2).sum().backward()
        torch.testing.assert_close(ours.grad, eagers.grad)
    assert thunder.cache_misses(compiled) <= 3


def test_what_only_constants_can_do_is_compiled_for_each_value():
    """Strings of a number, and operations that need it during capture."""

    def labelled(x, n):
        return {f"layer {n}": x.reshape(n, -1)}[f"layer {n}"]

    assert number_of_programs(labelled, [(X, n) for n in (2, 3, 4, 6, 3)]) == 4


@pytest.mark.parametrize(
    "combine",
    [
        lambda v, n: v / n,
        lambda v, n: n * v - n,
        lambda v, n: n / (v + 10),
        lambda v, n: (v + 10) ** n,
        lambda v, n: v // n + v % n,
        lambda v, n: int(v / n) + 0.5 if v / n > 1 else n - v,
    ],
)
def test_a_counter_beside_a_float_of_data_is_one_program_a_path(combine):
    """Running means: `mean += (loss.item() - mean) / n`."""

    class State:
        n, mean = 0, 0.0

    def step(x, state):
        state.n += 1
        state.mean += combine(x.mean().item(), state.n) - state.mean / (state.n + 1)
        return x * state.mean, state.mean

    ours, eagers = State(), State()
    ours.n = eagers.n = 1
    ours.mean = eagers.mean = 0.0
    compiled = thunder.jit(lambda x: step(x, ours), fallback="error")
    for call in range(8):
        x = torch.tensor([1.0 + call, 2.0])
        (y, mean), (wanted, wanted_mean) = compiled(x), step(x, eagers)
        assert torch.equal(y, wanted) and mean == wanted_mean and ours.n == eagers.n
    assert len(compiled.programs) <= 2
