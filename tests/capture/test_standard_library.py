"""Programs that use the standard library: what they return, print and leave in files is what eager's leave, in each of
three calls."""

import contextlib
import difflib
import functools
import gc
import io
import os
import weakref
from pathlib import Path

import pytest
import torch

import thunder
from thunder.capture import policy

# name: the lines of a function of x, before `return x * 2`; what is compiled is one program for each
PROGRAMS = {
    "subprocess": "subprocess.run(['true'])",
    "output": "text = subprocess.check_output(['echo', 'a'], text=True)\nprint(text)",
    "output with a number": "n = int(subprocess.check_output(['echo', '3']))\nx = x * n",
    "captured output": "done = subprocess.run(shlex.split('echo a b'), capture_output=True, text=True)\nprint(done.stdout)",
    "pipe": "p = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\nprint(p.communicate(b'x'))",
    "popen": "with os.popen('echo a') as f:\n    print(f.read())",
    "sockets": "a, b = socket.socketpair()\na.send(b'x')\nprint(b.recv(1))\na.close()\nb.close()",
    "directories": "os.makedirs('a/b/c', exist_ok=True)\nshutil.rmtree('a')",
    "paths": "p = pathlib.Path('d')\np.mkdir()\n(p / 'a').write_text('x')\np.rename('e')\nshutil.rmtree('e')",
    "copies": "pathlib.Path('q').write_text('a')\nshutil.copy('q', 'r')\nx = x * os.path.getsize('r')",
    "walk": "n = 0\nfor root, dirs, files in os.walk('.'):\n    n += len(files)\nopen(f'f{n}', 'w').close()\nx = x * n",
    "glob": "x = x * len(glob.glob('*'))\nopen(str(len(os.listdir('.'))), 'w').close()",
    "scandir": "x = x * sum(1 for e in os.scandir('.'))\npathlib.Path(str(time.time_ns())).touch()",
    "compared files": "pathlib.Path('q').write_text('a')\npathlib.Path('r').write_text('a')\nprint(filecmp.cmp('q', 'r'))",
    "csv": "with open('x.csv', 'a') as f:\n    csv.writer(f).writerow([1, 2, float(x.sum())])",
    "csv of dicts": "with open('y.csv', 'a') as f:\n    w = csv.DictWriter(f, ['a', 'b'])\n    w.writeheader()\n"
    "    for i in range(3):\n        w.writerow({'a': i, 'b': x.mean().item() + i})",
    "csv read": "with open('z.csv', 'a') as f:\n    f.write('a,b\\n1,2\\n')\nwith open('z.csv') as f:\n"
    "    rows = list(csv.DictReader(f))\nprint(rows)",
    "json": "with open('x.json', 'w') as f:\n    json.dump({'a': x.tolist(), 'n': x.shape[0]}, f)",
    "pickle": "with open('p', 'wb') as f:\n    pickle.dump({'a': [1, 2], 's': x.sum().item()}, f)\n"
    "with open('p', 'rb') as f:\n    print(pickle.load(f))",
    "gzip": "with gzip.open('x.gz', 'wb') as f:\n    f.write(b'abc')\nwith gzip.open('x.gz') as f:\n    print(f.read())",
    "bz2": "with bz2.open('x.bz2', 'wb') as f:\n    f.write(b'abc')\nwith bz2.open('x.bz2') as f:\n    print(f.read())",
    "zip": "with zipfile.ZipFile('x.zip', 'w') as z:\n    z.writestr('a', 'b')\nwith zipfile.ZipFile('x.zip') as z:\n"
    "    print(z.namelist(), z.read('a'))",
    "tar": "open('q', 'a').close()\nwith tarfile.open('x.tar', 'w') as t:\n    t.add('q')\nwith tarfile.open('x.tar') as t:\n"
    "    print(t.getnames())",
    "shelve": "with shelve.open('s') as d:\n    d['n'] = d.get('n', 0) + 1\n    print(d['n'])",
    "printed elsewhere": "with contextlib.redirect_stdout(io.StringIO()) as o:\n    print('a', x.sum().item())\nprint(o.getvalue())",
    "traceback": "try:\n    raise ValueError('a')\nexcept ValueError:\n    o = io.StringIO()\n    print('b', file=o)\nprint(o.getvalue())",
    "arguments": "p = argparse.ArgumentParser()\np.add_argument('--a', type=int, default=3)\nx = x * p.parse_args([]).a",
    "configuration": "c = configparser.ConfigParser()\nc.read_string('[a]\\nb=2')\nx = x * c.getint('a', 'b')",
    "statistics": "x = x * statistics.mean([v.item() for v in x])",
    "text": "print(textwrap.dedent(f'  a {x.sum().item():.3f}'))",
    "message": "m = email.message.EmailMessage()\nm['Subject'] = 'a'\nm.set_content(str(x.mean().item()))\nprint(m.as_string())",
    "settings": "os.environ['THUNDER_TEST'] = str(int(os.environ.get('THUNDER_TEST', '0')) + 1)\nprint(os.environ['THUNDER_TEST'])",
    "directory": "with contextlib.chdir('/'):\n    print(os.getcwd())\nprint(os.getcwd() == '/')",
    "absolute": "open('n', 'a').close()\nprint(os.path.basename(os.path.abspath('n')))",
    "signal": "print(signal.getsignal(signal.SIGINT) is not None)",
    "selectors": "s = selectors.DefaultSelector()\ns.close()",
    "map of a file": "pathlib.Path('q').write_text('abc')\nwith open('q', 'r+b') as f:\n    m = mmap.mmap(f.fileno(), 0)\n"
    "    print(m[:1])\n    m.close()",
}
MODULES = (
    "argparse bz2 configparser contextlib csv email.message filecmp glob gzip io json mmap os pathlib pickle selectors "
    "shelve shlex shutil signal socket statistics subprocess tarfile textwrap time traceback zipfile"
).split()


def test_what_is_read_in_the_end_was_not_given():
    """The program may change a list that a class would have been given, were it not for another argument."""

    def f(x):
        gc.is_tracked(difflib.SequenceMatcher(a=["a"], b=["b"]))  # an object of the host, from then on
        rows = ["a"]
        ratio = difflib.SequenceMatcher(a=rows, b=["a"], isjunk=lambda row: row == "b").ratio()
        rows.append("c")
        return x * len(rows) * ratio

    assert thunder.jit(f)(torch.ones(2)).tolist() == [2.0, 2.0]


def a_closure_of_the_library():
    class Own:
        pass

    own = Own()
    return functools.singledispatch(lambda x: own), weakref.ref(own)


def test_functions_are_known_by_their_code():
    """Asking the policy about a closure of the library does not keep alive what is in it."""
    closure, dead = a_closure_of_the_library()
    policy.policy(closure)
    del closure
    gc.collect()
    assert dead() is None


def program_of(body: str):
    space: dict = {}
    imports = "".join(f"import {m}\n" for m in MODULES)
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    exec(f"{imports}def f(x):\n{lines}    return x * 2\n", space)
    return space["f"]


def seen(run, folder: Path) -> list:
    """Results and printed text of three calls, and the files that are left: their names, and the content of texts."""
    folder.mkdir()
    os.environ.pop("THUNDER_TEST", None)
    results: list = []
    with contextlib.chdir(folder):
        for n in range(3):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                results.append(run(torch.arange(3.0) + n).tolist())
            results.append(out.getvalue())
    texts = (".csv", ".json")
    files = [p for p in sorted(folder.rglob("*")) if not p.name.isdigit() or len(p.name) < 10]
    return [*results, [(p.name, p.read_text() if p.suffix in texts else "") for p in files]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_eager_does(name, tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_TEST", "0")
    f = program_of(PROGRAMS[name])
    compiled = thunder.jit(f)
    assert seen(compiled, tmp_path / "ours") == seen(f, tmp_path / "eager")
    assert thunder.cache_misses(compiled) <= 3
