"""Derivatives: gradients of compiled programs equal eager's, in value and in what requires grad."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels_in_use import EVERY_REGION


def T(*shape, grad=True, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape) * 7 + len(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


def region(x):
    with torch.no_grad():
        y = x * 2
    return x * y


def enabled(x):
    with torch.no_grad():
        with torch.enable_grad():
            y = x * 2
        z = y * 3
    return y + z


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale, x > 0

    @staticmethod
    def backward(ctx, g, _):
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return g * 3 * x**2 * ctx.scale, None


class AsksForLayouts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.t() * 2
        ctx.save_for_backward(y)
        return y * x.t()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        if not g.is_contiguous():  # as it is behind a sum, where eager expands
            g = g.contiguous()
        return (g.view(-1).view(g.shape) * y * (2 if y.is_contiguous() else 3)).t() + g.stride(0)


class Separate(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + h, g * x + h


PROGRAMS = {
    "used twice": (lambda x: x * x + x, [T(3, 4)]),
    "intermediate returned": (lambda x: ((y := x.sin()), y.cos() * x), [T(3, 4)]),
    "input returned": (lambda x: (x, x * 2), [T(3, 4)]),
    "view of input returned": (lambda x: (x.view(12), x.t() * 2), [T(3, 4)]),
    "integer output": (lambda x: (x.argmax(1), x.sum()), [T(3, 4)]),
    "integer input": (lambda x, i: x[i] * 2, [T(3, 4), torch.tensor([0, 2, 2])]),
    "unused input": (lambda x, y: x * 2, [T(3), T(4)]),
    "one input without grad": (lambda x, y: x * y + y, [T(3, 4), T(4, grad=False)]),
    "broadcast": (lambda x, y: x * y + y, [T(3, 4), T(4)]),
    "broadcast both": (lambda x, y: (x / y).exp(), [T(3, 1), T(1, 4)]),
    "no_grad region": (region, [T(3)]),
    "enable_grad inside no_grad": (enabled, [T(3)]),
    "detach": (lambda x: x.detach() * x, [T(3)]),
    "zeros_like and ones_like": (lambda x: (torch.zeros_like(x), torch.ones_like(x) * x), [T(3)]),
    "mixed dtypes": (lambda x, y: x * y, [T(3, dtype=torch.float32), T(3)]),
    "promoted and cast back": (
        lambda x, w, c: F.linear((x * c).to(x.dtype), w),
        [T(3, 4, dtype=torch.bfloat16), T(2, 4, dtype=torch.bfloat16), T(4, grad=False)],
    ),
    "conversion": (lambda x: x.float().double() * x, [T(3)]),
    "complex": (lambda x: (torch.complex(x, x * 2) * torch.complex(x, x)).abs(), [T(3)]),
    "complex input": (lambda x: (x * x).real, [torch.randn(3, dtype=torch.complex128).requires_grad_()]),
    "split, one piece unused": (lambda x: torch.split(x, 2, 1)[0] * 3, [T(3, 4)]),
    "chunk and cat": (lambda x: torch.cat(torch.chunk(x, 2, 0)[::-1], 0) ** 2, [T(4, 3)]),
    "stack and unbind": (lambda x, y: torch.stack((x, y), 1).unbind(1)[1] * x, [T(3), T(3, seed=1)]),
    "max with indices": (lambda x: x.max(1).values * 2, [T(3, 4)]),
    "topk": (lambda x: x.topk(2, 1)[0].sum(), [T(3, 4)]),
    "cumsum": (lambda x: x.cumsum(0), [T(3, 4)]),
    "where": (lambda x, y: torch.where(x > 0, x * y, y), [T(3, 4), T(4)]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0) * x, [T(3, 4)]),
    "linear with bias, 3-D": (F.linear, [T(2, 3, 4), T(5, 4), T(5)]),
    "linear, 1-D": (F.linear, [T(4), T(5, 4)]),
    "matmul ranks": (lambda a, b, c: (a @ b) @ c, [T(2, 3, 4), T(4, 5), T(2, 5, 3)]),
    "matmul with vector": (lambda a, b: a @ b, [T(3, 4), T(4)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [T(3, 4), T(4), T(4, seed=1)]),
    "layer_norm, frozen weight": (lambda x, w: F.layer_norm(x, (4,), w), [T(3, 4), T(4, grad=False)]),
    "softmax cross entropy": (lambda x: F.cross_entropy(x.softmax(1).log(), torch.tensor([0, 1, 3])), [T(3, 4)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [T(1, 2, 5, 4), T(1, 2, 5, 4, seed=1), T(1, 2, 5, 4, seed=2)],
    ),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2], [2, 1]]), w, padding_idx=1), [T(4, 3)]),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1).relu(), [T(1, 2, 5, 5), T(3, 2, 3, 3)]),
    "autograd.Function": (lambda x: Cube.apply(x.sin(), 2.0), [T(3)]),
    "a backward that asks for layouts": (lambda x: (y := AsksForLayouts.apply(x), y.sum(), y.t().exp())[1:], [T(3, 4)]),
    "autograd.Function with setup_context": (lambda x, y: Separate.apply(x, y.cos()), [T(3), T(3, seed=1)]),
    "temporary overwritten": (lambda x: x.sin().mul_(2).add_(x), [T(3)]),
    "an einsum that is a view overwritten": (
        lambda x: ((y := x * 2), torch.einsum("ij->ji", y).mul_(3), torch.einsum("ii->i", y).add_(1))[0],
        [T(3, 3)],
    ),
    "advanced indexing with repeats": (lambda x: x[torch.tensor([0, 0, 1]), :2].sin(), [T(3, 4)]),
    "negative step by flip": (lambda x: x.flip(0)[::2], [T(5)]),
    "expand": (lambda x: x.unsqueeze(1).expand(3, 4) * x.unsqueeze(1), [T(3)]),
    "var and std": (lambda x: x.var(0) + x.std(0, unbiased=False), [T(3, 4)]),
    "norms": (lambda x: x.norm() + torch.linalg.vector_norm(x, 1), [T(3, 4)]),
    "power": (lambda x: x.abs() ** 2.5 + 2.0**x, [T(3)]),
    "min and max of ties": (lambda x: torch.maximum(x, x.detach().clone()) + torch.minimum(x, x * 1), [T(3)]),
    "svd values": (lambda x: torch.linalg.svdvals(x), [T(3, 3)]),
}


def outputs_of(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_equal_eagers(name):
    fn, args = PROGRAMS[name]
    compiled = thunder.jit(fn)
    for _ in range(2):  # the second call runs what the first compiled
        got, want = outputs_of(compiled(*args)), outputs_of(fn(*args))
        assert [o.requires_grad for o in got] == [o.requires_grad for o in want]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        leaves = [a for a in args if a.requires_grad]
        cotangents = [
            torch.linspace(-1, 1, max(o.numel(), 1), dtype=o.dtype)[: o.numel()].reshape(o.shape)
            for o in want
            if o.requires_grad
        ]
        g = torch.autograd.grad([o for o in got if o.requires_grad], leaves, cotangents, allow_unused=True)
        e = torch.autograd.grad([o for o in want if o.requires_grad], leaves, cotangents, allow_unused=True)
        assert [x is None for x in g] == [x is None for x in e]
        torch.testing.assert_close(
            [x for x in g if x is not None], [x for x in e if x is not None], rtol=1e-9, atol=1e-12
        )
    assert thunder.cache_misses(compiled) == 1


def test_retain_graph_twice_then_the_clear_error():
    compiled, x = thunder.jit(lambda x: x.exp() * x), T(3)
    y = compiled(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x, retain_graph=True)[0])
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


def test_accumulates_into_grad():
    model = torch.nn.Linear(3, 2)
    compiled, x = thunder.jit(model), torch.randn(4, 3)
    for _ in range(3):
        compiled(x).sum().backward()
    got = model.weight.grad.clone()
    model.zero_grad()
    for _ in range(3):
        model(x).sum().backward()
    assert torch.equal(got, model.weight.grad)


def test_hooks_on_inputs_and_outputs_run():
    compiled, x = thunder.jit(lambda x: x * 2), T(3)
    seen = []
    x.register_hook(lambda g: seen.append(g))
    y = compiled(x)
    y.register_hook(lambda g: g * 10)
    y.sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 20.0, dtype=torch.float64)) and torch.equal(x.grad, seen[0])


W, FILTERS = torch.randn(3, 3, dtype=torch.float64), torch.randn(5, 2, 2, dtype=torch.float64)
WRITTEN = {
    "linear": lambda x: F.linear(x, W),
    "linear of a vector": lambda x: F.linear(x[0, 0], W),
    "matmul": lambda x: x[None] @ W,
    "einsum": lambda x: torch.einsum("bij,kj->bik", x, W),
    "a batch of one convolution": lambda x: F.conv1d(x[0], FILTERS),
    "a pool": lambda x: F.avg_pool1d(x, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "a view": lambda x: x.sin().view(3, 4),
    "a permutation, and something else": lambda x: (x.sin().permute(2, 1, 0), x.sin())[0],
    "a part": lambda x: x.sin()[1],
    "an operation in place": lambda x: F.linear(x, W).mul_(2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_results_are_written_to(name):
    """PyTorch lets programs write to what operations return, also where that is a view of memory that nobody else
    has."""
    f, gradients = WRITTEN[name], []
    for run in (f, thunder.jit(f)):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 2, 3).requires_grad_()
        for _ in range(2):
            result = run(x * 2)
            result.mul_(3)[..., 0].add_(1)
            result.square().sum().backward()
        gradients.append((result.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    "f", [lambda x: x.view(-1), lambda x: torch.einsum("ij->ji", x), lambda x: (lambda y: (y.view(-1), y))(x.sin())]
)
@pytest.mark.parametrize("of_result", [True, False])
def test_results_that_share_memory_are_not_written_to(f, of_result):
    """Their gradients would not know of it."""
    x = T(3, 3) * 2
    results = thunder.jit(f)(x)
    result, other = results if isinstance(results, tuple) else (results, x)
    with pytest.raises(RuntimeError, match="is a view and"):
        (result if of_result else other).mul_(3)
        result.sum().backward()


def test_a_result_that_its_derivative_reads():
    f = thunder.jit(lambda x: x.exp().view(-1))
    result = f(T(2, 3))
    result.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_saved_values_are_freed_with_the_graph():
    compiled, x = thunder.jit(lambda x: (x.exp() * x).sum()), T(50)
    y = compiled(x)
    ref = weakref.ref(y.grad_fn)
    y.backward()
    del y
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: y.copy_(x),
        lambda y, x: y[0].copy_(x[0]),
        lambda y, x: y.t().copy_(x.t()),
        lambda y, x: y.copy_(x.detach()),
    ],
)
def test_what_is_copied_over_has_a_gradient_of_zero(write):
    def program(a, x):
        y = a * 2
        write(y, x)
        return y

    a, x = T(3, 4), T(3, 4, seed=1)
    got, want = (torch.autograd.grad(f(a, x).sum(), (a, x), allow_unused=True) for f in (thunder.jit(program), program))
    assert all(g is w or torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_variable_named_for_what_nobody_wants():
    """A gradient that is None is printed as `_`."""

    def program(x, v, w):
        y = F.conv2d(x.sin(), v)
        _ = y.cos()
        return F.conv2d(F.conv2d(_, w), w)

    x, v, w = T(1, 3, 5, 5), T(3, 3, 3, 3), T(3, 3, 2, 2)
    got, want = (torch.autograd.grad(f(x.detach(), v, w).sum(), (v, w)) for f in (thunder.jit(program), program))
    torch.testing.assert_close(got, want)


def gaps(t):
    whole = torch.full((*t.shape, 2), torch.nan, dtype=t.dtype)
    whole[..., 0] = t.detach()
    return whole[..., 0].requires_grad_(t.requires_grad)


@pytest.mark.parametrize(
    "program, inputs",
    [
        (lambda x, w, b: F.group_norm(x, 2, w, b), [T(2, 4, 3, 5), T(4), T(4, seed=1)]),
            (lambda x: F.group_norm(x, 2), [T(3, 4)]), (torch.pdist, [T(4, 3)]),
        (lambda x, w, b: F.layer_norm(x, (4,), w, b), [T(3, 4), T(4), T(4, seed=1)]),
            (lambda x, w: F.batch_norm(x, None, None, w, w, training=True), [T(3, 4), T(4)]),
        (lambda x: F.instance_norm(x), [T(2, 3, 4)]), (lambda x: F.softmax(x, 1), [T(2, 3, 4)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [gaps, lambda t: t.detach().mT.contiguous().mT.requires_grad_() if t.dim() > 1 else t])
def test_kernels_that_do_not_look_at_strides(form, program, inputs):
    inputs = [form(t) for t in inputs]
    got, want = thunder.jit(program)(*inputs), program(*inputs)
    torch.testing.assert_close(got, want)
    for g in (torch.randn_like(want), gaps(torch.randn_like(want))):
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, g, retain_graph=True),
            torch.autograd.grad(want, inputs, g, retain_graph=True),
        )


def test_requires_grad_flips_between_calls():
    compiled, w = thunder.jit(lambda x, w: x @ w), torch.randn(3, 3)
    assert not compiled(torch.ones(2, 3), w).requires_grad
    w.requires_grad_()
    y = compiled(torch.ones(2, 3), w)
    assert y.requires_grad and thunder.cache_misses(compiled) == 2
    with torch.no_grad():
        assert not compiled(torch.ones(2, 3), w).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_program_called_without_grad_that_enables_it(mode):
    def program(x):
        with torch.enable_grad():
            y = x.sin()
        return y, y * 2, x.t()

    compiled, x = thunder.jit(program), T(3, 4)
    with mode():
        got, want = compiled(x), program(x)
        assert not torch.is_grad_enabled()
    assert [y.requires_grad for y in got] == [y.requires_grad for y in want]
    if mode is torch.no_grad:
        assert torch.equal(*(torch.autograd.grad(y[0].sum(), x)[0] for y in (got, want)))


def test_grad_fn_and_backward_trace():
    compiled, x = thunder.jit(lambda x: x.sin() * 2), T(3)
    assert "ThunderFunctionBackward" in repr(compiled(x).grad_fn)
    text = str(thunder.last_backward_traces(compiled)[-1])
    assert (
        "def backward_fn(saved_for_backward, cotangents):" in text
        and "C0, _ = saved_for_backward" in text
        and "clear_collection(saved_for_backward)" in text
    )
    assert "torch.cos" in text


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # before torch 2.13
def test_the_forward_runs_before_autograd_looks_at_the_inputs():
    compiled, x = thunder.jit(lambda x: x.sin() * 2), T(3)
    compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = compiled(x)
    ranges = {e.name: e.time_range for e in profile.events()}
    assert ranges["aten::sin"].end <= ranges["ThunderFunction"].start
    with torch.no_grad():
        assert not compiled(x).requires_grad
    assert torch.is_grad_enabled() and y.requires_grad


def test_exception_in_a_users_backward_leaves_as_itself_and_the_function_stays_usable():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no gradient today")

    compiled = thunder.jit(lambda x: Bad.apply(x))
    with pytest.raises(ValueError, match="no gradient today"):
        compiled(T(3)).sum().backward()
    with torch.no_grad():
        assert torch.equal(compiled(T(3)), T(3) * 2)


def test_grad_of_a_jitted_and_a_plain_function():
    from thunder.core.transforms import grad, value_and_grad

    def f(x, y):
        return (x * y.sin()).sum()

    x, y = T(3, grad=False), T(3, grad=False, seed=1)
    for fn in (f, thunder.jit(f)):
        gx, gy = grad(fn)(x, y)
        torch.testing.assert_close((gx, gy), (y.sin(), x * y.cos()))
        value, (gx, gy) = value_and_grad(fn)(x, y)
        torch.testing.assert_close((value, gx), (f(x, y), y.sin()))


def test_disable_torch_autograd():
    compiled = thunder.jit(lambda x: x * 2, disable_torch_autograd=True)
    assert not compiled(T(3)).requires_grad


@pytest.mark.parametrize("executors", [["torch"], [EVERY_REGION], ["triton_fuser"]], ids=lambda e: str(e[0]))
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_cotangents(executors):
    """`is_grads_batched=True`, and what uses it: kernels of executors know no batches of vmap's."""

    def f(x, w):
        y = torch.tanh(x @ w)
        return y.sin() * 2, torch.softmax(y, -1)

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    batch = torch.randn(6, 3, 5)
    compiled = thunder.jit(f, executors=executors)
    for _ in range(2):
        torch.autograd.grad(compiled(x, w)[0], x, batch[0])  # one by one, between batches
        for outputs, cotangents in (
            (slice(0, 1), (batch,)),
            (slice(1, 2), (batch,)),
            (slice(0, 2), (batch, batch + 1)),
        ):
            gradients = torch.autograd.grad(compiled(x, w)[outputs], (x, w), cotangents, is_grads_batched=True)
            torch.testing.assert_close(
                gradients, torch.autograd.grad(f(x, w)[outputs], (x, w), cotangents, is_grads_batched=True)
            )
    jacobian = torch.autograd.functional.jacobian(lambda x: compiled(x, w)[0], x.detach(), vectorize=True)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(lambda x: f(x, w)[0], x.detach()))
    out, expected = compiled(x, w)[0], f(x, w)[0]
    gradients = torch.vmap(lambda g: torch.autograd.grad(out, x, g, retain_graph=True)[0])(batch)
    torch.testing.assert_close(
        gradients, torch.vmap(lambda g: torch.autograd.grad(expected, x, g, retain_graph=True)[0])(batch)
    )


def test_a_batch_of_cotangents_of_an_extreme():
    x = torch.randn(3, 4, requires_grad=True)
    gradients = torch.autograd.grad(
        thunder.jit(lambda x: x.max() + x.min())(x), x, torch.ones(3), is_grads_batched=True
    )
    torch.testing.assert_close(
        gradients, torch.autograd.grad(x.max() + x.min(), x, torch.ones(3), is_grads_batched=True)
    )


@pytest.mark.parametrize("executors", [["torch"], [EVERY_REGION], ["triton_fuser"]], ids=lambda e: str(e[0]))
def test_a_cotangent_with_a_tangent(executors):
    """Forward over reverse, where the forward was called before: kernels would lose the tangent."""
    from torch.autograd import forward_ad

    x, g, tangent = torch.randn(3, requires_grad=True), torch.randn(3), torch.randn(3)
    for f in (thunder.jit(lambda x: x.tanh().sin() * 2, executors=executors),):
        out, expected = f(x), x.tanh().sin() * 2
        with forward_ad.dual_level():
            gradient, wanted = (
                forward_ad.unpack_dual(torch.autograd.grad(y, x, forward_ad.make_dual(g, tangent))[0])
                for y in (out, expected)
            )
            torch.testing.assert_close(tuple(gradient), tuple(wanted))
            assert gradient.tangent is not None


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.5}], ids=["", "recomputed"])
@pytest.mark.parametrize("executor", [EVERY_REGION, "triton_fuser"], ids=str)
def test_a_backward_under_autocast_whose_forward_was_not(executor, options):
    """Kernels know the types that the program was made with: products in it are not cast."""
    x, w, v = (torch.randn(8, 8, requires_grad=True) for _ in range(3))

    def f(x, w, v):
        return (torch.tanh(x @ w) @ v).sin()

    g = torch.randn(8, 8)
    expected = torch.autograd.grad(f(x, w, v), (x, w, v), g)
    out = thunder.jit(f, executors=[executor], **options)(x, w, v)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(out, (x, w, v), g)
    torch.testing.assert_close(gradients, expected)


def test_gradients_lie_in_memory_of_their_own():
    """Autograd adds to gradients in place: none is a view of another one. Parts of one gradient are views of it."""
    torch.manual_seed(0)
    a, b, c, d = (torch.randn(shape, requires_grad=True) for shape in ((2, 3), (4, 3), (3, 4), (2, 3)))
    program = thunder.jit(lambda x: torch.cat([a, x]) + b + c.t() + torch.cat([d, a]))
    x, weights = torch.randn(2, 3), torch.randn(3, 4, 3)
    for w in weights:
        (program(x) * w).sum().backward()
    total = weights.sum(0)
    for leaf, wanted in ((a, total[:2] + total[2:]), (b, total), (c, total.t()), (d, total[:2])):
        torch.testing.assert_close(leaf.grad, wanted)
    parts = thunder.jit(lambda: torch.cat([a, d]) * 2)
    parts().sum().backward()
    assert not any(b.sym.name == "clone" for b in thunder.last_backward_traces(parts)[-1].bound_symbols)
