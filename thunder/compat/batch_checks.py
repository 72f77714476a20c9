"""Guards on many tensors in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thunder import compat

compiled: Callable | None = None
"""`check_of` of `thunder/runtime/native/tensor_check.h`, where it is built."""


def tensor_batch_check(
    tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool | Sequence[bool] = False
) -> Callable:
    """A function of as many tensors that is True when each has the type, dtype, device, requires_grad and shape (None:
    any size) of its example, and its strides, if wanted: of all tensors, or by tensor.

    The C++ check also compares dispatch keys, so it holds only in the inference and autocast mode it was made in. It
    keeps no tensor alive, and takes none twice: a tensor in two places, as labels that are the input, is checked apart.
    """
    with_strides = _of_each(strides, tensors)
    places = {id(t): i for i, t in reversed([*enumerate(tensors)])}
    first, again = [*places.values()][::-1], [i for i, t in enumerate(tensors) if places[id(t)] != i]

    def check_of(places: list[int]) -> Callable:
        operands = [tensors[i] for i in places], [sizes[i] for i in places], [with_strides[i] for i in places]
        return native_batch_check(*operands) or _python_batch_check(*operands)

    if not again:
        return check_of(first)
    others = [tensors[i] for i in again], [sizes[i] for i in again], [with_strides[i] for i in again]
    check, rest = check_of(first), tensor_batch_check(*others)
    return lambda *tensors_now: check(*[tensors_now[i] for i in first]) and rest(*[tensors_now[i] for i in again])


def _of_each(strides: bool | Sequence[bool], tensors: Sequence[torch.Tensor]) -> Sequence[bool]:
    return [strides] * len(tensors) if isinstance(strides, bool) else strides


def native_batch_check(
    tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: bool | Sequence[bool] = False
) -> Callable | None:
    """The C++ check, ours or PyTorch's; None where there is none or it does not take these tensors: one in two places,
    for example."""
    examples = [*zip(tensors, _of_each(strides, tensors), strict=True)]
    if compiled is not None:
        strides_of_each = tuple(tuple(t.stride()) if has_strides else () for t, has_strides in examples)
        ours = compiled(tuple(tensors), tuple(map(tuple, sizes)), strides_of_each)
        if ours is not None and ours(*tensors):
            return ours
    if compat.TensorGuards is None:
        return None
    dims = [t.stride() if has_strides else [None] * t.dim() for t, has_strides in examples]
    try:
        guards = compat.TensorGuards(
            *tensors, dynamic_dims_sizes=[list(s) for s in sizes], dynamic_dims_strides=[list(d) for d in dims]
        )
    except TypeError:
        return None
    return guards.check if guards.check(*tensors) else None


def _python_batch_check(tensors: Sequence[torch.Tensor], sizes: Sequence[Sequence], strides: Sequence[bool]):
    """The check in Python: whether tensors have the types, facts and sizes of these."""

    def facts(t: torch.Tensor, has_strides: bool) -> list:
        return [
            t.dtype,
            t.device,
            t.requires_grad,
            t.is_conj(),
            t.is_neg(),
            compat.unwrap_of(t),
            t.stride() if has_strides else None,
        ]

    expected = [(type(t), facts(t, a), s, a) for t, s, a in zip(tensors, sizes, strides, strict=True)]

    def check(*tensors_now) -> bool:
        for x, (kind, rest, shape, has_strides) in zip(tensors_now, expected, strict=True):
            if type(x) is not kind or facts(x, has_strides) != rest:
                return False
            if len(x.shape) != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
                return False
        return True

    return check
