"""torch.distributions as programs use them, with the checks of arguments that are on by default: values, gradients, the
generator and errors are eager's."""

import pytest
import torch
import torch.distributions as D

import thunder


@pytest.fixture(autouse=True)
def with_checks(monkeypatch):
    """PyTorch switches the checks off for the whole process where torch.compile has run, as in another test."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) + 0.1


def tanh_normal(x):
    d = D.TransformedDistribution(D.Independent(D.Normal(x, x + 1), 1), [D.TanhTransform(cache_size=1)])
    sample = d.rsample()
    return sample, d.log_prob(sample)


def drawn(make, value=None, entropy=True):
    def program(x):
        d = make(x)
        sample = d.rsample() if d.has_rsample else d.sample()
        return (
            sample,
            d.sample((2,)),
            d.log_prob(sample.detach() if value is None else value(x)),
            *((d.entropy(),) if entropy else ()),
        )

    return program


PROGRAMS = {
    "normal": drawn(lambda x: D.Normal(x, x + 1)),
    "normal of numbers": lambda x: D.Normal(0.0, 1.0).log_prob(x),
    "categorical": drawn(lambda x: D.Categorical(x)),
    "categorical of logits": lambda x: (lambda d: (d.sample(), d.entropy(), d.probs, d.mode))(D.Categorical(logits=x)),
    "bernoulli": drawn(lambda x: D.Bernoulli(x.clamp(0, 1))),
    "bernoulli of logits": drawn(lambda x: D.Bernoulli(logits=x)),
    "uniform": drawn(lambda x: D.Uniform(x - 1, x + 1)),
    "beta": drawn(lambda x: D.Beta(x, x + 1)),
    "gamma": drawn(lambda x: D.Gamma(x, x + 1)),
    "dirichlet": drawn(lambda x: D.Dirichlet(x)),
    "exponential": drawn(lambda x: D.Exponential(x)),
    "laplace": drawn(lambda x: D.Laplace(x, x + 1)),
    "cauchy": drawn(lambda x: D.Cauchy(x, x + 1)),
    "multivariate normal": drawn(lambda x: D.MultivariateNormal(x[0], torch.eye(4) * 2)),
    "triangle": lambda x: (lambda d: (d.rsample(), d.log_prob(x), d.entropy()))(
        D.MultivariateNormal(x[0], scale_tril=torch.linalg.cholesky(x.T @ x + torch.eye(4)))
    ),
    "mixture": drawn(lambda x: D.MixtureSameFamily(D.Categorical(x), D.Normal(x, x + 1)), entropy=False),
    "through tanh": tanh_normal,
    "one hot": drawn(lambda x: D.OneHotCategorical(x)),
    "relaxed": lambda x: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
    "poisson": drawn(lambda x: D.Poisson(x), entropy=False),
    "binomial": drawn(lambda x: D.Binomial(5, x.clamp(0, 1))),
    "geometric": drawn(lambda x: D.Geometric(x.clamp(0.01, 1))),
    "multinomial": drawn(lambda x: D.Multinomial(5, x), entropy=False),
    "weibull": drawn(lambda x: D.Weibull(x, x + 1)),
    "divergence": lambda x: (
        D.kl_divergence(D.Normal(x, x + 1), D.Normal(0.0, 1.0)),
        D.kl_divergence(D.Categorical(x), D.Categorical(x + 1)),
    ),
    "expanded": lambda x: D.Normal(x[0], x[0] + 1).expand((3, 4)).log_prob(x),
    "below zero": lambda x: D.Normal(x, x - 5).sample(),
    "not above": lambda x: D.Uniform(x, x - 5).sample(),
    "zero": lambda x: D.Geometric(x * 0).sample(),
    "outside": lambda x: D.Categorical(probs=x).log_prob(x[:, 0] + 7),
    "another shape": lambda x: D.Normal(x, x + 1).log_prob(torch.ones(7)),
}


def outcome(program, x, grad: bool):
    torch.manual_seed(3)
    x = x.clone().requires_grad_(grad)
    try:
        samples = program(x)
    except ValueError as error:
        return str(error).split(" of distribution ")[0].split(" of the distribution ")[0]
    samples = [samples] if isinstance(samples, torch.Tensor) else list(samples)
    outputs = [t for t in samples if t.requires_grad]
    gradients = torch.autograd.grad([t.sum() for t in outputs], x, allow_unused=True) if outputs else ()
    return [t.detach() for t in samples], [t.requires_grad for t in samples], torch.get_rng_state(), gradients


@pytest.mark.parametrize("grad", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_distributions(name, grad):
    want, got = outcome(PROGRAMS[name], X, grad), outcome(thunder.jit(PROGRAMS[name], numerics="eager"), X, grad)
    if isinstance(want, str):
        assert got == want
        return
    assert got[1] == want[1] and torch.equal(got[2], want[2])
    for g, w in zip(got[0], want[0], strict=True):
        assert g.stride() == w.stride()
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
    for g, w in zip(got[3], want[3], strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(g, w, equal_nan=True)


def test_what_a_check_refuses_depends_on_the_call():
    compiled = thunder.jit(lambda x, scale: D.Normal(x, scale).log_prob(x))
    for scale in (1.0, -1.0, 2.0):
        scale = torch.tensor(scale)
        if scale < 0:
            with pytest.raises(
                ValueError, match=r"Expected parameter scale \(Tensor of shape \(3, 4\)\) of distribution Normal"
            ):
                compiled(X, scale)
        else:
            assert torch.equal(compiled(X, scale), D.Normal(X, scale).log_prob(X))
    assert thunder.cache_misses(compiled) == 1


class Doubled:
    """A descriptor of the user's, which computes."""

    def __get__(self, instance, owner=None):
        return self if instance is None else instance.x * 2


class Assigned(Doubled):
    def __set__(self, instance, value):
        instance.__dict__["x"] = value


class Holder:
    twice, assigned = Doubled(), Assigned()


def test_descriptors_are_read_as_the_program_reads():
    def program(h, y):
        h.assigned = y
        return h.twice + Holder.twice.__get__(h), h.assigned

    want, got = Holder(), Holder()
    compiled = thunder.jit(program)
    for i in range(2):
        y = torch.full((2,), float(i))
        for a, b in zip(program(want, y), compiled(got, y), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(got.x, want.x)
    Holder.twice = property(lambda self: self.x * 3)
    try:
        assert torch.equal(compiled(got, y)[1], program(want, y)[1])
    except AttributeError as error:
        with pytest.raises(AttributeError, match=str(error)[:30]):
            program(want, y)
