"""Rules: a pattern, the replacement of what it matches, and the condition under which it is replaced.

    def attention(q, k, v, scale: float):
        return torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v

    def fused(q, k, v, scale):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    thunder.jit(model, rules=[thunder.rule(attention, fused)])

Before: `t0 = k.transpose(-2, -1)`, `t1 = matmul(q, t0)`, `t2 = mul(t1, 0.125)`, `t3 = softmax(t2, -1)`, `t4 =
matmul(t3, v)`. After: `t4 = scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=0.125)`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from thunder.analysis.aliases import may_view
from thunder.analysis.cost import estimated_time
from thunder.core import dtypes
from thunder.core.check import is_like
from thunder.core.proxies import Proxy, TensorProxy, leaves, proxies_in
from thunder.core.rewrite import Rewriter
from thunder.core.symbol import BoundSymbol, Symbol, is_outside
from thunder.errors import DataDependentError, DeclarationError, OptionError, noted, said_by
from thunder.extend.own import finder_of
from thunder.extend.patterns import Attempt, Flow, Match, Matcher, Parameter, Pattern, equal_values, placed, traced
from thunder.ops import ltorch
from thunder.ops.registry import operation_of
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype

__all__ = ["CAPTURED", "CUT", "EVERY", "JOINT", "Match", "Rule", "check_rules", "rule"]

CAPTURED, JOINT, CUT = "captured", "joint", "cut"
STAGES = (CAPTURED, JOINT, CUT)

# other values of the parameters that are no tensors: the arguments that change with them are theirs
_OTHERS: dict[type, Callable[[Any], Any]] = {
    bool: lambda x: not x,
    int: lambda x: x - 1 if x > 0 else x + 1,
    float: lambda x: x * 0.75 + 0.0625,
    torch.dtype: lambda x: torch.float64 if x is not torch.float64 else torch.float32,
}
_EXAMPLES: dict[Any, Any] = {float: 0.3125, int: 1, bool: True, torch.dtype: torch.float16}
_EXAMPLES |= {"float": 0.3125, "int": 1, "bool": True, "torch.dtype": torch.float16}
_RANKS = (4, 3, 2, 1)  # of tensors without an example


# as the pattern of a rule, it matches each operation
EVERY = Symbol("every_operation", lambda *args, **kwargs: None, is_prim=True)


@dataclass(eq=False)
class Rule:
    """A pattern and its replacement. `thunder.rule` creates it, and documents the fields.

    `where` returns whether a program may have matches at all.
    """

    name: str
    pattern: Callable | Symbol
    replacement: Callable
    when: Callable[..., bool] | None = None
    at: str = CAPTURED
    exact: bool = False
    examples: Sequence | None = None
    where: Callable[[Flow], bool] = lambda flow: True
    cheaper: bool = False

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        """The pattern as traced on examples."""
        return () if isinstance(self.pattern, Symbol) else _patterns(self, self.examples)

    @cached_property
    def _takes_matches(self) -> tuple[bool, bool]:
        """Whether the condition and the replacement have a parameter for the match."""
        return self.when is not None and _takes_match(self.when), _takes_match(self.replacement)

    @staticmethod
    def _with_match(takes_match: bool, match: Match) -> dict[str, Match]:
        return {"match": match} if takes_match else {}

    @property
    def is_of_user(self) -> bool:
        """Whether a user of thunder wrote the functions of the rule."""
        return any(map(is_outside, (self.pattern, self.replacement, self.when)))

    def __repr__(self) -> str:
        return f"<rule {self.name}>"

    def __reduce_ex__(self, protocol):
        """A rule of thunder's own is pickled by its name."""
        return super().__reduce_ex__(protocol) if (find := finder_of(self)) is None else (find, (self.name,))

    # ------------------------------------------------------------------------------------------------------- matching
    def matches(self, flow: Flow, attempt: Attempt) -> Iterator[Match]:
        """Yields the matches in a program, in order. Two matches have no operation in common."""
        taken: dict[BoundSymbol, int] = {}  # and the positions of the replacements
        if not self.where(flow):
            return
        for operation in self._starts(flow):
            if operation in taken:
                continue
            match = self._match(operation, flow, attempt)
            if match is None or not taken.keys().isdisjoint(match.operations):
                continue
            position = flow.position(match.anchor)
            sources = map(flow.producer, proxies_in((match.arguments, match.keywords), []))
            if all(taken.get(b, -1) < position for b in sources if b is not None):
                taken |= dict.fromkeys(match.operations, position)
                yield match

    def _starts(self, flow: Flow) -> Sequence[BoundSymbol]:
        """The operations that may compute the first result of a match."""
        if self.pattern is EVERY:
            return flow.trace.bound_symbols
        if isinstance(self.pattern, Symbol):
            return flow.by_symbol.get(self.pattern, ())
        symbols = {s for s in flow.by_symbol if any(p.may_begin_at(s) for p in self.patterns)}
        return [b for b in flow.trace.bound_symbols if b.sym in symbols] if symbols else ()

    def _match(self, operation: BoundSymbol, flow: Flow, attempt: Attempt) -> Match | None:
        try:
            for match in self._candidates(operation, flow, attempt):
                if self._replaces(match, attempt):
                    return match
        except DataDependentError:  # no answer holds for all sizes
            pass
        return None

    def _candidates(self, operation: BoundSymbol, flow: Flow, attempt: Attempt) -> Iterator[Match]:
        """The matches that end in an operation, whose condition holds."""
        if isinstance(self.pattern, Symbol):
            if self.pattern is operation.sym or self.pattern is EVERY:
                match = Match(operation.args, operation.kwargs, (operation,), operation.outputs, flow, operation)
                if self._holds(match, attempt):
                    yield match
            return
        for pattern in self.patterns:
            for state in Matcher(pattern, flow, attempt).at(operation):
                arguments = tuple(
                    state.values.get(p.name if isinstance(p, Parameter) else p) for p in pattern.parameters.values()
                )
                match = placed(state, pattern, flow, arguments, attempt)
                if match is not None and self._holds(match, attempt) and self._is_confirmed(match, operation, attempt):
                    yield match

    def _holds(self, match: Match, attempt: Attempt) -> bool:
        """Whether the condition of the rule holds for a match."""
        if self.when is None:
            return True
        who = f"the condition of the rule {self.name}"
        with noted(who):
            keywords = {**match.keywords, **self._with_match(self._takes_matches[0], match)}
            holds = said_by(who, self.when, match.arguments, keywords)
        if holds:
            return True
        attempt.note(len(match.operations) + 1, "its condition does not hold", match.operation)
        return False

    def _replaces(self, match: Match, attempt: Attempt) -> bool:
        """Whether the replacement can be written, and costs less where it has to. Raises DeclarationError where its
        types are others."""
        operations, _ = traced(lambda: self._results(match, match.arguments, match.keywords), (), match.anchor.context)
        if not self.cheaper or _cost(operations) < _cost(match.operations):
            return True
        attempt.note(len(match.operations) + 1, "its replacement is estimated to take as long", match.operation)
        return False

    def _is_confirmed(self, match: Match, operation: BoundSymbol, attempt: Attempt) -> bool:
        """Whether the pattern computes with the values of its parameters what the operations of a match do."""
        flow = match.flow
        try:
            operations, result = traced(self.pattern, match.arguments, operation.context)
        except DataDependentError:
            raise
        except Exception:  # noqa: BLE001  the function of a user's, for operands that it is not written for
            return False
        outputs = tuple(_outputs(result))
        if len(outputs) != len(match.outputs) or not all(map(is_like, outputs, match.outputs)):
            return False
        exact = Pattern({}, tuple(operations), outputs, literals=True)
        return outputs[0] in exact.producer and any(
            all(state.values[o] is x for o, x in zip(outputs, match.outputs))
            and all(_is_same(v, state.values.get(v, v), flow) for v in proxies_in(match.arguments, []))
            for state in Matcher(exact, flow, attempt).at(operation)
        )

    # ------------------------------------------------------------------------------------------------------- replacing
    def write(self, match: Match, out: Rewriter) -> None:
        """Writes the replacement of a match. Raises DeclarationError if its results have other types."""
        anchor = match.anchor
        current = out.current(BoundSymbol(anchor.sym, match.arguments, dict(match.keywords), None))
        wanted: Any = match.outputs if len(match.outputs) > 1 else next(iter(match.outputs))

        def run(*_, **__):
            results = self._results(match, current.args, current.kwargs)
            arguments = proxies_in((current.args, current.kwargs), [])
            for i, (new, old) in enumerate(zip(results, match.outputs)):
                leaves = old in match.flow.results or old.name in match.flow.written
                if leaves and any(new is x for x in arguments):  # as the pattern gives new memory
                    results[i] = ltorch.clone(new)
            return tuple(results) if len(results) > 1 else results[0]

        out.trace(run, anchor, wanted)

    def _results(self, match: Match, arguments: Sequence, keywords: Mapping) -> list:
        with noted(f"the replacement of the rule {self.name}"):
            result = self.replacement(*arguments, **keywords, **self._with_match(self._takes_matches[1], match))
        self._check(result, match.outputs)
        return list(_outputs(result))

    def _check(self, result: Any, wanted: Sequence[Proxy]) -> None:
        """Raises DeclarationError where the replacement's results have other types than those of the match."""
        results = list(_outputs(result))
        if len(results) != len(wanted):
            raise DeclarationError(
                f"the rule {self.name}: its replacement returns {len(results)} values, and its pattern {len(wanted)}"
            )
        for new, old in zip(results, wanted):
            if not isinstance(new, Proxy) or not is_like(new, old):
                raise DeclarationError(f"the rule {self.name}: its replacement gives {new!r}, and its pattern {old!r}")
            is_derived = self.at != CAPTURED  # the derivative is there already
            if not is_derived and getattr(old, "requires_grad", False) and not getattr(new, "requires_grad", False):
                raise DeclarationError(
                    f"the rule {self.name}: {old.name} requires grad, and its replacement's result does not: it needs "
                    "operations with derivatives"
                )


def _cost(operations: Iterable[BoundSymbol]) -> float:
    """What operations cost: bytes that they move and arithmetic (`thunder.analysis.cost`). Views cost nothing."""
    return sum(estimated_time(b) for b in operations if not may_view(b))


def _is_same(value: Proxy, other: Proxy, flow: Flow) -> bool:
    if not isinstance(value, TensorProxy):
        return value is other
    return any(value is v for v, _ in equal_values(other, flow.producers)) or any(
        other is v for v, _ in equal_values(value, flow.producers)
    )


def _outputs(result: Any) -> Iterator[Any]:
    return (x for x in leaves(result) if x is not None)


def _takes_match(function: Callable) -> bool:
    parameter = inspect.signature(function).parameters.get("match")
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


# ------------------------------------------------------------------------------------------------------- making a rule


def rule(
    pattern: Callable | Symbol,
    replacement: Callable,
    when: Callable[..., bool] | None = None,
    *,
    name: str | None = None,
    examples: Sequence | None = None,
    at: str = CAPTURED,
    exact: bool = False,
    cheaper: bool = False,
) -> Rule:
    """Creates a rule for `thunder.jit(rules=[...])`, which replaces the operations that compute `pattern` by those of
    `replacement`.

    Args:
        pattern: A function of tensors, written with operations of PyTorch or thunder, that returns one or several
            tensors. It matches tensors of all sizes, ranks and dtypes for which the function computes the same
            operations. Operands of commutative operations match in both orders, and views between two operations are
            ignored if they cancel out. There is no match if another operation reads a value inside the match, unless
            the pattern returns this value or it is a view. A parameter that is annotated float, int, bool or
            torch.dtype matches an argument of an operation that is not a tensor. If `pattern` is an operation, or a
            built-in function of PyTorch such as torch.tanh, each call of it is a match, and `replacement` receives the
            arguments of the call.
        replacement: A function with the same parameters. Its results must have the types of the pattern's results.
        when: A function with the same parameters that returns whether a match is replaced. The parameters have the
            shapes, dtypes and devices of the values in the program. `when` and `replacement` may have a keyword-only
            parameter `match`, a `Match` with the matched operations and the data flow of the program.
        name: The name of the rule in errors and reports. By default the name of `pattern`.
        examples: For each parameter, a tensor, a TensorProxy or a number with which the pattern can be traced. By
            default all tensors have one shape, of at most four dimensions. Pass examples if the pattern needs different
            shapes.
        at: "captured" matches the program before it is differentiated, "joint" the forward and the backward together,
            and "cut" each of them separately.
        exact: Whether the results are equal bit for bit. `numerics="eager"` uses only such rules.
        cheaper: If True, a match is replaced only if the replacement moves fewer bytes and computes less, as estimated
            by the cost model of `thunder.analysis.cost` for the sizes of the program.

    Returns:
        The rule.

    Raises:
        OptionError: If the pattern cannot be traced, creates a tensor without an operation of thunder, or does not use
            one of its parameters, and if the replacement returns other types. The message names the rule.
    """
    if name is None:
        name = str(getattr(pattern, "__name__", None) or getattr(pattern, "name", ""))
    if at not in STAGES:
        raise OptionError(f"the rule {name}: at={at!r} is not an option; valid: {', '.join(map(repr, STAGES))}")
    for function, what in ((pattern, "pattern"), (replacement, "replacement"), (when, "condition")):
        if not callable(function) and function is not None:
            raise OptionError(f"the rule {name}: its {what} is a {type(function).__name__}, and no function")
    _check_parameters(name, pattern, replacement)
    if isinstance(pattern, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        pattern = operation_of(pattern) or pattern
    one = Rule(name, pattern, replacement, when, at, exact, examples, cheaper=cheaper)
    assert one.patterns is not None  # refuses a wrong pattern here
    return one


def _check_parameters(name: str, pattern: Callable | Symbol, replacement: Callable) -> None:
    """Raises OptionError where a replacement has the parameters of its pattern in another order."""
    if not isinstance(pattern, types.FunctionType) or not isinstance(replacement, types.FunctionType):
        return
    old, new = ([p for p in inspect.signature(f).parameters if p != "match"] for f in (pattern, replacement))
    if old != new and sorted(old) == sorted(new):
        raise OptionError(
            f"the rule {name}: its replacement has the parameters ({', '.join(new)}), and its pattern "
            f"({', '.join(old)}): give both the same order"
        )


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules as a tuple. Raises OptionError for anything else."""
    if isinstance(rules, Rule) or not isinstance(rules, Iterable):
        raise OptionError(f"rules= is a list of rules, not a {type(rules).__name__}: rules=[thunder.rule(...)]")
    for one in (rules := tuple(rules)):
        if not isinstance(one, Rule):
            raise OptionError(f"rules= has a {type(one).__name__}, which is not a rule: thunder.rule(...) makes one")
    return rules


def _patterns(one: Rule, examples: Sequence | None) -> tuple[Pattern, ...]:
    """The pattern as traced on examples, and on examples of half precision, in which casts are operations."""
    patterns: dict[Any, Pattern] = {}
    failure: Exception | None = None
    for arguments in _arguments(one, examples):
        for half in (False, True):
            try:
                pattern = _pattern(one, {n: _halved(x) if half else x for n, x in arguments.items()})
            except OptionError:
                raise
            except Exception as error:  # noqa: BLE001  of the user's function
                failure = failure or error
                continue
            patterns.setdefault(tuple((b.sym, len(b.inputs)) for b in pattern.operations), pattern)
        if patterns:
            return tuple(patterns.values())
    which, cause = ("replacement", failure.__cause__) if isinstance(failure, _Untraced) else ("pattern", failure)
    raise OptionError(
        f"the rule {one.name}: its {which} cannot be traced: {type(cause).__name__}: {cause}. Say examples= that fit "
        "it, and make tensors by thunder.torch's functions"
    ) from cause


class _Untraced(Exception):
    """A replacement cannot be traced, for the cause of this error."""


def _arguments(one: Rule, examples: Sequence | None) -> Iterator[dict[str, Any]]:
    """Arguments of a pattern, by name: those said, or else tensors of some ranks."""
    parameters = [p for p in inspect.signature(one.pattern).parameters.values() if p.default is p.empty or examples]
    if examples is not None:
        if len(examples) != len(parameters):
            raise OptionError(
                f"the rule {one.name}: its pattern has {len(parameters)} parameters, and there are {len(examples)} "
                "examples"
            )
        yield dict(zip((p.name for p in parameters), examples))
        return
    for rank in _RANKS:
        tensor = TensorProxy(shape=(2,) * rank, dtype=dtypes.float32, device="cpu")
        yield {p.name: _EXAMPLES[p.annotation] if p.annotation in _EXAMPLES else tensor for p in parameters}


def _halved(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x.dtype is torch.float32:
        return x.to(torch.bfloat16)
    return x.replace(dtype=dtypes.bfloat16) if isinstance(x, TensorProxy) and x.dtype is dtypes.float32 else x


def _proxies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as new proxies, and other arguments as they are."""
    proxies = {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            x = TensorProxy(
                name, shape=tuple(x.shape), dtype=from_tensor_dtype(x.dtype), device=from_tensor_device(x.device)
            )
        proxies[name] = x.replace(name=name) if isinstance(x, TensorProxy) else x
    return proxies


def _pattern(one: Rule, arguments: Mapping[str, Any]) -> Pattern:
    """The pattern of a rule as traced on these arguments. Raises OptionError where it has no result to match."""
    values = _proxies(arguments)
    operations, result = traced(one.pattern, list(values.values()))
    outputs = tuple(_outputs(result))
    producer = {o for b in operations for o in b.outputs}
    if not outputs or not all(isinstance(o, Proxy) and o in producer for o in outputs):
        raise OptionError(f"the rule {one.name}: its pattern returns a value that none of its operations computes")
    for b in operations:
        if any(isinstance(x, torch.Tensor) for x in leaves((b.args, b.kwargs))):
            raise OptionError(
                f"the rule {one.name}: its pattern makes a tensor by PyTorch's function: use thunder.torch's, such as "
                "thunder.torch.arange"
            )
    sites = _sites(one, values, operations)
    read = {i for b in operations for i in b.inputs}
    said = {p.name for args in sites.values() for p in leaves(args) if isinstance(p, Parameter)}
    for name, x in values.items():
        if x not in read if isinstance(x, Proxy) else name not in said:
            how = "nothing reads it" if isinstance(x, Proxy) else "it is no argument of an operation as it is"
            raise OptionError(f"the rule {one.name}: a match cannot tell the parameter {name}, since {how}")
    _check_replacement(one, values, result)
    parameters = {n: x if isinstance(x, Proxy) else Parameter(n) for n, x in values.items()}
    return Pattern(parameters, tuple(operations), outputs, literals=False, sites=sites)


def _check_replacement(one: Rule, values: Mapping[str, Any], result: Any) -> None:
    """Raises OptionError where the replacement's types are not those of the pattern for the examples."""
    if _takes_match(one.replacement):
        return
    try:
        _, new = traced(one.replacement, list(values.values()))
    except Exception as error:
        raise _Untraced(error) from error
    try:
        one._check(new, list(_outputs(result)))
    except DeclarationError as error:
        raise OptionError(str(error)) from None


def _sites(one: Rule, values: Mapping[str, Any], operations: Sequence[BoundSymbol]) -> dict[BoundSymbol, tuple]:
    """By operation, and by the primitive that it is, its arguments with a `Parameter` for each one that is the value of
    a parameter: those that change with it."""
    literals = {n: x for n, x in values.items() if not isinstance(x, Proxy)}
    if not literals:
        return {}
    others = {n: _OTHERS[type(x)](x) if type(x) in _OTHERS else x for n, x in literals.items()}
    again, _ = traced(one.pattern, list({**values, **others}.values()))
    if [b.sym for b in again] != [b.sym for b in operations]:
        raise OptionError(f"the rule {one.name}: its pattern has other operations for other numbers: make it two rules")

    def marked(x: Any, y: Any) -> Any:
        if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)) and len(x) == len(y):
            return type(x)(marked(a, b) for a, b in zip(x, y))
        for name, value in literals.items():
            if type(x) is type(value) and x == value and y == others[name] and type(y) is type(x):
                return Parameter(name)
        return x

    sites: dict[BoundSymbol, tuple] = {}
    for b, other in zip(operations, again):
        for first, second in ((b, other), (b.primitive, other.primitive)):
            if first is not None and second is not None:
                keywords = {k: marked(v, second.kwargs.get(k)) for k, v in first.kwargs.items()}
                sites[first] = tuple(map(marked, first.args, second.args)), keywords
    return sites
