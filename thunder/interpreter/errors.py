"""Errors of the interpreter itself, as opposed to exceptions of the interpreted program."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """The interpreter met a construct that it cannot run.

    It passes through the interpreted program without being caught by it. `construct` names the opcode or language
    construct, `filename` and `line` say where it stands, `reason` says why it cannot be run.
    """

    def __init__(self, construct: str, reason: str, filename: str = "?", line: int = 0, function: str = "?"):
        super().__init__(f"{construct} is not supported: {reason}\n{filename}:{line} in {function}")
        self.construct, self.reason = construct, reason
        self.filename, self.line, self.function = filename, line, function
