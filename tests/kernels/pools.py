"""Programs that pool, with images for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# what they are called with: the sizes of an image, and the options of a pool
AVERAGES = {
    "one dimension": (F.avg_pool1d, (2, 3, 17), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "poolformer": (
        F.avg_pool2d, (2, 3, 7, 9), {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False}
    ),
    "with the padding": (F.avg_pool2d, (2, 3, 7, 9), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "halves": (F.avg_pool2d, (2, 3, 8, 6), {"kernel_size": 2}),
    "ceil": (F.avg_pool2d, (2, 3, 8, 9), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "ceil without the padding": (
        F.avg_pool2d, (1, 3, 8, 9),
        {"kernel_size": (3, 2), "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
    ),
    "gaps": (F.avg_pool2d, (1, 2, 11, 9), {"kernel_size": 2, "stride": (3, 4)}),
    "a divisor": (F.avg_pool2d, (1, 2, 6, 6), {"kernel_size": 2, "stride": 1, "divisor_override": 3}),
    "no batch": (F.avg_pool2d, (3, 6, 6), {"kernel_size": 2, "stride": 1}),
    "volumes": (F.avg_pool3d, (1, 2, 4, 5, 6), {"kernel_size": 2, "stride": (1, 2, 1), "padding": 1}),
    "large and apart": (F.avg_pool2d, (2, 3, 12, 18), {"kernel_size": 6}),
    "to a size": (F.adaptive_avg_pool2d, (2, 3, 8, 6), {"output_size": (4, 2)}),
    "to rows": (F.adaptive_avg_pool1d, (2, 3, 12), {"output_size": 4}),
    "to a large window": (F.adaptive_avg_pool2d, (2, 3, 14, 12), {"output_size": (2, 2)}),
}  # fmt: skip
MAXIMA = {
    "one dimension": (F.max_pool1d, (2, 3, 17), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "a stem": (F.max_pool2d, (2, 3, 9, 12), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "halves": (F.max_pool2d, (2, 3, 8, 6), {"kernel_size": 2}),
    "ceil": (F.max_pool2d, (2, 3, 8, 9), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
    "dilated": (F.max_pool2d, (1, 2, 12, 11), {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}),
    "dilated steps": (F.max_pool2d, (1, 2, 12, 11), {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 3}),
    "gaps": (F.max_pool2d, (1, 2, 11, 9), {"kernel_size": 2, "stride": (3, 4)}),
    "volumes": (F.max_pool3d, (1, 2, 4, 5, 6), {"kernel_size": 2, "stride": (1, 2, 1), "padding": 1}),
    "to a size": (F.adaptive_max_pool2d, (2, 3, 8, 6), {"output_size": (4, 2)}),
}  # fmt: skip
ENLARGED = {
    "twice": (F.interpolate, (2, 3, 4, 5), {"scale_factor": 2}),
    "to a size": (F.interpolate, (2, 3, 4, 5), {"size": (12, 10)}),
    "rows": (F.interpolate, (2, 3, 7), {"scale_factor": 4}),
    "volumes": (F.interpolate, (1, 2, 3, 4, 5), {"scale_factor": (2, 1, 3)}),
    "eight times": (F.interpolate, (1, 2, 3, 4), {"scale_factor": 8}),
}
INDEXED = {name: row for name, row in MAXIMA.items() if name != "volumes"}


def image(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of which some are equal."""
    torch.manual_seed(0)
    return torch.randint(-9, 9, size).to(dtype) + torch.randint(0, 2, size) * torch.rand(size).to(dtype)


def with_nan_and_infinity(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten().clone()
    for value, start in ((float("nan"), 3), (float("-inf"), 5), (float("inf"), 11)):
        flat[start::17] = value
    flat[: len(flat) // 4] = float("-inf")
    return flat.view(x.shape)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return [x, *(x.contiguous(memory_format=f) for rank, f in formats.items() if x.dim() == rank)]
