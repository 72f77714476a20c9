"""`python -m thunder run`, `report`, `minify`, `bench`, `explain` and `doctor`: thunder on a script, a model and a
machine.

python -m thunder run train.py --steps 10
python -m thunder report --output train.html train.py --steps 10
python -m thunder bench models.py:make --input 4x128:int64 --train
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import thunder
from thunder.capture import checks
from thunder.capture.policy import DEFINED
from thunder.compiled import Compiled
from thunder.errors import CaptureError
from thunder.inspect.minify import FAULTS, NoFault, minify
from thunder.inspect.report import job_report
from thunder.module import ThunderModule
from thunder.options import C_COMPILER, CXX_COMPILER, ENVIRONMENT, cache_directory
from thunder.tests.measuring import compile_with, interleaved, parse_systems, repetitions


def add_commands(commands: Any) -> None:
    """Adds the commands of this file to those of an ArgumentParser."""
    run = commands.add_parser("run", help="run a script; modules that it calls are compiled, a report follows")
    _add_script(run)
    run.set_defaults(command=lambda options: run_script(options.script, options.arguments, options.recipe))

    report = commands.add_parser("report", help="run a script, and write a page for each module that it calls")
    report.add_argument("--output", default="thunder_report.html", help="the page; that of several modules has links")
    report.add_argument("--beside", default="", help="systems to measure too, of eager, torch.compile")
    _add_script(report)
    report.set_defaults(
        command=lambda options: run_script(
            options.script, options.arguments, options.recipe, Path(options.output).absolute(), options.beside
        )
    )

    smallest = commands.add_parser("minify", help="run a script, and print the smallest program that shows its fault")
    smallest.add_argument("--fault", choices=FAULTS, help="which one; a crash or a wrong result by default")
    smallest.add_argument("script")
    smallest.add_argument("arguments", nargs=argparse.REMAINDER)
    smallest.set_defaults(command=lambda options: minify_script(options.script, options.arguments, options.fault))

    bench = commands.add_parser("bench", help="time a model beside eager PyTorch")
    bench.add_argument("--systems", default="eager,thunder", help="of eager, torch.compile, thunder, thunder_inductor")
    bench.add_argument("--train", action="store_true", help="forward and backward")
    bench.add_argument("--seconds", type=float, default=5.0, help="how long to measure")
    _add_model(bench)
    bench.set_defaults(
        command=lambda options: time_model(*_model(options), options.systems, options.train, options.seconds)
    )

    explain = commands.add_parser("explain", help="list the work of a model on the host, with its cost")
    _add_model(explain)
    explain.set_defaults(command=_explain)


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="auto", help="a recipe's name, such as auto or inference")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


# --------------------------------------------------------------------------------------------------------------- models


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="package.module:name or file.py:name: a model, or a function that makes one")
    parser.add_argument(
        "--input", action="append", default=[], help="sizes of an argument, as 4x128 or 4x128:int64; one for each"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def _model(options: argparse.Namespace) -> tuple[Callable, list[torch.Tensor]]:
    """The model of a command line, on its device, and its arguments. Raises SystemExit with a message where there is
    none."""
    module_name, _, name = options.model.partition(":")
    if not name:
        raise SystemExit(f"{options.model!r} is not a model: write package.module:name or file.py:name")
    if module_name.endswith(".py"):
        model_or_maker: Any = runpy.run_path(module_name).get(name)
    else:
        model_or_maker = getattr(importlib.import_module(module_name), name, None)
    if model_or_maker is None:
        raise SystemExit(f"{module_name} has no {name!r}")
    torch.manual_seed(0)
    model = (
        model_or_maker
        if isinstance(model_or_maker, torch.nn.Module) or options.input and not _makes_model(model_or_maker)
        else model_or_maker()
    )
    if isinstance(model, torch.nn.Module):
        model.to(options.device)
    return model, [_argument(text, options.device) for text in options.input]


def _makes_model(value: Any) -> bool:
    return isinstance(value, type) or getattr(value, "__code__", None) is not None and not value.__code__.co_argcount


def _argument(text: str, device: str) -> torch.Tensor:
    parsed = re.fullmatch(r"(\d+(?:x\d+)*)?(?::(\w+))?", text)
    dtype = getattr(torch, parsed[2] or "float32", None) if parsed else None
    if parsed is None or not isinstance(dtype, torch.dtype):
        raise SystemExit(f"--input {text!r}: write sizes and a dtype, such as 4x128 or 4x128:int64")
    sizes = [int(n) for n in parsed[1].split("x")] if parsed[1] else []
    if dtype.is_floating_point:
        return torch.randn(sizes, device=device).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, sizes, device=device).to(dtype)


def _explain(options: argparse.Namespace) -> int:
    model, args = _model(options)
    print(thunder.explain(model, *args))
    return 0


def time_model(model: Callable, args: list[torch.Tensor], systems: str, train: bool, seconds: float) -> int:
    """Prints the first call and the median time of a call for each system, taken in turns."""
    on_gpu = any(a.is_cuda for a in args)

    def step(call: Callable) -> None:
        with torch.set_grad_enabled(train):
            out = call(*args)
        if train:
            results = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else [out]
            means = [x.float().mean() for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
            torch.stack(means).sum().backward()
        if on_gpu:
            torch.cuda.synchronize()

    calls, first = {}, {}
    for name in parse_systems(systems):
        calls[name] = lambda compiled=compile_with(name, model): step(compiled)
        start = time.perf_counter()
        calls[name]()
        first[name] = time.perf_counter() - start
        calls[name]()
    rounds = 10
    repeat = max(repetitions(call, seconds / rounds / len(calls)) for call in calls.values())
    samples = interleaved(calls, rounds, repeat)
    base = median(samples[next(iter(samples))])
    for name, values in samples.items():
        ms = median(values) * 1e3
        print(f"{name:16} {ms:10.3f} ms a call, {ms / base / 1e3:5.2f} of the first, first call {first[name]:.2f} s")
    return 0


# -------------------------------------------------------------------------------------------------------------- scripts


class _Row:
    """The calls, programs and times of one module, or of one function that the script compiles."""

    def __init__(self, module: torch.nn.Module | Compiled, recipe: str):
        name = getattr(module.fn, "__qualname__", "") if isinstance(module, Compiled) else ""
        self.name, self.calls, self.programs, self.why = name or type(module).__name__, 0, 0, ""
        self.seconds = 0.0  # of calls that compiled
        self.last: tuple[tuple, dict, bool] | None = None  # the arguments of the last call, and whether it had grad
        try:
            own = isinstance(module, (ThunderModule, Compiled))  # which the script has compiled
            self.compiled: Any = module if own else thunder.compile(module, recipe=recipe)
        except NotImplementedError as error:
            self.compiled, self.why = None, str(error)

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        known, start = len(self.compiled.programs), time.perf_counter()
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self.calls += 1
            self.last = args, kwargs, torch.is_grad_enabled()
            self.programs = len(self.compiled.programs)
            if self.programs > known:
                self.seconds += time.perf_counter() - start
            if not self.programs:
                self.why = "the original ran: a warning said why"
            elif self.compiled.recompilations:
                self.why = f"compiled again, the last time because {self.compiled.recompilations[-1].reason}"

    def __str__(self) -> str:
        took = f", calls that compiled took {self.seconds:.2f} s" if self.programs else ""
        return f"{self.name}: {self.calls} calls, {self.programs} programs{took}{self.why and '; ' + self.why}"


@contextmanager
def compiled_calls(recipe: str):
    """Inside the block, calls of modules with parameters run compiled programs. Gives a row for each module, and for
    each function that the script compiles itself.

    A call inside of another is a part of that: `__call__` is the usual one while a compiled function runs.
    """
    usual: dict[type, Any] = {kind: kind.__call__ for kind in (torch.nn.Module, ThunderModule, Compiled)}
    rows: dict[int, _Row] = {}

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        own = isinstance(module, (ThunderModule, Compiled))
        before = next(function for kind, function in reversed(usual.items()) if isinstance(module, kind))
        if not own and next(module.parameters(), None) is None:
            return before(module, *args, **kwargs)
        _set_calls(usual)
        try:
            row = rows.get(id(module))  # which keeps the module, so that its id stays its own
            if row is None:
                row = rows[id(module)] = _Row(module, recipe)
            return before(module, *args, **kwargs) if row.compiled is None else row(args, kwargs)
        finally:
            _set_calls(dict.fromkeys(usual, call))

    DEFINED[id(call)] = DEFINED[id(usual[torch.nn.Module])]
    _set_calls(dict.fromkeys(usual, call))
    try:
        yield rows
    finally:
        _set_calls(usual)
        del DEFINED[id(call)]


def _set_calls(functions: dict[type, Any]) -> None:
    for kind, function in functions.items():
        kind.__call__ = function  # type: ignore[method-assign]


class _Shown(Exception):
    """A fault was found, and its program printed."""


@contextmanager
def watched_calls(fault: str | None):
    """Inside the block, the first call of each program of a compiled function is compared with eager PyTorch; the
    smallest program that shows a fault is printed, and _Shown raised."""
    usual: Any = Compiled.__call__

    def call(compiled: Compiled, *args: Any, **kwargs: Any) -> Any:
        Compiled.__call__ = usual  # type: ignore[method-assign]
        known = len(compiled.programs)
        try:
            try:
                result = usual(compiled, *args, **kwargs)
            except Exception:
                _show_fault(compiled, fault, args, kwargs)
                raise
            if len(compiled.programs) > known:
                _show_fault(compiled, fault, args, kwargs)
            return result
        finally:
            Compiled.__call__ = call  # type: ignore[method-assign]

    Compiled.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        Compiled.__call__ = usual  # type: ignore[method-assign]


def _show_fault(compiled: Compiled, fault: str | None, args: tuple, kwargs: dict) -> None:
    try:
        print(minify(compiled, *args, fault=fault, **kwargs))
    except (NoFault, CaptureError):
        return
    raise _Shown


def minify_script(script: str, arguments: list[str], fault: str | None) -> int:
    """Runs a script as `python script.py arguments` would until a compiled function in it shows a fault, and prints the
    smallest program that shows that. 1 where there is none."""
    old_arguments, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        with watched_calls(fault):
            runpy.run_path(script, run_name="__main__")
    except _Shown:
        return 0
    finally:
        sys.argv, sys.path[:] = old_arguments, path
    print("thunder: no call of a compiled function in the script shows a fault", file=sys.stderr)
    return 1


def run_script(script: str, arguments: list[str], recipe: str, output: Path | None = None, beside: str = "") -> int:
    """Runs a script as `python script.py arguments` would, with compiled modules, and prints a row for each of them.
    output: where a page about each module is written, measured by calls like its last one. beside: the systems that
    are measured as well, separated by commas."""
    old_arguments, path = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        with compiled_calls(recipe) as rows:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = old_arguments, path
        nothing = "the script calls no module with parameters, and nothing that it has compiled"
        print(f"\nthunder: {len(rows)} compiled" if rows else f"\nthunder: {nothing}")
        for row in rows.values():
            print(f"  {row}")
        if output is not None:
            _pages(Path(script).name, list(rows.values()), output, [name for name in beside.split(",") if name])
    return 0


def _pages(script: str, rows: list[_Row], output: Path, beside: list[str]) -> None:
    """Writes a page for each row with programs, and, where there are several rows, one that leads to them."""
    places: list[Path | None] = []
    for number, row in enumerate(rows, 1):
        page = output if len(rows) == 1 else output.with_stem(f"{output.stem}_{number}")
        places.append(page if row.programs else None)
        if row.programs:
            print(f"  {row.name}: {page}, {_page(row, page, beside)}")
    if len(rows) > 1:
        links = [(row.name, row.calls, row.programs, row.seconds, row.why, page) for row, page in zip(rows, places)]
        job_report(script, links).save(output)
        print(f"  links to these pages: {output}")


def _page(row: _Row, page: Path, beside: list[str]) -> str:
    """Writes the page of a module. Returns its subject in words."""
    assert row.last is not None, "a module with programs was called"
    args, kwargs, grad = row.last
    try:
        with torch.set_grad_enabled(grad):
            thunder.report(thunder.profile(row.compiled, *args, **kwargs).compare(*beside), page)
        return "its last call measured"
    except Exception as error:  # noqa: BLE001  the script's module may refuse to be called again
        thunder.report(row.compiled, page)
        return f"not measured: {type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------------------------------- doctor


def doctor() -> int:
    """Prints what thunder needs of this machine, and what is missing for what. 1 where a small program fails."""
    for name, words in (
        ("C compiler", _c_compiler()), ("C++ compiler", _cxx_compiler()), ("Triton", _triton()), ("cache", _cache()),
    ):  # fmt: skip
        print(f"{name}: {words}")
    for executor in thunder.get_all_executors():
        if (why := executor.unavailable()) is not None:
            print(f"executor {executor.name} has no effect here: {why}")
    for option in ENVIRONMENT:
        if option.value != option.default and option.name != "PATH":
            print(f"environment: {option.name}={option.value}")
    wrong = [kind for kind in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])) if not _works(kind)]
    print(f"a small training step: {'differs from eager on ' + ', '.join(wrong) if wrong else 'equals eager'}")
    return bool(wrong)


def _c_compiler() -> str:
    compiler = C_COMPILER.value or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "none, so that prologues run in Python"
    library = checks.build(compiler)
    fails = f"{compiler} cannot build an extension (are Python's headers there?): prologues run in Python"
    return fails if library is None else compiler


def _cxx_compiler() -> str:
    compiler = CXX_COMPILER.value or shutil.which("clang++" if sys.platform == "darwin" else "g++")
    return compiler or "none, so that Inductor makes no kernels for the CPU"


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed, so that no kernels are made for GPUs"
    return importlib.import_module("triton").__version__


def _cache() -> str:
    directory = cache_directory()
    files = [p.stat().st_size for p in directory.rglob("*") if p.is_file()] if directory.exists() else []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            writable = ""
    except OSError as error:
        writable = f", not writable ({error.strerror}): each process compiles its own kernels"
    return f"{directory}, {len(files)} files, {sum(files) / 2**20:.1f} MiB{writable}"


def _works(device: str) -> bool:
    """Whether a small training step on a device equals eager's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
    x = torch.randn(4, 8, device=device)
    results = []
    for call in (model, thunder.jit(model, fallback="error")):
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results, strict=True))
