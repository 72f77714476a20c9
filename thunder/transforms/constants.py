"""Constants: compute values that depend on no argument once, in the first call, and keep them with the program.

Before: `t0 = torch.ones((4, 4))`, `m = torch.tril(t0)`, `t2 = torch.mul(x, m)`. After: `m = constant()`, `t2 =
torch.mul(x, m)`; `constant` holds `m`, and its decomposition is printed below it.

Fused kernels compute such values in registers, so the pass takes operations that PyTorch runs. A value that the program
returns, writes to, or hands to the user's code needs memory of its own in each call. Constants that share memory with
such a value are computed in each call as well, and so are those above `LARGEST` bytes in all. So are tensors filled
with one number: they would take memory between calls to save one write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.core.proxies import Proxy, TensorProxy, has_numbers, leaves, like, proxies_in
from thunder.core.regions import leading_to
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace, TraceInfo, TraceTag
from thunder.ops import prims
from thunder.transforms.dce import dce
from thunder.transforms.phases import marked

LARGEST = 1 << 26  # bytes of all constants of a program


class Constant:
    """A function without arguments that computes a value in its first call and returns the same value in all calls.
    Under a dispatch mode, which may see or change what is computed, it computes the value in each call.

    trace: the program of the value. compute: the function of that program, where it was read from a file.
    """

    def __init__(self, trace: Trace | None, compute: Callable[[], Any] | None = None):
        self.trace, self._compute, self._value = trace, compute, None

    def __call__(self) -> Any:
        if compat.dispatch_modes():
            return self._computed()
        if self._value is None:
            self._value = self._computed()
        return self._value

    def _computed(self) -> Any:
        compute = self._compute or self.trace.python_callable()  # type: ignore[union-attr]
        with compat.without_function_modes(), torch.inference_mode(False), torch.no_grad():
            return compute()


def constants(trace: Trace) -> Trace:
    """The trace with a `constant` in the place of each value that does not depend on arguments."""
    operations = trace.bound_symbols
    producers: dict[Proxy, BoundSymbol] = {}
    for b in operations:
        if all(i in producers for i in b.inputs) and _is_pure(b):
            producers |= dict.fromkeys(b.outputs, b)
    if not producers:
        return trace
    values = _values(trace, producers)
    if not values or sum(map(nbytes, values)) > LARGEST:
        return trace
    constant_symbols = [_constant(value, trace, [*dict.fromkeys(producers.values())]) for value in values]
    computed = {id(producers[value]) for value in values}
    return dce(trace.replace(bound_symbols=[*constant_symbols, *(b for b in operations if id(b) not in computed)]))


def _is_pure(operation: BoundSymbol) -> bool:
    """Whether PyTorch computes tensors of known sizes, and nothing else happens."""
    return (
        _is_plain(operation.sym)
        and operation.sym.executor is not None
        and operation.sym.executor.name == "torch"
        and operation.sym.tags.isdisjoint(_EXCLUDED)
        and bool(operation.outputs)
        and all(type(o) is TensorProxy and o.device.type != "meta" for o in operation.outputs)
        and not has_numbers((operation.args, operation.kwargs, operation.output))
        and not any(isinstance(x, torch.Tensor) for x in leaves((operation.args, operation.kwargs)))
    )


def _handed_on(operations: Sequence[BoundSymbol], returned: Any) -> set[Proxy]:
    """The values in whose memory a result of a program is, or that it writes to, or that others may keep."""
    bases = alias_bases(operations, maybe=True)
    handed_on = {bases[p] for p in proxies_in(returned, [])}
    for b in operations:
        if not EFFECTS.isdisjoint(b.sym.tags) or not _is_plain(b.sym):
            handed_on.update(bases[i] for i in b.inputs)
    return handed_on


def _is_plain(symbol: Symbol) -> bool:
    """Whether it is an operation of PyTorch's own, or a region of thunder's, which hands no argument on but as a
    view."""
    module = (symbol.module or "").split(".")[0]
    return not symbol.declared_outside and (symbol.is_fusion or module in ("torch", "Tensor", "ltorch"))


_EXCLUDED = EFFECTS | {OpTags.RANDOM_OP, OpTags.DECISION}


def _values(trace: Trace, producers: dict[Proxy, BoundSymbol]) -> list[TensorProxy]:
    """The values that other operations read, or that are saved, and that may be the same tensor in each call."""
    bases = alias_bases(trace.bound_symbols, maybe=True)
    returned, saved = trace.output, list[Proxy]()
    if TraceTag.AUGMENTED_FORWARD in trace.tags:
        returned, saved = trace.output[0], proxies_in(trace.output[1], [])
    exposed = {bases[p] for p in _handed_on(trace.bound_symbols, returned)}
    if trace.info.cut is not None:
        backward = trace.info.cut.backward
        names = {p.name for p in _handed_on(backward.bound_symbols, backward.output)}
        exposed |= {bases[p] for p in saved if p.name in names}
    read = {*saved, *(i for b in trace.bound_symbols if not any(o in producers for o in b.outputs) for i in b.inputs)}
    values = [o for o, b in producers.items() if o in read and not any(bases[x] in exposed for x in b.outputs)]
    return [o for o in values if isinstance(o, TensorProxy) and not _is_filled(producers[o])]


def _is_filled(operation: BoundSymbol) -> bool:
    return operation.primitive is not None and operation.primitive.sym is prims.full


def _constant(value: TensorProxy, trace: Trace, operations: list[BoundSymbol]) -> BoundSymbol:
    program = trace.replace(
        name="constant", args=(), output=value, provenance="", tags=(), info=TraceInfo(),
        bound_symbols=leading_to(operations, [value], lambda _: False),
    )  # fmt: skip
    symbol = Symbol("constant", lambda: like(value), is_prim=True, fn=Constant(program))
    (last,) = marked(program.bound_symbols[-1:], 0)  # it stands before all phases
    constant = BoundSymbol(symbol, (), {}, value, context=last.context, location=last.location)
    return constant.replace(subsymbols=program.bound_symbols)
