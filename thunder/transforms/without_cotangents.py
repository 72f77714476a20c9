"""Without Cotangents: specialize a backward for a call in which some outputs of the program do not contribute to the
differentiated value.

Autograd passes None as the cotangent of such an output. A parameter that only such outputs depend on has no gradient,
rather than zeros, which an optimizer would act upon.

Before, with `c1` missing: `t0 = ltorch.mul(c0, w)`, `t1 = ltorch.mul(c1, v)`, `t2 = ltorch.mul(c1, x)`, `t3 =
ltorch.add(t0, t1)`, `return (t3, t2)`. After: `t0 = ltorch.mul(c0, w)`, `return (t0, None)`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from thunder.core.proxies import Proxy, map_structure
from thunder.core.regions import leading_to
from thunder.core.symbol import Recorder, recording
from thunder.core.trace import Trace
from thunder.transforms.autodiff import write_without
from thunder.transforms.partition import has_effect


def without_cotangents(backward: Trace, cotangents: Sequence[Proxy], missing: Collection[Proxy]) -> Trace:
    """A backward trace that does not read its missing cotangents, and returns None for gradients that depend on no
    others."""
    gone, table = set(missing), {}
    head = [b for b in backward.bound_symbols if b.sym.python_printer is not None]
    body = [b for b in backward.bound_symbols if b.sym.python_printer is None]
    with recording(Recorder(body[0].context if body else None)) as recorder:
        write_without(body, set(cotangents), gone, table, recorder)
    result = map_structure(
        lambda g: None if isinstance(g, Proxy) and g in gone else table.get(g, g) if isinstance(g, Proxy) else g,
        backward.output,
    )
    operations = leading_to(recorder.bound_symbols, result, has_effect)
    return backward.replace(bound_symbols=[*head, *operations], output=result)
