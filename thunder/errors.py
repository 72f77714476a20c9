"""The errors thunder raises to its users. Each says what happened, where in the user's code, why, and what to do.

An error of the user's own program, or of PyTorch in it, leaves a compiled function as itself.
"""

from __future__ import annotations

import difflib
import functools
import linecache
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "ThunderError", "CaptureError", "DataDependentError", "UnforeseenShapeError", "MissingImplementationError",
    "TraceCheckError", "DeclarationError", "DerivativeError", "OptionError", "CollectiveError", "SharpEdgeError",
    "SharpEdgeWarning", "FallbackWarning", "RecompileWarning", "ProgramFileError", "ProgramFileWarning",
    "noted", "noting", "is_noted", "warn_user", "user_line", "calling_line", "add_location", "section_of",
    "with_section", "did_you_mean",
]  # fmt: skip


@functools.cache
def help_page() -> str:
    """The page about troubles, with a section for each class of this file, and for each reason to compile again: that
    of the repository, or the one that a wheel carries."""
    page = "docs/troubleshooting.md"
    carried = Path(__file__).with_name("troubleshooting.md")
    return page if (Path(__file__).parents[1] / page).exists() else str(carried)


def did_you_mean(name: Any, valid: Iterable[str]) -> str:
    """A question that names the valid name nearest to a wrong one, for a message; empty where none is near."""
    near = difflib.get_close_matches(name, valid, 1) if isinstance(name, str) else []
    return f"did you mean {near[0]!r}? " if near else ""


def section_of(kind: type) -> str:
    """Where the page about troubles tells of an error or a warning."""
    return f"{help_page()}#{next((c.__name__ for c in kind.__mro__ if c.__module__ == __name__), '').lower()}"


class ThunderError(RuntimeError):
    """Base class of the errors of thunder. A note in the traceback names the section of the troubleshooting page.

    Attributes:
        bound_symbol: The bound symbol of a trace on which a pass failed. It leads to the user's line.
        questions: The prologue with the guards that the program had when its capture failed.
    """

    bound_symbol: Any = None
    questions: Callable | None = None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.add_note(f"See {section_of(type(self))}")


class CaptureError(ThunderError):
    """A program cannot be captured.

    Args:
        reason: Why.
        location: (filename, line number, function name, source line) in the user's code.
        remedy: What to do.
    """

    def __init__(self, reason: str, *, location: tuple | None = None, remedy: str = ""):
        self.reason, self.location, self.remedy = reason, location, remedy
        self.calls: list[tuple[str, int]] = []
        text = [f"cannot capture this program: {reason}"]
        if location is not None:
            filename, line, function, source = location
            text.append(f"  at {filename}:{line}, in {function}" + (f"\n    {source.strip()}" if source else ""))
        if remedy:
            text.append(f"  {remedy}")
        super().__init__("\n".join(text))


class DataDependentError(CaptureError):
    """The program branches on a data-dependent number: a data-dependent size, or the value of a tensor."""

    examples: int = 400  # so many numbers the rule of the operation that asks is tried with


class UnforeseenShapeError(ThunderError):
    """An operation returned a tensor of another shape than the program was compiled for, because the shape depends
    on data."""


class MissingImplementationError(ThunderError, NotImplementedError):
    """No executor implements an operation, or an operation was called outside of a compiled function."""


class TraceCheckError(ThunderError):
    """A pass returned an invalid trace."""


class DeclarationError(TraceCheckError):
    """The result of an operation differs from its declaration: from its meta function, from its fake implementation,
    or from the promise that it does not write to its arguments or share memory with them."""


class DerivativeError(DeclarationError):
    """A derivative returned gradients that do not fit the arguments of its operation: too few or too many, of
    another shape, on another device, complex for a real argument, or not a tensor."""


class OptionError(ThunderError, ValueError):
    """An option has an invalid value. The message lists the valid ones."""


class CollectiveError(ThunderError):
    """The ranks cannot communicate: a rank has ended or hangs, or the ranks run different programs. The message
    names the rank."""


class SharpEdgeError(ThunderError):
    """With sharp_edges="error": the program does something that a compiled program cannot repeat exactly."""


class SharpEdgeWarning(UserWarning):
    """With sharp_edges="warn", the default: the program does something that a compiled program cannot repeat
    exactly. Warns once for each place."""


class FallbackWarning(UserWarning):
    """A line or a program cannot be captured and runs in eager PyTorch. Warns once for each compiled function."""


class RecompileWarning(UserWarning):
    """A function was compiled many times. The message lists what changed each time."""


class ProgramFileError(ThunderError):
    """A program cannot be written to a file, or a file is damaged or not trusted."""


class ProgramFileWarning(UserWarning):
    """A program on disk is damaged or not trusted, or programs cannot be written. Warns once for each process."""


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OURS = (_HERE, "<thunder ")  # files, and texts of programs


def _libraries() -> tuple[str, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.__file__:
        return _OURS
    return (*_OURS, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)


def user_line(error: BaseException) -> tuple[tuple | None, bool]:
    """Where an exception went through the user's code, and whether it was raised there.

    (filename, line number, function name, source line) of the innermost line outside of thunder and torch, or else
    outside of thunder; None where there is none.
    """
    libraries = _libraries()
    own_line, torchs, traceback, code = None, None, error.__traceback__, None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(_OURS):
            line = _line(code, traceback.tb_lineno)
            if code.co_filename.startswith(libraries):
                torchs = line
            else:
                own_line = line
        traceback = traceback.tb_next
    return own_line or torchs, code is not None and not code.co_filename.startswith(libraries)


def calling_line() -> tuple | None:
    """(filename, line number, function name, source line) of the innermost running line outside of thunder and
    torch."""
    frame, _ = _calling_frame()
    return None if frame is None else _line(frame.f_code, frame.f_lineno)


def _calling_frame() -> tuple[types.FrameType | None, int]:
    """The innermost frame outside of thunder and torch, and how far it is from the caller."""
    libraries, level, frame = _libraries(), 0, sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(libraries) and not _is_test(frame.f_code):
        level, frame = level + 1, frame.f_back
    return frame, level


def _line(code: Any, number: int) -> tuple:
    return code.co_filename, number, code.co_name, linecache.getline(code.co_filename, number)


def _is_test(code: Any) -> bool:
    return code.co_filename.startswith(_HERE + "tests")


_RAISED = "raised by "


@contextmanager
def noted(what: str) -> Iterator[None]:
    """A block that runs a function of a user's who extends thunder: its errors get a note that names it."""
    try:
        yield
    except Exception as error:
        note_raised(error, what)
        raise


def note_raised(error: Exception, what: str) -> None:
    """Notes which function of a user's who extends thunder raised an error."""
    error.add_note(f"{_RAISED}{what}")


def said_by(who: str, condition: Callable, args: Sequence, kwargs: Mapping) -> bool:
    """The answer of a checker or of a rule's condition, for values of a program. Raises OptionError, which names it,
    where it returns nothing, and where it computes with tensors."""
    try:
        answer = condition(*args, **kwargs)
    except MissingImplementationError as error:
        raise OptionError(
            f"{who} computes with tensors, of which the shapes, dtypes and devices are known: {error}"
        ) from error
    if answer is None:
        raise OptionError(f"{who} returned None: return True or False")
    return bool(answer)


def noting(what: str, function: Callable) -> Callable:
    """The function, called in a block that is `noted`."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with noted(what):
            return function(*args, **kwargs)

    return run


def is_noted(error: BaseException) -> bool:
    """Whether a function raised an error that extends thunder, and not the program."""
    return any(note.startswith(_RAISED) for note in getattr(error, "__notes__", ()))


_AT = "in the user's program: "


def add_location(error: BaseException, location: tuple) -> None:
    """Adds to an error the user's line, (filename, line number, function name, source line), that it is about; to one
    that names a line nothing."""
    filename, line, function, source = location
    if not any(note.startswith(_AT) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_AT}{filename}:{line}, in {function}\n    {source.strip()}")


def with_section(text: str, category: type[Warning]) -> str:
    """The text of a warning, which names its section of the page about troubles where it has one."""
    return f"{text} (see {section_of(category)})" if category.__module__ == __name__ else text


def warn_user(text: str, category: type[Warning]) -> None:
    """A warning that points at the innermost line outside of thunder and torch."""
    warnings.warn(with_section(text, category), category, stacklevel=_calling_frame()[1] + 1)
