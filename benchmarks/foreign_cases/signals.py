"""Audio, time series and wavelets: models, layers and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign_cases.common import Applied, case, part, vectors


def waves(length: int, channels: int = 1) -> Any:
    return lambda b: (torch.randn(b, channels, length), torch.randn(b, channels, length))


# fmt: off
for _name, _options in {
    "STFTLoss": {"fft_size": 64, "hop_size": 16, "win_length": 64},
    "MultiResolutionSTFTLoss": {"fft_sizes": [64, 32], "hop_sizes": [16, 8], "win_lengths": [64, 32]},
    "SumAndDifferenceSTFTLoss": {"fft_sizes": [64, 32], "hop_sizes": [16, 8], "win_lengths": [64, 32]},
}.items():
    case("auraloss", _name, lambda m, n=_name, o=_options: Applied(nn.Conv1d(2, 2, 1), lambda f, x, y,
         loss=getattr(part(m, "freq"), n)(**o): loss(f(x), y)), waves(256, 2))
for _name in ("ESRLoss", "DCLoss", "LogCoshLoss", "SNRLoss", "SISDRLoss", "SDSDRLoss"):
    case("auraloss", _name, lambda m, n=_name: Applied(nn.Conv1d(1, 1, 1), lambda f, x, y,
         loss=getattr(part(m, "time"), n)(): loss(f(x), y)), waves(64))
for _name, _options in {"LowPassFilter": (0.1,), "HighPassFilter": (0.1,), "BandPassFilter": (0.1, 0.3),
                        "ResampleFrac": (4, 5), "SplitBands": (16000, 4)}.items():
    case("julius", _name, lambda m, n=_name, o=_options: nn.Sequential(nn.Conv1d(1, 1, 3), getattr(m, n)(*o)),
         vectors(1, 256))
case("julius", "FFTConv1d", lambda m: m.FFTConv1d(1, 2, 32), vectors(1, 256))
for _name, _options in {
    "ConvTasNet": {"n_blocks": 1, "n_repeats": 1, "bn_chan": 8, "hid_chan": 8, "skip_chan": 8, "n_filters": 16,
                   "kernel_size": 8},
    "DPRNNTasNet": {"n_repeats": 1, "bn_chan": 8, "hid_size": 8, "chunk_size": 8, "n_filters": 16, "kernel_size": 8},
    "SuDORMRFNet": {"bn_chan": 8, "num_blocks": 1, "upsampling_depth": 2, "n_filters": 16, "kernel_size": 9},
    "DPTNet": {"n_repeats": 1, "n_heads": 2, "ff_hid": 8, "chunk_size": 8, "n_filters": 16, "kernel_size": 8},
    "LSTMTasNet": {"rnn_type": "lstm", "n_layers": 1, "hid_size": 8, "n_filters": 16, "kernel_size": 8},
}.items():
    case("asteroid", _name, lambda m, n=_name, o=_options: getattr(part(m, "models"), n)(n_src=2, **o), vectors(1, 256))
for _name in ("pairwise_neg_sisdr", "singlesrc_neg_sisdr", "pit"):
    case("asteroid", _name, lambda m, n=_name: Applied(nn.Linear(32, 32), lambda f, x, y: _separation(m, n, f(x), y)),
         lambda b: (torch.randn(b, 2, 32), torch.randn(b, 2, 32)))


def _separation(m: Any, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = part(m, "losses")
    if name == "pit":
        return losses.PITLossWrapper(losses.pairwise_neg_sisdr, pit_from="pw_mtx")(x, y)
    return losses.pairwise_neg_sisdr(x, y) if name[0] == "p" else losses.singlesrc_neg_sisdr(x[:, 0], y[:, 0])


for _name in ("FreeFB", "STFTFB", "AnalyticFreeFB", "ParamSincFB", "TorchSTFTFB"):
    case("asteroid_filterbanks", _name, lambda m, n=_name: nn.Sequential(nn.Conv1d(1, 1, 3), m.Encoder(getattr(m, n)(
         n_filters=16, kernel_size=17 if n == "ParamSincFB" else 16, stride=8))), vectors(1, 128))
case("asteroid_filterbanks", "there and back", lambda m: nn.Sequential(*m.make_enc_dec("stft", n_filters=16,
     kernel_size=16, stride=8)), vectors(1, 128))
for _name, _options in {"STFT": {"n_fft": 64, "hop_length": 16}, "MelSpectrogram": {"n_fft": 64, "n_mels": 8,
                        "hop_length": 16}, "MFCC": {"n_mfcc": 4, "n_fft": 64, "n_mels": 8, "hop_length": 16},
                        "CQT1992v2": {"sr": 2000, "fmin": 220, "n_bins": 12, "hop_length": 32},
                        "Gammatonegram": {"n_fft": 64, "n_bins": 8, "hop_length": 16}}.items():
    case("nnAudio", _name, lambda m, n=_name, o=_options: Applied(nn.Conv1d(1, 1, 3), lambda f, x,
         layer=getattr(part(m, "features"), n)(**o, **({} if n in ("STFT", "CQT1992v2") else {"sr": 2000}),
         **({} if n == "MFCC" else {"verbose": False})): layer(f(x))), vectors(1, 512))
for _name in ("wavedec", "wavedec2", "cwt", "swt", "WaveletPacket"):
    case("ptwt", _name, lambda m, n=_name: Applied(nn.Linear(16, 16), lambda f, x: _wavelets(m, n, f(x))),
         vectors(16, 16))


def _wavelets(m: Any, name: str, x: torch.Tensor) -> Any:
    import pywt

    if name == "cwt":
        return m.cwt(x, torch.arange(1, 4), "mexh")[0]
    if name == "WaveletPacket":
        return m.WaveletPacket(x, "haar", maxlevel=2)["aa"]
    decomposed = getattr(m, name)(x, pywt.Wavelet("db2"), level=1 if name == "wavedec2" else 2)
    return [decomposed[0], decomposed[1]]


case("ptwt", "there and back", lambda m: Applied(nn.Linear(16, 16), lambda f, x: m.waverec(m.wavedec(f(x), "haar",
     level=2), "haar")), vectors(4, 16))
for _name in ("HTDemucs", "HDemucs", "Demucs"):
    case("demucs", _name, lambda m, n=_name: _separator(m, n), lambda b: (torch.randn(b, 2, 4096),))


def _separator(m: Any, name: str) -> nn.Module:
    if name == "HTDemucs":
        return part(m, "htdemucs").HTDemucs(["a", "b"], channels=8, depth=2, nfft=64, t_layers=1, t_heads=2,
            segment=0.1, t_dropout=0.0)
    if name == "HDemucs":
        return part(m, "hdemucs").HDemucs(["a", "b"], channels=8, depth=4, nfft=256, dconv_attn=3, dconv_lstm=3)
    return part(m, "demucs").Demucs(["a", "b"], channels=4, depth=2, lstm_layers=1, resample=False)


for _name in ("QuantileLoss", "SMAPE", "MAPE", "RMSE", "MAE", "PoissonLoss"):
    case("pytorch_forecasting", _name, lambda m, n=_name: Applied(nn.Linear(6, 7 if n == "QuantileLoss" else 1),
         lambda f, x, y: getattr(part(m, "metrics"), n)().loss(f(x), y.abs())), lambda b: (torch.randn(b, 4, 6),
         torch.randn(b, 4)))
for _name in ("GatedResidualNetwork", "VariableSelectionNetwork", "InterpretableMultiHeadAttention"):
    case("pytorch_forecasting", _name, lambda m, n=_name: _forecasting(m, n), vectors(5, 8))


def _forecasting(m: Any, name: str) -> nn.Module:
    layers = part(m, "models.temporal_fusion_transformer.sub_modules")
    if name == "GatedResidualNetwork":
        return layers.GatedResidualNetwork(8, 8, 8, dropout=0.1)
    if name == "InterpretableMultiHeadAttention":
        return Applied(layers.InterpretableMultiHeadAttention(2, 8, dropout=0.0), lambda f, x: f(x, x, x)[0])
    return Applied(layers.VariableSelectionNetwork({"a": 4, "b": 4}, 8, dropout=0.1,
        prescalers={"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), lambda f, x: f({"a": x[..., :4], "b": x[..., 4:]})[0])
