"""What the generic tests of operations do not ask of linear algebra and Fourier transforms."""

import random

import pytest
import torch

import thunder
from thunder.errors import MissingImplementationError

D = torch.float64


def gradients(run, x, of=lambda y: y):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(of(run(x)).sum(), x)[0]


SPD = torch.eye(3, dtype=D) * 4 + 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.linalg.svd(x, False).S, lambda x: torch.linalg.svd(x).S, lambda x: torch.svd(x)[1],
            lambda x: torch.linalg.eigh(x).eigenvalues, lambda x: torch.linalg.eigh(x)[0] * x,
        lambda x: torch.linalg.eig(x).eigenvalues.abs(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("x", [torch.eye(3, dtype=D), SPD], ids=["equal", "two equal"])
def test_equal_values_have_a_gradient_where_vectors_are_not_read(program, x):
    """The gradient of the vectors divides by the differences of the values: it plays no part where nobody
    differentiates the vectors."""
    torch.testing.assert_close(gradients(thunder.jit(program), x), gradients(program, x))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.linalg.qr(x)[0], lambda x: torch.linalg.qr(x)[1], lambda x: torch.linalg.lu(x).L,
            lambda x: torch.linalg.lu(x).U, lambda x: torch.linalg.svd(x, False).U.abs(),
        lambda x: torch.linalg.svd(x, False)[2].abs(), lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x))[1],
            lambda x: torch.linalg.lstsq(x, x[:, :1], driver="gels")[0],
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (3, 5)])
def test_one_result_alone(program, shape):
    x = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gradients(thunder.jit(program), x), gradients(program, x))


def test_what_is_not_differentiable_is_refused_in_pytorchs_words():
    x = torch.randn(4, 3, requires_grad=True)
    for program in (
        lambda x: torch.linalg.qr(x, "complete")[0],
        lambda x: torch.linalg.qr(x, "r")[1],
        lambda x: torch.geqrf(x)[0],
    ):
        with pytest.raises((RuntimeError, NotImplementedError)) as want:
            program(x).sum().backward()
        with pytest.raises((RuntimeError, NotImplementedError)) as got:
            thunder.jit(program)(x).sum().backward()
        assert not isinstance(got.value, MissingImplementationError)
        assert type(got.value) is type(want.value) and str(got.value).split()[:6] == str(want.value).split()[:6]


def test_results_have_the_names_that_pytorch_gives_them():
    x = torch.eye(3) + 1

    def program(x):
        actual = torch.linalg.slogdet(x)
        return (
            actual.sign * actual.logabsdet,
            torch.linalg.eigh(x).eigenvectors,
            torch.linalg.solve_ex(x, x).info,
            torch.slogdet(x),
            torch.linalg.svd(x),
        )

    got, want = thunder.jit(program)(x), program(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert [type(g) for g in got] == [type(w) for w in want]


def test_functions_are_printed_where_users_find_them():
    compiled = thunder.jit(lambda x: (torch.linalg.inv(x), torch.fft.rfft2(x)))
    compiled(torch.eye(3))
    text = str(thunder.last_traces(compiled)[-1])
    assert "= torch.linalg.inv(x)" in text and "= torch.fft.rfft2(x)" in text


def test_the_backward_of_a_transform_is_a_transform():
    compiled = thunder.jit(lambda x: torch.fft.rfft(x, 6).abs())
    compiled(torch.randn(2, 5, requires_grad=True)).sum().backward()
    text = str(thunder.last_backward_traces(compiled)[-1])
    assert "torch._fft_c2c(" in text and "_with_graph" not in str(thunder.last_traces(compiled)[-1]).replace(
        "abs_with_graph", ""
    )


def test_a_solution_keeps_its_factors_for_the_backward():
    compiled = thunder.jit(torch.linalg.solve)
    A, B = (torch.randn(3, n, dtype=D, requires_grad=True) for n in (3, 2))
    for matrix in (A, A.mT):
        compiled(matrix, B).sum().backward()
        actual, A.grad, B.grad = (A.grad, B.grad), None, None
        torch.linalg.solve(matrix, B).sum().backward()
        torch.testing.assert_close(actual, (A.grad, B.grad), rtol=0, atol=0)
        A.grad = B.grad = None
    assert "solve(" not in str(thunder.last_backward_traces(compiled)[-1]).replace("lu_solve(", "").replace(
        "_transposed(", ""
    )


@pytest.mark.parametrize("shapes", [((2, 3, 3), (3, 4)), ((3, 3), (5, 3, 2)), ((2, 1, 3, 3), (4, 3, 3))], ids=str)
@pytest.mark.parametrize(
    "program",
    [
        torch.linalg.solve,
        lambda A, B: torch.linalg.solve_ex(A, B)[0],
        lambda A, B: torch.linalg.solve_triangular(A, B, upper=True),
    ],
)
def test_batches_are_stretched_and_their_gradients_summed(program, shapes):
    A, B = (torch.randn(s, dtype=D, generator=torch.Generator().manual_seed(0)) for s in shapes)
    A = (A + 4 * torch.eye(3, dtype=D)).requires_grad_()
    B.requires_grad_()
    got, want = (torch.autograd.grad(run(A, B).square().sum(), (A, B)) for run in (thunder.jit(program), program))
    torch.testing.assert_close(got, want)


def test_tangents_of_triangles_are_right():
    """PyTorch's forward mode of cholesky_inverse is off even where the tangent is triangular."""
    x, t = (torch.tril(torch.randn(3, 3, dtype=D, generator=torch.Generator().manual_seed(i))) for i in range(2))
    x = x + 3 * torch.eye(3, dtype=D)
    got = thunder.jit(lambda x, t: torch.func.jvp(torch.cholesky_inverse, (x,), (t,))[1])(x, t)
    torch.testing.assert_close(
        got, (torch.cholesky_inverse(x + 1e-6 * t) - torch.cholesky_inverse(x - 1e-6 * t)) / 2e-6, rtol=1e-6, atol=1e-8
    )


def test_out_gives_back_named_results():
    def program(x, values, vectors):
        actual = torch.linalg.eigh(x, out=(values, vectors))
        return actual.eigenvalues + 0, type(actual) is torch.return_types.linalg_eigh_out

    x = torch.eye(3) + 1
    got, want = [p(x, torch.empty(3), torch.empty(3, 3)) for p in (thunder.jit(program), program)]
    assert torch.equal(got[0], want[0]) and got[1] and want[1]


@pytest.mark.parametrize("seed", range(40))
def test_gradients_of_random_equations(seed):
    """Of two operands: labels that are summed alone, expanded, repeated, or in both."""
    draw = random.Random(seed)
    sizes = {x: draw.choice([1, 2, 3]) for x in "abcd"}
    terms = [[x for x in draw.sample("abcd", draw.randint(1, 4))] for _ in range(2)]
    if draw.random() < 0.2:
        terms[0].append(terms[0][0])
    known = sorted({x for term in terms for x in term})
    output = draw.sample(known, draw.randint(0, len(known)))
    equation = f"{','.join(map(''.join, terms))}->{''.join(output)}"
    expanded = draw.choice("abcd") if len(set(terms[0])) == len(terms[0]) else ""
    shapes = [[1 if x == expanded and i == 0 else sizes[x] for x in term] for i, term in enumerate(terms)]
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def f(a, b):
        return torch.einsum(equation, a, b).sin().sum()

    ours, theirs = (torch.autograd.grad(g(*operands), operands) for g in (thunder.jit(f), f))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
