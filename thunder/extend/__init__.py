"""Executors: who carries out the operations of a trace. Users extend thunder here.

An `OperatorExecutor` brings operations of its own (`register_operator`) and implementations of existing ones
(`register_implementation`). The executors given to `thunder.jit` are asked in their order; the always-executors,
`torch` and `python`, are asked last. A `FusionExecutor` takes regions.
"""

from __future__ import annotations

import enum
import importlib
import keyword
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thunder import compat
from thunder._lazy import names_from
from thunder.core.codegen import Printer
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace
from thunder.errors import (
    DataDependentError,
    OptionError,
    did_you_mean,
    noted,
    said_by,
    warn_user,
)

__all__ = [
    "Executor", "OperatorExecutor", "FusionExecutor", "StatefulExecutor", "TemporaryExecutor", "FUEL_LEVEL",
    "Implementation", "register_executor", "deregister_executor",
    "get_all_executors", "get_default_executors", "get_always_executors", "get_executor", "set_default_executors",
    "set_always_executors", "add_default_executor",
    "add_default_executor_of_gpus", "add_always_executor", "remove_default_executor", "remove_always_executor",
    "resolve_executors", "add_executor_lists", "single_op_executor",
]  # fmt: skip


class FUEL_LEVEL(enum.Enum):
    """The value of `Executor.set_fuel` that removes the limit."""

    UNLIMITED = enum.auto()


class Implementation:
    """How an executor runs an operation: by a symbol with the same arguments, or by a function that writes it in
    terms of other operations."""

    __slots__ = ("symbol", "checker", "execution_transform", "grad_transform")

    def __init__(
        self,
        symbol: Symbol | None,
        checker: Callable | None,
        execution_transform: Callable | None,
        grad_transform: Callable | None = None,
    ):
        self.symbol, self.checker = symbol, checker
        self.execution_transform, self.grad_transform = execution_transform, grad_transform

    @property
    def executes(self) -> bool:
        """Whether the implementation runs the operation, and does not only define its derivative."""
        return self.symbol is not None or self.execution_transform is not None

    def takes(self, operation: BoundSymbol) -> bool:
        """Returns the result of the checker; False if the checker branches on a data-dependent size."""
        if self.checker is None:
            return True
        try:
            who = f"the checker for {operation.sym.qualified_name}"
            with noted(who):
                return said_by(who, self.checker, operation.args, operation.kwargs)
        except DataDependentError:
            return False


class Executor:
    """Base class of executors, which run operations of a compiled program.

    `implementation(operation)` returns how the executor runs an operation, or None.

    Attributes:
        exact: Whether results and derivatives equal PyTorch's bit for bit. `numerics="eager"` uses only such executors.
        capturable: Whether the operations launch kernels and do nothing else on the host. Only such operations can be
            part of a CUDA graph.
        needs_sizes: Whether the executor needs a program for each size. Sizes of arguments then do not become symbolic
            automatically.
    """

    capturable = False
    needs_sizes = False
    # whether it implements some primitive, which programs have as an operation of thunder.torch
    takes_primitives = False
    in_use = False  # whether programs were compiled with it

    def __init__(self, name: str, *, version: str | None = None, exact: bool = False):
        self.name, self.version, self.exact = name, version, exact
        self.implmap: dict[Any, Implementation] = {}
        self.opmap: dict[str, Symbol] = {}
        self.replacements: dict[Callable, Symbol] = {}  # user's functions that are diverted to a symbol
        self.rules: list[Any] = []  # `register_rule` adds some
        self._fuel: int | FUEL_LEVEL = FUEL_LEVEL.UNLIMITED

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other) -> bool:
        return isinstance(other, Executor) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self):
        """Executors travel by name: the process that reads one has registered its own."""
        return _registered, (self.name,)

    def runs_on(self, kinds: set[str]) -> bool:
        """Returns whether the executor may run operations of a program whose tensors are on these kinds of devices,
        such as "cpu" and "cuda"."""
        return True

    def expect_program(self) -> None:
        """Called before a program is captured. Work that takes long, such as starting a compiler process, can begin
        here."""

    def register_rule(self, rule: Any) -> Any:
        """Adds a rule (`thunder.rule`) that is applied to all programs that are compiled with this executor. Returns
        the rule.

        Raises OptionError if the argument is not a rule.
        """
        from thunder.extend.rules import check_rules

        self.rules += check_rules([rule])
        if self.in_use:
            compat.note_registration()
        return rule

    def implementation(self, operation: BoundSymbol) -> Implementation | None:
        implementation = self.implmap.get(operation.sym.id)
        return implementation if implementation is not None and implementation.takes(operation) else None

    def can_execute(self, operation: BoundSymbol) -> bool:
        implementation = self.implementation(operation)
        return operation.sym.executor is self or implementation is not None and implementation.executes

    def can_fuse(self, operation: BoundSymbol) -> bool:
        """Returns whether the operation may be part of a region that this executor runs."""
        return False

    def can_execute_or_fuse(self, operation: BoundSymbol) -> bool:
        return self.can_execute(operation) or self.can_fuse(operation)

    # --- fuel: a miscompilation is bisected by how many operations or regions an executor takes
    def get_fuel(self, amount: int = 1, /) -> bool:
        """Uses up some fuel. Returns whether there was enough."""
        if isinstance(self._fuel, FUEL_LEVEL):
            return True
        if self._fuel < amount:
            return False
        self._fuel -= amount
        return True

    def set_fuel(self, value: int | FUEL_LEVEL) -> None:
        """Limits how many implementations or regions the executor may run in programs that are compiled from now on."""
        if not isinstance(value, FUEL_LEVEL) and (type(value) is not int or value < 0):
            raise OptionError(f"set_fuel({value!r}): fuel is a number of fusions, or FUEL_LEVEL.UNLIMITED")
        self._fuel = value

    def configured(self, options: Any) -> Executor:
        """Returns the executor that runs programs with these options (a JitOptions) of `thunder.jit`."""
        return self

    def planned(self) -> Executor:
        """Returns the executor for programs that are compiled and never run (`thunder.distributed.plan`). It takes
        the same operations as on the real devices, which this machine need not have."""
        return self

    def expect(self, trace: Trace) -> None:
        """Called with each program that was compiled with this executor, before its first run."""

    keeps_kernels = False  # whether another process finds on disk what this one has compiled ahead

    compiles_ahead = False  # whether `compile_ahead` does something, so that programs need not wait for its compiler

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        """Compiles the kernels of a program that has not run yet, in a background thread. strides: those of its
        arguments, by name. Raises MissingImplementationError if the kernels can only be compiled when the program
        runs, RuntimeError if compilation fails, and `thunder.runtime.background.Ended` at the end of the process."""

    def unavailable(self) -> str | None:
        """Returns why this executor cannot run on this machine, or None if it can."""
        return None

    def get_execution_transform(self, operation: BoundSymbol) -> Callable | None:
        implementation = self.implementation(operation)
        return implementation.execution_transform if implementation else None

    def get_grad_transform(self, operation: BoundSymbol | Symbol) -> Callable | None:
        """Returns the grad_transform that is registered for an operation. For a bound symbol, None also if its
        checker returns False."""
        implementation = (
            self.implmap.get(operation.id) if isinstance(operation, Symbol) else self.implementation(operation)
        )
        return implementation.grad_transform if implementation else None

    @property
    def lookasides(self) -> dict[Callable, Symbol]:
        """The functions that compiled programs replace by an operation of this executor, with these operations."""
        return self.replacements


class OperatorExecutor(Executor):
    """An executor that runs single operations."""

    def register_operator(
        self,
        name: str,
        *,
        like: Callable | None = None,
        meta: Callable | None = None,
        fn: Callable | None = None,
        tags: Sequence = (),
        module: Any = None,
        replaces: Callable | Sequence[Callable] | None = None,
        bind_postprocess: Callable[[BoundSymbol], BoundSymbol | None] | None = None,
        python_printer: Callable[[BoundSymbol, Printer], list[str]] | None = None,
    ) -> Symbol:
        """Creates an operation that `fn` executes, and returns its symbol.

        Args:
            name: The name of the operation in programs, a Python identifier.
            like: A function in operations that thunder knows. It defines the types of the results, the decomposition
                and the derivative. Pass either `like` or `meta`.
            meta: A function from proxies to proxies that defines the types of the results. The operation has no
                decomposition.
            fn: The function that runs, on real tensors.
            tags: `OpTags` of the operation.
            module: A module that has the function as an attribute. Programs print and call `module.name`.
            replaces: A function or several functions, which compiled programs replace by this operation.
            bind_postprocess: Called with each recorded call. Returns another bound symbol to replace it, or None.
            python_printer: `python_printer(bound_symbol, printer)` returns the lines that a call is printed as, instead
                of `outputs = name(arguments)`.

        Raises:
            ValueError: If both or neither of `like` and `meta` are given, there is no `fn`, or the name is not an
                identifier.
            TypeError: If an argument is not callable.
        """
        functions: Any = replaces if isinstance(replaces, (tuple, list)) else (replaces,)
        _check_callable(
            f"register_operator({name!r})",
            **{f"replaces[{i}]": function for i, function in enumerate(functions)},
            like=like,
            meta=meta,
            fn=fn,
            bind_postprocess=bind_postprocess,
            python_printer=python_printer,
        )
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"register_operator({name!r}): the name is printed in programs: give a Python identifier")
        if (like is None) == (meta is None):
            raise ValueError(f"register_operator({name!r}): give exactly one of like= and meta=")
        if fn is None and module is not None:
            fn = getattr(module, name)
        if fn is None:
            raise ValueError(f"register_operator({name!r}): give fn=, the function that executes it")
        symbol = Symbol(
            name, meta, id=f"{self.name}.{name}", module=getattr(module, "__name__", module), decomposition=like,
                is_prim=like is None, tags=tuple(tags),
            fn=fn, executor=self, python_printer=python_printer,
        )  # fmt: skip
        if bind_postprocess is not None:
            symbol.bind_postprocess = bind_postprocess
        self.opmap[name] = symbol
        self.replacements |= {function: symbol for function in functions if function is not None}
        return symbol

    def register_implementation(
        self, sym_or_id: Symbol | Any, op: Symbol | None = None, *, checker: Callable | None = None,
        execution_transform: Callable | None = None,
        grad_transform: Callable | None = None,
    ) -> None:  # fmt: skip
        """Defines how this executor runs an existing operation. Replaces an earlier definition.

        Args:
            sym_or_id: The operation: a symbol, or a torch function.
            op: An operation of this executor with the same arguments.
            checker: A function with the arguments of the operation that returns whether the executor takes it. Without
                it, the executor takes every call.
            execution_transform: A function with the arguments of the operation that writes it in terms of other
                operations, instead of `op`.
            grad_transform: A function with the arguments of the operation that computes the result, and defines the
                derivative with `get_grad` and `put_grads`. Without `op` and `execution_transform`, other executors run
                the operation.

        Raises:
            ValueError: If not exactly one of `op` and `execution_transform` is given, unless there is a
                `grad_transform` alone.
            TypeError: If `sym_or_id` is not an operation, or an argument is not callable.
        """
        _check_callable(
            "register_implementation",
            checker=checker,
            execution_transform=execution_transform,
            grad_transform=grad_transform,
        )
        if op is not None and not isinstance(op, Symbol):
            raise TypeError(
                f"register_implementation: op is a {type(op).__name__}: give the operation that register_operator "
                "returned for it"
            )
        if (op is None) == (execution_transform is None) and (op is not None or grad_transform is None):
            raise ValueError(
                "register_implementation: give exactly one of op and execution_transform, or a grad_transform alone"
            )
        known = operation_id(sym_or_id, self.opmap.values())
        self.implmap[known] = Implementation(op, checker, execution_transform, grad_transform)
        self.takes_primitives = self.takes_primitives or str(known).startswith("prims.")
        if self.in_use:
            compat.note_registration()


def operation_id(operation: Any, own: Iterable[Symbol] = ()) -> Any:
    """The id of an operation given as itself, as its id, or as a torch function that stands for it. own: operations of
    an executor that is not registered. Raises TypeError for another function, OptionError for an id that no operation
    has."""
    if isinstance(operation, str):
        _check_id(operation, own)
    if callable(operation) and not isinstance(operation, Symbol):
        from thunder.ops.registry import operation_of

        symbol = operation_of(operation)
        if symbol is None:
            name = getattr(operation, "__name__", type(operation).__name__)
            raise TypeError(
                f"{name} is no operation of thunder's: give an operation (thunder.torch.{name}), its id, or a torch "
                "function that stands for one"
            )
        operation = symbol
    if not isinstance(operation, (str, Symbol)) and not hasattr(operation, "id"):
        raise TypeError(
            f"{operation!r} is no operation: give an operation (thunder.torch.add), its id, or a torch function"
        )
    return getattr(operation, "id", operation)


def _check_id(identifier: str, own: Iterable[Symbol]) -> None:
    """Raises DeclarationError for the id of an operation that does not exist, and names the nearest one."""
    from thunder.ops.registry import LTORCH, PRIMS

    symbols = (own, LTORCH.values(), PRIMS.values(), *(e.opmap.values() for e in _ALL.values()))
    known = {s.id for table in symbols for s in table}
    if identifier in known or _is_operator(identifier):
        return
    name = identifier.rpartition(".")[2]
    near = did_you_mean(identifier, [i for i in known if isinstance(i, str)])
    near = f"did you mean 'ltorch.{name}'? " if name in LTORCH else near
    raise OptionError(f"no operation has the id {identifier!r}: {near}ids are ltorch.<name>, prims.<name>, or "
                      "<executor>.<name>, and thunder.torch has the operations themselves")  # fmt: skip


def _is_operator(identifier: str) -> bool:
    """Whether it is the id of an operator that was registered with torch.library."""
    if not identifier.startswith("torch.ops."):
        return False
    operator: Any = importlib.import_module("torch").ops
    for name in identifier.split(".")[2:]:
        operator = getattr(operator, name, None)
    return operator is not None


def _check_callable(what: str, **functions: Any) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{what}: {name}= is a function, not a {type(function).__name__}")


def single_op_executor(
    executor_name: str, op_name: str, fn: Callable, meta: Callable, *, version: str | None = None,
    replaces: Callable | None = None,
    tags: Sequence = (), checker: Callable | None = None, execution_transform: Callable | None = None,
        grad_transform: Callable | None = None,
) -> OperatorExecutor:  # fmt: skip
    """Registers an executor with one operation that replaces `fn` (or `replaces`) in compiled programs, and returns it.

    checker, execution_transform, grad_transform: see `register_implementation`.
    """
    executor = OperatorExecutor(executor_name, version=version)
    symbol = executor.register_operator(op_name, meta=meta, fn=fn, replaces=replaces or fn, tags=tags)
    if execution_transform is not None or grad_transform is not None:
        executor.register_implementation(
            symbol, checker=checker, execution_transform=execution_transform, grad_transform=grad_transform
        )
    register_executor(executor)
    return executor


# --- the registry

_ALL: dict[str, Executor] = {}
_DEFAULT: list[Executor] = []
_ALWAYS: list[Executor] = []
_ON_GPUS: list[Executor] = []  # those that would come before the default ones if there were a GPU here


def register_executor(executor: Executor) -> Executor:
    """Registers an executor under its name. An executor with the same name is replaced."""
    _ALL[executor.name] = executor
    for chain in (_DEFAULT, _ALWAYS, _ON_GPUS):
        chain[:] = [executor if e.name == executor.name else e for e in chain]
    return executor


def deregister_executor(executor: Executor | str) -> None:
    name = getattr(executor, "name", executor)
    _ALL.pop(name, None)  # type: ignore[arg-type]
    remove_default_executor(name)
    remove_always_executor(name)


def _load() -> None:
    """The executors that come with thunder register themselves when the registry is first asked."""
    if not _loading:
        _loading.append(True)
        for name in _OWN.split():
            importlib.import_module(f"thunder.executors.{name}")


_OWN = (
    "torchex pythonex inductor cpp_fuser triton_fuser cross_entropy linear_cross_entropy embedding_gradient "
    "apexex matvec sdpaex float8 few_bits"
)


_loading: list[bool] = []


def get_executor(name: str) -> Executor | None:
    """Returns the registered executor of this name, or None."""
    _load()
    return _ALL.get(name)


def _registered(name: str) -> Executor:
    executor = get_executor(name)
    if executor is None:
        raise OptionError(
            f"a compiled function was saved with executor {name!r}, which is not registered here; registered: "
            f"{', '.join(sorted(_ALL))}"
        )
    return executor


def get_all_executors() -> tuple[Executor, ...]:
    """Returns all registered executors."""
    _load()
    return tuple(_ALL.values())


def get_default_executors(on_gpus: bool = False) -> tuple[Executor, ...]:
    """Returns the executors that are used if `thunder.jit` gets none, in order of priority. on_gpus: return those of
    a machine with GPUs."""
    _load()
    return add_executor_lists(_ON_GPUS if on_gpus else (), _DEFAULT)


def get_always_executors() -> tuple[Executor, ...]:
    """Returns the executors that follow all others: `torch` and `python`."""
    _load()
    return tuple(_ALWAYS)


def set_default_executors(executors: Iterable[Executor]) -> None:
    _DEFAULT[:] = executors


def set_always_executors(executors: Iterable[Executor]) -> None:
    _ALWAYS[:] = executors


def add_default_executor(executor: Executor) -> None:
    """Inserts an executor before the default executors."""
    remove_default_executor(executor)
    _DEFAULT.insert(0, executor)


def add_default_executor_of_gpus(executor: Executor, here: bool) -> None:
    """Inserts an executor before the default executors of machines with GPUs, and, if it can run on this machine
    (`here`), before the default executors of this process."""
    if here:
        add_default_executor(executor)
    else:
        _ON_GPUS.insert(0, executor)


def add_always_executor(executor: Executor) -> None:
    remove_always_executor(executor)
    _ALWAYS.insert(0, executor)


def _named(executor: Executor | str) -> str:
    return getattr(executor, "name", executor)  # type: ignore[return-value]


def remove_default_executor(executor: Executor | str) -> None:
    _DEFAULT[:] = [e for e in _DEFAULT if e.name != _named(executor)]


def remove_always_executor(executor: Executor | str) -> None:
    _ALWAYS[:] = [e for e in _ALWAYS if e.name != _named(executor)]


_warned: set[str] = set()  # names of executors that a user was told about


def resolve_executors(executors: Iterable[Executor | str] | None) -> tuple[Executor, ...]:
    """Returns the executors for a list of executors and registered names, followed by the always-executors. None means
    the default executors.

    Raises:
        OptionError: If a name is not registered, or the argument is not a list. OptionError is a ValueError.
    """
    _load()
    if isinstance(executors, (str, Executor)) or not isinstance(executors, Iterable | None):
        described = repr(executors) if isinstance(executors, (str, Executor)) else f"a {type(executors).__name__}"
        raise OptionError(
            f"executors= is a list of executors or their names, not {described}: executors=[...]; registered: "
            f"{', '.join(sorted(_ALL))}"
        )
    chosen: list[Executor] = []
    for e in get_default_executors() if executors is None else executors:
        executor = e if isinstance(e, Executor) else _ALL.get(e) or _of_lightning(e)
        if executor is None:
            near = did_you_mean(e, _ALL)
            raise OptionError(f"no executor is called {e!r}; {near}registered: {', '.join(sorted(_ALL))}")
        if executors is not None and (why := executor.unavailable()) is not None and executor.name not in _warned:
            _warned.add(executor.name)
            warn_user(f"the executor {executor.name} has no effect here: {why}", UserWarning)
        chosen.append(executor)
    return add_executor_lists(chosen, _ALWAYS)


def _of_lightning(name: str) -> Executor | None:
    """What stands for an executor that Lightning Thunder has under this name, and thunder has not."""
    return importlib.import_module("thunder.compat.lightning").absent_executor(name)


def add_executor_lists(first: Iterable[Executor], second: Iterable[Executor]) -> tuple[Executor, ...]:
    """Concatenates two lists. An executor that is in both keeps its first position."""
    return tuple(dict.fromkeys([*first, *second]))


# what stands in files of its own, which import this one
_ELSEWHERE = {
    "thunder.extend.fusion": ("FusionExecutor",),
    "thunder.extend.stateful": ("StatefulExecutor", "TemporaryExecutor"),
    "thunder.options": ("compile_option",),
}
__getattr__, __dir__ = names_from(__name__, _ELSEWHERE)
