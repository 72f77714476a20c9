"""Shared positions: each rank computes some of the positions of sequences, in all layers.

Before: `h = embedding(tokens, t_w)`, `y = linear(h, t_v, None)`, `a = scaled_dot_product_attention(q, k, v, None, 0.0,
True)`, `loss = cross_entropy(a, targets)`. After, over an axis cp:

    t0 = redistribute(tokens, cp, I, S1)
    w0 = redistribute(t_w, cp, I, R);  h0 = embedding(t0, w0)
    v0 = redistribute(t_v, cp, I, R);  y0 = linear(h0, v0, None)
    k1 = redistribute(k0, cp, S2, R);  v1 = redistribute(v0, cp, S2, R)
    a0 = cat(lower_right_attention(q0[front], k1[:...], v1[:...]), lower_right_attention(q0[back], k1[:...], v1[:...]))
    s0 = cross_entropy(a0, targets0, reduction="sum");  loss = redistribute(s0, cp, P, I) / count

Layers begin it: what a linear or embedding layer reads is cut, where it has sequences that the ranks divide. From there
on every operation that has a rule for parts (`thunder.ops.rules.splitting`) computes this rank's part. What has none
reads the whole value, which the ranks join for it. Under a causal mask a rank has one piece from the front of a
sequence and one from its end, so that all ranks attend to as many keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, adopt, current_recorder, recording
from thunder.core.trace import Trace
from thunder.distributed.layout_types import Parts
from thunder.distributed.layouts import Axis, I, P, R, S
from thunder.distributed.redistribute import redistribute, steps_of
from thunder.ops import ltorch
from thunder.ops.rules import splitting
from thunder.ops.rules.splitting import Part


def share_positions(trace: Trace, axis: Axis, dim: int) -> tuple[Trace, Parts]:
    """The program with positions along dimension `dim` of activations shared by the ranks of an axis, and the layouts
    of parts. What the ranks share already, in front of a backward that a program itself calls, stays."""
    state = _Positions(axis, dim)
    for operation in trace.bound_symbols:
        state.write(operation)
    parts: dict = {part.value: (part.axis, S(part.dim)) for part in state.parts.values()}
    parts |= {x: (axis, P) for x in state.summands}
    return trace.replace(bound_symbols=state.operations), parts


class _Positions:
    """parts: this rank's part of each value that has one; the whole value is joined of it. copies: what each rank gives
    a gradient of, by the whole value. cuts: parts of whole values. own: values of this rank that an earlier pass has
    made."""

    shares_positions = True

    def __init__(self, axis: Axis, dim: int):
        self.axis, self.dim = axis, dim
        self.sequences: dict[Axis, int] = {}
        self.operations: list[BoundSymbol] = []
        self.parts: dict[Proxy, Part] = {}
        self.copies: dict[tuple[Proxy, bool], TensorProxy] = {}
        self.cuts: dict[tuple[Proxy, Axis, int, bool], TensorProxy] = {}
        self.summands: list[TensorProxy] = []
        self.own: set[Proxy] = set()

    def write(self, operation: BoundSymbol) -> None:
        """Writes the operations that take the place of one: on this rank's positions, where those of its operands are
        known."""
        if self._is_own(operation):
            self.own.update(operation.outputs)
            self.operations.append(operation)
            return
        if not self._is_pure(operation):
            self.operations.append(operation)
            return
        with recording(Recorder(operation.context, lambda: operation.location)) as recorder:
            self._begin(operation)
            known = any(isinstance(p, Proxy) and p in self.parts for p in operation.inputs)
            result = self._result(operation) if known else None
        if result is None:  # it reads whole values
            self._forget({o for one in recorder.bound_symbols for o in one.outputs})
            self.operations.append(operation)
            return
        parts, whole = result
        written, aliases = adopt(recorder.bound_symbols, whole, operation.output)
        assert not aliases, "a whole value is joined of parts"
        self.operations += written
        self.parts |= dict(zip(operation.outputs, parts, strict=True)) if parts else {}

    def _forget(self, begun: set) -> None:
        """Values of an operation that is not computed on parts after all are not there."""
        if begun:
            self.parts = {p: part for p, part in self.parts.items() if part.value not in begun}
            for table in (self.copies, self.cuts):
                for key in [key for key, x in table.items() if x in begun]:
                    del table[key]

    def _is_own(self, operation: BoundSymbol) -> bool:
        """Whether results are this rank's: of parts that the program has, and up to where the ranks join them."""
        if operation.sym is redistribute:
            for axis, _, dst in steps_of(*operation.args[1:4]):
                if axis.of_sequences == self.axis:
                    return dst != I
        return not self.own.isdisjoint(operation.inputs)

    def _is_pure(self, operation: BoundSymbol) -> bool:
        tags = operation.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.OPAQUE}
        results = [o for o in operation.outputs if isinstance(o, TensorProxy)]
        return not tags and len(results) == len(operation.outputs) > 0 and not set(results) & set(operation.inputs)

    def _begin(self, operation: BoundSymbol) -> None:
        """A layer reads sequences: they are cut."""
        if operation.sym not in (ltorch.linear, ltorch.embedding):
            return
        x = operation.args[0]
        last = len(x.shape) - (operation.sym is ltorch.linear)
        if x not in self.parts and self.dim < last and x.shape[self.dim] % self.axis.pieces == 0:
            self.parts[x] = Part(self.cut(x, self.axis, self.dim), self.axis, self.dim)

    def _result(self, operation: BoundSymbol) -> tuple[list[Part], Any] | None:
        """The parts of what an operation computes, and the whole of it; without parts where it is a total."""
        symbol = operation.sym
        if (total := splitting.total.of(symbol)) is not None and (value := total(self, operation)) is not None:
            return [], value
        if (several := splitting.several.of(symbol)) is not None:
            parts = several(self, operation)
            if parts is None:
                return None
            joined = dict(zip(operation.outputs, map(self._joined, parts), strict=True))
            return list(parts), map_structure(lambda x: joined.get(x, x), operation.output)
        rule = splitting.rule_of(operation)
        part = None if rule is None or len(operation.outputs) != 1 else rule(self, operation)
        return None if part is None else ([part], self._joined(part))

    def _joined(self, part: Part) -> TensorProxy:
        return redistribute(part.value, part.axis, S(part.dim), I)

    # --- as rules ask
    def part(self, value) -> Part | None:
        return self.parts.get(value)

    def copied(self, x: TensorProxy, axis: Axis) -> TensorProxy:
        return self._once(x, lambda: redistribute(x, self.axis, I, R))

    def gathered_over(self, x: TensorProxy, axis: Axis) -> TensorProxy:
        part = self.parts.get(x)
        if part is None:
            return self.copied(x, axis)
        return self._once(x, lambda: redistribute(part.value, part.axis, S(part.dim), R))

    def _once(self, x: TensorProxy, copy: Callable[[], TensorProxy]) -> TensorProxy:
        """A copy that all operations read, so that its gradient is summed once; under no_grad another one."""
        recorder = current_recorder()
        key = x, recorder is None or recorder.context.grad_enabled
        if key not in self.copies:
            self.copies[key] = copy()
        return self.copies[key]

    def summed_over(self, x: TensorProxy, axis: Axis) -> TensorProxy:
        self.summands.append(x)
        return redistribute(x, self.axis, P, I)

    def largest_over(self, x: TensorProxy, axis: Axis) -> TensorProxy:
        raise AssertionError("each rank has all classes of its positions")

    def cut(self, value: TensorProxy, axis: Axis, dim: int) -> TensorProxy:
        recorder = current_recorder()
        key = value, axis, dim, recorder is None or recorder.context.grad_enabled
        if key not in self.cuts:
            self.cuts[key] = redistribute(value, axis, I, S(dim))
        return self.cuts[key]

    def computed(self, operation: BoundSymbol, table: dict, axis: Axis, dim: int) -> Part:
        args = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.args)
        kwargs = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.kwargs)
        return Part(operation.sym(*args, **kwargs), axis, dim)
