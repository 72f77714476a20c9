"""Calls of PyTorch's in a `try` of the program: PyTorch's own errors are raised where the program handles them."""

import collections
import contextlib
import warnings

import pytest
import torch

import thunder
from thunder.capture import examples
from thunder.errors import FallbackWarning


def refused(x):
    """PyTorch has no such kernel for float16, which no meta rule says."""
    return torch.linalg.inv(x.half())


def handled(x):
    x.add_(1)
    try:
        return refused(x)
    except RuntimeError:
        return x * 2


def handled_around_with(x):
    x.add_(1)
    try:
        with contextlib.nullcontext():
            return refused(x)
    except RuntimeError:
        return x * 2


def handled_around_finally(x):
    x.add_(1)
    saved = []
    try:
        try:
            return refused(x)
        finally:
            saved.append(1)
    except (ValueError, RuntimeError):
        return x * len(saved)


def left_by_finally(x):
    x.add_(1)
    for _ in range(2):
        try:
            refused(x)
        finally:
            break
    return x


@pytest.mark.parametrize("program", [handled, handled_around_with, handled_around_finally, left_by_finally])
def test_what_pytorch_refuses_is_handled(program):
    x, y = torch.eye(2), torch.eye(2)
    expected = program(x)
    assert torch.equal(thunder.jit(program, fallback="error")(y), expected)
    assert torch.equal(x, y)


def cleaned_up(x):
    try:
        return x.exp() + 1
    finally:
        len("cleanup")


def raised_again(x):
    try:
        return x.exp() + 1
    except RuntimeError as error:
        error.args = ("again",)
        raise


@pytest.mark.parametrize("program", [cleaned_up, raised_again])
def test_no_example_is_run_where_errors_are_only_raised_again(program, monkeypatch):
    monkeypatch.setattr(examples, "_error", lambda *_: pytest.fail("an example was run"))
    x = torch.ones(2)
    assert torch.equal(thunder.jit(program)(x), program(x))


def sizes_by_data(x, a):
    both = torch.cat([x[x > 0], x[x <= 0]])
    try:
        return both - a
    except RuntimeError:
        return "sizes"


def test_examples_have_the_sizes_of_the_call():
    compiled = thunder.jit(sizes_by_data, fallback="error")
    for n in (4, 3, 4, 5):
        args = torch.randn(4), torch.randn(n)
        want, got = sizes_by_data(*args), compiled(*args)
        assert got == want if isinstance(want, str) else torch.equal(got, want)


def place_by_data(m, i):
    try:
        return m[int(i)]
    except IndexError:
        return "outside"


def test_an_error_for_a_number_is_the_error_of_a_path():
    compiled = thunder.jit(place_by_data, fallback="error")
    for i, want in ((7, "outside"), (7, "outside"), (1, 1.0), (2, 2.0)):
        got = compiled(torch.arange(3.0), torch.tensor(i))
        assert (got if isinstance(got, str) else got.item()) == want


def view_of_a_leaf(m, w):
    try:
        w[1:].add_(1)
    except RuntimeError as error:
        return m * w, str(error)
    return m


def test_examples_are_views_of_leaves_where_the_programs_are():
    compiled = thunder.jit(view_of_a_leaf, fallback="error")
    m, w = torch.randn(3), torch.randn(3, requires_grad=True)
    assert compiled(m, w)[1] == view_of_a_leaf(m, w)[1]
    assert compiled(m, w.detach()) is m


def assigned_through_a_mask(x, mask, values):
    y = x.clone()
    try:
        y[mask] = values
    except RuntimeError:
        return y - 1
    return y


def assigned_at_an_index(x, mask, values):
    y = x.clone()
    try:
        y[mask.nonzero()[:, 0].add(mask.long()[:1])] = values
    except IndexError:
        return y - 1
    except RuntimeError:
        return y - 2
    return y


def joined(x, mask, values):
    try:
        return torch.stack([x[mask], values])
    except RuntimeError:
        return x


@pytest.mark.parametrize("program", [assigned_through_a_mask, assigned_at_an_index, joined])
def test_masks_of_zeros_and_of_ones_prove_nothing_for_others(program):
    x, values = torch.arange(4.0), torch.tensor([7.0, 8.0])
    masks = [torch.tensor(m, dtype=torch.bool) for m in ([1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0])]
    for order in (masks, masks[::-1], masks[1:] + masks[:1]):
        compiled = thunder.jit(program)
        for mask in order:
            assert torch.equal(compiled(x, mask, values), program(x, mask, values))


def test_a_graph_of_fx_assigns_through_a_mask():
    """The forward of a GraphModule stands in a `try`."""

    class Assigns(torch.nn.Module):
        def forward(self, x, mask, values):
            return torch.index_put(x * 1, (mask,), values)

    module = torch.fx.symbolic_trace(Assigns())
    compiled = thunder.jit(module, fallback="error")
    for mask in ([1, 0, 1], [0, 1, 1]):
        inputs = torch.ones(3), torch.tensor(mask, dtype=torch.bool), torch.tensor([5.0, 6.0])
        assert torch.equal(compiled(*inputs), module(*inputs))
    assert len(compiled.programs) == 1


@pytest.mark.parametrize("sequence", [[1], (1,), "a", b"a", bytearray(b"a"), collections.deque([1], maxlen=3)])
def test_a_sequence_repeated_by_a_tensor(sequence):
    def f(x, sequence):
        try:
            return [x * sequence, sequence * (x + 1)]
        except TypeError as error:
            return repr(error)

    for x in (torch.tensor(2), torch.tensor(2.0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert repr(thunder.jit(f, fallback="eager")(x, sequence)) == repr(f(x, sequence))


class Numbered(ExceptionGroup):
    """A group that keeps a number in its parts, by a method in Python."""

    def derive(self, errors):
        part = Numbered(self.message, errors)
        part.number = self.number
        return part


def handles_a_group(x):
    try:
        raise ExceptionGroup("two", [ValueError(x * 2), ExceptionGroup("inner", [KeyError(), ValueError(3)])])
    except* ValueError as group:
        x = group.exceptions[0].args[0] * group.exceptions[1].exceptions[0].args[0]
    except* KeyError:
        x = x + 1
    return x


def handles_one_exception(x):
    try:
        raise ValueError(x)
    except* ValueError as group:
        x = group.exceptions[0].args[0] * (len(group.exceptions) + 1)
    return x


def raises_what_is_left(x):
    try:
        try:
            raise ExceptionGroup("three", [ValueError(2), TypeError(3), KeyError()])
        except* ValueError:
            x = x * 2
            raise
        except* TypeError as group:
            raise RuntimeError(x) from group
    except ExceptionGroup as error:
        new, old = error.exceptions
        assert (type(new), type(new.__cause__), old.message) == (RuntimeError, ExceptionGroup, "three")
        return new.args[0] * len(old.exceptions), repr(old)


def keeps_a_number(x):
    group = Numbered("two", [ValueError(), KeyError()])
    group.number = 5
    try:
        raise group
    except* KeyError as part:
        x = x * part.number
    except* ValueError:
        x = x + 1
    return x


@pytest.mark.parametrize("function", [handles_a_group, handles_one_exception, raises_what_is_left, keeps_a_number])
def test_groups_of_exceptions_are_handled_in_the_program(function):
    compiled = thunder.jit(function, fallback="error")
    for n in (1.0, 2.0):
        assert repr(compiled(torch.full((2,), n))) == repr(function(torch.full((2,), n)))
    assert len(compiled.programs) == 1
