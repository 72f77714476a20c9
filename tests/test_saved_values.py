"""What a forward saves for its backward, by name, bytes and line of the user's."""

import pytest
import torch

import thunder
from thunder.examine import saved_for_backward


def program(x, w):
    h = x @ w
    y = torch.tanh(h)  # saved: its derivative reads the result
    z = torch.exp(y.t()).t()  # saved: the result of exp; the views are not
    return (z * w).sum()


def test_report_names_bytes_operations_and_lines():
    compiled = thunder.jit(program)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    compiled(x, w)
    saved = saved_for_backward(compiled)
    by_operation = {v.operation.rpartition(".")[2]: v for v in saved if v.nbytes}
    assert set(by_operation) == {"tanh", "exp"}
    assert (
        by_operation["tanh"].name == "y"
        and by_operation["tanh"].nbytes == 256
        and by_operation["tanh"].kind == "cpu f32[8, 8]"
    )
    assert by_operation["tanh"].location[3].strip().startswith("y = torch.tanh(h)")
    assert saved.nbytes == 512
    assert {v.name for v in saved if v.operation == "argument"} == {"x", "w"}
    text = str(saved)
    assert "y = torch.tanh(h)" in text and text.endswith("512 bytes saved for the backward, without arguments")


def test_library_frames_are_not_the_users_line():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    def f(x):
        return layer(x).sum()  # here

    compiled = thunder.jit(f)
    compiled(torch.randn(2, 4))
    assert all("here" in v.location[3] for v in saved_for_backward(compiled) if v.operation != "argument")


def test_pieces_of_pytorchs_graph_are_counted_apart():
    compiled = thunder.jit(lambda x: torch._euclidean_dist(x, x).sum())
    compiled(torch.randn(3, 3, requires_grad=True))
    saved = saved_for_backward(compiled)
    assert [v.nbytes for v in saved] == [None] and "1 pieces of PyTorch's autograd graph" in str(saved)


def test_without_gradients_nothing_is_saved():
    compiled = thunder.jit(torch.sin)
    with pytest.raises(TypeError, match="not called yet"):
        saved_for_backward(compiled)
    compiled(torch.randn(3))
    assert saved_for_backward(compiled) == ()


def test_symbolic_numbers_are_saved_and_take_no_memory():
    layer = torch.nn.Linear(4, 4)
    compiled = thunder.jit(lambda x: (layer(x).sum(0) / x.shape[0]).exp())
    for n in (3, 5):
        compiled(torch.ones(n, 4)).sum().backward()
    assert thunder.last_traces(compiled)[-1].output[1][1], "the size is saved"
    assert saved_for_backward(compiled).nbytes == 4 * 4
