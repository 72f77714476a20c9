"""The Triton fuser under Triton's interpreter: every operation it takes, random regions, how many kernels programs become, layouts, what is compiled once."""

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thunder
from thunder.executors.triton_fuser import TritonFuser
from thunder.ops import LTORCH

from .ops.harness import samples_of, tensors_in, torch_function

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")


# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Eager(TritonFuser):
    """Fuses single operations as well."""

    def should_fuse(self, region):
        return bool(region.outputs)


def fusions(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    return [line.sym.fn for line in traces[-1].bound_symbols if line.sym.is_fusion]


def others(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    quiet = ("python_del", "unpack_sequence", "clear_collection")
    return [line.sym.name for line in traces[-1].bound_symbols if not line.sym.is_fusion and line.sym.name not in quiet]


def on_device(x):
    return x.to(DEVICE) if isinstance(x, torch.Tensor) else type(x)(map(on_device, x)) if type(x) in (tuple, list) else x


def in_double(x):
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.is_floating_point() else x
    return torch.float64 if x is torch.float32 else type(x)(map(in_double, x)) if type(x) in (tuple, list) else x


def check_close(got, eager, exact, precision=None):
    """The rule: the largest deviation from the program in float64 is at most four times eager's, and four roundings of the largest element to the type of the result.

    Kernels compute in float32 and round where the program converts: their deviation is that of the same computation in float32 plus one rounding of each result.
    """
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    if not eager.is_floating_point():
        assert torch.equal(got, eager)
        return
    got, eager, exact = got.detach(), eager.detach(), exact.detach()
    assert torch.equal(got.isnan(), eager.isnan())
    finite = eager.isfinite() & exact.isfinite()
    assert torch.equal(got[~finite].isinf(), eager[~finite].isinf())
    if finite.any():
        deviation, of_eager = ((x.double() - exact)[finite].abs().max() for x in (got, eager))
        unit = torch.finfo(eager.dtype).eps if precision is None else precision
        assert deviation <= 4 * of_eager + 4 * unit * exact[finite].abs().max(), f"{deviation:.3e} where eager has {of_eager:.3e}"


# ---------------------------------------------------------------------------------------------------------------- every operation

# what the fuser takes at all; an operation that drops out of this list would otherwise do so silently
TAKEN = """
    abs absolute add addcdiv addcmul addr all amax amin aminmax any arange batch_norm binary_cross_entropy binary_cross_entropy_with_logits bitwise_and
    bitwise_or bitwise_xor block_diag cat ceil celu channel_shuffle clamp clamp_max clamp_min clip column_stack copied_into cos cosine_embedding_loss
    cosine_similarity count_nonzero cross_entropy diff dist div divide dstack einsum elu eq erf exp exp2 expm1 fix flip floor fmax fmin full full_like gather ge
    gelu glu greater greater_equal group_norm gt hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss hstack huber_loss inner instance_norm isclose
    isfinite isinf isnan isneginf isposinf kl_div kron l1_loss layer_norm le leaky_relu lerp less less_equal log log10 log1p log2 log_softmax logical_and
    logical_not logical_or logical_xor logit logsigmoid logsumexp lt margin_ranking_loss masked_fill maximum mean minimum mish mse_loss mul multiply nan_to_num
    nanmean nansum ne neg negative nll_loss norm normalize not_equal one_hot ones ones_like outer pad pairwise_distance pixel_shuffle pixel_unshuffle plain_add
    plain_sub poisson_nll_loss positive pow prelu reciprocal relu relu6 repeat repeat_interleave rms_norm roll rot90 rsqrt rsub selu setitem sgn sigmoid sign
    silu sin smooth_l1_loss soft_margin_loss softmax softplus softshrink softsign sqrt square stack std std_mean sub subtract sum take_along_dim tanh tanhshrink
    threshold tile tril triplet_margin_loss triu true_divide trunc var var_mean vector_norm vstack where zeros zeros_like
""".split()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TAKEN)
def test_an_operation_is_as_exact_as_in_float32(name, dtype):
    symbol, fused = LTORCH[name], 0
    function = torch_function(symbol)
    for args, kwargs in samples_of(symbol, dtype):
        args = on_device(args)
        try:
            eager = function(*args, **kwargs)
        except RuntimeError:  # PyTorch has no such norm in bfloat16
            continue
        compiled = thunder.jit(lambda *a, kwargs=kwargs: function(*a, **kwargs), executors=[Eager("single")])
        got = compiled(*args)
        fused += len(fusions(compiled))
        exact = function(*in_double(args), **{k: in_double(v) for k, v in kwargs.items()})
        for g, e, x in zip(*map(tensors_in, (got, eager, exact)), strict=True):
            check_close(g, e, x)
    assert fused


# ---------------------------------------------------------------------------------------------------------------- random regions

UNARY = [
    torch.sin, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.abs, torch.neg, lambda x: x * 0.5 + 1, lambda x: x / 3, lambda x: torch.sqrt(x * x + 1), lambda x: torch.rsqrt(x * x + 1),
    lambda x: torch.log1p(x * x), lambda x: torch.exp(-x * x), lambda x: x.clamp(-1, 1), torch.relu, lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.pow(3),
    lambda x: torch.softmax(x, -1), lambda x: torch.log_softmax(x, 0), lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: F.rms_norm(x, x.shape[-1:]), lambda x: torch.cos(x.float()),
]  # fmt: skip
MOVES = [
    lambda x: x.transpose(0, -1), lambda x: x.reshape(-1), lambda x: x[..., 1:], lambda x: x[::2], lambda x: x.unsqueeze(0), lambda x: x.flip(0), lambda x: x.chunk(2, 0)[0],
    lambda x: x.expand(2, *x.shape), lambda x: torch.cat((x, -x), -1), lambda x: F.pad(x, (1, 2)), lambda x: x.reshape(x.shape[-1], -1), lambda x: torch.stack((x, x * 2), 1),
    lambda x: torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1), lambda x: x.movedim(0, -1).contiguous(), lambda x: torch.roll(x, 1, 0), lambda x: x[None, :, None],
]  # fmt: skip
REDUCTIONS = [
    lambda x: x.sum(), lambda x: x.mean(0), lambda x: x.sum(-1, keepdim=True), lambda x: x.amax(-1), lambda x: x.var(-1, unbiased=False), lambda x: x.logsumexp(0),
    lambda x: x.sum(tuple(range(x.dim() - 1))), lambda x: x.amin(0, keepdim=True), lambda x: x.mean((0, -1)) if x.dim() > 1 else x.mean(),
]  # fmt: skip
BINARY = [torch.add, torch.mul, torch.sub, lambda a, b: a / (b * b + 1), torch.maximum, lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.lerp(a.float(), b.float(), 0.3)]
KINDS = ("unary", "move", "reduce", "binary", "binary", "unary")
step = st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))


def apply(kind, which, a, b):
    """One step on two values of the pool; None where their shapes do not allow it."""
    if kind == "unary":
        return UNARY[which % len(UNARY)](a) if a.dim() else torch.sin(a)
    if kind == "move":
        return MOVES[which % len(MOVES)](a) if a.dim() and a.dim() < 4 and min(a.shape[0], a.shape[-1]) > 1 and a.numel() < 3000 else None
    if kind == "reduce":
        return REDUCTIONS[which % len(REDUCTIONS)](a) if a.dim() else None
    try:
        shape = torch.broadcast_shapes(a.shape, b.shape)
    except RuntimeError:
        return None
    return BINARY[which % len(BINARY)](a, b) if len(shape) < 5 and shape.numel() < 3000 else None


def run(steps, inputs):
    pool = list(inputs)
    for kind, which, i, j in steps:
        made = apply(kind, which, pool[i % len(pool)], pool[j % len(pool)])
        if made is not None:
            pool.append(made)
    return tuple(pool[len(inputs) :][-3:])


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(step, min_size=3, max_size=7), rows=st.sampled_from([1, 2, 3, 5, 16, 70]), columns=st.sampled_from([1, 2, 4, 7, 16, 33]), seed=st.integers(0, 1000),
    kinds=st.tuples(*[st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])] * 3), layout=st.integers(0, 2),
)  # fmt: skip
def test_random_regions_are_as_exact_as_in_float32(steps, rows, columns, seed, kinds, layout):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, columns), (columns,), (2, rows, columns)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [x.to(DEVICE, kind) for x, kind in zip(exact, kinds, strict=True)]
    if layout == 1:
        inputs[0] = inputs[0].t().contiguous().t()
    if layout == 2:
        inputs[2] = torch.stack((inputs[2], inputs[2]), -1)[..., 0]
    eager = run(steps, inputs)
    if not eager:
        return
    compiled = thunder.jit(lambda *inputs: run(steps, inputs), executors=[Eager("random")])
    got = compiled(*inputs)
    unit = max(torch.finfo(kind).eps for kind in kinds)
    for g, e, x in zip(got, eager, run(steps, [x.double() for x in inputs]), strict=True):
        check_close(g, e, x, unit)
