"""Operations whose results nobody uses: they are dropped, but for those that raise in eager PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder

VECTOR, MATRIX = torch.arange(4.0), torch.eye(4)
BAD = torch.tensor([0, 7])
FEW, MANY = torch.tensor([True, True, False, False]), torch.tensor([True, True, True, False])
NAN, ZEROS = torch.full((4, 4), float("nan")), torch.zeros(4, 4)

# name: a function, arguments that it takes, and arguments that it raises for
RAISING = {
    "index": (lambda x, i: x[i], (VECTOR, BAD % 4), (VECTOR, BAD)),
    "index_select": (lambda x, i: x.index_select(0, i), (VECTOR, BAD % 4), (VECTOR, BAD)),
    "gather": (lambda x, i: x.gather(0, i), (VECTOR, BAD % 4), (VECTOR, BAD)),
    "take": (lambda x, i: x.take(i), (VECTOR, BAD % 4), (VECTOR, BAD)),
    "embedding": (lambda x, i: F.embedding(i, x), (MATRIX, BAD % 4), (MATRIX, BAD)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), (VECTOR, BAD % 4), (VECTOR, BAD)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]), (VECTOR, BAD % 4), (VECTOR, BAD)),
    "write to a temporary": (lambda x, i: x.clone().__setitem__(i, 0.0), (VECTOR, BAD % 4), (VECTOR, BAD)),
    "one_hot": (lambda i: F.one_hot(i, 4), (BAD % 4,), (BAD,)),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:2], i), (MATRIX, BAD % 4), (MATRIX, BAD)),
    "bce": (F.binary_cross_entropy, (VECTOR / 4, VECTOR / 4), (VECTOR, VECTOR)),
    "cholesky": (torch.linalg.cholesky, (MATRIX,), (-MATRIX,)),
    "inv": (torch.linalg.inv, (MATRIX,), (ZEROS,)),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x, -1), (MATRIX,), (ZEROS,)),
    "solve": (lambda x: torch.linalg.solve(x, x), (MATRIX,), (ZEROS,)),
    "eigh": (torch.linalg.eigh, (MATRIX,), (NAN,)),
    "lu_factor": (torch.linalg.lu_factor, (MATRIX,), (ZEROS,)),
    "bincount": (torch.bincount, (BAD,), (-BAD,)),
    "histc": (torch.histc, (VECTOR,), (NAN[0],)),
    "quantile": (lambda x: torch.quantile(x, x), (VECTOR / 4,), (VECTOR,)),
    "integer division": (lambda i: 5 // i, (BAD + 1,), (BAD,)),
    "masked_scatter": (lambda x, m: x.masked_scatter(m, x[:2]), (VECTOR, FEW), (VECTOR, MANY)),
    "sizes that do not fit": (lambda x, m: x[m] + torch.ones(2), (VECTOR, FEW), (VECTOR, MANY)),
    "stack": (lambda x, m: torch.stack([x[m], x[:2]]), (VECTOR, FEW), (VECTOR, MANY)),
    "view": (lambda x, m: x[m].view(2, 1), (VECTOR, FEW), (VECTOR, MANY)),
    "matmul": (lambda x, m: x[m] @ x[:2], (VECTOR, FEW), (VECTOR, MANY)),
    "a size": (lambda x, i: x.narrow(0, 0, int(i[1])), (VECTOR, BAD % 4), (VECTOR, BAD)),
}


@pytest.mark.parametrize("name", RAISING)
@pytest.mark.parametrize("grad", [False, True])
def test_what_raises_in_eager_raises(name, grad):
    function, fine, raising = RAISING[name]

    def program(*args):
        function(*args)
        return args[0] * 2

    compiled = thunder.jit(program, fallback="error")
    for inputs in (fine, raising, fine):
        wanted = got = None
        args = [a.clone().requires_grad_(grad and a.is_floating_point()) for a in inputs]
        try:
            wanted = program(*args)
        except Exception as error:  # noqa: BLE001 - ours is the same
            with pytest.raises(type(error)) as ours:
                compiled(*args)
            assert str(ours.value).split("\n")[0][:40] == str(error).split("\n")[0][:40]
        else:
            got = compiled(*args)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            if got.requires_grad:
                got.sum().backward()
                torch.testing.assert_close(args[0].grad, torch.full_like(args[0], 2.0), rtol=0, atol=0)
        assert (wanted is None) is (inputs is raising)


def names(trace) -> list[str]:
    return [operation.sym.name for operation in trace.bound_symbols]


def test_what_does_not_raise_is_dropped():
    def program(x, m, i):
        x.sin().cumsum(0).view(2, 2).t() @ torch.ones(2, 2)
        x[m].sin()
        x[1:3].max()
        torch.softmax(x, 0)
        return x * 2

    compiled = thunder.jit(program, fallback="error")
    compiled(VECTOR, FEW, BAD)
    said = names(compiled.programs[0].forward)
    assert set(said) == {"__getitem__", "tried_impl", "mul", "python_del"} and said.count("tried_impl") == 1


@pytest.mark.parametrize("device, remain", [("cpu", ["__getitem__", "tried_impl"]), ("meta", [])])
def test_an_index_raises_on_the_cpu_only(device, remain):
    """On a GPU, an assertion of a kernel ends the process; other devices do not look at indices."""
    compiled = thunder.jit(lambda x, i: (x[i], x * 2)[1], fallback="error")
    compiled(VECTOR.to(device), (BAD % 4).to(device))
    assert [name for name in names(compiled.programs[0].forward) if name != "python_del"] == [*remain, "mul"]


@pytest.mark.parametrize("wrap", ["backward inside", "checkpoint", "torch.func"])
def test_dead_code_of_derivatives_is_dropped(wrap):
    """Eager PyTorch does not compute gradients that nobody asks for."""

    def lookup(x, i):
        return (x[i] * x.gather(0, i)).sum()

    def program(x, w, i):
        if wrap == "backward inside":
            return torch.autograd.grad(lookup(x * w, i), [w])[0]
        if wrap == "torch.func":
            return torch.func.grad(lambda w: lookup(x * w, i))(w)
        return checkpoint(lookup, x * w, i, use_reentrant=False)

    compiled = thunder.jit(program, fallback="error")
    args = [VECTOR.clone().requires_grad_(wrap != "torch.func"), (VECTOR + 1).requires_grad_(), BAD % 4]
    torch.testing.assert_close(compiled(*args), program(*args))
    assert "tried_impl" not in names(compiled.programs[0].forward)


def test_dead_code_in_a_checkpoint_raises():
    def inside(x, i):
        x[i]
        return x.sin()

    def program(x, i):
        return checkpoint(inside, x, i, use_reentrant=False)

    compiled = thunder.jit(program, fallback="error")
    x = VECTOR.clone().requires_grad_()
    compiled(x, BAD % 4).sum().backward()
    torch.testing.assert_close(x.grad, VECTOR.cos())
    with pytest.raises(IndexError):
        compiled(x, BAD)
