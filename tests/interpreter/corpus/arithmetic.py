"""Expressions over numbers, strings and bytes."""

from tests.interpreter.corpus.kit import program


@program(3, 8)
@program(30, 8)
def mixed_operators(a, b):
    return (a + b) * a - b // 3**2 % 7 + (a if a < b <= 10 else -b)


@program(12, 10)
def bit_operations(a, b):
    return a & b, a | b, a ^ b, a << 2, a >> 1, ~a


@program(7, 0)
def integer_division_by_zero(a, b):
    return a // b


@program(7.0, 0)
def modulo_by_zero(a, b):
    return a % b


@program(7, 0.0)
def true_division_by_zero(a, b):
    quotient = 1
    quotient += a / b
    return quotient


@program(2, -3)
def power_forms(a, b):
    return a**b, pow(a, 5), pow(a, 5, 7), (-a) ** 2, -(a**2), (-8) ** (1 / 3)


@program(-7, 3)
def floor_semantics(a, b):
    return a // b, a % b, divmod(a, b), -a // b, int(a / b), round(a / b, 2)


@program(1.5, 2)
def float_methods(a, b):
    return a.is_integer(), a.as_integer_ratio(), (a * b).hex(), float("inf") > a, float("nan") != float("nan")


@program()
def complex_numbers():
    z = 3 + 4j
    return abs(z), z.conjugate(), z * 1j, z == complex(3, 4), (z - 3).imag


@program()
def big_integers():
    n = 2**200
    return n, n.bit_length(), n % 10**9, -n >> 190, int("123456789" * 4)


@program("ab", 3)
def string_arithmetic(s, n):
    return s * n, s + "c", "b" in s, s[::-1], s < "b", s % () if False else "%s-%03d" % (s, n)


@program(b"xyz")
def bytes_arithmetic(b):
    return b + b"!", b[0], b[1:], list(b), b.hex(), bytes([1, 2]) * 2, bytearray(b) + b"q"


@program(5)
def unary_chain(n):
    return -n, +n, ~n, not n, - -n, not not n, -(-(~n))


@program(1, 2, 3)
def chained_comparisons(a, b, c):
    return a < b < c, a < b > c, a == a == b, a != b != a, not a < b < c < 0


@program()
def chained_comparison_evaluates_once():
    seen = []

    def value(x):
        seen.append(x)
        return x

    result = value(1) < value(5) < value(3) < value(9)
    return result, seen


@program(0, "", [1])
def short_circuit(a, b, c):
    return a or b or c, a and b, c and b, a or c and "x", not (a or b), (a or 5) + (len(c) and 2)


@program()
def short_circuit_side_effects():
    log = []

    def mark(x, value):
        log.append(x)
        return value

    mark(1, False) and mark(2, True)
    mark(3, True) or mark(4, True)
    (mark(5, 0) or mark(6, 7)) and mark(7, [])
    return log


@program(3)
def conditional_expressions(n):
    return "neg" if n < 0 else "zero" if n == 0 else "small" if n < 10 else "big"


@program(10)
def augmented_assignments(n):
    n += 5
    n -= 1
    n *= 3
    n //= 4
    n **= 2
    n %= 17
    n <<= 3
    n >>= 1
    n |= 3
    n &= 30
    n ^= 5
    n /= 2
    return n


@program([1, 2])
def augmented_targets(xs):
    box = {"a": [1], "n": 3}
    box["a"] += xs
    box["n"] -= 1
    alias = xs
    xs += [9]
    xs[0] *= 10
    xs[1:2] += [7]
    return box, xs, alias is xs


@program(None, 0)
def identity_tests(a, b):
    return a is None, b is None, a is not b, (a is None) is True, [] is not []


@program("a", {"a": 1})
def membership(k, d):
    return k in d, k not in d, "z" in d, 1 in d.values(), k in "cat", 3 not in (1, 2)


@program(1, "1")
def type_error_in_addition(a, b):
    return a + b


@program([1], (2,))
def type_error_concatenation(a, b):
    return b + a


@program(None)
def type_error_unary(a):
    return -a


@program(1, "a")
def type_error_ordering(a, b):
    return sorted([a, b]) if a < 0 else a < b


@program(3)
def type_error_membership(n):
    return 1 in n


@program(1000)
def walrus(n):
    if (half := n // 2) > 10:
        total = half
    while (half := half // 3) > 1:
        total += half
    return total, half, [y := 5, y**2], (z := 3) + z


@program(7)
def number_formatting(n):
    return str(n), repr(n / 2), bin(n), hex(255), oct(8), format(n, "05b"), int("ff", 16), chr(97 + n), ord("z")


@program(0.1)
def rounding(x):
    return x + 0.2, round(x + 0.2, 5), round(2.5), round(-1.5), int(-3.9), (-3.9).__floor__(), sum([x] * 10)


@program()
def matrix_multiply_missing():
    return [1] @ [2]


@program(2**0.5)
def newton(x):
    guess = 1.0
    for _ in range(20):
        guess = (guess + x / guess) / 2
    return round(guess, 12)


@program(48, 36)
@program(17, 5)
def euclid(a, b):
    steps = 0
    while b:
        a, b, steps = b, a % b, steps + 1
    return a, steps


@program(True, False)
def booleans_as_numbers(a, b):
    return a + a, a * 3, a & b, a | b, a ^ b, -a, ~b, [10, 20][a], sum([a, b, a])
