"""`asyncio.run` inside of eager calls."""

import asyncio

import pytest
import torch

import thunder
from thunder.errors import CaptureError


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
    results = await asyncio.gather(doubled(x), fails(x), return_exceptions=True)
    return results[0], type(results[1]).__name__


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


@pytest.mark.sweep(2)
@pytest.mark.parametrize("main", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_functions_that_run_event_loops_are_eager_calls(main):
    def run(x):
        return asyncio.run(main(x))

    def f(x):
        return run(x * 1)

    compiled = thunder.jit(f, fallback="eager")
    for sign in (1, -1, 1):
        x, y = (torch.tensor([3.0, -1.0]).mul(sign).requires_grad_() for _ in range(2))
        ours, expected = compiled(x), f(y)
        assert _plain(ours) == _plain(expected)
        for result in (ours, expected):
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        assert torch.equal(x.grad, y.grad)
    assert [b.sym.name for b in thunder.last_traces(compiled)[0].bound_symbols].count("eager_call") == 1


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_an_error_of_the_first_task_is_eagers():
    compiled = thunder.jit(lambda x: asyncio.run(fails(x)), fallback="eager")
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            compiled(torch.ones(2))


def test_with_fallback_error_an_event_loop_is_refused():
    with pytest.raises(CaptureError, match="code that is awaited"):
        thunder.jit(lambda x: asyncio.run(doubled(x)), fallback="error")(torch.ones(2))
