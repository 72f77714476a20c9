"""Trains a byte-level GPT on Python's own standard library, fully sharded over as many processes as torchrun starts.

    torchrun --nproc-per-node 2 examples/train_fsdp.py [--steps 200] [--strategy zero3] [--checkpoint build/fsdp --every
    50] torchrun --nproc-per-node 4 examples/train_fsdp.py --checkpoint build/fsdp    # goes on where the last
    checkpoint ends, on any number of processes

NCCL where each process has a GPU, Gloo otherwise. The batch is shared among the processes, so that losses do not depend
on how many there are. Prints the losses, tokens per second, and for each rank the bytes it holds of parameters and
optimizer state and its peak memory.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm
from train import standard_library_text

import thunder
from thunder.distributed import FSDPBucketingStrategy, FSDPType, checkpoint, clip_grad_norm_, fsdp
from thunder.tests.litgpt_model import GPT

STRATEGIES = {"zero2": FSDPType.ZERO2, "zero3": FSDPType.ZERO3}
SEED = 0


class Training:
    """The model and its optimizer on this rank, and the step that comes next."""

    def __init__(self, chosen: argparse.Namespace, device: torch.device):
        torch.manual_seed(SEED)
        model = GPT.from_name(
            "llama2-like", n_layer=chosen.layers, n_embd=chosen.width, head_size=32, n_head=chosen.width // 32,
            intermediate_size=chosen.width * 8 // 3, vocab_size=256,
            block_size=chosen.time,
        )  # fmt: skip
        model = fsdp(
            model,
            device=device,
            broadcast_from=0,
            sharding_strategy=STRATEGIES[chosen.strategy],
            bucketing_strategy=FSDPBucketingStrategy.BLOCK,
        )
        self.model, self.chosen, self.device, self.step = thunder.jit(model), chosen, device, 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=chosen.rate, weight_decay=0.1)
        self.text = standard_library_text()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the step's inputs and targets."""
        generator = torch.Generator().manual_seed(SEED + self.step)
        starts = torch.randint(len(self.text) - self.chosen.time, (self.chosen.batch, 1), generator=generator)
        piece = self.text[starts.chunk(dist.get_world_size())[dist.get_rank()] + torch.arange(self.chosen.time + 1)].to(
            self.device
        )
        return piece[:, :-1], piece[:, 1:]

    def train_step(self) -> float:
        """The loss over the whole batch."""
        done = self.step / self.chosen.steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.chosen.rate * (min(1.0, done / 0.05 + 1e-3) * 0.5 * (1 + math.cos(math.pi * done)))
        tokens, targets = self.batch()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.step += 1
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def state(self) -> dict:
        options = checkpoint.StateDictOptions()
        model, optimizer = (
            checkpoint.get_model_state_dict(self.model, options),
            checkpoint.get_optimizer_state_dict(self.model, self.optimizer, options),
        )
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def resume(self, path: Path) -> None:
        """Takes up the last checkpoint, where there is one."""
        state = self.state()
        try:
            checkpoint.load(state, path)
        except FileNotFoundError:
            return
        checkpoint.load_model_state_dict(state["model"], self.model)
        checkpoint.load_optimizer_state_dict(state["optimizer"], self.model, self.optimizer)
        self.step = int(state["step"])

    def memory(self) -> str:
        """What this rank holds, and its peak: of the GPU, or of the process."""
        parameters = sum(p.nbytes for p in self.model.parameters())
        states = sum(
            t.nbytes for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
        )
        peak = (
            torch.cuda.max_memory_allocated()
            if self.device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        )
        return (
            f"rank {dist.get_rank()}: {parameters / 2**20:.2f} MiB of parameters, {states / 2**20:.2f} of "
            f"optimizer state, peak {peak / 2**20:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, of all processes together")
    parser.add_argument("--time", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate at its highest")
    parser.add_argument("--checkpoint", type=Path, help="the folder that training goes on from, and is saved to")
    parser.add_argument("--stop", type=int, help="end after so many of the steps, to go on later")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_fsdp.py")
    ranks = int(os.environ["WORLD_SIZE"])
    if chosen.batch % ranks:
        parser.error(f"--batch {chosen.batch} is not divisible by {ranks} processes")
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    training = Training(chosen, device)
    if chosen.checkpoint is not None:
        training.resume(chosen.checkpoint)
    first = not dist.get_rank()
    warm, started = training.step + 5, time.perf_counter()
    losses: list[float] = []
    last = chosen.steps if chosen.stop is None else min(chosen.stop, chosen.steps)
    for _ in tqdm(range(training.step, last), disable=not first, initial=training.step, total=chosen.steps):
        losses.append(training.train_step())
        if training.step == warm:
            started = time.perf_counter()
        if first and training.step % 20 == 0:
            tqdm.write(f"step {training.step}: loss {losses[-1]:.4f}")
        if chosen.checkpoint is not None and (training.step % chosen.every == 0 or training.step == last):
            checkpoint.save(training.state(), chosen.checkpoint)
    if first and training.step > warm:
        tokens = (training.step - warm) * chosen.batch * chosen.time / (time.perf_counter() - started)
        print(f"{ranks} processes, {chosen.strategy}: {tokens:.0f} tokens/s, last loss {losses[-1]:.6f}")
    said: list = [None] * ranks
    dist.all_gather_object(said, training.memory())
    if first:
        print("\n".join(said), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
