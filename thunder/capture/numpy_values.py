"""NumPy's numbers and arrays that host calls give, where PyTorch takes them."""

from __future__ import annotations

import numpy
import torch

from thunder.capture import changing, host_lines
from thunder.capture.interface import Capture
from thunder.core.host_calls import HostProxy, call_method
from thunder.core.proxies import map_structure


def as_number(c: Capture, value):
    """A number of NumPy's that a host call gives, as PyTorch takes it: as one of Python's, and one alone."""
    if not (type(value) is HostProxy and issubclass(value.kind, numpy.generic)):
        return value
    if value not in c.known.numbers:
        known = changing.number_of(c, value)
        c.known.numbers[value] = host_lines.run(c, call_method, (value, "item"), pure=True) if known is None else known
    return c.known.numbers[value]


def as_index(c: Capture, value):
    """An array or a number of NumPy's that a host call gives, as an index of a tensor."""
    if not (type(value) is HostProxy and value.kind is numpy.ndarray):
        return as_number(c, value)
    return host_lines.run(c, torch.from_numpy, (value,))


def as_operands(c: Capture, args, kwargs, typed: bool) -> tuple:
    """The arguments of a function of PyTorch's, with numbers in the place of NumPy's. typed: it makes a tensor of data,
    and gets a tensor in the place of an array from outside."""
    if not typed:
        return map_structure(lambda a: as_number(c, a), list(args)), map_structure(lambda a: as_number(c, a), kwargs)
    tensor = changing.tensor_of(c, args[0]) if args else None
    return (args, kwargs) if tensor is None else ([tensor, *args[1:]], {"device": torch.get_default_device(), **kwargs})
