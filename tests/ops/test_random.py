"""Random operations: PyTorch draws, one operation after the other, so that results and the generator's state are
eager's."""

import pytest
import torch
import torch.nn.functional as F

import thunder

X = torch.linspace(0.1, 0.9, 24).reshape(2, 3, 4)

PROGRAMS = {
    "rand": lambda x: torch.rand(2, 3, dtype=torch.float64) + torch.rand((3,)),
    "randn": lambda x: torch.randn(size=(2, 3)) * x[0, 0, 0],
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint": lambda x: (
        torch.randint(10, (3,)),
        torch.randint(2, 5, (2, 2), dtype=torch.int32),
        torch.randint(low=1, high=9, size=(2,)),
    ),
    "randint_like": lambda x: torch.randint_like(x, 2, 7),
    "randperm": lambda x: torch.randperm(7),
    "normal": lambda x: (
        torch.normal(x, 0.5),
        torch.normal(0.0, x),
        torch.normal(x, x),
        torch.normal(1.0, 2.0, (3, 2)),
    ),
    "bernoulli": lambda x: (torch.bernoulli(x), x.bernoulli(0.3), x.bernoulli()),
    "multinomial": lambda x: (torch.multinomial(x[0], 2), x[1].multinomial(num_samples=5, replacement=True)),
    "poisson": lambda x: torch.poisson(x * 4),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "normal_": lambda x: torch.empty(4, 2).normal_(mean=1.0, std=0.1),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "geometric_": lambda x: x.clone().geometric_(0.4),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "random_": lambda x: x.clone().random_(0, 5),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "bernoulli_tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_inplace": lambda x: F.dropout(x * 1, p=0.4, training=True, inplace=True),
    "dropout_native": lambda x: torch.dropout(x, 0.3, True),
    "dropout_native_inplace": lambda x: torch.dropout_(x * 1, p=0.3, train=True),
    "dropout_eval": lambda x: (F.dropout(x, 0.4, training=False) + 0, torch.feature_dropout(x, 0.5, False) + 0),
    "dropout1d": lambda x: F.dropout1d(x, 0.4, training=True),
    "dropout2d": lambda x: F.dropout2d(x[None], 0.4),
    "dropout3d": lambda x: F.dropout3d(x[None, None], 0.4),
    "alpha_dropout": lambda x: (F.alpha_dropout(x, 0.4, True), torch.alpha_dropout(x, 0.2, True)),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None], 0.4, True),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "rrelu": lambda x: (F.rrelu(x - 0.5, training=True), F.rrelu(x - 0.5)),
    "rrelu_inplace": lambda x: F.rrelu(x - 0.5, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers_and_generator_state(name):
    program = PROGRAMS[name]
    compiled = thunder.jit(program)
    for seed in (3, 4):  # the first and a warm call
        torch.manual_seed(seed)
        want, state = program(X), torch.get_rng_state()
        torch.manual_seed(seed)
        with torch.no_grad():
            got = compiled(X)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), state)
    assert thunder.cache_hits(compiled) == 1


def test_an_unused_draw_still_advances_the_generator():
    def program(x):
        torch.rand(3)
        F.dropout(x)
        return torch.rand(2)

    torch.manual_seed(0)
    want = program(X)
    torch.manual_seed(0)
    assert torch.equal(thunder.jit(program)(X), want)


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_probability_out_of_range(p):
    with pytest.raises(ValueError) as want:
        F.dropout(X, p)
    with pytest.raises(ValueError) as got:
        thunder.jit(lambda x: F.dropout(x, p))(X)
    assert str(got.value) == str(want.value)


# ----------------------------------------------------------------------------------------------------------------
# generators that the program sets


def _seeded(x, generator):
    torch.manual_seed(7)
    return x + torch.rand(3)


def _forked(x, generator):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inside = torch.rand(3)
    return x + inside, torch.rand(3)


def _own_generator(x, generator):
    generator.manual_seed(11)
    return x + torch.rand(3, generator=generator)


def _state_restored(x, generator):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return x + first, torch.rand(3), state


def _own_state_restored(x, generator):
    state = generator.get_state()
    first = torch.rand(3, generator=generator)
    generator.set_state(state)
    return x + first, torch.rand(3, generator=generator)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("program", [_seeded, _forked, _own_generator, _state_restored, _own_state_restored])
def test_generators_are_set_in_every_call(program, requires_grad):
    generator = torch.Generator()
    x = torch.ones(3, requires_grad=requires_grad)

    def calls(run):
        torch.manual_seed(1)
        generator.manual_seed(2)
        results = []
        for _ in range(3):
            result = run(x, generator)
            results += [
                *(result if isinstance(result, tuple) else (result,)),
                torch.get_rng_state(),
                generator.get_state(),
                torch.rand(1),
            ]
        return results

    for got, want in zip(calls(thunder.jit(program)), calls(program), strict=True):
        assert torch.equal(got, want)


def test_seed_is_set_where_dynamo_was_imported():
    import torch._dynamo  # which puts another function in the place of torch.manual_seed

    compiled = thunder.jit(_seeded)
    for _ in range(2):
        assert torch.equal(compiled(torch.zeros(3), None), _seeded(torch.zeros(3), None))


def test_seeds_that_differ_from_call_to_call_are_refused():
    for program in (lambda: torch.seed(), lambda: torch.initial_seed(), lambda: torch.default_generator.seed()):
        with pytest.raises(thunder.errors.CaptureError, match="differs from call to call"):
            thunder.jit(program)()
