"""A table of programs that are known to trip compilers. Each is compared with itself in eager: values, shared memory,
versions, errors."""

import copy
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import thunder
from tests.capture.test_mutation import X, agree, flat
from thunder.errors import CaptureError

TABLE = {}


def row(*args, times=3):
    def add(f):
        TABLE[f.__name__] = f, args or (X,), times
        return f

    return add


# ----------------------------------------------------------------------------------------------------------------
# values


@row()
def a_clone_is_written(x):
    y = x.clone()
    y.sin_()
    return y


@row()
def a_view_of_an_argument(x):
    x[1:, ::2].mul_(3)
    return x.t()


@row()
def an_argument_is_returned_and_written(x):
    x.add_(1)
    return x, x.view(-1)


@row()
def a_result_is_written_after_a_view_was_taken(x):
    y = x * 2
    v = y[0]
    w = y.view(-1)
    y.add_(1)
    w.mul_(2)
    return y, v, w


@row()
def views_of_views_across_writes(x):
    a = x.view(2, 8)
    b = a.t()
    c = b[1:3]
    c.mul_(2)
    a.add_(1)
    d = b[0]
    b.sub_(1)
    return a, b, c, d


@row()
def every_kind_of_view_is_written_through(x):
    x.diagonal().add_(1)
    x.unfold(0, 2, 2).mul_(2)
    x.as_strided((2, 2), (1, 2), 1).sub_(3)
    x.swapaxes(0, 1)[0].mul_(3)
    x.mT[0].add_(1)
    x.view(torch.int32)[0].zero_()
    x.unflatten(0, (2, 2))[1].neg_()
    x.hsplit(2)[0].add_(4)
    x.expand(4, 4).add_(1)
    torch.atleast_3d(x).mul_(2)
    return x


@row()
def parts_of_a_complex_tensor(x):
    y = torch.complex(x, x)
    y.real.mul_(2)
    y.imag.add_(1)
    torch.view_as_real(y)[..., 0].sub_(1)
    y.conj().mul_(2j)
    return y


@row()
def every_form_of_an_index(x):
    x[0] = 1
    x[1:2] = 2
    x[None, 2] = 3
    x[..., 1] = 4
    x[x > 12] = 0
    x[torch.tensor([0, 1])] = torch.ones(4)
    x[torch.tensor([0, 1]), 1:3] = -1
    x[[0, 3], [1, 2]] = 8
    x[1, ..., None] = torch.ones(4, 1)
    x[-1, ::2] += 5
    x[()] = x + 1
    x[..., torch.tensor([0])] = 3
    x[True] = x * 2
    x[:, torch.tensor(2)] = 9
    x[torch.tensor([True, False, True, False])] = 7
    x[:, [True, False, False, True]] = 6
    return x


@row()
def indexed_writes_through_views(x):
    x[1:].index_put_((torch.tensor([0, 0]),), torch.tensor(5.0), accumulate=True)
    x.t()[1].masked_fill_(x[0] > 1, 3.0)
    x[:, :2].scatter_(1, torch.tensor([[0], [1], [0], [1]]), 9.0)
    x[1:].masked_scatter_(x[1:] > 7, torch.ones(12))
    x[2:].index_fill_(1, torch.tensor([0]), -1)
    x[0].scatter_add_(0, torch.tensor([1, 1]), torch.ones(2))
    return x


@row()
def rows_are_swapped_through_temporaries(x):
    x[0], x[1] = x[1].clone(), x[0].clone()
    x[2], x[3] = x[3], x[2]
    return x


@row()
def augmented_in_a_loop(x):
    y = x[1:]
    for i in range(3):
        y += x[:3].clone()
        x[i] -= 1
    return y


@row(torch.arange(16).reshape(4, 4))
def every_augmented_operator_of_integers(x):
    x |= 1
    x &= 7
    x ^= 2
    x <<= 1
    x >>= 1
    x %= 5
    x //= 2
    return x


@row()
def a_matrix_product_that_looks_augmented(x):
    y = x
    y @= x
    return y, x


@row()
def foreach_functions(x):
    a, b = x[0], x[1]
    torch._foreach_add_([a, b], [b.clone(), a.clone()])
    torch._foreach_zero_([a])
    torch._foreach_copy_([b], [a])
    torch._foreach_lerp_([x[2]], [x[3]], 0.5)
    torch._foreach_addcmul_([x[2]], [x[3]], [x[1]], 2.0)
    torch._foreach_sqrt_([x[2]])
    return x


@row()
def out_arguments(x):
    o = torch.empty(4, 4)
    torch.where(x > 3, x, -x, out=o)
    torch.cat([o[:2], -o[2:]], out=x)
    torch.sum(o, 0, out=x[0])
    fresh = torch.empty(0)
    torch.add(x, 1, out=fresh)
    return o, fresh, x


@row()
def a_result_that_is_kept_is_read_into_another_tensor(x):
    y = torch.empty(4, 4)
    x.mul_(2)
    torch.add(x, 1, out=y)
    return y, x


@row()
def data_and_detach(x):
    y = x * 2
    y.data.add_(1)
    z = y.detach()
    z.mul_(3)
    x.data[0].zero_()
    return y, z


@row()
def only_data_is_written(x):
    x.data.mul_(2)
    x[0].data.add_(1)


@row()
def empty_and_neutral_writes_count(x):
    x[:0].add_(1)


@row()
def nothing_is_written(x):
    return x.t(), x + 1


def noise_is_drawn_in_place(x):
    x[0].normal_()
    y = x * 1
    y[1].random_(0, 10)
    y[2].bernoulli_(0.5)
    return F.dropout(y, 0.5, True, True)


# ----------------------------------------------------------------------------------------------------------------
# shapes that change in place


@row(torch.arange(12.0).reshape(3, 4))
def an_argument_is_transposed_in_place(x):
    y = x[0]
    x.t_()
    x.add_(1)
    return x.shape[0], y, x[0]


@row(torch.arange(4.0).reshape(1, 4))
def an_argument_is_squeezed_and_unsqueezed_in_place(x):
    x.squeeze_(0).unsqueeze_(-1)
    return x * 2


@row(torch.arange(24.0).reshape(2, 3, 4))
def temporaries_change_their_shapes(x):
    y = x + 1
    view = y[0]
    y.transpose_(0, 2).swapaxes_(0, 1).swapdims_(1, 2)
    y[0] = 5
    z = (x * 2)[:, None]
    z.squeeze_()
    z += 1
    w = x * 3
    w.as_strided_((2, 2), (1, 2))
    return y, view, z, w.detach_()


@row()
def a_view_changes_its_shape(x):
    y = x[1:3]
    z = y[0]
    y.t_()
    y[0].mul_(2)
    z.add_(1)
    return y, z, x


# ---------------------------------------------------------------------------------------------------------------- state
# around the program


@row()
def a_list_and_a_dict_of_tensors(x):
    pool, table = [x, x * 1], {"a": x[0]}
    pool[1] += 1
    table["a"].zero_()
    table["b"] = pool[0].mul_(2)
    return pool, list(table.values())


@row()
def a_closure_keeps_a_running_sum(x):
    total = torch.zeros(4)

    def add(t):
        nonlocal total
        total += t
        total = total.mul_(2)

    for r in x:
        add(r)
    return total


@pytest.mark.parametrize("executors", [None, ["triton_fuser"]], ids=["default", "fused"])
@pytest.mark.parametrize("name", TABLE)
def test_the_table(name, executors):
    f, args, times = TABLE[name]
    compiled = thunder.jit(f, executors=executors, debug_options=thunder.DebugOptions(check_traces=True))
    for _ in range(times):
        agree(f, compiled, args)
    assert thunder.cache_misses(compiled) == 1


def test_noise_is_drawn_in_place():
    compiled = thunder.jit(noise_is_drawn_in_place)
    for seed in range(3):
        results = []
        for f in (noise_is_drawn_in_place, compiled):
            torch.manual_seed(seed)
            results.append(f(X.clone()))
        assert torch.equal(*results)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.resize_(2, 2), lambda x: x.set_(torch.zeros(3)), lambda x: x.resize_as_(torch.zeros(2, 8)),
            lambda x: (x + 1).resize_(2, 8), lambda x: x.apply_(lambda v: v + 1),
        lambda x: x.as_strided_((2, 2), (1, 2)), lambda x: x._version,
            lambda x: x.as_strided((3, 3), (1, 1)).mul_(2),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_everything_as_it_was(f):
    x = X.clone()
    with pytest.raises(CaptureError) as refused:
        thunder.jit(f)(x)
    assert "test_mutation_table.py" in str(refused.value) and torch.equal(x, X) and x._version == 0


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.long().div_(2), lambda x: x[0].add_(x), lambda x: x.add_(1j), lambda x: (x > 1).add_(1.5),
            lambda x: x.t_().unsqueeze_(7), lambda x: x[5].zero_(),
        lambda x: x.expand(2, 4, 4).add_(1), lambda x: x.copy_(torch.ones(3)),
            lambda x: x.__setitem__(0, torch.ones(3)),
                lambda x: torch.add(x, 1, out=torch.empty(4, 4, dtype=torch.int64)), lambda x: x.view(3, 5).add_(1),
    ],
)  # fmt: skip
def test_errors_are_of_eagers_class(f):
    with pytest.raises((RuntimeError, IndexError, TypeError)) as theirs:
        f(X.clone())
    with pytest.raises(type(theirs.value)) as ours:
        thunder.jit(f)(X.clone())
    assert type(ours.value) is type(theirs.value) and str(ours.value)[:30] == str(theirs.value)[:30]


# ----------------------------------------------------------------------------------------------------------------
# modules, modes, gradients


class Running(torch.nn.Module):
    """Buffers that are reassigned, written to and averaged."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(3, 4))

    def forward(self, x):
        self.steps = self.steps + 1
        for i, block in enumerate(self.blocks):
            x = F.relu_(block(x))
            self.last[i] = x.detach().mean(0)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x * self.mean


def test_buffers_reassigned_written_and_averaged():
    torch.manual_seed(0)
    net = Running()
    twin = copy.deepcopy(net)
    compiled = thunder.jit(twin)
    for _ in range(3):
        x = torch.randn(2, 4)
        net(x).sum().backward(), compiled(x).sum().backward()
        for a, b in zip(
            [*net.state_dict().values(), *(p.grad for p in net.parameters())],
            [*twin.state_dict().values(), *(p.grad for p in twin.parameters())],
            strict=True,
        ):
            torch.testing.assert_close(b, a)
    assert thunder.cache_misses(compiled) == 1


STATE = torch.zeros(4)


def test_a_global_tensor_is_written_to():
    def count(x):
        STATE.add_(x)
        return STATE * 2

    compiled = thunder.jit(count)
    for n in (1, 2, 3):
        assert compiled(torch.ones(4)).tolist() == [2.0 * n] * 4
    assert STATE.tolist() == [3.0] * 4


def test_batch_norm_switches_between_training_and_evaluation():
    net = torch.nn.BatchNorm1d(4)
    twin = copy.deepcopy(net)
    compiled = thunder.jit(twin)
    for training in (True, False, True, False):
        net.train(training), compiled.train(training)
        assert torch.equal(compiled(X), net(X))
        assert all(
            torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True)
        )
    assert thunder.cache_misses(compiled) == 2


def test_dropout_inside_of_a_checkpoint_repeats_its_mask():
    def f(x, w):
        return checkpoint(lambda t: F.dropout(t @ w, 0.5), x, use_reentrant=False).sin().sum()

    compiled, w = thunder.jit(f), torch.randn(4, 4)
    for seed in range(3):
        grads = []
        for g in (f, compiled):
            torch.manual_seed(seed)
            x = X.clone().requires_grad_()
            g(x, w).backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)


def test_autocast_is_left_and_a_new_shape_comes():
    compiled = thunder.jit(lambda x: x @ x.t())
    for rows, cast in ((4, True), (4, False), (2, False), (2, True), (3, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            assert compiled(X[:rows]).dtype is (torch.bfloat16 if cast else torch.float32)


def test_requires_grad_flips_between_calls():
    compiled = thunder.jit(lambda x: x.exp().sum())
    for needed in (False, True, False, True):
        x = torch.ones(3, requires_grad=needed)
        value = compiled(x)
        assert value.requires_grad == needed
        if needed:
            value.backward()
            torch.testing.assert_close(x.grad, x.detach().exp())
    assert thunder.cache_misses(compiled) == 2


@pytest.mark.parametrize(
    "f",
    [
        lambda p: (p.data.mul_(3), (p * p).sum())[1], lambda p: (p.detach().mul_(3), (p * 2).sum())[1],
            lambda p: ((p * p).sum(), p.data.mul_(3))[0],
        lambda p: (q := p * 2, q.data.add_(1), (q * q).sum())[2],
            lambda p: (q := p * 2, q[0].detach().add_(1), (q * p).sum())[2],
        lambda p: (q := p * 2, q.view(torch.int32).bitwise_and_(-65536), (q * p).sum())[2],
            lambda p: (q := p * 2, q[1:].view(torch.uint8)[:2].zero_(), (q * q).sum())[2],
        lambda p: (p.view(torch.bfloat16).mul_(2), (p * p).sum())[1],
    ],
)  # fmt: skip
def test_writes_behind_autograds_back(f):
    gradients = []
    for g in (f, thunder.jit(f), thunder.jit(f, executors=["triton_fuser"])):
        p = torch.arange(1.0, 4.0, requires_grad=True)
        value = g(p)
        version = p._version
        value.backward()
        gradients.append((value.item(), p.tolist(), p.grad.tolist(), version))
    assert gradients[0] == gradients[1] == gradients[2]


@pytest.mark.parametrize("change", [torch.Tensor.zero_, torch.Tensor.t_])
def test_what_is_written_to_is_not_computed_of_again(change):
    def f(x, w):
        z = ((x * 2).sin() * w).exp()
        change(x)
        return z.sum()

    gradients = []
    for g in (f, thunder.jit(f, executors=["triton_fuser"])):
        x, w = torch.arange(16.0).reshape(4, 4) / 8, torch.ones(4, 4, requires_grad=True)
        g(x, w).backward()
        gradients.append((x, w.grad))
    torch.testing.assert_close(*gradients)


def view_made_without_grad(w):
    y = w * 2
    with torch.no_grad():
        v = y[0]
    v.add_(1)
    return y


def result_of_split(w):
    a, _ = (w * 2).split(2)
    a.mul_(2)
    return a


def row_of_a_loop(w):
    for r in w * 2:
        r.mul_(2)
    return w


def weighed_after_it_was_split(w):
    a, _ = torch.zeros(4, 4).chunk(2)
    a.mul_(w[:2])
    return a


@pytest.mark.parametrize(
    "f",
    [
        view_made_without_grad,
        result_of_split,
        row_of_a_loop,
        weighed_after_it_was_split,
        lambda w: w.t_(),
        lambda w: w[0].unsqueeze_(0),
    ],
)
def test_views_that_autograd_does_not_let_be_written_to(f):
    for g in (f, thunder.jit(f)):
        with pytest.raises(
            RuntimeError,
            match="is being modified inplace|a (view of a )?leaf Variable that requires grad is being used in an "
            "in-place operation",
        ):
            g(X.clone().requires_grad_())


def test_a_filled_tensor_still_requires_grad():
    def f(w):
        y, z = w * 2, w * 3
        y.zero_()
        z[0].fill_(1.0)
        z[1].normal_()
        return y, z.sum()

    compiled, w = thunder.jit(f), X.clone().requires_grad_()
    for g in (f, compiled):
        y, z = g(w)
        assert y.requires_grad and not y.any()
        ours = torch.autograd.grad(z + y.sum(), w)[0]
        assert ours.tolist() == [[0.0] * 4] * 2 + [[3.0] * 4] * 2


def test_what_is_saved_of_an_argument_is_not_written_over():
    """PyTorch's backward says that it is gone."""

    def f(x, w):
        x.clamp_(-1, 1)
        y = x * w
        x.fill_(3)
        return y

    x, w = X.clone(), torch.tensor(1.5, requires_grad=True)
    (gradient,) = torch.autograd.grad(thunder.jit(f)(x, w).sum(), w)
    torch.testing.assert_close(gradient, X.clamp(-1, 1).sum())
    assert (x == 3).all()


def detached_and_weighed(x, w):
    a = (x * 1).detach()
    return a.mul_(w)


def beside_what_it_was_detached_from(x, w):
    b = x * 1
    a = b.detach()
    a.mul_(w)
    return a, b


def reads_what_it_was_detached_from(x, w):
    b = x * w
    a = b.detach()
    a.sub_(b.clone())
    return a


def both_are_written_to(x, w):
    b = x * w
    a = b.detach()
    a.mul_(w)
    b.add_(1)
    return a, b


def a_part_of_what_was_detached(x, w):
    a = (x * 1).data
    v = a[0:2]
    v.mul_(w)
    a.add_(w)
    return v, a, a * 2


@pytest.mark.parametrize(
    "f",
    [
        detached_and_weighed,
        beside_what_it_was_detached_from,
        reads_what_it_was_detached_from,
        both_are_written_to,
        a_part_of_what_was_detached,
    ],
)
def test_what_is_written_to_a_detached_tensor_is_its_history(f):
    gradients = []
    for g in (f, thunder.jit(f)):
        w = torch.tensor(1.5, requires_grad=True)
        results = flat(g(X, w))
        gradient = torch.autograd.grad(sum(r.sum() * (i + 1) for i, r in enumerate(results) if r.requires_grad), w)[0]
        memory = [r.untyped_storage().data_ptr() == results[0].untyped_storage().data_ptr() for r in results]
        gradients.append(([r.tolist() for r in results], [r.requires_grad for r in results], memory, gradient.item()))
    assert gradients[0] == gradients[1]


# ----------------------------------------------------------------------------------------------------------------
# caches


class Allocated(TorchDispatchMode):
    """The largest new memory that each operation made."""

    def __init__(self):
        super().__init__()
        self.total, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {
            t.untyped_storage()._cdata for t in flat([*args, *(kwargs or {}).values()]) if isinstance(t, torch.Tensor)
        }
        for o in flat(out):
            if isinstance(o, torch.Tensor) and o.untyped_storage()._cdata not in known:
                self.total += o.untyped_storage().nbytes()
                self.largest = max(self.largest, o.untyped_storage().nbytes())
        return out


HEADS, WIDTH, LENGTH = 2, 8, 64


def decode_at_an_int(x, w, keys, values, position):
    q, k, v = (x @ w).view(1, 3, HEADS, WIDTH).unbind(1)
    keys[:, :, position : position + 1] = k.unsqueeze(2)
    values[:, :, position] = v
    seen = position + 1
    return F.scaled_dot_product_attention(q.unsqueeze(2), keys[:, :, :seen], values[:, :, :seen]).reshape(1, -1)


def decode_at_a_tensor(x, w, keys, values, position):
    q, k, v = (x @ w).view(1, 3, HEADS, WIDTH).unbind(1)
    keys.index_copy_(2, position, k.unsqueeze(2))
    values[:, :, position] = v.unsqueeze(2)
    mask = (torch.arange(LENGTH) <= position)[None, None, None]
    return F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, attn_mask=mask).reshape(1, -1)


@pytest.mark.parametrize("cache", [None, "symbolic values"])
@pytest.mark.parametrize("decode", [decode_at_an_int, decode_at_a_tensor])
def test_sixty_four_steps_of_decoding(decode, cache):
    if decode is decode_at_an_int and cache is not None:
        pytest.skip("0 and 1 are values of their own where everything is symbolic: three programs")
    torch.manual_seed(0)
    compiled = thunder.jit(decode, cache=cache)
    w, x = torch.randn(HEADS * WIDTH, 3 * HEADS * WIDTH), torch.randn(1, HEADS * WIDTH)
    ours, eagers = ([torch.zeros(1, HEADS, LENGTH, WIDTH) for _ in range(2)] for _ in range(2))
    y = x
    for i in range(LENGTH):
        position = i if decode is decode_at_an_int else torch.tensor([i])
        with Allocated() as here:
            x = compiled(x, w, *ours, position)
        with Allocated() as there:
            y = decode(y, w, *eagers, position)
        torch.testing.assert_close(x, y)
    assert all(torch.equal(a, b) for a, b in zip(ours, eagers, strict=True))
    assert thunder.cache_misses(compiled) <= 2
    assert here.total <= there.total and here.largest < ours[0].nbytes


@pytest.mark.parametrize(
    "kind, cache", [("StaticCache", None), ("StaticCache", "symbolic values"), ("DynamicCache", "symbolic values")]
)
def test_the_caches_of_transformers(kind, cache):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()

    def new():
        return (
            transformers.StaticCache(config=config, max_cache_len=128)
            if kind == "StaticCache"
            else transformers.DynamicCache(config=config)
        )

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    compiled = thunder.jit(model, cache=cache)
    ours, eagers = new(), new()
    ids, positions = torch.randint(0, 64, (1, 8)), torch.arange(8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(12):
            with Allocated() as here:
                x = compiled(ids, **{name: ours}, use_cache=True, position_ids=positions[None])
            with Allocated() as there:
                y = model(ids, **{name: eagers}, use_cache=True, position_ids=positions[None])
            torch.testing.assert_close(x.logits, y.logits)
            ids, positions = y.logits[:, -1:].argmax(-1), positions[-1:] + 1
    assert thunder.cache_misses(compiled) == 2, "the prompt, and a step"
    assert here.total <= there.total
