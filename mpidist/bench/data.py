"""The numbers that travel: small whole numbers, whose sums are exact in every dtype."""

from __future__ import annotations

import numpy as np

from ..errors import InvalidArgument
from ..operations import Op, divides_first, division, find_op, kind_of

SPAN = 251
_PERIOD = 65521  # a prime: no block's length is a multiple of it


def find_dtype(name: str) -> np.dtype:
    """Give the dtype of a name, those of ml_dtypes included.

    Raises
    ------
    InvalidArgument
        If there is none, or it is none of numbers or bool.
    """
    try:
        dtype = np.dtype(name)
    except TypeError:
        try:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError, TypeError):
            dtype = np.dtype(object)
    if kind_of(dtype) == "other":
        raise InvalidArgument(
            f"dtype {name!r}: allowed are bool, int8 … int64, uint8 … uint64, float16, float32, "
            "float64, complex64, complex128 and those of ml_dtypes (bfloat16), if it is installed"
        )
    return dtype


def span(dtype: np.dtype, size: int, op: str) -> int:
    """Give how many different numbers may occur so that `op` over the ranks is exact in `dtype`."""
    kind = kind_of(dtype)
    if kind == "bool" or op == "prod":
        return 2
    if kind == "int":  # sums that overflow wrap around, everywhere alike
        return min(SPAN, 2 ** (8 * dtype.itemsize - 1) - 1)
    whole = 2 ** (1 + mantissa_bits(dtype))
    step = size if divides_first(find_op(op), dtype) else 1  # see `sequence`
    return max(2, min(SPAN, whole // (size * step) + 1))


def mantissa_bits(dtype: np.dtype) -> int:
    """Give the bits of a floating-point number's fraction."""
    try:
        return int(np.finfo(dtype).nmant)
    except ValueError:  # numpy does not know those of ml_dtypes
        import ml_dtypes

        return int(ml_dtypes.finfo(dtype).nmant)


def sequence(length: int, span: int, dtype: np.dtype, op: str, size: int) -> np.ndarray:
    """Return `length` pseudo-random whole numbers below `span`; 1 and 2 for products.

    For a mean of half precision, multiples of `size`: each is divided before they are added.
    """
    steps = np.arange(_PERIOD, dtype=np.uint64)
    mixed = (steps * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    numbers = (mixed >> np.uint64(9)) % np.uint64(span)
    if op == "prod" and dtype.kind != "b":
        numbers = numbers + np.uint64(1)
    if divides_first(find_op(op), dtype):
        numbers = numbers * np.uint64(size)
    return np.resize(numbers.astype(dtype), length)


def combine(op: Op, g: np.ndarray, size: int, length: int, stride: int) -> np.ndarray:
    """Give g[i] ∘ g[i + stride] ∘ …, one operand a rank, for the first `length` places."""
    result = g[:length].copy()
    for rank in range(1, size):
        op.combine(result, g[stride * rank : stride * rank + length], result)
    if op.name == "mean":
        division(result, size)()
    return result


def rounded_total(
    g: np.ndarray, size: int, length: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Give the least and the largest value that a sum of real numbers in g's dtype may have.

    Each of the p-1 additions rounds by at most half a unit in the last place of a partial sum, and
    no partial sum exceeds the sum of magnitudes, whatever the order (Higham 2002, §4.2).
    """
    windows = [g[stride * r : stride * r + length].astype(np.float64) for r in range(size)]
    exact = np.sum(windows, axis=0)
    magnitude = np.sum([np.abs(w) for w in windows], axis=0)
    slack = magnitude * max(size - 1, 1) * float(np.finfo(g.dtype).eps)
    return (exact - slack).astype(g.dtype), (exact + slack).astype(g.dtype)
