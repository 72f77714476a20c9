"""early_gradients: the forward computes the gradients of a loss for a cotangent of 1, where kernels read the same
there; the backward multiplies them."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import schedule
from thunder.transforms import early_gradients

pytest.importorskip("triton", reason="kernels need Triton")
# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(early_gradients, "SMALLEST", 1)
    monkeypatch.setattr(schedule, "LAUNCH", 1)


def names(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    quiet = ("python_del", "unpack_sequence", "clear_collection")
    return [line.sym.name for line in traces[-1].bound_symbols if line.sym.name not in quiet]


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype).requires_grad_()


LABELS = torch.tensor([3, -1, 0, 49, 7, 7] * 12, device=DEVICE)


def cross_entropy(x):
    return F.cross_entropy(x, LABELS, ignore_index=-1)


def of_a_layer(x, w):
    return F.cross_entropy((x @ w).float(), LABELS, ignore_index=-1)


PROGRAMS = {
    "cross_entropy": (cross_entropy, lambda: (tensor(72, 50),)),
    "of a layer": (of_a_layer, lambda: (tensor(72, 8), tensor(8, 50))),
    "bfloat16": (lambda x: cross_entropy(x.float()), lambda: (tensor(72, 50, dtype=torch.bfloat16),)),
    "mse": (lambda x: F.mse_loss(torch.tanh(x), torch.ones_like(x)), lambda: (tensor(30, 7),)),
    "through a view": (
        lambda x, w: ((x @ w).reshape(3, 4, 5).transpose(0, 1) ** 2).mean(),
        lambda: (tensor(12, 6), tensor(6, 5)),
    ),
}


@pytest.mark.parametrize("cotangent", [1.0, 0.3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name, cotangent):
    program, make = PROGRAMS[name]
    inputs = make()
    compiled = thunder.jit(program, executors=[TritonFuser("early")])
    got, eager = compiled(*inputs), program(*inputs)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if inputs[0].dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(got, eager, **tolerance)
    g = torch.tensor(cotangent, device=DEVICE)
    wanted = torch.autograd.grad(eager, inputs, g)
    for keep in (True, True, False):  # what is kept is not written over
        for a, b in zip(torch.autograd.grad(got, inputs, g, retain_graph=keep), wanted, strict=True):
            torch.testing.assert_close(a, b, **tolerance)
    assert names(compiled, backward=True).count("times_cotangent") == 1


def test_logits_are_read_in_one_kernel_and_not_saved():
    x, w = tensor(72, 8), tensor(8, 50)
    compiled = thunder.jit(of_a_layer, executors=[TritonFuser("once")])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = compiled(x, w)
    assert [tuple(t.shape) for t in saved if t is not x and t is not w] == [(72, 50)], (
        "the gradient of the logits, and nothing beside it"
    )
    loss.backward()
    assert names(compiled) == ["matmul", "TritonFusion0"]
    (fused,) = [line.sym.fn for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion]
    assert [(k.rows, k.columns) for k in fused.schedule.kernels] == [(1, 72), (72, 50), (1, 72)], (
        "the weights, the rows with their gradients, the loss"
    )
    assert names(compiled, backward=True)[0] == "times_cotangent" and not any(
        n.startswith("TritonFusion") for n in names(compiled, backward=True)
    )


def decayed(x, w):
    return (w * w).sum() + (x @ w).sum()


STAYS = {
    "computed on the way": (decayed, lambda: (tensor(12, 6), tensor(6, 5))),
    "float16": (lambda x: torch.tanh(x).sum(), lambda: (tensor(30, 7, dtype=torch.float16),)),
    "reads nothing as large": (lambda x, w: (x @ w).sum(), lambda: (tensor(12, 6), tensor(6, 5))),
    "several numbers": (lambda x: torch.tanh(x).sum(1), lambda: (tensor(30, 7),)),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_in_the_backward(name):
    program, make = STAYS[name]
    inputs = make()
    compiled = thunder.jit(program, executors=[TritonFuser("stays")])
    out = compiled(*inputs)
    out.backward(torch.ones_like(out))
    assert "times_cotangent" not in names(compiled, backward=True)


def test_small_gradients_stay(monkeypatch):
    monkeypatch.setattr(early_gradients, "SMALLEST", 72 * 50 * 4 + 1)
    x = tensor(72, 50)
    compiled = thunder.jit(cross_entropy, executors=[TritonFuser("small")])
    compiled(x).backward()
    assert "times_cotangent" not in names(compiled, backward=True)


def test_what_is_no_multiple_of_the_cotangent_stays():
    trace = thunder.trace()(
        lambda g, x: (g * x, -g, g + g, torch.where(x > 0, g, 0.0), g.sum()), torch.randn(3), torch.randn(3)
    )
    assert early_gradients._Linear({trace.args[0]}).holds(trace.bound_symbols)
    for bad in (
        lambda g, x: g * g,
        lambda g, x: g + x,
        lambda g, x: x / g,
        lambda g, x: torch.exp(g),
        lambda g, x: torch.where(g > 0, x, 0.0),
        lambda g, x: torch.where(x > 0, g, 1.0),
    ):
        trace = thunder.trace()(bad, torch.randn(3), torch.randn(3))
        assert not early_gradients._Linear({trace.args[0]}).holds(trace.bound_symbols)


def test_what_reads_long_rows_stays(monkeypatch):
    x = tensor(72, 50)
    for longest, early in ((49, False), (50, True)):
        monkeypatch.setattr(TritonFuser, "longest_row", longest)
        compiled = thunder.jit(cross_entropy, executors=[TritonFuser("long")])
        compiled(x).backward()
        assert ("times_cotangent" in names(compiled, backward=True)) == early


def test_without_grad_nothing_is_computed_early():
    compiled = thunder.jit(lambda x: cross_entropy(torch.tanh(x)), executors=[TritonFuser("no grad")])
    with torch.no_grad():
        compiled(tensor(72, 50))
    (fused,) = [line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion]
    assert [tuple(o.shape) for o in fused.outputs] == [()]


LOSSES = {
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "mse_loss of each": lambda a, b: F.mse_loss(a, b, reduction="none"),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(a * 4 - 2, b, beta=0.7, reduction="sum"),
    "huber_loss": lambda a, b: F.huber_loss(a * 4 - 2, b, delta=0.6),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a, b),
    "binary_cross_entropy, weighted": lambda a, b: F.binary_cross_entropy(a, b, weight=b + 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_two_tensors_are_differentiated_in_kernels(name):
    def program(x):
        return LOSSES[name](torch.sigmoid(x) * 0.9, other)

    x, other = tensor(30, 7), torch.rand(30, 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    compiled = thunder.jit(program, executors=[TritonFuser("losses")])
    got, eager = compiled(x), program(x)
    torch.testing.assert_close(got, eager)
    cotangent = torch.rand_like(eager)
    torch.testing.assert_close(torch.autograd.grad(got, x, cotangent), torch.autograd.grad(eager, x, cotangent))
    assert all(n == "times_cotangent" or n.startswith("TritonFusion") for n in names(compiled, backward=True))
