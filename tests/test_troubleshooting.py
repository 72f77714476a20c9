"""docs/troubleshooting.md has a section for each error, warning and reason to compile again, which messages name."""

import linecache
import pickle
import re
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import thunder
from thunder import errors
from thunder.cache.history import REASONS, section_of_reason
from thunder.capture import world
from thunder.compat import modes
from thunder.core.codegen import compile_source

PAGE = Path(__file__).resolve().parents[1] / errors.help_page()
CLASSES = [c for c in map(vars(errors).get, errors.__all__) if isinstance(c, type)]


def sections():
    titles = re.findall(r"^#+ (.*)$", PAGE.read_text(), re.MULTILINE)
    return [title.lower().replace(" ", "-") for title in titles]


def test_each_class_and_each_reason_has_a_section():
    wanted = {c.__name__.lower() for c in CLASSES} | {section for section, _ in REASONS}
    assert wanted <= {*sections()} and len(CLASSES) > 10 and len(set(sections())) == len(sections())


@pytest.mark.parametrize("kind", [c for c in CLASSES if issubclass(c, Exception) and not issubclass(c, Warning)])
def test_an_error_names_its_section(kind):
    for error in (kind("why"), pickle.loads(pickle.dumps(kind("why")))):
        text = "".join(traceback.format_exception_only(error))
        assert text.count(f"{errors.help_page()}#{kind.__name__.lower()}\n") == 1


def test_a_warning_names_its_section():
    with pytest.warns(errors.FallbackWarning, match=r"\(see docs/troubleshooting.md#fallbackwarning\)"):
        errors.warn_user("the original function runs", errors.FallbackWarning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.warn_user("nothing of ours", UserWarning)
    assert str(caught[0].message) == "nothing of ours"


def test_a_warning_points_at_the_users_line():
    """Not at the text of a program, which may be thousands of characters."""
    program = compile_source("def program(warn):\n    warn('why', UserWarning)", "program", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(errors.warn_user)
    assert caught[0].filename == __file__ and "program(" in linecache.getline(__file__, caught[0].lineno)


QUESTIONS = {
    "type": "other-types", "is": "another-object", "value": "other-values", "len": "other-containers",
    "keys": "other-containers", "elements": "other-containers", "content": "other-containers",
    "holds": "other-containers",
    "overrides": "replaced-parameters", "present": "come-or-gone", "same": "shared-memory", "shared": "shared-memory",
    "history": "shared-memory", "views": "shared-memory",
    "metadata": "other-kinds-of-tensor", "hooks": "hooks", "tensor_hooks": "hooks", "module_hooks": "hooks",
    "sharded_with": "other-values",
}  # fmt: skip


def test_the_words_of_each_question_lead_to_a_section():
    questions = [q for q in vars(world).values() if isinstance(q, world.Question)]
    assert {q.name for q in questions} == QUESTIONS.keys()
    for question in questions:
        words = question.words if isinstance(question.words, tuple) else (question.words,)
        for text in words:
            reason = text.format(path="x.y", k="z", was="3", now="4")
            assert section_of_reason(reason) == f"{errors.help_page()}#{QUESTIONS[question.name]}", reason


def test_the_words_of_modes_lead_to_a_section():
    for name in modes.MODES:
        assert section_of_reason(f"{name} was a, is b").endswith("#other-modes"), name


X = torch.ones(4, 4)
CALLS = {
    "other-sizes": ((X,), (X[:3],)),
    "other-dimensions": ((X,), (X[0],)),
    "other-kinds-of-tensor": ((X,), (X.double(),)),
    "other-arguments": ((X,), (X, 2.0)),
    "other-values": ((X, 2.0), (X, 3.0)),
    "other-containers": ((X, [1.0]), (X, [1.0, 2.0])),
    "come-or-gone": ((X, {"scale": 1.0}), (X, {})),
}


@pytest.mark.parametrize("section", CALLS)
def test_reasons_of_calls_lead_to_their_sections(section):
    def f(x, scale=1.0):
        return x * (scale.get("scale", 3.0) if type(scale) is dict else sum(scale) if type(scale) is list else scale)

    compiled = thunder.jit(f)
    for args in CALLS[section]:
        compiled(*args)
    (again,) = compiled.recompilations
    assert section_of_reason(again.reason).endswith(f"#{section}") and f"#{section})" in str(again)
