"""Arguments in PyTorch's spellings, as one form for each operation: what `canonicalize=` takes."""

from __future__ import annotations


def named(args: tuple, kwargs: dict, *names: str) -> tuple[dict, dict]:
    """The arguments that have one of these names, or its place, by name and in this order; and the other keywords."""
    by_position = dict(zip(names, args, strict=False))
    return by_position | {n: kwargs[n] for n in names if n in kwargs}, {
        k: v for k, v in kwargs.items() if k not in names
    }


def packed(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Canonical form of `x.view(2, 3)`, `x.view((2, 3))`: everything after the first argument as one sequence."""
    if len(args) == 2 and isinstance(args[1], (tuple, list)):
        return args if type(args[1]) in (tuple, list) else (args[0], tuple(args[1])), kwargs
    return (args[0], tuple(args[1:])) if len(args) > 1 else args, kwargs


def without_none(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """PyTorch has one form with `rcond` or `tol`, by position or by name, and one with atol= and rtol=."""
    if len(args) > 1 and args[1] is None:
        kwargs, args = {**kwargs, **({"hermitian": args[2]} if len(args) > 2 else {})}, args[:1]
    return args, kwargs
