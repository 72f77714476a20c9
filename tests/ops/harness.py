"""What the generic tests of operations share: samples, and ways to run an operation through thunder."""

from __future__ import annotations

import torch

import thunder
from thunder.core.proxies import TensorProxy, proxies_in
from thunder.executors.torchex import torch_ex
from thunder.extend import Executor
from thunder.ops import LTORCH
from thunder.transforms.dispatch import dispatch


def maker(dtype: torch.dtype, seed: int = 0):
    """`make(*shape, dtype=, low=, high=)`: a tensor of numbers from an interval, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape, dtype=dtype, low=-2.0, high=2.0):
        if dtype is torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        if not dtype.is_floating_point and not dtype.is_complex:
            return torch.randint(int(low), max(int(high), int(low) + 1), shape, generator=generator, dtype=dtype)
        made = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return made.to(dtype)

    return make


def samples_of(symbol, dtype: torch.dtype, which: str = "sampler"):
    """(args, kwargs) pairs of an operation's samples."""
    sampler = getattr(symbol, which)
    for sample in _accepted(sampler(maker(dtype))) if sampler is not None else ():
        if isinstance(sample, torch.Tensor):
            yield (sample,), {}
        elif isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
            yield sample
        else:
            yield tuple(sample), {}


def _accepted(samples):
    """The samples up to one that cannot be made in this type (a matrix product of bools, the sign of a complex number)."""
    while True:
        try:
            yield next(samples)
        except (StopIteration, RuntimeError):
            return


def torch_function(symbol):
    """The PyTorch function that an operation is."""
    return symbol.torch_functions[0] if symbol.torch_functions else symbol.fn


class Opened(Executor):
    """Opens up every operation that has a decomposition: what is left are primitives, which PyTorch runs."""

    def implementation(self, line):
        return None if line.sym.module == "ltorch" and line.sym.decomposition is not None else torch_ex.implementation(line)


def by_decomposition(compiled, inputs):
    """The outputs that the decompositions compute for the captured program."""
    trace = thunder.last_traces(compiled)[1]
    opened = dispatch(trace, [Opened("opened")])
    return opened.python_callable()(*inputs), [line.sym for line in opened.bound_symbols]


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, (torch.Tensor, TensorProxy)):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (tuple, list)) else []


def as_program(symbol, args, kwargs):
    """(function of the sample's tensors, the tensors): what is compiled for a sample."""
    tensors: list[torch.Tensor] = []

    def hole(x):
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            return len(tensors) - 1, hole
        if isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
            return type(x)([hole(e) for e in x])
        return x

    def filled(x, given):
        if isinstance(x, tuple) and len(x) == 2 and x[1] is hole:
            return given[x[0]]
        if isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
            return type(x)([filled(e, given) for e in x])
        return x

    holes = [hole(a) for a in args], {k: hole(v) for k, v in kwargs.items()}
    run = torch_function(symbol)

    def program(*given):
        result = run(*[filled(a, given) for a in holes[0]], **{k: filled(v, given) for k, v in holes[1].items()})
        return tuple(tensors_in(result)) if isinstance(result, (tuple, list)) else result

    return program, tensors


def proxies_of(compiled):
    return proxies_in(thunder.last_traces(compiled)[0].output, [])


SAMPLED = sorted(name for name, symbol in LTORCH.items() if symbol.sampler is not None)
