"""Walking a trace line by line, in the form that Lightning Thunder's users know. `thunder.core.rewrite` is the driver
underneath."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from thunder.core.proxies import Proxy, map_structure, proxies_in
from thunder.core.rewrite import Rewriter
from thunder.core.symbol import BoundSymbol, Recorder, adopt, recording
from thunder.core.trace import Trace


def interpret_trace(trace: Trace, *args) -> Any:
    """Calls the symbols of a trace with other arguments, inside whatever is traced now. What the trace returns for
    them."""
    values: dict[Proxy, Any] = dict(zip(trace.args, args, strict=True))

    def read(x):
        return values.get(x, x) if isinstance(x, Proxy) else x

    for operation in trace.bound_symbols:
        result = operation.sym(*map_structure(read, operation.args), **map_structure(read, operation.kwargs))
        values.update(zip(proxies_in(operation.output, []), proxies_in(result, []), strict=True))
    return map_structure(read, trace.output)


class TraceSubstitutionProcessor:
    """Makes another trace of one: `process_bsym`, which a subclass defines, is shown each operation and says what takes
    its place.

        class Doubling(TraceSubstitutionProcessor):
            def process_bsym(self, bsym):
                if bsym.sym.name == "sin":
                    self.set_result(self.add_bsyms_from_function(lambda x: ltorch.cos(x) * 2, *bsym.args))
                else:
                    self.add_processed_bsyms([bsym])

        new_trace, output = Doubling(trace)()

    Before: `t0 = ltorch.sin(x)`. After: `t1 = ltorch.cos(x)`, `t0 = ltorch.mul(t1, 2)`.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self._out = Rewriter()
        self._unprocessed: deque[BoundSymbol] = deque(trace.bound_symbols)
        self._current: BoundSymbol | None = None

    @property
    def swap_map(self) -> dict[Proxy, Any]:
        """What later operations read in the place of values."""
        return self._out.table

    def process_bsym(self, bsym: BoundSymbol) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define process_bsym(bsym)")

    def add_processed_bsyms(self, bsyms: Iterable[BoundSymbol]) -> None:
        """Writes operations as they are."""
        for operation in bsyms:
            self._out.write(operation)

    def add_unprocessed_bsyms(self, bsyms: Iterable[BoundSymbol]) -> None:
        """Operations to process next, before the rest of the trace."""
        self._unprocessed.extendleft(reversed(list(bsyms)))

    def add_bsyms_from_function(self, fn: Callable, /, *args, **kwargs) -> Any:
        """Writes the operations that `fn` records when it is called. What it returned."""
        with recording(Recorder(self._current.context if self._current is not None else None)) as recorder:
            result = fn(*args, **kwargs)
        self.add_processed_bsyms(recorder.bound_symbols)
        return result

    def add_to_swap_map(self, old: Proxy, new: Any) -> None:
        """Later operations read `new` in the place of `old`."""
        self._out.alias({old: new})

    write = add_to_swap_map

    def read(self, x: Any) -> Any:
        """A structure of values, as later operations read it."""
        return map_structure(lambda v: self.swap_map.get(v, v) if isinstance(v, Proxy) else v, x)

    def set_result(self, result: Any) -> None:
        """What the outputs of the operation that is processed are from now on: what computes them takes their names.
        Raises ValueError for another number of values."""
        assert self._current is not None, "set_result belongs into process_bsym"
        self._out.bound_symbols[:], aliases = adopt(self._out.bound_symbols, result, self._current.output)
        self._out.alias(aliases)

    def __call__(self) -> tuple[Trace, Any]:
        """(the new trace, what it returns)."""
        while self._unprocessed:
            self._current = self._out.current(self._unprocessed.popleft())
            self.process_bsym(self._current)
        output = self.read(self.trace.output)
        return self.trace.replace(bound_symbols=self._out.bound_symbols, output=output), output
