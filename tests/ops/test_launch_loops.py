"""Every operation with samples in a launch loop: results, strides, views and errors are those of its printed line."""

import itertools
import warnings

import pytest
import torch

import thunder
from tests.ops.harness import SAMPLED, samples_of, tensors_in
from thunder.errors import ThunderError
from thunder.ops import LTORCH
from thunder.transforms import launch_loop

SAMPLES = 4  # of each operation and type


pytestmark = pytest.mark.usefixtures("native_extension")


def outcome(run, args, kwargs):
    """Facts of the results of a call and its arguments behind it, or the error."""
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    torch.manual_seed(0)
    try:
        result = run(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
        return type(error), str(error)
    return [described(x) for x in (*tensors_in(result), *tensors_in(args))]


def described(x):
    dense = x if x.layout is torch.strided else x.to_dense()
    strides = x.stride() if x.layout is torch.strided else None
    bits = dense.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) if dense.numel() else dense
    return x.dtype, tuple(x.shape), strides, x.layout, x._is_view(), x.is_conj(), x.is_neg(), bits.tolist()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.sweep(12)) for name in SAMPLED])
def test_a_loop_does_what_the_line_does(name, monkeypatch):
    monkeypatch.setattr(launch_loop, "FEWEST", 1)
    for dtype in (torch.float32, torch.int64, torch.complex64):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # PyTorch's about its own samples
            for args, kwargs in itertools.islice(samples_of(LTORCH[name], dtype), SAMPLES):
                compiled = thunder.jit(lambda *a, **k: LTORCH[name](*a, **k), executors=[], fallback="error")
                try:
                    compiled(*args, **kwargs)
                except (ThunderError, RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
                    continue  # nothing was captured
                before = outcome(compiled, args, kwargs)
                launch_loop.take_loops(compiled.programs[0].forward)
                assert outcome(compiled, args, kwargs) == before, (args, kwargs)
