"""Programs under torch.autocast, around the call and inside: results, gradients and their dtypes are eager's, and
nothing of it is left behind."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder
from tests.capture.agreement import assert_as_exact, assert_same
from thunder import compat
from thunder.errors import OptionError
from thunder.executors.torchex import no_autocast

BF16, FP16 = torch.bfloat16, torch.float16


def under(dtype=BF16, **options):
    return torch.autocast("cpu", dtype, **options)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)


def once(x, w):
    return torch.mm(x, w)


def tied(x, w):
    return torch.mm(x, w) + torch.mm(w, x)


def squared(x, w):
    return torch.mm(w, w)


def activation_used_twice(x, w):
    y = x * w
    return torch.mm(y, w) + torch.mm(w, y)


def views(x, w):
    return torch.mm(w.t(), x) + torch.mm(x, w.t())


def region(x, w):
    with under():
        y = torch.mm(x, w)
    return torch.mm(y.float(), w)


def two_regions(x, w):
    with under():
        y = torch.mm(x, w)
    with under(FP16):
        return torch.mm(x, w).float() + y


def nested(x, w):
    with under():
        a = torch.mm(x, w)
        with under(enabled=False):
            b = torch.mm(a.float(), w)
        with under(FP16):
            c = torch.mm(x, x)
        return a + b + c + torch.mm(w, x)


def stale(x, w):
    """Eager's cache does not know dtypes: what an inner region cast is found by the outer one."""
    with under():
        with under(FP16):
            a = torch.mm(w, w)
        return a + torch.mm(w, w)


def disabled(x, w):
    with under(enabled=False):
        return torch.mm(x, w)


@under()
def decorated(x, w):
    return torch.mm(x, w)


@no_autocast
def undecorated(x, w):
    return torch.mm(x, w)


def functions(x, w):
    return F.softmax(F.linear(x, w), -1) @ F.layer_norm(x, (4,)).exp() + F.mse_loss(x, w)


def opaque(x, w):
    return torch.linalg.qr(x)[1] @ w + torch.pdist(w).sum()


def local_response(x, w):
    return F.local_response_norm((x @ w)[None, None], 3)


def without_grad(x, w):
    with torch.no_grad():
        y = torch.mm(w, w)
    return torch.mm(w, w) + y


def written(x, w):
    y = torch.zeros(4, 4)
    y += torch.mm(x, w)
    return y


def asks(x, w):
    return (x * 2 if torch.is_autocast_enabled("cpu") else x) @ w.to(torch.get_autocast_dtype("cpu")).float()


class Casting(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.mm(w.t()), x.t().mm(g)


class Following(Casting):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)


class Plain(Casting):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.float().mm(w.t()), x.t().mm(g.float())


class Once(Casting):
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.mm(w.t()), x.t().mm(g)


def custom(function):
    def program(x, w):
        return function.apply(x * 1, w)

    program.__name__ = function.__name__
    return program


PROGRAMS = [
    once, tied, squared, activation_used_twice, views, region, two_regions, nested, stale, disabled, decorated,
    undecorated, functions, opaque, local_response,
    without_grad, written, asks, *map(custom, (Casting, Following, Plain, Once)),
]  # fmt: skip


def outcome(function, x, w, around) -> tuple:
    """The result of a call, and the gradient outside of autocast; the words of the error where there is one: casts that
    were kept do not fit everywhere."""
    try:
        with around:
            y = function(x, w)
    except RuntimeError as error:
        return (str(error),)
    return y.detach(), *(torch.autograd.grad(y.float().sum(), w) if y.requires_grad else ())


AROUND = {
    "nothing": lambda: under(enabled=False), "bfloat16": under, "float16": lambda: under(FP16),
    "without cache": lambda: under(cache_enabled=False),
    "both devices": lambda: compat.autocast_on((("cpu", BF16), ("cuda", FP16)), cached=True),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_results_and_gradients_are_those_of_eager_in_every_state(program):
    """One compiled function is called in all states, twice each."""
    x, w = operands()
    compiled = thunder.jit(program)
    for _ in range(2):
        for name, around in AROUND.items():
            got, want = outcome(compiled, x, w, around()), outcome(program, x, w, around())
            if program is views:  # whose products read other layouts in the backward
                exact = outcome(program, x.double(), w.detach().double().requires_grad_(), under(enabled=False))
                for a, b, c in zip(got, want, exact, strict=True):
                    assert_as_exact(a, b, c, name)
            else:
                assert_same(got, want, name)
    assert thunder.cache_hits(compiled) == len(compiled._lc_cs.interpreter_cache) >= 1


def test_a_checkpoint_computes_the_same_and_adds_gradients_up_in_float32():
    def program(x, w):
        return checkpoint(lambda a: torch.mm(torch.mm(a, w).relu(), w), x, use_reentrant=False) @ w

    x, w = operands()
    (y, g), (want, gradient) = outcome(thunder.jit(program), x, w, under()), outcome(program, x, w, under())
    assert torch.equal(y, want)
    exact = outcome(program, x.double(), w.detach().double().requires_grad_(), under(enabled=False))[1]
    assert g.dtype is gradient.dtype and (g - exact).abs().max() <= 2 * (gradient - exact).abs().max()


def test_a_parameter_is_cast_once_and_only_while_autocast_stays():
    x, w = operands()

    def casts(program, around) -> int:
        compiled = thunder.jit(program)
        with around:
            compiled(x, w)
        return sum(
            line.sym.name == "to" and line.args[0].name == "w"
            for line in thunder.last_traces(compiled)[0].bound_symbols
        )

    assert casts(tied, under()) == 1 and casts(tied, under(cache_enabled=False)) == 2
    assert casts(two_regions, nullcontext()) == 2 and casts(nested, nullcontext()) == 1


def test_a_program_that_raises_inside_leaves_nothing_behind():
    def program(x, fails):
        with under():
            y = torch.mm(x, x)
            if fails:
                raise ValueError("as asked")
        return torch.mm(y.float(), x)

    x, _ = operands()
    compiled = thunder.jit(program)
    for _ in range(2):
        with pytest.raises(ValueError, match="as asked"):
            compiled(x, True)
        assert not torch.is_autocast_enabled("cpu") and compat.autocast_nesting() == 0
        assert_same(compiled(x, False), program(x, False))
    with under():
        compiled(x, False)
    longer = torch.cat([x, x])  # a new shape, compiled outside after a call inside
    assert thunder.jit(lambda a, b: torch.mm(a, b))(longer, x).dtype is torch.float32
    assert_same(thunder.jit(program)(x, False), program(x, False))


def test_a_computation_that_raises_leaves_nothing_behind():
    def program(x, i):
        with under():
            return torch.mm(x, x)[i]

    x, _ = operands()
    compiled = thunder.jit(program)
    compiled(x, torch.tensor([0]))
    with under(), pytest.raises((RuntimeError, IndexError)):
        compiled(x, torch.tensor([7]))
    with under():
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_a_custom_operator_computes_under_autocast():
    @torch.library.custom_op("thunder_numerics::mm", mutates_args=())
    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b)

    @mm.register_fake
    def _(a, b):
        return torch.mm(a, b)

    x, _ = operands()
    compiled = thunder.jit(lambda x: mm(x, x))
    for around in (under(), under(enabled=False), under()):
        with around:
            assert_same(compiled(x), mm(x, x))


# ----------------------------------------------------------------------------------------------------------------
# thunder.autocast


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_transform_computes_what_torch_autocast_computes(program, dtype):
    x, w = operands()
    compiled = thunder.jit(program, transforms=[thunder.autocast(dtype)])
    want = outcome(program, x, w, under(dtype))
    for _ in range(2):
        got = outcome(compiled, x, w, nullcontext())
        if isinstance(want[0], str):
            assert (
                "expected m1 and m2 to have the same dtype" in want[0]
                and "expected m1 and m2 to have the same dtype" in got[0]
            )
        else:
            assert_same(got, want)
    assert len(compiled._lc_cs.interpreter_cache) == thunder.cache_hits(
        compiled
    ) <= 1 and not torch.is_autocast_enabled("cpu")


def test_the_transform_of_a_module():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 8)
    compiled = thunder.jit(model, transforms=[thunder.autocast(BF16)])
    with under():
        want = model(x)
    assert_same(compiled(x), want)
    assert [p.dtype for p in compiled.parameters()] == [torch.float32] * 6
    assert "thunder.autocast(torch.bfloat16" in repr(thunder.list_transforms(compiled))


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": torch.float32}, {"dtype": "bfloat16"}, {"devices": "cpu"}, {"devices": ("tpu",)}, {"devices": ()}],
)
def test_wrong_arguments_of_the_transform(wrong):
    with pytest.raises(OptionError, match="valid: "):
        thunder.autocast(**wrong)
