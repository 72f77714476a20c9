"""Random operations. PyTorch draws the numbers, one operation after the other, so that the same seed gives the same
numbers as eager."""

from __future__ import annotations

import contextlib
import inspect
import math

import torch
import torch.nn.functional as F

from thunder.core import dtypes
from thunder.core.dtypes import bool8
from thunder.core.proxies import AnyProxy, TensorProxy, like
from thunder.core.symbol import OpTags, Symbol, primitive, user_location
from thunder.errors import CaptureError
from thunder.ops import backward, ltorch
from thunder.ops.backward import gradient_of_first
from thunder.ops.families.creation import (
    _factory_arguments,
    _like_arguments,
    _options,
    _result,
    _shape_of,
    _torch_kwargs,
    default_device,
)
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.functionalize.overlap import check_overlap
from thunder.ops.promotion import broadcast_shapes, default_dtype, to_float
from thunder.ops.registry import LTORCH, alias, composite, prim, torch_prim
from thunder.ops.rules import effects
from thunder.ops.shape_rules import is_empty
from thunder.ops.signature import named
from thunder.ops.torch_types import to_torch_device

# an unused draw still advances the generator: it is never dropped
_TAGS = (OpTags.RANDOM_OP, OpTags.DONT_DCE)


def _factory(name: str) -> Symbol:
    return torch_prim(getattr(torch, name), name=name, canonicalize=_factory_arguments, tags=_TAGS)(
        lambda shape, *, device, dtype, generator=None: _result(shape, device, dtype)
    )


rand, randn = _factory("rand"), _factory("randn")


def _drawn_like_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Numbers are drawn in the order of memory, so that the layout is part of the draw."""
    layout = kwargs.get("memory_format")
    args, kwargs = _like_arguments(args, kwargs)
    return args, kwargs if layout in (None, torch.preserve_format) else {**kwargs, "memory_format": layout}


def _like_factory(name: str) -> Symbol:
    return torch_prim(
        getattr(torch, name), name=name, canonicalize=_drawn_like_arguments, tags=(*_TAGS, OpTags.DETACHED)
    )(lambda a, *, device, dtype, generator=None, memory_format=None: like(a, device=device, dtype=dtype))


rand_like, randn_like = _like_factory("rand_like"), _like_factory("randn_like")


def _randint_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    order = ("low", "high", "size")
    if "low" not in kwargs and len(args) + len(kwargs.keys() & set(order)) < 3:
        order = ("high", "size", "low")
    arguments, kwargs = named(args, kwargs, *order)
    return (arguments.get("low", 0), arguments["high"], _shape_of((arguments["size"],))), _options(kwargs, dtypes.int64)


@torch_prim(torch.randint, canonicalize=_randint_arguments, tags=_TAGS)
def randint(low, high, size, /, *, device, dtype, generator=None):  # whose first argument may be left out
    return _result(size, device, dtype)


def _randint_like_arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    a, *bounds = args
    low, high = bounds if len(bounds) == 2 else (kwargs.pop("low", 0), bounds[0] if bounds else kwargs.pop("high"))
    kwargs = {k: v for k, v in kwargs.items() if v is not torch.preserve_format}
    return (a, low, high), _options(kwargs, a.dtype, a.device)


@torch_prim(torch.randint_like, canonicalize=_randint_like_arguments, tags=(*_TAGS, OpTags.DETACHED))
def randint_like(a, low, high, *, device, dtype, generator=None):
    return like(a, device=device, dtype=dtype)


@torch_prim(torch.randperm, canonicalize=lambda args, kwargs: (args, _options(dict(kwargs), dtypes.int64)), tags=_TAGS)
def randperm(n, *, device, dtype, generator=None):
    return _result((n,), device, dtype)


def _normal_meta(mean, std=1.0, size=None, *, generator=None, **options):
    tensors = [x for x in (mean, std) if type(x) is TensorProxy]
    if tensors:
        return like(tensors[0], broadcast_shapes(*(t.shape for t in tensors)))
    return _result(size, default_device(options.get("device")), options.get("dtype") or default_dtype())


normal = torch_prim(torch.normal, name="normal", tags=_TAGS)(_normal_meta)


@torch_prim(torch.bernoulli, torch.Tensor.bernoulli, tags=_TAGS)
def bernoulli(a, p=None, *, generator=None):
    return like(a)


@torch_prim(torch.multinomial, torch.Tensor.multinomial, tags=_TAGS)
def multinomial(a, num_samples, replacement=False, *, generator=None):
    return like(a, (*a.shape[:-1], num_samples), dtypes.int64)


@torch_prim(torch.poisson, tags=_TAGS)
def poisson(a, generator=None):
    return like(a)


@torch_prim(torch.binomial, tags=_TAGS)
def binomial(count, prob, generator=None):
    return like(count, broadcast_shapes(count.shape, prob.shape))


# --- in-place fills of temporaries: the functional form draws for a tensor of the same metadata


def _fill(name: str) -> None:
    """Defines the operation of an in-place distribution (`normal_`, `exponential_`): a new tensor that is filled."""
    function = getattr(torch.Tensor, name)

    def run(a, *args, **kwargs):
        return function(torch.empty_like(a), *args, **kwargs)

    symbol = torch_prim(name=name.rstrip("_") + "_fill", fn=run, tags=_TAGS)(lambda a, *args, **kwargs: like(a))

    @symbol.vjp
    def _(a, *args, **kwargs):
        """What was there before has no part in it: its gradient is zero, as PyTorch's is."""
        g = yield symbol(a, *args, **kwargs)
        return (ltorch.zeros_like(g), *(None for _ in args))

    def method(a, *args, **kwargs):
        check_overlap(function, a, (a, *args), kwargs)
        return overwrite(a, symbol(a, *args, **kwargs))

    method.__name__ = name
    alias(function)(method)


for _name in ("uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "bernoulli_"):
    _fill(_name)


@torch_prim(
    fn=lambda shape, minval=0.0, maxval=1.0, *, device, dtype: torch.empty(
        shape, **_torch_kwargs(device, dtype)
    ).uniform_(minval, maxval),
    tags=_TAGS,
)
def uniform(shape, minval=0.0, maxval=1.0, *, device, dtype):
    """Numbers from [minval, maxval), drawn as PyTorch's generator does."""
    return _result(shape, device, dtype)


@composite()
def uniform_like(a, minval=0.0, maxval=1.0, *, device=None, dtype=None):
    """`uniform` of a tensor's shape, and of its device and dtype where none is said."""
    return uniform(a.shape, minval, maxval, device=device or a.device, dtype=dtype or a.dtype)


def _philox(shape: tuple, seed: int | torch.Tensor, offset: int, device) -> torch.Tensor:
    """One 32-bit number for each place: Philox 4x32 of ten rounds (Salmon et al., Parallel Random Numbers: As Easy as
    1, 2, 3), counter (offset, 0, place, 0).

    seed: a number, or an int64 tensor of one.
    """
    low = 0xFFFFFFFF
    positions = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    c = [
        torch.full_like(positions, offset & low),
        torch.full_like(positions, offset >> 32 & low),
        positions & low,
        positions >> 32,
    ]
    keys = [seed & low, seed >> 32 & low]

    def product(x, factor: int):
        """The high and the low half, by halves that do not overflow."""
        a, b = x * (factor & 0xFFFF), x * (factor >> 16)
        whole = (a >> 16) + b
        return (whole >> 16) & low, ((whole & 0xFFFF) << 16 | (a & 0xFFFF)) & low

    for _ in range(10):
        (high0, low0), (high1, low1) = product(c[0], 0xD2511F53), product(c[2], 0xCD9E8D57)
        c = [high1 ^ c[1] ^ keys[0], low1, high0 ^ c[3] ^ keys[1], low0]
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    return c[0].reshape(shape)


def _run_uniform_philox(shape, minval=0.0, maxval=1.0, *, device, dtype, seed, offset):
    kwargs = _torch_kwargs(device, dtype)
    # as many bits as float32 holds
    draws = (
        _philox(tuple(shape), seed if isinstance(seed, torch.Tensor) else int(seed), int(offset), kwargs["device"]) >> 8
    )
    return (draws.to(torch.float64) * 2.0**-24 * (maxval - minval) + minval).to(kwargs["dtype"])


@torch_prim(fn=_run_uniform_philox)
def uniform_philox(shape, minval=0.0, maxval=1.0, *, device, dtype, seed, offset):
    """Numbers from [minval, maxval) that seed and offset decide, on every device: no generator is read or moved."""
    return _result(shape, device, dtype)


@composite()
def exponential(a, rate=1, *, generator=None):
    """Numbers of the exponential distribution, in the shape of `a`."""
    return ltorch.exponential_fill(a, rate, **({} if generator is None else {"generator": generator}))


# --- dropout


def _dropout_meta(a, p=0.5, training=True):
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return like(a)


def _dropout(name: str, *functions) -> None:
    """A member of the dropout family: draws when training, is its argument otherwise."""
    symbol = torch_prim(name=name, fn=functions[0], tags=_TAGS)(_dropout_meta)
    usually = inspect.signature(functions[0]).parameters["training"].default  # not the same for all of them

    def call(a, p=0.5, training=usually, inplace=False):
        if not training or p == 0.0:  # PyTorch gives back its argument
            _dropout_meta(a, p)
            return (
                ltorch.squeeze(ltorch.unsqueeze(a, 0), 0)
                if name == "dropout3d" and len(a.shape) == 4 and not inplace
                else a
            )
        if not inplace:
            return symbol(a, p, True)
        check_overlap(functions[0], a, (a, p), {"inplace": True})
        return overwrite(a, symbol(a, p, True))

    call.__name__ = name
    alias(*functions)(call)


for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
    _functions = [f for f in (getattr(F, _name, None),) if f is not None]
    _dropout(_name, *_functions)


dropout = ltorch.dropout


def _native_dropout(name: str) -> None:
    """`torch.dropout(x, p, train)` and `torch.dropout_`: members of the family under their native names."""
    symbol = LTORCH.get(name) or torch_prim(name=name, fn=getattr(torch, name), tags=_TAGS)(
        lambda a, p, train: _dropout_meta(a, p, train)
    )

    def call(input, p, train):
        _dropout_meta(input, p)
        return symbol(input, p, True) if train and p != 0.0 else input

    def overwriting_call(input, p, train):
        check_overlap(function, input, (input, p, train), {})
        return overwrite(input, call(input, p, train))

    function = getattr(torch, f"{name}_")
    alias(getattr(torch, name))(call)
    alias(function)(overwriting_call)


for _name in ("dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout"):
    _native_dropout(_name)


# ----------------------------------------------------------------------------------------------------------------
# derivative


def _native_dropout_meta(a, p, train):
    _dropout_meta(a, p)
    return like(a), like(a, dtype=bool8)


native_dropout = backward.kernel(
    "native_dropout", "default", _native_dropout_meta, (OpTags.RANDOM_OP, OpTags.DONT_DCE), public="native_dropout"
)
native_dropout_backward = backward.kernel(
    "native_dropout_backward", "default", lambda g, mask, scale: like(g, dtype=to_float(g.dtype)),
    public="native_dropout_backward",
)  # fmt: skip


@native_dropout.vjp
def _(a, p, train):
    y, mask = native_dropout(a, p, train)
    g, _ = yield y, mask
    scale = 1.0 if train is False else 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return (native_dropout_backward(g, mask, scale),)


@native_dropout_backward.decomposed_by
def _(g, mask, scale):
    return ltorch.mul(ltorch.mul(g, mask), scale)


gradient_of_first(native_dropout_backward, lambda again, y, g, mask, scale: native_dropout_backward(again, mask, scale))


# 0 where an element is dropped, 1 / (1 - p) elsewhere: what PyTorch's dropout multiplies with
@primitive(lambda a, p: like(a), tags=(*_TAGS, OpTags.DETACHED))
def dropout_noise(a, p):
    # PyTorch draws for complex numbers from 2.15 on, for both parts at once
    noise = torch.empty_like(a, dtype=a.real.dtype if a.is_complex() else None)
    return noise.bernoulli_(1 - p).div_(1 - p).to(a.dtype)


@dropout.vjp
def _(a, p=0.5, training=True):
    """As `dropout` does: a fused kernel on accelerators, noise and a product elsewhere; the same numbers are drawn."""
    if p == 1.0 or is_empty(a):
        return NotImplemented
    if a.device.type == "cuda":
        y, mask = native_dropout(a, p, True)
        g = yield y
        return (native_dropout_backward(g, mask, 1.0 / (1.0 - p)),)
    noise = dropout_noise(a, p)
    g = yield ltorch.mul(a, noise)
    return (ltorch.mul(g, noise),)


# ---------------------------------------------------------------------------------------------------------------- the
# state of a generator

STATE_BYTES = torch.default_generator.get_state().numel()


@torch_prim(name="manual_seed", fn=torch.random.manual_seed, tags=_TAGS)
def seeded(seed):
    return None


@alias(torch.random.manual_seed)
def manual_seed(seed):
    """The default generators of all devices start again."""
    seeded(seed)
    return torch.default_generator


def _state() -> TensorProxy:
    return TensorProxy(shape=(STATE_BYTES,), device=default_device("cpu"), dtype=dtypes.uint8)


@torch_prim(torch.get_rng_state, name="get_default_rng_state", tags=_TAGS)
def get_default_rng_state():
    return _state()


@torch_prim(torch.set_rng_state, name="set_default_rng_state", tags=_TAGS)
def set_default_rng_state(new_state):
    return None


@torch_prim(name="generator_manual_seed", fn=torch.Generator.manual_seed, tags=_TAGS)
def _generator_seeded(generator, seed):
    return None


@alias(torch.Generator.manual_seed)
def generator_manual_seed(generator, seed):
    _generator_seeded(generator, seed)
    return generator


@torch_prim(name="generator_get_state", fn=torch.Generator.get_state, tags=_TAGS)
def _generator_state(generator):
    return _state()


@alias(torch.Generator.get_state)
def generator_get_state(generator):
    if generator.device.type != "cpu":
        raise CaptureError(
            f"the state of a generator of {generator.device} is read",
            location=user_location(),
            remedy="read it outside of the compiled function",
        )
    return _generator_state(generator)


@torch_prim(name="generator_set_state", fn=torch.Generator.set_state, tags=_TAGS)
def _generator_set(generator, new_state):
    return None


@alias(torch.Generator.set_state)
def generator_set_state(generator, new_state):
    _generator_set(generator, new_state)
    return generator


def _unknown_seed(function) -> None:
    def refuse(*args, **kwargs):
        raise CaptureError(
            f"{function.__name__}() gives a number that differs from call to call",
            location=user_location(),
            remedy="call it outside of the compiled function",
        )

    alias(function)(refuse)


for _function in (torch.seed, torch.initial_seed, torch.Generator.seed, torch.Generator.initial_seed):
    _unknown_seed(_function)


def _of_devices(what: str):
    def refuse(*args, **kwargs):
        raise CaptureError(
            f"{what} asks for generators of devices inside of it",
            location=user_location(),
            remedy="call it outside of the compiled function",
        )

    return refuse


for _name in (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "initial_seed",
    "get_rng_state",
    "get_rng_state_all",
    "set_rng_state",
    "set_rng_state_all",
):
    alias(getattr(torch.cuda, _name))(_of_devices(f"torch.cuda.{_name}"))


class Forked:
    """`torch.random.fork_rng` for the CPU's generator: after the block it goes on where it was before."""

    def __enter__(self):
        self.state = get_default_rng_state()

    def __exit__(self, *error):
        set_default_rng_state(self.state)


def fork_rng(devices=None, enabled=True, **options):
    """What `torch.random.fork_rng` means in a program. Raises CaptureError for generators of devices."""
    if enabled and (devices or devices is None and torch.cuda.is_available()):
        _of_devices("torch.random.fork_rng")()
    return Forked() if enabled else contextlib.nullcontext()


effects.holds_generator.add(
    seeded, get_default_rng_state, set_default_rng_state, _generator_seeded, _generator_state, _generator_set,
)  # fmt: skip


def generator_of(device: torch.device, generator: torch.Generator | None = None) -> torch.Generator:
    """The generator that an operation draws from: the one it was given, or the device's default."""
    if generator is not None:
        return generator
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[device.index if device.index is not None else module.current_device()]


@prim(
    lambda device, generator=None: generator_of(to_torch_device(device), generator).get_state(), tags=(OpTags.DONT_DCE,)
)
def get_rng_state(device, generator=None):
    return AnyProxy("")


@prim(
    lambda state, device, generator=None: generator_of(to_torch_device(device), generator).set_state(state) and None,
    tags=(OpTags.DONT_DCE,),
)
def set_rng_state(state, device, generator=None):
    return None


@prim(lambda device: torch.Generator(to_torch_device(device)), tags=_TAGS)
def new_generator(device):
    """A generator in its first state, which is the same one in each call."""
    return AnyProxy("")


effects.holds_generator.add(new_generator)
effects.synchronises.add(ltorch.multinomial, ltorch.poisson)
