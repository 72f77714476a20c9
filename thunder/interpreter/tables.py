"""One table per Python version: opname -> canonical instructions.

A *row* is a tuple of `(canonical name, resolver)` pairs, or a function from the raw instruction to such a tuple when
the row depends on the argument or on the previous instruction. A *resolver* computes the canonical argument from the
raw instruction. The handlers of canonical instructions are in `instructions.py` and `building.py`; they know nothing of
versions. Jump arguments are byte offsets here, `decode.py` turns them into indices.

Each version's table is the one before it and its changes. Conventions of the canonical instruction set:

- Calls find two slots under their arguments: `NULL, callable` or `callable, NULL` or `callable, self`.
- A variable and its cell share one slot: `MAKE_CELL` puts a cell into it, `LOAD_FAST` of such a name gives the cell.
- `FOR_ITER` and `SEND` drop an exhausted iterator themselves; the version's own instructions for that are left out.
"""

from __future__ import annotations

import operator
import sys

ARITHMETIC = {
    "+": operator.add, "&": operator.and_, "//": operator.floordiv, "<<": operator.lshift, "@": operator.matmul,
    "*": operator.mul, "%": operator.mod, "|": operator.or_, "**": operator.pow, ">>": operator.rshift,
    "-": operator.sub, "/": operator.truediv, "^": operator.xor,
    "+=": operator.iadd, "&=": operator.iand, "//=": operator.ifloordiv, "<<=": operator.ilshift,
    "@=": operator.imatmul,
    "*=": operator.imul, "%=": operator.imod, "|=": operator.ior, "**=": operator.ipow, ">>=": operator.irshift,
    "-=": operator.isub, "/=": operator.itruediv, "^=": operator.ixor,
}  # fmt: skip
BINARY_SYMBOLS = (*ARITHMETIC, "[]")  # in the order of CPython's NB_* numbers
COMPARISONS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
COMPARE_SYMBOLS = tuple(COMPARISONS)


class Raw:
    """The raw instruction that the decoder stands at, with the parts of its code object that resolvers need."""

    __slots__ = ("code", "consts", "names", "variables", "arg", "after", "previous", "previous_jump")

    def __init__(self, code):
        self.code, self.consts, self.names = code, code.co_consts, code.co_names
        local = code.co_varnames
        self.variables = (*local, *(name for name in code.co_cellvars if name not in local), *code.co_freevars)
        self.arg = self.after = self.previous_jump = 0
        self.previous = ""  # opname of the instruction before, leaving out those without canonical instructions


# ---------------------------------------------------------------- resolvers


def nothing(raw):
    return None


def count(raw):
    return raw.arg


def constant(raw):
    return raw.consts[raw.arg]


def name(raw):
    return raw.names[raw.arg]


def half_name(raw):
    return raw.names[raw.arg >> 1]


def variable(raw):
    return raw.variables[raw.arg]


def first_variable(raw):
    return raw.variables[raw.arg >> 4]


def second_variable(raw):
    return raw.variables[raw.arg & 15]


def forward(raw):
    return raw.after + 2 * raw.arg


def backward(raw):
    return raw.after - 2 * raw.arg


def always(value):
    return lambda raw: value


def binary_operator(raw):
    symbol = BINARY_SYMBOLS[raw.arg]
    return ARITHMETIC[symbol], symbol


def comparison(shift):
    def resolve(raw):
        symbol = COMPARE_SYMBOLS[raw.arg >> shift]
        return COMPARISONS[symbol], symbol

    return resolve


# ---------------------------------------------------------------- rows


def same(names, resolver):
    """Rows of opcodes that are canonical instructions of the same name."""
    return {opname: ((opname, resolver),) for opname in names.split()}


def dropped(names):
    return dict.fromkeys(names.split(), ())


def call(raw):
    return (("CALL_KEYWORDS" if raw.previous == "KW_NAMES" else "CALL", count),)


def yield_value(raw):
    if raw.previous == "SEND":  # `yield from`: a thrown exception goes to the inner iterator first
        target = raw.previous_jump
        return (("YIELD_FROM", lambda raw: target),)
    return (("YIELD_VALUE", nothing),)


def global_name(raw):
    return (("LOAD_GLOBAL_CALLABLE" if raw.arg & 1 else "LOAD_GLOBAL", half_name),)


def attribute_name(raw):
    return (("LOAD_METHOD" if raw.arg & 1 else "LOAD_ATTR", half_name),)


def super_attribute(raw):
    load = ("LOAD_METHOD" if raw.arg & 1 else "LOAD_ATTR", lambda raw: raw.names[raw.arg >> 2])
    return (("LOAD_SUPER", lambda raw: raw.arg & 2), load)


def intrinsic_1(raw):
    return (INTRINSICS_1.get(raw.arg) or ("UNSUPPORTED", always("CALL_INTRINSIC_1")),)


def intrinsic_2(raw):
    return (("PREP_RERAISE_STAR", nothing) if raw.arg == 1 else ("UNSUPPORTED", always("CALL_INTRINSIC_2")),)


INTRINSICS_1 = {
    3: ("STOPITERATION_ERROR", nothing),
    5: ("UNARY", always((operator.pos, "+"))),
    6: ("LIST_TO_TUPLE", nothing),
}

V3_11 = {
    **same("LOAD_CONST", constant),
    **same("LOAD_FAST STORE_FAST DELETE_FAST LOAD_DEREF STORE_DEREF DELETE_DEREF MAKE_CELL", variable),
    **same(
        "LOAD_ATTR STORE_ATTR DELETE_ATTR STORE_GLOBAL DELETE_GLOBAL IMPORT_NAME IMPORT_FROM LOAD_METHOD",
        name,
    ),
    **same(
        "BUILD_LIST BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_SLICE BUILD_STRING BUILD_CONST_KEY_MAP LIST_EXTEND "
        "SET_UPDATE "
        "DICT_UPDATE LIST_APPEND SET_ADD MAP_ADD UNPACK_SEQUENCE UNPACK_EX RAISE_VARARGS SWAP COPY IS_OP CONTAINS_OP "
        "CALL_FUNCTION_EX MAKE_FUNCTION MATCH_CLASS",
        count,
    ),
    **same(
        "POP_TOP PUSH_NULL GET_ITER GET_LEN STORE_SUBSCR DELETE_SUBSCR RETURN_VALUE GET_YIELD_FROM_ITER BEFORE_WITH "
        "PUSH_EXC_INFO CHECK_EXC_MATCH POP_EXCEPT LOAD_BUILD_CLASS COPY_FREE_VARS "
        "MATCH_MAPPING MATCH_SEQUENCE MATCH_KEYS LIST_TO_TUPLE RETURN_GENERATOR "
        "RERAISE CHECK_EG_MATCH PREP_RERAISE_STAR",
        nothing,
    ),
    **dropped("NOP RESUME PRECALL"),
    "LOAD_CLOSURE": (("LOAD_FAST", variable),),
    "LOAD_GLOBAL": global_name,
    "LOAD_ASSERTION_ERROR": (("LOAD_CONST", always(AssertionError)),),
    "KW_NAMES": (("LOAD_CONST", constant),),
    "CALL": call,
    "YIELD_VALUE": yield_value,
    "DICT_MERGE": (("DICT_MERGE", lambda raw: (raw.arg, raw.arg + 2)),),
    "FORMAT_VALUE": (("FORMAT_VALUE", count),),
    "WITH_EXCEPT_START": (("WITH_EXCEPT_START", always(4)),),
    "BINARY_OP": (("BINARY", binary_operator),),
    "BINARY_SUBSCR": (("SUBSCRIPT", nothing),),
    "COMPARE_OP": (("COMPARE", comparison(0)),),
    "UNARY_NOT": (("NOT", nothing),),
    "UNARY_NEGATIVE": (("UNARY", always((operator.neg, "-"))),),
    "UNARY_INVERT": (("UNARY", always((operator.invert, "~"))),),
    "UNARY_POSITIVE": (("UNARY", always((operator.pos, "+"))),),
    "FOR_ITER": (("FOR_ITER", forward),),
    "SEND": (("SEND", forward),),
    "JUMP_FORWARD": (("JUMP", forward),),
    "JUMP_BACKWARD": (("JUMP", backward),),
    "JUMP_BACKWARD_NO_INTERRUPT": (("JUMP", backward),),
    "JUMP_IF_TRUE_OR_POP": (("COPY", always(1)), ("POP_JUMP_IF_TRUE", forward), ("POP_TOP", nothing)),
    "JUMP_IF_FALSE_OR_POP": (("COPY", always(1)), ("POP_JUMP_IF_FALSE", forward), ("POP_TOP", nothing)),
    **{f"POP_JUMP_FORWARD_IF_{k}": ((f"POP_JUMP_IF_{k}", forward),) for k in ("TRUE", "FALSE", "NONE", "NOT_NONE")},
    **{f"POP_JUMP_BACKWARD_IF_{k}": ((f"POP_JUMP_IF_{k}", backward),) for k in ("TRUE", "FALSE", "NONE", "NOT_NONE")},
}

# 3.12: methods load through LOAD_ATTR, comprehensions are inlined, intrinsics, slices without slice objects
V3_12 = V3_11 | {
    **same("POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE", forward),
    **same("LOAD_FAST_AND_CLEAR", variable),
    **same("CLEANUP_THROW", nothing),
    **dropped("END_FOR END_SEND"),
    "LOAD_FAST_CHECK": (("LOAD_FAST", variable),),
    "LOAD_ATTR": attribute_name,
    "LOAD_SUPER_ATTR": super_attribute,
    "RETURN_CONST": (("LOAD_CONST", constant), ("RETURN_VALUE", nothing)),
    "BINARY_SLICE": (("BUILD_SLICE", always(2)), ("SUBSCRIPT", nothing)),
    "STORE_SLICE": (("BUILD_SLICE", always(2)), ("STORE_SUBSCR", nothing)),
    "COMPARE_OP": (("COMPARE", comparison(4)),),
    "CALL_INTRINSIC_1": intrinsic_1,
    "CALL_INTRINSIC_2": intrinsic_2,
}

# 3.13: super-instructions, NULL above callables, keyword calls and function attributes get their own opcodes
V3_13 = V3_12 | {
    **same("TO_BOOL", nothing),
    **same("SET_FUNCTION_ATTRIBUTE", count),
    "LOAD_FAST_LOAD_FAST": (("LOAD_FAST", first_variable), ("LOAD_FAST", second_variable)),
    "STORE_FAST_LOAD_FAST": (("STORE_FAST", first_variable), ("LOAD_FAST", second_variable)),
    "STORE_FAST_STORE_FAST": (("STORE_FAST", first_variable), ("STORE_FAST", second_variable)),
    "CALL_KW": (("CALL_KEYWORDS", count),),
    "MAKE_FUNCTION": (("MAKE_FUNCTION", always(0)),),
    "DICT_MERGE": (("DICT_MERGE", lambda raw: (raw.arg, raw.arg + 3)),),
    "CONVERT_VALUE": (("CONVERT_VALUE", count),),
    "FORMAT_SIMPLE": (("FORMAT_VALUE", always(0)),),
    "FORMAT_WITH_SPEC": (("FORMAT_VALUE", always(4)),),
    "COMPARE_OP": lambda raw: (("COMPARE", comparison(5)), ("TO_BOOL", nothing))[: 1 + (raw.arg >> 4 & 1)],
}

# 3.14: borrowed loads, small integers, common constants, special methods for `with`, subscripts in BINARY_OP
SPECIAL_METHODS = ("__enter__", "__exit__", "__aenter__", "__aexit__")
COMMON_CONSTANTS = (AssertionError, NotImplementedError, tuple, all, any)
V3_14 = V3_13 | {
    **dropped("NOT_TAKEN"),
    "LOAD_FAST_BORROW": (("LOAD_FAST", variable),),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": (("LOAD_FAST", first_variable), ("LOAD_FAST", second_variable)),
    "LOAD_SMALL_INT": (("LOAD_CONST", count),),
    "LOAD_COMMON_CONSTANT": (("LOAD_CONST", lambda raw: COMMON_CONSTANTS[raw.arg]),),
    "LOAD_SPECIAL": (("LOAD_SPECIAL", lambda raw: SPECIAL_METHODS[raw.arg]),),
    "WITH_EXCEPT_START": (("WITH_EXCEPT_START", always(5)),),
    "CALL_FUNCTION_EX": (("CALL_FUNCTION_EX", always(1)),),
    "BINARY_OP": lambda raw: (("SUBSCRIPT", nothing),) if raw.arg == 26 else (("BINARY", binary_operator),),
    "POP_ITER": (("POP_TOP", nothing),),
}

# 3.15: an iterator has a second slot above it, genexprs take their iterator when they are called, more common
# constants, lazy imports
COMMON_CONSTANTS = (*COMMON_CONSTANTS, list, set, None, "", True, False, -1)


def iterator(raw):
    return (("GET_YIELD_FROM_ITER" if raw.arg else "GET_ITER", nothing), ("PUSH_NULL", nothing))


def imported(raw):
    return (
        ("UNSUPPORTED", always("lazy import")) if raw.arg & 1 else ("IMPORT_NAME", lambda raw: raw.names[raw.arg >> 2]),
    )


V3_15 = V3_14 | {
    "IMPORT_NAME": imported,
    "GET_ITER": iterator,
    "POP_ITER": (("POP_TOP", nothing), ("POP_TOP", nothing)),
    "RETURN_GENERATOR": lambda raw: (
        ("RETURN_GENERATOR" if raw.previous != "GET_ITER" else "RETURN_STARTED_GENERATOR", nothing),
    ),
}

VERSIONS = {(3, 11): V3_11, (3, 12): V3_12, (3, 13): V3_13, (3, 14): V3_14, (3, 15): V3_15}

# The instructions that the compiler emits to drop an exhausted iterator, at the target of FOR_ITER.
LOOP_ENDS = {
    (3, 11): (),
    (3, 12): ("END_FOR",),
    (3, 13): ("END_FOR", "POP_TOP"),
    (3, 14): ("END_FOR", "POP_ITER"),
    (3, 15): ("END_FOR", "POP_ITER"),
}

# Canonical instructions whose argument is a jump target.
JUMPS = frozenset(
    "JUMP FOR_ITER SEND YIELD_FROM POP_JUMP_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE".split()
)

VERSION = sys.version_info[:2]
TABLE = VERSIONS.get(VERSION, {})  # of a version that is not known nothing is decoded
LOOP_END = LOOP_ENDS.get(VERSION, ())
# where the iterator of a loop and of `yield from` stands on the stack
ITERATOR = -2 if VERSION >= (3, 15) else -1
# 3.11 counts jumps from the end of the instruction itself, later versions from the end of its inline caches.
JUMPS_FROM_CACHES = VERSION >= (3, 12)
