"""Programs and models of libraries that the other rows do not name: torch_geometric, torchaudio, timm, diffusers.

`rows(small, seed)` maps a name to a `Row`: thirteen programs whose kernels were slow once, then ten models that the
seed draws from `POOL`. Rows of a library that is not installed are left out. Nothing is downloaded. `small`: the same
programs in sizes for a test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_full import BF16, Cast
from zoo_programs import Row, Task, without_dropout

__all__ = ["DRAWN", "POOL", "rows"]

DRAWN = 10  # models that a seed draws


class RadianceField(nn.Module):
    """A neural radiance field (Mildenhall et al. 2020): positions and directions as sines and cosines, eight layers,
    colors composed along each ray. Input: [rays, samples, 3] positions, [rays, 3] directions, [rays, samples] depths.
    """

    def __init__(self, width: int):
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(63, width), *(nn.Linear(width, width) for _ in range(3))])
        self.second = nn.ModuleList([nn.Linear(width + 63, width), *(nn.Linear(width, width) for _ in range(3))])
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.color = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    @staticmethod
    def encode(x: torch.Tensor, frequencies: int) -> torch.Tensor:
        return torch.cat([x, *(f(x * 2.0**i) for i in range(frequencies) for f in (torch.sin, torch.cos))], -1)

    def forward(self, positions, directions, depths):
        encoded = h = self.encode(positions, 10)
        for layer in self.first:
            h = F.relu(layer(h))
        h = torch.cat([h, encoded], -1)
        for layer in self.second:
            h = F.relu(layer(h))
        density = F.softplus(self.density(h).squeeze(-1) - 1)
        views = self.encode(directions, 4)[:, None].expand(-1, h.shape[1], -1)
        colors = torch.sigmoid(self.color(F.relu(self.view(torch.cat([self.feature(h), views], -1)))))
        steps = torch.cat([depths.diff(dim=-1), torch.full_like(depths[:, :1], 1e10)], -1)
        opacity = 1 - torch.exp(-density * steps)
        light = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        return ((opacity * light)[..., None] * colors).sum(1)


def distillation(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Two soft targets (Hinton et al. 2015) and label smoothing. Input: [rows, classes] logits, [rows] labels."""
    soft = sum(
        F.kl_div(F.log_softmax(student / t, -1), F.softmax(teacher / t, -1), reduction="batchmean") * t * t
        for t in (2.0, 4.0)
    )
    return 0.5 * soft + 0.5 * F.cross_entropy(student, labels, label_smoothing=0.1)


class BiasedAttention(nn.Module):
    """Attention by hand with ALiBi (Press et al. 2021) and a soft cap. Input and output: [batch, positions, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.inputs, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.inputs(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = 30 * torch.tanh(scores / 30)
        positions = torch.arange(t, device=x.device)
        distances = (positions[:, None] - positions[None, :]).clamp(min=0)
        scores = scores - self.slopes[:, None, None] * distances
        scores = scores.masked_fill(positions[:, None] < positions[None, :], -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class HandWrittenAdam(nn.Module):
    """One step of Adam over many tensors in plain operations, with gradients that it is given."""

    def __init__(self, count: int, size: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size + i % 7, size) for i in range(count))
        self.first = [torch.zeros_like(p) for p in self.weights]
        self.second = [torch.zeros_like(p) for p in self.weights]
        for i, (m, v) in enumerate(zip(self.first, self.second, strict=True)):
            self.register_buffer(f"first{i}", m)
            self.register_buffer(f"second{i}", v)

    def forward(self, gradients: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(self.weights, gradients, strict=True)):
                m, v = getattr(self, f"first{i}"), getattr(self, f"second{i}")
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                p.sub_(1e-3 * (m / 0.9) / ((v / 0.999).sqrt() + 1e-8) + 1e-5 * p)


class VectorQuantizer(nn.Module):
    """The discrete autoencoder of van den Oord et al. (2017). Input: [batch, 3, side, side]; output: a loss."""

    def __init__(self, width: int, codes: int):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )
        self.codes = nn.Embedding(codes, width)

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1]).to(self.codes.weight.dtype)
        table = self.codes.weight
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ table.t() + table.pow(2).sum(1)
        quantized = self.codes(distances.argmin(1)).view(z.shape)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(z, quantized.detach())
        straight = z + (quantized - z).detach()
        return loss + F.mse_loss(self.decoder(straight.permute(0, 3, 1, 2)), x)


class VolumeUNet(nn.Module):
    """A 3-D U-Net (Cicek et al. 2016) with instance norms, leaky ReLUs and a dice loss."""

    def __init__(self, width: int):
        super().__init__()

        def block(a: int, b: int, stride: int = 1) -> nn.Module:
            conv = nn.Conv3d(a, b, 3, stride, 1)
            more = nn.Conv3d(b, b, 3, 1, 1)
            act = nn.LeakyReLU(0.01)
            return nn.Sequential(
                conv, nn.InstanceNorm3d(b, affine=True), act, more, nn.InstanceNorm3d(b, affine=True), act
            )

        self.a, self.b, self.c = block(1, width), block(width, 2 * width, 2), block(2 * width, 4 * width, 2)
        self.up_b = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2)
        self.up_a = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.back_b, self.back_a = block(4 * width, 2 * width), block(2 * width, width)
        self.out = nn.Conv3d(width, 3, 1)

    def forward(self, x, labels):
        a = self.a(x)
        b = self.b(a)
        h = self.back_b(torch.cat([self.up_b(self.c(b)), b], 1))
        h = self.out(self.back_a(torch.cat([self.up_a(h), a], 1)))
        probabilities = h.float().softmax(1)
        truth = F.one_hot(labels, 3).movedim(-1, 1).float()
        overlap = (probabilities * truth).sum((2, 3, 4))
        dice = (2 * overlap + 1e-5) / (probabilities.sum((2, 3, 4)) + truth.sum((2, 3, 4)) + 1e-5)
        return 1 - dice.mean() + F.cross_entropy(h.float(), labels)


class Distances(nn.Module):
    """A model as its library gives it, whose result is one tensor, or has one first."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        result = self.module(*args)
        return result if isinstance(result, torch.Tensor) else next(iter(result))


def _trained(module: nn.Module, *args: Any) -> Task:
    return Task(Cast(without_dropout(module).train(), BF16), args)


def _field(small: bool) -> Task:
    rays, samples, width = (5, 7, 16) if small else (4096, 64, 256)
    depths = torch.rand(rays, samples).sort(-1).values * 4 + 2
    return _trained(RadianceField(width), torch.randn(rays, samples, 3), torch.randn(rays, 3), depths)


def _distilled(small: bool) -> Task:
    rows, classes = (7, 131) if small else (2048, 50257)
    student = torch.randn(rows, classes, requires_grad=True)
    return Task(distillation, (student, torch.randn(rows, classes), torch.randint(classes, (rows,))))


def _biased(small: bool) -> Task:
    b, t, c, heads = (2, 13, 32, 4) if small else (8, 1024, 768, 12)
    return _trained(BiasedAttention(c, heads), torch.randn(b, t, c))


def _adam(small: bool) -> Task:
    count, size = (4, 8) if small else (96, 512)
    module = HandWrittenAdam(count, size)
    return Task(module, ([torch.randn_like(p) for p in module.weights],), mode="step")


def _quantized(small: bool) -> Task:
    batch, side, width, codes = (2, 16, 16, 32) if small else (64, 64, 128, 1024)
    return _trained(VectorQuantizer(width, codes), torch.randn(batch, 3, side, side))


def _volume(small: bool) -> Task:
    batch, side, width = (1, 8, 4) if small else (2, 64, 32)
    return _trained(
        VolumeUNet(width), torch.randn(batch, 1, side, side, side), torch.randint(3, (batch, side, side, side))
    )


def _flux(small: bool) -> Task:
    from diffusers import FluxTransformer2DModel

    heads, width, text, side, layers = (2, 16, 7, 4, 1) if small else (24, 128, 512, 64, 2)
    axes = (4, 6, 6) if small else (16, 56, 56)
    model = FluxTransformer2DModel(
        in_channels=64, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=width,
        num_attention_heads=heads, joint_attention_dim=heads * 8 if small else 4096, pooled_projection_dim=64,
        axes_dims_rope=axes,
    )  # fmt: skip
    ids = torch.stack(
        torch.meshgrid(torch.zeros(1), torch.arange(1.0 * side), torch.arange(1.0 * side), indexing="ij"), -1
    )
    inputs = {
        "hidden_states": torch.randn(1, side * side, 64).to(BF16),
        "encoder_hidden_states": torch.randn(1, text, heads * 8 if small else 4096).to(BF16),
        "pooled_projections": torch.randn(1, 64).to(BF16), "timestep": torch.tensor([0.5]).to(BF16),
        "img_ids": ids.view(-1, 3), "txt_ids": torch.zeros(text, 3), "return_dict": False,
    }  # fmt: skip
    return Task(Cast(model.to(BF16).eval(), None), (), inputs, "infer")


def _conformer(small: bool) -> Task:
    from torchaudio.models import Conformer

    width, layers, batch, length = (32, 1, 2, 17) if small else (256, 8, 16, 400)
    model = Conformer(width, 4, 4 * width, layers, 15 if small else 31, dropout=0.1)
    lengths = torch.randint(length // 2, length + 1, (batch,))
    lengths[0] = length
    return Task(
        Cast(Distances(model).train(), BF16), (torch.randn(batch, length, width), lengths), mode="train", random=True
    )


def _sam(small: bool) -> Task:
    from transformers import SamVisionConfig, SamVisionModel

    settings: dict[str, Any] = dict(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, image_size=64)
    settings |= dict(patch_size=8, window_size=3, global_attn_indexes=[1], output_channels=16, mlp_dim=96)
    settings = settings if small else dict(num_hidden_layers=4, global_attn_indexes=[1, 3])
    model = SamVisionModel(SamVisionConfig(**settings))
    return _trained(model, torch.randn(1, 3, 64, 64) if small else torch.randn(2, 3, 1024, 1024))


def _messages(small: bool) -> Task:
    from torch_geometric.nn import GATConv, GINConv, SAGEConv

    nodes, edges, width = (31, 67, 8) if small else (50000, 500000, 64)

    class Messages(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = GATConv(width, width // 4, heads=4)
            self.mean = SAGEConv(width, width)
            self.sum = GINConv(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))

        def forward(self, x, edges):
            return self.sum(F.relu(self.mean(F.elu(self.attention(x, edges)), edges)), edges)

    return Task(Messages(), (torch.randn(nodes, width), torch.randint(nodes, (2, edges))))


def _timm(name: str, batch: int = 32, **settings: Any) -> Callable[[bool], Task]:
    def make(small: bool) -> Task:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=10 if small else 1000, **settings)
        side = model.default_cfg["input_size"][-1]
        return _trained(model, torch.randn(2 if small else batch, 3, side, side))

    return make


def _texts(model: str, config: str, batch: int = 4, length: int = 512, **settings: Any) -> Callable[[bool], Task]:
    def make(small: bool) -> Task:
        import transformers

        transformers.logging.set_verbosity_error()
        cut = {"num_hidden_layers": 1, "n_layer": 1, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
        values = transformers.AutoConfig.for_model(config, **settings)
        for name, layers in cut.items():
            if small and hasattr(values, name):
                setattr(values, name, layers)
        if getattr(values, "pad_token_id", None) is None:
            values.pad_token_id = 0
        module = getattr(transformers, model)(values)
        ids = torch.randint(4, values.vocab_size, (1, 17) if small else (batch, length))
        without_dropout(module)
        return Task(Cast(module.train(), BF16), (), {"input_ids": ids, "labels": ids})

    return make


def _graphs(name: str, **settings: Any) -> Callable[[bool], Task]:
    def make(small: bool) -> Task:
        import torch_geometric.nn as layers

        nodes, edges, width = (31, 67, 8) if small else (20011, 200003, 64)
        model = getattr(layers, name)(width, width, 3, width, **settings)
        return Task(without_dropout(model).train(), (torch.randn(nodes, width), torch.randint(nodes, (2, edges))))

    return make


def _sounds(name: str, *args: Any, input_shape: tuple[int, ...], small_shape: tuple[int, ...]) -> Callable:
    def make(small: bool) -> Task:
        import torchaudio

        model = getattr(torchaudio.models, name)(*args)
        return _trained(Distances(model), torch.randn(*(small_shape if small else input_shape)))

    return make


def _scenes(name: str, batch: int = 16, side: int = 224, **settings: Any) -> Callable[[bool], Task]:
    def make(small: bool) -> Task:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **settings)
        return _trained(model, torch.randn(2 if small else batch, 3, side, side))

    return make


TABLE: dict[str, tuple[str, Callable[[bool], Task]]] = {
    "NeRF": ("torch", _field),
    "Flux transformer, served": ("diffusers", _flux),
    "distillation, 50257 classes": ("torch", _distilled),
    "ALiBi and a soft cap by hand": ("torch", _biased),
    "Conformer": ("torchaudio", _conformer),
    "Adam by hand, 96 tensors": ("torch", _adam),
    "SAM encoder": ("transformers", _sam),
    "MLP-Mixer": ("timm", _timm("mixer_b16_224")),
    "VQ-VAE": ("torch", _quantized),
    "GAT, SAGE, GIN": ("torch_geometric", _messages),
    "3-D U-Net": ("torch", _volume),
    "RegNetY": ("timm", _timm("regnety_032")),
    "EVA-02": ("timm", _timm("eva02_small_patch14_224")),
}

POOL: dict[str, tuple[str, Callable[[bool], Task]]] = {
    **{
        f"timm {name}": ("timm", _timm(name))
        for name in (
            "resmlp_12_224", "convmixer_768_32", "coatnet_0_rw_224", "maxvit_tiny_tf_224", "efficientformerv2_s0",
            "poolformer_s12", "twins_svt_small", "cait_xxs24_224", "xcit_tiny_12_p8_224", "deit3_small_patch16_224",
            "beit_base_patch16_224", "volo_d1_224", "crossvit_15_240", "levit_256", "mobilevit_s", "ghostnet_100",
            "densenet121", "res2net50_26w_4s", "resnest26d", "hrnet_w18", "mobilenetv3_large_100", "edgenext_small",
            "fastvit_t8", "tiny_vit_11m_224", "hiera_tiny_224", "davit_tiny", "focalnet_tiny_srf", "gcvit_tiny",
            "pvt_v2_b1", "pit_s_224", "repvit_m1", "inception_next_tiny", "mambaout_tiny", "nfnet_l0", "gmlp_s16_224",
        )
    },
    **{
        f"transformers {config}": ("transformers", _texts(model, config, **settings))
        for model, config, settings in (
            ("RobertaForMaskedLM", "roberta", {"num_hidden_layers": 4, "max_position_embeddings": 514, "length": 509}),
            ("DebertaV2ForMaskedLM", "deberta-v2", {"num_hidden_layers": 2, "hidden_size": 768,
                                                    "num_attention_heads": 12, "intermediate_size": 3072}),
            ("AlbertForMaskedLM", "albert", {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 16,
                                             "intermediate_size": 4096}),
            ("OPTForCausalLM", "opt", {"num_hidden_layers": 4}),
            ("BloomForCausalLM", "bloom", {"n_layer": 4, "hidden_size": 1024, "n_head": 16, "vocab_size": 50880}),
            ("GPTJForCausalLM", "gptj", {"n_layer": 2, "n_embd": 1024, "n_head": 16, "rotary_dim": 32}),
            ("CodeGenForCausalLM", "codegen", {"n_layer": 2, "n_embd": 1024, "n_head": 16, "rotary_dim": 32}),
            ("StableLmForCausalLM", "stablelm", {"num_hidden_layers": 3, "hidden_size": 1024,
                                                 "intermediate_size": 2816, "num_attention_heads": 16,
                                                 "num_key_value_heads": 16}),
            ("GraniteForCausalLM", "granite", {"num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 2816,
                                               "num_attention_heads": 16}),
            ("CohereForCausalLM", "cohere", {"num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 2816,
                                             "num_attention_heads": 16, "vocab_size": 32000}),
            ("Gemma2ForCausalLM", "gemma2", {"num_hidden_layers": 3, "hidden_size": 1024, "intermediate_size": 4096,
                                             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
                                             "vocab_size": 32000}),
            ("BartForConditionalGeneration", "bart", {"encoder_layers": 2, "decoder_layers": 2}),
            ("MambaForCausalLM", "mamba", {"num_hidden_layers": 2, "hidden_size": 512}),
            ("NemotronForCausalLM", "nemotron", {"num_hidden_layers": 2, "hidden_size": 1024,
                                                 "intermediate_size": 4096, "num_attention_heads": 16,
                                                 "num_key_value_heads": 8, "vocab_size": 32000}),
        )
    },
    **{
        f"torch_geometric {name}": ("torch_geometric", _graphs(name, **settings))
        for name, settings in (("GCN", {}), ("GraphSAGE", {}), ("GIN", {}), ("GAT", {"heads": 4}), ("EdgeCNN", {}))
    },
    "torchaudio ConvTasNet": ("torchaudio", _sounds("ConvTasNet", input_shape=(4, 1, 16000), small_shape=(1, 1, 800))),
    "torchaudio DeepSpeech": (
        "torchaudio", _sounds("DeepSpeech", 64, input_shape=(8, 1, 400, 64), small_shape=(1, 1, 9, 64))),
    "torchaudio Wav2Letter": (
        "torchaudio", _sounds("Wav2Letter", 40, "mfcc", 64, input_shape=(8, 64, 800), small_shape=(1, 64, 90))),
    **{
        f"torchvision {name}": ("torchvision", _scenes(name))
        for name in ("swin_v2_t", "maxvit_t", "shufflenet_v2_x1_0", "mnasnet1_0", "squeezenet1_1", "googlenet")
    },
}  # fmt: skip


def rows(small: bool, seed: int | None = None) -> dict[str, Row]:
    """The rows of TABLE, and ten models of POOL where there is a seed, whose libraries are installed."""
    chosen = dict(TABLE)
    installed = [name for name, (library, _) in POOL.items() if find_spec(library)]
    if seed is not None:
        chosen |= {name: POOL[name] for name in random.Random(seed).sample(installed, DRAWN)}
    return {
        name: Row("libraries", lambda make=make: make(small))
        for name, (library, make) in chosen.items()
        if find_spec(library)
    }
