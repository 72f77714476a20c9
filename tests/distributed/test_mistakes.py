"""Mistakes: each ends with an error on every rank, which says what differs and where; no rank trains on."""

import contextlib
import re
import resource
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import thunder
from tests.distributed.launcher import Ranks
from thunder.distributed import (
    FSDPBucketingStrategy,
    FSDPType,
    checkpoint,
    column_parallel,
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    no_sync,
    pipeline_stages,
    row_parallel,
)

nn = torch.nn
PATIENCE = 4.0  # seconds after which collectives give up


def mlp(inner=6, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, inner, **options), nn.Tanh(), nn.Linear(inner, 4))


def step(module, x=None):
    compiled = thunder.jit(module, executors=[])
    compiled(torch.ones(2, 4) if x is None else x).square().sum().backward()


def jitted(program, *inputs):
    return thunder.jit(program, executors=[])(*inputs or (torch.ones(4, 4),))


class Buffered(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(rows))


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        setattr(self, name, nn.Linear(4, 4))


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.ones(count, 4, 4))


class Refused(nn.Module):
    """A line that is not captured, on one rank."""

    def __init__(self, refuses):
        super().__init__()
        self.linear, self.refuses = nn.Linear(4, 4), refuses

    def forward(self, x):
        y = self.linear(x)
        if self.refuses:
            self.linear.weight.untyped_storage()
        return y


class Branch(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layers, self.number = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), number

    def forward(self, x):
        return self.layers[self.number](x)


class Trained(nn.Module):
    """A layer that only training has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if self.training else x


def frozen(rank):
    module = mlp()
    module[0].weight.requires_grad_(rank == 0)
    return fsdp(module)


# ------------------------------------------------------------ ranks that differ when a module is prepared


DIFFERENT_MODULES = {
    "shapes": lambda r: fsdp(mlp(6 + 2 * r)),
    "shapes under ddp": lambda r: ddp(mlp(6 + 2 * r)),
    "dtypes": lambda r: ddp(mlp().to(torch.float64 if r else torch.float32)),
    "names": lambda r: fsdp(Named("one" if r else "other")),
    "numbers": lambda r: fsdp(mlp(bias=not r)),
    "buffers": lambda r: ddp(Buffered(3 + r)),
    "shapes of split layers": lambda r: column_parallel(mlp(6 + 2 * r), ["0"]),
    "shapes of shared positions": lambda r: context_parallel(mlp(6 + 2 * r)),
    "numbers of experts": lambda r: expert_parallel(Experts(2 + 2 * r), [""]),
    "frozen parameters": frozen,
    "strategies": lambda r: fsdp(mlp(), sharding_strategy=FSDPType.ZERO3 if r else FSDPType.ZERO2),
    "buckets": lambda r: fsdp(
        mlp(), bucketing_strategy=FSDPBucketingStrategy.LAYER if r else FSDPBucketingStrategy.NONE
    ),
    "dtypes of programs": lambda r: fsdp(mlp(), dtype=torch.bfloat16 if r else None),
    "dtypes of reductions": lambda r: fsdp(mlp(), reduce_dtype=torch.float64 if r else None),
    "sizes of buckets": lambda r: ddp(mlp(), bucket_size_in_mb=0.0 if r else 25.0),
    "dimensions of sequences": lambda r: column_parallel(mlp(), ["0"], sequence_dim=0 if r else None),
    "kinds of parallelism": lambda r: fsdp(mlp()) if r else ddp(mlp()),
    "kinds of layers": lambda r: row_parallel(mlp(), ["2"]) if r else column_parallel(mlp(), ["0"]),
    "paths of layers": lambda r: column_parallel(mlp(), ["0" if r else "2"]),
    "roots": lambda r: ddp(mlp(), broadcast_from=r),
    "dimensions of positions": lambda r: context_parallel(mlp(), sequence_dim=r),
    "paths of experts": lambda r: expert_parallel(nn.Sequential(Experts(2), Experts(2)), [str(r)]),
    "layers and positions": lambda r: context_parallel(mlp()) if r else column_parallel(mlp(), ["0"]),
}


# ------------------------------------------------------------ ranks whose programs differ


def two(first, second):
    return lambda x: second(first(x))


def total(x):
    return thunder.torch.all_reduce(x, "sum", dist.group.WORLD)


def greatest(x):
    return thunder.torch.all_reduce(x, "max", dist.group.WORLD)


def gathered(x):
    return thunder.torch.all_gather(x, dist.group.WORLD)[:4]


def in_autocast(rank):
    module = column_parallel(mlp(), ["0"])
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        step(module, torch.ones(3, 4))


def in_evaluation(rank):
    module = fsdp(nn.Sequential(*mlp(), Trained()))
    step(module.train(rank == 0))


def by_data(rank):
    """A branch that data decide, which are those of a rank."""
    first, second = fsdp(mlp()), fsdp(mlp(10))
    jitted(lambda x: first(x) if x.sum() > 0 else second(x), torch.full((2, 4), 1.0 - 2 * rank))


def frozen_later(rank):
    module = ddp(mlp(14))
    module[0].weight.requires_grad_(rank == 0)
    step(module)


def whole_step(rank, clips):
    module = column_parallel(mlp(18), ["0"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train(x):
        module(x).square().sum().backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    jitted(train, torch.ones(3, 4))


DIFFERENT_PROGRAMS = {
    # of sizes of their own: ranks that have agreed on a program once do not ask again
    "a collective": lambda r: jitted(gathered if r else total, torch.ones(4, 5)),
    "an order": lambda r: jitted(two(total, gathered) if r else two(gathered, total), torch.ones(4, 6)),
    "a shape": lambda r: jitted(total, torch.ones(5 + r, 7)),
    "a dtype": lambda r: jitted(total, torch.ones(4, 8, dtype=torch.float64 if r else torch.float32)),
    "a reduction": lambda r: jitted(greatest if r else total, torch.ones(4, 9)),
    "one more": lambda r: jitted(two(total, total) if r else total, torch.ones(4, 10)),
    "a layer": lambda r: step(fsdp(Branch(r))),
    "a layer under ddp": lambda r: step(ddp(Branch(r))),
    "rows of split layers": lambda r: step(column_parallel(mlp(), ["0"]), torch.ones(5 + r, 4)),
    "lengths of shared sequences": lambda r: step(context_parallel(mlp()), torch.ones(2, 8 + 8 * r, 4)),
    "autocast": in_autocast,
    "evaluation": in_evaluation,
    "a parameter that is frozen later": frozen_later,
    "a step that clips": lambda r: whole_step(r, r == 1),
}


# ------------------------------------------------------------ the same mistake on all ranks: (what, the error)


def replaced_later(rank):
    module = fsdp(mlp())
    module[0].weight = nn.Parameter(torch.ones(6, 4))
    step(module)


def old_parameters(rank):
    module = mlp()
    weight = module[0].weight
    fsdp(module)
    jitted(lambda x: x @ weight.t())


def other_state(rank):
    import tempfile

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    saved = thunder.jit(fsdp(mlp()))
    checkpoint.save({"model": checkpoint.get_model_state_dict(saved)}, folder[0] + "/state")
    other = thunder.jit(fsdp(mlp(8)))
    state = {"model": checkpoint.get_model_state_dict(other)}
    checkpoint.load(state, folder[0] + "/state")


def outside_of_the_block(rank):
    module = thunder.jit(fsdp(mlp()), executors=[])
    with no_sync(module):
        loss = module(torch.ones(2, 4)).sum()
    loss.backward()


def tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


WRONG = {
    "fsdp twice": (lambda r: fsdp(fsdp(mlp())), "is distributed already"),
    "ddp of shards": (lambda r: ddp(fsdp(mlp())), "is distributed already"),
    "layers of shards": (lambda r: row_parallel(fsdp(mlp()), ["2"]), "is distributed already: split it first"),
    "positions of shards": (lambda r: context_parallel(fsdp(mlp())), "is distributed already: share positions first"),
    "experts of shards": (lambda r: expert_parallel(fsdp(Experts(2)), [""]), "is distributed already: share experts"),
    "a size": (lambda r: column_parallel(mlp(5), ["0"]), "has 5 elements; valid: a multiple of the 2 ranks"),
    "a number of experts": (lambda r: expert_parallel(Experts(3), [""]), "has 3 rows, one for each expert; valid"),
    "a kind of layer": (lambda r: column_parallel(mlp(), ["1"]), "splits Linear and Embedding modules; 1 is a Tanh"),
    "a path": (lambda r: column_parallel(mlp(), ["up"]), "has no attribute `up`"),
    "no module": (lambda r: fsdp(lambda x: x), "takes an nn.Module"),
    "three dimensions": (
        lambda r: fsdp(mlp(), process_group=init_device_mesh("cpu", (1, 1, 2))), "is a DeviceMesh of 3 dimensions",
    ),
    "a root": (
        lambda r: fsdp(mlp(), process_group=init_device_mesh("cpu", (1, 2)), broadcast_from=7), "broadcast_from=7",
    ),
    "a bucket": (lambda r: ddp(mlp(), bucket_size_in_mb=-1), "bucket_size_in_mb=-1 is not an option"),
    "a strategy": (lambda r: fsdp(mlp(), sharding_strategy="zero3"), "sharding_strategy='zero3' is not an option"),
    "a parameter of later": (replaced_later, "was added to the module, or replaced, after it was prepared"),
    "an old parameter": (old_parameters, "was parameter 0.weight before the module was distributed"),
    "another checkpoint": (other_state, "0.weight|size mismatch"),
    "a branch by data": (by_data, r"(?s)ranks that communicate would have to decide together.*test_mistakes\.py:\d+"),
    "a backward outside": (outside_of_the_block, "the module was called under no_sync"),
    "a place to split": (lambda r: pipeline_stages(mlp(), ["3"], torch.ones(1, 4)), "split_at='3' is not where a module can be split"),
    "an order of stages": (
        lambda r: pipeline_stages(mlp(), ["2", "1"], torch.ones(1, 4)), "it does not come behind those before it",
    ),
    "tied stages": (lambda r: pipeline_stages(tied(), ["2"], torch.ones(1, 4)), "would both train parameter 0.weight|2.weight"),
    "stages with buffers": (
        lambda r: pipeline_stages(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), ["1"], torch.ones(2, 4)),
        "changes buffers or other state",
    ),
}  # fmt: skip


def errors(rank, size, table, name):
    """The text of the error."""
    mistake = globals()[table][name]
    start = time.monotonic()
    with warnings.catch_warnings(action="ignore"), pytest.raises(BaseException) as caught:  # PyTorch's as well
        (mistake[0] if isinstance(mistake, tuple) else mistake)(rank)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - start


@pytest.mark.parametrize("name", DIFFERENT_MODULES)
def test_different_modules(ranks, name):
    for rank, (text, seconds) in enumerate(ranks(2)(errors, "DIFFERENT_MODULES", name)):
        assert text.startswith("CollectiveError") and "prepare different modules" in text, text
        assert f"on rank {rank}" in text and f"on rank {1 - rank}" in text and seconds < 10, text


@pytest.mark.parametrize("name", DIFFERENT_PROGRAMS)
def test_different_programs(ranks, name):
    for rank, (text, seconds) in enumerate(ranks(2)(errors, "DIFFERENT_PROGRAMS", name)):
        assert text.startswith("CollectiveError") and "run different programs" in text, text
        assert f"on rank {rank}" in text and f"on rank {1 - rank}" in text and seconds < 20, text
        names_it = r"test_mistakes\.py:\d+|On rank \d that is for linear\.py:\d+, \d| for (d_)?t_\w+"
        assert re.search(names_it, text), text  # the line, the layer or the parameter


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(ranks, name):
    for text, seconds in ranks(2)(errors, "WRONG", name):
        assert re.search(WRONG[name][1], text) and seconds < 20, text


# ------------------------------------------------------------ one rank is at something else, or its disk is full


def only_one_calls(rank):
    module = fsdp(mlp())
    if rank == 0:
        step(module)
    else:
        time.sleep(PATIENCE + 2)
        raise RuntimeError("rank 1 did not call")


def one_refuses(rank):
    step(fsdp(Refused(rank == 1)))


def one_fails(rank):
    module = thunder.jit(fsdp(mlp()), executors=[])
    module(torch.ones(2, 4)).sum().backward()
    module(torch.ones(2, 4 + rank)).sum().backward()


def one_evaluates(rank):
    module = thunder.jit(fsdp(mlp()), executors=[])
    with torch.no_grad() if rank else contextlib.nullcontext():
        y = module(torch.ones(2, 4)).sum()
    if rank:
        time.sleep(PATIENCE + 2)
        raise RuntimeError("rank 1 did not train")
    y.backward()


def one_prepares(rank):
    if rank:
        time.sleep(PATIENCE + 2)
        raise RuntimeError("rank 1 did not prepare")
    fsdp(mlp())


def another_mesh(rank):
    alone = [dist.new_group([r]) for r in range(2)]
    if rank:
        fsdp(mlp(), process_group=alone[1])
        time.sleep(PATIENCE + 2)
        raise RuntimeError("rank 1 prepared a module over ranks of its own")
    fsdp(mlp())


def one_is_slow(rank):
    module = thunder.jit(fsdp(mlp()), executors=[])
    module(torch.ones(2, 4)).sum().backward()
    if rank:
        time.sleep(PATIENCE + 8)
    module(torch.ones(2, 4)).sum().backward()


def one_forgets_to_synchronize(rank):
    module = thunder.jit(ddp(mlp()), executors=[])
    with no_sync(module) if rank else contextlib.nullcontext():
        module(torch.ones(2, 4)).sum().backward()
        if rank:
            time.sleep(PATIENCE + 8)
            raise RuntimeError("rank 1 did not synchronize")


def one_is_interrupted(rank):
    """An error of its data in the second step."""
    module = thunder.jit(fsdp(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))), executors=[])
    for number in range(2):
        module(torch.tensor([1, 2 + 7 * number * rank])).sum().backward()


def folder_of_all():
    import tempfile

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0] + "/state"


def saved_by_one(rank, save):
    module, folder = thunder.jit(fsdp(mlp())), folder_of_all()
    if rank:
        time.sleep(PATIENCE + 8)
        raise RuntimeError("rank 1 did not save")
    save({"model": checkpoint.get_model_state_dict(module)}, folder)


def loaded_by_one(rank):
    module, folder = thunder.jit(fsdp(mlp())), folder_of_all()
    state = {"model": checkpoint.get_model_state_dict(module)}
    checkpoint.save(state, folder)
    if rank:
        time.sleep(PATIENCE + 8)
        raise RuntimeError("rank 1 did not load")
    checkpoint.load(state, folder)


def one_disk_is_full(rank, save=checkpoint.save):
    module, folder = thunder.jit(fsdp(mlp(4096))), folder_of_all()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        save({"model": checkpoint.get_model_state_dict(module)}, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def saved_later(state, folder):
    checkpoint.async_save(state, folder).result()


LONELY = {
    "one calls": (only_one_calls, "rank 1 (compiled no program|says nothing)"),
    "one refuses": (one_refuses, "rank 1 (compiled no program|says nothing)"),
    "one fails": (one_fails, "rank 1 (says nothing|did not compile)"),
    "one evaluates": (one_evaluates, "run different programs: collective .* on rank 1"),
    "one prepares": (one_prepares, "rank 1 (prepared no module|says nothing)"),
    "another mesh": (another_mesh, "rank 1 (prepared no module|says nothing)"),
    "one is slow": (one_is_slow, "rank 1 says nothing: it hangs"),
    "one does not synchronize": (one_forgets_to_synchronize, "rank 1 (compiled no program|says nothing|did not)"),
    "one is interrupted": (one_is_interrupted, "rank 1 says nothing"),
    "one saves": (lambda r: saved_by_one(r, checkpoint.save), "(?s)saving .*rank 1 says nothing"),
    "one saves in the background": (lambda r: saved_by_one(r, saved_later), "(?s)saving .*rank 1 says nothing"),
    "one loads": (loaded_by_one, "(?s)loading .*rank 1 says nothing"),
    "a full disk": (one_disk_is_full, "RANK 1"),
    "a full disk in the background": (lambda r: one_disk_is_full(r, saved_later), "RANK 1"),
}


@pytest.mark.slow  # each waits for a timeout, in processes of its own
@pytest.mark.parametrize("name", LONELY)
def test_one_rank_is_at_something_else(name):
    patience = 60.0 if name.startswith("a full disk") else PATIENCE  # which no rank waits for
    ranks = Ranks(2, patience=patience)
    try:
        for rank, (text, seconds) in enumerate(ranks(errors, "LONELY", name)):
            assert (rank or re.search(LONELY[name][1], text)) and seconds < 3 * patience + 10, (rank, text)
    finally:
        ranks.close()
