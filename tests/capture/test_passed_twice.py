"""One tensor as several arguments: each is a parameter of the program where nothing depends on that, so that the
program serves calls with several tensors; elsewhere calls with one tensor and with several are other programs."""

import copy

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


def named(**keywords):
    return keywords.pop("x") * keywords.get("y") if "z" not in keywords and keywords.setdefault("n", 1) else None


def keyed(a, b):
    counts = {a: 1}
    counts.update({b: 2})
    return a * b, len(counts), b in counts


def rebound(a, b):
    a.data = a.data * 0 + 4
    return b * 1


def copied(a, b):
    c, d = copy.deepcopy([a, b])
    c.add_(1)
    return d * 1, c is d


def shown(a, b):
    a.add_(10)
    print(b.sum())
    return b * 1


def decided(a, b):
    a.add_(10)
    return b * 2 if b.sum() > 5 else b - 1


def looped(a, b):
    passes = 0
    while b.sum() < 20 and passes < 4:  # where a is not b, passes ends it
        a.add_(5)
        passes += 1
    return b * 1, passes


def one_of_all(a, b):
    if len({a, b}) == 2:
        raise ValueError("two")
    return a * b


def caught(a, b):
    try:
        return a * b if {a: 0, b: 1}[a] else a + b
    except KeyError:
        return a - b


def taken_as_well(a, b):
    return a * b * GLOBAL_LIST[0]


def written_as_well(a, b):
    GLOBAL_LIST[0].add_(1)
    return a * b


GLOBAL_LIST = [torch.ones(1)]
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
    "data": (rebound, 2),
    "a copy of both": (copied, 2),
    "a write, then host code": (shown, 2),
    "a write, then a decision": (decided, 2),
    "a write, then decisions": (looped, 2),
    "an error where they are two": (one_of_all, None),
    "a table, in a try": (caught, 2),
    "a value that is no argument": (taken_as_well, 1),
    "a write to a value that is no argument": (written_as_well, 1),
}


@pytest.mark.parametrize("first", [0, 1], ids=["one tensor first", "two tensors first"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_with_one_tensor_and_with_two(name, first, capsys):
    program, programs = PROGRAMS[name]
    compiled = thunder.jit(program)
    calls = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for places in calls[first:] + calls[:first]:
        seen = []
        for function in (compiled, program):
            GLOBAL_LIST[0] = torch.ones(1)
            values = [torch.ones(1), torch.full((1,), 2.0)]
            try:
                result = function(*(values[i] for i in places))
            except ValueError as error:
                result = error
            seen.append((str(result), str(values), [v.requires_grad for v in values], capsys.readouterr().out))
        assert seen[0] == seen[1]
    assert programs is None or thunder.cache_misses(compiled) == programs
    if programs == 1:
        assert len(thunder.last_traces(compiled)[-1].args) >= 2


def test_gradients_of_one_tensor_add_up():
    compiled, x = thunder.jit(lambda a, b: (a * b * b).sum()), torch.full((2,), 3.0, requires_grad=True)
    compiled(x, x).backward()
    assert torch.equal(x.grad, torch.full((2,), 27.0))


@pytest.mark.parametrize(("captures", "program"), [(1, PROGRAMS["a product"][0]), (1, PROGRAMS["is"][0]), (2, written)])
def test_a_program_is_captured_again_only_where_it_depends_on_the_two_being_one(captures, program, monkeypatch):
    instances = []

    class Counted(thunder.capture.TorchHost):
        def __init__(self, *args):
            instances.append(args)
            super().__init__(*args)

    monkeypatch.setattr(thunder.capture, "TorchHost", Counted)
    x = torch.ones(1)
    thunder.jit(program)(x, x)
    assert len(instances) == captures


@pytest.mark.parametrize("late", [False, True], ids=["an argument", "a value that is no argument"])
def test_a_value_that_is_both_is_one_where_it_is_written_to(late):
    x, y = torch.ones(2), torch.ones(2)
    program = (lambda a: a.add_(1) * GLOBAL_LIST[0]) if late else (lambda a: GLOBAL_LIST[0].add_(1) * a)
    compiled, results = thunder.jit(program), []
    for argument, other in ((x, x), (x, y), (y, y)):
        GLOBAL_LIST[0] = other
        results.append(compiled(argument).tolist())
    want = [4.0, 3.0, 4.0] if late else [4.0, 4.0, 9.0]
    assert results == [[w, w] for w in want]
