"""Calls of PyTorch's in a `try` of the program: PyTorch's own errors are raised where the program handles them."""

import contextlib

import pytest
import torch

import thunder
from thunder.capture import examples


def refused(x):
    """PyTorch has no such kernel for float16, which no meta rule says."""
    return torch.linalg.inv(x.half())


def handled(x):
    x.add_(1)
    try:
        return refused(x)
    except RuntimeError:
        return x * 2


def handled_around_with(x):
    x.add_(1)
    try:
        with contextlib.nullcontext():
            return refused(x)
    except RuntimeError:
        return x * 2


def handled_around_finally(x):
    x.add_(1)
    kept = []
    try:
        try:
            return refused(x)
        finally:
            kept.append(1)
    except (ValueError, RuntimeError):
        return x * len(kept)


def left_by_finally(x):
    x.add_(1)
    for _ in range(2):
        try:
            refused(x)
        finally:
            break
    return x


@pytest.mark.parametrize("program", [handled, handled_around_with, handled_around_finally, left_by_finally])
def test_what_pytorch_refuses_is_handled(program):
    x, y = torch.eye(2), torch.eye(2)
    expected = program(x)
    assert torch.equal(thunder.jit(program, fallback="error")(y), expected)
    assert torch.equal(x, y)


def cleaned_up(x):
    try:
        return x.exp() + 1
    finally:
        len("cleanup")


def raised_again(x):
    try:
        return x.exp() + 1
    except RuntimeError as error:
        error.args = ("again",)
        raise


@pytest.mark.parametrize("program", [cleaned_up, raised_again])
def test_no_example_is_run_where_errors_are_only_raised_again(program, monkeypatch):
    monkeypatch.setattr(examples, "_error", lambda *_: pytest.fail("an example was run"))
    x = torch.ones(2)
    assert torch.equal(thunder.jit(program)(x), program(x))
