"""Arguments that tests call the operations of `thunder/ops/families/linear_algebra.py` with."""

from __future__ import annotations

import torch

from thunder.core.symbol import Symbol
from thunder.ops import LTORCH


def _well(make, *shape):
    return make(*shape) + 4 * torch.eye(shape[-1])


@LTORCH["linalg_solve"].samples
def _(make):
    yield _well(make, 3, 3), make(3)
    yield _well(make, 2, 3, 3), make(2, 3, 4)
    yield _well(make, 2, 3, 3), make(2, 3)
    yield (_well(make, 3, 3), make(2, 4, 3)), {"left": False}


@LTORCH["linalg_solve_ex"].samples
def _(make):
    yield _well(make, 3, 3), make(3)
    yield _well(make, 2, 3, 3), make(2, 3, 4)


@LTORCH["linalg_solve"].error_samples
def _(make):
    yield make(3, 2), make(3)
    yield make(3, 3), make(2, 4)


@LTORCH["linalg_solve_triangular"].samples
def _(make):
    yield (_well(make, 3, 3), make(3, 2)), {"upper": True}
    yield (_well(make, 2, 3, 3), make(4, 3)), {"upper": False, "left": False, "unitriangular": True}


@LTORCH["triangular_solve"].samples
def _(make):
    yield make(3, 2), _well(make, 3, 3)
    yield make(3, 2), _well(make, 2, 3, 3), False, True, True


@LTORCH["linalg_solve_triangular"].error_samples
def _(make):
    yield (make(3, 2), make(3, 2)), {"upper": True}


@LTORCH["triangular_solve"].error_samples
def _(make):
    yield make(3, 2), make(2, 3)


@LTORCH["lu_unpack"].samples
def _(make):
    for shape in ((3, 3), (2, 4, 3), (3, 5)):
        yield make(*shape), torch.arange(1, min(shape[-2:]) + 1, dtype=torch.int32).expand(*shape[:-2], -1).contiguous()


@LTORCH["linalg_lu_solve"].samples
def _(make):
    LU, pivots = _well(make, 2, 3, 3), torch.tensor([2, 3, 3], dtype=torch.int32)
    for left in (True, False):
        for transposed in (True, False):
            yield (LU, pivots.expand(2, 3).contiguous(), make(2, 3, 3)), {"left": left, "adjoint": transposed}
    yield LU[0], pivots, make(2, 3, 4)


@LTORCH["lu_solve"].samples
def _(make):
    yield make(3, 2), _well(make, 3, 3), torch.tensor([2, 3, 3], dtype=torch.int32)


@LTORCH["lu_unpack"].error_samples
def _(make):
    yield make(3, 3), torch.tensor([1, 2, 3])


@LTORCH["linalg_lu_solve"].error_samples
def _(make):
    yield make(3, 3), torch.tensor([1, 2], dtype=torch.int32), make(3, 3)


@LTORCH["linalg_ldl_solve"].samples
def _(make):
    yield _well(make, 3, 3), torch.tensor([1, 2, 3], dtype=torch.int32), make(3, 2)


@LTORCH["linalg_ldl_solve"].error_samples
def _(make):
    yield make(3, 3), torch.tensor([1, 2], dtype=torch.int32), make(3, 2)


@LTORCH["linalg_pinv"].samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 4),), {"rtol": 1e-3, "atol": 1e-4}
    yield make(3, 4), 1e-3
    x = make(3, 3)
    yield (x + x.mT,), {"hermitian": True}
    yield (make(2, 4, 3),), {"atol": torch.tensor([0.1, 0.0], dtype=x.dtype)}


@LTORCH["pinverse"].samples
def _(make):
    yield (make(2, 4, 3),)


@LTORCH["linalg_lstsq"].samples
def _(make):
    # gelsy, which is taken by default, begins with pivots that happen to be in memory
    yield (make(4, 3), make(4, 2)), {"driver": "gels"}
    yield (make(2, 4, 3), make(2, 4, 2)), {"driver": "gels"}
    yield (make(4, 3), make(4, 2)), {"driver": "gelsd"}


@LTORCH["linalg_pinv"].error_samples
def _(make):
    yield (make(3),)


@LTORCH["linalg_lstsq"].error_samples
def _(make):
    yield make(4, 3), make(3, 2)
    yield (make(4, 3), make(4, 2)), {"driver": "gelsx"}


@LTORCH["linalg_tensorinv"].samples
def _(make):
    yield (make(2, 3, 6),)
    yield make(4, 2, 2), 1


@LTORCH["linalg_tensorsolve"].samples
def _(make):
    yield make(2, 3, 6), make(2, 3)
    yield make(2, 6, 3), make(2, 3), (1,)


@LTORCH["linalg_tensorinv"].error_samples
def _(make):
    yield (make(2, 3, 5),)


@LTORCH["linalg_tensorsolve"].error_samples
def _(make):
    yield make(2, 3, 5), make(2, 3)


@LTORCH["svd_lowrank"].samples
def _(make):
    yield make(5, 4), 3
    yield make(2, 5, 4), 2, 1


@LTORCH["pca_lowrank"].samples
def _(make):
    yield make(5, 4), 3


@LTORCH["lobpcg"].samples
def _(make):
    x = make(9, 9)
    yield x @ x.mT + torch.eye(9), 2


@LTORCH["pca_lowrank"].error_samples
def _(make):
    yield make(5, 4), 5


@LTORCH["lobpcg"].error_samples
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


_matrix_samples(LTORCH["linalg_lu_factor"])
_matrix_samples(LTORCH["linalg_lu_factor_ex"], {"check_errors": True})
_matrix_samples(LTORCH["linalg_lu"])


@LTORCH["matrix_power"].samples
def _(make):
    yield make(3, 3), 3
    yield make(2, 3, 3), 0
    for n in (1, 5, -2):
        yield make(3, 3) + 4 * torch.eye(3), n


@LTORCH["matrix_power"].error_samples
def _(make):
    yield make(3, 2), 2


@LTORCH["cholesky"].samples
def _(make):
    x = make(2, 3, 3)
    yield (x @ x.mT + torch.eye(3),)
    yield (x[0] @ x[0].mT + torch.eye(3), True)


def _factors(make):
    return torch.tril(make(2, 3, 3)) + 3 * torch.eye(3)


@LTORCH["cholesky_inverse"].samples
def _(make):
    yield (_factors(make),)
    yield (_factors(make).mT.contiguous(), True)


@LTORCH["cholesky_solve"].samples
def _(make):
    yield make(2, 3, 4), _factors(make)
    yield make(3, 4), _factors(make).mT.contiguous(), True


@LTORCH["linalg_svd"].samples
def _(make):
    yield make(2, 4, 3), False
    yield make(3, 4), False
    yield (make(4, 3),)


@LTORCH["linalg_svdvals"].samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 4),)


@LTORCH["svd"].samples
def _(make):
    yield (make(2, 4, 3),)
    yield make(3, 4), False
    yield make(3, 4), True, False


@LTORCH["linalg_svd"].error_samples
def _(make):
    yield (make(3),)


@LTORCH["linalg_svdvals"].error_samples
def _(make):
    yield (make(3),)


@LTORCH["linalg_qr"].samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 3), "complete")
    yield (make(2, 3, 5),)


@LTORCH["qr"].samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 4), False)


@LTORCH["linalg_qr"].error_samples
def _(make):
    yield (make(3),)
    yield make(3, 3), "full"


@LTORCH["geqrf"].samples
def _(make):
    yield (make(2, 4, 3),)


@LTORCH["linalg_householder_product"].samples
def _(make):
    yield make(2, 4, 3), make(2, 3)


@LTORCH["ormqr"].samples
def _(make):
    yield make(4, 3), make(3), make(4, 2)
    yield make(4, 3), make(3), make(2, 4), False, True


@LTORCH["geqrf"].error_samples
def _(make):
    yield (make(3),)


@LTORCH["linalg_householder_product"].error_samples
def _(make):
    yield make(3, 4), make(3)


@LTORCH["ormqr"].error_samples
def _(make):
    yield make(4, 3), make(3), make(3, 2)


def _of_square(name: str, definite: bool, *options: str) -> None:
    """definite: samples are positive definite."""
    symbol = LTORCH[name]

    def well(make, *shape):
        x = make(*shape)
        return x @ x.mT + torch.eye(shape[-1]) if definite else x + 4 * torch.eye(shape[-1])

    @symbol.samples
    def _(make):
        yield (well(make, 3, 3),)
        yield (well(make, 2, 3, 3),)
        if "upper" in options:
            yield (well(make, 3, 3),), {"upper": True}
        if "UPLO" in options:
            yield (well(make, 3, 3),), {"UPLO": "U"}

    @symbol.error_samples
    def _(make):
        yield (make(3, 2),)


for _name in ("inv", "inv_ex", "det", "slogdet", "eig", "eigvals"):
    _of_square(f"linalg_{_name}", False)
_of_square("matrix_exp", False)
for _name in ("logdet", "slogdet", "linalg_ldl_factor", "linalg_ldl_factor_ex"):
    _of_square(_name, True)
for _name in ("cholesky", "cholesky_ex"):
    _of_square(f"linalg_{_name}", True, "upper")
for _name in ("eigh", "eigvalsh"):
    _of_square(f"linalg_{_name}", True, "UPLO")
