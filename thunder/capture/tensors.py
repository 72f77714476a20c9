"""Tensors from outside: their proxies, which of them share memory, and the program's writes to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import cast

import torch

from thunder import compat
from thunder.analysis.aliases import alias_bases
from thunder.capture import opaque_values
from thunder.capture.interface import Capture
from thunder.capture.numbers import is_marked, number_at, size
from thunder.capture.world import HISTORY, SAME, SHARED, VIEWS, Source
from thunder.core.proxies import AnyProxy, Condition, TensorProxy, concrete, like, map_structure, same_shape
from thunder.core.symbol import recording
from thunder.distributed.boundary import held
from thunder.distributed.placement import Placement, is_dtensor, placement_of
from thunder.distributed.prepared import described
from thunder.errors import ThunderError
from thunder.ops import ltorch
from thunder.ops.functionalize import inplace
from thunder.ops.functionalize.histories import grad_enabled, holding, is_unseen
from thunder.ops.functionalize.parts import are_disjoint, part_shown
from thunder.ops.infer import saved_by_autograd
from thunder.ops.opaque_values import is_unusual
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype


class DependsOnIdentity(ThunderError):
    """A program depends on two of its tensors from outside being one, and they have a proxy each."""


def read(c: Capture, value: torch.Tensor, source: Source) -> TensorProxy | AnyProxy:
    """The proxy for a tensor: one for each argument (`Tensors.apart`), and one however else it is reached."""
    c.world.note(source, value)
    if c.tensors.replaced and id(value) in c.tensors.replaced:
        c.tensors.replaced_sources[source] = c.tensors.replaced[id(value)]
    known = c.tensors.proxies.get(id(value), _NONE)
    key = source if source.is_argument else None
    proxy = known.get(key)
    if proxy is None and known:
        if not c.tensors.apart or c.sharp_edges:  # code that capture ran runs once: there is no way back
            proxy = next(iter(known.values()))
        else:
            c.tensors.passed_twice.add(id(value))
            check_apart(c)
    if proxy is None:
        with compat.DisableTorchFunction():  # questions to the real tensor here are not part of the program
            if is_unusual(value) and not is_local(value):
                return opaque_values.read(c, value, source)
            proxy = _new_proxy(c, value, source)
        c.tensors.proxies.setdefault(id(value), {})[key] = proxy
        c.world.hold(value)
    elif c.tensors.real[proxy][1] is not source:
        c.world.ask(source, SAME, c.tensors.real[proxy][1])
    return proxy


_NONE: dict = {}


def check_apart(c: Capture) -> None:
    """Raises DependsOnIdentity where a tensor with several proxies is written to, or gradients of it are, or where its
    identity matters, as that of all does where `requires_grad_` or `.data` is written (`Capture.distinct_groups`)."""
    t, engine = c.tensors, c.engine
    touched = {*t.mutated, *t.frozen, *t.joined, *engine.leaves.values()}
    touched.update(effect.owner for effect in c.effects if type(effect.owner) is TensorProxy)
    with compat.DisableTorchFunction():
        memory = {_memory_of(c.world.keep[i]) for i in t.passed_twice}
        written = any(_memory_of(t.real[p][0]) in memory for p in touched if p in t.real)
    told = {id(real) for _, real, _ in c.outside.ids.values()}
    told |= {id(c.world.value_at(source)) for source in c.outside.apart}
    if written or t.required or t.rebound or not told.isdisjoint(t.passed_twice):
        raise DependsOnIdentity(
            "the program writes to a tensor that is passed as several arguments, or compares its identity"
        )


def is_local(value: torch.Tensor) -> bool:
    """Whether programs compute with the local tensor of a DTensor."""
    return is_dtensor(value) and how_held(value) is not None


def how_held(value: torch.Tensor) -> Placement | None:
    """How the ranks hold a tensor. Of a DTensor that is no parameter its own placements say it."""
    known = placement_of(value)
    return described(value) if known is None and is_dtensor(value) else known


def _new_proxy(c: Capture, value: torch.Tensor, source: Source) -> TensorProxy:
    """The proxy of a tensor from outside that has none yet. The prologue checks its kind and sizes."""
    shape: tuple = tuple(value.shape)
    guarded = shape
    if _may_change_sizes(c, value, source):
        shape = tuple(size(c, n, source.child("size", i), value) for i, n in enumerate(shape))
        guarded = tuple(n if type(n) is int else None for n in shape)
    if source.step == "made":
        shape = tuple(number_at(c, n) if type(n) is Source else n for n in source.key)
        guarded = tuple(n if type(n) is int else None for n in shape)
    names, dtype = c.recorder.context.names, from_tensor_dtype(value.dtype)
    placement = how_held(value)
    if placement is not None:  # whole in the program, a part of it in this process
        shape, dtype = placement.shape, from_tensor_dtype(placement.dtype)
    # read in the shape and dtype that the program was written for; a transform changes the operations that read it
    if source in c.tensors.replaced_sources:
        table, name = c.tensors.replaced_sources[source]
        value = table[name]
        guarded = tuple(value.shape)
        if (own_placement := placement_of(value)) is None and placement is not None:
            c.refuse(
                f"a transform put another tensor in the place of {name}, of which the ranks hold a part each",
                "ddp or fsdp come after the transforms: thunder.jit(module, transforms=[...]) first, or the last of "
                "the list",
            )
        placement = own_placement
    device = c.request.options.device or from_tensor_device(value.device)
    name = names.claim(source.name(c.world.parameters))
    proxy = TensorProxy(name, shape=shape, dtype=dtype, device=device, requires_grad=value.requires_grad)
    if is_dtensor(value):
        seen = cast(Placement, how_held(value)).held_shape
        c.tensors.local[source] = seen[0] if seen else None
    c.tensors.shapes[source] = guarded
    c.tensors.stand_for(proxy, value, source)
    if placement is not None:
        _lay_out(c, proxy, placement)
    for base in _in_memory_of(c, value) if c.tensors.mutated else ():
        if base in c.tensors.mutated:
            _share(c, base, proxy, value)
    return proxy


def _may_change_sizes(c: Capture, value: torch.Tensor, source: Source) -> bool:
    """Whether a program may be for other sizes of a tensor. What ranks have of a DTensor depends on its size."""
    if source.root.key not in ("args", "kwargs") or is_dtensor(value):
        return False
    return bool(c.numbers.symbolic_sizes or c.request.changing or is_marked(value))


def _lay_out(c: Capture, proxy: TensorProxy, placement: Placement) -> None:
    c.tensors.placements[proxy] = placement
    if placement.seen_on is not None:
        c.tensors.lies_on(proxy, *placement.seen_on)


def _in_memory_of(c: Capture, tensor: torch.Tensor) -> list[TensorProxy]:
    """The proxies of tensors from outside that share a tensor's memory, in the order in which they were read."""
    known, table = c.tensors.real, c.tensors.in_memory
    with compat.DisableTorchFunction():
        for proxy in [*itertools.islice(reversed(known), len(known) - c.tensors.looked_at)][::-1]:
            table.setdefault(_memory_of(known[proxy][0]), []).append(proxy)
        c.tensors.looked_at = len(known)
        return list(table[_memory_of(tensor)])


def input_source(c: Capture, p: TensorProxy) -> Source:
    """What the prologue returns for a tensor from outside."""
    return c.tensors.required.get(p) or c.tensors.real[p][1]


def is_leaf(c: Capture, p: TensorProxy) -> bool:
    """Whether a proxy stands for a leaf from outside."""
    real = c.tensors.real.get(c.recorder.memory.holder(p))
    with compat.DisableTorchFunction():
        return real is not None and real[0].is_leaf and not has_new_history(c, p)


def shows_leaf(c: Capture, p: TensorProxy) -> bool:
    """Whether a proxy stands for a view that autograd knows of a leaf from outside."""
    memory = c.recorder.memory
    x = memory.holder(p)
    while x in memory.view_of and not is_unseen(memory.view_of[x][0]):
        x = memory.view_of[x][1]
    with compat.DisableTorchFunction():
        real = c.tensors.real[x][0] if x in c.tensors.real else None
        base = real._base if real is not None else None
        return is_leaf(c, x) if base is None and x is not memory.holder(p) else base is not None and base.is_leaf


def has_new_history(c: Capture, p: TensorProxy) -> bool:
    """Whether a tensor from outside, or its base, was overwritten with a value that requires grad."""
    memory = c.recorder.memory
    return memory.base(p) in c.tensors.joined and memory.latest(p).requires_grad


def keeps_casts(c: Capture, p: TensorProxy) -> bool:
    """Whether a proxy stands for a tensor whose casts eager's autocast keeps."""
    with compat.DisableTorchFunction():
        return p in c.tensors.real and is_leaf(c, p) and not c.tensors.real[p][0]._is_view()


def check_superseding(c: Capture, base: TensorProxy) -> None:
    """Refuses a write behind autograd's back that gradients of the program do not allow, as its end has told, in the
    function in which the tensor was read as well."""
    if (reason := c.request.eager.superseding.get(c.user_location())) is None:
        return
    memory = c.recorder.memory
    values = {memory.current.get(x, x) for x in (base, *memory.below(base))}
    reads = (i for i, b in enumerate(c.recorder.bound_symbols) if not values.isdisjoint((*b.inputs, *b.outputs)))
    c.fallbacks.reach_back(next(reads, c.fallbacks.reaches_back_to))
    c.refuse(*reason)


def written_to(c: Capture, base: TensorProxy, is_view: bool, detached: bool) -> None:
    """An in-place operation writes to `base`, or to a view of it, which may be `detached`. Raises where the program or
    thunder can not allow it."""
    if detached:
        check_superseding(c, base)
    if base not in c.tensors.real:
        return
    placement = c.tensors.placements.get(base)
    if placement is not None and placement.dtype is not placement.held_dtype:
        c.refuse(
            f"{placement.name} is written to, which the ranks hold in {placement.held_dtype} and compute with in "
            f"{placement.dtype}",
            "write to it outside of the compiled function: call optimizer.step() there",
        )
    real, source = c.tensors.real[base]
    with compat.DisableTorchFunction():
        requires_grad = real.requires_grad or base in c.tensors.required
    if base in c.tensors.frozen and (torch.is_grad_enabled() and not detached or c.recorder.memory.views.get(base)):
        c.refuse(
            "the program writes to a tensor that has views while requires_grad_(False) holds for it",
            "write to it outside of the compiled function",
        )
    if requires_grad and torch.is_grad_enabled() and not detached:
        leaf, *of_view = c.world.ask(source, HISTORY)
        if leaf or of_view and of_view[0]:
            shows = "view of a " * (is_view or not leaf)
            raise RuntimeError(f"a {shows}leaf Variable that requires grad is being used in an in-place operation.")
    if base not in c.tensors.mutated:
        c.tensors.mutated[base] = None
        if c.tensors.passed_twice:
            check_apart(c)
        for other in _in_memory_of(c, real):
            if base in c.tensors.mutated:
                _share(c, base, other, c.tensors.real[other][0])


def joins_history(c: Capture, x: TensorProxy) -> None:
    """Autograd is to see a write to `x`: where that came from outside, it is written to after the computation. Raises
    PyTorch's error for views that do not allow it."""
    if x not in c.tensors.real:
        return
    real, source = c.tensors.real[x]
    _, *of_view = c.world.ask(source, HISTORY)
    if of_view and of_view[1] != "DEFAULT":
        with compat.probing(grad=True):  # a part without elements is a view of this kind, too
            real.as_strided((0,), (1,)).add_(torch.empty(0, requires_grad=True, dtype=real.dtype, device=real.device))
    c.tensors.joined.add(x)


def _share(c: Capture, base: TensorProxy, other: TensorProxy, tensor: torch.Tensor) -> None:
    """Two tensors from outside, one of which is written to: if one is a part of the other it is a view of it here. A
    partial overlap is refused."""
    real, source = c.tensors.real[base]
    real, tensor = held(real), held(tensor)
    memory = c.recorder.memory
    with compat.DisableTorchFunction():
        if other is base or other in c.tensors.rebound or not tensor.numel() or other in memory.view_of:
            return
        mine = others = None
        if real.dtype is tensor.dtype:
            mine, others = part_shown(real, tensor), part_shown(tensor, real)
        disjoint = mine is None and others is None and are_disjoint(real, tensor)
        connected = real.requires_grad or tensor.requires_grad
        has_leaf = real.is_leaf or tensor.is_leaf
    if connected and not disjoint and not has_leaf:  # views of one memory have one history, others one each
        connected = not c.world.ask(c.tensors.real[other][1], VIEWS, source)
    if not disjoint and (connected or mine is None and others is None):
        names = [c.world.describe(c.tensors.real[p][1]) for p in (base, other)]
        c.refuse(
            f"{names[0]} is written to, and {names[1]} shares memory with it",
            "pass a clone of one of the two, or pass one tensor and make the other from it inside the function",
        )
    map_structure(concrete, (base.shape, other.shape))
    if others is None and mine is not None:
        _shares(c, source, c.tensors.real[other][1])
        value = memory.current.get(base)
        del c.tensors.mutated[base]
        memory.show_part(base, other, mine)
        written_to(c, other, True, False)
        if value is not None:  # written to before the other one was read
            memory.write(base, value)
        return
    _shares(c, c.tensors.real[other][1], source)
    if others is not None:
        memory.show_part(other, base, others)


def _shares(c: Capture, source: Source, other: Source) -> None:
    """Two tensors lie in memory as they do now."""
    if (other, SHARED, source) not in c.world.observed:
        c.world.ask(source, SHARED, other)


def write_back(c: Capture) -> None:
    """The last operations of the program: write the new values to tensors from outside."""
    memory = c.recorder.memory
    if not memory.active:
        return
    memory.end()
    last, showed = _last_values(c), {inner: p for p, inner in c.tensors.rebound.items()}
    with recording(c.recorder):
        for base in list(c.tensors.mutated):
            value, target = memory.latest(base), showed.get(base, base)
            if value is base:
                if base in memory.counted:  # a view of it changed its shape
                    inplace.count_write.record(c.recorder, (base,), {}, None)
                continue
            if value.requires_grad and (base in c.tensors.joined or not base.requires_grad):
                if base in showed:
                    c.refuse(
                        f"the data of {target.name} are set, and its old memory is overwritten with a value that "
                        "requires grad",
                        "write to a clone",
                    )
                _write_after(c, base, value)
                continue
            for symbol, arguments in memory.rearranged.get(base, ()):
                form = inplace.rearranging(symbol)
                result = cast(Callable, form.meta)(target, *arguments)
                target = cast(TensorProxy, form.record(c.recorder, (target, *arguments), {}, result))
            if base in memory.filled:
                copy = inplace.write_back if base in memory.counted else inplace.write_back_uncounted
                copy.record(c.recorder, (target, value), {}, None)
                for other in memory.below(base) if copy is inplace.write_back else ():
                    if other in c.tensors.real:
                        inplace.also_written.record(c.recorder, (other,), {}, None)
            if base in showed:
                target = without_history(c, showed[base])
            memory.written_back(base, target)
            if base not in showed:
                c.tensors.reshaped[target] = base
        memory.settle()
        for base in c.tensors.written_after:
            _stands_for_itself(c, base)
        _save_memory(c, last)


def written_unseen(c: Capture) -> list[TensorProxy]:
    """The tensors from outside that are written to behind autograd's back, and those whose `.data` are set."""
    memory, rebound = c.recorder.memory, c.tensors.rebound
    written = (base for base in c.tensors.mutated if base in memory.filled and base not in memory.counted)
    return [*written, *rebound, *rebound.values()]


def _last_values(c: Capture) -> dict[TensorProxy, TensorProxy]:
    """The last values of the tensors that are written to behind autograd's back, and of their views, with these."""
    memory, rebound = c.recorder.memory, c.tensors.rebound
    shown = (x for base in written_unseen(c) for x in (base, *(() if base in rebound else memory.below(base))))
    return {memory.current.get(x, x): x for x in shown if x not in memory.stale}


def _save_memory(c: Capture, last: dict[TensorProxy, TensorProxy]) -> None:
    """Backwards read tensors in the place of their last values, where autograd saves them: it saves memory, and a later
    call may write to that before the backward runs."""
    saved: dict[TensorProxy, None] = {}
    for operation in list(c.recorder.bound_symbols) if last else ():
        derived = any(type(o) is TensorProxy and o.requires_grad for o in operation.outputs)
        for i in operation.inputs if derived and operation.sym is not holding else ():
            if i in last and i not in saved and saved_by_autograd(operation, i):
                saved[i] = None
    for value in saved:
        tensor = last[value] if last[value] in c.tensors.rebound else c.recorder.memory.latest(last[value])
        if tensor is not value and same_shape(tensor.shape, value.shape) and tensor.dtype is value.dtype:
            inplace.saved_from.record(c.recorder, (value, tensor), {}, None)


def without_history(c: Capture, value: TensorProxy) -> TensorProxy:
    """A value as another tensor takes it over, whatever it has been since."""
    detached = like(value)
    ltorch.detach.record(c.recorder, (value,), {}, detached)
    return detached


def _write_after(c: Capture, base: TensorProxy, value: TensorProxy) -> None:
    """`base` gets the value, and its history, after the computation, where autograd sees it (see `EpilogueWriter`)."""
    if alias_bases(c.recorder.bound_symbols, maybe=True)[value] in c.tensors.real:  # which may be written to before
        with grad_enabled(True):
            value = ltorch.clone(value)
    c.tensors.written_after[base] = value


def _follows(c: Capture, p: TensorProxy, base: TensorProxy) -> bool:
    """Whether autograd gives `p`, which shares memory with `base`, the history of values written to that."""
    source = c.tensors.real[p][1]
    of_view = c.world.ask(source, HISTORY)[1:]
    return c.world.ask(source, VIEWS, c.tensors.real[base][1]) and (not of_view or of_view[1] == "DEFAULT")


def _stands_for_itself(c: Capture, base: TensorProxy) -> None:
    """Views of `base`, which is written to after the computation, are made then."""
    memory = c.recorder.memory
    for p in (base, *memory.below(base)):
        if p not in c.tensors.real:
            continue
        if p is not base and not _follows(c, p, base):
            c.refuse(
                f"{base.name} is overwritten with a value that requires grad, and {p.name} shares its memory in a way "
                "that autograd does not follow",
                "pass a clone of one of the two",
            )
        inplace.written_after.record(c.recorder, (p,), {}, None)
        after = memory.current.get(p, p).replace(name=c.recorder.context.names.make(), requires_grad=True)
        memory.written_back(p, after)
        c.tensors.afterwards[after] = p


def lift(c: Capture, value):
    """A real tensor that came from nowhere the program can name: pinned."""
    assert not isinstance(value, compat.FakeTensor), "a fake tensor of an opaque operation was not turned into a proxy"
    if type(value) is Condition:
        return bool(value)  # an error, where no check of the program decides it
    return read(c, value, c.world.const(value, "constant tensor")) if isinstance(value, torch.Tensor) else value


def _memory_of(tensor: torch.Tensor) -> int:
    """An identity of a tensor's memory; those on the meta device have none, and a storage each all the same."""
    storage = held(tensor).untyped_storage()
    return storage.data_ptr() or storage._cdata
