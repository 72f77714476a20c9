"""Every way to train on several ranks, held against one process: five steps, with and without accumulation, in both
precisions, with tied weights and uneven shards."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thunder
from tests.distributed.training import STEPS, batches, compare, optimizer_of
from thunder.distributed import FSDPType, column_parallel, ddp, fsdp, row_parallel
from thunder.distributed.boundary import local_of
from thunder.distributed.placement import placement_of

# over 2 and 4 ranks: rows of 7 come out even nowhere, those of 12 and 20 do, but not of half of 20 over 4, nor a
# quarter over 2
WIDTH, INNER, TOKENS = 7, 12, 20


class Tied(torch.nn.Module):
    """The head has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = torch.nn.Embedding(TOKENS, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, WIDTH)
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def split(module, group):
    return row_parallel(column_parallel(module, ["up", "head"], group), ["embedding", "down"], group)


def ways(size: int) -> dict:
    """By name: how a module is prepared, over how many ranks data is spread, and over how many parameters are sharded
    and layers split."""
    wrap_and_size = {
        "ddp": (lambda m: ddp(m), size, 1, 1),
        "zero2": (lambda m: fsdp(m), size, size, 1),
        "zero3": (lambda m: fsdp(m, sharding_strategy=FSDPType.ZERO3), size, size, 1),
        "tensor parallel": (lambda m: split(m, None), 1, 1, size),
    }
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "layers"))
    for name, strategy in (("zero2 x tensor parallel", FSDPType.ZERO2), ("zero3 x tensor parallel", FSDPType.ZERO3)):
        wrap_and_size[name] = (
            lambda m, s=strategy: fsdp(split(m, mesh["layers"]), process_group=mesh["data"], sharding_strategy=s),
            size // 2,
            size // 2,
            2,
        )
    return wrap_and_size


def held_shapes(shards: int, parts: int) -> dict[str, tuple[int, ...]]:
    """What one rank holds: parts of split layers along the dimension they are split by, and of that rows, rounded
    up."""
    rows = lambda n: -(-n // shards)
    return {
        "embedding.weight": (rows(TOKENS // parts), WIDTH), "norm.weight": (rows(WIDTH),), "norm.bias": (rows(WIDTH),),
        "up.weight": (rows(INNER // parts), WIDTH), "up.bias": (rows(INNER // parts),),
        "down.weight": (rows(WIDTH), INNER // parts), "down.bias": (rows(WIDTH),),
    }  # fmt: skip


def trains(rank, size, dtype):
    for name, (prepare, spread, shards, parts) in ways(size).items():
        for accumulated in (0, 2):
            torch.manual_seed(0)
            data = batches(
                size, dtype, lambda g: torch.randint(0, TOKENS, (2 * size, 5), generator=g), STEPS * (accumulated + 1)
            )
            optimizers = []
            optimize = lambda m: optimizers.append(optimizer_of(m)) or optimizers[-1]
            of_rank = lambda x: x.chunk(spread)[rank * spread // size]
            try:
                compiled = compare(
                    rank,
                    size,
                    Tied().to(dtype),
                    prepare,
                    data,
                    of_rank=of_rank,
                    accumulated=accumulated,
                    optimize=optimize,
                )
            except AssertionError as error:
                raise AssertionError(f"{name}, {accumulated} accumulated: {error}") from error
            held = dict(compiled.named_parameters())
            assert {n: placement_of(p).held_shape for n, p in held.items()} == held_shapes(shards, parts), name
            assert compiled._model.head.weight is compiled._model.embedding.weight
            for n, p in held.items():
                placement, states = placement_of(p), [t for t in optimizers[-1].state[p].values() if t.ndim]
                assert local_of(p).untyped_storage().nbytes() == math.prod(placement.held_shape) * dtype.itemsize
                assert len(states) == 2 and all(
                    local_of(t).untyped_storage().nbytes() == local_of(p).nbytes for t in states
                ), f"{name}: {n}"
                assert placement.accumulated.gradient is None, f"{name}: {n}"
            assert thunder.cache_misses(compiled) == (2 if accumulated and name != "tensor parallel" else 1), name


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("size", (2, 4))
def test_training_equals_that_of_one_process(ranks, size, dtype):
    ranks(size)(trains, dtype)
