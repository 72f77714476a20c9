"""Rules: replace operations that compute what a pattern does.

Before, with a rule for attention: `t1 = matmul(q, k_t)`, `t2 = mul(t1, 0.125)`, `t3 = softmax(t2, -1)`, `t4 =
matmul(t3, v)`. After: `t4 = scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=0.125)`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from thunder.core.check import check_change
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import EFFECTS, BoundSymbol
from thunder.core.trace import RuleHits, Trace, headed
from thunder.extend.passes import Lowering, named
from thunder.extend.patterns import Attempt, Flow, Match
from thunder.extend.rules import Rule


def apply_rules(trace: Trace, rules: Sequence[Rule], lowering: Lowering, counted: Sequence[Rule] = ()) -> list[Trace]:
    """A trace for each rule that replaces something, under a header with its name. counted: the rules whose hits
    `Trace.info.rules` counts."""
    traces = [trace]
    hits: dict[str, RuleHits] = {}
    flow = Flow(trace, lowering)
    for one in rules:
        start = time.perf_counter_ns()
        attempt = Attempt()
        if flow.trace is not traces[-1]:
            flow = Flow(traces[-1], lowering)
        with named(f"the rule {one.name}"):
            matches = list(one.matches(flow, attempt))
            if matches:
                changed = headed(f"Rule {one.name}", replaced(traces[-1], one, matches), start)
                traces.append(check_change(traces[-1], changed) if one.is_of_user else changed)
        if one in counted:
            before = hits.get(one.name) or trace.info.rules.get(one.name) or RuleHits()
            locations = tuple(m.operation.location for m in matches)
            ended = attempt.operation.location if attempt.operation is not None else None
            hits[one.name] = RuleHits(one.at, (*before.locations, *locations), attempt.reason, ended)
    if hits:
        info = traces[-1].info
        traces[-1] = traces[-1].replace(info=info.replace(rules={**info.rules, **hits}))
    return traces if hits and len(traces) == 1 else traces[1:]


def replaced(trace: Trace, one: Rule, matches: Sequence[Match]) -> Trace:
    """The trace with a rule's replacement in the place of each match."""
    anchors = {m.anchor: m for m in matches}
    gone: set[BoundSymbol] = set()
    for match in matches:
        inside = set(match.operations)
        for b in match.operations:
            values = [o for o in b.outputs if not any(o is x for x in match.outputs)]
            if not any(o in match.flow.results or not inside.issuperset(match.flow.consumers(o)) for o in values):
                gone.add(b)
    originals = iter(trace.bound_symbols)

    def rule(operation: BoundSymbol, out: Rewriter) -> None:
        original = next(originals)
        if original not in gone:
            out.write(operation)
        if (match := anchors.get(original)) is not None:
            one.write(match, out)

    return _swept(rewrite(trace, rule), matches[0].flow)


def _swept(trace: Trace, before: Flow) -> Trace:
    """The trace without the operations whose consumers the rule has replaced. Others stay, dead ones too."""
    needed, live = set(trace.output_proxies), list[BoundSymbol]()
    for b in reversed(trace.bound_symbols):
        were_read = any(before.uses(o) for o in b.outputs)
        if were_read and needed.isdisjoint(b.outputs) and EFFECTS.isdisjoint(b.sym.tags):
            continue
        needed.update(b.inputs)
        live.append(b)
    return trace if len(live) == len(trace.bound_symbols) else trace.replace(bound_symbols=live[::-1])
