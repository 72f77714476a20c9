"""Gradients of elements at places that are all different are written, not sorted and added up."""

import pytest
import torch

import thunder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inverted(perm, filled=torch.empty_like):
    inverse = filled(perm)
    inverse[perm] = torch.arange(perm.size(0), device=perm.device)
    return inverse


def overwritten_in_part(perm):
    inverse = torch.zeros_like(perm)
    inverse[perm[:5]] = torch.arange(5, device=perm.device)
    return inverse


# of the numbers of experts, what x is indexed by; whether its places are shown to be different
INDICES = {
    "sort": (lambda ids: torch.sort(ids)[1], True), "argsort": (lambda ids: ids.argsort(descending=True), True),
    "inverse": (lambda ids: inverted(ids.argsort()), True), "twice": (lambda ids: inverted(inverted(ids.argsort())), True),
    "range": (lambda ids: torch.arange(1, ids.shape[0], 2, device=ids.device), True),
    "values": (lambda ids: torch.sort(ids)[0], False), "some twice": (lambda ids: ids.argsort() // 2, False),
    "negative": (lambda ids: torch.arange(-ids.shape[0], ids.shape[0], device=ids.device), False),
    "in part": (lambda ids: overwritten_in_part(ids.argsort()), False), "given": (lambda ids: ids, False),
    "of numbers": (lambda ids: inverted(ids, torch.zeros_like), False), "random": (lambda ids: torch.randperm(12, device=ids.device), True),
}  # fmt: skip


def backward_of(compiled):
    """How many gradients are read by index, and how many are written at places that are known to be different."""
    operations = thunder.last_backward_traces(compiled)[-1].bound_symbols
    names = [b.sym.name for b in operations]
    return names.count("index_select"), sum(
        b.sym.name == "index_backward" and b.args[3:] == (True,) for b in operations
    )


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_equal_eagers(name, dynamic):
    places, distinct = INDICES[name]

    def program(x, ids):
        return (x[places(ids)] * 3).sin(), x[:, 1:][places(ids) % 4, 0]

    compiled = thunder.jit(program, dynamic=dynamic)
    for count in (12, 13):
        torch.manual_seed(0)
        x, ids = torch.randn(13, 4, device=DEVICE), torch.randint(0, 3, (count,), device=DEVICE)
        sides = []
        for run in (compiled, program):
            torch.manual_seed(1)
            x = x.detach().requires_grad_()
            results = run(x, ids)
            sides.append((*results, torch.autograd.grad([r.sum() for r in results], x)[0]))
        for a, b in zip(*sides, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    read, written = backward_of(compiled)
    # the last call has as many places as x has rows, and so reads what an inverse says; not where sizes may change
    assert (read, written) == ((1, 0) if name in ("inverse", "twice") and not dynamic else (0, int(distinct)))


def test_experts_sort_once():
    """What is left to sort is where rows are there for several experts. Gradients at the places of a permutation are
    read by its inverse."""

    def experts(x, ids, weights):
        _, perm = torch.sort(ids)
        chosen = x[perm // 2].tanh() * weights[perm][:, None]
        return chosen[inverted(perm)].view(x.shape[0], 2, -1).sum(1)

    compiled = thunder.jit(experts, executors=["torch"])
    x, weights = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((6, 4), (12,)))
    ids = torch.randint(0, 3, (12,), device=DEVICE)
    gradients, wanted = (torch.autograd.grad(f(x, ids, weights).sin().sum(), (x, weights)) for f in (compiled, experts))
    torch.testing.assert_close(gradients, wanted)
    operations = [
        b.args[3:] for b in thunder.last_backward_traces(compiled)[-1].bound_symbols if b.sym.name == "index_backward"
    ]
    assert operations == [()] and backward_of(compiled) == (2, 0)


def test_an_inverse_of_which_the_program_keeps_only_a_part_is_none():
    """Places beyond those of the permutation get no gradient."""

    def program(x, ids):
        perm = ids.argsort()
        return (x[perm] * x[inverted(perm)]).sum() + x[0].sum()

    compiled = thunder.jit(program)
    x, ids = torch.randn(9, 3, device=DEVICE, requires_grad=True), torch.randint(0, 3, (5,), device=DEVICE)
    sides = [torch.autograd.grad(f(x, ids), x)[0] for f in (compiled, program)]
    torch.testing.assert_close(*sides)
    assert backward_of(compiled) == (0, 2)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_inverse_along_any_dimension(dim):
    def program(x, ids):
        perm = ids.argsort()
        return torch.index_select(x, dim, perm).tanh() * x[(slice(None),) * dim + (inverted(perm),)]

    compiled = thunder.jit(program)
    x, ids = torch.randn(7, 7, 7, device=DEVICE, requires_grad=True), torch.randint(0, 3, (7,), device=DEVICE)
    sides = [torch.autograd.grad(f(x, ids).sin().sum(), x)[0] for f in (compiled, program)]
    torch.testing.assert_close(*sides)
    assert backward_of(compiled)[0] >= 1


def test_a_gradient_that_a_value_requiring_grad_has():
    """What is indexed is the result of a product for each expert, whose gradient is one of weights."""
    weight = torch.randn(4, 8, 8, device=DEVICE, requires_grad=True)

    def program(x, chosen):
        order = chosen.argsort()
        ends = torch.nn.functional.one_hot(chosen, 4).sum(0).cumsum(0).int()
        return torch.nn.functional.grouped_mm(x[order], weight, offs=ends)[order.argsort()]

    x, chosen = torch.randn(6, 8, device=DEVICE), torch.tensor([1, 0, 3, 1, 2, 0], device=DEVICE)
    if DEVICE == "cuda":
        x, weight = x.bfloat16(), weight.detach().bfloat16().requires_grad_()
    gradients = [torch.autograd.grad(f(x, chosen).sum(), weight)[0] for f in (thunder.jit(program), program)]
    torch.testing.assert_close(*gradients)
