"""Losses with gradients inside (`torch.autograd.grad(..., create_graph=True)`), trained by eager PyTorch and thunder.

    python benchmarks/gradients_inside.py [NAME ...] [--systems eager,thunder] [--device cuda] [--rounds 20] [--small]

NAME: burgers (a physics-informed network for Burgers' equation), critic (WGAN-GP), forces (SchNet with energies and
forces), operator (DeepONet with derivatives), maml (a gradient step inside). For each and for each system the worst
distance of losses and gradients from eager's in ten steps of SGD in float64, relative to the largest number of a
tensor; the median step in float32, whose ratio to eager's has a 95 % interval; on a GPU the time of its kernels. Exits
with 1 where a distance is above 1e-9.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from zoo import kernels_of

from thunder.tests.measuring import (
    compile_with,
    interleaved,
    median,
    paired_ratio,
    parse_systems,
    repetitions,
    settle,
)

STEPS = 10
ALLOWED = 1e-9


def grad(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def network(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


class Burgers(nn.Module):
    """Raissi, Perdikaris and Karniadakis, Journal of Computational Physics 378, 2019."""

    def __init__(self, small: bool):
        super().__init__()
        self.net, self.points = network(2, *[20] * 8, 1), 100 if small else 10_000

    def forward(self, x, t, x0, u0):
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = self.net(torch.cat([x, t], 1))
        u_t, u_x = grad(u, t), grad(u, x)
        residual = u_t + u * u_x - 0.01 / torch.pi * grad(u_x, x)
        return (residual**2).mean() + F.mse_loss(self.net(torch.cat([x0, torch.zeros_like(x0)], 1)), u0)

    def inputs(self):
        x0 = torch.rand(100, 1) * 2 - 1
        return torch.rand(self.points, 1) * 2 - 1, torch.rand(self.points, 1), x0, -torch.sin(torch.pi * x0)


class Critic(nn.Module):
    """Gulrajani et al., Improved Training of Wasserstein GANs, 2017."""

    def __init__(self, small: bool):
        super().__init__()
        widths = (3, 8, 16) if small else (3, 64, 128, 256)
        self.size, self.batch = 4 * 2 ** (len(widths) - 1), 4 if small else 64
        layers = [
            layer
            for a, b in zip(widths, widths[1:], strict=False)
            for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))
        ]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1] * 16, 1))

    def forward(self, real, fake, share):
        mixed = (share * real + (1 - share) * fake).detach().requires_grad_()
        penalty = (grad(self.net(mixed), mixed).flatten(1).norm(2, dim=1) - 1) ** 2
        return self.net(fake).mean() - self.net(real).mean() + 10 * penalty.mean()

    def inputs(self):
        shape = self.batch, 3, self.size, self.size
        return torch.randn(shape), torch.randn(shape), torch.rand(self.batch, 1, 1, 1)


class Shifted(nn.Module):
    """SchNet's activation."""

    def forward(self, x):
        return F.softplus(x) - 0.6931471805599453


class Interaction(nn.Module):
    def __init__(self, width: int, centers: int):
        super().__init__()
        self.filter = network(centers, width, width, activation=Shifted)
        self.into, self.out = nn.Linear(width, width, bias=False), network(width, width, width, activation=Shifted)

    def forward(self, atoms, expanded, cut, i, j):
        messages = self.into(atoms)[j] * (self.filter(expanded) * cut)
        return atoms + self.out(torch.zeros_like(atoms).index_add(0, i, messages))


class Forces(nn.Module):
    """Schütt et al., SchNet, 2017: energies, and forces as their gradients."""

    def __init__(self, small: bool):
        super().__init__()
        width, centers, self.molecules, self.size = (16, 8, 2, 5) if small else (64, 32, 16, 20)
        self.embedding = nn.Embedding(10, width)
        self.interactions = nn.ModuleList(Interaction(width, centers) for _ in range(3))
        self.readout = network(width, width // 2, 1, activation=Shifted)
        self.register_buffer("centers", torch.linspace(0, 5, centers))

    def forward(self, kinds, positions, i, j, molecule, energy, forces):
        positions = positions.detach().requires_grad_()
        distance = (positions[i] - positions[j]).norm(dim=1, keepdim=True)
        expanded = torch.exp(-10 * (distance - self.centers) ** 2)
        cut = 0.5 * (torch.cos(distance * torch.pi / 5) + 1) * (distance < 5)
        atoms = self.embedding(kinds)
        for interaction in self.interactions:
            atoms = interaction(atoms, expanded, cut, i, j)
        total = torch.zeros_like(energy).index_add(0, molecule, self.readout(atoms).squeeze(1))
        return F.mse_loss(total, energy) + 100 * F.mse_loss(-grad(total.sum(), positions), forces)

    def inputs(self):
        count = self.molecules * self.size
        molecule = torch.arange(self.molecules).repeat_interleave(self.size)
        i, j = torch.nonzero((molecule[:, None] == molecule) & ~torch.eye(count, dtype=torch.bool), as_tuple=True)
        positions = torch.randn(count, 3) * 2
        return (
            torch.randint(10, (count,)),
            positions,
            i,
            j,
            molecule,
            torch.randn(self.molecules),
            torch.randn(count, 3),
        )


class Operator(nn.Module):
    """Wang, Wang and Perdikaris, physics-informed DeepONets, 2021: a diffusion-reaction equation."""

    def __init__(self, small: bool):
        super().__init__()
        width, self.sensors, self.points = (16, 10, 50) if small else (50, 100, 10_000)
        self.branch = network(self.sensors, *[width] * 5, activation=nn.Tanh)
        self.trunk = network(2, *[width] * 5, activation=nn.Tanh)

    def forward(self, u, x, t, source):
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        s = (self.branch(u) * self.trunk(torch.cat([x, t], 1))).sum(1, keepdim=True)
        s_t, s_x = grad(s, t), grad(s, x)
        return ((s_t - 0.01 * grad(s_x, x) - 0.01 * s**2 - source) ** 2).mean()

    def inputs(self):
        n = self.points
        return torch.randn(n, self.sensors), torch.rand(n, 1), torch.rand(n, 1), torch.randn(n, 1)


class MetaLearner(nn.Module):
    """Finn, Abbeel and Levine, MAML, 2017: sines, with steps of gradient descent inside, for each of several tasks."""

    def __init__(self, small: bool):
        super().__init__()
        self.net = network(1, 40, 40, 1, activation=nn.ReLU)
        self.tasks, self.points = (2, 5) if small else (8, 64)

    def forward(self, x, y, x_test, y_test):
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for task in range(self.tasks):
            weights = dict(self.net.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(self.net, weights, (x[task],)), y[task])
                gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
                weights = {n: w - 0.01 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
            total = total + F.mse_loss(torch.func.functional_call(self.net, weights, (x_test[task],)), y_test[task])
        return total / self.tasks

    def inputs(self):
        x, x_test = (torch.rand(self.tasks, self.points, 1) * 10 - 5 for _ in range(2))
        phase, height = torch.rand(self.tasks, 1, 1), torch.rand(self.tasks, 1, 1) * 4
        return x, height * torch.sin(x + phase), x_test, height * torch.sin(x_test + phase)


PROGRAMS = {"burgers": Burgers, "critic": Critic, "forces": Forces, "operator": Operator, "maml": MetaLearner}


class Trainer:
    """A module from a seed under one system, with its step."""

    def __init__(self, name: str, system: str, chosen: argparse.Namespace, dtype: torch.dtype):
        torch.manual_seed(0)
        self.module = PROGRAMS[name](chosen.small).to(chosen.device, dtype)
        self.inputs = [x.to(chosen.device, dtype if x.is_floating_point() else None) for x in self.module.inputs()]
        self.compiled = compile_with(system, self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.device = chosen.device

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.compiled(*self.inputs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def timed(self) -> None:
        self.step()
        if self.device == "cuda":
            torch.cuda.synchronize()


def trained(name: str, system: str, chosen: argparse.Namespace) -> list[torch.Tensor]:
    """The losses and gradients of some steps in float64."""
    trainer, results = Trainer(name, system, chosen, torch.float64), []
    for _ in range(STEPS):
        results.append(trainer.step())
        results += [p.grad.clone() for p in trainer.module.parameters() if p.grad is not None]
    return results


def distance(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(results, expected, strict=True)
    )


def measure(name: str, chosen: argparse.Namespace) -> bool:
    """Prints a line for each system. Whether all are equal to eager's."""
    expected, right = trained(name, "eager", chosen), True
    trainers: dict[str, Trainer] = {}
    distances, first = {}, {}
    for system in chosen.systems:
        try:
            distances[system] = distance(trained(name, system, chosen), expected)
            trainer = Trainer(name, system, chosen, torch.float32)
            start = time.perf_counter()
            trainer.timed()
            first[system] = time.perf_counter() - start
            settle(system, trainer.timed)
        except Exception as error:  # noqa: BLE001  of whatever kind: it is this program's finding
            print(
                f"{name:10}{system:22} failed: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True
            )
            right = right and system != "thunder"
            continue
        trainers[system] = trainer
        right = right and distances[system] <= ALLOWED
    calls = {system: trainer.timed for system, trainer in trainers.items()}
    repeat = repetitions(next(iter(calls.values())), 0.05)
    interleaved(calls, 2, repeat)
    clock = time.process_time if chosen.device == "cpu" and chosen.threads == 1 else time.perf_counter
    samples = interleaved(calls, chosen.rounds, repeat, clock)
    for system, seconds in samples.items():
        text = f"{name:10}{system:22} float64 {distances[system]:8.1e}  step {1e3 * median(seconds):8.3f} ms"
        if system != "eager" and "eager" in samples:
            text += "  to eager's {:.2f} [{:.2f}, {:.2f}]".format(*paired_ratio(seconds, samples["eager"]))
        if chosen.device == "cuda":
            kernels = kernels_of(trainers[system].timed)
            text += f"  kernels {kernels['ms']:.3f} ms, {kernels['calls']}"
        for program in getattr(trainers[system].compiled, "programs", ()):
            text += f"  {program.graphs or ''}"[:160]
        print(f"{text}  first {first[system]:.2f} s", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS])
    parser.add_argument("--systems", type=parse_systems, default=["eager", "thunder"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    return 0 if all([measure(name, chosen) for name in chosen.names or PROGRAMS]) else 1


if __name__ == "__main__":
    sys.exit(main())
