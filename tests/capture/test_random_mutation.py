"""Random programs of views and writes, compared with themselves in eager: values, shared memory, which versions change,
errors, gradients."""

import collections
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thunder
from tests.capture.test_mutation import flat
from tests.test_cudagraph import Imitated
from thunder.analysis.aliases import alias_bases
from thunder.core import regions
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import OpTags, Symbol
from thunder.errors import CaptureError
from thunder.transforms.base import Transform

WRITES = [
    lambda a, b: a.add_(1), lambda a, b: a.mul_(0.5), lambda a, b: a.zero_(),
        lambda a, b: a.copy_(b.clone()) if a.shape == b.shape else a.neg_(), lambda a, b: a.sin_(),
    lambda a, b: a.sub_(b.clone()) if a.shape == b.shape else a.add_(2), lambda a, b: a.fill_(3),
        lambda a, b: a.clamp_(-1, 1), lambda a, b: a.add_(b) if a.shape == b.shape else a.abs_(),
    lambda a, b: a.copy_(b) if a.shape == b.shape else a.sgn_(), lambda a, b: a.masked_fill_(a > 1, 0.25),
        lambda a, b: torch._foreach_add_([a, b], 0.5),
    lambda a, b: a.relu_(), lambda a, b: a.__iadd__(1), lambda a, b: torch.mul(a, 2, out=a),
        lambda a, b: a.detach().mul_(3), lambda a, b: a.data.add_(1), lambda a, b: a.mul_(b.sum()),
]  # fmt: skip
VIEWS = [
    lambda x: x.t(), lambda x: x[0], lambda x: x[1:], lambda x: x[:, 0], lambda x: x.view(-1), lambda x: x.unsqueeze(0),
        lambda x: x.transpose(0, -1), lambda x: x.narrow(0, 0, 1),
    lambda x: x.split(1)[0], lambda x: x.chunk(2, -1)[-1], lambda x: x.unbind(0)[-1], lambda x: x.detach(),
        lambda x: x.select(-1, 0), lambda x: x[..., ::2], lambda x: x.permute(1, 0),
    lambda x: x.reshape(-1), lambda x: x.flatten(), lambda x: x.contiguous()[0:], lambda x: x.diagonal(),
        lambda x: x.data, lambda x: x.mT, lambda x: x.squeeze(0), lambda x: x.unfold(0, 2, 2),
    lambda x: x.expand(2, *x.shape), lambda x: x.view_as(x), lambda x: x.movedim(0, -1),
]  # fmt: skip
ITEMS = [
    lambda x, k: x.__setitem__(k % x.shape[0], 1.5), lambda x, k: x.__setitem__(slice(k % 2, None), -1.0),
        lambda x, k: x.__setitem__(..., 2.0), lambda x, k: x.__setitem__(x > k, 0.5),
    lambda x, k: x.__setitem__(torch.tensor([0, k % x.shape[0]]), 4.0), lambda x, k: x.__setitem__((None, 0), 3.0),
        lambda x, k: x.index_fill_(0, torch.tensor([k % x.shape[0]]), 7.0),
    lambda x, k: x.index_put_((torch.tensor([0]),), torch.tensor(2.5), accumulate=True),
        lambda x, k: x.__setitem__(0, x[-1].clone()), lambda x, k: x.__setitem__((..., 0), x.sum()),
]  # fmt: skip
COMPUTED = [
    lambda a, b: a.sum(), lambda a, b: a.mean(-1, keepdim=True), lambda a, b: a.amax(0),
        lambda a, b: sum(a.aminmax(dim=0)), lambda a, b: a.cumsum(-1), lambda a, b: a.var(-1, correction=0),
            lambda a, b: a.norm(),
    lambda a, b: torch.cat([a, b]) if a.dim() == b.dim() and a.shape[1:] == b.shape[1:] else a - b.sum(),
        lambda a, b: torch.cat([a[1:], a[:1]]), lambda a, b: torch.stack([a, a.sin()], -1),
    lambda a, b: F.pad(a, (1, 0)), lambda a, b: F.pad(a, (-1, 2), value=0.5) if a.shape[-1] > 1 else a * 1.5,
        lambda a, b: a.double(), lambda a, b: a.float(), lambda a, b: (a > 0).sum().to(a.dtype),
    lambda a, b: torch.softmax(a, -1), lambda a, b: torch.where(a > 0, a, a * 0.5),
        lambda a, b: torch.maximum(a, b) if a.shape == b.shape else a.clamp(0), lambda a, b: a.roll(1, 0),
            lambda a, b: a.flip(0),
    lambda a, b: a.new_zeros(a.shape), lambda a, b: torch.ones_like(a), lambda a, b: a.clone(),
        lambda a, b: a.tril() if a.dim() > 1 else a.tanh(), lambda a, b: a @ a.mT if a.dim() == 2 else a * 1,
    lambda a, b: a * (b if a.shape == b.shape else b.mean()),
        lambda a, b: a.detach() + b if a.shape == b.shape else a.detach(),
            lambda a, b: F.layer_norm(a, a.shape[-1:]) if a.shape[-1] > 1 else a * a,
    lambda a, b: a.repeat_interleave(2, 0) if a.numel() < 64 else a.exp(),
        lambda a, b: a.expand(2, *a.shape) * 1 if a.numel() < 64 else a.neg(),
]  # fmt: skip
SHAPES = [
    lambda x: x.t_(),
    lambda x: x.transpose_(0, -1),
    lambda x: x.unsqueeze_(0),
    lambda x: x.squeeze_(),
    lambda x: x.squeeze_(0),
]
KINDS = ["view", "view", "view", "write", "write", "item", "new", "read", "weigh", "quiet write", "quiet view", "shape"]
MIXED = [
    "view",
    "view",
    "write",
    "write",
    "write",
    "item",
    "weigh",
    "weigh",
    "quiet write",
    "compute",
    "compute",
    "compute",
    "compute",
    "compute",
    "lost",
    "again",
    "argument",
]


def program(steps, x, y, w):
    """`w`, which requires grad, comes into the program where a value is weighed."""
    pool = [x, y]
    for kind, which, i, j in steps:
        a, b = pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]
        with torch.set_grad_enabled(not kind.startswith("quiet")):
            if kind.endswith("view"):
                # which says that it requires grad, and passes none on
                if a.dim() and not (kind == "quiet view" and a.requires_grad):
                    pool.append(VIEWS[which % len(VIEWS)](a))
            elif kind.endswith("write"):
                WRITES[which % len(WRITES)](a, b)
            elif kind == "item":
                if a.dim() and a.shape[0]:
                    ITEMS[which % len(ITEMS)](a, which % 5)
            elif kind == "shape":
                if a.dim():
                    SHAPES[which % len(SHAPES)](a)
            elif kind == "new":
                pool.append(a * 2)
            elif kind in ("compute", "lost"):
                computed = COMPUTED[which % len(COMPUTED)](a, b) if a.dim() else a + b.sum()
                if kind == "compute":
                    pool.append(computed)
            elif kind == "again":
                pool.append(a)
            elif kind == "argument":
                pool.append((x, y)[which % 2])
            elif kind == "weigh":
                pool.append(a * w)
            else:
                pool.append(a + b if a.shape == b.shape else a - 1)
    return pool[2:]


ARGUMENTS = {
    "apart": lambda b: (b, b + 1), "one tensor": lambda b: (b, b), "a row": lambda b: (b, b[0]),
    "a row first": lambda b: (b[1], b), "transposed": lambda b: (b, b.t()),
    "halves": lambda b: (b[:2], b[2:]), "interleaved": lambda b: (b[:, ::2], b[:, 1::2]),
    "not contiguous": lambda b: (b.t(), b[:, 1].clone()), "leaf": lambda b: (b.requires_grad_(), b.detach() * 2),
    "leaf last": lambda b: (b * 2, b.requires_grad_()), "partly": lambda b: (b[:3], b[1:]),
}  # fmt: skip


class Outcome:
    """What a program did: its results, arguments and gradients, or the error and where it came from."""

    def __init__(self, f, make):
        self.f, self.make = f, make
        base, self.w = torch.arange(16.0).reshape(4, 4) / 4 - 1, torch.tensor(1.5, requires_grad=True)
        arguments = make(base)
        before = [t._version for t in arguments]
        self.tensors, self.error, self.gradients = [], None, None
        try:
            self.tensors = [*flat(f(*arguments, self.w)), *arguments]
        except (RuntimeError, IndexError, CaptureError) as error:
            self.error = error
            return
        self.versions = [t._version > v for t, v in zip(arguments, before, strict=True)]
        self.values = [t.detach().clone() for t in self.tensors]
        try:
            total = sum((t * (i + 1)).sum() for i, t in enumerate(self.tensors[:-2]) if t.requires_grad)
            leaves = [t for t in (*arguments, self.w) if t.requires_grad and t.is_leaf]
            self.gradients = (
                torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
                if isinstance(total, torch.Tensor)
                else ()
            )
        except RuntimeError as error:
            self.gradients = error

    def with_old_values(self):
        """The same, where PyTorch keeps a copy of what the backward reads."""
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return Outcome(self.f, self.make)


def compare(steps, kind, refused: collections.Counter, calls: int = 2, **options) -> None:
    theirs = Outcome(lambda *args: program(steps, *args), ARGUMENTS[kind])
    compiled = thunder.jit(lambda x, y, w: program(steps, x, y, w), **options)
    for _ in range(calls):
        ours = Outcome(compiled, ARGUMENTS[kind])
        if theirs.error is not None:
            assert type(ours.error) in (type(theirs.error), CaptureError), theirs.error
            return
        if type(ours.error) is CaptureError:
            if kind != "partly":
                refused[str(ours.error).split("\n")[0]] += 1
            return
        assert ours.error is None, ours.error
        agree(ours, theirs, not writes_data(steps))


def writes_data(steps) -> bool:
    """Whether a program may write behind autograd's back, whose gradients are those of values that were never there."""
    return any(
        kind.endswith("view") and which % len(VIEWS) == 19 or kind.endswith("write") and which % len(WRITES) == 16
        for kind, which, *_ in steps
    )


def agree(ours: Outcome, theirs: Outcome, gradients: bool) -> None:
    assert ours.versions == theirs.versions
    for i, (a, b) in enumerate(zip(ours.tensors, theirs.tensors, strict=True)):
        close(ours.values[i], theirs.values[i], 1e-5)
        assert a.requires_grad == b.requires_grad, i
        for j in range(i):
            pairs = [(o.tensors[i], o.tensors[j]) for o in (ours, theirs)]
            assert (pairs[0][0] is pairs[0][1]) == (pairs[1][0] is pairs[1][1]), ("one object", i, j)
            memory = [p.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() for p, q in pairs]
            assert memory[0] == memory[1], ("one memory", i, j)
    if not gradients or isinstance(theirs.gradients, Exception) and type(ours.gradients) is type(theirs.gradients):
        return
    assert not isinstance(ours.gradients, Exception), ours.gradients
    # a temporary that PyTorch's backward misses has its old value here
    expected = theirs.with_old_values().gradients if isinstance(theirs.gradients, Exception) else theirs.gradients
    for a, b in zip(ours.gradients, expected, strict=True) if isinstance(expected, tuple) else ():
        close(a, b, 1e-4)


def close(ours, theirs, tolerance) -> None:
    """Of the largest number there is: a reduction rounds to that."""
    largest = float(theirs.detach().abs().nan_to_num(0, 0, 0).max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * max(1.0, largest), equal_nan=True)


STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=10
)


def test_random_programs_of_views_and_writes():
    refused: collections.Counter = collections.Counter()

    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(STEPS, st.sampled_from(list(ARGUMENTS)))
    def run(steps, kind):
        compare(steps, kind, refused)

    run()
    assert sum(refused.values()) < 20, refused


def small_space(lines):
    """Small groups join as they do on a GPU."""
    sizes = {o.numel_value for line in lines for o in line.outputs if isinstance(o, TensorProxy)}
    return sizes if len(sizes) == 1 else set()


def storages(values) -> set:
    return {t.untyped_storage().data_ptr() for t in flat(values) if isinstance(t, torch.Tensor) and t.numel()}


class WatchedMemory(Transform):
    """Every operation fails whose result is in the memory of an argument, where the analysis of aliases knows of no
    view."""

    exact = True

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        operations = computation_trace.bound_symbols
        views = alias_bases(operations, maybe=True).keys()
        return computation_trace.replace(
            bound_symbols=[
                b
                if b.sym.fn is None or b.sym.python_printer is not None or OpTags.IN_PLACE in b.sym.tags
                else b.replace(sym=self.watched(b.sym, views.isdisjoint(b.outputs)))
                for b in operations
            ]
        )

    def watched(self, symbol, apart):
        def run(*args, **kwargs):
            input_storages, results = storages((args, *kwargs.values())), symbol.fn(*args, **kwargs)
            assert not apart or input_storages.isdisjoint(storages(results)), symbol
            return results

        return Symbol(symbol.name, id=symbol.id, is_prim=True, tags=tuple(symbol.tags), fn=run)


WAYS = {  # how many programs, how often each is called, with what
    "torch": (150, 2, dict), "fused": (60, 2, lambda: {"executors": ["triton_fuser"]}),
    "memory": (50, 1, lambda: {"transforms": [WatchedMemory()]}),
    "graphs": (60, 4, lambda: {"transforms": [Imitated()]}),
    "fused graphs": (20, 4, lambda: {"executors": ["triton_fuser"], "transforms": [Imitated()]}),
}  # fmt: skip


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*ran without its CUDA graph:UserWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what Triton's interpreter computes and nobody uses
def test_random_programs_of_all_kinds(way, part, monkeypatch):
    """Views and writes among reductions, joins, conversions; results twice, arguments as they are, results that nobody
    has; with what runs on a GPU by default, as far as a CPU can.

    Drawn evenly, and longer than what hypothesis prefers: of that, none in hundreds has an argument that is written to,
    saved and written to.
    """
    if "fused" in way:
        pytest.importorskip("triton")
    monkeypatch.setattr(regions, "_small_space", small_space)
    count, calls, options = WAYS[way]
    refused: collections.Counter = collections.Counter()

    for seed in range(part * count, (part + 1) * count):
        draw = random.Random(seed)
        steps = [
            (draw.choice(MIXED), draw.randrange(100), draw.randrange(10), draw.randrange(10))
            for _ in range(draw.randint(2, 14))
        ]
        kind = draw.choice(list(ARGUMENTS))
        try:
            compare(steps, kind, refused, calls, **options())
        except Exception as error:
            error.add_note(f"seed {seed}: {kind!r}, {steps}")
            raise
    assert sum(refused.values()) < count / 4, refused


def test_a_view_that_strides_do_not_allow_is_pytorchs_error_in_a_fused_region():
    steps = [
        ("view", 0, 0, 0),
        ("view", 56, 0, 0),
        ("view", 0, 1, 0),
        ("write", 41, 2, 0),
        ("view", 0, 0, 0),
        ("view", 0, 2, 0),
        ("write", 0, 0, 0),
    ]
    arguments = torch.ones(4, 4), torch.ones(4, 4), torch.ones((), requires_grad=True)
    for run in (program, thunder.jit(program, executors=["triton_fuser"])):
        with pytest.raises(RuntimeError):
            run(steps, *arguments)
