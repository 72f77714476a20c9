"""Process groups."""

from __future__ import annotations

import torch

from thunder import compat


def distributed_is_used() -> bool:
    """Whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def default_store():
    """The store of the default process group."""
    return compat.store_of_default_group()


def timeout_of(group) -> float:
    """Seconds after which collectives of a process group give up.; where its backend does not say, torch's default"""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", torch.distributed.default_pg_timeout).total_seconds()
