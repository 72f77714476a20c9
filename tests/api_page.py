"""docs/api.md, the public names with their docstrings. A test says where it is not current.

python tests/api_page.py      # writes it
python tests/api_page.py -    # prints it
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from pathlib import Path

import thunder
from thunder import distributed, errors, examine, extend, quantization, recipes
from thunder.core import dtypes

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
MODULES = (thunder, examine, extend, distributed, recipes, quantization, errors)
HEAD = """# API

Every public name with its docstring. `python tests/api_page.py` writes this page. A method that a class has from another one stands there.
"""


def escaped(text: str) -> str:
    """A docstring as Markdown: outside of code, what would be markup is text."""
    lines = []
    for line in text.split("\n"):
        parts = re.split(r"(`[^`]*`)", line)
        plain = [part if i % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for i, part in enumerate(parts)]
        lines.append(line if line.startswith("    ") else "".join(plain))
    return "\n".join(lines)


def signature(thing: object) -> str:
    if isinstance(thing, enum.EnumMeta):
        return ": " + ", ".join(repr(member.value) for member in thing)
    try:
        found = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r" at 0x[0-9a-f]+", "", found))


def documentation(thing: object) -> str:
    """An enumeration without a docstring shows Python's, which each version words anew."""
    found = inspect.getdoc(thing) or ""
    return "" if isinstance(thing, enum.EnumMeta) and found == inspect.getdoc(enum.Enum) else found


def section(module: str, name: str, thing: object) -> list[str]:
    lines = [f"### {module}.{name}", "", f"    {name}{signature(thing)}", ""]
    lines += [escaped(documentation(thing)), ""]
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            shown = method if isinstance(value, property) else f"{method}{signature(function)}"
            lines += [f"`{shown}`", "", f":   {escaped(inspect.getdoc(function) or '').split(chr(10) * 2)[0]}", ""]
    return lines


def text() -> str:
    lines, known = [HEAD], set()
    for module in MODULES:
        names = [
            n
            for n in getattr(module, "__all__", dir(module))
            if not n.startswith("_") and not isinstance(getattr(module, n), dtypes.dtype)
        ]
        things = {n: getattr(module, n) for n in names if callable(getattr(module, n))}
        things = {n: thing for n, thing in things.items() if id(thing) not in known and documentation(thing)}
        known |= set(map(id, things.values()))
        first = (module.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines += [f"## {module.__name__}", "", escaped(first), ""]
        for name in sorted(things, key=str.lower):
            lines += section(module.__name__, name, things[name])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__" and sys.argv[1:] == ["-"]:
    print(text(), end="")
elif __name__ == "__main__":
    PAGE.write_text(text())
    print(PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE, file=sys.stderr)
