"""Gradients of bags by PyTorch's own kernels, bit for bit, without a nested graph."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import thunder
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.ops.families.embeddings import _types_on_gpus
from thunder.ops.torch_types import from_tensor_dtype, to_torch_dtype


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("form", ["rows", "offsets", "offsets and the end"])
def test_gradients_of_bags(mode, form):
    for padding, by_frequency, weighted, dtype in itertools.product(
        (None, 2, -1), (False, True), (False, True), (torch.float32, torch.bfloat16)
    ):
        if mode == "max" and by_frequency or mode != "sum" and weighted:
            continue
        table = torch.randn(11, 5, dtype=dtype, requires_grad=True)
        indices = (
            torch.randint(11, (3, 4)) if form == "rows" else torch.randint(11, (2, 12), dtype=torch.int32)[:, ::2][0]
        )
        offsets = None if form == "rows" else torch.tensor([0, 2, 2, 5], dtype=torch.int32)
        options = {
            "mode": mode, "padding_idx": padding, "scale_grad_by_freq": by_frequency,
            "per_sample_weights": torch.randn(indices.shape, dtype=dtype) if weighted else None,
        }  # fmt: skip
        if form == "offsets and the end":
            offsets, options["include_last_offset"] = torch.cat((offsets, torch.tensor([6], dtype=torch.int32))), True

        def program(table):
            return F.embedding_bag(indices, table, offsets, **options) * 2

        compiled = thunder.jit(program)
        actual, expected = compiled(table), program(table)
        cotangent = torch.randn_like(expected)
        assert torch.equal(actual, expected)
        assert torch.equal(*(torch.autograd.grad(y, table, cotangent)[0] for y in (actual, expected)))
        assert "with_graph" not in str(compiled.programs[0].forward)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_types_on_gpus_are_those_of_pytorch(mode, last):
    """Beside its fake tensors, for which no GPU is needed."""
    for index, kind, weighted in itertools.product((torch.int32, torch.int64), ("float32", "bfloat16"), (False, True)):
        if weighted and mode:
            continue
        with FakeTensorMode():
            weight = torch.empty(10, 4, dtype=getattr(torch, kind), device="cuda")
            indices, offsets = (torch.empty(n, dtype=index, device="cuda") for n in (6, 3))
            weights = torch.empty(6, dtype=weight.dtype, device="cuda") if weighted else None
            expected = torch.ops.aten._embedding_bag(weight, indices, offsets, False, mode, False, weights, last, -1)

        def proxy(t):
            dtype = from_tensor_dtype(t.dtype)
            return TensorProxy(f"t{id(t)}", shape=tuple(t.shape), device=Device("cuda:0"), dtype=dtype)

        proxies = [None if t is None else proxy(t) for t in (weight, indices, offsets, weights)]
        is_supported = _types_on_gpus(*proxies[:3], False, mode, False, proxies[3], last, -1)
        assert [(tuple(t.shape), to_torch_dtype(t.dtype)) for t in is_supported] == [
            (tuple(t.shape), t.dtype) for t in expected
        ]
