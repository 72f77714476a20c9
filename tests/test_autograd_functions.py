"""The contract of `torch.autograd.Function` inside compiled programs, compared with eager."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.function import once_differentiable

import thunder


def leaf(*shape):
    return torch.linspace(0.5, 1.5, int(torch.tensor(shape).prod())).view(shape).requires_grad_()


def same(program, *shapes, calls=2, fallback="error", **options):
    """Values and gradients of a program, or its error, are eager's. A program is a function of tensors and the
    `torch.autograd.grad`-like way to use the results is its own: it returns what is compared."""
    results = []
    for jit in (lambda f: f, lambda f: thunder.jit(f, fallback=fallback, **options)):
        compiled, seen = program(jit), []
        for _ in range(calls):
            try:
                seen.append(compiled(*(leaf(*shape) for shape in shapes)))
            except RuntimeError as error:
                seen.append(str(error).splitlines()[0])
        results.append(seen)
    for expected, got in zip(*results, strict=True):
        if isinstance(expected, str):
            assert isinstance(got, str) and expected in got
        else:
            torch.testing.assert_close(got, expected)
    return results[0]


def gradients_of(f, used=slice(None)):
    """A program of which some results are used."""

    def program(jit):
        compiled = jit(f)

        def run(*inputs):
            results = compiled(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            total = sum((r * (i + 2)).sum() for i, r in enumerate(results[used]))
            return [results[0].detach(), *torch.autograd.grad(total, inputs, allow_unused=True)]

        return run

    return program


class Told(torch.autograd.Function):
    """Its backward is told which cotangents are missing."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * 2, x * y, y * 3

    @staticmethod
    def backward(ctx, a, b, c):
        x, y = ctx.saved_tensors
        of_x, of_y = torch.full_like(x, 7.0), torch.full_like(y, 5.0)
        if a is not None:
            of_x = of_x + a * 2
        if b is not None:
            of_x, of_y = of_x + b * y, of_y + b * x
        if c is None:
            of_y = of_y * 10
        else:
            of_y = of_y + c * 3
        return of_x, of_y


class Materialized(torch.autograd.Function):
    """Its backward is not linear, so that zeros count."""

    @staticmethod
    def forward(ctx, x):
        places = x.argsort()
        ctx.mark_non_differentiable(places)
        return x * 2, places, x * 3, 5

    @staticmethod
    def backward(ctx, a, places, b, number):
        assert number is None
        return a * 2 + torch.exp(-b) + places.sum()


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 2), slice(1, 3), slice(0, 3)])
@pytest.mark.parametrize("where", ["in the program", "outside"])
def test_a_backward_that_is_told_of_missing_cotangents(used, where):
    if where == "outside":
        same(gradients_of(Told.apply, used), (3,), (3,))
    else:
        same(gradients_of(lambda x, y: Told.apply(x * 2, y)[used]), (3,), (3,))


@pytest.mark.parametrize("used", [slice(0, 1), slice(2, 3), slice(0, 3, 2)])
def test_missing_cotangents_are_zeros_for_others(used):
    same(gradients_of(lambda x: Materialized.apply(x)[:3], used), (3,))
    same(gradients_of(lambda x: Materialized.apply(x)[used]), (3,))


def test_one_result_of_which_others_are_constants():
    class Constants(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            order, copy = x.argsort(), x.clone()
            ctx.mark_non_differentiable(order, copy)
            return order, x * 2, copy

        @staticmethod
        def backward(ctx, order, g, copy):
            return g * (2 if order is None and copy is None else 100)

    same(gradients_of(lambda x: Constants.apply(x)[1]), (3,))


WRONG = {
    "too few": (lambda g, x: g, 2),
    "too many": (lambda g, x: (g, g), 1),
    "nones are none too many": (lambda g, x: (g, None, None), 1),
    "none at all": (lambda g, x: (), 1),
    "another shape": (lambda g, x: torch.ones(4), 1),
    "a smaller shape": (lambda g, x: g[:1], 1),
    "no dimensions": (lambda g, x: g.sum(), 1),
    "a larger shape is summed": (lambda g, x: g.expand(2, 3), 1),
    "a number": (lambda g, x: 3.0, 1),
    "a list": (lambda g, x: [g], 1),
    "integers are converted": (lambda g, x: torch.ones(3, dtype=torch.int64), 1),
    "float64 is converted": (lambda g, x: g.double() * 0.1, 1),
    "one of the meta device": (lambda g, x: torch.ones(3, device="meta"), 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_gradients_are_checked_as_the_engine_does(case):
    backward, number = WRONG[case]

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(inputs[0])
            return inputs[0] * 2

        @staticmethod
        def backward(ctx, g):
            return backward(g, ctx.saved_tensors[0])

    expected = same(gradients_of(lambda *inputs: Checked.apply(*inputs)), *[(3,)] * number)
    assert isinstance(expected[0], str) is (case not in _FINE)


_FINE = {"nones are none too many", "a larger shape is summed", "integers are converted", "float64 is converted"}


def test_a_complex_gradient_of_a_real_argument():
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 1j

    y = thunder.jit(Turned.apply, fallback="error")(leaf(3))
    with pytest.raises(RuntimeError, match="expected a real gradient but got a complex one"):
        y.sum().backward()


def test_a_gradient_of_what_is_no_tensor():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, by):
            return x * by

        @staticmethod
        def backward(ctx, g):
            return g, g

    same(gradients_of(lambda x: Scaled.apply(x, 3)), (3,))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3, x * 2

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return a * 3 * x * x + b * 2


class CubeOnce(Cube):
    backward = staticmethod(once_differentiable(Cube.backward))


def twice(f):
    def program(jit):
        compiled = jit(f)

        def run(x):
            first = torch.autograd.grad(sum(y.sum() for y in compiled(x)), x, create_graph=True)[0]
            return first.detach(), torch.autograd.grad((first * first).sum(), x)[0] if first.requires_grad else None

        return run

    return program


@pytest.mark.parametrize("used", [slice(0, 1), slice(0, 2)])
def test_second_derivatives(used):
    same(twice(lambda x: Cube.apply(x * 2)[used]), (3,))


def test_the_first_derivative_of_one_that_has_no_second():
    def program(jit):
        compiled = jit(lambda x: CubeOnce.apply(x))
        return lambda x: torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)[0].detach()

    same(program, (3,))


def test_it_raises_only_where_the_second_is_computed():
    def program(jit):
        compiled = jit(lambda x: CubeOnce.apply(x * x)[0] * x)

        def run(x):
            (first,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
            first.sum().backward()

        return run

    (message, _) = same(program, (3,))
    assert "marked with @once_differentiable" in message


# a forward that writes to its arguments is refused: the function around is an eager call, or the original runs
WRITES = pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.mark_dirty(x)
        ctx.save_for_backward(by)
        return x.mul_(by)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * 10, None


@WRITES
def test_a_tensor_that_is_marked_dirty():
    def f(x):
        y = x * 1
        z = Scale.apply(y, torch.tensor(3.0))
        assert z is y
        return y * y + z

    same(gradients_of(f), (3,), fallback="eager")


def test_an_argument_that_is_marked_dirty():
    def program(jit):
        compiled = jit(lambda a, x: Scale.apply(a, x.detach()[0]) * x)

        def run(x):
            a = torch.ones(3)
            (g,) = torch.autograd.grad(compiled(a, x).sum(), x)
            return a, g

        return run

    same(program, (3,), fallback="eager")


@WRITES
def test_a_leaf_that_is_marked_dirty():
    (message, _) = same(gradients_of(lambda x: Scale.apply(x, torch.tensor(3.0))), (3,), fallback="eager")
    assert "a leaf Variable that requires grad" in message


@WRITES
def test_a_forward_that_writes_without_a_word():
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, count):
            count.add_(1)
            return x * count

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    def program(jit):
        compiled = jit(lambda x, count: Counts.apply(x, count) * count)

        def run(x):
            count = torch.zeros(())
            (g,) = torch.autograd.grad(compiled(x, count).sum(), x)
            return count, g

        return run

    same(program, (3,), fallback="eager")


def test_a_forward_that_writes_is_refused_in_words():
    with pytest.raises(thunder.errors.CaptureError, match="Scale writes to a tensor that it does not make"):
        thunder.jit(lambda x: Scale.apply(x * 1, torch.tensor(3.0)), fallback="error")(leaf(3))


class Odd(torch.autograd.Function):
    """Its jvp and its vmap are none of its forward's: where a transform asks for them, the original runs."""

    @staticmethod
    def forward(x, y, n):
        return torch.sin(x) * y, x * n

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.n = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * 100 * y, b * x, None

    @staticmethod
    def jvp(ctx, of_x, of_y, of_n):
        x, y = ctx.saved_tensors
        return of_x * 1000 * y + of_y, of_x * ctx.n

    @staticmethod
    def vmap(info, dims, x, y, n):
        assert info.batch_size == 4 and dims[2] is None
        if dims[0] is None:
            return (x * 7 + y, x * n), (dims[1], None)
        return (x.sin() * 100, x.movedim(dims[0], -1) * n), (dims[0], -1)


def pushed(f, x):
    return torch.func.jvp(f, (x,), (x * 0.1 + 1,))


TRANSFORMS = {
    "jvp": (lambda x: pushed(lambda x: Odd.apply(x * 2, x, 3), x), (3,)),
    "jvp of one of two arguments": (lambda x: pushed(lambda y: Odd.apply(x, y * y, 3), x), (3,)),
    "jvp of one result": (lambda x: pushed(lambda x: Odd.apply(x * 2, x, 3)[1] * x, x), (3,)),
    "jacfwd": (lambda x: torch.func.jacfwd(lambda x: JvpOnly.apply(x))(x), (3,)),
    "jacrev": (lambda x: torch.func.jacrev(lambda x: JvpOnly.apply(x))(x), (3,)),
    "hessian": (lambda x: torch.func.hessian(lambda x: (JvpOnly.apply(x) ** 2).sum())(x), (3,)),
    "grad": (lambda x: torch.func.grad(lambda x: Odd.apply(x, x, 2)[0].sum())(x), (3,)),
    "vmap": (lambda x: torch.func.vmap(lambda x: Odd.apply(x, x, 2))(x), (4, 3)),
    "vmap of the second": (lambda x: torch.func.vmap(lambda y: Odd.apply(x[0], y, 2))(x), (4, 3)),
    "vmap along another dimension": (
        lambda x: torch.func.vmap(lambda x: Odd.apply(x, x, 2)[0] * 2, in_dims=1)(x), (3, 4),
    ),
    "without a batch": (lambda x: torch.func.vmap(lambda y: Odd.apply(x, x, 2)[0] + y)(x), (4, 4)),
    "vmap of grad": (lambda x: torch.func.vmap(torch.func.grad(lambda x: Odd.apply(x, x, 2)[0].sum()))(x), (4, 3)),
}  # fmt: skip


class JvpOnly(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * 100

    @staticmethod
    def jvp(ctx, t):
        return t * ctx.saved_tensors[0] * 1000


@pytest.mark.parametrize("name", TRANSFORMS)
def test_its_own_rules_are_those_of_the_transforms(name):
    f, shape = TRANSFORMS[name]
    x = leaf(*shape).detach()
    if name in ("jacrev", "grad"):
        torch.testing.assert_close(thunder.jit(f, fallback="error")(x), f(x))
        return
    with pytest.raises(thunder.errors.CaptureError, match="has a (jvp|vmap) of its own"):
        thunder.jit(f, fallback="error")(x)
    with pytest.warns(thunder.errors.FallbackWarning):
        got = thunder.jit(f, fallback="eager")(x)
    torch.testing.assert_close(got, f(x))


class Branches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        if (x * 2 > 2.5).any():
            return g * y
        return g if y.sum() > 0 else -g


def test_a_backward_that_branches_on_what_the_forward_saved():
    compiled = thunder.jit(lambda x: Branches.apply(x - 1).sin(), fallback="error")
    for shift in (1.0, 3.0, 0.0, 4.0, 1.0):
        results = []
        for f in (lambda x: Branches.apply(x - 1).sin(), compiled):
            x = (leaf(3).detach() + shift).requires_grad_()
            results.append((f(x), torch.autograd.grad(f(x).sum(), x)))
        torch.testing.assert_close(*results)
    assert len(compiled.programs) == 2


def test_a_backward_that_branches_on_its_cotangent_is_refused():
    class OfCotangent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g if g.sum() > 0 else g * 5

    with pytest.raises(thunder.errors.CaptureError, match="a branch depends on"):
        thunder.jit(OfCotangent.apply, fallback="error")(leaf(3))
    with pytest.warns(thunder.errors.FallbackWarning):
        y = thunder.jit(OfCotangent.apply, fallback="eager")(x := leaf(3))
    torch.testing.assert_close(torch.autograd.grad(-y.sum(), x)[0], torch.full((3,), -5.0))


class Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.calls = 0
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.calls += 1
        return g * ctx.calls


class Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = x * 3
        return x * 2

    @staticmethod
    def backward(ctx, g):
        g = g * ctx.factor
        ctx.factor = None
        return g


def test_a_backward_that_writes_to_its_context():
    """It runs once for each backward through the graph, and sees what the one before has left."""
    with pytest.warns(thunder.errors.FallbackWarning, match="writes to its ctx"):
        y = thunder.jit(lambda x: Remembers.apply(x), fallback="eager")(x := leaf(3))
    gradients = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0][0].item() for _ in range(3)]
    assert gradients == [1.0, 2.0, 3.0]
    same(gradients_of(lambda x: Forgets.apply(x)), (3,))  # which frees memory


class Straight(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x.round() * y, y.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, a, b):
        x, y = ctx.saved_tensors
        return a * 3 * x * y, b * y


MAPPED = {
    "both": lambda x: torch.vmap(Straight.apply)(x * 3, x * x),
    "of a function": lambda x: torch.vmap(lambda x: Straight.apply(x * 2, x)[0] * x)(x),
    "along another dimension": lambda x: torch.vmap(lambda x, y: Straight.apply(x, y)[1], in_dims=(1, 0))(x.t(), x),
    "of one argument": lambda x: torch.vmap(lambda y: Straight.apply(x[0], y)[0])(x),
    "twice": lambda x: torch.vmap(torch.vmap(lambda x: Straight.apply(x, x * 2)[0].sin()))(x),
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_function_is_differentiated_by_its_own_backward(name):
    f = MAPPED[name]
    same(gradients_of(f), (4, 3))
    if name != "both":
        same(twice(lambda x: (f(x),)), (4, 3))
