"""`python -m thunder`: run, report, bench, explain, doctor."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser

import pytest
import torch

from tests import fresh
from thunder.command_line import add_commands, compiled_calls, doctor

SCRIPT = """
import sys
import torch
from helper import SCALE


class Inner(torch.nn.Linear):
    pass


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Inner(8, 16), Inner(16, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * SCALE


def step(x):
    return x * 2


if __name__ == "__main__":
    torch.manual_seed(0)
    net, loss = Net(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(32, 8)
    for _ in range(4):
        value = loss(net(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    print(sys.argv[1:], f"{value.item():.6f}", net(x[:3]).shape)
    if "--fail" in sys.argv:
        raise ValueError("mine")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("SCALE = 1.5\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def command(*arguments: str) -> int:
    parser = ArgumentParser()
    add_commands(parser.add_subparsers())
    options = parser.parse_args(arguments)
    return options.command(options)


def test_run_prints_what_the_script_prints_and_a_report(script, capsys):
    eager = fresh.run(script, "a", "--b").stdout
    path, argv, call = sys.path[:], sys.argv, torch.nn.Module.__call__
    assert command("run", script, "a", "--b") == 0
    printed, _, report = capsys.readouterr().out.partition("\n\nthunder: ")
    assert printed == eager.rstrip() and "['a', '--b']" in eager
    assert report.startswith("1 compiled\n  Net: 5 calls, 2 programs")
    assert "compiled again, the last time because x.shape[0] was 32, is 3" in report
    assert (sys.path, sys.argv, torch.nn.Module.__call__) == (path, argv, call)


def test_run_reports_before_an_error_of_the_script(script, capsys):
    call = torch.nn.Module.__call__
    with pytest.raises(ValueError, match="mine"):
        command("run", script, "--fail")
    assert "Net: 5 calls" in capsys.readouterr().out and torch.nn.Module.__call__ is call


def test_run_says_what_is_not_compiled():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.weight * x

    scripted, plain, x = torch.jit.script(Net()), Net(), torch.ones(2)
    with compiled_calls("inference") as rows:
        assert torch.equal(scripted(x), x) and torch.equal(torch.nn.ReLU()(x), x)
        assert not plain(x).requires_grad
    texts = sorted(str(row) for row in rows.values())
    assert texts[0].startswith("Net: 1 calls, 1 programs") and "TorchScript" in texts[1]


def test_report_writes_a_page_for_each_module(script, capsys, tmp_path):
    with open(script, "a") as file:
        file.write("    other = torch.nn.Linear(4, 4)\n    other(torch.ones(1, 4))\n")
    assert command("report", "--output", str(tmp_path / "page.html"), script, "a") == 0
    printed = capsys.readouterr().out
    assert "['a']" in printed and f"Net: {tmp_path / 'page_1.html'}, its last call measured" in printed
    assert f"Linear: {tmp_path / 'page_2.html'}, its last call measured" in printed
    assert all(f'href="page_{n}.html"' in (tmp_path / "page.html").read_text() for n in (1, 2))
    text = (tmp_path / "page_1.html").read_text()
    assert "return self.second(torch.relu(self.first(x))) * SCALE" in text and 'id="timeline"' in text


def test_bench(script, capsys):
    assert command("bench", f"{script}:Net", "--input", "4x8", "--train", "--seconds", "0.1", "--device", "cpu") == 0
    eager, ours = capsys.readouterr().out.splitlines()
    assert eager.split()[0] == "eager" and ours.split()[0] == "thunder" and "ms a call" in ours


def test_explain(script, capsys):
    assert command("explain", f"{script}:step", "--input", "4:float64", "--device", "cpu") == 0
    assert "all of it is a program on the device" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["{script}"], "is not a model: write package.module:name or file.py:name"),
        (["{script}:Other"], "has no 'Other'"),
        (["{script}:Net", "--input", "4,8"], "write sizes and a dtype, such as 4x128 or 4x128:int64"),
        (["{script}:Net", "--input", "4x8:integer"], "write sizes and a dtype"),
    ],
)
def test_what_is_no_model_is_refused(arguments, message, script):
    with pytest.raises(SystemExit, match=message):
        command("explain", *(a.format(script=script) for a in arguments))


def test_doctor(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert doctor() == 0
    text = capsys.readouterr().out
    assert "no-such-compiler cannot build an extension" in text and f"cache: {tmp_path}, 0 files" in text
    assert f"environment: THUNDER_CACHE_DIR={tmp_path}" in text and "a small training step: equals eager" in text


def test_doctor_notices_a_wrong_result(capsys, monkeypatch):
    monkeypatch.setattr("thunder.jit", lambda model, **options: lambda x: model(x) * 2)
    assert doctor() == 1
    assert "a small training step: differs from eager on cpu" in capsys.readouterr().out


def test_the_commands_are_listed():
    done = fresh.run("-m", "thunder", "--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("options", "passes", "run", "report", "bench", "explain", "doctor"))


OWN = """
import torch, thunder

model, plain = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
compiled = thunder.jit(model, fallback="error")
step = thunder.jit(lambda x: plain(x).sum(), fallback="error")
for _ in range(2):
    print(f"{step(compiled(torch.ones(3, 4))).item() - plain(model(torch.ones(3, 4))).sum().item():.1f}")
"""


def test_a_script_that_compiles_by_itself(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    assert command("report", "--output", str(tmp_path / "page.html"), str(tmp_path / "own.py")) == 0
    out = capsys.readouterr().out
    assert out.startswith("0.0\n0.0\n") and "Linear: 2 calls, 1 programs" in out
    assert "<lambda>: 2 calls, 1 programs" in out
    assert len(list(tmp_path.glob("page*"))) == 5  # what it compiled, two modules in eager, and one that leads to all


def test_a_closed_pipe_is_no_error():
    """As of `python -m thunder options | head -1`."""
    command = [sys.executable, "-m", "thunder", "options"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0
