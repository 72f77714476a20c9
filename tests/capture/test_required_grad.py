"""`requires_grad_()` of tensors from outside, and leaves that a program makes of them: as eager, or refused."""

import pytest
import torch

import thunder
from thunder.errors import CaptureError


class Buffered(torch.nn.Module):
    """A buffer that requires grad from the first call in training on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(3), persistent=False)

    def forward(self, x, y):
        return self.zero.requires_grad_() + x * y


def forces(x, y):
    x.requires_grad_(True)
    energy = (x**3 * y).sum()
    return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def by_attribute(x, y):
    x.requires_grad = True
    return (x * y).sum()


def gradient(x, y):
    x.requires_grad_()
    (x**2 * y).sum().backward()
    return x.grad.sign()


def written_without_grad(x, y):
    x.requires_grad_()
    (step,) = torch.autograd.grad((x * y).sum() ** 2, x)
    with torch.no_grad():
        x.add_(step.sign(), alpha=0.1)
    return (x * y).sum()


def written(x, y):
    x.requires_grad_()
    x.mul_(2)  # which PyTorch refuses
    return x * y


def of_all(*tensors):
    for x in tensors:
        x.requires_grad_()
    return sum(x.pow(2).sum() for x in tensors)


def returned(x, y):
    return x.requires_grad_()


def requires_in_between(x, y):
    before = x.requires_grad
    x.requires_grad_()
    return before, x.requires_grad, x.is_leaf, x * y


def decided(x, y):
    x.requires_grad_()
    return (x * y).sum() if y.sum() > 4 else (x + y).sum()


def detached(x, y):
    x = x.detach()
    x.requires_grad_()
    (x**2 * y).sum().backward()
    return x.grad.sign()


def detached_view(x, y):
    z = x.view(3, 1).detach().requires_grad_(True)
    (z**2).sum().backward()
    return z.grad.abs().max() * y


def of_a_clone(x, y):
    z = x.detach().clone().requires_grad_(True)
    (z * y).sum().backward()
    return {"leaf": z, "gradient": z.grad}


PROGRAMS = [
    forces, by_attribute, gradient, written_without_grad, written, of_all, returned, requires_in_between, decided, detached,
    detached_view, of_a_clone,
]  # fmt: skip


def seen(f, x, y) -> list:
    """What a call gives and does to its arguments, after a backward of all that may be differentiated."""
    try:
        result = f(x, y)
    except RuntimeError as error:
        if isinstance(error, CaptureError):
            raise
        return [str(error).splitlines()[0], x.requires_grad, y.requires_grad]
    results = list(result.values()) if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
    with_history = [r for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
    if with_history:
        sum(r.sum() for r in with_history).backward()
    leaves = [r.grad for r in results if isinstance(r, torch.Tensor) and r.is_leaf]
    return [*results, *leaves, x.requires_grad, y.requires_grad, x.grad, y.grad, x]


def equal(a, b) -> bool:
    if not isinstance(a, torch.Tensor):
        return a == b if not isinstance(a, str) else a in b or b in a
    return torch.equal(a, b) and (a.requires_grad, a.is_leaf) == (b.requires_grad, b.is_leaf)


@pytest.mark.parametrize("program", [*PROGRAMS, Buffered], ids=lambda p: p.__name__)
def test_equals_eager(program):
    reference, compiled = (program(), program()) if program is Buffered else (program, program)
    compiled = thunder.jit(compiled, fallback="error")
    arguments = [[torch.tensor([2.0, 3.0, -1.0]), torch.arange(3.0)] for _ in range(2)]
    for new in (True, False, True):  # the second call gets tensors that require grad already
        if new:
            arguments = [[torch.tensor([2.0, 3.0, -1.0]), torch.arange(3.0)] for _ in range(2)]
        ours, eagers = seen(compiled, *arguments[0]), seen(reference, *arguments[1])
        assert len(ours) == len(eagers)
        assert all(map(equal, ours, eagers)), (ours, eagers)


def test_as_often_as_new_tensors_come():
    """The program of the first call fits each tensor that does not require grad yet."""
    compiled = thunder.jit(forces, fallback="error")
    for _ in range(3):
        compiled(torch.ones(3), torch.ones(3))
    assert thunder.cache_misses(compiled) == 1


def test_nothing_is_required_of_a_call_that_does_not_fit():
    """All questions have their answers before a tensor is changed."""
    compiled = thunder.jit(by_attribute, fallback="error")
    compiled(torch.ones(3), torch.ones(3))
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="size of tensor"):
        compiled(x, torch.ones(2))
    assert x.requires_grad  # eager's call came as far as that
    entry = compiled.programs[0]
    x = torch.ones(3)
    assert isinstance(entry.prologue_fn(by_attribute, (x, torch.ones(3, dtype=torch.float64)), {}), str)
    assert not x.requires_grad


@pytest.mark.parametrize("program", [by_attribute, gradient])
def test_one_tensor_as_two_arguments(program):
    compiled = thunder.jit(program, fallback="error")
    compiled(torch.ones(3), torch.ones(3))
    for _ in range(2):
        x, y = torch.ones(3), torch.ones(3)
        assert torch.equal(compiled(x, x), program(y, y))
        assert x.requires_grad and (x.grad is None) == (y.grad is None)
        assert x.grad is None or torch.equal(x.grad, y.grad)
    assert len(compiled.programs) == 2


def test_used_before_is_refused():
    def used(x):
        y = x * 2
        return y + x.requires_grad_()

    with pytest.raises(CaptureError, match="requires_grad_"):
        thunder.jit(used, fallback="error")(torch.ones(3))
