"""Watched execution: the numbers of each value of a program that runs, and where one that is not finite comes from.

An operation is the origin of a NaN where none of its inputs has one, and of an infinity where its inputs are finite and
no number that it is called with is infinite: what `masked_fill(scores, mask, -inf)` writes is meant. A NaN that an
operation makes of an infinity comes from where the infinity comes from, unless that is meant. Only what reaches a
result or a gradient is a fault: `torch.where` may hide the rest.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from thunder.core.proxies import Proxy, TensorProxy, leaves
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace, TraceTag
from thunder.errors import warn_user

SLOWEST = 10  # operations that THUNDER_DEBUG=slow prints of each call


class Numbers(NamedTuple):
    """What is not finite in a tensor. index: of the first such number."""

    nans: int
    infinities: int
    index: tuple[int, ...]


FINITE = Numbers(0, 0, ())


def numbers_of(x: Any) -> Numbers:
    """What is not finite in a value."""
    if isinstance(x, float):
        return Numbers(int(math.isnan(x)), int(math.isinf(x)), ())
    floating = isinstance(x, torch.Tensor) and x.layout is torch.strided and (x.is_floating_point() or x.is_complex())
    if not floating or not x.numel() or x.device.type == "meta":
        return FINITE
    with torch.no_grad():
        odd = ~torch.isfinite(x if x.element_size() > 1 else x.float())
        if not odd.any():
            return FINITE
        nans = int(torch.isnan(x if x.element_size() > 1 else x.float()).sum())
        return Numbers(nans, int(odd.sum()) - nans, tuple(odd.nonzero()[0].tolist()))


class Record(NamedTuple):
    """An operation that ran. values: the tensors that it was given, in words. meant: it was called with an infinity."""

    number: int
    part: str
    operation: BoundSymbol
    values: tuple[str, ...]
    meant: bool


class Fault(NamedTuple):
    """The origin of a number that is not finite.

    kind: "nan" or "inf". part: "forward", "backward" or "argument". name: of the value, as the trace prints it, or of
    the parameter. operation: its name; empty for an argument. derivative_of: in the backward, the name of the operation
    that is differentiated. where: (filename, line, function, source line) of the user's code. module: the path of the
    module that it ran in. index: of the first such number. count: how many there are. values: what the operation was
    given, in words. line: of the trace.
    """

    kind: str
    part: str
    name: str
    operation: str
    where: tuple | None
    module: str
    index: tuple[int, ...]
    count: int
    values: tuple[str, ...]
    line: str
    derivative_of: str = ""

    def __str__(self) -> str:
        what = {"nan": "NaN", "inf": "infinite"}[self.kind]
        if self.part == "argument":
            text = [f"{self.name}, which is passed in, holds {self.count} {what} numbers, the first at {self.index}"]
            return "\n".join(text + self._location_text("it is read first in"))
        of = f"the backward of {self.derivative_of or 'the program'}" if self.part == "backward" else "the program"
        text = [f"{self.operation} makes {self.count} {what} numbers in {of}, the first at {self.index}"]
        text += [f"  it was given {value}" for value in self.values]
        text.append(f"  trace line: {self.line}")
        return "\n".join(text + self._location_text("in the user's program:"))

    def _location_text(self, words: str) -> list[str]:
        if self.where is None:
            return []
        filename, number, function, source = self.where
        module = f", module {self.module}" if self.module else ""
        return [f"  {words} {filename}:{number}, in {function}{module}", f"    {source.strip()}"]


class Watch:
    """The values of the programs of one call: of a forward, and of its backward."""

    def __init__(
        self, where: Callable, parameters: Mapping[str, str], captured: Trace, topics: Iterable[str] = ()
    ):  # fmt: skip
        """where: (filename, line, function, source line) of an operation's location. parameters: paths by argument.
        captured: the program as it was captured, whose operations are the user's. topics: what to print."""
        self.where, self.parameters, self.topics = where, dict(parameters), frozenset(topics)
        self.calls: dict[tuple, str] = {}  # by instruction of the user's code, the operation that it calls
        for operation in captured.bound_symbols:
            if operation.location is not None:
                self.calls.setdefault(operation.location[:2], operation.sym.name)
        self.numbers: dict[str, Numbers] = {}
        self.origin: dict[str, Record] = {}
        self.times: list[tuple[float, BoundSymbol]] = []

    def watched(self, part: str, trace: Trace) -> Callable:
        """The function of a program whose values are watched."""
        operations = []
        for b in trace.bound_symbols:
            if b.sym.fn is None or b.sym.python_printer is not None or b.output is None or b.sym.condition is not None:
                operations.append(b)
                continue
            symbol = Symbol(b.sym.name, id=("watched", id(b)), is_prim=True, fn=self._running(part, b))
            operations.append(b.replace(sym=symbol))
        run = trace.replace(bound_symbols=operations).python_callable()
        arguments = [a for a in trace.args if isinstance(a, Proxy)]

        def watched(*inputs):
            if len(arguments) == len(inputs):
                for a, x in zip(arguments, inputs, strict=True):
                    self.numbers[a.name] = numbers_of(x)
            results = run(*inputs)
            self._print_slow()
            return results

        return watched

    def _running(self, part: str, operation: BoundSymbol) -> Callable:
        """The function of an operation, which counts NaNs and infinities in its operands and results."""
        function: Any = operation.sym.fn

        def run(*args, **kwargs):
            operands = list(leaves((args, kwargs)))
            meant = any(n.nans or n.infinities for n in (numbers_of(x) for x in operands if isinstance(x, float)))
            numbers = [(p, x) for p, x in zip(operation.inputs, (x for x in operands if isinstance(x, torch.Tensor)))]
            values = tuple(_in_words(p.name, x) for p, x in numbers) if len(numbers) else ()
            for proxy, x in numbers:
                if proxy.name not in self.numbers:  # a value of the forward, in a backward
                    self.numbers[proxy.name] = numbers_of(x)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            if "slow" in self.topics:
                self.times.append((time.perf_counter() - started, operation))
            record = Record(len(self.origin), part, operation, values, meant)
            for proxy, x in _pairs(operation.output, result):
                self.numbers[proxy.name] = numbers_of(x)
                self.origin.setdefault(proxy.name, record)
                if "shapes" in self.topics and isinstance(x, torch.Tensor):
                    print(
                        f"{self._location_text(operation)}{operation.sym.name}: {_in_words(proxy.name, x)}",
                        file=sys.stderr,
                    )
            return result

        return run

    def _location_text(self, operation: BoundSymbol) -> str:
        where = self.where(operation.location) if operation.location else None
        return f"{where[0]}:{where[1]}: " if where is not None else ""

    def _print_slow(self) -> None:
        for seconds, operation in sorted(self.times, key=lambda t: -t[0])[:SLOWEST]:
            print(f"{self._location_text(operation)}{operation.sym.name} took {seconds * 1e3:.3f} ms", file=sys.stderr)
        self.times.clear()

    # --- origins
    def fault(self, results: Iterable[str], kinds: Iterable[str] = ("nan", "inf")) -> Fault | None:
        """The first origin of what is not finite in some values, given by name."""
        origins = [o for name in results if (o := self._origin(name, kinds)) is not None]
        return min(origins, key=lambda o: o[0], default=(0, None))[1]

    def _origin(self, name: str, kinds: Iterable[str]) -> tuple[int, Fault] | None:
        numbers = self.numbers.get(name, FINITE)
        if numbers.nans and "nan" in kinds:
            return self._fault(*self._walk(name, nan=True))
        if numbers.infinities and "inf" in kinds:
            origin = self._walk(name, nan=False)
            return None if origin[1] is not None and origin[1].meant else self._fault(*origin)
        return None

    def _fault(self, name: str, record: Record | None) -> tuple[int, Fault]:
        """A value with NaNs or infinities, and the operation that made it, with its place among the others."""
        n = self.numbers[name]
        kind, count = ("nan", n.nans) if n.nans else ("inf", n.infinities)
        if record is None:
            consumers = (r.operation for r in self.origin.values() if any(i.name == name for i in r.operation.inputs))
            where, module = self._location(next(consumers, None))
            name = self.parameters.get(name, name)
            return -1, Fault(kind, "argument", name, "", where, module, n.index, count, (), "")
        b = record.operation
        source = (b.subsymbols[0] if len(b.subsymbols) == 1 else b).sym.name
        called = "" if b.location is None else self.calls.get(b.location[:2], "")
        backward = record.part == "backward"
        where, module = self._location(b)
        return record.number, Fault(
            kind, record.part, name, source if backward else called or source, where, module, n.index, count,
            record.values, b.python(print_depth=1)[-1], called if backward else "",
        )  # fmt: skip

    def _location(self, operation: BoundSymbol | None) -> tuple[tuple | None, str]:
        if operation is None or not operation.location:
            return None, ""
        return self.where(operation.location), operation.location[2] or ""

    def _walk(self, name: str, nan: bool) -> tuple[str, Record | None]:
        """The value that the NaN, or the infinity, of a value comes from, and the operation that made it; None for an
        argument."""
        passed = {name}
        while (record := self.origin.get(name)) is not None:
            inputs = [i.name for i in record.operation.inputs if i.name not in passed]
            nans = [i for i in inputs if self.numbers.get(i, FINITE).nans]
            infinities = [i for i in inputs if self.numbers.get(i, FINITE).infinities]
            if nans:
                name = nans[0]
            elif infinities and not nan:
                name = infinities[0]
            elif infinities and (first := self._unmeant(infinities)) is not None:
                return first
            else:
                return name, record
            passed.add(name)
        return name, None

    def _unmeant(self, names: list[str]) -> tuple[str, Record | None] | None:
        """The origin of an infinity that nobody has meant, of some values."""
        for name in names:
            origin, record = self._walk(name, nan=False)
            if not record.meant if record is not None else origin in self.parameters:
                return origin, record
        return None


def _pairs(said: Any, result: Any) -> list[tuple[Proxy, Any]]:
    if isinstance(said, Proxy):
        return [(said, result)]
    if isinstance(said, (tuple, list)) and isinstance(result, (tuple, list)):
        return [pair for s, r in zip(said, result) for pair in _pairs(s, r)]
    if isinstance(said, dict) and isinstance(result, dict):
        return [pair for k in said if k in result for pair in _pairs(said[k], result[k])]
    return []


def _in_words(name: str, x: torch.Tensor) -> str:
    """A tensor's type, and the range of its finite numbers."""
    kind = f'{name}: "{str(x.dtype).removeprefix("torch.")}{list(x.shape)}"'
    if x.device.type == "meta" or not x.numel() or x.layout is not torch.strided or x.is_complex():
        return kind
    with torch.no_grad():
        wide = x.double() if x.is_floating_point() else x
        finite = wide[torch.isfinite(wide)]
        numbers = numbers_of(x)
        odd = [f"{n} {what}" for n, what in ((numbers.nans, "NaN"), (numbers.infinities, "infinite")) if n]
        more = f", {' and '.join(odd)}" if odd else ""
        return (
            f"{kind} from {finite.min().item():.4g} to {finite.max().item():.4g}{more}"
            if finite.numel()
            else kind + more
        )


def proxies_of(results: Any) -> list[str]:
    """The names of the values in the results of a program."""
    return [x.name for x in leaves(results) if isinstance(x, TensorProxy)]


def watched_program(trace: Trace, watch: Watch) -> Callable:
    """The function of a program that prints what the topics of a watch ask for, and warns of the origin of what is not
    finite in its results."""
    is_backward = TraceTag.BACKWARD in trace.tags
    output = trace.output[0] if TraceTag.AUGMENTED_FORWARD in trace.tags else trace.output
    run, names = watch.watched("backward" if is_backward else "forward", trace), proxies_of(output)

    def watched(*inputs):
        if not is_backward:
            watch.numbers.clear()
            watch.origin.clear()
        results = run(*inputs)
        fault = watch.fault(names, watch.topics & {"nan", "inf"})
        if fault is not None:
            warn_user(f"THUNDER_DEBUG: {fault}", UserWarning)
        return results

    return watched


def in_anomaly_mode(trace: Trace, forward: Trace, where: Callable) -> Callable:
    """The function of a backward that raises, as PyTorch's anomaly mode does, where a gradient has a NaN, and names the
    operations of the user's line, and the line."""

    def watched(*inputs):
        watch = Watch(where, {}, forward)
        results = watch.watched("backward", trace)(*inputs)
        fault = watch.fault(proxies_of(trace.output), ("nan",))
        if fault is None:
            return results
        name = fault.derivative_of or fault.operation or "the program"
        raise RuntimeError(f"the backward of {name} returned nan values.\n{fault}")

    return watched
