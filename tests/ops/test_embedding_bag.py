"""Gradients of bags by PyTorch's own kernels, bit for bit, without a nested graph."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import thunder


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
        found, expected = compiled(table), program(table)
        cotangent = torch.randn_like(expected)
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(y, table, cotangent)[0] for y in (found, expected)))
        assert "with_graph" not in str(compiled.programs[0].forward)
