"""Dynamo in front of thunder: `torch.compile(fn, backend="thunder")`.

Dynamo captures graphs, with its guards, graph breaks and dynamic shapes; each graph is a module that `thunder.jit`
compiles, with derivatives, passes and executors of thunder's. A graph that thunder cannot capture runs as it is, with
one warning (`fallback="eager"`), or raises (`fallback="error"`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder.api import jit
from thunder.core.trace import Trace
from thunder.errors import OptionError
from thunder.inspect.queries import last_backward_traces, last_traces
from thunder.runtime.autograd import ThunderFunction

__all__ = ["ThunderCompiler", "WithDynamo", "backend", "thunderfx"]


class ThunderCompiler:
    """A backend of torch.compile: `torch.compile(fn, backend=ThunderCompiler(executors=["sdpa"]))`.

    thunder_options: the options of `thunder.jit`, which raises for those that are not valid. subgraphs: the compiled
    graphs, in the order in which Dynamo captured them.
    """

    def __init__(self, **thunder_options: Any):
        jit(**thunder_options)  # raises
        self.thunder_options = thunder_options
        self.subgraphs: list[Callable] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence) -> Callable:
        """The compiled graph. Numbers that are symbolic in Dynamo are symbolic from the first call on."""
        _leave_backwards_alone()
        _ = graph.code  # Dynamo's graphs write their code when it is first asked for, which is no part of the program
        symbolic = any(isinstance(size, torch.SymInt) for x in example_inputs for size in _sizes(x))
        known = {"dynamic": True, "cache": "symbolic values"} if symbolic else {}
        compiled = jit(graph, **known | self.thunder_options)
        self.subgraphs.append(compiled)
        return compiled


@functools.cache
def _leave_backwards_alone() -> None:
    """Keep Dynamo from compiling thunder's own Python, which a backward runs under frames that Dynamo evaluates."""
    ThunderFunction.backward = staticmethod(torch.compiler.disable(ThunderFunction.backward))


def _sizes(x: Any) -> Sequence:
    return x.shape if isinstance(x, torch.Tensor) else (x,)


def backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence, *, mode: str | None = None, options: dict | None = None
) -> Callable:
    """The backend that torch.compile knows as "thunder". options: those of `thunder.jit`. It has no modes."""
    if mode not in (None, "default"):
        raise OptionError(f"mode={mode!r} is an option of Inductor; pass options={{...}} with options of thunder.jit")
    return ThunderCompiler(**options or {})(graph, example_inputs)


class WithDynamo:
    """A function or module that Dynamo captures and thunder compiles. Its attributes are those of
    torch.compile's result: parameters, state dict, mode."""

    def __init__(self, fn: Callable, compiler: ThunderCompiler, **dynamo_options: Any):
        self._backend, self._function = compiler, torch.compile(fn, backend=compiler, **dynamo_options)
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args, **kwargs):
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._function, name)

    @property
    def last_traces(self) -> list[Trace]:
        """The last forward program of each graph that has run."""
        return [last_traces(g)[-1] for g in self._backend.subgraphs if g.programs]

    @property
    def last_backward_traces(self) -> list[Trace]:
        """The last backward program of each graph that has run and has one."""
        return [traces[-1] for g in self._backend.subgraphs if g.programs and (traces := last_backward_traces(g))]


_OF_DYNAMO = ("fullgraph", "dynamic", "disable")


def thunderfx(fn: Callable, /, **options: Any) -> WithDynamo:
    """`torch.compile(fn, backend=ThunderCompiler(...))`, with the traces of its graphs.

    options: fullgraph, dynamic and disable are torch.compile's, all others those of `thunder.jit`.
    """
    of_dynamo = {name: options.pop(name) for name in _OF_DYNAMO if name in options}
    return WithDynamo(fn, ThunderCompiler(**options), **of_dynamo)
