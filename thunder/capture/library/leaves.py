"""Leaves of autograd's graph that a program makes: `torch.zeros(2, requires_grad=True)`, `x.detach().requires_grad_()`,
parameters."""

from __future__ import annotations

import functools

import torch

from thunder.capture.interface import Capture
from thunder.capture.library import gradients
from thunder.capture.numbers import source_of
from thunder.capture.tensors import is_leaf
from thunder.capture.world import Source
from thunder.core.proxies import NumberProxy, TensorProxy, like, number_value
from thunder.ops.functionalize.inplace import copy_
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


def leaf(c: Capture, values: TensorProxy, kind: type = torch.Tensor, requires_grad: bool = True) -> TensorProxy:
    """A new leaf with these values. The prologue makes it at each call, so that autograd knows it as it knows
    arguments; the program fills it."""
    options = {"dtype": to_torch_dtype(values.dtype), "device": to_torch_device(values.device)}
    source = _made_of_numbers(c, values, kind, requires_grad, options)
    if source is None:
        shape, layout = tuple(map(number_value, values.shape)), c.recorder.memory.layout
        strides = layout(values).stride() if layout is not None else torch.empty(shape, device="meta").stride()
        make = functools.partial(_make, kind, shape, strides, requires_grad, **options)
        source = c.world.const(make, "leaf").call("__call__")
    proxy = c.read(c.world.value_at(source), source)
    c.tensors.leaves.add(proxy)
    with torch.no_grad():
        c.synchronize()
        copy_(proxy, values)
    c.synchronize()
    return proxy


def _made_of_numbers(c: Capture, values: TensorProxy, kind: type, requires_grad: bool, options: dict) -> Source | None:
    """The source of a leaf with a symbolic size; None where all are constants, or the strides are others than those of
    new tensors."""
    layout, symbolic = c.recorder.memory.layout, [n for n in values.shape if isinstance(n, NumberProxy)]
    if not symbolic or any(n.unbacked for n in symbolic):
        return None
    if layout is not None and not layout(values, known={}).is_contiguous():
        return None
    make = functools.partial(_make_contiguous, kind, requires_grad, options)
    return c.world.const(make, "leaf").child(
        "made", tuple(source_of(c, n) if isinstance(n, NumberProxy) else n for n in values.shape)
    )


def _make_contiguous(kind: type, requires_grad: bool, options: dict, shape: tuple) -> torch.Tensor:
    return _make(kind, shape, torch.empty(shape, device="meta").stride(), requires_grad, **options)


def _make(kind: type, shape: tuple, strides: tuple, requires_grad: bool, **options) -> torch.Tensor:
    tensor = torch.empty_strided(shape, strides, **options)
    return kind(tensor, requires_grad) if kind is not torch.Tensor else tensor.requires_grad_(requires_grad)


def require_grad(c: Capture, f, args, kwargs) -> TensorProxy:
    """`Tensor.requires_grad_`: a tensor of the program's is a leaf from now on."""
    p, *rest = args
    wanted = rest[0] if rest else kwargs.get("requires_grad", True)
    p = c.recorder.memory.holder(p)
    values = c.recorder.latest(p)
    if values.requires_grad == wanted:
        return p
    _refuse_transforms(c)
    if p in c.tensors.frozen:
        c.recorder.memory.with_grad(p, *c.tensors.frozen.pop(p))
        return p
    if not wanted and is_leaf(c, p) and p not in c.tensors.placements and p not in c.tensors.required:
        c.tensors.frozen[p] = values, c.recorder.memory.without_grad(p)
        return p
    if not wanted or p in c.tensors.real and not _may_require_grad(c, p):
        c.refuse(
            f"requires_grad_({wanted}) changes a tensor that was not made without grad inside of the program",
            "set requires_grad before the call, or use x.detach()",
        )
    if values.dtype.category < 2:
        raise RuntimeError("only Tensors of floating point dtype can require gradients")
    if p in c.tensors.real:
        _require_grad_outside(c, p)
    else:
        c.recorder.memory.become(p, leaf(c, values))
    return p


def _may_require_grad(c: Capture, p: TensorProxy) -> bool:
    """Whether all uses of a tensor from outside come behind `requires_grad_`, so that no program computes with it as it
    was before the call, and as it is behind it."""
    memory = c.recorder.memory
    used = any(x is p for operation in c.recorder.bound_symbols for x in operation.inputs)
    known_once = sum(c.tensors.real[p][0] is real for real, _ in c.tensors.real.values()) == 1
    alone = memory.is_apart(p) and memory.latest(p) is p and known_once and p not in c.tensors.placements
    return alone and not used and c.tensors.real[p][1] not in c.tensors.replaced_sources


def _require_grad_outside(c: Capture, p: TensorProxy) -> None:
    """A tensor from outside is a leaf that requires grad from now on, and stays one behind the call. Its prologue says
    so to PyTorch where it returns the inputs: all questions have their answers then."""
    real, source = c.tensors.real[p]
    required = like(p)
    required.name, required.requires_grad = c.recorder.context.names.make("t"), True
    c.tensors.stand_for(required, real, source)
    c.tensors.required[required] = source.call("requires_grad_")
    c.recorder.memory.stand_for(p, required)


def parameter(c: Capture, cls, args, kwargs) -> TensorProxy:
    """`torch.nn.Parameter(data, requires_grad)`. It does not share memory with `data`, which nobody writes to then."""
    arguments = dict(zip(("data", "requires_grad"), args)) | kwargs
    data = arguments.get("data")
    if data is None:
        data = c.call(torch.empty, [0], {})
    data, wanted = c.lift(data), arguments.get("requires_grad", True)
    _refuse_transforms(c)
    values = c.recorder.latest(data)
    if values.dtype.category < 2 and wanted:
        raise RuntimeError("Only Tensors of floating point and complex dtype can require gradients")
    new_leaf = leaf(c, values, torch.nn.Parameter, wanted)
    c.recorder.memory.freeze(data, new_leaf)
    return new_leaf


def copied(c: Capture, f, args, kwargs) -> TensorProxy:
    """`Tensor.__deepcopy__`: of a leaf that requires grad another one, of a parameter a parameter."""
    p, memo = c.recorder.memory.holder(args[0]), args[1]
    if id(p) not in memo and gradients.read_gradient(c, p) is not None:
        c.refuse("copy.deepcopy of a tensor that has a gradient", "give it x.detach().clone()")
    if id(p) not in memo and any(effect.kind == "attr" and effect.owner is p for effect in c.effects):
        c.refuse("copy.deepcopy of a tensor whose attributes the program has set", "give it x.detach().clone()")
    values = c.recorder.latest(p)
    kind = type(c.tensors.real[p][0]) if p in c.tensors.real else torch.Tensor
    if kind is not torch.nn.Parameter and not values.requires_grad:
        return c.operation("__deepcopy__", p, memo)
    if id(p) not in memo:
        _refuse_transforms(c)
        if not is_leaf(c, p):
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn.utils."
                "weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
            )
        memo[id(p)] = leaf(c, values, kind, values.requires_grad)
    return memo[id(p)]


def _refuse_transforms(c: Capture) -> None:
    if c.recording.outer:
        c.refuse("the program creates a leaf inside of a transform of torch.func", "make it outside of the transform")
