"""Common subexpression elimination."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from thunder.analysis.aliases import alias_bases
from thunder.core.proxies import TensorProxy, numbers_in
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags
from thunder.core.trace import Trace

_NEVER = {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE}


def cse(trace: Trace) -> Trace:
    """Computes equal expressions once. Meant for regions of a fusion executor: operations that PyTorch runs one by one
    are left as the user wrote them.

    Before: `t0 = sin(x)`, `t1 = sin(x)`, `t2 = add(t0, t1)`. After: `t0 = sin(x)`, `t2 = add(t0, t0)`.
    """
    seen: dict = {}

    def once(operation: BoundSymbol, out: Rewriter) -> None:
        first = seen.setdefault(operation.rhs, operation) if _NEVER.isdisjoint(operation.sym.tags) else operation
        if first is operation:
            out.write(operation)
        else:
            out.alias(dict(zip(operation.outputs, first.outputs, strict=True)))

    return rewrite(trace, once, optional=True)


def share(trace: Trace, fused: bool = True) -> Trace:
    """Computes equal expressions of one phase and one checkpoint once, such as a cast that autocast repeats for each
    layer, or the bias that each layer computes from one mask. Outputs of the program, and values that it writes to, do
    not share memory. Without a fusion executor (`fused`) the operations of the program are left as the user wrote
    them, and only those that derivatives and executors have added are shared.

    Before: `t0 = to(x, bfloat16)`, `t1 = linear(t0, w)`, `t2 = to(x, bfloat16)`, `t3 = linear(t2, v)`. After the
    derivatives, so that gradients are added up where they were: `t0 = to(x, bfloat16)`, `t1 = linear(t0, w)`, `t3 =
    linear(t0, v)`.
    """

    def scope(operation: BoundSymbol) -> Hashable:
        context = operation.context
        if not fused and operation.sym.torch_functions:
            return None
        return (context.checkpoint, context.backward) if context is not None else "everywhere"

    return _shared(trace, scope)


def share_gradients(trace: Trace) -> Trace:
    """Computes equal gradients once, before they are differentiated themselves (`create_graph=True`): those of one loss
    with respect to several inputs, which are asked for one after the other. Equal cotangents, which nobody
    differentiates, are among them.

    Before: `t1 = tanh_backward(g, y)`, `u_x = mm(t1, v)`, `t2 = tanh_backward(g, y)`, `u_t = mm(t2, w)`. After: `t1 =
    tanh_backward(g, y)`, `u_x = mm(t1, v)`, `u_t = mm(t1, w)`.
    """

    def scope(operation: BoundSymbol) -> Hashable:
        context = operation.context
        if context is None:
            return None
        if context.backward and context.grad_enabled:
            return context.checkpoint, "gradients"
        is_constant = not any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs)
        return (context.checkpoint, context.backward) if is_constant else None

    return _shared(trace, scope)


def has_differentiated_gradients(trace: Trace) -> bool:
    """Whether a program has gradients that are differentiated themselves."""
    return any(b.context is not None and b.context.backward and b.context.grad_enabled for b in trace.bound_symbols)


def _shared(trace: Trace, scope: Callable[[BoundSymbol], Hashable]) -> Trace:
    """The trace with equal expressions of one scope computed once. None is no scope."""
    bases = alias_bases(trace.bound_symbols, maybe=True)
    apart = {bases[o] for o in trace.output_proxies}
    written = {*trace.info.written, *trace.info.written.values()}
    seen: dict = {}

    def stays(operation: BoundSymbol) -> bool:
        """Two data-dependent sizes are two numbers, though they are always equal."""
        if not all(isinstance(o, TensorProxy) for o in operation.outputs) or not operation.outputs:
            return True
        if any(n.unbacked for n in numbers_in((operation.args, operation.kwargs, operation.output), [])):
            return True
        return any(bases[o] in apart or o.name in written for o in operation.outputs)

    def once(operation: BoundSymbol, out: Rewriter) -> None:
        if OpTags.RANDOM_OP not in operation.sym.tags and not EFFECTS.isdisjoint(operation.sym.tags):
            seen.clear()  # it may write to memory
        where = scope(operation)
        if where is None or not _NEVER.isdisjoint(operation.sym.tags) or stays(operation):
            return out.write(operation)
        grads = tuple(o.requires_grad for o in operation.outputs if isinstance(o, TensorProxy))
        first = seen.setdefault((operation.rhs, grads, where), operation)
        if first is operation:
            return out.write(operation)
        out.alias(dict(zip(operation.outputs, first.outputs, strict=True)))

    rewritten = rewrite(trace, once, optional=True)
    return rewritten if len(rewritten.bound_symbols) < len(trace.bound_symbols) else trace
