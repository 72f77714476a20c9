"""The with statement."""

import contextlib
import io

from tests.interpreter.corpus.kit import program


class Manager:
    def __init__(self, log, name="m", swallow=False):
        self.log, self.name, self.swallow = log, name, swallow

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self.name

    def __exit__(self, kind, value, tb):
        self.log.append((f"exit {self.name}", kind and kind.__name__, str(value), tb is not None))
        return self.swallow


@program()
def plain():
    log = []
    with Manager(log) as m:
        log.append(m)
    return log


@program()
def swallowed():
    log = []
    with Manager(log, swallow=True):
        raise ValueError("inside")
    log.append("after")
    return log


@program()
def not_swallowed():
    log = []
    with Manager(log):
        {}["k"]


@program()
def several_managers():
    log = []
    with Manager(log, "a") as a, Manager(log, "b", swallow=True) as b:
        log.append(a + b)
        raise KeyError
    return log


@program()
def parenthesised_managers():
    log = []
    with (
        Manager(log, "x") as x,
        Manager(log, "y"),
    ):
        log.append(x)
    return log


@program()
def return_break_continue_inside():
    log = []

    def f():
        with Manager(log, "f"):
            return "returned"

    for i in range(3):
        with Manager(log, str(i)):
            if i == 0:
                continue
            if i == 1:
                break
    return f(), log


@program()
def enter_fails():
    class Bad:
        def __enter__(self):
            raise OSError("enter")

        def __exit__(self, *a):
            print("never")

    with Bad():
        pass


@program()
def exit_fails():
    class Bad:
        def __enter__(self):
            return self

        def __exit__(self, *a):
            raise OSError("exit")

    with Bad():
        raise ValueError("body")


@program()
def exit_fails_after_success():
    class Bad:
        def __enter__(self):
            return self

        def __exit__(self, *a):
            raise OSError("exit")

    with Bad():
        pass


@program()
def missing_methods():
    class OnlyEnter:
        def __enter__(self):
            pass

    out = []
    try:
        with OnlyEnter():
            pass
    except TypeError as e:
        out.append("OnlyEnter" in str(e))
    try:
        with 5:
            pass
    except TypeError as e:
        out.append("context manager protocol" in str(e))
    return out


@program()
def targets():
    class M:
        def __enter__(self):
            return 1, (2, 3)

        def __exit__(self, *a):
            pass

    box = {}
    with M() as (a, (b, c)), M() as box["k"]:
        pass
    return a, b, c, box


@program()
def contextmanager_decorator():
    log = []

    @contextlib.contextmanager
    def managed(tag):
        log.append(f"in {tag}")
        try:
            yield tag.upper()
        except ValueError as e:
            log.append(f"caught {e}")
        finally:
            log.append(f"out {tag}")

    with managed("a") as a:
        log.append(a)
    with managed("b"):
        raise ValueError("v")
    return log


@program()
def contextmanager_passes_error_on():
    @contextlib.contextmanager
    def managed():
        yield

    with managed():
        raise KeyError("through")


@program()
def contextmanager_as_decorator():
    log = []

    @contextlib.contextmanager
    def around():
        log.append("before")
        yield
        log.append("after")

    @around()
    def f(x):
        log.append(x)
        return x * 2

    return f(3), f(4), log


@program()
def exit_stack():
    log = []
    with contextlib.ExitStack() as stack:
        for n in "ab":
            stack.enter_context(Manager(log, n))
        stack.callback(log.append, "callback")
    return log


@program()
def suppress_and_redirect():
    out = io.StringIO()
    with contextlib.suppress(ZeroDivisionError):
        1 / 0
    with contextlib.redirect_stdout(out):
        print("captured")
    with contextlib.closing(io.StringIO("text")) as f:
        text = f.read()
    with contextlib.nullcontext(5) as five:
        pass
    return out.getvalue(), text, f.closed, five


@program()
def exception_visible_in_exit():
    import sys

    seen = []

    class M:
        def __enter__(self):
            return self

        def __exit__(self, *a):
            seen.append(sys.exc_info()[0])
            return True

    with M():
        raise ValueError
    seen.append(sys.exc_info()[0])
    with M():
        pass
    return [s and s.__name__ for s in seen]


@program()
def with_in_generator():
    log = []

    def g():
        with Manager(log):
            yield 1
            yield 2

    for v in g():
        log.append(v)
        if v == 1:
            break
    it = g()
    next(it)
    it.close()
    return log


@program()
def nested_with_and_try():
    log = []
    try:
        with Manager(log, "outer"):
            try:
                with Manager(log, "inner"):
                    raise TypeError("t")
            finally:
                log.append("mid")
    except TypeError as e:
        log.append(str(e))
    return log


@program()
def exit_returns_truthy_object():
    class M:
        def __enter__(self):
            pass

        def __exit__(self, *a):
            return [0]

    with M():
        raise ValueError
    return "reached"


@program()
def lock_and_file():
    import tempfile
    import threading

    lock = threading.Lock()
    with lock:
        held = lock.locked()
    with tempfile.TemporaryFile("w+") as f:
        f.write("a\nb\n")
        f.seek(0)
        lines = [line.strip() for line in f]
    return held, lock.locked(), lines
