"""f-strings, formatting, string methods."""

import datetime

from tests.interpreter.corpus.kit import program


@program(3)
def basic_forms(n):
    return f"{n:>4}|{n!r}|{'x' * n}" + "%d" % n, f"", f"plain", f"{{{n}}}", f"{n}{n}"  # noqa: F541


@program("a'b", 3.14159)
def conversions_and_specs(s, x):
    return f"{s!r} {s!s} {s!a} {x:.2f} {x:8.3f}| {x:<10}| {x!r:>12}"


@program(7, 3)
def nested_specs(width, precision):
    return f"{3.14159:{width}.{precision}f}|{'c':^{width}}|{'r':{'*'}>{precision}}|{width!r:>{precision + 2}}"


@program(5)
def debug_form(n):
    value = n * 2
    return f"{n=} {value = } {n + value=:>5} {value=!r:>4}"


@program()
def expressions_in_fields():
    d = {"k": [1, 2]}
    return f"{d['k'][0] + 1} {[x for x in d]} {(lambda v: v * 2)(3)} {'a' if d else 'b'} {d!r:.5}"


@program()
def multi_line():
    a, b = 1, "two"
    return f"""first {a}
    second {b!r}
    {a:03}""" f" tail {b}" " plain"


@program()
def custom_format():
    class Money:
        def __init__(self, v):
            self.v = v

        def __format__(self, spec):
            return f"${self.v:{spec or '.2f'}}"

        def __repr__(self):
            return "Money!"

    m = Money(3.5)
    return f"{m} {m:.0f} {m!r} {m!r:>10} {m!s}"


@program()
def dates():
    d = datetime.date(2024, 2, 29)
    return f"{d:%Y/%m/%d} {d!s} {d + datetime.timedelta(days=1):%a %d}"


@program()
def format_errors():
    out = []
    for f in (lambda: f"{'s':d}", lambda: f"{[]:>5}", lambda: "{}{}".format(1), lambda: "%d" % "x", lambda: f"{object():x}"):
        try:
            out.append(f())
        except Exception as e:  # noqa: BLE001
            out.append((type(e).__name__, str(e).split(" object")[0]))
    return out


@program()
def format_traceback():
    class Bad:
        def __format__(self, spec):
            raise ValueError(f"bad {spec}")

    return f"ok {Bad():abc}"


@program()
def percent_and_format_methods():
    return (
        "%s %r %5.1f %x %%" % ("a", "b", 2.25, 255),
        "{0}-{1}-{0} {name!r:>5} {d[k]} {o.real}".format(1, 2, name="n", d={"k": "v"}, o=3),
        "{:,} {:+} {:e}".format(1234567, 5, 12345.678),
        "%(a)s" % {"a": 1},
    )


@program("The quick brown fox")
def string_methods(s):
    return (
        s.upper(), s.split(), s.replace("quick", "slow"), s.find("q"), s.title(), s.partition(" "), s.startswith("The"),
        s.center(25, "*"), "-".join(reversed(s.split())), s.swapcase(), s.count("o"), s.encode()[:3], s[4:9][::-1], s.lower().index("f"),
    )  # fmt: skip


@program()
def translate_and_strip():
    table = str.maketrans("abc", "xyz", "d")
    return "abcd".translate(table), "  x ".strip(), "xxyxx".strip("x"), "a,b;c".replace(";", ",").split(","), "a\nb".splitlines()


@program()
def joins_and_generators():
    return ", ".join(f"{k}={v}" for k, v in {"a": 1, "b": 2}.items()), "".join(map(str, range(5))), "".join(sorted("hello"))


@program()
def unicode_text():
    s = "naïve – ünï 🎉"
    return len(s), s.encode("utf-8"), s[::-1], ascii(s), [ord(c) for c in s[:3]], s.casefold(), "\N{BULLET}", "\u00e9"


@program("level")
@program("abc")
def palindrome(s):
    return s == s[::-1], all(a == b for a, b in zip(s, reversed(s), strict=True))


@program("hello world", 3)
def caesar(s, k):
    out = []
    for c in s:
        if c.isalpha():
            base = ord("a")
            out.append(chr((ord(c) - base + k) % 26 + base))
        else:
            out.append(c)
    return "".join(out)


@program("aaabbc")
def run_length(s):
    import itertools

    packed = [(c, len(list(g))) for c, g in itertools.groupby(s)]
    return packed, "".join(c * n for c, n in packed) == s


@program()
def regular_expressions():
    import re

    pattern = re.compile(r"(?P<word>\w+)=(?P<n>\d+)")
    return [m.groupdict() for m in pattern.finditer("a=1, bc=22")], pattern.sub(lambda m: m["n"] + m["word"], "x=5"), re.split(r"\W+", "a, b;c")


@program()
def text_wrap_and_template():
    import string
    import textwrap

    return textwrap.wrap("the quick brown fox jumps", 10), string.Template("$a ${b}").substitute(a=1, b=2), textwrap.dedent("  x\n    y")


@program(1994)
def roman(n):
    out = ""
    for v, s in [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]:
        while n >= v:
            out += s
            n -= v
    return out


@program()
def bytes_and_struct():
    import struct

    packed = struct.pack("<ih", 1, -2)
    return packed, struct.unpack("<ih", packed), memoryview(b"abc")[1:].tobytes(), int.from_bytes(b"\x01\x02", "big"), b"%d" % 5


@program()
def printing():
    print("a", 1, None, sep="-", end="!\n")
    print(*[1, 2], sep="")
    print(f"{3:>5}", {"k": [1]})
    print()
