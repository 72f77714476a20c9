"""`thunder.export`: a program as a file of `torch.export`, which runs without thunder and without the model's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from thunder.api import compiled_or_jit
from thunder.compiled import Compiled
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import OpTags
from thunder.errors import MissingImplementationError, ProgramFileError
from thunder.extend import get_always_executors
from thunder.inspect.plain import NoPlainProgram, plain_program
from thunder.inspect.verification.programs import generators_restored
from thunder.options import NUMERICS_OPTIONS, DebugOptions
from thunder.pipeline import PASSES

__all__ = ["export"]


class _Exported(torch.nn.Module):
    """A program as a module. places: of each of its inputs the position among the tensors of a call, or the name of the
    tensor that the module holds."""

    def __init__(self, program: Callable, places: list[int | str], held: dict[str, torch.Tensor]):
        super().__init__()
        self.program, self.places = program, places
        for name, tensor in held.items():
            self.register_buffer(name, tensor.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        return self.program(*(leaves[p] if isinstance(p, int) else getattr(self, p) for p in self.places))


def export(fn: Callable, path: str | Path, /, *args: Any, **kwargs: Any) -> Path:
    """Writes the program of `fn(*args, **kwargs)` to a file of `torch.export`, in PyTorch's operations, with the
    parameters. `torch.export.load(path).module()` runs it without thunder and without the code of `fn`, and
    AOTInductor compiles it.

        thunder.export(model.eval(), "model.pt2", x)
        served = torch.export.load("model.pt2").module()  # in another process

    fn: compiled, or what `thunder.jit` takes. The program is one of inference, for the sizes and numbers of these
    arguments; torch.export checks that of each call.

    Raises ProgramFileError for what the format does not have: transforms (quantized weights among them), decisions by
    data, calls of Python on the host, side effects, results other than tensors in tuples, lists and dicts, numbers that
    data makes, and operations that PyTorch does not have; CaptureError where the function cannot be captured.
    """
    compiled = compiled_or_jit(fn)
    options = dataclasses.replace(
        compiled.options, executors=get_always_executors(), passes=PASSES, transforms=(), dynamic=False,
        numerics=NUMERICS_OPTIONS.EAGER, debug=DebugOptions(), used_compile_options={}, numbers_may_change=False,
    )  # fmt: skip

    def refuse(why: str) -> ProgramFileError:
        return ProgramFileError(f"this program cannot be exported to {path}: {why}")

    if compiled.options.transforms or any(compiled.overrides):
        raise refuse("thunder.jit was given transforms, whose operations torch.export does not know")
    with generators_restored(), torch.no_grad():
        entry, inputs = Compiled(compiled.fn, options).entry_for(args, kwargs)
    trace = entry.captured.computation_traces[0]
    if entry.captured.host_calls:
        raise refuse("it calls Python on the host")
    if entry.path:
        raise refuse(f"it decides by data ({entry.path[0].question})")
    if entry.epilogue_fn is not None:
        raise refuse("it has effects, or its result is made of other objects than tensors")
    kept = {OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.OPAQUE}
    for operation in trace.bound_symbols:
        if not kept.isdisjoint(operation.sym.tags):
            raise refuse(f"{operation.sym.name} is a call of Python, or has an effect")
    try:
        program = plain_program(trace.args, trace.bound_symbols, trace.output, trace.names).function
    except (NoPlainProgram, MissingImplementationError) as error:
        raise refuse(str(error)) from error
    leaves, places, held = tree_flatten((args, kwargs))[0], list[int | str](), dict[str, torch.Tensor]()
    for argument, value in zip(trace.args, inputs, strict=True):
        place = next((i for i, leaf in enumerate(leaves) if leaf is value), None)
        if not isinstance(value, torch.Tensor):
            raise refuse(f"{argument.name} is a number that data or a call gives")
        if place is None:
            held[argument.name] = value
        places.append(argument.name if place is None else place)
    with torch.no_grad():
        exported = torch.export.export(_Exported(program, places, held), args, kwargs)
    torch.export.save(exported, path)
    return Path(path)
