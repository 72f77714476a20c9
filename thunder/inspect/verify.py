"""`thunder.verify`: eager PyTorch beside a compiled program, operation by operation, against float64.

    report = thunder.verify(thunder.jit(model, executors=[...]), x)
    print(report)        # every operation: the user's line, deviations of eager and compiled from float64, verdict
    print(report.first)  # the first operation whose deviation rounding does not explain, or None

Each operation of the programs that run is given eager's inputs, so that what an earlier operation did is not held
against it: the first operation that differs is the culprit. Three results are compared: the operation as its executor
computes it (ours), the operations it stands for as PyTorch computes them (eager's), and the same operations in float64
(the reference). A region of a fusion executor is one operation. After that, every operation is differentiated by
itself, in the three ways. Before all, the original function runs beside the captured program, since what capture
believes is in every trace: where their results part, the calls of PyTorch's are compared line by line. Last come the
results and gradients of the whole program, where what passes over several operations does (recomputation, writes in
place, transforms) would show.

**What rounding explains.** With u the spacing of numbers at 1 in the result's dtype, R the reference, E eager's result,
and R' the reference for inputs of which each was changed by a random part of one rounding, at most u / 2 of it:

    |ours - R|  <=  4 |E - R| + 2 |R' - R| + u |R|

both for the largest and for the root mean square of each term. The first term allows for other orders of the same
operations; the second for operations whose result is sensitive to their inputs (a sum of many terms, a difference of
equal ones), where eager may have been lucky; the last for the rounding of the result itself. In the whole program
deviations add up, and each term is allowed four times. Integers and booleans are eager's, except where E or R' is not
R: there a comparison stands near a tie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.api import compiled_or_jit
from thunder.core.proxies import NumberProxy
from thunder.errors import OptionError
from thunder.inspect.verification.comparison import Comparison, Report
from thunder.inspect.verification.programs import generators_restored
from thunder.inspect.verification.step import Step


def verify(fn: Callable, *args: Any, steps: int = 1, **kwargs: Any) -> Report:
    """Runs eager PyTorch beside a compiled function or module, and finds the first operation whose results differ by
    more than rounding explains.

    The backward is compared as well, for random cotangents.

    Args:
        fn: A compiled function or module. Other functions are compiled with default options.
        args: Positional arguments of the call.
        steps: How often `fn` is called and compared. State that calls change, such as running statistics and random
            generators, differs from step to step.
        kwargs: Keyword arguments of the call.

    Raises:
        OptionError: If `steps` is below 1. Exceptions of `fn` are not changed.
    """
    if type(steps) is not int or steps < 1:
        raise OptionError(f"thunder.verify(steps={steps!r}): valid: a number of calls, at least 1")
    compiled = compiled_or_jit(fn)
    comparisons: list[Comparison] = []
    for step in range(steps):
        with generators_restored():
            entry, inputs = compiled.entry_for(args, kwargs)
            arguments = zip(entry.captured.computation.args, inputs, strict=True)
            values = {a.name: x for a, x in arguments if isinstance(a, NumberProxy)}
            with entry.captured.decisions.anew(values):
                one = Step(step, entry, compiled.options, comparisons)
                if not compiled.options.transforms:  # which change what is computed
                    one.original(compiled.fn, args, kwargs, inputs)
                one.run(inputs)
        if step + 1 < steps:
            compiled(*args, **kwargs)
    return Report(tuple(comparisons))
