"""`rng="fused"` with the executors of kernels: numbers that kernels draw, of a seed that PyTorch draws for each call."""

import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.executors.cpp_fuser import CppFuser
from thunder.executors.triton_fuser import TritonFuser
from thunder.kernels import measure
from thunder.ops.families.random import _run_uniform_philox

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(program, **options):
    return thunder.jit(program, executors=[TritonFuser("random")], rng="fused", **options)


def names(compiled, traces=thunder.last_traces):
    return [
        line.sym.name
        for line in traces(compiled)[-1].bound_symbols
        if line.sym.name not in ("python_del", "unpack_sequence", "clear_collection")
    ]


def seeded(call, *args, seed=0):
    torch.manual_seed(seed)
    return call(*args)


def philox(shape, offset, seed=0):
    """What `uniform_philox` gives for the seed that a program draws after `torch.manual_seed`."""
    drawn = (
        seeded(torch.randint, 0, 2**63 - 1, (), seed=seed)
        if DEVICE == "cpu"
        else seeded(lambda: torch.randint(0, 2**63 - 1, (), device=DEVICE), seed=seed)
    )
    return _run_uniform_philox(shape, device=torch.device(DEVICE), dtype=torch.float32, seed=drawn, offset=offset)


def test_a_kernel_draws_what_philox_draws():
    """In each kind of kernel, whatever its blocks are."""
    x = torch.randn(7, 33, device=DEVICE)
    alone = fused(lambda: torch.rand(1000, device=DEVICE))
    assert torch.equal(seeded(alone), philox((1000,), 0)) and names(alone)[-1].startswith("TritonFusion")
    compiled = fused(
        lambda x: (
            torch.rand_like(x) * x,
            torch.rand(5, 7, 33, device=DEVICE).sum(0),
            torch.softmax(x + torch.rand_like(x).t().t(), -1),
        )
    )
    first, total, normalized = seeded(compiled, x)
    assert torch.equal(first, philox((7, 33), 0) * x)
    torch.testing.assert_close(total, philox((5, 7, 33), 1).sum(0))
    torch.testing.assert_close(normalized, torch.softmax(x + philox((7, 33), 2), -1))
    assert all(name == "randint" or name.startswith("TritonFusion") for name in names(compiled))


def test_measuring_pytorchs_kernels_draws_no_number_of_the_programs():
    before = torch.get_rng_state()
    measure._eager()
    assert torch.equal(before, torch.get_rng_state())


def test_a_kernel_of_the_cpu_draws_the_same():
    executor = CppFuser("random", always=True)
    if (reason := executor.unavailable()) is not None:
        pytest.skip(reason)
    x = torch.randn(7, 33)
    compiled = thunder.jit(
        lambda x: (torch.rand_like(x) * x, torch.rand(5, 7, 33).sum(0), torch.empty(1000).uniform_(-1, 3)),
        executors=[executor],
        rng="fused",
    )
    drawn = seeded(torch.randint, 0, 2**63 - 1, ())
    numbers = [
        _run_uniform_philox(shape, device=torch.device("cpu"), dtype=torch.float32, seed=drawn, offset=offset)
        for offset, shape in enumerate(((7, 33), (5, 7, 33), (1000,)))
    ]
    product, total, wide = seeded(compiled, x)
    assert torch.equal(product, numbers[0] * x)
    torch.testing.assert_close(total, numbers[1].sum(0))
    torch.testing.assert_close(wide, numbers[2] * 4 - 1)
    assert all(name == "randint" or name.startswith("Kernels") for name in names(compiled))


def test_a_seed_repeats_numbers_and_calls_differ():
    compiled = fused(lambda x: F.dropout(x, 0.5) + torch.randn_like(x))
    x = torch.ones(200, device=DEVICE)
    first, again, other = seeded(compiled, x), seeded(compiled, x), compiled(x)
    assert (
        torch.equal(first, again)
        and not torch.equal(first, other)
        and not torch.equal(seeded(compiled, x, seed=1), first)
    )


@pytest.mark.slow
def test_numbers_are_distributed_as_pytorchs():
    n = 20000

    def program():
        ones = torch.ones(n, device=DEVICE)
        dropped = (F.dropout(ones, 0.3), torch.bernoulli(ones, 0.8), torch.empty(n, device=DEVICE).bernoulli_(0.1))
        return (
            *dropped,
            torch.rand(n, device=DEVICE),
            torch.empty(n, device=DEVICE).uniform_(-1, 3),
            torch.randn(n, device=DEVICE),
            torch.empty(n, device=DEVICE).normal_(2, 0.5),
        )

    compiled = fused(program)
    dropped, often, seldom, uniform, wide, normal, other = (x.double().cpu() for x in seeded(compiled))
    assert names(compiled).count("randint") == 1 and len(names(compiled)) <= 3
    for drawn, share in ((dropped != 0, 0.7), (often, 0.8), (seldom, 0.1)):
        assert abs(drawn.double().mean() - share) < 4 * (share * (1 - share) / n) ** 0.5
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.7]) and often.unique().tolist() == [0.0, 1.0]

    def furthest(x, distribution):
        """Kolmogorov and Smirnov's distance, times the root of how many there are: beyond 1.95 once in a thousand."""
        expected = distribution.cdf(x.sort().values)
        steps = torch.arange(n + 1, dtype=torch.float64) / n
        return max((expected - steps[:-1]).abs().max(), (steps[1:] - expected).abs().max()) * n**0.5

    uniforms, normals = torch.distributions.Uniform, torch.distributions.Normal
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    assert furthest(uniform, uniforms(zero, one)) < 1.95 and furthest(wide, uniforms(-one, 3 * one)) < 1.95
    assert furthest(normal, normals(zero, one)) < 1.95 and furthest(other, normals(2 * one, one / 2)) < 1.95
    together = torch.corrcoef(torch.stack((dropped, often, seldom, uniform, wide, normal, other)))
    assert (together - torch.eye(7)).abs().max() < 4.5 / n**0.5, "each operation draws its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_repeats_the_mask_and_keeps_none(dtype):
    x = torch.ones(40, 50, device=DEVICE, dtype=dtype, requires_grad=True)
    compiled = fused(lambda x: F.dropout(x, 0.4).tanh())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = compiled(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient == 0, y == 0) and 0 < int((y == 0).sum()) < y.numel()
    assert all(t.numel() == 1 or t.data_ptr() == x.data_ptr() or t.shape == y.shape and t.dtype == dtype for t in saved)
    exact = (1 - (y.detach().double()) ** 2) / 0.6
    torch.testing.assert_close(
        gradient[y != 0].double(), exact[y != 0], rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )


def test_a_checkpoint_repeats_the_mask():
    from torch.utils.checkpoint import checkpoint

    def program(x):
        return checkpoint(lambda x: (F.dropout(x, 0.4) * x).sin(), x, use_reentrant=False)

    x = torch.linspace(0.5, 1.5, 60, device=DEVICE, requires_grad=True)
    compiled = fused(program)
    y = compiled(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    scaled_mask = (y != 0).double() / 0.6
    torch.testing.assert_close(
        gradient.double(), 2 * x.detach() * scaled_mask * torch.cos(scaled_mask * x.detach() ** 2), rtol=1e-5, atol=1e-5
    )
    assert 0 < int((y == 0).sum()) < 60 and "get_rng_state" not in str(thunder.last_traces(compiled)[-1])


def test_the_backward_of_pytorchs_dropout_is_fused():
    def program(g, mask):
        return torch.ops.aten.native_dropout_backward(g.sin(), mask, 2.0).tanh()

    compiled = thunder.jit(program, executors=[TritonFuser("dropped")])
    g, mask = torch.randn(7, 33, device=DEVICE), torch.rand(7, 33, device=DEVICE) > 0.5
    torch.testing.assert_close(compiled(g, mask), program(g, mask))
    assert [name.startswith("TritonFusion") for name in names(compiled)] == [True]


def test_what_stays_with_pytorch():
    """Without `rng="fused"` everything; with it what kernels do not draw, what has a generator of its own, and programs
    that hold a generator's state.

    What is computed of the numbers is rounded once, since kernels round a product and a sum together.
    """
    x = torch.rand(30, device=DEVICE)
    generator = torch.Generator(DEVICE)
    programs = {
        "double": lambda x: torch.rand_like(x, dtype=torch.float64) * 2,
        "certain": lambda x: F.dropout(x, 1.0) + 1,
        "looked at": lambda x: torch.bernoulli(x) * 2,
        "own": lambda x: torch.rand(x.shape, device=DEVICE, generator=generator) * 2 + 1,
        "seeding": lambda x: (torch.manual_seed(3), torch.rand_like(x) * 2 + 1)[1],
        "not asked": lambda x: F.dropout(x, 0.5) * 2,
    }
    for name, program in programs.items():
        compiled = thunder.jit(
            program, executors=[TritonFuser("random")], **({} if name == "not asked" else {"rng": "fused"})
        )
        outcomes = []
        for call in (compiled, program):
            generator.manual_seed(5)
            outcomes.append(seeded(call, x))
        assert torch.equal(*outcomes), name
        assert "uniform_philox" not in str(thunder.last_traces(compiled)[-1])
