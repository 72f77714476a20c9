"""Runs CPython's own tests (`Lib/test`) in the interpreter, and compares what each gives with CPython.

    python -m tests.interpreter.cpython_runner [FILE ...] [--differences]

The files come with the Python that runs; by default those of `FILES`. Each file runs twice, in processes of its own:
as it is, and with each test method interpreted. One line a file: how many tests apply, which is those that CPython
itself passes here, how many of these the interpreter passes, how many not. --differences: these by name, with what is
raised. Exit status 1 where a difference is not in `EXPLAINED`. Needs no pytest.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from thunder.interpreter import Host, UnsupportedError

FILES = (
    "test_abc test_augassign test_baseexception test_binop test_bool test_builtin test_call test_class "
    "test_collections test_compare test_contains test_contextlib test_copy test_dataclasses test_decorators "
    "test_defaultdict test_deque test_descr test_descrtut test_dict test_dictcomps test_dictviews test_dynamic "
    "test_dynamicclassattribute test_enum test_enumerate test_except_star test_exception_hierarchy "
    "test_exception_variations test_exceptions test_extcall test_fstring test_funcattrs test_functools "
    "test_generator_stop test_generators test_genericalias test_genericclass test_genericpath test_genexps test_global "
    "test_hash test_index test_int test_isinstance test_iter test_iterlen test_itertools test_keywordonlyarg "
    "test_list test_listcomps test_long test_metaclass test_named_expressions test_numeric_tower test_opcodes "
    "test_operator test_ordered_dict test_patma test_pep479 test_positional_only_arg test_property test_raise "
    "test_range test_richcmp test_scope test_set test_setcomps test_slice test_sort test_string test_subclassinit "
    "test_super test_syntax test_tuple test_types test_typing test_unary test_unpack test_unpack_ex test_userdict "
    "test_userlist test_userstring test_weakref test_weakset test_with test_yield_from"
).split()
LIMIT = 30.0  # seconds of CPU time for a test

# why a test that CPython passes gives something else in the interpreter
EXPLAINED: dict[str, str] = {}


class TooSlowError(UnsupportedError):
    """A test takes longer than LIMIT. Tests cannot catch it."""


class Outcomes(unittest.TestResult):
    """Writes the outcome of each test to a file as it ends: the process may not live to see the next."""

    def __init__(self, path: pathlib.Path, skipped: dict[str, str]):
        super().__init__()
        self.file, self.outcome, self.begun = path.open("a"), ["ok", ""], 0.0

    def _write(self, *entry: object) -> None:
        print(json.dumps(entry), file=self.file, flush=True)

    def startTest(self, test):
        self.outcome, self.begun = ["ok", ""], time.perf_counter()
        self._write("begin", test.id())

    def stopTest(self, test):
        self._write("end", test.id(), *self.outcome, round(time.perf_counter() - self.begun, 2))

    def _failed(self, test, err):
        text = f"{err[0].__name__}: {err[1]}"
        if isinstance(test, unittest.TestCase):
            self.outcome = ["fails", text[:2000]]
        else:
            self._write("fixture", str(test), text[:2000])

    def addError(self, test, err):
        self._failed(test, err)

    def addFailure(self, test, err):
        self._failed(test, err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self._failed(test, err)

    def addSkip(self, test, reason):
        self.outcome = ["skipped", reason]

    def addExpectedFailure(self, test, err):
        self.outcome = ["expected failure", ""]

    def addUnexpectedSuccess(self, test):
        self.outcome = ["unexpected success", ""]


def _interpreted(method):
    def too_slow(number, frame):
        raise TooSlowError("a test", f"it takes more than {LIMIT:.0f} s")

    previous = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        return Host().interpret(method)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _cases(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _cases(test)
        else:
            yield test


def cases(name: str) -> list[unittest.TestCase]:
    """The tests of a file, without those of coroutines, which the interpreter does not run."""
    module = importlib.import_module(f"test.{name}")
    suite = unittest.TestLoader().loadTestsFromModule(module)
    return [
        case
        for case in _cases(suite)
        if type(case).__module__.startswith("test.")
        and not inspect.iscoroutinefunction(getattr(case, case._testMethodName, None))
    ]


def work(mode: str, name: str, first: int, path: str) -> None:
    """Runs the tests of a file, from one on, in this process."""
    chosen = cases(name)[first:]
    for case in chosen if mode == "interpreted" else ():
        case._callTestMethod = _interpreted
    unittest.TestSuite(chosen).run(Outcomes(pathlib.Path(path), {}))


def outcomes(mode: str, name: str, timeout: float = 900.0) -> dict[str, tuple[str, str, float]]:
    """The outcome, its text and the seconds of each test of a file."""
    found: dict[str, tuple[str, str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "outcomes")
        root = str(pathlib.Path(__file__).parents[2])
        environment = {
            **os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        first = 0
        while True:
            path.write_text("")
            command = [sys.executable, "-m", __spec__.name, "--work", mode, name, str(first), str(path)]
            try:
                run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=timeout)
                ended, words = run.returncode, run.stderr.decode(errors="replace")
            except subprocess.TimeoutExpired:
                ended, words = "timeout", ""
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            begun = [entry[1] for entry in entries if entry[0] == "begin"]
            found |= {entry[1]: tuple(entry[2:]) for entry in entries if entry[0] == "end"}
            if ended == 0:
                return found
            if not begun or begun[-1] in found:  # it died before or behind all tests
                found[f"{name}: all"] = "fails", f"{ended}: {words[-300:]}", 0.0
                return found
            found[begun[-1]] = "fails", f"the process ends: {ended}", 0.0
            first += len(begun)


def compare(name: str) -> tuple[int, dict[str, tuple[str, str, float]]]:
    """How many tests of a file apply, and the outcomes of those that differ."""
    natively, interpreted = outcomes("natively", name), outcomes("interpreted", name)
    applying = [case for case, (outcome, *_) in natively.items() if outcome in ("ok", "expected failure")]
    missing = "fails", "it does not run", 0.0
    differing = {case: interpreted.get(case, missing) for case in applying}
    return len(applying), {case: x for case, x in differing.items() if x[0] != natively[case][0]}


def is_shipped() -> bool:
    """Whether this Python comes with its tests."""
    return importlib.util.find_spec("test") is not None and importlib.util.find_spec("test.test_descr") is not None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--differences", action="store_true")
    parser.add_argument("--work", nargs=4)
    options = parser.parse_args(arguments)
    if options.work:
        mode, name, first, path = options.work
        work(mode, name, int(first), path)
        return 0
    if not is_shipped():
        print(f"Python {sys.version.split()[0]} comes without its tests (`Lib/test`)")
        return 1
    total = differing = unexplained = 0
    print(f"{'file':34}{'applies':>8}{'equal':>8}{'differs':>8}")
    for name in options.files or FILES:
        if importlib.util.find_spec(f"test.{name}") is None:
            continue
        count, different = compare(name)
        total, differing = total + count, differing + len(different)
        unexplained += len(different.keys() - EXPLAINED.keys())
        print(f"{name:34}{count:8}{count - len(different):8}{len(different):8}", flush=True)
        for case, (outcome, text, seconds) in different.items() if options.differences else ():
            print(f"    {case} ({seconds} s): {EXPLAINED.get(case, f'{outcome}: {text}'[:600])}", flush=True)
    print(f"{'all':34}{total:8}{total - differing:8}{differing:8}  {1 - differing / max(total, 1):.2%} equal")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
