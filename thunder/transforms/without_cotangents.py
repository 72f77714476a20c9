"""Without cotangents: the backward for the case that some outputs of the program play no part in what is differentiated.

Autograd gives None for such an output, and a parameter that only led there has no gradient: not zeros, which an optimizer would act upon.

Before, with `c1` missing: `t0 = ltorch.mul(c0, w)`, `t1 = ltorch.mul(c1, v)`, `t2 = ltorch.mul(c1, x)`, `t3 = ltorch.add(t0, t1)`, `return (t3, t2)`.
After: `t0 = ltorch.mul(c0, w)`, `return (t0, None)`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thunder.core.proxies import Proxy, map_structure
from thunder.core.regions import leading_to
from thunder.core.rewrite import Rewriter
from thunder.core.symbol import BoundSymbol, Recorder, recording
from thunder.core.trace import Trace
from thunder.ops import LTORCH
from thunder.transforms.partition import has_effect

__all__ = ["without_cotangents"]


def without_cotangents(backward: Trace, cotangents: Sequence[Proxy], missing: Collection[Proxy]) -> Trace:
    """A backward trace that does not read the missing ones of its cotangents, and returns None where no other leads.

    Derivatives are linear in their cotangents: a line that reads only missing ones makes a missing one, a sum is its other term, and what reads some that
    are missing and some that are not is given zeros for them.
    """
    dependent, gone, out = set(cotangents), set(missing), Rewriter()
    zeros: dict[Proxy, Proxy] = {}
    for line in backward.bound_symbols:
        if line.sym.python_printer is not None:
            out.write(line)
            continue
        read = dict.fromkeys(i for i in line.inputs if i in dependent)
        if read:
            dependent.update(line.outputs)
        lost = [i for i in read if i in gone]
        if not lost:
            out.write(out.current(line))
        elif len(lost) == len(read):
            gone.update(line.outputs)
        elif line.sym is LTORCH["add"]:
            out.alias({line.output: next(i for i in read if i not in gone)})
        else:
            for i in lost:
                if i not in zeros:
                    zeros[i] = _zeros(i, line, out)
            out.write(out.current(line.swap(zeros)))
    result = map_structure(lambda g: None if isinstance(g, Proxy) and g in gone else out.table.get(g, g) if isinstance(g, Proxy) else g, backward.output)
    head = [b for b in out.lines if b.sym.python_printer is not None]
    lines = leading_to(out.lines[len(head) :], result, has_effect)
    return backward.replace(bound_symbols=[*head, *lines], output=result)


def _zeros(value: Proxy, line: BoundSymbol, out: Rewriter) -> Proxy:
    with recording(Recorder(line.context)) as recorder:
        made = LTORCH["zeros"](value.shape, device=value.device, dtype=value.dtype)  # type: ignore[attr-defined]
    out.lines += recorder.bound_symbols
    return made
