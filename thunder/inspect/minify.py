"""`thunder.minify`: the smallest program that shows a fault of a compiled function.

    print(thunder.minify(compiled, x))   # a text to be run, and to be attached to a report

The captured operations run one by one in eager PyTorch, so that each value is known. Then operations are left out, and
the values that others read of them become inputs; outputs are cut; sizes are halved; inputs get random numbers of
their type. What keeps the fault, stays. Each step compiles the program of plain PyTorch that would be printed, with the
options of the compiled function: what is printed was seen to fail.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from thunder.api import compiled_or_jit, jit_with
from thunder.compiled import Compiled
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.signals import interrupts
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.errors import OptionError, ThunderError
from thunder.extend import get_all_executors, get_always_executors, get_default_executors
from thunder.inspect.plain import Plain, defined, plain_program
from thunder.inspect.verification.judge import judge
from thunder.inspect.verification.programs import generators_restored, in_float64, reference_program
from thunder.options import FALLBACK_OPTIONS, NUMERICS_OPTIONS, DebugOptions, JitOptions
from thunder.pipeline import PASSES
from thunder.transforms.dce import dce

__all__ = ["FAULTS", "Minified", "NoFault", "minify"]

FAULTS = ("crash", "wrong", "slow")
SLOW = 1.3  # times eager's time, from which on a program counts as slow


class NoFault(ThunderError):
    """A compiled function does what eager PyTorch does, or the fault is none of a program of its operations."""


class Minified(NamedTuple):
    """A program that shows a fault.

    fault: one of `FAULTS`. what: in words. operations: how many its function has. program: the text of a module that
    raises, or, for a slow one, prints both times.
    """

    fault: str
    what: str
    operations: int
    program: str

    @property
    def lines(self) -> int:
        """How many lines of `program` are not empty."""
        return sum(bool(line.strip()) for line in self.program.splitlines())

    def __str__(self) -> str:
        return self.program


def minify(fn: Callable, /, *args: Any, fault: str | None = None, **kwargs: Any) -> Minified:
    """Searches for a small program that shows the fault of `fn(*args, **kwargs)`.

    `fn` itself is not called, so nothing changes.

    Args:
        fn: A compiled function or module. Other functions are compiled with default options.
        args: Positional arguments of the call.
        fault: "crash" (an exception in the forward or backward that eager PyTorch does not raise), "wrong" (results or
            gradients that differ from eager's) or "slow" (1.3 times eager's time). None looks for a crash, then for a
            wrong result.
        kwargs: Keyword arguments of the call.

    Raises:
        NoFault: If there is no fault.
        OptionError: If `fault` has another value.
        CaptureError: If the function cannot be captured.
    """
    if fault not in (None, *FAULTS):
        raise OptionError(f"fault={fault!r} is not an option; valid: {', '.join(map(repr, FAULTS))}")
    compiled = compiled_or_jit(fn)
    with generators_restored():
        whole = _captured(compiled, args, kwargs)
        test = _first_fault(compiled.options, whole, FAULTS[:2] if fault is None else (fault,))
        cut = _with_few_operations(whole, test)
        small = _with_small_inputs(cut, test)
        return small.minified(test)


# ----------------------------------------------------------------------------------------------------- the operations


class Part(NamedTuple):
    """Operations of a captured program. values: all of its values in eager PyTorch, by name."""

    operations: tuple[BoundSymbol, ...]
    outputs: tuple[Proxy, ...]
    values: dict[str, Any]
    trace: Trace

    @property
    def inputs(self) -> list[Proxy]:
        own = {o.name for b in self.operations for o in b.outputs}
        read = [*(x for b in self.operations for x in b.inputs), *self.outputs]
        return [p for name, p in {p.name: p for p in read}.items() if name not in own]

    def live(self) -> Part:
        """Without operations that no output needs."""
        trace = self.trace.replace(args=self.inputs, bound_symbols=self.operations, output=self.outputs)
        return self._replace(operations=dce(trace).bound_symbols)

    def shown(self) -> Shown | None:
        """As a program of plain PyTorch; None where there is none."""
        inputs = self.inputs
        try:
            program = plain_program(inputs, self.operations, self.outputs, self.trace.names)
        except (ThunderError, NotImplementedError, SyntaxError):
            return None
        own_inputs = [Input(p.name, _own(self.values[p.name], p), "") for p in inputs]
        return Shown(program, tuple(own_inputs), len(self.operations))


def _own(value: Any, proxy: Proxy) -> Any:
    """A value as the input of a program."""
    if not isinstance(value, torch.Tensor):
        return value
    differentiable = value.is_floating_point() or value.is_complex()
    return value.detach().clone().requires_grad_(differentiable and getattr(proxy, "requires_grad", False))


def _captured(compiled: Compiled, args: tuple, kwargs: dict) -> Part:
    """The operations of a call, captured for the sizes and numbers of this one, and their values."""
    options = dataclasses.replace(
        compiled.options, executors=get_always_executors(), passes=PASSES, transforms=(), dynamic=False,
        numerics=NUMERICS_OPTIONS.EAGER, debug=DebugOptions(), used_compile_options={}, numbers_may_change=False,
    )  # fmt: skip
    entry, inputs = Compiled(compiled.fn, options).entry_for(args, kwargs)
    trace = entry.captured.computation_traces[0]
    operations = tuple(b for b in trace.bound_symbols if b.outputs)
    every = list(dict.fromkeys(o for b in operations for o in b.outputs))
    own = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.manual_seed(0)
    with torch.no_grad():
        computed = reference_program(trace.args, operations, tuple(every), trace.names)(*own)
    values = {p.name: x for p, x in zip((*trace.args, *every), (*own, *computed), strict=True)}
    outputs = tuple(p for p in dict.fromkeys(trace.output_proxies) if isinstance(p, TensorProxy))
    return Part(operations, outputs, values, trace).live()


def _first_fault(options: JitOptions, whole: Part, faults: Sequence[str]) -> Test:
    """The first of the faults that the whole program shows, without gradients before with them. Raises NoFault."""
    shown = whole.shown()
    if shown is None:
        raise NoFault(
            "an operation of the function cannot be written in plain PyTorch, so there is no standalone program"
        )
    for fault in faults:
        for gradients in (False, True) if fault != "slow" else (False,):
            test = Test(options, fault, gradients)
            if test.starts(shown):
                return test
    raise NoFault(
        f"no fault ({', '.join(faults)}) shows in a program of the operations of this call: it does what eager PyTorch "
        "does, or the fault is in capture: thunder.verify(fn, *args) compares the captured program with the function"
    )


def _with_few_operations(part: Part, test: Test) -> Part:
    """The part with as few operations as show the fault: its shortest beginning, one output, and pieces left out."""

    def holds(candidate: Part) -> bool:
        shown = candidate.shown()
        return shown is not None and test.holds(shown)

    # the shortest beginning that fails
    first, last = 1, len(part.operations)
    while first < last:
        middle = (first + last) // 2
        if holds(begun := _beginning(part, middle)):
            part, last = begun, middle
        else:
            first = middle + 1
    for output in part.outputs if len(part.outputs) > 1 else ():
        if holds(alone := part._replace(outputs=(output,)).live()):
            part = alone
            break
    # operations are left out in pieces, half as long each time
    length = max(1, len(part.operations) // 2)
    while True:
        position = 0
        while position < len(part.operations) and len(part.operations) > 1:
            fewer = (*part.operations[:position], *part.operations[position + length :])
            candidate = part._replace(operations=fewer).live()
            if candidate.operations and holds(candidate):
                part = candidate
            else:
                position += length
        if length == 1:
            return part
        length = max(1, length // 2)


def _beginning(part: Part, count: int) -> Part:
    """The first operations, with all that they give and nothing of them reads."""
    operations = part.operations[:count]
    read = {x.name for b in operations for x in b.inputs}
    outputs = [o for b in operations for o in b.outputs if isinstance(o, TensorProxy) and o.name not in read]
    return part._replace(operations=operations, outputs=tuple(outputs) or part.outputs)


# --------------------------------------------------------------------------------------------------------- the program


class Input(NamedTuple):
    """An argument of a program. text: the expression that makes it; empty where its value is that of the call."""

    name: str
    value: Any
    text: str


class Shown(NamedTuple):
    """A program of plain PyTorch with its inputs."""

    program: Plain
    inputs: tuple[Input, ...]
    operations: int

    @property
    def differentiated(self) -> list[str]:
        return [x.name for x in self.inputs if isinstance(x.value, torch.Tensor) and x.value.requires_grad]

    def minified(self, test: Test) -> Minified:
        """The text of a module."""
        names = ", ".join(x.name for x in self.inputs)
        options, imports, needed = _text_of_options(test.options)
        lines = list(dict.fromkeys(["import torch", "import thunder", *imports, *self.program.imports]))
        lines += [f"# define here, as in the program with the fault: {', '.join(needed)}"] if needed else []
        lines += ["", "", *self.program.source.splitlines(), "", ""]
        lines += ["torch.manual_seed(0)", *(f"{x.name} = {x.text or _text_of(x.value)}" for x in self.inputs)]
        lines.append(f"compiled = thunder.jit(program{options})")
        call = f"{{}}({names})"
        if test.gradients:
            call = "gradients({})"
            lines += ["", "", "def gradients(run):", f"    out = run({names})"]
            lines.append("    cotangents = [torch.linspace(1, 2, y.numel()).reshape(y.shape).to(y) for y in out]")
            lines += [f"    return torch.autograd.grad(out, [{', '.join(self.differentiated)}], cotangents)", "", ""]
        lines += test.last_lines(call)
        return Minified(test.fault, test.what, self.operations, "\n".join(lines))


def _text_of_options(options: JitOptions) -> tuple[str, list[str], list[str]]:
    """The keywords of thunder.jit that a program needs, the imports of their values, and the names of values that
    cannot be imported."""
    texts, imports, needed = list[str](), list[str](), list[str]()
    chosen = [e for e in options.executors if e not in get_always_executors()]
    if chosen != [e for e in get_default_executors() if e not in get_always_executors()]:
        names = []
        for executor in chosen:
            home = _importable(executor)
            if executor in get_all_executors():
                names.append(repr(executor.name))
            else:
                names.append(re.sub(r"\W", "_", executor.name) if home is None else home[1])
                imports += [f"from {home[0]} import {home[1]}"] if home is not None else []
                needed += [names[-1]] if home is None else []
        texts.append(f"executors=[{', '.join(names)}]")
    if options.numerics is not NUMERICS_OPTIONS.CLOSE:
        texts.append(f"numerics={options.numerics.value!r}")
    texts += [f"{name}={value!r}" for name, value in options.compile_options.items()]
    unnamed = {"transforms": options.transforms, "rules": options.rules, "passes": options.passes is not PASSES}
    needed += [name for name, value in unnamed.items() if value]
    texts += [f"{name}={name}" for name, value in unnamed.items() if value]
    return "".join(f", {text}" for text in texts), imports, needed


def _importable(x: Any) -> tuple[str, str] | None:
    """The module and the name of an object that other programs can import."""
    for home, module in list(sys.modules.items()):
        if home != "__main__":
            for name, value in list(vars(module).items()) if type(module) is types.ModuleType else ():
                if value is x and name.isidentifier():
                    return home, name
    return None


def _text_of(value: Any) -> str:
    """An expression for a value; that of a large tensor has its numbers in full."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = f"torch.tensor({value.detach().tolist()}, dtype={value.dtype}, device={str(value.device)!r})"
    return f"{text}.requires_grad_()" if value.requires_grad else re.sub(r"\b(nan|inf)\b", r'float("\1")', text)


def _with_small_inputs(part: Part, test: Test) -> Shown:
    """The program of a part with smaller inputs that are easy to write."""
    shown = part.shown()
    assert shown is not None, "it has failed before"
    again = True
    while again:
        again = False
        for size in sorted({n for x in shown.inputs for n in _shape(x.value)}, reverse=True):
            for smaller in (1, 2, size // 2):
                if (
                    0 < smaller < size
                    and (smaller_program := _resized(shown, size, smaller))
                    and test.holds(smaller_program)
                ):
                    shown, again = smaller_program, True
                    break
    for i, x in enumerate(shown.inputs):
        for simple in _simple_forms(x):
            changed = shown._replace(inputs=(*shown.inputs[:i], simple, *shown.inputs[i + 1 :]))
            if test.holds(changed):
                shown = changed
                break
    assert test.holds(shown), "a fault that was seen is seen again"
    return shown


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _resized(shown: Shown, size: int, smaller: int) -> Shown | None:
    """With another number in the place of a size, in the shapes of inputs and in the text; None where that is no
    program."""
    inputs = []
    for x in shown.inputs:
        value = x.value
        if isinstance(value, torch.Tensor):
            value = value.detach()[tuple(slice(0, smaller if n == size else n) for n in value.shape)].clone()
            value.requires_grad_(x.value.requires_grad)
        inputs.append(x._replace(value=value))
    tree = ast.parse(shown.program.source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value == size:
            node.value = smaller
    return Shown(defined(shown.program.imports, ast.unparse(tree)), tuple(inputs), shown.operations)


def _simple_forms(x: Input) -> Iterator[Input]:
    """An input with values that a short expression makes, from the seed 0."""
    value = x.value
    if not isinstance(value, torch.Tensor):
        return
    shape = ", ".join(map(str, value.shape)) if value.dim() else "()"
    if value.is_floating_point() or value.is_complex():
        kinds = [f"torch.ones({shape}, {{}})", f"torch.randn({shape}, {{}})", f"torch.rand({shape}, {{}})"]
    elif value.dtype is torch.bool:
        kinds = [f"torch.ones({shape}, {{}})", f"torch.zeros({shape}, {{}})"]
    else:
        kinds = [f"torch.zeros({shape}, {{}})", f"torch.ones({shape}, {{}})", f"torch.arange({value.numel()}, {{}})"]
        kinds[2] += f".reshape({shape})" if value.dim() != 1 else ""
    options = [f"dtype={value.dtype}"] if value.dtype != torch.float32 else []
    options += [f"device={str(value.device)!r}"] if value.device.type != "cpu" else []
    options += ["requires_grad=True"] if value.requires_grad else []
    for kind in kinds:
        text = kind.format(", ".join(options)).replace(", )", ")")
        torch.manual_seed(0)
        simple_value = eval(text, {"torch": torch})  # the text of one of the lines above
        if not (".reshape" in text and value.requires_grad):
            yield Input(x.name, simple_value, text)


# ---------------------------------------------------------------------------------------------------------- the fault


class Test:
    """Whether a program shows the fault that the whole one shows. gradients: whether in its gradients."""

    def __init__(self, options: JitOptions, fault: str, gradients: bool):
        self.options = dataclasses.replace(options, fallback=FALLBACK_OPTIONS.ERROR, used_compile_options={})
        self.fault, self.gradients, self.what = fault, gradients, ""
        self.error: tuple[type, str] | None = None  # of a crash
        self.deviation, self.relative, self.ratio = 0.0, 0.0, 0.0
        self.draws = False  # whether the last program draws random numbers

    def starts(self, shown: Shown) -> bool:
        """Whether the whole program shows a fault of this kind."""
        return self.holds(shown)

    def holds(self, shown: Shown) -> bool:
        """Whether a part, written as a program, shows the fault. A part that PyTorch does not run shows none."""
        if self.gradients and not shown.differentiated:
            return False
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            try:
                eager = self._run(shown.program.function, shown)
            except Exception as error:  # noqa: BLE001 - a part that PyTorch does not run is no program
                if interrupts(error):
                    raise
                return False
            return getattr(self, f"_is_{self.fault}")(shown, eager)

    def _compiled(self, shown: Shown) -> Callable:
        return jit_with(shown.program.function, self.options)

    def _run(self, run: Callable, shown: Shown, change: Callable = lambda x: x) -> list[torch.Tensor]:
        """The results of a program, or its gradients."""
        inputs = [_again(change(x.value), x.value) for x in shown.inputs]
        torch.manual_seed(0)
        before = torch.get_rng_state()
        results = [y for y in tree_iter(run(*inputs)) if isinstance(y, torch.Tensor)]
        self.draws = not torch.equal(before, torch.get_rng_state())
        if not self.gradients:
            return [y.detach() for y in results]
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        starts = [y for y in results if y.requires_grad]
        ramps = [torch.linspace(1, 2, y.numel()).reshape(y.shape).to(y) for y in starts]
        return list(torch.autograd.grad(starts, leaves, ramps, allow_unused=True, materialize_grads=True))

    def _is_crash(self, shown: Shown, eager: list) -> bool:
        """Whether the compiled program raises what it raised first. Numbers and names in the text may differ."""
        try:
            self._run(self._compiled(shown), shown)
        except Exception as error:  # noqa: BLE001 - the fault
            if interrupts(error):
                raise
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            raised = type(error), re.sub(r"\d+|\bt\w*\b", "#", lines[0])
            if self.error is None:
                self.error = raised
            self.what = f"{type(error).__name__}: {lines[0]}"
            return raised == self.error
        return False

    def _is_wrong(self, shown: Shown, eager: list) -> bool:
        """Whether a result or gradient is farther from float64 than rounding explains, and not by less than a hundredth
        of what it was first."""
        try:
            ours = self._run(self._compiled(shown), shown)
        except Exception as error:  # noqa: BLE001 - another fault
            if interrupts(error):
                raise
            return False
        if len(ours) != len(eager):
            return False
        try:
            reference = self._run(shown.program.function, shown, in_float64)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            reference = [None] * len(eager)
        for our, their, exact in zip(ours, eager, reference, strict=True):
            wide = exact is not None and exact.dtype in (torch.float64, torch.complex128) and their.dtype != exact.dtype
            verdict = judge(our, their, exact if wide else None, None, loose=8.0 if wide else 64.0)
            if verdict.agrees is False:
                apart = _apart(our, their)
                relative = apart / max(_largest(their), 1e-30) if math.isfinite(apart) else math.inf
                if relative < 0.01 * self.relative:  # rounding that is left when the fault has gone
                    continue
                self.relative = self.relative or min(relative, 1.0)
                self.deviation = apart
                self.what = f"{'gradients' if self.gradients else 'results'} are {apart:.3g} off eager PyTorch's"
                return True
        return False

    def _is_slow(self, shown: Shown, eager: list) -> bool:
        """Whether the compiled program takes `SLOW` times the time of eager PyTorch, or the square root of what it took
        first."""
        compiled = self._compiled(shown)
        times = []
        for run in (shown.program.function, compiled):
            for _ in range(3):
                self._run(run, shown)
            times.append(min(_time_of(run, [x.value for x in shown.inputs]) for _ in range(15)))
        ratio = times[1] / times[0]
        if ratio < max(SLOW, math.sqrt(self.ratio)):
            return False
        self.ratio, self.what = self.ratio or ratio, f"it takes {ratio:.2f} times the time of eager PyTorch"
        return True

    def last_lines(self, call: str) -> list[str]:
        """The lines that show the fault. call: of one of both, with its name left open."""
        compiled, program = call.format("compiled"), call.format("program")
        if self.fault == "crash":
            return [f"{compiled}  # {self.what}"]
        if self.fault == "slow":
            time = "print(min(timeit.repeat(lambda: {}, number=10, repeat=20)))"
            return ["import timeit", *(time.format(c) for c in (program, compiled)), f"# {self.what}"]
        allowed = f"{self.deviation / 2:.0e}" if math.isfinite(self.deviation) else "0"
        check = f"torch.testing.assert_close({{}}, {{}}, rtol=0, atol={allowed}, equal_nan=True)  # {self.what}"
        if not self.draws:
            return [check.format(compiled, program)]
        seed = "torch.manual_seed(0)"
        return [seed, f"expected = {program}", seed, check.format(compiled, "expected")]


def _again(value: Any, original: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(original.requires_grad)


def _apart(ours: Any, eager: torch.Tensor) -> float:
    if not isinstance(ours, torch.Tensor) or ours.shape != eager.shape:
        return math.inf
    difference = (ours.detach().to(torch.complex128) - eager.to(torch.complex128)).abs()
    return difference.max().item() if difference.isfinite().all() else math.inf


def _largest(x: torch.Tensor) -> float:
    return x.double().abs().max().item() if x.numel() and not x.is_complex() else 1.0


def _time_of(run: Callable, inputs: list) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(*inputs)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start
