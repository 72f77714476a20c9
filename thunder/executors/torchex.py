"""The torch executor: runs each operation that is a PyTorch function by calling that function.

There is no table here: the function follows from the definition of the operation (`thunder.ops.registry`).
"""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import Executor, Implementation, add_always_executor, register_executor
from thunder.ops.infer import no_autocast as no_autocast  # traces import it from here
from thunder.ops.registry import torch_path


class TorchExecutor(Executor):
    """Executes all operations with a PyTorch function."""

    capturable = True

    def implementation(self, operation: BoundSymbol) -> Implementation | None:
        implementation = super().implementation(operation)
        if implementation is not None:
            return implementation
        symbol = operation.sym
        if symbol.fn is None or symbol.executor is not None:
            return None
        implementation = self.implmap[symbol.id] = Implementation(_execution_symbol(symbol), None, None)
        return implementation


def _execution_symbol(symbol: Symbol) -> Symbol:
    """The symbol that prints and calls the PyTorch function of an operation."""
    if symbol.module is not None and symbol.module.startswith("torch.ops"):
        path = symbol.module, symbol.name
    elif isinstance(symbol.fn, compat.OpOverload):
        path = "torch.ops." + symbol.fn._schema.name.replace("::", "."), symbol.fn._overloadname
    else:
        path = torch_path(symbol.fn) if symbol.module != "prims" or symbol.fn.__name__ != "<lambda>" else None
    module, name = path or (None, symbol.name if symbol.module is None else f"{symbol.name}_impl")
    return symbol.executed(name, symbol.fn, torch_ex, id=f"torch.{symbol.id}", module=module)


torch_ex = TorchExecutor("torch", version=torch.__version__, exact=True)
register_executor(torch_ex)
add_always_executor(torch_ex)
