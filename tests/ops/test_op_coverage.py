"""The tool that lets PyTorch's operator database examine every operator: a part of the database, and that it notices
what is wrong. `make test-all` runs all of it."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import thunder
from benchmarks import op_coverage, operators_page
from thunder.errors import CaptureError

# PyTorch's own warnings about its own samples
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_a_part_of_the_database():
    reports = op_coverage.run(op_coverage.chosen(".*", (1, 14), seed=4), list(op_coverage.DTYPES), 3)
    assert [c for r in reports for c in r.checks if c.verdict == "wrong"] == []
    totals = op_coverage.totals(reports)
    assert totals["counts"]["total"]["forward equal"] > 500
    assert totals["counts"]["total"]["gradient equal"] > 200


def test_shards_make_up_the_database():
    parts = [op_coverage.chosen(".*", (i, 3), seed=1) for i in (1, 2, 3)]
    assert sorted(i for part in parts for i in part) == list(range(len(op_db)))
    assert parts[0] != op_coverage.chosen(".*", (1, 3), seed=2)


def _broken(change):
    """A compiler whose programs do something else."""
    compile_function = thunder.jit

    def jit(function, **options):
        compiled = compile_function(function, **options)

        class Changed:
            _compiled = compiled

            def __call__(self, *tensors):
                return change(compiled, *tensors)

            def __getattr__(self, name):
                return getattr(compiled, name)

        return Changed()

    return jit


def _refusing(run, *tensors):
    raise CaptureError("no")


def _drawing(run, *tensors):
    torch.rand(1)
    return run(*tensors)


def _writing(run, *tensors):
    result = run(*tensors)
    with torch.no_grad():
        tensors[0].add_(0)
    return result.clone()


WRONG = {
    "values": (lambda run, *tensors: run(*tensors) * 2, "wrong", "values differ"),
    "dtype": (
        lambda run, *tensors: run(*tensors).double(),
        "wrong",
        "dtype is torch.float64 where PyTorch's is torch.float32",
    ),
    "strides": (lambda run, *tensors: run(*tensors).mT.contiguous().mT, "wrong", "strides is"),
    "the same memory": (
        lambda run, *tensors: tensors[0].copy_(run(*tensors)),
        "wrong",
        "it shares memory with arguments [0, ('memory', 0)]",
    ),
    "generator": (_drawing, "wrong", "the generator stands elsewhere"),
    "an error": (lambda run, *tensors: run(*tensors).view(-5), "wrong", "RuntimeError: "),
    "a clear error": (_refusing, "clear", "cannot capture this program: no"),
}


@pytest.mark.parametrize("change, verdict, reason", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_noticed(monkeypatch, change, verdict, reason):
    monkeypatch.setattr(thunder, "jit", _broken(change))
    info = next(i for i in op_db if i.name == "sin")
    report = op_coverage.check_forward(info, torch.sin, "function", (torch.rand(3, 4),), {}, op_coverage.Report("sin"))
    assert report is not None and report[0] == verdict and report[1].startswith(reason)


def test_a_wrong_gradient_is_noticed(monkeypatch):
    info = next(i for i in op_db if i.name == "sin")
    x = torch.rand(3, 4, requires_grad=True)

    def check():
        return op_coverage.check_gradient(info, torch.sin, "function", (x,), {}, lambda out: out)

    assert check() == ("equal", "")
    monkeypatch.setattr(thunder, "jit", _broken(lambda run, x: run(x) + 0 * x.detach() + (x - x.detach())))
    assert check()[1].startswith("the gradient of tensor 0 differs")


def test_gradients_are_measured_against_float64():
    want, reference = torch.tensor([1.0, 1e-3]), torch.tensor([1.0, 1e-3 + 1e-6], dtype=torch.float64)
    assert op_coverage.close_enough(want, want, None)
    assert not op_coverage.close_enough(want + torch.tensor([0.0, 1e-4]), want, None)
    assert not op_coverage.close_enough(want + torch.tensor([0.0, 1e-4]), want, reference)
    assert op_coverage.close_enough(want + torch.tensor([0.0, 4e-6]), want, reference)
    assert not op_coverage.close_enough(torch.tensor([float("nan"), 1e-3]), want, reference)


def test_the_page_of_operators_is_current():
    written = operators_page.PAGE.read_text()
    if f"with torch {torch.__version__.split('+')[0]}; a test" not in written:
        pytest.skip("the page was made with another version of PyTorch, whose database has other operators")
    assert operators_page.page() == written, "run python benchmarks/operators_page.py"
