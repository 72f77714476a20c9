"""`torch.compile(backend="thunder")`: models and programs that break Dynamo's graphs compute what eager PyTorch does.

    python benchmarks/dynamo.py [--models [NAME ...]] [--programs [NAME ...]] [--inductor] [--json FILE]

Models are those of model_zoo.py, in train mode: forward and backward. Programs are each break in each context, three
calls each; results, gradients, written arguments and host effects are compared. One line each:

    equal    gradients that are eager's bit for bit, and the largest distance in norms (models: at most 1e-5;
             programs: at most 1e-6)
    graphs   how many graphs Dynamo gave to the backend, and how many breaks it noted
    first    seconds of the first step, beside backend="eager" (what Dynamo alone takes) and, with --inductor,
             backend="inductor"

Where Dynamo alone differs from eager PyTorch (backend="eager": a break in autocast drops the casts that it keeps), the
line says so and the reference is what Dynamo computes. A graph that thunder cannot capture raises (fallback="error").
Exit status 1 where something differs or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from model_zoo import MODELS, named_tensors
from torch import Tensor, nn
from torch._dynamo.utils import counters
from training import Step, compare_gradients

from thunder.dynamo import ThunderCompiler

PROGRAM_BAR = 1e-6  # norm-relative, float32
EFFECTS: list[Any] = []  # what host code of a program does


# --- breaks: what Dynamo leaves a graph for. Each takes a tensor with a history and gives one
def by_hand(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 1.5


def of_item(x: Tensor) -> Tensor:
    return x * (1 + abs(x.detach().sum().item()) / 100)


def of_branch(x: Tensor) -> Tensor:
    return x.sin() if x.sum() > 0 else x.cos()


def of_loop(x: Tensor) -> Tensor:
    while x.abs().max() > 0.5:
        x = x / 2
    return x


def of_print(x: Tensor) -> Tensor:
    print("sum", round(float(x.detach().sum()), 3))
    return x + 1


def of_log(x: Tensor) -> Tensor:
    logging.getLogger("benchmark").warning("shape %s", tuple(x.shape))
    return x.tanh()


def of_list(x: Tensor) -> Tensor:
    EFFECTS.append(x.detach().flatten()[:2].tolist())
    return x * 2


def of_numpy(x: Tensor) -> Tensor:
    return x + float(np.asarray(x.detach()).clip(-1, 1).mean())


def of_random(x: Tensor) -> Tensor:
    return x * random.choice([0.5, 2.0])


def of_counts(x: Tensor) -> Tensor:
    return x.flatten()[(x > 0).nonzero().sum() % x.numel()] + x


def of_mask(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def of_disabled(x: Tensor) -> Tensor:
    return left_alone(x) - 0.5


@torch._dynamo.disable
def left_alone(x: Tensor) -> Tensor:
    return x.exp().log1p()


def of_saving(x: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    return x * len(buffer.getvalue()) / 1000


def of_tried(x: Tensor) -> Tensor:
    try:
        if float(x.detach().mean()) > 0:
            raise ValueError("positive")
        return x.relu() + 0.1 * x
    except ValueError as error:
        return x * len(str(error))


BREAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "graph_break": by_hand, "item": of_item, "branch": of_branch, "while": of_loop, "print": of_print,
    "logging": of_log, "tolist": of_list, "numpy": of_numpy, "random": of_random, "nonzero": of_counts,
    "mask": of_mask, "disabled": of_disabled, "torch.save": of_saving, "exception": of_tried,
}  # fmt: skip


# --- contexts: a program around a break. x: an input that requires grad; w: a weight
Broken = Callable[[Tensor], Tensor]


def straight(b: Broken, x: Tensor, w: Tensor) -> Any:
    return b((x @ w).sin()) @ w


def in_a_loop(b: Broken, x: Tensor, w: Tensor) -> Any:
    for i in range(3):
        x = b(x @ w / (i + 2)).tanh()
    return x


def in_a_module(b: Broken, x: Tensor, w: Tensor) -> Any:
    class Block(nn.Module):
        def forward(self, x, scale=1.0):
            return nn.functional.layer_norm(b(x) * scale, x.shape[-1:])

    return Block()(x @ w, scale=2.0) + x


def without_grad(b: Broken, x: Tensor, w: Tensor) -> Any:
    with torch.no_grad():
        shift = b(x @ w)
    return (x @ w) * shift


def with_autocast(b: Broken, x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = b((x @ w).float()) @ w
    return y.float() + x @ w


def after_a_write(b: Broken, x: Tensor, w: Tensor) -> Any:
    y = (x @ w).clone()
    y[0] = y[1] * 2
    z = b(y) + x
    z.mul_(2)
    return z + y


def in_a_closure(b: Broken, x: Tensor, w: Tensor) -> Any:
    count = 0

    def inner(y):
        nonlocal count
        count += 1
        return b(y * count)

    return inner(x @ w) + inner(x), count


def in_containers(b: Broken, x: Tensor, w: Tensor) -> Any:
    results = {"a": x.sin(), "b": [x @ w, x.cos()]}
    results["c"] = b(results["a"] + results["b"][0])
    return results


def with_gradients_inside(b: Broken, x: Tensor, w: Tensor) -> Any:
    y = b((x @ w).tanh())
    (g,) = torch.autograd.grad(y.square().sum(), w, retain_graph=True)
    return y + (x @ g).detach()


def in_finally(b: Broken, x: Tensor, w: Tensor) -> Any:
    try:
        y = (x @ w).softmax(-1)
    finally:
        y = b(y * 3)
    return y.logsumexp(-1)


CONTEXTS: dict[str, Callable] = {
    "straight": straight, "loop": in_a_loop, "module": in_a_module, "no_grad": without_grad,
    "autocast": with_autocast, "write": after_a_write, "closure": in_a_closure, "containers": in_containers,
    "gradients inside": with_gradients_inside, "finally": in_finally,
}  # fmt: skip


def call_of(run: Callable, broken: Broken, seed: int) -> dict[str, Any]:
    """Results, gradients and effects of one call."""
    EFFECTS.clear()
    random.seed(seed)
    torch.manual_seed(seed)
    x, w = torch.randn(4, 4) + (0.5 if seed % 2 else -0.5), torch.randn(4, 4) / 2
    x.requires_grad_()
    w.requires_grad_()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = run(broken, x, w)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sum(t.sum() for t in tensors if t.requires_grad).backward()
    return {
        "tensors": [t.detach().clone() for t in tensors], "gradients": [x.grad, w.grad], "printed": printed.getvalue(),
        "others": [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)], "effects": list(EFFECTS),
    }  # fmt: skip


def apart(ours: dict[str, Any], expected: dict[str, Any]) -> float:
    if any(ours[name] != expected[name] for name in ("printed", "others", "effects")):
        return math.inf
    a, b = (results["tensors"] + results["gradients"] for results in (ours, expected))
    if [(x is None, getattr(x, "shape", 0)) for x in a] != [(x is None, getattr(x, "shape", 0)) for x in b]:
        return math.inf
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True) if x is not None]
    distances = [((x - y).norm() / y.norm().clamp(min=1e-30)).item() for x, y in pairs if not x.equal(y)]
    return max((math.inf if math.isnan(d) else d for d in distances), default=0.0)


# --- one row
def backends(with_inductor: bool) -> dict[str, Any]:
    results = {"thunder": ThunderCompiler(fallback="error"), "eager": "eager"}
    return results | ({"inductor": "inductor"} if with_inductor else {})


def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def run_program(name: str, with_inductor: bool) -> dict[str, Any]:
    kind, _, context = name.partition(" in ")
    broken, program = BREAKS[kind], CONTEXTS[context]
    expected = [call_of(program, broken, seed) for seed in range(3)]
    row: dict[str, Any] = {"name": name, "first": {}}
    results = {}
    for system, backend in backends(with_inductor).items():
        fresh()
        compiled = torch.compile(program, backend=backend)
        start = time.perf_counter()
        try:
            ours = [call_of(compiled, broken, 0)]
            row["first"][system] = time.perf_counter() - start
            ours += [call_of(compiled, broken, seed) for seed in (1, 2)]
        except Exception as error:  # noqa: BLE001  an error of whatever kind is this program's finding
            row[f"failed {system}"] = f"{type(error).__name__}: {error}"[:500]
            continue
        results[system] = ours
        row[f"apart {system}"] = max(apart(a, b) for a, b in zip(ours, expected, strict=True))
        if system == "thunder":
            row |= {"graphs": len(backend.subgraphs), "breaks": sum(counters["graph_break"].values())}
    if {"thunder", "eager"} <= results.keys() and row["apart eager"] > PROGRAM_BAR:
        row["apart thunder"] = max(apart(a, b) for a, b in zip(results["thunder"], results["eager"], strict=True))
    row["holds"] = row.get("apart thunder", math.inf) <= PROGRAM_BAR
    return row


def run_model(name: str, with_inductor: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "first": {}, "problems": []}
    module, args, kwargs = MODELS[name]()
    module.train()
    for _, t in named_tensors((args, kwargs)):
        if t.is_floating_point():
            t.requires_grad_()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    reference = Step(module, module, args, kwargs, named_tensors).gradients()
    for system, backend in backends(with_inductor).items():
        fresh()
        module.load_state_dict(state)
        step = Step(torch.compile(module, backend=backend), module, args, kwargs, named_tensors)
        start = time.perf_counter()
        try:
            ours = step.gradients()
            row["first"][system] = time.perf_counter() - start
            module.load_state_dict(state)
            again = step.gradients()
        except Exception as error:  # noqa: BLE001  an error of whatever kind is this program's finding
            row[f"failed {system}"] = f"{type(error).__name__}: {error}"[:500]
            continue
        equal, worst, _, problems = compare_gradients(ours, reference)
        problems += compare_gradients(again, reference)[3]
        row |= {f"apart {system}": worst, f"equal {system}": f"{equal} of {len(reference)}"}
        if system == "thunder":
            row |= {"graphs": len(backend.subgraphs), "breaks": sum(counters["graph_break"].values())}
            row["problems"] = problems
    row["holds"] = "apart thunder" in row and not row["problems"]
    return row


def line(row: dict[str, Any]) -> str:
    parts = [f"{'ok' if row['holds'] else 'FAILS':5}  {row['name']:32}"]
    if "apart thunder" in row:
        parts.append(f"{row.get('equal thunder', ''):12} apart {row['apart thunder']:.1e}")
        parts.append(f"graphs {row['graphs']:3}  breaks {row['breaks']:3}")
    parts += [f"{system} {seconds:6.2f} s" for system, seconds in row["first"].items()]
    parts += [f"\n       {key}: {row[key]}" for key in row if key.startswith("failed")]
    words = {"eager": "Dynamo alone differs by", "inductor": "inductor differs by"}
    distances = {system: row.get(f"apart {system}", 0.0) for system in words}
    others = [f"{words[system]} {far:.1e}" for system, far in distances.items() if far > PROGRAM_BAR]
    return "  ".join(parts + others) + "".join(f"\n       {problem}" for problem in row.get("problems", ()))


def rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    everything = chosen.models is None and chosen.programs is None
    programs = [f"{kind} in {context}" for context in CONTEXTS for kind in BREAKS]
    for selected, names, run in ((chosen.programs, programs, run_program), (chosen.models, list(MODELS), run_model)):
        if selected is None and not everything:
            continue
        for name in names:
            if not selected or any(part.lower() in name.lower() for part in selected):
                yield run(name, chosen.inductor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", metavar="NAME", help="only models, those with these parts of names")
    parser.add_argument("--programs", nargs="*", metavar="NAME", help="only programs, those with these parts of names")
    parser.add_argument("--inductor", action="store_true", help='beside backend="inductor"')
    parser.add_argument("--json", metavar="FILE", help="a file to which a line is added for each row")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("benchmark", "torch._dynamo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in rows(chosen):
            results.append(row)
            print(line(row), flush=True)
            if chosen.json:
                with open(chosen.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
    for system in ("thunder", "inductor"):
        pairs = [(r["first"][system], r["first"]["eager"]) for r in results if {system, "eager"} <= r["first"].keys()]
        if pairs:
            total, alone = map(sum, zip(*pairs, strict=True))
            print(f"{system}: first steps {total:.1f} s, of which Dynamo {alone:.1f} s, over {len(pairs)} rows")
    failed = sum(not row["holds"] for row in results)
    print(f"{len(results) - failed} of {len(results)} hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
