"""NaNs, ties, complex numbers, sparse and nested tensors, sequences."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.scenarios.compared import normal, program, trained, with_gradients


@program
def where_nan_grad(jit):
    def f(x):
        return torch.where(x > 0, x.sqrt(), torch.zeros_like(x)).sum(), torch.where(
            x > 0, torch.log(x.clamp(min=1e-6)), x
        )

    return with_gradients(jit(f), [(normal(4, seed=i, grad=True),) for i in range(3)])


@program
def masked_fill_inf(jit):
    def f(x, module):
        s = x.masked_fill(module, float("-inf"))
        p = s.softmax(-1)
        return torch.nan_to_num(p), s.logsumexp(-1)

    compiled = jit(f)
    results = []
    for i in range(3):
        x = normal(2, 4, seed=i, grad=True)
        module = torch.zeros(2, 4, dtype=torch.bool)
        module[0] = True
        a, b = compiled(x, module)
        a.sum().backward()
        results.append((a, b, x.grad))
    return results


@program
def norm_at_zero(jit):
    def f(x):
        return (
            x.norm(),
            x.norm(dim=0),
            torch.linalg.vector_norm(x, 1),
            x.abs().sum(),
            x.std(0),
            F.normalize(x),
            F.cosine_similarity(x, x + 0),
            torch.cdist(x, x),
        )

    return with_gradients(jit(f), [(torch.zeros(3, 2, requires_grad=True),), (normal(3, 2, grad=True),)])


@program
def extremes_ties(jit):
    def f(x):
        return (
            x.max(),
            x.max(0).values,
            x.amax(0),
            x.min(1)[0],
            x.sort(0)[0],
            x.topk(2, 0)[0],
            x.median(),
            torch.maximum(x, x.flip(0)),
            x.clamp(0, 1),
            F.relu(x),
            x.cummax(0)[0],
            F.hardtanh(x),
            x.prod(),
            x.cumprod(0),
        )

    return with_gradients(
        jit(f),
        [(torch.zeros(3, 2, requires_grad=True),), (torch.ones(3, 2, requires_grad=True),), (normal(3, 2, grad=True),)],
    )


@program
def complex_numbers(jit):
    def f(z):
        return (
            z.abs(),
            z.angle(),
            (z * z.conj()).real,
            torch.fft.fft(z),
            z.exp(),
            torch.view_as_real(z),
            z.imag * 2,
            torch.linalg.vector_norm(z),
        )

    return with_gradients(jit(f), [(normal(4, seed=i, grad=True, dtype=torch.complex64),) for i in range(3)])


@program
def complex_inplace(jit):
    def f(z):
        y = z.clone()
        y.real.mul_(2)
        y.imag[0] = 3
        torch.view_as_real(y)[1] += 1
        return y, y.conj(), y.resolve_conj(), y.mH if y.dim() > 1 else y.conj().is_conj()

    return with_gradients(jit(f), [(normal(4, seed=i, grad=True, dtype=torch.complex64),) for i in range(3)])


@program
def complex_scalar(jit):
    def f(x, k):
        return x * k, x + 1j, torch.polar(x.abs(), x), torch.complex(x, x * 2)

    return with_gradients(jit(f), [(normal(4, seed=i, grad=True), complex(1, i)) for i in range(3)])


@program
def rfft(jit):
    def f(x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.arange(x.shape[-1] // 2 + 1), n=x.shape[-1]), torch.stft(
            x, 4, window=torch.ones(4), return_complex=True
        ).abs()

    return with_gradients(jit(f), [(normal(2, n, seed=i, grad=True),) for i, n in enumerate((8, 9, 8, 12))])


@program
def sparse_input(jit):
    def f(a, x):
        return torch.sparse.mm(a, x), a @ x, a.to_dense().sum()

    compiled = jit(f)
    results = []
    for i in range(3):
        a = (normal(3, 4, seed=i) > 0).float().to_sparse()
        x = normal(4, 2, seed=i, grad=True)
        o = compiled(a, x)
        o[0].sum().backward()
        results.append((o, x.grad))
    return results


@program
def sparse_csr(jit):
    def f(a, x):
        return a @ x

    compiled = jit(f)
    return [compiled((normal(3, 4, seed=i) > 0).float().to_sparse_csr(), normal(4, 2, seed=i)) for i in range(3)]


@program
def sparse_built(jit):
    def f(i, v, x):
        a = torch.sparse_coo_tensor(i, v, (3, 4))
        return torch.sparse.mm(a, x)

    compiled = jit(f)
    results = []
    for i in range(3):
        v = normal(3, seed=i, grad=True)
        x = normal(4, 2, grad=True)
        o = compiled(torch.tensor([[0, 1, 2], [1, 3, 0]]), v, x)
        o.sum().backward()
        results.append((o, v.grad, x.grad))
    return results


@program
def sparse_coalesce(jit):
    def f(i, v):
        a = torch.sparse_coo_tensor(i, v, (3, 4)).coalesce()
        return a.values(), a.indices(), a._nnz(), a.is_coalesced()

    compiled = jit(f)
    return [compiled(torch.tensor([[0, 1, j], [1, 3, j]]), normal(3, seed=j)) for j in range(3)]


@program
def sparse_embedding(jit):
    torch.manual_seed(1)
    module = nn.Embedding(5, 3, sparse=True)
    compiled = jit(module)
    results = []
    for i in range(2):
        module.zero_grad()
        compiled(torch.tensor([i, 1, 1])).sum().backward()
        results.append(module.weight.grad.to_dense())
    return results, module.weight.grad.is_sparse


@program
def nested(jit):
    def f(a, b):
        n = torch.nested.nested_tensor([a, b])
        return torch.nested.to_padded_tensor(n * 2, 0.0)

    compiled = jit(f)
    return [compiled(normal(2 + i, 3), normal(3, 3)) for i in range(3)]


@program
def packed_sequence(jit):
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    torch.manual_seed(1)
    module = nn.GRU(3, 4, batch_first=True)

    def f(x, n):
        p = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        o, h = module(p)
        return pad_packed_sequence(o, batch_first=True)[0].sum() + h.sum()

    compiled = jit(f)
    return trained(compiled, module, [(normal(3, 5, 3, seed=i), torch.tensor([5, 2 + i, 3])) for i in range(3)])
