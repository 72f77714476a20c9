"""`thunder.distributed.search`: layouts of a model over a number of GPUs, each planned, as a table.

A candidate is a product of data, tensor, context, expert and pipeline parallelism. A copy of the module on the meta
device gets the placements that the candidate's functions would give it, over groups that stand for ones of any size,
and is planned (`thunder.distributed.plan`): nothing runs, and no GPU or process group is needed.

Where layers repeat, two shallow copies of the model are planned, and the whole is read off the line through them: time
and memory of a stack of equal layers grow by the same for each (`exact=True` plans the whole).
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder import compat
from thunder.analysis.cost import nbytes
from thunder.core.proxies import TensorProxy
from thunder.core.tables import table
from thunder.core.trace import Trace
from thunder.distributed.costs import H200, Machine
from thunder.distributed.data_parallel import module_of
from thunder.distributed.layouts import Axis, I, PlannedGroup, R, S
from thunder.distributed.placement import FSDPBucketingStrategy, FSDPType, Held, Placement, place
from thunder.distributed.planning import GIB, Plan, on_meta, plan, state_of, trace_to_plan
from thunder.errors import OptionError
from thunder.ops import ltorch

_DEPTHS = (2, 4)  # layers of the shallow copies


@dataclass(frozen=True)
class Candidate:
    """A layout: the number of GPUs along each axis.

    Args:
        data: The data parallelism: "ddp", "zero2" or "zero3".
        dp: The number of data-parallel ranks.
        tp: Over how many GPUs the features of layers are sharded, and the sequences between layers.
        cp: Over how many GPUs the positions of a sequence are sharded.
        ep: Over how many GPUs experts are sharded.
        pp: The number of pipeline stages.
        shards: Over how many of the data-parallel ranks parameters are sharded. None means all.
        microbatches: The number of microbatches of a step with pipeline stages.
    """

    data: str
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    shards: int | None = None
    microbatches: int = 1

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.ep * self.pp

    def __str__(self) -> str:
        data = f"{self.data} {self.dp}" + (f" in {self.shards}s" if self.shards else "")
        names = [f"{name} {size}" for name in ("tp", "cp", "ep", "pp") if (size := getattr(self, name)) > 1]
        return " x ".join([*([data] if self.dp > 1 or not names else []), *names])


@dataclass(frozen=True)
class Projected:
    """What a candidate's step takes on one GPU: seconds; the share of them in which a stage of a pipeline idles
    (`bubbles`); the share in which it waits for collectives (`waiting`); bytes at most (`peak`) and communicated.
    samples: that all GPUs train on in the step. fits: whether the peak is within the memory of the GPU."""

    candidate: Candidate
    seconds: float
    samples: int
    bubbles: float
    waiting: float
    peak: float
    communicated: float
    fits: bool

    @property
    def rate(self) -> float:
        """Samples that a GPU trains on in a second."""
        return self.samples / self.seconds / self.candidate.gpus


class Search(tuple):
    """Projected candidates, those that fit first and the fastest first. Printed as a table; `html` is the same table
    as a page."""

    title: str = ""
    HEAD = ("layout", "step ms", "samples/s/GPU", "bubbles", "waiting", "peak GiB", "communicated GiB", "fits")

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(p.candidate), f"{p.seconds * 1e3:.1f}", f"{p.rate:.4g}", f"{p.bubbles:.0%}", f"{p.waiting:.0%}",
                f"{p.peak / GIB:.1f}", f"{p.communicated / GIB:.2f}", "yes" if p.fits else "no",
            )
            for p in self
        ]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.title}\n{table(self.HEAD, self.rows(), right=range(1, len(self.HEAD)))}"

    def html(self, path: str) -> None:
        """Writes the table to a file as a page."""
        cells = lambda tag, row: "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row)  # noqa: E731
        body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows())
        with open(path, "w") as page:
            page.write(
                f"<!doctype html><meta charset=utf-8><title>{html.escape(self.title)}</title>\n"
                "<style>td, th {padding: 2px 12px; text-align: right} td:first-child {text-align: left}</style>\n"
                f"<h1>{html.escape(self.title)}</h1>\n<table>\n<tr>{cells('th', self.HEAD)}</tr>\n{body}\n</table>\n"
            )


def search(
    model,
    inputs: Any,
    *,
    gpus: int,
    machine: Machine = H200,
    memory: float = 130 * GIB,
    optimizer: str | int = "adamw",
    experts: Sequence[str] = (),
    microbatches: int = 4,
    exact: bool = False,
    candidates: Sequence[Candidate] | None = None,
    device: str = "cuda",
) -> Search:
    """Plans several layouts of a model on a number of GPUs and returns them as a table. Layouts that fit into memory
    come first, the fastest of them at the top.

    Tensor parallelism shards the layers whose features lead to the features of one other layer, with no norm over all
    features between them; the trace shows which. Steps of layouts have different sizes, so they are compared by samples
    per second. A layout with pipeline stages is projected from the plan of one stage, which contains the embedding and
    the head: the timetable of 1F1B, one reduction of gradients and one gathering of parameters, none of which is
    hidden.

    Args:
        model: A module that returns its loss, preferably on the meta device.
        inputs: The inputs of a data-parallel rank, as for `plan`; with pipeline stages, those of a microbatch.
        gpus: The number of GPUs.
        machine: The machine of the projected times.
        memory: The bytes of a GPU that a step may use.
        optimizer: As for `plan`.
        experts: The paths of modules with experts, as for `expert_parallel`.
        microbatches: The number of microbatches of a step for each pipeline stage.
        exact: If True, plans all layers of the model. By default the plan is extrapolated from two shallow copies.
        candidates: The layouts to plan. None means powers of two of each kind of parallelism: tensor and context
            parallelism within a node, experts only together with data parallelism, pipeline stages only by themselves,
            and all strategies of data parallelism, except layouts whose parameters, gradients and optimizer states
            exceed the memory.
        device: As for `plan`.

    Returns:
        A table, whose entries have the figures of each layout.

    Raises:
        OptionError: If a candidate does not have `gpus` GPUs. Other errors are those of `plan`.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise OptionError(f"gpus={gpus!r} is not an option; valid: numbers of GPUs, 1 or more")
    module = module_of(model, "search")
    model = _Shape(module, inputs, machine, optimizer, tuple(experts), exact, device)
    if candidates is None:
        candidates = [c for c in _candidates(model, gpus, microbatches) if model.held(c) <= memory]
    chosen = list(candidates)
    for candidate in chosen:
        if candidate.gpus != gpus:
            raise OptionError(f"the candidate {candidate} has {candidate.gpus} GPUs; valid: candidates of {gpus}")
    planned = [_projected(model, candidate, memory) for candidate in chosen]
    results = Search(sorted(planned, key=lambda p: (not p.fits, -p.rate)))
    results.title = f"{type(module).__name__} on {gpus} x {machine.name}, one GPU; times are projected"
    return results


# ---------------------------------------------------------------------------------------------------------------- the
# model


class _Shape:
    """A model as candidates are planned for it. layers: of its longest stack of equal layers, at `stack`, a path with
    the places of the first one and behind the last one; 0 where there is none. split: by the paths of weights, the
    dimension that tensor parallelism divides."""

    def __init__(
        self, module, inputs, machine: Machine, optimizer, experts: tuple[str, ...], exact: bool, device: str
    ):  # fmt: skip
        self.device = device
        self.module, self.inputs, self.machine, self.optimizer = on_meta(module), inputs, machine, optimizer
        named = [f"{path}.{n}" for path in experts for n, _ in module.get_submodule(path).named_parameters()]
        self.experts = dict.fromkeys(map(_kind, named))
        self.stack, self.layers = _stack_of(self.module)
        self.is_whole = exact or self.layers <= _DEPTHS[-1]
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (_as_tuple(inputs), {})
        tensors = [t for t in compat.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.ndim]
        self.samples = tensors[0].shape[0] if tensors else 1
        self.positions = tensors[0].shape[1] if tensors and tensors[0].ndim > 1 else 1
        small = self.of_depth(_DEPTHS[0])
        computation = trace_to_plan(small, args, kwargs, device)
        self.split = {_kind(name): dim for name, dim in _split_layers(computation, small).items()}
        self.handed = _bytes_between(computation, self.stack)
        self.plans: dict[tuple, Plan] = {}

    def of_depth(self, depth: int) -> torch.nn.Module:
        """A copy on the meta device with that many layers in the stack."""
        module = on_meta(self.module)
        if self.layers:
            path, first, end = self.stack
            children = list(module.get_submodule(path)._modules.items())
            fewer = [*children[: first + min(depth, self.layers)], *children[end:]]
            layers = module.get_submodule(path)
            layers._modules = {str(i): child for i, (_, child) in enumerate(fewer)}
        return module

    def prepared(self, candidate: Candidate, depth: int) -> torch.nn.Module:
        """A copy whose parameters are held as a candidate's functions leave them, but for data parallelism."""
        module = self.of_depth(depth)
        inside = candidate.tp * candidate.cp
        for name, parameter in module.named_parameters():
            axes = []
            if candidate.ep > 1:
                is_expert = _kind(name) in self.experts
                axis = Axis(_group(candidate.ep, inside), "ep", "avg")
                axes.append(Held(axis, S(0) if is_expert else I, R, experts=True))
            if candidate.tp > 1:
                dim = self.split.get(_kind(name))
                axes.append(Held(Axis(_group(candidate.tp, 1), "tp", "sum"), I if dim is None else S(dim), I))
            if candidate.cp > 1:
                axis = Axis(_group(candidate.cp, candidate.tp), "cp", "sum", folded=True)
                axes.append(Held(axis, I, I, on_mesh=False, positions=1))
            if axes:
                placement = Placement(
                    name, tuple(parameter.shape), parameter.dtype, parameter.dtype, tuple(axes),
                    sequence_dim=1 if candidate.tp > 1 and self.split.get(_kind(name)) is not None else None,
                )  # fmt: skip
                parameter.data = placement.part_of(parameter.detach())
                place(parameter, placement)
        return module

    def held(self, candidate: Candidate) -> float:
        """Bytes of parameters, gradients and the optimizer's state that a rank has at least."""
        state, parameters, states = state_of(self.optimizer), 0.0, 0.0
        for name, p in self.module.named_parameters():
            parts = candidate.pp * (candidate.tp if _kind(name) in self.split else 1)
            parts *= candidate.ep if _kind(name) in self.experts else 1
            parameters += p.nbytes / parts
            states += state(p) / parts
        shards = 1 if candidate.data == "ddp" else candidate.shards or candidate.dp
        gradients = 2 * parameters if candidate.pp > 1 and shards > 1 else parameters / shards
        return gradients + (parameters + states) / shards

    def figures(self, candidate: Candidate, layers: int) -> _Figures:
        """Of a candidate without stages, for a model of so many layers."""
        if self.is_whole or not self.layers:
            return _Figures.of(self.plan(candidate, layers))
        first, second = (_Figures.of(self.plan(candidate, depth)) for depth in _DEPTHS)
        return first.line(second, (layers - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0]))

    def plan(self, candidate: Candidate, depth: int) -> Plan:
        """The plan of a candidate for a model of this depth, which is made once."""
        if (key := (candidate, depth)) not in self.plans:
            strategy = {"ddp": None, "zero2": FSDPType.ZERO2, "zero3": FSDPType.ZERO3}[candidate.data]
            planned = plan(
                self.prepared(candidate, depth), self.inputs, world_size=candidate.gpus, sharding_strategy=strategy,
                bucketing_strategy=FSDPBucketingStrategy.NONE if strategy is None else FSDPBucketingStrategy.BLOCK,
                shards=candidate.shards, optimizer=self.optimizer, machine=self.machine, device=self.device,
            )  # fmt: skip
            assert isinstance(planned, Plan), "of one number of GPUs"
            self.plans[key] = planned
        return self.plans[key]


@dataclass(frozen=True)
class _Figures:
    """Those of a plan that grow by the same with each layer; bytes and seconds."""

    seconds: float
    waiting: float
    parameters: float
    gradients: float
    optimizer: float
    saved: float
    peak: float
    communicated: float

    @classmethod
    def of(cls, planned: Plan) -> _Figures:
        return cls(*(float(getattr(planned, f.name)) for f in dataclasses.fields(cls)))

    def line(self, other: _Figures, at: float) -> _Figures:
        """On the line through these, where `at` is 0, and others, where it is 1."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Figures(*(max(0.0, a + at * (b - a)) for a, b in pairs))

    def update(self, machine: Machine) -> float:
        """Seconds of the optimizer, as plans have them."""
        return (2 * self.parameters + self.gradients + 2 * self.optimizer) / machine.update + machine.launch


@functools.cache
def _group(ranks: int, stride: int) -> PlannedGroup:
    return PlannedGroup(ranks, stride)


def _as_tuple(inputs: Any) -> tuple:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)


def _kind(path: str) -> str:
    """The path of a parameter, the same for those of all layers."""
    return re.sub(r"\.\d+(?=\.)", ".*", path)


def _stack_of(module: torch.nn.Module) -> tuple[tuple[str, int, int], int]:
    """The path of the children with the most parameters that stand in a row and are alike, the places of the first one
    and behind the last one; and how many they are. Alike are modules of one class with parameters of the same names and
    shapes."""
    best, stack, count = 0, ("", 0, 0), 0
    for path, owner in module.named_modules():
        if not isinstance(owner, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        kinds = [(type(m), *((n, p.shape, p.dtype) for n, p in m.named_parameters())) for m in owner.children()]
        start = 0
        for kind, run in itertools.groupby(kinds):
            length = len(list(run))
            numbers = length * sum(shape.numel() for _, shape, _ in kind[1:])
            if length > 1 and numbers > best:
                best, stack, count = numbers, (path, start, start + length), length
            start += length
    return stack, count


def _split_layers(computation: Trace, module: torch.nn.Module) -> dict[str, int]:
    """By the paths of weights of Linear layers that tensor parallelism splits, the dimension: 0 of layers whose
    features lead to another one, by operations that keep features apart; 1 of that one. What normalizes all features,
    those of the model or those that a layer gives, ends the way."""
    dimensions, paths = dict[str, int](), computation.info.parameters
    widths = [m.embedding_dim for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    opened: dict[str, frozenset[str]] = {}  # by value: weights of the layers whose features it has
    for operation in computation.bound_symbols:
        tensors = [p for p in operation.inputs if isinstance(p, TensorProxy)]
        before = frozenset[str]().union(*(opened.get(p.name, ()) for p in tensors))
        weight = operation.args[1] if operation.sym is ltorch.linear else None
        if isinstance(weight, TensorProxy) and (path := paths.get(weight.name)) is not None:
            columns = opened.get(operation.args[0].name, frozenset())
            dimensions |= dict.fromkeys(columns, 0) | ({path: 1} if columns else {})
            before = frozenset() if columns else frozenset({path})
        elif before and _is_norm(operation, module):
            sizes = {p.shape[-1] for p in tensors if p.name in opened and p.shape}
            ends = {module.get_parameter(path).shape[0] for path in before} | set(widths)
            before = frozenset() if sizes & ends else before
        opened |= dict.fromkeys((o.name for o in operation.outputs), before)
    return dimensions


def _is_norm(operation, module: torch.nn.Module) -> bool:
    """Whether an operation is of a module whose class has "norm" in its name."""
    path = getattr(operation.location, "module", None)
    return bool(path) and "norm" in type(module.get_submodule(path)).__name__.lower()


def _bytes_between(computation: Trace, stack: tuple[str, int, int]) -> int:
    """Bytes of what a layer of the stack hands on: the largest result in front of the second layer that it reads."""
    prefix, sizes_in_bytes = f"{stack[0]}.{stack[1] + 1}", dict[str, int]()
    for operation in computation.bound_symbols:
        path = getattr(operation.location, "module", None) or ""
        if path == prefix or path.startswith(f"{prefix}."):
            return max(
                (sizes_in_bytes.get(p.name, 0) for p in operation.inputs if isinstance(p, TensorProxy)), default=0
            )
        sizes_in_bytes |= {o.name: nbytes(o) for o in operation.outputs if isinstance(o, TensorProxy)}
    return 0


# ---------------------------------------------------------------------------------------------------------------- the
# candidates


def _powers(most: int) -> Iterator[int]:
    return itertools.takewhile(lambda n: n <= most, (2**i for i in itertools.count()))


def _candidates(model: _Shape, gpus: int, microbatches: int) -> Iterator[Candidate]:
    """Powers of two of each kind; tensor and context parallelism within a node, stages of at most 16."""
    node, sizes = model.machine.gpus_per_node, {_kind(n): p.shape for n, p in model.module.named_parameters()}
    for tp, cp, ep, pp in itertools.product(_powers(node), _powers(node), _powers(64), _powers(16)):
        inside = tp * cp * ep * pp
        splits = tp == 1 or model.split and all(sizes[n][dim] % tp == 0 for n, dim in model.split.items())
        shares = cp == 1 or model.positions % (2 * cp) == 0 and model.positions // cp >= 4096
        expert = ep == 1 or model.experts and inside == ep * pp and all(sizes[n][0] % ep == 0 for n in model.experts)
        if gpus % inside or tp * cp > node or pp > max(1, model.layers) or not (splits and shares and expert):
            continue
        dp, kinds = gpus // inside, dict(tp=tp, cp=cp, ep=ep, pp=pp, microbatches=1 if pp == 1 else microbatches * pp)
        yield Candidate("ddp", dp, **kinds)
        if dp > 1:
            yield Candidate("zero2", dp, **kinds)
        if dp > 1 and pp == 1:
            yield Candidate("zero3", dp, **kinds)
        shards = max(1, 64 // (tp * cp * ep))
        if dp > shards > 1 and dp % shards == 0:
            yield Candidate("zero2" if pp > 1 else "zero3", dp, **kinds, shards=shards)


def _projected(model: _Shape, candidate: Candidate, memory: float) -> Projected:
    samples = candidate.dp * candidate.ep * candidate.microbatches * model.samples
    if candidate.pp > 1:
        return _in_stages(model, candidate, samples, memory)
    one = model.figures(candidate, model.layers)
    return Projected(
        candidate, one.seconds, samples, 0.0, one.waiting / one.seconds, one.peak, one.communicated, one.peak <= memory
    )


def _in_stages(model: _Shape, candidate: Candidate, samples: int, memory: float) -> Projected:
    """1F1B's timetable of the plan of one stage: with m microbatches and p stages m + p - 1 times one forward and
    backward (D. Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2), at first as many saved as there are stages."""
    machine, p, m = model.machine, candidate.pp, candidate.microbatches
    alone = dataclasses.replace(candidate, data="ddp", dp=1, pp=1, shards=None, microbatches=1)
    one = model.figures(alone, -(-model.layers // p))
    update, inside = one.update(machine), alone.gpus
    between = machine.seconds_of_collective("broadcast", model.handed, 2, inside * candidate.dp)
    timetable = (m + p - 1) * (one.seconds - update) + 2 * (p - 1) * between
    shards = 1 if candidate.data == "ddp" else candidate.shards or candidate.dp
    calls = []
    if shards > 1:
        calls = [("all_gather", one.parameters, shards, inside), ("reduce_scatter", one.gradients, shards, inside)]
    if candidate.dp > shards:
        calls.append(("all_reduce", one.gradients / shards, candidate.dp // shards, inside * shards))
    reduced = sum(machine.seconds_of_collective(kind, int(size), n, stride) for kind, size, n, stride in calls)
    seconds = timetable + reduced + update / shards
    beside = max(0.0, one.peak - one.parameters - one.optimizer - one.gradients - one.saved)
    whole = one.parameters if shards > 1 else 0.0
    held = (one.parameters + one.optimizer) / shards + whole + one.gradients
    peak = held + one.saved * min(p, m) + beside
    return Projected(
        candidate, seconds, samples, bubbles=(p - 1) / (m + p - 1) * timetable / seconds,
        waiting=(m * one.waiting + reduced) / seconds, peak=peak,
        communicated=m * (one.communicated + 2 * model.handed) + sum(size for _, size, *_ in calls),
        fits=peak <= memory,
    )  # fmt: skip
