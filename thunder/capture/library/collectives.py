"""Collectives that a program calls: `torch.distributed`'s, which write to their arguments, its functional ones, and
those of `torch.distributed.nn`.

They become the operations of `thunder.ops.families.collectives`, so that they have derivatives where PyTorch has none.
A started one gives an object of the program, whose `wait()` writes the result. Functions that are no collectives of a
whole group (send, barrier, objects) would be left out when the program runs again: they are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from thunder import compat
from thunder.capture.interface import Capture
from thunder.capture.library import dtensors
from thunder.capture.world import IDENTITY, SHARDED_WITH
from thunder.compat.names import FUNCTIONAL_COLLECTIVES
from thunder.core.proxies import TensorProxy, map_structure, proxies_in
from thunder.core.symbol import user_location
from thunder.distributed.placement import placed_parameters, synchronizes
from thunder.distributed.prepared import is_adopted, renew
from thunder.errors import CaptureError
from thunder.ops import ltorch
from thunder.ops.families.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    group_of,
    reduce_scatter,
    wait,
)
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.torch_types import from_tensor_dtype, to_torch_device


class Work:
    """The result of a collective that was started with `async_op=True`."""

    def __init__(self, pairs: list[tuple[TensorProxy, TensorProxy]]):
        self._pairs = pairs

    def wait(self, timeout=None) -> bool:
        """Write the collective's results to the program's tensors, once."""
        for target, future in self._pairs:
            overwrite(target, wait(future))
        self._pairs = []
        return True


def _root(src, group, group_src) -> int:
    return dist.get_group_rank(group_of(group), src) if group_src is None else group_src


def _parts(joined: TensorProxy, like: list) -> list:
    return ltorch.unbind(ltorch.reshape(joined, (len(like), *like[0].shape)), 0)


def _same_splits(*splits) -> None:
    if any(s is not None and len(s) and len(set(s)) > 1 for s in splits):
        raise CaptureError(
            "all_to_all_single with parts of different sizes is called inside of it",
            location=user_location(),
            remedy="pad the parts, or call it outside of the compiled function",
        )


# ---------------------------------------------------------------- those that write: pairs (target, value)


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    return [(tensor, all_reduce(tensor, op, group, async_op))]


def _broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    return [(tensor, broadcast(tensor, _root(src, group, group_src), group, async_op))]


def _all_gather_into(output_tensor, input_tensor, group=None, async_op=False):
    joined = all_gather(input_tensor, group, async_op)
    if len(output_tensor.shape) > len(input_tensor.shape):
        joined = ltorch.reshape(wait(joined), output_tensor.shape)
    return [(output_tensor, joined)]


def _all_gather(tensor_list, tensor, group=None, async_op=False):
    joined = all_gather(tensor, group)
    return list(zip(tensor_list, _parts(joined, tensor_list), strict=True))


def _reduce_scatter_into(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if len(input.shape) > len(output.shape):
        input = ltorch.flatten(input, 0, 1)
    return [(output, reduce_scatter(input, op, group, async_op))]


def _reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
    part = reduce_scatter(ltorch.stack(input_list), op, group)
    return [(output, ltorch.reshape(part, output.shape))]


def _all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    _same_splits(output_split_sizes, input_split_sizes)
    return [(output, all_to_all(input, group, async_op))]


def _all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    return list(
        zip(
            output_tensor_list,
            _parts(all_to_all(ltorch.stack(input_tensor_list), group), output_tensor_list),
            strict=True,
        )
    )


_WRITING = {
    "all_reduce": _all_reduce, "broadcast": _broadcast, "all_gather_into_tensor": _all_gather_into,
    "all_gather_single": _all_gather_into, "all_gather": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter_into, "reduce_scatter_single": _reduce_scatter_into,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all_single, "all_to_all": _all_to_all,
}  # fmt: skip
_REFUSED = (
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "reduce", "gather", "scatter", "barrier",
    "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip

# ---------------------------------------------------------------- those that return values


def _gathered_along(tensor, gather_dim, group, tag=""):
    return all_gather(tensor, group, False, gather_dim)


def _scattered_along(tensor, reduceOp, scatter_dim, group, tag=""):
    return reduce_scatter(tensor, reduceOp, group, False, scatter_dim)


def _exchanged(tensor, output_split_sizes, input_split_sizes, group, tag=""):
    _same_splits(output_split_sizes, input_split_sizes)
    return all_to_all(tensor, group)


_FUNCTIONAL = {
    "all_reduce": lambda tensor, reduceOp, group, tag="": all_reduce(tensor, reduceOp, group),
    "broadcast": lambda tensor, src, group, tag="": broadcast(tensor, _root(src, group, None), group),
    "all_gather_tensor": _gathered_along, "all_gather_tensor_autograd": _gathered_along,
    "all_gather_single": _gathered_along, "all_gather_single_autograd": _gathered_along,
    "reduce_scatter_tensor": _scattered_along, "reduce_scatter_tensor_autograd": _scattered_along,
    "reduce_scatter_single": _scattered_along,
    "reduce_scatter_single_autograd": _scattered_along, "all_to_all_single": _exchanged,
    "all_to_all_single_autograd": _exchanged, "wait_tensor": lambda tensor: wait(tensor),
}  # fmt: skip


def _gathered(tensor, group=None):
    return tuple(
        _parts(all_gather(ltorch.reshape(tensor, (1, *tensor.shape)), group), [tensor] * group_of(group).size())
    )


_OF_NN = {
    "all_reduce": lambda tensor, op=dist.ReduceOp.SUM, group=None: all_reduce(tensor, op, group),
    "broadcast": lambda tensor, src, group=None: broadcast(tensor, _root(src, group, None), group),
    "all_gather": _gathered,
    "reduce_scatter": lambda output, input_list, op=dist.ReduceOp.SUM, group=None: ltorch.reshape(
        reduce_scatter(ltorch.stack(input_list), op, group), output.shape
    ),
    "all_to_all": lambda output_tensor_list, input_tensor_list, group=None: tuple(
        _parts(all_to_all(ltorch.stack(input_tensor_list), group), output_tensor_list)
    ),
}


# ---------------------------------------------------------------- handlers


def handlers() -> dict[Callable, Callable]:
    """function of torch.distributed -> handler, of those modules that are imported."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    by_function = {getattr(dist, n): _writing(f) for n, f in _WRITING.items() if hasattr(dist, n)} | {
        getattr(dist, n): _refuse for n in _REFUSED if hasattr(dist, n)
    }
    by_function[torch.nn.parallel.DistributedDataParallel.forward] = _call_data_parallel
    if (tensor := sys.modules.get("torch.distributed.tensor")) is not None:
        by_function |= {tensor.DTensor.from_local: dtensors.from_local, tensor.distribute_tensor: _refuse_dtensor}
    if (hooks := compat.fully_shard_hooks()) is not None:
        by_function |= dict(zip(hooks, (_before_fully_sharded, _behind_fully_sharded), strict=True))
    for module, table in ((FUNCTIONAL_COLLECTIVES, _FUNCTIONAL), ("torch.distributed.nn.functional", _OF_NN)):
        if module in sys.modules:
            by_function |= {
                getattr(sys.modules[module], n): _returning(f)
                for n, f in table.items()
                if hasattr(sys.modules[module], n)
            }
    return by_function


def _values(c: Capture, value):
    """An argument as the operations take it; a process group of the user's is guarded by identity."""
    from thunder.capture.operations import lifted

    def guarded(x):
        if isinstance(x, dist.ProcessGroup | dist.device_mesh.DeviceMesh) and id(x) in c.world.sources:
            c.world.ask(c.world.sources[id(x)], IDENTITY)
        return x

    return map_structure(guarded, lifted(c, value))


def _bound(c: Capture, function: Callable, args, kwargs) -> dict:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    c.synchronize()
    return {n: _values(c, a) for n, a in zip(names, args)} | {n: _values(c, a) for n, a in kwargs.items()}


def _writing(function: Callable) -> Callable:
    def handler(c: Capture, f, args, kwargs):
        arguments = _bound(c, function, args, kwargs)
        work = Work(function(**arguments))
        if arguments.get("async_op"):
            return work
        work.wait()

    return handler


def _returning(function: Callable) -> Callable:
    return lambda c, f, args, kwargs: function(**_bound(c, function, args, kwargs))


def _refuse(c: Capture, f, args, kwargs):
    c.refuse(
        f"torch.distributed.{f.__name__} is called inside of it",
        "call it outside of the compiled function, or use a collective of all ranks of a group",
    )


def refuse_wrapper(c: Capture, f, args, kwargs):
    """A module of PyTorch's FSDP or DDP is called: a program would hold the state of its communication as it was."""
    name = type(args[0]).__name__
    c.refuse(
        f"{name}, a wrapper of PyTorch's that communicates by effects on its own state, is called inside of it",
        "compile the module first and wrap the result, or use thunder.distributed (ddp, fsdp)",
    )


def _call_data_parallel(c: Capture, f, args, kwargs):
    """The forward of a DistributedDataParallel: the program averages gradients in the place of its reducer."""
    wrapper, *inputs = args
    if not is_adopted(wrapper):
        refuse_wrapper(c, f, args, kwargs)
    if torch.is_grad_enabled() and not c.load_attr(wrapper, "require_backward_grad_sync"):
        c.refuse(
            "a DistributedDataParallel module is called under its own no_sync()",
            "use no_sync() of what thunder.jit returned, or thunder.distributed.no_sync(module)",
        )
    if c.load_attr(c.load_attr(wrapper, "_join_config"), "enable"):
        c.refuse("a DistributedDataParallel is called under its join()", "give all ranks as many batches")
    devices = wrapper.device_ids and {torch.device(wrapper.device_type, wrapper.device_ids[0])}
    for x in proxies_in((inputs, kwargs), []):
        if devices and isinstance(x, TensorProxy) and to_torch_device(x.device) not in devices:
            c.refuse("a DistributedDataParallel with device_ids is called with tensors elsewhere", "move them before")
    module, is_due = c.load_attr(wrapper, "module"), c.load_attr(wrapper, "require_forward_param_sync")
    if is_due and compat.broadcasts_buffers(wrapper):
        synchronize = _writing(_broadcast)
        for path, owner in module.named_modules():
            inner = functools.reduce(c.load_attr, path.split(".") if path else (), module)
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    given_buffer = c.load_attr(inner, name), None, wrapper.process_group, False, 0
                    with torch.no_grad():
                        synchronize(c, dist.broadcast, given_buffer, {})
    output = c.call(module, inputs, kwargs)
    with compat.DisableTorchFunction():
        placements = [q for _, q in placed_parameters(wrapper) if q.synchronizes]
    averages = torch.is_grad_enabled() and any(map(synchronizes, placements))
    if is_due != averages:  # buffers are broadcast in the first call behind one that averages gradients
        c.store_attr(wrapper, "require_forward_param_sync", averages)
    return output


def _before_fully_sharded(c: Capture, f, args, kwargs):
    """The hook in front of a module's forward: programs gather parameters, and it casts."""
    state, module, positional, named = args
    options = c.world.ask(c.world.sources[id(module)], SHARDED_WITH)
    for name in (name for _, others in options for name in others):
        c.refuse(f"fully_shard's {name} is in effect", "use no_sync() of what thunder.jit returned" * ("sync" in name))
    renew(module)
    dtype, _ = compat.mixed_precision_of(state)
    return _cast(c, positional, dtype), _cast(c, named, dtype)


def _behind_fully_sharded(c: Capture, f, args, kwargs):
    state, _, _, output = args
    return _cast(c, output, compat.mixed_precision_of(state)[1])


def _cast(c: Capture, values, dtype: torch.dtype | None):
    """Values of a program, floating ones in a dtype."""
    c.synchronize()
    is_floating = lambda x: type(x) is TensorProxy and x.is_floating_point()
    return (
        values
        if dtype is None
        else map_structure(lambda x: ltorch.to(x, dtype=from_tensor_dtype(dtype)) if is_floating(x) else x, values)
    )


def _refuse_dtensor(c: Capture, f, args, kwargs):
    c.refuse(
        f"{f.__qualname__} is called inside of it, and programs have no values that are DTensors",
        "create DTensors outside of the compiled function, or use thunder.distributed (fsdp, column_parallel, "
        "row_parallel) in the place of parallelize_module",
    )
