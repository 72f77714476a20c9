"""The parts of a graph of Dynamo's: the nodes that thunder refuses, and the graphs before and behind them.

A graph that reads `a = ...; b = refused(a); c = ...` becomes a module that calls three others, in this order:

    before = self.before(x)        # compiled by thunder
    refused = self.refused(before)  # by whatever `fallback=` says
    behind = self.behind(refused)   # compiled by thunder, in parts again where it refuses another node

Nodes that change a state of PyTorch's (a mode, a level of torch.func, autocast) stay with all that lie between them.
"""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from thunder import compat
from thunder.errors import CaptureError, ThunderError
from thunder.interpreter import format_location

__all__ = ["Parts", "joined", "parts_around", "refused_node", "user_line_of"]


class Parts(NamedTuple):
    """The nodes of a graph without placeholders and output: those before a refused one, the refused ones, and those
    behind them."""

    before: list[Node]
    refused: list[Node]
    behind: list[Node]


def refused_node(graph: GraphModule, error: ThunderError) -> Node | None:
    """The node of a graph that capture was at when it was refused; None where the error does not say."""
    own = type(graph).forward.__code__.co_filename
    calls = list(error.calls) if isinstance(error, CaptureError) else []
    if error.bound_symbol is not None and error.bound_symbol.location is not None:
        calls.append(format_location(error.bound_symbol.location)[:2])
    line = next((number for filename, number in calls if filename == own), None)
    if line is None:
        return None
    written = re.match(r"\s*(\w+)\b", linecache.getline(own, line))
    return next((node for node in graph.graph.nodes if written and node.name == written[1] and _runs(node)), None)


def user_line_of(nodes: Iterable[Node]) -> str:
    """The user's line that nodes come from, as Dynamo notes it: `in model.py, line 3, in forward: y = f(x)`."""
    for node in nodes:
        lines = re.findall(r'File "(.*)", line (\d+), in (\S+)\s*\n?(.*)', node.stack_trace or "")
        if lines:
            filename, number, function, source = lines[-1]
            return f"{filename}:{number}, in {function}: {source.strip()}"
    return ""


def parts_around(graph: GraphModule, refused: Node | None) -> Parts:
    """The nodes around a refused one. All nodes are refused where it is None."""
    nodes = [node for node in graph.graph.nodes if _runs(node)]
    if refused is None:
        return Parts([], nodes, [])
    first = last = nodes.index(refused)
    spans = _spans_of_state(nodes)
    while True:  # until no span of state is cut
        cut = [(a, b) for a, b in spans if a <= last and b >= first and not (first <= a and b <= last)]
        # autograd lets nobody write to a view that a compiled program gives: it is taken behind that program
        cut += [(i, last) for i in _views_written_behind(nodes, first)]
        if not cut:
            break
        first, last = min(first, *(a for a, _ in cut)), max(last, *(b for _, b in cut))
    return Parts(nodes[:first], nodes[first : last + 1], nodes[last + 1 :])


def _runs(node: Node) -> bool:
    return node.op not in ("placeholder", "output", "get_attr")


def _spans_of_state(nodes: list[Node]) -> list[tuple[int, int]]:
    """From where to where a state of PyTorch's may differ from the one around the graph: from the first to the last of
    the nodes that change one. Those that a value connects (`exit_autocast(enter_autocast())`) are a span of their own.
    """
    positions = {node: i for i, node in enumerate(nodes) if _changes_state(node)}
    connected, single = list[tuple[int, int]](), list[int]()
    for node, i in positions.items():
        users = [positions[user] for user in node.users if user in positions]
        if users:
            connected.append((i, max(users)))
        elif not any(argument in positions for argument in node.all_input_nodes):
            single.append(i)
    return [*connected, *([(min(single), max(single))] if single else [])]


def _views_written_behind(nodes: list[Node], first: int) -> list[int]:
    """The places before `first` of views that nodes from there on write to."""
    written = {x for node in nodes[first:] if _writes(node) for x in node.all_input_nodes}
    return [i for i, node in enumerate(nodes[:first]) if node in written and _is_view(_example(node))]


def _is_view(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x._is_view()


def _writes(node: Node) -> bool:
    """Whether a node may write to its arguments, as its name says: `x.add_(1)`, `x[0] = y`, `x += y`, `out=`."""
    if node.target in _WRITING or "out" in node.kwargs:
        return True
    target: Any = node.target
    if isinstance(target, compat.OpOverload):
        return target._schema.is_mutable
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


_OPERATORS = {name.strip("_") for name in vars(operator) if name.startswith("__")}
_IN_PLACE = (name for name in _OPERATORS if name[0] == "i" and name[1:] in _OPERATORS)  # iadd, ior, ...
_WRITING = {operator.setitem, *(getattr(operator, name) for name in _IN_PLACE)}

_OF_NUMBERS = ("_operator", "operator", "math", "builtins")


def _changes_state(node: Node) -> bool:
    """Whether a node may change a state of PyTorch's: a call of a function of Python's that has to do with no tensor
    and no number."""
    if node.op != "call_function" or isinstance(node.target, compat.OpOverload):
        return False
    if getattr(node.target, "__module__", "") in _OF_NUMBERS or node.target in vars(math).values():
        return False
    return not any(isinstance(_example(x), (torch.Tensor, torch.SymInt)) for x in (node, *node.all_input_nodes))


def _example(node: Node) -> object:
    return node.meta.get("example_value", node.meta.get("val"))


def joined(graph: GraphModule, parts: Parts, compiled: Callable[[str, GraphModule], Callable]) -> GraphModule:
    """A module that computes what the graph does, and calls a module for each of its parts. compiled: gives it, of the
    name of a part and its graph."""
    outer, values, modules = Graph(), dict[Node, Node](), dict[str, torch.nn.Module]()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = outer.node_copy(node, values.__getitem__)
    (output,) = graph.graph.find_nodes(op="output")
    remaining = [*parts.before, *parts.refused, *parts.behind]
    for name, nodes in parts._asdict().items():
        if not nodes:
            continue
        remaining = remaining[len(nodes) :]
        inputs = [x for x in dict.fromkeys(a for node in nodes for a in node.all_input_nodes) if _is_given(x, nodes)]
        results = _read_by(nodes, [*remaining, output])
        module = compiled(name, _module(graph, nodes, inputs, results))
        modules[name] = module if isinstance(module, torch.nn.Module) else _Called(module)
        called = outer.call_module(name, tuple(values[x] for x in inputs))
        for i, result in enumerate(results):
            values[result] = outer.call_function(operator.getitem, (called, i))
    outer.output(torch.fx.map_arg(output.args[0], lambda node: _value(outer, modules, graph, values, node)))
    return GraphModule(modules, outer, "Parts")


class _Called(torch.nn.Module):
    """A function as a module, which a graph can call."""

    def __init__(self, function: Callable):
        super().__init__()
        self.forward = function


def _is_given(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether a part gets a value from outside: attributes of the module are its own."""
    return node not in nodes and node.op != "get_attr"


def _read_by(nodes: Sequence[Node], others: Iterable[Node]) -> list[Node]:
    """The values that others read, in their order."""
    users = set(others)
    return [node for node in nodes if not users.isdisjoint(node.users)]


def _module(graph: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    """The module of a part, which returns a tuple."""
    inner, values = Graph(), dict[Node, Node]()

    def value(node: Node) -> Node:
        if node not in values:
            assert node.op == "get_attr", "all other values are inputs of the part"
            values[node] = inner.get_attr(str(node.target))
        return values[node]

    for node in inputs:
        values[node] = inner.placeholder(node.name)
        values[node].meta = dict(node.meta)
    for node in nodes:
        values[node] = inner.node_copy(node, value)
    inner.output(tuple(values[node] for node in results))
    return GraphModule(graph, inner, type(graph).__name__)


def _value(outer: Graph, modules: dict, graph: GraphModule, values: dict[Node, Node], node: Node) -> Node:
    """A value that the whole graph returns."""
    if node not in values:
        assert node.op == "get_attr", "all other values are computed by a part"
        path = str(node.target)
        modules[path] = operator.attrgetter(path)(graph)
        values[node] = outer.get_attr(path)
    return values[node]
