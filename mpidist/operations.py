"""Reduction operations: which there are, for which dtypes they are defined, how they combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .errors import InvalidArgument, UnknownName, UnsupportedDtype

_NUMBERS = frozenset(("int", "float", "complex"))


@dataclass(frozen=True, eq=False)
class Op:
    """A reduction: an associative function of two arrays.

    Parameters
    ----------
    function : callable
        ``f(a, b)`` gives the combination of two arrays of one shape, elementwise, without changing
        them.
    commute : bool
        Whether ``f(a, b)`` equals ``f(b, a)``.  If not, only algorithms that combine in rank order
        serve it.
    name : str
        For messages.
    kinds : frozenset of str, optional
        The kinds of dtype ("bool", "int", "float", "complex") it is defined for; None for any.
    """

    function: Callable[..., Any]
    commute: bool = True
    name: str = "user"
    kinds: frozenset[str] | None = None
    builtin: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument(
                f"op function={self.function!r}: allowed is a function of two arrays"
            )

    def combine(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        """Store left ∘ right in `out`, which may be one of them."""
        if self.builtin:
            self.function(left, right, out=out)
            return
        left, right = left.view(), right.view()
        left.flags.writeable = right.flags.writeable = False  # they may be the users' inputs
        result = np.asarray(self.function(left, right))
        if result.shape != out.shape:
            raise InvalidArgument(
                f"op {self.name!r} returned shape {result.shape} for operands of shape "
                f"{out.shape}; "
                "it must combine elementwise"
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
}
"""The operations known by name.  On bool, and/or/xor are the logical ones."""


def find_op(op: str | Op | Callable[[Any, Any], Any], commute: bool | None = None) -> Op:
    """Give the operation that the caller means.

    Parameters
    ----------
    op : str, Op or callable
        A name of :data:`OPS`, an `Op`, or a function ``f(a, b)``.
    commute : bool, optional
        Needed with a function: whether it is commutative.
    """
    if isinstance(op, str):
        found = OPS.get(op)
        if found is None:
            raise UnknownName("op", op, OPS)
        return found
    if isinstance(op, Op):
        return op
    if not callable(op):
        raise InvalidArgument(
            f"op={op!r}: allowed are {', '.join(OPS)}, an Op or a function f(a, b)"
        )
    if commute is None:
        raise InvalidArgument(
            f"op={op!r}: say whether your function is commutative: Op(function, commute=True "
            "or False)"
        )
    return Op(op, commute=commute, name=getattr(op, "__name__", "user"))


def kind_of(dtype: np.dtype) -> str:
    """Give "bool", "int", "float", "complex" or "other" for a dtype, also of ml_dtypes."""
    known = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}.get(dtype.kind)
    if known:
        return known
    if dtype.name.startswith(("bfloat", "float")):
        return "float"
    if dtype.name.startswith(("int", "uint")):  # int4 and the like
        return "int"
    return "other"


def check_defined(op: Op, dtype: np.dtype, rank: int) -> None:
    """Raise `UnsupportedDtype` where `op` is not defined for `dtype`.

    A user's function is tried on two ones: inside of MPI it would be too late for an error.
    """
    if not op.builtin:
        _try(op, dtype, rank)
        return
    if op.kinds is None or kind_of(dtype) in op.kinds:
        return
    able = [name for name, known in OPS.items() if known.kinds and kind_of(dtype) in known.kinds]
    advice = f"defined for it: {', '.join(able)}" if able else "no named operation is"
    raise UnsupportedDtype(
        f"rank {rank}: op={op.name!r} is not defined for dtype {dtype}; {advice}"
    )


@lru_cache(maxsize=256)
def _outcome(op: Op, dtype: np.dtype) -> np.dtype | None:
    """Give the dtype that a user's function returns for two ones, None for a wrong shape."""
    one = np.ones(2, dtype)
    result = np.asarray(op.function(one, one.copy()))
    return result.dtype if result.shape == one.shape else None


def _try(op: Op, dtype: np.dtype, rank: int) -> None:
    if kind_of(dtype) == "other":
        return  # there is no one of it
    found = _outcome(op, dtype)
    if found is None:
        raise InvalidArgument(
            f"rank {rank}: op={op.name!r} must combine elementwise: its result has another shape"
        )
    if not np.can_cast(found, dtype, "same_kind"):
        raise UnsupportedDtype(
            f"rank {rank}: op={op.name!r} gives {found} for dtype {dtype}, which cannot hold it"
        )


def finish_mean(out: np.ndarray, size: int) -> None:
    """Turn a sum into a mean, in place."""
    np.true_divide(out, np.asarray(size, dtype=out.dtype), out=out)
