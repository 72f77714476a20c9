"""Models and programs that people train and serve, in small sizes, many of them odd: what `benchmarks/zoo.py` measures.

`ROWS` maps a name to a function of a device that gives a `Task`. Models are built from configurations; nothing is
downloaded. Those of model_zoo.py are rows too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from model_zoo import MODELS
from torch import nn

__all__ = ["ROWS", "Row", "Task"]


@dataclasses.dataclass
class Task:
    """What is compiled, its arguments, and the modules that it computes with.

    mode: "train": a loss of its results is differentiated; "infer": under no_grad; "step": it is a whole step, which
    changes the modules. random: it draws numbers, so that its gradients are not compared. tf32: with TensorFloat-32.
    """

    function: Callable
    args: tuple
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    mode: str = "train"
    modules: list[nn.Module] = dataclasses.field(default_factory=list)
    random: bool = False
    tf32: bool = False

    def __post_init__(self):
        if isinstance(self.function, nn.Module) and not self.modules:
            self.modules = [self.function]


@dataclasses.dataclass(frozen=True)
class Row:
    family: str
    make: Callable[[], Task]
    devices: tuple[str, ...] = ("cpu", "cuda")


ROWS: dict[str, Row] = {}


def row(family: str, name: str, *devices: str) -> Callable[[Callable[[], Task]], Callable[[], Task]]:
    def add(make: Callable[[], Task]) -> Callable[[], Task]:
        ROWS[name] = Row(family, make, devices or ("cpu", "cuda"))
        return make

    return add


def without_dropout(module: nn.Module) -> nn.Module:
    """The module in train mode, without random numbers, which the systems draw in ways of their own."""
    for m in module.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
        elif isinstance(m, (nn.LSTM, nn.GRU, nn.MultiheadAttention)):
            m.dropout = 0.0
    return module.train()


# --- the models of model_zoo.py: trained without dropout, and served
SERVED = ("Llama", "BERT", "ViT", "Mixtral", "Whisper")


def _of_model_zoo(name: str, mode: str) -> Callable[[], Task]:
    def make() -> Task:
        module, args, kwargs = MODELS[name]()  # in eval mode
        return Task(module, args, kwargs, mode)

    return make


for _name in MODELS:
    ROWS[_name] = Row("language and vision models", _of_model_zoo(_name, "train"))
for _name in SERVED:
    if _name in MODELS:
        ROWS[f"{_name}, served"] = Row("serving", _of_model_zoo(_name, "infer"))


# --- more of transformers
def _configured(model: str, config: str, inputs: Callable[[], dict], **settings) -> Callable[[], Task]:
    def make() -> Task:
        import transformers

        transformers.logging.set_verbosity_error()
        configuration = getattr(transformers, config)(**settings)
        for name, value in vars(configuration).items():
            if "drop" in name and isinstance(value, float):
                setattr(configuration, name, 0.0)
        return Task(without_dropout(getattr(transformers, model)(configuration)), (), inputs())

    return make


def _picture(size: int, channels: int = 3) -> Callable[[], dict]:
    return lambda: {"pixel_values": torch.randn(2, channels, size, size)}


def _text(length: int = 23, vocabulary: int = 131) -> Callable[[], dict]:
    return lambda: {"input_ids": torch.randint(4, vocabulary, (2, length))}


_DECODER = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_TRANSFORMERS = {
    "ConvNeXt": ("convolutional", "ConvNextModel", "ConvNextConfig", _picture(36),
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1], "drop_path_rate": 0.0}),
    "EfficientNet": ("convolutional", "EfficientNetModel", "EfficientNetConfig", _picture(64),
        {"width_coefficient": 0.5, "depth_coefficient": 0.3, "image_size": 64, "hidden_dim": 640,
         "drop_connect_rate": 0.0}),
    "ResNet": ("convolutional", "ResNetModel", "ResNetConfig", _picture(64),
        {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}),
    "Swin": ("vision", "SwinModel", "SwinConfig", _picture(32),
        {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
         "drop_path_rate": 0.0}),
    "SegFormer": ("vision", "SegformerForSemanticSegmentation", "SegformerConfig", _picture(64),
        {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 48, "drop_path_rate": 0.0}),
    "wav2vec2": ("audio", "Wav2Vec2Model", "Wav2Vec2Config", lambda: {"input_values": torch.randn(2, 1601)},
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
         "conv_dim": [32, 32, 32], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3],
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
         "layerdrop": 0.0}),
    "Mamba-2": ("state space", "Mamba2ForCausalLM", "Mamba2Config", _text(32),
        {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8,
         "head_dim": 16, "n_groups": 1, "chunk_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "Qwen2-MoE, shared experts": ("mixture of experts", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _text(),
        _DECODER | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                    "shared_expert_intermediate_size": 96}),
    "OLMoE": ("mixture of experts", "OlmoeForCausalLM", "OlmoeConfig", _text(),
        _DECODER | {"num_experts": 6, "num_experts_per_tok": 2}),
    "Gemma 3": ("language and vision models", "Gemma3ForCausalLM", "Gemma3TextConfig", _text(),
        _DECODER | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "DINOv2": ("vision", "Dinov2Model", "Dinov2Config", _picture(42),
        {"image_size": 42, "patch_size": 14, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "PatchTST": ("time series", "PatchTSTModel", "PatchTSTConfig",
        lambda: {"past_values": torch.randn(3, 33, 5)},
        {"num_input_channels": 5, "context_length": 33, "patch_length": 6, "patch_stride": 3, "d_model": 32,
         "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}),
}  # fmt: skip
if find_spec("transformers"):
    for _name, (_family, _model, _config, _make_inputs, _settings) in _TRANSFORMERS.items():
        ROWS[_name] = Row(_family, _configured(_model, _config, _make_inputs, **_settings))


# --- convolutional and diffusion models
class ResidualConvolution(nn.Module):
    def __init__(self, inner: int, outer: int, time: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(4, inner), nn.GroupNorm(4, outer)
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.time = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x, t):
        y = self.first(F.silu(self.norm_1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norm_2(y)))


def positions(t: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of times, (batch, width)."""
    angles = t[:, None] * torch.exp(torch.arange(width // 2, dtype=t.dtype, device=t.device) * (-8.0 / width))
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class UNet(nn.Module):
    """The U-Net of denoising diffusion (Ho, Jain, Abbeel 2020), two levels."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.width, self.begin = width, nn.Conv2d(3, width, 3, padding=1)
        self.down, self.middle = (
            ResidualConvolution(width, 2 * width, width),
            ResidualConvolution(2 * width, 2 * width, width),
        )
        self.up, self.end = ResidualConvolution(3 * width, width, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, t):
        t = positions(t, self.width)
        x = self.begin(x)
        y = self.middle(self.down(F.avg_pool2d(x, 2), t), t)
        y = F.interpolate(y, scale_factor=2, mode="nearest")
        return self.end(self.up(torch.cat((x, y), dim=1), t))


class DiTBlock(nn.Module):
    """A block with adaptive layer norm (Peebles, Xie 2022)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.condition = heads, nn.Linear(width, 6 * width)
        self.norm_1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x, c):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.condition(F.silu(c))[:, None].chunk(6, dim=-1)
        y = self.norm_1(x) * (1 + scale_1) + shift_1
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate_1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    def __init__(self, width: int = 48, layers: int = 2):
        super().__init__()
        self.width, self.patches = width, nn.Conv2d(4, width, 2, stride=2)
        self.blocks = nn.ModuleList(DiTBlock(width, max(4, width // 64)) for _ in range(layers))
        self.end = nn.Linear(width, 16)

    def forward(self, x, t):
        x, c = self.patches(x).flatten(2).transpose(1, 2), positions(t, self.width)
        for block in self.blocks:
            x = block(x, c)
        return self.end(x)


class Autoencoder(nn.Module):
    """A variational autoencoder; the noise is an argument."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1)
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x, noise):
        mean, spread = self.encoder(x).chunk(2, dim=1)
        z = mean + noise * torch.exp(0.5 * spread)
        divergence = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()
        return F.mse_loss(self.decoder(z), x) + divergence


row("diffusion", "U-Net with group norms")(lambda: Task(UNet(), (torch.randn(2, 3, 24, 24), torch.rand(2) * 1000)))
row("diffusion", "DiT")(lambda: Task(DiT(), (torch.randn(2, 4, 18, 18), torch.rand(2) * 1000)))
row("diffusion", "DiT, served")(lambda: Task(DiT(), (torch.randn(2, 4, 18, 18), torch.rand(2) * 1000), mode="infer"))
row("convolutional", "variational autoencoder")(
    lambda: Task(Autoencoder().train(), (torch.randn(3, 3, 28, 28), torch.randn(3, 16, 7, 7)))
)


# --- recurrent models
class Recurrent(nn.Module):
    def __init__(self, kind: type, vocabulary: int = 131, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width - 16)
        self.layers = kind(width - 16, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.layers(self.embedding(tokens))[0]).flatten(0, 1), tokens.flatten())


class CellLoop(nn.Module):
    """An LSTM written as a loop over positions."""

    def __init__(self, inputs: int = 24, width: int = 32):
        super().__init__()
        self.inputs, self.state = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x):
        gates, results = self.inputs(x), []
        hidden = cell = x.new_zeros(x.shape[0], self.state.in_features)
        for i in range(x.shape[1]):
            a, b, c, d = (gates[:, i] + self.state(hidden)).chunk(4, dim=-1)
            cell = torch.sigmoid(a) * cell + torch.sigmoid(b) * torch.tanh(c)
            hidden = torch.sigmoid(d) * torch.tanh(cell)
            results.append(hidden)
        return torch.stack(results, dim=1)


row("recurrent", "LSTM")(lambda: Task(Recurrent(nn.LSTM), (torch.randint(131, (3, 37)),)))
row("recurrent", "GRU")(lambda: Task(Recurrent(nn.GRU), (torch.randint(131, (3, 37)),)))
row("recurrent", "LSTM as a loop")(lambda: Task(CellLoop(), (torch.randn(4, 48, 24),)))


# --- recommenders, graphs, retrieval
class DLRM(nn.Module):
    """Dense features, embedding bags and their products (Naumov et al. 2019)."""

    def __init__(self, tables: int = 5, rows: int = 1009, width: int = 16):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(i, o) for bag, i, o in zip(self.tables, indices, offsets))], dim=1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat((x, products[:, self.pairs[0], self.pairs[1]]), dim=1)).squeeze(-1)


class GraphNetwork(nn.Module):
    """Two layers of message passing over edges, added up by index_add."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))

    def forward(self, nodes, sources, targets):
        for message, update in zip(self.messages, self.updates):
            sent = F.relu(message(torch.cat((nodes[sources], nodes[targets]), dim=-1)))
            received = torch.zeros_like(nodes).index_add(0, targets, sent)
            nodes = F.relu(update(torch.cat((nodes, received), dim=-1)))
        return nodes


class Towers(nn.Module):
    """Two towers and the contrastive loss of CLIP."""

    def __init__(self, width: int = 48):
        super().__init__()
        self.left = nn.Sequential(nn.EmbeddingBag(307, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 32))
        self.right = nn.Sequential(nn.Linear(57, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, texts, features):
        a, b = F.normalize(self.left(texts), dim=-1), F.normalize(self.right(features), dim=-1)
        logits = a @ b.t() * self.scale.exp()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@row("recommenders and graphs", "DLRM")
def _dlrm() -> Task:
    bags, count, tables = 33, 4, 5
    indices = [torch.randint(1009, (bags * count,)) for _ in range(tables)]
    return Task(DLRM(), (torch.randn(bags, 13), indices, [torch.arange(0, bags * count, count)] * tables))


@row("recommenders and graphs", "graph network")
def _graph() -> Task:
    return Task(GraphNetwork(), (torch.randn(101, 32), torch.randint(101, (507,)), torch.randint(101, (507,))))


row("recommenders and graphs", "contrastive towers")(
    lambda: Task(Towers(), (torch.randint(307, (33, 7)), torch.randn(33, 57)))
)


# --- whole steps, LoRA, losses
class LoRA(nn.Module):
    """A frozen layer with a trained product of low rank beside it (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features)

    def forward(self, x):
        return self.layer(x) + 2.0 * self.up(self.down(x))


@row("fine-tuning and steps", "Llama with LoRA")
def _lora() -> Task:
    module, args, kwargs = MODELS["litgpt_model llama2-like"]()
    module.requires_grad_(False)
    for block in module.modules():
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(block, LoRA):
                setattr(block, name, LoRA(child))
    return Task(module, args, kwargs)


def _mlp() -> nn.Module:
    first, second = [nn.Linear(57, 129), nn.GELU(), nn.LayerNorm(129)], [nn.Linear(129, 129), nn.GELU()]
    return nn.Sequential(*first, *second, nn.Linear(129, 31))


def _step_with(optimizer_of: Callable, model_of: Callable[[], nn.Module] = _mlp) -> Callable[[], Task]:
    def make() -> Task:
        model = model_of()
        optimizer = optimizer_of(model.parameters())

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Task(step, (torch.randn(33, 57), torch.randint(31, (33,))), mode="step", modules=[model])

    return make


def _matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(57, 129, bias=False), nn.GELU(), nn.Linear(129, 31, bias=False))


for _name, _optimizer in {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}.items():
    ROWS[f"step with {_name}"] = Row("fine-tuning and steps", _step_with(_optimizer))
if hasattr(torch.optim, "Muon"):
    ROWS["step with Muon"] = Row("fine-tuning and steps", _step_with(lambda p: torch.optim.Muon(p, lr=1e-2), _matrices))


def ppo_loss(logits, values, actions, old, advantages, returns, mask):
    """The clipped objective of proximal policy optimization, with entropy and value losses."""
    logs = torch.log_softmax(logits, dim=-1)
    chosen = logs.gather(-1, actions[..., None]).squeeze(-1)
    ratio = torch.exp(chosen - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    entropy = -(logs.exp() * logs).sum(-1)
    loss = -gain + 0.5 * (values - returns).pow(2) - 0.01 * entropy
    return (loss * mask).sum() / mask.sum()


def dpo_loss(chosen, rejected, chosen_reference, rejected_reference):
    """Direct preference optimization, of sums of log-probabilities."""
    return -F.logsigmoid(0.1 * ((chosen - chosen_reference) - (rejected - rejected_reference))).mean()


@row("losses and pointwise", "PPO loss")
def _ppo() -> Task:
    def some():
        return torch.randn(7, 33)

    logits, values = torch.randn(7, 33, 131, requires_grad=True), some().requires_grad_()
    actions = torch.randint(131, (7, 33))
    return Task(ppo_loss, (logits, values, actions, some() - 4, some(), some(), (some() > -1).float()))


row("losses and pointwise", "DPO loss")(
    lambda: Task(dpo_loss, tuple(torch.randn(1021, requires_grad=i < 2) for i in range(4)))
)


def columns(x, y):
    """Pointwise work and a softmax over columns, of sizes that nothing divides."""
    return (torch.softmax(torch.tanh(x) * y + x.sin(), dim=0) * x).sum(dim=1)


row("losses and pointwise", "pointwise and columns, odd sizes")(
    lambda: Task(columns, (torch.randn(411, 307, requires_grad=True), torch.randn(411, 307)))
)


def _autocast(name: str, dtype: torch.dtype, *devices: str) -> None:
    def make() -> Task:
        module, args, kwargs = MODELS["nanoGPT"]()

        class Cast(nn.Module):
            def __init__(self):
                super().__init__()
                self.module = module

            def forward(self, tokens):
                with torch.autocast(tokens.device.type, dtype):
                    return self.module(tokens)

        return Task(Cast(), args, kwargs)

    ROWS[name] = Row("types", make, devices or ("cpu", "cuda"))


_autocast("nanoGPT, bfloat16 autocast", torch.bfloat16)
_autocast("nanoGPT, float16 autocast", torch.float16, "cuda")


@row("types", "step with GradScaler", "cuda")
def _scaled() -> Task:
    model = _mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-2), torch.amp.GradScaler()

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Task(step, (torch.randn(33, 57), torch.randint(31, (33,))), mode="step", modules=[model])
