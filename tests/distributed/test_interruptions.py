"""Training that is killed again and again, and goes on from its last checkpoint on other ranks and in other layouts, ends
with the weights of training that nobody disturbs.

python -m tests.distributed.test_interruptions 2000     # so many steps on up to 4 processes, with a table of segments
"""

import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

import thunder
from tests.distributed.launcher import Ranks
from tests.distributed.test_layouts_and_models import LAYOUTS, WORDS, build, full
from tests.distributed.training import close
from thunder.distributed import checkpoint

MODEL, ROWS = "grouped", 4
SINGLE = (1,), lambda size: 1, lambda m, size: m
# on at most 4 processes: (processes, layout)
PLACES = [(1, "one process")] + [
    (size, name)
    for name in ("ddp", "zero2", "zero3", "hsdp", "tp", "sp", "zero3 x tp", "ddp x tp", "cp", "ep", "ep x zero3")
    for size in LAYOUTS[name][0]
    if size <= 4
]


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, 16), generator=torch.Generator().manual_seed(step))


def optimizer_of(module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)


def state_of(module, optimizer, step: int) -> dict:
    return {
        "model": checkpoint.get_model_state_dict(module),
        "optimizer": checkpoint.get_optimizer_state_dict(module, optimizer),
        "step": torch.tensor(step),
    }


def last_of(folder: Path) -> bool:
    """Whether there is a complete checkpoint."""
    return any((folder / name / ".metadata").exists() for name in ("state", "state.previous"))


def trains(rank, size, layout, folder, until, saves_each, kill):
    """Trains from the last checkpoint to a step, saving in the background. kill: (rank, step, whether in the middle of a
    save that begins there). The weights, where nobody is killed."""
    folder = Path(folder)
    _, sharing, prepare = LAYOUTS.get(layout, SINGLE)
    module = prepare(build(MODEL), size)
    optimizer, first = optimizer_of(module), 0
    if last_of(folder):
        state = state_of(module, optimizer, 0)
        checkpoint.load(state, folder / "state")
        checkpoint.load_model_state_dict(state["model"], module)
        checkpoint.load_optimizer_state_dict(state["optimizer"], module, optimizer)
        first = int(state["step"])
    compiled = thunder.jit(module, fallback="error", executors=[])
    parts = size // sharing(size)
    for step in range(first, until):
        optimizer.zero_grad()
        compiled(batch(step).chunk(parts)[rank // sharing(size)]).backward()
        optimizer.step()
        is_last = kill is not None and kill[:2] == (rank, step)
        if is_last and not kill[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_last:
            die_while_saving()
        if is_last or (step + 1) % saves_each == 0 or kill is not None and kill[1:] == (step, True):
            checkpoint.async_save(state_of(module, optimizer, step + 1), folder / "state")
        if is_last:
            time.sleep(60.0)
    checkpoint.save(state_of(module, optimizer, until), folder / "state")
    return first, {name: full(p.detach()).numpy() for name, p in module.named_parameters()}


trains.ends_process = True  # as the error ends a program: those who wait for this rank hear of it


def die_while_saving() -> None:
    """The next write of a checkpoint kills this process, in the middle of it."""
    import torch.distributed.checkpoint as dcp

    write = dcp.FileSystemWriter.write_data

    def dies(self, plan, planner):
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = dies


def survives(
    folder: Path, steps: int, each: int, kills: int, seed: int, shown=lambda line: None, places=PLACES, in_saves=0.5
) -> float:
    """Trains through `kills` kills in each segment of `each` steps, in_saves of them in a save, and in another layout in
    each of them. The largest relative distance of a weight to those of one process."""
    generator, weights = random.Random(seed), {}
    for start in range(0, steps, each):
        size, layout = generator.choice(places)
        for number in range(kills + 1):
            kill = None
            if number < kills:
                kill = (
                    generator.randrange(size),
                    generator.randrange(start, start + each),
                    generator.random() < in_saves,
                )
            began, group, told = time.monotonic(), Ranks(size), ""
            try:
                first, weights = group(trains, layout, folder, start + each, max(1, each // 10), kill, timeout=300.0)[0]
                told = f"from step {first}"
            except AssertionError as error:
                assert kill is not None and f"rank {kill[0]}: the process ended" in str(error), error
                told = f"rank {kill[0]} killed {'in a save' if kill[2] else 'in training'} at step {kill[1]}"
            finally:
                group.close()
            shown(f"{start:5} to {start + each:5}  {size} x {layout:12} {told} ({time.monotonic() - began:.1f} s)")
    one = build(MODEL)
    optimizer = optimizer_of(one)
    for step in range(steps):
        optimizer.zero_grad()
        one(batch(step)).backward()
        optimizer.step()
    worst = 0.0
    for name, p in one.named_parameters():
        weight = torch.from_numpy(weights[name])
        worst = max(worst, float((weight - p.detach()).norm() / p.detach().norm()))
        close(weight, p.detach(), name, 1e-9)  # roundings of all steps of AdamW
    return worst


def test_training_that_is_killed_in_a_save_goes_on(tmp_path):
    survives(tmp_path, 10, 10, 1, 3, places=[(2, "zero3")], in_saves=1.0)


@pytest.mark.slow  # the default suite has one kill
def test_training_that_is_killed_and_resharded_again_and_again(tmp_path):
    survives(tmp_path, 120, 20, 1, 0, print)


if __name__ == "__main__":
    count, chosen = (int(word) for word in (*sys.argv[1:], "0")[:2])
    with tempfile.TemporaryDirectory() as scratch:
        distance = survives(Path(scratch), count, 100, 1, chosen, functools.partial(print, flush=True))
    print(f"{count} steps: weights are {distance:.1e} from those of one process that nobody disturbs")
