"""Operations on tensors of other layouts than row-major: results and gradients are eager's. Kernels called by their
ATen names take some operands as they lie in memory."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import thunder
from tests.ops.harness import SAMPLED, samples_of, torch_function
from thunder.core.symbol import OpTags
from thunder.ops import LTORCH

LAYOUTS = {
    "turned": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t,
    "with gaps": lambda t: torch.stack([t, t + 1], -1)[..., 0] if t.dim() else t,
    "channels last": lambda t: t.transpose(1, -1).contiguous().transpose(1, -1) if t.dim() > 2 else t,
}


def laid_out(value, layout):
    """A leaf of such a layout for each tensor."""

    def one(t):
        t = layout(t).detach() if isinstance(t, torch.Tensor) else t
        return t.requires_grad_() if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) else t

    return tree_map(one, value)


def run(function, args, kwargs, layout) -> tuple:
    """Outputs, and the gradients of all leaves for cotangents of that layout."""
    outputs = function(*args, **kwargs)
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    roots = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(0)
    cotangents = [layout(torch.randn_like(t, memory_format=torch.contiguous_format)) for t in roots]
    gradients = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True) if roots and leaves else ()
    return outputs, [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=bool(gradients))]


@pytest.mark.sweep(2)
@pytest.mark.filterwarnings("ignore")  # deprecated functions are as good as others
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name",
    [
        n
        for n in SAMPLED
        if OpTags.RANDOM_OP not in LTORCH[n].tags and not n.startswith("empty") and torch_function(LTORCH[n])
    ],
)
def test_operands_of_other_layouts(name):
    function = torch_function(LTORCH[name])
    for sample, layout in itertools.product(
        itertools.islice(samples_of(LTORCH[name], torch.float64), 2), LAYOUTS.values()
    ):
        args, kwargs = laid_out(sample, layout)
        try:
            expected = run(function, args, kwargs, layout)
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
        ):  # some take no others, or have no derivative for what the sample gives
            continue
        actual = run(thunder.jit(lambda *args, **kwargs: function(*args, **kwargs)), args, kwargs, layout)
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "shape, strides",
    [
        ((1, 4, 3, 5), (4, 1, 20, 4)),
        ((1, 4, 3, 5), (60, 1, 20, 4)),
        ((2, 4, 1, 1), (4, 1, 1, 1)),
        ((2, 1, 3, 5), (15, 1, 5, 1)),
        ((1, 4, 3, 5), (1, 15, 5, 1)),
    ],
)
def test_images_that_might_be_channels_last(shape, strides):
    """A layout is what the strides say, also where a size of 1 makes two of them the same elements."""
    x = torch.randn(200, dtype=torch.float64).as_strided(shape, strides).requires_grad_()
    w = torch.randn(shape[1], dtype=torch.float64, requires_grad=True)
    actual, expected = (
        run(f, (x, shape[1], w, w), {}, lambda t: t)
        for f in (thunder.jit(torch.nn.functional.group_norm), torch.nn.functional.group_norm)
    )
    torch.testing.assert_close(actual, expected)
    assert actual[0].stride() == expected[0].stride()
