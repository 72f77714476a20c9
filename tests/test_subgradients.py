"""Derivatives where functions have corners: at zeros, ties and infinities they are PyTorch's choice, by rules and by
what fused kernels are made of."""

import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.executors.triton_fuser import TritonFuser

X = torch.tensor([[0.0, 0, 0, 0], [0, 1, -2, 0], [3, 1, -2, 0.5]])  # a row of zeros, one of few, one of none


class Eager(TritonFuser):
    """Fuses single operations as well."""

    def should_fuse(self, region):
        return bool(region.outputs)


def constant(x):
    return x.detach()


ORDERS = (0, 0.5, 1, 1.5, 2, 3, math.inf, -math.inf, -1, -2.5)
PROGRAMS = {
    **{f"vector_norm {p}": lambda x, p=p: torch.linalg.vector_norm(x, p, 1) for p in ORDERS},
    **{f"vector_norm {p} in float64": lambda x, p=p: torch.linalg.vector_norm(x, p, 1,
        dtype=torch.float64) for p in ORDERS},
    **{f"norm {p} in float64": lambda x, p=p: torch.norm(x, p, 1, dtype=torch.float64) for p in ORDERS},
    **{f"pow {p}": lambda x, p=p: x**p for p in (0, 0.5, 1, 2, 3, -1)},
    "norm": lambda x: x.norm(1.5, 0, True, torch.float64),
    **{
        f"{name} {dim} less {n}": lambda x, name=name, dim=dim, n=n: getattr(x, name)(dim, correction=n)
        for name in ("var", "std")
        for dim, n in ((1, 4), (1, 5), (None, 12), (None, 13))
    },
    "std": lambda x: x.std(1), "prod": lambda x: x.prod(1), "normalize": lambda x: F.normalize(x) * constant(x).cos(),
    "normalize 1.5": lambda x: F.normalize(x, p=1.5) * constant(x).cos(),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.roll(1, 0) + 0.5),
    "pairwise_distance": lambda x: F.pairwise_distance(x, constant(x), p=1.5, eps=0),
    "dist": lambda x: torch.dist(x, constant(x), 1.5),
    "logsumexp": lambda x: torch.logsumexp(torch.where(x == 0, -math.inf, x), 1)[1:], "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(), "aminmax": lambda x: sum(x.aminmax(dim=1)),
    "clamp": lambda x: x.clamp(0, 1), "clamp_min": lambda x: x.clamp_min(0),
    "maximum": lambda x: torch.maximum(x, constant(x)), "fmax": lambda x: torch.fmax(x, constant(x)),
    "clamp nan": lambda x: x.clamp(0, math.nan) + x, "abs": lambda x: x.abs(), "sqrt": lambda x: x.abs().sqrt(),
    "power of itself": lambda x: x.abs() ** constant(x).abs(),
    "power of 0": lambda x: 0.0 ** x.abs(), "xlogy": lambda x: torch.xlogy(x.abs(), x.abs()),
    "atan2": lambda x: torch.atan2(x, constant(x)), "atan2 of 0": lambda x: torch.atan2(constant(x), x),
    "hypot": lambda x: torch.hypot(x, constant(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), beta=0.0),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.clamp(0, 1), (x > 0).float()),
    "kl_div": lambda x: F.kl_div(constant(x), x.clamp(0), reduction="sum"),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x, x.softmax(1)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, -100, 1]), label_smoothing=0.1),
    "group_norm": lambda x: F.group_norm(x[:, :, None], 2, bias=torch.ones(4)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, bias=torch.ones(4), training=True) * constant(x).cos(),
    "layer_norm": lambda x: F.layer_norm(x, (4,)) * constant(x).cos(), "sinc": torch.sinc,
    "logit": lambda x: torch.logit(x.clamp(0, 1) * 0.5 + 0.25, 0.3), "median": lambda x: x.median(1)[0],
    "masked root": lambda x: torch.where(x > 0, x, x.sqrt()),
    "masked logarithm": lambda x: x.log().masked_fill(x <= 0, 0), "nansum": lambda x: x.log().nansum(),
    "hardtanh": F.hardtanh, "relu6": lambda x: F.relu6(x * 6), "hardswish": lambda x: F.hardswish(x * 3),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3), "softplus": lambda x: F.softplus(x * 30),
    "hardshrink": lambda x: F.hardshrink(x, 1), "softshrink": lambda x: F.softshrink(x, 1),
    "threshold": lambda x: F.threshold(x, 1, 0.0), "elu": F.elu, "leaky_relu": F.leaky_relu,
    "remainder": lambda x: x % 1.5, "fmod": lambda x: torch.fmod(x, 1.5),
    "logaddexp": lambda x: torch.logaddexp(x, constant(x)), "cummax": lambda x: x.cummax(1)[0],
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.roll(1, 0), constant(x)),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, constant(x), torch.ones(3, 4)),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, constant(x), torch.tensor([1, -1, 1.0])),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, torch.ones(3, 4)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:(var|std).*degrees of freedom:UserWarning")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what the interpreter computes and nobody uses
def test_corners_are_pytorchs(name, fused):
    if fused and (sys.platform != "linux" or torch.cuda.is_available()):
        pytest.skip("Triton's interpreter runs on a CPU")
    if fused:
        pytest.importorskip("triton")

    def gradients(f):
        x = X.clone().requires_grad_()
        y = f(x)
        return y.detach(), *torch.autograd.grad(y.sum(), x, allow_unused=True, materialize_grads=True)

    try:
        wanted = gradients(PROGRAMS[name])
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        pytest.skip("this PyTorch does not differentiate it")
    computed = gradients(thunder.jit(PROGRAMS[name], executors=[Eager("single")] if fused else None)), wanted
    for got, want in zip(*computed, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


_AT = [0.0, 1.0, 2.0, math.nan]


@pytest.mark.parametrize("tensors", [False, True])
def test_values_at_bounds_get_what_pytorch_gives_them(tensors):
    """PyTorch 2.15 gives them nothing, or a half beside bounds that are tensors, where 2.13 gave them all."""
    for low, high in itertools.product([None, *_AT], repeat=2):
        arguments = [
            torch.full((4,), bound, requires_grad=True) for bound in (low, high) if bound is not None and tensors
        ]
        if low is None and high is None:
            continue

        def program(x, *bounds, low=low, high=high):
            bounds = iter(bounds)
            return torch.clamp(
                x,
                next(bounds) if tensors and low is not None else low,
                next(bounds) if tensors and high is not None else high,
            )

        inputs = [torch.tensor(_AT, requires_grad=True), *arguments]
        gradients, wanted = (torch.autograd.grad(f(*inputs).sum(), inputs) for f in (thunder.jit(program), program))
        torch.testing.assert_close(
            gradients, wanted, rtol=0, atol=0, msg=lambda text, low=low, high=high: f"bounds {low}, {high}: {text}"
        )


@pytest.mark.parametrize("extreme", [torch.fmax, torch.fmin, torch.maximum, torch.minimum])
def test_ties_get_what_pytorch_gives_them(extreme):
    inputs = [
        torch.tensor([a for a, _ in itertools.product(_AT, repeat=2)], requires_grad=True),
        torch.tensor(_AT * 4, requires_grad=True),
    ]
    gradients, wanted = (torch.autograd.grad(f(*inputs).sum(), inputs) for f in (thunder.jit(extreme), extreme))
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)
