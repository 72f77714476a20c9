"""Parts of PyTorch that no trace describes."""

from __future__ import annotations

import io

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils import data

from eager_call_programs.common import Model, program


@program()
def hook_on_an_intermediate(folder):
    norms = []

    def odd(h):
        h = h * 2
        h.register_hook(lambda g: norms.append(round(g.norm().item(), 3)))
        return h

    return Model(odd), lambda: list(norms)


@program()
def save_to_bytes(folder):
    class Saves(Model):
        def odd(self, h):
            out = io.BytesIO()
            torch.save({"h": h, "weight": self.last[0].weight}, out)
            return h * len(torch.load(io.BytesIO(out.getvalue())))

    return Saves(norm=True)


@program()
def storage_and_pointer(folder):
    class Looks(Model):
        def odd(self, h):
            same = h.view(-1).data_ptr() == h.data_ptr()
            return h * (h.untyped_storage().nbytes() // h.element_size()) if same else h

    return Looks(dropout=0.2)


@program()
def storage_inline(folder):
    class Looks(Model):
        def forward(self, x):
            h = self.first(x)
            n = h.untyped_storage().nbytes()
            return self.last(h * n)

    return Looks()


@program()
def dlpack_to_numpy(folder):
    def odd(h):
        values = np.from_dlpack(h.detach().contiguous())
        return h + torch.from_dlpack(np.sort(values, axis=1).copy())

    return Model(odd)


@program()
def loader_inside(folder):
    class Loads(Model):
        def odd(self, h):
            rows = data.DataLoader(data.TensorDataset(h.detach()), batch_size=2, shuffle=True)
            return h + sum(batch.mean() * k for k, (batch,) in enumerate(rows))

    return Loads()


@program()
def profiler_inside(folder):
    names = []

    def odd(h):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            h = h.tanh()
        names.append(any(event.key == "aten::tanh" for event in profiler.key_averages()))
        return h

    return Model(odd), lambda: list(names)


@program()
def function_that_looks_at_values(folder):
    branches = []

    class Clips(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            branches.append(bool(h.untyped_storage().nbytes() and h.max() > 1))
            return h.clamp(max=1.0)

        @staticmethod
        def backward(ctx, g):
            (h,) = ctx.saved_tensors
            return g * (h < 1) * (2.0 if branches[-1] else 1.0)

    return Model(lambda h: Clips.apply(h)), lambda: list(branches)


@program()
def gradient_inside(folder):
    class Penalizes(Model):
        def odd(self, h):
            point = h.detach().requires_grad_()
            point.untyped_storage()
            (slope,) = torch.autograd.grad(self.last(point).sum(), point)
            return h - 0.1 * slope

    return Penalizes()


@program()
def optimizer_inside(folder):
    class Inner(Model):
        def odd(self, h):
            target = h.detach()
            code = torch.zeros_like(target[0], requires_grad=True)
            optimizer = torch.optim.SGD([code], lr=0.5)
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(code.expand_as(target), target).backward()
                optimizer.step()
            return h + code.detach()

    return Inner(dropout=0.1)


@program()
def module_owns_all(folder):
    class Owner(Model):
        def __init__(self):
            super().__init__(norm=True)
            self.gate = torch.nn.Parameter(torch.full((1,), 0.5))
            self.calls = []

        def odd(self, h):
            self.calls.append(h.untyped_storage().nbytes() > 0)
            return F.dropout(h * self.gate, 0.25) + len(self.calls)

    model = Owner()
    return model, lambda: list(model.calls)


@program()
def written_in_place_after(folder):
    def scores(h):
        h.untyped_storage()
        return h.sin()

    class Writes(Model):
        def odd(self, h):
            s = scores(h)
            s[:, 0] = 0.0
            s.mul_(2)
            return s

    return Writes()


@program()
def random_state_inside(folder):
    class Forks(Model):
        def odd(self, h):
            with torch.random.fork_rng():
                torch.manual_seed(5)
                noise = torch.randn(h.shape[1])
            return h + noise + torch.rand(())

    return Forks(dropout=0.2)


@program()
def several_results(folder):
    def parts(h):
        h.untyped_storage()
        return {"low": h[:, ::2], "high": [h[:, 1::2] * 2, h.sum()], "n": h.shape[0]}

    class Uses(Model):
        def odd(self, h):
            p = parts(h)
            return torch.cat([p["low"], p["high"][0]], 1) + p["high"][1] / p["n"]

    return Uses()


@program("transformers")
def result_is_a_model_output(folder):
    from transformers.modeling_outputs import BaseModelOutput

    def encode(h):
        h.untyped_storage()
        return BaseModelOutput(last_hidden_state=h.tanh(), hidden_states=(h, h * 2))

    class Uses(Model):
        def odd(self, h):
            out = encode(h)
            return out.last_hidden_state + out.hidden_states[1] + out["hidden_states"][0]

    return Uses()


@program()
def printed_tensor(folder):
    class Prints(Model):
        def odd(self, h):
            print("mean", h.mean(), h.grad_fn is not None)
            return h * 2

    return Prints()
