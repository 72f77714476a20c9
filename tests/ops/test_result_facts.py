"""What results are beside their numbers, with each argument requiring grad alone and with all: which are arguments
themselves, which require grad and are leaves, and which arguments get gradients, or whether PyTorch refuses the call.
For PyTorch's own samples."""

from __future__ import annotations

import itertools

import pytest
import torch

import thunder
from tests.ops.harness import tensors_in
from tests.ops.test_op_db import KNOWN, REFUSALS, first_dtype, pytestmark
from thunder.core.proxies import map_structure

__all__ = ["pytestmark"]  # the same warnings are ignored

SAMPLES = 40  # of an operation, of which every eighth is looked at
DIFFERENT = {
    "resolve_neg": "gives its argument itself where that shows no negatives, which only its memory tells",
    "gradient": "a spacing gets a gradient of each slope",
    "nn_functional_linear_cross_entropy": "PyTorch gives no gradient of a weight of classes, where there is one",
    "native_batch_norm": "PyTorch refuses running statistics that require grad", "_native_batch_norm_legit": "the same",
    "nn_functional_silu_complex": "PyTorch refuses a derivative that there is",
}  # fmt: skip


def facts(function, args: tuple, kwargs: dict, requires_grad) -> tuple:
    """Of each result: the argument that it is, whether it requires grad, and is a leaf; of each argument that requires
    grad whether it has none, or what PyTorch says."""
    copies = {}
    for i, x in enumerate(tensors_in((args, kwargs))):
        copied = copies[id(x)] = x.detach().clone()
        if requires_grad(i) and (x.is_floating_point() or x.is_complex()):
            copied.requires_grad_()
    args, kwargs = map_structure(lambda x: copies.get(id(x), x), (args, kwargs))
    inputs = tensors_in((args, kwargs))
    torch.manual_seed(0)
    results = tensors_in(function(*args, **kwargs))
    places = [next((i for i, x in enumerate(inputs) if o is x), None) for o in results]
    observed = [(p, o.requires_grad, p is not None or o.is_leaf) for p, o in zip(places, results, strict=True)]
    wanted, sums = [x for x in inputs if x.requires_grad], [o.abs().sum() for o in results if o.requires_grad]
    if not sums:
        return observed, None
    try:
        return observed, [g is None for g in torch.autograd.grad(sums, wanted, allow_unused=True)]
    except REFUSALS as error:
        return observed, type(error)


def told(*call):
    try:
        return facts(*call)
    except REFUSALS as error:
        return type(error)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("info", KNOWN, ids=lambda info: info.formatted_name)
def test_facts_of_results(info):
    if (dtype := first_dtype(info)) is None:
        pytest.skip("no type that is tried")
    if why := next((why for name, why in DIFFERENT.items() if info.formatted_name.startswith(name)), ""):
        pytest.skip(why)
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), 0, SAMPLES, 8):
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        count = len(tensors_in((args, kwargs)))
        alone = [lambda i, k=k: i == k for k in range(min(count, 6))] if count > 1 else []
        for requires_grad in (lambda i: False, lambda i: True, *alone):
            compiled = thunder.jit(lambda *args, **kwargs: info.op(*args, **kwargs))
            want, got = (told(f, args, kwargs, requires_grad) for f in (info.op, compiled))
            assert got == want
