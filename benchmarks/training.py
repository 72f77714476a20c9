"""One training step of a model, beside eager's: are the gradients right, what is saved for the backward, how many ATen
calls and how long does it take?

Used by `benchmarks/models.py --train`. The modules are in train mode, dropout included: before each step the generator
gets the same seed, so both draw the same masks. The loss is the sum of every floating output times fixed random
numbers, so that each output gets a cotangent of its own; gradients and calls are compared for a loss of the first
output alone as well (a language model's caches, an encoder's pooled output play no part in it).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thunder.tests.measuring import interleaved, median, paired_ratio

GRADIENT_BAR, STEP_BAR = 1e-5, 1.02
WARM = 3


class CountCalls(TorchDispatchMode):
    """Counts the ATen operations that run inside the block, those of a backward included."""

    def __init__(self):
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """What was found out about one model's training step. Bytes, calls: (thunder's, eager's). seconds: medians. ratio:
    median and 95 % interval of the paired ratios."""

    name: str
    problems: tuple[str, ...]
    parameters: int = 0
    equal: int = 0
    worst: float = 0.0
    worst_name: str = ""
    saved_bytes: tuple[int, int] = (0, 0)
    calls: tuple[int, int] = (0, 0)
    opaque_derivatives: tuple[str, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)
    ratio: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    difference: dict[str, int] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        if not self.parameters:
            return f"FAILS  {self.name:24}" + "".join(f"\n       {problem}" for problem in self.problems)
        parts = [
            f"{'FAILS' if self.problems else 'ok':5}  {self.name:24}",
            f"gradients {self.equal} of {self.parameters} equal, worst {self.worst:<8.2g}",
            f"saved {self.saved_bytes[0]:8} B (eager {self.saved_bytes[1]:8})",
            f"ATen calls {self.calls[0]:5} (eager {self.calls[1]:5})",
        ]
        if self.seconds[1]:
            parts.append(
                f"step {self.seconds[0] * 1e6:7.0f} us ({self.ratio[0]:.3f} of eager [{self.ratio[1]:.3f}, "
                f"{self.ratio[2]:.3f}])"
            )
        return "  ".join(parts) + "".join(f"\n       {problem}" for problem in self.problems)


class Step:
    """One training step of a module on fixed inputs: a loss from its floating outputs, all or the first `outputs` of
    them, and their gradients."""

    def __init__(
        self,
        call: Callable,
        module: torch.nn.Module,
        args: tuple,
        kwargs: dict,
        tensors_of: Callable[[Any], Iterator[tuple[str, torch.Tensor]]],
        outputs=None,
    ):
        self.call, self.args, self.kwargs, self.tensors_of, self.outputs = call, args, kwargs, tensors_of, outputs
        inputs = dict(tensors_of((args, kwargs)))
        self.leaves = dict(module.named_parameters()) | {
            f"input {path}": t for path, t in inputs.items() if t.requires_grad
        }
        self.held = {
            t.untyped_storage().data_ptr() for t in (*self.leaves.values(), *module.buffers(), *inputs.values())
        }
        self.weights: list[torch.Tensor] = []

    def forward(self) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [t for _, t in self.tensors_of(self.call(*self.args, **self.kwargs)) if t.requires_grad][: self.outputs]

    def loss(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        if not self.weights:
            generator = torch.Generator().manual_seed(2)
            self.weights = [torch.randn(o.shape, generator=generator, dtype=o.dtype).to(o.device) for o in outputs]
        total = (outputs[0] * self.weights[0]).sum()
        for o, w in zip(outputs[1:], self.weights[1:], strict=True):
            total = total + (o * w).sum()
        return total

    def __call__(self) -> None:
        for leaf in self.leaves.values():
            leaf.grad = None
        self.loss(self.forward()).backward()
        if self.weights[0].is_cuda:
            torch.cuda.synchronize()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        self()
        return {name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in self.leaves.items()}

    def saved_bytes(self) -> int:
        """Bytes of the distinct storages that the forward keeps for the backward, without those of parameters, buffers
        and inputs.

        The hooks see what PyTorch's own nodes save, what a compiled forward hands to save_for_backward, and what the
        nodes inside an opaque derivative save.
        """
        sizes: dict[int, int] = {}
        saved = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.held:
                sizes[storage.data_ptr()] = storage.nbytes()
                saved.append(storage)  # an address is one storage's only while that lives
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            outputs = self.forward()
        del outputs
        return sum(sizes.values())

    def calls(self) -> collections.Counter[str]:
        with CountCalls() as counter:
            self()
        return counter.calls


def compare_gradients(ours: dict, reference: dict) -> tuple[int, float, str, list[str]]:
    """(how many are equal bit for bit, the largest ||difference|| / ||reference||, whose it is, what is wrong)."""
    equal, worst, worst_name, problems = 0, 0.0, "", []
    for name, want in reference.items():
        got = ours[name]
        if (got is None) != (want is None):
            problems.append(
                f"{name}: the gradient is {'missing' if got is None else 'there'}, eager's is "
                f"{'missing' if want is None else 'there'}"
            )
            continue
        if got is None or torch.equal(got, want):
            equal += 1
            continue
        difference, size = (got.double() - want.double()).norm().item(), want.double().norm().item()
        relative = difference / size if size else math.inf
        if not relative <= worst:
            worst, worst_name = relative, name
    if not worst <= GRADIENT_BAR:
        problems.append(f"the gradient of {worst_name} deviates by {worst:.3g} of its norm, the bar is {GRADIENT_BAR}")
    return equal, worst, worst_name, problems


def problems_of_first_output(
    compiled: Callable, module: torch.nn.Module, args: tuple, kwargs: dict, tensors_of: Callable
) -> list[str]:
    """What is wrong with a step whose loss is made of the first output alone."""
    ours, eager = (Step(call, module, args, kwargs, tensors_of, 1) for call in (compiled, module))
    problems = compare_gradients(ours.gradients(), eager.gradients())[3]
    calls, bound = ours.calls().total(), eager.calls().total()
    return problems + ([f"makes {calls} ATen calls, eager {bound}"] if calls > bound else [])


def moved(value: Any, device: str) -> Any:
    """Arguments with their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return type(value)(moved(item, device) for item in value) if isinstance(value, (tuple, list)) else value


def measure_training(name: str, build: Callable, tensors_of: Callable, rounds: int, device: str = "cpu") -> TrainingRow:
    """Builds the model and compares its training step with eager's."""
    import thunder

    module, args, kwargs = build()
    module.train().to(device)
    args, kwargs = moved(args, device), moved(kwargs, device)
    for _, t in tensors_of((args, kwargs)):
        if t.is_floating_point():
            t.requires_grad_()
    compiled = thunder.jit(module)
    steps = {
        "thunder": Step(compiled, module, args, kwargs, tensors_of),
        "eager": Step(module, module, args, kwargs, tensors_of),
    }
    state = {key: value.clone() for key, value in module.state_dict().items()}
    gradients = {}
    for system in ("eager", "thunder"):
        module.load_state_dict(state)  # statistics that a step updates
        gradients[system] = steps[system].gradients()
    equal, worst, worst_name, problems = compare_gradients(gradients["thunder"], gradients["eager"])
    again = compare_gradients(steps["thunder"].gradients(), gradients["eager"])
    problems += [f"in the second call: {problem}" for problem in again[3]]
    problems += [
        f"from the first output alone: {problem}"
        for problem in problems_of_first_output(compiled, module, args, kwargs, tensors_of)
    ]
    saved = steps["thunder"].saved_bytes(), steps["eager"].saved_bytes()
    calls = steps["thunder"].calls(), steps["eager"].calls()
    totals = calls[0].total(), calls[1].total()
    if saved[0] > saved[1]:
        problems.append(f"saves {saved[0]} bytes for the backward, eager {saved[1]}")
    if totals[0] > totals[1]:
        problems.append(f"makes {totals[0]} ATen calls, eager {totals[1]}")
    if thunder.cache_misses(compiled) != 1:
        problems.append(f"compiled again for the same arguments: {thunder.last_recompile_reasons(compiled)}")
    trace = thunder.last_traces(compiled)[-1]
    opaque = tuple(
        sorted(
            line.sym.name.removesuffix("_with_graph") for line in trace.bound_symbols if "_with_graph" in line.sym.name
        )
    )
    seconds, ratio = (0.0, 0.0), (math.nan, math.nan, math.nan)
    if rounds:
        interleaved(steps, WARM)
        # on the CPU what one thread computes: what others do on the machine is not counted
        samples = interleaved(steps, rounds, clock=time.process_time if device == "cpu" else time.perf_counter)
        seconds, ratio = (
            (median(samples["thunder"]), median(samples["eager"])),
            paired_ratio(samples["thunder"], samples["eager"]),
        )
        if ratio[2] > STEP_BAR:
            problems.append(
                f"a step takes {ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}] of eager's time, the bar is {STEP_BAR}"
            )
    difference = {
        op: calls[0][op] - calls[1][op]
        for op in sorted(calls[0].keys() | calls[1].keys())
        if calls[0][op] != calls[1][op]
    }
    return TrainingRow(
        name,
        tuple(problems),
        len(gradients["eager"]),
        equal,
        worst,
        worst_name,
        saved,
        totals,
        opaque,
        seconds,
        ratio,
        difference,
    )
