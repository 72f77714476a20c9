"""Guards on many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thunder import compat

compiled: Callable | None = None
"""`check_of` of `thunder/runtime/native/tensor_check.h`, where it is built."""


def tensor_batch_check(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool = False) -> Callable:
    """A function of as many tensors that is True when each has the type, dtype, device, requires_grad and shape (None:
    any size) of its example, and its strides, if asked for.

    The C++ check also compares dispatch keys, so it holds only in the inference and autocast mode it was made in. It
    keeps no tensor alive, and takes none twice: a tensor in two places, as labels that are the input, is checked apart.
    """
    places = {id(t): i for i, t in reversed([*enumerate(tensors)])}
    first, again = [*places.values()][::-1], [i for i, t in enumerate(tensors) if places[id(t)] != i]

    def check_of(places: list[int]) -> Callable:
        operands = [tensors[i] for i in places], [sizes[i] for i in places], strides
        return native_batch_check(*operands) or _python_batch_check(*operands)

    if not again:
        return check_of(first)
    check, rest = check_of(first), tensor_batch_check([tensors[i] for i in again], [sizes[i] for i in again], strides)
    return lambda *tensors_now: check(*[tensors_now[i] for i in first]) and rest(*[tensors_now[i] for i in again])


def native_batch_check(
    tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool = False
) -> Callable | None:
    """The C++ check, ours or PyTorch's; None where there is none or it does not take these tensors: one in two places,
    for example."""
    if compiled is not None:
        ours = compiled(
            tuple(tensors), tuple(map(tuple, sizes)), tuple(tuple(t.stride()) if strides else () for t in tensors)
        )
        if ours is not None and ours(*tensors):
            return ours
    if compat.TensorGuards is None:
        return None
    dims = [t.stride() if strides else [None] * t.dim() for t in tensors]
    try:
        guards = compat.TensorGuards(
            *tensors, dynamic_dims_sizes=[list(s) for s in sizes], dynamic_dims_strides=[list(d) for d in dims]
        )
    except TypeError:
        return None
    return guards.check if guards.check(*tensors) else None


def _python_batch_check(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool):
    """The check in Python: whether tensors have the types, facts and sizes of these."""

    def facts(t: torch.Tensor) -> list:
        return [
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_conj(),
            t.is_neg(),
            compat.unwrap_of(t),
            t.stride() if strides else None,
        ]

    expected = [(type(t), facts(t), s) for t, s in zip(tensors, sizes, strict=True)]

    def check(*tensors_now) -> bool:
        for x, (kind, rest, shape) in zip(tensors_now, expected, strict=True):
            if type(x) is not kind or facts(x) != rest:
                return False
            if len(x.shape) != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
                return False
        return True

    return check
