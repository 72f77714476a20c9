"""Broadcasting and type promotion, as PyTorch does them (torch.result_type, torch.broadcast_shapes)."""

from __future__ import annotations

from thunder.core import dtypes
from thunder.core.devices import Device, cpu
from thunder.core.dtypes import COMPLEX, FLOAT, dtype
from thunder.core.proxies import NumberProxy, TensorProxy, same_shape
from thunder.core.symbol import current_recorder

_NUMBER_TYPES = (bool, int, float, complex, NumberProxy)


def is_number(x) -> bool:
    return isinstance(x, _NUMBER_TYPES)


def default_dtype() -> dtype:
    """torch.get_default_dtype() at the place in the program that is being traced."""
    recorder = current_recorder()
    return (recorder.context.default_dtype if recorder is not None else None) or dtypes.float32


def number_dtype(x) -> dtype:
    """The type a Python number brings to a promotion: its category, in the default width."""
    t = x.python_type if isinstance(x, NumberProxy) else type(x)
    if t is float:
        return default_dtype()
    if t is int:
        return dtypes.int64
    if issubclass(t, bool):
        return dtypes.bool8
    return (
        dtypes.complex_of(default_dtype())
        if issubclass(t, complex)
        else default_dtype()
        if issubclass(t, float)
        else dtypes.int64
    )


def _combine(higher: dtype | None, lower: dtype | None) -> dtype | None:
    """`higher` decides unless `lower` is of a higher category."""
    if higher is None or lower is None:
        return higher or lower
    if higher.category == FLOAT and lower.category == COMPLEX:
        return dtypes.complex_of(higher)
    if higher.category >= FLOAT:
        return higher
    if higher.category == dtypes.BOOL or lower.category >= FLOAT:
        return dtypes.promote(higher, lower)
    return higher


def result_type(*operands) -> dtype:
    """The type tensors and numbers meet in: tensors with dimensions decide over 0-dim tensors, those over Python
    numbers, except by category."""
    dimensioned: dtype | None = None
    zero_dim: dtype | None = None
    wrapped: dtype | None = None
    for x in operands:
        if isinstance(x, TensorProxy):
            if x.shape:
                dimensioned = x.dtype if dimensioned is None else dtypes.promote(dimensioned, x.dtype)
            else:
                zero_dim = x.dtype if zero_dim is None else dtypes.promote(zero_dim, x.dtype)
        elif is_number(x):
            d = number_dtype(x)
            wrapped = d if wrapped is None else dtypes.promote(wrapped, d)
    combined = _combine(_combine(dimensioned, zero_dim), wrapped)
    if combined is None:
        raise TypeError("at least one tensor or number is needed to find a result type")
    return combined


def to_float(d: dtype) -> dtype:
    """Floating and complex types as they are; integers and bool become the default type."""
    return d if d.category >= FLOAT else default_dtype()


class Promotion:
    """How an elementwise operation's computation and result types follow from its operands: (computation dtype, result
    dtype) functions."""

    KEEP = staticmethod(lambda d: (d, d))
    INT_TO_FLOAT = staticmethod(lambda d: (to_float(d), to_float(d)))
    BOOL_RESULT = staticmethod(lambda d: (d, dtypes.bool8))
    COMPLEX_TO_REAL = staticmethod(lambda d: (d, dtypes.real_of(d)))
    TO_DOUBLE = staticmethod(
        lambda d: (dtypes.complex128, dtypes.complex128) if d.category == COMPLEX else (dtypes.float64, dtypes.float64)
    )
    ANGLE = staticmethod(lambda d: (to_float(d), dtypes.real_of(to_float(d))))
    BOOL_TO_INT = staticmethod(lambda d: (dtypes.int64, dtypes.int64) if d.category == dtypes.BOOL else (d, d))


def broadcast_shapes(*shapes: tuple) -> tuple:
    """The shape that tensors of these shapes broadcast to. Raises RuntimeError as PyTorch does where they do not."""
    first = shapes[0]
    if all(same_shape(s, first) for s in shapes[1:]):
        return first
    rank = max(map(len, shapes))
    out: list = [1] * rank
    for s in shapes:
        offset = rank - len(s)
        for i, n in enumerate(s):
            m = out[offset + i]
            if m is n or (one := n == 1) is True:
                continue
            if (other_one := m == 1) is True:
                out[offset + i] = n
            elif one is False is other_one:
                if (m != n) is True:
                    raise RuntimeError(
                        f"The size of tensor a ({m}) must match the size of tensor b ({n}) at non-singleton "
                        f"dimension {offset + i}"
                    )
            elif one is False:  # m is 1, or equal to n: PyTorch refuses anything else
                out[offset + i] = n
            elif other_one is not False and (m == n) is not True:
                bool(one)  # raises: which of the two is stretched is data-dependent
    return tuple(out)


def same_device(*tensors: TensorProxy) -> Device:
    """The device tensors compute on together; 0-dim tensors on the CPU go along with any. Raises RuntimeError as
    PyTorch does."""
    device: Device | None = None
    for t in tensors:
        if device is None or (
            device is cpu and device is not t.device and all(not u.shape for u in tensors if u.device is cpu)
        ):
            device = t.device
        elif t.device is not device and not (t.device is cpu and not t.shape):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
                f"{t.device}!"
            )
    assert device is not None, "same_device needs a tensor"
    return device
