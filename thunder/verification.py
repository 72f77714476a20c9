"""`thunder.verify`: eager PyTorch beside a compiled program, line by line, against float64.

    report = thunder.verify(thunder.jit(model, executors=[...]), x) print(report)          # every operation: user's
    line, deviation of eager and of the compiled program from float64, verdict print(report.first)    # the first
    operation whose deviation rounding does not explain, or None

Each operation of the programs that run is given eager's inputs, so that what an earlier operation did is not held
against it: the first operation that differs is the culprit. Three results are compared: the operation as its executor
computes it (ours), the operations it stands for as PyTorch computes them (eager's), and the same operations in float64
(the reference). A region of a fusion executor is one operation. After that, every operation is differentiated by
itself, in the three ways. Last come the results and gradients of the whole program, where what passes over several
operations does (recomputation, writes in place, transforms) would show.

**What rounding explains.** With u the spacing of numbers at 1 in the result's dtype, R the reference, E eager's result,
and R' the reference for inputs of which each was changed by a random part of one rounding, at most u / 2 of it:

    |ours - R|  <=  4 |E - R| + 2 |R' - R| + u |R|

both for the largest and for the root mean square of each term. The first term allows for other orders of the same
operations; the second for operations whose result is sensitive to their inputs (a sum of many terms, a difference of
equal ones), where eager may have been lucky; the last for the rounding of the result itself. In the whole program
deviations add up, and each term is allowed four times. Integers and booleans are eager's, except where E or R' is not
R: there a comparison stands near a tie.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder.api import jit
from thunder.compiled import compiled_of
from thunder.core.dtypes import complex128, dtype, float64
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, map_structure, proxies_in, settled
from thunder.core.symbol import BoundSymbol, Names, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.errors import OptionError
from thunder.executors.pythonex import python_ex
from thunder.executors.torchex import no_autocast, torch_ex
from thunder.ops.torch_types import from_tensor_dtype
from thunder.pipeline import lower_with_derivatives
from thunder.transforms.dispatch import dispatch

__all__ = ["verify", "Report", "Comparison"]

_PYTORCH = (torch_ex, python_ex)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One operation of a program, compared.

    step: which call. part: "forward", "backward", "derivative" (of one operation by itself), or "program" (results and
    gradients of all of it). value: the name of what was compared. operation, executor: what computed it, and who.
    trace_line: its text; number: where it stands in the printed trace, from 1. location: (filename, line, function,
    source line) of the user's code, where known. eager, compiled: the largest deviation from float64, each; apart: the
    largest difference between the two. allowed: how large `compiled` may be. agrees: the verdict; None where nothing
    could be compared, for the reason in `note`.
    """

    step: int
    part: str
    value: str
    operation: str
    executor: str
    trace_line: str
    number: int | None
    location: tuple | None
    eager: float
    compiled: float
    apart: float
    allowed: float
    agrees: bool | None
    note: str = ""

    @property
    def where(self) -> str:
        return f"{self.location[0]}:{self.location[1]}" if self.location else "unknown place"

    def __str__(self) -> str:
        words = {
            True: "agrees with eager PyTorch",
            False: "differs from eager PyTorch by more than rounding explains",
            None: "was not compared",
        }[self.agrees]
        text = [
            f"{self.operation} of executor {self.executor} {words}: {self.value} in the {self.part} of step {self.step}"
        ]
        text.append(
            f"  deviation from float64: compiled {self.compiled:.3g}, eager {self.eager:.3g}, explained up to "
            f"{self.allowed:.3g}"
        )
        text += [f"  {self.note}"] * bool(self.note)
        text.append(f"  trace line{f' {self.number}' if self.number is not None else ''}: {self.trace_line}")
        if self.location:
            text.append(f"  in the user's program: {self.where}, in {self.location[2]}\n    {self.location[3].strip()}")
        return "\n".join(text)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `thunder.verify` found. `str()` is a table."""

    comparisons: tuple[Comparison, ...]

    @property
    def first(self) -> Comparison | None:
        """The first comparison that rounding does not explain; None where all agree."""
        return next((c for c in self.comparisons if c.agrees is False), None)

    def __str__(self) -> str:
        head = (
            "step",
            "part",
            "value",
            "operation",
            "executor",
            "eager",
            "compiled",
            "explained",
            "verdict",
            "user's line",
        )
        rows = [head, *map(_row, self.comparisons)]
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths)).rstrip() for r in rows]
        first = self.first
        return "\n".join([*table, "", str(first) if first is not None else "All operations agree with eager PyTorch."])


def _row(c: Comparison) -> tuple[str, ...]:
    verdict = {True: "agrees", False: "DIFFERS", None: "not compared"}[c.agrees]
    return (
        str(c.step),
        c.part,
        c.value,
        c.operation,
        c.executor,
        f"{c.eager:.2e}",
        f"{c.compiled:.2e}",
        f"{c.allowed:.2e}",
        verdict,
        c.where,
    )


def verify(fn: Callable, *args: Any, steps: int = 1, **kwargs: Any) -> Report:
    """Runs eager PyTorch beside a compiled function or module, and says where the two part by more than rounding
    explains.

    fn: what `thunder.jit` returned; a function or module that is not compiled is compiled with default options. args,
    kwargs: of the call. steps: how often it is called and compared; what calls change (statistics, random state)
    changes from one to the next. Of programs with gradients the backward is compared, too, for random cotangents.

    Raises OptionError for steps below 1; what fn itself raises leaves as it is.
    """
    if type(steps) is not int or steps < 1:
        raise OptionError(f"thunder.verify(steps={steps!r}): valid: a number of calls, at least 1")
    compiled = compiled_of(fn) or compiled_of(jit(fn))
    found: list[Comparison] = []
    for step in range(steps):
        with _numbers_kept():
            entry, inputs = compiled.entry_for(args, kwargs)
            arguments = zip(entry.captured.computation.args, inputs, strict=True)
            values = {a.name: x for a, x in arguments if isinstance(a, NumberProxy)}
            with entry.captured.decisions.anew(values):
                _Step(step, entry, compiled.options, found).run(inputs)
        if step + 1 < steps:
            compiled(*args, **kwargs)
    return Report(tuple(found))


# ---------------------------------------------------------------------------------------------------------------- the
# rule


class _Verdict(NamedTuple):
    eager: float
    compiled: float
    apart: float
    allowed: float
    agrees: bool | None
    note: str = ""


def _judge(ours, eager: torch.Tensor, reference, changed, loose: float = 1.0) -> _Verdict:
    """The rule at the top of this file. reference, changed: R and R', or None where float64 could not be had: then
    eager's result is the reference."""
    if not isinstance(ours, torch.Tensor) or (ours.shape, ours.dtype, ours.device) != (
        eager.shape,
        eager.dtype,
        eager.device,
    ):
        found = f"{ours.dtype}{list(ours.shape)}" if isinstance(ours, torch.Tensor) else type(ours).__name__
        return _Verdict(
            0.0, float("inf"), float("inf"), 0.0, False, f"a {found} in the place of {eager.dtype}{list(eager.shape)}"
        )
    if not eager.numel():
        return _Verdict(0.0, 0.0, 0.0, 0.0, True)
    note = "" if reference is not None else "there is no float64 result: compared with eager's alone"
    reference = eager if reference is None else reference
    changed = reference if changed is None else changed
    if not (eager.dtype.is_floating_point or eager.dtype.is_complex):
        sure = (eager == reference) & (reference == changed)
        wrong = ((ours != eager) & sure).sum().item()
        near = ((ours != eager) & ~sure).sum().item()
        return _Verdict(
            0.0, float(wrong), float(wrong + near), 0.0, not wrong, note or (f"{near} near a tie" if near else "")
        )
    wide = torch.complex128 if eager.dtype.is_complex else torch.float64
    c, e, r, p = (x.detach().to(wide) for x in (ours, eager, reference, changed))
    odd = ~(torch.isfinite(c) & torch.isfinite(e) & torch.isfinite(r) & torch.isfinite(p))
    unequal = odd & ~((c == e) | (torch.isnan(c) & torch.isnan(e)))
    if (unequal & ~torch.isfinite(c) & torch.isfinite(e)).any() or (
        unequal & torch.isfinite(c) & ~torch.isfinite(e) & ~torch.isfinite(r)
    ).any():
        return _Verdict(
            0.0,
            float("inf"),
            float("inf"),
            0.0,
            False,
            "nan or infinity where eager has a number, or the other way round",
        )
    c, e, r, p = (torch.where(odd, 0.0, x) for x in (c, e, r, p))
    u = torch.finfo(eager.dtype).eps
    by_eager, by_ours, by_change = (e - r).abs(), (c - r).abs(), (p - r).abs()
    exceeded = False
    allowed = 0.0
    for size in (lambda x: x.pow(2).mean().sqrt().item(), lambda x: x.max().item()):
        allowed = loose * (4 * size(by_eager) + 2 * size(by_change) + u * size(r.abs())) + (
            8 * u * size(e.abs()) if note else 0.0
        )
        exceeded |= size(by_ours) > allowed
    return _Verdict(
        by_eager.max().item(), by_ours.max().item(), (c - e).abs().max().item(), allowed, not exceeded, note
    )


# ----------------------------------------------------------------------------------------------------------------
# running operations


def _wide(x):
    """A tensor or a dtype of real or complex numbers in double precision; the rest as it is."""
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.dtype.is_floating_point else x.to(torch.complex128) if x.dtype.is_complex else x
    if isinstance(x, (dtype, torch.dtype)):
        kind = from_tensor_dtype(x) if isinstance(x, torch.dtype) else x
        return float64 if kind.category == 2 else complex128 if kind.category == 3 else x
    return settled(x)


def _changed(x, generator: torch.Generator):
    """`_wide(x)`, each number changed by at most half a spacing of its dtype."""
    if not isinstance(x, torch.Tensor) or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return _wide(x)
    noise = (torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5).to(x.device)
    return _wide(x) * (1 + torch.finfo(x.dtype).eps * noise)


def _program(
    inputs: Sequence[Proxy], operations: Sequence[BoundSymbol], output, names, change: Callable = settled
) -> Callable:
    """The operations as PyTorch executes them. change: of their arguments, `_wide` for double precision."""
    changed = []
    for operation in map(_as_eager, operations):
        if operation.sym.executor is None:
            operation = operation.replace(
                args=map_structure(change, operation.args), kwargs=map_structure(change, operation.kwargs)
            )
        changed.append(operation)
    trace = dispatch(Trace("reference", inputs, changed, output, names), _PYTORCH)
    return no_autocast(trace.python_callable())


def _as_eager(operation: BoundSymbol) -> BoundSymbol:
    """An executor's own operation as eager runs it: the user's function that it replaces, or its own."""
    symbol, executor = operation.sym, operation.sym.executor
    if executor is None or executor in _PYTORCH or symbol.is_fusion or symbol.decomposition is not None:
        return operation
    function = next((f for f, replaced in executor.replacements.items() if replaced is symbol), symbol.fn)
    eager = Symbol(
        symbol.name, symbol.meta, id=("eager", symbol.id), is_prim=True, tags=tuple(symbol.tags), fn=function
    )
    return operation.replace(sym=eager)


class _numbers_kept:
    """What is drawn in the block is drawn again after it."""

    def __enter__(self):
        self.states = [(g, g.get_state()) for g in _generators()]

    def __exit__(self, *error):
        for g, state in self.states:
            g.set_state(state)


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


class _Watched:
    """An operation of a program that runs, watched: it hands on eager's results, and its own are compared with them."""

    def __init__(self, step: _Step, part: str, operation: BoundSymbol, number: int, text: str):
        self.step, self.part, self.operation, self.number, self.text = step, part, operation, number, text
        executor = operation.sym.executor
        self.by_pytorch = executor is None or executor in _PYTORCH
        self.reference: list[BoundSymbol] = (
            list(operation.subsymbols) if operation.subsymbols and executor is not None else []
        )
        # an operation of an executor's own, in the place of one of the program's
        if not self.reference and not self.by_pytorch:
            self.reference = step.producers(operation.outputs)

    def __call__(self, *args, **kwargs):
        operation, step = self.operation, self.step
        step.values.update(_named((operation.args, operation.kwargs), (args, kwargs)))
        inputs = [
            i
            for i in dict.fromkeys(p for b in self.reference for p in b.inputs)
            if not any(i is o for b in self.reference for o in b.outputs)
        ]
        known = bool(self.reference) and all(i.name in step.values for i in inputs)
        in_place = OpTags.IN_PLACE in operation.sym.tags
        given = [_copied(step.values[i.name]) if in_place else step.values[i.name] for i in inputs] if known else []
        before = [g.get_state() for g in _generators()]
        result = operation.sym.fn(*args, **kwargs)
        if not known:
            if not self.by_pytorch and operation.outputs:
                self.report(
                    operation.outputs[0],
                    _Verdict(
                        0.0,
                        0.0,
                        0.0,
                        0.0,
                        None,
                        "no operation of PyTorch's is known for it: compared in the whole program",
                    ),
                )
            return self.handed_on(result, result)
        drew = any(not torch.equal(s, g.get_state()) for s, g in zip(before, _generators(), strict=True))
        eager = self.compare(result, inputs, given, before, drew)
        return self.handed_on(result, result if in_place else eager)

    def compare(self, result, inputs: list, given: list, before: list, drew: bool):
        """Compares the outputs that have a reference. The results, with eager's in their places."""
        outputs = {p.name: x for p, x in _named_pairs(self.operation.output, result)}
        made = {o.name: o for b in self.reference for o in b.outputs}
        wanted = tuple(made[n] for n in outputs if n in made and isinstance(made[n], TensorProxy))
        names = self.step.names
        if not wanted:
            return result
        if self.by_pytorch:
            eager = [outputs[w.name] for w in wanted]
        else:
            after = [g.get_state() for g in _generators()]
            for g, state in zip(_generators(), before, strict=True):
                g.set_state(state)
            eager = _program(inputs, self.reference, wanted, names)(*given)
            for g, state in zip(_generators(), after, strict=True):
                g.set_state(state)
        random = drew or any(OpTags.RANDOM_OP in b.sym.tags for b in self.reference)
        reference, changed = (eager, eager) if random else self.step.exact(inputs, self.reference, wanted, given)
        table = {}
        for i, w in enumerate(wanted):
            r, p = (reference and reference[i]), (changed and changed[i])
            self.report(w, _judge(outputs[w.name], eager[i], r, p))
            table[w.name] = eager[i]
        return _with_names(self.operation.output, result, table)

    def handed_on(self, result, returned):
        self.step.values.update(_named(self.operation.output, returned))
        return returned

    def report(self, value: Proxy, verdict: _Verdict) -> None:
        executor = self.operation.sym.executor
        producer = self.reference[0] if self.reference else self.operation
        inner = "" if not self.operation.sym.is_fusion else f" ({', '.join(b.sym.name for b in self.reference)})"
        operation = producer.sym.name if self.by_pytorch else f"{self.operation.sym.name}{inner}"
        where = next(
            (b.location for b in self.reference if any(o.name == value.name for o in b.outputs) and b.location),
            self.operation.location or producer.location,
        )
        self.step.add(
            self.part,
            value.name,
            operation,
            executor.name if executor is not None else "torch",
            self.text,
            self.number,
            where,
            verdict,
        )


def _copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def _named_pairs(structure, values) -> list[tuple[Proxy, Any]]:
    """The proxies in a structure with what stands in their places."""
    if isinstance(structure, Proxy):
        return [(structure, values)]
    if isinstance(structure, (tuple, list)) and isinstance(values, (tuple, list)):
        return [pair for s, v in zip(structure, values) for pair in _named_pairs(s, v)]
    if isinstance(structure, dict) and isinstance(values, dict):
        return [pair for k in structure if k in values for pair in _named_pairs(structure[k], values[k])]
    return []


def _named(structure, values) -> dict[str, Any]:
    return {p.name: v for p, v in _named_pairs(structure, values)}


def _with_names(structure, values, table: dict):
    if isinstance(structure, Proxy):
        return table.get(structure.name, values)
    if isinstance(structure, (tuple, list)) and isinstance(values, (tuple, list)) and len(structure) == len(values):
        return (
            type(values)(_with_names(s, v, table) for s, v in zip(structure, values))
            if type(values) in (tuple, list)
            else values
        )
    return values


# ---------------------------------------------------------------------------------------------------------------- one
# call


class _Step:
    """One call, compared."""

    def __init__(self, step: int, entry, options, found: list[Comparison]):
        self.step, self.entry, self.options, self.found = step, entry, options, found
        self.acquired: Trace = entry.captured.computation
        self.names = self.acquired.names
        self.values: dict[str, Any] = {}
        self.producer = {o.name: b for b in self.acquired.bound_symbols for o in b.outputs}
        self.generator = torch.Generator().manual_seed(step)

    def producers(self, outputs: Sequence[Proxy]) -> list[BoundSymbol]:
        """The program's own operations that make some values."""
        return list(dict.fromkeys(self.producer[o.name] for o in outputs if o.name in self.producer))

    def add(
        self,
        part: str,
        value: str,
        operation: str,
        executor: str,
        text: str,
        number: int | None,
        location,
        verdict: _Verdict,
    ) -> None:
        place = self.entry.captured.where(location) if location else None
        self.found.append(Comparison(self.step, part, value, operation, executor, text, number, place, *verdict))

    def exact(self, inputs, operations, wanted, given) -> tuple:
        """R and R' of the rule, or None where the operations cannot be run in double precision."""
        try:
            run = _program(inputs, operations, wanted, self.names, _wide)
            return run(*map(_wide, given)), run(*(_changed(x, self.generator) for x in given))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None, None

    def run(self, inputs: tuple) -> None:
        own = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        backward = self.entry.backward_traces
        with torch.no_grad():
            result = self.watched("forward", self.entry.computation_traces[-1])(*map(_copied, own))
            if backward:
                outputs, (tensors, others) = result
                starts = [
                    o
                    for p, o in zip(self.entry.computation_traces[-1].output[0], outputs, strict=True)
                    if p.requires_grad
                ]
                self.watched("backward", backward[-1])([list(tensors), list(others)], list(map(self.cotangent, starts)))
        if backward:
            self.derivatives(own)
        self.whole(own)

    def watched(self, part: str, trace: Trace) -> Callable:
        """A program whose operations are compared while it runs."""
        text = trace.python(print_depth=1).split("\n")
        printed = [(b, len(_printed(b))) for b in trace.bound_symbols]
        at = len(text) - 1 - sum(n for _, n in printed)
        operations = []
        for b, height in printed:
            plain = b.sym.fn is None or b.sym.python_printer is not None or b.output is None
            operations.append(b if plain else _watched(b, _Watched(self, part, b, at + 1, text[at].strip())))
            at += height
        return no_autocast(trace.replace(bound_symbols=operations).python_callable())

    def cotangent(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator, dtype=torch.float64).to(x.device, x.dtype)

    # --- each operation differentiated by itself
    def derivatives(self, own: list) -> None:
        values = dict(zip([a.name for a in self.acquired.args], own, strict=True))
        record = [
            _watched(b, _Recording(b, values)) if b.sym.fn is not None and b.sym.python_printer is None else b
            for b in self.executed().bound_symbols
        ]
        with torch.no_grad():
            no_autocast(self.executed().replace(bound_symbols=record).python_callable())(*map(_copied, own))
        for operation in self.acquired.bound_symbols:
            wanted = [
                p
                for p in dict.fromkeys(operation.inputs)
                if _differentiable(p) and any(map(_differentiable, operation.outputs))
            ]
            if wanted and not operation.sym.own_derivative and all(p.name in values for p in operation.inputs):
                self.derivative(operation, wanted, values)

    def executed(self) -> Trace:
        operations = list(map(_as_eager, self.acquired.bound_symbols))
        return dispatch(self.acquired.replace(bound_symbols=operations), _PYTORCH)

    def derivative(self, operation: BoundSymbol, wanted: list, values: dict) -> None:
        inputs = list(dict.fromkeys(operation.inputs))
        program = Trace("computation", inputs, [operation], operation.output, self.names)
        forward, backward, cut = lower_with_derivatives(program, self.options, self.options.executors)
        starts = [o for o in cut.outputs if o.requires_grad]
        given, alone = [values[p.name] for p in inputs], _Alone(operation, inputs, wanted, starts, self.names)
        executor, text = self.differentiates(operation, (forward[-1], backward[-1])), "\n".join(_printed(operation))
        cotangents = [
            self.cotangent(values[o.name]) if isinstance(values.get(o.name), torch.Tensor) else None for o in starts
        ]

        def add(label: str, verdict: _Verdict) -> None:
            where = operation.location
            self.add("derivative", label, operation.sym.name, executor, text, None, where, verdict)

        try:
            eager = alone.gradients(given, cotangents)
        except (RuntimeError, NotImplementedError, KeyError, AttributeError) as error:
            why = f"PyTorch does not differentiate it by itself: {str(error).splitlines()[0][:120]}"
            return add(wanted[0].name, _Verdict(0.0, 0.0, 0.0, 0.0, None, why))
        alone.restore_generators()
        with torch.no_grad():
            _, (tensors, others) = no_autocast(forward[-1].python_callable())(*map(_copied, given))
            found = no_autocast(backward[-1].python_callable())(
                [list(tensors), list(others)], [c.clone() for c in cotangents]
            )
        ours = {p: x for p, x in zip(inputs, found, strict=True)}
        reference = changed = None
        if OpTags.RANDOM_OP not in operation.sym.tags:
            try:
                wide = [c.double() if not c.dtype.is_complex else c for c in cotangents]
                reference = alone.gradients(list(map(_wide, given)), wide, _wide)
                changed = alone.gradients([_changed(x, self.generator) for x in given], wide, _wide)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                reference = changed = None
        for i, p in enumerate(wanted):
            got = ours[p] if ours[p] is not None else torch.zeros_like(eager[i])
            verdict = _judge(got, eager[i], reference and reference[i], changed and changed[i])
            add(f"gradient of {p.name}", verdict)

    def differentiates(self, operation: BoundSymbol, programs: tuple[Trace, Trace]) -> str:
        """The name of the executor that an operation's derivative comes from, or that runs it."""
        others = [e for e in self.options.executors if e not in _PYTORCH]
        ran = {b.sym.executor for t in programs for b in t.bound_symbols}
        return next(
            (e.name for e in others if e.get_grad_transform(operation) is not None),
            next((e.name for e in others if e in ran), "torch"),
        )

    # --- results and gradients of the whole program
    def whole(self, own: list) -> None:
        # what is drawn, or may be, has no float64 form; a derivative of the user's own is not that of its forward
        alone = (OpTags.RANDOM_OP, OpTags.OPAQUE)
        if any(not b.sym.tags.isdisjoint(alone) or b.sym.own_derivative for b in self.acquired.bound_symbols):
            return
        # before transforms changed it, unless they changed what it takes
        first = self.entry.captured.computation_traces[0]
        program = first if [a.name for a in first.args] == [a.name for a in self.acquired.args] else self.acquired
        arguments = self.acquired.args
        outputs = [o for o in dict.fromkeys(proxies_in(self.acquired.output, [])) if isinstance(o, TensorProxy)]
        wanted = [a for a in arguments if _differentiable(a)] if self.entry.backward_traces else []
        starts = [o for o in outputs if o.requires_grad and not any(o is a for a in arguments)] if wanted else []
        cotangents: list = []

        def outcome(run: Callable, given: list) -> list[torch.Tensor]:
            leaves = [
                x.detach().clone().requires_grad_(a in wanted_set) if isinstance(x, torch.Tensor) else x
                for a, x in zip(arguments, given, strict=True)
            ]
            with torch.set_grad_enabled(bool(wanted)):
                result = dict(_named_pairs(self.acquired.output, run(*leaves)))
            values = {p.name: x for p, x in result.items()}
            if wanted and not cotangents:
                cotangents.extend(self.cotangent(values[o.name]) for o in starts)
            pairs = [(values[o.name], c) for o, c in zip(starts, cotangents) if values[o.name].requires_grad]
            found = torch.autograd.grad(
                [o for o, _ in pairs], [x for a, x in zip(arguments, leaves) if a in wanted_set],
                    [c.to(o.dtype) for o, c in pairs], allow_unused=True, materialize_grads=True
            ) if pairs else ()  # fmt: skip
            return [*(values[o.name].detach() for o in outputs), *found]

        wanted_set = set(wanted)
        eager = outcome(_program(program.args, program.bound_symbols, program.output, self.names), own)
        ours = outcome(self.entry.computation_fn, own)
        try:
            run = _program(program.args, program.bound_symbols, program.output, self.names, _wide)
            reference, changed = (
                outcome(run, list(map(_wide, own))),
                outcome(run, [_changed(x, self.generator) for x in own]),
            )
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            reference = changed = None
        labels = [*(o.name for o in outputs), *(f"gradient of {a.name}" for a in wanted)]
        for i, (label, e, c) in enumerate(zip(labels, eager, ours)):
            verdict = _judge(c, e, reference and reference[i], changed and changed[i], loose=4.0)
            producer = self.producer.get(label)
            self.add(
                "program",
                label,
                "the whole program",
                "all",
                "return",
                None,
                producer.location if producer is not None else None,
                verdict,
            )


class _Alone:
    """An operation by itself, which PyTorch differentiates. wanted: those of its inputs that get a gradient. starts:
    its results that have a cotangent."""

    def __init__(self, operation: BoundSymbol, inputs: list, wanted: list, starts: list, names: Names):
        self.operation, self.inputs, self.wanted, self.starts, self.names = operation, inputs, wanted, starts, names
        self.differentiated, self.states = set(wanted), [(g, g.get_state()) for g in _generators()]

    def restore_generators(self) -> None:
        for generator, state in self.states:
            generator.set_state(state)

    def gradients(self, given: list, cotangents: list, change: Callable = settled) -> tuple[torch.Tensor, ...]:
        self.restore_generators()
        leaves = {
            p.name: x.detach().clone().requires_grad_() if p in self.differentiated else x
            for p, x in zip(self.inputs, given, strict=True)
        }
        with torch.enable_grad():
            run = _program(self.inputs, [self.operation], tuple(self.starts), self.names, change)
            outputs = run(*leaves.values())
        pairs = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        return torch.autograd.grad(
            [o for o, _ in pairs],
            [leaves[p.name] for p in self.wanted],
            [c for _, c in pairs],
            allow_unused=True,
            materialize_grads=True,
        )


def _differentiable(p) -> bool:
    return isinstance(p, TensorProxy) and p.requires_grad and p.dtype.category == 2


def _printed(operation: BoundSymbol) -> list[str]:
    return operation.python(print_depth=1)


def _watched(operation: BoundSymbol, run: Callable) -> BoundSymbol:
    symbol = Symbol(operation.sym.name, id=("watched", id(run)), is_prim=True, fn=run)
    return operation.replace(sym=symbol)


class _Recording:
    """Runs an operation as it is, and keeps what it makes by name."""

    def __init__(self, operation: BoundSymbol, values: dict):
        self.operation, self.values = operation, values

    def __call__(self, *args, **kwargs):
        result = self.operation.sym.fn(*args, **kwargs)
        self.values.update(_named(self.operation.output, result))
        return result
