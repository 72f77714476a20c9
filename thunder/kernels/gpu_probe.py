"""Measures a `Gpu` once: three kernels that run for some milliseconds. The figures are kept on disk for each kind of
device, so that all processes schedule alike."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from thunder.kernels.machine import Gpu, planned_gpu
from thunder.runtime import disk_cache

VERSION = 4  # of what is measured
LANES = 128  # of a multiprocessor, at most
CLOCK = 2_000_000  # kilohertz, where the device does not tell
WARPS = 16  # of a multiprocessor, which hide the time of an instruction
_lock = threading.Lock()


@triton.jit
def _multiply(memory, steps, block: tl.constexpr):
    """A chain of multiplications and additions for each element."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(memory + i)
    for _ in range(steps):
        x = x * 0.99 + 0.01
    tl.store(memory + i, x)


@triton.jit
def _copy(source, target, count, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(target + i, tl.load(source + i, mask=i < count) + 1.0, mask=i < count)


@triton.jit
def _product(
    a, b, out, size: tl.constexpr, first: tl.constexpr, second: tl.constexpr, deep: tl.constexpr, group: tl.constexpr
):
    """The product of a square matrix and a transposed one, as kernels of products compute it."""
    number, wide = tl.program_id(0), group * (size // second)
    x = (number // wide * group + number % wide % group) * first + tl.arange(0, first)[:, None]
    r = number % wide // group * second + tl.arange(0, second)[None, :]
    total = tl.zeros([first, second], tl.float32)
    for start in range(0, size, deep):
        ka, kb = start + tl.arange(0, deep)[None, :], start + tl.arange(0, deep)[:, None]
        total = tl.dot(tl.load(a + (x * size + ka)), tl.load(b + (r * size + kb)), total)
    tl.store(out + (x * size + r), total.to(tl.bfloat16))


def measured_gpu(device: torch.device) -> Gpu:
    """The GPU, from the disk where one of its kind was measured before. `planned_gpu()` while a graph is recorded,
    where memory is short, and for programs that are planned where there is no GPU."""
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return planned_gpu()
    with _lock:
        try:
            return _measured(device.index if device.index is not None else torch.cuda.current_device())
        except torch.OutOfMemoryError:
            return planned_gpu()


@functools.cache
def _measured(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    key = disk_cache.key_of("gpu", VERSION, properties.name, properties.multi_processor_count, triton.__version__)
    known = disk_cache.load(key)
    if known is not None:
        return Gpu(**json.loads(known[1].read_bytes()))
    with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):
        result = _measure(properties)
    disk_cache.store(key, {}, json.dumps(dataclasses.asdict(result)).encode())
    return result


def _measure(properties: Any) -> Gpu:
    """Measures the GPU: seconds for an instruction, a launch, a byte of L2 and of memory, and a product's step."""
    processors, block = properties.multi_processor_count, 1024
    programs, cache = processors * 64, properties.L2_cache_size
    chain = torch.ones(programs * block, device="cuda")

    def multiply(steps: int) -> Callable[[], None]:
        return lambda: _multiply[(programs,)](chain, steps, block, num_warps=4)

    longer, shorter = _seconds(multiply(1024)), _seconds(multiply(512))
    instruction = _of_difference(longer, shorter, 512 * programs * block, properties)
    launch = _seconds(lambda: _multiply[(1,)](chain, 0, block, num_warps=4))

    def byte(size: int) -> float:
        source, target = torch.ones(size // 8, device="cuda"), torch.empty(size // 8, device="cuda")
        count = source.numel()
        run = functools.partial(_copy[(-(-count // block),)], source, target, count, block, num_warps=4)
        seconds = _seconds(run)
        return max(seconds - launch, seconds / 2) / (8 * count)

    bytes_of = {"L2": _rounded(byte(cache // 2)), "memory": _rounded(byte(3 * cache))}
    multiply, dot = _products()
    return Gpu(
        processors, WARPS, _rounded(instruction), bytes_of, _rounded(launch), cache * 2 // 3, multiply, dot,
        _rounded(max(_seconds(_sum_of_two(256)) - launch, launch) / (3 * 256**3)),
    )  # fmt: skip


def _of_difference(longer: float, shorter: float, count: int, properties: Any) -> float:
    """Seconds of an instruction, of so many by which two runs differ: no less than all lanes take. Others on the device
    may have delayed the shorter run."""
    peak = properties.multi_processor_count * LANES * 1e3 * getattr(properties, "clock_rate", CLOCK)
    return max(1.0 / peak, (longer - shorter) / count)


def _sum_of_two(size: int) -> Callable[[], None]:
    """A sum whose operands are each repeated along one of three dimensions, of `size` elements each."""
    a, b = (torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in ((size, size, 1), (size, 1, size)))
    out = torch.empty(size, size, size, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.add(a, b, out=out)  # type: ignore[return-value]


def _products(size: int = 4096) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a multiplication and addition in PyTorch's products and in ours, by type: measured in bfloat16; those
    of other types are to these as on the planned GPU."""
    a, b, out = (torch.ones(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    runs = (
        lambda: torch.mm(a, b.t(), out=out),
        lambda: _product[(size // 128 * (size // 256),)](a, b, out, size, 128, 256, 64, 8, num_warps=8, num_stages=3),
    )
    planned = planned_gpu()
    rates = []
    for run, known in zip(runs, (planned.multiply, planned.dot), strict=True):
        seconds = _seconds(run) / size**3
        rates.append({kind: _rounded(n / known["bfloat16"] * seconds) for kind, n in known.items()})
    return rates[0], rates[1]


def _rounded(seconds: float) -> float:
    """Two digits: most of what differs between measurements of one device does not change schedules."""
    return float(f"{seconds:.1e}")


def _seconds(run: Callable[[], Any], count: int = 20) -> float:
    """The least time of a launch among a graph's, which no host delays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            run()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / count)
    return min(times)
