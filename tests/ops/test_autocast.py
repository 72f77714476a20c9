"""What is recorded under autocast computes what eager PyTorch computes under torch.autocast, bit for bit."""

from __future__ import annotations

import pytest
import torch

import tests.ops.samples  # noqa: F401
import thunder.executors.pythonex
import thunder.executors.torchex  # noqa: F401
from thunder.core import dtypes
from thunder.core.proxies import map_structure
from thunder.core.symbol import Context, Names, OpTags, Recorder, recording
from thunder.core.trace import Trace
from thunder.extend import resolve_executors
from thunder.ops import LTORCH
from thunder.ops.autocast import WORDS, kinds_of, policy
from thunder.ops.registry import lookup
from thunder.tracing import proxy_of
from thunder.transforms.dispatch import dispatch

STATE = (("cpu", torch.bfloat16),)


def make(*shape, dtype=torch.float32, low=-2.0, high=2.0):
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(int(low), max(int(high), int(low) + 1), shape, dtype=dtype)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return (torch.rand(shape) * (high - low) + low).to(dtype)


def arguments(sample) -> tuple[tuple, dict]:
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample
    return tuple(sample), {}


def compiled(function, args: tuple, kwargs: dict) -> list:
    """The results of recording `function` under autocast and running the record without it."""
    tensors: dict[int, tuple] = {}

    def proxied(x):
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in tensors:
            tensors[id(x)] = (proxy_of(x, f"a{len(tensors)}"), x)
        return tensors[id(x)][0]

    proxy_args, proxy_kwargs = map_structure(proxied, args), map_structure(proxied, kwargs)
    names = Names()
    names.taken |= {p.name for p, _ in tensors.values()}
    with recording(Recorder(Context(names, autocast=policy(STATE)))) as recorder:
        out = function(*proxy_args, **proxy_kwargs)
    trace = Trace("computation", [p for p, _ in tensors.values()], recorder.bound_symbols, flat(out), names)
    return flat(dispatch(trace, resolve_executors([])).python_callable()(*(x for _, x in tensors.values())))


def flat(x) -> list:
    return [y for e in x for y in flat(e)] if isinstance(x, (tuple, list)) else [x]


def lowered(x):
    return x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x


def half_lowered():
    """Turns every second float tensor to bfloat16."""
    count = 0

    def change(x):
        nonlocal count
        if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
            return x
        count += 1
        return x.to(torch.bfloat16) if count % 2 else x

    return change


def eager(function, args: tuple, kwargs: dict) -> list | None:
    """Eager's results, None where it refuses the arguments."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flat(function(*args, **kwargs))
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return None


def sampled() -> list[str]:
    return sorted(
        name
        for name, symbol in LTORCH.items()
        if symbol.sampler is not None
        and not name.startswith("empty")
        and symbol.torch_functions
        and not symbol.tags & {OpTags.RANDOM_OP, OpTags.OPAQUE}
    )


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's advice on single samples
@pytest.mark.parametrize("name", sampled())
def test_results_are_those_of_torch_autocast(name):
    symbol = LTORCH[name]
    function = symbol.torch_functions[0]
    operation = lookup(function) or symbol
    torch.manual_seed(0)
    compared = 0
    for sample in symbol.sampler(make):
        args, kwargs = arguments(sample)
        for change in (lambda x: x, lowered, half_lowered()):
            changed = map_structure(change, args), map_structure(change, kwargs)
            expected = eager(function, *changed)
            if expected is None:
                continue
            got = compiled(operation, *changed)
            for g, e in zip(got, expected, strict=True):
                if isinstance(e, torch.Tensor):
                    assert g.dtype is e.dtype, (
                        f"{name}{[getattr(x, 'dtype', x) for x in changed[0]]}: {g.dtype}, eager {e.dtype}"
                    )
                    torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)
            compared += 1
    assert compared, "eager refused every sample"


def test_the_lists_for_the_cpu_are_complete():
    """Every operation that PyTorch's list for the CPU names, and thunder defines, has a policy. PyTorch casts inside of
    the others."""
    listed = {
        n.split("::")[1].split(".")[0]
        for n in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCPU")
    }
    # those of pad come through F.pad, cross_entropy_loss is F.cross_entropy; the rest is no public function
    known = {
        "reflection_pad1d",
        "reflection_pad2d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "cross_entropy_loss",
        "nll_loss2d",
    }
    internal = {
        "_addmm_activation",
        "_convolution",
        "_grid_sampler_2d_cpu_fallback",
        "_lu_with_info",
        "_native_multi_head_attention",
        "mkldnn_rnn_layer",
    }
    internal |= {"multilabel_margin_loss_forward", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"}
    missing = []
    for name in sorted(listed - known - internal):
        symbol = (
            LTORCH.get(name)
            or LTORCH.get(name.removeprefix("linalg_"))
            or LTORCH.get(f"{name}_with_indices")
            or lookup(getattr(torch, name, None))
        )
        if symbol is not None and (symbol.autocast is None or "cpu" not in kinds_of(symbol.autocast)):
            missing.append(name)
    assert not missing


def test_every_policy_is_a_word_that_is_known():
    for symbol in LTORCH.values():
        if symbol.autocast is not None:
            assert set(kinds_of(symbol.autocast).values()) <= set(WORDS)


def test_casts_are_recorded_once_for_a_tensor():
    x = proxy_of(torch.randn(2, 2), "x")
    names = Names()
    names.taken.add("x")
    with recording(Recorder(Context(names, autocast=policy(STATE)))) as recorder:
        out = LTORCH["matmul"](x, x)
    assert [line.sym.name for line in recorder.bound_symbols] == ["to", "matmul"]
    assert out.dtype is dtypes.bfloat16


def test_doubles_and_integers_are_left_alone():
    a, b = proxy_of(torch.randn(2, 2, dtype=torch.float64), "a"), proxy_of(torch.ones(2, 2, dtype=torch.int64), "b")
    with recording(Recorder(Context(Names(), autocast=policy(STATE)))) as recorder:
        LTORCH["matmul"](a, a)
        LTORCH["matmul"](b, b)
    assert [line.sym.name for line in recorder.bound_symbols] == ["matmul", "matmul"]


def test_binary_cross_entropy_is_refused_on_cuda():
    a = proxy_of(torch.rand(3), "a").replace(device="cuda:0")
    with (
        recording(Recorder(Context(Names(), autocast=policy((("cuda", torch.float16),))))),
        pytest.raises(RuntimeError, match="unsafe to autocast"),
    ):
        LTORCH["binary_cross_entropy"](a, a)
