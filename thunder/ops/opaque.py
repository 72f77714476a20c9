"""Any torch function without a definition here: typed by running it on fake tensors, executed by calling it.

Operators registered with torch.library come the same way; their author gave them a rule for fake tensors.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from thunder.core.proxies import AnyProxy, NumberProxy, TensorProxy, map_structure
from thunder.core.symbol import OpTags, Symbol, user_location
from thunder.errors import CaptureError
from thunder.ops import autocast
from thunder.ops.define import torch_path
from thunder.ops.explain import as_torch
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype, to_torch_device, to_torch_dtype

__all__ = ["symbol_for", "is_opaque"]

_SYMBOLS: dict = {}


def is_opaque(symbol: Symbol) -> bool:
    return OpTags.OPAQUE in symbol.tags


def symbol_for(function) -> Symbol:
    """The opaque operation for a torch function. One symbol per function."""
    symbol = _SYMBOLS.get(function)
    if symbol is None:
        symbol = _SYMBOLS[function] = _make(function)
    return symbol


def _make(function) -> Symbol:
    path = torch_path(function)
    name = path[1] if path else _identifier(function)

    def meta(*args, **kwargs):
        return _typed_by_running(function, name, args, kwargs)

    custom = _custom_namespace(function)
    if custom is not None:
        return Symbol(name, meta, module=custom, id=f"{custom}.{name}", is_prim=True, tags=(OpTags.DONT_DCE,), fn=function)
    made = Symbol(name, meta, module=path[0] if path else None, id=("opaque", name, id(function)), is_prim=True, tags=(OpTags.OPAQUE, OpTags.DONT_DCE), fn=function)
    made.autocast = autocast.OPAQUE.get(name)
    return made


def _custom_namespace(function) -> str | None:
    """`torch.ops.<namespace>` of an operator that somebody registered with torch.library: its author's fake rule types it, so it is not opaque."""
    overloads = getattr(function, "_qualified_op_name", None) or str(getattr(function, "_schema", ""))
    namespace = overloads.partition("::")[0]
    if not namespace or namespace in ("aten", "prims", "prim", "torchvision", "c10d", "_c10d_functional", "quantized"):
        return None
    return f"torch.ops.{namespace}"


def _identifier(function) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):
        name = f"{name.strip('_')}_{getattr(function.__self__, '__name__', 'attribute')}"
    return name if name.isidentifier() else "torch_function"


def _typed_by_running(function, name: str, args: tuple, kwargs: dict):
    mode = FakeTensorMode()
    known: dict[int, TensorProxy] = {}

    def fake(x):
        if isinstance(x, TensorProxy):
            shape = tuple(n.concrete() if isinstance(n, NumberProxy) else n for n in x.shape)
            out = torch.empty(shape, dtype=to_torch_dtype(x.dtype), device=to_torch_device(x.device))
            known[id(out)] = x
            return out
        if isinstance(x, AnyProxy):
            return x.example
        if isinstance(x, torch.Tensor):
            return mode.from_tensor(x)
        return x.concrete() if isinstance(x, NumberProxy) else as_torch(x)

    try:
        with torch._C.DisableTorchFunction(), mode, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            fake_args, fake_kwargs = map_structure(fake, args), map_structure(fake, kwargs)
            keep = (fake_args, fake_kwargs)  # ids in `known` stay valid while these live
            out = function(*fake_args, **fake_kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the shape or value of {name}'s result depends on data",
            location=user_location(),
            remedy="compute it outside of the compiled function and pass it in, or use an operation with a fixed output shape",
        ) from error

    def typed(x):
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) in known:
            return known[id(x)]
        return TensorProxy(shape=tuple(x.shape), dtype=from_tensor_dtype(x.dtype), device=from_tensor_device(x.device))

    del keep
    with torch._C.DisableTorchFunction():
        return map_structure(typed, out)
