"""`tensor.data = value`: the tensor shows other memory from then on, also outside, where the epilogue assigns it."""

from __future__ import annotations

from thunder import compat
from thunder.analysis.aliases import Bases, alias_bases
from thunder.capture.interface import Capture
from thunder.capture.library import leaves
from thunder.capture.tensors import check_superseding, is_leaf
from thunder.core.proxies import Proxy, TensorProxy, proxies_in
from thunder.core.symbol import OpTags
from thunder.errors import CaptureError
from thunder.ops.functionalize import rearranged
from thunder.ops.functionalize.histories import holding
from thunder.ops.infer import fake, saved_by_autograd


def assign(c: Capture, p: TensorProxy, value) -> None:
    """`p.data = value`. Raises PyTorch's errors where the value does not fit."""
    memory = c.recorder.memory
    p, value = memory.holder(p), c.lift(value)
    check_superseding(c, memory.base(p))
    c.synchronize()
    before, now = memory.latest(p), c.recorder.latest(value)
    if type(now) is not TensorProxy or before.requires_grad and now.dtype.category < 2:
        with compat.DisableTorchFunction():
            fake(before).requires_grad_(before.requires_grad).data = fake(now) if type(now) is TensorProxy else value
        c.refuse("x.data is assigned a tensor that is not dense", "give it a dense one")
    if rearranged.shows_whole(memory, value, p):
        return
    _check(c, p)
    alike = (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device)
    if p in c.tensors.leaves and before.requires_grad and not alike:
        _another_leaf(c, p, now)
        return
    inner = rearranged.rebind(memory, p, value)
    if p not in c.tensors.real:
        return
    if p not in c.tensors.rebound:
        c.tensors.rebind(p, inner)
    real, _ = c.tensors.real[p]
    c.effects.write_to_tensor(real, p, "data", p)


def _check(c: Capture, p: TensorProxy) -> None:
    """Refuses what is not followed."""
    memory = c.recorder.memory
    of_transform = c.recording.outer or p in c.tensors.placements
    _, source = c.tensors.real.get(p, (None, None))
    if of_transform or source in c.tensors.replaced_sources:
        c.refuse(
            "x.data is assigned for a tensor that a transform has replaced, or that ranks hold in parts",
            "set them outside of the compiled function",
        )
    if (
        p in c.tensors.required
        or p in c.tensors.frozen
        or p in c.tensors.joined
        or not rearranged.may_rebind(memory, p)
    ):
        c.refuse(
            "the data of a tensor are set that shows another argument, or changed its shape or whether it requires "
            "grad inside of it",
            "set them outside of the compiled function",
        )


def _another_leaf(c: Capture, p: TensorProxy, now: TensorProxy) -> None:
    """A leaf of the program's own, of another dtype or shape: a leaf like that in its place."""
    memory = c.recorder.memory
    used = any(
        memory.holder(i) is p and any(type(o) is TensorProxy and o.requires_grad for o in operation.outputs)
        for operation in c.recorder.bound_symbols
        for i in operation.inputs
        if operation.sym is not holding and type(i) is TensorProxy
    )
    if used or not memory.is_apart(p) or not is_leaf(c, p):
        c.refuse(
            "the data of a leaf that was used before are set to another dtype or shape",
            "set them before it is used",
        )
    memory.stand_for(p, leaves.leaf(c, now, type(c.tensors.real[p][0])))


_REASON = (
    "a gradient needs the data that a tensor had before others were set, or written through `.data`",
    "call backward before",
)


def check_saved(c: Capture, results) -> None:
    """Refuses results whose gradient may need superseded values: eager PyTorch's backward reads what stands there by
    then, as far as a kernel's derivative needs it."""
    if not c.recorder.memory.superseded:
        return
    bases = alias_bases(c.recorder.bound_symbols)
    gone, versions = _superseded(c, bases), c.recorder.memory.versions
    pending = [p for p in proxies_in(results, []) if not c.is_freed(p)]
    seen: set = set()
    while pending:
        value = pending.pop()
        operation = c.recorder.producer(value) if isinstance(value, TensorProxy) and value.requires_grad else None
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        # an operation in place keeps a copy of what it overwrites
        over = {versions.get(o.name) for o in operation.outputs}
        values = [p for p in (*operation.inputs, *operation.outputs) if bases[p] in gone]
        values = [p for p in values if versions.get(p.name, p.name) not in over]
        if values and operation.sym is not holding and OpTags.VIEW not in operation.sym.tags:
            _refuse(c, [gone[bases[p]] for p in values if saved_by_autograd(operation, p)])
        pending += operation.inputs


def check_read(c: Capture, operations) -> None:
    """Refuses a backward inside of the program that reads superseded values."""
    if c.recorder.memory.superseded:
        bases = alias_bases(c.recorder.bound_symbols)
        gone = _superseded(c, bases)
        _refuse(c, [gone[bases[i]] for operation in operations for i in operation.inputs if bases[i] in gone])


def _superseded(c: Capture, bases: Bases) -> dict[Proxy, tuple | None]:
    """The values that are superseded, with the lines that do. The backward of the program gets an argument that is
    written to as it is then, as eager PyTorch's does."""
    memory, real = c.recorder.memory, c.tensors.real
    superseded = {bases[value]: where for value, where in memory.superseded.items()}
    return {value: where for value, where in superseded.items() if value not in real or value in memory.rebound}


def _refuse(c: Capture, writes: list) -> None:
    """Refuses the writes of these lines."""
    if writes:
        c.request.eager.superseding.update(dict.fromkeys(writes, _REASON))
        raise CaptureError(_REASON[0], location=writes[0], remedy=_REASON[1])
