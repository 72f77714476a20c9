"""Every public function of the standard library's pure modules, called with tensors and containers that change.

`names` lists what there is; `calls` finds arguments for a name by trying values of a pool under CPython; `program`
makes a program of one call, with mutations of its arguments between its calls. `WRITTEN` holds the calls that no pool
finds, `LEFT_OUT` what is not called at all, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import random
import types
import warnings
from contextlib import redirect_stderr, redirect_stdout

from tests.properties.compared import Program, restored

MODULES = [
    "abc", "array", "ast", "base64", "binascii", "bisect", "calendar", "cmath", "codecs", "collections",
    "collections.abc", "colorsys", "contextlib", "contextvars", "copy", "copyreg", "csv", "dataclasses", "datetime",
    "decimal",
    "difflib", "enum", "fnmatch", "fractions", "functools", "graphlib", "hashlib", "heapq", "hmac", "html", "inspect",
    "io", "itertools", "json", "keyword", "linecache", "logging", "math", "numbers", "operator", "pathlib", "pickle",
    "posixpath", "pprint", "queue", "random", "re", "reprlib", "secrets", "shlex", "statistics", "string", "struct",
    "textwrap", "token", "traceback", "types", "typing", "unicodedata", "urllib.parse", "uuid", "warnings",
    "weakref", "zlib", "builtins", "operator", "ipaddress", "stat", "bz2", "quopri", "email.utils", "html.parser",
    "xml.sax.saxutils", "tokenize", "opcode",
]  # fmt: skip
RECEIVERS = {
    "str": "'a b'", "bytes": "b'ab c'", "bytearray": "bytearray(b'abc')", "list": "[3, 1, 2]", "tuple": "(3, 1, 2)",
    "dict": "{'a': 1, 'b': [2]}", "set": "{1, 2}", "frozenset": "frozenset([1, 2])", "int": "5", "float": "2.5",
    "complex": "1j",
    "range": "range(4)", "slice": "slice(1, 3)", "memoryview": "memoryview(b'abc')", "bool": "True",
    "collections.deque": "collections.deque([3, 1, 2])", "collections.Counter": "collections.Counter('abca')",
    "collections.OrderedDict": "collections.OrderedDict(a=1, b=[2])",
    "collections.defaultdict": "collections.defaultdict(list, a=[1])",
    "collections.ChainMap": "collections.ChainMap({'a': 1}, {'b': [2]})",
    "collections.UserDict": "collections.UserDict({'a': 1})", "collections.UserList": "collections.UserList([3, 1])",
    "collections.UserString": "collections.UserString('ab')", "fractions.Fraction": "fractions.Fraction(3, 2)",
    "decimal.Decimal": "decimal.Decimal('2.5')", "datetime.date": "datetime.date(2020, 1, 2)",
    "datetime.datetime": "datetime.datetime(2020, 1, 2, 3)", "datetime.timedelta": "datetime.timedelta(1, 2)",
    "datetime.time": "datetime.time(1, 2)",
    "pathlib.PurePosixPath": "pathlib.PurePosixPath('a/b.c')", "io.StringIO": "io.StringIO('a\\nb')",
    "io.BytesIO": "io.BytesIO(b'a\\nb')", "array.array": "array.array('d', [3.0, 1.0])",
    "random.Random": "random.Random(3)",
    "textwrap.TextWrapper": "textwrap.TextWrapper(5)", "struct.Struct": "struct.Struct('if')",
    "functools.partial": "functools.partial(max, 1)",
    "difflib.SequenceMatcher": "difflib.SequenceMatcher(None, 'ab', 'abc')",
    "difflib.Differ": "difflib.Differ()", "graphlib.TopologicalSorter": "graphlib.TopologicalSorter({'a': ['b']})",
    "string.Template": "string.Template('$a $b')", "string.Formatter": "string.Formatter()",
    "contextlib.ExitStack": "contextlib.ExitStack()",
    "re.Pattern": "re.compile('(a)(b)?')", "re.Match": "re.match('(?P<k>a)(b)?', 'ab')",
    "types.SimpleNamespace": "types.SimpleNamespace(a=1)",
    "types.MappingProxyType": "types.MappingProxyType({'a': 1})", "reprlib.Repr": "reprlib.Repr()",
    "pprint.PrettyPrinter": "pprint.PrettyPrinter(width=10)", "json.JSONEncoder": "json.JSONEncoder()",
    "json.JSONDecoder": "json.JSONDecoder()", "inspect.Signature": "inspect.signature(make)",
    "statistics.NormalDist": "statistics.NormalDist(1, 2)",
    "weakref.WeakValueDictionary": "weakref.WeakValueDictionary({'a': O})",
    "weakref.WeakKeyDictionary": "weakref.WeakKeyDictionary({O: [1]})", "weakref.WeakSet": "weakref.WeakSet([O])",
    "uuid.UUID": "uuid.UUID(int=5)",
    "ipaddress.IPv4Address": "ipaddress.IPv4Address('1.2.3.4')",
    "ipaddress.IPv4Network": "ipaddress.IPv4Network('1.2.0.0/16')", "logging.Logger": "logging.Logger('n')",
    "decimal.Context": "decimal.Context(prec=4)", "enum.Enum": "E.A",
    "contextvars.ContextVar": "contextvars.ContextVar('v', default=[1])", "calendar.Calendar": "calendar.Calendar()",
    "hmac.HMAC": "hmac.new(b'k', b'm', 'sha256')",
}  # fmt: skip
POOL = [
    "x", "2", "3", "0.5", "True", "'abc'", "'a'", "'a b'", "b'abc'", "[3, 1, 2]", "[1.5, 0.5]", "[x, x * 2]",
    "['b', 'a']", "[[1, 2], [3]]", "(1, 2)", "{'a': 1, 'b': [2]}", "{'a': x}", "{1, 2}", "collections.deque([1, 2])",
    "O()", "None",
    "types.SimpleNamespace(a=1)", "len", "str", "operator.add", "make", "O", "int", "[('a', 1), ('b', 2)]",
    "fractions.Fraction(1, 2)", "decimal.Decimal('1.5')", "datetime.date(2020, 1, 2)",
    "datetime.datetime(2020, 1, 2)", "io.StringIO('a,b\\n1,2\\n')",
    "E.A", "P(1)", "P", "math", "'%Y'", "'utf-8'", "iter([1, 2])", "range(3)", "[True, False]", "{'a': ['b']}",
    "ValueError('v')", "datetime.timedelta(1)", "datetime.time(1)", "'1'", "1j", "slice(0, 2)", "[1, 2, 3, 4]",
    "'if'", "b'YWJj'",
    "weakref.ref(O)", "collections.OrderedDict(a=1)", "lambda *a: a[0]", "random.Random(1)", "print",
    "re.compile('a')", "'a+'", "-1", "0", "numpy.arange(3.0)", "type", "O.__init__", "make.__code__", "E",
    "L([1, 2])", "bytearray(b'ab')",
    "list[int]", "typing.Union[int, str]", "'http://a.b/c?d=e'", "array.array('d', [1.0])", "'d'",
    "memoryview(b'ab')", "(3, 4)", "'sha256'", "'1.2.3.4'", "['a', 'b', 'c']", "string.Template('$a')", "object()",
    "'2020-01-02'", "[2, 3]",
]  # fmt: skip
ALIKE = [
    ["1", "2", "3"], ["0.5", "0.25", "0.75"], ["'a'", "'abc'", "'a b'", "''", "'NFC'"], ["b'abc'", "b'k'", "b'a'"],
        ["decimal.Decimal('1')", "decimal.Decimal('11')", "decimal.Decimal('101')"], ["{1, 2}", "{2}"], ["[3, 1, 2]",
        "[[1, 2], [3]]", "0", "1"],
    ["io.StringIO('a')", "'a'", "{'a': 1}"], ["io.BytesIO(b'YWJj')", "io.BytesIO(b'a')", "b'a'"],
        ["collections.deque([1, 2])", "collections.deque([3])", "1"], ["2020", "3", "1"],
        ["ipaddress.IPv4Network('1.2.3.0/24')"], ["array.array('d', [3.0])", "1", "2.0"],
    ["O()", "'a'", "E"], ["datetime.datetime(2020, 1, 2)", "'%Y'", "'2020'"], ["ast.parse('a = 1')",
        "ast.parse('b')"], ["Warning", "'f'", "'m'", "3", "UserWarning"], ["(2020, 1, 2, 3, 4, 5, 6, 7, 8)",
        "(2020, 1, 2, 3, 4, 5, 6, 7, 8, 0)"], ["''"], ["make", "O().__eq__"],
    ["'if'", "1", "2.5", "bytearray(12)", "0"], ["statistics.NormalDist(1, 2)"], ["iter([1])", "(v for v in [1])"],
        ["memoryview(bytearray(b'abc'))", "'b'", "0", "1"], ["sys_frame()", "0"],
        ["types.MappingProxyType({'a': 1})"], ["logging.makeLogRecord({'msg': 'm'})"],
]  # fmt: skip
LEFT_OUT = {
    "base64.a85encode": "hangs, which test_failures.py says",
    **dict.fromkeys(["builtins.input", "builtins.breakpoint", "builtins.help", "builtins.exit", "builtins.quit",
        "builtins.copyright", "builtins.credits", "builtins.license"], "talks to a person, or ends the process"),
    **dict.fromkeys(["builtins.open", "io.open", "io.open_code", "io.FileIO", "tokenize.open", "codecs.open",
        "pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath", "bz2.open", "bz2.BZ2File"],
        "files and consoles are host lines"),
    **dict.fromkeys(["uuid.uuid1", "uuid.uuid4", "uuid.getnode", "email.utils.make_msgid", "email.utils.localtime",
        "email.utils.formatdate"], "another result each time"),
    **dict.fromkeys(["secrets.choice", "secrets.randbits", "secrets.randbelow"],
        "draws from the system's generator"),
    **dict.fromkeys(["calendar.main", "calendar.prmonth", "calendar.prcal", "calendar.prweek", "calendar.pryear",
        "ast.main", "tokenize.main"], "reads the command line"),
    **dict.fromkeys(["logging.basicConfig", "logging.debug", "logging.info", "logging.warning", "logging.warn",
        "logging.error", "logging.exception", "logging.critical", "logging.fatal", "logging.log", "logging.shutdown",
        "logging.disable", "logging.setLoggerClass", "logging.setLogRecordFactory", "logging.captureWarnings",
        "logging.addLevelName", "warnings.simplefilter", "warnings.filterwarnings", "warnings.resetwarnings",
                     "warnings.catch_warnings", "decimal.setcontext", "codecs.register", "codecs.register_error",
                     "codecs.unregister", "copyreg.pickle", "copyreg.constructor", "copyreg.add_extension",
                     "copyreg.remove_extension", "copyreg.clear_extension_cache",
                     "linecache.clearcache", "linecache.checkcache", "linecache.updatecache", "linecache.lazycache",
                     "random.seed", "random.setstate", "csv.register_dialect", "csv.unregister_dialect",
                     "csv.field_size_limit", "re.purge"], "changes the whole process"),
    **dict.fromkeys(["builtins.exec", "builtins.eval", "builtins.compile", "builtins.__import__",
        "builtins.__build_class__", "builtins.globals", "builtins.locals", "inspect.currentframe", "inspect.stack",
        "inspect.trace", "traceback.print_stack", "traceback.format_stack", "traceback.extract_stack"],
        "tests of the interpreter cover it"),
    **dict.fromkeys(["copy.error", "queue.Queue", "queue.LifoQueue", "queue.PriorityQueue", "queue.SimpleQueue",
        "sched.scheduler", "codecs.EncodedFile", "contextlib.redirect_stdout", "contextlib.redirect_stderr",
        "contextlib.chdir"], "holds locks, or the process's streams"),
}  # fmt: skip
WRITTEN = {
    "itertools.count": "list(itertools.islice(itertools.count(len([3, 1, 2])), 3))",
    "itertools.cycle": "list(itertools.islice(itertools.cycle([3, 1, 2]), 5))",
    "itertools.repeat": "list(itertools.repeat([3, 1], 2))",
    "secrets.token_bytes": "len(secrets.token_bytes(3))", "secrets.token_hex": "len(secrets.token_hex(3))",
    "secrets.token_urlsafe": "len(secrets.token_urlsafe(3))",
}  # fmt: skip
HEAD = """
import abc, array, ast, base64, binascii, bisect, calendar, cmath, codecs, collections, collections.abc
import colorsys, contextlib, contextvars, copy, copyreg, csv, dataclasses, datetime, decimal, difflib, enum
import fnmatch, fractions, functools, graphlib, hashlib, heapq, hmac, html, inspect, io, itertools, json
import keyword, linecache, logging, math, numbers, operator, pathlib, pickle, posixpath, pprint, queue, random
import re, reprlib, secrets, shlex, statistics, string, struct, textwrap, token, traceback, types, typing
import unicodedata, urllib.parse, uuid, warnings, weakref, zlib, builtins, ipaddress, stat, bz2, quopri, sched
import configparser, email.utils, html.parser, xml.sax.saxutils, tokenize, opcode
import numpy, torch
x = torch.tensor([1.0, 2.0, 3.0])
class O:
    def __init__(self): self.a, self.b = 1, [2]
    def __eq__(self, o): return type(o) is O and self.a == o.a
    def __lt__(self, o): return True
    def __hash__(self): return 3
def sys_frame():
    import sys
    return sys._getframe()
class L(list): pass
class E(enum.Enum):
    A = 1
    B = 'b'
@dataclasses.dataclass
class P:
    a: object = 1
    b: object = 2
def make(a=1, *rest, k=2): return [a, len(rest), k]
def taken(r):
    if isinstance(r, collections.abc.Iterator): return [type(r).__name__, *itertools.islice(r, 4)]
    return r
"""


def names() -> list[str]:
    """Functions and classes of the modules, and methods of the types that there is a receiver for."""
    seen_names: dict[str, None] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        for n in public:
            value = getattr(module, n, None)
            if not callable(value) or isinstance(value, type(typing_special())):
                continue
            home = getattr(value, "__module__", None) or module_name
            annotation = type(value).__module__ == "typing" or home == "typing" and isinstance(value, type)
            if annotation or isinstance(value, type) and inspect.isabstract(value):
                continue  # names for annotations
            if isinstance(value, types.ModuleType) or isinstance(value, type) and issubclass(value, BaseException):
                continue
            if home.split(".")[0].lstrip("_") not in (
                module_name.split(".")[0],
                "builtins",
                "operator",
                "",
            ) and not getattr(module, "__all__", None):
                continue
            if isinstance(value, type) and issubclass(value, ast.AST) and n not in ("AST", "Module", "Name"):
                continue  # a hundred classes that are made in one way
            seen_names[f"{module_name}.{n}"] = None
    for kind in RECEIVERS:
        value = eval_kind(kind)
        for n, member in inspect.getmembers(value):
            if callable(member) and (n[0] != "_" or n in METHODS):
                seen_names[f"{kind}().{n}"] = None
    return list(seen_names)


METHODS = [
    "__len__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__add__", "__radd__",
    "__iadd__", "__mul__", "__rmul__", "__sub__", "__or__", "__and__", "__ior__", "__eq__", "__ne__", "__lt__",
    "__le__", "__hash__", "__repr__", "__str__",
    "__format__", "__bool__", "__int__", "__float__", "__index__", "__reversed__", "__neg__", "__divmod__",
    "__round__", "__mod__", "__call__", "__copy__", "__deepcopy__", "__truediv__", "__pow__",
]  # fmt: skip


def typing_special():
    import typing

    return typing.Any if not isinstance(typing.Any, type) else typing.Union


def eval_kind(kind: str):
    module, _, name = kind.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), name)


def space() -> dict:
    module = types.ModuleType("generated_program")
    import sys

    sys.modules["generated_program"] = module
    exec(HEAD, vars(module))
    return vars(module)


def calls(name: str, rng: random.Random, wanted: int = 3, tries: int = 400) -> list[tuple[str, list[str]]]:
    """(expression over a0, a1, ..., texts of the arguments) that CPython evaluates without an error."""
    if name in WRITTEN:
        return [(WRITTEN[name], [])]
    receiver, _, method = name.partition("().")
    first = [RECEIVERS[receiver]] if method else []
    candidates: list[tuple[str, list[str]]] = []
    boring = 0
    for attempt in range(tries):
        count = rng.choice([0, 1, 1, 1, 2, 2, 3]) if attempt else 0
        chosen = [rng.choice(POOL) for _ in range(count)]
        if attempt % 4 == 3 or attempt > tries * 3 // 4:  # of one type, which most functions of several arguments want
            alike = rng.choice(ALIKE)
            chosen = [rng.choice(alike) for _ in range(rng.choice([1, 2, 2, 3, 3, 4]))]
        if method and attempt % 5 == 4:
            chosen[:1] = first
        chosen = first + chosen
        more_arguments = ", ".join(f"a{i}" for i in range(len(first), len(chosen)))
        expression = f"a0.{method}({more_arguments})" if method else f"{name}({more_arguments})"
        if (expression, chosen) in candidates:
            continue
        try:
            table = space_of_pool()
            values = {f"a{i}": eval(t, table) for i, t in enumerate(chosen)}
            eval(f"taken({expression})", table | values)
        except Exception:  # noqa: BLE001 - most arguments do not fit
            continue
        interesting = any(t[0] in "[{cxO" or "x" in t for t in chosen)
        if not interesting:
            boring += 1
            if boring > 1 and attempt < tries // 2:
                continue
        candidates.append((expression, chosen))
        if len(candidates) >= wanted:
            break
    if not candidates and not method and isinstance(eval(name, space_of_pool()), type):
        return [(f"isinstance(a0, {name})", [rng.choice(POOL)])]  # a type that one does not make
    return candidates


_space: dict = {}


def space_of_pool() -> dict:
    if not _space:
        _space.update(space())
    return _space


def changes(at: str, text: str, rng: random.Random) -> str:
    """A statement that changes an argument."""
    if text.startswith(("[", "collections.deque", "L(", "collections.UserList")):
        return rng.choice([f"{at}.append({at}[0])", f"{at}[0] = {at}[1]", f"{at}.reverse()", f"{at}.pop()"])
    if text.startswith(
        (
            "{'",
            "collections.Ordered",
            "collections.defaultdict",
            "collections.Counter",
            "collections.UserDict",
            "collections.ChainMap",
        )
    ):
        return rng.choice([f"{at}['a'] = 5", f"{at}['n'] = 6", f"v = {at}.pop('a'); {at}['a'] = v"])
    if text.startswith("{"):
        return f"{at}.add(7)"
    if text.startswith(("O()", "P(", "types.Simple")):
        return f"{at}.a = [4]"
    if text.startswith("bytearray"):
        return f"{at}.append(65)"
    if text.startswith("array"):
        return f"{at}.append(4.0)"
    if text == "x":
        return rng.choice([f"{at} = {at} + 1", f"{at} = {at}[:2]", f"{at} = {at}.double()"])
    if text.replace(".", "").lstrip("-").isdigit():
        return rng.choice([f"{at} = {at} + 1", f"{at} = float({at})", f"{at} = bool({at})"])
    if text.startswith("'"):
        return f"{at} = {at} + 'z'"
    return "pass"


def program(name: str, call: tuple[str, list[str]], rng: random.Random) -> Program:
    """A call of a library function, by a function or inside one, with arguments and globals that change."""
    expression, texts = call
    outside = [i for i in range(len(texts)) if rng.random() < 0.3]
    lines = [HEAD]
    reach = {}
    arguments = []
    for i, text in enumerate(texts):
        if i in outside:
            lines.append(f"a{i} = {text}")
            reach[i] = f"a{i}"
        else:
            arguments.append(f"a{i}")
            reach[i] = f"ARGS[{len(arguments)}]"
    argument_list = ", ".join(
        ["torch.tensor([1.0, 2.0, 3.0])", *(texts[i] for i in range(len(texts)) if i not in outside)]
    )
    lines.append(f"def f(x, {', '.join(arguments)}):\n    r = taken({expression})\n    return r, x * 2")
    lines.append(f"ARGS = [{argument_list}]\n")
    steps = [changes(reach[i], text, rng) for i, text in enumerate(texts)]
    return Program("\n".join(lines), (*[s for s in steps if s != "pass"][:3], "pass"))


def programs_of(name: str, seed: int = 0, wanted: int = 3) -> list[Program]:
    """Programs that call one name; none where no arguments were found."""
    rng = random.Random(f"{seed} {name}")
    _space.clear()
    quiet = io.StringIO()
    with restored(5), warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        expressions = calls(name, rng, wanted)
    return [program(name, call, rng) for call in expressions]
