"""What the choices for attention, for a linear layer with its loss, in float8, of few rows and for norms are made from:
the tables of docs/lab_log.md, on a GPU.

    python benchmarks/gpu_products.py [attention] [loss] [padding] [float8] [rows] [norms] [epilogues] [tiles] [flex]

One line a measurement. Times are medians, in milliseconds; in microseconds for float8, for few rows and for epilogues,
which run from CUDA graphs: few rows with weights that are in no cache.
"""

from __future__ import annotations

import copy
import functools
import sys

import torch
import torch.nn.functional as F

import thunder

BATCH, HEADS, GROUPS = 1, 32, 8
LIMITS = (1 << 62, 1 << 29, 1 << 28, 1 << 27)  # bytes of logits that are made at once
WEIGHTS = (
    (4096, 4096),
    (6144, 4096),
    (11008, 4096),
    (12288, 4096),
    (14336, 4096),
    (32000, 4096),
    (4096, 11008),
    (4096, 14336),
    (5120, 5120),
)


def median(run, repetitions: int = 20) -> float:
    times = []
    for i in range(repetitions + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop))
    return sorted(times)[repetitions // 2]


def attention() -> None:
    from thunder.executors.sdpaex import KERNELS

    for length in (512, 2048, 4096):
        for width in (64, 128):
            q, k, v = (
                torch.randn(BATCH, length, h, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                for h in (HEADS, GROUPS, GROUPS)
            )
            wide = [x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)]
            print(
                f"attention {length} x {width}: repeating "
                f"{median(lambda: [x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v)]):.4f}"
            )
            for kernel in KERNELS:
                for name, operands in (("groups", (q, k, v)), ("repeated", (q, *wide))):
                    if kernel.name == "efficient" and name == "groups":
                        continue
                    arguments = (*operands, None)
                    rest = (0.0, True, None)
                    out, *saved = kernel.forward.fn(*arguments, *rest)
                    forward = median(lambda: kernel.forward.fn(*arguments, *rest))  # noqa: B023
                    backward = median(lambda: kernel.backward.fn(out, *arguments, out, *saved, *rest))  # noqa: B023
                    print(f"  {kernel.name}, {name}: forward {forward:.4f}, backward {backward:.4f}", flush=True)


def loss(rows: int = 4096, width: int = 4096, classes: int = 128256) -> None:
    from thunder.executors import linear_cross_entropy as joined

    x, w = (
        torch.randn(rows, width, device="cuda", dtype=torch.bfloat16),
        torch.randn(classes, width, device="cuda", dtype=torch.bfloat16) * 0.02,
    )
    target = torch.randint(0, classes, (rows,), device="cuda")

    def eager():
        a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(F.cross_entropy(F.linear(a, b).float(), target), (a, b))

    def report(name: str, run) -> None:
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run()
        torch.cuda.synchronize()
        del results
        print(
            f"loss, {name}: {median(run, 10):.3f}, peak {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB",
            flush=True,
        )

    report("eager", eager)
    for joined.LIMIT in LIMITS:
        name = f"at most {joined.LIMIT / 2**20:.0f} MiB of logits" if joined.LIMIT < 1 << 60 else "all logits"
        report(name, lambda: joined._forward(x, w, None, target, -100, "mean", torch.float32, (True, True, False)))


def padding(shapes=((8192, 768, 50257), (4096, 768, 30522), (2222, 1920, 32003), (1111, 1920, 32003))) -> None:
    """The three products of a layer (rows, k, n): of dense rows; by padding rows alone; and as
    `families/aligned.py` has them; and the layer with a bias. Batches of products of odd sizes."""
    from thunder.ops.families import aligned
    from thunder.ops.layout import empty_rows

    def products(rows, k, n):
        x, w, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((rows, k), (n, k), (n,)))
        of_x, of_w = torch.empty_like(x), torch.empty_like(w)
        wide = torch.empty(n, k, device="cuda")
        for name, out in (("dense", x.new_empty(rows, n)), ("padded", empty_rows(x, (rows, n)))):
            out.normal_()
            yield f"{name}, result", lambda out=out: torch.mm(x, w.t(), out=out)
            yield f"{name}, input's gradient", lambda out=out: torch.mm(out, w, out=of_x)
            yield f"{name}, weight's gradient", lambda out=out: torch.mm(out.t(), x, out=of_w)
        yield "aligned, result", lambda: aligned.multiply_into(out, x, w.t())
        yield "aligned, input's gradient", lambda: aligned.multiply_into(of_x, out, w)
        yield "aligned, weight's gradient", lambda: aligned.multiply_into(of_w, out.t(), x)
        yield "aligned, weight's gradient in float32", lambda: aligned.multiply_into(wide, out.t(), x)
        yield "dense, layer with a bias", lambda: F.linear(x, w, b)
        yield "aligned, layer with a bias", lambda: aligned.linear(x, w, b)

    def of_batches(batch, rows, k):
        x, y = (torch.randn(batch, rows, k, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for name, out in (("dense", x.new_empty(batch, rows, rows)), ("padded", empty_rows(x, (batch, rows, rows)))):
            out.normal_()
            yield f"{name}, scores", lambda out=out: torch.bmm(x, y.mT, out=out)
            yield f"{name}, sums", lambda out=out: out @ y
        yield "aligned, scores", lambda: aligned.multiply_into(out, x, y.mT)
        yield "aligned, sums", lambda: aligned.matmul(out, y)

    for shape in shapes:
        for name, call in products(*shape):
            print(f"products of {shape}, {name}: {median(call):.3f}", flush=True)
    for shape in ((96, 1111, 64), (64, 197, 64), (16, 2047, 128)):
        for name, call in of_batches(*shape):
            print(f"batches of {shape}, {name}: {median(call):.3f}", flush=True)


def graphed(calls) -> float:
    """Microseconds of one of the calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median(graph.replay, 7) / len(calls) * 1e3


def float8(rows: int = 2048, layers=((12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008))) -> None:
    """The three products of a layer (n, k) in bfloat16, in float8 with sums added up in fewer and in more digits, and
    its three roundings."""
    from thunder.executors.float8 import quantized

    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

    largest = thunder.jit(lambda matrix: matrix.float().abs().amax())

    def rounded(matrix, to):
        return quantized(matrix, largest(matrix), to, True)

    def product(a, b, fast):
        return graphed(
            [lambda: torch._scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=torch.bfloat16, use_fast_accum=fast)] * 8
        )

    for n, k in layers:
        x, w, g = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((rows, k), (n, k), (rows, n)))
        for name, call in (
            ("result", lambda: F.linear(x, w)),
            ("input's gradient", lambda: g @ w),
            ("weight's gradient", lambda: g.t() @ x),
        ):
            print(f"float8, {n} x {k}, {name} in bfloat16: {graphed([call] * 8):.1f}", flush=True)
        qx, qw, qg = rounded(x, e4m3), rounded(w, e4m3), rounded(g, e5m2)
        turned = {"x": (qx[2], qx[1]), "w": (qw[2], qw[1]), "g": (qg[2], qg[1])}
        for name, a, b in (
            ("result", qx, qw),
            ("input's gradient", qg, turned["w"]),
            ("weight's gradient", turned["g"], turned["x"]),
        ):
            print(f"  {name}: fewer digits {product(a, b, True):.1f}, more {product(a, b, False):.1f}", flush=True)
        for name, matrix, to in (("x", x, e4m3), ("weight", w, e4m3), ("gradient", g, e5m2)):
            least = 6 * matrix.numel() / 4.27e6
            print(
                f"  rounding {name}: {graphed([lambda: rounded(matrix, to)] * 8):.1f}, two passes at 4.27 TB/s "
                f"{least:.1f}",
                flush=True,
            )  # noqa: B023


def few(counts=(1, 2, 4, 8, 16)) -> None:
    from thunder.executors.matvec import few_rows

    for n, k in WEIGHTS:
        weights = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, int(3e8 // (n * k * 2))))
        ]
        for rows in counts:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            theirs, ours = (
                graphed([functools.partial(F.linear, x, w) for w in weights]),
                graphed([functools.partial(few_rows, x, w, None) for w in weights]),
            )
            print(f"rows {rows}, weight {n} x {k}: linear {theirs:.1f}, ours {ours:.1f}", flush=True)


def in_kernels(run, repetitions: int = 5) -> tuple[float, int]:
    """Milliseconds of all kernels of a call, and how many these are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize()
    events = [e for e in profile.key_averages() if e.self_device_time_total]
    time = sum(e.self_device_time_total for e in events)
    return time / repetitions / 1e3, round(sum(e.count for e in events) / repetitions)


def norms() -> None:
    """A norm with a residual and relu, forward and backward, of eager, torch.compile and thunder, in how many
    kernels, and how far results and gradients are from float64, to the largest element."""
    import torch.nn as nn

    import thunder

    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x, y):
            return F.relu(self.norm(x) + y)

    def step(function, module, x, y, g):
        leaves = [x, y, *module.parameters()]
        out = function(x, y)
        return [out.detach(), *torch.autograd.grad(out, leaves, g)]

    half, single = torch.bfloat16, torch.float32
    for name, norm, shape, layout, dtype in (
        ("PatchTST", nn.BatchNorm1d(128), (896, 128, 63), "channels last", single),
        ("ResNet", nn.BatchNorm2d(64), (32, 64, 112, 112), "channels last", half),
        ("ResNet", nn.BatchNorm2d(64), (32, 64, 112, 112), "row-major", half),
        ("ResNet", nn.BatchNorm2d(1024), (32, 1024, 14, 14), "channels last", half),
        ("ResNet", nn.BatchNorm2d(1024), (32, 1024, 14, 14), "row-major", half),
        ("U-Net", nn.GroupNorm(4, 192), (16, 192, 64, 64), "row-major", half),
        ("U-Net", nn.GroupNorm(4, 384), (16, 384, 16, 16), "row-major", half),
        ("MLP", nn.BatchNorm1d(512), (256, 512), "row-major", single),
    ):
        order = (0, *range(2, len(shape)), 1) if layout != "row-major" else tuple(range(len(shape)))
        back = [order.index(d) for d in range(len(shape))]
        x, y, g = (torch.randn([shape[d] for d in order], device="cuda", dtype=dtype).permute(back) for _ in range(3))
        x, y = (
            (x + 3).requires_grad_(),
            (8 * y.sign()).requires_grad_(),
        )  # no result rounds to the other side of relu's 0
        module = Block(norm.to(dtype) if isinstance(norm, nn.GroupNorm) else norm).cuda()  # which has one type
        with torch.enable_grad():
            exact = copy.deepcopy(module).double()
            wide = [t.detach().double().requires_grad_() for t in (x, y)]
            reference = step(exact, exact, *wide, g.double())
            compiled = thunder.jit(copy.deepcopy(module))
            torch.compiler.reset()
            inductor = torch.compile(copy.deepcopy(module), dynamic=False)
            print(f"norms, {name} {tuple(shape)} {layout} {str(dtype)[6:]}", flush=True)
            for system, function in (("eager", module), ("torch.compile", inductor), ("thunder", compiled)):
                run = functools.partial(step, function, function, x, y, g)
                far = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(run(), reference, strict=True)]
                time, (kernels, count) = median(run), in_kernels(run)
                print(
                    f"  {system}: {time:.3f}, in {count} kernels {kernels:.3f}, deviations "
                    f"{' '.join(f'{d:.1e}' for d in far)}",
                    flush=True,
                )


def programs_of_products(device: str = "cuda") -> dict[str, tuple]:
    """By name, a matrix product with what is computed before and after, and its inputs."""

    def random(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def layer(rows, columns, deep):
        return random(rows, deep), random(columns, deep), random(columns)

    def quantized(rows, columns, deep):
        weight = torch.randint(-127, 128, (columns, deep), dtype=torch.int8, device=device)
        return random(rows, deep), weight, random(columns, 1)

    def gated(x, a, b):
        return F.silu(x @ a) * (x @ b)

    def gated_by_halves(x, w):
        a, b = F.linear(x, w).chunk(2, -1)
        return F.silu(a) * b

    def dequantized(x, w, scale):
        return F.linear(x, w.to(x.dtype) * scale)

    positions = torch.arange(128, device=device)
    slopes = torch.linspace(0.1, 1, 16, device=device, dtype=torch.bfloat16).repeat(16)[:, None, None]

    def scores(q, k):
        return (q @ k.mT) * 0.125 + slopes * (positions - positions[:, None])

    wide = random(8192, 768), random(8192, 1024), random(8192, 4096)
    return {
        "GELU 8192x3072x768": (lambda x, w, b: F.gelu(F.linear(x, w, b)), *layer(8192, 3072, 768)),
        "residual 8192x768x3072": (lambda x, w, b, r: F.linear(x, w, b) + r, *layer(8192, 768, 3072), wide[0]),
        "GELU tanh 16384x4096x1024": (
            lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), *layer(16384, 4096, 1024),
        ),
        "squared ReLU 8192x4096x1024": (lambda x, w: F.relu(F.linear(x, w)).square(), *layer(8192, 4096, 1024)[:2]),
        "residual 8192x1024x1024": (lambda x, w, r: F.linear(x, w) + r, *layer(8192, 1024, 1024)[:2], wide[1]),
        "float32 4096x4096x512": (lambda x, w, b: F.linear(x, w, b).float() * 0.5, *layer(4096, 4096, 512)),
        "gated 4096x8192x2048": (gated, random(4096, 2048), random(2048, 8192), random(2048, 8192)),
        "gated by halves 8192x2048x1024": (gated_by_halves, random(8192, 1024), random(4096, 1024)),
        "LoRA 8192x4096x16": (lambda x, w, r: F.linear(x, w) * 2.0 + r, *layer(8192, 4096, 16)[:2], wide[2]),
        "int8 16x4096x4096": (dequantized, *quantized(16, 4096, 4096)),
        "int8 2048x4096x4096": (dequantized, *quantized(2048, 4096, 4096)),
        "scores 256 of 128x128x64": (scores, random(256, 128, 64), random(256, 128, 64)),
    }  # fmt: skip


MAX_AUTOTUNED = ("GELU 8192x3072x768", "gated 4096x8192x2048")


def epilogues(tiles: bool = False) -> None:
    """Matrix products with what is computed before and after: as PyTorch runs them, by torch.compile, by thunder with
    PyTorch's products, and in one kernel. tiles: of the latter, the times of other tiles, which the model predicts."""
    import time

    from thunder.executors import triton_fuser

    begin = time.perf_counter()
    for name, (program, *inputs) in programs_of_products().items():
        forced = thunder.jit(program, executors=[triton_fuser.TritonFuser("products", always=True)])
        chosen = thunder.jit(program)
        want, got = program(*[x.double() if x.is_floating_point() else x for x in inputs]), forced(*inputs)
        chosen(*inputs)
        scale = float(want.abs().max())
        far = [float((y.double() - want).abs().max()) / scale for y in (got, program(*inputs))]
        regions = [
            b.sym.fn for b in thunder.last_traces(forced)[-1].bound_symbols if b.sym.name.startswith("TritonProduct")
        ]
        is_fused = "TritonProduct" in str(thunder.last_traces(chosen)[-1])
        runs = {"eager": program, "thunder": chosen, "one kernel": forced}
        if not tiles:
            mode = "max-autotune-no-cudagraphs" if name in MAX_AUTOTUNED else None
            torch.compiler.reset()
            runs["torch.compile"] = torch.compile(program, dynamic=False, mode=mode)
        times = {n: graphed([functools.partial(run, *inputs)] * 8) for n, run in runs.items()}
        predicted = 1e6 * sum(r.seconds for r in regions)
        print(
            f"{name}: {', '.join(f'{n} {t:.1f}' for n, t in times.items())}; predicted {predicted:.1f}, chosen: "
            f"{'one kernel' if is_fused else 'two'}; deviations {far[0]:.1e} {far[1]:.1e} "
            f"({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        for region in regions if tiles else ():
            times_of_tiles(region, inputs)


def masks(length: int, heads: int) -> dict[str, tuple]:
    """By name, what changes the scores of an attention, and its mask."""
    document = torch.arange(length, device="cuda") * 7 // length
    slopes = 2.0 ** -(torch.arange(1, heads + 1, device="cuda") * 8 / heads)

    def causal(b, h, i, j):
        return i >= j

    return {
        "causal": (None, causal),
        "sliding": (None, lambda b, h, i, j: (i >= j) & (i - j < 512)),
        "ALiBi": (lambda s, b, h, i, j: s + slopes[h] * (j - i), causal),
        "soft cap": (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), causal),
        "prefix": (None, lambda b, h, i, j: (i >= j) | (j < 1024)),
        "document": (None, lambda b, h, i, j: (i >= j) & (document[i] == document[j])),
    }


def flex(batch: int = 4, heads: int = 16, length: int = 4096, width: int = 64, tiles: bool = False) -> None:
    """flex_attention with six masks, forward, and forward and backward, in milliseconds."""
    import time

    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    begin = time.perf_counter()
    inputs = [torch.randn(batch, heads, length, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for name, (change, visible) in masks(length, heads).items():
        block_mask = create_block_mask(visible, None, None, length, length, device="cuda")

        def attend(q, k, v, change=change, block_mask=block_mask):
            return flex_attention(q, k, v, change, block_mask)

        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        torch.compiler.reset()
        systems = {"thunder": thunder.jit(attend), "torch.compile": torch.compile(attend, dynamic=False)}
        rows, results = [], []
        for system, run in systems.items():

            def step(run=run):
                with torch.enable_grad():
                    out = run(*leaves)
                    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

            results.append(step())
            with torch.enable_grad():
                forward = median(lambda run=run: run(*leaves), 10)
            rows.append(f"{system} {forward:.3f} {median(step, 10):.3f}")
        far = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True)]
        is_fused = "TritonAttention" in str(thunder.last_traces(systems["thunder"])[-1])
        print(
            f"flex {width}, {name}: {', '.join(rows)}; one kernel: {is_fused}; apart "
            f"{' '.join(f'{x:.1e}' for x in far)} ({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )


def times_of_tiles(region, inputs) -> None:
    """The time of a region's kernel by tile."""
    from thunder.executors.triton_fuser import Variant
    from thunder.kernels import products, tiled

    strides = tuple(region.launches)[0]
    ((kernel, own),) = region.chosen(strides)[0].kernels
    known = products.candidates(kernel, region.machine)
    some = {tile: seconds for seconds, tile in known[:4]} | {own: kernel.seconds}
    best = min(some, key=some.__getitem__)
    some.setdefault(best._replace(stages=3), some[best])
    some.setdefault(best._replace(deep=max(16, best.deep // 2)), some[best])
    variants = []
    for tile in some:
        region._fastest[strides] = [tiled.Launch([(kernel, tile)])]
        variants.append((tile, Variant(region, strides, (True,) * len(strides))))
    arguments = in_order_of(region, inputs)
    for tile, variant in variants if arguments is not None else ():
        try:
            run = variant.launch().function(region.device, region.called())
            time = graphed([functools.partial(run, *arguments)] * 8)
        except RuntimeError as error:
            print(f"    {tuple(tile)[:5]}: {str(error)[:80]}")
            continue
        print(f"    {tuple(tile)[:5]}: {time:.1f}, predicted {1e6 * some[tile]:.1f}", flush=True)


def in_order_of(region, inputs) -> list | None:
    """The inputs of a program in the order of a region; None where it has others."""
    left, result = list(inputs), []
    for p in region.region.inputs:
        x = next((t for t in left if t.shape == p.shape and str(t.dtype).endswith(str(p.dtype.name))), None)
        if x is None:
            return None
        left = [t for t in left if t is not x]
        result.append(x)
    return result


if __name__ == "__main__":
    with torch.no_grad():
        for name, measure in (
            ("attention", attention),
            ("loss", loss),
            ("padding", padding),
            ("float8", float8),
            ("rows", few),
            ("norms", norms),
            ("epilogues", epilogues),
            ("flex", flex),
            ("tiles", functools.partial(epilogues, tiles=True)),
        ):
            if name in sys.argv[1:] or not sys.argv[1:]:
                measure()
