"""torch.autocast: its state, and which operators it casts."""

from __future__ import annotations

import contextlib
import functools

import torch

from thunder import compat

AUTOCAST_KINDS = ("cpu", "cuda")


def autocast_state() -> tuple | None:
    """(((device kind, dtype) for each kind that autocast is on for), whether its cache of casts is on); None where it
    is off."""
    kinds = tuple((kind, torch.get_autocast_dtype(kind)) for kind in AUTOCAST_KINDS if torch.is_autocast_enabled(kind))
    return (kinds, torch.is_autocast_cache_enabled()) if kinds else None


def autocast_casts(operator: str, kind: str) -> bool:
    """Whether torch.autocast has a rule for an operator of aten on a kind of device: the lists differ from version to
    version."""
    return compat.has_kernel_for_key(f"aten::{operator}", f"Autocast{kind.upper()}")


def composed(operator: str) -> bool:
    """Whether PyTorch composes an operator of aten of others, which torch.autocast casts: this, too, differs."""
    return compat.has_kernel_for_key(f"aten::{operator}", "CompositeImplicitAutograd")


@functools.cache
def casts_keep_grad_mode() -> bool:
    """Whether torch.autocast casts a parameter again where grad mode is another: before torch 2.11, a cast that was
    made without grad serves with it, and the gradient is lost. Only a program tells."""
    with compat.probing(grad=True), autocast_on((("cpu", torch.bfloat16),), cached=True):
        weight = torch.ones(1, 1, dtype=torch.float32, device="cpu", requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


def autocast_nesting() -> int:
    """How many `with torch.autocast(...)` are entered."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def autocast_off():
    """Autocast is off in the block, for every kind of device."""
    with compat.modes_restored():
        for kind in AUTOCAST_KINDS:
            torch.set_autocast_enabled(kind, False)
        yield


@contextlib.contextmanager
def autocast_on(kinds: tuple, cached: bool = False):
    """torch.autocast for ((device kind, dtype), ...), whether there is such a device or not. cached: with its cache of
    casts, which is not emptied at the end."""
    with compat.modes_restored():
        with compat.DisableTorchFunction():
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(cached)
            for kind, dtype in kinds:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtype)
        yield
