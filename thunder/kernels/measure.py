"""Measures a `Machine` once: a program in C++ that runs for less than half a second, and some of PyTorch's kernels. The
figures are kept on disk, so that all processes schedule alike."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder.kernels import cpp
from thunder.kernels.machine import Machine
from thunder.runtime import disk_cache

VERSION = 10  # of what is measured
MEASURED_WINDOW = 9  # elements of the windows of the class "pool"
_PROBE = r"""
#include <time.h>
#include <string.h>
// of one thread, but for the launch
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
template<class F> static double best(F f, double limit) {
  double least = 1e9, begin = now();
  int count = 0;
  do { double t = now(); f(); t = now() - t; if (t < least) least = t; } while (++count < 9 || now() - begin < limit);
  return least;
}
template<class T, class F> static double rate(T* p, long n, F f) {
  return best([&] { for (long i = 0; i < n; i += L) store<T>(p + i, f(load<T>(p + i))); }, 0.02) / n;
}
extern "C" void probe(char* memory, long bytes, int threads, double* out) {
  const long n = 4096;
  float* f = (float*)memory; double* d = (double*)memory; i64* k = (i64*)memory;
  for (long i = 0; i < n; ++i) f[i] = 0.5f + i / 8192.f;
  double copy = rate<float>(f, n, [](V<float> x) { return x * 1.0001f; });
  auto simple = [](auto x) { for (int i = 0; i < 16; ++i) x = x * 0.9f + 0.0625f; return x; };
  double many = rate<float>(f, n, simple);
  out[0] = (many - copy) / 31 > 1e-12 ? (many - copy) / 31 : 1e-12;
  out[1] = rate<float>(f, n, [](V<float> x) { return 1.0f / x; });
  out[2] = rate<float>(f, n, [](V<float> x) { return exp_(x * -0.01f); });
  for (long i = 0; i < n; ++i) d[i] = 0.5 + i / 8192.;
  double doubled = rate<double>(d, n, [](V<double> x) { for (int i = 0; i < 16; ++i) x = x * 0.9 + 0.0625; return x; });
  out[3] = doubled / many;
  for (long i = 0; i < n; ++i) k[i] = i * 77;
  out[4] = rate<i64>(k, n, [](V<i64> x) { return x / 37; });
  volatile float sink;
  auto sum = [&](float* p, long m) {
    V<float> a{}, b{};
    for (long i = 0; i + 2 * L <= m; i += 2 * L) { a += load<float>(p + i); b += load<float>(p + i + L); }
    a += b; sink = a[0];
  };
  memset(memory, 0, bytes);
  long near = (1 << 17) / 4, far = bytes / 4;
  out[5] = best([&] { sum(f, near); }, 0.02) / (near * 4);
  out[6] = best([&] { sum(f, far); }, 0.06) / (far * 4);
  out[7] = best([&] {
    V<float> a{};
    for (long i = 0; i < n; i += L) a += strided<float>(f + i, 7, L);
    sink = a[0];
  }, 0.02) / n;
  out[8] = best([&] {
    #pragma omp parallel num_threads(threads)
    { asm volatile("" ::: "memory"); }
  }, 0.1);
}
"""


def measure() -> Machine:
    """Measures this machine's CPU, with as many threads as PyTorch has. Raises RuntimeError without a compiler."""
    library = cpp.compiled(cpp.PRELUDE + _PROBE)
    memory = torch.zeros(1 << 26, dtype=torch.uint8)
    out = (ctypes.c_double * 16)()
    library.probe(
        ctypes.c_void_p(memory.data_ptr()), ctypes.c_long(memory.numel()), ctypes.c_int(torch.get_num_threads()), out
    )
    call, view = _call(), _view()
    eager, eager_calls = _eager()
    simple, divide, exp, double, integer, near, far, gather, launch = out[:9]
    return Machine(
        {"simple": simple, "divide": divide, "exp": exp, "integer divide": integer},
        {"L2": near, "memory": far}, gather, double, min(launch, 10 * call), call, view, _caches(), cpp.lanes(), eager,
        eager_calls,
    )  # fmt: skip


def _call() -> float:
    """Of a PyTorch operation on a small tensor: the mean of an addition, a sum and a conversion."""
    x = torch.ones(4, 4)
    return _least([lambda: torch.add(x, x), lambda: torch.sum(x, 0), lambda: x.to(torch.float64)], 50) / 3


def _view() -> float:
    """Of a view of a tensor: the mean of a transposition and a view."""
    x = torch.ones(4, 4)
    return _least([lambda: x.transpose(0, 1), lambda: x.view(2, 8)], 50) / 2


def _least(functions: Sequence[Callable], count: int) -> float:
    times = []
    with torch.no_grad():
        for _ in range(count):
            start = time.perf_counter()
            for function in functions:
                function()
            times.append(time.perf_counter() - start)
    return min(times)


# the others take about as long as the class "function"; these, a fifth of it to twice as long
FUNCTIONS_OF_THEIR_OWN = ("exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "rsqrt")


def _eager() -> tuple[dict[str, float], dict[str, float]]:
    """Seconds for an element of PyTorch's kernels, and for a call beside its elements, on tensors that are too small
    for several threads. By class of operations, or by the name of one that takes longer than its class."""
    rates, calls, own = {}, {}, torch.Generator().manual_seed(0)  # the program's generator stays as it is
    for suffix, kind in (("", torch.float32), ("16", torch.bfloat16)):
        small, large = (torch.rand(n, 128, generator=own).to(kind) for n in (8, 136))
        for name, function in _operations(large).items():
            times = [_least([functools.partial(function, x)], 25) for x in (small, large)]
            rate = rates[name + suffix] = max(times[1] - times[0], 1e-9) / (large.numel() - small.numel())
            calls[name + suffix] = max(times[0] - rate * small.numel(), 1e-9)
    return rates, calls


def _operations(table: torch.Tensor) -> dict[str, Callable[[torch.Tensor], object]]:
    """Operations of PyTorch on matrices of as many columns as a matrix has, and at most as many rows."""
    numbers, aten, (rows, columns) = torch.arange(len(table)), torch.ops.aten, table.shape
    weight, statistics = table[0], {n: table[:n, :1].contiguous() for n in range(1, rows + 1)}
    return {
        "map": lambda x: x + x,
        "function": torch.sin,
        "rows": lambda x: x.sum(-1),
        "columns": lambda x: x.amax(0),
        "scan": lambda x: x.cumsum(-1),
        "softmax": lambda x: torch.softmax(x, -1),
        "index_add": lambda x: torch.zeros_like(x).index_add(0, numbers[: len(x)], x),
        "index_backward": lambda x: torch.zeros_like(x).index_put((numbers[: len(x)],), x, accumulate=True),
        "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, numbers[:columns].expand_as(x), x),
        "pool": lambda x: torch.nn.functional.avg_pool2d(x[None], 3, 1, 1),
        "cat": lambda x: torch.cat([x[:, : columns // 2], x[:, columns // 2 :]], 1),
        "embedding": lambda x: torch.nn.functional.embedding(numbers[: len(x)], table),
        "native_layer_norm": lambda x: torch.native_layer_norm(x, [columns], weight, weight, 1e-5),
        "native_layer_norm_backward": lambda x: aten.native_layer_norm_backward.default(
            x, x, [columns], statistics[len(x)], statistics[len(x)], weight, weight, [True] * 3
        ),
        "gelu_backward": lambda x: aten.gelu_backward.default(x, x),
        "silu_backward": lambda x: aten.silu_backward.default(x, x),
        **{name: getattr(torch, name) for name in FUNCTIONS_OF_THEIR_OWN},
        **{name: getattr(torch.nn.functional, name) for name in ("gelu", "silu", "softplus")},
    }


def _caches() -> tuple[int, int]:
    names = ("SC_LEVEL1_DCACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
    sizes = [os.sysconf(n) if n in getattr(os, "sysconf_names", {}) else 0 for n in names]
    return (sizes[0] or 1 << 15, sizes[1] or 1 << 20)


_lock = threading.Lock()


def machine() -> Machine:
    """This machine, from the disk where it was measured before: the same in each process, so that all schedule alike.
    Raises RuntimeError without a compiler."""
    with _lock:
        return _machine(torch.get_num_threads())


@functools.cache
def _machine(threads: int) -> Machine:
    key = disk_cache.key_of("machine", VERSION, _PROBE, cpp.PRELUDE, cpp.processor(), threads)
    known = disk_cache.load(key)
    if known is not None:
        return _of_json(json.loads(known[1].read_bytes()))
    result = measure()
    disk_cache.store(key, {}, json.dumps(dataclasses.asdict(result)).encode())
    return result


def _of_json(said: dict[str, Any]) -> Machine:
    return Machine(**said | {"caches": tuple(said["caches"])})
