"""Strides in terms of sizes: what kernels for all sizes are made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from thunder.kernels.sizes import Extent, hint, text, tuple_text, value_of

Strides = tuple[int | Extent, ...]


def strides_in_words(
    shape: Sequence[int | Extent], strides: Sequence[int], values: Mapping[str, int], sizes: Sequence[int | Extent],
        unknown: Callable[[int], Extent] | None = None
) -> Strides:  # fmt: skip
    """Strides as multiples of products of sizes, as they are where a tensor is a part of a dense one: a guess, which
    holds for these values, and is checked for others.

    Of dimensions from the fastest to the slowest each begins a multiple of the one before apart; where it does not, the
    one before is a part of a larger one: one of `sizes`, or the multiple of it. unknown: makes a number of its own for
    the stride of a dimension: given where guesses have failed, and used for all but dense dimensions.
    """
    symbolic: list[int | Extent] = list(strides)
    step: int | Extent = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if not strides[d]:
            continue
        if unknown is not None and strides[d] != value_of(step, values):
            symbolic[d] = unknown(d)
            step = symbolic[d] * shape[d]
            continue
        of_sizes = [(n, strides[d] // value_of(n, values)) for n in sizes]
        for candidate in [step, *(n * times for n, times in of_sizes if times)]:
            times, rest = divmod(strides[d], value_of(candidate, values))
            if not rest:
                symbolic[d] = candidate * times
                break
        step = symbolic[d] * shape[d]
    return tuple(symbolic)


def stride_atoms(strides: Strides) -> list[str]:
    """The names of strides that are numbers of their own."""
    atoms = dict.fromkeys(a for n in strides if isinstance(n, Extent) for m in n.terms for a in m)
    return [a.name for a in atoms if a.name.startswith("s")]


def ordered(strides: Sequence[int | Extent]) -> list[int]:
    """Dimensions from the slowest to the fastest, as they were when kernels were made."""
    return sorted(range(len(strides)), key=lambda d: -hint(strides[d]))


def fit(known: Strides, strides: Sequence[int], values: Mapping[str, int]) -> bool:
    """Whether kernels for some strides are right for a tensor. Of strides that are numbers of their own the order
    counts: results are laid out by it."""
    if stride_atoms(known):
        there = [strides[d] for d in ordered(known)]
        if there != sorted(there, reverse=True):
            return False
    return all(value_of(n, values) == s for n, s in zip(known, strides, strict=True))


def fits_text(name: str, known: Strides) -> str:
    """`fit` as an expression of a tensor's name."""
    if not stride_atoms(known):
        return f"{name}.stride() == {tuple_text(known)}"
    return " and ".join(
        [f"{name}.stride() == {tuple_text(known)}", " >= ".join(text(known[d]) for d in ordered(known))]
    )


def ordered_like(shape: Sequence[int | Extent], strides: Sequence[int]) -> Strides:
    """The strides of a dense tensor whose dimensions follow each other in memory as they do with these strides."""
    ordered: list[int | Extent] = [0] * len(shape)
    step: int | Extent = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        ordered[d] = step
        step = step * shape[d]
    return tuple(ordered)
