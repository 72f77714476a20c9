"""Tiles that are measured: every tile that may be chosen computes the same, calls change to the fastest at one call,
and other processes begin with it."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.errors import OptionError
from thunder.executors import triton_fuser as fuser_module
from thunder.executors.triton_fuser import TritonFuser

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
pytestmark = [
    # numpy says so where the interpreter computes what is not used
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("triton_interpreter"),
]  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Clock:
    """A clock to which the last tile of each kernel is the fastest; it compares what the kernels of a launch write."""

    clocks: list[Clock] = []

    def __init__(self):
        self.times: dict[int, list[float]] = {}
        Clock.clocks.append(self)

    def fastest(self, number, runs):
        for run in runs:
            run()
        if len(runs) > 1:
            self.times[number] = [1.0 / (n + 1) for n in range(len(runs))]


@pytest.fixture(autouse=True)
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Clock, "clocks", [])
    monkeypatch.setattr(fuser_module, "Stopwatch", lambda device: Clock())
    monkeypatch.setattr(fuser_module, "WORTH", 0)
    monkeypatch.setattr(fuser_module, "TRIED", 40)


def tiles_of(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    regions = [b.sym.fn for b in traces[-1].bound_symbols if b.sym.is_fusion]
    return [launch.kernels[0][1] for region in regions for launch in region.chosen(region._shown)]


def jit(program, **options):
    return thunder.jit(program, executors=[TritonFuser("measured")], graphs=False, **options)


PROGRAMS = {
    "rows": lambda x: torch.softmax(x * 2, -1),
    "columns": lambda x: (x * x).sum(0),
    "map": lambda x: F.gelu(x) * x.sigmoid(),
    "transposed": lambda x: x[:40, :40].sin() + x[:40, :40].t(),
    "two passes": lambda x: F.layer_norm(x, (x.shape[-1],)) * x.amax(0),
    "squares": lambda x: torch.exp(-x.t()).contiguous() * 2 + 1,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_tile_computes_the_same(name, monkeypatch, tmp_path):
    x, program = torch.randn(40, 50, device=DEVICE), PROGRAMS[name]
    counts = []
    for number in (2, 40):
        monkeypatch.setattr(fuser_module, "TRIED", number)
        monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path / str(number)))  # where nothing was measured
        compiled = jit(program, autotune=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), program(x), rtol=1e-5, atol=1e-5)
        counts.append(max((len(t) for clock in Clock.clocks for t in clock.times.values()), default=0))
    assert counts[-1] > 2


@pytest.mark.slow
def test_the_second_call_changes_tiles():
    weight = torch.randn(96, device=DEVICE, requires_grad=True)
    x = torch.randn(64, 96, device=DEVICE, requires_grad=True)

    def program(x):
        return F.layer_norm(x * x.sigmoid(), (96,), weight)

    compiled, seen = jit(program, autotune=True), []
    for _ in range(5):
        result, expected = compiled(x), program(x)
        cotangent = torch.randn_like(result)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(
            torch.autograd.grad(result, (x, weight), cotangent), torch.autograd.grad(expected, (x, weight), cotangent)
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        seen.append((tiles_of(compiled), tiles_of(compiled, backward=True)))
    first, *others = seen
    assert all(s == others[-1] for s in others[1:]) and first[0] != others[0][0]


def test_another_process_begins_with_the_fastest():
    x, compiled = torch.randn(64, 96, device=DEVICE), jit(PROGRAMS["rows"], autotune=True)
    first = compiled(x), tiles_of(compiled)
    compiled(x)
    compiled(x)
    assert tiles_of(compiled) != first[1]
    measured = len(Clock.clocks)
    other = jit(PROGRAMS["rows"])  # its executor has compiled nothing, as that of another process
    torch.testing.assert_close(other(x), first[0])
    assert tiles_of(other) == tiles_of(compiled) and len(Clock.clocks) == measured


def test_deterministic_programs_and_others_measure_nothing():
    x = torch.randn(64, 96, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        compiled = jit(PROGRAMS["rows"], autotune=True)
        for _ in range(4):
            compiled(x)
    finally:
        torch.use_deterministic_algorithms(False)
    compiled = jit(PROGRAMS["rows"])
    for _ in range(4):
        compiled(x)
    assert not Clock.clocks
    with pytest.raises(OptionError, match="autotune='yes' is not an option; valid: True, False"):
        thunder.jit(PROGRAMS["rows"], autotune="yes")
