"""Numbers that the host computes are arguments of the Triton fuser's kernels: of data, of inputs, of optimizers."""

import copy
import math
import operator
import random

import pytest
import torch

import thunder
from thunder.executors.triton_fuser import TritonFuser

from .test_triton_fuser import DEVICE, check_close, fusions, others

pytestmark = [
    # numpy says so where the interpreter computes what is not used, or not a number
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("triton_interpreter"),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def with_fuser(f, **options):
    fuser = TritonFuser("triton_fuser")
    return thunder.jit(f, executors=[fuser, "torch"], fallback="error", **options), fuser


def scaled(x, n):
    n = n.item()
    return (x * (1 - n) + n / 3).sin() * n - x / (n * n + 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_of_data_is_an_argument_of_one_region(dtype):
    compiled, fuser = with_fuser(scaled)
    x = torch.randn(67, dtype=torch.float64, device=DEVICE).to(dtype)
    for value in (0.1, 1 / 3, -7.0, 1e-30, 0.0, math.inf, math.nan):
        n = torch.tensor(value, dtype=torch.float64)
        check_close(compiled(x, n), scaled(x, n), scaled(x.double(), n))
    assert len(compiled.programs) == 1 and fuser.compilations == 1
    assert len(fusions(compiled)) == 1 and others(compiled) == ["item"]


def test_regions_with_numbers_are_verified_and_profiled():
    compiled, _ = with_fuser(lambda x, y, n: (scaled(x, n), scaled(y, n)))
    x, y, n = torch.randn(7, device=DEVICE), torch.randn(3, 5, device=DEVICE), torch.tensor(0.3)
    report = thunder.verify(compiled, x, y, n)
    assert report.first is None and "TritonFusion0" in str(report)
    assert "sin" in str(thunder.profile(compiled, x, y, n))


def test_doubles_lose_no_digit():
    compiled, _ = with_fuser(lambda x, n: (x * n.item() + 1) * 2)
    x = torch.tensor([1.0, 3.0], dtype=torch.float64, device=DEVICE)
    for value in (0.1, 1 + 2**-52, 1e300, 5e-324):
        n = torch.tensor(value, dtype=torch.float64)
        assert torch.equal(compiled(x, n), (x * n.item() + 1) * 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_integers_of_any_size_are_arguments(dtype):
    def f(x, n):
        n = n.item()
        return torch.where(x > n, x - n, x * 2 + n)

    compiled, fuser = with_fuser(f)
    x = torch.tensor([-5, 0, 3, 2**30], device=DEVICE).to(dtype)
    for value in (3, -(2**31), 2**31 - 1, *([2**40, -(2**62)] if dtype is not torch.int32 else [])):
        n = torch.tensor(value)
        assert torch.equal(compiled(x, n), f(x, n))
    assert len(compiled.programs) == 1
    # a number of the program may be none of 32 bits: PyTorch runs these
    assert fuser.compilations == len(fusions(compiled)) == (dtype is not torch.int32)


def test_types_are_promoted_as_eager_promotes_them():
    def f(x, n, k):
        n, k = n.item(), k.item()
        return x * n + 1, x * k + 1, torch.full_like(x, k) + x, torch.clamp(x, max=k) * 2

    compiled, _ = with_fuser(f)
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.float16, torch.float64):
        x = torch.tensor([0, 1, 5], device=DEVICE).to(dtype)
        n, k = torch.tensor(2.5, dtype=torch.float64), torch.tensor(3)
        for got, expected in zip(compiled(x, n, k), f(x, n, k), strict=True):
            assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_floats_that_are_passed_in_are_arguments():
    def f(x, scale, power):
        return (x * scale).exp() + x * (scale**2 - power)

    compiled, fuser = with_fuser(f, cache="symbolic values")
    x = torch.randn(5, 3, device=DEVICE)
    for scale, power in ((0.5, 2.0), (1.7, 3.25), (-2.2, 0.125)):
        torch.testing.assert_close(compiled(x, scale, power), f(x, scale, power))
    assert len(compiled.programs) == 1 and fuser.compilations == 1 and len(fusions(compiled)) == 1


def test_sizes_of_data_stay_out_of_regions():
    def f(x):
        positive = x[x > 0]
        return (positive * 2 + 1).sin()

    compiled, _ = with_fuser(f)
    for x in (torch.randn(9, device=DEVICE), -torch.ones(3, device=DEVICE)):
        torch.testing.assert_close(compiled(x), f(x))


def test_regions_of_the_same_expressions_are_compiled_once():
    def f(xs, n):
        a, b = n.tolist()
        return [(x * v + 1).sin() for x, v in zip(xs, (a, b), strict=True)]

    compiled, fuser = with_fuser(f)
    xs, n = [torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)], torch.tensor([0.25, -3.0])
    for got, expected in zip(compiled(xs, n), f(xs, n), strict=True):
        torch.testing.assert_close(got, expected)
    assert fuser.compilations <= len(fusions(compiled))


UNARY = (torch.sin, torch.exp, torch.sqrt, torch.abs, torch.tanh)
BINARY = (operator.add, operator.sub, operator.mul, operator.truediv)


def random_program(seed):
    """A function of two tensors and two numbers of data."""
    choose = random.Random(seed)
    steps = [(choose.choice(BINARY), choose.randrange(9), choose.randrange(9), choose.random()) for _ in range(8)]

    def run(x, y, a, b):
        a, b = a.item(), b.item()
        values, numbers = [x, y], [a, b, 1.5]
        for function, i, j, kind in steps:
            tensor = values[i % len(values)]
            if kind < 0.3:
                numbers.append(function(numbers[i % len(numbers)], numbers[j % len(numbers)] * 0.5 + 7))
            elif kind < 0.5:
                values.append(UNARY[j % len(UNARY)](tensor))
            elif kind < 0.8:
                values.append(function(tensor, numbers[j % len(numbers)]))
            else:
                values.append(function(tensor, values[j % len(values)]))
        return values[-1] + numbers[-1], values[-2] * numbers[-2]

    return run


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(30))
def test_random_programs_with_numbers_equal_eager(seed):
    run = random_program(seed)
    compiled, _ = with_fuser(run)
    torch.manual_seed(seed)
    x, y = (torch.randn(3, 5, dtype=torch.float64, device=DEVICE) for _ in range(2))
    for _ in range(3):
        a, b = (torch.randn((), dtype=torch.float64).abs() + 0.5 for _ in range(2))
        for got, expected in zip(compiled(x, y, a, b), run(x, y, a, b), strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)
    assert len(compiled.programs) == 1


# ---------------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS = [
    ("AdamW", {"foreach": True}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True, "capturable": True}),
    ("AdamW", {"foreach": False, "lr": torch.tensor(1e-2)}),
    ("AdamW", {"foreach": True, "capturable": True, "lr": torch.tensor(1e-2)}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "foreach": True}),
    ("SGD", {"lr": torch.tensor(1e-2), "momentum": 0.9}),
    ("Adagrad", {"foreach": True, "lr_decay": 0.1}),
    ("Adagrad", {"foreach": False}),
    ("RMSprop", {"momentum": 0.9, "centered": True, "foreach": True}),
    ("RMSprop", {"foreach": False}),
    ("NAdam", {"foreach": True}),
    ("NAdam", {"foreach": False}),
    ("RAdam", {"foreach": True}),
    ("Adamax", {"foreach": True}),
]


def trained(kind, options, dtype, compiles, steps=7):
    """What parameters and states are after some steps of a small network, and the compiled step."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(DEVICE, dtype)
    options = copy.deepcopy(options)
    if options.get("capturable") and "lr" in options:  # kernels of a GPU take no tensors of the CPU
        options["lr"] = options["lr"].to(DEVICE)
    optimizer = getattr(torch.optim, kind)(module.parameters(), **options)

    def step(x):
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = with_fuser(step)[0] if compiles else step
    for i in range(steps):
        run(torch.linspace(-1, 1 + i, 24, dtype=dtype, device=DEVICE).reshape(4, 6))
    state = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    return [*(p.detach() for p in module.parameters()), *state], run


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=lambda x: x if isinstance(x, str) else ",".join(x))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_optimizers_in_a_step_equal_eager(kind, options, dtype, monkeypatch):
    if options.get("capturable") and DEVICE == "cpu":  # which PyTorch allows on GPUs
        module = __import__(f"torch.optim.{kind.lower().removesuffix('w')}", fromlist=["*"])
        name = "_get_capturable_supported_devices"
        if not hasattr(module, name):
            pytest.skip("this PyTorch asks otherwise where capturable=True is allowed")
        monkeypatch.setattr(module, name, lambda *_, **__: ["cpu"])
    expected, _ = trained(kind, options, dtype, False)
    got, compiled = trained(kind, options, dtype, True)
    if options.get("capturable"):  # which computes corrections of a bias in float32, of tensors
        options = {"foreach": True, "lr": float(options.get("lr", 1e-3))}
    exact, _ = trained(kind, options, torch.float64, False)
    for a, b, e in zip(got, expected, exact, strict=True):
        deviation, of_eager = ((x.double() - e).abs().max() for x in (a, b))
        assert deviation <= 4 * of_eager + 64 * torch.finfo(dtype).eps * e.abs().max()
    assert 1 <= len(compiled.programs) <= 3  # a first step, others, and RAdam's after its warm-up
    left = [name for name in others(compiled) if name.startswith("_foreach") and "copy" not in name]
    assert len(left) <= 3, "what counts steps, and powers of that count, stay with PyTorch"


def test_signs_and_powers_of_special_values():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 2.0, -3.0], device=DEVICE)

    def f(x):
        return torch.sign(x) * 2, torch.sgn(x) + 1, x**0 + 1, x.abs() * 2

    compiled = thunder.jit(f, executors=["triton_fuser"])
    for result, want in zip(compiled(x), f(x), strict=True):
        torch.testing.assert_close(result, want, equal_nan=True)
    assert fusions(compiled)
