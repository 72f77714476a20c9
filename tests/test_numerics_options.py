"""`numerics="eager"`: results and gradients are eager's bit for bit. `rng="fused"`: fusion executors may draw random
numbers, and otherwise do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import thunder
import thunder.torch as ltorch
from benchmarks.model_zoo import MODELS, named_tensors
from tests.ops.test_autocast import arguments, flat, make, sampled
from thunder.core.proxies import map_structure
from thunder.errors import OptionError
from thunder.extend import (
    FusionExecutor,
    OperatorExecutor,
    deregister_executor,
    register_executor,
    set_default_executors,
)
from thunder.ops import LTORCH
from thunder.ops.infer import run_line


def gradients(model: torch.nn.Module, run, args, kwargs) -> tuple[list[torch.Tensor], list]:
    """The tensors of a result, and the gradients of their sum for every parameter."""
    torch.manual_seed(0)
    outputs = [t for _, t in named_tensors(run(*args, **kwargs))]
    floating = [o for o in outputs if o.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    computed_gradients = (
        torch.autograd.grad(sum(o.float().square().sum() for o in floating), parameters, allow_unused=True)
        if floating
        else []
    )
    return [o.detach() for o in outputs], list(computed_gradients)


# sums of gradients that PyTorch adds up in another memory layout: the last bit of some
IN_ANOTHER_LAYOUT = {"Qwen3", "Mamba"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [n for n in MODELS if n not in IN_ANOTHER_LAYOUT])
def test_models_are_bit_identical_to_eager(name):
    model, args, kwargs = MODELS[name]()
    model.train()
    want = gradients(model, model, args, kwargs)
    got = gradients(model, thunder.jit(model, numerics="eager"), args, kwargs)
    for kind, a, b in zip(("result", "gradient"), got, want, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None) and (x is None or torch.equal(x.nan_to_num(), y.nan_to_num())), (
                f"{kind}: {(x - y).abs().max()}"
            )


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's advice on single functions
# whose results are numbers here and tensors there
@pytest.mark.parametrize("name", [n for n in sampled() if n != "choose_qparams_optimized"])
def test_operations_are_bit_identical_to_eager(name):
    """The first sample of each operation, and its gradients."""
    function = LTORCH[name].torch_functions[0]
    torch.manual_seed(0)
    args, kwargs = arguments(next(iter(LTORCH[name].sampler(make))))
    inputs: list[torch.Tensor] = []

    def differentiable(x):
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return x
        inputs.append(x.clone().requires_grad_())
        return inputs[-1]

    plain = args, kwargs
    args, kwargs = map_structure(differentiable, args), map_structure(differentiable, kwargs)

    def outcome(call) -> list:
        outputs = [o for o in flat(call(*args, **kwargs)) if isinstance(o, torch.Tensor)]
        starts = [o for o in outputs if o.requires_grad]
        torch.manual_seed(1)
        seeds = [torch.randn_like(o) for o in starts]
        gradients = (
            torch.autograd.grad(starts, inputs, seeds, allow_unused=True, materialize_grads=True)
            if starts and inputs
            else ()
        )
        return [o.detach() for o in outputs] + list(gradients)

    try:
        want = outcome(function)
    except (RuntimeError, NotImplementedError):  # PyTorch does not differentiate it with respect to all of them
        args, kwargs = plain
        inputs.clear()
        want = outcome(function)
    got = outcome(thunder.jit(lambda *args, **kwargs: function(*args, **kwargs), numerics="eager"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------------------------- the
# options


@pytest.fixture
def inexact():
    """A default executor whose gelu is off."""
    before = thunder.get_default_executors()
    executor = OperatorExecutor("numerics_inexact")
    gelu = executor.register_operator("off_gelu", like=ltorch.gelu, fn=lambda a, **_: F.gelu(a) + 0.01)
    executor.register_implementation(ltorch.gelu, gelu)
    register_executor(executor)
    set_default_executors((executor, *before))
    yield executor
    set_default_executors(before)
    deregister_executor(executor)


def test_what_is_not_exact_is_left_out(inexact):
    x = torch.randn(5)
    assert not torch.equal(thunder.jit(lambda x: F.gelu(x))(x), F.gelu(x))
    assert torch.equal(thunder.jit(lambda x: F.gelu(x), numerics="eager")(x), F.gelu(x))


@pytest.mark.parametrize("numerics", ["numerics_inexact", None])
def test_what_is_not_exact_and_asked_for_is_refused(inexact, numerics):
    with pytest.raises(OptionError, match="numerics_inexact.*exact=True"):
        thunder.jit(lambda x: x, executors=[numerics or inexact], numerics="eager")
    with pytest.raises(OptionError, match="AutocastTransform.*exact = True"):
        thunder.jit(lambda x: x, transforms=[thunder.autocast()], numerics="eager")
    with pytest.raises(OptionError, match="AutocastTransform.*exact = True"):
        thunder.add_transform(thunder.jit(lambda x: x, numerics="eager"), transform=thunder.autocast())


def test_what_says_it_is_exact_is_used():
    executor = OperatorExecutor("numerics_exact", exact=True)
    calls = []
    gelu = executor.register_operator("own_gelu", like=ltorch.gelu, fn=lambda a, **_: calls.append(1) or F.gelu(a))
    executor.register_implementation(ltorch.gelu, gelu)
    x = torch.randn(5)
    assert torch.equal(thunder.jit(lambda x: F.gelu(x), executors=[executor], numerics="eager")(x), F.gelu(x)) and calls


@pytest.mark.parametrize("options, words",
    [({"numerics": "exact"}, "numerics='exact'.*'close', 'eager'"),
        ({"rng": "philox"}, "rng='philox'.*'torch', 'fused'"),
                                            ({"rng": "fused", "numerics": "eager"},
                                                "rng='fused' and numerics='eager'")])  # fmt: skip
def test_other_values_name_the_valid_ones(options, words):
    with pytest.raises(OptionError, match=words):
        thunder.jit(lambda x: x, **options)


# ----------------------------------------------------------------------------------------------------------------
# random operations and fusion


class Toy(FusionExecutor):
    """Runs regions of numbers of a seed and of elementwise operations."""

    def __init__(self):
        super().__init__("toy_random_fuser")
        for operation in (ltorch.mul, ltorch.add, ltorch.uniform_philox):
            self.register_supported(operation)

    def fuse(self, region, counter):
        def run(*inputs):
            values = dict(zip(region.inputs, inputs, strict=True))
            for line in region.bound_symbols:
                run_line(line, values)
            return [values[o] for o in region.outputs]

        return self.register_temporary_operation(
            f"toy{counter}", run, inputs=region.inputs, outputs=region.outputs, bsyms=region.bound_symbols
        )


def noisy(x):
    return torch.rand_like(x) * x + x


def fused_names(compiled) -> list[str]:
    region = next((line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion), None)
    return [] if region is None else [line.sym.name for line in region.subsymbols]


def test_random_numbers_are_of_a_seed_only_when_asked():
    x = torch.ones(4)
    compiled = thunder.jit(noisy, executors=[Toy()])
    torch.manual_seed(0)
    want = noisy(x)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), want)
    assert fused_names(compiled) == ["mul", "add"]

    seeded = thunder.jit(noisy, executors=[Toy()], rng="fused")
    torch.manual_seed(0)
    y, again = seeded(x), seeded(x)
    assert fused_names(seeded) == ["uniform_philox", "mul", "add"] and not torch.equal(y, again)
    torch.manual_seed(0)
    assert torch.equal(seeded(x), y) and not torch.equal(y, want)


def test_a_generator_of_the_users_draws_itself():
    generator = torch.Generator().manual_seed(3)

    def program(x):
        return torch.rand(4, generator=generator) * x + x

    compiled = thunder.jit(program, executors=[Toy()], rng="fused")
    got = compiled(torch.ones(4))
    assert torch.equal(
        got, torch.rand(4, generator=torch.Generator().manual_seed(3)) + 1
    ) and "uniform_philox" not in fused_names(compiled)


def test_what_a_checkpoint_draws_again_is_the_same():
    from torch.utils.checkpoint import checkpoint

    def program(x):
        return checkpoint(lambda x: (torch.rand_like(x) * x * x).sin(), x, use_reentrant=False)

    x = torch.linspace(0.5, 1.2, 6, requires_grad=True)  # up to where arcsin undoes sin
    y = thunder.jit(program, executors=[Toy()], rng="fused")(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    noise = (y.arcsin() / x**2).detach()
    assert 0 < noise.std() and noise.min() >= 0 and noise.max() < 1
    torch.testing.assert_close(gradient, (noise * x**2).cos() * 2 * noise * x)


def test_a_second_derivative_of_fused_numbers_is_refused():
    x = torch.linspace(0.5, 1.5, 6, requires_grad=True)
    y = thunder.jit(noisy, executors=[Toy()], rng="fused")(x * 1)
    with pytest.raises(RuntimeError, match='rng="fused"'):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


EXACT_INSIDE = {
    "svd": lambda x: sum(part.sin().sum() for part in torch.linalg.svd(x, full_matrices=False)),
    "pinv": lambda x: torch.linalg.pinv(x).sin().sum(),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, torch.linspace(0, 1, 35).reshape(7, 5), 1 + x * x),
}


@pytest.mark.parametrize("name", EXACT_INSIDE)
def test_gradients_of_a_backward_inside_are_eagers(name):
    def step(x):
        x.grad = None
        EXACT_INSIDE[name](x).backward()
        return x.grad

    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    want, got = (f(x.clone().requires_grad_()) for f in (step, thunder.jit(step, numerics="eager")))
    assert torch.equal(got, want)
