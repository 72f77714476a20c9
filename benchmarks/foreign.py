"""Models, layers and losses of libraries: a training step, a second batch size and an evaluation, beside eager.

    python benchmarks/foreign.py [NAME ...] [--held] [--library LIBRARY,...]

One line a case: `captured`, `around N eager calls`, `fallback` with the refused line, `unequal`, or `raises`, the
number of compiled programs and the seconds of all calls. A case whose library is not installed is skipped, with a line.
Every fourth case is held aside: --held runs these alone, for changes that were made by looking at the others.

A case is equal where results, gradients of parameters and gradients of inputs deviate from eager's by at most 1e-5 of
their norm. A case that eager does not run is skipped.
Exit status 1 where a case is unequal or raises.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import thunder
from thunder.errors import FallbackWarning
from thunder.ops.eager_calls import is_eager_call

BOUND = 1e-5  # norm-relative
FIRST, SECOND = 2, 3  # batch sizes


class Case(NamedTuple):
    """make() builds the module, inputs(batch) its arguments; the loss is the mean square of all results where they are
    no loss by themselves."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple]


CASES: list[Case] = []


def case(library: str, name: str, make: Callable[[Any], nn.Module], inputs: Callable[[int], tuple]) -> None:
    """Enters a case. make is given the library's module."""
    CASES.append(Case(f"{library}/{name}", library, lambda: make(importlib.import_module(library)), inputs))


def images(size: int, channels: int = 3) -> Callable[[int], tuple]:
    return lambda batch: (torch.randn(batch, channels, size, size),)


def tokens(length: int, count: int = 64) -> Callable[[int], tuple]:
    return lambda batch: (torch.randint(0, count, (batch, length)),)


def vectors(*shape: int) -> Callable[[int], tuple]:
    return lambda batch: (torch.randn(batch, *shape),)


class Applied(nn.Module):
    """A layer, and a function of it and the inputs."""

    def __init__(self, layer: nn.Module, function: Callable):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *inputs):
        return self.function(self.layer, *inputs)


def _loss_of(loss: nn.Module) -> Callable:
    return lambda layer, x, y: loss(layer(x), y)


class Learned(nn.Module):
    """A loss of what a linear layer makes of the inputs, and of targets."""

    def __init__(self, loss: nn.Module, width: int, outputs: int):
        super().__init__()
        self.linear, self.loss = nn.Linear(width, outputs), loss

    def forward(self, x, *targets):
        return self.loss(self.linear(x), *targets)


def labelled(width: int, classes: int) -> Callable[[int], tuple]:
    return lambda batch: (torch.randn(4 * batch, width), torch.arange(4 * batch) % classes)


# ---------------------------------------------------------------------------------------------------- the registry

for _name in (
    "resnet10t", "convnext_atto", "mobilenetv3_small_050", "ghostnet_050", "regnetx_002", "edgenext_xx_small",
    "mobilevit_xxs", "tf_efficientnetv2_b0", "poolformerv2_s12", "resnest14d", "repghostnet_050", "lcnet_050",
):  # fmt: skip
    case("timm", _name, lambda m, n=_name: m.create_model(n, num_classes=10), images(64))
for _name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "xcit_nano_12_p16_224"):
    case(
        "timm", _name, lambda m, n=_name: m.create_model(n, num_classes=10, img_size=64, **_DEPTH.get(n, {})),
        images(64),
    )  # fmt: skip
_DEPTH = {name: {"depth": 2} for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "xcit_nano_12_p16_224")}
case("timm", "levit_128s", lambda m: m.create_model("levit_128s", num_classes=10), images(224))
case("timm", "LabelSmoothing", lambda m: Learned(_of(m, "loss").LabelSmoothingCrossEntropy(), 6, 5), labelled(6, 5))
case("timm", "JsdCrossEntropy", lambda m: Learned(_of(m, "loss").JsdCrossEntropy(2), 6, 5), labelled(6, 5))


def _of(module: Any, name: str) -> Any:
    return importlib.import_module(f"{module.__name__}.{name}")


for _name, _options in {
    "vit.ViT": {"pool": "cls"}, "simple_vit.SimpleViT": {}, "deepvit.DeepViT": {}, "cait.CaiT": {"cls_depth": 1},
    "rvt.RvT": {}, "parallel_vit.ViT": {}, "simple_vit_with_patch_dropout.SimpleViT": {},
    "vit_with_patch_merger.ViT": {}, "simple_vit_with_qk_norm.SimpleViT": {},
    "simple_vit_with_register_tokens.SimpleViT": {},
    "simple_vit_with_fft.SimpleViT": {"freq_patch_size": 8},
}.items():  # fmt: skip
    case(
        "vit_pytorch", _name,
        lambda m, n=_name, o=_options: getattr(_of(m, n.split(".")[0]), n.split(".")[1])(
            image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=32, **o),
        images(32),
    )  # fmt: skip
case(
    "vit_pytorch", "na_vit_of_equal_images",
    lambda m: _of(m, "vit_1d").ViT(seq_len=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=32),
    vectors(3, 32),
)  # fmt: skip
case(
    "vit_pytorch", "cct",
    lambda m: _of(m, "cct").cct_2(img_size=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3, num_classes=5,
        positional_embedding="learnable"),
    images(32),
)  # fmt: skip


def _decoder(m: Any, **options: Any) -> nn.Module:
    layers = m.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    return m.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers)


for _name, _options in {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True}, "t5": {"rel_pos_bias": True},
    "glu": {"ff_glu": True, "ff_swish": True}, "rmsnorm": {"use_rmsnorm": True}, "qk norm": {"attn_qk_norm": True},
    "one kv head": {"attn_one_kv_head": True}, "talking heads": {"attn_pre_talking_heads": True},
    "flash": {"attn_flash": True}, "gates": {"gate_residual": True}, "shift": {"shift_tokens": 1},
    "sandwich": {"sandwich_norm": True}, "memory": {"attn_num_mem_kv": 4},
}.items():  # fmt: skip
    case("x_transformers", _name, lambda m, o=_options: _decoder(m, **o), tokens(12))
case("x_transformers", "autoregressive", lambda m: m.AutoregressiveWrapper(_decoder(m)), tokens(12))
case(
    "x_transformers", "continuous",
    lambda m: m.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=16,
        attn_layers=m.Encoder(dim=32, depth=1, heads=2)),
    vectors(12, 8),
)  # fmt: skip
case(
    "einops",
    "Rearrange",
    lambda m: nn.Sequential(nn.Linear(8, 8), _of(m, "layers.torch").Rearrange("b n (h d) -> b h n d", h=2)),
    vectors(6, 8),
)
case(
    "einops",
    "Reduce",
    lambda m: nn.Sequential(nn.Linear(8, 8), _of(m, "layers.torch").Reduce("b (n k) d -> b n d", "mean", k=2)),
    vectors(6, 8),
)
case(
    "einops",
    "pack",
    lambda m: Applied(nn.Linear(8, 8), lambda f, x: m.unpack(f(m.pack([x, x[:, 0]], "b * d")[0]), [[6], []], "b * d")),
    vectors(6, 8),
)
case(
    "einops",
    "einsum",
    lambda m: Applied(nn.Linear(8, 8), lambda f, x: m.einsum(f(x), x, "b n d, b m d -> b n m")),
    vectors(6, 8),
)
case(
    "einx",
    "rearrange",
    lambda m: Applied(nn.Linear(8, 8), lambda f, x: m.rearrange("b n (h d) -> b h n d", f(x), h=2)),
    vectors(6, 8),
)
case("einx", "mean", lambda m: Applied(nn.Linear(8, 8), lambda f, x: m.mean("b [n] d", f(x))), vectors(6, 8))
case("vector_quantize_pytorch", "VectorQuantize", lambda m: m.VectorQuantize(dim=8, codebook_size=16), vectors(6, 8))
case("vector_quantize_pytorch", "FSQ", lambda m: nn.Sequential(nn.Linear(8, 3), m.FSQ([4, 3, 3])), vectors(6, 8))
case("vector_quantize_pytorch", "LFQ", lambda m: m.LFQ(dim=8, codebook_size=16), vectors(6, 8))
case(
    "vector_quantize_pytorch",
    "ResidualVQ",
    lambda m: m.ResidualVQ(dim=8, num_quantizers=2, codebook_size=16),
    vectors(6, 8),
)
case("g_mlp_pytorch", "gMLP", lambda m: m.gMLP(num_tokens=64, dim=16, depth=2, seq_len=12), tokens(12))
case(
    "rotary_embedding_torch",
    "rotated",
    lambda m: Applied(m.RotaryEmbedding(dim=4), lambda f, x: f.rotate_queries_or_keys(x)),
    vectors(2, 6, 8),
)
case(
    "local_attention",
    "LocalAttention",
    lambda m: Applied(m.LocalAttention(dim=8, window_size=4, causal=True), lambda f, x: f(x, x, x)),
    vectors(2, 8, 8),
)
case(
    "local_attention",
    "LocalTransformer",
    lambda m: m.LocalTransformer(
        num_tokens=64, dim=16, depth=1, max_seq_len=16, local_attn_window_size=8, heads=2, dim_head=8
    ),
    tokens(16),
)
case("soft_moe_pytorch", "SoftMoE", lambda m: m.SoftMoE(dim=8, seq_len=6, num_experts=2), vectors(6, 8))
case("mixture_of_experts", "MoE", lambda m: m.MoE(dim=8, num_experts=4), vectors(6, 8))
case("st_moe_pytorch", "MoE", lambda m: m.MoE(dim=8, num_experts=4), vectors(8, 8))
case("linformer", "Linformer", lambda m: m.Linformer(dim=8, seq_len=6, depth=1, heads=2, k=3), vectors(6, 8))
case(
    "performer_pytorch",
    "Performer",
    lambda m: m.Performer(dim=16, depth=1, heads=2, dim_head=8, causal=False),
    vectors(6, 16),
)
case(
    "nystrom_attention",
    "NystromAttention",
    lambda m: m.NystromAttention(dim=16, dim_head=8, heads=2, num_landmarks=4),
    vectors(8, 16),
)
case(
    "perceiver_pytorch",
    "Perceiver",
    lambda m: m.Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=2,
        max_freq=4.0,
        depth=1,
        num_latents=4,
        latent_dim=16,
        cross_heads=1,
        latent_heads=2,
        cross_dim_head=8,
        latent_dim_head=8,
        num_classes=5,
    ),
    lambda b: (torch.randn(b, 8, 8, 3),),
)
case("siren_pytorch", "SirenNet", lambda m: m.SirenNet(dim_in=2, dim_hidden=16, dim_out=3, num_layers=2), vectors(2))
case(
    "reformer_pytorch",
    "Reformer",
    lambda m: m.Reformer(dim=16, depth=1, heads=2, bucket_size=4, n_hashes=2),
    vectors(16, 16),
)
case("egnn_pytorch", "EGNN", lambda m: m.EGNN(dim=8), lambda b: (torch.randn(b, 5, 8), torch.randn(b, 5, 3)))
case("entmax", "entmax15", lambda m: Applied(nn.Linear(6, 6), lambda f, x: m.entmax15(f(x), dim=-1)), vectors(6))
case("entmax", "sparsemax", lambda m: Applied(nn.Linear(6, 6), lambda f, x: m.sparsemax(f(x), dim=-1)), vectors(6))
for _name in (
    "TripletMarginLoss", "ContrastiveLoss", "NTXentLoss", "MultiSimilarityLoss", "CircleLoss", "SupConLoss",
    "LiftedStructureLoss", "SignalToNoiseRatioContrastiveLoss",
):  # fmt: skip
    case(
        "pytorch_metric_learning",
        _name,
        lambda m, n=_name: Learned(getattr(_of(m, "losses"), n)(), 6, 4),
        labelled(6, 3),
    )
for _name in ("ArcFaceLoss", "CosFaceLoss", "ProxyNCALoss", "SoftTripleLoss"):
    case(
        "pytorch_metric_learning",
        _name,
        lambda m, n=_name: Learned(getattr(_of(m, "losses"), n)(num_classes=3, embedding_size=4), 6, 4),
        labelled(6, 3),
    )
for _name in ("Unet", "FPN", "Linknet", "PSPNet"):
    case(
        "segmentation_models_pytorch",
        _name,
        lambda m, n=_name: getattr(m, n)("resnet18", encoder_weights=None, classes=2),
        images(64),
    )
for _name in ("DiceLoss", "JaccardLoss", "LovaszLoss", "FocalLoss", "TverskyLoss"):
    case(
        "segmentation_models_pytorch", _name,
        lambda m, n=_name: Applied(nn.Conv2d(3, 1, 1), _loss_of(getattr(m.losses, n)("binary"))),
        lambda b: (torch.randn(b, 3, 8, 8), (torch.rand(b, 1, 8, 8) > 0.5).float()),
    )  # fmt: skip
for _name, _options in {
    "UNet": {"channels": (4, 8), "strides": (2,)}, "AttentionUnet": {"channels": (4, 8), "strides": (2,)},
    "BasicUNet": {"features": (4, 4, 8, 8, 8, 4)},
}.items():  # fmt: skip
    case(
        "monai",
        _name,
        lambda m, n=_name, o=_options: getattr(_of(m, "networks.nets"), n)(
            spatial_dims=2, in_channels=1, out_channels=2, **o
        ),
        images(32, 1),
    )
case(
    "monai",
    "SegResNet",
    lambda m: _of(m, "networks.nets").SegResNet(
        spatial_dims=2, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,)
    ),
    images(16, 1),
)
for _name in ("DiceLoss", "DiceCELoss", "FocalLoss", "GeneralizedDiceLoss"):
    case(
        "monai", _name,
        lambda m, n=_name: Applied(nn.Conv2d(3, 1, 1), _loss_of(getattr(m.losses, n)())),
        lambda b: (torch.randn(b, 3, 8, 8), (torch.rand(b, 1, 8, 8) > 0.5).float()),
    )  # fmt: skip
for _name in ("gaussian_blur2d", "sobel", "laplacian", "median_blur", "bilateral_blur"):
    _sizes = {
        "gaussian_blur2d": ((3, 3), (1.0, 1.0)),
        "sobel": (),
        "laplacian": (3,),
        "median_blur": ((3, 3),),
        "bilateral_blur": ((3, 3), 0.1, (1.0, 1.0)),
    }[_name]
    case(
        "kornia",
        _name,
        lambda m, n=_name, s=_sizes: Applied(nn.Conv2d(3, 3, 1), lambda f, x: getattr(m.filters, n)(f(x), *s)),
        images(12),
    )
case(
    "kornia", "SSIMLoss", lambda m: Applied(nn.Conv2d(3, 3, 1), lambda f, x: m.losses.ssim_loss(f(x), x, 5)), images(12)
)
case(
    "kornia",
    "rgb_to_hsv",
    lambda m: Applied(nn.Conv2d(3, 3, 1), lambda f, x: m.color.rgb_to_hsv(f(x).sigmoid())),
    images(12),
)
case(
    "kornia",
    "warp_affine",
    lambda m: Applied(nn.Conv2d(3, 3, 1), lambda f, x: m.geometry.rotate(f(x), torch.tensor([30.0]))),
    images(12),
)
case(
    "torchdiffeq",
    "odeint",
    lambda m: Applied(
        nn.Linear(4, 4), lambda f, x: m.odeint(lambda t, y: f(y).tanh(), x, torch.linspace(0, 1, 4), method="rk4")
    ),
    vectors(4),
)
case(
    "torchdiffeq",
    "dopri5",
    lambda m: Applied(nn.Linear(4, 4), lambda f, x: m.odeint(lambda t, y: f(y).tanh(), x, torch.linspace(0, 1, 4))),
    vectors(4),
)
case(
    "snntorch",
    "Leaky",
    lambda m: Applied(
        nn.ModuleList([nn.Linear(4, 4), m.Leaky(beta=0.9, init_hidden=False)]),
        lambda f, x: f[1](f[0](x), f[1].init_leaky()),
    ),
    vectors(4),
)
case(
    "nflows",
    "MaskedAffineAutoregressive",
    lambda m: Applied(
        _of(m, "transforms.autoregressive").MaskedAffineAutoregressiveTransform(features=4, hidden_features=8),
        lambda f, x: f(x),
    ),
    vectors(4),
)
case(
    "normflows",
    "AffineCoupling",
    lambda m: Applied(m.flows.AffineCouplingBlock(m.nets.MLP([2, 8, 4])), lambda f, x: f(x)),
    vectors(4),
)
for _name in ("NSF", "MAF", "NICE"):
    case(
        "zuko",
        _name,
        lambda m, n=_name: Applied(
            getattr(m.flows, n)(features=3, transforms=1, hidden_features=(8,)), lambda f, x: -f().log_prob(x).mean()
        ),
        vectors(3),
    )
case(
    "gpytorch",
    "RBFKernel",
    lambda m: Applied(m.kernels.ScaleKernel(m.kernels.RBFKernel()), lambda f, x: f(x).to_dense()),
    vectors(3),
)
case("e3nn", "Linear", lambda m: _of(m, "o3").Linear("4x0e + 2x1o", "2x0e + 1x1o"), vectors(10))
case(
    "e3nn",
    "spherical_harmonics",
    lambda m: Applied(nn.Linear(3, 3), lambda f, x: _of(m, "o3").spherical_harmonics([0, 1, 2], f(x), True)),
    vectors(3),
)
for _name in ("GCNConv", "SAGEConv", "GATConv", "GINConv", "GraphConv", "TransformerConv"):
    case(
        "torch_geometric", _name,
        lambda m, n=_name: getattr(_of(m, "nn"), n)(*([nn.Linear(4, 4)] if n == "GINConv" else [4, 4])),
        lambda b: (torch.randn(3 * b, 4), torch.stack([torch.arange(3 * b), torch.arange(3 * b).roll(1)])),
    )  # fmt: skip
for _name in ("NTXentLoss", "BarlowTwinsLoss", "VICRegLoss", "NegativeCosineSimilarity", "DCLLoss"):
    case(
        "lightly",
        _name,
        lambda m, n=_name: Applied(
            nn.Linear(6, 4), lambda f, x, y, loss=getattr(_of(m, "loss"), n)(): loss(f(x), f(y))
        ),
        lambda b: (torch.randn(b, 6), torch.randn(b, 6)),
    )
case(
    "pytorch_msssim",
    "SSIM",
    lambda m: Applied(nn.Conv2d(3, 3, 1), lambda f, x, s=m.SSIM(data_range=1.0): s(f(x), x)),
    images(16),
)
case("piq", "TVLoss", lambda m: Applied(nn.Conv2d(3, 3, 1), lambda f, x: m.total_variation(f(x).sigmoid())), images(16))
case(
    "piq",
    "GMSDLoss",
    lambda m: Applied(nn.Conv2d(3, 3, 1), lambda f, x: m.gmsd(f(x).sigmoid(), x.sigmoid())),
    images(32),
)
case("loralib", "Linear", lambda m: m.Linear(6, 6, r=2), vectors(6))
case(
    "peft",
    "lora",
    lambda m: m.get_peft_model(nn.Sequential(nn.Linear(6, 6)), m.LoraConfig(target_modules=["0"])),
    vectors(6),
)
case(
    "diffusers",
    "UNet2DModel",
    lambda m: Applied(
        m.UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 8),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ),
        lambda f, x: f(x, 3, return_dict=False),
    ),
    images(8, 1),
)
case(
    "diffusers",
    "AutoencoderKL",
    lambda m: Applied(
        m.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8), lambda f, x: f(x, return_dict=False)
    ),
    images(8),
)
case(
    "torchmetrics",
    "functional",
    lambda m: Applied(
        nn.Linear(6, 3),
        lambda f, x, y: (_of(m, "functional").accuracy(f(x), y, task="multiclass", num_classes=3), f(x)),
    ),
    labelled(6, 3),
)
case(
    "pytorch_tabnet",
    "TabNet",
    lambda m: _of(m, "tab_network").TabNet(6, 3, n_d=4, n_a=4, n_steps=2, group_attention_matrix=torch.eye(6)),
    lambda b: (torch.randn(8 * b, 6),),
)

# ---------------------------------------------------------------------------------------------------- measuring


def results(module: Callable, inputs: tuple, parameters: list, train: bool) -> list[torch.Tensor]:
    """All tensors of a call, and in training the gradients of parameters and of floating inputs."""
    torch.manual_seed(1)
    if not train:
        with torch.no_grad():
            return [t for t in tree_leaves(module(*inputs)) if isinstance(t, torch.Tensor)]
    inputs = tuple(t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs)
    for p in parameters:
        p.grad = None
    outputs = [t for t in tree_leaves(module(*inputs)) if isinstance(t, torch.Tensor)]
    floats = [t for t in outputs if t.requires_grad]
    sum((t.float() if t.dim() == 0 else t.float().square().mean() for t in floats), torch.zeros(())).backward()
    gradients = [t.grad for t in (*parameters, *inputs)]
    return [t.detach() for t in outputs] + [torch.zeros(()) if g is None else g for g in gradients]


def deviation(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest norm-relative difference; infinite where the tensors do not match."""
    if [(t.shape, t.dtype) for t in found] != [(t.shape, t.dtype) for t in expected]:
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        a, b = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
        worst = max(worst, float((a - b).norm() / b.norm().clamp(min=1e-3)))
    return worst


def run(one: Case) -> tuple[str, int, str]:
    """(what happened, the number of programs, words about it)"""
    torch.manual_seed(0)
    try:
        module = one.make()
        first, second = one.inputs(FIRST), one.inputs(SECOND)
        plan = [(first, True), (first, True), (second, True), (first, False)]
        ours = copy.deepcopy(module)
        parameters = [list(m.parameters()) for m in (module, ours)]
        expected = [results(module.train(train), inputs, parameters[0], train) for inputs, train in plan]
    except Exception as error:  # noqa: BLE001 - of another version of the library, or without what it needs
        return "skipped", 0, f"eager raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    compiled, worst = thunder.jit(ours), 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (inputs, train), want in zip(plan, expected, strict=True):
            ours.train(train)
            worst = max(worst, deviation(results(compiled, inputs, parameters[1], train), want))
    said = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    programs = thunder.cache_misses(compiled)
    eager = {
        b.args[1] for p in compiled.programs for b in p.computation_traces[0].bound_symbols if is_eager_call(b.sym)
    }
    words = " | ".join(" ".join(text.split())[:420] for text in said[:2])
    if worst > BOUND:
        return "unequal", programs, f"{worst:.1e} {words}"
    if any("runs as it is in each call" not in text for text in said):
        return "fallback", programs, words
    return (f"around {len(eager)} eager calls" if eager or said else "captured"), programs, words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--library", help="several by commas")
    options = parser.parse_args()
    counts: dict[str, int] = {}
    for i, one in enumerate(CASES):
        if (i % 4 == 3) != options.held and not options.names:
            continue
        if options.names and one.name not in options.names:
            continue
        if options.library and one.library not in options.library.split(","):
            continue
        start = time.perf_counter()
        try:
            importlib.import_module(one.library)
        except ImportError as error:
            print(f"{'skipped':24} {one.name:44} {error}", flush=True)
            continue
        try:
            kind, programs, words = run(one)
        except Exception as error:  # noqa: BLE001 - a line of the table
            kind, programs, words = "raises", 0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        counts[kind.split()[0]] = counts.get(kind.split()[0], 0) + 1
        print(f"{kind:24} {one.name:44} {programs} programs {time.perf_counter() - start:5.1f} s  {words}", flush=True)
    print(counts)
    return int(bool(counts.keys() & {"unequal", "raises"}))


if __name__ == "__main__":
    sys.exit(main())
