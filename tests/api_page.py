"""docs/api.md, the public names with their docstrings. A test says where it is not current.

python tests/api_page.py      # writes it
python tests/api_page.py -    # prints it
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import thunder
from thunder import distributed, errors, examine, extend, quantization, recipes
from thunder.core import dtypes

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
# names of these modules that are not for users
INTERNAL = {
    "noted", "noting", "is_noted", "warn_user", "user_line", "calling_line", "add_location", "section_of",
    "with_section", "did_you_mean", "names_from", "add_default_executor_of_gpus",
}  # fmt: skip
MODULES = (thunder, examine, extend, distributed, recipes, quantization, errors)
HEAD = """# API

The public names, grouped by task, with their docstrings. Each task begins with an example. Inherited methods are documented in the class that defines them. `python tests/api_page.py` writes this page.
"""


SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")


class Task(NamedTuple):
    """A section of the page. code: an example. prints: what it prints. names: of `thunder`."""

    title: str
    code: str
    prints: str
    names: str = ""


TASKS = (
    Task(
        "Compile",
        """
import torch
import thunder

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2))
compiled = thunder.jit(model)
x = torch.randn(4, 8)
torch.testing.assert_close(compiled(x), model(x))
print(thunder.cache_misses(compiled))
""",
        "1",
        "jit compile disable opaque mark_dynamic ThunderModule Recipe CACHE_OPTIONS FALLBACK_OPTIONS NUMERICS_OPTIONS "
        "RNG_OPTIONS SHARP_EDGES_OPTIONS",
    ),
    Task(
        "See what runs",
        """
print(thunder.last_traces(compiled)[-1].python().splitlines()[-2].strip())
print(thunder.explain(compiled, x))
""",
        """
t2 = torch.nn.functional.linear(t1, t_2_weight, t_2_bias)  # cpu f32[4, 2] | ...
one call took ... ms; all of it is a program on the device
""",
        "last_traces last_backward_traces last_prologue_traces last_epilogue_traces last_kernels last_paths explain "
        "profile profiler_ranges report Report compile_stats compile_data cache_hits cache_misses "
        "last_recompile_reasons last_compile_options last_sharp_edges last_interpreted_instructions "
        "last_interpreter_log print_last_interpreter_log",
    ),
    Task(
        "Find faults",
        """
print(thunder.verify(compiled, x).first)
print(thunder.debug(lambda x: (x / x.sum()).log(), torch.zeros(2)).first)
""",
        """
None
div makes 2 NaN numbers in the program, the first at (0,)
...
""",
        "debug debug_print verify minify opcheck DebugOptions",
    ),
    Task(
        "Export, and programs on disk",
        """
import tempfile

served = torch.export.load(thunder.export(model, f"{tempfile.mkdtemp()}/model.pt2", x)).module()
print(torch.allclose(served(x), model(x)))
""",
        "True",
        "export precompile load",
    ),
    Task(
        "Change programs",
        """
def plain(x):
    return x * torch.sigmoid(x)


def fused(x):
    return torch.nn.functional.silu(x)


changed = thunder.jit(plain, rules=[thunder.rule(plain, fused)])
changed(x)
print([b.sym.name for b in thunder.last_traces(changed)[-1].bound_symbols if "silu" in b.sym.name])
""",
        "['silu']",
        "rule Rule Transform add_transform list_transforms autocast Pass passes PassList trace Trace TraceCtx "
        "Proxy TensorProxy NumberProxy",
    ),
    Task(
        "Executors",
        """
print([executor.name for executor in thunder.resolve_executors(["cpp", "torch"])])
""",
        "['cpp', 'torch', 'python']",
        "resolve_executors get_executor get_all_executors get_default_executors get_always_executors "
        "add_default_executor get_auto_registered_torch_op_names",
    ),
)
EXAMPLES = {
    "thunder.examine": Task(
        "Inspect programs: thunder.examine",
        """
compiled(x).sum().backward()
print(thunder.examine.saved_for_backward(compiled)[0].operation)
""",
        "torch.nn.functional...",
    ),
    "thunder.extend": Task(
        "Write executors: thunder.extend",
        """
from thunder.extend import OperatorExecutor


def square(x):
    return x * x


executor = OperatorExecutor("squares", version="1")
executor.register_operator("square", like=square, fn=torch.square, replaces=square)
squares = thunder.jit(lambda x: square(x), executors=[executor])
print(torch.equal(squares(x), x * x))
""",
        "True",
    ),
    "thunder.distributed": Task(
        "Train on several processes: thunder.distributed",
        """
planned = thunder.distributed.plan(model, x, world_size=(8,))
print(planned)
""",
        "fsdp ZERO2 on H200, one rank; times are projected...",
    ),
    "thunder.recipes": Task(
        "Recipes: thunder.recipes",
        """
print(thunder.recipes.Training(memory_budget=0.5) + thunder.recipes.FP8())
""",
        "Training(memory_budget=0.5, rng='torch') + FP8(...",
    ),
    "thunder.quantization": Task(
        "Quantized weights: thunder.quantization",
        """
small = thunder.jit(torch.nn.Linear(256, 256), transforms=[thunder.quantization.Int8Weights()])
print(sum(t.nbytes for t in small.state_dict().values()) < 0.3 * 4 * 256 * 256)
""",
        "True",
    ),
    "thunder.errors": Task(
        "Errors and warnings: thunder.errors",
        """
try:
    thunder.jit(lambda x: x * x.untyped_storage().nbytes(), fallback="error")(x)
except thunder.errors.CaptureError as error:
    print(error.reason)
""",
        "untyped_storage reads the memory or the values of a tensor",
    ),
}


def escaped(line: str) -> str:
    """A line of a docstring as Markdown: outside of code, what would be markup is text."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if i % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def markdown(docstring: str) -> str:
    """A docstring as Markdown. Its sections ("Args:", "Raises:") are lists; other indented lines are code."""
    lines: list[str] = []
    in_section = False
    for line in docstring.split("\n"):
        if line in SECTIONS:
            in_section = True
            lines += [f"**{line[:-1]}**", ""]
        elif in_section and line.startswith("    "):
            name, colon, text = line.strip().partition(": ")
            is_item = line[4] != " " and colon and re.fullmatch(r"[\w, ]+", name)
            lines.append(f"- `{name}`: {escaped(text)}" if is_item else "  " * (line[4] == " ") + escaped(line.strip()))
        else:
            in_section = in_section and not line
            lines.append(line if line.startswith("    ") else escaped(line))
    return "\n".join(lines)


def signature(thing: object) -> str:
    if isinstance(thing, enum.EnumMeta):
        return ": " + ", ".join(repr(member.value) for member in thing)
    try:
        signature_text = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r" at 0x[0-9a-f]+", "", signature_text))


def documentation(thing: object) -> str:
    """An enumeration without a docstring shows Python's, which each version words anew."""
    docstring = inspect.getdoc(thing) or ""
    return "" if isinstance(thing, enum.EnumMeta) and docstring == inspect.getdoc(enum.Enum) else docstring


def section(module: str, name: str, thing: object) -> list[str]:
    lines = [f"### {module}.{name}", "", f"    {name}{signature(thing)}", ""]
    lines += [markdown(documentation(thing)), ""]
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            shown = method if isinstance(value, property) else f"{method}{signature(function)}"
            described = textwrap.indent(markdown(inspect.getdoc(function) or ""), "    ")
            lines += [f"`{shown}`", "", f":   {described.strip()}", ""]
    return lines


def example(task: Task) -> list[str]:
    code, prints = task.code.strip("\n"), task.prints.strip("\n")
    return [f"## {task.title}", "", "```python", code, "```", "", "```text", prints, "```", ""]


def text() -> str:
    lines, known = [HEAD], set()
    for module in MODULES:
        names = [
            n
            for n in getattr(module, "__all__", dir(module))
            if not n.startswith("_") and n not in INTERNAL and not isinstance(getattr(module, n), dtypes.dtype)
        ]
        things = {n: getattr(module, n) for n in names if callable(getattr(module, n))}
        things = {n: thing for n, thing in things.items() if id(thing) not in known and documentation(thing)}
        known |= set(map(id, things.values()))
        if module is thunder:
            tasks = {task: task.names.split() for task in TASKS}
            missing = things.keys() ^ {name for names in tasks.values() for name in names}
            assert not missing, (
                f"names of thunder that are in no task, or a task's that thunder does not have: {missing}"
            )
        else:
            tasks = {EXAMPLES[module.__name__]: sorted(things, key=str.lower)}
        for task, names in tasks.items():
            lines += example(task)
            for name in names:
                lines += section(module.__name__, name, things[name])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__" and sys.argv[1:] == ["-"]:
    print(text(), end="")
elif __name__ == "__main__":
    PAGE.write_text(text())
    print(PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE, file=sys.stderr)
