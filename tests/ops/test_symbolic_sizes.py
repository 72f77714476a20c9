"""Sizes that stay symbolic: shapes come out as expressions that hold for other sizes too, without a guard that fixes
one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import thunder.torch as ltorch
from thunder.core.proxies import IntegerProxy, NumberProxy, TensorProxy
from thunder.core.symbol import Context, Names, Recorder, recording
from thunder.core.symbolic import Decisions, hold
from thunder.ops.registry import lookup


def attention(q):
    return lookup(F.scaled_dot_product_attention)(q, q, q, is_causal=True)


# name -> program of (x of shape [b, s, 8], b, s)
PROGRAMS = {
    "view": lambda x, b, s: x.view(b, s, 2, 4),
    "view_minus_one": lambda x, b, s: x.view(b, -1, 4),
    "view_merges": lambda x, b, s: x.view(-1, 8),
    "reshape_back": lambda x, b, s: x.reshape(b * s, 8).reshape(b, s, 8),
    "flatten": lambda x, b, s: x.flatten(0, 1),
    "unflatten": lambda x, b, s: x.flatten(0, 1).unflatten(0, (b, s)),
    "permute": lambda x, b, s: x.permute(2, 0, 1),
    "transpose": lambda x, b, s: x.transpose(1, 2),
    "unsqueeze_expand": lambda x, b, s: x[:, :, None].expand(b, s, 3, 8),
    "expand_keeps": lambda x, b, s: x[:1].expand(4, -1, -1),
    "repeat": lambda x, b, s: x.repeat(2, 1, 1),
    "repeat_interleave": lambda x, b, s: x.repeat_interleave(3, 1),
    "cat": lambda x, b, s: ltorch.cat([x, x], 1),
    "stack": lambda x, b, s: ltorch.stack([x, x], 1),
    "slice_from": lambda x, b, s: x[:, 1:],
    "slice_to": lambda x, b, s: x[:, : s - 1],
    "last": lambda x, b, s: x[:, -1],
    "shifted": lambda x, b, s: x[:, :-1],
    "strided": lambda x, b, s: x[:, ::2],
    "chunk": lambda x, b, s: x.chunk(2, -1)[1],
    "split": lambda x, b, s: x.split(4, -1)[0],
    "pad": lambda x, b, s: ltorch.pad(x, (0, 0, 1, 2)),
    "flip": lambda x, b, s: x.flip(1),
    "narrow": lambda x, b, s: x.narrow(1, 0, s - 1),
    "linear": lambda x, b, s: ltorch.linear(x, TensorProxy("w", shape=(5, 8), device="cpu", dtype="float32")),
    "matmul": lambda x, b, s: x @ x.transpose(1, 2),
    "einsum": lambda x, b, s: ltorch.einsum("bsd,btd->bst", x, x),
    "softmax": lambda x, b, s: ltorch.softmax(x, 1),
    "layer_norm": lambda x, b, s: ltorch.layer_norm(x, (8,)),
    "attention": lambda x, b, s: attention(x),
    "conv1d": lambda x, b, s: ltorch.conv1d(
        x.transpose(1, 2), TensorProxy("k", shape=(4, 8, 3), device="cpu", dtype="float32"), None, 1, 1
    ),
    "avg_pool1d": lambda x, b, s: ltorch.avg_pool1d(x.transpose(1, 2), 2, 2),
    "interpolate": lambda x, b, s: ltorch.interpolate(x.transpose(1, 2), None, 2),
    "embedding": lambda x, b, s: ltorch.embedding(
        TensorProxy("i", shape=(b, s), device="cpu", dtype="int64"),
        TensorProxy("e", shape=(9, 8), device="cpu", dtype="float32"),
    ),
    "cross_entropy": lambda x, b, s: ltorch.cross_entropy(
        x.view(-1, 8), TensorProxy("l", shape=(b * s,), device="cpu", dtype="int64")
    ),
    "setitem": lambda x, b, s: ltorch.setitem(x, (slice(None), 0), 1.0),
}


def shape_of(program, b, s) -> tuple:
    with recording(Recorder(Context(Names()))) as recorder:
        x = TensorProxy("x", shape=(b, s, 8), device="cpu", dtype="float32")
        shape = program(x, b, s).shape
        for line in recorder.bound_symbols:
            line.subsymbols  # noqa: B018  decompositions take symbolic sizes as well
    return shape


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_hold_for_other_sizes(name):
    decisions = Decisions({"b": 3, "s": 6})
    b, s = (IntegerProxy(n, decisions) for n in decisions.values)
    symbolic = shape_of(PROGRAMS[name], b, s)
    told = decisions.relations
    fixed = [
        f"{a} {relation} {c}"
        for (a, relation, c), outcome in told.items()
        if (relation == "==") is outcome and relation in ("==", "!=")
    ]
    assert not fixed, f"a size was fixed: {fixed}"
    for values in ({"b": 3, "s": 6}, {"b": 5, "s": 11}):
        assert hold(told, values), f"a guard does not hold for {values}: {told}"
        expected = shape_of(PROGRAMS[name], values["b"], values["s"])
        assert tuple(n.expression.evaluate(values) if isinstance(n, NumberProxy) else n for n in symbolic) == expected


def test_the_number_of_parts_is_a_guard():
    s = IntegerProxy("s", Decisions({"s": 6}))
    with recording(Recorder(Context(Names()))):
        parts = TensorProxy("x", shape=(s, 2), device="cpu", dtype="float32").split(4)
    assert [str(p.shape[0]) for p in parts] == ["4", "2"] and s.decisions.relations


def test_torch_agrees_about_an_odd_chunk():
    with recording(Recorder(Context(Names()))):
        parts = TensorProxy("x", shape=(7, 2), device="cpu", dtype="float32").chunk(3)
    assert [p.shape for p in parts] == [tuple(p.shape) for p in torch.zeros(7, 2).chunk(3)]
