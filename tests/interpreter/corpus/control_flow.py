"""Loops, branches, and what jumps out of them."""

from tests.interpreter.corpus.kit import program


@program(50)
def loop_with_continue_and_break(n):
    total = 0
    for i in range(n):
        if i % 2:
            continue
        if i > 20:
            break
        total += i
    while n > 3 and not total == 5:
        n -= 1
    return total, n


@program(4)
@program(13)
def for_else(n):
    for divisor in range(2, n):
        if n % divisor == 0:
            divisors = divisor
            break
    else:
        divisors = None
    return divisors


@program(3)
def while_else(n):
    log = []
    while n:
        n -= 1
        log.append(n)
    else:
        log.append("done")
    return log


@program()
def nested_loops_with_flags():
    out = []
    for i in range(4):
        for j in range(4):
            if j == i:
                break
            if (i + j) % 3 == 0:
                continue
            out.append((i, j))
        else:
            out.append("full")
    return out


@program()
def loop_variable_survives():
    for last in [1, 2, 3]:
        pass
    for never in []:
        pass
    try:
        return last, never
    except UnboundLocalError as error:
        return last, str(error)


@program([5, 3, 8, 1])
def bubble_sort(xs):
    n = len(xs)
    for i in range(n):
        for j in range(n - 1 - i):
            if xs[j] > xs[j + 1]:
                xs[j], xs[j + 1] = xs[j + 1], xs[j]
    return xs


@program(30)
def sieve(n):
    flags = [True] * (n + 1)
    flags[0:2] = [False, False]
    for i in range(2, int(n**0.5) + 1):
        if flags[i]:
            flags[i * i :: i] = [False] * len(flags[i * i :: i])
    return [i for i, flag in enumerate(flags) if flag]


@program(27)
def collatz(n):
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


@program()
def unbound_local_after_branch():
    if False:
        value = 1
    return value  # noqa: F821


@program()
def unbound_after_del():
    value = 1
    del value
    return value  # noqa: F821


@program()
def del_unbound():
    if 1 > 2:
        gone = 1
    del gone  # noqa: F821


@program({"b": 2, "a": 1})
def dictionary_loops(d):
    out = []
    for k in d:
        out.append(k)
    for k, v in d.items():
        out.append((k, v))
    for i, (k, v) in enumerate(sorted(d.items())):
        out.append((i, k, v))
    return out


@program({"a": 1})
def dictionary_changed_size(d):
    for k in d:
        d[k + "x"] = 1


@program([1, 2, 3, 4])
def list_changed_during_loop(xs):
    seen = []
    for x in xs:
        seen.append(x)
        if x == 2:
            xs.remove(3)
        if len(xs) < 6:
            xs.append(x * 10)
    return seen, xs


@program(5)
def infinite_loop_left_by_return(n):
    while True:
        n += 1
        if n % 7 == 0:
            return n


@program()
def pass_statements():
    for _ in range(3):
        pass
    else:
        pass
    if True:
        ...
    while False:
        pass


@program("hello world")
def loop_over_string(s):
    counts = {}
    for c in s:
        counts[c] = counts.get(c, 0) + 1
    return sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))


@program(3, 4)
def matrix_product(n, m):
    a = [[i * j for j in range(m)] for i in range(n)]
    b = [[i - j for j in range(n)] for i in range(m)]
    out = [[0] * n for _ in range(n)]
    for i in range(n):
        for j in range(n):
            for k in range(m):
                out[i][j] += a[i][k] * b[k][j]
    return out


@program([3, 1, 2], 5)
def binary_search(xs, target):
    xs = sorted(xs + list(range(10, 50, 3)))
    low, high, probes = 0, len(xs), 0
    while low < high:
        probes += 1
        middle = (low + high) // 2
        if xs[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low, probes


@program(0)
@program(None)
@program([])
@program("x")
def truth_of_values(v):
    if v:
        return "true"
    elif v is None:
        return "none"
    elif not v and v == 0:
        return "zero"
    return "empty"


@program()
def assert_passes_and_fails():
    assert True
    assert [1], "unused"
    x = 3
    assert x < 2, f"x is {x}"


@program()
def assert_without_message():
    assert not [1]


@program()
def assert_with_tuple_message():
    assert 1 == 2, ("a", 3)


@program(10)
def tuple_swap_in_loop(n):
    a, b = 0, 1
    out = []
    while a < n * 10:
        out.append(a)
        a, b = b, a + b
    return out


@program()
def jump_over_none():
    out = []
    for v in [None, 0, 1, None]:
        if v is None:
            out.append("n")
        if v is not None:
            out.append(v)
        while v is None:
            v = 5
        while v is not None and v > 3:
            v = None
    return out


@program(200)
def long_function(n):
    # far jumps need EXTENDED_ARG
    total = 0
    for i in range(n):
        if i % 3 == 0:
            total += i * 2 - 1
            total ^= i
            total += (i * 7) % 11
            total -= i // 5
            total += (i * 13) % 17
            total ^= 3
            total += i & 6
            total -= i | 1
            total += (i << 2) % 23
            total -= (i >> 1) % 19
            total += (i * i) % 29
            total ^= i % 31
            total += (i * 3 + 1) % 37
            total -= (i * 5 + 2) % 41
            total += (i * 9 + 4) % 43
            total ^= (i * 11 + 5) % 47
        elif i % 5 == 1:
            total = total * 2 % 100003 + i
            total += len(str(total)) + len(str(i)) + len(str(total * i)) + len(str(total + i)) + len(str(total - i))
            total += [i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7][i % 8]
        else:
            total += max(i, total % 7, 3) - min(i, total % 5, 4)
    return total
