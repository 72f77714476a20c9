"""Rewritings of the literature as rules, on models that they were not written for: results and gradients are eager's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder import rule

MATRIX, VECTOR = torch.empty(3, 4), torch.empty(4)

# ------------------------------------------------------------------------------------------------------------- the rules


# T. Dao et al. 2022, "FlashAttention": the weights are never materialized
def attention(q, k, v, scale: float):
    return torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v


FLASH = rule(attention, lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale))


def attention_with_mask(q, k, v, mask, scale: float):
    return torch.softmax(q @ k.transpose(-2, -1) * scale + mask, -1) @ v


FLASH_WITH_MASK = rule(
    attention_with_mask, lambda q, k, v, mask, scale: F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
)


# B. Zhang, R. Sennrich 2019, "Root Mean Square Layer Normalization"
def rms_norm(x, weight, eps: float):
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


RMS = rule(rms_norm, lambda x, w, eps: F.rms_norm(x, w.shape, w, eps), examples=[MATRIX, VECTOR, 1e-6])


# D. Hendrycks, K. Gimpel 2016, "Gaussian Error Linear Units", by the tanh
def gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


GELU = rule(gelu, lambda x: F.gelu(x, approximate="tanh"))

# P. Ramachandran et al. 2017, "Searching for Activation Functions": swish
SWISH = rule(lambda x: x * torch.sigmoid(x), F.silu, name="swish")


# B. Jacob et al. 2018, "Quantization and Training of Neural Networks ...": batch norms folded into convolutions
def normalized_convolution(x, kernel, mean, var, weight, bias, eps: float):
    return F.batch_norm(F.conv2d(x, kernel, None, 1, 1), mean, var, weight, bias, False, 0.1, eps)


def folded(x, kernel, mean, var, weight, bias, eps):
    scale = weight * torch.rsqrt(var + eps)
    return F.conv2d(x, kernel * scale[:, None, None, None], bias - mean * scale, 1, 1)


FOLDED = rule(
    normalized_convolution, folded, examples=[torch.empty(1, 2, 8, 8), torch.empty(4, 2, 3, 3), *[VECTOR] * 4, 1e-5]
)


# J. Bridle 1990: the negative logarithm of the chosen probability, and the log-sum-exp that does not overflow
def picked(logits, target):
    return -torch.log(torch.softmax(logits, -1)).gather(-1, target.unsqueeze(-1)).squeeze(-1).mean()


PICKED = rule(picked, F.cross_entropy, examples=[MATRIX, torch.zeros(3, dtype=torch.int64)])


# A. Katharopoulos et al. 2020, "Transformers are RNNs": no matrix of all pairs where there are more tokens than features
def linear_attention(q, k, v):
    return (q @ k.transpose(-2, -1)) @ v


LINEAR = rule(linear_attention, lambda q, k, v: q @ (k.transpose(-2, -1) @ v), cheaper=True)


# squared distances by one product, as k-means and kernel methods compute them: no tensor of all differences
def distances(x, y):
    return (x[:, None] - y).pow(2).sum(-1)


DISTANCES = rule(
    distances,
    lambda x, y: x.pow(2).sum(-1, keepdim=True) + y.pow(2).sum(-1) - 2 * (x @ y.mT),
    examples=[MATRIX, torch.empty(5, 4)],
)


# E. Hu et al. 2021, "LoRA": without gradients an adapter is part of the weight where there are many rows
def adapted(x, w, a, b, scale: float):
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * scale


MERGED = rule(
    adapted,
    lambda x, w, a, b, scale: F.linear(x, w + (b @ a) * scale),
    lambda x, w, a, b, scale, *, match: not match.outputs[0].requires_grad and x.numel() > w.numel(),
    examples=[MATRIX, torch.empty(5, 4), torch.empty(2, 4), torch.empty(5, 2), 0.5],
)


# T. Dettmers et al. 2022, "LLM.int8()": the scales of a weight's rows multiply the result, which is smaller
def scaled_weight(x, q, scale):
    return F.linear(x, q.to(x.dtype) * scale.unsqueeze(1))


INT8 = rule(
    scaled_weight,
    lambda x, q, scale: F.linear(x, q.to(x.dtype)) * scale,
    lambda x, q, scale: x.numel() // x.shape[-1] < q.shape[1],
    examples=[MATRIX, torch.zeros(5, 4, dtype=torch.int8), torch.empty(5)],
)


# N. Shazeer 2020, "GLU Variants Improve Transformer": the two layers of a gate as one product
def gated(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def one_product(x, gate, up):
    gate, up = F.linear(x, torch.cat((gate, up))).chunk(2, -1)
    return F.silu(gate) * up


GATED = rule(gated, one_product, examples=[MATRIX, torch.empty(5, 4), torch.empty(5, 4)])


# J. Ba et al. 2016, "Layer Normalization"
def layer_norm(x, weight, bias, eps: float):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


LAYER_NORM = rule(
    layer_norm, lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps), examples=[MATRIX, VECTOR, VECTOR, 1e-5]
)


# Y. Bengio et al. 2003, "A Neural Probabilistic Language Model": a one-hot vector picks a row of a table
def picked_row(index, table):
    return F.one_hot(index, table.shape[0]).to(table.dtype) @ table


ROWS = rule(picked_row, F.embedding, examples=[torch.zeros(3, dtype=torch.int64), torch.empty(5, 4)])


# A. van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding": of all pairs those that belong
# together
def positives(a, b):
    return (a @ b.mT).diagonal(dim1=-2, dim2=-1)


PAIRS = rule(positives, lambda a, b: (a * b).sum(-1), examples=[MATRIX, torch.empty(3, 4)])


# ------------------------------------------------------------------------------------------------------------ the models


class Residual(nn.Module):
    """As in torchvision's ResNet."""

    def __init__(self, width=4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        for bn in (self.bn1, self.bn2):
            nn.init.uniform_(bn.running_mean, -1, 1)
            nn.init.uniform_(bn.running_var, 0.5, 2)
            nn.init.uniform_(bn.weight)
            nn.init.uniform_(bn.bias)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(out)))


class SqueezeExcitation(nn.Module):
    """As in EfficientNet, with swish written out."""

    def __init__(self):
        super().__init__()
        self.expand, self.squeeze, self.excite = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        x = self.expand(x)
        x = torch.sigmoid(x).mul(x)
        s = self.squeeze(F.adaptive_avg_pool2d(x, 1))
        return x * torch.sigmoid(self.excite(s * s.sigmoid()))


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.prototypes = nn.Linear(6, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        """Prototypical networks: classes by distances to prototypes."""
        difference = self.embed(x)[:, None] - self.prototypes
        return F.log_softmax(-(difference**2).sum(2), -1)


class Perplexity(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 9)

    def forward(self, x, target):
        chances = self.head(x).softmax(dim=1)
        return -chances.log().gather(1, target.unsqueeze(1)).squeeze(1).mean()


class Mixer(nn.Module):
    """Attention without a softmax, by heads."""

    def __init__(self):
        super().__init__()
        self.projections = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.projections(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k) if x.shape[1] < 4 else q.matmul(k.mT)
        return weights.matmul(v).transpose(1, 2).flatten(2)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(*s, bias=False) for s in ((6, 7), (6, 2), (2, 7)))

    def forward(self, x):
        return torch.tanh(self.base(x) + 2.0 * self.up(self.down(x)))


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, (7, 16), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(7) / 100)

    def forward(self, x):
        weight = self.scale[:, None] * self.q.to(x.dtype)
        return F.linear(x, weight).relu()


class Normalized(nn.Module):
    """A feed-forward layer of BERT, with its norm as in the first implementation."""

    def __init__(self, width=8):
        super().__init__()
        self.intermediate, self.output = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma, self.beta = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))
        self.variance_epsilon = 1e-12

    def forward(self, x):
        x = self.output(F.relu(self.intermediate(x))) + x
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.variance_epsilon)
        return self.gamma * x + self.beta


class Codebook(nn.Module):
    """The quantizer of a VQ-VAE."""

    def __init__(self, codes=7, width=4):
        super().__init__()
        self.codes = nn.Embedding(codes, width)

    def forward(self, z):
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        chosen = torch.matmul(F.one_hot(nearest, len(self.codes.weight)).float(), self.codes.weight)
        return chosen + (z - chosen).detach() * 0.25


class Contrastive(nn.Module):
    """CLIP's scores of the pairs that belong together."""

    def __init__(self, width=6):
        super().__init__()
        self.images, self.texts = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, images, texts):
        images, texts = F.normalize(self.images(images), dim=-1), F.normalize(self.texts(texts), dim=-1)
        return torch.diagonal(images @ texts.t()) / 0.07


def of_transformers(kind, **options):
    transformers = pytest.importorskip("transformers", reason="models of another library")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(**(small | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="eager")
    return model.eval()


def llama():
    return of_transformers("Llama", vocab_size=20, num_key_value_heads=2, max_position_embeddings=32)


def vit():
    return of_transformers("ViT", image_size=8, patch_size=4)


def gpt2():
    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, "n_positions": 32}
    return of_transformers("GPT2", **options)


IMAGE = lambda: (torch.randn(2, 4, 8, 8),)
TOKENS = lambda: (torch.randint(0, 20, (2, 7)),)
# by rule: the model, its inputs, how often the rule has to match, and whether gradients are compared
MODELS = {
    "attention in ViT": (FLASH, vit, lambda: (torch.randn(2, 3, 8, 8),), 2, True),
    "attention with a mask in Llama": (FLASH_WITH_MASK, llama, TOKENS, 2, True),
    "root mean squares in Llama": (RMS, llama, TOKENS, 5, True),
    "a gate in Llama": (GATED, llama, TOKENS, 2, True),
    "tanh in GPT-2": (GELU, gpt2, TOKENS, 2, True),
    "swish in squeeze and excitation": (SWISH, SqueezeExcitation, lambda: (torch.randn(2, 3, 5, 5),), 2, True),
    "batch norms of a residual block": (FOLDED, lambda: Residual().eval(), IMAGE, 2, True),
    "a loss by hand": (PICKED, Perplexity, lambda: (torch.randn(4, 6), torch.randint(0, 9, (4,))), 1, True),
    "products in another order": (LINEAR, Mixer, lambda: (torch.randn(2, 20, 8),), 1, True),
    "distances to prototypes": (DISTANCES, Retrieval, lambda: (torch.randn(3, 6),), 1, True),
    "an adapter": (MERGED, Adapted, lambda: (torch.randn(30, 6),), 1, False),
    "a norm by hand": (LAYER_NORM, Normalized, lambda: (torch.randn(2, 5, 8),), 1, True),
    "a row of a codebook": (ROWS, Codebook, lambda: (torch.randn(5, 4),), 1, True),
    "pairs that belong together": (PAIRS, Contrastive, lambda: (torch.randn(5, 6), torch.randn(5, 6)), 1, True),
    "a weight of int8": (INT8, Quantized, lambda: (torch.randn(2, 3, 16),), 1, True),
}


def tensor_of(result):
    return result if isinstance(result, torch.Tensor) else result.last_hidden_state


@pytest.mark.parametrize("case", MODELS)
def test_a_rule_of_the_literature_on_a_foreign_model(case):
    one, make, inputs, count, differentiates = MODELS[case]
    torch.manual_seed(0)
    model, model_inputs = make(), inputs()
    eager = copy.deepcopy(model)
    compiled = thunder.jit(model, rules=[one], executors=["torch"], fallback="error")
    if not differentiates:
        with torch.no_grad():
            torch.testing.assert_close(tensor_of(compiled(*model_inputs)), tensor_of(eager(*model_inputs)))
    else:
        sides = []
        for run, module in ((compiled, model), (eager, eager)):
            result = tensor_of(run(*model_inputs))
            parameters = [p for p in module.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(result.sin().sum(), parameters, allow_unused=True) if parameters else ()
            sides.append((result, *(g for g in gradients if g is not None)))
        for a, b in zip(*sides, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    hits = thunder.last_traces(compiled)[-1].info.rules[one.name]
    assert len(hits.locations) == count, str(hits)


def test_a_condition_weighs_costs():
    """Where there are fewer tokens than features, the matrix of all pairs is the smaller one."""
    model = Mixer()
    compiled = thunder.jit(model, rules=[LINEAR], executors=["torch"])
    for tokens, count in ((4, 0), (20, 1)):
        x = torch.randn(2, tokens, 8)
        torch.testing.assert_close(compiled(x), model(x))
        assert len(thunder.last_traces(compiled)[-1].info.rules["linear_attention"].locations) == count


def test_all_of_them_together():
    """Rules of one list see each other's results."""
    model = llama()
    rules = [FLASH, FLASH_WITH_MASK, RMS, GATED, GELU, SWISH]
    compiled = thunder.jit(model, rules=rules, executors=["torch"], fallback="error")
    (tokens,) = TOKENS()
    torch.testing.assert_close(compiled(tokens).last_hidden_state, model(tokens).last_hidden_state)
    hits = {n: len(h.locations) for n, h in thunder.last_traces(compiled)[-1].info.rules.items()}
    assert hits == {"attention": 0, "attention_with_mask": 2, "rms_norm": 5, "gated": 2, "gelu": 0, "swish": 0}
