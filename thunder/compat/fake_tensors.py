"""Fake tensors: PyTorch's operations on shapes alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from thunder import compat
from thunder.compat.names import FAKE_TENSORS


def fake_mode_of_sizes():
    """A FakeTensorMode in which data-dependent sizes are symbols; it has no kernel run on zeros, whose sizes mean
    nothing. Without it such operations are refused."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes long to import

    return compat.FakeTensorMode(
        allow_fallback_kernels=False, shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    )


@contextlib.contextmanager
def symbolic_sizes(values: Mapping[str, int]) -> Iterator[tuple[Mapping[str, Any], Callable[[], bool]]]:
    """A FakeTensorMode in which the named sizes, each at least 2, are symbols of PyTorch's. Yields the symbols by name,
    and a function that says whether nothing was decided by them so far."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    known, sizes = ShapeEnv(duck_shape=False), {}
    with compat.FakeTensorMode(shape_env=known, allow_non_fake_inputs=True), quiet_fake_tensors():
        for name, value in values.items():
            source = ConstantSource(name)
            symbol = known.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            sizes[name] = known.create_symintnode(symbol, hint=value, source=source)
        yield sizes, lambda: not known.guards and not known.deferred_runtime_asserts


@contextlib.contextmanager
def quiet_fake_tensors():
    """PyTorch writes a traceback to its log where an operation refuses fake tensors. Here that is an answer; without
    this it is noise."""
    log = logging.getLogger(FAKE_TENSORS)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def run_on_fakes(function: Callable, args: tuple, kwargs: dict) -> Any:
    """What an operator's fake implementation gives for tensors like these, strides among them; None where it refuses
    them."""
    with compat.FakeTensorMode() as mode, quiet_fake_tensors():
        leaves, spec = compat.tree_flatten((args, kwargs))
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = compat.tree_unflatten(fakes, spec)
        try:
            return function(*args, **kwargs)
        except Exception:  # noqa: BLE001  it typed the program, so that this one depends on the data
            return None
