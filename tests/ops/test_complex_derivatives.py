"""Derivatives of complex numbers: PyTorch's own samples, each operand real in turn, first and second derivatives."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import thunder
from benchmarks.training import CountCalls
from tests.ops.harness import tensors_in
from tests.ops.test_op_db import KNOWN, REFUSALS
from tests.ops.tracing import differentiated, traced
from thunder.core.proxies import map_structure
from thunder.errors import CaptureError

# PyTorch's own warnings about its own samples
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
COMPLEX = [i for i in KNOWN if i.supports_autograd and torch.complex128 in i.supported_dtypes("cpu")]


def programs(info, count: int):
    """(function, arguments, keyword arguments) of samples of complex numbers, and of the same with one operand real.
    The function gives what PyTorch's own tests differentiate: no phases of eigenvectors."""
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", torch.complex128, True), count):
        bound_arguments = (sample.input, *sample.args), dict(sample.kwargs)
        operands = sum(t.is_complex() for t in tensors_in(bound_arguments))
        for real in (None, *range(operands if operands > 1 else 0)):
            places = itertools.count()

            def taken(x, real=real, places=places):
                if not isinstance(x, torch.Tensor) or not x.is_complex():
                    return x
                part = x.detach().real if next(places) == real else x.detach()
                return part.clone().requires_grad_(x.requires_grad)

            args, kwargs = (map_structure(taken, x) for x in bound_arguments)
            yield lambda *a, post=sample.output_process_fn_grad, **k: post(info.op(*a, **k)), args, kwargs


def case(function, args, kwargs):
    """(results that require grad, leaves, cotangents, gradients); None where PyTorch refuses the sample."""
    leaves = list({id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad}.values())
    try:
        tensors = tensors_in(function(*args, **kwargs))
        results = list({id(o): o for o in tensors if o.requires_grad and not any(o is x for x in leaves)}.values())
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(o.shape, dtype=o.dtype, generator=generator).requires_grad_() for o in results]
        gradients = torch.autograd.grad(results, leaves, cotangents, create_graph=True, allow_unused=True)
    except REFUSALS:
        return None
    return (results, leaves, cotangents, gradients) if results else None


def close(actual, expected) -> None:
    """None is zeros: of order 0 a norm has either."""
    for pair in zip(actual, expected, strict=True):
        known = next((x for x in pair if x is not None), None)
        if known is not None:
            f, e = (torch.zeros_like(known) if x is None else x for x in pair)
            torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("info", COMPLEX, ids=lambda i: i.formatted_name)
def test_gradients_equal_autograds(info):
    for function, args, kwargs in programs(info, 6):
        torch.manual_seed(0)
        if (known := case(function, args, kwargs)) is None:
            continue
        _, leaves, cotangents, expected = known
        try:
            trace, inputs = traced(function, args, kwargs, inside=True, grad=True)
        except (*REFUSALS, CaptureError, AttributeError):  # needs the interpreter, or is refused for other types, too
            continue
        outputs = [o for o in trace.output if o.requires_grad]
        if len(outputs) != len(cotangents) or any(o is a for o in outputs for a in trace.args):
            continue  # an output that is an argument is the frontend's matter
        torch.manual_seed(0)
        _, gradients = differentiated(trace, inputs, [c.detach() for c in cotangents])
        of = {id(x): g for x, g in zip(inputs, gradients, strict=True)}
        close([of[id(x)] for x in leaves], expected)


# whose results and derivatives are differentiated apart, and either alone depends on phases
PHASES = {"linalg.eig", "linalg.eigh"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "info", [i for i in COMPLEX if i.supports_gradgrad and i.name not in PHASES], ids=lambda i: i.formatted_name
)
def test_second_derivatives_equal_autograds(info):
    for function, args, kwargs in itertools.islice(programs(info, 1), 3):
        torch.manual_seed(0)
        known = case(function, args, kwargs)
        if known is None:
            continue
        _, leaves, cotangents, gradients = known
        twice = [g for g in gradients if g is not None and g.requires_grad]
        if not twice:
            continue
        compiled = thunder.jit(function)
        torch.manual_seed(0)
        results = [o for o in tensors_in(compiled(*args, **kwargs)) if o.requires_grad]
        computed_gradients = torch.autograd.grad(results, leaves, cotangents, create_graph=True, allow_unused=True)
        close(computed_gradients, gradients)
        again = [f for f, g in zip(computed_gradients, gradients, strict=True) if g is not None and g.requires_grad]
        seeds = [torch.randn_like(g) for g in twice]
        close(
            torch.autograd.grad(again, [*leaves, *cotangents], seeds, allow_unused=True),
            torch.autograd.grad(twice, [*leaves, *cotangents], seeds, allow_unused=True),
        )


def long_convolution(x, filters):
    n = 2 * x.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(filters, n), n)[..., : x.shape[-1]]


def rotated(x, angles):
    """Rotary embeddings as Llama's first code has them."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs).flatten(-2)


def recurrence(x, rates):
    """A diagonal state space model, whose states are complex."""
    decay = torch.exp(torch.complex(-F.softplus(rates), rates))
    state = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)[:, None] * torch.log(decay)
    return (torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(torch.exp(state).sum(1).real))).square().mean()


PROGRAMS = {
    "long convolution": (long_convolution, (torch.randn(2, 3, 8), torch.randn(3, 8))),
    "rotary embedding": (lambda x: rotated(x, torch.arange(4.0)), (torch.randn(2, 5, 8),)),
    "matrices": (lambda a, b: torch.linalg.inv(a @ b.mH).abs().sum(), (torch.randn(3, 3) + 1j, torch.randn(3, 3) * 1j)),
    "state space": (recurrence, (torch.randn(2, 8), torch.rand(4))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_complex_programs_do_no_more_than_eager(name):
    """No operation keeps a graph of PyTorch's, and as many kernels run."""
    function, inputs = PROGRAMS[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    compiled = thunder.jit(function)
    calls = []
    for run in (compiled, compiled, function):
        with CountCalls() as counter:
            y = run(*leaves)
            gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        calls.append(counter.calls)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves, torch.ones_like(y)), gradients)
    assert not [b for b in thunder.last_traces(compiled)[-1].bound_symbols if "_with_graph" in b.sym.name]
    views = {
        f"aten.{name}" for name in ("detach.default", "alias.default", "_conj.default", "transpose.int", "t.default")
    }
    ours, eagers = ({k: n for k, n in c.items() if k not in views} for c in calls[1:])
    assert sum(ours.values()) <= sum(eagers.values()), (calls[1] - calls[2], calls[2] - calls[1])


def test_operations_with_complex_samples_may_only_become_more():
    assert len(COMPLEX) >= 260 <= len(op_db), len(COMPLEX)
