"""Element types of tensors, by name; torch's and numpy's objects are mapped onto them by their own names, without
importing either.

`float32` is an instance of `dtype`; `to_dtype` turns anything that names an element type into one (a torch dtype, a
numpy dtype, a Python number type, a string). `thunder.ops.torch_types` has the way back to torch.
"""

from __future__ import annotations

BOOL, INTEGER, FLOAT, COMPLEX = range(4)


class dtype:  # a lower-case class, as torch and numpy spell it
    """One element type: full name, short name as traces print it, size in bytes, and the category that promotion orders
    by."""

    __slots__ = ("name", "shortname", "bytes", "category", "signed")

    def __init__(self, name: str, shortname: str, size: int, category: int, signed: bool = True):
        self.name, self.shortname, self.bytes, self.category, self.signed = name, shortname, size, category, signed

    def __repr__(self) -> str:
        return f"thunder.dtypes.{self.name}"

    def __reduce__(self):
        return to_dtype, (self.name,)

    @property
    def torch_name(self) -> str:
        return "bool" if self.name == "bool8" else self.name


bool8 = dtype("bool8", "b8", 1, BOOL, signed=False)
uint8 = dtype("uint8", "ui8", 1, INTEGER, signed=False)
uint16 = dtype("uint16", "ui16", 2, INTEGER, signed=False)
uint32 = dtype("uint32", "ui32", 4, INTEGER, signed=False)
uint64 = dtype("uint64", "ui64", 8, INTEGER, signed=False)
int8 = dtype("int8", "i8", 1, INTEGER)
int16 = dtype("int16", "i16", 2, INTEGER)
int32 = dtype("int32", "i32", 4, INTEGER)
int64 = dtype("int64", "i64", 8, INTEGER)
float8_e4m3fn = dtype("float8_e4m3fn", "f8_e4m3fn", 1, FLOAT)
float8_e4m3fnuz = dtype("float8_e4m3fnuz", "f8_e4m3fnuz", 1, FLOAT)
float8_e5m2 = dtype("float8_e5m2", "f8_e5m2", 1, FLOAT)
float8_e5m2fnuz = dtype("float8_e5m2fnuz", "f8_e5m2fnuz", 1, FLOAT)
float8_e8m0fnu = dtype("float8_e8m0fnu", "f8_e8m0fnu", 1, FLOAT, signed=False)
float4_e2m1fn_x2 = dtype("float4_e2m1fn_x2", "f4_e2m1fn_x2", 1, FLOAT)
bfloat16 = dtype("bfloat16", "bf16", 2, FLOAT)
float16 = dtype("float16", "f16", 2, FLOAT)
float32 = dtype("float32", "f32", 4, FLOAT)
float64 = dtype("float64", "f64", 8, FLOAT)
complex32 = dtype("complex32", "c32", 4, COMPLEX)
complex64 = dtype("complex64", "c64", 8, COMPLEX)
complex128 = dtype("complex128", "c128", 16, COMPLEX)

all_dtypes: tuple[dtype, ...] = tuple(v for v in list(globals().values()) if isinstance(v, dtype))
_BY_NAME = {d.name: d for d in all_dtypes} | {
    "bool": bool8,
    "float": float32,
    "double": float64,
    "half": float16,
    "long": int64,
    "int": int32,
}
_NUMBER_TYPES = {bool: bool8, int: int64, float: float32, complex: complex64}
# also remembers every foreign dtype object once it was translated
_KNOWN: dict = {**_NUMBER_TYPES, **{d: d for d in all_dtypes}}


def to_dtype(x) -> dtype | None:
    """The dtype that `x` names: a dtype, a torch or numpy dtype, bool/int/float/complex, a string, or None (returned as
    it is).

    Raises ValueError for anything else.
    """
    if x is None:
        return None
    try:
        return _KNOWN[x]
    except (KeyError, TypeError):
        pass
    name = x if isinstance(x, str) else getattr(x, "name", None) or str(x)
    known = _BY_NAME.get(name.rpartition(".")[2])
    if known is None:
        raise ValueError(f"{x!r} does not name a dtype; known: {', '.join(sorted(_BY_NAME))}")
    if not isinstance(x, str):
        _KNOWN[x] = known
    return known


def is_boolean(d: dtype) -> bool:
    return d.category == BOOL


def is_integer(d: dtype) -> bool:
    """True for the integer types, bool not among them."""
    return d.category == INTEGER


def is_float(d: dtype) -> bool:
    return d.category == FLOAT


def is_complex(d: dtype) -> bool:
    return d.category == COMPLEX


def is_inexact(d: dtype) -> bool:
    """Float or complex: the types that can carry a gradient."""
    return d.category >= FLOAT


_REAL = {complex32: float16, complex64: float32, complex128: float64}
_COMPLEX = {float16: complex32, bfloat16: complex64, float32: complex64, float64: complex128}


def real_of(d: dtype) -> dtype:
    """The type of the real part of a `d`; a real type is its own."""
    return _REAL.get(d, d)


def complex_of(d: dtype) -> dtype:
    """The complex type whose parts are `d`; a complex type is its own."""
    return _COMPLEX.get(d, d)


def promote(a: dtype, b: dtype) -> dtype:
    """The type two tensors of equal rank category meet in, as torch.promote_types gives it.

    Raises ValueError for pairs that PyTorch does not promote (unsigned types above 8 bits with anything but floats,
    float8 with anything else).
    """
    if a is b:
        return a
    if a.category < b.category:
        a, b = b, a
    if (_below_half(a) or _below_half(b)) and not (a is float4_e2m1fn_x2 and _wide_unsigned(b)):
        raise ValueError(f"Promotion for Float8 Types is not supported, attempted to promote {a.name} and {b.name}")
    if a.category in (INTEGER, COMPLEX) and (_wide_unsigned(a) or _wide_unsigned(b)):
        raise ValueError(
            f"Promotion for uint16, uint32, uint64 types is not supported, attempted to promote {a.name} and {b.name}"
        )
    if a.category == COMPLEX:
        return a if b.category <= INTEGER else promote_complex(a, b)
    if a.category == FLOAT:
        return a if b.category <= INTEGER else _promote_float(a, b)
    return a if b.category == BOOL else _promote_integer(a, b)


def _wide_unsigned(d: dtype) -> bool:
    return d.category == INTEGER and not d.signed and d.bytes > 1


def _below_half(d: dtype) -> bool:
    return d.category == FLOAT and d.bytes == 1


def promote_complex(a: dtype, b: dtype) -> dtype:
    parts = _promote_float(real_of(a), real_of(b)) if real_of(a) is not real_of(b) else real_of(a)
    return complex_of(parts)


def _promote_float(a: dtype, b: dtype) -> dtype:
    if a.bytes == b.bytes:
        return a if a is b else float32  # bfloat16 with float16
    return a if a.bytes > b.bytes else b


def _promote_integer(a: dtype, b: dtype) -> dtype:
    if a.signed == b.signed:
        return a if a.bytes > b.bytes else b
    unsigned, signed = (b, a) if a.signed else (a, b)
    return int16 if signed.bytes == 1 else signed
