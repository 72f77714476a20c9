"""What the generic tests of operations share: samples, and ways to run an operation through thunder."""

from __future__ import annotations

import torch

import tests.ops.samples  # noqa: F401
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

        def numbers():
            return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

        return (torch.complex(numbers(), numbers()) if dtype.is_complex else numbers()).to(dtype)

    return make


def samples_of(symbol, dtype: torch.dtype, which: str = "sampler"):
    """(args, kwargs) pairs of an operation's samples."""
    sampler = getattr(symbol, which)
    for sample in _accepted(sampler(maker(dtype))) if sampler is not None else ():
        if isinstance(sample, torch.Tensor):
            yield (sample,), {}
        elif (
            isinstance(sample, tuple)
            and len(sample) == 2
            and isinstance(sample[0], tuple)
            and isinstance(sample[1], dict)
        ):
            yield sample
        else:
            yield tuple(sample), {}


def _accepted(samples):
    """The samples up to one that cannot be made in this type (a matrix product of bools, the sign of a complex
    number)."""
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
        return (
            None
            if line.sym.module == "ltorch" and line.sym.decomposition is not None
            else torch_ex.implementation(line)
        )


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

    def filled(x, values):
        if isinstance(x, tuple) and len(x) == 2 and x[1] is hole:
            return values[x[0]]
        if isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
            return type(x)([filled(e, values) for e in x])
        return x

    holes = [hole(a) for a in args], {k: hole(v) for k, v in kwargs.items()}
    run = torch_function(symbol)

    def program(*arguments):
        result = run(
            *[filled(a, arguments) for a in holes[0]], **{k: filled(v, arguments) for k, v in holes[1].items()}
        )
        return tuple(tensors_in(result)) if isinstance(result, (tuple, list)) else result

    return program, tensors


def proxies_of(compiled):
    return proxies_in(thunder.last_traces(compiled)[0].output, [])


# without those that this PyTorch has removed, which are defined for older ones
SAMPLED = sorted(
    name for name, symbol in LTORCH.items() if symbol.sampler is not None and torch_function(symbol) is not None
)


# ----------------------------------------------------------------------------------------------------------------
# gradients


class Case:
    """A sample whose gradient PyTorch knows. leaves: the tensors, of which some require grad. forward, gradients: what
    eager computes for `cotangents`."""

    def __init__(self, program, leaves: list[torch.Tensor], which: str):
        self.program, self.leaves, self.which = program, leaves, which
        self.wanted = [x for x in leaves if x.requires_grad]
        torch.manual_seed(0)
        self.forward = tensors_in(program(*leaves))
        outputs = [o for o in self.forward if o.requires_grad]
        if not outputs:
            raise RuntimeError("no output requires grad")
        generator = torch.Generator().manual_seed(1)
        self.cotangents = [torch.randn(o.shape, dtype=o.dtype, generator=generator) for o in outputs]
        self.gradients = self.differentiated(outputs)

    def differentiated(self, outputs: list[torch.Tensor], cotangents=None) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(
            outputs,
            self.wanted,
            self.cotangents if cotangents is None else cotangents,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    def step(self, run) -> None:
        """Forward and backward, for what counts them."""
        torch.manual_seed(0)
        self.differentiated([o for o in tensors_in(run(*self.leaves)) if o.requires_grad])


def gradient_cases(name: str, dtypes=(torch.float64, torch.complex128)):
    """The samples of an operation that PyTorch differentiates: with grad for all of their tensors, and, of two or more,
    for the first and the last alone."""
    for dtype in dtypes:
        for args, kwargs in samples_of(LTORCH[name], dtype):
            program, tensors = as_program(LTORCH[name], args, kwargs)
            floating = [i for i, t in enumerate(tensors) if t.dtype.is_floating_point or t.dtype.is_complex]
            choices = {"all": floating} | (
                {"first": floating[:1], "last": floating[-1:]} if len(floating) > 1 and dtype is torch.float64 else {}
            )
            for which, chosen in choices.items():
                leaves = [t.clone().requires_grad_(i in chosen) if i in floating else t for i, t in enumerate(tensors)]
                try:
                    case = Case(program, leaves, which)
                except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
                    continue  # PyTorch refuses the sample, or has no derivative
                yield case


def saved_bytes(run, leaves: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages that a forward keeps for its backward, its arguments left out."""
    held = {t.untyped_storage().data_ptr() for t in leaves}
    by_storage: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in held:
            by_storage[storage.data_ptr()] = storage
        return t

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = run(*leaves)
    del outputs
    return sum(storage.nbytes() for storage in by_storage.values())


def fits(shape: tuple, real: torch.Size) -> bool:
    """Whether a proxy's shape is that of a tensor, but for data-dependent sizes."""
    return len(shape) == len(real) and not any((m == n) is False for m, n in zip(shape, real))
