"""Views one after the other that keep the order of the elements, as one view."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder import DebugOptions
from thunder.core.symbol import OpTags

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compiled_with(program, **options):
    options = {"executors": ["triton_fuser", "torch"], **options}
    return thunder.jit(program, debug_options=DebugOptions(check_traces=True), **options)


def views(compiled):
    """What makes nothing but views or copies, by itself."""
    return [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols if OpTags.VIEW in b.sym.tags]


def heads(q, w):
    """As attention joins its heads: batch, heads, tokens, size."""
    out = (q @ q.mT) @ q
    out = out.reshape(1, -1, q.shape[2], q.shape[3]).transpose(1, 2).contiguous()
    return F.linear(out.reshape(1, q.shape[2], -1).contiguous(), w)


def test_one_token_needs_one_view():
    torch.manual_seed(0)
    w = torch.randn(16, 32, device=DEVICE)
    compiled = compiled_with(heads)
    for tokens, merged in ((1, True), (3, False)):
        q = torch.randn(1, 4, tokens, 8, device=DEVICE)
        torch.testing.assert_close(compiled(q, w), heads(q, w))
        assert (views(compiled).count("transpose") == 1) is merged  # that of q, and that of heads
        assert views(compiled).count("reshape") == (1 if merged else 2)


def test_results_and_views_with_other_uses_stay():
    """A result has eager's strides, and is a view where eager's is one."""

    def program(x):
        y = x.sin() @ x.T
        a = y.view(1, 4, 1, 4).transpose(1, 2)
        b = a.reshape(2, 8)
        return a, b.unsqueeze(0), b @ b.T

    x = torch.randn(4, 4, device=DEVICE)
    compiled = compiled_with(program)
    for actual, wanted in zip(compiled(x), program(x), strict=True):
        torch.testing.assert_close(actual, wanted)
        assert actual.stride() == wanted.stride()


def test_a_view_that_is_none_is_an_error():
    def program(x):
        return (x.T.view(1, 12).unsqueeze(0).squeeze(1) * 2) @ x.reshape(12, 1)

    x = torch.randn(3, 4, device=DEVICE)
    compiled = compiled_with(program, fallback="error")
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        program(x)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        compiled(x)


def test_nothing_is_merged_across_writes():
    def program(x, y):
        a = x.T.reshape(12)  # a copy
        x.mul_(2)
        return a.reshape(4, 3).unsqueeze(0) @ y

    x, y = torch.randn(3, 4, device=DEVICE), torch.randn(3, 2, device=DEVICE)
    compiled = compiled_with(program)
    for _ in range(2):
        a, b = x.clone(), x.clone()
        torch.testing.assert_close(compiled(a, y), program(b, y))
        torch.testing.assert_close(a, b)


def test_gradients():
    torch.manual_seed(0)
    q = torch.randn(2, 1, 1, 4, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(16, 32, device=DEVICE, requires_grad=True)

    def program(q, w):
        return sum(heads(x.transpose(1, 2), w).sin().sum() for x in q)

    compiled = compiled_with(program)
    torch.testing.assert_close(compiled(q, w), program(q, w))
    torch.testing.assert_close(torch.autograd.grad(compiled(q, w), (q, w)), torch.autograd.grad(program(q, w), (q, w)))


def test_a_backward_empties_its_collections():
    q = torch.randn(1, 1, 4, 8, device=DEVICE, requires_grad=True)
    compiled = compiled_with(lambda q, w: heads(q.transpose(1, 2), w).sin().sum())
    compiled(q, torch.randn(16, 32, device=DEVICE)).backward()
    first, *_, last = thunder.last_backward_traces(compiled)
    for trace in (first, last):
        names = [b.sym.name for b in trace.bound_symbols]
        assert names.count("clear_collection") == names.count("unpack_sequence") == 3
