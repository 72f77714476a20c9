"""Each kind of parallelism on two GPUs: thunder's functions beside torch's own, eager and compiled.

    python benchmarks/parallelism.py [--rows tp,cp,ep,1f1b,zb,zero3,zero2,drawn] [--limit 110] [--deadline 470] [--json
    FILE] python benchmarks/parallelism.py --tiny --rows tp   # small sizes on CPUs, with Gloo
    python benchmarks/parallelism.py --plans FILE   # what plan says of the rows of such a file, without GPUs

Every row is two processes of its own. Systems that `--limit` seconds leave no time for are not begun, the rounds in
turns end with it, and what was printed until then stays. bfloat16 (float32 on CPUs), fused AdamW, models of about a
billion parameters:

    tp      a Llama of 8 layers, 4096 tokens; sequence parallelism between layers, the loss over parts of the vocabulary
    cp      a Llama of 4 layers, one sequence of 32,768 tokens, replicated parameters
    ep      a Mixtral of 2 layers, 8 experts, two of them for each of 4096 tokens of a rank
    1f1b    a Llama of 8 layers in two stages; 8 microbatches of 2048 tokens
    zb      likewise in four stages, two on each rank; interleaved zero bubble
    zero3   a Llama of 4 layers, 2048 tokens a rank, parameters gathered again in the backward
    zero2   likewise, gathered once
    drawn   one model of each of six kinds, of sizes that `--seed` draws

A line for each system, and one for each row at its end: the step of the slowest rank beside the fastest of torch's
(median of rounds in turns), the peak beside the least of torch's, the share of the time of communication kernels during
which another kernel runs, and the largest relative difference of the losses of the first five steps to those of
torch's first system. `--plans` prints what `thunder.distributed.plan` (for stages `search`) says of ours: step and
peak, and how far they are from those of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from distributed import GIB, allocated, hidden_share, largest, seconds_of, synchronize
from gpu_workloads import RMSNorm, rope
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import thunder
from thunder.distributed import (
    Candidate,
    FSDPBucketingStrategy,
    FSDPType,
    PipelineStage,
    column_parallel,
    context_parallel,
    expert_parallel,
    fsdp,
    pipeline_stages,
    plan,
    row_parallel,
    search,
)
from thunder.tests.measuring import median, paired_ratio, turns

F = nn.functional
LEARNING_RATE = 1e-4
COMPARED = 5  # losses of the first steps


# ----------------------------------------------------------------------------------------------------------------
# models


class Attention(nn.Module):
    def __init__(self, width: int, size: int):
        super().__init__()
        self.size = size
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*n, bias=False) for n in 2 * [(width, inner)] + [(inner, width)])

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Router(nn.Module):
    """Two of the experts for each token, whose rows go through grouped products. exchange: what sends the sorted rows
    to the ranks of their experts and gives back their results."""

    def __init__(self, width: int, inner: int, experts: int):
        super().__init__()
        self.router, self.experts = nn.Linear(width, experts, bias=False), nn.Module()
        self.experts.up = nn.Parameter(torch.randn(experts, width, 2 * inner) * width**-0.5)
        self.experts.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)
        self.count, self.exchange = experts, None

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), self.count).sum(0)
        sorted_rows = rows[order // 2]
        compute = self.compute if self.exchange is None else functools.partial(self.exchange, self.compute)
        y = compute(sorted_rows, counts) * weights.flatten()[order][:, None].to(x.dtype)
        return y[order.argsort()].unflatten(0, (-1, 2)).sum(1).view_as(x)

    def compute(self, rows, counts):
        ends = counts.cumsum(0).int()
        gate, up = F.grouped_mm(rows, self.experts.up, offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.experts.down, offs=ends)


class Block(nn.Module):
    def __init__(self, width: int, size: int, mlp: nn.Module):
        super().__init__()
        self.first, self.second = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = Attention(width, size), mlp

    def forward(self, x, cos, sin):
        x = x + self.attention(self.first(x), cos, sin)
        return x + self.mlp(self.second(x))


class Decoder(nn.Module):
    """Logits, or with labels the loss. Of stages only the first has an embedding, only the last a head."""

    def __init__(self, sizes: SimpleNamespace):
        super().__init__()
        width, size = sizes.width, min(128, sizes.width // 2)
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        make = (lambda: Router(width, sizes.inner, 8)) if sizes.experts else (lambda: Gated(width, sizes.inner))
        self.blocks = nn.ModuleList(Block(width, size, make()) for _ in range(sizes.layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, sizes.vocabulary, bias=False)
        angles = torch.outer(torch.arange(sizes.time).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.repeat(1, 2).cos(), persistent=False)
        self.register_buffer("sin", angles.repeat(1, 2).sin(), persistent=False)

    def forward(self, tokens, labels=None):
        x = tokens if self.embedding is None else self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        if self.head is None:
            return x
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def stage(self, index: int, count: int) -> Decoder:
        """The part of this module that is one of its stages."""
        each = len(self.blocks) // count
        self.blocks = self.blocks[index * each : (index + 1) * each]
        if index:
            self.embedding = None
        if index < count - 1:
            self.norm = self.head = None
        return self


SIZES = {
    "tp": dict(layers=8, time=4096, batch=1), "cp": dict(layers=4, time=32768, batch=1),
    "ep": dict(layers=2, time=4096, batch=1, inner=14336, experts=True),
    "1f1b": dict(layers=8, time=2048, batch=8), "zb": dict(layers=8, time=2048, batch=8),
    "zero3": dict(layers=4, time=2048, batch=1), "zero2": dict(layers=4, time=2048, batch=1),
}  # fmt: skip
DRAWN = ("tp", "cp", "ep", "1f1b", "zero3", "zero2")
LARGEST = 1.2e9  # parameters of a drawn model


def sizes_of(row: str, tiny: bool) -> SimpleNamespace:
    usual = dict(width=4096, inner=11008, vocabulary=32000, experts=False)
    if tiny:
        small = dict(width=32, inner=48, vocabulary=64, time=16, layers=4 if row in ("1f1b", "zb") else 2)
        return SimpleNamespace(**usual | SIZES[row] | small)
    return SimpleNamespace(**usual | SIZES[row])


def drawn_sizes(row: str, seed: int, tiny: bool) -> SimpleNamespace:
    """Sizes of a model of a row's kind, the same on every rank."""
    rng = random.Random(f"{seed} {row}")
    in_stages, experts = row == "1f1b", row == "ep"
    while True:
        width = 256 * rng.randint(4, 18)
        sizes = SimpleNamespace(
            width=width, inner=256 * rng.randint(width // 128, width // 64), vocabulary=2000 * rng.randint(4, 32),
            experts=experts, layers=2 * rng.randint(2, 4) if in_stages else rng.randint(1, 3 if experts else 8),
            time=1024 * rng.randint(8, 28) if row == "cp" else 512 * rng.randint(2, 10),
            batch=rng.randint(4, 8) if in_stages else 1 if row == "cp" else rng.randint(1, 2),
        )  # fmt: skip
        layer = width * (4 * width + 3 * sizes.inner * (8 if experts else 1))
        if sizes.layers * layer + 2 * width * sizes.vocabulary <= LARGEST:
            break
    small = dict(width=32, inner=48, vocabulary=64, time=16, layers=4 if in_stages else 2) if tiny else {}
    return SimpleNamespace(**vars(sizes) | small)


# ----------------------------------------------------------------------------------------------------------------
# systems: each is a model that is prepared, and a function that runs forward and backward


class Trainer:
    """One system of a row. `step` trains on the rank's batch and leaves the loss; the batch is the same on both ranks
    but where they have data of their own."""

    def __init__(self, row: str, sizes: SimpleNamespace, device: torch.device):
        self.row, self.device, self.sizes = row, device, sizes
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        with device:
            self.model = Decoder(self.sizes).to(self.dtype)
        if device.type == "meta":  # to be planned: parts of layers are on a device, whatever they hold
            self.model.to_empty(device="cpu")
        torch.manual_seed(100 + (dist.get_rank() if row in ("ep", "zero2", "zero3") else 0))
        shape = self.sizes.batch, self.sizes.time
        self.tokens = torch.randint(self.sizes.vocabulary, shape, device=device)
        self.labels = self.tokens.roll(-1, 1)
        kind = "cpu" if device.type == "meta" else device.type
        self.mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        self.loss, self.optimizer = torch.zeros((), device=device), None
        self.run: Callable[[], torch.Tensor] = lambda: self.both(self.model)

    def optimize(self, parameters) -> Trainer:
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=self.device.type == "cuda")
        return self

    def both(self, call) -> torch.Tensor:
        """Forward and backward."""
        loss = call(self.tokens, self.labels)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        if self.optimizer is None:  # of a whole step
            self.loss = self.run()
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.run()
        self.optimizer.step()

    def average(self) -> float:
        """The loss of both ranks."""
        loss = self.loss.full_tensor() if isinstance(self.loss, dist.tensor.DTensor) else self.loss
        loss = loss.double().clone()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def planned(self) -> tuple[float, float] | None:
        """Seconds and bytes of a step that thunder says it takes."""
        return None


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile()


def as_whole_step(trainer: Trainer) -> Trainer:
    """Forward, backward and the optimizer as one program."""
    model, optimizer = trainer.model, trainer.optimizer

    def step(tokens, labels):
        optimizer.zero_grad()
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = thunder.jit(step)
    trainer.run, trainer.optimizer = lambda: compiled(trainer.tokens, trainer.labels), None
    return trainer


def as_module(trainer: Trainer) -> Trainer:
    compiled = thunder.jit(trainer.model)
    trainer.run = lambda: trainer.both(compiled)
    return trainer


def plan_of(trainer: Trainer, model: nn.Module, **options) -> None:
    """What `plan` says of a model."""

    def planned():
        inputs = (trainer.tokens.to("meta"), trainer.labels.to("meta"))
        told = plan(model, inputs, world_size=dist.get_world_size(), **options)
        return told.seconds, told.peak

    trainer.planned = planned


# tensor parallelism


def torch_tp(compiled: bool, *where) -> Trainer:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    trainer = Trainer(*where)
    model, mesh = trainer.model, trainer.mesh
    plan_of_model = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    split, join = ColwiseParallel, lambda: RowwiseParallel(output_layouts=Shard(1))
    gathered = lambda *others: PrepareModuleInput(
        input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
    )
    plan_of_block = {
        "first": SequenceParallel(), "attention": gathered(None, None), "attention.q": split(), "attention.k": split(),
        "attention.v": split(), "attention.o": join(), "second": SequenceParallel(), "mlp": gathered(),
        "mlp.gate": split(), "mlp.up": split(), "mlp.down": join(),
    }  # fmt: skip
    parallelize_module(model, mesh, plan_of_model)
    for block in model.blocks:
        parallelize_module(block, mesh, plan_of_block)
    if compiled:
        compile_blocks(model)

    def run():
        with loss_parallel():
            return trainer.both(model)

    trainer.run = run
    return trainer.optimize(model.parameters())


def thunder_tp(whole: bool, *where) -> Trainer:
    trainer = Trainer(*where)
    each = range(len(trainer.model.blocks))
    split = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    columns = [f"blocks.{i}.{n}" for i in each for n in split]
    rows = [f"blocks.{i}.{n}" for i in each for n in ("attention.o", "mlp.down")]
    column_parallel(trainer.model, [*columns, "head"], sequence_dim=1)
    row_parallel(trainer.model, ["embedding", *rows], sequence_dim=1)
    plan_of(trainer, trainer.model, sharding_strategy=None)
    trainer.optimize(trainer.model.parameters())
    return as_whole_step(trainer) if whole else as_module(trainer)


# context parallelism


def torch_cp(compiled: bool, *where) -> Trainer:
    from torch.distributed.tensor.experimental import context_parallel as shared
    from torch.nn.parallel import DistributedDataParallel

    trainer = Trainer(*where)
    model = trainer.model
    buffers = [trainer.tokens, trainer.labels, model.cos, model.sin]
    if compiled:
        compile_blocks(model)
    # tables of angles are equal on both ranks, and parts of them inside of the context
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def run():
        with shared(trainer.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0]):
            return trainer.both(wrapped)

    trainer.run = run
    return trainer.optimize(model.parameters())


def thunder_cp(whole: bool, *where) -> Trainer:
    trainer = Trainer(*where)
    context_parallel(trainer.model, sequence_dim=1)
    plan_of(trainer, trainer.model, sharding_strategy=None)
    trainer.optimize(trainer.model.parameters())
    return as_whole_step(trainer) if whole else as_module(trainer)


# expert parallelism


def exchanged(compute, rows, counts):
    """What torchtitan's expert parallelism does: rows go to the ranks of their experts, are sorted by expert there, and
    come back."""
    from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

    ranks, group = dist.get_world_size(), dist.group.WORLD
    with torch.no_grad():
        theirs = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group))
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = theirs.view(ranks, -1).sum(1).tolist()
        own = counts.shape[0] // ranks
        experts = torch.arange(own, device=rows.device).repeat(ranks)
        order = experts.repeat_interleave(theirs, output_size=sum(received)).argsort(stable=True)
    arrived = all_to_all_single_autograd(rows, received, sent, group)
    results = compute(arrived[order], theirs.view(ranks, own).sum(0))
    back = torch.empty_like(results).index_copy(0, order, results)
    return all_to_all_single_autograd(back, sent, received, group)


def torch_ep(compiled: bool, *where) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    trainer = Trainer(*where)
    model, ranks = trainer.model, dist.get_world_size()
    experts = []

    def average(p):
        p.grad.div_(ranks)

    for block in model.blocks:
        block.mlp.exchange = exchanged
        for name, p in list(block.mlp.experts.named_parameters()):
            part = nn.Parameter(p.detach().chunk(ranks)[dist.get_rank()].clone())
            setattr(block.mlp.experts, name, part)
            part.register_post_accumulate_grad_hook(average)
            experts.append(part)
    held = {id(p) for p in experts}
    ignored = [name for name, p in model.named_parameters() if id(p) in held]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if compiled:
        compile_blocks(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    trainer.run = lambda: trainer.both(wrapped)
    return trainer.optimize(model.parameters())


def thunder_ep(whole: bool, *where) -> Trainer:
    trainer = Trainer(*where)
    expert_parallel(trainer.model, [f"blocks.{i}.mlp.experts" for i in range(len(trainer.model.blocks))])
    plan_of(trainer, trainer.model, sharding_strategy=None)
    trainer.optimize(trainer.model.parameters())
    return as_whole_step(trainer) if whole else as_module(trainer)


# stages


def loss_of_words(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def in_stages(trainer: Trainer, schedule: type, stages: list, parameters: list) -> Trainer:
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    runner = schedule(stages if len(stages) > 1 else stages[0], trainer.sizes.batch, loss_fn=loss_of_words)

    def run():
        losses: list[torch.Tensor] = []
        runner.step(*([trainer.tokens] if first else []), target=trainer.labels, losses=losses, return_outputs=False)
        # the mean over ranks is the loss of the last one
        return torch.stack(losses).mean().detach() * dist.get_world_size() if last else torch.zeros_like(trainer.loss)

    trainer.run = run
    return trainer.optimize(parameters)


def torch_pp(schedule: str, compiled: bool, *where) -> Trainer:
    from torch.distributed import pipelining

    trainer = Trainer(*where)
    ranks, count = dist.get_world_size(), dist.get_world_size() * (1 if schedule == "Schedule1F1B" else 2)
    parts = {i: copy.deepcopy(trainer.model).stage(i, count) for i in range(dist.get_rank(), count, ranks)}
    trainer.model = None
    if compiled:  # a backward in two halves runs the graph twice
        torch._functorch.config.donated_buffer = schedule == "Schedule1F1B"
    for part in parts.values():
        if compiled:
            compile_blocks(part)
    stages = [
        pipelining.PipelineStage(part, i, count, trainer.device, group=trainer.mesh.get_group())
        for i, part in parts.items()
    ]
    parameters = [p for part in parts.values() for p in part.parameters()]
    return in_stages(trainer, getattr(pipelining, schedule), stages, parameters)


def thunder_pp(schedule: str, *where) -> Trainer:
    from torch.distributed import pipelining

    trainer = Trainer(*where)
    ranks, count = dist.get_world_size(), dist.get_world_size() * (1 if schedule == "Schedule1F1B" else 2)

    def planned():
        with torch.device("meta"):
            model = Decoder(trainer.sizes).to(torch.bfloat16)
        one = torch.empty(1, trainer.sizes.time, dtype=torch.int64, device="meta")
        candidate = Candidate("ddp", 1, pp=ranks, microbatches=trainer.sizes.batch)
        (told,) = search(model, (one, one), gpus=ranks, candidates=[candidate], exact=True)
        return told.seconds, told.peak

    trainer.planned = planned
    if trainer.device.type == "meta":
        return trainer
    cuts = [f"blocks.{i * len(trainer.model.blocks) // count}" for i in range(1, count)]
    cut = pipeline_stages(trainer.model, cuts, trainer.tokens[:1])
    trainer.model, parts = None, {i: cut[i] for i in range(dist.get_rank(), count, ranks)}
    del cut
    stages = [
        PipelineStage(thunder.jit(part), i, count, trainer.device, group=trainer.mesh.get_group())
        for i, part in parts.items()
    ]
    parameters = [p for part in parts.values() for p in part.parameters()]
    return in_stages(trainer, getattr(pipelining, schedule), stages, parameters)


# shards


def torch_fsdp(again: bool, compiled: bool, *where) -> Trainer:
    from torch.distributed.fsdp import fully_shard

    trainer = Trainer(*where)
    if compiled:
        compile_blocks(trainer.model)
    for block in trainer.model.blocks:
        fully_shard(block, reshard_after_forward=again)
    fully_shard(trainer.model, reshard_after_forward=again)
    return trainer.optimize(trainer.model.parameters())


def thunder_fsdp(strategy: FSDPType, whole: bool, *where) -> Trainer:
    trainer = Trainer(*where)
    options = dict(sharding_strategy=strategy, bucketing_strategy=FSDPBucketingStrategy.BLOCK)
    with torch.device("meta"):
        before = Decoder(trainer.sizes).to(trainer.dtype)
    plan_of(trainer, before, **options)
    fsdp(trainer.model, **options)
    trainer.optimize(trainer.model.parameters())
    return as_whole_step(trainer) if whole else as_module(trainer)


def drawn(kind: str, row: str, chosen: argparse.Namespace, device: torch.device) -> Trainer:
    return ROWS[kind]["thunder"](kind, drawn_sizes(kind, chosen.seed, chosen.tiny), device)


def system_of(row: str, system: str, chosen: argparse.Namespace, device: torch.device) -> Trainer:
    make = ROWS[row][system]
    return make(row, chosen if row == "drawn" else sizes_of(row, chosen.tiny), device)


ROWS: dict[str, dict[str, Callable[..., Trainer]]] = {
    "tp": {
        "torch": functools.partial(torch_tp, False), "thunder": functools.partial(thunder_tp, False),
        "torch compiled": functools.partial(torch_tp, True),
        "thunder whole step": functools.partial(thunder_tp, True),
    },
    "cp": {
        "torch": functools.partial(torch_cp, False), "thunder": functools.partial(thunder_cp, False),
        "torch compiled": functools.partial(torch_cp, True),
        "thunder whole step": functools.partial(thunder_cp, True),
    },
    "ep": {
        "torch": functools.partial(torch_ep, False), "thunder": functools.partial(thunder_ep, False),
        "torch compiled": functools.partial(torch_ep, True),
        "thunder whole step": functools.partial(thunder_ep, True),
    },
    "1f1b": {
        "torch": functools.partial(torch_pp, "Schedule1F1B", False),
        "thunder": functools.partial(thunder_pp, "Schedule1F1B"),
        "torch compiled": functools.partial(torch_pp, "Schedule1F1B", True),
    },
    "zb": {
        "torch": functools.partial(torch_pp, "ScheduleInterleavedZeroBubble", False),
        "thunder": functools.partial(thunder_pp, "ScheduleInterleavedZeroBubble"),
        "torch compiled": functools.partial(torch_pp, "ScheduleInterleavedZeroBubble", True),
    },
    "zero3": {
        "torch": functools.partial(torch_fsdp, True, False),
        "thunder": functools.partial(thunder_fsdp, FSDPType.ZERO3, False),
        "thunder whole step": functools.partial(thunder_fsdp, FSDPType.ZERO3, True),
        "torch compiled": functools.partial(torch_fsdp, True, True),
    },
    "zero2": {
        "torch": functools.partial(torch_fsdp, False, False),
        "thunder": functools.partial(thunder_fsdp, FSDPType.ZERO2, False),
        "torch compiled": functools.partial(torch_fsdp, False, True),
    },
    "drawn": {f"thunder {kind}": functools.partial(drawn, kind) for kind in DRAWN},
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# measuring


class Figures:
    """Those of a row's systems, printed by rank 0 and written to a file after each one."""

    def __init__(self, row: str, path: str | None):
        self.row, self.path, self.systems = row, path, dict[str, dict[str, Any]]()

    def line(self, system: str, text: str) -> None:
        if not dist.get_rank():
            print(f"{self.row:6} {system:20} {text}", flush=True)
            self.write()

    def write(self) -> None:
        if self.path and not dist.get_rank():
            with open(self.path, "w", encoding="utf-8") as out:
                json.dump([{"row": self.row, "system": name, **figures} for name, figures in self.systems.items()], out)


def all_can(works: bool, device: torch.device) -> bool:
    return largest(0.0 if works else 1.0, device) == 0.0


def begin(figures: Figures, system: str, chosen: argparse.Namespace, device: torch.device) -> Trainer | None:
    """A system after its first steps: its peak, share of hidden communication and first losses; None where it fails."""
    known = figures.systems.setdefault(system, {})
    gc.collect()
    before, trainer, failure = allocated(device), None, ""
    try:
        trainer = system_of(figures.row, system, chosen, device)
        start, losses = time.perf_counter(), []
        for number in range(COMPARED):
            trainer.step()
            losses.append(trainer.average())
            if not number:
                known["first"] = time.perf_counter() - start
        gc.collect()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.step()
        synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        known |= {"losses": losses, "peak": largest(peak, device) / GIB, "hidden": hidden_share(trainer)}
        known["seconds"] = seconds_of(trainer, chosen.steps)
    except Exception as failed:  # noqa: BLE001  # told in the row; the others go on
        trainer, failure = None, traceback.format_exception_only(failed)[-1].strip().splitlines()[-1]
        if not dist.get_rank():
            traceback.print_exc()
    if not all_can(trainer is not None, device):
        known["failed"] = failure or "another rank failed"
        figures.line(system, f"failed: {known['failed'][:160]}")
        return None
    hidden = "" if known["hidden"] is None else f"hidden {known['hidden']:4.0%}"
    figures.line(
        system, f"step {known['seconds'] * 1e3:9.2f} ms  peak {known['peak']:6.2f} GiB  {hidden:11}  first "
        f"{known['first']:5.1f} s  losses {' '.join(f'{loss:.5f}' for loss in known['losses'])}",
    )  # fmt: skip
    return trainer


def measure(chosen: argparse.Namespace) -> None:
    """One row, on each of the ranks."""
    device = torch.device("cpu" if chosen.tiny else "cuda", None if chosen.tiny else int(os.environ["LOCAL_RANK"]))
    on_gpus = device.type == "cuda"
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    (row,) = chosen.rows
    figures, trainers, start = Figures(row, chosen.inner), dict[str, Trainer](), time.monotonic()

    def is_time_left(share: float) -> bool:
        return largest(time.monotonic() - start, device) < share * chosen.limit

    for system in chosen.systems or ROWS[row]:
        if system not in ROWS[row]:
            continue
        if trainers and not is_time_left(0.65):
            figures.line(system, "not begun: no time is left")
        elif (trainer := begin(figures, system, chosen, device)) is not None:
            trainers[system] = trainer
    samples: dict[str, list[float]] = {name: [] for name in trainers}
    for order in turns(list(trainers), chosen.rounds):
        if all(samples.values()) and not is_time_left(0.85):
            break
        for name in order:
            samples[name].append(seconds_of(trainers[name], chosen.steps))
    known = figures.systems
    for name in trainers:
        known[name]["seconds"] = median(samples[name])
    torchs = [name for name in trainers if name.startswith("torch")]
    fastest = min(torchs, key=lambda name: known[name]["seconds"], default=None)
    least = min((known[name]["peak"] for name in torchs), default=0)
    reference = known[(torchs or list(trainers))[0]]["losses"] if trainers else []
    for name in trainers:
        it = known[name]
        ratio = ""
        if fastest is not None:
            it["ratio"], it["best"] = paired_ratio(samples[name], samples[fastest]), fastest
            ratio = f" ({it['ratio'][0]:.3f} of {fastest})"
        it["peak ratio"] = it["peak"] / least if least else None
        it["sizes"] = vars(trainers[name].sizes)
        it["difference"] = max(abs(a - b) / abs(b) for a, b in zip(it["losses"], reference, strict=True))
        it["rounds"] = len(samples[name])
        peak_ratio = "" if it["peak ratio"] is None else f" ({it['peak ratio']:.3f})"
        hidden = "" if it["hidden"] is None else f"hidden {it['hidden']:4.0%}"
        figures.line(
            name, f"step {it['seconds'] * 1e3:9.2f} ms{ratio}  peak {it['peak']:6.2f} "
            f"GiB{peak_ratio}  {hidden}  losses apart {it['difference']:.1e}  {it['rounds']} rounds",
        )  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------
# plans


def print_plans(path: str, chosen: argparse.Namespace) -> None:
    """What plan says of the systems of a file of measured rows, beside what was measured; on each of two ranks."""
    dist.init_process_group("gloo")
    with open(path, encoding="utf-8") as measured:
        results = json.load(measured)
    for it in results:
        row, system = it["row"], it["system"]
        if not system.startswith("thunder") or "seconds" not in it:
            continue
        trainer = system_of(row, system, chosen, torch.device("meta"))
        if dist.get_rank() or (told := trainer.planned()) is None:
            continue
        seconds, peak = told[0], told[1] / GIB
        it["plan"] = {"seconds": seconds, "peak": peak}
        apart = f"{peak / it['peak'] - 1:+.1%}" if it["peak"] else "not measured"
        print(
            f"{row:6} {system:20} plan {seconds * 1e3:9.2f} ms ({seconds / it['seconds'] - 1:+.0%})  {peak:6.2f} GiB "
            f"({apart})",
            flush=True,
        )
    if not dist.get_rank():
        with open(path, "w", encoding="utf-8") as out:
            json.dump(results, out, indent=1)
    dist.barrier()
    dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------
# the program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), type=lambda text: text.split(","))
    parser.add_argument("--systems", type=lambda text: text.split(","), help="those of a row; all by default")
    parser.add_argument("--tiny", action="store_true", help="small sizes on CPUs")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps of a system in a round")
    parser.add_argument("--limit", type=float, default=110.0, help="seconds of a row")
    parser.add_argument("--deadline", type=float, default=470.0, help="seconds of all rows")
    parser.add_argument("--seed", type=int, default=0, help="draws the sizes of the row `drawn`")
    parser.add_argument("--json", help="a file for the rows")
    parser.add_argument(
        "--plans", metavar="FILE", help="print what plan says of the rows of a file, and write it there"
    )
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.rows) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if chosen.inner:
        measure(chosen)
        return 0
    if chosen.plans:
        if "RANK" not in os.environ:
            return int(not _ranks(sys.argv[1:], chosen.deadline))
        print_plans(chosen.plans, chosen)
        return 0
    start, results, failed = time.monotonic(), [], False
    for row in chosen.rows:
        left = min(chosen.limit, chosen.deadline - (time.monotonic() - start))
        if left < 15:
            print(f"{row:6} not measured: the deadline of {chosen.deadline:.0f} s is over", flush=True)
            failed = True
            continue
        began = time.monotonic()
        ended, systems = _run(row, left)
        failed |= not ended or any("failed" in one for one in systems)
        results += systems
        print(f"{row:6} {'ended' if ended else 'did not end'} after {time.monotonic() - began:.0f} s", flush=True)
        if chosen.json:
            with open(chosen.json, "w", encoding="utf-8") as out:
                json.dump(results, out, indent=1)
    return int(failed)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(row: str, seconds: float) -> tuple[bool, list[dict[str, Any]]]:
    """Whether a row's processes ended well within some seconds, and what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "row")
        ended = _ranks([*sys.argv[1:], "--rows", row, "--limit", str(seconds), "--inner", result], seconds)
        if not os.path.exists(result):
            return ended, []
        with open(result, encoding="utf-8") as rows:
            return ended, json.load(rows)


def _ranks(arguments: list[str], seconds: float) -> bool:
    """Whether this program, as two ranks, ends well within some seconds."""
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    known = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"} | os.environ | known
    command = [sys.executable, __file__, *arguments]
    processes = [
        subprocess.Popen(command, env=known | {"RANK": rank, "LOCAL_RANK": rank}, start_new_session=True)
        for rank in "01"
    ]
    end, ended = time.monotonic() + seconds, True
    for process in processes:
        try:
            ended &= process.wait(max(0.1, end - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            ended = False
    for process in processes:  # those that did not end, and what they started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ended


if __name__ == "__main__":
    sys.exit(main())
