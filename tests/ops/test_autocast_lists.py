"""The operations that PyTorch's own tests of autocast name, and PyTorch's rules for them: a second, foreign list.

The lists for the CPU run. Those for CUDA are typed: PyTorch's rules for CUDA apply to fake tensors, which need no
device.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import thunder
from tests.ops.test_autocast import arguments, flat, half_lowered, lowered, make, sampled
from thunder import compat
from thunder.core.proxies import TensorProxy, map_structure
from thunder.core.symbol import Context, Names, Recorder, recording
from thunder.ops import LTORCH
from thunder.ops.autocast import policy
from thunder.ops.methods import call_torch
from thunder.ops.torch_types import from_tensor_dtype, to_torch_dtype

# refused under autocast; not typed for a GPU where there is none, or of a size that depends on data; made of other
# operations on fake tensors; refused by the kernel alone
OTHERWISE_ON_FAKES = set(
    (
        "binary_cross_entropy getitem grid_sample grouped_mm _grouped_mm im2col affine_grid linalg_cross stft istft "
        "argwhere nonzero masked_select unique unique_consecutive bincount "
        "corrcoef cov ctc_loss gaussian_nll_loss geqrf gru gru_cell lstm lstm_cell rnn_tanh rnn_relu "
        "gru_of_packed_sequences lstm_of_packed_sequences "
        "rnn_tanh_of_packed_sequences rnn_relu_of_packed_sequences histogram histogramdd linalg_lstsq "
        "choose_qparams_optimized combinations grid_sampler_2d grid_sampler_3d "
        "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine"
    ).split()
)
# PyTorch cannot type them on fake tensors
WITHOUT_FAKES = {"cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "grid_sampler", "equal"}


def entries(lists: object) -> dict[str, tuple]:
    """name -> (function, args, kwargs) of each entry."""
    results = {}
    torch.manual_seed(0)
    for group, items in sorted(vars(lists("cpu")).items()):
        spaces = (torch.Tensor,) if group.startswith("methods") else (torch, torch._C._nn, F, torch.linalg)
        for i, (name, args, *rest) in enumerate(items):
            name = (
                name.removeprefix("linalg_")
                if group.startswith("linalg")
                else "__truediv__"
                if name == "__div__"
                else name
            )
            function = next(f for space in spaces if (f := getattr(space, name, None)) is not None)
            if name == "linear" and len(args) > 2:  # a bias of two dimensions: documented for one
                args = (*args[:2], args[2][0])
            if name == "einsum":
                args, rest = (args, *rest[0]), ()
            results[f"{group}-{name}-{i}"] = function, args, next((x for x in rest if isinstance(x, dict)), {})
    return results


CPU, CUDA = entries(AutocastCPUTestLists), entries(AutocastTestLists)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's advice on single functions
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("entry", [f"cpu:{n}" for n in CPU] + [f"cuda:{n}" for n in CUDA])
def test_results_on_the_cpu_are_those_of_eager(entry, low):
    kind, _, name = entry.partition(":")
    function, args, kwargs = (CPU if kind == "cpu" else CUDA)[name]

    def program(*args):
        return function(*args, **kwargs)

    with torch.autocast("cpu", low):
        try:
            torch.manual_seed(0)
            want = program(*args)
        except (RuntimeError, TypeError) as error:
            with pytest.raises(type(error)):
                thunder.jit(program)(*args)
            return
        torch.manual_seed(0)
        got = thunder.jit(program)(*args)
    for g, w in zip(flat(got), flat(want), strict=True):
        if isinstance(w, torch.Tensor):
            assert g.dtype is w.dtype
            torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
        else:
            assert g == w


def typed_by_pytorch(function, args: tuple, kwargs: dict, kinds: tuple) -> list[torch.dtype]:
    """The dtypes of the results that PyTorch gives for tensors on a GPU, without one."""

    def fake(x):
        return torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x

    try:
        with FakeTensorMode(), compat.autocast_on(kinds):
            results = flat(function(*map_structure(fake, args), **map_structure(fake, kwargs)))
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "no NVIDIA driver" in str(error):
            pytest.skip("this build of PyTorch asks the driver of a GPU, and there is none")
        raise
    return [x.dtype for x in results if isinstance(x, torch.Tensor)]


def typed_by_thunder(function, args: tuple, kwargs: dict, kinds: tuple) -> list[torch.dtype]:
    names = Names()

    def proxy(x):
        if not isinstance(x, torch.Tensor):
            return x
        return TensorProxy(names.make(), shape=tuple(x.shape), dtype=from_tensor_dtype(x.dtype), device="cuda:0")

    args, kwargs = map_structure(proxy, args), map_structure(proxy, kwargs)
    with recording(Recorder(Context(names, autocast=policy(kinds)))):
        return [to_torch_dtype(x.dtype) for x in flat(call_torch(function, args, kwargs)) if isinstance(x, TensorProxy)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's advice on single functions
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", [n for n in CUDA if n.split("-")[1] not in WITHOUT_FAKES])
def test_types_on_cuda_are_those_of_eager(name, low):
    function, args, kwargs = CUDA[name]
    kinds = (("cuda", low),)
    try:
        want = typed_by_pytorch(function, args, kwargs, kinds)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            typed_by_thunder(function, args, kwargs, kinds)
        return
    assert typed_by_thunder(function, args, kwargs, kinds) == want


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's advice on single functions
@pytest.mark.parametrize("name", [n for n in sampled() if n not in OTHERWISE_ON_FAKES])
def test_types_of_every_operation_on_cuda(name):
    symbol, kinds, compared = LTORCH[name], (("cuda", torch.bfloat16),), 0
    function = symbol.torch_functions[0]
    torch.manual_seed(0)
    for sample in symbol.sampler(make):
        sample_arguments = arguments(sample)
        for change in (lambda x: x, lowered, half_lowered()):
            args, kwargs = map_structure(change, sample_arguments[0]), map_structure(change, sample_arguments[1])
            try:
                want = typed_by_pytorch(function, args, kwargs, kinds)
            except (RuntimeError, TypeError, ValueError):
                continue
            try:
                got = typed_by_thunder(function, args, kwargs, kinds)
            except RuntimeError:  # where PyTorch's kernels refuse, too: those for fake tensors ask less
                with pytest.raises(RuntimeError):
                    function(*args, **kwargs)
                continue
            assert got == want, f"{[getattr(x, 'dtype', x) for x in args]}"
            compared += 1
    assert compared, "PyTorch refused every sample"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs PyTorch's list on a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's advice on single functions
@pytest.mark.parametrize("name", CUDA)
def test_results_on_a_gpu_are_those_of_eager(name):
    function, args, kwargs = CUDA[name]
    args = map_structure(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, args)
    with torch.autocast("cuda", torch.float16):
        try:
            want = function(*args, **kwargs)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                thunder.jit(lambda *args: function(*args, **kwargs))(*args)
            return
        got = thunder.jit(lambda *args: function(*args, **kwargs))(*args)
    for g, w in zip(flat(got), flat(want), strict=True):
        assert g.dtype is w.dtype if isinstance(w, torch.Tensor) else g == w
