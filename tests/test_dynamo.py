"""`torch.compile(fn, backend="thunder")`: Dynamo's graphs give eager's results and gradients."""

from importlib.metadata import entry_points

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder
from tests.test_functional_transforms import Composition, Torch, draw
from thunder.dynamo import ThunderCompiler, backend, graph_calls, thunderfx
from thunder.errors import CaptureError, FallbackWarning, OptionError

pytestmark = [  # of what Dynamo itself does
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Tripled(torch.autograd.Function):
    """Its gradient is not that of its forward: it shows which of the two is used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


def with_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
    return y.float().sum() + (x @ x.t()).sum()


def without_grad(x):
    with torch.no_grad():
        y = x * 2
    return y + x


def breaking(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y.sin()


def branching(x):
    return x + 1 if x.sum() > 0 else x.exp()


PROGRAMS = {
    "pointwise": lambda x: torch.relu(x) * 2,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "autocast": with_autocast,
    "no_grad": without_grad,
    "graph_break": breaking,
    "branch": branching,
    "checkpoint": lambda x: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False),
    "autograd_function": lambda x: Tripled.apply(x) + 1,
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "several_results": lambda x: (x.sin(), {"b": x.cos()}),
    "in_place": lambda x: x.clone().mul_(2).add_(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_are_eagers(name):
    f = PROGRAMS[name]
    compiled = torch.compile(f, backend=ThunderCompiler())
    for sign in (1, -1):
        torch.manual_seed(0)
        x = (sign * torch.rand(4, 4)).requires_grad_()
        ours, expected = (torch.utils._pytree.tree_leaves(g(x)) for g in (compiled, f))
        torch.testing.assert_close(ours, expected)
        (gradient,), (wanted,) = (torch.autograd.grad(sum(o.sum() for o in r), x) for r in (ours, expected))
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.skipif(
    not entry_points(group="torch_dynamo_backends", name="thunder"),
    reason="PyTorch finds the name among installed packages, and thunder is only imported here",
)
def test_a_module_trains_under_its_name_in_torch_compile():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="thunder", options={"numerics": "eager"})
    x = torch.randn(3, 4)
    losses = []
    for f in (model, compiled):
        model.zero_grad()
        f(x).square().sum().backward()
        losses.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


def test_writes_to_arguments_reach_them():
    def f(x):
        x.add_(1)
        return x * 2

    x = torch.ones(3)
    y = torch.compile(f, backend=ThunderCompiler())(x)
    assert (x.tolist(), y.tolist()) == ([2.0] * 3, [4.0] * 3)


def test_symbolic_sizes_of_a_graph_stay_symbolic():
    f = thunderfx(lambda x: torch.softmax(x, -1).sum(-1), dynamic=True)
    for n in (3, 5, 6, 7):
        torch.testing.assert_close(f(torch.ones(2, n)), torch.ones(2))
    (graph,) = f._backend.subgraphs
    assert len(graph.programs) == 1


def test_thunderfx_has_the_traces_of_its_graphs():
    model = nn.Linear(4, 4)
    compiled = thunderfx(model, executors=["torch"])
    compiled(torch.ones(2, 4)).sum().backward()
    assert "torch.nn.functional.linear" in str(compiled.last_traces[0])
    assert "def backward_fn" in str(compiled.last_backward_traces[0])
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in model.state_dict()]


def test_options_are_checked_when_they_are_given():
    with pytest.raises(TypeError, match="executors"):
        ThunderCompiler(executor=["torch"])
    with pytest.raises(OptionError, match="numerics"):
        thunderfx(torch.sin, numerics="exact")


NUMPY = {
    "functions": lambda x: torch.from_numpy(np.sin(x.numpy()) * 2),
    "methods": lambda x: x + float(np.asarray(x).clip(-1, 1).mean()),
    "attributes and axes": lambda x: (np.asarray(x).T @ np.asarray(x)).sum(axis=0).astype(np.float64),
    "items": lambda x: np.where(np.asarray(x)[1:] > 0, 1, np.asarray(x)[:-1]),
}


@pytest.mark.parametrize("name", NUMPY)
def test_functions_of_numpy_in_graphs_are_captured(name):
    f = NUMPY[name]
    compiler = ThunderCompiler(fallback="error")
    compiled = torch.compile(f, backend=compiler)
    for seed in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        expected = torch.compile(f, backend="eager")(x)  # PyTorch's operations for NumPy's
        assert torch.equal(torch.as_tensor(compiled(x)), torch.as_tensor(expected))
    assert all(graph.programs for graph in compiler.subgraphs) and compiler.subgraphs


def test_backwards_between_breaks_give_dynamo_no_graphs_of_thunders_own_code():
    def f(x, w):
        y = (x @ w).tanh()
        torch._dynamo.graph_break()
        (g,) = torch.autograd.grad(y.square().sum(), w, retain_graph=True)
        return y + (x @ g).detach()

    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    graphs = torch._dynamo.testing.CompileCounter()
    torch.compile(f, backend=graphs)(x, w)
    torch._dynamo.reset()
    compiler = ThunderCompiler(fallback="error")
    torch.testing.assert_close(torch.compile(f, backend=compiler)(x, w), f(x, w))
    assert len(compiler.subgraphs) == graphs.frame_count


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(24))
def test_compositions_of_torch_func_in_graphs(seed):
    """Graphs enter and leave the levels of torch.func by calls of their own."""
    composition = Composition(seed)
    f, compiler = composition.build(Torch), ThunderCompiler(fallback="error")
    for require in (False, True):
        torch._dynamo.reset()
        x = draw(*composition.shape, seed=seed).requires_grad_(require)
        ours, expected = torch.compile(f, backend=compiler)(x), f(x)
        assert ours.requires_grad == expected.requires_grad
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        if ours.requires_grad:
            gradients, wanted = (torch.autograd.grad(y.square().sum(), x) for y in (ours, expected))
            torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-9)
    assert all(graph.programs for graph in compiler.subgraphs)


TRANSFORMED = {
    "several results at several places": lambda x: torch.func.vmap(lambda a: (a.sin(), a.sum()), out_dims=(1, 0))(x),
    "a result that is an argument, and one of outside": lambda x: torch.func.vmap(lambda a: (a, x.sum()))(x),
    "parts of a batch": lambda x: torch.func.vmap(torch.sin, chunk_size=2)(x),
    "one result twice": lambda x: (lambda v, p: p((v[0], v[1].cos())))(*torch.func.vjp(lambda a: (a.exp(),) * 2, x)),
    "auxiliary results": lambda x: torch.func.grad(lambda a: (a.sin().sum(), a.cos()), has_aux=True)(x),
    "an argument without use": lambda x: torch.func.grad(lambda a, b: a.sin().sum(), argnums=(0, 1))(x, x),
    "tangents of several results": lambda x: torch.func.jvp(lambda a, b: (a @ b, a.sin(), b), (x, x), (x.cos(), x)),
    "tangents and auxiliary results": lambda x: torch.func.jvp(lambda a: (a.sin(), a), (x,), (x,), has_aux=True),
    "Hessians": lambda x: torch.func.hessian(lambda a: (a @ a.T).sin().sum())(x),
    "no_grad inside": lambda x: torch.func.grad(lambda a: (a.sin() - torch.no_grad()(lambda: a.square())()).sum())(x),
    "no_grad around": lambda x: torch.no_grad()(lambda: torch.func.grad(lambda a: a.sin().sum())(x))(),
    "Jacobians": lambda x: torch.func.jacrev(torch.func.jacrev(lambda a: (a @ a.T).sin().sum()))(x),
    "random numbers": lambda x: torch.func.vmap(lambda a: a * torch.rand(4), randomness="different")(x),
    "writes": lambda x: torch.func.vmap(lambda a: a.clone().mul_(2).add_(a))(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_torch_func_in_graphs(name):
    f, compiler = TRANSFORMED[name], ThunderCompiler(fallback="error")
    x, results = torch.randn(4, 4), []
    for run in (torch.compile(f, backend=compiler), f):
        torch.manual_seed(1)
        results.append(run(x))
    torch.testing.assert_close(*results)
    assert all(graph.programs for graph in compiler.subgraphs) and compiler.subgraphs


def test_levels_that_are_refused_leave_pytorch_at_its_own():
    """Refused before PyTorch enters a level: the graph itself runs at the one that Dynamo has seen."""

    def f(x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.cos())
            return torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent

    x = torch.randn(4)
    with pytest.warns(FallbackWarning, match="torch.func.jvp"):
        actual = thunder.jit(f, fallback="eager")(x)
    torch.testing.assert_close(actual, f(x))


# ---------------------------------------------------------------------------------------- graphs that thunder refuses in part


def shared(x):
    """A copy of x that shares its memory by `set_`, which no program takes."""
    return torch.empty(0).set_(x.detach())


def in_the_middle(x, w):
    y = x @ w
    return (shared(y) * y).sum()


def twice(x, w):
    return (shared(x @ w).sin() * w + shared(w)).sum() + x.sum()


def between_modes(x, w):
    with torch.no_grad():
        a = x * 2
    b = shared(a)
    with torch.no_grad():
        c = b * 3
    return (a * b * c * x).sum() + w.sum()


def between_autocasts(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = x @ w
    b = shared(a.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = x @ w
    return (b * c).sum()


def view_is_written(x, w):
    y = (x @ w).clone()
    first = y[0]
    z = shared(y * 2)
    first.mul_(3)
    return y.square().sum() + z.sum() + first.prod()


def argument_is_written(x, w):
    y = shared(x * 2)
    x.detach().add_(1)
    return (y * w * x).sum()


def at_levels(x, w):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        tangent = torch.autograd.forward_ad.unpack_dual(dual.sin()).tangent
    return (tangent * w).sum()


# a function, and how many graphs of it thunder compiles
IN_PARTS = {
    "in the middle": (in_the_middle, 2),
    "twice": (twice, 3),
    "between modes, which stay together": (between_modes, 1),
    "between autocasts": (between_autocasts, 2),
    "a view that is written to": (view_is_written, 2),
    "an argument that is written to": (argument_is_written, 2),
    "levels": (at_levels, 1),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_only_what_is_refused_runs_in_eager_mode(name):
    f, parts = IN_PARTS[name]
    compiler = ThunderCompiler()
    compiled, results = torch.compile(f, backend=compiler), []
    with pytest.warns(FallbackWarning, match=f"in {f.__name__.replace('twice', 'shared')}|in shared"):
        for run in (f, compiled, compiled):
            torch.manual_seed(0)
            x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
            loss = run(x, w)
            loss.backward()
            results.append([loss, x, x.grad, w.grad])
    torch.testing.assert_close(results[1:], [results[0]] * 2)
    assert [len(graph.programs) for graph in compiler.subgraphs] == [1] * parts


def test_a_refusal_can_be_an_error():
    with pytest.raises(CaptureError, match="set_"):
        torch.compile(in_the_middle, backend=ThunderCompiler(fallback="error"))(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.slow  # Inductor's compiler of C++ takes ten seconds
def test_inductor_compiles_what_is_refused(monkeypatch):
    by, compile_by = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: by.append(options) or compile_by(*args, **options))
    compiler = ThunderCompiler(fallback="inductor", inductor_options={"epilogue_fusion": False})
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.warns(FallbackWarning, match="fallback='inductor'"):
        torch.testing.assert_close(compile_by(twice, backend=compiler)(x, w), twice(x, w))
    assert by == [{"backend": "inductor", "options": {"epilogue_fusion": False}}] * 2
    assert len(compiler.subgraphs) == 3


def test_modes_are_forwarded_or_refused_in_words():
    x = torch.randn(4, 4)
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        compiled = torch.compile(in_the_middle, backend=lambda g, e, mode=mode: backend(g, e, mode=mode))
        with pytest.warns(FallbackWarning, match="set_"):
            torch.testing.assert_close(compiled(x, x), in_the_middle(x, x))
    graph = torch.fx.symbolic_trace(lambda x: x.sin())
    with pytest.raises(OptionError, match="'fast' is not a mode of thunder; valid: 'default', 'reduce-overhead'"):
        backend(graph, [x], mode="fast")
    with pytest.raises(OptionError, match="fallback='inductor'"):
        backend(graph, [x], options={"inductor_options": {"max_autotune": True}})
    with pytest.raises(OptionError, match="valid: 'eager', 'error', 'inductor'"):
        backend(graph, [x], options={"fallback": "none"})


def test_tools_see_the_graphs_of_dynamo():
    def f(x, w):
        y = (x @ w).relu()
        torch._dynamo.graph_break()
        return shared(y).log()

    x = torch.tensor([[-1.0, 2.0]])
    with pytest.warns(FallbackWarning):
        calls = graph_calls(f, x, torch.eye(2))
    assert [len(call.args) for call in calls] == [2, 1, 1]
    assert all(thunder.verify(graph, *args).first is None for graph, args in calls)
    assert "log makes 1 infinite" in str(thunder.debug(calls[-1].graph, *calls[-1].args))
    assert "torch.log" in thunder.report(calls[-1].graph, None, *calls[-1].args).html
