"""The linter's contract that there are no circles of imports finds them. `tests/import_circles.py`"""

from tests.import_circles import circles, homes


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "b"}, "d": {"a", "e"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"d"}, "d": set()}) == []
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}) == [["a", "b"], ["c", "d"]]


def test_the_public_names_of_thunder_have_homes():
    assert {"thunder.pipeline", "thunder.api", "thunder.extend.passes"} <= set(homes())
