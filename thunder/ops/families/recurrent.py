"""Recurrent nets: one step of a cell, and the nets that PyTorch runs over whole sequences, padded or packed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder import compat
from thunder.core.dtypes import float32
from thunder.core.proxies import AnyProxy, TensorProxy, has_numbers, like
from thunder.core.symbol import OpTags, Symbol, current_recorder, detached, primitive, user_location
from thunder.errors import CaptureError
from thunder.ops import autocast, backward, ltorch, opaque, pytorch_derivative
from thunder.ops.opaque import casts_inside
from thunder.ops.promotion import to_float
from thunder.ops.registry import LTORCH, alias, composite, torch_prim
from thunder.ops.rules import derivatives, operands
from thunder.ops.shape_rules import require

# ---------------------------------------------------------------------------------------------------------------- cells


def _linears(x, hidden, w_ih, w_hh, b_ih, b_hh):
    return ltorch.linear(hidden, w_hh, b_hh), ltorch.linear(x, w_ih, b_ih)


def _simple(activation: str) -> Callable:
    def step(x, state, w_ih, w_hh, b_ih=None, b_hh=None):
        recurrent, of_input = _linears(x, state[0], w_ih, w_hh, b_ih, b_hh)
        return (LTORCH[activation](recurrent + of_input),)

    return step


def _gru(x, state, w_ih, w_hh, b_ih=None, b_hh=None):
    recurrent, of_input = (ltorch.chunk(gates, 3, 1) for gates in _linears(x, state[0], w_ih, w_hh, b_ih, b_hh))
    reset = ltorch.sigmoid(recurrent[0] + of_input[0])
    update = ltorch.sigmoid(recurrent[1] + of_input[1])
    new = ltorch.tanh(of_input[2] + recurrent[2] * reset)
    return ((state[0] - new) * update + new,)


def _lstm(x, state, w_ih, w_hh, b_ih=None, b_hh=None):
    recurrent, of_input = _linears(x, state[0], w_ih, w_hh, b_ih, b_hh)
    gates = ltorch.chunk(recurrent + of_input, 4, 1)
    take, forget, output = (ltorch.sigmoid(gates[i]) for i in (0, 1, 3))
    cell = forget * state[1] + take * ltorch.tanh(gates[2])
    return output * ltorch.tanh(cell), cell


# and how many gates
_STEPS: dict[str, tuple[Callable, int]] = {
    "rnn_tanh": (_simple("tanh"), 1),
    "rnn_relu": (_simple("relu"), 1),
    "gru": (_gru, 3),
    "lstm": (_lstm, 4),
}


def _check_cell(x, hidden, w_ih, w_hh, b_ih, b_hh, gates: int) -> None:
    require(len(x.shape) == 2 and len(hidden.shape) == 2 and x.shape[1] == w_ih.shape[1])
    require(
        hidden.shape[1] == w_hh.shape[1]
        and hidden.shape[0] == x.shape[0]
        and w_hh.shape[0] == gates * hidden.shape[1]
        and w_ih.shape[0] == w_hh.shape[0]
    )
    for b in (b_ih, b_hh):
        require(b is None or b.shape == w_ih.shape[:1])


def _cell(name: str) -> Symbol:
    """Defines one step of a recurrent net (`lstm_cell`)."""
    step, gates = _STEPS[name]
    function = getattr(torch, f"{name}_cell")
    if name == "lstm":

        def meta(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
            _check_cell(x, hx[0], w_ih, w_hh, b_ih, b_hh, gates)
            return like(hx[0]), like(hx[1])

        def decomposition(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
            return step(x, hx, w_ih, w_hh, b_ih, b_hh)

    else:

        def meta(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
            _check_cell(x, hx, w_ih, w_hh, b_ih, b_hh, gates)
            return like(hx, dtype=to_float(hx.dtype) if name == "rnn_tanh" else hx.dtype)

        def decomposition(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
            return step(x, (hx,), w_ih, w_hh, b_ih, b_hh)[0]

    symbol = composite(function, name=f"{name}_cell", meta=meta)(decomposition)
    derivatives.composed.set(lambda x, *args, **kwargs: x.device.type == "cpu", symbol)  # elsewhere it is one kernel
    return symbol


rnn_tanh_cell, rnn_relu_cell, gru_cell, lstm_cell = (_cell(name) for name in _STEPS)


@gru_cell.vjp
def _(x, hx, w_ih, w_hh, b_ih=None, b_hh=None):
    """As its decomposition, but the difference of state and proposal, which is cheap, is recomputed."""
    if x.device.type != "cpu":
        return NotImplemented
    recurrent, of_input = (ltorch.chunk(gates, 3, 1) for gates in _linears(x, hx, w_ih, w_hh, b_ih, b_hh))
    reset, update = ltorch.sigmoid(recurrent[0] + of_input[0]), ltorch.sigmoid(recurrent[1] + of_input[1])
    new = ltorch.tanh(of_input[2] + recurrent[2] * reset)
    g = yield (hx - new) * update + new
    of_update = g * update
    of_new = backward.tanh_backward(g - of_update, new)
    slopes = [
        backward.sigmoid_backward(of_new * recurrent[2], reset),
        backward.sigmoid_backward(g * (hx - new), update),
    ]
    of_given, of_recurrent = ltorch.cat([*slopes, of_new], 1), ltorch.cat([*slopes, of_new * reset], 1)

    def wanted(t, value):
        return value() if t is not None and t.requires_grad else None

    return (
        wanted(x, lambda: ltorch.mm(of_given, w_ih)),
        wanted(hx, lambda: ltorch.mm(of_recurrent, w_hh) + of_update),
        wanted(w_ih, lambda: ltorch.mm(ltorch.t(of_given), x)),
        wanted(w_hh, lambda: ltorch.mm(ltorch.t(of_recurrent), hx)),
        wanted(b_ih, lambda: ltorch.sum(of_given, 0)),
        wanted(b_hh, lambda: ltorch.sum(of_recurrent, 0)),
    )


# ---------------------------------------------------------------------------------------------------------------- whole
# sequences


def _over_layers(step: Callable, x, states: tuple, params, has_biases, num_layers, bidirectional, batch_first):
    """The net written out, a cell for each place of each layer and direction: (outputs, last states)."""
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    projected = each == (5 if has_biases else 3)
    x = ltorch.transpose(x, 0, 1) if batch_first else x
    last: list[tuple] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            weights = list(params[each * k : each * (k + 1)])
            projection = weights.pop() if projected else None
            state = tuple(ltorch.select(s, 0, k) for s in states)
            steps: list = [None] * x.shape[0]
            for t in reversed(range(x.shape[0])) if direction else range(x.shape[0]):
                state = step(ltorch.select(x, 0, t), state, *weights)
                if projection is not None:
                    state = (ltorch.linear(state[0], projection), *state[1:])
                steps[t] = state[0]
            last.append(state)
            outputs.append(ltorch.stack(steps))
        x = ltorch.cat(outputs, -1) if bidirectional else outputs[0]
    return (ltorch.transpose(x, 0, 1) if batch_first else x), tuple(
        ltorch.stack([state[i] for state in last]) for i in range(len(states))
    )


def _check_net(x, states: tuple, params, batch: int | None, num_layers, bidirectional) -> tuple:
    """The sizes that outputs end in. batch: the dimension of it in x, None for packed sequences."""
    directions = 2 if bidirectional else 1
    require(batch is None or len(x.shape) == 3)
    for s in states:
        require(
            len(s.shape) == 3
            and s.shape[0] == num_layers * directions
            and (batch is None or s.shape[1] == x.shape[batch])
        )
    require(not len(params) % (num_layers * directions) and x.shape[-1] == params[0].shape[1])
    return (directions * states[0].shape[2],)


def _drawing(name: str, meta: Callable, function: Callable) -> Symbol:
    return Symbol(name, meta, id=name, is_prim=True, tags=(OpTags.RANDOM_OP, OpTags.DONT_DCE), fn=function)


def _states(hx) -> tuple:
    return tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)


def _net(name: str) -> None:
    """Defines a recurrent net of PyTorch (`lstm`, `gru`, `rnn_tanh`), for padded and for packed sequences."""
    step, _ = _STEPS[name]
    function = getattr(torch, name)

    def meta(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        width = _check_net(x, _states(hx), params, 0 if batch_first else 1, num_layers, bidirectional)
        return like(x, (*x.shape[:2], *width)), *map(like, _states(hx))

    def packed_meta(x, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
        width = _check_net(x, _states(hx), params, None, num_layers, bidirectional)
        return like(x, (x.shape[0], *width)), *map(like, _states(hx))

    def decomposition(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
        out, states = _over_layers(step, x, _states(hx), params, has_biases, num_layers, bidirectional, batch_first)
        return out, *states

    padded = composite(fn=function, name=name, meta=meta)(decomposition)
    packed = torch_prim(fn=function, name=f"{name}_of_packed_sequences")(packed_meta)
    # with dropout between layers it draws random numbers, and is another operation for passes that merge or repeat
    padded_random = _drawing(f"{name}_with_dropout", meta, function)
    packed_random = _drawing(f"{name}_of_packed_sequences_with_dropout", packed_meta, function)
    # differentiated without memory, PyTorch runs a cell in Python for each place of the sequence
    derivatives.reaches_all.add(padded, packed, padded_random, packed_random)
    packed_under_autocast = _packed_under_autocast(name, function, step, packed_meta)

    @alias(function)
    def call(*args, **kwargs):
        is_packed = "batch_sizes" in kwargs or isinstance(
            (*args, None, None, None)[2 if name != "lstm" else 1], TensorProxy
        )
        cast = current_recorder().context.autocast
        if cast is not None and is_packed:
            args, kwargs = packed._by_position(args, kwargs)
            return packed_under_autocast(cast.state[0], *args, **kwargs)
        if cast is not None:
            # PyTorch casts inside of it, and in which types it comes out depends on the kernel it finds
            return opaque.symbol_for(function)(*args, **kwargs)
        plain, random = (packed, packed_random) if is_packed else (padded, padded_random)
        args, kwargs = plain._by_position(args, kwargs)
        dropout, train = args[6 if is_packed else 5], args[7 if is_packed else 6]
        return (random if train and dropout > 0.0 else plain)(*args, **kwargs)

    padded.torch_functions = packed.torch_functions = (function,)
    if name == "lstm":
        padded.vjp(_lstm_by_layers)
        derivatives.functional.set(lambda *args: pytorch_derivative.derivative_of(padded, True)(*args), padded)


# --- the derivative of an LSTM on the CPU: oneDNN's kernels, which are what PyTorch computes it of there


def _layer_meta(x, w_ih, w_hh, b_ih, b_hh, hidden, cell, *options):
    return like(x, (*x.shape[:2], hidden.shape[1])), like(hidden), like(cell), AnyProxy("")


@primitive(_layer_meta, tags=(OpTags.MATMUL_OP,))
def rnn_layer(*args):
    """The kernel keeps what its backward reads in grad mode only."""
    tensors = [x.detach() if x.requires_grad else x for x in args[:7]]
    with torch.enable_grad():
        return torch.mkldnn_rnn_layer(*tensors, *args[7:])


rnn_layer_backward = backward.kernel(
    "mkldnn_rnn_layer_backward", "default", lambda *args: tuple(map(like, args[:7])), tags=(OpTags.MATMUL_OP,)
)
derivatives.accepts_missing_cotangents.add(rnn_layer_backward)
operands.unknown.add(rnn_layer, rnn_layer_backward)
_LSTM = 2  # oneDNN's number for it


def _has_layers(x, params: tuple, each: int) -> bool:
    """Whether PyTorch computes an LSTM by oneDNN's kernels (ATen/native/RNN.cpp)."""
    tensors = x, *params
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and all(t.device.type == "cpu" and t.dtype is float32 and not has_numbers(t.shape) for t in tensors)
        and 0 not in x.shape
        and each in (2, 4)
    )


def _lstm_by_layers(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):
    """An LSTM in training as one operation for each layer and direction, whose gates are saved. Returns NotImplemented
    where these do not take it."""
    directions, each = 2 if bidirectional else 1, len(params) // (num_layers * (2 if bidirectional else 1))
    if not train or not _has_layers(x, (*hx, *params), each):
        return NotImplemented
    size = hx[0].shape[2]
    y = ltorch.contiguous(ltorch.transpose(x, 0, 1) if batch_first else x)
    done = []
    for layer in range(num_layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            weights = params[each * k : each * (k + 1)]
            if not has_biases:
                weights = [*weights, *(ltorch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in weights)]
            operands = y, *weights, *(ltorch.select(s, 0, k) for s in hx)
            reverse = k % directions > 0
            options = _LSTM, size, num_layers, has_biases
            out, h, c, scratch = rnn_layer(*operands, reverse, [], *options, bidirectional, batch_first, train)
            outputs.append(out)
            done.append(((*operands, out, h, c), (reverse, *options, train, bidirectional, [], batch_first, scratch)))
        y = ltorch.cat(outputs, -1) if bidirectional else outputs[0]
    states = [ltorch.stack([values[i] for values, _ in done]) for i in (8, 9)]
    g, *of_states = yield ltorch.transpose(y, 0, 1) if batch_first else y, *states
    gradients = _layers_backward(ltorch.transpose(g, 0, 1) if batch_first else g, of_states, done, directions, size)
    g = gradients[0][0] + gradients[1][0] if bidirectional else gradients[0][0]
    of_params = [f for of_layer in gradients for f in of_layer[1 : 1 + each]]
    of_hx = tuple(
        ltorch.stack([of_layer[i] for of_layer in gradients]) if s.requires_grad else None for i, s in zip((5, 6), hx)
    )
    return ltorch.transpose(g, 0, 1) if batch_first else g, of_hx, of_params


def _layers_backward(g, of_states: list, done: list, directions: int, size: int) -> list:
    """What the backward kernel gives for each layer and direction. done: what it reads, without cotangents."""
    gradients: list = [None] * len(done)
    for first in reversed(range(0, len(done), directions)):
        parts = ltorch.split(g, size, -1) if directions > 1 else (g,)
        for k, part in enumerate(parts, first):
            operands, options = done[k]
            gradients[k] = rnn_layer_backward(*operands, part, *(ltorch.select(s, 0, k) for s in of_states), *options)
        if first:
            g = gradients[first][0] + gradients[first + 1][0] if directions > 1 else gradients[first][0]
    return gradients


def _packed_under_autocast(name: str, function: Callable, step: Callable, packed_meta: Callable) -> Symbol:
    """The operation of a net on packed sequences under autocast: PyTorch casts inside. step: types the result."""

    def run(kinds: tuple, *args):
        with compat.autocast_on(kinds):
            return function(*args)

    def meta(kinds: tuple, x, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):
        """Outputs and states are of the type that one step of the net gives: fake tensors cannot be cut to lengths that
        stand in a tensor."""
        if x.device.type != "cpu":
            raise CaptureError(
                f"{name} of packed sequences is called under autocast",
                location=user_location(),
                remedy="disable autocast around it, and cast its input",
            )
        results = packed_meta(x, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional)
        states = tuple(like(h, h.shape[1:]) for h in _states(hx))
        with detached(current_recorder().context.replace(autocast=autocast.policy(kinds, False))):
            after = step(like(x, (states[0].shape[0], x.shape[-1])), states, *params[: 4 if has_biases else 2])
        return like(results[0], dtype=after[0].dtype), *(
            like(f, dtype=a.dtype) for f, a in zip(results[1:], after, strict=True)
        )

    return _drawing(f"{name}_of_packed_sequences_under_autocast", meta, run)


for _name in _STEPS:
    _net(_name)
# PyTorch composes them of others, which autocast casts
casts_inside(*(getattr(torch, f"{name}_cell") for name in _STEPS))
