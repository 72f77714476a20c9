"""What the probe of a GPU makes of its measurements."""

import types

import pytest

pytest.importorskip("triton", reason="the probe's kernels are Triton's")
from thunder.kernels import gpu_probe


@pytest.mark.parametrize("properties", [{"clock_rate": 1_980_000}, {}])
def test_a_shared_device_makes_no_instruction_faster_than_its_lanes(properties):
    """A schedule by instructions that take no time computes everything anew for each element."""
    device = types.SimpleNamespace(multi_processor_count=132, **properties)
    assert gpu_probe._of_difference(3.2e-3, 1.6e-3, 10**10, device) == 1.6e-13
    delayed = gpu_probe._of_difference(1.5e-3, 1.6e-3, 10**10, device)
    assert delayed == pytest.approx(3e-14, rel=0.05)
