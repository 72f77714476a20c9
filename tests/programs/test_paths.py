"""Programs with decisions by data in files: each path is loaded, and computes and differentiates as eager PyTorch."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.errors import ProgramFileError
from thunder.programs import files


def two_decisions(x, w):
    y = x @ w
    y = y.relu() * 2 if y.sum() > 0 else y.tanh()
    if y.norm() > 3:
        y = y / y.norm()
    return y.sum(), y


def draws(x, w):
    y = F.dropout(x @ w, 0.5)
    return (y.sum(), y) if y.sum() > 0 else (y.mean(), y + torch.rand_like(y))


def called(function, seed, scale=1.0):
    """The results and gradients of a call, with the state of the generator behind it."""
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(3, 4, generator=generator)
    w = torch.randn(4, 4, generator=generator).requires_grad_()
    torch.manual_seed(seed)
    loss, y = function(x, w)
    loss.backward()
    return loss.detach(), y.detach(), w.grad, torch.get_rng_state()


@pytest.mark.parametrize("function, paths", [(two_decisions, 4), (draws, 2)])
def test_each_path_is_loaded(function, paths, tmp_path, cache):
    args = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    path = thunder.precompile(function, *args, path=tmp_path / "one.program")
    assert 1 + len(files.read(path, None)["paths"]) == paths
    loaded = thunder.load(path, function)
    for seed in range(16):
        for actual, expected in zip(called(loaded, seed, 1.0 + seed % 4), called(function, seed, 1.0 + seed % 4)):
            assert torch.equal(actual, expected)
    stats = thunder.compile_stats(loaded)
    assert stats.loaded > 1 and not stats.interpreted_instructions


def test_paths_are_kept_one_by_one(cache, monkeypatch):
    for first in (True, False):
        compiled = thunder.jit(two_decisions, keep_programs=True)
        for seed in range(8):
            assert torch.equal(called(compiled, seed)[2], called(two_decisions, seed)[2])
        stats = thunder.compile_stats(compiled)
        assert (stats.loaded > 0) is not first and (stats.interpreted_instructions > 0) is first


def test_a_path_that_raises_or_depends_on_a_number_is_captured(tmp_path, cache):
    def function(x):
        if x.isnan().any():
            raise ValueError("nan")
        for _ in range(int(x.sum())):
            x = x + 1
        return x

    loaded = thunder.load(thunder.precompile(function, torch.ones(2), path=tmp_path / "one.program"), function)
    assert torch.equal(loaded(torch.ones(2)), torch.full((2,), 3.0))
    assert not thunder.compile_stats(loaded).interpreted_instructions
    assert torch.equal(loaded(torch.full((2,), 1.5)), torch.full((2,), 4.5))
    with pytest.raises(ValueError, match="nan"):
        loaded(torch.tensor([1.0, float("nan")]))


def test_each_path_of_a_forged_file_is_looked_at(tmp_path, cache):
    args = torch.randn(3, 4), torch.randn(4, 4)
    path = thunder.precompile(two_decisions, *args, path=tmp_path / "one.program")
    document = dict(files.read(path, None))
    other = document["paths"][-1]["computation"]
    other["text"] = other["text"].replace("torch.", "torch.ops.aten.from_file(1);torch.", 1)
    files.write(path, document, None)
    with pytest.raises(ProgramFileError, match="from_file"):
        thunder.load(path, two_decisions, trusted=True)
