"""Double backward: the gradients of a computation as a second computation, for a backward that is differentiated
itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy, like
from thunder.core.regions import leading_to
from thunder.core.rewrite import decomposed
from thunder.core.symbol import OpTags
from thunder.core.trace import ForwardBackward, Trace
from thunder.ops.functionalize.inplace import saved_from, writes_back
from thunder.ops.torch_types import to_torch_device
from thunder.options import RNG_OPTIONS, JitOptions
from thunder.transforms.dce import dce
from thunder.transforms.partition import modified_in_place, without_overwritten
from thunder.transforms.phases import marked
from thunder.transforms.pullback import gradients_of


def gradient_program(
    acquired: Trace, cut: ForwardBackward, missing: Sequence[int], executors: Sequence
) -> tuple[Trace, list[int]]:
    """The gradients of a computation as a second computation, and the places of the arguments that it takes of those of
    the first.

    Its arguments are those, then the cotangents that are not missing. It does not repeat the writes to arguments. Where
    the computation wrote to an argument that the gradients depend on, the program raises PyTorch's error, also where
    autograd did not see the write.
    """
    computes = (b for b in acquired.bound_symbols if not writes_back(b) and b.sym is not saved_from)
    operations = marked([b.copied() for b in computes], 0)
    outputs = [o for o in cut.outputs if o.requires_grad]
    cotangents = [None if i in missing else like(o) for i, o in enumerate(outputs)]
    for c in cotangents:
        if c is not None:
            c.name, c.requires_grad = acquired.names.make("cotangent"), True
    forward = acquired.replace(bound_symbols=operations, info=acquired.info.replace(backwards=0))
    gradients = _without_unread(gradients_of(dce(forward), cotangents, outputs, executors))
    refused = without_overwritten(acquired.bound_symbols, gradients.bound_symbols, acquired.info.copies)
    errors = [b.args[0] for b in leading_to(refused or (), gradients.output_proxies) if b.sym is modified_in_place]
    read = {p for b in gradients.bound_symbols for p in b.inputs} | set(gradients.output_proxies)
    errors += [a.name for a in acquired.args if a in read and a.name in acquired.info.unseen]
    if errors:  # which no derivative leads through
        raise_error = modified_in_place.bind(errors[0], output=None)
        gradients = gradients.replace(bound_symbols=[raise_error], output=tuple(None for _ in gradients.output))
        read = set()
    needed = [i for i, a in enumerate(acquired.args) if not isinstance(a, TensorProxy) or a in read]
    return gradients.replace(args=[*(acquired.args[i] for i in needed), *gradients.args[len(acquired.args) :]]), needed


def _without_unread(trace: Trace) -> Trace:
    """Decomposes operations with results that nothing reads, so that the program takes no argument for those alone: a
    batch norm for the running statistics, which a forward with kernels does not keep. Functions of the user's, whose
    identities are tuples, stay: they have derivatives of their own."""
    read = {p for b in trace.bound_symbols for p in b.inputs} | set(trace.output_proxies)
    partly = {
        b for b in trace.bound_symbols
        if b.subsymbols and isinstance(b.sym.id, str) and not read.issuperset(b.outputs)
    }  # fmt: skip
    return dce(decomposed(trace, partly)) if partly else trace


def random_devices(acquired: Trace, options: JitOptions) -> list | None:
    """The devices whose default generators a computation may draw from; None where it may use other generators, of the
    user or of fusion executors."""
    drawing = [b for b in acquired.bound_symbols if not b.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.OPAQUE))]
    if drawing and options.rng is RNG_OPTIONS.FUSED or any(b.kwargs.get("generator") is not None for b in drawing):
        return None
    return list(
        dict.fromkeys(to_torch_device(o.device) for b in drawing for o in b.outputs if isinstance(o, TensorProxy))
    )


class InputsBehind(NamedTuple):
    """Places of the arguments that the gradients are recomputed from. saved: pairs of such a place and the place among
    the saved tensors. numbers: arguments that are no tensors."""

    unsaved: list[int]
    saved: list[tuple[int, int]]
    numbers: list[int]


def inputs_behind(cut: ForwardBackward, args: Sequence) -> InputsBehind:
    """The arguments that saved values depend on, and all that are no tensors."""
    collections = [o.collection for o in cut.saved_others if isinstance(o, CollectionProxy)]
    others = [o for o in cut.saved_others if isinstance(o, Proxy)]
    needed = {*cut.saved_tensors, *others, *itertools.chain(*collections)}
    for b in reversed(cut.forward.bound_symbols):
        if not needed.isdisjoint(b.outputs) or not b.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.OPAQUE)):
            needed.update(b.inputs)
    saved = {p: i for i, p in enumerate(cut.saved_tensors)}
    tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, TensorProxy) and a in needed]
    return InputsBehind(
        [i for i, a in tensors if a not in saved],
        [(i, saved[a]) for i, a in tensors if a in saved],
        [i for i, a in enumerate(args) if not isinstance(a, TensorProxy)],
    )
