"""Dynamo in front of thunder: `torch.compile(fn, backend="thunder")`.

Dynamo captures graphs, with its guards, graph breaks and dynamic shapes; each graph is a module that `thunder.jit`
compiles, with derivatives, passes and executors of thunder's. Where thunder refuses a node, that node runs by itself
between two compiled graphs: in eager PyTorch (`fallback="eager"`) or compiled by Inductor (`fallback="inductor"`), with
one warning. `fallback="error"` raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder.api import jit
from thunder.capture.state import EagerFunctions
from thunder.core.trace import Trace
from thunder.dynamo.parts import joined, parts_around, refused_node, user_line_of
from thunder.errors import FallbackWarning, OptionError, ThunderError, warn_user
from thunder.inspect.queries import last_backward_traces, last_traces
from thunder.options import FALLBACK_OPTIONS
from thunder.runtime.autograd import ThunderFunction
from thunder.transforms.cudagraph import CUDAGraphTransform

__all__ = ["GraphCall", "ThunderCompiler", "WithDynamo", "backend", "graph_calls", "thunderfx"]

INDUCTOR = "inductor"


class ThunderCompiler:
    """A backend of torch.compile: `torch.compile(fn, backend=ThunderCompiler(executors=["sdpa"]))`.

    fallback: what runs the nodes of a graph that thunder refuses: "eager" (the default), "inductor", or "error" for
    none. mode, inductor_options: those of torch.compile for what Inductor runs; OptionError without
    fallback="inductor". thunder_options: the options of `thunder.jit`, which raises for those that are not valid.

    subgraphs: the compiled graphs, in the order in which Dynamo captured them. A graph with refused nodes stands there
    as its parts.
    """

    def __init__(
        self, *, fallback: str = "eager", mode: str | None = None, inductor_options: dict | None = None,
        **thunder_options: Any,
    ):  # fmt: skip
        valid = [*(option.value for option in FALLBACK_OPTIONS), INDUCTOR]
        fallback = fallback.value if isinstance(fallback, FALLBACK_OPTIONS) else fallback
        if fallback not in valid:
            raise OptionError(f"fallback={fallback!r} is not an option; valid: {', '.join(map(repr, valid))}")
        if fallback != INDUCTOR and (mode or inductor_options):
            raise OptionError("mode= and inductor_options= are for what Inductor runs: pass fallback='inductor'")
        jit(**thunder_options)  # raises
        self.thunder_options, self.fallback = thunder_options, fallback
        self.of_inductor: dict[str, Any] = (
            {"mode": mode} if mode else {"options": inductor_options} if inductor_options else {}
        )
        self.subgraphs: list[Callable] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Sequence) -> Callable:
        """The compiled graph. Numbers that are symbolic in Dynamo are symbolic from the first call on."""
        _leave_backwards_alone()
        return self.compiled(graph, any(isinstance(size, torch.SymInt) for x in example_inputs for size in _sizes(x)))

    def compiled(self, graph: torch.fx.GraphModule, symbolic: bool) -> Callable:
        """A graph or a part of one, compiled. symbolic: whether it has numbers that are."""
        _ = graph.code  # Dynamo's graphs write their code when it is first asked for, which is no part of the program
        known: dict[str, Any] = {"dynamic": True, "cache": "symbolic values"} if symbolic else {}
        refuses = self.fallback == FALLBACK_OPTIONS.ERROR.value
        options: dict[str, Any] = known | self.thunder_options | {"fallback": "error" if refuses else "eager"}
        compiled = jit(graph, **options)
        self.subgraphs.append(compiled)
        if not refuses:
            compiled._compiled.otherwise = _InParts(self, graph, compiled, symbolic)
            # of these a refused node can be one; for Inductor it is to stay whole
            compiled._compiled.eager_functions = EagerFunctions(allowed=self.fallback != INDUCTOR)
        return compiled

    def refused(self, graph: torch.fx.GraphModule) -> Callable:
        """What runs a graph that thunder refuses."""
        if self.fallback != INDUCTOR:
            return graph
        return torch.compile(graph, backend=INDUCTOR, **self.of_inductor)


class _InParts:
    """Runs a graph that thunder refuses: in parts around what it refuses."""

    def __init__(self, compiler: ThunderCompiler, graph: torch.fx.GraphModule, compiled: Any, symbolic: bool):
        self.compiler, self.graph, self.compiled, self.symbolic = compiler, graph, compiled, symbolic
        self.parts: Callable | None = None

    def __call__(self, args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """The result, and whether a warning has said already what runs."""
        error = self.compiled._compiled.refused
        if self.parts is None and error is None:  # another reason to run the original
            return self.graph(*args, **kwargs), False
        if self.parts is None:
            self.parts = self._split(error)
        return self.parts(*args, **kwargs), True

    def _split(self, error: ThunderError) -> Callable:
        """The graph in parts: the refused nodes run by the fallback, those before and behind them are compiled."""
        parts = parts_around(self.graph, refused_node(self.graph, error))
        line, by = user_line_of(parts.refused), self.compiler.fallback
        whole = "" if parts.before or parts.behind else ", all that Dynamo has captured there"
        nodes = ", ".join(node.name for node in parts.refused[:4]) + (", ..." if len(parts.refused) > 4 else "")
        warn_user(
            f"{nodes}{f' ({line})' if line else ''}{whole}: runs by fallback={by!r} in each call, because: {error}",
            FallbackWarning,
        )
        graphs = self.compiler.subgraphs
        index, known = next(i for i, g in enumerate(graphs) if g is self.compiled), len(graphs)

        def compiled(name: str, part: torch.fx.GraphModule) -> Callable:
            return self.compiler.refused(part) if name == "refused" else self.compiler.compiled(part, self.symbolic)

        module = joined(self.graph, parts, compiled)
        graphs[:] = [*graphs[:index], *graphs[known:], *graphs[index + 1 : known]]
        return module


@functools.cache
def _leave_backwards_alone() -> None:
    """Keep Dynamo from compiling thunder's own Python, which a backward runs under frames that Dynamo evaluates."""
    ThunderFunction.backward = staticmethod(torch.compiler.disable(ThunderFunction.backward))  # type: ignore[method-assign]


def _sizes(x: Any) -> Sequence:
    return x.shape if isinstance(x, torch.Tensor) else (x,)


# mode= of torch.compile: the options of thunder.jit that have its meaning. It asks for them once for each graph.
_MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "reduce-overhead": lambda: {"transforms": [CUDAGraphTransform()]},
    "max-autotune": lambda: {"transforms": [CUDAGraphTransform()], "autotune": True},
    "max-autotune-no-cudagraphs": lambda: {"graphs": False, "autotune": True},
}


def backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence, *, mode: str | None = None, options: dict | None = None
) -> Callable:
    """The backend that torch.compile knows as "thunder".

    mode: of torch.compile; thunder has CUDA graphs for "reduce-overhead", tuned kernels for
    "max-autotune-no-cudagraphs", and both for "max-autotune". options: those of `thunder.jit`, and those of
    `ThunderCompiler`. Raises OptionError for another mode, TypeError for options that neither has.
    """
    if mode not in (None, *_MODES):
        raise OptionError(f"mode={mode!r} is not a mode of thunder; valid: {', '.join(map(repr, _MODES))}")
    return ThunderCompiler(**_MODES[mode or "default"]() | (options or {}))(graph, example_inputs)


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

    options: fullgraph, dynamic and disable are torch.compile's, all others those of `ThunderCompiler`.
    """
    of_dynamo = {name: options.pop(name) for name in _OF_DYNAMO if name in options}
    return WithDynamo(fn, ThunderCompiler(**options), **of_dynamo)


class GraphCall(NamedTuple):
    """A call of a graph of Dynamo's: the graph, compiled by `thunder.jit`, and its arguments."""

    graph: Any
    args: tuple


class _Noting(ThunderCompiler):
    """Notes the calls of its graphs."""

    def __init__(self, calls: list[GraphCall]):
        super().__init__()
        self.calls = calls

    def compiled(self, graph: torch.fx.GraphModule, symbolic: bool) -> Callable:
        """The compiled graph, whose calls are noted."""
        compiled = super().compiled(graph, symbolic)

        def call(*args: Any) -> Any:
            before = len(self.subgraphs)
            self.calls.append(GraphCall(compiled, args))
            result = compiled(*args)
            if len(self.subgraphs) != before:  # its parts have noted theirs
                self.calls[:] = [c for c in self.calls if c.graph is not compiled]
            return result

        return call


def graph_calls(fn: Callable, /, *args: Any, **kwargs: Any) -> list[GraphCall]:
    """Runs `fn(*args, **kwargs)` under Dynamo, and gives the calls of its graphs, in order, for all that takes a
    compiled function and its arguments:

        for graph, inputs in thunder.dynamo.graph_calls(model, x):
            print(thunder.explain(graph, *inputs))
            thunder.report(graph, "graph.html", *inputs)

    fn: what torch.compile takes, or its result. A graph with refused nodes stands there as its parts.
    """
    calls: list[GraphCall] = []
    fn = fn._function if isinstance(fn, WithDynamo) else fn
    torch.compile(getattr(fn, "_orig_mod", fn), backend=_Noting(calls))(*args, **kwargs)
    return calls
