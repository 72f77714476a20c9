"""From a captured computation to the program that runs: the flat list of passes."""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.check import check
from thunder.core.trace import Trace, timed_pass
from thunder.options import JitOptions
from thunder.transforms.dce import dce
from thunder.transforms.del_last_used import del_last_used
from thunder.transforms.dispatch import dispatch

__all__ = ["lower"]


def lower(acquired: Trace, options: JitOptions, executors: Sequence) -> list[Trace]:
    """All traces of a computation in the order they were made, the one that runs last."""
    passes = [
        ("Dead Code Elimination", dce),
        ("Transform for execution", lambda trace: dispatch(trace, executors)),
        *((f"Transform {type(t).__name__}", t.transform_trace_post_optimization) for t in options.transforms if hasattr(t, "transform_trace_post_optimization")),
        ("Delete Last Used", del_last_used),
    ]
    traces = [acquired]
    for title, run in passes:
        traces.append(timed_pass(title, traces[-1], run))
        if options.debug.check_traces:
            check(traces[-1])
    return traces
