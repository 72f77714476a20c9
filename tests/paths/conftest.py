"""Programs that decide by data run with the tiers that users have: C++ kernels take over at the fifth call of a path."""

import pytest


@pytest.fixture(autouse=True)
def default_tiers(monkeypatch):
    monkeypatch.delenv("THUNDER_TIERS")
