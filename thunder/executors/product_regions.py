"""Regions of matrix products: a product with what is computed of its operands before and of its result after.

Before: `t0 = linear(x, w, b)`, `t1 = gelu(t0)`, `t2 = add(t1, r)`. After: `[t2] = TritonProduct0(x, w, b, r)`, where
the cost model says that one kernel is faster than PyTorch's product and a kernel for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from thunder.analysis.cost import nbytes, original_of, tensors_in
from thunder.analysis.flow import producers
from thunder.core.proxies import Proxy, TensorProxy, element_count
from thunder.core.regions import Region, groups_in_order, schedule
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.executors.torchex import torch_ex
from thunder.extend.fusion import fusible
from thunder.kernels import lower, products
from thunder.kernels.machine import Gpu

MOST = 64  # operations of a region


class Product(NamedTuple):
    """The primitive product of an operation, and the bytes of its operands and result."""

    primitive: BoundSymbol
    bytes: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the batch, rows, columns, and the contracted dimension."""
        a, *_ = self.primitive.args
        out = self.primitive.outputs[0]
        deep, columns = a.shape[-1], out.shape[-1]
        batch = 1
        if lower.has_batch(self.primitive):
            batch = element_count(out) // (columns * out.shape[-2])
        return batch, element_count(out) // (columns * batch), columns, deep

    @property
    def kind(self) -> str:
        a = self.primitive.args[0]
        is_rounded = a.dtype.name == "float32" and lower.tensor_cores_multiply_float32()
        return "tf32" if is_rounded else a.dtype.name


def product_of(operation: BoundSymbol) -> Product | None:
    """The product that an operation is, or None. What is added to it, as a bias, are elementwise operations."""
    if not fusible(operation) or not lower.lowers(operation, lambda p: True, products=True):
        return None
    those = [p for p in lower.primitives(operation) if lower.is_product(p)]
    if len(those) != 1 or not all(lower.is_product(p) or _is_map(p) for p in lower.primitives(operation)):
        return None
    return Product(those[0], sum(map(nbytes, tensors_in((*operation.inputs, *operation.outputs)))))


def _is_map(primitive: BoundSymbol) -> bool:
    return lower.is_map_or_view(primitive)


class Finder:
    """The groups of operations of a program that are products with their neighbours. takes: whether kernels compute an
    operation."""

    def __init__(self, trace: Trace, takes: Callable[[BoundSymbol], bool], is_here: Callable[[BoundSymbol], bool]):
        self.operations = trace.bound_symbols
        self.takes, self.is_here = takes, is_here
        self.returned = set(trace.output_proxies)
        of = producers(trace)
        number = {b: i for i, b in enumerate(self.operations)}
        self.producer = {v: number[b] for v, b in of.items()}
        self.consumers: dict[Proxy, list[int]] = {}
        for i, b in enumerate(self.operations):
            for v in dict.fromkeys(b.inputs):
                self.consumers.setdefault(v, []).append(i)
        effects = accumulate(OpTags.DONT_DCE in b.sym.tags for b in self.operations)
        self.stretch = [*effects]  # of each operation: the number of effects before it
        self.group_of: dict[int, frozenset[int]] = {}
        self.product: dict[int, Product] = {}
        self.original: dict[int, BoundSymbol] = {}  # of products, as they were before PyTorch's executor took them
        for i, b in enumerate(self.operations):
            if b.sym.executor not in (None, torch_ex) or not self.is_here(b):
                continue  # an executor with kernels of its own has taken it
            original = original_of(b)
            product = product_of(original)
            if product is not None:
                self.product[i], self.original[i] = product, original

    def groups(self) -> list[frozenset[int]]:
        """The groups, in the order of their products."""
        result = []
        for i in self.product:
            if i in self.group_of:
                continue
            group = self._grown(i)
            if len(group) > 1:
                result.append(group)
        return result

    def take(self, group: frozenset[int]) -> None:
        self.group_of |= dict.fromkeys(group, group)

    def is_taken(self, group: frozenset[int]) -> bool:
        return any(i in self.group_of for i in group)

    def is_convex(self, group: frozenset[int]) -> bool:
        """Whether nothing that a group reads depends on it, by way of other groups as well."""
        return not any(self._depends(v, group) for i in group for v in self.operations[i].inputs)

    def _grown(self, product: int) -> frozenset[int]:
        """The operations that fuse with a product: consumers, and what these read besides. At most `MOST`."""
        group = {product}
        waiting = [product]
        while waiting and len(group) < MOST:
            outputs = self.operations[waiting.pop(0)].outputs
            for c in sorted({c for v in outputs for c in self.consumers.get(v, ())} - group):
                more = self._joining(c, group)
                if more is not None:
                    group |= more
                    waiting += sorted(more)
        for v in dict.fromkeys(v for i in sorted(group) for v in self.operations[i].inputs):
            group |= self._before(v, group)
        return frozenset(group)

    def _joining(self, consumer: int, group: set[int]) -> set[int] | None:
        """What joins a group with a consumer of its values: other products beside; None where it does not join."""
        first = min(group)
        if not self._is_map(consumer, self.stretch[first]):
            return None
        own = next(self.product[i] for i in group if i in self.product)
        space = own.sizes
        if any(element_count(o) > element_count(own.primitive.outputs[0]) for o in self.operations[consumer].outputs):
            return None
        joining = {consumer}
        for v in self.operations[consumer].inputs:
            source = self.producer.get(v)
            if source is None or source in group or source in joining:
                continue
            other = self.product.get(source)
            is_beside = (
                other is not None
                and other.sizes == space
                and other.kind == own.kind
                and other.primitive.args[0] is own.primitive.args[0]
                and source not in self.group_of
                and self.stretch[source] == self.stretch[first]
            )
            if is_beside and not any(self._depends(x, frozenset(group)) for x in self.operations[source].inputs):
                joining.add(source)
            elif self._depends(v, frozenset(group)):
                return None
        return joining

    def _is_map(self, i: int, stretch: int) -> bool:
        b = self.operations[i]
        return (
            i not in self.group_of
            and self.stretch[i] == stretch
            and self.takes(b)
            and all(map(_is_map, lower.primitives(b)))
        )

    def _before(self, operand: Proxy, group: set[int]) -> set[int]:
        """The operations that compute an operand of less memory, as a dequantization does, for nothing else."""
        before: set[int] = set()
        waiting = [operand]
        while waiting:
            v = waiting.pop()
            source = self.producer.get(v)
            if source is None or source in group or source in before or not isinstance(v, TensorProxy):
                continue
            inside = group | before
            alone = v not in self.returned and all(c in inside for c in self.consumers[v])
            if alone and self._is_map(source, self.stretch[min(group)]) and len(self.operations[source].outputs) == 1:
                before.add(source)
                waiting += self.operations[source].inputs
        read = tensors_in(v for i in before for v in self.operations[i].inputs if self.producer.get(v) not in before)
        computes = any(not self.operations[i].sym.reshapes for i in before)
        is_less = isinstance(operand, TensorProxy) and sum(map(nbytes, read)) < nbytes(operand)
        return before if computes and is_less else set()

    def _depends(self, value: Proxy, group: frozenset[int]) -> bool:
        """Whether a value that a group does not make depends on one that it does."""
        first, seen = min(group), set[int]()
        waiting = [value]
        while waiting:
            i = self.producer.get(waiting.pop())
            if i is None or i in seen or i in group and not seen:
                continue
            if i in group:
                return True
            those = self.group_of.get(i, (i,))
            seen.update(those)
            for j in those:
                if j > first or len(those) > 1:
                    waiting += self.operations[j].inputs
        return False


# ------------------------------------------------------------------------------------------------ cost


def seconds_apart(operations: Sequence[BoundSymbol], machine: Gpu) -> float:
    """What a chain of products takes by PyTorch's products, and a kernel that reads and writes scores between each two
    of them."""
    total, largest = 0.0, 0
    for p in [p for b in operations for p in lower.primitives(b) if lower.is_product(p)]:
        tensors = tensors_in((*p.inputs, *p.outputs))
        product = Product(p, sum(map(nbytes, tensors)))
        largest = max(largest, *map(nbytes, tensors))
        total += products.of_pytorch(product.sizes, product.kind, product.bytes, machine)
        total += machine.launch + machine.moving(largest)
    return total


class Saving:
    """What the parts of a group take by PyTorch's products and kernels for the rest, and what one kernel saves at
    most."""

    def __init__(self, finder: Finder, group: frozenset[int], machine: Gpu):
        self.region = region_of(finder, group)
        self.machine = machine
        operations, self.products = finder.operations, [finder.product[i] for i in sorted(group) if i in finder.product]
        self.multiplying = sum(products.of_pytorch(p.sizes, p.kind, p.bytes, machine) for p in self.products)
        rest = Region([operations[i] for i in sorted(group) if i not in finder.product], set(self.region.outputs))
        inputs, outputs = tensors_in(rest.inputs), tensors_in(rest.outputs)
        # what a kernel behind reads of the region, which it would otherwise compute itself
        again = [
            o for o in outputs
            if any(c not in group and c not in finder.group_of and finder.takes(operations[c])
                   for c in finder.consumers.get(o, ()))
        ]  # fmt: skip
        only = [o for o in again if o not in finder.returned and all(
            finder.takes(operations[c]) for c in finder.consumers[o])]  # fmt: skip
        moved = sum(map(nbytes, inputs)) + sum(map(nbytes, outputs)) - sum(map(nbytes, only))
        launches = 0 if again else machine.launch
        self.rest = machine.moving(moved) + launches if rest.bound_symbols else 0.0
        self.reading = machine.moving(sum(map(nbytes, again))) if again else 0.0

    @property
    def separate(self) -> float:
        """Seconds of PyTorch's products and of kernels for the rest."""
        return self.multiplying + self.rest

    @property
    def least(self) -> float:
        """Seconds that a kernel takes at least."""
        machine = self.machine
        rates = sum(p.sizes[0] * p.sizes[1] * p.sizes[2] * p.sizes[3] * machine.dot[p.kind] for p in self.products)
        moved = sum(map(nbytes, tensors_in((*self.region.inputs, *self.region.outputs))))
        return machine.launch + max(rates, machine.moving(moved)) + self.reading


def region_of(finder: Finder, group: frozenset[int]) -> Region:
    inside = [finder.original.get(i, finder.operations[i]) for i in sorted(group)]
    needed = {
        o for b in inside for o in b.outputs
        if o in finder.returned or any(c not in group for c in finder.consumers.get(o, ()))
    }  # fmt: skip
    return Region(inside, needed)


def in_order(finder: Finder) -> list[Region]:
    """The operations of a program with each group as one, in an order in which they can run."""
    groups = [sorted(g) for g in dict.fromkeys(finder.group_of.values())]
    groups += [[i] for i in range(len(finder.operations)) if i not in finder.group_of]
    ordered = groups_in_order(finder.operations, groups, finder.producer)
    return schedule(finder.operations, ordered, [*finder.returned])
