"""Writes in place, views, aliases, overlapping inputs."""

import torch

from tests.scenarios.compared import normal, program, with_gradients


@program
def inplace_views(jit):
    def f(x):
        y = x * 1
        y[0] *= 2
        y[:, 1] += y[:, 0]
        y.view(-1)[2] = 5
        y.t()[0].neg_()
        a, b = y.chunk(2)
        a.add_(b)
        y[y > 1] = 0
        y.diagonal().fill_(7)
        return y, a

    return with_gradients(jit(f), [(normal(4, 4, seed=i, grad=True),) for i in range(3)])


@program
def inplace_argument_views(jit):
    def f(x):
        v = x[1:]
        v.mul_(2)
        x.t_()
        return v, x[0]

    compiled = jit(f)
    results = []
    for i in range(3):
        x = normal(4, 3, seed=i)
        o = compiled(x)
        results.append((o, x, o[0].data_ptr() == x.data_ptr() + 12))
    return results


@program
def result_aliases_argument(jit):
    def f(x):
        return x[1], x.view(-1), x

    compiled = jit(f)
    results = []
    for i in range(3):
        x = normal(3, 2, seed=i)
        a, b, d = compiled(x)
        a.fill_(9)
        results.append((x, b, d is x, a._base is x, a._is_view()))
    return results


@program
def results_alias_each_other(jit):
    def f(x):
        y = x * 2
        return y, y[0], y.t()

    compiled = jit(f)
    results = []
    for i in range(3):
        x = normal(3, 2, seed=i)
        a, b, d = compiled(x)
        b.fill_(9)
        results.append((a, b, d, a._version, b._version))
    return results


@program
def version_counters(jit):
    def f(x):
        x.add_(1)
        x.mul_(2)
        return x._version

    compiled = jit(f)
    results = []
    for i in range(3):
        x = normal(3)
        results.append((compiled(x), x._version))
    return results


@program
def write_saved_error(jit):
    def f(x, w):
        y = x * w
        w.add_(1)
        return y.sum()

    compiled = jit(f)
    results = []
    for i in range(2):
        x = normal(3, grad=True)
        w = normal(3)
        try:
            compiled(x, w).backward()
            results.append(x.grad)
        except RuntimeError as e:
            results.append(str(e)[:60])
    return results


@program
def expanded_inputs(jit):
    def f(x, y):
        return x + y, (x * y).sum(0), x.contiguous(), x.reshape(-1), x.is_contiguous(), x.stride()

    return with_gradients(
        jit(f),
        [(normal(1, 3, seed=i, grad=True).expand(4, 3), normal(4, 3, seed=i, grad=True)) for i in range(2)]
        + [(normal(3, 4, seed=i).t(), normal(4, 3)) for i in range(2)],
    )


@program
def detached_view_with_a_history_of_its_own(jit):
    def f(a, b):
        early = a.detach()
        a.add_(b.sum())
        late = a.detach()
        late.sub_(b)
        early[1:].mul_(b[1:])
        return a * torch.arange(1.0, 5.0), early, late, late * 2

    compiled = jit(f)
    return with_gradients(compiled, [(normal(4, seed=s), normal(4, seed=s + 9, grad=True)) for s in range(3)])


@program
def random_fill_of_a_view_nobody_looked_at(jit):
    """PyTorch takes the view for a leaf: what it shows requires grad since it was made."""

    def f(m, s):
        row = m[0]
        row[1:].add_(s)
        return row.normal_()

    compiled = jit(f)
    return with_gradients(compiled, [(normal(3, 4, seed=s), normal(3, seed=s + 9, grad=True)) for s in range(2)])


@program
def fills_of_expanded_tensors(jit):
    seen = []
    for fill in (torch.Tensor.normal_, torch.Tensor.uniform_, torch.dropout_):
        compiled = jit(lambda x, fill=fill: fill(x.expand(2, 3), *([0.5, True] if fill is torch.dropout_ else [])))
        seen += with_gradients(compiled, [(normal(3, seed=s),) for s in range(2)])
    return seen
