"""The torch side of capture: from a call of a Python program to prologue, computation and epilogue.

In the order of the flow: `world` (where values come from, and every look at the outside), `effects`, `recording`,
`dispatch` and `state` (the other parts), `host` (the interpreter's host) with `locations`, `values`, `tensors`,
`numbers`, `containers`, `classes` and `objects` (the outside as a program holds it), `expose` (everything that native
code may look at), `calls` and `operators` (dispatch by the table in `policy`; `handlers` and `library` define
functions), `decisions`, `prologue` with `groups` and `checks`, `epilogue`.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import thunder.compat.batch_checks
import thunder.compat.cuda
import thunder.compat.distributed
import thunder.compat.modes  # noqa: F401 - the first call would import these four
from thunder import compat
from thunder.capture.changing import constants, outgrown_sizes, read_numbers
from thunder.capture.eager import note_failure
from thunder.capture.epilogue import EpilogueWriter
from thunder.capture.host import TorchHost
from thunder.capture.interface import Capture
from thunder.capture.library import assigned_data, rebuilt_hooks
from thunder.capture.library.functional import Transformed
from thunder.capture.library.locks import taken_locks
from thunder.capture.locations import file_and_line
from thunder.capture.operations import RecordingMode
from thunder.capture.prologue import PrologueWriter
from thunder.capture.state import Request
from thunder.capture.tensors import DependsOnIdentity, check_apart, input_source, write_back, written_unseen
from thunder.capture.world import Source
from thunder.core.codegen import failing_line, line_owners
from thunder.core.proxies import (
    AnyProxy,
    FutureTensorProxy,
    Proxy,
    TensorProxy,
    map_structure,
    number_value,
    numbers_in,
    proxies_in,
)
from thunder.core.signals import interrupts
from thunder.core.symbol import BoundSymbol, OpTags, recording
from thunder.core.trace import Trace, TraceInfo, timed_pass
from thunder.core.unbacked import CHECKS
from thunder.distributed.layers import distribute
from thunder.distributed.placement import Placement, check_all_placed, placement_of, seen_as
from thunder.errors import CaptureError, SharpEdgeWarning, ThunderError
from thunder.interpreter import UnsupportedError, release
from thunder.kernels.index import strides_of
from thunder.ops.families.collectives import wait
from thunder.ops.torch_types import from_tensor_dtype
from thunder.options import CACHE_OPTIONS, JitOptions
from thunder.transforms.base import check_replaced, has_hook, transform_traces
from thunder.transforms.channels_last import may_apply as may_compute_channels_last

_NAME = operator.attrgetter("name")


class Captured:
    """The result of a capture. It holds no tensor of the call.

    failure: what the program raised. Its effects before are those of this program, which runs once: the original
    function does not stand in, and would do them for a call that fails elsewhere.
    """

    def __init__(self, c: Capture, result: Any, failure: Exception | None = None):
        self.failure = failure
        self.instructions, self.frames, self.sharp_edges = c.instructions, c.frames, c.sharp_edges
        self.log, self.history = c.log, c.history  # as the queries about an interpretation want them
        self.parameters, self.decisions, self._capture = c.world.parameters, c.numbers.decisions, c
        self.path, self.host_calls = tuple(c.path.taken), c.dispatch.host_calls
        self.eager_codes = [f.__code__ for f in c.fallbacks.calls if hasattr(f, "__code__")]
        self.has_eager_calls = bool(c.fallbacks.calls)
        if any(isinstance(o, FutureTensorProxy) for b in c.recorder.bound_symbols for o in b.outputs):
            with recording(c.recorder):  # a future that is returned is waited for
                result = map_structure(lambda x: wait(x) if isinstance(x, FutureTensorProxy) else x, result)
        c.path.check_watched()
        self.locks = taken_locks(c)
        write_back(c)
        epilogue = EpilogueWriter(c)
        trace, self.epilogue_fn, output = epilogue.write(result)
        rebuilt_hooks.finish(c, (result, output))
        assigned_data.check_saved(c, output)
        c.path.keep_alive()
        c.engine.close()
        self.epilogue_traces = [trace] if trace is not None else []
        self.constants = constants(c)
        self.effects = frozenset(c.world.describe(source) for source in c.effects.places)
        self._computation(c, output)
        if self.output_requires_grad:
            _check_written(c)
        # the program may handle an error of an operation, have written before it, or be made for other data, and the
        # error comes when the computation runs, before the epilogue; nothing is lost then
        effects = [b for b in c.recorder.bound_symbols if OpTags.DONT_DCE in b.tags]
        draws = any(OpTags.RANDOM_OP in b.tags for b in effects)
        checks = [b for b in effects if b.sym in CHECKS]
        # the original would do these again; it draws the same random numbers again
        again = OpTags.DECISION, OpTags.RANDOM_OP
        happened = any(b.sym not in CHECKS and b.tags.isdisjoint(again) and not _only_computes(b) for b in effects)
        happened = happened or c.tensors.mutated or self.host_calls
        handles = checks or any(record.catches for record in c.calls)
        self.may_fail_over = bool((handles or epilogue.writes and not draws) and not happened)
        c.ask_at_the_end()

    def with_prologue(self) -> Captured:
        """Writes it, which takes a tenth of a first call: not for a program that is captured again."""
        with compat.DisableTorchFunction():
            self._write_prologue()
        return self

    def _write_prologue(self) -> None:
        c = self._capture
        writer = PrologueWriter(c, self._input_sources)
        unchecked = c.request.options.cache is CACHE_OPTIONS.SAME_INPUT
        prologue, self.prologue_fn = writer.write_extraction() if unchecked else writer.write()
        self.prologue_traces, self._weak, self._checked = [prologue], writer.weak, len(c.numbers.decisions.relations)
        self.guard_count = len(c.world.observed) + len(c.tensors.shapes)

    def settle(self, options: JitOptions, model) -> None:
        """Ends the decisions by symbolic numbers. The prologue is written again where lowering has added to them."""
        if len(self.decisions.relations) > self._checked:
            self._write_prologue()
            traces = self.prologue_traces, self.computation_traces[:1], self.epilogue_traces[:1]
            transform_traces(options.transforms, *traces, options.executors, model)
            if len(self.prologue_traces) > 1:
                self.prologue_fn = self.prologue_traces[-1].python_callable()
        self.decisions.close()

    def close(self) -> None:
        """Let go of the call that was captured and keep the program."""
        _close(self._capture)

    def only_computation(self) -> Captured:
        """What passes read, without the prologue and the epilogue: these hold objects of the user's."""
        copied = object.__new__(Captured)
        for name in ("computation_traces", "decisions", "path", "host_calls", "may_fail_over"):
            setattr(copied, name, getattr(self, name))
        return copied

    def _computation(self, c: Capture, output) -> None:
        """The program's operations as a trace, with its inputs and where these come from."""
        operations, generators = _with_generators(c)
        used = c.tensors.used = {p for operation in operations for p in operation.inputs} | set(proxies_in(output, []))
        computed = {o for operation in operations for o in operation.outputs}
        if any(type(p) is TensorProxy and p not in c.tensors.real for p in used - computed):
            c.refuse(
                "a tensor of a function under grad, vjp, jvp or vmap is used outside of it, where it is known no "
                "more: the function stored it",
                "return it (has_aux=True where it is not differentiated)",
            )
        symbols = set()
        if c.numbers.proxies:
            numbers = numbers_in([output, *((operation.args, operation.kwargs) for operation in operations)], [])
            symbols.update(*(number.expression.symbols() for number in numbers))
        tensors = [p for p in c.tensors.real if p in used]
        numbers = [n for n in c.numbers.proxies.values() if n.name in symbols]
        of_host = ((p, source) for source, p in c.outside.host_values.items())
        others = {p: source for p, source in (*c.tensors.opaque.values(), *of_host) if p in used}
        others |= generators
        inputs = [*tensors, *others, *numbers]
        placements = c.tensors.placements
        self._placements: dict[Proxy, Placement] = {p: placements[p] for p in tensors if p in placements}
        of_numbers = [c.numbers.sources[n.name] for n in numbers]
        self._input_sources = [*(input_source(c, p) for p in tensors), *others.values(), *of_numbers]
        is_by_name, memory = bool(c.request.options.transforms or c.tensors.replaced), c.recorder.memory
        info = TraceInfo(
            parameters=_parameter_paths(c, tensors) if is_by_name else {},
            held=_held(c, tensors),
            written=memory.versions, copies=frozenset(v.name for v in memory.copies),
            unseen=frozenset(map(_NAME, written_unseen(c))),
            backwards=c.engine.backwards, strides=(strides := _strides(c, tensors)),
            row_major=_row_major(c, strides, operations),
        )  # fmt: skip
        self.computation_traces = [
            Trace("computation", inputs, operations, output, c.recorder.context.names, info=info)
        ]

    @property
    def computation(self) -> Trace:
        return self.computation_traces[-1]

    @property
    def any_input_requires_grad(self) -> bool:
        return any(type(p) is TensorProxy and p.requires_grad for p in self.computation.args)

    @property
    def output_requires_grad(self) -> bool:
        arguments = {a for a in self.computation.args if isinstance(a, Proxy)}
        return any(
            type(p) is TensorProxy and p.requires_grad and p not in arguments for p in self.computation.output_proxies
        )

    def transform(self, options: JitOptions, overrides: tuple[dict, ...], model) -> None:
        """Let the transforms change the three programs."""
        before = self.prologue_traces[-1], self.epilogue_traces[-1:]
        traces = self.prologue_traces, self.computation_traces, self.epilogue_traces
        transform_traces(options.transforms, *traces, options.executors, model)
        if self.prologue_traces[-1] is not before[0]:
            self.prologue_fn = self.prologue_traces[-1].python_callable()
        if self.epilogue_traces[-1:] != before[1]:
            self.epilogue_fn = self.epilogue_traces[-1].python_callable()
        for table in filter(None, overrides):
            check_replaced(self.computation, {name: seen_as(value) for name, value in table.items()})
            self._placements = self._placements_after(table)
        if self._placements:
            if model is not None:
                check_all_placed(model)
            placements = self._placements
            distributed = timed_pass("Distribute", self.computation, lambda trace: distribute(trace, placements))
            self.computation_traces.append(distributed)

    def _placements_after(self, overrides: dict[str, torch.Tensor]) -> dict:
        """The placements of the computation's arguments, which transforms may have changed, and added some of
        `overrides` to."""
        known = {a.name: placement for a, placement in self._placements.items()}
        for variable, path in self.computation.info.parameters.items():
            if path in overrides and (placement := placement_of(overrides[path])) is not None:
                known[variable] = placement
        return {a: known[a.name] for a in self.computation.args if isinstance(a, TensorProxy) and a.name in known}

    @staticmethod
    def where(location) -> tuple:
        """(filename, line, function, source line) of a line's location."""
        return file_and_line(location)

    def user_location(self, trace: Trace, traceback) -> tuple | None:
        """The user's line that the failing line of a generated program came from."""
        function = trace._callable
        while function is not None and (traceback := failing_line(function, traceback)) is not None:
            owner = line_owners(trace).get(traceback.tb_lineno)
            if owner is None or owner.location:
                return self.where(owner.location) if owner is not None else None
            inner = getattr(owner.sym.fn, "trace", None)  # of a bound symbol that stands for several
            if inner is None:
                return None
            trace, function = inner, inner._callable
        return None

    @property
    def outlived(self) -> bool:
        """Whether an object that this program was made for is gone, so that it fits no call any more."""
        return any(reference() is None for reference in self._weak)


def _check_written(c: Capture) -> None:
    """Autograd does not see writes to the local tensors of parameters, which a backward outside would need."""
    for base in c.tensors.mutated:
        placement = c.tensors.placements.get(base)
        if placement is not None and not placement.is_whole and base.requires_grad:
            c.refuse(
                f"{placement.name} is written to, each rank holds a part of it, and a result requires grad",
                "call backward inside of the compiled function as well, or write to it outside",
            )


def _with_generators(c: Capture) -> tuple[list[BoundSymbol], dict[Proxy, Source]]:
    """The operations, with values of the program in the place of generators that the program makes, or that each call
    may make anew; these are inputs, and come with their sources."""
    proxies, anew = c.tensors.generators, {i for i in c.world.anew if type(c.world.keep[i]) is torch.Generator}

    def as_value(x: Any) -> Any:
        if type(x) is torch.Generator and id(x) in anew and id(x) not in proxies:
            proxies[id(x)] = AnyProxy(c.recorder.context.names.make("generator"))
        return proxies.get(id(x), x) if type(x) is torch.Generator else x

    operations = []
    for operation in c.recorder.bound_symbols:
        parts = operation.args, operation.kwargs
        args, kwargs = (map_structure(as_value, part) if anew or proxies else part for part in parts)
        is_same = args is operation.args and kwargs is operation.kwargs
        operations.append(operation if is_same else operation.replace(args=args, kwargs=kwargs))
    return operations, {p: c.world.sources[i] for i, p in proxies.items() if i in anew}


def _parameter_paths(c: Capture, tensors: list[TensorProxy]) -> dict[str, str]:
    """Argument name -> dotted path, of the arguments that are parameters or buffers of the compiled module."""
    if not isinstance(c.request.fn, torch.nn.Module):
        return {}
    paths = {id(t): name for name, t in [*c.request.fn.named_buffers(), *c.request.fn.named_parameters()]}
    paths |= {id(table[name]): name for table in c.request.overrides for name in table}
    return {p.name: paths[id(c.tensors.real[p][0])] for p in tensors if id(c.tensors.real[p][0]) in paths}


def _held(c: Capture, tensors: list[TensorProxy]) -> frozenset[str]:
    """Names of the arguments that are parameters and buffers of whatever module."""
    return frozenset(
        p.name
        for p in tensors
        if any(s.step == "attr" and s.key in ("_parameters", "_buffers") for s in c.tensors.real[p][1].steps())
    )


def _strides(c: Capture, tensors: list[TensorProxy]) -> dict[str, tuple]:
    with compat.DisableTorchFunction():
        real_tensors = ((p.name, c.tensors.real[p][0]) for p in tensors)
        return {name: t.stride() for name, t in real_tensors if t.layout is torch.strided}


def _row_major(c: Capture, strides: Mapping[str, tuple], operations: Sequence[BoundSymbol]) -> frozenset[str]:
    """The names of row-major inputs, which a pass may rely on: the prologue guards their strides. Their first size may
    be symbolic."""
    if c.tensors.replaced or not may_compute_channels_last(operations, c.request.options):
        return frozenset()
    sources = {}
    for p, (real, source) in c.tensors.real.items():
        shape = tuple(map(number_value, p.shape))
        is_guarded = len(shape) > 2 and c.tensors.shapes.get(source, ())[1:] == shape[1:] and shape == real.shape
        if is_guarded and p not in c.tensors.rebound and strides.get(p.name) == strides_of(shape):
            sources[p.name] = source
    c.tensors.laid_out.update(sources.values())
    return frozenset(sources)


def _only_computes(operation: BoundSymbol) -> bool:
    """Whether it is a function of PyTorch's in Python, which passes keep because nothing says that it has no effect."""
    symbol = operation.sym
    return OpTags.OPAQUE in symbol.tags and OpTags.IN_PLACE not in symbol.tags and not symbol.declared_outside


class FailsWithParts(Exception):
    """The program fails, with the exception that is this one's cause, and has read parameters of which this rank holds
    a part: by itself, it would see the parts."""


def capture(request: Request) -> Captured:
    """Captures one call of a program.

    A program that asks `torch.compiler.is_compiling()` is told no, and is captured the way that PyTorch runs it. Only
    one that decides by data where it may not (ranks that communicate, a device without data) is captured again and told
    yes: libraries go without values then.

    Raises CaptureError, with the user's line, reason and remedy, where the program cannot be captured; an exception of
    the program's own leaves as it is, or as the cause of FailsWithParts.
    """
    before = request.log.mark()
    try:
        return _capture(request, apart=True)
    except DependsOnIdentity:
        request.log.rewind(before)
    return _capture(request, apart=False)


def _capture(request: Request, apart: bool) -> Captured:
    """See `capture`. apart: see `Tensors`. Raises DependsOnIdentity where a tensor is several arguments and the program
    depends on that, or fails."""
    undecided: CaptureError | None = None  # the refusal of the program that was told no
    while True:
        c, before = TorchHost(request, undecided is not None), request.log.mark()
        refused_lines, read_again = len(request.eager.superseding), len(request.eager.read_again)
        c.tensors.apart = apart
        try:
            return _for_other_calls(c, _read(c))
        except BaseException as error:
            release(error)
            if interrupts(error):
                _close(c)
                raise
            again = isinstance(error, CaptureError)
            if c.outside.written_arrays.difference(request.changing) and request.options.numbers_may_change:
                changing = {**request.changing, **dict.fromkeys(c.outside.written_arrays)}
                request = replace(request, changing=changing)
                request.log.rewind(before)
            elif c.path.may_not_decide and undecided is None and isinstance(error, CaptureError):
                undecided = error.with_traceback(None)
                request.log.rewind(before)
            elif again := (
                len(request.eager.read_again) > read_again
                or _with_eager_call(request, c, error)
                or len(request.eager.superseding) > refused_lines
            ):
                undecided = None
                request.log.rewind(before)
            passed_twice = c.tensors.passed_twice
            if not again and isinstance(error, Exception):
                request.failed[:] = [_questions_before(c, error)]
            _close(c)
            if not again:
                if undecided is not None and isinstance(error, Exception) and not isinstance(error, CaptureError):
                    raise undecided from error  # which eager mode, told no, may not raise
                if passed_twice and isinstance(error, Exception):
                    raise DependsOnIdentity from error
                raise


def _questions_before(c: Capture, error: Exception) -> Callable | None:
    """The prologue that asks what a program had asked when it failed: a call of the same answers fails as this one did.
    None where data decided that an exception of the program's own was raised."""
    if not isinstance(error, CaptureError) and (c.path.taken or c.dispatch.host_calls):
        return None
    try:
        with compat.DisableTorchFunction():
            return PrologueWriter(c, []).write()[1]
    except Exception as failure:  # noqa: BLE001 - of a program that stopped anywhere
        if interrupts(failure):
            raise
        return None


_EAGER_CALLS = 32  # functions of one compiled function that are eager calls, or one host call each


def _with_eager_call(request: Request, c: Capture, error: BaseException) -> bool:
    """Whether the program is to be captured again, in which the function around what was refused is called as it is."""
    if c.fallbacks.candidate is None or c.fallbacks.raises or not isinstance(error, Exception):
        return False
    is_refused = isinstance(error, CaptureError)
    request.eager.reasons[c.fallbacks.candidate.unit] = str(error) if is_refused else f"{type(error).__name__}: {error}"
    return c.fallbacks.candidate.again and len(request.eager.reasons) <= _EAGER_CALLS


def _for_other_calls(c: Capture, captured: Captured) -> Captured:
    """The program captured again where it writes to numbers that it was captured for one value of, or puts tensors of
    other sizes in the places of its own: the next call finds those there."""
    written = captured.effects & read_numbers(c) | outgrown_sizes(c, captured.constants)
    counters = {path: None for path in written if path not in c.request.changing}
    if not counters or c.sharp_edges:  # code that capture ran runs once
        return captured.with_prologue()
    changing = {**c.request.changing, **counters}
    request = replace(c.request, changing=changing, path=tuple(c.path.taken))
    second = TorchHost(request, c.compiling)
    second.tensors.apart = c.tensors.apart
    try:
        captured_again = _read(second).with_prologue()
    except Exception as error:  # noqa: BLE001 - as it was it was captured
        _close(second)
        if interrupts(error):
            raise
        return captured.with_prologue()
    captured.close()
    return captured_again


def _close(c: Capture) -> None:
    """Empties a capture. Its parts know it: they and it would hold the call's tensors until the garbage collector
    runs. Sources know those below them."""
    for source in {source.root for source in (*c.world.values, *c.world.constant_sources.values())}:
        source.forget()
    vars(c).clear()


def _read(c: Capture) -> Captured:
    """Runs the program in the interpreter and closes the capture."""
    names, default_dtype = c.recorder.context.names, from_tensor_dtype(torch.get_default_dtype())
    c.recording.change(default_dtype=default_dtype)
    names.default_dtype = default_dtype
    names.backends = compat.attention_backends()
    failure = None
    try:
        with compat.modes_restored():
            with contextlib.ExitStack() as modes:
                for transform in c.request.options.transforms:
                    if has_hook(transform, "while_reading"):
                        modes.enter_context(transform.while_reading())
                before = compat.settings()
                c.modes.begin(before)
                try:
                    with recording(c.recorder), RecordingMode(c):
                        c.modes.record()
                        result, failure = _run_or_fail(c)
                        leaves_mode = compat.function_modes() != c.modes.functions
                finally:
                    c.restore_context()
                if leaves_mode:
                    raise CaptureError(
                        "the program sets a default device, or enters a torch-function mode, and does not reset it",
                        location=c.user_location(),
                        remedy="use the context manager (with torch.device(...): ...)",
                    )
                c.effects.settings = compat.changed_settings(before)
            with compat.DisableTorchFunction():  # modes outside see the program's operations only
                captured = Captured(c, result, failure)
            if c.tensors.passed_twice:
                check_apart(c)
            return captured
    except UnsupportedError as error:
        raise CaptureError(
            str(error), remedy="write this part in another way, or call it outside of the compiled function"
        ) from None
    except (ThunderError, SharpEdgeWarning):
        if failure is not None:  # its effects cannot be shown, and the program's own error is the user's
            raise failure from failure.__cause__
        raise
    except Exception as error:
        if any(not placement.is_whole for placement in c.tensors.placements.values()):
            raise FailsWithParts from error
        raise


def _run_or_fail(c: Capture) -> tuple[Any, Exception | None]:
    """The result of the program, or what it raises where its effects before would be lost."""
    try:
        return _run(c), None
    except c.uncatchable:
        raise
    except Exception as error:
        if c.request.original_stands_in and not interrupts(error):
            note_failure(c, error)
        if c.request.original_stands_in or c.tensors.passed_twice or interrupts(error):
            raise
        return None, error


def _run(c: Capture):
    """Calls the program in the interpreter, with proxies in the place of tensors."""
    fn, own = c.request.fn, []
    root = Source(None, "root", "fn", "model" if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", "fn"))
    arguments, keywords = Source(None, "root", "args"), Source(None, "root", "kwargs")
    for source, value in ((root, fn), (arguments, c.request.args), (keywords, c.request.kwargs)):
        c.world.note(source, value)
    if type(fn) is types.MethodType:
        root.label = "self"
        fn, own = fn.__func__, [c.read(fn.__self__, root.attr("__self__"))]
    elif isinstance(fn, Transformed):
        c.world.know(fn, root)
    elif isinstance(fn, torch.nn.Module) or not hasattr(fn, "__code__"):
        c.read(fn, root)
    args = [c.read(a, arguments.item(i)) for i, a in enumerate(c.request.args)]
    kwargs = {k: c.read(v, keywords.item(k)) for k, v in c.request.kwargs.items()}
    return c.interpret(fn, [*own, *args], kwargs)
