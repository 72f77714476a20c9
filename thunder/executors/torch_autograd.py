"""The connection to PyTorch's autograd: a compiled forward and its backward as one `torch.autograd.Function`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from thunder import _torch_compat as compat

__all__ = ["connected"]


class ThunderFunction(torch.autograd.Function):
    """Runs a compiled forward; its backward is the compiled backward. Printed as ThunderFunctionBackward."""

    @staticmethod
    def forward(ctx, program, *inputs):
        outputs, (tensors, others) = program.forward(*inputs)
        ctx.program, ctx.others = program, others
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if program.not_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in program.not_differentiable))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents):
        program = ctx.program
        saved = [list(ctx.saved_tensors), list(ctx.others)]
        ctx.maybe_clear_saved_tensors()
        if not compat.keeps_graph():
            ctx.others = ()
        given = [cotangents[i] for i in program.differentiable]
        del cotangents
        backward = program.backward if all(c is not None for c in given) else program.backward_without([i for i, c in enumerate(given) if c is None])
        return (None, *backward(saved, given))


class _Program:
    __slots__ = ("forward", "backward", "make_without", "without", "lock", "differentiable", "not_differentiable")

    def __init__(self, forward: Callable, backward: Callable, make_without: Callable, differentiable: list[int], not_differentiable: list[int]):
        self.forward, self.backward, self.make_without = forward, backward, make_without
        self.without: dict[tuple[int, ...], Callable] = {}
        self.lock = threading.Lock()
        self.differentiable, self.not_differentiable = differentiable, not_differentiable

    def backward_without(self, missing: list[int]) -> Callable:
        """The backward for outputs that play no part; compiled when first met, in whichever of autograd's threads."""
        key = tuple(missing)
        with self.lock:
            if key not in self.without:
                self.without[key] = self.make_without(missing)
            return self.without[key]


def connected(forward: Callable, backward: Callable, make_without: Callable, rebuild: Callable, requires_grad: list[bool]) -> Callable:
    """A function of the program's inputs: its result, connected to autograd.

    forward(*inputs) gives (outputs, (saved tensors, saved others)); backward(saved, cotangents) gives a gradient or None for each input; make_without(indices)
    gives the backward that is handed None for these cotangents; `rebuild(inputs, outputs)` makes the program's result. requires_grad says which outputs
    cotangents come for.
    """
    differentiable = [i for i, r in enumerate(requires_grad) if r]
    program = _Program(forward, backward, make_without, differentiable, [i for i, r in enumerate(requires_grad) if not r])
    apply = ThunderFunction.apply

    def run(*inputs):
        return rebuild(inputs, apply(program, *inputs))

    return run
