"""`python -m thunder cache`, and what it says."""

import argparse

import pytest
import torch

import thunder
from thunder.programs import files, keep
from thunder.programs.commands import add_command


def doubled(x):
    return x * 2


def printed(x):
    print("hello")
    return x


@pytest.fixture
def command(cache, capsys):
    """Runs `cache ...`; what it prints."""
    thunder.jit(doubled, keep_programs=True)(torch.ones(3))
    thunder.jit(doubled, keep_programs=True)(torch.ones(4))
    thunder.jit(printed, keep_programs=True)(torch.ones(3))
    capsys.readouterr()

    def run(*words: str) -> str:
        parser = argparse.ArgumentParser()
        add_command(parser.add_subparsers())
        options = parser.parse_args(["cache", *words])
        options.command(options)
        return capsys.readouterr().out

    return run


def names(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines() if "test_commands." in line]


def test_ls(command, cache):
    out = command("ls")
    assert out == command() and len(names(out)) == 3
    assert "test_commands.doubled  1 operations" in out and "not kept: it calls Python code on the host" in out
    (path, _) = cache.glob("*.program")
    path.write_bytes(path.read_bytes()[:-1])
    assert "not used: its hash is not that of its content" in command("ls")


def test_explain(command, monkeypatch):
    assert "looked at by this process" in command("explain", "doubled")
    assert "on the host" in command("explain", "printed")
    assert "keep_programs=True" in command("explain", "nothing")
    here = keep.versions(False)
    monkeypatch.setattr("thunder.programs.commands.versions", lambda anywhere: [*here[:2], ("torch", "9.9"), *here[3:]])
    assert "not looked at by this process: versions: torch was 2" in command("explain", "doubled")


def test_diff(command):
    first, second = names("\n".join(x for x in command("ls").splitlines() if "doubled" in x))
    out = command("diff", first, second)
    assert '["tuple", 3]' in out or '["Size", 3]' in out or "[3]" in out
    assert "f32[3]" in out and "f32[4]" in out
    with pytest.raises(SystemExit, match="0 programs"):
        command("diff", first, "none")


def test_rm(command, cache):
    with pytest.raises(SystemExit, match="--all"):
        command("rm")
    assert "removed 0 files" in command("rm", "--unusable")
    (path, other) = cache.glob("*.program")
    path.write_bytes(b"")
    assert "removed 1 files" in command("rm", "--unusable")
    assert "removed 1 files" in command("rm", "printed") and files.read(other, files.key_of_user())
    assert "removed 1 files" in command("rm", "--all") and not [*cache.iterdir()]
