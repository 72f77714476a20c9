"""ddp and fsdp on processes: training equals that of one process."""

import math

import pytest
import torch

import thunder
from tests.distributed.training import agree, batches, close, compare
from thunder.distributed import (
    DDPTransform,
    FSDPTransform,
    FSDPType,
    clip_grad_norm_,
    copy_default_process_group,
    ddp,
    fsdp,
)
from thunder.distributed.boundary import local_of
from thunder.distributed.placement import placement_of

ZERO2, ZERO3 = FSDPType.ZERO2, FSDPType.ZERO3


def mlp(dtype=torch.float64):
    """Rows that two ranks do not share evenly: 7 and 3."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)).to(
        dtype
    )


def trains(rank, size, dtype, strategy, compiled_first):
    def prepare(m):
        m = thunder.jit(m) if compiled_first else m
        return ddp(m) if strategy is None else fsdp(m, sharding_strategy=strategy)

    compiled = compare(rank, size, mlp(dtype), prepare, batches(size, dtype))
    assert thunder.cache_misses(compiled) == 1
    shapes = {name: placement_of(p).held_shape for name, p in compiled.named_parameters()}
    wanted = {"0.weight": (7, 6), "0.bias": (7,), "2.weight": (7,), "2.bias": (7,), "3.weight": (3, 7), "3.bias": (3,)}
    if strategy is not None:
        wanted = {name: (-(-n // size), *rest) for name, (n, *rest) in wanted.items()}
    assert shapes == wanted
    for p in compiled.parameters():
        # nothing of the whole parameter is left
        assert local_of(p).untyped_storage().nbytes() == math.prod(placement_of(p).held_shape) * dtype.itemsize


def test_two_ranks_train_as_one_process(ranks):
    for strategy in (None, ZERO2, ZERO3):
        for dtype in (torch.float64, torch.float32):
            ranks(2)(trains, dtype, strategy, False)
        ranks(2)(trains, torch.float64, strategy, True)


def test_four_ranks_of_which_one_holds_padding_only(ranks):
    ranks(4)(trains, torch.float64, ZERO3, False)  # three rows: the fourth rank has none


def accumulates(rank, size, strategy):
    module = mlp()
    whole = mlp()
    mine = thunder.jit(ddp(module) if strategy is None else fsdp(module, sharding_strategy=strategy))
    data = batches(size, torch.float64, steps=3)
    for repetition in range(2):  # gradients of the second add to those of the first
        with mine.no_sync():
            for x in data[:-1]:
                mine(x.chunk(size)[rank]).square().mean().backward()
            assert ("all_reduce" in str(thunder.last_backward_traces(mine)[-1])) is False
            assert ("reduce_scatter" in str(thunder.last_backward_traces(mine)[-1])) is False
            local = [p.grad is not None for p in mine.parameters()]
            assert all(local) if strategy is None or repetition else not any(local)
        synchronized = [p.grad.clone() for p in mine.parameters()]
        for x in data[:-1]:
            whole(x).square().mean().backward()
        agree(mine, whole, repetition, gradients=True)
        mine(data[-1].chunk(size)[rank]).square().mean().backward()
        whole(data[-1]).square().mean().backward()
        agree(mine, whole, repetition, gradients=True)
        assert not any(torch.equal(a, p.grad) for a, p in zip(synchronized, mine.parameters()))
    assert thunder.cache_misses(mine) == 2  # one program with synchronisation, one without


def test_no_sync_synchronises_what_was_accumulated_when_it_ends(ranks):
    for strategy in (None, ZERO2, ZERO3):
        ranks(2)(accumulates, strategy)


def accumulates_wrongly(rank, size, strategy):
    """What is not said to be accumulated is synchronised, and what is gone is gone."""
    wrap = lambda: thunder.jit(ddp(mlp()) if strategy is None else fsdp(mlp(), sharding_strategy=strategy))
    mine, other, whole = wrap(), wrap(), mlp()
    x = batches(size, torch.float64)[0]
    part = x.chunk(size)[rank]
    whole(x).square().mean().backward()
    with mine.no_sync():
        late = mine(part).square().mean()
        other(part).square().mean().backward()  # of a module that the block is not about
        agree(other, whole, 0, gradients=True)
        with other.no_sync():
            other(part).square().mean().backward()
            mine(part).square().mean().backward()
    whole.zero_grad()
    whole(x).square().mean().backward()
    agree(mine, whole, 0, gradients=True)
    with pytest.raises(RuntimeError, match="the module was called under no_sync, and its backward runs outside"):
        late.backward()
    mine.zero_grad()
    with pytest.raises(KeyboardInterrupt), mine.no_sync():
        mine(part).square().mean().backward()
        raise KeyboardInterrupt
    mine.zero_grad()
    with mine.no_sync():
        mine(part).square().mean().backward()
    agree(mine, whole, 0, gradients=True)


def test_no_sync_is_about_one_module_and_whole_backwards(ranks):
    for strategy in (None, ZERO2, ZERO3):
        ranks(2)(accumulates_wrongly, strategy)


def norm_over_all(rank, size):
    whole, mine = mlp(), thunder.jit(fsdp(mlp()))
    x = batches(size, torch.float64)[0]
    for norm_type in (2.0, 1.0, float("inf")):
        whole.zero_grad()
        mine.zero_grad()
        whole(x).square().mean().backward()
        mine(x.chunk(size)[rank]).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
        norm = clip_grad_norm_(mine.parameters(), 0.01, norm_type)
        assert expected > 0.01
        close(norm, expected, f"norm of type {norm_type}")
        agree(mine, whole, 0, gradients=True)


def test_gradients_are_clipped_by_the_norm_over_all_ranks(ranks):
    ranks(2)(norm_over_all)


def as_transforms(rank, size):
    group = copy_default_process_group()
    for transform, text in (
        (DDPTransform(group), "all_reduce"),
        (FSDPTransform(process_group=group, sharding_strategy=ZERO3), "reduce_scatter"),
    ):
        compiled = compare(
            rank, size, mlp(), lambda m: thunder.jit(m, transforms=[transform]), batches(size, torch.float64)
        )
        assert text in str(thunder.last_backward_traces(compiled)[-1]) and thunder.list_transforms(compiled) == [
            transform
        ]


def test_as_transforms_over_another_group(ranks):
    ranks(2)(as_transforms)
