"""Dimensions and sizes as PyTorch's functions take them: negative dimensions, sizes as one sequence or one by one,
sizes that stay symbolic."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from thunder.core.definition import Unfit
from thunder.core.proxies import TensorProxy, concrete, proxies_in


def require(fits, what: str = "the arguments do not fit the operation") -> None:
    """Raises Unfit unless the arguments of an operation fit. For meta rules and decompositions."""
    if not fits:
        raise Unfit(what)


def wrap_dim(dim, rank: int) -> int:
    """A dimension counted from the front; a 0-dim tensor has one dimension for this purpose. Raises IndexError as
    PyTorch does."""
    if type(dim) is not int:
        dim = operator.index(concrete(dim))
    rank = rank or 1
    if -rank <= dim < rank:
        return dim + rank if dim < 0 else dim
    raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")


def wrap_dims(dims, rank: int) -> tuple[int, ...]:
    """One dimension or a sequence of them, all different, counted from the front."""
    out = tuple(wrap_dim(d, rank) for d in dims) if isinstance(dims, Sequence) else (wrap_dim(dims, rank),)
    if len(set(out)) != len(out):
        raise RuntimeError("dim appears multiple times in the list of dims")
    return out


def sizes_with_minus_one(sizes: Sequence, total, what: str) -> tuple:
    """`sizes` with the number that one -1 among them stands for, `total` being the number of elements."""
    at = -1
    known = 1
    for i, n in enumerate(sizes):
        if type(n) is int and n < 0:
            if n != -1 or at >= 0:
                raise RuntimeError("only one dimension can be inferred" if n == -1 else f"invalid shape dimension {n}")
            at = i
        else:
            known = known * n
    if at < 0:
        if known is not total and known != total:
            raise RuntimeError(f"shape '{list(sizes)}' is invalid for {what} of size {total}")
        return tuple(sizes)
    if (type(known) is int and known == 0) or total % known != 0:
        raise RuntimeError(f"shape '{list(sizes)}' is invalid for {what} of size {total}")
    out = list(sizes)
    out[at] = total // known
    return tuple(out)


def ceil_div(a, b):
    return (a + b - 1) // b


def numel(shape: tuple):
    return math.prod(shape)


def check_tensor(x, name: str, argument: str = "input", position: int = 1) -> None:
    if not isinstance(x, TensorProxy):
        raise TypeError(f"{name}(): argument '{argument}' (position {position}) must be Tensor, not {type(x).__name__}")


def pair(x, n: int) -> tuple:
    """A number for every one of `n` dimensions, or a sequence of one or n numbers."""
    if not isinstance(x, Sequence):
        return (x,) * n
    return tuple(x) * n if len(x) == 1 else tuple(x)


def along(a: TensorProxy, dim: int, entry) -> tuple:
    """The key for `entry` in one dimension and everything in the others."""
    return (*(slice(None),) * wrap_dim(dim, len(a.shape)), entry)


def is_empty(a: TensorProxy) -> bool:
    """Whether a tensor is known to have no elements."""
    return any(type(n) is int and n == 0 for n in a.shape)


def by_mask(operation) -> bool:
    """Whether an index of a bound symbol is a mask, whose true elements the host counts."""
    return any(isinstance(p, TensorProxy) and p.dtype.category == 0 for p in proxies_in(operation.args[1:], []))
