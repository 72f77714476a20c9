"""Programs whose statements are text: prologues and epilogues."""

from __future__ import annotations

import types
from collections.abc import Callable

from thunder.core.codegen import Printer, Text, compile_source
from thunder.core.symbol import BoundSymbol, Names, Symbol
from thunder.core.trace import Trace, TraceInfo


def _print_text(statement: BoundSymbol, printer: Printer) -> list[str]:
    """The text that runs; to be read, `guards` in its place, which show values for names. One text for many facts has
    these as comments."""
    columns = statement.kwargs
    printer.context.update(columns["objects"])
    text, guards = columns["text"], columns.get("guards")
    if guards is None or printer.memory and not columns["many"]:
        return text
    return [*(f"# {line}" for line in guards()), *text] if printer.memory else [*guards()]


_SYMBOLS: dict[str, Symbol] = {}


def check_symbol(kind: str) -> Symbol:
    """The primitive of one kind of statement of a prologue or epilogue, whose text is given."""
    symbol = _SYMBOLS.get(kind)
    if symbol is None:
        symbol = _SYMBOLS[kind] = Symbol(kind, module="prims", is_prim=True, python_printer=_print_text)
    return symbol


def written(
    name: str,
    signature: str,
    statements: list[BoundSymbol],
    result: str | tuple[Text, ...],
    names: Names,
    objects: dict,
    code_of: Callable[[str], types.CodeType | None] = lambda source: None,
) -> tuple[Trace, Callable]:
    """A program whose statements are text: the trace that shows it, and the function. code_of: what a text was compiled
    to before, if it was."""
    output = result if isinstance(result, tuple) else Text(result)
    trace = Trace(name, (), statements, output, names, signature=signature, info=TraceInfo(objects=objects))
    if isinstance(result, tuple):
        result = Printer().value(result)
    body = [f"  {text}" for statement in statements for text in statement.kwargs["text"]]
    source = "\n".join([f"def {name}({signature}):", *body, f"  return {result}"])
    trace._callable = compile_source(source, name, objects, code_of(source))
    return trace, trace._callable
