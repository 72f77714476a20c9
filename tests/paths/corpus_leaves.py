"""Programs that decide by data and make leaves, parameters, modules and copies inside, or call larger pieces of
libraries."""

from __future__ import annotations

import copy
import pickle
import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.paths.corpus import HOST, integers, normal, program, program_of, several, sometimes
from tests.paths.corpus_training import perceptron

# ------------------------------------------------------------------------------------------------- inner optimisation


@program_of(normal(4, 3))
def adversarial_until_wrong():
    model = perceptron()

    def attack(x):
        wanted = model(x).argmax(-1)
        for _ in range(3):
            x = x.detach().clone().requires_grad_()
            loss = F.cross_entropy(model(x), wanted)
            (g,) = torch.autograd.grad(loss, x)
            x = (x + 0.5 * g.sign()).detach()
            if (model(x).argmax(-1) != wanted).all():
                break
        return x, wanted

    return attack, (model,)


@program_of(normal(4, 3, scale=2.0))
def gradient_penalty_where_steep():
    model = perceptron(outputs=1)

    def loss(x):
        y = x.detach().requires_grad_()
        out = model(y).sum()
        (g,) = torch.autograd.grad(out, y, create_graph=True)
        norm = g.norm(dim=-1)
        if (norm > 0.5).any():
            out = out + (norm - 0.5).clamp_min(0).square().sum()
        return out

    return loss, (model,)


@program(normal(5, 3))
def solved_by_descent(x):
    w = torch.zeros(3, requires_grad=True)
    for step in range(10):
        loss = (x @ w - 1).square().mean()
        if loss < 0.3:
            break
        (g,) = torch.autograd.grad(loss, w)
        w = (w - 0.5 * g).detach().requires_grad_()
    return w.detach(), step


@program_of(normal(4, 3))
def first_order_meta_learning():
    model = perceptron()

    def adapt(x):
        fast = copy.deepcopy(model)
        for _ in range(3):
            loss = fast(x).square().mean()
            if loss < 0.05:
                break
            for p, g in zip(fast.parameters(), torch.autograd.grad(loss, list(fast.parameters())), strict=True):
                with torch.no_grad():
                    p.sub_(0.5 * g)
        return fast(x).detach()

    return adapt, (model,)


@program_of(normal(4, 3))
def teacher_copied_when_better():
    model, state = perceptron(), {"best": float("inf"), "teacher": None}

    def step(x):
        loss = model(x).square().mean().item()
        if loss < state["best"]:
            state["best"] = loss
            teacher = copy.deepcopy(model).requires_grad_(True).eval()
            return teacher(x).detach(), loss
        return x, loss

    return step, (model,)


@program(normal(6, 3))
def probe_trained_until_it_separates(x):
    torch.manual_seed(0)
    probe = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(probe.parameters(), lr=1.0)
    wanted = (x[:, 0] > 0).float()
    for _ in range(4):
        optimizer.zero_grad()
        out = probe(x)[:, 0]
        if ((out > 0) == (wanted > 0.5)).all():
            break
        F.binary_cross_entropy_with_logits(out, wanted).backward()
        optimizer.step()
    return probe.weight.detach(), probe.bias.detach()


@program(normal(4, 3, scale=1.5))
def test_time_entropy(x):
    scale = torch.ones(3, requires_grad=True)
    entropy = -(F.softmax(x * scale, -1) * F.log_softmax(x * scale, -1)).sum(-1).mean()
    if entropy > 0.8:
        entropy.backward()
        with torch.no_grad():
            scale -= 0.1 * scale.grad
    return F.softmax(x * scale, -1).detach()


@program(normal(5))
def hypergradient(x):
    rate = torch.tensor(0.1, requires_grad=True)
    w = x - rate * 2 * x
    loss = w.square().sum()
    if loss > 2:
        (g,) = torch.autograd.grad(loss, rate)
        return (rate - 0.01 * g).detach().clamp(0, 1)
    return rate.detach()


# --------------------------------------------------------------------------------------------------- other methods


@program(several(normal(2, 3, 4), integers(0, 5, 2)))
def attention_by_lengths(x, lengths):
    if lengths.max() == 0:
        return torch.zeros_like(x)
    places = torch.arange(3)
    mask = places[None, :] < lengths[:, None]
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, None, :], -torch.inf)
    if not mask.any(-1).all():
        scores = torch.where(mask.any(-1)[:, None, None], scores, 0.0)
    return scores.softmax(-1) @ x


@program(normal(8))
def particles_resampled(x):
    weights = torch.softmax(x, 0)
    if 1 / weights.square().sum() < 5:
        chosen = torch.multinomial(weights, 8, replacement=True)
        return x[chosen], torch.full((8,), 1 / 8)
    return x, weights


@program(normal(3, 4))
def denoised_until_calm(x):
    for t in range(5, 0, -1):
        noise = torch.randn_like(x) if t > 1 else torch.zeros_like(x)
        x = x * 0.7 + 0.1 * t * noise
        if x.abs().max() < 0.4:
            break
    return x, t


@program(normal(6))
def annealed(x):
    best, energy = x, x.square().sum()
    for t in (1.0, 0.5, 0.1):
        proposal = best + 0.3 * torch.randn(6)
        change = proposal.square().sum() - energy
        if change < 0 or torch.rand(()) < torch.exp(-change / t):
            best, energy = proposal, energy + change
    return best, energy


@program(normal(4, 5, grad=True))
def straight_through_gate(x):
    soft = torch.sigmoid(x.mean(-1))
    hard = (soft > 0.5).float()
    gate = hard + soft - soft.detach()
    if hard.sum() == 0:
        return x.sum() * 0
    return (x * gate[:, None]).sum()


@program(several(normal(5, 3), integers(0, 2, 5, 5)))
def messages_to_who_has_neighbours(x, edges):
    degree = edges.sum(-1)
    if (degree == 0).any():
        alone = degree == 0
        out = torch.where(alone[:, None], x, (edges.float() @ x) / degree.clamp_min(1)[:, None])
        return out, int(alone.sum())
    return (edges.float() @ x) / degree[:, None], 0


@program(sometimes(0.5, 9.0, 6))
def compiled_inside(x):
    scale = torch.compile(lambda y: y / y.abs().max(), backend="eager")
    return scale(x) if x.abs().max() > 5 else x


# ------------------------------------------------------------------------------------------------------------- host


@program_of(normal(4), HOST)
def checkpointed_in_memory():
    best = {"loss": float("inf"), "bytes": b""}

    def step(x):
        loss = x.square().sum().item()
        if loss < best["loss"]:
            best["loss"], best["bytes"] = loss, pickle.dumps({"x": x, "loss": loss})
        return pickle.loads(best["bytes"])["x"]

    return step, ()


@program_of(normal(6, 2), HOST)
def shuffled_batches():
    model = perceptron(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def epoch(x):
        order = list(range(6))
        random.shuffle(order)
        total = 0.0
        for start in (0, 3):
            optimizer.zero_grad()
            loss = model(x[order[start : start + 3]]).square().mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    return epoch, (model, optimizer)
