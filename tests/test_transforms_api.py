"""Transforms of users: hooks, replaced parameters, state dicts."""

import copy
import pickle

import pytest
import torch
from torch import nn

import thunder
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.rewrite import rewrite
from thunder.errors import CaptureError, OptionError
from thunder.transforms.base import with_parameter

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


class Quantize(thunder.Transform):
    """Weights of linear layers as int8 and one scale each; a linear layer multiplies by the product of the two."""

    def transform_module(self, model):
        for name, parameter in list(model.named_parameters()):
            if name.endswith("weight"):
                quantized, scale = self.quantize(parameter.detach())
                model.set_parameter(name, nn.Parameter(quantized, requires_grad=False))
                model.set_parameter(f"{name}.scale", nn.Parameter(scale, requires_grad=False))

    @staticmethod
    def quantize(weight):
        scale = weight.abs().max() / 127
        return (weight / scale).round().to(torch.int8), scale

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        model = kwargs["model"]
        scales, quantized = {}, {}
        parameters = computation_trace.info.parameters
        for argument in computation_trace.args:
            if parameters.get(argument.name) in model._overrides_parameters:
                name = parameters[argument.name]
                prologue_trace, computation_trace, scales[argument] = with_parameter(
                    prologue_trace, computation_trace, model, f"{name}.scale"
                )
                quantized[argument] = TensorProxy(argument.name, like=argument, dtype=thunder.int8, requires_grad=False)

        def rule(line, out):
            weight = line.args[1] if line.sym is ltorch.linear else None
            if weight in scales:
                out.trace(
                    lambda x, w, b: ltorch.linear(
                        x, ltorch.mul(ltorch.to(quantized[w], scales[w].dtype), scales[w]), b
                    ),
                    line,
                )
            else:
                out.write(line)

        args = [quantized.get(a, a) for a in computation_trace.args]
        return prologue_trace, rewrite(computation_trace, rule).replace(args=args), epilogue_trace

    def transform_state_dict_for_submodule(self, model, submodule_name, state_dict):
        if "weight" not in state_dict:
            return state_dict
        quantized, scale = self.quantize(state_dict["weight"])
        return {**state_dict, "weight": quantized, "weight.scale": scale}

    def reverse_transform_state_dict_for_submodule(self, model, submodule_name, state_dict):
        if "weight.scale" not in state_dict:
            return state_dict
        rest = {k: v for k, v in state_dict.items() if k != "weight.scale"}
        return {**rest, "weight": state_dict["weight"] * state_dict["weight.scale"]}


def rounded(original):
    """The module with the weights that quantizing leaves."""
    copied = copy.deepcopy(original)
    for linear in (copied[0], copied[2]):
        quantized, scale = Quantize.quantize(linear.weight.detach())
        linear.weight.data = quantized * scale
    return copied


def test_quantized_weights_take_the_place_of_parameters():
    original = model()
    before = {k: v.clone() for k, v in original.state_dict().items()}
    compiled = thunder.jit(original, transforms=[Quantize()])
    assert torch.equal(compiled(X), rounded(original)(X))
    assert (
        thunder.cache_misses(compiled) == 1
        and torch.equal(compiled(X), compiled(X))
        and thunder.cache_misses(compiled) == 1
    )
    assert all(torch.equal(v, before[k]) for k, v in original.state_dict().items()), (
        "the wrapped module stays as it was"
    )
    assert (
        compiled.get_parameter("0.weight").dtype is torch.int8 and compiled.get_parameter("0.weight.scale").shape == ()
    )
    assert compiled.get_parameter("0.bias") is original[0].bias
    assert [n for n, _ in compiled.named_parameters()] == [
        "0.weight",
        "0.weight.scale",
        "2.weight",
        "2.weight.scale",
        "0.bias",
        "2.bias",
    ]
    assert [n for n, _ in compiled.named_parameters(prefix="p", recurse=False)] == []
    prologue, computation = thunder.last_prologue_traces(compiled), thunder.last_traces(compiled)
    assert (
        len(prologue) == 2
        and "Constructed by Transform Quantize" in str(prologue[-1])
        and "t_0_weight_scale = " in str(prologue[-1])
    )
    assert "t_0_weight_scale" not in str(computation[0]) and '# t_0_weight: "cpu i8[5, 4]"' in str(computation[1])


def test_a_replaced_parameter_trains():
    compiled = thunder.jit(model(), transforms=[Quantize()])
    compiled(X).sum().backward()
    reference = rounded(model())
    reference(X).sum().backward()
    assert torch.equal(compiled.get_parameter("2.bias").grad, reference[2].bias.grad) and torch.equal(
        compiled._model[0].bias.grad, reference[0].bias.grad
    )
    assert compiled.get_parameter("2.weight").grad is None


def test_state_dicts_in_both_forms():
    original = model()
    compiled = thunder.jit(original, transforms=[Quantize()])
    transformed, plain = compiled.state_dict(prefix="m."), compiled.original_state_dict(prefix="m.")
    assert set(transformed) == {
        f"m.{k}" for k in ("0.weight", "0.bias", "2.weight", "2.bias", "0.weight.scale", "2.weight.scale")
    }
    assert transformed["m.0.weight"].dtype is torch.int8
    assert set(plain) == {f"m.{k}" for k in original.state_dict()}
    assert all(torch.equal(plain[f"m.{k}"], v) for k, v in rounded(original).state_dict().items())
    other = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    compiled.load_original_state_dict(other.state_dict())
    assert torch.equal(compiled(X), rounded(other)(X))
    fresh = thunder.jit(model(), transforms=[Quantize()])
    fresh.load_state_dict(compiled.state_dict())
    assert torch.equal(fresh(X), compiled(X))


def test_state_dict_errors_are_pytorchs():
    compiled = thunder.jit(model(), transforms=[Quantize()])
    state = compiled.state_dict()
    missing = {k: v for k, v in state.items() if k != "0.weight.scale"} | {"other": torch.ones(1)}
    with pytest.raises(
        RuntimeError,
        match=r'Error\(s\) in loading state_dict for Sequential:\n\tUnexpected key\(s\) in state_dict: "other". '
        r'\n\tMissing key\(s\) in state_dict: "0.weight.scale". ',
    ):
        compiled.load_state_dict(missing)
    assert compiled.load_state_dict(missing, strict=False) == (["0.weight.scale"], ["other"])
    with pytest.raises(
        RuntimeError,
        match=r"size mismatch for 0.weight: copying a param with shape torch.Size\(\[1\]\) from checkpoint, the "
        r"shape in current model is torch.Size\(\[5, 4\]\).",
    ):
        compiled.load_state_dict(state | {"0.weight": torch.ones(1)})


def test_a_replaced_parameter_that_no_transform_accounts_for_is_an_error():
    compiled = thunder.jit(model())
    expected = compiled(X)
    compiled.set_parameter("0.weight", nn.Parameter(compiled.get_parameter("0.weight").detach() * 2))
    doubled = model()
    doubled[0].weight.data *= 2
    assert torch.equal(compiled(X), doubled(X)) and not torch.equal(compiled(X), expected), (
        "same shape and dtype: it is read in its place"
    )
    assert thunder.last_recompile_reasons(compiled) == [
        "other parameters of the compiled module are replaced than before"
    ]
    compiled.set_parameter("0.weight", nn.Parameter(torch.ones(5, 4, dtype=torch.float64)))
    with pytest.raises(
        CaptureError,
        match=r"parameter 0.weight was replaced by one of shape \(5, 4\) and torch.float64, and the program reads it "
        r"as .*\n.*transform_traces_pre_prologue",
    ):
        compiled(X)
    del compiled._overrides_parameters["0.weight"]
    assert torch.equal(compiled(X), expected)
    with pytest.raises(TypeError, match="cannot assign 'torch.FloatTensor' as parameter 'w'"):
        compiled.set_parameter("w", torch.ones(1))


def test_tied_parameters_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    compiled = thunder.jit(Tied())
    replaced = nn.Parameter(torch.eye(4) * 3)
    compiled.set_parameter("a.weight", replaced)
    assert torch.equal(compiled(X), X * 9)
    compiled(X).sum().backward()
    assert replaced.grad is not None and compiled._model.a.weight.grad is None


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale


def test_replaced_buffers_and_moves():
    original = WithBuffer()
    compiled = thunder.jit(original)
    compiled._overrides_buffers["scale"] = torch.tensor(5.0)
    assert (
        torch.equal(compiled(X), X * 5)
        and torch.equal(original.scale, torch.tensor(2.0))
        and torch.equal(compiled.get_buffer("scale"), torch.tensor(5.0))
    )
    compiled.set_buffer("scale", torch.tensor(6.0))
    assert (
        torch.equal(compiled(X), X * 6)
        and torch.equal(original.scale, torch.tensor(2.0))
        and dict(compiled.named_buffers()) == {"scale": torch.tensor(6.0)}
    )
    compiled.double()
    assert compiled.get_buffer("scale").dtype is torch.float64 and compiled(X.double()).dtype is torch.float64
    linear = thunder.jit(nn.Linear(2, 2))
    linear.set_parameter("weight", nn.Parameter(torch.eye(2)))
    held = linear.get_parameter("weight")
    linear.double().requires_grad_(False)
    assert linear.get_parameter("weight") is held and held.dtype is torch.float64 and not held.requires_grad


def test_a_buffer_that_is_replaced_cannot_be_assigned():
    class Counting(WithBuffer):
        def forward(self, x):
            self.scale = self.scale + 1
            return x * self.scale

    compiled = thunder.jit(Counting())
    compiled._overrides_buffers["scale"] = torch.tensor(5.0)
    with pytest.raises(CaptureError, match="'scale' is assigned, for which a transform has put another tensor"):
        compiled(X)


def test_copies_keep_what_was_replaced():
    compiled = thunder.jit(model())
    compiled.set_parameter("0.weight", nn.Parameter(torch.ones(5, 4)))
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert torch.equal(copied(X), compiled(X)) and copied.get_parameter("0.weight") is not compiled.get_parameter(
            "0.weight"
        )


def test_one_transform_serves_several_modules():
    transform = Quantize()
    first = thunder.jit(model(), transforms=[transform])
    other = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    second, third = thunder.jit(other, transforms=[transform]), copy.deepcopy(first)
    third.set_parameter("0.weight.scale", nn.Parameter(torch.tensor(0.0)))
    assert torch.equal(first(X), rounded(model())(X)) and torch.equal(second(X), rounded(other)(X))
    nothing = rounded(model())
    nothing[0].weight.data.zero_()
    assert torch.equal(third(X), nothing(X)) and torch.equal(first(X[:2]), rounded(model())(X[:2]))


class LowRank(thunder.Transform):
    """Adds a trainable product of two thin matrices to a linear layer, whose own weight is frozen."""

    def __init__(self, name, rank):
        self.name, self.rank = name, rank

    def transform_module(self, model):
        weight = model.get_parameter(f"{self.name}.weight")
        model.set_parameter(f"{self.name}.weight", nn.Parameter(weight.detach(), requires_grad=False))
        model.set_parameter(f"{self.name}.lora_a", nn.Parameter(torch.full((self.rank, weight.shape[1]), 0.5)))
        model.set_parameter(f"{self.name}.lora_b", nn.Parameter(torch.zeros(weight.shape[0], self.rank)))

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        modules = []
        for part in ("lora_a", "lora_b"):
            prologue_trace, computation_trace, proxy = with_parameter(
                prologue_trace, computation_trace, kwargs["model"], f"{self.name}.{part}"
            )
            modules.append(proxy)
        weight = next(n for n, path in computation_trace.info.parameters.items() if path == f"{self.name}.weight")

        def rule(line, out):
            if line.sym is ltorch.linear and line.args[1].name == weight:
                out.trace(
                    lambda x, w, b: ltorch.linear(x, w, b) + ltorch.linear(ltorch.linear(x, modules[0]), modules[1]),
                    line,
                )
            else:
                out.write(line)

        return prologue_trace, rewrite(computation_trace, rule), epilogue_trace


def test_added_parameters_train():
    original = model()
    compiled = thunder.jit(original, transforms=[LowRank("2", 1)])
    assert torch.equal(compiled(X), original(X))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(X).square().sum().backward()
    hidden = original[1](original[0](X)).detach()
    gradient = 2 * original(X).detach().T @ (hidden @ torch.full((5, 1), 0.5))
    torch.testing.assert_close(compiled.get_parameter("2.lora_b").grad, gradient)
    assert compiled.get_parameter("2.weight").grad is None
    optimizer.step()
    assert (
        compiled.get_parameter("2.lora_b").abs().sum() > 0
        and not torch.equal(compiled(X), original(X))
        and thunder.cache_misses(compiled) == 1
    )


# ---------------------------------------------------------------------------------------------------------------- hooks


class Noting(thunder.Transform):
    def __init__(self, name, log):
        self.name, self.log = name, log

    def transform_module(self, model):
        self.log.append((self.name, "module", type(model).__name__))

    def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
        self.log.append(
            (self.name, "traces", prologue_trace.name, epilogue_trace, [e.name for e in kwargs["executors_list"]])
        )
        return prologue_trace, computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        self.log.append((self.name, computation_trace.name, [e.name for e in kwargs["executors_list"]]))
        return computation_trace

    def transform_state_dict_for_submodule(self, model, submodule_name, state_dict):
        self.log.append((self.name, "to", submodule_name))
        return state_dict

    def reverse_transform_state_dict_for_submodule(self, model, submodule_name, state_dict):
        self.log.append((self.name, "from", submodule_name))
        return state_dict


def test_hooks_are_asked_in_order():
    log = []
    compiled = thunder.jit(nn.Linear(4, 2), transforms=[Noting("a", log), Noting("b", log)], executors=[])
    assert log == [("a", "module", "ThunderModule"), ("b", "module", "ThunderModule")]
    log.clear()
    compiled(X)
    names = ["torch", "python"]
    assert log == [
        ("a", "traces", "prologue", None, names), ("b", "traces", "prologue", None, names),
            ("a", "augmented_forward_fn", names), ("b", "augmented_forward_fn", names),
        ("a", "backward_fn", names), ("b", "backward_fn", names),
    ]  # fmt: skip
    assert [t.provenance.split(" (")[0] for t in thunder.last_backward_traces(compiled)][-3:] == [
        "Constructed by Delete Last Used",
        *["Constructed by Transform Noting"] * 2,
    ]
    log.clear()
    compiled.load_original_state_dict(compiled.original_state_dict())
    assert log == [("b", "from", ""), ("a", "from", ""), ("a", "to", ""), ("b", "to", "")]


def test_the_backward_is_transformed():
    class Negated(thunder.Transform):
        def transform_trace_post_optimization(self, computation_trace, **kwargs):
            if computation_trace.name != "backward_fn":
                return computation_trace

            def rule(line, out):
                out.write(line.replace(sym=twice) if line.sym.name == "cos" else line)

            twice = thunder.extend.OperatorExecutor("negating").register_operator(
                "minus_cos", meta=lambda x: TensorProxy(like=x), fn=lambda x: -torch.cos(x)
            )
            return rewrite(computation_trace, rule)

    x = X.clone().requires_grad_()
    thunder.jit(lambda x: x.sin(), transforms=[Negated()])(x).sum().backward()
    assert torch.equal(x.grad, -torch.cos(X))


def test_a_changed_prologue_and_epilogue_run():
    class Refusing(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
            from thunder.core.symbol import BoundSymbol, Symbol

            hello = Symbol(
                "hello",
                module="prims",
                is_prim=True,
                python_printer=lambda line, printer: [f"{printer.object(log)}.append({line.args[0]!r})"],
            )

            def with_line(trace, text):
                return trace.replace(bound_symbols=(*trace.bound_symbols, BoundSymbol(hello, (text,), {}, None)))

            return with_line(prologue_trace, "prologue"), computation_trace, with_line(epilogue_trace, "epilogue")

    log = []
    store = {}

    def program(x):
        store["last"] = x + 1
        return x * 2

    compiled = thunder.jit(program, transforms=[Refusing()])
    assert torch.equal(compiled(X), X * 2) and torch.equal(store["last"], X + 1)
    compiled(X)
    assert log == ["prologue", "epilogue"] * 2
    assert len(thunder.last_prologue_traces(compiled)) == len(thunder.last_epilogue_traces(compiled)) == 2


def test_add_transform():
    class Doubling(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
            def rule(line, out):
                out.trace(
                    lambda *a, **k: ltorch.mul(line.sym(*a, **k), 2), line
                ) if line.sym is ltorch.linear else out.write(line)

            return prologue_trace, rewrite(computation_trace, rule), epilogue_trace

    original = nn.Linear(4, 2)
    compiled = thunder.jit(original, cache="symbolic values")
    once = thunder.add_transform(compiled, transform=Doubling())
    twice = thunder.add_transform(once, transform=[Doubling()], disable_torch_autograd_support=True)
    assert (
        torch.equal(once(X), original(X) * 2)
        and torch.equal(twice(X), original(X) * 4)
        and torch.equal(compiled(X), original(X))
    )
    assert (
        len(thunder.list_transforms(twice)) == 2
        and thunder.cache_option(twice) is thunder.CACHE_OPTIONS.SYMBOLIC_VALUES
    )
    assert once(X).requires_grad and not twice(X).requires_grad
    once(X).sum().backward()
    torch.testing.assert_close(original.weight.grad, 2 * X.sum(0).expand(2, 4))
    function = thunder.add_transform(thunder.jit(lambda x: x.sin()), transform=Noting("f", []))
    assert torch.equal(function(X), X.sin())
    with pytest.raises(OptionError, match="add_transform takes a compiled function or module, not Linear"):
        thunder.add_transform(original, transform=Doubling())


def test_wrong_transforms():
    names = (
        "transform_module, transform_traces_pre_prologue, transform_state_dict_for_submodule, "
        "reverse_transform_state_dict_for_submodule, transform_trace_post_optimization"
    )
    with pytest.raises(
        OptionError,
        match=f"transforms= has a int, which has none of the hooks of a thunder.Transform: .*{names.split(', ')[-1]}",
    ):
        thunder.jit(nn.Linear(2, 2), transforms=[3])
    with pytest.raises(OptionError, match=r"transforms= has the class Quantize: give an instance, Quantize\(...\)"):
        thunder.jit(nn.Linear(2, 2), transforms=[Quantize])
    with pytest.raises(OptionError, match=r"transforms= is a list of transforms, not a Quantize"):
        thunder.jit(nn.Linear(2, 2), transforms=Quantize())

    class Half(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
            return prologue_trace, computation_trace

    class More(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
            return prologue_trace, computation_trace.replace(args=computation_trace.args * 2), epilogue_trace

    with pytest.raises(
        OptionError,
        match=r"Half.transform_traces_pre_prologue returned tuple: return \(prologue_trace, computation_trace, "
        r"epilogue_trace\)",
    ):
        thunder.jit(lambda x: x + 1, transforms=[Half()])(X)
    with pytest.raises(
        OptionError,
        match="after More.transform_traces_pre_prologue the prologue returns 1 values and the computation has 2 "
        "arguments: .*with_parameter",
    ):
        thunder.jit(lambda x: x + 1, transforms=[More()])(X)
    with pytest.raises(OptionError, match="'w' is no parameter that a transform gave the module"):
        with_parameter(None, None, thunder.jit(nn.Linear(2, 2)), "w")
