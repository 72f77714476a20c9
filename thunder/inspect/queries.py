"""Questions to ask of a compiled function: what ran, how often, why it was compiled again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from thunder.cache.entry import CacheEntry
from thunder.cache.history import CompileStats, Traces
from thunder.compiled import Compiled, compiled_of
from thunder.core.paths import Decision
from thunder.core.symbol import OpTags
from thunder.inspect.kernels import Kernel, kernels_of
from thunder.interpreter import interpreted_instructions, interpreter_log, print_log
from thunder.options import CACHE_OPTIONS


class CompileData:
    """What a function was compiled with."""

    def __init__(self, compiled: Compiled):
        options = compiled.options
        self.fn, self.executors_list, self.langctx = compiled.fn, options.executors, None
        self.sharp_edges, self.cache_option = options.sharp_edges, options.cache
        self.compile_options, self.transforms, self.debug_options = (
            options.compile_options,
            list(options.transforms),
            options.debug,
        )
        self.disable_torch_autograd_support = options.disable_torch_autograd
        self.is_module = not isinstance(compiled.fn, type(compile_data)) and hasattr(compiled.fn, "named_parameters")


def compiled_function(fn: Any) -> Compiled:
    """The compiled function behind `fn`. Raises TypeError where it is not compiled."""
    compiled = compiled_of(fn)
    if compiled is None:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(f"{name} is not a compiled function or module: thunder.jit makes one")
    return compiled


_LOWER = "compiled.lower(*args) for the program"


def _called(fn: Any) -> Compiled:
    """The compiled function, which has a program to show. Raises TypeError where it has none, with the reason."""
    compiled = compiled_function(fn)
    if compiled.stats.last_entry is None and compiled.stats.calls:
        reason = getattr(compiled.refused, "reason", "")
        why = f" ({reason})" if reason else ""
        raise TypeError(
            f"the original function of {compiled!r} ran in each call, so there is no program to show{why}: "
            "thunder.explain says what cannot be captured"
        )
    if compiled.stats.last_entry is None:
        raise TypeError(f"{compiled!r} was not called yet, so there is nothing to show: call it, or ask {_LOWER}")
    return compiled


def compile_data(fn: Any) -> CompileData | None:
    """Returns the function, options and executors that `fn` was compiled with, or None if it is not compiled."""
    compiled = compiled_of(fn)
    return None if compiled is None else CompileData(compiled)


def compile_stats(fn: Any) -> CompileStats | None:
    """Returns counters, times and traces of `fn`, or None if it is not compiled."""
    compiled = compiled_of(fn)
    return None if compiled is None else compiled.stats


def last_traces(fn: Any) -> Traces:
    """Returns the computation traces of the last call, in the order of the passes. The first is the captured trace,
    the last is the program that runs. Prints as a table of contents."""
    return Traces(_called(fn).stats.last_traces)


def last_backward_traces(fn: Any) -> Traces:
    """Returns the backward traces of the last call. Empty if no result required grad."""
    return Traces(_called(fn).stats.last_backward_traces)


def last_kernels(fn: Any) -> dict[str, Kernel]:
    """Returns the kernels of the last call by the name of their region in the trace. Names of kernels of a backward
    begin with "backward".

    Each value is a string. For the executors cpp and triton_fuser it holds the program in the kernel IR, the schedule
    with the predicted bytes and microseconds, and the source.

    `last_kernels(fn)[name].script()` returns a Python program that runs the kernels of one region and PyTorch's
    operations on inputs like those of the call, and prints the differences and both times.
    """
    stats, kernels = _called(fn).stats, dict[str, Kernel]()
    for prefix, traces in (("", stats.last_traces), ("backward ", stats.last_backward_traces)):
        kernels |= kernels_of(prefix, traces[-1]) if traces else {}
    return kernels


def last_prologue_traces(fn: Any) -> Traces:
    """Returns the prologue traces of the last call. The prologue checks the guards."""
    return Traces(_called(fn).stats.last_prologue_traces)


def last_epilogue_traces(fn: Any) -> Traces:
    """Returns the epilogue traces of the last call. The epilogue builds the result and applies side effects."""
    return Traces(_called(fn).stats.last_epilogue_traces)


def cache_option(fn: Any) -> CACHE_OPTIONS:
    return compiled_function(fn).options.cache


def cache_hits(fn: Any) -> int:
    """Returns how many calls ran a program that was already compiled."""
    return compiled_function(fn).stats.cache_hits


def cache_misses(fn: Any) -> int:
    """Returns how many calls compiled a program."""
    return compiled_function(fn).stats.cache_misses


def list_transforms(fn: Any) -> list:
    """Returns the transforms that `fn` was compiled with."""
    return list(compiled_function(fn).options.transforms)


class CompiledPath(NamedTuple):
    """One way through a function that decides by data. decisions: each with `question`, `answer` and `where`, the
    user's line. calls: how many went this way to its end, or to an error. program: what they ran."""

    decisions: tuple[Decision, ...]
    calls: int
    program: CacheEntry

    def __str__(self) -> str:
        lines = [f"{self.calls} calls"]
        for d in self.decisions:
            filename, line, function, source = d.where or ("?", "?", "?", "")
            lines.append(f"  {d.question}: {d.answer}  # {filename}:{line}, in {function}: {source.strip()}")
        return "\n".join(lines)


class CompiledPaths(list[CompiledPath]):
    """Paths, printed one below the other."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def last_paths(fn: Any) -> CompiledPaths:
    """Returns the compiled paths of a function that branches on data, in the order in which they were compiled. Each
    has its decisions and the number of calls that took it."""
    return CompiledPaths(CompiledPath(p.path, p.calls, p) for p in compiled_function(fn).programs)


def last_recompile_reasons(fn: Any) -> list[str]:
    """Returns why the last call that compiled could not use the existing programs: one reason for each program, the
    most recent program first."""
    return list(compiled_function(fn).stats.last_compile_reasons)


def last_entry(fn: Any) -> CacheEntry:
    """What the last call ran."""
    entry = _called(fn).stats.last_entry
    assert entry is not None, "a call leaves an entry"
    return entry


def _last_captured(fn: Any):
    return last_entry(fn).captured


def last_interpreted_instructions(fn: Any) -> list:
    """Returns the `dis.Instruction` objects that were interpreted when `fn` was last compiled."""
    return interpreted_instructions(_last_captured(fn))


def last_interpreter_log(fn: Any) -> list:
    """Returns the instructions and events (lines, calls, returns, opaque calls) of the last capture. Complete only
    with record_history=True."""
    return interpreter_log(_last_captured(fn))


def print_last_interpreter_log(
    fn: Any, /, print_fn: Callable = print, use_colors: bool = True, indent: bool = True, max_depth: int | None = None,
    color_internals: bool = False,
    print_source_code: bool = True,
) -> None:  # fmt: skip
    """Prints `last_interpreter_log` line by line.

    Args:
        fn: A compiled function or module.
        print_fn: Called with each line.
        use_colors: Prints events in colors.
        indent: Indents lines by call depth.
        max_depth: The largest call depth that is printed.
        color_internals: Prints instructions in colors, too.
        print_source_code: Prints the source line of each line event.
    """
    print_log(
        _last_captured(fn),
        print_fn,
        use_colors=use_colors,
        indent=indent,
        max_depth=max_depth,
        color_internals=color_internals,
        print_source_code=print_source_code,
    )


def last_compile_options(fn: Any, /) -> None:
    """Prints the compile options that were used, with their descriptions, and those that were not used."""
    options = compiled_function(fn).options
    used = {k: v for k, v in options.used_compile_options.items() if k in options.compile_options}
    unused = [k for k in options.compile_options if k not in used]
    print("Used compile options:" if used else "No used options")
    for name, reason in used.items():
        print(f"\t{name}. {reason}")
    print("Unused compile options:" if unused else "No unused options")
    for name in unused:
        print(f"\t{name}")


def get_auto_registered_torch_op_names(fn: Any, /) -> set[str]:
    """Returns the names of the torch functions in the captured trace that thunder does not define. They are opaque
    operations."""
    return {
        b.sym.qualified_name
        for b in _called(fn).stats.last_traces[0].bound_symbols
        if OpTags.OPAQUE in b.sym.tags and b.sym.id[0] == "opaque"
    }


def last_sharp_edges(fn: Any) -> list[str]:
    """Returns what the program did that a compiled program cannot repeat exactly, with one line for each place."""
    return list(_last_captured(fn).sharp_edges)
