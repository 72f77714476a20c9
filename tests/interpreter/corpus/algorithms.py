"""Longer programs."""

import collections
import heapq

from tests.interpreter.corpus.kit import program


@program({"a": {"b": 1, "c": 4}, "b": {"c": 2, "d": 6}, "c": {"d": 3}, "d": {}})
def dijkstra(graph):
    distance, heap = {"a": 0}, [(0, "a")]
    while heap:
        d, node = heapq.heappop(heap)
        if d > distance.get(node, float("inf")):
            continue
        for other, w in graph[node].items():
            if (new := d + w) < distance.get(other, float("inf")):
                distance[other] = new
                heapq.heappush(heap, (new, other))
    return distance


@program("kitten", "sitting")
def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


@program([5, 2, 9, 1, 5, 6])
def quicksort(xs):
    def sort(low, high):
        if low >= high:
            return
        pivot, i = xs[high], low
        for j in range(low, high):
            if xs[j] < pivot:
                xs[i], xs[j] = xs[j], xs[i]
                i += 1
        xs[i], xs[high] = xs[high], xs[i]
        sort(low, i - 1)
        sort(i + 1, high)

    sort(0, len(xs) - 1)
    return xs


@program([38, 27, 43, 3, 9, 82, 10])
def merge_sort(xs):
    if len(xs) < 2:
        return xs
    middle = len(xs) // 2
    left, right, out = merge_sort(xs[:middle]), merge_sort(xs[middle:]), []
    while left and right:
        out.append((left if left[0] <= right[0] else right).pop(0))
    return out + left + right


@program("3 + 4 * (2 - 1) / -2")
def calculator(text):
    import re

    tokens = re.findall(r"\d+|[-+*/()]", text)
    position = 0

    def peek():
        return tokens[position] if position < len(tokens) else None

    def advance():
        nonlocal position
        position += 1
        return tokens[position - 1]

    def factor():
        token = advance()
        if token == "(":
            value = expression()
            advance()
            return value
        return -factor() if token == "-" else int(token)

    def term():
        value = factor()
        while peek() in ("*", "/"):
            value = value * factor() if advance() == "*" else value / factor()
        return value

    def expression():
        value = term()
        while peek() in ("+", "-"):
            value = value + term() if advance() == "+" else value - term()
        return value

    return expression()


@program(6)
def pascal(n):
    rows = [[1]]
    for _ in range(n - 1):
        rows.append([a + b for a, b in zip([0, *rows[-1]], [*rows[-1], 0], strict=True)])
    return rows


@program({(0, 1), (1, 1), (2, 1)})
def game_of_life(cells):
    for _ in range(3):
        counts = collections.Counter((x + dx, y + dy) for x, y in cells for dx in (-1, 0, 1) for dy in (-1, 0, 1) if dx or dy)
        cells = {c for c, n in counts.items() if n == 3 or n == 2 and c in cells}
    return sorted(cells)


@program(["wrt", "wrf", "er", "ett", "rftt"])
def topological_sort(words):
    after = collections.defaultdict(set)
    for a, b in zip(words, words[1:], strict=False):
        for x, y in zip(a, b, strict=False):
            if x != y:
                after[x].add(y)
                break
    seen, order = {}, []

    def visit(c):
        if c in seen:
            if not seen[c]:
                raise ValueError("cycle")
            return
        seen[c] = False
        for d in sorted(after[c]):
            visit(d)
        seen[c] = True
        order.append(c)

    for c in sorted({c for w in words for c in w}):
        visit(c)
    return order[::-1]


@program([1, 3, 4, 5], 7)
def knapsack(weights, capacity):
    best = [0] * (capacity + 1)
    for w in weights:
        for c in range(capacity, w - 1, -1):
            best[c] = max(best[c], best[c - w] + w * w)
    return best


@program("abracadabra")
def huffman(text):
    heap = [(n, i, c) for i, (c, n) in enumerate(sorted(collections.Counter(text).items()))]
    heapq.heapify(heap)
    counter = len(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (a[0] + b[0], counter, (a[2], b[2])))
        counter += 1
    codes = {}

    def walk(tree, prefix):
        if isinstance(tree, str):
            codes[tree] = prefix
        else:
            for bit, branch in zip("01", tree, strict=True):
                walk(branch, prefix + bit)

    walk(heap[0][2], "")
    return codes, sum(len(codes[c]) for c in text)


@program()
def bank_account_simulation():
    class Insufficient(Exception):
        pass

    class Account:
        interest = 0.1

        def __init__(self, owner, balance=0):
            self.owner, self.balance, self.history = owner, balance, []

        def withdraw(self, n):
            if n > self.balance:
                raise Insufficient(f"{self.owner} lacks {n - self.balance}")
            self.balance -= n
            self.history.append(-n)

        def transfer(self, other, n):
            self.withdraw(n)
            other.balance += n

        def __iadd__(self, n):
            self.balance += n
            self.history.append(n)
            return self

    a, b = Account("a", 100), Account("b")
    a.transfer(b, 30)
    b += 5
    try:
        b.transfer(a, 100)
    except Insufficient as e:
        return a.balance, b.balance, b.history, str(e)


@program("hello")
def brainfuck(text):
    program_text = ",[.,]"
    data, pointer, ip, out, source = [0] * 10, 0, 0, [], iter([*map(ord, text), 0])
    jumps, stack = {}, []
    for i, c in enumerate(program_text):
        if c == "[":
            stack.append(i)
        elif c == "]":
            j = stack.pop()
            jumps[i], jumps[j] = j, i
    while ip < len(program_text):
        match program_text[ip]:
            case ",":
                data[pointer] = next(source)
            case ".":
                out.append(chr(data[pointer]))
            case "[" if not data[pointer]:
                ip = jumps[ip]
            case "]" if data[pointer]:
                ip = jumps[ip]
        ip += 1
    return "".join(out)


@program()
def event_loop_with_generators():
    def task(name, n, log):
        for i in range(n):
            log.append(f"{name}{i}")
            yield
        return name

    log, ready, results = [], collections.deque(), []
    for name, n in (("a", 2), ("b", 3), ("c", 1)):
        ready.append(task(name, n, log))
    while ready:
        t = ready.popleft()
        try:
            next(t)
            ready.append(t)
        except StopIteration as s:
            results.append(s.value)
    return log, results


@program()
def autograd_in_miniature():
    class Value:
        def __init__(self, data, parents=(), back=lambda g: ()):
            self.data, self.grad, self.parents, self.back = data, 0.0, parents, back

        def __add__(self, o):
            o = o if isinstance(o, Value) else Value(o)
            return Value(self.data + o.data, (self, o), lambda g: (g, g))

        def __mul__(self, o):
            o = o if isinstance(o, Value) else Value(o)
            return Value(self.data * o.data, (self, o), lambda g: (g * o.data, g * self.data))

        __radd__, __rmul__ = __add__, __mul__

        def backward(self):
            order, seen = [], set()

            def visit(v):
                if id(v) not in seen:
                    seen.add(id(v))
                    for p in v.parents:
                        visit(p)
                    order.append(v)

            visit(self)
            self.grad = 1.0
            for v in reversed(order):
                for p, g in zip(v.parents, v.back(v.grad), strict=False):
                    p.grad += g

    x, y = Value(3.0), Value(4.0)
    z = x * y + 2 * x + x * x
    z.backward()
    return z.data, x.grad, y.grad


@program([[1, 2, 0], [0, 1, 4], [5, 6, 0]])
def matrix_inverse(m):
    from fractions import Fraction

    n = len(m)
    rows = [[Fraction(v) for v in r] + [Fraction(int(i == j)) for j in range(n)] for i, r in enumerate(m)]
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [v / rows[i][i] for v in rows[i]]
        for r in range(n):
            if r != i:
                rows[r] = [a - rows[r][i] * b for a, b in zip(rows[r], rows[i], strict=True)]
    return [[str(v) for v in r[n:]] for r in rows]


@program("(define (f x) (* x x))")
def lisp_reader(text):
    def read(tokens):
        token = tokens.pop(0)
        if token == "(":
            out = []
            while tokens[0] != ")":
                out.append(read(tokens))
            tokens.pop(0)
            return out
        try:
            return int(token)
        except ValueError:
            return token

    return read(text.replace("(", " ( ").replace(")", " ) ").split())


@program()
def observer_pattern():
    class Subject:
        def __init__(self):
            self._observers = []

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if not name.startswith("_"):
                for o in self._observers:
                    o(name, value)

        def watch(self, f):
            self._observers.append(f)
            return f

    s, log = Subject(), []

    @s.watch
    def note(name, value):
        log.append((name, value))

    s.x = 1
    s.x += 4
    return log


@program()
def plugin_registry():
    registry = {}

    def register(name=None, *, priority=0):
        def decorate(cls):
            registry[name or cls.__name__.lower()] = (priority, cls)
            return cls

        return decorate

    @register(priority=2)
    class Alpha:
        def run(self):
            return "alpha"

    @register("second")
    class Beta(Alpha):
        def run(self):
            return super().run() + "+beta"

    return [(n, c().run()) for n, (p, c) in sorted(registry.items(), key=lambda kv: kv[1][0])]


@program()
def lazy_sequence():
    class Lazy:
        def __init__(self, make):
            self.make, self.cache = make, []

        def __getitem__(self, i):
            if isinstance(i, slice):
                return [self[k] for k in range(*i.indices(i.stop))]
            while len(self.cache) <= i:
                self.cache.append(self.make(self, len(self.cache)))
            return self.cache[i]

    fib = Lazy(lambda s, n: n if n < 2 else s[n - 1] + s[n - 2])
    return fib[10], fib[2:6], len(fib.cache)
