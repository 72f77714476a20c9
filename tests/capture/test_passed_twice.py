"""One tensor as several arguments: each is a parameter of the program where nothing depends on that, so that the
program serves calls with several tensors; elsewhere calls with one tensor and with several are other programs."""

import pytest
import torch

import thunder


def written(a, b):
    a.mul_(2)
    return a + b


def leaf(a, b):
    with torch.enable_grad():
        a.requires_grad_()
        return torch.autograd.grad((a * b).sum(), a)[0]


def named(**given):
    return given.pop("x") * given.get("y") if "z" not in given and given.setdefault("n", 1) else None


def keyed(a, b):
    counts = {a: 1}
    counts.update({b: 2})
    return a * b, len(counts), b in counts


PROGRAMS = {  # (program, how many programs (x, x), (x, y), (y, x) take)
    "a product": (lambda a, b: a * b, 1),
    "a list for an operation": (lambda a, b: torch.cat([a, b]).sum(), 1),
    "a write to a copy": (lambda a, b: a.clone().add_(b), 1),
    "results": (lambda a, b: (b, a), 1),
    "is": (lambda a, b: (a * b, a is b), 2),
    "a set": (lambda a, b: (a * b, len({a, b})), 2),
    "values of a dict": (lambda a, b: named(x=a, y=b), 1),
    "keys of a dict": (keyed, 2),
    "a key in a key": (lambda a, b: (a * b, len({(a, 1): 1, (b, 1): 2})), 2),
    "dicts that are equal": (lambda a, b: {"x": a} == {"x": b}, None),
    "a search": (lambda a, b: a in [b], None),  # a == b decides where they are two
    "an id": (lambda a, b: id(a) == id(b), 2),
    "a write": (written, 2),
    "a leaf": (leaf, 2),
}


@pytest.mark.parametrize("first", [0, 1], ids=["one tensor first", "two tensors first"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_with_one_tensor_and_with_two(name, first):
    program, programs = PROGRAMS[name]
    compiled = thunder.jit(program)
    calls = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for places in calls[first:] + calls[:first]:
        seen = []
        for function in (compiled, program):
            values = [torch.ones(1), torch.full((1,), 2.0)]
            result = function(*(values[i] for i in places))
            seen.append((str(result), str(values), [v.requires_grad for v in values]))
        assert seen[0] == seen[1]
    assert programs is None or thunder.cache_misses(compiled) == programs
    if programs == 1:
        assert len(thunder.last_traces(compiled)[-1].args) == 2


def test_gradients_of_one_tensor_add_up():
    compiled, x = thunder.jit(lambda a, b: (a * b * b).sum()), torch.full((2,), 3.0, requires_grad=True)
    compiled(x, x).backward()
    assert torch.equal(x.grad, torch.full((2,), 27.0))
