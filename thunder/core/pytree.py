"""Nested containers, flattened and put together again: optree, with dataclasses as nodes on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import optree

_NAMESPACE = "thunder"
_WITH_DATACLASSES = "thunder.dataclasses"
_registered: set[type] = set()


def tree_flatten(tree: Any) -> tuple[list, optree.PyTreeSpec]:
    """The leaves of nested tuples, lists, dicts, namedtuples (None is a leaf), and what is needed to put them together
    again."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)  # type: ignore[return-value]


def tree_flatten_with_dataclass(tree: Any) -> tuple[list, optree.PyTreeSpec]:
    """As tree_flatten, with instances of dataclasses flattened as well."""
    _register_dataclasses(tree)
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=_WITH_DATACLASSES)  # type: ignore[return-value]


def tree_unflatten(leaves: Iterable, spec: optree.PyTreeSpec) -> Any:
    return optree.tree_unflatten(spec, leaves)


def tree_map(function: Callable, tree: Any, *rest: Any) -> Any:
    return optree.tree_map(function, tree, *rest, none_is_leaf=True, namespace=_NAMESPACE)


def tree_iter(tree: Any) -> Iterable:
    return optree.tree_iter(tree, none_is_leaf=True, namespace=_NAMESPACE)


def _register_dataclasses(tree: Any) -> None:
    """Makes nodes of the dataclasses in `tree` that are met for the first time."""
    pending = [tree]
    while pending:
        x = pending.pop()
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            _register(type(x))
            pending += [getattr(x, f.name) for f in dataclasses.fields(x)]
        elif isinstance(x, dict):
            pending += x.values()
        elif isinstance(x, (tuple, list)):
            pending += x


def _register(cls: type) -> None:
    """Makes a dataclass a node of pytrees."""
    if cls in _registered or issubclass(cls, (dict, list, tuple)):
        return
    names = tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]

    def flatten(x):
        return tuple(getattr(x, n) for n in names), None, names

    def unflatten(_, children):
        instance = object.__new__(cls)
        for n, child in zip(names, children, strict=True):
            object.__setattr__(instance, n, child)
        return instance

    optree.register_pytree_node(cls, flatten, unflatten, namespace=_WITH_DATACLASSES)
    _registered.add(cls)
