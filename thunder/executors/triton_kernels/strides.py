"""Strides in terms of sizes: what kernels for all sizes are made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.executors.triton_kernels.sizes import Extent, value_of

__all__ = ["strides_in_words", "ordered_like"]


def strides_in_words(
    shape: Sequence[int | Extent], strides: Sequence[int], values: Mapping[str, int], sizes: Sequence[int | Extent]
) -> tuple[int | Extent, ...]:
    """Strides as multiples of products of sizes, as they are where a tensor is a part of a dense one: a guess, which
    holds for these values, and is checked for others.

    Of dimensions from the fastest to the slowest each begins a multiple of the one before apart; where it does not, the
    one before is a part of a larger one: one of `sizes`, or the multiple of it.
    """
    found: list[int | Extent] = list(strides)
    step: int | Extent = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if not strides[d]:
            continue
        candidates = [
            step,
            *(n * (s // value_of(n, values)) for n in sizes if (s := strides[d]) >= value_of(n, values)),
        ]
        for candidate in candidates:
            times, rest = divmod(strides[d], value_of(candidate, values))
            if not rest:
                found[d] = candidate * times
                break
        step = found[d] * shape[d]
    return tuple(found)


def ordered_like(shape: Sequence[int | Extent], strides: Sequence[int]) -> tuple[int | Extent, ...]:
    """The strides of a dense tensor whose dimensions follow each other in memory as they do with these strides."""
    found: list[int | Extent] = [0] * len(shape)
    step: int | Extent = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        found[d] = step
        step = step * shape[d]
    return tuple(found)
