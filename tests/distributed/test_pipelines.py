"""PyTorch's pipeline schedules over compiled stages: gradients are those of one process, and no product of a backward
runs twice. Stages are prepared by `fsdp` and split layers."""

import contextlib
import copy
import gc

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import thunder
from tests.distributed.test_layouts_and_models import (
    BLOCKS,
    BOUND,
    MODELS,
    STEPS,
    WORDS,
    build,
    full,
    optimizer_of,
    split,
)
from tests.distributed.training import batches, close
from tests.test_two_backwards import Matmuls
from thunder.distributed import PipelineStage, fsdp, pipeline_stages
from thunder.ops.families import collectives

F = torch.nn.functional


class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def loss_of(y, target):
    return (y - target).square().mean()


def runs(rank, size, schedule, wraps):
    """Stages in turn on the ranks: the products that this rank ran."""
    of_rank = 1 if schedule is Schedule1F1B else 2
    torch.manual_seed(0)
    modules = [Stage().double() for _ in range(size * of_rank)]
    whole = copy.deepcopy(torch.nn.Sequential(*modules))
    microbatches, device = 2 * size, torch.device("cpu")
    x, target = torch.randn(2, 4 * size, 6, dtype=torch.float64)
    mine = {i: modules[i] for i in range(rank, len(modules), size)}
    stages = [
        PipelineStage(wraps(module), i, len(modules), device, input_args=x.chunk(microbatches)[0])
        for i, module in mine.items()
    ]
    runner = schedule(stages if of_rank > 1 else stages[0], microbatches, loss_fn=loss_of)
    for _ in range(2):  # in the first step stages are run for the shapes of what they give as well
        for module in mine.values():
            module.zero_grad()
        with Matmuls() as matmuls:
            runner.step(*([x] if rank == 0 else []), target=target)
    loss_of(whole(x), target).backward()
    for i, module in mine.items():
        for (name, p), q in zip(module.named_parameters(), whole[i].parameters(), strict=True):
            close(p.grad, q.grad, f"{name} of stage {i}")
    return matmuls.count


def compiled(module):
    return thunder.jit(module, executors=[])


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_schedules_of_pytorch_run_each_product_once(ranks, schedule):
    ours, eager = (ranks(2)(runs, schedule, wraps) for wraps in (compiled, torch.nn.Sequential))
    assert ours == eager


class Two(torch.nn.Module):
    """Hands on two values of one shape: the node of a stage has several results."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        y = torch.sin(self.first(x))
        return self.last(torch.tanh(self.second(x + y)) * x * y)


def hands_on_two(rank, size):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), Two(), Stage()).double()
    x, target = torch.randn(2, 8, 6, dtype=torch.float64)
    whole = copy.deepcopy(module)
    cut = pipeline_stages(module, ["1", "1.second", "2"], x[:2])
    mine = {i: cut[i] for i in (rank, rank + size)}
    stages = [PipelineStage(compiled(part), i, len(cut), torch.device("cpu")) for i, part in mine.items()]
    runner = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss_of)
    runner.step(*([x] if rank == 0 else []), target=target)
    loss_of(whole(x), target).backward()
    theirs = dict(whole.named_parameters())
    for i, part in mine.items():
        for name, p in part.named_parameters():
            close(p.grad, theirs[name].grad, f"{name} of stage {i}")


def test_a_stage_that_hands_on_two_values(ranks):
    ranks(2)(hands_on_two)


# ---------------------------------------------------------------- models, and what prepares their stages


def logits_of(model):
    """The model without its loss."""
    model.__class__ = type("Logits", (type(model),), {"forward": type(model).logits})
    return model


def loss_of_words(logits, tokens):
    if logits.ndim == 2:
        return F.cross_entropy(logits, tokens[:, 0] % 5)
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


# name -> (the schedule, stages of a rank, whether a rank has the stages i and n - 1 - i)
SCHEDULES = {
    "1F1B": (Schedule1F1B, 1, False), "interleaved": (ScheduleInterleaved1F1B, 2, False),
    "zero bubble": (ScheduleInterleavedZeroBubble, 2, False), "zero bubble V": (ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (ScheduleDualPipeV, 2, True),
}  # fmt: skip
# name -> (ranks of a stage, how many of them have the same data, what prepares a stage)
WRAPS = {
    "pp": (1, 1, lambda m, mesh: m),
    "pp x zero3": (2, 1, lambda m, mesh: fsdp(m, process_group=mesh["inner"], **BLOCKS)),
    "pp x tp": (2, 2, lambda m, mesh: split(m, mesh["inner"])),
    "pp x zero3 x tp": (
        4, 2, lambda m, mesh: fsdp(split(m, mesh["inner"]), process_group=mesh["outer"], **BLOCKS),
    ),
}  # fmt: skip


@contextlib.contextmanager
def counted(name):
    """How often a collective starts."""
    calls, run = [], collectives.Started.__init__

    def start(self, what, *rest):
        calls.append(what)
        run(self, what, *rest)

    collectives.Started.__init__ = start
    try:
        yield lambda: calls.count(name)
    finally:
        collectives.Started.__init__ = run


def trains_in_stages(rank, size, schedule, wrap, model, blocks):
    """Five steps of a pipeline are those of one process."""
    kind, of_rank, is_v = SCHEDULES[schedule]
    sharing, same, prepare = WRAPS[wrap]
    depth = size // sharing
    shape, names = (depth, sharing // same, same), ("pipe", "outer", "inner")
    if sharing // same == 1 or same == 1:
        shape, names = (depth, sharing), ("pipe", "inner")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    stage, data_part = mesh.get_local_rank("pipe"), rank % sharing // same
    count = depth * of_rank

    def whole():
        module = build(model)
        module.blocks = torch.nn.ModuleList(copy.deepcopy(module.blocks[i % 2]) for i in range(blocks))
        return logits_of(module)

    one, other = whole(), whole()
    cuts = [f"blocks.{i * blocks // count}" for i in range(1, count)]
    cut = pipeline_stages(other, cuts, torch.zeros(1, 16, dtype=torch.int64))
    numbers = [stage] if of_rank == 1 else [stage, count - 1 - stage if is_v else stage + depth]
    parts = {i: prepare(cut[i], mesh) for i in numbers}
    microbatches, rows = 2 * depth, 2 * depth
    data = batches(1, None, lambda g: torch.randint(0, WORDS, (rows * (sharing // same), 16), generator=g), steps=STEPS)
    of_one, of_parts = optimizer_of(one), [o for part in parts.values() for o in optimizer_of(part)]
    group = mesh["pipe"].get_group()

    compiled = {i: thunder.jit(part, executors=[]) for i, part in parts.items()}
    stages = [PipelineStage(module, i, count, torch.device("cpu"), group=group) for i, module in compiled.items()]
    runner = kind(stages if of_rank > 1 else stages[0], microbatches, loss_fn=loss_of_words)
    worst = dict.fromkeys(("losses", "gradients", "weights"), 0.0)

    def hold(what, actual, wanted, where):
        close(actual, wanted, where, BOUND)
        worst[what] = max(worst[what], float((actual - wanted).norm() / wanted.norm().clamp(min=1e-300)))

    for number, x in enumerate(data):
        for optimizer in (*of_one, *of_parts):
            optimizer.zero_grad()
        parts_of_data = x.chunk(sharing // same)
        losses = [loss_of_words(one(y), y) for y in parts_of_data]
        (sum(losses) / len(losses)).backward()
        results: list = []
        with counted("all_gather") as gathers, counted("reduce_scatter") as reduces:
            mine = parts_of_data[data_part]
            runner.step(*([mine] if 0 in parts else []), target=mine, losses=results)
        if wrap == "pp x zero3" and number:  # in the first step stages are run for the shapes of what they give as well
            sharded = sum(len(list(part.parameters())) for part in parts.values())
            assert (gathers(), reduces()) == (sharded, len(parts)), "once a step, gradients together"
        if count - 1 in parts:
            hold("losses", torch.stack(results).mean().detach(), losses[data_part].detach(), f"loss of step {number}")
        for i, part in parts.items():
            theirs = dict(one.named_parameters())
            for name, p in part.named_parameters():
                hold("gradients", full(p.grad), theirs[name].grad, f"gradient of {name} of stage {i}, step {number}")
        for optimizer in (*of_one, *of_parts):
            optimizer.step()
        for i, part in parts.items():
            theirs = dict(one.named_parameters())
            for name, p in part.named_parameters():
                hold("weights", full(p.detach()), theirs[name].detach(), f"{name} of stage {i} after step {number}")
    gc.collect()
    return worst


def shown(ranks, size, *what):
    results = [one for one in ranks(size)(trains_in_stages, *what, timeout=400.0)]
    worst = {name: max(one[name] for one in results) for name in results[0]}
    print(f"{what[0]:14} {what[1]:16} {what[2]:8} " + "  ".join(f"{n} {d:.1e}" for n, d in worst.items()))


def test_a_pipeline_of_shards(ranks):
    shown(ranks, 4, "zero bubble", "pp x zero3", "gpt", 4)


@pytest.mark.slow  # all schedules, models and preparations, up to 8 ranks; the default suite has one
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipelines(ranks, schedule, model):
    shown(ranks, 2, schedule, "pp", model, 4)
    shown(ranks, 4, schedule, "pp x tp", model, 4)
    shown(ranks, 4, schedule, "pp x zero3", model, 4)
    shown(ranks, 8, schedule, "pp x zero3 x tp", model, 4)
