"""Joins part by part in the graphs that Inductor gets: what becomes of them, and that no number changes."""

import random

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import thunder
from thunder.executors.inductor import inductor_ex
from thunder.executors.inductor_joins import joined_by_parts

ATEN = torch.ops.aten


def graph_of(function, *args):
    return make_fx(torch.func.functionalize(function, remove="mutations"), decomposition_table=select_decomp_table())(
        *args
    )


def by_parts(function, *args):
    """The graph with joins by parts, None where there are none, after its results were compared bit for bit, and their
    strides."""
    with torch.no_grad():
        run = joined_by_parts(graph_of(function, *args))
        if run is None:
            return None
        for got, want in zip(run(*args), function(*args), strict=True):
            assert torch.equal(got, want) and got.dtype is want.dtype and got.stride() == want.stride()
        graph = make_fx(run)(*args).graph
    graph.eliminate_dead_code()
    return graph


def read_by(graph, target=ATEN.cat.default) -> list[str]:
    """What reads the results of an operation."""
    return sorted(
        str(user.target).split(".")[1] if user.op == "call_function" else user.op
        for node in graph.nodes
        if node.target is target
        for user in node.users
    )


def rotated(x, cos, sin):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos + torch.cat((-b, a), -1) * sin


def rotated_back(g, cos, sin):
    a, b = (g * sin).chunk(2, -1)
    return g * cos + padded(-a, 16) + padded(b, 0)


def padded(x, start, value=0.0):
    """As the gradient of a slice is written."""
    whole = torch.full((*x.shape[:-1], x.shape[-1] + 16), value, dtype=x.dtype)
    return torch.slice_scatter(whole, x, x.dim() - 1, start, start + x.shape[-1])


COS, SIN = torch.randn(6, 32), torch.randn(6, 32)
HEADS = [torch.randn(2, 6, 3, 32).transpose(1, 2) for _ in range(3)]


def test_rotary_embedding():
    graph = by_parts(lambda x, cos, sin: [rotated(x, cos, sin)], HEADS[0], COS, SIN)
    assert read_by(graph) == ["permute"], "the join is the result, in its layout"


def test_gradients_of_rotary_embeddings_are_written_beside_each_other():
    def program(q, k, v, cos, sin):
        joined = torch.cat([x.unsqueeze(2) for x in (rotated_back(q, cos, sin), rotated_back(k, cos, sin), v)], 2)
        return [joined.permute(0, 3, 1, 2, 4).reshape(12, 288)]

    graph = by_parts(program, *HEADS, COS, SIN)
    assert [len(node.args[0]) for node in graph.nodes if node.target is ATEN.cat.default] == [6]
    assert not any(node.target in (ATEN.clone.default, ATEN.slice_scatter.default) for node in graph.nodes)


X, Y = torch.randn(4, 32), torch.randn(4, 16)
CHANGED = {
    "another dimension": (lambda x, y: [torch.cat([x, -x]).sin() * 2.0], ["permute"], X, Y),
    "parts of different sizes": (lambda x, y: [torch.cat([x, y], 1).tanh() + 1.0], ["permute"], X, Y),
    "joins of joins": (lambda x, y: [torch.cat([torch.cat([y, y + 1], 1), x], 1) * 3.0], ["permute"], X, Y),
    "two joins": (lambda x, y: [torch.cat([x, x + 1], 1) * torch.cat([-x, x.sin()], 1)], ["permute"], X, Y),
    "joins with other cuts": (lambda x, y: [torch.cat([y, x, -y], 1) * torch.cat([x, -x], 1)], ["permute"], X, Y),
    "a broadcast operand": (lambda x, y: [torch.cat([x, -x], 1) * y[:, :1] + y[0, 0]], ["permute"], X, Y),
    "squares of squares": (
        lambda x, y: [(lambda z: [z := z * z for _ in range(40)][-1])(torch.cat([x, -x], 1))],
        ["permute"],
        X,
        Y,
    ),
    "of other types": (
        lambda x, y: [torch.where(torch.cat([x > 0, x > 1], 1), torch.cat([x, -x], 1).double(), 2)],
        ["permute"],
        X,
        Y,
    ),
    "padded": (lambda x, y: [padded(x, 0, 2.0) * padded(x, 16)], ["permute"], X, Y),
    "a copy in another order": (
        lambda x, y: [torch.cat([x[None], -x[None]], 0).permute(1, 0, 2).reshape(4, 64)],
        ["view"],
        X,
        Y,
    ),
    "computed, then in another order": (lambda x, y: [(torch.cat([x, -x]) * 2.0).t().contiguous()], ["permute"], X, Y),
}
LEFT = {
    "only joined": (lambda x, y: [torch.cat([x, -x])], X, Y),
    "read twice": (lambda x, y: [(z := torch.cat([x, -x])) * 2.0, z.sum()], X, Y),
    "narrow parts": (lambda x, y: [torch.cat([x[:, :3], x], 1) * 2.0], X, Y),
    "many parts": (lambda x, y: [torch.cat([x] * 9, 1) * 2.0], X, Y),
    "an empty tensor of one dimension": (
        lambda x, y: [torch.cat([x, y.new_zeros(0)], 1).reshape(4, 2, 16).permute(1, 0, 2).contiguous() * 2.0],
        X,
        Y,
    ),
    "reduced": (lambda x, y: [torch.cat([x, -x]).sum(0)], X, Y),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_computed_of_joins(name):
    program, readers, *args = CHANGED[name]
    assert read_by(by_parts(program, *args)) == readers


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name):
    assert by_parts(*LEFT[name]) is None


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    """Values are computed of, joined, padded, cut and permuted in any order; what comes out is the same bit for bit."""
    draw = random.Random(seed)

    def one(values):
        x, kind = draw.choice(values[-3:]), draw.randrange(7)
        dim = draw.randrange(x.dim())
        if kind == 0:
            return torch.cat([x, draw.choice([v for v in values if v.dim() == x.dim() and _alike_but(v, x, dim)])], dim)
        if kind == 1:
            return padded(x, draw.choice([0, 16]), 2.0)
        if kind == 2 and x.shape[dim] >= 32:
            return x.narrow(dim, 16, x.shape[dim] - 16)
        if kind == 3:
            return x.transpose(0, dim) * 2.0 if draw.random() < 0.5 else x.transpose(0, dim).contiguous()
        if kind == 4:
            return x.unsqueeze(dim).neg() if x.dim() < 4 else x.sin()
        others = [
            v
            for v in values
            if v.dim() == x.dim() and all(a == b or 1 in (a, b) for a, b in zip(v.shape, x.shape, strict=True))
        ]
        return x * draw.choice(others) if kind == 5 else x + draw.choice(others)

    def program(x, y):
        draw.seed(seed)
        values = [x, y]
        for _ in range(9):
            values.append(one(values))
        return values[-2:]

    by_parts(program, torch.randn(16, 32), torch.randn(16, 1))


def _alike_but(v, x, dim) -> bool:
    return all(a == b for d, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if d != dim)


@pytest.mark.skipif(
    inductor_ex.unavailable() is not None, reason=f"Inductor cannot compile here: {inductor_ex.unavailable()}"
)
def test_what_inductor_makes_of_it():
    """Rotary embeddings under grad, in the layout that eager gives them, without a copy behind the kernel."""
    x = torch.randn(2, 6, 3, 32).transpose(1, 2).requires_grad_()
    compiled = thunder.jit(lambda x: rotated(x.exp(), COS, SIN), executors=["inductor"])
    got, want = compiled(x), rotated(x.exp(), COS, SIN)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    torch.testing.assert_close(torch.autograd.grad(got, x, want.detach()), torch.autograd.grad(want, x, want.detach()))
    run = thunder.examine.get_fusions(thunder.last_traces(compiled)[-1])[0][1]._usual
    assert all("lambda" not in getattr(function, "__name__", "") for _, function in run.values())
