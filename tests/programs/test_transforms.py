"""Programs of modules whose parameters transforms have replaced, and of steps of optimizers, in files."""

import pytest
import torch

import thunder
from thunder.errors import ProgramFileError
from thunder.quantization import Int4Weights, Int8Weights, NF4Weights

FORMATS = {"int8": Int8Weights, "int4": Int4Weights, "nf4": NF4Weights}


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))


def quantized(format: type, **options) -> torch.nn.Module:
    return thunder.jit(make_model(), transforms=[format(**options)])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_quantized_module_is_loaded_without_capture(format, grad, directory):
    x = torch.randn(3, 128)
    with torch.set_grad_enabled(grad):
        path = thunder.precompile(quantized(format), x, path=directory / "model.program")
        served = thunder.load(path, make_model(), transforms=[format()])
        torch.testing.assert_close(served(x), quantized(format)(x), rtol=0, atol=0)
    stats = thunder.compile_stats(served)
    assert (stats.loaded, stats.interpreted_instructions, stats.not_loaded) == (1, 0, [])
    if grad:
        served(x).square().sum().backward()
        expected = quantized(format)
        expected(x).square().sum().backward()
        for ours, theirs in zip(served.parameters(), expected.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def test_the_loaded_program_reads_the_weights_of_its_module(directory):
    x = torch.randn(3, 128)
    with torch.no_grad():
        path = thunder.precompile(quantized(Int8Weights), x, path=directory / "model.program")
        other = make_model(seed=1)
        served = thunder.load(path, other, transforms=[Int8Weights()])
        torch.testing.assert_close(served(x), thunder.jit(other, transforms=[Int8Weights()])(x), rtol=0, atol=0)
        assert thunder.compile_stats(served).loaded == 1


@pytest.mark.parametrize(
    "transforms, words",
    [([], "executors was"), ([Int4Weights()], "transforms was"), ([Int8Weights(dynamic=True)], "dynamic=False")],
    ids=["none", "another format", "another option"],
)
def test_other_transforms_capture_their_own_program(transforms, words, directory):
    x = torch.randn(3, 128)
    with torch.no_grad():
        path = thunder.precompile(quantized(Int8Weights), x, path=directory / "model.program")
        served = thunder.load(path, make_model(), transforms=transforms)
        torch.testing.assert_close(served(x), thunder.jit(make_model(), transforms=transforms)(x), rtol=0, atol=0)
    stats = thunder.compile_stats(served)
    assert stats.loaded == 0 and words in stats.not_loaded[0]


def test_a_quantized_module_of_another_size_captures_its_own_program(directory):
    wide = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    x = torch.randn(3, 128)
    with torch.no_grad():
        path = thunder.precompile(quantized(Int8Weights), x, path=directory / "model.program")
        served = thunder.load(path, wide, transforms=[Int8Weights()])
        assert served(x).shape == (3, 8)
    assert thunder.compile_stats(served).loaded == 0


def test_transforms_that_text_cannot_say_are_refused(directory):
    class Mine(thunder.Transform):
        pass

    x = torch.randn(3, 128)
    with pytest.raises(ProgramFileError, match="the transform .*Mine, which is not one of thunder's"):
        thunder.precompile(thunder.jit(make_model(), transforms=[Mine()]), x, path=directory / "a.program")
    with pytest.raises(ProgramFileError, match="Int8Weights has filter=<function"):
        thunder.precompile(quantized(Int8Weights, filter=lambda m, p: True), x, path=directory / "b.program")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_step_of_an_optimizer_is_loaded(optimizer, directory):
    def make():
        model = make_model()
        opt = optimizer(model.parameters(), lr=0.01)

        def step(x):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        step(torch.ones(2, 128))  # which makes the optimizer's state
        return model, step

    x = torch.randn(3, 128)
    path = thunder.precompile(make()[1], x, path=directory / "step.program")
    (model, step), (own, own_step) = make(), make()
    served = thunder.load(path, step)
    for _ in range(3):
        assert torch.equal(served(x), own_step(x))
    assert all(map(torch.equal, model.parameters(), own.parameters()))
    stats = thunder.compile_stats(served)
    assert (stats.loaded, stats.interpreted_instructions) == (1, 0)
