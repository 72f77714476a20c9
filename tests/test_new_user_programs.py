"""Whole programs as a new user would write them, in eager beside thunder: a recommender, a diffusion model and its
sampler, a forecaster, a policy update.

Each is trained for some steps, once with its module compiled and once with the whole step compiled. What a step
returns, the parameters, their gradients, the buffers and the generator of random numbers are equal bit for bit.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

import thunder

# ---------------------------------------------------------------------------------------------------------------- a
# recommender


class Recommender(nn.Module):
    """Bags of ids, dense features, and the products of all pairs."""

    def __init__(self, sizes=(50, 30, 20), dim=8):
        super().__init__()
        kinds = [("sum", False, None), ("mean", False, 0), ("sum", True, None)]
        self.bags = nn.ModuleList(
            [
                nn.EmbeddingBag(n, dim, mode=m, include_last_offset=last, padding_idx=p)
                for n, (m, last, p) in zip(sizes, kinds)
            ]
        )
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(inplace=True), nn.Linear(16, dim), nn.ReLU(inplace=True))
        n = len(sizes) + 1
        self.top = nn.Sequential(nn.Linear(dim + n * (n - 1) // 2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(n, n, offset=-1), persistent=False)

    def forward(self, dense, ids, offsets, weights):
        x = self.bottom(dense)
        parts = [x]
        for i, (bag, j, o) in enumerate(zip(self.bags, ids, offsets)):
            parts.append(bag(j, o, per_sample_weights=weights if i == 0 else None))
        t = torch.stack(parts, 1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, z], 1)).squeeze(-1)


def recommender():
    ids = [torch.randint(0, n, (14,)) for n in (50, 30, 20)]
    offsets = [
        torch.tensor([0, 2, 2, 5, 9, 13]),
        torch.tensor([0, 1, 4, 6, 8, 12]),
        torch.tensor([0, 3, 3, 7, 9, 12, 14]),
    ]
    weights, dense, clicked = torch.rand(14), torch.randn(6, 5), torch.tensor([0.0, 1, 0, 1, 1, 0])

    def step(model, optimizer):
        logits = model(dense, ids, offsets, weights)
        loss = F.binary_cross_entropy_with_logits(logits, clicked, pos_weight=torch.tensor(2.0))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            ranked = (logits[clicked == 1][:, None] > logits[clicked == 0][None]).float().mean()
        return loss.detach(), norm, ranked

    return Recommender(), step, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05)


# ---------------------------------------------------------------------------------------------------------------- a
# diffusion model


def timestep_embedding(t, dim):
    frequencies = torch.exp(
        -math.log(10000) * torch.arange(dim // 2, device=t.device, dtype=torch.float32) / (dim // 2)
    )
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], -1)


class Residual(nn.Module):
    def __init__(self, before, after, embedding):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.time, self.norm2, self.dropout = nn.Linear(embedding, 2 * after), nn.GroupNorm(4, after), nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, e):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(e))[..., None, None].chunk(2, 1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(self.dropout(F.silu(h)))


class Attention(nn.Module):
    def __init__(self, channels, heads=2):
        super().__init__()
        self.heads, self.norm, self.qkv, self.out = (
            heads,
            nn.GroupNorm(4, channels),
            nn.Conv1d(channels, 3 * channels, 1),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x):
        b, c, *space = x.shape
        y = self.qkv(self.norm(x).reshape(b, c, -1))
        q, k, v = y.reshape(b * self.heads, -1, y.shape[-1]).split(c // self.heads, dim=1)
        weights = torch.einsum("bct,bcs->bts", q, k / math.sqrt(c // self.heads)).softmax(-1)
        return x + self.out(torch.einsum("bts,bcs->bct", weights, v).reshape(b, c, -1)).reshape(b, c, *space)


class UNet(nn.Module):
    def __init__(self, channels=8, embedding=16):
        super().__init__()
        c = self.channels = channels
        self.time = nn.Sequential(nn.Linear(c, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.label = nn.Embedding(3, embedding)
        self.enter = nn.Conv2d(1, c, 3, padding=1)
        self.down = nn.ModuleList(
            [Residual(c, c, embedding), nn.Conv2d(c, c, 3, stride=2, padding=1), Residual(c, 2 * c, embedding)]
        )
        self.middle = nn.ModuleList([Residual(2 * c, 2 * c, embedding), Attention(2 * c)])
        self.up = nn.ModuleList(
            [
                Residual(4 * c, c, embedding),
                nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, padding=1)),
                Residual(2 * c, c, embedding),
            ]
        )
        self.leave = nn.Sequential(nn.GroupNorm(4, c), nn.SiLU(), nn.Conv2d(c, 1, 3, padding=1))

    def forward(self, x, t, y):
        e = self.time(timestep_embedding(t, self.channels)) + self.label(y)
        h, saved = self.enter(x), []
        for block in self.down:
            h = block(h, e) if isinstance(block, Residual) else block(h)
            if isinstance(block, Residual):
                saved.append(h)
        for block in self.middle:
            h = block(h, e) if isinstance(block, Residual) else block(h)
        for block in self.up:
            h = block(torch.cat([h, saved.pop()], 1), e) if isinstance(block, Residual) else block(h)
        return self.leave(h)


class Diffusion:
    def __init__(self, times=4):
        betas = torch.linspace(1e-4, 0.02, times, dtype=torch.float64)
        self.times, self.remaining_signal = times, torch.cumprod(1 - betas, 0)
        before = F.pad(self.remaining_signal[:-1], (1, 0), value=1.0)
        self.of_start, self.of_now = (
            betas * before.sqrt() / (1 - self.remaining_signal),
            (1 - before) * (1 - betas).sqrt() / (1 - self.remaining_signal),
        )
        self.variance = betas * (1 - before) / (1 - self.remaining_signal)

    def at(self, values, t):
        return values[t].float().reshape(-1, 1, 1, 1)

    def loss(self, model, x, y):
        t, noise = torch.randint(0, self.times, (x.shape[0],)), torch.randn_like(x)
        noisy = self.at(self.remaining_signal.sqrt(), t) * x + self.at((1 - self.remaining_signal).sqrt(), t) * noise
        guess = model(noisy, t, torch.where(torch.rand(x.shape[0]) < 0.5, torch.zeros_like(y), y))
        each = F.mse_loss(guess, noise, reduction="none").flatten(1).mean(1)
        return each.mean(), t, each.detach()

    @torch.no_grad()
    def sample(self, model, shape, y):
        x = torch.randn(shape)
        for i in reversed(range(self.times)):
            t = torch.full((shape[0],), i, dtype=torch.long)
            noise = model(x, t, y)
            start = (
                self.at((1 / self.remaining_signal).sqrt(), t) * x
                - self.at((1 / self.remaining_signal - 1).sqrt(), t) * noise
            ).clamp(-1, 1)
            inner = (t != 0).float().view(-1, 1, 1, 1)
            x = (
                self.at(self.of_start, t) * start
                + self.at(self.of_now, t) * x
                + inner * self.at(self.variance, t).sqrt() * torch.randn_like(x)
            )
        return x


def diffusion():
    process, x, y = Diffusion(), torch.randn(3, 1, 4, 4), torch.tensor([0, 1, 2])

    def step(model, optimizer):
        model.train()
        loss, t, each = process.loss(model, x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        model.eval()
        return loss.detach(), t, each, process.sample(model, (2, 1, 4, 4), y[:2])

    return UNet(), step, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)


# ---------------------------------------------------------------------------------------------------------------- a
# forecaster


class Forecaster(nn.Module):
    """Quantiles of what follows a sequence with gaps, by a recurrent network and attention over its times."""

    def __init__(self, features=3, hidden=8, horizon=2):
        super().__init__()
        self.norm, self.horizon = nn.BatchNorm1d(features), horizon
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True, dropout=0.3, bidirectional=True)
        self.score, self.head = nn.Linear(2 * hidden, 1), nn.Linear(2 * hidden, horizon * 3)
        self.first = nn.ParameterList([torch.zeros(4, 1, hidden), torch.zeros(4, 1, hidden)])

    def forward(self, x, mask, lengths):
        x = torch.nan_to_num(x.masked_fill(~mask[..., None], 0.0))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        states = tuple(s.expand(-1, x.size(0), -1).contiguous() for s in self.first)
        out, _ = self.lstm(x, states)
        weights = F.softmax(self.score(out).squeeze(-1).masked_fill(~mask, float("-inf")), dim=1)
        pooled, last = (weights.unsqueeze(-1) * out).sum(1), out[torch.arange(x.size(0)), lengths - 1]
        return self.head(pooled + last).view(-1, self.horizon, 3).cumsum(-1), weights


def forecaster():
    x, y, levels = torch.randn(4, 7, 3), torch.randn(4, 2), torch.tensor([0.1, 0.5, 0.9])
    x[0, 2] = float("nan")
    lengths = torch.tensor([7, 5, 3, 6])
    mask = torch.arange(7)[None] < lengths[:, None]
    mask[0, 2] = False

    def step(model, optimizer):
        quantiles, weights = model(x, mask, lengths)
        error = y[..., None] - quantiles
        loss = torch.maximum(levels * error, (levels - 1) * error).mean()
        covered = ((y >= quantiles[..., 0]) & (y <= quantiles[..., 2])).float().mean()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return loss.item(), quantiles.detach(), weights.detach(), covered

    return Forecaster(), step, lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9)


# ---------------------------------------------------------------------------------------------------------------- a
# policy update


class ActorCritic(nn.Module):
    def __init__(self, observed=5, actions=4, continuous=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observed, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.choice, self.mean, self.value = nn.Linear(16, actions), nn.Linear(16, continuous), nn.Linear(16, 1)
        self.deviation = nn.Parameter(torch.zeros(continuous))

    def forward(self, observation, action=None, push=None):
        h = self.body(observation)
        choice, normal = (
            Categorical(logits=self.choice(h)),
            Normal(self.mean(h), self.deviation.exp().expand_as(self.mean(h))),
        )
        if action is None:
            action, push = choice.sample(), normal.rsample()
        likelihood = choice.log_prob(action) + normal.log_prob(push).sum(-1)
        return (
            action,
            push,
            likelihood,
            choice.entropy() + normal.entropy().sum(-1),
            self.value(h).squeeze(-1),
            choice.probs,
        )


def advantages(rewards, values, done, last):
    returns, running = torch.zeros_like(rewards), 0
    for t in reversed(range(rewards.shape[0])):
        following = last if t == rewards.shape[0] - 1 else values[t + 1]
        running = rewards[t] + 0.99 * following * (1 - done[t]) - values[t] + 0.94 * (1 - done[t]) * running
        returns[t] = running
    return returns


def policy():
    observed, rewards, done = torch.randn(6, 3, 5), torch.randn(6, 3), (torch.rand(6, 3) < 0.2).float()

    def step(model, optimizer):
        with torch.no_grad():
            action, push, likelihood, _, value, _ = model(observed)
            advantage = advantages(rewards, value, done, value[-1])
        O, A, P, L, V, R = (
            x.reshape(-1, *x.shape[2:]) for x in (observed, action, push, likelihood, advantage, advantage + value)
        )
        seen = []
        for rows in torch.randperm(O.shape[0]).split(9):
            _, _, now, entropy, value, chances = model(O[rows], A[rows], P[rows])
            gain = (V[rows] - V[rows].mean()) / (V[rows].std() + 1e-8)
            ratio = (now - L[rows]).exp()
            of_policy, of_value = (
                -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean(),
                0.5 * (value - R[rows]).pow(2).mean(),
            )
            optimizer.zero_grad()
            (of_policy + 0.5 * of_value - 0.01 * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                seen.append(torch.stack([of_policy, of_value, ((ratio - 1).abs() > 0.2).float().mean()]))
        with torch.no_grad():
            apart = kl_divergence(
                Categorical(probs=chances), Categorical(logits=model.choice(model.body(O[rows])))
            ).mean()
        return torch.stack(seen), action, push, apart

    return ActorCritic(), step, lambda parameters: torch.optim.Adam(parameters, lr=3e-3)


# ----------------------------------------------------------------------------------------------------------------
# beside eager


def assert_equal(got, want) -> None:
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape, got.stride(), got.requires_grad) == (
            want.dtype,
            want.shape,
            want.stride(),
            want.requires_grad,
        )
        assert torch.equal(got, want)
    else:
        assert got == want


@pytest.mark.sweep(2)
@pytest.mark.parametrize("whole", [False, True], ids=["module", "step"])
@pytest.mark.parametrize("make", [recommender, diffusion, forecaster, policy], ids=lambda f: f.__name__)
def test_steps_equal_eagers(make, whole):
    torch.manual_seed(0)
    module, step, optimizer = make()
    modules = [module, copy.deepcopy(module)]
    optimizers = [optimizer(m.parameters()) for m in modules]
    compiled = thunder.jit(step) if whole else thunder.jit(modules[1])
    for seed in range(3):
        torch.manual_seed(seed)
        want, state = step(modules[0], optimizers[0]), torch.get_rng_state()
        torch.manual_seed(seed)
        got = compiled(modules[1], optimizers[1]) if whole else step(compiled, optimizers[1])
        assert torch.equal(torch.get_rng_state(), state)
        for g, w in zip(got, want, strict=True):
            assert_equal(g, w)
        for (name, w), g in zip(
            [*modules[0].named_parameters(), *modules[0].named_buffers()],
            [*modules[1].parameters(), *modules[1].buffers()],
            strict=True,
        ):
            assert torch.equal(g, w), name
            assert (g.grad is None) == (w.grad is None) and (w.grad is None or torch.equal(g.grad, w.grad)), name
    assert thunder.cache_misses(compiled) <= 2
