"""No function is long or has many branches: see tests/sizes.py."""

import ast

from tests import sizes


def test_no_function_is_above_the_bounds():
    new = [f for f in sizes.above() if f"{f.path} {f.name}" not in sizes.LEFT]
    assert not new, "\n".join(f"{f.lines} lines, {f.branches} branches: {f.path}:{f.line} {f.name}" for f in new)


def test_a_function_that_is_not_short_has_a_docstring():
    thunder = sizes.ROOT / "thunder"
    files = [*thunder.glob("*.py"), *(path for folder in sizes.DOCUMENTED for path in (thunder / folder).rglob("*.py"))]
    missing = [name for path in files for name in sizes.undocumented(path)]
    assert not missing, "\n".join(missing)


def test_branches_are_those_of_the_function_itself():
    text = """
def outer(a, b):
    if a and b or not a:
        return [x if x else None for x in a if x]
    def inner():
        while True:
            pass
"""
    assert sizes._branches(ast.parse(text).body[0]) == 6
