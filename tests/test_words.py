"""The words of the glossary (`tests/words.py`)."""

import pytest

from tests.words import ROOT, ROWS, names_in, offenders, places_in


def test_no_file_says_a_word_that_the_glossary_replaces():
    assert offenders() == []


@pytest.mark.parametrize(
    "text, said",
    [
        ("for line in trace.bound_symbols:", "bound symbol, operation"),
        ("the lines of the program that it made", "bound symbol, operation"),
        ("the value is computed again in the backward", "rematerialization, recompute"),
        ("the view is put back", "functionalize, write back"),
        ("a size that data decides", "data-dependent, unbacked"),
        ("values that nobody reads", "dead code, live-in, live-out"),
    ],
)
def test_a_row_finds_what_it_replaces(text, said):
    said_by_rows = {row.say for row in ROWS if not row.counted and places_in(text, row)}
    assert said_by_rows == {said}


def test_a_name_is_bound_as_a_variable_a_parameter_an_attribute_a_function_or_a_class():
    text = (
        "class A:\n    def made(self, given, *kept):\n        self.asked = found = given\n        return found.place\n"
    )
    assert sorted(names_in(text)) == [
        (1, "A()"), (2, "given"), (2, "kept"), (2, "made()"), (2, "self"), (3, "asked"), (3, "found")
    ]  # fmt: skip


def test_the_glossary_has_every_word_to_say():
    page = (ROOT / "docs" / "glossary.md").read_text()
    assert [word for row in ROWS for word in row.say.split(", ") if word not in page] == []
