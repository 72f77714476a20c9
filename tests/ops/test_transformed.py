"""Every operation with samples under vmap and under jvp."""

import itertools
import re
import types

import pytest
import torch

import thunder
from tests.ops.harness import SAMPLED, as_program, samples_of, tensors_in, torch_function
from thunder.core.symbol import OpTags
from thunder.ops import LTORCH

# PyTorch's own warnings about samples it is given, and about operations that torch.vmap computes in a loop
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (
    "There is a performance drop", ".*padding='same' with even kernel lengths", "reduction. 'mean' divides the total "
        "loss", "index_reduce\\(\\) is in beta", "Casting complex values to real",
    "To copy construct from a tensor", ".*size_average and reduce args", "(at|torch)\\S+ is deprecated",
)]  # fmt: skip
DETERMINED = [
    n for n in SAMPLED if OpTags.RANDOM_OP not in LTORCH[n].tags and n not in ("empty", "empty_like", "eigh", "svd")
]


def programs(name, dtype=torch.float64):
    """(program from tensors to a tuple of tensors, tensors) of an operation's samples that PyTorch takes."""
    for args, kwargs in samples_of(LTORCH[name], dtype):
        program, tensors = as_program(
            types.SimpleNamespace(torch_functions=(torch_function(LTORCH[name]),)), args, kwargs
        )
        try:
            result = tensors_in(program(*tensors))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue
        if tensors and result:
            yield lambda *arguments, program=program: tuple(tensors_in(program(*arguments))), tensors


def close_to(actual, wanted, tolerance):
    for f, w in zip(actual, wanted, strict=True):
        # float64 to the tolerance; other types (dtype= arguments) to what rounding them once more may cost
        tolerances = (
            {"rtol": tolerance, "atol": tolerance}
            if w.dtype is torch.float64
            else {"rtol": 0.05, "atol": 0.02}
            if w.dtype is torch.bfloat16
            else {}
        )
        torch.testing.assert_close(f, w, equal_nan=True, **tolerances)


def captured(function, *args):
    """The tensors that a compiled function gives."""
    return tensors_in(thunder.jit(function, fallback="error")(*args))


# PyTorch's vmap computes them in a loop; a program does not, since the shape of an element's result depends on values
DYNAMIC = ("argwhere", "bincount")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", DETERMINED)
def test_vmap_is_the_operation_on_each_element(name):
    """The elements are different; the reference is a loop over them, which is what vmap means. What torch.func.vmap
    refuses for want of a rule is refused in its words."""
    for program, tensors in programs(name):
        batch = [torch.stack([t, t * 0.97 if t.is_floating_point() else t]) for t in tensors]
        wanted = [torch.stack(stacked) for stacked in zip(*(program(*(b[i].clone() for b in batch)) for i in range(2)))]
        try:
            actual = captured(torch.func.vmap(program), *batch)
        except RuntimeError as error:
            if name not in DYNAMIC:
                with pytest.raises(RuntimeError, match=re.escape(str(error))):
                    torch.func.vmap(program)(*batch)
            continue
        close_to(actual, wanted, 1e-9)


# torch.func's forward mode is wrong (reduce="prod" with zeros left out, the other triangle of triangular_solve) or
# means a symmetric or triangular tangent; the tangent is compared with a difference, or not at all
DIFFERENCES = {"scatter_reduce", "triangular_solve", "embedding_backward"}
# PyTorch's reverse mode is wrong, of which tangents are made: gradcheck fails in eager
REVERSE = {"as_strided_scatter"}
SYMMETRIC = {"cholesky", "cholesky_inverse", "linalg_cholesky", "linalg_cholesky_ex", "linalg_eigh"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [n for n in DETERMINED if n not in SYMMETRIC | REVERSE])
def test_jvp_is_forward_mode(name):
    for program, tensors in itertools.islice(programs(name), 2):
        places = [i for i, t in enumerate(tensors) if t.is_floating_point()]
        tangents = [
            torch.randn(tensors[i].shape, dtype=tensors[i].dtype, generator=torch.Generator().manual_seed(i))
            for i in places
        ]
        moved = differentiable(program, tensors, places)
        primals = [tensors[i] for i in places]
        if not places or not moved(*primals):
            continue
        try:
            wanted = torch.func.jvp(moved, tuple(primals), tuple(tangents))[1]
        except (RuntimeError, NotImplementedError):
            continue  # PyTorch has no forward mode for it
        if name in DIFFERENCES:
            steps = [moved(*(x + sign * 1e-6 * t for x, t in zip(primals, tangents))) for sign in (1, -1)]
            wanted = [(a - b) / 2e-6 for a, b in zip(*steps)]
        try:
            actual = captured(
                lambda inputs, t: torch.func.jvp(
                    differentiable(program, inputs, places), tuple(inputs[i] for i in places), t
                )[1],
                tensors,
                tuple(tangents),
            )
        except RuntimeError as error:
            # PyTorch's reverse mode refuses
            assert "not differentiable with respect to" in str(error) or "invalid gradient" in str(error), error
            continue
        close_to(actual, wanted, 1e-6 if name in DIFFERENCES else 1e-7)


def differentiable(program, tensors, places):
    """The program as a function of the tensors in `places`, with its floating-point results only."""

    def run(*arguments):
        table = dict(zip(places, arguments, strict=True))
        results = program(*(table.get(i, t) for i, t in enumerate(tensors)))
        return tuple(
            r for r in results if (r.is_floating_point() if isinstance(r, torch.Tensor) else r.dtype.category == 2)
        )

    return run


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", DETERMINED)
def test_second_derivative_is_that_of_autograd(name):
    """The derivative of (input, cotangent) -> gradient, by two vjps, one around the other."""
    for program, tensors in itertools.islice(programs(name), 1):
        places = [i for i, t in enumerate(tensors) if t.dtype is torch.float64]
        leaves = [tensors[i].clone().requires_grad_() for i in places]
        try:
            outputs = differentiable(program, tensors, places)(*leaves)
            if not any(o.requires_grad for o in outputs):
                continue
            cotangents = [
                torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()
                for o in outputs
            ]
            gradients = torch.autograd.grad(
                outputs, leaves, cotangents, create_graph=True, allow_unused=True, materialize_grads=True
            )
            second_cotangents = [
                torch.randn(g.shape, dtype=g.dtype, generator=torch.Generator().manual_seed(4)) for g in gradients
            ]
            connected = [(g, v) for g, v in zip(gradients, second_cotangents) if g.requires_grad]
            wanted = torch.autograd.grad(
                [g for g, _ in connected],
                leaves + cotangents,
                [v for _, v in connected],
                allow_unused=True,
                materialize_grads=True,
            )
        except (RuntimeError, NotImplementedError):
            continue  # PyTorch has no second derivative

        def twice(tensors, cotangents, second_cotangents):
            def backward(*values):
                moved = differentiable(program, tensors, places)
                return torch.func.vjp(moved, *values[: len(places)])[1](tuple(values[len(places) :]))

            return torch.func.vjp(backward, *(tensors[i] for i in places), *cotangents)[1](second_cotangents)

        actual = captured(twice, tensors, tuple(c.detach() for c in cotangents), tuple(second_cotangents))
        close_to(actual, wanted, 1e-7)
