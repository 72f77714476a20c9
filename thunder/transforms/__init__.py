"""Transforms: each reads a trace and returns another. One file each."""

from thunder._lazy import names_from

__getattr__, __dir__ = names_from(__name__)
