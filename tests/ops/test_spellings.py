"""Calls as people write them: keywords, methods, sequences and single numbers, the same results as eager's."""

from __future__ import annotations

import inspect
import itertools
import types

import pytest
import torch
import torch.nn.functional as F

import thunder
import thunder.executors.pythonex
import thunder.executors.torchex  # noqa: F401
from tests.ops.harness import SAMPLED, samples_of
from thunder.core.symbol import OpTags
from thunder.extend import resolve_executors
from thunder.ops import LTORCH, opaque
from thunder.transforms.dispatch import dispatch

X = torch.arange(24.0).reshape(2, 3, 4)
M = torch.arange(12.0).reshape(3, 4)
I = torch.tensor([[0, 2], [1, 0]])  # noqa: E741

CALLS = {
    "view_size": lambda x, m, i: x.view(size=(6, 4)),
    "view_numbers": lambda x, m, i: x.view(2, -1),
    "view_list": lambda x, m, i: x.view([4, 6]),
    "view_dtype": lambda x, m, i: x.view(dtype=torch.int32),
    "reshape": lambda x, m, i: torch.reshape(input=x, shape=(6, 4)),
    "reshape_as": lambda x, m, i: x.reshape_as(x.view(4, 6)),
    "permute_dims": lambda x, m, i: torch.permute(x, dims=(2, 0, 1)),
    "permute": lambda x, m, i: x.permute(2, 0, 1),
    "transpose": lambda x, m, i: torch.transpose(x, dim0=0, dim1=1),
    "swapaxes": lambda x, m, i: x.swapaxes(axis0=0, axis1=2),
    "movedim": lambda x, m, i: x.movedim(source=0, destination=-1),
    "moveaxis": lambda x, m, i: torch.moveaxis(x, (0, 1), (1, 0)),
    "T": lambda x, m, i: m.T,
    "mT": lambda x, m, i: x.mT,
    "mH": lambda x, m, i: x.mH,
    "H": lambda x, m, i: m.H,
    "adjoint": lambda x, m, i: torch.adjoint(x),
    "squeeze": lambda x, m, i: x[:, :1].squeeze(dim=1),
    "unsqueeze": lambda x, m, i: torch.unsqueeze(input=x, dim=0),
    "expand": lambda x, m, i: m.expand(2, -1, -1),
    "broadcast_to": lambda x, m, i: torch.broadcast_to(m, size=(2, 3, 4)),
    "broadcast_tensors": lambda x, m, i: torch.broadcast_tensors(x, m),
    "cat_axis": lambda x, m, i: torch.cat([x, x], axis=1),
    "concat": lambda x, m, i: torch.concat(tensors=(x, x), dim=-1),
    "stack": lambda x, m, i: torch.stack((x, x), dim=2),
    "hstack": lambda x, m, i: torch.hstack([m, m]),
    "split": lambda x, m, i: torch.split(x, split_size_or_sections=2, dim=1),
    "linear_matrix_bias": lambda x, m, i: (
        F.linear(m, m, m @ m.T) + F.linear(m, m, m[:, :1]) * F.linear(input=m, weight=m, bias=m[:1, :3])
    ),
    "linear_tensor_bias": lambda x, m, i: [F.linear(x, m, x[..., :3]), F.linear(x, m, bias=m[:, :3])],
    "split_tensor": lambda x, m, i: torch.split(tensor=x, split_size_or_sections=[1, 2], dim=1),
    "split_sizes": lambda x, m, i: torch.split_with_sizes(input=x, split_sizes=[1, 2], dim=1),
    "swapaxes_input": lambda x, m, i: torch.swapaxes(input=x, axis0=0, axis1=2),
    "embedding_input": lambda x, m, i: F.embedding(input=i, weight=m),
    "dropout_input": lambda x, m, i: F.dropout(input=x, p=0.0) + F.dropout(input=x, p=0.5, training=False),
    "batch_norm_input": lambda x, m, i: F.batch_norm(input=m, running_mean=None, running_var=None, training=True),
    "max_pool_input": lambda x, m, i: F.max_pool1d(input=x, kernel_size=2),
    "numel_input": lambda x, m, i: m * torch.numel(input=x),
    "searchsorted_input": lambda x, m, i: torch.searchsorted(sorted_sequence=m[0], input=m),
    "cross_input": lambda x, m, i: torch.cross(input=m[:, :3], other=m[:, 1:], dim=0),
    "split_method": lambda x, m, i: x.split(split_size=[1, 2], dim=1),
    "split_with_sizes": lambda x, m, i: x.split_with_sizes([1, 2], dim=1),
    "chunk": lambda x, m, i: torch.chunk(x, chunks=2, dim=2),
    "tensor_split": lambda x, m, i: torch.tensor_split(x, indices=(1,), dim=1),
    "tensor_split_sections": lambda x, m, i: x.tensor_split(sections=2, dim=2),
    "unbind": lambda x, m, i: torch.unbind(x, dim=1),
    "iterate": lambda x, m, i: [row * 2 for row in m],
    "select": lambda x, m, i: torch.select(x, dim=1, index=-1),
    "narrow": lambda x, m, i: torch.narrow(x, dim=2, start=1, length=2),
    "tile": lambda x, m, i: m.tile((2, 1)),
    "repeat": lambda x, m, i: m.repeat(repeats=(2, 1)),
    "repeat_interleave": lambda x, m, i: torch.repeat_interleave(m, repeats=2, dim=0),
    "flip": lambda x, m, i: x.flip(0, 2),
    "flip_dims": lambda x, m, i: torch.flip(x, dims=[0]),
    "roll": lambda x, m, i: torch.roll(x, shifts=1, dims=1),
    "atleast": lambda x, m, i: torch.atleast_3d(m),
    "diag": lambda x, m, i: torch.diag(m, diagonal=1),
    "pad": lambda x, m, i: F.pad(x, pad=(1, 1), mode="constant", value=2.0),
    "pad_reflect": lambda x, m, i: F.pad(x, (1, 1), mode="reflect"),
    "index_select": lambda x, m, i: torch.index_select(m, dim=1, index=i[0]),
    "gather": lambda x, m, i: torch.gather(input=m, dim=1, index=i),
    "scatter_value": lambda x, m, i: m.scatter(1, i, value=7.0),
    "scatter_src": lambda x, m, i: torch.scatter(m, dim=1, index=i, src=m),
    "scatter_add": lambda x, m, i: m.scatter_add(dim=1, index=i, src=m),
    "take_along_dim": lambda x, m, i: torch.take_along_dim(m[:2], indices=i, dim=1),
    "masked_assignment": lambda x, m, i: _assigned(m.clone(), m > 5),
    "slice_assignment": lambda x, m, i: _assigned(m.clone(), (slice(None), slice(1, 3))),
    "index_assignment": lambda x, m, i: _assigned(m.clone(), i[0]),
    "index_copy_": lambda x, m, i: m.clone().index_copy_(0, i[0], m[:2]),
    "index_fill_": lambda x, m, i: m.clone().index_fill_(0, i[0], -1.0),
    "index_put_": lambda x, m, i: m.clone().index_put_((i[0],), m[:2]),
    "matmul": lambda x, m, i: torch.matmul(input=x, other=m.t()),
    "at": lambda x, m, i: x @ m.T,
    "bmm": lambda x, m, i: torch.bmm(x, mat2=x.mT),
    "mm": lambda x, m, i: m.mm(mat2=m.T),
    "mv": lambda x, m, i: torch.mv(m, vec=m[0]),
    "addmm": lambda x, m, i: torch.addmm(m[:, :3], mat1=m, mat2=m.T, beta=0.5, alpha=2),
    "baddbmm": lambda x, m, i: torch.baddbmm(x[:, :, :3], batch1=x, batch2=x.mT),
    "outer": lambda x, m, i: torch.outer(m[0], vec2=m[1]),
    "einsum": lambda x, m, i: torch.einsum("bij,kj->bik", x, m),
    "einsum_list": lambda x, m, i: torch.einsum("bij,kj->bik", [x, m]),
    "tensordot": lambda x, m, i: torch.tensordot(x, m, dims=([2], [1])),
    "linear": lambda x, m, i: F.linear(input=x, weight=m, bias=m[:, 0]),
    "softmax": lambda x, m, i: F.softmax(input=x, dim=-1, dtype=torch.float64),
    "softmax_method": lambda x, m, i: x.softmax(dim=1),
    "log_softmax": lambda x, m, i: torch.log_softmax(x, dim=-1),
    "softmin": lambda x, m, i: F.softmin(x, dim=1),
    "layer_norm": lambda x, m, i: F.layer_norm(x, normalized_shape=[4], weight=m[0], bias=None, eps=1e-3),
    "rms_norm": lambda x, m, i: F.rms_norm(x, (4,), weight=m[0]),
    "group_norm": lambda x, m, i: F.group_norm(x, num_groups=3),
    "batch_norm": lambda x, m, i: F.batch_norm(x, m[:, 0], m[:, 1], training=False),
    "batch_norm_training": lambda x, m, i: F.batch_norm(x, None, None, training=True),
    "attention": lambda x, m, i: F.scaled_dot_product_attention(x, key=x, value=x, is_causal=True, scale=0.3),
    "attention_mask": lambda x, m, i: F.scaled_dot_product_attention(x, x, x, attn_mask=m[:, :3] > 2),
    "cross_entropy": lambda x, m, i: F.cross_entropy(m, target=i.flatten()[:3], label_smoothing=0.1),
    "mse_loss": lambda x, m, i: F.mse_loss(input=m, target=m * 2, reduction="sum"),
    "embedding": lambda x, m, i: F.embedding(input=i, weight=m, padding_idx=0),
    "conv1d": lambda x, m, i: F.conv1d(x, weight=x.mT[:, :3, :3], padding=1),
    "conv2d_same": lambda x, m, i: F.conv2d(x[None], m.view(2, 2, 3, 1)[:, :, :1], padding="same"),
    "max_pool": lambda x, m, i: F.max_pool1d(x, kernel_size=2, return_indices=True),
    "max_pool2d": lambda x, m, i: F.max_pool2d(x, 2),
    "avg_pool": lambda x, m, i: F.avg_pool2d(x, kernel_size=2, ceil_mode=True),
    "adaptive": lambda x, m, i: F.adaptive_max_pool1d(x, 2),
    "interpolate": lambda x, m, i: F.interpolate(x, scale_factor=2, mode="linear"),
    "pixel_shuffle": lambda x, m, i: F.pixel_shuffle(x.view(6, 2, 2)[:4], upscale_factor=2),
    "unfold": lambda x, m, i: F.unfold(x[None], kernel_size=2),
    "tensor_unfold": lambda x, m, i: x.unfold(dimension=2, size=2, step=1),
    "number_times_half": lambda x, m, i: 0.79788456 * (x.bfloat16() / 7),
    "number_by_tensor": lambda x, m, i: [0.79788456 / (x + 0.3), 3 / (x.bfloat16() + 1)],
    "meshgrid": lambda x, m, i: torch.meshgrid(m[0], m[:, 0], indexing="xy"),
    "meshgrid_list": lambda x, m, i: torch.meshgrid([m[0], m[:, 0], m[1]], indexing="ij"),
    "aten_slice": lambda x, m, i: torch.ops.aten.slice(x, 1, 0, 2),
    "slice_scatter": lambda x, m, i: m.slice_scatter(m[:1], dim=0, start=1, end=2),
    "block_diag": lambda x, m, i: torch.block_diag(m, m[0]),
    "matrix_power": lambda x, m, i: torch.linalg.matrix_power(m[:, :3], n=2),
    "convolution": lambda x, m, i: torch.convolution(x, x.mT[:, :3, :3], None, [1], [1], [1], False, [0], 1),
    "normalize": lambda x, m, i: F.normalize(x, dim=-1),
    "arange_by_name": lambda x, m, i: [
        torch.arange(end=5),
        torch.arange(2, end=9, step=3),
        torch.arange(end=4, dtype=torch.float64),
    ],
    "numpys_names": lambda x, m, i: [torch.add(x1=m, x2=m), torch.sin(x=m), torch.sum(a=m, axis=0, keepdims=True)],
    "full_by_name": lambda x, m, i: torch.full(size=(2, 3), fill_value=1.5),
    "full_in_another_order": lambda x, m, i: x.new_full(fill_value=2, size=(3,)),
    "randint_by_name": lambda x, m, i: torch.randint(high=3, size=(0, 2)),
    "new_of_sizes": lambda x, m, i: [
        m.new(2, 3).fill_(1),
        m.new(torch.Size([3, 1])).zero_(),
        m.new().shape,
        i.new(torch.Size([2])).fill_(4),
    ],
    "new_of_data": lambda x, m, i: [m.new([2, 3]), m.new((1, 2)), i.new([[4]])],
    "cosine_similarity": lambda x, m, i: F.cosine_similarity(x, m, dim=-1),
}


def _assigned(x, key):
    x[key] = 3.0
    return x


def flat(x) -> list:
    return [y for e in x for y in flat(e)] if isinstance(x, (tuple, list)) else [x]


@pytest.mark.parametrize("name", CALLS)
def test_calls_give_what_eager_gives(name):
    call = CALLS[name]
    try:
        expected = flat(call(X, M, I))
    except RuntimeError as error:
        pytest.skip(f"this PyTorch refuses it, as versions before 2.11 a bias of three dimensions: {error}")
    compiled = thunder.jit(lambda x, m, i: flat(call(x, m, i)), fallback="error")
    traced = thunder.trace()(lambda x, m, i: flat(call(x, m, i)), X, M, I)  # which does not read PyTorch's Python
    for run in (compiled, dispatch(traced, resolve_executors([])).python_callable()):
        for g, e in zip(flat(run(X, M, I)), expected, strict=True):
            torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)
    trace = thunder.last_traces(compiled)[0]
    assert not any(opaque.is_opaque(line.sym) for line in trace.bound_symbols), str(trace)


def named(function) -> set[tuple[str, ...]]:
    """The names of a function's arguments that may be given by position: of each of its schemas, or of its
    signature."""
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters.values()
        return {tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)}
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(function, '__name__', '')}")
    return {tuple("input" if a.name == "self" else a.name for a in s.arguments if not a.kwarg_only) for s in schemas}


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore")  # deprecated functions are as good as others
@pytest.mark.parametrize(
    "name", [n for n in SAMPLED if OpTags.RANDOM_OP not in LTORCH[n].tags and not n.startswith("empty")]
)
def test_the_names_that_pytorch_has_for_arguments(name):
    """Whatever eager takes by name: all arguments, and those behind the first."""
    symbol = LTORCH[name]
    functions = [
        f
        for f in symbol.torch_functions
        if getattr(torch.Tensor, getattr(f, "__name__", ""), None) is not f and "unsafe" not in f.__name__
    ]
    for function, names in ((f, n) for f in functions for n in sorted(named(f))):
        for args, kwargs in itertools.islice(samples_of(symbol, torch.float32), 2):
            for first in range(min(2, len(args))):
                by_name = dict(zip(names[first:], args[first:], strict=False)) | kwargs
                if len(by_name) < len(args) - first + len(kwargs):
                    continue
                try:
                    expected = function(*args[:first], **by_name)
                except (TypeError, RuntimeError):  # another schema's names
                    continue
                actual = thunder.jit(lambda *args, f=function, **kwargs: f(*args, **kwargs))(*args[:first], **by_name)
                torch.testing.assert_close(flat(actual), flat(expected), equal_nan=True)


def test_an_operand_by_a_name_of_another_function():
    x = torch.ones(2)
    for call in (lambda: torch.add(x, exponent=x), lambda: torch.pow(x, other=x), lambda: torch.mv(X[0], batch1=M[0])):
        with pytest.raises(TypeError):
            thunder.jit(call)()


REFUSED = {
    "squeeze_of_a_mask": (lambda x, m: m[m > 3].squeeze(), "whether u0 == 1"),
    "unbind_of_a_mask": (lambda x, m: m[m > 3].unbind(), "the value of u0"),
    "unsqueeze_": (lambda x, m: (m * 2).unsqueeze_(0), "shape of a tensor in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_says_why(name):
    call, words = REFUSED[name]
    with pytest.raises(thunder.errors.CaptureError, match=words):
        thunder.trace()(call, X, M)


ATOMS = [
    0,
    -1,
    slice(None),
    slice(1, None),
    slice(None, -1, 2),
    slice(5, 1),
    None,
    ...,
    True,
    False,
    [1, 0],
    [[0], [1]],
    "row",
    "one",
]
INDICES = {"row": torch.tensor([0, 1, 1]), "one": torch.tensor(1)}


@pytest.mark.parametrize("seed", range(60))
def test_keys_select_what_eager_selects(seed):
    """Random keys, in getitem and in assignments."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 5, (), generator=generator))
    key = tuple(ATOMS[int(torch.randint(len(ATOMS), (), generator=generator))] for _ in range(count))
    x = torch.randn(3, 2, 4, generator=generator)

    def substituted(row, one):
        return tuple(row if k == "row" else one if k == "one" else k for k in key)

    def assigned(a, row, one):
        b = a.clone()
        b[substituted(row, one)] = 1.5
        return b

    for program in (lambda a, row, one: a[substituted(row, one)], assigned):
        try:
            expected = program(x, *INDICES.values())
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error)):
                _recorded(program, x)
            continue
        got = _recorded(program, x)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _recorded(program, x):
    trace = thunder.trace()(program, x, *INDICES.values())
    whole = dispatch(trace, resolve_executors([])).python_callable()(x, *INDICES.values())
    assert tuple(trace.output.shape) == tuple(whole.shape)
    return whole


UNKNOWN_NAMES = {
    "dropout": lambda m, i: F.dropout(m, other=0.5),
    "embedding": lambda m, i: F.embedding(i, other=m),
    "split": lambda m, i: torch.split(m, 2, tensor=m),
    "split_sizes": lambda m, i: torch.split(m, split_sizes=[1, 2]),
    "linear": lambda m, i: F.linear(m, m, m @ m.T, bias=m @ m.T),
}


@pytest.mark.parametrize("name", UNKNOWN_NAMES)
def test_names_that_pytorch_does_not_know(name):
    with pytest.raises(TypeError):
        thunder.jit(UNKNOWN_NAMES[name])(M, I)
