"""`thunder.opcheck`: what somebody declared of an operation, beside what it does.

    thunder.opcheck(my_operation, [(x,), (x, 2.0), ((x,), {"scale": 3.0})])

For each sample: the declared results against the real ones (structure, shape, dtype, device, strides, memory), at the
sizes of the sample and with symbolic sizes; values of a compiled call against a plain one; the derivative against
differences (`torch.autograd.gradcheck`, in float64); `torch.vmap` against a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from thunder.api import jit
from thunder.core.proxies import leaves, map_structure
from thunder.core.symbol import Symbol
from thunder.core.tables import table
from thunder.errors import DeclarationError, MissingImplementationError
from thunder.extend import Executor

TESTS = ("declaration", "symbolic sizes", "derivative", "vmap")


class Checked(NamedTuple):
    """One test of one sample. passes: None where it does not apply, for the reason in `note`."""

    test: str
    sample: int
    passes: bool | None
    note: str = ""


class OperationReport(NamedTuple):
    """What `thunder.opcheck` found. Printed, a table."""

    checked: tuple[Checked, ...]

    @property
    def problems(self) -> tuple[Checked, ...]:
        return tuple(c for c in self.checked if c.passes is False)

    def __str__(self) -> str:
        verdicts = {True: "passes", False: "FAILS", None: "does not apply"}
        rows = ((c.test, str(c.sample), verdicts[c.passes], c.note.partition("\n")[0]) for c in self.checked)
        return table(("test", "sample", "verdict", "note"), rows)


def opcheck(
    op: Callable, samples: Iterable[Any], *, executors: Sequence[Executor | str] | None = None,
    tests: Sequence[str] = TESTS, raises: bool = True,
) -> OperationReport:  # fmt: skip
    """Compares an operation with its declarations, for each sample.

    Args:
        op: An operation that `thunder.opaque` or `register_operator` returned, an operator of torch.library, or an
            operation that `executors` implement.
        samples: Tuples of positional arguments, or pairs of such a tuple and a dict of keyword arguments.
        executors: The executors that run the operation.
        tests: The tests to run.
        raises: If False, problems are only listed in the report.

    Returns:
        A report, which prints as a table.

    Raises:
        DeclarationError: If a test fails and `raises` is True. The message names each problem.
    """
    arguments = [_sample(s) for s in samples]
    if not arguments:
        raise ValueError("thunder.opcheck: give at least one sample, a tuple of arguments")
    if executors is None and isinstance(op, Symbol) and op.executor is not None:
        executors = [op.executor]

    def program(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def compiled(function: Callable, **options: Any) -> Callable:
        return jit(function, executors=executors, fallback="error", **options)

    runs = {
        "declaration": lambda args, kwargs: _same(compiled(program), op, args, kwargs),
        "symbolic sizes": lambda args, kwargs: _same(symbolic, op, args, kwargs),
        "derivative": lambda args, kwargs: _derivative(compiled, op, args, kwargs),
        "vmap": lambda args, kwargs: _mapped(compiled, op, args, kwargs),
    }
    symbolic = compiled(program, dynamic=True)
    report = OperationReport(
        tuple(_checked(test, i, runs[test], sample) for test in tests for i, sample in enumerate(arguments))
    )
    if raises and report.problems:
        name = getattr(op, "name", getattr(op, "__name__", repr(op)))
        lines = [f"{c.test} of sample {c.sample}: {c.note}" for c in report.problems]
        raise DeclarationError(f"{name} is not what was declared of it:\n" + "\n".join(lines))
    return report


def _sample(sample: Any) -> tuple[tuple, dict]:
    if (
        isinstance(sample, (tuple, list))
        and len(sample) == 2
        and isinstance(sample[0], tuple)
        and type(sample[1]) is dict
    ):
        return sample[0], sample[1]
    return (tuple(sample), {}) if isinstance(sample, (tuple, list)) else ((sample,), {})


def _checked(test: str, number: int, run: Callable, sample: tuple[tuple, dict]) -> Checked:
    """The outcome of one test on one sample. A note in words says why the test does not apply."""
    state = torch.get_rng_state()
    try:
        note = run(*sample)
    except MissingImplementationError as error:
        return Checked(test, number, None, str(error))
    except (RuntimeError, ValueError, TypeError, NotImplementedError, ArithmeticError, AssertionError) as error:
        return Checked(test, number, False, f"{type(error).__name__}: {error}")
    finally:
        torch.set_rng_state(state)
    return Checked(test, number, None if note else True, note)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _plain(op: Callable, args: tuple, kwargs: dict) -> Any:
    """The operation as it runs outside of a program, on copies."""
    with torch.no_grad():
        return op(*map_structure(_copied, args), **map_structure(_copied, kwargs))


def _same(run: Callable, op: Callable, args: tuple, kwargs: dict) -> str:
    state = torch.get_rng_state()
    expected = _plain(op, args, kwargs)
    torch.set_rng_state(state)
    with torch.no_grad():
        result = run(*map_structure(_copied, args), **map_structure(_copied, kwargs))
    torch.testing.assert_close(list(leaves(result)), list(leaves(expected)), equal_nan=True)
    return ""


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _derivative(compiled: Callable, op: Callable, args: tuple, kwargs: dict) -> str:
    """Compares the derivative with finite differences in float64. Returns why that does not apply, or nothing."""
    wide = [x.detach().double().requires_grad_() if _is_float(x) else x for x in args]
    inputs = [x for x in wide if _is_float(x)]
    if not inputs:
        return "it has no argument of floating point"
    try:
        results = _plain(op, tuple(wide), kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"it does not take float64: {str(error).partition(chr(10))[0]}"

    def program(*values: torch.Tensor) -> Any:
        floats = iter(values)
        result = op(*(next(floats) if _is_float(x) else x for x in wide), **kwargs)
        return [x for x in leaves(result) if _is_float(x)]

    if not any(map(_is_float, leaves(results))):
        return "it has no result of floating point"
    run = compiled(program)
    if not any(x.requires_grad for x in run(*inputs)):
        return "its results do not require grad"
    torch.autograd.gradcheck(lambda *values: tuple(x for x in run(*values) if x.requires_grad), inputs)
    return ""


def _mapped(compiled: Callable, op: Callable, args: tuple, kwargs: dict) -> str:
    """Compares the operation under `torch.vmap` with a loop over two samples. Returns why that does not apply, or
    nothing."""
    if not any(isinstance(x, torch.Tensor) for x in args):
        return "it has no tensor among its positional arguments"
    batches = [
        torch.stack([x.detach(), x.detach().flip(0) if x.dim() else x.detach()]) if isinstance(x, torch.Tensor) else x
        for x in args
    ]
    axes = tuple(0 if isinstance(x, torch.Tensor) else None for x in args)

    def program(*values: Any) -> Any:
        return torch.vmap(lambda *one: op(*one, **kwargs), axes, randomness="different")(*values)

    try:
        with torch.no_grad():
            result = list(leaves(compiled(program)(*batches)))
    except DeclarationError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        return f"it cannot be mapped: {str(error).partition(chr(10))[0]}"
    alone = [[x[i] if isinstance(x, torch.Tensor) else x for x in batches] for i in range(2)]
    expected = [list(leaves(_plain(op, tuple(one), kwargs))) for one in alone]
    torch.testing.assert_close(result, [torch.stack(pair) for pair in zip(*expected, strict=True)], equal_nan=True)
    return ""
