"""Operations that PyTorch composes of others, some of which autocast casts: under autocast PyTorch's function is taken
as it is, so that its casts stand where they stand there."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder.core import dtypes
from thunder.core.proxies import like
from thunder.ops.define import LTORCH
from thunder.ops.opaque import casts_inside

for _name in (
    "trapezoid cumulative_trapezoid frobenius_norm multilabel_soft_margin_loss norm_except_dim "
    "native_group_norm native_multi_head_attention"
).split():
    casts_inside(*LTORCH[_name].torch_functions)
casts_inside(
    F.bilinear,
    F.local_response_norm,
    F.affine_grid,
    torch.linalg.pinv,
    torch.pinverse,
    torch.lstm,
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
)
casts_inside(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.margin_ranking_loss)


def _cov(lower: dict, a, **options):
    """The product of matrices inside is cast."""
    out = LTORCH["cov"].meta(a, **options)  # type: ignore[misc]
    casts = a.device.type in lower and out.dtype.category == dtypes.FLOAT and out.dtype is not dtypes.float64
    return like(out, dtype=dtypes.to_dtype(lower[a.device.type])) if casts else out


casts_inside(torch.cov, torch.Tensor.cov, torch.corrcoef, torch.Tensor.corrcoef, typed=_cov)
