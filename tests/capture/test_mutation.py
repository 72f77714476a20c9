"""Programs that write to tensors: values, identity and shared memory of results and arguments are eager's."""

import copy

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.counting import calls_during
from thunder.ops.functionalize import memory

X = torch.arange(16.0).reshape(4, 4)
PROGRAMS = {}


def program(*args):
    def add(f):
        PROGRAMS[f.__name__] = f, args or (X,)
        return f

    return add


@program()
def clone_is_written(x):
    y = x.clone()
    y.sin_()
    return x + y


@program()
def argument(x):
    x.mul_(2)
    return x.sum()


@program()
def item_of_an_argument(x):
    x[0].add_(1)
    return x


@program()
def base_while_a_view_is_held(x):
    y = x[1:]
    x.add_(1)
    return y * 2, x


@program()
def view_of_a_view(x):
    y = x.t()
    z = y[0]
    z.mul_(3)
    return x, y, z


@program()
def temporary_through_a_view(x):
    y = x * 1
    z = y.view(-1)
    z[2] = 5.0
    return y, z


@program()
def results_of_split(x):
    a, b = x.split(2)
    a.zero_()
    return a, b, x


@program()
def results_of_unbind(x):
    u = x.unbind(0)
    u[1].fill_(3)
    return u[0] + u[1], x


@program()
def half_of_chunk(x):
    y = x.chunk(2, 1)[1]
    y.mul_(2)
    return y, x


@program(X, X * 2)
def copied_into(x, y):
    x.copy_(y)
    return x + y


@program()
def view_and_base_take_turns(x):
    y = x.view(2, 8)
    y[0] += 1
    x[3, 3] = 7
    y.mul_(2)
    return y


@program()
def filled_in_a_loop(x):
    out = torch.zeros(4, 4)
    for i in range(4):
        out[i] = x[i] * i
    return out


@program()
def permuted_and_indexed(x):
    y = x.permute(1, 0)[None]
    y[0, 1] = 0
    return x


@program()
def reshaped_temporary(x):
    z = (x * 2).reshape(-1)
    z.add_(1)
    return z


@program()
def squeezed(x):
    y = (x * 2).unsqueeze(0).squeeze(0)
    y.clamp_(0, 5)
    return y


@program()
def detached(x):
    y = x.detach()
    y.add_(1)
    return x


@program()
def data_attribute(x):
    x.data.mul_(2)
    return x + 1


@program()
def narrowed(x):
    y = x.narrow(0, 1, 2)
    y.sub_(1)
    return x, y


@program()
def relu_in_place_is_returned(x):
    return F.relu(x - 5, inplace=True), x.relu_()


@program()
def augmented_assignments(x):
    y = x[:, 0]
    x += 1
    y -= 2
    x *= y.clone()
    return x, y


@program(X, torch.ones(4, 1))
def cache_update(x, k):
    x[:, 1:2] = k
    return x @ x


@program()
def masked(x):
    x[x > 7] = 0
    x.masked_fill_(x < 2, -1.0)
    return x


@program()
def out_argument(x):
    y = torch.empty(4, 4)
    torch.add(x, 1, out=y)
    torch.mul(x, y, out=x)
    return y


@program()
def two_outs(x):
    values, indices = torch.empty(4, 4), torch.empty(4, 4, dtype=torch.int64)
    torch.sort(-x, out=(values, indices))
    return values, indices


@program()
def foreach(x):
    ys = [x * 1, x[0]]
    torch._foreach_add_(ys, 1.0)
    torch._foreach_mul_(ys, [2.0, 3.0])
    return ys, x


@program()
def unknown_in_place(x):
    y = x * 1
    y.put_(torch.tensor([1]), torch.tensor([3.0]))
    return y


@program(X, torch.tensor([2]))
def index_add_and_copy(x, i):
    x.index_add_(0, i, torch.ones(1, 4))
    x.index_copy_(1, i, torch.zeros(4, 1))
    return x


@program()
def shape_and_type_follow(x):
    y = x.double()
    y += x
    assert y.dtype is torch.float64 and tuple(y.shape) == (4, 4)
    return y


@program()
def mutation_after_a_result_was_taken(x):
    y = x + 1
    z = y * 2
    y.zero_()
    return y, z


@program()
def returned_twice(x):
    y = x.mul_(2)
    return x, y, y is x


def flat(x):
    return [t for e in x for t in flat(e)] if isinstance(x, (tuple, list)) else [x]


def copied(args):
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


def agree(f, compiled, args):
    ours, eagers = copied(args), copied(args)
    got, want = [*flat(compiled(*ours)), *ours], [*flat(f(*eagers)), *eagers]
    assert len(got) == len(want)
    assert [isinstance(x, torch.Tensor) and x._version > 0 for x in ours] == [
        isinstance(x, torch.Tensor) and x._version > 0 for x in eagers
    ], "versions"
    for a, b in zip(got, want, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.requires_grad == b.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert a == b
    got, want = ([t for t in storage if isinstance(t, torch.Tensor)] for storage in (got, want))
    for i in range(len(want)):
        for j in range(i):
            assert (got[i] is got[j]) == (want[i] is want[j]), ("one object", i, j)
            memory = [
                storage[i].untyped_storage().data_ptr() == storage[j].untyped_storage().data_ptr()
                for storage in (got, want)
            ]
            assert memory[0] == memory[1], ("one memory", i, j)


@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_are_eagers(name):
    f, args = PROGRAMS[name]
    compiled = thunder.jit(f, debug_options=thunder.DebugOptions(check_traces=True))
    for _ in range(3):
        agree(f, compiled, args)
    assert thunder.cache_misses(compiled) == 1


def test_one_tensor_passed_twice_is_one_and_two_are_compiled_apart():
    def f(x, y):
        x.add_(1)
        return x * y

    compiled = thunder.jit(f)
    for _ in range(2):
        a, b = X.clone(), X.clone()
        assert torch.equal(compiled(a, a), f(b, b)) and torch.equal(a, b)
    a, b = X.clone(), X.clone()
    assert torch.equal(compiled(a, X), f(b, X)) and torch.equal(a, b)
    assert "one object" in thunder.last_recompile_reasons(compiled)[0]
    assert torch.equal(compiled(a, a), f(b, b))


def test_overlap_that_appears_later_is_seen():
    def f(x, y):
        x.add_(1)
        return x.sum() + y.sum()

    compiled = thunder.jit(f)
    compiled(X.clone(), X[0].clone())
    y, z = X.clone(), X.clone()
    assert torch.equal(compiled(z, z[0]), f(y, y[0])) and torch.equal(y, z)
    assert thunder.last_recompile_reasons(compiled) == [
        "a tensor that is written to shares memory with another one now"
    ]


@program()
def views_or_copies_of_a_temporary(x):
    y = x * 2
    z, copy = y.reshape(-1), y.t().reshape(-1)
    z.add_(1)
    copy.zero_()
    return y, z, copy


@program()
def views_or_copies_of_an_argument(x):
    flat, copy, same = x.flatten(), x.t().contiguous(), x.contiguous()
    x.add_(1)
    flat[0].mul_(3)
    return flat, copy, same


@pytest.mark.parametrize("operation", [torch.Tensor.contiguous, lambda x: x.reshape(-1), torch.flatten, torch.ravel])
def test_whether_a_result_is_a_view_is_decided_by_the_strides(operation):
    def write_to_the_result(x):
        y = operation(x)
        y.mul_(3)
        return y

    def write_to_the_argument(x):
        y = operation(x)
        x.add_(1)
        return y

    for f in (write_to_the_result, write_to_the_argument):
        compiled = thunder.jit(f)
        for transposed in (False, True, False):
            ours, eagers = (X.clone().t() if transposed else X.clone() for _ in range(2))
            assert torch.equal(compiled(ours), f(eagers)) and torch.equal(ours, eagers)
        assert thunder.cache_misses(compiled) == 2


def test_a_gradient_that_reads_a_reshaped_argument_after_a_write_is_pytorchs_error():
    def f(x, w):
        y = (x.reshape(-1) * w).sum()
        x.add_(1)
        return y

    for g in (f, thunder.jit(f)):
        value = g(torch.ones(2, 2), torch.ones(4, requires_grad=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@pytest.mark.parametrize("f", [lambda x: x.add_(1), lambda x: x[0].mul_(2)], ids=["leaf", "view of a leaf"])
def test_leaves_that_require_grad_are_pytorchs_error(f):
    for g in (f, thunder.jit(f)):
        with pytest.raises(
            RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"
        ):
            g(X.clone().requires_grad_())


def test_parameters_are_written_to_without_grad():
    layer, twin = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    twin.load_state_dict(layer.state_dict())

    def step(m, x):
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(0.1 * x)

    thunder.jit(step)(layer, 2.0)
    step(twin, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), twin.parameters()))


def test_a_value_the_backward_needs_and_the_forward_overwrites_is_pytorchs_error():
    def f(x, w):
        y = x * w
        x.add_(1)
        return y.sum()

    w = torch.ones(4, requires_grad=True)
    for g in (f, thunder.jit(f)):
        value = g(torch.ones(4), w)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_gradients_flow_through_writes_to_temporaries():
    def f(x, w):
        y = torch.zeros(4, 4)
        y[1:3] = x[1:3] * w
        y[:, 0] += w
        z = y.t()
        z[2].mul_(w)
        return (y * z).sum()

    for seed in range(3):
        torch.manual_seed(seed)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
        for ours, eagers in zip(
            torch.autograd.grad(thunder.jit(f)(x, w), (x, w)), torch.autograd.grad(f(x, w), (x, w))
        ):
            torch.testing.assert_close(ours, eagers)


def test_batch_norm_trains_switches_and_keeps_its_statistics():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(inplace=True))
    twin = copy.deepcopy(net)
    compiled = thunder.jit(twin)
    for training in (True, True, False, True):
        net.train(training), compiled.train(training)
        x = torch.randn(2, 2, 5, 5)
        net(x).square().sum().backward()
        compiled(x).square().sum().backward()
        for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values()):
            torch.testing.assert_close(b, a, rtol=0, atol=0, msg=name)
        for a, b in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-5, atol=1e-5)
    assert thunder.cache_misses(compiled) == 2


def in_place_calls(compiled):
    return [
        b.sym.name
        for b in thunder.last_traces(compiled)[-1].bound_symbols
        if b.sym.name.endswith("_") and b.sym.name != "python_del"
    ]


def test_nothing_is_copied_back_where_the_operation_can_run_in_place():
    def decode(cache, k, i):
        cache[:, i : i + 1] = k
        return cache.sum(1)

    compiled = thunder.jit(decode)
    cache = X.clone()
    compiled(cache, torch.ones(4, 1), 2)
    assert in_place_calls(compiled) == ["setitem_"]
    norm = thunder.jit(torch.nn.BatchNorm1d(4))
    norm(X)
    assert in_place_calls(norm) == ["add_", "native_batch_norm_"]
    relu = thunder.jit(lambda x: F.relu(x * 2, inplace=True))
    relu(X)
    assert in_place_calls(relu) == ["relu_"]


def test_an_old_value_that_is_read_again_is_kept():
    def f(x):
        y = x * 1
        x.add_(1)
        z = y + x
        w = x.clone()
        x.mul_(w)
        return z, w

    agree(f, thunder.jit(f), (X,))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x[1:].copy_(x[:-1]), lambda x: x[1:].add_(x[:-1]), lambda x: x.add_(x.t()),
            lambda x: torch.add(x[1:], x[:-1], out=x[1:]), lambda x: x.sub_(x[0, 0]),
        lambda x: x.lerp_(x.t(), 0.5), lambda x: x.expand(2, 4, 4).add_(1), lambda x: x[0].expand(4, 4).copy_(x),
            lambda x: x.index_copy_(0, torch.tensor([0]), x[1:2]),
    ],
)  # fmt: skip
def test_reading_what_is_overwritten_under_another_place_is_pytorchs_error(f):
    for g in (f, thunder.jit(f)):
        with pytest.raises(
            RuntimeError,
            match="unsupported operation: (some elements of the input|more than one element of the written-to)",
        ):
            g(X.clone())


@program()
def overlaps_that_pytorch_allows(x):
    x.add_(x)
    x[0].clamp_(max=x[:, 0].clone())
    x[:2].masked_fill_(x[1:3] > 7, 2)
    return x[:2].mul_(x[2:])


@pytest.mark.parametrize(
    "write", [lambda y, i: y[i % 8].add_(1.0), lambda y, i: y.add_(1.0), lambda y, i: y.view(-1)[i % 8 :].mul_(2.0)]
)
def test_the_work_of_writes_is_linear(write):
    def program(x, n):
        y = x * 1
        for i in range(n):
            write(y, i)
        return y

    def calls(n):
        compiled = thunder.jit(program, cache="constant values")
        return calls_during(lambda: compiled(torch.ones(8, 4), n), memory.__file__)

    calls(10)
    few, more, most = calls(50), calls(100), calls(200)
    assert most - more < 2.1 * (more - few)
