"""What the process has besides the objects of a program: constants and settings of libraries, and how they are changed
between two calls. Both sides live in one process, so a change says the whole new value."""

from __future__ import annotations

import builtins
import contextlib
import csv
import decimal
import gc
import io
import locale
import logging
import math
import os
import string
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch


class Surrounding(NamedTuple):
    """imports: what its statements need. reads: expressions; {C} is a class of the program. changes: statements. state:
    what the changes change. again: sets that back."""

    imports: str
    reads: tuple[str, ...]
    changes: tuple[str, ...]
    state: Callable[[], Any] = int
    again: Callable[[], Any] = int


_PI, _DIGITS, _E = math.pi, string.digits, numpy.e
_LOCALE = locale.setlocale(locale.LC_ALL)
_LIMIT, _INTERVAL, _THRESHOLD = sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()


def _of_decimal() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        return repr(decimal.getcontext()).split("flags")[0]


def _unregister() -> None:
    with contextlib.suppress(csv.Error):
        csv.unregister_dialect("zork")


def _dialect() -> str:
    try:
        return csv.get_dialect("zork").delimiter
    except csv.Error:
        return ""


ROWS = [
    Surrounding(
        "math", ("math.pi * 2", "vars(math)['pi']", "getattr(math, 'pi')", "math.__dict__.get('zork', 0)"),
        ("math.pi = 3", "math.pi = 3.141592653589793", "math.zork = 4", "vars(math).pop('zork', None)"),
        lambda: (math.pi, vars(math).get("zork")), lambda: (setattr(math, "pi", _PI), vars(math).pop("zork", None)),
    ),
    Surrounding(
        "string", ("string.digits", "len(string.digits)", "'5' in string.digits"),
        ("string.digits = '12'", "string.digits = '0123456789'"),
        lambda: string.digits, lambda: setattr(string, "digits", _DIGITS),
    ),
    Surrounding(
        "numpy as np", ("np.e * 2", "np.e"), ("np.e = 3", "np.e = 2.718281828459045"),
        lambda: numpy.e, lambda: setattr(numpy, "e", _E),
    ),
    Surrounding(
        "decimal, statistics",
        ("decimal.Decimal('1.2345678') * 3", "sum([decimal.Decimal('1.234567'), decimal.Decimal(2)]) / 3",
         "str(decimal.Decimal('1E+9'))", "decimal.getcontext().prec", "decimal.Decimal('1.2345').quantize(decimal.Decimal('.01'))",
         "statistics.mean([decimal.Decimal('1.234567'), decimal.Decimal(2)])", "round(decimal.Decimal('2.5'))",
         "f\"{decimal.Decimal('12345.678'):.2f}\"", "max(decimal.Decimal(1) / 3, decimal.Decimal(2))"),
        ("decimal.getcontext().prec = 4", "decimal.getcontext().prec = 28", "decimal.getcontext().capitals = 0",
         "decimal.getcontext().rounding = decimal.ROUND_UP", "decimal.setcontext(decimal.Context(prec=9))"),
        _of_decimal, lambda: decimal.setcontext(decimal.Context()),
    ),
    Surrounding(
        "csv, io",
        ("list(csv.reader(['a|b,c'], 'zork'))", "csv.list_dialects()", "next(csv.reader(['a|b,c'], 'excel'))",
         "[*csv.DictReader(['a|b,c', '1|2,3'], dialect='zork')]", "csv.get_dialect('zork').delimiter",
         "(lambda s: (csv.writer(s, 'zork').writerow([1, 2]), s.getvalue()))(io.StringIO())"),
        ("csv.register_dialect('zork', delimiter='|')", "csv.register_dialect('zork', delimiter=';')"),
        _dialect, _unregister,
    ),
    Surrounding(
        "sys", ("sys.getrecursionlimit()", "sys.getswitchinterval()"),
        ("sys.setrecursionlimit(1234)", f"sys.setrecursionlimit({_LIMIT})", "sys.setswitchinterval(0.01)"),
        lambda: (sys.getrecursionlimit(), sys.getswitchinterval()),
        lambda: (sys.setrecursionlimit(_LIMIT), sys.setswitchinterval(_INTERVAL)),
    ),
    Surrounding(
        "gc", ("gc.get_threshold()", "gc.get_debug()"), ("gc.set_threshold(701)", "gc.set_threshold(700, 10, 10)"),
        gc.get_threshold, lambda: gc.set_threshold(*_THRESHOLD),
    ),
    Surrounding(
        "builtins", ("zork", "zork + 1", "builtins.zork", "hasattr(builtins, 'zork')", "[zork for _ in range(2)]"),
        ("builtins.zork = 3", "builtins.zork = 4", "builtins.zork = [5]", "vars(builtins).pop('zork', None)"),
        lambda: repr(vars(builtins).get("zork")), lambda: vars(builtins).pop("zork", None),
    ),
    Surrounding(
        "sys, types", ("__import__('zork').x", "'zork' in sys.modules", "sys.modules['zork'].x"),
        ("sys.modules['zork'] = types.ModuleType('zork'); sys.modules['zork'].x = 3",
         "sys.modules['zork'] = types.ModuleType('zork'); sys.modules['zork'].x = 4", "sys.modules.pop('zork', None)"),
        lambda: getattr(sys.modules.get("zork"), "x", None), lambda: sys.modules.pop("zork", None),
    ),
    Surrounding(
        "locale", ("locale.localeconv()['decimal_point']", "locale.setlocale(locale.LC_ALL)", "locale.str(1.5)",
                   "format(1234.5, 'n')", "locale.getlocale()[1]"),
        ("locale.setlocale(locale.LC_ALL, 'C')", "locale.setlocale(locale.LC_ALL, 'C.UTF-8')"),
        lambda: locale.setlocale(locale.LC_ALL), lambda: locale.setlocale(locale.LC_ALL, _LOCALE),
    ),
    Surrounding(
        "os", ("os.environ.get('ZORK')", "os.getenv('ZORK', 1)", "'ZORK' in os.environ", "os.path.expandvars('$ZORK')"),
        ("os.environ['ZORK'] = 'a'", "os.environ['ZORK'] = 'b'", "os.environ.pop('ZORK', None)"),
        lambda: os.environ.get("ZORK"), lambda: os.environ.pop("ZORK", None),
    ),
    Surrounding(
        "logging", ("logging.getLogger('zork').isEnabledFor(10)", "logging.getLogger('zork').getEffectiveLevel()",
                    "logging.getLogger('zork').level"),
        ("logging.getLogger('zork').setLevel(10)", "logging.getLogger('zork').setLevel(30)", "logging.disable(40)",
         "logging.disable(0)"),
        lambda: (logging.getLogger("zork").level, logging.root.manager.disable),
        lambda: (logging.getLogger("zork").setLevel(0), logging.disable(0)),
    ),
    Surrounding(
        "xml.etree.ElementTree as ET", ("ET.tostring(ET.Element('{http://zork}a'))",),
        ("ET.register_namespace('zork', 'http://zork')", "ET.register_namespace('zorks', 'http://zork')"),
        lambda: xml.etree.ElementTree._namespace_map.get("http://zork"),  # pyright: ignore[reportAttributeAccessIssue]
        lambda: xml.etree.ElementTree._namespace_map.pop("http://zork", None),  # pyright: ignore[reportAttributeAccessIssue]
    ),
    Surrounding(
        "torch, numpy as np",
        ("str(torch.tensor([1.23456]))", "str(np.array([1.23456]))", "f'{torch.tensor([1.23456])}'",
         "repr(np.array([1.23456]))"),
        ("torch.set_printoptions(precision=2)", "torch.set_printoptions(profile='default')",
         "np.set_printoptions(precision=3)", "np.set_printoptions(precision=8)"),
        lambda: (torch._tensor_str.PRINT_OPTS.precision, numpy.get_printoptions()["precision"]),
        lambda: (torch.set_printoptions(profile="default"), numpy.set_printoptions(precision=8)),
    ),
    Surrounding(
        "types", ("[k.__name__ for k in {C}.__subclasses__()]", "len({C}.__subclasses__())",
                  "len(type.__subclasses__({C}))"),
        ("Zork = type('Zork', ({C},), {{}})", "Zorks = type('Zorks', ({C},), {{}})"),
    ),
]  # fmt: skip


def state() -> str:
    """What the changes change, in words."""
    return repr([row.state() for row in ROWS])


def restore() -> None:
    for row in ROWS:
        row.again()
