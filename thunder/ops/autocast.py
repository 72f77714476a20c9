"""Autocast: what torch.autocast does to the arguments of an operation, written out as casts."""

from __future__ import annotations

__all__ = ["policy"]


def policy(state: tuple):
    """The cast that `torch.autocast` in this state makes of an operation's arguments. state: ((device kind, torch dtype), ...)."""
    raise NotImplementedError(state)
