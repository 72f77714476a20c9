"""What the corpus cannot show: counters, hooks, logs, unsupported opcodes, interrupts, limits, memory."""

import contextlib
import dis
import functools
import gc
import io
import operator
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
import weakref

import pytest

from thunder.interpreter import (
    Host,
    UnsupportedError,
    decode,
    format_location,
    interpreted_instructions,
    interpreter_log,
    print_log,
)
from thunder.interpreter.recursion import with_frames


def add(a, b=2):
    return a + b


def call_twice(x):
    y = add(x)
    return add(y, b=1)


def fail(x):
    y = x + 1
    raise ValueError(y)


def call_fail(x):
    return fail(x)


# ---------------------------------------------------------------- counters and logs


def test_instructions_are_counted():
    host = Host()
    assert host.interpret(add, (1, 3)) == 4
    assert host.instructions == 4  # two loads, the addition, the return

    def loop(n):
        for _ in range(n):
            pass

    one, eleven = Host(), Host()
    one.interpret(loop, (1,))
    eleven.interpret(loop, (11,))
    assert (eleven.instructions - one.instructions) % 10 == 0
    assert eleven.instructions > one.instructions


def test_frames_are_counted():
    host = Host()
    host.interpret(call_twice, (1,))
    assert host.frames == {call_twice.__code__: 1, add.__code__: 2}
    assert host.stack_of_frames == []


def test_instructions_of_failed_and_suspended_frames_are_counted():
    host = Host()
    with pytest.raises(ValueError, match="2"):
        host.interpret(fail, (1,))
    assert host.instructions > 4

    def numbers():
        yield 1
        yield 2

    host = Host()
    assert host.interpret(lambda: list(numbers())) == [1, 2]
    assert host.frames[numbers.__code__] == 1


def test_short_log_lists_instructions_of_the_code_that_ran():
    host = Host()
    host.interpret(call_twice, (1,))
    assert list(host.history) == [call_twice.__code__, add.__code__, add.__code__]
    instructions = interpreted_instructions(host)
    expected = list(dis.get_instructions(call_twice)) + 2 * list(dis.get_instructions(add))
    assert [i.opname for i in instructions] == [i.opname for i in expected]
    log = interpreter_log(host)
    assert [e["kind"] for e in log if isinstance(e, dict)] == ["InterpreterCall"] * 3


def test_full_log():
    host = Host(record_history=True)
    assert host.interpret(call_twice, (1,)) == 4
    log = interpreter_log(host)
    kinds = [e["kind"] for e in log if isinstance(e, dict)]
    assert kinds.count("InterpreterCall") == kinds.count("InterpreterReturn") == 3
    lines = [e["position"] for e in log if isinstance(e, dict) and e["kind"] == "Line" and e["fn"] is call_twice]
    first = call_twice.__code__.co_firstlineno
    assert [n for n in lines if n > first] == [first + 1, first + 1, first + 2, first + 2]  # again after each call
    instructions = interpreted_instructions(host)
    assert all(isinstance(i, dis.Instruction) for i in instructions)
    assert [i.opname for i in instructions].count("BINARY_OP") == 2
    assert [e["rval"] for e in log if isinstance(e, dict) and e["kind"] == "InterpreterReturn"] == [3, 4, 4]


def test_full_log_has_opaque_calls_and_prints():
    host = Host(record_history=True)
    host.interpret(lambda: max(1, 2))
    assert [e["fn"] for e in interpreter_log(host) if isinstance(e, dict) and e["kind"] == "Opaque"] == [max]
    out = io.StringIO()
    print_log(host, lambda line: print(line, file=out), use_colors=False)
    assert "call test_full_log_has_opaque_calls_and_prints.<locals>.<lambda>" in out.getvalue()
    assert "opaque max" in out.getvalue()


# ---------------------------------------------------------------- hooks


class Marked(int):
    pass


class Naming(Host):
    named_type = Marked

    def __init__(self):
        super().__init__()
        self.named = []

    def name_value(self, value, name):
        self.named.append((int(value), name))


def test_stored_values_of_the_named_type_are_reported():
    def program(a):
        b = a
        c = int(a) + 1
        for d in [a, 5]:
            pass
        (e, f) = a, c
        cell = a
        return lambda: cell

    host = Naming()
    host.interpret(program, (Marked(7),))
    assert host.named == [(7, "b"), (7, "d"), (7, "e"), (7, "cell")]


def test_other_values_cost_no_call():
    host = Naming()
    host.interpret(call_twice, (1,))
    assert host.named == []


def test_operations_reach_the_host():
    seen = []

    class Watching(Host):
        def load_attr(self, value, name):
            seen.append(("attr", name))
            return getattr(value, name)

        def getitem(self, value, key):
            seen.append(("item", key))
            return value[key]

        def binary(self, symbol, a, b):
            seen.append(("binary", symbol))
            return super().binary(symbol, a, b)

        def load_global(self, f, name):
            seen.append(("global", name))
            return super().load_global(f, name)

        def default(self, f, name, value):
            seen.append(("default", name))
            return value

        def truth(self, value):
            seen.append(("truth", value))
            return bool(value)

        def made_function(self, f):
            seen.append(("made", f.__name__))
            return f

    def program(xs, k=3):
        def inner():
            return k

        if xs:
            xs += [1]
        return xs.count(1), xs[0], add(1, 1), 2 + k, inner()

    assert Watching().interpret(program, ([1],)) == (2, 1, 2, 5, 3)
    assert seen == [
        ("default", "k"), ("made", "inner"), ("truth", [1, 1]), ("binary", "+="), ("attr", "count"), ("item", 0), ("global", "add"),
    ]  # fmt: skip


def test_call_can_be_overridden():
    class Replacing(Host):
        def call(self, f, args, kwargs):
            return "replaced" if f is add else super().call(f, args, kwargs)

    assert Replacing().interpret(call_twice, (1,)) == "replaced"


def test_location():
    places = []

    class Here(Host):
        def call(self, f, args, kwargs):
            if f is operator.neg:
                places.append((self.location(), self.where()))
            return super().call(f, args, kwargs)

    def program(x):
        return abs(
            operator.neg(x),
        )

    Here().interpret(program, (3,))
    ((code, index), where) = places[0]
    assert code is program.__code__ and isinstance(index, int)
    assert where == format_location((code, index))
    filename, line, columns, source, name = where
    assert filename == __file__ and line == code.co_firstlineno + 2
    assert source.strip() == "operator.neg(x)," and name.endswith("program")
    assert source[columns[0] : columns[1]] == "operator.neg(x)"
    assert Host().location() is None and Host().where()[1] == 0


# ---------------------------------------------------------------- errors


def test_traceback_shows_only_user_frames():
    with pytest.raises(ValueError, match="2") as caught:
        Host().interpret(call_fail, (1,))
    entries = traceback.extract_tb(caught.value.__traceback__)
    first = fail.__code__.co_firstlineno
    assert [(e.name, e.lineno) for e in entries[1:]] == [("call_fail", call_fail.__code__.co_firstlineno + 1), ("fail", first + 2)]
    assert entries[-1].filename == __file__ and entries[-1].line == "raise ValueError(y)"


def test_traceback_text_is_cpythons():
    def text(run):
        try:
            run()
        except ZeroDivisionError as error:
            lines = "".join(traceback.format_exception(error)).splitlines()
            start = next(k for k, line in enumerate(lines) if "in program" in line)
            return lines[start:]

    def program(a):
        return [1, 2][0] + a / (a - a) + 3

    assert text(lambda: Host().interpret(program, (1,))) == text(lambda: program(1))


def test_traceback_frames_hold_the_users_locals():
    with pytest.raises(ValueError, match="2") as caught:
        Host().interpret(fail, (1,))
    tb = caught.value.__traceback__
    while tb.tb_next:
        tb = tb.tb_next
    assert tb.tb_frame.f_locals["y"] == 2 and tb.tb_frame.f_globals is globals()


def test_globals_without_builtins_stay_as_they_are():
    space = {"v": 0}
    code = compile("def f(): return 1 / v", "<space>", "exec").co_consts[0]
    f = types.FunctionType(code, space)
    with pytest.raises(ZeroDivisionError):
        Host().interpret(f)
    assert set(space) == {"v"}


def test_a_function_with_an_unknown_opcode_is_called_as_it_is(monkeypatch):
    decode = sys.modules["thunder.interpreter.decode"]
    monkeypatch.setattr(decode, "TABLE", {})
    monkeypatch.setattr(decode, "ROWS", [decode.row_of(n) if n == "BUILD_LIST" else row for n, row in zip(dis.opname, decode.ROWS, strict=True)])

    def program(x):
        try:
            return [x, x]
        except Exception:  # noqa: BLE001
            return "caught"

    class Refuses(Host):
        def foreign_function(self, f, args, kwargs, construct):
            raise Foreign(f, construct)

    class Foreign(Exception):
        pass

    with pytest.raises(Foreign) as caught:
        Refuses().interpret(program, (1,))
    assert caught.value.args == (program, "BUILD_LIST")
    assert Host().interpret(program, (1,)) == [1, 1]  # as it is


def test_uncatchable_errors_pass_through_the_program():
    class Stop(RuntimeError):
        pass

    class Stopping(Host):
        uncatchable = (Stop,)

        def call(self, f, args, kwargs):
            if f is abs:
                raise Stop
            return super().call(f, args, kwargs)

    log = []

    def program():
        try:
            abs(1)
        except BaseException:  # noqa: BLE001
            log.append("caught")
        finally:
            log.append("finally")

    with pytest.raises(Stop):
        Stopping().interpret(program)
    assert log == []


def test_recursion_error_and_recovery():
    def endless(n):
        return endless(n + 1)

    host = Host()
    before = sys.getrecursionlimit()
    for _ in range(2):
        with pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
            host.interpret(endless, (0,))
        assert host.interpret(add, (1,)) == 3
    assert sys.getrecursionlimit() == before
    assert host.stack_of_frames == []


def test_recursion_through_native_code_raises():
    def endless(x):
        return sorted([x, x], key=endless)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; Python 3.13 ends the process at thrice this depth, without us as well
    try:
        with pytest.raises(RecursionError):
            Host().interpret(endless, (0,))
    finally:
        sys.setrecursionlimit(before)


def test_program_sees_its_own_recursion_limit():
    assert Host().interpret(sys.getrecursionlimit) == Host().interpret(lambda: sys.getrecursionlimit()) == sys.getrecursionlimit()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_keyboard_interrupt_propagates_and_runs_finally():
    log = []

    def program():
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001
            log.append("wrong")
        finally:
            log.append("finally")

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    host = Host()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            host.interpret(program)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert log == ["finally"]
    assert host.stack_of_frames == [] and host.exc is None and host.instructions > 0
    assert host.interpret(add, (1,)) == 3


def test_native_code_sees_the_handled_exception():
    def program():
        try:
            raise KeyError("k")
        except KeyError:
            return native()

    native = functools.partial(eval, "__import__('sys').exc_info()[1].args")
    assert Host().interpret(program) == ("k",)

    seen = []

    class Counting(Host):
        def call(self, f, args, kwargs):
            return self.call_native(f, args, kwargs) if f is traceback.format_exc else super().call(f, args, kwargs)

    def shows():
        try:
            fail(1)
        except ValueError:
            seen.append(traceback.format_exc())

    Counting().interpret(shows)
    assert "in fail" in seen[0] and "interpreter" not in seen[0].replace("tests/interpreter", "")


def test_warnings_name_the_users_line():
    def program():
        warnings.warn("inner", stacklevel=1)

    def outer():
        program()
        warnings.warn("outer", DeprecationWarning, 1)

    def indirect():
        def helper():
            warnings.warn("from the caller", stacklevel=2)

        helper()

    def seen(run):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return [(w.filename, w.lineno, w.category, str(w.message)) for w in caught]

    for f in (outer, indirect):
        assert seen(lambda: Host().interpret(f)) == seen(f)


# ---------------------------------------------------------------- decoding, memory, threads


def test_each_code_object_is_decoded_once():
    assert decode(add.__code__) is decode(add.__code__)


def test_equal_code_objects_have_their_own_records():
    a, b = (compile("def f(): pass", name, "exec").co_consts[0] for name in ("a.py", "b.py"))
    assert decode(a) is not decode(b)


def test_generated_code_is_freed():
    def program():
        space = {}
        exec("def g(): return 3", space)
        return space["g"]

    host = Host()
    interpreted = host.interpret(program)
    assert host.interpret(interpreted) == 3
    gone = weakref.ref(interpreted.__code__)
    del interpreted
    del host
    gc.collect()
    assert gone() is None


def test_arguments_are_not_kept_alive_by_the_host():
    class Big:
        pass

    big, host = Big(), Host()
    gone = weakref.ref(big)
    host.interpret(lambda x: [x][0], (big,))
    del big
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("handled", [True, False])
def test_an_exception_makes_no_cycle(handled):
    class Big:
        pass

    def handles(x, wanted):
        try:
            raise ValueError(x is None)
        except wanted:
            return None

    big = Big()
    gone = weakref.ref(big)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            Host().interpret(handles, (big, ValueError if handled else TypeError))
        del big
        assert gone() is None
    finally:
        gc.enable()


def test_threads_share_the_recursion_limit():
    def work(n):
        return 0 if n == 0 else 1 + work(n - 1)

    before, results = sys.getrecursionlimit(), []
    threads = [threading.Thread(target=lambda: results.append(Host().interpret(work, (300,)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [300] * 4 and sys.getrecursionlimit() == before


def test_interpreted_generator_outlives_the_call():
    def numbers():
        total = 0
        while True:
            total += yield total

    generator = Host().interpret(numbers)
    assert isinstance(generator, types.GeneratorType)
    assert [next(generator), generator.send(3), generator.send(4)] == [0, 3, 7]


def test_nested_hosts():
    def program():
        return Host().interpret(add, (5,))

    assert Host().interpret(program) == 7


def test_interpreting_is_not_absurdly_slow():
    """A bound a hundred times above what is measured: it fails for a quadratic mistake, not for a busy machine."""

    def program(n):
        for _ in range(n):
            pass

    start = time.perf_counter()
    Host().interpret(program, (10_000,))
    assert time.perf_counter() - start < 5


def test_exceptions_under_a_trace_function():
    """A debugger or coverage tool looks at the lines of the stubs that stand in tracebacks."""
    program = "import sys\nfrom thunder.interpreter import Host\ndef f():\n" + "".join(f"    x{i} = {i}\n" for i in range(400))
    program += "    try:\n        {}['a']\n    except KeyError as error:\n        return error.__traceback__.tb_lineno\n"
    program += "def trace(frame, event, arg):\n    frame.f_lineno\n    return trace\nsys.settrace(trace)\nprint(Host().interpret(f, (), {}))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().isdigit(), done.stderr


def test_a_python_that_is_not_known_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr(sys.modules["thunder.interpreter.decode"], "VERSION", (3, 99))
    with pytest.raises(UnsupportedError, match=r"Python 3.99 is not supported: the bytecode of Python 3.11 to 3.15 is known"):
        Host().interpret(lambda: 1, ())


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults that Linux reports")
def test_loops_of_calls_map_no_memory_for_frames():
    import resource

    def leaf(a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0):
        return a, b, c, d, e, f, g, h, a, b, c, d, e, f, g, h

    def faults(depth):
        if depth:
            return faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(500):
            leaf()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def worst():
        return max(faults(depth) for depth in range(250))

    assert worst() >= 500
    assert with_frames(worst)() < 500


def _finally():
    try:
        operation()  # noqa: F821 - the functions are not run
    finally:
        print()


def _returning_finally():
    try:
        operation()  # noqa: F821
    finally:
        return 1  # noqa: B012


def _except():
    try:
        operation()  # noqa: F821
    except TypeError:
        return 1


def _raising_again():
    try:
        operation()  # noqa: F821
    except TypeError as error:
        if error.args:
            print()
        raise


def _with():
    with io.StringIO():
        operation()  # noqa: F821


def _with_in_except():
    try:
        with io.StringIO():
            operation()  # noqa: F821
    except (TypeError, ValueError):
        pass


def _leaving_a_loop():
    while True:
        try:
            operation()  # noqa: F821
        finally:
            break  # noqa: B012


@pytest.mark.parametrize(
    ("function", "handles"),
    [
        (_finally, False),
        (_returning_finally, True),
        (_except, True),
        (_raising_again, False),
        (_with, False),
        (_with_in_except, True),
        (_leaving_a_loop, True),
    ],
)
def test_where_an_exception_may_end(function, handles):
    record = decode(function.__code__)
    (index,) = [i for i, (_, argument) in enumerate(record.program) if argument == "operation"]
    assert record.handles(index) is handles


def test_a_recursion_limit_that_another_thread_sets_stays():
    """While a deep program is interpreted the limit is higher; what is set meanwhile is the user's."""
    before, is_deep, is_set = sys.getrecursionlimit(), threading.Lock(), threading.Lock()
    is_deep.acquire()
    is_set.acquire()

    def other():
        is_deep.acquire()
        sys.setrecursionlimit(before + 321)
        is_set.release()

    def deep(n):
        if n:
            return deep(n - 1)
        is_deep.release()
        is_set.acquire()
        return "deep"

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert Host().interpret(deep, (150,)) == "deep"
        assert sys.getrecursionlimit() == before + 321
    finally:
        thread.join()
        sys.setrecursionlimit(before)
