"""Work counted in calls of Python functions: the same whatever else the machine does."""

import sys
from collections.abc import Callable
from pathlib import Path

import thunder
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


def files_within(called: Callable, function: Callable) -> list[str]:
    """The files below thunder/ with a Python function that runs while `called` does, in the course of `function`."""
    files: dict[str, None] = {}
    root = Path(thunder.__file__).parent
    outermost = None

    def note(frame, event, arg):
        nonlocal outermost
        if outermost is None and event == "call" and frame.f_code is called.__code__:
            outermost = frame
        file = Path(frame.f_code.co_filename)
        if outermost is not None and event == "call" and file.is_relative_to(root):
            files[file.relative_to(root).as_posix()] = None
        if event == "return" and frame is outermost:
            outermost = None

    before = sys.getprofile()
    with without_collection():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
    return sorted(files)
