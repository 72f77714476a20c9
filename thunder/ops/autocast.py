"""Autocast: what torch.autocast does to the arguments of an operation, written out as casts.

Each operation says beside its definition what autocast does to it (`autocast=`): one word for all devices, or a word
for each kind that has one: "lower", "cuda:float32", "cpu:lower cuda:widest". The words are PyTorch's policies
(aten/src/ATen/autocast_mode.h); its lists for CPU and CUDA differ.

lower: floating-point tensors become the autocast dtype. float32: they become float32, unless the call names a dtype.
widest: they become the widest type among them. banned: the call is refused. Tensors of float64, of integers and on
other devices stay as they are.

A parameter in float32 is cast once for all operations that want it lowered, where eager's cache of casts has it; what
requires grad is cast again for each use elsewhere, so that gradients are added up in the type they are added up in
there. A function of PyTorch without a definition here is run under autocast as it is (`thunder.ops.opaque`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from thunder import compat
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, map_structure, proxies_in
from thunder.core.rule_table import RuleTable
from thunder.core.symbol import Recorder, Symbol, current_recorder
from thunder.ops import ltorch

when: RuleTable[Callable[[str, tuple, dict], bool] | None] = RuleTable(None)
"""(kind of device, args, kwargs): whether autocast casts the arguments; without it, always."""

WORDS = ("lower", "float32", "widest", "banned")


@lru_cache(maxsize=256)
def kinds_of(words: str) -> dict[str, str]:
    """What `autocast=` says, as {device kind: policy}."""
    if ":" not in words:
        assert words in WORDS, f"autocast is one of {', '.join(WORDS)}, not {words!r}"
        return {"cpu": words, "cuda": words}
    kinds = dict(part.split(":") for part in words.split())
    assert all(w in WORDS for w in kinds.values()), f"autocast is made of {', '.join(WORDS)}, not {words!r}"
    return kinds


class Policy:
    """What torch.autocast in one state does: called with an operation and its arguments, gives the arguments to record.
    The casts are recorded before it.

    state: (((device kind, torch dtype), ...), whether eager's cache of casts is on).
    """

    __slots__ = ("state", "targets")

    def __init__(self, state: tuple):
        self.state = state
        self.targets = {kind: dtypes.to_dtype(lower) for kind, lower in state[0]}

    def __call__(self, symbol: Symbol, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        words = kinds_of(symbol.autocast)  # type: ignore[arg-type]
        for kind, lower in self.targets.items():
            word = words.get(kind)
            if word is None:
                continue
            tensors = [t for t in proxies_in(kwargs, proxies_in(args, [])) if _eligible(t, kind)]
            if not tensors or ((cast := when.of(symbol)) is not None and not cast(kind, args, kwargs)):
                continue
            if word == "banned":
                raise RuntimeError(
                    f"{symbol.name} is unsafe to autocast: use its variant that takes logits, or disable autocast "
                    "around it"
                )
            target = lower if word == "lower" else dtypes.float32 if word == "float32" else _widest(tensors, lower)
            if word == "float32" and kwargs.get("dtype") is not None:
                continue
            if all(t.dtype is target for t in tensors):
                continue
            cast = _Casts(kind, target, cached=self.state[1] and target is lower)
            args, kwargs = map_structure(cast, args), map_structure(cast, kwargs)
        return args, kwargs


class _Casts:
    """The casts of one call's arguments to a dtype."""

    __slots__ = ("kind", "target", "cached", "recorder", "done")

    def __init__(self, kind: str, target, cached: bool):
        self.kind, self.target, self.cached = kind, target, cached
        self.recorder: Recorder = current_recorder()  # type: ignore[assignment]
        self.done: dict = {}

    def __call__(self, x):
        if not _eligible(x, self.kind) or x.dtype is self.target:
            return x
        context, memory = self.recorder.context, self.recorder.memory
        held = x if memory is None else memory.holder(x)  # eager's knows no writes to a leaf
        if (
            self.cached
            and x.requires_grad
            and x.dtype is dtypes.float32
            and self.recorder.is_leaf is not None
            and self.recorder.is_leaf(held)
        ):
            # eager's knows no dtype, either
            mode = context.grad_enabled if compat.casts_keep_grad_mode() else None
            done, key = self.recorder.casts, (held, mode, context.checkpoint)
        elif x.requires_grad and context.grad_enabled:
            return ltorch.to(x, dtype=self.target)
        else:
            done, key = self.done, x
        if key not in done:
            done[key] = ltorch.to(x, dtype=self.target)
        return done[key]


def _eligible(x, kind: str) -> bool:
    return type(x) is TensorProxy and x.device.type == kind and x.dtype.category == 2 and x.dtype is not dtypes.float64


def _widest(tensors: list[TensorProxy], lower):
    """As at::autocast::prioritize: float32 where one is met before what is neither that nor the autocast dtype."""
    for t in tensors:
        if t.dtype is dtypes.float32:
            return t.dtype
        if t.dtype is not lower:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


@lru_cache(maxsize=64)
def policy(kinds: tuple, cached: bool = True) -> Policy:
    """The policy for an autocast state: ((device kind, torch dtype), ...), one entry for each kind that autocast is on
    for, and whether its cache of casts is on."""
    return Policy((kinds, cached))
