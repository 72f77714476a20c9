"""Products of matrices with odd sizes, by the kernels that are fast for even ones.

Fast kernels of a GPU take sizes and row strides of a multiple of 16 bytes, also where only a size is odd: writing
50257 columns into rows that are 50264 apart is as slow as writing dense rows. So a large product is computed in parts:
its aligned columns and rows, and the few that are left; along the dimension that is summed over, the few first, and the
aligned part is added to them, so that what is rounded twice is small. Measured in docs/lab_log.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder.ops.layout import ROW_BYTES, empty_rows, padded_row

# multiplications of a product that is worth a second kernel: on an H100 that one takes 25 us, where the fast kernels
# take 10 us for this many, and the others 35 to 70
LEAST_PRODUCT = 1 << 32


def multiply_into(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool = False, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Write the product of two matrices, or of two batches of them, to `out`, which may be wider; or add it. bias: of
    the columns of a product of matrices that is written."""
    step = ROW_BYTES // a.element_size()
    (rows, depth), columns = a.shape[-2:], b.shape[-1]
    is_even = not (rows % step or depth % step or columns % step)
    if is_even or out.numel() * depth < LEAST_PRODUCT or not all(_is_aligned(t, step) for t in (a, b)):
        return _multiply(out, a, b, add, bias)
    by_rows = a.stride(-1) == 1
    first, *rest = _parts(depth, step if by_rows or b.stride(-2) == 1 else 1)[::-1]
    for row in _parts(rows, 1 if by_rows else step):
        for column in _parts(columns, step):
            part, x, y = out[..., row, column], a[..., row, :], b[..., column]
            _multiply(part, x[..., first], y[..., first, :], add, None if bias is None else bias[column])
            for other in rest:
                _multiply(part, x[..., other], y[..., other, :], True)
    return out


def _multiply(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    wider = {} if out.dtype is a.dtype else {"out_dtype": out.dtype}
    if add:
        return (torch.addmm if a.dim() == 2 else torch.baddbmm)(out, a, b, out=out, **wider)
    return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=out, **wider)


def _is_aligned(matrix: torch.Tensor, step: int) -> bool:
    strides = matrix.stride()
    return 1 in strides[-2:] and all(s == 1 or s % step == 0 for s in strides) and matrix.storage_offset() % step == 0


def _parts(size: int, step: int) -> list[slice]:
    """The largest multiple of `step`, and what is left."""
    end = size // step * step
    return [slice(0, end), slice(end, size)] if 0 < end < size else [slice(0, size)]


def linear(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer whose rows are aligned. A bias comes with a padded copy of the weight: kernels add it to a dense
    result on the way, and to others in another pass over all of it, which is larger than the weight."""
    columns = w.shape[0]
    padding = padded_row(columns, a.element_size()) - columns
    if bias is not None and padding and a.shape.numel() * columns >= LEAST_PRODUCT:
        return F.linear(a, F.pad(w, (0, 0, 0, padding)), F.pad(bias, (0, padding)))[..., :columns]
    out = empty_rows(a, (*a.shape[:-1], columns))
    multiply_into(out.flatten(0, -2), a.flatten(0, -2), w.t(), bias=bias)
    return out


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product, or a batch of products, whose rows are aligned. b: a matrix, or as many as a has."""
    out = empty_rows(a, (*a.shape[:-1], b.shape[-1]))
    end = -2 if b.dim() == 2 else -3
    multiply_into(out.flatten(0, end), a.flatten(0, end), b if b.dim() == 2 else b.flatten(0, end))
    return out


def addmm(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta=1, alpha=1) -> torch.Tensor:
    """`torch.addmm` with aligned rows."""
    return torch.addmm(a, x, y, beta=beta, alpha=alpha, out=empty_rows(x, (x.shape[0], y.shape[1])))
