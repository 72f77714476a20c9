"""Fixtures: processes of a group, started once."""

import pytest

from tests.distributed.launcher import Ranks


class _Pool:
    def __init__(self):
        self.groups: dict[int, Ranks] = {}

    def __call__(self, size: int) -> Ranks:
        group = self.groups.get(size)
        if group is None or not group.alive:
            group = self.groups[size] = Ranks(size)
        return group


@pytest.fixture(scope="session")
def ranks():
    """ranks(size)(function, *arguments) runs function(rank, size, *arguments) on every rank."""
    pool = _Pool()
    yield pool
    for group in pool.groups.values():
        group.close()
