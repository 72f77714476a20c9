"""NumPy's numbers and arrays that host calls give, where PyTorch takes them."""

from __future__ import annotations

import numpy
import torch

from thunder.capture import host_lines
from thunder.core.host_calls import HostProxy, call_method


def as_number(c, value):
    """A number of NumPy's that a host call gives, as PyTorch takes it: as one of Python's."""
    found = type(value) is HostProxy and issubclass(value.kind, numpy.generic)
    return host_lines.run(c, call_method, (value, "item"), pure=True) if found else value


def as_index(c, value):
    """An array or a number of NumPy's that a host call gives, as an index of a tensor."""
    is_array = type(value) is HostProxy and value.kind is numpy.ndarray
    return host_lines.run(c, torch.from_numpy, (value,)) if is_array else as_number(c, value)


def own_arrays(c, result):
    """Arrays that native code has made for a program which gives them to host code: made anew by each call, as such
    code may change them."""
    if type(result) in (tuple, list):
        return type(result)(own_arrays(c, x) for x in result)
    outside = (array for array, _ in c.outside.arrays.values())
    if type(result) is not numpy.ndarray or any(numpy.may_share_memory(result, array) for array in outside):
        return result
    content = result.copy()
    content.flags.writeable = False
    return host_lines.run(c, numpy.array, (content,))
