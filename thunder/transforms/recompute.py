"""Recompute in Backward: a backward recomputes the contents of checkpoints and the values that the save plan has
chosen.

The operations in a checkpoint (`torch.utils.checkpoint`) are recomputed for the backward of the operations in the same
checkpoint. Those in a nested checkpoint are recomputed twice, as in PyTorch: while the outer checkpoint is recomputed,
and for the backward of the inner one.

Each copy is right before its first use, which keeps lifetimes short. A copy of a random operation draws the same
numbers: it gets the state that the generator had in the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thunder.analysis.flow import producers
from thunder.core.proxies import Proxy, TensorProxy, UnbackedNumber, map_structure
from thunder.core.rewrite import renamed_operation, renamed_value
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.ops import prims
from thunder.transforms.phases import marked, phases


def recompute_in_backwards(trace: Trace) -> Trace:
    """The trace whose backwards recompute the contents of checkpoints and the values that the save plan has chosen."""
    for number in range(1, trace.info.backwards + 1):
        trace = recompute(trace, number, trace.info.recomputed.get(number, ()))
    return trace


def recompute(trace: Trace, number: int | None = None, chosen: Iterable[Proxy] = ()) -> Trace:
    """The program whose backward of this number, by default the last one, recomputes the contents of checkpoints and
    the values of `chosen`.

    Before: `t0 = sin(x)` in a checkpoint, `t1 = exp(t0)` after it; `t2 = get_grad(t1)`, `t3 = mul(t2, t1)`, `t4 =
    cos(x)`, `t5 = mul(t3, t0)`. After: the same, with `bw_t0 = sin(x)` right before the last one, which reads `bw_t0`.
    """
    chosen = frozenset(chosen)
    number = trace.info.backwards if number is None else number
    if not chosen and not any(map(_chain, trace.bound_symbols)):
        return trace
    forward, starts, backward, update, returned = phases(trace, number)
    copies = _Copies(forward, chosen, trace.names)
    operations = [new for b in backward for new in copies.before(b)]
    output = trace.output
    if returned:
        gradients = map_structure(lambda x: copies.last(x) if isinstance(x, Proxy) else x, output["output"])
        operations, output = operations + copies.pending, output | {"output": gradients}
    operations = [*copies.forward_with_states(), *starts, *marked(operations, number), *update]
    return trace.replace(bound_symbols=operations, output=output)


def _chain(operation: BoundSymbol) -> tuple:
    """The checkpoints around an operation, the outermost first."""
    return operation.context.checkpoint if operation.context is not None else ()


def _common(a: tuple, b: tuple) -> int:
    """The number of checkpoints that two operations share."""
    n = 0
    while n < len(a) and n < len(b) and a[n] is b[n]:
        n += 1
    return n


class _Copies:
    """The copies of forward operations in the backward.

    A copy of level k of an operation belongs to the recomputation of its k-th checkpoint. It reads copies of level k of
    values in the same k checkpoints, and copies of lower levels of other values. Level 0 is the value itself: saved,
    or recomputed if it was chosen.
    """

    def __init__(self, forward: Sequence[BoundSymbol], chosen: frozenset, names):
        self.forward, self.chosen, self.names = forward, chosen, names
        self.producer = producers(forward)
        self.copies: dict[tuple[Proxy, int], Proxy] = {}
        # random operations that are recomputed: the state of the generator before them
        self.states: dict[BoundSymbol, Proxy] = {}
        self.pending: list[BoundSymbol] = []

    def before(self, operation: BoundSymbol) -> list[BoundSymbol]:
        """An operation of the backward that reads copies, behind the copies that it is the first to read."""
        return [
            *self.lines_for(operation.inputs, _chain(operation)),
            operation.swap(self.table(operation.inputs, _chain(operation))),
        ]

    def last(self, value: Proxy) -> Proxy:
        """The value that the backward returns for one of the forward."""
        self.pending += self.lines_for((value,), ())
        return self.table((value,), ()).get(value, value)

    def level(self, value: Proxy, chain: tuple) -> int | None:
        """The level of the copy of a value that an operation in these checkpoints reads; None for the value itself."""
        operation = self.producer.get(value)
        if operation is None or isinstance(value, UnbackedNumber):  # a size is saved
            return None
        shared = _common(_chain(operation), chain)
        return shared if shared or value in self.chosen else None

    def table(self, values: Iterable[Proxy], chain: tuple) -> dict[Proxy, Proxy]:
        return {v: self.copies[v, level] for v in values if (level := self.level(v, chain)) is not None}

    def lines_for(self, values: Iterable[Proxy], chain: tuple) -> list[BoundSymbol]:
        """New operations that compute the copies of `values` and of all that these depend on, in an order that runs."""
        operations: list[BoundSymbol] = []
        stack = [(v, level, False) for v in values if (level := self.level(v, chain)) is not None]
        while stack:
            value, level, inputs_are_there = stack.pop()
            if (value, level) in self.copies:
                continue
            operation = self.producer[value]
            inside = _chain(operation)[:level]
            if inputs_are_there:
                operations += self.copy(operation, level, self.table(operation.inputs, inside))
                continue
            stack.append((value, level, True))
            stack += [(v, below, False) for v in operation.inputs if (below := self.level(v, inside)) is not None]
        return operations

    def copy(self, operation: BoundSymbol, level: int, table: dict) -> list[BoundSymbol]:
        new = renamed_operation(operation, table, lambda o: self.names.claim(f"bw_{o.name}"))
        self.copies |= {(o, level): table[o] for o in operation.outputs}
        return self.replayed(operation, new) if OpTags.RANDOM_OP in operation.sym.tags else [new]

    def replayed(self, operation: BoundSymbol, new: BoundSymbol) -> list[BoundSymbol]:
        """A random operation between two that set the generator to its state in the forward, and back."""
        state = self.states.get(operation)
        if state is None:
            drawn = prims.get_rng_state.meta(None)  # type: ignore[misc]
            state = self.states[operation] = renamed_value(drawn, self.names.make("rng"))
        now = renamed_value(state, self.names.make("rng"))
        where = generator_of(operation)
        get, put = prims.get_rng_state, prims.set_rng_state
        return [
            get.bind(*where, output=now),
            put.bind(state, *where, output=None),
            new,
            put.bind(now, *where, output=None),
        ]

    def forward_with_states(self) -> list[BoundSymbol]:
        operations = []
        for operation in self.forward:
            if operation in self.states:
                operations.append(prims.get_rng_state.bind(*generator_of(operation), output=self.states[operation]))
            operations.append(operation)
        return operations


def generator_of(operation: BoundSymbol) -> tuple:
    """(device, generator) that a random operation draws from."""
    device = next(o.device for o in operation.outputs if isinstance(o, TensorProxy))
    return device, operation.kwargs.get("generator")
