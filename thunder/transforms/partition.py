"""Partition: a joint trace, cut into the forward that runs now and the backward that runs later. What crosses the cut is saved."""

from __future__ import annotations

from thunder.core.codegen import Printer
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy, proxies_in
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace, TraceTag
from thunder.transforms.autodiff import JointTrace
from thunder.transforms.dce import dce
from thunder.transforms.reread import reread

__all__ = ["partition", "ForwardBackward"]


class ForwardBackward:
    """forward: returns (outputs, (saved tensors, saved others)). backward: `backward_fn(saved_for_backward, cotangents)`, one gradient or None an argument.

    outputs: the distinct tensors that the forward makes and the program returns, in order.
    """

    __slots__ = ("forward", "backward", "outputs", "saved_tensors", "saved_others", "returned")

    def __init__(self, forward: Trace, backward: Trace, outputs: list, saved_tensors: list, saved_others: list, returned):
        self.forward, self.backward, self.outputs = forward, backward, outputs
        self.saved_tensors, self.saved_others, self.returned = saved_tensors, saved_others, returned


def partition(joint: JointTrace) -> ForwardBackward:
    """Cuts a joint trace where the forward's results are complete."""
    trace = joint.trace
    program_args = trace.args[: len(trace.args) - len(joint.cotangents)]
    backward_lines = _needed(trace.bound_symbols[joint.backward_start :], [g for g in joint.gradients if g is not None])
    made = {o for b in backward_lines for o in b.outputs} | set(joint.cotangents)
    read = dict.fromkeys(i for b in backward_lines for i in b.inputs if i not in made)
    read |= dict.fromkeys(g for g in joint.gradients if isinstance(g, Proxy) and g not in made)
    tensors = [p for p in read if isinstance(p, TensorProxy)]
    others = [p for p in read if not isinstance(p, TensorProxy)]
    arguments = set(a for a in program_args if isinstance(a, Proxy))
    tensors, again = reread(trace.bound_symbols[: joint.backward_start], tensors, arguments)
    backward_lines = [*again, *backward_lines]
    outputs = [o for o in dict.fromkeys(proxies_in(joint.forward_output, [])) if isinstance(o, TensorProxy) and o not in arguments]
    forward = trace.replace(
        name="augmented_forward_fn", args=program_args, bound_symbols=trace.bound_symbols[: joint.backward_start],
        output=(tuple(outputs), (tuple(tensors), tuple(others))), tags={TraceTag.AUGMENTED_FORWARD},
    )  # fmt: skip
    backward = _backward_trace(trace, backward_lines, tensors, others, joint)
    return ForwardBackward(dce(forward), backward, outputs, tensors, others, joint.forward_output)


def _needed(lines, results) -> list[BoundSymbol]:
    needed, kept = set(results), []
    for b in reversed(lines):
        if not needed.isdisjoint(b.outputs):
            needed.update(b.inputs)
            kept.append(b)
    return kept[::-1]


def _print_unpack(line: BoundSymbol, printer: Printer) -> list[str]:
    values, source = line.args
    names = [v.name if isinstance(v, Proxy) else "_" for v in values]
    return [*(f"{n}, \\" for n in names), f"= {source.name}"] if names else [f"() = {source.name}"]


def _print_clear(line: BoundSymbol, printer: Printer) -> list[str]:
    printer.context["clear_collection"] = clear_collection
    return [f"clear_collection({line.args[0].name})", f"del {line.args[0].name}"]


def clear_collection(collection: list) -> None:
    """Empties a list that held what a backward reads, so that each value is freed after its last use."""
    collection.clear()


unpack_sequence = Symbol("unpack_sequence", module="prims", is_prim=True, python_printer=_print_unpack)
clear_symbol = Symbol("clear_collection", module="prims", is_prim=True, python_printer=_print_clear)


def _unpack(values, source: CollectionProxy) -> list[BoundSymbol]:
    outputs = tuple(v for v in values if isinstance(v, Proxy))
    return [
        BoundSymbol(unpack_sequence, (tuple(values), source), {}, None, inputs=(source,), outputs=outputs),
        BoundSymbol(clear_symbol, (source,), {}, None, inputs=(source,), outputs=()),
    ]


def _backward_trace(trace: Trace, lines: list[BoundSymbol], tensors: list, others: list, joint: JointTrace) -> Trace:
    saved, cotangents = CollectionProxy((), "saved_for_backward"), CollectionProxy((), "cotangents")
    c0, c1 = CollectionProxy((), "C0"), CollectionProxy((), "C1")
    head = _unpack((c0 if tensors else None, c1 if others else None), saved)
    head += _unpack(joint.cotangents, cotangents)
    head += _unpack(tensors, c0) if tensors else []
    head += _unpack(others, c1) if others else []
    return trace.replace(name="backward_fn", args=(saved, cotangents), bound_symbols=[*head, *lines], output=joint.gradients, tags={TraceTag.BACKWARD})
