"""Adding an operation, a pass or an executor takes one file: what the how-to pages define, written to a file of its own,
is all there is of it.
"""

import os
import re
import sys

from tests import fresh
from tests.test_docs import ROOT, examples

DEFINES = re.compile(r"(?:@.*\n(?=@|def))*(?:def|class) .*\n(?:(?:[ )].*)?\n)*", re.MULTILINE)
IMPORTS = re.compile(r"^(?:import|from) .*$", re.MULTILINE)


def write(path, page, names, *also):
    """Writes what a page imports, and those of its definitions and statements whose text holds one of `names`."""
    code = [block for _, block, _ in examples((ROOT / "docs" / page).read_text())]
    imports = dict.fromkeys(line for block in code for line in IMPORTS.findall(block))
    defined = [text.rstrip() for block in code for text in DEFINES.findall(block) if any(n in text for n in names)]
    path.write_text("\n".join([*imports, "", "\n\n\n".join(defined), *also, ""]))


def run(tmp_path, *arguments):
    path = os.pathsep.join([str(ROOT), str(tmp_path), *sys.path])
    done = fresh.run(*arguments, cwd=ROOT, env={"PYTHONPATH": path, "THUNDER_FALLBACK": "error"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_operation_is_one_file(tmp_path):
    """Its file, given to the tests of operations, takes it through all of them."""
    write(tmp_path / "vandermonde.py", "add_an_op.md", ("def exponents", "def vander", "@vander."))
    out = run(tmp_path, "-m", "pytest", "-p", "vandermonde", "-q", "-rA", "tests/ops/test_ops.py", "-k", "vander")
    passed = set(re.findall(r"PASSED .*::(\w+)\[vander\]", out))
    assert {"test_forward_and_types_equal_pytorchs", "test_decomposition_equals_the_operation"} <= passed, out
    assert any("derivative" in name or "gradient" in name for name in passed), out


def test_a_pass_is_one_file(tmp_path):
    row = (
        'PASS = thunder.Pass("Drop Neutral", lambda trace, _: drop_neutral(trace), needs="operations")',
        "NEUTRAL = {ltorch.mul: 1.0, ltorch.add: 0.0}",
    )
    write(tmp_path / "neutral.py", "write_a_transform.md", ("def drop_neutral",), *row)
    program = """
import torch, thunder, neutral
compiled = thunder.jit(lambda x: torch.sin(x) * 1.0, passes=thunder.passes().after("Dead Code Elimination", neutral.PASS))
assert torch.equal(compiled(torch.ones(3)), torch.sin(torch.ones(3)))
print([b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name != "python_del"])
print([t.provenance.split(" (")[0] for t in thunder.last_traces(compiled)])
"""
    out = run(tmp_path, "-c", program).splitlines()
    assert out[0] == "['sin']" and "Constructed by Drop Neutral" in out[1]


def test_an_executor_is_one_file(tmp_path):
    source = """
executor = OperatorExecutor("page", version="0.1")
register_executor(executor)
executor.register_operator(
    "clipped", meta=lambda x, limit: TensorProxy(like=x), fn=fast_clipped_square, replaces=clipped_square
)
"""
    write(tmp_path / "page.py", "write_an_executor.md", ("def clipped_square", "def fast_clipped_square"), source)
    program = """
import torch, thunder, page
x = torch.linspace(-1, 1, 5)
compiled = thunder.jit(lambda x: page.clipped_square(x, 0.5) + 1, executors=["page"])
assert torch.equal(compiled(x), page.clipped_square(x, 0.5) + 1)
print([b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.name != "python_del"])
"""
    assert run(tmp_path, "-c", program).strip() == "['clipped', 'add']"
