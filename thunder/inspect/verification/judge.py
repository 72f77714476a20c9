"""The rule of `thunder.verify`, which `thunder.inspect.verify` states: the deviation that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Verdict(NamedTuple):
    """The fields of a `Comparison` that the rule decides."""

    eager: float
    compiled: float
    apart: float
    allowed: float
    agrees: bool | None
    note: str = ""


_MEASURES: tuple[Callable[[torch.Tensor], float], ...] = (
    lambda x: x.pow(2).mean().sqrt().item(),
    lambda x: x.max().item(),
)


def judge(ours: Any, eager: torch.Tensor, reference: Any, perturbed: Any, loose: float = 1.0) -> Verdict:
    """The verdict on one result. reference, perturbed: R and R' of the rule; None where an operation does not run in
    float64, and then eager's result is the reference. loose: a factor on what rounding explains."""
    if not isinstance(ours, torch.Tensor):
        return _different(f"a {type(ours).__name__} in the place of {_kind(eager)}")
    if (ours.shape, ours.dtype, ours.device) != (eager.shape, eager.dtype, eager.device):
        return _different(f"a {_kind(ours)} in the place of {_kind(eager)}")
    if not eager.numel():
        return Verdict(0.0, 0.0, 0.0, 0.0, True)
    note = "" if reference is not None else "there is no float64 result: compared with eager's alone"
    reference = eager if reference is None else reference
    perturbed = reference if perturbed is None else perturbed
    if eager.dtype.is_floating_point or eager.dtype.is_complex:
        return _judge_numbers(ours, eager, reference, perturbed, loose, note)
    return _judge_exact(ours, eager, reference, perturbed, note)


def _kind(x: torch.Tensor) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _different(note: str) -> Verdict:
    return Verdict(0.0, math.inf, math.inf, 0.0, False, note)


def _judge_exact(ours: Any, eager: Any, reference: Any, perturbed: Any, note: str) -> Verdict:
    """Integers and booleans."""
    sure = (eager == reference) & (reference == perturbed)
    wrong = ((ours != eager) & sure).sum().item()
    near = ((ours != eager) & ~sure).sum().item()
    return Verdict(
        0.0, float(wrong), float(wrong + near), 0.0, not wrong, note or (f"{near} near a tie" if near else "")
    )


def _judge_numbers(ours: Any, eager: Any, reference: Any, perturbed: Any, loose: float, note: str) -> Verdict:
    """The verdict on floating-point results, all compared in float64. loose: factor of the allowed deviation. note:
    what the reference lacks, in words; it allows for more."""
    wide = torch.complex128 if eager.dtype.is_complex else torch.float64
    c, e, r, p = (x.detach().to(wide) for x in (ours, eager, reference, perturbed))
    finite = [torch.isfinite(x) for x in (c, e, r, p)]
    odd = ~(finite[0] & finite[1] & finite[2] & finite[3])
    unequal = odd & ~((c == e) | (torch.isnan(c) & torch.isnan(e)))
    lost = unequal & ~finite[0] & finite[1]
    gained = unequal & finite[0] & ~finite[1] & ~finite[2]
    if lost.any() or gained.any():
        return _different("nan or infinity where eager has a number, or the other way round")
    c, e, r, p = (torch.where(odd, 0.0, x) for x in (c, e, r, p))
    spacing = torch.finfo(eager.dtype).eps
    by_eager, by_ours, by_change = (e - r).abs(), (c - r).abs(), (p - r).abs()
    agrees, allowed = True, 0.0
    for size in _MEASURES:
        allowed = loose * (4 * size(by_eager) + 2 * size(by_change) + spacing * size(r.abs()))
        if note:
            allowed += 8 * spacing * size(e.abs())
        agrees &= not size(by_ours) > allowed
    return Verdict(by_eager.max().item(), by_ours.max().item(), (c - e).abs().max().item(), allowed, agrees, note)
