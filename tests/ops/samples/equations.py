"""Arguments that tests call the operations of `thunder/ops/families/equations.py` and `lu.py` with."""

from __future__ import annotations

import torch

from thunder.core.symbol import Symbol
from thunder.ops.families.equations import (
    linalg_solve,
    linalg_solve_triangular,
    lobpcg,
    lstsq,
    pinv,
    pinverse,
    solve_ex,
    tensorinv,
    tensorsolve,
    triangular_solve,
)
from thunder.ops.families.lu import (
    ldl_solve,
    linalg_lu,
    linalg_lu_solve,
    lu_factor,
    lu_factor_ex,
    lu_unpack,
    old_lu_solve,
)


def _well(make, *shape):
    return make(*shape) + 4 * torch.eye(shape[-1])


@linalg_solve.samples
def _(make):
    yield _well(make, 3, 3), make(3)
    yield _well(make, 2, 3, 3), make(2, 3, 4)
    yield _well(make, 2, 3, 3), make(2, 3)
    yield (_well(make, 3, 3), make(2, 4, 3)), {"left": False}


@solve_ex.samples
def _(make):
    yield _well(make, 3, 3), make(3)
    yield _well(make, 2, 3, 3), make(2, 3, 4)


@linalg_solve.error_samples
def _(make):
    yield make(3, 2), make(3)
    yield make(3, 3), make(2, 4)


@linalg_solve_triangular.samples
def _(make):
    yield (_well(make, 3, 3), make(3, 2)), {"upper": True}
    yield (_well(make, 2, 3, 3), make(4, 3)), {"upper": False, "left": False, "unitriangular": True}


@triangular_solve.samples
def _(make):
    yield make(3, 2), _well(make, 3, 3)
    yield make(3, 2), _well(make, 2, 3, 3), False, True, True


@linalg_solve_triangular.error_samples
def _(make):
    yield (make(3, 2), make(3, 2)), {"upper": True}


@triangular_solve.error_samples
def _(make):
    yield make(3, 2), make(2, 3)


@lu_unpack.samples
def _(make):
    for shape in ((3, 3), (2, 4, 3), (3, 5)):
        yield make(*shape), torch.arange(1, min(shape[-2:]) + 1, dtype=torch.int32).expand(*shape[:-2], -1).contiguous()


@linalg_lu_solve.samples
def _(make):
    LU, pivots = _well(make, 2, 3, 3), torch.tensor([2, 3, 3], dtype=torch.int32)
    for left in (True, False):
        for transposed in (True, False):
            yield (LU, pivots.expand(2, 3).contiguous(), make(2, 3, 3)), {"left": left, "adjoint": transposed}
    yield LU[0], pivots, make(2, 3, 4)


@old_lu_solve.samples
def _(make):
    yield make(3, 2), _well(make, 3, 3), torch.tensor([2, 3, 3], dtype=torch.int32)


@lu_unpack.error_samples
def _(make):
    yield make(3, 3), torch.tensor([1, 2, 3])


@linalg_lu_solve.error_samples
def _(make):
    yield make(3, 3), torch.tensor([1, 2], dtype=torch.int32), make(3, 3)


@ldl_solve.samples
def _(make):
    yield _well(make, 3, 3), torch.tensor([1, 2, 3], dtype=torch.int32), make(3, 2)


@ldl_solve.error_samples
def _(make):
    yield make(3, 3), torch.tensor([1, 2], dtype=torch.int32), make(3, 2)


@pinv.samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 4),), {"rtol": 1e-3, "atol": 1e-4}
    yield make(3, 4), 1e-3
    x = make(3, 3)
    yield (x + x.mT,), {"hermitian": True}
    yield (make(2, 4, 3),), {"atol": torch.tensor([0.1, 0.0], dtype=x.dtype)}


@pinverse.samples
def _(make):
    yield (make(2, 4, 3),)


@lstsq.samples
def _(make):
    # gelsy, which is taken by default, begins with pivots that happen to be in memory
    yield (make(4, 3), make(4, 2)), {"driver": "gels"}
    yield (make(2, 4, 3), make(2, 4, 2)), {"driver": "gels"}
    yield (make(4, 3), make(4, 2)), {"driver": "gelsd"}


@pinv.error_samples
def _(make):
    yield (make(3),)


@lstsq.error_samples
def _(make):
    yield make(4, 3), make(3, 2)
    yield (make(4, 3), make(4, 2)), {"driver": "gelsx"}


@tensorinv.samples
def _(make):
    yield (make(2, 3, 6),)
    yield make(4, 2, 2), 1


@tensorsolve.samples
def _(make):
    yield make(2, 3, 6), make(2, 3)
    yield make(2, 6, 3), make(2, 3), (1,)


@tensorinv.error_samples
def _(make):
    yield (make(2, 3, 5),)


@tensorsolve.error_samples
def _(make):
    yield make(2, 3, 5), make(2, 3)


@lobpcg.samples
def _(make):
    x = make(9, 9)
    yield x @ x.mT + torch.eye(9), 2


@lobpcg.error_samples
def _(make):
    yield make(4, 4), 2


def _matrix_samples(symbol: Symbol, *more: dict) -> None:
    @symbol.samples
    def _(make):
        for shape in ((3, 3), (2, 4, 3), (3, 5)):
            yield (make(*shape),)
        for options in more:
            yield (make(3, 3),), options

    @symbol.error_samples
    def _(make):
        yield (make(3),)


_matrix_samples(lu_factor)
_matrix_samples(lu_factor_ex, {"check_errors": True})
_matrix_samples(linalg_lu)
