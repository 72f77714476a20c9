"""match statements."""

import dataclasses
import enum

from tests.interpreter.corpus.kit import program


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@program(1)
@program("s")
@program(None)
@program(True)
@program(2.5)
def literals(v):
    match v:
        case None:
            return "none"
        case True:
            return "true"
        case 1 | 2:
            return "small"
        case "s":
            return "string"
        case -1.5 | 2.5:
            return "float"
        case _:
            return "other"


@program([])
@program([1])
@program([1, 2])
@program((1, 2, 3, 4))
@program("ab")
def sequences(v):
    match v:
        case []:
            return "empty"
        case [x]:
            return "one", x
        case [x, y]:
            return "two", x, y
        case [first, *middle, last]:
            return first, middle, last
        case _:
            return "no sequence"


@program({"kind": "a", "v": 1})
@program({"kind": "b", "v": 2, "extra": 3})
@program({})
def mappings(d):
    match d:
        case {"kind": "a", "v": v}:
            return "a", v
        case {"kind": k, **rest}:
            return k, rest
        case {}:
            return "any mapping"


@program()
def classes_by_keyword_and_position():
    out = []
    for v in (Point(0, 0), Point(0, 5), Point(3, 4), "p", 7):
        match v:
            case Point(x=0, y=0):
                out.append("origin")
            case Point(0, y):
                out.append(("axis", y))
            case Point(x, y) if x < y:
                out.append(("below", x, y))
            case str(s):
                out.append(s)
            case int():
                out.append("int")
    return out


@program()
def guards_and_fallthrough():
    out = []
    for n in (5, 50, -1):
        match n:
            case x if x < 0:
                out.append("negative")
            case x if x > 10:
                out.append("large")
            case x:
                out.append(x)
    return out


@program()
def or_patterns_with_captures():
    out = []
    for v in ([1, "a"], {"n": 2}, Point(3, 3)):
        match v:
            case [n, _] | {"n": n} | Point(x=n):
                out.append(n)
    return out


@program()
def as_patterns():
    match [1, [2, 3]]:
        case [int() as a, [2 as b, _] as rest]:
            return a, b, rest


@program()
def value_patterns():
    out = []
    for c in (Color.RED, Color.BLUE, 1):
        match c:
            case Color.RED:
                out.append("r")
            case Color.BLUE:
                out.append("b")
            case _:
                out.append("?")
    return out


@program()
def nested_patterns():
    shapes = [
        {"type": "circle", "center": (0, 0), "r": 2},
        {"type": "poly", "points": [(0, 0), (1, 0), (1, 1)]},
        {"type": "group", "of": [{"type": "circle", "center": (1, 1), "r": 1}]},
    ]

    def area(s):
        match s:
            case {"type": "circle", "center": (x, y), "r": r}:
                return x + y + r * r * 3
            case {"type": "poly", "points": [(x0, _), *others]}:
                return x0 + len(others)
            case {"type": "group", "of": [*parts]}:
                return sum(area(p) for p in parts)

    return [area(s) for s in shapes]


@program()
def failed_match_keeps_captures():
    x = "before"
    match (1, 2):
        case (x, 3):
            return "matched"
    return x


@program()
def too_many_positional():
    match Point(1, 2):
        case Point(a, b, c):
            return a, b, c


@program()
def class_without_match_args():
    class P:
        pass

    match P():
        case P(a):
            return a


@program()
def pattern_is_no_class():
    thing = 5
    match 5:
        case thing():
            return "no"


@program()
def duplicate_attribute():
    match Point(1, 2):
        case Point(1, x=1):
            return "no"


@program()
def match_args_custom():
    class P:
        __match_args__ = ("b", "a")

        def __init__(self):
            self.a, self.b = 1, 2

    class Q:
        __match_args__ = ["a"]

    match P():
        case P(x, y):
            first = (x, y)
    try:
        match Q():
            case Q(x):
                pass
    except TypeError as e:
        return first, str(e)


@program()
def missing_attribute_does_not_match():
    class P:
        pass

    match P():
        case P(z=1):
            return "no"
        case P():
            return "yes"


@program()
def mapping_with_default_dict():
    import collections

    d = collections.defaultdict(int, a=1)
    match d:
        case {"b": 0}:
            return "made"
        case {"a": 1}:
            return "kept", dict(d)


@program()
def user_sequences_and_mappings():
    import collections.abc

    class S(collections.abc.Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return i * 10 if i < 2 else [][0]

    match S():
        case [a, b]:
            return a, b


@program("go north")
@program("drop sword shield")
@program("quit")
def command_parser(text):
    match text.split():
        case ["go", ("north" | "south") as direction]:
            return f"going {direction}"
        case ["drop", *objects]:
            return objects
        case [single]:
            return single


@program()
def builtin_class_patterns():
    out = []
    for v in (1, 1.5, "s", b"b", [1], (2,), {"k": 1}, {3}, True, bytearray(b"x")):
        match v:
            case bool(b):
                out.append(("bool", b))
            case int(i):
                out.append(("int", i))
            case float(f):
                out.append(("float", f))
            case str(s) | bytes(s) | bytearray(s):
                out.append(("text", s))
            case list([x]) | tuple([x]):
                out.append(("seq", x))
            case dict(d):
                out.append(d)
            case set(s):
                out.append(s)
    return out


@program()
def expression_evaluator():
    def ev(e):
        match e:
            case int() | float():
                return e
            case ("+", *args):
                return sum(map(ev, args))
            case ("*", a, b):
                return ev(a) * ev(b)
            case ("let", str(name), v, body):
                return ev(substitute(body, name, ev(v)))
            case _:
                raise SyntaxError(e)

    def substitute(e, name, v):
        match e:
            case str(n) if n == name:
                return v
            case tuple():
                return tuple(substitute(x, name, v) for x in e)
            case _:
                return e

    return ev(("let", "x", ("+", 1, 2, 3), ("*", "@" and "x", 7)))
