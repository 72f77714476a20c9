"""Operators over user classes: forward, reflected, in place, comparisons, containers, conversions."""

from tests.interpreter.corpus.kit import program


class Vector:
    def __init__(self, *v):
        self.v = v

    def __add__(self, o):
        return Vector(*(a + b for a, b in zip(self.v, o.v, strict=True))) if isinstance(o, Vector) else NotImplemented

    def __mul__(self, k):
        return Vector(*(a * k for a in self.v)) if isinstance(k, (int, float)) else NotImplemented

    __rmul__ = __mul__

    def __neg__(self):
        return self * -1

    def __matmul__(self, o):
        return sum(a * b for a, b in zip(self.v, o.v, strict=True))

    def __eq__(self, o):
        return isinstance(o, Vector) and self.v == o.v

    def __hash__(self):
        return hash(self.v)

    def __repr__(self):
        return f"Vector{self.v}"

    def __getitem__(self, i):
        return self.v[i]

    def __len__(self):
        return len(self.v)

    def __bool__(self):
        return any(self.v)


@program()
def vector_arithmetic():
    a, b = Vector(1, 2), Vector(3, 4)
    return a + b, a * 2, 3 * a, -a, a @ b, a == Vector(1, 2), a != b, {a, Vector(1, 2)}


@program()
def vector_protocols():
    a = Vector(1, 2, 3)
    x, *rest = a
    return len(a), list(a), a[0], a[1:], x, rest, bool(Vector(0, 0)), 2 in a, max(a), list(reversed(a)), not a


@program()
def unsupported_operand():
    return Vector(1) + 3


@program()
def unsupported_reflected():
    return "x" * Vector(1)


@program()
def reflected_priority_for_subclass():
    class A:
        def __add__(self, o):
            return "A.add"

        def __radd__(self, o):
            return "A.radd"

    class B(A):
        def __radd__(self, o):
            return "B.radd"

    class C(A):
        pass

    return A() + A(), A() + B(), B() + A(), A() + C(), 1 + A(), B() + B()


@program()
def in_place_operators():
    class Acc:
        def __init__(self):
            self.log = []

        def __iadd__(self, o):
            self.log.append(("iadd", o))
            return self

        def __isub__(self, o):
            self.log.append(("isub", o))
            return self

        def __mul__(self, o):
            return ("mul", o)

        def __ior__(self, o):
            return "replaced"

    a = b = Acc()
    a += 1
    a -= 2
    same = a is b
    c = a
    c *= 3
    a |= 4
    return b.log, same, c, a


@program()
def every_binary_operator():
    class All:
        pass

    names = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
    for n in names:
        setattr(All, f"__{n}__", lambda s, o, n=n: n)
        setattr(All, f"__r{n}__", lambda s, o, n=n: "r" + n)
        setattr(All, f"__i{n}__", lambda s, o, n=n: "i" + n)
    a = All()
    out = [a + 1, a - 1, a * 1, a / 1, a // 1, a % 1, a**1, a & 1, a | 1, a ^ 1, a << 1, a >> 1, a @ 1]
    out += [1 + a, 1 - a, 1 * a, 1 / a, 1 // a, 1 % a, 1**a, 1 & a, 1 | a, 1 ^ a, 1 << a, 1 >> a, 1 @ a]
    for step in range(13):
        b = All()
        match step:
            case 0:
                b += 1
            case 1:
                b -= 1
            case 2:
                b *= 1
            case 3:
                b /= 1
            case 4:
                b //= 1
            case 5:
                b %= 1
            case 6:
                b **= 1
            case 7:
                b &= 1
            case 8:
                b |= 1
            case 9:
                b ^= 1
            case 10:
                b <<= 1
            case 11:
                b >>= 1
            case 12:
                b @= 1
        out.append(b)
    return out


@program()
def unary_operators():
    class U:
        def __neg__(self):
            return "neg"

        def __pos__(self):
            return "pos"

        def __invert__(self):
            return "inv"

        def __abs__(self):
            return "abs"

        def __bool__(self):
            return False

    u = U()
    return -u, +u, ~u, abs(u), not u, u or "falsy", u and "no"


@program()
def rich_comparisons():
    class V:
        def __init__(self, n):
            self.n = n

        def __lt__(self, o):
            return self.n < o.n

        def __eq__(self, o):
            return self.n == o.n

        def __le__(self, o):
            return f"{self.n}<={o.n}"

    a, b = V(1), V(2)
    return a < b, b < a, a > b, a <= b, a >= b, a == V(1), a != b, sorted([b, a])[0].n, max(a, b).n


@program()
def comparison_not_implemented():
    class A:
        def __lt__(self, o):
            return NotImplemented

    class B:
        def __gt__(self, o):
            return "B.gt"

    return A() < B(), A() == B(), A() < A()


@program()
def comparison_with_non_bool_result():
    class Expr:
        def __init__(self, s):
            self.s = s

        def __lt__(self, o):
            return Expr(f"({self.s}<{o})")

        def __bool__(self):
            return True

    e = Expr("x")
    return (e < 3).s, (1 < e < 5) if False else (e < 1 < 5)


@program()
def total_ordering():
    import functools

    @functools.total_ordering
    class T:
        def __init__(self, v):
            self.v = v

        def __eq__(self, o):
            return self.v == o.v

        def __lt__(self, o):
            return self.v < o.v

    return T(1) <= T(2), T(3) >= T(4), T(1) > T(0), T(2) != T(2)


@program()
def container_protocol():
    class Grid:
        def __init__(self):
            self.d = {}

        def __getitem__(self, k):
            return self.d.get(k, 0)

        def __setitem__(self, k, v):
            self.d[k] = v

        def __delitem__(self, k):
            del self.d[k]

        def __contains__(self, k):
            return k in self.d

        def __len__(self):
            return len(self.d)

        def __iter__(self):
            yield from sorted(self.d)

    g = Grid()
    g[1, 2] = "a"
    g[0, 0] = "b"
    g[1, 2] += "!"
    del g[0, 0]
    g[5:7] if False else None
    return g[1, 2], g[9], (1, 2) in g, (0, 0) in g, len(g), list(g), bool(g)


@program()
def getitem_sees_slices():
    class S:
        def __getitem__(self, k):
            return k

        def __setitem__(self, k, v):
            self.last = k, v

    s = S()
    s[1:2] = 5
    last = s.last
    s[::2, ...] = 6
    return s[1:], s[:, 1], s[::2], s[1:2:3], s[...], s[None], last, s.last, s[1:2, 3:]


@program()
def old_style_iteration():
    class Seq:
        def __getitem__(self, i):
            if i > 3:
                raise IndexError
            return i * i

    return list(Seq()), 4 in Seq(), 5 in Seq(), [*Seq()], sum(Seq())


@program()
def iterator_class():
    class Count:
        def __init__(self, n):
            self.n = n

        def __iter__(self):
            return self

        def __next__(self):
            if self.n == 0:
                raise StopIteration
            self.n -= 1
            return self.n

    c = Count(3)
    return [x for x in c], list(Count(2)), tuple(zip(Count(2), "ab", strict=False)), next(Count(0), "none")


@program()
def iteration_errors():
    class Bad:
        def __iter__(self):
            return 3

    out = []
    for thing in (Bad(), 5, None):
        try:
            for _ in thing:
                pass
        except TypeError as e:
            out.append(str(e))
    return out


@program()
def next_raises_in_loop():
    class Boom:
        def __iter__(self):
            return self

        def __next__(self):
            raise KeyError("inside next")

    for _ in Boom():
        pass


@program()
def conversions():
    class N:
        def __int__(self):
            return 7

        def __float__(self):
            return 7.5

        def __index__(self):
            return 2

        def __str__(self):
            return "N!"

        def __format__(self, spec):
            return f"<{spec}>"

        def __hash__(self):
            return 99

        def __round__(self, k=0):
            return ("round", k)

    n = N()
    return int(n), float(n), [1, 2, 3][n], str(n), f"{n:abc}", format(n), hash(n), round(n, 3), "x" * n, range(n), hex(n)


@program()
def repr_recursion():
    xs = [1]
    xs.append(xs)
    d = {}
    d["self"] = d
    return repr(xs), str(d)


@program()
def bool_and_len_truth():
    class L:
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

    class B:
        def __bool__(self):
            return "not a bool"

    out = [bool(L(0)), bool(L(2)), "t" if L(0) else "f", not L(1)]
    try:
        if B():
            pass
    except TypeError as e:
        out.append(str(e))
    return out


@program()
def truth_raises():
    class T:
        def __bool__(self):
            raise ValueError("ambiguous")

    while T():
        pass


@program()
def equality_and_hash():
    class K:
        def __init__(self, v):
            self.v = v

        def __eq__(self, o):
            return self.v == o.v

    try:
        {K(1)}
    except TypeError as e:
        return str(e), K(1) == K(1), [K(1)].index(K(1)), [K(2), K(3)].count(K(3)), K(1) in [K(1)]


@program()
def missing_key_hook():
    class D(dict):
        def __missing__(self, k):
            self[k] = k * 2
            return self[k]

    d = D(a=1)
    return d["a"], d["b"], d, d.get("zz")


@program()
def power_with_three_arguments():
    class P:
        def __pow__(self, e, m=None):
            return e, m

        def __rpow__(self, b):
            return "rpow", b

    return P() ** 2, pow(P(), 2, 5), 2 ** P()


@program()
def divmod_and_reversed_hooks():
    class H:
        def __divmod__(self, o):
            return "dm", o

        def __reversed__(self):
            return iter("zyx")

        def __length_hint__(self):
            return 3

        def __dir__(self):
            return ["b", "a"]

    return divmod(H(), 4), list(reversed(H())), dir(H())


@program()
def index_errors():
    out, five, pair = [], 5, (1,)
    for expression in (lambda: [1][5], lambda: pair["a"], lambda: {}["k"], lambda: "abc"[9], lambda: five[0], lambda: [].pop()):
        try:
            expression()
        except Exception as e:  # noqa: BLE001
            out.append((type(e).__name__, str(e)))
    return out


@program()
def item_assignment_error():
    t = (1, 2)
    t[0] = 5


@program()
def item_deletion_error():
    del (1, 2)[0]


@program()
def in_place_on_tuple_element():
    t = ([1],)
    try:
        t[0] += [2]
    except TypeError:
        return t


@program()
def expression_tree():
    class E:
        def __init__(self, text):
            self.text = text

        def op(symbol):  # noqa: N805
            return lambda a, b: E(f"({a.text}{symbol}{getattr(b, 'text', b)})")

        __add__, __mul__, __sub__, __getitem__ = op("+"), op("*"), op("-"), op("@")
        __radd__ = lambda a, b: E(f"({b}+{a.text})")  # noqa: E731
        del op

    x, y = E("x"), E("y")
    return (1 + (x + 1) * y - x[3]).text


@program()
def metaclass_has_no_say_in_operators():
    log = []

    class Meta(type):
        def __getattr__(cls, name):
            log.append(name)
            raise AttributeError(name)

        def __subclasscheck__(cls, other):
            log.append("subclass")
            return True

    class A(metaclass=Meta):
        def __rmul__(self, other):
            return "rmul"

        def __add__(self, other):
            return "add"

        def __lt__(self, other):
            return "lt"

    class B(A):
        pass

    a, b = A(), B()
    results = ["a" * a, b + 1, a < b, b < 1, bool(a), not a]
    try:
        print(*a)
    except TypeError as error:
        results.append(str(error))
    return results, log
