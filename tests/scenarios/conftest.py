"""Programs of new users run with the tiers that new users have: C++ kernels take over at the fifth call."""

import pytest


@pytest.fixture(autouse=True)
def default_tiers(monkeypatch):
    monkeypatch.delenv("THUNDER_TIERS")
