"""Collectives of `torch.distributed` as operations: values in, values out, with derivatives.

A collective with `async_op=True` gives a future, which `wait` makes a tensor; between the two the program computes
other things. As in PyTorch, every rank of a group has to run the same collectives in the same order. Derivatives are
those of the sum of all ranks' losses, as in `torch.distributed.nn`.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thunder.core import codegen
from thunder.core.proxies import FutureTensorProxy, TensorProxy, like
from thunder.core.symbol import Symbol, current_recorder, user_location
from thunder.errors import CaptureError, MissingImplementationError, OptionError
from thunder.ops import ltorch
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.lost_ranks import failed
from thunder.ops.registry import torch_prim
from thunder.ops.torch_types import to_torch_device

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "reduce_scatter",
    "all_to_all",
    "wait",
    "group_of",
    "REDUCTIONS",
    "all_gather_together",
    "reduce_scatter_together",
    "all_reduce_together",
]

REDUCTIONS = ("sum", "avg", "min", "max", "product")


def _name_of_group(group) -> str:
    said = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    return "group_" + re.sub(r"\W", "_", said)


if dist.is_available():
    codegen.OBJECT_NAMES[dist.ProcessGroup] = _name_of_group


@functools.cache
def _let_workers_end() -> None:
    """A moment for Gloo's worker threads before the interpreter ends: one that lets go of a tensor later takes the
    process down.

    Programs keep a process group, and with it these threads, alive after destroy_process_group.
    """
    atexit.register(time.sleep, 0.1)


def group_of(group) -> Any:
    """A process group: the default one for None, a one-dimensional DeviceMesh's own. Raises RuntimeError and TypeError
    where there is none."""
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        _let_workers_end()
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "Default process group has not been initialized, please make sure to call init_process_group."
        )
    _let_workers_end()
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], dist.device_mesh.DeviceMesh):
        return group[0].get_group(group[1])
    raise TypeError(
        "a process group is a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh, or (DeviceMesh, "
        f"dimension), not {type(group).__name__}"
    )


# ---------------------------------------------------------------------------------------------------------------- what
# runs

if dist.is_available():  # under the names of torch 2.13, and those before
    _gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    _scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _named(name: str, tensors: Sequence[torch.Tensor]) -> str:
    return f"{name} of {', '.join(f'{str(t.dtype)[6:]}{list(t.shape)}' for t in tensors)}"


class Started:
    """What the backend works on, for one tensor or several. It keeps alive what is read or written until somebody
    waits.

    Only the first wait is one: Gloo would do its last part again with each.
    """

    __slots__ = ("work", "name", "tensors", "group")

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], group, start: Callable):
        self.name, self.tensors, self.group = name, tensors, group
        try:
            self.work = start()
        except RuntimeError as error:
            raise failed(error, _named(name, tensors), group) from error

    def wait(self) -> None:
        """Raises CollectiveError where the backend gives up."""
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                raise failed(error, _named(self.name, self.tensors), self.group) from error
            self.work, self.tensors = None, ()


class Future:
    """One tensor of a collective that was started. finish: gives it, once the backend is done."""

    __slots__ = ("started", "finish")

    def __init__(self, started: Started, finish: Callable[[], torch.Tensor]):
        self.started, self.finish = started, finish

    def wait(self) -> torch.Tensor:
        """The tensor. On CUDA the current stream waits, not the process."""
        self.started.wait()
        return self.finish()


def _run(name: str, tensor: torch.Tensor, group, start: Callable, finish: Callable[[], torch.Tensor], async_op: bool):
    future = Future(Started(name, (tensor,), group, start), finish)
    return future if async_op else future.wait()


def _reduction(op: str, group, device: torch.device) -> tuple[Any, int]:
    """The reduction that the backend carries out, and what its result is divided by: only NCCL averages itself in every
    version of PyTorch."""
    if op == "avg" and device.type != "cuda":
        return dist.ReduceOp.SUM, group.size()
    return getattr(dist.ReduceOp, op.upper()), 1


def _run_all_gather(a, group, async_op=False, dim=None):
    a = a.contiguous() if a.ndim else a.reshape(1)
    out = a.new_empty((a.shape[0] * group.size(), *a.shape[1:]))

    def finish():
        return out if not dim else torch.cat(out.chunk(group.size()), dim)

    return _run("all_gather", a, group, lambda: _gather(out, a, group=group, async_op=True), finish, async_op)


def _run_all_reduce(a, op, group, async_op=False):
    """Reduces a copy of the tensor over all ranks. The average of a backend without it is a sum that is divided."""
    out = a.clone(memory_format=torch.contiguous_format)
    reduction, divisor = _reduction(op, group, a.device)
    return _run(
        "all_reduce",
        out,
        group,
        lambda: dist.all_reduce(out, op=reduction, group=group, async_op=True),
        lambda: out.div_(divisor) if divisor != 1 else out,
        async_op,
    )


def _run_reduce_scatter(a, op, group, async_op=False, dim=None):
    """Reduces over all ranks, and keeps this rank's part along `dim`."""
    a = torch.cat(a.chunk(group.size(), dim)) if dim else a.contiguous()
    out = a.new_empty((a.shape[0] // group.size(), *a.shape[1:]))
    reduction, divisor = _reduction(op, group, a.device)
    return _run(
        "reduce_scatter",
        a,
        group,
        lambda: _scatter(out, a, op=reduction, group=group, async_op=True),
        lambda: out.div_(divisor) if divisor != 1 else out,
        async_op,
    )


def _run_broadcast(a, root, group, async_op=False):
    out = a.clone(memory_format=torch.contiguous_format)
    return _run(
        "broadcast",
        out,
        group,
        lambda: dist.broadcast(out, group_src=root, group=group, async_op=True),
        lambda: out,
        async_op,
    )


def _run_all_to_all(a, group, async_op=False):
    """Exchanges equal parts of the tensor: part i goes to rank i."""
    a = a.contiguous()
    out = torch.empty_like(a)
    return _run(
        "all_to_all",
        a,
        group,
        lambda: dist.all_to_all_single(out, a, group=group, async_op=True),
        lambda: out,
        async_op,
    )


def _run_all_gather_together(tensors, group):
    # two of Gloo's that take several tensors write over each other's memory when they run at once (PyTorch 2.13)
    if tensors[0].device.type != "cuda":
        return tuple(_run_all_gather(a, group, True) for a in tensors)
    tensors = [a.contiguous() for a in tensors]
    outs = [a.new_empty((a.shape[0] * group.size(), *a.shape[1:])) for a in tensors]
    started = Started("all_gather", tensors, group, lambda: group.allgather_into_tensor_coalesced(outs, tensors))
    return tuple(Future(started, lambda out=out: out) for out in outs)


def _run_reduce_scatter_together(tensors, op, group):
    tensors = [a.contiguous() for a in tensors]
    outs = [a.new_empty((a.shape[0] // group.size(), *a.shape[1:])) for a in tensors]
    options = dist.ReduceScatterOptions()
    options.reduceOp, divisor = _reduction(op, group, tensors[0].device)
    started = Started(
        "reduce_scatter", tensors, group, lambda: group.reduce_scatter_tensor_coalesced(outs, tensors, options)
    )
    return tuple(Future(started, lambda out=out: out.div_(divisor) if divisor != 1 else out) for out in outs)


def _run_all_reduce_together(tensors, op, own, group):
    outs = [
        a if mine and a.is_contiguous() else a.clone(memory_format=torch.contiguous_format)
        for a, mine in zip(tensors, own, strict=True)
    ]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp, divisor = _reduction(op, group, tensors[0].device)
    started = Started("all_reduce", outs, group, lambda: group.allreduce_coalesced(outs, options))
    return tuple(Future(started, lambda out=out: out.div_(divisor) if divisor != 1 else out) for out in outs)


# ----------------------------------------------------------------------------------------------------------------
# operations


def _spelled_op(op) -> str:
    """A reduction by its name: PyTorch's ReduceOp or the name itself."""
    name = str(op).rpartition(".")[2].lower()
    if name not in REDUCTIONS:
        raise OptionError(f"reduction {op!r} is none of those that programs have: {', '.join(REDUCTIONS)}")
    return name


def _with_group(meta: Callable) -> Callable:
    """(args, kwargs) of a call with the group, and the reduction where there is one, said."""
    signature = inspect.signature(meta)

    def arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        bound = signature.bind(*args, **kwargs)
        if "op" in signature.parameters:
            bound.arguments["op"] = _spelled_op(bound.arguments.get("op", "sum"))
        bound.arguments["group"] = group_of(bound.arguments.get("group"))
        return bound.args, bound.kwargs

    return arguments


def _typed(a: TensorProxy, out: TensorProxy, async_op: bool) -> TensorProxy:
    recorder = current_recorder()
    return (
        FutureTensorProxy.of(out, a.requires_grad and (recorder is None or recorder.context.grad_enabled))
        if async_op
        else out
    )


def _collective(run: Callable) -> Callable[[Callable], Symbol]:
    def define(meta: Callable) -> Symbol:
        symbol = torch_prim(name=meta.__name__, fn=run, canonicalize=_with_group(meta))(meta)
        symbol.explain = None  # asking PyTorch what is wrong would be a collective of this rank only
        return symbol

    return define


def _parts(n, dim, group, what: str):
    if n % group.size():
        raise CaptureError(
            f"{what}: size {n} of dimension {dim or 0} is not divisible by the {group.size()} ranks of the group",
            location=user_location(),
            remedy="pad it",
        )
    return n // group.size()


@_collective(_run_all_gather)
def all_gather(a, group=None, async_op=False, dim=None):
    """The tensors of all ranks, joined along `dim` (the first where it is None) in the order of ranks."""
    if not a.shape:
        return _typed(a, like(a, (group.size(),)), async_op)
    d = (dim or 0) % len(a.shape)
    return _typed(a, like(a, (*a.shape[:d], a.shape[d] * group.size(), *a.shape[d + 1 :])), async_op)


@_collective(_run_all_reduce)
def all_reduce(a, op="sum", group=None, async_op=False):
    """The sum, average, minimum, maximum or product over all ranks."""
    return _typed(a, like(a), async_op)


@_collective(_run_reduce_scatter)
def reduce_scatter(a, op="sum", group=None, async_op=False, dim=None):
    """This rank's part, along `dim` (the first where it is None), of the reduction over all ranks."""
    d = (dim or 0) % len(a.shape)
    return _typed(
        a, like(a, (*a.shape[:d], _parts(a.shape[d], d, group, "reduce_scatter"), *a.shape[d + 1 :])), async_op
    )


@_collective(_run_broadcast)
def broadcast(a, root, group=None, async_op=False):
    """The tensor of rank `root` of the group."""
    return _typed(a, like(a), async_op)


@_collective(_run_all_to_all)
def all_to_all(a, group=None, async_op=False):
    """Part i along the first dimension comes from rank i, which sent there the part with this rank's number."""
    _parts(a.shape[0], 0, group, "all_to_all")
    return _typed(a, like(a), async_op)


@torch_prim(name="wait", fn=lambda future: future.wait() if isinstance(future, Future) else future)
def wait(future):
    """The tensor that a future stands for; a tensor is itself."""
    return like(future) if isinstance(future, FutureTensorProxy) else future


wait.explain = None


def _together(name: str, run: Callable, meta: Callable) -> Symbol:
    """A collective of several tensors that starts as one, and gives a future of each: for passes, which write it when
    derivatives are there already."""
    return Symbol(
        name,
        lambda tensors, *rest: tuple(FutureTensorProxy.of(meta(a, rest[-1]), False) for a in tensors),
        module="ltorch",
        is_prim=True,
        fn=run,
    )


all_gather_together = _together(
    "all_gather_together", _run_all_gather_together, lambda a, group: like(a, (a.shape[0] * group.size(), *a.shape[1:]))
)
reduce_scatter_together = _together(
    "reduce_scatter_together",
    _run_reduce_scatter_together,
    lambda a, group: like(a, (a.shape[0] // group.size(), *a.shape[1:])),
)
# own: for each tensor whether nobody else reads it, so that it is overwritten
all_reduce_together = _together("all_reduce_together", _run_all_reduce_together, lambda a, group: like(a))


# ----------------------------------------------------------------------------------------------------------------
# derivatives


gradient_of_first(wait, lambda g, y, future: g)


@all_gather.vjp
def _(a, group=None, async_op=False, dim=None):
    g = yield all_gather(a, group, async_op, dim)
    g = reduce_scatter(g, "sum", group, False, dim)
    return (g if a.shape else ltorch.reshape(g, ()),)


@all_reduce.vjp
def _(a, op="sum", group=None, async_op=False):
    if op not in ("sum", "avg"):
        raise MissingImplementationError(f"all_reduce with {op} has no derivative: only sum and avg have")
    g = yield all_reduce(a, op, group, async_op)
    return (all_reduce(g, op, group, False),)


@reduce_scatter.vjp
def _(a, op="sum", group=None, async_op=False, dim=None):
    if op not in ("sum", "avg"):
        raise MissingImplementationError(f"reduce_scatter with {op} has no derivative: only sum and avg have")
    g = yield reduce_scatter(a, op, group, async_op, dim)
    g = all_gather(g, group, False, dim)
    return (g if op == "sum" else ltorch.true_divide(g, group.size()),)


@broadcast.vjp
def _(a, root, group=None, async_op=False):
    g = yield broadcast(a, root, group, async_op)
    g = all_reduce(g, "sum", group, False)
    # read on all ranks: a collective that one of them drops as dead code would leave the others waiting
    is_root = ltorch.full((), group.rank() == root, dtype=torch.bool, device=to_torch_device(g.device))
    return (ltorch.where(is_root, g, 0.0),)


gradient_of_first(all_to_all, lambda g, y, a, group=None, async_op=False: all_to_all(g, group, False))
