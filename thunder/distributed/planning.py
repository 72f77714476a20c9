"""`thunder.distributed.plan`: the bytes and seconds of a training step on many GPUs, without running it and
without the GPUs.

The program is the one that would run. A copy of the module on the meta device is given the placements of `ddp` or
`fsdp` over a group that stands for one of any size, and goes through the same capture, the same passes and the
executors of the GPU; what comes out is walked along, operation by operation (`thunder.distributed.costs`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thunder import compat
from thunder.api import jit_with
from thunder.capture import Captured, FailsWithParts, Request, capture
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy, proxies_in
from thunder.core.tables import table
from thunder.core.trace import Trace
from thunder.core.utils import compiling
from thunder.distributed.boundary import local_of
from thunder.distributed.costs import H200, Clock, Collective, Machine, Memory
from thunder.distributed.data_parallel import check_bucket_size, check_member, module_of, replicated, sharded
from thunder.distributed.layouts import Axis, PlannedGroup
from thunder.distributed.placement import (
    FSDPBucketingStrategy,
    FSDPType,
    Placement,
    place,
    placed_parameters,
    placement_of,
    placing_copies,
)
from thunder.errors import OptionError
from thunder.extend import add_executor_lists, get_always_executors, get_default_executors
from thunder.options import FALLBACK_OPTIONS, NUMERICS_OPTIONS, JitOptions
from thunder.pipeline import PASSES, asked_for, lower, lower_with_derivatives
from thunder.transforms.base import Transform
from thunder.transforms.cudagraph import CUDAGraphTransform

GIB, MIB = 2**30, 2**20

# optimizers, by how many numbers as large as a parameter they keep
OPTIMIZERS = {"sgd": 0, "sgd momentum": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class Plan:
    """A training step as one rank sees it. Bytes and seconds; printed as a table.

    parameters, gradients, optimizer: what the rank holds between steps. others: buffers and inputs. saved: what the
    forward saves for the backward, without parameters. gathered: parameters of other ranks, when most are there. peak:
    all that is allocated at a time, at most. unknown: how many pieces of PyTorch's autograd graph are saved, whose
    bytes are not in here. Not counted is what libraries keep for themselves (NCCL's buffers, workspaces of cuBLAS), nor
    what the allocator loses between tensors.

    collectives: of each kind. seconds: of the step. busy: in which it computes. waiting: in which it waits for
    collectives and computes nothing.
    """

    strategy: str
    world_size: int
    machine: Machine
    parameters: int
    gradients: int
    optimizer: int
    others: int
    saved: int
    gathered: int
    peak: int
    unknown: int
    collectives: tuple[Collective, ...]
    seconds: float
    busy: float
    waiting: float

    @property
    def communicated(self) -> int:
        """Bytes of all collectives."""
        return sum(c.nbytes for c in self.collectives)

    def __str__(self) -> str:
        rows = [
            (what, f"{getattr(self, what) / MIB:12,.1f} MiB")
            for what in ("parameters", "gradients", "optimizer", "others", "saved", "gathered", "peak")
        ]
        lines = [
            f"{self.strategy} on {self.world_size} x {self.machine.name}, bytes of one rank; times are projected",
            *(f"  {a:15}{b}" for a, b in rows),
        ]
        lines += [
            f"  {c.kind:15}{c.nbytes / MIB:12,.1f} MiB in {c.count} calls, {c.seconds * 1e3:.2f} ms"
            for c in self.collectives
        ]
        lines.append(
            f"  {'step':15}{self.seconds * 1e3:12,.2f} ms, of which {self.busy * 1e3:.2f} computing and "
            f"{self.waiting * 1e3:.2f} waiting for collectives"
        )
        if self.unknown:
            lines.append(f"  and {self.unknown} pieces of PyTorch's autograd graph that are saved, of unknown size")
        return "\n".join(lines)


class Plans(tuple):
    """Plans of one program for several numbers of GPUs, printed as one table."""

    def __str__(self) -> str:
        first: Plan = self[0]
        head = (
            "GPUs", "parameters", "gradients", "optimizer", "saved", "gathered", "peak GiB", "communicated GiB",
            "step ms", "computing", "waiting",
        )  # fmt: skip
        rows = [
            (
                f"{p.world_size}", *(f"{n / GIB:.2f}" for n in (p.parameters, p.gradients, p.optimizer, p.saved,
                    p.gathered, p.peak, p.communicated)),
                *(f"{s * 1e3:.1f}" for s in (p.seconds, p.busy, p.waiting)),
            )
            for p in self
        ]  # fmt: skip
        title = f"{first.strategy} on {first.machine.name}, one rank; times are projected"
        return f"{title}\n{table(head, rows, right=range(len(head)))}"


def plan(
    model,
    inputs: Any,
    *,
    world_size: int | Sequence[int],
    sharding_strategy: FSDPType | None = FSDPType.ZERO2,
    bucketing_strategy: FSDPBucketingStrategy = FSDPBucketingStrategy.NONE,
    bucket_size_in_mb: float = 25.0,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    shards: int | None = None,
    optimizer: str | int = "adamw",
    machine: Machine = H200,
    device: str = "cuda",
) -> Plan | Plans:
    """Projects the memory and time of a training step of `thunder.jit(fsdp(model))`, or of `ddp`.

    Nothing runs, no process group is needed, and the model does not change.

    Args:
        model: A module, on any device or on the meta device, or a compiled module, which is planned with its options.
            If `column_parallel` or `row_parallel` has prepared it, the world size is a multiple of the number of these
            ranks.
        inputs: The inputs of one rank: a tuple of positional arguments, a dict of keyword arguments, or one argument.
            Only shapes and dtypes of tensors are used. Under torch.no_grad() the plan is that of the forward.
        world_size: The number of GPUs, or several numbers, each of which gets a plan.
        sharding_strategy: That of `fsdp`. None plans `ddp`.
        bucketing_strategy: That of `fsdp`.
        bucket_size_in_mb: That of `ddp`.
        dtype: That of `fsdp`.
        reduce_dtype: That of `fsdp`.
        shards: Over how many ranks parameters are sharded, as on a DeviceMesh of (world_size // shards, shards) whose
            neighbouring ranks are in one node. None means all ranks.
        optimizer: "adamw", "adam", "sgd", "sgd momentum", or the number of bytes of its state for each parameter.
        machine: The machine of the projected times.
        device: "cuda", or "cpu" for the program that runs on CPUs.

    Returns:
        A plan, or a table of plans for several world sizes.

    Raises:
        TypeError: If `model` is not a module.
        RuntimeError: If the module is already distributed.
        OptionError: If `shards` does not divide the world size, or another option is invalid.
        CaptureError: If the model cannot be captured. Exceptions of the model are not changed.
    """
    sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
    if not sizes:
        raise OptionError("world_size is not a number of GPUs")
    module = module_of(model, "plan")
    state = state_of(optimizer)
    if sharding_strategy is not None:
        check_member(FSDPType, sharding_strategy, "sharding_strategy")
    elif unused := [
        name
        for name, value in (("dtype", dtype), ("reduce_dtype", reduce_dtype), ("shards", shards))
        if value is not None
    ]:
        raise OptionError(
            f"sharding_strategy=None plans ddp, which has no option {unused[0]}: leave it out, or give a strategy of "
            "fsdp"
        )
    check_member(FSDPBucketingStrategy, bucketing_strategy, "bucketing_strategy")
    check_bucket_size(bucket_size_in_mb)
    args, kwargs = (
        ((), dict(inputs))
        if isinstance(inputs, Mapping)
        else (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})
    )
    options = _options(model, device)
    split = {held.axis for _, q in placed_parameters(module) for held in q.axes}
    ranks = math.prod(axis.size for axis in split)  # that compute with the same data
    plans = []
    for size in sizes:
        groups = _groups(size, shards, ranks)
        if sharding_strategy is None and split and size == ranks:  # nothing but split layers
            strategy, prepare = "split layers", lambda name, p: placement_of(p)
        elif sharding_strategy is None:
            strategy, prepare = "ddp", lambda name, p, groups=groups: replicated(name, p, groups[-1], bucket_size_in_mb)
        else:
            strategy = f"fsdp {sharding_strategy.name}" + (f" over {shards}" if shards is not None else "")
            prepare = lambda name, p, groups=groups: sharded(
                name, p, groups, sharding_strategy, bucketing_strategy, dtype, reduce_dtype
            )  # noqa: E731
        with compiling():
            with placing_copies():
                compiled = _compiled(module, options, prepare)
                captured, chosen = _captured(compiled, args, kwargs, options)
            plans.append(_planned(strategy, size, machine, captured, chosen, _Held(compiled, args, kwargs, state)))
    return plans[0] if isinstance(world_size, int) else Plans(plans)


# ---------------------------------------------------------------------------------------------------------------- the
# program


def _options(model, device: str) -> JitOptions:
    """Those of a compiled module, or the default ones, for programs on a device that need not be here."""
    if device not in ("cuda", "cpu"):
        raise OptionError(f"device={device!r} is not an option; valid: 'cuda', 'cpu'")
    compiled = getattr(model, "_lc_cd", None)
    options = JitOptions(passes=PASSES) if compiled is None else compiled.options
    executors = options.executors
    if options.default_executors:
        here, there = (
            add_executor_lists(get_default_executors(on_gpus), get_always_executors())
            for on_gpus in (False, device == "cuda")
        )
        eager = options.numerics is NUMERICS_OPTIONS.EAGER
        executors = (*(e for e in executors if e not in here), *(e for e in there if e.exact or not eager))
    if any(isinstance(t, CUDAGraphTransform) for t in options.transforms):
        raise OptionError(
            "thunder.distributed.plan: what CUDA graphs keep in memory is known when they are recorded: plan the "
            "module without CUDAGraphTransform"
        )
    # lines that run as they are would run on meta tensors
    options = dataclasses.replace(
        options, device=Device(device), used_compile_options={}, fallback=FALLBACK_OPTIONS.ERROR
    )
    options.executors = tuple(e.configured(options).planned() for e in executors)
    return options


def _groups(size: int, shards: int | None, ranks: int) -> tuple:
    """Fake groups in the place of those that parameters are replicated over, and last the one that they are sharded
    over. ranks: over how many ranks layers are split."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"world_size={size!r} is not an option; valid: numbers of GPUs, 1 or more")
    if size % ranks:
        raise OptionError(
            f"world_size={size!r} is not an option for layers that are split over {ranks} ranks; valid: multiples of it"
        )
    size //= ranks
    if shards is None or shards == size:
        return (PlannedGroup(size, ranks),)
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1 or size % shards:
        raise OptionError(f"shards={shards!r} is not an option for {size} GPUs; valid: a number that divides {size}")
    return PlannedGroup(size // shards, shards * ranks), PlannedGroup(shards, ranks)


def on_meta(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module on the meta device, whose parameters are held as those of the module."""
    known: dict[int, Any] = {}
    groups: dict[int, PlannedGroup] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(local_of(tensor), device="meta", requires_grad=False)
        known[id(tensor)] = (
            torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
        )
        if (split := placement_of(tensor)) is not None:  # a part of a layer
            axes = tuple(dataclasses.replace(held, axis=_planned_axis(held.axis, groups)) for held in split.axes)
            place(known[id(tensor)], dataclasses.replace(split, axes=axes))
    return copy.deepcopy(module, known)


def _planned_axis(axis: Axis, groups: dict[int, PlannedGroup]) -> Axis:
    """An axis over a group that stands for the axis's own, where that is one of processes. groups: those that stand for
    others, by the id of these."""
    if isinstance(axis.group, PlannedGroup):
        return axis
    if (planned := groups.get(id(axis.group))) is None:
        ranks = dist.get_process_group_ranks(axis.group)
        planned = groups[id(axis.group)] = PlannedGroup(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    return Axis(planned, axis.name, axis.reduction, axis.outside, axis.groups, axis.folded)


def _compiled(
    module: torch.nn.Module, options: JitOptions, prepare: Callable[[str, torch.Tensor], Placement | None]
) -> torch.nn.Module:
    """A copy of a module on the meta device, compiled, with what a rank holds in the place of its parameters."""
    compiled = jit_with(on_meta(module), options)
    for name, parameter in compiled.named_parameters():
        placement = prepare(name, parameter)
        if placement is not None:
            parameter.data = placement.part_of(parameter.detach(), placement_of(parameter))
            place(parameter, placement)
    return compiled


def trace_to_plan(module: torch.nn.Module, args: tuple, kwargs: dict, device: str) -> Trace:
    """A module's program as plans read it, before it is lowered; it knows its parameters by name."""
    options = dataclasses.replace(_options(module, device), transforms=(Transform(),))
    with compiling():
        return _captured(jit_with(module, options), args, kwargs, options)[0].computation


def _captured(compiled, args: tuple, kwargs: dict, options: JitOptions) -> tuple[Captured, JitOptions]:
    overrides = compiled._lc_cd.overrides
    try:
        with _as_on_gpus(options):
            captured = capture(Request(compiled._lc_original, args, kwargs, options, overrides=overrides))
    except FailsWithParts as failure:
        raise failure.__cause__ from failure.__cause__.__cause__  # type: ignore[misc,union-attr]
    captured.transform(options, overrides, compiled)
    captured.close()
    return captured, asked_for(captured.computation, options)


@contextlib.contextmanager
def _as_on_gpus(options: JitOptions) -> Iterator[None]:
    """Where a program for GPUs is planned without one, models that ask for the GPU's capability are told Hopper's."""
    if options.device.type != "cuda" or torch.cuda.is_available():
        yield
        return
    usual, torch.cuda.get_device_capability = torch.cuda.get_device_capability, lambda device=None: (9, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = usual


class _Held:
    """Bytes that a rank has before a step and after it."""

    def __init__(self, module: torch.nn.Module, args: tuple, kwargs: dict, state: Callable[[torch.Tensor], int]):
        parameters = list(module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        inputs = [t for t in compat.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self.parameters = sum(p.nbytes for p in parameters)
        self.trained = sum(p.nbytes for p in trained)
        self.optimizer = sum(map(state, trained))
        self.others = sum(t.nbytes for t in (*module.buffers(), *inputs))


def state_of(optimizer: str | int) -> Callable[[torch.Tensor], int]:
    """(parameter) -> bytes of the optimizer's state for it, without counters of steps."""
    if isinstance(optimizer, int) and not isinstance(optimizer, bool) and optimizer >= 0:
        return lambda p: optimizer * p.numel()
    if optimizer not in OPTIMIZERS:
        raise OptionError(
            f"optimizer={optimizer!r} is not an option; valid: {', '.join(map(repr, OPTIMIZERS))}, or bytes for each "
            "number of a parameter"
        )
    return lambda p: OPTIMIZERS[optimizer] * p.nbytes


# ---------------------------------------------------------------------------------------------------------------- the
# step


def _planned(strategy: str, size: int, machine: Machine, captured: Captured, options: JitOptions, held: _Held) -> Plan:
    """Time and memory of a step under one strategy, by the programs that would run."""
    computation = captured.computation
    trains = captured.output_requires_grad and not options.disable_torch_autograd
    memory = Memory(options.device.type, (p.name for p in computation.args if isinstance(p, TensorProxy)))
    clock = Clock(machine)
    saved = unknown = gradients = 0
    if trains:
        forward, backward, cut = lower_with_derivatives(computation, options, options.executors)
        memory.run(forward[-1])
        outputs, (tensors, _) = forward[-1].output
        memory.keep({p.name for p in proxies_in(outputs, [])})
        memory.hand_over([(p.name, saved.name) for p, saved in zip(tensors, cut.saved_tensors, strict=True)])
        saved = memory.bytes_of({p.name for p in cut.saved_tensors})
        unknown = sum(not isinstance(p, TensorProxy) for p in cut.saved_others)
        clock.run(forward[-1].bound_symbols)
        memory.run(backward[-1])
        clock.run(backward[-1].bound_symbols)
        gradients = memory.bytes_of({p.name for p in backward[-1].output_proxies})
        # an optimizer reads parameters, gradients and its state, and writes all but gradients
        clock.compute((2 * held.trained + gradients + 2 * held.optimizer) / machine.update + machine.launch)
    else:
        trace = lower(computation, options, options.executors)[-1]
        memory.run(trace)
        clock.run(trace.bound_symbols)
    optimizer = held.optimizer if trains else 0
    return Plan(
        strategy=strategy, world_size=size, machine=machine, parameters=held.parameters, gradients=gradients,
        optimizer=optimizer, others=held.others, saved=saved,
        gathered=memory.most_gathered, peak=held.parameters + held.others + optimizer + memory.peak, unknown=unknown,
        collectives=tuple(sorted(clock.collectives.values(), key=lambda c: c.kind)), seconds=clock.computed,
            busy=clock.busy, waiting=clock.waiting,
    )  # fmt: skip
