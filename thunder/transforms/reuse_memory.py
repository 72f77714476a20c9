"""Reuse Memory: a fused kernel writes a result over an input that nobody reads any more.

Before: `t1 = torch.nn.functional.linear(x, w)`, `[t2] = TritonFusion0(t1, y)`, `return t2`. After: the same, with the comment `t2 is written over t1`, and no memory for t2.

Written over is only what surely has its memory to itself: what a product or a fused kernel of the same program has made, that products and fused kernels alone have read, and that
is neither returned nor saved. Whether a kernel reads it only where it writes, and before, is for its executor to say (`FusionExecutor.writing_over`). It is the last pass, so that
what users' transforms read counts.
"""

from __future__ import annotations

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.extend import FusionExecutor
from thunder.transforms.del_last_used import python_del

__all__ = ["reuse_memory"]

PRODUCTS = frozenset(f"torch.ltorch.{name}" for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"))  # that PyTorch executes, into memory of their own


def reuse_memory(trace: Trace) -> Trace:
    """Lets fusions write over inputs that die with them."""
    last: dict[Proxy, int] = {}
    for i, line in enumerate(trace.bound_symbols):
        if line.sym is not python_del:
            last |= dict.fromkeys(line.inputs, i)
    last |= dict.fromkeys(trace.output_proxies, len(trace.bound_symbols))
    owned: set[Proxy] = set()
    lines: list[BoundSymbol] = []
    for i, line in enumerate(trace.bound_symbols):
        executor = line.sym.executor
        fuser = executor if isinstance(executor, FusionExecutor) and executor.owns_results and line.sym.is_fusion else None
        product = line.sym.id in PRODUCTS
        if fuser is not None:
            dying = [n for n, p in enumerate(line.inputs) if p in owned and last[p] == i]
            lines.append(_writing_over(line, fuser, dying) if dying else line)
        else:
            lines.append(line)
        if fuser is not None or product:
            owned |= {o for o in line.outputs if isinstance(o, TensorProxy)}
        elif line.sym is not python_del:  # it may give a view, or keep what it reads
            owned.difference_update(line.inputs)
    return trace.replace(bound_symbols=lines)


def _writing_over(line: BoundSymbol, fuser: FusionExecutor, dying: list[int]) -> BoundSymbol:
    found = fuser.writing_over(line.sym.fn, dying)
    if found is None:
        return line
    function, pairs = found
    symbol = Symbol(line.sym.name, id=line.sym.id, is_prim=True, tags=(OpTags.IN_PLACE,), fn=function, executor=fuser, is_fusion=True)
    new = line.replace(sym=symbol, subsymbols=line.subsymbols)
    verb = "may be" if fuser.permits else "is"
    new.header = ", ".join(f"{line.outputs[o].name} {verb} written over {line.inputs[i].name}" for o, i in pairs.items())
    return new
