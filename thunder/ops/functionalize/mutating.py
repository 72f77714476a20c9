"""Calls of functions that write to their arguments, and that thunder does not look into: kernels, operators registered
as mutating.

The call becomes one functional operation: `(result, y1) = kernel(x, y)`, after which `y` stands for `y1`. When it runs
it writes to a copy, unless what it writes to has only just been allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from thunder.core.definition import InPlaceForm
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, like, map_structure, proxies_in
from thunder.core.symbol import OpTags, Recorder, Symbol, current_recorder
from thunder.ops.functionalize.inplace import overwrite

_UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


def call_mutating(
    name: str,
    function: Callable,
    args: tuple,
    kwargs: dict,
    written: Sequence[TensorProxy],
    *,
    meta: Callable,
    tags: tuple[OpTags, ...] = (),
    symbol_id=None,
):
    """Records `function(*args, **kwargs)`, which writes to the tensors `written` among its arguments, and returns its
    result.

    meta: types the result. Gradients of what is overwritten go to what it was before, as they do in PyTorch when a
    kernel writes to a tensor behind autograd's back.
    """
    recorder = current_recorder()
    assert recorder is not None, "calls of a program are recorded"
    args, kwargs = map_structure(recorder.latest, args), map_structure(recorder.latest, kwargs)
    targets = list(dict.fromkeys(recorder.latest(w) for w in written))
    flat = _tensors(proxies_in(kwargs, proxies_in(args, [])))
    copied = [not _is_fresh(recorder, t) for t in targets]
    places = [next(i for i, p in enumerate(flat) if p is t) for t in targets]

    def run(*args, **kwargs):
        tensors = _real_tensors((args, kwargs))
        copies = {
            id(tensors[i]): tensors[i].clone() if copy else tensors[i] for i, copy in zip(places, copied, strict=True)
        }

        def own(x):
            return copies.get(id(x), x)

        result = function(*map_structure(own, args), **map_structure(own, kwargs))
        return (result, *(copies[id(tensors[i])] for i in places))

    def typed(*args, **kwargs):
        tensors = _tensors(proxies_in(kwargs, proxies_in(args, [])))
        return (meta(*args, **kwargs), *(like(tensors[i]) for i in places))

    def in_place(*args, **kwargs):
        tensors = _real_tensors((args, kwargs))
        return (function(*args, **kwargs), *(tensors[i] for i in places))

    def overwritten(operation) -> dict:
        tensors = _tensors(proxies_in(operation.kwargs, proxies_in(operation.args, [])))
        return {len(operation.outputs) - len(places) + i: tensors[index] for i, index in enumerate(places)}

    # what runs depends on these
    identity = (symbol_id or ("mutating", name, id(function)), tuple(places), tuple(copied))
    symbol = Symbol(name, typed, id=identity, is_prim=True, tags=tags, fn=run)
    symbol.grad_rule = _passing_through(symbol, targets)
    result, *new = symbol(*args, **kwargs)
    in_place.__name__ = name
    # `thunder.transforms.reinplace` may let it write to the arguments themselves
    symbol.in_place = InPlaceForm(in_place, overwritten)
    for target, value in zip(targets, new, strict=True):
        value.requires_grad = target.requires_grad
        overwrite(target, value)
    return result


def _real_tensors(values) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_structure(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, values)
    return tensors


def _tensors(proxies: list[Proxy]) -> list[Proxy]:
    return [
        p
        for p in proxies
        if isinstance(p, TensorProxy) or isinstance(p, AnyProxy) and isinstance(p.example, torch.Tensor)
    ]


def _is_fresh(recorder: Recorder, target: TensorProxy) -> bool:
    """Whether a tensor was allocated without content, and nothing has read it: there is nothing to keep."""
    for operation in recorder.bound_symbols:
        if any(o is target for o in operation.outputs):
            if operation.sym.name not in _UNWRITTEN:
                return False
        elif any(i is target for i in operation.inputs):
            return False
    return any(o is target for operation in recorder.bound_symbols for o in operation.outputs)


def _passing_through(symbol: Symbol, targets: list[TensorProxy]) -> Callable:
    def rule(*args, **kwargs):
        _, *cotangents = yield symbol(*args, **kwargs)
        by_target = dict(zip(targets, cotangents, strict=True))
        return map_structure(lambda x: by_target.get(x) if isinstance(x, TensorProxy) else None, args)

    return rule
