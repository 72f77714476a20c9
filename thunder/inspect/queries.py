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
    """What `fn` was compiled with, or None where it is not compiled."""
    compiled = compiled_of(fn)
    return None if compiled is None else CompileData(compiled)


def compile_stats(fn: Any) -> CompileStats | None:
    """Counters, times and traces of `fn`, or None where it is not compiled."""
    compiled = compiled_of(fn)
    return None if compiled is None else compiled.stats


def last_traces(fn: Any) -> Traces:
    """The computation traces of the last call, in the order of the passes: the first as acquired, the last as
    executed. Printed, a table of contents."""
    return Traces(_called(fn).stats.last_traces)


def last_backward_traces(fn: Any) -> Traces:
    """The backward traces of the last call; empty where nothing required grad."""
    return Traces(_called(fn).stats.last_backward_traces)


def last_kernels(fn: Any) -> dict[str, Kernel]:
    """The kernels that the last call ran, by the name of their region in the trace ("backward" before those of a
    backward). Each is a string: for the executors cpp and triton_fuser the program in the kernel IR, the schedule with
    its predicted bytes and microseconds, and the source.

    `last_kernels(fn)[name].script()` is a program that runs one region beside PyTorch's operations, on inputs like the
    call's, and prints the differences and both times.
    """
    stats, kernels = _called(fn).stats, dict[str, Kernel]()
    for prefix, traces in (("", stats.last_traces), ("backward ", stats.last_backward_traces)):
        kernels |= kernels_of(prefix, traces[-1]) if traces else {}
    return kernels


def last_prologue_traces(fn: Any) -> Traces:
    """The prologue traces of the last call: what is checked before its program runs."""
    return Traces(_called(fn).stats.last_prologue_traces)


def last_epilogue_traces(fn: Any) -> Traces:
    """The epilogue traces of the last call: how the result is put together and what is written back."""
    return Traces(_called(fn).stats.last_epilogue_traces)


def cache_option(fn: Any) -> CACHE_OPTIONS:
    return compiled_function(fn).options.cache


def cache_hits(fn: Any) -> int:
    """How many calls ran a program that was there."""
    return compiled_function(fn).stats.cache_hits


def cache_misses(fn: Any) -> int:
    """How many calls had to compile."""
    return compiled_function(fn).stats.cache_misses


def list_transforms(fn: Any) -> list:
    """The transforms given to thunder.jit."""
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
    """The paths that `fn` was compiled to, in that order: what each decides by data, and how many calls went it."""
    return CompiledPaths(CompiledPath(p.path, p.calls, p) for p in compiled_function(fn).programs)


def last_recompile_reasons(fn: Any) -> list[str]:
    """Why the last call that compiled could not use what was there: one reason in words for each program, the most
    recent first."""
    return list(compiled_function(fn).stats.last_compile_reasons)


def last_entry(fn: Any) -> CacheEntry:
    """What the last call ran."""
    entry = _called(fn).stats.last_entry
    assert entry is not None, "a call leaves an entry"
    return entry


def _last_captured(fn: Any):
    return last_entry(fn).captured


def last_interpreted_instructions(fn: Any) -> list:
    """The `dis.Instruction`s that were interpreted the last time `fn` was compiled."""
    return interpreted_instructions(_last_captured(fn))


def last_interpreter_log(fn: Any) -> list:
    """Instructions and events (lines, calls, returns, opaque calls) of the last interpretation; complete with
    record_history=True."""
    return interpreter_log(_last_captured(fn))


def print_last_interpreter_log(
    fn: Any, /, print_fn: Callable = print, use_colors: bool = True, indent: bool = True, max_depth: int | None = None,
    color_internals: bool = False,
    print_source_code: bool = True,
) -> None:  # fmt: skip
    """Prints `last_interpreter_log` line by line with print_fn: indented by call depth, down to max_depth, events
    (color_internals: and instructions) in colours."""
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
    """Prints which compile options were used, with the reason they were asked for, and which were not."""
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
    """Names of the torch functions in the acquired trace that have no definition of thunder's and were taken as opaque
    operations."""
    return {
        b.sym.qualified_name
        for b in _called(fn).stats.last_traces[0].bound_symbols
        if OpTags.OPAQUE in b.sym.tags and b.sym.id[0] == "opaque"
    }


def last_sharp_edges(fn: Any) -> list[str]:
    """What the program did that a compiled program cannot repeat faithfully, one line a site."""
    return list(_last_captured(fn).sharp_edges)
