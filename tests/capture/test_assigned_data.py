"""`tensor.data = value` and what is made of it (`module.to`, `half`, `double`), beside eager."""

import pytest
import torch
from torch import nn

import thunder
from tests.capture.runs import refused, same_as_eager, state
from thunder.errors import FallbackWarning


def x():
    return torch.randn(3, 4)


def trained(f, m):
    """Three calls with their backwards, and the module after each."""
    seen = []
    for _ in range(3):
        y = f(x())
        y.sum().backward()
        seen.append((y, state(m)))
    return seen


def steps_of_gradients(jit):
    """An optimizer written by hand."""
    m = nn.Linear(4, 4)

    def step(x):
        loss = m(x).pow(2).sum()
        loss.backward()
        for p in m.parameters():
            p.data = p.data - 0.1 * p.grad
            p.grad = None
        return loss.detach()

    step = jit(step)
    return [(step(x()), state(m)) for _ in range(3)]


def perturbed_and_restored(jit):
    """Sharpness-aware minimization: the old memory comes back as it was."""
    m = nn.Linear(4, 4)

    def step(x):
        old = [p.data for p in m.parameters()]
        for p in m.parameters():
            p.data = p.data + 0.1
        loss = m(x).sum()
        loss.backward()
        for p, o in zip(m.parameters(), old):
            p.data = o
        return loss.detach()

    step, places = jit(step), [p.data_ptr() for p in m.parameters()]
    return [(step(x()), state(m), places == [p.data_ptr() for p in m.parameters()]) for _ in range(3)]


def moving_average(jit):
    m, average = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x):
        for p, q in zip(m.parameters(), average.parameters()):
            q.data = 0.9 * q.data + 0.1 * p.data
        return average(x)

    step = jit(step)
    return [(step(x()), state(average)) for _ in range(3)]


def clamped_weights(jit):
    m = nn.Linear(4, 4)

    def f(x):
        for p in m.parameters():
            p.data = torch.clamp(p.data, -0.1, 0.1)
        return m(x)

    return trained(jit(f), m)


def buffers(jit):
    m = nn.BatchNorm1d(4)

    def f(x):
        m.running_mean.data = m.running_mean.data + x.mean(0)
        return x + m.running_mean

    f = jit(f)
    return [(f(x()), state(m)) for _ in range(3)]


def arguments(jit):
    """A write to one is a write to the other from then on, and views show what they showed."""

    def f(a, b):
        v = a[0]
        a.data = b
        a.mul_(3)
        return a + b, v + 1

    f, seen = jit(f), []
    for _ in range(3):
        a, b = x(), x()
        seen.append((f(a, b), a, b, a.data_ptr() == b.data_ptr()))
    return seen


def swapped(jit):
    a, b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def f(x):
        a.data, b.data = b.data, a.data
        return x * a + b

    f = jit(f)
    return [(f(x()), a.clone(), b.clone()) for _ in range(3)]


def old_memory_written(jit):
    w = nn.Parameter(torch.randn(4))

    def f(x):
        w.data.add_(1)
        v = w.data
        w.data = w.data * 2
        v.mul_(3)
        return w * x, v

    f, seen = jit(f), []
    for _ in range(3):
        before = w.data
        y, v = f(x())
        y.sum().backward()
        seen.append((y, v.clone(), w.clone(), before, w.grad.clone(), v.data_ptr() == before.data_ptr()))
    return seen


def new_memory_written(jit):
    w = nn.Parameter(torch.randn(3, 4))

    def f(x):
        v = x * 2
        w.data = v
        v.add_(1)
        r = w * 1
        with torch.no_grad():
            w.mul_(2)
        return r, v, w

    f, seen = jit(f), []
    for _ in range(3):
        r, v, same = f(x())
        seen.append((r, v.clone(), same is w, v.data_ptr() == w.data_ptr()))
    return seen


def temporaries(jit):
    def f(x, w):
        t, empty = x * w, torch.empty(0)
        t.data = t.data + 1
        empty.data = x
        return (t * t).sum() + empty.sum(), empty.shape

    f, seen = jit(f), []
    for _ in range(3):
        w = torch.randn(4, requires_grad=True)
        y, shape = f(x(), w)
        y.backward()
        seen.append((y, w.grad, tuple(shape)))
    return seen


def transposed(jit):
    w = nn.Parameter(torch.randn(4, 4))

    def f(x):
        w.data = w.data.t()
        return (x @ w).detach()

    f = jit(f)
    return [(f(x()), w.clone(), w.stride()) for _ in range(3)]


def stored(jit):
    w, saved = nn.Parameter(torch.randn(4)), {}

    def f(x):
        w.data = x[0] * 2
        saved["w"], saved["data"] = w, w.data

    f, seen = jit(f), []
    for _ in range(3):
        f(x())
        seen.append((saved["w"] is w, saved["data"], w.clone(), saved["data"].data_ptr() == w.data_ptr()))
    return seen


def decided_between(jit):
    w = nn.Parameter(torch.randn(4))

    def f(x):
        w.data = w.data + x[0]
        if w.sum() > 0:
            w.data = w.data * 0.5
        return w * 1

    f = jit(f)
    return [(f(x()), w.clone()) for _ in range(6)]


def gradients(jit):
    m = nn.Linear(4, 4)

    def f(x):
        m(x).pow(2).sum().backward()
        for p in m.parameters():
            p.grad.data = p.grad.data * 0.5

    f = jit(f)
    return [(f(x()), state(m)) for _ in range(3)]


def errors(jit):
    w = nn.Parameter(torch.randn(4))

    def f(x):
        said = []
        for value in (3, torch.ones(4, dtype=torch.long)):
            try:
                w.data = value
            except (TypeError, RuntimeError) as error:
                said.append(str(error)[:30])
        w.data = x[0]
        try:
            w.add_(1)
        except RuntimeError as error:
            said.append(str(error)[:30])
        return said

    return [jit(f)(x())]


def half_and_back(jit):
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()

    def f(x):
        with torch.no_grad():
            m.half()
            y = m(x.half())
            m.float()
            return y

    f = jit(f)
    return [(f(x()), state(m)) for _ in range(3)]


def to_double(jit):
    m = nn.Linear(4, 4)

    def f(x):
        with torch.no_grad():
            return m.double()(x.double())

    f = jit(f)
    return [(f(x()), state(m)) for _ in range(3)]


def modules_made_inside(jit):
    def f(x):
        torch.manual_seed(0)
        m = nn.Linear(4, 4).double()
        m(x.double()).sum().backward()
        return m.weight.grad

    f = jit(f)
    return [f(x()) for _ in range(3)]


def where_it_is(jit):
    m = nn.Linear(4, 4)

    def f(x):
        return m.to("cpu").to(torch.float32)(x)

    return trained(jit(f), m)


def flattened(jit):
    """Parameters that are views of one vector from then on."""
    m = nn.Linear(4, 4)

    def f(x):
        vector = torch.nn.utils.parameters_to_vector(m.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector * 0.5, m.parameters())
        return m(x), vector

    f, seen = jit(f), []
    for _ in range(3):
        y, vector = f(x())
        y.sum().backward()
        seen.append((y, vector, state(m), m.weight.untyped_storage().nbytes()))
    return seen


def another_memory_format(jit):
    m = nn.Conv2d(2, 3, 3)

    def f(x):
        return m.to(memory_format=torch.channels_last)(x)

    f, seen = jit(f), []
    for _ in range(3):
        y = f(torch.randn(1, 2, 5, 5))
        y.sum().backward()
        seen.append((y, state(m), m.weight.stride()))
    return seen


def casts_that_autocast_keeps(jit):
    """Eager PyTorch's do not know that a leaf was written to."""
    m = nn.Linear(4, 4)

    def f(x, sets):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
            with torch.no_grad():
                for p in m.parameters():
                    if sets:
                        p.data = p.data * 2
                    else:
                        p.mul_(2)
            return y.detach(), m(x).detach()

    f = jit(f)
    return [(f(x(), sets), state(m)) for sets in (True, False)]


def passed_twice(jit):
    def f(a, b):
        a.data = a * 2
        return a + b

    f, inputs = jit(f), x()
    return [f(inputs, inputs), inputs]


RUNS = [
    steps_of_gradients, perturbed_and_restored, moving_average, clamped_weights, buffers, arguments, swapped,
    old_memory_written, new_memory_written, temporaries, transposed, stored, decided_between, gradients, errors,
    half_and_back, to_double, modules_made_inside, where_it_is, flattened,
    another_memory_format, casts_that_autocast_keeps, passed_twice,
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_the_tensor_shows_the_new_data(run):
    same_as_eager(run)


def another_dtype_under_grad(jit):
    """Eager PyTorch gives the gradient in the new dtype."""
    m = nn.Linear(4, 4)

    def f(x):
        return m.double()(x.double())

    return trained(jit(f), m)


def data_of_the_forward(jit):
    """What eager PyTorch's backward reads, the old data or the new, depends on the kernels' saved values."""
    w = nn.Parameter(torch.randn(4, 4))

    def f(x):
        y = torch.nn.functional.linear(x, w)
        w.data = w.data * 0
        return y

    f, seen = jit(f), []
    for _ in range(3):
        w.data, inputs = torch.ones(4, 4), x().requires_grad_()
        f(inputs).sum().backward()
        seen.append((inputs.grad, w.grad.clone()))
    return seen


def data_of_a_buffer(jit):
    """Eager PyTorch keeps the buffer, which gets other data."""
    w, b = nn.Parameter(torch.randn(4)), torch.randn(4)

    def f(x):
        y = x * w * b
        b.data = b * 2
        return y

    return _steps(jit(f), w)


def noise_drawn_again(jit):
    """The second draw writes over what the first product keeps, and autograd counts writes of each `.data` apart."""
    w, noise = nn.Parameter(torch.randn(4)), torch.zeros(4)

    def f(x):
        return x * w * noise.data.normal_() + (w * noise.data.normal_()).sin()

    return _steps(jit(f), w)


def a_parameter_scaled_twice(jit):
    w = nn.Parameter(torch.ones(4))

    def f(x):
        y = w * x
        w.data.mul_(2)
        z = (w * w * x).sum()
        w.data.mul_(2)
        return y * z

    return _steps(jit(f), w)


def a_result_written_over(jit):
    """The derivative of exp() reads its result."""
    w = nn.Parameter(torch.randn(4))

    def f(x):
        y = (w * x).exp()
        y[0].data.zero_()
        return y

    return _steps(jit(f), w)


def _steps(f, w):
    seen = []
    for _ in range(3):
        w.grad, y = None, f(x())
        y.sum().backward()
        seen.append((y.detach(), w.grad))
    return seen


@pytest.mark.parametrize(
    "run, reason",
    [
        (another_dtype_under_grad, "to another shape, dtype or device"),
        (data_of_the_forward, "data that a tensor had before"),
        (data_of_a_buffer, "data that a tensor had before"),
        (noise_drawn_again, "data that a tensor had before"),
        (a_parameter_scaled_twice, "data that a tensor had before"),
        (a_result_written_over, "data that a tensor had before"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_in_words(run, reason):
    refused(run, reason)


def unread_data(jit):
    """No derivative of what was computed before the writes reads these values."""
    w, center, codes = nn.Parameter(torch.randn(4)), torch.zeros(4), torch.randn(5, 4)

    def f(x):
        y = (x * w - center).exp() * 2
        y.data.clamp_(max=9)
        center.data.mul_(0.9).add_(y.detach().mean(0))
        nearest = torch.cdist(y, codes).argmin(1)
        codes.data[0] = y[0].detach()
        return y + codes[nearest]

    return _steps(jit(f), w)


def a_parameter_scaled_behind_its_use(jit):
    """The backward gets the parameter as it is then."""
    w = nn.Parameter(torch.ones(4))

    def f(x):
        y = torch.nn.functional.linear((w * w * x).exp(), w.view(1, 4)).sum()
        w.data.mul_(2)
        return y

    return _steps(jit(f), w)


@pytest.mark.parametrize("run", [unread_data, a_parameter_scaled_behind_its_use], ids=lambda run: run.__name__)
def test_what_no_derivative_reads_may_be_written_to(run):
    same_as_eager(run)


class Noisy(nn.Module):
    """A layer with noise of its own memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))
        self.register_buffer("noise", torch.zeros(4, 4))

    def forward(self, x):
        return x @ (self.weight * self.noise.data.normal_())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cell = nn.Linear(4, 4), Noisy()

    def forward(self, x):
        state, inputs = x[:, 0], self.first(x).tanh()
        for i in range(3):
            state = self.cell(state + inputs[:, i]) + self.cell(x[:, i])
        return state


def in_a_layer_that_is_called_again(jit):
    m, inputs = Recurrent(), torch.randn(2, 3, 4, requires_grad=True)
    f, seen = jit(m), []
    for _ in range(3):
        m.zero_grad()
        inputs.grad, y = None, f(inputs)
        y.square().sum().backward()
        seen.append((y, state(m), inputs.grad))
    return seen


@pytest.mark.slow
def test_the_layer_that_writes_is_an_eager_call():
    refused(in_a_layer_that_is_called_again, "data that a tensor had before")
    compiled = []
    with pytest.warns(FallbackWarning, match="Noisy.forward\\(\\) runs as it is"):
        in_a_layer_that_is_called_again(lambda m: compiled.append(thunder.jit(m, fallback="eager")) or compiled[0])
    assert len(compiled[0].programs) == 1
