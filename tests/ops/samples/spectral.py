"""Arguments that tests call the operations of `thunder/ops/families/spectral.py` with."""

from __future__ import annotations

import torch

from thunder.ops import LTORCH
from thunder.ops.families.spectral import istft, stft


@stft.samples
def _(make):
    yield (make(2, 40), 16), {"window": make(16), "return_complex": True}
    yield (make(40), 16, 4, 10, make(10)), {"return_complex": True, "normalized": True, "onesided": False}
    yield (make(2, 40), 16, 5, 10, make(10), False), {"return_complex": True, "align_to_window": True}


@stft.error_samples
def _(make):
    yield (make(2, 40), 16), {"window": make(16)}
    yield (make(2, 40), 16), {"window": make(12), "return_complex": True}
    yield (make(2, 4), 16), {"window": make(16), "return_complex": True, "center": False}


@istft.samples
def _(make):
    spectrum = torch.complex(make(2, 9, 6, dtype=torch.float64), make(2, 9, 6, dtype=torch.float64))
    yield (spectrum, 16, 4), {"window": make(16, dtype=torch.float64, low=1.0)}
    yield (spectrum[0], 16, 5, 12, make(12, dtype=torch.float64, low=1.0)), {"length": 30}
    yield (
        (torch.cat((spectrum, spectrum[:, 2:]), 1), 16, 4),
        {"return_complex": True, "center": False, "window": make(16, dtype=torch.float64, low=1.0)},
    )


@istft.error_samples
def _(make):
    yield (make(9, 6), 16), {}
    yield (torch.complex(make(8, 6), make(8, 6)), 16), {"onesided": True, "window": make(16)}


def _transform(name: str) -> None:
    symbol, several, of_real = LTORCH[f"fft_{name}"], name[-1] in "2n", name.startswith(("rfft", "ihfft"))

    @symbol.samples
    def _(make):
        for dtype in (None,) if of_real else (None, torch.complex128):
            x = (
                make(2, 4, 5)
                if dtype is None
                else torch.complex(make(2, 4, 5, dtype=torch.float64), make(2, 4, 5, dtype=torch.float64))
            )
            yield (x,)
            yield (x, (3, 6) if several else 7, (1, 0) if several else 1, "ortho")
            yield (x, None, (-1,) if several else 0, "forward")

    @symbol.error_samples
    def _(make):
        yield make(2, 3), None, (0, 2) if several else 2
        yield make(2, 3), None, (0, 1) if several else 0, "half"
        yield make(2, 3), (0, 1) if several else 0


def _shift(name: str) -> None:
    symbol = LTORCH[f"fft_{name}"]

    @symbol.samples
    def _(make):
        yield (make(3, 4),)
        yield make(3, 4), 1
        yield make(3, 4), (0, -1)

    @symbol.error_samples
    def _(make):
        yield make(3, 4), 2


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _suffix in ("", "2", "n"):
        _transform(_name + _suffix)
_shift("fftshift")
_shift("ifftshift")
