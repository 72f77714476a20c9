"""Models, losses and algorithms whose control flow reads data."""

import random as pyrandom

import torch
import torch.nn.functional as F
from torch import nn

from tests.scenarios.compared import normal, program, trained, with_gradients


@program
def gumbel_softmax(jit):
    def f(x, hard):
        return F.gumbel_softmax(x, 0.7, hard=hard)

    return with_gradients(jit(f), [(normal(3, 4, seed=i, grad=True), bool(i % 2)) for i in range(4)])


@program
def reparam_vae(jit):
    torch.manual_seed(1)

    class V(nn.Module):
        def __init__(s):
            super().__init__()
            s.e = nn.Linear(4, 4)
            s.d = nn.Linear(2, 4)

        def forward(s, x):
            mu, lv = s.e(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * (0.5 * lv).exp() if s.training else mu
            return F.mse_loss(s.d(z), x) - 0.5 * (1 + lv - mu**2 - lv.exp()).sum(-1).mean()

    module = V()
    compiled = jit(module)
    results = trained(
        compiled, module, [(normal(3, 4, seed=i),) for i in range(3)], torch.optim.Adam(module.parameters(), 0.01)
    )
    module.eval()
    return results, compiled(normal(3, 4))


@program
def distributions_(jit):
    D = torch.distributions

    def f(x):
        n = D.Normal(x, x.exp())
        compiled = D.Categorical(logits=x)
        g = D.Gamma(x.exp(), 1.0)
        b = D.Bernoulli(logits=x)
        mv = D.MultivariateNormal(x[0], torch.eye(3))
        return (
            n.rsample(),
            n.log_prob(x).sum(),
            compiled.sample(),
            compiled.entropy(),
            D.kl_divergence(n, D.Normal(0.0, 1.0)).sum(),
            g.rsample(),
            b.log_prob((x > 0).float()),
            mv.rsample(),
            D.Independent(n, 1).log_prob(x),
            D.TransformedDistribution(n, [D.transforms.TanhTransform()]).rsample(),
        )

    return with_gradients(jit(f), [(normal(2, 3, seed=i, grad=True),) for i in range(3)])


@program
def ppo_update(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    o = torch.optim.Adam(module.parameters(), 1e-2)

    def upd(s, a, adv, old):
        for _ in range(2):
            lp = module(s).log_softmax(-1).gather(1, a[:, None]).squeeze(1)
            results = (lp - old).exp()
            loss = -torch.min(results * adv, results.clamp(0.8, 1.2) * adv).mean()
            o.zero_grad()
            loss.backward()
            o.step()
            if (old - lp).mean().abs() > 0.02:
                break
        return loss

    compiled = jit(upd)
    return [
        compiled(normal(5, 3, seed=i), torch.arange(5) % 2, normal(5, seed=i), torch.full((5,), -0.7)) for i in range(4)
    ], module


@program
def dqn_target(jit):
    torch.manual_seed(1)
    q = nn.Linear(3, 2)
    t = nn.Linear(3, 2)
    t.load_state_dict(q.state_dict())
    o = torch.optim.SGD(q.parameters(), 0.1)
    n = [0]

    def step(s, a, results, s2, done):
        with torch.no_grad():
            y = results + 0.9 * (1 - done) * t(s2).max(1).values
        loss = F.smooth_l1_loss(q(s).gather(1, a[:, None])[:, 0], y)
        o.zero_grad()
        loss.backward()
        o.step()
        n[0] += 1
        if n[0] % 2 == 0:
            t.load_state_dict(q.state_dict())
        return loss

    compiled = jit(step)
    return [
        compiled(normal(4, 3, seed=i), torch.arange(4) % 2, normal(4, seed=i), normal(4, 3, seed=i + 1), torch.zeros(4))
        for i in range(5)
    ], t


@program
def contrastive(jit):
    def f(a, b, t):
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        loss = a @ b.T / t
        y = torch.arange(len(a))
        return (F.cross_entropy(loss, y) + F.cross_entropy(loss.T, y)) / 2, (loss.argmax(1) == y).float().mean()

    return with_gradients(
        jit(f), [(normal(n, 3, seed=n, grad=True), normal(n, 3, seed=n + 1, grad=True), 0.1) for n in (4, 5, 4, 6)]
    )


@program
def triplet_mining(jit):
    def f(e, y):
        d = torch.cdist(e, e)
        same = y[:, None] == y[None]
        hp = (d * same).max(1).values
        hn = (d + 1e3 * same).min(1).values
        k = (hp - hn + 0.2) > 0
        if not k.any():
            return d.sum() * 0
        return (hp - hn + 0.2)[k].mean()

    return with_gradients(jit(f), [(normal(5, 2, seed=i, grad=True), torch.tensor([0, 0, 1, 1, 2])) for i in range(5)])


@program
def focal_dice(jit):
    def f(x, y):
        p = x.sigmoid()
        ce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
        pt = p * y + (1 - p) * (1 - y)
        foc = (0.25 * (1 - pt) ** 2 * ce).mean()
        dice = 1 - (2 * (p * y).sum((1, 2)) + 1) / (p.sum((1, 2)) + y.sum((1, 2)) + 1)
        return foc + dice.mean(), (p > 0.5).sum()

    return with_gradients(
        jit(f), [(normal(2, n, n, seed=n, grad=True), (normal(2, n, n) > 0).float()) for n in (3, 4, 3, 5)]
    )


@program
def label_smoothing_ignore(jit):
    def f(x, y, w):
        return (
            F.cross_entropy(x, y, weight=w, ignore_index=-1, label_smoothing=0.1),
            F.cross_entropy(x, x.softmax(-1)),
            F.nll_loss(x.log_softmax(-1), y.clamp(0), reduction="sum"),
        )

    return with_gradients(
        jit(f),
        [
            (normal(4, 3, seed=i, grad=True), torch.tensor([0, 1, -1, i % 3]), torch.tensor([1.0, 2.0, 0.5]))
            for i in range(3)
        ],
    )


@program
def all_ignored(jit):
    def f(x, y):
        return F.cross_entropy(x, y, ignore_index=-1)

    return with_gradients(
        jit(f), [(normal(2, 3, grad=True), torch.tensor([-1, -1])), (normal(2, 3, grad=True), torch.tensor([-1, 1]))]
    )


@program
def padded_attention(jit):
    torch.manual_seed(1)
    a = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1)

    def f(x, n):
        mask = torch.arange(x.shape[1])[None] >= n[:, None]
        o, w = a(x, x, x, key_padding_mask=mask, attn_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))
        return o.masked_fill(mask[..., None], 0).sum(1)

    compiled = jit(f)
    results = trained(compiled, a, [(normal(2, s, 4, seed=s), torch.tensor([s, 2])) for s in (3, 4, 5, 3)])
    a.eval()
    return results, compiled(normal(2, 3, 4), torch.tensor([3, 1]))


@program
def transformer_encoder(jit):
    torch.manual_seed(1)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True), 2)
    compiled = jit(module)
    results = trained(compiled, module, [(normal(2, s, 4, seed=s),) for s in (3, 4, 3)])
    module.eval()
    with torch.no_grad():
        results.append(
            compiled(normal(2, 3, 4), src_key_padding_mask=torch.tensor([[False, False, True], [False, True, True]]))
        )
    return results


@program
def lstm_stateful(jit):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.l = nn.LSTMCell(3, 4)
            s.state = None

        def reset(s):
            s.state = None

        def forward(s, x):
            s.state = s.l(x, s.state)
            s.state = tuple(t.detach() for t in s.state) if not s.training else s.state
            return s.state[0]

    torch.manual_seed(1)
    module = M().eval()
    compiled = jit(module)
    results = [compiled(normal(2, 3, seed=i)) for i in range(3)]
    module.reset()
    results.append(compiled(normal(2, 3)))
    return results, module.state


@program
def tbptt(jit):
    torch.manual_seed(1)
    layer = nn.GRU(2, 3)
    o = torch.optim.SGD(layer.parameters(), 0.1)

    def step(x, h):
        y, h = layer(x, h.detach())
        loss = y.pow(2).mean()
        o.zero_grad()
        loss.backward()
        o.step()
        return loss.detach(), h

    compiled = jit(step)
    h = torch.zeros(1, 2, 3)
    results = []
    for i in range(4):
        a, h = compiled(normal(3, 2, 2, seed=i), h)
        results.append((a, h))
    return results


@program
def unfold_conv(jit):
    def f(x, w):
        u = F.unfold(x, 3, padding=1, stride=2)
        o = w.view(w.shape[0], -1) @ u
        return (
            F.fold(u, x.shape[-2:], 3, padding=1, stride=2),
            o,
            F.pixel_shuffle(x.repeat(1, 2, 1, 1), 2),
            F.grid_sample(x, torch.zeros(1, 2, 2, 2), align_corners=False),
            F.conv_transpose2d(x, w.transpose(0, 1)[:2], stride=2),
        )

    return with_gradients(
        jit(f), [(normal(1, 2, s, s, seed=s, grad=True), normal(3, 2, 3, 3, grad=True)) for s in (4, 5, 6, 4)]
    )


@program
def depthwise_norms(jit):
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Conv2d(4, 2, 1, bias=False),
        nn.BatchNorm2d(2, momentum=None),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    compiled = jit(module)
    results = trained(compiled, module, [(normal(2, 4, s, s, seed=s),) for s in (4, 5, 4)])
    module.eval()
    return results, compiled(normal(2, 4, 4, 4)), module


@program
def stochastic_depth_mixup(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 3)

    def f(x, y):
        lam = pyrandom.betavariate(0.5, 0.5)
        p = torch.randperm(len(x))
        x = module(lam * x + (1 - lam) * x[p])
        if torch.rand(()) < 0.5:
            x = x + module(x)
        return lam * F.cross_entropy(x, y) + (1 - lam) * F.cross_entropy(x, y[p])

    compiled = jit(f)
    return trained(compiled, module, [(normal(4, 3, seed=i), torch.arange(4) % 3) for i in range(6)])


@program
def moe_topk(jit):
    torch.manual_seed(1)

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.g = nn.Linear(3, 4)
            s.e = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(s, x):
            w, i = s.g(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for k, e in enumerate(s.e):
                results, compiled = torch.where(i == k)
                if results.numel() == 0:
                    continue
                out.index_add_(0, results, e(x[results]) * w[results, compiled, None])
            return out

    module = M()
    compiled = jit(module)
    return trained(compiled, module, [(normal(3, 3, seed=i),) for i in range(6)])


@program
def kmeans(jit):
    def f(x, k):
        compiled = x[:k].clone()
        for _ in range(3):
            a = torch.cdist(x, compiled).argmin(1)
            for j in range(k):
                module = a == j
                if module.any():
                    compiled[j] = x[module].mean(0)
        return compiled, a

    compiled = jit(f)
    return [compiled(normal(8, 2, seed=i), 3) for i in range(4)]


@program
def newton_solver(jit):
    def f(a):
        x = torch.ones_like(a)
        n = 0
        while (x * x - a).abs().max() > 1e-6 and n < 20:
            x = (x + a / x) / 2
            n += 1
        return x, n

    compiled = jit(f)
    return [compiled(normal(3, seed=i).abs() + 0.5) for i in range(4)]


@program
def linalg_mix(jit):
    def f(a):
        s = a @ a.mT + torch.eye(3)
        L = torch.linalg.cholesky(s)
        q, results = torch.linalg.qr(a)
        e = torch.linalg.eigvalsh(s)
        u, sv, v = torch.linalg.svd(a)
        return (
            L,
            torch.linalg.solve(s, a),
            torch.linalg.det(s),
            torch.linalg.slogdet(s)[1],
            e,
            sv,
            torch.linalg.inv(s),
            torch.linalg.matrix_exp(a * 0.1),
            torch.trace(s),
            torch.linalg.matrix_power(a, 3),
            results.abs(),
        )

    return with_gradients(jit(f), [(normal(3, 3, seed=i, grad=True),) for i in range(2)])


@program
def scatter_segments(jit):
    def f(x, i, n):
        o = torch.zeros(n, x.shape[1]).index_add(0, i, x)
        compiled = torch.bincount(i, minlength=n).clamp(min=1)[:, None]
        module = torch.full((n, x.shape[1]), -1e9).scatter_reduce(0, i[:, None].expand_as(x), x, "amax")
        return (
            o / compiled,
            module,
            torch.zeros(n).scatter_add_(0, i, x[:, 0]),
            torch.segment_reduce(x[:, 0], "sum", lengths=torch.bincount(i, minlength=n)),
        )

    return with_gradients(
        jit(f), [(normal(5, 2, seed=i, grad=True), torch.tensor([0, 0, 1, 2, 2]), 3 + i % 2) for i in range(3)]
    )


@program
def nonzero_unique(jit):
    def f(x):
        i = (x > 0).nonzero(as_tuple=True)[0]
        u, inv, cnt = torch.unique((x * 2).int(), return_inverse=True, return_counts=True)
        return (
            x[i].sum(),
            i.numel(),
            u,
            inv,
            cnt,
            torch.masked_select(x, x < 0),
            x[x.isfinite()],
            torch.histc(x, 4),
            torch.searchsorted(x.sort()[0], x),
            torch.bucketize(x, torch.tensor([-1.0, 0, 1])),
            torch.combinations(x[:3]),
        )

    compiled = jit(f)
    return [compiled(normal(6, seed=i)) for i in range(5)]


@program
def straight_through_quant(jit):
    class Q(nn.Module):
        def __init__(s):
            super().__init__()
            s.register_buffer("lo", torch.tensor(float("inf")))
            s.register_buffer("hi", torch.tensor(-float("inf")))
            s.on = True

        def forward(s, x):
            if s.training and s.on:
                s.lo = torch.minimum(s.lo, x.detach().min())
                s.hi = torch.maximum(s.hi, x.detach().max())
            sc = (s.hi - s.lo) / 255
            q = ((x - s.lo) / sc).round().clamp(0, 255) * sc + s.lo
            return x + (q - x).detach()

    module = Q()
    compiled = jit(module)
    results = with_gradients(compiled, [(normal(4, seed=i, grad=True),) for i in range(4)])
    module.on = False
    return results + with_gradients(compiled, [(normal(4, seed=9, grad=True),)]), module
