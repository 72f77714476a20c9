"""Gradients of weights on a second stream. Without a GPU the stream is imitated: what is launched there runs when
somebody waits for it, as late as it may."""

import types

import pytest
import torch
from torch import nn

import thunder
from thunder import DebugOptions, compat
from thunder.executors.triton_kernels import variants
from thunder.executors.triton_kernels.launch import FusedRegion
from thunder.runtime import streams
from thunder.runtime.cudagraphs.region import GraphedRegion
from thunder.transforms import side_stream
from thunder.transforms.cudagraph import CUDAGraphTransform

# the fuser takes the CPU's tensors under Triton's interpreter only
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU with streams")


class LateStream:
    """Runs what is launched on it when another stream waits for it."""

    device_index, device_type, launched = 0, 1, []

    def __init__(self, device, stream_id=1):
        self.stream_id = stream_id


class LateEvent:
    def record(self, stream):
        self.stands_for = len(LateStream.launched) if stream.stream_id else 0

    def wait(self, stream):
        while any(map(callable, LateStream.launched[: self.stands_for])):
            place = next(i for i, work in enumerate(LateStream.launched) if callable(work))
            work, LateStream.launched[place] = LateStream.launched[place], None
            work()


@pytest.fixture
def late(monkeypatch):
    """Products of any size of backwards on the CPU are launched on a stream that is late."""
    current = 0

    def set_stream(stream_id, device_index, device_type):
        nonlocal current
        current = stream_id

    def product(a, b, out):
        assert current
        LateStream.launched.append(lambda: torch.mm(a, b, out=out))

    monkeypatch.setattr(LateStream, "launched", [])
    cuda = types.SimpleNamespace(current_stream=lambda index: LateStream(index, 0), Stream=LateStream, Event=LateEvent)
    monkeypatch.setattr(streams, "torch", types.SimpleNamespace(cuda=cuda, mm=product))
    monkeypatch.setattr(compat, "set_stream", set_stream, raising=False)
    monkeypatch.setattr(compat, "current_device", lambda: -1)  # of tensors on the CPU
    monkeypatch.setattr(compat, "current_stream", lambda index: current)
    monkeypatch.setattr(
        compat,
        "empty_strided_cuda",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype).fill_(torch.nan),
    )
    monkeypatch.setattr(side_stream, "DEVICES", ("cpu",))
    monkeypatch.setattr(side_stream, "LEAST", 0)
    monkeypatch.setattr(streams, "_SIDES", streams._Sides())
    yield LateStream
    assert current == 0


def under_way():
    """How many products, and others, are held."""
    return sum(
        len(held) for side in streams._SIDES.found.values() for held in (side.waiting, side.started, side.before)
    )


def beside(compiled):
    return [
        line
        for line in thunder.last_backward_traces(compiled)[-1].bound_symbols
        if line.sym.name == "mm_on_side_stream"
    ]


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(8, 8), nn.GELU())), nn.LayerNorm(8), nn.Linear(8, 3, bias=False)
    )


@pytest.mark.parametrize(
    "executors", [["torch"], ["triton_fuser", "torch"], ["inductor"]], ids=["torch", "fuser", "inductor"]
)
def test_products_that_nobody_reads_may_be_late(late, executors):
    """Those that something follows: where nobody fuses, the sum for the first layer's bias is the last."""
    module, x = model(), torch.randn(5, 8, requires_grad=True)
    compiled = thunder.jit(module, executors=executors, debug_options=DebugOptions(check_traces=True))
    inputs = [x, *module.parameters()]
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x).square().sum(), inputs),
            torch.autograd.grad(module(x).square().sum(), inputs),
        )
    assert len(late.launched) == 2 * len(beside(compiled)) and len(beside(compiled)) in (5, 6)
    assert not any(map(callable, late.launched)) and not under_way()
    text = str(thunder.last_backward_traces(compiled)[-1])
    assert text.index("join_side_stream()") > text.rindex("= mm_on_side_stream(")


def test_as_many_products_are_under_way_as_may_be(late, monkeypatch):
    """Where what they read is small, they start together and are waited for at the end; else each starts at once, and
    the program waits for the one before the last."""
    monkeypatch.setattr(streams, "TOGETHER", 3)
    counts, wait, module = [], LateEvent.wait, nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(9)))
    monkeypatch.setattr(
        LateEvent,
        "wait",
        lambda self, stream: (counts.append((stream.stream_id, sum(map(callable, late.launched)))), wait(self, stream)),
    )
    for held, starts, waits in ((1 << 20, [0, 3, 6], [8]), (1, [0, 1, 1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 1])):
        monkeypatch.setattr(streams, "HELD", held)
        late.launched.clear()
        counts.clear()
        thunder.jit(module)(torch.randn(2, 4)).sum().backward()
        assert [n for stream, n in counts if stream] == starts
        assert [n for stream, n in counts if not stream] == waits


def test_what_is_read_or_written_to_is_not_late(late):
    """Neither a gradient that the program reads, nor one of what it writes to afterwards."""
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    twice = thunder.jit(lambda x, w: x @ w + (x * 2) @ w)
    torch.testing.assert_close(
        torch.autograd.grad(twice(x, w).sum(), w), torch.autograd.grad((x @ w + (x * 2) @ w).sum(), w)
    )
    assert not beside(twice)

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, v):
            ctx.save_for_backward(x, w)
            return x @ w + v

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            gradient = torch.mm(x.t(), g)
            x.data.mul_(2)
            return g @ w.t(), gradient, g

    values = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]

    def program(x, w, v):
        return Writes.apply(x * 1, w, v).sum()

    compiled = thunder.jit(program)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*values), values), torch.autograd.grad(program(*values), values)
    )


def test_small_products_and_those_of_the_cpu_stay(late, monkeypatch):
    module, x = model(), torch.randn(5, 8)
    monkeypatch.setattr(side_stream, "LEAST", 2 * 5 * 8 * 8)
    compiled = thunder.jit(module)
    compiled(x).sum().backward()
    assert [line.output.shape for line in beside(compiled)] == [(8, 8)] * 4
    monkeypatch.setattr(side_stream, "DEVICES", ("cuda",))
    compiled = thunder.jit(module)
    compiled(x).sum().backward()
    assert not beside(compiled) and "Side Stream" not in "".join(str(t) for t in thunder.last_backward_traces(compiled))


def test_a_program_that_fails_leaves_nothing_that_could_be_overwritten(late):
    """What is under way holds its memory until the next program of the thread has waited for it."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    compiled = thunder.jit(module)
    compiled(x).sum().backward()
    first = beside(compiled)[0]
    assert first.sym.fn is streams.mm_beside
    streams.mm_beside(x.t(), x)
    assert under_way() == 1
    module.zero_grad()
    compiled(x).sum().backward()
    assert not under_way() and not any(map(callable, late.launched))


def test_a_product_that_fails_leaves_those_that_started_held(late, monkeypatch):
    """Their memory is given away when the stream of the next program has waited for them."""
    module, x, product, calls = (
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6))),
        torch.randn(2, 4),
        streams.torch.mm,
        [],
    )

    def fails(a, b, out):
        calls.append(a)
        if len(calls) == 3:
            raise RuntimeError("no room")
        product(a, b, out)

    monkeypatch.setattr(streams.torch, "mm", fails)
    compiled = thunder.jit(module)
    with pytest.raises(RuntimeError, match="no room"):
        compiled(x).sum().backward()
    assert sum(map(callable, late.launched)) == 2 <= under_way()
    module.zero_grad()
    compiled(x).sum().backward()
    assert not under_way() and not any(map(callable, late.launched))
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], [*torch.autograd.grad(module(x).sum(), list(module.parameters()))]
    )


def test_a_wait_that_fails_is_not_tried_again(late, monkeypatch):
    """An event that a recording of the user's left, which failed, can be waited for no more."""
    module, x = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))), torch.randn(2, 4)
    compiled, wait = thunder.jit(module), LateEvent.wait
    compiled(x).sum().backward()
    monkeypatch.setattr(streams, "HELD", 1)
    streams.mm_beside(x.t(), x)
    [side] = streams._SIDES.found.values()
    recorded = side.done

    def refuses(self, stream):
        if self is recorded and not stream.stream_id:
            raise RuntimeError("captured event")
        wait(self, stream)

    monkeypatch.setattr(LateEvent, "wait", refuses)
    with pytest.raises(RuntimeError, match="captured event"):
        compiled(x).sum().backward()
    monkeypatch.setattr(LateEvent, "wait", wait)
    module.zero_grad()
    compiled(x).sum().backward()
    assert not under_way()


def test_a_program_in_the_middle_of_another_streams(late, monkeypatch):
    """It waits for its own products, and goes on on its own stream."""
    current, launched_on = 0, []

    def set_stream(stream_id, device_index, device_type):
        nonlocal current
        current = stream_id

    def product(a, b, out):
        launched_on.append(current)
        torch.mm(a, b, out=out)

    event = types.SimpleNamespace(record=lambda stream: None, wait=lambda stream: None)
    monkeypatch.setattr(compat, "set_stream", set_stream, raising=False)
    monkeypatch.setattr(compat, "current_stream", lambda index: current)
    cuda = types.SimpleNamespace(
        current_stream=lambda index: LateStream(index, current),
        Stream=lambda index: LateStream(index, current + 100),
        Event=lambda: event,
    )
    monkeypatch.setattr(streams, "torch", types.SimpleNamespace(cuda=cuda, mm=product))
    x = torch.randn(2, 4)
    streams.mm_beside(x.t(), x)  # of a program on stream 0 that is under way
    current = 7
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    thunder.jit(module)(x).sum().backward()
    assert current == 7 and launched_on == [107] * 3 and under_way() == 1
    current = 0
    streams.join()
    assert current == 0 and launched_on[3:] == [100] and not under_way()


def norm(x, w):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


def backward_region():
    """The region of a norm's backward, and the places of its outputs: (the gradient of the input, that of the
    weight)."""
    x, w = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((512, 64), (64,)))
    compiled = thunder.jit(norm, executors=["triton_fuser"])
    torch.autograd.grad(compiled(x, w).sum(), [x, w])
    line = next(line for line in thunder.last_backward_traces(compiled)[-1].bound_symbols if line.sym.is_fusion)
    shapes = [o.shape for o in line.outputs]
    return line.sym.fn.region, shapes.index((512, 64)), shapes.index((64,))


def test_what_finishes_the_gradient_of_a_weight_is_launched_beside():
    region, of_input, of_weight = backward_region()
    fused = FusedRegion(region, torch.device("cuda", 0), planned=True)
    found = fused.beside(frozenset([of_weight]), streams.fork)
    assert fused.kernels == 2 and found.late == {1} and not fused.late
    assert fused.beside(frozenset([of_input]), streams.fork) is None
    assert fused.beside(frozenset(), streams.fork) is None


def test_a_join_that_somebody_waits_for_is_not_finished_beside():
    """The kernel of two sums over rows stores parts of it."""
    x, y = (torch.randn(300, 32, device=DEVICE) for _ in range(2))
    compiled = thunder.jit(lambda x, y: (torch.cat([x.sum(0), y.sum(0)]), (x * y).sum(0)), executors=["triton_fuser"])
    compiled(x, y)
    [line] = [line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion]
    fused = FusedRegion(line.sym.fn.region, torch.device("cuda", 0), planned=True)
    join = [o.shape for o in line.outputs].index((64,))
    assert fused.beside(frozenset([1 - join]), streams.fork) is None
    assert fused.beside(frozenset([0, 1]), streams.fork).late


def test_the_launches_of_a_region_whose_last_kernel_is_beside(monkeypatch):
    launched, forked = [], []
    numbers = iter(range(9))
    binary = lambda request: types.SimpleNamespace(
        result=lambda n=next(numbers): types.SimpleNamespace(load=lambda index: n, scratch=0, shared=0)
    )  # noqa: E731
    monkeypatch.setattr(variants, "binary_of", binary)
    monkeypatch.setattr(compat, "current_device", lambda: 0)
    monkeypatch.setattr(compat, "current_stream", lambda index: "the program's")
    monkeypatch.setattr(
        compat, "launch_kernel", lambda kernel, *rest: launched.append((kernel, rest[-2], rest[-1])), raising=False
    )
    monkeypatch.setattr(
        compat, "empty_strided_cuda", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    region, _, of_weight = backward_region()
    fused = FusedRegion(region, torch.device("cuda", 0), planned=True)
    found = fused.beside(frozenset([of_weight]), lambda index, held: forked.append((index, held)) or "the other one")
    results = found(*(torch.randn(p.shape) for p in region.inputs))
    (first, first_addresses, first_stream), (second, second_addresses, second_stream) = launched
    assert (first, first_stream, second, second_stream) == (0, "the program's", 1, "the other one")
    [(index, held)] = forked
    assert (
        index == 0
        and {t.data_ptr() for t in held} == set(second_addresses)
        and any(t is results[of_weight] for t in held)
    )
    assert set(second_addresses) - set(first_addresses) == {results[of_weight].data_ptr()}


@on_gpu
@pytest.mark.parametrize("transforms", [(), (CUDAGraphTransform,)], ids=["launched", "graphs"])
def test_on_the_device(transforms, monkeypatch):
    """Bit for bit what the products give on one stream, under memory that is used again at once."""
    torch.manual_seed(0)
    module = nn.Sequential(
        *(m for _ in range(6) for m in (nn.Linear(4096, 4096, bias=False), nn.GELU(), nn.LayerNorm(4096)))
    ).to("cuda", torch.bfloat16)
    parameters, x = list(module.parameters()), torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    cotangent = torch.randn_like(x)
    monkeypatch.setattr(side_stream, "LEAST", 10**20)
    expected = torch.autograd.grad(thunder.jit(module)(x), parameters, cotangent)
    monkeypatch.setattr(side_stream, "LEAST", 10**9)
    compiled = thunder.jit(module, transforms=[t() for t in transforms])
    for _ in range(20):
        found = torch.autograd.grad(compiled(x), parameters, cotangent)
        assert all(map(torch.equal, found, expected))
        del found
    programs = [
        line.sym.fn.trace
        for line in thunder.last_backward_traces(compiled)[-1].bound_symbols
        if isinstance(line.sym.fn, GraphedRegion)
    ]
    assert bool(programs) == bool(transforms)
    text = str(programs[0] if programs else thunder.last_backward_traces(compiled)[-1])
    assert "mm_on_side_stream" in text
    # in a graph, kernels that finish gradients as well, where not many of them have a launch of their own
    assert ("finished on the side stream" in text or "sum_of_partials" in text) == bool(transforms)


@on_gpu
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "recorded by the user"])
def test_on_a_stream_of_the_users(captured, monkeypatch):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).to("cuda", torch.bfloat16)
    parameters, x = list(module.parameters()), torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
    stream, cotangent = torch.cuda.Stream(), torch.randn_like(x)
    monkeypatch.setattr(side_stream, "LEAST", 10**20)
    expected = torch.autograd.grad(thunder.jit(module)(x), parameters, cotangent)
    monkeypatch.setattr(side_stream, "LEAST", 10**9)
    compiled = thunder.jit(module)

    def step():
        return torch.autograd.grad(compiled(x), parameters, cotangent)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            found = step()
    stream.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        graph.replay()
        torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
    assert len(beside(compiled)) == 3


@on_gpu
def test_a_recording_that_fails_while_products_are_under_way(monkeypatch):
    module, x = (
        nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda(),
        torch.randn(1024, 1024, device="cuda"),
    )
    parameters = list(module.parameters())
    expected = torch.autograd.grad(module(x).sum(), parameters)
    compiled, product, recorded = (
        thunder.jit(module, transforms=[CUDAGraphTransform()]),
        streams.mm_beside,
        [],
    )

    def fails_when_recorded(a, b):
        if torch.cuda.is_current_stream_capturing():
            recorded.append(a)
            if len(recorded) == 2:
                raise RuntimeError("no room")
        return product(a, b)

    monkeypatch.setattr(side_stream.mm_on_side_stream, "fn", fails_when_recorded)
    with pytest.warns(UserWarning, match="no room"):
        for _ in range(4):
            torch.testing.assert_close(
                torch.autograd.grad(compiled(x).sum(), parameters), expected, rtol=1e-4, atol=1e-3
            )
    assert len(recorded) == 2 and not under_way()
