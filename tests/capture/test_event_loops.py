"""`asyncio.run` inside a program: its tasks are a part of the program, in asyncio's order."""

import asyncio
import contextvars
import gc
import time

import pytest
import torch

import thunder
from thunder.errors import CaptureError

X = torch.tensor([1.0, -2.0])


async def doubled(x):
    await asyncio.sleep(0)
    return x * 2


async def fails(x):
    await asyncio.sleep(0)
    raise ValueError("on purpose")


async def awaits(x):
    return await doubled(x) + 1


async def gathers(x):
    parts = await asyncio.gather(*(doubled(x + i) for i in range(4)))
    return sum(parts)


async def order(x):
    seen = []

    async def walks(name, steps):
        for i in range(steps):
            seen.append((name, i))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(walks(name, steps)) for name, steps in (("a", 3), ("b", 1), ("c", 2))]
    await asyncio.wait(tasks)
    return x, seen


async def a_queue(x):
    queue = asyncio.Queue(maxsize=1)

    async def gives():
        for i in range(4):
            await queue.put(x * i)
        await queue.put(None)

    producer, total = asyncio.create_task(gives()), torch.zeros(2)
    while (item := await queue.get()) is not None:
        total = total + item
    await producer
    return total


async def locks_and_events(x):
    lock, event, seen = asyncio.Lock(), asyncio.Event(), []

    async def works(name):
        async with lock:
            seen.append(name)
            await asyncio.sleep(0)
            seen.append(name)
        event.set()

    first = asyncio.create_task(works("a"))
    second = asyncio.create_task(works("b"))
    await event.wait()
    await asyncio.gather(first, second)
    return x + len(seen), seen


async def handled(x):
    task = asyncio.create_task(fails(x))
    try:
        await task
    except ValueError as error:
        return x + len(str(error))


async def among_results(x):
    found = await asyncio.gather(doubled(x), fails(x), return_exceptions=True)
    return found[0], type(found[1]).__name__


async def cancelled(x):
    seen = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("left")

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        seen.append("cancelled")
    return x, seen


async def left_behind(x):
    asyncio.create_task(asyncio.Event().wait())
    return x - 1


async def decides(x):
    total = await doubled(x)
    return await doubled(total) if total.sum() > 0 else total


async def sleeps(x):
    slow = asyncio.create_task(asyncio.sleep(0.05, x * 3))
    fast = asyncio.create_task(asyncio.sleep(0.001, x * 5))
    done, _ = await asyncio.wait([slow, fast], return_when=asyncio.FIRST_COMPLETED)
    return next(iter(done)).result() - await slow


async def timed_out(x):
    try:
        return await asyncio.wait_for(asyncio.Event().wait(), 0.001)
    except asyncio.TimeoutError:
        return x * 7


async def in_time(x):
    return await asyncio.wait_for(doubled(x), 10)


async def iterates(x):
    async def parts():
        for i in range(3):
            await asyncio.sleep(0)
            yield x * i

    return sum([part async for part in parts()])


async def a_group(x):
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(doubled(x * i)) for i in range(3)]
    return sum(task.result() for task in tasks)


async def asks_for_tasks(x):
    task = asyncio.current_task()
    child = asyncio.create_task(doubled(x))
    return await child, task in asyncio.all_tasks(), len(asyncio.all_tasks())


async def futures(x):
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, x * 4)
    return await future


PROGRAMS = [
    awaits, gathers, order, a_queue, locks_and_events, handled, among_results, cancelled, left_behind, decides, sleeps,
    timed_out, in_time, iterates, a_group, futures, asks_for_tasks,
]  # fmt: skip


def _plain(result):
    return [
        r.tolist() if isinstance(r, torch.Tensor) else r for r in (result if isinstance(result, tuple) else [result])
    ]


@pytest.mark.parametrize("main", PROGRAMS, ids=lambda f: f.__name__)
def test_programs_are_as_eager(main):
    def f(x):
        return asyncio.run(main(x * 1))

    compiled = thunder.jit(f, fallback="error")
    for sign in (1, -1, 1):
        x, y = (torch.tensor([3.0, -1.0]).mul(sign).requires_grad_() for _ in range(2))
        ours, expected = compiled(x), f(y)
        assert _plain(ours) == _plain(expected)
        for result in (ours, expected):
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert len(compiled.programs) == (2 if main is decides else 1)


def test_what_a_program_sleeps_is_slept_in_each_call():
    compiled = thunder.jit(lambda x: asyncio.run(sleeps(x)), fallback="error")
    compiled(X)
    begin = time.perf_counter()
    compiled(X)
    assert time.perf_counter() - begin >= 0.05  # sleep takes no less


def test_an_error_of_the_first_task_is_eagers():
    compiled = thunder.jit(lambda x: asyncio.run(fails(x)), fallback="error")
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            compiled(X)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_beside_a_loop_that_runs_it_is_refused_as_in_eager_mode():
    def f(x):
        return asyncio.run(doubled(x))

    compiled = thunder.jit(f, fallback="eager")
    assert torch.equal(compiled(X), X * 2)

    async def calls():
        return compiled(X)

    with pytest.raises(RuntimeError, match="running event loop"):
        asyncio.run(calls())
    assert torch.equal(compiled(X), X * 2)

    async def runs(x):
        return f(x)

    with pytest.raises(RuntimeError, match="running event loop"):
        thunder.jit(lambda x: asyncio.run(runs(x)), fallback="error")(X)
    gc.collect()  # coroutines that nobody awaited


variable = contextvars.ContextVar("variable", default=0)


async def sets(x):
    variable.set(1)
    return x


async def named(x):
    return x, asyncio.current_task().get_name()


async def in_a_thread(x):
    return await asyncio.to_thread(torch.mul, x, 2)


async def waits_for_nobody(x):
    await asyncio.Event().wait()


async def unasked(x):
    task = asyncio.create_task(fails(x))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return x if task.done() else None


async def half_read(x):
    async def parts():
        yield x
        yield x + 1

    async for part in parts():
        return part


async def asks_the_time(x):
    return x, asyncio.get_running_loop().time()


async def a_callback_that_raises(x):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
    return x


async def not_begun(x):
    asyncio.create_task(doubled(x))
    asyncio.get_running_loop().run_in_executor(None, print)


async def catches_all(x):
    try:
        await asyncio.gather(named(x), return_exceptions=True)
    except BaseException:
        return x


LOCK = asyncio.Lock()


async def lock_from_outside(x):
    async def takes():
        async with LOCK:
            await asyncio.sleep(0)

    await asyncio.gather(takes(), takes())
    return x


REFUSED = [
    (sets, "context variable in an event loop"), (named, "name that asyncio gives"), (in_a_thread, "run_in_executor"),
    (waits_for_nobody, "nobody in the program gives"), (unasked, "never retrieved"), (half_read, "before its end"),
    (asks_the_time, "time of an event loop"), (a_callback_that_raises, "callback of an event loop"),
    (not_begun, "run_in_executor"), (catches_all, "name that asyncio gives"),
    (lock_from_outside, "Lock from outside"),
]  # fmt: skip


@pytest.mark.parametrize("main, words", REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_what_comes_from_outside_is_refused_in_words(main, words):
    with pytest.raises(CaptureError, match=words):
        thunder.jit(lambda x: asyncio.run(main(x)), fallback="error")(X)
    assert asyncio._get_running_loop() is None
