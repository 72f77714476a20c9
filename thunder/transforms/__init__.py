"""Transforms: each reads a trace and returns another. One file each."""
