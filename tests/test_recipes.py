"""`thunder.compile`: recipes and plugins say what `thunder.jit` is told."""

from dataclasses import dataclass, fields

import pytest
import torch

import thunder
from thunder import recipes
from thunder.compiled import compiled_of
from thunder.recipes import DDP, FP8, FSDP, Inference, Recipe, ReduceOverhead, Training
from thunder.transforms.cudagraph import CUDAGraphTransform
from thunder.transforms.float8 import Float8Transform


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))


def options_of(compiled):
    return compiled_of(compiled).options


@pytest.mark.parametrize("name", ["auto", "default", "inference", "training", "reduce-overhead"])
def test_named_recipes_compute_what_the_model_computes(name):
    module, x = model(), torch.randn(4, 16)
    compiled = thunder.compile(module, recipe=name)
    y = compiled(x)
    assert torch.equal(y, module(x))
    assert y.requires_grad == (name != "inference")


def test_a_recipe_sets_what_it_prints():
    assert str(Inference()) == "Inference()\n  disable_torch_autograd = True"
    assert str(Training(memory_budget=0.5)) == (
        "Training(memory_budget=0.5, rng='torch')\n  memory_budget = 0.5\n  rng = 'torch'"
    )
    both = Inference() + ReduceOverhead()
    assert str(both) == (
        "Inference() + ReduceOverhead()\n"
        "  disable_torch_autograd = True\n"
        "  transforms = [CUDAGraphTransform(share_mem_pool=True)]"
    )
    for recipe in recipes.get_recipes().values():
        assert str(recipe()).startswith(f"{recipe.__name__}(")


def test_plugins_add_to_a_recipe():
    compiled = thunder.compile(
        model(), recipe=Training(memory_budget=0.5), plugins=["reduce-overhead", FP8(scaling="rowwise")]
    )
    options = options_of(compiled)
    assert [type(t) for t in options.transforms] == [CUDAGraphTransform, Float8Transform]
    assert options.transforms[1].scaling == "rowwise"
    assert options.compile_options == {"memory_budget": 0.5}
    x = torch.randn(16, 16)
    y = compiled(x)
    y.sum().backward()
    assert "ltorch.float8_linear" in thunder.last_traces(compiled)[1].python(print_depth=1)


def test_one_plugin_needs_no_list():
    compiled = thunder.compile(model(), plugins="fp8")
    assert [type(t) for t in options_of(compiled).transforms] == [Float8Transform]


def test_keywords_have_the_last_word():
    mine = CUDAGraphTransform()
    compiled = thunder.compile(model(), recipe="training", plugins=FP8(), memory_budget=0.25, transforms=[mine])
    options = options_of(compiled)
    assert options.compile_options["memory_budget"] == 0.25
    assert [type(t) for t in options.transforms] == [Float8Transform, CUDAGraphTransform]
    assert options.transforms[1] is mine


def test_transforms_are_not_shared_between_compiled_functions():
    recipe = ReduceOverhead()
    first, second = (options_of(thunder.compile(model(), recipe=recipe)).transforms for _ in range(2))
    assert first[0] is not second[0]


def test_recipes_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"Training\(memory_budget=0.5.* sets memory_budget=0.5, and Training"):
        thunder.compile(model(), recipe=Training(memory_budget=0.5), plugins=Training(memory_budget=0.7))


@pytest.mark.parametrize(
    "recipe, message",
    [
        ("fast", "'fast' is no recipe; valid: a thunder.Recipe, 'auto', 'default', 'inference'"),
        (FP8, "recipe FP8 is a class: give an instance"),
        (3, "3 is no recipe"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        thunder.compile(model(), recipe=recipe)
    with pytest.raises(ValueError, match=message):
        thunder.compile(model(), plugins=[recipe])


def test_a_function_and_a_decorator():
    @thunder.compile(recipe="inference")
    def double(x):
        return x * 2

    assert not double(torch.ones(2, requires_grad=True)).requires_grad
    assert torch.equal(thunder.compile(lambda x: x + 1)(torch.zeros(2)), torch.ones(2))


def test_a_recipe_of_ones_own(monkeypatch):
    monkeypatch.setattr(recipes, "_NAMED", dict(recipes._NAMED))

    @dataclass(frozen=True)
    class Bits(Recipe):
        """Eager's bits, and loud where a program cannot be captured."""

        fallback: str = "error"

        def options(self):
            return {"numerics": "eager", "fallback": self.fallback}

    recipes.register_recipe("bits", Bits)
    options = options_of(thunder.compile(model(), recipe="bits"))
    assert (options.numerics.value, options.fallback.value) == ("eager", "error")
    with pytest.raises(ValueError, match="a recipe is called 'fp8' already: FP8"):
        recipes.register_recipe("fp8", Bits)


@pytest.mark.parametrize("recipe, function", [(DDP, thunder.distributed.ddp), (FSDP, thunder.distributed.fsdp)])
def test_distributed_recipes_have_the_parameters_of_their_functions(recipe, function):
    wanted = {n: d for n, d in function.__kwdefaults__.items()}
    assert {f.name: f.default for f in fields(recipe)} == wanted
