"""Autocast: what torch.autocast does to the arguments of an operation, written out as casts.

Each operation says beside its definition what autocast does to it (`autocast=`): one word for all devices, or a word for each kind that has one:
"lower", "cuda:float32", "cpu:lower cuda:widest". The words are PyTorch's policies (aten/src/ATen/autocast_mode.h); its lists for CPU and CUDA differ.

lower: floating-point tensors become the autocast dtype. float32: they become float32, unless the call names a dtype. widest: they become the widest type among
them. banned: the call is refused. Tensors of float64, of integers and on other devices stay as they are.
"""

from __future__ import annotations

from functools import lru_cache

from thunder.core import dtypes
from thunder.core.proxies import TensorProxy, map_structure, proxies_in
from thunder.core.symbol import Symbol
from thunder.ops.define import LTORCH

__all__ = ["Policy", "policy", "kinds_of", "OPAQUE"]

WORDS = ("lower", "float32", "widest", "banned")

# functions of PyTorch without a definition here that its lists name
OPAQUE: dict[str, str] = {
    name: words
    for words, names in {
        "lower": "conv_tbc",
        "cuda:lower": "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        "cpu:float32": (
            "cholesky cholesky_inverse cholesky_solve fractional_max_pool2d fractional_max_pool3d geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_cond "
            "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank "
            "linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve max_unpool2d max_unpool3d nanquantile orgqr ormqr "
            "pinverse polar qr quantile svd triangular_solve ctc_loss fake_quantize_per_tensor_affine"
        ),
        "cuda:float32": "linalg_matrix_norm nuclear_norm pdist renorm",
        "float32": "multi_margin_loss multilabel_margin_loss",
    }.items()
    for name in names.split()
}


@lru_cache(maxsize=256)
def kinds_of(words: str) -> dict[str, str]:
    """What `autocast=` says, as {device kind: policy}."""
    if ":" not in words:
        assert words in WORDS, f"autocast is one of {', '.join(WORDS)}, not {words!r}"
        return {"cpu": words, "cuda": words}
    found = dict(part.split(":") for part in words.split())
    assert all(w in WORDS for w in found.values()), f"autocast is made of {', '.join(WORDS)}, not {words!r}"
    return found


class Policy:
    """What torch.autocast in one state does: called with an operation and its arguments, gives the arguments to record. The casts are recorded before it."""

    __slots__ = ("state", "targets")

    def __init__(self, state: tuple):
        self.state = state
        self.targets = {kind: dtypes.to_dtype(lower) for kind, lower in state}

    def __call__(self, symbol: Symbol, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        words = kinds_of(symbol.autocast)  # type: ignore[arg-type]
        for kind, lower in self.targets.items():
            word = words.get(kind)
            if word is None:
                continue
            tensors = [t for t in proxies_in(kwargs, proxies_in(args, [])) if _eligible(t, kind)]
            if not tensors or not symbol.info.get("autocast_when", _always)(kind, args, kwargs):
                continue
            if word == "banned":
                raise RuntimeError(f"{symbol.name} is unsafe to autocast: use its variant that takes logits, or disable autocast around it")
            target = lower if word == "lower" else dtypes.float32 if word == "float32" else _widest(tensors, lower)
            if word == "float32" and kwargs.get("dtype") is not None:
                continue
            if all(t.dtype is target for t in tensors):
                continue
            done: dict = {}  # a tensor that stands in two places is cast once

            def cast(x, kind=kind, target=target, done=done):
                if not _eligible(x, kind) or x.dtype is target:
                    return x
                if x not in done:
                    done[x] = LTORCH["to"](x, dtype=target)
                return done[x]

            args, kwargs = map_structure(cast, args), map_structure(cast, kwargs)
        return args, kwargs


def _always(kind: str, args: tuple, kwargs: dict) -> bool:
    return True


def _eligible(x, kind: str) -> bool:
    return type(x) is TensorProxy and x.device.type == kind and x.dtype.category == 2 and x.dtype is not dtypes.float64


def _widest(tensors: list[TensorProxy], lower):
    return dtypes.float32 if any(t.dtype is dtypes.float32 for t in tensors) else lower


@lru_cache(maxsize=64)
def policy(state: tuple) -> Policy:
    """The policy for an autocast state ((device kind, torch dtype), ...), one entry for each kind that autocast is on for."""
    return Policy(state)
