"""The executor triton_fuser: schedules of tiles and their kernels under Triton's interpreter, beside PyTorch's operations."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.kernels.programs import gradient_of_largest, random_program
from thunder.core.regions import Region
from thunder.executors import triton_fuser
from thunder.executors.triton_fuser import TileRegion, TritonFuser
from thunder.executors.triton_kernels.binary import Request
from thunder.executors.triton_kernels.launcher import POINTERS
from thunder.kernels import ir, lower, tiled, tiles, triton_cuda
from thunder.kernels.index import Part, opened, strides_of
from thunder.kernels.machine import planned_gpu
from thunder.kernels.numbers import Scalar
from thunder.kernels.schedule import elements
from thunder.ops.torch_types import to_torch_dtype

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
triton = pytest.importorskip("triton", reason="kernels need Triton")
# NumPy, which the interpreter computes with, warns of what makes infinities and nan
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
ROOT = str(Path(thunder.__file__).parent.parent)
# a GPU on which everything is split: so many multiprocessors that small programs leave them idle, and free launches
EAGER_TO_SPLIT = dataclasses.replace(planned_gpu(), multiprocessors=1 << 14, launch=1e-12)
# one with free memory, so that all that several kernels compute is stored
EAGER_TO_STORE = dataclasses.replace(planned_gpu(), byte={"L2": 1e-17, "memory": 1e-17}, launch=1e-12)

# one with slow memory, so that kernels of rows add up columns, several tiles in each program
EAGER_TO_CARRY = dataclasses.replace(
    planned_gpu(), multiprocessors=1, byte={"L2": 1e-9, "memory": 1e-9}, launch=1e-9, most_warps=4
)


@pytest.fixture
def interpreted(monkeypatch, triton_interpreter):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["whole rows", "loops and ranges", "stored values", "column sums"])
def schedules(request, monkeypatch):
    """Schedules for small tensors, and those that larger ones have."""
    if request.param == "loops and ranges":
        monkeypatch.setattr(triton_fuser, "planned_gpu", lambda: EAGER_TO_SPLIT)
        monkeypatch.setattr(tiles, "WIDEST", 64)
    if request.param == "stored values":
        monkeypatch.setattr(triton_fuser, "planned_gpu", lambda: EAGER_TO_STORE)
    if request.param == "column sums":
        monkeypatch.setattr(triton_fuser, "planned_gpu", lambda: EAGER_TO_CARRY)
        monkeypatch.setattr(tiled, "LARGE", 1)


def regions_of(compiled) -> list[TileRegion]:
    traces = [*thunder.last_traces(compiled)[-1:], *thunder.last_backward_traces(compiled)[-1:]]
    return [b.sym.fn for t in traces for b in t.bound_symbols if isinstance(b.sym.fn, TileRegion)]


def check(f, inputs, tolerance: float) -> list[TileRegion]:
    """Results of fused kernels, within a bound of eager's; strides are eager's."""
    compiled = thunder.jit(f, executors=[TritonFuser("tiles", always=True)])
    results, expected = compiled(*inputs), f(*inputs)
    regions = regions_of(compiled)
    for region in regions:
        ir.verify(region.program)
        for launch in region.scheduled(region._shown)[0]:
            check_offsets(launch)
    for result, want in zip(results, expected, strict=True):
        assert result.dtype is want.dtype and result.shape == want.shape and result.stride() == want.stride()
        if want.is_floating_point() and tolerance:
            torch.testing.assert_close(result, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(result, want)
    return regions


def check_offsets(launch: tiled.Launch) -> None:
    """What is read is inside of its buffer wherever it is read: in all of the loops, or in the range of a piece of a
    concatenation."""
    for kernel, _ in launch.kernels:
        grid = dict(zip(kernel.loops, np.indices([v.size for v in kernel.loops], sparse=True), strict=True))
        stack = [(n, ()) for n in (*kernel.rows.values(), *(w.value for w in kernel.writes))]
        seen = set(stack)
        while stack:
            n, guards = stack.pop()
            below = [(a, guards) for a in n.args if n.op not in ir.BINDERS]
            if n.op == "load":
                for value in (0, -1):  # the least and the largest of what indices may be that are read
                    at = grid | {v: np.asarray(range(v.size)[value]) for v in n.what[2]}
                    inside = [index_at(along, at) for along, _, _ in guards]
                    reached = [(i >= low) & (i < high) for i, (_, low, high) in zip(inside, guards, strict=True)]
                    for i, size in zip(n.what[1], n.what[0].shape, strict=True):
                        places = index_at(opened(i), at)
                        outside = functools.reduce(np.logical_and, reached, (places < 0) | (places >= size))
                        assert not outside.any(), f"{ir.line(n)} reads outside of its buffer"
            elif n.op == "concat":
                along, starts, end = n.what
                ranges = zip(n.args, starts, (*starts[1:], end), strict=True)
                below = [(piece, (*guards, (along, low, high))) for piece, low, high in ranges]
            stack += [b for b in below if b not in seen]
            seen.update(below)


def index_at(index, at) -> np.ndarray:
    """An index at numbers for its variables."""
    total = np.asarray(index.constant)
    for atom, factor in index.terms.items():
        if isinstance(atom, Part):
            inner = index_at(atom.index, at)
            inner = inner if atom.remainder is None else inner % atom.by if atom.remainder else inner // atom.by
            total = total + factor * inner
        else:
            total = total + factor * at[atom]
    return total


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed, interpreted, schedules):
    f, inputs = random_program(seed, torch.float64, special=seed % 4 == 3)
    check(f, inputs, 1e-9)


def test_a_reduction_of_a_rotation(interpreted):
    """It is read at all columns, though each piece of the rotation reads some of them."""

    def f(x):
        y = x.roll(1, 1)
        return (y - y.amax(0, keepdim=True),)

    check(f, [torch.randn(40, 5)], 1e-6)


def test_the_sum_of_an_expanded_tensor(interpreted):
    """Each of its elements counts as often as it is read."""
    for x in (torch.randn(1, 3).expand(8, 3), torch.randn(5, 1).expand(5, 4)):
        check(lambda x: ((x * 2).sum(0), (x * 2).sum(1)), [x], 1e-6)


@pytest.mark.parametrize("seed", range(200, 203))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_random_programs_of_integers(seed, dtype, interpreted):
    f, inputs = random_program(seed, dtype)
    check(f, inputs, 0.0)


@pytest.mark.parametrize("seed", range(300, 304))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_as_near_to_float64_as_eager(seed, dtype, interpreted):
    f, inputs = random_program(seed, dtype)
    exact_results = random_program(seed, torch.float64)[0](*[x.double() for x in inputs])
    compiled = thunder.jit(f, executors=[TritonFuser("tiles", always=True)])
    for result, want, exact in zip(compiled(*inputs), f(*inputs), exact_results, strict=True):
        if not want.is_floating_point() or not exact.isfinite().all():
            continue
        scale = exact.abs().max() + 1e-30
        ours, eager = ((r.double() - exact).abs().max() / scale for r in (result, want))
        assert ours <= 2 * eager + 8 * torch.finfo(dtype).eps, (ours, eager)


def test_the_gradient_of_the_largest_of_rounded_values(interpreted):
    got = gradient_of_largest(lambda f: thunder.jit(f, executors=["triton_fuser"]), torch.bfloat16)
    torch.testing.assert_close(got, gradient_of_largest(None, torch.bfloat16), rtol=0.02, atol=0.01)


class Block(torch.nn.Module):
    """Norms, a softmax, a rotation and a projection."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(24), torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)

    def forward(self, x):
        scores = torch.softmax((x @ x.transpose(1, 2)) * 0.3, -1)
        x = x + scores @ torch.cat([x[..., 12:].sin(), -x[..., :12]], -1)
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.sweep(2)
def test_a_block_forward_and_backward(interpreted, schedules):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 7, 24)
    compiled = thunder.jit(model, executors=[TritonFuser("tiles", always=True)])
    results = []
    for f in (model, compiled):
        y = x.clone().requires_grad_()
        out = f(y)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [y, *model.parameters()])])
    assert len(regions_of(compiled)) >= 2
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_reduction_of_padded_rows(interpreted):
    """The bounds of an index in a piece hold there alone."""

    def f(g, x, y):
        z = (F.pad(g, (0, 0, 1, 0)) + x * 2) * y
        return (z - y * z.sum(1, True),)

    check(f, [torch.randn(7, 33), torch.randn(8, 33), torch.randn(8, 33)], 1e-5)


def test_the_loss_of_a_class_reads_one_logit(interpreted):
    """The logarithms of the softmax are computed where they are needed, and are no memory."""
    labels = torch.tensor([3, 39, 0, -100, 7])

    def f(x):
        return F.cross_entropy(x, labels, reduction="none"), torch.log_softmax(x, -1).gather(1, labels[:3, None]).sin()

    (region,) = check(f, [torch.randn(5, 40)], 1e-5)
    assert all(math.prod(s.buffer.shape) <= 5 for s in region.program.stores)


def test_values_at_more_indices_than_they_have_are_stored(interpreted):
    at = torch.randint(0, 12, (30,))
    (region,) = check(lambda x: (torch.sin(x * 2)[at] + 1,), [torch.randn(12)], 1e-5)
    assert [s.buffer.kind for s in region.program.stores] == ["scratch", "output"]


def test_a_sum_of_one_element_is_no_sum(interpreted):
    i = torch.tensor([0, 9, -1, 3, 12])

    def f(y, m):
        is_there = (torch.arange(12) == i[:, None]) & m[:, None]
        return torch.where(is_there, y[:, None], 0.0).sum(1), torch.where(is_there, y[:, None], 1.0).sum(1)

    (region,) = check(f, [torch.randn(5), torch.tensor([True, True, True, False, True])], 1e-6)
    assert [s.value.depth for s in region.program.stores if s.buffer.kind == "output"] == [0, 1]


def test_sums_over_rows_and_columns_share_what_they_read(interpreted):
    def f(x, w):
        y = torch.softmax(F.gelu(x) * w, -1)
        return y, (x + 1).sum(0), y.sum(0), x.amax(-1)

    (region,) = check(f, [torch.randn(32, 48), torch.randn(48)], 1e-4)
    launches, _ = region.scheduled(region._shown)
    assert [[len(k.rows) for k, _ in launch.kernels] for launch in launches] == [[3], [2]]


def test_a_softmax_over_columns_is_one_kernel(interpreted):
    (region,) = check(lambda x: (torch.softmax(x * 2, 0),), [torch.randn(40, 24)], 1e-5)
    assert region.kernels == 1


def test_a_reduction_is_computed_once_wherever_it_is_read(interpreted):
    """Also at an index that is another one behind: what is outside of a piece is not read."""

    def f(x):
        y = x - x.amax(0)
        return y, torch.cat([y[:, 12:], -y[:, :12]], 1), F.pad(y[:, 1:], (0, 1))

    (region,) = check(f, [torch.randn(20, 24)], 0.0)
    kernels = [k for launch in region.scheduled(region._shown)[0] for k, _ in launch.kernels]
    assert sum(len(k.rows) for k in kernels) == 1


def schedule_of(f, *inputs) -> list[tiled.Launch]:
    """The launches for a function's operations as one region, for an H200."""
    compiled = thunder.jit(f)
    compiled(*inputs)
    trace = thunder.last_traces(compiled)[0]
    region = Region([b for b in trace.bound_symbols if b.outputs], set(trace.output_proxies))
    program = lower.lowered(region)
    by_name = dict(zip((p.name for p in trace.args), inputs, strict=True))
    strides = {b: by_name[p.name].stride() for b, p in zip(program.inputs, region.inputs, strict=True)}
    return tiled.scheduled(
        program, strides | {s.buffer: strides_of(s.buffer.shape) for s in program.stores}, planned_gpu()
    )


def test_a_long_sum_is_split():
    launches = schedule_of(lambda x: x.sum(), torch.randn(1 << 22))
    (first,), (second,) = (launch.kernels for launch in launches)
    assert first[0].loops[0].size >= 128 and second[0].sweep[0].size == first[0].loops[0].size


def test_a_thread_reads_neighbours_and_what_they_share_once():
    """Of an image in rows: their index, and what is read by channel, once for 8 elements."""

    def f(x, scale):
        return (x * scale[:, None, None]).relu()

    image, channels = torch.randn(32, 64, 28, 28, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    ((kernel, tile),) = schedule_of(f, image, channels)[0].kernels
    assert (elements(kernel.sweep), tile.second, tile.first * 8) == (8, 8, 32 * tile.warps * 8)
    (by_channel,) = [n for n in kernel.loads if n.what[0].shape == (64,)]
    assert by_channel.axes.isdisjoint(kernel.sweep)
    ((kernel, tile),) = schedule_of(f, image.float(), channels.float())[0].kernels
    assert tile.second == 4, "16 bytes"
    ((kernel, tile),) = schedule_of(f, torch.randn(32, 64, 7, 7), torch.randn(64))[0].kernels
    assert tile.second == 0, "49 elements are no vectors"


def test_a_sum_that_is_read_at_several_indices_is_split_once():
    """All channels of a group read the sum of the group."""

    def f(x):
        y = x.view(2, 4, -1).sum(-1)
        return y, x - y.view(2, 4, 1, 1).expand(2, 4, 8, 1).reshape(2, 32, 1, 1)

    launches = schedule_of(f, torch.randn(2, 32, 128, 128))
    sums = [body for launch in launches for k, _ in launch.kernels for body in k.rows.values()]
    assert len(sums) == 2, "one in ranges, and one of these"


def test_a_variance_reads_its_elements_once():
    """Of each range its mean and the squares of what is apart from this; then those of the ranges."""
    launches = schedule_of(lambda x: x.var((0, 2, 3), unbiased=False), torch.randn(64, 32, 56, 56))
    input_kernels = [
        k for launch in launches for k, _ in launch.kernels if any(n.what[0].kind == "input" for n in k.loads)
    ]
    assert [len(k.rows) for k in input_kernels] == [2]


def test_a_softmax_of_long_rows_reads_them_once_for_what_they_are_divided_by():
    launches = schedule_of(lambda x: x.logsumexp(-1), torch.randn(16, 1 << 18))
    input_kernels = [
        k for launch in launches for k, _ in launch.kernels if any(n.what[0].kind == "input" for n in k.loads)
    ]
    assert [len(k.rows) for k in input_kernels] == [2]


@pytest.mark.parametrize("schedules", ["loops and ranges"], indirect=True)
def test_reductions_that_depend_on_each_other_in_ranges(schedules, interpreted):
    """Variances of numbers far from 0; softmax of rows in which ranges, or all, are -inf, inf or nan."""
    x = torch.randn(3, 8192) + torch.tensor([[0.0], [1000.0], [-300.0]])

    def spread(x):
        variance, mean = torch.var_mean(x, -1, unbiased=False)
        return variance, mean, F.layer_norm(x, (x.shape[-1],))

    compiled = thunder.jit(spread, executors=[TritonFuser("ranges", always=True)])
    for result, eager, exact in zip(compiled(x), spread(x), spread(x.double()), strict=True):
        bound = 1.5 * (eager - exact).abs().max() + 1e-6 * max(1.0, float(exact.abs().max()))
        assert (result - exact).abs().max() <= bound, "a mean of squares less a square of the mean is off by 0.1"
    inf = float("inf")
    rows = torch.randn(7, 8192)
    rows[0, :5000] = -inf
    rows[1] = -inf
    rows[2, 17] = inf
    rows[3, 6000] = float("nan")
    rows[4, 100] = 1e4
    rows[5] *= 50
    (region,) = check(lambda x: (x.logsumexp(-1), torch.softmax(x, -1)), [rows], 1e-6)
    kernels = [k for launch in region.scheduled(region._shown)[0] for k, _ in launch.kernels]
    assert any(len(k.rows) == 2 and elements(k.sweep) < 8192 for k in kernels)


def test_what_a_batch_norm_reads_by_channel_is_no_row_of_memory():
    """A kernel of the sums of channels also computes what reads them."""

    def f(x, g, mean):
        centered = x - mean[:, None, None]
        return g - (g * centered).sum((0, 2, 3))[:, None, None] * centered

    ((kernel, _),) = schedule_of(f, torch.randn(32, 512, 14, 14), torch.randn(32, 512, 14, 14), torch.randn(512))[
        0
    ].kernels
    assert len(kernel.rows) == 1 and len(kernel.writes) == 1


def test_a_transpose_has_tiles_of_two_dimensions():
    ((kernel, tile),) = schedule_of(lambda x: x.t().contiguous() * 2, torch.randn(1024, 2048))[0].kernels
    assert tile.first >= 32 and tile.second >= 32 and not kernel.rows


def test_pieces_that_take_long_are_kernels_of_their_own():
    def f(x):
        return torch.cat([x.double().sin(), x.double().cos(), x.double()], 1)

    (launch,) = schedule_of(f, torch.randn(256, 64))
    assert [elements(k.loops) for k, _ in launch.kernels] == [256 * 64] * 3


def test_a_value_that_takes_long_is_stored_for_later_kernels():
    def f(x):
        y = torch.sin(torch.sin(torch.sin(x)))
        return (y - y.mean(0)).sum(1), y.cos()

    launches = schedule_of(f, torch.randn(1000, 700))
    kernels = [k for launch in launches for k, _ in launch.kernels]
    sines = [sum(n.op == "sin" for n in tiles.nodes_of(k)) for k in kernels]
    assert sines == [3, 0]


def test_a_result_that_repeats_a_value_is_not_read_in_its_place():
    def f(bias, x):
        y = torch.sin(torch.sin(torch.sin(bias)))
        return y[None].expand(50, 700) * 1.0, (x * y).sum(0)

    kernels = [k for launch in schedule_of(f, torch.randn(700), torch.randn(3000, 700)) for k, _ in launch.kernels]
    for kernel in kernels:
        assert all(ir.variables_of(index) <= set(kernel.loops) for index in kernel.loads.values())


def test_a_reduction_of_a_group_is_computed_once_for_its_members():
    x = torch.randn(4, 24, 8, 8)
    launches = schedule_of(lambda x: (F.group_norm(x, 4),), x)
    kernels = [k for launch in launches for k, _ in launch.kernels if k.rows]
    assert [math.prod(v.size for v in k.loops) for k in kernels] == [x.numel()]


def test_independent_kernels_share_a_launch():
    launches = schedule_of(lambda x, y: (x.sin() + 1, y.cos() * 2), torch.randn(64, 64), torch.randn(3000))
    assert [len(launch.kernels) for launch in launches] == [2]


def requests(launches: list[tiled.Launch], wide: bool = False) -> list[Request]:
    result = []
    for e in (triton_cuda.emitted(launch, False, wide) for launch in launches):
        pointers = [(f"*{POINTERS[to_torch_dtype(b.dtype)]}", True) for b in e.buffers]
        size = "i64" if wide else "i32"
        numbers = [("fp64" if isinstance(n, Scalar) else size, False) for n in e.numbers]
        result.append(Request(e.name, e.text, (*pointers, *numbers), e.warps, 90))
    return result


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from thunder.core.codegen import compile_source
from thunder.executors.triton_kernels.compiling import Request
target = GPUTarget(*eval(sys.argv[1]))
for request in eval(sys.stdin.read()):
    if target.backend == "cuda":
        _, code = request.compile()
    else:
        function = compile_source(request.text, request.name, {"__name__": "kernels"})
        signature = {name: kind for name, (kind, _) in zip(function.arg_names, request.arguments)}
        made = triton.compile(ASTSource(function, signature, {}, {}), target, {"num_warps": request.warps})
        code = made.asm["hsaco"]
    print(request.name, len(code) > 1000)
"""


def compiled_lines(those: list[Request], target: tuple) -> list[str]:
    """What `SCRIPT` prints of each."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, repr(target)], env=environment, input=repr(those),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def scatters(x, w, i):
    sums = (x * 2).index_add(0, i, x.sin()), x.bfloat16().index_add(0, i, x.bfloat16()), i.index_add(0, i, i * 2)
    return *sums, x.double().index_add(0, i, x.double()), x.bfloat16().scatter(1, i[:, None], 3) * w


def norms_and_moves(x, w):
    y = F.layer_norm(F.gelu(x), (96,), w)
    return y, torch.softmax(x, 0), x[:, 1:].t().contiguous(), torch.cat([x.sin(), x > 0], 1).bfloat16()


def scans(x, w):
    long = x.reshape(2, -1).repeat(1, 8)
    both = torch.softmax(x.cumsum(1), 1) + x.flip(1).cumsum(1).flip(1)
    extremes = *torch.cummax(x, 1), torch.logcumsumexp(x.double(), 0), torch.logcumsumexp(long, 1)
    sums = torch.softmax(long.cumsum(1), 1), (x > 0).cumsum(0) * 2
    return both * w, (x.bfloat16() + 1).cumprod(0) * 2, *sums, *extremes


def functions_of_libraries(x, w):
    y = x.double()
    return (
        torch.atan2(x.tan(), w.sinh()) + torch.fmod(x.lgamma(), w) + x.erfc().round() + x.abs() ** 1.5 + x.erfinv(),
        torch.hypot(y.acos(), y.atanh()) + y.expm1() + y.log1p() + y.tanh() ** 0.3 + y.digamma() + y.acosh(),
        torch.copysign(y.cosh(), y.asinh()).signbit(),
        (x * 3).long().expand(7, *x.shape).prod(0) * 2,
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("f", [norms_and_moves, scatters, scans, functions_of_libraries])
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_kernels_compile_without_a_gpu(target, f):
    inputs = torch.randn(64, 96), torch.randn(96), torch.arange(64)
    compiles(schedule_of(f, *inputs[: f.__code__.co_argcount]), target)


def compiles(launches: list[tiled.Launch], target: tuple) -> None:
    lines = compiled_lines(requests(launches), target)
    assert [line.endswith(" True") for line in lines] == [True] * len(launches)


def test_a_value_that_is_read_in_two_orders_is_computed_once():
    def f(x):
        y = torch.tanh(torch.sin(torch.cos(x)))
        return (y + y.flip(1),)

    kernels = [k for launch in schedule_of(f, torch.randn(4096, 700)) for k, _ in launch.kernels]
    assert [sum(n.op == "sin" for n in tiles.nodes_of(k)) for k in kernels] == [1, 0]
    kernels = [k for launch in schedule_of(f, torch.randn(16, 32)) for k, _ in launch.kernels]
    assert [sum(n.op == "sin" for n in tiles.nodes_of(k)) for k in kernels] == [2]  # another launch takes longer


def test_what_reads_a_long_reduction_over_columns_need_not_read_in_its_order():
    launches = schedule_of(lambda x: (x - x.amax(0, keepdim=True),), torch.randn(8192, 4099))
    *_, last = [k for launch in launches for k, _ in launch.kernels]
    assert not last.rows and [v.size for v in last.loops] == [8192, 4099]


def test_kernels_are_shown(interpreted):
    compiled = thunder.jit(lambda x: torch.softmax(x * 2, -1) + x, executors=["triton_fuser"])
    compiled(torch.randn(16, 32))
    ((name, text),) = thunder.last_kernels(compiled).items()
    assert name == "TritonFusion0"
    assert "amax over r1_0:32 of" in text  # the IR
    assert "kernel over [l0:16] [l1:32]" in text and "us predicted" in text  # the schedule
    assert "def kernel_0(program, b0, b1):" in text  # the source


def test_an_index_out_of_bounds_raises(interpreted):
    compiled = thunder.jit(lambda x, i: x[i] * 2 + 1, executors=[TritonFuser("tiles", always=True)])
    x = torch.randn(5, 3)
    torch.testing.assert_close(compiled(x, torch.tensor([1, -1])), x[[1, -1]] * 2 + 1)
    assert regions_of(compiled)
    with pytest.raises(Exception, match="index out of range"):
        compiled(x, torch.tensor([1, 5]))


def normed(x, w, b, g):
    return F.gelu(F.layer_norm(x * g, (x.shape[-1],), w, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(16, 9, 33), (37, 64)], ids=str)
def test_column_sums_in_kernels_of_rows(shape, dtype, monkeypatch, interpreted):
    monkeypatch.setattr(triton_fuser, "planned_gpu", lambda: EAGER_TO_CARRY)
    monkeypatch.setattr(tiled, "LARGE", 1)
    torch.manual_seed(0)
    inputs = [torch.randn(n, dtype=dtype, requires_grad=True) for n in (shape, *[shape[-1:]] * 3)]
    compiled = thunder.jit(normed, executors=["triton_fuser"])
    out = compiled(*inputs)
    cotangent = torch.randn_like(out)
    grads, eager, exact = (
        torch.autograd.grad(g(*those), those, cotangent.to(those[0].dtype))
        for g, those in (
            (compiled, inputs),
            (normed, inputs),
            (normed, [x.detach().double().requires_grad_() for x in inputs]),
        )
    )
    for ours, of_eager, of_double in zip(grads, eager, exact, strict=True):
        deviation, usual = ((x.double() - of_double).abs().max() for x in (ours, of_eager))
        assert deviation <= 4 * usual + 4 * torch.finfo(dtype).eps * of_double.abs().max()
    kernels = [k for r in regions_of(compiled) for launch in r.scheduled(r.usual_strides())[0] for k in launch.kernels]
    assert any(kernel.columns for kernel, _ in kernels) and any(tile.steps > 1 for _, tile in kernels)


def test_columns_are_added_up_before_what_they_read_is_written_over(monkeypatch, interpreted):
    monkeypatch.setattr(triton_fuser, "planned_gpu", lambda: EAGER_TO_CARRY)
    monkeypatch.setattr(tiled, "LARGE", 1)
    torch.manual_seed(0)
    x, z = torch.randn(37, 64), torch.randn(37, 64)
    compiled = thunder.jit(lambda x, z: (torch.softmax(x, -1), (z * x).sum(0)), executors=["triton_fuser"])
    compiled(x, z)
    (region,) = regions_of(compiled)
    assert any(k.columns for launch in region.scheduled(region.usual_strides())[0] for k, _ in launch.kernels)
    inputs = [x if p.name == compiled_inputs(compiled)[0] else z for p in region.region.inputs]
    over = region.writing_over(frozenset({[t is z for t in inputs].index(True)}))
    assert over.over
    results = over(*[t.clone() for t in inputs])
    torch.testing.assert_close(sorted(results, key=torch.Tensor.dim), [(z * x).sum(0), torch.softmax(x, -1)])


def compiled_inputs(compiled) -> list[str]:
    return [p.name for p in thunder.last_traces(compiled)[-1].args]


def test_columns_of_what_is_scattered_to_are_added_up_behind_the_scatter(monkeypatch, interpreted):
    monkeypatch.setattr(triton_fuser, "planned_gpu", lambda: EAGER_TO_CARRY)
    monkeypatch.setattr(tiled, "LARGE", 1)
    torch.manual_seed(0)

    def f(x, source, index, z):
        return (torch.zeros_like(x).index_add(0, index, source * 2) * z).sum(0)

    inputs = torch.randn(37, 64), torch.randn(50, 64), torch.randint(0, 37, (50,)), torch.randn(37, 64)
    compiled = thunder.jit(f, executors=[TritonFuser("tiles", always=True)])
    torch.testing.assert_close(compiled(*inputs), f(*inputs))
    (region,) = regions_of(compiled)
    launches, _ = region.scheduled(region.usual_strides())
    zeros, scattered, summed, *_ = [k for launch in launches for k, _ in launch.kernels]
    (write,) = scattered.writes
    # the kernel of zeros writes what that of the sums reads, though not the values that it reads
    assert write.scatter is not None and tiled._buffers_between(zeros, summed) == {write.buffer}
