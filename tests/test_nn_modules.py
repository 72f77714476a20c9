"""Every class of torch.nn, forward and backward in training and evaluation mode, against eager: results, gradients,
buffers. PyTorch's own samples of modules, `module_db`, are the source; what it has no samples of stands in a table
here."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

import thunder
from thunder.errors import CaptureError

pytestmark = [
    # PyTorch's own warnings about its own samples
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::thunder.errors.SharpEdgeWarning"),
]


def image(*shape):
    return torch.randn(shape, requires_grad=True)


def indices(high: int, *shape):
    return torch.randint(high, shape)


def packed(batch_first: bool = False):
    return nn.utils.rnn.pack_padded_sequence(
        image(3, 5, 4) if batch_first else image(5, 3, 4), torch.tensor([5, 2, 4]), batch_first, enforce_sorted=False
    )


def in_place(cls, *args):
    """What a module of it overwrites is made inside of the program: an argument with a history is not written to."""
    return nn.Sequential(nn.Softsign(), cls(*args, inplace=True), nn.Tanh())


def pooled(rank: int):
    return [
        x.detach()
        for x in getattr(nn.functional, f"max_pool{rank}d")(image(2, 3, *(6,) * rank), 2, return_indices=True)
    ]


# modules that PyTorch has no samples of, and cases that its samples leave out: (name, module, arguments of its forward)
TABLE = [
    *((f"Dropout{kind}", lambda c=cls: c(0.4), lambda r=rank: [image(2, 3, *(4,) * r)]) for kind, cls, rank in (
        ("", nn.Dropout, 1), ("1d", nn.Dropout1d, 1), ("2d", nn.Dropout2d, 2), ("3d", nn.Dropout3d, 3),
            ("Alpha", nn.AlphaDropout, 1), ("FeatureAlpha", nn.FeatureAlphaDropout, 1))),
    ("RReLU", lambda: nn.RReLU(), lambda: [image(4, 3)]),
    ("RReLU in place", lambda: in_place(nn.RReLU), lambda: [image(4, 3)]),
    *((f"{cls.__name__} in place", lambda c=cls: in_place(c), lambda: [image(4, 3)]) for cls in (
        nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.Hardtanh, nn.Hardswish,
        nn.Hardsigmoid, nn.Dropout, nn.AlphaDropout)),
    ("Threshold in place", lambda: in_place(nn.Threshold, 0.1, 0.2), lambda: [image(4, 3)]),
    ("Hardsigmoid", lambda: nn.Hardsigmoid(), lambda: [image(4, 3)]),
    ("Identity", lambda: nn.Identity(), lambda: [image(4, 3)]),
    ("Flatten", lambda: nn.Flatten(), lambda: [image(4, 3, 2)]),
    ("Unflatten", lambda: nn.Unflatten(1, (3, 2)), lambda: [image(4, 6)]),
    ("Fold", lambda: nn.Fold((4, 5), 2), lambda: [image(2, 12, 12)]),
    ("Unfold", lambda: nn.Unfold(2), lambda: [image(2, 3, 4, 5)]),
    ("PixelShuffle", lambda: nn.PixelShuffle(2), lambda: [image(2, 8, 3, 4)]),
    ("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), lambda: [image(2, 2, 6, 4)]),
    ("ChannelShuffle", lambda: nn.ChannelShuffle(3), lambda: [image(2, 6, 3, 4)]),
    ("CosineSimilarity", lambda: nn.CosineSimilarity(), lambda: [image(4, 3), image(4, 3)]),
    ("PairwiseDistance", lambda: nn.PairwiseDistance(), lambda: [image(4, 3), image(4, 3)]),
    ("TripletMarginLoss", lambda: nn.TripletMarginLoss(swap=True), lambda: [image(4, 3), image(4, 3), image(4, 3)]),
    ("TripletMarginWithDistanceLoss", lambda: nn.TripletMarginWithDistanceLoss(),
        lambda: [image(4, 3), image(4, 3), image(4, 3)]),
    ("TripletMarginWithDistanceLoss, own",
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=nn.CosineSimilarity(), swap=True),
            lambda: [image(4, 3) for _ in range(3)]),
    ("CTCLoss", lambda: nn.CTCLoss(), lambda: [image(10, 2, 5).log_softmax(2), indices(4, 2, 3) + 1,
        torch.tensor([10, 8]), torch.tensor([3, 2])]),
    ("CTCLoss of lists", lambda: nn.CTCLoss(reduction="sum", zero_infinity=True),
        lambda: [image(10, 2, 5).log_softmax(2), indices(4, 2, 3) + 1, (10, 8), (3, 2)]),
    ("GaussianNLLLoss", lambda: nn.GaussianNLLLoss(), lambda: [image(4, 3), image(4, 3), torch.rand(4, 1) + 0.1]),
    ("KLDivLoss", lambda: nn.KLDivLoss(reduction="batchmean"), lambda: [image(4, 3), torch.rand(4, 3)]),
    ("AdaptiveLogSoftmaxWithLoss", lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]).log_prob,
        lambda: [image(4, 8)]),
    ("Upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), lambda: [image(2, 3, 4, 5)]),
    ("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(scale_factor=2), lambda: [image(2, 3, 4, 5)]),
    ("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(size=(7, 6)), lambda: [image(2, 3, 4, 5)]),
    ("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, output_ratio=0.6), lambda: [image(2, 3, 7, 7)]),
    ("FractionalMaxPool3d", lambda: nn.FractionalMaxPool3d(2, output_size=3, return_indices=True),
        lambda: [image(2, 3, 7, 7, 7)]),
    *((f"MaxUnpool{rank}d", lambda r=rank: getattr(nn, f"MaxUnpool{r}d")(2),
        lambda r=rank: [pooled(r)[0].requires_grad_(), pooled(r)[1]]) for rank in (1, 2, 3)),
    *((f"MaxPool{rank}d with indices", lambda r=rank: getattr(nn, f"MaxPool{r}d")(2, return_indices=True),
        lambda r=rank: [image(2, 3, *(6,) * r)]) for rank in (1, 2, 3)),
    ("Embedding", lambda: nn.Embedding(5, 3, padding_idx=1), lambda: [indices(5, 2, 4)]),
    ("Embedding by frequency", lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), lambda: [indices(5, 2, 4)]),
    ("Embedding of a greatest norm", lambda: nn.Embedding(5, 3, max_norm=0.5), lambda: [indices(5, 2, 4)]),
    *((f"EmbeddingBag, {mode}", lambda m=mode: nn.EmbeddingBag(5, 3, mode=m),
        lambda: [indices(5, 6), torch.tensor([0, 2])]) for mode in ("sum", "mean", "max")),
    ("EmbeddingBag with weights", lambda: nn.EmbeddingBag(5, 3, mode="sum", padding_idx=1),
        lambda: [indices(5, 2, 4), None, image(2, 4)]),
    ("EmbeddingBag, last offset", lambda: nn.EmbeddingBag(5, 3, include_last_offset=True),
        lambda: [indices(5, 6), torch.tensor([0, 2, 6])]),
    ("BatchNorm1d, average of all", lambda: nn.BatchNorm1d(3, momentum=None), lambda: [image(4, 3)]),
    ("BatchNorm1d without statistics", lambda: nn.BatchNorm1d(3, track_running_stats=False), lambda: [image(4, 3)]),
    ("InstanceNorm2d with statistics", lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        lambda: [image(2, 3, 4, 4)]),
    ("InstanceNorm1d with statistics, one image", lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        lambda: [image(3, 5)]),
    ("TransformerDecoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2),
        lambda: [image(3, 2, 8), image(4, 2, 8)]),
    ("MultiheadAttention, several widths",
        lambda: nn.MultiheadAttention(8, 2, dropout=0.2, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=5),
     lambda: [image(3, 2, 8), image(4, 2, 6), image(4, 2, 5)]),
    *((f"{cls.__name__} of packed sequences",
        lambda c=cls: c(4, 6, 2, batch_first=True, bidirectional=True, dropout=0.3),
            lambda: [packed(True)]) for cls in (nn.RNN, nn.GRU, nn.LSTM)),
    ("LSTM with projections", lambda: nn.LSTM(4, 6, 2, proj_size=3), lambda: [image(5, 2, 4)]),
    ("LSTM of one sequence", lambda: nn.LSTM(4, 6, bias=False), lambda: [image(5, 4)]),
    ("LSTM from a state", lambda: nn.LSTM(4, 6), lambda: [image(5, 2, 4), (image(1, 2, 6), image(1, 2, 6))]),
    *((f"LazyBatchNorm{rank}d", lambda r=rank: getattr(nn, f"LazyBatchNorm{r}d")(),
        lambda r=rank: [image(2, 3, *(4,) * r)]) for rank in (1, 2, 3)),
    *((f"LazyInstanceNorm{rank}d", lambda r=rank: getattr(nn, f"LazyInstanceNorm{r}d")(),
        lambda r=rank: [image(2, 3, *(4,) * r)]) for rank in (1, 2, 3)),
    ("LazyLinear", lambda: nn.LazyLinear(3), lambda: [image(2, 4)]),
    ("ParameterList", lambda: Lists(), lambda: [image(2, 3)]),
    ("Sequential of a ModuleList and a ModuleDict",
        lambda: nn.Sequential(*nn.ModuleList([nn.Linear(3, 4), nn.ModuleDict({"a": nn.Tanh()})["a"]])),
            lambda: [image(2, 3)]),
]  # fmt: skip


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.full((3,), 2.0))})

    def forward(self, x):
        return sum((x * p for p in self.listed), self.named["a"] - x)


# no samples anywhere, and why
WITHOUT = {
    "Module": "abstract", "Container": "abstract", "SyncBatchNorm": "needs a group of processes and a GPU",
    "CrossMapLRN2d": "an autograd function of old style: tested by hand",
    "RNNBase": "abstract", "RNNCellBase": "abstract", "DataParallel": "needs several GPUs", "NLLLoss2d": "another name",
}  # fmt: skip


def tensors(value) -> list[torch.Tensor]:
    return [
        t for t in tree_leaves(value, is_leaf=lambda x: isinstance(x, nn.utils.rnn.PackedSequence)) for t in of_leaf(t)
    ]


def of_leaf(t) -> list[torch.Tensor]:
    return (
        [t]
        if isinstance(t, torch.Tensor)
        else [t.data, t.batch_sizes, t.unsorted_indices]
        if isinstance(t, nn.utils.rnn.PackedSequence)
        else []
    )


def copied(value):
    """The same values for a second run: leaves that require grad, and what was computed from them."""

    def copy_of(x):
        if isinstance(x, nn.utils.rnn.PackedSequence):
            return x._replace(data=copy_of(x.data))
        if not isinstance(x, torch.Tensor):
            return x
        leaf = x.detach().clone().requires_grad_(x.requires_grad)
        return leaf if x.is_leaf or not x.requires_grad else leaf * 1

    return tree_map(copy_of, value, is_leaf=lambda x: isinstance(x, nn.utils.rnn.PackedSequence))


def compare(make_module, args, kwargs, training: bool):
    """A step of a module and of its compiled twin."""
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(make_module())
    owner, twin = (getattr(m, "__self__", m).train(training) for m in pair)
    module, compiled = pair[0], thunder.jit(pair[1])
    mine, theirs = copied((args, kwargs)), copied((args, kwargs))
    # the first call of a lazy module is eager's
    for lazy in [m for m in (owner, twin) if isinstance(m, nn.modules.lazy.LazyModuleMixin)]:
        torch.manual_seed(1)
        (compiled if lazy is twin else module)(*copied(args), **copied(kwargs))
    results = []
    for run, m, (call_arguments, named) in ((module, owner, theirs), (compiled, twin, mine)):
        torch.manual_seed(1)
        outcome = tensors(run(*call_arguments, **named))
        results.append((outcome, m))
    (want, eager), (got, ours) = results
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
        assert (g.requires_grad, g.stride()) == (w.requires_grad, w.stride())
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in eager.named_buffers()]
    for g, w in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    for g, w in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    cotangents = [torch.randn_like(w) for w in want if w.requires_grad]
    if not cotangents:
        return compiled
    for outcome, m, (call_arguments, named) in ((want, eager, theirs), (got, ours, mine)):
        leaves = [t for t in (*tensors((call_arguments, named)), *m.parameters()) if t.requires_grad]
        results.append(
            torch.autograd.grad([o for o in outcome if o.requires_grad], leaves, cotangents, allow_unused=True)
            if leaves
            else ()
        )
    for g, w in zip(results[3], results[2], strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6, equal_nan=True)
    return compiled


SAMPLES = 8  # of each module; some have hundreds
# some of their samples are programs that cannot be captured, and why
REFUSED = {
    "nn.TransformerEncoder": "looks at the values of a mask to see whether it is causal, unless it is told",
    "nn.Transformer": "as TransformerEncoder",
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("info", module_db, ids=lambda i: i.name)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_samples_of_pytorch(info, training):
    samples = [
        s
        for s in info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
        if s.forward_input is not None
    ]
    tried = 0
    for sample in samples[:: 1 + (len(samples) - 1) // SAMPLES]:
        args, kwargs = sample.forward_input.args, sample.forward_input.kwargs

        def make_module(constructor_input=sample.constructor_input):
            return info.module_cls(*constructor_input.args, **constructor_input.kwargs)

        try:
            make_module().train(training)(*copied(args), **copied(kwargs))
        except RuntimeError as error:
            assert "_random_samples to have the same dtype" in str(error), error
            continue
        try:
            compare(make_module, args, kwargs, training)
        except CaptureError:
            assert info.name in REFUSED
            continue
        tried += 1
    assert tried or "FractionalMaxPool" in info.name  # its samples are of another type than its input


@pytest.mark.parametrize("make_module, make_arguments", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_modules_of_the_table(make_module, make_arguments, training):
    torch.manual_seed(0)
    compare(make_module, make_arguments(), {}, training)


def test_every_class_is_tried():
    covered = {type(getattr(m, "__self__", m)) for m in (row[1]() for row in TABLE)} | {
        info.module_cls for info in module_db
    }
    inside = {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "Sequential"}
    classes = {c for c in vars(nn).values() if inspect.isclass(c) and issubclass(c, nn.Module)}
    assert {c.__name__ for c in classes - covered} <= WITHOUT.keys() | inside


def test_the_number_of_batches_is_read_at_each_call():
    eager, ours = nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    compiled = thunder.jit(ours)
    for _ in range(4):
        x = torch.randn(5, 3)
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
    torch.testing.assert_close(list(ours.buffers()), list(eager.buffers()), rtol=0, atol=0)
    assert thunder.cache_misses(compiled) == 1


def test_lengths_of_packed_sequences_are_read_at_each_call():
    torch.manual_seed(0)
    net = nn.LSTM(4, 6)
    compiled = thunder.jit(net)
    for lengths in ([4, 3, 1], [4, 2, 2], [4, 4]):
        packed_sequence = nn.utils.rnn.pack_padded_sequence(torch.randn(4, len(lengths), 4), torch.tensor(lengths))
        torch.testing.assert_close(tensors(compiled(packed_sequence)), tensors(net(packed_sequence)), rtol=0, atol=0)


@pytest.mark.parametrize("cls", [nn.RNN, nn.GRU, nn.LSTM])
def test_types_of_packed_sequences_under_autocast(cls):
    """Which ones they are depends on the operations that a step consists of."""
    net = cls(4, 6)

    def program(sequence):
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = net(sequence)
        return out.data, out.data.float()

    sequence = packed()
    with torch.no_grad():
        want, got = program(sequence), thunder.jit(program)(sequence)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    torch.testing.assert_close(got, want, rtol=0, atol=0)


EVALUATED = {
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda: [torch.randn(2, 3, 8)],
    ),
    "TransformerEncoder of padded rows": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        lambda: [torch.randn(2, 3, 8), None, torch.tensor([[False, False, True], [False, True, True]])],
    ),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: [torch.randn(2, 3, 8)] * 3),
    "MultiheadAttention without weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: [*[torch.randn(2, 3, 8)] * 3, None, False],
    ),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_the_quick_ways_of_evaluation_without_grad(name):
    """PyTorch takes kernels of their own for these."""
    make_module, make_arguments = EVALUATED[name]
    torch.manual_seed(0)
    module, call_arguments = make_module().eval(), make_arguments()
    with torch.no_grad():
        want, got = tensors(module(*call_arguments)), tensors(thunder.jit(module)(*call_arguments))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_container_of_parameters_may_be_empty():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.absent, self.present = nn.ParameterDict(), nn.ParameterDict({"w": torch.ones(3)})

        def forward(self, x):
            return x if "w" in self.absent.keys() else x * self.present["w"]

    model = Optional()
    compiled = thunder.jit(model)
    assert compiled(torch.full((3,), 2.0)).tolist() == [2.0] * 3
    model.absent["w"] = nn.Parameter(torch.ones(3))
    model.present["w"] = nn.Parameter(torch.zeros(3))
    assert compiled(torch.full((3,), 2.0)).tolist() == [2.0] * 3
