"""Work counted in calls of Python functions: the same whatever else the machine does."""

import sys
from collections.abc import Callable

from thunder.core.utils import without_collection


def calls_during(function: Callable, filename: str | None = None) -> int:
    """How many Python functions are called; filename: of those, the ones of one file."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "call" and filename in (None, frame.f_code.co_filename)

    before = sys.getprofile()
    with without_collection():  # what a collection calls is not the function's
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
    return count
