"""`ThunderModule`: what `thunder.jit` returns for an `nn.Module`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ThunderModule"]

_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


class ThunderModule(torch.nn.Module):
    """A module whose calls run compiled programs. It shares parameters, buffers and mode with the module it wraps.

    Attributes and methods it does not have itself are the wrapped module's. Made by `thunder.jit`, not by users.
    """

    def __init__(self, model: torch.nn.Module, compiled_model_call: Any):
        """model: the module that is compiled. compiled_model_call: the callable that runs it."""
        super().__init__()
        self.__dict__.pop("training", None)
        self.__dict__["_compiled"], self.__dict__["_model"] = compiled_model_call, model
        for name in _SHARED:  # one and the same containers, so that whatever PyTorch does to a module is done to the wrapped one
            self.__dict__[name] = model.__dict__[name]

    def __call__(self, *args, **kwargs):
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self._compiled(*args, **kwargs)

    _lc_cd = property(lambda self: self._compiled._lc_cd)
    _lc_cs = property(lambda self: self._compiled._lc_cs)
    _lc_transforms = property(lambda self: self._compiled._lc_transforms)

    _lc_original = property(lambda self: self._model)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The wrapped module's mode."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_model")
        if model is not None:
            model.training = mode

    def train(self, mode: bool = True):
        self._model.train(mode)
        return self

    def __repr__(self) -> str:
        inside = repr(self._model).replace("\n", "\n  ")
        return f"ThunderModule(\n  (_model): {inside}\n)"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def __dir__(self):
        return sorted({*super().__dir__(), *dir(self._model)})

    # --- containers (nn.Sequential, nn.ModuleList) stay containers
    def __bool__(self) -> bool:
        return bool(self._model)

    def __len__(self) -> int:
        return len(self._model)  # type: ignore[arg-type]

    def __getitem__(self, index):
        return self._model[index]  # type: ignore[index]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or name.startswith("_") or name in type(self).__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    # --- parameters, buffers, submodules: the wrapped module's, under its own names
    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer at a dotted path of the wrapped module. Raises AttributeError where the path leads to none."""
        return self._model.get_buffer(target)

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """The parameter at a dotted path of the wrapped module. Raises AttributeError where the path leads to none."""
        return self._model.get_parameter(target)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """The submodule at a dotted path of the wrapped module. Raises AttributeError where the path leads to none."""
        return self._model.get_submodule(target)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Replaces the buffer at a dotted path."""
        owner, _, last = name.rpartition(".")
        setattr(self._model.get_submodule(owner), last, value)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) pairs of the wrapped module; shared parameters once unless remove_duplicate is False."""
        return self._model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer) pairs of the wrapped module; shared buffers once unless remove_duplicate is False."""
        return self._model.named_buffers(prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self._model.named_children()

    def named_modules(self, memo=None, prefix: str = "", remove_duplicate: bool = True):
        return self._model.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """The wrapped module's state dict: the same keys and the same tensors."""
        return self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Loads into the wrapped module."""
        return self._model.load_state_dict(state_dict, strict=strict, assign=assign)

    def original_state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """The state dict of the module as it was before transforms changed its weights; without such transforms the same as `state_dict`."""
        return self._model.state_dict(*args, **kwargs)

    def load_original_state_dict(self, state_dict) -> None:
        """Loads a state dict of the module as it was before transforms."""
        self._model.load_state_dict(state_dict)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self._model._load_from_state_dict(*args, **kwargs)

    def apply(self, fn):
        self._model.apply(fn)
        return self

    def _apply(self, fn, recurse: bool = True):
        self._model._apply(fn, recurse)
        return self

    def requires_grad_(self, requires_grad: bool = True):
        self._model.requires_grad_(requires_grad)
        return self

    @contextlib.contextmanager
    def no_sync(self):
        """Inside the block, gradients of data-parallel training are accumulated locally; they are synchronised when the block ends.

        Nothing to do for a module that is not distributed.
        """
        yield

    # --- copies keep module and options, and drop what was compiled
    def __deepcopy__(self, memo):
        import copy

        from thunder.compiled import jit_with

        return jit_with(copy.deepcopy(self._model, memo), self._compiled.options)

    def __reduce__(self):
        from thunder.compiled import jit_with

        return jit_with, (self._model, self._compiled.options)
