"""`thunder.debug`: where a NaN or an infinity in results and gradients comes from.

    print(thunder.debug(model, x))

The program of the call runs by PyTorch's own operations, one by one, and each value is looked at; then the backward, of
the results that are scalars, as losses are, or of all results where none is. The call changes nothing: neither
arguments, nor parameters and their gradients, nor the state of generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder.api import compiled_or_jit
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.executors.torchex import no_autocast
from thunder.extend import get_always_executors
from thunder.inspect.verification.programs import as_eager, copied, generators_restored
from thunder.options import NUMERICS_OPTIONS, DebugOptions, JitOptions
from thunder.pipeline import PASSES, lower, lower_backward_without, lower_with_derivatives
from thunder.transforms.watch_values import Fault, Watch, proxies_of

__all__ = ["Fault", "Faults", "debug"]


class Faults(NamedTuple):
    """What `thunder.debug` found. first: the origin of what is not finite in results or gradients; None where they are
    finite. values: how many values were looked at."""

    first: Fault | None
    values: int

    def __str__(self) -> str:
        if self.first is None:
            return f"All results and gradients are finite ({self.values} values looked at)."
        return str(self.first)


def debug(fn: Callable, /, *args: Any, **kwargs: Any) -> Faults:
    """Finds the operation that produces the first NaN or infinity in the results and gradients of `fn(*args,
    **kwargs)`.

    The result names the operation, the user's line with the path of its module, and the inputs of the operation.
    Infinities that the program writes, such as `-inf` in a mask, are not faults, and neither are values that do not
    reach a result or a gradient.

    Args:
        fn: A compiled function or module, or one that `thunder.jit` accepts.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        CaptureError: If the program cannot be captured.
    """
    compiled = compiled_or_jit(fn)
    with generators_restored():
        entry, inputs = compiled.entry_for(args, kwargs)
        arguments = zip(entry.captured.computation.args, inputs, strict=True)
        values = {a.name: x for a, x in arguments if isinstance(a, NumberProxy)}
        with entry.captured.decisions.anew(values):
            return _watched(entry.captured, _options(compiled.options), inputs, _paths(compiled.fn))


def _options(options: JitOptions) -> JitOptions:
    """PyTorch's own operations, one by one."""
    return dataclasses.replace(
        options, executors=get_always_executors(), passes=PASSES, transforms=(), numerics=NUMERICS_OPTIONS.EAGER,
        debug=DebugOptions(), used_compile_options={},
    )  # fmt: skip


def _paths(fn: Any) -> dict[int, str]:
    """The paths of a module's parameters and buffers, by their identity."""
    if not isinstance(fn, torch.nn.Module):
        return {}
    return {id(x): name for name, x in [*fn.named_buffers(), *fn.named_parameters()]}


def _watched(captured: Any, options: JitOptions, inputs: tuple, paths: dict[int, str]) -> Faults:
    """Runs a captured program on copies of its inputs, forward and backward, and looks at each result. paths: by id of
    an input, its name in the function."""
    program = captured.computation
    program = program.replace(bound_symbols=list(map(as_eager, program.bound_symbols)))
    names = {a.name: paths[id(x)] for a, x in zip(program.args, inputs, strict=True) if id(x) in paths}
    watch = Watch(captured.where, names, captured.computation)
    own = [copied(x.detach() if isinstance(x, torch.Tensor) else x) for x in inputs]
    differentiates = captured.output_requires_grad and not options.disable_torch_autograd
    with torch.no_grad():
        if not differentiates:
            trace = lower(program, options, options.executors)[-1]
            no_autocast(watch.watched("forward", trace))(*own)
            return Faults(watch.fault(proxies_of(trace.output)), len(watch.numbers))
        forward, backward, cut = lower_with_derivatives(program, options, options.executors)
        outputs, (tensors, others) = no_autocast(watch.watched("forward", forward[-1]))(*own)
        fault = watch.fault(proxies_of(forward[-1].output[0]))
        if fault is not None:  # what comes behind it follows from it
            return Faults(fault, len(watch.numbers))
        starts = [(p, x) for p, x in zip(forward[-1].output[0], outputs, strict=True) if p.requires_grad]
        losses = [i for i, (_, x) in enumerate(starts) if not x.dim()] or list(range(len(starts)))
        missing = [i for i in range(len(starts)) if i not in losses]
        traces = lower_backward_without(cut, missing, options, options.executors) if missing else backward
        cotangents = [torch.ones_like(x) if i in losses else None for i, (_, x) in enumerate(starts)]
        no_autocast(watch.watched("backward", traces[-1]))([list(tensors), list(others)], cotangents)
        gradients = [x.name for x in _flat(traces[-1].output) if isinstance(x, TensorProxy)]
        return Faults(watch.fault(gradients), len(watch.numbers))


def _flat(x: Any) -> list:
    return [y for part in x for y in _flat(part)] if isinstance(x, (tuple, list)) else [x]
