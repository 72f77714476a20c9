"""Side Stream: products that compute gradients of weights run on a second stream, beside the rest of a backward.

Before: `t2 = torch.mm(g_t, x)`, `t3 = torch.mm(g, w)`, ..., `return (t2, ...)`. After: `t2 = mm_on_side_stream(g_t,
x)`, `t3 = torch.mm(g, w)`, ..., `join_side_stream()`, `return (t2, ...)`.

Such a product has no consumer in the program. In a CUDA graph the same holds for kernels with which a fusion executor
finishes gradients: `[t4, t5] = TritonFusion0(x)`, with a comment that says so. On a second stream they fill the idle
part of a GPU: the last blocks of other products, and kernels that wait for memory. The operands are held until the
stream of the program has waited for the second one. The results are in memory of the stream of the program, which
waits for the second one before it returns them.

A product stays on the stream of the program if the program writes to an operand afterwards, if nothing follows, or if
it takes less time than the host needs for two streams.
"""

from __future__ import annotations

from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import multiply_adds
from thunder.core.proxies import Proxy, TensorProxy, has_numbers
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace, TraceTag
from thunder.extend.fusion import FusionExecutor, run_by
from thunder.ops import LTORCH
from thunder.runtime.streams import fork, join, mm_beside
from thunder.transforms.del_last_used import python_del

DEVICES = ("cuda",)
# multiplications and additions of a product on the side stream, which take a GPU 80 us or more. The products of 512
# rows of a 7B model take less; there the host is not ahead of the GPU
LEAST = 6 * 10**10


def may_use_side_stream(program: Trace) -> bool:
    """Whether a program is a backward with results on a device with streams."""
    return TraceTag.BACKWARD in program.tags and any(
        isinstance(o, TensorProxy) and o.device.type in DEVICES for o in program.output_proxies
    )


def side_stream(trace: Trace, least: int | None = None, *, small: bool = False) -> Trace:
    """The trace that computes returned products without consumers on a second stream.

    least: how many multiplications and additions such a product has at least, by default `LEAST`. small: also the
    kernels with which fusions finish gradients.
    """
    least = LEAST if least is None else least
    operations, bases = trace.bound_symbols, alias_bases(trace.bound_symbols, maybe=True)
    returned, read, written = set(trace.output_proxies), set[Proxy](), set[Proxy]()
    made: list[BoundSymbol] = []
    something_follows = changed = False
    for old in reversed(operations):
        operation = old
        if operation.sym is python_del:
            made.append(operation)
            continue
        inputs = {bases[i] for i in operation.inputs}
        if any(
            not part.sym.tags.isdisjoint(EFFECTS)
            for part in (operation, *(operation.subsymbols if operation.sym.is_fusion else ()))
        ):
            written |= inputs
        elif (
            something_follows
            and _is_product(operation, least)
            and operation.output in returned
            and operation.output not in read
            and written.isdisjoint(inputs)
        ):
            operation = operation.replace(sym=mm_on_side_stream, subsymbols=[operation])
        elif (
            small
            and something_follows
            and operation.sym.is_fusion
            and isinstance(operation.sym.executor, FusionExecutor)
        ):
            operation = _finished_beside(
                operation,
                operation.sym.executor,
                frozenset(i for i, o in enumerate(operation.outputs) if o in returned and o not in read),
            )
        read |= inputs
        something_follows |= OpTags.VIEW not in operation.sym.tags
        changed |= operation is not old
        made.append(operation)
    if not changed:
        return trace
    return trace.replace(bound_symbols=[*reversed(made), join_side_stream.bind(output=None)])


def _finished_beside(operation: BoundSymbol, fuser: FusionExecutor, places: frozenset[int]) -> BoundSymbol:
    function = fuser.beside(operation.sym.fn, places, fork) if places and operation.sym.fn is not None else None
    return (
        operation
        if function is None
        else run_by(operation, function, "gradients of weights are finished on the side stream")
    )


def _is_product(operation: BoundSymbol, least: int) -> bool:
    if (
        operation.sym.id != f"torch.{LTORCH['mm'].id}"
        or len(operation.args) != 2
        or operation.kwargs
        or not isinstance(operation.output, TensorProxy)
        or operation.output.device.type not in DEVICES
    ):
        return False
    return not any(map(has_numbers, operation.args)) and 2 * multiply_adds(operation) >= least


mm_on_side_stream = Symbol(
    "mm_on_side_stream", id="side_stream.mm", is_prim=True, fn=mm_beside, tags=(OpTags.MATMUL_OP,)
)
join_side_stream = Symbol("join_side_stream", id="side_stream.join", is_prim=True, fn=join, tags=(OpTags.DONT_DCE,))
