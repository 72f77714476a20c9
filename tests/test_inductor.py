"""The inductor executor: what it computes, in which layout, how often it compiles, and what it leaves to PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import thunder
from thunder.executors.inductor import inductor_ex, torch_compile_cat_ex, torch_compile_ex
from thunder.tests.litgpt_model import GPT

pytestmark = pytest.mark.skipif(inductor_ex.unavailable() is not None, reason=f"Inductor cannot compile here: {inductor_ex.unavailable()}")


def names(compiled) -> list[str]:
    return [line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols if line.outputs]


def region_of(compiled, at: int = 0):
    return thunder.examine.get_fusions(thunder.last_traces(compiled)[-1])[at][1]


def gpt(depth: int) -> GPT:
    torch.manual_seed(0)
    return GPT.from_name("llama2-like", n_layer=depth, n_embd=32, n_head=4, head_size=8, intermediate_size=96, block_size=32, vocab_size=64)


def test_names_that_users_know():
    assert thunder.get_executor("inductor") is inductor_ex and thunder.get_executor("torchcompile") is torch_compile_ex
    assert torch_compile_cat_ex is inductor_ex and type(torch_compile_ex) is type(inductor_ex)
    with pytest.raises(ValueError, match="numerics"):
        thunder.jit(lambda x: x, executors=["inductor"], numerics="eager")


def test_a_step_is_as_near_to_float64_as_eager_and_layers_are_compiled_once():
    """Depth 2 and depth 4 have the same regions, forward and backward."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    compiled_regions = []
    for depth in (2, 4):
        model = gpt(depth)
        gradients = {}
        for kind in ("float64", "eager", "inductor"):
            called = gpt(depth).double() if kind == "float64" else model
            inductor_ex._compiled.clear() if depth == 2 else None
            before = inductor_ex.compilations
            loss = (thunder.jit(called, executors=["inductor"]) if kind == "inductor" else called)(tokens).square().mean()
            gradients[kind] = torch.autograd.grad(loss, list(called.parameters()))
        compiled_regions.append(inductor_ex.compilations - before)
        for ours, eager, exact in zip(gradients["inductor"], gradients["eager"], gradients["float64"], strict=True):
            scale = exact.norm()
            assert (ours - exact).norm() / scale <= 3 * (eager - exact).norm() / scale + 1e-7
    assert compiled_regions[0] > 3 and compiled_regions[1] == 0
    assert all(region.compilations == 1 for region in inductor_ex._compiled.values())


def test_results_are_laid_out_as_pytorch_lays_them_out_and_new_strides_are_compiled_once():
    def program(x, y):
        z = (x * y).exp() + 1.0
        return z, z.sum(0), z.transpose(0, 1), x[0]

    compiled = thunder.jit(program, executors=["inductor"])
    plain, turned = torch.randn(5, 7), torch.randn(7, 5).t()
    for x, y, compilations in ((plain, plain, 1), (turned, turned, 2), (turned, turned, 2), (plain[:, ::2], turned[:, ::2], 1), (plain[:1], turned[:1], 1)):
        got, want = compiled(x, y), program(x, y)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
        assert got[2].data_ptr() == got[0].data_ptr() and got[3].data_ptr() == x.data_ptr()
        assert region_of(compiled).compilations == compilations
    assert names(compiled)[0] == "__getitem__" and names(compiled)[1].startswith("Inductor"), "a view of an input is made outside"


def test_what_is_written_to_and_negatives_of_memory():
    def program(x, y):
        x.mul_(2.0).add_(y)
        return x.sin() * y

    compiled = thunder.jit(program, executors=["inductor"])
    x, y = torch.randn(5), torch.view_as_complex(torch.randn(5, 2)).conj().imag
    assert y.is_neg()
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(compiled(mine, y), program(theirs, y))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("executor", ["inductor", "torchcompile"])
def test_what_pytorch_refuses_is_refused_and_random_numbers_are_its_own(executor):
    """In a kernel, a bad index or an integer divided by zero would end the process."""

    def program(x, table, places, divisor):
        y = F.dropout(x.exp() * 2.0 + 1.0, 0.5)
        quotients = places // divisor * 2, torch.div(places, divisor, rounding_mode="trunc") * 2, places % divisor * 2, torch.fmod(places, divisor) * 2
        losses = F.cross_entropy(table * 2.0, places) + 1.0, F.binary_cross_entropy(x.clamp(min=0.0), x.sigmoid()) + 1.0
        return y, F.embedding(places, table) * 2.0 + 1.0, *quotients, *losses

    compiled = thunder.jit(program, executors=[executor])
    x, table, places, divisor = torch.linspace(-1.0, 1.0, 8), torch.randn(4, 4), torch.tensor([0, 3, 1, 3]), torch.tensor([1, 2, 3, 2])
    torch.manual_seed(3)
    got = compiled(x, table, places, divisor)
    torch.manual_seed(3)
    for a, b in zip(got, program(x, table, places, divisor), strict=True):
        torch.testing.assert_close(a, b)
    for wrong in ((x, table, places + 1, divisor), (x, table, places, divisor - 1), (x * 2, table, places, divisor)):
        with pytest.raises((IndexError, RuntimeError)) as eager:
            program(*wrong)
        with pytest.raises(type(eager.value)) as ours:
            compiled(*wrong)
        assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_complex_numbers_and_sizes_that_data_decides_stay_with_pytorch():
    compiled = thunder.jit(lambda z, x: ((z * 2 + 1) * z, x.nonzero() * 2 + 1), executors=["inductor"])
    z, x = torch.randn(3, dtype=torch.complex64), torch.tensor([0.0, 1.0, 2.0])
    got = compiled(z, x)
    torch.testing.assert_close(got[0], (z * 2 + 1) * z)
    assert torch.equal(got[1], x.nonzero() * 2 + 1)
    assert not any(name.startswith("Inductor") for name in names(compiled))


def test_another_process_finds_the_kernels_on_disk():
    """What a process remembers is forgotten here; Inductor's cache of graphs is asked, and has the region."""

    def program(x):
        return (x * 3.0).cos() + x.tanh()

    x = torch.randn(6, 4)
    thunder.jit(program, executors=["inductor"])(x)
    inductor_ex._compiled.clear()
    before = counters["inductor"]["fxgraph_cache_hit"]
    compiled = thunder.jit(program, executors=["inductor"])
    torch.testing.assert_close(compiled(x), program(x))
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1


def test_a_region_that_inductor_does_not_compile_is_an_error_that_names_it(monkeypatch):
    from thunder.executors import inductor

    def refuse(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(inductor, "compile_with_inductor", refuse)
    compiled = thunder.jit(lambda x: x.sin() * 7.0 - 0.125, executors=["inductor"])
    with pytest.raises(thunder.errors.MissingImplementationError, match=r"Inductor does not compile a region of sin, mul, sub: no\nLeave the executor"):
        compiled(torch.randn(3))
