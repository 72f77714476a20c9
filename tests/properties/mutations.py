"""Programs that read a random part of what they can reach, and mutations of anything reachable between their calls."""

from __future__ import annotations

import contextlib
import random
import types
import warnings
from typing import Any

from tests.properties import surroundings
from tests.properties.compared import Program, restored
from tests.properties.objects import (
    ANY,
    BLOCKS,
    EFFECTS,
    Place,
    Root,
    World,
    applies,
    indent,
    mutations,
    reads_of,
)  # fmt: skip

LAYOUTS = ["function", "function", "function", "module", "method"]


class Writer:
    """Makes one program. Statements are tried in the live world before they become part of it."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.world = World(rng)
        self.precise = rng.random() < 0.3  # the program reads numbers, strings and tensors only, each by its path
        self.layout = rng.choice(LAYOUTS)
        self.roots = [self._root(i) for i in range(rng.randint(1, 3))]
        self.roots += [Root(c, c, "", "class") for c in self.world.classes]
        self.around = rng.choice(surroundings.ROWS) if rng.random() < 0.2 else None
        self.body: list[str] = []
        self.helpers: list[str] = []

    def _root(self, i: int) -> Root:
        text = self.world.value(3)
        kind = self.rng.choice(["global", "argument", "argument", "keyword", "default", "closure", "module"])
        if kind == "closure" and self.layout != "function":
            kind = "attribute"
        if kind == "default" and self.layout != "function":
            kind = "argument"
        if kind == "argument":
            return Root(
                f"a{i}", f"ARGS[{1 + sum(r.kind == 'argument' for r in getattr(self, 'roots', ()))}]", text, kind
            )
        reach = {
            "global": f"g{i}", "keyword": f"KWARGS['k{i}']", "module": f"m{i}.v", "attribute": f"model.s{i}",
            "closure": f"f.__closure__[f.__code__.co_freevars.index('c{i}')].cell_contents", "default": "",
        }[kind]  # fmt: skip
        read = {
            "global": f"g{i}",
            "keyword": f"k{i}",
            "module": f"m{i}.v",
            "attribute": f"self.s{i}",
            "closure": f"c{i}",
            "default": f"d{i}",
        }[kind]
        return Root(read, reach, text, kind)

    def source(self) -> str:
        lines = list(self.world.texts)
        if self.around is not None:
            lines.append(f"import {self.around.imports}")
        arguments = [r for r in self.roots if r.kind == "argument"]
        for i, r in enumerate(arguments):
            r.reach = f"ARGS[{i + 1}]"
        keywords = [r for r in self.roots if r.kind == "keyword"]
        defaults = [r for r in self.roots if r.kind == "default"]
        for i, r in enumerate(defaults):
            r.reach = f"f.__defaults__[{i}]"
        for r in self.roots:
            if r.kind == "module":
                lines.append(f"{r.read[:-2]} = types.ModuleType({r.read[:-2]!r})\n{r.read} = {r.text}")
            elif r.kind == "global":
                lines.append(f"{r.read} = {r.text}")
        lines.append(f"ARGS = [{', '.join(['torch.tensor([1.0, 2.0, 3.0])', *(r.text for r in arguments)])}]")
        lines.append(f"KWARGS = {{{', '.join(f'{r.read!r}: {r.text}' for r in keywords)}}}")
        names = ", ".join(["t", *(r.read for r in arguments), *(f"{r.read}={r.text}" for r in defaults)])
        names += "".join([", *", *(f", {r.read}" for r in keywords)]) if keywords else ""
        body = "\n".join(["out = []", *self.body, "return t, out"])
        closures = [r for r in self.roots if r.kind == "closure"]
        cells = "".join(f"{r.read} = {r.text}\n" for r in closures)
        uses = "".join(f"{r.read}\n" for r in closures)
        if self.layout == "function":
            text = f"def f({names}):\n{indent(uses + body)}"
            lines.append(f"def make():\n{indent(cells + text)}\n    return f\nf = make()" if closures else text)
        else:
            attributes = [r for r in self.roots if r.kind == "attribute"]
            module = self.layout == "module"
            start = "\n".join(["super().__init__()", *(f"{r.read} = {r.text}" for r in attributes)])
            lines.append(
                f"class Model{'(nn.Module)' if module else ''}:\n    def __init__(self):\n{indent(start, 8)}\n"
                f"    def {'forward' if module else 'run'}(self, {names}):\n{indent(body, 8)}\nmodel = Model()\n"
                f"f = model{'' if module else '.run'}"
            )
        return "\n".join(lines) + "\n"

    # --- the body
    def locals(self) -> dict[str, Any]:
        space = dict(self.world.space) | {"t": self.world.evaluate("ARGS[0]"), "out": []}
        space["self"] = space.get("model")
        for r in self.roots:
            if r.read.isidentifier():
                with contextlib.suppress(Exception):
                    space[r.read] = self.world.evaluate(r.reach)
        return space

    def write_body(self) -> None:
        places = self.world.walk(self.roots[: -len(self.world.classes)], 60)
        self.read_places = []
        classes = self.world.walk(self.roots, 60)[-6:]
        if self.around is not None:
            for _ in range(self.rng.randint(1, 2)):
                self.body.append(self._guarded(f"out.append({self._around(self.around.reads)})", 0.9))
        for _ in range(self.rng.randint(1, 5)):
            for _ in range(6):
                target = self._choose(places if self.rng.random() < 0.9 else classes)
                statement = self._statement(target, places)
                if statement and self._works(statement):
                    self.body.append(statement)
                    self.read_places.append(target)
                    break

    def _around(self, options: tuple[str, ...]) -> str:
        classes = self.world.classes
        return self.rng.choice(options).replace("{C}", self.rng.choice(classes) if classes else "object")

    def _choose(self, places: list[Place]) -> Place:
        return self.rng.choice(places[:6] if self.rng.random() < 0.4 else places)

    def _works(self, statement: str) -> bool:
        """A statement that raises is taken now and then, inside a `try` mostly."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(compile(statement, "<statement>", "exec"), self.locals())
            except SyntaxError:  # quotes inside of an f-string, before 3.12
                return False
            except Exception:  # noqa: BLE001 - most reads do not fit most values
                return "try:" in statement and self.rng.random() < 0.3 or self.rng.random() < 0.03
        return True

    def _statement(self, target: Place, places: list[Place]) -> str | None:
        rng, p, value = self.rng, target.read, target.value
        if self.precise:
            if isinstance(value, bool | int | float) and abs(value) < 1e6:
                return rng.choice(
                    [f"t = t + {p}", f"out.append({p})", f"if {p} > 1:\n    t = t * 2", f"out.append({p} == 1)"]
                )
            return f"out.append({p})" if isinstance(value, str) else None
        q = rng.choice(places).read
        chance = rng.random()
        if chance < 0.08:
            return self._guarded(rng.choice(EFFECTS).format(p=p), 0.3)
        if chance < 0.2:
            return self._guarded(rng.choice(BLOCKS).format(p=p), 0.3)
        own = reads_of(value)
        text = rng.choice(own if own and rng.random() < 0.75 else ANY).format(p=p, q=q)
        if text.startswith("F("):
            text = text[2:-1]
        form = rng.random()
        if form < 0.55:
            statement = f"out.append({text})"
        elif form < 0.65:
            statement = f"t = t + ({text})"
        elif form < 0.72:
            statement = f"t = t * ({text})"
        elif form < 0.80:
            statement = f"if {text}:\n    t = t * 2\nelse:\n    t = t - 1"
        elif form < 0.88:
            statement = f"def h():\n    return {text}\nout.append(h())"
        elif form < 0.92:
            statement = f"out.append([{text} for _ in range(2)])"
        elif form < 0.96:
            statement = f"out.append((lambda v: v)({text}))"
        else:
            statement = f"def h():\n    yield {text}\nout.extend(h())"
        return self._guarded(statement, 0.3)

    def _guarded(self, statement: str, chance: float) -> str:
        if self.rng.random() < chance:
            return f"try:\n{indent(statement)}\nexcept Exception as e:\n    out.append(type(e).__name__)"
        return statement

    # --- the steps
    def write_steps(self, count: int) -> tuple[list[str], set[int]]:
        steps: list[str] = []
        neutral: set[int] = set()
        restore = None
        for _ in range(count):
            self._call()
            rng = self.rng
            if restore is not None:
                steps.append(restore)
                applies(self.world, restore)
                restore = None
                continue
            places = self.world.walk(self.roots)
            chance = rng.random()
            if chance < 0.08:
                steps.append("pass")
                continue
            if self.around is not None and rng.random() < 0.5:
                steps.append(self._around(self.around.changes).replace("{{}}", "{}"))
                applies(self.world, steps[-1])
                continue
            if self.precise and chance < 0.55:
                step = self._unread(places)
                if step is not None:
                    neutral.add(len(steps))
                    steps.append(step)
                continue
            for _ in range(8):
                spot = self._choose_place(places)
                options = mutations(self.world, places, spot)
                if not options:
                    continue
                step = rng.choice(options)
                target = step.split(" = ")[0]
                if rng.random() < 0.15 and step.startswith(target + " = ") and target == spot.reach:
                    if rng.random() < 0.5:
                        step = f"_kept = {target}; {step}; {target} = _kept"
                    else:
                        step, restore = f"_kept = {target}; {step}", f"{target} = _kept"
                if applies(self.world, step):
                    steps.append(step)
                    break
                restore = None
        return steps, neutral

    def _choose_place(self, places: list[Place]) -> Place:
        """Somewhere near what the program reads, mostly."""
        read = {p.read for p in self.read_places}
        if read and self.rng.random() < 0.7:
            near = [p for p in places if any(r.startswith(p.read) or p.read.startswith(r) for r in read)]
            if near:
                return self.rng.choice(near)
        return self.rng.choice(places)

    def _unread(self, places: list[Place]) -> str | None:
        """A change of something that the program, which is precise, does not look at."""
        read = {p.read for p in self.read_places}
        touched = {step for p in places if p.read in read for step in p.chain}
        options = []
        for p in places:
            if type(p.value) in (dict, types.SimpleNamespace) or type(p.value).__module__ == "generated_program":
                new = self.world.leaf()
                if type(p.value) is dict:
                    options.append(f"{p.reach}['unread'] = {new}")
                elif not isinstance(p.value, type | int | str | list | dict) and hasattr(p.value, "__dict__"):
                    options.append(f"{p.reach}.unread = {new}")
            if type(p.value) is list:
                options.append(f"{p.reach}.append({self.world.leaf()})")
            plain = (
                type(p.parent) in (list, dict, types.SimpleNamespace) or type(p.parent).__name__ in self.world.classes
            )
            if plain and p.chain and p.chain[-1] not in touched and (p.chain[-1][0]) and not self._read_at(p, read):
                options.append(f"{p.reach} = {self.world.leaf()}")
        self.rng.shuffle(options)
        return next((o for o in options[:4] if applies(self.world, o)), None)

    def _read_at(self, target: Place, read: set[str]) -> bool:
        return any(r.startswith(target.read) for r in read)

    def _call(self) -> None:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            space = self.world.space
            space["f"](*space["ARGS"], **space.get("KWARGS", {}))


def generate(seed: int, steps: int = 5) -> Program:
    """The program of a seed. The same seed gives the same program in every process."""
    with restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in range(10):
            writer = Writer(seed + attempt * 10**9)
            try:
                writer.world.execute(writer.source())
            except Exception:  # noqa: BLE001 - classes that Python does not allow
                continue
            writer.write_body()
            source = writer.source()
            writer.world.execute(source)
            text, neutral = writer.write_steps(steps)
            return Program(source, tuple(text), frozenset(neutral))
    raise AssertionError(f"seed {seed} gives no world")
