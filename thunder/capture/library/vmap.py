"""`vmap` in a captured program: a function mapped over a dimension of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.capture.library.functional import Transformed, flatten, fresh
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import recording
from thunder.ops import LTORCH
from thunder.transforms.batching import batched


def _dims_of(dims, spec, name: str) -> list:
    """One dim or None for each leaf of a structure, from an int, None, or a prefix of the structure."""
    if dims is None or isinstance(dims, int):
        return [dims] * spec.num_leaves
    children = compat.children_of(spec)
    values = list(dims.values()) if isinstance(dims, dict) else list(dims) if isinstance(dims, (tuple, list)) else None
    if (
        values is None
        or spec.is_leaf()
        or len(values) != len(children)
        or (isinstance(dims, dict) and list(dims) != list(spec.context))
    ):
        raise ValueError(f"vmap: {name} is not compatible with the structure of the values: got {dims}")
    return [d for value, child in zip(values, children, strict=True) for d in _dims_of(value, child, name)]


class VMap(Transformed):
    """A function mapped over a dimension of its arguments."""

    maps = True

    def __init__(self, fn: Callable, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error"):
        super().__init__(fn)
        if randomness not in ("error", "different", "same"):
            raise RuntimeError(
                f"Only allowed values for randomness are 'error', 'different', or 'same'. Got {randomness}"
            )
        self.in_dims, self.out_dims, self.randomness = in_dims, out_dims, randomness

    def apply(self, c, args, kwargs):
        if not isinstance(self.in_dims, (int, tuple)):
            raise ValueError(
                "vmap: expected `in_dims` to be int or a (potentially nested) tuple matching the structure of "
                f"inputs, got: {type(self.in_dims)}"
            )
        if not args:
            raise ValueError(
                "vmap: got no inputs. Maybe you forgot to add inputs, or you are trying to vmap over a function with "
                "no inputs"
            )
        outer, spec = flatten(c, tuple(args))
        dims = _dims_of(self.in_dims, spec, "in_dims")
        size, places = _batch_size(outer, dims)
        arguments = [fresh(c, x, grad=False, dim=d) if d is not None else x for x, d in zip(outer, places, strict=True)]
        operations, leaves, out_spec = self.enter(
            c, compat.tree_unflatten(arguments, spec), kwargs, torch.is_grad_enabled()
        )
        if not all(type(x) is TensorProxy for x in leaves):
            raise ValueError("vmap: the function must only return Tensors")
        with recording(c.recorder):
            moved: dict[Proxy, Proxy] = {
                a: x if d == 0 else LTORCH["movedim"](x, d, 0)
                for a, x, d in zip(arguments, outer, places, strict=True)
                if d is not None
            }
            table = batched(operations, moved, size, self.randomness, c.recorder)
            results = [
                placed(x, table, d, size)
                for x, d in zip(leaves, _dims_of(self.out_dims, out_spec, "out_dims"), strict=True)
            ]
        return compat.tree_unflatten(results, out_spec)

    def eager(self, *args, **kwargs):
        return torch.func.vmap(self.fn, self.in_dims, self.out_dims, self.randomness)(*args, **kwargs)


def _batch_size(outer: Sequence, dims: Sequence) -> tuple[Any, list]:
    """The size of the mapped dimension, and where it is in each value: a dim from 0 on, or None."""
    size, places = None, []
    for x, d in zip(outer, dims, strict=True):
        if d is not None:
            if type(x) is not TensorProxy:
                raise ValueError(
                    f"vmap: Got in_dim={d} for an input but the input is of type {type(x).__name__}: only Tensors "
                    "are mapped over; use None for it"
                )
            if not -len(x.shape) <= d < len(x.shape):
                raise ValueError(
                    f"vmap: Got in_dim={d} for some input, but that input is a Tensor of dimensionality {len(x.shape)}"
                )
            d %= len(x.shape)
            if size is not None and size != x.shape[d]:
                raise ValueError(
                    f"vmap: Expected all tensors to have the same size in the mapped dimension, got sizes {size} and "
                    f"{x.shape[d]}"
                )
            size = x.shape[d]
        places.append(d)
    if size is None:
        raise ValueError("vmap: at least one input must be mapped over: in_dims are all None")
    return size, places


def placed(value: TensorProxy, table: dict, dim: int | None, size) -> TensorProxy:
    """A result with its mapped dimension at `dim`."""
    found = table.get(value, value)
    mapped = value in table and found.shape != value.shape
    if dim is None:
        if mapped:
            raise ValueError("vmap: out_dims is None for a result that is mapped over")
        return found
    rank = len(value.shape) + 1
    if not -rank <= dim < rank:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})")
    if not mapped:
        found = LTORCH["expand"](found, (size, *found.shape))
    return found if dim % rank == 0 else LTORCH["movedim"](found, 0, dim)
