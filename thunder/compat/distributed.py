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


def local_tensor(tensor) -> torch.Tensor:
    """The local tensor of a DTensor, by itself: `to_local` gives a view of a parameter's."""
    return tensor._local_tensor


def set_local_tensor(tensor, local: torch.Tensor) -> None:
    """Gives a DTensor another local tensor, of the same shape."""
    tensor._local_tensor = local


def dtensor_like(whole, local: torch.Tensor):
    """A DTensor of another local tensor that lies on the ranks as `whole`, of its shape. `DTensor.from_local` takes 0.2
    ms of the host."""
    spec = whole._spec
    if local.dtype is not whole.dtype:
        return type(whole).from_local(
            local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return type(whole)(local, spec, requires_grad=False)
