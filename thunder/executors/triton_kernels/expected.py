"""The strides that inputs of regions will have, so that kernels are compiled for them before a program runs.

What the rules of `layout.py` know is followed through the program, from the strides of the captured call. PyTorch
alone knows how its other operations lay out their results: these are taken to have the order of an operand. Where
that is wrong, a region is compiled again when it runs, and the call waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.kernels.index import strides_of
from thunder.kernels.layout import (
    CHANNELS_LAST,
    Tensors,
    channels_last_strides,
    elementwise_strides,
    follow,
    has_channels_last,
)
from thunder.kernels.lower import is_product, primitives
from thunder.ops.layout import is_dense, padded_strides


class _Expected(Tensors):
    """Tensors without memory, as a program's values are expected to lie. known: strides by name, of values that are
    not row-major, and of arguments."""

    def __init__(self, trace: Trace, known: Mapping[str, tuple]):
        super().__init__(trace.info.padded, trace.bound_symbols)
        self._known = known

    def __missing__(self, p: TensorProxy) -> torch.Tensor:
        shape = self.shape(p)
        usual = padded_strides(shape, p.dtype.bytes) if p in self.padded else strides_of(shape)
        self.make(p, self._known.get(p.name, usual))
        return self[p]


def expected_strides(trace: Trace, known: dict[str, tuple], kind: type[Any]) -> Iterator[tuple[Any, tuple]]:
    """The regions of a kind in a program that runs, in order, with the strides of their inputs. known: strides by name,
    of arguments; those of the program's values that are not row-major are added."""
    values = _Expected(trace, known)
    with compat.DisableTorchFunction(), torch.no_grad():
        for operation in trace.bound_symbols:
            region = operation.sym.fn
            if isinstance(region, kind) and not region.region.numbers:
                strides = tuple(values[p].stride() for p in operation.inputs)  # type: ignore[index]
                yield region, strides
                for o, strides_of_output in zip(operation.outputs, region.layout(strides), strict=True):
                    values.make(o, strides_of_output)  # type: ignore[arg-type]
                continue
            if isinstance(region, kind):
                yield region, region.usual_strides()
            with contextlib.suppress(Exception):  # it is a guess
                if not _is_followed(operation, values):
                    _guess(operation, values)
                values.pad(operation)
    known |= {p.name: s for p, t in values.items() if (s := t.stride()) != strides_of(tuple(t.shape))}


def _is_followed(operation: BoundSymbol, values: _Expected) -> bool:
    """Follows an operation by the rules. A view of strides that were guessed wrong may be impossible."""
    try:
        return follow(operation, values)
    except (RuntimeError, ValueError):
        return False


def _guess(operation: BoundSymbol, values: _Expected) -> None:
    """Results of other operations than matrix products have channels last where an operand has. A product is row-major
    otherwise, and others lie as an operand of their shape does; attention for autograd, which has several results, is
    no product."""
    operands = [values[i] for i in operation.inputs if isinstance(i, TensorProxy)]
    last = any(map(has_channels_last, operands)) and not any(map(is_product, primitives(operation)))
    for o in operation.outputs:
        shape = values.shape(o) if isinstance(o, TensorProxy) else ()
        if last and len(shape) in CHANNELS_LAST:
            values.make(o, channels_last_strides(shape))
        elif len(shape) > 2 and (len(operation.outputs) > 1 or OpTags.MATMUL_OP not in operation.sym.tags):
            like = next((t for t in operands if tuple(t.shape) == shape), None)
            if like is not None:
                values.make(o, like.stride() if is_dense(like) else elementwise_strides(shape, [like]))
