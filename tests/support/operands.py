"""Operands with all kinds of bits, and their sums by another way than the package's."""

import functools

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
NUMBERS = [*INTEGERS, *FLOATS, "complex64", "complex128"]
_LIMITS = {"float16": (-28, 17), "bfloat16": (-152, 129), "float32": (-152, 129)}


def any_numbers(dtype, count, terms, random):
    """Arrays whose elements at one place are of one magnitude, but for one, which has any bits.

    So there are subnormal numbers, sums beyond the largest number, infinities and NaN of any
    payload, but never two NaN at a place: numpy returns either of these.
    """
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"float{dtype.itemsize * 4}")
        return [x.view(dtype) for x in any_numbers(part, 2 * count, terms, random)]
    bits = [random.bytes(count * dtype.itemsize) for _ in range(terms)]
    arrays = [np.frombuffer(x, dtype).copy() for x in bits]
    if dtype.kind in "iu":
        return arrays
    exponents = random.integers(*_LIMITS.get(dtype.name, (-1080, 1025)), count)
    odd_one = random.integers(0, terms, count)
    for term, array in enumerate(arrays):
        with np.errstate(all="ignore"):
            numbers = np.ldexp(random.uniform(-1, 1, count), exponents)
            array[odd_one != term] = numbers.astype(dtype)[odd_one != term]
        with np.errstate(invalid="ignore"):  # of signaling NaN
            finite = np.abs(array.astype(np.float64)) < np.inf
        array[~finite & (odd_one != term)] = 1
    return arrays


def total(terms, divisor=0):
    """The sum of arrays in their order, or their mean."""
    dtype = terms[0].dtype
    with np.errstate(all="ignore"):
        if dtype.itemsize > 2 or dtype.kind in "iu":
            result = functools.reduce(np.add, terms)
            return result / dtype.type(divisor) if divisor else result
        wide = [x.astype(np.float32) for x in terms]
        if divisor:
            wide = [x / np.float32(divisor) for x in wide]
        return rounded(functools.reduce(np.add, wide), dtype)


def rounded(x, half):
    """Float32 as the nearest numbers of half precision, of two the even one; by search."""
    infinity = {"float16": 0x7C00, "bfloat16": 0x7F80}[half.name]
    numbers = np.arange(infinity + 1, dtype=np.uint16).view(half).astype(np.float64)
    numbers[-1] = 2 * numbers[-2] - numbers[-3]  # where the next number would be
    size = np.abs(x.astype(np.float64))
    above = np.minimum(np.searchsorted(numbers, size), infinity)
    below = np.maximum(above - 1, 0)
    up = numbers[above] - size < size - numbers[below]
    tie = numbers[above] - size == size - numbers[below]
    found = np.where(up | (tie & (above % 2 == 0)), above, below)
    payload = x.view(np.uint32) >> 13 & 0x3FF if half.name == "float16" else 0x40
    found = np.where(np.isnan(x), infinity | payload, found)
    sign = np.signbit(x).astype(np.uint16) << 15
    return (found.astype(np.uint16) | sign).view(half)
