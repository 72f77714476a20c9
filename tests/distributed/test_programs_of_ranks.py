"""Programs that communicate are kept on disk: one rank's file is a program of every rank that shares no data."""

import functools
import os
import pathlib

import pytest
import torch

import thunder
from tests.distributed import beside_one_process
from tests.distributed.beside_one_process import WAYS
from tests.distributed.test_communication import Blocks
from tests.distributed.test_layouts_and_models import full
from thunder.distributed import fsdp, no_sync
from thunder.programs import files


class Loss(Blocks):
    def forward(self, x):
        return super().forward(x).square().mean()


def train(rank, size, way, folder, keeping=(0, 1)):
    """Four steps: which programs came from disk, their texts, and the distance of losses and weights to one process.
    keeping: the ranks that look for programs and keep them."""
    os.environ["THUNDER_CACHE_DIR"] = folder
    torch.manual_seed(0)
    module = Loss(width=8).double()
    jit = functools.partial(thunder.jit, keep_programs=rank in keeping, executors=[])
    compiled, worst = beside_one_process.train(rank, size, way, module, jit, steps=4)
    (entry,) = thunder.compile_stats(compiled).interpreter_cache
    names = sorted(path.name for path in files.directory().iterdir())
    return entry.from_disk, str(entry.forward), worst, names


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_loads_what_one_has_written(ranks, way, tmp_path):
    keeping = (0, 1) if way == "tp" else (0,)  # ranks that share data have a file each
    first = ranks(2)(train, way, str(tmp_path), keeping, timeout=120.0)
    assert [r[0] for r in first] == [False, False]
    second = ranks(2)(train, way, str(tmp_path), timeout=120.0)
    assert [r[0] for r in second] == [True, True]
    assert max(r[2] for r in (*first, *second)) < 1e-12
    written = [p for p in pathlib.Path(tmp_path).rglob(f"*{files.SUFFIX}")]
    assert len(written) == len(keeping)


def test_ranks_that_load_and_ranks_that_compile_agree(ranks, tmp_path):
    ranks(2)(train, "zero3", str(tmp_path), timeout=120.0)
    results = ranks(2)(train, "zero3", str(tmp_path), (1,), timeout=120.0)
    assert [r[0] for r in results] == [False, True]
    assert max(r[2] for r in results) < 1e-12


def test_a_program_of_another_layout_is_not_loaded(ranks, tmp_path):
    ranks(2)(train, "ddp", str(tmp_path), timeout=120.0)
    results = ranks(2)(train, "zero2", str(tmp_path), timeout=120.0)
    assert [r[0] for r in results] == [False, False]
    assert max(r[2] for r in results) < 1e-12


def accumulates(rank, size, folder):
    """Programs under no_sync are compiled by each process."""
    os.environ["THUNDER_CACHE_DIR"] = folder
    torch.manual_seed(0)
    module = fsdp(Loss(width=8).double())
    compiled = thunder.jit(module, keep_programs=True, executors=[])
    x = torch.randn(2, size, 5, 6, dtype=torch.float64)
    with no_sync(compiled):
        for part in x:
            compiled(part[rank]).backward()
    loaded = [e.from_disk for e in thunder.compile_stats(compiled).interpreter_cache]
    return loaded, [(full(p.grad) / 2).tolist() for p in module.parameters()]


def test_gradients_that_are_accumulated(ranks, tmp_path):
    torch.manual_seed(0)
    one = Loss(width=8).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    one(x).backward()
    for loaded, gradients in (*ranks(2)(accumulates, str(tmp_path)), *ranks(2)(accumulates, str(tmp_path))):
        assert not any(loaded)
        for g, p in zip(gradients, one.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(g, dtype=torch.float64), p.grad, rtol=1e-12, atol=1e-12)
