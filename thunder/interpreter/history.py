"""The record of an interpretation: a short log that is always kept, a full one on request.

The short log is a bounded list of the code objects that were run. The full log has every instruction as a
`dis.Instruction`, every new line, call, return and opaque call.
"""

from __future__ import annotations

import dis
import linecache

SHORT_LOG_LENGTH = 10_000  # of the last code objects that were run, in order


class FullLog:
    """Every instruction and event, in order. `entries` holds (code, offset) pairs, strings and dicts."""

    def __init__(self):
        self.entries: list = []
        self.position = (None, None)

    def program(self, code, record):
        """The program of a code object with each handler wrapped in one that notes the instruction first."""
        if record.logged is None:
            record.logged = [(_logged, (handler, argument)) for handler, argument in record.program]
        return record.logged

    def step(self, frame):
        record, code = frame.record, frame.fn.__code__
        line = record.line(code, frame.ip)
        if (code, line) != self.position:
            self.position = code, line
            self.entries.append({"kind": "Line", "fn": frame.fn, "filename": code.co_filename, "position": line})
        self.entries.append((code, record.offsets[frame.ip]))

    def call(self, host, f):
        self.entries.append({"kind": "InterpreterCall", "fn": f, "depth": len(host.stack_of_frames)})

    def returned(self, host, f, value):
        self.entries.append({"kind": "InterpreterReturn", "fn": f, "rval": value, "depth": len(host.stack_of_frames)})

    def note(self, kind, f):
        """An event beside the interpreted frames: kind "Opaque" (ran natively) or "Lookaside" (ran by a handler)."""
        self.entries.append({"kind": kind, "fn": f})


def _logged(frame, stack, argument):
    frame.host.log.step(frame)
    handler, argument = argument
    return handler(frame, stack, argument)


def instructions_of(code):
    """{offset: dis.Instruction} of a code object."""
    return {instruction.offset: instruction for instruction in dis.get_instructions(code)}


def interpreted_instructions(host) -> list[dis.Instruction]:
    """The instructions that were interpreted: each one in order with a full log; without, those of the code objects
    that were run, in the order of the calls."""
    return [entry for entry in interpreter_log(host) if isinstance(entry, dis.Instruction)]


def interpreter_log(host) -> list[dis.Instruction | str | dict]:
    """The full log, or from the short one a call event and the instructions for each frame."""
    decoded: dict = {}

    def instructions(code):
        if id(code) not in decoded:
            decoded[id(code)] = instructions_of(code)
        return decoded[id(code)]

    if host.log is None:
        log: list = []
        for code in host.history:
            log.append({"kind": "InterpreterCall", "fn": code, "depth": 0})
            log += instructions(code).values()
        return log
    log, previous = [], None
    for entry in host.log.entries:
        if not isinstance(entry, tuple):
            log.append(entry)
        elif entry != previous:  # one instruction may have become several canonical ones
            code, offset = entry
            log.append(instructions(code)[offset])
        previous = entry
    return log


_COLORS = {
    "Line": "\033[36m",
    "InterpreterCall": "\033[32m",
    "InterpreterReturn": "\033[32m",
    "Opaque": "\033[33m",
    "Lookaside": "\033[33m",
}


def print_log(
    host, print_fn=print, *, use_colors=True, indent=True, max_depth=None, color_internals=False, print_source_code=True
) -> None:
    """Print the log, one event or instruction a line.

    print_fn is called with each line. use_colors: ANSI colours by the kind of event; color_internals: instructions as
    well. indent: by depth of the calls. max_depth: leave out what is deeper. print_source_code: show new source lines.
    """
    depth = 0
    for entry in interpreter_log(host):
        if isinstance(entry, dict) and entry["kind"] == "InterpreterCall":
            depth = entry["depth"] + 1
        if (max_depth is None or depth <= max_depth) and (text := _log_line(entry, print_source_code)) is not None:
            color = _COLORS.get(entry["kind"], "") if isinstance(entry, dict) else "\033[90m" if color_internals else ""
            text = f"{'  ' * depth if indent else ''}{text}"
            print_fn(f"{color}{text}\033[0m" if use_colors and color else text)
        if isinstance(entry, dict) and entry["kind"] == "InterpreterReturn":
            depth = entry["depth"]


def _log_line(entry, print_source_code: bool) -> str | None:
    """A line of the printed log; None for an entry that is not shown."""
    if isinstance(entry, dis.Instruction):
        return f"  {entry.opname} {entry.argrepr}".rstrip()
    if isinstance(entry, str):
        return entry
    kind, f = entry["kind"], entry["fn"]
    name = getattr(f, "__qualname__", None) or getattr(f, "co_qualname", repr(f))
    if kind == "Line":
        source = linecache.getline(entry["filename"], entry["position"] or 0).strip()
        return f"# {entry['filename']}:{entry['position']} {source}" if print_source_code else None
    if kind == "InterpreterCall":
        return f"call {name}"
    if kind == "InterpreterReturn":
        return f"return from {name}: {type(entry['rval']).__name__}"
    return f"{kind.lower()} {name}"
