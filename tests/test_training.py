"""Training in eager and compiled, from one seed: losses, gradients and weights are the same.

A program takes `compile`, which is thunder.jit or nothing at all, and returns what can be seen of it. The same means
equal to the last bit: operations run as PyTorch's own, and the derivatives of those used here are written as PyTorch's
are.
"""

import copy
import dataclasses
import functools
import gc
import io
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import thunder
from thunder import TensorProxy
from thunder.core.symbol import OpTags
from thunder.core.transforms import get_grad, put_grads
from thunder.errors import CaptureError, FallbackWarning
from thunder.extend import OperatorExecutor
from thunder.tests.litgpt_model import GPT

PROGRAMS = {}
GAPS = {}  # by program: what is not there yet
BY_THE_ORIGINAL: set[str] = set()  # programs of which the original runs


def program(f=None, *, gap=None):
    if f is None:
        return functools.partial(program, gap=gap)
    PROGRAMS[f.__name__] = f
    if gap:
        GAPS[f.__name__] = gap
    return f


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, (list, tuple)) else [value]


# the gradient of a matrix beside an input that gets none is computed in another layout than eager's (`of_second`): bits
# are equal where the library's kernel adds up in one order for both, which not every CPU's does
OTHER_LAYOUTS = {"low_rank_adapters"}


def assert_same(got, want, **tolerance):
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    got, want = leaves(got), leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want):
        if isinstance(w, torch.Tensor):
            assert isinstance(g, torch.Tensor), g
            assert (g.dtype, g.shape, g.requires_grad) == (w.dtype, w.shape, w.requires_grad)
            torch.testing.assert_close(g, w, **tolerance, equal_nan=True)
        else:
            assert g == w or g is w


def compare(run, jit=thunder.jit):
    torch.manual_seed(0)
    want = run(lambda f: f)
    torch.manual_seed(0)
    tolerance = {"rtol": 1.3e-6, "atol": 1e-5} if run.__name__ in OTHER_LAYOUTS else {}  # torch.testing's for float32
    assert_same(run(jit), want, **tolerance)


# ---------------------------------------------------------------------------------------------------------------- what
# programs are made of


def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + seed))


def tokens(seed, *shape, below=300):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def weights(module):
    return [t.detach().clone() for t in (*module.parameters(), *module.buffers())]


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def square(y):
    return y.pow(2).mean()


def fit(
    compile,
    module,
    batch,
    loss=lambda c, *x: square(c(*x)),
    *,
    steps=3,
    optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
    schedule=None,
    clip=None,
):
    """Losses, norms and the weights after some steps. batch: step -> the arguments of loss after the module."""
    compiled, optimizer, seen = compile(module), optimizer(module.parameters()), []
    schedule = schedule(optimizer) if schedule else None
    for i in range(steps):
        value = loss(compiled, *batch(i))
        optimizer.zero_grad()
        value.backward()
        if clip:
            seen.append(nn.utils.clip_grad_norm_(module.parameters(), clip))
        optimizer.step()
        if schedule:
            schedule.step()
        seen.append(value.detach())
    return seen, weights(module)


def perceptron():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


# ----------------------------------------------------------------------------------------------------------------
# models


@program
def transformer(compile):
    module = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    return fit(compile, module, lambda i: (data(i, 2, 5, 16), data(i + 50, 2, 4, 16)))


@program
def causal_transformer_with_dropout(compile):
    module = nn.Transformer(16, 2, 1, 2, 32, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return fit(
        compile,
        module,
        lambda i: (data(i, 2, 5, 16), data(i + 50, 2, 4, 16)),
        lambda c, a, b: square(c(a, b, tgt_mask=mask, tgt_is_causal=True)),
    )


@program
def encoder_with_padding(compile):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return fit(compile, module, lambda i: (data(i, 2, 5, 16),), lambda c, x: square(c(x, src_key_padding_mask=padding)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(8, 6, batch_first=True, **options)
        self.head = nn.Linear(6 * (1 + self.layers.bidirectional), 3)

    def forward(self, x, state=None):
        y, state = self.layers(x, state)
        return self.head(y), state


def recurrent(kind, **options):
    return lambda compile: fit(
        compile, Recurrent(kind, **options), lambda i: (data(i, 2, 5, 8),), lambda c, x: square(c(x)[0])
    )


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    PROGRAMS[_kind.__name__] = recurrent(_kind)
    PROGRAMS[f"{_kind.__name__}, two layers, both directions"] = recurrent(_kind, num_layers=2, bidirectional=True)
    PROGRAMS[f"{_kind.__name__}, two layers, dropout"] = recurrent(_kind, num_layers=2, dropout=0.3)


@program
def truncated_backpropagation_through_time(compile):
    module = Recurrent(nn.LSTM)
    compiled, optimizer, state, seen = compile(module), torch.optim.SGD(module.parameters(), 0.1), None, []
    for i in range(3):
        y, state = compiled(data(i, 2, 5, 8), state)
        state = tuple(s.detach() for s in state)
        square(y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(state)
    return seen, weights(module)


@program
def recurrent_cells_in_a_loop(compile):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.lower, self.upper = nn.LSTMCell(8, 6), nn.GRUCell(6, 6)

        def forward(self, x):
            h = c = torch.zeros(x.shape[0], 6)
            z = torch.zeros(x.shape[0], 6)
            for t in range(x.shape[1]):
                h, c = self.lower(x[:, t], (h, c))
                z = self.upper(h, z)
            return z

    return fit(compile, Cells(), lambda i: (data(i, 2, 5, 8),))


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.convolution1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.convolution2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), norm(8)
        self.skip = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), norm(8))
        self.head, self.relu = nn.Linear(8, 5), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.convolution1(x)))
        y = self.norm2(self.convolution2(y))
        y += self.skip(x)
        y = F.max_pool2d(self.relu(y), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


def classify(compile, module):
    target = torch.tensor([0, 1, 4, 2])
    momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    return fit(
        compile,
        module,
        lambda i: (data(i, 4, 3, 8, 8),),
        lambda c, x: F.cross_entropy(c(x), target, label_smoothing=0.1),
        optimizer=momentum,
    )


@program
def residual_network_with_group_norm(compile):
    return classify(compile, Residual(lambda n: nn.GroupNorm(2, n)))


@program
def residual_network_with_frozen_batch_norm(compile):
    return classify(compile, Residual(nn.BatchNorm2d).eval())


@program
def residual_network_with_batch_norm(compile):
    return classify(compile, Residual(nn.BatchNorm2d))


@program
def convolutions_down_and_up(compile):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.norm = (
                nn.Conv2d(3, 6, 3, 2, 1),
                nn.ConvTranspose2d(6, 3, 4, 2, 1),
                nn.LocalResponseNorm(2),
            )

        def forward(self, x):
            y = self.up(F.silu(self.norm(self.down(x))))
            return torch.cat(
                (F.interpolate(y, scale_factor=0.5, mode="bilinear", align_corners=False), F.avg_pool2d(x, 2)), 1
            )

    return fit(
        compile, Net(), lambda i: (data(i, 2, 3, 8, 8),), lambda c, x: F.smooth_l1_loss(c(x), torch.zeros(2, 6, 4, 4))
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def predict(c, ids):
    return F.cross_entropy(c(ids).flatten(0, 1), ids.flatten())


@program
def tied_weights(compile):
    return fit(compile, Tied(), lambda i: (tokens(i, 2, 3, below=11),), predict)


@program
def tied_weights_that_are_untied_later(compile):
    module, seen = Tied(), []
    compiled = compile(module)
    for _ in range(2):
        module.zero_grad()
        compiled(tokens(0, 1, 3, below=11)).sum().backward()
        seen.append(gradients(module))
        module.head.weight = nn.Parameter(module.embedding.weight.detach() * 2)
    return seen


for _name in ("llama2-like", "llama3-like", "gpt-neox-like", "falcon-7b-like", "mixtral-like"):
    PROGRAMS[_name] = lambda compile, name=_name: fit(
        compile, GPT.from_name(name, n_layer=1, block_size=16), lambda i: (tokens(i, 2, 9),), predict
    )


@program
def variational_autoencoder(compile):
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

        def forward(self, x):
            mean, log_variance = self.encoder(x).chunk(2, -1)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
            return (
                F.mse_loss(self.decoder(z), x, reduction="sum")
                - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
            )

    return fit(compile, Autoencoder(), lambda i: (data(i, 4, 8),), lambda c, x: c(x))


@program
def adversarial_pair(compile):
    generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))
    g, d, loss, seen = compile(generator), compile(critic), nn.BCEWithLogitsLoss(), []
    steps = torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
    for i in range(3):
        fake = g(data(i + 30, 6, 4))
        steps[1].zero_grad()
        critic_loss = loss(d(data(i, 6, 8)), torch.ones(6, 1)) + loss(d(fake.detach()), torch.zeros(6, 1))
        critic_loss.backward()
        steps[1].step()
        steps[0].zero_grad()
        generator_loss = loss(d(fake), torch.ones(6, 1))
        generator_loss.backward()  # through the critic, whose gradients are thrown away at its next step
        steps[0].step()
        seen += [critic_loss.detach(), generator_loss.detach(), gradients(critic)]
    return seen, weights(generator), weights(critic)


@program
def distillation(compile):
    teacher, student = nn.Linear(8, 4), nn.Linear(8, 4)
    t, s, optimizer = compile(teacher), compile(student), torch.optim.SGD(student.parameters(), 0.1)
    for i in range(3):
        with torch.no_grad():
            wanted = F.softmax(t(data(i, 5, 8)) / 2, -1)
        F.kl_div(F.log_softmax(s(data(i, 5, 8)) / 2, -1), wanted, reduction="batchmean").backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(student), gradients(teacher)


@program
def parametrized_weight(compile):
    return fit(compile, nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), lambda i: (data(i, 2, 4),))


@program
def embedding_bag(compile):
    return fit(compile, nn.EmbeddingBag(7, 3), lambda i: (tokens(i, 5, below=7), torch.tensor([0, 2])))


@program
def sparse_embedding_gradients(compile):
    module = nn.Embedding(7, 3, sparse=True)
    compile(module)(torch.tensor([1, 1, 2])).sum().backward()
    return module.weight.grad.is_sparse, module.weight.grad.to_dense()


@program
def checkpointed_block(compile):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    return fit(compile, Checkpointed(), lambda i: (data(i, 3, 4),))


# ---------------------------------------------------------------------------------------------------------------- the
# training loop


def with_optimizer(kind):
    def run(compile):
        module = perceptron()
        compiled, optimizer, seen = compile(module), kind(module.parameters(), lr=0.01), []
        for i in range(3):

            def closure(i=i):
                optimizer.zero_grad()
                loss = square(compiled(data(i, 3, 4)))
                loss.backward()
                return loss

            seen.append(optimizer.step(closure).detach())
        return seen, weights(module)

    return run


for _name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "LBFGS", "Rprop"):
    PROGRAMS[f"optimizer {_name}"] = with_optimizer(getattr(torch.optim, _name))

_rates = torch.optim.lr_scheduler
for _name, _schedule in {
    "StepLR": lambda o: _rates.StepLR(o, 2),
    "OneCycleLR": lambda o: _rates.OneCycleLR(o, 0.1, total_steps=10),
    "warmup, then cosine": lambda o: _rates.SequentialLR(
        o, [_rates.LinearLR(o, 0.1, total_iters=2), _rates.CosineAnnealingLR(o, 5)], [2]
    ),
}.items():
    PROGRAMS[f"learning rates {_name}, clipped gradients"] = lambda compile, s=_schedule: fit(
        compile,
        perceptron(),
        lambda i: (data(i, 3, 4),),
        schedule=s,
        clip=0.5,
        steps=4,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    )


@program
def accumulated_gradients(compile):
    module = perceptron()
    compiled, optimizer, seen = compile(module), torch.optim.Adam(module.parameters()), []
    for i in range(6):
        (square(compiled(data(i, 3, 4))) / 3).backward()
        if i % 3 == 2:
            seen.append(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad(set_to_none=i < 3)
    return seen, weights(module), gradients(module)


@program
def exponential_moving_average(compile):
    module = nn.Linear(4, 2)
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    compiled, compiled_average, optimizer, seen = (
        compile(module),
        compile(average),
        torch.optim.SGD(module.parameters(), 0.1),
        [],
    )
    for i in range(3):
        square(compiled(data(i, 3, 4))).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(module)
        with torch.no_grad():
            seen.append(compiled_average(data(9, 3, 4)))
    return seen, weights(average)


@program
def momentum_teacher(compile):
    module = nn.Linear(4, 2)
    teacher = copy.deepcopy(module).requires_grad_(False)
    s, t, optimizer = compile(module), compile(teacher), torch.optim.SGD(module.parameters(), 0.1)
    for i in range(3):
        square(s(data(i, 3, 4)) - t(data(i + 9, 3, 4))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), module.parameters()):
                p.lerp_(q, 0.1)
    return weights(teacher), gradients(teacher)


@program
def frozen_layers_that_thaw(compile):
    module, seen = perceptron(), []
    module[0].requires_grad_(False)
    compiled = compile(module)
    for i in range(4):
        if i == 2:
            module[0].requires_grad_(True)
            module[2].bias.requires_grad_(False)
        module.zero_grad()
        square(compiled(data(i, 3, 4))).backward()
        seen.append(gradients(module))
    return seen


@program
def training_and_evaluation_in_turns(compile):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled, seen = compile(module), []
    for i in range(2):
        seen.append(compiled.train()(data(i, 3, 4)))
        with torch.no_grad():
            seen.append(compiled.eval()(data(i, 3, 4)))
        with torch.inference_mode():
            seen.append(compiled(data(i, 3, 4)).is_inference())
        module.requires_grad_(False)
        seen.append(compiled(data(i, 3, 4)))
        module.requires_grad_(True)
        seen[0].sum().backward(retain_graph=True)
    return seen[1:], gradients(module)


@program
def weights_that_change_from_outside(compile):
    module = nn.Linear(4, 2)
    compiled, start, seen = compile(module), copy.deepcopy(module.state_dict()), []

    def call(dtype=torch.float32):
        module.zero_grad()
        y = compiled(data(0, 3, 4).to(dtype))
        y.sum().backward()
        seen.append((y.detach(), gradients(module)))

    call()
    with torch.no_grad():
        module.weight.mul_(2)
    call()
    module.load_state_dict(start)
    call()
    module.weight = nn.Parameter(torch.ones(2, 4))
    call()
    module.weight.data, module.bias.data = torch.ones(5, 4), torch.zeros(5)
    call()
    module.double()
    call(torch.float64)
    return seen


@program
def modules_that_change_from_outside(compile):
    module, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    compiled = compile(module)
    for change in (
        lambda: None,
        lambda: module.__setitem__(1, nn.Tanh()),
        lambda: module.append(nn.Linear(4, 1)),
        lambda: module.pop(1),
    ):
        change()
        module.zero_grad()
        compiled(data(0, 3, 4)).sum().backward()
        seen.append(gradients(module))
    return seen


@program
def batches_of_many_sizes(compile):
    module, seen = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), []
    compiled = compile(module)
    for size in (1, 3, 2, 3, 0, 7):
        module.zero_grad()
        compiled(data(size, size, 4)).pow(2).sum().backward()
        seen.append(gradients(module))
    return seen


@program
def whole_models_of_many_sizes(compile):
    module, seen = GPT.from_name("llama3-like", n_layer=1, block_size=16), []
    compiled = compile(module)
    for batch, time in ((2, 5), (1, 7), (3, 4)):
        module.zero_grad()
        predict(compiled, tokens(batch, batch, time)).backward()
        seen.append(gradients(module))
    return seen


@program
def state_from_call_to_call(compile):
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last, self.calls = nn.Linear(4, 4), None, 0

        def forward(self, x):
            y = self.linear(x) if self.last is None else self.linear(x) + self.last * self.calls
            self.last = y.detach()
            self.calls += 1
            return y

    module = Remembering()
    compiled = compile(module)
    for i in range(3):
        compiled(data(i, 2, 4)).sum().backward()
    return module.last, module.calls, gradients(module)


@program
def weights_that_are_normalized_in_the_forward(compile):
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(data(0, 4, 4)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
            return x @ self.weight + self.bias

    return fit(compile, Normalized(), lambda i: (data(i, 3, 4),))


def writes_a_whole(x):
    y = x * 2
    with torch.no_grad():
        y.copy_(x.round())
        z = y * 2
    return y * x.cos() + z


def writes_views(x):
    y = x * 2
    first = y[0]
    with torch.no_grad():
        first.mul_(3)
        y[1:, 0] = 5
        y.t()[1].add_(1)
    y.mul_(x)
    return y.sin().sum() + first.cos().sum()


def reads_a_view_without_grad_first(x):
    y = x * 2
    first = y[0]
    y.mul_(2)
    with torch.no_grad():
        total = first.sum()
    return first * total


@program
def writes_behind_autograd(compile):
    seen = []
    for f in (writes_a_whole, writes_views, reads_a_view_without_grad_first):
        x = data(0, 3, 3).requires_grad_()
        y = compile(f)(x)
        y.sum().backward()
        seen += [y, x.grad]
    return seen


@program
def distributions(compile):
    policy = nn.Linear(4, 2)

    def loss(x, action):
        mean, log_deviation = policy(x).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_deviation.exp(), validate_args=False)
        return -(normal.log_prob(action).sum() + normal.entropy().sum() + normal.rsample().sum())

    compile(loss)(data(0, 5, 4), data(1, 5, 1)).backward()
    return gradients(policy)


@program
def graph_from_call_to_call(compile):
    class Recurrence(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4), None

        def forward(self, x):
            self.last = torch.tanh(self.linear(x) if self.last is None else self.linear(x) + self.last)
            return self.last

    module = Recurrence()
    compiled = compile(module)
    for i in range(3):
        y = compiled(data(i, 2, 4))
    y.sum().backward()
    return module.last, gradients(module)


@program
def two_threads(compile):
    module, gradients = nn.Linear(3, 3), [None, None]
    compiled = compile(module)

    def work(i):
        gradients[i] = torch.autograd.grad(square(compiled(data(i, 2, 3))), module.weight)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return gradients


@program
def whole_step_in_one_function(compile):
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = square(module(x))
        loss.backward()
        optimizer.step()
        return loss

    compiled = compile(step)
    return [compiled(data(i, 3, 4)).detach() for i in range(3)], weights(module)


# ----------------------------------------------------------------------------------------------------------------
# models that keep state, or are built in parts


@program
def low_rank_adapters(compile):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.on = base.requires_grad_(False), True
            self.down, self.up = (
                nn.Parameter(data(5, 2, base.in_features)),
                nn.Parameter(torch.zeros(base.out_features, 2)),
            )

        def forward(self, x):
            return self.base(x) + (x @ self.down.t() @ self.up.t() * 0.5 if self.on else 0)

    module = nn.Sequential(Adapted(nn.Linear(4, 6)), nn.ReLU(), Adapted(nn.Linear(6, 2)))
    seen = fit(compile, module, lambda i: (data(i, 3, 4),))
    module[0].on = False
    return seen, compile(module)(data(0, 3, 4))


@program
def hooks_of_submodules(compile):
    module, activations = perceptron(), []
    module[0].register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))
    module[0].register_forward_hook(lambda m, inputs, y: y * 3)
    watching = module[1].register_forward_hook(lambda m, inputs, y: activations.append(y.detach()))
    compiled = compile(module)
    compiled(data(0, 3, 4)).sum().backward()
    watching.remove()
    compiled(data(1, 3, 4)).sum().backward()
    return activations, gradients(module)


@program
def auxiliary_loss_in_an_attribute(compile):
    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.penalty = nn.Linear(4, 4), None

        def forward(self, x):
            y = self.linear(x)
            self.penalty = square(y)
            return y

    module = Penalized()
    return fit(compile, module, lambda i: (data(i, 3, 4),), lambda c, x: c(x).sum() + module.penalty)


@program
def buffers_that_follow_the_data(compile):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x):
            y = self.linear(x)
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
                    self.count += 1
            return y - self.mean

    module = Centred()
    return fit(compile, module, lambda i: (data(i, 3, 4),)), compile(module.eval())(data(0, 3, 4))


@program
def one_batch_norm_in_two_places(compile):
    norm = nn.BatchNorm1d(4)
    module = nn.Sequential(
        norm,
        nn.Linear(4, 4),
        norm,
        nn.BatchNorm1d(4, affine=False, momentum=0.3),
        nn.BatchNorm1d(4, track_running_stats=False),
    )
    return fit(compile, module, lambda i: (data(i, 5, 4),), lambda c, x: c(x).pow(3).sum()), compile(module.eval())(
        data(0, 5, 4)
    )


@program
def spectral_norm(compile):
    return fit(compile, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), lambda i: (data(i, 2, 4),))


@program
def layers_left_out_at_random(compile):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                mask = (torch.rand(x.shape[0], 1) < 0.7).to(x.dtype)
                x = x + mask * layer(F.dropout(x, 0.1, self.training)) / 0.7
            return x

    return fit(compile, Deep(), lambda i: (data(i, 3, 4),))


@program
def text_generated_between_steps(compile):
    module, seen = GPT.from_name("llama2-like", n_layer=1, block_size=16), []
    compiled, optimizer = compile(module), torch.optim.AdamW(module.parameters(), 1e-2)
    for i in range(2):
        predict(compiled, tokens(i, 2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        text = tokens(i, 1, 2)
        with torch.no_grad():
            for _ in range(4):
                text = torch.cat((text, compiled(text)[:, -1].argmax(-1, keepdim=True)), 1)
        seen.append(text)
    return seen, weights(module)


@program
def quantized_codes(compile):
    book, encoder = nn.Embedding(6, 4), nn.Linear(4, 4)

    def encode(x):
        z = encoder(x)
        codes = torch.cdist(z, book.weight).argmin(1)
        q = book(codes)
        return z + (q - z).detach(), 0.25 * F.mse_loss(q.detach(), z) + F.mse_loss(q, z.detach()), codes

    quantized, loss, codes = compile(encode)(data(0, 5, 4))
    (quantized.sum() + loss).backward()
    return codes, gradients(book), gradients(encoder)


@program
def noise_and_times_of_a_diffusion_model(compile):
    module, rates = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4)), torch.linspace(0.99, 0.01, 10)

    def loss(x):
        time, noise = torch.randint(0, 10, (x.shape[0],)), torch.randn_like(x)
        share = rates[time][:, None]
        return F.mse_loss(
            module(torch.cat((share.sqrt() * x + (1 - share).sqrt() * noise, time[:, None] / 10), 1)), noise
        )

    compiled, seen = compile(loss), []
    for i in range(2):
        seen.append(compiled(data(i, 3, 4)))
        seen[-1].backward()
    return seen, gradients(module)


@program
def checkpoints_on_disk(compile):
    module, other, file = perceptron(), perceptron(), io.BytesIO()
    compiled = compile(module)
    optimizer = torch.optim.Adam(compiled.parameters())
    square(compiled(data(0, 3, 4))).backward()
    optimizer.step()
    torch.save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    compiled = compile(other)
    compiled.load_state_dict(saved["model"])
    optimizer = torch.optim.Adam(compiled.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    square(compiled(data(1, 3, 4))).backward()
    optimizer.step()
    return list(saved["model"]), weights(other)


@program
def copies_of_compiled_modules(compile):
    module = perceptron()
    compiled = compile(module)
    compiled(data(0, 3, 4)).sum().backward()
    copied, pickled = copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))
    for c in (copied, pickled):
        c.zero_grad()
        c(data(1, 3, 4)).sum().backward()
    return gradients(copied), gradients(pickled), gradients(module)


@program
def methods_of_the_compiled_module(compile):
    module, seen = perceptron(), []
    compiled = compile(module)
    compiled.apply(lambda m: nn.init.constant_(m.weight, 0.1) if isinstance(m, nn.Linear) else None)
    compiled(data(0, 3, 4)).sum().backward()
    seen.append(gradients(compiled))
    compiled.zero_grad()
    compiled.requires_grad_(False)
    seen.append(compiled(data(0, 3, 4)))
    compiled.requires_grad_(True).double()
    compiled(data(0, 3, 4).double()).sum().backward()
    return (
        seen,
        gradients(compiled),
        module.eval().training,
        compiled.training,
        [n for n, _ in compiled.named_parameters()],
        len(compiled),
    )


@program
def batches_of_a_loader(compile):
    module = perceptron()
    compiled, optimizer = compile(module), torch.optim.SGD(module.parameters(), 0.1)
    dataset = torch.utils.data.TensorDataset(data(0, 8, 4), torch.arange(8) % 2)
    for x, target in torch.utils.data.DataLoader(
        dataset, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0)
    ):
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), target).backward()
        optimizer.step()
    return weights(module)


# ---------------------------------------------------------------------------------------------------------------- mixed
# precision


@program
def autocast_around_the_model(compile):
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    compiled, optimizer, seen = compile(module), torch.optim.AdamW(module.parameters()), []
    for i in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(data(i, 4, 8))
            loss = F.cross_entropy(y, torch.tensor([0, 1, 2, 0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(y.detach())
    return seen, weights(module)


@program
def autocast_inside_the_model(compile):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lower, self.upper = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.lower(x).relu()
                with torch.autocast("cpu", enabled=False):
                    return self.upper(y.float())

    return fit(compile, Mixed(), lambda i: (data(i, 4, 8),))


@program
def scaled_gradients_with_an_overflow(compile):
    module = nn.Linear(4, 2)
    compiled, optimizer, seen = compile(module), torch.optim.SGD(module.parameters(), 0.1), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(4):
        with torch.autocast("cpu", torch.float16):
            loss = square(compiled(data(i, 3, 4)).float()) * (math.inf if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(scaler.get_scale())
    return seen, weights(module)


def test_gradients_are_unscaled_in_place():
    """Variables of the scaler's code name the flag that the kernel writes beside them."""
    module = nn.Linear(4, 2)
    optimizer, scaler = torch.optim.SGD(module.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        optimizer.zero_grad()
        scaler.scale(square(module(x))).backward()
        scaler.step(optimizer)
        scaler.update()

    compiled = thunder.jit(step, fallback="error")
    for i in range(3):
        compiled(data(i, 3, 4))
    trace = thunder.last_traces(compiled)[-1]
    (unscaling,) = [b for b in trace.bound_symbols if "unscale" in b.sym.name]
    assert OpTags.IN_PLACE in unscaling.sym.tags


@program
def bfloat16_weights(compile):
    return fit(
        compile,
        nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)).bfloat16(),
        lambda i: (data(i, 3, 4).bfloat16(),),
    )


# ----------------------------------------------------------------------------------------------------------------
# autograd from outside


@program
def hooks_on_tensors_and_parameters(compile):
    module, seen = nn.Linear(4, 2), []
    compiled, x = compile(module), data(1, 3, 4).requires_grad_()
    x.register_hook(lambda g: g * 2)
    module.weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    module.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y = compiled(x)
    y.register_hook(lambda g: seen.append(g.clone()))
    y.retain_grad()
    y.pow(2).sum().backward()
    return seen, x.grad, y.grad, gradients(module)


@program
def optimizers_in_the_backward(compile):
    module = perceptron()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in module.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(update)
    compiled = compile(module)
    for i in range(3):
        square(compiled(data(i, 3, 4))).backward()
    return weights(module), gradients(module)


@program
def graph_kept_twice(compile):
    x, seen = data(0, 3).requires_grad_(), []
    y = compile(lambda x: (x.exp() * x).sum())(x)
    for keep in (True, True, False):
        y.backward(retain_graph=keep)
        seen.append(x.grad.clone())
    return seen


@program
def gradients_of_some_inputs(compile):
    module, x = nn.Linear(3, 2), data(0, 2, 3).requires_grad_()
    compile(module)(x).sum().backward(inputs=[module.weight])
    return x.grad, gradients(module)


@program
def two_losses_of_one_output(compile):
    module = nn.Linear(3, 2)
    y = compile(module)(data(0, 2, 3))
    y[:, 0].sum().backward(retain_graph=True)
    first = gradients(module)
    y[:, 1].pow(2).sum().backward()
    return first, gradients(module)


@program
def one_module_called_three_times(compile):
    module = nn.Linear(4, 4)
    compiled = compile(module)
    compiled(compiled(compiled(data(0, 2, 4)))).pow(2).sum().backward()
    return gradients(module)


@program
def compiled_modules_between_eager_ones(compile):
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    compile(c)(torch.tanh(b(compile(a)(data(0, 2, 4))))).sum().backward()
    return gradients(a), gradients(b), gradients(c)


@program
def compiled_inside_compiled(compile):
    module = nn.Linear(3, 3)
    inner = compile(module)
    compile(lambda x: inner(x).tanh())(data(0, 2, 3)).sum().backward()
    return gradients(module)


def around(use_reentrant):
    def run(compile):
        module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), data(0, 3, 4).requires_grad_()
        checkpoint(compile(module), x, use_reentrant=use_reentrant).sum().backward()
        return x.grad, gradients(module)

    return run


PROGRAMS["checkpoint around a compiled module"] = around(False)
PROGRAMS["reentrant checkpoint around a compiled module"] = around(True)


@program
def saved_on_the_cpu(compile):
    x, compiled = data(0, 3).requires_grad_(), compile(lambda x: x.sin() * x)
    with torch.autograd.graph.save_on_cpu():
        y = compiled(x).sum()
    y.backward()
    return x.grad


@program
def gradient_that_a_user_writes_to(compile):
    x, cotangent = data(0, 3).requires_grad_(), torch.ones(3)
    compile(lambda x: x + 1)(x).backward(cotangent)
    x.grad.mul_(7)  # neither the cotangent nor another input's gradient may be this tensor
    a, b = data(0, 3).requires_grad_(), data(1, 3).requires_grad_()
    compile(lambda a, b: (a + b).sum())(a, b).backward()
    a.grad.mul_(7)
    return x.grad, cotangent, a.grad, b.grad


@program
def saved_value_that_is_overwritten(compile):
    x, w = data(0, 3).requires_grad_(), data(1, 3)
    y = compile(lambda x, w: (x * w).sum())(x, w)
    w.mul_(2)
    module = perceptron()
    z = square(compile(module)(data(0, 3, 4)))
    z.backward(retain_graph=True)
    torch.optim.SGD(module.parameters(), 0.1).step()
    for loss in (y, z):
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
    return x.grad, gradients(module)


@program
def unused_output(compile):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    module = Heads()
    compile(module)(data(0, 2, 3))[0].sum().backward()
    return gradients(module)


@program
def unused_output_with_an_infinite_derivative(compile):
    x = torch.zeros(3, requires_grad=True)
    compile(lambda x: (x * 2, x.sqrt()))(x)[0].sum().backward()
    return x.grad


@program(gap="the outputs of a compiled function are siblings: one is not reached from another")
def derivative_by_an_output(compile):
    x = data(0, 3).requires_grad_()
    a, b = compile(lambda x: (y := x.sin(), y * y))(x)
    return torch.autograd.grad(b.sum(), (a, x), allow_unused=True)


@program
def unused_parameter(compile):
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.b(x)
            return self.a(x)

    module = Forgetful()
    compile(module)(data(0, 2, 3)).sum().backward()
    return gradients(module)


# ----------------------------------------------------------------------------------------------------------------
# programs and what they return


@program
def regions_without_grad(compile):
    @torch.no_grad()
    def decorated(x):
        return x.tan()

    def f(x):
        with torch.no_grad():
            a = x.sin()
        with torch.set_grad_enabled(False):
            b = x.cos()
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        c = x.exp()
        torch.set_grad_enabled(before)
        return a * x + b * x + c * x + decorated(x) * x, torch.is_grad_enabled(), a.requires_grad, c.is_leaf

    x = data(0, 3).requires_grad_()
    result = compile(f)(x)
    result[0].sum().backward()
    return result, x.grad


@program
def detached_results(compile):
    x = data(0, 3).requires_grad_()
    y = compile(lambda x: x.detach() * 2)(x)
    return y, y.grad_fn is None, y.is_leaf


@program
def results_that_are_inputs_and_views(compile):
    x, w = data(0, 3).requires_grad_(), data(1, 3)
    first, second, product, named, listed = compile(lambda x, w: (x, w, x * w, {"x": x, "view": x.view(3, 1)}, [w]))(
        x, w
    )
    (product.sum() + first.sum() + named["view"].sum()).backward()
    return first is x, second is w, named["x"] is x, listed[0] is w, named["view"]._is_view(), x.grad


@program
def result_that_is_overwritten(compile):
    x = data(0, 4).requires_grad_()
    y = compile(lambda x: x * 2)(x)
    y.mul_(3)
    y.sum().backward()
    return x.grad


@program
def results_that_are_no_floats(compile):
    x = data(0, 3, 4).requires_grad_()
    indices, largest, shape, size, three, none, text, ordered = compile(
        lambda x: (x.argmax(1), x.topk(2), x.shape, x.size(0), 3, None, "s", x.sort(1))
    )(x)
    (largest.values.sum() + ordered[0][:, 0].sum()).backward()
    return indices, largest, tuple(shape), type(shape) is torch.Size, size, three, none, text, ordered, x.grad


@dataclasses.dataclass
class Prediction:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple = ()
    extra: object = None


@program
def dataclass_as_a_result(compile):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x, target):
            y = self.linear(x)
            return Prediction(F.cross_entropy(y, target), y, (x, y.relu()), {"constant": y.detach()})

    module = Model()
    result = compile(module)(data(0, 3, 4), torch.tensor([0, 1, 2]))
    result.loss.backward()
    return type(result) is Prediction, result.logits, result.hidden[1], result.extra, gradients(module)


@program
def loss_inside(compile):
    module, loss = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1)
    compiled, seen = compile(lambda x, target: loss(module(x), target)), []
    for i in range(2):
        value = compiled(data(i, 3, 4), torch.tensor([0, 1, 2]))
        value.backward()
        seen.append(value)
    return seen, gradients(module)


@program
def losses_that_are_no_numbers(compile):
    x = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    results = compile(
        lambda x: (
            x.sqrt(),
            torch.where(x > 0, x.log(), x),
            x.abs(),
            x.norm(),
            (x * 0).norm(),
            F.cross_entropy(x[None], torch.tensor([-100])),
        )
    )(x)
    sum(r.sum() for r in results).backward()
    return results, x.grad


@program
def equal_elements(compile):
    x = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]], requires_grad=True)
    results = compile(
        lambda x: (
            x.amax(1),
            x.max(),
            x.max(1)[0],
            x.clamp(0, 1),
            x.relu(),
            x.median(),
            F.relu6(x * 6),
            torch.maximum(x, x * 1),
            F.hardtanh(x),
        )
    )(x)
    sum(r.sum() for r in results).backward()
    return x.grad


@program
def layouts_of_gradients(compile):
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    compile(convolution)(data(0, 2, 3, 6, 6).to(memory_format=torch.channels_last)).sum().backward()
    x, w = data(0, 3, 4).t().requires_grad_(), data(1, 5, 3).requires_grad_()
    compile(lambda x, w: F.linear(x, w).sum() + (x * 2).sum())(x, w).backward()
    return [(g, g.stride()) for g in (convolution.weight.grad, x.grad, w.grad)]


# ----------------------------------------------------------------------------------------------------------------
# torch.autograd.Function


class Several(torch.autograd.Function):
    """Several outputs, one of them integers; arguments that are no tensors; gradients only where they are needed."""

    @staticmethod
    def forward(ctx, x, y, factor, name, flag=True):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        index = (x * y).argmax()
        ctx.mark_non_differentiable(index)
        return x * y * factor, x + y, index

    @staticmethod
    def backward(ctx, g, h, _):
        x, y = ctx.saved_tensors
        for_x = g * y * ctx.factor + h if ctx.needs_input_grad[0] else None
        for_y = g * x * ctx.factor + h if ctx.needs_input_grad[1] else None
        return for_x, for_y, None, None, None


@program
def function_with_several_outputs(compile):
    seen = []
    for first, second in ((True, True), (True, False), (False, True)):
        x, y = data(0, 3).requires_grad_(first), data(1, 3).requires_grad_(second)
        result = compile(lambda x, y: Several.apply(x, y, 2.5, "name"))(x, y)
        (result[0].sum() + result[1].pow(2).sum()).backward()
        seen += [x.grad, y.grad, result]
    return seen


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.strength, None


@program
def functions_with_a_gradient_of_their_own(compile):
    compiled, seen = compile(lambda x, strength: (StraightThrough.apply(x * 3) * Reversed.apply(x, strength)).sum()), []
    for strength in (1.0, 2.0):
        x = data(0, 3).requires_grad_()
        compiled(x, strength).backward()
        seen.append(x.grad)
    return seen


class Unmaterialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return (0 if g is None else g * 2) + (0 if h is None else h * 300)


@program
def function_without_materialized_cotangents(compile):
    x = data(0, 3).requires_grad_()
    compile(lambda x: Unmaterialized.apply(x))(x)[0].sum().backward()
    return x.grad


@torch.library.custom_op("thunder_tests::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, factor: int) -> torch.Tensor:
    return torch.sin(x * factor)


@scaled_sine.register_fake
def _(x, factor):
    return torch.empty_like(x)


scaled_sine.register_autograd(
    lambda ctx, g: (g * torch.cos(ctx.saved_tensors[0] * ctx.factor) * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "factor", inputs[1])),
)


@program
def operator_of_a_library(compile):
    x = data(0, 3).requires_grad_()
    compiled = compile(lambda x: (scaled_sine(x, 2) * torch.ops.thunder_tests.scaled_sine(x, 3)).sum())
    compiled(x).backward()
    with torch.no_grad():
        return x.grad, compiled(x)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.xfail(strict=True, reason=GAPS[n])) if n in GAPS else n for n in PROGRAMS],
)
def test_trains_as_in_eager(name):
    if name in BY_THE_ORIGINAL:
        with pytest.warns(FallbackWarning):
            compare(PROGRAMS[name], jit=lambda f: thunder.jit(f, fallback="eager"))
        return
    compare(PROGRAMS[name])


# ---------------------------------------------------------------------------------------------------------------- sizes
# that stay symbolic


SYMBOLIC = [
    "batches_of_many_sizes", "whole_models_of_many_sizes", "state_from_call_to_call", "transformer", "LSTM",
    "tied_weights", "variational_autoencoder", "loss_inside",
    "accumulated_gradients", "convolutions_down_and_up", "frozen_layers_that_thaw", "encoder_with_padding",
    "adversarial_pair", "modules_that_change_from_outside", "layouts_of_gradients",
]  # fmt: skip


@pytest.mark.parametrize("name", SYMBOLIC)
def test_trains_with_symbolic_sizes(name):
    compare(PROGRAMS[name], jit=lambda f: thunder.jit(f, cache="symbolic values"))


@pytest.mark.parametrize(
    "name",
    [
        "autocast_around_the_model",
        "bfloat16_weights",
        "transformer",
        "residual_network_with_batch_norm",
        "writes_behind_autograd",
    ],
)
def test_traces_are_whole_after_each_pass(name):
    compare(PROGRAMS[name], jit=lambda f: thunder.jit(f, debug_options=thunder.DebugOptions(check_traces=True)))


def test_numbers_that_a_result_computes():
    """Beside a tensor that requires grad: the result is made apart from the forward."""
    compiled = thunder.jit(lambda x: (x * 2, math.floor(x.shape[0] / 2), x.shape[0] * 3 + 1), cache="symbolic values")
    for size in (4, 7):
        assert compiled(data(0, size, 3).requires_grad_())[1:] == (size // 2, size * 3 + 1)
    assert thunder.cache_misses(compiled) == 1


def test_one_backward_serves_all_sizes():
    compiled, w = (
        thunder.jit(lambda x, w, s: (x.reshape(x.shape[0] * 2, -1) @ w * s).sum(), cache="symbolic values"),
        data(0, 3, 2).requires_grad_(),
    )
    for size, scale in ((4, 0.5), (2, 1.5), (7, 2.5)):
        x = data(size, size, 6).requires_grad_()
        got = torch.autograd.grad(compiled(x, w, scale), (x, w))
        want = torch.autograd.grad((x.reshape(size * 2, -1) @ w * scale).sum(), (x, w))
        assert_same(got, want)
    assert thunder.cache_misses(compiled) == 1


# ----------------------------------------------------------------------------------------------------------------
# second derivatives


def test_gradient_penalty():
    """Equal within float32: the second backward computes the forward again, in the first one's order, and adds what
    eager adds in another."""

    def run(compile):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        compiled, optimizer, seen = compile(critic), torch.optim.Adam(critic.parameters(), 1e-2), []
        for i in range(3):
            x = data(i, 4, 3).requires_grad_()
            score = compiled(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = score.mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            seen.append(gradients(critic))
            optimizer.step()
        return seen

    got, want = run(thunder.jit), run(lambda f: f)
    torch.testing.assert_close(got, want)
    assert all(g.abs().max() > 1e-3 for g in want[0][:3])


# ---------------------------------------------------------------------------------------------------------------- what
# goes wrong


@pytest.fixture
def tripling():
    """An executor with an operator whose backward raises, once, what `raises` holds; and the program that uses it."""
    executor, raises = OperatorExecutor("tripling"), []

    def backward(g):
        if raises:
            raise raises.pop()
        return g * 3

    triple = executor.register_operator("triple", meta=lambda x: TensorProxy(like=x), fn=lambda x: x * 3)
    triple_backward = executor.register_operator("triple_backward", meta=lambda g: TensorProxy(like=g), fn=backward)

    def rule(x):
        y = triple(x)
        put_grads((x,), (triple_backward(get_grad(y)),))
        return y

    executor.register_implementation(triple, triple, grad_transform=rule)
    return thunder.jit(lambda x, w: (triple(x.sin()) * w.exp()).sum(), executors=[executor]), raises


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("keep", [False, True])
def test_backward_that_is_interrupted(tripling, error, keep):
    compiled, raises = tripling
    x, w = data(0, 3).requires_grad_(), data(1, 3).requires_grad_()
    want = 3 * x.detach().cos() * w.detach().exp()
    y = compiled(x, w)
    raises.append(error())
    with pytest.raises(error):
        y.backward(retain_graph=keep)
    assert x.grad is None and w.grad is None
    if keep:  # what was saved is whole
        y.backward()
        torch.testing.assert_close(x.grad, want)
    else:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
    x.grad = None
    compiled(x, w).backward()  # and the next step is as if nothing had been
    torch.testing.assert_close(x.grad, want)


def test_steps_leave_no_tensors_behind():
    compiled = thunder.jit(perceptron())

    def tensors_after_a_step():
        compiled(data(0, 3, 4)).sum().backward()
        gc.collect()
        return sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())

    tensors_after_a_step()
    before = tensors_after_a_step()
    for _ in range(3):
        assert tensors_after_a_step() == before


def test_results_inside_have_a_grad_fn_where_eagers_have_one():
    def program(x, y):
        with torch.no_grad():
            z = x * 2
        values = (x, y, x * y, z, (x * y).detach(), y * 2)
        return [
            (
                v.grad_fn is None,
                v.grad_fn is not None,
                bool(v.grad_fn),
                isinstance(v.grad_fn, torch.autograd.graph.Node),
            )
            for v in values
        ]

    for x in (torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2, requires_grad=True) * 2):
        assert thunder.jit(program)(x, torch.ones(2)) == program(x, torch.ones(2))


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: f.name(),
        lambda f: f.next_functions,
        lambda f: f.register_hook(print),
        lambda f: f,
        lambda f: [f],
        str,
        lambda f: f._saved_self,
    ],
)
def test_what_is_not_known_of_a_grad_fn_is_refused(ask):
    with pytest.raises(CaptureError, match="node of autograd's graph"):
        thunder.jit(lambda x: ask((x * 2).grad_fn))(torch.ones(2, requires_grad=True))
