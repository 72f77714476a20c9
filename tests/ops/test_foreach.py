"""`torch._foreach_*` on lists: results, gradients and what the in-place forms leave are eager's."""

import pytest
import torch

import thunder
from thunder.ops import LTORCH

NAMES = sorted(n.removeprefix("_foreach_") for n in LTORCH if n.startswith("_foreach_"))
BINARY = {"add", "sub", "mul", "div", "clamp_min", "clamp_max", "maximum", "minimum", "pow"}


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) * 0.8 + 0.1 for shape in ((4, 3), (3,), (2, 1, 2))]


def arguments(name):
    """The arguments after the first list, several times."""
    if name in BINARY:
        return [(tensors(1),), (2.0,), ([2.0, 3.0, 0.5],)]
    if name == "lerp":
        return [(tensors(1), 0.3), (tensors(1), tensors(2))]
    if name in ("addcmul", "addcdiv"):
        return [(tensors(1), tensors(2)), (tensors(1), tensors(2), 0.5), (tensors(1), tensors(2), [0.5, 2.0, 1.0])]
    return [(), (1,)] if name == "norm" else [()]


def assert_same(got, want):
    assert type(got) is type(want) and len(got) == len(want)
    for g, w in zip(got, want):
        assert g.dtype == w.dtype and torch.equal(g, w)


@pytest.mark.parametrize("name", NAMES)
def test_as_in_eager(name):
    function, in_place = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_", None)

    def program(a, *rest):
        return function(a, *rest)

    def writing(a, *rest):
        in_place(a, *rest)
        return [x + 1 for x in a]

    for rest in arguments(name):
        compiled = thunder.jit(program)
        assert_same(compiled(tensors(0), *rest), function(tensors(0), *rest))
        assert f"torch._foreach_{name}(" in str(thunder.last_traces(compiled)[-1])
        if in_place is not None:
            ours, theirs, compiled = tensors(0), tensors(0), thunder.jit(writing)
            assert_same(compiled(ours, *rest), writing(theirs, *rest))
            assert_same(ours, theirs)
            text = str(thunder.last_traces(compiled)[-1])
            assert f"_foreach_{name}_(" in text and "copy_(" not in text
        if name not in ("ceil", "floor", "round", "sign", "trunc"):
            gradients = []
            for f in (thunder.jit(program), program):
                leaves = [x.requires_grad_() for x in tensors(0)]
                sum((y * (i + 1)).sum() for i, y in enumerate(f(leaves, *rest))).backward()
                gradients.append([x.grad for x in leaves])
            for g, w in zip(*gradients):
                torch.testing.assert_close(g, w)


def test_options_by_name():
    def program(a, b):
        torch._foreach_add_(a, b, alpha=0.5)
        return torch._foreach_norm(a, ord=1), torch._foreach_pow(2.0, a)

    got, want = ([f(a := tensors(0), tensors(1)), a] for f in (thunder.jit(program), program))
    for g, w in zip([*got[0], got[1]], [*want[0], want[1]]):
        assert_same(g, w)
