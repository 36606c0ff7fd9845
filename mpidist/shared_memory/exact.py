"""Correctly rounded sums and means of several arrays, in numpy: the same bits as by exact.c.

Each result is the exact sum of all terms of an element, divided by their number for a mean, and
rounded once: to nearest, ties to even.  Where doubles hold the sum, or its errors, it is computed
in arrays; the other elements are added one by one as whole numbers.  No array operation here has a
subnormal operand or result whose value matters, as a thread may take these for zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class _Format(NamedTuple):
    """A binary format: digits of a significand, exponent of the smallest number, its words."""

    digits: int
    least: int
    word: Any

    @property
    def sign(self) -> int:
        """The bit of the sign; of the bits below it, infinity has the largest that is no NaN."""
        return 1 << (8 * np.dtype(self.word).itemsize - 1)

    @property
    def infinity(self) -> int:
        """The bits of infinity: those of the exponent."""
        return self.sign - (1 << (self.digits - 1))


_FORMATS = {
    "float16": _Format(11, -24, np.uint16),
    "bfloat16": _Format(8, -133, np.uint16),
    "float32": _Format(24, -149, np.uint32),
    "float64": _Format(53, -1074, np.uint64),
}
_PARTS = {"complex64": "float32", "complex128": "float64"}
_BEHIND = np.int64((1 << 29) - 1)  # the digits of a double that a float has no room for
_NONE = 1 << 20  # above all exponents


def combine_exactly(terms: Sequence[np.ndarray], out: np.ndarray, divisor: int = 0) -> None:
    """Store the correctly rounded sum of arrays, or of its quotient by `divisor`, in `out`.

    The arrays are flat, of one length and dtype: float16, bfloat16, float32, float64, or a complex
    dtype, whose parts are summed apart.  `out` may be one of the `terms`.
    """
    if out.dtype.name in _PARTS:
        part = _PARTS[out.dtype.name]
        terms, out = [x.view(part) for x in terms], out.view(part)
    known = _FORMATS[out.dtype.name]
    words = [x.view(known.word) for x in terms]
    with np.errstate(all="ignore"):
        combine = _of_doubles if known.digits == 53 else _in_doubles
        result, doubtful = combine(known, terms, words, divisor)
    bits = result.view(known.word)
    for at in np.flatnonzero(doubtful):
        bits[at] = _exact_one(known, [int(word[at]) for word in words], divisor or 1)
    out[...] = result


def _exponents(known: _Format, words: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest exponent of each element's terms, and the smallest but for those of 0.

    Exponents are biased, as they are stored: 0 stands for a subnormal number.
    """
    largest = np.zeros(words[0].shape, np.int64)
    smallest = np.full(words[0].shape, _NONE)
    for word in words:
        size = word & known.word(known.sign - 1)
        exponent = (size >> known.word(known.digits - 1)).astype(np.int64)
        np.maximum(largest, exponent, out=largest)
        np.minimum(smallest, np.where(size == 0, _NONE, exponent), out=smallest)
    return largest, smallest


def _carries(count: int) -> int:
    """Return the digits by which a sum of `count` terms may be longer than they are."""
    return (count - 1).bit_length()


def _in_doubles(
    known: _Format, terms: Sequence[np.ndarray], words: Sequence[np.ndarray], divisor: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sums of floats of four bytes or two by doubles, and where they may be wrong."""
    largest, smallest = _exponents(known, words)
    doubtful = largest >= known.infinity >> (known.digits - 1)
    total = terms[0].astype(np.float64)
    for term in terms[1:]:
        total += term
    if divisor:
        total /= divisor
    carries = _carries(len(terms))
    if known.least < -24 or 40 + carries > 53:  # else all are multiples of 2^-24 below 2^16
        doubtful |= largest - smallest > 53 - known.digits - carries
        # A thread may take subnormal terms and results for zero: not of float16, which is converted
        # by other means.
        doubtful |= smallest == 0
        doubtful |= (np.abs(total) < 2.0 ** (known.least + known.digits)) & (total != 0)
    if known.digits < 24:
        # Rounded to odd, that is with a last digit of 1 if any behind it was: then the rounding to
        # half precision is the only one (Boldo and Melquiond 2008; exact.c).
        bits = total.view(np.int64)
        bits |= (bits & _BEHIND) + _BEHIND
        bits &= ~_BEHIND
    return total.astype(np.float32).astype(terms[0].dtype), doubtful


def _of_doubles(
    known: _Format, terms: Sequence[np.ndarray], words: Sequence[np.ndarray], divisor: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sums of doubles and their errors, and where they may be wrong."""
    largest, smallest = _exponents(known, words)
    carries = _carries(len(terms))
    doubtful = largest - smallest > 54 - 2 * carries
    doubtful |= largest > 2045 - carries  # no sum of smaller ones overflows
    doubtful |= smallest <= known.digits  # all errors are normal, too
    total, error = terms[0].copy(), np.zeros_like(terms[0])
    for term in terms[1:]:
        total, behind = _two_sum(total, term)
        error += behind
    both, behind = _two_sum(total, error)
    result = np.where(error == 0, total, both)  # not +0 added to -0
    if not divisor:
        return result, doubtful
    exponent = (result.view(np.uint64) & np.uint64(known.sign - 1)) >> np.uint64(52)
    # A quotient is q + c, c of the remainder: right if a little more and a little less than c round
    # to the same number.  The remainder of larger numbers is exact.
    doubtful |= ((exponent < 170) | (exponent > 1900)) & (result != 0)
    quotient = result / divisor
    product, rest = _two_product(quotient, float(divisor))
    rest = ((result - product) - rest + behind) / divisor
    above, below = quotient + rest * (1 + 2.0**-48), quotient + rest * (1 - 2.0**-48)
    doubtful |= above != below
    return np.where(rest == 0, quotient, above), doubtful


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded sum and its error (Knuth, TAOCP 2, 4.2.2, theorem B)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _two_product(a: np.ndarray, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the rounded product and its error (Dekker, Numerische Mathematik 18, 1971)."""
    high = a * 134217729.0
    high = high - (high - a)
    low, product = a - high, a * b
    first = b * 134217729.0
    first = first - (first - b)
    last = b - first
    return product, ((high * first - product) + high * last + low * first) + low * last


def _exact_one(known: _Format, terms: Sequence[int], divisor: int) -> int:
    """Return the bits of the correctly rounded sum of terms, given as bits, over `divisor`."""
    fraction, sign, infinity = known.digits - 1, known.sign, known.infinity
    total, infinities = 0, set()
    for bits in terms:
        size, minus = bits & (sign - 1), bits & sign
        if size > infinity:
            return infinity | 1 << (fraction - 1)
        if size == infinity:
            infinities.add(minus)
            continue
        exponent, significand = size >> fraction, size & ((1 << fraction) - 1)
        if exponent:
            significand = (significand | 1 << fraction) << (exponent - 1)
        total += -significand if minus else significand
    if len(infinities) == 2:
        return infinity | 1 << (fraction - 1)
    if infinities:
        return infinity | infinities.pop()
    if not total:
        return sign if all(bits == sign for bits in terms) else 0
    # In units of the smallest number, with 64 digits behind them for a quotient.
    number, rest = divmod(abs(total) << 64, divisor)
    unit = max(number.bit_length() - known.digits, 64)
    digits, behind = number >> unit, number & ((1 << unit) - 1)
    half = 1 << (unit - 1)
    if behind > half or (behind == half and (rest or digits & 1)):
        digits += 1
    # The first digit of a normal number, which is not stored, adds 1 to the exponent.
    digits += (unit - 64) << fraction
    return min(digits, infinity) | (sign if total < 0 else 0)
