"""The corpus under the running version; `corpus_runner` runs it without pytest."""

import pytest

from tests.interpreter.corpus_runner import compare, load, name_of

PROGRAMS = load()


def test_corpus_is_large_and_distinct():
    assert len({function.__code__ for function, _ in PROGRAMS}) >= 550


@pytest.mark.parametrize(("function", "arguments"), PROGRAMS, ids=[name_of(*p) for p in PROGRAMS])
def test_machine_agrees_with_cpython(function, arguments):
    differences = compare(function, arguments)
    assert not differences, "\n".join(differences)
