"""The gradients of random programs equal eager's: elementwise operations, views, reductions, products, reuse, detach,
no_grad, in one pool of values."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thunder

UNARY = [
    torch.sin, torch.tanh, torch.sigmoid, torch.nn.functional.gelu, torch.nn.functional.silu, torch.abs, torch.atan,
    torch.neg, lambda x: x * 0.5 + 1, lambda x: x / 3,
    lambda x: torch.sqrt(x * x + 1), lambda x: torch.log1p(x * x), lambda x: torch.exp(-x * x),
        lambda x: x.clamp(-1, 1), torch.relu, lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: torch.softmax(x, -1), lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), lambda x: x.cumsum(-1),
        lambda x: x.double() + x.float().double(),
]  # fmt: skip
VIEWS = [
    lambda x: x.t(), lambda x: x.reshape(-1), lambda x: x[..., :2], lambda x: x.unsqueeze(0),
        lambda x: x.transpose(0, -1), lambda x: x.flatten(), lambda x: x[None, ..., 1:],
    lambda x: x.expand(2, *x.shape), lambda x: x.view(x.shape), lambda x: x.squeeze(0), lambda x: x.flip(0),
        lambda x: x.chunk(2, 0)[0], lambda x: x.contiguous(), lambda x: x[0],
]  # fmt: skip
REDUCTIONS = [
    lambda x: x.sum(), lambda x: x.mean(0), lambda x: x.sum(-1, keepdim=True), lambda x: x.amax(-1),
        lambda x: x.var(-1, unbiased=False), lambda x: x.logsumexp(0), lambda x: x.prod(-1),
    lambda x: x.norm(),
]  # fmt: skip
BINARY = [
    torch.add,
    torch.mul,
    torch.sub,
    lambda a, b: a / (b * b + 1),
    torch.maximum,
    lambda a, b: torch.atan2(a, b * b + 1),
    lambda a, b: torch.where(a > b, a * b, b),
]
KINDS = ("unary", "view", "reduce", "binary", "matmul", "cat", "detach", "no_grad", "inplace")

step = st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))


def apply(kind, which, a, b):
    """One step on two values of the pool; None where their shapes do not allow it."""
    if kind == "unary":
        return UNARY[which % len(UNARY)](a) if a.dim() else torch.sin(a)
    if kind == "view":
        f = VIEWS[which % len(VIEWS)]
        return (
            f(a)
            if a.dim()
            and a.shape[0] > 1
            and a.shape[-1] > 1
            and (a.dim() == 2 or f is not VIEWS[0])
            and a.numel() < 500
            else None
        )
    if kind == "reduce":
        return REDUCTIONS[which % len(REDUCTIONS)](a) if a.dim() else None
    if kind == "binary":
        try:
            shape = torch.broadcast_shapes(a.shape, b.shape)
        except RuntimeError:
            return None
        return BINARY[which % len(BINARY)](a, b) if len(shape) < 5 else None
    if kind == "matmul":
        return (
            a @ b
            if a.dim()
            and b.dim()
            and a.shape[-1] == b.shape[max(b.dim() - 2, 0)]
            and (a.shape[:-2] == b.shape[:-2] or b.dim() < 3)
            else None
        )
    if kind == "cat":
        return (
            torch.cat((a, b), 0)
            if a.dim() and a.dim() == b.dim() and a.shape[1:] == b.shape[1:] and a.numel() < 200
            else None
        )
    if kind == "detach":
        return a.detach() * b if a.shape == b.shape else a.detach()
    if kind == "inplace":
        c = a * 2
        c.mul_(3.0)
        if c.dim():
            c[0] = 1.0
        return c + a
    with torch.no_grad():
        c = torch.cos(a)
    return c * a


def run(steps, inputs):
    pool = list(inputs)
    for kind, which, i, j in steps:
        computed = apply(kind, which, pool[-1 - i % len(pool)], pool[-1 - j % len(pool)])
        if computed is not None:
            pool.append(computed)
    return pool[len(inputs) :][-3:]


def gradients(f, steps, weights):
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(s != (4,))
        for s in ((4, 4), (2, 4), (4,), (1, 4), ())
    ]
    outputs = f(steps, inputs)
    total = sum((o * w).sum() for o, w in zip(outputs, weights) if o.requires_grad)
    wanted = [x for x in inputs if x.requires_grad]
    computed_gradients = (
        torch.autograd.grad(total, wanted, allow_unused=True)
        if isinstance(total, torch.Tensor)
        else [None] * len(wanted)
    )
    return [o.detach() for o in outputs], [o.requires_grad for o in outputs], list(computed_gradients)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(step, min_size=1, max_size=14))
def test_gradients_of_random_programs_equal_eagers(steps):
    weights = (1.0, 0.5, 2.0)
    values, requires, computed_gradients = gradients(thunder.jit(run), steps, weights)
    expected_values, expected_requires, expected = gradients(run, steps, weights)
    assert requires == expected_requires
    for ours, eagers in zip(values + computed_gradients, expected_values + expected, strict=True):
        assert (ours is None) == (eagers is None)
        if eagers is not None:
            torch.testing.assert_close(ours, eagers, rtol=1e-9, atol=1e-9, equal_nan=True)
