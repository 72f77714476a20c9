"""Trains a byte-level GPT on Python's own standard library, twice from one seed: in eager PyTorch and compiled by
thunder.

    pip install thunder-compiler[plots]
    python examples/train.py

Both systems see the same batches and take turns step by step, so that their times can be compared. Prints both loss
curves, tokens per second, peak memory and bytes saved for the backward; draws the curves into build/demo_loss.png;
exits with 1 where the losses of any step differ by more than 1e-4 of their value.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from tqdm import tqdm

from thunder.tests.litgpt_model import GPT
from thunder.tests.measuring import compile_with

SYSTEMS = ("eager", "thunder")
# of the loss; on a CPU both systems run the same kernels and the curves are usually equal to the last bit
TOLERANCE = 1e-4
WARM_UP = 5  # steps that are left out of the times: compilation, and an allocator that is still growing
MEMORY_STEPS = 8
PICTURE = Path(__file__).resolve().parents[1] / "build" / "demo_loss.png"


@dataclass(frozen=True)
class Setup:
    """What is trained and how. The sizes make a step take some 50 ms on two CPU cores."""

    steps: int = 300
    layers: int = 4
    width: int = 128
    batch: int = 8
    time: int = 128
    rate: float = 2e-3  # AdamW's learning rate at its highest: it rises over 5 % of the steps, and falls along a cosine
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def standard_library_text(length: int = 1 << 20) -> torch.Tensor:
    """The first bytes of source files of the standard library, as token ids from 0 to 255."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= length:
            return torch.frombuffer(bytearray(text[:length]), dtype=torch.uint8).long()
    raise RuntimeError(f"the standard library's sources are shorter than {length} bytes")


def batches(setup: Setup) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, each (batch, time), from places of the text that a fixed generator chooses."""
    text, generator = standard_library_text(), torch.Generator().manual_seed(setup.seed)
    for _ in range(setup.steps):
        starts = torch.randint(len(text) - setup.time, (setup.batch, 1), generator=generator)
        piece = text[starts + torch.arange(setup.time + 1)].to(setup.device)
        yield piece[:, :-1], piece[:, 1:]


class Trainer:
    """A new model, its optimizer and its learning rates, under one system."""

    def __init__(self, system: str, setup: Setup):
        torch.manual_seed(setup.seed)
        self.model = GPT.from_name(
            "llama2-like", n_layer=setup.layers, n_embd=setup.width, head_size=32, n_head=setup.width // 32,
            intermediate_size=setup.width * 8 // 3, vocab_size=256,
            block_size=setup.time,
        ).to(setup.device)  # fmt: skip
        self.compiled = compile_with(system, self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setup.rate, weight_decay=0.1)
        rising = max(1, setup.steps // 20)
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda i: min((i + 1) / rising, 0.5 + 0.5 * math.cos(math.pi * i / setup.steps))
        )

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.compiled(tokens).flatten(0, 1), targets.flatten())

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """One step of training; the loss is the one before it. Reading the loss waits for the device."""
        loss = self.loss(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rates.step()
        return loss.item()


def train(setup: Setup) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(losses, seconds), each by system and step. In a step the systems take turns on one batch, and the order changes
    from step to step."""
    trainers = {system: Trainer(system, setup) for system in SYSTEMS}
    losses: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for i, (tokens, targets) in enumerate(tqdm(batches(setup), total=setup.steps, unit="step", disable=None)):
        for system in SYSTEMS if i % 2 else SYSTEMS[::-1]:
            start = time.perf_counter()
            losses[system].append(trainers[system].step(tokens, targets))
            seconds[system].append(time.perf_counter() - start)
    return losses, seconds


def relative_differences(losses: dict[str, list[float]]) -> list[float]:
    """|thunder - eager| / |eager| of the loss, step by step; infinite where one of the two is no number."""
    return [
        abs(t - e) / abs(e) if math.isfinite(t) and math.isfinite(e) else math.inf
        for e, t in zip(losses["eager"], losses["thunder"], strict=True)
    ]


# ----------------------------------------------------------------------------------------------------------------
# memory


def memory(system: str, setup: Setup) -> dict[str, int]:
    """Bytes that training takes, measured over a few steps of one system, alone in this process.

    before: with the model made, before the first step. peak: the most during the steps. saved: what one forward keeps
    for its backward, each storage once, without weights and batch, which are there anyway. On a GPU the first two are
    those of PyTorch's allocator, on a CPU the resident memory of the process.
    """
    trainer = Trainer(system, setup)
    tokens, targets = next(batches(setup))
    before, _ = device_bytes(setup.device)
    for _ in range(MEMORY_STEPS):
        trainer.step(tokens, targets)
    _, peak = device_bytes(setup.device)
    return {"before": before, "peak": peak, "saved": saved_bytes(trainer, tokens, targets)}


def device_bytes(device: str) -> tuple[int, int]:
    """(in use now, the most so far)."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # not ru_maxrss, which a process inherits from the one that started it
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most, most


def saved_bytes(trainer: Trainer, tokens: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward of one loss, without weights and batch."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # what it keeps lives as long as the loss, so no storage takes the place of another
        loss = trainer.loss(tokens, targets)
    for there_anyway in (*trainer.model.parameters(), *trainer.model.buffers(), tokens, targets):
        sizes.pop(there_anyway.untyped_storage().data_ptr(), None)
    del loss
    return sum(sizes.values())


def memory_apart(system: str, setup: Setup) -> dict[str, int]:
    """`memory` in a process of its own, so that no system's memory counts for the other."""
    command = [
        sys.executable,
        __file__,
        "--memory",
        system,
        *(f"--{name}={value}" for name, value in asdict(setup).items()),
    ]
    paths = os.pathsep.join(filter(None, sys.path))  # what this process finds, that one finds
    return json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}).stdout
    )


# ---------------------------------------------------------------------------------------------------------------- what
# is shown


def loss_table(losses: dict[str, list[float]], rows: int = 12) -> str:
    """Losses of both systems at some steps, the last included, and the largest relative difference up to there."""
    differences = relative_differences(losses)
    last = len(differences) - 1
    shown = sorted({*range(0, last, max(1, -(-len(differences) // rows))), last})
    lines = [f"{'step':>6}{'eager':>12}{'thunder':>12}   largest relative difference so far"]
    lines += [
        f"{i + 1:>6}{losses['eager'][i]:>12.6f}{losses['thunder'][i]:>12.6f}   {max(differences[: i + 1]):.2g}"
        for i in shown
    ]
    return "\n".join(lines)


def cost_table(seconds: dict[str, list[float]], used: dict[str, dict[str, int]], setup: Setup) -> str:
    """What a step takes in each system: time, and memory in MiB."""
    lines = [
        f"{'':8}{'tokens/s':>10}{'ms a step':>11}{'of eager':>10}"
        f"{'peak MiB':>10}{'from MiB':>10}{'saved for backward MiB':>24}"
    ]
    typical = {system: median(seconds[system][min(WARM_UP, setup.steps // 2) :]) for system in SYSTEMS}
    for system in SYSTEMS:
        peak, before, saved = (used[system][name] / 2**20 for name in ("peak", "before", "saved"))
        lines.append(
            f"{system:8}{setup.batch * setup.time / typical[system]:>10,.0f}{1e3 * typical[system]:>11.1f}"
            f"{typical[system] / typical['eager']:>10.2f}"
            f"{peak:>10.0f}{before:>10.0f}{saved:>24.1f}"
        )
    return "\n".join(lines)


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Both loss curves, and their relative difference below, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    above.plot(losses["eager"], label="eager", linewidth=3, alpha=0.5)
    above.plot(losses["thunder"], label="thunder", linewidth=1)
    above.set(
        ylabel="loss (nats a byte)", title="A byte-level GPT on Python's standard library, trained twice from one seed"
    )
    above.legend()
    below.plot(relative_differences(losses), color="tab:red")
    below.axhline(TOLERANCE, color="gray", linestyle=":", label="limit")
    below.set(
        xlabel="step",
        ylabel="relative difference",
        ylim=(0, 1.2 * max(TOLERANCE, min(1.0, max(relative_differences(losses))))),
    )
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def compare(setup: Setup, picture: Path = PICTURE) -> bool:
    """Trains under both systems and prints what came out. Whether the loss curves agree."""
    weights = sum(p.numel() for p in Trainer("eager", setup).model.parameters())
    print(
        f"{setup.layers} blocks, {weights:,} parameters, {setup.steps} steps of {setup.batch} x {setup.time} bytes "
        f"on {setup.device}, AdamW",
        flush=True,
    )
    used = {system: memory_apart(system, setup) for system in SYSTEMS}
    losses, seconds = train(setup)
    print(loss_table(losses))
    print(f"\n{cost_table(seconds, used, setup)}")
    draw(losses, picture)
    print(f"\nBoth curves are drawn in {picture}")
    worst = max(relative_differences(losses))
    agrees = worst <= TOLERANCE
    print(
        f"The loss curves {'agree' if agrees else 'DO NOT AGREE'}: their largest relative difference is {worst:.2g}, "
        f"the limit {TOLERANCE:.0e}",
        flush=True,
    )
    return agrees


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in asdict(Setup()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument(
        "--memory", choices=SYSTEMS, help="measure the memory of one system in this process, and print it as JSON"
    )
    chosen = vars(parser.parse_args())
    picture, system = chosen.pop("picture"), chosen.pop("memory")
    if system:
        print(json.dumps(memory(system, Setup(**chosen))))
        return 0
    return 0 if compare(Setup(**chosen), picture) else 1


if __name__ == "__main__":
    sys.exit(main())
