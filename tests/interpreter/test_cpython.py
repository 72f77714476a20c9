"""CPython's own tests in the interpreter: `cpython_runner` runs them without pytest."""

import sys

import pytest

from tests.interpreter.cpython_runner import EXPLAINED, FILES, compare, is_shipped

FAST = "test_augassign test_property test_raise test_scope test_with test_yield_from".split()


@pytest.mark.skipif(not is_shipped(), reason="this Python comes without its own tests (Lib/test)")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in FILES])
def test_the_interpreter_passes_the_tests_that_cpython_passes(name):
    applying, differing = compare(name)
    if not applying:
        pytest.skip(f"{name} has no unittest methods under this Python, only doctests")
    unexplained = {case: outcome for case, outcome in differing.items() if case not in EXPLAINED}
    if sys.version_info[:2] == (3, 11):  # whose tests the explanations were written for
        assert not unexplained
    assert len(unexplained) <= 0.03 * applying, unexplained
