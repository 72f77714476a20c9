"""The linear_cross_entropy executor: where it joins the two, that losses and gradients are those of the separate ones,
and what it makes."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import cross_entropy, linear

import thunder
from thunder.analysis.cost import FLOPS_PER_BYTE, estimated_time
from thunder.executors import linear_cross_entropy as module
from thunder.executors.linear_cross_entropy import over_rows

CPU_OR_GPU = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small programs are taken as well."""
    monkeypatch.setattr(module, "LIMIT", 512)


def names(trace):
    return [
        line.sym.name
        for line in trace.bound_symbols
        if line.sym.name not in ("python_del", "unpack_sequence", "clear_collection")
    ]


def inputs(device="cpu", dtype=torch.float64, classes=21):
    torch.manual_seed(0)
    x, w = torch.randn(2, 9, 8, device=device, dtype=dtype), torch.randn(classes, 8, device=device, dtype=dtype)
    labels = torch.randint(0, classes, (2, 9), device=device)
    labels[0, 3] = labels[1, 8] = -100
    return x, w, labels


def shifted(x, w, labels):
    logits = linear(x, w)
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].reshape(-1))


def shifted_contiguous(x, w, labels):
    logits = linear(x, w).double()
    logits = logits[..., :-1, :].contiguous()
    return cross_entropy(logits.view(-1, logits.size(-1)), labels[..., 1:].contiguous().view(-1))


def as_transformers(x, w, labels, count=None):
    """The way of transformers: labels are padded and shifted, and the sum is divided by how many there are."""
    logits = linear(x, w).double()
    wanted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    total = cross_entropy(
        logits.view(-1, w.shape[0]), wanted.view(-1), ignore_index=-100, reduction="mean" if count is None else "sum"
    )
    return total if count is None else total / count


def counted(x, w, labels):
    return as_transformers(x, w, labels, 15)


def plain(x, w, labels):
    return cross_entropy(linear(x.view(-1, 8), w), labels.view(-1))


def ignoring_another(x, w, labels):
    return cross_entropy(linear(x, w).view(-1, w.shape[0]), labels.clamp(min=3).view(-1), ignore_index=3)


def with_none_left(x, w, labels):
    return cross_entropy(linear(x, w).view(-1, w.shape[0]), torch.full_like(labels, -100).view(-1), reduction="sum")


def biased(x, w, labels):
    return cross_entropy(linear(x, w, w[:, 0]).view(-1, w.shape[0]), labels.view(-1))


def gradients(f, x, w, labels, cotangent=None):
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss = f(*leaves, labels)
    (loss if cotangent is None else loss * cotangent).backward()
    return loss.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("device", CPU_OR_GPU)
@pytest.mark.parametrize(
    "f", [shifted, shifted_contiguous, as_transformers, counted, plain, ignoring_another, with_none_left, biased]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cotangent", [None, 3.0])
def test_losses_and_gradients_are_those_of_eager(f, dtype, device, cotangent):
    operands = inputs(device, dtype)
    compiled = thunder.jit(f, executors=["linear_cross_entropy"])
    computed_gradients, expected = gradients(compiled, *operands, cotangent), gradients(f, *operands, cotangent)
    ran = names(thunder.last_traces(compiled)[-1])
    assert "linear_cross_entropy_with_gradients" in ran and "linear" not in ran and "cross_entropy" not in ran
    assert set(names(thunder.last_backward_traces(compiled)[-1])) <= {
        "times_cotangent",
        "reshape",
        "default",
        "div",
        "view",
        "slice_backward",
        "add_part",
    }
    for a, b in zip(computed_gradients, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*operands), expected[0])
    assert "linear_cross_entropy" in names(thunder.last_traces(compiled)[-1])


@pytest.mark.parametrize("wanted", [(True, True, True), (False, False, True), (True, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_has_its_gradient(wanted, dtype):
    x, w, labels = inputs(dtype=dtype)
    operands = x, w, torch.randn(21, dtype=dtype)

    def f(x, w, bias):
        return cross_entropy(linear(x, w, bias=bias).view(-1, 21), labels.view(-1))

    ours, theirs = ([t.clone().requires_grad_(r) for t, r in zip(operands, wanted, strict=True)] for _ in range(2))
    compiled = thunder.jit(f, executors=["linear_cross_entropy"])
    compiled(*ours).backward()
    f(*theirs).backward()
    assert "linear_cross_entropy_with_gradients" in names(thunder.last_traces(compiled)[-1])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("rows, classes", [(8, 67), (1, 130), (8, 131)])
@pytest.mark.parametrize("bias", [None, 0.5])
def test_rows_of_logits_begin_where_products_are_fast(rows, classes, bias):
    class Strides(torch.utils._python_dispatch.TorchDispatchMode):
        strides: set = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
                for t in (out, *args):
                    self.strides |= set(t.stride()) if t.dim() == 2 and classes in t.shape else set()
            return out

    torch.manual_seed(0)
    x, w, labels = torch.randn(rows, 8), torch.randn(classes, 8), torch.randint(0, classes, (rows,))
    compiled = thunder.jit(
        lambda x, w, y: cross_entropy(linear(x, w, None if bias is None else w[:, 0] * bias), y),
        executors=["linear_cross_entropy"],
    )
    gradients(compiled, x, w, labels)
    with Strides() as seen:
        gradients(compiled, x, w, labels)
    assert seen.strides and all(s == 1 or s * 4 % 16 == 0 for s in seen.strides)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU may have no products in bfloat16")
def test_half_precision_is_as_near_to_the_truth_as_eager(monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 1024 * 5000)  # half of it
    torch.manual_seed(0)
    x, w, labels = (
        torch.randn(1, 1024, 256, device="cuda"),
        torch.randn(5000, 256, device="cuda") * 0.1,
        torch.randint(0, 5000, (1, 1024), device="cuda"),
    )

    def f(x, w, labels):
        return cross_entropy(linear(x, w).float().view(-1, 5000), labels.view(-1))

    inputs = x.bfloat16(), w.bfloat16(), labels
    compiled = thunder.jit(f, executors=["linear_cross_entropy"])
    exact = gradients(
        lambda x, w, y: cross_entropy(linear(x, w).view(-1, 5000), y.view(-1)),
        inputs[0].double(),
        inputs[1].double(),
        labels,
    )
    for ours, theirs, truth in zip(gradients(compiled, *inputs), gradients(f, *inputs), exact, strict=True):
        assert (ours.double() - truth).norm() <= 1.5 * (theirs.double() - truth).norm() + 1e-6 * truth.norm()


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_the_gradients_that_are_asked_for_are_made(wanted):
    x, w, labels = inputs()
    compiled = thunder.jit(shifted, executors=["linear_cross_entropy"])
    leaves = [t.detach().requires_grad_(r) for t, r in zip((x, w), wanted, strict=True)]
    compiled(*leaves, labels).backward()
    expected = gradients(shifted, x, w, labels)[1:]
    for leaf, r, g in zip(leaves, wanted, expected, strict=True):
        assert (leaf.grad is None) != r
        if r:
            torch.testing.assert_close(leaf.grad, g)
    saved = thunder.last_traces(compiled)[-1].output[1][0]
    assert len(saved) == 1


@pytest.mark.parametrize("width, part", [(8, 64), (100, 86), (256, 256)])
def test_no_more_than_a_part_of_the_logits_is_made(monkeypatch, width, part):
    """A part takes no more memory than the limit, or than the weight."""
    monkeypatch.setattr(module, "LIMIT", 64 * 300 * 4)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (300,) and out.is_contiguous():
                self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
            return out

    torch.manual_seed(0)
    x, w, labels = torch.randn(256, width), torch.randn(300, width), torch.randint(0, 300, (256,))
    compiled = thunder.jit(lambda x, w, y: cross_entropy(linear(x, w), y), executors=["linear_cross_entropy"])
    gradients(compiled, x, w, labels)
    with Largest() as seen:
        gradients(compiled, x, w, labels)
    assert seen.nbytes == part * 300 * 4


def test_a_graph_that_is_kept_gives_the_same_twice():
    x, w, labels = inputs()
    compiled = thunder.jit(plain, executors=["linear_cross_entropy"])
    leaves = x.requires_grad_(), w.requires_grad_()
    loss = compiled(*leaves, labels) * 2
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    for g in first:
        g.mul_(7)  # what the user does with a gradient is not seen by the next
    again = torch.autograd.grad(loss, leaves)
    for a, b in zip(again, torch.autograd.grad(plain(*leaves, labels) * 2, leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives():
    x, w, labels = inputs()
    compiled = thunder.jit(plain, executors=["linear_cross_entropy"])
    assert torch.autograd.gradgradcheck(lambda x: compiled(x, w, labels), x.requires_grad_())


def with_logits(x, w, labels):
    logits = linear(x, w)
    return cross_entropy(logits.view(-1, w.shape[0]), labels.view(-1)) + logits.sum() * 0


def smoothed(x, w, labels):
    return cross_entropy(linear(x, w).view(-1, w.shape[0]), labels.view(-1), label_smoothing=0.1)


def weighted(x, w, labels):
    return cross_entropy(
        linear(x, w).view(-1, w.shape[0]), labels.view(-1), weight=torch.ones(w.shape[0], dtype=x.dtype)
    )


def unreduced(x, w, labels):
    return cross_entropy(linear(x, w).view(-1, w.shape[0]), labels.view(-1), reduction="none").sum()


def across(x, w, labels):
    return cross_entropy(linear(x, w).transpose(1, 2), labels)


def fewer_classes(x, w, labels):
    return cross_entropy(linear(x, w)[..., :20].reshape(-1, 20), labels.clamp(max=19).view(-1))


def mixed(x, w, labels):
    return cross_entropy(linear(x, w).reshape(-1, 7), labels.view(-1).clamp(max=6).repeat(3))


def without_grad(x, w, labels):
    with torch.no_grad():
        logits = linear(x, w)
    return cross_entropy(logits.view(-1, w.shape[0]), labels.view(-1)) + x.sum()


def scaled_logits(x, w, labels):
    return cross_entropy((linear(x, w) * 2).view(-1, w.shape[0]), labels.view(-1))


@pytest.mark.parametrize(
    "f", [with_logits, smoothed, weighted, unreduced, across, fewer_classes, mixed, without_grad, scaled_logits]
)
def test_what_it_does_not_join(f):
    x, w, labels = inputs()
    compiled = thunder.jit(f, executors=["linear_cross_entropy"])
    leaves, ours = [t.clone().requires_grad_() for t in (x, w)], [t.clone().requires_grad_() for t in (x, w)]
    expected, actual = f(*leaves, labels), compiled(*ours, labels)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(
        torch.autograd.grad(actual, ours, allow_unused=True),
        torch.autograd.grad(expected, leaves, allow_unused=True),
        strict=True,
    ):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    assert not any("linear_cross_entropy" in n for n in names(thunder.last_traces(compiled)[-1]))


def test_small_logits_are_left_alone(monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 1 << 29)
    compiled = thunder.jit(plain, executors=["linear_cross_entropy"])
    gradients(compiled, *inputs())
    assert "linear" in names(thunder.last_traces(compiled)[-1])


def test_a_view_that_pytorch_refuses_is_refused():
    def f(x, w, labels):
        return cross_entropy(linear(x, w)[:, :-1].view(-1, w.shape[0]), labels[:, 1:].reshape(-1))

    with pytest.raises(RuntimeError, match="view size is not compatible"):
        f(*inputs())
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        thunder.jit(f, executors=["linear_cross_entropy"])(*inputs())


def test_targets_out_of_bounds():
    x, w, labels = inputs()
    labels[0, 0] = 21
    for run in (plain, thunder.jit(plain, executors=["linear_cross_entropy"])):
        with pytest.raises(IndexError, match="Target 21 is out of bounds."):
            run(x, w, labels)


def test_nothing_to_average():
    x, w, _ = inputs()
    compiled = thunder.jit(plain, executors=["linear_cross_entropy"])
    assert compiled(x, w, torch.full((2, 9), -100)).isnan()


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("classes", [37, 9000])
def test_the_kernel_over_rows(triton_interpreter, gradient, classes):
    """Under Triton's interpreter, or on the GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    z = torch.randn(4, classes, device=device) * 4
    z[2, 5:] = float("-inf")
    target, keep = torch.tensor([3, 0, 4, 36], device=device), torch.tensor([True, False, True, True], device=device)
    scale, losses, logits = torch.tensor(0.25, device=device), torch.empty(4, device=device), z.clone()
    over_rows(logits, target, keep, z.gather(1, target[:, None])[:, 0], scale, losses, gradient)
    leaf = z.double().requires_grad_()
    each = cross_entropy(leaf, torch.where(keep, target, -100), reduction="none")
    torch.testing.assert_close(losses.double(), each.detach(), atol=1e-5, rtol=1e-5)
    expected = torch.autograd.grad(each.sum() * 0.25, leaf)[0] if gradient else z.double()
    torch.testing.assert_close(logits.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_the_kernel_that_multiplies(triton_interpreter, factor):
    from thunder.ops.families.scale_kernel import scale

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for x in (torch.randn(1, 9001, device=device), torch.randn(31, 72, device=device)[:, :67]):
        whole = x._base if x._base is not None else x
        rest, expected = whole[:, x.shape[1] :].clone(), x * factor
        actual = scale(x, torch.tensor(factor, device=device))
        assert actual is x and torch.equal(x, expected) and torch.equal(whole[:, x.shape[1] :], rest)


def test_a_memory_budget_knows_that_it_is_three_products():
    x, w, labels = inputs()
    compiled = thunder.jit(plain, executors=["linear_cross_entropy"])
    gradients(compiled, x, w, labels)
    (line,) = [b for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym is module.with_gradients]
    products = 3 * 18 * 8 * 21
    assert estimated_time(line) - 2 * products / FLOPS_PER_BYTE == sum(
        p.numel_value * p.dtype.bytes for p in (*line.inputs, *line.outputs)
    )


@pytest.mark.parametrize("reads_logits", [False, True])
def test_a_step_with_its_backward_inside_joins_them_too(reads_logits):
    x, w, labels = inputs()

    def step(w, x, labels):
        w.grad = None
        logits = linear(x, w)
        loss = cross_entropy(logits.view(-1, w.shape[0]), labels.view(-1))
        loss.backward()
        return loss.detach(), w.grad, logits.detach().argmax(-1) if reads_logits else None

    want, got = w.clone().requires_grad_(), w.clone().requires_grad_()
    compiled = thunder.jit(step, executors=["linear_cross_entropy"])
    for a, b in zip(compiled(got, x, labels), step(want, x, labels), strict=True):
        torch.testing.assert_close(a, b)
    executed_names = names(thunder.last_traces(compiled)[-1])
    assert "linear_cross_entropy_with_gradients" in executed_names and ("linear" in executed_names) is reads_logits
