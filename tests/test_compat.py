"""`thunder.compat`: the table of PyTorch's private names, what it gives where a name is missing, and the rule that
keeps them there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
import torch

import thunder
from tests import fresh
from tests.private_names import ROOT, offenders, private_names
from thunder import compat
from thunder.compat import names
from thunder.compat.names import BY_NAME, NEWEST, OLDEST, PRIVATE, MissingName, Private, missing, version


def test_no_other_file_says_a_private_name():
    assert offenders() == []


def test_the_rule_sees_every_way_to_say_one():
    source = """
import torch._dynamo
import torch.nn.functional as F
from torch._C import x
from torch.utils import _pytree
from thunder.compat import set_grad_enabled
aten = torch.ops.aten
F._pad
aten._conj.default
"torch._functorch"
torch.nn.Module.__call__
"use torch._check in words"
"""
    assert [line for line, _ in private_names("import torch" + source)] == [2, 4, 5, 6, 8, 9, 9, 10]


def test_each_row_is_found_in_the_versions_it_was_tried_on():
    tried = [
        row
        for row in PRIVATE
        if ".".join(map(str, version())) in row.tried.split(", ") and (torch.backends.cuda.is_built() or not row.cuda)
    ]
    assert [row.path for row in tried if row.find() is None] == []
    assert all(
        tuple(map(int, OLDEST.split("."))) <= tuple(map(int, v.split("."))) <= tuple(map(int, NEWEST.split(".")))
        for row in PRIVATE
        for v in row.tried.split(", ")
    )


# rows of what is written as a method or an attribute of a value: these and kernels are in the table so that `python -m
# thunder` says when they are gone
_OF_VALUES = {
    "version_of",
    "base_of",
    "is_view",
    "storage_address",
    "schema_of",
    "overload_name",
    "operator_name",
    "forward_ad_level",
    "foreach_add",
    "group_backend",
}


def test_each_row_is_used_and_named_once():
    text = "\n".join(p.read_text() for p in (ROOT / "thunder").rglob("*.py"))
    used = (
        set(re.findall(r"compat\.(\w+)", text))
        | set(re.findall(r'"(\w+)": ', text))
        | {f"functorch_{n}" for n in re.findall(r'"(\w+)"', text)}
        | {f"global{n}" for n in re.findall(r'"(_\w+)"', text)}
        | _OF_VALUES
    )
    assert [row.name for row in PRIVATE if row.name not in used and not row.name.startswith("aten_")] == []
    assert len(BY_NAME) == len(PRIVATE)


def test_a_missing_name_says_what_is_lost_or_has_a_substitute():
    row = Private(
        "engine",
        "torch.autograd._no_such_engine",
        "backward() inside of programs",
        "backward() inside of programs raises",
    )
    with pytest.raises(
        MissingName,
        match=r"has no torch.autograd._no_such_engine, which thunder uses for backward\(\) inside of programs. "
        r"Without it: .* raises",
    ):
        row.value()
    assert row.find() is None and Private("no", "torch._nothing.at.all", "", "", lambda: 7).value() == 7
    assert compat.operators("_no_such_operator") == () and not hasattr(compat, "no_such_name")
    with pytest.raises(MissingName, match="no_such_kernel"):
        compat.kernel("no_such_kernel")(torch.ones(1))


_WITHOUT = """
import torch
for name in "_get_sdp_priority_order _StaticCudaLauncher".split():
    if hasattr(torch._C, name):
        delattr(torch._C, name)
del torch._C._dynamo.guards.TensorGuards, torch.autograd.graph._engine_run_backward
import thunder
from thunder.compat.names import missing
x = torch.randn(4, 3, requires_grad=True)
f = thunder.jit(lambda x: (x.sin() * 2).sum())
f(x).backward()
torch.testing.assert_close(x.grad, x.detach().cos() * 2)
print(sorted(row.path.rpartition(".")[2] for row in missing()))
"""


def test_a_pytorch_without_some_names_runs_what_does_not_need_them():
    process = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert "_engine_run_backward" in process.stdout and "TensorGuards" in process.stdout


def test_main_prints_what_is_missing():
    printed = fresh.run("-m", "thunder").stdout
    assert "private names of PyTorch: " in printed and all(row.path in printed for row in missing())


@pytest.mark.parametrize("running", [(2, 8), (2, 99)])
def test_a_pytorch_that_was_not_tried_is_a_warning(running, monkeypatch):
    monkeypatch.setattr(names, "version", lambda: running)
    names.warn_of_untried_version.cache_clear()
    with pytest.warns(UserWarning, match=f"thunder was tried on PyTorch {OLDEST} to {NEWEST}, this is "):
        thunder.jit(torch.sin)
    thunder.jit(torch.cos)  # said once
    names.warn_of_untried_version.cache_clear()


@pytest.fixture
def interruptible():
    """Ctrl-C raises, which a process in the background of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_an_import(interruptible):
    done = []
    with pytest.raises(KeyboardInterrupt):
        with names.interrupted_later():
            signal.raise_signal(signal.SIGINT)
            done.append("import")
        done.append("behind")
    assert done == ["import"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


INTERRUPTED = """
import os, signal, sys, torch, thunder

def interrupt(event, arguments):
    if event == "import" and arguments[0] == "torch._inductor.lowering" and not interrupted:
        interrupted.append(event)
        signal.raise_signal(signal.SIGINT)

interrupted = []
sys.addaudithook(interrupt)
compiled, x = thunder.jit(lambda x: x.sin() + 1, executors=["inductor"]), torch.ones(300)
try:
    compiled(x)
except KeyboardInterrupt:
    print("interrupted")
torch.testing.assert_close(compiled(x), x.sin() + 1)
print(len(compiled.programs))
"""


@pytest.mark.slow
def test_an_interrupt_while_inductor_is_imported_leaves_it_usable():
    done = fresh.run("-c", INTERRUPTED)
    assert done.returncode == 0 and done.stdout.split() == ["interrupted", "1"], done.stdout + done.stderr
