"""Programs of new users run with one tier, and one in three with the tiers that users have."""

from tests.kernels_in_use import default_tiers  # noqa: F401 - a fixture
