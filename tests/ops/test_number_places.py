"""Tensors of one integer where PyTorch takes ints: one number of each sample of `op_db` at a time is given as a tensor.
Results, gradients and errors are eager's, or the program is refused in words."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import thunder
from thunder.compat.names import version
from thunder.errors import ThunderError

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
SAMPLES = 12
# what is refused where eager reads a number. The list may only become shorter.
REFUSED = {
    "torch.ops.aten._safe_softmax.default": "an overload by name", "tensor_split": "places that a tensor holds",
    "histogramdd": "its bins", "resize_": "it changes the memory of a tensor", "tensordot": "what its dims are",
    "to_sparse": "a sparse result that requires grad",
    "norm": "the norm decides how it is computed", "linalg.norm": "the norm decides how it is computed",
    "linalg.vector_norm": "the norm decides how it is computed", "masked.normalize": "the norm decides how it is "
        "computed",
}  # fmt: skip
UNDEFINED = {"empty", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}  # what was in memory


def dtype_of(info):
    return next((d for d in (torch.float64, torch.float32, torch.int64) if d in info.dtypes), None)


def numbers_in(sample):
    """(container, key, key in that or None) of each int, one of each argument."""
    for box, keys in (("args", range(len(sample.args))), ("kwargs", list(sample.kwargs))):
        for key in keys:
            value = getattr(sample, box)[key]
            if type(value) is int:
                yield box, key, None
            elif type(value) in (tuple, list, torch.Size):
                inside = next((i for i, x in enumerate(value) if type(x) is int), None)
                if inside is not None:
                    yield box, key, inside


def with_number(sample, position, grad: bool) -> tuple:
    """A copy of the sample's arguments, with a tensor in this place."""
    box, key, inside = position
    value = {"args": list(sample.args), "kwargs": dict(sample.kwargs)}
    if inside is None:
        value[box][key] = torch.tensor(value[box][key])
    else:
        was = value[box][key]
        value[box][key] = (tuple if type(was) is torch.Size else type(was))(
            torch.tensor(x) if i == inside else x for i, x in enumerate(was)
        )
    return own(sample.input, grad), own(value["args"], grad), {k: own(v, grad) for k, v in value["kwargs"].items()}


def own(x, grad: bool):
    if isinstance(x, torch.Tensor):
        return x.detach().clone().requires_grad_(grad and x.requires_grad)
    return type(x)(own(y, grad) for y in x) if type(x) in (list, tuple) else x


def tensors(x) -> list:
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for y in x for t in tensors(y)] if isinstance(x, (list, tuple)) else []


def outcome(function, first, args, kwargs):
    """Results and gradients, or the exception."""
    torch.manual_seed(0)
    try:
        results = tensors(function(first, *args, **kwargs))
        roots = [r.abs().sum() if r.is_complex() else r.double().square().sum() for r in results if r.requires_grad]
        leaves = [t for t in tensors([first, args, list(kwargs.values())]) if t.requires_grad]
        gradients = torch.autograd.grad(sum(roots), leaves, materialize_grads=True) if roots and leaves else ()
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return error
    return [(r.detach(), r.requires_grad) for r in results], gradients


def compared(info, sample, position, grad: bool) -> str:
    def program(first, args, kwargs):
        return info.op(first, *args, **kwargs)

    compiled = thunder.jit(program, fallback="error", numerics="eager")
    want = outcome(info.op, *with_number(sample, position, grad))
    got = outcome(lambda first, *args, **kwargs: compiled(first, args, kwargs), *with_number(sample, position, grad))
    if isinstance(got, ThunderError):
        return "raises" if isinstance(want, Exception) else "refused"
    if isinstance(want, Exception):
        assert isinstance(got, Exception), (want, got)
        return "raises"
    assert not isinstance(got, Exception), got
    if info.name not in UNDEFINED:
        torch.testing.assert_close(got, want, equal_nan=True)
    return "same"


@pytest.mark.sweep(8)
@pytest.mark.parametrize("info", [i for i in op_db if dtype_of(i) is not None], ids=lambda i: i.formatted_name)
def test_a_tensor_of_an_integer_is_that_integer(info):
    floats = dtype_of(info).is_floating_point and info.supports_autograd
    seen, results = set(), []
    for n, sample in enumerate(info.sample_inputs_func(info, "cpu", dtype_of(info), floats)):
        if n == SAMPLES:
            break
        for number_place in numbers_in(sample):
            if number_place[:2] not in seen:
                seen.add(number_place[:2])
                if number_place[2] is None and version() < (2, 10):  # 2.9 takes a tensor for an empty list of integers
                    continue
                results += [
                    compared(info, sample, number_place, grad) for grad in ((False, True) if floats else (False,))
                ]
    assert "refused" not in results or info.name in REFUSED


@pytest.mark.skipif(version() < (2, 10), reason="torch 2.9 refuses a tensor there, or takes the sum over all")
def test_sizes_are_no_decisions_and_dimensions_are():
    def sizes(x, t):
        return x.narrow(1, 0, t) * 2, torch.roll(x, t, 1), x.view(t, -1)

    def dimensions(x, t):
        return x.sum(t), x.transpose(t, 2)

    for program, values, programs in ((sizes, (1, 2, 1, 3), 1), (dimensions, (1, 0, 1, 0), 2)):
        compiled = thunder.jit(program, fallback="error")
        for n in values:
            x, t = torch.randn(2, 3, 6, requires_grad=True), torch.tensor(n)
            want, got = program(x, t), compiled(x, t)
            torch.testing.assert_close(got, want)
            grads = [torch.autograd.grad(sum(r.square().sum() for r in outcome), x) for outcome in (want, got)]
            torch.testing.assert_close(*grads)
        assert len(compiled.programs) == programs


def test_an_index_with_a_tensor_in_a_list_is_an_index():
    def program(x, t):
        return x[[t, 1]], x[t:], x[:, :t]

    x, t = torch.randn(3, 4), torch.tensor(2)
    torch.testing.assert_close(thunder.jit(program, fallback="error")(x, t), program(x, t))


def test_a_method_whose_schema_has_a_number_before_the_tensor():
    """`x.polygamma(n)` is polygamma(n, self): a tensor of one integer before the dot is no number."""
    x = torch.tensor(3)
    for f in (lambda x, n: x.polygamma(n), lambda x, n: torch.polygamma(n, x)):
        for n in (1, torch.tensor(2)):
            torch.testing.assert_close(thunder.jit(f, fallback="error")(x, n), f(x, n))
