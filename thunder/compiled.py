"""`thunder.jit`: compiled functions, their cached entries, and what happens at a call."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.lazy import LazyModuleMixin

from thunder import compat
from thunder.capture import Captured, FailsWithParts, capture
from thunder.core.codegen import Printer, Text, compile_source
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, UnbackedNumber, map_structure
from thunder.core.symbol import OpTags, current_recorder
from thunder.core.symbolic import Decisions
from thunder.core.trace import Trace
from thunder.core.utils import without_collection
from thunder.distributed.agreement import check_agreement
from thunder.errors import CaptureError, OptionError, RecompileWarning, SharpEdgeWarning, ThunderError, add_location, user_line, warn_user
from thunder.executors.torch_autograd import connected, with_grad, without_grad
from thunder.executors.torchex import no_autocast
from thunder.extend import Executor, FusionExecutor, resolve_executors
from thunder.options import (
    CACHE_OPTIONS,
    MAX_ENTRIES,
    NUMERICS_OPTIONS,
    RECOMPILE_WARNING_LIMIT,
    RNG_OPTIONS,
    SHARP_EDGES_OPTIONS,
    DebugOptions,
    JitOptions,
    check_interpretation,
    check_langctx,
    check_memory_budget,
    resolve_cache_option,
    resolve_numerics,
    resolve_rng,
    resolve_sharp_edges,
)  # fmt: skip
from thunder.pipeline import (
    asked_for,
    gradient_program,
    inputs_behind,
    lower,
    lower_backward_for_batches,
    lower_backward_without,
    lower_with_derivatives,
    random_devices,
    read_by_products,
)  # fmt: skip
from thunder.transforms.base import asked, check_transforms, with_executors_of
from thunder.transforms.check_results import check_results
from thunder.transforms.memory_budget import roots
from thunder.transforms.partition import views_of_outputs

__all__ = ["jit", "add_transform", "Compiled", "CacheEntry", "CompileStats"]


class ProgramFails(CaptureError):
    """A program raised while it was captured: it does so itself, or thunder has failed, which only running it can tell.

    Nothing has run. theirs: the user's own code raised it, for example a backward that is captured with its forward.
    """

    def __init__(self, failure: Exception):
        location, self.theirs = user_line(failure)
        reason = f"thunder fails on it, or it raises: {type(failure).__name__}: {failure}"
        super().__init__(reason, location=location, remedy="please report this with the program, if it runs by itself")


class CacheEntry:
    """One compiled program: a prologue that says whether it fits a call, the computation, and an epilogue that builds the result."""

    __slots__ = (
        "captured", "prologue_fn", "prologue_traces", "computation_fn", "computation_traces", "epilogue_fn", "epilogue_traces", "backward_fn", "backward_traces", "modes", "used",
    )  # fmt: skip

    def __init__(self, captured: Captured, computation_traces: list[Trace], computation_fn: Callable, modes: tuple, backward_traces: list[Trace]):
        self.captured, self.modes, self.used = captured, modes, 0  # used: the number of the last call that ran it
        self.prologue_fn, self.prologue_traces = captured.prologue_fn, captured.prologue_traces
        self.computation_fn, self.computation_traces = computation_fn, computation_traces
        self.epilogue_fn, self.epilogue_traces = captured.epilogue_fn, captured.epilogue_traces
        self.backward_fn, self.backward_traces = backward_traces[-1].python_callable() if backward_traces else None, backward_traces


class CompileStats:
    """Counters and the traces of the last call. Times are in nanoseconds, of the last call that compiled."""

    def __init__(self):
        self.calls = self.cache_hits = self.cache_misses = 0
        self.interpreter_cache: list[CacheEntry] = []
        self.last_entry: CacheEntry | None = None
        self.last_compile_reasons: list[str] = []
        self.interpreted_instructions = self.bound_symbols_created = 0
        self.times: dict[str, tuple[int, int]] = {}

    last_traces = property(lambda self: self.last_entry.computation_traces if self.last_entry else [])
    last_backward_traces = property(lambda self: self.last_entry.backward_traces if self.last_entry else [])
    last_prologue_traces = property(lambda self: self.last_entry.prologue_traces if self.last_entry else [])
    last_epilogue_traces = property(lambda self: self.last_entry.epilogue_traces if self.last_entry else [])
    last_prologue = property(lambda self: self.last_entry.prologue_fn if self.last_entry else None)
    last_computation = property(lambda self: self.last_entry.computation_fn if self.last_entry else None)

    def _took(self, what: str) -> int:
        start, stop = self.times.get(what, (0, 0))
        return stop - start

    def last_cache_lookup_time(self) -> int:
        return self._took("lookup")

    def last_trace_construction_time(self) -> int:
        return self._took("construction")

    def last_prologue_transformation_time(self) -> int:
        return self._took("prologue")

    def last_prologue_execution_time(self) -> int:
        return self._took("prologue execution")

    def last_computation_execution_time(self) -> int:
        return self._took("computation execution")


class Compiled:
    """A compiled function or module: the original, its options, its entries and its history. Called like the original."""

    def __init__(self, fn: Callable, options: JitOptions):
        self.fn, self.options = fn, options
        self.stats = CompileStats()
        self._entries: dict[tuple, list[CacheEntry]] = {}  # by modes; the last one that fitted comes first
        self._lock = threading.RLock()
        self._warned = False
        self.module: Callable = lambda: None  # the ThunderModule that calls it, held weakly
        self.overrides: tuple[dict[str, torch.Tensor], ...] = ({}, {}) if isinstance(fn, torch.nn.Module) else ()  # of parameters, of buffers
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn, updated=())

    _lc_cd = property(lambda self: self)
    _lc_original = property(lambda self: self.fn)
    _lc_cs = property(lambda self: self.stats)
    _lc_transforms = property(lambda self: list(self.options.transforms))

    def __repr__(self) -> str:
        return f"<thunder.jit of {getattr(self.fn, '__qualname__', type(self.fn).__name__)}>"

    def __call__(self, *args, **kwargs):
        if is_dynamo_compiling():
            return self.fn(*args, **kwargs)
        stats = self.stats
        stats.calls += 1
        modes = compat.modes_key()
        entries = self._entries.get(modes)
        if entries:
            for entry in entries:
                inputs = entry.prologue_fn(self.fn, args, kwargs)
                if type(inputs) is tuple:
                    if entry is not entries[0]:
                        self._to_front(entries, entry)
                    stats.cache_hits += 1
                    stats.last_entry = entry
                    entry.used = stats.calls
                    try:
                        values = entry.computation_fn(*inputs)
                    except Exception as error:
                        self._point_at_user(entry, error)
                        raise
                    return values if entry.epilogue_fn is None else entry.epilogue_fn(self.fn, args, kwargs, values)
        return self._miss(modes, args, kwargs)

    def __get__(self, instance, owner=None):
        """A jitted function in a class body is a method."""
        return self if instance is None else functools.partial(self, instance)

    def _to_front(self, entries: list[CacheEntry], entry: CacheEntry) -> None:
        if self._lock.acquire(blocking=False):  # while another thread compiles, the order stays
            try:
                entries[:] = [entry, *(e for e in entries if e is not entry)]
            finally:
                self._lock.release()

    # --- a call that no entry fits
    def _miss(self, modes: tuple, args: tuple, kwargs: dict):
        if current_recorder() is not None:
            return self.fn(*args, **kwargs)  # called while another program is traced: part of that program
        neighbour = compat.foreign_tracer(args, kwargs)
        if neighbour:
            self._warn_once(f"{self!r} was called under {neighbour}: the original function runs")
            return self.fn(*args, **kwargs)
        if self.options.cache is CACHE_OPTIONS.SAME_INPUT and self.stats.interpreter_cache:
            entry = self.stats.interpreter_cache[0]  # made in other modes
            self.stats.cache_hits += 1
            return self._run(entry, entry.prologue_fn(self.fn, args, kwargs), args, kwargs)
        with self._lock:
            return self._compile_and_run(modes, args, kwargs)

    def _compile_and_run(self, modes: tuple, args: tuple, kwargs: dict):
        stats, clock = self.stats, time.perf_counter_ns
        start = clock()
        reasons = []
        for entry in self._entries.get(modes, ()) if self.options.cache is not CACHE_OPTIONS.NO_CACHING else ():
            inputs = entry.prologue_fn(self.fn, args, kwargs)
            if type(inputs) is tuple:  # another thread compiled it meanwhile
                stats.cache_hits += 1
                return self._run(entry, inputs, args, kwargs)
            reasons.append(inputs)
        if isinstance(self.fn, torch.nn.Module) and any(map(_is_lazy, self.fn.modules())):
            return self.fn(*args, **kwargs)  # the first call of a lazy module, which gives it its parameters, is eager's
        self._drop_outlived()
        stats.times["lookup"] = (start, clock())
        stats.cache_misses += 1
        stats.last_compile_reasons = reasons or self._first_reason(modes)
        entry, complaint = None, ""
        try:
            entry = self._compile(modes, args, kwargs)
        except ProgramFails as error:
            complaint = "" if error.theirs else str(error)
        if entry is None:  # no effect has taken place yet: it fails with its own effects, words and traceback, if it does
            result = self.fn(*args, **kwargs)
            if complaint:
                self._warn_once(f"{complaint}\nThe original function ran.")
            return result
        if self.options.cache is not CACHE_OPTIONS.NO_CACHING:
            self._remember(modes, entry)
        start = clock()
        inputs = entry.prologue_fn(self.fn, args, kwargs)
        stats.times["prologue execution"] = (start, clock())
        if type(inputs) is str:
            raise CaptureError(
                f"the program does not fit the inputs it was captured from: {inputs}",
                remedy="something it reads changes while it runs; please report this with the program",
            )
        start = clock()
        try:
            return self._run(entry, inputs, args, kwargs)
        except Exception as error:
            self._point_at_user(entry, error)
            raise
        finally:
            stats.times["computation execution"] = (start, clock())

    def entry_for(self, args: tuple, kwargs: dict) -> tuple[CacheEntry, tuple]:
        """The program that a call would run, compiled where there is none, and the inputs of its computation. Nothing runs."""
        modes = compat.modes_key()
        with self._lock:
            for entry in self._entries.get(modes, ()):
                inputs = entry.prologue_fn(self.fn, args, kwargs)
                if type(inputs) is tuple:
                    return entry, inputs
            entry = self._compile(modes, args, kwargs)
            self._remember(modes, entry)
            return entry, entry.prologue_fn(self.fn, args, kwargs)

    def _compile(self, modes: tuple, args: tuple, kwargs: dict) -> CacheEntry:
        with without_collection():  # a compilation makes many objects that stay; looking through them again and again is a third of its time
            return self._compile_changing(modes, args, kwargs)

    def _compile_changing(self, modes: tuple, args: tuple, kwargs: dict) -> CacheEntry:
        changing = self._changing()
        numbers = any(changing.values())
        try:
            return self._compile_with(changing, modes, args, kwargs)
        except Exception:  # noqa: BLE001 - without the symbolic numbers it succeeds, or raises for what it is
            if not numbers:
                raise
        return self._compile_with({path: None for path, values in changing.items() if values is None}, modes, args, kwargs)

    def _changing(self) -> dict[str, set | None]:
        """Paths whose numbers stay symbolic: those that earlier readings saw written, and those of other numbers that are none of the values they were."""
        found: dict[str, set | None] = {}
        for entry in self.stats.interpreter_cache:
            for path, value in entry.captured.held_numbers.items():
                found.setdefault(path, set()).add(value)
        return found | {path: None for entry in self.stats.interpreter_cache for path in entry.captured.effects}

    def _compile_with(self, changing: dict, modes: tuple, args: tuple, kwargs: dict) -> CacheEntry:
        stats, clock, options = self.stats, time.perf_counter_ns, self.options
        start = clock()
        if options.debug.show_interpreter_progress:
            print(f"Begin interpretation of {self!r}", file=sys.stderr)
        captured = self._capture(args, kwargs, changing)
        if options.debug.show_interpreter_progress:
            print(f"Finished interpretation: {captured.instructions} instructions in {captured.frames.total()} frames", file=sys.stderr)
        stats.times["construction"] = (start, clock())
        stats.interpreted_instructions = captured.instructions
        stats.bound_symbols_created = len(captured.computation.bound_symbols)
        start = clock()
        try:
            return self._lower(captured, modes)
        except ThunderError as error:
            if error.bound_symbol is not None and error.bound_symbol.location is not None:
                add_location(error, captured.where(error.bound_symbol.location))
            raise
        finally:
            stats.times["prologue"] = (start, clock())
            captured.close()

    def _lower(self, captured: Captured, modes: tuple) -> CacheEntry:
        captured.transform(self.options, self.overrides, self.module())
        options = asked_for(captured.computation, self.options)
        program = functools.partial(self._program, captured)
        backward: list[Trace] = []
        if captured.output_requires_grad and not options.disable_torch_autograd:
            traces, backward, run = _connect(captured.computation, options, modes, program)
            if not compat.grad_enabled_in(modes) and not compat.inference_in(modes):
                run = with_grad(run)
        else:
            traces = lower(captured.computation, options, options.executors)
            run = _in_modes(program(traces[-1]), modes)
            if compat.grad_enabled_in(modes) and captured.any_input_requires_grad:
                run = without_grad(run)
        if compat.distributed_is_used():
            check_agreement([traces[-1], *backward[-1:]])
        for name in options.compile_options.keys() - options.used_compile_options.keys():
            if meant := difflib.get_close_matches(name, (*jit.__kwdefaults__, *options.used_compile_options), 1, 0.8):
                warn_user(f"thunder.jit was given {name}=, which nothing asks for: did you mean {meant[0]}=?", UserWarning)
        captured.settle(self.options, self.module())
        return CacheEntry(captured, [*captured.computation_traces[:-1], *traces], run, modes, backward)

    def _capture(self, args: tuple, kwargs: dict, changing: dict) -> Captured:
        try:
            return capture(self.fn, args, kwargs, self.options, changing, self.overrides)
        except (ThunderError, SharpEdgeWarning):
            raise
        except FailsWithParts as failure:
            raise failure.__cause__ from failure.__cause__.__cause__  # type: ignore[misc,union-attr]
        except Exception as failure:
            raise ProgramFails(failure) from failure

    def _program(self, captured: Captured, trace: Trace) -> Callable:
        if self.options.debug.check_traces:
            trace._callable = check_results(trace, captured.where).python_callable()
        return trace.python_callable()

    def _run(self, entry: CacheEntry, inputs: tuple, args: tuple, kwargs: dict):
        self.stats.last_entry = entry
        values = entry.computation_fn(*inputs)
        return values if entry.epilogue_fn is None else entry.epilogue_fn(self.fn, args, kwargs, values)

    def _remember(self, modes: tuple, entry: CacheEntry) -> None:
        stats = self.stats
        stats.interpreter_cache.insert(0, entry)
        self._entries.setdefault(modes, []).insert(0, entry)
        entry.used = stats.calls
        if len(stats.interpreter_cache) > MAX_ENTRIES:
            oldest = min(stats.interpreter_cache, key=lambda e: e.used)
            stats.interpreter_cache.remove(oldest)
            self._entries[oldest.modes].remove(oldest)
        if stats.cache_misses == RECOMPILE_WARNING_LIMIT + 1:
            why = "; ".join(dict.fromkeys(stats.last_compile_reasons))
            warn_user(
                f'{self!r} was compiled {stats.cache_misses} times. The last time because: {why}. cache="symbolic values" keeps numbers and sizes symbolic.',
                RecompileWarning,
            )

    def _drop_outlived(self) -> None:
        """Entries made for modules or functions that are gone."""
        for entry in [e for e in self.stats.interpreter_cache if e.captured.outlived]:
            self.stats.interpreter_cache.remove(entry)
            self._entries[entry.modes].remove(entry)

    def _first_reason(self, modes: tuple) -> list[str]:
        if self.options.cache is CACHE_OPTIONS.NO_CACHING and self.stats.cache_misses > 1:
            return ["no caching"]
        if not self._entries:
            return ["first call"]
        return [compat.describe_modes(old, modes) for old in self._entries]

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(text, UserWarning)

    def _point_at_user(self, entry: CacheEntry, error: Exception) -> None:
        """An error of an operation names the user's line it came from."""
        location = entry.captured.user_location(entry.computation_traces[-1], error.__traceback__)
        if location is not None and not getattr(error, "__notes__", None):
            add_location(error, location)

    # --- copies
    def __deepcopy__(self, memo):
        return jit_with(copy.deepcopy(self.fn, memo), self.options)

    def __reduce__(self):
        if _by_name(self) is self:
            return self.__qualname__  # a decorated function is found again under its name
        return jit_with, (self.fn, self.options)


def _is_lazy(module: torch.nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook")


def _by_name(fn: Any) -> Any:
    """What stands in a module where `fn` says that it was defined."""
    found = sys.modules.get(getattr(fn, "__module__", None) or "")
    for name in getattr(fn, "__qualname__", "<locals>").split("."):
        found = getattr(found, name, None)
    return found


def _in_modes(function: Callable, modes: tuple) -> Callable:
    return no_autocast(function) if compat.autocast_in(modes) else function


def _connect(computation: Trace, options: JitOptions, modes: tuple, program: Callable[[Trace], Callable]) -> tuple[list[Trace], list[Trace], Callable]:
    """The traces of a computation's forward and backward, and the two as a function connected to autograd.

    The backward for all outputs is compiled before the forward runs. One that some outputs play no part in, and one that is itself differentiated, are compiled
    when they are first met. `program` makes a callable of a trace.
    """
    forward, backward, cut = lower_with_derivatives(computation, options, options.executors)
    # a backward that is called under autocast runs as eager's would, but for kernels, which know the types that the program was made with
    apart = no_autocast if any(isinstance(e, FusionExecutor) for e in options.executors) else lambda run: run

    def again(missing: Sequence[int]) -> tuple[Callable, list[int]]:
        gradients, needed = gradient_program(computation, cut, missing, options.executors)
        arguments = {a for a in gradients.args if isinstance(a, Proxy)}
        if any(isinstance(o, TensorProxy) and o.requires_grad and o not in arguments for o in gradients.output_proxies):
            return _connect(gradients, options, modes, program)[2], needed
        return _in_modes(program(lower(gradients, options, options.executors)[-1]), modes), needed

    run = connected(
        _with_own_results(
            without_grad(_in_modes(program(forward[-1]), modes)), computation, cut.outputs, views_of_outputs(forward[-1])
        ),
        apart(program(backward[-1])), _result_of(computation, cut.outputs), [o.requires_grad for o in cut.outputs],
        make_without=lambda missing: apart(program(lower_backward_without(cut, missing, options, options.executors)[-1])),
        make_batched=lambda missing: program(lower_backward_for_batches(cut, missing, options)[-1]),
        make_again=again, inputs=inputs_behind(cut, computation.args), random=random_devices(computation, options),
        dense=read_by_products(cut, options.executors),
        decisions=next((a.decisions for a in computation.args if isinstance(a, NumberProxy)), Decisions()),
        names=[a.name for a in computation.args if not isinstance(a, TensorProxy)],
    )  # fmt: skip
    return forward, backward, run


def _with_own_results(forward: Callable, computation: Trace, outputs: list, shown_by_saved: Sequence[int]) -> Callable:
    """`forward`, whose results are no views where they share memory with no argument and no other result: PyTorch refuses writes to views that an autograd function returns.

    shown_by_saved: places of saved tensors that may be views of results. Such a view holds the result, that its node, and this what was saved: they would never be freed.
    """
    lines, arguments = computation.bound_symbols, {a for a in computation.args if isinstance(a, Proxy)}
    producer, shown = {o: line.sym for line in lines for o in line.outputs}, roots(lines, maybe=True)
    written = computation.tables.get("written", {})  # in memory that was there
    shared = Counter(shown.get(o, o) for o in outputs)

    def may_be_own_view(o: Proxy) -> bool:
        root = shown.get(o, o)
        if not isinstance(o, TensorProxy) or not o.requires_grad or root in arguments or shared[root] > 1 or OpTags.OPAQUE in producer[root].tags:
            return False
        return o is not root or "elementwise" not in producer[o].info or o.name in written

    places = [i for i, o in enumerate(outputs) if may_be_own_view(o)]
    if not places and not shown_by_saved:
        return forward

    def run(*inputs):
        results, (saved, others) = forward(*inputs)
        return _without_bases(results, places), (_without_bases(saved, shown_by_saved), others)

    return run


def _without_bases(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Sequence[torch.Tensor]:
    """The same memory, by tensors that are no views in these places."""
    if not places:
        return tensors
    found = list(tensors)
    for i in places:
        if found[i]._is_view():
            found[i] = found[i].detach()
    return tuple(found)


def _result_of(computation: Trace, outputs: list) -> Callable:
    """(inputs, outputs) -> the structure that the computation returns, made of distinct outputs and of inputs returned as they are."""
    places = {p: f"inputs[{i}]" for i, p in enumerate(computation.args) if isinstance(p, Proxy)} | {p: f"outputs[{i}]" for i, p in enumerate(outputs)}
    printer = Printer(print_depth=1)
    expression = printer.value(map_structure(lambda x: Text(places[x]) if isinstance(x, Proxy) else x, computation.output))
    numbers = "".join(f"  {a.name} = inputs[{i}]\n" for i, a in enumerate(computation.args) if isinstance(a, NumberProxy))
    numbers += "".join(f"  {o.name} = outputs[{i}]\n" for i, o in enumerate(outputs) if isinstance(o, UnbackedNumber))
    imports = "\n".join(sorted(printer.imports))
    return compile_source(f"{imports}\ndef result(inputs, outputs):\n{numbers}  return {expression}", "result", printer.context)


def jit(
    fn: Callable | None = None,
    /,
    *,
    langctx: Any = None,
    executors: Sequence[Executor | str] | None = None,
    sharp_edges: SHARP_EDGES_OPTIONS | str | None = None,
    interpretation: Any = None,
    cache: CACHE_OPTIONS | str | None = None,
    disable_torch_autograd: bool = False,
    transforms: Sequence | None = None,
    numerics: NUMERICS_OPTIONS | str | None = None,
    rng: RNG_OPTIONS | str | None = None,
    debug_options: DebugOptions | None = None,
    record_history: bool = False,
    **compile_options: Any,
):
    """Compiles a function or an `nn.Module`. Nothing happens until the first call, which reads the program and builds what later calls run.

    executors: executors or their names, in the order they are asked; None means the default ones. sharp_edges: "allow", "warn" or "error".
    cache: "constant values", "symbolic values", "same input" or "no caching"; where it is not given, values are constants but for int arguments that change from
    call to call. disable_torch_autograd: results never require grad. transforms: applied in order. numerics: "close", or "eager" for results and gradients that are
    eager's bit for bit: only executors and transforms that say they are `exact` are used. rng: "torch", or "fused": fusion executors may draw random numbers of their
    own. debug_options: see `thunder.DebugOptions`. record_history: keep the full interpreter log. interpretation, langctx: accepted as in 2024.
    memory_budget (a compile option): the share of the bytes saved for the backward that may be saved; the rest is computed again in the least time.
    triton_autotune (a compile option): whether blocks of the Triton fuser's kernels are chosen by measuring when a region runs first; what is found is kept on the disk.
    compile_options: free-form options that executors and passes may ask for; `thunder.last_compile_options` says which were used.

    Returns a callable for a function, a `thunder.ThunderModule` for a module. Used without a function it is a decorator that takes options.
    Raises OptionError, which names the valid values, for options it does not know, and TypeError for something that cannot be called.
    """
    if fn is None:
        given = dict(locals())
        given.pop("fn")
        return functools.partial(jit, **(given.pop("compile_options") | given))
    for old, hint in (("early_transforms", "pass transforms="), ("use_cudagraphs", "pass a CUDA graph transform in transforms=")):
        if old in compile_options:
            raise RuntimeError(f"{old} is no option any more: {hint}")
    if "executors_list" in compile_options:
        warnings.warn("executors_list is an old spelling of executors", stacklevel=2)
        executors = compile_options.pop("executors_list")
    if not callable(fn):
        raise TypeError(f"thunder.jit compiles functions and modules, not {type(fn).__name__}")
    check_interpretation(interpretation)
    check_langctx(langctx)
    check_memory_budget(compile_options.get("memory_budget", 1.0))
    given_transforms = check_transforms(() if transforms is None else transforms)
    chosen = with_executors_of(given_transforms, resolve_executors(executors))
    numerics, chosen = resolve_numerics(numerics, chosen, given_transforms, () if executors is None else executors)
    debug = DebugOptions() if debug_options is None else debug_options
    if not isinstance(debug, DebugOptions):
        raise OptionError(f"debug_options={debug!r} is not an option; valid: thunder.DebugOptions(...)")
    if record_history:
        debug = DebugOptions(**(debug._values | {"record_interpreter_history": True}))
    options = JitOptions(
        executors=chosen,
        cache=resolve_cache_option(cache),
        integers_may_change=cache is None,
        sharp_edges=resolve_sharp_edges(sharp_edges),
        disable_torch_autograd=disable_torch_autograd,
        transforms=given_transforms,
        numerics=numerics,
        rng=resolve_rng(rng, numerics),
        debug=debug,
        default_executors=executors is None,
        compile_options=compile_options,
    )
    options.executors = tuple(e.configured(options) for e in chosen)
    return jit_with(fn, options)


def jit_with(fn: Callable, options: JitOptions):
    """`thunder.jit` with options already resolved. What is compiled already is compiled anew from its original."""
    from thunder.module import ThunderModule

    if isinstance(fn, ThunderModule):
        fn = fn._model
    if isinstance(fn, Compiled):
        fn = fn.fn
    if isinstance(fn, torch.nn.Module):
        _refuse_wrapped(fn)
    compiled = Compiled(fn, options)
    if not isinstance(fn, torch.nn.Module):
        return compiled
    module = ThunderModule(fn, compiled)
    for transform in options.transforms:
        if asked(transform, "transform_module"):
            transform.transform_module(module)
    return module


def _refuse_wrapped(module: torch.nn.Module) -> None:
    """Wrappers of PyTorch's go around a compiled module, not into it. Raises NotImplementedError for them, and for modules of TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError("thunder.jit of a TorchScript module: compile the module that it was scripted or traced from")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise NotImplementedError("thunder.jit of a DistributedDataParallel module: compile the module first, then wrap the result in DistributedDataParallel")
    if any(kind.__module__.startswith("torch.distributed.fsdp") for m in module.modules() for kind in type(m).__mro__):
        raise NotImplementedError("thunder.jit of a module under FSDP: compile the module first, then shard the result, or use thunder.distributed.fsdp")
    for name, parameter in module.named_parameters():
        if type(parameter).__module__.startswith("torch.distributed.tensor"):
            raise NotImplementedError(
                f"thunder.jit of a module whose parameter {name} is a DTensor: use thunder.distributed (fsdp, column_parallel, row_parallel) in the place of parallelize_module"
            )


def add_transform(cfn: Callable, *, transform: Any, disable_torch_autograd_support: bool = False):
    """What `cfn` was compiled from, compiled again with one more transform, or a list of them, after those it has; everything else is kept.

    disable_torch_autograd_support: results never require grad. Raises OptionError for what is not compiled, or no transform.
    """
    compiled = cfn if isinstance(cfn, Compiled) else getattr(cfn, "_compiled", None)
    if not isinstance(compiled, Compiled):
        raise OptionError(f"add_transform takes a compiled function or module, not {type(cfn).__name__}: thunder.jit(..., transforms=[...]) makes one")
    added = check_transforms(transform if isinstance(transform, (tuple, list)) else [transform])
    options = compiled.options
    resolve_numerics(options.numerics, (), added, ())
    disabled = options.disable_torch_autograd or disable_torch_autograd_support
    executors, transforms = with_executors_of(added, options.executors), (*options.transforms, *added)
    return jit_with(compiled.fn, dataclasses.replace(options, executors=executors, transforms=transforms, disable_torch_autograd=disabled, used_compile_options={}))
