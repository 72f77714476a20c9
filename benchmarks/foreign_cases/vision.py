"""Images, points and volumes: models, layers and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign_cases.common import Applied, case, images, labelled, part, vectors

# fmt: off
case("point_transformer_pytorch", "PointTransformerLayer",
     lambda m: m.PointTransformerLayer(dim=8, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2),
     lambda b: (torch.randn(b, 6, 8), torch.randn(b, 6, 3)))
case("point_transformer_pytorch", "of neighbours",
     lambda m: m.PointTransformerLayer(dim=8, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2, num_neighbors=3),
     lambda b: (torch.randn(b, 6, 8), torch.randn(b, 6, 3)))
case("point_transformer_pytorch", "MultiheadPointTransformerLayer",
     lambda m: m.MultiheadPointTransformerLayer(dim=8, heads=2, dim_head=4, pos_mlp_hidden_dim=8),
     lambda b: (torch.randn(b, 6, 8), torch.randn(b, 6, 3)))
case("byol_pytorch", "BYOL", lambda m: m.BYOL(_small_net(), image_size=16, hidden_layer="1", projection_size=8,
     projection_hidden_size=16, augment_fn=nn.Identity(), augment_fn2=nn.Identity()), images(16))
case("byol_pytorch", "SimSiam", lambda m: m.BYOL(_small_net(), image_size=16, hidden_layer="1", projection_size=8,
     projection_hidden_size=16, augment_fn=nn.Identity(), augment_fn2=nn.Identity(), use_momentum=False), images(16))


def _small_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.Flatten(), nn.Linear(128, 4))


case("denoising_diffusion_pytorch", "Unet",
     lambda m: Applied(m.Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2),
        lambda f, x: f(x, torch.arange(len(x)))), images(8))
case("denoising_diffusion_pytorch", "GaussianDiffusion",
     lambda m: m.GaussianDiffusion(m.Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2), image_size=8,
        timesteps=10), images(8))
case("denoising_diffusion_pytorch", "GaussianDiffusion1D",
     lambda m: m.GaussianDiffusion1D(m.Unet1D(dim=8, dim_mults=(1, 2), channels=2, attn_dim_head=4, attn_heads=2),
        seq_length=8, timesteps=10), vectors(2, 8))
case("denoising_diffusion_pytorch", "self conditioned",
     lambda m: m.GaussianDiffusion(m.Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2, self_condition=True),
        image_size=8, timesteps=10), images(8))
case("efficientnet_pytorch", "EfficientNet", lambda m: m.EfficientNet.from_name("efficientnet-b0", {"num_classes": 4}),
     images(64))
case("efficientnet_pytorch", "drop_connect", lambda m: Applied(nn.Conv2d(3, 4, 1), lambda f, x: part(m, "utils").
     drop_connect(f(x), 0.5, f.training)), images(6))
for _name in ("resnet18", "squeezenet1_1", "bninception"):
    case("pretrainedmodels", _name, lambda m, n=_name: _headless(m.__dict__[n](num_classes=1000, pretrained=None)),
         images(64))


def _headless(model: nn.Module) -> nn.Module:
    return Applied(model, lambda f, x: f.features(x))


case("lpips", "alex", lambda m: m.LPIPS(pretrained=False, pnet_rand=True, net="alex", verbose=False),
     lambda b: (torch.randn(b, 3, 64, 64), torch.randn(b, 3, 64, 64)))
case("lpips", "squeeze", lambda m: m.LPIPS(pretrained=False, pnet_rand=True, net="squeeze", verbose=False,
     spatial=True),
     lambda b: (torch.randn(b, 3, 64, 64), torch.randn(b, 3, 64, 64)))
for _name, _options in {"SSIM": {"window_size": 5}, "MS_SSIM": {"window_size": 3}, "TV": {}, "PSNR": {}, "GMSD": {},
                        "MS_GMSD": {}, "HaarPSI": {}, "MDSI": {}, "FSIM": {}, "VSI": {}}.items():
    case("piqa", _name, lambda m, n=_name, o=_options: Applied(nn.Conv2d(3, 3, 1),
         lambda f, x, *y, loss=getattr(m, n)(**o): loss(f(x).sigmoid(), *y)), 
         lambda b, n=_name: (torch.randn(b, 3, 64, 64), *([] if n == "TV" else [torch.rand(b, 3, 64, 64)])))


case("focal_loss", "FocalLoss", lambda m: Applied(nn.Linear(6, 4), lambda f, x, y, loss=part(m, "focal_loss").FocalLoss(
     gamma=2.0): loss(f(x).softmax(-1), y)), labelled(6, 4))
case("focal_loss", "with weights", lambda m: Applied(nn.Linear(6, 4), lambda f, x, y,
     loss=part(m, "focal_loss").FocalLoss(gamma=0.7, weights=torch.rand(4)): loss(f(x).softmax(-1), y)), labelled(6, 4))
for _name, _options in {
    "Unet": {"decoder_channels": (16, 8, 8, 4, 4)}, "FPN": {}, "DeepLabV3Plus": {}, "Linknet": {},
    "UnetPlusPlus": {"decoder_channels": (16, 8, 8, 4, 4)},
}.items():
    case("torchseg", _name, lambda m, n=_name, o=_options: getattr(m, n)("resnet18", encoder_weights=None, classes=2,
         **o), images(64))
for _name in ("DiceLoss", "JaccardLoss", "LovaszLoss"):
    case("pytorch_toolbelt", _name, lambda m, n=_name: Applied(nn.Conv2d(3, 1, 1), lambda f, x, y,
         loss=getattr(part(m, "losses"), n)(**({} if n == "LovaszLoss" else {"mode": "binary"})): loss(
         f(x) if n != "LovaszLoss" else f(x).sigmoid().repeat(1, 2, 1, 1), y if n != "LovaszLoss" else y[:, 0].long())),
         lambda b: (torch.randn(b, 3, 8, 8), (torch.rand(b, 1, 8, 8) > 0.5).float()))
for _name in ("BinaryFocalLoss", "SoftBCEWithLogitsLoss", "BalancedBCEWithLogitsLoss", "LogCoshLoss", "WingLoss",
              "BinaryLovaszLoss", "QualityFocalLoss"):
    case("pytorch_toolbelt", _name, lambda m, n=_name: Applied(nn.Conv2d(3, 1, 1), lambda f, x, y,
         loss=getattr(part(m, "losses"), n)(): loss(f(x), y)),
         lambda b: (torch.randn(b, 3, 8, 8), (torch.rand(b, 1, 8, 8) > 0.5).float()))
for _name, _options in {"CoordConv": {"kernel_size": 3}, "ABN": {}, "ChannelSpatialGate2d": {}, "GlobalAvgPool2d": {},
                        "GeneralizedMeanPooling2d": {}, "DropBlock2D": {"drop_prob": 0.3, "block_size": 3}}.items():
    case("pytorch_toolbelt", _name, lambda m, n=_name, o=_options: nn.Sequential(nn.Conv2d(3, 8, 3),
         getattr(part(m, "modules"), n)(*{"CoordConv": (8, 4), "ABN": (8,), "ChannelSpatialGate2d": (8,)}.get(n, ()),
         **o)), images(8))
case("pytorch_revgrad", "RevGrad", lambda m: nn.Sequential(nn.Linear(6, 4), m.RevGrad(alpha=0.5), nn.Linear(4, 2)),
     vectors(6))
for _name in ("NetTwo", "MLP"):
    case("complexPyTorch", _name, lambda m, n=_name: Applied(_complex(m, n), lambda f, x:
         f(torch.complex(x, x.flip(-1))).abs()), images(8) if _name == "NetTwo" else vectors(6))


def _complex(m: Any, name: str) -> nn.Module:
    layers = part(m, "complexLayers")
    if name == "MLP":
        return nn.Sequential(layers.ComplexLinear(6, 8), layers.ComplexReLU(), layers.NaiveComplexBatchNorm1d(8),
            layers.ComplexLinear(8, 2))
    return nn.Sequential(layers.ComplexConv2d(3, 4, 3), layers.ComplexBatchNorm2d(4), layers.ComplexReLU(),
        layers.ComplexMaxPool2d(2))


for _name in ("x3d", "resnet", "csn"):
    case("pytorchvideo", _name, lambda m, n=_name: _video(m, n), lambda b: (torch.randn(b, 3, 4, 32, 32),))


def _video(m: Any, name: str) -> nn.Module:
    models = part(m, f"models.{name}")
    if name == "x3d":
        return models.create_x3d(input_clip_length=4, input_crop_size=32, model_num_class=4, width_factor=0.5,
            depth_factor=0.3, dropout_rate=0.0)
    if name == "resnet":
        return models.create_resnet(model_num_class=4, model_depth=50, stem_dim_out=8, dropout_rate=0.0,
            head_pool_kernel_size=(4, 1, 1))
    return models.create_csn(model_num_class=4, model_depth=50, stem_dim_out=8, dropout_rate=0.0,
        head_pool_kernel_size=(1, 1, 1))


case("pytorchvideo", "MultiScaleBlock", lambda m: Applied(part(m, "layers.attention").MultiScaleBlock(8, 8, 2),
     lambda f, x: f(x, [1, 2, 3])[0]), vectors(7, 8))
case("open_clip", "CLIP", lambda m: _clip(m, "CLIP"), lambda b: (torch.randn(b, 3, 32, 32),
     torch.randint(1, 60, (b, 8))))
case("open_clip", "CustomTextCLIP", lambda m: _clip(m, "CustomTextCLIP"), lambda b: (torch.randn(b, 3, 32, 32),
     torch.randint(1, 60, (b, 8))))
case("open_clip", "ClipLoss", lambda m: Applied(nn.Linear(6, 4), lambda f, x, y, loss=m.ClipLoss(): loss(f(x), f(y),
     torch.tensor(2.0))), lambda b: (torch.randn(b, 6), torch.randn(b, 6)))
case("open_clip", "SigLipLoss", lambda m: Applied(nn.Linear(6, 4), lambda f, x, y, loss=part(m, "loss").
     SigLipLoss(): loss(f(x), f(y), torch.tensor(2.0), torch.tensor(-1.0))),
     lambda b: (torch.randn(b, 6), torch.randn(b, 6)))


def _clip(m: Any, name: str) -> nn.Module:
    return getattr(part(m, "model"), name)(embed_dim=8, vision_cfg={"layers": 1, "width": 16, "head_width": 8,
        "patch_size": 8, "image_size": 32}, text_cfg={"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2,
        "layers": 1})


for _name in ("BNMLoss", "BatchSpectralLoss", "EntropyLoss", "DiversityLoss", "ConcatSoftmax", "MaxNormalizer",
              "GradientReversal", "L2PreservedDropout", "AdaptiveFeatureNorm"):
    case("pytorch_adapt", _name, lambda m, n=_name: Applied(nn.Linear(6, 4), lambda f, x,
         layer=getattr(part(m, "layers"), n)(*([0.5] if n == "AdaptiveFeatureNorm" else [])): layer(f(x))), vectors(6))
for _name in ("CORALLoss", "MCDLoss", "MMDLoss", "MeanDistLoss", "SlicedWasserstein"):
    case("pytorch_adapt", _name, lambda m, n=_name: Applied(nn.Linear(6, 4), lambda f, x, y,
         layer=getattr(part(m, "layers"), n)(*([4] if n == "SlicedWasserstein" else [])): layer(f(x), f(y))),
         lambda b: (torch.randn(b, 6), torch.randn(b, 6)))
for _name, _options in {"DenseNet": {"block_config": (2, 2)}, "DenseNet with dropout": {"block_config": (2, 2, 2),
                        "drop_rate": 0.2}}.items():
    case("torchxrayvision", _name, lambda m, o=_options: part(m, "models").DenseNet(num_classes=4, growth_rate=4,
         num_init_features=8, in_channels=1, **o), images(64, 1))
