"""Gradients of views of one value are added up in one buffer: the work of a loop over T slices is T, not T x T."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import thunder
from thunder.extend.fusion import FusionExecutor

F64 = torch.float64


class Written(TorchDispatchMode):
    """Bytes of the tensors that operations make, and of what they write to in place."""

    def __init__(self):
        super().__init__()
        self.bytes, self.names = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names.append(function.__name__)
        if not function.is_view:
            results = result if isinstance(result, (tuple, list)) else (result,)
            self.bytes += sum(r.nbytes for r in results if isinstance(r, torch.Tensor))
        return result


def written(program, *arguments) -> Written:
    """What the second step of a compiled program writes."""
    compiled = thunder.jit(program)
    for _ in range(2):
        with Written() as counted:
            torch.autograd.grad(compiled(*arguments).sum(), arguments)
    return counted


def selects(x):
    state = x[0]
    for i in range(1, len(x)):
        state = torch.tanh(state * x[i])
    return state


def slices(x):
    return sum(((i + 1) * x[i : i + 2].sin()).sum() for i in range(0, len(x) - 1))


def keys(x):
    return sum((x.view(-1, 2, 4)[i, :, 1:3] * x.view(-1, 2, 4)[i, 1, None, 2:]).sum() for i in range(len(x)))


def transposed(x):
    return sum((x.t()[1:7, i] * x.transpose(0, 1)[0:6, i]).sum() for i in range(len(x)))


def narrowed(x):
    return sum(x.narrow(0, i, 1).pow(2).sum() + x.permute(1, 0).narrow(1, i, 1).sin().sum() for i in range(len(x)))


def unbound(x):
    return torch.stack([row * torch.sin(x[i]) for i, row in enumerate(x.unbind(0))]).sum()


def and_whole(x):
    return x.pow(2).sum() + sum(x[i].sin().sum() for i in range(len(x))) + x.cos().sum()


def gates(x):
    """A loop over steps, with slices of one product in each, as an LSTM has."""
    hidden = cell = torch.zeros(2, dtype=x.dtype)
    for i in range(len(x)):
        gate = x[i] * 2
        a, b, c, d = gate[:2], gate[2:4], gate[4:6], gate[6:]
        cell = torch.sigmoid(a) * cell + torch.sigmoid(b) * torch.tanh(c)
        hidden = hidden + torch.sigmoid(d) * torch.tanh(cell)
    return hidden


PROGRAMS = [selects, slices, keys, transposed, narrowed, unbound, and_whole, gates]


def rows(n: int, dtype=F64) -> torch.Tensor:
    return torch.randn(n, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("numerics", ["eager", "close"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients_are_eagers_bit_for_bit(program, numerics):
    x, y = rows(9, torch.float32), rows(9, torch.float32)
    compiled = thunder.jit(program, numerics=numerics)
    for _ in range(2):
        want = torch.autograd.grad(program(x).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(compiled(y).sum(), y)[0], want)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_work_grows_with_the_number_of_slices_and_not_with_its_square(program):
    few, many = written(program, rows(16)), written(program, rows(64))
    assert many.bytes < 4.5 * few.bytes
    parts = [name for name in many.names if name.startswith(("select_backward", "slice_backward"))]
    assert len(parts) < 3 * 64  # where 64 steps each have a value of their own


def test_second_derivatives():
    def penalty(f):
        x = rows(5)
        (g,) = torch.autograd.grad((f(x) ** 2).sum(), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), x)[0]

    for program in (selects, transposed, keys):
        torch.testing.assert_close(penalty(thunder.jit(program)), penalty(program))


def test_forward_mode_and_batches_of_cotangents():
    x, v = rows(5), torch.ones(5, 8, dtype=F64)
    want = torch.func.jvp(keys, (x,), (v,))
    got = thunder.jit(lambda x, v: torch.func.jvp(keys, (x,), (v,)))(x, v)
    torch.testing.assert_close(got, want)
    wants = torch.autograd.functional.jacobian(selects, x, vectorize=True)
    torch.testing.assert_close(torch.autograd.functional.jacobian(thunder.jit(selects), x, vectorize=True), wants)


def test_a_cotangent_that_is_missing():
    def program(x):
        y = x * 2
        return (y[0] * y[1], y[2].sin(), y.sum())

    compiled, x = thunder.jit(program), rows(4)
    for used in range(3):
        (want,) = torch.autograd.grad(program(x)[used].sum(), x)
        assert torch.equal(torch.autograd.grad(compiled(x)[used].sum(), x)[0], want)


def test_a_graph_that_is_kept_gives_the_same_again():
    x = rows(6)
    y = thunder.jit(and_whole)(x)
    first = torch.autograd.grad(y, x, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


def test_a_gradient_that_is_read_elsewhere_is_not_written_to():
    """The gradients of a and b are one value until a's is added to."""

    def program(a, b):
        return ((a + b) * 2).sin().sum() + a[0].pow(3).sum() + b.pow(2).sum() + a[1].cos().sum()

    a, b = rows(3), rows(3).detach().mul(3).requires_grad_()
    want = torch.autograd.grad(program(a, b), (a, b))
    for g, w in zip(torch.autograd.grad(thunder.jit(program)(a, b), (a, b)), want):
        assert torch.equal(g, w)


def test_a_cotangent_of_the_callers_is_not_written_to():
    x, g = rows(4), torch.ones(4, 8, dtype=F64)
    y = thunder.jit(lambda x: (x * 1, x[0] * 2, x[1] * 3))(x)
    torch.autograd.backward(y, (g, g[0].clone(), g[1].clone()))
    assert torch.equal(g, torch.ones_like(g))


def test_a_whole_step_adds_in_place():
    def step(x):
        y = x * 2
        loss = transposed(y) + y[1:3].cos().sum()
        loss.backward()
        return loss

    compiled, x, y = thunder.jit(step), rows(8), rows(8)
    step(x), compiled(y)
    assert torch.equal(x.grad, y.grad)
    names = [b.sym.name for b in compiled.programs[0].forward.bound_symbols]
    assert names.count("add_part_") == 16 and "add_part" not in names


def joins(program, x) -> list[str]:
    compiled = thunder.jit(program)
    want, got = (torch.autograd.grad(f(x).sum(), x)[0] for f in (program, compiled))
    assert torch.equal(got, want)
    return [
        b.sym.name for b in compiled.programs[0].backward.bound_symbols
        if b.sym.name in ("stack", "cat", "add_part", "add_part_", "zeros")
        or str(b.sym.module).endswith(("select_backward", "slice_backward"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "program, joined",
    [
        (lambda x: selects(x * 2), ["stack"]),
        (lambda x: x[1] ** 2 * x[3] * x[5], ["zeros", "zeros", "zeros", "cat"]),
        (lambda x: x[:2].sin() * x[2:4] * x[-1] * x[:2], ["zeros", "cat"]),
        (lambda x: x[0] * x[1] * x[2].sin() + x.pow(2).sum(), ["zeros", "cat"]),
        (lambda x: x[0] * x[1], ["default", "add_part_"]),
        (lambda x: x[:3] * x[1:4] * x[2:5], ["default", "add_part_", "add_part_"]),
        (lambda x: x[:, 1].sum() * x[1] * x[2], ["default", "add_part_", "add_part_"]),
        (lambda x: x[::2].sum() * x[1] * x[3], ["default", "add_part_", "add_part_"]),
        (lambda x: x[0] * x[1] * x[1] * x[2] + x.pow(2).sum(), ["add_part_", "add_part_", "add_part_", "add_part_"]),
    ],
    ids="loop gaps slices whole two overlapping dimensions steps whole_and_twice".split(),
)
def test_what_is_joined(program, joined):
    assert joins(program, rows(6)) == joined


def test_a_layout_that_no_view_shows():
    """A gradient that begins as a transposed product is no view of it in another shape."""

    def program(x, w):
        return (x.t() @ w).sin().sum() + sum(x.reshape(32)[i : i + 2].pow(2).sum() for i in range(0, 30, 5))

    x, w = rows(4), rows(4)
    want = torch.autograd.grad(program(x, w), x)[0]
    # of a product in another layout than eager's, whose bits depend on the CPU
    torch.testing.assert_close(torch.autograd.grad(thunder.jit(program)(x, w), x)[0], want)


class Pointwise(FusionExecutor):
    """Takes parts of zeros, and sums, into regions that run one after the other."""

    def can_fuse(self, operation):
        return operation.sym.name in ("add", "add_part", "mul", "sin", "cos")

    def fuse(self, region, counter):
        from thunder.ops.infer import run_line

        def run(*tensors):
            values = dict(zip(region.inputs, tensors, strict=True))
            for operation in region.bound_symbols:
                run_line(operation, values)
            return [values[o] for o in region.outputs]

        name = f"pointwise{counter}"
        return self.register_temporary_operation(
            name, run, inputs=region.inputs, outputs=region.outputs, bsyms=region.bound_symbols
        )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_with_a_fusion_executor(program):
    x = rows(6)
    compiled = thunder.jit(program, executors=[Pointwise("pointwise")])
    want = torch.autograd.grad(program(x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], want)
