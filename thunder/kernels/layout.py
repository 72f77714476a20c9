"""How PyTorch lays out in memory what a region computes.

Views run on meta tensors; for elementwise operations, joins and what is written into new memory the rules are here.
PyTorch's functions for meta tensors know them as well, but they are written in Python, and the first call of one
imports Dynamo, which takes as long as all the rest of a compilation. A region with other operations runs on fake
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

import torch

from thunder import compat
from thunder.analysis.aliases import alias_bases
from thunder.core.devices import Device
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, number_value
from thunder.core.regions import Region
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.kernels.index import strides_of
from thunder.kernels.lower import is_elementwise, is_primitive
from thunder.ops.families.indexing import indexed
from thunder.ops.infer import run_line
from thunder.ops.layout import is_dense, padded_strides
from thunder.ops.rules import kernels
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


class Tensors(dict[Proxy, torch.Tensor]):
    """What values of operations are. seen: the value of a size that stays symbolic. padded, bases: values whose rows
    are apart, and what all views are of."""

    def __init__(
        self,
        padded: Set[Proxy],
        operations: Sequence[BoundSymbol],
        seen: Callable[[NumberProxy], int] = number_value,
    ):
        super().__init__()
        self.seen, self.padded = seen, padded
        self.bases = alias_bases(operations, maybe=True) if padded else {}

    def shape(self, p: TensorProxy) -> tuple[int, ...]:
        return tuple(self.seen(n) if isinstance(n, NumberProxy) else n for n in p.shape)

    def make(self, p: TensorProxy, strides: tuple, device: str | torch.device = "meta") -> None:
        self[p] = torch.empty_strided(self.shape(p), strides, dtype=to_torch_dtype(p.dtype), device=device)

    def pad(self, operation: BoundSymbol) -> bool:
        """Sets the rows of what an operation makes apart where they are padded."""
        for o in operation.outputs if self.padded else ():
            if o in self.padded:
                self.make(o, padded_strides(self.shape(o), o.dtype.bytes), self[o].device)
        return True


def layout_of(
    region: Region, strides: Sequence[tuple], fakes: bool = True, seen: Callable[[NumberProxy], int] = number_value
) -> list[tuple]:
    """The strides of a region's outputs, for inputs of these strides; row-major ones for outputs whose elements overlap
    or have gaps, and, without `fakes`, where no rule tells. seen: values of sizes that stay symbolic."""
    with compat.DisableTorchFunction(), torch.no_grad():
        values = Tensors(region.padded, region.bound_symbols, seen)
        for p, s in zip(_tensors(region.inputs), strides, strict=True):
            values.make(p, s)
        if not all(follow(operation, values) and values.pad(operation) for operation in region.bound_symbols):
            if not fakes:
                return [strides_of(values.shape(o)) for o in _tensors(region.outputs)]
            with compat.FakeTensorMode():
                for p, s in zip(_tensors(region.inputs), strides, strict=True):
                    values.make(p, s, to_torch_device(p.device))
                for operation in region.bound_symbols:
                    run_line(operation, values, seen)
                    values.pad(operation)
    return [_of_result(o, values) for o in region.outputs]


def _tensors(proxies: Sequence[Proxy]) -> list[TensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy)]


def follow(operation: BoundSymbol, values: Tensors) -> bool:
    """Adds what an operation makes to `values`; False where no rule says how it is laid out."""
    symbol = operation.sym
    if OpTags.VIEW in symbol.tags and sum(isinstance(i, TensorProxy) for i in operation.inputs) == 1:
        run_line(operation, values, values.seen)
        return True
    if kernels.layout.of(symbol) == "by argument" and (form := operation.kwargs.get("memory_format")) in _STRIDES:
        (out,) = operation.outputs
        values.make(out, _STRIDES[form](values.shape(out)))
        return True
    if _is_cast(operation) or kernels.layout.of(symbol) in ("preserved", "by argument"):
        (out,), (source, *_) = operation.outputs, operation.inputs
        like = values[source]
        # of a meta tensor, empty_like gives dimensions of size 1 other strides than of a real one
        values.make(out, like.stride() if is_dense(like) else torch.empty_like(like).stride())
        return True
    if kernels.layout.of(symbol) == "row-major" or (
        OpTags.REDUCTION_OP in symbol.tags and kernels.layout.of(symbol) == "as operands"
    ):
        for o in operation.outputs:
            values.make(o, strides_of(values.shape(o)))
        return True
    if (symbol.fn is None or kernels.layout.of(symbol) == "as decomposition") and not is_primitive(operation):
        return all(follow(sub, values) for sub in operation.subsymbols) and all(
            _named(old, new, values) for old, new in operation.aliases.items()
        )
    is_formatted = kernels.layout.of(symbol) in _FORMATS
    if len(operation.outputs) != 1 and not is_formatted:
        return False
    strides = _strides_by_operands(operation, values)
    for o in operation.outputs if strides is not None else ():
        values.make(o, strides)
    return strides is not None


_FORMATS: dict[str, slice] = {"memory format": slice(None), "memory format of the second": slice(1, 2)}


def _strides_by_operands(operation: BoundSymbol, values: Tensors) -> tuple | None:
    """The strides of an operation's one result, by those of its operands; None where no rule says."""
    symbol, shape = operation.sym, values.shape(operation.outputs[0])
    operands = [values[i] for i in operation.inputs if isinstance(i, TensorProxy)]
    if kernels.layout.of(symbol) == "second operand first":
        operands.reverse()
    if (those := _FORMATS.get(kernels.layout.of(symbol))) is not None:
        return _in_memory_format(shape, operands[those])
    if len(shape) < 2:
        return strides_of(shape)
    if symbol.id == "prims.index":
        return _indexed_strides(shape, operands[0], [None if i is None else values[i] for i in operation.args[1]])
    return elementwise_strides(shape, operands, _converts_numbers(operation)) if _elementwise(operation) else None


def channels_last_strides(shape: Sequence[int]) -> tuple:
    """Those of an image (N, C, H, W) or a volume (N, C, D, H, W) with channels last in memory."""
    _, channels, *pixels = shape
    return (channels * math.prod(pixels), 1, *(channels * s for s in strides_of(pixels)))


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""

_STRIDES = {torch.contiguous_format: strides_of} | dict.fromkeys(CHANNELS_LAST.values(), channels_last_strides)


def _named(old: Proxy, new, values: dict) -> bool:
    if new in values:
        values[old] = values[new]
    return new in values


def _is_cast(operation: BoundSymbol) -> bool:
    """A conversion of the type alone."""
    operations = operation.subsymbols if not is_primitive(operation) else (operation,)
    return (
        len(operations) == 1
        and operations[0].sym.id == "prims.convert_element_type"
        and not any(isinstance(a, Device) for a in (*operation.args, *operation.kwargs.values()))
    )


def _is_row_major_format(t: torch.Tensor) -> bool:
    """Whether PyTorch surely does not take a tensor for one with channels last."""
    return t.dim() not in (4, 5) or t.shape[1] > 1 and t.stride(1) != 1


def _in_memory_format(shape: Sequence[int], operands: Sequence[torch.Tensor]) -> tuple | None:
    """Row-major strides where an operand surely is, those of channels last where all surely are, else None."""
    if any(_is_row_major_format(o) for o in operands):
        return strides_of(shape)
    return channels_last_strides(shape) if all(map(has_channels_last, operands)) else None


def has_channels_last(t: torch.Tensor) -> bool:
    """Whether PyTorch surely takes a tensor for one with channels last."""
    form = CHANNELS_LAST.get(t.dim())
    return form is not None and t.is_contiguous(memory_format=form) and not t.is_contiguous()


def _elementwise(operation: BoundSymbol) -> bool:
    """Whether all that an operation is made of computes elements from those at the same place, broadcast."""
    if is_primitive(operation):
        return is_elementwise(operation) or operation.sym.id in (
            "prims.convert_element_type",
            "prims.full",
            "prims.broadcast_in_dim",
        )
    operations, aliases = operation.subsymbols, operation.aliases
    return (
        bool(operations)
        and not aliases
        and kernels.layout.of(operation.sym) != "own"
        and all(map(_elementwise, operations))
    )


def _converts_numbers(operation: BoundSymbol) -> bool:
    """Whether PyTorch makes a tensor of a number among an operation's arguments."""
    return bool(kernels.converts_numbers.of(operation.sym)) and any(
        type(a) in (bool, int, float) or isinstance(a, NumberProxy) for a in operation.args
    )


def elementwise_strides(shape: Sequence[int], operands: Sequence[torch.Tensor], numbers: bool = False) -> tuple:
    """The strides that PyTorch's TensorIterator gives the result of an elementwise operation. numbers: one of its
    operands is a number that PyTorch makes a tensor of.

    Where all operands have the shape of the result and lie alike, so does the result. Otherwise the first operand that
    decides says the order of dimensions: those of size 1 have other strides then.
    """
    if not operands:
        return strides_of(shape)
    if not numbers and all(tuple(o.shape) == tuple(shape) for o in operands):
        if all(o.is_contiguous() for o in operands):
            return strides_of(shape)
        if is_dense(operands[0]) and all(o.stride() == operands[0].stride() for o in operands):
            return operands[0].stride()
    steps = [
        [0] * (len(shape) - o.dim())
        + [0 if n == 1 != m else s for n, m, s in zip(o.shape, shape[len(shape) - o.dim() :], o.stride(), strict=True)]
        for o in operands
    ]
    return _in_order(shape, _order(shape, steps))


def _indexed_strides(shape: Sequence[int], a: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple:
    """Those of elements at index tensors: of an elementwise operation of the tensor and the indices, each as large as
    the result."""
    where, first, count = indexed(indices)
    steps_left = [step for d, step in enumerate(a.stride()) if d not in where]
    steps = [[*steps_left[:first], *[0] * count, *steps_left[first:]]]
    for i in (indices[d] for d in where):
        own = [0 if n == 1 else step for n, step in zip(i.shape, i.stride(), strict=True)]
        steps.append([*[0] * (first + count - len(own)), *own, *[0] * (len(shape) - first - count)])
    return _in_order(shape, _order(shape, steps))


def _order(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions from the fastest to the slowest: an insertion sort, in which dimensions that no operand decides on
    stay as they are."""

    def slower(a: int, b: int) -> int:
        """1 where dimension `a`, which comes first, is slower than `b`; -1 where it is faster."""
        for s in steps:
            if s[a] and s[b]:
                if s[a] != s[b]:
                    return 1 if s[a] > s[b] else -1
                if shape[a] > shape[b]:
                    return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        at = i
        for j in range(i - 1, -1, -1):
            decided = slower(order[j], order[at])
            if decided > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif decided < 0:
                break
    return order


def _in_order(shape: Sequence[int], order: Sequence[int]) -> tuple:
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


def _of_result(value: Proxy, values: Tensors) -> tuple:
    tensor, base = values[value], values.bases.get(value, value)
    padded = value in values.padded or base in values.padded and tensor.numel() == values[base].numel()
    return tensor.stride() if padded or is_dense(tensor) else strides_of(tensor.shape)
