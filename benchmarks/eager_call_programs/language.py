"""Parts that use what Python's own machinery shows and changes."""

from __future__ import annotations

import collections
import copy
import cProfile
import dataclasses
import gc
import hashlib
import inspect
import io
import pickle
import pstats
import re
import sys
import traceback
import types
import typing
import warnings
import weakref

import torch

from eager_call_programs.common import Model, program


@program()
def exec_of_generated_code(folder):
    class Executes(Model):
        def odd(self, h):
            space = {"torch": torch}
            exec("def body(h):\n    return torch.tanh(h) * 3\n", space)
            return space["body"](h)

    return Executes()


@program()
def eval_inline(folder):
    class Evaluates(Model):
        def forward(self, x):
            h = self.first(x)
            scale = eval("h.shape[0] + 1", {"h": h})
            return self.last(h * scale)

    return Evaluates()


@program()
def pickle_round_trip(folder):
    def odd(h):
        again = pickle.loads(pickle.dumps({"h": h.detach(), "rows": len(h)}))
        return h * again["rows"] + again["h"]

    return Model(odd, norm=True)


@program()
def weak_references(folder):
    alive = weakref.WeakValueDictionary()

    class Entry:
        def __init__(self, value):
            self.value = value

    class Holds(Model):
        def odd(self, h):
            entry = Entry(h.mean().item())
            alive["now"] = entry
            seen = weakref.ref(entry)().value
            count = len(alive)
            del entry
            return h * count + seen

    return Holds(), lambda: len(alive)


@program()
def finalizer_is_called(folder):
    gone = []

    class Dies:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            gone.append(self.name)

    def odd(h):
        Dies(len(gone))
        gc.collect(0)
        return h * len(gone)

    return Model(odd), lambda: list(gone)


@program()
def garbage_collector_counts(folder):
    class Marker:
        pass

    values = [Marker(), Marker()]

    class Counts(Model):
        def odd(self, h):
            n = sum(1 for x in gc.get_objects() if type(x) is Marker)
            return h * n + len(values)

    return Counts()


@program()
def frame_of_the_caller(folder):
    names = []

    def who():
        frame = sys._getframe(1)
        names.append(frame.f_code.co_name)
        return frame.f_locals["scale"]

    def odd(h):
        scale = 1.5 + len(names)
        return h * who() * scale

    return Model(odd), lambda: list(names)


@program()
def stack_is_inspected(folder):
    lines = []

    class Inspects(Model):
        def note(self):
            lines.append([f.function for f in inspect.stack(0)[1:3]])

        def odd(self, h):
            self.note()
            return h.sigmoid()

    return Inspects(dropout=0.1), lambda: [line[:1] for line in lines]


@program()
def traceback_is_printed(folder):
    out = io.StringIO()

    def odd(h):
        try:
            {}["missing"]
        except KeyError:
            traceback.print_exc(file=out)
        return h * 2

    return Model(odd), lambda: [line for line in out.getvalue().splitlines() if "missing" in line]


@program()
def warning_in_each_call(folder):
    texts = []

    class Warns(Model):
        def odd(self, h):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.warn(f"mean {h.mean().item():.3f}", RuntimeWarning, stacklevel=1)
            texts.extend(str(w.message) for w in caught)
            return h * len(caught)

    return Warns(), lambda: list(texts)


@program()
def profile_of_python(folder):
    def work(h):
        return sum(h * k for k in range(4))

    def odd(h):
        profiler = cProfile.Profile()
        result = profiler.runcall(work, h)
        names = [key[2] for key in pstats.Stats(profiler, stream=io.StringIO()).stats]
        return result * (1 + names.count("work"))

    return Model(odd)


@program()
def trace_function_is_set(folder):
    events = []

    def traced(h):
        return h + 1

    class Traces(Model):
        def odd(self, h):
            sys.settrace(lambda frame, event, arg: events.append(frame.f_code.co_name))
            try:
                h = traced(h)
            finally:
                sys.settrace(None)
            return h * 2

    return Traces(), lambda: events.count("traced")


@program()
def replacements_by_callback(folder):
    seen = collections.Counter()

    def odd(h):
        text = " ".join(f"{v:+.2f}" for v in h.detach()[0].tolist())

        def flip(match):
            seen[match[0]] += 1
            return "-" if match[0] == "+" else "+"

        flipped = re.sub(r"[+-]", flip, text)
        return h + torch.tensor([float(v) for v in flipped.split()])

    return Model(odd), lambda: dict(seen)


@program()
def generator_that_is_sent_into(folder):
    def averager():
        total, n, mean = 0.0, 0, None
        while True:
            total += yield mean
            n += 1
            mean = total / n

    running = averager()
    next(running)

    class Averages(Model):
        def odd(self, h):
            return h - running.send(h.mean().item())

    return Averages(norm=True)


@program()
def refusal_in_a_generator(folder):
    def parts(h):
        for part in h.chunk(2):
            part.untyped_storage()
            yield part.tanh()

    def odd(h):
        return torch.cat(list(parts(h)))

    return Model(odd)


@program()
def descriptor_with_state(folder):
    reads = []

    class Scale:
        def __get__(self, owner, kind=None):
            reads.append(type(owner).__name__)
            torch.empty(1).untyped_storage()
            return 0.5 * len(reads)

    class Described(Model):
        scale = Scale()

        def odd(self, h):
            return h * self.scale

    return Described(), lambda: list(reads)


@program()
def class_made_inside(folder):
    class Registers(type):
        names: typing.ClassVar = []

        def __new__(cls, name, bases, space):
            cls.names.append(name)
            return super().__new__(cls, name, bases, space)

    def odd(h):
        layer = Registers(f"Layer{len(Registers.names)}", (), {"__call__": lambda self, h: h.cos()})
        return layer()(h)

    return Model(odd), lambda: list(Registers.names)


@program()
def function_is_patched(folder):
    space = types.ModuleType("patched")
    space.act = torch.relu

    class Patches(Model):
        def odd(self, h):
            before, space.act = space.act, torch.sigmoid
            try:
                h.untyped_storage()
                return space.act(h)
            finally:
                space.act = before

    return Patches()


@dataclasses.dataclass
class Scores:
    values: torch.Tensor
    top: float
    names: list


@program()
def result_is_a_dataclass(folder):
    def score(h):
        h.untyped_storage()
        return Scores(h.softmax(1), h.max().item(), ["a", "b"])

    class Uses(Model):
        def odd(self, h):
            scores = score(h)
            return scores.values * scores.top * len(scores.names)

    return Uses()


class Pair(typing.NamedTuple):
    mean: torch.Tensor
    rest: torch.Tensor


@program()
def result_is_a_named_tuple(folder):
    def split(h):
        h.untyped_storage()
        return Pair(h.mean(1, keepdim=True), h - h.mean(1, keepdim=True))

    class Uses(Model):
        def odd(self, h):
            pair = split(h)
            return pair.rest * 2 + pair.mean

    return Uses(dropout=0.2)


@program()
def argument_is_made_inside(folder):
    class Batch:
        def __init__(self, h):
            self.h, self.notes = h, []

        def note(self):
            self.notes.append(self.h.untyped_storage().nbytes())
            return self

    class Uses(Model):
        def odd(self, h):
            batch = Batch(h.tanh()).note()
            return batch.h * len(batch.notes)

    return Uses()


@program()
def list_that_is_filled(folder):
    def collect(h, into):
        h.untyped_storage()
        into.append(h.exp())
        into.append(h.sin())

    class Uses(Model):
        def odd(self, h):
            collected = []
            collect(h, collected)
            return sum(collected)

    return Uses(norm=True)


@program()
def counter_of_the_model_inside(folder):
    class Counts(Model):
        steps = 0

        def odd(self, h):
            h.untyped_storage()
            self.steps += 1
            return h / self.steps

    model = Counts()
    return model, lambda: model.steps


@program()
def counter_of_the_model_before(folder):
    seen = []

    class Counts(Model):
        steps = 0

        def show(self, h):
            h.untyped_storage()
            seen.append(self.steps)
            return h + self.steps

        def forward(self, x):
            self.steps += 1
            return self.last(self.show(self.first(x)))

    model = Counts()
    return model, lambda: (model.steps, list(seen))


@program()
def hash_of_values(folder):
    texts = []

    class Hashes(Model):
        def odd(self, h):
            texts.append(hashlib.sha256(h.detach().round(decimals=3).numpy().tobytes()).hexdigest())
            return h * (1 + len(set(texts)))

    return Hashes(), lambda: len(set(texts))


@program()
def deep_copy_of_a_module(folder):
    class Copies(Model):
        def odd(self, h):
            again = copy.deepcopy(self.last[0])
            h.untyped_storage()
            return h + again(h).detach()

    return Copies()
