"""One step of `thunder.verify`: the programs of a call run, and each of their operations is compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder.core.proxies import Proxy, TensorProxy, leaves, proxies_in, settled
from thunder.core.symbol import BoundSymbol, Names, OpTags, Symbol
from thunder.core.trace import Trace
from thunder.errors import DeclarationError
from thunder.inspect.verification.comparison import Comparison
from thunder.inspect.verification.judge import Verdict, judge
from thunder.inspect.verification.original import matched, run_original
from thunder.inspect.verification.programs import (
    PYTORCH_EXECUTORS,
    as_eager,
    copied,
    generators,
    generators_restored,
    in_float64,
    named_pairs,
    named_values,
    perturbed,
    reference_program,
    with_named_values,
)
from thunder.ops.infer import no_autocast
from thunder.pipeline import lower_with_derivatives
from thunder.transforms.dispatch import dispatch


class Step:
    """One call, compared."""

    def __init__(self, step: int, entry, options, comparisons: list[Comparison]):
        self.step, self.entry, self.options, self.comparisons = step, entry, options, comparisons
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
        verdict: Verdict,
    ) -> None:
        """Adds one comparison. text, number: the line of the printed program, and its number there."""
        user_line = self.entry.captured.where(location) if location else None
        self.comparisons.append(
            Comparison(self.step, part, value, operation, executor, text, number, user_line, *verdict)
        )

    def exact(self, inputs, operations, wanted, inputs_now) -> tuple:
        """R and R' of the rule, or None where the operations cannot be run in double precision."""
        try:
            run = reference_program(inputs, operations, wanted, self.names, in_float64)
            return run(*map(in_float64, inputs_now)), run(*(perturbed(x, self.generator) for x in inputs_now))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None, None

    def run(self, inputs: tuple) -> None:
        """Compares each operation of forward and backward on these inputs, then derivatives and the whole program."""
        own = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        backward = self.entry.backward_traces
        with torch.no_grad():
            result = self.watched("forward", self.entry.computation_traces[-1])(*map(copied, own))
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
        try:
            self.whole(own)
        except DeclarationError as error:  # what the program gives is not what it was made for
            verdict = Verdict(0.0, math.inf, math.inf, 0.0, False, str(error))
            self.add("program", "its results", "the whole program", "all", "return", None, None, verdict)

    def watched(self, part: str, trace: Trace) -> Callable:
        """A program whose operations are compared while it runs."""
        text = trace.python(memory=True).split("\n")
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
        """Compares the derivative of each operation with PyTorch's, on the values of this step."""
        values = dict(zip([a.name for a in self.acquired.args], own, strict=True))
        record = [
            _watched(b, _Recording(b, values)) if b.sym.fn is not None and b.sym.python_printer is None else b
            for b in self.executed().bound_symbols
        ]
        with torch.no_grad():
            no_autocast(self.executed().replace(bound_symbols=record).python_callable())(*map(copied, own))
        for operation in self.acquired.bound_symbols:
            wanted = [
                p
                for p in dict.fromkeys(operation.inputs)
                if _differentiable(p) and any(map(_differentiable, operation.outputs))
            ]
            if wanted and not operation.sym.own_derivative and all(p.name in values for p in operation.inputs):
                self.derivative(operation, wanted, values)

    def executed(self) -> Trace:
        operations = list(map(as_eager, self.acquired.bound_symbols))
        return dispatch(self.acquired.replace(bound_symbols=operations), PYTORCH_EXECUTORS)

    def derivative(self, operation: BoundSymbol, wanted: list, values: dict) -> None:
        """Compares the derivative of one operation with PyTorch's. wanted: the inputs whose gradients are compared.
        values: by name, those of this step."""
        inputs = list(dict.fromkeys(operation.inputs))
        program = Trace("computation", inputs, [operation], operation.output, self.names)
        forward, backward, cut = lower_with_derivatives(program, self.options, self.options.executors)
        starts = [o for o in cut.outputs if o.requires_grad]
        inputs_now, alone = [values[p.name] for p in inputs], _Alone(operation, inputs, wanted, starts, self.names)
        executor, text = self.differentiates(operation, (forward[-1], backward[-1])), "\n".join(_printed(operation))
        cotangents = [
            self.cotangent(values[o.name]) if isinstance(values.get(o.name), torch.Tensor) else None for o in starts
        ]

        def add(label: str, verdict: Verdict) -> None:
            where = operation.location
            self.add("derivative", label, operation.sym.name, executor, text, None, where, verdict)

        try:
            eager = alone.gradients(inputs_now, cotangents)
        except (RuntimeError, NotImplementedError, KeyError, AttributeError) as error:
            why = f"PyTorch does not differentiate it by itself: {str(error).splitlines()[0][:120]}"
            return add(wanted[0].name, Verdict(0.0, 0.0, 0.0, 0.0, None, why))
        alone.restore_generators()
        with torch.no_grad():
            _, (tensors, others) = no_autocast(forward[-1].python_callable())(*map(copied, inputs_now))
            gradients = no_autocast(backward[-1].python_callable())(
                [list(tensors), list(others)], [c.clone() for c in cotangents]
            )
        ours = {p: x for p, x in zip(inputs, gradients, strict=True)}
        reference = changed = None
        if OpTags.RANDOM_OP not in operation.sym.tags:
            try:
                wide = [c.double() if not c.dtype.is_complex else c for c in cotangents]
                reference = alone.gradients(list(map(in_float64, inputs_now)), wide, in_float64)
                changed = alone.gradients([perturbed(x, self.generator) for x in inputs_now], wide, in_float64)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                reference = changed = None
        for i, p in enumerate(wanted):
            got = ours[p] if ours[p] is not None else torch.zeros_like(eager[i])
            verdict = judge(got, eager[i], reference and reference[i], changed and changed[i])
            add(f"gradient of {p.name}", verdict)

    def differentiates(self, operation: BoundSymbol, programs: tuple[Trace, Trace]) -> str:
        """The name of the executor that an operation's derivative comes from, or that runs it."""
        others = [e for e in self.options.executors if e not in PYTORCH_EXECUTORS]
        ran = {b.sym.executor for t in programs for b in t.bound_symbols}
        return next(
            (e.name for e in others if e.get_grad_transform(operation) is not None),
            next((e.name for e in others if e in ran), "torch"),
        )

    # --- the original function beside the captured program
    def original(self, fn: Callable, args: tuple, kwargs: dict, inputs: tuple) -> None:
        """Compares the original with the captured program as PyTorch runs it: the results of both, and, where these
        part, the operations at the same lines."""
        ran = run_original(fn, args, kwargs, list(inputs), self.entry.epilogue_fn is not None)
        if ran is None:
            note = "the original has effects, so that it is not run a second time"
            verdict = Verdict(0.0, 0.0, 0.0, 0.0, None, note)
            return self.add("original", "its results", "the original", "PyTorch", "return", None, None, verdict)
        result, calls = ran
        own = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        values = dict(zip([a.name for a in self.acquired.args], own, strict=True))
        record = [
            _watched(b, _Recording(b, values)) if b.sym.fn is not None and b.sym.python_printer is None else b
            for b in self.executed().bound_symbols
        ]
        try:
            with torch.no_grad(), generators_restored():  # it draws what the original has drawn
                captured = no_autocast(self.executed().replace(bound_symbols=record).python_callable())(*own)
        except RuntimeError as error:  # it cannot run with what came: the operations before it say why
            captured, reason = None, str(error).partition("\n")[0]
            verdict = Verdict(0.0, math.inf, math.inf, 0.0, False, f"the captured program fails: {reason}")
            self._compare_calls(calls, values)
            self.add("original", "its results", "the original", "PyTorch", "return", None, None, verdict)
            return
        if self.entry.epilogue_fn is not None:  # which makes the result of what the program computes
            return self._compare_calls(calls, values)
        verdicts = []
        theirs, ours = list(leaves(result)), list(leaves(captured))
        if len(theirs) != len(ours):
            note = f"the original returns {len(theirs)} values, the captured program {len(ours)}"
            verdicts.append(("its results", Verdict(0.0, math.inf, math.inf, 0.0, False, note)))
        for i, (original, value) in enumerate(zip(theirs, ours)):
            if isinstance(original, torch.Tensor) and original.layout is torch.strided:
                verdicts.append((f"result {i}", judge(value, original, None, None, loose=64.0)))
            elif isinstance(original, (int, float, str)) and original != value and original == original:
                note = f"the original returns {original!r}, the captured program {value!r}"
                verdicts.append((f"result {i}", Verdict(0.0, math.inf, math.inf, 0.0, False, note)))
        if any(verdict.agrees is False for _, verdict in verdicts):
            self._compare_calls(calls, values)
        for label, verdict in verdicts:
            self.add("original", label, "the original", "PyTorch", "return", None, None, verdict)

    def _compare_calls(self, calls: dict, values: dict) -> None:
        where = self.entry.captured.where
        for b, original in matched(self.acquired.bound_symbols, where, calls):
            value = values.get(b.output.name)
            if isinstance(value, torch.Tensor):
                verdict = judge(value, original, None, None, loose=64.0)
                text = "\n".join(_printed(b))
                self.add("original", b.output.name, b.sym.name, "PyTorch", text, None, b.location, verdict)

    # --- results and gradients of the whole program
    def whole(self, own: list) -> None:
        """Compares the results and gradients of the whole program with those of PyTorch's operations."""
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

        def outcome(run: Callable, inputs_now: list) -> list[torch.Tensor]:
            leaves = [
                x.detach().clone().requires_grad_(a in wanted_set) if isinstance(x, torch.Tensor) else x
                for a, x in zip(arguments, inputs_now, strict=True)
            ]
            with torch.set_grad_enabled(bool(wanted)):
                result = dict(named_pairs(self.acquired.output, run(*leaves)))
            values = {p.name: x for p, x in result.items()}
            if wanted and not cotangents:
                cotangents.extend(self.cotangent(values[o.name]) for o in starts)
            pairs = [(values[o.name], c) for o, c in zip(starts, cotangents) if values[o.name].requires_grad]
            gradients = torch.autograd.grad(
                [o for o, _ in pairs], [x for a, x in zip(arguments, leaves) if a in wanted_set],
                    [c.to(o.dtype) for o, c in pairs], allow_unused=True, materialize_grads=True
            ) if pairs else ()  # fmt: skip
            return [*(values[o.name].detach() for o in outputs), *gradients]

        wanted_set = set(wanted)
        eager = outcome(reference_program(program.args, program.bound_symbols, program.output, self.names), own)
        ours = outcome(self.entry.computation_fn, own)
        try:
            run = reference_program(program.args, program.bound_symbols, program.output, self.names, in_float64)
            reference, changed = (
                outcome(run, list(map(in_float64, own))),
                outcome(run, [perturbed(x, self.generator) for x in own]),
            )
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            reference = changed = None
        labels = [*(o.name for o in outputs), *(f"gradient of {a.name}" for a in wanted)]
        for i, (label, e, c) in enumerate(zip(labels, eager, ours)):
            verdict = judge(c, e, reference and reference[i], changed and changed[i], loose=4.0)
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


class _Watched:
    """An operation of a program that runs, watched: it hands on eager's results, and its own are compared with them."""

    def __init__(self, step: Step, part: str, operation: BoundSymbol, number: int, text: str):
        self.step, self.part, self.operation, self.number, self.text = step, part, operation, number, text
        executor = operation.sym.executor
        self.by_pytorch = executor is None or executor in PYTORCH_EXECUTORS
        self.reference: list[BoundSymbol] = (
            list(operation.subsymbols) if operation.subsymbols and executor is not None else []
        )
        # an operation of an executor's own, in the place of one of the program's
        if not self.reference and not self.by_pytorch:
            self.reference = step.producers(operation.outputs)

    def __call__(self, *args, **kwargs):
        operation, step = self.operation, self.step
        step.values.update(named_values((operation.args, operation.kwargs), (args, kwargs)))
        inputs = [
            i
            for i in dict.fromkeys(p for b in self.reference for p in b.inputs)
            if not any(i is o for b in self.reference for o in b.outputs)
        ]
        known = bool(self.reference) and all(i.name in step.values for i in inputs)
        in_place = OpTags.IN_PLACE in operation.sym.tags
        inputs_now = [copied(step.values[i.name]) if in_place else step.values[i.name] for i in inputs] if known else []
        before = [g.get_state() for g in generators()]
        result = operation.sym.fn(*args, **kwargs)
        if not known:
            if not self.by_pytorch and operation.outputs:
                self.report(
                    operation.outputs[0],
                    Verdict(
                        0.0,
                        0.0,
                        0.0,
                        0.0,
                        None,
                        "no operation of PyTorch's is known for it: compared in the whole program",
                    ),
                )
            return self.handed_on(result, result)
        drew = any(not torch.equal(s, g.get_state()) for s, g in zip(before, generators(), strict=True))
        eager = self.compare(result, inputs, inputs_now, before, drew)
        return self.handed_on(result, result if in_place else eager)

    def compare(self, result, inputs: list, inputs_now: list, before: list, drew: bool):
        """Compares the outputs that have a reference. The results, with eager's in their places."""
        outputs = {p.name: x for p, x in named_pairs(self.operation.output, result)}
        by_name = {o.name: o for b in self.reference for o in b.outputs}
        wanted = tuple(by_name[n] for n in outputs if n in by_name and isinstance(by_name[n], TensorProxy))
        names = self.step.names
        if not wanted:
            return result
        if self.by_pytorch:
            eager = [outputs[w.name] for w in wanted]
        else:
            after = [g.get_state() for g in generators()]
            for g, state in zip(generators(), before, strict=True):
                g.set_state(state)
            eager = reference_program(inputs, self.reference, wanted, names)(*inputs_now)
            for g, state in zip(generators(), after, strict=True):
                g.set_state(state)
        random = drew or any(OpTags.RANDOM_OP in b.sym.tags for b in self.reference)
        reference, changed = (eager, eager) if random else self.step.exact(inputs, self.reference, wanted, inputs_now)
        table = {}
        for i, w in enumerate(wanted):
            r, p = (reference and reference[i]), (changed and changed[i])
            self.report(w, judge(outputs[w.name], eager[i], r, p))
            table[w.name] = eager[i]
        return with_named_values(self.operation.output, result, table)

    def handed_on(self, result, returned):
        self.step.values.update(named_values(self.operation.output, returned))
        return returned

    def report(self, value: Proxy, verdict: Verdict) -> None:
        """Adds the verdict on a result of the operation, with the user's line that computes it."""
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


class _Alone:
    """An operation by itself, which PyTorch differentiates. wanted: those of its inputs that get a gradient. starts:
    its results that have a cotangent."""

    def __init__(self, operation: BoundSymbol, inputs: list, wanted: list, starts: list, names: Names):
        self.operation, self.inputs, self.wanted, self.starts, self.names = operation, inputs, wanted, starts, names
        self.differentiated, self.states = set(wanted), [(g, g.get_state()) for g in generators()]

    def restore_generators(self) -> None:
        for generator, state in self.states:
            generator.set_state(state)

    def gradients(self, inputs_now: list, cotangents: list, change: Callable = settled) -> tuple[torch.Tensor, ...]:
        """The gradients of the operation by PyTorch's engine. change: applied to each value on the way, to float64 or
        by rounding."""
        self.restore_generators()
        leaves = {
            p.name: x.detach().clone().requires_grad_() if p in self.differentiated else x
            for p, x in zip(self.inputs, inputs_now, strict=True)
        }
        with torch.enable_grad():
            run = reference_program(self.inputs, [self.operation], tuple(self.starts), self.names, change)
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
        self.values.update(named_values(self.operation.output, result))
        return result
