"""async functions, run by asyncio and by hand."""

import asyncio
import contextlib

from tests.interpreter.corpus.kit import program


def drive(coroutine):
    """Run a coroutine that never waits for anything outside."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value


class Ready:
    def __init__(self, v):
        self.v = v

    def __await__(self):
        got = yield self.v
        return got or self.v * 2


@program()
def await_chain():
    async def a(x):
        return x + 1

    async def b(x):
        return await a(x) + await a(x * 2)

    return drive(b(3))


@program()
def await_custom_object():
    async def f():
        return await Ready(5), await Ready(6)

    c = f()
    return c.send(None), c.send("sent"), drive(c) if False else c.close()


@program()
def coroutine_object():
    async def f():
        pass

    c = f()
    kind = type(c).__name__, c.__name__, c.__qualname__
    c.close()
    return kind


@program()
def asyncio_run():
    async def work(n):
        await asyncio.sleep(0)
        return n * 2

    async def main():
        return await asyncio.gather(*(work(i) for i in range(3)))

    return asyncio.run(main())


@program()
def async_with():
    log = []

    class M:
        async def __aenter__(self):
            log.append("enter")
            return "value"

        async def __aexit__(self, kind, value, tb):
            log.append(kind and kind.__name__)
            return True

    async def main():
        async with M() as v:
            log.append(v)
        async with M():
            raise ValueError

    drive(main())
    return log


@program()
def async_for():
    class Count:
        def __init__(self, n):
            self.n = n

        def __aiter__(self):
            return self

        async def __anext__(self):
            if self.n == 0:
                raise StopAsyncIteration
            self.n -= 1
            return self.n

    async def main():
        out = []
        async for v in Count(3):
            out.append(v)
        else:
            out.append("else")
        return out, [v async for v in Count(2)], {v: 1 async for v in Count(2) if v}

    return drive(main())


@program()
def async_generators():
    async def numbers(n):
        for i in range(n):
            await asyncio.sleep(0)
            got = yield i
            if got:
                yield got

    async def main():
        g = numbers(3)
        out = [await g.__anext__(), await g.asend("x")]
        out += [v async for v in g]
        await g.aclose()
        return out, [v async for v in numbers(2)], [x async for x in (v * 2 async for v in numbers(3))]

    return asyncio.run(main())


@program()
def async_generator_cleanup():
    log = []

    async def g():
        try:
            yield 1
            yield 2
        finally:
            log.append("closed")

    async def main():
        it = g()
        async for v in it:
            log.append(v)
            break
        await it.aclose()

    asyncio.run(main())
    return log


@program()
def exception_in_coroutine():
    async def inner():
        raise KeyError("inner")

    async def outer():
        await inner()

    drive(outer())


@program()
def exception_caught_across_await():
    async def inner():
        raise KeyError("k")

    async def outer():
        try:
            await inner()
        except KeyError as e:
            return e.args

    return drive(outer())


@program()
def throw_into_coroutine():
    async def f():
        try:
            await Ready(1)
        except ValueError as e:
            return f"caught {e}"

    c = f()
    c.send(None)
    try:
        c.throw(ValueError("t"))
    except StopIteration as s:
        return s.value


@program()
def await_not_awaitable():
    async def f():
        await 5

    drive(f())


@program()
def async_for_not_iterable():
    async def f():
        async for _ in [1]:
            pass

    drive(f())


@program()
def asyncio_tasks_and_queue():
    async def producer(q):
        for i in range(3):
            await q.put(i)
        await q.put(None)

    async def consumer(q):
        out = []
        while (v := await q.get()) is not None:
            out.append(v)
        return out

    async def main():
        q = asyncio.Queue()
        task = asyncio.create_task(producer(q))
        result = await consumer(q)
        await task
        return result

    return asyncio.run(main())


@program()
def cancellation():
    log = []

    async def worker():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    async def main():
        t = asyncio.create_task(worker())
        await asyncio.sleep(0)
        t.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await t
        return t.cancelled()

    return asyncio.run(main()), log


@program()
def async_contextmanager():
    log = []

    @contextlib.asynccontextmanager
    async def managed(tag):
        log.append(f"in {tag}")
        yield tag
        log.append("out")

    async def main():
        async with managed("m") as t:
            log.append(t)

    drive(main())
    return log


@program()
def types_coroutine():
    import types

    @types.coroutine
    def pause(v):
        got = yield v
        return got

    async def f():
        return await pause("a"), await pause("b")

    c = f()
    out = [c.send(None), c.send(1)]
    try:
        c.send(2)
    except StopIteration as s:
        return out, s.value


@program()
def stop_iteration_in_coroutine():
    async def f():
        raise StopIteration("x")

    drive(f())
