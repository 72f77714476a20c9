"""CPython's recursion limit, and its memory for frames, while programs are interpreted.

One interpreted call takes several native Python frames (none of them on the C stack), so the machine counts the
interpreted frames itself and raises CPython's limit as the program goes deeper, only by the need of the next `ROOM`
frames. It lowers the limit on the way back: native code that recurses without end must meet one that the C stack can
bear. The limit belongs to all threads, so the largest need of any host holds.
"""

from __future__ import annotations

import sys
import threading
import traceback

ROOM = 64  # interpreted frames between two changes of the limit
FIRST_ROOM = 40  # interpreted frames that need no change: a model's forward rarely goes deeper

_lock = threading.Lock()
_needs: dict[int, int] = {}
_original = _ours = sys.getrecursionlimit()  # the user's limit, and the last one that was set here
_SLOTS = 1 << 17


def with_frames(function):
    """Gives the calls inside of a function memory for their frames at once.

    CPython has frames in chunks of 16 KiB. A call at the end of one maps another and unmaps it when it returns, and a
    loop at such a depth does so each time: 3000 times in the first call of a Llama of 8 layers, a fifth of its time. A
    chunk is the next power of two that a frame fits in. So a frame that asks for slightly more than 1 MiB, and never
    touches it, leaves as much to those behind it.
    """
    function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
    return function


def original_limit() -> int:
    """The limit that programs see."""
    now = sys.getrecursionlimit()
    return _original if _needs and now == _ours else now


def set_original_limit(limit: int) -> None:
    """An interpreted program called sys.setrecursionlimit."""
    with _lock:
        _set(limit)


def _set(original: int) -> None:
    """Sets the limit to what the user and all hosts need."""
    global _original, _ours
    _original, _ours = original, max([original, *_needs.values()])
    sys.setrecursionlimit(_ours)


def _require(host, limit):
    """Note the limit that a host needs, None for none; return the one before. What others have set meanwhile, in
    another thread or in native code, is the user's."""
    with _lock:
        original = original_limit()
        before = _needs.pop(id(host), None)
        if limit is not None:
            _needs[id(host)] = limit
        _set(original)
        return before


def _native_depth():
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def is_own(error: RecursionError) -> bool:
    """Whether functions of thunder's own have called themselves too often: the program is not to handle that."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-_OWN:]
    modules = [frame.f_globals.get("__name__") or "" for frame in last]
    return len(last) == _OWN and all(name.startswith("thunder.") for name in modules)


_OWN = 60  # calls inside of each other that capture makes nowhere without one of the program's between them


def run_deeper(frame, sent, thrown):
    """Frame.run where the room that was made is used up."""
    host = frame.host
    depth, limit, room = len(host.stack_of_frames), host.recursion_limit, host.stack_room
    if depth >= limit:
        raise RecursionError("maximum recursion depth exceeded")
    # Native code keeps the depth that CPython would have left for it.
    need = _native_depth() + max(limit - depth, 0) + ROOM * host.native_frames_per_call
    before = _require(host, need)
    host.stack_room = min(depth + ROOM, limit)
    try:
        return frame.run(sent, thrown)
    finally:
        host.stack_room = room
        _require(host, before)
