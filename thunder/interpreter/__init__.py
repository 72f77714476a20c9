"""A CPython bytecode interpreter in Python, without torch.

    host = Host()
    host.interpret(f, args, kwargs)       # the result of f(*args, **kwargs)
    host.instructions, host.frames        # counts of both

The files in the order of the flow: `tables` (opcodes of each Python version -> canonical instructions), `decode` (code
object -> program), `instructions` and `building` (the canonical instructions), `machine` (runs a
frame), `host` (the way to the outside: subclass it), `attributes`, `operators`, `sequences`, `text`, `construction`
and `standins` (CPython's protocols), `recursion`, `binding`, `matching`, `builtin_calls`, `tracebacks`, `history`.
"""

from thunder.interpreter.decode import Location as Location
from thunder.interpreter.decode import decode as decode
from thunder.interpreter.decode import format_location as format_location
from thunder.interpreter.errors import UnsupportedError as UnsupportedError
from thunder.interpreter.history import interpreted_instructions as interpreted_instructions
from thunder.interpreter.history import interpreter_log as interpreter_log
from thunder.interpreter.history import print_log as print_log
from thunder.interpreter.host import Host as Host
from thunder.interpreter.instructions import NULL as NULL
from thunder.interpreter.machine import Frame as Frame
from thunder.interpreter.tracebacks import hide as hide
from thunder.interpreter.tracebacks import release as release
