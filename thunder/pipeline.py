"""From a captured computation to the program that runs: the list of passes, and the functions that run it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from thunder.core.check import check, check_change
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import is_outside
from thunder.core.trace import ForwardBackward, Trace, TraceBuilder, headed
from thunder.distributed.bucketing import bucket
from thunder.distributed.schedule import COMMUNICATION_BYTES_IN_FLIGHT, overlap
from thunder.errors import OptionError
from thunder.extend import Executor, get_always_executors
from thunder.extend.own import FINDERS
from thunder.extend.passes import OPERATIONS, RUNS, Lowering, Pass, PassList, named
from thunder.extend.rules import CAPTURED, CUT, JOINT, Rule
from thunder.ops import ltorch
from thunder.options import NUMERICS_OPTIONS, RNG_OPTIONS, JitOptions
from thunder.transforms.accumulate import accumulating
from thunder.transforms.accumulated_products import ACCUMULATE_PRODUCTS
from thunder.transforms.aligned_products import aligned_products
from thunder.transforms.autodiff import joint_trace
from thunder.transforms.base import has_hook
from thunder.transforms.chained_products import chained_products
from thunder.transforms.channels_last import channels_last
from thunder.transforms.channels_last import is_on as has_images
from thunder.transforms.constants import constants
from thunder.transforms.cse import has_differentiated_gradients, share, share_gradients
from thunder.transforms.dce import dce, dce_of_captured
from thunder.transforms.decompose_reductions import DECOMPOSE_REDUCTIONS
from thunder.transforms.del_last_used import del_last_used
from thunder.transforms.dispatch import dispatch, dispatch_left, fuse
from thunder.transforms.distinct_indices import DISTINCT_INDICES
from thunder.transforms.joined_parts import JOIN_PARTS
from thunder.transforms.merged_views import MERGE_VIEWS
from thunder.transforms.number_operands import keep_numbers
from thunder.transforms.partition import partition, saved_collections
from thunder.transforms.recompute import recompute_in_backwards
from thunder.transforms.reinplace import reinplace
from thunder.transforms.reuse_memory import reuse_memory
from thunder.transforms.rules import apply_rules
from thunder.transforms.save_plan import MEMORY_BUDGET, regathers, save_plan
from thunder.transforms.seed_random import seed_random
from thunder.transforms.separate_biases import SEPARATE_BIASES
from thunder.transforms.two_backwards import two_backwards
from thunder.transforms.unstack_saved import unstack_saved
from thunder.transforms.wide_products import WIDE_PRODUCTS
from thunder.transforms.without_cotangents import without_cotangents

# facts, beside those of `thunder.extend.passes`, and of rules: JOINT, a backward that is asked for stands behind its
# forward, and CUT, forward and backward are programs of their own
PLAN = "plan"  # the recomputed values are chosen, and nothing is copied yet
FUSIBLE = "fusible"  # fusion executors may make regions of operations without an executor
UNDELETED = "undeleted"  # no value is deleted yet


def _cleaned(trace: Trace) -> Trace:
    cleaned = dce(trace)
    return trace if len(cleaned.bound_symbols) == len(trace.bound_symbols) else cleaned


def _rules(at: str, lowering: Lowering, own: Sequence[Rule]) -> list[Rule]:
    """The rules of a stage: the user's, those of executors, and thunder's own."""
    others = [] if lowering.plain else [*lowering.options.rules, *(one for e in lowering.executors for one in e.rules)]
    exact = lowering.plain or _is_exact(lowering)
    return [one for one in dict.fromkeys((*others, *own)) if one.at == at and (one.exact or not exact)]


def _rewrite(at: str, trace: Trace, lowering: Lowering, own: Sequence[Rule]) -> list[Trace]:
    rules = _rules(at, lowering, own)
    return apply_rules(trace, rules, lowering, counted=[one for one in rules if one.is_of_user])


def _of_captured(trace: Trace, lowering: Lowering, own: Sequence[Rule]) -> list[Trace]:
    return _rewrite(CAPTURED, trace, lowering, own)


def _of_joint(trace: Trace, lowering: Lowering, own: Sequence[Rule]) -> list[Trace]:
    return _rewrite(JOINT, trace, lowering, own)


def _of_halves(trace: Trace, lowering: Lowering, own: Sequence[Rule]) -> list[Trace]:
    return _rewrite(CUT, trace, lowering, own)


def _plans(trace: Trace, lowering: Lowering) -> bool:
    """Whether there is something to choose: with a budget, among what is fused, or of parameters that are gathered."""
    if not trace.info.backwards:
        return False
    return (
        bool(lowering.fusers) or lowering.options.get(MEMORY_BUDGET) < 1.0 or any(map(regathers, trace.bound_symbols))
    )


def _save_plan(trace: Trace, lowering: Lowering) -> Trace:
    keeps = lowering.keeps if lowering.fusers else None
    return save_plan(trace, lowering.options.get(MEMORY_BUDGET), lowering.fuses, keeps)


def _transform(trace: Trace, lowering: Lowering) -> list[Trace]:
    """The traces that the users' transforms of the finished program make, each checked."""
    traces = [trace]
    for t in lowering.options.transforms:
        if has_hook(t, "transform_trace_post_optimization"):
            with named(f"{type(t).__name__}.transform_trace_post_optimization"):
                start = time.perf_counter_ns()
                changed = t.transform_trace_post_optimization(traces[-1], executors_list=lowering.executors)
                if not isinstance(changed, (Trace, TraceBuilder)):
                    raise OptionError(f"it returned {type(changed).__name__}: return a trace")
                changed = headed(f"Transform {type(t).__name__}", changed, start)
                traces.append(check_change(traces[-1], changed) if is_outside(type(t)) else changed)
    return traces[1:]


def _communicates(trace: Trace, lowering: Lowering) -> bool:
    return trace.info.communicates and not lowering.plain


def _owns(lowering: Lowering) -> bool:
    return any(e.owns_results for e in lowering.fusers)


def _pads(lowering: Lowering) -> bool:
    return any(e.takes_padding for e in lowering.fusers) and not _is_exact(lowering)


def _is_exact(lowering: Lowering) -> bool:
    return lowering.options.numerics is NUMERICS_OPTIONS.EAGER


PASSES = PassList((
    # the program as it was captured
    Pass("Dead Code Elimination", lambda trace, _: dce_of_captured(trace), needs=OPERATIONS,
         meaning="drop operations without effect whose results nobody uses"),
    Pass("Seed Random Operations", lambda trace, lowering: seed_random(trace, lowering.fusers), needs=OPERATIONS,
         when=lambda trace, lowering: bool(lowering.fusers) and lowering.options.rng is RNG_OPTIONS.FUSED,
         meaning="turn random operations into functions of a seed, which fuse"),
    Pass("Rules", _of_captured, needs=OPERATIONS, inside=True, rules=(),
         meaning="replace the operations that match a rule"),
    Pass("Share Gradients", lambda trace, _: share_gradients(trace), needs=OPERATIONS,
         when=lambda trace, lowering: lowering.differentiates and not _is_exact(lowering)
         and has_differentiated_gradients(trace),
         inside=True, meaning="compute equal gradients once, before they are differentiated themselves"),

    # forwards and backwards
    Pass("Grad transform pass",
         lambda trace, lowering: dce(joint_trace(trace, lowering.executors, _is_exact(lowering))),
         needs=OPERATIONS, gives=JOINT, when=lambda trace, lowering: lowering.differentiates,
         meaning="differentiate: the backward follows its forward"),
    Pass("Common Subexpression Elimination", lambda trace, lowering: share(trace, bool(lowering.fusers)),
         needs=(OPERATIONS, JOINT), meaning="compute equal expressions of a phase once"),
    Pass("Chained Products", lambda trace, lowering: chained_products(trace, lowering.fusers),
         needs=(OPERATIONS, JOINT), when=lambda _, lowering: any(f.chains_products for f in lowering.fusers),
         meaning="make one operation of attention that is written by hand, so that its scores are not stored"),
    Pass("Rules behind Derivatives", _of_joint, needs=(OPERATIONS, JOINT),
         rules=(DISTINCT_INDICES, *SEPARATE_BIASES, DECOMPOSE_REDUCTIONS),
         meaning="replace the operations of forward and backward that match a rule"),
    Pass("Save Plan", _save_plan, needs=JOINT, gives=PLAN, when=_plans,
         meaning="choose the values that backwards recompute or gather again, by a minimum cut and the peak of memory"),
    Pass("Recompute in Backward", lambda trace, _: _cleaned(recompute_in_backwards(trace)), needs=JOINT, ends=PLAN,
         meaning="copy the contents of checkpoints and the values that the save plan has chosen into backwards"),
    Pass("Unstack Saved", lambda trace, _: unstack_saved(trace), needs=(OPERATIONS, JOINT),
         when=lambda trace, _: trace.info.backwards > 0 and any(b.sym is ltorch.stack for b in trace.bound_symbols),
         meaning="let backwards read the parts of a saved stack as views of it"),
    Pass("Channels Last", channels_last, needs=OPERATIONS, when=has_images,
         meaning="let convolutions, and what is computed between them, lay out images with channels last"),
    Pass("Partition", lambda trace, _: partition(trace), needs=JOINT, gives=CUT, ends=JOINT,
         when=lambda trace, lowering: lowering.differentiates,
         meaning="cut the joint trace into a forward and a backward; the passes below see one after the other"),

    # the programs that run: of a forward, of a backward, or of a computation without derivatives
    Pass("Saved Collections", lambda trace, _: saved_collections(trace), needs=CUT,
         necessary="a transform may save values together, and backwards read them one by one",
         meaning="unpack collections of saved values that a transform of the forward has gathered"),
    Pass("Without Cotangents",
         lambda trace, _: without_cotangents(trace, trace.info.cut.cotangents, trace.info.missing), needs=CUT,
         when=lambda trace, _: bool(trace.info.missing),
         necessary="a loss need not depend on each output, and backwards get no cotangents for the others",
         meaning="drop gradients of outputs that have no cotangent in a call"),
    Pass("Communication Buckets", lambda trace, _: bucket(trace), needs=(OPERATIONS, CUT), when=_communicates,
         meaning="communicate parameters and gradients of one bucket together"),
    Pass("Rules of Programs", _of_halves, needs=(OPERATIONS, CUT),
         rules=(JOIN_PARTS, ACCUMULATE_PRODUCTS, MERGE_VIEWS, WIDE_PRODUCTS),
         meaning="replace the operations of one program that match a rule"),
    Pass("Transform for execution", lambda trace, lowering: dispatch(trace, lowering.executors),
         needs=(OPERATIONS, CUT), gives=FUSIBLE, ends=OPERATIONS,
         meaning="give each operation to the first executor that takes it"),
    Pass("Align Products", lambda trace, lowering: aligned_products(trace, lowering.fuses), needs=FUSIBLE,
         when=lambda _, lowering: _pads(lowering),
         meaning="pad rows of products of odd sizes, so that fast kernels run them"),
    Pass("Fusion", lambda trace, lowering: fuse(trace, lowering.fusers), needs=FUSIBLE,
         when=lambda trace, _: bool(trace.info.fusible),
         meaning="run regions of fusible operations as one, those on lists of tensors one by one"),
    Pass("Transform for operator executor execution",
         lambda trace, lowering: dispatch_left(trace, lowering.executors), needs=FUSIBLE,
         gives=(RUNS, UNDELETED), ends=FUSIBLE, when=lambda trace, _: bool(trace.info.fusible),
         meaning="give each operation outside of regions to the first executor that does not fuse"),
    Pass("Reinplace", lambda trace, _: reinplace(trace), needs=(RUNS, UNDELETED),
         when=lambda trace, lowering: bool(trace.info.written) and not lowering.plain,
         meaning="run the in-place operations of the program in place again"),
    Pass("Constants", lambda trace, lowering: keep_numbers(trace if lowering.plain else constants(trace)),
         needs=(RUNS, UNDELETED),
         meaning="compute values that depend on no argument once, and operands of kernels that are numbers"),
    Pass("Overlap Communication",
         lambda trace, lowering: overlap(trace, lowering.options.get(COMMUNICATION_BYTES_IN_FLIGHT)),
         needs=(RUNS, UNDELETED), when=_communicates,
         meaning="start collectives early and wait late"),
    Pass("Delete Last Used", lambda trace, _: del_last_used(trace), needs=(RUNS, UNDELETED), ends=UNDELETED,
         meaning="free values after their last use"),
    Pass("Transforms", _transform, needs=RUNS, when=lambda _, lowering: not lowering.plain,
         necessary="transforms= would not run",
         meaning="transforms= of thunder.jit, each under its own header"),
    Pass("Reuse Memory", lambda trace, lowering: reuse_memory(trace, _owns(lowering)), needs=RUNS,
         meaning="write results over inputs with a last use"),
))  # fmt: skip


def passes() -> PassList:
    """Returns the list of passes that `thunder.jit` runs, in order. Prints as a table."""
    return PASSES


def own_pass(name: str) -> Pass | None:
    """The pass of thunder's own that has this name."""
    return next((p for p in PASSES if p.name == name), None)


def own_rule(name: str) -> Rule | None:
    """The rule of thunder's own that has this name."""
    return next((one for p in PASSES for one in p.rules or () if one.name == name), None)


FINDERS.update({Pass: own_pass, Rule: own_rule})


# ---------------------------------------------------------------------------------------------- running the list


def asked_for(program: Trace, options: JitOptions) -> JitOptions:
    """The options without executors that take nothing of a program because of the devices that its tensors are on."""
    if all(type(e).runs_on is Executor.runs_on for e in options.executors):
        return options
    values = itertools.chain(program.args, (o for b in program.bound_symbols for o in b.outputs))
    kinds = {x.device.type for x in values if isinstance(x, TensorProxy)}
    return dataclasses.replace(options, executors=tuple(e for e in options.executors if e.runs_on(kinds)))


def _run(trace: Trace, steps: Sequence[Pass], lowering: Lowering) -> list[Trace]:
    """The trace, and those that the passes make, each of the one before."""
    traces = [trace]
    for step in steps:
        changed = step.traces(traces[-1], lowering)
        if lowering.options.debug.check_traces:
            for one in changed:
                check(one)
        traces += changed
    return traces


def lower(acquired: Trace, options: JitOptions, executors: Sequence) -> list[Trace]:
    """All traces of a computation in the order they were made, the one that runs last."""
    lowering = Lowering(options, tuple(executors))
    return _expected(_run(acquired, options.passes, lowering), lowering)


def lower_with_derivatives(
    acquired: Trace, options: JitOptions, executors: Sequence
) -> tuple[list[Trace], list[Trace], ForwardBackward]:
    """All traces of a computation whose result requires grad: those of its forward, those of its backward, and how the
    two belong together."""
    steps, lowering = options.passes, Lowering(options, tuple(executors), differentiates=True)
    behind_cut = steps.giving(CUT) + 1
    joint = _run(acquired, steps[:behind_cut], lowering)
    forward = joint[:-1] + _expected(_run(joint[-1], steps[behind_cut:], lowering), lowering)
    cut = joint[-1].info.cut
    assert cut is not None, "the pass that gives the cut makes one"
    of_forward = forward[-1].info
    info = cut.backward.info.replace(
        cut=cut, saved_as=forward[-1].output[1], padded=of_forward.padded, disposable=of_forward.disposable
    )
    start = cut.backward.replace(provenance=joint[-1].provenance, info=info)
    backward = _expected(_run(start, steps[behind_cut:], lowering), lowering)
    cut = next((t.info.cut for t in reversed(backward) if t.info.cut is not None), cut)
    return forward, backward, cut


def _expected(traces: list[Trace], lowering: Lowering) -> list[Trace]:
    """The traces, of whose last one the executors are told."""
    for executor in lowering.executors:
        executor.expect(traces[-1])
    return traces


def lower_backward_without(
    cut: ForwardBackward, missing: Sequence[int], options: JitOptions, executors: Sequence
) -> list[Trace]:
    """All traces of the backward for the case that no cotangents come for some outputs: `missing` are their places
    among those that require grad."""
    lowering = Lowering(options, tuple(executors))
    return _expected(_run_again(cut, missing, lowering), lowering)


def lower_two_backwards(
    cut: ForwardBackward, later: Sequence[int], options: JitOptions, executors: Sequence
) -> tuple[Trace, Trace, int] | None:
    """The backward of the gradients that are not at the places `later`, that of the others, and how many values the
    second takes of the first (see `two_backwards`); None where it is not done in two."""
    halves = two_backwards(cut, later)
    if halves is None:
        return None
    lowering = Lowering(options, tuple(executors))
    first, second = (_expected(_run_again(one, (), lowering), lowering)[-1] for one in halves[:2])
    return first, second, halves[2]


def lower_accumulating(
    cut: ForwardBackward, into: Sequence[int], later: Sequence[int], options: JitOptions, executors: Sequence
) -> tuple[Trace, list[int]] | None:
    """The backward that adds gradients to tensors that it takes behind everything else, and the places, among `into`,
    where it does (see `accumulating`). later: the backward is the second of two, that of the gradients at these places;
    none: the whole. None where it is not done in two."""
    if later:
        halves = two_backwards(cut, later)
        if halves is None:
            return None
        cut = halves[1]
    cut, places = accumulating(cut, into)
    lowering = Lowering(options, tuple(executors))
    return _expected(_run_again(cut, (), lowering), lowering)[-1], places


def lower_backward_for_batches(cut: ForwardBackward, missing: Sequence[int], options: JitOptions) -> list[Trace]:
    """All traces of the backward for cotangents that vmap has made batches of (`is_grads_batched=True`): PyTorch's own
    operations know them, kernels do not."""
    return _run_again(cut, missing, Lowering(options, tuple(get_always_executors()), plain=True))


def _run_again(cut: ForwardBackward, missing: Sequence[int], lowering: Lowering) -> list[Trace]:
    """The passes behind the cut, for a backward that is not given some cotangents: for the numbers of another call."""
    backward, steps = cut.backward, lowering.options.passes
    info = backward.info.replace(cut=cut, missing=frozenset(cut.cotangents[i] for i in missing))
    copied = backward.replace(bound_symbols=[b.copied() for b in backward.bound_symbols], info=info)
    return _run(copied, steps[steps.giving(CUT) + 1 :], lowering)
