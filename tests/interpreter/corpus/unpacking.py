"""Assignment targets, star expressions, slices, del."""

from tests.interpreter.corpus.kit import program


@program([(1, 2), 3, 4, 5, 6])
def nested_targets(t):
    (a, b), *rest = t
    first, *mid, last = rest
    a, b = b, a
    return a, b, first, mid, last


@program([1, 2, 3, 4, 5])
def slices(xs):
    ys = list(xs)
    ys[1:3] = [7]
    ys[0], ys[-1] = ys[-1], ys[0]
    del ys[1:2]
    zs = xs[:]
    zs[::2] = "abc"
    del zs[-1]
    return ys[1:], xs[::2], ys[:-1], zs, xs[10:], xs[-2:], xs[3:1:-1]


@program()
def too_few():
    a, b, c = 1, 2
    return a, b, c


@program()
def too_few_from_list():
    xs = [1]
    a, b = xs
    return a, b


@program()
def too_many_from_iterator():
    a, b = iter("abc")
    return a, b


@program()
def too_few_for_star():
    a, b, *c = iter("x")
    return a, b, c


@program()
def too_few_after_star():
    a, *b, c, d = [1, 2]
    return a, b, c, d


@program()
def not_iterable():
    a, b = 5
    return a, b


@program()
def not_iterable_with_star():
    a, *b = None
    return a, b


@program()
def not_iterable_in_call():
    return [*5]


@program()
def star_in_displays():
    a, d = [1, 2], {"x": 1}
    return [*a, 3, *"bc"], (*a, *a), {*a, 2, 5}, {**d, "y": 2, **{"x": 9}}, [*range(3), *d]


@program()
def not_a_mapping_in_display():
    return {**[1]}


@program()
def star_targets_in_loops():
    out = []
    for i, *rest in [(1, 2, 3), "ab", [9]]:
        out.append((i, rest))
    for [a, (b, *c)] in [(1, (2, 3, 4))]:
        out.append((a, b, c))
    return out


@program()
def swap_with_indexes():
    xs = [0, 1, 2]
    i = 0
    i, xs[i] = 2, "changed"
    return i, xs


@program()
def chained_assignment():
    a = b = c = []
    a.append(1)
    x = y, z = 1, 2
    return b, c, x, y, z


@program()
def assignment_to_attributes_and_items():
    class Box:
        pass

    box, d = Box(), {}
    box.a, d["k"], (box.b, *d["rest"]) = 1, 2, (3, 4, 5)
    return box.a, box.b, d


@program()
def deletions():
    class Box:
        pass

    x, y, box, d, xs = 1, 2, Box(), {"a": 1, "b": 2}, [1, 2, 3, 4]
    box.v = 3
    del x, (y), box.v, d["a"], xs[0], xs[1:]
    return d, xs, hasattr(box, "v"), "x" in locals()


@program()
def dictionary_unpacking_and_merge():
    a, b = {"x": 1, "y": 2}, {"y": 3}
    c = a | b
    a |= {"z": 4}
    return c, a, {**a, **b}, dict(a, w=0), [*c.values()]


@program()
def unpack_strings_and_ranges():
    a, b, c = "xyz"
    d, *e = range(4)
    (f,) = {7}
    g, h = {"k1": 1, "k2": 2}
    [i, j] = b"\x01\x02"
    return a, b, c, d, e, f, g, h, i, j


@program()
def unpack_user_iterable_with_error():
    class Bad:
        def __iter__(self):
            yield 1
            raise KeyError("in iter")

    a, b = Bad()


@program()
def multiple_returns():
    def stats(*xs):
        return min(xs), max(xs), sum(xs) / len(xs)

    low, high, mean = stats(3, 1, 2)
    *_, only_mean = stats(5, 7)
    return low, high, mean, only_mean


@program()
def slice_objects():
    s = slice(1, None, 2)
    return "abcdef"[s], s.indices(4), slice(3), [1, 2, 3][slice(None, None, -1)], s == slice(1, None, 2)


@program()
def slice_assignment_errors():
    xs = [1, 2, 3, 4]
    xs[::2] = [1]


@program()
def ternary_and_star_subscript():
    class T:
        def __getitem__(self, k):
            return k

    xs = (1, 2)
    return T()[*xs, 3], T()[*xs], T()[1 if xs else 2 :]


@program()
def lists_grow_and_shrink():
    xs = [3, 1]
    xs.extend(x * 2 for x in (5, 6))
    xs.insert(1, "i")
    xs += (7,)
    popped = xs.pop(1), xs.pop()
    xs.reverse()
    xs.remove(1)
    return xs, popped, xs.index(12), xs.copy() == xs


@program()
def deep_nesting():
    ((a, [b, (c, *d)]), e), *f = (((1, [2, (3, 4, 5)]), 6), 7)
    return a, b, c, d, e, f
