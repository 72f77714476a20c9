"""Which inputs of a compiled function autograd wants gradients of, while its backward runs.

`torch.autograd.grad(result, inputs)` and `backward(inputs=...)` want some. The backward computes all gradients, but its
effects are those of the way to the inputs that are wanted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from thunder import compat

_running = threading.local()


@contextlib.contextmanager
def backward_of(ctx: Any, names: Sequence[str]) -> Iterator[None]:
    """Around a backward. ctx: of the `torch.autograd.Function`. names: of its tensors."""
    before = getattr(_running, "wanted", None)
    _running.wanted = dict(zip(names, map(compat.will_run, ctx.next_functions), strict=True))
    try:
        yield
    finally:
        _running.wanted = before


def wants(names: Sequence[str]) -> bool:
    """Whether the gradient of one of these inputs is wanted. True for those that are not known."""
    wanted = getattr(_running, "wanted", None)
    return wanted is None or not names or any(wanted.get(name, True) for name in names)
