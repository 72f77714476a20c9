"""A rule that `make lint` and the tests check: the words of `docs/glossary.md`, in code, comments, messages and pages.

    python tests/words.py        # how often each word stands that the glossary replaces
    python tests/words.py -v     # and where
    python tests/words.py -q     # only what is refused

A row is the word to say, a pattern of those not to say, and where the pattern means something else. The rule fails where
one of these words comes back. Rows that are counted only have words with other meanings as well.

A name says what it holds: no variable, parameter, attribute, function or class in NAMED is called by one of PARTICIPLES.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PLACES = ("thunder", "docs", "README.md", "CONTRIBUTING.md")
OTHERS = ("thunder/tests/", "docs/glossary.md", "docs/performance.md", "docs/lab_log.md")


class Row(NamedTuple):
    """say: the glossary's word. instead_of: a pattern. except_in: beginnings of paths in which the pattern means
    something else. counted: it is no offence."""

    say: str
    instead_of: str
    except_in: tuple[str, ...] = ()
    counted: bool = False


_FIELDS = "sym|args|kwargs|inputs|outputs?|context|location|subsymbols|swap|replace|aliases|rhs"
# whose subject is text
_TEXT = ("thunder/interpreter/", "thunder/capture/", "thunder/core/codegen.py", "thunder/executors/triton_kernels/")
ROWS = (
    Row(
        "bound symbol, operation", rf"\blines?\.({_FIELDS})\b|\blines?: \w*\[?BoundSymbol|for lines? in [\w.]+bound_sym"
    ),
    Row("bound symbol, operation", r"\blines? (of|in) (the|a|its) (program|trace|region|forward|backward)\b"),
    Row(
        "capture", r"\bwhile (it|the program|a program) is read\b|\breading of (a|the) program|way of reading a program"
    ),
    Row("bound symbol, operation", r"(?<!user's )(?<!source )\b[Ll]ines?\b", _TEXT, counted=True),
    Row("alias, base, view inverse", r"\broots?\b|\bshown\b|\bshows\b", counted=True),
    Row("capture", r"\b[Rr]eading\b", counted=True),
    Row("decomposition, lowering", r"\bopened up\b|\bby (its|their) parts\b|\bby parts\b"),
    Row("rematerialization, recompute", r"\b(computed?s?|ma[dk]es?) again\b|\bown[ _]copies|\brereads?\b"),
    Row("alias, base, view inverse", r"\bwhat (it|they|a view|views) shows?\b|\balias_roots?\b"),
    Row("producer, consumer, use", r"\b_?makers?\b|\breaders?\b", except_in=("thunder/interpreter/",)),
    Row("functionalize, write back", r"\bputs? back\b|\bputting back\b"),
    Row("data-dependent, unbacked", r"\bdata decides\b|\bthe run tells\b"),
    Row(
        "fake tensor, example", r"\bstand[-_]?ins?\b|\bStandIn", except_in=("thunder/interpreter/", "thunder/capture/")
    ),
    Row("cache key, cache entry", r"\bentry[ _]keys?\b"),
    Row("automatic dynamic sizes", r"\bheld[ _]numbers\b"),
    Row("fused, unfused", r"\bruns?[ _]apart\b"),
    Row("materialize, expose", r"\b(spoken|leaks?|leaked|escapes|escaped|escaping)\b"),
    Row("dead code, live-in, live-out", r"\bnobody (reads|asks for)\b|\b[Ww]hat (comes in|goes out)\b"),
)


NAMED = ("thunder", "benchmarks", "tests")
PARTICIPLES = {"found", "made", "given", "kept", "asked"}
AS_NOUN = {"place"}  # a function may place something; no value is a place
PUBLIC = {("thunder/inspect/explain.py", "found")}  # a field of what thunder.explain returns


def names_in(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of what a file binds: variables, parameters, attributes, functions, classes."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, f"{node.name}()"


def unsaid_names() -> list[str]:
    """path:line: name of each name in NAMED that does not say what it holds."""
    places = []
    for file in sorted(file for folder in NAMED for file in (ROOT / folder).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        try:
            names = list(names_in(file.read_text(encoding="utf-8")))
        except SyntaxError:  # tests/interpreter/corpus has programs in the syntax of Pythons that may be newer
            continue
        for line, name in names:
            word = name.removesuffix("()").strip("_").lower()
            refused = word in PARTICIPLES or name.strip("_") in AS_NOUN
            if refused and (path, word) not in PUBLIC:
                places.append(f"{path}:{line}: {name}")
    return places


def places_in(text: str, row: Row) -> list[tuple[int, str]]:
    """(number, text) of each line with a row's pattern."""
    return [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if re.search(row.instead_of, line)]


def lines_with(row: Row) -> list[str]:
    """path:number: text of each line of the project with a row's pattern."""
    places = []
    for folder in PLACES:
        path = ROOT / folder
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(ROOT).as_posix()
            if file.suffix in (".py", ".md") and not name.startswith((*OTHERS, *row.except_in)):
                places += [f"{name}:{n}: {line}" for n, line in places_in(file.read_text(encoding="utf-8"), row)]
    return places


def offenders() -> list[str]:
    """What the rule refuses."""
    refusing = [row for row in ROWS if not row.counted]
    said = [f'{location}\n    say "{row.say}" (docs/glossary.md)' for row in refusing for location in lines_with(row)]
    return said + [f"{location}\n    say what it holds (docs/glossary.md)" for location in unsaid_names()]


if __name__ == "__main__":
    for row in ROWS:
        places = lines_with(row)
        if "-q" not in sys.argv or places and not row.counted:
            print(f"{len(places):5}  {row.say:32}  {row.instead_of}")
        if places and ("-v" in sys.argv or not row.counted):
            print(*(f"         {location[:150]}" for location in places), sep="\n")
    for name in unsaid_names():
        print(f"{name}: say what it holds")
    sys.exit(bool(offenders()))
