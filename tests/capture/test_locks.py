"""Locks: a program that takes some runs under them, and asks its questions again once it has them."""

import threading

import pytest
import torch

import thunder
from thunder.errors import CaptureError

PATIENCE = 20.0  # seconds after which a thread that waits is taken for a deadlock


class Counter(torch.nn.Module):
    def __init__(self, lock):
        super().__init__()
        self.lock, self.calls, self.seen = lock, 0, []

    def forward(self, x):
        with self.lock:
            self.calls += 1
            self.seen.append(len(self.seen))
        return x * self.calls


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition, threading.Semaphore])
def test_a_counter_under_a_lock(make):
    ours, theirs = Counter(make()), Counter(make())
    compiled = thunder.jit(ours, fallback="error")
    for i in range(4):
        x = torch.full((3,), float(i))
        assert torch.equal(compiled(x), theirs(x))
        assert (ours.calls, ours.seen) == (theirs.calls, theirs.seen)


def test_acquire_and_release():
    lock, taken = threading.Lock(), []

    def fn(x):
        taken.append(lock.acquire())
        try:
            return x + 1
        finally:
            lock.release()

    compiled = thunder.jit(fn, fallback="error")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert taken == [True, True] and not lock.locked()
    assert "lock" in str(compiled.programs[0])


def test_a_failing_program_releases_its_lock():
    lock = threading.Lock()

    def fn(x):
        with lock:
            return torch.linalg.cholesky(x)

    compiled = thunder.jit(fn)
    compiled(torch.eye(2))
    with pytest.raises(RuntimeError):
        compiled(-torch.eye(2))
    assert not lock.locked()


def run_in_threads(*functions):
    run([threading.Thread(target=f, daemon=True) for f in functions])


def run(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"


def test_what_is_done_once_is_done_once_by_many_threads():
    class Lazy:
        installed, times = False, 0

    lock, state = threading.Lock(), Lazy()

    def fn(x):
        if not state.installed:
            with lock:
                if not state.installed:
                    state.times += 1
                    state.installed = True
        return x + 1

    compiled = thunder.jit(fn, fallback="error")
    compiled(torch.ones(2))
    barrier = threading.Barrier(4)

    def call():
        barrier.wait()
        compiled(torch.ones(2))

    for _ in range(30):
        state.installed, state.times = False, 0
        barrier.reset()
        run_in_threads(*[call] * 4)
        assert state.times == 1


def test_a_thread_that_waits_looks_again():
    class Lazy:
        installed, times = False, 0

    lock, state = threading.Lock(), Lazy()

    def fn(x):
        with lock:
            if not state.installed:
                state.times += 1
                state.installed = True
        return x + state.times

    compiled = thunder.jit(fn, fallback="error")
    compiled(torch.ones(2))
    state.installed, state.times = False, 0
    lock.acquire()
    results = []
    waiting = threading.Thread(target=lambda: results.append(compiled(torch.ones(2))), daemon=True)
    waiting.start()
    waiting.join(0.2)  # its program is that for what is not installed
    state.installed, state.times = True, 5
    lock.release()
    waiting.join(PATIENCE)
    assert torch.equal(results[0], torch.full((2,), 6.0)) and state.times == 5


def test_capture_waits_for_nobody():
    lock, seen = threading.RLock(), threading.Event()

    def fn(x):
        with lock:
            return x + 1

    compiled = thunder.jit(fn, fallback="error")

    def other():
        seen.wait(PATIENCE)
        compiled(torch.ones(3))  # while this thread holds what it waits for

    def holder():
        with lock:
            seen.set()
            threads[0].join(0.2)
            compiled(torch.ones(2))

    threads = [threading.Thread(target=f, daemon=True) for f in (other, holder)]
    run(threads)


def test_two_locks_in_either_order():
    first, second = threading.Lock(), threading.Lock()
    total = {"n": 0}

    def one(x):
        with first:
            total["n"] += 1
        with second:
            total["n"] += 1
        return x

    def other(x):
        with second:
            with first:
                total["n"] += 1
        return x

    programs = [thunder.jit(f, fallback="error") for f in (one, other)]
    for p in programs:
        p(torch.ones(2))
    total["n"] = 0
    run_in_threads(*([lambda p=p: [p(torch.ones(2)) for _ in range(50)] for p in programs]))
    assert total["n"] == 150


def test_events_and_queues():
    import queue

    event, lines = threading.Event(), queue.Queue()

    def fn(x):
        was = event.is_set()
        event.set()
        lines.put(x.shape[0])
        return x + 1 if was else x - 1

    compiled = thunder.jit(fn, fallback="error")
    for was in (False, True, False):
        event.set() if was else event.clear()
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0 if was else 0.0))
        assert event.is_set()
    assert [lines.get() for _ in range(3)] == [2, 2, 2]


LOCK, CONDITION = threading.Lock(), threading.Condition()


def _left_held(x):
    LOCK.acquire()
    return x + 1


def _released_only(x):
    LOCK.release()
    return x + 1


def _adds_if_free(x):
    return x + 1 if LOCK.acquire(blocking=False) else x


def _twice(x):
    with LOCK:
        with LOCK:
            return x


def _waits(x):
    with CONDITION:
        CONDITION.wait(0.01)
    return x


def _host_code_beside(x):
    with LOCK:
        y = x + 1
    print("beside", x.shape)
    return y


def _host_code_that_decides(x):
    with LOCK:
        return x + 1 if float(str(x.sum().item())) > 0 else x


@pytest.mark.parametrize(
    "fn",
    [_left_held, _released_only, _adds_if_free, _twice, _waits, _host_code_beside, _host_code_that_decides],
    ids=lambda f: f.__name__[1:],
)
def test_what_a_program_cannot_do_with_a_lock_is_refused(fn):
    with pytest.raises(CaptureError, match="lock|released"):
        thunder.jit(fn, fallback="error")(torch.ones(2))
    assert not LOCK.locked()


def test_host_code_inside(capsys):
    lock = threading.Lock()

    def fn(x):
        with lock:
            print("held", lock.locked(), x.shape[0])
            return x + 1

    compiled = thunder.jit(fn, fallback="error")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert capsys.readouterr().out == "held True 2\n" * 2


def test_a_lock_of_the_programs_own():
    def fn(x):
        lock = threading.Lock()
        with lock:
            y = x + 1
        return y, lock.locked()

    compiled = thunder.jit(fn, fallback="error")
    assert compiled(torch.ones(2))[1] is False


def test_a_warm_call_under_a_lock_goes_to_its_program_at_once(monkeypatch):
    """It asks before and under the lock, and asks no other program."""
    lock = threading.Lock()

    def program(x, n):
        with lock:
            return x + n

    compiled, x = thunder.jit(program), torch.ones(2)
    for n in (1, 2, 3):
        assert torch.equal(compiled(x, n), x + n)
    monkeypatch.setattr(compiled, "_miss", None)
    before = compiled.stats.cache_hits
    assert torch.equal(compiled(x, 4), x + 4) and not lock.locked()
    assert compiled.stats.cache_hits == before + 1
