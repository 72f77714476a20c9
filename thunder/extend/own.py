"""Passes and rules of thunder's own, which are found, and pickled, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FINDERS: dict[type, Callable[[str], Any]] = {}
"""By class, the function that finds one by its name; `thunder.pipeline`, which makes the list of passes, fills it."""


def finder_of(one: Any) -> Callable[[str], Any] | None:
    """The function that finds a pass or a rule by its name; None where it is not thunder's own."""
    find = FINDERS.get(type(one))
    return find if find is not None and find(one.name) is one else None
