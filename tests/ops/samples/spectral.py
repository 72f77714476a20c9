"""Arguments that tests call the operations of `thunder/ops/spectral.py` with."""

from __future__ import annotations

import torch

from thunder.ops.spectral import istft, stft


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
