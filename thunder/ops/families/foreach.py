"""`torch._foreach_*`: one operation on each tensor of a list, in one call. Each means the elementwise operation of its
name, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.ops import ltorch
from thunder.ops.registry import LTORCH, composite, register_list_inplace
from thunder.ops.rules import derivatives

_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
_BINARY = "add sub mul div clamp_min clamp_max pow lerp"


# PyTorch's, which write to what they compute of the tensors at the same place of their lists
OPTIMIZERS = frozenset(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"))


def _of(x, i: int):
    """What belongs to the i-th tensor."""
    return x[i] if isinstance(x, (tuple, list)) else x


def _define(name: str, each: Callable) -> None:
    """Defines one `_foreach` function and its in-place form. each: the operation on one element of the lists."""
    function, inplace = compat.foreach(name)

    def decomposition(tensors, *rest, **kwargs):
        count = len(tensors if isinstance(tensors, (tuple, list)) else rest[0])
        return tuple(
            each(_of(tensors, i), *(_of(x, i) for x in rest), **{k: _of(v, i) for k, v in kwargs.items()})
            for i in range(count)
        )

    symbol = composite(*[function] if function else (), name=f"_foreach_{name}")(decomposition)
    derivatives.composed.set(True, symbol)
    register_list_inplace(symbol, inplace)


def _operation(name: str):
    def each(a, *rest, **kwargs):
        kwargs = {{"other": "b", "scalar": "b", "scalars": "b"}.get(k, k): v for k, v in kwargs.items()}
        return LTORCH[name](a, *rest, *([kwargs.pop("b")] if "b" in kwargs else ()), **kwargs)

    return each


def _extreme(name: str, of_number: str):
    operations = _operation(name), _operation(of_number)

    def each(a, b):
        return operations[not isinstance(b, TensorProxy)](a, b)

    return each


def _with_value(name: str):
    def each(a, b, c, value=1, scalars=None):
        return LTORCH[name](a, b, c, value=value if scalars is None else scalars)

    return each


for _name in _UNARY.split():
    _define(_name, _operation(_name))
for _name in _BINARY.split():
    _define(_name, _operation(_name))
for _name in ("addcmul", "addcdiv"):
    _define(_name, _with_value(_name))
_define("maximum", _extreme("maximum", "clamp_min"))
_define("minimum", _extreme("minimum", "clamp_max"))
_define("norm", lambda a, ord=2, dtype=None: ltorch.vector_norm(a, ord, dtype=dtype))
