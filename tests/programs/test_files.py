"""Files that are damaged, forged, cut off, or written by others: none is run, none stops a program, one warning."""

import json
import os
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch

import thunder
from tests import fresh
from thunder.errors import ProgramFileError, ProgramFileWarning
from thunder.programs import files, keep, text
from thunder.programs.describe import digest
from thunder.programs.operators import is_operation
from thunder.programs.text import Damaged
from thunder.runtime import disk_cache

EXECUTED: list[str] = []


def watch(event: str, arguments: tuple) -> None:
    if (
        WATCHING
        and event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")
        and "true" in str(arguments)
    ):
        EXECUTED.append(event)  # a C compiler is started as well


WATCHING: list[bool] = []
sys.addaudithook(watch)


@pytest.fixture
def watched():
    EXECUTED.clear()
    WATCHING.append(True)
    yield
    WATCHING.clear()
    assert not EXECUTED


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return {"out": self.layer(x).exp() * 2.0, "last": [x]}


MODEL, X = Model(), torch.randn(2, 3)


def keep_one(cache):
    thunder.jit(MODEL, keep_programs=True)(X)
    (path,) = cache.glob("*.program")
    return path


def run_again(monkeypatch) -> tuple[int, list]:
    """How many programs were loaded, and the warnings. The result is eager's."""
    monkeypatch.setattr(keep, "_warned", [])
    compiled = thunder.jit(MODEL, keep_programs=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            result = compiled(X)
    assert torch.equal(result["out"], MODEL(X)["out"])
    return thunder.compile_stats(compiled).loaded, caught


def damaged(whole: bytes, generator: random.Random) -> bytes:
    """The content of a file as accidents and forgers leave it."""
    position, other = sorted(generator.sample(range(len(whole)), 2))
    kind = generator.randrange(9)
    if kind == 0:
        return whole[:position]
    if kind == 1:
        return whole[:position] + bytes([whole[position] ^ (1 << generator.randrange(8))]) + whole[position + 1 :]
    if kind == 2:
        return whole[:position] + generator.randbytes(generator.randrange(1, 40)) + whole[position:]
    if kind == 3:
        return whole[:position] + whole[other:]
    if kind == 4:
        return whole[:position] + whole[position:other] * 2 + whole[other:]
    if kind == 5:
        return generator.randbytes(len(whole))
    if kind == 6:
        return bytes(len(whole))
    if kind == 7:  # with a hash, which anybody can compute
        content = json.loads(whole.partition(b"\n")[2])
        content["computation"]["text"] = 'def computation(x):\n  return torch.os.system("true")'
        text = json.dumps(content).encode()
        return f"thunder program 2 {files._hash(text, None)}\n".encode() + text
    words = [b"torch.exp", b"sin", b"import os", b"__import__('os').system('true')", b"1e9", b"null", b"[]", b'"']
    return whole.replace(generator.choice([b"torch.exp", b"2.0", b"null", b"[", b"named"]), generator.choice(words), 1)


def test_300_damaged_and_forged_files(cache, monkeypatch, watched):
    path = keep_one(cache)
    whole, generator = path.read_bytes(), random.Random(0)
    secret = files.key_of_user()
    assert run_again(monkeypatch) == (1, [])
    for number in range(300):
        content = damaged(whole, generator)
        if content == whole:
            continue
        path.write_bytes(content)
        with pytest.raises(Damaged):
            files.read(path, secret)
        if number % 10 == 0:  # which takes longer
            loaded, said = run_again(monkeypatch)
            assert loaded == 0 and [w.category for w in said] == [ProgramFileWarning], (number, said)
            assert run_again(monkeypatch) == (1, [])  # capture has written it again
    path.write_bytes(whole)


def changed(document: dict, path: str, value) -> dict:
    """A copy of a document with another value at a path."""
    copied = inside = json.loads(json.dumps(dict(document)))
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("/"))
    for step in steps:
        inside = inside[step]
    inside[last] = value
    return copied


BODY = "def {}(x, t_layer_weight, t_layer_bias):\n  return {}"
ATTACKS = [
    'torch.os.system("true")', "torch.hub.load('a', 'b')", 'torch.load("file")', "x.__class__.__mro__[1]",
    "(x).add", "x[0].tolist()", "[y for y in x]", "(lambda: 1)()", "torch.serialization.os.system('true')",
    "__import__('os')", "eval('1')", "print(1)", "open('file', 'w')", "torch.Tensor.__class__", "f'{x}'",
    "torch.nn.functional.__builtins__", "torch.ops.load_library('x')", "torch.classes.load_library('x')",
    "x if x else 1", "(y := torch._C)", "torch.distributed.rpc", "x; import os", "x\nimport os", "x\ntorch.manual_seed(1)",
    "Tensor.tolist.__self__", "torch.utils.cpp_extension.load('a')", "torch.jit.load('a')", "exec", "x @ x",
]  # fmt: skip
EPILOGUES = [
    "values.__class__", 'C0("true")', "fn.forward.__globals__['os'].system('true')", "[v for v in values]",
    "eval('1')", "(lambda: 1)()", "fn.cuda()", "args[0].numpy()",
]  # fmt: skip
FUNCTIONS = [
    ["function", "os", "system", ""], ["builtin", "posix", "system"], ["builtin", "builtins", "eval"],
    ["builtin", "builtins", "exec"], ["class", "subprocess", "Popen"], ["module", "os"], ["builtin", "posix", "remove"],
    ["function", "thunder.core.codegen", "compile_source", ""], ["function", "subprocess", "run", ""],
    ["no such thing"], ["class"], 3, {"a": 1},
]  # fmt: skip


ONE, UNKNOWN, CALLED = [[[], 1]], [[["n9"], 1]], [[[["system", [[[], 1]]]], 1]]
NUMBERS = [
    [ONE, ">", [[[], 3]], True], [UNKNOWN, ">", ONE, True], [CALLED, "==", ONE, True], [ONE, "~", ONE, True], ["x"],
    [[[[["floordiv", ONE, []]], 1]], "==", ONE, True], [[[[["floordiv", ONE]], 1]], "==", ONE, False],
]  # fmt: skip


def forged(document: dict) -> list[dict]:
    """Documents that a writer with the user's key, or a mistake of ours, could make: what they say is not run."""
    name = document["computation"]["name"]
    forgeries = [changed(document, "computation/text", BODY.format(name, attack)) for attack in ATTACKS]
    call = BODY.format(name, "harmless(x)")
    forgeries += [
        changed(changed(document, "computation/text", call), "computation/objects", {"harmless": said})
        for said in FUNCTIONS
    ]
    forgeries += [
        changed(document, "epilogue", f"def epilogue(fn, args, kwargs, values):\n  return {attack}")
        for attack in EPILOGUES
    ]
    forgeries += [
        changed(document, "epilogue", f"@{attack}\ndef epilogue(fn, args, kwargs, values):\n  return 1")
        for attack in ("print", "fn")
    ]
    for i, (_, step, key, *_) in enumerate(document["questions"]["sources"]):
        if step in ("attr", "item") and isinstance(key, str):
            forgeries.append(changed(document, f"questions/sources/{i}", [0, "call", ["tuple", "cpu"]]))
            forgeries.append(changed(document, f"questions/sources/{i}/2", "no_such_name"))
    for relation in NUMBERS:
        forgeries.append(changed(document, "questions/relations", [relation]))
    for part in document:
        if part not in (
            "prologue",
            "epilogue",
            "connection",
            "without",
            "plain",
            "backward",
            "metadata",
            "codes",
            "regions",
        ):
            forgeries += [changed(document, part, value) for value in (None, [], {}, "text", 3)]
    return forgeries


def test_forged_documents_with_the_right_hash(cache, monkeypatch, watched):
    """Whoever can write with the user's key can write programs; what is no program is refused all the same."""
    MODEL.requires_grad_(True)
    path = keep_one(cache)
    secret = files.key_of_user()
    document = files.read(path, secret)
    attacks = forged(document)
    assert len(attacks) > 100
    for attack in attacks:
        files.write(path, attack, secret)
        loaded, messages = run_again(monkeypatch)
        parts = [part for part in attack if attack[part] != document.get(part)]
        # no collectives are none; a name that another question found absent is absent under another name as well
        assert loaded == 0 or parts in ([], ["questions"]), [(part, attack[part]) for part in parts]
        assert len(messages) <= 1 and all(w.category is ProgramFileWarning for w in messages)
    files.write(path, document, secret)
    assert run_again(monkeypatch) == (1, [])


def test_code_is_that_of_its_text_and_of_who_has_the_key(cache, monkeypatch, tmp_path, watched):
    path = keep_one(cache)
    secret = files.key_of_user()
    document = files.read(path, secret)
    codes = document["codes"]
    texts = {digest(document[part]["text"]) for part in ("computation", "backward")}
    assert texts < set(codes) and len(codes) == 3, "the third is the prologue's, which is written anew"
    checked = []
    real = text.check_computation
    monkeypatch.setattr(text, "check_computation", lambda *arguments: checked.append(arguments) or real(*arguments))
    assert run_again(monkeypatch) == (1, []) and not checked
    name = document["computation"]["name"]
    other = changed(document, "computation/text", BODY.format(name, "torch.os.system('true')"))
    files.write(path, other, secret)  # its code is that of another text
    assert run_again(monkeypatch)[0] == 0 and checked
    own = tmp_path / "own" / "model.program"
    own.parent.mkdir(mode=0o700)
    document = files.read(thunder.precompile(MODEL, X, path=own), None)
    assert "codes" not in document
    content = json.dumps(document | {"codes": codes}).encode()
    own.write_bytes(f"thunder program 2 {files._hash(content, None)}\n".encode() + content)
    assert "codes" not in files.read(own, None)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes are POSIX's")
def test_files_that_others_may_write_to(cache, monkeypatch, tmp_path):
    path = keep_one(cache)
    for loose, mode in ((path, 0o666), (cache, 0o777), (path, 0o620)):
        before = loose.stat().st_mode
        loose.chmod(mode)
        loaded, messages = run_again(monkeypatch)
        assert loaded == 0 and "others may write" in str(messages[0].message)
        loose.chmod(before)
    real = tmp_path / "elsewhere"
    path.rename(real)
    path.symlink_to(real)
    assert run_again(monkeypatch)[0] == 0
    path.unlink()
    real.rename(path)
    assert run_again(monkeypatch) == (1, [])
    (tmp_path / "programs.key").chmod(0o644)  # others may have read it
    assert run_again(monkeypatch)[0] == 0


@pytest.mark.parametrize("part", ["plain", "computation", "backward"])
def test_every_text_of_a_users_file_is_looked_at(part, tmp_path, watched):
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    path = thunder.precompile(MODEL, X, path=directory / "model.program")
    document = files.read(path, None)
    name = document[part]["name"]
    for attack in ATTACKS:
        files.write(path, changed(document, f"{part}/text", BODY.format(name, attack)), None)
        with pytest.raises(ProgramFileError):
            thunder.load(path, MODEL, trusted=True)
        with pytest.raises(ProgramFileError, match="this user did not write it"):
            thunder.load(path, MODEL)


def test_a_file_of_others_is_loaded_where_it_is_trusted(tmp_path, cache):
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    path = thunder.precompile(MODEL, X, path=directory / "model.program")
    (tmp_path / "programs.key").unlink()  # as on another machine
    with pytest.raises(ProgramFileError, match=r"this user did not write it .*trusted=True"):
        thunder.load(path, MODEL)
    assert torch.equal(thunder.load(path, MODEL, trusted=True)(X)["out"], MODEL(X)["out"])


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners and modes are POSIX's")
def test_a_cache_that_others_may_write_to_is_left_alone(cache, monkeypatch, tmp_path):
    keep_one(cache)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    tmp_path.chmod(0o777)
    monkeypatch.setattr(keep, "_warned", [])
    compiled = thunder.jit(lambda x: MODEL(x)["out"] * 2, keep_programs=True)
    with pytest.warns(Warning):
        compiled(X)
    assert thunder.compile_stats(compiled).loaded == 0
    tmp_path.chmod(0o700)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("seed", range(3))
def test_forged_semantics(tmp_path, seed):
    """Files with other operators, sizes, strides and values: no file is written, no process is started. They
    run in a process of their own, since a kernel of PyTorch's may end it."""
    tmp_path.chmod(0o700)
    count = 300
    done = fresh.run(Path(__file__).with_name("forging.py"), tmp_path, seed, 0, count)
    assert "WRITES" not in done.stdout and "STARTS" not in done.stdout and done.returncode not in (3, 4), done.stdout
    numbers = [line for line in done.stdout.splitlines() if line.isdigit()]
    assert len(numbers) == count and "done: " in done.stdout or done.returncode < 0, done.stderr


def test_operators_that_programs_may_name():
    aten = torch.ops.aten
    for operator in (
        aten.from_file, aten.set_.source_Tensor, aten.set.source_Tensor, aten.resize_, aten.resize, aten.record_stream,
        aten._sparse_coo_tensor_unsafe, aten.sparse_coo_tensor.indices_size, aten.fbgemm_linear_int8_weight, aten.data,
        aten.fill_.Scalar, aten.copy_, aten.sin.out, torch.ops.prims.sin, torch.from_file,
        torch.load, torch.Tensor.numpy, torch.Tensor.untyped_storage, torch.Tensor.set_, torch.Tensor.register_hook,
        torch.Tensor.backward, print, os.system, keep.keep, files.write, text.function_of, disk_cache.write_whole,
    ):  # fmt: skip
        assert not is_operation(operator), operator
    for operator in (
        aten.sin, aten.add.Tensor, aten.gelu_backward.default, aten.native_layer_norm_backward.default,
        aten.embedding_dense_backward, torch.sin, torch.nn.functional.linear, torch.Tensor.mul_, torch.zeros, torch.gru,
    ):  # fmt: skip
        assert is_operation(operator), operator


def test_a_file_of_the_users_own(tmp_path):
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    path = thunder.precompile(MODEL, X, path=directory / "model.program")
    assert torch.equal(thunder.load(path, MODEL)(X)["out"], MODEL(X)["out"])
    with pytest.raises(Exception, match="give the function or the module"):
        thunder.load(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ProgramFileError, match="damaged"):
        thunder.load(path, MODEL)
    path.write_bytes(whole)
    path.chmod(0o666)
    with pytest.raises(ProgramFileError, match="others may write"):
        thunder.load(path, MODEL)
