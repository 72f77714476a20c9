"""Graphs, metric learning, tensor notation, probabilistic programs, Gaussian processes and differential equations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .common import Compile, batches, mlp, program, trained, weights


# --- torch_geometric
def graphs(count: int = 8) -> list:
    from torch_geometric.data import Data

    drawn = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, 9, (count,), generator=drawn).tolist()
    return [
        Data(
            x=torch.randn(n, 8, generator=drawn), edge_index=torch.randint(n, (2, 3 * n), generator=drawn),
            y=torch.randint(3, (1,), generator=drawn),
        )
        for n in sizes
    ]  # fmt: skip


class GraphClassifier(nn.Module):
    def __init__(self, layer: str):
        import torch_geometric.nn as gnn

        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = getattr(gnn, layer)(8, 16), getattr(gnn, layer)(16, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, batch):
        from torch_geometric.nn import global_mean_pool

        x = self.first(batch.x, batch.edge_index).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.out(global_mean_pool(x, batch.batch, batch.num_graphs))


def graph_training(layer: str):
    def run(compiled: Compile) -> Any:
        from torch_geometric.loader import DataLoader

        model = compiled(GraphClassifier(layer))
        loader = DataLoader(graphs(), batch_size=3)

        def loss_of(model, batch):
            return F.cross_entropy(model(batch), batch.y)

        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses = [loss for _ in range(2) for loss in trained(model, optimizer, loss_of, list(loader))]
        model.eval()
        with torch.no_grad():
            return losses, weights(model), [model(batch) for batch in loader]

    return run


for _layer in ("GCNConv", "SAGEConv", "GATConv"):
    program("torch_geometric", f"a loader of small graphs, {_layer}")(graph_training(_layer))


# --- pytorch_metric_learning
def metric(loss: str, miner: str = ""):
    def run(compiled: Compile) -> Any:
        from pytorch_metric_learning import losses, miners

        model, loss_fn = compiled(mlp()), getattr(losses, loss)()
        mine = getattr(miners, miner)() if miner else None

        def loss_of(model, batch):
            embeddings = model(batch[0])
            return loss_fn(embeddings, batch[1], mine(embeddings, batch[1]) if mine else None)

        return trained(model, torch.optim.SGD(model.parameters(), 0.01), loss_of, batches()), weights(model)

    return run


program("pytorch_metric_learning", "contrastive loss")(metric("ContrastiveLoss"))
program("pytorch_metric_learning", "triplet loss with a miner")(metric("TripletMarginLoss", "MultiSimilarityMiner"))
program("pytorch_metric_learning", "NT-Xent")(metric("NTXentLoss"))


@program("pytorch_metric_learning", "a compiled loss")
def compiled_metric(compiled: Compile) -> Any:
    from pytorch_metric_learning import losses

    model = mlp()
    loss_fn = compiled(losses.MultiSimilarityLoss())

    def loss_of(model, batch):
        return loss_fn(model(batch[0]), batch[1])

    return trained(model, torch.optim.SGD(model.parameters(), 0.01), loss_of, batches()), weights(model)


# --- lightly
def two_views(loss: str):
    def run(compiled: Compile) -> Any:
        import lightly.loss

        model, loss_fn = mlp(), getattr(lightly.loss, loss)()

        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                return loss_fn(self.model(x), self.model(x + 0.1 * x.flip(0)))

        pair = compiled(Pair())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        return trained(pair, optimizer, lambda pair, batch: pair(batch[0]), batches()), weights(model)

    return run


# without BarlowTwinsLoss: the last bias has a gradient of 0 in exact arithmetic there, and its rounding is compared
for _loss in ("NTXentLoss", "VICRegLoss", "NegativeCosineSimilarity", "TiCoLoss", "DCLLoss"):
    program("lightly", _loss)(two_views(_loss))


# --- einops and einx
@program("einops", "layers of a vision transformer")
def einops_layers(compiled: Compile) -> Any:
    from einops.layers.torch import Rearrange, Reduce

    torch.manual_seed(0)
    model = compiled(
        nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), nn.Linear(48, 16), nn.GELU(),
            Reduce("b n c -> b c", "mean"), nn.Linear(16, 3),
        )
    )  # fmt: skip
    data = [(torch.randn(n, 3, 8, 8), torch.arange(n) % 3) for n in (2, 4, 3)]

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return trained(model, torch.optim.SGD(model.parameters(), 0.1), loss_of, data), weights(model)


class Einops(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        from einops import einsum, rearrange, repeat

        q, k, v = rearrange(self.qkv(x), "b n (t h d) -> t b h n d", t=3, h=4)
        weight = (einsum(q, k, "b h i d, b h j d -> b h i j") * 0.5).softmax(-1)
        out = rearrange(einsum(weight, v, "b h i j, b h j d -> b h i d"), "b h n d -> b n (h d)")
        return out + repeat(x.mean(1), "b d -> b n d", n=x.shape[1])


class Einx(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        import einx

        q, k, v = einx.id("b n (t h d) -> t b h n d", self.qkv(x), t=3, h=4)
        weight = einx.softmax("b h i [j]", einx.dot("b h i d, b h j d -> b h i j", q, k) * 0.5)
        return einx.id("b h n d -> b n (h d)", einx.dot("b h i j, b h j d -> b h i d", weight, v)) + einx.mean(
            "b [n] d -> b 1 d", x
        )


def notation(kind: type[nn.Module]):
    def run(compiled: Compile) -> Any:
        model = compiled(kind())
        drawn = torch.Generator().manual_seed(0)
        data = [torch.randn(2, n, 16, generator=drawn) for n in (5, 7, 6)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return trained(model, optimizer, lambda model, x: model(x).square().mean(), data), weights(model)

    return run


program("einops", "attention in functions")(notation(Einops))
program("einx", "attention in functions")(notation(Einx))


# --- pyro
@program("pyro", "a variational autoencoder by SVI")
def variational(compiled: Compile) -> Any:
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    encoder, decoder = compiled(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))), compiled(nn.Linear(2, 8))

    def model(x):
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 0.5).to_event(1), obs=x)

    def guide(x):
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x)):
            location, scale = encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(location, scale.exp()).to_event(1))

    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-2}), Trace_ELBO())
    return [svi.step(x) for x, _ in batches()], weights(encoder), weights(decoder)


# --- gpytorch
@program("gpytorch", "an exact process on learned features")
def deep_kernel(compiled: Compile) -> Any:
    import gpytorch

    features, drawn = compiled(mlp()), torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 8, generator=drawn), torch.randn(12, generator=drawn)

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean, self.kernel = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
            )
            self.features = features

        def forward(self, x):
            x = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Process(likelihood)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

    def loss_of(model, _):
        return -objective(model(x), y)

    losses = trained(model, torch.optim.Adam(model.parameters(), 1e-2), loss_of, [None] * 3)
    return losses, weights(model)


# --- torchdiffeq
class Field(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, t, y):
        return self.net(y) * (1 + t)


def equation(adjoint: bool, method: str):
    def run(compiled: Compile) -> Any:
        import torchdiffeq

        solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint
        model, times = compiled(Field()), torch.linspace(0, 1, 4)
        drawn = torch.Generator().manual_seed(0)
        data = [torch.randn(3, 4, generator=drawn) for _ in range(3)]

        def loss_of(model, y):
            return solve(model, y, times, method=method).square().mean()

        return trained(model, torch.optim.Adam(model.parameters(), 1e-2), loss_of, data), weights(model)

    return run


program("torchdiffeq", "dopri5")(equation(False, "dopri5"))
program("torchdiffeq", "the adjoint of rk4")(equation(True, "rk4"))
program("torchdiffeq", "the adjoint of dopri5")(equation(True, "dopri5"))


# --- vision-language models of transformers
def vision_language() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=16, **sizes)
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = transformers.LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes, **ends)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=96, vision_feature_layer=-1, image_seq_length=4, **ends
    )
    return transformers.LlavaForConditionalGeneration(config)


def questions(rows: int, words: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(words)
    text = torch.randint(3, 90, (rows, words), generator=drawn)
    tokens = torch.cat([torch.full((rows, 4), 96), text], 1)
    return {
        "input_ids": tokens, "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(rows, 3, 16, 16, generator=drawn),
    }  # fmt: skip


@program("transformers", "LLaVA, training on images and text")
def llava_training(compiled: Compile) -> Any:
    model = compiled(vision_language())

    def loss_of(model, batch):
        return model(**batch, labels=batch["input_ids"]).loss

    data = [questions(2, n) for n in (5, 7, 6)]
    return trained(model, torch.optim.AdamW(model.parameters(), 1e-3), loss_of, data), weights(model)


@program("transformers", "LLaVA, generate from an image")
def llava_generation(compiled: Compile) -> Any:
    model = compiled(vision_language().eval())
    with torch.no_grad():
        return model.generate(**questions(2, 5), max_new_tokens=6, do_sample=False)
