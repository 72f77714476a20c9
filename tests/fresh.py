"""Python programs in processes of their own that need not import PyTorch and thunder again: each process is forked from
a server that has imported them and has run nothing. Where nothing can be forked, each imports for itself.

    done = fresh.run("-c", "print(1)")      # as subprocess.run([sys.executable, "-c", "print(1)"]) with captured output
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from multiprocessing.context import BaseContext
from pathlib import Path

import torch


def context(may_use_gpus: bool = False) -> BaseContext:
    """Of the processes of all tests. A child of pytest's own process would share the locks of its threads, and one of a
    process that has asked for GPUs, as imports do, cannot use them."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    forks = forks and not (may_use_gpus and torch.cuda.is_available())
    processes = multiprocessing.get_context("forkserver" if forks else "spawn")
    processes.set_forkserver_preload(["torch", "thunder.api", "thunder.distributed.data_parallel", "tests.fresh"])
    return processes


class Program:
    """`python *arguments`, which runs while the test goes on. arguments: `-c code`, `-m module` or a file, and what
    sys.argv holds after it. before: called in the new process first, with nothing of the environment set."""

    def __init__(
        self,
        *arguments: str | Path,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ):
        self.arguments, self.printed = [str(a) for a in arguments], tempfile.TemporaryDirectory()
        environment = dict(os.environ if env is None else env)
        job = self.arguments, str(cwd or Path.cwd()), environment, self.printed.name, before
        self.process = context(may_use_gpus=True).Process(target=_main, args=job)  # type: ignore[attr-defined]
        self.process.start()

    def result(self, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Waits for its end."""
        self.process.join(timeout)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        out, err = (Path(self.printed.name, name).read_text() for name in ("out", "err"))
        self.printed.cleanup()
        assert code is not None, f"{self.arguments} ran for more than {timeout} seconds and printed\n{out}\n{err}"
        return subprocess.CompletedProcess(self.arguments, code, out, err)


def run(
    *arguments: str | Path, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return Program(*arguments, cwd=cwd, env=env).result()


def _main(arguments: list[str], cwd: str, environment: dict[str, str], printed: str, before: Callable | None) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(printed, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if before is not None:
        before()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in environment:  # which PyTorch has read when it was imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    kind = arguments[0]
    sys.argv = arguments[1:] if kind in ("-c", "-m") else arguments
    first = {"-c": "", "-m": cwd}.get(kind, os.path.dirname(os.path.abspath(kind)))
    sys.path[:] = [first, *environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    try:
        if kind == "-c":
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv[0] = "-c"
            exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
        elif kind == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(kind, run_name="__main__")
    except Exception as error:  # noqa: BLE001 - printed as the interpreter does, which says what may be meant
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
