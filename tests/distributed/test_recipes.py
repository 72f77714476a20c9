"""Recipes that distribute a module."""

import pytest
import torch

import thunder
from tests.distributed.training import batches, compare
from thunder.distributed import FSDPType
from thunder.recipes import FSDP


def trains(rank, size, recipe):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).double()
    compiled = compare(
        rank,
        size,
        module,
        lambda m: thunder.compile(m, recipe="training", plugins=recipe),
        batches(size, torch.float64),
    )
    assert thunder.cache_misses(compiled) == 1


@pytest.mark.parametrize("recipe", ["ddp", "distributed", FSDP(sharding_strategy=FSDPType.ZERO3)])
def test_distributed_recipes_train_as_one_process(ranks, recipe):
    ranks(2)(trains, recipe)
