"""Derivatives that are one kernel."""

from tests import kernel_derivatives
from thunder.ops import LTORCH


def test_derivatives_of_one_kernel_are_those_of_pytorchs_file():
    expected, ours = kernel_derivatives.rows(), kernel_derivatives.set_by_families()
    assert len(expected) > 15
    assert {name: ours.get(name) for name in expected} == expected
    for name in expected:
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
