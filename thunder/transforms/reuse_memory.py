"""Reuse Memory: a fused kernel, or a lone elementwise operation, writes a result over an input that nobody reads any
more.

Before: `t1 = torch.nn.functional.linear(x, w)`, `[t2] = TritonFusion0(t1, y)`, `return t2`. After: the same, with the
comment `t2 is written over t1`, and no memory for t2. Before: `t1 = torch.nn.functional.linear(x, w)`, `t2 =
torch.tanh(t1)`, `t3 = torch.nn.functional.linear(t2, v)`. After: the same, with `t2 = Tensor.tanh_(t1)`.

Written over is only what surely has its memory to itself: what a product or a fused kernel of the same program has
made, that products and fused kernels alone have read, or views of it, and that is neither returned nor saved. Whether a
kernel reads it only where it writes, and before, is for its executor to say (`FusionExecutor.writing_over`). It is the
last pass, so that what users' transforms read counts.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from thunder.analysis.aliases import alias_bases
from thunder.analysis.lifetimes import last_uses
from thunder.core.proxies import Proxy, TensorProxy, same_shape
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.extend.fusion import FusionExecutor, run_by
from thunder.transforms.del_last_used import python_del
from thunder.transforms.reinplace import in_place_form, run_in_place

__all__ = ["reuse_memory"]


def reuse_memory(trace: Trace) -> Trace:
    """Lets fusions and elementwise operations write over inputs that die with them."""
    bases = alias_bases(trace.bound_symbols, maybe=True)
    base = bases.__getitem__
    last = last_uses(trace.bound_symbols, trace.output_proxies, base, lambda operation: operation.sym is not python_del)
    owned: set[Proxy] = set()

    def dying(i: int, operation: BoundSymbol) -> list[int]:
        """The places of the inputs whose memory nobody reads afterwards. Beside a view of it, a value is read where it
        would be written over."""
        read = collections.Counter(map(base, operation.inputs))
        return [n for n, p in enumerate(operation.inputs) if p in owned and last[p] == i and read[p] == 1]

    operations: list[BoundSymbol] = []
    for i, operation in enumerate(trace.bound_symbols):
        executor = operation.sym.executor
        fuser = (
            executor
            if isinstance(executor, FusionExecutor) and executor.owns_results and operation.sym.is_fusion
            else None
        )
        function = _in_place_function(operation) if fuser is None and not owned.isdisjoint(operation.inputs) else None
        makes = fuser is not None or operation.sym.owns_result
        if fuser is not None:
            found = dying(i, operation)
            operation = _writing_over(operation, fuser, found) if found else operation
        # what a linear layer gives is a view of something that nobody has, and what leaves the program must be none
        elif (
            function is not None
            and 0 in dying(i, operation)
            and last.get(operation.outputs[0]) != len(trace.bound_symbols)
        ):
            operation, makes = run_in_place(operation, function), True
        operations.append(operation)
        if makes:
            owned |= {o for o in operation.outputs if isinstance(o, TensorProxy)}
        elif operation.sym is not python_del and not (
            operation.outputs and all(o in bases for o in operation.outputs)
        ):  # it may keep what it reads, or give it under another name
            owned.difference_update(map(base, operation.inputs))
    return trace.replace(bound_symbols=operations)


def _in_place_function(operation: BoundSymbol) -> Callable | None:
    """What computes an elementwise operation of PyTorch's in the memory of its first operand, where that has the
    result's type and shape."""
    form = in_place_form(operation) if OpTags.IN_PLACE not in operation.sym.tags else None
    if form is None or not operation.sym.elementwise:
        return None
    target, result = operation.args[0], operation.outputs[0]
    fits = (
        isinstance(target, TensorProxy)
        and isinstance(result, TensorProxy)
        and target.dtype is result.dtype
        and same_shape(target.shape, result.shape)
    )
    return form[0] if fits else None


def _writing_over(operation: BoundSymbol, fuser: FusionExecutor, dying: list[int]) -> BoundSymbol:
    found = fuser.writing_over(operation.sym.fn, dying)
    if found is None:
        return operation
    function, pairs = found
    verb = "may be" if fuser.permits else "is"
    return run_by(
        operation,
        function,
        ", ".join(
            f"{operation.outputs[o].name} {verb} written over {operation.inputs[i].name}" for o, i in pairs.items()
        ),
        OpTags.IN_PLACE,
    )
