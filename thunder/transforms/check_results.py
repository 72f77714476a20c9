"""Checked entrances: what an operation gives is compared with what was declared of it.

The declarations of users (`meta=` of an operation or of `thunder.opaque`, `register_fake` of a custom operator, the
batching rule of one) are believed while a program is compiled: sizes become constants, dtypes choose kernels, memory is
reused. So the results of operations that users declared are compared in the first call of each program: structure,
shape, dtype, device, numbers, and for custom operators strides; that a function shares no memory with its arguments and
does not write to them, unless it says so. A program for several sizes is compared for the first two, and where a
declared size is rounded (`n // 2`) for the first sixteen. After that the program is the one that `thunder.last_traces`
prints. `DebugOptions(check_traces=True)` compares every operation in
every call.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.core.codegen import Printer, compile_source, function_source
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, leaves, map_structure, type_string
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, hashable
from thunder.core.trace import Trace
from thunder.errors import DeclarationError, add_location
from thunder.ops.opaque import custom_operator
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype

# how many sizes of a program for several sizes are compared: a polynomial that is right for two is hardly wrong for a
# third, a quotient may be rounded wrongly where there is a remainder
_SIZES, _SIZES_OF_QUOTIENTS = 2, 16


def check_results(trace: Trace, where: Callable) -> None:
    """Makes the function of `trace` one that raises DeclarationError where a result of any operation is none of its
    meta rule's, in every call. where: (filename, line, function, source line) of an operation's location."""
    trace._callable = _with_checks(trace, where, lambda operation: True, None)


def check_entrances(trace: Trace, where: Callable) -> None:
    """Makes the function of `trace` one that compares the results of operations that users declared in the first call,
    and is the function of the text alone afterwards."""
    waiting = sum(map(_enters, trace.bound_symbols))
    if not waiting:
        return
    trace._callable = None
    plain = trace.python_callable()

    def passed() -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:  # a call that runs goes on with the code it has begun with
            checked.__code__ = plain.__code__

    checked = trace._callable = _with_checks(trace, where, _enters, passed, plain.__globals__)


def _enters(operation: BoundSymbol) -> bool:
    """Whether a result enters a program by a user's declaration."""
    subsymbols = operation._subsymbols
    declared = operation.sym.declared_outside
    if not declared and subsymbols and len(subsymbols) == 1:  # the operation in whose place an executor's runs
        declared = subsymbols[0].sym.declared_outside
    return declared and not _is_unchecked(operation)


def _is_unchecked(operation: BoundSymbol) -> bool:
    return operation.sym.fn is None or operation.sym.python_printer is not None or operation.sym.condition is not None


def _stands_for(operation: BoundSymbol) -> Sequence[BoundSymbol]:
    """The operation in whose place an executor's runs."""
    return operation._subsymbols if operation._subsymbols and len(operation._subsymbols) == 1 else ()


def _with_checks(
    trace: Trace,
    where: Callable,
    chosen: Callable[[BoundSymbol], bool],
    passed: Callable[[], None] | None,
    space: Any = None,
) -> Callable:
    """The program with checks in the places of chosen operations. Its lines stand where those of `trace` do."""
    known = {a.name for a in trace.args if isinstance(a, Proxy | NumberProxy)}
    operations = []
    for operation in trace.bound_symbols:
        if _is_unchecked(operation) or not chosen(operation):
            operations.append(operation)
        else:
            check = _Check(operation, where, passed)
            name = f"checked_{operation.sym.name}"
            symbol = Symbol(name, id=("checked", id(check)), is_prim=True, fn=check, executor=operation.sym.executor)
            sizes = map_structure(functools.partial(_sizes, known), operation.output)
            operations.append(operation.replace(sym=symbol, args=(sizes, *operation.args)))
        if operation.sym.name == "python_del":
            known -= {i.name for i in operation.inputs}
        known |= {o.name for o in operation.outputs}
    printer, plain = Printer(print_depth=1), function_source(trace, Printer(print_depth=1), include_decorators=False)
    source = function_source(trace.replace(bound_symbols=operations), printer, include_decorators=False)
    above = "\n" * (plain.count("\n") - source.count("\n"))  # imports of what is checked
    function = compile_source(above + source, trace.name, trace.info.objects | printer.context)
    for name, value in {} if space is None else space.items():
        function.__globals__.setdefault(name, value)
        if name in ("torch", "Tensor"):  # with the attributes that a text names (see `compile_source`)
            vars(function.__globals__[name]).update(vars(value))
    return function


def _sizes(known: set[str], x: Any) -> Any:
    """The declared sizes of a result, as the program computes them; None for one that it does not know here."""
    if not isinstance(x, TensorProxy):
        return None
    return tuple(
        n if not isinstance(n, NumberProxy) or not n.unbacked and known.issuperset(n.expression.symbols()) else None
        for n in x.shape
    )


class _Check:
    """Runs an operation, and compares what it gives."""

    def __init__(self, operation: BoundSymbol, where: Callable, passed: Callable[[], None] | None):
        """passed: called when enough calls were compared; None where each call is."""
        self.operation, self.where, self.passed = operation, where, passed
        self.seen: set = set()
        sizes = [n for o in operation.outputs if isinstance(o, TensorProxy) for n in o.shape]
        atoms = [a for n in sizes if isinstance(n, NumberProxy) for mono in n.expression.terms for a in mono]
        self.wanted = 1 if not atoms else _SIZES if all(type(a) is str for a in atoms) else _SIZES_OF_QUOTIENTS

    def __call__(self, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        operation = self.operation
        operands = [x for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        seen_sizes = hashable(sizes), *(x.shape for x in operands)
        if self.passed is not None and seen_sizes in self.seen:
            return operation.sym.fn(*args, **kwargs)  # type: ignore[misc]
        versions = [None if x.is_inference() else x._version for x in operands]
        result = operation.sym.fn(*args, **kwargs)  # type: ignore[misc]
        # a function that is called for its effect may return anything
        if operation.output is not None:
            if (problem := _difference(result, operation.output, sizes)) is not None:
                raise self.error(f"{problem}: correct the meta= of the operation, or the function that executes it")
            if (problem := _strides_differ(operation, result, args, kwargs)) is not None:
                raise self.error(f"{problem}: correct its fake implementation (register_fake)")
        if self.is_pure():
            if any(v is not None and v != x._version for v, x in zip(versions, operands, strict=True)):
                raise self.error(
                    "wrote to an argument: return a new tensor (x.clone()), or define it by torch.library.custom_op "
                    "with mutates_args="
                )
            layouts = {x.layout for x in leaves(result) if isinstance(x, torch.Tensor)} - {torch.strided}
            if layouts:
                raise self.error(f"returned a tensor of layout {min(map(str, layouts))}, which no meta rule says")
            if (problem := _sharing(result, operands)) is not None:
                raise self.error(f"{problem}: return a copy (result.clone())")
        self.seen.add(seen_sizes)
        if self.passed is not None and len(self.seen) == self.wanted:
            self.passed()
        return result

    def is_pure(self) -> bool:
        """Whether the operation says that it gives new tensors and writes to none, and a user said so."""
        symbol, inside = self.operation.sym, _stands_for(self.operation)
        symbols = [symbol, *(b.sym for b in (self.operation.subsymbols if symbol.is_fusion else inside))]
        if not (symbol.declared_outside or not symbol.is_fusion and any(s.declared_outside for s in symbols)):
            return False
        operator = custom_operator(self.operation.sym.fn)
        schema = operator and operator._schema
        tags = frozenset().union(*(s.tags for s in symbols))
        return tags.isdisjoint((OpTags.VIEW, OpTags.IN_PLACE)) and (
            schema is None or all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
        )

    def error(self, text: str) -> DeclarationError:
        error = DeclarationError(f"{self.operation.sym.qualified_name} {text}")
        if self.operation.location:
            add_location(error, self.where(self.operation.location))
        return error


def _difference(result: Any, said: Any, sizes: Any) -> str | None:
    """In words, how a result differs from the declared one. sizes: those of the declared tensors, in its structure."""
    if isinstance(said, (tuple, list)):
        if not isinstance(result, (tuple, list)) or len(result) != len(said):
            got = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
            return f"returned {got} where its meta rule says {len(said)} values"
        differences = (_difference(*three) for three in zip(result, said, sizes, strict=True))
        return next((d for d in differences if d is not None), None)
    if isinstance(said, dict):
        if not isinstance(result, dict) or list(result) != list(said):
            got = f"keys {list(result)}" if isinstance(result, dict) else f"a {type(result).__name__}"
            return f"returned {got} where its meta rule says a dict with keys {list(said)}"
        differences = (_difference(result[k], said[k], sizes[k]) for k in said)
        return next((d for d in differences if d is not None), None)
    if isinstance(said, TensorProxy):
        return _tensor_difference(result, said, sizes)
    if said is None or isinstance(said, Proxy | NumberProxy) or result is said:  # what has no name is dead
        return None
    is_foreign_number = isinstance(result, numbers.Number) and type(result) not in (bool, int, float, complex)
    if (type(said) is type(result) or is_foreign_number) and result == said:
        return None
    return f"returned {result!r} where its meta rule says {said!r}"


def _tensor_difference(result: Any, said: TensorProxy, sizes: tuple) -> str | None:
    """In words: how a result differs from what its meta rule says; None where it fits."""
    declared = f'where its meta rule says {said.name}: "{type_string(said)}"'
    if not isinstance(result, torch.Tensor):
        return f"returned a {type(result).__name__} {declared.replace('says ', 'says a tensor, ')}"
    dtype, device = from_tensor_dtype(result.dtype), from_tensor_device(result.device)
    fits = result.dim() == len(sizes) and all(m is None or n == m for n, m in zip(result.shape, sizes))
    if fits and (dtype, device) == (said.dtype, said.device):
        return None
    returned = TensorProxy("returned", shape=tuple(result.shape), dtype=dtype, device=device)
    now = "" if fits or all(type(n) is int for n in said.shape) else f", which is {list(sizes)} in this call"
    return f'returned "{type_string(returned)}" {declared}{now}'


def _strides_differ(operation: BoundSymbol, result: Any, args: tuple, kwargs: dict) -> str | None:
    """In words, how the strides of a custom operator's results differ from those that its fake implementation
    declares, which answer a program's questions about layouts."""
    function: Any = operation.sym.fn
    if not operation.sym.declared_outside or custom_operator(function) is None:
        return None
    declared = compat.run_on_fakes(function, args, kwargs)
    for r, f in zip(leaves(result), leaves(declared)):
        if isinstance(r, torch.Tensor) and isinstance(f, torch.Tensor) and r.layout is f.layout is torch.strided:
            if any(n > 1 and s != t for n, s, t in zip(r.shape, r.stride(), f.stride())) and r.numel():
                return f"returned strides {list(r.stride())} where its fake implementation says {list(f.stride())}"
    return None


def _sharing(result: Any, operands: list[torch.Tensor]) -> str | None:
    """In words, which memory a result shares that it does not say to share."""
    memory = {x.untyped_storage().data_ptr(): "an argument" for x in operands if x.layout is torch.strided}
    for x in leaves(result):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and (address := x.untyped_storage().data_ptr()):
            if address in memory:
                return f"returned a tensor that shares memory with {memory[address]}"
            memory[address] = "another result"
    return None
