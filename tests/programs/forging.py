"""Forged files of programs, which `test_forged_semantics.py` loads and runs in a process of their own.

python forging.py DIRECTORY SEED START STOP: writes files, numbered from START to STOP, whose hash is right and whose text
is changed in what it means: other operators (ATen's, PyTorch's, Python's), other sizes, other strides, other values,
other orders. Each is refused, since nobody signed it; then it is loaded with `trusted=True` and called. Prints the
number of each before it runs, and at the end how many ran. An audit hook ends the process where anything but a file in
DIRECTORY is written, or a process is started.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import re
import resource
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.errors import ProgramFileError, ThunderError
from thunder.programs import files

torch.set_num_threads(1)
torch.manual_seed(0)
X, INDICES = torch.randn(4, 6), torch.randint(0, 6, (4,))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.embedding = nn.Linear(6, 6), nn.LayerNorm(6), nn.Embedding(6, 6)

    def forward(self, x, i):
        return F.gelu(self.norm(self.linear(x) + self.embedding(i)))


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x, i):
        return F.max_pool2d(self.norm(self.conv(x.view(1, 1, 4, 6))), 2).flatten()


def places(x, i):
    y = x.gather(1, i[:, None] % 6) + x.index_select(0, i % 4).cumsum(0)
    y = y.index_add(0, i % 4, x).scatter(0, i[None] % 4, 2.0)
    return F.nll_loss(y.log_softmax(1), i), y.topk(2)[0], y.as_strided((3, 3), (6, 1)), y.t()[1:].exp()


def loss(x, i):
    return F.cross_entropy(x @ x.t() @ x, i) + (x[i > 2].sum() if x.shape[0] > 5 else x[1:].std())


PROGRAMS = {"layers": Layers(), "image": Image(), "places": places, "loss": loss}


def all_operators() -> list[str]:
    """Everything that a forger could name: the operators of ATen, functions of PyTorch, and some of Python's."""
    aten = [name for name in dir(torch.ops.aten) if not name.startswith("__")]
    names = [f"torch.ops.aten.{n}" for n in aten] + [f"torch.ops.aten.{n}.default" for n in aten]
    for text in map(str, torch._C._jit_get_all_schemas()):
        if text.startswith("aten::") and "." in (name := text.partition("(")[0].removeprefix("aten::")):
            names.append(f"torch.ops.aten.{name}")
    names += [f"torch.{n}" for n in dir(torch)] + [f"torch.nn.functional.{n}" for n in dir(F)]
    names += (
        [f"Tensor.{n}" for n in dir(torch.Tensor)] + dir(builtins) + ["torch._C._nn." + n for n in dir(torch._C._nn)]
    )
    return names


MEMORY = 16 << 30  # bytes of addresses that the process may have
OPERATORS = all_operators()
BUILDING = [n for n in OPERATORS if re.search("from_file|unsafe|set_|resize|strided|sparse|storage|unpool|backward", n)]
NUMBERS = ["0", "1", "-1", "2", "6", "7", "50000000", "-50000000", "2**40", "1.5", "None", "True", '"victim"']
NUMBERS += ["[1, 1]", "(4, 6)", "(1000000,)", "torch.int64", "torch.float32", "torch.sparse_coo", "[]"]


def changed(text: str, generator: random.Random) -> str:
    """A computation's text with another meaning."""
    lines = text.split("\n")
    body = [i for i, line in enumerate(lines) if re.match(r"  [\w\[\]().*, ]+ = .*\(|  return", line)]
    for _ in range(generator.choice((1, 1, 2, 4))):
        i = generator.choice(body)
        line, kind = lines[i], generator.randrange(7)
        values = re.findall(r"\b(?:t\d+|x|i|t_\w+)\b", " ".join(lines[: i + 1])) or ["x"]
        called = re.search(r"= ([\w.]+)\(", line)
        if kind <= 1 and called:  # another operator
            other = generator.choice(BUILDING if generator.random() < 0.4 else OPERATORS)
            lines[i] = line.replace(called[1] + "(", other + "(", 1)
        elif kind == 2:  # another value
            lines[i] = re.sub(r"\bt\d+\b(?=[,)])", lambda m: generator.choice(values), line, count=1)
        elif kind == 3:  # another number
            lines[i] = re.sub(r"(?<=[(, ])-?\d+(?=[,)\]])", lambda m: generator.choice(NUMBERS), line)
        elif kind == 4:  # one more line
            arguments = ", ".join(generator.choice([*values, *NUMBERS]) for _ in range(generator.randrange(1, 5)))
            other = generator.choice(BUILDING if generator.random() < 0.5 else OPERATORS)
            lines.insert(i, f"  t9{generator.randrange(99)} = {other}({arguments})")
        elif kind == 5:
            j = generator.choice(body)
            lines[i], lines[j] = lines[j], lines[i]
        else:
            lines[i] = line.replace("(", f"({generator.choice(NUMBERS)}, ", 1)
        body = [i for i, line in enumerate(lines) if re.match(r"  [\w\[\]().*, ]+ = .*\(|  return", line)]
    return "\n".join(lines)


def watch(directory: str):
    """The process ends where something is written outside of a directory, or a process is started."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[1] and set("wax+") & set(arguments[1]):
            if not os.path.abspath(arguments[0]).startswith((directory, "/dev/null")):
                print(f"WRITES {arguments[0]}", flush=True)
                os._exit(3)
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"):
            print(f"STARTS {event} {arguments}", flush=True)
            os._exit(4)

    return hook


def main(directory: str, seed: int, start: int, stop: int) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(directory)
    os.chmod(directory, 0o700)
    originals = {}
    for name, function in PROGRAMS.items():
        path = Path(directory) / f"{name}.program"
        thunder.precompile(function, X.clone().requires_grad_(), INDICES, path=path)
        originals[name] = dict(files.read(path, None))
    before = set(os.listdir(directory))
    sys.addaudithook(watch(directory))
    ran = refused = 0
    for number in range(start, stop):
        generator = random.Random(f"{seed} {number}")
        name = generator.choice(list(PROGRAMS))
        document = json.loads(json.dumps(originals[name]))
        parts = [part for part in ("computation", "backward", "plain") if isinstance(document.get(part), dict)]
        part = generator.choice(parts)
        document[part]["text"] = changed(document[part]["text"], generator)
        path = Path(directory) / "forged.program"
        print(number, flush=True)
        files.write(path, document, None)
        (Path(directory) / "text").write_text(document[part]["text"])
        try:
            thunder.load(path, PROGRAMS[name])
        except ProgramFileError:
            pass
        else:
            print("ACCEPTS", flush=True)
            os._exit(5)
        try:
            result = thunder.load(path, PROGRAMS[name], trusted=True)(X.clone().requires_grad_(), INDICES)
            results = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
            sum(x.sum() for x in results if x.requires_grad).backward()
            ran += 1
        except ThunderError:
            refused += 1
        except Exception:  # noqa: BLE001  an error of PyTorch's is one way to end
            ran += 1
        others = set(os.listdir(directory)) - before - {"forged.program", "text"}
        if others:
            print(f"WRITES {others}", flush=True)
            os._exit(3)
    print(f"done: {ran} ran, {refused} refused", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
