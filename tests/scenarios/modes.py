"""Subclasses, torch-function modes, devices, saved tensors, grad modes, autocast."""

import torch
import torch.nn.functional as F

from tests.scenarios.compared import normal, program, with_gradients


@program
def torch_function_subclass(jit):
    class L(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            results = super().__torch_function__(func, types, args, kwargs or {})
            if isinstance(results, L):
                results.tag = getattr(args[0], "tag", None) if args else None
            return results

    def f(x):
        return x * 2, x.sum(), type(x + 1) is L

    compiled = jit(f)
    results = []
    for i in range(2):
        x = normal(3, seed=i).as_subclass(L)
        x.tag = i
        o = compiled(x)
        results.append((o, [getattr(v, "tag", "no") for v in o]))
    return results


@program
def torch_function_wrapper(jit):
    class W:
        def __init__(s, t, u):
            s.t = t
            s.u = u

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            a = [v.t if isinstance(v, W) else v for v in args]
            u = [v.u for v in args if isinstance(v, W)]
            return W(func(*a, **(kwargs or {})), u[0])

        def __add__(s, o):
            return torch.add(s, o)

    def f(w, x):
        return (w + x), torch.mul(w, x), torch.sum(w), F.relu(w)

    compiled = jit(f)
    return [[(v.t, v.u) for v in compiled(W(normal(3, seed=i), "m"), normal(3))] for i in range(3)]


@program
def subclass_made_inside(jit):
    class L(torch.Tensor):
        def double(self):
            return self * 2

    def f(x):
        y = x.as_subclass(L)
        return y.double(), isinstance(y, L), y.as_subclass(torch.Tensor)

    compiled = jit(f)
    return [compiled(normal(3, seed=i)) for i in range(2)]


@program
def function_mode(jit):
    from torch.overrides import TorchFunctionMode

    class M(TorchFunctionMode):
        def __init__(s):
            super().__init__()
            s.n = []

        def __torch_function__(s, func, types, args=(), kwargs=None):
            s.n.append(getattr(func, "__name__", "?"))
            return func(*args, **(kwargs or {}))

    def f(x):
        module = M()
        with module:
            y = torch.sin(x) + 1
        return y, module.n

    compiled = jit(f)
    return [compiled(normal(3, seed=i)) for i in range(2)]


@program
def device_mode(jit):
    def f(x):
        with torch.device("cpu"):
            return x + torch.ones(3), torch.zeros(2, device="meta").shape

    compiled = jit(f)
    return [compiled(normal(3, seed=i)) for i in range(2)]


@program
def devices_in_turn(jit):
    def f(x):
        with torch.device("cpu"):
            a = torch.ones(2)
        with torch.device("meta"):
            b = torch.ones(2)
        with torch.device("cpu"):
            d = torch.zeros(2)
        return a.device.type, b.device.type, d.device.type, a + d

    return jit(f)(normal(2))


@program
def lossy_saved(jit):
    def f(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            y = (x * x).sum()
        return y

    return with_gradients(jit(f), [(normal(3, seed=i, grad=True),) for i in range(2)])


@program
def to_identity_grad(jit):
    def f(x):
        return (
            x.to(torch.float32),
            x.float(),
            x.to(x),
            x.type(torch.float32),
            x.cpu(),
            x.to("cpu"),
            x.contiguous(),
            x.reshape(3),
            x.expand(3),
            x.view(3),
            x.squeeze(),
            x.flatten(),
            x.real,
            x.resolve_conj(),
            torch.as_tensor(x),
            torch.broadcast_to(x, (3,)),
            torch.atleast_1d(x),
            x.detach(),
            x.positive(),
            F.dropout(x, 0.5, False),
            F.dropout(x, 0.0),
            torch.nn.Identity()(x),
            x.T if x.dim() == 2 else x.t(),
            x.to_dense(),
            x.data,
            torch.Tensor(x),
            torch.asarray(x),
            x[...],
            x[:],
            x.narrow(0, 0, 3),
            x.type_as(x),
            x.movedim(0, 0),
        )

    compiled = jit(f)
    results = []
    for g in (True, False):
        x = normal(3, grad=g)
        results.append([v is x for v in compiled(x)])
        y = x * 2
        results.append([v is y for v in compiled(y)]) if g else None
        with torch.no_grad():
            results.append([v is x for v in compiled(x)])
    return results
