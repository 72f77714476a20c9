"""Threads that a program starts run where they are started, and what would depend on another order is refused."""

import concurrent.futures
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import thunder
from tests.paths.compared import assert_same, outcome
from thunder.errors import CaptureError, FallbackWarning


def into_a_list(x):
    found = [None] * 3

    def work(i, y, power=1):
        found[i] = (y * i + 1) ** power

    threads = [threading.Thread(target=work, args=(i, x), kwargs={"power": 2}) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(found)


class Sine(threading.Thread):
    def __init__(self, x):
        super().__init__(name="sine", daemon=True)
        self.x, self.result = x, None

    def run(self):
        self.result = self.x.sin(), threading.current_thread() is self, threading.current_thread().name


def of_a_subclass(x):
    thread = Sine(x)
    before = thread.is_alive()
    thread.start()
    thread.join()
    return thread.result, before, thread.is_alive(), thread.daemon, thread.name


def pool_map(x):
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda y, i: y * i, x, range(3)))


def pool_submit(x):
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(torch.mul, x, i) for i in range(3)]
        return torch.stack([future.result() for future in futures])


def pool_as_completed(x):
    with ThreadPoolExecutor() as pool:
        factors, total = {pool.submit(lambda i: x * i, i): i for i in range(3)}, 0
        for future in concurrent.futures.as_completed(factors):
            total = total + future.result() * factors[future]
        return total


def pool_wait(x):
    pool, called = ThreadPoolExecutor(2), []
    futures = [pool.submit(lambda i: x * i, i) for i in range(3)]
    futures[0].add_done_callback(lambda future: called.append(future.result() + 1))
    done, rest = concurrent.futures.wait(futures)
    pool.shutdown()
    return sum(future.result() for future in futures), len(done), len(rest), called


def pool_raises(x):
    def work(y):
        raise ValueError(f"of {y.shape[0]}")

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, x)
    try:
        return future.result()
    except ValueError as error:
        return x + 1, str(error), type(future.exception())


def after_shutdown(x):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    try:
        return pool.submit(torch.sin, x)
    except RuntimeError as error:
        return x, str(error)


POOL = ThreadPoolExecutor(2)


def pool_from_outside(x):
    return sum(POOL.map(torch.sin, [x, x * 2])), POOL.submit(torch.cos, x).result()


def queue_of_results(x):
    results = queue.Queue()

    def produce():
        for i in range(3):
            results.put(x * i)
        results.put(None)

    thread, total = threading.Thread(target=produce), 0
    thread.start()
    while (y := results.get()) is not None:
        total = total + y
    thread.join()
    return total


def queue_of_tasks(x):
    tasks, lock, found = queue.Queue(), threading.Lock(), {}
    for i in range(4):
        tasks.put(i)

    def work():
        while True:
            try:
                i = tasks.get_nowait()
            except queue.Empty:
                return
            with lock:
                found[i] = x * i

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return [found[i] for i in range(4)]


def event(x):
    done, found = threading.Event(), []

    def work():
        found.append(x * 3)
        done.set()

    threading.Thread(target=work).start()
    done.wait()
    return found[0]


def modes(x):
    """A thread begins with grad enabled and without autocast, and its modes end with it."""
    found = []

    def work():
        found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), x @ x.T))
        torch.set_grad_enabled(False)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        after = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), x @ x.T
    return found, after, torch.is_grad_enabled()


def nested(x):
    def outer(y):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(torch.sin, [y, y + 1]))

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(outer, [x, x * 2]))


def random_numbers(x):
    with ThreadPoolExecutor(1) as pool:
        return x * pool.submit(torch.rand, 3).result() + torch.rand(3)


def decides(x):
    with ThreadPoolExecutor(2) as pool:
        return pool.submit(lambda y: y * 2 if y.sum() > 0 else y - 1, x).result()


RUNS = [
    into_a_list, of_a_subclass, pool_map, pool_submit, pool_as_completed, pool_wait, pool_raises, after_shutdown,
    pool_from_outside, queue_of_results, queue_of_tasks, event, modes, nested, random_numbers, decides,
]  # fmt: skip


@pytest.mark.parametrize("program", RUNS, ids=lambda f: f.__name__)
def test_threads_inside_are_a_part_of_the_program(program):
    compiled = thunder.jit(program)
    for i in range(4):
        results = []
        for f in (program, compiled):
            torch.manual_seed(i)
            random.seed(i)
            results.append(outcome(f, (torch.randn(3, 3, requires_grad=True),)))
        assert_same(results[1], results[0], rtol=1e-6)
    assert thunder.cache_misses(compiled) <= 2


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
        self.pool, self.lock, self.seen = ThreadPoolExecutor(2), threading.Lock(), 0

    def branch(self, i, x):
        with self.lock:
            self.seen += 1
        return self.branches[i](x)

    def forward(self, x):
        return torch.cat(list(self.pool.map(self.branch, range(2), [x, x * 2])))


def test_branches_of_a_model_run_in_a_pool_of_threads():
    torch.manual_seed(0)
    model, twin = Branches(), Branches()
    twin.load_state_dict(model.state_dict())
    compiled = thunder.jit(twin)
    for _ in range(3):
        x = torch.randn(4, 3)
        for m in (model, compiled):
            m.zero_grad()
            m(x).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_close(q.grad, p.grad, msg=name)
    assert_close(twin.state_dict(), model.state_dict())
    assert twin.seen == model.seen == 6 and thunder.cache_misses(compiled) <= 2


def waits_for_a_task(x):
    tasks, found = queue.Queue(), []

    def work():
        while (y := tasks.get()) is not None:
            found.append(y * 2)

    thread = threading.Thread(target=work)
    thread.start()
    for i in range(3):
        tasks.put(x * i)
    tasks.put(None)
    thread.join()
    return sum(found)


def until_stopped(x):
    stop, count = threading.Event(), [0]

    def work():
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    y = x + 1
    stop.set()
    thread.join()
    return y


def until_told(x):
    told, count = [False], [0]

    def work():
        while not told[0]:
            count[0] = max(count[0], 1)

    thread = threading.Thread(target=work)
    thread.start()
    told[0] = True
    thread.join()
    return x + 1


OWN = threading.local()
OWN.factor = 3


def own_variable(x):
    with ThreadPoolExecutor(1) as pool:
        return x * pool.submit(lambda: getattr(OWN, "factor", 5)).result()


def simple_queue(x):
    tasks = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(tasks.get)
        tasks.put(x)
        return future.result() + 1


def cancelled(x):
    found = []
    timer = threading.Timer(60, lambda: found.append(1))
    timer.start()
    timer.cancel()
    timer.join()
    return x + 1, found


def under_a_reentrant_lock(x):
    lock, order = threading.RLock(), []

    def work():
        with lock:
            order.append(1)

    thread = threading.Thread(target=work)
    with lock:
        thread.start()
        order.append(0)
    thread.join()
    return x + 1, order


def asks_for_a_name(x):
    thread = threading.Thread(target=lambda: None)
    return x + 1, thread.name.startswith("Thread-")


def initializes(x):
    with ThreadPoolExecutor(1, initializer=lambda: None) as pool:
        return pool.submit(torch.sin, x).result()


def in_inference_mode(x):
    with torch.inference_mode(), ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.is_grad_enabled).result()


REFUSED = {
    waits_for_a_task: "waits for another thread to release a lock",
    until_stopped: "asked whether an event is set",
    until_told: "a thread makes more than 1000 calls",
    own_variable: "a thread's own variable 'factor' is read",
    simple_queue: "waits for what another thread puts into a queue",
    cancelled: "asked whether an event is set",
    under_a_reentrant_lock: "while a reentrant lock is held",
    asks_for_a_name: "the name that Python gives it",
    initializes: "has an initializer",
    in_inference_mode: "started under a mode",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda f: f.__name__)
def test_what_depends_on_the_order_of_threads_is_refused(program, monkeypatch):
    monkeypatch.setattr("thunder.capture.library.threads._CALLS", 1000)
    x = torch.randn(3)
    with pytest.raises(CaptureError, match=REFUSED[program]):
        thunder.jit(program)(x)
    with pytest.warns(FallbackWarning, match=REFUSED[program]):
        assert_same(thunder.jit(program, fallback="eager")(x), program(x))


def test_a_thread_that_raises_is_refused():
    """`threading.excepthook` prints where it has raised."""

    def program(x):
        thread = threading.Thread(target=lambda: x.no_such)
        thread.start()
        thread.join()
        return x + 1

    with pytest.raises(CaptureError, match="a thread of the program raises AttributeError"):
        thunder.jit(program)(torch.ones(2))


def test_errors_of_threads_are_pythons():
    def twice(x):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.start()

    def too_early(x):
        threading.Thread(target=lambda: None).join()

    for program in (twice, too_early, lambda x: ThreadPoolExecutor(0)):
        messages = []
        for f in (program, thunder.jit(program)):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                f(torch.ones(2))
            messages.append(str(raised.value))
        assert messages[0] == messages[1]
