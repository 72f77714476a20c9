"""PyTorch's autograd engine: saved values, kept graphs, how a function is applied."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder import compat


def keeps_graph() -> bool:
    """Whether what is saved for the backward that runs now is read again: its graph is kept, or hooks for saved tensors
    may have kept the tensors that they returned. True where PyTorch does not say."""
    return getattr(_hooks, "returned", False) or compat.graph_is_kept()


def will_run(edge: tuple) -> bool:
    """Whether the backward that runs now gives a gradient to an edge, one of `ctx.next_functions`."""
    if edge[0] is None:
        return False
    try:
        return compat.will_execute(edge[0])
    except RuntimeError:  # PyTorch refuses to answer for a leaf that torch.autograd.grad asks for
        return True


def accumulated_in_place(edge: tuple) -> torch.Tensor | None:
    """The `.grad` that the backward that runs now adds in place to what an edge is given, one of `ctx.next_functions`.
    None where autograd does something else: the edge is no leaf's, it is not run or `torch.autograd.grad` asks for it,
    hooks see the gradient, or another tensor becomes `.grad`."""
    node = edge[0]
    leaf = getattr(node, "variable", None)  # of a node that accumulates
    if leaf is None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return None
    held = leaf.grad
    if type(held) is not torch.Tensor or held.requires_grad or held.layout is not torch.strided:
        return None
    if held.shape != leaf.shape or held.dtype is not leaf.dtype or held.device != leaf.device:
        return None
    if held.is_cuda and torch.cuda.current_stream(held.device) != torch.cuda.default_stream(held.device):
        return None  # the engine orders the streams of gradients, not those inside of a node
    try:
        return held if compat.will_execute(node) else None
    except RuntimeError:
        return None


@contextlib.contextmanager
def saved_by_hooks() -> Iterator[None]:
    """Around a backward of which hooks for saved tensors returned what was saved."""
    before, _hooks.returned = getattr(_hooks, "returned", False), True
    try:
        yield
    finally:
        _hooks.returned = before


_hooks = threading.local()


def gradients(outputs: Sequence, cotangents: Sequence, inputs: Sequence, keep_graph: bool, create_graph: bool) -> tuple:
    """`torch.autograd.grad(..., allow_unused=True)` without its checks, which cost more than most nodes."""
    return compat.run_engine(
        tuple(outputs), tuple(cotangents), keep_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )


def run_backward(outputs: Sequence, cotangents: Sequence, keep_graph: bool) -> None:
    """`torch.autograd.backward` without its checks."""
    compat.run_engine(tuple(outputs), tuple(cotangents), keep_graph, False, (), True, accumulate_grad=True)


def applying(function: type[torch.autograd.Function]) -> tuple[Callable[[], bool], Callable]:
    """Whether torch.func transforms, as a function, and what applies `function` where none does: `function.apply` would
    look in each input for what a transform has left behind."""
    inner: Any = super(torch.autograd.Function, function)
    return compat.transforms_are_active, inner.apply
