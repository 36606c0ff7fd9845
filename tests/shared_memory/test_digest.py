"""Digests of arrays: in compiled code and in numpy, and what they tell apart."""

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import pytest

from mpidist.shared_memory import compiled
from mpidist.shared_memory.digest import by_numpy, digest

compiled_code = pytest.param(
    lambda data: compiled.function("digest")(data.ctypes.data, data.nbytes),
    id="compiled",
    marks=pytest.mark.skipif(not compiled.runs_steps(), reason="needs a C compiler"),
)
FORMS = [compiled_code, pytest.param(by_numpy, id="numpy")]


def defined(data):
    """The digest as its docstring defines it."""
    sums, text = [0, 0, 0, 0], data.tobytes()
    for at in range(0, len(text), 8):
        word = int.from_bytes(text[at : at + 8].ljust(8, b"\0"), "little")
        for k, half in enumerate((word & 0xFFFFFFFF, word >> 32)):
            sums[k] += half
            sums[k + 2] += (at // 8 + 1) * half
    return tuple(total % 2**64 for total in sums)


def random_bytes(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_digest_has_the_sums_of_its_definition(form, start):
    for count in (*range(75), 1000, 4099, 8 * (1 << 14) + 3):
        data = random_bytes(count + start, count)[start:]
        assert form(data) == defined(data), count


@pytest.mark.parametrize("form", FORMS)
def test_digest_wraps_as_it_is_defined(form):
    data = np.full(3_000_001, 255, np.uint8)  # positions times halves exceed 2**64
    words, last = 375_000, 255
    positions = words * (words + 1) // 2
    half = 2**32 - 1
    expected = words * half + last, words * half
    expected += positions * half + (words + 1) * last, positions * half
    assert max(expected) > 2**64 and form(data) == tuple(total % 2**64 for total in expected)


@pytest.mark.parametrize("form", FORMS)
def test_digest_finds_every_flipped_bit(form):
    data = random_bytes(77)
    found = {form(data)}
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        found.add(form(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * data.size + 1


@pytest.mark.parametrize("form", FORMS)
def test_digest_finds_exchanged_words(form):
    """Also those that differ in few bits, far apart: a product with their distance is not lost."""
    pairs = [(0, 1), (0, 1 << 31), (0, 1 << 63), (1 << 32, 1), (0x3F8000003F800000, 1 << 62)]
    pairs += [(a | a << 32, b | b << 32) for a, b in ((0x3F800000, 0x40000000), (0, 1 << 31))]
    for distance in (1, 2, 3, 4, 8, 64, 1 << 9, 1 << 16):
        for one, other in pairs:
            words = np.zeros(distance + 1, np.uint64)
            words[0], words[distance] = one, other
            before = form(words.view(np.uint8))
            words[0], words[distance] = other, one
            assert form(words.view(np.uint8)) != before, (distance, one, other)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "bool"]
)
def test_digest_is_of_the_bytes_whatever_dtype_and_strides(dtype):
    x = random_bytes(7 * 9 * 16, 1) if dtype != "bool" else random_bytes(7 * 9 * 16, 1) % 2
    x = x.view(np.dtype(dtype))[: 7 * 9].reshape(7, 9)
    expected = defined(np.frombuffer(x.tobytes(), np.uint8))
    assert digest(x) == expected
    for other in (np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2], x[::-1].copy()[::-1]):
        assert digest(other) == expected
    assert digest(x.T) != expected


def test_digest_of_nothing_and_of_a_scalar():
    assert digest(np.empty((3, 0))) == (0, 0, 0, 0)
    assert digest(np.array(5, np.int64)) == (5, 0, 5, 0)


def test_digest_tells_zeros_and_nans_by_their_bits():
    zeros = np.zeros(3), np.array([0.0, -0.0, 0.0]), np.array([0.0, 0.0, -0.0])
    nans = np.full(3, 0x7FF8 << 48, np.uint64)
    others = nans.copy()
    others[1] |= 7
    assert np.isnan(nans.view(float)).all() and np.isnan(others.view(float)).all()
    arrays = [*zeros, nans.view(float), others.view(float)]
    assert len({digest(x) for x in arrays}) == len(arrays)
    assert digest(nans.view(float)) == digest(nans.copy().view(float))
