"""Random operations as functions of uniform numbers from [0, 1), which `draw(shape, device)` gives as float32.

For fusion executors that draw by a seed; the numbers are others than PyTorch's.
"""

from __future__ import annotations

import math

from thunder.core.dtypes import float32
from thunder.core.proxies import TensorProxy
from thunder.ops import ltorch
from thunder.ops.registry import LTORCH
from thunder.ops.rules import kernels


def _between(u: TensorProxy, low: float, high: float):
    return u if (low, high) == (0.0, 1.0) else ltorch.add(ltorch.mul(u, high - low), low)


def _rand(draw, shape, *, device, dtype, generator=None):
    return draw(shape, device) if dtype is float32 else NotImplemented


def _rand_like(draw, a, *, device, dtype, generator=None, memory_format=None):
    return _rand(draw, a.shape, device=device, dtype=dtype) if memory_format is None else NotImplemented


def _uniform(draw, shape, minval=0.0, maxval=1.0, *, device, dtype):
    return _between(draw(shape, device), minval, maxval) if dtype is float32 else NotImplemented


def _uniform_fill(draw, a, low=0.0, high=1.0, *, generator=None):
    return _uniform(draw, a.shape, low, high, device=a.device, dtype=a.dtype)


def _randn(draw, shape, *, device, dtype, generator=None):
    """Box and Muller's numbers: pairs of uniform ones, the first of them from (0, 1]."""
    if dtype is not float32:
        return NotImplemented
    radius = ltorch.sqrt(ltorch.mul(ltorch.log(ltorch.rsub(draw(shape, device), 1.0)), -2.0))
    return ltorch.mul(radius, ltorch.cos(ltorch.mul(draw(shape, device), 2.0 * math.pi)))


def _randn_like(draw, a, *, device, dtype, generator=None, memory_format=None):
    return _randn(draw, a.shape, device=device, dtype=dtype) if memory_format is None else NotImplemented


def _normal_fill(draw, a, mean=0.0, std=1.0, *, generator=None):
    z = _randn_like(draw, a, device=a.device, dtype=a.dtype)
    return z if z is NotImplemented else ltorch.add(ltorch.mul(z, std), mean)


def _bernoulli(draw, a, p=None, *, generator=None):
    if not isinstance(p, float) or not 0.0 <= p <= 1.0:  # probabilities that PyTorch has to look at
        return NotImplemented
    return ltorch.to(ltorch.lt(draw(a.shape, a.device), p), dtype=a.dtype)


def _bernoulli_fill(draw, a, p=0.5, *, generator=None):
    return _bernoulli(draw, a, p)


def _dropout(draw, a, p=0.5, training=True):
    if p == 1.0:
        return NotImplemented
    mask = ltorch.ge(draw(a.shape, a.device), p)
    return ltorch.mul(ltorch.mul(a, mask), 1.0 / (1.0 - p))


for _name, _form in {
    "rand": _rand, "rand_like": _rand_like, "randn": _randn, "randn_like": _randn_like, "uniform": _uniform,
    "bernoulli": _bernoulli, "dropout": _dropout,
    "uniform_fill": _uniform_fill, "normal_fill": _normal_fill, "bernoulli_fill": _bernoulli_fill,
}.items():  # fmt: skip
    kernels.from_uniform.set(_form, LTORCH[_name])
