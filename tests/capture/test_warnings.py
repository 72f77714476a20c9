"""`warnings.warn` in programs: given by each call, at the user's line, under the filters of that call."""

import sys
import warnings

import torch

import thunder


def test_warnings_are_given_by_each_call():
    def f(x):
        warnings.warn("always", UserWarning)
        if x.sum().item() > 1:
            warnings.warn(RuntimeWarning(f"large {x.sum().item()}"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("never")
        warnings.warn("caller", DeprecationWarning, stacklevel=2)
        return x + 1

    compiled = thunder.jit(f, fallback="error")
    for values in ([0.0, 0.0], [1.0, 1.0], [2.0, 1.0], [0.0, 0.5]):
        messages = []
        for program in (f, compiled):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                program(torch.tensor(values))
            messages.append([(w.category, str(w.message), w.filename, w.lineno) for w in caught])
        assert messages[1] == messages[0] and len(messages[0]) in (2, 3)


def test_a_warning_once_a_line():
    def f(x):
        warnings.warn("once")
        return x

    for program in (f, thunder.jit(f, fallback="error")):
        vars(sys.modules[__name__]).pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for i in range(3):
                program(torch.ones(i + 2))
        assert len(caught) == 1
