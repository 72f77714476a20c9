"""Tracebacks of interpreted frames: they show the user's functions and lines, and none of the machine's own frames.

A traceback entry needs a real frame object. It is made by running a stub: a code object with the user's file name,
function name and line table, that returns its own frame. Carets in printed tracebacks work, because the entry keeps the
user's instruction offset.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import os
import sys
import types

_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
# Files whose frames are left out of tracebacks. A subclass of Host in another file adds its own with `hide`.
HIDDEN = {os.path.join(_DIRECTORY, name) for name in os.listdir(_DIRECTORY) if name.endswith(".py")}
HIDDEN.add(__file__)
_GET_FRAME = "<frame>"  # no identifier: it cannot clash with the user's names
_NOTHING = bytes((dis.opmap["NOP"], 0))
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # clearing would close them
_STUB = compile("f()", "<stub>", "eval").replace(co_names=(_GET_FRAME,))


def hide(filename: str) -> None:
    """Leave frames of this file out of the tracebacks of interpreted programs."""
    HIDDEN.add(filename)


def stub_frame(code, stub, global_names, local_names):
    """A real frame object that looks like a frame of `code`. Returns the frame and the stub, to be kept for next
    time."""
    if stub is None:
        missing = len(code.co_code) - len(_STUB.co_code)
        stub = _STUB.replace(
            # a line table longer than its code makes CPython write out of bounds when somebody traces
            co_code=_STUB.co_code + _NOTHING * (missing // 2),
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_qualname=code.co_qualname,
            co_firstlineno=code.co_firstlineno,
            co_linetable=code.co_linetable,
        )
    if "__builtins__" not in global_names:  # eval would put it into the user's dict
        global_names = {**global_names, "__builtins__": builtins}
    local_names[_GET_FRAME] = sys._getframe
    try:
        return _evaluated(stub, global_names, local_names), stub
    finally:
        del local_names[_GET_FRAME]


def _evaluations():
    """Evaluate stubs. A frame that outlives its call keeps the frames behind it, so that those of the machine, which
    hold the exception, would make a cycle of it: behind a stub there is this frame only, which holds nothing.
    """
    while True:
        box = yield
        box[0] = eval(*box[0])
        del box


def _evaluated(*values):
    """The result of `eval`, in a generator that is used again: see `_evaluations`."""
    try:
        evaluations = _idle.pop()
    except IndexError:
        evaluations = _evaluations()
        next(evaluations)
    box: list = [values]
    evaluations.send(box)
    # not one that has failed; where a finalizer or a thread comes in between there is another
    _idle.append(evaluations)
    return box[0]


_idle: list = []


def entry(frame, following):
    """A traceback entry for an interpreted frame at its current instruction."""
    record, code, ip = frame.record, frame.fn.__code__, frame.ip
    real, record.stub = stub_frame(code, record.stub, frame.fn.__globals__, frame.locals)
    return types.TracebackType(following, real, record.offsets[ip], record.line(code, ip) or code.co_firstlineno)


def is_interpreted(traceback) -> bool:
    """Whether a traceback without the machine's frames begins in an interpreted one."""
    return traceback is not None and traceback.tb_frame.f_code.co_names == _STUB.co_names


def clean(traceback):
    """The traceback without the machine's frames.

    The part behind a stub was cleaned when the stub's entry was made, so the walk ends there and the cost of an
    exception stays linear in the depth of the stack.
    """
    while traceback is not None and traceback.tb_frame.f_code.co_filename in HIDDEN:
        traceback = traceback.tb_next
    entries, dirty, rest = [], False, traceback
    while rest is not None and not is_interpreted(rest):
        if rest.tb_frame.f_code.co_filename in HIDDEN:
            dirty = True
        else:
            entries.append(rest)
        rest = rest.tb_next
    if not dirty:
        return traceback
    for native in reversed(entries):
        rest = types.TracebackType(rest, native.tb_frame, native.tb_lasti, native.tb_lineno)
    return rest


def swallow(error):
    """Drop the traceback of an exception that the machine handles in the place of native code, which gives it none: it
    would lead back to the exception, and keep all that the program was called with until the garbage collector runs."""
    error.__traceback__ = None


def release(error):
    """Empty the machine's frames that an exception leads to, where they have ended.

    A traceback holds its frames, each frame its caller, and several have the exception in a variable: they would hold
    each other, and all that the program was called with, until the garbage collector runs.
    """
    errors, seen = [error], set()
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        errors += error.__context__, error.__cause__
        traceback = error.__traceback__
        while traceback is not None:
            _release_frames(traceback.tb_frame, seen)
            traceback = traceback.tb_next


def _release_frames(frame, seen):
    while frame is not None and id(frame) not in seen:
        seen.add(id(frame))
        caller, code = frame.f_back, frame.f_code
        if code.co_names != _STUB.co_names and not code.co_flags & _SUSPENDS:
            try:
                frame.clear()
            except RuntimeError:  # it runs
                return
        frame = caller
