"""Code object -> canonical program, once per code object.

    before (3.11)                     after
    LOAD_GLOBAL  1 (NULL + f)         (LOAD_GLOBAL_CALLABLE, "f")
    LOAD_FAST    0 (x)                (LOAD_FAST, "x")
    PRECALL 1; CALL 1                 (CALL, 1)
    RETURN_VALUE                      (RETURN_VALUE, None)

`dis` is not used: reading the bytes directly is several times faster, and decoding is part of the time to start.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os
import types
import weakref
from typing import NamedTuple

from thunder.interpreter import building, exception_groups, instructions
from thunder.interpreter.errors import UnsupportedError
from thunder.interpreter.tables import JUMPS, JUMPS_FROM_CACHES, LOOP_END, TABLE, VERSION, VERSIONS, Raw, always

OPNAME, EXTENDED_ARG, NOP = dis.opname, dis.opmap["EXTENDED_ARG"], dis.opmap["NOP"]
SEND, LOAD_FAST_AND_CLEAR = (dis.opmap.get(name, -1) for name in ("SEND", "LOAD_FAST_AND_CLEAR"))
HANDLERS = {
    name: function
    for module in (instructions, building, exception_groups)
    for name, function in vars(module).items()
    if name.isupper() and isinstance(function, types.FunctionType)
}
CO_VARARGS, CO_VARKEYWORDS, CO_GENERATOR = 4, 8, 0x20


_AWAITED = 0x80 | 0x100 | 0x200  # CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR
COROUTINE = "code that is awaited"


class Handler(NamedTuple):
    """Where an exception raised by an instruction goes: one row of the exception table."""

    target: int
    depth: int
    keeps_instruction: bool


class Record:
    """A decoded code object. It refers to the code weakly, so that generated code can be freed."""

    __slots__ = (
        "program", "handlers", "offsets", "reference", "stub", "logged", "line_of",
        "arguments", "argument_count", "binders", "catches", "simple", "is_generator", "starts", "handled",
        "foreign",
    )  # fmt: skip

    def __init__(self, code, program, handlers, offsets):
        self.program, self.handlers, self.offsets = program, handlers, offsets
        self.reference = weakref.ref(code, lambda _, key=id(code): _records.pop(key, None))
        self.stub = self.logged = self.line_of = None
        flags = code.co_flags
        self.argument_count, self.arguments = code.co_argcount, code.co_varnames[: code.co_argcount]
        self.binders: dict[tuple, types.FunctionType] = {}  # by the number of defaults, and the names that have some
        self.catches, self.handled = any(handlers), {}
        # A call with exactly the positional arguments needs no binding.
        self.simple = not (flags & (CO_VARARGS | CO_VARKEYWORDS) or code.co_kwonlyargcount)
        unknown = (name for handler, name in program if handler is instructions.UNSUPPORTED)
        self.foreign = COROUTINE if flags & _AWAITED else next(unknown, None)  # what of it is not interpreted
        self.is_generator = bool(flags & CO_GENERATOR)
        self.starts = self.is_generator and any(
            handler is instructions.RETURN_STARTED_GENERATOR for handler, _ in program
        )

    def line(self, code, index):
        """The line of a canonical instruction; None where the compiler gave none. Computed when first asked for."""
        if self.line_of is None:
            self.line_of = {}
            for start, stop, line in code.co_lines():
                self.line_of.update(dict.fromkeys(range(start, stop, 2), line))
        return self.line_of.get(self.offsets[index])

    def handles(self, index):
        """Whether an exception of a canonical instruction may end in this frame, other than by leaving a `with`: not
        where its handlers (`finally`, `except ...: raise`) only raise it again. Computed when first asked for."""
        if index not in self.handled:
            self.handled[index] = self.handlers[index] is not None and self._ends(self.handlers[index].target)
        return self.handled[index]

    def _ends(self, start):
        """Whether an exception that a handler at `start` gets may end in this frame."""
        program, following, seen = self.program, [start], set()
        while following:
            index = following.pop()
            if index in seen:
                continue
            seen.add(index)
            handler, argument = program[index]
            name = handler.__name__
            if name == "RERAISE" or (name, argument) == ("RAISE_VARARGS", 0):
                if self.handlers[index] is not None:
                    following.append(self.handlers[index].target)
                continue
            pops = name == "POP_EXCEPT" and program[index + 1][0].__name__ != "RERAISE"
            if pops or name in ("RETURN_VALUE", "RAISE_VARARGS"):
                return True
            leaves_with = any(h.__name__ == "WITH_EXCEPT_START" for h, _ in program[index - 2 : index])
            if name in JUMPS and not leaves_with:
                following.append(argument)
            if name != "JUMP":
                following.append(index + 1)
        return False


_records: dict[int, Record] = {}


def decode(code: types.CodeType) -> Record:
    """The record of a code object, made at the first call."""
    record = _records.get(id(code))
    if record is None:
        if VERSION not in VERSIONS:
            running, *_, oldest, newest = (
                ".".join(map(str, version)) for version in (VERSION, min(VERSIONS), max(VERSIONS))
            )
            reason = f"the bytecode of Python {oldest} to {newest} is known"
            raise UnsupportedError(f"Python {running}", reason, code.co_filename, code.co_firstlineno, code.co_qualname)
        record = _records[id(code)] = _decode(code)
    return record


def _raw_instructions(code):
    """[(offset, opcode, argument with its extensions)], without inline caches."""
    raw, code_bytes, extension = [], code.co_code, 0
    for offset, opcode, argument in zip(range(0, len(code_bytes), 2), code_bytes[::2], code_bytes[1::2], strict=True):
        if opcode == 0:  # CACHE
            continue
        if opcode == EXTENDED_ARG:
            extension = (argument | extension) << 8
            raw.append((offset, NOP, 0))
            continue
        raw.append((offset, opcode, argument | extension))
        extension = 0
    return raw


_INSTRUCTIONS = {name: (handler, name if name in JUMPS else None) for name, handler in HANDLERS.items()}


@functools.lru_cache(maxsize=1000)  # some rows are made for each instruction
def _with_handlers(row):
    """A row of a table with (handler, name of a jump or None, resolver) for each canonical instruction."""
    return tuple((*_INSTRUCTIONS[name], resolve) for name, resolve in row)


def row_of(opname):
    row = TABLE.get(opname, (("UNSUPPORTED", always(opname)),))  # an unknown opcode fails when it is reached, not here
    return _with_handlers(row) if type(row) is tuple else row


ROWS = [row_of(opname) for opname in OPNAME]


def _decode(code):
    """The record of a code object: canonical instructions, the same for all versions of Python."""
    raw_instructions = _raw_instructions(code)
    raw, program, offsets, index, jumps, cleared = Raw(code), [], [], {}, [], set()
    add, add_offset = program.append, offsets.append
    raw_instructions.append((len(code.co_code), NOP, 0))  # a last one, so that each has one that follows
    for k, (offset, opcode, argument) in enumerate(raw_instructions[:-1]):
        index[offset] = len(program)
        row = ROWS[opcode]
        if row == ():
            continue
        raw.arg = argument
        raw.after = raw_instructions[k + 1][0] if JUMPS_FROM_CACHES else offset + 2
        if type(row) is not tuple:
            row = _with_handlers(row(raw))
        for handler, jump, resolve in row:
            if jump is not None:
                jumps.append((len(program), jump))
            add((handler, resolve(raw)))
            add_offset(offset)
        if opcode == SEND:
            raw.previous_jump = raw.after + 2 * argument
        elif opcode == LOAD_FAST_AND_CLEAR:
            cleared.add(raw.variables[argument])
        raw.previous = OPNAME[opcode]
    index[len(code.co_code)] = len(program)
    _resolve_jumps(program, jumps, index, _loop_exits(raw_instructions, index) if LOOP_END else index)
    if cleared:
        store, restore = HANDLERS["STORE_FAST"], HANDLERS["RESTORE_FAST"]
        program = [(restore, a) if h is store and a in cleared else (h, a) for h, a in program]
    return Record(code, program, _handlers(code, index, len(program)), offsets)


def _resolve_jumps(program, jumps, index, loop_exit):
    """Turn the byte offsets of jumps into indices."""
    for k, canonical in jumps:
        handler, offset = program[k]
        program[k] = handler, (loop_exit if canonical == "FOR_ITER" else index)[offset]


def _loop_exits(raw_instructions, index):
    """Offset of a loop's end -> index behind the instructions that drop the iterator."""
    exits, length = {}, len(LOOP_END)
    opnames = [OPNAME[opcode] for _, opcode, _ in raw_instructions]
    for k, (offset, opcode, _) in enumerate(raw_instructions):
        if OPNAME[opcode] == LOOP_END[0] and tuple(opnames[k : k + length]) == LOOP_END:
            exits[offset] = index[raw_instructions[k + length][0]]
    return exits


def _handlers(code, index, length):
    """The exception handler of each canonical instruction, or None."""
    handlers = [None] * length
    for entry in _exception_table(code.co_exceptiontable):
        start, stop, target, depth, keeps_instruction = entry
        handler = Handler(index[target], depth, keeps_instruction)
        for k in range(index[start], index[stop]):
            handlers[k] = handler
    return handlers


def _exception_table(table):
    """Entries (start, stop, target, depth, lasti) of co_exceptiontable; format:
    Objects/exception_handling_notes.txt."""
    position = 0

    def number():
        nonlocal position
        byte = table[position]
        value = byte & 63
        while byte & 64:
            position += 1
            byte = table[position]
            value = value << 6 | byte & 63
        position += 1
        return value

    while position < len(table):
        start = number() * 2
        stop = start + number() * 2
        target = number() * 2
        depth_and_lasti = number()
        yield start, stop, target, depth_and_lasti >> 1, bool(depth_and_lasti & 1)


# ---------------------------------------------------------------- locations


class Location(NamedTuple):
    """The user's line that an operation comes from. module: the path of the innermost module that runs, or None.
    ranges: the names of the profiler's ranges around it, outermost first."""

    code: types.CodeType
    instruction: int
    module: str | None
    ranges: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """`model.py:41, layers.0.mlp`: file, line and module."""
        filename, line, *_ = format_location(self)
        return f"{os.path.basename(filename)}:{line}" + (f", {self.module}" if self.module else "")


def format_location(location):
    """(file name, line, (column, end column), source line, qualified name) of a location: (code, instruction index),
    and whatever a host adds."""
    if location is None:
        return "?", 0, (None, None), "", "?"
    code, ip = location[:2]
    record = decode(code)
    line = record.line(code, ip) or code.co_firstlineno
    positions = list(code.co_positions())[record.offsets[ip] // 2]
    source = linecache.getline(code.co_filename, line).rstrip("\n")
    return code.co_filename, line, (positions[2], positions[3]), source, code.co_qualname
