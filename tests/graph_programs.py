"""Programs that could notice that a graph replays: each of `models()` under each of `habits()`.

`run(model, habit, jit, device)` gives all tensors that the program has seen, read at its end. It draws the same numbers
in each run, so that runs with graphs and without are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 30


# ------------------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        y = x.view(-1, 4, 32)
        q, k, v = (t.view(t.shape[0], 4, 2, 16).transpose(1, 2) for t in self.qkv(self.norm(y)).chunk(3, -1))
        y = y + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(y.shape))
        return y.view(x.shape)


class DropsScores(Attention):
    """Attention with dropout and a bias, whose kernel leaves the backward a seed."""

    def forward(self, x):
        y = x.view(-1, 4, 32)
        q, k, v = (t.view(t.shape[0], 4, 2, 16).transpose(1, 2) for t in self.qkv(self.norm(y)).chunk(3, -1))
        bias = torch.arange(4.0, device=x.device) * 0.1
        scores = F.scaled_dot_product_attention(q, k, v, bias.expand(len(y), 2, 4, 4), dropout_p=0.2 * self.training)
        return (y + self.out(scores.transpose(1, 2).reshape(y.shape))).view(x.shape)


class Experts(nn.Module):
    """A router, experts by index, and their results added at indices."""

    def __init__(self):
        super().__init__()
        self.router, self.up = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32) * 0.1)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        flat = chosen.flatten()
        rows = torch.arange(x.shape[0], device=x.device).repeat_interleave(2)
        order = flat.argsort(stable=True)
        y = torch.bmm(x[rows[order]].unsqueeze(1), self.up[flat[order]]).squeeze(1) * weights.flatten()[order, None]
        # on the CPU one_hot looks at the values, as no launch does
        of_each = F.one_hot(flat, 4) if x.is_cuda else flat[:, None] == torch.arange(4, device=x.device)
        count = of_each.sum(0).to(x.dtype)
        return torch.zeros_like(x).index_add(0, rows[order], y.to(x.dtype)) + (count * self.router.bias).sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.cell(x, h)
        return self.out(h)


class Counts(nn.Module):
    """Writes to buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, x):
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        self.calls += 1
        return self.norm(self.linear(x)).relu() + self.seen


class Decides(nn.Module):
    """Reads a number of the device in the middle."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.a(x).tanh() * 2
        scale = y.detach().abs().max().item()
        return self.b(y / scale).sin() + y


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return F.dropout(self.b(F.dropout(self.a(x).relu(), 0.3)), 0.1) + torch.rand_like(x)


class Views(nn.Module):
    """Its result shares memory with others."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 64)

    def forward(self, x):
        y = self.a(x).sigmoid() * 2
        first, second = y.chunk(2, -1)
        return first * second.flip(0).cos()


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(128, 32)

    def forward(self, x):
        return self.out(self.norm(self.conv(x[:, None])).relu().flatten(1))


def _layers():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.2), nn.Linear(64, 32))


def models() -> dict[str, Callable[[], nn.Module]]:
    return {
        "layers": _layers, "attention": Attention, "experts": Experts, "recurrent": Recurrent, "counts": Counts,
        "decides": Decides, "draws": Draws, "views": Views, "convolves": Convolves, "drops scores": DropsScores,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- habits


class Program:
    """A module, compiled, and what a habit does with it. streams: gives a context manager for the stream of a number,
    which waits for the current one; that waits for it where the number is not negative."""

    def __init__(self, make: Callable, jit: Callable, device: str, streams: Callable[[int], Any]):
        self.make, self.jit, self.device, self.streams = make, jit, device, streams
        torch.manual_seed(0)
        self.module = make().to(device)
        self.f = jit(self.module)
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05)
        self.seen: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(1)

    def input(self, rows: int = 8) -> torch.Tensor:
        return torch.randn(rows, 32, generator=self.generator).to(self.device)

    def target(self, y: torch.Tensor) -> torch.Tensor:
        return (y * y).mean() + y.sum() * 0.01

    def train(self, x: torch.Tensor) -> torch.Tensor:
        y = self.f(x)
        self.optimizer.zero_grad()
        self.target(y).backward()
        self.optimizer.step()
        return y

    def grad(self, y: torch.Tensor, **options) -> tuple:
        return torch.autograd.grad(self.target(y), self.parameters, **options)

    def other(self) -> Program:
        return Program(self.make, self.jit, self.device, self.streams)


def trains(p: Program, i: int):
    yield p.train(p.input()).detach().clone()


def keeps_results(p: Program, i: int):
    yield p.train(p.input())


def keeps_gradients(p: Program, i: int):
    yield from p.grad(p.f(p.input()))


def accumulates(p: Program, i: int):
    p.target(p.f(p.input())).backward()
    if i % 4 == 3:
        p.optimizer.step()
        yield from [q.grad.clone() for q in p.parameters]
        p.optimizer.zero_grad(set_to_none=i % 8 == 3)


def retains_graphs(p: Program, i: int):
    y = p.f(p.input())
    yield from p.grad(y, retain_graph=True)
    yield from p.grad(y)


def calls_twice(p: Program, i: int):
    a, b = p.f(p.input()), p.f(p.input())
    yield from p.grad(a + b if i % 2 else b - a)


def runs_backwards_in_another_order(p: Program, i: int):
    a, b = p.f(p.input()), p.f(p.input())
    yield from p.grad(b)
    yield from p.grad(a)


def never_runs_a_backward(p: Program, i: int):
    p.seen_graphs = [*getattr(p, "seen_graphs", []), p.f(p.input())][-3:]
    yield p.seen_graphs[0].detach().clone()
    if i == STEPS - 1:
        for y in p.seen_graphs:
            yield from p.grad(y)


def hooks_of_parameters(p: Program, i: int):
    if i == 0:
        for q in p.parameters:
            q.register_hook(lambda g: g * 1.5)
            q.register_post_accumulate_grad_hook(lambda q: p.seen.append(q.grad.clone()))
    yield p.train(p.input())


def hooks_of_results(p: Program, i: int):
    y = p.f(p.input())
    y.retain_grad()
    y.register_hook(lambda g: g + 1)
    p.target(y).backward()
    yield y.grad
    yield from [q.grad.clone() for q in p.parameters]


def hooks_of_saved_tensors(p: Program, i: int):
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t.clone(), lambda t: t)
    with hooks if i % 3 else contextlib.nullcontext():
        y = p.f(p.input())
    yield from saved
    yield from p.grad(y)


def checkpoints(p: Program, i: int):
    x = p.input().requires_grad_()
    y = checkpoint(p.f, x, use_reentrant=False)
    yield from torch.autograd.grad(p.target(y), [x, *p.parameters])


def two_models_in_turns(p: Program, i: int):
    p.second = getattr(p, "second", None) or p.other()
    x = p.input()
    y = p.second.f(p.f(x))
    yield from torch.autograd.grad(p.target(y), [*p.parameters, *p.second.parameters])


def other_batch_sizes(p: Program, i: int):
    yield p.train(p.input((8, 4, 12)[i % 3]))


def inputs_elsewhere(p: Program, i: int):
    rows = p.input(24)
    x = (rows[8:16], rows[::3], rows.t().contiguous().t()[:8], p.input(9)[1:], rows.flatten()[1:257].view(8, 32))[i % 5]
    yield p.train(x)
    yield rows


def one_input_written_to(p: Program, i: int):
    p.x = getattr(p, "x", None) if i else p.input()
    p.x.copy_(p.input())
    yield p.train(p.x).clone()


def writes_to_results(p: Program, i: int):
    y = p.train(p.input()).detach()
    y.mul_(2).clamp_(max=1)
    yield y


def writes_to_gradients(p: Program, i: int):
    gradients = p.grad(p.f(p.input()))
    for g in gradients:
        g.add_(1)
    yield from gradients


def parameters_elsewhere(p: Program, i: int):
    if i % 7 == 6:
        for q in p.parameters:
            q.data = q.data.clone() * 0.9
    elif i % 11 == 10:
        p.module.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in p.module.state_dict().items()})
    yield p.train(p.input())


def some_parameters_need_no_gradients(p: Program, i: int):
    p.parameters[0].requires_grad_(i % 10 < 7)
    yield p.train(p.input())


def threads_in_turns(p: Program, i: int):
    gradients: list = []
    x = p.input()
    if i % 5 == 4 or i > 25:
        thread = threading.Thread(target=lambda: gradients.extend(p.grad(p.f(x))))
        thread.start()
        thread.join()
    else:
        gradients.extend(p.grad(p.f(x)))
    yield from gradients


def threads_at_once(p: Program, i: int):
    """Each has a module. None draws numbers, whose order is that of the threads."""
    p.others = getattr(p, "others", None) or [p.other() for _ in range(2)]
    for q in p.others:
        q.module.eval()
    per_stream: list[list] = [[], []]

    def steps(number: int, q: Program, x: torch.Tensor) -> None:
        per_stream[number].extend(q.grad(q.f(x)))

    inputs = [q.input() for q in p.others]
    threads = [threading.Thread(target=steps, args=(n, *r)) for n, r in enumerate(zip(p.others, inputs, strict=True))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from [*per_stream[0], *per_stream[1]]


def streams_in_turns(p: Program, i: int):
    with p.streams(i % 5 if i > 20 else 0):
        yield from p.grad(p.f(p.input()))


def gradients_on_another_stream(p: Program, i: int):
    gradients = p.grad(p.f(p.input()))
    with p.streams(-1):
        if p.device == "cuda":
            torch.cuda._sleep(1_000_000)
        results = [g * 2 for g in gradients]
        if p.device == "cuda":
            for g in gradients:
                g.record_stream(torch.cuda.current_stream())
    del gradients
    yield from results


def exceptions(p: Program, i: int):
    if i % 4 == 3:
        try:
            p.f(torch.randn(8, 31, device=p.device))
        except Exception:  # noqa: BLE001  of whatever class
            yield torch.ones(())
    yield p.train(p.input())


def exceptions_in_backwards(p: Program, i: int):
    y = p.f(p.input())
    if i % 4 == 3:

        def raises(g):
            raise ValueError("mine")

        y.register_hook(raises)
        with contextlib.suppress(ValueError):
            p.grad(y)
    else:
        yield from p.grad(y)


def copies(p: Program, i: int):
    if i % 10 == 9:
        other = copy.deepcopy(p.module)
        yield p.jit(other)(p.input())
        copied = copy.deepcopy(p.f)
        yield copied(p.input())
    yield p.train(p.input())


def saves(p: Program, i: int):
    y = p.train(p.input())
    file = io.BytesIO()
    torch.save([y.detach(), *(q.grad for q in p.parameters), p.module.state_dict()], file)
    file.seek(0)
    loaded = torch.load(file)
    yield from loaded[:-1]
    yield from loaded[-1].values()


def optimizers(p: Program, i: int):
    if i == 0:
        p.optimizer = torch.optim.AdamW(p.parameters, lr=0.01)
    y = p.f(p.input())
    p.optimizer.zero_grad()
    p.target(y).backward()
    yield torch.nn.utils.clip_grad_norm_(p.parameters, 0.1)
    p.optimizer.step()


def modes_in_turns(p: Program, i: int):
    mode = (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode())[i % 3]
    with mode:
        y = p.f(p.input())
    if i % 3 == 0:
        yield from p.grad(y)
    yield y.detach().clone()


def autocast_in_turns(p: Program, i: int):
    with torch.autocast(p.device, torch.bfloat16, enabled=i % 2 == 0):
        y = p.f(p.input())
    yield from p.grad(y.float())


def without_grad(p: Program, i: int):
    with torch.no_grad():
        yield p.f(p.input())


def its_own_result(p: Program, i: int):
    """As generation does: a result is the next input."""
    with torch.no_grad():
        p.x = p.f(p.x if i else p.input())
        p.x = p.x / p.x.norm()
    yield p.x


def twice_differentiated(p: Program, i: int):
    x = p.input().requires_grad_()
    (g,) = torch.autograd.grad(p.target(p.f(x)), x, create_graph=True)
    yield from torch.autograd.grad(g.square().sum(), p.parameters, allow_unused=True, materialize_grads=True)


def some_gradients(p: Program, i: int):
    x = p.input().requires_grad_()
    y = p.f(x)
    yield from torch.autograd.grad(p.target(y), x, retain_graph=True)
    yield from torch.autograd.grad(p.target(y), p.parameters[:1])


def collects_garbage(p: Program, i: int):
    yield p.train(p.input())
    gc.collect()
    if p.device == "cuda":
        torch.cuda.empty_cache()


def evaluates_in_between(p: Program, i: int):
    p.module.train(i % 6 < 4)
    yield p.train(p.input())


def seeds(p: Program, i: int):
    torch.manual_seed(i // 2)
    yield p.train(p.input())
    yield torch.rand(3, device=p.device)


def habits() -> dict[str, Callable[[Program, int], Any]]:
    chosen = [
        trains, keeps_results, keeps_gradients, accumulates, retains_graphs, calls_twice,
        runs_backwards_in_another_order, never_runs_a_backward, hooks_of_parameters, hooks_of_results,
        hooks_of_saved_tensors, checkpoints, two_models_in_turns, other_batch_sizes, inputs_elsewhere,
        one_input_written_to, writes_to_results, writes_to_gradients, parameters_elsewhere,
        some_parameters_need_no_gradients, threads_in_turns, threads_at_once, streams_in_turns,
        gradients_on_another_stream, exceptions, exceptions_in_backwards, copies, saves, optimizers, modes_in_turns,
        autocast_in_turns, without_grad, its_own_result, twice_differentiated, some_gradients, collects_garbage,
        evaluates_in_between, seeds,
    ]  # fmt: skip
    return {habit.__name__: habit for habit in chosen}


def programs() -> list[tuple[str, str]]:
    """All pairs of a model and a habit that give the same numbers in each run."""
    pairs = itertools.product(models(), habits())
    return [pair for pair in pairs if pair != ("draws", "threads_at_once")]


def run(
    model: str, habit: str, jit: Callable, device: str,
    streams: Callable[[int], Any] = lambda number: contextlib.nullcontext(),
) -> tuple[list[torch.Tensor], Program]:  # fmt: skip
    """All tensors that the program has seen, read at its end, and the program."""
    p = Program(models()[model], jit, device, streams)
    torch.manual_seed(2)
    for i in range(STEPS):
        p.seen += habits()[habit](p, i)
    if device == "cuda":
        torch.cuda.synchronize()
    return [t.detach() for t in (*p.seen, *p.module.state_dict().values())], p


def unequal(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    """The places at which two runs differ; a NaN is equal to itself."""
    if len(a) != len(b):
        return [-1]
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(_bits(x), _bits(y))]


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.flatten().contiguous().view(torch.uint8) if t.numel() else t
