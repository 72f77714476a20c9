"""Chained Products: attention whose scores are computed by hand, or by `flex_attention`, without scores in memory.

Before: in a forward `t1 = matmul(q, kT)`, `t2 = mul(t1, s)`, `t3 = add(t2, bias)`, `t4 = softmax(t3, -1)`, `t5 =
matmul(t4, v)`; in its backward `t7 = matmul(g, vT)`, `t8 = softmax_backward(t7, t4, -1, ...)`, `t9 = mul(t8, s)`,
`t10 = matmul(t9, k)`, `t11 = matmul(qT, t9)`, `t12 = matmul(t4T, g)`. After: `(t5, l) = attention(q, kT, v, bias)`, and
`(t10, t11, t12) = attention_backward(q, kT, v, bias, g, d, l)`.

The two are composites of the operations that were there, in any number, with a softmax by the logarithms of the sums of
its rows (l), which the backward recomputes scores with (T. Dao et al. 2022, "FlashAttention"); d are the sums of the
rows of `g * t5`. A fusion executor says whether it has kernels for them that are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.analysis.cost import nbytes, tensors_in
from thunder.core.proxies import Proxy, TensorProxy, element_count, has_numbers
from thunder.core.regions import Region
from thunder.core.rewrite import Rewriter
from thunder.core.symbol import BoundSymbol, Recorder, adopt, recording
from thunder.core.trace import Trace
from thunder.extend.chains import chain_symbol
from thunder.kernels import lower
from thunder.ops import ltorch
from thunder.ops.families.softmax import (
    products_of_rows,
    softmax_backward,
    softmax_backward_by_differences,
    softmax_by_sums,
    softmax_with_sums,
    wide_type,
)
from thunder.transforms.dce import dce

MOST = 200  # operations of an attention


class Unchained(Exception):
    """Raised for operations that are no attention, with the reason."""


def chained_products(trace: Trace, fusers: Sequence) -> Trace:
    """The program with attentions as one operation each, forward and backward, where a fuser has kernels for them."""
    fusers = [f for f in fusers if f.chains_products]
    if not fusers or not any(b.sym is ltorch.softmax for b in trace.bound_symbols):
        return trace
    program = _Program(trace)
    chains = []
    taken = set[int]()
    for i, b in enumerate(trace.bound_symbols):
        if b.sym is not ltorch.softmax or not _is_of_rows(b):
            continue
        try:
            chain = _Chain(program, i)
        except Unchained:
            continue
        if taken.isdisjoint(chain.members) and any(map(chain.fits, fusers)):
            taken |= chain.members
            chains.append(chain)
    return _written(trace, chains) if chains else trace


def _is_of_rows(b: BoundSymbol) -> bool:
    x, dim = b.args[0], b.args[1] if len(b.args) > 1 else b.kwargs.get("dim")
    dtype = b.kwargs.get("dtype")
    is_known = type(dim) is int and not has_numbers([x.shape]) and len(x.shape) >= 2
    return is_known and dim % len(x.shape) == len(x.shape) - 1 and (dtype is None or b.output.dtype is x.dtype)


class _Program:
    """A joint trace, with who computes and who reads its values, and which operations depend on cotangents."""

    def __init__(self, trace: Trace):
        self.trace, self.operations = trace, trace.bound_symbols
        self.producer: dict[Proxy, int] = {}
        self.consumers: dict[Proxy, list[int]] = {}
        self.is_backward: list[bool] = []
        self.returned = set(trace.output_proxies)
        of_cotangents = set[Proxy]()
        for i, b in enumerate(self.operations):
            self.is_backward.append(b.sym.name == "get_grad" or not of_cotangents.isdisjoint(b.inputs))
            if self.is_backward[-1]:
                of_cotangents.update(b.outputs)
            for v in dict.fromkeys(b.inputs):
                self.consumers.setdefault(v, []).append(i)
            self.producer |= {o: i for o in b.outputs if not any(o is v for v in b.inputs)}


def _primitives(b: BoundSymbol) -> list[BoundSymbol]:
    return [b] if b.sym.id in lower.ROWS or not b.subsymbols else [p for sub in b.subsymbols for p in _primitives(sub)]


def _is_product(b: BoundSymbol) -> bool:
    return len(own := _primitives(b)) == 1 and lower.is_product(own[0])


def _is_elementwise(b: BoundSymbol) -> bool:
    """Whether an operation computes elements of elements: those that it looks up are read at indices."""
    return bool(b.outputs) and all(map(lower.is_of_elements, _primitives(b)))


class _Chain:
    """The operations of an attention by their numbers: its forward and its backward. Raises Unchained."""

    def __init__(self, program: _Program, softmax: int):
        self.program, self.softmax = program, softmax
        self.x, self.y = program.operations[softmax].args[0], program.operations[softmax].output
        self.count = element_count(self.y)
        self.members, self.inner, self.outer = set[int](), set[int](), set[int]()
        self.dependent = set[Proxy]()
        if not self._add_sources(self.x):
            raise Unchained("no product computes the scores")
        self._grow()
        backward = [i for i in self.members if program.is_backward[i]]
        self.forward_outer = [i for i in self.outer if not program.is_backward[i]]
        self.backward_outer = sorted(self.outer.intersection(backward))
        self.softmax_backward = [i for i in backward if program.operations[i].sym is softmax_backward]
        others = [i for i in self.members if program.operations[i].sym is ltorch.softmax]
        if len(self.forward_outer) != 1 or len(self.softmax_backward) != bool(backward) or others != [softmax]:
            raise Unchained("not one product of weights")
        self.out = program.operations[self.forward_outer[0]].output
        self._check()
        self.forward = self._template(False)
        self.backward = self._template(True) if backward else None

    # ------------------------------------------------------------------------------------------- the operations
    def _add_sources(self, value: Proxy) -> bool:
        """Adds the products as large as the weights that a value is computed of by elementwise operations, and these
        operations. Returns whether there are any."""
        producer = self.program.producer.get(value)
        if value in self.dependent:
            return True
        if producer is None or not isinstance(value, TensorProxy) or len(self.members) > MOST:
            return False
        b = self.program.operations[producer]
        if _is_product(b):
            if element_count(value) != self.count:
                return False
            self.inner.add(producer)
        elif not _is_elementwise(b) or not any([self._add_sources(i) for i in b.inputs]):
            return False
        self.members.add(producer)
        self.dependent.update(b.outputs)
        return True

    def _grow(self) -> None:
        """Adds what is computed of the scores, up to outer products."""
        waiting = [*self.dependent]
        while waiting:
            value = waiting.pop()
            if value in self.program.returned:
                raise Unchained("scores are returned")
            for i in self.program.consumers.get(value, ()):
                if i in self.members:
                    continue
                b = self.program.operations[i]
                before = set(self.dependent)
                if _is_product(b):
                    self.outer.add(i)
                    self.members.add(i)
                    continue
                if not (_is_elementwise(b) or b.sym in (ltorch.softmax, softmax_backward) or _is_maximum(b)):
                    raise Unchained(f"{b.sym.name} reads the scores")
                self.members.add(i)
                self.dependent.update(b.outputs)
                for v in b.inputs:
                    self._add_sources(v)
                waiting += self.dependent - before
                if len(self.members) > MOST:
                    raise Unchained("too many operations")

    def _check(self) -> None:
        """Raises Unchained where the operations are no attention."""
        operations, program = self.program.operations, self.program
        for i in self.outer:
            dependent = [v for v in operations[i].inputs if v in self.dependent]
            if len(dependent) != 1:
                raise Unchained("a product of two scores")
        for i in self.inner:
            if any(v in self.dependent for v in operations[i].inputs):
                raise Unchained("scores of scores")
        if any(program.is_backward[i] for i in self.members) and self.cotangent() is None:
            raise Unchained("no product of the cotangent with the values")
        # between the softmax and the product of weights: multiples, in the order of rows
        value = self.y
        path = self._between(value, self.forward_outer[0])
        for i in path:
            if not all(lower.is_multiple(p) for p in _primitives(operations[i])):
                raise Unchained("weights are no multiples of a softmax")
        for i in self.members:
            if _is_maximum(operations[i]) and not all(
                operations[c].sym is ltorch.eq and _is_number(operations[c].args[1], float("-inf"))
                for c in program.consumers.get(operations[i].output, ())
            ):
                raise Unchained("a maximum is read")
            if _is_maximum(operations[i]) and operations[i].args[0] is not self.x:
                raise Unchained("another maximum")

    def cotangent(self) -> Proxy | None:
        """The cotangent of the product of weights and values, which the backward multiplies with the values."""
        operations, producer = self.program.operations, self.program.producer
        values = operations[self.forward_outer[0]].args[1]
        for i in sorted(self.inner):
            g, turned, *_ = operations[i].args
            turning = operations[producer[turned]] if turned in producer else None
            is_of_values = (
                turning is not None
                and turning.sym is ltorch.transpose
                and turning.args[0] is values
                and {d % len(values.shape) for d in turning.args[1:]} == {len(values.shape) - 1, len(values.shape) - 2}
            )
            if self.program.is_backward[i] and is_of_values and g.shape == self.out.shape and g.dtype is self.out.dtype:
                return g
        return None

    def _between(self, value: Proxy, last: int) -> list[int]:
        """The forward operations that a product is computed by, of the softmax."""
        below, above = {value}, {*self.program.operations[last].inputs}
        for i in sorted(self.members):
            if not below.isdisjoint(self.program.operations[i].inputs):
                below.update(self.program.operations[i].outputs)
        for i in sorted(self.members, reverse=True):
            if not above.isdisjoint(self.program.operations[i].outputs):
                above.update(self.program.operations[i].inputs)
        return [
            i for i in self.members
            if i != self.softmax and not (below & above).isdisjoint(self.program.operations[i].outputs)
        ]  # fmt: skip

    # ------------------------------------------------------------------------------------------- the composites
    def _template(self, backward: bool) -> _Template:
        """The composite of the forward, or of the backward."""
        program = self.program
        needed = set(self.backward_outer if backward else self.forward_outer)
        chosen = set[int]()
        waiting = sorted(needed)
        while waiting:
            i = waiting.pop()
            if i in chosen:
                continue
            chosen.add(i)
            for v in program.operations[i].inputs:
                producer = program.producer.get(v)
                if producer is None or producer in chosen:
                    continue
                is_behind = producer > min(needed)  # as a view of an operand that a later product reads
                if producer in self.members or self._is_cheap(v) or is_behind:
                    if not (producer in self.members or _is_elementwise(program.operations[producer])):
                        raise Unchained("an operand is computed behind the first product")
                    waiting.append(producer)
        if chosen & self.outer != needed:
            raise Unchained("a product of weights is an operand")
        operations = [program.operations[i] for i in sorted(chosen)]
        outputs = [program.operations[i].output for i in sorted(needed)]
        return _Template(operations, outputs, self)

    def _is_cheap(self, value: Proxy) -> bool:
        """Whether a value is recomputed for each element rather than read: from fewer bytes than it has."""
        leaves = self._leaves(value, 0)
        return leaves is not None and isinstance(value, TensorProxy) and sum(map(nbytes, leaves)) < nbytes(value)

    def _leaves(self, value: Proxy, depth: int) -> set[TensorProxy] | None:
        """The values that a value depends on, of fewer bytes than it has; None where that is not known."""
        producer = self.program.producer.get(value)
        if not isinstance(value, TensorProxy) or depth > 30:
            return None
        if producer is None or not _is_elementwise(self.program.operations[producer]):
            return {value}
        leaves = set[TensorProxy]()
        for v in self.program.operations[producer].inputs:
            below = self._leaves(v, depth + 1)
            if below is None:
                return {value}
            leaves |= below
        return leaves if sum(map(nbytes, leaves)) < nbytes(value) else {value}

    def fits(self, fuser: Any) -> bool:
        """Whether a fuser has kernels."""
        return all(fuser.takes_chain(t.recorded()) for t in (self.forward, self.backward) if t)


def _is_number(x: Any, number: float) -> bool:
    return type(x) in (int, float) and x == number


def _is_maximum(b: BoundSymbol) -> bool:
    keepdim = b.args[2] if len(b.args) > 2 else b.kwargs.get("keepdim", False)
    dim = b.args[1] if len(b.args) > 1 else b.kwargs.get("dim")
    return b.sym is ltorch.amax and keepdim is True and type(dim) is int and dim in (-1, len(b.args[0].shape) - 1)


class _Template:
    """The operations of a composite: recorded ones, in which the softmax is computed another way."""

    def __init__(self, operations: Sequence[BoundSymbol], outputs: Sequence[TensorProxy], chain: _Chain):
        self.operations, self.outputs, self.chain = operations, outputs, chain
        self.is_backward = chain.program.is_backward[chain.program.producer[outputs[0]]]
        self.read = tensors_in(Region(operations, {*outputs}).inputs)
        if len(self.read) != len(Region(operations, {*outputs}).inputs) or has_numbers([t.shape for t in self.read]):
            raise Unchained("it reads numbers")
        of_rows = TensorProxy(shape=(*chain.y.shape[:-1], 1), dtype=wide_type(chain.y), device=chain.y.device)
        of_rows.name = chain.program.trace.names.make()
        differences = TensorProxy(shape=of_rows.shape, dtype=of_rows.dtype, device=of_rows.device)
        differences.name = chain.program.trace.names.make()
        self.sums, self.differences = of_rows, differences
        self.inputs = [*self.read, *((of_rows, differences) if self.is_backward else ())]
        softmax = chain.program.operations[chain.softmax]
        replaced: dict[BoundSymbol, Callable] = {softmax: self._softmax_again if self.is_backward else self._softmax}
        for b in operations:
            if b.sym is softmax_backward:
                replaced[b] = self._softmax_backward
            elif _is_maximum(b) and self.is_backward:
                replaced[b] = lambda table, *_, **__: table[of_rows]  # which is -inf where the maximum is
        name = "attention_backward" if self.is_backward else "attention"
        self.symbol = chain_symbol(
            name, operations, self.inputs, outputs, replaced, None if self.is_backward else self._sums
        )

    def _softmax(self, table: dict, x, *_, **__):
        y, table["largest"], table["total"] = softmax_with_sums(x)
        return y

    def _sums(self, table: dict) -> tuple:
        """The logarithms of the sums of rows."""
        return (ltorch.log(table["total"]) + table["largest"],)

    def _softmax_again(self, table: dict, x, *_, **__):
        return softmax_by_sums(x, table[self.sums])

    def _softmax_backward(self, table: dict, g, y, dim, dtype):
        return softmax_backward_by_differences(g, y, table[self.differences], dtype)

    def recorded(self) -> list[BoundSymbol]:
        """The composite, recorded beside the program."""
        anchor = self.operations[-1]
        with recording(Recorder(anchor.context, lambda: anchor.location)) as recorder:
            self.symbol(*self.inputs)
        return recorder.bound_symbols


def _written(trace: Trace, chains: Sequence[_Chain]) -> Trace:
    """The program with the composites. Operations that nothing reads any more are dropped."""
    out = Rewriter()
    forward = {c.forward_outer[0]: c for c in chains}
    backward = {c.backward_outer[0]: c for c in chains if c.backward is not None}
    skipped = {i for c in chains for i in c.backward_outer}
    sums: dict[_Chain, Proxy] = {}

    def record(anchor: BoundSymbol, run: Callable, wanted: Callable) -> None:
        with recording(Recorder(anchor.context, lambda: anchor.location)) as recorder:
            result = run()
        operations, aliases = adopt(recorder.bound_symbols, result, wanted(result))
        out.bound_symbols.extend(operations)
        out.alias(aliases)

    for i, b in enumerate(trace.bound_symbols):
        if i in forward:
            chain = forward[i]
            values = [out.table.get(v, v) for v in chain.forward.inputs]

            def attend(chain: _Chain = chain, values: list = values) -> tuple:
                result = chain.forward.symbol(*values)
                sums[chain] = result[1]
                return result

            record(b, attend, lambda result: (b.output, result[1]))  # noqa: B023
        elif i in backward:
            chain = backward[i]
            template = chain.backward
            assert template is not None
            values = [out.table.get(v, v) for v in template.read]

            def gradients(chain: _Chain = chain, template: _Template = template, values: list = values) -> tuple:
                g, rows = chain.cotangent(), chain.y.shape[:-1]
                assert g is not None, "the chain has been checked"
                g = out.table.get(g, g)
                differences = ltorch.reshape(products_of_rows(g, out.table.get(chain.out, chain.out)), (*rows, 1))
                return template.symbol(*values, sums[chain], differences)

            record(b, gradients, lambda result, template=template: tuple(template.outputs))
        elif i not in skipped:
            out.write(out.current(b))
    return dce(trace.replace(bound_symbols=out.bound_symbols))
