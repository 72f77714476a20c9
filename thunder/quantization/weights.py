"""Weights of linear layers in few bits: the base of `Int8Weights`, `Int4Weights` and `NF4Weights`.

Before: `computation(x, t_fc_weight)`, `t0 = linear(x, t_fc_weight, None)`. After:

    computation(x, t_fc_weight_held, t_fc_weight_scale)
    t_fc_weight = dequantize((t_fc_weight_held, t_fc_weight_scale), format, (32, 64), torch.bfloat16)
    t0 = linear(x, t_fc_weight, None)

`dequantize` stands right before the first use, and is a composite of operations that fusion executors take. A backward
dequantizes again, so that nothing of full size is saved. For few rows, as in decoding, kernels of the few_bits executor
multiply what is held, by the format's `encoding`.

Formats that multiply in few bits (`Int8Weights(dynamic=True)`, `Float8Weights`) round a layer's input as well:

    t0 = quantized_linear(x, None, (t_fc_weight_held, t_fc_weight_scale), format, (32, 64), torch.bfloat16)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Context
from thunder.core.trace import Trace
from thunder.errors import OptionError, warn_user
from thunder.ops import ltorch
from thunder.ops.families.few_bits import Encoding, dequantize, quantized_linear
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype, to_torch_dtype
from thunder.transforms.base import Transform, connected, with_parameter


def check_run(format: QuantizedWeights, name: str, run: int) -> None:
    """Raises OptionError where weights cannot be held by runs of so many, two numbers in a byte."""
    if not isinstance(run, int) or run < 2 or run % 2:
        raise OptionError(f"{type(format).__name__}({name}={run!r}): valid: an even number above 0")


def why_no_runs(weight: torch.Tensor, run: int) -> str | None:
    """Why the rows of a weight are no runs of so many numbers; None where they are."""
    return f"{weight.shape[1]} inputs are no multiple of {run}" if weight.shape[1] % run else None


class QuantizedWeights(Transform):
    """Base class of transforms that store weights of linear layers in 8 or 4 bits. The wrapped module does not change;
    delete it to free its weights.

    Weights that other modules share, such as those of an embedding, are not quantized. Quantized weights are not
    trained.

    Args:
        filter: `filter(module, path)` returns whether a `torch.nn.Linear` is quantized. None means all layers that the
            format supports.
    """

    parts: tuple[str, ...] = ()  # what there is of a weight besides that which takes its place
    executors: tuple[str, ...] = ("few_bits",)
    encoding: Encoding | None = None  # for kernels that read what is held; with None, a weight is made before its use

    def __init__(self, *, filter: Callable[[torch.nn.Module, str], bool] | None = None):
        if filter is not None and not callable(filter):
            raise OptionError(f"filter=... is a function of a module and its path, not a {type(filter).__name__}")
        self.filter = filter

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the quantized weight, followed by its scales and other parts."""

    @abstractmethod
    def dequantize(self, held: Any, *parts: Any) -> Any:
        """Returns the weight for the results of `quantize`. Called with tensors, and with values of a program."""

    def multiplies(self, x: TensorProxy, shape: tuple[int, int]) -> bool:
        """Returns whether layers with a weight of this shape compute with `product` for this input. If not, the
        weight is dequantized."""
        return False

    def product(self, x: Any, held: Any, *parts: Any) -> Any:
        """Returns x @ weight.T for x of shape (rows, inputs), with x rounded as well."""
        raise NotImplementedError

    def refusal(self, weight: torch.Tensor) -> str | None:
        """Returns why a weight cannot be quantized, or None if it can."""
        return None

    # --- modules
    def transform_module(self, model) -> None:
        """Quantizes the weights that the filter selects. Warns if there are none."""
        refused, taken = [], 0
        for path, weight in _own_weights(model, self.filter):
            why = self.refusal(weight)
            if why is not None:
                refused.append(f"{path}: {why}")
                continue
            taken += 1
            for name, value in zip(_names(self, path), self.quantize(weight.detach()), strict=True):
                model.set_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        if not taken:
            warn_user(f"{type(self).__name__} takes no layer{': ' if refused else ''}{'; '.join(refused)}", UserWarning)

    def transform_traces_pre_prologue(
        self,
        prologue_trace: Trace,
        computation_trace: Trace,
        epilogue_trace: Trace | None,
        *,
        model: Any = None,
        **kwargs,
    ) -> tuple:
        """Replaces the weights in the program by their quantized parts."""
        parameters = computation_trace.info.parameters
        paths = {
            a: parameters[a.name]
            for a in computation_trace.args
            if isinstance(a, TensorProxy) and self._holds(model, parameters.get(a.name))
        }
        parts_of: dict[TensorProxy, tuple] = {}
        for a, path in paths.items():
            held, *names = _names(self, path)
            value = model.get_parameter(held)
            first = TensorProxy(
                computation_trace.names.claim(f"{a.name}_held"), shape=tuple(value.shape),
                dtype=from_tensor_dtype(value.dtype), device=from_tensor_device(value.device),
            )  # fmt: skip
            parts_of[a] = (first,)
            for name in names:
                prologue_trace, computation_trace, part = with_parameter(prologue_trace, computation_trace, model, name)
                parts_of[a] += (part,)
        changed = _with_weights(computation_trace, self, parts_of) if parts_of else computation_trace
        return prologue_trace, changed, epilogue_trace

    def _holds(self, model, path: str | None) -> bool:
        return path is not None and all(name in model._overrides_parameters for name in _names(self, path)[1:])

    # --- state dicts
    def transform_state_dict_for_submodule(self, model, submodule_name: str, state_dict: dict) -> dict:
        path = f"{submodule_name}.weight" if submodule_name else "weight"
        if "weight" not in state_dict or not self._holds(model, path):
            return state_dict
        names = _names(self, "weight")
        return {**state_dict, **dict(zip(names, self.quantize(state_dict["weight"]), strict=True))}

    def reverse_transform_state_dict_for_submodule(self, model, submodule_name: str, state_dict: dict) -> dict:
        names = _names(self, "weight")
        if not all(name in state_dict for name in names):
            return state_dict
        rest = {k: v for k, v in state_dict.items() if k not in names}
        dtype = model.get_submodule(submodule_name).weight.dtype
        return {**rest, "weight": self.dequantize(*(state_dict[name] for name in names)).to(dtype)}


class ScaledRows(QuantizedWeights):
    """w = held * scale, with a scale for each output."""

    parts = ("scale",)

    def dequantize(self, held: Any, scale: Any) -> Any:  # type: ignore[override]
        return held.to(torch.float32) * scale


def _names(format: QuantizedWeights, path: str) -> list[str]:
    return [path, *(f"{path}.{part}" for part in format.parts)]


def _own_weights(model, filter: Callable | None) -> list[tuple[str, torch.Tensor]]:
    """The weights of linear layers that no other module reads, by their paths."""
    uses: dict[int, int] = {}
    for module in model._model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [
        (f"{path}.weight" if path else "weight", module.weight)
        for path, module in model._model.named_modules()
        if isinstance(module, torch.nn.Linear) and uses.get(id(module.weight)) == 1
        if type(module.weight) is torch.nn.Parameter and module.weight.dtype.is_floating_point
        if filter is None or filter(module, path)
    ]


def _with_weights(trace: Trace, format: QuantizedWeights, parts_of: dict[TensorProxy, tuple]) -> Trace:
    """The program on what is held: each weight is made right before its first use."""
    context = next((o.context for o in trace.bound_symbols if o.context is not None), None) or Context(trace.names)
    context = context.replace(autocast=None, checkpoint=())
    frozen: dict[Proxy, Any] = {a: a.replace(requires_grad=False) for a in parts_of}
    waiting = dict(parts_of)
    parts: dict[Proxy, tuple] = {**parts_of}
    operations: list[BoundSymbol] = []
    for operation in trace.bound_symbols:
        if operation.sym is ltorch.to and operation.args[0] in parts:  # of autocast
            parts[operation.output] = parts[operation.args[0]]
        if (multiplied := _multiplied(operation, format, parts, context)) is not None:
            operations.append(multiplied)
            continue
        for a in dict.fromkeys(operation.inputs):
            if isinstance(a, TensorProxy) and a in waiting:
                shape, dtype = tuple(a.shape), to_torch_dtype(a.dtype)
                bound = dequantize.bind(waiting.pop(a), format, shape, dtype, output=frozen[a], context=context)
                operations.append(bound)
        operations.append(operation.swap(frozen))
    paths = trace.info.parameters
    info = trace.info.replace(parameters={**paths, **{held.name: paths[a.name] for a, (held, *_) in parts_of.items()}})
    args = [parts_of[a][0] if isinstance(a, TensorProxy) and a in parts_of else a for a in trace.args]
    return connected(trace.replace(args=args, bound_symbols=operations, info=info), set(frozen.values()))


def _multiplied(
    operation: BoundSymbol, format: QuantizedWeights, parts: dict[Proxy, tuple], context: Context
) -> BoundSymbol | None:
    """A layer on what is held of its weight; None where the weight has to be made. parts: of weights and of casts."""
    if operation.sym is not ltorch.linear or operation.args[1] not in parts or operation.args[0] in parts:
        return None
    x, weight, *bias = operation.args
    shape, out = tuple(weight.shape), operation.output
    if not format.multiplies(x, shape):
        return None
    operands = x, bias[0] if bias else None, parts[weight], format, shape, to_torch_dtype(out.dtype)
    bound = quantized_linear.bind(*operands, output=out, context=context)
    bound.location = operation.location
    return bound


# ------------------------------------------------------------------------------------------------ numbers of four bits


def join(first: Any, second: Any, dim: int) -> Any:
    if isinstance(first, Proxy):
        return ltorch.cat([first, second], dim)
    return torch.cat([first, second], dim)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes below 16, two to a byte: a row's first half in the low bits, its second half in the high ones."""
    low, high = codes.to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def unpack(packed: Any, dtype: torch.dtype) -> Any:
    """The codes as numbers of a floating-point type. No shift: not all fusion executors have one."""
    return join((packed & 15).to(dtype), (packed & 240).to(dtype) * 0.0625, -1)
