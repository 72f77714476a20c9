"""Programs that decide by data and keep state: modules with buffers, whole training steps, optimizers, rollouts.

Each is a function without arguments that makes the program: it returns (function, what the function writes to).
"""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.paths.corpus import integers, normal, program_of, several, sometimes


def perceptron(inputs=3, outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


# -------------------------------------------------------------------------------------------- whole training steps


@program_of(sometimes(0.3, float("nan"), 5, 3))
def skipped_where_the_loss_is_nan():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if torch.isnan(loss):
            return None
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (model, optimizer)


@program_of(normal(5, 3, scale=2.0))
def clipped_where_the_norm_is_large():
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if norm > 1:
            for p in model.parameters():
                p.grad.mul_(1 / norm)
        optimizer.step()
        return loss.detach(), norm

    return step, (model, optimizer)


@program_of(sometimes(0.3, float("inf"), 5, 3))
def dynamic_loss_scale():
    model, state = perceptron(), types.SimpleNamespace(scale=8.0, good=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        (model(x).square().mean() * state.scale).backward()
        grads = [p.grad for p in model.parameters()]
        if not all(torch.isfinite(g).all() for g in grads):
            state.scale, state.good = state.scale / 2, 0
            return False
        for g in grads:
            g.div_(state.scale)
        optimizer.step()
        state.good += 1
        if state.good == 3:
            state.scale, state.good = state.scale * 2, 0
        return True

    return step, (model, optimizer, state)


@program_of(normal(5, 3))
def gradients_accumulated_until_large():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        model(x).square().mean().backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        if norm > 0.6:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    return step, (model, optimizer)


@program_of(normal(5, 3))
def two_losses_whose_gradients_conflict():
    model = perceptron()

    def step(x):
        y = model(x)
        parameters = list(model.parameters())
        a = torch.autograd.grad(y[:, 0].square().mean(), parameters, retain_graph=True)
        b = torch.autograd.grad(y[:, 1].sub(1).square().mean(), parameters)
        dot = sum((u * v).sum() for u, v in zip(a, b))
        if dot < 0:
            size = sum((v * v).sum() for v in b)
            a = [u - dot / size * v for u, v in zip(a, b)]
        with torch.no_grad():
            for p, u, v in zip(parameters, a, b):
                p -= 0.1 * (u + v)
        return dot

    return step, (model,)


@program_of(normal(5, 3))
def early_stopping():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    state = types.SimpleNamespace(best=float("inf"), bad=0)

    def step(x):
        loss = model(x).square().mean()
        if loss.item() < state.best:
            state.best, state.bad = loss.item(), 0
        else:
            state.bad += 1
        if state.bad > 2:
            return "stop"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return "go"

    return step, (model, optimizer, state)


@program_of(normal(6, 3))
def learning_rate_on_a_plateau():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    last = torch.full((), 9.0)

    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        rate = 0.1 if loss.detach() > last else 0.2
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-rate)
            last.copy_(loss)
        return rate

    return step, (model, last)


@program_of(several(normal(6, 3), integers(0, 2, 6)))
def hard_examples_only():
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)

    def step(x, labels):
        losses = F.cross_entropy(model(x), labels, reduction="none")
        hard = losses > losses.mean()
        loss = losses[hard].mean() if hard.sum() > 2 else losses.mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (model, optimizer)


@program_of(normal(4, 3))
def generator_and_critic():
    generator, critic = perceptron(3, 3), perceptron(3, 1)
    one, two = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))

    def step(x):
        gap = critic(x).mean() - critic(generator(x).detach()).mean()
        two.zero_grad()
        (-gap).backward()
        two.step()
        if gap > 0.05:
            one.zero_grad()
            loss = -critic(generator(x)).mean()
            loss.backward()
            one.step()
            return gap.detach(), loss.detach()
        return gap.detach(), None

    return step, (generator, critic, one, two)


@program_of(normal(5, 3))
def averaged_weights_when_better():
    model, average = perceptron(), perceptron()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            better = average(x).square().mean() > loss
            for p, q in zip(model.parameters(), average.parameters()):
                p -= 0.1 * p.grad
                p.grad = None
                if better:
                    q.lerp_(p, 0.5)
        return bool(better)

    return step, (model, average)


@program_of(normal(5, 3))
def sharpness_aware_step():
    model = perceptron()

    def step(x):
        model.zero_grad()
        model(x).square().mean().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        if norm < 0.2:
            return norm
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                moved.append(p.grad * (0.05 / norm))
                p.add_(moved[-1])
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), moved):
                p.sub_(m).sub_(p.grad, alpha=0.1)
        return norm

    return step, (model,)


@program_of(normal(3, 3))
def lbfgs_step():
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return step, (model,)


@program_of(normal(4, 3))
def rectified_adam_step():
    model = perceptron()
    optimizer = torch.optim.RAdam(model.parameters(), 0.05)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, (model, optimizer)


@program_of(normal(4, 3))
def loss_decides_under_autocast():
    model = perceptron()

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
            if loss > 0.3:
                loss = loss + model[0].weight.square().sum() * 0.01
        loss.backward()
        return loss.detach()

    return step, (model,)


# ------------------------------------------------------------------------------------------ modules with state


class Observer(nn.Module):
    """Fake quantisation whose range follows what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        if self.training:
            if x.min() < self.low:
                self.low.copy_(x.min())
            if x.max() > self.high:
                self.high.copy_(x.max())
        scale = (self.high - self.low).clamp(min=1e-3) / 15
        return torch.round((x - self.low) / scale) * scale + self.low


@program_of(normal(5))
def observer_of_ranges():
    module = Observer()
    return module, (module,)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.register_buffer("codes", torch.randn(3, 2, generator=g))
        self.register_buffer("used", torch.zeros(3))

    def forward(self, x):
        near = torch.cdist(x, self.codes).argmin(1)
        counts = torch.bincount(near, minlength=3)
        self.used.mul_(0.5).add_(counts)
        for k in range(3):
            if counts[k] > 0:
                self.codes[k] = 0.5 * self.codes[k] + 0.5 * x[near == k].mean(0)
            elif self.used[k] < 0.3:
                self.codes[k] = x[0]
        return self.codes[near]


@program_of(normal(4, 2))
def vector_quantiser():
    module = Codebook()
    return module, (module,)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(3, 3)
        self.experts = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.loads = [0, 0, 0]

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, position = torch.where(chosen == i)
            self.loads[i] += row.numel()
            if row.numel() == 0:
                continue
            out = out.index_add(0, row, expert(x[row]) * weights[row, position, None])
        return out


@program_of(normal(2, 3, grad=True))
def experts_with_loads():
    module = Experts()
    return module, (module,)


class Layerdrop(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(x, 0.2, self.training)
            if self.training and torch.rand([]) < 0.5:
                continue
            x = layer(x).tanh()
        return F.dropout(x, 0.5, self.training)


@program_of(normal(4, 3, grad=True))
def layers_dropped():
    module = Layerdrop()
    return module, (module,)


class EarlyExit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
        self.head = nn.Linear(3, 2)
        self.exits = {}

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = checkpoint(lambda v, layer=layer: layer(v).tanh(), x, use_reentrant=False)
            if self.head(x).softmax(-1).max(-1).values.min() > 0.55:
                break
        self.exits[i] = self.exits.get(i, 0) + 1
        return self.head(x), i


@program_of(normal(2, 3, scale=2.0, grad=True))
def early_exit_with_checkpoints():
    module = EarlyExit()
    return module, (module,)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.small, self.large = nn.Linear(3, 3), perceptron(3, 3)
        self.batchnorm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.batchnorm(x)
        if x[0].norm() > 1.7:
            self.count += 1
            return self.large(x)
        return self.small(x)


@program_of(normal(4, 3, grad=True))
def routed_after_batchnorm():
    module = Router()
    return module, (module,)


class Confidence(nn.Module):
    """A student that is taught only where the teacher is sure."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = perceptron(), perceptron()
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            p = self.teacher(x).softmax(-1)
            sure = p.max(-1).values > 0.55
        if not sure.any():
            return self.student(x).sum() * 0
        return F.kl_div(self.student(x[sure]).log_softmax(-1), p[sure], reduction="batchmean")


@program_of(normal(4, 3, grad=True))
def pseudo_labels():
    module = Confidence()
    return module, (module,)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("slots", torch.zeros(3, 2))
        self.filled = 0

    def forward(self, x):
        if self.filled and F.cosine_similarity(self.slots[: self.filled], x[None]).max() > 0.5:
            return self.slots[: self.filled].mean(0)
        if self.filled < 3:
            self.slots[self.filled] = x
            self.filled += 1
        return x


@program_of(normal(2))
def memory_slots():
    module = Memory()
    return module, (module,)


class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("u", F.normalize(torch.randn(3), dim=0))

    def forward(self, x):
        with torch.no_grad():
            for _ in range(3):
                v = F.normalize(self.weight.t() @ self.u, dim=0)
                new = F.normalize(self.weight @ v, dim=0)
                done = (new - self.u).norm() < 1e-2
                self.u.copy_(new)
                if done:
                    break
        sigma = self.u @ self.weight @ v
        return F.linear(x, self.weight / sigma if sigma > 1 else self.weight)


@program_of(normal(2, 3, grad=True))
def spectral_norm_until_it_stands():
    module = SpectralNorm()
    return module, (module,)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 5)

    def forward(self, x):
        out = self.net(x)
        boxes, scores = out[:, :4], out[:, 4].sigmoid()
        keep = scores > 0.6
        if keep.sum() == 0:
            return {"boxes": boxes[:0], "scores": scores[:0]}
        return {"boxes": boxes[keep], "scores": scores[keep]}


@program_of(normal(3, 4, grad=True))
def detector_with_nothing_found():
    module = Detector()
    return module, (module,)


# --------------------------------------------------------------------------------------------------------- rollouts


@program_of(normal(4))
def policy_gradient_rollout():
    policy = perceptron(4, 2)
    optimizer = torch.optim.SGD(policy.parameters(), 0.05)

    def episode(state):
        logs, rewards = [], []
        for _ in range(3):
            p = policy(state).softmax(-1)
            action = torch.multinomial(p.detach(), 1).item()
            logs.append(p[action].log())
            state = torch.roll(state, 1) * (0.9 if action else -0.8)
            rewards.append(state[0].item())
            if rewards[-1] < -0.7:
                break
        optimizer.zero_grad()
        sum(log * -r for log, r in zip(logs, rewards)).backward()
        optimizer.step()
        return len(rewards), sum(rewards)

    return episode, (policy, optimizer)


@program_of(normal(3))
def epsilon_greedy():
    values, counts = torch.zeros(3), torch.zeros(3)

    def act(reward):
        a = int(torch.randint(3, ())) if torch.rand(()) < 0.3 else int(values.argmax())
        counts[a] += 1
        values[a] += (reward[a] - values[a]) / counts[a]
        return a

    return act, (values, counts)


@program_of(normal(2))
def replay_buffer():
    buffer: list = []

    def push(x):
        if x.abs().max() > 0.5:
            buffer.append(x * 1)
        if len(buffer) > 3:
            buffer.pop(0)
        return torch.stack(buffer).mean(0) if buffer else None

    return push, (buffer,)


@program_of(normal(3))
def running_statistics():
    mean, state = torch.zeros(3), {"n": 0, "outliers": 0}

    def update(x):
        state["n"] += 1
        if state["n"] > 3 and (x - mean).norm() > 2:
            state["outliers"] += 1
            return False
        mean.add_((x - mean) / state["n"])
        return True

    return update, (mean, state)


@program_of(normal(3))
def metropolis():
    position = torch.zeros(3)

    def step(proposal):
        new = position + proposal
        ratio = (position.square().sum() - new.square().sum()).div(2).exp()
        if torch.rand(()) < ratio:
            position.copy_(new)
            return True
        return False

    return step, (position,)


@program_of(normal(4, 3))
def gradient_hooks_by_hand():
    model = perceptron()

    def step(x):
        model.zero_grad()
        model(x).square().sum().backward()
        dead = [n for n, p in model.named_parameters() if p.grad.abs().max() < 0.2]
        for n, p in model.named_parameters():
            if n in dead:
                p.grad = None
        return dead

    return step, (model,)


@program_of(several(normal(4, 3), normal(4, 2)))
def curriculum_by_loss():
    model, state = perceptron(), types.SimpleNamespace(stage=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        n = 2 + state.stage
        loss = F.mse_loss(model(x[:n]), y[:n])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.9 and state.stage < 2:
            state.stage += 1
        return state.stage

    return step, (model, optimizer, state)


@program_of(normal(5, 3))
def ema_of_the_loss():
    state = types.SimpleNamespace(average=None)
    w = nn.Parameter(torch.ones(3))

    def step(x):
        loss = (x * w).sum(-1).square().mean()
        state.average = loss.item() if state.average is None else 0.9 * state.average + 0.1 * loss.item()
        if loss.item() > 1.5 * state.average:
            return None
        loss.backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=0.05)
        w.grad = None
        return loss.detach()

    return step, (w, state)
