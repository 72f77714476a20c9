"""Checkpoints of distributed modules and their optimizers, by `torch.distributed.checkpoint`: saved on some number of
ranks, loaded on any other.

    state = {"model": get_model_state_dict(model, StateDictOptions()), "optimizer": get_optimizer_state_dict(model,
    optimizer, StateDictOptions())}
    save(state, folder)                                                    # on every rank
    load(state, folder)                                                    # into the memory that the state dicts show
    load_model_state_dict(state["model"], model, StateDictOptions())
    load_optimizer_state_dict(state["optimizer"], model, optimizer, StateDictOptions())

    saving = async_save(state, folder)  # training goes on; saving.result() waits, and raises what the save raises

Keys are those of the module before it was distributed. Parts are DTensors, the module's own; a full state dict has
whole tensors.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torchs

from thunder import compat
from thunder.distributed.boundary import local_of
from thunder.distributed.checkpoint_files import Planner, check_description
from thunder.distributed.placement import is_dtensor, placed_parameters
from thunder.ops.families.lost_ranks import failed, introduce


@dataclass(frozen=True)
class StateDictOptions:
    """full_state_dict: whole tensors instead of shards. strict: keys have to be the module's. cpu_offload: tensors are
    copied to the CPU. rank0_only: with whole tensors, rank 0 has them and the others an empty dict; loading, rank 0's
    are used."""

    full_state_dict: bool = False
    strict: bool = True
    cpu_offload: bool = False
    rank0_only: bool = False

    def __post_init__(self):
        if self.rank0_only and not self.full_state_dict:
            raise ValueError("rank0_only is for whole tensors: set full_state_dict")


def has_fsdp_modules(module: torch.nn.Module) -> bool:
    """Whether a parameter of the module, compiled or not, is a shard."""
    return any(placement.is_sharded for _, placement in placed_parameters(_original(module)))


def _original(module: torch.nn.Module) -> torch.nn.Module:
    return getattr(module, "_lc_original", module)


# ----------------------------------------------------------------------------------------------------------------
# one tensor


def _out(value: Any, options: StateDictOptions) -> Any:
    """How a tensor of a module or an optimizer stands in a state dict."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if options.full_state_dict and is_dtensor(value):
        value = value.full_tensor()  # type: ignore[attr-defined]
    return value.cpu() if options.cpu_offload else value


def _in(value: Any, held: torch.Tensor | None, name: str) -> Any:
    """A value in a state dict as the ranks hold `held`. Raises RuntimeError where it does not fit."""
    if not isinstance(value, torch.Tensor) or held is None:
        return value
    if value.shape != held.shape:
        raise RuntimeError(
            f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {held.shape}."
        )
    if is_dtensor(value) and not any(part.is_shard() for part in value.placements):  # type: ignore[attr-defined]
        value = local_of(value)
    if not is_dtensor(value):
        return value if not is_dtensor(held) else _part_of(value, held)
    if _layout(value) != _layout(held):
        raise RuntimeError(
            f"{name} is a part of one on {_spoken(value)}, and is loaded by one on {_spoken(held)}: use save and load, "
            "or full state dicts"
        )
    return value


def _part_of(whole: torch.Tensor, held: Any) -> torch.Tensor:
    """What the ranks hold of a tensor that each of them has."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(held.device), held.device_mesh, held.placements, src_data_rank=None)


def _layout(tensor: Any) -> tuple | None:
    return (tuple(tensor.device_mesh.shape), tensor.placements) if is_dtensor(tensor) else None


def _spoken(tensor: Any) -> str:
    if not is_dtensor(tensor):
        return "1 rank"
    along = [f"dimension {part.dim}" for part in tensor.placements if part.is_shard()]
    return f"{' x '.join(map(str, tensor.device_mesh.shape))} ranks along {' and '.join(along) or 'none'}"


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# ----------------------------------------------------------------------------------------------------------------
# modules


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    return module.state_dict(keep_vars=True)


@torch.no_grad()
def get_model_state_dict(
    module: torch.nn.Module, options: StateDictOptions | None = None, rank: int | None = None
) -> dict[str, Any]:
    """Parameters and buffers by name. Every rank calls it; rank: accepted as in the interface of 2024, the process
    group knows it."""
    options = options or StateDictOptions()
    state = {name: _out(value, options) for name, value in _tensors(module).items()}
    return state if _is_first() or not options.rank0_only else {}


@torch.no_grad()
def load_model_state_dict(
    state_dict: dict[str, Any],
    module: torch.nn.Module,
    options: StateDictOptions | None = None,
    rank: int | None = None,
) -> None:
    """Fills a module from a state dict of shards, or of whole tensors. Every rank calls it.

    Raises RuntimeError, in PyTorch's words, for missing and unexpected keys where `strict`, and for tensors that do not
    fit; nothing is loaded then.
    """
    options, own = options or StateDictOptions(), _tensors(module)
    entries = _from_first(state_dict, own) if options.rank0_only and dist.is_initialized() else state_dict
    missing, unexpected = [k for k in own if k not in entries], [k for k in entries if k not in own]
    if options.strict and (missing or unexpected):
        said = [
            f"{what} key(s) in state_dict: {', '.join(map(repr, keys))}. "
            for what, keys in (("Missing", missing), ("Unexpected", unexpected))
            if keys
        ]
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(_original(module)).__name__}:\n\t" + "\n\t".join(said)
        )
    values = {k: _in(entries[k], t if isinstance(t, torch.Tensor) else None, k) for k, t in own.items() if k in entries}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            local_of(own[name]).copy_(local_of(value))
    rest = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
    if rest:  # extra state of submodules
        module.load_state_dict(rest, strict=False)


def _from_first(state_dict: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's state dict on every rank, where tensors are on the devices of the module's."""
    said = [
        {k: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for k, v in state_dict.items()}
        if _is_first()
        else None
    ]
    dist.broadcast_object_list(said, src=0)
    state = {}
    for name, value in said[0].items():
        target = own.get(name)
        if not isinstance(target, torch.Tensor):
            state[name] = value
            continue
        shape, dtype = value
        state[name] = (
            state_dict[name].to(target.device).contiguous()
            if _is_first()
            else torch.empty(shape, dtype=dtype, device=target.device)
        )
        dist.broadcast(state[name], src=0)
    return state


# ----------------------------------------------------------------------------------------------------------------
# optimizers


def _state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own tensors. PyTorch makes those of a new optimizer by a step with gradients of zero, which would
    count as one."""
    new = not optimizer.state
    state = torchs.get_optimizer_state_dict(_original(module), optimizer)
    if new:
        optimizer.state.clear()
    return state


@torch.no_grad()
def get_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The optimizer's state by the names of parameters, `{"state": {name: {...}}, "param_groups": [...]}`. Every rank
    calls it. Before the first step it is one to load into."""
    options = options or StateDictOptions()
    optimizer_state = _state_of(module, optimizer)
    optimizer_state["state"] = {
        name: {k: _out(v, options) for k, v in state.items()} for name, state in optimizer_state["state"].items()
    }
    return optimizer_state if _is_first() or not options.rank0_only else {}


@torch.no_grad()
def load_optimizer_state_dict(
    state_dict: dict[str, Any],
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: StateDictOptions | None = None,
) -> None:
    """Fills an optimizer of the module's parameters. Every rank calls it. Raises RuntimeError for state that does not
    fit a parameter."""
    options = options or StateDictOptions()
    if options.rank0_only and dist.is_initialized():
        boxed = [state_dict if _is_first() else None]
        dist.broadcast_object_list(boxed, src=0)
        state_dict = boxed[0]
    held = _state_of(module, optimizer)["state"]
    state = {}
    for name, values in state_dict["state"].items():
        own = held.get(name, {})
        state[name] = {k: _in(v, own.get(k), f"{k} of {name}") for k, v in values.items()}
    torchs.set_optimizer_state_dict(
        _original(module), optimizer, {"state": state, "param_groups": state_dict["param_groups"]}
    )


# ---------------------------------------------------------------------------------------------------------------- files


def _written(path: Path) -> bool:
    """Whether a checkpoint is complete: the description of what is in it is written last."""
    return (path / ".metadata").exists()


@contextlib.contextmanager
def _alone_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def save(state_dict: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Writes a state dict, nested or not, to the folder `path`. Every rank calls it; options go to
    `torch.distributed.checkpoint.save`.

    The checkpoint that is there stays until the new one is complete: who is interrupted leaves the old one, which
    `load` finds. Raises CollectiveError where a rank ends meanwhile.
    """
    _wait_for_last()
    _save(state_dict, Path(path), None, options)


def async_save(state_dict: dict[str, Any], path: str | Path, **options: Any) -> Future[None]:
    """`save` in a thread, of copies of the tensors on the CPU, so that training goes on. Every rank calls it, once the
    last one is done, for which it waits. Returns a future: `result()` waits until the checkpoint is there for all
    ranks. It raises what `save` raises; `save`, `async_save` and `load` do so as well for a last one that failed.

    The ranks talk about it in a group of its own, by Gloo.
    """
    global _last
    _wait_for_last()
    group = _group_of_saves(path) if dist.is_initialized() else None
    leaves, structure = compat.tree_flatten(state_dict)
    copies = compat.tree_unflatten(list(map(_copied, leaves)), structure)
    _last = _saver().submit(_save, copies, Path(path), group, options)
    return _last


_last: Future | None = None  # of `async_save`


@functools.cache
def _saver() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "thunder_saves")


def _wait_for_last() -> None:
    global _last
    last, _last = _last, None
    if last is not None:
        last.result()


_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of saves, by the default group


def _group_of_saves(path: str | Path):
    """Collectives of training and of a save would meet in one group."""
    everyone = dist.group.WORLD
    if everyone not in _groups:
        introduce()
        limit = timedelta(seconds=compat.timeout_of(everyone))
        try:
            _groups[everyone] = dist.new_group(backend="gloo", timeout=limit)
        except RuntimeError as error:
            raise failed(error, f"saving {path}", everyone) from error
    return _groups[everyone]


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()


def _save(state_dict: dict[str, Any], path: Path, group: Any, options: dict[str, Any]) -> None:
    """group: of the ranks, the default one where it is None."""
    writing, previous = path.with_name(f"{path.name}.writing"), path.with_name(f"{path.name}.previous")
    if _is_first():
        shutil.rmtree(writing, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    has_others = dist.is_initialized()
    try:
        with _alone_is_meant():
            dcp.save(state_dict, checkpoint_id=str(writing), process_group=group, no_dist=not has_others, **options)
        if _is_first():
            if path.exists():
                shutil.rmtree(previous, ignore_errors=True)
                path.rename(previous)
            writing.rename(path)
            shutil.rmtree(previous, ignore_errors=True)
        if has_others:
            dist.barrier(group)
    except RuntimeError as error:
        if not has_others:
            raise
        raise failed(error, f"saving {path}", group or dist.group.WORLD) from error


def load(state_dict: dict[str, Any], path: str | Path, **options: Any) -> None:
    """Reads the folder `path` into the tensors of a state dict, and into the dict what is no tensor. Every rank calls
    it, of however many; options go to `torch.distributed.checkpoint.load`. Raises FileNotFoundError where there is no
    complete checkpoint; pickle.UnpicklingError where its description names what runs code; what PyTorch raises for keys
    and shapes that are not there. Warns of values that torch.load(weights_only=True) refuses, which are unpickled."""
    _wait_for_last()
    path = Path(path)
    folder = next((p for p in (path, path.with_name(f"{path.name}.previous")) if _written(p)), None)
    if folder is None:
        raise FileNotFoundError(f"{path} holds no complete checkpoint: save writes one")
    check_description(folder)
    options = {"planner": Planner()} | options
    try:
        with _alone_is_meant():
            dcp.load(state_dict, checkpoint_id=str(folder), no_dist=not dist.is_initialized(), **options)
    except RuntimeError as error:  # what does not fit is a CheckpointException
        if not dist.is_initialized():
            raise
        raise failed(error, f"loading {path}", dist.group.WORLD) from error
