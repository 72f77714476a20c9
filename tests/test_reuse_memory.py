"""Results that are written over what nobody reads any more, and what must not be written over."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import thunder
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import launcher
from thunder.kernels import tiled
from thunder.transforms import reuse_memory
from thunder.transforms.base import Transform

# NumPy, which the interpreter computes with, warns of quotients of padded elements
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def data(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def written_over(compiled, backward=False) -> list[str]:
    trace = (thunder.last_backward_traces if backward else thunder.last_traces)(compiled)[-1]
    return [line.header for line in trace.bound_symbols if line.header]


def in_place(compiled) -> list[str]:
    return [
        line.sym.name
        for line in thunder.last_traces(compiled)[-1].bound_symbols
        if line.sym.id == f"inplace.{line.sym.name}"
    ]


def check(program, *args, transforms=()):
    """The comments of a program's fusions, after its results were compared; twice, since the second call finds its
    kernels."""
    compiled = thunder.jit(program, executors=[TritonFuser("reusing")], transforms=list(transforms))
    want = program(*args)
    for _ in range(2):
        torch.testing.assert_close(compiled(*args), want, rtol=1e-5, atol=1e-5)
    return written_over(compiled)


@pytest.fixture
def allocated(monkeypatch):
    """Bytes that fused kernels ask for, one number for each buffer."""
    sizes, usual_allocator = [], launcher._allocator

    def allocator(device):
        allocate = usual_allocator(device)
        return lambda size, stride, dtype: (
            sizes.append(torch.Size(size).numel() * dtype.itemsize),
            allocate(size, stride, dtype),
        )[1]

    monkeypatch.setattr(launcher, "_allocator", allocator)
    return sizes


X, W, V = data(6, 8), data(8, 8), data(8, 8)


def test_a_gated_product_needs_no_third_buffer(allocated):
    assert check(lambda x, w, v: (F.silu(x @ w) * (x @ v)) @ w, X, W, V) == ["t3 is written over t0"]
    assert not allocated


def test_peak_of_a_gated_product():
    if DEVICE == "cpu":
        pytest.skip("PyTorch counts the peak of the memory of GPUs alone")
    x, w, v = data(512, 512), data(512, 2048), data(512, 2048)
    compiled = thunder.jit(lambda x, w, v: F.silu(x @ w) * (x @ v), executors=[TritonFuser("peak")])
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(x, w, v)
    assert torch.cuda.max_memory_allocated() - before < 2.1 * 512 * 2048 * 4


def test_each_result_takes_another_input(allocated):
    assert check(lambda x, w, v: ((a := x @ w) * (b := x @ v) + 1, torch.sigmoid(a) - b), X, W, V) == [
        "t3 is written over a, t5 is written over b"
    ]
    assert not allocated


def test_a_normalization_is_written_over_what_it_normalizes(allocated):
    assert check(lambda x, w: F.rms_norm((x @ w) * 2, (8,)) @ w, X, W) and not allocated


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])
def test_rows_that_do_not_fit(is_apart, monkeypatch):
    """A row is read in three passes, and written in the last; or by another kernel than those that reduce it."""
    if not is_apart:
        monkeypatch.setattr(tiled, "_faster_apart", lambda *_: frozenset())
    x, w = data(64, 4), data(4, 16500)
    assert check(lambda x, w: torch.softmax((x @ w) * 2, -1), x, w)


def test_another_shape_and_layout_of_the_same_memory(allocated):
    assert check(lambda x, w: torch.sigmoid((x @ w).reshape(2, 3, 8)) * 2, X, W) and not allocated
    program = lambda x, w: torch.sigmoid((x @ w).t()) * 2  # noqa: E731
    compiled = thunder.jit(program, executors=[TritonFuser("transposed")])
    assert compiled(X, W).stride() == program(X, W).stride()
    check(program, X, W)


@pytest.mark.parametrize("shape", [(2, 3, 8), (6, 8)], ids=str)
def test_a_result_is_no_view(shape):
    """What a linear layer with a bias gives is one, which autograd does not let the user write to where it leaves a
    function."""
    layer = torch.nn.Linear(8, 8).to(DEVICE)
    compiled = thunder.jit(lambda x: layer(x).reshape(shape) * 2 + 1, executors=[TritonFuser("views")])
    y, want = compiled(data(2, 3, 8)), layer(data(2, 3, 8)).reshape(shape) * 2 + 1
    assert written_over(compiled)
    torch.testing.assert_close(y.add_(1), want + 1)


def test_what_a_fused_kernel_made():
    assert "written over" in check(lambda x, w: (y := torch.sigmoid(x @ w) * 2) + torch.tanh(y @ w), X, W)[-1]


class Reading(Transform):
    """A user's transform that reads every input of a fusion after it."""

    exact = True

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        lines = []
        for line in computation_trace.bound_symbols:
            lines.append(line)
            if line.sym.is_fusion:
                symbol = thunder.core.symbol.Symbol(
                    "look",
                    id="look",
                    is_prim=True,
                    tags=(thunder.core.symbol.OpTags.DONT_DCE,),
                    fn=lambda *values: None,
                )
                lines.append(symbol.bind(*line.inputs, output=None))
        return computation_trace.replace(bound_symbols=lines)


NOT_REUSED = {
    "returned": (lambda x, w: (torch.sigmoid(h := x @ w) * 2, h), X, W),
    "a view is returned": (lambda x, w: (torch.sigmoid(h := x @ w) * 2, h[2:]), X, W),
    "a view is read later": (
        lambda x, w: ((v := (h := x @ w)[:, ::2]), torch.sigmoid(h) * 2 @ w, v.cumsum(0))[1:],
        X,
        W,
    ),
    "read later": (lambda x, w: (torch.sigmoid(h := x @ w) * 2, (h @ w).cumsum(0)), X, W),
    "an argument": (lambda x, w: torch.sigmoid(x) * 2, X, W),
    "broadcast": (lambda x, w: torch.sigmoid(x[:1] @ w) * x, X, W),
    "transposed": (lambda w, v: torch.sigmoid(h := w @ v) + h.t(), W, V),
    "shifted": (lambda x, w: torch.sigmoid(h := x @ w) + h.roll(1, 0), X, W),
    "another type": (lambda x, w: torch.sigmoid(x @ w).double() * 2, X, W),
    "read by an operation of PyTorch's": (lambda x, w: torch.sigmoid(h := x @ w) * 2 + h.sort(0).values, X, W),
}


@pytest.mark.parametrize("name", NOT_REUSED)
def test_what_is_not_written_over(name):
    assert check(*NOT_REUSED[name]) == []


def test_what_is_added_at_indices_is_added_in_place(allocated):
    """The kernel that would copy where the sums begin is none."""
    at = torch.tensor([2, 0, 2, 5], device=DEVICE)
    program = lambda x, w: (x @ w).index_add(0, at, torch.sin(x[:4]) * 2)  # noqa: E731
    compiled = thunder.jit(program, executors=[TritonFuser("adding", always=True)])
    for _ in range(2):
        torch.testing.assert_close(compiled(X, W), program(X, W))
    (region,) = [b.sym.fn for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.is_fusion]
    assert len(written_over(compiled)) == 1 and not allocated
    assert [text.count("kernel0[") for text in (launch.text for launch in region.launches.values())] == [1]


def test_what_a_transform_of_the_user_reads():
    assert check(lambda x, w: torch.sigmoid(x @ w) * 2, X, W, transforms=[Reading()]) == []


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_another_kernel_reads(is_apart, monkeypatch):
    """Neither of two kernels of one launch may write over an input of both. Of two launches the last may."""
    if is_apart:
        monkeypatch.setattr(tiled, "_may_join", lambda *_: False)
    x, w = data(72, 8), data(8, 72)
    program = lambda x, w: (torch.softmax(h := x @ w, -1), h * h.amax(0) + 1)  # noqa: E731
    over = check(program, x, w)
    compiled = thunder.jit(program, executors=[TritonFuser("kernels")])
    last = [o.name for o in thunder.last_traces(compiled)[-1].output_proxies][1] if compiled(x, w) else ""
    assert [header.split(" is ")[0] for header in over] == [last] * is_apart


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in a thread of autograd that is new
def test_what_is_saved_and_gradients():
    """Of the three matrices that the backward of a gated product reads, the two that the forward saved may be read
    again; its own may be written over."""

    def program(x, w, v):
        return (F.silu(x @ w) * (x @ v)) @ w.t()

    compiled = thunder.jit(program, executors=[TritonFuser("saved")])
    sides = []
    for run in (compiled, program):
        leaves = [t.clone().requires_grad_() for t in (X, W, V)]
        y = run(*leaves)
        sides.append(
            [
                y,
                *torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True),
                *torch.autograd.grad(y, leaves, torch.ones_like(y)),
            ]
        )
    torch.testing.assert_close(*sides)
    assert written_over(compiled) == [] and len(written_over(compiled, backward=True)) == 1


ALONE = {
    "gelu_": lambda h, x: F.gelu(h, approximate="tanh"),
    "relu_": lambda h, x: F.relu(h, False),
    "silu_": lambda h, x: F.silu(h),
    "mish_": lambda h, x: F.mish(h, inplace=False),
    "elu_": lambda h, x: F.elu(h, 0.5),
    "celu_": lambda h, x: F.celu(h, alpha=0.5),
    "leaky_relu_": lambda h, x: F.leaky_relu(h, 0.1, False),
    "hardtanh_": lambda h, x: F.hardtanh(h, -0.5, max_val=2.0),
    "tanh_": lambda h, x: torch.tanh(h),
    "pow_": lambda h, x: h**3,
    "mul_": lambda h, x: h * x[0],
}


@pytest.mark.parametrize("name", ALONE)
def test_a_lone_operation_computes_in_the_memory_of_a_product(name):
    def program(x, w, v):
        return ALONE[name](F.linear(x, w), x) @ v

    compiled = thunder.jit(program, executors=[TritonFuser("alone")])
    for _ in range(2):
        assert torch.equal(compiled(X, W, V), program(X, W, V))
    assert in_place(compiled) == [name]
    assert thunder.verify(compiled, X, W, V).first is None


def test_a_lone_operation_takes_no_memory():
    """Of the numbers that a hidden layer has there is one set, where eager has two."""
    x, layers = (
        data(4, 6, 8),
        torch.nn.Sequential(torch.nn.Linear(8, 512, bias=False), torch.nn.GELU(), torch.nn.Linear(512, 8)).to(DEVICE),
    )
    compiled, taken = thunder.jit(layers, executors=[TritonFuser("bytes")]), []
    with torch.no_grad():
        assert torch.equal(compiled(x), layers(x))
        for run in (layers, compiled):
            with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
                run(x)
            memory = "self_device_memory_usage" if DEVICE == "cuda" else "self_cpu_memory_usage"
            taken.append(sum(max(0, getattr(event, memory)) for event in profile.events()) // (4 * 6 * 512 * 4))
    assert taken == [2, 1]


NOT_ALONE = {
    "returned": lambda x, w: torch.tanh(x @ w),
    "a view of it is returned": lambda x, w: torch.tanh(x @ w)[1:],
    "what it reads is returned": lambda x, w: (torch.tanh(h := x @ w) @ w, h),
    "what it reads is read later": lambda x, w: torch.tanh(h := x @ w) @ w + h @ w,
    "a view of what it reads is read later": lambda x, w: ((v := (h := x @ w).t()), torch.tanh(h) @ w, v @ x)[1:],
    "a view of what it reads is read beside": lambda x, w: torch.mul(h := w @ w, h.t()) @ w,
    "an argument": lambda x, w: torch.tanh(x) @ w,
    "a view": lambda x, w: torch.tanh((x @ w)[1:]) @ w,
    "another type": lambda x, w: torch.mul(x @ w, x.double()) @ w.double(),
    "a broadcast product": lambda x, w: torch.mul(x[0] @ w, x) @ w,
    "an operation of PyTorch's made it": lambda x, w: torch.tanh(x.sort(0).values) @ w,
    "an operation of PyTorch's has read it": lambda x, w: (torch.sort(h := x @ w, 0).values @ w, torch.tanh(h) @ w),
    "no operation on elements": lambda x, w: torch.sort(x @ w, 0).values @ w,
}


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_a_lone_operation_does_not_write_over(name):
    compiled = thunder.jit(NOT_ALONE[name], executors=[TritonFuser("not alone")])
    copies = X.clone(), W.clone()
    for _ in range(2):
        torch.testing.assert_close(compiled(*copies), NOT_ALONE[name](X, W), rtol=0, atol=0)
        assert all(map(torch.equal, copies, (X, W)))
    assert in_place(compiled) == []


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in a thread of autograd that is new
@pytest.mark.parametrize("function", [F.gelu, torch.tanh])
def test_what_a_lone_operation_reads_or_makes_is_saved(function):
    """gelu's derivative reads what goes in, tanh's what comes out; both may be read again."""

    def program(x, w, v):
        return function(x @ w) @ v

    compiled, sides = thunder.jit(program, executors=[TritonFuser("saved alone")]), []
    for run in (compiled, program):
        leaves = [t.clone().requires_grad_() for t in (X, W, V)]
        y = run(*leaves)
        y.mul_(2)
        sides.append(
            [
                y,
                *torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True),
                *torch.autograd.grad(y, leaves, torch.ones_like(y)),
            ]
        )
    torch.testing.assert_close(*sides)


@pytest.fixture
def any_size(monkeypatch):
    """Saved values of a test are small."""
    monkeypatch.setattr(reuse_memory, "SMALLEST", 1)


def gated(x, w, v):
    """A backward may write over both products, which only it reads."""
    return (F.silu(x @ w) * torch.sin(x @ v)) @ w


def differentiated(run, **options):
    leaves = [t.clone().requires_grad_() for t in (X, W, V)]
    y = run(*leaves)
    return [torch.autograd.grad(y.sum(), leaves, **options) for _ in range(1 + bool(options))]


def test_saved_values_are_written_over(any_size, allocated):
    compiled = thunder.jit(gated, executors=[TritonFuser("disposable")])
    torch.testing.assert_close(differentiated(compiled), differentiated(gated))
    backward = thunder.last_backward_traces(compiled)[-1]
    taken = {b.args[0].name for b in backward.bound_symbols if b.sym.name == "unless_read_again"}
    products = {b.output.name for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name == "matmul"}
    assert len(taken) == 1 and taken < products, "the other result is written over a gradient"
    assert len(written_over(compiled, backward=True)) == 1
    text = str(backward).splitlines()
    for name in taken:  # neither name holds the memory any longer
        new = next(line.split()[0] for line in text if f"unless_read_again({name})" in line)
        assert any(
            line.strip().startswith("del ") and {name, new} <= set(line.replace(",", "").split()) for line in text
        )


def test_a_kept_graph_has_its_saved_values(any_size):
    compiled = thunder.jit(gated, executors=[TritonFuser("kept graph")])
    first, second = differentiated(compiled, retain_graph=True)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close([first], differentiated(gated))


def test_hooks_keep_what_they_return(any_size):
    compiled, packed = thunder.jit(gated, executors=[TritonFuser("hooks")]), []

    def pack(t):
        packed.append((t, t.clone()))
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda name: packed[name][0]):
        got = differentiated(compiled)
    assert packed and all(torch.equal(t, before) for t, before in packed)
    torch.testing.assert_close(got, differentiated(gated))


SHARED = {
    "returned": lambda x, w, v: (torch.sin(h := x @ w) @ v, h),
    "a view is returned": lambda x, w, v: (torch.sin(h := x @ w) @ v, h[1:]),
    "an argument": lambda x, w, v: torch.sin(x) @ v,
    "a view is saved too": lambda x, w, v: torch.sin(h := x @ w) @ v + (h.t() @ x).sum(),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_others_share_is_not_written_over(name, any_size):
    compiled = thunder.jit(SHARED[name], executors=[TritonFuser("shared")])
    sides = []
    for run in (SHARED[name], compiled):
        leaves = [t.double().requires_grad_() for t in (X, W, V)]
        results = run(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        before = [r.detach().clone() for r in results]
        gradients = torch.autograd.grad(sum(r.sum() for r in results), leaves, allow_unused=True)
        assert all(map(torch.equal, before, results)) and torch.equal(leaves[0], X.double())
        sides.append([*before, *(g for g in gradients if g is not None)])
    torch.testing.assert_close(*sides)
    backward = str(thunder.last_backward_traces(compiled)[-1])
    assert "unless_read_again" not in backward or name == "a view is saved too"
