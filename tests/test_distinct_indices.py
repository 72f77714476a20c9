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
    text = str(thunder.last_backward_traces(compiled)[-1])
    marked = [line for line in text.split("\n") if "index_backward(" in line and not line.lstrip().startswith("#")]
    assert [line.partition("  #")[0].endswith("True)") for line in marked].count(True) == distinct


def test_experts_sort_once():
    """What is left to sort is where rows are there for several experts."""

    def experts(x, ids, weights):
        _, perm = torch.sort(ids)
        chosen = x[perm // 2].tanh() * weights[perm][:, None]
        return chosen[inverted(perm)].view(x.shape[0], 2, -1).sum(1)

    compiled = thunder.jit(experts, executors=["torch"])
    x, weights = (torch.randn(s, device=DEVICE, requires_grad=True) for s in ((6, 4), (12,)))
    ids = torch.randint(0, 3, (12,), device=DEVICE)
    found, wanted = (torch.autograd.grad(f(x, ids, weights).sin().sum(), (x, weights)) for f in (compiled, experts))
    torch.testing.assert_close(found, wanted)
    operations = [b for b in thunder.last_backward_traces(compiled)[-1].bound_symbols if b.sym.name == "index_backward"]
    assert sorted(b.args[3:] == (True,) for b in operations) == [False, True, True]
