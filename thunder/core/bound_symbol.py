"""Bound symbols: the operations of a trace.

Traces are flat: a composite is one bound symbol. Its decomposition (`bound_symbol.subsymbols`) is made when it is first
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thunder.core.codegen import Printer
from thunder.core.definition import Unfit
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, leaves, map_structure, numbers_in, proxies_in
from thunder.core.recording import Context, detached
from thunder.errors import DataDependentError

if TYPE_CHECKING:
    from thunder.core.symbol import Symbol

_KEPT: Any = object()  # of `BoundSymbol.replace`


class BoundSymbol:
    """One operation of a trace: `output = sym(*args, **kwargs)`. `inputs` and `outputs` are the proxies in it, flat.
    Never changed once made."""

    __slots__ = (
        "sym", "args", "kwargs", "output", "context", "inputs", "outputs", "location", "header", "_subsymbols",
        "aliases", "__weakref__",
    )  # fmt: skip

    def __init__(
        self,
        sym: Symbol,
        args: tuple,
        kwargs: dict,
        output,
        *,
        context: Context | None = None,
        inputs=None,
        outputs=None,
        location=None,
    ):
        self.sym, self.args, self.kwargs, self.output, self.context = sym, args, kwargs, output, context
        self.inputs: tuple[Proxy, ...] = tuple(proxies_in(kwargs, proxies_in(args, []))) if inputs is None else inputs
        self.outputs: tuple[Proxy, ...] = tuple(proxies_in(output, [])) if outputs is None else outputs
        self.location, self.header = location, ""
        self._subsymbols: tuple[BoundSymbol, ...] | None = None
        self.aliases: dict[Proxy, Any] = {}  # by output that the decomposition does not compute, the input that it is

    flat_proxy_args = property(lambda self: self.inputs)
    flat_proxy_outs = property(lambda self: self.outputs)
    tags = property(lambda self: self.sym.tags)

    @property
    def subsymbols(self) -> tuple[BoundSymbol, ...]:
        """The decomposition: operations that compute the same outputs, under the same names. Empty for a prim, and
        where it depends on data-dependent sizes."""
        if self._subsymbols is None and self.sym.decomposition is not None:
            number = next((n for n in numbers_in([self.args, self.kwargs], []) if not n.unbacked), None)
            if number is not None and number.decisions.closed:  # somebody looks at a program that is made
                with number.decisions.anew({}):
                    return self._decompose()
            self._subsymbols = self._decompose()
        return self._subsymbols or ()

    def _decompose(self) -> tuple[BoundSymbol, ...]:
        with detached(self.context) as inner:
            inner.location = lambda: self.location
            try:
                result = self.sym.decomposition(*self.args, **self.kwargs)  # type: ignore[misc]
            except (DataDependentError, Unfit):  # another one for other sizes; none for these arguments
                return ()
        if result is None and self.output is not None:
            return ()
        operations, self.aliases = adopt(inner.bound_symbols, result, self.output)
        return tuple(operations)

    @property
    def primitive(self) -> BoundSymbol | None:
        """The one primitive that a composite is: `prims.tanh` of `ltorch.tanh`."""
        found = self
        while len(found.subsymbols) == 1:
            found = found.subsymbols[0]
        return found if found.sym.is_prim and found.sym.executor is None else None

    def replace(
        self,
        *,
        sym: Any = _KEPT,
        args: Any = _KEPT,
        kwargs: Any = _KEPT,
        output: Any = _KEPT,
        subsymbols: Any = _KEPT,
        context: Any = _KEPT,
    ) -> BoundSymbol:
        """A copy with some of sym, args, kwargs, output, subsymbols, context changed. `from_bsym` is the same."""
        reads_same, writes_same = args is _KEPT and kwargs is _KEPT, output is _KEPT
        new = BoundSymbol(
            self.sym if sym is _KEPT else sym,
            self.args if args is _KEPT else args,
            self.kwargs if kwargs is _KEPT else kwargs,
            self.output if writes_same else output,
            context=self.context if context is _KEPT else context,
            inputs=self.inputs if reads_same else None,
            outputs=self.outputs if writes_same else None,
            location=self.location,
        )
        new.header = self.header
        if subsymbols is not _KEPT:
            new._subsymbols = tuple(subsymbols)
        elif reads_same and writes_same and sym is _KEPT:
            new._subsymbols, new.aliases = self._subsymbols, self.aliases
        return new

    from_bsym = replace

    def copied(self) -> BoundSymbol:
        """A copy with a decomposition of its own, whose decisions about sizes hold for the copy."""
        new = self.replace()
        if self._subsymbols is not None:
            new._subsymbols = tuple(operation.copied() for operation in self._subsymbols)
        return new

    def swap(self, table: dict[Proxy, Any]) -> BoundSymbol:
        """A copy that reads and writes other values: `table` maps proxies to what takes their place."""
        reads_same, writes_same = table.keys().isdisjoint(self.inputs), table.keys().isdisjoint(self.outputs)
        if reads_same and writes_same:
            return self

        def swapped(x):
            if type(x) is TensorProxy:
                return table.get(x, x)
            return table.get(x, x) if isinstance(x, Proxy) else x.renamed(table) if isinstance(x, NumberProxy) else x

        new = BoundSymbol(
            self.sym,
            self.args if reads_same else map_structure(swapped, self.args),
            self.kwargs if reads_same or not self.kwargs else map_structure(swapped, self.kwargs),
            self.output if writes_same else map_structure(swapped, self.output),
            context=self.context,
            inputs=self.inputs if reads_same else None,
            outputs=self.outputs if writes_same else None,
            location=self.location,
        )
        if self._subsymbols:
            new._subsymbols = tuple(s.swap(table) for s in self._subsymbols)
        return new

    def has_input(self, proxy: Proxy) -> bool:
        return any(p is proxy for p in self.inputs)

    @property
    def rhs(self):
        """A hashable key of the right-hand side: equal for two operations that compute the same."""
        return (self.sym.id, self.sym.module, hashable(self.args), hashable(self.kwargs))

    def __repr__(self) -> str:
        return "\n".join(Printer(print_depth=1).line(self))

    def python(self, indent: int = 0, commented: bool = False, print_depth: int = 1) -> list[str]:
        return Printer(print_depth=print_depth).line(self, indent, commented)


def adopt(operations: list[BoundSymbol], result, wanted) -> tuple[list[BoundSymbol], dict[Proxy, Any]]:
    """Lets `operations`, whose result is `result`, compute the values of `wanted`, a structure of the same form.

    Values keep their names from pass to pass: results of the operations get the names of the values that they replace.
    Returns the operations, and a dict from each wanted value that they do not compute to the input, number or other
    wanted value that it is. Raises ValueError where the structures differ in length.
    """
    if type(result) is type(wanted) is TensorProxy:
        pairs = [(result, wanted)]
    else:
        pairs = list(zip(leaves(result), leaves(wanted), strict=True))
    made = {o for operation in operations for o in operation.outputs}
    table: dict[Proxy, Any] = {}
    for new, old in pairs:
        if isinstance(new, Proxy) and isinstance(old, Proxy) and new in made and new not in table:
            table[new] = old
    aliases = {
        old: table.get(new, new) if isinstance(new, Proxy) else new for new, old in pairs if isinstance(old, Proxy)
    }
    aliases = {old: new for old, new in aliases.items() if new is not old}
    changed = {new: old for new, old in table.items() if new is not old}
    return [operation.swap(changed) for operation in operations] if changed else list(operations), aliases


def hashable(x):
    """A hashable form of a structure of arguments: proxies by identity; 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(x, NumberProxy):
        return (NumberProxy, x.expression)
    if isinstance(x, Proxy):
        return x
    if isinstance(x, (tuple, list)):
        return (type(x).__name__, *map(hashable, x))
    if isinstance(x, dict):
        return ("dict", *((k, hashable(v)) for k, v in x.items()))
    if isinstance(x, slice):
        return ("slice", hashable(x.start), hashable(x.stop), hashable(x.step))
    try:
        hash(x)
    except TypeError:
        return (type(x), id(x))
    return (type(x), repr(x) if isinstance(x, (float, complex)) else x)
