"""Arguments that tests call the operations of `thunder/ops/families/einsum.py` with."""

from __future__ import annotations

from thunder.ops.families.einsum import einsum


@einsum.samples
def _(make):
    yield "ij,jk->ik", make(2, 3), make(3, 4)
    yield "bij,bjk", make(2, 3, 4), make(2, 4, 5)
    yield "ii->i", make(3, 3)
    yield "ij->", make(2, 3)
    yield "...ij,...jk->...ik", make(2, 1, 3, 4), make(5, 4, 2)
    yield "bhqd,bhkd->bhqk", make(2, 2, 3, 4), make(2, 2, 5, 4)
    yield "i,j", make(3), make(4)
    yield "ij,kj,k->i", make(2, 3), make(4, 3), make(4)
    yield "ijk,jl->il", make(3, 4, 50), make(4, 5)
    yield "bi,bi,bi->b", make(3, 4), make(3, 4), make(3, 4)
    yield "bn,anm,bm->ba", make(2, 3), make(4, 3, 5), make(2, 5)
    yield make(2, 3), [0, 1], make(3, 4), [1, 2], [0, 2]


@einsum.error_samples
def _(make):
    yield "ij,jk->ik", make(2, 3), make(4, 4)
    yield "ij->ik", make(2, 3)
    yield "ij", make(2, 3, 4)
