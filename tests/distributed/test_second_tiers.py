"""Programs that communicate have a second tier, whose collectives come in the order of the first."""

import functools

import pytest
import torch

import thunder
from tests.distributed import beside_one_process
from tests.distributed.test_communication import Blocks
from thunder.cache import tiers
from thunder.kernels import cpp
from thunder.runtime import disk_cache

pytestmark = pytest.mark.skipif(cpp.unavailable() is not None, reason=f"no C++ kernels here: {cpp.unavailable()}")


def train(rank, size, way, staying=()):
    """Six steps with a change of tiers at the third call: the tier, and the distance to one process. staying: ranks
    whose second tier counts as another order of collectives."""
    torch.manual_seed(0)
    module = Blocks().double()
    is_same, load = tiers._is_same, disk_cache.load
    disk_cache.load = lambda key: None  # kernels that are on disk are the first tier
    if rank in staying:
        tiers._is_same = lambda *collectives: False
    try:
        jit = functools.partial(thunder.jit, tiers=3)
        compiled, worst = beside_one_process.train(rank, size, way, module, jit, 6, lambda y: y.square().mean())
    finally:
        tiers._is_same, disk_cache.load = is_same, load
    (entry,) = thunder.compile_stats(compiled).interpreter_cache
    return str(entry.tiers), worst


@pytest.mark.parametrize("way", ["ddp", "zero3", "tp"])
def test_a_program_that_communicates_has_a_second_tier(ranks, way):
    for tier, worst in ranks(2)(train, way, timeout=200.0):
        assert tier == "second tier: its kernels have taken over at call 3"
        assert worst < 1e-12


def test_a_rank_may_stay_in_its_first_tier(ranks):
    """Collectives of both tiers come in one order: the other rank changes its kernels alone."""
    (first, worst), (second, other) = ranks(2)(train, "zero3", (0,), timeout=200.0)
    assert first.startswith("first tier: the second is not compiled: its collectives would come in another order")
    assert second.startswith("second tier")
    assert max(worst, other) < 1e-12


def test_same_gradients_of_a_second_lowering():
    said = "reduce_scatter_together of f64[6], f64[6, 4] ('avg') for d_t_a_shard, d_t_a_0_shard"
    again = "reduce_scatter_together of f64[6], f64[6, 4] ('avg') for d_t_a_shard_0, d_t_a_0_shard_0"
    swapped = "reduce_scatter_together of f64[6], f64[6, 4] ('avg') for d_t_a_0_shard_0, d_t_a_shard_0"
    assert tiers._is_same(("group", said), ("group", again))
    assert not tiers._is_same(("group", said), ("group", swapped))
    assert not tiers._is_same(("group", said), ("another", again))
    assert not tiers._is_same(("group", said), ("group", again.replace("6, 4", "4, 6")))
