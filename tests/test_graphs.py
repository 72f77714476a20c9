"""The tier of CUDA graphs, `graphs="auto"`, on a fake GPU (tests/fake_gpu.py). tests/graph_programs.py has the
programs that could notice it."""

import functools
import itertools
import warnings

import pytest
import torch
from torch import nn

import thunder
from tests import graph_programs
from tests.fake_gpu import FakeGPU, World
from thunder import compat
from thunder.cache import graphs
from thunder.errors import OptionError
from thunder.runtime.cudagraphs.device import DEVICES
from thunder.runtime.cudagraphs.memory import Memory

CALL = 6


@pytest.fixture
def world(monkeypatch):
    """Programs on the CPU are recorded, at their sixth call."""
    fake = World()
    monkeypatch.setitem(DEVICES, "cpu", lambda device: FakeGPU(device, fake))
    monkeypatch.setattr(graphs, "GRAPHS_CALL", CALL)
    return fake


def compiled(f, **options):
    return thunder.jit(f, executors=["torch"], **options)


def program(x):
    return (x.sin() + 1) * x.cos()


def calls(f, count, *args):
    return [f(*args) for _ in range(count)]


def reason(f, number=0):
    return str(f.programs[number].graphs)


def test_a_program_is_recorded_where_the_host_takes_longer(world):
    f, x = compiled(program), torch.randn(4)
    calls(f, CALL - 1, x)
    assert reason(f) == "CUDA graphs: it has not run often enough" and "CUDA graphs" in repr(f.programs[0])
    calls(f, 1, x)
    assert reason(f) == "CUDA graphs: recorded at call 6, since the host took longer" and world.replays == 0
    for n in range(1, 12):
        x = torch.randn(4)
        assert torch.equal(f(x), program(x)) and world.replays == n
    assert reason(f) == "CUDA graphs: recorded, 500 ms for 1e+03 ms without"
    assert "CUDAGraph0" in str(f.programs[0].forward)


def test_memory_takes_graphs_after_all_others_are_gone(world):
    """PyTorch refuses the pool of graphs that are gone, as long as one of their results lives."""
    memory, x = Memory(FakeGPU(torch.device("cpu"), world)), torch.randn(4)
    replay, results = memory.record(lambda inputs: [inputs[0] + 1], [x])
    replay()
    del replay
    again, others = memory.record(lambda inputs: [inputs[0] * 2], [x])
    again()
    assert torch.equal(results[0], x + 1) and torch.equal(others[0], x * 2)


def test_a_program_is_not_recorded_where_the_device_takes_longer(world):
    world.device = 1.5
    f, x = compiled(program), torch.randn(4)
    calls(f, 30, x)
    assert not world.replays and not world.launches
    assert reason(f) == (
        "CUDA graphs: the device takes longer than the host: 1.5e+03 ms of which the host launches 1e+03 ms"
    )
    assert not isinstance(f.programs[0].computation_fn, graphs.GraphTier)  # calls cost what they cost without it


def test_graphs_that_are_no_faster_are_given_up(world):
    world.graphed = 1.0
    f, x = compiled(program), torch.randn(4)
    calls(f, 30, x)
    assert reason(f) == "CUDA graphs: given up: graphs take 1e+03 ms, and 1e+03 ms without"
    assert world.replays == graphs.WARMING + graphs.MEASURED - 1 and "CUDAGraph" not in str(f.programs[0].forward)


def test_the_measurement_changes_no_result(world):
    """Decisions depend on times, results do not: the same program under each."""
    results = []
    for host, device, graphed in itertools.product((1.0, 0.1), (0.5, 2.0), (0.5, 2.0)):
        world.host, world.device, world.graphed = host, device, graphed
        results.append(graph_programs.run("draws", "trains", compiled, "cpu")[0])
    for others in results[1:]:
        assert not graph_programs.unequal(results[0], others)


def test_copies_of_two_types_are_a_launch_for_each(world, monkeypatch):
    """PyTorch copies tensor by tensor where the types of a list differ."""
    copied, copy = [], compat.foreach_copy

    def counted(targets, sources):
        copied.append(sorted({t.dtype for t in (*targets, *sources)}, key=str))
        copy(targets, sources)

    monkeypatch.setattr(compat, "foreach_copy", counted)

    def results(x, y):
        return x.sin(), y * 2, x.cos(), y * 3, x.exp()

    f, args = compiled(results), (torch.randn(4), torch.arange(4))
    calls(f, CALL + 3, *args)
    copied.clear()
    assert all(map(torch.equal, f(*args), results(*args)))
    assert sorted(copied, key=str) == [[torch.float32], [torch.int64]]


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "function"])
def test_parameters_stay_where_they_are(world, wrapped):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    f = compiled((lambda x: module(x)) if wrapped else module)
    for _ in range(CALL + 3):
        f(torch.randn(3, 4)).sum().backward()
    recordings = [r for region in f.programs[0].graphs._regions for r in region.recordings]
    assert len(recordings) == 2 and world.replays
    copied = [[tuple(b.shape) for b in r.buffers] for r in recordings]
    assert copied == [[(3, 4)], [(1, 1), (3, 4)]]  # the input; the expanded cotangent and the input


def test_options(world, monkeypatch):
    x = torch.randn(4)
    for said, option, recorded in (
        (None, "auto", True), (None, False, False), ("off", "auto", False), ("off", True, None), ("on", "auto", None),
    ):  # fmt: skip
        monkeypatch.setenv("THUNDER_GRAPHS", said or "")
        f = compiled(program, graphs=option)
        calls(f, CALL + 1, x)
        assert (f.programs[0].graphs is not None) == bool(recorded)
        assert ("CUDAGraphTransform" in str(f.options.transforms)) == (recorded is None)
    monkeypatch.setenv("THUNDER_GRAPHS", "never")
    with pytest.raises(OptionError, match="THUNDER_GRAPHS='never' is not an option; valid: 'auto', 'on', 'off'"):
        compiled(program)
    for wrong in ("on", None, 3):
        with pytest.raises(OptionError, match=r"graphs=.* is not an option; valid: 'auto', True, False"):
            compiled(program, graphs=wrong)


def test_a_recording_that_finds_no_memory(world):
    f, x = compiled(program), torch.randn(4)
    calls(f, CALL, x)
    world.out_of_memory_at = world.launches + 3
    for _ in range(20):
        assert torch.equal(f(x), program(x))
    assert not world.replays and reason(f) == (
        "CUDA graphs: given up: while it was recorded, PyTorch raised OutOfMemoryError: CUDA out of memory."
    )


def test_memory_beyond_a_share(world):
    world.room = (1 << 12, 1 << 12)
    f, x = compiled(program), torch.randn(400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            assert torch.equal(f(x), program(x))
    assert not world.replays and reason(f).startswith("CUDA graphs: given up: graphs hold 0 MiB of memory, and may")


def test_what_is_saved_for_backwards_that_do_not_run(world):
    f, saved = compiled(program), []
    for _ in range(20):
        x = torch.randn(4, requires_grad=True)
        f(x).sum().backward()
    for _ in range(60):
        x = torch.randn(4, requires_grad=True)
        saved.append((x, f(x)))
    for x, y in saved:
        expected = torch.autograd.grad(program(x).sum(), x)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected[0])
    assert "given up: CUDAGraph0 of augmented_forward_fn ran without its CUDA graph, since results that" in reason(f)


def test_shapes_share_memory_and_there_are_few(world, monkeypatch):
    monkeypatch.setattr(graphs, "SHAPES", 2)
    f = compiled(program, dynamic=False)
    for rows in (3, 5, 7):
        calls(f, 20, torch.randn(rows))
    assert [reason(f, n).split(": ")[1] for n in range(3)].count("2 programs of this function have graphs") == 1
    memories = {id(b.sym.fn.memory) for e in f.programs for b in e.forward.bound_symbols if hasattr(b.sym.fn, "memory")}
    assert len(memories) == 1


def test_the_user_records_a_graph(world):
    f, x = compiled(program), torch.randn(4)
    calls(f, CALL - 1, x)
    world.recorded_by_user = True
    calls(f, 3, x)
    assert reason(f) == "CUDA graphs: the user records a graph" and not world.launches
    world.recorded_by_user = False
    calls(f, 3, x)
    assert world.replays
    world.recorded_by_user, before = True, world.replays
    assert torch.equal(f(x), program(x)) and world.replays == before


def test_other_streams(world):
    f, x = compiled(program), torch.randn(4)
    calls(f, CALL + 5, x)
    before = world.replays
    with world.stream(7):
        assert torch.equal(f(x), program(x))
    assert before and world.replays == before
    calls(f, 1, x)
    assert world.replays == before + 1
    with world.stream(7):
        calls(f, 60, x)
    assert world.replays == before + 1 and "given up: calls come from other threads, from other streams" in reason(f)
    other = compiled(program)
    for n in range(CALL):
        with world.stream(n):
            other(x)
    assert reason(other) == "CUDA graphs: calls run on several streams"


def test_an_operation_that_waits_splits_the_program(world):
    def f(x):
        y = (x.sin() + 1) * 2
        n = y.sum().item()
        return (y.cos() * 3 + n).exp()

    g = compiled(f)
    for _ in range(20):
        x = torch.randn(4)
        assert torch.equal(g(x), f(x))
    assert str(g.programs[0].forward).count("= CUDAGraph") == 2 and world.replays > 20
    nothing = compiled(lambda x: x.sum().item())
    calls(nothing, 20, torch.randn(4))
    assert reason(nothing).startswith("CUDA graphs: there is nothing to record: ")


def test_a_module_is_freed_while_its_tier_is_waited_for(world):
    import gc
    import weakref

    module = nn.Linear(4, 4)
    f, alive = compiled(module), weakref.ref(module)
    f(torch.randn(2, 4))
    del module, f
    gc.collect()
    assert alive() is None


def sampled():
    """Each habit under one model, and each model."""
    models = list(graph_programs.models())
    return [(models[i % len(models)], habit) for i, habit in enumerate(graph_programs.habits())]


def check_program(world, model, habit):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = graph_programs.run(model, habit, functools.partial(compiled, graphs=False), "cpu")
        actual, _ = graph_programs.run(model, habit, compiled, "cpu", lambda n: world.stream(abs(n)))
    assert not graph_programs.unequal(expected, actual)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("model, habit", sampled()[::4])
def test_programs_that_could_notice(model, habit, world):
    check_program(world, model, habit)


@pytest.mark.slow
@pytest.mark.parametrize("model, habit", graph_programs.programs())
def test_all_programs_that_could_notice(model, habit, world):
    check_program(world, model, habit)


def deep(count=8):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(64, 64), nn.GELU())))


def steps(f, module, count, **options):
    """Gradients of each step; none stay."""
    results = []
    for _ in range(count):
        y = f(torch.randn(64, 64))
        results.append(torch.autograd.grad(y.square().mean(), [*module.parameters()], **options))
    return results


def recorded(f, module):
    """The regions of a forward and of a backward, recorded with copies of arguments, whatever their addresses are."""
    steps(f, module, CALL)
    regions = [r for p in f.programs for r in p.graphs._regions]
    for r in regions:
        r.moves = True
    steps(f, module, 2)
    return regions


def test_a_backward_takes_the_memory_of_its_forward(world):
    """The pool has room for what is alive at once, not for the results of the forward and of the backward."""
    module = deep()
    f = compiled(module)
    forward, backward = recorded(f, module)
    assert forward.memory is backward.memory and len(backward.released) > 10
    activation = 64 * 64 * 4
    saved = len(forward.held) * activation
    assert saved >= 15 * activation
    gradients = sum(p.nbytes for p in module.parameters())
    assert world.replays and forward.memory.pool.end < saved + gradients + 4 * activation
    assert [r.recorded for r in (forward, backward)] == [1, 1]


def test_a_backward_whose_graph_is_kept_runs_line_by_line(world):
    module = deep(3)
    f = compiled(module)
    forward, backward = recorded(f, module)
    before = backward.replays
    x = torch.randn(64, 64)
    loss, expected = f(x).square().mean(), module(x).square().mean()
    for retained in (True, True, False):
        for a, b in zip(
            torch.autograd.grad(loss, [*module.parameters()], retain_graph=retained),
            torch.autograd.grad(expected, [*module.parameters()], retain_graph=retained), strict=True,
        ):  # fmt: skip
            assert torch.equal(a, b)
    assert backward.replays == before + 1


def test_a_backward_that_is_recorded_again_waits_for_its_forward(world):
    """What the forward has saved was given away: it is recorded again, and then the backward is."""
    module = deep(3)
    f = compiled(module)
    forward, backward = recorded(f, module)
    backward.recordings.clear()
    for _ in range(4):
        torch.manual_seed(5)
        result = steps(f, module, 1)
        torch.manual_seed(5)
        expected = steps(module, module, 1)
        assert all(torch.equal(a, b) for a, b in zip(result[0], expected[0], strict=True))
    assert [r.recorded for r in (forward, backward)] == [2, 2]
    assert len(forward.recordings) == len(backward.recordings) == 1
