"""Fourier transforms. The transforms of one, two and n dimensions are made of three kernels of PyTorch's, complex to
complex, real to complex and complex to real.

A derivative is the adjoint of the kernel, for real and for complex numbers: a transform in the other direction with the
same scale.
"""

from __future__ import annotations

import torch

from thunder import compat
from thunder.core.dtypes import complex_of, real_of
from thunder.core.proxies import like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops import ltorch
from thunder.ops.backward import gradient_of_first, kernel
from thunder.ops.families.data import convert
from thunder.ops.promotion import to_float
from thunder.ops.registry import composite, torch_prim
from thunder.ops.rules import derivatives, effects
from thunder.ops.shape_rules import require, wrap_dim

# ----------------------------------------------------------------------------------------------------------------
# kernels


def _replaced(shape: tuple, dims, sizes) -> tuple:
    out = list(shape)
    for d, n in zip(dims, sizes, strict=True):
        out[d] = n
    return tuple(out)


def resized(a, dims: tuple, sizes: tuple):
    """With other sizes of some dimensions: cut at their end, or followed by zeros."""
    pads = [0] * (2 * len(a.shape))
    for d, n in zip(dims, sizes, strict=True):
        if n < a.shape[d]:
            a = ltorch.narrow(a, d, 0, n)
        pads[2 * (len(a.shape) - 1 - d) + 1] = n - a.shape[d]
    return ltorch.pad(a, pads) if any(pads) else a


conjugate = kernel("_conj", "default", lambda a: like(a), tags=(OpTags.VIEW,))
c2c = kernel("_fft_c2c", "default", lambda a, dims, scale, forward: like(a))


def _halved(a, dims, onesided: bool) -> tuple:
    return _replaced(a.shape, dims[-1:], (a.shape[dims[-1]] // 2 + 1,)) if onesided else a.shape


r2c = kernel(
    "_fft_r2c", "default", lambda a, dims, scale, onesided: like(a, _halved(a, dims, onesided), complex_of(a.dtype))
)
c2r = kernel(
    "_fft_c2r",
    "default",
    lambda a, dims, scale, last: like(a, _replaced(a.shape, dims[-1:], (last,)), real_of(a.dtype)),
)


gradient_of_first(conjugate, lambda g, y, a: conjugate(g))


gradient_of_first(c2c, lambda g, y, a, dims, scale, forward: c2c(g, dims, scale, not forward))


@r2c.vjp
def _(a, dims, scale, onesided):
    """The half that is not computed has no cotangent of its own."""
    g = yield r2c(a, dims, scale, onesided)
    if g.shape != a.shape:
        g = resized(g, dims[-1:], (a.shape[dims[-1]],))
    return (ltorch.real(c2c(g, dims, scale, False)),)


def _run_c2r_adjoint(g, dims, scale):
    """Each number between the first and the middle stands for two: itself and its conjugate in the other half."""
    out = compat.kernel("_fft_r2c")(g, dims, scale, True)
    twice = g.shape[dims[-1]] - out.shape[dims[-1]]
    if twice > 0:
        out.narrow(dims[-1], 1, twice).mul_(2)
    return out


c2r_adjoint = Symbol(
    "fft_c2r_adjoint",
    lambda g, dims, scale: like(g, _halved(g, dims, True), complex_of(g.dtype)),
    id="fft_c2r_adjoint",
    is_prim=True,
    fn=_run_c2r_adjoint,
)


gradient_of_first(c2r, lambda g, y, a, dims, scale, last: c2r_adjoint(g, dims, scale))


# ----------------------------------------------------------------------------------------------------------------
# transforms
# how the kernels scale: not, by one over the root of the number of values, by one over that number
UNSCALED, ROOT, WHOLE = range(3)


def _scale(norm: str | None, forward: bool) -> int:
    require(norm in (None, "backward", "forward", "ortho"))
    return ROOT if norm == "ortho" else WHOLE if (norm == "forward") == forward else UNSCALED


def _places(a, s, dim) -> tuple[tuple, list]:
    """(dimensions, sizes or None where they stay) that a transform of several dimensions is over."""
    rank = len(a.shape)
    s, dim = ((x,) if isinstance(x, int) else x for x in (s, dim))
    require(dim is None or s is None or len(dim) == len(s))
    require(dim is not None or s is None or len(s) <= rank)
    dims = (
        tuple(range(rank - len(s), rank) if s is not None else range(rank))
        if dim is None
        else tuple(wrap_dim(d, rank) for d in dim)
    )
    require(len(set(dims)) == len(dims))
    return dims, [None] * len(dims) if s is None else [None if m is None or m == -1 else m for m in s]


class Row:
    """One transform. kind: the kernel that it ends in, or begins with. suffix: "" for one dimension, "2" for the last
    two, "n" for any."""

    __slots__ = ("name", "kind", "forward", "suffix")

    def __init__(self, name: str, kind: str, forward: bool, suffix: str):
        self.name, self.kind, self.forward, self.suffix = f"{name}{suffix}", kind, forward, suffix

    def places(self, a, s, dim) -> tuple[tuple, list]:
        """(dimensions, sizes) that it is over: of the numbers that it computes or, where its result is one half,
        reads."""
        require(self.kind != "r2c" or a.dtype.category != 3)
        require(a.device.type != "cpu" or a.dtype.category < 2 or real_of(a.dtype).bytes >= 4)
        dims, sizes = _places(a, s, dim) if self.suffix else ((wrap_dim(dim, len(a.shape)),), [s])
        require(dims or self.kind == "c2c")
        whole = [a.shape[d] if n is None else n for d, n in zip(dims, sizes, strict=True)]
        if self.kind == "c2r" and sizes[-1] is None:
            whole[-1] = 2 * (whole[-1] - 1)
        for n in whole:
            require(n >= 1)
        return dims, whole

    def meta(self, a, s, dim, norm):
        dims, whole = self.places(a, s, dim)
        _scale(norm, self.forward)
        dtype = to_float(a.dtype)
        return like(
            a,
            _replaced(a.shape, dims, _half(whole) if self.kind == "r2c" else whole),
            real_of(complex_of(dtype)) if self.kind == "c2r" else complex_of(dtype),
        )

    def decomposition(self, a, s, dim, norm):
        """The parts that PyTorch computes it of (ATen/native/SpectralOps.cpp)."""
        dims, whole = self.places(a, s, dim)
        x = convert(a, to_float(a.dtype))
        x = x if self.kind == "r2c" or (not self.suffix and self.kind == "c2c") else convert(x, complex_of(x.dtype))
        read = _half(whole) if self.kind == "c2r" else whole
        if any(x.shape[d] is not n and x.shape[d] != n for d, n in zip(dims, read, strict=True)):
            x = resized(x, dims, tuple(read))
        scale = _scale(norm, self.forward)
        if self.kind == "c2r":
            return self._to_real(x, dims, scale, whole[-1])
        return (
            c2c(x, dims, scale, self.forward)
            if x.dtype.category == 3
            else self._of_real(x, dims, scale, self.kind == "r2c")
        )

    def _to_real(self, x, dims: tuple, scale: int, last):
        if not self.forward:
            return c2r(x, dims, scale, last)
        x = c2c(x, dims[:-1], scale, True) if len(dims) > 1 else x
        return c2r(conjugate(x), dims[-1:], scale, last)

    def _of_real(self, x, dims: tuple, scale: int, onesided: bool):
        if self.forward:
            return r2c(x, dims, scale, onesided)
        y = conjugate(r2c(x, dims[-1:], scale, onesided))
        return c2c(y, dims[:-1], scale, False) if len(dims) > 1 else y


def _half(sizes: list) -> list:
    return sizes[:-1] + [sizes[-1] // 2 + 1]


def _transform(row: Row) -> Symbol:
    """Defines one Fourier transform of `torch.fft`, with its derivative and its form under vmap."""
    several = bool(row.suffix)

    def signature(rule):
        """The rule with PyTorch's names of the arguments."""
        if not several:
            return lambda a, n=None, dim=-1, norm=None: rule(a, n, dim, norm)
        default = (-2, -1) if row.suffix == "2" else None
        return lambda a, s=None, dim=default, norm=None: rule(a, s, dim, norm)

    define = composite(
        getattr(torch.fft, row.name),
        name=f"fft_{row.name}",
        meta=signature(row.meta),
        autocast=None if row.name in UNLISTED else "cpu:float32",
    )
    symbol = define(signature(row.decomposition))
    derivatives.composed.set(True, symbol)

    return symbol


UNLISTED = {"hfft2", "hfftn", "ihfft2", "ihfftn"}  # what autocast's list leaves out
for _name, _kind, _forward in [
    ("fft", "c2c", True), ("ifft", "c2c", False), ("rfft", "r2c", True), ("irfft", "c2r", False), ("hfft", "c2r", True),
        ("ihfft", "r2c", False),
]:  # fmt: skip
    for _suffix in ("", "2", "n"):
        _transform(Row(_name, _kind, _forward, _suffix))


def _shift(name: str, halved) -> None:
    """The zero frequency in the middle, or back at the start."""

    def shifted(a, dim=None):
        dims = tuple(range(len(a.shape))) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
        return (
            ltorch.roll(a, tuple(halved(a.shape[wrap_dim(d, len(a.shape))]) for d in dims), tuple(dims))
            if dims
            else ltorch.clone(a)
        )

    symbol = composite(getattr(torch.fft, name), name=f"fft_{name}")(shifted)
    derivatives.composed.set(True, symbol)


_shift("fftshift", lambda n: n // 2)
_shift("ifftshift", lambda n: (n + 1) // 2)


# ---------------------------------------------------------------------------------------------------------------- short
# times


def _frames(n_fft, hop_length, win_length, window) -> tuple:
    """(hop, window length) of a transform of overlapping frames of `n_fft` values."""
    hop, length = n_fft // 4 if hop_length is None else hop_length, n_fft if win_length is None else win_length
    require(hop > 0 and 0 < length <= n_fft and (window is None or window.shape == (length,)))
    return hop, length


@composite(torch.stft, torch.Tensor.stft, autocast="cpu:float32")
def stft(
    a, n_fft, hop_length=None, win_length=None, window=None, center=True, pad_mode="reflect", normalized=False,
    onesided=None, return_complex=None,
    align_to_window=None,
):  # fmt: skip
    """The transforms of frames of `n_fft` values, each multiplied by the window: (..., frequencies, frames)."""
    complex_in = a.dtype.category == 3 or (window is not None and window.dtype.category == 3)
    require(a.dtype.category >= 2 and len(a.shape) in (1, 2) and (return_complex is not None or complex_in))
    require((not center or align_to_window is None) and (not onesided or not complex_in))
    hop, length = _frames(n_fft, hop_length, win_length, window)
    pad, view = ltorch.pad, ltorch.view
    edge = n_fft // 2 if center else (n_fft - length) // 2 if align_to_window else 0
    x = view(a, (1,) * (3 - len(a.shape)) + a.shape)
    x = pad(x, [edge, edge], pad_mode if center else "constant") if edge else x
    x = view(x, (x.shape if len(a.shape) == 2 else x.shape[1:])[-2:])
    if length < n_fft:
        left = (n_fft - length) // 2
        window = ltorch.ones(length, dtype=a.dtype, device=a.device) if window is None else window
        window = pad(window, [left, n_fft - length - left])
    x = ltorch.unfold(x, -1, n_fft, hop)
    x = x if window is None else x * window
    scale = ROOT if normalized else UNSCALED
    y = c2c(x, (2,), scale, True) if x.dtype.category == 3 else r2c(x, (2,), scale, onesided is not False)
    y = ltorch.transpose(y, 1, 2)
    y = y if len(a.shape) == 2 else ltorch.squeeze(y, 0)
    return y if return_complex is not False else ltorch.view_as_real(y)


derivatives.composed.set(True, stft)


@torch_prim(torch.istft, torch.Tensor.istft)
def istft(
    a,
    n_fft,
    hop_length=None,
    win_length=None,
    window=None,
    center=True,
    normalized=False,
    onesided=None,
    length=None,
    return_complex=False,
):
    """The signal whose `stft` is given, the frames added where they overlap. PyTorch refuses windows that leave a place
    without weight when it runs."""
    hop, _ = _frames(n_fft, hop_length, win_length, window)
    require(a.dtype.category == 3 and len(a.shape) in (2, 3) and a.shape[-1] and (not onesided or not return_complex))
    onesided = a.shape[-2] != n_fft if onesided is None else onesided
    require(a.shape[-2] == (n_fft // 2 + 1 if onesided else n_fft))
    start, count = n_fft // 2 if center else 0, n_fft + hop * (a.shape[-1] - 1)
    if length is None:
        length = count - 2 * start
    require(length > 0)
    return like(a, (*a.shape[:-2], length), a.dtype if return_complex else real_of(a.dtype))


effects.may_raise.add(istft)  # windows whose overlaps add up to zero
