"""Ints and sizes that come from another tensor's shape, under cache="symbolic values": results are eager's at every
size.

Programs are generated of PyTorch's own samples (`tests/ops/sizes.py`); a program may be compiled again for other sizes.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import thunder
from tests.ops.sizes import REFUSALS, Call, is_size, outcome
from thunder.core.proxies import map_structure
from thunder.errors import CaptureError

pytestmark = [
    # PyTorch's own warnings about its own samples
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

# entries whose results are not a function of their arguments, and why
UNDEFINED = {
    "empty": "memory", "empty_like": "memory", "new_empty": "memory", "new_empty_strided": "memory",
    "empty_strided": "memory",
    "empty_permuted": "memory", "linalg.lstsq": "pivots that happen to be in memory",
    "randn": "its sample seeds PyTorch's generator in native code", "normal": "its sample seeds PyTorch's generator "
        "in native code",
}  # fmt: skip
# what is refused at any size, and why
REFUSED = {
    "resize_": "changes memory", "resize_as_": "changes memory", "nn.functional.batch_norm": "an input of one "
        "dimension",
    "tensor_split": "the number of parts in a tensor", "roll": "dimensions that a tensor without elements does not "
        "have",
}  # fmt: skip
STRUCTURES = 4  # samples of one entry that differ in more than sizes


def calls(info):
    known = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64, *info.supported_dtypes("cpu"))
    dtype = next(d for d in known if d in info.supported_dtypes("cpu"))
    seen = set()
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), 12):
        call = Call(info.op, ((sample.input, *sample.args), dict(sample.kwargs)))
        if info.name == "grid_sampler_2d":  # modes that are none of PyTorch's: it reads memory
            call.ints.clear()
        kind = str(
            map_structure(
                lambda x: (x.ndim, x.dtype) if isinstance(x, torch.Tensor) else "n" if is_size(x) else x, call.arguments
            )
        )
        if kind not in seen and len(seen) < STRUCTURES and all(t.layout is torch.strided for t in call.tensors):
            seen.add(kind)
            yield call, info.supports_autograd and dtype is torch.float64


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "info", [i for i in op_db if i.name not in UNDEFINED and i.supported_dtypes("cpu")], ids=lambda i: i.formatted_name
)
def test_results_are_eagers_at_every_size(info):
    for call, gradients in calls(info):
        compiled = thunder.jit(call.program, cache="symbolic values")
        for inputs in call.inputs():
            try:
                want = outcome(call.program, inputs, gradients)
            except REFUSALS:
                continue
            try:
                got = outcome(compiled, inputs, gradients)
            except CaptureError:
                if info.name in REFUSED or info.name.startswith("masked."):  # PyTorch makes a class inside of these
                    break
                raise
            torch.testing.assert_close(got, want, equal_nan=True, check_stride=False)


A, IMAGES = torch.ones(2), torch.ones(1, 1, 2, 2)
UPSCALING = torch.nn.ConvTranspose2d(2, 2, 3, stride=2)
WHOLE_SIZES = {
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, x.shape[-2:]),
    "affine_grid": lambda x: F.affine_grid(torch.ones(1, 2, 3), x.size(), align_corners=False),
    "pad": lambda x: F.pad(A, x.shape[-2:]),
    "normal": lambda x: torch.normal(0.0, 1.0, x.shape),
    "interpolate": lambda x: F.interpolate(IMAGES, size=x.shape[-2:]),
    "upsample": lambda x: torch.nn.Upsample(x.shape[-2:], mode="bilinear")(IMAGES),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "unflatten": lambda x: x.flatten(2).unflatten(2, x.shape[2:]),
    "fold": lambda x: F.fold(F.unfold(x, 2), x.shape[-2:], 2),
    "new": lambda x: x.new(x.shape).shape,
    "tensor of a size": lambda x: torch.tensor(x.shape),
    "a size in a dict": lambda x: x.new_zeros(**{"size": x.shape}),
    "sizes joined": lambda x: torch.ones(x.shape[:1] + x.shape[2:] + (3,)),
    "expand": lambda x: A[:1].expand(x.shape),
    "view_as by size": lambda x: x.flatten().view(x.size()),
    "split into sizes": lambda x: torch.arange(sum(x.shape)).split(list(x.shape)),
    "transforms of a size": lambda x: torch.fft.fft(x, n=x.shape[2]),
    "inverse of a transform": lambda x: torch.fft.irfftn(torch.fft.rfftn(x), s=x.shape),
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape),
    "conv_transpose2d": lambda x: UPSCALING(x, output_size=torch.Size(2 * n + 1 for n in x.shape[2:])),
    "and, or, shift": lambda x: x.new_zeros(x.shape[2] & 3, x.shape[3] | 8, x.shape[2] << 1, 2 ^ x.shape[3],
    ~-x.shape[2]),
    "divmod": lambda x: x.new_zeros(divmod(x.shape[2], 2)),
}  # fmt: skip
ONE_PROGRAM = set(WHOLE_SIZES) - {"tensor of a size", "split into sizes", "max_unpool2d"}


@pytest.mark.parametrize("name", WHOLE_SIZES)
def test_a_whole_size_is_symbolic(name):
    program = WHOLE_SIZES[name]
    compiled = thunder.jit(program, cache="symbolic values")
    for n in (4, 6, 9):
        x = torch.linspace(0, 1, 2 * n * (n + 1)).reshape(1, 2, n, n + 1)
        torch.manual_seed(0)
        want = program(x)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(x), want)
    assert thunder.cache_misses(compiled) == 1 or name not in ONE_PROGRAM


def test_a_size_made_of_an_int_that_changes():
    def program(n):
        return F.pad(A, torch.ones(n).shape + (1,))

    compiled = thunder.jit(program)
    for n in (1, 2, 3, 4, 5):
        assert torch.equal(compiled(n), program(n))


@pytest.mark.parametrize("name", ["missing", "twice", "batched"])
def test_gradients_that_are_compiled_later_are_those_of_their_sizes(name):
    """What decides there is decided for the call's own sizes, and checked by the next call."""

    def program(x, w):
        return (x * w).sum(0), F.normalize(x, dim=w.shape[0] - 2).expand(w.shape[0], *x.shape) * w[:, None, None]

    def gradients(run, x, w):
        first, second = run(x, w)
        if name == "missing":
            return torch.autograd.grad(second.square().sum(), (x, w))
        if name == "batched":
            return torch.autograd.grad(second, (x, w), torch.ones(2, *second.shape), is_grads_batched=True)
        inner = torch.autograd.grad(second.square().sum() + first.sum(), x, create_graph=True)
        return torch.autograd.grad(inner[0].square().sum(), (x, w))

    compiled = thunder.jit(program, cache="symbolic values")
    for n, m in ((2, 4), (3, 4), (3, 7), (2, 5), (3, 4)):
        x, w = (
            torch.rand(m, m if n == m else n, dtype=torch.float64).requires_grad_(),
            torch.rand(n, dtype=torch.float64).requires_grad_(),
        )
        torch.testing.assert_close(gradients(compiled, x, w), gradients(program, x, w))


def test_looking_at_a_program_decides_nothing():
    """Traces are printed with their decompositions, which may be made only then."""

    def program(x, w):
        y = F.normalize(x, dim=w.shape[0] - 2).expand(w.shape[0], *x.shape) * w[:, None, None]
        return torch.tensor_split(y, w.shape[0] - 1, 1)[0].cumsum(w.shape[0] - 2)

    compiled = thunder.jit(program, cache="symbolic values")
    x, w = torch.rand(4, 5, requires_grad=True), torch.rand(3)
    compiled(x, w).sum().backward()
    prologue = str(thunder.last_prologue_traces(compiled)[-1])
    for trace in (*thunder.last_traces(compiled), *thunder.last_backward_traces(compiled)):
        for line in trace.bound_symbols:
            pending = [line]
            while pending:
                pending += pending.pop().subsymbols
        assert str(trace)
    assert str(thunder.last_prologue_traces(compiled)[-1]) == prologue
    torch.testing.assert_close(compiled(x, w), program(x, w))
