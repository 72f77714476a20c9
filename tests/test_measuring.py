"""What the benchmark programs conclude from their measurements."""

import collections
import sys
from pathlib import Path

import pytest
import torch

from thunder.tests.measuring import compile_with, interleaved, median_interval, parse_systems, repetitions, turns

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@pytest.fixture
def programs(monkeypatch):
    """The benchmark programs as modules: they find each other beside themselves."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import first_call
    import models

    yield first_call, models
    for name in ("first_call", "models", "model_zoo"):
        sys.modules.pop(name, None)


def test_systems_take_turns():
    order = []
    samples = interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=4, repeat=2)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb" + "ccbbaa"
    assert {name: len(values) for name, values in samples.items()} == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_each_system_follows_each_other_equally_often(names):
    orders = ["".join(order) for order in turns(list(names), 2 * len(names))]
    assert all(sorted(order) == sorted(names) for order in orders)
    follows = collections.Counter(pair for order in orders for pair in zip(order, order[1:], strict=False))
    assert len(follows) == len(names) * (len(names) - 1)
    assert set(follows.values()) == {2}
    assert set(collections.Counter(order[0] for order in orders).values()) == {2}


def test_median_interval_covers_the_median_as_often_as_it_says():
    torch.manual_seed(0)
    draws = torch.distributions.LogNormal(0.0, 1.0).sample((2000, 101))  # skewed, as times are; the median is 1
    covered = sum(low <= 1.0 <= high for low, high in (median_interval(row) for row in draws.tolist()))
    assert 0.94 <= covered / len(draws) <= 0.98


def test_repetitions_are_at_least_one_and_bounded():
    assert repetitions(lambda: None, seconds=0.0) == 1
    assert repetitions(lambda: None, seconds=10.0, limit=7) == 7


def test_unknown_systems_name_the_known():
    assert parse_systems("eager, thunder") == ["eager", "thunder"]
    with pytest.raises(ValueError, match=r"torch\.compile"):
        parse_systems("eager,tpu")
    with pytest.raises(ValueError, match=r"torch\.compile"):
        compile_with("tpu", abs)


def test_deviation_looks_at_every_tensor(programs):
    _, models = programs
    reference = {"a": torch.ones(2), "b": [torch.zeros(3), (torch.tensor([float("nan"), float("inf")]),)]}
    same = {"a": torch.ones(2), "b": [torch.zeros(3), (torch.tensor([float("nan"), float("inf")]),)]}
    assert models.deviation(same, reference) == (0.0, 1.0)
    same["b"][0][1] = -0.25
    assert models.deviation(same, reference)[0] == 0.25
    same["b"][0] = torch.tensor([float("nan"), 0.0, 0.0])
    assert models.deviation(same, reference)[0] == float("inf")


def test_deviation_refuses_other_structures(programs):
    _, models = programs
    for other in (
        [torch.ones(2)],
        (torch.ones(2), torch.ones(2)),
        (torch.ones(2, dtype=torch.float64),),
        (torch.ones(1, 2),),
    ):
        with pytest.raises(ValueError, match="eager's"):
            models.deviation(other, (torch.ones(2),))


def rows(seconds: dict[int, float], instructions: dict[int, int], system: str = "thunder") -> list[dict]:
    return [
        {
            "system": system,
            "depth": d,
            "seconds": seconds[d],
            "fastest": seconds[d],
            "instructions": instructions[d],
            "bound_symbols": 40 * d,
            "deviation": 0.0,
        }
        for d in seconds
    ]


def test_growth_with_depth_is_judged(programs):
    first_call, _ = programs
    depths = [2, 8, 16, 32]
    linear = {d: 600 * d + 100 for d in depths}
    assert first_call.verdict(rows({d: 0.01 * d for d in depths}, linear), depths) == []
    assert any(
        "instructions grow" in text
        for text in first_call.verdict(rows({d: 0.01 * d for d in depths}, {d: d * d for d in depths}), depths)
    )
    assert any(
        "seconds (fastest runs) grow" in text
        for text in first_call.verdict(rows({d: 0.001 * d**2 for d in depths}, linear), depths)
    )
    assert any(
        "per added block" in text for text in first_call.verdict(rows({d: 0.06 * d for d in depths}, linear), depths)
    )


def test_failures_and_ratios_are_judged(programs):
    first_call, _ = programs
    ours, theirs = rows({2: 1.0}, {2: 1}), rows({2: 9.0}, {2: 1}, "torch.compile")
    assert any("0.111 of torch.compile" in text for text in first_call.verdict(ours + theirs, [2]))
    assert any(
        "no C++ compiler" in text
        for text in first_call.verdict([{"system": "torch.compile", "depth": 2, "error": "no C++ compiler"}], [2])
    )
