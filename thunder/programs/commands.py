"""`python -m thunder cache`: the programs on disk, and why one was or was not found.

python -m thunder cache ls
python -m thunder cache explain MODEL
python -m thunder cache diff PROGRAM PROGRAM
python -m thunder cache rm PROGRAM ... | --all | --unusable
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thunder.programs import files
from thunder.programs.keep import differences, machine, versions
from thunder.programs.text import Damaged


def add_command(commands: Any) -> None:
    """Adds `cache` to the commands of an ArgumentParser."""
    parser = commands.add_parser("cache", help="programs on disk: list, explain, compare, remove them")
    parser.set_defaults(command=lambda options: list_programs())
    below = parser.add_subparsers(title="commands")
    below.add_parser("ls", help="all programs").set_defaults(command=lambda options: list_programs())
    explain = below.add_parser("explain", help="why programs of a function are found here, or not")
    explain.add_argument("name", nargs="?", default="", help="part of the name of a function or of a file")
    explain.set_defaults(command=lambda options: explain_programs(options.name))
    diff = below.add_parser("diff", help="what differs between two programs")
    diff.add_argument("programs", nargs=2, help="parts of the names of files")
    diff.set_defaults(command=lambda options: compare(*options.programs))
    remove = below.add_parser("rm", help="remove programs")
    remove.add_argument("programs", nargs="*", help="parts of the names of files or functions")
    remove.add_argument("--all", action="store_true")
    remove.add_argument("--unusable", action="store_true", help="what is damaged, or was made for other versions")
    remove.set_defaults(command=lambda options: remove_programs(options.programs, options.all, options.unusable))


# ------------------------------------------------------------------------------------------------------- what there is


def programs_on_disk() -> list[tuple[Path, Mapping | None, str]]:
    """Each file, its document, and in words why there is none."""
    rows: list[tuple[Path, Mapping | None, str]] = []
    secret, directory = files.key_of_user(), files.directory()
    paths = [p for p in sorted(directory.glob("*")) if p.suffix in (files.SUFFIX, files.REFUSED)]
    for path in paths:
        try:
            if secret is None:
                raise Damaged("there is no key of this user's, or others may read it")
            document = files.read(path, secret)
            rows.append((path, document, f"not kept: {document['reason']}" if path.suffix == files.REFUSED else ""))
        except (Damaged, OSError, KeyError) as error:
            rows.append((path, None, f"not used: {error}"))
    return rows


def _function(document: Mapping | None) -> str:
    return document["metadata"].get("function", "?") if document is not None else "?"


def _short(path: Path) -> str:
    key, _, program = path.stem.partition("-")
    return f"{key[:8]}-{program[:8]}" if program else key[:8]


def _one(part: str) -> tuple[Path, Mapping]:
    rows = [(path, document) for path, document, _ in programs_on_disk() if document is not None and _is(path, part)]
    if len(rows) != 1:
        raise SystemExit(f"{len(rows)} programs have a name with {part!r}: `python -m thunder cache ls` lists all")
    return rows[0]


def _is(path: Path, part: str) -> bool:
    return _short(path).startswith(part) or path.name.startswith(part)


def list_programs() -> None:
    rows = programs_on_disk()
    print(f"{files.directory()}: {len(rows)} files, {sum(path.stat().st_size for path, *_ in rows) >> 10} KiB")
    for path, document, problem in rows:
        status = path.stat()
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        what = problem or _shape(document)
        print(f"{_short(path):19}{status.st_size >> 10:6} KiB  {day}  {_function(document)}  {what}")


def _shape(document: Mapping | None) -> str:
    if document is None or "questions" not in document:
        return ""
    questions, backward = document["questions"], ", a backward" if document["backward"] else ""
    operations = sum(" = " in line for line in document["computation"]["text"].split("\n"))
    return f"{operations} operations{backward}, {len(questions['asked'])} questions, {len(questions['inputs'])} inputs"


def explain_programs(part: str) -> None:
    """For each program: whether a process like this one looks at it, and what it then asks."""
    rows = [row for row in programs_on_disk() if part in _function(row[1]) or _is(row[0], part)]
    if not rows:
        print(f"no program of {part or 'anything'} is in {files.directory()}: {_NONE}")
    here = {"versions": dict(versions(False)), "machine": dict(machine())}
    for path, document, problem in rows:
        print(f"{_short(path)}  {_function(document)}")
        if document is None or problem:
            print(f"  {problem}")
            continue
        was = {name: document["metadata"].get(name) for name in here}
        others = differences(was, here)
        for text in others:
            print(f"  not looked at by this process: {text}")
        if not others:
            print("  looked at by this process, where options and modes are the same:")
            print(f"    options: {_options(document['metadata']['options'])}")
            print(f"    modes: {document['metadata']['modes']}")
        print(f"  found where the answers to its questions are the same: {_shape(document)}")
        print("    thunder.compile_stats(compiled).not_loaded says which answer was another one")


_NONE = "keep_programs=True of thunder.jit, or THUNDER_KEEP_PROGRAMS=1, keeps them"


def _options(said: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in said.items() if value not in ("False", "None", "[]"))


def compare(first: str, second: str) -> None:
    """What differs in what two programs were made for, in what they ask, and in their text."""
    (one, a), (other, b) = _one(first), _one(second)
    print(f"{_short(one)} and {_short(other)}")
    for text in differences(a["metadata"], b["metadata"]):
        print(f"  {text}")
    for name, lines in (("questions", _guards), ("prologue", _text("prologue")), ("computation", _text("computation"))):
        changed = list(difflib.unified_diff(lines(a), lines(b), _short(one), _short(other), lineterm="", n=0))
        print(f"{name}: {'the same' if not changed else ''}")
        for line in changed:
            print(f"  {line}")


def _guards(document: Mapping) -> list[str]:
    """The questions of a program, a line each."""
    said = document.get("questions", {"sources": [], "asked": [], "tensors": []})
    names: list[str] = []
    for base, _, key, *label in said["sources"]:
        text = key if isinstance(key, str) else json.dumps(key)
        names.append((label or [text])[0] if base is None else f"{names[base]}.{text}")
    rows = [f"{names[i]}: {question} {json.dumps(want)}" for i, question, want, *_ in said["asked"]]
    return rows + [f"{names[i]}: tensor {json.dumps(want)}" for i, want in said["tensors"]]


def _text(name: str):
    def lines(document: Mapping) -> list[str]:
        text: Any = document.get(name) or ""
        return (text["text"] if isinstance(text, dict) else text).split("\n")

    return lines


def remove_programs(parts: list[str], everything: bool, unusable: bool) -> None:
    """`python -m thunder cache --remove`: deletes the programs of some names, those of other versions, or all."""
    if not (parts or everything or unusable):
        raise SystemExit("say which: parts of names, --unusable or --all")
    here = {"versions": dict(versions(False)), "machine": dict(machine())}
    count = 0
    for path, document, _ in programs_on_disk():
        named = any(_is(path, part) or part in _function(document) for part in parts)
        was = {} if document is None else {name: document["metadata"].get(name) for name in here}
        if everything or named or unusable and (document is None or differences(was, here)):
            path.unlink(missing_ok=True)
            count += 1
    print(f"removed {count} files from {files.directory()}")
