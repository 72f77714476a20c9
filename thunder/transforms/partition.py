"""Partition: cut a joint trace into a forward and a backward. Values of the forward that the backward uses are
saved."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Sequence
from typing import NamedTuple

from thunder.analysis.aliases import alias_bases
from thunder.analysis.flow import live_ins, positions
from thunder.core.codegen import Printer
from thunder.core.proxies import (
    AnyProxy,
    CollectionProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
    UnbackedNumber,
    numbers_in,
    proxies_in,
)
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol, Context, OpTags, Symbol, carries_out, primitive
from thunder.core.trace import ForwardBackward, Trace, TraceTag
from thunder.extend import FusionExecutor
from thunder.ops import ltorch
from thunder.ops.functionalize.inplace import also_written, write_back, written_after
from thunder.ops.rules import derivatives, effects
from thunder.transforms.autodiff import grad_transform_on_trace
from thunder.transforms.dce import dce
from thunder.transforms.phases import phases
from thunder.transforms.recompute import recompute


def partition(joint: Trace) -> Trace:
    """The forward of a joint trace, which saves the values that the backward uses, and the backward in `info.cut`.

    Before: `t0 = sin(x)`, `t1 = get_grad(t0)`, `t2 = cos(x)`, `t3 = mul(t1, t2)`. After: `t0 = sin(x)`, `return (t0),
    ((x), ())`; and `x = C0`, `t1 = cotangents`, `t2 = cos(x)`, `t3 = mul(t1, t2)`, `return (t3)`.
    """
    forward_operations, starts, backward_operations, _, _ = phases(joint)
    gradients, returned = joint.output["output"], joint.output["fw_flat_out"]
    cotangents = [b.output for b in starts]
    backward_operations = leading_to(backward_operations, gradients, has_effect)
    refused = without_overwritten(forward_operations, backward_operations, joint.info.copies)
    if refused is not None:
        backward_operations = leading_to(refused, gradients, has_effect)
    copies = _copies_of_written(joint, forward_operations, backward_operations, gradients)
    if copies:
        forward_operations = [*forward_operations, *copies.values()]
        table = {value: copy.output for value, copy in copies.items()}
        backward_operations = [b.swap(table) for b in backward_operations]
        gradients = tuple(table.get(g, g) for g in gradients)
    backward_operations, gradients = _in_memory_of_their_own(joint, backward_operations, gradients)
    cotangent_set = set(cotangents)
    saved = [p for p in live_ins(backward_operations, gradients) if p not in cotangent_set]
    tensors = [p for p in saved if isinstance(p, TensorProxy)]
    arguments = set(a for a in joint.args if isinstance(a, Proxy))
    others = [p for p in saved if not isinstance(p, TensorProxy)] + _numbers(joint, backward_operations)
    outputs = [
        o
        for o in dict.fromkeys(proxies_in(returned, []))
        if isinstance(o, (TensorProxy, UnbackedNumber, AnyProxy)) and o not in arguments
    ]
    info = joint.info.replace(backwards=joint.info.backwards - 1, recomputed={})
    forward = joint.replace(
        name="augmented_forward_fn",
        bound_symbols=forward_operations,
        output=(tuple(outputs), (tuple(tensors), tuple(others))),
        tags={TraceTag.AUGMENTED_FORWARD},
        info=info,
    )
    backward = _backward_trace(forward, backward_operations, tensors, others, cotangents, gradients)
    cut = ForwardBackward(forward, backward, outputs, cotangents, tensors, others, returned)
    return forward.replace(info=info.replace(cut=cut))


def _in_memory_of_their_own(joint: Trace, backward: Sequence[BoundSymbol], gradients: Sequence) -> tuple[list, tuple]:
    """The backward with copies of gradients that would show the memory of another gradient: autograd adds to gradients
    in place."""
    producer = {o: backward[i] for o, i in positions(backward).items()}
    bases = alias_bases(backward, maybe=True)
    groups: dict[Proxy, list[Proxy]] = {}
    for g in dict.fromkeys(g for g in gradients if isinstance(g, Proxy)):
        groups.setdefault(bases[g], []).append(g)
    shared = []
    for base, members in groups.items():
        shown = [_shown(g, base, producer, bases) for g in members]
        for i, g in enumerate(members):
            if g is not base and any(
                not _are_apart(shown[i], shown[j]) for j in range(len(members)) if j < i or members[j] is base
            ):
                shared.append(g)
    if not shared:
        return list(backward), tuple(gradients)
    context = Context(joint.names, grad_enabled=False)
    copies = {g: g.replace(name=joint.names.make(), requires_grad=False) for g in shared}
    operations = [ltorch.clone.bind(g, output=copy, context=context) for g, copy in copies.items()]
    return [*backward, *operations], tuple(copies.get(g, g) if isinstance(g, Proxy) else g for g in gradients)


def _shown(value: Proxy, base: Proxy, producer: dict[Proxy, BoundSymbol], bases) -> tuple[BoundSymbol, int] | None:
    """The operation that views a part of a value's base first, and which of its results; None for the base itself."""
    shown = None
    while value is not base:
        operation = producer[value]
        shown = operation, next(i for i, o in enumerate(operation.outputs) if o is value)
        value = next(i for i in operation.inputs if isinstance(i, TensorProxy) and bases[i] is base)
    return shown


def _are_apart(one: tuple[BoundSymbol, int] | None, other: tuple[BoundSymbol, int] | None) -> bool:
    """Whether two parts of a base share no element: different results of one operation, or ranges of one dimension."""
    if one is None or other is None:
        return False
    (a, i), (b, j) = one, other
    if a is b:
        return i != j
    if not a.sym is b.sym is ltorch.narrow or a.args[0] is not b.args[0] or a.args[1] != b.args[1]:
        return False
    (start, size), (first, count) = a.args[2:4], b.args[2:4]
    if any(type(n) is not int or n < 0 for n in (start, size, first, count)):
        return False
    return start + size <= first or first + count <= start


def _copies_of_written(
    joint: Trace, forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol], gradients: Sequence
) -> dict[Proxy, BoundSymbol]:
    """By value that the backward reads and that shares memory with an argument which the epilogue writes to: the copy
    that is saved in its place."""
    targets = {b.args[0] for b in forward if b.sym is written_after}
    if not targets:
        return {}
    bases = alias_bases(forward, maybe=True, copies=joint.info.copies)
    known = {a for a in joint.args if isinstance(a, Proxy)}.union(*(b.outputs for b in forward))
    read = dict.fromkeys(p for b in backward for p in b.inputs) | dict.fromkeys(
        g for g in gradients if isinstance(g, Proxy)
    )
    context = Context(joint.names, grad_enabled=False)
    return {
        p: ltorch.clone.bind(p, output=p.replace(name=joint.names.make(), requires_grad=False), context=context)
        for p in read
        if p in known and bases[p] in targets
    }


def saved_collections(backward: Trace) -> Trace:
    """The backward that unpacks the collections in which a transform of the forward has gathered saved values.

    Before: the forward returned `(y), ((t0, t1, x), ())`. After: it returns `(y), ((x,), (results0,))`, and the
    backward begins with `t0, t1 = results0`.
    """
    cut, (tensors, others) = backward.info.cut, backward.info.saved_as
    if not any(isinstance(c, CollectionProxy) for c in others):
        return backward
    assert cut is not None, "a backward knows its cut"
    collections = [c for c in others if isinstance(c, CollectionProxy)]
    ours = {p.name: p for p in cut.saved_tensors}
    tensors, gathered = (
        [ours[p.name] for p in tensors],
        [CollectionProxy([ours[p.name] for p in c.collection], c.name) for c in collections],
    )
    others = [*cut.saved_others, *gathered]
    operations = [
        operation for operation in backward.bound_symbols if operation.sym not in (unpack_sequence, clear_symbol)
    ]
    backward = backward.replace(info=backward.info.replace(saved_as=((), ())))
    unpacked = _backward_trace(backward, operations, tensors, others, cut.cotangents, backward.output)
    cut = dataclasses.replace(cut, backward=unpacked, saved_tensors=tensors, saved_others=others)
    return unpacked.replace(info=unpacked.info.replace(cut=cut))


def views_of_outputs(forward: Trace) -> list[int]:
    """Places of the saved tensors that may be views of outputs. forward: the trace that runs.

    Results of a region may be views of each other; results of an opaque operation may be views of its inputs too.
    """
    outputs, (saved, _) = forward.output
    bases = alias_bases(forward.bound_symbols, maybe=True)
    joined: dict[str, str] = {}

    def base(value: Proxy) -> str:
        name = bases[value].name
        while name in joined:
            name = joined[name]
        return name

    for operation in forward.bound_symbols:
        if OpTags.OPAQUE in operation.sym.tags or operation.sym.is_fusion:
            names = list(
                dict.fromkeys(
                    map(base, operation.outputs if operation.sym.is_fusion else (*operation.outputs, *operation.inputs))
                )
            )
            joined |= {name: names[0] for name in names[1:]}
    returned = set(map(base, outputs))
    return [i for i, p in enumerate(saved) if base(p) in returned]


def read_by_products(cut: ForwardBackward, executors: Sequence) -> list[int]:
    """Places of the cotangents with several matrix products as consumers. Each product would copy a cotangent that is
    broadcast, as the gradient of a sum."""
    if not any(isinstance(e, FusionExecutor) for e in executors):  # what nobody fuses runs as in eager, bit for bit
        return []
    operations = cut.backward.bound_symbols
    bases = alias_bases(operations, maybe=True)
    reads = collections.Counter(
        base for b in operations if OpTags.MATMUL_OP in b.sym.tags for base in {bases[i] for i in b.inputs}
    )
    return [i for i, c in enumerate(cut.cotangents) if reads[c] > 1]


def without_overwritten(
    forward: Sequence[BoundSymbol], backward: Sequence[BoundSymbol], copies: Container[str] = ()
) -> list[BoundSymbol] | None:
    """The backward, with operations that raise PyTorch's error in the place of those that would read an argument after
    the forward wrote to it. Gradients that do not depend on them are still computed. None where there are no such
    operations. copies: names of possible views that are known to be copies."""
    rearranged: dict[Proxy, Proxy] = {}  # by the value of an argument under its new shape, the argument
    for b in forward:
        if effects.changes_metadata.of(b.sym):
            rearranged[b.output] = rearranged.get(b.args[0], b.args[0])
    targets = {rearranged.get(b.args[0], b.args[0]) for b in forward if b.sym in (write_back, also_written)}
    if not targets and not rearranged:
        return None
    reshaped = set(rearranged.values())
    bases = alias_bases(forward, maybe=True, copies=copies)
    refused: dict[BoundSymbol, BoundSymbol] = {}
    for b in backward:
        unread = derivatives.statistics.of(b.sym)  # positions of arguments that gradients do not depend on
        written = {
            value: bases[value]
            for value in b.inputs
            if (bases[value] in targets or value in reshaped) and not any(b.args[i] is value for i in unread)
        }
        if written:
            name = next(iter(written.values())).name
            rest = [value for value in b.inputs if value not in written]
            refused[b] = modified_in_place.bind(name, *rest, output=b.output, context=b.context)
    return [refused.get(b, b) for b in backward] if refused else None


@primitive(lambda name, *inputs: None, tags=(OpTags.DONT_DCE,))
def modified_in_place(name: str, *inputs):
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {name}, "
        "which the compiled function writes to after it was used"
    )


def split_into_forward_and_backward(joint: Trace) -> tuple[Trace, Trace | None]:
    """The forward and the backward of a joint trace; None in the place of a backward where there is nothing to
    differentiate."""
    forward = partition(dce(joint))
    cut = forward.info.cut
    assert cut is not None, "partition cuts"
    return forward, cut.backward if any(g is not None for g in joint.output["output"]) else None


class ForwardBackwardTraces(NamedTuple):
    """A forward and its backward."""

    forward_trace: Trace
    backward_trace: Trace | None


def forward_and_backward_from_trace(trace: Trace, torch_autograd: bool = False) -> ForwardBackwardTraces:
    """The forward and backward traces of a computation trace. `torch_autograd` is accepted as in 2024 and changes
    nothing."""
    return ForwardBackwardTraces(*split_into_forward_and_backward(recompute(dce(grad_transform_on_trace(trace)))))


def has_effect(operation: BoundSymbol) -> bool:
    """Whether an operation of a backward is there for its effect: it has no result."""
    return not operation.outputs


def _numbers(joint: Trace, operations: list[BoundSymbol]) -> list[NumberProxy]:
    """The symbolic numbers that the prologue passes in and that sizes in `operations` depend on."""
    numbers = [a for a in joint.args if isinstance(a, NumberProxy)]
    if not numbers:
        return []
    symbols = set().union(*(n.expression.symbols() for n in numbers_in([(b.args, b.kwargs) for b in operations], [])))
    return [n for n in numbers if n.name in symbols]


def _print_unpack(operation: BoundSymbol, printer: Printer) -> list[str]:
    values, source = operation.args
    names = [v.name if isinstance(v, (Proxy, NumberProxy)) else "_" for v in values]
    return [f"{', '.join(names)}{',' * (len(names) == 1)} = {source.name}" if names else f"() = {source.name}"]


def _print_clear(operation: BoundSymbol, printer: Printer) -> list[str]:
    if not printer.memory:
        return []
    collection = operation.args[0]
    # a collection that a transform has gathered outlives the call: with retain_graph=True it is read again
    if collection.collection:
        return [f"del {collection.name}"]
    clear = printer.named("clear_collection", clear_collection)
    return [f"{clear}({collection.name})", f"del {collection.name}"]


@carries_out
def clear_collection(collection: list) -> None:
    """Empties the list of saved values, so that each is freed after its last use."""
    collection.clear()


# no dead code where nothing reads the names: sizes in kernels do, and a collection keeps what it is not emptied of
unpack_sequence = Symbol(
    "unpack_sequence", module="prims", is_prim=True, python_printer=_print_unpack, tags=(OpTags.DONT_DCE,)
)
clear_symbol = Symbol(
    "clear_collection", module="prims", is_prim=True, python_printer=_print_clear, tags=(OpTags.DONT_DCE,)
)


def read_of_saved(backward: Trace) -> set[int]:
    """Places of the saved tensors that an operation of a backward reads."""
    read = {i for b in backward.bound_symbols if b.sym.python_printer is None for i in b.inputs}
    read |= set(proxies_in(backward.output, []))
    head = [b for b in backward.bound_symbols if b.sym is unpack_sequence]
    ((collections, _),) = [b.args for b in head if b.args[1] is backward.args[0]]
    tensors = next((b.args[0] for b in head if b.args[1] is collections[0]), ())
    return {i for i, p in enumerate(tensors) if p in read}


def unpack(values, source: CollectionProxy) -> list[BoundSymbol]:
    """The operations that name the values of a list, and empty it, so that each is freed at its last use."""
    outputs = tuple(v for v in values if isinstance(v, Proxy))
    return [
        BoundSymbol(unpack_sequence, (tuple(values), source), {}, None, inputs=(source,), outputs=outputs),
        BoundSymbol(clear_symbol, (source,), {}, None, inputs=(source,), outputs=()),
    ]


def _backward_trace(
    trace: Trace, operations: list[BoundSymbol], tensors: list, others: list, cotangents: list, gradients: tuple
) -> Trace:
    """The trace of a backward, which begins by unpacking saved values and cotangents."""
    saved, cotangent_list = CollectionProxy((), "saved_for_backward"), CollectionProxy((), "cotangents")
    c0, c1 = CollectionProxy((), "C0"), CollectionProxy((), "C1")
    head = unpack((c0 if tensors else None, c1 if others else None), saved)
    head += unpack(cotangents, cotangent_list)
    head += unpack(tensors, c0) if tensors else []
    head += unpack(others, c1) if others else []
    for collection in others:
        if isinstance(collection, CollectionProxy):
            head += unpack(collection.collection, collection)
    return trace.replace(
        name="backward_fn",
        args=(saved, cotangent_list),
        bound_symbols=[*head, *operations],
        output=gradients,
        tags={TraceTag.BACKWARD},
    )
