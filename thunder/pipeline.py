"""From a captured computation to the program that runs: the flat list of passes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from thunder.analysis.aliases import alias_bases
from thunder.core.check import check
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy, like
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace, timed_pass
from thunder.distributed.bucketing import bucket
from thunder.distributed.schedule import COMMUNICATION_BYTES_IN_FLIGHT, overlap
from thunder.distributed.synchronize import gathered_again
from thunder.extend import Executor, FusionExecutor, get_always_executors
from thunder.ops import LTORCH
from thunder.ops.inplace import writes_back
from thunder.ops.torch_types import to_torch_device
from thunder.options import NUMERICS_OPTIONS, RNG_OPTIONS, JitOptions
from thunder.transforms.autodiff import joint_trace
from thunder.transforms.backward_inside import backwards_inside, recompute_inside
from thunder.transforms.base import asked
from thunder.transforms.dce import dce
from thunder.transforms.decompose_reductions import decompose_reductions
from thunder.transforms.del_last_used import del_last_used
from thunder.transforms.dispatch import dispatch
from thunder.transforms.early_gradients import early_gradients
from thunder.transforms.exact_derivatives import exact_derivatives
from thunder.transforms.flat_products import flat_products
from thunder.transforms.joined_parts import has_parts, joined_parts
from thunder.transforms.keep import keep
from thunder.transforms.memory_budget import MEMORY_BUDGET, plan
from thunder.transforms.partition import ForwardBackward, as_saved_by, modified_in_place, overwritten_before, partition
from thunder.transforms.pullback import gradients_of
from thunder.transforms.recompute import recompute
from thunder.transforms.reinplace import reinplace
from thunder.transforms.reuse_memory import has_memory_to_reuse, reuse_memory
from thunder.transforms.seed_random import seed_random
from thunder.transforms.side_stream import has_side_stream, side_stream
from thunder.transforms.without_cotangents import without_cotangents

__all__ = [
    "asked_for", "lower", "lower_with_derivatives", "lower_backward_without", "lower_backward_for_batches",
    "gradient_program", "InputsBehind", "inputs_behind", "random_devices",
    "read_by_products",
]  # fmt: skip


def asked_for(program: Trace, options: JitOptions) -> JitOptions:
    """The options without executors that take nothing of a program because of the devices that its tensors are on."""
    if all(type(e).runs_on is Executor.runs_on for e in options.executors):
        return options
    values = itertools.chain(program.args, (o for line in program.bound_symbols for o in line.outputs))
    kinds = {x.device.type for x in values if isinstance(x, TensorProxy)}
    return dataclasses.replace(options, executors=tuple(e for e in options.executors if e.runs_on(kinds)))


def lower(acquired: Trace, options: JitOptions, executors: Sequence) -> list[Trace]:
    """All traces of a computation in the order they were made, the one that runs last."""
    traces = _before_derivatives(acquired, options, executors)
    if not backwards_inside(traces[-1].bound_symbols):
        return _lowered(traces, acquired, options, executors)
    recomputed = functools.partial(_recomputed, options=options, executors=executors)
    inside = ("Recompute in Backward", lambda trace: recompute_inside(trace, recomputed))
    return _lowered(traces, acquired, options, executors, [inside])


def _recomputed(joint: Trace, options: JitOptions, executors: Sequence) -> frozenset:
    """The values that a backward recomputes, for the memory budget and under ZeRO-3."""
    fusers = [e for e in executors if isinstance(e, FusionExecutor)]
    budget = options.get(MEMORY_BUDGET)
    chosen = (
        plan(joint, budget, lambda line: any(e.takes(line) for e in fusers)).recomputed if budget < 1.0 else frozenset()
    )
    return chosen.union(gathered_again(joint)) if joint.info.communicates else chosen


def _lowered(
    traces: list[Trace], program: Trace, options: JitOptions, executors: Sequence, first: Sequence[tuple] = ()
) -> list[Trace]:
    """The traces, and those that `first` and the passes that make a program run make of the last one."""
    traces = _run(traces, [*first, *_execution(program, options, executors)], options)
    for executor in executors:
        executor.expect(traces[-1])
    return traces


def _before_derivatives(acquired: Trace, options: JitOptions, executors: Sequence) -> list[Trace]:
    """A computation without what nobody needs, with random operations of a seed where they may be fused, and where
    executors join operations of it, as they make it."""
    fusers = [e for e in executors if isinstance(e, FusionExecutor)]
    seeded = (
        [("Seed Random Operations", lambda trace: seed_random(trace, fusers))]
        if fusers and options.rng is RNG_OPTIONS.FUSED
        else []
    )
    traces = _run([acquired], [("Dead Code Elimination", dce), *seeded], options)
    joined = functools.reduce(_combined, executors, traces[-1])
    if joined is not traces[-1]:
        traces = _run(traces, [("Combine Operations", lambda _: joined)], options)
    return (
        _run(traces, [("Flat Products", flat_products)], options)
        if fusers and any(line.sym is LTORCH["linear"] for line in traces[-1].bound_symbols)
        else traces
    )


def _combined(trace: Trace, executor: Executor) -> Trace:
    found = executor.combined(trace)
    return trace if found is trace else dce(found)


def _execution(program: Trace, options: JitOptions, executors: Sequence) -> list[tuple]:
    """The passes that make a program which runs, and what users' transforms do to it then."""
    communicates = program.info.communicates
    fused = any(isinstance(e, FusionExecutor) and e.owns_results for e in executors)
    return [
        *([("Communication Buckets", bucket)] if communicates else ()),
        *([("Join Parts", joined_parts)] if has_parts(program) else ()),
        ("Transform for execution", lambda trace: reinplace(dispatch(trace, executors))),
        *(
            [("Overlap Communication", lambda trace: overlap(trace, options.get(COMMUNICATION_BYTES_IN_FLIGHT)))]
            if communicates
            else ()
        ),
        ("Delete Last Used", del_last_used),
        *(
            (
                f"Transform {type(t).__name__}",
                lambda trace, t=t: t.transform_trace_post_optimization(trace, executors_list=executors),
            )
            for t in options.transforms
            if asked(t, "transform_trace_post_optimization")
        ),
        *([("Side Stream", side_stream)] if has_side_stream(program) else ()),
        *([("Reuse Memory", lambda trace: reuse_memory(trace, fused))] if has_memory_to_reuse(program, fused) else ()),
    ]


def _run(traces: list[Trace], passes: Sequence, options: JitOptions) -> list[Trace]:
    for title, run in passes:
        traces.append(timed_pass(title, traces[-1], run))
        if options.debug.check_traces:
            check(traces[-1])
    return traces


def lower_with_derivatives(
    acquired: Trace, options: JitOptions, executors: Sequence
) -> tuple[list[Trace], list[Trace], ForwardBackward]:
    """All traces of a computation whose result requires grad: those of its forward, those of its backward, and how the
    two belong together."""
    traces = _before_derivatives(acquired, options, executors)
    cut: list[ForwardBackward] = []

    def differentiated(trace: Trace) -> Trace:
        joint = joint_trace(
            exact_derivatives(trace) if options.numerics is NUMERICS_OPTIONS.EAGER else trace, executors
        )
        budget = options.get(MEMORY_BUDGET)
        fusers = [e for e in executors if isinstance(e, FusionExecutor)]
        joint = decompose_reductions(joint, fusers)

        def fuses(line: BoundSymbol) -> bool:
            return any(e.takes(line) for e in fusers)

        chosen = plan(joint, budget, fuses).recomputed if budget < 1.0 or fusers else frozenset()
        if budget >= 1.0:
            chosen = keep(joint, chosen, fuses, lambda line: any(e.takes(line) and e.keeps(line) for e in fusers))
        if joint.info.communicates:
            chosen = gathered_again(joint).union(chosen)
        cut.append(partition(early_gradients(recompute(joint, chosen), fusers)))
        return cut[0].forward

    place = len(traces)  # of the trace that the derivative makes
    forward = _lowered(traces, acquired, options, executors, [("Grad transform pass", differentiated)])
    saved = as_saved_by(forward[-1], cut[0])
    saved.backward = saved.backward.replace(provenance=forward[place].provenance)
    return forward, _lowered([saved.backward], saved.backward, options, executors), saved


def lower_backward_without(
    cut: ForwardBackward, missing: Sequence[int], options: JitOptions, executors: Sequence
) -> list[Trace]:
    """All traces of the backward for the case that no cotangents come for some outputs: `missing` are their places
    among those that require grad."""
    gone = {cut.cotangents[i] for i in missing}
    without = ("Without Cotangents", lambda trace: without_cotangents(trace, cut.cotangents, gone))
    return _lowered([_copied(cut.backward)], cut.backward, options, executors, [without])


def _copied(trace: Trace) -> Trace:
    """The same for a program that is made later, for the numbers of another call."""
    return trace.replace(bound_symbols=[line.copied() for line in trace.bound_symbols])


def lower_backward_for_batches(cut: ForwardBackward, missing: Sequence[int], options: JitOptions) -> list[Trace]:
    """All traces of the backward for cotangents that vmap has made batches of (`is_grads_batched=True`): PyTorch's own
    operations know them, kernels do not."""
    gone = {cut.cotangents[i] for i in missing}
    passes = [
        ("Without Cotangents", lambda trace: without_cotangents(trace, cut.cotangents, gone)),
        ("Transform for execution", lambda trace: dispatch(trace, get_always_executors())),
        ("Delete Last Used", del_last_used),
    ]
    return _run([_copied(cut.backward)], passes, options)


def read_by_products(cut: ForwardBackward, executors: Sequence) -> list[int]:
    """Places of the cotangents that several matrix products read, each of which would copy one that is broadcast, as
    the gradient of a sum is."""
    if not any(isinstance(e, FusionExecutor) for e in executors):  # what nobody fuses runs as in eager, bit for bit
        return []
    lines = cut.backward.bound_symbols
    bases = alias_bases(lines, maybe=True)
    reads = collections.Counter(
        root for line in lines if OpTags.MATMUL_OP in line.sym.tags for root in {bases[i] for i in line.inputs}
    )
    return [i for i, c in enumerate(cut.cotangents) if reads[c] > 1]


def gradient_program(
    acquired: Trace, cut: ForwardBackward, missing: Sequence[int], executors: Sequence
) -> tuple[Trace, list[int]]:
    """The gradients of a computation as a computation of their own, for a backward that is differentiated, and which of
    the computation's arguments it takes.

    Its arguments are those, then the cotangents that are not missing. What the computation writes to its arguments is
    not written again. Where an argument was written to after the gradients read it, the program raises PyTorch's error.
    """
    lines = [line.copied() for line in acquired.bound_symbols if not writes_back(line)]
    outputs = [o for o in cut.outputs if o.requires_grad]
    cotangents = [None if i in missing else like(o) for i, o in enumerate(outputs)]
    for c in cotangents:
        if c is not None:
            c.name, c.requires_grad = acquired.names.make("cotangent"), True
    gradients = gradients_of(dce(acquired.replace(bound_symbols=lines)), cotangents, outputs, executors)
    overwritten = overwritten_before(acquired.bound_symbols, gradients.bound_symbols, acquired.info.copies)
    if overwritten is not None:
        raise_error = modified_in_place.bind(overwritten.name, output=None)
        gradients = gradients.replace(bound_symbols=[raise_error], output=tuple(None for _ in gradients.output))
    read = {p for line in gradients.bound_symbols for p in line.inputs} | set(gradients.output_proxies)
    needed = [i for i, a in enumerate(acquired.args) if not isinstance(a, TensorProxy) or a in read]
    return gradients.replace(args=[*(acquired.args[i] for i in needed), *gradients.args[len(acquired.args) :]]), needed


def random_devices(acquired: Trace, options: JitOptions) -> list | None:
    """The devices whose default generators a computation may draw from; None where it may draw from others: the user's,
    or those of fusion executors."""
    drawing = [
        line for line in acquired.bound_symbols if not line.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.OPAQUE))
    ]
    if (
        drawing
        and options.rng is RNG_OPTIONS.FUSED
        or any(line.kwargs.get("generator") is not None for line in drawing)
    ):
        return None
    return list(
        dict.fromkeys(to_torch_device(o.device) for line in drawing for o in line.outputs if isinstance(o, TensorProxy))
    )


class InputsBehind(NamedTuple):
    """What the gradients can be computed from again: places of arguments. saved: pairs of such a place and its place
    among the saved tensors."""

    kept: list[int]
    saved: list[tuple[int, int]]
    numbers: list[int]


def inputs_behind(cut: ForwardBackward, args: Sequence) -> InputsBehind:
    """The arguments that saved values were computed from, and all that are no tensors."""
    collections = [o.collection for o in cut.saved_others if isinstance(o, CollectionProxy)]
    others = [o for o in cut.saved_others if isinstance(o, Proxy)]
    needed = {*cut.saved_tensors, *others, *itertools.chain(*collections)}
    for line in reversed(cut.forward.bound_symbols):
        if not needed.isdisjoint(line.outputs) or not line.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.OPAQUE)):
            needed.update(line.inputs)
    saved = {p: i for i, p in enumerate(cut.saved_tensors)}
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, TensorProxy) and a in needed]
    return InputsBehind(
        [i for i, a in tensors if a not in saved],
        [(i, saved[a]) for i, a in tensors if a in saved],
        [i for i, a in enumerate(args) if not isinstance(a, TensorProxy)],
    )
