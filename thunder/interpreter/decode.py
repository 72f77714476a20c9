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
import types
import weakref
from typing import NamedTuple

from thunder.interpreter import control, instructions
from thunder.interpreter.tables import JUMPS, JUMPS_FROM_CACHES, LOOP_END, TABLE, Raw

OPNAME, EXTENDED_ARG = dis.opname, dis.opmap["EXTENDED_ARG"]
HANDLERS = {
    name: function
    for module in (instructions, control)
    for name, function in vars(module).items()
    if name.isupper() and isinstance(function, types.FunctionType)
}
CO_VARARGS, CO_VARKEYWORDS, CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR = 4, 8, 0x20, 0x80, 0x200


class Handler(NamedTuple):
    """Where an exception raised by an instruction goes: one row of the exception table."""

    target: int
    depth: int
    keeps_instruction: bool


class Record:
    """What is known of one code object. It refers to the code weakly, so that generated code can be freed."""

    __slots__ = (
        "program", "handlers", "offsets", "lines", "reference", "stub", "logged",
        "name", "arguments", "argument_count", "simple", "kind",
    )  # fmt: skip

    def __init__(self, code, program, handlers, offsets, lines):
        self.program, self.handlers, self.offsets, self.lines = program, handlers, offsets, lines
        self.reference = weakref.ref(code, lambda _, key=id(code): _records.pop(key, None))
        self.stub = self.logged = None
        flags = code.co_flags
        self.name = code.co_name
        self.argument_count = code.co_argcount
        self.arguments = code.co_varnames[: code.co_argcount]
        # A call with exactly the positional arguments needs no binding.
        self.simple = not code.co_kwonlyargcount and not flags & (CO_VARARGS | CO_VARKEYWORDS)
        self.kind = flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)


_records: dict[int, Record] = {}


def decode(code: types.CodeType) -> Record:
    """The record of a code object, made at the first call."""
    record = _records.get(id(code))
    if record is None:
        record = _records[id(code)] = _decode(code)
    return record


def _raw_instructions(code):
    """[(offset, opname, argument with its extensions)], without inline caches."""
    raw, code_bytes, extension = [], code.co_code, 0
    for offset in range(0, len(code_bytes), 2):
        opcode = code_bytes[offset]
        if opcode == 0:  # CACHE
            continue
        argument = code_bytes[offset + 1] | extension
        if opcode == EXTENDED_ARG:
            extension = argument << 8
            raw.append((offset, "NOP", 0))
            continue
        extension = 0
        raw.append((offset, OPNAME[opcode], argument))
    return raw


def _decode(code):
    raw_instructions = _raw_instructions(code)
    end = len(code.co_code)
    raw, out, offsets, index = Raw(code), [], [], {}
    cleared = set()
    for k, (offset, opname, argument) in enumerate(raw_instructions):
        following = raw_instructions[k + 1][0] if k + 1 < len(raw_instructions) else end
        raw.opname, raw.arg, raw.offset = opname, argument, offset
        raw.after = following if JUMPS_FROM_CACHES else offset + 2
        index[offset] = len(out)
        row = TABLE.get(opname)
        if row is None:  # an unknown opcode fails when it is reached, not here
            row = (("UNSUPPORTED", lambda raw: raw.opname),)
        elif not isinstance(row, tuple):
            row = row(raw)
        for canonical, resolve in row:
            out.append((canonical, resolve(raw)))
            offsets.append(offset)
        if opname == "SEND":
            raw.previous_jump = raw.after + 2 * argument
        elif opname == "LOAD_FAST_AND_CLEAR":
            cleared.add(raw.variables[argument])
        if opname not in ("NOP", "PRECALL"):
            raw.previous = opname
    index[end] = len(out)
    loop_exit = _loop_exits(raw_instructions, index) if LOOP_END else index
    program = []
    for canonical, argument in out:
        if canonical in JUMPS:
            argument = (loop_exit if canonical == "FOR_ITER" else index)[argument]
        elif canonical == "STORE_FAST" and argument in cleared:
            canonical = "RESTORE_FAST"
        program.append((HANDLERS[canonical], argument))
    return Record(code, program, _handlers(code, index, len(program)), offsets, _lines(code, offsets))


def _loop_exits(raw_instructions, index):
    """Offset of a loop's end -> index of what follows the instructions that drop the iterator."""
    exits, length = {}, len(LOOP_END)
    opnames = [opname for _, opname, _ in raw_instructions]
    for k, (offset, opname, _) in enumerate(raw_instructions):
        if opname == LOOP_END[0] and tuple(opnames[k : k + length]) == LOOP_END:
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
    """Entries (start, stop, target, depth, lasti) of co_exceptiontable; format: Objects/exception_handling_notes.txt."""
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


def _lines(code, offsets):
    """The line of each canonical instruction, or None where the compiler gave none."""
    by_offset = {}
    for start, stop, line in code.co_lines():
        for offset in range(start, stop, 2):
            by_offset[offset] = line
    return [by_offset.get(offset) for offset in offsets]
