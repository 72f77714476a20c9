"""PyTorch's controls of compiled functions: stances, and marks of sizes."""

import pytest
import torch
import torch._dynamo

import thunder
from thunder.errors import OptionError


def test_stances_say_what_runs():
    compiled, x, other = thunder.jit(lambda x: x * 2), torch.ones(3), torch.ones(3, 3)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(compiled(x), x * 2) and not compiled.programs
    compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x), x * 2)
        with pytest.raises(RuntimeError, match="set_stance.'fail_on_recompile'.*had 1 dimensions, has 2"):
            compiled(other)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert torch.equal(compiled(other), other * 2) and torch.equal(compiled(x), x * 2)
    (program,) = compiled.programs
    assert program.calls == 3  # not those in eager mode
    compiled(other)
    assert len(compiled.programs) == 2


def test_a_stance_lets_the_first_call_run_in_eager_mode():
    compiled, x = thunder.jit(torch.sin), torch.ones(3)
    with torch.compiler.set_stance("eager_then_compile"):
        compiled(x)
        assert not compiled.programs
        compiled(x)
    assert len(compiled.programs) == 1


def test_a_stance_does_not_drop_transforms():
    class Nothing(thunder.Transform):
        pass

    compiled = thunder.jit(torch.sin, transforms=[Nothing()])
    with torch.compiler.set_stance("force_eager"), pytest.raises(OptionError, match="force_eager.*Nothing"):
        compiled(torch.ones(2))


MARKS = {
    "mark_dynamic": (torch._dynamo.mark_dynamic, 1),
    "with bounds": (lambda x, dim: torch._dynamo.mark_dynamic(x, dim, min=2, max=64), 1),
    "maybe_mark_dynamic": (torch._dynamo.maybe_mark_dynamic, 1),
    "mark_unbacked": (torch._dynamo.decorators.mark_unbacked, 1),
    "thunder's, with bounds": (lambda x, dim: thunder.mark_dynamic(x, dim, min=2, max=64), 1),
    "mark_static": (torch._dynamo.mark_static, 3),
    "none": (lambda x, dim: None, 2),
}


@pytest.mark.parametrize("name", MARKS)
def test_sizes_are_symbolic_where_they_are_marked(name):
    mark, programs = MARKS[name]
    compiled = thunder.jit(lambda x: x * x.shape[0])
    for n in (5, 6, 7):
        x = torch.ones(n, 2)
        mark(x, 0)
        assert torch.equal(compiled(x), x * n)
    assert len(compiled.programs) == programs


def test_a_size_beyond_its_bounds_is_an_error():
    with pytest.raises(OptionError, match="size 5 of dim 0 is not between 6 and 8"):
        thunder.mark_dynamic(torch.ones(5), 0, min=6, max=8)
