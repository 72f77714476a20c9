"""How a corpus program is written down.

    @program(3, 8)
    @program(-1, 0)
    def name(a, b): ...

runs `name(3, 8)` and `name(-1, 0)`. Arguments are rebuilt for every run by deepcopy; programs build what other state they
need. A program may print, return anything with a stable repr, or raise.
"""

from __future__ import annotations

PROGRAMS: list = []  # (function, arguments) in the order of definition


def program(*arguments):
    def register(function):
        PROGRAMS.append((function, arguments))
        return function

    return register
