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
    "test_defaultdict test_deque test_descr test_dict test_dictcomps test_dictviews test_dynamic "
    "test_dynamicclassattribute test_enum test_enumerate test_except_star test_exception_hierarchy "
    "test_exception_variations test_exceptions test_fstring test_funcattrs test_functools "
    "test_generator_stop test_generators test_genericalias test_genericclass test_genericpath test_global "
    "test_hash test_index test_int test_isinstance test_iter test_iterlen test_itertools test_keywordonlyarg "
    "test_list test_listcomps test_long test_named_expressions test_numeric_tower test_opcodes "
    "test_operator test_ordered_dict test_patma test_pep479 test_positional_only_arg test_property test_raise "
    "test_range test_richcmp test_scope test_set test_slice test_sort test_string test_subclassinit "
    "test_super test_syntax test_tuple test_types test_typing test_unary test_unpack test_userdict "
    "test_userlist test_userstring test_weakref test_weakset test_with test_yield_from"
).split()
LIMIT = 30.0  # seconds of CPU time for a test

# why tests that CPython passes give something else in the interpreter
_REASONS: dict[str, str] = {
    "frames are objects of the machine's: their lines, their callers, what generators delegate to, and tracing": """
        test_exceptions.ExceptionTests.testSettingException test_exceptions.NameErrorTests.test_name_error_suggestions
        test_exceptions.PEP626Tests.test_lineno_after_other_except
        test_exceptions.PEP626Tests.test_lineno_after_raise_in_except
        test_exceptions.PEP626Tests.test_lineno_after_raise_in_with_exit
        test_exceptions.PEP626Tests.test_lineno_after_raise_simple test_exceptions.PEP626Tests.test_lineno_after_with
        test_exceptions.PEP626Tests.test_lineno_in_finally_normal
        test_exceptions.PEP626Tests.test_lineno_in_named_except
        test_exceptions.PEP626Tests.test_missing_lineno_shows_as_none
        test_generators.GeneratorStackTraceTest.test_send_with_yield_from
        test_generators.GeneratorStackTraceTest.test_throw_with_yield_from
        test_generators.YieldFromTests.test_generator_gi_yieldfrom test_patma.TestTracing.test_default_capture
        test_patma.TestTracing.test_default_wildcard test_patma.TestTracing.test_no_default
        test_patma.TestTracing.test_only_default_capture test_patma.TestTracing.test_only_default_wildcard
        test_patma.TestTracing.test_unreachable_code test_raise.TestTracebackType.test_attrs
        test_yield_from.TestPEP380Operation.test_delegator_is_visible_to_debugger
    """,
    "the error does not say the object and the name that were asked for": """
        test_exceptions.AttributeErrorTests.test_getattr_suggestions_invalid_args
        test_exceptions.AttributeErrorTests.test_getattr_suggestions_no_args
    """,
    "the test replaces a builtin that the machine itself calls": """
        test_dynamic.RebindBuiltinsTests.test_cannot_replace_builtins_dict_between_calls
        test_dynamic.RebindBuiltinsTests.test_cannot_replace_builtins_dict_while_active
        test_dynamic.RebindBuiltinsTests.test_modify_builtins
        test_dynamic.RebindBuiltinsTests.test_modify_builtins_from_leaf_function
        test_dynamic.RebindBuiltinsTests.test_modify_builtins_while_generator_active
        test_functools.TestLRUC.test_lru_reentrancy_with_len test_functools.TestLRUPy.test_lru_reentrancy_with_len
    """,
    "the iterator of an object that has only __getitem__ is the machine's: it is not pickled, and has no state to set": """
        test_iter.TestCase.test_iter_neg_setstate test_iter.TestCase.test_iter_overflow
        test_iter.TestCase.test_mutating_seq_class_iter_pickle test_iter.TestCase.test_reduce_mutating_builtins_iter
        test_iter.TestCase.test_seq_class_for test_iter.TestCase.test_seq_class_iter
        test_enumerate.TestReversed.test_len
    """,
    "it takes too long": """
        test_collections.TestCounter.test_multiset_operations_equivalent_to_set_operations
        test_deque.TestBasic.test_index test_range.RangeTest.test_range_iterators
        test_weakref.MappingTestCase.test_threaded_weak_valued_consistency test_long.LongTest.test_bit_length
        test_long.LongTest.test_bitop_identities test_long.LongTest.test_correctly_rounded_true_division
        test_long.LongTest.test_division test_long.LongTest.test_format test_long.LongTest.test_mixed_compares
        test_itertools.TestBasicOps.test_tee_del_backward test_itertools.TestBasicOps.test_permutations
        test_itertools.TestBasicOps.test_combinations_with_replacement
        test_itertools.RegressionTests.test_long_chain_of_empty_iterables test_builtin.BuiltinTest.test_filter_dealloc
    """,
    "the interpreter is right: CPython expects this test to fail": """
        test_descr.ClassPropertiesAndMethods.test_restored_object_new
    """,
    "objects of the garbage collector are counted, and the machine's frames are among them": """
        test_descr.ClassPropertiesAndMethods.test_slots
    """,
    "a list, or the other operand, is changed by the comparison of its elements": """
        test_list.ListTest.test_equal_operator_modifying_operand
    """,
    "a special method is a property whose getter raises": "test_class.ClassTests.testForExceptionsRaisedInInstanceGetattr2",
    "`f(*arguments)` makes a new tuple": "test_call.TestPEP590.test_vectorcall_override",
    "the limit of recursion is met by the machine's own functions, or by another number of calls": """
        test_exceptions.ExceptionTests.test_recursion_in_except_handler test_richcmp.MiscTest.test_recursion
    """,
    "the hash of a weak reference is asked of its object": "test_weakref.ReferencesTestCase.test_hashing",
    "an error of `close` of an inner iterator is raised": """
        test_yield_from.TestPEP380Operation.test_broken_getattr_handling
    """,
}
EXPLAINED = {f"test.{case}": reason for reason, names in _REASONS.items() for case in names.split()}


class TooSlowError(UnsupportedError):
    """A test takes longer than LIMIT. Tests cannot catch it."""


class Outcomes(unittest.TestResult):
    """Writes the outcome of each test to a file as it ends: the process may not live to see the next."""

    def __init__(self, path: pathlib.Path):
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
    unittest.TestSuite(chosen).run(Outcomes(pathlib.Path(path)))


def outcomes(mode: str, name: str, timeout: float = 900.0) -> dict[str, tuple[str, str, float]]:
    """The outcome, its text and the seconds of each test of a file."""
    modules: dict[str, tuple[str, str, float]] = {}
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
            modules |= {entry[1]: tuple(entry[2:]) for entry in entries if entry[0] == "end"}
            if ended == 0:
                return modules
            if not begun or begun[-1] in modules:  # it died before or behind all tests
                modules[f"{name}: all"] = "fails", f"{ended}: {words[-300:]}", 0.0
                return modules
            modules[begun[-1]] = "fails", f"the process ends: {ended}", 0.0
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
