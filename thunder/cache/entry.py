"""One compiled program: from a captured program to the functions that a call runs."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from thunder import compat
from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import H200, Machine
from thunder.analysis.flow import derived, producers
from thunder.cache.analysis import CostAnalysis, MemoryAnalysis, cost_analysis, memory_analysis
from thunder.capture import Captured
from thunder.core.codegen import Printer, Text, compile_source
from thunder.core.host_calls import with_log
from thunder.core.paths import OtherPath
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy, UnbackedNumber, leaves, map_structure
from thunder.core.signals import interrupts
from thunder.core.symbol import OpTags
from thunder.core.symbolic import Decisions
from thunder.core.trace import ForwardBackward, Trace
from thunder.distributed.agreement import check_agreement
from thunder.extend import FusionExecutor
from thunder.ops.eager_calls import State, asking_again, with_state
from thunder.ops.infer import no_autocast
from thunder.ops.leaf_order import leaf_order
from thunder.ops.rules import effects
from thunder.ops.torch_types import to_torch_device
from thunder.options import NUMERICS_OPTIONS, JitOptions, debug_topics
from thunder.pipeline import (
    asked_for,
    lower,
    lower_accumulating,
    lower_backward_for_batches,
    lower_backward_without,
    lower_two_backwards,
    lower_with_derivatives,
)
from thunder.runtime import extensions
from thunder.runtime.autograd import connected, when_called, with_grad, without_grad
from thunder.transforms.check_results import check_entrances, check_results
from thunder.transforms.cudagraph import CUDAGraphTransform
from thunder.transforms.double_backward import InputsBehind, gradient_program, inputs_behind, random_devices
from thunder.transforms.launch_loop import take_loops
from thunder.transforms.named_ranges import in_named_ranges
from thunder.transforms.partition import read_by_products, read_of_saved, views_of_outputs
from thunder.transforms.watch_values import Watch, in_anomaly_mode, watched_program

WARM = 32  # calls of a program after which its launch loops are made: a bound symbol's takes as long as 100 calls save


class CacheEntry:
    """One compiled program: a prologue that says whether it fits a call, the computation, and an epilogue.

    `prologue`, `forward`, `backward` and `epilogue` are the traces that run; the last two are None where there is
    nothing to do. Each of `prologue_traces`, `computation_traces`, `backward_traces` and `epilogue_traces` has the
    traces of all passes, as captured first. A printed entry is the text of all four. executed: the traces that calls
    run, those of backwards that were compiled later among them. due_at: the number of the call at which something is
    due (`at`), launch loops among it; looped: how many traces have theirs. tiers: which tier runs, and why (see
    `thunder.cache.tiers.Tiers`); None where there is one. graphs: whether it runs as CUDA graphs, and why
    (`thunder.cache.graphs.GraphTier`). lowered: the computation that calls run.
    """

    __slots__ = (
        "captured", "path", "modes", "used", "calls", "left_after", "prologue_fn", "prologue_traces", "computation_fn",
        "computation_traces", "epilogue_fn", "epilogue_traces", "backward_traces", "executed",
        "tiers", "graphs", "connection", "from_disk", "due_at", "lowered", "looped", "locks",
        "_due", "_loops_at", "_questions", "_state", "__weakref__",
    )  # fmt: skip

    def __init__(self, captured: Captured, program: Lowered, modes: tuple):
        self.captured, self.modes, self.path = captured, modes, captured.path
        self.used = self.calls = 0  # the number of the last call that ran it; how many did
        self.left_after = -1  # how many had run it when one left it the last time
        self.prologue_fn, self.prologue_traces = captured.prologue_fn, captured.prologue_traces
        self.locks, self._questions = captured.locks, captured.prologue_fn
        self._state = State() if captured.has_eager_calls else None
        if self._state is not None:
            self.prologue_fn = self._questions = asking_again(captured.prologue_fn, self._state)
        if self.locks:
            self.prologue_fn = functools.partial(_before_locks, self._questions)
        self.epilogue_fn, self.epilogue_traces = captured.epilogue_fn, captured.epilogue_traces
        self.tiers: Any = None
        self.graphs: Any = None
        self._due: list[tuple[int, Callable[[], None]]] = []
        self.from_disk = False  # its traces are text then
        self.take(program)

    def take(self, program: Lowered) -> None:
        """Calls run this computation from now on."""
        self.computation_traces, self.backward_traces = program.computation_traces, program.backward_traces
        self.computation_fn, self.executed, self.connection = program.run, program.executed, program.connection
        self.lowered, self.looped = program, 0
        self._loops_at = self.calls + WARM
        self._set_due()
        if self._state is not None:
            self.computation_fn = with_state(program.run, self._state)

    @property
    def length(self) -> int:
        """How many operations it has, or lines, where it is text."""
        computation = self.captured.computation
        return str(computation).count("\n") if self.from_disk else len(computation.bound_symbols)

    def at(self, call: int, action: Callable[[], None]) -> None:
        """Calls `action` before the call of this number runs."""
        self._due.append((call, action))
        self._set_due()

    def _set_due(self) -> None:
        self.due_at = min([self._loops_at, *(call for call, _ in self._due)])

    def arrive(self) -> None:
        """Does what is due at this call."""
        due = [item for item in self._due if item[0] <= self.calls]
        self._due = [item for item in self._due if item not in due]
        if self._loops_at <= self.calls:
            self.warm()
        self._set_due()
        for _, action in due:
            action()

    def warm(self) -> None:
        """Calls run the loops of its traces from now on, where there is the extension. While a process builds it, calls
        run without: twice as many calls later it may be there. A backward that is compiled later gets its loops at a
        later call."""
        if extensions.loaded_extension() is None and extensions.is_awaited():
            self._loops_at = 2 * self.calls
            return
        self._loops_at = sys.maxsize if self.connection is None else self.calls + WARM
        self._set_due()
        traces, self.looped = self.executed[self.looped :], len(self.executed)
        if not self.from_disk and not compat.function_modes_in(self.modes):  # which see calls of PyTorch's functions
            for trace in traces:
                take_loops(trace)

    prologue = property(lambda self: self.prologue_traces[-1])
    forward = property(lambda self: self.computation_traces[-1])
    backward = property(lambda self: self.backward_traces[-1] if self.backward_traces else None)
    # made when somebody asks for it: the program makes its own at its first backward (see `_connect`)
    backward_fn = property(lambda self: self.backward.python_callable() if self.backward_traces else None)
    epilogue = property(lambda self: self.epilogue_traces[-1] if self.epilogue_traces else None)

    def inputs(self, fn: Callable, args: tuple, kwargs: dict) -> tuple | str:
        """The inputs of the computation, or why the program does not fit a call. A question that raises was asked of
        something else than at capture: its answer is another one."""
        try:
            return self._questions(fn, args, kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the objects there raise now
            if interrupts(error):
                raise
            return f"a question that the prologue asks raised {type(error).__name__}: {error}"

    def memory_analysis(self) -> MemoryAnalysis:
        """The bytes of its arguments, results, saved values and gradients, and at the peak; printed as a table."""
        return memory_analysis(self)

    def cost_analysis(self, machine: Machine = H200) -> CostAnalysis:
        """Floating-point operations, bytes moved and projected seconds of each of its operations, for a machine that is
        described by a few figures (`thunder.distributed.Machine`); printed as a table."""
        return cost_analysis(self, machine)

    def retire(self, why: str) -> None:
        """From now on it fits no call."""
        self.prologue_fn = self._questions = lambda fn, args, kwargs: why

    def __str__(self) -> str:
        held = "".join(f"# runs while it holds the lock {taken.name}\n" for taken in self.locks)
        traces = self.prologue, self.forward, self.epilogue, self.backward
        return held + "\n".join(str(trace) for trace in traces if trace)

    def __repr__(self) -> str:
        parts = {n: getattr(self, n) for n in ("prologue", "forward", "backward", "epilogue")}
        sizes = ", ".join(f"{name}: {len(trace.bound_symbols)}" for name, trace in parts.items() if trace is not None)
        tier = "".join(f"; {part}" for part in (self.tiers, self.graphs) if part is not None)
        return f"<a compiled program with bound symbols in {sizes}{tier}>"


LOCKED = object()  # in the place of inputs: the program runs under locks, and asks its questions again there


def _before_locks(questions: Callable, fn: Callable, args: tuple, kwargs: dict) -> Any:
    """The prologue of a program that takes locks, for calls that hold none."""
    inputs = questions(fn, args, kwargs)
    return LOCKED if type(inputs) is tuple else inputs


class Lowered(NamedTuple):
    """The traces of a computation and of its backward, and the function that a call runs. executed: see `CacheEntry`.
    connection: how the two belong to autograd, None without a backward."""

    computation_traces: list[Trace]
    backward_traces: list[Trace]
    run: Callable
    executed: list[Trace]
    connection: Connection | None = None


@dataclass(frozen=True)
class Connection:
    """How a forward and its backward belong to autograd, in values that can be written to a file.

    result: the text of `result(inputs, outputs)`, the structure that the program returns; objects: by name, those in
    it. own: places of outputs that are detached from their bases; shown: the same of saved tensors. unreached: places
    of arguments that require grad and get none.
    requires_grad: of each output. inputs, random, dense, derived, names, tensors: see `connected`. fuses: whether
    kernels know the types they were made for.

    variants: the backward for the case that no cotangents come for some outputs. computation, cut: the captured
    program and its joint trace.
    """

    result: str
    objects: dict[str, Any]
    own: list[int]
    shown: list[int]
    requires_grad: list[bool | None]
    inputs: InputsBehind
    random: list | None
    dense: list[int]
    derived: list[list[int]]
    names: list[str]
    fuses: bool
    variants: Variants
    computation: Trace
    cut: ForwardBackward
    tensors: Sequence[str] = ()
    unreached: Sequence[int] = ()


class Variants:
    """The backwards for the case that no cotangents come for some outputs. made: those that were asked for. notice:
    told of each one."""

    def __init__(self, make: Callable[[tuple[int, ...]], Trace]):
        self._make = make
        self.by_missing: dict[tuple[int, ...], Trace] = {}
        self.notice: Callable[[tuple[int, ...], Trace], None] | None = None

    def __call__(self, missing: Sequence[int]) -> Trace:
        backward = self.by_missing[tuple(missing)] = self._make(tuple(missing))
        if self.notice is not None:
            self.notice(tuple(missing), backward)
        return backward


def lower_captured(
    captured: Captured, options: JitOptions, modes: tuple, model: Any = None, watch: Callable = lambda trace, run: run
) -> CacheEntry:
    """Run the passes on a captured program, and make a cache entry for calls in `modes`.

    model: the compiled module that is called, which transforms are shown. watch: see `lowered`.
    """
    program = lowered(captured, options, modes, watch)
    if compat.distributed_is_used():
        check_agreement([program.computation_traces[-1], *program.backward_traces[-1:]])
    captured.settle(options, model)
    return CacheEntry(captured, program, modes)


def lowered(
    captured: Captured, wanted: JitOptions, modes: tuple, watch: Callable[[Trace, Callable], Callable]
) -> Lowered:
    """Run the passes on a captured program. watch: for each trace and its function, the function that runs instead."""
    options, executed = asked_for(captured.computation, wanted), list[Trace]()
    topics, where = debug_topics(), captured.where  # functions that run hold no `captured`
    debugged = Watch(where, captured.computation.info.parameters, captured.computation, topics)

    def program(trace: Trace) -> Callable:
        if options.debug.check_traces:
            check_results(trace, where)
        else:
            check_entrances(trace, where)
        executed.append(trace)
        run = watched_program(trace, debugged) if topics else in_named_ranges(trace, trace.python_callable())
        return watch(trace, run)

    backward: list[Trace] = []
    connection = None
    if captured.output_requires_grad and not options.disable_torch_autograd:
        traces, backward, run, connection = _connect(captured.computation, options, modes, program, where)
        run = differentiable(run, modes)
    else:
        traces = lower(captured.computation, options, options.executors)
        run = not_differentiable(program(traces[-1]), modes, captured.any_input_requires_grad)
    if captured.host_calls:
        run = with_log(run, bool(captured.path))
    if captured.path or captured.may_fail_over:
        left = Exception if captured.may_fail_over else OtherPath
        run = with_numbers_put_back(run, *drawn_from(captured.computation), left)
    return Lowered([*captured.computation_traces[:-1], *traces], backward, run, executed, connection)


def differentiable(run: Callable, modes: tuple) -> Callable:
    """A function that is connected to autograd, in the grad mode of its calls."""
    return run if compat.grad_enabled_in(modes) or compat.inference_in(modes) else with_grad(run)


def not_differentiable(run: Callable, modes: tuple, any_input_requires_grad: bool) -> Callable:
    """A computation without a backward, in the modes of its calls."""
    run = _in_modes(run, modes)
    return without_grad(run) if compat.grad_enabled_in(modes) and any_input_requires_grad else run


def drawn_from(computation: Trace) -> tuple[list[torch.device], list[torch.Generator | int]]:
    """The devices whose default generators a program draws from, and other generators, or positions of inputs that may
    be some."""
    drawing = [b for b in computation.bound_symbols if not b.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.OPAQUE))]
    results = [o for b in drawing for o in b.outputs if isinstance(o, TensorProxy)]
    devices = {device for o in results if (device := to_torch_device(o.device)) is not None}
    own = {id(x): x for b in drawing for x in leaves((b.args, b.kwargs)) if type(x) is torch.Generator}
    generators = {x for b in drawing for x in b.inputs if type(x) is AnyProxy}
    inputs = [i for i, x in enumerate(computation.args) if type(x) is AnyProxy and x in generators]
    return sorted(devices, key=str), [*own.values(), *inputs]


def with_numbers_put_back(
    function: Callable, devices: Sequence[torch.device], own: Sequence[torch.Generator | int], left: type[Exception]
) -> Callable:
    """`function`, which draws no numbers where it leaves for another path or for the original: these draw them
    again. left: the exceptions that it leaves by."""
    if not devices and not own:
        return function

    def run(*inputs):
        generators_read = (inputs[x] if isinstance(x, int) else x for x in own)
        generators = [*map(_default_generator, devices), *(x for x in generators_read if type(x) is torch.Generator)]
        on_gpus = any(g.device.type == "cuda" for g in generators)
        if on_gpus and torch.cuda.is_current_stream_capturing():  # which leaves for nothing, and has no states to get
            return function(*inputs)
        states = [g.get_state() for g in generators]
        try:
            return function(*inputs)
        except left:
            for generator, state in zip(generators, states):
                generator.set_state(state)
            raise

    return run


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _in_modes(function: Callable, modes: tuple) -> Callable:
    return no_autocast(function) if compat.autocast_in(modes) else function


def _connect(
    computation: Trace, options: JitOptions, modes: tuple, program: Callable[[Trace], Callable], where: Callable
) -> tuple[list[Trace], list[Trace], Callable, Connection]:
    """The traces of a computation's forward and backward, the two as a function connected to autograd, and how.

    The backward for all outputs is lowered before the forward runs. A backward that some outputs play no part in, and
    one that is itself differentiated, are lowered when they are first met. `program` makes a callable of a trace, which
    takes as long as lowering it: of a backward when it is first called.
    """
    executors = options.executors
    forward, backward, cut = lower_with_derivatives(computation, options, executors)

    def again(missing: Sequence[int]) -> tuple[Callable, list[int]]:
        gradients, needed = gradient_program(computation, cut, missing, executors)
        computed = set(gradients.output_proxies) - {a for a in gradients.args if isinstance(a, Proxy)}
        if any(isinstance(o, TensorProxy) and o.requires_grad for o in computed):
            return _connect(gradients, options, modes, program, where)[2], needed
        return _in_modes(program(lower(gradients, options, executors)[-1]), modes), needed

    result, objects = _result_of(computation, cut.outputs)
    connection = Connection(
        result, objects,
        _own_results(computation, cut.outputs),
        list(views_of_outputs(forward[-1])),
        [o.requires_grad for o in cut.outputs],
        inputs_behind(cut, computation.args),
        random_devices(computation, options),
        read_by_products(cut, executors),
        derived(computation.bound_symbols, cut.outputs),
        [a.name for a in computation.args if not isinstance(a, TensorProxy)],
        any(isinstance(e, FusionExecutor) for e in executors),
        Variants(lambda missing: lower_backward_without(cut, missing, options, executors)[-1]),
        computation, cut, _told(computation, cut), _unreached(computation, cut),
    )  # fmt: skip
    apart = apart_from_autocast(connection)

    def parts(later: tuple[int, ...]) -> tuple[Callable, Callable, int, set[int]] | None:
        halves = lower_two_backwards(cut, later, options, executors)
        if halves is None:
            return None
        first, second, count = halves
        return apart(program(first)), apart(program(second)), count, read_of_saved(second)

    def accumulating(cases: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Callable, list[int]] | None:
        traced = lower_accumulating(cut, *cases, options, executors)
        return None if traced is None else (apart(program(traced[0])), traced[1])

    # graphs read what calls give them; a parameter of two programs has the sum of both added to its gradient in eager
    # mode, and rounds otherwise
    returns_all = any(isinstance(t, CUDAGraphTransform) for t in options.transforms)
    returns_all |= options.numerics is NUMERICS_OPTIONS.EAGER
    run = connect(
        connection, program(forward[-1]), when_called(lambda: program(backward[-1])), modes,
        make_without=lambda missing: apart(program(connection.variants(missing))),
        make_batched=lambda missing: program(lower_backward_for_batches(cut, missing, options)[-1]),
        make_again=again,
        make_parts=parts,
        make_accumulating=None if returns_all else accumulating,
        make_watched=lambda missing: in_anomaly_mode(
            connection.variants(missing) if missing else backward[-1], computation, where
        ),
        decisions=next((a.decisions for a in computation.args if isinstance(a, NumberProxy)), Decisions()),
    )  # fmt: skip
    return forward, backward, run, connection


def _told(computation: Trace, cut: ForwardBackward) -> list[str]:
    """Names of the tensors among the arguments, where the backward asks which of them autograd wants gradients of."""
    asks = any(effects.asks_autograd.of(b.sym) for b in cut.backward.bound_symbols)
    return [a.name for a in computation.args if isinstance(a, TensorProxy)] if asks else []


def _unreached(computation: Trace, cut: ForwardBackward) -> list[int]:
    """Places of the arguments that require grad and get none: autograd's graph does not lead to them, as in eager
    mode."""
    gets = {
        i: cut.backward.output[i] is not None
        for i, a in enumerate(computation.args)
        if isinstance(a, TensorProxy) and a.requires_grad
    }
    return [i for i, is_reached in gets.items() if not is_reached] if any(gets.values()) else []


def apart_from_autocast(connection: Connection) -> Callable[[Callable], Callable]:
    """A backward that is called under autocast runs as eager's would; kernels know the types they were made for."""
    return no_autocast if connection.fuses else lambda run: run


def connect(
    connection: Connection, forward: Callable, backward: Callable, modes: tuple, *, make_without: Callable,
    make_batched: Callable, make_again: Callable, decisions: Decisions, make_watched: Callable | None = None,
    make_parts: Callable | None = None, make_accumulating: Callable | None = None,
) -> Callable:  # fmt: skip
    """The functions of a forward and a backward as one that is connected to autograd. make_...: see `connected`."""
    described = connection
    return connected(
        _in_modes(forward, modes),
        apart_from_autocast(described)(backward),
        compile_source(described.result, "result", described.objects),
        described.requires_grad,
        make_without=make_without,
        make_batched=make_batched,
        make_again=make_again,
        make_watched=make_watched,
        make_parts=make_parts,
        make_accumulating=make_accumulating,
        inputs=described.inputs,
        random=described.random,
        dense=described.dense,
        derived=described.derived,
        decisions=decisions,
        names=described.names,
        tensors=described.tensors,
        unreached=described.unreached,
        order=lambda: None if described.computation is None else leaf_order(described.computation),
        own=described.own,
        shown=described.shown,
    )


def _own_results(computation: Trace, outputs: list) -> list[int]:
    """Places of results that are views and share memory with no argument and no other result."""
    operations, arguments = computation.bound_symbols, {a for a in computation.args if isinstance(a, Proxy)}
    producer, bases = producers(operations), alias_bases(operations, maybe=True)
    written = computation.info.written  # in memory that was there
    shared = Counter(bases[o] for o in outputs)

    def may_be_own_view(o: Proxy) -> bool:
        base = bases[o]
        if not isinstance(o, TensorProxy) or not o.requires_grad or base in arguments or shared[base] > 1:
            return False
        if OpTags.OPAQUE in producer[base].sym.tags:
            return False
        return o is not base or not producer[o].sym.elementwise or o.name in written

    return [i for i, o in enumerate(outputs) if may_be_own_view(o)]


def _result_of(computation: Trace, outputs: list) -> tuple[str, dict[str, Any]]:
    """The text of (inputs, outputs) -> the structure that the computation returns, of distinct outputs and of inputs,
    and the objects that it names."""
    args = computation.args
    places = {p: f"inputs[{i}]" for i, p in enumerate(args) if isinstance(p, Proxy)}
    places |= {p: f"outputs[{i}]" for i, p in enumerate(outputs)}
    printer = Printer(print_depth=1)
    placed = map_structure(lambda x: Text(places[x]) if isinstance(x, Proxy) else x, computation.output)
    expression = printer.value(placed)
    numbers = "".join(f"  {a.name} = inputs[{i}]\n" for i, a in enumerate(args) if isinstance(a, NumberProxy))
    numbers += "".join(f"  {o.name} = outputs[{i}]\n" for i, o in enumerate(outputs) if isinstance(o, UnbackedNumber))
    imports = "\n".join(sorted(printer.imports))
    return f"{imports}\ndef result(inputs, outputs):\n{numbers}  return {expression}", printer.context
