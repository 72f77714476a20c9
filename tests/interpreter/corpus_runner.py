"""Runs every corpus program under CPython and under the machine, and compares what can be seen of it.

    python -m tests.interpreter.corpus_runner [word ...]

Compared: the result, printed output, the exception's type and message, its causes and contexts, and the (function, line)
sequence of its traceback. Prints what differs, then `N passed, N failed` alone on a line; the exit status is 1 when a program
failed or none ran. With words, only programs whose name contains one of them. Needs no pytest.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import pkgutil
import re
import sys
import traceback
import types
import warnings

from tests.interpreter import corpus
from tests.interpreter.corpus.kit import PROGRAMS
from thunder.interpreter import Host

HERE = __file__


def load():
    """Import the corpus modules that the running version can parse; returns PROGRAMS without duplicates."""
    for module in sorted(m.name for m in pkgutil.iter_modules(corpus.__path__)):
        needed = re.search(r"_py3(\d+)$", module)
        if needed and sys.version_info < (3, int(needed[1])):
            continue
        with warnings.catch_warnings():  # some programs are written in a way that compilers warn of
            warnings.simplefilter("ignore", SyntaxWarning)
            importlib.import_module(f"tests.interpreter.corpus.{module}")
    return PROGRAMS


def name_of(function, arguments):
    topic = function.__module__.rpartition(".")[2]
    return f"{topic}.{function.__name__}{'' if not arguments else repr(arguments)[:60]}"


def show(value):
    """A repr without what may differ between two runs: addresses, and frames of generated classes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", " at 0x", repr(value))


def trace(error):
    """(function, line) of each traceback entry in user code."""
    entries = []
    for summary, _ in zip(traceback.walk_tb(error.__traceback__), range(2000), strict=False):
        frame, line = summary
        code = frame.f_code
        if code.co_filename == HERE:
            continue
        entries.append((code.co_name, line))
    return entries


def describe(error, depth=0):
    """An exception as text: type, message, notes, traceback, group members, cause and context."""
    if error is None or depth > 6:
        return None
    parts = [type(error).__name__, show(str(error)), trace(error), getattr(error, "__notes__", None), error.__suppress_context__]
    if isinstance(error, BaseExceptionGroup):
        parts.append([describe(member, depth + 1) for member in error.exceptions])
    if isinstance(error, RecursionError):  # where exactly the limit strikes is the machine's own business
        return [parts[0], parts[1].partition(" while ")[0]]
    return [*parts, describe(error.__cause__, depth + 1), describe(error.__context__, depth + 1)]


def observe(run, function, arguments):
    """What can be seen of one run."""
    arguments = copy.deepcopy(arguments)
    printed = io.StringIO()
    result = error = None
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            result = run(function, arguments)
            if isinstance(result, types.GeneratorType):
                result = list(result)
        except BaseException as raised:  # noqa: BLE001 - the exception is the observation
            if isinstance(raised, KeyboardInterrupt) and not function.__doc__:
                raise
            error = describe(raised)
        shown = show(result)
    return {"result": shown, "error": error, "printed": printed.getvalue(), "arguments": show(arguments)}


def natively(function, arguments):
    return function(*arguments)


def interpreted(function, arguments):
    return Host().interpret(function, arguments)


def compare(function, arguments):
    """The differences between CPython and the machine as text lines; empty when they agree."""
    expected, actual = observe(natively, function, arguments), observe(interpreted, function, arguments)
    different = [key for key in expected if expected[key] != actual[key]]
    return [f"  {key}:\n    CPython {expected[key]}\n    machine {actual[key]}" for key in different]


def main(words):
    passed = failed = 0
    for function, arguments in load():
        name = name_of(function, arguments)
        if words and not any(word in name for word in words):
            continue
        try:
            differences = compare(function, arguments)
        except Exception:  # noqa: BLE001 - reported as a failure of this program
            differences = [traceback.format_exc()]
        if differences:
            failed += 1
            print(f"FAILED {name}", *differences, sep="\n")
        else:
            passed += 1
    gc.collect()
    distinct = len({function.__code__ for function, _ in PROGRAMS})
    print(f"{distinct} distinct programs under Python {sys.version.split()[0]}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
