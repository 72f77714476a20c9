"""The placement of parameters: which rank holds which part, and the value in programs.

A parameter whose `Placement` is known here is whole in every program that reads it: the frontend reads it in that shape
and dtype, and the program begins with what the rank holds (`thunder.distributed.redistribute`). What the user and the
optimizer see is what the rank holds.
"""

from __future__ import annotations

import contextlib
import enum
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder import compat
from thunder.distributed.layouts import Axis, Layout, R
from thunder.errors import CaptureError


class FSDPType(enum.Enum):
    """Whether `fsdp` keeps gathered parameters between the forward and the backward."""

    ZERO2 = enum.auto()  # the gathered parameter
    ZERO3 = enum.auto()  # nothing: the backward gathers it again


class FSDPBucketingStrategy(enum.Enum):
    """Which parameters are gathered, and whose gradients are reduced, by one collective."""

    NONE = enum.auto()  # each by itself
    LAYER = enum.auto()  # those of one module
    BLOCK = enum.auto()  # those of one element of a ModuleList or Sequential


@dataclass(eq=False)
class Accumulated:
    """What backwards without synchronisation left to do. gradient: of the whole parameter, of this rank, where the
    parameter's own `.grad` is that of a shard. gathered: the version of the shard, and the future of the whole
    parameter, which calls share that gather once."""

    pending: bool = False
    gradient: torch.Tensor | None = None
    gathered: tuple[int, Any] | None = None


@dataclass(frozen=True)
class Held:
    """How the ranks of one axis hold a parameter (`layout`, S or I), and how they see it in programs (`seen`): R over
    ranks that have data of their own, whose gradients are averaged, I over ranks that share data. on_mesh: whether the
    axis is one of the mesh that the parameter is a DTensor on. positions: the dimension of activations whose positions
    the ranks share in all layers; None: they share features, if anything. experts: whether they share experts, of which
    each rank computes its own for the rows of all; parameters of no expert are held by all of them."""

    axis: Axis
    layout: Layout
    seen: Layout
    on_mesh: bool = True
    positions: int | None = None
    experts: bool = False

    @property
    def averages(self) -> bool:
        return self.seen == R


@dataclass(frozen=True, eq=False)
class Placement:
    """How the ranks hold one parameter.

    shape, dtype: of the whole parameter, as programs see it. held_dtype: of what a rank holds. axes: over which axes
    ranks hold it together, in the order in which they divide it. reduce_dtype: in which gradients are reduced, None:
    their own. again: the backward gathers the parameter once more. bucket: parameters of one bucket are communicated
    together; None: alone. bucket_bytes: the largest size of a bucket of gradients that every rank holds. sequence_dim:
    the dimension of activations that ranks share between the layers that they split; None: each has all of them.
    seen_on: the mesh and the placements of the DTensor that programs see; None: they see an ordinary tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held_dtype: torch.dtype
    axes: tuple[Held, ...] = ()
    reduce_dtype: torch.dtype | None = None
    again: bool = False
    bucket: str | None = None
    bucket_bytes: int = 0
    sequence_dim: int | None = None
    seen_on: tuple[Any, tuple] | None = None
    accumulated: Accumulated = field(default_factory=Accumulated)

    @property
    def averaging(self) -> tuple[tuple[Axis, Layout, Layout], ...]:
        """(axis, from, to) of what makes a parameter whole over ranks whose gradients are averaged. What moves nothing
        comes first: its gradients are reduced last, when they are those of shards."""
        steps = [(q.axis, q.layout, q.seen) for q in reversed(self.axes) if q.averages]
        return tuple(sorted(steps, key=lambda step: step[1].kind == "S"))

    @property
    def joining(self) -> tuple[tuple[Axis, Layout, Layout], ...]:
        """(axis, from, to) of what joins the parts of ranks that share data."""
        return tuple((q.axis, q.layout, q.seen) for q in reversed(self.axes) if not q.averages and q.layout != q.seen)

    @property
    def synchronizes(self) -> bool:
        """Whether gradients are averaged over ranks."""
        return any(q.averages for q in self.axes)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks with data of their own hold a part each."""
        return any(q.averages and q.layout.kind == "S" for q in self.axes)

    @property
    def shares_data(self) -> bool:
        """Whether `ddp` or `fsdp` may still prepare the parameter, over other ranks."""
        return not any(q.averages and not q.experts for q in self.axes)

    @property
    def is_split(self) -> bool:
        """Whether every rank holds another part."""
        return any(q.layout.kind == "S" for q in self.axes)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds an ordinary tensor that is what programs see."""
        return not self.is_split and not any(q.on_mesh for q in self.axes) and self.dtype is self.held_dtype

    @property
    def communicated_as(self) -> Placement | None:
        """The placement, where it says more of its collectives than the axes do."""
        says = self.again, self.bucket, self.bucket_bytes, self.reduce_dtype, self.dtype is not self.held_dtype
        return self if any(says) else None

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape of one rank's part in programs, the same on each rank: with the padding of the last ranks."""
        shape = list(self.shape)
        for q in self.axes:
            if q.layout.kind == "S":
                shape[q.layout.dim] = math.ceil(shape[q.layout.dim] / q.axis.size)
        return tuple(shape)

    @torch.no_grad()
    def part_of(self, whole: torch.Tensor, before: Placement | None = None) -> torch.Tensor:
        """What this rank holds of the whole parameter; before: of the part that it has by another placement. A shard
        has memory of its own, with room for the padding that programs see."""
        for q in self.axes:
            if q.layout.kind == "S" and (before is None or q not in before.axes):
                dim, size = q.layout.dim, math.ceil(whole.shape[q.layout.dim] / q.axis.size)
                first = min(q.axis.rank * size, whole.shape[dim])
                own = whole.narrow(dim, first, min(size, whole.shape[dim] - first))
                room = whole.new_zeros((*whole.shape[:dim], size, *whole.shape[dim + 1 :])) if q.averages else own
                whole = room.narrow(dim, 0, own.shape[dim]).copy_(own) if q.averages else own
        return whole

    def __deepcopy__(self, memo: dict) -> Placement:
        """That of a copy of the parameter."""
        return replace(self, accumulated=Accumulated())

    def __reduce__(self):
        raise RuntimeError(f"parameter {self.name} is held by several ranks, and is not pickled: save a state dict")

    def __repr__(self) -> str:
        return f"<Placement of {self.name}>"


_NAME = "_thunder_placement"  # of the attribute of a tensor
# of parameters that are DTensors: the module, the name in it and the placement. `module.to(dtype)` puts another DTensor
# in their place, which has none of their attributes
_owners: list[tuple[weakref.ref, str, Placement]] = []
# how often parameters were placed, which gradients are left unsynchronised (none, all (True), or those of a set of
# placements), and which parameters are gathered once (a set of placements); part of the key of compiled programs
_state: list[Any] = [0, False, frozenset()]


def _tell() -> None:
    compat.set_data_parallel(tuple(_state) if _state[0] else None)


class _Copies:
    """What copy.deepcopy makes of an ordinary tensor that is placed is placed as well. A DTensor's copy has its
    attributes."""

    def __init__(self, parameter: torch.Tensor):
        self.parameter = weakref.ref(parameter)

    def __call__(self, memo: dict) -> torch.Tensor:
        parameter = self.parameter()
        assert parameter is not None, "it is asked by the parameter itself"
        copied = type(parameter).__deepcopy__(parameter, memo)
        place(copied, replace(getattr(parameter, _NAME), accumulated=Accumulated()))
        return copied


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; PyTorch's module of them is not imported for the question."""
    return type(tensor).__module__.startswith("torch.distributed.tensor")


def is_under_fsdp(module: torch.nn.Module) -> bool:
    """Whether PyTorch's FSDP or `fully_shard` prepared a module."""
    return any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__)


def communicates_by_itself(module: torch.nn.Module) -> bool:
    """Whether a module is a wrapper of PyTorch's that communicates by effects on its own state: FSDP or DDP."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or is_under_fsdp(module)


def place(parameter: torch.Tensor, placement: Placement) -> None:
    """Says how the ranks hold a parameter. Programs that were compiled before are compiled anew."""
    setattr(parameter, _NAME, placement)
    if is_dtensor(parameter):
        for i, (module, name, _) in enumerate(_owners):
            owner = module()
            if owner is not None and owner._parameters.get(name) is parameter:
                _owners[i] = module, name, placement
    else:
        parameter.__deepcopy__ = _Copies(parameter)  # type: ignore[method-assign]
    _state[0] += 1
    _tell()


def own(module: torch.nn.Module, name: str, placement: Placement) -> None:
    """Says that a module has a placed parameter, a DTensor, under a name."""
    _owners[:] = [one for one in _owners if one[0]() is not None]
    _owners.append((weakref.ref(module), name, placement))


@dataclass(frozen=True)
class _Replaced:
    """In the place of the placement of a tensor that was a parameter before it was distributed."""

    name: str


def replaced(parameter: torch.Tensor, name: str) -> None:
    """A DTensor stands for a parameter from now on; its memory is free, and programs that read it raise."""
    if not is_dtensor(parameter):
        parameter.data = parameter.new_empty(0)
    setattr(parameter, _NAME, _Replaced(name))


@contextlib.contextmanager
def placing_copies() -> Iterator[None]:
    """What is placed inside the block is gone after it: programs that were compiled before are not compiled anew."""
    before = _state[0]
    try:
        yield
    finally:
        _state[0] = before
        _tell()


def any_placed() -> bool:
    """Whether this process holds a parameter together with others."""
    return bool(_state[0])


def placement_of(tensor: torch.Tensor) -> Placement | None:
    """How the ranks hold a tensor. Where `module.to(dtype)` gave it another dtype, programs follow, unless they were
    told to compute in one of their own. Raises CaptureError for a parameter that was replaced by a DTensor."""
    if not _state[0]:
        return None
    placement = getattr(tensor, _NAME, None)
    if placement is None and is_dtensor(tensor):
        known = ((ref(), name, q) for ref, name, q in _owners)
        placement = next((q for m, name, q in known if m is not None and m._parameters.get(name) is tensor), None)
        if placement is not None:
            place(tensor, placement)
    if isinstance(placement, _Replaced):
        raise CaptureError(
            f"the tensor that was parameter {placement.name} before the module was distributed is read: the module has "
            "a DTensor in its place",
            remedy="read the parameter from the module, and make optimizers and lists of parameters afterwards",
        )
    if placement is not None and tensor.dtype is not placement.held_dtype:
        placement = replace(
            placement,
            held_dtype=tensor.dtype,
            dtype=tensor.dtype if placement.dtype is placement.held_dtype else placement.dtype,
        )
        place(tensor, placement)
    return placement


def seen_as(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype in which programs see a tensor."""
    placement = placement_of(tensor)
    return (tuple(tensor.shape), tensor.dtype) if placement is None else (placement.shape, placement.dtype)


def placed_parameters(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Placement]]:
    """The parameters of a module that have a placement, once each, in the module's order."""
    for parameter in module.parameters():
        placement = placement_of(parameter)
        if placement is not None:
            yield parameter, placement


def check_all_placed(module: torch.nn.Module) -> None:
    """Raises CaptureError for a trained parameter of a module that `ddp` or `fsdp` prepared which they have not seen:
    its gradient would be that of one rank."""
    parameters = {name: (p.requires_grad, placement_of(p)) for name, p in module.named_parameters()}
    if not any(q is not None and q.synchronizes for _, q in parameters.values()):
        return
    for name, (trained, q) in parameters.items():
        if trained and (q is None or not q.synchronizes):
            raise CaptureError(
                f"parameter {name} was added to the module, or replaced, after it was prepared for data parallelism: "
                "its gradient would stay that of one rank",
                remedy="call ddp or fsdp when all parameters are there",
            )


def synchronizes(placement: Placement) -> bool:
    """Whether programs that are compiled now synchronise the gradient of a parameter."""
    skipped = _state[1]
    return not (placement in skipped if isinstance(skipped, frozenset) else skipped)


def gathers_once(placement: Placement) -> bool:
    """Whether programs that are called now share what one of them gathered of a parameter."""
    return placement in _state[2]


@contextlib.contextmanager
def gathering_once(module: torch.nn.Module) -> Iterator[None]:
    """The first program called inside the block that reads a parameter gathers it, and the others read that."""
    own, before = frozenset(q for _, q in placed_parameters(module) if q.is_sharded), _state[2]
    _state[2] = before | own
    _tell()
    try:
        yield
    finally:
        _state[2] = before
        _tell()
        for placement in own:
            placement.accumulated.gathered = None


def set_skip_data_parallel_grad_sync(value: bool | frozenset[Placement]) -> bool | frozenset[Placement]:
    """Sets whether backwards of programs that are called from now on leave gradients unsynchronized. Returns a token
    for `reset_skip_data_parallel_grad_sync`."""
    before = _state[1]
    _state[1] = value if isinstance(value, frozenset) else bool(value)
    _tell()
    return before


def reset_skip_data_parallel_grad_sync(token: bool | frozenset[Placement]) -> None:
    """Restores the setting before a call of `set_skip_data_parallel_grad_sync`, which returned the token."""
    set_skip_data_parallel_grad_sync(token)


def get_skip_data_parallel_grad_sync() -> bool:
    """Returns whether backwards of programs that are called now leave gradients unsynchronized."""
    return bool(_state[1])


@contextlib.contextmanager
def skip_data_parallel_grad_sync(module: torch.nn.Module | None = None) -> Iterator[None]:
    """A context manager. Programs that are called inside the block leave gradients unsynchronized; with a module,
    only programs of this module. `no_sync` also synchronizes the gradients at its end."""
    before, own = _state[1], True if module is None else frozenset(q for _, q in placed_parameters(module))
    token = set_skip_data_parallel_grad_sync(
        before | own if isinstance(before, frozenset) and isinstance(own, frozenset) else before is True or own
    )
    try:
        yield
    finally:
        reset_skip_data_parallel_grad_sync(token)
