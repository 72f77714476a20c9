"""Channels Last: convolutions of half precision on a GPU, and what is computed between them, run with channels last.

Before, for row-major images: `t0 = conv2d(x, w)`, `t1 = relu(t0)`, `t2 = conv2d(t1, v)`, `return t2`. After:
`t3 = clone(x, memory_format=torch.channels_last)`, `t0 = conv2d(t3, w_last)`, `t1 = relu(t0)`, `t2 = conv2d(t1,
v_last)`, `t4 = clone(t2, memory_format=torch.contiguous_format)`, `return t4`.

The fast kernels of cuDNN compute images with channels last. For row-major ones it converts the operands and the result
of each call. Here images are converted where a group of convolutions begins and ends. A fused kernel next to a
conversion reads or writes the other layout itself, so that the conversion moves no bytes. Conversions that move bytes
are counted against those of cuDNN, by group.

An image keeps channels last through fused kernels, and through operations of PyTorch whose result has the layout of
their operands (`thunder.kernels.layout`). All others read row-major copies: views, random numbers, which are drawn in
the order of memory, in-place operations, and everything that leaves the program. So the strides of results are eager's.
For that, eager's strides have to be known: capture guards those of images and weights (`TraceInfo.row_major`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from thunder import compat
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import nbytes, tensors_in
from thunder.analysis.flow import consumers, producers
from thunder.compat.torch_settings import tensor_cores_convolve_float32
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import Proxy, TensorProxy, map_structure
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.extend.passes import Lowering
from thunder.kernels.index import strides_of
from thunder.kernels.layout import Tensors, channels_last_strides, follow
from thunder.ops import ltorch
from thunder.ops.rules import kernels
from thunder.options import NUMERICS_OPTIONS, JitOptions, compile_option
from thunder.transforms.phases import phase_of

CHANNELS_LAST = compile_option(
    "channels_last", (bool, type(None)), None,
    "whether convolutions of row-major images run with channels last: True wherever they can, False nowhere, None on "
    "GPUs where fewer bytes are converted than by cuDNN",
    owner="channels_last", valid="True, False or None",
)  # fmt: skip

LAST, ROWS = torch.channels_last, torch.contiguous_format
_STAYING = frozenset((*EFFECTS, OpTags.RANDOM_OP, OpTags.DECISION, OpTags.DEVICE_SYNC_OP))


def may_apply(operations: Iterable[BoundSymbol], options: JitOptions) -> bool:
    """Whether a captured program may run with channels last, so that the strides of its arguments matter."""
    if options.numerics is NUMERICS_OPTIONS.EAGER or options.get(CHANNELS_LAST) is False:
        return False
    is_forced = bool(options.get(CHANNELS_LAST))
    return any(_gains(b, is_forced) for b in operations)


def is_on(trace: Trace, lowering: Lowering) -> bool:
    """Whether the pass runs for a program."""
    return bool(trace.info.row_major) and not lowering.plain and may_apply(trace.bound_symbols, lowering.options)


def channels_last(trace: Trace, lowering: Lowering) -> Trace:
    """The program whose groups of convolutions compute images with channels last where that moves fewer bytes."""
    is_forced = bool(lowering.options.get(CHANNELS_LAST))
    program = _Program(trace, lowering.fuses)
    chosen = {b for b in trace.bound_symbols if program.can_convolve(b) and _gains(b, is_forced)}
    plan = _Plan(program, chosen)
    while not is_forced and (losing := plan.losing()):
        chosen -= losing
        plan = _Plan(program, chosen)
    return _Writer(plan).trace() if chosen else trace


def _gains(convolution: BoundSymbol, is_forced: bool) -> bool:
    """Whether a convolution has kernels that need channels last. One of several groups is slow with them."""
    images = images_of(convolution)
    if not images or has_groups(convolution):
        return False
    x = images[0]
    if is_forced:
        return True
    has_kernels = x.dtype in (bfloat16, float16) or x.dtype is float32 and tensor_cores_convolve_float32()
    return x.device.type == "cuda" and has_kernels


def images_of(operation: BoundSymbol) -> tuple[TensorProxy, ...]:
    """The image and the weight of a convolution in two dimensions; nothing of other operations."""
    rule = kernels.image_and_weight.of(operation.sym)
    return (rule(operation) or ())[:2] if rule is not None else ()


def has_groups(convolution: BoundSymbol) -> bool:
    """Whether a convolution has several groups."""
    return kernels.image_and_weight.of(convolution.sym)(convolution)[2] != 1  # type: ignore[misc]


def is_image(value) -> bool:
    """Whether a value has the form (N, C, H, W), of more than one channel and more than one pixel: its two layouts
    differ."""
    if not isinstance(value, TensorProxy) or len(value.shape) != 4 or any(type(n) is not int for n in value.shape):
        return False
    return value.shape[1] > 1 and math.prod(value.shape[2:]) > 1 and 0 not in value.shape


class _Program:
    """A program, and the strides that its values have in eager PyTorch as far as they are known, as tensors without
    memory. fuses: whether a fusion executor takes an operation."""

    def __init__(self, trace: Trace, fuses: Callable[[BoundSymbol], bool]):
        self.trace, self.fuses = trace, fuses
        self.producer, self.consumers = producers(trace), consumers(trace.bound_symbols)
        self.returned = dict.fromkeys(trace.output_proxies)
        written = trace.info.written
        self.written = {*written, *written.values(), *trace.info.copies}
        self.eager = Tensors(frozenset(), ())
        with compat.DisableTorchFunction(), torch.no_grad():
            for a in trace.args:
                if isinstance(a, TensorProxy) and (len(a.shape) < 2 or a.name in trace.info.row_major):
                    self.eager.make(a, strides_of(self.eager.shape(a)))
            for b in trace.bound_symbols:
                self._follow(b)
        self.natural = self._natural()

    def _follow(self, operation: BoundSymbol) -> None:
        """Adds the strides of an operation's results, where they are known."""
        tensors = tensors_in(operation.inputs)
        results = [o for o in operation.outputs if isinstance(o, TensorProxy)]
        if kernels.image_and_weight.of(operation.sym) is not None:
            images = images_of(operation)
            rows = bool(images) and all(map(self.is_row_major, images))
        else:
            rows = not tensors and operation.sym.tags.isdisjoint(_STAYING) or _is_matrix_product(operation)
        known = Tensors(frozenset(), ())
        known |= {i: self.eager[i] for i in tensors if i in self.eager}
        for o in results:
            if rows or len(o.shape) < 2:
                self.eager.make(o, strides_of(self.eager.shape(o)))
        if not rows and operation.sym.tags.isdisjoint(EFFECTS) and len(known) == len(tensors):
            if is_followed(operation, known):
                self.eager |= {o: known[o] for o in results if o in known}

    def is_row_major(self, value: TensorProxy) -> bool:
        return value in self.eager and self.eager[value].stride() == strides_of(tuple(self.eager[value].shape))

    def _natural(self) -> set[Proxy]:
        """Values that have to be laid out as eager lays them out, which is not known: results of the program, and what
        they get their strides from."""
        values = set[Proxy]()
        waiting = [*self.returned]
        while waiting:
            value = waiting.pop()
            if not isinstance(value, TensorProxy) or value in self.eager or value in values:
                continue
            values.add(value)
            waiting += self.producer[value].inputs if value in self.producer else ()
        return values

    def can_convolve(self, operation: BoundSymbol) -> bool:
        """Whether an operation is a convolution of images that eager computes row-major."""
        images = images_of(operation)
        if not images or not self.may_change(operation):
            return False
        result = operation.inputs[0] if len(operation.outputs) > 1 else operation.outputs[0]  # or its cotangent
        return all(map(self.is_row_major, images)) and is_image(images[0]) and is_image(result)

    def may_change(self, operation: BoundSymbol) -> bool:
        """Whether the layout of an operation's results is free."""
        return not any(o.name in self.written or o in self.natural for o in operation.outputs)


def is_followed(operation: BoundSymbol, values: Tensors) -> bool:
    """Adds the results of an operation to `values` as PyTorch lays them out; False where that is not known."""
    try:
        return follow(operation, values)
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError):
        return False


_MATRIX_PRODUCTS = {ltorch.linear, ltorch.mm, ltorch.bmm, ltorch.addmm}


def _is_matrix_product(operation: BoundSymbol) -> bool:
    return operation.sym in _MATRIX_PRODUCTS


@dataclass
class _Group:
    """Convolutions that images with channels last connect. saved: the bytes that cuDNN would convert; moved: those
    that conversions around the group move."""

    convolutions: set[BoundSymbol] = field(default_factory=set)
    saved: float = 0.0
    moved: float = 0.0


class _Plan:
    """Which operations compute with channels last, for a choice of convolutions.

    changed: operations that read images with channels last. last: values that these compute with channels last.
    liked: those, and results of fused kernels that may be written so. groups: by value or operation.
    """

    def __init__(self, program: _Program, chosen: set[BoundSymbol]):
        self.program, self.chosen = program, chosen
        self.changed: dict[BoundSymbol, None] = {}
        self.last: set[Proxy] = set()
        self.liked: set[Proxy] = set()
        self.copied: set[Proxy] = set()  # values that forwards copy with channels last
        self._parents: dict[Proxy | BoundSymbol, Proxy | BoundSymbol] = {}
        with compat.DisableTorchFunction(), torch.no_grad():
            for b in program.trace.bound_symbols:
                if b in chosen:
                    self._change(b, [o for o in b.outputs if is_image(o)])
                elif any(i in self.liked for i in b.inputs):
                    self._carry(b)
        for b in self.changed:
            if phase_of(b) == 0:
                self.copied.update(i for i in b.inputs if is_image(i) and i not in self.last)

    def _change(self, operation: BoundSymbol, last: Sequence[Proxy], liked: Sequence[Proxy] = ()) -> None:
        self.changed[operation] = None
        self.last.update(last)
        self.liked.update(last, liked)
        for value in (*(i for i in operation.inputs if i in self.liked), *last, *liked):
            self._join(value, operation)

    def _carry(self, operation: BoundSymbol) -> None:
        """Lets an operation compute with channels last where its results have the strides that they need."""
        program = self.program
        if may_view(operation) or not operation.sym.tags.isdisjoint(_STAYING) or not program.may_change(operation):
            return
        tensors = [i for i in operation.inputs if isinstance(i, TensorProxy)]
        values = Tensors(frozenset(), ())
        for i in tensors:
            if is_image(i):
                values.make(i, channels_last_strides(i.shape))
            elif i not in program.eager:
                return
            else:
                values[i] = program.eager[i]
        if kernels.image_and_weight.of(operation.sym) is not None or not is_followed(operation, values):
            return
        last, liked = [], []
        for o in operation.outputs:
            if not isinstance(o, TensorProxy):
                continue
            if o not in values:
                return
            strides = values[o].stride()
            if is_image(o) and strides == channels_last_strides(o.shape):
                last.append(o)
            elif o in program.eager and strides != program.eager[o].stride():
                return
            elif is_image(o) and program.is_row_major(o) and program.fuses(operation):
                liked.append(o)
        self._change(operation, last, liked)

    # ---------------------------------------------------------------------------------------------------- conversions
    def wants(self, operation: BoundSymbol, value: Proxy) -> torch.memory_format | None:
        """The layout in which an operation reads a value; None where it reads the value as it is."""
        if operation in self.changed and is_image(value):
            return None if value in self.last else LAST
        return ROWS if value in self.last or self._reads_copy(operation, value) else None

    def _reads_copy(self, operation: BoundSymbol, value: Proxy) -> bool:
        """Whether a fused kernel of a backward reads the saved copy of a value with channels last, so that the
        row-major value is not saved beside it."""
        program, producer = self.program, self.program.producer.get(value)
        if value not in self.copied or producer is None or value in program.returned:
            return False
        phase = phase_of(operation)
        return phase not in (0, phase_of(producer)) and program.is_row_major(value) and program.fuses(operation)

    def conversions(self) -> dict[tuple[Proxy, torch.memory_format], list[BoundSymbol]]:
        """By value and layout, the operations that read the value in this layout and need a copy."""
        wanted: dict[tuple[Proxy, torch.memory_format], list[BoundSymbol]] = {}
        for b in self.program.trace.bound_symbols:
            for i in dict.fromkeys(b.inputs):
                layout = self.wants(b, i)
                if layout is not None:
                    wanted.setdefault((i, layout), []).append(b)
        for o in self.program.returned:
            if o in self.last:
                wanted.setdefault((o, ROWS), [])
        return wanted

    # ---------------------------------------------------------------------------------------------------------- costs
    def losing(self) -> set[BoundSymbol]:
        """The convolutions of groups that convert more bytes than cuDNN would."""
        groups: dict[Proxy | BoundSymbol, _Group] = {}
        for b in self.chosen:
            group = groups.setdefault(self._root(b), _Group())
            group.convolutions.add(b)
            group.saved += 2 * sum(nbytes(v) for v in (*b.inputs, *b.outputs) if is_image(v))
        for (value, layout), readers in self.conversions().items():
            root = self._root(value if value in self.liked else next(r for r in readers if r in self.changed))
            if root in groups:
                groups[root].moved += self._moved(value, layout, readers)
        return {b for g in groups.values() if g.moved >= g.saved for b in g.convolutions}

    def _moved(self, value: Proxy, layout: torch.memory_format, readers: Sequence[BoundSymbol]) -> int:
        """The bytes that a conversion moves: none where a fused kernel writes or reads both layouts."""
        assert isinstance(value, TensorProxy)
        program, producer = self.program, self.program.producer.get(value)
        if producer is not None and program.fuses(producer):
            others = [c for c in program.consumers.get(value, ()) if c not in readers and not program.fuses(c)]
            return nbytes(value) if others or value in program.returned else 0
        if readers and value not in program.returned and all(map(program.fuses, readers)):
            return 0
        return 2 * nbytes(value)

    def _join(self, a: Proxy | BoundSymbol, b: Proxy | BoundSymbol) -> None:
        self._parents[self._root(a)] = self._root(b)

    def _root(self, x: Proxy | BoundSymbol) -> Proxy | BoundSymbol:
        while (parent := self._parents.get(x, x)) is not x:
            x = parent
        return x


class _Writer:
    """Writes the program of a plan. renamed: by a result of the program that is computed with channels last, the value
    with them; the row-major copy has the result's name."""

    def __init__(self, plan: _Plan):
        self.plan, self.program = plan, plan.program
        self.written: list[BoundSymbol] = []
        self.copies: dict[tuple[Proxy, torch.memory_format, int], Proxy] = {}
        self.renamed: dict[Proxy, Proxy] = {}

    def trace(self) -> Trace:
        trace, plan = self.program.trace, self.plan
        conversions = plan.conversions()
        for b in trace.bound_symbols:
            read: dict[Proxy, Proxy] = {}
            for i in dict.fromkeys(b.inputs):
                layout = plan.wants(b, i)
                now = self._copy(i, layout, b) if layout is not None else self.renamed.get(i, i)
                if now is not i:
                    read[i] = now
            self._write(b.swap(read) if read else b, b in plan.chosen)
            for o in b.outputs:
                for layout in (LAST, ROWS):
                    readers = conversions.get((o, layout), ())
                    if any(phase_of(r) == phase_of(b) for r in readers) or layout is ROWS and o in self.renamed:
                        self._copy(o, layout, b)
        return trace.replace(bound_symbols=self.written)

    def _write(self, operation: BoundSymbol, is_chosen: bool) -> None:
        """Writes an operation. The gradient of a weight whose two layouts are the same memory gets the strides of
        row-major ones: kernels of PyTorch give it either's."""
        table: dict[Proxy, Proxy] = {}
        copies: list[BoundSymbol] = []
        for o in operation.outputs:
            if o in self.plan.last and o in self.program.returned:
                table[o] = self.renamed[o] = self._new(o)
            elif is_chosen and isinstance(o, TensorProxy) and len(o.shape) == 4 and not is_image(o):
                table[o] = self._new(o)
                copies.append(ltorch.clone.bind(table[o], output=o, context=operation.context, memory_format=ROWS))
        if table:
            output = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.output)
            operation = operation.replace(output=output)
        self.written += [operation, *copies]

    def _new(self, value: TensorProxy, **changes) -> TensorProxy:
        return value.replace(name=self.program.trace.names.make(), **changes)

    def _copy(self, value: Proxy, layout: torch.memory_format, at: BoundSymbol) -> Proxy:
        """The value in a layout, copied at the place of an operation where it is not yet. A copy of an argument is for
        one phase, so that no backward holds its memory."""
        is_read_again = layout is ROWS and value not in self.plan.last  # a value that has a copy with channels last
        phase = phase_of(at) if is_read_again or value not in self.program.producer else 0
        known = self.copies.get((value, layout, phase))
        if known is None:
            assert isinstance(value, TensorProxy), "the plan converts images"
            source = self._copy(value, LAST, at) if is_read_again else self.renamed.get(value, value)
            known = value if value in self.renamed else self._new(value)
            self.copies[value, layout, phase] = known
            copy = ltorch.clone.bind(source, output=known, context=at.context, memory_format=layout)
            self.written.append(copy)
        return known
