"""Batching: transform the operations of a function to compute all elements of a batch at once (`vmap`).

Each value is mapped, with the batch as its first dimension, or the same for all elements. Operations without mapped
inputs stay. For the most frequent operations a rule rewrites the call for the batch. An operation without a rule, or
whose rule declines, becomes one operation that `torch.vmap` runs.

Before, for x: f32[3] mapped over 4: `t0 = ltorch.sum(x, 0, False)`. After, with x: f32[4, 3]: `t1 = ltorch.sum(x, 1,
False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, leaves, like, map_structure, proxies_in
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, Symbol, current_recorder, detached, recording
from thunder.errors import MissingImplementationError
from thunder.ops import ltorch
from thunder.ops.infer import as_torch
from thunder.ops.rules import batching, derivatives
from thunder.transforms.derivative import by_formula
from thunder.transforms.levels import write


def batched(
    operations: Iterable[BoundSymbol], moved: dict[Proxy, Proxy], size, randomness: str, recorder: Recorder
) -> dict[Proxy, Proxy]:
    """Records the operations in `recorder`, the current one, for a batch. moved: by mapped value, the value with the
    batch first; returned with those of the operations' results.

    randomness: "same": random operations draw once for all elements; "different": for each; "error": they raise
    RuntimeError. Raises MissingImplementationError where an operation cannot be mapped.
    """
    batch = _Batch(dict(moved), size, randomness, recorder)
    outer, memory = (recorder.context, recorder.location), recorder.memory
    active = memory is not None and memory.active
    if active:
        memory.active = False  # an operation reads what it has read, and not what was written to that since
    try:
        for operation in operations:
            batch.operation(operation)
    finally:
        recorder.context, recorder.location = outer
        if active:
            memory.active = True
    return batch.moved


class _Batch:
    """The batch that operations are written for."""

    def __init__(self, moved: dict[Proxy, Proxy], size, randomness: str, recorder: Recorder):
        self.moved, self.size, self.randomness, self.recorder = moved, size, randomness, recorder
        self.grad = recorder.context.grad_enabled

    def at(self, x):
        """A value, with the batch first where it is mapped."""
        return self.moved.get(x, x) if isinstance(x, Proxy) else x

    def operation(self, operation: BoundSymbol) -> None:
        """Writes an operation for all elements of the mapped dimension, under its own context."""
        recorder = self.recorder
        recorder.location = lambda: operation.location
        if operation.context is not None:
            recorder.context = operation.context.replace(grad_enabled=operation.context.grad_enabled and self.grad)
        # an autograd.Function with a vmap of its own says what that draws
        maps_itself = operation.sym.own_derivative and batching.rule.of(operation.sym) is not None
        random = OpTags.RANDOM_OP in operation.sym.tags and not maps_itself
        if random and self.randomness == "error":
            raise RuntimeError(
                "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
                "'different' randomness flags on vmap or perform "
                "the randomness operation out of vmap"
            )
        if not any(i in self.moved for i in operation.inputs) and not (random and self.randomness == "different"):
            write(recorder, [operation], {})
            return
        result = None if random else self.by_rule(operation)
        if result is None:
            result = self.by_torch(operation)
        if result is not None:
            self.moved |= zip(operation.outputs, proxies_in(result, []), strict=True)

    def by_rule(self, operation: BoundSymbol):
        """The result of the operation's rule, if it has the expected type."""
        rule = batching.elementwise if operation.sym.elementwise else batching.rule.of(operation.sym)
        if rule is None or any(isinstance(p, TensorProxy) for p in proxies_in(operation.kwargs, [])):
            return None
        before = len(self.recorder.bound_symbols)
        result = rule(self, operation)
        if result is not None and self.fits(operation, proxies_in(result, [])):
            return result
        del self.recorder.bound_symbols[before:]
        return None

    def fits(self, operation: BoundSymbol, results: list) -> bool:
        return len(results) == len(operation.outputs) and all(
            isinstance(f, TensorProxy) and f.shape == (self.size, *o.shape) and f.dtype is o.dtype
            for f, o in zip(results, operation.outputs, strict=True)
        )

    def by_torch(self, operation: BoundSymbol):
        """One operation that torch.vmap runs; for an operation that is none of PyTorch's, its batched decomposition."""
        symbol = operation.sym
        if any(
            isinstance(n, NumberProxy) and n.unbacked
            for o in operation.outputs
            if isinstance(o, TensorProxy)
            for n in o.shape
        ):
            raise RuntimeError(
                "vmap: We do not support batching operators that can output dynamic shape. Attempted to vmap over "
                f"{symbol.name}."
            )
        differentiated = any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs)
        if derivatives.formula.of(symbol) and differentiated:
            for sub in by_formula(operation):
                self.operation(sub)
            return None
        if (
            symbol.fn is not None
            and symbol.executor is None
            and not (operation.subsymbols and batching.unknown_to_vmap.holds(operation))
        ):
            mapped = tuple(p in self.moved for p in operation.inputs if isinstance(p, TensorProxy))
            args, kwargs = map_structure(self.at, operation.args), map_structure(self.at, operation.kwargs)
            return mapped_symbol(symbol)(mapped, self.size, self.randomness, args, kwargs)
        if symbol.own_derivative and differentiated:
            return self.with_own_derivative(operation)
        if not operation.subsymbols:
            raise MissingImplementationError(
                f"{symbol.qualified_name} cannot be mapped by vmap: define it by like=, or call it outside of the "
                "mapped function"
            )
        for sub in operation.subsymbols:
            self.operation(sub)
        for old, new in operation.aliases.items():
            if new in self.moved:
                self.moved[old] = self.moved[new]
            else:
                write(self.recorder, [ltorch.detach.bind(new, output=old, context=operation.context)], {})
        return None

    def with_own_derivative(self, operation: BoundSymbol):
        """An autograd.Function for each element: its derivative is the batch of the Function's."""
        symbol, size, randomness = operation.sym, self.size, self.randomness
        # what has a gradient is expanded, which sums the gradients of the elements
        mapped = [p for p in dict.fromkeys(operation.inputs) if p in self.moved or getattr(p, "requires_grad", False)]

        def run(operations, moved: dict) -> dict:
            return batched(operations, moved, size, randomness, current_recorder())

        def results(table: dict) -> Any:
            return map_structure(lambda o: _in_batch(o, table, size) if isinstance(o, TensorProxy) else o, outputs)

        outputs = operation.output

        def decomposition(*values):
            table = run(operation.subsymbols, dict(zip(mapped, values, strict=True)))
            return results(table | {old: table[new] for old, new in operation.aliases.items() if new in table})

        def by(rule: Callable) -> Callable:
            def batched_rule(*values):
                with recording(Recorder(operation.context)) as recorder:
                    steps = rule(*operation.args)
                    result, forward = next(steps), len(recorder.bound_symbols)
                    cotangents = {o: _placeholder(o, recorder) for o in proxies_in(result, []) if o.dtype.category >= 2}
                    try:
                        steps.send(map_structure(lambda o: cotangents.get(o) if isinstance(o, Proxy) else None, result))
                    except StopIteration as done:
                        gradients = done.value
                operations = recorder.bound_symbols
                table = run(operations[:forward], dict(zip(mapped, values, strict=True)))
                batched_result = map_structure(
                    lambda o: _in_batch(o, table, size) if isinstance(o, TensorProxy) else o, result
                )
                received = yield batched_result
                flat = (g for g in leaves(received) if g is not None)
                table |= zip(cotangents.values(), flat, strict=True)
                table = run(operations[forward:], table)
                by_argument = {
                    a: g for a, g in zip(operation.args, gradients, strict=False) if isinstance(g, TensorProxy)
                }
                return tuple(_in_batch(by_argument[p], table, size) if p in by_argument else None for p in mapped)

            return batched_rule

        def meta(*values):
            results = map_structure(lambda o: like(o, (size, *o.shape)) if isinstance(o, TensorProxy) else o, outputs)
            for o in proxies_in(results, []):
                o.requires_grad = False  # until it is recorded with grad
            return results

        name, key = f"vmap_of_{symbol.name}", ("vmap_of", symbol.id, id(operation))
        batched_symbol = Symbol(name, meta, id=key, decomposition=decomposition)
        batched_symbol.tags, batched_symbol.own_derivative = symbol.tags, True
        batched_symbol.nondifferentiable = symbol.nondifferentiable
        if symbol.grad_rule is not None:
            batched_symbol.grad_rule = by(symbol.grad_rule)
        if (rule := derivatives.functional.of(symbol)) is not None:
            derivatives.functional.set(by(rule), batched_symbol)
        return batched_symbol(*(_in_batch(p, self.moved, size) for p in mapped))


def _placeholder(o: TensorProxy, recorder: Recorder) -> TensorProxy:
    placeholder = like(o)
    placeholder.name = recorder.context.names.make()
    return placeholder


def _in_batch(value: TensorProxy, table: dict, size) -> TensorProxy:
    """A value with the batch first, expanded where it is the same for all elements."""
    if value in table:
        return table[value]
    return ltorch.expand(value, (size, *value.shape))


# ---------------------------------------------------------------------------------------------------------------- by
# torch.vmap


_MAPPED: dict[Symbol, Symbol] = {}
_INHERITED = {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.DETACHED, OpTags.VIEW, OpTags.OPAQUE, OpTags.DEVICE_SYNC_OP}


def mapped_symbol(symbol: Symbol) -> Symbol:
    """`vmap_of_X(mapped, size, randomness, args, kwargs)`: X for each element. mapped: for each tensor among the
    arguments, whether its first dimension is the batch."""
    mapped = _MAPPED.get(symbol)
    if mapped is None:
        mapped = _MAPPED[symbol] = _mapped_symbol(symbol)
    return mapped


def _mapped_symbol(symbol: Symbol) -> Symbol:
    """The operation that runs an operation once for each element, by PyTorch's vmap."""

    def run(mapped, size, randomness, args, kwargs):
        values: list[torch.Tensor] = []
        _replaced(mapped, args, kwargs, values.append, torch.Tensor)
        structure: list = []

        def one(_, *values):
            rest = iter(values)
            args_, kwargs_ = _replaced(mapped, args, kwargs, lambda x: next(rest), torch.Tensor)
            leaves, spec = compat.tree_flatten(symbol.fn(*args_, **kwargs_))  # type: ignore[misc]
            structure[:] = [spec, leaves]
            return tuple(x for x in leaves if isinstance(x, torch.Tensor))

        device = values[0].device if values else None
        results = iter(torch.func.vmap(one, randomness=randomness)(torch.empty(size, device=device), *values))
        spec, leaves = structure
        return compat.tree_unflatten([next(results) if isinstance(x, torch.Tensor) else x for x in leaves], spec)

    def meta(mapped, size, randomness, args, kwargs):
        args, kwargs = _replaced(mapped, args, kwargs, lambda x: like(x, x.shape[1:]), TensorProxy)
        with detached():
            out = (symbol.meta or symbol.decomposition)(*args, **kwargs)  # type: ignore[misc]
        return map_structure(lambda x: like(x, (size, *x.shape)) if isinstance(x, TensorProxy) else x, out)

    mapped_form = Symbol(
        f"vmap_of_{symbol.name}",
        meta,
        id=("vmap_of", symbol.id),
        is_prim=True,
        tags=tuple(symbol.tags & _INHERITED),
        fn=run,
    )
    mapped_form.declared_outside = symbol.declared_outside  # its author's rule for vmap may run
    detaches = symbol.detaches
    if detaches is not None:
        mapped_form.detaches = lambda mapped, size, randomness, args, kwargs: detaches(*args, **kwargs)
    derivatives.once_differentiable.set(derivatives.once_differentiable.of(symbol), mapped_form)
    mapped_form.nondifferentiable = symbol.nondifferentiable
    return mapped_form


def _replaced(mapped: tuple, args, kwargs, function: Callable, kind: type) -> tuple:
    """Arguments with `function` applied to the mapped tensors among them."""
    position = iter(mapped)

    def convert(x):
        if not isinstance(x, kind):
            return as_torch(x) if kind is torch.Tensor else x
        return function(x) if next(position) else x

    return map_structure(convert, args), map_structure(convert, kwargs)
