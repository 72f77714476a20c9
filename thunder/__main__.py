"""`python -m thunder`: versions, devices, executors. `python -m thunder --help` lists the commands."""

from __future__ import annotations

import argparse
import enum
import inspect
import os
import platform
import re
import sys

import torch

import thunder
from thunder import options as declared
from thunder.capture.policy import describe
from thunder.command_line import add_commands, doctor
from thunder.compat.names import NEWEST, OLDEST, missing
from thunder.options import COMPILE_OPTIONS, ENVIRONMENT
from thunder.programs.commands import add_command


def versions() -> None:
    """Prints the versions, the devices, the executors, and the private names that this PyTorch lacks."""
    print(f"thunder {thunder.__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    names = ["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count()))]
    print(f"devices: {', '.join(names)}")
    for executor in thunder.get_all_executors():
        always, default = executor in thunder.get_always_executors(), executor in thunder.get_default_executors()
        kind = "always" if always else "default" if default else "on request"
        print(f"executor {executor.name} {executor.version or ''} ({kind})")
    lacks = missing()
    print(f"private names of PyTorch: {len(lacks) or 'none'} missing (tried on PyTorch {OLDEST} to {NEWEST})")
    for row in lacks:
        print(f"  {row.path}, for {row.needed_for}: {row.lost}")


def options() -> None:
    """Prints everything that can be set: keywords, compile options, debug options and environment variables."""
    thunder.get_all_executors()  # which declare options when they are imported
    print("thunder.jit(fn, ...), see help(thunder.jit)")
    for name, parameter in inspect.signature(thunder.jit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            print(f"  {name}: {_kinds(str(parameter.annotation))} = {parameter.default!r}")
    print("\ncompile options, keywords of thunder.jit as well")
    for name in sorted(COMPILE_OPTIONS):
        o = COMPILE_OPTIONS[name]
        valid = f"; valid: {o.valid}" if o.valid else ""
        print(f"  {name}: {o.kind_name} = {o.default!r}  {o.description} (of {o.owner}{valid})")
    print("\nthunder.DebugOptions(...)")
    for name, (kind, default, description) in thunder.DebugOptions._registered.items():
        print(f"  {name}: {kind.__name__} = {default!r}  {description}")
    print("\nthe environment")
    for o in ENVIRONMENT:
        print(f"  {o.name}: {o.kind.__name__} = {o.default!r}  {o.description}")


def passes() -> None:
    print(thunder.passes())


def _kinds(annotation: str) -> str:
    """An annotation with the valid values in the place of an enumeration's name."""

    def values(match: re.Match) -> str:
        kind: type[enum.Enum] = getattr(declared, match[1])
        return " | ".join(repr(member.value) for member in kind)

    return re.sub(r"(\w+_OPTIONS) \| str", values, annotation)


def main(arguments: list[str]) -> int:
    """Runs the command of `python -m thunder`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m thunder", description="Versions, devices and executors.")
    parser.set_defaults(command=lambda options: versions())
    commands = parser.add_subparsers(title="commands")
    for what, text in ((options, "everything that can be set"), (passes, "the list of passes")):
        commands.add_parser(what.__name__, help=text).set_defaults(command=lambda options, what=what: what())
    add_commands(commands)
    add_command(commands)
    decided = commands.add_parser("policy", help="how programs call a function: the row of the table that decides")
    decided.add_argument("name", help="as package.module.function; a method as package.module.object.method")
    decided.set_defaults(command=lambda options: print(describe(options.name)))
    commands.add_parser("doctor", help="check this machine").set_defaults(
        command=lambda options: versions() or doctor()
    )
    parsed = parser.parse_args(arguments)
    try:
        code = parsed.command(parsed) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # `options | head` has read what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


sys.exit(main(sys.argv[1:]))
