"""Values that depend on no argument are computed in the first call, and what leaves a program is new in each call."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import thunder
from thunder.programs.text import function_of, written_text
from thunder.transforms.constants import LARGEST, Constant

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def mask(n=4):
    return torch.tril(torch.ones(n, n)) * 2


def held(compiled, backward=False) -> list[Constant]:
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    return [b.sym.fn for b in traces[-1].bound_symbols if isinstance(b.sym.fn, Constant)]


def counted(run) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {e.key.removeprefix("aten::") for e in profile.key_averages()}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_they_are_computed_once():
    compiled = thunder.jit(lambda x: x @ mask() + torch.arange(4))
    assert torch.equal(compiled(X), X @ mask() + torch.arange(4))
    assert {"tril", "ones", "arange"} & counted(lambda: compiled(X)) == set()
    assert len(held(compiled)) == 2 and "m = constant()" not in thunder.last_traces(compiled)[0].python()
    assert "# t" in (text := thunder.last_traces(compiled)[-1].python(depth=2)) and "torch.tril" in text


def test_they_are_saved_for_a_backward_as_they_are():
    def program(x, w):
        return F.softmax(x * mask() @ w, -1).square().sum()

    x, w = X.clone().requires_grad_(), torch.eye(4, requires_grad=True)
    compiled = thunder.jit(program)
    for _ in range(7):  # fused kernels among them
        got = torch.autograd.grad(compiled(x, w), (x, w))
        torch.testing.assert_close(got, torch.autograd.grad(program(x, w), (x, w)))
    with torch.inference_mode():
        thunder.jit(program)(x, w)


class GivesTheMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.save_for_backward(m)
        return x * m

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0], None


def test_a_saved_value_that_is_a_gradient_is_new_in_each_call():
    compiled = thunder.jit(lambda x: GivesTheMask.apply(x, mask()))
    for _ in range(4):
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
        assert torch.equal(gradient, mask())
        gradient.mul_(-3)


# programs whose values leave: each call has its own
LEAVING = {
    "returned": lambda x, masks: (mask(), x + 1),
    "a view is returned": lambda x, masks: (mask()[1:].t(), x + mask()),
    "parts are returned": lambda x, masks: (mask().split(2)[0], x),
    "written to": lambda x, masks: (mask().add_(x), x),
    "a view is written to": lambda x, masks: ((lambda m: (m[1].add_(x[0]), m)[1])(mask()), x),
    "written to later": lambda x, masks: (lambda m: (x @ m, m.mul_(x)))(mask()),
    "kept by the host": lambda x, masks: (masks.append(mask()), x + 1)[1:],
    "a gradient that others are added to": lambda x, masks: (
        lambda w: ((w * mask()).sum().backward(retain_graph=True), (w * 2).sum().backward(), w.grad.clone())[1:]
    )(x.detach().clone().requires_grad_())[1:],
    "gradient": lambda x, masks: torch.autograd.grad((x * 0 + mask()).sum(), x),
}


@pytest.mark.parametrize("name", LEAVING)
def test_what_leaves_is_new_in_each_call(name):
    program, masks, wanted = LEAVING[name], [], []
    compiled = thunder.jit(program)
    x = X.clone().requires_grad_(name == "gradient")
    for _ in range(6):
        actual, want = compiled(x, masks), program(x, wanted)
        torch.testing.assert_close((actual, masks), (want, wanted))
        for y in (*actual, *masks):  # for the next call
            y.detach().mul_(-3)
        for y in wanted:
            y.mul_(-3)
        x = X.clone().requires_grad_(name == "gradient")


def test_what_is_not_constant():
    def program(x):
        return x + torch.rand(4), x * torch.empty_like(x).fill_(2.0), x + torch.ones(x.shape[0], 1)

    compiled = thunder.jit(program, cache="symbolic values")
    for n in (4, 5, 6):
        torch.manual_seed(0)
        actual = compiled(torch.ones(n, 4))
        torch.manual_seed(0)
        torch.testing.assert_close(actual, program(torch.ones(n, 4)))
    n = LARGEST // 4 + 4
    compiled = thunder.jit(lambda x: x + torch.ones(n))
    compiled(torch.ones(1))
    assert held(compiled) == []


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.ops.aten.tril.default else result


def test_dispatch_modes_see_them():
    compiled, program = thunder.jit(lambda x: x @ mask()), lambda x: x @ mask()
    for _ in range(2):
        with Doubles():
            assert torch.equal(compiled(X), program(X))
        assert torch.equal(compiled(X), program(X))


def test_programs_on_disk_have_them():

    compiled = thunder.jit(lambda x: x @ mask())
    compiled(X)
    said = written_text(thunder.last_traces(compiled)[-1], {}, {})
    assert torch.equal(function_of(said)(X), X @ mask()) and "constant" in said["objects"]


def test_layers_share_what_one_mask_becomes():
    def program(x, m):
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=m)
        return x.sum()

    x, m = torch.randn(1, 2, 8, 4, requires_grad=True), torch.ones(8, 8, dtype=torch.bool).tril()
    compiled = thunder.jit(program)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, m), x), torch.autograd.grad(program(x, m), x))
    names = [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols]
    assert names.count("attention_bias") == 1


def test_a_tensor_filled_with_one_number_is_computed_in_each_call():
    """It is written as fast as it is read, and a document prints such a program."""
    compiled = thunder.jit(lambda x: x * torch.ones(4, 4) + mask())
    assert torch.equal(compiled(X), X + mask()) and len(held(compiled)) == 1
    assert "torch.ones(" in thunder.last_traces(compiled)[-1].python()
