"""The cross_entropy executor, and apex's: what they take, that they are right, what they save."""

import sys
import types

import pytest
import torch
from torch.nn.functional import cross_entropy

import thunder
from thunder.core.transforms import grad
from thunder.executors import apexex
from thunder.executors import cross_entropy as module
from thunder.executors.apex_entropyex import apex_ex as older
from thunder.extend import OperatorExecutor

OURS = "cross_entropy_rows"


def inputs(dtype=torch.float32, n=6, classes=5, ignored=True):
    torch.manual_seed(0)
    target = torch.randint(0, classes, (n,))
    if ignored:
        target[2] = -100
    return torch.randn(n, classes, dtype=dtype) * 3, target


def names(trace):
    return [
        line.sym.name
        for line in trace.bound_symbols
        if line.sym.name not in ("python_del", "unpack_sequence", "clear_collection")
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_eager(dtype, ignore_index, reduction, smoothing):
    logits, target = inputs(dtype, ignored=ignore_index == -100)
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": smoothing}
    compiled = thunder.jit(lambda x, t: cross_entropy(x * 1, t, **options), executors=["cross_entropy"])
    x, reference, exact = (
        logits.clone().requires_grad_(),
        logits.clone().requires_grad_(),
        logits.double().requires_grad_(),
    )
    weights = torch.linspace(1, 2, 6, dtype=dtype) if reduction == "none" else torch.ones((), dtype=dtype)
    got, want, true = (
        compiled(x, target),
        cross_entropy(reference, target, **options),
        cross_entropy(exact, target, **options),
    )
    assert names(thunder.last_traces(compiled)[-1]) == ["mul", OURS]
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    (true * weights).sum().backward()
    assert OURS + "_backward" in names(thunder.last_backward_traces(compiled)[-1])
    # eager rounds after every step: ours is compared with the exact values, and rounds no more than once
    if dtype is torch.bfloat16:
        for ours, exactly in ((got, true), (x.grad, exact.grad)):
            torch.testing.assert_close(ours, exactly.to(dtype))
    else:
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x.grad, reference.grad)


def test_the_forward_and_backward_of_the_notebook():
    """Cells 19 to 21 of the notebook on extending thunder, with this executor and the CPU."""
    logits, labels = inputs(n=8, classes=7, ignored=False)

    def foo(logits, labels):
        return cross_entropy(logits, labels, reduction="mean", ignore_index=-1)

    cfoo = thunder.jit(foo, executors=["cross_entropy"])
    torch.testing.assert_close(cfoo(logits, labels), foo(logits, labels))
    assert (
        str(thunder.last_traces(cfoo)[-1]).split("\n")[1:]
        == """\
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(logits, labels):
  # logits: "cpu f32[8, 7]"
  # labels: "cpu i64[8]"
  (t0, t2) = cross_entropy_rows(logits, labels, -1, 'mean', 0.0)
  del logits, labels, t2
  return t0""".split("\n")
    )
    cfoo_grad = grad(cfoo)
    logits.requires_grad_(True)
    (gradient,) = cfoo_grad(logits, labels)
    torch.testing.assert_close(gradient, torch.autograd.grad(foo(logits, labels), logits)[0])
    printed = str(thunder.last_traces(cfoo_grad)[-1])
    assert "= cross_entropy_rows(logits, labels, -1, 'mean', 0.0)" in printed
    assert "cross_entropy_rows_backward(" in printed and "log_softmax" not in printed


def test_it_saves_one_number_a_row():
    logits, target = inputs(n=64, classes=50)
    compiled = thunder.jit(lambda x, t: cross_entropy(x * 2, t), executors=["cross_entropy"])
    compiled(logits.clone().requires_grad_(), target)
    tensors, others = thunder.last_traces(compiled)[-1].output[1]
    assert sorted(p.numel_value for p in tensors) == [64, 64, 64 * 50] and not others, (
        "log-sum-exp, target, and the logits themselves"
    )
    held = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.add((t.numel(), t.data_ptr())) or t, lambda t: t):
        scaled = logits.clone().requires_grad_() * 2
        cross_entropy(scaled, target)
    assert (64 * 50, scaled.data_ptr()) not in held and [n for n, _ in held].count(64 * 50) == 1, (
        "eager keeps the log-probabilities instead"
    )


def test_many_rows_are_taken_a_few_at_a_time():
    logits, target = inputs(n=30, classes=20000)
    torch.testing.assert_close(
        thunder.jit(cross_entropy, executors=["cross_entropy"])(logits, target), cross_entropy(logits, target)
    )


def test_gradcheck():
    logits, target = inputs(torch.float64)
    compiled = thunder.jit(lambda x: cross_entropy(x, target, label_smoothing=0.1), executors=["cross_entropy"])
    assert torch.autograd.gradcheck(compiled, logits.requires_grad_())


@pytest.mark.parametrize(
    "make, options",
    [
        (lambda: (torch.randn(5), torch.tensor(3)), {}),
        (lambda: (torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))), {}),
        (lambda: (torch.randn(4, 5), torch.rand(4, 5)), {}),
        (lambda: (torch.randn(4, 5), torch.randint(0, 5, (4,))), {"weight": torch.rand(5)}),
    ],
    ids=["one row", "images", "probabilities", "weights"],
)
def test_what_it_does_not_take_goes_to_pytorch(make, options):
    x, target = make()
    compiled = thunder.jit(lambda x, t: cross_entropy(x, t, **options), executors=["cross_entropy"])
    assert torch.equal(compiled(x, target), cross_entropy(x, target, **options))
    assert OURS not in names(thunder.last_traces(compiled)[-1])


def test_targets_out_of_bounds():
    logits, target = inputs()
    for wrong in (5, -3):
        target[0] = wrong
        for run in (cross_entropy, thunder.jit(cross_entropy, executors=["cross_entropy"])):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds."):
                run(logits, target)


def test_nothing_to_average():
    logits, target = inputs()
    compiled = thunder.jit(cross_entropy, executors=["cross_entropy"])
    assert compiled(logits, torch.full_like(target, -100)).isnan() and compiled(logits[:0], target[:0]).isnan()


# ---------------------------------------------------------------------------------------------------------------- apex


def test_apex_where_it_is_not_installed(monkeypatch):
    from thunder import extend

    assert older is apexex.apex_ex and thunder.get_executor("apex") is older
    if apexex.apex_ex.unavailable() is None:
        pytest.skip("apex is installed")
    monkeypatch.setattr(extend, "_warned", set())
    with pytest.warns(
        UserWarning,
        match="the executor apex has no effect here: apex is not installed with its extension xentropy_cuda",
    ):
        compiled = thunder.jit(cross_entropy, executors=[apexex.apex_ex])
    logits, target = inputs()
    assert torch.equal(compiled(logits, target), cross_entropy(logits, target))


def test_apex_where_it_is(monkeypatch):
    """With functions in the place of its kernels that compute what they are documented to compute."""
    kernels = types.ModuleType("xentropy_cuda")
    kernels.__spec__ = types.SimpleNamespace(name="xentropy_cuda")
    calls = []

    def forward(logits, labels, smoothing, half_to_float):
        calls.append(("forward", labels.min().item() >= 0, half_to_float))
        return module._forward_rows(logits, labels, smoothing)

    def backward(cotangent, logits, lse, labels, smoothing):
        calls.append(("backward", labels.min().item() >= 0))
        return module._backward_rows(cotangent, logits, lse, labels, smoothing)

    kernels.forward, kernels.backward = forward, backward
    monkeypatch.setitem(sys.modules, "xentropy_cuda", kernels)
    monkeypatch.setattr(apexex, "_KINDS", ("cuda", "cpu"))
    logits, target = inputs()
    compiled = thunder.jit(cross_entropy, executors=["apex"])
    x, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    torch.testing.assert_close(compiled(x, target), cross_entropy(reference, target))
    compiled(x, target).backward()
    cross_entropy(reference, target).backward()
    torch.testing.assert_close(x.grad, reference.grad)
    assert calls == [("forward", True, False)] * 2 + [("backward", True)]
    assert names(thunder.last_traces(compiled)[-1]) == ["apex_cross_entropy"]
    assert isinstance(apexex.apex_ex, OperatorExecutor)
