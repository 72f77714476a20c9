"""Looking into a compiled program while it runs: `thunder.debug_print`, and `breakpoint()`.

Both are lines of the generated program, where the user's program has them.
"""

from __future__ import annotations

import sys
from typing import Any

from thunder.core.codegen import Printer
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, current_recorder, user_location


def debug_print(value: Any) -> Any:
    """Prints a value each time the program runs, with its name in the program and the user's line, and returns it.

    `y.register_hook(thunder.debug_print)` prints the gradient of `y` each time the backward runs. The backward of an
    `autograd.Function` may call `debug_print`, too.

    Args:
        value: A tensor, a number, or a nested structure of them.
    """
    if current_recorder() is not None:
        filename, line, _, _ = user_location() or ("unknown place", 0, "", "")
        _print_line(value, f"{filename}:{line}")
    else:
        frame = sys._getframe(1)
        _show(value, "value", f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return value


def _show(value: Any, name: str, where: str) -> None:
    print(f"{where}: {name} = {value}")


def _print_call(operation: BoundSymbol, printer: Printer) -> list[str]:
    value, where = operation.args
    name = printer.value(value)
    return [f"{printer.named('debug_print', _show)}({name}, {name!r}, {where!r})"]


_print_line = Symbol(
    "debug_print", lambda value, where: None, id="debug_print", is_prim=True, tags=(OpTags.DONT_DCE, OpTags.DETACHED),
    python_printer=_print_call
)  # fmt: skip

breakpoint_line = Symbol(
    "breakpoint", lambda: None, id="breakpoint", is_prim=True, tags=(OpTags.DONT_DCE,),
    python_printer=lambda line, printer: ["breakpoint()"]
)  # fmt: skip
