"""The order in which eager PyTorch's backward accumulates the gradients of leaves.

Autograd runs the nodes of a graph in the reverse of the order in which the forward has made them. The gradient of a
leaf is added to `.grad` as soon as the last node that reads the leaf has run. Hooks behind the accumulation see that
order.
"""

from __future__ import annotations

import warnings

import torch

from thunder import compat
from thunder.core.proxies import Proxy, TensorProxy, leaves, map_structure, number_value
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.ops.infer import differentiates_fakes, example


def leaf_order(computation: Trace) -> list[int]:
    """Positions of the arguments of a program that require grad, in the order in which eager's backward accumulates
    their gradients, if all of them are leaves."""
    index_of = {a: i for i, a in enumerate(computation.args) if isinstance(a, TensorProxy) and a.requires_grad}
    order, left = list[list[Proxy]](), set(index_of)
    for operation in computation.bound_symbols:
        read = dict.fromkeys(i for i in operation.inputs if i in left)
        if read and any(isinstance(o, TensorProxy) and o.requires_grad for o in operation.outputs):
            left.difference_update(read)
            order.append(_order_in(operation, read) if len(read) > 1 else list(read))
    return [index_of[i] for read in reversed(order) for i in read]  # the first operation that reads a leaf decides


def _order_in(operation: BoundSymbol, read: dict[Proxy, None]) -> list[Proxy]:
    """The order in which one operation's backward accumulates: that of PyTorch's function, on tensors without data."""
    function, examples, seen = operation.sym.fn, dict[Proxy, torch.Tensor](), dict[Proxy, None]()
    if function is None or not differentiates_fakes(operation.inputs):
        return list(read)

    def argument(x):
        if not isinstance(x, TensorProxy):
            return example(x, value=number_value)
        if x not in examples:
            examples[x] = example(x, value=number_value, requires_grad=x.requires_grad)
            if x in read:
                examples[x].register_post_accumulate_grad_hook(lambda _: seen.setdefault(x))
        return examples[x]

    modes = compat.quiet_fake_tensors(), compat.probing(True), compat.FakeTensorMode()
    try:
        with modes[0], modes[1], modes[2], warnings.catch_warnings(action="ignore"):
            parts = map_structure(argument, operation.args), map_structure(argument, operation.kwargs)
            results = [x for x in leaves(function(*parts[0], **parts[1])) if isinstance(x, torch.Tensor)]
            results = [x for x in results if x.requires_grad]
            torch.autograd.backward(results, [torch.empty_like(x) for x in results])
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return list(read)
    return list(seen | read)
