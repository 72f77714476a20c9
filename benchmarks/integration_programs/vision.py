"""Training with timm and diffusers."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .common import Compile, Run, classified, program, tokens, trained, weights


# --- timm
def backbone(name: str, size: int = 32, **options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    sized = {"img_size": size} if re.match("vit|swin|mixer|deit", name) else {}
    return timm.create_model(name, num_classes=5, **sized | options)


def images(count: int = 2, size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 3, size, size, generator=drawn), torch.tensor([1, 2])) for _ in range(count)]


def vision(name: str, size: int = 32, layout: torch.memory_format = torch.contiguous_format, **options: Any) -> Run:
    def run(compiled: Compile) -> Any:
        model = compiled(backbone(name, size, **options).to(memory_format=layout))
        data = [(x.to(memory_format=layout), y) for x, y in images(size=size)]
        torch.manual_seed(3)
        losses = trained(model, torch.optim.SGD(model.parameters(), 0.01), classified, data)
        again = backbone(name, size, **options)
        again.load_state_dict(model.state_dict())
        with torch.no_grad():
            return losses, weights(model), model.eval()(data[0][0]), again.eval()(data[0][0])

    return run


for _name in ("resnet10t", "efficientnet_b0", "convnext_atto", "mobilenetv3_small_050", "mixer_s32_224", "regnetx_002",
              "densenet121", "vit_tiny_patch16_224"):  # fmt: skip
    program("timm", _name)(vision(_name))
program("timm", "swin_tiny_patch4_window7_224")(vision("swin_tiny_patch4_window7_224", 56))
program("timm", "resnet10t, channels last")(vision("resnet10t", layout=torch.channels_last))
program("timm", "stochastic depth and dropout")(
    vision("vit_tiny_patch16_224", drop_path_rate=0.2, proj_drop_rate=0.1, depth=3)
)


def recipe(dtype: torch.dtype | None = None, **choices: Any) -> Run:
    """timm's training script: mixup, soft labels, a schedule, clipping, an average of the weights."""

    def run(compiled: Compile) -> Any:
        import numpy as np
        import timm
        from timm.data import Mixup
        from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
        from timm.optim import create_optimizer_v2
        from timm.scheduler import create_scheduler_v2
        from timm.utils import ModelEmaV3, NativeScaler, dispatch_clip_grad

        mixes = choices.get("mixes", True)
        model = compiled(backbone("vit_tiny_patch16_224", depth=2, drop_path_rate=0.1))
        if choices.get("checkpoints"):
            model.set_grad_checkpointing(True)
        np.random.seed(0)
        mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5, label_smoothing=0.1) if mixes else None
        loss_of = SoftTargetCrossEntropy() if mixes else LabelSmoothingCrossEntropy(0.1)
        optimizer = create_optimizer_v2(
            model, choices.get("optimizer", "adamw"), lr=1e-3, weight_decay=0.05, layer_decay=choices.get("decay")
        )
        schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, warmup_epochs=1)
        average, scaler, losses = ModelEmaV3(model, decay=0.5), NativeScaler(device="cpu"), []
        torch.manual_seed(3)
        for step, batch in enumerate(images(3)):
            x, y = mixup(*batch) if mixup is not None else batch
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(model(x), y)
            optimizer.zero_grad()
            if choices.get("scales"):
                scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            else:
                loss.backward()
                dispatch_clip_grad(model.parameters(), 0.02, choices.get("clip", "norm"))
                optimizer.step()
            schedule.step(step + 1)
            average.update(model, step=step)
            losses.append(loss.item())
        correct = timm.utils.accuracy(average.module(images()[0][0]), images()[0][1], topk=(1, 3))
        return losses, weights(model), weights(average.module), [float(a) for a in correct]

    return run


program("timm", "a recipe with mixup and an average of the weights")(recipe())
program("timm", "a recipe with layer decay and LAMB")(recipe(mixes=False, optimizer="lamb", decay=0.7))
program("timm", "a recipe with adaptive clipping and checkpoints")(recipe(clip="agc", checkpoints=True))
program("timm", "a recipe in bf16 with a gradient scaler", "bf16")(recipe(torch.bfloat16, scales=True))


@program("timm", "features of stages, a new head, a teacher")
def distilled(compiled: Compile) -> Any:
    import timm

    torch.manual_seed(0)
    teacher = compiled(timm.create_model("resnet10t", features_only=True, out_indices=(2, 3)).eval())
    student = backbone("resnet10t")
    student.reset_classifier(3)
    for name, parameter in student.named_parameters():
        parameter.requires_grad = not name.startswith("conv1")
    student = compiled(student)
    optimizer, losses = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], 0.01), []
    for x, y in images():
        with torch.no_grad():
            wanted = teacher(x)
        features = student.forward_features(x)
        scores = student(x)
        loss = F.cross_entropy(scores, y) + F.mse_loss(features.mean(1), wanted[1].mean(1)) * 0.1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(student)


# --- diffusers
def unet(kind: str, **options: Any) -> nn.Module:
    import diffusers

    torch.manual_seed(0)
    return getattr(diffusers, kind)(**options)


def diffusion(kind: str, dtype: torch.dtype | None = None, averages: bool = False, **options: Any) -> Run:
    def run(compiled: Compile) -> Any:
        import diffusers
        from diffusers.training_utils import EMAModel, compute_snr

        model = compiled(unet(kind, **options))
        schedule = diffusers.DDPMScheduler(num_train_timesteps=10)
        drawn = torch.Generator().manual_seed(0)
        more: dict[str, Any] = {"class_labels": torch.tensor([1, 2])} if kind == "DiTTransformer2DModel" else {}
        if kind == "UNet2DConditionModel":
            more["encoder_hidden_states"] = torch.randn(2, 5, 16, generator=drawn)
        average = EMAModel(model.parameters(), decay=0.5) if averages else None

        def loss_of(model, noise):
            step = torch.tensor([3, 7])
            noisy = schedule.add_noise(torch.ones_like(noise), noise, step)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                predicted = model(noisy, step, **more).sample[:, : noise.shape[1]]
            weight = compute_snr(schedule, step).clamp(max=5.0) / compute_snr(schedule, step)
            return (F.mse_loss(predicted.float(), noise, reduction="none").mean((1, 2, 3)) * weight).mean()

        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-4), []
        for _ in range(2):
            noise = torch.randn(2, 4, 16, 16, generator=drawn)
            losses += trained(model, optimizer, loss_of, [noise])
            if average is not None:
                average.step(model.parameters())
        if average is not None:
            average.store(model.parameters())
            average.copy_to(model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return losses, weights(getattr(diffusers, kind).from_pretrained(folder))

    return run


_UNET = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 32), "layers_per_block": 1,
}  # fmt: skip
_PLAIN = _UNET | {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_CONDITIONED = _UNET | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16, "attention_head_dim": 8,
}  # fmt: skip
_DIT = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 16,
    "norm_num_groups": 1,
}  # fmt: skip
program("diffusers", "UNet2DModel")(diffusion("UNet2DModel", **_PLAIN))
program("diffusers", "UNet2DModel, an average of the weights")(diffusion("UNet2DModel", averages=True, **_PLAIN))
program("diffusers", "UNet2DModel, bf16", "bf16")(diffusion("UNet2DModel", dtype=torch.bfloat16, **_PLAIN))
program("diffusers", "UNet2DConditionModel")(diffusion("UNet2DConditionModel", **_CONDITIONED))
program("diffusers", "DiTTransformer2DModel")(diffusion("DiTTransformer2DModel", **_DIT))


@program("diffusers", "LoRA of a conditioned UNet, gradient checkpointing")
def diffusion_adapter(compiled: Compile) -> Any:
    import peft

    model = unet("UNet2DConditionModel", **_CONDITIONED)
    model.requires_grad_(False)
    model.enable_gradient_checkpointing()
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights="gaussian", target_modules=["to_k", "to_q", "to_v"]))
    model = compiled(model)
    context = torch.linspace(-1, 1, 160).view(2, 5, 16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def loss_of(model, noise):
        return F.mse_loss(model(noise, torch.tensor([3, 7]), encoder_hidden_states=context).sample, noise)

    drawn = torch.Generator().manual_seed(0)
    losses = trained(model, optimizer, loss_of, [torch.randn(2, 4, 16, 16, generator=drawn) for _ in range(2)])
    return losses, peft.get_peft_model_state_dict(model)


@program("diffusers", "a pipeline of a compiled UNet")
def sampled_images(compiled: Compile) -> Any:
    import diffusers

    model = compiled(unet("UNet2DModel", **_PLAIN).eval())
    results = []
    for scheduler in (diffusers.DDPMScheduler(num_train_timesteps=10), diffusers.DDIMScheduler(num_train_timesteps=10)):
        kind = diffusers.DDPMPipeline if type(scheduler) is diffusers.DDPMScheduler else diffusers.DDIMPipeline
        pipeline = kind(model, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        noise = torch.Generator().manual_seed(0)
        results.append(torch.tensor(pipeline(2, generator=noise, num_inference_steps=3, output_type="np").images))
    return results


@program("diffusers", "text to an image: CLIP, UNet and decoder compiled")
def stable_diffusion(compiled: Compile) -> Any:
    import diffusers
    import transformers

    torch.manual_seed(0)
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            eos_token_id=2,
        )
    )  # fmt: skip
    decoder = unet(
        "AutoencoderKL", block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, sample_size=16,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=decoder.eval(), text_encoder=compiled(text.eval()), tokenizer=None,
        unet=compiled(unet("UNet2DConditionModel", **_CONDITIONED).eval()), safety_checker=None,
        feature_extractor=None, scheduler=diffusers.PNDMScheduler(skip_prk_steps=True), requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.decoder = compiled(pipeline.vae.decoder)
    with torch.no_grad():
        context = pipeline.text_encoder(tokens(1, 7))[0]
    return torch.tensor(
        pipeline(
            prompt_embeds=context, negative_prompt_embeds=-context, height=32, width=32, num_inference_steps=3,
            generator=torch.Generator().manual_seed(0), output_type="np",
        ).images
    )  # fmt: skip
