"""The connection to PyTorch's autograd: a compiled forward and its backward as one `torch.autograd.Function`.

A backward that is itself differentiated (`create_graph=True`) is another program: it recomputes the forward, computes
the gradients from the inputs, and is connected to autograd in the same way. So derivatives of any order are programs,
which are compiled at their first use.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.core.symbolic import Decisions, hold
from thunder.core.utils import compiling
from thunder.errors import FallbackWarning, warn_user
from thunder.ops.families.random import generator_of
from thunder.ops.wanted import backward_of
from thunder.runtime.saved import SavedTogether

ACCUMULATED = 16 << 20  # bytes of gradients from which on they are added where they are computed


class ThunderFunction(torch.autograd.Function):
    """Connects the results of a compiled forward to autograd; its backward is the compiled backward. Printed as
    ThunderFunctionBackward.

    The forward runs before `apply`, which inspects each input on the host while the device computes.
    """

    @staticmethod
    def forward(ctx, outcome, *inputs):
        outputs, tensors, ctx.call = outcome
        ctx.materialize_grads = False
        if tensors:
            ctx.save_for_backward(*tensors)
        if places := ctx.call[0].not_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in places))
        return outputs

    @staticmethod
    def backward(ctx, *cotangents):
        """Runs the program's backward on the saved values and the cotangents."""
        left: _Left | None = getattr(ctx, "left", None)
        tensors = ctx.saved_tensors if left is None or left.saved is None else left.saved
        program, others, inputs, versions, numbers, generators, joins, hooked, wholes = ctx.call
        for whole, version in wholes:
            _check_version(whole, version, whole._version)
        if program.derived:
            for result, index, sharing in getattr(ctx, "watched", ()):  # not by a transform of torch.func's
                _check_unobserved(result(), index, any(cotangents[i] is not None for i in sharing))
        others = list(others)
        for index, begin, join in reversed(joins):
            others[index], tensors = join(tensors[begin:]), tensors[:begin]
        ctx.maybe_clear_saved_tensors()
        frees = left is None and hasattr(ctx, "in_two") and not compat.keeps_graph()
        if not compat.keeps_graph() and not frees:
            ctx.call = None
        own_cotangents = [cotangents[i] for i in program.differentiable]
        del cotangents
        missing = tuple([i for i, c in enumerate(own_cotangents) if c is None])
        run, own_cotangents = _chosen(ctx, program, left, tensors if frees else None, own_cotangents, missing, numbers)
        if run is None:  # a program from disk has no backward for each case
            values = program.values(tensors, inputs, versions, numbers)
            return (None, *_differentiable_gradients(program, values, numbers, generators, own_cotangents, missing))
        for i in program.dense:
            own_cotangents[i] = _written_out(own_cotangents[i])
        saved = [list(tensors), others]
        del tensors, others, inputs
        with (
            compat.saved_by_hooks() if hooked else contextlib.nullcontext(),
            backward_of(ctx, program.tensors) if program.tensors else contextlib.nullcontext(),
        ):
            gradients = run(saved, own_cotangents)
        program.check_order()
        return (None, *gradients)


def _chosen(
    ctx, program: _Program, left: _Left | None, freed: Sequence | None, cotangents: list, missing: tuple,
    numbers: Sequence,
) -> tuple[Callable | None, list]:  # fmt: skip
    """The backward for these cotangents, and what it takes as cotangents. freed: see `_parts`."""
    run, later = _whole(program, cotangents, missing, numbers), ()
    if run is None:
        return run, cotangents
    is_usual = run is program.backward
    if freed is not None or left is not None or is_usual and program.make_parts and compat.keeps_graph():
        run, cotangents, later = _parts(ctx, program, run, freed, cotangents, numbers)
    if (run is program.backward or later) and program.accumulates():
        return _accumulating(ctx, program, run, cotangents, later, numbers)
    return run, cotangents


def _whole(program: _Program, cotangents: list, missing: tuple, numbers: Sequence) -> Callable | None:
    """The backward of all gradients for these cotangents; None for one that can be differentiated."""
    if torch.is_grad_enabled():
        return None
    batches = compat.in_forward_mode() or any(map(compat.is_batch, cotangents))
    if torch.is_anomaly_enabled() and program.make_watched and not batches:
        return program.once("watched", program.make_watched, missing, numbers)
    make = program.batched if batches else program.without
    return make(missing, numbers) if batches or missing else program.backward


def backward_in_two(node: Any) -> bool:
    """Tells the node of a compiled program that its next backward is for some of its inputs, and that one other follows
    for the rest, of the same cotangents. The first frees what is saved for it alone, as if the graph were not read
    again. False for another node, and where hooks see what is saved."""
    if getattr(node, "_forward_cls", None) is not ThunderFunction or node.call[7]:
        return False
    node.in_two = True
    return True


class _Left:
    """What a backward for some of the inputs left to do. later: places of the others. cotangents: of the call, with
    their versions. second: the program of the others. handed: what that takes of the first. saved: what it reads of
    what was saved, None elsewhere; None where autograd keeps what was saved."""

    __slots__ = ("later", "cotangents", "second", "handed", "saved")

    def __init__(self, later: set[int], cotangents: list, second: Callable, saved: list | None):
        self.later, self.second, self.handed, self.saved = later, second, (), saved
        self.cotangents = [(c, None if c is None else c._version) for c in cotangents]

    def goes_on(self, wanted: set[int], cotangents: list) -> bool:
        """Whether a backward is the rest of this one."""
        pairs = zip(self.cotangents, cotangents, strict=True)
        return wanted <= self.later and all(c is known and (c is None or c._version == v) for (known, v), c in pairs)


def _parts(
    ctx, program: _Program, run: Callable, freed: Sequence | None, own_cotangents: list, numbers: Sequence
) -> tuple[Callable, list, tuple[int, ...]]:
    """The program, and its cotangents, of a backward that autograd may want some gradients of and others later; and of
    which places, where it is the second of two. run: the program of all gradients. freed: the saved tensors, where the
    second has only what the first leaves."""
    edges = _edges(ctx, program)
    wanted = {i for i, edge in edges.items() if edge[0] is not None and compat.will_run(edge)}
    later = {i for i, edge in edges.items() if edge[0] is not None} - wanted
    left: _Left | None = getattr(ctx, "left", None)
    if left is not None:
        del ctx.left
        if left.goes_on(wanted, own_cotangents):
            return left.second, [*own_cotangents, *left.handed], tuple(sorted(left.later)) if left.handed else ()
        if left.saved is not None:
            raise RuntimeError(
                "the backward of a pipeline's stage for the gradients of parameters has other cotangents than the one "
                "for those of inputs, which has freed what was saved"
            )
    if not wanted or not later:
        return run, own_cotangents, ()
    parts = None
    if run is program.backward and program.make_parts is not None:
        parts = program.once("parts", program.make_parts, tuple(sorted(later)), numbers)
    if parts is None:
        return (run if freed is None else _all_now(ctx, run, wanted, later, own_cotangents)), own_cotangents, ()
    first, second, count, read = parts
    saved = None if freed is None else [x if i in read else None for i, x in enumerate(freed)]
    left = ctx.left = _Left(later, own_cotangents, second, saved)

    def run_first(saved: list, cotangents: list) -> tuple:
        gradients = first(saved, cotangents)
        end = len(gradients) - count
        left.handed = gradients[end:]
        return gradients[:end]

    return run_first, own_cotangents, ()


def _all_now(ctx, run: Callable, wanted: set[int], later: set[int], cotangents: list) -> Callable:
    """The backward of all gradients, which gives those that are for later then."""
    left = ctx.left = _Left(later, cotangents, run, [])

    def run_all(saved: list, cotangents: list) -> tuple:
        gradients = run(saved, cotangents)
        rest = tuple(g if i in later else None for i, g in enumerate(gradients))
        left.second = lambda saved, cotangents: rest
        return tuple(g if i in wanted else None for i, g in enumerate(gradients))

    return run_all


def _edges(ctx, program: _Program) -> dict[int, tuple]:
    """The edges of a node of autograd's graph, by the places of the inputs."""
    assert program.places is not None, "the forward has run"
    return dict(zip(program.places, ctx.next_functions, strict=True))


def _accumulating(
    ctx, program: _Program, run: Callable, cotangents: list, later: tuple[int, ...], numbers: Sequence
) -> tuple[Callable, list]:
    """The program, and its cotangents, of a backward that adds its gradients to those that are there, where autograd
    would do that. later: as of `_parts`."""
    held = {i: x for i, edge in _edges(ctx, program).items() if (x := compat.accumulated_in_place(edge)) is not None}
    if not held:
        return run, cotangents
    assert program.make_accumulating is not None, "it accumulates"
    program_and_places = program.once("accumulating", program.make_accumulating, (tuple(held), later), numbers)
    if program_and_places is None:
        return run, cotangents
    run, places = program_and_places
    return run, [*cotangents, *(held[i] for i in places)]


def _check_unobserved(result: torch.Tensor | None, index: int, has_others: bool) -> None:
    """Raise where the gradient of a result is looked at, and other results that are computed from it have cotangents:
    results of one call have one node, so that it would lack what these add to it."""
    if has_others and result is not None and (result.retains_grad or result._backward_hooks):
        raise RuntimeError(
            f"retain_grad() or a hook on result {index} of a compiled function, of shape {list(result.shape)}: other "
            "results of the same call are computed from it, and their share of its gradient is not known outside of "
            "the function. Call retain_grad() or register_hook() inside of the function"
        )


def _apart(tensors: Sequence, others: Sequence) -> tuple[list, list, list[tuple]]:
    """The tensors with those of saved collections among them, and for each collection (its place, the place of its
    first tensor, the function that joins its tensors again)."""
    tensors, others, joins = list(tensors), list(others), list[tuple]()
    for index, value in enumerate(others):
        if isinstance(value, SavedTogether):
            joins.append((index, len(tensors), value.joining()))
            tensors += value
            others[index] = None
    return tensors, others, joins


def _differentiable_gradients(
    program: _Program, values: dict, numbers: Sequence, generators: Sequence, cotangents: list, missing: tuple
) -> tuple:
    """The gradients, connected to autograd: to the inputs and to the cotangents. values: the inputs, by place."""
    if program.random is None:
        raise RuntimeError(
            'the backward of a compiled function that draws from a torch.Generator of yours, or with rng="fused", is '
            "differentiated: it would have to draw the same numbers "
            "again. Draw them outside of the compiled function, or from the default generator"
        )
    run, needed = program.again(missing, numbers)
    with _restored(program.random, generators):
        return run(*(values[i] for i in needed), *(c for c in cotangents if c is not None))


def _written_out(cotangent: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor with memory for each element, where it is broadcast."""
    if cotangent is None:
        return None
    broadcast = cotangent.layout is torch.strided and 0 in cotangent.stride()
    return cotangent.contiguous() if broadcast else cotangent


def _check_version(x: torch.Tensor, version: int, now: int) -> None:
    """Raises where an input that a backward needs was written to since the forward."""
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {list(x.shape)}], an input of a compiled function, is at version {now}; expected version "
            f"{version} instead."
        )


def _versions(tensors: Sequence) -> list[int]:
    """The version counters of tensors; tensors of inference mode have none."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in tensors]


def _taking(places: Sequence[int]) -> Callable[[tuple], tuple] | None:
    """(values) -> the values in some places, as a tuple; None where there are none."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return (lambda values: (values[places[0]],)) if places else None


@contextlib.contextmanager
def _restored(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Sets the generators to their states at the forward inside the block, and back afterwards."""
    generators = [generator_of(d) for d in devices]
    before = [g.get_state() for g in generators]
    for g, state in zip(generators, states, strict=True):
        g.set_state(state)
    try:
        yield
    finally:
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)


class _Program:
    """The state that the calls of one compiled forward share."""

    __slots__ = (
        "backward", "make_without", "make_batched", "make_again", "make_watched", "later_programs", "lock",
        "differentiable",
        "not_differentiable", "inputs", "random", "dense", "derived",
        "decisions", "names", "tensors", "local", "make_parts", "make_accumulating", "places", "leaves", "order",
    )  # fmt: skip

    def __init__(
        self, backward: Callable, make_without: Callable, make_batched: Callable, make_again: Callable,
        requires_grad: list[bool | None], inputs: Sequence,
        random: Sequence | None, dense: Sequence[int], derived: Sequence[Sequence[int]], decisions: Decisions,
        names: Sequence[str], tensors: Sequence[str], make_watched: Callable | None, make_parts: Callable | None,
        make_accumulating: Callable | None,
    ):  # fmt: skip
        self.backward, self.make_without, self.make_batched, self.make_again = (
            backward,
            make_without,
            make_batched,
            make_again,
        )
        self.decisions, self.names, self.tensors, self.make_watched = decisions, names, tensors, make_watched
        # places of saved inputs that are local tensors of DTensors; known at the first call
        self.local: list[int] | None = None
        self.make_parts, self.make_accumulating = make_parts, make_accumulating
        self.places: list[int] | None = None  # of the inputs that are tensors; known at the first call
        # weak references to the leaves of the first call; the order of their gradients, where hooks see it
        self.leaves: list[weakref.ref] = []
        self.order: Sequence[int] | None = None
        self.later_programs: dict[tuple, list] = {}  # later programs, with the relations of each
        self.lock = threading.Lock()
        self.differentiable = [i for i, r in enumerate(requires_grad) if r]
        self.not_differentiable = [i for i, r in enumerate(requires_grad) if r is False]
        self.inputs, self.random, self.dense = inputs, random, dense
        self.derived = [(i, others) for i, others in enumerate(derived) if others]

    def meet(self, inputs: Sequence, order: Callable[[], Sequence[int] | None]) -> None:
        """Notes the inputs of the first call."""
        self.places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        self.leaves = [weakref.ref(x) for i in self.places if (x := inputs[i]).requires_grad and x.is_leaf]
        if self._are_observed():
            self.order = order()

    def accumulates(self) -> bool:
        """Whether a backward may meet large gradients that it adds to: the last one of the leaves that are there has
        one. Parameters come behind the other inputs."""
        if self.make_accumulating is None or self.order:
            return False
        last = next((x for leaf in reversed(self.leaves) if (x := leaf()) is not None), None)
        if last is None or last.grad is None:
            return False
        return sum(x.nbytes for leaf in self.leaves if (x := leaf()) is not None) >= ACCUMULATED

    def _are_observed(self) -> bool:
        """Whether hooks see the order in which gradients are accumulated."""
        leaves = [x for leaf in self.leaves if (x := leaf()) is not None and x._post_accumulate_grad_hooks]
        return len(leaves) > 1

    def check_order(self) -> None:
        """At the end of a backward: warns where hooks that the first call has not met are called in another order."""
        if self.order is None and self._are_observed():
            self.order = ()
            warn_user(
                "hooks behind the accumulation of gradients (register_post_accumulate_grad_hook) run in another order "
                "than eager PyTorch's: they were registered after the first call of a compiled function, or its "
                "program comes from disk. Register them before the first call",
                FallbackWarning,
            )

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Tell the node of the results which of them it must find unobserved."""
        node: Any = outputs[self.derived[0][0]].grad_fn
        if getattr(node, "_forward_cls", None) is ThunderFunction:  # not one of a transform of torch.func's
            node.watched = [(weakref.ref(outputs[i]), i, others) for i, others in self.derived]

    def values(self, tensors: Sequence, inputs: Sequence, versions: Sequence[int], numbers: Sequence) -> dict:
        """The inputs of a call that its backward is recomputed from, by place. Raises where one was written to."""
        for x, version, now in zip(inputs, versions, _versions(inputs), strict=True):
            _check_version(x, version, now)
        kept_at, saved_at, numbers_at = self.inputs
        return (
            dict(zip(kept_at, inputs, strict=True))
            | dict(zip(numbers_at, numbers, strict=True))
            | {i: tensors[index] for i, index in saved_at}
        )

    def once(self, kind: str, make: Callable, missing: tuple, numbers: Sequence):
        """`make(missing)` for a call with these numbers, called at the first use in any thread of autograd."""
        values = dict(zip(self.names, numbers, strict=True))
        with self.lock:
            known = self.later_programs.setdefault((kind, missing), [])
            for relations, function in known:
                if hold(relations, values):
                    return function
            with self.decisions.anew(values) as relations, compiling():
                function = make(missing)
            known.insert(0, (relations, function))
            return function

    def without(self, missing: tuple, numbers: Sequence) -> Callable | None:
        """The backward for outputs that play no part; None where `again` has to do."""
        return self.once("without", self.make_without, missing, numbers)

    def batched(self, missing: tuple, numbers: Sequence) -> Callable | None:
        """The backward for cotangents that are batches of vmap's, or have tangents; None where `again` has to do."""
        return self.once("batched", self.make_batched, missing, numbers)

    def again(self, missing: tuple, numbers: Sequence) -> tuple[Callable, list[int]]:
        """The backward as a function that can be differentiated."""
        return self.once("again", self.make_again, missing, numbers)


def connected(
    forward: Callable, backward: Callable, rebuild: Callable, requires_grad: list[bool | None], *,
        make_without: Callable, make_batched: Callable, make_again: Callable,
    inputs: Sequence, random: Sequence | None, dense: Sequence[int], derived: Sequence[Sequence[int]],
    decisions: Decisions, names: Sequence[str], tensors: Sequence[str], unreached: Sequence[int],
    own: Sequence[int], shown: Sequence[int], make_watched: Callable | None = None,
    make_parts: Callable | None = None, make_accumulating: Callable | None = None,
    order: Callable[[], Sequence[int] | None],
) -> Callable:  # fmt: skip
    """A function from the inputs of a program to its result, connected to autograd.

    forward(*inputs) returns (outputs, (saved tensors, other saved values)). backward(saved, cotangents)
    returns a gradient or None for each input. rebuild(inputs, outputs) returns the result of the program.
    requires_grad: by output, whether it has a cotangent.

    make_without(missing) compiles the backward that gets None for the cotangents at these places, make_batched(missing)
    the same for batches of cotangents. make_again(missing) compiles the backward as a differentiable function of some
    inputs and the cotangents that are not missing, and returns it with the places of these inputs. inputs: their
    sources: places of tensors to keep, pairs (place, place among the saved tensors), and places of other values.
    random: the devices whose generators the forward may draw from; None where it cannot be recomputed. dense: places of
    the cotangents that are materialized where they are broadcast. derived: by output, the places of outputs that are
    computed from it. decisions: those by symbolic numbers, to which later
    programs add; names: those of the inputs that are no tensors. order: gives places of inputs in the order in which
    eager's backward accumulates gradients, None where it is not known. unreached: places of inputs that autograd's
    graph does not lead to.
    """
    program = _Program(
        backward, make_without, make_batched, make_again, requires_grad, inputs, random, dense, derived, decisions,
        names, tensors, make_watched, make_parts, make_accumulating,
    )  # fmt: skip
    (transforming, apply), saved_hooks = compat.applying(ThunderFunction), compat.saved_hooks
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, compat.set_grad_enabled
    take_kept, take_numbers = _taking(inputs[0]), _taking(inputs[2])

    def run(*inputs):
        generators = [generator_of(d).get_state() for d in random] if random else ()
        before = is_grad_enabled()
        set_grad_enabled(False)
        try:
            outputs, (tensors, others) = forward(*inputs)
        finally:
            set_grad_enabled(before)
        if own:
            outputs = _without_bases(outputs, own)
        if shown:
            tensors = _without_bases(tensors, shown)
        hooked, joins = saved_hooks(False) is not None, ()
        if hooked:
            tensors, others, joins = _apart(tensors, others)
        saved_inputs = take_kept(inputs) if take_kept is not None else ()
        numbers = take_numbers(inputs) if take_numbers is not None else ()
        if program.local is None:
            program.local = [i for i, _ in program.inputs[1] if getattr(inputs[i], "local_of", None) is not None]
        # autograd counts the writes to a DTensor, not to its local tensor
        wholes = [(whole := inputs[i].local_of, whole._version) for i in program.local]  # type: ignore[union-attr]
        versions = saved_inputs and _versions(saved_inputs)
        call = program, others, saved_inputs, versions, numbers, generators, joins, hooked, wholes
        outcome = outputs, tensors, call
        linked = inputs
        if unreached:
            linked = [None if i in unreached else x for i, x in enumerate(inputs)]
        if program.places is None:
            program.meet(linked, order)
        if program.order:
            linked = _in_order(linked, program.order)
        outputs = ThunderFunction.apply(outcome, *linked) if transforming() else apply(outcome, *linked)
        if program.derived:
            program.watch(outputs)
        return rebuild(inputs, outputs)

    return run


def _in_order(inputs: Sequence, order: Sequence[int]) -> list:
    """Each input behind a node of autograd. Autograd runs the last node that was made first, and behind each of these
    the accumulation of a gradient."""
    linked = list(inputs)
    for i in reversed(order):
        if isinstance(linked[i], torch.Tensor):
            linked[i] = linked[i].view_as(linked[i])
    return linked


def _without_bases(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Sequence[torch.Tensor]:
    """The same memory, by tensors that are no views in these places."""
    for i in places:
        if tensors[i]._is_view():
            tensors = (*tensors[:i], tensors[i].detach(), *tensors[i + 1 :])
    return tensors


def when_called(make: Callable[[], Callable]) -> Callable:
    """The function that `make` returns, which is made at its first call."""
    function: list[Callable] = []

    def run(*inputs):
        if not function:
            function.append(make())
        return function[0](*inputs)

    return run


def without_grad(function: Callable) -> Callable:
    """The program under no_grad, set once for the call: its values never require grad, whatever its inputs do."""
    return _in_grad_mode(function, False)


def with_grad(function: Callable) -> Callable:
    """For a program that is called without grad and enables it itself."""
    return _in_grad_mode(function, True)


def _in_grad_mode(function: Callable, enabled: bool) -> Callable:
    """The function under a grad mode, whatever that of its call is."""
    is_grad_enabled, set_grad_enabled = torch.is_grad_enabled, compat.set_grad_enabled

    def run(*inputs):
        before = is_grad_enabled()
        set_grad_enabled(enabled)
        try:
            return function(*inputs)
        finally:
            set_grad_enabled(before)

    return run
