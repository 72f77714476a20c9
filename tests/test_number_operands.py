"""Numbers that kernels on the CPU would convert in each call are tensors, made once."""

import itertools
import math

import pytest
import torch

import thunder
from thunder.ops import LTORCH
from thunder.ops.rules import kernels

NUMBERS = (0.1, -2.5, 0.0, -0.0, 1, 2, 1021, 1e-45, 1e300, math.inf, math.nan, 2**60 + 1)
CONVERTED = sorted(name for name, symbol in LTORCH.items() if kernels.converts_numbers.of(symbol) == (1,))
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -1.0, 0.5])


def number_operands(compiled) -> list:
    return [x for b in thunder.last_traces(compiled)[-1].bound_symbols for x in b.args if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", CONVERTED)
def test_results_are_eagers_bit_for_bit(name):
    function = LTORCH[name].torch_functions[0]
    operands = torch.randn(67) * 3, SPECIAL, torch.randn(()), torch.randn(5, 3).t()
    program = lambda x: [function(x, number) for number in NUMBERS]  # noqa: E731
    for x, dtype in itertools.product(operands, (torch.float32, torch.float64, torch.bfloat16)):
        compiled, x = thunder.jit(program), x.to(dtype)
        try:
            want = program(x)
        except (RuntimeError, NotImplementedError):
            with pytest.raises((RuntimeError, NotImplementedError)):
                compiled(x)
            continue
        torch.testing.assert_close(compiled(x), want, rtol=0, atol=0, equal_nan=True)
        assert len(number_operands(compiled)) == (0 if dtype is torch.bfloat16 else len(fitting(dtype)))


def fitting(dtype: torch.dtype) -> list:
    return [n for n in NUMBERS if not math.isfinite(n) or abs(n) <= torch.finfo(dtype).max]


def conversions(run) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(e.count for e in profile.key_averages() if e.key == "aten::_to_copy")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # before torch 2.13
def test_nothing_is_converted_when_a_program_runs():
    def program(x, y):
        z = (x * 0.5 - 1) / 3
        return torch.where(z > 0, z, y + 2).sum()

    x, y = torch.randn(5, requires_grad=True), torch.randn(5)
    compiled = thunder.jit(program)

    def step(run):
        return torch.autograd.grad(run(x, y), x)

    torch.testing.assert_close(step(compiled), step(program), rtol=0, atol=0)
    assert conversions(lambda: step(program)) > 0
    assert conversions(lambda: step(compiled)) == 0


def test_numbers_that_are_chosen():
    def program(x):
        return [(torch.where(x > 0, x, n), torch.where(x > 0, n, x)) for n in fitting(x.dtype)]

    for dtype in (torch.float32, torch.float64):
        x = torch.randn(9).to(dtype)
        compiled = thunder.jit(program)
        torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0, equal_nan=True)
        assert len(number_operands(compiled)) == 4 * len(fitting(dtype))
    for run in (thunder.jit(lambda x: torch.where(x > 0, x, 1e300)), lambda x: torch.where(x > 0, x, 1e300)):
        with pytest.raises(RuntimeError, match="without overflow"):
            run(torch.ones(2))


def test_in_place_forms_take_them():
    def program(x):
        y = x.clone()
        y.mul_(0.5).add_(1)
        x.sub_(2)
        return y

    ours, eagers = torch.ones(3), torch.ones(3)
    compiled = thunder.jit(program)
    assert torch.equal(compiled(ours), program(eagers)) and torch.equal(ours, eagers)
    assert torch.equal(compiled(ours), program(eagers)) and torch.equal(ours, eagers)
    assert len(number_operands(compiled)) == 3


def test_the_text_names_the_number():
    compiled = thunder.jit(lambda x: x * 0.1)
    compiled(torch.ones(2))
    assert "torch.mul(x, float32_0_1)" in str(thunder.last_traces(compiled)[-1])
    compiled(torch.ones(2, dtype=torch.int64))
    assert "torch.mul(x, 0.1)" in str(thunder.last_traces(compiled)[-1])
