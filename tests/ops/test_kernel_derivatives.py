"""The table of derivatives that are one kernel."""

from pathlib import Path

from tests import kernel_derivatives
from thunder.ops import LTORCH


def test_the_table_is_that_of_pytorchs_file():
    path = Path(kernel_derivatives.table.__file__)
    assert path.read_text() == kernel_derivatives.text(), "run python -m tests.kernel_derivatives"


def test_a_row_is_the_only_derivative_of_its_operation():
    for name in kernel_derivatives.table.ROWS:
        assert LTORCH[name].grad_rule.__qualname__.startswith("gradient_of_first")


def test_what_is_no_single_kernel_is_left_out():
    call = kernel_derivatives._kernel_call
    assert call("  self: silu_backward(grad, self)") == ("silu_backward", ["grad", "self"])
    assert call('  self: "GradMode::is_enabled() ? other_backward(grad) : silu_backward(grad, self)"') == (
        "silu_backward",
        ["grad", "self"],
    )
    assert call("  self: grad * other") is None
    assert call("  self: silu_backward(grad, self) * 2") is None
    assert call("  other: silu_backward(grad, self)") is None
