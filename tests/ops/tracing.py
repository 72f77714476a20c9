"""Operations recorded one call at a time, without the interpreter: quick enough for PyTorch's own thousands of
samples."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

import thunder.executors.pythonex
import thunder.executors.torchex  # noqa: F401
from thunder.core.proxies import TensorProxy, map_structure, proxies_in
from thunder.core.symbol import Context, Names, Recorder, recording
from thunder.core.trace import Trace
from thunder.extend import resolve_executors
from thunder.ops.methods import call_torch
from thunder.transforms.autodiff import joint_trace
from thunder.transforms.dispatch import dispatch
from thunder.transforms.partition import partition


class Recording(TorchFunctionMode):
    """Records the torch calls that a Python function makes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return call_torch(function, args, kwargs or {})


def traced(
    function, args: tuple, kwargs: dict, *, inside: bool = False, grad: bool = False
) -> tuple[Trace, list[torch.Tensor]]:
    """(trace of `function(*args, **kwargs)` with its tensors flat, the tensors it takes).

    inside: function is a Python function and what it calls is recorded; otherwise it is a torch function and is
    recorded itself. grad: what requires grad does.
    """
    names = Names()
    recorder = Recorder(Context(names))
    inputs: list[TensorProxy] = []
    tensors: list[torch.Tensor] = []

    def proxy(x):
        if not isinstance(x, torch.Tensor):
            return x
        for known, tensor in zip(inputs, tensors, strict=True):
            if tensor is x:
                return known
        inputs.append(
            TensorProxy(
                names.claim(f"x{len(inputs)}"),
                shape=tuple(x.shape),
                device=x.device,
                dtype=x.dtype,
                requires_grad=grad and x.requires_grad,
            )
        )
        tensors.append(x)
        return inputs[-1]

    args, kwargs = map_structure(proxy, args), map_structure(proxy, kwargs)
    with recording(recorder):
        if inside:
            with Recording():
                result = function(*args, **kwargs)
        else:
            result = call_torch(function, args, kwargs)
    outputs = tuple(map(recorder.latest, proxies_in(result, [])))
    return Trace("computation", inputs, recorder.bound_symbols, outputs, names), tensors


def carried_out(trace: Trace, tensors: list[torch.Tensor], executors=None) -> list[torch.Tensor]:
    """What the trace computes for these tensors; by PyTorch's functions unless executors are given."""
    return list(dispatch(trace, resolve_executors([]) if executors is None else executors).python_callable()(*tensors))


def differentiated(
    trace: Trace, tensors: list[torch.Tensor], cotangents: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The distinct outputs that the trace computes for these tensors, and the gradient of each tensor, given the
    cotangents of the outputs that require grad."""
    executors = resolve_executors([])
    cut = partition(joint_trace(trace, executors)).info.cut
    with torch.no_grad():
        outputs, saved = dispatch(cut.forward, executors).python_callable()(*tensors)
        gradients = dispatch(cut.backward, executors).python_callable()(list(map(list, saved)), list(cotangents))
    return list(outputs), list(gradients)
