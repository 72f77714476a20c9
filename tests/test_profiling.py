"""`thunder.profile`: times and bytes of bound symbols, lines and modules; `thunder.profiler_ranges`."""

import time
import warnings

import pytest
import torch
from torch.profiler import record_function

import thunder
from tests.kernels_in_use import EVERY_REGION
from thunder.compiled import compiled_of
from thunder.errors import CaptureError, OptionError, ThunderError
from thunder.extend import OperatorExecutor


class Clock:
    """Time that passes only where a program says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("thunder.inspect.profile.time", self)

    def perf_counter(self) -> float:
        return self.now

    def executor(self) -> OperatorExecutor:
        """Runs `torch.sin` in 3 s and `torch.cos` in 5 s of this clock."""
        clocked = OperatorExecutor("clocked")
        for function, seconds in ((torch.sin, 3.0), (torch.cos, 5.0)):

            def like(x, function=function):
                return function(x)

            def run(x, function=function, seconds=seconds):
                self.now += seconds
                return function(x)

            symbol = clocked.register_operator(f"slow_{function.__name__}", like=like, fn=run)
            clocked.register_implementation(function, symbol)
        return clocked


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


LINEAR = torch.nn.Linear(2, 2)


class Waves(torch.nn.Module):
    def forward(self, x):
        return torch.cos(torch.sin(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Waves(), Waves()])
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.sin(x) * self.scale  # last


def test_times_are_those_of_lines_and_modules(clock):
    with torch.no_grad():
        profile = thunder.profile(thunder.jit(Model(), executors=[clock.executor()]), torch.ones(4))
    assert (profile.step, profile.noted, profile.seconds, profile.guards) == (19.0, 19.0, 19.0, 0.0)
    lines = [(s.key[3].strip(), s.seconds) for s in profile.by_line() if s.key]
    assert lines == [("return torch.cos(torch.sin(x))", 16.0), ("return torch.sin(x) * self.scale  # last", 3.0)]
    assert {s.key: s.seconds for s in profile.by_module() if s.seconds} == {
        "": 19.0,
        "layers": 16.0,
        "layers.0": 8.0,
        "layers.1": 8.0,
    }
    text = str(profile)
    assert "a step took 19000.000 ms" in text and "(100.0%)" in text and "layers.1" in text
    assert "# last" in text


def test_a_backward_is_measured_and_leaves_gradients_alone(clock):
    model = Model()
    compiled = thunder.jit(model, executors=[clock.executor()])
    model.scale.grad = torch.tensor(7.0)
    profile = thunder.profile(
        compiled, torch.ones(4)
    )  # the gradient of scale alone: the forward saves what it multiplies
    assert model.scale.grad == 7.0
    assert {c.part for c in profile.costs} == {"forward", "backward"} and profile.step == profile.seconds == 19.0
    assert compiled(torch.ones(4)).requires_grad, "what runs afterwards is what ran before"
    assert "_thunder_begin" not in compiled_of(compiled).programs[0].executed[0].python_callable().__globals__


def test_the_backward_that_runs_is_measured():
    """Of the results, only the loss is differentiated, by a backward that is compiled then."""
    linear = torch.nn.Linear(64, 64)

    def losses(x):
        y = linear(x)
        return {"loss": y.square().mean(), "y": y}

    profile = thunder.profile(thunder.jit(losses), torch.ones(8, 64))
    traces = dict.fromkeys(c.trace for c in profile.costs)
    assert len(traces) == 2 and profile.entry.backward not in traces
    assert {s.key for s in profile.by_module()} == {"linear", None, ""}


def test_a_whole_step_has_phases():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    profile = thunder.profile(train, torch.ones(2, 4))
    parts = [c.part for c in profile.costs]
    assert [p for i, p in enumerate(parts) if not i or parts[i - 1] != p] == ["forward", "backward", "update"]


def test_memory_is_what_the_allocator_says():
    n = 1 << 16

    def f(x):
        a = x + 1  # first
        b = a * 2  # second
        return b.sum() + a.sum()

    with torch.no_grad():
        profile = thunder.profile(thunder.jit(f), torch.ones(n))
    by_line = {s.key[3].rpartition("# ")[2].strip(): s for s in profile.by_line() if s.key}
    assert by_line["first"].bytes == by_line["second"].bytes == 4 * n
    assert by_line["first"].at_peak == by_line["second"].at_peak == 4 * n
    assert 8 * n <= profile.peak < 8 * n + 1000 and profile.timeline[-1] < 1000


def test_a_range_has_an_event_of_the_device_without_bytes():
    """Which comes behind, or before, the one whose bytes were counted."""
    from types import SimpleNamespace

    from thunder.inspect.profile import _allocated

    def event(name, cpu=0, device=0, is_async=False):
        return SimpleNamespace(name=name, cpu_memory_usage=cpu, device_memory_usage=device, is_async=is_async)

    events = [event("thunder 0 1", device=64), event("thunder 0 1"), event("thunder 0 2"), event("thunder 0 2", 8, 16)]
    events += [event("aten::mul", 5), event("thunder 0 1", 7, is_async=True)]
    assert _allocated(SimpleNamespace(events=lambda: events)) == {"thunder 0 1": 64, "thunder 0 2": 24}


def test_what_is_in_memory_at_the_peak_adds_up_to_it():
    """What lifetimes say of a training step is what PyTorch's allocator counts."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    profile = thunder.profile(thunder.jit(model), torch.ones(512, 64))
    alive = sum(s.at_peak for s in profile.by_line())
    assert abs(alive - profile.peak) <= 0.02 * profile.peak


def test_regions_share_their_time_out(clock):
    pytest.importorskip("triton")

    def f(x):
        y = torch.exp(x)
        return y + 1

    if (why := EVERY_REGION.unavailable()) is not None:
        pytest.skip(why)
    compiled = thunder.jit(f, executors=[EVERY_REGION])
    with torch.no_grad():
        profile = thunder.profile(compiled, torch.ones(1 << 12))
    (region,) = [c for c in profile.costs if c.bound_symbol.sym.is_fusion]
    profile.costs = (region._replace(seconds=2.0),)
    assert [s.seconds for s in profile.by_line()] == [1.0, 1.0]


def test_ranges_are_named_after_modules():
    compiled, x = thunder.jit(Model()), torch.ones(4)
    compiled(x)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:  # else torch before 2.13 warns
        with thunder.profiler_ranges(compiled):
            compiled(x)
        compiled(x)
    names = [e.name for e in profiler.events()]
    assert names.count("layers.0: torch.sin") == 1 and names.count("layers.1: torch.cos") == 1
    assert names.count("aten::cos") == 4


def test_what_cannot_be_measured_is_refused(tmp_path):
    def decides(x, turns=[0]):  # noqa: B006
        turns[0] += 1
        return x + 1 if (x.sum() + turns[0] % 2) > 0.5 else x - 1

    with pytest.raises(CaptureError, match="do not all run the same program"):
        thunder.profile(thunder.jit(decides), torch.zeros(2))
    with pytest.raises(CaptureError, match="the original function runs"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thunder.profile(thunder.jit(lambda x: x + x.untyped_storage().nbytes(), fallback="eager"), torch.ones(2))
    served = thunder.load(thunder.precompile(LINEAR, torch.ones(1, 2), path=tmp_path / "p"), LINEAR)
    for look in (thunder.profile, lambda fn, x: thunder.report(fn, None, x)):
        with pytest.raises(ThunderError, match="comes from the disk"):
            look(served, torch.ones(1, 2))
    with pytest.raises(OptionError, match="debug options that check traces change what runs"):
        thunder.profile(thunder.jit(torch.sin, debug_options=thunder.DebugOptions(check_traces=True)), torch.ones(2))
    with pytest.raises(TypeError, match="is not a compiled function"):
        with thunder.profiler_ranges(torch.sin):
            pass


def test_an_error_of_a_program_leaves_what_runs_as_it_was():
    def f(x, fails):
        time.sleep(0)
        return x[fails.item() :]

    compiled = thunder.jit(torch.nn.functional.embedding)
    table = torch.ones(3, 2)
    compiled(torch.tensor([0]), table)
    (trace,) = compiled.programs[0].executed
    code = trace.python_callable().__code__
    with pytest.raises(IndexError):
        thunder.profile(compiled, torch.tensor([5]), table)
    assert trace.python_callable().__code__ is code


def test_memory_that_a_step_gives_back_is_counted():
    """Old gradients are freed when the step begins: the step begins and ends with the same memory."""
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    profile = thunder.profile(train, torch.ones(2, 256))
    assert min(profile.timeline) <= -4 * 256 * 256 and abs(profile.timeline[-1]) < 10_000


class Ranged(torch.nn.Module):
    """Two ranges, one in the other, and operations outside of both."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        with record_function("outer"):
            x = self.linear(x)
            with record_function("inner"):
                x = torch.tanh(x * 2)
        return x.sum()


def ranges_of(run):
    """The ranges of `record_function` in the order in which they open, with the ones around them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()

    def around(event):
        inside = [] if event.cpu_parent is None else around(event.cpu_parent)
        return inside + [event.name] * (event.name.startswith(("outer", "inner", "raises")))

    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    return [tuple(around(e)) for e in events if e.name.startswith(("outer", "inner", "raises"))]


@pytest.mark.parametrize("executors", [None, ["cpp"]])
def test_ranges_of_record_function_are_in_the_profile(executors):
    model, x = Ranged(), torch.ones(4, 8)
    compiled = thunder.jit(model) if executors is None else thunder.jit(model, executors=executors)
    compiled(x).backward()
    expected = {("outer",), ("outer", "inner")}
    assert set(ranges_of(lambda: model(x))) == expected
    assert set(ranges_of(lambda: compiled(x))) == expected
    loss = compiled(x)
    inner, outer = "inner (backward)", "outer (backward)"
    assert set(ranges_of(loss.backward)) == {(outer,), (outer, inner)}
    assert thunder.cache_misses(compiled) == 1


def test_ranges_of_a_training_step():
    model, x = Ranged(), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @thunder.jit
    def step(x):
        loss = model(x)
        loss.backward()
        with record_function("outer update"):
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(2):
        step(x)
    names = {names[-1] for names in ranges_of(lambda: step(x))}
    assert names == {"outer", "inner", "outer (backward)", "inner (backward)", "outer update"}


def test_ranges_are_closed_where_an_operation_raises():
    def program(table, index):
        with record_function("raises"):
            rows = table[index]
        return rows * 2

    compiled, table = thunder.jit(program), torch.ones(3)
    compiled(table, torch.tensor([1]))

    def run():
        with pytest.raises(IndexError):
            compiled(table, torch.tensor([7]))
        with record_function("outer"):
            pass

    assert ranges_of(run)[-1] == ("outer",)
