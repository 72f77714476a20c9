"""Values of a program that are DTensors: a proxy of the whole value, and beside it the mesh and the placements.

`DTensor.from_local` makes a whole value of what a rank has, and `to_local` this rank's part of a whole one: both are
redistributions between an invariant value and parts (`thunder.distributed.redistribute`). What lies between them the
program computes of whole values, until layers are split (`thunder.distributed.layers`). Which placements a result has
is DTensor's own answer, for operands without data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.methods import TensorMethod
from thunder.capture.world import IDENTITY
from thunder.core.proxies import TensorProxy, map_structure, number_value, proxies_in
from thunder.core.symbol import OpTags, recording
from thunder.distributed.layouts import I, P, S, mesh_axis, outside_axis, steps_from
from thunder.distributed.placement import Placement, is_dtensor
from thunder.distributed.redistribute import gradient_of_held, redistribute
from thunder.interpreter import NULL
from thunder.ops.rules.splitting import is_elementwise
from thunder.ops.torch_types import to_torch_dtype

Spec = tuple[Any, tuple]  # the mesh and the placements


def spec_of(c: Capture, p: Any) -> Spec | None:
    """The mesh and the placements of a value of the program; None for one that is no DTensor."""
    known = c.tensors.dtensors
    return known.get(c.recorder.memory.holder(p)) if known and type(p) is TensorProxy else None


def held_as(c: Capture, p: TensorProxy) -> Spec | None:
    """The mesh and the placements of the DTensor that stands outside for a parameter, which programs see as an ordinary
    tensor, or as one on another mesh."""
    holder = c.recorder.memory.holder(p) if c.recorder.memory is not None else p
    if holder not in c.tensors.placements:
        return None
    real = c.tensors.real[holder][0]
    return (real.device_mesh, real.placements) if is_dtensor(real) else None


def kind() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def attribute(c: Capture, p: TensorProxy, name: str) -> Any:
    """What only a DTensor has, or NULL."""
    spec = spec_of(c, p)
    if spec is None:
        return NULL
    if name in METHODS:
        return TensorMethod(p, name)
    return {"device_mesh": spec[0], "placements": spec[1]}.get(name, NULL)


def call_method(c: Capture, p: TensorProxy, name: str, args, kwargs) -> Any:
    """A call of a method that only a DTensor has, or NULL."""
    spec = spec_of(c, p) if name in METHODS else None
    if spec is None:
        return NULL
    c.synchronize()
    return METHODS[name](c, p, spec, *args, **kwargs)


def from_local(c: Capture, f, args, kwargs):
    """`DTensor.from_local`."""
    arguments = _bound(f, args, kwargs)
    local, mesh, placements = (arguments.get(n) for n in ("local_tensor", "device_mesh", "placements"))
    if mesh is None or any(arguments.get(n) is not None for n in ("shape", "stride", "grad_placements")):
        _refuse(c, "DTensor.from_local is called with a shape, a stride or placements of gradients, or without a mesh")
    for x in (mesh, *(placements or ())):
        if id(x) in c.world.sources:
            c.world.ask(c.world.sources[id(x)], IDENTITY)
    c.synchronize()
    value: Any = c.recorder.latest(local)
    placements = _normal(placements or _replicated(mesh), len(value.shape))
    for axis, placement in reversed(_along(c, mesh, placements)):
        if placement.is_shard():
            value = redistribute(value, axis, S(placement.dim), I)
        elif placement.is_partial():
            value = redistribute(value, axis, P, I)
    return _marked(c, value, mesh, placements)


def _to_local(c: Capture, p: TensorProxy, spec: Spec, *, grad_placements=None):
    """`DTensor.to_local`."""
    if grad_placements is not None:
        _refuse(c, "to_local is called with placements of gradients")
    value = c.recorder.latest(p)
    for axis, placement in _along(c, *spec):
        if placement.is_partial():
            _refuse(c, "to_local is called for a DTensor that is partial")
        if placement.is_shard():
            if value.shape[placement.dim] % axis.size:
                elements = value.shape[placement.dim]
                _refuse(c, f"to_local is called for {elements} elements, which {axis.size} ranks do not divide")
            value = redistribute(value, axis, I, S(placement.dim))
    return value if value is not c.recorder.latest(p) else _same(c, value, spec[0])


def _redistribute(
    c: Capture,
    p: TensorProxy,
    spec: Spec,
    device_mesh=None,
    placements=None,
    *,
    async_op=False,
    forward_dtype=None,
    backward_dtype=None,
):
    """`DTensor.redistribute`."""
    if device_mesh not in (None, spec[0]) or forward_dtype is not None or backward_dtype is not None:
        _refuse(c, "redistribute is called with another mesh or dtype")
    value = c.recorder.latest(p)
    wanted = _normal(placements or spec[1], len(value.shape))
    if any(placement.is_partial() and placement != old for placement, old in zip(wanted, spec[1], strict=True)):
        _refuse(c, "redistribute is called with partial placements")
    return _marked(c, value, spec[0], wanted)


def _full_tensor(c: Capture, p: TensorProxy, spec: Spec, *, grad_placements=None):
    if grad_placements is not None:
        _refuse(c, "full_tensor is called with placements of gradients")
    return _same(c, c.recorder.latest(p), spec[0])


METHODS: dict[str, Callable] = {"to_local": _to_local, "redistribute": _redistribute, "full_tensor": _full_tensor}


def computed(c: Capture, function: Callable, args, kwargs, run: Callable[[], Any]) -> Any:
    """`run()`, which records a call of PyTorch's; its results are DTensors where operands are."""
    specs = _specs(c, [p for p in proxies_in((list(args), dict(kwargs)), []) if type(p) is TensorProxy])
    if not any(specs.values()):
        return run()
    start = len(c.recorder.bound_symbols)
    result = run()
    if any(OpTags.RANDOM_OP in b.sym.tags for b in c.recorder.bound_symbols[start:]):
        _refuse(c, f"{function.__name__} draws random numbers for a DTensor")
    same = _of_elements(c, specs, result, c.recorder.bound_symbols[start:])
    if same is not None:
        return _mark(c, result, same)
    try:
        examples = _of_examples(c, function, args, kwargs, specs)
    except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
        _refuse(c, f"DTensor refuses {function.__name__}: {error}")
    if type(result) is TensorProxy:
        pairs = [(result, examples)]
    else:
        pairs = list(zip(proxies_in(result, []), compat.tree_leaves(examples), strict=False))
    for value, example in pairs:
        if isinstance(example, torch.Tensor) and is_dtensor(example):
            example_result: Any = example
            meshes = (spec[0] for spec in specs.values() if spec is not None)
            # DTensor remembers the results of operands on the first of meshes that are equal
            mesh = next((mesh for mesh in meshes if mesh == example_result.device_mesh), example_result.device_mesh)
            _mark(c, value, (mesh, example_result.placements))
    return result


def _mark(c: Capture, value: TensorProxy, spec: Spec) -> TensorProxy:
    holder = c.recorder.memory.holder(value)
    if holder not in c.tensors.placements:  # a parameter is what programs see it as
        c.tensors.lies_on(holder, *spec)
    return value


def _specs(c: Capture, operands: list[TensorProxy]) -> dict[TensorProxy, Spec | None]:
    """What the operands of a call are. Under no_grad, where optimizers compute, a parameter is the DTensor that the
    ranks hold, beside others of its kind; in the forward it is what the program sees."""
    specs = {p: spec_of(c, p) for p in operands}
    if torch.is_grad_enabled():
        return specs
    held = {p: spec for p in operands if (spec := held_as(c, p)) is not None}
    meshes = {id(spec[0]) for p, spec in specs.items() if spec is not None and p not in held}
    for p, spec in held.items():
        own = specs[p]
        if own is None or id(own[0]) not in meshes:
            specs[p] = spec
    is_mixed = any(spec is None and p.shape for p, spec in specs.items())
    return dict.fromkeys(operands) if is_mixed and not meshes else specs


def _of_elements(c: Capture, specs: dict[TensorProxy, Spec | None], result: Any, operations) -> Spec | None:
    """The mesh and the placements of what is computed of elements at the same place of DTensors that are alike."""
    alike = {(id(spec[0]), spec[1]): spec for spec in specs.values() if spec is not None}
    if type(result) is not TensorProxy or len(alike) != 1:
        return None
    (spec,) = alike.values()
    shapes = {tuple(p.shape) for p, known in specs.items() if known is not None}
    if shapes != {tuple(result.shape)} or any(placement.is_partial() for placement in spec[1]):
        return None
    return spec if operations and all(map(is_elementwise, operations)) else None


def _of_examples(c: Capture, function: Callable, args, kwargs, specs: dict[TensorProxy, Spec | None]) -> Any:
    """The call's result for DTensors without data."""
    from torch.distributed.tensor import DTensor

    def example(x):
        if type(x) is not TensorProxy:
            return torch.device("meta") if isinstance(x, torch.device) else number_value(x)
        shape, spec = [number_value(n) for n in x.shape], specs.get(x)
        tensor = torch.empty(shape, dtype=to_torch_dtype(x.dtype), device="meta")
        if spec is None:
            return tensor
        mesh, placements = spec
        for axis, placement in _along(c, mesh, placements):
            if placement.is_shard():
                tensor = tensor.chunk(axis.size, placement.dim)[0]
        whole = torch.Size(shape), torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=whole[0], stride=whole[1])

    with compat.DisableTorchFunction(), torch.no_grad():
        results = function(*map_structure(example, list(args)), **map_structure(example, dict(kwargs)))
        for x in compat.tree_leaves(results):
            if isinstance(x, DTensor) and any(placement.is_partial() for placement in x.placements):
                # the mask of an embedding stays in what DTensor remembers of it, until the values are summed
                x.redistribute(placements=_replicated(x.device_mesh))
        return results


def gradient(c: Capture, p: TensorProxy, g: TensorProxy, placement: Placement) -> TensorProxy:
    """The gradient of a parameter, of that of this rank: reduced to what the rank holds, and whole again in the
    program, where nobody joins it who needs a part only."""
    for axis, layout, _ in reversed(placement.joining):
        g = redistribute(g, axis, I, layout)
    local = gradient_of_held(g, placement)
    for q in reversed(placement.axes):
        if q.layout.kind == "S":
            local = redistribute(local, outside_axis(q.axis), q.layout, I)
    return marked_as(c, local, p)


def marked_as(c: Capture, value: TensorProxy, p: TensorProxy) -> TensorProxy:
    """A value that is a DTensor as a parameter is outside."""
    held = held_as(c, p)
    return value if held is None else _mark(c, _same(c, value, held[0]), held)


def part_that_leaves(c: Capture, p: TensorProxy) -> tuple[TensorProxy, Spec, tuple] | None:
    """What this rank returns of a value that is a DTensor, with the mesh, the placements and the shape of that. None
    for another value."""
    spec = spec_of(c, p)
    if spec is None:
        return None
    from torch.distributed.tensor import Replicate

    mesh, placements = spec[0], tuple(Replicate() if x.is_partial() else x for x in spec[1])
    shape, value = tuple(map(number_value, p.shape)), c.recorder.latest(p)
    steps = steps_from(mesh, placements, shape)
    dims = [layout.dim for _, layout in steps]
    if len(dims) != len(set(dims)) and any(layout.size is not None for _, layout in steps):
        _refuse(c, "a DTensor leaves it that two dimensions of a mesh divide into parts of different sizes")
    with recording(c.recorder):
        for axis, layout in steps:
            value = redistribute(value, axis, I, layout)
        if not steps:
            value = _same(c, value, mesh)
    return value, (mesh, placements), shape


def _marked(c: Capture, value: TensorProxy, mesh, placements: tuple) -> TensorProxy:
    marked = _same(c, value, mesh)
    c.tensors.lies_on(marked, mesh, placements)
    return marked


def _same(c: Capture, value: TensorProxy, mesh) -> TensorProxy:
    """The same value under another name, whose placements are others."""
    axis = mesh_axis(mesh, 0, outside=True)
    return redistribute(value, axis, I, I)


def _along(c: Capture, mesh, placements) -> list[tuple]:
    """(axis, placement) of each dimension of a mesh."""
    return [(mesh_axis(mesh, i), placement) for i, placement in enumerate(placements)]


def _replicated(mesh) -> tuple:
    from torch.distributed.tensor import Replicate

    return (Replicate(),) * mesh.ndim


def _normal(placements, rank: int) -> tuple:
    """Placements with dimensions counted from the front."""
    return tuple(
        type(p)(p.dim + rank) if p.is_shard() and p.dim < 0 else p  # as DTensor does
        for p in placements
    )


def _bound(f: Callable, args, kwargs) -> dict[str, Any]:
    return inspect.signature(f).bind(*args, **kwargs).arguments


def _refuse(c: Capture, why: str) -> NoReturn:
    c.refuse(why, "do this outside of the compiled function")
