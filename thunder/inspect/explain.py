"""`thunder.explain`: the work of a program on the host, and its waits for the host, by the user's lines, with costs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from thunder.api import add_transform, jit
from thunder.cache.entry import CacheEntry
from thunder.compiled import compiled_of
from thunder.core.host_calls import host_call
from thunder.core.paths import check_decision, check_value
from thunder.core.proxies import TensorProxy, UnbackedNumber, element_count
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.errors import CaptureError
from thunder.extend.rules import CUT
from thunder.ops.eager_calls import is_eager_call
from thunder.ops.rules import effects
from thunder.transforms.base import Transform

KINDS = ("fallback", "decision", "value", "wait", "host call", "eager call", "opaque operation", "rule")


class Explained(NamedTuple):
    """One thing that a program does besides computing on the device, or a rule.

    kind: "decision" (the program holds for one answer), "value" (the host reads a tensor), "wait" (it waits for a
    data-dependent size), "host call", "eager call", "opaque operation" (PyTorch differentiates it, or thunder knows no
    parts of it), "fallback" (the original function runs), or "rule" (how often it replaced operations, or why it did
    not). what: in words. where: (filename, line, function, source line) of the
    user's code. milliseconds: that it took in the second of two calls, None where it was not measured. bytes: of
    tensors that the host reads.
    """

    kind: str
    what: str
    where: tuple | None
    milliseconds: float | None
    bytes: int = 0

    def __str__(self) -> str:
        took = "" if self.milliseconds is None else f" took {self.milliseconds:.3f} ms"
        read = f", read {self.bytes} bytes" if self.bytes else ""
        text = f"{self.kind}: {self.what}{took}{read}"
        if self.where is None:
            return text
        filename, line, function, source = self.where
        return f"{text}\n  at {filename}:{line}, in {function}: {source.strip()}"


class Explanation(NamedTuple):
    """The result of `thunder.explain`. milliseconds: of the second of two calls, all in all."""

    found: tuple[Explained, ...]
    milliseconds: float

    def of_kind(self, kind: str) -> tuple[Explained, ...]:
        """Those of one of `KINDS`."""
        return tuple(x for x in self.found if x.kind == kind)

    def __str__(self) -> str:
        if not self.found:
            return f"one call took {self.milliseconds:.3f} ms; all of it is a program on the device"
        return "\n".join([f"one call took {self.milliseconds:.3f} ms", *map(str, self.found)])


class _Measured(Transform):
    """Takes the times of operations that run on the host or wait for it."""

    exact: ClassVar[bool] = True

    def __init__(self):
        self.seconds: dict[int, float] = {}  # id of a bound symbol -> in the last call

    def transform_trace_post_optimization(self, computation_trace: Trace, **kwargs) -> Trace:
        bound_symbols: list[BoundSymbol] = []
        for b in computation_trace.bound_symbols:
            if (kind := _kind(b)) is None:
                bound_symbols.append(b)
                continue
            bound_symbols += [self._clock(kind, b, -1), b, self._clock(kind, b, 1)]
        return computation_trace.replace(bound_symbols=bound_symbols)

    def _clock(self, kind: str, b: BoundSymbol, sign: int) -> BoundSymbol:
        def note():
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            before = 0.0 if sign < 0 else self.seconds[id(b)]
            self.seconds[id(b)] = before + sign * time.perf_counter()

        name = f"{'start' if sign < 0 else 'stop'}_{kind.replace(' ', '_')}"
        symbol = Symbol(name, id=("explain", sign, id(b)), is_prim=True, tags=(OpTags.DONT_DCE,), fn=note)
        return BoundSymbol(symbol, (), {}, None, context=b.context, location=b.location)


def explained(entry: CacheEntry, seconds: Mapping[int, float]) -> Iterator[Explained]:
    """The work of a program besides computing on the device, in its order. seconds: by the id of a bound symbol."""
    for b in entry.computation_traces[-1].bound_symbols:
        if (kind := _kind(b)) is None:
            continue
        measured = seconds.get(id(b))
        took = None if measured is None or measured < 0 else measured * 1e3
        where = entry.captured.where(b.location) if b.location is not None else None
        if kind == "decision":
            decision = entry.path[_recorded(b).args[-1]]
            yield Explained(kind, f"{decision.question}: {decision.answer!r}", decision.where, took)
        else:
            yield Explained(kind, _words(kind, b), where, took, _bytes(kind, b))


def rules_of(entry: CacheEntry) -> Iterator[Explained]:
    """How often rules replaced operations of a program: those of the last match, or of the attempt that went
    farthest."""
    forward, *others = (t[-1].info.rules for t in (entry.computation_traces, entry.backward_traces) if t)
    hits = dict(forward)
    for name, more in ((n, h) for backward in others for n, h in backward.items() if h.at == CUT):
        known = hits.get(name, more)
        hits[name] = more if known is more else dataclasses.replace(known, locations=known.locations + more.locations)
    for name, of_rule in hits.items():
        count = len(of_rule.locations)
        location = of_rule.locations[-1] if count else of_rule.ended
        times = "once" if count == 1 else f"{count} times"
        reason = f": {of_rule.reason}" if of_rule.reason else ": its last operation is not in the program"
        what = f"{name} replaced operations {times}" if count else f"{name} replaced nothing{reason}"
        yield Explained("rule", what, entry.captured.where(location) if location is not None else None, None)


def _recorded(b: BoundSymbol) -> BoundSymbol:
    """The bound symbol that an executor's one runs."""
    return b.subsymbols[0] if b.sym.executor is not None and len(b.subsymbols) == 1 and not b.sym.is_fusion else b


def _kind(b: BoundSymbol) -> str | None:
    """The kind of a finding that an operation is, a word of `Finding.kind`; None: nothing to report."""
    b = _recorded(b)
    if b.sym in (check_decision, check_value):
        return "decision"
    if b.sym is host_call:
        return "host call"
    if is_eager_call(b.sym):
        return "eager call"
    if b.sym.name != "size" and any(isinstance(o, UnbackedNumber) for o in b.outputs):
        return "value"
    if OpTags.DEVICE_SYNC_OP in b.sym.tags or effects.synchronises.holds(b):
        return "wait"
    by_pytorch = isinstance(b.sym.id, tuple) and b.sym.id[0] == "with_graph"
    return "opaque operation" if OpTags.OPAQUE in b.sym.tags or by_pytorch else None


def _words(kind: str, b: BoundSymbol) -> str:
    b = _recorded(b)
    function = b.args[1] if kind in ("host call", "eager call") else None
    return f"{b.sym.name}()" if function is None else f"{getattr(function, '__qualname__', function)}()"


def _bytes(kind: str, b: BoundSymbol) -> int:
    """Of the tensors that the host reads: those whose value a number is, and those that a host call is given."""
    if kind not in ("host call", "eager call", "value"):
        return 0
    return sum(element_count(p) * p.dtype.bytes for p in b.inputs if isinstance(p, TensorProxy))


def explain(fn: Callable, /, *args: Any, **kwargs: Any) -> Explanation:
    """Reports the work of `fn(*args, **kwargs)` on the host: data-dependent branches, values that are read from
    tensors, host calls, eager calls, opaque operations, fallbacks with their reasons, and how often each rule matched.

    Calls `fn` twice, with all side effects: the first call compiles, and the second call is measured.

    Args:
        fn: A compiled function or module, or one that `thunder.jit` accepts.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    measure = _Measured()
    measured = add_transform(fn if compiled_of(fn) is not None else jit(fn), transform=measure)
    try:
        measured(*args, **kwargs)
        started = time.perf_counter()
        measured(*args, **kwargs)
        took = (time.perf_counter() - started) * 1e3
    except CaptureError as error:
        original = compiled_of(measured).fn
        started = time.perf_counter()
        original(*args, **kwargs)
        took = (time.perf_counter() - started) * 1e3
        reason = f"{error.reason} ({error.remedy})" if error.remedy else error.reason
        return Explanation((Explained("fallback", reason, error.location, took),), took)
    entry = compiled_of(measured).stats.last_entry
    return Explanation((*explained(entry, measure.seconds), *rules_of(entry)), took)
