"""Gradients of tensors, and backward inside a program: the work of PyTorch's engine is recorded, and `.grad` is an
effect.

`loss.backward()` differentiates the operations recorded so far that lead to `loss`, with the mechanism that every other
derivative here has. Derivatives replace operations of the forward, and the backward is appended.
The Python part of PyTorch's own functions, which checks arguments, is interpreted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from thunder import compat
from thunder.analysis.aliases import alias_bases
from thunder.capture.interface import Capture
from thunder.capture.library import assigned_data, dtensors, hooks, outside_hooks
from thunder.capture.library.gradients import first_proxy, leaf_gradient, read_gradient, write_gradient
from thunder.capture.world import hooked
from thunder.core.proxies import METHODS, TensorProxy
from thunder.core.regions import leading_to
from thunder.core.rewrite import renamed
from thunder.core.symbol import BoundSymbol, OpTags, Recorder, recording
from thunder.core.trace import Trace
from thunder.distributed.layers import split_before_backward
from thunder.distributed.placement import synchronizes
from thunder.distributed.redistribute import leave_for_later, redistribute
from thunder.extend.passes import Lowering
from thunder.ops import ltorch
from thunder.ops.eager_calls import is_eager_backward, runs_python
from thunder.ops.rules import derivatives
from thunder.ops.torch_types import to_torch_device, to_torch_dtype
from thunder.options import NUMERICS_OPTIONS
from thunder.transforms.autodiff import Linearization
from thunder.transforms.derivative import Derivative
from thunder.transforms.levels import typed
from thunder.transforms.phases import marked


def group_by_device_and_dtype(c: Capture, f, args, kwargs) -> dict:
    """`torch._C._group_tensors_by_device_and_dtype`, in its order: asked with empty tensors in the place of
    proxies."""
    lists, with_indices = args
    if not any(type(x) is TensorProxy for x in lists[0]):
        return f(lists, with_indices)
    with compat.DisableTorchFunction():
        empty = [torch.empty(0, dtype=to_torch_dtype(x.dtype), device=to_torch_device(x.device)) for x in lists[0]]
        groups = f([empty], True)
    return {
        key: ([[x[i] for i in places] if x else [] for x in lists], places if with_indices else [])
        for key, (_, places) in groups.items()
    }


# ---------------------------------------------------------------- the engine

_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are "
    "freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through "
    "the graph a second time or if you need to access saved "
    "tensors after calling backward."
)


def freed(value: torch.Tensor) -> torch.Tensor:
    """The same value, whose backward raises PyTorch's error for a graph that is freed."""
    return compat.DelayedError(_FREED.encode(), 1)(value.detach().requires_grad_())


def call_backward(c: Capture, f, args, kwargs):
    """`Tensor.backward`."""
    arguments = dict(zip(("self", "gradient", "retain_graph", "create_graph", "inputs"), args)) | kwargs
    rest = [arguments.get("gradient"), arguments.get("retain_graph"), arguments.get("create_graph", False)]
    return c.call(torch.autograd.backward, [arguments["self"], *rest], {"inputs": arguments.get("inputs")})


def make_gradients(c: Capture, f, args, kwargs) -> tuple:
    """torch.autograd's `_make_grads`: ones for a scalar without a cotangent."""
    outputs, cotangents, batched = [*args, *kwargs.values()]
    if batched:
        c.refuse("torch.autograd.grad with is_grads_batched=True", "use torch.func.vmap over torch.func.vjp")
    seeds = []
    for i, (o, g) in enumerate(zip(outputs, cotangents, strict=False)):
        o = c.recorder.latest(o)
        if g is None and o.requires_grad:
            if o.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            if o.dtype.category != 2:
                raise RuntimeError(
                    f"grad can be implicitly created only for real scalar outputs but got torch.{o.dtype.torch_name}"
                )
            with recording(_writer(c, False)) as writer:
                # whichever output it is for: equal gradients are computed once
                g = ltorch.ones(tuple(o.shape), dtype=o.dtype, device=o.device)
            c.recorder.add(writer.bound_symbols)
        elif g is not None and tuple(c.recorder.latest(g).shape) != tuple(o.shape):
            raise RuntimeError(
                f"Mismatch in shape: grad_output[{i}] has a shape of {torch.Size(c.recorder.latest(g).shape)} and "
                f"output[{i}] has a shape of {torch.Size(o.shape)}."
            )
        seeds.append(g)
    return tuple(seeds)


def _writer(c: Capture, grad_enabled: bool) -> Recorder:
    return Recorder(
        c.recorder.context.replace(grad_enabled=grad_enabled, autocast=None, checkpoint=()),
        c.recorder.location,
        c.recorder.where,
    )


def run_engine(c: Capture, f, args, kwargs):
    """`torch.autograd.graph._engine_run_backward`: gradients are accumulated in `.grad`, or returned as a tuple with
    None where there is none."""
    outputs, cotangents, keep_graph, create_graph, inputs, *rest = args
    unused_is_fine, accumulate = rest[0] if rest else kwargs["allow_unreachable"], kwargs["accumulate_grad"]
    if c.recording.outer:
        raise RuntimeError(
            "backward() called inside a functorch transform. This is not supported, please use functorch.grad or "
            "functorch.vjp instead"
        )
    c.synchronize()
    outputs = [c.recorder.latest(o) for o in outputs]
    for i, o in enumerate(outputs):
        if not o.requires_grad:
            raise RuntimeError(f"element {i} of tensors does not require grad and does not have a grad_fn")
    cotangents = [g if g is None else c.recorder.latest(g) for g in cotangents]
    pulled = _Pulled(c, outputs, cotangents, bool(create_graph), [_variable(c, p) for p in inputs or ()])
    if not keep_graph:
        c.engine.free(pulled.reached)
    if not accumulate:
        return tuple(_wanted_gradients(c, pulled, inputs, unused_is_fine))
    wanted = [_variable(c, p) for p in inputs] if inputs else pulled.leaves()
    _accumulate(c, pulled, wanted)
    return ()


def _variable(c: Capture, p: TensorProxy) -> TensorProxy:
    """A tensor of the program as autograd knows it: a leaf stays the leaf when it is written to without grad."""
    holder = c.recorder.memory.holder(p)
    known = holder.requires_grad and holder in c.tensors.real and holder not in c.tensors.frozen
    return first_proxy(c, holder) if known else c.recorder.latest(p)


class _Pulled:
    """The operations of a backward, not written yet, and the gradients of all values that have one."""

    def __init__(
        self, c: Capture, outputs: Sequence[TensorProxy], cotangents: Sequence, create_graph: bool, inputs: Sequence
    ):
        self.c, self.create_graph = c, create_graph
        engine, operations = c.engine, c.recorder.bound_symbols
        if not create_graph:  # a second derivative starts from the program itself
            # whole values have no gradient where the backward is that of parts
            leaves_alone = not engine.retained and all(p in c.tensors.real for p in inputs)
            c.recorder.rewrite(_prepared(c, operations, outputs, c.tensors.placements if leaves_alone else {}))
        linear = Linearization(
            operations,
            c.request.options.executors,
            functional=create_graph,
            exact=not create_graph and c.request.options.numerics is NUMERICS_OPTIONS.EAGER,
            needed=set(leading_to(operations, outputs)),
            known=engine.known,
        )
        c.recorder.rewrite(linear.forward)
        steps = [s for s in linear.steps if isinstance(s, Derivative)]
        engine.known |= {operation: s for s in steps for operation in s.forward}
        with recording(_writer(c, create_graph)) as writer:
            self.grads = linear.backward(
                [(o, g) for o, g in zip(outputs, cotangents, strict=True) if g is not None], writer
            )
            self._join()
        self.operations = writer.bound_symbols
        typed(self.operations, create_graph)
        self.reached = [s for s in steps if any(o in self.grads for o, _ in s.gets)]
        if any(s in engine.freed for s in self.reached):
            raise RuntimeError(_FREED)
        self.again = any(s in engine.used for s in self.reached)
        engine.used.update(self.reached)

    def _join(self) -> None:
        """A tensor from outside that came in by several ways has one gradient, kept under the first of them."""
        for p in self.leaves():
            first = first_proxy(self.c, p)
            if first is not p:
                g = self.grads.pop(p)
                self.grads[first] = ltorch.add(self.grads[first], g) if first in self.grads else g

    def leaves(self) -> list[TensorProxy]:
        """The tensors from outside that have a gradient, once each."""
        return [p for p in self.grads if isinstance(p, TensorProxy) and p in self.c.tensors.real]

    def write(self, wanted: Sequence[TensorProxy]) -> list:
        """Write the operations for the gradients of `wanted`; those gradients, None where there is none."""
        c = self.c
        for p in wanted:
            if p in c.tensors.real:
                _check_leaf(c, p)
        gradients = [self.grads.get(hooks.node(c, p)) for p in wanted]
        operations = leading_to(self.operations, gradients)
        _check_unmodified(c, operations)
        table: dict = {}
        if self.again:
            operations = renamed(operations, c.recorder.context.names, table)
        c.engine.backwards += 1
        start, after_hooks = len(c.recorder.bound_symbols), {}
        for operation in operations:
            operation = operation.swap(after_hooks) if after_hooks else operation
            if operation.sym is hooks.call_hook:
                after_hooks[operation.output] = hooks.run(c, operation, self.create_graph)
                continue
            if is_eager_backward(operation.sym) and runs_python(c.path.value_of(operation.args[0])):
                c.refuse(
                    "a backward inside of it runs Python code of a function that is called as it is, such as a hook of "
                    "a module",
                    "call backward outside of the compiled function",
                )
            c.recorder.add([operation])
            if OpTags.VIEW in operation.sym.tags:
                c.recorder.memory.add(operation)
        self.written = marked(c.recorder.bound_symbols[start:], c.engine.backwards)
        for position, operation in enumerate(self.written, start):
            c.recorder.replace(position, operation)
        gradients = [table.get(g, g) for g in gradients]
        return [after_hooks.get(g, g) for g in gradients]


def _prepared(
    c: Capture, operations: Sequence[BoundSymbol], outputs: Sequence[TensorProxy], placements: Mapping
) -> Sequence[BoundSymbol]:
    """The bound symbols in front of a backward, with the layers split that ranks share (placements), and as the passes
    make them that prepare for derivatives (`Pass.inside`). Operations that are replaced stay: the rest of the program
    may use their results, or else they are dead code."""
    options = c.request.options
    lowering = Lowering(options, tuple(options.executors), differentiates=True)
    trace = Trace("computation", (), operations, tuple(outputs), c.recorder.context.names)
    trace = split_before_backward(trace, placements)
    for one in options.passes:
        if one.inside:
            trace = [trace, *one.traces(trace, lowering)][-1]
    computed = {o for b in trace.bound_symbols for o in b.outputs}
    return [*trace.bound_symbols, *(b for b in operations if b.outputs and computed.isdisjoint(b.outputs))]


def _check_leaf(c: Capture, p: TensorProxy) -> None:
    """The program depends on a tensor being a leaf whose gradient `.grad` takes. Refuses others."""
    real, source = c.tensors.real[p]
    with compat.DisableTorchFunction():
        is_leaf, has_hooks = real.is_leaf, hooked(real)
    is_split = p in c.tensors.placements and not c.tensors.placements[p].is_whole
    name = c.world.describe(source)
    if not is_leaf:
        c.refuse(
            f"a backward inside of it reaches {name}, which is itself a result of operations outside",
            "pass x.detach().requires_grad_(), or call backward outside",
        )
    if has_hooks and is_split:
        c.refuse(
            f"a backward inside of it reaches {name}, which has hooks, and of which the ranks hold a part each",
            "remove the hooks, or call backward outside of the compiled function",
        )
    if not has_hooks:
        c.engine.hooked[p] = None


def _check_unmodified(c: Capture, operations: Sequence[BoundSymbol]) -> None:
    """A backward may not read a tensor from outside that was written to since: eager PyTorch raises then."""
    memory = c.recorder.memory
    if not memory.active:
        return
    assigned_data.check_read(c, operations)
    bases = alias_bases(c.recorder.bound_symbols)
    cuts = {b.output: b.args[0] for b in c.recorder.bound_symbols if b.sym is redistribute}  # this rank's parts
    for operation in operations:
        unread = derivatives.statistics.of(operation.sym)  # positions of arguments that gradients do not depend on
        for value in operation.inputs:
            if not isinstance(value, TensorProxy):
                continue
            root = bases[cuts.get(value, value)]
            base = memory.base(root)
            now = memory.current.get(memory.holder(root), root)
            is_changed = base in c.tensors.mutated and bases[now] is not root
            if is_changed and not any(operation.args[i] is value for i in unread):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {base.name}, which is written to after it was used"
                )


def _hooked(c: Capture, pulled: _Pulled, tensors: Sequence[TensorProxy], gradients: Sequence) -> list:
    """Gradients as the hooks of leaves leave them."""
    c.engine.begin_hooks()
    return [
        g if g is None or p not in c.tensors.real else outside_hooks.called_before(c, p, g, pulled.create_graph)
        for p, g in zip(tensors, gradients, strict=True)
    ]


def _wanted_gradients(c: Capture, pulled: _Pulled, inputs: Sequence, unused_is_fine: bool) -> list:
    """The result of torch.autograd.grad."""
    wanted = [_variable(c, p) for p in inputs]
    if any(not p.requires_grad for p in wanted):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    gradients = _hooked(c, pulled, wanted, pulled.write(wanted))
    gradients = [_synchronized(c, pulled, p, g) for p, g in zip(wanted, gradients, strict=True)]
    if not unused_is_fine and any(g is None for g in gradients):
        _raise_unused(gradients)
    return gradients


def _raise_unused(gradients: list) -> None:
    """PyTorch's error about inputs that have no gradient, in its words."""
    with compat.probing(grad=True):
        inputs = [torch.zeros((), requires_grad=True) for _ in gradients]
        used = torch.zeros((), requires_grad=True)
        for x, gradient in zip(inputs, gradients, strict=True):
            used = used if gradient is None else used + x
        torch.autograd.grad(used, inputs)


def _synchronized(c: Capture, pulled: _Pulled, p: TensorProxy, g: TensorProxy | None) -> TensorProxy | None:
    """The gradient of a parameter, averaged over the ranks; under no_sync this rank's own, None where it is kept beside
    a shard until the block ends."""
    placement = c.tensors.placements.get(p)
    if placement is None or g is None:
        return g
    if pulled.create_graph:
        c.refuse(
            f"a backward with create_graph=True inside of it reaches {placement.name}, which the ranks hold together",
            "call it outside of the compiled function",
        )
    if not placement.synchronizes or synchronizes(placement):
        return dtensors.gradient(c, p, g, placement)
    leave_for_later(g, placement)
    return None if placement.is_sharded else dtensors.marked_as(c, g, p)


def _accumulate(c: Capture, pulled: _Pulled, wanted: Sequence[TensorProxy]) -> None:
    """Add gradients in place to those in `.grad`."""
    retained = {t: value for value, t in c.engine.retained.items() if hooks.node(c, value) in pulled.grads}
    c.engine.ran.update(retained.values())
    tensors = list(dict.fromkeys(p for p in (*wanted, *retained.values()) if hooks.node(c, p) in pulled.grads))
    gradients = _hooked(c, pulled, tensors, pulled.write(tensors))
    bases, taken = alias_bases(pulled.written), set()
    computed = {o for operation in pulled.written for o in operation.outputs}
    with hooks.grad_mode(c, pulled.create_graph):
        # before any is read, so that several are communicated together
        reduced = [_synchronized(c, pulled, p, g) for p, g in zip(tensors, gradients, strict=True)]
        for p, local, g in zip(tensors, gradients, reduced, strict=True):
            if g is None:
                continue
            known = read_gradient(c, p)
            if known is None and dtensors.spec_of(c, g) is not None:
                write_gradient(c, p, g)
            elif known is None:
                root = bases[g]
                own = g is not local or root in computed and root not in taken and not pulled.create_graph
                taken.add(root)
                write_gradient(c, p, leaf_gradient(p, g) if own else ltorch.clone(g))
            elif pulled.create_graph:
                write_gradient(c, p, ltorch.add(known, g))
            else:
                METHODS.call("__iadd__", known, g)
            if p in c.tensors.real:
                outside_hooks.call_after(c, p)
