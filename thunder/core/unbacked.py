"""Data-dependent sizes: their definition by operations of a trace, and the types of results whose shape depends on
them.

Before: `t0 = ltorch.nonzero(x)`. After: `t0 = ltorch.nonzero(x)  # "cpu i64[u0, 2]"`, `u0 = size(t0, 0)`. Later
operations use `u0` by that name.

A meta rule computes with such sizes as with others. Where it would have to decide by one, the operation is typed by
examples: the rule runs with several numbers in its place. The results show which sizes are constants, which are sizes
of arguments, and which have to be read from the result. Sizes that are not read are checked when the program runs, so
that a missing example is an error and never a wrong shape.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from thunder.core.numbers import made_number
from thunder.core.proxies import (
    METHODS,
    RELATIONS,
    AnyProxy,
    Condition,
    NumberProxy,
    Proxy,
    TensorProxy,
    UnbackedNumber,
    leaves,
    like,
    map_structure,
    numbers_in,
    proxies_in,
)
from thunder.core.symbol import (
    UNBACKED,
    BoundSymbol,
    Names,
    OpTags,
    Recorder,
    Symbol,
    current_recorder,
    detached,
    primitive,
)
from thunder.core.symbolic import Facts
from thunder.errors import DataDependentError, UnforeseenShapeError

# ------------------------------------------------------------------------------ operations that make numbers


def fresh_size() -> NumberProxy:
    """For meta rules: a size that is read from the result when the program runs. It stands alone in one dimension of a
    result."""
    recorder = current_recorder()
    assert recorder is not None, "a data-dependent size is known in a trace only"
    unbacked, number = made_number(recorder, int, "a data-dependent size")
    unbacked.facts.least[unbacked.name] = 0
    recorder.sizes = [*(recorder.sizes or ()), unbacked]
    return number  # type: ignore[return-value]


def read_sizes(recorder: Recorder, operation: BoundSymbol) -> None:
    """Records the operations that read the data-dependent sizes of the result of `operation`."""
    waiting = {u.name: u for u in recorder.sizes}  # type: ignore[union-attr]
    recorder.sizes = []
    for o in operation.outputs:
        for dim, n in enumerate(o.shape) if isinstance(o, TensorProxy) else ():
            unbacked = waiting.pop(n.name, None) if isinstance(n, NumberProxy) else None
            if unbacked is not None:
                unbacked.origin = f"dimension {dim} of a result of {operation.sym.name}"
                recorder.bound_symbols.append(
                    BoundSymbol(
                        size_symbol, (o, dim), {}, unbacked, context=operation.context, location=operation.location
                    )
                )


def with_sizes(operations: Sequence[BoundSymbol], arguments: Iterable, names: Names) -> list[BoundSymbol]:
    """The operations, with definitions of sizes that are used and not defined: a derivative may use sizes that the
    program did not."""
    produced = {o for operation in operations for o in operation.outputs} if names.facts.least else ()
    missing = (
        {
            i.name: i
            for operation in operations
            for i in operation.inputs
            if type(i) is UnbackedNumber and i not in produced
        }
        if produced
        else {}
    )
    if not missing:
        return list(operations)
    out: list[BoundSymbol] = []

    def measure(values: Iterable, context) -> None:
        for value in values:
            for dim, n in enumerate(value.shape) if isinstance(value, TensorProxy) else ():
                if isinstance(n, NumberProxy) and (number := missing.pop(n.name, None)) is not None:
                    out.append(BoundSymbol(size_symbol, (value, dim), {}, number, context=context))

    measure(arguments, None)
    for operation in operations:
        out.append(operation)
        measure(operation.outputs, operation.context)
    return out


size_symbol = Symbol("size", is_prim=True, fn=lambda tensor, dim: tensor.shape[dim])
number_symbol = Symbol("number", is_prim=True, fn=lambda number: number)


def made_of(recorder: Recorder, number: NumberProxy) -> NumberProxy | Condition:
    """A number of the arguments as one that an operation makes, so that it may stand beside data-dependent ones."""
    unbacked, value = made_number(recorder, number.python_type, f"the number {number.expression}")
    if (least := number.decisions.least(number.expression)) > -math.inf:
        unbacked.facts.least[unbacked.name] = int(least)
    context = recorder.context.afterwards
    recorder.bound_symbols.append(BoundSymbol(number_symbol, (number,), {}, unbacked, context=context))
    return value


# ---------------------------------------------------------------------------------------------------------------- what
# the program runs with


@primitive(lambda tensor, expected, name: None, tags=(OpTags.DONT_DCE,))
def check_sizes(tensor, expected: tuple, name: str) -> None:
    if len(tensor.shape) == len(expected) and all(n is None or n == m for n, m in zip(expected, tensor.shape)):
        return
    wanted = ", ".join("any" if n is None else str(n) for n in expected)
    raise UnforeseenShapeError(
        f"the result of {name} has the shape {list(tensor.shape)}, where the compiled program was made for "
        f"[{wanted}]: the shape depends on data in a way that was not foreseen. "
        "Run this part outside of the compiled function, and pass the result in"
    )


def _check_condition(a, relation: str, b, message: str) -> None:
    if not RELATIONS[relation](a, b):
        raise RuntimeError(message)


check_condition = Symbol(
    "check", lambda a, relation, b, message: None, is_prim=True, tags=(OpTags.DONT_DCE,), fn=_check_condition
)


CHECKS = frozenset((check_sizes, check_condition))  # of what a program was made for


def assume(condition: Condition, message: str) -> None:
    """Assumes a condition from here on: the program checks it when it runs, and raises RuntimeError with the message
    where it does not hold."""
    recorder = current_recorder()
    assert recorder is not None, "conditions are checked by operations of a trace"
    check_condition.record(recorder, (condition.a, condition.relation, condition.b, message), {}, None)
    condition.assume()


def check_shapes(a: tuple, b: tuple, refusal: str) -> None:
    """Two shapes are equal; where that is data-dependent, the program checks it. Raises RuntimeError where they are
    not, then or now."""
    conditions = [m == n for m, n in zip(a, b)]
    if len(a) != len(b) or any(equal is False for equal in conditions):
        raise RuntimeError(refusal)
    for equal in conditions:
        if equal is not True:
            assume(equal, refusal)


def as_size(n, message: str) -> None:
    """A data-dependent number as a size: it is at least 0 from here on, which the program checks."""
    if isinstance(n, NumberProxy) and n.unbacked:
        condition = n >= 0  # type: ignore[operator]
        if isinstance(condition, Condition):
            assume(condition, message)


# ----------------------------------------------------------------------------------------------------------------
# typing by examples

_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError)


def typed_otherwise(symbol: Symbol, recorder: Recorder, args: tuple, kwargs: dict, error: DataDependentError):
    """Records a call whose meta rule asks what is data-dependent: typed by examples, or, where these do not help and
    the program may be one for this path only, with the numbers that are there now. Returns the result."""
    try:
        return typed_by_examples(symbol, recorder, args, kwargs, error)
    except DataDependentError:
        if sizes := varying((args, kwargs)):
            for n in sizes:
                n.concrete()
            return symbol(*args, **kwargs)
        if recorder.decide is None or recorder.typing:
            raise
    if symbol.meta is not None:  # which asks of this path what it needs
        try:
            return symbol.record(recorder, args, kwargs, symbol.meta(*args, **kwargs))
        except DataDependentError:
            pass
    settled = map_structure(_settled, args), map_structure(_settled, kwargs)
    if all(a is b for a, b in zip(leaves(settled), leaves((args, kwargs)), strict=True)):
        raise error
    return symbol(*settled[0], **settled[1])


def varying(values) -> list[NumberProxy]:
    """The numbers of arguments in values and in shapes that a program does not hold for one value of."""
    by_expression = {n.expression: n for n in numbers_in(values, []) if not n.unbacked}
    return [n for n in by_expression.values() if not n.decisions.is_one_value(n.expression)]


def _settled(x):
    """The same without numbers of data: this path is for the ones that are there now."""
    if isinstance(x, NumberProxy) and x.unbacked:
        return x.concrete()
    if isinstance(x, TensorProxy) and any(isinstance(n, NumberProxy) and n.unbacked for n in x.shape):
        return METHODS["view"](x, tuple(n.concrete() if isinstance(n, NumberProxy) else n for n in x.shape))
    return x


def typed_by_examples(symbol: Symbol, recorder: Recorder, args: tuple, kwargs: dict, error: DataDependentError):
    """Records a call whose meta rule would have to decide by a data-dependent number, and returns the result.
    Raises `error` where examples do not help."""
    recorder.sizes = []
    numbers = numbers_in(kwargs, numbers_in(args, []))
    symbols = _symbols(numbers)

    def runs_of(examples: Iterator[dict]) -> list[_Run]:
        runs = (_run(symbol, recorder, args, kwargs, values) for values in itertools.islice(examples, error.examples))
        return [run for run in runs if run is not None]

    runs = runs_of(_examples(symbols, (args, kwargs)))
    candidates = list({n.expression: n for n in numbers if n.python_type is int}.values())
    if not _all_alike(runs):
        raise error
    if any(len(_fitting(sizes, runs, candidates)) > 1 for sizes in _sizes_of_runs(runs)):
        runs += runs_of(_near(runs, symbols))
        if not _all_alike(runs):
            raise error
    leaves = [_merged(i, runs, candidates) for i in range(len(runs[0].leaves))]
    fresh = {u.name for u in recorder.sizes}
    rest = iter(leaves)
    out = symbol.record(recorder, args, kwargs, map_structure(lambda _: next(rest), runs[0].result))
    for result, seen in zip(leaves, runs[0].leaves):
        if isinstance(result, TensorProxy) and result is not seen:
            _check(symbol, recorder, result, fresh)
    if OpTags.OPAQUE in symbol.tags and recorder.memory is not None:  # its results may share memory with its arguments
        for result in (x for x in leaves if isinstance(x, TensorProxy)):
            for operand in proxies_in((args, kwargs), []):
                if isinstance(operand, TensorProxy) and operand is not result:
                    recorder.memory.share(result, operand)
    return out


def _symbols(numbers: Iterable[NumberProxy]) -> list[UnbackedNumber]:
    """What numbers are expressions of, those of arguments among them: their own values decide nothing here."""
    by_name = {u.name: u for n in numbers for u in n.unbacked}
    for n in numbers:
        for name in sorted(n.expression.symbols() - by_name.keys()):
            by_name[name] = UnbackedNumber(name, type(n.decisions.values[name]), "", facts := Facts())
            if n.decisions.is_size(name):
                facts.least[name] = 2
    return list(by_name.values())


def _check(symbol: Symbol, recorder: Recorder, result: TensorProxy, fresh: set[str]) -> None:
    expected = tuple(None if isinstance(n, NumberProxy) and n.name in fresh else n for n in result.shape)
    if any(n is not None for n in expected):
        check_sizes.record(recorder, (result, expected, symbol.name), {}, None)


class _Run(NamedTuple):
    """What a meta rule gave for one choice of numbers; arguments that it returned are the call's own."""

    values: dict[str, int | float]
    result: Any
    leaves: list


def _run(symbol: Symbol, recorder: Recorder, args: tuple, kwargs: dict, values: dict) -> _Run | None:
    """None where the rule refuses these numbers."""
    examples: dict[Proxy, TensorProxy] = {}
    originals: dict[Proxy, TensorProxy] = {}

    def placed(x):
        if isinstance(x, NumberProxy):
            return x.expression.evaluate(values)
        if not isinstance(x, TensorProxy) or all(type(n) is int for n in x.shape):
            return x
        if x not in examples:
            examples[x] = x.replace(shape=tuple(map(placed, x.shape)))
            originals[examples[x]] = x
        return examples[x]

    leaves: list = []

    def restored(x):
        leaves.append(originals.get(x, x) if isinstance(x, TensorProxy) else x)
        return leaves[-1]

    try:
        with detached(recorder.context):
            args, kwargs = map_structure(placed, args), map_structure(placed, kwargs)
            result = (symbol.meta or symbol.decomposition)(*args, **kwargs)  # type: ignore[misc]
    except _REFUSALS:
        return None
    return _Run(values, map_structure(restored, result), leaves)


def _all_alike(runs: Sequence[_Run]) -> bool:
    first = runs[0].leaves if runs else []
    return bool(runs) and all(len(r.leaves) == len(first) and all(map(_alike, r.leaves, first)) for r in runs)


def _alike(a, b) -> bool:
    """Whether two results differ in sizes at most."""
    if isinstance(a, TensorProxy) and isinstance(b, TensorProxy):
        return len(a.shape) == len(b.shape) and a.dtype is b.dtype and a.device is b.device
    if isinstance(a, AnyProxy):  # an example is a tensor of one size
        return isinstance(b, AnyProxy) and a.example is None is b.example
    return type(a) is type(b) and not isinstance(a, (TensorProxy, NumberProxy)) and (isinstance(a, Proxy) or a == b)


def _merged(i: int, runs: Sequence[_Run], candidates: Sequence[NumberProxy]):
    """The i-th leaf of the result: what it is in every run."""
    first = runs[0].leaves[i]
    if not isinstance(first, TensorProxy) or all(run.leaves[i] is first for run in runs):
        return first
    sizes = [[_size(run, i, dim) for run in runs] for dim in range(len(first.shape))]
    fitting = (_fitting(of_runs, runs, candidates) for of_runs in sizes)
    merged = like(first, tuple(fits[0] if fits else fresh_size() for fits in fitting))
    merged.requires_grad = any(run.leaves[i].requires_grad for run in runs)  # where the rule says so itself
    return merged


def _size(run: _Run, i: int, dim: int) -> int | None:
    n = run.leaves[i].shape[dim]
    return (
        n
        if type(n) is int
        else n.expression.evaluate(run.values)
        if n.expression.symbols() <= run.values.keys()
        else None
    )


def _sizes_of_runs(runs: Sequence[_Run]) -> Iterator[list]:
    """By each dimension of each tensor that a rule gave: its sizes in the runs."""
    for i, leaf in enumerate(runs[0].leaves):
        if isinstance(leaf, TensorProxy) and any(run.leaves[i] is not leaf for run in runs):
            for dim in range(len(leaf.shape)):
                yield [_size(run, i, dim) for run in runs]


def _fitting(sizes: list, runs: Sequence[_Run], candidates: Sequence[NumberProxy]) -> list:
    """The constant, and the numbers of the arguments', that are a size in all runs. Where there are none, the size is
    read when the program runs."""
    if None in sizes:
        return []
    fits: list = [sizes[0]] if all(n == sizes[0] for n in sizes) else []
    of_runs = list(zip(runs, sizes))
    return fits + [c for c in candidates if all(c.expression.evaluate(run.values) == n for run, n in of_runs)]


def _near(runs: Sequence[_Run], symbols: Sequence[UnbackedNumber]) -> Iterator[dict[str, int | float]]:
    """Numbers to try that differ by one from some with which a rule ran: they tell numbers apart which are the same in
    all runs by chance, and none where the rule wants them to be equal."""
    for run in runs[:: max(1, len(runs) // 6)]:
        for u in symbols:
            for value in (run.values[u.name] + 1, run.values[u.name] - 1):
                if value >= u.facts.least.get(u.name, value):
                    yield run.values | {u.name: u.python_type(value)}


def _examples(unbacked: list[UnbackedNumber], arguments) -> Iterator[dict[str, int | float]]:
    """Numbers to try: small ones, large ones, those around the constants in the arguments; the same for all, all
    different, any, and each in turn different from the others."""
    if not unbacked:
        return
    constants = _constants(arguments)
    near = sorted({n + d for n in constants for d in (-1, 0, 1)}, key=abs)
    tried = list(
        dict.fromkeys((7, 2, 3, 5040, 7919, 1, 0, *near, *(2 * n for n in constants), -1, -2, *(-n for n in constants)))
    )
    rows: list[list] = [[v] * len(unbacked) for v in tried]
    if len(unbacked) > 1:
        few, any_of = (1, 0, 7, 5040, *constants[:4]), random.Random(0)
        rows.append(
            [n for n, _ in zip((11, 13, 17, 19, 23, 29, 31, 37, 41, 43), unbacked)] + [47] * (len(unbacked) - 10)
        )
        rows += [[any_of.choice(tried) for _ in unbacked] for _ in range(40)]
        rows += [
            [v if i == j else w for j in range(len(unbacked))]
            for v in few
            for w in few
            if v != w
            for i in range(len(unbacked))
        ]
    for values in rows:
        if all(v >= u.facts.least.get(u.name, v) for u, v in zip(unbacked, values)):
            yield {u.name: u.python_type(v) for u, v in zip(unbacked, values)}
    if any(u.python_type is float for u in unbacked):
        yield {u.name: u.python_type(2.5) for u in unbacked}


def _constants(arguments) -> list[int]:
    """The ints in arguments and in their shapes, the products of those that stand together, and how often the former go
    into these."""
    constants: dict[int, None] = {}

    def note(x):
        if isinstance(x, TensorProxy):
            walk(x.shape)
        elif type(x) is int and abs(x) < 1 << 40:
            constants[x] = None
        return x

    def walk(x):
        if isinstance(x, (tuple, list)) and x and all(type(n) is int for n in x):
            product = math.prod(x)
            constants.update(dict.fromkeys([product, *(product // n for n in x if n)]))
        if isinstance(x, (tuple, list)):
            for e in x:
                walk(e)
        else:
            map_structure(note, x)

    walk([*arguments[0], *arguments[1].values()])
    constants.update(dict.fromkeys([m // n for m in constants for n in constants if 1 < n < m and m % n == 0]))
    return sorted(constants, key=abs)[:24]


UNBACKED |= {"typed_otherwise": typed_otherwise, "read_sizes": read_sizes}
