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
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from thunder import compat
from thunder.analysis.aliases import may_view
from thunder.analysis.cost import nbytes, tensors_in
from thunder.analysis.flow import consumers, producers
from thunder.compat.torch_settings import tensor_cores_convolve_float32
from thunder.core.dtypes import bfloat16, float16, float32
from thunder.core.proxies import Proxy, TensorProxy, map_structure, number_value
from thunder.core.symbol import EFFECTS, BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.extend.passes import Lowering
from thunder.kernels.index import strides_of
from thunder.kernels.layout import CHANNELS_LAST as FORMATS
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
    operands = _operands(convolution)
    if operands is None or operands[3] != 1:
        return False
    x = operands[0]
    has_kernels = x.dtype in (bfloat16, float16) or x.dtype is float32 and tensor_cores_convolve_float32()
    return is_forced or x.device.type == "cuda" and has_kernels


def _operands(operation: BoundSymbol) -> tuple[TensorProxy, TensorProxy, TensorProxy, int] | None:
    """The image, the weight, the result or its cotangent, and the number of groups of a convolution in two or three
    dimensions."""
    rule = kernels.convolution.of(operation.sym)
    return None if rule is None else rule(operation)


def is_image(value) -> bool:
    """Whether a value has the form (N, C, H, W) or (N, C, D, H, W), and more than one channel and more than one pixel:
    its two layouts differ."""
    if not isinstance(value, TensorProxy) or len(value.shape) not in FORMATS:
        return False
    count, channels, *pixels = map(number_value, value.shape)
    return count > 0 and channels > 1 and math.prod(pixels) > 1


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
        results = tensors_in(operation.outputs)
        if self._convolves_rows(operation) or all(len(o.shape) < 2 for o in results):
            for o in results:
                self.eager.make(o, strides_of(self.eager.shape(o)))
            return
        values = Tensors(frozenset(), ())
        values |= {i: self.eager[i] for i in tensors_in(operation.inputs) if i in self.eager}
        if operation.sym.tags.isdisjoint(EFFECTS) and _is_followed(operation, values):
            self.eager |= {o: values[o] for o in results if o in values}

    def _convolves_rows(self, operation: BoundSymbol) -> bool:
        """Whether an operation is a convolution of a row-major image and a row-major weight."""
        operands = _operands(operation)
        return operands is not None and all(map(self.is_row_major, operands[:2]))

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
        if not self._convolves_rows(operation) or not self.may_change(operation):
            return False
        image, _, result, _ = _operands(operation)  # type: ignore[misc]
        return is_image(image) and is_image(result)

    def may_change(self, operation: BoundSymbol) -> bool:
        """Whether the layout of an operation's results is free."""
        return not any(o.name in self.written or o in self.natural for o in operation.outputs)


def _is_followed(operation: BoundSymbol, values: Tensors) -> bool:
    """Adds the results of an operation to `values` as PyTorch lays them out; False where that is not known."""
    try:
        return follow(operation, values)
    except (RuntimeError, ValueError, KeyError, TypeError, IndexError):
        return False


def _shows(operation: BoundSymbol) -> bool:
    """Whether an operation is a view of the memory of an operand; one that makes it contiguous computes the same
    numbers of any layout."""
    return may_view(operation) and kernels.layout.of(operation.sym) != "by argument"


class _Plan:
    """Which operations compute with channels last, for a choice of convolutions.

    changed: operations that read images with channels last. last: images that these compute with channels last. copied:
    of these, results of fused operations that are row-major by themselves: the kernel writes a copy.
    """

    def __init__(self, program: _Program, chosen: set[BoundSymbol]):
        self.program, self.chosen = program, chosen
        self.changed: dict[BoundSymbol, None] = {}
        self.last: set[Proxy] = set()
        self.copied: set[Proxy] = set()
        self._parents: dict[Proxy | BoundSymbol, Proxy | BoundSymbol] = {}
        useful = self._useful()
        with compat.DisableTorchFunction(), torch.no_grad():
            for b in program.trace.bound_symbols:
                if b in chosen:
                    self._change(b, [o for o in b.outputs if is_image(o)])
                elif any(i in self.last for i in b.inputs):
                    self._carry(b, useful)

    def _useful(self) -> set[Proxy]:
        """The images that convolutions read, and those that these may be computed from with channels last."""
        images = set[Proxy]()
        for b in reversed(self.program.trace.bound_symbols):
            if b in self.chosen or not _shows(b) and not images.isdisjoint(b.outputs):
                images.update(i for i in b.inputs if is_image(i))
        return images

    def _change(self, operation: BoundSymbol, last: Sequence[Proxy], copied: Sequence[Proxy] = ()) -> None:
        self.changed[operation] = None
        self.copied.update(copied)
        self.last.update(last, copied)
        for value in (*operation.inputs, *operation.outputs):
            if value in self.last:
                self._join(value, operation)

    def _carry(self, operation: BoundSymbol, useful: Set[Proxy]) -> None:
        """Lets an operation compute with channels last where its results have the strides that they need."""
        program = self.program
        if _shows(operation) or not operation.sym.tags.isdisjoint(_STAYING) or not program.may_change(operation):
            return
        values = Tensors(frozenset(), ())
        for i in tensors_in(operation.inputs):
            if is_image(i):
                values.make(i, channels_last_strides(values.shape(i)))
            elif i not in program.eager:
                return
            else:
                values[i] = program.eager[i]
        if _operands(operation) is not None or not _is_followed(operation, values):
            return
        last, copied = [], []
        for o in tensors_in(operation.outputs):
            if o not in values:
                return
            strides = values[o].stride()
            is_row_major = program.is_row_major(o)
            if (
                is_image(o)
                and strides == channels_last_strides(values.shape(o))
                and (is_row_major or o not in program.eager)
            ):
                last.append(o)
            elif o in program.eager and strides != program.eager[o].stride():
                return
            elif o in useful and is_row_major and program.fuses(operation) and o not in program.returned:
                copied.append(o)
        self._change(operation, last, copied)

    # ---------------------------------------------------------------------------------------------------- conversions
    def wants(self, operation: BoundSymbol, value: Proxy) -> torch.memory_format | None:
        """The layout in which an operation reads a value; None where it reads the value as it is."""
        if operation in self.changed and is_image(value):
            return None if value in self.last else LAST
        return ROWS if value in self.last else None

    def is_shared(self, value: Proxy, layout: torch.memory_format) -> bool:
        """Whether one copy of a value serves all phases. It does not where a backward reads the value in the other
        layout too, which would be saved beside the copy, nor for an argument, whose copy no backward should hold."""
        producer, is_last = self.program.producer.get(value), layout is LAST
        if producer is None:
            return False
        later = [c for c in self.program.consumers.get(value, ()) if phase_of(c) != phase_of(producer)]
        return value in self.program.returned or all((c in self.changed) == is_last for c in later)

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
        saved = dict.fromkeys(map(self._root, self.chosen), 0)
        for b in self.chosen:
            saved[self._root(b)] += 2 * sum(nbytes(v) for v in (*b.inputs, *b.outputs) if is_image(v))
        for (value, layout), operations in self.conversions().items():
            root = self._root(value if value in self.last else next(r for r in operations if r in self.changed))
            if root in saved:
                saved[root] -= self._moved(value, layout, operations)
        return {b for b in self.chosen if saved[self._root(b)] <= 0}

    def _moved(self, value: Proxy, layout: torch.memory_format, operations: Sequence[BoundSymbol]) -> int:
        """The bytes that a conversion moves: none where a fused kernel writes or reads both layouts."""
        assert isinstance(value, TensorProxy)
        program, producer = self.program, self.program.producer.get(value)
        if producer is not None and program.fuses(producer):
            others = [c for c in program.consumers.get(value, ()) if c not in operations and not program.fuses(c)]
            return nbytes(value) if others or value in program.returned else 0
        if operations and value not in program.returned and all(map(program.fuses, operations)):
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
        """The program with the copies. One that the phase of a value needs stands behind the value's operation."""
        trace, plan = self.program.trace, self.plan
        conversions = plan.conversions()
        for b in trace.bound_symbols:
            read: dict[Proxy, Proxy] = {}
            for i in dict.fromkeys(b.inputs):
                layout = plan.wants(b, i)
                now = self._copied(i, layout, b) if layout is not None else self.renamed.get(i, i)
                if now is not i:
                    read[i] = now
            self._write(b, read)
            for o in b.outputs:
                for layout in (LAST, ROWS):
                    operations = conversions.get((o, layout), ())
                    if any(phase_of(r) == phase_of(b) for r in operations) or layout is ROWS and o in self.renamed:
                        self._copied(o, layout, b)
        return trace.replace(bound_symbols=self.written)

    def _write(self, operation: BoundSymbol, read: Mapping[Proxy, Proxy]) -> None:
        """Writes an operation that reads other values. The gradient of a weight whose two layouts are the same memory
        gets the strides of row-major ones: kernels of PyTorch give it either's."""
        plan = self.plan
        table: dict[Proxy, Proxy] = {}
        copies: list[BoundSymbol] = []
        for o in tensors_in(operation.outputs):
            if o in plan.copied or operation in plan.chosen and len(o.shape) in FORMATS and not is_image(o):
                table[o] = self._new(o)
                copies.append(_copy(table[o], o, LAST if o in plan.copied else ROWS, operation))
            elif o in plan.last and o in self.program.returned:
                table[o] = self.renamed[o] = self._new(o)
        if table:
            output = map_structure(lambda x: table.get(x, x) if isinstance(x, Proxy) else x, operation.output)
            operation = operation.replace(output=output)
        self.written += [operation.swap(read) if read else operation, *copies]

    def _new(self, value: TensorProxy) -> TensorProxy:
        return value.replace(name=self.program.trace.names.make())

    def _copied(self, value: Proxy, layout: torch.memory_format, at: BoundSymbol) -> Proxy:
        """The value in a layout, copied at the place of an operation where it is not yet."""
        phase = 0 if self.plan.is_shared(value, layout) else phase_of(at)
        copy = self.copies.get((value, layout, phase))
        if copy is None:
            assert isinstance(value, TensorProxy), "the plan converts images"
            copy = self.copies[value, layout, phase] = value if value in self.renamed else self._new(value)
            self.written.append(_copy(self.renamed.get(value, value), copy, layout, at))
        return copy


def _copy(source: Proxy, copy: TensorProxy, layout: torch.memory_format, at: BoundSymbol) -> BoundSymbol:
    form = FORMATS[len(copy.shape)] if layout is LAST else ROWS
    return ltorch.clone.bind(source, output=copy, context=at.context, memory_format=form)
