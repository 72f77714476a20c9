"""The part of the demo that trains: its losses agree, what it prints has them, and it would notice if they did not."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import fresh

EXAMPLES = str(Path(__file__).resolve().parents[1] / "examples")
pytest.importorskip("tqdm", reason="the extra `plots` brings the progress bar that examples/train.py shows")


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import train

    # what measures memory in processes of its own
    run = SimpleNamespace(PIPE=None, run=lambda command, env, **_: fresh.run(*command[1:], env=env))
    monkeypatch.setattr(train, "subprocess", run)
    yield train
    sys.modules.pop("train", None)


def small(train, **changes):
    return train.Setup(**{"steps": 12, "layers": 1, "width": 32, "batch": 2, "time": 16, "device": "cpu"} | changes)


def test_trains_and_both_curves_agree(train, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the extra `plots` draws the curves")
    picture = tmp_path / "curves" / "loss.png"
    assert train.compare(small(train), picture)
    printed = capsys.readouterr().out
    losses, _ = train.train(small(train))
    assert losses["eager"][-1] < losses["eager"][0]
    for i in (0, 11):  # the printed table has both losses, in this order
        assert f"{i + 1:>6}{losses['eager'][i]:>12.6f}{losses['thunder'][i]:>12.6f}" in printed
    assert max(train.relative_differences(losses)) <= train.TOLERANCE
    assert "The loss curves agree" in printed and picture.read_bytes().startswith(b"\x89PNG")
    eager, thunder = (line.split() for line in printed.splitlines() if line.startswith(("eager ", "thunder ")))
    # saved for the backward, MiB
    assert len(eager) == len(thunder) == 7 and float(thunder[6]) <= 1.05 * float(eager[6])


def test_curves_that_differ_are_noticed(train, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra `plots` draws the curves")
    monkeypatch.setattr(train, "memory_apart", lambda system, setup: {"before": 0, "peak": 0, "saved": 0})
    real = train.Trainer.step
    monkeypatch.setattr(
        train.Trainer, "step", lambda self, *batch: real(self, *batch) * (1 + 1e-3 * (self.compiled is not self.model))
    )
    assert not train.compare(small(train), tmp_path / "loss.png")
    assert "DO NOT AGREE" in capsys.readouterr().out


def test_a_loss_that_is_no_number_does_not_agree(train):
    assert train.relative_differences({"eager": [1.0, float("nan")], "thunder": [1.0, float("nan")]}) == [
        0.0,
        float("inf"),
    ]
