"""Names of Lightning Thunder: the page that maps them, and what `thunder/compat/lightning.py` makes of them."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import thunder
import thunder.torch as ltorch
from tests import fresh
from thunder.compat import lightning
from thunder.core.trace import tracectx
from thunder.options import COMPILE_OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_lightning_thunder.md"
ROW = re.compile(r"^\| `(thunder\.[\w.]+)(?:\((\w+)=\))?` \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"`(thunder\.[\w.]+)(?:\((\w+)=\))?`")
ROWS = ROW.findall(PAGE.read_text())
# of the documents: the reference page, and the notebooks
REFERENCE = """
jit functional.jit compile_data compile_stats last_traces last_backward_traces last_prologue_traces cache_option cache_hits
cache_misses list_transforms last_interpreted_instructions last_interpreter_log last_compile_options ThunderModule
ThunderModule.get_buffer ThunderModule.get_parameter ThunderModule.get_submodule ThunderModule.named_buffers
ThunderModule.named_parameters ThunderModule.no_sync extend.OperatorExecutor extend.register_executor
get_default_executors devices.DeviceType TensorProxy distributed.fsdp core.transforms.get_grad core.transforms.put_grads
core.transforms.grad executors.torchex.no_autocast executors.apexex.apex_ex executors.apex_entropyex.apex_ex
tests.litgpt_model.GPT tests.litgpt_model.Config torch.to_torch_dtype
compile Recipe Plugin recipes.BaseRecipe recipes.HFTransformers recipes.get_recipe_class recipes.get_recipes
recipes.register_recipe plugins.DDP plugins.FSDP plugins.QuantizeInt4 plugins.FP8 plugins.ReduceOverhead plugins.Profile
plugins.get_plugin plugins.get_plugin_names plugins.register_plugin
""".split()


def resolve(name: str):
    """The object at a dotted name, importing the modules on the way."""
    owner, at = thunder, "thunder"
    for part in name.split(".")[1:]:
        at = f"{at}.{part}"
        try:
            owner = getattr(owner, part)
        except AttributeError:
            owner = importlib.import_module(at)
    return owner


def check(name: str, option: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # executors that take nothing here
        resolved = resolve(name)
    if option:
        assert option in inspect.signature(resolved).parameters or option in COMPILE_OPTIONS, f"{name} has no {option}="


def test_the_page_has_a_row_for_every_line_of_its_tables():
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("| `")]
    assert len(lines) == len(ROWS)
    named = {name.removeprefix("thunder.") for name, _, _ in ROWS}
    assert not set(REFERENCE) - named
    assert len(ROWS) == len({row[:2] for row in ROWS}), "each name once"


@pytest.mark.parametrize("name, option, here", ROWS, ids=[f"{n}{o and f'({o}=)'}" for n, o, _ in ROWS])
def test_what_the_page_says_is_there(name, option, here):
    for matched in NAME.findall(here):
        check(*matched)
    if here.startswith("same"):
        check(name, option)
    else:
        assert NAME.search(here) or here.startswith(("not here", "not needed", "torch"))
        if name not in ("thunder.Plugin", "thunder.TraceCtx", "thunder.transforms.autocast.autocast"):
            with pytest.raises((AttributeError, ImportError)):
                resolve(name)


def test_the_table_is_loaded_when_it_is_asked_for():
    script = "import sys, thunder; thunder.jit; a = 'thunder.compat.lightning' in sys.modules; thunder.grad; print(a)"
    code = f"{script}; print('thunder.compat.lightning' in sys.modules)"
    done = fresh.run("-c", code)
    assert done.stdout.split() == ["False", "True"]
    assert "Plugin" not in thunder.__all__
    assert len(Path(lightning.__file__).read_text().splitlines()) <= 200


@pytest.mark.parametrize("name", ["cudnn", "torchcompile_cat", "transformer_engine", "bitsandbytes", "custom_op"])
def test_executors_that_are_not_here_warn_and_take_nothing(name, monkeypatch):
    monkeypatch.setattr("thunder.extend._warned", set())
    with pytest.warns(
        UserWarning, match=f"the executor {name} has no effect here: Lightning Thunder's executor of this"
    ):
        compiled = thunder.jit(lambda x: x + 1, executors=[name])
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert name not in [e.name for e in thunder.get_all_executors()]


def test_executors_by_attribute():
    assert thunder.pytorch_executor is thunder.get_executor("torch")
    with pytest.warns(UserWarning, match="thunder.cudnn_executor has no effect here: .* the executor 'sdpa'"):
        lightning.__getattr__("cudnn_executor")
    with pytest.raises(AttributeError, match="has no attribute 'tvm_executor'"):
        lightning.tvm_executor  # noqa: B018


def test_an_executor_among_the_default_ones():
    mine = thunder.extend.OperatorExecutor("mine_in_test")
    thunder.extend.register_executor(mine)
    try:
        thunder.add_default_executor(mine)
        assert thunder.get_default_executors()[0] is mine
    finally:
        thunder.extend.deregister_executor(mine)
    assert mine not in thunder.get_default_executors()


def test_an_empty_trace_is_filled():
    import thunder.torch as ltorch

    def program(a): ...

    trace = thunder.TraceCtx(program)
    assert isinstance(trace, thunder.TraceCtx) and trace.bound_symbols == []
    a = thunder.TensorProxy(trace.names.claim("a"), shape=(2,), device="cpu", dtype=thunder.float32)
    trace.args = [a]
    with tracectx(trace):
        trace.output = ltorch.exp(ltorch.mul(a, 2.0))
    trace.set_provenance("by hand")
    assert "def program(a):" in str(trace) and "ltorch.exp(t0)" in trace.python(print_depth=1)
    assert torch.allclose(trace.python_callable()(torch.ones(2)), torch.full((2,), 2.0).exp())
    assert thunder.TraceCtx().name == "computation"


def test_vjp_and_trace_take_structures_and_keywords():
    x, y = torch.randn(3), torch.randn(3)

    def f(d, *, scale):
        return {"out": d["a"] * d["b"][0] * scale}

    out, gradients = thunder.core.transforms.vjp(f)(({"a": x, "b": [y]},), {"out": torch.ones(3)}, scale=2.0)
    assert torch.equal(out["out"], x * y * 2)
    assert torch.equal(gradients[0]["a"], y * 2) and torch.equal(gradients[0]["b"][0], x * 2)
    for trace in (thunder.trace(), lightning.trace(inline_trace=False)):
        traced = trace(f, {"a": x, "b": [y]}, scale=2.0)
        assert [o.sym.name for o in traced.bound_symbols] == ["mul", "mul"]
    with pytest.raises(ValueError, match=r"thunder.trace\(insert_ddp_syncs\): leave it out"):
        lightning.trace(insert_ddp_syncs=True)


def test_autocast_of_a_function():
    a = torch.randn(4, 4)
    assert lightning.autocast(torch.matmul, dtype=torch.bfloat16)(a, a).dtype is torch.bfloat16


def test_debug_options_by_number():
    options = thunder.DebugOptions(check_traces=2)
    assert options.check_traces and repr(options) == "DebugOptions(check_traces=2)"
    assert torch.equal(thunder.jit(torch.abs, debug_options=options)(torch.tensor([-1.0])), torch.ones(1))


def test_plugins_by_name():
    assert lightning.get_plugin("fp8") is thunder.recipes.FP8 and "ddp" in lightning.get_plugin_names()
    with pytest.raises(ValueError, match="'tpu' is not a plugin; valid: 'auto'"):
        lightning.get_plugin("tpu")


OTHER_NAMES = {
    "is_cuda": lambda x: x + (1 if ltorch.is_cuda(x) else 2),
    "is_cpu": lambda x: x + (1 if ltorch.is_cpu(x) else 2),
    "is_nested": lambda x: x + int(ltorch.is_nested(x)),
    "zeta": lambda x: ltorch.zeta(x, x + 1),
    "all_tensor": lambda x: ltorch.all_tensor(x > 1, 0),
    "any_tensor": lambda x: ltorch.any_tensor(x > 2),
    "torch_max": lambda x: ltorch.torch_max(x, 1)[0],
    "_softmin": lambda x: ltorch._softmin(x, 0),
    "torch_type": lambda x: ltorch.torch_type(x, torch.float64),
    "checkpoint": lambda x: ltorch.checkpoint(torch.sin, x, use_reentrant=False),
    "setitem_": lambda x: (lambda y: (ltorch.setitem_(y, 0, 1.0), y)[1])(x.clone()),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_pytorch_spells_otherwise(name):
    program, x = OTHER_NAMES[name], torch.linspace(1, 3, 9).reshape(3, 3)
    assert torch.equal(thunder.jit(program)(x), program(x))
    assert torch.equal(thunder.trace()(program, x).python_callable()(x), program(x))


def test_names_that_are_functions_of_pytorch():
    """Modes and functions of functions are called as in PyTorch; tests/distributed has the collectives."""

    def modes(x):
        mode = ltorch.autocast_enter("cpu", torch.bfloat16, True, True)
        inside = x @ x
        ltorch.autocast_exit(mode)
        ltorch._set_grad_enabled_with_warning(False)
        constant = x * 2
        ltorch._set_grad_enabled_with_warning(True)
        return inside, constant, x @ x

    x = torch.randn(3, 3, requires_grad=True)
    ours = thunder.jit(modes, fallback="error")(x)
    assert [(r.dtype, r.requires_grad) for r in ours] == [(r.dtype, r.requires_grad) for r in modes(x)]
    forward, backward = (torch.fx.symbolic_trace(f) for f in (lambda x: (x * 2, [x]), lambda g, x: g * 5))

    def apply(x):
        options = {"args_tensor_mask": [True], "non_differentiable_idx": []}
        return ltorch.autograd_function_apply(forward, backward, x, **options)

    thunder.jit(apply, fallback="error")(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 5.0))
