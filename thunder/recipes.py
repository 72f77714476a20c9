"""`thunder.compile` and recipes: named sets of options of `thunder.jit`.

    compiled = thunder.compile(model, recipe="training", plugins=[FP8(scaling="rowwise")])

A recipe is a frozen dataclass. Its fields are its parameters, `options()` are keywords of `thunder.jit`, `place` is
changes of the compiled module afterwards. A plugin is a recipe as well: several are joined by `+`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from thunder.api import jit
from thunder.distributed import FSDPBucketingStrategy, FSDPType, ddp, fsdp
from thunder.errors import OptionError, did_you_mean
from thunder.quantization.float8 import Float8Weights
from thunder.quantization.int4 import Int4Weights
from thunder.quantization.int8 import Int8Weights
from thunder.quantization.nf4 import NF4Weights
from thunder.transforms.cudagraph import CUDAGraphTransform
from thunder.transforms.float8 import Float8Transform

__all__ = [
    "compile", "Recipe", "Default", "Inference", "Training", "ReduceOverhead", "FP8", "QuantizeInt8",
    "QuantizeFP8", "QuantizeInt4", "QuantizeNF4", "DDP", "FSDP",
    "get_recipes", "register_recipe",
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A set of options of `thunder.jit`. A subclass is a frozen dataclass whose fields are its parameters.

    `print(recipe)` shows the keywords of `thunder.jit` that it sets. `a + b` is a recipe with the options of both.
    """

    def options(self) -> dict[str, Any]:
        """Returns the keywords of `thunder.jit`. Called once for each compiled function. Values that are lists are
        concatenated with those of other recipes."""
        return {}

    def place(self, compiled: Any) -> Any:
        """Changes the compiled function or module, for example distributes it, and returns it."""
        return compiled

    def __add__(self, other: Recipe) -> Recipe:
        if not isinstance(other, Recipe):
            return NotImplemented
        return Joined((*_parts(self), *_parts(other)))

    def __str__(self) -> str:
        lines = [repr(self), *(f"  {name} = {value!r}" for name, value in self.options().items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class Joined(Recipe):
    """Several recipes, in order. Raises OptionError where two of them set an option to different values."""

    parts: tuple[Recipe, ...]

    def options(self) -> dict[str, Any]:
        """The options of all parts. Raises OptionError where two of them differ."""
        joined: dict[str, Any] = {}
        set_by: dict[str, Recipe] = {}
        for part in self.parts:
            for name, value in part.options().items():
                if name not in joined:
                    joined[name], set_by[name] = value, part
                elif isinstance(value, (list, tuple)):
                    joined[name] = [*joined[name], *value]
                elif value != joined[name]:
                    raise OptionError(
                        f"{set_by[name]!r} sets {name}={joined[name]!r}, and {part!r} sets {name}={value!r}: leave one "
                        "of the two out"
                    )
        return joined

    def place(self, compiled: Any) -> Any:
        for part in self.parts:
            compiled = part.place(compiled)
        return compiled

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


def _parts(recipe: Recipe) -> tuple[Recipe, ...]:
    return recipe.parts if isinstance(recipe, Joined) else (recipe,)


@dataclass(frozen=True)
class Default(Recipe):
    """The defaults of `thunder.jit`."""


@dataclass(frozen=True)
class Inference(Recipe):
    """Results never require grad, and nothing is saved for a backward. The module's mode stays: call `eval()`."""

    def options(self) -> dict[str, Any]:
        return {"disable_torch_autograd": True}


@dataclass(frozen=True)
class Training(Recipe):
    """Options for training.

    Args:
        memory_budget: The fraction of the bytes saved for the backward that may be saved. The rest is recomputed.
        rng: "fused" lets fused kernels draw the random numbers of dropout. These differ from eager's.
    """

    memory_budget: float = 1.0
    rng: str = "torch"

    def options(self) -> dict[str, Any]:
        return {"memory_budget": self.memory_budget, "rng": self.rng}


class _OneTransform(Recipe):
    """A recipe that applies one transform, and has its parameters."""

    transform: ClassVar[Callable[..., Any]]

    def options(self) -> dict[str, Any]:
        return {"transforms": [type(self).transform(**_fields(self))]}


@dataclass(frozen=True)
class ReduceOverhead(_OneTransform):
    """CUDA graphs, as `torch.compile(mode="reduce-overhead")`: one launch runs a whole program. On the CPU the only
    effect is that each size has its own program."""

    transform = CUDAGraphTransform


@dataclass(frozen=True)
class FP8(_OneTransform):
    """Linear layers compute in float8. The parameters are those of `Float8Transform`."""

    transform = Float8Transform
    scaling: str = "tensorwise"
    gradient_dtype: torch.dtype | None = None
    filter: Callable[[Any, str], bool] | None = None


@dataclass(frozen=True)
class QuantizeInt8(_OneTransform):
    """Weights of linear layers in 8-bit integers. The parameters are those of `Int8Weights`."""

    transform = Int8Weights
    dynamic: bool = False
    filter: Callable[[Any, str], bool] | None = None


@dataclass(frozen=True)
class QuantizeFP8(_OneTransform):
    """Weights of linear layers in float8, for inference. The parameters are those of `Float8Weights`."""

    transform = Float8Weights
    filter: Callable[[Any, str], bool] | None = None


@dataclass(frozen=True)
class QuantizeInt4(_OneTransform):
    """Weights of linear layers in 4-bit integers, with a scale for each group. The parameters are those of
    `Int4Weights`."""

    transform = Int4Weights
    group: int = 64
    filter: Callable[[Any, str], bool] | None = None


@dataclass(frozen=True)
class QuantizeNF4(_OneTransform):
    """Weights of linear layers in the 4-bit NormalFloat format. The parameters are those of `NF4Weights`."""

    transform = NF4Weights
    block: int = 64
    double: bool = True
    filter: Callable[[Any, str], bool] | None = None


@dataclass(frozen=True)
class DDP(Recipe):
    """Every rank holds all parameters. The parameters are those of `thunder.distributed.ddp`."""

    bucket_size_in_mb: float = 25.0
    broadcast_from: int | None = 0
    process_group: Any = None

    def place(self, compiled: Any) -> Any:
        return ddp(compiled, **_fields(self))


@dataclass(frozen=True)
class FSDP(Recipe):
    """Every rank holds a shard of each parameter. The parameters are those of `thunder.distributed.fsdp`."""

    device: torch.device | str | None = None
    broadcast_from: int | None = None
    sharding_strategy: FSDPType = FSDPType.ZERO2
    bucketing_strategy: FSDPBucketingStrategy = FSDPBucketingStrategy.NONE
    move_state_dict_to_cpu: bool | None = None
    process_group: Any = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def place(self, compiled: Any) -> Any:
        return fsdp(compiled, **_fields(self))


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {f.name: getattr(recipe, f.name) for f in fields(recipe)}


_NAMED: dict[str, type[Recipe]] = {
    "auto": Default, "default": Default, "inference": Inference, "training": Training,
    "reduce-overhead": ReduceOverhead, "fp8": FP8, "quantize-int8": QuantizeInt8, "quantize-int4": QuantizeInt4,
    "quantize-nf4": QuantizeNF4, "quantize-fp8": QuantizeFP8, "ddp": DDP, "fsdp": FSDP, "distributed": FSDP,
}  # fmt: skip


def get_recipes() -> dict[str, type[Recipe]]:
    """Returns the registered recipes by name."""
    return dict(_NAMED)


def register_recipe(name: str, recipe: type[Recipe]) -> type[Recipe]:
    """Registers a recipe under a name that `thunder.compile` accepts.

    Raises:
        OptionError: If another recipe has this name.
    """
    if _NAMED.setdefault(name, recipe) is not recipe:
        raise OptionError(f"a recipe is called {name!r} already: {_NAMED[name].__name__}")
    return recipe


def _recipe(recipe: Recipe | str) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in _NAMED:
        return _NAMED[recipe]()
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise OptionError(f"recipe {recipe.__name__} is a class: give an instance, {recipe.__name__}(...)")
    near = did_you_mean(recipe, _NAMED)
    raise OptionError(f"{recipe!r} is no recipe; {near}valid: a thunder.Recipe, {', '.join(map(repr, _NAMED))}")


def compile(
    model: Callable | None = None,
    /,
    *,
    recipe: Recipe | str = "auto",
    plugins: Recipe | str | Sequence[Recipe | str] | None = None,
    **options: Any,
) -> Any:
    """Calls `thunder.jit` with the options of a recipe and of plugins.

    Args:
        model: A function or an `nn.Module`. Without it, `compile` returns a decorator that uses the other arguments.
        recipe: A recipe or its name. "auto" and "default" are the defaults of `thunder.jit`.
        plugins: Recipes, or their names, whose options are added to those of `recipe`.
        options: Keywords of `thunder.jit`. They override the recipes; the lists `transforms` and `executors` are
            appended to those of the recipes.

    Returns:
        The result of `thunder.jit`, after the `place` method of each recipe.

    Raises:
        OptionError: If a name is unknown, or two recipes set an option to different values. OptionError is a
            ValueError. Invalid options raise the errors of `thunder.jit`.
    """
    if model is None:
        return functools.partial(compile, recipe=recipe, plugins=plugins, **options)
    own_plugins = (plugins,) if isinstance(plugins, (str, Recipe)) else plugins or ()
    chosen = functools.reduce(Recipe.__add__, map(_recipe, (recipe, *own_plugins)))
    settings = chosen.options()
    for name, value in options.items():
        joins = isinstance(value, (list, tuple)) and name in settings
        settings[name] = [*settings[name], *value] if joins else value
    return chosen.place(jit(model, **settings))
