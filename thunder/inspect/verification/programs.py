"""Reference programs of `thunder.verify`: operations as eager PyTorch runs them, also in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder.core.dtypes import complex128, dtype, float64
from thunder.core.proxies import Proxy, map_structure, settled
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import Trace
from thunder.executors.pythonex import python_ex
from thunder.executors.torchex import no_autocast, torch_ex
from thunder.ops.torch_types import from_tensor_dtype
from thunder.transforms.dispatch import dispatch

PYTORCH_EXECUTORS = (torch_ex, python_ex)


def in_float64(x):
    """A tensor or a dtype of real or complex numbers in double precision; the rest as it is."""
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.dtype.is_floating_point else x.to(torch.complex128) if x.dtype.is_complex else x
    if isinstance(x, (dtype, torch.dtype)):
        kind = from_tensor_dtype(x) if isinstance(x, torch.dtype) else x
        return float64 if kind.category == 2 else complex128 if kind.category == 3 else x
    return settled(x)


def perturbed(x, generator: torch.Generator):
    """`in_float64(x)`, each number changed by at most half a spacing of its dtype."""
    if not isinstance(x, torch.Tensor) or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return in_float64(x)
    noise = (torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5).to(x.device)
    return in_float64(x) * (1 + torch.finfo(x.dtype).eps * noise)


def reference_program(
    inputs: Sequence[Proxy], operations: Sequence[BoundSymbol], output, names, change: Callable = settled
) -> Callable:
    """The operations as PyTorch executes them. change: of their arguments, `in_float64` for double precision."""
    changed = []
    for operation in map(as_eager, operations):
        if operation.sym.executor is None:
            operation = operation.replace(
                args=map_structure(change, operation.args), kwargs=map_structure(change, operation.kwargs)
            )
        changed.append(operation)
    trace = dispatch(Trace("reference", inputs, changed, output, names), PYTORCH_EXECUTORS)
    return no_autocast(trace.python_callable())


def as_eager(operation: BoundSymbol) -> BoundSymbol:
    """An executor's own operation as eager runs it: the user's function that it replaces, or its own."""
    symbol, executor = operation.sym, operation.sym.executor
    if executor is None or executor in PYTORCH_EXECUTORS or symbol.is_fusion or symbol.decomposition is not None:
        return operation
    function = next((f for f, replaced in executor.replacements.items() if replaced is symbol), symbol.fn)
    eager = Symbol(
        symbol.name, symbol.meta, id=("eager", symbol.id), is_prim=True, tags=tuple(symbol.tags), fn=function
    )
    return operation.replace(sym=eager)


class generators_restored:
    """What is drawn in the block is drawn again after it."""

    def __enter__(self):
        self.states = [(g, g.get_state()) for g in generators()]

    def __exit__(self, *error):
        for g, state in self.states:
            g.set_state(state)


def generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def copied(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def named_pairs(structure, values) -> list[tuple[Proxy, Any]]:
    """The proxies in a structure with what stands in their places."""
    if isinstance(structure, Proxy):
        return [(structure, values)]
    if isinstance(structure, (tuple, list)) and isinstance(values, (tuple, list)):
        return [pair for s, v in zip(structure, values) for pair in named_pairs(s, v)]
    if isinstance(structure, dict) and isinstance(values, dict):
        return [pair for k in structure if k in values for pair in named_pairs(structure[k], values[k])]
    return []


def named_values(structure, values) -> dict[str, Any]:
    return {p.name: v for p, v in named_pairs(structure, values)}


def with_named_values(structure, values, table: dict):
    if isinstance(structure, Proxy):
        return table.get(structure.name, values)
    if isinstance(structure, (tuple, list)) and isinstance(values, (tuple, list)) and len(structure) == len(values):
        return (
            type(values)(with_named_values(s, v, table) for s, v in zip(structure, values))
            if type(values) in (tuple, list)
            else values
        )
    return values
