"""Tiers: a program runs at once, and what a compiler makes of it comes in between calls."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thunder
from tests import fresh
from thunder import compat
from thunder.cache import tiers
from thunder.errors import OptionError
from thunder.executors import inductor
from thunder.extend import get_executor
from thunder.extend.fusion import FusionExecutor, fusible
from thunder.ops.infer import run_line
from thunder.runtime import background, processes

ROOT = str(Path(thunder.__file__).parent.parent)
WAIT = 300  # seconds, after which something hangs


class Ahead(FusionExecutor):
    """Takes pointwise operations. Its regions are compiled when they may.

    ran: how many regions have run. strides: those that it was to compile for.
    """

    compiles_ahead = True

    def __init__(self, name: str, failure: Exception | None = None):
        super().__init__(name)
        self.failure, self.may = failure, threading.Event()
        self.ran, self.strides = 0, {}

    def can_fuse(self, operation):
        return fusible(operation) and operation.sym.name in ("sin", "cos", "mul", "add")

    def fuse(self, region, counter):
        def run(*tensors):
            self.ran += 1
            values = dict(zip(region.inputs, tensors, strict=True))
            for operation in region.bound_symbols:
                run_line(operation, values)
            return [values[o] for o in region.outputs]

        name = f"ahead{counter}"
        return self.register_temporary_operation(
            name, run, inputs=region.inputs, outputs=region.outputs, bsyms=region.bound_symbols
        )

    def compile_ahead(self, forward, backward, strides):
        assert self.may.wait(WAIT)
        self.strides = strides
        if self.failure is not None:
            raise self.failure


@pytest.fixture(autouse=True)
def ends_idle(monkeypatch, tmp_path):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    yield
    assert background.idle(WAIT)


def program(x):
    return (torch.sin(x) * 2 + x).sum() * x.cos()


X = torch.randn(4, 6, dtype=torch.float64)


def in_tiers(executor, f=program, call=5):
    return thunder.jit(f, executors=[executor], tiers=call)


def let(executor):
    executor.may.set()
    assert background.idle(WAIT)


@pytest.mark.parametrize("call", [2, 5])
def test_kernels_take_over_at_the_nth_call(call):
    executor = Ahead(f"call {call}")
    compiled = in_tiers(executor, call=call)
    assert torch.equal(compiled(X), program(X))
    entry = compiled.programs[0]
    assert str(entry.tiers) == "first tier: the second tier is being compiled" and "first tier" in repr(entry)
    let(executor)  # ready early: it waits for its call all the same
    assert executor.strides == {"x": (6, 1)}
    for number in range(2, call + 3):
        assert torch.equal(compiled(X), program(X))
        assert (executor.ran > 0) is (number >= call), number
    assert entry.tiers.running == "second" and entry.tiers.reason == f"its kernels have taken over at call {call}"
    assert not isinstance(entry.computation_fn, tiers.Tiers)
    assert "ahead0(" in str(entry.forward) and thunder.cache_misses(compiled) == 1


def test_the_nth_call_waits():
    executor = Ahead("late")
    compiled = in_tiers(executor, call=3)
    compiled(X), compiled(X)
    assert executor.ran == 0
    threading.Timer(0.2, executor.may.set).start()
    assert torch.equal(compiled(X), program(X)) and executor.ran > 0 and executor.may.is_set()


def test_none_never_fuses_and_0_waits_at_once():
    executor = Ahead("at once")
    executor.may.set()
    never, at_once = in_tiers(executor, call=None), in_tiers(executor, call=0)
    for _ in range(7):
        never(X)
    assert executor.ran == 0
    assert torch.equal(at_once(X), program(X)) and executor.ran > 0


def test_another_process_begins_with_kernels_on_disk():
    executor = Ahead("on disk")
    executor.keeps_kernels = True
    executor.may.set()
    first, again = in_tiers(executor), in_tiers(executor)
    first(X)
    assert background.idle(WAIT) and executor.ran == 0
    assert torch.equal(again(X), program(X)) and executor.ran > 0


def test_deterministic_algorithms_have_one_tier(monkeypatch):
    if get_executor("cpp").unavailable() is not None:
        pytest.skip("C++ kernels need a compiler")
    monkeypatch.delenv("THUNDER_TIERS")
    monkeypatch.setattr(background, "submit", lambda job: None)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            compiled = thunder.jit(program)
            compiled(X)
        finally:
            torch.use_deterministic_algorithms(False)
        assert (compiled.programs[0].tiers is None) is deterministic


@pytest.mark.parametrize("steps", [("forward", "backward"), ("forward", "forward"), ("served",)])
def test_passes_do_not_keep_the_first_step_waiting(monkeypatch, steps):
    submitted = []
    monkeypatch.setattr(background, "submit", submitted.append)
    compiled, result = in_tiers(Ahead(f"first {steps}")), None
    x = torch.randn(4, 4, requires_grad=steps[0] == "forward")
    for step in steps:
        assert not submitted
        result = result.sum().backward() if step == "backward" else compiled(x)
    assert len(submitted) == 1


def test_forward_and_backward_of_a_call_are_of_one_tier():
    executor = Ahead("one tier")
    compiled, x = in_tiers(executor, call=4), X.clone().requires_grad_()
    results = [compiled(x) for _ in range(3)]
    let(executor)
    for y in results:
        y.sum().backward()
    assert executor.ran == 0
    y = compiled(x)
    assert compiled.programs[0].tiers.running == "second"
    before = executor.ran
    y.sum().backward()
    assert executor.ran > before > 0


@pytest.mark.parametrize("call", [2, 4])
def test_a_checkpoint_runs_forward_and_recomputation_in_one_tier(call):
    """It takes what the recomputation saves, in order, for what the forward has saved: another tier saves others."""
    executor = Ahead(f"checkpoint {call}")
    executor.may.set()
    compiled = in_tiers(executor, call=call)
    for _ in range(4):
        ours, theirs = (X.clone().requires_grad_() for _ in range(2))
        checkpoint(compiled, ours, use_reentrant=False).sum().backward()
        program(theirs).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert executor.ran == 0
    assert str(compiled.programs[0].tiers) == "first tier: hooks see its saved tensors, as a checkpoint's do"


def test_a_program_that_has_its_kernels_keeps_them_in_a_checkpoint():
    executor = Ahead("checkpoint of kernels")
    executor.may.set()
    compiled = in_tiers(executor, call=2)
    for _ in range(2):
        compiled(X.clone().requires_grad_()).sum().backward()
    before, x, y = executor.ran, X.clone().requires_grad_(), X.clone().requires_grad_()
    checkpoint(compiled, x, use_reentrant=False).sum().backward()
    program(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert executor.ran > before


def test_what_cannot_be_compiled_stays_in_the_first_tier_with_one_warning():
    executor = Ahead("fails", failure=RuntimeError("no compiler likes it"))
    compiled = in_tiers(executor, call=2)
    compiled(X)
    let(executor)
    with pytest.warns(UserWarning, match="stays in its first tier.*no compiler likes it") as warned:
        compiled(X)
    assert [Path(w.filename) for w in warned] == [Path(__file__)]
    with warnings.catch_warnings(record=True) as again:
        assert torch.equal(compiled(X), program(X))
    assert not again and compiled.programs[0].tiers.running == "first" and executor.ran == 0


def test_a_new_shape_is_a_program_with_tiers_of_its_own():
    executor = Ahead("shapes")
    compiled = in_tiers(executor, call=3)
    compiled(X), compiled(X[:3])
    let(executor)
    for _ in range(3):
        compiled(X[:3])
    assert [e.tiers.running for e in compiled.programs] == ["first", "second"]


def test_a_module_is_freed_while_its_second_tier_is_compiled(monkeypatch):
    lowers, may = threading.Event(), threading.Event()
    lowered_again = tiers._lowered_again

    def waiting(*args):
        lowers.set()
        assert may.wait(WAIT)
        return lowered_again(*args)

    monkeypatch.setattr(tiers, "_lowered_again", waiting)
    executor = Ahead("freed")
    executor.may.set()
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = thunder.jit(module, executors=[executor], tiers=5)
    compiled(torch.randn(2, 4)).sum().backward()
    assert lowers.wait(WAIT)
    alive = weakref.ref(module)
    del module, compiled
    gc.collect()
    assert alive() is None
    may.set()


def test_a_program_that_is_gone_is_not_compiled():
    executor, other = Ahead("first of two"), Ahead("second of two")
    compiled, gone = in_tiers(executor), in_tiers(other)
    compiled(X), gone(X)
    del gone
    gc.collect()
    let(executor)
    assert other.strides == {} and not other.may.is_set()


def test_options(monkeypatch):
    for said, value in {"": "automatic", "automatic": "automatic", "one": "one", "none": None, "3": 3}.items():
        monkeypatch.setenv("THUNDER_TIERS", said)
        assert thunder.jit(program).options.tiers == value and thunder.jit(program, tiers=2).options.tiers == 2
    monkeypatch.setenv("THUNDER_TIERS", "later")
    with pytest.raises(OptionError, match="THUNDER_TIERS='later' is not an option"):
        thunder.jit(program)
    monkeypatch.delenv("THUNDER_TIERS")
    for wrong in ("later", -1, 2.5, True):
        with pytest.raises(OptionError, match="valid: 'automatic', 'one', None, or the number of the call"):
            thunder.jit(program, tiers=wrong)
    for options in ({"numerics": "eager"}, {"executors": []}, {"tiers": "one"}, {"tiers": 0}, {"tiers": None}):
        compiled = thunder.jit(program, **({"tiers": 5} | options))
        compiled(X)
        assert compiled.programs[0].tiers is None


def test_symbolic_numbers_are_known_to_both_tiers():
    executor = Ahead("numbers")
    compiled = thunder.jit(lambda x, n: program(x) * n, executors=[executor], tiers=5)
    executor.may.set()
    for n in (*range(3, 9), *[5] * 6):
        assert torch.equal(compiled(X, n), program(X) * n)
    assert {e.tiers.running for e in compiled.programs if e.calls > 5} == {"second"}


# ----------------------------------------------------------------------------------------------------------------
# Inductor


pytestmark_inductor = pytest.mark.skipif(
    inductor.inductor_ex.unavailable() is not None, reason="Inductor needs a C++ compiler on the CPU"
)


@pytest.mark.slow
@pytestmark_inductor
def test_inductor_compiles_in_another_process(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._dynamo.utils import counters

    misses = counters["inductor"]["fxgraph_cache_miss"]  # of this process, in which other tests ran

    def f(x, w):
        return torch.tanh((x @ w).sin() * 2 + x.exp().cos()) + 1

    compiled = thunder.jit(f, executors=["inductor"], tiers=3)
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    (want,) = torch.autograd.grad(f(x, w).sum(), w)
    assert torch.equal(torch.autograd.grad(compiled(x, w).sum(), w)[0], want)
    entry = compiled.programs[0]
    for _ in range(4):
        torch.testing.assert_close(compiled(x, w), f(x, w))
    assert entry.tiers.running == "second" and "Inductor0(" in str(entry.forward)
    assert counters["inductor"]["fxgraph_cache_miss"] == misses
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w).sum(), w)[0], want)

    # a cotangent that lies in memory otherwise: the call waits for a compilation
    y = compiled(x, w)
    cotangent = torch.randn(8, 8).t()
    (want,) = torch.autograd.grad(f(x, w), w, cotangent)
    torch.testing.assert_close(torch.autograd.grad(y, w, cotangent)[0], want)


@pytestmark_inductor
def test_regions_of_symbolic_sizes_stay_in_the_first_tier():
    compiled = thunder.jit(lambda x: (x.sin() * 2 + x.cos()).sum(0), executors=["inductor"], tiers=3, dynamic=True)
    compiled(X)
    assert background.idle(WAIT)
    for n in (3, 4, 5):
        compiled(torch.randn(n, 6))
    assert "first tier: the second is not compiled: Inductor compiles regions of symbolic sizes" in str(
        compiled.programs[0].tiers
    )


@pytestmark_inductor
def test_other_threads_call_functions_of_torch_compile_meanwhile():
    other = torch.compile(lambda x: x + 1, backend="eager")
    other(X)
    messages: list = []

    def call():
        try:
            messages.append(other(X))
        except RuntimeError as error:
            messages.append(error)

    def traced(x):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(WAIT)
        return [x.sin()]

    compat.compile_with_inductor(traced, [torch.randn(3)], [])
    assert messages and all(torch.equal(y, X + 1) for y in messages), messages


# ----------------------------------------------------------------------------------------------------------------
# the end of the process

JOBS = """
import subprocess, sys, os, time
class Compiles:
    def __init__(self, file): self.file = file
    def compile(self):
        child = subprocess.Popen(["sleep", "1000"])
        with open(self.file + ".new", "w") as f: f.write(f"{os.getpid()} {child.pid}")
        os.rename(self.file + ".new", self.file)
        child.wait()
"""
SCRIPT = """
import os, select, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
sys.path.insert(0, {folder!r})
import thunder
from thunder.runtime import background
from jobs import Compiles
background.submit(lambda: background.elsewhere(Compiles({file!r})))
while not os.path.exists({file!r}): time.sleep(0.05)
print("compiles", flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]: pass  # a read that has not begun would not see a signal
{then}
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: list[int]) -> bool:
    limit = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc whether processes have ended")
@pytest.mark.parametrize("how", ["ends", "raises", "interrupted", "killed", "forks"])
def test_no_process_outlives_the_program(tmp_path, how):
    (tmp_path / "jobs.py").write_text(textwrap.dedent(JOBS))
    then = {
        "ends": "",
        "raises": "raise SystemExit(3)",
        "forks": "pid = os.fork()\nif not pid: sys.exit(0)\nos.waitpid(pid, 0)\n"
        "print(background._BACKGROUND.process.poll(), flush=True)",
    }.get(how, "")
    file = str(tmp_path / "pids")
    script = SCRIPT.format(folder=str(tmp_path), file=file, then=then)
    with subprocess.Popen(
        # Python warns of a fork of any program that has threads
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", script],
        env=os.environ | {"PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiles\n"
        pids = [int(pid) for pid in Path(file).read_text().split()]
        assert all(map(alive, pids))
        if how in ("interrupted", "killed"):
            process.send_signal(signal.SIGINT if how == "interrupted" else signal.SIGKILL)
            process.wait(WAIT)  # what is read now might be read before the signal arrives
        out, err = process.communicate("\n", timeout=WAIT)
    codes = {"ends": 0, "raises": 3, "interrupted": -signal.SIGINT, "killed": -signal.SIGKILL, "forks": 0}
    assert process.returncode == codes[how], err
    assert out == ("None\n" if how == "forks" else "")
    assert not err if how != "interrupted" else err.rstrip().endswith("KeyboardInterrupt")
    assert ended(pids)


WHOLE = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from thunder.runtime import background
lock, begun, go = threading.RLock(), threading.Event(), threading.Event()
def job():
    with background.whole(lock):
        begun.set()
        time.sleep(0.3)
background.submit(job)
begun.wait()
child = os.fork()  # waits for the block, in which the lock is another thread's
if not child:
    os._exit(0 if lock.acquire(timeout=5) else 1)
print(os.waitpid(child, 0)[1])
with lock:  # of the thread that forks: the block waits
    background.submit(job)
    child = os.fork()
    if not child:
        os._exit(0)
    print(os.waitpid(child, 0)[1])
print(background.idle(60))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_fork_finds_no_lock_held_by_the_thread_that_compiles():
    done = fresh.run("-c", WHOLE)
    assert done.stdout == "0\n0\nTrue\n", done.stderr


def test_a_compiler_that_dies_is_an_error_and_started_again(tmp_path, monkeypatch):
    (tmp_path / "dying_jobs.py").write_text("import os\nclass Dies:\n def compile(self): os._exit(3)\n"
        "class Fails:\n def compile(self): raise ValueError('no')\nclass Fine:\n def compile(self): print('noise')\n")  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(background, "_BACKGROUND", background._Background())
    from dying_jobs import Dies, Fails, Fine  # type: ignore[import-not-found]

    try:
        background.elsewhere(Fine())
        with pytest.raises(RuntimeError, match="ValueError: no"):
            background.elsewhere(Fails())
        with pytest.raises(RuntimeError, match="has ended"):
            background.elsewhere(Dies())
        background.elsewhere(Fine())
    finally:
        background._BACKGROUND.end()
    with pytest.raises(background.Ended):
        background.elsewhere(Fine())


FORKED = """
import os
PREPARED = []
def prepare():
    PREPARED.append(os.getpid())
class Answers:
    def compile(self): return PREPARED + [os.getpid()]
class Fails:
    def compile(self): raise ValueError("no")
class Dies:
    def compile(self): os._exit(3)
class Opens:
    def __init__(self, *files): self.files = files
    def compile(self):
        for name, mode in self.files: open(name, mode).close()
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    (tmp_path / "forked_jobs.py").write_text(FORKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("forked_jobs")
    del sys.modules["forked_jobs"]


def test_each_job_runs_in_a_fork_of_a_process_that_is_prepared_once(jobs, tmp_path):
    server = processes.ForkServer("forked_jobs", 60.0)
    try:
        (first, one), (second, other) = server.run(jobs.Answers()), server.run(jobs.Answers())
        assert first == second and len({first, one, other, os.getpid()}) == 4
        with pytest.raises(RuntimeError, match="ValueError: no"):
            server.run(jobs.Fails())
        with pytest.raises(RuntimeError, match="ended with 3"):
            server.run(jobs.Dies())
        os.mkfifo(tmp_path / "pipe")
        with ThreadPoolExecutor(2) as threads:  # each waits for the other one to open its end
            opened = [threads.submit(server.run, jobs.Opens((tmp_path / "pipe", mode))) for mode in "rw"]
            assert [o.result(timeout=WAIT) for o in opened] == [None, None]
        assert server.run(jobs.Answers())[0] == first
    finally:
        server.kill()
        server.close()
    with pytest.raises(processes.Died, match="-9"):
        server.run(jobs.Answers())


def test_a_process_that_waits_for_long_ends(jobs):
    server = processes.ForkServer("forked_jobs", 0.2)
    try:
        assert server.run(jobs.Answers())
        limit = time.monotonic() + WAIT
        while server.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        with pytest.raises(processes.Died, match="0"):
            server.run(jobs.Answers())
    finally:
        server.kill()
        server.close()


def test_programs_that_kernels_do_not_take_stay_as_they_are(monkeypatch, tmp_path):
    """By default: operations without a decomposition, and sizes that only passes decide by, are no warnings."""
    monkeypatch.delenv("THUNDER_TIERS")
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    compiled = thunder.jit(lambda x: torch.nn.functional.rrelu(x, training=True) * 2)
    for _ in range(6):
        assert compiled(torch.ones(3)).shape == (3,)
    assert "rrelu" in str(thunder.last_traces(compiled)[0])
    compiled = thunder.jit(lambda x: x.sin() * x.shape[0])
    for n in range(3, 12):
        x = torch.ones(n, 4)
        torch.testing.assert_close(compiled(x), x.sin() * n)
    assert thunder.cache_misses(compiled) == 2
