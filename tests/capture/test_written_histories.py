"""Arguments that are overwritten with what requires grad: afterwards they have a history, as in eager mode."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.errors import CaptureError

tensor = functools.partial(torch.randn, dtype=torch.float64)
weights = functools.partial(tensor, requires_grad=True)


def plain():
    return tensor(4, 4), weights(4, 4)


def result_of_an_operation():
    w = weights(4, 4)
    return w * 2, w


def view_of_a_result():
    w = weights(5, 4)
    return (w * 2)[1:], w[:4]


def with_view(part):
    def make():
        m = tensor(4, 4)
        return m, part(m), weights(4, 4)

    return make


def copied(m, w):
    m.copy_(w)
    return m * 2


def views_of_it(m, w):
    m.add_(w)
    return m[0], m[:, 1].sin(), m.view(-1), m.t()[1:], m.unfold(0, 2, 1), m.expand(2, 4, 4), *m.unbind(0)


def scaled_twice(m, w):
    m.mul_(w)
    m.mul_(w)
    return m


def through_a_view(m, w):
    m[0].add_(w[1])
    m[:, 1] = w[0]
    return m.requires_grad, m.is_leaf, m.sin()


def where_autograd_does_not_look(m, w):
    with torch.no_grad():
        m.add_(w)
    m.data.mul_(w)
    return m * w


def a_part_unseen(m, w):
    with torch.no_grad():
        m.add_(w)
    m.mul_(w)
    return m * w


def detached(m, w):
    d = m.detach()
    d.add_(w)
    return d, m * 1


def views_without_grad(m, w):
    m.copy_(w)
    with torch.no_grad():
        v = m[0]
    return v, m.detach(), m.reshape(-1), m.T.reshape(-1)


def without_grad_and_with(m, w):
    with torch.no_grad(), torch.enable_grad():
        m.add_(w)
    return m[1:]


def turned_unseen(m, w):
    y = w * 2
    with torch.no_grad():
        w.t_()
    return (w * m).sin(), y


def turned_with_a_view(m, w):
    row = w[0]
    with torch.no_grad():
        w.t_()
    return row * m


def other_shape(m, w):
    m.t_()
    m.add_(w)
    return m[0]


def shape_afterwards(m, w):
    m.add_(w)
    m.t_()
    return m[0]


def filled_again(m, w):
    m.copy_(w)
    m.zero_()
    return m + 1


def in_a_loop_by_data(m, w):
    for _ in range(3):
        if m.sum() > 0:
            m.mul_(w)
        else:
            m.sub_(w)
    return m.sum()


def half_precision(m, w):
    m.copy_(w.half())
    return m.double()


def checkpointed(m, w):
    m.add_(w)
    return checkpoint(lambda a, b: (a * b).sin(), m, w, use_reentrant=False)


def view_and_all(m, v, w):
    m.mul_(w)
    return v.sin(), v, v[:1]


def all_by_a_view(m, v, w):
    v.mul_(w.sum(0))
    return m.sin(), m, v[:1]


def both(m, v, w):
    v.add_(w.sum())
    m.add_(w)
    return v * 2, m * 3


CASES = {
    **{f.__name__: (f, plain) for f in (
        copied, views_of_it, scaled_twice, through_a_view, where_autograd_does_not_look, a_part_unseen, detached,
        views_without_grad, without_grad_and_with, other_shape, shape_afterwards, filled_again, in_a_loop_by_data,
        half_precision, checkpointed, turned_unseen)},
    **{f"a result: {f.__name__}": (f, result_of_an_operation) for f in (
        copied, views_of_it, scaled_twice, through_a_view, where_autograd_does_not_look, a_part_unseen, filled_again)},
    **{f"a view of a result: {f.__name__}": (f, view_of_a_result) for f in (copied, views_of_it, scaled_twice)},
    **{f"{name}: {f.__name__}": (f, with_view(part)) for f in (view_and_all, all_by_a_view, both) for name, part in {
        "rows": lambda m: m[1:], "itself": lambda m: m, "a row": lambda m: m[2], "another name": lambda m: m.view(4, 4),
        "a copy": lambda m: m.clone()}.items()},
}  # fmt: skip


def shown(function, args, calls: int) -> list:
    """What calls with the same arguments give, how results lie in the arguments' memory, and the gradients."""
    collected = []
    for _ in range(calls):
        result = function(*args)
        results = [*result] if isinstance(result, tuple) else [result]
        tensors = [x for x in (*results, *args) if isinstance(x, torch.Tensor)]
        leaf = next((a for a in args if a.is_leaf and a.requires_grad), None)
        roots = [x.double().square().sum() for x in tensors if x.requires_grad]
        try:
            gradients = torch.autograd.grad(sum(roots), leaf, retain_graph=True) if leaf is not None else None
        except RuntimeError as error:  # eager has written to what the derivative reads
            gradients = str(error)[:40]
        memory = [[x.untyped_storage().data_ptr() == a.untyped_storage().data_ptr() for a in args] for x in tensors]
        facts = [(x.requires_grad, x.is_leaf, x._is_view(), x.stride()) for x in tensors]
        collected.append(([x.detach().clone() for x in tensors], facts, memory, gradients))
    return collected


@pytest.mark.parametrize("name", CASES)
def test_results_histories_and_memory_are_eagers(name):
    function, make = CASES[name]
    outcomes = []
    compiled = thunder.jit(function, fallback="error", numerics="eager")
    for f in (function, compiled):
        torch.manual_seed(0)
        outcomes.append(shown(f, make(), 3))
    for want, got in zip(*outcomes, strict=True):
        if isinstance(want[-1], str):  # ours keeps a copy of what eager has lost
            want, got = want[:-1], got[:-1]
        torch.testing.assert_close(got, want)


ERRORS = {
    "view made without grad": lambda: (torch.no_grad()(lambda m: m[1:])(tensor(5, 4)), weights(4, 4)),
    "one of several views": lambda: (tensor(8, 4).split(4)[1], weights(4, 4)),
    "view of a leaf": lambda: (weights(5, 4)[1:], weights(4, 4)),
    "leaf": lambda: (weights(4, 4), weights(4, 4)),
    "several places in one element": lambda: (tensor(4).expand(4, 4), weights(4, 4)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_autograd_does_not_allow_raises_as_eager(name):
    errors = []
    for f in (copied, thunder.jit(copied, fallback="error")):
        with pytest.raises(RuntimeError) as error:
            f(*ERRORS[name]())
        errors.append(str(error.value).splitlines()[0])
    assert errors[0] == errors[1]


def reads_before_it_writes(m, w):
    t, u = m[0], m[1]
    m[2] = w[0]
    y = t * 2
    t.add_(1)
    return u.is_leaf, u.add_(1), y


def writes_to_what_has_no_history_yet(m, w):
    t = m[0]
    m[1] = w[0]
    with torch.no_grad():
        y = t * 2
    return t.add_(1), y


def test_a_view_has_the_history_of_its_base_once_it_is_read():
    """PyTorch gives a view the history of its base when somebody looks, and takes it for a leaf until then."""
    torch.manual_seed(0)
    args = plain()
    want = reads_before_it_writes(args[0].clone(), args[1])
    torch.testing.assert_close(thunder.jit(reads_before_it_writes, fallback="error")(*args), want)
    for make in (plain, lambda: (plain()[0] * 1, weights(4, 4))):
        for f in (writes_to_what_has_no_history_yet, thunder.jit(writes_to_what_has_no_history_yet, fallback="error")):
            with pytest.raises(RuntimeError, match="^a leaf Variable that requires grad is being used"):
                f(*make())


def test_each_kind_of_history_is_a_program():
    """A program for a tensor is not taken for one that autograd does not let it write to."""
    compiled = thunder.jit(copied, fallback="error")
    for make in (plain, *ERRORS.values(), plain, result_of_an_operation, *ERRORS.values()):
        outcomes = []
        for f in (copied, compiled):
            torch.manual_seed(0)
            args = make()
            try:
                outcomes.append((f(*args).detach(), args[0].requires_grad))
            except RuntimeError as error:
                outcomes.append(str(error).splitlines()[0])
        assert type(outcomes[0]) is type(outcomes[1])
        torch.testing.assert_close(*outcomes) if type(outcomes[0]) is tuple else None


def test_an_alias_that_autograd_does_not_know_is_refused():
    m = tensor(4, 4)
    for alias in (m.detach()[1:], torch.no_grad()(lambda: m[1:])()):
        with pytest.raises(CaptureError, match="shares its memory in a way that autograd does not follow"):
            thunder.jit(view_and_all, fallback="error")(m, alias, weights(4, 4))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("hidden", torch.zeros(3))
        self.states = [torch.zeros(3)]

    def forward(self, x):
        self.hidden.copy_(torch.tanh(self.linear(x) + self.hidden))
        self.states[0].add_(self.hidden)
        return self.hidden * 2, self.states[0]


def test_buffers_and_containers_keep_their_history_from_call_to_call():
    gradients = []
    for wrap in (lambda m: m, lambda m: thunder.jit(m, fallback="error")):
        torch.manual_seed(0)
        model = Recurrent()
        run = wrap(model)
        for _ in range(3):
            out, views = run(torch.randn(3))
        assert views is model.states[0] and model.hidden.requires_grad
        (out.sum() + views.square().sum()).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_what_is_saved_of_an_overwritten_argument_is_a_copy():
    """PyTorch's `mul_` saves a copy of what it overwrites."""

    def program(m, w):
        m.mul_(w)
        return m.sin()

    m, w = plain()
    before = m.clone()
    thunder.jit(program, fallback="error")(m, w).sum().backward()
    torch.testing.assert_close(w.grad, before * (before * w).cos())


def test_symbolic_sizes():
    def program(m, w):
        m.add_(w)
        n = m.shape[0]
        return m[1 : n - 1], m.view(n, 1)

    compiled = thunder.jit(program, fallback="error", dynamic=True)
    for n in (3, 4, 7):
        m, w = torch.zeros(n).double(), weights(n)
        a, b = compiled(m, w)
        assert a._base is m and b._base is m
        (a.sum() + b.sum()).backward()
        torch.testing.assert_close(w.grad, torch.tensor([1.0] + [2.0] * (n - 2) + [1.0]).double())
    assert len(compiled.programs) == 1


def test_a_backward_inside_and_one_outside():
    def program(m, w):
        m.add_(w)
        (m * m).sum().backward()
        return m * 1

    grads = []
    for f in (program, thunder.jit(program, fallback="error")):
        torch.manual_seed(0)
        m, w = plain()
        f(m, w)
        m.sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(*grads)


def test_a_leaf_with_views_is_not_turned_behind_the_back_of_autograd():
    with pytest.raises(CaptureError, match="t_ changes the shape of a tensor that requires grad"):
        thunder.jit(turned_with_a_view, fallback="error")(*plain())
    with pytest.raises(CaptureError, match="t_ changes the shape of a tensor that requires grad"):
        thunder.jit(turned_unseen, fallback="error")(tensor(4, 3), weights(3, 4))


def test_gradients_that_would_be_kept_of_it_are_refused():
    def retained(m, w):
        m.add_(w)
        m.retain_grad()
        return m * 2

    def in_a_hook(m, w):
        m.add_(w)
        y = m * 2
        y.register_hook(lambda g: g * m.sum())
        return y

    def a_view_in_a_hook(m, w):
        m.add_(w)
        y, v = m * 2, m[1:]
        y.register_hook(lambda g: g * v.sum())
        return y

    with pytest.raises(CaptureError, match="retain_grad of a tensor that it overwrites"):
        thunder.jit(retained, fallback="error")(*plain())
    with pytest.raises(CaptureError, match="a hook .* has an argument that it overwrites"):
        thunder.jit(in_a_hook, fallback="error")(*plain())
    with pytest.raises(CaptureError, match="a hook .* has an argument that it overwrites"):
        thunder.jit(a_view_in_a_hook, fallback="error")(*plain())


class Spiking(torch.nn.Module):
    """As spiking networks begin anew: of the last state, the form alone is read."""

    def __init__(self, begin=torch.zeros_like):
        super().__init__()
        self.weight, self.state, self.begin = torch.nn.Parameter(torch.ones(3)), torch.zeros(3), begin

    def forward(self, x):
        self.state = self.begin(self.state) + self.weight * x
        return self.state.sum()


@pytest.mark.parametrize(
    "begin",
    [torch.zeros_like, torch.Tensor.detach, lambda s: torch.empty(s.shape).fill_(0.5), lambda s: (s > 1).float()],
)
def test_the_graph_of_a_call_does_not_lead_to_a_state_without_a_gradient(begin):
    eager = Spiking(begin)
    compiled = thunder.jit(Spiking(begin), fallback="error")
    for _ in range(4):
        for module in (eager, compiled):
            module(torch.ones(3) * 0.7).backward()
    assert torch.equal(compiled.weight.grad, eager.weight.grad)
    assert torch.equal(compiled.state, eager.state)


def test_arguments_without_a_gradient_are_unused_in_the_graph():
    compiled = thunder.jit(lambda a, b: a * b.detach() + torch.ones_like(b), fallback="error")
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(compiled(a, b).sum(), b)
    ours = torch.autograd.grad(compiled(a, b).sum(), (a, b), allow_unused=True)
    assert torch.equal(ours[0], torch.ones(3)) and ours[1] is None
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):  # older ones do not show a Function's edges
        assert [node for node, _ in compiled(a, b).grad_fn.next_functions if node is not None] == [
            torch.autograd.graph.get_gradient_edge(a).node
        ]
