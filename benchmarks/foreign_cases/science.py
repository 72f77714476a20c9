"""Molecules, fields, dynamics, geometry and spiking neurons: models, layers and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foreign_cases.common import Applied, case, images, part, vectors


def points(width: int, count: int = 5) -> Any:
    """Features of points, and their coordinates."""
    return lambda b: (torch.randn(b, count, width), torch.randn(b, count, 3))


# fmt: off
case("se3_transformer_pytorch", "SE3Transformer", lambda m: m.SE3Transformer(dim=8, heads=2, dim_head=4, depth=1,
     num_degrees=2), points(8))
case("se3_transformer_pytorch", "of vectors", lambda m: Applied(m.SE3Transformer(dim=8, heads=2, dim_head=4, depth=1,
     num_degrees=2, output_degrees=2, num_neighbors=3), lambda f, x, c: f(x, c, return_type=1)), points(8))
case("en_transformer", "EnTransformer", lambda m: m.EnTransformer(dim=8, depth=1, heads=2, dim_head=32), points(8))
case("en_transformer", "of neighbours", lambda m: m.EnTransformer(dim=8, depth=1, heads=2, dim_head=32, neighbors=3,
     use_cross_product=True), points(8))
case("equiformer_pytorch", "Equiformer", lambda m: Applied(m.Equiformer(dim=(8, 4), heads=(2, 1), dim_head=(4, 4),
     depth=1, num_degrees=2, num_neighbors=3), lambda f, x, c: f(x, c)), points(8))
case("equiformer_pytorch", "MLP attention", lambda m: m.Equiformer(dim=(8, 4), heads=(2, 1), dim_head=(4, 4), depth=1,
     num_degrees=2, attend_self=True, l2_dist_attention=False), points(8))
for _name in ("iTransformer", "iTransformerFFT"):
    case("iTransformer", _name, lambda m, n=_name: getattr(m, n)(num_variates=3, lookback_len=12, depth=1, dim=16,
         pred_length=(2, 4), dim_head=8, heads=2), vectors(12, 3))
case("iTransformer", "iTransformer2D", lambda m: m.iTransformer2D(num_variates=3, lookback_len=12, num_time_tokens=4,
     depth=1, dim=16, pred_length=4, dim_head=8, heads=2, use_reversible_instance_norm=True), vectors(12, 3))
case("kan", "KAN", lambda m: m.KAN(width=[2, 3, 1], grid=3, k=3, auto_save=False, save_act=False), vectors(2))
case("kan", "KANLayer", lambda m: Applied(m.KANLayer(in_dim=2, out_dim=3, num=3, k=3), lambda f, x: f(x)[0]),
     vectors(2))
case("kan", "KAN of products", lambda m: m.KAN(width=[2, [2, 1], 1], grid=3, k=2, auto_save=False), vectors(2))
for _name in ("FNO", "TFNO"):
    case("neuralop", _name, lambda m, n=_name: getattr(part(m, "models"), n)(n_modes=(4, 4), in_channels=1,
         out_channels=1, hidden_channels=4, n_layers=1), images(8, 1))
case("neuralop", "UNO", lambda m: part(m, "models").UNO(in_channels=1, out_channels=1, hidden_channels=4, n_layers=3,
     uno_out_channels=[4, 4, 4], uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
     channel_mlp_skip="linear",
     lifting_channels=4, projection_channels=4), images(8, 1))
for _name in ("LpLoss", "H1Loss"):
    case("neuralop", _name, lambda m, n=_name: Applied(nn.Conv2d(1, 1, 1), lambda f, x, y, loss=getattr(part(m,
         "losses"), n)(d=2): loss(f(x), y)), lambda b: (torch.randn(b, 1, 8, 8), torch.randn(b, 1, 8, 8)))
case("torch_harmonics", "RealSHT", lambda m: Applied(nn.ModuleList([nn.Conv2d(1, 1, 1), m.RealSHT(8, 16)]), lambda f, x:
     torch.view_as_real(f[1](f[0](x)))), lambda b: (torch.randn(b, 1, 8, 16),))
case("torch_harmonics", "there and back", lambda m: nn.Sequential(nn.Conv2d(1, 1, 1), m.RealSHT(8, 16),
     m.InverseRealSHT(8, 16)), lambda b: (torch.randn(b, 1, 8, 16),))
case("torch_harmonics", "SpectralConvS2", lambda m: m.SpectralConvS2((8, 16), (8, 16), 2, 2),
     lambda b: (torch.randn(b, 2, 8, 16),))
case("torch_harmonics", "AttentionS2", lambda m: m.AttentionS2(in_channels=4, num_heads=2, in_shape=(4, 8),
     out_shape=(4, 8)), lambda b: (torch.randn(b, 4, 4, 8),))
case("torch_harmonics", "ResampleS2", lambda m: nn.Sequential(nn.Conv2d(1, 1, 1), m.ResampleS2(4, 8, 6, 12)),
     lambda b: (torch.randn(b, 1, 4, 8),))
for _name in ("IFNode", "LIFNode", "ParametricLIFNode", "QIFNode", "EIFNode", "IzhikevichNode", "KLIFNode"):
    case("spikingjelly", _name, lambda m, n=_name: _spiking(m, n), vectors(6))


class Spiking(nn.Module):
    """A neuron that starts anew in each call."""

    def __init__(self, neuron: nn.Module, reset: Any):
        super().__init__()
        self.linear, self.neuron, self.start = nn.Linear(6, 4), neuron, reset

    def forward(self, x):
        self.start(self)
        return torch.stack([self.neuron(self.linear(x * t)) for t in range(3)])


def _spiking(m: Any, name: str) -> nn.Module:
    base = "activation_based"
    return Spiking(getattr(part(m, f"{base}.neuron"), name)(), part(m, f"{base}.functional").reset_net)


case("spikingjelly", "LIFNode of steps", lambda m: _steps(m), vectors(3, 6))


def _steps(m: Any) -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 4), part(m, "activation_based.neuron").LIFNode(step_mode="m"))
    start = part(m, "activation_based.functional").reset_net
    return Applied(layers, lambda f, x: (start(f), f(x.transpose(0, 1)))[1])


for _name, _file in {"LIFLayer": "lif", "LIFAdExLayer": "lif_adex", "LIFExLayer": "lif_ex"}.items():
    case("norse", _name, lambda m, n=_name, s=_file: Applied(getattr(part(m, f"torch.module.{s}"), n)(6, 4),
         lambda f, x: f(x.transpose(0, 1) * 200)[0]), vectors(3, 6))
for _name in ("CfC", "LTC"):
    case("ncps", _name, lambda m, n=_name: Applied(getattr(part(m, "torch"), n)(6, 4), lambda f, x: f(x)[0]),
         vectors(3, 6))
case("ncps", "CfC of a wiring", lambda m: Applied(part(m, "torch").CfC(6, part(m, "wirings").AutoNCP(8, 2)),
     lambda f, x: f(x)[0]), vectors(3, 6))
case("ncps", "LTC of a wiring", lambda m: Applied(part(m, "torch").LTC(6, part(m, "wirings").AutoNCP(8, 2),
     mixed_memory=True), lambda f, x: f(x)[0]), vectors(3, 6))
for _name in ("PoincareBall", "Lorentz", "Sphere"):
    case("geoopt", _name, lambda m, n=_name: Applied(nn.Linear(4, 4), lambda f, x, ball=getattr(m, n)():
         (lambda a, b: ball.dist(a, b))(ball.projx(f(x) / 8), ball.projx(x / 8))), vectors(4))
case("geoopt", "expmap", lambda m: Applied(nn.Linear(4, 4), lambda f, x, ball=m.PoincareBall(c=0.5):
     ball.logmap0(ball.mobius_add(ball.expmap0(f(x) / 4), ball.expmap0(x / 4)))), vectors(4))
case("geoopt", "Stiefel", lambda m: Applied(nn.Linear(3, 3), lambda f, x, s=m.Stiefel(): s.projx(f(x))),
     vectors(5, 3))
case("torchani", "AEVComputer", lambda m: Applied(nn.ModuleList([nn.Linear(3, 3), part(m, "aev").
     AEVComputer(radial="ani1x", angular="ani1x", num_species=4)]), lambda f, x: f[1](torch.zeros(x.shape[:2],
     dtype=torch.long), f[0](x))), vectors(4, 3))
case("torchani", "simple_ani", lambda m: Applied(part(m, "models").simple_ani(("H", "C"), "wb97x-631gd",
     repulsion=False), lambda f, x: f((torch.tensor([[1, 1, 6, 6]]).expand(len(x), 4), x * 2)).energies), vectors(4, 3))
case("torchsde", "sdeint", lambda m: Applied(_stochastic(), lambda f, x: m.sdeint(f, x, torch.linspace(0, 1, 3), dt=0.2,
     method="euler")), vectors(3))
case("torchsde", "milstein", lambda m: Applied(_stochastic(), lambda f, x: m.sdeint(f, x, torch.linspace(0, 1, 3),
     dt=0.2, method="milstein")), vectors(3))


def _stochastic() -> nn.Module:
    class Equation(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self):
            super().__init__()
            self.drift, self.diffusion = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, t, y):
            return self.drift(y)

        def g(self, t, y):
            return self.diffusion(y).sigmoid()

    return Equation()


for _name in ("cubic", "linear"):
    case("torchcde", _name, lambda m, n=_name: Applied(nn.Linear(4, 8), lambda f, x: m.cdeint(X=m.CubicSpline(
         m.hermite_cubic_coefficients_with_backward_differences(x)) if n == "cubic" else m.LinearInterpolation(
         m.linear_interpolation_coeffs(x)), func=lambda t, z: f(z).tanh().view(*z.shape[:-1], 4, 2),
         z0=x.new_zeros(len(x), 4) + x[:, 0, :1], t=torch.tensor([0.0, 4.0]), method="rk4", adjoint=False)),
         vectors(5, 2))
for _name in ("sinkhorn", "gaussian", "energy", "laplacian"):
    case("geomloss", _name, lambda m, n=_name: Applied(nn.Linear(3, 3), lambda f, x, y, loss=m.SamplesLoss(n, p=2,
         blur=0.5, backend="tensorized"): loss(f(x), y)), points(3))
for _name in ("SO3", "SE3"):
    case("pypose", f"{_name} Act", lambda m, n=_name: Applied(nn.Linear(3, 3 if n == "SO3" else 6), lambda f, x:
         getattr(m, n.lower())(f(x)).Exp().Act(x)), vectors(3))
case("pypose", "euler", lambda m: Applied(nn.Linear(3, 3), lambda f, x: m.so3(f(x)).Exp().Log().tensor()), vectors(3))
case("opacus", "DPLSTM", lambda m: Applied(part(m, "layers").DPLSTM(6, 4, batch_first=True), lambda f, x: f(x)[0]),
     vectors(3, 6))
case("opacus", "DPMultiheadAttention", lambda m: Applied(part(m, "layers").DPMultiheadAttention(8, 2), lambda f, x:
     f(x, x, x)[0]), vectors(3, 8))
case("opacus", "DPGRU", lambda m: Applied(part(m, "layers").DPGRU(6, 4, batch_first=True), lambda f, x: f(x)[0]),
     vectors(3, 6))
for _name in ("parafac", "tucker"):
    case("tensorly", _name, lambda m, n=_name: _decomposed(m, n), vectors(4, 4))


def _decomposed(m: Any, name: str) -> nn.Module:
    m.set_backend("pytorch")
    factors = nn.ParameterList([torch.randn(4, 2) for _ in range(3)])
    if name == "parafac":
        return Applied(factors, lambda f, x: m.cp_to_tensor((torch.ones(2), list(f))).sum(0) + x)
    return Applied(factors, lambda f, x: m.tucker_to_tensor((torch.ones(2, 2, 2), list(f))).mean(0) @ x)


case("tltorch", "FactorizedLinear", lambda m: m.FactorizedLinear((2, 3), (2, 2), factorization="cp", rank=2,
     implementation="reconstructed"), vectors(6))
case("tltorch", "TRL", lambda m: m.TRL((3, 4), (2,), factorization="tucker", rank=0.5), vectors(3, 4))
case("tltorch", "TCL", lambda m: m.TCL((3, 4), (2, 2)), vectors(3, 4))
for _name, _options in {"LoConModule": {"lora_dim": 2}, "LohaModule": {"lora_dim": 2}, "LokrModule": {"lora_dim": 2},
                        "FullModule": {}}.items():
    case("lycoris", _name, lambda m, n=_name, o=_options: _adapted(m, n, o), vectors(6))


def _adapted(m: Any, name: str, options: dict) -> nn.Module:
    file = {"LoConModule": "locon", "LohaModule": "loha", "LokrModule": "lokr", "FullModule": "full"}[name]
    linear = nn.Linear(6, 6)
    adapter = getattr(part(m, f"modules.{file}"), name)("adapter", linear, 1.0, alpha=1.0, **options)
    adapter.apply_to()
    return nn.Sequential(nn.Linear(6, 6), adapter.org_module[0], adapter)[:2]
