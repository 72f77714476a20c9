"""Triton kernels that a program launches: `kernel[grid](x, out, n, BLOCK=128)` becomes one operation, which launches
the kernel and returns the tensors that it wrote.

Which tensors a kernel writes is read off its source: those that lead to the address of a `tl.store` or an atomic
operation. Where the source does not say (a function that is not found, inline assembly), every tensor counts as
written. Grids and constants are Python values of the program; a grid that is a function is called while the program is
captured, once for each configuration of an autotuned kernel.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from thunder.capture.interface import Capture
from thunder.capture.world import IDENTITY
from thunder.core.proxies import NumberProxy, TensorProxy, map_structure
from thunder.ops.functionalize.mutating import call_mutating


def launchers() -> dict[Callable, Callable]:
    """function of triton's -> handler; empty while no program has imported triton."""
    table: dict[Callable, Callable] = {_run: _launch}
    for module, name in (
        ("jit", "JITFunction"),
        ("autotuner", "Autotuner"),
        ("autotuner", "Heuristics"),
        ("interpreter", "InterpretedFunction"),
    ):
        # None as well while a thread imports triton
        kind: Any = getattr(sys.modules.get(f"triton.runtime.{module}"), name, None)
        if hasattr(kind, "run"):
            table[kind.run] = _launch
        elif kind is not None:  # Triton's interpreter makes one for each kernel, before Triton 3.6
            table[kind.__getitem__] = lambda c, f, args, kwargs: functools.partial(_run, args[0], grid=args[1])
    return table


def _run(kernel, *args, grid, **kwargs) -> None:
    kernel[grid](*args, **kwargs)


def _launch(c: Capture, f, args, kwargs):
    """`kernel.run(*args, grid=..., warmup=False, **kwargs)`."""
    kernel, *args = args
    kwargs = dict(kwargs)
    grid = kwargs.pop("grid")
    if kwargs.pop("warmup", False):
        c.refuse("a Triton kernel is warmed up inside the program", "warm it up outside")
    source = c.world.sources.get(id(kernel))
    if source is not None:
        c.world.ask(source, IDENTITY)
    function, layers = _unwrapped(kernel)
    args, kwargs = _plain(c, list(args)), _plain(c, kwargs)
    arguments = _bound(function, args, kwargs)
    for name, heuristic in _heuristics(layers):
        arguments[name] = _plain(c, c.call(heuristic, [dict(arguments)], {}))
    launch, shown, grids = _launcher(c, kernel, grid, arguments, layers)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, TensorProxy)}
    wanted = written_parameters(function)
    written = [value for name, value in tensors.items() if wanted is None or name in wanted]
    c.synchronize()
    call_mutating(
        function.__name__,
        launch,
        tuple(args),
        {**kwargs, "grid": shown},
        written,
        meta=lambda *a, **k: None,
        symbol_id=("triton", function.__name__, id(kernel), grids),
    )


def _unwrapped(kernel) -> tuple[Callable, list]:
    """(the Python function of a kernel, the autotuners and heuristics around it)."""
    layers = []
    while not inspect.isfunction(kernel):
        layers.append(kernel)
        kernel = kernel.fn
    return kernel, layers


def _plain(c: Capture, value):
    """Arguments as a kernel takes them: containers read, numbers that are symbolic fixed."""
    from thunder.capture.operations import lifted

    return map_structure(lambda x: x.concrete() if isinstance(x, NumberProxy) else x, lifted(c, value))


def _bound(function: Callable, args: list, kwargs: dict) -> dict:
    """The kernel's parameters by name, as a grid function sees them."""
    parameters = inspect.signature(function).parameters
    arguments = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    return arguments | dict(zip(parameters, args)) | kwargs


def _heuristics(layers: list) -> list[tuple[str, Callable]]:
    tables = [layer.values for layer in layers if isinstance(getattr(layer, "values", None), dict)]
    return [item for table in tables for item in table.items()]


def _launcher(c: Capture, kernel, grid, arguments: dict, layers: list) -> tuple[Callable, object, tuple]:
    """(a function that launches the kernel, the grid as it is printed, the grids of all configurations: launches with
    other ones are another operation)."""
    tuned = next((layer.configs for layer in layers if hasattr(layer, "configs")), None)
    if not callable(grid):
        fixed = _grid(_plain(c, grid))
        return _with_grid(kernel, fixed), fixed, (fixed,)
    if tuned is None:
        fixed = _grid(_plain(c, c.call(grid, [dict(arguments)], {})))
        return _with_grid(kernel, fixed), fixed, (fixed,)
    grids = [
        (config.all_kwargs() | config.kwargs, _grid(_plain(c, c.call(grid, [arguments | config.all_kwargs()], {}))))
        for config in tuned
    ]

    def chosen(meta):
        return next(
            g for config, g in grids if all(meta.get(name) == value for name, value in config.items() if name in meta)
        )

    sizes = tuple(g for _, g in grids)
    return _with_grid(kernel, chosen), tuple(dict.fromkeys(sizes)), sizes


def _grid(sizes) -> tuple[int, ...]:
    return tuple(int(n) for n in sizes) if isinstance(sizes, (tuple, list)) else (int(sizes),)


def _with_grid(kernel, grid) -> Callable:
    def launch(*args, **kwargs):
        _run(kernel, *args, **kwargs | {"grid": grid})

    return launch


# ---------------------------------------------------------------- the tensors that a kernel writes


@functools.cache
def written_parameters(function: Callable) -> frozenset[str] | None:
    """Names of the parameters through which a kernel writes; None where its source does not say, so that it may be
    any."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    return _Addresses(function, tree).written()


class _Addresses:
    """The parameters that each variable of a kernel is computed from, but through loads from memory: a fixed point."""

    def __init__(self, function: Callable, tree: ast.FunctionDef):
        self.names = dict(inspect.getclosurevars(function).globals) | dict(inspect.getclosurevars(function).nonlocals)
        self.builtins = inspect.getclosurevars(function).builtins
        self.tree = tree
        self.parameters = frozenset(inspect.signature(function).parameters)
        self.roots: dict[str, frozenset[str]] = {name: frozenset({name}) for name in self.parameters}

    def written(self) -> frozenset[str] | None:
        """The names of the arguments that the kernel stores to; None where the source does not say."""
        before = None
        while before != self.roots:
            before = dict(self.roots)
            for node in ast.walk(self.tree):
                self._assignment(node)
        names: frozenset[str] = frozenset()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                more = self._writes(node)
                if more is None:
                    return None
                names |= more
        return names

    def _assignment(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For):
            self._bind(node.target, node.iter)

    def _bind(self, target: ast.AST, value: ast.expr) -> None:
        roots = self.of(value)
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.roots[node.id] = self.roots.get(node.id, frozenset()) | roots

    def of(self, node: ast.AST) -> frozenset[str]:
        """The parameters that an expression is computed from, as addresses are."""
        if isinstance(node, ast.Name):
            return self.roots.get(node.id, frozenset())
        if isinstance(node, ast.Call) and self._name(node) in ("load", "load_tensor_descriptor", "descriptor_load"):
            return frozenset()
        return frozenset().union(*map(self.of, ast.iter_child_nodes(node)))

    @staticmethod
    def _name(call: ast.Call) -> str:
        return getattr(call.func, "attr", getattr(call.func, "id", ""))

    def _writes(self, call: ast.Call) -> frozenset[str] | None:
        """The parameters that a call writes through; None where that is not known."""
        name, target = self._name(call), self._target(call.func)
        everything = self.of(ast.Tuple([*call.args, *(k.value for k in call.keywords)], ast.Load()))
        if name in _STORES or name.startswith("atomic_"):
            pointer = [*call.args[:1], *(k.value for k in call.keywords if k.arg in ("pointer", "desc"))]
            # a method of the object that holds the address
            through = pointer if _module_of(target).startswith("triton.") else [call.func]
            return frozenset().union(*map(self.of, through))
        if "inline_asm" in name or "inline_ptx" in name:
            return everything
        callee = getattr(target, "fn", None)
        if inspect.isfunction(callee):  # another function under triton.jit
            return self._through(callee, call)
        if target is None and isinstance(call.func, ast.Attribute) and self._target(call.func.value) is None:
            return frozenset()  # a method of a value: x.to(...), x.trans()
        known = _module_of(target).startswith(("triton.", "builtins")) or target in self.builtins.values()
        return None if everything and not (target is not None and known) else frozenset()

    def _through(self, callee: Callable, call: ast.Call) -> frozenset[str] | None:
        inner = written_parameters(callee) if not any(isinstance(a, ast.Starred) for a in call.args) else None
        if inner is None:
            return None
        order = list(inspect.signature(callee).parameters)
        passed = [*zip(order, call.args), *((k.arg, k.value) for k in call.keywords)]
        return frozenset().union(*(self.of(value) for parameter, value in passed if parameter in inner))

    def _target(self, node: ast.expr):
        """The object that a dotted name stands for, where the kernel's function sees it."""
        if isinstance(node, ast.Name):
            return None if node.id in self.roots else self.names.get(node.id, self.builtins.get(node.id))
        if isinstance(node, ast.Attribute):
            owner = self._target(node.value)
            return getattr(owner, node.attr, None) if owner is not None else None
        return None


_STORES = ("store", "tensor_descriptor_store", "store_tensor_descriptor", "descriptor_store")


def _module_of(target) -> str:
    return getattr(target, "__module__", None) or ""
