"""`thunder.trace`: traces of functions that are written in thunder's operations, without reading bytecode."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import Context, Names, Recorder, recording
from thunder.core.trace import Trace, TraceInfo
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype
from thunder.transforms.dce import dce

__all__ = ["trace", "proxy_of"]


def proxy_of(x: torch.Tensor, name: str = "") -> TensorProxy:
    """A tensor proxy with the metadata of a tensor."""
    return TensorProxy(
        name,
        shape=tuple(x.shape),
        dtype=from_tensor_dtype(x.dtype),
        device=from_tensor_device(x.device),
        requires_grad=x.requires_grad,
    )


def trace(*, use_dce: bool = True) -> Callable[..., Trace]:
    """Returns a tracer: `thunder.trace()(fn, *args, **kwargs)` is the trace of `fn` for these arguments.

    `fn` runs with proxies in place of tensors, which record the operations. Side effects happen once, during tracing.
    The `python_callable()` of the trace takes the arguments of `fn`; arguments that are not tensors must have the
    values that were traced.

    Args:
        use_dce: If True, operations whose results are not used are removed.
    """

    def run(fn: Callable, *args, **kwargs) -> Trace:
        names = Names()
        leaves, spec = tree_flatten((args, kwargs))
        parameters = _parameter_names(fn, args, kwargs)
        proxies = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf = proxy_of(leaf)
            if isinstance(leaf, Proxy):
                leaf.name = names.claim(leaf.name or (parameters[i] if parameters is not None else f"t_{i}"))
            proxies.append(leaf)
        args, kwargs = tree_unflatten(proxies, spec)
        with recording(Recorder(Context(names))) as recorder:
            output = map_structure(recorder.latest, fn(*args, **kwargs))
        arguments = [p for p in proxies if isinstance(p, Proxy)]
        is_flat = parameters is not None and len(arguments) == len(proxies)
        info = TraceInfo(arguments=None if is_flat else _flattening(fn, proxies, spec))
        traced = Trace("computation", arguments, recorder.bound_symbols, output, names, info=info)
        return dce(traced) if use_dce else traced

    return run


def _flattening(fn: Callable, traced: list, spec) -> Callable[[tuple, dict], list]:
    """`TraceInfo.arguments` of a function. traced: the leaves of the arguments that it was traced with."""

    def flat(args: tuple, kwargs: dict) -> list:
        leaves, structure = tree_flatten((args, kwargs))
        if structure != spec:
            raise TypeError(
                f"the trace of {_name(fn)} takes arguments of the structure that it was traced with, {spec}, and got "
                f"{structure}"
            )
        for old, new in zip(traced, leaves, strict=True):
            if not isinstance(old, Proxy) and old is not new and not (type(old) is type(new) and old == new):
                raise ValueError(f"an argument of {_name(fn)} was {old!r} when it was traced, is {new!r}: trace again")
        return [new for old, new in zip(traced, leaves, strict=True) if isinstance(old, Proxy)]

    return flat


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _parameter_names(fn: Callable, args: tuple, kwargs: dict) -> list[str] | None:
    """The function's own names for its arguments, where each argument is one value."""
    if any(isinstance(a, (tuple, list, dict)) for a in (*args, *kwargs.values())):
        return None
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    names = [n for n, v in bound.arguments.items() if not isinstance(v, (tuple, dict))]
    return names if len(names) == len(args) + len(kwargs) else None
