"""CUDA graphs. On a machine without a GPU, they are recorded on a fake one (tests/fake_gpu.py)."""

import contextlib
import copy
import gc
import pickle
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from tests.fake_gpu import FakeGPU, World
from thunder.core.check import check
from thunder.core.symbol import OpTags
from thunder.extend import OperatorExecutor
from thunder.runtime.cudagraphs.device import GPU
from thunder.runtime.cudagraphs.memory import Memory
from thunder.runtime.cudagraphs.recording import Recording, Results
from thunder.runtime.cudagraphs.region import PAYS, RECORDINGS, GraphedRegion
from thunder.tests.nanogpt_model import GPTConfig, NanoGPT
from thunder.transforms import cudagraph
from thunder.transforms.cudagraph import CUDAGraphTransform

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to record graphs on")


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # PyTorch's, in an autograd thread that begins with a product
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        yield


class Imitated(CUDAGraphTransform):
    device_type = "cpu"

    def make_memory(self, device):
        return Memory(FakeGPU(device, World()))

    @property
    def replays(self):
        return {backward: memory.gpu.replays for (_, backward), memory in self._memory.items()}


TRANSFORMS = [
    pytest.param(Imitated, "cpu", id="imitated"),
    pytest.param(CUDAGraphTransform, "cuda", id="cuda", marks=on_gpu),
]


def graphs(trace):
    return [line for line in trace.bound_symbols if isinstance(line.sym.fn, GraphedRegion)]


def recordings(compiled):
    return [
        r
        for t in (thunder.last_traces(compiled)[-1], *thunder.last_backward_traces(compiled)[-1:])
        for line in graphs(t)
        for r in line.sym.fn.recordings
    ]


def model(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)


def check_step(compiled, module, x, cotangent=None):
    """One forward and backward beside eager's; nothing of it stays."""
    out, expected = compiled(x), module(x)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out) if cotangent is None else cotangent
    parameters = list(module.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(out, parameters, cotangent), torch.autograd.grad(expected, parameters, cotangent)
    )


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_large_result_is_computed_where_it_stays(transform, device, monkeypatch):
    """A graph's own memory is overwritten by the next replay: results that leave the program would be copied from
    there."""
    monkeypatch.setattr(cudagraph, "LARGE", 3 * 4 * 4)
    for last, name, outside in (
        (nn.Linear(16, 4), "linear", True),
        (nn.Linear(16, 3), "linear", False),
        (nn.Sequential(nn.Linear(16, 4), nn.Tanh()), "tanh", False),  # it is saved as well
        (nn.Sequential(nn.Linear(16, 4), nn.GELU()), "gelu", True),
        (nn.Sequential(nn.Linear(16, 4), nn.Unflatten(1, (2, 2))), "linear", True),
    ):
        module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), last).to(device)
        compiled = thunder.jit(module, transforms=[transform()], executors=["torch"])
        for _ in range(4):
            check_step(compiled, module, torch.randn(3, 8, device=device))
        forward = thunder.last_traces(compiled)[-1]
        assert (
            (name in [line.sym.name for line in forward.bound_symbols])
            == outside
            == ("its result would be copied" in str(forward))
        )
        assert (
            len(graphs(forward)) == 1
            and recordings(compiled)
            and [len(r.whole) + len(r.on_host) for r in recordings(compiled)][0] == (not outside)
        )
        with torch.no_grad():
            results = [compiled(x) for x in torch.randn(2, 3, 8, device=device)]
            assert results[0].data_ptr() != results[1].data_ptr()


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_large_gradient_is_computed_where_it_stays(transform, device, monkeypatch):
    monkeypatch.setattr(cudagraph, "LARGE", 16 * 16 * 4)
    monkeypatch.setattr(transform, "copies_gradients", True)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    compiled = thunder.jit(module, transforms=[transform()], executors=["torch"])
    for _ in range(4):
        check_step(compiled, module, torch.randn(3, 8, device=device))
    backward = thunder.last_backward_traces(compiled)[-1]
    outside = [b for b in backward.bound_symbols if "its result would be copied" in b.header]
    assert [o.shape for b in outside for o in b.outputs] == [(16, 16)] and len(graphs(backward)) == 2
    copied = [tensor.numel() for r in recordings(compiled) for _, tensor in r.whole]
    assert sorted(copied) == sorted([12, *(p.numel() for p in module.parameters() if p.shape != (16, 16))])


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_regions_are_recorded_in_their_order(transform, device, monkeypatch):
    """The second region reads the results of the first one in their place, though it sees the same arguments sooner."""
    monkeypatch.setattr(cudagraph, "LARGE", 4 * 16 * 4)

    def program(x, w):
        y = (x @ w).tanh()
        return y + 1, (y * 2).sin().sum()

    compiled = thunder.jit(program, transforms=[transform()], executors=["torch"])
    w = torch.randn(8, 16, device=device)
    memory = torch.randn(2, 64, device=device)
    for call, offset in enumerate((0, 1, 0, 0, 1, 1, 0)):  # other alignments are other arguments
        x = memory[call % 2, offset : 32 + offset].view(4, 8)
        torch.testing.assert_close(compiled(x, w), program(x, w))
    first, *others = [line.sym.fn for line in graphs(thunder.last_traces(compiled)[-1])]
    assert len(others) == 1 and others[0].before is first
    assert first.replays == others[0].replays == 5
    assert all(len(r.pooled) == 1 and not r.copied for r in others[0].recordings)


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_long_forward_is_launched_in_two_parts(transform, device):
    """The device works on the first while the host looks at what the other reads. Nothing but what the second reads, or
    the backward, stays for that."""
    torch.manual_seed(0)
    module = nn.Sequential(*(m for _ in range(cudagraph.HEAD * 2) for m in (nn.Linear(8, 8), nn.Tanh()))).to(device)
    compiled = thunder.jit(module, transforms=[transform()], executors=["torch"])
    for _ in range(5):
        check_step(compiled, module, torch.randn(3, 8, device=device))
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    head, rest = graphs(forward)
    assert (
        cudagraph.HEAD <= len(head.subsymbols) < 2 * cudagraph.HEAD < len(rest.subsymbols)
        and len(graphs(backward)) == 1
    )
    assert len(set(head.outputs) - set(forward.output_proxies)) <= 1
    assert len(recordings(compiled)) == 3 and all(line.sym.fn.off is None for line in (head, rest))
    with no_warnings():
        check_step(compiled, module, torch.randn(3, 8, device=device))
    first, second = (torch.randn(3, 8, device=device) for _ in range(2))
    with pytest.warns(UserWarning, match="ran without its CUDA graph"):
        outs = [compiled(first), compiled(second)]
    for x, out in zip((first, second), outs, strict=True):
        expected = module(x)
        torch.testing.assert_close(out, expected)
        parameters = list(module.parameters())
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)
        )


@pytest.mark.parametrize("transform, device", TRANSFORMS)
@pytest.mark.parametrize(
    "f", [lambda x: (x.detach(), x + 1), lambda x: (x.detach()[0], x * 2), lambda x: (x[0], x[1].detach(), x * 2)]
)
def test_a_result_that_was_detached_from_an_argument_is_so_in_each_call(f, transform, device):
    compiled = thunder.jit(f, transforms=[transform()])
    x = torch.randn(3, 3, device=device, requires_grad=True)
    for _ in range(4):
        results, expected = compiled(x), f(x)
        assert [r.requires_grad for r in results] == [e.requires_grad for e in expected]
        assert [r.untyped_storage().data_ptr() == x.data_ptr() for r in results] == [
            e.untyped_storage().data_ptr() == x.data_ptr() for e in expected
        ]
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_training_steps(transform, device):
    module = model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    for _ in range(5):
        check_step(compiled, module, torch.randn(3, 8, device=device))
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    assert len(graphs(forward)) == len(graphs(backward)) == 1
    assert (
        "[t" in str(forward)
        and "CUDAGraph0(input, t_0_weight" in str(forward)
        and "# t0 = torch.nn.functional.linear(input" in str(forward)
    )
    check(forward), check(backward)
    assert len(recordings(compiled)) == 2


def test_each_call_after_the_second_is_a_replay():
    transform, module = Imitated(), model()
    compiled = thunder.jit(module, transforms=[transform])
    for i in range(5):
        check_step(compiled, module, torch.randn(3, 8))
        assert transform.replays == {False: max(0, i), True: max(0, i)}


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_optimizer_loop_with_zero_grad_before_the_backward(transform, device):
    module, reference = model(device), model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (module, reference)]
    for _ in range(6):
        x = torch.randn(3, 8, device=device)
        losses = []
        for m, optimizer in zip((compiled, reference), optimizers, strict=True):
            loss = F.mse_loss(m(x), torch.ones(3, 4, device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        torch.testing.assert_close(*losses)
    for a, b in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_results_that_are_kept_do_not_change(transform, device):
    compiled = thunder.jit(lambda x: (x.sin() * 2 + 1).exp(), transforms=[transform()])
    inputs = [torch.randn(4, device=device) for _ in range(6)]
    results = [compiled(x) for x in inputs]
    for x, y in zip(inputs, results, strict=True):
        torch.testing.assert_close(y, (x.sin() * 2 + 1).exp())


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_gradients_that_are_kept_do_not_change(transform, device):
    module = model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    for _ in range(2):
        check_step(compiled, module, torch.randn(3, 8, device=device))
    inputs = [torch.randn(3, 8, device=device) for _ in range(3)]
    parameters = list(module.parameters())
    with pytest.warns(
        UserWarning,
        match="CUDAGraph0 of backward_fn ran without its CUDA graph, since results that CUDAGraph0 of backward_fn "
        "gave to an earlier call are still in use",
    ):
        all_gradients = [torch.autograd.grad(compiled(x).sum(), parameters) for x in inputs]
    for x, gradients in zip(inputs, all_gradients, strict=True):
        torch.testing.assert_close(gradients, torch.autograd.grad(module(x).sum(), parameters))


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_gradients_are_accumulated(transform, device):
    module, reference = model(device), model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for m in (module, reference):
                m.zero_grad()
            for _ in range(3):
                x = torch.randn(3, 8, device=device)
                compiled(x).sum().backward()
                reference(x).sum().backward()
            for a, b in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
    assert len(caught) == 1  # it is said once


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_two_forwards_before_a_backward(transform, device):
    module = model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    for _ in range(3):
        check_step(compiled, module, torch.randn(3, 8, device=device))
    x, y = (torch.randn(3, 8, device=device) for _ in range(2))
    with pytest.warns(UserWarning, match="augmented_forward_fn ran without its CUDA graph"):
        a, b = compiled(x), compiled(y)
    parameters = list(module.parameters())
    for out, value in ((b, y), (a, x)):
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(module(value).sum(), parameters)
        )
    check_step(compiled, module, x)


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_backward_that_runs_twice(transform, device):
    module = model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    parameters = list(module.parameters())
    for _ in range(4):
        x = torch.randn(3, 8, device=device)
        out, expected = compiled(x).sum(), module(x).sum()
        first = torch.autograd.grad(out, parameters, retain_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            second = torch.autograd.grad(out, parameters)
        wanted = torch.autograd.grad(expected, parameters)
        torch.testing.assert_close(first, wanted)
        torch.testing.assert_close(second, wanted)
        del first, second


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_parameters_at_other_addresses(transform, device):
    module = model(device).requires_grad_(False)
    compiled = thunder.jit(module, transforms=[transform()])
    x = torch.randn(3, 8, device=device)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), module(x))
    held = module[0].weight.data
    module[0].weight.data = torch.randn(16, 8, device=device)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), module(x))
    assert len(recordings(compiled)) == 2
    module[0].weight.data = held
    torch.testing.assert_close(compiled(x), module(x))
    assert len(recordings(compiled)) == 2


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_parameters_of_modules_that_a_function_calls_are_not_copied(transform, device):
    module = model(device)
    for compiled, inputs in (
        (thunder.jit(lambda x: module(x), transforms=[transform()]), ()),
        (thunder.jit(lambda m, x: m(x), transforms=[transform()]), (module,)),
    ):
        for _ in range(4):
            x = torch.randn(3, 8, device=device)
            torch.testing.assert_close(compiled(*inputs, x), module(x))
        (recording, *others) = recordings(compiled)
        assert len(recording.copied) == 1 and not others


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_an_argument_that_stays_is_not_copied(transform, device):
    # fused it is one launch, which is not recorded
    compiled = thunder.jit(lambda x, y: (x.sin() + 1) * y, transforms=[transform()], executors=["torch"])
    x, others = torch.randn(4, device=device), [torch.randn(4, device=device) for _ in range(5)]
    for y in others:
        torch.testing.assert_close(compiled(x, y), (x.sin() + 1) * y)
    (recording,) = recordings(compiled)
    assert len(recording.stay) == len(recording.copied) == 1
    x.copy_(torch.randn(4))  # what is there is read
    torch.testing.assert_close(compiled(x, y), (x.sin() + 1) * y)
    for x in others:
        torch.testing.assert_close(compiled(x, y), (x.sin() + 1) * y)
    (recording,) = recordings(compiled)
    assert not recording.stay and len(recording.copied) == 2


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_what_is_saved_is_one_object(transform, device):
    """The host looks at none of the tensors in it, and knows by that object whether somebody may still read them."""
    module = model(device)
    compiled, x = thunder.jit(module, transforms=[transform()], executors=["torch"]), torch.randn(3, 8, device=device)
    for _ in range(3):
        check_step(compiled, module, x)
    forward, backward = (
        graphs(t[-1])[0] for t in (thunder.last_traces(compiled), thunder.last_backward_traces(compiled))
    )
    results = forward.outputs[-1]
    assert results.name == "results0" == backward.inputs[-1].name and len(results.collection) == 5
    assert not set(results.collection).intersection(forward.outputs) and len(backward.inputs) == 6
    (recording,) = forward.sym.fn.recordings
    assert len(recording.watched) == 5 and not recording.handed
    out = compiled(x)
    assert recording.in_use()
    out.sum().backward(retain_graph=True)
    assert recording.in_use()
    with pytest.warns(UserWarning, match="ran without its CUDA graph"):
        torch.testing.assert_close(compiled(x), module(x))
    out.sum().backward()
    assert not recording.in_use()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_hooks_see_each_saved_tensor(transform, device):
    module, x, seen = model(device), torch.randn(3, 8, device=device), []
    for transforms in ((), (transform(),)):
        compiled = thunder.jit(module, transforms=list(transforms), executors=["torch"])
        for _ in range(4):
            shapes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
                check_step(compiled, module, x)
        seen.append(sorted(shapes))
    assert seen[0] == seen[1]
    (forward, backward) = recordings(compiled)
    assert not forward.in_use() and backward.can_be_replayed()


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_hooks_that_keep_saved_tensors_elsewhere(transform, device):
    """As torch.autograd.graph.save_on_cpu does: two forwards before a backward are no matter."""
    module = model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    with no_warnings():
        for _ in range(4):
            inputs = torch.randn(2, 3, 8, device=device)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
                outs = [compiled(x) for x in inputs]
            for out, x in zip(outs, inputs, strict=True):
                parameters = list(module.parameters())
                torch.testing.assert_close(
                    torch.autograd.grad(out.sum(), parameters), torch.autograd.grad(module(x).sum(), parameters)
                )


@pytest.mark.parametrize("transform, device", TRANSFORMS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint_outside(reentrant, transform, device):
    """The forward is replayed again for the backward, whose graph finds what it left."""
    used = transform()
    module = model(device)
    compiled = thunder.jit(module, transforms=[used])
    with no_warnings():
        for _ in range(5):
            x = torch.randn(3, 8, device=device, requires_grad=True)
            gradients = []
            for f in (compiled, module):
                module.zero_grad()
                torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant).square().sum().backward()
                gradients.append([p.grad.clone() for p in module.parameters()])
            torch.testing.assert_close(*gradients)
            module.zero_grad()
    if transform is Imitated:
        assert used.replays[True] >= 3 and used.replays[False] >= 6


def test_what_is_saved_is_listed():
    module, x = model(), torch.randn(3, 8)
    listed = []
    for transforms in ((), (Imitated(),)):
        compiled = thunder.jit(module, transforms=list(transforms), executors=["torch"])
        compiled(x)
        listed.append({(v.name, v.nbytes, v.operation) for v in thunder.examine.saved_for_backward(compiled)})
    assert listed[0] == listed[1] and ("t0", 3 * 16 * 4, "torch.nn.functional.linear") in listed[0]


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_kept_graph_is_unpacked_again(transform, device):
    def f(x):
        t = x.exp().tanh()
        return (t * t.sin())[t > 0.5].exp()  # what the mask chooses stays outside

    compiled = thunder.jit(f, transforms=[transform()], executors=["torch"])
    for _ in range(4):
        x = torch.randn(4, 4, device=device, requires_grad=True)
        loss = compiled(x).sum()
        (expected,) = torch.autograd.grad(f(x).sum(), x)
        for again in (True, True, False):
            torch.testing.assert_close(torch.autograd.grad(loss, x, retain_graph=again)[0], expected)


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_saved_value_in_the_memory_of_an_argument(transform, device):
    """What is computed in place is saved as a tensor, and the region is recorded."""

    def f(x, w):
        x.relu_()
        return x * w, (x + 1)

    compiled = thunder.jit(f, transforms=[transform()], executors=["torch"])
    x, expected = (torch.randn(2, 4, device=device) for _ in range(2))
    with no_warnings():
        for _ in range(5):
            w = torch.randn((), device=device, requires_grad=True)
            expected.copy_(x.copy_(torch.randn(2, 4, device=device)))
            actual, wanted = compiled(x, w), f(expected, w)
            torch.testing.assert_close(actual, wanted)
            torch.testing.assert_close(torch.autograd.grad(actual[0].sum(), w), torch.autograd.grad(wanted[0].sum(), w))
            del actual
    assert graphs(thunder.last_traces(compiled)[-1])[0].sym.fn.recordings


def test_results_that_another_thread_joins_while_uses_are_counted(monkeypatch):
    module = model()
    compiled = thunder.jit(module, transforms=[Imitated()], executors=["torch"])
    for _ in range(3):
        check_step(compiled, module, torch.randn(3, 8))
    out, joined = compiled(torch.randn(3, 8)), []
    recording = graphs(thunder.last_traces(compiled)[-1])[0].sym.fn.recordings[0]
    uses = Recording._uses
    del out
    monkeypatch.setattr(
        Recording,
        "_uses",
        lambda self, opened: joined.append(Results(self, self.held)) or uses(self, opened),
    )
    assert recording.in_use() and joined
    monkeypatch.setattr(Recording, "_uses", uses)
    joined.clear()
    assert not recording.in_use()


class Keeps(torch.autograd.Function):
    """Its backward returns what its forward has saved."""

    @staticmethod
    def forward(ctx, x, w):
        y = (x * 2).sin()
        ctx.save_for_backward(y)
        return y * 3 + w

    @staticmethod
    def backward(ctx, g):
        return g * 2, ctx.saved_tensors[0]


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_saved_value_that_becomes_a_gradient(transform, device):
    compiled = thunder.jit(lambda x, w: Keeps.apply(x, w) * 2, transforms=[transform()], executors=["torch"])
    inputs, saved = [[torch.randn(4, device=device, requires_grad=True) for _ in range(2)] for _ in range(5)], []
    with pytest.warns(UserWarning, match="ran without its CUDA graph") as said:
        for x, w in inputs:
            saved.append(torch.autograd.grad(compiled(x, w).sum(), [x, w]))
    assert any(
        "since results that CUDAGraph0 of augmented_forward_fn gave to an earlier call are still in use"
        in str(w.message)
        for w in said
    )
    for (x, w), actual in zip(inputs, saved, strict=True):
        torch.testing.assert_close(actual, (torch.full_like(x, 4), (x * 2).sin()))
    assert "results0" not in str(graphs(thunder.last_backward_traces(compiled)[-1])) and "= results0" in str(
        thunder.last_backward_traces(compiled)[-1]
    )


@pytest.mark.parametrize("transform, device", TRANSFORMS)
@pytest.mark.parametrize("outside", ["gelu_backward", "native_layer_norm", "gelu"])
def test_saved_values_that_are_read_outside_of_graphs(outside, transform, device):
    picky = type(
        "Picky",
        (transform,),
        {"can_fuse": lambda self, line: outside not in line.sym.name and transform.can_fuse(self, line)},
    )
    torch.manual_seed(0)
    module = nn.Sequential(
        *(m for _ in range(3) for m in (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()))
    ).to(device)
    compiled = thunder.jit(module, transforms=[picky()], executors=["torch"])
    with no_warnings():
        for _ in range(6):
            check_step(compiled, module, torch.randn(3, 8, device=device))
    check(thunder.last_traces(compiled)[-1]), check(thunder.last_backward_traces(compiled)[-1])
    assert all(
        line.sym.fn.recordings
        for t in (thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1])
        for line in graphs(t)
    )


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_backward_is_recorded_again_where_its_forward_was(transform, device):
    module = model(device)
    compiled = thunder.jit(module, transforms=[transform()])
    for shape in ("rows", "columns", "rows", "columns"):
        for _ in range(3):
            x = torch.randn(3, 8, device=device) if shape == "rows" else torch.randn(8, 3, device=device).t()
            check_step(compiled, module, x)
    assert len(recordings(compiled)) == 4
    for _ in range(12):  # each of the forward's recordings is forgotten, and those of the backward that read from it
        held = [p.data for p in module.parameters()]
        with torch.no_grad():
            module[0].bias.data = module[0].bias.data.clone()
        graphs(thunder.last_traces(compiled)[-1])[0].sym.fn.recordings.clear()
        for _ in range(3):
            check_step(compiled, module, torch.randn(3, 8, device=device))
        del held
    assert len(recordings(compiled)) <= 1 + RECORDINGS


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_derivatives_of_derivatives(transform, device):
    def f(x, w):
        return torch.tanh(x @ w).sin() * x

    compiled = thunder.jit(f, transforms=[transform()])
    for _ in range(4):
        values = [torch.randn(4, 4, device=device, requires_grad=True) for _ in range(2)]
        second = []
        for g in (compiled, f):
            first = torch.autograd.grad(g(*values).sum(), values, create_graph=True)
            second.append(torch.autograd.grad(sum(d.square().sum() for d in first), values))
        torch.testing.assert_close(*second)


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_a_transformer_learns(transform, device):
    torch.manual_seed(0)
    module = NanoGPT(GPTConfig(block_size=16, vocab_size=32, n_layer=2, n_head=2, n_embd=32)).to(device)
    compiled = thunder.jit(module, transforms=[transform()], executors=["sdpa"])
    for _ in range(4):
        tokens, targets = torch.randint(0, 32, (2, 2, 16), device=device)
        gradients = []
        for f in (compiled, module):
            loss = f(tokens, targets)[1]  # no cotangent comes for the logits
            gradients.append((loss.detach(), *torch.autograd.grad(loss, list(module.parameters()))))
        torch.testing.assert_close(*gradients)
        del gradients
    assert len(graphs(thunder.last_traces(compiled)[-1])) == 1


def test_parameters_that_move_all_the_time():
    module = model().requires_grad_(False)
    transform = Imitated()
    compiled = thunder.jit(module, transforms=[transform], executors=["torch"])
    x, held = torch.randn(3, 8), []
    with pytest.warns(UserWarning, match="was recorded for 8 other strides, or addresses of parameters"):
        for _ in range(10):
            module[0].weight.data = torch.randn(16, 8)
            held.append(module[0].weight.data)
            for _ in range(2):
                torch.testing.assert_close(compiled(x), module(x))
    assert len(recordings(compiled)) == RECORDINGS
    with pytest.warns(UserWarning, match="were at .* places in memory"):
        stopped = thunder.jit(module, transforms=[transform], executors=["torch"])
        for _ in range(40):
            module[0].weight.data = torch.randn(16, 8)
            held.append(module[0].weight.data)
            torch.testing.assert_close(stopped(x), module(x))


@pytest.mark.parametrize("executors", [["torch"], ["triton_fuser"]])
@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_what_an_operation_in_place_reads_may_move(transform, device, executors):
    if executors == ["triton_fuser"]:
        pytest.importorskip("triton")

    def f(cache, x, w):
        cache.mul_(0.5).add_(x)
        return (cache.sin() * x) @ w + 1

    compiled = thunder.jit(f, transforms=[transform()], executors=executors)
    cache, expected = (torch.zeros(4, 4, device=device) for _ in range(2))
    for _ in range(5):
        x, w = torch.randn(2, 4, 4, device=device)
        torch.testing.assert_close(compiled(cache, x, w), f(expected, x, w))
        torch.testing.assert_close(cache, expected)
    (region,) = (operation.sym.fn for operation in graphs(thunder.last_traces(compiled)[-1]))
    assert region.fixed == [0] and len(region.recordings) == 1


def test_recordings_that_are_replayed_often_make_room_for_others():
    """As those of `generate`, which writes to a new cache in each call."""

    def f(cache, x):
        cache.mul_(0.5).add_(x)
        return cache.sum() * x

    transform, replays = Imitated(), 0
    compiled, held = thunder.jit(f, transforms=[transform], executors=["torch"]), []
    with no_warnings():
        for _ in range(5 * RECORDINGS):
            held.append(torch.zeros(4))
            expected = torch.zeros(4)
            for _ in range(PAYS + 2):
                x = torch.randn(4)
                torch.testing.assert_close(compiled(held[-1], x), f(expected, x))
            torch.testing.assert_close(held[-1], expected)
            replays += PAYS + 1
            assert transform.replays == {False: replays} and len(recordings(compiled)) <= RECORDINGS
    first = held[0].clone()
    torch.testing.assert_close(compiled(held[0], x), f(first, x))


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_strides_are_seen(transform, device):
    compiled = thunder.jit(lambda x: (x.sin() + 1) * 2, transforms=[transform()])
    for x in (
        torch.randn(3, 4, device=device),
        torch.randn(4, 3, device=device).t(),
        torch.randn(3, 1, device=device).expand(3, 4),
        torch.randn(3, 8, device=device)[:, ::2],
    ) * 3:
        out = compiled(x)
        torch.testing.assert_close(out, (x.sin() + 1) * 2)
        assert out.stride() == ((x.sin() + 1) * 2).stride()


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_what_is_written_to_is_written_once_a_call(transform, device):
    module, reference = (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).to(device) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    compiled = thunder.jit(module, transforms=[transform()])
    for _ in range(4):
        x = torch.randn(5, 8, device=device)
        versions = [[b._version for b in m.buffers()] for m in (module, reference)]
        torch.testing.assert_close(compiled(x), reference(x))
        written = [
            [b._version > v for b, v in zip(m.buffers(), before, strict=True)]
            for m, before in zip((module, reference), versions, strict=True)
        ]
        if device == "cpu":  # PyTorch's kernel for a GPU does not count its writes to the statistics
            assert written[0] == written[1]
        assert all(ours or not theirs for ours, theirs in zip(*written, strict=True)) and any(written[0])
        for a, b in zip(module.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    assert graphs(thunder.last_traces(compiled)[-1])


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_an_argument_that_is_written_to_and_returned(transform, device):
    def f(cache, x):
        cache.mul_(0.5).add_(x * x)
        return cache, cache.view(-1), x.view(2, 2), x * 2

    compiled = thunder.jit(f, transforms=[transform()])
    cache, expected = torch.zeros(4, device=device), torch.zeros(4, device=device)
    for _ in range(4):
        x = torch.randn(4, device=device)
        out, wanted = compiled(cache, x), f(expected, x)
        torch.testing.assert_close(out, wanted)
        assert out[0] is cache
        assert out[1].data_ptr() == cache.data_ptr() and out[2].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_results_that_share_memory(transform, device):
    def f(x):
        y = x.sin() + 1
        return y, y.view(2, 2), y[1:]

    compiled = thunder.jit(f, transforms=[transform()])
    for _ in range(4):
        y, view, part = compiled(torch.randn(4, device=device))
        y.fill_(7)
        assert view.eq(7).all() and part.eq(7).all()


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_what_waits_for_the_device_stays_outside(transform, device):
    def f(x):
        y = (x.sin() + 1) * 2
        n = y.sum().item()
        return (y.cos() * 3 + n).exp()

    compiled = thunder.jit(f, transforms=[transform()], executors=["torch"])
    for _ in range(4):
        x = torch.randn(4, device=device)
        torch.testing.assert_close(compiled(x), f(x))
    trace = thunder.last_traces(compiled)[-1]
    assert len(graphs(trace)) == 2
    assert "# not in a CUDA graph: it" in str(trace)


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_sizes_that_the_program_gives_wait_for_nothing(transform, device):
    """As a router of experts counts: with a range histc looks for none, and one_hot with a number of classes."""

    def f(x, i):
        chosen = F.one_hot(i, 4).float() + torch.histc(i.float(), bins=4, min=0, max=3)
        return (chosen * 2).masked_scatter(x > 0, x.sin())

    def looks(x, i):
        return torch.histc(x.sin() * 2, bins=3) + 1

    compiled, other = (thunder.jit(g, transforms=[transform()], executors=["torch"]) for g in (f, looks))
    for _ in range(4):
        x, i = torch.randn(5, 4, device=device), torch.randint(4, (5,), device=device)
        torch.testing.assert_close(compiled(x, i), f(x, i))
        torch.testing.assert_close(other(x, i), looks(x, i))
    assert "not in a CUDA graph" not in str(thunder.last_traces(compiled)[-1])
    assert "it may wait for the device" in str(thunder.last_traces(other)[-1])


def test_reasons():
    mine = OperatorExecutor("mine")
    twice = mine.register_operator("twice", like=lambda a: a + a, fn=lambda a: a + a)

    def f(x, i):
        return twice(x) + i + torch.linalg.inv(x)

    for transform, graphed in (
        (Imitated, False),
        (type("Bold", (Imitated,), {"can_fuse": lambda self, line: True}), True),
    ):
        compiled = thunder.jit(f, transforms=[transform()], executors=[mine, "torch"])
        compiled(torch.eye(3), torch.tensor([0, 2, 1]))
        trace = thunder.last_traces(compiled)[-1]
        assert bool(graphs(trace)) is graphed
        assert (
            graphed
            or "# not in a CUDA graph: it may do more than launch kernels\n  t" in str(trace)
            and "# not in a CUDA graph: it may wait for the device\n" in str(trace)
        )
    compiled = thunder.jit(lambda x: x.sin() + x, transforms=[CUDAGraphTransform()])
    compiled(torch.ones(2))
    assert str(thunder.last_traces(compiled)[-1]).count("# not in a CUDA graph: its tensors are on cpu") == 2


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_random_numbers_are_eagers(transform, device):
    def f(x):
        return F.dropout(x, 0.5) * 2 + torch.rand_like(x)

    compiled = thunder.jit(f, transforms=[transform()])
    x = torch.ones(64, device=device)
    states = []
    for fn in (compiled, f):
        torch.manual_seed(3)
        states.append([fn(x) for _ in range(4)])
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(*states[0][2:])


def test_a_recording_that_fails():
    class Failing(Memory):
        def record(self, run, inputs):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    transform = type("T", (Imitated,), {"make_memory": lambda self, device: Failing(FakeGPU(device, World()))})
    compiled = thunder.jit(lambda x: (x.sin() + 1) * 2, transforms=[transform()])
    x = torch.randn(4)
    compiled(x)
    with pytest.warns(
        UserWarning,
        match="computation runs without a CUDA graph: while it was recorded, PyTorch raised RuntimeError: operation "
        "not permitted when stream is capturing$",
    ):
        torch.testing.assert_close(compiled(x), (x.sin() + 1) * 2)
    torch.testing.assert_close(compiled(x), (x.sin() + 1) * 2)


@on_gpu
def test_a_recording_that_fails_on_the_device():
    class Bold(CUDAGraphTransform):
        def can_fuse(self, line):
            return True

    mine = OperatorExecutor("mine")
    positive = mine.register_operator(
        "positive", meta=lambda a: thunder.TensorProxy(like=a), fn=lambda a: a if a.sum().item() > -1e9 else -a
    )
    compiled = thunder.jit(
        lambda x: F.dropout(positive(x.sin() + 1) * 2), transforms=[Bold()], executors=[mine, "torch"]
    )
    x = torch.randn(4, device="cuda")
    earlier = thunder.jit(lambda x: F.dropout(x * 2), transforms=[CUDAGraphTransform()], executors=["torch"])
    for _ in range(2):
        earlier(x)
    assert recordings(earlier)
    compiled(x)
    with pytest.warns(UserWarning, match="runs without a CUDA graph: while it was recorded, PyTorch raised"):
        compiled(x)
    torch.manual_seed(0)
    actual = compiled(x)
    torch.manual_seed(0)
    torch.testing.assert_close(actual, F.dropout((x.sin() + 1) * 2))
    for _ in range(3):
        torch.manual_seed(1)
        actual = earlier(x)
        torch.manual_seed(1)
        torch.testing.assert_close(actual, F.dropout(x * 2))
    assert recordings(earlier)
    works = thunder.jit(lambda x: (x.sin() + 1) * 2, transforms=[CUDAGraphTransform()], executors=["torch"])
    for _ in range(3):
        torch.testing.assert_close(works(x), (x.sin() + 1) * 2)
    assert recordings(works)


@on_gpu
def test_streams():
    module = model("cuda").requires_grad_(False)
    compiled = thunder.jit(module, transforms=[CUDAGraphTransform()])
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    saved = []
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(1_000_000 * (i % 4))
            x = torch.randn(3, 8, device="cuda")
            saved.append((x, compiled(x)))
    torch.cuda.synchronize()
    for x, y in saved:
        torch.testing.assert_close(y, module(x))
    with torch.cuda.stream(streams[1]):  # in a graph of the user's, it is part of that one
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[1]):
            y = compiled(x)
    x.copy_(torch.randn(3, 8, device="cuda"))
    graph.replay()
    torch.testing.assert_close(y, module(x))


@on_gpu
def test_results_that_are_read_on_their_stream_after_others_ran_on_another():
    transform, modules = CUDAGraphTransform(), [model("cuda"), model("cuda")]
    first, second = (thunder.jit(m, transforms=[transform]) for m in modules)
    x, y, cotangent = (
        torch.randn(3, 8, device="cuda"),
        torch.randn(3, 8, device="cuda"),
        torch.randn(3, 4, device="cuda"),
    )
    for compiled, module in ((first, modules[0]), (second, modules[1])) * 3:
        check_step(compiled, module, x)
    mine, others = (list(m.parameters()) for m in modules)
    expected = torch.autograd.grad(modules[0](x), mine, cotangent)
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        out = first(x)
    with torch.cuda.stream(b):
        torch.autograd.grad(second(y), others, cotangent)
    with torch.cuda.stream(a):
        torch.cuda._sleep(20_000_000)
        gradients = torch.autograd.grad(out, mine, cotangent)  # reads what was saved
    with torch.cuda.stream(b):
        torch.autograd.grad(second(y), others, cotangent)
    with torch.cuda.stream(a):
        torch.cuda._sleep(20_000_000)
        copies = [g.clone() for g in gradients]
        del out, gradients
    with torch.cuda.stream(b):
        torch.autograd.grad(first(y), mine, cotangent)
    torch.cuda.synchronize()
    torch.testing.assert_close(copies, list(expected))


@on_gpu
def test_what_arguments_are_copied_to_is_not_given_away_while_another_stream_reads_it():
    compiled = thunder.jit(lambda x: (x.sin() + 1) * 2, transforms=[CUDAGraphTransform()], executors=["torch"])
    size = 1 << 22
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = [torch.ones(size, device="cuda") for _ in range(3)]  # at as many addresses
    torch.cuda.synchronize()
    with torch.cuda.stream(a):
        for x in inputs:
            compiled(x)
    assert recordings(compiled)[0].buffers
    x = torch.ones(size, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(b):
        torch.cuda._sleep(1_000_000_000)
        out = compiled(x)
    del compiled
    gc.collect()
    with torch.cuda.stream(a):
        others = [torch.full((size,), 7.0, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert all(o.eq(7).all() for o in others)
    torch.testing.assert_close(out, (x.sin() + 1) * 2)


def waited_for(monkeypatch, handle, action):
    """Which streams an action on a stream waits for, by their handles."""

    class Stream:
        def __init__(self, handle):
            self.cuda_stream = handle

        def wait_stream(self, other):
            waits.append((self.cuda_stream, other.cuda_stream))

    waits = []
    monkeypatch.setattr(FakeGPU, "handle", lambda self: handle)
    monkeypatch.setattr(FakeGPU, "stream", lambda self: Stream(handle))
    action()
    assert all(waiting == handle for waiting, _ in waits)
    return [other for _, other in waits]


def test_graphs_that_draw_random_numbers_come_one_after_another(monkeypatch):
    memories, launched = [Memory(FakeGPU(torch.device("cpu"), World())) for _ in range(2)], []
    monkeypatch.setattr("thunder.runtime.cudagraphs.memory._DRAWN", {})

    def draws(handle, memory):
        return waited_for(monkeypatch, handle, lambda: memory.launch_drawing(lambda: launched.append(handle)))

    assert draws(1, memories[0]) == draws(1, memories[1]) == []
    assert draws(2, memories[1]) == [1] and draws(2, memories[0]) == [] and draws(1, memories[0]) == [2]
    assert launched == [1, 1, 2, 2, 1]


@pytest.mark.parametrize("transform, device", TRANSFORMS)
def test_what_draws_is_known(transform, device):
    for f, draws in ((lambda x: F.dropout(x, 0.5) * 2, True), (lambda x: x.sin() * 2, False)):
        compiled = thunder.jit(f, transforms=[transform()], executors=["torch"])
        for _ in range(2):
            compiled(torch.ones(4, device=device))
        assert [r.draws for r in recordings(compiled)] == [draws]


def draws_late(x, w):
    """In a graph, random numbers are drawn tens of milliseconds after the launch."""
    for _ in range(16):
        w = w @ w
    return F.dropout(x + w[0, 0], 0.5) * 2


@on_gpu
def test_random_numbers_while_the_stream_of_recordings_is_late(monkeypatch):
    transform = CUDAGraphTransform()
    compiled, x, w = (
        thunder.jit(draws_late, transforms=[transform]),
        torch.ones(64, device="cuda"),
        torch.eye(4096, device="cuda"),
    )

    def late():
        (memory,) = transform._memory.values()
        with torch.cuda.stream(memory.stream):
            torch.cuda._sleep(40_000_000)

    settle = GPU.settle
    monkeypatch.setattr(GPU, "settle", lambda gpu: (settle(gpu), late()))  # right before a recording begins
    drawn = []
    for f in (compiled, draws_late):
        torch.manual_seed(3)
        drawn.append([f(x, w) for _ in range(4)])
    assert recordings(compiled)
    torch.testing.assert_close(*drawn)


@on_gpu
def test_random_numbers_of_graphs_on_two_streams():
    compiled = [thunder.jit(draws_late, transforms=[CUDAGraphTransform()]) for _ in range(2)]
    streams, x, w = (
        [torch.cuda.Stream() for _ in range(2)],
        torch.ones(64, device="cuda"),
        torch.eye(4096, device="cuda"),
    )
    for f in compiled * 3:
        f(x, w)
    torch.cuda.synchronize()
    torch.manual_seed(3)
    expected = [draws_late(x, w) for _ in range(4)]
    torch.cuda.synchronize()
    torch.manual_seed(3)
    results = []
    for i in range(4):
        with torch.cuda.stream(streams[i % 2]):
            results.append(compiled[i % 2](x, w))
    torch.cuda.synchronize()
    assert all(map(recordings, compiled))
    torch.testing.assert_close(results, expected)


def test_streams_are_waited_for_as_long_as_somebody_may_use_their_results(monkeypatch):
    memory = Memory(FakeGPU(torch.device("cpu"), World()))

    def replays(handle):
        return waited_for(monkeypatch, handle, memory.on_this_stream)

    assert replays(0) == replays(0) == []
    assert replays(1) == [0]
    assert replays(1) == []  # the one before was waited for, and nobody has its results
    assert replays(0) == [1]
    memory.recordings.append(types.SimpleNamespace(stream=0, handed_out=True, buffers=[]))
    assert replays(1) == replays(1) == [0]  # more may have been launched there that reads them
    assert replays(2) == [0, 1] and replays(1) == [0, 2]
    memory.recordings[0].handed_out = False
    assert replays(1) == [0] and replays(1) == []


@on_gpu
def test_threads_that_record_at_once_while_another_one_allocates():
    """Random numbers would be an error of PyTorch's, which has one generator: it is that of the recording."""
    inputs, modules, done, results, wrong = (
        torch.randn(4, 3, 8, device="cuda"),
        [model("cuda").requires_grad_(False) for _ in range(4)],
        threading.Event(),
        [],
        [],
    )
    expected = [module(x) for module, x in zip(modules, inputs, strict=True)]
    torch.cuda.synchronize()

    def allocates():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                x = torch.full((1000,), 3.0, device="cuda")
                y = x * 2
                del x
                if not y.eq(6).all():
                    wrong.append(y)

    def records(module, x, y):
        with torch.cuda.stream(torch.cuda.Stream()):
            compiled = thunder.jit(module, transforms=[CUDAGraphTransform()])
            outputs = [compiled(x) for _ in range(4)]
            torch.cuda.current_stream().synchronize()
            results.append((len(recordings(compiled)), [torch.allclose(o, y, atol=1e-5) for o in outputs]))

    other = threading.Thread(target=allocates)
    threads = [threading.Thread(target=records, args=row) for row in zip(modules, inputs, expected, strict=True)]
    other.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert results == [(1, [True] * 4)] * 4 and not wrong


@on_gpu
def test_memory_is_shared_by_the_programs_of_one_transform():
    """Two large values inside, small results."""
    module = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64)).cuda().requires_grad_(False)
    taken = {}
    for share in (True, False):
        compiled = thunder.jit(module, transforms=[CUDAGraphTransform(share_mem_pool=share)])
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for rows in range(4000, 4006):
            x = torch.randn(rows, 64, device="cuda")
            for _ in range(3):
                torch.testing.assert_close(compiled(x), module(x))
        del x
        torch.cuda.empty_cache()
        taken[share] = torch.cuda.memory_reserved() - before
        del compiled
    assert taken[True] < 0.5 * taken[False], taken


def test_batches_of_cotangents():
    module, x, batch = model(), torch.randn(3, 8, requires_grad=True), torch.randn(5, 3, 4)
    compiled = thunder.jit(module, transforms=[Imitated()], executors=["torch"])
    for _ in range(4):
        gradients = torch.autograd.grad(compiled(x), x, batch, is_grads_batched=True)
        torch.testing.assert_close(gradients, torch.autograd.grad(module(x), x, batch, is_grads_batched=True))
        check_step(compiled, module, x)


def test_recordings_end_with_their_function():
    transform = Imitated()
    for _ in range(3):
        compiled = thunder.jit(lambda x: (x.sin() + 1) * 2, transforms=[transform])
        for _ in range(3):
            compiled(torch.ones(4))
        (memory,) = transform._memory.values()
        del compiled
        gc.collect()
    assert len(memory.recordings) == 1


def test_a_result_in_use_keeps_its_recording():
    """What was recorded before may overwrite what a recording that nobody replays any more has given."""
    transform, module = Imitated(), model()
    first = thunder.jit(module, transforms=[transform])
    for _ in range(3):
        check_step(first, module, torch.randn(3, 8))
    second = thunder.jit(module, transforms=[transform])
    for _ in range(2):
        check_step(second, module, torch.randn(3, 8))
    x = torch.randn(3, 8)
    out = second(x)
    del second
    gc.collect()
    with pytest.warns(UserWarning, match="augmented_forward_fn ran without its CUDA graph"):
        first(x)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), list(module.parameters())),
        torch.autograd.grad(module(x).sum(), list(module.parameters())),
    )


def test_flags_of_pytorch_are_part_of_a_recording():
    compiled = thunder.jit(lambda x: (x @ x + 1) * 2, transforms=[Imitated()])
    x, before = torch.randn(3, 3), torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (True, True, False, False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            compiled(x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(recordings(compiled)) == 2


def test_an_error_names_the_users_line():
    """Where operations run one by one: at the first call, and in calls that the graph would overwrite results of. A
    replay is one launch, on a GPU as well."""

    def f(x, i):
        y = x.sin().exp()
        return F.embedding(i, y) * 2

    def check(x, i):
        with pytest.raises(IndexError, match="index out of range") as caught:
            compiled(x, i)
        assert "F.embedding(i, y) * 2" in "".join(caught.value.__notes__)

    compiled = thunder.jit(f, transforms=[Imitated()])
    check(torch.ones(4, 2), torch.tensor([9]))
    x, saved = torch.ones(4, 2, requires_grad=True), []
    with pytest.warns(UserWarning, match="ran without its CUDA graph"):
        for _ in range(4):
            saved.append(compiled(x, torch.tensor([1])))
    check(x, torch.tensor([9]))


@pytest.mark.parametrize("transform, device", TRANSFORMS if not torch.cuda.is_available() else TRANSFORMS[1:])
def test_fusions_inside_are_found(transform, device):
    compiled = thunder.jit(
        lambda x, w: ((x.sin() + 1) @ w).cos() + 1, transforms=[transform()], executors=["triton_fuser"]
    )
    x, w = torch.ones(4, 2, device=device), torch.ones(2, 2, device=device)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, w), ((x.sin() + 1) @ w).cos() + 1)
    assert [name for name, _ in thunder.examine.get_fusions(thunder.last_traces(compiled)[-1])] == [
        "TritonFusion0",
        "TritonFusion1",
    ]


def test_copies_and_options():
    transform = CUDAGraphTransform(share_mem_pool=False)
    assert pickle.loads(pickle.dumps(transform)).share_mem_pool is copy.deepcopy(transform).share_mem_pool is False
    compiled = thunder.jit(lambda x: x.sin() + 1, transforms=[transform], numerics="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin() + 1)


def test_inference_mode_and_other_shapes():
    module, transform = model(), Imitated()
    compiled = thunder.jit(module, transforms=[transform])
    with torch.inference_mode():
        for rows in (3, 5) * 3:
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), module(x))
    assert transform.replays == {False: 4}


def test_effects_are_not_lost():
    """Each line with an effect is outside, or writes to a tensor's memory."""

    def f(x):
        y = x.sin() + 1
        torch.manual_seed(5)
        return y * torch.rand_like(y) + torch.rand_like(y)

    compiled = thunder.jit(f, transforms=[Imitated()])
    for _ in range(4):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x), f(x))
    for line in graphs(thunder.last_traces(compiled)[-1]):
        assert all(
            OpTags.DONT_DCE not in inner.sym.tags or inner.sym.tags & {OpTags.RANDOM_OP, OpTags.IN_PLACE}
            for inner in line.subsymbols
        )
