"""README and the pages under docs/ run as they are printed: the Python blocks of a page in their order, in one
namespace.

A `text` block right after a Python block is what that block prints; `...` stands for whatever is there, and numbers of
temporary values and times are not compared. `python tests/test_docs.py docs/page.md` prints what the blocks print.
"""

import contextlib
import doctest
import io
import json
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import dashboard, lab_log
from tests import fresh

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    str(p.relative_to(ROOT))
    for p in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    if "```python" in p.read_text()
)

SLOW = ("docs/deploy.md", "docs/distributed.md", "docs/tutorials.md")  # more than ten seconds each


def examples(text):
    """(line before the block, code, what it is said to print or None) of each Python block of a page."""
    blocks = list(BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None]):
        if block[1] == "python":
            follows = after is not None and after[1] == "text" and not text[block.end() : after.start()].strip()
            yield text[: block.start(2)].count("\n"), block[2], after[2] if follows else None


def comparable(text):
    return re.sub(r"took \d+ milliseconds", "took 0 milliseconds", re.sub(r"\b(d_)?t\d+\b", r"\1t0", text))


def run(page):
    """What each Python block of a page prints. Lines of tracebacks are those of the page."""
    namespace, printed = {"__name__": "page"}, []
    for line, code, _ in examples(page.read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        printed.append(out.getvalue())
    return printed


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow) if p in SLOW else p for p in PAGES])
def test_pages_run_and_print_what_they_show(page):
    path, checker = ROOT / page, doctest.OutputChecker()
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "THUNDER_TIERS": "one"}
    done = fresh.run(__file__, page, "--json", cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    shown, printed = 0, json.loads(done.stdout.splitlines()[-1])  # Gloo of torch 2.9 prints before
    for (line, _, want), got in zip(examples(path.read_text()), printed, strict=True):
        if want is not None:
            if not checker.check_output(comparable(want), comparable(got), doctest.ELLIPSIS):
                pytest.fail(f"{page}:{line} shows\n{want}\nand prints\n{got}", pytrace=False)
            shown += 1
    assert shown, "a page that shows nothing cannot be wrong"


def anchors(page):
    """What a page's titles are called in links."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target, section in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert "://" in target or linked.exists(), f"{page.name} links to {target}"
            assert not section or "://" in target or section in anchors(linked), (
                f"{page.name} links to {target}#{section}"
            )


def test_the_site_keeps_pictures_and_links_between_pages():
    """Links to files that are no part of the site lead to the repository, or are words."""
    space = runpy.run_path(str(ROOT / "docs" / "links.py"))
    page, config = SimpleNamespace(file=SimpleNamespace(src_uri="design/capture.md")), SimpleNamespace(repo_url="")
    for text in ("![flow](../flow.svg)", "[page](../verify.md)", "[chapter](guards.md#one)", "[out](https://a.b)"):
        assert space["on_page_markdown"](text, page, config, None) == text
    outside = "[the code](../../thunder/api.py)"
    assert space["on_page_markdown"](outside, page, config, None) == "the code"
    config.repo_url = "https://host/name/"
    assert (
        space["on_page_markdown"](outside, page, config, None)
        == "[the code](https://host/name/blob/main/thunder/api.py)"
    )


def test_every_page_is_in_the_site():
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in (ROOT / "docs").glob("*.md"))


def test_the_page_of_the_api_is_current():
    # in a process of its own: tests register options, which a docstring lists
    done = fresh.run(ROOT / "tests/api_page.py", "-")
    assert done.stdout == (ROOT / "docs/api.md").read_text(), f"run python tests/api_page.py\n{done.stderr}"


def test_the_dashboard_is_that_of_its_data():
    data = json.loads(dashboard.DATA.read_text())
    assert dashboard.PAGE.read_text() == dashboard.page(data), "python benchmarks/dashboard.py writes it"
    assert dashboard.PICTURE.read_text() == dashboard.picture(data["rows"])


def test_the_lab_log_is_that_of_its_data():
    experiments = json.loads(lab_log.DATA.read_text())["experiments"]
    assert lab_log.PAGE.read_text() == lab_log.page(experiments), "python benchmarks/lab_log.py writes it"
    pictures = {path.name: path.read_text() for path in lab_log.PICTURES.iterdir()}
    assert pictures == lab_log.pictures(experiments)
    assert [e["code"] for e in experiments if e["code"] and not (ROOT / e["code"]).exists()] == []
    assert [r for e in experiments for r in e["rows"] if len(r) != len(e["columns"]) + 1] == []


def test_pictures_of_the_design_are_those_of_their_tables():
    space = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, picture in space["PICTURES"].items():
        assert (space["DIRECTORY"] / f"{name}.svg").read_text() == space["draw"](picture), "python docs/pictures.py"
        chapter = (space["DIRECTORY"] / f"{name.replace('_', '-')}.md").read_text()
        assert f"![{picture.description}]({name}.svg)" in chapter


def test_the_page_of_options_names_each_one():
    # in a process of its own: tests register options
    printed = fresh.run("-m", "thunder", "options", cwd=ROOT).stdout
    page = (ROOT / "docs/options.md").read_text()
    names = re.findall(r"^  (\w+): ", printed.split("\nthunder.DebugOptions")[0], re.MULTILINE)
    names += re.findall(r"^  (\w+): ", printed.split("\nthe environment")[1], re.MULTILINE)
    assert len(names) > 20
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_tour_names_each_chapter_of_the_design():
    tour = (ROOT / "docs/design.md").read_text()
    for chapter in (ROOT / "docs/design").glob("*.md"):
        title = chapter.read_text().splitlines()[0]
        assert f"[{title[2:]}](design/{chapter.name})" in tour, f"docs/design.md does not name {chapter.name}"


def test_chapters_of_the_design_name_files_that_exist():
    tree = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("**/*.py") if ".venv" not in path.parts}
    for chapter in (ROOT / "docs/design").glob("*.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|cpp|c))\b", chapter.read_text()):
            known = name.endswith(".py") and any(f"/{path}".endswith(f"/{name}") for path in tree)
            assert known or list(ROOT.glob(f"thunder/**/{name.rpartition('/')[2]}")), f"{chapter.name}: {name}"


def test_a_wrong_page_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\nx = 1\n```\n")
    assert [want for _, _, want in examples(page.read_text())] == ["3\n", None]
    assert run(page) == ["2\n", ""]


if __name__ == "__main__":
    for category in (UserWarning, RuntimeWarning):
        warnings.simplefilter("error", category)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch.distributed.checkpoint before torch 2.11
    output = run(Path(sys.argv[1]))
    print(
        json.dumps(output)
        if "--json" in sys.argv
        else "\n".join(f"--- block {i}\n{text}" for i, text in enumerate(output))
    )
