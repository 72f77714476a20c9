"""Fusion executors, which run a region of operations as one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thunder.analysis.aliases import may_view
from thunder.analysis.flow import producers
from thunder.core.definition import InPlaceForm
from thunder.core.paths import decided_first
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, equal_counts, has_numbers, numbers_in
from thunder.core.regions import FusedFunction, Region, convex_regions, leading_to, region_key, schedule
from thunder.core.rematerialize import recompute_cheap
from thunder.core.symbol import BoundSymbol, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.errors import DataDependentError, MissingImplementationError, noted
from thunder.extend import Executor, Implementation, operation_id
from thunder.extend.launches import share_launches
from thunder.extend.memory_order import Piece, in_memory_order

REMEMBERED = 1024  # compiled regions that an executor remembers


class TooLarge(Exception):
    """Raised by `fuse` for a region that is too large: its two halves are fused instead."""


class Unfused(Exception):
    """Raised by `fuse` for a region that PyTorch has to run, with the reason, which the trace shows."""


class FusionExecutor(Executor):
    """Base class of executors that run regions of several operations. A subclass defines `fuse`.

    `register_supported` declares which operations may be part of a region; a subclass may override `can_fuse` instead.

        class Joining(FusionExecutor):
            def fuse(self, region, counter):
                function = self.once(region, lambda: compile_somehow(region))
                return self.register_temporary_operation(
                    f"{self.name}{counter}", function,
                    inputs=region.inputs, outputs=region.outputs, bsyms=region.bound_symbols,
                )

    A region prints as `[t4, t5] = joining0(a, b)`, with its operations as comments below.
    """

    needs_sizes = True  # regions are compiled for sizes

    def __init__(self, name: str, *, version: str | None = None, exact: bool = False):
        super().__init__(name, version=version, exact=exact)
        self._compiled: dict[Any, Any] = {}  # by region_key
        self.compilations = 0  # how often a region was compiled that was not known yet
        self._takes: weakref.WeakKeyDictionary[BoundSymbol, bool] = weakref.WeakKeyDictionary()

    def register_supported(
        self,
        sym_or_id: Symbol | Any,
        checker: Callable | None = None,
        *,
        execution_transform: Callable | None = None,
        grad_transform: Callable | None = None,
    ) -> None:
        """Declares that this executor fuses an operation.

        checker: a function with the arguments of the operation that returns whether the executor fuses it.
        execution_transform: writes the operation in terms of other operations first. grad_transform: defines its
        derivative.
        """
        self.implmap[operation_id(sym_or_id)] = Implementation(None, checker, execution_transform, grad_transform)

    # whether each result of its functions has new memory of its own, or that of an input which `writing_over` allows
    owns_results = False

    permits = False  # whether `writing_over` returns inputs that may be overwritten, and not those that are

    adds_biases = False  # whether its functions add biases of float32 products faster than the products do

    chains_products = False  # whether it has kernels of products of what is computed of products

    takes_padding = False  # whether its functions pad the rows of the values in `Region.padded`

    def can_execute(self, operation: BoundSymbol) -> bool:
        return operation.sym.executor is self

    def can_fuse(self, operation: BoundSymbol) -> bool:
        """Returns whether an operation may be part of a region: it, or each operation of its decomposition, is
        supported. Operations with side effects or symbolic numbers may not."""
        if not fusible(operation):
            return False
        if self.implementation(operation) is not None:
            return True
        return (
            operation.sym.decomposition is not None
            and bool(operation.subsymbols)
            and all(map(self.can_fuse, operation.subsymbols))
        )

    def takes(self, operation: BoundSymbol) -> bool:
        """Returns `can_fuse(operation)`, which is computed once for each operation."""
        answer = self._takes.get(operation)
        if answer is None:
            try:
                with noted(f"{type(self).__name__}.can_fuse"):
                    answer = self.can_fuse(operation)
            except DataDependentError:  # a question about a data-dependent size has no answer
                answer = False
            self._takes[operation] = answer
        return answer

    def takes_chain(self, operations: Sequence[BoundSymbol]) -> bool:
        """Returns whether the executor has kernels for a composite of `thunder.extend.chains` that are faster than
        the operations of the composite."""
        return False

    def is_cheap(self, operation: BoundSymbol) -> bool:
        """Returns whether an operation costs nothing beyond reading its inputs. Regions recompute such an operation
        instead of reading its result from another region."""
        return False

    def keeps(self, operation: BoundSymbol) -> bool:
        """Returns whether results that forward and backward would both write stay in memory, even if that raises the
        peak."""
        return False

    def should_fuse(self, region: Region) -> bool:
        """Returns whether a region is fused. By default, if it has more than one operation."""
        return len(region.bound_symbols) > 1

    def shares_launch(self, region: Region, producer: Mapping[Proxy, BoundSymbol]) -> bool:
        """Returns whether a region may share a launch with independent regions. `fuse` then gets one region with
        `Region.parts`. producer: the producers of the program's values."""
        return False

    def fuse(self, region: Region, counter: int) -> BoundSymbol | None:
        """Returns the operation that runs a region (see `register_temporary_operation`), or None to leave the region
        unfused. May raise TooLarge and Unfused. counter: the number of regions of the trace that were fused before."""
        raise MissingImplementationError(
            f"the fusion executor {self.name} has no fuse(region, counter): a subclass of FusionExecutor defines it"
        )

    def writing_over(
        self, function: Callable, dying: Sequence[int], homes: Mapping[int, int] | None = None
    ) -> tuple[Callable, dict[int, int]] | None:
        """Returns a function of a region that writes results over inputs, with a dict from the index of each such
        output to the index of the input that it overwrites. None if the region overwrites no input.

        dying: indices of inputs that are not read after the region. homes: for indices of inputs that the program
        overwrites, the index of the only output that may be written over that input.
        """
        return None

    def as_text(self, function: Callable) -> dict | None:
        """Returns a description of a region's function in types of JSON, from which `from_text` builds the function
        in another process. None if that is not possible."""
        return None

    def from_text(self, said: dict, operations: Callable, unusual: Callable[[], None]) -> FusedFunction:
        """Builds a region's function from the result of `as_text`. operations: runs the region by PyTorch's
        operations, for calls that differ from those that were described. unusual: called at the first such call."""
        raise NotImplementedError

    def fusion_pass(self, trace: Trace) -> Trace:
        """Before: `t0 = ltorch.mul(a, b)`, `t1 = ltorch.add(t0, a)`, `return t1`. After: `[t1] = joining0(a, b)`,
        `return t1`."""

        def takes(operation: BoundSymbol) -> bool:  # what no other executor has taken
            return (operation.sym.executor is None or operation in trace.info.fusible) and self.takes(operation)

        operations = decided_first(trace.bound_symbols)
        groups = convex_regions(operations, takes)
        regions = schedule(operations, groups, trace.output_proxies)
        regions = recompute_cheap(regions, trace.output_proxies, takes, self.is_cheap)
        items: list[BoundSymbol | Piece] = []
        for region in regions:
            items += [self._piece(region, trace)] if all(map(takes, region.bound_symbols)) else region.bound_symbols
        producer = producers(trace)
        written: list[BoundSymbol] = []

        def shares(core: Region) -> bool:
            return self.shares_launch(core, producer)

        outside = _outside(trace)
        items = in_memory_order(items, trace.output_proxies, outside)
        waiting = share_launches(items, shares, trace.output_proxies, outside)[::-1]
        counter = itertools.count()
        while waiting:
            item = waiting.pop()
            if not isinstance(item, list):
                written.append(item)
                continue
            core = _joined([p.core for p in item])
            fused = None
            if (len(item) > 1 or self.should_fuse(core)) and self.get_fuel():
                # a value of the user's may be called like that
                number = next(n for n in counter if f"{self.name}{n}" not in trace.names.taken)
                try:
                    fused = self.fuse(core, number)
                except TooLarge:
                    if len(item) > 1 or len(item[0].region.bound_symbols) > 1:
                        regions = [p.region for p in item] if len(item) > 1 else _halves(item[0].region)
                        waiting += [[self._piece(r, trace)] for r in regions][::-1]
                        continue
                except (Unfused, DataDependentError) as error:
                    item = [p._replace(region=_with_reason(p.region, error)) for p in item]
            written += (
                [b for p in item for b in p.region.bound_symbols]
                if fused is None
                else [*(b for p in item for b in p.before), fused, *(b for p in item for b in p.after)]
            )
        return trace.replace(bound_symbols=written)

    def _piece(self, region: Region, trace: Trace) -> Piece:
        core, before, after = without_views(region)
        padded = trace.info.padded if self.takes_padding else frozenset()
        return Piece(region, Region(core.bound_symbols, set(core.outputs), padded), before, after)

    def register_temporary_operation(
        self,
        name: str,
        fn: Callable,
        *,
        inputs: Sequence[Proxy | NumberProxy],
        outputs: Sequence[Proxy],
        bsyms: Sequence[BoundSymbol],
    ) -> BoundSymbol:
        """Creates the operation `[outputs] = name(inputs)`. It calls `fn(*inputs)`, which returns a list or tuple.
        bsyms: the operations that it replaces."""
        symbol = Symbol(name, id=f"{self.name}.{name}", is_prim=True, fn=fn, executor=self, is_fusion=True)
        return symbol.bind(
            *inputs, output=list(outputs), subsymbols=tuple(bsyms), context=bsyms[0].context if bsyms else None
        )

    def operation_of(self, region: Region, name: str, fn: Callable) -> BoundSymbol:
        """The operation that runs a region: `fn` takes its inputs, and behind these its symbolic numbers."""
        return self.register_temporary_operation(
            name,
            fn,
            inputs=(*region.inputs, *region.numbers),
            outputs=region.outputs,
            bsyms=region.bound_symbols,
        )

    def once(self, region: Region, make: Callable[[], Callable]) -> Callable:
        """Returns `make()`, which is called once for all regions that are equal except for names."""
        key = region_key(region)
        compiled = self._compiled.get(key)
        if compiled is None:
            while len(self._compiled) >= REMEMBERED:
                del self._compiled[next(iter(self._compiled))]
            compiled = self._compiled[key] = make()
            self.compilations += 1
        return compiled


def _outside(trace: Trace) -> set[Proxy]:
    """The values in memory that the program neither allocates nor frees: arguments, those of the forward too, and what
    is written over them."""
    info = trace.info
    arguments = [*trace.args, *(info.cut.forward.args if info.cut is not None else ())]
    values: set[Proxy] = {a for a in arguments if isinstance(a, TensorProxy)}
    names = {a.name for a in values}
    return values | {o for b in trace.bound_symbols for o in b.outputs if info.written.get(o.name) in names}


def run_by(operation: BoundSymbol, function: Callable, header: str, *tags: OpTags) -> BoundSymbol:
    """A fused operation with another function, and a comment that says how it differs."""
    symbol = Symbol(
        operation.sym.name,
        id=operation.sym.id,
        is_prim=True,
        tags=tags,
        fn=function,
        executor=operation.sym.executor,
        is_fusion=True,
    )
    new = operation.replace(sym=symbol, subsymbols=operation.subsymbols)
    new.header = header
    return new


def written_over(
    operation: BoundSymbol, dying: Sequence[int], homes: Mapping[int, int] | None = None
) -> tuple[BoundSymbol, dict[int, int]]:
    """A fusion that writes results over inputs, and by place of an output the place of the input that it overwrites.
    See `FusionExecutor.writing_over`."""
    fuser, function = operation.sym.executor, operation.sym.fn
    if not isinstance(fuser, FusionExecutor) or function is None:
        return operation, {}
    overwriting = fuser.writing_over(function, dying, homes)
    if overwriting is None:
        return operation, {}
    function, pairs = overwriting
    verb = "may be" if fuser.permits else "is"
    comment = ", ".join(
        f"{operation.outputs[o].name} {verb} written over {operation.inputs[i].name}" for o, i in pairs.items()
    )
    symbol_over = run_by(operation, function, comment, OpTags.IN_PLACE)
    symbol_over.sym.in_place = InPlaceForm(
        function, lambda operation: {o: operation.inputs[i] for o, i in pairs.items()}
    )
    return symbol_over, pairs


def _joined(regions: Sequence[Region]) -> Region:
    """One region with a part for each."""
    if len(regions) == 1:
        return regions[0]
    joined = Region(
        [b for r in regions for b in r.bound_symbols],
        {o for r in regions for o in r.outputs},
        frozenset(p for r in regions for p in r.padded),
    )
    position = {o: i for i, o in enumerate(joined.outputs)}
    parts = tuple(tuple(position[o] for o in r.outputs) for r in regions)
    return Region(joined.bound_symbols, set(joined.outputs), joined.padded, parts)


def _with_reason(region: Region, error: Exception) -> Region:
    reason = error if isinstance(error, Unfused) else "the executor asks about data-dependent sizes"
    first = region.bound_symbols[0].replace()
    first.header = f"not fused: {reason}"
    return Region((first, *region.bound_symbols[1:]), set(region.outputs))


def _halves(region: Region) -> list[Region]:
    """The first and the second half of a region's operations."""
    middle = len(region.bound_symbols) // 2
    second = Region(region.bound_symbols[middle:], set(region.outputs))
    return [Region(region.bound_symbols[:middle], {*region.outputs, *second.inputs}), second]


def without_views(region: Region) -> tuple[Region, tuple[BoundSymbol, ...], tuple[BoundSymbol, ...]]:
    """The region without results that are views of inputs or of other results, with the operations of views of inputs
    before it, and those of other views behind it.

    Passes see aliases by the operations of a program, and a region hides them. A view of all elements of its base, of
    which all other uses are views, stays in the region. A view of an input with uses outside is an input of the region
    as well, so that regions which read it are equal wherever the view is made.
    """
    producer = producers(region.bound_symbols)
    chains = {o: _chain(o, producer) for o in region.outputs}
    views_of: dict[Proxy, list[Proxy]] = {}
    for o, chain in chains.items():
        views_of.setdefault(chain[-1], []).append(o)
    needed: set[Proxy] = set()
    waiting = []
    for base, outputs in views_of.items():
        if base in producer:  # the last value that all of it is seen through
            common = set(chains[outputs[0]]).intersection(*(chains[o] for o in outputs[1:]))
            needed.add(next(v for v in chains[outputs[0]] if v in common and _views_all(v, base)))
        waiting += outputs
    afterwards: dict[BoundSymbol, None] = {}
    while waiting:
        value = waiting.pop()
        operation = producer.get(value)
        if value in needed or operation is None or operation in afterwards:
            continue
        if may_view(operation):
            afterwards[operation] = None
            waiting += operation.inputs
        else:
            needed.add(value)
    if not afterwards:
        return region, (), ()
    of_inputs = {
        operation for operation in afterwards if all(_chain(o, producer)[-1] not in producer for o in operation.outputs)
    }
    inside = [operation for operation in region.bound_symbols if operation not in of_inputs]
    before, after = (
        [
            operation
            for operation in region.bound_symbols
            if operation in afterwards and (operation in of_inputs) is first
        ]
        for first in (True, False)
    )
    return Region(leading_to(inside, needed), needed), tuple(before), tuple(after)


def _chain(value: Proxy, producer: dict[Proxy, BoundSymbol]) -> list[Proxy]:
    """A value, its base, the base of that, and so on."""
    chain = [value]
    while (
        (operation := producer.get(chain[-1])) is not None
        and may_view(operation)
        and isinstance(operation.args[0], Proxy)
    ):
        chain.append(operation.args[0])
    return chain


def _views_all(view: Proxy, base: Proxy) -> bool:
    """Whether a view certainly has all elements of its base."""
    if isinstance(view, TensorProxy) and isinstance(base, TensorProxy):
        return view is base or equal_counts(view, base)
    return view is base


def computing(region: Region) -> list[BoundSymbol]:
    """The operations of a region that compute, without views and copies, and with composites of no kernel
    decomposed."""
    operations = [
        o for b in region.bound_symbols for o in ([b] if b.sym.is_prim or b.sym.fn is not None else b.subsymbols)
    ]
    return [operation for operation in operations if OpTags.SHAPE_OP not in operation.sym.tags]


def fusible(operation: BoundSymbol, numbers: bool = False) -> bool:
    """Whether regions may contain an operation: none with effects, none that waits for the device or draws random
    numbers, and none that depends on symbolic numbers, unless the executor takes `numbers`."""
    if not operation.sym.tags.isdisjoint(_ALONE) or operation.sym.python_printer is not None or operation.sym.is_fusion:
        return False
    if not (has_numbers(operation.args) or has_numbers(operation.output) or has_numbers(operation.kwargs)):
        return True
    if not numbers:
        return False
    tensors = [p for p in (*operation.inputs, *operation.outputs) if isinstance(p, TensorProxy)]
    return all(map(of_integers, numbers_in([t.shape for t in tensors], []))) and all(
        map(_is_named, numbers_in((operation.args, operation.kwargs), []))
    )


def of_integers(number: NumberProxy) -> bool:
    """Whether a symbolic number is an expression of integers that are all arguments, or all data-dependent."""
    if number.unbacked:
        return _is_named(number) and all(u.python_type is int for u in number.unbacked)
    return all(type(number.decisions.values[name]) is int for name in number.expression.symbols())


def has_data_dependent_sizes(operation: BoundSymbol) -> bool:
    """Whether the shape of an input or a result depends on data."""
    tensors = [p for p in (*operation.inputs, *operation.outputs) if isinstance(p, TensorProxy)]
    return any(n.unbacked for n in numbers_in([t.shape for t in tensors], []))


def _is_named(number: NumberProxy) -> bool:
    """Whether each number in an expression is passed in, or made of data."""
    own = {u.name for u in number.unbacked}
    return own.union(number.decisions.values) >= number.expression.symbols()


_ALONE = {OpTags.DONT_DCE, OpTags.RANDOM_OP, OpTags.DEVICE_SYNC_OP, OpTags.IN_PLACE, OpTags.OPAQUE}
