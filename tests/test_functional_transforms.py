"""grad, value_and_grad, vjp, jvp, vmap: alone, composed, inside compiled functions, and torch.func's own there."""

import functools
import random

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.core.transforms import grad, jvp, vjp, vmap

D = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------- 200 random compositions

W, B = draw(3, 3, seed=1) * 0.5, draw(3, seed=2)
STEPS = [
    lambda x: torch.sin(x), lambda x: torch.tanh(x) * 2, lambda x: torch.exp(x * 0.3), lambda x: x * x, lambda x: torch.sigmoid(x), lambda x: F.gelu(x),
    lambda x: F.softplus(x), lambda x: x / (1 + x * x), lambda x: torch.where(x > 0.1, x * 2, torch.sin(x)), lambda x: torch.sqrt(x * x + 1), lambda x: x**3 * 0.1,
    lambda x: W @ x, lambda x: x @ W, lambda x: F.linear(x, W, B), lambda x: torch.softmax(x, 0), lambda x: F.layer_norm(x, (3,), B, B), lambda x: torch.cumsum(x, 0),
    lambda x: x.flip(0), lambda x: x[[1, 2, 0]], lambda x: torch.cat([x[1:], x[:1]]), lambda x: (x[:, None] * x[None, :]).sum(0), lambda x: x - x.mean(),
    lambda x: torch.stack([x, x * 2]).sum(0), lambda x: x * torch.logsumexp(x, 0), lambda x: x.reshape(3, 1).expand(3, 2).transpose(0, 1).sum(0), lambda x: x.var() + x,
    lambda x: F.silu(x), lambda x: x.roll(1), lambda x: F.log_softmax(x, -1), lambda x: torch.outer(x, B).diagonal() + x, lambda x: x.norm() * B + x, lambda x: torch.einsum("i,ij->j", x, W),
    lambda x: F.conv1d(x[None, None], B[None, None], padding=1)[0, 0], lambda x: x.prod() + x, lambda x: torch.gather(x, 0, torch.tensor([2, 0, 1])), lambda x: x.amax() * x,
]  # fmt: skip
ENDS = [lambda x: x, lambda x: x.sum(), lambda x: (x * B).sum(), lambda x: x.mean(), lambda x: torch.dot(x, x), lambda x: x[1], lambda x: (x * x)[None, :].repeat(2, 1)]


def written_out(x):
    """Layer norm by its formula: torch.func's forward mode of F.layer_norm takes mean and deviation for constants where it is differentiated again."""
    return (x - x.mean()) / torch.sqrt(x.var(correction=0) + 1e-5) * B + B


class Torch:
    """torch.func under the signatures of thunder's transforms."""

    instead = {STEPS[15]: written_out}

    grad = staticmethod(torch.func.grad)

    @staticmethod
    def vmap(f, in_dims, out_dims):
        """A result that is the same for all elements is mapped all the same: torch.func puts the new dimension of such a one first, whatever out_dims says."""
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
    """What torch.func computes; None where it cannot: it writes in place to what it saved in the second derivative of prod."""
    try:
        return composition.build(Torch)(x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return None


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
        found = [thunder.jit(composition.build(Thunder)), composition.build(Thunder), thunder.jit(composition.build(Torch))][seed % 3](x)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"seed {seed}, {composition.plan}: {text}")
        assert not found.requires_grad
