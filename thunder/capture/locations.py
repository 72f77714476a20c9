"""Where a program is, for bound symbols, for messages and for the user. Functions take the capture first."""

from __future__ import annotations

import functools
import linecache
import types
from collections import deque

import torch

from thunder.capture.interface import Capture
from thunder.capture.library.functional import original
from thunder.capture.native import is_tracked
from thunder.capture.policy import is_library
from thunder.interpreter import Location, decode, format_location
from thunder.interpreter.attributes import cell_value, plain_attribute


@functools.cache
def _is_library(module: str | None) -> bool:
    return bool(module) and (is_library(module) or module.startswith(("torch.", "triton.")))


def is_in_library(frame) -> bool:
    """Whether a frame of the interpreter runs library code."""
    return _is_library(frame.fn.__globals__.get("__name__", ""))


def file_and_line(location) -> tuple:
    """(filename, line, function, source line) of a location."""
    filename, line, _, source, function = format_location(location)
    return filename, line, function, source or ""


def own_location(c: Capture) -> Location | None:
    """Code, instruction index and module path of the innermost frame that is not library code, of the innermost one
    where all are. The path is that of the innermost module that runs: None where none does."""
    own = module = None
    for frame in reversed(c.stack_of_frames):
        if own is None and not is_in_library(frame):
            own = frame
        if module is None:
            module = _module_path(c, frame)
        if own is not None and module is not None:
            break
    location = c.location() if own is None else (own.fn.__code__, own.ip)
    return None if location is None else Location(location[0], location[1], module, tuple(c.recording.ranges))


def _module_path(c: Capture, frame) -> str | None:
    """The path of the module that a method runs of, as the user would write it below the compiled module."""
    code = frame.fn.__code__
    owner = frame.locals.get(code.co_varnames[0]) if code.co_argcount else None
    if type(owner) is types.CellType:  # where a function or class inside of the method names it
        owner = cell_value(owner)
    if not isinstance(owner, torch.nn.Module):
        return None
    outside = c.outside
    path = outside.rooted.get(id(owner), outside.module_paths.get(id(owner)))
    if path is None:
        source = c.world.sources.get(id(owner))
        path = type(owner).__name__ if source is None else c.world.describe(source).rpartition(" ")[2]
        outside.module_paths[c.world.hold(owner)] = path
    return path


def user_location(c: Capture) -> tuple | None:
    """(filename, line, function, source line) of the innermost frame that is not library code."""
    location = c.own_location()
    if location is None:  # the program has returned: where it is defined
        fn = original(c.request.fn)
        target = fn.forward if isinstance(fn, torch.nn.Module) else fn
        code = getattr(plain_attribute(target, "__func__", target), "__code__", None)
        if code is None:
            return None
        filename, line = code.co_filename, code.co_firstlineno
        return filename, line, code.co_qualname, linecache.getline(filename, line)
    return file_and_line(location)


def holds_state(f: types.FunctionType, name: str, cell: types.CellType) -> bool:
    """Whether a variable of a library's closure is state: a container, a function, or one that the function sets."""
    held = cell_value(cell)
    if isinstance(held, (list, dict, set, deque, types.FunctionType)) or is_tracked(type(held)):
        return True
    return any(handler.__name__ == "STORE_DEREF" and n == name for handler, n in decode(f.__code__).program)
