"""Pipelines: stages that are cut from the trace of a module, and a `PipelineStage` for PyTorch's schedules that gathers
and reduces once a step.

    stages = pipeline_stages(model, ["blocks.4", "blocks.8"], tokens[:1])
    mine = thunder.jit(fsdp(stages[rank], process_group=mesh["dp"]))
    stage = PipelineStage(mine, rank, len(stages), device, group=mesh["pp"].get_group())
    Schedule1F1B(stage, n_microbatches, loss_fn=loss).step(*([tokens] if rank == 0 else []), target=targets)

A stage is a module: it is prepared by `fsdp`, `ddp`, `column_parallel` and the others, and compiled, as every module
is. Its backward is two programs where a schedule asks for gradients of inputs before those of parameters
(`thunder.transforms.two_backwards`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import pipelining

import thunder
from thunder.capture import Captured, capture
from thunder.capture.state import Request
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, OpTags
from thunder.core.trace import Trace
from thunder.distributed.accumulation import no_sync
from thunder.errors import CaptureError, OptionError
from thunder.module import ThunderModule
from thunder.options import JitOptions
from thunder.pipeline import PASSES
from thunder.runtime.autograd import backward_in_two


def pipeline_stages(module: torch.nn.Module, split_at: Sequence[str], *args: Any) -> list[torch.nn.Module]:
    """Cuts a module into pipeline stages: the first stage ends before the first operation of the submodule
    `split_at[0]`, the second before that of `split_at[1]`, and so on.

    A stage is a module that shares the parameters and buffers it reads with `module`, under the same names. The first
    stage takes the inputs of the module. Each stage returns a tensor or a tuple of tensors that the next one takes; the
    last stage returns the results of the module. Values that depend on neither inputs nor parameters, such as
    positions, are computed in each stage that reads them.

    Args:
        module: The module. It may be on the meta device.
        split_at: Paths of submodules, in the order of the program.
        args: The inputs of one microbatch, with which the module is captured.

    Returns:
        The stages.

    Raises:
        OptionError: If a path is not a submodule with operations, or the paths are not in the order of the program.
        CaptureError: If the module cannot be captured, changes buffers or other state, two stages would train the same
            parameter, or integers would be sent from one stage to the next.
    """
    captured = capture(Request(module, args, {}, JitOptions(passes=PASSES, transforms=(thunder.Transform(),))))
    computation = captured.computation
    _check_effects(captured)
    operations = computation.bound_symbols
    starts = [0, *_starts(operations, split_at), len(operations)]
    paths = computation.info.parameters
    inputs = _inputs(captured, len(args))
    pieces = [list(operations[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    constants = _constants(operations)
    held = {a for a in computation.args if isinstance(a, Proxy) and a.name in paths}
    reads = [_reads(piece) for piece in pieces]
    reads[-1] |= dict.fromkeys(computation.output_proxies)
    stages: list[torch.nn.Module] = []
    taken: list[Proxy] = inputs
    for i, piece in enumerate(pieces):
        computed = {*taken, *(o for b in piece for o in b.outputs)}
        later = dict.fromkeys(p for read in reads[i + 1 :] for p in read)
        handed = [p for p in later if p in computed and p not in held and p not in constants]
        output = computation.output if i == len(pieces) - 1 else handed[0] if len(handed) == 1 else tuple(handed)
        for p in handed:
            if not (isinstance(p, TensorProxy) and p.dtype.category >= 2):
                raise CaptureError(
                    f"pipeline_stages: stage {i + 1} reads {p.name} of stage {i}, which has no gradient: stages hand "
                    "on tensors of floating point",
                    remedy="compute the loss outside (loss_fn of the schedule), or split elsewhere",
                )
        copies = _leading(operations, [p for p in reads[i] if p in constants], piece)
        own = [p for p in _reads([*copies, *piece]) if p in held]
        trace = computation.replace(name="stage", args=[*taken, *own], bound_symbols=[*copies, *piece], output=output)
        stages.append(_Stage(module, trace, [paths[p.name] for p in own]))
        taken = handed
    _check_tied(stages)
    return stages


class _Stage(torch.nn.Module):
    """Some operations of a module's trace, with the parameters and buffers that they read."""

    def __init__(self, module: torch.nn.Module, trace: Trace, paths: Sequence[str]):
        super().__init__()
        self.paths = tuple(paths)
        self.compute = trace.python_callable()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        for path in paths:
            *owners, name = path.split(".")
            owner: torch.nn.Module = self
            for part in owners:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]  # type: ignore[assignment]
            if path in parameters:
                owner.register_parameter(name, parameters[path])
            else:
                owner.register_buffer(name, buffers[path])

    def forward(self, *inputs):
        held = []
        for path in self.paths:
            owner = self
            for part in path.split("."):
                owner = getattr(owner, part)
            held.append(owner)
        return self.compute(*inputs, *held)


def _check_effects(captured: Captured) -> None:
    if captured.effects or captured.computation.info.written or captured.has_eager_calls:
        raise CaptureError(
            "pipeline_stages: the module changes buffers or other state, or runs a line that is not captured: its "
            "stages would not",
            remedy="evaluate such layers (`norm.eval()`), or write the stages as modules",
        )


def _starts(operations: Sequence[BoundSymbol], split_at: Sequence[str]) -> list[int]:
    """Where the stages behind the first begin."""
    starts: list[int] = []
    for path in split_at:
        at = next((i for i, b in enumerate(operations) if _is_in(b, path)), None)
        if at is None or at <= (starts[-1] if starts else 0):
            why = "no operation of the trace is of it" if at is None else "it does not come behind those before it"
            raise OptionError(f"split_at={path!r} is not where a module can be split: {why}")
        starts.append(at)
    return starts


def _is_in(operation: BoundSymbol, path: str) -> bool:
    module = getattr(operation.location, "module", None) or ""
    return module == path or module.startswith(f"{path}.")


def _inputs(captured: Captured, count: int) -> list[Proxy]:
    """The arguments of the computation that are the module's own, in its order."""
    places: dict[int, Proxy] = {}
    for a, source in zip(captured.computation.args, captured._input_sources, strict=True):
        if isinstance(a, Proxy) and a.name not in captured.computation.info.parameters:
            is_plain = source.step == "item" and source.root.key == "args" and source.base is source.root
            if not is_plain:
                raise CaptureError(
                    f"pipeline_stages: the module reads {a.name}, which is neither an argument that is a tensor nor a "
                    "parameter or buffer",
                    remedy="pass tensors one by one, and hold others as buffers",
                )
            places[source.key] = a
    missing = [i for i in range(count) if i not in places]
    if missing:
        raise CaptureError(f"pipeline_stages: argument {missing[0]} is not a tensor that the module reads")
    return [places[i] for i in range(count)]


def _reads(operations: Iterable[BoundSymbol]) -> dict[Proxy, None]:
    """What operations read that none of them makes, in order."""
    computed: set[Proxy] = set()
    read: dict[Proxy, None] = {}
    for b in operations:
        read |= dict.fromkeys(p for p in b.inputs if p not in computed)
        computed.update(b.outputs)
    return read


def _constants(operations: Sequence[BoundSymbol]) -> set[Proxy]:
    """Values that depend on nothing."""
    constants: set[Proxy] = set()
    for b in operations:
        if all(p in constants for p in b.inputs) and not b.sym.tags & {OpTags.RANDOM_OP, OpTags.DONT_DCE}:
            constants.update(b.outputs)
    return constants


def _leading(operations: Sequence[BoundSymbol], wanted: Sequence[Proxy], piece: Sequence[BoundSymbol]) -> list:
    """The operations outside of a piece that compute values."""
    needed, leading, own = set(wanted), [], set(map(id, piece))
    for b in reversed(operations):
        if id(b) not in own and not needed.isdisjoint(b.outputs):
            needed.update(b.inputs)
            leading.append(b)
    return leading[::-1]


def _check_tied(stages: Sequence[torch.nn.Module]) -> None:
    owners: dict[int, int] = {}
    for i, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            if p.requires_grad and owners.setdefault(id(p), i) != i:
                raise CaptureError(
                    f"pipeline_stages: stages {owners[id(p)]} and {i} would both train parameter {name}, which they "
                    "hold in different processes",
                    remedy="untie it, or split so that one stage has all that reads it",
                )


class PipelineStage(pipelining.PipelineStage):
    """`torch.distributed.pipelining.PipelineStage` for a module that `fsdp` or `ddp` prepared.

    The first microbatch of a step gathers the parameters, which stay gathered until the end of the step. Gradients are
    reduced once in each step, before the schedule scales them. With PyTorch's class every microbatch gathers and
    reduces.
    """

    _block: contextlib.ExitStack | None = None
    _edges: list[GradientEdge] = []  # of what the stage returned for the microbatch whose backward begins

    def clear_runtime_states(self) -> None:
        """Begins a step."""
        super().clear_runtime_states()
        if self._block is not None:  # of a step that failed: its gradients are not synchronised
            self._block, failed = None, self._block
            with contextlib.suppress(RuntimeError):
                failed.__exit__(RuntimeError, RuntimeError("a step of a pipeline failed"), None)

    def forward_one_chunk(self, *args, **kwargs):
        """Runs the forward of a microbatch. PyTorch calls it first to infer the shapes of the results."""
        if self._block is None and self.has_backward:
            self._block = contextlib.ExitStack()
            self._block.enter_context(no_sync(self.submod, gather_once=True))
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False):
        """Computes the gradients of inputs, and those of parameters unless `backward_weight_one_chunk` computes
        them."""
        if self.has_backward and not full_backward and not self.is_first:
            outputs = self.fwd_cache[bwd_chunk_id][0]
            self._edges = [get_gradient_edge(x) for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs: dict, last_backward: bool = False):
        """Runs one of the three kinds of backwards of a schedule. A compiled stage is one node of the autograd
        graph, which computes the gradients of inputs first and then, for the same cotangents, those of parameters.
        PyTorch's method looks for nodes between, and before torch 2.13 sums the cotangents of a node with several
        results."""
        if backward_type == "full" or not isinstance(self.submod, ThunderModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            return self._backward_of_inputs(**bwd_kwargs)
        parameters = [p for p in self.submod.parameters() if p.requires_grad]
        edges, cotangents = bwd_kwargs["param_groups"]
        torch.autograd.backward(edges, cotangents, inputs=parameters)
        return tuple(p.grad for p in parameters), None

    def _backward_of_inputs(self, stage_output: tuple, output_grads: tuple | None, input_values: list):
        """The gradients, and what those of parameters are computed from."""
        edges, self._edges = self._edges, []
        if output_grads is None:  # of the loss
            cotangents = torch.autograd.grad(stage_output, edges)
        else:
            pairs = zip(stage_output, output_grads, strict=True)
            cotangents = tuple(c for x, c in pairs if isinstance(x, torch.Tensor) and x.requires_grad)
        wanted = [x for x in input_values if isinstance(x, torch.Tensor) and x.requires_grad]
        frees = all([backward_in_two(edge.node) for edge in edges])
        torch.autograd.backward(edges, cotangents, retain_graph=not frees, inputs=wanted)
        for x in stage_output:
            if not x._is_view():
                x.detach_()  # frees what is between the loss and the stage
        return tuple(getattr(x, "grad", None) for x in input_values), (edges, cotangents)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Ends the backwards of a step."""
        self._end()
        super().scale_grads(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._end()
        super().perform_reduce_grad(grad_scale_factor)

    def _end(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.close()
