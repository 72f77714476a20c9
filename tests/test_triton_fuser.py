"""The Triton fuser under Triton's interpreter: every operation it takes, random regions, how many kernels programs
become, layouts, what is compiled once."""

import dataclasses
import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import thunder
from benchmarks.random_regions import SMALL, judge, random_region
from thunder.executors import triton_fuser as fuser_module
from thunder.executors.triton_fuser import TritonFuser, triton_fuser
from thunder.executors.triton_kernels import executor as executor_module
from thunder.kernels import tiled, tiles, triton_cuda
from thunder.kernels.machine import planned_gpu
from thunder.kernels.schedule import TooComplex
from thunder.ops import LTORCH, lookup

from .kernels.test_triton import EAGER_TO_SPLIT
from .ops.harness import samples_of, tensors_in, torch_function

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")


pytestmark = [
    # numpy says so where the interpreter computes what is not used, or not a number
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("triton_interpreter"),
]  # fmt: skip
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


def split_all(monkeypatch):
    """As if rows did not fit on the chip, and each program had little to do."""
    monkeypatch.setattr(fuser_module, "planned_gpu", lambda: EAGER_TO_SPLIT)
    monkeypatch.setattr(tiles, "WIDEST", 16)


def on_device(x):
    return (
        x.to(DEVICE) if isinstance(x, torch.Tensor) else type(x)(map(on_device, x)) if type(x) in (tuple, list) else x
    )


def in_double(x):
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.is_floating_point() else x
    return torch.float64 if x is torch.float32 else type(x)(map(in_double, x)) if type(x) in (tuple, list) else x


def check_close(got, eager, exact, precision=None):
    """The rule: the largest deviation from the program in float64 is at most four times eager's, and four roundings of
    the largest element to the type of the result.

    Kernels compute in float32 and round where the program converts: their deviation is that of the same computation in
    float32 plus one rounding of each result.
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
        assert deviation <= 4 * of_eager + 4 * unit * exact[finite].abs().max(), (
            f"{deviation:.3e} where eager has {of_eager:.3e}"
        )


# ---------------------------------------------------------------------------------------------------------------- every
# operation

# what the fuser takes at all; an operation that drops out of this list would otherwise do so silently
TAKEN = """
    abs absolute add addcdiv addcmul addr all amax amin aminmax any arange batch_norm binary_cross_entropy
    binary_cross_entropy_with_logits bitwise_and bitwise_or bitwise_xor block_diag cat ceil celu channel_shuffle clamp
    clamp_max clamp_min clip column_stack copied_into cos cosine_embedding_loss cosine_similarity count_nonzero
    cross_entropy diff dist div divide dstack einsum elu embedding eq erf exp exp2 expm1 fix flip floor fmax fmin full
    full_like gather ge gelu glu greater greater_equal group_norm gt hardshrink hardsigmoid hardswish hardtanh
    hinge_embedding_loss hstack huber_loss index_select inner instance_norm isclose isfinite isinf isnan isneginf
    isposinf kl_div kron l1_loss layer_norm le leaky_relu lerp less less_equal log log10 log1p log2 log_softmax
    logical_and logical_not logical_or logical_xor logit logsigmoid logsumexp lt margin_ranking_loss masked_fill maximum
    mean minimum mish mse_loss mul multiply nan_to_num nanmean nansum ne neg negative nll_loss normalize not_equal
    one_hot ones ones_like outer pad pairwise_distance pixel_shuffle pixel_unshuffle plain_add plain_sub
    poisson_nll_loss pow prelu reciprocal relu relu6 repeat repeat_interleave rms_norm roll rot90 rsqrt rsub selu
    setitem sgn sigmoid sign silu sin smooth_l1_loss soft_margin_loss softmax softplus softshrink sqrt square
    stack std std_mean sub subtract sum take_along_dim tanh threshold tile tril triplet_margin_loss triu
    true_divide trunc var var_mean vector_norm vstack where zeros zeros_like
""".split()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TAKEN)
def test_an_operation_is_as_exact_as_in_float32(name, dtype):
    symbol, fused = LTORCH[name], 0
    function = torch_function(symbol)
    for args, kwargs in samples_of(symbol, dtype):
        args, kwargs = on_device(args), {k: on_device(v) for k, v in kwargs.items()}
        if name in ("arange", "full", "ones", "zeros"):
            kwargs["device"] = DEVICE
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


# ----------------------------------------------------------------------------------------------------------------
# PyTorch's samples


# exponents that are tensors, rounding quotients, matrix norms: by PyTorch
LEFT = {"pow", "div_floor_rounding", "norm_nuc"}


def fuses_alone(info) -> bool:
    symbol = lookup(info.op)
    return (
        getattr(symbol, "name", "") in TAKEN
        and torch.float32 in info.supported_dtypes("cpu")
        and info.formatted_name not in LEFT
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("info", [i for i in op_db if fuses_alone(i)], ids=lambda i: i.formatted_name)
def test_pytorchs_samples_are_as_exact_as_in_float32(info):
    """What op_db has for an operation: other shapes, orders of arguments and corners than our own samples."""
    torch.manual_seed(0)
    tried = 0
    for sample in itertools.islice(
        info.sample_inputs_func(info, DEVICE, torch.float32, False), 10 if DEVICE == "cpu" else 40
    ):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        try:
            eager = info.op(*args, **kwargs)
        except (RuntimeError, IndexError):
            continue
        compiled = thunder.jit(lambda *a, kwargs=kwargs: info.op(*a, **kwargs), executors=[Eager("sampled")])
        results = tensors_in(compiled(*args))
        exact = tensors_in(info.op(*in_double(args), **{k: in_double(v) for k, v in kwargs.items()}))
        for d in judge(*([x.cpu() for x in side] for side in (results, tensors_in(eager), exact))):
            assert not d.wrong and d.got <= 2 * d.eager + 4 * torch.finfo(torch.float32).eps, (d, sample)
        tried += len(fusions(compiled))
    assert tried


def roundings(got, exact):
    """By how many steps of its type a result is off, at most."""
    step = (
        torch.nextafter(exact.to(got.dtype).abs(), torch.tensor(torch.inf, dtype=got.dtype)) - exact.to(got.dtype).abs()
    )
    return ((got.double() - exact).abs() / step.double()).max().item()


@pytest.mark.skipif(
    DEVICE == "cuda", reason="an exponential of the device is less exact, by how much depends on the number"
)
@pytest.mark.parametrize(
    "name, most", [("tanh", 2), ("expm1", 5), ("log1p", 4), ("sqrt", 0.5), ("rsqrt", 1)]
)  # the logarithm of NumPy is up to 3 off, the exponential 2, which become 4
def test_functions_are_exact_to_some_digits(name, most):
    torch.manual_seed(0)
    function = getattr(torch, name)
    x = torch.cat((torch.randn(20000) * 2, torch.randn(20000) * 0.2))
    x = x.abs() if name in ("log1p", "sqrt", "rsqrt") else x
    got = thunder.jit(lambda x: function(x) + 0.0, executors=[Eager("functions")])(x)
    assert roundings(got, function(x.double())) <= most
    special = torch.tensor([0.0, torch.inf, torch.nan, -1.0, -torch.inf, -2.0, 1e-30, 89.0])
    torch.testing.assert_close(
        thunder.jit(function, executors=[Eager("functions")])(special),
        function(special),
        equal_nan=True,
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize("number", [3, -7.5, 8, 2.0**127, 1e-3])
def test_a_quotient_by_a_number_is_rounded_to_the_nearest(number):
    """PyTorch multiplies by the inverse on a GPU."""
    x = on_device(torch.randn(5000))
    compiled = thunder.jit(lambda x: x / number, executors=[Eager("quotients")])
    assert torch.equal(compiled(x), (x.double() / torch.tensor(number).double().item()).float())
    assert ("div_rn" in fusions(compiled)[0].source) == (number not in (8,))


def test_what_an_operation_returns_in_fewer_digits_is_rounded_where_it_is_stored():
    """And what the program converts is rounded there."""
    x = on_device(torch.randn(6, 40).bfloat16())
    compiled = thunder.jit(lambda x: F.layer_norm(x, (40,)).sum(1, dtype=torch.float32), executors=[Eager("rounded")])
    eager, exact = F.layer_norm(x, (40,)).sum(1, dtype=torch.float32), F.layer_norm(x.double(), (40,)).sum(1)
    assert (compiled(x) - exact).abs().max() < 1e-5 < 1e-3 < (eager - exact).abs().max()
    converted = thunder.jit(
        lambda x: (x.float() * 1.37).bfloat16().float() - x.float() * 1.37, executors=[Eager("rounded")]
    )
    torch.testing.assert_close(converted(x), (x.float() * 1.37).bfloat16().float() - x.float() * 1.37)
    assert converted(x).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------------------------------
# random regions


def within_bound(deviation, region, number):
    """The rule: twice as far from the program in float64 as eager, and two roundings to its coarsest type, since
    kernels round where the program converts, not where eager does.

    Where that is not enough, what a rounding of the inputs does to this result: eager may be lucky, as with the
    variance of a column of equal numbers, which its algorithm finds to be 0.
    """
    bound = 2 * deviation.eager + 2 * region.unit
    return not deviation.wrong and (deviation.got <= bound or deviation.got <= bound + region.sensitivity()[number])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_random_regions_are_as_exact_as_eager(first):
    fused = 0
    for seed in range(first, first + 30):
        region = random_region(seed, SMALL)
        inputs = region.placed(DEVICE)
        compiled = thunder.jit(region.function, executors=[Eager("random")])
        sides = compiled(*inputs), region(inputs), region.exact(region.inputs)
        for number, deviation in enumerate(judge(*([x.cpu() for x in side] for side in sides))):
            assert within_bound(deviation, region, number), f"{deviation} for seed {seed}:\n{region.text}"
        fused += bool(fusions(compiled))
    assert fused > 20


def check_gradients(region, compiled, name):
    """Gradients of a compiled region are as near to float64's as eager's."""
    sides = []
    for run, inputs in (
        (lambda x: compiled(*x), region.placed(DEVICE)),
        (region, region.placed(DEVICE)),
        (region.exact, [x.double() for x in region.inputs]),
    ):
        leaves = [x.detach().requires_grad_() for x in inputs]
        sides.append([x.cpu() for x in region.with_gradients(run(leaves), leaves)])
    for deviation in judge(*sides):
        assert not deviation.wrong and deviation.got <= 4 * deviation.eager + 8 * region.unit, (
            f"{deviation} for {name}:\n{region.text}"
        )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", range(0, 60, 30))
def test_gradients_of_random_regions_are_as_exact_as_eagers(first):
    fused = 0
    for seed in range(first, first + 30):
        region = random_region(seed, SMALL, smooth=True)
        compiled = thunder.jit(region.function, executors=[Eager("random")])
        check_gradients(region, compiled, f"seed {seed}")
        fused += bool(fusions(compiled))
    assert fused > 20


# ----------------------------------------------------------------------------------------------------------------
# programs and their kernels


def rope(x, cos, sin):
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


def rms_norm(x, weight):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return y.to(x.dtype) * weight


def geglu_chain(x, b):
    return F.gelu(x + b) * torch.sigmoid(x) + F.layer_norm(x, (x.shape[-1],))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="mean", ignore_index=-1)


def tensor(*shape, dtype=torch.float32, grad=True, seed=0):
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
        .to(DEVICE, dtype)
        .requires_grad_(grad)
    )


LABELS = torch.tensor([3, -1, 0, 49, 7, 7] * 12, device=DEVICE)
PROGRAMS = {  # program, inputs of so many rows, kernels of the forward, of the backward
    "rope": (rope, lambda rows: (tensor(2, 3, 9, 16, dtype=torch.bfloat16), tensor(9, 16, grad=False),
    tensor(9, 16, grad=False)), 1, 1),
    "rms_norm": (rms_norm, lambda rows: (tensor(2, rows // 2, 40, dtype=torch.bfloat16),
    tensor(40, dtype=torch.bfloat16)), 1, 1),
    "F.rms_norm": (lambda x, w: F.rms_norm(x, (40,), w) + x, lambda rows: (tensor(rows, 40), tensor(40)), 1, 2),
    "layer_norm": (lambda x, w, b: F.silu(F.layer_norm(x, (40,), w, b)),
    lambda rows: (tensor(rows, 40), tensor(40), tensor(40, seed=1)), 1, 1),
    "geglu_chain": (geglu_chain, lambda rows: (tensor(rows, 33), tensor(33)), 1, 2),
    "cross_entropy": (cross_entropy, lambda rows: (tensor(rows, 50), LABELS[:rows]), 2, 1),
    "softmax": (lambda x: torch.softmax(x * 0.3, -1), lambda rows: (tensor(4, 5, 33),), 1, 1),
    "swiglu": (lambda a, b: F.silu(a) * b, lambda rows: (tensor(30, 33), tensor(30, 33, seed=1)), 1, 1),
    "residual": (lambda x, y, w: rms_norm(x + y, w) + x,
    lambda rows: (tensor(rows, 40), tensor(rows, 40, seed=1), tensor(40)), 1, 2),
    "sum": (lambda x: (x * x).sum(), lambda rows: (tensor(90, 300),), 2, 1),
    "columns": (lambda x: (x * x).amax(0) + x.sum(0), lambda rows: (tensor(300, 150, grad=False),), 2, None),
    "long outer": (lambda x, b: torch.tanh(x * b), lambda rows: (tensor(150, 300), tensor(300)), 1, 2),
    "transposed": (lambda x, b: F.gelu(x.transpose(1, 2) * 2) + b, lambda rows: (tensor(2, 5, 6, 7), tensor(7)), 1, 1),
}  # fmt: skip


def permuted_beside_sums(x, y):
    z = torch.where(x <= 0, 0, y)
    return z.permute(2, 0, 1), z.sum((0, 1))


def sums_of_permuted(x, y):
    z = torch.where(x <= 0, 0, y).permute(2, 0, 1)
    return z * 2, z.sum((0, 1))


def permuted_norm(x, y):
    z = F.layer_norm(x * y, (x.shape[-1],))
    return z.transpose(0, 2), z + 1


@pytest.mark.parametrize("program", [permuted_beside_sums, sums_of_permuted, permuted_norm])
def test_what_is_only_permuted_is_computed_once(program):
    x, y = tensor(9, 31, 70, grad=False), tensor(9, 31, 70, grad=False, seed=1)
    compiled = thunder.jit(program, executors=[TritonFuser("permutes")])
    for got, eager, exact in zip(compiled(x, y), program(x, y), program(x.double(), y.double()), strict=True):
        check_close(got, eager, exact)
    (fusion,) = fusions(compiled)
    assert fusion.kernels == (1 if program is permuted_norm else 2), "the sum over 279 rows is split"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("long", [False, True], ids=["", "long"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_a_program(name, long, monkeypatch):
    """As many kernels as there have to be, nothing beside them, and gradients as exact as eager's. long: as if rows did
    not fit on the chip."""
    if long:
        split_all(monkeypatch)
    program, make_inputs, forward, backward = PROGRAMS[name]
    inputs = make_inputs(24 if long and DEVICE == "cpu" else 72)  # the interpreter takes a second for 10 long rows
    leaves = [x for x in inputs if x.requires_grad]
    fuser = TritonFuser("counted")
    compiled = thunder.jit(program, executors=[fuser])
    eager, got = program(*inputs), compiled(*inputs)
    doubled = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    exact = program(*doubled)
    unit = max(torch.finfo(x.dtype).eps for x in inputs if x.is_floating_point())
    check_close(got, eager, exact, unit)
    assert [f.kernels for f in fusions(compiled)] == [forward] or long
    assert not others(compiled)
    if leaves:
        cotangent = torch.randn(eager.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, eager.dtype)
        gradients = zip(
            torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(eager, leaves, cotangent),
            torch.autograd.grad(exact, [x for x in doubled if x.requires_grad], cotangent.double()), strict=True,
        )  # fmt: skip
        for g, e, x in gradients:
            check_close(g, e, x, unit)
        assert [f.kernels for f in fusions(compiled, backward=True)] == [backward] or long
        assert not others(compiled, backward=True)


def test_a_cross_entropy_saves_numbers_of_rows():
    logits = tensor(72, 50)
    compiled = thunder.jit(cross_entropy, executors=[TritonFuser("saving")])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved = []
        compiled(logits, LABELS)
    assert (
        sum(t.numel() for t in saved if t.data_ptr() != logits.data_ptr() and t.data_ptr() != LABELS.data_ptr())
        <= 2 * 72 + 1
    )


def test_a_row_without_numbers_is_not_a_number(monkeypatch):
    split_all(monkeypatch)
    x = tensor(4, 50, grad=False)
    x[0], x[1, 5], x[2, 7], x[3, :20] = float("-inf"), float("inf"), float("nan"), float("-inf")
    for program in (
        lambda x: torch.softmax(x + 0, -1),
        lambda x: torch.log_softmax(x + 0, -1),
        lambda x: (x + 0).amax(-1),
        lambda x: (x + 0).amin(-1),
    ):
        torch.testing.assert_close(thunder.jit(program, executors=[triton_fuser])(x), program(x), equal_nan=True)


def test_equal_layers_are_compiled_once_and_strides_decide_kernels():
    fuser = TritonFuser("once")

    def program(x):
        for _ in range(3):
            x = torch.tanh(x @ x * 0.1) + 1
        return x

    x = tensor(8, 8, grad=False)
    compiled = thunder.jit(program, executors=[fuser])
    torch.testing.assert_close(compiled(x), program(x))
    assert fuser.compilations == 1 and len(fusions(compiled)) == 3 and len(set(fusions(compiled))) == 1
    pointwise = thunder.jit(lambda x: torch.tanh(x) * x, executors=[fuser])
    for layout in (x, x.t(), x[:, ::2], x[::2], x.expand(2, 8, 8)):
        got, eager = pointwise(layout), torch.tanh(layout) * layout
        torch.testing.assert_close(got, eager)
        assert got.stride() == eager.stride()


def test_a_single_operation_and_what_is_empty_stay_with_pytorch():
    for program, x in (
        (torch.tanh, tensor(4, 4)),
        (lambda x: torch.tanh(x) * x, torch.zeros(0, 4)),
        (lambda x: x.t().reshape(-1), tensor(4, 4)),
    ):
        compiled = thunder.jit(program, executors=[triton_fuser])
        assert torch.equal(compiled(x), program(x)) and not fusions(compiled)


def test_an_operation_for_whose_operands_pytorch_computes_addresses_is_fused(monkeypatch):
    on = dataclasses.replace(planned_gpu(), operand=1e-7)  # so that small tensors take long
    fuser = TritonFuser("of_addresses")
    monkeypatch.setattr(fuser, "_machine", lambda device: on)
    monkeypatch.setattr(fuser_module, "planned_gpu", lambda: on)
    a, b = tensor(3, 4, 5), tensor(3, 4, 6)
    for program, is_fused in (
        (lambda a, b: (a[..., None] + b[..., None, :]).reshape(12, 30), True),
        (lambda a, b: a * b[:, :1, :5], True),
        (lambda a, b: a * 2.0, False),
        (lambda a, b: a * b[:1, :1, :1], False),
    ):
        compiled = thunder.jit(program, executors=[fuser], tiers=0)
        torch.testing.assert_close(compiled(a, b), program(a, b))
        assert bool(fusions(compiled)) == is_fused


def test_integers_and_bools_are_exact():
    a, b = torch.arange(-8, 8, device=DEVICE), torch.arange(16, device=DEVICE, dtype=torch.int32)

    def program(a, b):
        low, both = torch.minimum(a, b), (a > 2) & (b != 5)
        return (
            low * b + a,
            both,
            torch.where(both, a, -a).sum(),
            (a - b).to(torch.int8),
            a.to(torch.float32) * 0.5,
            both.logical_not() | (a == 0),
        )

    got = thunder.jit(program, executors=[triton_fuser])(a, b)
    for g, e in zip(got, program(a, b), strict=True):
        assert g.dtype == e.dtype and torch.equal(g, e)


def test_a_negative_of_memory_is_read_as_what_it_is():
    x = (
        torch.randn(6, dtype=torch.complex64).conj().imag.to(DEVICE)
        if DEVICE == "cpu"
        else torch.randn(6, dtype=torch.complex64, device=DEVICE).conj().imag
    )
    assert x.is_neg()
    torch.testing.assert_close(
        thunder.jit(lambda x: torch.tanh(x) * x + 1, executors=[triton_fuser])(x), torch.tanh(x) * x + 1
    )


def test_what_is_out_of_range_ends_the_program():
    """As PyTorch's kernels end it. What is not read may be anything."""
    labels, table = torch.tensor([0, 5, 2, -1, 2**32], device=DEVICE), tensor(4, 3, grad=False)
    for t in labels[[1, 3, 4]] if DEVICE == "cpu" else ():
        for program in (lambda x, t: F.cross_entropy(x * 2, t), lambda x, t: F.embedding(t, x.t()) * 2 + 1):
            with pytest.raises(Exception, match="index out of range"):
                thunder.jit(program, executors=[triton_fuser])(table[:1].expand(1, 3), t.reshape(1))
    compiled = thunder.jit(lambda t, w: F.pad(F.embedding(t, w) * 2, (1, 1, 2, 2)), executors=[triton_fuser])
    compiled(labels[:1], table)
    (region,) = fusions(compiled)
    ((launch,), _) = region.scheduled(((1,), (3, 1)))
    text = triton_cuda.emitted(launch, False).text
    assert text.count("tl.device_assert(") == 1


def test_a_region_that_is_too_large_is_split(monkeypatch):
    """Until its parts are small enough, or single operations."""
    program = lambda x: torch.sigmoid(torch.tanh(x) * x + 1).exp() - x  # noqa: E731
    x, counts = tensor(5), []
    scheduled = tiled.scheduled

    def only_small(program, *args):
        if str(program).count("\n") >= limit:
            raise TooComplex("too many lines")
        return scheduled(program, *args)

    monkeypatch.setattr(tiled, "scheduled", only_small)
    for limit in (4000, 6, 4, 1):
        compiled = thunder.jit(program, executors=[TritonFuser(f"short{limit}")])
        torch.testing.assert_close(compiled(x), program(x))
        counts.append(len(fusions(compiled)))
    assert counts[0] == 1 and counts[1] == 2 and counts[-1] == 0


def test_the_kernel_is_one_attribute_away():
    compiled = thunder.jit(lambda x: torch.softmax(x * 2, -1), executors=[TritonFuser("read")])
    compiled(tensor(4, 8, grad=False))
    trace = thunder.last_traces(compiled)[-1]
    assert "[t1] = TritonFusion0(x)" in str(trace)
    ((name, function),) = thunder.examine.get_fusions(trace)
    assert name == "TritonFusion0"
    assert "def kernel_0(program, b0, b1):" in function.source
    assert "def fused_mul_amax_sub_exp_sum_true_divide(b0, b1):" in function.source


def test_what_is_cheap_is_computed_in_the_region_that_reads_it():
    def program(x, w):
        wide = x.float() * 0.5
        return torch.sigmoid(torch.tanh(wide).to(x.dtype) @ w) * wide

    x, w = tensor(6, 6, dtype=torch.bfloat16, grad=False), tensor(6, 6, dtype=torch.bfloat16, grad=False, seed=1)
    compiled = thunder.jit(program, executors=[TritonFuser("copies")])
    exact = program(x.double(), w.double())
    check_close(compiled(x, w), program(x, w), exact, torch.finfo(torch.bfloat16).eps)
    lines = [line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion]
    assert [[str(p.dtype.shortname) for p in line.outputs] for line in lines] == [["bf16"], ["f32"]], (
        "the float32 value is written nowhere"
    )


def test_regions_that_read_the_same_are_one():
    compiled = thunder.jit(lambda x: (torch.tanh(x) * 2, torch.sigmoid(x) + 1), executors=[TritonFuser("shared")])
    x = tensor(5, 7, grad=False)
    for got, want in zip(compiled(x), (torch.tanh(x) * 2, torch.sigmoid(x) + 1), strict=True):
        torch.testing.assert_close(got, want)
    assert [f.kernels for f in fusions(compiled)] == [1]


class Layer(torch.nn.Module):
    """A transformer's layer without attention: a normalization, a gated product, a residual, and a rotation by angles
    that all layers share."""

    def __init__(self, size):
        super().__init__()
        self.up, self.gate, self.down = (torch.nn.Linear(size, size, bias=False) for _ in range(3))
        self.norm = torch.nn.RMSNorm(size)

    def forward(self, x, angles):
        y = self.norm(x)
        turned = self.up(y)
        turned = turned * angles.cos() + torch.cat((-turned[..., 4:], turned[..., :4]), -1) * angles.sin()
        return x + self.down(F.silu(self.gate(y)) * turned)


class Layers(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(8) for _ in range(depth))

    def forward(self, x, angles):
        for layer in self.layers:
            x = layer(x, angles)
        return x


def test_a_deep_model_compiles_the_regions_of_one_layer():
    x, angles = torch.randn(3, 8, device=DEVICE, requires_grad=True), torch.randn(3, 8, device=DEVICE)
    compilations, regions = {}, {}
    for depth in (3, 5, 9):
        executor = TritonFuser(f"deep{depth}")
        entry, _ = thunder.jit(Layers(depth).to(DEVICE), executors=[executor])._compiled.entry_for((x, angles), {})
        compilations[depth] = executor.compilations
        regions[depth] = [
            sum(line.sym.is_fusion for line in traces[-1].bound_symbols)
            for traces in (entry.computation_traces, entry.backward_traces)
        ]
    assert compilations[3] == compilations[5] == compilations[9], "what a further layer needs is compiled already"
    assert [n - m for n, m in zip(regions[9], regions[5], strict=True)] == [8, 8], "two regions a layer and direction"


def test_it_is_the_default_where_pytorch_knows_cuda(monkeypatch):
    """And then it is not asked about programs on the CPU. What an interpreter runs has to be asked for."""
    for module in (fuser_module, executor_module):
        monkeypatch.setattr(module, "interpreting", lambda: False)
    for version, default in (("13.0", True), (None, False)):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert fuser_module._is_default() is default
    offered = []

    class RecordingFuser(TritonFuser):
        def can_fuse(self, line):
            offered.append(line)
            return super().can_fuse(line)

    x = torch.randn(4, 4, requires_grad=True)
    compiled = thunder.jit(lambda x: (torch.tanh(x) * x).sum(), executors=[RecordingFuser("asked")])
    compiled(x).backward()
    assert not offered and not fusions(compiled)
    monkeypatch.undo()
    if DEVICE == "cpu":
        thunder.jit(lambda x: torch.tanh(x) * x, executors=[RecordingFuser("asked")])(x)
        assert offered


def test_fuel_finds_a_wrong_fusion():
    """As many regions as there is fuel for are fused; the first number with which a result is wrong names the
    region."""

    class Wrong(TritonFuser):
        def fuse(self, region, counter):
            line = super().fuse(region, counter)
            if counter != 2:
                return line
            run = line.sym.fn
            return self.register_temporary_operation(
                line.sym.name,
                lambda *inputs: [o * 2 for o in run(*inputs)],
                inputs=region.inputs,
                outputs=region.outputs,
                bsyms=region.bound_symbols,
            )

    def program(x):
        for _ in range(5):
            x = torch.tanh(x @ x * 0.1) * 0.5
        return x

    x, fuser = tensor(8, 8, grad=False), Wrong("bisected")
    want = program(x)

    def is_right(fuel):
        fuser.set_fuel(fuel)
        compiled = thunder.jit(program, executors=[fuser])
        got = compiled(x)
        assert len(fusions(compiled)) == fuel
        return torch.allclose(got, want, rtol=1e-3, atol=0)

    low, high = 0, 5  # right with low, wrong with high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_right(middle) else (low, middle)
    assert high == 3
    assert is_right(high - 1) and not is_right(high)


def test_integers_that_are_negated_are_not_for_the_assembler_to_see():
    """ptxas 12.8 takes the sign of one of three negated integers away where the largest of them is asked for."""
    x = torch.arange(-300, 300, device=DEVICE, dtype=torch.int32).reshape(3, 200)

    def largest(x):
        a, b, c = -x[0], -x[1], -x[2]
        most = torch.where(a > b, a, b)
        return torch.where(most > c, most, c)

    compiled = thunder.jit(largest, executors=[TritonFuser("signs")])
    assert torch.equal(compiled(x), largest(x))
    ((_, region),) = thunder.examine.get_fusions(thunder.last_traces(compiled)[-1])
    text = triton_cuda.emitted(region.scheduled(region.usual_strides())[0][0], False).text
    assert text.count("tl.program_id(2).to(") == 3
    small = x.to(torch.uint8)
    assert torch.equal(
        thunder.jit(lambda x: (-x > 3) & (-x != 7), executors=[TritonFuser("signs")])(small),
        (-small > 3) & (-small != 7),
    )
    both = thunder.jit(lambda x: ((-x).amax() + 1, (-x).sum() + 1), executors=[TritonFuser("signs")])
    assert [int(v) for v in both(x)] == [301, 301]


# ----------------------------------------------------------------------------------------------------------------
# arguments that the program writes to


def _ema(a, b, x):
    a.lerp_(x, 0.1)
    b.mul_(0.9).addcmul_(x, x, value=0.1)
    return x / (b.sqrt() + 1e-3)


def _old_read_later(a, b, x):
    old = a * 2
    a.add_(x).mul_(b)
    return old + a


def _exchanged(a, b, x):
    new = a * x + b
    a.copy_(b * 3 + x)
    b.copy_(new)
    return a - b


def _one_over_the_other(a, b, x):
    a.copy_((b + x) * 2)
    return b.add_(a)


def _returned(a, b, x):
    a.mul_(x).add_(1)
    return a, a * b


def _before_a_decision(a, b, x):
    a.mul_(x).add_(b)
    return a + 1 if x.sum() > 1e9 else a - 1


def _slices(a, b, x):
    a[1:].mul_(2).add_(x[1:])
    b.add_(a).mul_(x)
    return b.sin()


def _reduced(a, b, x):
    a.sub_(a.mean(0)).mul_(x)
    return (a * b).sum(0)


_ARRANGED = {"row-major": lambda t: t, "transposed": lambda t: t.t().contiguous().t(), "a slice": lambda t: t[:, :5]}


@pytest.mark.parametrize("arranged", _ARRANGED)
@pytest.mark.parametrize(
    "program",
    [_ema, _old_read_later, _exchanged, _one_over_the_other, _returned, _before_a_decision, _slices, _reduced],
)
def test_kernels_write_arguments(program, arranged):
    """As eager leaves them, and where they are."""
    fuser = TritonFuser("arguments")
    compiled = thunder.jit(program, executors=[fuser])
    for seed in range(3):
        inputs = [tensor(6, 7, grad=False, seed=seed + i).to(DEVICE) for i in range(3)]
        want, got = ([_ARRANGED[arranged](t.clone()) for t in inputs] for _ in range(2))
        places, versions = [t.data_ptr() for t in got], [t._version for t in got]
        wanted, actual = program(*want), compiled(*got)
        for a, b in zip((*want, *_tuple(wanted)), (*got, *_tuple(actual)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert a.stride() == b.stride()
        assert [t.data_ptr() for t in got] == places
        moved = [t._version > v for t, v in zip(got, versions, strict=True)]
        assert moved == [t._version > 0 for t in want] or arranged == "a slice"
    assert thunder.cache_misses(compiled) == 1


def _tuple(x):
    return x if type(x) is tuple else (x,)


@pytest.mark.parametrize("arranged, copies", [("row-major", 0), ("transposed", 0), ("a slice", 2)])
def test_what_a_kernel_leaves_in_an_argument_is_not_copied(arranged, copies, monkeypatch):
    copied, copy = [], torch.Tensor.copy_

    def counting(target, value):
        copied.extend([target] if sys._getframe(1).f_code.co_name == "copy_unless_there" else [])
        return copy(target, value)

    compiled = thunder.jit(_ema, executors=[TritonFuser("there")])
    inputs = [_ARRANGED[arranged](tensor(6, 7, grad=False, seed=i).abs()) for i in range(3)]
    compiled(*inputs)
    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    compiled(*inputs)
    assert len(copied) == copies
