"""A backward that some outputs play no part in: no gradient where eager has none, and no zeros made for it."""

import pytest
import torch

import thunder
from thunder.transforms.without_cotangents import without_cotangents


def separate(x, w, v):
    return x * w, x.sin() * v


def shared(x, w, v):
    h = (x * w).tanh()
    return h, h * v, h.sum(0), (x * 2).detach()


def pieces(x, w, v):
    a, b, c, d = (x * w).unbind(0)
    return a * 2, torch.stack([b, c * v[0]]), d


def opaque(x, w, v):
    q, r = torch.linalg.qr(x * w + torch.eye(4, dtype=x.dtype))
    return q, r * v


def an_argument(x, w, v):
    return x, x * w, v


def joined(x, w, v):
    return torch.cat([x * w, v.exp()]).chunk(2)


PROGRAMS = (separate, shared, pieces, opaque, an_argument, joined)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_choice_of_outputs_has_eagers_gradients(program):
    values = [torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    compiled = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
    outputs = sum(o.requires_grad for o in program(*(v.clone().requires_grad_() for v in values)))
    for choice in range(1, 1 << outputs):
        gradients = []
        for run in (program, compiled):
            leaves = [v.clone().requires_grad_() for v in values]
            chosen = [o for i, o in enumerate(o for o in run(*leaves) if o.requires_grad) if choice >> i & 1]
            sum((o * torch.arange(1.0, o.numel() + 1).view(o.shape)).sum() for o in chosen).backward()
            gradients.append([x.grad for x in leaves])
        for want, got in zip(*gradients):
            assert (want is None) == (got is None), choice
            assert want is None or torch.allclose(got, want, rtol=1e-12, atol=1e-12), choice
    assert thunder.cache_misses(compiled) == 1


def test_lines_of_missing_cotangents_are_gone():
    compiled = thunder.jit(lambda x, w, v: (x * w, x * v))
    compiled(*(torch.randn(2, requires_grad=True) for _ in range(3)))
    backward = thunder.last_backward_traces(compiled)[0]
    cotangents = next(
        b.outputs for b in backward.bound_symbols if b.args[1:] and getattr(b.args[1], "name", "") == "cotangents"
    )
    full = [b for b in backward.bound_symbols if b.sym.name in ("mul", "add")]
    assert [b.sym.name for b in full] == ["mul", "mul", "mul", "mul", "add"]
    part = without_cotangents(backward, cotangents, {cotangents[1]})
    assert [b.sym.name for b in part.bound_symbols if b.sym.name in ("mul", "add")] == ["mul", "mul"]
    assert [g is None for g in part.output] == [False, False, True]


def test_zeros_are_made_once_and_only_where_others_are_read_with_them():
    compiled = thunder.jit(lambda x: (x * 2).unbind(0))
    compiled(torch.randn(3, 2, requires_grad=True))
    backward = thunder.last_backward_traces(compiled)[0]
    cotangents = next(
        b.outputs for b in backward.bound_symbols if b.args[1:] and getattr(b.args[1], "name", "") == "cotangents"
    )
    names = [b.sym.name for b in without_cotangents(backward, cotangents, set(cotangents[1:])).bound_symbols]
    assert names.count("zeros") == 2 and names.count("stack") == 1
    assert without_cotangents(backward, cotangents, set(cotangents)).output == (None,)
