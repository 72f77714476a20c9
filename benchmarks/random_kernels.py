"""Random memory-bound programs, forward and backward, on the CPU: a population, not a list.

    python benchmarks/random_kernels.py [--seeds 0:24] [--systems eager,torch.compile,thunder] [--threads 2]
        [--rounds 10] [--show SEED] [--predictions]

A program has 6 to 14 operations on matrices: elementwise functions, norms, softmax and sums along rows and columns,
joins, rotations, shifts, transposes and lookups. All systems run the same program on the same inputs, taking turns in
one process. A line a program: the median milliseconds of a step and the ratios to eager's and to torch.compile's; the
last line has geometric means. error: the worst distance to float64, by eager's. With one thread the process's own time
counts, so that others on the machine do not.

--predictions: for each region of the executor cpp, what its kernels and PyTorch's operations take, beside what the cost
model says, and the median error.
"""

from __future__ import annotations

import argparse
import linecache
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import thunder
from thunder.core.proxies import TensorProxy
from thunder.executors.cpp_fuser import KernelRegion
from thunder.ops.torch_types import to_torch_dtype

ROWS, COLUMNS = (64, 128, 500, 512, 1023, 2048), (64, 127, 256, 768, 1000, 1536, 4099)
UNARY = (
    "torch.sin({0})", "torch.tanh({0})", "F.gelu({0})", "F.silu({0})", "torch.sigmoid({0})", "F.relu({0})",
    "torch.exp(-{0}.float().square()).to({0}.dtype)", "{0}.float().abs().add(1).log().to({0}.dtype)", "{0} * 0.5 + 1",
    "{0}.clamp(-1, 1)", "F.softplus({0})", "({0}.float() ** 2).to({0}.dtype)",
    "torch.rsqrt({0}.float().square() + 1).to({0}.dtype)",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} * {1}", "{0} - {1}", "torch.where({0} > {1}, {0}, {1} * 2)", "torch.maximum({0}, {1})",
    "{0} / ({1}.abs() + 1)", "torch.lerp({0}, {1}, 0.3)",
)  # fmt: skip
NORMS = (
    "F.layer_norm({0}, ({0}.shape[-1],), c, None)", "F.rms_norm({0}, ({0}.shape[-1],))", "torch.softmax({0}, -1)",
    "torch.log_softmax({0}.float(), -1).to({0}.dtype)", "F.normalize({0}, dim=-1)",
)  # fmt: skip
OF_COLUMNS = (
    "torch.softmax({0}, 0)", "({0} - {0}.mean(0)) * torch.rsqrt({0}.float().var(0) + 1e-5).to({0}.dtype)",
    "{0} - {0}.amax(0, keepdim=True)",
)  # fmt: skip
TO_ROWS = (
    "{0}.mean(-1, keepdim=True)", "{0}.amax(-1, keepdim=True)",
    "{0}.float().square().sum(-1, keepdim=True).to({0}.dtype)",
)  # fmt: skip
TO_COLUMNS = ("{0}.mean(0)", "{0}.float().sum(0).to({0}.dtype) * 1e-2")
MOVES = (
    "F.pad({0}[:, 1:], (0, 1))", "{0}.flip(1)",
    "{0} * ({0}.shape[1] - torch.arange({0}.shape[1])).to({0}.dtype) / {0}.shape[1]",
    "{0}.masked_fill(torch.arange({0}.shape[1])[None] > torch.arange({0}.shape[0])[:, None] % {0}.shape[1], -2.0)",
)  # fmt: skip


def joins(x: str, columns: int) -> tuple[str, ...]:
    half, third = columns // 2, columns // 3
    pairs = f"{x}[:, : {2 * half} : 2]", f"{x}[:, 1 : {2 * half} : 2]"
    turned = f"torch.stack([{pairs[0]} * 0.8 - {pairs[1]} * 0.6, {pairs[0]} * 0.6 + {pairs[1]} * 0.8], -1).flatten(1)"
    return (
        f"torch.cat([{x}[:, {half}:], -{x}[:, :{half}]], 1)",
        f"torch.cat([torch.sin({x}[:, :{third}]), torch.cos({x}[:, {third}:{2 * third}]), {x}[:, {2 * third}:]], 1)",
        turned if columns % 2 == 0 else f"{x}.roll(1, 1)",
    )


def program(seed: int) -> tuple[str, int, int, str]:
    """The text of `f(a, b, c, d, index)`, rows, columns and dtype. a, b: matrices; c: a row; d: a column."""
    draw = random.Random(seed)
    rows, columns = draw.choice(ROWS), draw.choice(COLUMNS)
    dtype = draw.choice(("float32", "float32", "bfloat16"))
    kinds = {"a": "matrix", "b": "matrix", "c": "row", "d": "column"}
    lines: list[tuple[str, str]] = []

    def matrix() -> str:
        known = [name for name, kind in kinds.items() if kind == "matrix"]
        return draw.choice(known[-2:]) if draw.random() < 0.65 else draw.choice(known)

    def expression() -> tuple[str, str]:
        x, k = matrix(), draw.random()
        if k < 0.30:
            return draw.choice(UNARY).format(x), "matrix"
        if k < 0.55:
            return draw.choice(BINARY).format(x, draw.choice([*kinds])), "matrix"
        if k < 0.62:
            return draw.choice(NORMS).format(x), "matrix"
        if k < 0.67:
            return draw.choice(OF_COLUMNS).format(x), "matrix"
        if k < 0.73:
            return draw.choice(TO_ROWS).format(x), "column"
        if k < 0.78:
            return draw.choice(TO_COLUMNS).format(x), "row"
        if k < 0.84:
            return draw.choice(joins(x, columns)), "matrix"
        if k < 0.88:
            return draw.choice(MOVES).format(x), "matrix"
        if k < 0.92:
            return f"{x}.t().contiguous().t() * {matrix()}", "matrix"
        if k < 0.95:
            return f"{x}[index]", "matrix"
        if k < 0.975:
            return f"torch.cumsum({x}.float(), 1).to({x}.dtype) * 1e-2", "matrix"
        return f"torch.zeros_like({x}).index_add(0, index, {x})", "matrix"

    for number in range(draw.randint(6, 14)):
        text, kind = expression()
        lines.append((f"t{number}", text))
        kinds[f"t{number}"] = kind
    read = " ".join(text for _, text in lines)
    for sign in "()[],.":
        read = read.replace(sign, " ")
    results = [name for name, _ in lines if name not in read.split()] or [lines[-1][0]]
    body = "".join(f"    {name} = {text}\n" for name, text in lines)
    return f"def f(a, b, c, d, index):\n{body}    return [{', '.join(results[-3:])}]\n", rows, columns, dtype


def function_of(seed: int) -> tuple[Callable, list[torch.Tensor], torch.Tensor]:
    """A program as a function, its four inputs and its index."""
    text, rows, columns, dtype = program(seed)
    name, kind = f"<random {seed}>", getattr(torch, dtype)
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(text, name, "exec"), space)
    torch.manual_seed(seed)
    shapes = (rows, columns), (rows, columns), (columns,), (rows, 1)
    inputs = [torch.randn(shape, dtype=kind, requires_grad=True) for shape in shapes]
    return space["f"], inputs, torch.randint(rows, (rows,))


def compiled_by(system: str, f: Callable) -> Callable:
    if system == "torch.compile":
        return torch.compile(f)
    if system == "eager":
        return f
    if system == "thunder":
        return thunder.jit(f)
    return thunder.jit(f, executors=[system.removeprefix("thunder_")])


def distance(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(
        float((a.double() - b).norm() / (b.norm() + 1e-30)) for a, b in zip(results, exact, strict=True)
    )  # fmt: skip


def measure(seed: int, systems: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, the first call's seconds, and the error, for each system."""
    f, inputs, index = function_of(seed)
    results = f(*inputs, index)
    cotangents = [torch.randn_like(r) for r in results]
    gradients = torch.autograd.grad(results, inputs, cotangents, allow_unused=True)
    used = [i for i, g in enumerate(gradients) if g is not None]

    def step(run: Callable, values: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        results = run(*values, index)
        return [*results, *torch.autograd.grad(results, [values[i] for i in used], weights)]

    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = [r.detach() for r in step(f, wide, [c.double() for c in cotangents])]
    row: dict[str, Any] = {"seed": seed}
    runs: dict[str, Callable] = {}
    for system in systems:
        runs[system] = compiled_by(system, f)
        start = time.perf_counter()
        got = step(runs[system], inputs, cotangents)
        row[f"{system} first"] = time.perf_counter() - start
        for _ in range(40 if system.startswith("thunder") else 6):  # until kernels and launch loops have taken over
            got = step(runs[system], inputs, cotangents)
        row[f"{system} error"] = distance([g.detach() for g in got], exact)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system, run in runs.items():
            start = clock()
            step(run, inputs, cotangents)
            times[system].append(clock() - start)
    for system, taken in times.items():
        row[system] = 1e3 * statistics.median(taken)
        for other in ("eager", "torch.compile"):
            if other in times and other != system:
                row[f"{system} / {other}"] = statistics.median(a / b for a, b in zip(taken, times[other], strict=True))
    return row


def like(proxy: TensorProxy, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a proxy's type with these strides; integers, which may be indices, are 0."""
    kind, shape = to_torch_dtype(proxy.dtype), tuple(proxy.shape)
    size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = torch.randn(size).to(kind) if kind.is_floating_point else torch.zeros(size, dtype=kind)
    return memory.as_strided(shape, strides)


def least_seconds(run: Callable, seconds: float = 0.03) -> float:
    """Of this thread, for one call."""
    begin, times = time.perf_counter(), []
    while time.perf_counter() - begin < seconds or len(times) < 5:
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return min(times)


def predictions(seed: int) -> list[tuple[float, float, float, float]]:
    """By region, in microseconds: what its kernels are predicted to take, and take; likewise PyTorch's operations."""
    f, inputs, index = function_of(seed)
    compiled = thunder.jit(f, executors=["cpp"])
    results = compiled(*inputs, index)
    torch.autograd.grad(results, inputs, [torch.randn_like(r) for r in results], allow_unused=True)
    traces = [*thunder.last_traces(compiled)[-1:], *thunder.last_backward_traces(compiled)[-1:]]
    functions = dict.fromkeys(b.sym.fn for t in traces for b in t.bound_symbols)
    rows = []
    for region in (function for function in functions if isinstance(function, KernelRegion)):
        for strides in region.strides:
            tensors = [like(p, s) for p, s in zip(region.region.inputs, strides, strict=True)]
            kernels, _ = region.scheduled(strides)
            # a launch from Python, as it is measured here, takes as long as three calls; in a loop, as one
            predicted = sum(k.seconds for k in kernels) + 3 * region.machine.call
            taken = least_seconds(lambda r=region, t=tensors: r(*t))
            eager = least_seconds(lambda r=region, t=tensors: r.by_operations(*t))
            rows.append(tuple(1e6 * x for x in (predicted, taken, region.eager_seconds, eager)))
            print("{}: kernels {:.1f} predicted, {:.1f}; operations {:.1f} predicted, {:.1f}".format(seed, *rows[-1]))
    return rows


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:24", help="a range")
    parser.add_argument("--systems", default="eager,torch.compile,thunder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--predictions", action="store_true", help="the cost model beside measurements")
    parser.add_argument("--show", type=int, help="print a program")
    chosen = parser.parse_args()
    if chosen.show is not None:
        print(*program(chosen.show), sep="\n")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(chosen.threads)
    systems = chosen.systems.split(",")
    low, high = map(int, chosen.seeds.split(":"))
    if chosen.predictions:
        results = [row for seed in range(low, high) for row in predictions(seed)]
        for name, i in (("kernels", 0), ("PyTorch's operations", 2)):
            error = statistics.median(abs(row[i] / row[i + 1] - 1) for row in results)
            print(f"{name}: median error {100 * error:.0f} % of {len(results)}")
        return
    rows = []
    for seed in range(low, high):
        try:
            rows.append(measure(seed, systems, chosen.rounds))
        except RuntimeError as error:  # a program without a derivative
            print(f"{seed}: {type(error).__name__}: {str(error)[:120]}")
            continue
        row = rows[-1]
        text = "  ".join(f"{s} {row[s]:.2f} ms ({row[f'{s} first']:.2f} s)" for s in systems)
        ratios = "  ".join(f"{k} {v:.2f}" for k, v in row.items() if " / " in k)
        worse = (
            max((row[f"{s} error"] / (row["eager error"] + 1e-9) for s in systems), default=0)
            if "eager" in systems
            else 0
        )
        print(f"{seed}: {program(seed)[1:]} {text}  {ratios}  error {worse:.2f}", flush=True)
    for key in [k for k in rows[0] if " / " in k] if rows else ():
        values = [r[key] for r in rows]
        slower = sum(v > 1.02 for v in values)
        print(
            f"{key}: geometric mean {mean(values):.3f}, worst {max(values):.2f}, above 1.02 in {slower} of {len(rows)}"
        )


if __name__ == "__main__":
    main()
