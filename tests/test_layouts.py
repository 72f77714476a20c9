"""How results of fused regions are laid out in memory: the rules against PyTorch itself."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests import fresh
from tests.kernels_in_use import EVERY_REGION
from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.core.regions import Region
from thunder.kernels import layout
from thunder.kernels.layout import layout_of
from thunder.ops import LTORCH
from thunder.ops.families.norm_kernels import native_layer_norm_backward

from .ops.harness import torch_function
from .test_triton_fuser import TAKEN

SHAPE = (2, 3, 4, 6)


def values(*shape):
    return torch.rand(shape) * 0.5 + 0.25


# tensors of one shape, or that broadcast to it, in several layouts
FORMS = {
    "row-major": lambda: values(*SHAPE),
    "permuted": lambda: values(4, 2, 6, 3).permute(1, 3, 0, 2),
    "heads": lambda: values(2, 4, 3, 6).transpose(1, 2),
    "channels last": lambda: values(*SHAPE).to(memory_format=torch.channels_last),
    "gaps": lambda: values(2, 3, 4, 12)[..., ::2],
    "expanded": lambda: values(2, 1, 4, 6).expand(SHAPE),
    "row": lambda: values(6),
    "column": lambda: values(3, 1, 1),
    "ones": lambda: values(2, 1, 4, 1),
    "number": lambda: values(),
}


def strides_by_rule(function, *args):
    """The strides of what a function of tensors returns, as a region would return it."""
    trace = thunder.trace()(function, *args)
    region = Region(trace.bound_symbols, set(trace.output_proxies))
    arguments = {a: t for a, t in zip(trace.args, args, strict=True) if isinstance(a, TensorProxy)}
    return dict(
        zip(
            (o.name for o in region.outputs),
            layout_of(region, [arguments[i].stride() for i in region.inputs]),
            strict=True,
        )
    )


# operations that take other arguments than tensors, as functions of tensors
CALLS = {
    "where": lambda a, b: torch.where(a > 0.5, a, b), "masked_fill": lambda a, b: a.masked_fill(b > 0.5, 1.0),
    "threshold": lambda a: F.threshold(a, 0.5, 0.1),
    "bitwise_and": lambda a, b: (a > 0.5) & (b > 0.5), "bitwise_or": lambda a, b: (a > 0.5) | (b > 0.5),
    "bitwise_xor": lambda a, b: (a > 0.5) ^ (b > 0.5),
    "cat": lambda a, b: torch.cat((a, b), 1), "stack": lambda a, b: torch.stack((a, b), 1), "flip": lambda a: a.flip(1),
    "pad": lambda a: F.pad(a, (1, 2)),
    "softmax": lambda a: torch.softmax(a, 1), "log_softmax": lambda a: torch.log_softmax(a, 1),
    "logsumexp": lambda a: torch.logsumexp(a, 1, True),
    "layer_norm": lambda a: F.layer_norm(a, (6,)), "rms_norm": lambda a: F.rms_norm(a, (6,)),
    "group_norm": lambda a: F.group_norm(a, 3), "prelu": lambda a: F.prelu(a, a[0, :, 0, 0]),
    "repeat": lambda a: a.repeat(2, 1, 1, 1), "tile": lambda a: a.tile(2), "roll": lambda a: a.roll(1, 1),
    "repeat_interleave": lambda a: a.repeat_interleave(2, 1),
    "kl_div": lambda a, b: F.kl_div(a, b, reduction="none"), "full_like": lambda a: torch.full_like(a, 2.0) + a,
    "hstack": lambda a, b: torch.hstack((a, b)),
    "vstack": lambda a, b: torch.vstack((a, b)), "dstack": lambda a, b: torch.dstack((a, b)),
    "column_stack": lambda a, b: torch.column_stack((a, b)),
    "pixel_shuffle": lambda a: F.pixel_shuffle(a.repeat(1, 4, 1, 1), 2),
    "pixel_unshuffle": lambda a: F.pixel_unshuffle(a, 2), "channel_shuffle": lambda a: F.channel_shuffle(a, 3),
    "take_along_dim": lambda a, b: torch.take_along_dim(a, (b > 0.5).long(), 1),
    "gather": lambda a, b: torch.gather(a, 1, (b > 0.5).long()),
    "index_select": lambda a, b: torch.index_select(a, 1, (b[0, :, 0, 0] > 0.5).long()),
    "embedding": lambda a, b: F.embedding((b[0] > 0.5).long(), a[0, 0]),
    "rsub": torch.rsub, "batch_norm": lambda a: F.batch_norm(a, None, None, training=True),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3), "clamp": lambda a, b: torch.clamp(a, b),
    "hardtanh": lambda a: F.hardtanh(a), "softshrink": lambda a: F.softshrink(a),
    "std": lambda a: a.std(1, correction=0), "var": lambda a: a.var(1, correction=0), "norm": lambda a: a.norm(),
    "vector_norm": lambda a: torch.linalg.vector_norm(a, dim=1), "normalize": lambda a: F.normalize(a),
    "logsigmoid": lambda a: F.logsigmoid(a), "to": lambda a: a.to(torch.float64),
}  # fmt: skip
# what has several results, makes tensors from nothing, reduces to a number, or takes tensors of few dimensions
ELSEWHERE = """
    addr aminmax arange block_diag cosine_embedding_loss einsum full margin_ranking_loss nll_loss one_hot ones outer setitem std_mean triplet_margin_loss var_mean zeros
""".split()
COMBINATIONS = {
    1: [(form,) for form in FORMS],
    2: [
        *itertools.product(("row-major", "heads", "permuted", "ones"), repeat=2),
        ("heads", "row"),
        ("column", "heads"),
        ("expanded", "gaps"),
        ("number", "channels last"),
    ],
    3: [("row-major", "heads", "row"), ("heads", "permuted", "heads"), ("permuted", "permuted", "permuted")],
}
# kernels of the CPU that lay results out otherwise than those of other devices: compared for row-major tensors
OF_THE_CPU = ("batch_norm", "channel_shuffle", "roll", "logsigmoid")


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("name", [name for name in TAKEN if name not in ELSEWHERE])
def test_an_operation_is_laid_out_as_in_pytorch(name):
    function, checked = CALLS.get(name) or torch_function(LTORCH[name]), 0
    for count in (1, 2, 3):
        for forms in COMBINATIONS[count]:
            if name in OF_THE_CPU and set(forms) != {"row-major"}:
                continue
            args = [FORMS[form]() for form in forms]
            try:
                eager = function(*args)
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # it takes other arguments
                continue
            if (
                isinstance(eager, torch.Tensor)
                and layout.is_dense(eager)
                and eager.data_ptr() not in [a.data_ptr() for a in args]
            ):
                (strides,) = strides_by_rule(function, *args).values()
                assert strides == eager.stride(), forms
                checked += 1
    assert checked


ASKED_FOR = {
    "to": lambda x: (x * 2).to(memory_format=torch.channels_last),
    "to, of an argument": lambda x: x.to(memory_format=torch.channels_last).sin() * 2,
    "to another type": lambda x: (x * 2).to(torch.float64, memory_format=torch.channels_last),
    "contiguous": lambda x: (x * 2).contiguous(memory_format=torch.channels_last) + x,
    "row-major": lambda x: (x + 1).contiguous() * 2,
    "clone": lambda x: (x + 1).clone(memory_format=torch.channels_last),
    "row-major clone": lambda x: (x + 1).clone(memory_format=torch.contiguous_format),
    "a view of it": lambda x: (x * 2).to(memory_format=torch.channels_last).permute(0, 2, 3, 1).view(-1) * 3,
    "zeros_like": lambda x: torch.zeros_like(x * 1, memory_format=torch.channels_last) + 1,
    "ones_like, one channel": lambda x: torch.ones_like(x[:, :1], memory_format=torch.channels_last),
    "rand_like": lambda x: torch.rand_like(x, memory_format=torch.channels_last) + x,
    "randn_like": lambda x: torch.randn_like(x * 2, memory_format=torch.channels_last) * 2,
    "empty": lambda x: torch.empty(x.shape, memory_format=torch.channels_last).fill_(2) * 1,
    "full_like": lambda x: torch.full_like(input=x, fill_value=2.0, memory_format=torch.contiguous_format) * 2,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("executors", [["torch"], [EVERY_REGION], ["triton_fuser"]], ids=lambda e: str(e[0]))
@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_layout_that_is_asked_for(name, executors):
    x = values(*SHAPE)
    compiled = thunder.jit(ASKED_FOR[name], executors=executors)
    for argument in (x, x.to(memory_format=torch.channels_last), x.transpose(1, 2).contiguous().transpose(1, 2)):
        result, expected = (torch.manual_seed(0) and f(argument) for f in (compiled, ASKED_FOR[name]))
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("executor", ["torch", EVERY_REGION, "triton_fuser"], ids=str)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, F.softmin])
def test_softmax_that_is_taken_apart_for_its_backward_lies_as_pytorchs(function, executor):
    def program(x, w):
        y = function(x, -1)
        return y, y.view(2, -1) @ w

    compiled = thunder.jit(program, executors=[executor])
    for x in (values(4, 6), values(6, 4).t()):
        leaves = x.requires_grad_(), values(12, 3).requires_grad_()
        got, want = compiled(*leaves), program(*leaves)
        assert [y.stride() for y in got] == [y.stride() for y in want]
        for y, z in zip(got, want, strict=True):
            torch.testing.assert_close(
                torch.autograd.grad(y.cos().sum(), leaves[0], retain_graph=True),
                torch.autograd.grad(z.cos().sum(), leaves[0], retain_graph=True),
            )


def rotate(x, cos, sin):
    rotated = torch.cat((-x[..., 3:], x[..., :3]), -1)
    return (x * cos + rotated * sin).to(torch.bfloat16)


def places(n, *shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % n


def norm_gradient(a, mean, weight):
    function = (
        native_layer_norm_backward if isinstance(a, TensorProxy) else torch.ops.aten.native_layer_norm_backward.default
    )
    return function(a, a, (6,), mean, mean, weight, weight, (True, True, True))[0] * 2


BY_RULE = {
    "first": (lambda a, i: a[i], places(2, 5)), "last": (lambda a, i: a[..., i], places(6, 5)),
    "second": (lambda a, i: a[:, i], places(3, 2, 2)), "two": (lambda a, i, j: a[:, i, j], places(3, 5), places(4, 5)),
    "apart": (lambda a, i, j: a[i, :, j], places(2, 5), places(4, 5)),
    "of another layout": (lambda a, i: a[i], places(2, 5, 3).t()),
    "broadcast": (lambda a, i, j: a[i, j], places(2, 3, 1), places(3, 1, 5)),
    "rows": (lambda a, i: F.embedding(i, a[0, 0]) + 1, places(4, 3, 2)),
    "norm": (lambda a: F.layer_norm(a, (6,)).sin(),), "pad": (lambda a: F.pad(a, (1, 2)) * 2,),
    "roll": (lambda a: a.roll(1, 1),), "join": (lambda a: torch.cat((a, a * 2), 1),),
    "stack": (lambda a: torch.stack((a, a * 2)),), "turn": (lambda a: a.flip(1) + 1,),
    "gradient of a softmax": (lambda a: torch.ops.aten._softmax_backward_data(a, a, 1, torch.float32) * 2,),
    "gradient of a norm": (norm_gradient, values(2, 3, 4, 1), values(6)),
}  # fmt: skip
# kernels of the CPU lay it out otherwise, or PyTorch may take a tensor for pictures with channels last
UNSURE = {"roll": ["channels last", "permuted"], "stack": ["channels last"], "pad": ["permuted"], "join": ["permuted"]}


@pytest.mark.parametrize("form", ["row-major", "heads", "permuted", "channels last"])
@pytest.mark.parametrize("name", BY_RULE)
def test_a_rule_needs_no_fake_tensors(name, form, monkeypatch):
    """They import Dynamo, which takes longer than all the rest of a first call."""
    if form in UNSURE.get(name, ()):
        pytest.skip("no rule tells")
    monkeypatch.setattr(compat, "FakeTensorMode", None)
    (function, *others), x = BY_RULE[name], FORMS[form]()
    (strides,) = strides_by_rule(function, x, *others).values()
    assert strides == function(x, *others).stride()


@pytest.mark.parametrize("form", ["row-major", "heads", "gaps"])
def test_a_rotation_is_laid_out_without_fake_tensors(form, monkeypatch):
    monkeypatch.setattr(compat, "FakeTensorMode", None)
    args = FORMS[form](), values(4, 6), values(4, 6)
    (strides,) = strides_by_rule(rotate, *args).values()
    assert strides == rotate(*args).stride()


def test_no_rule_imports_dynamo():
    text = """
import sys, torch, thunder
from thunder.core.regions import Region
from thunder.kernels.layout import layout_of
def rotate(x, cos):
    return (torch.cat((-x[..., 3:], x[..., :3]), -1) * cos).to(torch.bfloat16)
trace = thunder.trace()(rotate, torch.ones(2, 4, 3, 6).transpose(1, 2), torch.ones(4, 6))
print(layout_of(Region(trace.bound_symbols, set(trace.output_proxies)), [(72, 6, 18, 1), (6, 1)]))
print([m for m in sys.modules if m.startswith("torch._dynamo.variables")])
"""
    process = fresh.run("-c", text)
    assert process.stdout.splitlines()[1:] == ["[]"], process.stderr


# With a number that PyTorch makes a tensor of, and without.
OF_SIZE_ONE = {
    "multiplied": lambda x: x * 2.0, "added": lambda x: 1 - x + 2, "compared": lambda x: x > 0.5,
    "chosen": lambda x: torch.where(x > 0.5, x, 1.0), "power": lambda x: x**3, "sine": lambda x: x.sin(),
    "flipped": lambda x: x.flip(-1) + 1, "cast": lambda x: x.double(), "soft": lambda x: torch.softmax(x, 0),
    "clamped": lambda x: x.clamp(-1, 1), "both": lambda x: x * x.exp(),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_SIZE_ONE)
@pytest.mark.parametrize("seed", range(6))
def test_dimensions_of_size_one_have_pytorchs_strides(name, seed):
    draw = random.Random(seed)
    shape = [draw.choice([1, 1, 2, 3]) for _ in range(draw.randint(2, 4))]
    order = draw.sample(range(len(shape)), len(shape))
    x = values(*(n + draw.randint(0, 1) for n in shape))[tuple(slice(n) for n in shape)]
    for x in (x.permute(order), values(*shape).permute(order), values(*shape)):
        eager = OF_SIZE_ONE[name](x)
        if layout.is_dense(eager):
            (strides,) = strides_by_rule(OF_SIZE_ONE[name], x).values()
            assert strides == eager.stride(), (x.shape, x.stride())
