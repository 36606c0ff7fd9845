"""Reduction operations: their names, the dtypes they are defined for, and their arithmetic.

All executors follow one rule of arithmetic: the result is that of numpy on the arrays of all ranks.
Integers wrap; "max" and "min" of NaN are NaN.  Sums, means and products of half precision are
accumulated in :func:`accumulator` and rounded once, unless partial results are sent between ranks;
a mean of half precision divides before it adds (:func:`divides_first`), so that no partial sum
exceeds the largest input except by rounding.  "exact_sum" and "exact_mean" round once, whatever
the dtype: no partial results are sent (:attr:`Op.grouping`).  Whether a library's own code follows
this rule is found by a trial on :func:`extreme_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from . import arguments
from .errors import InvalidArgument, UnknownName, UnsupportedDtype

_NUMBERS = frozenset(("int", "float", "complex"))
_EXACT = ("exact_sum", "exact_mean")
_EXACT_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
ANY, TREE, AT_ONCE = "any", "tree", "at_once"
"""Values of :attr:`Op.grouping`."""


@dataclass(frozen=True, eq=False)
class Op:
    """A reduction: an associative function of two arrays.

    Parameters
    ----------
    function : callable
        ``f(a, b)`` returns the elementwise combination of two arrays of one shape, and does not
        change them.
    commute : bool
        Whether ``f(a, b)`` equals ``f(b, a)``.  If not, only algorithms that combine in rank order
        serve the operation.
    name : str
        Name of the operation, for messages.
    kinds : frozenset of str, optional
        Kinds of dtype ("bool", "int", "float", "complex") that the operation is defined for; None
        for any.
    builtin : bool
        Whether it is one of :data:`OPS`: `function` is a ufunc, and MPI has the operation (for
        "mean", the sum).
    grouping : {"any", "tree", "at_once"}
        How the terms of an element may be grouped: any partial results may be sent between ranks;
        or those of the fixed tree, ``order="tree"``; or all ranks' terms must be combined at once,
        as those of "exact_sum".
    """

    function: Callable[..., Any]
    commute: bool = True
    name: str = "user"
    kinds: frozenset[str] | None = None
    builtin: bool = False
    grouping: str = ANY

    def __post_init__(self) -> None:
        arguments.function("op function", self.function, "two arrays")
        exact = self.name in _EXACT and self.kinds is not None
        allowed = (AT_ONCE,) if exact else (ANY, TREE)
        if self.grouping not in allowed:
            raise InvalidArgument(
                f"grouping={self.grouping!r} of op {self.name!r}: expected "
                f"{' or '.join(map(repr, allowed))}"
            )

    @property
    def identity(self) -> Hashable:
        """A key that is equal for all `Op` of one function with the same settings.

        It has the function's id only: a cache with this key must keep the function alive.
        """
        function = self.function
        if isinstance(function, MethodType):  # each attribute access makes a new method object
            who = id(function.__func__), id(function.__self__)
        else:
            who = id(function), 0
        return self.name, self.commute, self.builtin, self.grouping, *who

    @property
    def label(self) -> str:
        """The name in messages: ``'sum' in order='tree'``."""
        return f"{self.name!r}" + (f" in order={TREE!r}" if self.grouping == TREE else "")

    def combine(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Store left ∘ right in `out`, which may be one of the operands."""
        if self.builtin:
            self.function(left, right, out=out)
            return
        left, right = left.view(), right.view()
        left.flags.writeable = right.flags.writeable = False  # they may be the user's inputs
        result = np.asarray(self.function(left, right))
        if result.shape != out.shape:
            raise InvalidArgument(
                f"op {self.name!r} returned shape {result.shape} for operands of shape "
                f"{out.shape}; expected an elementwise function"
            )
        np.copyto(out, result, casting="same_kind")


_ORDERED = frozenset(("bool", "int", "float"))
_BITS = frozenset(("bool", "int"))

OPS: dict[str, Op] = {
    "sum": Op(np.add, name="sum", kinds=_NUMBERS, builtin=True),
    "mean": Op(np.add, name="mean", kinds=frozenset(("float", "complex")), builtin=True),
    "prod": Op(np.multiply, name="prod", kinds=_NUMBERS, builtin=True),
    "max": Op(np.maximum, name="max", kinds=_ORDERED, builtin=True),
    "min": Op(np.minimum, name="min", kinds=_ORDERED, builtin=True),
    "and": Op(np.bitwise_and, name="and", kinds=_BITS, builtin=True),
    "or": Op(np.bitwise_or, name="or", kinds=_BITS, builtin=True),
    "xor": Op(np.bitwise_xor, name="xor", kinds=_BITS, builtin=True),
    "exact_sum": Op(np.add, name="exact_sum", kinds=_NUMBERS, grouping=AT_ONCE),
    "exact_mean": Op(
        np.add, name="exact_mean", kinds=frozenset(("float", "complex")), grouping=AT_ONCE
    ),
}
"""The operations known by name.  On bool, and/or/xor are the logical ones."""
_ELSEWHERE = {  # names in torch.distributed, NCCL and MPI
    **{"avg": "mean", "average": "mean", "add": "sum", "product": "prod", "mul": "prod"},
    **{"band": "and", "land": "and", "bor": "or", "lor": "or", "bxor": "xor", "lxor": "xor"},
    **{"maximum": "max", "minimum": "min"},
}


_NAMED: dict[Any, Op] = {o.function: o for o in OPS.values() if o.builtin and o.name != "mean"}
_COMMUTING = (
    *(np.fmax, np.fmin, np.gcd, np.lcm, np.hypot, np.logaddexp, np.logaddexp2),
    *(np.logical_and, np.logical_or, np.logical_xor),
)
UFUNCS: dict[np.ufunc, Op] = _NAMED | {u: Op(u, name=u.__name__) for u in _COMMUTING}
"""Functions of numpy that are associative and commutative, as operations."""


def find_op(
    op: str | Op | Callable[[Any, Any], Any],
    commute: bool | None = None,
    order: str | None = None,
) -> Op:
    """Return the operation for a name of :data:`OPS`, an `Op` or a function ``f(a, b)``.

    Whether a function commutes must be given, unless it is one of :data:`UFUNCS`.  With the `order`
    "tree" its terms are grouped as a fixed tree.
    """
    if order is not None:
        return _as_tree(find_op(op, commute), order)
    if isinstance(op, str):
        found = OPS.get(op)
        if found is None:
            raise UnknownName("op", op, OPS, _ELSEWHERE)
        return found
    if isinstance(op, Op):
        return op
    if not callable(op):
        raise InvalidArgument(
            f"op={op!r}: expected one of {', '.join(OPS)}, a numpy ufunc, or Op(function, "
            "commute=True or False) of a function f(a, b)"
        )
    if isinstance(op, np.ufunc):
        if op in UFUNCS and commute is not False:
            return UFUNCS[op]
        _check_ufunc(op)
    if commute is None:
        raise InvalidArgument(
            f"op={op!r}: expected also whether the function is commutative: Op(function, "
            "commute=True or False)"
        )
    return Op(op, commute=commute, name=getattr(op, "__name__", "user"))


def _as_tree(op: Op, order: object) -> Op:
    """Return an operation whose terms are grouped as a fixed tree, `order` being "tree"."""
    if order != TREE:
        raise InvalidArgument(f"order={order!r}: expected None or {TREE!r}")
    if op.grouping == AT_ONCE:
        raise InvalidArgument(
            f"order={order!r}: op={op.name!r} has the same result in every order; expected None"
        )
    return replace(op, grouping=TREE)


def _check_ufunc(op: np.ufunc) -> None:
    """Raise InvalidArgument for a numpy ufunc that is no reduction, such as ``subtract``."""
    reduces = op in UFUNCS or getattr(np, op.__name__, None) is not op  # or not numpy's own
    if not reduces or (op.nin, op.nout, op.signature) != (2, 1, None):
        raise InvalidArgument(
            f"op=np.{op.__name__}: not an associative function of two elements; expected one of "
            f"numpy's {', '.join(u.__name__ for u in UFUNCS)}"
        )


@lru_cache(maxsize=256)
def kind_of(dtype: np.dtype) -> str:
    """Return "bool", "int", "float", "complex" or "other" for a dtype, also of ml_dtypes."""
    known = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}.get(dtype.kind)
    if known:
        return known
    if dtype.name.startswith(("bfloat", "float")):
        return "float"
    if dtype.name.startswith(("int", "uint")):  # int4 and the like
        return "int"
    return "other"


def is_numpys(dtype: np.dtype) -> bool:
    """Return whether a dtype is numpy's own, not one of ml_dtypes.

    ``dtype.isbuiltin`` does not show it: it is 0 for an unpickled dtype.
    """
    return dtype.char in np.typecodes["All"]


def check_defined(op: Op, dtype: np.dtype, rank: int) -> None:
    """Raise `UnsupportedDtype` if `op` is not defined for `dtype`.

    A user's function is tried on arrays of ones, and what it raises is passed on: inside an MPI
    call its errors could not be raised.
    """
    if op.grouping == AT_ONCE:
        _check_exact(op, dtype, rank)
        return
    if not op.builtin:
        _try(op, dtype, rank)
        return
    if op.kinds is None or kind_of(dtype) in op.kinds:
        return
    able = [name for name, known in OPS.items() if known.kinds and kind_of(dtype) in known.kinds]
    advice = f"expected one of {', '.join(able)}" if able else "no named operation serves it"
    raise UnsupportedDtype(
        f"rank {rank}: op={op.name!r} is not defined for dtype {dtype}; {advice}"
    )


def _check_exact(op: Op, dtype: np.dtype, rank: int) -> None:
    """Raise `UnsupportedDtype` if there is no correctly rounded sum, or mean, for `dtype`."""
    summed = kind_of(dtype) == "int" and "int" in (op.kinds or ())
    if summed or (dtype.name in _EXACT_DTYPES and dtype.isnative):
        return
    whole = "integers, " if "int" in (op.kinds or ()) else ""
    raise UnsupportedDtype(
        f"rank {rank}: op={op.name!r} is not defined for dtype {dtype}; expected {whole}"
        f"{', '.join(_EXACT_DTYPES)}, of this machine's byte order"
    )


def settled(op: Op, dtype: np.dtype) -> Op:
    """Return the operation that stands for `op` on `dtype`: of integers any sum is exact."""
    return OPS["sum"] if op.grouping == AT_ONCE and kind_of(dtype) == "int" else op


_outcomes: WeakKeyDictionary[Any, dict[np.dtype, np.dtype | None]] = WeakKeyDictionary()
"""Dtypes that users' functions returned for arrays of ones, kept as long as the functions."""


def _outcome(op: Op, dtype: np.dtype) -> np.dtype | None:
    """Return the dtype of the result of a user's function for two arrays of ones.

    None if the result has another shape than these.
    """
    try:
        known = _outcomes.setdefault(op.function, {})
    except TypeError:  # not hashable, or without weak references
        known = {}
    if dtype not in known:
        one = np.ones(2, dtype)
        result = np.asarray(op.function(one, one.copy()))
        known[dtype] = result.dtype if result.shape == one.shape else None
    return known[dtype]


def _try(op: Op, dtype: np.dtype, rank: int) -> None:
    if kind_of(dtype) == "other":
        return  # such a dtype has no number one
    try:
        found = _outcome(op, dtype)
    except TypeError as error:
        if not isinstance(op.function, np.ufunc):
            raise
        raise UnsupportedDtype(
            f"rank {rank}: op={op.name!r} is not defined for dtype {dtype}: {error}"
        ) from None
    if found is None:
        raise InvalidArgument(
            f"rank {rank}: op={op.name!r} returned another shape than that of its operands; "
            "expected an elementwise function"
        )
    if not np.can_cast(found, dtype, "same_kind"):
        raise UnsupportedDtype(
            f"rank {rank}: op={op.name!r} returned {found} for dtype {dtype}, which cannot hold it"
        )


# -- the rule of arithmetic -----------------------------------------------------------------------


def is_half(dtype: np.dtype) -> bool:
    """Return whether a dtype is a float of two bytes or less: float16, bfloat16, float8."""
    return dtype.itemsize <= 2 and kind_of(dtype) == "float"


def accumulator(op: Op, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which partial results of an operation on `dtype` are kept.

    It is float32 for "sum", "mean" and "prod" of half precision, else `dtype` itself.  Partial
    results that are sent between ranks have `dtype`.
    """
    wide = op.builtin and op.name in ("sum", "mean", "prod") and is_half(dtype)
    return np.dtype(np.float32) if wide else dtype


def divides_first(op: Op | None, dtype: np.dtype) -> bool:
    """Return whether `op` on `dtype` divides before it adds, as a mean of half precision does."""
    return is_mean(op) and op is not None and op.builtin and is_half(dtype)


def loses_nan(op: Op, dtype: np.dtype) -> bool:
    """Return whether MPI and NCCL may return a number for the "max" or "min" of NaN."""
    return op.name in ("max", "min") and kind_of(dtype) == "float"


def extreme_values(dtype: np.dtype) -> np.ndarray:
    """Return values on whose pairs a library's arithmetic shows where it differs from numpy's.

    They are about a dozen: the limits and their neighbours, and for floating dtypes also zeros of
    both signs, a subnormal number, infinities and NaN.
    """
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        low, high = int(limits.min), int(limits.max)
        middle = high // 2  # of unsigned numbers: the next one looks negative
        return np.array([low, low + 1, 0, 1, 2, 77, middle, middle + 1, high - 1, high], dtype)
    limit = np.finfo(dtype)
    parts = [0.0, -0.0, 1.0, -1 / 3, limit.tiny, limit.smallest_subnormal, limit.max, -limit.max]
    real = np.array([*parts, np.inf, -np.inf, np.nan], dtype)
    if dtype.kind == "f":
        return real
    with np.errstate(all="ignore"):
        return np.array([complex(a, b) for a in real.real[2:] for b in real.real[3::3]], dtype)


def is_sum(op: Op | None) -> bool:
    """Return whether an operation is "sum" or "mean"."""
    return op is not None and op.builtin and op.name in ("sum", "mean")


def is_mean(op: Op | None) -> bool:
    """Return whether a result is divided by the number of ranks: of "mean" and "exact_mean"."""
    if op is None:
        return False
    return op.name == ("mean" if op.builtin else "exact_mean") and op.kinds is not None


def division(total: np.ndarray, size: int) -> Callable[[], Any]:
    """Return a function without arguments that divides `total` by `size` in place, for a mean."""
    # An array of the dtype: a Python number takes numpy 0.5 µs instead of 0.2 for a short array.
    return partial(np.true_divide, total, np.asarray(size, total.dtype), total)


def divide_half(x: np.ndarray, size: int, out: np.ndarray) -> None:
    """Store `x / size` in `out`, in half precision; `size` need not be exact in half precision."""
    divisor = np.float32(size)
    np.true_divide(x, divisor, out=out, dtype=np.float32, casting="unsafe")


def widen(half: np.ndarray, out: np.ndarray, divisor: int = 0) -> None:
    """Store an array of half precision in `out`, of float32, divided by `divisor` if not 0."""
    np.copyto(out, half)
    if divisor:
        np.true_divide(out, np.float32(divisor), out)


def narrow(value: np.ndarray, out: np.ndarray) -> None:
    """Store an array of float32 in `out`, of half precision, rounded to nearest, ties to even.

    Values that are too large become infinite.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(out, value, casting="unsafe")
