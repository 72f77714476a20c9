"""The sdpa executor: which kernels it chooses, that they compute what eager computes, and that repeated keys and values
are not made. Kernels need a GPU."""

import collections
import contextlib
import itertools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import thunder
from thunder.core.devices import to_device
from thunder.core.dtypes import bfloat16
from thunder.core.proxies import TensorProxy
from thunder.executors import sdpaex

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")


def names(trace):
    return [
        line.sym.name
        for line in trace.bound_symbols
        if line.sym.name not in ("python_del", "unpack_sequence", "clear_collection")
    ]


def heads(count, length=24, width=16, *, device="cpu", dtype=torch.float32):
    """(batch, heads, length, width), in memory as a model's projection leaves it."""
    return torch.randn(2, length, count, width, device=device, dtype=dtype).transpose(1, 2).detach()


def with_gradients(f, *tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = f(*leaves)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))  # in any layout
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.empty_like(out).copy_(cotangent))]


def attention_of_the_cpu():
    """Forward and backward as kernels of the executor take arguments."""
    aten = torch.ops.aten

    def forward(query, key, value, bias, dropout_p, is_causal, scale):
        actual = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
        return *actual, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)

    def backward(g, query, key, value, bias, out, sums, seed, offset, dropout_p, is_causal, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            g, query, key, value, out, sums, dropout_p, is_causal, attn_mask=bias, scale=scale
        )

    return forward, backward


# ----------------------------------------------------------------------------------------------------------------
# groups of heads


def interleaved(x, n):
    return x.repeat_interleave(n, dim=1)


def interleaved_by_position(x, n):
    return torch.repeat_interleave(x, n, -3)


def expanded(x, n):
    b, h, t, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, t, d).reshape(b, h * n, t, d)


def unsqueezed(x, n):
    return x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2)


def elided(x, n):
    b, h, t, d = x.shape
    return x[:, :, None, ...].expand(b, h, n, t, d).reshape(b, n * h, t, d)


REPETITIONS = [interleaved, interleaved_by_position, expanded, unsqueezed, elided]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("repeat", REPETITIONS)
def test_repeated_keys_and_values_are_not_made(repeat, device):
    def attend(q, k, v):
        return scaled_dot_product_attention(q, repeat(k, 3), repeat(v, 3), is_causal=True)

    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = [heads(n, device=device, dtype=dtype) for n in (6, 2, 2)]
    compiled = thunder.jit(attend, executors=["sdpa"])
    results_and_gradients, expected = with_gradients(compiled, *inputs), with_gradients(attend, *inputs)
    (attention,) = names(thunder.last_traces(compiled)[-1])
    assert attention in ("flash_attention", "sdpa_cudnn")
    for a, b in zip(results_and_gradients, expected, strict=True):
        torch.testing.assert_close(a, b, **({} if device == "cpu" else {"atol": 0.06, "rtol": 0.02}))
    saved = thunder.last_traces(compiled)[-1].output[1][0]
    assert sorted(p.shape[1] for p in saved if len(p.shape) == 4 and p.dtype.name == inputs[0].dtype.__str__()[6:]) == [
        2,
        2,
        6,
        6,
    ]
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(*inputs), attend(*inputs), **({} if device == "cpu" else {"atol": 0.02, "rtol": 0.02})
        )
    assert names(thunder.last_traces(compiled)[-1]) == ["scaled_dot_product_attention"]


chosen = torch.tensor([1, 0])


@pytest.mark.parametrize(
    "attend",
    [
        # heads in another order
        lambda q, k, v: scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)),
        lambda q, k, v: scaled_dot_product_attention(
            q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 2)[:, :, ::3].repeat(1, 3, 1, 1)
        ),
        lambda q, k, v: scaled_dot_product_attention(
            q,
            k[:, None].expand(2, 3, 2, 24, 16).reshape(2, 6, 24, 16),
            v[:, None].expand(2, 3, 2, 24, 16).reshape(2, 6, 24, 16),
        ),
        lambda q, k, v: scaled_dot_product_attention(
            q[:, :, :2], k.repeat_interleave(12, 2).transpose(1, 2)[:, :6, :2], v.repeat_interleave(3, 1)[:, :, :2]
        ),
        lambda q, k, v: scaled_dot_product_attention(
            q, *(x[:, chosen, None].expand(2, 2, 3, 24, 16).reshape(2, 6, 24, 16) for x in (k, v))
        ),
    ],
    ids=["tiled", "keys alone", "expanded before", "along another dimension", "chosen heads"],
)
def test_other_repetitions_are_made(attend):
    torch.manual_seed(0)
    inputs = [heads(n) for n in (6, 2, 2)]
    if "12" in str(attend.__code__.co_consts):
        inputs[1] = heads(2, 24)
    compiled = thunder.jit(attend, executors=["sdpa"])
    for a, b in zip(with_gradients(compiled, *inputs), with_gradients(attend, *inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_a_repetition_that_others_read_stays():
    def attend(q, k, v):
        wide = interleaved(k, 3)
        return scaled_dot_product_attention(q, wide, interleaved(v, 3)) + wide.sum()

    inputs = [heads(n) for n in (6, 2, 2)]
    compiled = thunder.jit(attend, executors=["sdpa"])
    for a, b in zip(with_gradients(compiled, *inputs), with_gradients(attend, *inputs), strict=True):
        torch.testing.assert_close(a, b)
    assert names(thunder.last_traces(compiled)[-1]).count("repeat_interleave") == 1


# ---------------------------------------------------------------------------------------------------------------- the
# choice


def described(length=16, grad=True):
    return tuple(((2, 4, length, 16), torch.bfloat16, torch.device("cuda"), grad) for _ in range(3))


def allow(monkeypatch, *usable):
    for name in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(
            torch.backends.cuda, f"can_use_{name}_attention", lambda arguments, name=name: name in usable
        )


@pytest.mark.parametrize(
    "usable, order, products, expected",
    [
        (("cudnn", "flash", "efficient"), None, True, "cudnn"),
        (("flash", "efficient"), None, True, "flash"),
        (("efficient",), None, True, "efficient"),
        ((), None, True, None),
        (("cudnn", "flash", "efficient"), (2, 1, 3, 0, 4), True, "efficient"),
        (("cudnn", "flash", "efficient"), (0, 2, 1, 3, 4), True, None),
        (("cudnn", "flash", "efficient"), (0, 2, 1, 3, 4), False, "efficient"),
    ],
)
def test_the_fastest_that_may_be_used_unless_the_user_gave_an_order(monkeypatch, usable, order, products, expected):
    allow(monkeypatch, *usable)
    sdpaex._usable.cache_clear()
    is_usable = sdpaex._usable(described(), 0.0, True, False, (True, True, products, True, False, order))
    sdpaex._usable.cache_clear()
    assert (is_usable and is_usable.name) == expected


@pytest.mark.parametrize(
    "usable, numbers, dropout_p, masked, expected",
    [
        (("cudnn", "flash", "efficient"), True, 0.0, False, "by_size"),
        (("cudnn", "flash", "efficient"), True, 0.1, False, "cudnn"),
        (("cudnn", "flash", "efficient"), False, 0.0, False, "cudnn"),
        (("cudnn", "efficient"), True, 0.0, False, "cudnn"),
        (("flash", "efficient"), True, 0.0, False, "flash"),
        (("cudnn", "efficient"), True, 0.0, True, "by_size"),
        (("cudnn",), True, 0.0, True, "cudnn"),
        (("cudnn", "efficient"), False, 0.0, True, "cudnn"),
    ],
)
def test_a_program_of_many_sizes_plans_for_those_that_come_back(
    monkeypatch, usable, numbers, dropout_p, masked, expected
):
    allow(monkeypatch, *usable)
    monkeypatch.setattr(sdpaex, "has_numbers", lambda tensors: numbers)
    query = TensorProxy(shape=(2, 4, 16, 16), device=to_device("cuda:0"), dtype=bfloat16)
    mask = TensorProxy(shape=(2, 1, 1, 16), device=to_device("cuda:0"), dtype=bfloat16) if masked else None
    sdpaex._usable.cache_clear()
    backend = sdpaex._choose(sdpaex._usable, query, query, query, mask, dropout_p, False, False)
    sdpaex._usable.cache_clear()
    assert backend.name == expected


def test_a_plan_is_made_when_calls_of_a_size_are_worth_it(monkeypatch):
    """Of both directions, with flash attention before; without grad as well."""
    forward, backward = attention_of_the_cpu()
    ran = []
    for name in ("cudnn", "flash"):

        def run(*args, name=name):
            out, sums, *drawn = forward(*args)
            ran.append((name, "forward"))
            return out, sums[..., None] if name == "cudnn" else sums, *drawn

        def run_backward(g, query, key, value, bias, out, sums, *rest, name=name):
            ran.append((name, "backward"))
            assert sums.dim() == (4 if name == "cudnn" else 3)
            return backward(g, query, key, value, bias, out, sums.view(query.shape[:3]), *rest)

        monkeypatch.setattr(sdpaex, f"_{name}", run)
        monkeypatch.setattr(sdpaex, f"_{name}_backward", run_backward)
    monkeypatch.setattr(sdpaex, "_choose", lambda *args: sdpaex.BY_SIZE)
    monkeypatch.setattr(sdpaex, "WORTH_A_PLAN", 2 * 2 * 4 * 24 * 24 * 16 * 3)  # three forwards of length 24
    sdpaex._work.clear()
    compiled = thunder.jit(lambda *x: scaled_dot_product_attention(*x), executors=["sdpa"])
    torch.manual_seed(0)
    for _ in range(5):
        inputs = [heads(4) for _ in range(3)]
        results_and_gradients, want = (with_gradients(f, *inputs) for f in (compiled, scaled_dot_product_attention))
        for a, b in zip(results_and_gradients, want, strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), want[0])
    sdpaex._work.clear()
    assert [name for name, direction in ran if direction == "forward"] == ["flash"] * 2 + ["cudnn"] * 4
    assert [name for name, direction in ran if direction == "backward"] == ["flash"] * 2 + ["cudnn"] * 3


def test_calls_of_little_work_are_not_counted(monkeypatch):
    """A token that is decoded makes no size worth a plan, and each has another size."""
    monkeypatch.setattr(sdpaex, "_work", collections.Counter())
    for keys in range(100, 200):
        token, key = (torch.empty(1, heads, n, 128, device="meta") for heads, n in ((16, 1), (8, keys)))
        assert not sdpaex._is_planned(False, token, key, None, False)
    assert not sdpaex._work
    prompt = torch.empty(1, 16, 2048, 128, device="meta")
    assert not sdpaex._is_planned(False, prompt, prompt, None, True)
    assert len(sdpaex._work) == 1


@GPU
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "is_causal, groups, masked, queries",
    [(True, 1, False, 120), (False, 2, False, 120), (False, 1, True, 120), (False, 2, True, 120), (False, 4, True, 1)],
)
def test_kernels_of_a_size_in_turns(monkeypatch, first, is_causal, groups, masked, queries):
    """A plan of cuDNN's is the process's: what ran before on the same sizes changes no gradient."""

    def attend(x):
        q, k, v = x.split([8, 8 // groups, 8 // groups], dim=1)
        mask = (torch.arange(x.shape[2], device=x.device) < 77)[None, None, None] if masked else None
        q = q[:, :, -1:] if queries == 1 else q
        return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=groups > 1)

    torch.manual_seed(0)
    compiled = thunder.jit(attend, dynamic=True)
    for planned in (first, not first) * 2:
        monkeypatch.setattr(sdpaex, "_is_planned", lambda *args, planned=planned: planned)
        x = heads(8 + 16 // groups, 120, 64, device="cuda", dtype=torch.bfloat16)
        results_and_gradients = with_gradients(compiled, x)
        assert "sdpa_by_size" in names(thunder.last_traces(compiled)[-1])
        for a, b, c in zip(
            results_and_gradients, with_gradients(attend, x.double()), with_gradients(attend, x), strict=True
        ):
            assert (a - b).norm() <= 1.5 * (c - b).norm()
        with torch.no_grad():
            assert torch.equal(compiled(x), results_and_gradients[0])
        assert "sdpa_by_size_without_grad" in names(thunder.last_traces(compiled)[-1])


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_backward_is_that_of_the_kernel_that_ran(monkeypatch, masked, planned):
    """Whatever is planned meanwhile. It gets the result and the sums in the layout that its forward gave them."""
    forward, backward = attention_of_the_cpu()
    options = {}

    def run_as(name):
        def run(query, *rest):
            out, sums, *drawn = forward(query, *rest)
            rows = torch.full((*sums.shape[:2], 32), math.inf)  # padded, as kernels leave them
            rows[..., : sums.shape[2]] = sums[..., : sums.shape[2]]
            sums = rows[:, :, : query.shape[2], None] if name == "cudnn" else rows
            options.update(name=name, out=out, sums=sums)
            return out, sums, *drawn

        return run

    def backward_as(name):
        def run(g, query, key, value, bias, out, sums, *rest):
            assert options["name"] == name and out is options["out"]
            if name == "cudnn":
                assert sums.stride() == options["sums"].stride() and sums.data_ptr() == options["sums"].data_ptr()
            return backward(g, query, key, value, bias, out, sums[:, :, : query.shape[2]].reshape(out.shape[:3]), *rest)

        return run

    for name in ("cudnn", "flash", "efficient"):
        monkeypatch.setattr(sdpaex, f"_{name}", run_as(name))
        monkeypatch.setattr(sdpaex, f"_{name}_backward", backward_as(name))
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 24, 16) for _ in range(3)]
    bias = torch.randn(2, 4, 24, 24) if masked else None
    monkeypatch.setattr(sdpaex, "_is_planned", lambda *args: planned)
    out, sums, *drawn = sdpaex._by_size(*inputs, bias, 0.0, False, None)
    monkeypatch.setattr(sdpaex, "_is_planned", lambda *args: not planned)
    g = torch.randn(out.shape)
    actual = sdpaex._by_size_backward(g, *inputs, bias, out, sums, *drawn, 0.0, False, None)
    wanted = torch.autograd.functional.vjp(
        lambda *x: scaled_dot_product_attention(*x, attn_mask=bias), tuple(inputs), g
    )[1]
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("queries", [1, 24])
@pytest.mark.parametrize("shape", [(2, 1, 1, 24), (2, 6, 1, 24), (1, 1, 1, 1), (6, 1, 24), (1, 24)])
def test_the_kernel_of_as_many_heads_takes_groups(monkeypatch, groups, queries, shape):
    """Until a size has a plan, keys and values with a mask: queries of a group are rows, or keys are repeated."""

    def as_many(*tensors):
        assert len({x.shape[1] for x in tensors}) == 1

    def efficient(query, key, value, bias, dropout_p, is_causal, scale):
        as_many(query, key, value)
        bias = bias.expand(*query.shape[:3], key.shape[2])
        sums = (query @ key.mT * query.shape[-1] ** -0.5 + bias).logsumexp(-1)
        sums = torch.nn.functional.pad(sums, (0, -query.shape[2] % 32), value=float("inf"))
        return scaled_dot_product_attention(query, key, value, bias), sums, None, None

    def efficient_backward(g, query, key, value, bias, out, sums, *rest):
        as_many(query, key, value, g, out, sums)
        assert torch.isinf(sums[:, :, queries:]).all()
        torch.testing.assert_close(sums, efficient(query, key, value, bias, 0.0, False, None)[1])
        return torch.autograd.functional.vjp(
            lambda *x: scaled_dot_product_attention(*x, attn_mask=bias), (query, key, value), g
        )[1]

    monkeypatch.setattr(sdpaex, "_efficient", efficient)
    monkeypatch.setattr(sdpaex, "_efficient_backward", efficient_backward)
    monkeypatch.setattr(sdpaex, "_is_planned", lambda *args: False)
    torch.manual_seed(0)
    inputs = [heads(6, queries, dtype=torch.float64), *(heads(6 // groups, dtype=torch.float64) for _ in range(2))]
    bias = torch.randn(shape, dtype=torch.float64)

    def attend(*arguments):
        return scaled_dot_product_attention(*arguments, attn_mask=bias, enable_gqa=True)

    out, sums, *drawn = sdpaex._by_size(*inputs, bias, 0.0, False, None)
    g = torch.randn_like(out)
    actual = sdpaex._by_size_backward(g, *inputs, bias, out, sums, *drawn, 0.0, False, None)
    expected, gradients = torch.autograd.functional.vjp(attend, tuple(inputs), g)
    for a, b in zip((out, *actual), (expected, *gradients), strict=True):
        torch.testing.assert_close(a, b)


def test_backends_that_the_program_sets_itself():
    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            a = scaled_dot_product_attention(q, k, v, is_causal=True)
        return a, scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    inputs = [heads(4) for _ in range(3)]
    compiled = thunder.jit(attend)
    before = torch.backends.cuda.flash_sdp_enabled()
    for a, b in zip(compiled(*inputs), attend(*inputs), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(*attend(*inputs)), "the two ways round otherwise"
    assert torch.backends.cuda.flash_sdp_enabled() == before
    for a, b in zip(
        with_gradients(lambda *x: compiled(*x)[0], *inputs),
        with_gradients(lambda *x: attend(*x)[0], *inputs),
        strict=True,
    ):
        assert torch.equal(a, b)


# ----------------------------------------------------------------------------------------------------------------
# layouts of biases


def biases(queries, keys, device="cpu", dtype=torch.float32):
    """Biases of 2 batches of 4 heads, by each shape that broadcasts, order of dimensions in memory, and place in a
    larger tensor."""
    for shape in itertools.product((1, 2), (1, 4), (1, queries), (1, keys)):
        for order in itertools.permutations(range(4)):
            back = [order.index(d) for d in range(4)]
            dense = torch.randn([shape[d] for d in order], device=device, dtype=dtype)
            yield dense.permute(back)
            yield torch.nn.functional.pad(dense, (3, 2) * 4)[(slice(3, -2),) * 4].permute(back)
    yield torch.randn(queries, keys, device=device, dtype=dtype)
    yield torch.randn(keys, queries, device=device, dtype=dtype).T
    yield torch.randn(keys, device=device, dtype=dtype)


@pytest.mark.parametrize("queries, keys", [(16, 32), (3, 5), (1, 16), (16, 1), (40, 24)])
def test_the_kernel_is_given_biases_as_it_reads_them(monkeypatch, queries, keys):
    def record(name):  # the bias comes after query, key and value, and in the backward after a cotangent
        return lambda *args, **kwargs: (args[4 if name.endswith("backward") else 3],) * 4

    monkeypatch.setattr(sdpaex.compat, "kernel", record)
    query, key = torch.empty(2, 4, queries, 8), torch.empty(2, 4, keys, 8)
    for bias in biases(queries, keys):
        forward = sdpaex._efficient(query, key, key, bias, 0.0, False, None)
        backward = sdpaex._efficient_backward(query, query, key, key, bias, query, query, None, None, 0.0, False, None)
        for aligned in (forward[0], backward[0]):
            assert torch.equal(aligned, bias.expand(2, 4, queries, keys))
            assert aligned.stride(-1) == 1 and aligned.data_ptr() % 16 == 0
            assert not any(s % 16 for s in aligned.stride()[:-1])


def test_a_bias_that_is_aligned_is_not_copied():
    for bias in (torch.randn(1, 4, 16, 32), torch.randn(16, 32), torch.randn(2, 1, 1, 64)[..., 16:48]):
        query, key = torch.empty(2, 4, 16, 8), torch.empty(2, 4, 32, 8)
        assert sdpaex._aligned(bias, query, key).data_ptr() == bias.data_ptr()


# ----------------------------------------------------------------------------------------------------------------
# kernels

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def deviations(actual, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(actual, exact, strict=True)]


def check(attend, inputs, expected, backends=None):
    """As near to float64 as eager with the same kernels, with eager's layout."""
    compiled = thunder.jit(attend, executors=["sdpa"], debug_options=thunder.DebugOptions(check_traces=True))
    with sdpa_kernel(backends) if backends is not None else contextlib.nullcontext():
        results_and_gradients, eager = with_gradients(compiled, *inputs), with_gradients(attend, *inputs)
    with sdpa_kernel(SDPBackend.MATH):
        exact = with_gradients(lambda *x: attend(*x), *(x.double() for x in inputs))
    ran = names(thunder.last_traces(compiled)[-1])
    assert f"sdpa_{expected}" in ran
    assert f"sdpa_{expected}_backward" in names(thunder.last_backward_traces(compiled)[-1])
    for ours, theirs in zip(deviations(results_and_gradients, exact), deviations(eager, exact), strict=True):
        assert ours <= 1.5 * theirs + 1e-5
    for a, b in zip(results_and_gradients, eager, strict=True):
        assert a.stride() == b.stride() and a.dtype is b.dtype
    return compiled


@GPU
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.2}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kernel_is_eagers(name, options, dtype):
    torch.manual_seed(0)
    inputs = [heads(4, 160, 64, device="cuda", dtype=dtype) for _ in range(3)]
    check(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), inputs, name, BACKENDS[name])


@GPU
def test_without_flags_it_is_pytorchs_choice():
    torch.manual_seed(0)
    inputs = [heads(4, 160, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    compiled = check(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs, "cudnn")
    assert torch._fused_sdp_choice(*inputs, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with_gradients(compiled, *inputs)
        assert "sdpa_flash" in names(thunder.last_traces(compiled)[-1])
    with_gradients(compiled, *inputs)
    assert "sdpa_cudnn" in names(thunder.last_traces(compiled)[-1]) and thunder.cache_misses(compiled) == 2
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (with_gradients(compiled, *inputs) for _ in range(2))
        assert thunder.cache_misses(compiled) == 3 and "sdpa_cudnn" not in names(thunder.last_traces(compiled)[-1])
        assert all(map(torch.equal, first, second))
    finally:
        torch.use_deterministic_algorithms(False)


@GPU
@pytest.mark.parametrize("mask", ["bool", "float", "float with grad"])
@pytest.mark.parametrize("length", [128, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks(mask, length, dtype):
    torch.manual_seed(0)
    inputs = [heads(4, length, 64, device="cuda", dtype=dtype) for _ in range(3)]
    hidden = torch.rand(2, 1, length, length, device="cuda") > 0.3
    bias = torch.randn(length, length, device="cuda", dtype=dtype)
    arguments = [*inputs, bias] if mask == "float with grad" else inputs

    def attend(q, k, v, learned=None):
        m = learned if learned is not None else hidden if mask == "bool" else bias
        return scaled_dot_product_attention(q, k, v, attn_mask=m if m.dtype is torch.bool else m.to(q.dtype))

    check(attend, arguments, "efficient", SDPBackend.EFFICIENT_ATTENTION)
    if dtype is torch.bfloat16:
        check(attend, arguments, "efficient" if mask == "float with grad" else "cudnn")


@GPU
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("kernel", [sdpaex._cudnn, sdpaex._efficient])
def test_biases_of_every_layout(kernel, dropout_p):
    backward = {
        sdpaex._cudnn: sdpaex._cudnn_backward,
        sdpaex._efficient: sdpaex._efficient_backward,
    }[kernel]
    query, key = (heads(4, length, 64, device="cuda", dtype=torch.bfloat16) for length in (24, 40))
    for bias in biases(24, 40, "cuda", torch.bfloat16):
        results = []
        for bias_layout in (bias, bias.contiguous()):
            torch.manual_seed(3)
            out = kernel(query, key, key, bias_layout, dropout_p, False, None)
            results.append((out[0], *backward(query, query, key, key, bias_layout, *out, dropout_p, False, None)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@GPU
def test_full_precision_and_odd_sizes():
    torch.manual_seed(0)
    inputs = [heads(4, 96, 64, device="cuda") for _ in range(3)]
    check(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs, "efficient")
    narrow = [heads(4, 96, 20, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    compiled = thunder.jit(scaled_dot_product_attention, executors=["sdpa"], dynamic=False)
    for a, b in zip(
        with_gradients(compiled, *narrow), with_gradients(scaled_dot_product_attention, *narrow), strict=True
    ):
        torch.testing.assert_close(a, b, atol=0.03, rtol=0.03)
    # the last dimension is not dense, which the kernel is not given
    across = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        exact = with_gradients(scaled_dot_product_attention, *(x.double() for x in inputs))
    for ours, dense in zip(
        *(deviations(with_gradients(compiled, *tensors), exact) for tensors in (across, inputs)), strict=True
    ):
        assert ours <= 1.5 * dense + 1e-6
    assert "sdpa_efficient" in names(thunder.last_traces(compiled)[-1])


@GPU
@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_draws_what_eager_draws(name):
    inputs = [heads(4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    compiled = thunder.jit(attend, executors=["sdpa"])
    with sdpa_kernel(BACKENDS[name]):
        results = []
        for run in (compiled, attend):
            torch.manual_seed(3)
            results.append(with_gradients(run, *inputs))
        assert any("with_dropout" in n for n in names(thunder.last_traces(compiled)[-1]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)
    assert torch.equal(results[0][0], results[1][0])


@GPU
def test_second_derivatives():
    torch.manual_seed(0)
    inputs = [heads(2, 16, 16, device="cuda").requires_grad_() for _ in range(3)]
    compiled = thunder.jit(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), executors=["sdpa"])

    def second(f):
        (g,) = torch.autograd.grad(f(*inputs).square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(g.square().sum(), inputs)

    actual = second(compiled)
    with sdpa_kernel(SDPBackend.MATH):
        exact = second(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    for a, b in zip(actual, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------------- the
# way around a kernel, with one that the CPU has


@pytest.fixture
def on_the_cpu(monkeypatch):
    """A kernel for the CPU in the place of those for GPUs."""
    kernel = sdpaex.attention_kernel(
        "cpu", 9, *attention_of_the_cpu(), lambda b, h, n: (b, h, n), sdpaex._on_the_host, float("-inf")
    )
    monkeypatch.setattr(sdpaex, "_choose", lambda *args: kernel)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.2},
        {"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril()},
        {"attn_mask": torch.ones(24, 24).tril().log()},
    ],
)
def test_forward_and_backward_are_lines(on_the_cpu, options):
    torch.manual_seed(0)
    inputs = [heads(4) for _ in range(3)]
    compiled = thunder.jit(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), executors=["sdpa"])
    for a, b in zip(
        with_gradients(compiled, *inputs),
        with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), *inputs),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert (
        names(thunder.last_traces(compiled)[-1])[-1:] == ["sdpa_cpu"]
        and names(thunder.last_backward_traces(compiled)[-1])[0] == "sdpa_cpu_backward"
    )
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), scaled_dot_product_attention(*inputs, **options))
    converts = getattr(options.get("attn_mask"), "dtype", None) is torch.bool  # which layers share
    assert ("sdpa_cpu_without_grad" in names(thunder.last_traces(compiled)[-1])) == converts


@pytest.mark.parametrize("shape", [(2, 3, 5, 24, 8), (6, 24, 8), (2, 1, 2, 3, 24, 8)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.2}])
def test_windows_and_missing_heads_are_four_dimensions(monkeypatch, on_the_cpu, shape, options):
    choose = sdpaex._choose
    is_four = lambda usable, query, *rest: choose() if len(query.shape) == 4 else None  # noqa: E731
    monkeypatch.setattr(sdpaex, "_choose", is_four)
    torch.manual_seed(0)
    inputs = [torch.randn(shape).transpose(0, -3).requires_grad_() for _ in range(3)]
    compiled = thunder.jit(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), executors=["sdpa"])
    for a, b in zip(
        with_gradients(compiled, *inputs),
        with_gradients(lambda q, k, v: scaled_dot_product_attention(q, k, v, **options), *inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert "sdpa_cpu" in names(thunder.last_traces(compiled)[-1])
    masked = thunder.jit(lambda q, k, v, m: scaled_dot_product_attention(q, k, v, m), executors=["sdpa"])
    masked(*inputs, torch.ones(24, 24, dtype=torch.bool))
    assert "sdpa_cpu" not in names(thunder.last_traces(masked)[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fuser takes the GPU's tensors there, this kernel the CPU's")
def test_layers_without_grad_share_what_is_made_of_a_mask(on_the_cpu):
    def attend(x, mask):
        for _ in range(3):
            x = scaled_dot_product_attention(x, x, x, mask)
        return x

    x, mask = heads(4), torch.ones(24, 24, dtype=torch.bool).tril()
    compiled = thunder.jit(attend, executors=["sdpa", "triton_fuser"])
    with torch.no_grad():
        assert torch.equal(compiled(x, mask), attend(x, mask))
    bias, *attention = names(thunder.last_traces(compiled)[-1])
    assert bias in ("attention_bias", "TritonFusion0") and attention == ["sdpa_cpu_without_grad"] * 3


def joined_with_nothing(x):
    return torch.cat([torch.tensor([], dtype=x.dtype), x], -2)


@pytest.mark.parametrize("copy", [joined_with_nothing, torch.clone, torch.Tensor.contiguous])
def test_keys_and_values_are_read_where_they_are(on_the_cpu, copy):
    """As a cache gives them that was empty."""

    def attend(x, w):
        q, k, v = ((x @ w).view(2, 24, 3, 4, 8)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, copy(k), copy(v), is_causal=True)

    torch.manual_seed(0)
    inputs = torch.randn(2, 24, 32), torch.randn(32, 96)
    compiled = thunder.jit(attend, executors=["sdpa"])
    for a, b in zip(with_gradients(compiled, *inputs), with_gradients(attend, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert a.stride() == b.stride()
    assert not {"cat", "clone", "contiguous", "tensor"} & set(names(thunder.last_traces(compiled)[-1]))


@pytest.mark.parametrize("at", [slice(1, 9), slice(None, None, 2)])
def test_keys_that_begin_at_odd_places_are_copied(on_the_cpu, at):
    def attend(x, w):
        k = (x @ w).view(2, 24, 4, 16).transpose(1, 2)[..., at]
        return scaled_dot_product_attention(k.clone(), k.contiguous(), k.contiguous())

    torch.manual_seed(0)
    inputs = torch.randn(2, 24, 32), torch.randn(32, 64)
    compiled = thunder.jit(attend, executors=["sdpa"])
    for a, b in zip(with_gradients(compiled, *inputs), with_gradients(attend, *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert "contiguous" in names(thunder.last_traces(compiled)[-1])


def test_a_bias_that_is_aligned_stays():
    biases = torch.randn(3, 5, 7), torch.randn(3, 1, 16)[..., :9]
    for bias in biases:
        once = sdpaex._run_aligned(bias, bias.shape[-1])
        assert once.stride(-1) == 1 and all(n % 16 == 0 for n in once.stride()[:-1]) and torch.equal(once, bias)
        assert sdpaex._run_aligned(once, bias.shape[-1]).data_ptr() == once.data_ptr()


def test_only_wanted_gradients_and_second_ones(on_the_cpu):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3)]
    compiled = thunder.jit(lambda q, k, v: scaled_dot_product_attention(q, k, v), executors=["sdpa"])
    assert torch.autograd.gradgradcheck(compiled, [x.clone().requires_grad_() for x in inputs])
    key = inputs[1].clone().requires_grad_()
    (gradients,) = torch.autograd.grad(compiled(inputs[0], key, inputs[2]).sum(), key)
    (expected,) = torch.autograd.grad(scaled_dot_product_attention(inputs[0], key, inputs[2]).sum(), key)
    assert torch.equal(gradients, expected)
