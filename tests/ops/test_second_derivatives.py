"""Derivatives of PyTorch's backward kernels: gradients inside of programs that are differentiated again."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.ops.backward import KERNELS
from thunder.ops.rules import derivatives

CLASSES = torch.tensor([2, 0, 4])
PIXELS = torch.tensor([[[1, 0], [2, 2]], [[0, 1], [1, 2]]])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5])
ROWS_READ = torch.tensor([[1, 3, 1], [0, 2, 3]])


def resized(x, size, mode, align_corners=None, antialias=False):
    return F.interpolate(x, size, mode=mode, align_corners=align_corners, antialias=antialias).sin()


# kernel -> functions whose gradient is that kernel, and the shapes of their arguments
PROGRAMS = {
    "_adaptive_avg_pool2d_backward": [(lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (2, 3, 5, 6))],
    "_adaptive_avg_pool3d_backward": [(lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)), (1, 2, 4, 3, 5))],
    "_log_softmax_backward_data": [(lambda x: F.log_softmax(x, 1), (3, 5))],
    "_prelu_kernel": [(F.prelu, (2, 3, 4), (3,))],
    "_prelu_kernel_backward": [(F.prelu, (3, 4), (1,))],
    "_softmax_backward_data": [(lambda x: torch.softmax(x, 0), (3, 5))],
    "adaptive_max_pool2d_backward": [(lambda x: F.adaptive_max_pool2d(x, 2), (2, 3, 5, 6))],
    "adaptive_max_pool3d_backward": [(lambda x: F.adaptive_max_pool3d(x, 2), (2, 3, 4, 5))],
    "avg_pool2d_backward": [
        (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), (2, 3, 6, 5)),
        (lambda x: F.avg_pool1d(x, 2), (2, 6)),
    ],
    "avg_pool3d_backward": [(lambda x: F.avg_pool3d(x, 2, divisor_override=3), (1, 2, 4, 4, 4))],
    "binary_cross_entropy_backward": [
        (lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.full((3, 5), 0.25, dtype=x.dtype)), (3, 5)),
        (lambda x: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).to(x.dtype), WEIGHTS.to(x.dtype)), (3, 5)),
    ],
    "convolution_backward": [
        (lambda x, w, b: F.conv2d(x, w, b, 2, 1), (2, 4, 6, 5), (3, 4, 3, 2), (3,)),
        (lambda x, w: F.conv1d(x, w, padding="same", groups=2), (2, 4, 7), (6, 2, 3)),
        (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, dilation=2), (1, 3, 4, 4), (3, 2, 3, 3), (2,)),
        (lambda x, w: F.conv3d(x, w), (2, 4, 4, 4), (3, 2, 2, 2, 2)),
    ],
    "diagonal_backward": [(lambda x: torch.diagonal(x, 1, 0, 2).sin(), (4, 3, 4))],
    "elu_backward": [(lambda x: F.elu(x, 1.3), (3, 5)), (F.celu, (3, 5)), (F.selu, (3, 5))],
    "embedding_dense_backward": [
        (lambda w: F.embedding(ROWS_READ, w).sin(), (4, 5)), (lambda w: F.embedding(ROWS_READ, w, 3).sin(), (4, 5)),
    ],
    "gelu_backward": [(F.gelu, (3, 5)), (lambda x: F.gelu(x, approximate="tanh"), (3, 5))],
    "glu_backward": [(lambda x: F.glu(x, 0), (4, 5)), (F.glu, (3, 6))],
    "hardshrink_backward": [(F.hardshrink, (3, 5))],
    "hardswish_backward": [(lambda x: F.hardswish(3.0 * x), (3, 5))],
    "hardtanh_backward": [(F.hardtanh, (3, 5)), (F.relu6, (3, 5))],
    "huber_loss_backward": [
        (lambda x, y: F.huber_loss(x, y, reduction=how, delta=0.7), (3, 5), (3, 5))
        for how in ("mean", "none")
    ],
    "leaky_relu_backward": [(F.leaky_relu, (3, 5))],
    "log_sigmoid_backward": [(F.logsigmoid, (3, 5))],
    "max_pool2d_with_indices_backward": [
        (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 6, 5)),
        (lambda x: F.max_pool1d(x, 2), (2, 6)),
    ],
    "max_pool3d_with_indices_backward": [(lambda x: F.max_pool3d(x, 2), (2, 4, 4, 4))],
    "mse_loss_backward": [
        (lambda x, y: F.mse_loss(x, y, reduction=how), (3, 5), (3, 5))
        for how in ("mean", "sum", "none")
    ],
    "nll_loss2d_backward": [(lambda x: F.nll_loss(x.sin(), PIXELS), (2, 3, 2, 2))],
    "nll_loss_backward": [
        (lambda x: F.cross_entropy(x, CLASSES), (3, 5)),
        (lambda x: F.nll_loss(x.sin(), CLASSES, WEIGHTS.to(x.dtype), reduction="none"), (3, 5)),
        (lambda x: F.cross_entropy(x, CLASSES, WEIGHTS.to(x.dtype), ignore_index=0, reduction="sum"), (3, 5)),
    ],
    "reflection_pad1d_backward": [(lambda x: F.pad(x, (2, 1), "reflect").sin(), (2, 3, 5))],
    "reflection_pad2d_backward": [(lambda x: F.pad(x, (2, 1, 1, 0), "reflect").sin(), (2, 3, 5))],
    "reflection_pad3d_backward": [(lambda x: F.pad(x, (1, 1, 1, 0, 0, 1), "reflect").sin(), (1, 2, 3, 3, 3))],
    "replication_pad1d_backward": [(lambda x: F.pad(x, (2, 1), "replicate").sin(), (2, 3, 5))],
    "replication_pad2d_backward": [(lambda x: F.pad(x, (2, 1, 1, 0), "replicate").sin(), (2, 3, 5))],
    "replication_pad3d_backward": [(lambda x: F.pad(x, (1, 1, 1, 0, 0, 1), "replicate").sin(), (1, 2, 3, 3, 3))],
    "select_backward": [(lambda x: x.select(1, -2).sin(), (3, 5))],
    "sigmoid_backward": [(torch.sigmoid, (3, 5))],
    "slice_backward": [(lambda x: x[1:, ::2].sin(), (3, 5)), (lambda x: x.narrow(1, 1, 3).sin(), (3, 5))],
    "smooth_l1_loss_backward": [(lambda x, y: F.smooth_l1_loss(x, y, beta=0.8), (3, 5), (3, 5))],
    "soft_margin_loss_backward": [(lambda x: F.soft_margin_loss(x, x.detach().sign()), (3, 5))],
    "softplus_backward": [(F.softplus, (3, 5)), (lambda x: F.softplus(x, 2.0, 1.0), (3, 5))],
    "softshrink_backward": [(F.softshrink, (3, 5))],
    "tanh_backward": [(torch.tanh, (3, 5))],
    "_upsample_bicubic2d_aa_backward": [(lambda x: resized(x, (3, 5), "bicubic", antialias=True), (1, 2, 4, 4))],
    "_upsample_bilinear2d_aa_backward": [(lambda x: resized(x, (3, 5), "bilinear", antialias=True), (1, 2, 4, 4))],
    "_upsample_nearest_exact1d_backward": [(lambda x: resized(x, 7, "nearest-exact"), (1, 2, 4))],
    "_upsample_nearest_exact2d_backward": [(lambda x: resized(x, (7, 5), "nearest-exact"), (1, 2, 4, 4))],
    "_upsample_nearest_exact3d_backward": [(lambda x: resized(x, (3, 5, 2), "nearest-exact"), (1, 2, 2, 3, 2))],
    "upsample_bicubic2d_backward": [(lambda x: resized(x, (7, 5), "bicubic"), (1, 2, 4, 4))],
    "upsample_bilinear2d_backward": [
        (lambda x: F.interpolate(x, scale_factor=1.6, mode="bilinear").sin(), (1, 2, 4, 4)),
        (lambda x: resized(x, (7, 5), "bilinear", True), (1, 2, 4, 4)),
    ],
    "upsample_linear1d_backward": [(lambda x: resized(x, 7, "linear"), (1, 2, 4))],
    "upsample_nearest1d_backward": [(lambda x: resized(x, 7, "nearest"), (1, 2, 4))],
    "upsample_nearest2d_backward": [(lambda x: F.interpolate(x, scale_factor=(2.0, 1.5)).sin(), (1, 2, 4, 4))],
    "upsample_nearest3d_backward": [(lambda x: resized(x, (3, 5, 2), "nearest"), (1, 2, 2, 3, 2))],
    "upsample_trilinear3d_backward": [(lambda x: resized(x, (3, 5, 2), "trilinear"), (1, 2, 2, 3, 2))],
    "threshold_backward": [(F.relu, (3, 5)), (lambda x: F.threshold(x, 0.3, 0.1), (3, 5))],
    "unfold_backward": [(lambda x: x.unfold(1, 3, 2).sin(), (3, 7))],
    "index_backward": [(lambda x: x[ROWS_READ].sin(), (4, 5)), (lambda x: x[:, CLASSES].sin(), (3, 5))],
    "index_select_backward": [(lambda x: x.index_select(1, CLASSES).sin(), (3, 5))],
    "gather_backward": [(lambda x: x.gather(0, ROWS_READ).sin(), (4, 5))],
}  # fmt: skip
NOT_DIFFERENTIATED = {
    "_embedding_bag_backward", "_pdist_backward", "affine_grid_generator_backward", "conv_tbc_backward",
    "embedding_backward", "mkldnn_rnn_layer_backward", "multi_margin_loss_backward", "multilabel_margin_loss_backward",
}  # fmt: skip
"""PyTorch has no derivative of these, or calls them under other names."""
LEFT_TO_PYTORCH = {
    "cumprod_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
}  # fmt: skip
"""PyTorch's graph of these is run."""
CASES = [(name, i) for name, programs in PROGRAMS.items() for i in range(len(programs))]


def leaves(shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


def penalty(function):
    """A loss of the gradients of a function, of which the third derivative is not zero."""

    def loss(*inputs):
        y = function(*inputs)
        gradients = torch.autograd.grad((y * y).sum(), inputs, create_graph=True)
        return sum((g * g.cos()).sum() for g in gradients) + y.sum()

    return loss


def gradients(loss, inputs):
    return torch.autograd.grad(loss(*inputs), inputs)


@pytest.mark.parametrize("name, i", CASES, ids=lambda x: str(x))
def test_gradients_inside_are_differentiated_in_operations(name, i):
    function, *shapes = PROGRAMS[name][i]
    inputs = leaves(shapes, torch.float64)
    compiled = thunder.jit(penalty(function), executors=[])
    computed_gradients, expected = gradients(compiled, inputs), gradients(penalty(function), inputs)
    for ours, theirs in zip(computed_gradients, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max().clamp(min=1.0)
    programs = str(thunder.last_traces(compiled)[-1]) + str(thunder.last_backward_traces(compiled)[-1])
    assert "with_graph" not in programs and "vjp_of" not in programs, "PyTorch differentiates an operation of it"


@pytest.mark.parametrize("name, i", CASES, ids=lambda x: str(x))
def test_exact_rows_round_as_pytorch_does(name, i):
    function, *shapes = PROGRAMS[name][i]
    inputs = leaves(shapes, torch.float32)
    compiled = thunder.jit(penalty(function), numerics="eager")
    computed_gradients, expected = gradients(compiled, inputs), gradients(penalty(function), inputs)
    assert all(map(torch.equal, computed_gradients, expected))


def test_every_backward_kernel_says_how_it_is_differentiated():
    rows = {name for name, kernel in KERNELS.items() if kernel.grad_rule or derivatives.formula.of(kernel)}
    assert PROGRAMS.keys() & KERNELS.keys() <= rows
    left = {name for name in KERNELS if "backward" in name} - rows
    assert left == NOT_DIFFERENTIATED | LEFT_TO_PYTORCH
