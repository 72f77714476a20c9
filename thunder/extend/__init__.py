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
    """How many regions a fusion executor makes, as Lightning Thunder names it."""

    UNLIMITED = enum.auto()


class Implementation:
    """How an executor carries out one operation: a symbol with the same arguments, or a function that rewrites it in
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
        """Whether it says how the operation is carried out, and not its derivative alone."""
        return self.symbol is not None or self.execution_transform is not None

    def takes(self, operation: BoundSymbol) -> bool:
        """What the checker says; no where it asks about a data-dependent size, which has no answer."""
        if self.checker is None:
            return True
        try:
            who = f"the checker for {operation.sym.qualified_name}"
            with noted(who):
                return said_by(who, self.checker, operation.args, operation.kwargs)
        except DataDependentError:
            return False


class Executor:
    """A named carrier-out of operations. `implementation(operation)` says how it would execute an operation, or None.

    exact: its results and derivatives are PyTorch's bit for bit, so that `thunder.jit(..., numerics="eager")` may use
    it. capturable: its operations launch kernels and do nothing else on the host, so that a CUDA graph may record them.
    needs_sizes: what it makes is for sizes that are known: those of arguments do not become symbolic by themselves.
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
        """Whether it may take something of a program whose tensors are on devices of these kinds: "cpu", "cuda". Where
        it may not, it is asked nothing."""
        return True

    def expect_program(self) -> None:
        """A program is about to be captured: what takes long to start and will be needed may start now."""

    def register_rule(self, rule: Any) -> Any:
        """Programs that are compiled with this executor are rewritten by a rule (`thunder.rule`). Returns the rule.

        Raises OptionError for anything else.
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
        """Whether the operation may be part of a region that this executor runs."""
        return False

    def can_execute_or_fuse(self, operation: BoundSymbol) -> bool:
        return self.can_execute(operation) or self.can_fuse(operation)

    # --- fuel: a miscompilation is bisected by how many operations or regions an executor takes
    def get_fuel(self, amount: int = 1, /) -> bool:
        """Whether there is fuel for one more, which is used up."""
        if isinstance(self._fuel, FUEL_LEVEL):
            return True
        if self._fuel < amount:
            return False
        self._fuel -= amount
        return True

    def set_fuel(self, value: int | FUEL_LEVEL) -> None:
        """How many implementations or fusions this executor may still carry out, in the programs compiled from now
        on."""
        if not isinstance(value, FUEL_LEVEL) and (type(value) is not int or value < 0):
            raise OptionError(f"set_fuel({value!r}): fuel is a number of fusions, or FUEL_LEVEL.UNLIMITED")
        self._fuel = value

    def configured(self, options: Any) -> Executor:
        """This executor as the compile options of a `thunder.jit` ask for it. options: a JitOptions."""
        return self

    def planned(self) -> Executor:
        """This executor for programs that are looked at and never run (`thunder.distributed.plan`): it takes what it
        would take, on devices that need not be here."""
        return self

    def expect(self, trace: Trace) -> None:
        """Told of each program that was compiled with this executor, before it runs for the first time."""

    keeps_kernels = False  # whether another process finds on disk what this one has compiled ahead

    compiles_ahead = False  # whether `compile_ahead` does something, so that programs need not wait for its compiler

    def compile_ahead(self, forward: Trace, backward: Trace | None, strides: dict[str, tuple]) -> None:
        """Compiles what this executor has in a program that has not run, in a thread in the background; afterwards the
        program runs at once. strides: of its arguments, by name. Raises MissingImplementationError for what can only be
        compiled when it runs, RuntimeError where compiling fails, and `thunder.runtime.background.Ended` at the end of
        the process."""

    def unavailable(self) -> str | None:
        """Why this executor can take nothing here, in words; None where it can."""
        return None

    def get_execution_transform(self, operation: BoundSymbol) -> Callable | None:
        implementation = self.implementation(operation)
        return implementation.execution_transform if implementation else None

    def get_grad_transform(self, operation: BoundSymbol | Symbol) -> Callable | None:
        """The grad_transform registered for an operation; for a bound symbol, None as well where the checker says
        no."""
        implementation = (
            self.implmap.get(operation.id) if isinstance(operation, Symbol) else self.implementation(operation)
        )
        return implementation.grad_transform if implementation else None

    @property
    def lookasides(self) -> dict[Callable, Symbol]:
        """Functions that compiled programs call an operation of this executor for."""
        return self.replacements


class OperatorExecutor(Executor):
    """An executor that takes operations one by one."""

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
        """Makes a new operation that `fn` executes, and returns the symbol that programs call it by.

        Exactly one of `like` and `meta` types it. `meta` maps proxies to proxies and makes a primitive. `like` is
        written in thunder's operations, which become the decomposition. `replaces` names a function, or several, that
        compiled programs call this operation instead of. `module` prints and calls the function as an attribute of a
        module. bind_postprocess is shown each operation that a call records, and may return another in its place.
        python_printer(bound symbol, printer) gives the lines of text that a call is printed as, in the place of
        `outputs = name(arguments)`.

        Raises ValueError when both or neither of like and meta are given, or no `fn` can be found, and for a name that
        cannot be printed as one; TypeError for what is no function.
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
        """Says how this executor carries out an operation, instead of what was said before.

        `op` is called with the operation's arguments; or `execution_transform`, a function of the same arguments,
        rewrites it in terms of other operations. With a grad_transform alone the operation is executed by others.
        `checker`, called with the same arguments, says whether it can: without one it always can. `grad_transform`, a
        function of the same arguments, computes the result and says with get_grad and put_grads how the operation is
        differentiated. A torch function stands for the operation it is.

        Raises ValueError unless exactly one of op and execution_transform is given, TypeError for what is no operation
        or no function.
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
    """An executor, registered, with one operation that replaces `fn` (or `replaces`) in compiled programs.

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
    """Makes an executor known by its name; one of the same name is replaced."""
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
    """The executor of a name, None where there is none."""
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
    """Every registered executor."""
    _load()
    return tuple(_ALL.values())


def get_default_executors(on_gpus: bool = False) -> tuple[Executor, ...]:
    """The executors used when a call of thunder.jit names none, in the order they are asked. on_gpus: as they would be
    if there were a GPU here."""
    _load()
    return add_executor_lists(_ON_GPUS if on_gpus else (), _DEFAULT)


def get_always_executors() -> tuple[Executor, ...]:
    """The executors that are asked after all others."""
    _load()
    return tuple(_ALWAYS)


def set_default_executors(executors: Iterable[Executor]) -> None:
    _DEFAULT[:] = executors


def set_always_executors(executors: Iterable[Executor]) -> None:
    _ALWAYS[:] = executors


def add_default_executor(executor: Executor) -> None:
    """Puts an executor in front of the default ones."""
    remove_default_executor(executor)
    _DEFAULT.insert(0, executor)


def add_default_executor_of_gpus(executor: Executor, here: bool) -> None:
    """Puts an executor in front of the default ones, or, where it cannot run `here`, of those that would be the default
    ones on a machine with GPUs."""
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
    """Executors given as objects or registered names, the default ones for None, with the always-executors at the end.

    Raises OptionError (a ValueError) for a name that is not registered, and for what is no list.
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
    """Both lists, each executor once, at its first place."""
    return tuple(dict.fromkeys([*first, *second]))


# what stands in files of its own, which import this one
_ELSEWHERE = {
    "thunder.extend.fusion": ("FusionExecutor",),
    "thunder.extend.stateful": ("StatefulExecutor", "TemporaryExecutor"),
    "thunder.options": ("compile_option",),
}
__getattr__, __dir__ = names_from(__name__, _ELSEWHERE)
