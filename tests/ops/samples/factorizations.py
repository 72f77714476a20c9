"""Arguments that tests call the operations of `thunder/ops/families/factorizations.py` with."""

from __future__ import annotations

import torch

from thunder.ops import LTORCH
from thunder.ops.families.factorizations import (
    cholesky_inverse,
    cholesky_solve,
    geqrf,
    householder_product,
    linalg_qr,
    linalg_svd,
    matrix_power,
    old_cholesky,
    old_qr,
    old_svd,
    ormqr,
    svdvals,
)


@matrix_power.samples
def _(make):
    yield make(3, 3), 3
    yield make(2, 3, 3), 0
    for n in (1, 5, -2):
        yield make(3, 3) + 4 * torch.eye(3), n


@matrix_power.error_samples
def _(make):
    yield make(3, 2), 2


@old_cholesky.samples
def _(make):
    x = make(2, 3, 3)
    yield (x @ x.mT + torch.eye(3),)
    yield (x[0] @ x[0].mT + torch.eye(3), True)


def _factors(make):
    return torch.tril(make(2, 3, 3)) + 3 * torch.eye(3)


@cholesky_inverse.samples
def _(make):
    yield (_factors(make),)
    yield (_factors(make).mT.contiguous(), True)


@cholesky_solve.samples
def _(make):
    yield make(2, 3, 4), _factors(make)
    yield make(3, 4), _factors(make).mT.contiguous(), True


@linalg_svd.samples
def _(make):
    yield make(2, 4, 3), False
    yield make(3, 4), False
    yield (make(4, 3),)


@svdvals.samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 4),)


@old_svd.samples
def _(make):
    yield (make(2, 4, 3),)
    yield make(3, 4), False
    yield make(3, 4), True, False


@linalg_svd.error_samples
def _(make):
    yield (make(3),)


@svdvals.error_samples
def _(make):
    yield (make(3),)


@linalg_qr.samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 3), "complete")
    yield (make(2, 3, 5),)


@old_qr.samples
def _(make):
    yield (make(2, 4, 3),)
    yield (make(3, 4), False)


@linalg_qr.error_samples
def _(make):
    yield (make(3),)
    yield make(3, 3), "full"


@geqrf.samples
def _(make):
    yield (make(2, 4, 3),)


@householder_product.samples
def _(make):
    yield make(2, 4, 3), make(2, 3)


@ormqr.samples
def _(make):
    yield make(4, 3), make(3), make(4, 2)
    yield make(4, 3), make(3), make(2, 4), False, True


@geqrf.error_samples
def _(make):
    yield (make(3),)


@householder_product.error_samples
def _(make):
    yield make(3, 4), make(3)


@ormqr.error_samples
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
for _name in ("logdet", "linalg_ldl_factor", "linalg_ldl_factor_ex"):
    _of_square(_name, True)
for _name in ("cholesky", "cholesky_ex"):
    _of_square(f"linalg_{_name}", True, "upper")
for _name in ("eigh", "eigvalsh"):
    _of_square(f"linalg_{_name}", True, "UPLO")
