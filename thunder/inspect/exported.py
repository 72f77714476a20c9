"""A captured program as a module that `torch.export` records: tensors in, PyTorch's operations, tensors out.

Decisions by data become `torch.cond`. Each of its branches is the rest of one path:

    y = x * 2                                 y = torch.mul(x, 2)
    if x.sum() > 0:                           t2 = torch.gt(torch.sum(x), 0)
        return y + 1                          return torch.cond(t2 != 0, lambda y: y + 1, lambda y: y - 1, (y,))
    return y - 1

Sizes that stay symbolic are read from the arguments, and the relations between them that the program was decided by
become guards of `torch.export`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from thunder.core.numbers import settled
from thunder.core.paths import Decision, check_decision
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, UnbackedNumber, map_structure, numbers_in, proxies_in
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.symbolic import RELATIONS, Expression
from thunder.core.trace import Trace
from thunder.inspect.plain import plain_program

MOST_PATHS = 16
OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
# of numbers that data makes, on tensors of one element
_ON_TENSORS = {"add", "sub", "mul", "floordiv", "mod", "truediv", "neg", "abs"}


class NotExported(Exception):
    """The program does something that an exported one cannot do. The words say what."""


class Origin(NamedTuple):
    """Where an input of a program comes from. leaf: its position among the arguments of a call, None for what the
    module holds. dimension: of the argument whose size it is."""

    leaf: int | None
    dimension: int | None = None


class Exported(torch.nn.Module):
    """A program as a module. places: of its inputs, by name. held: those that the module holds. relations: between
    sizes, and whether they hold."""

    def __init__(
        self, run: Callable[[dict], Any], places: Mapping[str, Origin], held: Mapping[str, torch.Tensor],
        relations: Mapping[tuple, bool],
    ):  # fmt: skip
        super().__init__()
        self.run, self.places = run, dict(places)
        self.relations = [(a, r if holds else OPPOSITE[r], b) for (a, r, b), holds in relations.items()]
        for name, tensor in held.items():
            self.register_buffer(name, tensor.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        values = {name: self._value(name, origin, leaves) for name, origin in self.places.items()}
        for a, relation, b in self.relations:
            if not RELATIONS[relation](a.evaluate(values), b.evaluate(values)):  # which torch.export takes for a guard
                raise NotExported(f"it is a program for {a} {relation} {b}")
        return self.run(values)

    def _value(self, name: str, origin: Origin, leaves: list) -> Any:
        if origin.leaf is None:
            return getattr(self, name)
        value = leaves[origin.leaf]
        return value if origin.dimension is None else value.shape[origin.dimension]


class Straight:
    """Operations without a decision between them. arguments: the names of what they read from outside."""

    def __init__(self, trace: Trace, operations: Sequence[BoundSymbol], output: Any, symbolic: bool):
        inside = {o.name for b in operations for o in b.outputs}
        read = [*_read(operations), *_values(output)]
        arguments = {p.name: p for p in read if p.name not in inside}
        known = {p.name: p for p in trace.args if isinstance(p, Proxy | NumberProxy)}
        self.arguments = list(arguments)
        inputs: list[Any] = [known.get(name, p) for name, p in arguments.items()]
        keep_numbers = (lambda x: x) if symbolic else settled
        self.run = plain_program(inputs, operations, output, trace.names, keep_numbers).function

    def __call__(self, values: dict[str, Any]) -> Any:
        return self.run(*(values[name] for name in self.arguments))


class Comparison:
    """A decision, on the tensors whose numbers it reads. tensors: by the name of the number."""

    def __init__(self, check: BoundSymbol, reads: Sequence[BoundSymbol]):
        left, self.relation, right, *_ = check.args
        self.sides = [_expression(x) for x in (left, right)]
        expressions = [x for x in self.sides if isinstance(x, Expression)]
        symbols = {s for x in expressions for s in x.symbols()}
        self.tensors = {o.name: _one_tensor(b) for b in reads for o in b.outputs if o.name in symbols}
        divides = any("truediv" in _applications(x) for x in expressions)
        if divides and any(t.dtype.category < 2 for t in self.tensors.values()):
            raise NotExported("it branches on a quotient of integers that depends on data")
        self.arguments = [*_names(self.tensors.values()), *(s for s in symbols if s not in self.tensors)]

    def __call__(self, values: dict[str, Any]) -> Any:
        numbers = values | {number: _number(values[t.name], t) for number, t in self.tensors.items()}
        left, right = (x.evaluate(numbers) if isinstance(x, Expression) else x for x in self.sides)
        return RELATIONS[self.relation](left, right)


class Decided:
    """Operations, a decision by what they compute, and the rest of the program for each of its answers."""

    def __init__(
        self, trace: Trace, operations: Sequence[BoundSymbol], check: BoundSymbol, ways: dict[bool, Any],
        symbolic: bool,
    ):  # fmt: skip
        reads = _numbers_of_data(operations)
        computing = [b for b in operations if b not in reads]
        self.ways, self.decision = ways, Comparison(check, reads)
        self.operands = list(dict.fromkeys(name for way in ways.values() for name in way.arguments))
        used = {*self.operands, *_names(_read(computing))}
        if numbers := [o.name for b in reads for o in b.outputs if o.name in used]:
            raise NotExported(f"it computes with the number {numbers[0]}, which depends on data")
        results = {o.name: o for b in computing for o in b.outputs}
        outside = [*self.operands, *self.decision.arguments]
        self.results = [name for name in dict.fromkeys(outside) if name in results]
        self.shared = Straight(trace, computing, tuple(results[name] for name in self.results), symbolic)
        self.arguments = list(dict.fromkeys([*self.shared.arguments, *(n for n in outside if n not in results)]))

    def __call__(self, values: dict[str, Any]) -> Any:
        values = values | dict(zip(self.results, self.shared(values), strict=True))
        tensors = {name: values[name] for name in self.operands if isinstance(values[name], torch.Tensor)}
        sizes = {name: values[name] for name in self.operands if name not in tensors}  # which are no operands of cond

        def way(answer: bool) -> Callable:
            def run(*operands):
                result = self.ways[answer](sizes | dict(zip(tensors, operands, strict=True)))
                return map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result)

            return run

        return torch.cond(self.decision(values), way(True), way(False), tuple(tensors.values()))


def tree_of_paths(
    trace: Trace, path: tuple[Decision, ...], other: Callable[[tuple[Decision, ...]], Trace], symbolic: bool
) -> Straight | Decided:
    """A program with all ways that its decisions can go. other: captures the program whose decisions begin with those.

    Raises NotExported where a decision is more than yes or no, or there are too many paths.
    """
    count = 0

    def build(trace: Trace, path: tuple[Decision, ...], start: int, known: int) -> Straight | Decided:
        """The rest of a program, behind its first operations and decisions."""
        nonlocal count
        operations = trace.bound_symbols
        end = next((i for i in range(start, len(operations)) if _decides(operations[i])), len(operations))
        if end == len(operations):
            count += 1
            if count > MOST_PATHS:
                raise NotExported(f"its branches on data have more than {MOST_PATHS} paths")
            return Straight(trace, operations[start:], trace.output, symbolic)
        check, decision = operations[end], path[known]
        if check.sym is not check_decision:
            raise NotExported(f"it branches on the value of a number ({decision.question}), not by a comparison")
        flipped = (*path[:known], decision._replace(answer=not decision.answer))
        second, second_path = other(flipped)
        if [str(b) for b in second.bound_symbols[:end]] != [str(b) for b in operations[:end]]:
            raise NotExported(f"what it computes before the decision {decision.question} depends on its answer")
        rest = {
            decision.answer: build(trace, path, end + 1, known + 1),
            flipped[-1].answer: build(second, second_path, end + 1, known + 1),
        }
        return Decided(trace, operations[start:end], check, rest, symbolic)

    return build(trace, path, 0, 0)


def _decides(operation: BoundSymbol) -> bool:
    return OpTags.DECISION in operation.sym.tags


def _values(x: Any) -> list[Any]:
    """The values in a structure: tensors, and the symbols of numbers."""
    symbols = [s for number in numbers_in(x, []) for s in number.expression.symbols()]
    return [*proxies_in(x, []), *map(_Symbol, symbols)]


class _Symbol(NamedTuple):
    """A symbol of a size, in the place of a value."""

    name: str


def _read(operations: Iterable[BoundSymbol]) -> list[Any]:
    return [value for b in operations for value in _values((b.args, b.kwargs))]


def _names(values: Iterable[Any]) -> list[str]:
    return [x.name for x in values]


def _numbers_of_data(operations: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The operations that read a number of a tensor."""
    return [b for b in operations if isinstance(b.output, UnbackedNumber)]


def _one_tensor(operation: BoundSymbol) -> TensorProxy:
    tensors = [x for x in operation.args if isinstance(x, TensorProxy)]
    if len(tensors) != 1 or len(operation.args) != 1 or operation.kwargs:
        raise NotExported(f"it branches on the result of {operation.sym.name}")
    return tensors[0]


def _expression(x: Any) -> Any:
    if not isinstance(x, NumberProxy):
        return x
    for application in _applications(x.expression):
        if application not in _ON_TENSORS:
            raise NotExported(f"it branches on {application} of a number that depends on data")
    return x.expression


def _applications(expression: Expression) -> list[str]:
    atoms = [atom for monomial in expression.terms for atom in monomial if not isinstance(atom, str)]
    return [name for atom in atoms for name in (str(atom[0]), *(n for e in atom[1:] for n in _applications(e)))]


def _number(x: torch.Tensor, proxy: TensorProxy) -> torch.Tensor:
    """The number of a tensor with one element, as Python would compute with it."""
    x = x.reshape(())
    return x.double() if proxy.dtype.category >= 2 else x.long()
