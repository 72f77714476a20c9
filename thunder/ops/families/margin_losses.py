"""Losses of margins, of likelihoods and of alignments, and the spellings under `torch` of losses that
`torch.nn.functional` has."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, like
from thunder.ops import backward, ltorch
from thunder.ops.families.losses import _REDUCTIONS, _reduction, reduced
from thunder.ops.families.shape import reshape, unsqueeze
from thunder.ops.functionalize.histories import holding
from thunder.ops.opaque import casts_inside
from thunder.ops.registry import LTORCH, alias, composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require


def _rows(a) -> tuple:
    """`a` as rows of classes, and their number."""
    return (reshape(a, (1, a.numel_value)) if len(a.shape) < 2 else a), a.shape[-1] if a.shape else 1


# ----------------------------------------------------------------------------------------------------------------
# margins


def _check_margin(a, target, wanted: tuple) -> None:
    require(len(a.shape) <= 2 and not any(type(n) is int and n == 0 for n in a.shape[1:]))
    require(target.shape == wanted)
    require(target.dtype.name == "int64")


@composite(F.multi_margin_loss, autocast="float32")
def multi_margin_loss(a, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction="mean"):
    """The decomposition of `multi_margin_loss`. Raises PyTorch's errors where shapes do not fit."""
    require(p in (1, 2))
    require(weight is None or len(weight.shape) == 1)
    _check_margin(a, target, a.shape[:1] if len(a.shape) > 1 else target.shape if target.numel_value == 1 else ())
    x, classes = _rows(a)
    index = reshape(target, (-1, 1))
    apart = ltorch.clamp(margin - ltorch.gather(x, 1, index) + x, 0.0)
    apart = apart if p == 1 else apart * apart
    if weight is not None:
        apart = apart * reshape(ltorch.index_select(weight, 0, reshape(target, (-1,))), (-1, 1))
    own = ltorch.eq(ltorch.arange(classes, device=a.device), index)
    out = ltorch.sum(ltorch.where(own, 0.0, apart), 1) / classes
    return reduced(reshape(out, target.shape), _reduction(reduction, size_average, reduce))


_multi_margin_backward = backward.kernel("multi_margin_loss_backward", "default", lambda g, a, *options: like(a))


@multi_margin_loss.vjp
def _(a, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction="mean"):
    if weight is not None and weight.requires_grad:
        return NotImplemented
    g = yield multi_margin_loss(a, target, p, margin, weight, size_average, reduce, reduction)
    return (
        _multi_margin_backward(
            g, a, target, p, margin, weight, _REDUCTIONS.index(_reduction(reduction, size_average, reduce))
        ),
    )


@composite(F.multilabel_margin_loss, autocast="float32")
def multilabel_margin_loss(a, target, size_average=None, reduce=None, reduction="mean"):
    """The classes that a row names stand before its first -1."""
    _check_margin(a, target, a.shape)
    (x, classes), (target, _) = _rows(a), _rows(target)
    named = ltorch.cumprod(ltorch.to(ltorch.ge(target, 0), dtype=torch.int64), 1)
    index = target * named
    wanted = ltorch.scatter_add(ltorch.zeros_like(index), 1, index, named)
    apart = ltorch.clamp(1.0 - unsqueeze(ltorch.gather(x, 1, index), 2) + unsqueeze(x, 1), 0.0)
    counted = ltorch.logical_and(unsqueeze(ltorch.ne(named, 0), 2), unsqueeze(ltorch.eq(wanted, 0), 1))
    out = ltorch.sum(ltorch.where(counted, apart, 0.0), (1, 2)) / classes
    return reduced(reshape(out, a.shape[:-1]), _reduction(reduction, size_average, reduce))


_multilabel_forward = backward.kernel(
    "multilabel_margin_loss_forward", "default",
    lambda a, target, reduction: (like(a, a.shape[:-1] if reduction == 0 else ()), like(a, target.shape))
)  # fmt: skip
_multilabel_forward.nondifferentiable = (1,)
_multilabel_backward = backward.kernel("multilabel_margin_loss_backward", "default", lambda g, a, *options: like(a))


@multilabel_margin_loss.vjp
def _(a, target, size_average=None, reduce=None, reduction="mean"):
    how = _REDUCTIONS.index(_reduction(reduction, size_average, reduce))
    out, is_target = _multilabel_forward(a, target, how)
    g = yield out
    return (_multilabel_backward(g, a, target, how, is_target),)


# ----------------------------------------------------------------------------------------------------------------
# likelihoods


def _gaussian_shape(a, var) -> tuple | None:
    """The variance's shape as it meets the input, None where it does not fit."""
    if not isinstance(var, TensorProxy) or var.shape == a.shape:
        return a.shape
    if a.shape[:-1] == var.shape:
        return (*var.shape, 1)
    unequal = [m for n, m in zip(a.shape, var.shape, strict=True) if n != m] if len(a.shape) == len(var.shape) else []
    return var.shape if sum(unequal) == 1 else None


@composite(F.gaussian_nll_loss, autocast="cuda:float32")
def gaussian_nll_loss(a, target, var, full=False, eps=1e-6, reduction="mean"):
    """PyTorch refuses a negative variance when it runs."""
    require(reduction in _REDUCTIONS and (isinstance(var, TensorProxy) or var >= 0))
    require(_gaussian_shape(a, var) is not None)
    var = reshape(var, _gaussian_shape(a, var)) if isinstance(var, TensorProxy) else ltorch.full_like(a, var)
    var = holding(var, ltorch.clamp(var, eps))  # PyTorch clamps it behind autograd's back
    difference = a - target
    out = 0.5 * (ltorch.log(var) + difference * difference / var)
    return reduced(out + 0.5 * math.log(2 * math.pi) if full else out, reduction)


@torch_prim(F.ctc_loss, autocast="cpu:float32")
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False):
    """Its derivative is PyTorch's: what the kernel keeps for it has sizes that depend on the lengths' values."""
    require(len(log_probs.shape) in (2, 3) and 0 <= blank < log_probs.shape[-1] and reduction in _REDUCTIONS)
    require(log_probs.dtype in (dtypes.float32, dtypes.float64))
    return like(log_probs, log_probs.shape[1:-1] if reduction == "none" else ())


# ----------------------------------------------------------------------------------------------------------------
# spellings under torch

# (name, its parameters between the tensors and `reduction`, which is a number there, and none where it is not given)
for _name, _parameters in {
    "kl_div": (), "margin_ranking_loss": ("margin",), "hinge_embedding_loss": ("margin",),
    "cosine_embedding_loss": ("margin",),
    "poisson_nll_loss": ("log_input", "full", "eps"), "triplet_margin_loss": ("margin", "p", "eps", "swap"),
    "binary_cross_entropy_with_logits": ("weight", "pos_weight"),
    "ctc_loss": ("input_lengths", "target_lengths", "blank"),
}.items():  # fmt: skip

    def _spelled(*args, symbol=LTORCH[_name], parameters=_parameters, **kwargs):
        tensors = {"margin_ranking_loss": 3, "cosine_embedding_loss": 3, "triplet_margin_loss": 3}.get(symbol.name, 2)
        options = dict(zip((*parameters, "reduction", "zero_infinity"), args[tensors:], strict=False)) | kwargs
        how = options.get("reduction", 0)  # PyTorch's bindings have another default than its functions
        return symbol(*args[:tensors], **options | {"reduction": _REDUCTIONS[how]})

    alias(getattr(torch, _name))(_spelled)

derivatives.composed.set(True, gaussian_nll_loss)
effects.synchronises.add(ltorch.ctc_loss)
for _name in ("ctc_loss", "multi_margin_loss", "multilabel_margin_loss"):
    effects.may_raise.add(LTORCH[_name])
# PyTorch composes it of others, which autocast casts
casts_inside(torch.margin_ranking_loss)
