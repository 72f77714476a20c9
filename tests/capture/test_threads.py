"""Threads that a program starts run inside of eager calls."""

import concurrent.futures
import ctypes
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thunder
from tests.paths.compared import assert_same, outcome
from thunder.errors import CaptureError


def into_a_list(x):
    results = [None] * 3

    def work(i, y, power=1):
        results[i] = (y * i + 1) ** power

    threads = [threading.Thread(target=work, args=(i, x), kwargs={"power": 2}) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(results)


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
    tasks, lock, results = queue.Queue(), threading.Lock(), {}
    for i in range(4):
        tasks.put(i)

    def work():
        while True:
            try:
                i = tasks.get_nowait()
            except queue.Empty:
                return
            with lock:
                results[i] = x * i

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return [results[i] for i in range(4)]


def event(x):
    done, results = threading.Event(), []

    def work():
        results.append(x * 3)
        done.set()

    threading.Thread(target=work).start()
    done.wait()
    return results[0]


def modes(x):
    """A thread begins with grad enabled and without autocast, and its modes end with it."""
    gradients = []

    def work():
        gradients.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), x @ x.T))
        torch.set_grad_enabled(False)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        after = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), x @ x.T
    return gradients, after, torch.is_grad_enabled()


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
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_functions_that_start_threads_are_eager_calls(program):
    def f(x):
        return program(x * 1)

    compiled = thunder.jit(f, fallback="eager")
    for i in range(4):
        results = []
        for call in (f, compiled):
            torch.manual_seed(i)
            random.seed(i)
            results.append(outcome(call, (torch.randn(3, 3, requires_grad=True),)))
        assert_same(results[1], results[0], rtol=1e-6)
    called = [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols]
    assert "eager_call" in called and "mul" in called and len(compiled.programs) <= 2


def test_with_fallback_error_a_thread_is_refused():
    with pytest.raises(CaptureError, match="runs Python code that the program does not call"):
        thunder.jit(into_a_list, fallback="error")(torch.ones(3))


def test_a_call_does_not_wait_for_a_host_call_of_another_threads_capture():
    started, answered = threading.Event(), threading.Event()

    def slow():
        started.set()
        assert answered.wait(60)
        return 2

    def program(x, waits):
        return x * int(str(reads())) if waits else x - 1

    reads, x = builtin_of(slow), torch.ones(3)
    compiled = thunder.jit(program)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(compiled, x, True)
        assert started.wait(60)
        assert torch.equal(pool.submit(compiled, x, False).result(60), x - 1)
        assert not first.done()
        answered.set()
        assert torch.equal(first.result(60), x * 2)


def builtin_of(function):
    """Native code that calls a function: what it does is not known."""
    return ctypes.PYFUNCTYPE(ctypes.c_int)(function)
