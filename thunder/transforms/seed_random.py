"""Seed Random Operations: under `rng="fused"` random operations become functions of a seed, which fusion executors
compute inside of regions.

Before: `t0 = ltorch.dropout(x, 0.1, True)`. After: `t1 = ltorch.randint(0, 9223372036854775807, ())` at the beginning,
`t2 = ltorch.uniform_philox(x.shape, 0.0, 1.0, seed=t1, offset=0)`, `t3 = ltorch.ge(t2, 0.1)` and two products.

In each call PyTorch draws the seed from the default generator of the device, so that `torch.manual_seed` determines the
numbers. Each operation has its own offset. A backward or a checkpoint recomputes the same numbers from the seed, so
that no mask is saved. Operations that no executor can fuse in this form, and those that draw from a generator of the
user, are left alone. So are all operations of a program that seeds, reads or sets a generator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder.core.dtypes import float32, int64
from thunder.core.proxies import NumberProxy, TensorProxy, numbers_in
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.extend.fusion import FusionExecutor
from thunder.ops import ltorch, prims
from thunder.ops.families import random
from thunder.ops.rules import effects, kernels


def seed_random(trace: Trace, fusers: Sequence[FusionExecutor]) -> Trace:
    """The trace with functions of seeds in the place of the random operations, where one of `fusers` takes these."""
    if any(
        operation.sym is prims.get_rng_state or effects.holds_generator.of(operation.sym)
        for operation in trace.bound_symbols
    ):
        return trace
    seeds = _Seeds(fusers)
    seeded = rewrite(trace, seeds.rule, optional=True)
    read = {p for operation in seeded.bound_symbols for p in operation.inputs}
    return seeded.replace(
        bound_symbols=[*(s for s in seeds.draws if not read.isdisjoint(s.outputs)), *seeded.bound_symbols]
    )


class _Seeds:
    """draws: the operations that draw the seeds, one for each device. offset: that of the next operation."""

    def __init__(self, fusers: Sequence[FusionExecutor]):
        self.fusers = fusers
        self.draws: list[BoundSymbol] = []
        self.of_device: dict = {}
        self.offset = 0

    def rule(self, operation: BoundSymbol, out: Rewriter) -> None:
        """Writes a random operation as a function of a seed, where it has that form."""
        form = kernels.from_uniform.of(operation.sym) if operation.sym.executor is None else None
        if (
            form is None
            or operation.kwargs.get("generator") is not None
            or any(isinstance(n, NumberProxy) for n in numbers_in((operation.args, operation.kwargs), []))
        ):
            return out.write(operation)
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            result = form(self.drawing(operation), *operation.args, **operation.kwargs)
        draws = [b for b in recorder.bound_symbols if b.sym is random.uniform_philox]
        if result is NotImplemented or not all(any(f.can_fuse(d) for f in self.fusers) for d in draws):
            return out.write(operation)
        operations, aliases = adopt(recorder.bound_symbols, result, operation.output)
        for new in operations:
            out.write(new)
        out.alias(aliases)

    def drawing(self, operation: BoundSymbol) -> Callable:
        """draw(shape, device): float32 numbers from [0, 1), different from those of all other operations."""

        def draw(shape, device) -> TensorProxy:
            if device not in self.of_device:
                with recording(
                    Recorder(operation.context.replace(checkpoint=()), lambda: operation.location)
                ) as recorder:
                    self.of_device[device] = ltorch.randint(0, 2**63 - 1, (), device=device, dtype=int64)
                self.draws += recorder.bound_symbols
            self.offset += 1
            return random.uniform_philox(
                tuple(shape),
                0.0,
                1.0,
                device=device,
                dtype=float32,
                seed=self.of_device[device],
                offset=self.offset - 1,
            )

        return draw
