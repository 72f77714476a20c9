"""LoRA: linear layers get a trainable product of two thin matrices (Hu et al. 2021), all else is frozen.

    lora = LoRA(r=8, alpha=16, targets=("q_proj", "v_proj"))
    compiled = thunder.jit(model, transforms=[NF4Weights(), lora])  # QLoRA; without NF4Weights: LoRA
    optimizer = torch.optim.AdamW(lora.parameters(compiled))

Before: `t0 = ltorch.linear(x, t_fc_weight, t_fc_bias)`. After:

    t1 = ltorch.linear(x, t_fc_weight, t_fc_bias)
    t2 = ltorch.linear(x, t_fc_lora_A_weight)
    t3 = ltorch.linear(t2, t_fc_lora_B_weight)
    t4 = ltorch.mul(t3, 2.0)
    t0 = ltorch.add(t1, t4)

Names and state dicts of the matrices are peft's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.rewrite import Rewriter, rewrite
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.errors import OptionError
from thunder.ops import ltorch
from thunder.transforms.base import Transform, connected, with_parameter

_MATRICES = ("lora_A.weight", "lora_B.weight")
_PEFT = "base_model.model."  # what peft's keys begin with


class LoRA(Transform):
    """Adds `alpha / r * B @ A` to weights of linear layers. The wrapped module stays as it was.

    r: the rank. alpha: the scale, 2 r by default. targets: which `torch.nn.Linear`s, by the last name of their path or
    by the whole path; None means all. dtype: of the matrices, by default the weight's; float32 where that is held in
    few bits and trained in bfloat16. A begins as Kaiming's uniform numbers, B as zeros, as in peft.
    """

    def __init__(
        self, r: int = 8, alpha: float | None = None, targets: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        if not isinstance(r, int) or isinstance(r, bool) or r < 1:
            raise OptionError(f"LoRA(r={r!r}): valid: a whole number above 0")
        if isinstance(targets, str):
            raise OptionError(f"LoRA(targets={targets!r}): valid: a sequence of names, ({targets!r},)")
        self.r, self.scale, self.targets, self.dtype = r, (2.0 if alpha is None else alpha / r), targets, dtype

    def __repr__(self) -> str:
        return f"LoRA(r={self.r}, alpha={self.scale * self.r:g}, targets={self.targets})"

    def _layers(self, model) -> Iterator[tuple[str, torch.nn.Linear]]:
        for path, module in model._model.named_modules():
            if isinstance(module, torch.nn.Linear):
                if self.targets is None or path in self.targets or path.rpartition(".")[2] in self.targets:
                    yield path, module

    def transform_module(self, model) -> None:
        """Adds an adapter to each chosen linear layer, and freezes the parameters of the module."""
        layers = list(self._layers(model))
        if not layers:
            raise OptionError(f"{self!r}: the module has no linear layer of these names")
        for name, parameter in list(model.named_parameters()):
            if parameter.requires_grad:
                model.set_parameter(name, torch.nn.Parameter(parameter.detach(), requires_grad=False))
        for path, layer in layers:
            options = {"dtype": self.dtype or layer.weight.dtype, "device": layer.weight.device}
            a = torch.empty(self.r, layer.in_features, **options)
            torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            matrices = (a, torch.zeros(layer.out_features, self.r, **options))
            for name, value in zip(_names(path), matrices, strict=True):
                model.set_parameter(name, torch.nn.Parameter(value))

    def transform_traces_pre_prologue(
        self, prologue_trace: Trace, computation_trace: Trace, epilogue_trace: Trace | None, *, model=None, **kwargs
    ) -> tuple:
        """The traces whose linear layers add what their adapters compute."""
        weights = {f"{path}.weight" if path else "weight": path for path, _ in self._layers(model)}
        paths = computation_trace.info.parameters
        used = {o.args[1].name for o in _casts_followed(computation_trace)}
        matrices: dict[str, list[TensorProxy]] = {}
        for weight in sorted({paths[name] for name in used if paths.get(name) in weights}):
            for name in _names(weights[weight]):
                prologue_trace, computation_trace, matrix = with_parameter(
                    prologue_trace, computation_trace, model, name
                )
                matrices.setdefault(weight, []).append(matrix)
        source: dict[Proxy, Proxy] = {}

        def rule(operation: BoundSymbol, out: Rewriter) -> None:
            if operation.sym is ltorch.to and isinstance(operation.output, TensorProxy):
                source[operation.output] = source.get(operation.args[0], operation.args[0])
            weight = operation.args[1] if operation.sym is ltorch.linear else None
            pairs = matrices.get(paths.get(source.get(weight, weight).name, "")) if weight is not None else None
            if pairs is None:
                return out.write(operation)
            out.trace(lambda x, w, b=None: ltorch.linear(x, w, b) + self._product(x, *pairs), operation)

        return prologue_trace, connected(rewrite(computation_trace, rule)), epilogue_trace

    def _product(self, x: TensorProxy, a: TensorProxy, b: TensorProxy) -> TensorProxy:
        to, linear = ltorch.to, ltorch.linear
        wide = x if x.dtype is a.dtype else to(x, dtype=a.dtype)
        product = linear(linear(wide, a), b) * self.scale
        return product if x.dtype is a.dtype else to(product, dtype=x.dtype)

    def reverse_transform_state_dict_for_submodule(self, model, submodule_name: str, state_dict: dict) -> dict:
        return {name: value for name, value in state_dict.items() if name not in _MATRICES}

    # --- adapters by themselves
    def parameters(self, compiled) -> list[torch.nn.Parameter]:
        """What trains."""
        return [compiled.get_parameter(name) for path, _ in self._layers(compiled) for name in _names(path)]

    def state_dict(self, compiled) -> dict[str, torch.Tensor]:
        """The matrices of a compiled module under peft's names."""
        names = [name for path, _ in self._layers(compiled) for name in _names(path)]
        return {_PEFT + name: compiled.get_parameter(name).detach() for name in names}

    def load_state_dict(self, compiled, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads what `state_dict`, or peft's `get_peft_model_state_dict`, gave. Raises OptionError where keys or shapes
        are others."""
        own = self.state_dict(compiled)
        if wrong := own.keys() ^ state_dict.keys():
            raise OptionError(f"LoRA.load_state_dict: missing or unexpected: {', '.join(sorted(wrong))}")
        for name, held in own.items():
            if held.shape != state_dict[name].shape:
                raise OptionError(
                    f"LoRA.load_state_dict: {name} is {list(held.shape)}, not {list(state_dict[name].shape)}"
                )
            held.copy_(state_dict[name])

    def merged(self, compiled) -> dict[str, torch.Tensor]:
        """The state dict of the wrapped module with the products added to its weights, for a plain copy of it."""
        state = compiled.original_state_dict()
        for path, _ in self._layers(compiled):
            a, b = (compiled.get_parameter(name).detach().float() for name in _names(path))
            name = f"{path}.weight" if path else "weight"
            state[name] = (state[name].float() + self.scale * (b @ a)).to(state[name].dtype)
        return state


def _names(path: str) -> list[str]:
    return [f"{path}.{name}" if path else name for name in _MATRICES]


def _casts_followed(trace: Trace) -> Iterator[BoundSymbol]:
    """Linear layers, with the value that a weight was cast of in its place."""
    source: dict[Proxy, Proxy] = {}
    for operation in trace.bound_symbols:
        if operation.sym is ltorch.to and isinstance(operation.output, TensorProxy):
            source[operation.output] = source.get(operation.args[0], operation.args[0])
        elif operation.sym is ltorch.linear:
            x, weight, *rest = operation.args
            yield operation.replace(args=(x, source.get(weight, weight), *rest))
