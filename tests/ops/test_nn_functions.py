"""Functions of neural networks that are defined in terms of others, that write to their arguments, or that only some
devices have: programs against eager."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves

import thunder
import thunder.torch as ltorch
from benchmarks.training import CountCalls
from tests.ops.harness import by_decomposition
from thunder import compat
from thunder.errors import CaptureError
from thunder.examine import examine
from thunder.ops.families.random import _philox

# PyTorch's own, of what it deprecates
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def rand(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


def signs(n: int):
    return torch.tensor([1.0, -1.0] * n)[:n]


def quantized(f):
    return lambda *arguments: f(torch.quantize_per_tensor(arguments[0], 0.1, 3, torch.quint8), *arguments[1:])


def packed_product(*arguments):
    x, w, b = (t.detach() for t in arguments)
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, torch.fbgemm_pack_gemm_matrix_fp16(w), b)


def observed(*arguments):
    state = [t.clone() for t in arguments[3:7]]
    return torch.fused_moving_avg_obs_fake_quant(*arguments[:3], *state, 0.1, 0, 255, 0), *state


def stats(x, mean, var):
    mean, var = mean.clone(), var.clone()
    return torch.batch_norm_update_stats(x, mean, var, 0.1), mean, var


def native(x, mean, var):
    mean, var = mean.clone(), var.clone()
    return torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5), mean, var


ON, OFF = torch.tensor([1]), torch.tensor([0])
CTC = (rand(7, 2, 4).log_softmax(2), torch.tensor([[1, 2, 3], [3, 1, 2]]), torch.tensor([7, 6]), torch.tensor([3, 2]))
MINIMA = (torch.tensor([0.1]), torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0], dtype=torch.int32))
INDEX = torch.tensor([1, 3, 1])

# (name, program, arguments)
PROGRAMS = [
    ("torch.kl_div", lambda a, b: torch.kl_div(a, b, 2, log_target=True), (rand(4, 3), rand(4, 3))),
    ("torch.margin_ranking_loss", lambda a, b, t: torch.margin_ranking_loss(a, b, t, 0.5),
        (rand(4), rand(4), signs(4))),
    ("torch.hinge_embedding_loss", lambda a, t: torch.hinge_embedding_loss(a, t, reduction=0), (rand(4), signs(4))),
    ("torch.cosine_embedding_loss", lambda a, b, t: torch.cosine_embedding_loss(a, b, t, 0.1, 2),
        (rand(4, 3), rand(4, 3), signs(4))),
    ("torch.poisson_nll_loss", lambda a, b: torch.poisson_nll_loss(a, b, True, True, 1e-8, 1),
        (rand(4, 3), rand(4, 3))),
    ("torch.triplet_margin_loss", lambda a, b, c: torch.triplet_margin_loss(a, b, c, swap=True),
        (rand(4, 3), rand(4, 3), rand(4, 3))),
    ("torch.binary_cross_entropy_with_logits",
        lambda a, b, p: torch.binary_cross_entropy_with_logits(a, b, pos_weight=p), (rand(4, 3), rand(4, 3), rand(3))),
    ("torch.ctc_loss", lambda *arguments: torch.ctc_loss(*arguments, 0, 2, True), CTC),
    ("gumbel_softmax", lambda a: F.gumbel_softmax(a, 0.7), (rand(4, 3),)),
    ("gumbel_softmax, hard, of a transposed tensor", lambda a: F.gumbel_softmax(a.t(), hard=True), (rand(4, 3),)),
    ("triplet_margin_with_distance_loss",
        lambda a, b, c: F.triplet_margin_with_distance_loss(a, b, c, distance_function=F.pairwise_distance),
            (rand(4, 3), rand(4, 3), rand(4, 3))),
    ("upsample", lambda a: (F.upsample(a, scale_factor=2), F.upsample_nearest(a, 7),
        F.upsample_bilinear(a, scale_factor=2)), (rand(2, 3, 4, 4),)),
    ("grid_sampler", lambda a, g: torch.grid_sampler(a, g, 0, 1, True), (rand(2, 3, 4, 4), rand(2, 5, 5, 2))),
    ("affine_grid_generator", lambda t: torch.affine_grid_generator(t, (2, 3, 4, 5), False), (rand(2, 2, 3),)),
    ("native_channel_shuffle", lambda a: torch.native_channel_shuffle(a, 3), (rand(2, 6, 3, 3),)),
    ("max_pool1d_with_indices", lambda a: torch.max_pool1d_with_indices(a, 2), (rand(2, 3, 6),)),
    ("adaptive_max_pool1d", lambda a: torch.adaptive_max_pool1d(a, 3), (rand(2, 3, 7),)),
    ("a table and its renormalized rows",
        lambda w: (F.embedding(INDEX, w * 1, max_norm=0.5), torch.embedding_renorm_(w.clone(), INDEX, 0.5, 2.0)),
            (rand(5, 4),)),
    ("bags of renormalized rows", lambda w: F.embedding_bag(INDEX, w * 1, torch.tensor([0, 1]), max_norm=0.5,
        norm_type=1.0), (rand(5, 4),)),
    ("int_repr", quantized(lambda q: (q.int_repr(), q.dequantize() * 2)), (rand(4, 3),)),
    ("fbgemm", packed_product, (rand(4, 8), rand(6, 8), rand(6))),
    ("an observer that looks", observed, (rand(4, 3), ON, ON, *MINIMA)),
    ("an observer that does not look", observed, (rand(4, 3), OFF, ON, *MINIMA)),
    ("batch_norm_update_stats", stats, (rand(4, 3, 2), rand(3), rand(3))),
    ("native_batch_norm", native, (rand(4, 3, 2), rand(3), rand(3))),
    ("_native_batch_norm_legit", lambda x: torch.ops.aten._native_batch_norm_legit(x, None, None, True, 0.1, 1e-5),
        (rand(4, 3, 2),)),
    ("Tensor.type", lambda x: (x.type(torch.float64), x.type("torch.IntTensor"), x.type(torch.DoubleTensor),
        x if x.type() == "torch.FloatTensor" else -x), (rand(4, 3),)),
    ("polygamma_", lambda x: (x * 1).polygamma_(1), (rand(4, 3),)),
    ("sym_max", lambda x: (x * torch.sym_max(x.shape[0], 3), x * torch.sym_min(x.shape[0], 3)), (rand(4, 3),)),
    ("in place", lambda x: [F.relu(x * 2, inplace=True), F.elu_(x - 1), F.rrelu(x * 1, training=True, inplace=True),
        F.threshold_(x * 1, 0.2, 0.5), F.alpha_dropout(x * 1, inplace=True),
                            F.alpha_dropout(x * 1, training=True, inplace=True)],
     (rand(4, 3),)),
]  # fmt: skip


def differentiates(program, inputs, which: int) -> bool:
    """Whether PyTorch has the derivative with respect to the first arguments."""
    leaves = [x.clone().requires_grad_(i < which and x.is_floating_point()) for i, x in enumerate(inputs)]
    try:
        sum(
            t.double().sum() for t in tree_leaves(program(*leaves)) if isinstance(t, torch.Tensor) and t.requires_grad
        ).backward()
    except (RuntimeError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("program, inputs", [row[1:] for row in PROGRAMS], ids=[row[0] for row in PROGRAMS])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "backward"])
def test_program_equals_eager(program, inputs, grad):
    which = next((n for n in (len(inputs), 1) if differentiates(program, inputs, n)), 0) if grad else 0
    if grad and not which:
        pytest.skip("PyTorch does not differentiate it")
    compiled, results = thunder.jit(program), []
    for run in (program, compiled):
        leaves = [x.detach().clone().requires_grad_(i < which and x.is_floating_point()) for i, x in enumerate(inputs)]
        torch.manual_seed(0)
        out = [t for t in tree_leaves(run(*leaves)) if isinstance(t, torch.Tensor)]
        differentiable = [o for o in out if o.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        gradients = (
            torch.autograd.grad([o.double().sin().sum() for o in differentiable], wanted, allow_unused=True)
            if differentiable
            else ()
        )
        results.append((out, [o.requires_grad for o in out], gradients))
    (want, wanted_flags, want_gradients), (got, got_flags, got_gradients) = results
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert got_flags == wanted_flags
    torch.testing.assert_close(list(got_gradients), list(want_gradients), rtol=1e-5, atol=1e-6)


def test_a_numbers_of_seed_and_offset_are_philoxs():
    """The first word of the known answers that the generator's authors publish, for a counter and a key of zeros."""
    assert int(_philox((1,), 0, 0, "cpu")[0]) == 0x6627E8D5
    drawn = thunder.jit(
        lambda: ltorch.uniform_philox((10000,), -1.0, 1.0, device="cpu", dtype=torch.float32, seed=7, offset=4)
    )
    before = torch.get_rng_state()
    x = drawn()
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(x, drawn())
    assert x.min() >= -1 and x.max() < 1 and abs(x.mean()) < 0.02 and abs(x.var() - 1 / 3) < 0.01


def test_uniform_and_exponential_draw_as_pytorch():
    compiled = thunder.jit(
        lambda x: (
            ltorch.uniform((3, 4), -1.0, 1.0, device="cpu", dtype=torch.float32),
            ltorch.uniform_like(x),
            ltorch.exponential(x, 2.0),
        )
    )
    torch.manual_seed(0)
    got = compiled(rand(2, 3))
    torch.manual_seed(0)
    want = torch.empty(3, 4).uniform_(-1.0, 1.0), torch.empty(2, 3).uniform_(), torch.empty(2, 3).exponential_(2.0)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("program, words", [
    (lambda w: torch.fbgemm_linear_quantize_weight(w), "Python numbers that depend on"),
    (lambda w: torch.fbgemm_linear_fp16_weight_fp32_activation(w, torch.fbgemm_pack_gemm_matrix_fp16(w), None),
        "without a bias"),
])  # fmt: skip
def test_what_cannot_be_typed_is_refused(program, words):
    with pytest.raises(CaptureError, match=words):
        thunder.jit(program)(rand(4, 8))


@pytest.mark.parametrize("program", [
    lambda x: torch.batch_norm_stats(x, 1e-5),
        lambda x: torch.batch_norm_elemt(x, None, None, x[0, :, 0], x[0, :, 0], 1e-5),
    lambda x: torch.batch_norm_gather_stats(x, x[:1, :, 0], x[:1, :, 0], None, None, 0.1, 1e-5, 8),
])  # fmt: skip
def test_kernels_of_other_devices_are_refused_in_pytorchs_words(program):
    for run in (program, thunder.jit(program)):
        with pytest.raises(NotImplementedError, match="Could not run 'aten::batch_norm"):
            run(rand(4, 3, 2))


def test_a_negative_variance_is_refused_when_the_program_runs():
    compiled = thunder.jit(F.gaussian_nll_loss)
    compiled(rand(4, 3), rand(4, 3), rand(4, 3))
    with pytest.raises(ValueError, match="var has negative entry/entries"):
        compiled(rand(4, 3), rand(4, 3), -rand(4, 3))


def test_nothing_here_is_opaque(capsys):
    for name, program, inputs in PROGRAMS:
        if name == "int_repr":  # a quantized tensor is an opaque value
            continue
        examine(program, *inputs)
        assert "opaque" not in capsys.readouterr().out, name


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 1, 1), (4, 2, 2), (4, 1, 4), (1, 4, 4), (1, 1, 1)])
@pytest.mark.parametrize("batches", [(2, 2), (2, 1)])
def test_attention_takes_the_kernel_that_pytorch_takes(heads, batches):
    """The CPU's flash kernel, or products. From torch 2.15 on it takes keys of one head for all of the query's."""
    for mask, grouped in itertools.product((None, (3, 5), (4, 1, 3, 5), (1, 1, 1, 1), (4, 3, 5)), (False, True)):
        query = torch.randn(batches[0], heads[0], 3, 8, requires_grad=True)
        inputs = query, *(torch.randn(batches[1], n, 5, 8, requires_grad=True) for n in heads[1:])
        options = {"attn_mask": None if mask is None else torch.randn(mask), "enable_gqa": grouped}
        try:
            want = F.scaled_dot_product_attention(*inputs, **options)
        except RuntimeError:
            continue  # sizes that PyTorch refuses
        compiled = thunder.jit(F.scaled_dot_product_attention)
        with CountCalls() as counter:
            got = compiled(*inputs, **options)
        assert torch.equal(got, want), (mask, grouped)
        taken = compat.attention_choice(*inputs, options["attn_mask"], enable_gqa=grouped)
        flash = counter.calls["aten._scaled_dot_product_flash_attention_for_cpu.default"]
        assert flash == (taken == SDPBackend.FLASH_ATTENTION.value), (mask, grouped)


@pytest.mark.parametrize("of_weight", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_input", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_has_the_type_of_its_input(of_input, of_weight):
    def program(x, weight):
        return F.rms_norm(x, (3,), weight, 1e-6) + torch.ones((), dtype=torch.float64)  # a type of the next operation

    x, weight = torch.randn(4, 3).to(of_input), torch.randn(3).to(of_weight)
    compiled = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
    assert torch.equal(compiled(x, weight), program(x, weight))
    assert thunder.last_traces(compiled)[0].output.dtype.name == str(of_input).removeprefix("torch.")
    opened, _ = by_decomposition(compiled, [x, weight])
    unit = 2 * torch.finfo(of_input).eps
    torch.testing.assert_close(opened, program(x, weight), rtol=unit, atol=unit)  # a rounding to the type of the result
