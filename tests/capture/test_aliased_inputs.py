"""Arguments that share memory, and programs that write to them: each way of sharing is a program of its own, in which
they are one tensor and views of it."""

import pytest
import torch

import thunder
from tests.capture.test_mutation import flat
from tests.test_fusion import Joining
from thunder.errors import CaptureError

SHARED = {
    "one tensor": lambda b: (b, b),
    "a row of the first": lambda b: (b, b[0]),
    "a row before the whole": lambda b: (b[0], b),
    "rows before the whole": lambda b: (b[1:3], b),
    "two halves": lambda b: (b[:3], b[3:]),
    "interleaved columns": lambda b: (b[:, 0], b[:, 1]),
    "a transpose": lambda b: (b, b.t()),
    "a transpose first": lambda b: (b.t(), b),
    "flattened": lambda b: (b.view(-1), b),
    "one row twice": lambda b: (b[0:1], b[0]),
    "a row of some rows": lambda b: (b[1:5], b[2]),
    "a column before the whole": lambda b: (b[:, 1], b),
    "apart": lambda b: (b, b.clone()),
    "two rows and the whole": lambda b: (b[0], b[1], b),
    "the whole, a row, two rows": lambda b: (b, b[0], b[0:2]),
    "three rows": lambda b: (b[0], b[1], b[2]),
}


TWO = torch.tensor(2.0)


def writes_to_the_first(x, y, *rest):
    x.add_(1)
    return x.sum() + y.sum(), [r.sum() for r in rest]


def writes_to_both(x, y, *rest):
    y.mul_(2)
    x.add_(1)
    return y * 2, x, [r * 1 for r in rest]


def reads_before_it_writes(x, y, *rest):
    before = y * TWO
    x.zero_()
    y.add_(TWO)  # a fused region joins it with the product
    return before, y, x, [r * 1 for r in rest]


def writes_to_views(x, y, *rest):
    v = x[..., :1]
    v.add_(1)
    y[...] = 5
    v.mul_(3)
    return v, y.view(-1) if y.is_contiguous() else y, [r * 1 for r in rest]


def whole():
    return torch.arange(24.0).reshape(6, 4)


@pytest.mark.filterwarnings("ignore::thunder.errors.RecompileWarning")  # many ways on purpose
@pytest.mark.parametrize(
    "f", [writes_to_the_first, writes_to_both, reads_before_it_writes, writes_to_views], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("executors", [None, [Joining()]], ids=["torch", "joined"])
def test_arguments_that_share_memory_are_eagers(f, executors):
    compiled = thunder.jit(f, executors=executors)
    for again in range(2):
        for name, make in SHARED.items():
            ours, eagers = whole(), whole()
            our_args, eager_args = make(ours), make(eagers)
            got, want = [*flat(compiled(*our_args)), *our_args, ours], [*flat(f(*eager_args)), *eager_args, eagers]
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), name
            for i in range(len(want)):
                for j in range(i):
                    assert (got[i] is got[j]) == (want[i] is want[j]), name
                    memory = [
                        t[i].untyped_storage().data_ptr() == t[j].untyped_storage().data_ptr() for t in (got, want)
                    ]
                    assert memory[0] == memory[1], name
            assert [t._version > 0 for t in our_args] == [t._version > 0 for t in eager_args], name
        if not again:
            compiled_programs = thunder.cache_misses(compiled)
    assert thunder.cache_misses(compiled) == compiled_programs <= len(SHARED)


def test_a_partial_overlap_is_refused_before_anything_is_written():
    compiled = thunder.jit(writes_to_the_first)
    b = whole()
    with pytest.raises(CaptureError, match="x is written to, and y shares memory with it"):
        compiled(b[0:2], b[1:3])
    assert torch.equal(b, whole())
    compiled(whole()[0:2], whole()[1:3])
    with pytest.raises(CaptureError, match="shares memory with it"):
        compiled(b[0:2], b[1:3])


def test_memory_that_is_shared_with_another_history_is_refused():
    w = torch.ones(4, requires_grad=True)

    def f(x, y):
        with torch.no_grad():
            x.add_(1)
        return (y * 2).sum()

    with pytest.raises(CaptureError, match="shares memory with it"):
        thunder.jit(f)(w.detach(), w)


def test_a_program_that_writes_to_nothing_does_not_look_at_memory():
    compiled = thunder.jit(lambda x, y: x + y)
    b = whole()
    compiled(b, b.clone())
    compiled(b, b)
    assert thunder.cache_misses(compiled) == 1
    assert "apart" not in str(thunder.last_prologue_traces(compiled)[-1])


def test_what_is_read_late_shows_what_was_written_early():
    class Holder:
        pass

    def f(x, holder):
        x.mul_(3)
        whole = holder.whole
        whole.add_(1)
        return whole * 1, x * 1

    for compiled in (f, thunder.jit(f)):
        b, holder = whole(), Holder()
        holder.whole = b
        out, part = compiled(b[1], holder)
        expected = whole()
        expected[1] *= 3
        expected += 1
        assert torch.equal(out, expected) and torch.equal(b, expected) and torch.equal(part, expected[1])


def gradients_of_one(a, b):
    return torch.autograd.grad((a * b * b).sum(), a)


def gradients_of_both(a, b):
    return torch.autograd.grad((a * b * b).sum(), (b, a))


def gradient_of_a_gradient(a, b):
    return torch.autograd.grad(torch.autograd.grad((a * b * b).sum(), a, create_graph=True)[0].sum(), b)


def left_in_grad(a, b):
    (a * b * b).sum().backward(inputs=[a])
    return a.grad.clone()


@pytest.mark.parametrize(
    "program", [gradients_of_one, gradients_of_both, gradient_of_a_gradient, left_in_grad], ids=lambda p: p.__name__
)
def test_gradients_of_a_tensor_that_comes_in_twice(program):
    compiled = thunder.jit(program)
    for places in ((0, 1), (0, 0), (1, 0), (1, 1)):
        results = []
        for run in (compiled, program):
            leaves = [torch.arange(1.0, 4.0).requires_grad_(), torch.arange(2.0, 5.0).requires_grad_()]
            results.append(run(*(leaves[i] for i in places)))
        torch.testing.assert_close(*results)
    assert thunder.cache_misses(compiled) == 2


def test_a_refusal_names_tensors_as_the_user_does():
    net = torch.nn.Linear(2, 2)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def f(x):
        parameters["weight"] -= 1
        return net(x)

    with pytest.raises(CaptureError, match=r"closure variable parameters\['weight'\].* closure variable net\.weight"):
        thunder.jit(f)(torch.ones(2))
