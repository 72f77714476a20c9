"""Calls of operations whose ints come from the shape of another tensor, at several sizes: what property tests of
symbolic sizes generate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from thunder.core.proxies import map_structure

REFUSALS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AssertionError,
    OverflowError,
    ArithmeticError,
)
MOST = 100  # an int beyond it stays a constant


def is_size(x) -> bool:
    return type(x) is int and 2 <= x <= MOST


def ints_in(structure) -> list[int]:
    results: list[int] = []
    map_structure(lambda x: results.append(x) if is_size(x) else None, structure)
    return results[:8]


def resized(t: torch.Tensor, shape) -> torch.Tensor:
    """A tensor of another shape with the values of `t`, repeated."""
    count = torch.Size(shape).numel()
    flat = t.detach().reshape(-1)
    return (flat.repeat(-(-count // max(1, flat.numel())))[:count] if flat.numel() else flat.new_zeros(count)).reshape(
        shape
    )


class Call:
    """A call of `function`, of which the tensors and the ints in `arguments`, (args, kwargs), are what varies."""

    def __init__(self, function: Callable, arguments: tuple):
        self.function, self.arguments = function, arguments
        self.tensors: list[torch.Tensor] = []
        map_structure(lambda x: self.tensors.append(x) if isinstance(x, torch.Tensor) else None, arguments)
        self.ints = ints_in(arguments)

    def program(self, meter: torch.Tensor, *tensors: torch.Tensor):
        """The call, with the sizes of `meter` for its ints. A tuple of sizes is a slice of `meter.shape`."""
        places, inputs = iter(range(len(self.ints))), iter(tensors)

        def filled(x):
            if isinstance(x, tuple) and x and all(map(is_size, x)):
                taken = [index for index, _ in zip(places, x)]
                if len(taken) == len(x):
                    return meter.shape[taken[0] : taken[-1] + 1]
                return (*(meter.shape[index] for index in taken), *x[len(taken) :])
            if isinstance(x, (tuple, list)):
                return type(x)([filled(e) for e in x])
            if isinstance(x, dict):
                return {k: filled(e) for k, e in x.items()}
            if isinstance(x, torch.Tensor):
                return next(inputs)
            index = next(places, None) if is_size(x) else None
            return x if index is None else meter.shape[index]

        args, kwargs = self.arguments
        return self.function(*[filled(a) for a in args], **{k: filled(v) for k, v in kwargs.items()})

    def inputs(self) -> Iterator[list[torch.Tensor]]:
        """What the program is called with: as sampled, all sizes one larger, all doubled, one int larger and one
        smaller."""

        def operands(ints, size):
            return [torch.zeros(()).expand(ints), *(resized(t, [size(n) for n in t.shape]) for t in self.tensors)]

        yield operands(self.ints, lambda n: n)
        for larger in (lambda n: n + 1, lambda n: 2 * n):
            yield operands([larger(n) for n in self.ints], lambda n, larger=larger: larger(n) if n > 1 else n)
        for i, change in itertools.product(range(len(self.ints)), (1, -1)):
            yield operands([n + change * (i == j) for j, n in enumerate(self.ints)], lambda n: n)


def outcome(program: Callable, inputs: list[torch.Tensor], gradients: bool):
    """The result of a program for copies of the inputs, and the gradients of its floating inputs."""
    copies = [t.detach().clone() if i else t for i, t in enumerate(inputs)]
    leaves = [t.requires_grad_() for t in copies[1:] if gradients and (t.dtype.is_floating_point or t.dtype.is_complex)]
    torch.manual_seed(0)
    result = program(*copies)
    outputs: list[torch.Tensor] = []
    map_structure(lambda x: outputs.append(x) if isinstance(x, torch.Tensor) and x.requires_grad else None, result)
    if not leaves or not outputs:
        return result, None
    return result, torch.autograd.grad(
        outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True, materialize_grads=True
    )
