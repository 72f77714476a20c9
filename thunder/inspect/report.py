"""`thunder.report`: what a compiled function does, and what that costs, as one page of HTML.

The page needs no network and no server. It has no facts of its own: it shows what traces, `thunder.profile`,
`thunder.explain`, `last_paths`, `compile_stats` and `examine.saved_for_backward` say. Rates stand beside those that the
device reaches (`ceilings`).
"""

from __future__ import annotations

import difflib
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thunder.analysis.cost import multiply_adds, original_of
from thunder.cache.entry import CacheEntry
from thunder.cache.history import section_of_reason
from thunder.compiled import Compiled, compiled_of
from thunder.core.dtypes import FLOAT
from thunder.core.proxies import Proxy, TensorProxy, leaves
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.inspect.ceilings import Ceilings, ceilings
from thunder.inspect.examine import operations_in, saved_for_backward
from thunder.inspect.explain import explained, rules_of
from thunder.inspect.flame import flame
from thunder.inspect.profile import STATEMENTS, Cost, Profile, Share, check_symbols, costs_of, profile
from thunder.inspect.queries import last_entry, last_paths
from thunder.ops.torch_types import to_torch_dtype
from thunder.version import VERSION

CHANGED = 300  # lines of a diff
ROWS = 400  # of a table of lines, modules or saved values
TEXT = 20_000  # characters of one kernel's source, or of a prologue
POINTS = 1200  # of the chart


class Report:
    """An HTML page. `html` is its text, `save` writes it to a file, and a notebook displays it."""

    def __init__(self, html: str):
        self.html = html

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 60em; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"<a report of {len(self.html.encode()):,} bytes: report.save(path)>"


def report(fn: Callable | Profile, path: str | Path | None = None, /, *args: Any, **kwargs: Any) -> Report:
    """Writes an HTML page about a compiled function or module.

    The page shows the programs by pass, the user's lines beside the operations that run, a flame graph of the modules,
    memory, kernels, guards, recompilations, data-dependent branches, eager calls, other work on the host, and
    communication. It compares the rates of arithmetic and memory with those that the device reaches.

    Args:
        fn: A compiled function or module, or a profile. With
            `thunder.profile(fn, *args).compare("eager", "torch.compile")` the page shows their times, too.
        path: The file to write. None writes no file.
        args: Positional arguments of the call that `thunder.profile` measures. Without arguments and without a profile,
            the page is about the last call and has no times.
        kwargs: Keyword arguments of that call.

    Raises:
        TypeError: If `fn` is not compiled, or was not called and no arguments are given.
        CaptureError: If the program was loaded from disk, because only its text is known.
    """
    measured = profile(fn, *args, **kwargs) if args or kwargs else fn if isinstance(fn, Profile) else None
    if measured is not None:
        written_report = Report(_page(measured.compiled, measured.entry, measured))
    else:
        entry, compiled = last_entry(fn), compiled_of(fn)
        assert compiled is not None, "last_entry refuses what is not compiled"
        check_symbols(entry)
        written_report = Report(_page(compiled, entry, None))
    if path is not None:
        written_report.save(path)
    return written_report


def _page(compiled: Compiled, entry: CacheEntry, measured: Profile | None) -> str:
    """The report as one HTML page. measured: the profile of a step; None: only the programs are shown."""
    if measured is None:
        ran = [t for t in (entry.forward, entry.backward) if t is not None]
        costs = costs_of(entry, ran, [[0.0] * len(t.bound_symbols) for t in ran], {})
    else:
        costs = list(measured.costs)
    name = getattr(compiled.fn, "__qualname__", type(compiled.fn).__name__)
    limits = _ceilings(entry, costs) if measured is not None else None
    sections = {
        "summary": ("Summary", _summary(compiled, entry, measured)),
        "code": ("What runs", _code(costs, measured)),
        "lines": ("By line", _shares(measured and measured.by_line(), "line", _line, limits)),
        "modules": ("By module", _modules(measured, limits)),
        "fusions": ("Fused", _fusions(costs, measured)),
        "memory": ("Memory", _memory(compiled, entry, measured)),
        "passes": ("Passes", _passes(entry)),
        "rules": ("Rules", _rules(entry)),
        "guards": ("Guards", _guards(compiled, entry)),
        "decisions": ("Decisions", _decisions(compiled)),
        "host": ("On the host", _host(entry, costs, measured)),
        "communication": ("Communication", _communication(costs)),
    }
    body = [f"<h1>{escape(name)}</h1>", f"<p>thunder {VERSION}, torch {escape(torch.__version__)}, "
            f"Python {platform.python_version()}, {escape(_device(entry))}</p>"]  # fmt: skip
    body.append("<nav>" + "".join(f'<a href="#{key}">{title}</a>' for key, (title, _) in sections.items()) + "</nav>")
    for key, (title, parts) in sections.items():
        body += [f'<section id="{key}"><h2>{title}</h2>', *parts, "</section>"]
    return _filled(name, body)


def _filled(name: str, body: Iterable[str]) -> str:
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return template.replace("{{title}}", escape(f"thunder: {name}")).replace("{{body}}", "\n".join(body))


def job_report(script: str, rows: Sequence[tuple[str, int, int, float, str, Path | None]]) -> Report:
    """A page that leads to those of all modules and compiled functions of a script.

    rows: name, calls, programs, seconds of calls that compiled, a remark, and the page beside this one, if any.
    """
    cells = []
    for name, calls, programs, seconds, remark, page in rows:
        link = f'<td><a href="{escape(page.name)}">{escape(name)}</a></td>' if page else _text(name)
        cells.append((link, _number(calls, "{:,}"), _number(programs, "{}"), _number(seconds, "{:.2f}"), _text(remark)))
    head = ("function", "calls", "programs", "s of calls that compiled", "remark")
    return Report(_filled(script, [f"<h1>{escape(script)}</h1>", *_table("by_function", head, cells)]))


# ------------------------------------------------------------------------------------------------------- pieces of HTML


def _table(key: str, head: Sequence[str], rows: Iterable[Sequence[str]], most: int | None = None) -> Iterator[str]:
    """rows: of cells, as `_number`, `_text` and `_bar` make them. A table of shares stays a table on a phone; a row of
    another one becomes a block there."""
    rows = list(rows)
    shown = rows if most is None else rows[:most]
    kind = "shares" if key.startswith("by_") else "wide"
    yield f'<div class="scroll"><table id="{key}" class="{kind}"><thead><tr>'
    yield "".join(f"<th>{escape(h)}</th>" for h in head)
    yield "</tr></thead><tbody>"
    for row in shown:
        yield "".join(["<tr>", *row, "</tr>"])
    yield "</tbody></table></div>"
    if len(shown) < len(rows):
        yield f'<p class="note">and {len(rows) - len(shown)} more</p>'


def _text(text: Any) -> str:
    return f"<td>{escape(str(text))}</td>"


def _code_cell(text: str) -> str:
    return f'<td class="code">{escape(text)}</td>'


def _number(value: float | None, form: str = "{:.3f}") -> str:
    """A cell; an empty one for None and 0."""
    return f'<td class="n">{form.format(value)}</td>' if value else "<td></td>"


def _bar(value: float, largest: float) -> str:
    share = value / largest if largest else 0.0
    bar = f'<i style="width:{4 * share:.2f}em"></i>' if share > 0.01 else ""
    return f'<td class="n" data-n="{value:.6f}">{bar}{value:.3f}</td>' if value else "<td></td>"


def _where(where: tuple | None) -> str:
    """A cell with the user's line."""
    if where is None:
        return "<td></td>"
    line_text = f"{Path(where[0]).name}:{where[1]}"
    line = f"<code>{escape(where[3].strip())}</code>"
    return f'<td class="where" title="{escape(where[0])}"><small>{escape(line_text)}</small> {line}</td>'


def _cut(text: str) -> str:
    more = f"\n... and {len(text) - TEXT} more characters" if len(text) > TEXT else ""
    return f"<pre>{escape(text[:TEXT] + more)}</pre>"


def _unmeasured(what: str) -> list[str]:
    return [f'<p class="note">No {what}: thunder.report(compiled, path, *args) measures a call.</p>']


def _mib(size: float) -> float:
    return 0.0 if -5e3 < size < 0 else size / 2**20  # and not -0.00


def _torch_device(entry: CacheEntry) -> torch.device:
    """Where a program runs: a GPU, if any of its arguments is on one."""
    kinds = {x.device.type for x in entry.forward.args if isinstance(x, Proxy) and hasattr(x, "device")}
    return torch.device("cuda", torch.cuda.current_device()) if "cuda" in kinds else torch.device("cpu")


def _device(entry: CacheEntry) -> str:
    return torch.cuda.get_device_name() if _torch_device(entry).type == "cuda" else platform.machine()


# ------------------------------------------------------------------------------------------------------------- sections


def _summary(compiled: Compiled, entry: CacheEntry, measured: Profile | None) -> Iterator[str]:
    """The cards at the top: counts of calls, programs, guards and operations, and the measured times."""
    stats = compiled.stats
    cards = [
        (f"{stats.calls:,}", "calls"),
        (f"{len(compiled.programs)}", "programs"),
        (f"{stats.cache_misses}", "compilations"),
        (f"{entry.captured.guard_count:,}", "guards"),
        (f"{len(entry.forward.bound_symbols):,}", "operations in the forward"),
    ]
    if entry.backward is not None:
        cards.append((f"{len(entry.backward.bound_symbols):,}", "in the backward"))
    if measured is not None:
        cards = [
            (f"{1e3 * measured.step:.3f} ms", "a step"),
            (f"{1e3 * measured.noted:.3f} ms", "a step with the clock read between operations"),
            (f"{1e3 * measured.seconds:.3f} ms", "in operations"),
            (f"{1e3 * measured.guards:.3f} ms", "in guards"),
            (f"{measured.covered:.1%}", "of that step is in operations and guards"),
            (f"{_mib(measured.peak):.1f} MiB", "peak of memory above the start of the call"),
            *((f"{1e3 * seconds:.3f} ms", f"a step of {system}") for system, seconds in measured.beside.items()),
            *cards,
        ]
    yield '<div class="cards">' + "".join(f"<div><b>{a}</b><span>{b}</span></div>" for a, b in cards) + "</div>"
    for tier in (entry.tiers, entry.graphs):
        if tier is not None:
            yield f"<p>{escape(str(tier))}</p>"
    for edge in entry.captured.sharp_edges:
        yield f'<p class="edge">sharp edge: {escape(edge)}</p>'


def _code(costs: Sequence[Cost], measured: Profile | None) -> Iterator[str]:
    """Each program that runs: a row for each operation, the user's line beside it."""
    timeline = measured.timeline if measured is not None else [0] * len(costs)
    largest = max((c.seconds for c in costs), default=0.0)
    for number, trace in enumerate(dict.fromkeys(c.trace for c in costs)):
        own = [(c, filled) for c, filled in zip(costs, timeline, strict=True) if c.trace is trace]
        key, rows, before = f"program{number}", [], None
        for cost, seconds, size, filled in _operations(own):
            line = _where(cost.where) if cost.where != before else "<td></td>"
            before = cost.where
            rows.append((
                f'<td class="n">{cost.number}</td>', _bar(1e3 * seconds, 1e3 * largest),
                _number(_mib(size), "{:.2f}"), _number(_mib(filled), "{:.2f}"),
                _code_cell(_first_line(cost.bound_symbol)), line, _text(cost.module or ""),
            ))  # fmt: skip
        arguments = ", ".join(a.name for a in trace.args)
        yield f"<h3>{escape(trace.name)}</h3>"
        yield f"<details><summary><small>{len(trace.args)} arguments</small></summary>{_cut(arguments)}</details>"
        yield f'<input data-for="{key}" placeholder="filter by operation, line or module">'
        head = ("#", "ms", "MiB", "in memory", "operation", "the user's line", "module")
        yield from _table(key, head, rows)


def _operations(costs: Sequence[tuple[Cost, int]]) -> Iterator[tuple[Cost, float, int, int]]:
    """The operations of a program, each with its seconds, bytes and the bytes in memory behind it. Statements that free
    memory count for the operation before them, those at the beginning for the first one."""
    last, seconds, size, filled = None, 0.0, 0, 0
    for cost, behind in costs:
        if cost.bound_symbol.sym not in STATEMENTS:
            if last is not None:
                yield last, seconds, size, filled
                seconds, size = 0.0, 0
            last = cost
        seconds, size, filled = seconds + cost.seconds, size + cost.bytes, behind
    if last is not None:
        yield last, seconds, size, filled


def _first_line(b: BoundSymbol) -> str:
    """The line of a bound symbol, without the comments around it."""
    lines = [line for line in repr(b).split("\n") if not line.lstrip().startswith("#")]
    return lines[0] + (" ..." if len(lines) > 1 else "") if lines else repr(b).split("\n")[0]


def _line(key: Any) -> str:
    return _where(key) if key is not None else _text("(none of the user's lines)")


def _module(key: Any) -> str:
    return _text("(no module)" if key is None else key or "(the model)")


def _ceilings(entry: CacheEntry, costs: Sequence[Cost]) -> Ceilings:
    """Of the device of a program, for the dtypes that it multiplies matrices in."""
    dtypes = {_dtype(c.bound_symbol) for c in costs if multiply_adds(original_of(c.bound_symbol))}
    known = frozenset(d for d in dtypes if d in (torch.float64, torch.float32, torch.bfloat16, torch.float16))
    return ceilings(_torch_device(entry), known or frozenset({torch.float32}))


def _dtype(b: BoundSymbol) -> torch.dtype | None:
    """Of the first floating-point operand."""
    floats = (x.dtype for x in b.inputs if isinstance(x, TensorProxy) and x.dtype.category == FLOAT)
    return next(map(to_torch_dtype, floats), None)


def _modules(measured: Profile | None, limits: Ceilings | None) -> Iterator[str]:
    if measured is not None:
        yield from flame(measured)
    yield from _shares(measured and measured.by_module(), "module", _module, limits)


def _shares(
    shares: Sequence[Share] | None, what: str, cell: Callable[[Any], str], limits: Ceilings | None
) -> Iterator[str]:
    """The table of a step's time, memory and rates by line or module."""
    if shares is None or limits is None:
        yield from _unmeasured("times and bytes")
        return
    largest = max((1e3 * s.seconds for s in shares), default=0.0)
    rows = (
        (_bar(1e3 * s.seconds, largest), _number(_mib(s.bytes), "{:.2f}"), _number(_mib(s.at_peak), "{:.2f}"),
         _rate(s.moved, s.seconds, limits.bytes), _rate(s.flops, s.seconds, max(limits.flops.values())),
         _number(s.count, "{}"), cell(s.key))
        for s in shares
    )  # fmt: skip
    head = ("ms", "MiB allocated", "MiB at the peak", "GB/s", "GFLOP/s", "operations", what)
    yield from _table(f"by_{what}", head, rows, ROWS)
    reached = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in limits.flops.items())
    yield (
        f'<p class="note">Bars of rates: a full one is what this device reaches now: {limits.bytes / 1e9:,.0f} GB/s '
        f"in a copy, a matmul {reached}. Values that stay in a cache are read faster than a copy reads.</p>"
    )


def _rate(amount: float, seconds: float, ceiling: float) -> str:
    """A cell with an amount in a second, in billions, and a bar for its share of the ceiling."""
    if not amount or not seconds:
        return "<td></td>"
    rate = amount / seconds
    bar = f'<i class="rate" style="width:{3 * min(1.0, rate / ceiling):.2f}em"></i>'
    shown = f"{rate / 1e9:,.1f}" if rate >= 1e9 else f"{rate / 1e9:.2g}"
    return f'<td class="n" data-n="{rate:.6g}" title="{rate / ceiling:.0%} of the device\'s">{bar}{shown}</td>'


def _fusions(costs: Sequence[Cost], measured: Profile | None) -> Iterator[str]:
    """A section for each fused region, the longest first, with the text of its kernels."""
    seconds = {id(c.bound_symbol): c.seconds for c in costs}
    regions = [b for t in dict.fromkeys(c.trace for c in costs) for b in operations_in(t) if b.sym.is_fusion]
    if not regions:
        yield '<p class="note">No fusion executor has taken a region.</p>'
    shown: dict[int, str] = {}
    for b in sorted(regions, key=lambda b: -seconds.get(id(b), 0.0)):
        names = ", ".join(part.sym.name for part in b.subsymbols)
        took = f" {1e3 * seconds[id(b)]:.3f} ms" if measured is not None and id(b) in seconds else ""
        kernels = getattr(b.sym.fn, "kernels", 1)
        head = f"{b.sym.name}, {len(b.subsymbols)} operations, {kernels} kernels"
        known = shown.setdefault(id(b.sym.fn), b.sym.name)
        source = getattr(b.sym.fn, "description", "") if known == b.sym.name else ""
        note = f'<p class="note">the kernels of {escape(known)}</p>' if known != b.sym.name else ""
        executor = b.sym.executor.name if b.sym.executor is not None else "cudagraph"
        yield (
            f'<details class="region"><summary>{escape(head)}{took} <small>by {escape(executor)}: '
            f"{escape(names[:200])}</small></summary><pre>{escape(chr(10).join(map(_first_line, b.subsymbols)))}</pre>"
            f"{_cut(source) if source else note}</details>"
        )


def _memory(compiled: Compiled, entry: CacheEntry, measured: Profile | None) -> Iterator[str]:
    yield from _chart(measured) if measured is not None and measured.costs else _unmeasured("timeline")
    if entry.backward is None:
        return
    saved = saved_for_backward(compiled) if compiled.stats.last_entry is entry else ()
    yield f"<h3>Saved for the backward: {_mib(sum(v.nbytes or 0 for v in saved)):.2f} MiB without arguments</h3>"
    rows = ((_code_cell(v.name), _text(v.kind), _number(v.nbytes, "{:,}"), _text(v.operation), _where(v.location))
            for v in saved)  # fmt: skip
    yield from _table("saved", ("value", "type", "bytes", "made by", "the user's line"), rows, ROWS)


def _chart(measured: Profile) -> Iterator[str]:
    """Bytes in memory behind each bound symbol; the highest of those that share a point."""
    line, costs = measured.timeline, measured.costs
    wide = max(1, len(line) // POINTS)
    points = [(i, max(line[i : i + wide])) for i in range(0, len(line), wide)]
    top, at = max(measured.peak, 1), line.index(measured.peak)
    marks = "".join(
        f'<rect x="{begin}" y="0" width="{end - begin}" height="100"><title>{part}</title></rect>'
        for part, begin, end in _stretches(costs)
        if part == "backward"
    )
    path = " ".join(f"{i},{100 - 96 * value / top:.2f}" for i, value in points)
    labels = "".join(
        f'<span style="bottom:{96 * part / 4:.0f}%">{_mib(top * part / 4):.2f} MiB</span>' for part in range(5)
    )
    yield (
        f'<div class="chart"><div class="axis">{labels}</div>'
        f'<svg id="timeline" viewBox="0 0 {len(line)} 100" preserveAspectRatio="none" data-peak="{measured.peak}">'
        f'{marks}<line x1="{at}" x2="{at}" y1="0" y2="100"/><polyline points="{path}"/></svg></div>'
        '<p class="note">Bytes in memory beyond those before the call, from the first operation to the last.</p>'
    )
    cost = costs[at]
    where = f", {Path(cost.where[0]).name}:{cost.where[1]}" if cost.where else ""
    yield (
        f"<p>The peak, {_mib(measured.peak):.2f} MiB more than before the call, is in the {cost.part} behind "
        f"<code>{escape(cost.bound_symbol.sym.qualified_name)}</code>{escape(where)}. The backward is shaded.</p>"
    )
    holders = sorted((share for share in measured.by_line() if share.at_peak > 0), key=lambda share: -share.at_peak)
    yield "<h3>In memory at the peak, by the line that computed it</h3>"
    rows = ((_number(_mib(share.at_peak), "{:.2f}"), _line(share.key)) for share in holders)
    yield from _table("holders", ("MiB", "the user's line"), rows, 10)


def _stretches(costs: Sequence[Cost]) -> Iterator[tuple[str, int, int]]:
    begin = 0
    for i in range(1, len(costs) + 1):
        if i == len(costs) or costs[i].part != costs[begin].part:
            yield costs[begin].part, begin, i
            begin = i


def _passes(entry: CacheEntry) -> Iterator[str]:
    """The traces of each program in the order of the passes, and how each differs from the one before."""
    kinds = {
        "prologue": entry.prologue_traces, "computation": entry.computation_traces, "backward": entry.backward_traces,
        "epilogue": entry.epilogue_traces,
    }  # fmt: skip
    for kind, traces in kinds.items():
        if traces:
            yield f'<h3>{kind}</h3><div class="passes">'
        before: Trace | None = None
        for trace in traces:
            yield _pass(trace, before)
            before = trace
        if traces:
            yield "</div>"


def _pass(trace: Trace, before: Trace | None) -> str:
    """A section for one pass: the lines that it changed, or the whole trace of the first."""
    title, took = trace.made_by
    counts = f"{len(trace.bound_symbols)} bound symbols" + (f", {took} ms" if took is not None else "")
    head = f"{escape(title)} <small>{counts}</small>"
    if before is None:
        return f"<details><summary>{head}</summary>{_cut(trace.python(depth=1))}</details>"
    lines = [t.python(depth=1).split("\n")[1:] for t in (before, trace)]
    changed = [x for x in difflib.unified_diff(*lines, lineterm="", n=0) if not x.startswith(("---", "+++"))]
    kinds = {"+": "add", "-": "cut", "@": "at"}
    shown = [f'<span class="{kinds[x[0]]}">{escape(x)}</span>' for x in changed[:CHANGED]]
    shown += [f"and {len(changed) - CHANGED} more"] * (len(changed) > CHANGED)
    counts = f"+{sum(x[0] == '+' for x in changed)} -{sum(x[0] == '-' for x in changed)}"
    text = "\n".join(shown)
    return f"<details><summary>{head} <small>{counts}</small></summary><pre>{text}</pre></details>"


def _rules(entry: CacheEntry) -> Iterator[str]:
    rows = [(_text(x.what), _where(x.where)) for x in rules_of(entry)]
    yield from _table("rules-table", ("rule", "line"), rows) if rows else ['<p class="note">No rules.</p>']


def _guards(compiled: Compiled, entry: CacheEntry) -> Iterator[str]:
    """The prologue, the recompilations with their reasons, and the compile options that were read."""
    yield f"<details><summary>the prologue</summary>{_cut(entry.prologue.python(depth=1))}</details>"
    again = compiled.recompilations
    yield f"<h3>{len(again)} recompilations</h3>"
    rows = (
        (_number(r.call, "{}"), _text(r.reason), _where(r.location), _text(section_of_reason(r.reason))) for r in again
    )
    yield from _table("recompilations", ("call", "reason", "called at", "what to do"), rows, ROWS) if again else ()
    if compiled.stats.last_compile_reasons:
        yield f"<p>The last compilation: {escape('; '.join(compiled.stats.last_compile_reasons[:8]))}</p>"
    used = compiled.options.used_compile_options
    if used:
        yield "<h3>Compile options that were read</h3>"
        rows = ((_text(k), _text(compiled.options.compile_options.get(k, "(default)")), _text(v))
                for k, v in used.items())  # fmt: skip
        yield from _table("options", ("option", "value", "meaning"), rows)


def _decisions(compiled: Compiled) -> Iterator[str]:
    """The table of paths: each answer that a program depends on, with the calls that took it."""
    paths = [p for p in last_paths(compiled) if p.decisions]
    if not paths:
        yield '<p class="note">No program decides by data.</p>'
        return
    rows = (
        (_number(i, "{}"), _number(p.calls, "{}"), _text(d.question), _text(d.answer), _where(d.where))
        for i, p in enumerate(paths, 1)
        for d in p.decisions
    )
    yield from _table("paths", ("path", "calls", "question", "answer", "the user's line"), rows, ROWS)


def _host(entry: CacheEntry, costs: Sequence[Cost], measured: Profile | None) -> Iterator[str]:
    seconds = {id(c.bound_symbol): c.seconds for c in costs} if measured is not None else {}
    explained_symbols = list(explained(entry, seconds))
    if not explained_symbols:
        yield '<p class="note">Nothing: all of it is a program on the device.</p>'
        return
    rows = ((_text(x.kind), _text(x.what), _number(x.milliseconds), _number(x.bytes, "{:,}"), _where(x.where))
            for x in explained_symbols)  # fmt: skip
    yield from _table("host_calls", ("kind", "what", "ms", "bytes read", "the user's line"), rows, ROWS)


def _communication(costs: Sequence[Cost]) -> Iterator[str]:
    """The table of collectives, with the time of each."""
    rows = []
    for cost in costs:
        group = next((a for a in leaves(cost.bound_symbol.args) if isinstance(a, dist.ProcessGroup)), None)
        if group is not None:
            rows.append((_code_cell(_first_line(cost.bound_symbol)), _text(f"{group.size()} ranks"),
                         _text(cost.part), _number(1e3 * cost.seconds), _where(cost.where)))  # fmt: skip
    if not rows:
        yield '<p class="note">Ranks exchange nothing.</p>'
        return
    yield from _table("collectives", ("collective", "group", "part", "ms", "the user's line"), rows, ROWS)
