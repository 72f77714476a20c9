"""`thunder.examine`: can this program be compiled, and what is in it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from thunder.errors import ThunderError
from thunder.frontend.calls import NOT_OPERATIONS
from thunder.ops import inplace_of, lookup

__all__ = ["examine", "torch_calls"]


class _Calls(TorchFunctionMode):
    """Counts the torch functions that a program calls."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in NOT_OPERATIONS:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def torch_calls(fn: Callable, *args, **kwargs) -> Counter:
    """How often a run of `fn` in eager PyTorch calls each torch function."""
    with torch.no_grad(), _Calls() as calls:
        fn(*args, **kwargs)
    return calls.counts


def examine(fn: Callable, *args, **kwargs) -> None:
    """Runs `fn` in PyTorch, says which operations it uses and which of them thunder has no definition of, then compiles it and says how that went."""
    import thunder

    try:
        counts = torch_calls(fn, *args, **kwargs)
    except Exception as error:  # noqa: BLE001  it is reported: bad input is what people examine
        print(f"The program fails in PyTorch itself, before thunder is asked: {type(error).__name__}: {error}")
        return
    known = {f: n for f, n in counts.items() if lookup(f) is not None or inplace_of(f) is not None}
    unknown = {f: n for f, n in counts.items() if f not in known}
    share = 100 * len(known) // max(len(counts), 1)
    print(f"Found {len(counts)} distinct operations, of which {len(known)} ({share}%) are supported")
    if unknown:
        print("These are taken as opaque operations: PyTorch runs them, thunder does not look inside:")
        for f, n in sorted(unknown.items(), key=lambda item: -item[1]):
            print(f"  {resolve_name(f) or getattr(f, '__name__', f)}, called {n} times")
    compiled = thunder.jit(fn)
    try:
        with torch.no_grad():
            compiled(*args, **kwargs)
    except ThunderError as error:
        print(f"It cannot be compiled: {error}")
        return
    traces = thunder.last_traces(compiled)
    print(f"The program was compiled and run: {len(traces[0].bound_symbols)} operations captured, see thunder.last_traces")
    for edge in thunder.last_sharp_edges(compiled):
        print(f"  sharp edge: {edge}")
