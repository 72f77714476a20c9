"""`thunder.core.transforms`: the names by which programs import derivatives. They are not there yet, and say so when they are called."""

from __future__ import annotations

from thunder.errors import MissingImplementationError

__all__ = ["get_grad", "put_grads"]


def _missing(name: str):
    raise MissingImplementationError(f"{name}: derivatives are not part of this version; run the program under torch.no_grad()")


def get_grad(value):
    """The gradient of a value of the trace, inside a grad transform."""
    _missing("get_grad")


def put_grads(values, gradients):
    """Gives values of the trace their gradients, inside a grad transform."""
    _missing("put_grads")
