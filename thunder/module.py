"""`ThunderModule`: what `thunder.jit` returns for an `nn.Module`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ThunderModule"]



class ThunderModule(torch.nn.Module):
    """A module whose calls run compiled programs. It shares parameters, buffers and mode with the module it wraps.

    Attributes and methods it does not have itself are the wrapped module's. Made by `thunder.jit`, not by users.
    """

    def __init__(self, model: torch.nn.Module, compiled_model_call: Any):
        """model: the module that is compiled. compiled_model_call: the callable that runs it."""
        super().__init__()
        self.__dict__.pop("training", None)
        self.__dict__["_compiled"] = compiled_model_call
        self._modules["_model"] = model

    def __call__(self, *args, **kwargs):
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self._compiled(*args, **kwargs)

    _lc_cd = property(lambda self: self._compiled._lc_cd)
    _lc_cs = property(lambda self: self._compiled._lc_cs)
    _lc_transforms = property(lambda self: self._compiled._lc_transforms)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The wrapped module's mode."""
        return self._modules["_model"].training  # type: ignore[union-attr]

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_modules", {}).get("_model")
        if model is not None:
            model.training = mode

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            return self.__dict__["_modules"]["_model"]
        return getattr(self.__dict__["_modules"]["_model"], name)

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
