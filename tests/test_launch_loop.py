"""Launch loops: what they run is what the printed program runs."""

import gc
import signal
import threading
import traceback
import weakref

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.cache import entry as entries
from thunder.executors.cpp_fuser import KernelRegion, cpp_fuser
from thunder.kernels import cpp
from thunder.transforms import launch_loop
from thunder.transforms.launch_loop import take_loops

pytestmark = pytest.mark.usefixtures("native_extension")


def looped(fn, *args, **options):
    """A compiled function whose program runs loops, and their number."""
    compiled = thunder.jit(fn, executors=[], **options)
    compiled(*args)
    return compiled, sum(map(take_loops, compiled.programs[0].executed))


def lines_in_python(compiled) -> list[str]:
    """The globals that the program's own code calls."""
    return [n for n in compiled.programs[0].forward.python_callable().__code__.co_names if not n.startswith("loop_")]


def arithmetic(x, y):
    return torch.relu(x @ y + 2.0 * x) / (y.abs() + 1)


def views(x, y):
    z = x.transpose(0, 1)[1:3, None, ::2]
    return z.reshape(-1), z.squeeze(1).contiguous().view(-1)[0], y[..., -1].expand(3, 4)


def lists(x, y):
    a, b = torch.cat([x, y], 1).split(4, 1)
    c, d = torch.topk(a, 2, 1)
    return torch.stack([a, b]), c, d, x.unbind(0)[1], torch.aminmax(y)


def libraries(x, y):
    z = F.layer_norm(F.linear(x, y, y[0]), (4,), y[1], y[2])
    return F.gelu(z).softmax(-1), F.embedding(torch.tensor([1, 0, 3]), y), F.pad(z, (1, 2)), F.silu(z).log_softmax(0)


def written(x, y):
    z = x.clone()
    z.add_(y).mul_(2)
    z[1].copy_(y[0])
    return z, z.sum()


def several_operators(x, y):
    return F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), F.normalize(x) + torch.block_diag(x, y)[
        :4, :4
    ]


def constants(x, y):
    full = torch.full((4, 4), 3.0) + torch.arange(4) + torch.zeros(4, dtype=torch.float64)
    return torch.where(x > 0.5, full, y.double()), x.to(torch.int32) + torch.tensor([1, 2, 3, 4])


PROGRAMS = [arithmetic, views, lists, libraries, written, several_operators, constants]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_results_are_eagers_bit_for_bit(program):
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    compiled, loops = looped(program, x, y)
    assert loops
    for _ in range(2):
        ours, theirs = compiled(x, y), program(x, y)
        ours, theirs = ((r,) if isinstance(r, torch.Tensor) else r for r in (ours, theirs))
        for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
            assert a._is_view() == b._is_view(), "views stay views"
        x, y = torch.rand(4, 4), torch.rand(4, 4)


def test_a_run_of_operators_is_one_call_of_the_program():
    compiled, loops = looped(arithmetic, torch.rand(4, 4), torch.rand(4, 4))
    assert loops == 1 and lines_in_python(compiled) == []


def test_the_text_of_the_program_stays_and_so_do_its_lines():
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    compiled = thunder.jit(arithmetic, executors=[])
    compiled(x, y)
    trace = compiled.programs[0].forward
    before, file = str(trace), trace.python_callable().__code__.co_filename
    assert take_loops(trace) and str(trace) == before and trace.python_callable().__code__.co_filename == file
    assert take_loops(trace), "it is taken again"
    assert torch.equal(compiled(x, y), arithmetic(x, y))


def by_index(table, indices, y):
    y = torch.relu(y) + 1
    rows = F.embedding(indices, table)
    return rows.sum() * y


def test_an_error_is_the_printed_programs_with_its_line():
    table, good, bad, y = torch.rand(4, 2), torch.tensor([0, 3]), torch.tensor([0, 4]), torch.rand(2)
    printed = thunder.jit(by_index, executors=[])
    printed(table, good, y)
    compiled, loops = looped(by_index, table, good, y)
    assert loops
    seen = []
    for run in (by_index, printed, compiled):
        with pytest.raises(IndexError) as raised:
            run(table, bad, y)
        seen.append((str(raised.value).split("\n")[0], str(raised.value)))
        last = traceback.extract_tb(raised.tb)[-1]
    assert seen[0][0] == seen[1][0] == seen[2][0] and seen[1] == seen[2]
    assert "embedding" in last.line and last.name == "computation"
    compiled(table, good, y)


def test_a_subclass_gets_the_printed_lines():
    class Scaled(torch.Tensor):
        pass

    x = torch.rand(4, 4)
    compiled, loops = looped(arithmetic, x, x)
    function = compiled.programs[0].forward.python_callable()
    result = function(x.as_subclass(Scaled), x)
    assert loops and type(result) is Scaled and torch.equal(result.as_subclass(torch.Tensor), arithmetic(x, x))


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """Calls a function before each operator."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        self.look(function)
        return function(*args, **(kwargs or {}))


def test_values_are_freed_at_their_last_use():
    def program(x, y):
        return torch.relu(x).exp() + y.sum()

    compiled, loops = looped(program, torch.rand(1 << 16), torch.rand(1 << 16))
    function = compiled.programs[0].forward.python_callable()
    x, y = torch.rand(1 << 16), torch.rand(1 << 16)
    watched, inputs, alive = [weakref.ref(x), weakref.ref(y)], [x, y], []
    del x, y
    with torch.no_grad(), Watching(lambda function: alive.append([r() is not None for r in watched])):
        _call_and_forget(function, inputs)
    assert loops and alive == [[True, True], [False, True], [False, True], [False, False]]


def _call_and_forget(function, inputs):
    """The function with inputs that only it holds."""
    space = {"f": function, "inputs": inputs}
    exec("result = f(inputs.pop(0), inputs.pop(0))", space)
    return space["result"]


def test_dispatch_modes_see_each_operator():
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    compiled, loops = looped(arithmetic, x, y)
    seen = []
    for run in (compiled.programs[0].forward.python_callable(), _printed(arithmetic, x, y)):
        with torch.no_grad(), Watching(lambda function: seen.append(str(function))):
            run(x, y)
    assert loops and seen[: len(seen) // 2] == seen[len(seen) // 2 :] and len(seen) > 8


def _printed(fn, *args):
    compiled = thunder.jit(fn, executors=[])
    compiled(*args)
    return compiled.programs[0].forward.python_callable()


def test_random_numbers_are_drawn_in_order():
    def program(x):
        return F.dropout(x, 0.5) + torch.rand_like(x) * torch.randn(4)

    x = torch.rand(4, 4)
    compiled, _ = looped(program, x)
    results = []
    for run in (compiled, program):
        torch.manual_seed(0)
        results.append((run(x), torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_training_step_runs_loops_in_both_directions():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    compiled, x = thunder.jit(model, executors=[]), torch.rand(3, 4)
    compiled(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    assert all(take_loops(trace) for trace in compiled.programs[0].executed) and len(compiled.programs[0].executed) == 2
    model.zero_grad()
    compiled(x).square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_signal_handler_raises_from_a_loop(monkeypatch):
    class Late(Exception):
        pass

    def handler(number, frame):
        raise Late

    x = torch.rand(4)
    compiled, loops = looped(lambda x: torch.relu(x).exp() + 1, x)
    function, ran = compiled.programs[0].forward.python_callable(), []

    def look(operator):
        ran.append(operator)
        if len(ran) == 1:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with torch.no_grad(), Watching(look), pytest.raises(Late):
            function(x)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert loops and len(ran) == 1


def test_operators_of_other_libraries_stay_lines():
    @torch.library.custom_op("thunder_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)
    x = torch.rand(4)
    compiled, loops = looped(lambda x: doubled(torch.relu(x).exp()).exp().sin(), x)
    assert loops == 2 and any("doubled" in name for name in lines_in_python(compiled))
    assert torch.equal(compiled(x), (torch.relu(x).exp() * 2).exp().sin())


def test_a_program_dies_with_its_loops():
    class Sentinel:
        pass

    x = torch.rand(4, 4)
    compiled, loops = looped(arithmetic, x, x)
    sentinel = compiled.programs[0].forward.python_callable().__globals__["sentinel"] = Sentinel()
    dies = weakref.ref(sentinel)
    del sentinel
    assert loops and dies() is not None
    del compiled
    gc.collect()
    assert dies() is None


def test_functions_in_python_that_look_at_sizes_stay_lines():
    def program(x, m, v):
        return F.batch_norm(x.exp().sin(), m, v, training=True).exp().sin()

    m, v = torch.zeros(2), torch.ones(2)
    compiled, _ = looped(program, torch.rand(4, 2), m, v, dynamic=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        compiled(torch.rand(1, 2), m, v)


def test_threads_run_one_loop():
    x, y = torch.rand(64, 64), torch.rand(64, 64)
    compiled, _ = looped(arithmetic, x, y)
    expected, results = arithmetic(x, y), []

    def work():
        results.extend(torch.equal(compiled(x, y), expected) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200


def test_they_are_made_once_at_a_call_that_is_known_beforehand(monkeypatch):
    loops = []
    monkeypatch.setattr(entries, "take_loops", lambda trace: loops.append(compiled._lc_cs.calls))
    compiled = thunder.jit(arithmetic, executors=[])
    x = torch.rand(4, 4)
    for _ in range(3 * entries.WARM):
        compiled(x, x)
    assert loops == [entries.WARM]


def test_a_backward_that_runs_later_gets_its_loops_later(monkeypatch):
    loops = []
    monkeypatch.setattr(entries, "take_loops", lambda trace: loops.append((compiled._lc_cs.calls, trace.name)))
    compiled, x = thunder.jit(arithmetic, executors=[]), torch.rand(4, 4, requires_grad=True)
    for call in range(1, 4 * entries.WARM):
        y = compiled(x, x)
        if call == entries.WARM + 2:
            y.sum().backward()
    assert loops == [(entries.WARM, "augmented_forward_fn"), (2 * entries.WARM, "backward_fn")]


def test_a_program_that_is_older_than_the_extension_gets_its_loops_too(monkeypatch):
    calls, native = [], entries.extensions.loaded_extension()

    def loaded_later():
        calls.append(compiled._lc_cs.calls)
        return native if len(calls) > 2 else None

    monkeypatch.setattr(entries.extensions, "loaded_extension", loaded_later)
    monkeypatch.setattr(entries.extensions, "is_awaited", lambda: True)
    compiled, x = thunder.jit(arithmetic, executors=[]), torch.rand(4, 4)
    for _ in range(8 * entries.WARM):
        compiled(x, x)
    assert calls[:3] == [entries.WARM, 2 * entries.WARM, 4 * entries.WARM]
    assert lines_in_python(compiled) == [] and torch.equal(compiled(x, x), arithmetic(x, x))


def test_torch_function_modes_see_the_printed_functions(monkeypatch):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(entries, "take_loops", lambda trace: pytest.fail("a mode would not see its operators"))
    compiled = thunder.jit(arithmetic, executors=[])
    x = torch.rand(4, 4)
    with Mode():
        for _ in range(2 * entries.WARM):
            compiled(x, x)


def test_without_the_extension_the_printed_program_runs(monkeypatch):
    monkeypatch.setattr(launch_loop.extensions, "loaded_extension", lambda: None)
    x = torch.rand(4, 4)
    compiled, loops = looped(arithmetic, x, x)
    assert loops == 0 and torch.equal(compiled(x, x), arithmetic(x, x)) and lines_in_python(compiled)


def test_a_loop_keeps_no_value_alive():
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    compiled, _ = looped(arithmetic, x, y)
    dies = weakref.ref(x)
    compiled(x, y)
    del x
    gc.collect()
    assert dies() is None


def test_making_loops_is_seen_by_no_profiler_and_no_mode():
    def program(x, y):
        return arithmetic(x[None, :], y[None])

    compiled, x = thunder.jit(program, executors=[]), torch.rand(4, 4)
    compiled(x, x)
    operators = []
    with torch.no_grad(), Watching(operators.append), torch.profiler.profile(acc_events=True) as profiler:
        assert take_loops(compiled.programs[0].forward)
    assert operators == [] and not [e.name for e in profiler.events() if e.name.startswith("aten::")]


def test_a_profile_may_reach_the_call_that_makes_them():
    compiled, x = thunder.jit(arithmetic, executors=[]), torch.rand(4, 4)
    for _ in range(entries.WARM - 15):
        compiled(x, x)
    assert len(thunder.profile(compiled, x, x).costs) > 2
    assert lines_in_python(compiled) == [], "notes are taken away again"


# ------------------------------------------------------------------------------------------- kernels of fused regions


def normed(x, w):
    """A product between two regions, the second of which needs scratch memory."""
    y = torch.softmax(x * 2 + 1, -1).sin() @ w
    return y, (y - y.mean(0)) * torch.rsqrt(y.var(0) + 1)


@pytest.fixture
def kernels(monkeypatch):
    """PyTorch's kernels are never predicted to be faster."""
    if cpp.unavailable() is not None:
        pytest.skip(str(cpp.unavailable()))
    monkeypatch.setattr(cpp_fuser, "always", True)


def with_kernels(fn, *args):
    compiled = thunder.jit(fn, executors=["cpp"], tiers=0)
    compiled(*args)
    assert sum(map(take_loops, compiled.programs[0].executed)) == 1 and lines_in_python(compiled) == []
    return compiled


def test_kernels_run_in_a_loop(kernels, monkeypatch):
    x, w = torch.randn(5, 7), torch.randn(7, 6)
    compiled = with_kernels(normed, x, w)
    monkeypatch.setattr(KernelRegion, "__call__", lambda self, *args: pytest.fail("Python runs it"))
    for _ in range(3):
        x = torch.randn(5, 7)
        torch.testing.assert_close(compiled(x, w), normed(x, w))


def test_inputs_of_other_strides_go_to_python_in_a_loop(kernels):
    x, w = torch.randn(5, 7), torch.randn(7, 6)
    compiled = with_kernels(normed, x, w)
    for other in (torch.randn(7, 5).t(), torch.randn(5, 14)[:, ::2], torch.randn(1, 7).expand(5, 7)):
        torch.testing.assert_close(compiled(other, w), normed(other, w))


def test_an_index_that_is_out_of_range_raises_from_its_line_in_a_loop(kernels):
    def program(x, i):
        return torch.relu(x[i] * 2 + 1) @ x

    x, i = torch.randn(4, 4), torch.tensor([0, 3, 1])
    compiled = with_kernels(program, x, i)
    with pytest.raises(IndexError, match="index 4 is out of bounds") as raised:
        compiled(x, torch.tensor([0, 4, 1]))
    assert any("Kernels" in (frame.line or "") for frame in traceback.extract_tb(raised.value.__traceback__))
    torch.testing.assert_close(compiled(x, i), program(x, i))
