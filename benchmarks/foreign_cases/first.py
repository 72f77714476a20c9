"""The first cases: those that classes of refusals were mended by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign_cases.common import Applied, Learned, case, images, labelled, loss_of, part, tokens, vectors

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
case("timm", "LabelSmoothing", lambda m: Learned(part(m, "loss").LabelSmoothingCrossEntropy(), 6, 5), labelled(6, 5))
case("timm", "JsdCrossEntropy", lambda m: Learned(part(m, "loss").JsdCrossEntropy(2), 6, 5), labelled(6, 5))


for _name, _options in {
    "vit.ViT": {"pool": "cls"}, "simple_vit.SimpleViT": {}, "deepvit.DeepViT": {}, "cait.CaiT": {"cls_depth": 1},
    "rvt.RvT": {}, "parallel_vit.ViT": {}, "simple_vit_with_patch_dropout.SimpleViT": {},
    "vit_with_patch_merger.ViT": {}, "simple_vit_with_qk_norm.SimpleViT": {},
    "simple_vit_with_register_tokens.SimpleViT": {},
    "simple_vit_with_fft.SimpleViT": {"freq_patch_size": 8},
}.items():  # fmt: skip
    case(
        "vit_pytorch", _name,
        lambda m, n=_name, o=_options: getattr(part(m, n.split(".")[0]), n.split(".")[1])(
            image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=32, **o),
        images(32),
    )  # fmt: skip
case(
    "vit_pytorch", "na_vit_of_equal_images",
    lambda m: part(m, "vit_1d").ViT(seq_len=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=32),
    vectors(3, 32),
)  # fmt: skip
case(
    "vit_pytorch", "cct",
    lambda m: part(m, "cct").cct_2(img_size=32, n_conv_layers=1, kernel_size=7, stride=2, padding=3, num_classes=5,
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
    lambda m: nn.Sequential(nn.Linear(8, 8), part(m, "layers.torch").Rearrange("b n (h d) -> b h n d", h=2)),
    vectors(6, 8),
)
case(
    "einops",
    "Reduce",
    lambda m: nn.Sequential(nn.Linear(8, 8), part(m, "layers.torch").Reduce("b (n k) d -> b n d", "mean", k=2)),
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
        lambda m, n=_name: Learned(getattr(part(m, "losses"), n)(), 6, 4),
        labelled(6, 3),
    )
for _name in ("ArcFaceLoss", "CosFaceLoss", "ProxyNCALoss", "SoftTripleLoss"):
    case(
        "pytorch_metric_learning",
        _name,
        lambda m, n=_name: Learned(getattr(part(m, "losses"), n)(num_classes=3, embedding_size=4), 6, 4),
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
        lambda m, n=_name: Applied(nn.Conv2d(3, 1, 1), loss_of(getattr(m.losses, n)("binary"))),
        lambda b: (torch.randn(b, 3, 8, 8), (torch.rand(b, 1, 8, 8) > 0.5).float()),
    )  # fmt: skip
for _name, _options in {
    "UNet": {"channels": (4, 8), "strides": (2,)}, "AttentionUnet": {"channels": (4, 8), "strides": (2,)},
    "BasicUNet": {"features": (4, 4, 8, 8, 8, 4)},
}.items():  # fmt: skip
    case(
        "monai",
        _name,
        lambda m, n=_name, o=_options: getattr(part(m, "networks.nets"), n)(
            spatial_dims=2, in_channels=1, out_channels=2, **o
        ),
        images(32, 1),
    )
case(
    "monai",
    "SegResNet",
    lambda m: part(m, "networks.nets").SegResNet(
        spatial_dims=2, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,)
    ),
    images(16, 1),
)
for _name in ("DiceLoss", "DiceCELoss", "FocalLoss", "GeneralizedDiceLoss"):
    case(
        "monai", _name,
        lambda m, n=_name: Applied(nn.Conv2d(3, 1, 1), loss_of(getattr(m.losses, n)())),
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
        part(m, "transforms.autoregressive").MaskedAffineAutoregressiveTransform(features=4, hidden_features=8),
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
case("e3nn", "Linear", lambda m: part(m, "o3").Linear("4x0e + 2x1o", "2x0e + 1x1o"), vectors(10))
case(
    "e3nn",
    "spherical_harmonics",
    lambda m: Applied(nn.Linear(3, 3), lambda f, x: part(m, "o3").spherical_harmonics([0, 1, 2], f(x), True)),
    vectors(3),
)
for _name in ("GCNConv", "SAGEConv", "GATConv", "GINConv", "GraphConv", "TransformerConv"):
    case(
        "torch_geometric", _name,
        lambda m, n=_name: getattr(part(m, "nn"), n)(*([nn.Linear(4, 4)] if n == "GINConv" else [4, 4])),
        lambda b: (torch.randn(3 * b, 4), torch.stack([torch.arange(3 * b), torch.arange(3 * b).roll(1)])),
    )  # fmt: skip
for _name in ("NTXentLoss", "BarlowTwinsLoss", "VICRegLoss", "NegativeCosineSimilarity", "DCLLoss"):
    case(
        "lightly",
        _name,
        lambda m, n=_name: Applied(
            nn.Linear(6, 4), lambda f, x, y, loss=getattr(part(m, "loss"), n)(): loss(f(x), f(y))
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
        lambda f, x, y: (part(m, "functional").accuracy(f(x), y, task="multiclass", num_classes=3), f(x)),
    ),
    labelled(6, 3),
)
case(
    "pytorch_tabnet",
    "TabNet",
    lambda m: part(m, "tab_network").TabNet(6, 3, n_d=4, n_a=4, n_steps=2, group_attention_matrix=torch.eye(6)),
    lambda b: (torch.randn(8 * b, 6),),
)
