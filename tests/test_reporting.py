"""`thunder.report`: a page of HTML, looked at by its elements."""

import json
import random
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
import torch.distributed as dist

import thunder
from thunder.compiled import compiled_of
from thunder.inspect.profile import profile

EMPTY = {"meta", "input", "br", "link"}


class Element:
    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.inside, self.text = tag, dict(attributes), [], ""

    def all(self, tag=None, **attributes):
        """The elements in this one, in order."""
        elements = []
        for e in self.inside:
            if (tag is None or e.tag == tag) and attributes.items() <= e.attributes.items():
                elements.append(e)
            elements += e.all(tag, **attributes)
        return elements

    def rows(self, key):
        """The texts of the cells of a table, by row."""
        (table,) = self.all("table", id=key)
        (body,) = table.all("tbody")
        return [[cell.whole.strip() for cell in row.inside] for row in body.inside]

    @property
    def whole(self):
        return self.text


class Page(HTMLParser):
    """Elements of a page, all of which are closed where they should be."""

    def __init__(self, html):
        super().__init__()
        self.root = Element("root", {})
        self.open = [self.root]
        self.feed(html)
        self.close()
        assert self.open == [self.root], "every element is closed"

    def handle_starttag(self, tag, attributes):
        e = Element(tag, attributes)
        self.open[-1].inside.append(e)
        if tag not in EMPTY:
            self.open.append(e)

    def handle_startendtag(self, tag, attributes):
        self.open[-1].inside.append(Element(tag, attributes))

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        for e in self.open:
            e.text += data


def page_of(*args, **kwargs):
    html = thunder.report(*args, **kwargs).html
    root = Page(html).root
    for e in root.all():
        assert not {"src", "srcset"} & e.attributes.keys(), "a page needs no network"
        assert e.attributes.get("href", "#").startswith("#")
    assert len(root.all("script")) == 1, "what a program prints is no part of the page's script"
    return root


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))  # <b>block</b>


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_page_of_a_training_step(tmp_path):
    compiled, x = thunder.jit(Model()), torch.randn(8, 16)
    page = page_of(compiled, tmp_path / "page.html", x)
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert [s.attributes["id"] for s in page.all("section")] == [a.attributes["href"][1:] for a in page.all("a")]
    (entry,) = compiled_of(compiled).programs
    forward, backward = page.rows("program0"), page.rows("program1")
    operations = [[b for b in t.bound_symbols if b.sym.python_printer is None] for t in (entry.forward, entry.backward)]
    assert [len(forward), len(backward)] == [*map(len, operations)], "statements that free memory have no rows"
    assert all(" = " in row[4] for row in (*forward, *backward))
    first = next(row for row in forward if "linear" in row[4])
    assert first[4].startswith("t") and "return x + self.down" in first[5] and first[6] == "blocks.0.up"
    assert "<b>block</b>" in first[5], "shown as text"
    saved = thunder.examine.saved_for_backward(compiled)
    assert [row[0] for row in page.rows("saved")] == [v.name for v in saved]
    modules = [row[6] for row in page.rows("by_module")]
    assert {"(the model)", "blocks", "blocks.0", "blocks.1.down"} <= set(modules)
    assert any("x.square().mean()" in row[6] for row in page.rows("by_line"))
    lines = [row[6].partition(" ")[0] for row in page.rows("by_line")]
    assert len(lines) == len(set(lines)), "a line has one row"
    passes = [e for e in page.all("div") if e.attributes.get("class") == "passes"]
    assert len(passes[1].all("details")) == len(entry.computation_traces)
    assert "def prologue" in page.all("section", id="guards")[0].text


def test_the_times_of_a_page_are_the_profiles():
    measured = profile(Model(), torch.randn(8, 16))
    page = page_of(measured)
    cells = [c for key in ("program0", "program1") for t in page.all("table", id=key) for c in t.all("td")]
    times = [float(c.attributes["data-n"]) for c in cells if "data-n" in c.attributes]
    assert sum(times) == pytest.approx(1e3 * measured.seconds, rel=1e-3)
    (flame,) = page.all("div", **{"class": "flame"})
    bars = {bar.attributes["title"].partition(":")[0]: bar.attributes["style"] for bar in flame.inside}
    assert {"all", "blocks", "blocks.0", "blocks.1.down"} <= set(bars)
    widths = {name: float(style.partition("width:")[2].partition("%")[0]) for name, style in bars.items()}
    assert widths["all"] == 100 and widths["blocks.0"] + widths["blocks.1"] <= widths["blocks"] + 0.01
    flops = {share.key: share.flops for share in measured.by_module()}
    assert flops["blocks.0.up"] == 3 * 2 * 8 * 16 * 32 - (2 * 8 * 16 * 32), "x needs no gradient"
    rates = {row[6]: row[4] for row in page.rows("by_module")}
    assert float(rates["blocks.0.up"].replace(",", "")) > 0
    cards = page.all("div", **{"class": "cards"})[0].text
    assert f"{1e3 * measured.step:.3f} ms" in cards and f"{measured.covered:.1%}" in cards
    (chart,) = page.all("svg")
    assert int(chart.attributes["data-peak"]) == measured.peak
    (axis,) = page.all("div", **{"class": "axis"})
    top = [span.text for span in axis.all("span")]
    assert top[0] == "0.00 MiB" and top[-1] == f"{measured.peak / 2**20:.2f} MiB"
    assert all("none of" not in row[1] for row in page.rows("holders")), "saved values count for their lines"
    held = [float(row[0]) for row in page.rows("holders")]
    assert held == sorted(held, reverse=True) and held[0] > 0
    points = [p.split(",") for p in chart.all("polyline")[0].attributes["points"].split()]
    assert len(points) == len(measured.costs) and min(float(y) for _, y in points) == pytest.approx(4.0)


def test_other_systems_beside():
    measured = profile(Model(), torch.randn(8, 16)).compare("eager")
    assert list(measured.beside) == ["eager"] and "a step of eager" in page_of(measured).all("section")[0].text
    with pytest.raises(ValueError, match="'jax' is not a system; valid: 'eager', 'torch.compile'"):
        measured.compare("jax")


def test_a_page_without_a_measured_call():
    compiled = thunder.jit(Model())
    with pytest.raises(TypeError, match="was not called yet"):
        thunder.report(compiled)
    with pytest.raises(TypeError, match="is not a compiled function"):
        thunder.report(torch.sin)
    compiled(torch.randn(8, 16))
    page = page_of(compiled)
    assert "measures a call" in page.all("section", id="lines")[0].text and not page.all("svg")
    operations = [b for b in thunder.last_traces(compiled)[-1].bound_symbols if b.sym.python_printer is None]
    assert len(page.rows("program0")) == len(operations)


def test_what_was_compiled_again_what_is_decided_and_what_runs_on_the_host(capsys):
    def f(x):
        if x.sum() > 0:
            print("positive")
            return x * random.random()
        return -x

    compiled = thunder.jit(f)
    for x in (torch.ones(3), -torch.ones(3), torch.ones(2, 2)):
        compiled(x)
    page = page_of(compiled)
    again = page.rows("recompilations")
    assert [row[0] for row in again] == ["2", "3"] and again[0][1].startswith("another path")
    assert all("compiled(x)" in row[2] for row in again)
    assert [row[3].partition("#")[2] for row in again] == ["another-path", "other-dimensions"]
    assert [row[3] for row in page.rows("paths")] == ["True", "False", "True"]
    kinds = [row[0] for row in page.rows("host_calls")]
    assert kinds == ["value", "decision", "host call", "host call"]
    assert page.rows("host_calls")[2][1:2] == ["print()"]


def test_regions_and_their_kernels():
    if thunder.get_executor("inductor").unavailable():
        pytest.skip("Inductor finds no compiler here")

    def f(x, y):
        return torch.exp(x + 1) * 2 @ (torch.exp(y + 1) * 2)

    compiled = thunder.jit(f, executors=["inductor"])
    with torch.no_grad():
        page = page_of(compiled, None, torch.ones(32, 32), torch.ones(32, 32))
    regions = [e for e in page.all("details") if e.attributes.get("class") == "region"]
    traces = thunder.last_traces(compiled)[-1:]
    assert len(regions) == len(thunder.examine.get_fusions(*traces)) > 0
    assert all("operations" in r.all("summary")[0].text for r in regions)
    assert "extern" in regions[0].text, "C++ of Inductor's"
    with_source = [r for r in regions if "extern" in r.text]
    assert len(with_source) == len({id(function) for _, function in thunder.examine.get_fusions(*traces)})


def test_communication():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def f(x):
            y = x * 2
            dist.all_reduce(y)
            return y

        compiled = thunder.jit(f)
        with torch.no_grad():
            compiled(torch.ones(4))
        (row,) = [r for r in page_of(compiled).rows("collectives") if "all_reduce" in r[0]]
        assert row[1] == "1 ranks" and "dist.all_reduce(y)" in row[4]
    finally:
        dist.destroy_process_group()


def test_a_notebook_shows_the_page_apart():
    compiled = thunder.jit(torch.sin)
    compiled(torch.ones(2))
    report = thunder.report(compiled)
    (frame,) = Page(report._repr_html_()).root.inside
    assert frame.tag == "iframe" and frame.attributes["srcdoc"] == report.html
    assert f"{len(report.html.encode()):,} bytes" in repr(report)


LOOKS = """
<script>
  addEventListener("load", () => {
    const rows = key => [...document.getElementById(key).tBodies[0].rows];
    const times = () => rows("by_line").map(row => parseFloat(row.children[0].dataset.n || "0"));
    const descends = list => list.every((n, i) => !i || n <= list[i - 1]), found = {};
    document.querySelector("#by_line th").click();
    found.once = descends(times());
    document.querySelector("#by_line th").click();
    found.twice = descends(times().reverse());
    const field = document.querySelector("input[data-for=program0]");
    field.value = "functional.GELU(t"; field.dispatchEvent(new Event("input"));
    found.visible = rows("program0").filter(row => row.offsetHeight).map(row => row.children[4].textContent);
    found.chart = document.getElementById("timeline").getBoundingClientRect().height;
    document.body.innerHTML = `<pre id="found">${JSON.stringify(found)}</pre>`;
  });
</script>
"""


def test_a_browser_sorts_and_filters_the_page(tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed here")
    path = tmp_path / "page.html"
    html = thunder.report(thunder.jit(Model()), None, torch.randn(8, 16)).html
    path.write_text(html.replace("</body>", LOOKS + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    (shown,) = Page(done.stdout).root.all("pre", id="found")
    data = json.loads(shown.text)
    assert data["once"] and data["twice"] and data["chart"] > 100
    assert len(data["visible"]) == 2 and all("functional.gelu" in text for text in data["visible"])
