"""Decisions by data beside everything else that thunder.jit does: caches, transforms, executors, threads, generators."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thunder
from tests.kernels_in_use import EVERY_REGION
from tests.paths.compared import assert_same, beside_eager, keeping_nothing
from thunder.cache import store
from thunder.cache.index import SCANNED
from thunder.core.paths import OtherPath
from thunder.errors import CaptureError, DataDependentError, FallbackWarning

X = torch.arange(6.0).reshape(2, 3) + 1
CALLS = [(X,), (-X,), (X,), (-X,), (X * 3,)]


def decides(x):
    return x * 2 if x.sum() > 0 else -x


def counts(x):
    """As many paths as there are sums."""
    return [x] * int(x.sum())


class Nothing(thunder.Transform):
    def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
        return prologue, computation, epilogue


@pytest.mark.parametrize(
    "options",
    [
        {"cache": "symbolic values"}, {"cache": "constant values"}, {"cache": "same input"}, {"cache": "no caching"},
        {"transforms": [Nothing()]}, {"disable_torch_autograd": True}, {"rng": "fused"}, {"numerics": "eager"},
        {"memory_budget": 0.5},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values())))[:16].split("<")[0],
)  # fmt: skip
def test_options(options):
    compiled = beside_eager(keeping_nothing(decides), CALLS, **options)
    assert len(compiled.programs) == (0 if options.get("cache") == "no caching" else 2)


def test_symbolic_sizes():
    calls = [*CALLS, (torch.ones(3, 4),), (-torch.ones(5, 4),), (torch.ones(7, 2),)]
    compiled = beside_eager(keeping_nothing(decides), calls, cache="symbolic values")
    assert len(compiled.programs) == 2


def test_paths_of_other_inputs_do_not_count():
    calls = [(sign * torch.ones(n),) for n in range(1, 5) for sign in (1, -1)]
    beside_eager(keeping_nothing(decides), calls, max_paths=2, cache="constant values")


def test_modes():
    compiled = thunder.jit(decides, fallback="error")
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        for (x,) in CALLS:
            with mode():
                assert_same(compiled(x), decides(x))


def test_checkpoint():
    def program(x):
        return checkpoint(lambda v: v.sin() * 2 if v.sum() > 0 else v.cos(), x * 1, use_reentrant=False)

    beside_eager(keeping_nothing(program), [(x.clone().requires_grad_(),) for (x,) in CALLS])


def test_ranks_would_have_to_decide_together(monkeypatch):
    monkeypatch.setattr("thunder.capture.decisions._has_process_group", lambda: True)
    with pytest.raises(CaptureError, match="ranks that communicate would have to decide together"):
        thunder.jit(decides, fallback="error")(X)


def test_as_many_paths_as_may_be():
    calls = [(torch.tensor([float(n)]),) for n in range(6)]
    compiled = thunder.jit(counts, fallback="eager", max_paths=3)
    with pytest.warns(FallbackWarning, match="3 compiled paths, as many as max_paths= allows"):
        assert [len(compiled(*args)) for args in calls] == [0, 1, 2, 3, 4, 5]
    assert len(compiled.programs) == thunder.cache_misses(compiled) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [len(compiled(*args)) for args in calls] == [0, 1, 2, 3, 4, 5]
    refusing = thunder.jit(counts, fallback="error", max_paths=3)
    for args in calls[:3]:
        refusing(*args)
    with pytest.raises(DataDependentError, match="3 compiled paths") as raised:
        refusing(*calls[3])
    assert "return [x] * int(x.sum())" in raised.value.location[3]
    assert len(refusing(*calls[1])) == 1


def test_calls_that_go_no_path_leave_the_programs_alone():
    """What a program computes before it is left is computed twice."""
    compiled = thunder.jit(counts, fallback="eager", max_paths=2)
    calls = [(torch.tensor([float(n)]),) for n in range(200)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        assert [len(compiled(*args)) for args in calls] == [*range(200)]
    begun = thunder.cache_hits(compiled)  # calls that a program began
    assert len(compiled.programs) == 2 and store.ASTRAY <= begun <= store.ASTRAY + 2 + 200 // SCANNED
    for _ in range(SCANNED + 6):  # one of so many is tried, and goes a path: those after it are, too
        assert len(compiled(*calls[1])) == 1
    assert thunder.cache_hits(compiled) - begun >= 6


def test_long_programs_have_two_paths(monkeypatch):
    monkeypatch.setattr(store, "MOST_OPERATIONS", 3)
    compiled = thunder.jit(counts, fallback="eager")
    with pytest.warns(FallbackWarning, match="2 compiled paths of [0-9]+ operations"):
        assert [len(compiled(torch.tensor([float(n)]))) for n in range(4)] == [0, 1, 2, 3]
    assert len(compiled.programs) == 2


def test_many_paths_are_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = thunder.jit(counts)
        for n in range(14):
            compiled(torch.tensor([float(n)]))
    assert len(compiled.programs) == 14


def test_threads():
    compiled, wrong = thunder.jit(decides, fallback="error"), []

    def work(k):
        for i in range(30):
            x = X if i * k % 3 else -X
            wrong.extend([] if torch.equal(compiled(x), decides(x)) else [i])

    threads = [threading.Thread(target=work, args=(k,)) for k in (1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(compiled.programs) == 2


def with_a_generator(x, g):
    noise = torch.rand(3, generator=g)
    if torch.rand((), generator=g) > 0.5:
        return x + torch.randn(3, generator=g)
    return x * noise + torch.rand(3)


def test_generators_of_the_user():
    outcomes = []
    compiled = thunder.jit(with_a_generator, fallback="error")
    for f in (with_a_generator, compiled):
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(1)
        outcomes.append([*(f(x, g) for (x,) in CALLS * 4), torch.rand(2, generator=g), torch.rand(2)])
        if f is compiled:
            assert_same(*outcomes)
            assert len(compiled.programs) == 2


def test_fused_random_numbers_are_drawn_once():
    def program(x):
        noise = torch.rand(3)
        return x + noise if x.sum() > 0 else x - noise

    def numbers_behind(f, x):
        torch.manual_seed(3)
        f(x)
        return torch.rand(2).tolist()

    compiled = thunder.jit(program, fallback="error", rng="fused")
    for (x,) in CALLS:
        # eager's draw, or one seed where a kernel computes the numbers
        known = numbers_behind(program, x), numbers_behind(lambda x: torch.randint(0, 2**63 - 1, ()), x)
        assert numbers_behind(compiled, x) in known


def test_seeds_set_inside():
    def program(x):
        torch.manual_seed(3)
        noise = torch.rand(3)
        if x.sum() > 0:
            torch.manual_seed(4)
        return x + noise if noise.sum() > 1 else x

    beside_eager(keeping_nothing(program), CALLS)


def test_decided_by_gradients_of_a_backward_inside():
    def make():
        w = torch.nn.Parameter(torch.ones(3))
        w.grad = torch.ones(3)

        def step(x):
            (w * x).square().sum().backward()
            norm = w.grad.norm()
            if norm > 20:
                w.grad.zero_()
            if w.grad.max() > 5:
                w.grad.mul_(1 / norm)
            return norm

        return step, (w,)

    compiled = beside_eager(make, [(X * s,) for s in (0.1, 1, 0.1, 2, 0.3, 0.5, 1)])
    assert len(compiled.programs) > 2


def test_fused_kernels():
    def program(x):
        y = (x * 2 + 1).sin()
        return (y * 3 + x).tanh() if (y * y).sum() > 2 else (y - 1) * x.cos()

    compiled = thunder.jit(program, executors=[EVERY_REGION], fallback="error")
    for (x,) in [*CALLS, (X * 0,)]:
        torch.testing.assert_close(compiled(x), program(x))
    assert len(compiled.programs) == 2


def test_programs_that_disagree_end():
    """As where fused kernels of one path round otherwise than those of another."""
    compiled = thunder.jit(decides, fallback="eager")
    compiled(X), compiled(-X)

    def leaves(program):
        def run(*inputs):
            raise OtherPath(0, not program.path[0].answer)

        return run

    for program in compiled.programs:
        program.computation_fn = leaves(program)
    with pytest.warns(FallbackWarning, match="each of two compiled paths finds that a call goes the other"):
        assert torch.equal(compiled(X), X * 2)


def test_lower_gives_the_program_of_the_path():
    compiled = thunder.jit(decides, fallback="error")
    assert [compiled.lower(x).path[0].answer for x in (X, -X, X)] == [True, False, True]
    assert len(compiled.programs) == 2 and thunder.compile_stats(compiled).calls == 0
    compiled(-X)
    assert "neg" in str(thunder.last_traces(compiled)[-1])


def test_last_paths():
    compiled = thunder.jit(decides, fallback="error")
    for (x,) in CALLS:
        compiled(x)
    yes, no = paths = thunder.last_paths(compiled)
    assert (yes.calls, no.calls) == (3, 2) and yes.decisions[0].answer is True and no.decisions[0].answer is False
    assert yes.decisions[0].where[:3] == (__file__, decides.__code__.co_firstlineno + 1, "decides")
    assert "3 calls\n  u0 != 0: True  # " in str(paths) and "return x * 2 if x.sum() > 0 else -x" in str(paths)
    without = thunder.jit(lambda x: x + 1)
    without(X)
    (only,) = thunder.last_paths(without)
    assert only.decisions == () and only.calls == 1
