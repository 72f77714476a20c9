"""backward, and under ddp the optimizer's step, inside of the compiled function."""

import collections
import copy
from unittest import mock

import pytest
import torch

import thunder
from tests.distributed.training import agree, batches, close, optimizer_of
from thunder.core import regions
from thunder.distributed import FSDPBucketingStrategy, FSDPType, column_parallel, ddp, fsdp, no_sync
from thunder.errors import CaptureError

LAYERS = {"sharding_strategy": FSDPType.ZERO3, "bucketing_strategy": FSDPBucketingStrategy.LAYER}
WAYS = {
    "ddp": ddp, "zero2": fsdp, "zero3": lambda m: fsdp(m, sharding_strategy=FSDPType.ZERO3),
    "zero3 by layers": lambda m: fsdp(m, **LAYERS),
}  # fmt: skip


def made():
    """Rows that two ranks do not share evenly."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).double()


def deeper():
    return torch.nn.Sequential(*made(), torch.nn.GELU(), torch.nn.Linear(3, 3).double())


def communicated(traces) -> collections.Counter:
    names = (line.sym.name.removesuffix("_impl") for line in traces[-1].bound_symbols)
    return collections.Counter(
        name for name in names if name.startswith(("all_gather", "all_reduce", "reduce_scatter"))
    )


def trains(rank, size, way, steps_inside):
    whole, mine = deeper(), WAYS[way](deeper())
    optimizers = optimizer_of(whole), optimizer_of(mine)

    @thunder.jit
    def step(x):
        loss = mine(x).square().mean()
        loss.backward()
        if steps_inside:
            optimizers[1].step()
        return loss.detach()

    for i, x in enumerate(batches(size, torch.float64)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(x).square().mean()
        expected.backward()
        found = step(x.chunk(size)[rank])
        torch.distributed.all_reduce(found)
        close(found / size, expected.detach(), f"loss of step {i}")
        agree(mine, whole, i, gradients=True)
        optimizers[0].step()
        if not steps_inside:
            optimizers[1].step()
        agree(mine, whole, i)
    assert thunder.cache_misses(step) == 1 + steps_inside  # the optimizer has state from the second step on
    names = communicated(thunder.last_traces(step))
    if not steps_inside:
        apart = thunder.jit(mine)
        apart(x.chunk(size)[rank]).square().mean().backward()
        assert names == communicated(thunder.last_traces(apart)) + communicated(thunder.last_backward_traces(apart))
    # that of layer 2 twice
    gathered = {"ddp": (0, 0), "zero2": (6, 0), "zero3": (7, 0), "zero3 by layers": (0, 4)}[way]
    assert (names["all_gather"], names["all_gather_together"]) == gathered


def accumulates(rank, size, way):
    whole, mine = made(), WAYS[way](made())
    data = batches(size, torch.float64, steps=3)

    @thunder.jit
    def backward(x):
        mine(x).square().mean().backward()

    for repetition in range(2):
        with no_sync(mine):
            for x in data[:-1]:
                backward(x.chunk(size)[rank])
                assert "reduce" not in str(thunder.last_traces(backward)[-1])
        for x in data[:-1]:
            whole(x).square().mean().backward()
        agree(mine, whole, repetition, gradients=True)
        backward(data[-1].chunk(size)[rank])
        whole(data[-1]).square().mean().backward()
        agree(mine, whole, repetition, gradients=True)


def steps_in_regions(rank, size):
    """Small regions of one size are launched together on a GPU: made to be here, too."""
    with mock.patch.object(regions, "_small_space", lambda lines: {o.shape for line in lines for o in line.outputs}):
        whole = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).double()
        mine = ddp(copy.deepcopy(whole))
        whole.load_state_dict(mine.state_dict())
        optimizers = optimizer_of(whole), optimizer_of(mine)

        @thunder.jit(executors=["triton_fuser"])
        def step(x):
            mine(x).square().mean().backward()
            optimizers[1].step()

        x = batches(size, torch.float64)[0]
        whole(x).square().mean().backward()
        optimizers[0].step()
        step(x.chunk(size)[rank])
        agree(mine, whole, 0)
    assert "TritonFusion" in str(thunder.last_traces(step)[-1])


def asks_for_gradients(rank, size):
    whole, mine, sharded, split = made(), ddp(made()), fsdp(made()), column_parallel(torch.nn.Linear(4, 4), [""])
    x = batches(size, torch.float64)[0]
    gradients = thunder.jit(lambda module, x: torch.autograd.grad(module(x).square().mean(), list(module.parameters())))
    for found, expected in zip(
        gradients(mine, x.chunk(size)[rank]),
        torch.autograd.grad(whole(x).square().mean(), list(whole.parameters())),
        strict=True,
    ):
        close(found, expected, "gradient")
    with pytest.raises(
        CaptureError,
        match="torch.autograd.grad inside of it asks for the gradient of a parameter that the ranks hold a part of "
        "each",
    ):
        gradients(sharded, x)
    optimizer = optimizer_of(sharded)

    @thunder.jit
    def step(x):
        sharded(x).sum().backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"(?s)the ranks hold a part of it each.*optimizer.step\(\)"):
        step(x)
    assert all(p.grad is None for p in sharded.parameters())
    with pytest.raises(CaptureError, match="of which the ranks compute with a part each"):
        thunder.jit(lambda x: split(x).sum().backward())(torch.ones(2, 4))
    with pytest.raises(
        CaptureError, match="create_graph=True inside of it reaches 2.weight, which the ranks hold together"
    ):
        thunder.jit(lambda x: mine(x).sum().backward(create_graph=True))(x)


def test_backward_inside_synchronises_gradients(ranks):
    for way in WAYS:
        ranks(2)(trains, way, False)


def test_the_optimizer_steps_inside_where_ranks_hold_all_parameters(ranks):
    ranks(2)(trains, "ddp", True)


def test_what_steps_is_the_parameter_and_no_copy_of_it(ranks):
    ranks(2)(steps_in_regions)


def test_backward_inside_accumulates_under_no_sync(ranks):
    for way in WAYS:
        ranks(2)(accumulates, way)


def test_gradients_inside_and_what_is_refused(ranks):
    ranks(2)(asks_for_gradients)
