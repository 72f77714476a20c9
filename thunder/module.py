"""`ThunderModule`: a compiled `nn.Module`."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder.compiled import Compiled, compiled_of, run_compiled
from thunder.core.symbol import current_recorder
from thunder.distributed.boundary import like, locals_of
from thunder.distributed.placement import Placement, is_dtensor, place, placement_of, seen_as
from thunder.methods import for_methods, method_with_programs, names_one_of, seen_by_methods
from thunder.transforms.base import has_hook

_SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


_OWN = (*_SHARED, "_model", "_compiled", "_seen_by_methods", "_methods")
_OF_COMPILED = ("programs", "recompilations", "lower")  # unless the wrapped module has its own


class _Forward:
    """The method `forward` of a compiled module, with the signature of the wrapped module's."""

    def __get__(self, module: ThunderModule | None, owner: type):
        if module is None:
            return run_compiled
        # a copy with a name, signature and attributes of its own
        forward = types.FunctionType(run_compiled.__code__, globals(), "forward")
        return types.MethodType(functools.update_wrapper(forward, type(module._model).forward), module)


def _methods_of(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if isinstance(value, types.FunctionType)}


class ThunderModule(torch.nn.Module):
    """A module whose calls run compiled programs. `thunder.jit` creates it.

    It shares parameters, buffers and the training mode with the wrapped module. `isinstance` and `__class__` give the
    answers of the wrapped module, because libraries use them to find out what a model is. Attributes and methods that
    it does not define are those of the wrapped module; `programs`, `recompilations` and `lower` are those of the
    compiled function. Methods that call the module, such as `generate` of transformers, run compiled programs. A method
    that receives tensors and calls submodules is compiled as well.
    """

    def __init__(self, model: torch.nn.Module, compiled_model_call: Any):
        """model: the module that is compiled. compiled_model_call: the callable that runs it."""
        super().__init__()
        self.__dict__.pop("training", None)
        self.__dict__["_compiled"], self.__dict__["_model"] = compiled_model_call, model
        self.__dict__["_methods"] = {}
        compiled_model_call.module = weakref.ref(self)
        # one and the same containers, so that whatever PyTorch does to a module is done to the wrapped one
        for name in _SHARED:
            self.__dict__[name] = model.__dict__[name]

    def __call__(self, *args, **kwargs):
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            return super().__call__(*args, **kwargs)
        if "forward" in self.__dict__:  # inside of another program it becomes a part of that
            forward = self.forward if current_recorder() is not None else self._replaced()
            return forward(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    forward: Any = _Forward()

    def _replaced(self) -> Any:
        """The forward that a library has put in the place of this module's, compiled: it may call the modules inside
        instead of the compiled one. Where a transform has replaced parameters, only the module's own programs know
        them."""
        forward, compiled = self.__dict__["forward"], self._compiled
        if compiled_of(forward) is not None or compiled.options.transforms or any(compiled.overrides):
            return forward
        if compiled.replaced is None or compiled.replaced.fn is not forward:
            compiled.replaced = Compiled(forward, compiled.options)
        return compiled.replaced

    @property
    def _running(self) -> Compiled:
        """The compiled function that a call of the module runs."""
        replaced = self._compiled.replaced
        return replaced if "forward" in self.__dict__ and replaced is not None else self._compiled

    @property
    def __class__(self) -> type:
        kind = type(self)
        return type(self.__dict__["_model"]) if kind is ThunderModule and "_model" in self.__dict__ else kind

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """A class that was derived from the wrapped module's, as `fully_shard` does, is derived from this one."""
        if not issubclass(kind, ThunderModule):
            bases = tuple(type(self) if base is self.__class__ else base for base in kind.__bases__)
            kind = type(kind.__name__, bases, {"__module__": kind.__module__, **_methods_of(kind)})
        vars(object)["__class__"].__set__(self, kind)

    _lc_cd = property(lambda self: self._compiled._lc_cd)
    _lc_cs = property(lambda self: self._compiled._lc_cs)
    _lc_transforms = property(lambda self: self._compiled._lc_transforms)

    _lc_original = property(lambda self: self._model)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The mode of the wrapped module."""
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
        try:
            attribute = getattr(self.__dict__["_model"], name)
        except AttributeError:
            if name in _OF_COMPILED:
                return getattr(self._running, name)
            raise
        # inside of another program calls of the wrapped module become a part of that
        if type(attribute) is types.MethodType and attribute.__self__ is self._model and current_recorder() is None:
            return types.MethodType(self._method(attribute.__func__), self._as_seen_by_methods())
        return attribute

    def _method(self, function: Any) -> Any:
        """A function of the wrapped module's class, so that calls with tensors are programs where it, or one that it
        overrides, names modules inside. Where a transform has replaced parameters, only the module's own programs know
        them."""
        known, options = self.__dict__["_methods"], self._compiled.options
        of_name = (vars(base).get(function.__name__) for base in type(self._model).__mro__)
        names = any(names_one_of(f, self._modules) for f in (function, *of_name))
        if options.transforms or any(self._compiled.overrides) or not names:
            return function
        if function not in known:
            otherwise = functools.partial(self._call_method, function)
            whole = Compiled(types.MethodType(function, self._model), for_methods(options), otherwise)
            known[function] = method_with_programs(function, whole)
        return known[function]

    def _call_method(self, function: Any, args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """A call of a method that cannot be captured, in which calls of the module run compiled programs; and whether
        there were any, and none of modules inside, which run as they are (a loss function without parameters may)."""
        calls = self._compiled.stats.calls
        result = function(self._as_seen_by_methods(), *args, **kwargs)
        inside = {n for n, m in self._model._modules.items() if m is not None and any(True for _ in m.parameters())}
        return result, self._compiled.stats.calls > calls and not names_one_of(function, inside)

    def _as_seen_by_methods(self) -> torch.nn.Module:
        kind = self.__dict__.get("_seen_by_methods")
        if kind is None or kind.__base__ is not type(self._model):
            kind = self.__dict__["_seen_by_methods"] = seen_by_methods(type(self._model), self._method)
        view = object.__new__(kind)
        object.__setattr__(view, "__dict__", self._model.__dict__)
        object.__setattr__(view, "_thunder_module", self)
        return view

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
        own = name in self.__dict__ or name.startswith("_") and not hasattr(self._model, name)
        if own or hasattr(type(self), name):  # also a method that is replaced, `forward` or `to`
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    # --- tensors that transforms put in the place of the wrapped module's
    @property
    def _overrides_parameters(self) -> dict[str, torch.Tensor]:
        """Parameters by dotted name that take the place of the wrapped module's, or stand beside them. The wrapped
        module stays as it was."""
        return self._compiled.overrides[0]

    @property
    def _overrides_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by dotted name that take the place of the wrapped module's, or stand beside them."""
        return self._compiled.overrides[1]

    def set_parameter(self, name: str, value: torch.nn.Parameter) -> None:
        """Replaces or adds the parameter at a dotted path in this module. The wrapped module does not change."""
        if not isinstance(value, torch.nn.Parameter):
            raise TypeError(
                f"cannot assign '{torch.typename(value)}' as parameter '{name}' (torch.nn.Parameter or None expected)"
            )
        self._overrides_parameters[name] = value

    def seen_as(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype in which programs see the replaced parameter or buffer at a dotted path."""
        parameters, buffers = self._compiled.overrides
        return seen_as(parameters[name] if name in parameters else buffers[name])

    def held_of(self, name: str) -> Callable | None:
        """Returns a function from the parameter at a dotted path to the part of it that this rank holds; None if
        that is the whole parameter."""
        placement = _placement_on_a_mesh(self._overrides_parameters.get(name))
        rows = placement.held_shape[:1] if placement is not None else ()
        return None if placement is None else lambda x: locals_of((x,), rows or (None,))[0]

    # --- parameters, buffers, submodules: overrides first, then the wrapped module's, under its own names
    def get_buffer(self, target: str) -> torch.Tensor:
        """Returns the buffer at a dotted path. Raises AttributeError if there is none."""
        buffer = self._overrides_buffers.get(target)
        return self._model.get_buffer(target) if buffer is None else buffer

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """Returns the parameter at a dotted path. Raises AttributeError if there is none."""
        parameter = self._overrides_parameters.get(target)
        return self._model.get_parameter(target) if parameter is None else parameter  # type: ignore[return-value]

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Returns the submodule of the wrapped module at a dotted path. Raises AttributeError if there is none."""
        return self._model.get_submodule(target)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        """Replaces the buffer at a dotted path. If a transform has replaced this buffer, or the wrapped module has
        no such buffer, the buffer of this module is set; otherwise that of the wrapped module."""
        owner, _, last = name.rpartition(".")
        if name in self._overrides_buffers or last not in self._model.get_submodule(owner)._buffers:
            self._overrides_buffers[name] = value
        else:
            setattr(self._model.get_submodule(owner), last, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields (name, parameter) pairs: replaced parameters first, then those of the wrapped module. A shared
        parameter is yielded once, unless remove_duplicate is False."""
        own = self._model.named_parameters(prefix, recurse, remove_duplicate and not self._overrides_parameters)
        return _overridden(self._overrides_parameters, own, prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, buffer) pairs: replaced buffers first, then those of the wrapped module. A shared buffer is
        yielded once, unless remove_duplicate is False."""
        own = self._model.named_buffers(prefix, recurse, remove_duplicate and not self._overrides_buffers)
        return _overridden(self._overrides_buffers, own, prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self._model.named_children()

    def named_modules(self, memo=None, prefix: str = "", remove_duplicate: bool = True):
        modules = self._model.named_modules(memo, prefix, remove_duplicate)
        if type(self) is ThunderModule:
            return modules
        # fully_shard gave it another class, and looks for it among its own
        return ((name, self if module is self._model else module) for name, module in modules)

    # --- state dicts, in the transformed form and in the original's
    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the state dict of the wrapped module, with the entries that transforms replaced or added. It holds
        the tensors themselves, not copies."""
        state = self._model.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for table in self._compiled.overrides:
            state.update({prefix + name: value if keep_vars else value.detach() for name, value in table.items()})
        return state

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """Loads a state dict that `state_dict` returned. Errors are PyTorch's."""
        parameters, buffers = self._compiled.overrides
        if not parameters and not buffers:
            return self._model.load_state_dict(state_dict, strict=strict, assign=assign)
        overridden = parameters | buffers
        own = {k: v for k, v in state_dict.items() if k not in overridden}
        result = self._model.load_state_dict(own, strict=False, assign=assign)
        missing = [k for k in (*result.missing_keys, *overridden) if k not in state_dict]
        problems = _key_problems(list(result.unexpected_keys), missing) if strict else []
        for name, was in overridden.items():
            if name in state_dict and was.shape != state_dict[name].shape:
                problems.append(_size_problem(name, state_dict[name], was.shape))
        _raise(problems, self)
        for name in overridden:
            if name in state_dict:
                _load(parameters if name in parameters else buffers, name, state_dict[name], assign)
        result.missing_keys[:] = missing
        return result

    def original_state_dict(self, *, destination=None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the state dict in the format of the original module, before transforms changed its weights and
        before it was distributed."""
        transforms = [
            t for t in reversed(self._lc_transforms) if has_hook(t, "reverse_transform_state_dict_for_submodule")
        ]
        state = self.state_dict(keep_vars=True)
        parts = [name for name, value in state.items() if _placement_on_a_mesh(value) is not None]
        if not transforms and not parts:
            return self.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        state.update({name: state[name].detach().full_tensor() for name in parts})
        if not keep_vars:
            state = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        destination = {} if destination is None else destination
        for name, part in self._by_submodule(state).items():
            for transform in transforms:
                part = transform.reverse_transform_state_dict_for_submodule(self, name, part)
            destination.update({f"{prefix}{name}.{k}" if name else f"{prefix}{k}": v for k, v in part.items()})
        return destination

    def load_original_state_dict(self, state_dict) -> None:
        """Loads a state dict in the format of the original module. Transforms convert the entries of each submodule,
        and each rank takes its shards. Errors are PyTorch's."""
        transforms = [t for t in self._lc_transforms if has_hook(t, "transform_state_dict_for_submodule")]
        transformed = {}
        for name, part in self._by_submodule(state_dict).items():
            for transform in transforms:
                part = transform.transform_state_dict_for_submodule(self, name, part)
            transformed.update({f"{name}.{k}" if name else k: v for k, v in part.items()})
        problems = []
        for name, held in self.state_dict(keep_vars=True).items():
            placement = _placement_on_a_mesh(held)
            if placement is not None and name in transformed:
                if tuple(transformed[name].shape) == placement.shape:
                    transformed[name] = like(held, placement.part_of(transformed[name]))
                else:
                    problems.append(_size_problem(name, transformed[name], torch.Size(placement.shape)))
        _raise(problems, self)
        self.load_state_dict(transformed)

    def _by_submodule(self, state_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Entries by the innermost submodule that has them, under their names in it."""
        modules = {name for name, _ in self._model.named_modules(remove_duplicate=False)}
        parts: dict[str, dict[str, Any]] = {}
        for key, value in state_dict.items():
            owner = key
            while owner not in modules:
                owner = owner.rpartition(".")[0]
            parts.setdefault(owner, {})[key[len(owner) + 1 :] if owner else key] = value
        return parts

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self._model._load_from_state_dict(*args, **kwargs)

    def apply(self, fn):
        self._model.apply(fn)
        return self

    def _apply(self, fn, recurse: bool = True):
        """`nn.Module._apply`, for the overrides as well; parameters stay the objects that optimizers hold."""
        self._model._apply(fn, recurse)
        for table in self._compiled.overrides:
            for name, value in table.items():
                with torch.no_grad():
                    changed = fn(value)
                if not isinstance(value, torch.nn.Parameter):
                    table[name] = changed
                elif value.is_meta or is_dtensor(value):
                    table[name] = torch.nn.Parameter(changed, value.requires_grad)
                    if (placement := placement_of(value)) is not None:
                        place(table[name], placement)
                else:  # the same parameter, which an optimizer may hold
                    value.data = changed
        return self

    def requires_grad_(self, requires_grad: bool = True):
        self._model.requires_grad_(requires_grad)
        for value in self._overrides_parameters.values():
            if value.is_floating_point() or value.is_complex():
                value.requires_grad_(requires_grad)
        return self

    @contextlib.contextmanager
    def no_sync(self, *, gather_once: bool = False):
        """Inside the block, gradients of data-parallel training are accumulated locally. They are synchronized when
        the block ends. gather_once: see `thunder.distributed.no_sync`."""
        from thunder.distributed import no_sync

        with no_sync(self, gather_once=gather_once):
            yield

    # --- copies keep module, options and overrides, and drop programs
    def __deepcopy__(self, memo):
        overrides = copy.deepcopy(self._compiled.overrides, memo)
        copied = _restored(copy.deepcopy(self._model, memo), self._compiled.options, overrides)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self._own(), memo))
        return copied

    def __reduce__(self):
        return _restored, (self._model, self._compiled.options, self._compiled.overrides), self._own()

    def _own(self) -> dict[str, Any]:
        """The wrapper's own attributes: hooks, and methods that were replaced."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}


def _restored(model: torch.nn.Module, options, overrides: tuple[dict, ...]) -> ThunderModule:
    """A compiled module with the overrides of another: transforms do not run again."""
    compiled = Compiled(model, options)
    for table, values in zip(compiled.overrides, overrides, strict=True):
        table.update(values)
    return ThunderModule(model, compiled)


def _overridden(
    overrides: dict, own: Iterator, prefix: str, recurse: bool, remove_duplicate: bool
) -> Iterator[tuple[str, Any]]:
    """Names and values of a module's parameters or buffers, with overrides in the place of its own."""
    if not overrides:
        yield from own
        return
    seen: set[int] = set()
    prefix = prefix + "." if prefix else ""
    first = [(prefix + name, value) for name, value in overrides.items() if recurse or "." not in name]
    for name, value in (*first, *((n, v) for n, v in own if n.removeprefix(prefix) not in overrides)):
        if not (remove_duplicate and id(value) in seen):
            seen.add(id(value))
            yield name, value


def _placement_on_a_mesh(value: Any) -> Placement | None:
    """The placement of a parameter that is a DTensor."""
    return placement_of(value) if isinstance(value, torch.Tensor) and is_dtensor(value) else None


def _key_problems(unexpected: list[str], missing: list[str]) -> list[str]:
    problems = []
    for keys, what in ((unexpected, "Unexpected key(s)"), (missing, "Missing key(s)")):
        if keys:
            problems.append(f"{what} in state_dict: {', '.join(f'{k!r}'.replace(chr(39), chr(34)) for k in keys)}. ")
    return problems


def _size_problem(name: str, value: torch.Tensor, was: torch.Size) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {was}."
    )


def _raise(problems: list[str], module: ThunderModule) -> None:
    if problems:
        text = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module._model).__name__}:\n\t{text}")


def _load(table: dict[str, torch.Tensor], name: str, value: torch.Tensor, assign: bool) -> None:
    was = table[name]
    if assign:
        table[name] = torch.nn.Parameter(value, was.requires_grad) if isinstance(was, torch.nn.Parameter) else value
    else:
        with torch.no_grad():
            was.copy_(value)
