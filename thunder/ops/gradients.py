"""The contract of gradients: what a derivative gives for the arguments of an operation is checked where it is made,
whoever wrote the derivative.

The rules, and the words of the errors, are those of PyTorch's engine (`validate_outputs` in
torch/csrc/autograd/engine.cpp, and torch/csrc/autograd/python_function.cpp): one gradient, or None, for each argument;
a tensor of the argument's shape, or of one that it was broadcast to, over which the gradient is summed; on its device,
unless it has no dimensions; not complex where the argument, and all that it was computed with, is real.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core.dtypes import COMPLEX
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, proxies_in, same_shape
from thunder.errors import DerivativeError
from thunder.ops import ltorch
from thunder.ops.backward import sum_to


def check_count(who: str, expected: int, gradients: Sequence) -> None:
    """Raises DerivativeError unless there is a gradient for each argument; more of them may be None."""
    if len(gradients) < expected or any(g is not None for g in gradients[expected:]):
        raise DerivativeError(
            f"{who} returned an incorrect number of gradients (expected {expected}, got {len(gradients)})"
        )


def check_kind(who: str, index: int, gradient: Any, kind: type | tuple[type, ...]) -> None:
    """Raises DerivativeError for a gradient that is no tensor."""
    if not isinstance(gradient, kind):
        name = gradient.python_type.__name__ if isinstance(gradient, NumberProxy) else type(gradient).__name__
        raise DerivativeError(f"{who}: expected Variable or None (got {name}) for the gradient at index {index}")


def check_device(who: str, index: int, argument: Any, gradient: Any) -> None:
    """Raises DerivativeError for a gradient on another device, unless it has no dimensions. Both are tensors, of
    PyTorch's or of a trace."""
    if gradient.device != argument.device and len(gradient.shape):
        raise DerivativeError(invalid(who, index) + f"expected device {argument.device} but got {gradient.device}")


def check_real(who: str, index: int, is_real: bool, gradient_is_real: bool) -> None:
    """Raises DerivativeError for a complex gradient of a real argument."""
    if is_real and not gradient_is_real:
        raise DerivativeError(invalid(who, index) + "expected a real gradient but got a complex one")


def fitted(who: str, index: int, argument: TensorProxy, gradient: Any, is_real: bool = True) -> TensorProxy:
    """A gradient as the argument at this index has it: what is more than its shape is summed. Recorded.

    who: the derivative, in errors. is_real: whether nothing complex takes part, so that the gradient of a real argument
    is real. Raises DerivativeError where the gradient is none of this argument.
    """
    check_kind(who, index, gradient, TensorProxy)
    check_device(who, index, argument, gradient)
    check_real(who, index, is_real and argument.dtype.category < COMPLEX, gradient.dtype.category < COMPLEX)
    if gradient.device != argument.device:
        gradient = ltorch.to(gradient, argument.device)
    if same_shape(gradient.shape, argument.shape):
        return gradient
    if not may_be_summed_to(tuple(gradient.shape), tuple(argument.shape)):
        raise DerivativeError(wrong_shape(who, index, gradient.shape, argument.shape))
    return sum_to(gradient, argument.shape)


def invalid(who: str, index: int) -> str:
    return f"{who} returned an invalid gradient at index {index} - "


def wrong_shape(who: str, index: int, got: Sequence, expected: Sequence) -> str:
    return invalid(who, index) + f"got {list(got)} but expected shape compatible with {list(expected)}"


def may_be_summed_to(own_shape: tuple, shape: tuple) -> bool:
    """Whether a tensor of this shape broadcasts to the given one, as far as sizes are known."""
    if len(shape) > len(own_shape):
        return False
    sizes = zip(shape, own_shape[len(own_shape) - len(shape) :], strict=True)
    return all(m == 1 or m == n for m, n in sizes if type(m) is int and type(n) is int)


def is_real(values: Any) -> bool:
    """Whether no tensor among values is complex."""
    return not any(isinstance(p, TensorProxy) and p.dtype.category == COMPLEX for p in proxies_in(values, []))


def is_wanted(value: Any) -> bool:
    """Whether a gradient of a value, or of one inside of a container, goes anywhere."""
    if type(value) is TensorProxy:  # most of them
        return value.requires_grad
    return any(isinstance(p, TensorProxy) and p.requires_grad for p in proxies_in(value, list[Proxy]()))
