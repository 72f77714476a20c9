"""Programs on disk with regions of the Triton fuser."""

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.errors import ProgramFileError
from thunder.executors.triton_kernels.by_strides import KeptRegion
from thunder.programs import regions
from thunder.transforms import reuse_memory

pytest.importorskip("triton", reason="the fuser needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"keep_programs": True, "executors": ["triton_fuser"]}


class Block(torch.nn.Module):
    """Elementwise operations, a norm with sums in its backward, and a transposed value."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

    def forward(self, x):
        y = F.gelu(self.norm(x)) * 1.5
        z = self.linear(y).view(-1, 4, 4).transpose(0, 1)
        return (z.exp() + z).sum(0).relu()


@pytest.fixture
def later(monkeypatch):
    """Programs are written when the test says so, and not a second later."""
    regions_later = regions.Later()
    monkeypatch.setattr(regions_later, "_run", lambda: None)
    monkeypatch.setattr("thunder.programs.keep.LATER", regions_later)
    return regions_later


def step(compiled, module, x):
    module.zero_grad()
    out = compiled(x)
    out.sum().backward()
    return out.detach(), [p.grad.clone() for p in module.parameters()]


def stats(compiled):
    statistics = thunder.compile_stats(compiled)
    return statistics.loaded, statistics.cache_misses, statistics.interpreted_instructions > 0


def kept_regions(compiled):
    """The regions of the forward of a program from the disk."""
    function = thunder.last_traces(compiled)[-1].python_callable()
    return [x for x in function.__globals__.values() if type(x) is KeptRegion]


def test_a_second_process_runs_the_same_kernels(cache, later):
    module, x = Block().to(DEVICE), torch.randn(6, 16, device=DEVICE)
    first = thunder.jit(module, **OPTIONS)
    want = step(first, module, x)
    assert not list(cache.glob("*.program")), "what its kernels are is known when it has run"
    later.write()
    (path,) = cache.glob("*.program")
    written = path.stat().st_mtime_ns
    later.write()
    assert path.stat().st_mtime_ns == written, "nothing is new"
    second = thunder.jit(module, **OPTIONS)
    for _ in range(2):
        got = step(second, module, x)
        assert torch.equal(got[0], want[0])
        assert all(map(torch.equal, got[1], want[1]))
    assert stats(second) == (1, 1, False)
    loaded_regions = kept_regions(second)
    assert loaded_regions and all(r.is_usual for r in loaded_regions)


def test_other_strides_run_by_operations_and_compile_anew(cache, later):
    def program(x):
        return (x * 2.0).exp().sum(-1)

    x = torch.randn(8, 8, device=DEVICE)
    thunder.jit(program, **OPTIONS)(x)
    later.write()
    second = thunder.jit(program, **OPTIONS)
    torch.testing.assert_close(second(x), program(x))
    assert stats(second) == (1, 1, False) and kept_regions(second)[0].is_usual
    torch.testing.assert_close(second(x.t()), program(x.t()))
    assert not kept_regions(second)[0].is_usual
    torch.testing.assert_close(second(x.t()), program(x.t()))
    assert stats(second)[1:] == (2, True), "compiled again, for both"
    later.write()
    third = thunder.jit(program, **OPTIONS)
    torch.testing.assert_close(third(x.t()), program(x.t()))
    assert stats(third) == (1, 1, False) and kept_regions(third)[0].is_usual


def test_kernels_that_are_gone(cache, later, monkeypatch):
    """The cache of kernels may be removed at any time."""

    def program(x):
        return (x * 2.0).exp().sum(-1)

    x = torch.randn(8, 8, device=DEVICE)
    thunder.jit(program, **OPTIONS)(x)
    later.write()
    monkeypatch.setattr("thunder.executors.triton_kernels.by_strides._launch_of", lambda said: None)
    second = thunder.jit(program, **OPTIONS)
    torch.testing.assert_close(second(x), program(x))
    assert stats(second)[0] == 1 and not kept_regions(second)[0].is_usual


def test_a_users_own_file_holds_no_kernels(tmp_path):
    compiled = thunder.jit(lambda x: (x * 2.0).exp(), executors=["triton_fuser"])
    with pytest.raises(ProgramFileError, match="machine code"):
        thunder.precompile(compiled, torch.randn(4, device=DEVICE), path=tmp_path / "a")


@pytest.mark.parametrize("what", ["dropout", "index", "inplace", "norm"])
def test_programs_of_other_kinds(what, cache, later):
    programs = {
        "dropout": lambda x: F.dropout(x * 2.0, 0.5).exp(),
        "index": lambda x: x.exp()[torch.tensor([1, 0, 2], device=x.device)] * 3.0 + 1.0,
        "inplace": lambda x: x.mul(2.0).add_(1.0).relu_(),
        "norm": lambda x: F.group_norm(x * 2.0, 4).sigmoid() * x,
    }
    program, x = programs[what], torch.randn(8, 8, device=DEVICE)
    results = []
    for _ in range(2):
        compiled = thunder.jit(program, **OPTIONS)
        torch.manual_seed(0)
        results.append([compiled(x) for _ in range(2)])
        later.write()
    assert thunder.compile_stats(compiled).loaded == 1, thunder.compile_stats(compiled).not_loaded
    assert all(map(torch.equal, *results))


def test_saved_values_that_a_backward_writes_over(cache, later, monkeypatch):
    """Loaded as well, a graph that is kept may be differentiated again."""
    monkeypatch.setattr(reuse_memory, "SMALLEST", 1)

    def gated(x, w, v):
        return (F.silu(x @ w) * torch.sin(x @ v)) @ w

    leaves = [torch.randn(16, 16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def twice(run):
        y = run(*leaves).sum()
        return [torch.autograd.grad(y, leaves, retain_graph=again) for again in (True, False)]

    want = twice(gated)
    for loaded in (0, 1):
        compiled = thunder.jit(gated, **OPTIONS)
        torch.testing.assert_close(twice(compiled), want)
        later.write()
        assert "unless_read_again" in str(thunder.last_backward_traces(compiled)[-1])
        assert thunder.compile_stats(compiled).loaded == loaded
