"""Functions with derivatives of their own, torch.func, higher derivatives."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

from tests.scenarios.compared import normal, program, trained, with_gradients


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, hi):
        ctx.save_for_backward(x)
        ctx.lo = lo
        ctx.hi = hi
        return x.clamp(lo, hi)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ((x > ctx.lo) & (x < ctx.hi)), None, None


class STE(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


class Inplace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        v, i = x.sort()
        ctx.mark_non_differentiable(i)
        ctx.save_for_backward(i)
        ctx.set_materialize_grads(False)
        return v, i, x * 2

    @staticmethod
    def backward(ctx, g, _, g2):
        (i,) = ctx.saved_tensors
        out = torch.zeros(i.shape)
        if g is not None:
            out = out.scatter(-1, i, g)
        if g2 is not None:
            out = out + g2 * 2
        return out


@program
def fn_clamp(jit):
    compiled = jit(lambda x: Clamp.apply(x, -0.5, 0.5))
    return with_gradients(compiled, [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def fn_ste(jit):
    compiled = jit(lambda x: STE.apply(x * 3) * x)
    return with_gradients(compiled, [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def fn_ste_vmap(jit):
    compiled = jit(lambda x: vmap(STE.apply)(x * 3) * x)
    return with_gradients(compiled, [(normal(4, 2, seed=i, grad=True),) for i in range(3)])


@program
def fn_inplace(jit):
    compiled = jit(lambda x: Inplace.apply(x * 3) * x)
    return with_gradients(compiled, [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def fn_two(jit):
    compiled = jit(lambda x: Two.apply(x))
    results = []
    for i in range(3):
        x = normal(4, seed=i, grad=True)
        a, b, d = compiled(x)
        (a * torch.arange(4.0)).sum().backward()
        results.append((a, b, d, x.grad))
    return results


@program
def fn_two_other(jit):
    compiled = jit(lambda x: Two.apply(x)[2])
    return with_gradients(compiled, [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def fn_double(jit):
    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 3 * x**2

    def f(x):
        y = Sq.apply(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g.pow(2).sum()

    return with_gradients(jit(f), [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def fn_once_differentiable(jit):
    from torch.autograd.function import once_differentiable

    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 3 * x**2

    return with_gradients(jit(lambda x: Sq.apply(x)), [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def fn_needs_input_grad(jit):
    log = []

    class Mul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, g):
            log.append(ctx.needs_input_grad)
            a, b = ctx.saved_tensors
            return g * b if ctx.needs_input_grad[0] else None, g * a if ctx.needs_input_grad[1] else None

    compiled = jit(lambda a, b: Mul.apply(a, b))
    return with_gradients(
        compiled,
        [
            (normal(3, grad=True), normal(3)),
            (normal(3), normal(3, grad=True)),
            (normal(3, grad=True), normal(3, grad=True)),
        ],
    ), log


@program
def fn_grad_reverse(jit):
    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, loss):
            ctx.l = loss
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return g.neg() * ctx.l, None

    return with_gradients(
        jit(lambda x, loss: Rev.apply(x, loss)), [(normal(3, seed=i, grad=True), 0.1 * i) for i in range(4)]
    )


@program
def grad_penalty(jit):
    torch.manual_seed(1)
    D = nn.Sequential(nn.Linear(3, 4), nn.LeakyReLU(0.2), nn.Linear(4, 1))

    def f(a, b):
        e = torch.rand(a.shape[0], 1)
        x = (e * a + (1 - e) * b).requires_grad_()
        (g,) = torch.autograd.grad(D(x).sum(), x, create_graph=True)
        return ((g.norm(2, dim=1) - 1) ** 2).mean()

    compiled = jit(f)
    return trained(compiled, D, [(normal(4, 3, seed=i), normal(4, 3, seed=i + 5)) for i in range(3)])


@program
def hvp(jit):
    def f(x, v):
        loss = (x.sin() * x**2).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (h,) = torch.autograd.grad(g, x, v, retain_graph=True)
        return g, h

    return [jit(f)(normal(3, seed=i, grad=True), normal(3, seed=i + 3)) for i in range(2)]


@program
def hvp_one(jit):
    def f(x, v):
        loss = (x.sin() * x**2).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad((g * v).sum(), x)[0]

    compiled = jit(f)
    return [compiled(normal(3, seed=i, grad=True), normal(3, seed=i + 3)) for i in range(3)]


@program
def maml(jit):
    torch.manual_seed(1)
    module = nn.Linear(3, 1)

    def f(x, y, xq, yq):
        w = dict(module.named_parameters())
        for _ in range(2):
            loss = F.mse_loss(functional_call(module, w, (x,)), y)
            gs = torch.autograd.grad(loss, list(w.values()), create_graph=True)
            w = {k: p - 0.1 * g for (k, p), g in zip(w.items(), gs)}
        return F.mse_loss(functional_call(module, w, (xq,)), yq)

    compiled = jit(f)
    return trained(
        compiled, module, [tuple(normal(4, d, seed=i + j) for j, d in enumerate((3, 1, 3, 1))) for i in range(3)]
    )


@program
def allow_unused(jit):
    def f(x, y):
        return torch.autograd.grad((x * 2).sum(), [x, y], allow_unused=True)

    def g(x, y):
        return torch.autograd.grad((x * 2).sum(), [x, y], allow_unused=True, materialize_grads=True)

    a, b = jit(f), jit(g)
    results = []
    for i in range(2):
        results.append((a(normal(3, grad=True), normal(3, grad=True)), b(normal(3, grad=True), normal(3, grad=True))))

    def h(x, y):
        try:
            return torch.autograd.grad((x * 2).sum(), [x, y])
        except RuntimeError as e:
            return str(e)[:60]

    return results, jit(h)(normal(3, grad=True), normal(3, grad=True))


@program
def grad_outputs_batched(jit):
    def f(x):
        y = x.sin()
        return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)[0]

    compiled = jit(f)
    return [compiled(normal(3, seed=i, grad=True)) for i in range(2)]


@program
def functional_jacobian(jit):
    from torch.autograd.functional import hessian as H
    from torch.autograd.functional import hvp as hv
    from torch.autograd.functional import jacobian

    def f(x):
        return (
            jacobian(lambda y: (y**2).cumsum(0), x),
            H(lambda y: (y**3).sum(), x),
            hv(lambda y: (y**3).sum(), x, torch.ones(3)),
        )

    compiled = jit(f)
    return [compiled(normal(3, seed=i)) for i in range(2)]


@program
def func_transforms(jit):
    def f(x):
        g = lambda y: (y.sin() * y).sum()
        return (
            grad(g)(x),
            hessian(g)(x),
            jacrev(torch.tanh)(x),
            jacfwd(torch.tanh)(x),
            jvp(g, (x,), (x,)),
            vmap(grad(g))(torch.stack([x, x * 2])),
            grad_and_value(g)(x),
        )

    compiled = jit(f)
    return [compiled(normal(3, seed=i)) for i in range(2)]


@program
def per_sample_grads(jit):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(p, x, y):
        return F.cross_entropy(functional_call(module, p, (x[None],)), y[None])

    def f(x, y):
        return vmap(grad(loss), (None, 0, 0))({k: v.detach() for k, v in module.named_parameters()}, x, y)

    compiled = jit(f)
    return [compiled(normal(5, 3, seed=i), torch.arange(5) % 2) for i in range(2)]


@program
def ensemble(jit):
    torch.manual_seed(1)
    ms = [nn.Linear(3, 2) for _ in range(3)]
    p, b = stack_module_state(ms)

    def f(x):
        return vmap(lambda p, b, x: functional_call(ms[0], (p, b), (x,)), (0, 0, None))(p, b, x)

    compiled = jit(f)
    return [compiled(normal(5, 3, seed=i)) for i in range(2)]


@program
def vmap_random(jit):
    def f(x):
        return vmap(lambda results: results + torch.randn(3), randomness="different")(x), vmap(
            lambda results: F.dropout(results), randomness="same"
        )(x)

    compiled = jit(f)
    return [compiled(normal(4, 3, seed=i)) for i in range(2)]


@program
def vmap_inplace(jit):
    def f(x):
        def g(results):
            results = results.clone()
            results[0] = results[1] * 2
            results.clamp_(min=0)
            return torch.where(results.sum() > 0, results, -results)

        return vmap(g)(x)

    compiled = jit(f)
    return [compiled(normal(4, 3, seed=i)) for i in range(2)]
