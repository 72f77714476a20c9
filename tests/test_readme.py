"""The example of the README runs as it is printed."""

import re
from pathlib import Path


def test_readme_example(capsys):
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    promised = re.search(r"compiled again: (\[.*\])", example)[1]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "def prologue(" in printed and "def computation(" in printed
    assert printed.splitlines()[-1] == promised
