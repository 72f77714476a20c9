"""Tables, recommendation, probability and uncertainty: models, layers and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign_cases.common import Applied, case, images, labelled, part, vectors


def columns(*sizes: int, numbers: int = 3) -> Any:
    """Categories of `sizes`, and numbers."""
    return lambda b: (torch.stack([torch.randint(0, n, (b,)) for n in sizes], -1), torch.randn(b, numbers))


# fmt: off
case("tab_transformer_pytorch", "TabTransformer",
     lambda m: m.TabTransformer(categories=(4, 3), num_continuous=3, dim=8, depth=1, heads=2, dim_head=4,
        mlp_act=nn.ReLU()), columns(4, 3))
case("tab_transformer_pytorch", "FTTransformer",
     lambda m: m.FTTransformer(categories=(4, 3), num_continuous=3, dim=8, depth=1, heads=2, dim_head=4), columns(4, 3))
case("tab_transformer_pytorch", "scaled",
     lambda m: m.TabTransformer(categories=(4, 3), num_continuous=3, dim=8, depth=1, heads=2, dim_head=4,
        continuous_mean_std=torch.rand(3, 2), use_shared_categ_embed=False, mlp_act=nn.ReLU()), columns(4, 3))
case("rtdl_revisiting_models", "MLP", lambda m: m.MLP(d_in=6, d_out=2, n_blocks=2, d_block=8, dropout=0.1), vectors(6))
case("rtdl_revisiting_models", "ResNet", lambda m: m.ResNet(d_in=6, d_out=2, n_blocks=2, d_block=8,
     d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.1), vectors(6))
case("rtdl_revisiting_models", "FTTransformer", lambda m: Applied(m.FTTransformer(n_cont_features=3,
     cat_cardinalities=[4, 3], d_out=2, n_blocks=1, d_block=8, attention_n_heads=2, attention_dropout=0.1,
     ffn_d_hidden=8, ffn_d_hidden_multiplier=None, ffn_dropout=0.1, residual_dropout=0.0),
     lambda f, c, x: f(x, c)), columns(4, 3))
case("rtdl_num_embeddings", "PeriodicEmbeddings",
     lambda m: m.PeriodicEmbeddings(6, 4, n_frequencies=3, lite=True), vectors(6))
case("rtdl_num_embeddings", "PiecewiseLinearEmbeddings", lambda m: m.PiecewiseLinearEmbeddings(
     [torch.linspace(-2, 2, 5)] * 6, 4, activation=True, version="B"), vectors(6))
case("rtdl_num_embeddings", "PiecewiseLinearEncoding of unequal bins", lambda m: Applied(nn.Linear(2, 2),
     lambda f, x, e=m.PiecewiseLinearEncoding([torch.linspace(-2, 2, 5), torch.linspace(-1, 1, 3)]): e(f(x))),
     vectors(2))
case("rtdl_num_embeddings", "LinearReLUEmbeddings", lambda m: m.LinearReLUEmbeddings(6, 4), vectors(6))
for _name in ("tabm", "tabm-mini", "tabm-packed"):
    case("tabm", _name, lambda m, n=_name: Applied(m.TabM(n_num_features=3, cat_cardinalities=[4, 3], d_out=2,
         arch_type=n, k=2, n_blocks=1, d_block=8, dropout=0.1,
         start_scaling_init=None if n == "tabm-packed" else "random-signs"), lambda f, c, x: f(x, c)), columns(4, 3))
for _name in ("DeepFM", "DCN", "DCNMix", "xDeepFM", "AutoInt", "NFM", "FiBiNET", "PNN", "WDL", "AFM", "ONN", "IFM"):
    case("deepctr_torch", _name, lambda m, n=_name: _click_model(m, n), lambda b: (torch.cat([
         torch.randint(0, 4, (b, 2)), torch.randn(b, 2)], -1),))


def _click_model(m: Any, name: str) -> nn.Module:
    inputs = part(m, "inputs")
    features = [inputs.SparseFeat("a", 4), inputs.SparseFeat("b", 4), inputs.DenseFeat("c"), inputs.DenseFeat("d")]
    if name == "PNN":
        return part(m, "models").PNN(features, dnn_hidden_units=(8,))
    options = {} if name == "AFM" else {"dnn_hidden_units": (8,)}
    if name == "AFM":
        return part(m, "models").AFM(features, features[:2])
    return getattr(part(m, "models"), name)(features, features, **options)


for _name in ("ResNet", "FTTransformer", "MLP", "TabTransformer", "ExcelFormer", "Trompt", "TabNet"):
    case("torch_frame", _name, lambda m, n=_name: _frame_model(m, n), columns(4, 3))


class FrameModel(nn.Module):
    def __init__(self, frame: Any, model: nn.Module, stypes: tuple):
        super().__init__()
        self.model, self.stypes, self.frame = model, stypes, frame

    def forward(self, categories, numbers):
        names = {self.stypes[0]: ["a", "b"], self.stypes[1]: ["c", "d", "e"]}
        values = {self.stypes[0]: categories, self.stypes[1]: numbers}
        if self.stypes[0] is self.stypes[1]:
            names, values = {self.stypes[1]: ["c", "d", "e"]}, {self.stypes[1]: numbers}
        return self.model(self.frame(values, names))


def _frame_model(m: Any, name: str) -> nn.Module:
    kinds = (m.numerical, m.numerical) if name == "ExcelFormer" else (m.categorical, m.numerical)
    stats = part(m, "data.stats").StatType
    numeric = {stats.MEAN: 0.0, stats.STD: 1.0, stats.QUANTILES: [-2.0, -1.0, 0.0, 1.0, 2.0]}
    column = {n: numeric for n in "cde"}
    names = {m.numerical: ["c", "d", "e"]}
    if kinds[0] is m.categorical:
        column |= {"a": {stats.COUNT: (["0", "1", "2", "3"], [1] * 4)}, "b": {stats.COUNT: (["0", "1", "2"], [1] * 3)}}
        names = {m.categorical: ["a", "b"], **names}
    options = {"num_layers": 1, "out_channels": 2, "col_stats": column, "col_names_dict": names}
    sizes = {
        "ResNet": {"channels": 8}, "FTTransformer": {"channels": 8}, "MLP": {"channels": 8},
        "TabTransformer": {"channels": 8, "num_heads": 2, "encoder_pad_size": 2, "attn_dropout": 0.1,
                           "ffn_dropout": 0.1},
        "ExcelFormer": {"in_channels": 8, "num_cols": 3, "num_heads": 2},
        "Trompt": {"channels": 8, "num_prompts": 4},
        "TabNet": {"split_feat_channels": 4, "split_attn_channels": 4, "gamma": 1.2},
    }[name]
    return FrameModel(part(m, "data").TensorFrame, getattr(part(m, "nn"), name)(**options, **sizes), kinds)


for _name in ("BPRLoss", "RegLoss", "EmbLoss", "EmbMarginLoss"):
    case("recbole", _name, lambda m, n=_name: Applied(nn.Linear(6, 1 if n == "BPRLoss" else 4), lambda f, x, y,
         loss=getattr(part(m, "model.loss"), n)(): (loss([f.weight, f.bias]) + f(x).sum() if n == "RegLoss"
         else loss(f(x), f(y)))), lambda b: (torch.randn(b, 6), torch.randn(b, 6)))
case("recbole", "FMFirstOrderLinear layers", lambda m: Applied(part(m, "model.layers").BaseFactorizationMachine(),
     lambda f, x: f(x)), vectors(4, 3))
case("recbole", "TransformerEncoder", lambda m: Applied(part(m, "model.layers").TransformerEncoder(n_layers=1,
     n_heads=2, hidden_size=8, inner_size=8), lambda f, x: f(x, torch.zeros(len(x), 1, 1, 5))[-1]), vectors(5, 8))
case("recbole", "AttLayer", lambda m: part(m, "model.layers").AttLayer(6, 4), vectors(5, 6))
for _name in ("BayesianLinear", "BayesianConv2d", "BayesianLSTM", "BayesianGRU", "BayesianEmbedding"):
    case("blitz", _name, lambda m, n=_name: getattr(part(m, "modules"), n)(*{"BayesianConv2d": (3, 4, (3, 3)),
         "BayesianEmbedding": (8, 4)}.get(n, (6, 4))), {"BayesianConv2d": images(6), "BayesianLinear": vectors(6),
         "BayesianEmbedding": lambda b: (torch.randint(0, 8, (b, 3)),)}.get(_name, vectors(5, 6)))
case("torchbnn", "BayesLinear", lambda m: m.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=6, out_features=4),
     vectors(6))
case("torchbnn", "BayesConv2d", lambda m: m.BayesConv2d(prior_mu=0, prior_sigma=0.1, in_channels=3, out_channels=4,
     kernel_size=3), images(6))
case("torchbnn", "BKLLoss", lambda m: Applied(m.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=6,
     out_features=4), lambda f, x, loss=m.BKLLoss(): loss(f) + f(x).sum()), vectors(6))
for _name in ("LinearReparameterization", "LinearFlipout", "Conv2dReparameterization", "Conv2dFlipout",
              "LSTMReparameterization"):
    case("bayesian_torch", _name, lambda m, n=_name: getattr(part(m, "layers"), n)(*{"L": (6, 4),
         "C": (3, 4, 3)}[n[0]]), images(6) if _name[0] == "C" else vectors(5, 6) if _name[:2] == "LS" else vectors(6))
for _name in ("EntropicOpenSetLoss", "EnergyRegularizedLoss", "OutlierExposureLoss", "LogitNorm",
              "CrossEntropyLoss"):
    case("pytorch_ood", _name, lambda m, n=_name: Applied(nn.Linear(6, 3), lambda f, x, y,
         loss=getattr(part(m, "loss"), n)(): loss(f(x), y)), lambda b: (torch.randn(4 * b, 6),
         torch.arange(4 * b) % 4 - 1))
for _name in ("CenterLoss", "CACLoss", "DeepSVDDLoss", "MCHADLoss"):
    case("pytorch_ood", _name, lambda m, n=_name: Applied(nn.ModuleList([nn.Linear(6, 3), _centers(m, n)]),
         lambda f, x, y: f[1](f[0](x), y)), labelled(6, 3))


def _centers(m: Any, name: str) -> nn.Module:
    options = {"CenterLoss": {"n_classes": 3, "n_dim": 3}, "CACLoss": {"n_classes": 3}, "DeepSVDDLoss": {"n_dim": 3},
               "MCHADLoss": {"n_classes": 3, "n_dim": 3}}[name]
    return getattr(part(m, "loss"), name)(**options)


case("diffsort", "odd even", lambda m: Applied(nn.Linear(4, 4), lambda f, x, s=m.DiffSortNet("odd_even", 4): s(f(x))),
     vectors(4))
case("diffsort", "bitonic", lambda m: Applied(nn.Linear(4, 4), lambda f, x, s=m.DiffSortNet("bitonic", 4,
     distribution="optimal"): s(f(x))), vectors(4))
case("diffsort", "logistic", lambda m: Applied(nn.Linear(5, 5), lambda f, x, s=m.DiffSortNet("odd_even", 5,
     steepness=5.0, distribution="logistic_phi"): s(f(x))[1]), vectors(5))
case("pyro", "AutoRegressiveNN", lambda m: part(m, "nn").AutoRegressiveNN(4, [8], param_dims=(1, 1)), vectors(4))
case("pyro", "ConditionalDenseNN", lambda m: Applied(part(m, "nn").ConditionalDenseNN(4, 2, [8]), lambda f, x:
     f(x, x[:, :2])), vectors(4))
for _name in ("affine_coupling", "planar", "radial", "spline", "affine_autoregressive", "sylvester", "householder"):
    case("pyro", f"transform {_name}", lambda m, n=_name: Applied(getattr(part(m, "distributions.transforms"), n)(4),
         lambda f, x: (lambda y: (y, f.log_abs_det_jacobian(x, y)))(f(x))), vectors(4))
case("pyro", "Trace_ELBO", lambda m: _inference(m), vectors(3))


def _inference(m: Any) -> nn.Module:
    distributions = part(m, "distributions")

    def model(x):
        scale = m.sample("scale", distributions.LogNormal(0.0, 1.0))
        with m.plate("data", len(x)):
            m.sample("x", distributions.Normal(0.0, scale).expand([3]).to_event(1), obs=x)

    class Guide(part(m, "nn").PyroModule):
        def __init__(self):
            super().__init__()
            self.location = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return m.sample("scale", distributions.LogNormal(self.location, 0.5))

    return Applied(Guide(), lambda guide, x, elbo=part(m, "infer").Trace_ELBO():
                   elbo.differentiable_loss(model, guide, x))


case("botorch", "posterior", lambda m: Applied(_surrogate(m), lambda f, x: f.posterior(x).mean), vectors(1, 2))
case("botorch", "ExpectedImprovement", lambda m: Applied(_surrogate(m), lambda f, x: part(m, "acquisition").
     LogExpectedImprovement(f, best_f=0.1)(x)), vectors(1, 2))


def _surrogate(m: Any) -> nn.Module:
    x = torch.rand(5, 2)
    return part(m, "models").SingleTaskGP(x, x.sin().sum(-1, keepdim=True))
