"""grad, value_and_grad, vjp, jvp, vmap: alone, composed, inside compiled functions, and torch.func's own there."""

import copy
import functools
import random

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.core.transforms import grad, jvp, value_and_grad, vjp, vmap
from thunder.errors import CaptureError, MissingImplementationError, OptionError

D = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------- 200
# random compositions

W, B = draw(3, 3, seed=1) * 0.5, draw(3, seed=2)
STEPS = [
    lambda x: torch.sin(x), lambda x: torch.tanh(x) * 2, lambda x: torch.exp(x * 0.3), lambda x: x * x,
        lambda x: torch.sigmoid(x), lambda x: F.gelu(x),
    lambda x: F.softplus(x), lambda x: x / (1 + x * x), lambda x: torch.where(x > 0.1, x * 2, torch.sin(x)),
        lambda x: torch.sqrt(x * x + 1), lambda x: x**3 * 0.1,
    lambda x: W @ x, lambda x: x @ W, lambda x: F.linear(x, W, B), lambda x: torch.softmax(x, 0),
        lambda x: F.layer_norm(x, (3,), B, B), lambda x: torch.cumsum(x, 0),
    lambda x: x.flip(0), lambda x: x[[1, 2, 0]], lambda x: torch.cat([x[1:], x[:1]]),
        lambda x: (x[:, None] * x[None, :]).sum(0), lambda x: x - x.mean(),
    lambda x: torch.stack([x, x * 2]).sum(0), lambda x: x * torch.logsumexp(x, 0),
        lambda x: x.reshape(3, 1).expand(3, 2).transpose(0, 1).sum(0), lambda x: x.var() + x,
    lambda x: F.silu(x), lambda x: x.roll(1), lambda x: F.log_softmax(x, -1),
        lambda x: torch.outer(x, B).diagonal() + x, lambda x: x.norm() * B + x, lambda x: torch.einsum("i,ij->j", x, W),
    lambda x: F.conv1d(x[None, None], B[None, None], padding=1)[0, 0], lambda x: x.prod() + x,
        lambda x: torch.gather(x, 0, torch.tensor([2, 0, 1])), lambda x: x.amax() * x,
]  # fmt: skip
ENDS = [
    lambda x: x,
    lambda x: x.sum(),
    lambda x: (x * B).sum(),
    lambda x: x.mean(),
    lambda x: torch.dot(x, x),
    lambda x: x[1],
    lambda x: (x * x)[None, :].repeat(2, 1),
]


def written_out(x):
    """Layer norm by its formula: torch.func's forward mode of F.layer_norm takes mean and deviation for constants where
    it is differentiated again."""
    return (x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-5) * B + B


class Torch:
    """torch.func under the signatures of thunder's transforms."""

    instead = {STEPS[15]: written_out}

    grad = staticmethod(torch.func.grad)

    @staticmethod
    def vmap(f, in_dims, out_dims):
        """A result that is the same for all elements is mapped all the same: torch.func puts the new dimension of such
        a one first, whatever out_dims says."""
        return torch.func.vmap(lambda x: f(x) + 0 * x.sum(), in_dims, out_dims)

    @staticmethod
    def vjp(f):
        def run(primals, cotangents):
            out, pull = torch.func.vjp(f, *primals)
            return out, pull(cotangents)

        return run

    @staticmethod
    def jvp(f):
        return lambda primals, tangents: torch.func.jvp(f, primals, tangents)


class Thunder:
    instead: dict = {}
    vjp, jvp, vmap = staticmethod(vjp), staticmethod(jvp), staticmethod(vmap)

    @staticmethod
    def grad(f):
        return grad(f, argnums=0)


class Composition:
    """A function of one tensor, and up to three transforms around it, drawn from a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.steps = [self.random.choice(STEPS) for _ in range(self.random.randint(1, 3))]
        self.end = self.random.choice(ENDS)
        self.plan, self.shape, self.out = [], (3,), tuple(self.base(draw(3)).shape)
        for _ in range(self.random.randint(1, 3)):
            self.plan.append(self.transform())

    def base(self, x, instead={}):
        for step in self.steps:
            x = instead.get(step, step)(x)
        return self.end(x)

    def transform(self):
        kind = self.random.choice(["grad", "vjp", "jvp", "vmap"])
        if kind == "grad":
            reduce, self.out = self.out != (), self.shape
            return kind, reduce
        if kind == "vjp":
            cotangent, self.out = draw(*self.out, seed=3), self.shape
            return kind, cotangent
        if kind == "jvp":
            return kind, draw(*self.shape, seed=4)
        before, after = self.random.randint(0, len(self.shape)), self.random.randint(0, len(self.out))
        self.shape = (*self.shape[:before], 2, *self.shape[before:])
        self.out = (*self.out[:after], 2, *self.out[after:])
        return kind, (before, after)

    def build(self, api):
        f = functools.partial(self.base, instead=api.instead)
        for kind, how in self.plan:
            f = self.wrapped(api, f, kind, how)
        return f

    def wrapped(self, api, f, kind, how):
        if kind == "grad":
            return api.grad((lambda x: torch.sin(f(x)).sum()) if how else f)
        if kind == "vjp":
            return lambda x: api.vjp(f)((x,), how)[1][0]
        if kind == "jvp":
            return lambda x: api.jvp(f)((x,), (how,))[1]
        return api.vmap(f, in_dims=how[0], out_dims=how[1])


def _by_torch(composition, x):
    """What torch.func computes; None where it cannot: it writes in place to what it saved in the second derivative of
    prod."""
    try:
        return composition.build(Torch)(x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("group", range(20))
def test_random_compositions_equal_torch_func(group):
    """200 in all: ten in each group."""
    seed, compared = 1000 * group, 0
    while compared < 10:
        seed += 1
        composition = Composition(seed)
        x = draw(*composition.shape, seed=seed)
        expected = _by_torch(composition, x)
        if expected is None:
            continue
        compared += 1
        function = [
            thunder.jit(composition.build(Thunder)),
            composition.build(Thunder),
            thunder.jit(composition.build(Torch)),
        ][seed % 3](x)
        torch.testing.assert_close(
            function, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"seed {seed}, {composition.plan}: {text}"
        )
        assert not function.requires_grad


# ---------------------------------------------------------------------------------------------------------------- forms


X, Y = draw(3, seed=5), draw(3, seed=6)


def product(x, y):
    return (torch.sin(x) * y).sum()


def test_grad_of_a_compiled_function_is_the_flat_list():
    compiled = thunder.jit(lambda a, b, c: (torch.sin(a) * b, {"unused": c}))
    gradients = grad(compiled)(X, Y, torch.arange(3))
    assert isinstance(gradients, list) and len(gradients) == 2
    torch.testing.assert_close(gradients, [torch.cos(X) * Y, torch.sin(X)])
    for a in (X.clone().requires_grad_(), X):
        assert not any(g.requires_grad for g in grad(compiled)(a, Y, torch.arange(3)))


def test_flat_list_has_each_position_and_parameters():
    torch.testing.assert_close(grad(lambda a, b: a * b)(X, X), [X, X])
    torch.testing.assert_close(grad(lambda a: a)(X), [torch.ones(3, dtype=D)])
    linear = torch.nn.Linear(3, 2).double()
    of_input, of_weight, of_bias = grad(thunder.jit(linear))(X)
    torch.testing.assert_close(of_weight, X.expand(2, 3))
    torch.testing.assert_close((of_input, of_bias), (linear.weight.detach().sum(0), torch.ones(2, dtype=D)))
    value, gradients = value_and_grad(linear)(X)
    torch.testing.assert_close((value, gradients), (linear(X).detach(), [of_input, of_weight, of_bias]))


def test_trace_has_the_gradient_and_nothing_else():
    compiled = grad(lambda a: torch.sin(a).sum(), argnums=0)
    compiled(X)
    assert [
        line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.name != "python_del"
    ].count("sin") == 0
    assert len(thunder.last_traces(compiled)) > 1 and thunder.cache_misses(compiled) == 1
    compiled(Y)
    assert thunder.cache_hits(compiled) == 1


@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1,)])
def test_argnums_and_the_structure_of_what_they_name(argnums):
    tree = {"w": W, "b": (B, [X])}

    def f(tree, x):
        return (torch.tanh(tree["w"] @ x + tree["b"][0]) * tree["b"][1][0]).sum()

    torch.testing.assert_close(grad(f, argnums=argnums)(tree, Y), torch.func.grad(f, argnums=argnums)(tree, Y))
    value, gradients = value_and_grad(f, argnums=argnums)(tree, Y)
    torch.testing.assert_close((gradients, value), torch.func.grad_and_value(f, argnums=argnums)(tree, Y))


def test_argnums_by_name_and_independent_arguments():
    torch.testing.assert_close(grad(lambda x, *, k: (x * k).sum(), argnums=(0, "k"))(X, k=Y), (Y, X))
    torch.testing.assert_close(
        grad(lambda x, y: x.sum(), argnums=(0, 1))(X, Y), (torch.ones(3, dtype=D), torch.zeros(3, dtype=D))
    )


def test_has_aux():
    def f(x):
        return (x**2).sum(), {"doubled": x * 2, "n": 3}

    gradient, aux = grad(f, argnums=0, has_aux=True)(X)
    torch.testing.assert_close((gradient, aux["doubled"]), (2 * X, 2 * X))
    assert aux["n"] == 3
    (value, aux), gradient = value_and_grad(f, argnums=0, has_aux=True)(X)
    torch.testing.assert_close((value, aux["doubled"], gradient), ((X**2).sum(), 2 * X, 2 * X))


def test_gradients_are_connected_to_autograd():
    x = X.clone().requires_grad_()
    g = grad(lambda x: (x**3).sum(), argnums=0)(x)
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 6 * X)


def test_no_grad_outside_makes_no_difference_and_inside_it_does():
    with torch.no_grad():
        torch.testing.assert_close(grad(product, argnums=0)(X, Y), torch.cos(X) * Y)

    def partly(x):
        with torch.no_grad():
            c = x * 2
        return (c * x).sum()

    torch.testing.assert_close(grad(partly, argnums=0)(X), torch.func.grad(partly)(X))


def test_vjp_and_jvp_with_structures():
    def f(d, k):
        return {"a": torch.sin(d["x"]) * k, "b": (d["x"] * d["y"]).sum(), "n": torch.zeros(2, dtype=D)}

    primals, cotangents = ({"x": X, "y": Y}, B), {"a": X, "b": torch.tensor(2.0, dtype=D), "n": torch.ones(2, dtype=D)}
    wanted, pull = torch.func.vjp(f, *primals)
    torch.testing.assert_close(vjp(f)(primals, cotangents), (wanted, pull(cotangents)))
    tangents = ({"x": B, "y": X}, Y)
    torch.testing.assert_close(jvp(f)(primals, tangents), torch.func.jvp(f, primals, tangents))
    torch.testing.assert_close(vjp(torch.sin)(X, Y), (torch.sin(X), torch.cos(X) * Y))


def test_vjp_of_keyword_arguments_and_without_cotangents():
    def f(a, *, b, n=2):
        return {"product": a * b["x"] * n, "sum": a + b["x"], "integer": n}["product"], a + b["x"]

    a, b = X, {"x": Y}
    for cotangents, of_a, of_b in [
        ((Y, X), 2 * Y * Y + X, 2 * Y * X + X),
        ((Y, None), 2 * Y * Y, 2 * Y * X),
        ((None, X), X, X),
        ((None, None), X * 0, X * 0),
    ]:
        result, gradients = vjp(f)((a,), cotangents, b=b, n=2)
        torch.testing.assert_close((result, gradients), (f(a, b=b), (of_a, {"b": {"x": of_b}, "n": None})))
    assert torch.equal(vjp(torch.sin)(X, None)[1], torch.zeros_like(X))
    with pytest.raises(RuntimeError):
        vjp(f)((a,), (Y,), b=b)


def test_vmap_with_structures_and_dims():
    def f(d, y, n):
        return {"out": d["x"] * y + n, "sum": d["w"].sum()}

    tree, y = {"x": draw(3, 2), "w": W}, draw(2, 4, 3)
    in_dims, out_dims = ({"x": 1, "w": None}, 0, None), {"out": 2, "sum": 0}
    actual = vmap(f, in_dims, out_dims)(tree, y, 2.0)
    torch.testing.assert_close(actual, torch.func.vmap(f, in_dims, out_dims)(tree, y, 2.0))


def test_vmap_calls_what_eager_would():
    """A rule, not torch.vmap, carries a layer out: one call of each operation for the whole batch."""
    compiled = vmap(lambda x, w: F.layer_norm(torch.relu(F.linear(x, w)), (3,)).softmax(-1).sum(), in_dims=(0, None))
    compiled(draw(5, 3), W)
    names = [line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.name != "python_del"]
    assert names == ["linear", "relu", "layer_norm", "softmax", "sum"], names


TABLE, AT, ROWS = torch.randn(4, 5, 2), torch.tensor([1, -1, 3]), torch.randn(3, 4, 5)
READS = {  # (function of one index and one row, what it reads for all of them)
    "of one table": (lambda i, row: TABLE[i], lambda: TABLE[AT]),
    "of two dimensions": (lambda i, row: TABLE[i, i.abs()], lambda: TABLE[AT, AT.abs()]),
    "of several places": (lambda i, row: TABLE[i, AT], lambda: TABLE[AT[:, None], AT]),
    "of its own row": (lambda i, row: row[i], lambda: ROWS[torch.arange(3), AT]),
    "at the same places of its own row": (lambda i, row: row[AT], lambda: ROWS[:, AT]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_at_mapped_indices_are_one_read(name):
    function, expected = READS[name]
    compiled = vmap(function)
    torch.testing.assert_close(compiled(AT, ROWS), expected(), rtol=0, atol=0)
    assert "vmap_of" not in str(thunder.last_traces(compiled)[0])


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_operations_under_vmap(randomness):
    functions = [lambda x: F.dropout(x, 0.5), lambda x: x + torch.rand(3, dtype=D)]
    if randomness == "different":  # torch.func has no rule for the same numbers
        functions.append(lambda x: torch.bernoulli(torch.sigmoid(x)))
    for f in functions:
        torch.manual_seed(0)
        wanted = torch.func.vmap(f, randomness=randomness)(draw(4, 3))
        torch.manual_seed(0)
        torch.testing.assert_close(vmap(f, randomness=randomness)(draw(4, 3)), wanted, rtol=0, atol=0)


def test_gradients_of_single_samples_by_functional_call():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(parameters, x, y):
        return (torch.func.functional_call(model, parameters, (x,)) - y).square().sum()

    batch = draw(5, 3), draw(5, seed=1)
    wanted = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, *batch)
    torch.testing.assert_close(vmap(grad(loss, argnums=0), (None, 0, 0))(parameters, *batch), wanted)
    torch.testing.assert_close(
        thunder.jit(lambda p, x, y: torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(p, x, y))(parameters, *batch),
        wanted,
    )


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.b(self.a(x)) + self.count


@pytest.mark.parametrize("options", [{}, {"tie_weights": False}, {"strict": True}], ids=["tied", "untied", "strict"])
@pytest.mark.parametrize("names", ["a.weight", "a.weight b.weight", "a.weight count", "nothing", "*"])
def test_functional_call_is_pytorchs_own(names, options):
    model, x = Tied(), torch.randn(4, 3)
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    names = own if names == "*" else names.split()

    def call(x):
        tensors_by_name = {n: own[n].detach() + i if n in own else x for i, n in enumerate(names)}
        return torch.func.functional_call(model, tensors_by_name, (x,), **options), tensors_by_name

    def attempt(call):
        with torch.no_grad():
            try:
                return call(x), ""
            except (RuntimeError, ValueError) as error:
                return (), str(error)

    compiled = thunder.jit(call)
    for _ in range(2):
        before = copy.deepcopy(model.state_dict())
        (wanted, error), _ = attempt(call), model.load_state_dict(before)
        actual, raised = attempt(compiled)
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
        assert raised == error


@pytest.mark.parametrize("size", [1, 2, 5])
def test_jacobians_in_chunks(size):
    f = torch.func.jacrev(lambda x: torch.tanh(W @ x) * x.sum(), chunk_size=size)
    torch.testing.assert_close(thunder.jit(lambda x: f(x))(X), f(X))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_batch_in_chunks(size):
    def f(x, y):
        return torch.func.grad(lambda x: (torch.sin(x) * y).sum())(x), {"y": y * 2}

    f = torch.func.vmap(f, in_dims=(0, 1), out_dims=(1, 0), chunk_size=size)
    x, y = draw(4, 3), draw(3, 4)
    torch.testing.assert_close(thunder.jit(lambda x, y: f(x, y))(x, y), f(x, y))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_jacobians_of_torch_func(transform):
    def f(x):
        return torch.tanh(W @ x) * x.sum()

    torch.testing.assert_close(thunder.jit(lambda x: transform(f)(x))(X), transform(f)(X))


def test_torch_func_made_outside_is_read_inside():
    outside = torch.func.grad(lambda x: product(x, Y))
    torch.testing.assert_close(thunder.jit(lambda x: outside(x) * 2)(X), outside(X) * 2)

    def several(x):
        value, pull = torch.func.vjp(lambda x: torch.sin(x) * x, x)
        return value, pull(Y), pull(x)

    torch.testing.assert_close(thunder.jit(several)(X), several(X))


def test_writes_of_temporaries_inside():
    def f(x):
        y = x * 2
        y.add_(x)
        y[0] = 1.0
        return (y * y).sum()

    torch.testing.assert_close(grad(f, argnums=0)(X), torch.func.grad(f)(X))
    torch.testing.assert_close(vmap(f)(draw(4, 3)), torch.func.vmap(f)(draw(4, 3)))


# ----------------------------------------------------------------------------------------------------------------
# errors

REFUSED = {
    "result is no scalar": (lambda t: t.grad(lambda x: x * 2)(X), "grad_and_value"),
    "argument is of integers": (
        lambda t: t.grad(lambda x: x.sum())(torch.arange(3)),
        "only Tensors of floating point dtype can require gradients",
    ),
    "result is no tensor": (lambda t: t.grad(lambda x: (x.sum(), 1))(X), "grad_and_value"),
    "in_dims of another structure": (lambda t: t.vmap(lambda x, y: x, in_dims=(0,))(X, Y), "vmap"),
    "nothing is mapped": (lambda t: t.vmap(lambda x, y: x, in_dims=(None, None))(X, Y), "vmap"),
    "in_dim out of range": (lambda t: t.vmap(lambda x, y: x, in_dims=(0, 3))(X, Y), "vmap"),
    "sizes differ": (lambda t: t.vmap(lambda x, y: x)(X, draw(4, 3)), "vmap"),
    "mapped number": (lambda t: t.vmap(lambda x, y: x)(X, 3), "vmap"),
    "result of vmap is no tensor": (lambda t: t.vmap(lambda x: 3)(X), "vmap"),
    "out_dims of another structure": (lambda t: t.vmap(lambda x: x, out_dims=(0, 1))(X), "vmap"),
    "out_dims None for what is mapped": (lambda t: t.vmap(lambda x: x, out_dims=None)(X), "vmap"),
    "random operation": (
        lambda t: t.vmap(lambda x: x + torch.rand(2))(X),
        "vmap: called random operation while in randomness error mode",
    ),
    "cotangents of another structure": (
        lambda t: t.vjp(lambda x: (x, x))((X,), X),
        "Expected pytree structure of cotangents",
    ),
    "cotangents of another shape": (lambda t: t.vjp(lambda x: x)((X,), W), "Mismatch in shape"),
    "tangents of another structure": (lambda t: t.jvp(lambda x: x)((X,), (X, X)), "jvp"),
    "tangents of another shape": (lambda t: t.jvp(lambda x: x)((X,), (W,)), "Trying to set a forward gradient"),
    "primals are no tuple": (lambda t: t.jvp(lambda x: x)(X, X), "jvp"),
}


class TorchForErrors(Torch):
    vmap = staticmethod(torch.func.vmap)


@pytest.mark.parametrize("what", REFUSED)
def test_errors_are_those_of_torch_func(what):
    call, words = REFUSED[what]
    with pytest.raises((RuntimeError, ValueError), match=words) as wanted:
        call(TorchForErrors)
    with pytest.raises((RuntimeError, ValueError), match=words) as raised:
        call(Thunder)
    assert type(raised.value) is type(wanted.value)


def test_errors_of_our_own():
    with pytest.raises(RuntimeError, match="Got argnum=2, but only 1 positional inputs"):
        grad(lambda x: x.sum(), argnums=2)(X)
    with pytest.raises(TypeError, match="argnums names 'k'"):
        grad(lambda x: x.sum(), argnums="k")(X)
    with pytest.raises(CaptureError, match="writes to its argument"):
        grad(lambda x: x.mul_(2).sum(), argnums=0)(X.clone())
    with pytest.raises(CaptureError, match="another dtype than its tensor"):
        jvp(torch.sin)((X,), (X.float(),))
    saved = []
    with pytest.raises(CaptureError, match="the function stored it"):
        grad(lambda x: (saved.append(x), x.sum())[1], argnums=0)(X)
    assert not saved
    with pytest.raises(RuntimeError, match="vmap over calling .item"):
        vmap(lambda x: x.item())(X)
    with pytest.raises(MissingImplementationError, match="run once: what draws random numbers"):
        grad(lambda x: F.rrelu(grad(lambda x: F.rrelu(x, training=True).sum(), argnums=0)(x)).sum(), argnums=0)(X)


def test_functions_compiled_with_transforms_of_traces_are_refused():
    class Changes(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
            return prologue_trace, computation_trace, epilogue_trace

    with pytest.raises(OptionError, match="compiled with Changes"):
        grad(thunder.jit(lambda x: x.sum(), transforms=[Changes()]))


MIXED = torch.linspace(0.5, 1.5, 3)


@pytest.mark.parametrize(
    "primals, keywords",
    [
        ((MIXED, 2), {}),
        ((MIXED, 2.5, True), {}),
        ((MIXED, 2, False, None), {}),
        ((MIXED, 2), {"scale": 3.0}),
        ((MIXED, 2), {"scale": torch.tensor([1.0, 2.0, 3.0])}),
        ((MIXED, torch.tensor(3)), {}),
        ((MIXED, torch.tensor([True, False, True])), {}),
        (({"x": MIXED, "n": 3}, 2), {}),
        ((3, MIXED), {}),
    ],
)
def test_vjp_takes_arguments_that_are_no_tensors(primals, keywords):
    def f(x, n, squared=True, nothing=None, *, scale=1.0):
        x = x["x"] * x["n"] if isinstance(x, dict) else x
        return x * x * n * scale if squared else x * n

    def leaf(x):
        return isinstance(x, torch.Tensor) and x.is_floating_point()

    transformed = vjp(f)
    primals = torch.utils._pytree.tree_map(lambda x: x.clone().requires_grad_() if leaf(x) else x, primals)
    expected = f(*primals, **keywords)
    leaves = torch.utils._pytree.tree_leaves(primals)
    wanted = [x for x in leaves if leaf(x)]
    gradients = iter(torch.autograd.grad(expected, wanted, torch.ones(3)))
    for run in (transformed, transformed.fn.eager):
        result, actual = run(primals, torch.ones(3), **keywords)
        assert torch.equal(result, expected)
        of_primals = actual[: len(primals)]  # those of keyword arguments come behind
        for x, g in zip(leaves, torch.utils._pytree.tree_leaves(of_primals), strict=True):
            assert g is None if not leaf(x) else torch.equal(g, x.grad if x.grad is not None else _noted(x, gradients))


def _noted(x, gradients):
    """The gradient that comes next, kept with its leaf for the second run."""
    x.grad = next(gradients)
    return x.grad


def _writes_to_a_view(x):
    y = x.clone()
    y[:, 0] += x[:, 2].abs()
    y.t()[1].mul_(x.sum(1))
    return (y**2).sum()


WRITES = {
    "grad": lambda x: torch.func.grad(_writes_to_a_view)(x[0]),
    "hessian": lambda x: torch.func.hessian(_writes_to_a_view)(x[0]),
    "jacfwd": lambda x: torch.func.jacfwd(_writes_to_a_view)(x[0]),
    "jvp": lambda x: torch.func.jvp(_writes_to_a_view, (x[0],), (x[1],)),
    "vmap": lambda x: torch.func.vmap(_writes_to_a_view)(x),
    "vmap along another dimension": lambda x: torch.func.vmap(_writes_to_a_view, in_dims=1)(x.transpose(0, 1)),
    "vmap of grad": lambda x: torch.func.vmap(torch.func.grad(_writes_to_a_view))(x),
}


@pytest.mark.parametrize("name", WRITES)
def test_views_are_written_to_in_a_level(name):
    x = torch.linspace(-1, 1, 24).view(4, 2, 3)
    torch.testing.assert_close(thunder.jit(WRITES[name], fallback="error")(x), WRITES[name](x))


def test_what_a_mapped_function_has_written_to_since():
    """The operations of a level read values of before the write."""

    def places(r):
        out = r.new_zeros(2, 3)
        before = out + 1
        out[torch.arange(2).unsqueeze(-1), r] = r.new_ones(())
        return out, before

    rows = torch.tensor([[[0, 1], [1, 2]], [[2, 2], [0, 1]]])
    f = lambda x: torch.func.vmap(places)(x)  # noqa: E731
    torch.testing.assert_close(thunder.jit(f, fallback="error")(rows), f(rows))


def test_block_masks_that_are_made_inside():
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.arange(32) // 5

    def f(q):
        mask = create_block_mask(
            lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None, None, q.shape[0], 32,
            device="cpu", BLOCK_SIZE=16,
        )  # fmt: skip
        return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks

    torch.testing.assert_close(thunder.jit(f, fallback="error")(torch.ones(32)), f(torch.ones(32)))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of eager's own linearize
def test_linearize():
    def f(x, y):
        result, pushed = torch.func.linearize(lambda x, y: (x.sin() * y, y * 2), x, y)
        return result, pushed(x, y), pushed(y, x + 1)

    x, y = torch.linspace(0, 1, 3), torch.linspace(1, 2, 3)
    torch.testing.assert_close(thunder.jit(f, fallback="error")(x, y), f(x, y))


def test_linearize_of_what_draws_random_numbers_is_refused():
    def f(x):
        result, pushed = torch.func.linearize(lambda x: x * torch.rand(3), x)
        return result, pushed(x)

    with pytest.raises(thunder.errors.CaptureError, match="draws random numbers"):
        thunder.jit(f, fallback="error")(torch.ones(3))
