"""Random programs of elementwise functions, views, reductions, joins and lookups, on inputs of any layout."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38)
SIZES = (1, 2, 3, 5, 8, 16, 17, 33)


def laid_out(draw: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape: row-major, transposed, expanded, or with gaps."""

    def fresh(shape: list[int]) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape).to(dtype)
        return torch.randint(-9, 9, shape).to(dtype) if dtype is not torch.bool else torch.rand(shape) > 0.5

    kind = draw.choice(["row-major", "row-major", "transposed", "expanded", "steps", "offset"])
    if kind == "transposed":
        order = [*range(len(shape))]
        draw.shuffle(order)
        return fresh([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    if kind == "expanded":
        d = draw.randrange(len(shape))
        return fresh([*shape[:d], 1, *shape[d + 1 :]]).expand(shape)
    if kind == "steps":
        return fresh([2 * n for n in shape])[tuple(slice(None, None, 2) for _ in shape)]
    if kind == "offset":
        return fresh([n + 1 for n in shape])[tuple(slice(1, None) for _ in shape)]
    return fresh(shape)


def with_special_values(draw: random.Random, t: torch.Tensor) -> torch.Tensor:
    if not t.is_floating_point():
        return t
    t = t.clone()
    flat = t.view(-1) if t.is_contiguous() else t
    for value in draw.sample(SPECIAL, 3):
        index = tuple(draw.randrange(n) for n in flat.shape)
        flat[index] = value
    return t


UNARY: list[Callable] = [
    lambda x: x * 2 + 1, torch.abs, lambda x: -x, lambda x: torch.where(x > 0, x, x * 3), lambda x: x.clamp(-1, 1),
    torch.square, torch.sign,
]  # fmt: skip
OF_FLOATS: list[Callable] = [
    torch.sin, torch.tanh, torch.sigmoid, torch.exp, lambda x: x.abs().log(), torch.erf, F.gelu, F.silu, F.softplus,
    torch.floor, torch.expm1, lambda x: x.abs().sqrt(), lambda x: x**0, lambda x: x.abs() ** 1.5, torch.isnan,
    torch.round, torch.sinc, torch.frac, lambda x: x % 1.5, lambda x: torch.logaddexp(x, x * 2),
    lambda x: torch.xlogy(x, x.abs()), lambda x: x / 3, lambda x: x.to(torch.bfloat16).to(x.dtype),
]  # fmt: skip
BINARY: list[Callable] = [
    torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, lambda x, y: torch.where(x > y, x, y),
    lambda x, y: (x == y) | (x < y),
]  # fmt: skip


def moved(x: torch.Tensor, which: int, d: int, e: int) -> torch.Tensor:
    """A view or a copy with other indices."""
    moves: list[Callable] = [
        lambda: x.transpose(d, e), lambda: x.flip(d), lambda: x.roll(1, e), lambda: x.reshape(-1),
        lambda: x.reshape(x.shape[-1], -1), lambda: x[..., ::2], lambda: x.narrow(d, x.shape[d] // 2, -(-x.shape[d] // 2)),
        lambda: F.pad(x, (1, 2)), lambda: torch.cat((x, x), d), lambda: torch.stack((x, x), d),
        lambda: x[None].expand(2, *x.shape), lambda: x.movedim(0, -1).contiguous(), lambda: x.select(d, -1),
        lambda: torch.cat((x.flip(d), x), e), lambda: torch.stack((x[..., ::2], x[..., ::2] * 2), -1).flatten(-2),
        lambda: x.index_select(d, torch.arange(x.shape[d]).flip(0)),
        lambda: x.gather(d, torch.zeros_like(x, dtype=torch.long)),
        lambda: x[torch.arange(3 * x.shape[0]).view(3, -1) % x.shape[0]],
        lambda: torch.cat((torch.zeros_like(x.narrow(d, 0, 1)), x), d),
    ]  # fmt: skip
    return moves[which % len(moves)]()


def reduced(x: torch.Tensor, which: int, d: int, e: int) -> torch.Tensor:
    both = (d, e) if d != e else (d,)
    plain: list[Callable] = [
        lambda: x.sum(d), lambda: x.sum(both, keepdim=True), lambda: x.sum(), lambda: x.amax(d),
        lambda: x.amin(both, keepdim=True), lambda: x.cumsum(-1).to(x.dtype),
    ]  # fmt: skip
    of_floats: list[Callable] = [
        lambda: x.mean(d, keepdim=True), lambda: x.logsumexp(d), lambda: torch.softmax(x, d),
        lambda: F.layer_norm(x, x.shape[-1:]), lambda: x.var(both, unbiased=False), lambda: x - x.mean(d, keepdim=True),
        lambda: torch.log_softmax(x, d), lambda: x.prod(d), lambda: x.cumsum(d), lambda: x.cumprod(-1),
    ]  # fmt: skip
    choices = plain + of_floats if x.is_floating_point() else plain
    return choices[which % len(choices)]()


def random_program(seed: int, dtype: torch.dtype, special: bool = False) -> tuple[Callable, list[torch.Tensor]]:
    """A function of its inputs, and the inputs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = [draw.choice(SIZES) for _ in range(draw.choice([2, 2, 3]))]
    inputs = [laid_out(draw, shape, dtype) for _ in range(draw.choice([1, 2, 3]))]
    if special:
        inputs = [with_special_values(draw, x) for x in inputs]
    steps = [
        (
            draw.choice(["unary", "unary", "binary", "move", "reduce"]),
            draw.random(),
            *(draw.randrange(99) for _ in "abc"),
        )
        for _ in range(draw.randint(3, 8))
    ]

    def program(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [*xs]
        for kind, share, which, d, e in steps:
            x, y = values[-1 - int(share * min(3, len(values)))], values[which % len(values)]
            if x.dim() == 0 or x.dtype is torch.bool:
                x = x.reshape(-1).to(dtype)
            d, e = d % x.dim(), e % x.dim()
            if kind == "binary" and y.dtype is x.dtype and y.dim() <= x.dim():
                if all(m in (1, n) for m, n in zip(y.shape[::-1], x.shape[::-1])):
                    values.append(BINARY[which % len(BINARY)](x, y))
                    continue
            if kind == "move" and x.numel() < 4000:
                values.append(moved(x, which, d, e))
            elif kind == "reduce":
                values.append(reduced(x, which, d, e))
            else:
                functions = UNARY + OF_FLOATS if x.is_floating_point() else UNARY
                values.append(functions[which % len(functions)](x))
        return tuple(dict.fromkeys(values[-2:]))

    return program, inputs


def gradient_of_largest(compiled: Callable | None, dtype: torch.dtype) -> torch.Tensor:
    """Of a value of 16 bits that the backward computes again: it finds the largest one, which was rounded and saved."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.silu(torch.softmax(x, 0)).amax(-1)

    torch.manual_seed(0)
    x = torch.randn(25, 16).to(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad((compiled(f) if compiled is not None else f)(x).float().sum(), x)
    return gradient
