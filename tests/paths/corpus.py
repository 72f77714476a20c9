"""Programs whose control flow depends on the values of tensors, as people write them.

`PROGRAMS` and `HOST` (programs that run host code as well) have by name (a function that makes the program, a function
of a `torch.Generator` that gives the arguments of one call). Making a program gives (function, what it writes to).
`tests/paths/test_corpus.py` runs each beside eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

PROGRAMS: dict[str, tuple[Callable, Callable]] = {}
HOST: dict[str, tuple[Callable, Callable]] = {}


def program(arguments: Callable):
    """Registers a program that keeps nothing."""

    def register(function: Callable) -> Callable:
        PROGRAMS[function.__name__] = lambda: (function, ()), arguments
        return function

    return register


def program_of(arguments: Callable, table: dict = PROGRAMS):
    """Registers what makes a program."""

    def register(make: Callable) -> Callable:
        table[make.__name__] = make, arguments
        return make

    return register


def normal(*shape, scale=1.0, grad=False):
    """Arguments: one tensor of normal numbers."""
    return lambda g: ((torch.randn(*shape, generator=g) * scale).requires_grad_(grad),)


def several(*makers):
    return lambda g: tuple(x for make in makers for x in make(g))


def integers(low: int, high: int, *shape):
    return lambda g: (torch.randint(low, high, shape, generator=g),)


def sometimes(share: float, value: float, *shape, grad=False):
    """One tensor that holds `value` somewhere in a share of the calls."""

    def make(g):
        x = torch.randn(*shape, generator=g)
        if torch.rand((), generator=g) < share:
            x.view(-1)[int(torch.randint(x.numel(), (), generator=g))] = value
        return (x.requires_grad_(grad),)

    return make


# ------------------------------------------------------------------------------------------------ NaN and loss guards


@program(sometimes(0.4, math.nan, 4, 3))
def nan_guard(x):
    if torch.isnan(x).any():
        x = torch.nan_to_num(x)
    return x.sum()


@program(sometimes(0.4, math.inf, 4, 3))
def finite_or_zero(x):
    return x * 2 if torch.isfinite(x).all() else torch.zeros_like(x)


@program(normal(5, grad=True))
def loss_skipped(x):
    loss = (x**2).sum()
    if loss.item() > 5:
        return loss * 0.1
    return loss


@program(sometimes(0.5, math.nan, 3, grad=True))
def assert_finite(x):
    y = x.exp()
    if not torch.isfinite(y).all():
        y = torch.zeros_like(x) * x.detach().nan_to_num()
    assert torch.isfinite(y).all(), "not finite"
    return y.sum()


@program(several(normal(4, 3, grad=True), normal(4, 1)))
def clipped_by_norm(w, x):
    norm = (w * x).norm()
    if norm > 2.0:
        w = w * (2.0 / norm)
    return (w * x).sum()


@program(normal(6))
def scale_by_value(x):
    scale = x.abs().max().item()
    return x / scale if scale > 1 else x


@program(several(normal(3, grad=True), integers(0, 2)))
def loss_scale(x, overflow):
    scale = 1024.0
    if bool(overflow):
        scale = scale / 2
    return (x * scale).sum()


@program(normal(3, 3))
def early_return(x):
    for i in range(3):
        if x[i, i] < 0:
            return x[i], i
    return x.sum(0), -1


# ------------------------------------------------------------------------------------------------------ loops on data


@program(normal(4, scale=3.0))
def halve_until_small(x):
    steps = 0
    while x.abs().max() > 1:
        x, steps = x / 2, steps + 1
    return x, steps


@program(several(normal(4, 4), normal(4)))
def conjugate_gradient(a, b):
    a = a @ a.t() + 4 * torch.eye(4)
    x = torch.zeros_like(b)
    r = b - a @ x
    p = r
    for _ in range(6):
        rr = r @ r
        if rr < 1e-8:
            break
        alpha = rr / (p @ (a @ p))
        x = x + alpha * p
        r = r - alpha * (a @ p)
        p = r + (r @ r) / rr * p
    return x


@program(normal(2, scale=2.0))
def newton(x):
    y = x.clone()
    for i in range(8):
        step = (y**3 - x) / (3 * y**2 + 0.1)
        y = y - step
        if step.abs().max() < 1e-2:
            return y, i
    return y, 8


@program(several(normal(3, 8), integers(1, 5)))
def number_of_steps(x, n):
    for i in range(int(n)):
        x = torch.tanh(x) + i
    return x


@program(several(normal(6, 4), integers(1, 6)))
def indexed_by_item(x, n):
    k = n.item()
    return x[k] * 2, x[:k].sum()


@program(integers(0, 5, 6))
def listed(x):
    return sum(v * i for i, v in enumerate(x.tolist()))


@program(integers(0, 3, 5))
def dictionary(x):
    counts: dict = {}
    for v in x.tolist():
        counts[v] = counts.get(v, 0) + 1
    return counts


@program(several(normal(6), normal(6)))
def line_search(x, d):
    t, fx = 1.0, (x**2).sum()
    while ((x + t * d) ** 2).sum() > fx and t > 1e-2:
        t *= 0.5
    return x + t * d, t


@program(normal(3, grad=True))
def adaptive_computation(x):
    halting, out = torch.zeros(()), torch.zeros_like(x)
    for n in range(5):
        x = torch.tanh(x * 1.5)
        p = torch.sigmoid(x.sum())
        halting = halting + p
        out = out + p * x
        if halting > 0.99:
            return out, n
    return out, 5


# ----------------------------------------------------------------------------------------------------- detection, search


@program(several(lambda g: (torch.rand(6, 2, generator=g),), lambda g: (torch.rand(6, generator=g),)))
def nms(corners, scores):
    boxes = torch.cat([corners, corners + 0.4], 1)
    keep, order = [], scores.argsort(descending=True)
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        if order.numel() == 1:
            break
        rest = order[1:]
        lt = torch.maximum(boxes[i, :2], boxes[rest, :2])
        rb = torch.minimum(boxes[i, 2:], boxes[rest, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        order = rest[inter / (0.32 - inter) <= 0.3]
    return torch.stack(keep)


@program(normal(3, 5))
def beam_search(logits):
    beams = [([], 0.0)]
    for t in range(3):
        scores = logits[t].log_softmax(0)
        grown = [(s + [v], p + scores[v].item()) for s, p in beams for v in range(5)]
        beams = sorted(grown, key=lambda b: -b[1])[:2]
    return beams[0][0]


@program(normal(4, 7))
def greedy_until_end(logits):
    out = []
    for t in range(4):
        token = logits[t].argmax().item()
        if token == 0:
            break
        out.append(token)
    return out


@program(several(normal(3, 6), normal(3, 6)))
def speculative_sampling(draft, target):
    accepted = 0
    for t in range(3):
        token = draft[t].argmax()
        if target[t].argmax() == token:
            accepted += 1
        else:
            break
    return accepted, target[min(accepted, 2)].argmax()


@program(integers(0, 4, 8))
def ctc_collapse(labels):
    out, last = [], 0
    for v in labels.tolist():
        if v != 0 and v != last:
            out.append(v)
        last = v
    return torch.tensor(out)


# -------------------------------------------------------------------------------------------------- mixtures of experts


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if not mask.any():
                continue
            out[mask] = expert(x[mask])
        return out


EXPERTS = Experts()


@program(normal(5, 4))
def mixture_of_experts(x):
    return EXPERTS(x)


# ---------------------------------------------------------------------------------------------------- training logic


@program(several(normal(4, grad=True), normal(4)))
def surrogate(w, x):
    loss = ((w - x) ** 2).mean()
    if loss < 0.5:
        loss = loss * 2
    elif loss < 1.5:
        loss = loss + w.abs().sum() * 0.1
    return loss


@program(several(normal(3, 4), integers(0, 2, 3)))
def hard_examples(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    hard = losses > 1.5
    if hard.sum() >= 2:
        return losses[hard].mean()
    return losses.mean()


@program(several(normal(4), normal(4)))
def gradient_surgery(a, b):
    dot = a @ b
    if dot < 0:
        a = a - dot / (b @ b) * b
    return a + b


@program(several(normal(4), integers(0, 3)))
def curriculum(x, stage):
    if stage == 0:
        return x
    if stage == 1:
        return x * 2
    return x.sin()


@program(normal(4))
def observer(x):
    low, high = x.min().item(), x.max().item()
    scale = max(high - low, 1e-3) / 255
    return torch.round((x - low) / scale) * scale + low


@program(normal(4, grad=True))
def dropped_layer(x):
    if torch.rand([]) < 0.5:
        x = x * 2
    return F.dropout(x, 0.5).sum()


@program(normal(4))
def random_then_decide(x):
    noise = torch.rand(4)
    if noise.sum() > 2:
        noise = noise + torch.rand(4)
    return x + noise


@program(normal(4))
def written_before_and_after(x):
    x.add_(1)
    if x.sum() > 4:
        x.mul_(2)
    x.sub_(1)
    return x * 1


# ------------------------------------------------------------------------------------------------- Python over data


@program(normal(3))
def boolean_operators(x):
    a, b = x[0] > 0, x[1] > 0
    return (x * 2 if a and b else x) + (1 if a or x[2] > 0 else 0) + (1 if not b else 2)


@program(normal(4))
def chained_comparison(x):
    return x.mean() if -0.5 < x.mean() < 0.5 else x.sum()


@program(normal(4))
def smallest_of_items(x):
    return min(v.item() for v in x), max(x.tolist()), sorted(x.tolist())


@program(normal(3))
def any_and_all(x):
    return any(v > 1 for v in x), all(v > -1 for v in x)


@program(several(normal(4), normal(4)))
def equality(a, b):
    if torch.equal(a.round(), b.round()):
        return a
    return b if torch.allclose(a, b, atol=1.0) else a + b


@program(integers(0, 3, 4))
def members(x):
    return 2 in x, 1 in x.tolist()


@program(normal(5))
def ternary_in_comprehension(x):
    return [v * 2 if v > 0 else -v for v in x]


@program(normal(4))
def keyed(x):
    table = {True: torch.sin, False: torch.cos}
    return table[bool(x.sum() > 0)](x)


@program(several(normal(4, 3), integers(1, 4, 4)))
def lengths(x, n):
    return [x[i, :k].sum() for i, k in enumerate(n.tolist())]


@program(normal(6))
def rows_that_are_left(x):
    selected = x[x > 0]
    if selected.numel() == 0:
        return torch.zeros(())
    return selected.mean()


@program(normal(6))
def iterated_selection(x):
    return [v * 2 for v in x[x > 0.5]]


@program(normal(3))
def raised(x):
    try:
        if x.sum() > 1:
            raise ValueError("large")
        return x
    except ValueError as error:
        return str(error)


@program(normal(4))
def no_grad_inside(x):
    with torch.no_grad():
        large = x.norm() > 2
    return x / 2 if large else x


@program(normal(4, 4))
def autocast_inside(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        if y.sum() > 0:
            return y.float()
    return x


@program(normal(4))
def formatted_number(x):
    n = int(x.sum().item() > 0)
    return f"state {n}", x * n


@program(normal(4))
def switch_of_integers(x):
    k = int(x.abs().sum()) % 3
    match k:
        case 0:
            return x
        case 1:
            return x + 1
    return x - 1


# ------------------------------------------------------------------------------------------------------- structures


@program(integers(-3, 4, 7))
def balanced(x):
    stack = []
    for v in x.tolist():
        if v > 0:
            stack.append(v)
        elif stack and v < 0:
            stack.pop()
    return stack


def _depth(x, node: int) -> int:
    if node >= len(x) or x[node] < 0:
        return 0
    return 1 + max(_depth(x, 2 * node + 1), _depth(x, 2 * node + 2))


@program(normal(7))
def tree_depth(x):
    return _depth(x, 0)


@program(several(normal(5, 2), normal(2)))
def nearest_point(points, query):
    d = (points - query).norm(dim=1)
    i = int(d.argmin())
    return points[i], i


@program(normal(2, scale=2.0))
def error_controlled_step(x):
    t, h = 0.0, 0.5
    while t < 1.0:
        k1 = -x
        k2 = -(x + h * k1)
        error = (h / 2 * (k2 - k1)).abs().max()
        if error > 0.3 and h > 0.1:
            h = h / 2
            continue
        x, t = x + h / 2 * (k1 + k2), t + h
    return x


@program(several(normal(4), integers(0, 4)))
def rollout(state, action):
    total = 0.0
    for _ in range(3):
        state = state.roll(int(action)) * 0.9
        reward = state[0].item()
        total += reward
        if reward < -0.5:
            break
    return total, state


@program(several(normal(6, 3, grad=True), integers(0, 5, 6)))
def pairs_of_one_label(x, labels):
    """As losses of metric learning look for pairs."""
    same = (labels[:, None] == labels[None]).byte()
    same.fill_diagonal_(0)
    i, j = torch.where(same)
    if len(i) == 0:
        return x.sum() * 0
    return (x[i] * x[j]).sum()
