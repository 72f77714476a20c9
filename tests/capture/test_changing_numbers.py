"""Numbers that change from call to call stay symbolic from the second value on, unless `cache` says otherwise."""

import bisect
import collections
import dataclasses
import math
import types
from random import Random

import numpy as np
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


def test_numbers_that_are_not_equal_to_themselves_or_not_finite():
    def f(x, t):
        return x if math.isnan(t) else x.clamp(-t, t)

    values = (0.5, math.nan, 1.5, math.inf, 2.5, -0.0, 0.0, math.nan)
    assert number_of_programs(f, [(X, t) for t in values]) == 3


UNARY = (
    "math.exp(-{})", "math.log({})", "math.sqrt({})", "math.cos({})", "math.tanh({})", "round({})", "round({}, 2)",
    "int({})", "float({})", "math.ceil({})", "math.floor({})", "abs({})", "(-{})", "math.log2({})", "math.erf({})",
)  # fmt: skip
BINARY = (
    "({} + {})", "({} - {})", "({} * {})", "({} / ({} + 1))", "({} % 7 + {})", "({} // 2 + {})", "math.atan2({}, {})",
    "math.hypot({}, {})", "math.copysign({}, {})",
)  # fmt: skip


def random_number(random: Random, depth: int) -> str:
    """The text of a number that a program computes of an int, a float and a size."""
    if depth == 0 or random.random() < 0.1:
        return random.choice(("n", "t", "x.shape[1]", "0.9", "3"))
    form = random.choice(UNARY + BINARY)
    parts = [random_number(random, depth - 1) for _ in range(form.count("{}"))]
    return form.format(*(f"(abs({p}) + 0.5)" if form.startswith(("math.log", "math.sqrt")) else p for p in parts))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(30))
def test_programs_of_random_numbers(seed):
    """Two programs fit all values: one that holds for the first ones, and one of symbols."""
    random = Random(seed)
    text = f"lambda x, n, t: x * {random_number(random, 4)} + {random_number(random, 3)}"
    f = eval(text, {"math": math})
    calls = [(torch.full((2, 5 + i), 0.5), 3 + 2 * i, 0.37 + 0.25 * i) for i in range(8)]
    assert number_of_programs(f, calls) <= 2, text


@pytest.mark.parametrize(
    "number", ["1 / (t - 2.0)", "math.log(2.0 - t)", "math.sqrt(2.5 - t)", "1 // (n - 4)", "n % (n - 4)"]
)
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 4, 1, 3), (3, 4, 1, 2, 0)])
def test_errors_of_numbers_that_a_program_catches(number, order):
    """They are those of some values: the others have programs of their own."""

    def f(x, n, t):
        try:
            return x * value(n, t)
        except (ArithmeticError, ValueError):
            return x - 1

    value = eval(f"lambda n, t: {number}", {"math": math})
    number_of_programs(f, [(X, n, float(n) - 2) for n in (order[i] + 2 for i in (0, 1, 2, 0, 3, 4, 2))])


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.table, self.held = 1, {"w": 2, "list": [3, 4]}, types.SimpleNamespace(k=1)

    def forward(self, x):
        return x * self.step + self.table["w"] - self.table["list"][1] * self.held.k


@pytest.mark.parametrize(
    "change",
    [
        lambda m, i: setattr(m, "step", i),
        lambda m, i: m.table.__setitem__("w", i),
        lambda m, i: m.table["list"].__setitem__(1, i),
        lambda m, i: setattr(m.held, "k", i),
        lambda m, i: setattr(m, "held", types.SimpleNamespace(k=i / 3)),
    ],
)
def test_numbers_of_objects_that_change_between_calls(change):
    module = Scaled()
    compiled = thunder.jit(module)
    for i in range(2, 9):
        change(module, i)
        assert torch.equal(compiled(X), module(X))
    assert thunder.cache_misses(compiled) <= 3  # an int, and a float of another place


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "f, make",
    [
        (lambda x, p: torch.ones(p) * x[0, 1], lambda i: (i + 2, i + 3)),
        (lambda x, p: torch.ones(p) * x[0, 1], lambda i: torch.Size((i + 2, i + 3))),
        (lambda x, p: x * p[0] + p[1][0], lambda i: (i / 4 + 0.1, (i + 2, 7))),
        (lambda x, p: x * p.a + p.b, lambda i: Pair(i / 4 + 0.1, 3)),
        (lambda x, p: x[:, p], lambda i: slice(0, i + 2)),
    ],
)
def test_numbers_in_tuples_sizes_and_slices(f, make):
    assert number_of_programs(f, [(torch.ones(2, 12), make(i)) for i in range(8)]) == 2


def test_an_optimizer_whose_settings_change():
    """Those are floats, and tuples of floats."""
    ours, eager = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in (ours, eager)]

    def step(p, optimizer, gradient):
        p.grad = gradient
        optimizer.step()

    compiled = thunder.jit(step)
    for i in range(8):
        for optimizer in optimizers:
            optimizer.param_groups[0].update(lr=0.1 / (i + 1), betas=(0.9 - 0.01 * i, 0.999))
        gradient = torch.linspace(-1, 1, 3) * i
        compiled(ours, optimizers[0], gradient)
        step(eager, optimizers[1], gradient)
        torch.testing.assert_close(ours, eager)
    assert thunder.cache_misses(compiled) <= 3


def cropped(x, at):
    i = int(at[0]) % (x.shape[1] - 3)
    return x[:, i : i + 3] * (x.shape[1] - i) + i / x.shape[1]


def masked(x, at):
    first, width = at.tolist()
    x = x.clone()
    x[:, first : first + width] = x.shape[1]
    return x


def split_at(x, at):
    i = int(at[1])
    return torch.cat([x[:, i:], x[:, :i]], 1).cumsum(1)


def padded(x, at):
    return torch.nn.functional.pad(x, (int(at[0]), x.shape[1] - int(at[1]))).sum(1)


def counted(x, at):
    selected = x[:, x[0] > 0.2]
    return selected.sum() / x.shape[1] + selected.shape[1] * x.shape[1] - min(selected.shape[1], 3)


@pytest.mark.parametrize("f", [cropped, masked, split_at, padded, counted])
def test_sizes_beside_integers_of_data(f):
    generator = torch.Generator().manual_seed(0)
    calls = [
        (torch.rand(2, n, generator=generator), torch.randint(0, 5, (2,), generator=generator)) for n in range(6, 16)
    ]
    compiled = thunder.jit(f)
    for args in calls:
        torch.testing.assert_close(compiled(*args), f(*args), rtol=0, atol=0)
    assert thunder.cache_misses(compiled) <= 3


@pytest.mark.parametrize("f", [cropped, split_at])
def test_gradients_with_sizes_beside_integers_of_data(f):
    generator = torch.Generator().manual_seed(0)
    compiled = thunder.jit(f)
    for n in range(6, 12):
        xs = [torch.rand(2, n, generator=generator).requires_grad_()]
        xs.append(xs[0].detach().clone().requires_grad_())
        at = torch.randint(0, 5, (2,), generator=generator)
        for function, x in zip((compiled, f), xs):
            function(x, at).pow(2).sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad, rtol=1e-6, atol=1e-6)
    assert thunder.cache_misses(compiled) <= 3


@torch.library.custom_op("changing::twice", mutates_args=())
def twice(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cat([x] * k, 1)


@twice.register_fake
def _(x, k):
    return x.new_empty(x.shape[0], x.shape[1] * k)


def test_sizes_in_operations_that_pytorch_types():
    """Functions that thunder has no rule for, and operators of a library's: one program for all sizes."""
    assert number_of_programs(lambda x: twice(x, 3) + 1, [(torch.rand(2, n),) for n in range(3, 9)]) == 2
    ragged = [[torch.rand(n % 5 + j + 2, 4) for j in range(3)] for n in range(3, 9)]
    padded = lambda *xs: torch.nn.utils.rnn.pad_sequence(xs, batch_first=True).sum(1)  # noqa: E731
    assert number_of_programs(padded, ragged) <= 3


def test_gradients_of_ragged_lists():
    compiled = thunder.jit(lambda xs: torch.nn.utils.rnn.pad_sequence(xs, batch_first=True).square().sum())
    for n in range(3, 9):
        xs = [torch.rand(n % 5 + j + 2, 4, requires_grad=True) for j in range(3)]
        compiled(xs).backward()
        for x in xs:
            assert torch.equal(x.grad, 2 * x.detach())
    assert thunder.cache_misses(compiled) <= 4


def _items(x, i, table):
    return x * table["rates"][i] + table["sigmas"][i - 1] * table["named"][i]["scale"] - table["rates"][-i]


def _item_or_none(x, i, table):
    try:
        return x if table["maybe"][i] is None else x * table["maybe"][i]
    except IndexError:
        return x - 1


def _written_items(x, i, table):
    table["tensors"][i].add_(x)
    table["lists"][i % 2].append(i)
    return table["tensors"][i] * 2 + table["tensors"][i + 1] + len(table["lists"][0])


def _array_item(x, i, table):
    return x * table["array"][i] + float(table["array"][i - 1])


@pytest.mark.parametrize("f, programs", [(_items, 3), (_item_or_none, 5), (_written_items, 4), (_array_item, 2)])
def test_items_under_a_number_that_changes(f, programs):
    """A list of rates, a dict by steps: the item is an input, whichever it is."""

    def tables():
        return {
            "rates": [0.1 * i for i in range(20)], "sigmas": {i: 1.5 * i for i in range(20)},
            "named": [{"scale": 0.5 + i} for i in range(20)], "maybe": [None if i % 3 else i * 0.5 for i in range(8)],
            "tensors": [torch.full((3, 4), i * 1.0) for i in range(20)], "lists": [[], []],
            "array": np.linspace(1, 2, 20),
        }  # fmt: skip

    ours, eagers = tables(), tables()
    compiled = thunder.jit(f, fallback="error")
    for i in range(3, 12):
        torch.testing.assert_close(compiled(X, i, ours), f(X, i, eagers), rtol=0, atol=0)
    assert ours["lists"] == eagers["lists"]
    torch.testing.assert_close(ours["tensors"], eagers["tensors"], rtol=0, atol=0)
    assert thunder.cache_misses(compiled) <= programs


def _history(x, i, table):
    table["all"][i] = x * 2
    table["all"][i + 1], table["all"][0] = i, x.sum()
    return x


def _last_item(x, i, table):
    table["last"], table[2 * i], table[i] = i, x, x + 1
    return x


def _added_up(x, i, table):
    table[i % 4] = table[i % 4] + x.sum()
    return x * i


def _counted(x, i, table):
    table.steps[table.n] = float(x.sum())
    table.n += 1
    return x * table.n


def _read_again(x, i, table):
    table[i] = i
    return x * table[i] + len(table)


@pytest.mark.parametrize(
    "f, make, programs",
    [
        (_history, lambda: {"all": {}}, 2), (_last_item, dict, 2),
        (_last_item, lambda: collections.OrderedDict({6: 1, 5: 2}), 2), (_added_up, lambda: {i: X for i in range(4)}, 2),
        (_counted, lambda: types.SimpleNamespace(steps={}, n=0), 2), (_read_again, dict, 8),
    ],
)  # fmt: skip
def test_items_written_under_a_number_that_changes(f, make, programs):
    """The key is an input. Where the program reads the dict behind it, it decides by the key."""
    ours, eagers = make(), make()
    compiled = thunder.jit(f, fallback="error")
    for i in range(3, 11):
        assert torch.equal(compiled(X + i, i, ours), f(X + i, i, eagers))
        assert str(ours) == str(eagers)  # in this order
    assert thunder.cache_misses(compiled) <= programs


@pytest.mark.parametrize("make, programs", [(list, 3), (lambda: collections.deque(maxlen=6), 4)])
def test_lengths_that_change(make, programs):
    """Of a list that the program adds to, and does not read."""

    def f(x, seen):
        seen.append(float(x.sum()))
        return x * len(seen) if len(seen) > 4 else x + len(seen)

    ours, eagers = make(), make()
    compiled = thunder.jit(f, fallback="error")
    for i in range(12):
        assert torch.equal(compiled(X + i, ours), f(X + i, eagers)) and ours == eagers
    assert thunder.cache_misses(compiled) <= programs


def test_leaves_of_changing_sizes():
    """Gradient penalties: the program makes a leaf with a symbolic size."""

    def f(x, n):
        mixed = (torch.ones(n, 4) * x[0]).requires_grad_(True)
        (gradient,) = torch.autograd.grad((mixed**2).sum(), mixed)
        return gradient

    compiled = thunder.jit(f, fallback="error")
    strides = thunder.jit(lambda x, n: f(x, n).t().requires_grad_().stride(), fallback="error")
    for n in range(3, 9):
        assert torch.equal(compiled(X, n), f(X, n)) and strides(X, n) == (1, 4)
    assert thunder.cache_misses(compiled) <= 2


@pytest.mark.parametrize("function", [bisect.bisect_left, bisect.bisect_right, bisect.bisect])
def test_places_in_a_list_are_decisions(function):
    """Schedules with milestones: one program once the number is symbolic for each place."""
    compiled = thunder.jit(lambda x, n: x * 0.1 ** function([4, 8, 12], n), fallback="error")
    for n in range(2, 20):
        assert torch.equal(compiled(X, n), X * 0.1 ** function([4, 8, 12], n))
    assert thunder.cache_misses(compiled) <= 6
