"""Memory: which values of a program share it, and what in-place operations have made of them.

A program holds on to its proxies; when one is written to, it stands for another value from then on. Views of it, and
what it is a view of, are written to as well: the written part is put into the whole (`through`), and other views are
rebuilt when somebody reads them. So the recorded program has no mutation in it; what came from outside is written
back at the end (see `Capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from thunder import compat
from thunder.analysis import aliases
from thunder.analysis.aliases import may_view
from thunder.core.proxies import Proxy, TensorProxy, leaves, like, map_structure
from thunder.core.symbol import BoundSymbol, Symbol, current_recorder, user_location
from thunder.errors import CaptureError
from thunder.ops import ltorch
from thunder.ops.functionalize.histories import grad_enabled, holding, is_unseen, with_history
from thunder.ops.functionalize.parts import part_of, part_shown
from thunder.ops.rules import views

REMEDY = "write to a clone: x = x.clone()"


class Memory:
    """The state of one recording.

    active: whether anything was written to. outside: called with what is about to be written to, in the end, and
    whether that happens through a view, and behind autograd's back; says no by raising. layout: gives a fake tensor
    with the strides, and on the storage, that a value has when the program runs in PyTorch; asked only when what is
    written to may share memory. joins: called with what is about to become a result that autograd knows, and with what
    it shows.
    """

    def __init__(
        self,
        operations: list[BoundSymbol] = (),
        outside: Callable[[TensorProxy, bool, bool], None] | None = None,
        layout: Callable | None = None,
        joins: Callable[[TensorProxy], None] = lambda x: None,
    ):  # type: ignore[assignment]
        self.active = False
        self.outside, self.layout, self.joins = outside, layout, joins
        # view -> the operation that made it and its base
        self.view_of: dict[Proxy, tuple[BoundSymbol, TensorProxy]] = {}
        self.views: dict[Proxy, list[Proxy]] = {}
        self.current: dict[Proxy, TensorProxy] = {}  # what was written to -> what it is now
        self.owner: dict[Proxy, Proxy] = {}  # the other way round
        self.versions: dict[str, str] = {}  # names of values that were written -> name of what they were written to
        self.stale: set[Proxy] = set()  # views to rebuild before they are read, with all that show them
        # value -> its views that are not stale, or that others show that are not
        self.fresh: dict[Proxy, dict[Proxy, None]] = {}
        # views that autograd does not see through -> the last value written to them, which says where they come from
        self.histories: dict[Proxy, TensorProxy] = {}
        self.copies: set[Proxy] = set()  # what turned out to be a copy
        # what is viewed in the end -> results that may be views of it or copies
        self.undecided: dict[Proxy, list[TensorProxy]] = {}
        self.counted: set[Proxy] = set()  # what was written to not only through `.data`, so that its version counts on
        self.filled: set[Proxy] = set()  # what has other elements now, directly or through a view
        self.rearranged: dict[Proxy, list[tuple[Symbol, tuple]]] = {}  # what changed its shape in place, and how
        # what has another shape now, by an operation in place -> a value of that shape
        self.formed: dict[Proxy, TensorProxy] = {}
        self.lost: dict[Proxy, str] = {}  # what can not be read any more -> why
        self.fixed: dict[Proxy, str] = {}  # what must not be written to -> why
        # leaves that share memory in PyTorch and not here -> with what
        self.apart: dict[Proxy, TensorProxy] = {}
        self.leaving: dict[Proxy, TensorProxy] = {}  # what shares memory in PyTorch -> which of it leaves the program
        self.shared: dict[Proxy, list[TensorProxy]] = {}  # values that share memory in a way that is not known
        self.rebound: set[Proxy] = set()  # what shows other memory than it was made with
        # values that tensors had before their `.data` were set or written to -> the user's line
        self.superseded: dict[Proxy, tuple | None] = {}
        self.followed: set[Proxy] = set()  # views that were read under grad since their base requires grad
        self.intact: set[Proxy] = set()  # views that nothing was written to since they were made, at the end
        self._deriving = False
        for operation in operations:
            self.add(operation)

    @contextmanager
    def no_views(self) -> Iterator[None]:
        """What is recorded here is no view of the program's."""
        self._deriving = True
        try:
            yield
        finally:
            self._deriving = False

    # --- what operations tell
    def add(self, operation: BoundSymbol) -> None:
        """A view was recorded."""
        if self._deriving or not may_view(operation):
            return
        viewed = next((i for i in operation.inputs if type(i) is TensorProxy), None)
        if viewed is None:
            return
        viewed = self.holder(viewed)
        for o in operation.outputs:
            if o is not viewed and o not in self.view_of:
                self.add_view(o, operation, viewed)
                if aliases.may_copy.of(operation.sym):
                    self.undecided.setdefault(self.base(viewed), []).append(o)

    def add_view(self, view: Proxy, operation: BoundSymbol, viewed: TensorProxy) -> None:
        self.view_of[view] = operation, viewed
        self.views.setdefault(viewed, []).append(view)
        self._visit_again(view)

    def end_view(self, view: TensorProxy) -> tuple[BoundSymbol, TensorProxy]:
        """`view` is none any more. Returns the operation that made it and what it showed."""
        operation, viewed = self.view_of.pop(view)
        self.views[viewed] = [v for v in self.views[viewed] if v is not view]
        return operation, viewed

    def replace(self, x: TensorProxy, inner: TensorProxy) -> None:
        """`inner` shows what `x` showed, and views of `x` show `inner`, from now on."""
        if x in self.view_of:
            operation, viewed = self.end_view(x)
            self.add_view(inner, operation.swap({x: inner}), viewed)
        for view in self.views.pop(x, ()):
            operation, _ = self.view_of[view]
            self.add_view(view, operation.swap({p: inner for p in operation.inputs if self.holder(p) is x}), inner)

    def freshen(self, x: Proxy) -> None:
        self.stale.discard(x)
        self._visit_again(x)

    def _visit_again(self, x: Proxy) -> None:
        """A write to what `x` shows comes to `x`: each view on the way is among those that are visited."""
        while x in self.view_of:
            viewed = self.view_of[x][1]
            if x in (shown := self.fresh.setdefault(viewed, {})):
                return
            shown[x] = None
            x = viewed

    def holder(self, x: TensorProxy) -> TensorProxy:
        """The proxy that the program holds, for a value that was written into it."""
        return self.owner.get(x, x)  # type: ignore[return-value]

    def base(self, x: TensorProxy) -> TensorProxy:
        """What a view shows in the end; the value itself where it is no view."""
        x = self.holder(x)
        while x in self.view_of:
            x = self.view_of[x][1]
        return x

    # --- reading
    def latest(self, x):
        """What a proxy stands for after the writes recorded so far. Raises CaptureError where that is not known."""
        if type(x) is not TensorProxy:
            return x
        x = self.holder(x)
        if x in self.lost:
            raise CaptureError(self.lost[x], location=user_location(), remedy=REMEDY)
        if x in self.stale:
            self._derive(x)
        return self.current.get(x, x)

    def _derive(self, x: TensorProxy) -> None:
        """Rebuilds a view from its base as it is now, and with it the other results of its operation."""
        operation, viewed = self.view_of[x]
        now, context = self.latest(viewed), current_recorder().context  # type: ignore[union-attr]
        if now.requires_grad and context.grad_enabled:
            self.followed.add(x)
        if views.several.of(operation.sym) and (x.requires_grad or now.requires_grad) and x not in self.intact:
            raise CaptureError(
                f"a result of {operation.sym.name}(), which gives several views, is read after its memory was written "
                "to, which autograd does not support",
                location=user_location(), remedy="make the view again after the write",
            )  # fmt: skip

        def in_new_memory(p):
            return now if type(p) is TensorProxy and self.holder(p) is viewed else p

        with self.no_views(), grad_enabled(operation.context is None or operation.context.grad_enabled):  # at any time
            derived = operation.sym(
                *map_structure(in_new_memory, operation.args), **map_structure(in_new_memory, operation.kwargs)
            )
        for old, new in zip(operation.outputs, leaves(derived), strict=True):
            if old in self.stale:
                self.freshen(old)
                if (history := self.histories.get(old)) is not None and not new.requires_grad:
                    with grad_enabled(True):
                        new = holding.record(current_recorder(), (history, new), {}, like(new))
                self.current[old], self.owner[new] = new, old

    # --- writing
    def write(self, target: TensorProxy, value: TensorProxy) -> None:
        """`target` holds `value` from now on, and whatever shares memory with it the corresponding part."""
        target = self.holder(target)
        behind = self.declare(target)
        base = self.base(target)
        self.active = True
        self.decide(base)
        self._lose_shared(target)
        self.filled.add(base)
        if "data" not in behind:
            self.counted.add(base)
        else:
            self.supersede(*(self.current.get(x, x) for x in (base, *self.below(base))))
        self.versions[value.name] = target.name
        self._hold(target, with_history(self.latest(target), value))
        self._note_history(target)
        while target in self.view_of:
            operation, viewed = self.view_of[target]
            inverse = views.inverse.of(operation.sym)
            whole = inverse and inverse(operation, target, self.latest(viewed), value)
            if whole is None:
                self._lose(target, operation)
                return
            self.versions[whole.name] = viewed.name
            whole = with_history(self.latest(viewed), whole)
            self._hold(viewed, whole, target_view=target)
            self._note_history(viewed)
            target, value = viewed, whole

    def _note_history(self, x: TensorProxy) -> None:
        """What is written to a view that autograd does not see through is the view's own history, whatever its memory
        is written to from elsewhere."""
        if self.current[x].requires_grad and self.detaching(x):
            self.histories[x] = self.current[x]

    def supersede(self, *values: Proxy) -> None:
        """The memory of these values gets others, and autograd does not know."""
        self.superseded |= dict.fromkeys(values, user_location())

    def declare(self, target: TensorProxy) -> set[str]:
        """`target` is about to be written to. Raises where that is not allowed; says which operations that autograd
        does not see through it is viewed by."""
        target = self.holder(target)
        self.decide(self.base(target))
        base = self.base(target)
        if self._lacks_history(target) or self._shows_rebound_leaf(target):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if base in self.fixed:
            raise CaptureError(self.fixed[base], location=user_location(), remedy=REMEDY)
        behind = self.detaching(target)
        if self.outside is not None:
            self.outside(base, base is not target, bool(behind))
        return behind

    def _lacks_history(self, x: TensorProxy) -> bool:
        """Whether PyTorch takes a view for a leaf, since nobody has read it under grad since what it is a view of
        requires grad."""
        operation, viewed = self.view_of.get(x, (None, None))
        recorder = current_recorder()
        if operation is None or x.requires_grad or x in self.followed or is_unseen(operation):
            return False
        if recorder is None or not recorder.context.grad_enabled:
            return False
        seen = operation.context is not None and operation.context.grad_enabled  # None: which of the two is the view?
        return seen and self.current.get(base := self.base(viewed), base).requires_grad and not self.detaching(x)

    def _shows_rebound_leaf(self, x: TensorProxy) -> bool:
        """Whether a leaf that requires grad, and whose `.data` were set, is overwritten under grad."""
        recorder = current_recorder()
        if recorder is None or not recorder.context.grad_enabled:
            return False
        while x in self.view_of and x not in self.rebound:
            operation, x = self.view_of[x]
            if is_unseen(operation):
                return False
        return x in self.rebound and x.requires_grad and recorder.is_leaf is not None and recorder.is_leaf(x)

    def joins_history(self, target: TensorProxy) -> None:
        """`target` is about to become a result that autograd knows. Raises PyTorch's errors for views that can not."""
        x = self.holder(target)
        self.joins(x)
        self.followed.add(x)
        while x in self.view_of:
            view, (operation, x) = x, self.view_of[x]
            if is_unseen(operation):
                return
            self.joins(x)
            if operation.context is not None and not operation.context.grad_enabled:
                raise RuntimeError(
                    "A view was created in no_grad mode and is being modified inplace with grad mode enabled. Make "
                    "both inside of the block or outside."
                )
            if views.several.of(operation.sym):
                at = next(i for i, o in enumerate(operation.outputs) if o is view)
                raise RuntimeError(
                    f"Output {at} of {operation.sym.name.capitalize()}Backward0 is a view and is being modified "
                    "inplace. This view is the output of a function that returns multiple views. Such functions do "
                    "not allow the output views to be modified inplace. "
                    "You should replace the inplace operation by an out-of-place one."
                )

    def repeats(self, x: TensorProxy) -> bool:
        """Whether `x` shows an element several times, as `expand` does."""
        x = self.holder(x)
        while x in self.view_of:
            if self.view_of[x][0].sym is ltorch.expand:
                return True
            x = self.view_of[x][1]
        return False

    def detaching(self, x: TensorProxy) -> set[str]:
        """The operations between a view and its base that autograd does not see through."""
        names = set()
        while x in self.view_of:
            operation, x = self.view_of[x]
            if is_unseen(operation):
                names.add(operation.sym.name)
        return names

    def decide(self, base: TensorProxy) -> None:
        """Which results of `reshape` and its like are views of what is about to be written to, by the strides that it
        has."""
        if self.layout is None:
            return
        for x in self.undecided.pop(base, ()):
            if self.base(x) is not base:  # a view of one that turned out to be a copy
                self.undecided.setdefault(self.base(x), []).append(x)
                continue
            operation, _ = self.view_of[x]
            with compat.DisableTorchFunction():
                copied = self.layout(x).untyped_storage()._cdata != self.layout(base).untyped_storage()._cdata
            if copied:
                self.copies.add(x)
                self.end_view(x)
            elif operation.sym.name == "as_strided":  # says places in memory, whatever it was called on
                with compat.DisableTorchFunction():
                    part = part_shown(self.layout(x, True), self.layout(base, True))
                if part is not None:
                    self.end_view(x)
                    self.add_view(x, part_of.bind(base, *part, output=x, context=current_recorder().context), base)

    def _hold(self, target: TensorProxy, value: TensorProxy, target_view: TensorProxy | None = None) -> None:
        self.current[target], self.owner[value] = value, target
        self.versions[value.name] = target.name
        self.freshen(target)
        self.outdate(target, target_view)

    def outdate(self, x: Proxy, target_view: TensorProxy | None) -> None:
        """Views of `x` are rebuilt before they are read. A write visits only what was read since the last one."""
        for view in self.fresh.pop(x, ()):
            if view not in self.view_of or self.view_of[view][1] is not x:
                continue
            if view is target_view:
                self.freshen(view)
                continue
            self.stale.add(view)
            self.current.pop(view, None)
            self.outdate(view, None)

    def _lose_shared(self, target: TensorProxy) -> None:
        """Everything that may show the memory of `target` through a result of an operation that nothing is known of."""
        if not self.shared:
            return
        base = self.base(target)
        for x in (base, *self.below(base)):
            for other in self.shared.get(x, ()):
                other_base = self.base(other)
                if other_base is base:
                    continue
                if self.outside is not None:
                    self.outside(other_base, True, False)
                for lost in (other_base, *self.below(other_base)):
                    self.lost[lost] = (
                        "an operation that thunder does not know gave a view of a tensor; one of the two was written "
                        "to, and the other is read again"
                    )

    def below(self, x: Proxy) -> list[Proxy]:
        return [v for view in self.views.get(x, ()) for v in (view, *self.below(view))]

    def _lose(self, target: TensorProxy, operation: BoundSymbol) -> None:
        """`target` may be a view or a copy of what it was made of, which nobody may read from here on."""
        why = (
            f"{operation.sym.name}() gave a view or a copy, which of the two is not known here; its result was written "
            "to, and the tensor it was made of is read again"
        )
        base, valid = self.base(target), {target, *self.below(target)}
        self.lost |= {x: why for x in (base, *self.below(base)) if x not in valid}

    def share(self, a: TensorProxy, b: TensorProxy) -> None:
        """Two values share memory in a way that is not known: when one is written to, the other is lost."""
        for x, y in ((a, b), (b, a)):
            self.shared.setdefault(self.holder(x), []).append(self.holder(y))

    def show_part(self, x: TensorProxy, base: TensorProxy, part: tuple) -> None:
        """`x` came from outside and shows the `part` (size, stride, offset) of `base`, which did, too."""
        if x not in self.view_of:
            self.add_view(x, part_of.bind(base, *part, output=x), base)
            self.undecided.setdefault(self.base(base), []).extend(self.undecided.pop(x, ()))
            if base in self.current:
                self.stale.add(x)
                self.outdate(x, None)

    def become(self, x: TensorProxy, leaf: TensorProxy) -> None:
        """The program's proxy `x` stands for a new leaf from now on, with the values that it has."""
        x = self.holder(x)
        self.freeze(x, leaf)
        self.active = True
        self.current.pop(x, None)
        self.owner[x] = leaf

    def is_apart(self, x: TensorProxy) -> bool:
        """Whether nothing else shows the memory of `x`, as far as is known."""
        x = self.holder(x)
        return x not in self.view_of and not self.views.get(x) and not self.shared.get(x)

    def stand_for(self, x: TensorProxy, other: TensorProxy) -> None:
        """`other` is the tensor that the program has as `x`, which is apart, from now on."""
        self.active = True
        self.owner[self.holder(x)] = other

    def without_grad(self, x: TensorProxy) -> TensorProxy:
        """`x` stands for its elements without their history from now on, which are returned: nothing is written."""
        x, now = self.holder(x), self.latest(x)
        with self.no_views():
            shown = ltorch.detach(now)
        self.active = True
        self.current[x], self.owner[shown] = shown, x
        return shown

    def with_grad(self, x: TensorProxy, before: TensorProxy, shown: TensorProxy) -> None:
        """Takes `without_grad` back, by which the leaf `before` became `shown`; what was written since stays."""
        x, now = self.holder(x), self.latest(x)
        if now is not shown:
            with grad_enabled(True):
                before = holding.record(current_recorder(), (before, now), {}, like(now))
            del self.owner[now]
        self.current[x], self.owner[before], self.versions[before.name] = before, x, x.name

    def freeze(self, x: TensorProxy, copy: TensorProxy) -> None:
        """`copy` shares memory with `x` in PyTorch, but not in the program: nobody may write to either, unless nothing
        else is made of `x`."""
        x = self.holder(x)
        self.fixed[self.base(x)] = why = (
            "a tensor is written to that shares memory with a leaf that was made of it (requires_grad_(), Parameter)"
        )
        if not self.is_alone(x):
            self.fixed[copy] = why
            self.apart[copy] = self.base(x)

    def leaves_apart(self, x: TensorProxy) -> bool:
        """`x` leaves the program. Whether something that it shares memory with in PyTorch, and not here, did before."""
        base = self.base(x)
        return bool(self.apart) and self.leaving.setdefault(self.apart.get(base, base), base) is not base

    def is_alone(self, x: TensorProxy) -> bool:
        """Whether `x` was made by the program, and nothing else shows its memory."""
        x = self.holder(x)
        program_values = (o for operation in current_recorder().bound_symbols for o in operation.outputs)
        return self.is_apart(x) and any(o is x for o in program_values)

    def reform(self, x: TensorProxy, value: TensorProxy) -> None:
        """`x` is `value` from now on, of whatever shape."""
        x = self.holder(x)
        self.active = True
        self.current[x], self.owner[value], self.formed[x] = value, x, value
        self.freshen(x)

    # --- the end
    def written_back(self, base: TensorProxy, value: TensorProxy) -> None:
        """What came from outside has its last value in its own memory now: from here on it stands for itself, or for
        `value`, which is the same tensor in its new shape."""
        self.current.pop(base, None)
        if value is not base:
            self.current[base], self.owner[value] = value, base
        self.freshen(base)
        self.outdate(base, None)

    def end(self) -> None:
        """The program has ended: views that are not stale now were made after the last write."""
        self.intact = {view for view in self.view_of if view not in self.stale}

    def settle(self) -> None:
        """Views that were written to directly are rebuilt from their bases when they are read next, so that
        results share memory as the program's do."""
        for view, (operation, viewed) in list(self.view_of.items()):
            if viewed not in self.lost and self.current.pop(view, None) is not None:
                self.stale.add(view)
                self.outdate(view, None)
            if operation.context is None:  # another name from outside: it is what it names
                self.freshen(view)
