"""Programs that decide by data and run host code: print, logging, random, time, numpy, files."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import tempfile
import time
import types
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.paths.corpus import HOST, integers, normal, program_of, several, sometimes
from tests.paths.corpus_training import perceptron

LOGGER = logging.getLogger(__name__)


def host(arguments):
    """Registers a program that keeps nothing."""

    def register(function):
        HOST[function.__name__] = lambda: (function, ()), arguments
        return function

    return register


@host(sometimes(0.4, math.nan, 4))
def printed_nan(x):
    if torch.isnan(x).any():
        print("nan at", torch.isnan(x).nonzero().flatten().tolist())
        return torch.nan_to_num(x)
    return x


@host(normal(3))
def printed_value(x):
    print(f"sum {x.sum().item():.3f}")
    return x * 2 if x.sum() > 0 else x


@host(normal(3))
def printed_tensor_on_one_side(x):
    if x.max() > 1:
        print("large", x)
    print("done")
    return x.exp()


@host(normal(3))
def logged(x):
    LOGGER.info("norm %s", x.norm())
    if x.norm() > 2:
        LOGGER.warning("clipped %.2f", x.norm().item())
        return x / x.norm()
    return x


@program_of(normal(4), HOST)
def python_random_layerdrop():
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    with torch.no_grad():
        for i, p in enumerate(layers.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape) * (i + 1))

    def forward(x):
        for layer in layers:
            if random.uniform(0, 1) < 0.5:
                continue
            x = layer(x).tanh()
        return x

    return forward, (layers,)


@host(normal(4))
def python_random_scale(x):
    scale = random.choice([1.0, 2.0, 3.0])
    if (x * scale).sum() > 1:
        return x * random.random()
    return x * scale


@host(normal(4))
def shuffled(x):
    order = list(range(4))
    random.shuffle(order)
    return x[order] if x[order[0]] > 0 else x


@host(normal(4))
def random_and_torch_random(x):
    if random.random() < 0.5:
        x = x + torch.rand(4)
    if torch.rand(()) < 0.5:
        x = x * random.gauss(0, 1)
    return F.dropout(x, 0.5)


@host(normal(6))
def numpy_percentile(x):
    limit = np.percentile(x.numpy(), 80)
    return x.clamp(max=float(limit)) if x.max() > 1 else x


@host(normal(5))
def through_numpy(x):
    y = torch.from_numpy(np.sort(x.detach().numpy()))
    return y * 2 if y[0] < -1 else y


@host(several(normal(3, 3), normal(3, 3)))
def greedy_matching(a, b):
    cost = torch.cdist(a, b).numpy()
    rows, columns = [], []
    while len(rows) < 3:
        i, j = np.unravel_index(cost.argmin(), cost.shape)
        rows.append(int(i))
        columns.append(int(j))
        cost[i, :], cost[:, j] = np.inf, np.inf
    return (a[rows] - b[columns]).norm()


@host(normal(4))
def timed(x):
    start = time.perf_counter()
    y = x.exp() if x.sum() > 0 else x
    return y, time.perf_counter() >= start


@program_of(normal(4), HOST)
def time_budget():
    state = types.SimpleNamespace(steps=0)

    def run(x):
        end = time.monotonic() + 60
        while x.abs().max() > 0.5 and time.monotonic() < end:
            x = x / 2
            state.steps += 1
        return x

    return run, (state,)


@host(sometimes(0.5, math.inf, 3))
def warned(x):
    if not torch.isfinite(x).all():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("not finite", stacklevel=1)
        return len(caught)
    return x


@host(normal(3))
def json_of_numbers(x):
    text = json.dumps({"max": round(x.max().item(), 3), "positive": bool((x > 0).all())})
    return json.loads(text)


@host(normal(2, 2))
def formatted(x):
    return f"{x.sum().item():.2f} {x.tolist()} {x.shape} {'up' if x.mean() > 0 else 'down'}"


@host(normal(3))
def text_of_a_tensor(x):
    return str(x) if x[0] > 0 else repr(x.sum())


@program_of(normal(3), HOST)
def written_to_a_file():
    folder = tempfile.mkdtemp()

    def run(x):
        if x.sum() > 0:
            with open(os.path.join(folder, "log"), "a") as file:
                file.write(f"{x.sum().item():.4f}\n")
        path = os.path.join(folder, "log")
        if not os.path.exists(path):
            return 0
        with open(path) as file:
            return len(file.readlines())

    return run, ()


@program_of(normal(3), HOST)
def saved_when_better():
    folder, state = tempfile.mkdtemp(), types.SimpleNamespace(best=math.inf)

    def run(x):
        loss = x.square().sum()
        if loss.item() < state.best:
            state.best = loss.item()
            torch.save({"x": x}, os.path.join(folder, "best.pt"))
        return torch.load(os.path.join(folder, "best.pt"))["x"]

    return run, (state,)


@program_of(normal(5, 3), HOST)
def training_with_a_log():
    model, history = perceptron(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            print("skipped")
            return None
        optimizer.step()
        history.append(loss.item())
        if len(history) % 5 == 0:
            print(f"step {len(history)}: loss {sum(history[-5:]) / 5:.4f}")
        return loss.detach()

    return step, (model, optimizer, history)


@program_of(normal(4), HOST)
def numpy_rollout():
    rng, log = np.random.default_rng(0), []

    def act(x):
        p = x.softmax(0)
        if rng.random() < 0.3:
            a = int(rng.integers(4))
        else:
            a = int(p.argmax())
        log.append(a)
        return p[a]

    return act, (log,)


@host(several(normal(4), integers(0, 4)))
def numpy_global_random(x, i):
    np.random.seed(int(i))
    if np.random.rand() < 0.5:
        return x + float(np.random.randn())
    return x


@host(normal(5))
def histogram(x):
    counts, _ = np.histogram(x.numpy(), bins=3, range=(-2.0, 2.0))
    return x / 2 if counts[1] > 3 else torch.from_numpy(counts)


@host(normal(3))
def progress(x):
    for i, v in enumerate(x):
        if v > 0.5:
            print(i, "found", end=" ")
            break
    else:
        print("none")
    return x


@host(sometimes(0.4, math.nan, 3))
def assertion_with_a_text(x):
    assert not torch.isnan(x).any(), f"nan in {x.tolist()}"
    return x


@host(normal(3))
def retried(x):
    for attempt in range(3):
        try:
            if x.sum() < 0:
                raise ArithmeticError(f"attempt {attempt}: {x.sum().item():.3f}")
            return x, attempt
        except ArithmeticError as error:
            print(error)
            x = x + 1
    return None


@host(normal(4, grad=True))
def grad_and_print(x):
    loss = (x**2).sum()
    if loss > 3:
        print(f"loss {loss.item():.4f}")
        loss = loss.sqrt()
    return loss


@host(normal(3))
def environment(x):
    if os.environ.get("NO_SUCH_VARIABLE", "off") == "on" or x.sum() > 0:
        return x
    return -x
